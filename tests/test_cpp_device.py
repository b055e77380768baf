"""The device of `examples/cpp_device`: what its C++ file registers works, and equals the CPU.

A device is registered once in a process and for good. So this file is two things: tests, and a script that builds and
registers the device and then runs each function marked with `on_device` in a forked process of its own, where it may
count bytes, set the seed or crash.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import json
import os
import pickle
import re
import runpy
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from customops import custom_op

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "cpp_device"

CHECKS: dict[str, Callable[[], None]] = {}


def on_device(check: Callable[[], None]) -> Callable[[dict[str, str]], None]:
    """A test that passes if the function did, in the process that has the device."""
    CHECKS[check.__name__] = check

    def test(outcomes: dict[str, str]) -> None:
        if outcomes[check.__name__]:
            pytest.fail(outcomes[check.__name__], pytrace=False)

    return test


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the extension is built, by the first process that needs it."""
    if not hasattr(os, "fork"):
        pytest.skip("needs os.fork")
    missing = python("import toy; print(*toy.missing_tools())").stdout.split()
    if missing:
        pytest.skip(f"needs {' and '.join(missing)}")
    return tmp_path_factory.mktemp("cpp_device")


@pytest.fixture(scope="module")
def outcomes(build: Path) -> dict[str, str]:
    """What was raised by each of CHECKS."""
    python(__file__, build)
    outcomes: dict[str, str] = json.loads((build / "outcomes.json").read_text())
    return outcomes


def python(*arguments: Any) -> subprocess.CompletedProcess[str]:
    """A run of Python that sees this package and the example; code, or a file and its arguments."""
    path = os.pathsep.join([str(ROOT), str(EXAMPLE), *filter(None, [os.environ.get("PYTHONPATH")])])
    code = [] if Path(str(arguments[0])).is_file() else ["-c"]
    command = [sys.executable, *code, *map(str, arguments)]
    env = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}  # torch has one accelerator
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    return run


def main(build: str) -> None:
    """The script: the outcomes of all checks, as a file in the directory of the build."""
    toy = importlib.import_module("toy")
    torch.set_num_threads(1)
    toy.register(build)
    # Loaded once, before the forks, which otherwise spend most of their time on it.
    importlib.import_module("torch._dynamo")
    assert_close(torch.zeros(1), torch.zeros(1))
    outcomes = {name: outcome(check) for name, check in CHECKS.items()}
    Path(build, "outcomes.json").write_text(json.dumps(outcomes))


def outcome(check: Callable[[], None]) -> str:
    """What a function raises, in a process of its own; "" if nothing."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        warnings.simplefilter("error")
        try:
            torch.manual_seed(0)
            check()
        except BaseException:
            os.write(write, traceback.format_exc()[-8000:].encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as lines:
        raised = lines.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return raised if status == 0 else f"{raised}\nended with {status}"


def counted(fn: Callable[[], Any]) -> dict[str, int]:
    """The operators that a function leaves to the CPU."""
    torch.toy.reset_fallback_counts()
    fn()
    return torch.toy.fallback_counts()


def equal(ours: Tensor, expected: Tensor) -> None:
    assert ours.device.type == "toy"
    assert_close(ours.cpu(), expected, rtol=0, atol=0, equal_nan=True, check_stride=False)


DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.uint8]
DTYPES += [torch.bool, torch.int8, torch.complex128]


def sample(dtype: torch.dtype, *size: int) -> Tensor:
    return torch.randn(size, dtype=torch.complex64 if dtype.is_complex else torch.float32).mul(3).to(dtype)


# -- memory and devices ------------------------------------------------------------------------


@on_device
def test_live_bytes() -> None:
    assert [torch.toy.memory_allocated(i) for i in range(2)] == [0, 0]
    x = torch.empty(256, device="toy")
    y = torch.empty(1000, dtype=torch.uint8, device="toy:1")
    view = x[10:]
    assert [torch.toy.memory_allocated(i) for i in range(2)] == [1024, 1000]
    del x
    assert torch.toy.memory_allocated(0) == 1024  # the view keeps it
    del view, y
    assert [torch.toy.memory_allocated(i) for i in range(2)] == [0, 0]


@on_device
def test_live_bytes_after_training() -> None:
    def train() -> None:
        net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1)).to("toy:1")
        optimizer = torch.optim.AdamW(net.parameters())
        for _ in range(3):
            net(torch.randn(5, 4, device="toy:1")).square().mean().backward()
            optimizer.step()

    train()
    assert [torch.toy.memory_allocated(i) for i in range(2)] == [0, 0]


@on_device
def test_current_device() -> None:
    assert torch.toy.current_device() == 0
    with torch.toy.device(1):
        assert torch.empty(1, device="toy").device == torch.device("toy:1")
        with torch.toy.device("toy:0"):
            assert torch.empty(1, device="toy").device.index == 0
        assert torch.empty(1, device="toy").device.index == 1
    with torch.toy.device_of(torch.empty(1, device="toy:1")), torch.toy.device_of(torch.empty(1)):
        assert torch.toy.current_device() == 1
    with pytest.raises(KeyError), torch.toy.device(1):
        raise KeyError
    assert torch.toy.current_device() == 0
    torch.toy.set_device(1)
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(torch.toy.current_device()))
    thread.start()
    thread.join()
    assert (seen, torch.toy.current_device()) == ([0], 1)  # each thread has its own
    torch.set_default_device("toy:0")
    assert torch.ones(2).device == torch.device("toy:0")


@on_device
def test_wrong_index() -> None:
    for use in [
        lambda: torch.empty(1, device="toy:2"),
        lambda: torch.empty_strided((1,), (1,), device="toy:2"),
        lambda: torch.ones(1).to("toy:2"),
        lambda: torch.ones(1).toy(2),
        lambda: torch.toy.set_device(2),
        lambda: torch.toy.memory_allocated(2),
        lambda: torch.toy.default_generator("toy:2"),
        lambda: torch.Generator(device="toy:2"),
        lambda: torch.accelerator.set_device_index(2),
    ]:
        with pytest.raises(RuntimeError, match="there is no toy:2: the last one is toy:1"):
            use()
    with pytest.raises(ValueError, match="expected a toy device, got cpu"):
        torch.toy.set_device("cpu")
    assert torch.toy.current_device() == 0


@on_device
def test_tensors_of_different_devices() -> None:
    x, y, z = torch.ones(2, device="toy:0"), torch.ones(2, device="toy:1"), torch.ones(2)
    for op in [torch.add, torch.sub, torch.mul, torch.dot, torch._foreach_add]:
        for other in [y, z]:
            with pytest.raises(RuntimeError, match="to be on the same device"):
                op(x, other) if op is not torch._foreach_add else op([x], [other])
    with pytest.raises(RuntimeError, match="to be on the same device"):
        torch.add(x, x, out=y)
    equal(x + torch.tensor(2.0), torch.full((2,), 3.0))  # a number may be on the CPU
    for op in [torch.add, torch.sub, torch.mul, torch.atan2]:
        equal(op(torch.tensor(2.0), y), op(torch.tensor(2.0), z))
        assert op(torch.tensor(2), y).device == y.device
    with pytest.raises(RuntimeError, match="to be on the same device"):
        z[torch.tensor([0], device="toy")]
    equal(x[torch.tensor([0])], torch.ones(1))


@on_device
def test_device_module() -> None:
    assert torch.get_device_module("toy") is torch.toy
    assert torch.toy.is_available()
    assert torch.toy.device_count() == torch.accelerator.device_count() == 2
    assert torch.accelerator.current_accelerator() == torch.device("toy")
    with torch.accelerator.device_index(1):
        assert torch.toy.current_device() == torch.accelerator.current_device_index() == 1
    torch.accelerator.synchronize()
    torch.accelerator.empty_host_cache()
    torch.toy.synchronize()
    x = torch.ones(2).toy(1)
    assert (x.is_toy, x.cpu().is_toy, x.device) == (True, False, torch.device("toy:1"))
    assert next(nn.Linear(1, 1).toy().parameters()).is_toy
    assert nn.utils.rnn.pack_sequence([torch.ones(2, 1)]).toy().data.is_toy
    assert torch.ones(2).untyped_storage().toy().device.type == "toy"
    torch.toy.register()  # nothing to do
    with pytest.raises(RuntimeError, match="has already been set"):
        torch.utils.rename_privateuse1_backend("another")


@on_device
def test_missing_tools() -> None:
    os.environ["PATH"] = ""
    with pytest.raises(RuntimeError, match=r"cannot be built without .* and ninja: install it"):
        torch.toy.load()


# -- tensors -----------------------------------------------------------------------------------


@on_device
def test_empty() -> None:
    for dtype in [*DTYPES, torch.float8_e4m3fn, torch.uint16, torch.complex32]:
        x = torch.empty(2, 3, dtype=dtype, device="toy:1")
        assert (x.shape, x.stride(), x.dtype, x.device) == ((2, 3), (3, 1), dtype, torch.device("toy:1"))
    assert torch.empty(2, 3, 4, 5, device="toy", memory_format=torch.channels_last).stride() == (60, 1, 15, 3)
    assert torch.empty(0, 3, device="toy:1").stride() == (3, 1)
    assert torch.empty(0, 3, device="toy:1").device.index == 1
    x = torch.empty_strided((2, 3), (1, 4), device="toy")
    assert (x.stride(), x.untyped_storage().nbytes()) == ((1, 4), 40)
    for wrong in [lambda: torch.empty(-1, device="toy"), lambda: torch.empty_strided((-1,), (1,), device="toy")]:
        with pytest.raises(RuntimeError, match="negative dimension"):
            wrong()


@on_device
def test_factories() -> None:
    for make in [
        lambda device: torch.zeros(2, 3, device=device),
        lambda device: torch.ones(3, dtype=torch.int8, device=device),
        lambda device: torch.full((2,), 1 + 2j, device=device),
        lambda device: torch.arange(5, device=device),
        lambda device: torch.eye(3, device=device),
        lambda device: torch.linspace(0, 1, 4, device=device),
        lambda device: torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=device),
        lambda device: torch.triu_indices(3, 4, device=device),
        lambda device: torch._efficientzerotensor(3, device=device).clone(),
    ]:
        equal(make("toy:1"), make("cpu"))
        assert make("toy:1").device.index == 1


@on_device
def test_copies() -> None:
    for dtype in DTYPES:
        x = sample(dtype, 4, 6)
        equal(x.toy(), x)
        equal(x.t()[1:].toy(), x.t()[1:])
        equal(x.toy().t()[1:].to("toy:1"), x.t()[1:])
        equal(x.to("toy:1").to("toy:0"), x)
        for other in [torch.float64, torch.complex64] if dtype.is_complex else [torch.float64, torch.int32, torch.bool]:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Casting complex values to real")
                equal(x.to("toy", other), x.to(other))
                equal(x.toy().to(other), x.to(other))
    x = torch.zeros(3, 4, device="toy")
    x.copy_(torch.arange(4))  # another dtype, another shape
    equal(x, torch.arange(4.0).expand(3, 4))
    y = torch.zeros(4)
    y.copy_(x[1])
    assert y.tolist() == [0, 1, 2, 3]
    x[:, 1] = -1
    equal(x, torch.tensor([0.0, -1, 2, 3]).expand(3, 4))
    assert x[0, 1].item() == -1
    assert x[0].tolist() == [0, -1, 2, 3]
    assert str(x[0]) == "tensor([ 0., -1.,  2.,  3.], device='toy:0')"
    row = torch.arange(4.0).toy()
    for overlapping in (lambda: row[1:].copy_(row[:-1]), lambda: row[:1].expand(3).copy_(row[1:])):
        with pytest.raises(RuntimeError, match="to a single memory location"):
            overlapping()
    row[:2].copy_(row[2:])
    assert row.tolist() == [2, 3, 2, 3]


@on_device
def test_conjugate_and_negative_views() -> None:
    x = sample(torch.complex64, 3, 2)
    for view in [
        lambda x: x.conj(),
        lambda x: x.conj().imag,  # a negative view
        lambda x: x.conj().t().imag[1:],
        lambda x: x.conj().conj(),
    ]:
        ours, expected = view(x.toy()), view(x)
        assert (ours.is_conj(), ours.is_neg()) == (expected.is_conj(), expected.is_neg())
        assert_close(ours.cpu(), expected.resolve_conj().resolve_neg())
        equal(ours.clone(), expected.clone())
        equal(ours.resolve_conj().resolve_neg(), expected.resolve_conj().resolve_neg())
        equal(ours.to("toy:1"), expected.resolve_conj().resolve_neg())
        equal(ours + 1, expected + 1)
        equal(ours - 1, expected - 1)
    ours, expected = x.toy(), x.clone()
    for y in [ours, expected]:
        y.conj().copy_(torch.full((3, 2), 1 + 2j))
        y.conj().imag[0] = 5
    equal(ours, expected)
    equal(torch.linalg.inv(x[:2].toy().conj()).mH, torch.linalg.inv(x[:2].conj()).mH.resolve_conj())


@on_device
def test_views() -> None:
    x = torch.arange(24.0)
    for view in [
        lambda x: x.as_strided((3, 2), (2, 5), 3),
        lambda x: x.view(4, 6)[1:3, ::2].t(),
        lambda x: x.view(2, 3, 4).permute(2, 0, 1).unflatten(0, (2, 2)),
        lambda x: x.unfold(0, 4, 3),
        lambda x: x.view(torch.int32),
        lambda x: x.view(torch.uint8).view(torch.float64),
        lambda x: x.view(12, 2).view(torch.complex64).squeeze(),
        lambda x: torch.view_as_complex(x.view(12, 2)),
        lambda x: torch.view_as_real(x.view(12, 2).view(torch.complex64)),
        lambda x: x.view(4, 6).diagonal().expand(2, 4),
        lambda x: x.view(6, 4).t().reshape(2, 12),
    ]:
        ours = x.toy()
        equal(view(ours), view(x))
        assert view(ours).stride() == view(x).stride()
    ours = x.toy()
    ours.view(4, 6)[1].unfold(0, 2, 2).fill_(7)
    expected = x.clone()
    expected[6:12] = 7
    equal(ours, expected)
    assert counted(lambda: ours.view(4, 6).t()[2:].unfold(1, 2, 1)) == {}
    with pytest.raises(RuntimeError, match="shape '\\[5, 5\\]' is invalid"):
        ours.view(5, 5)


@on_device
def test_set() -> None:
    x, y = torch.arange(6.0, device="toy:1"), torch.empty(0, device="toy:1")
    y.set_(x)
    assert y.data_ptr() == x.data_ptr()
    y.set_(x.untyped_storage(), 2, (2, 2), (1, 2))
    equal(y, torch.tensor([[2.0, 4.0], [3.0, 5.0]]))
    y.set_(x.untyped_storage(), 0, (10,), (1,))  # the storage grows, on its own device
    assert (x.untyped_storage().nbytes(), x.untyped_storage().device) == (40, torch.device("toy:1"))
    equal(x, torch.arange(6.0))
    y.set_()
    assert (y.numel(), y.device) == (0, torch.device("toy:1"))
    with pytest.raises(RuntimeError, match="different device"):
        y.set_(torch.ones(2).untyped_storage())


@on_device
def test_resize() -> None:
    x = torch.arange(4.0).to("toy:1")
    assert torch.toy.storage_resizes(x) == 0
    x.resize_(2, 4)
    assert torch.toy.storage_resizes(x) == 1
    assert (x.shape, x.device, torch.toy.memory_allocated(1)) == ((2, 4), torch.device("toy:1"), 32)
    equal(x[0], torch.arange(4.0))
    x.resize_(3)
    equal(x, torch.arange(3.0))
    x.resize_(1, 2, 2, 2, memory_format=torch.channels_last)
    assert x.stride() == (8, 1, 4, 2)
    assert torch.toy.storage_resizes(x) == 1  # it never shrinks
    x = torch.ones(2, device="toy")
    x[1:].resize_(3)  # from an offset
    assert x.untyped_storage().nbytes() == 16


@on_device
def test_storage_resize() -> None:
    x = torch.arange(4, dtype=torch.uint8).to("toy:1")
    storage = x.untyped_storage()
    storage.resize_(100)
    assert (storage.nbytes(), storage.device, torch.toy.memory_allocated(1)) == (100, torch.device("toy:1"), 100)
    equal(x, torch.arange(4, dtype=torch.uint8))
    storage.resize_(0)
    assert torch.toy.memory_allocated(1) == 0
    storage.resize_(4)
    assert torch.toy.storage_resizes(x) == 3


@on_device
def test_storage_of_our_own() -> None:
    storage = torch.UntypedStorage(12, device="toy:1")
    assert (storage.nbytes(), storage.device) == (12, torch.device("toy:1"))
    storage.fill_(7)
    assert (storage[3], storage.tolist()) == (7, [7] * 12)
    x = torch.empty(0, device="toy:1").set_(storage)
    assert torch.toy.storage_resizes(x) == 0  # raises for any StorageImpl but ours
    for tensor in [torch.ones(2, device="toy"), torch.ones(2).toy(), copy.deepcopy(x), x + x, x.new_empty(3)]:
        assert torch.toy.storage_resizes(tensor) == 0
    with pytest.raises(RuntimeError):
        torch.toy.storage_resizes(torch.ones(2))


# -- kernels -----------------------------------------------------------------------------------


@on_device
def test_add() -> None:
    for a in DTYPES:
        for b in DTYPES:
            x, y = sample(a, 3, 1), sample(b, 4)
            equal(x.toy() + y.toy(), x + y)
    x, y = torch.randn(3, 4), torch.randn(4, 3).t()
    ours = x.toy()
    assert counted(lambda: (ours + 1, ours + y.toy(), ours.add_(y.toy(), alpha=2))) == {}
    equal(ours, x + 2 * y)
    equal(x.toy() + 1, x + 1)
    equal(x.toy().int() + 1.5, x.int() + 1.5)
    equal(torch.add(x.bfloat16().toy(), 1.5), x.bfloat16() + 1.5)
    assert torch.add(x.bfloat16().toy(), 1.5).dtype == torch.bfloat16
    assert (x.toy() + y.toy()).stride() == (x + y).stride()
    out = torch.empty(0, dtype=torch.float64, device="toy")
    assert torch.add(x.toy(), y.toy(), out=out) is out
    equal(out, torch.add(x, y, out=torch.empty(0, dtype=torch.float64)))
    with pytest.raises(RuntimeError, match="result type Float can't be cast to"):
        x.int().toy().add_(x.toy())
    with pytest.raises(RuntimeError, match="single memory location"):
        torch.ones(1, device="toy").expand(3).add_(1)


@on_device
def test_abs() -> None:
    for dtype in set(DTYPES) - {torch.bool}:
        x = sample(dtype, 3, 4)
        equal(x.toy().abs(), x.abs())
        equal(x.t().toy().abs(), x.t().abs())
        if not dtype.is_complex:
            equal(x.toy().abs_(), x.abs())
    x = torch.randn(3)
    assert counted(lambda: x.toy().abs()) == {}
    out = torch.empty(3, device="toy:1")
    assert torch.abs(x.to("toy:1"), out=out) is out
    equal(out, x.abs())


@on_device
def test_fill() -> None:
    for dtype in [*DTYPES, torch.float8_e4m3fn, torch.uint16]:
        for value in [0, 1, 1.0]:
            expected = torch.empty(3, 4, dtype=dtype).fill_(value)
            ours = torch.empty(3, 4, dtype=dtype, device="toy")
            ours.t()[1:].fill_(value)
            ours[:, 0].fill_(value)
            equal(ours.view(torch.uint8), expected.view(torch.uint8))
    x = torch.ones(3, device="toy")
    assert counted(lambda: (x.zero_(), x.fill_(2))) == {}
    equal(x, torch.full((3,), 2.0))


@on_device
def test_quantize() -> None:
    warnings.filterwarnings("ignore", ".*quantized tensor creation functions")  # deprecated in torch
    x = torch.randn(3, 4, 5)
    for dtype in [torch.qint8, torch.quint8, torch.qint32]:
        for value in [x, x.permute(2, 0, 1)]:
            ours = torch.quantize_per_tensor(value.to("toy:1"), 0.1, 10, dtype)
            expected = torch.quantize_per_tensor(value, 0.1, 10, dtype)
            assert (ours.device, ours.dtype, ours.shape) == (torch.device("toy:1"), dtype, value.shape)
            assert (ours.q_scale(), ours.q_zero_point(), ours.qscheme()) == (0.1, 10, torch.per_tensor_affine)
            equal(ours.int_repr(), expected.int_repr())
            equal(ours.dequantize(), expected.dequantize())


@on_device
def test_attention() -> None:
    tensors = [torch.randn(2, 3, 5, 8) for _ in range(3)]
    mask = torch.randn(5, 5)

    def run(device: str, **options: Any) -> tuple[Tensor, list[Any]]:
        options = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in options.items()}
        inputs = [t.detach().to(device).requires_grad_() for t in tensors]
        out = F.scaled_dot_product_attention(*inputs, **options)
        (out * torch.linspace(0, 1, 8, device=device)).sum().backward()
        return out, [t.grad for t in inputs]

    for options in [{}, {"is_causal": True}, {"attn_mask": mask}, {"attn_mask": mask > 0}, {"scale": 0.3}]:
        ours, expected = run("toy:1", **options), run("cpu", **options)
        assert "OverrideableBackward" in type(ours[0].grad_fn).__name__
        for a, b in zip([ours[0], *ours[1]], [expected[0], *expected[1]], strict=True):
            assert a.device == torch.device("toy:1")
            assert_close(a.cpu(), b)
    inputs = [t.toy().requires_grad_() for t in tensors]
    F.scaled_dot_product_attention(*inputs).sum().backward()  # the gradient is a number, expanded
    assert inputs[2].grad.sum().item() == pytest.approx(2 * 3 * 5 * 8)
    used = counted(lambda: F.scaled_dot_product_attention(*[t.toy() for t in tensors]))
    assert used == {}


@on_device
def test_attention_that_our_kernel_cannot_do() -> None:
    q, k, v = (torch.randn(2, 4, 5, 8) for _ in range(3))
    mask = torch.randn(5, 5)
    for args, options in [
        ((q[0], k[0], v[0]), {}),
        ((q, k, v[..., :3]), {}),
        ((q, k[:, :2], v[:, :2]), {"enable_gqa": True}),
        ((q, k, v, mask.expand(4, 5, 5).contiguous()), {}),
        ((q, k, v.mT.contiguous().mT), {}),
        ((q, k[:1], v[:1]), {}),
        ((q[:0], k[:0], v[:0]), {}),
        ((q, k, v, mask.clone().requires_grad_()), {}),
    ]:
        expected = F.scaled_dot_product_attention(*args, **options)
        ours = [t.toy() for t in args]
        for t in [q, *ours]:
            t.requires_grad_()
        result = F.scaled_dot_product_attention(*ours, **options)
        assert "Overrideable" not in type(result.grad_fn).__name__
        assert_close(result.detach().cpu(), expected.detach())
    with pytest.raises(RuntimeError, match="same device"):
        F.scaled_dot_product_attention(q.toy(), k.toy(), v.toy(), mask)  # which is on the CPU
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        assert counted(lambda: F.scaled_dot_product_attention(q.toy(), k.toy(), v.toy()))


@on_device
def test_convolution() -> None:
    for net, size in [
        (nn.Conv2d(2, 4, 3, stride=2, padding=1), (3, 2, 7, 7)),
        (nn.Conv1d(4, 4, 3, bias=False, groups=2), (3, 4, 7)),
        (nn.ConvTranspose2d(2, 4, 3), (3, 2, 5, 5)),
    ]:
        x, ours = torch.randn(size, requires_grad=True), copy.deepcopy(net).to("toy:1")
        y = x.detach().to("toy:1").requires_grad_()
        expected, result = net(x), ours(y)
        expected.sin().sum().backward()
        result.sin().sum().backward()
        assert_close(result.cpu(), expected)
        pairs = zip([y, *ours.parameters()], [x, *net.parameters()], strict=True)
        for a, b in pairs:
            assert_close(a.grad.cpu(), b.grad)


# -- the fallback ------------------------------------------------------------------------------


@on_device
def test_fallback_is_counted() -> None:
    x, y = torch.randn(3, device="toy:1"), torch.randn(3, device="toy:1")
    index = torch.tensor([2, 0], device="toy:1")
    for name, fn, expected in [
        ("aten::sub.Tensor", lambda: x - y, lambda: x.cpu() - y.cpu()),
        ("aten::_foreach_add.List", lambda: torch._foreach_add([x], [y])[0], lambda: x.cpu() + y.cpu()),
        ("aten::index.Tensor", lambda: x[index], lambda: x.cpu()[index.cpu()]),
        (
            "aten::triu_indices",
            lambda: torch.triu_indices(3, 3, device="toy:1"),
            lambda: torch.triu_indices(3, 3),
        ),
        ("aten::cumsum.out", lambda: x.cumsum(0), lambda: x.cpu().cumsum(0)),
        ("aten::mul.out", lambda: x.clone().mul_(y), lambda: x.cpu() * y.cpu()),
        ("aten::nonzero", lambda: x.nonzero(), lambda: x.cpu().nonzero()),
        ("aten::topk.values", lambda: x.topk(2)[1], lambda: x.cpu().topk(2)[1]),
    ]:
        assert counted(fn) == {name: 1}
        equal(fn(), expected())
        assert fn().device == torch.device("toy:1")
    assert counted(lambda: (x - y, x - y)) == {"aten::sub.Tensor": 2}


@on_device
def test_fallback_writes_back() -> None:
    x, y = torch.randn(3, 4), torch.randn(4, 3)
    ours = x.toy()
    ours.t()[1:].mul_(y.toy()[1:])  # through a view
    x.t()[1:].mul_(y[1:])
    equal(ours, x)
    values, indices = torch.empty(0, device="toy"), torch.empty(0, dtype=torch.int64, device="toy")
    torch.sort(ours, out=(values, indices))
    equal(values, x.sort().values)
    equal(indices, x.sort().indices)
    first, second = torch.ones(2, device="toy"), torch.ones(2, device="toy")
    torch._foreach_mul_([first, second], 3)
    equal(first + second, torch.full((2,), 6.0))
    ours[torch.tensor([0, 2])] = 5.0
    x[torch.tensor([0, 2])] = 5.0
    equal(ours, x)


@on_device
def test_fallback_with_numbers() -> None:
    number = torch.tensor(2.5)
    for dtype in set(DTYPES) - {torch.bool}:
        for size in [(3,), ()]:
            x = sample(dtype, *size)
            for op in [
                lambda x: 2 - x,
                lambda x: 1.1 - x,
                lambda x: x - 1.1,
                lambda x: number.to(x.device) - x,
                lambda x: number - x,
                lambda x: x - number,
                lambda x: torch.where(x == x, 1, x),
                lambda x: torch.where(torch.tensor(True), x, x),
                lambda x: torch.gather(x, 0, torch.zeros_like(x, dtype=torch.int64)),
            ]:
                equal(op(x.to("toy:1")), op(x))
                assert op(x.to("toy:1")).device == torch.device("toy:1")
            if not dtype.is_complex:
                positive = x.abs().clamp(min=1)
                equal(5 // positive.to("toy:1"), 5 // positive)
                equal(positive.toy() // 2, positive // 2)


@on_device
def test_fallback_of_ops_of_others() -> None:
    library = torch.library.Library("test_cpp_device", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.define("tail(Tensor(a) x) -> Tensor(a)")
    library.impl("twice", lambda x: x * 2, "CPU")
    library.impl("tail", lambda x: x[1:], "CPU")
    library.define("count(Tensor x, Tensor(a!) n) -> ()")
    library.impl("count", lambda x, n: n.add_(x.numel()) and None, "CPU")
    x = torch.ones(2, device="toy:1")
    equal(torch.ops.test_cpp_device.twice(x), torch.full((2,), 2.0))
    assert counted(lambda: torch.ops.test_cpp_device.twice(x)) == {"test_cpp_device::twice": 1}
    n = torch.zeros((), device="toy:1")
    torch.ops.test_cpp_device.count(x, n)
    assert n.item() == 2
    with pytest.raises(NotImplementedError, match="_copy_from_and_resize"):  # torch cannot write to the CPU here
        torch.ops.test_cpp_device.count(x, torch.zeros(()))
    with pytest.raises(RuntimeError, match="tail"):  # a view of a copy would be no view
        torch.ops.test_cpp_device.tail(x)


# -- autograd ----------------------------------------------------------------------------------


@on_device
def test_backward_on_both_devices() -> None:
    x = torch.randn(3, 4)
    for device in ["toy:0", "toy:1"]:
        ours, expected = x.to(device).requires_grad_(), x.clone().requires_grad_()
        for y in [ours, expected]:
            y = y.abs() + y.t().reshape(3, 4) * y[0]
            (y.softmax(-1) - y.sin()).square().sum().backward()
        assert ours.grad.device == torch.device(device)
        assert_close(ours.grad.cpu(), expected.grad)


@on_device
def test_backward_across_devices() -> None:
    x, y = torch.randn(3, requires_grad=True), torch.randn(3, device="toy:1", requires_grad=True)
    z = x.to("toy:0").sin().to("toy:1") * y
    z.sum().backward()
    assert (x.grad.device.type, y.grad.device) == ("cpu", torch.device("toy:1"))
    assert_close(x.grad, x.cos().detach() * y.detach().cpu())
    assert_close(y.grad.cpu(), x.detach().sin())


@on_device
def test_backward_thread_of_a_device() -> None:
    seen: list[tuple[str, int]] = []

    class Spy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            seen.append((str(grad.device), torch.toy.current_device()))
            return grad

    for device in ["toy:0", "toy:1"]:
        Spy.apply(torch.ones(2, device=device, requires_grad=True)).sum().backward()
    assert seen == [("toy:0", 0), ("toy:1", 1)]  # the engine makes the device current


@on_device
def test_gradcheck() -> None:
    x = torch.randn(2, 3, dtype=torch.float64, device="toy:1", requires_grad=True)
    y = torch.randn(3, dtype=torch.complex128, device="toy:1", requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, y: (x + y).abs().sub(x), (x, y))
    assert torch.autograd.gradgradcheck(lambda x: x * x.sin() + x, (x,))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.last = nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last(self.layer(self.embed(tokens)))


@on_device
def test_training() -> None:
    def losses(device: str, **options: Any) -> list[float]:
        torch.manual_seed(0)
        model, tokens = Model(), torch.randint(11, (4, 6))
        model, tokens = model.to(device), tokens.to(device)
        optimizer, found = torch.optim.AdamW(model.parameters(), lr=0.01, **options), []
        for _ in range(5):
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            found.append(loss.item())
        return found

    expected = losses("cpu")
    assert expected[-1] < expected[0]
    assert losses("toy:0") == pytest.approx(expected, rel=1e-4)
    assert losses("toy:1", foreach=True) == pytest.approx(expected, rel=1e-4)


@on_device
def test_custom_op() -> None:
    @custom_op("test_cpp_device_ops::scale", mutates_args=())
    def scale(x: Tensor, by: float) -> Tensor:
        raise AssertionError("the kernel for other devices")

    ran = []

    @scale.register_kernel("toy")
    def scale_toy(x: Tensor, by: float) -> Tensor:
        ran.append(x.device)
        return x * by

    @scale.register_fake
    def scale_fake(x: Tensor, by: float) -> Tensor:
        return torch.empty_like(x)

    scale.register_autograd(lambda ctx, grad: (scale(grad, ctx.by), None), setup_context=keep_by)
    x = torch.randn(3, device="toy:1", requires_grad=True)
    y = scale(x, 2.5)
    y.backward(torch.arange(3.0, device="toy:1"))
    equal(y.detach(), x.detach().cpu() * 2.5)
    equal(x.grad, torch.arange(3.0) * 2.5)
    assert ran == [torch.device("toy:1")] * 2
    compiled = torch.compile(lambda x: scale(x, 2.0) + 1, backend="aot_eager", fullgraph=True)
    equal(compiled(x.detach()), x.detach().cpu() * 2 + 1)


def keep_by(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.by = inputs[1]


@on_device
def test_custom_op_without_a_kernel_for_us() -> None:
    @custom_op("test_cpp_device_ops::cpu_only", mutates_args=(), device_types="cpu")
    def cpu_only(x: Tensor) -> Tensor:
        assert x.device.type == "cpu"
        return x + 1

    x = torch.ones(2, device="toy:1")
    equal(cpu_only(x), torch.full((2,), 2.0))
    assert counted(lambda: cpu_only(x)) == {"test_cpp_device_ops::cpu_only": 1}


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


# -- the example itself ------------------------------------------------------------------------


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
