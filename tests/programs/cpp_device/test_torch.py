"""The device of `examples/cpp_device`: random numbers, pinning, processes, files, autocast, and the example itself."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cpp_device import (
    EXAMPLE,
    ROOT,
    Model,
    equal,
    main,
    on_device,
    python,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

pytestmark = pytest.mark.process


# -- random numbers ----------------------------------------------------------------------------


@on_device
def test_seed() -> None:
    for draw in [
        lambda device: torch.randn(4, device=device),
        lambda device: torch.rand(4, device=device),
        lambda device: torch.randint(9, (4,), device=device),
        lambda device: torch.randperm(6, device=device),
        lambda device: torch.empty(5, device=device).bernoulli_(0.5),
        lambda device: torch.ones(5, device=device).multinomial(3),
        lambda device: F.dropout(torch.ones(9, device=device)),
        lambda device: nn.init.trunc_normal_(torch.empty(3, device=device)),
    ]:
        drawn = []
        for device in ["cpu", "toy:0", "toy:1"]:
            torch.manual_seed(7)
            drawn.append(draw(device).cpu())
        assert_close(drawn[1], drawn[0], rtol=0, atol=0)
        assert_close(drawn[2], drawn[0], rtol=0, atol=0)


@on_device
def test_default_generators() -> None:
    torch.toy.manual_seed_all(3)
    first = torch.randn(3, device="toy:0").cpu()
    assert torch.equal(first, torch.randn(3, device="toy:1").cpu())  # each device has its own
    assert torch.toy.initial_seed() == 3
    states = torch.toy.get_rng_state_all()
    again = torch.randn(3, device="toy:0")
    torch.toy.set_rng_state_all(states)
    equal(torch.randn(3, device="toy:0"), again.cpu())
    with torch.toy.device(1):
        torch.toy.manual_seed(9)
    assert (torch.toy.default_generator(0).initial_seed(), torch.toy.default_generator(1).initial_seed()) == (3, 9)
    before = torch.toy.get_rng_state()
    with torch.random.fork_rng(devices=[0, 1], device_type="toy"):
        torch.randn(3, device="toy")
    assert torch.equal(torch.toy.get_rng_state(), before)


@on_device
def test_generators() -> None:
    expected = torch.Generator().manual_seed(5)
    for device in ["toy", "toy:1"]:
        generator = torch.Generator(device=device).manual_seed(5)
        assert generator.device.type == "toy"
        drawn = torch.randn(3, generator=generator, device=device)
        assert torch.equal(drawn.cpu(), torch.randn(3, generator=expected.manual_seed(5)))
        state, copied = generator.get_state(), generator.clone_state()
        following = torch.rand(3, generator=generator, device=device).cpu()
        generator.set_state(state)
        assert torch.equal(torch.rand(3, generator=generator, device=device).cpu(), following)
        assert torch.equal(torch.rand(3, generator=copied, device=device).cpu(), following)
    assert torch.Generator(device="toy:1").device == torch.device("toy:1")
    torch.randn(3, generator=expected, device="toy")  # of the CPU: accepted


@on_device
def test_checkpoint_restores_dropout() -> None:
    x = torch.ones(50, device="toy:1", requires_grad=True)
    y = torch.utils.checkpoint.checkpoint(lambda x: F.dropout(x, 0.5), x, use_reentrant=False)
    y.sum().backward()
    equal(x.grad, y.detach().cpu())


# -- pinned memory -----------------------------------------------------------------------------


@on_device
def test_pinned_memory() -> None:
    x = torch.arange(100)
    assert not x.is_pinned()
    pinned = x.pin_memory()
    assert pinned.is_pinned()
    assert pinned.pin_memory() is pinned
    assert pinned[10:].is_pinned()
    assert pinned.device.type == "cpu"
    assert torch.equal(pinned, x)
    assert torch.toy.pinned_memory_allocated() == 800
    assert torch.empty(3, pin_memory=True).is_pinned()
    assert torch.zeros(3, pin_memory=True).tolist() == [0, 0, 0]
    equal(pinned.to("toy:1", non_blocking=True), x)
    assert x.untyped_storage().pin_memory().is_pinned()
    del pinned
    assert torch.toy.pinned_memory_allocated() == 0
    assert not torch.ones(2, device="toy").is_pinned()
    with pytest.raises(RuntimeError, match="only memory of the CPU can be pinned"):
        torch.empty(2, device="toy", pin_memory=True)


@on_device
def test_data_loader() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(10), torch.randn(10, 2))
    for workers in [0, 1]:
        loader = torch.utils.data.DataLoader(data, batch_size=4, pin_memory=True, num_workers=workers)
        batches = [batch for batch, _ in loader]
        assert all(batch.is_pinned() for batch in batches)
        assert torch.cat(batches).tolist() == list(range(10))


@on_device
def test_copies_that_need_not_wait() -> None:
    x = torch.randn(3, 4)
    got = x.to("toy:1").to("cpu", non_blocking=True)
    assert got.is_pinned()
    assert torch.equal(got, x)
    x.toy().record_stream(torch.accelerator.current_stream())


# -- modules and other processes ---------------------------------------------------------------


@on_device
def test_parameters_stay_the_objects_they_are() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Tanh(), nn.Linear(4, 5, bias=False))
    model[2].weight = model[0].weight
    weight, tokens = model[0].weight, torch.arange(5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    here = copy.deepcopy(model)
    other = torch.optim.SGD(here.parameters(), lr=0.5)
    F.cross_entropy(model(tokens), tokens).backward()
    assert model.to("toy:1")[2].weight is model[0].weight is weight
    for _ in range(3):
        for net, step in ((model, optimizer), (here, other)):
            step.zero_grad()
            target = tokens.to(net[0].weight.device)
            F.cross_entropy(net(target), target.flip(0)).backward()
            step.step()
    assert_close(weight.detach().cpu(), here[0].weight.detach())
    assert model.cpu()[0].weight is weight
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        model.toy()[0].weight.data = torch.eye(2).to_sparse()


class OnDevice(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> Tensor:
        return torch.full((2,), float(i), device="toy:1")


@on_device
def test_tensors_of_other_processes() -> None:
    loader = torch.utils.data.DataLoader(OnDevice(), batch_size=2, num_workers=1, timeout=50)
    for expected, got in zip([[0, 0], [1, 1]], torch.cat(list(loader))[:2].tolist(), strict=True):
        assert got == expected
    context = torch.multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    x = torch.zeros(3, device="toy:1")
    queue.put((x, x[1:]))
    whole, rest = queue.get()
    rest += 1
    assert whole.tolist() == [0, 1, 1]  # views arrive as views, and the memory as a copy
    assert (x.tolist(), whole.device) == ([0, 0, 0], torch.device("toy:1"))


# -- files -------------------------------------------------------------------------------------


def through_file(thing: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, **options)


@on_device
def test_save_and_load() -> None:
    x = torch.randn(3, 4)
    for saved in [x.to("toy:1"), x.to("toy:1").t(), nn.Parameter(x.to("toy:1"))]:
        loaded = through_file(saved)
        assert (type(loaded), loaded.device, loaded.stride()) == (type(saved), torch.device("toy:1"), saved.stride())
        equal(loaded.detach(), saved.detach().cpu())
    assert through_file(x.to("toy:1"), map_location="cpu").device.type == "cpu"
    assert through_file(x.to("toy:1"), map_location="toy:0").device == torch.device("toy:0")
    assert through_file(x, map_location="toy:1").device == torch.device("toy:1")
    equal(through_file(x.toy(), weights_only=False), x)
    with torch.toy.device(1):
        assert through_file(x.to("toy:0")).device.index == 0
    y = x.toy()
    first, second = through_file([y, y[1:]])
    second.zero_()
    assert first[1:].abs().sum().item() == 0  # they share as they did
    with pytest.raises(RuntimeError, match="on TOY device 7 but"):
        through_file(x, map_location="toy:7")
    equal(pickle.loads(pickle.dumps(y)), x)
    equal(copy.deepcopy(y), x)
    model = Model().to("toy:1")
    other = Model().to("toy:1")
    other.load_state_dict(through_file(model.state_dict()))
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        equal(a.detach(), b.detach().cpu())


@on_device
def test_labels() -> None:
    x = torch.ones(2, device="toy:1")
    assert torch.toy.labels(x) == []
    torch.toy.add_label(x, "weights")
    torch.toy.add_label(x, "blocked 4x4")
    labels = ["blocked 4x4", "weights"]
    assert torch.toy.labels(x) == labels
    for saved in [through_file(x), through_file({"x": x})["x"], pickle.loads(pickle.dumps(x)), through_file([x, x])[1]]:
        assert torch.toy.labels(saved) == labels
        equal(saved, torch.ones(2))
    detached = x.detach()
    torch.toy.add_label(detached, "more")
    assert (torch.toy.labels(x), len(torch.toy.labels(detached))) == (labels, 3)  # a copy, and not the same set
    assert torch.toy.labels(x + x) == []  # what was computed is another tensor
    assert torch.toy.labels(through_file(x, map_location="cpu")) == []
    z = torch.ones(2, dtype=torch.complex64, device="toy").conj()
    torch.toy.add_label(z, "complex")
    assert (through_file(z).is_conj(), torch.toy.labels(through_file(z))) == (True, ["complex"])
    with pytest.raises(RuntimeError, match="a tensor on toy can have labels, this one is on cpu"):
        torch.toy.add_label(torch.ones(2), "weights")


# -- autocast ----------------------------------------------------------------------------------


@on_device
def test_autocast() -> None:
    net, x = nn.Linear(4, 3), torch.randn(2, 4)
    ours, y = copy.deepcopy(net).to("toy:1"), x.to("toy:1")
    with torch.autocast("toy", dtype=torch.bfloat16), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.is_autocast_enabled("toy")
        result = ours(y)
        assert result.dtype == torch.bfloat16
        assert_close(result.cpu(), net(x), rtol=0.02, atol=0.02)
        assert (y @ y.t()).dtype == torch.bfloat16
        assert (y + y).dtype == torch.float32  # ops that autocast says nothing of
        assert (y - y).dtype == torch.float32
        assert torch.mm(y.double(), y.t().double()).dtype == torch.float64  # as torch does
        assert torch.ones(2, 2, dtype=torch.int64, device="toy").t().dtype == torch.int64
        with torch.autocast("toy", enabled=False):
            assert ours(y).dtype == torch.float32
        result.float().sum().backward()
    assert ours.weight.grad.dtype == torch.float32
    assert_close(ours.weight.grad.cpu(), x.sum(0).expand(3, 4), rtol=0.02, atol=0.02)
    with torch.autocast("toy"):
        assert ours(y).dtype == torch.float16  # torch's default
    with pytest.warns(UserWarning, match="not supported"), torch.autocast("toy", dtype=torch.float64):
        assert ours(y).dtype == torch.float32


@on_device
def test_grad_scaler() -> None:
    net, scaler = nn.Linear(4, 1).toy(), torch.amp.GradScaler("toy", init_scale=64.0)
    optimizer, x = torch.optim.SGD(net.parameters(), lr=0.1), torch.randn(8, 4, device="toy")
    with torch.autocast("toy", dtype=torch.float16):
        loss = net(x).square().mean()
    before = net.weight.detach().clone()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(net.weight, before)


# -- streams and the profiler ------------------------------------------------------------------


@on_device
def test_streams_come_from_a_pool() -> None:
    streams = [torch.Stream(device="toy:1") for _ in range(9)]
    assert len({stream.stream_id for stream in streams}) == 8
    assert streams[0] == streams[8] != streams[1]
    assert torch.Stream(device="toy:0") not in streams

    def current() -> list[int]:
        return [torch.accelerator.current_stream(f"toy:{index}").stream_id for index in range(2)]

    assert current() == [0, 0]
    with streams[2]:
        assert current() == [0, streams[2].stream_id]
        x = torch.ones(3, device="toy:1", requires_grad=True)
        (x + x).sum().backward()
    assert current() == [0, 0]
    equal(x.grad, torch.full((3,), 2.0))
    streams[1].wait_stream(streams[0])
    event = streams[0].record_event()
    event.synchronize()
    assert event.query()
    assert streams[0].query()


@on_device
def test_the_profiler_names_what_the_device_does() -> None:
    x = torch.ones(3, device="toy")
    with torch.profiler.profile() as profile:
        x + x.sin()
        x.clone().cpu()
    counts = {event.key: event.count for event in profile.key_averages() if event.key.startswith("toy::")}
    assert counts["toy::add"] == counts["toy::copy"] == counts["toy::fallback: aten::sin.out"] == 1
    assert counts.keys() > {"toy::to_host", "toy::from_host"}


# -- the example itself ------------------------------------------------------------------------


@pytest.mark.full  # builds the source that the other tests of this folder build, by the other build file
@pytest.mark.skipif(
    shutil.which("cmake") is None or torch.version.cuda is not None,
    reason="needs cmake, and with a torch for CUDA all of its toolkit",
)
def test_what_cmake_builds_is_loaded(tmp_path: Path) -> None:
    for options in (
        ["-S", EXAMPLE, "-B", tmp_path, f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}", "-DCMAKE_BUILD_TYPE="],
        ["--build", tmp_path],
        ["--install", tmp_path, "--prefix", tmp_path / "installed"],
    ):
        done = subprocess.run(["cmake", *map(str, options)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    # No compiler is looked for.
    program = "import toy, torch; toy.missing_tools = None; toy.register({!r}); print(torch.ones(2, device='toy') + 1)"
    run = python(program.format(str(tmp_path / "installed")))
    assert run.stdout == "tensor([2., 2.], device='toy:0')\n"


def test_demo(build: Path) -> None:
    run = python(EXAMPLE / "demo.py", build)
    assert "the same losses" in run.stdout
    assert "60 calls of examples_cpp_device::scale on the device" in run.stdout
    assert "aten::mm.out" in run.stdout
    assert "still allocated: [0, 0]" in run.stdout


@on_device
def test_overhead() -> None:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(EXAMPLE / "overhead.py"), run_name="__main__")
    rows = [line.split() for line in printed.getvalue().splitlines()[1:]]
    assert [row[0] for row in rows] == ["empty", "view", "add", "copy", "sub", "mul"]
    assert all(float(us) > 0 for row in rows for us in row[1:3])


@on_device
def test_readme() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (EXAMPLE / "README.md").read_text(), flags=re.DOTALL)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(block, {})
    assert "device='toy:1') {'aten::" in printed.getvalue()
    assert printed.getvalue().rstrip().endswith("} 24")  # bytes of x and of its gradient


def test_page_quotes_the_source() -> None:
    page, source = (ROOT / "docs" / "cpp_device.md").read_text(), (EXAMPLE / "toy.cpp").read_text()
    quoted = re.findall(r"```cpp\n(.*?)```", page, flags=re.DOTALL)
    assert len(quoted) == 2
    assert all(block in source for block in quoted)


def test_beside_another_accelerator(build: Path) -> None:
    fake = "import torch, toy; torch.accelerator.current_accelerator = lambda **_: torch.device('cuda')"
    run = python(f"{fake}\ntry: toy.register()\nexcept RuntimeError as error: print(error, hasattr(torch, 'toy'))")
    assert "in place of cuda" in run.stdout
    assert run.stdout.endswith("False\n")


def test_nothing_is_registered_here() -> None:
    assert not hasattr(torch, "toy")


if __name__ == "__main__":
    main(sys.argv[1])
