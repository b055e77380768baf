"""The rest of torch on the device: files, random numbers, pinning, autocast, tracers, compilers, profilers."""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import tempfile
import warnings

import pytest
import torch
from helpers.isolated import isolated
from helpers.npy import register
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close
from torch.utils import backend_registration
from torch.utils.flop_counter import FlopCounterMode

from customops.backend import BackendError, get_backend, register_backend
from customops.errors import UnsupportedError
from customops.testing import run_isolated

pytestmark = pytest.mark.process


on_device = isolated(register, imports=["helpers.inductor"])
alone = isolated()


# Files ------------------------------------------------------------------------------------------------------------


def saved(value, **options) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file, **options)
    file.seek(0)
    return file


@on_device
def test_save_and_load() -> None:
    d = torch.randn(3, 4, device="npy:1")
    value = {"all": d, "part": d[1:, ::2], "half": d.bfloat16(), "cpu": torch.ones(2)}
    for options in ({}, {"_use_new_zipfile_serialization": False}):
        for weights_only in (True, False):
            loaded = torch.load(saved(value, **options), weights_only=weights_only)
            for name, expected in value.items():
                assert loaded[name].device == expected.device
                assert torch.equal(loaded[name].cpu(), expected.cpu())
            loaded["all"].zero_()
            assert loaded["part"].abs().sum().item() == 0  # sharing is kept
    assert torch.load(saved(d), map_location="cpu").device.type == "cpu"
    assert torch.load(saved(d), map_location="npy:0").device == torch.device("npy:0")
    assert torch.load(saved(d), map_location={"npy:1": "npy:0"}).device.index == 0
    assert torch.load(saved(torch.ones(2)), map_location="npy").is_npy
    with pytest.raises(RuntimeError, match="npy"):
        torch.load(saved(d), map_location="npy:7")


@alone
def test_files_under_a_default_device() -> None:
    register_backend("npy")
    torch.set_default_device("npy")
    d = torch.arange(3.0)
    assert d.is_npy
    buffer = io.BytesIO()
    torch.save(d, buffer)
    buffer.seek(0)
    assert torch.load(buffer).tolist() == pickle.loads(pickle.dumps(d)).tolist() == [0, 1, 2]
    assert (d.remainder(2) + torch.add(d, 1, out=torch.empty(0)).sum()).tolist() == [6, 7, 6]


@on_device
def test_pickle_files_and_modules() -> None:

    d = torch.randn(3, device="npy")
    assert torch.equal(pickle.loads(pickle.dumps(d)), d)
    model = nn.Linear(2, 2).npy()
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "model.pt")
        torch.save(model.state_dict(), path)
        for options in ({}, {"mmap": True}):
            loaded = torch.load(path, **options)
            assert loaded["weight"].is_npy
            assert torch.equal(loaded["weight"], model.weight)
    parameter = torch.load(saved(model), weights_only=False).weight
    assert isinstance(parameter, nn.Parameter)
    assert parameter.is_npy
    assert parameter.requires_grad


@alone
def test_a_file_without_the_device() -> None:

    data = run_isolated(save_on_device).value
    with pytest.raises(RuntimeError, match=r"don't know how to restore data location.*npy:0"):
        torch.load(io.BytesIO(data))
    assert torch.load(io.BytesIO(data), map_location="cpu").tolist() == [0, 1, 2]


def save_on_device() -> bytes:
    register()
    return saved(torch.arange(3.0, device="npy")).getvalue()


# Random numbers ---------------------------------------------------------------------------------------------------


@on_device
def test_seeds() -> None:
    for draw in (
        lambda: torch.rand(3, device="npy"),
        lambda: torch.randn(3, device="npy"),
        lambda: torch.randint(9, (3,), device="npy"),
        lambda: torch.randperm(5, device="npy"),
        lambda: torch.empty(3, device="npy").uniform_(2, 3),
        lambda: torch.bernoulli(torch.full((9,), 0.5, device="npy")),
        lambda: torch.multinomial(torch.ones(9, device="npy"), 4),
        lambda: nn.functional.dropout(torch.ones(9, device="npy")),
        lambda: torch.rand_like(torch.ones(3, device="npy")),
        lambda: torch.normal(torch.zeros(3, device="npy"), 1.0),
        lambda: nn.functional.rrelu(-torch.ones(4, device="npy"), training=True),
    ):
        torch.manual_seed(5)
        cpu_state = torch.get_rng_state()
        first, second = draw(), draw()
        assert torch.equal(torch.get_rng_state(), cpu_state)  # the CPU's generator is another one
        torch.manual_seed(5)
        assert torch.equal(draw(), first)
        state = torch.npy.get_rng_state()
        assert torch.equal(draw(), second)
        torch.npy.set_rng_state(state)
        assert torch.equal(draw(), second)
        torch.npy.manual_seed_all(5)
        assert torch.equal(draw(), first)
    torch.manual_seed(7)
    expected = torch.rand(4)
    assert torch.equal(torch.rand(4, device="npy").cpu(), expected)  # the same algorithm


@on_device
def test_generators() -> None:
    backend = get_backend()
    npy = torch.npy
    assert backend.default_generator(1) is npy.default_generators[1]
    assert isinstance(backend.default_generator(), torch.Generator)
    own = torch.Generator().manual_seed(3)
    first = torch.rand(3, device="npy", generator=own)
    assert torch.equal(torch.rand(3, device="npy", generator=torch.Generator().manual_seed(3)), first)
    npy.manual_seed(11)
    assert npy.initial_seed() == 11
    npy.manual_seed_all(12)
    assert [g.initial_seed() for g in npy.default_generators] == [12, 12]
    a, b = torch.rand(2, device="npy:0"), torch.rand(2, device="npy:1")
    assert a.tolist() == b.tolist()  # each device has its own
    states = npy.get_rng_state_all()
    more = torch.rand(2, device="npy:1")
    npy.set_rng_state_all(states)
    assert torch.equal(torch.rand(2, device="npy:1"), more)
    with torch.random.fork_rng(devices=[0, 1], device_type="npy"):
        inside = torch.rand(2, device="npy:1")
    assert torch.equal(torch.rand(2, device="npy:1"), inside)
    assert isinstance(npy.seed(), int)


@on_device
def test_no_generator_of_the_devices_own() -> None:
    with pytest.raises(NotImplementedError, match="getNewGenerator"):
        torch.Generator(device="npy")


# Pinned memory ----------------------------------------------------------------------------------------------------


@on_device
def test_pinned_memory() -> None:
    x = torch.arange(6.0).view(2, 3).t()
    pinned = x.pin_memory()
    assert torch.equal(pinned, x)
    assert pinned.stride() == x.stride()
    assert pinned.is_pinned()
    assert pinned[1:].is_pinned()
    assert not x.is_pinned()
    assert pinned.pin_memory() is pinned
    rest = pinned[1:]
    del pinned
    assert rest.is_pinned()
    assert torch.equal(rest.to("npy", non_blocking=True).cpu(), rest)
    assert x.is_pinned("npy") is False


@on_device
def test_data_loaders() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(6.0), torch.arange(6))
    batches = list(torch.utils.data.DataLoader(data, batch_size=3, pin_memory=True))
    assert [x.tolist() for x, _ in batches] == [[0, 1, 2], [3, 4, 5]]
    assert all(x.is_pinned() and y.is_pinned() for x, y in batches)


@on_device
def test_memory_that_cannot_be_pinned() -> None:
    with pytest.raises(UnsupportedError, match="cannot be pinned"):
        torch.ones(2, device="npy").pin_memory()
    assert torch.ones(2, device="npy").is_pinned() is False
    for make in (torch.empty, torch.zeros, lambda *a, **k: torch.empty_strided((2,), (1,), **k)):
        with pytest.raises(UnsupportedError, match="cannot be pinned") as info:
            make(2, device="npy", pin_memory=True)
        assert ".pin_memory()" in info.value.fix
    with pytest.raises(NotImplementedError, match="getPinnedMemoryAllocator"):
        torch.empty(2, pin_memory=True)  # of the CPU: torch asks the device's C++ part


@alone
def test_pinning_switched_off() -> None:
    register_backend("npy", pin_memory=False)
    with pytest.raises(UnsupportedError, match="cannot be pinned") as info:
        torch.ones(2).pin_memory()
    assert info.value.fix == "register_backend(..., pin_memory=True)"
    assert torch.ones(2).is_pinned() is False


# The module and the accelerator -----------------------------------------------------------------------------------


@on_device
def test_the_module() -> None:
    npy = torch.npy
    assert torch.get_device_module("npy") is npy
    assert (npy.is_available(), npy.is_initialized(), npy.device_count()) == (True, True, 2)
    assert npy.get_device_name(1) == "npy:1"
    assert npy.synchronize() is None
    assert npy._is_in_bad_fork() is False
    assert npy.is_bf16_supported()
    assert {"memory_allocated", "set_device", "default_generators"} <= set(dir(npy))
    assert npy.__name__ == "torch.npy"
    assert torch._utils._get_device_index("npy:1") == 1
    with pytest.raises(AttributeError, match="nothing"):
        npy.nothing  # noqa: B018


@on_device
def test_the_accelerator() -> None:
    accelerator = torch.accelerator
    assert accelerator.is_available()
    assert accelerator.current_accelerator() == torch.device("npy")
    assert accelerator.device_count() >= 1
    assert accelerator.current_device_index() == 0
    accelerator.set_device_index(1)
    assert accelerator.current_device_index() == torch.npy.current_device() == 1
    assert str(torch.empty(1, device="npy").device) == "npy:1"
    with accelerator.device_index(0):
        assert str(torch.empty(1, device="npy").device) == "npy:0"
    assert torch.npy.current_device() == 1
    with pytest.raises(BackendError, match="there is no such device"):
        accelerator.set_device_index(2)
    assert accelerator.synchronize() is None
    assert accelerator.empty_cache() is None
    if hasattr(accelerator, "empty_host_cache"):  # from torch 2.13 on
        assert accelerator.empty_host_cache() is None
    stream = torch.Stream(device="npy")
    assert stream.device.type == "npy"
    assert torch.ones(2, device="npy").record_stream(stream) is None
    if hasattr(accelerator, "random"):  # from torch 2.15 on
        torch.npy.manual_seed(3)
        assert accelerator.random.initial_seed(1) == torch.npy.initial_seed() == 3
        assert torch.equal(accelerator.random.get_rng_state(0), torch.npy.get_rng_state(0))


# Autocast ---------------------------------------------------------------------------------------------------------


@on_device
def test_autocast() -> None:
    x, w = torch.randn(4, 8), torch.randn(8, 3)
    d, v = x.npy(), w.npy()
    assert torch.get_autocast_dtype("npy") == torch.bfloat16 or torch.get_autocast_dtype("npy") == torch.float16
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("npy", dtype):
            assert torch.is_autocast_enabled("npy")
            product = d @ v
            assert product.dtype == dtype
            assert (product + 1).dtype == dtype
            assert product.softmax(-1).dtype == torch.float32
            assert nn.functional.linear(d, v.t()).dtype == dtype
            assert (d.double() @ v.double()).dtype == torch.float64
            assert (x @ w).dtype == torch.float32  # not for the CPU
            with torch.autocast("npy", enabled=False):
                assert (d @ v).dtype == torch.float32
        assert_close(product.cpu(), x.to(dtype) @ w.to(dtype))
    assert (d @ v).dtype == torch.float32


@on_device
def test_autocast_kernels() -> None:
    backend = get_backend()
    d = torch.ones(2, device="npy")
    with torch.autocast("npy", torch.float16):
        assert d.cos().dtype == torch.float32
    own = backend.autocast_kernel("aten::cos")
    fixed = backend.autocast_kernel("aten::sin", torch.bfloat16)
    with torch.autocast("npy", torch.float16):
        assert d.cos().dtype == torch.float16
        assert d.sin().dtype == torch.bfloat16
    own.remove()
    fixed.remove()
    with torch.autocast("npy", torch.float16):
        assert d.cos().dtype == torch.float32
    doubled = backend.autocast_kernel("aten::mm", torch.float32)  # another opinion on one of the list
    with torch.autocast("npy", torch.float16):
        assert torch.mm(d[None], d[:, None]).dtype == torch.float32
    doubled.remove()
    with torch.autocast("npy", torch.float16):
        assert torch.mm(d[None], d[:, None]).dtype == torch.float16


@on_device
def test_training_under_autocast() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)).npy()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("npy", init_scale=4.0)
    before = model[0].weight.clone()
    x = torch.randn(3, 4, device="npy")
    with torch.autocast("npy", torch.float16):
        loss = model(x).float().square().mean()
    scaler.scale(loss).backward()
    assert model[0].weight.grad.dtype == torch.float32
    scaler.step(optimiser)
    scaler.update()
    assert scaler.get_scale() == 4.0
    assert not torch.equal(before, model[0].weight)


@alone
def test_dtypes_of_autocast() -> None:
    register_backend("npy", amp_dtypes=[torch.bfloat16])
    assert torch.npy.get_amp_supported_dtype() == [torch.bfloat16]
    with pytest.warns(UserWarning, match="float16"), torch.autocast("npy", torch.float16):
        assert not torch.is_autocast_enabled("npy")


# Modes, transforms, tracers, compilers ----------------------------------------------------------------------------


def model(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w).relu().sum(0) + torch.ones(3, device=x.device)


@on_device
def test_fake_tensors() -> None:
    with FakeTensorMode() as mode:
        x = torch.empty(2, 4, device="npy:1")
        y = model(x, torch.empty(4, 3, device="npy:1"))
        assert (y.device, y.shape) == (torch.device("npy:1"), (3,))
        with pytest.raises(RuntimeError, match="npy"):
            x + torch.empty(2, 4)
        assert torch.arange(3, device="npy").device == torch.device("npy:0")
    real = torch.randn(2, 4, device="npy")
    fake = mode.from_tensor(real)
    assert fake.device == real.device
    assert torch._subclasses.fake_tensor.is_fake(fake)


@on_device
def test_tracers_and_counters() -> None:
    x, w = torch.randn(2, 4, device="npy"), torch.randn(4, 3, device="npy")
    for tracing_mode in ("real", "fake", "symbolic"):
        graph = make_fx(model, tracing_mode=tracing_mode)(x, w)
        assert "aten.mm.default" in graph.code
        assert_close(graph(x, w), model(x, w))
    with FlopCounterMode(display=False) as counter:
        model(x, w)
    assert counter.get_total_flops() == 2 * 2 * 4 * 3
    assert_close(torch.func.functionalize(lambda t: t.clone().add_(1).view(-1))(x), (x + 1).view(-1))


@on_device
def test_transforms() -> None:
    x, w = torch.randn(5, 2, 4), torch.randn(4, 3)
    d, v = x.npy(), w.npy()
    assert_close(torch.vmap(model, in_dims=(0, None))(d, v).cpu(), torch.vmap(model, in_dims=(0, None))(x, w))
    f = lambda t: (t.sin() * t).sum()  # noqa: E731
    assert_close(torch.func.grad(f)(d).cpu(), torch.func.grad(f)(x))
    assert_close(torch.func.hessian(f)(v[0]).cpu(), torch.func.hessian(f)(w[0]))
    ours, theirs = torch.func.jvp(f, (d,), (torch.ones_like(d),)), torch.func.jvp(f, (x,), (torch.ones_like(x),))
    assert_close([t.cpu() for t in ours], list(theirs))
    per_sample = torch.vmap(torch.func.grad(lambda w, x: model(x, w).sum()), in_dims=(None, 0))
    assert_close(per_sample(v, d).cpu(), per_sample(w, x))
    assert_close(torch.func.jacrev(torch.sin)(v[0]).cpu(), torch.diag(w[0].cos()))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if y.device.type == "npy":
            y = y + torch.arange(3, device=y.device)
        return y.relu().to(x.dtype)


@on_device
def test_compile() -> None:
    x = torch.randn(2, 4, device="npy")
    for backend in ("eager", "aot_eager"):
        for dynamic in (False, True):
            torch._dynamo.reset()
            net = Net().npy()
            compiled = torch.compile(net, backend=backend, fullgraph=True, dynamic=dynamic)
            for size in (2, 3):
                data = torch.randn(size, 4, device="npy", requires_grad=True)
                again = data.detach().clone().requires_grad_()
                got, expected = compiled(data), net(again)
                assert_close(got, expected)
                got.sum().backward()
                expected.sum().backward()
                assert_close(data.grad, again.grad)

    def moves(t):
        d = t.to("npy")
        return d.is_npy, d.cpu() + 1, torch.zeros(2, device="npy:1")

    is_npy, back, zeros = torch.compile(moves, backend="aot_eager", fullgraph=True)(x.cpu())
    assert is_npy
    assert_close(back, x.cpu() + 1)
    assert zeros.device.index == 1


@on_device
def test_export_and_jit() -> None:
    net, x = Net().npy(), torch.randn(2, 4, device="npy")
    exported = torch.export.export(net, (x,))
    assert_close(exported.module()(x), net(x))

    warnings.simplefilter("ignore")  # jit is deprecated
    traced = torch.jit.trace(nn.Linear(4, 3).npy(), x)
    assert traced(x).is_npy
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 3), nn.ReLU()).npy())
    assert_close(scripted(x), scripted[1](scripted[0](x)))


@pytest.mark.skipif(
    not hasattr(backend_registration, "_rename_device_type"),
    reason="before torch 2.13 the profiler crashes where any device was set up from Python",
)
@on_device
def test_profiler() -> None:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.NPY]
    with torch.profiler.profile(activities=activities) as profile:
        torch.ones(2, device="npy").cos()
    assert "aten::cos" in {event.key for event in profile.key_averages()}


# Processes --------------------------------------------------------------------------------------------------------


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def child_of_a_fork(queue, mine) -> None:
    d = torch.arange(3.0, device="npy")
    mine.fill_(9)
    queue.put([(d * 2).tolist(), mine.tolist()])


@on_device
def test_a_fork_goes_on() -> None:
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    mine = torch.ones(2, device="npy")
    process = context.Process(target=child_of_a_fork, args=(queue, mine))
    process.start()
    assert queue.get(timeout=60) == [[0, 2, 4], [9, 9]]
    process.join()
    assert mine.tolist() == [1, 1]


@on_device
def test_memory_is_not_shared() -> None:
    d = torch.ones(2, device="npy")
    assert not d.is_shared()
    for share in (d.share_memory_, torch.nn.Linear(1, 1).npy().share_memory, d.untyped_storage().share_memory_):
        with pytest.raises(UnsupportedError, match="is not shared with other processes"):
            share()
    assert torch.ones(2).share_memory_().is_shared()


@on_device
def test_the_accelerator_calls_what_the_module_has_by_then() -> None:
    torch.npy.synchronize = lambda device=None: calls.append(device)  # as a profiler does
    calls: list[object] = []
    torch.accelerator.synchronize()
    assert len(calls) == 1
