"""Ops of customops on the device: kernels, fallback, gradients, autocast, vmap, compilers, checks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.isolated import isolated
from helpers.npy import register
from torch import Tensor
from torch.testing import assert_close

import customops
from customops import custom_op, opcheck
from customops.backend import get_backend

pytestmark = pytest.mark.process


on_device = isolated(register, imports=["helpers.inductor"])


def define(name: str, **options):
    """``scale(x, by)``: the CPU's kernel multiplies, and says so in `calls`."""
    calls: list[str] = []

    def scale(x: Tensor, by: float = 2.0) -> Tensor:
        calls.append(x.device.type)
        return x * by

    op = custom_op(f"t_backend::{name}", scale, mutates_args=(), **options)
    op.register_fake(lambda x, by: torch.empty_like(x))
    op.register_autograd(
        lambda ctx, grad: (grad * ctx.by, None), setup_context=lambda ctx, inputs, output: setattr(ctx, "by", inputs[1])
    )
    return op, calls


def with_kernel(op, calls):
    backend = get_backend()

    @op.register_kernel("npy")
    @backend.access()
    def _(x, by):
        calls.append("npy kernel")
        return backend.wrap(np.multiply(backend.numpy(x), np.float32(by)), x.device)


@on_device
def test_a_kernel_for_the_device() -> None:
    op, calls = define("kernel", device_types="cpu")
    with_kernel(op, calls)
    for index in (0, 1):
        d = torch.arange(3.0, device=f"npy:{index}")
        assert op(d).tolist() == [0, 2, 4]
        assert op(d, by=3.0).device.index == index
    assert set(calls) == {"npy kernel"}
    assert op(torch.ones(2)).tolist() == [2, 2]
    assert calls[-1] == "cpu"


@on_device
def test_results_that_are_not_on_the_device() -> None:
    """An array is refused, and `opcheck` finds a tensor of the CPU: torch lets an op return one."""
    for name, kernel, problem in (
        ("array", lambda x, by: np.ones(2), "backend.wrap(result)"),
        ("cpu", lambda x, by: x.cpu(), "Devices cpu and npy:0 are not equal"),
    ):
        op, _ = define(name, device_types="cpu")
        op.register_kernel("npy")(kernel)
        with pytest.raises(customops.errors.CustomOpsError) as info:
            opcheck(op, (torch.ones(2, device="npy"), 2.0))
        assert problem in str(info.value.__cause__ or info.value) + str(info.value)


@on_device
def test_a_kernel_for_all_devices_runs_there() -> None:
    op, calls = define("all")
    assert op(torch.ones(2, device="npy")).tolist() == [2, 2]
    assert calls == ["npy"]


@on_device
def test_no_kernel_follows_the_policy() -> None:
    backend = get_backend()
    op, calls = define("none", device_types="cpu")
    d = torch.ones(2, device="npy:1")
    backend.reset_fallback_counts()
    assert op(d).tolist() == [2, 2]
    assert op(d).device.index == 1
    assert calls == ["cpu", "cpu"]
    assert backend.fallback_counts()["t_backend::none"] == 2
    backend.fallback_policy = "warn"
    with pytest.warns(UserWarning, match="t_backend::none: no kernel for 'npy'"):
        op(d)
    with backend.no_fallback(), pytest.raises(NotImplementedError, match="t_backend::none") as info:
        op(d)
    assert "register_kernel('npy')" in info.value.fix
    backend.fallback_policy = "cpu"
    with_kernel(op, calls)
    with backend.no_fallback():
        op(d)
    assert calls[-1] == "npy kernel"


@on_device
def test_gradients() -> None:
    for index in (0, 1):
        op, calls = define(f"grad{index}", device_types="cpu")
        with_kernel(op, calls)
        d = torch.arange(3.0, device=f"npy:{index}", requires_grad=True)
        op(op(d), 3.0).sum().backward()
        assert d.grad.tolist() == [6, 6, 6]
        assert d.grad.device.index == index
        assert torch.func.grad(lambda x, op=op: op(x).sum())(d.detach()).tolist() == [2, 2, 2]
    plain, _ = define("grad_fallback", device_types="cpu")
    w = torch.ones(2, device="npy", requires_grad=True)
    plain(w, 5.0).sum().backward()
    assert w.grad.tolist() == [5, 5]


@on_device
def test_autocast() -> None:
    op, _ = define("autocast")
    op.register_autocast("npy", torch.float16)
    d = torch.ones(2, device="npy")
    with torch.autocast("npy", torch.float16):
        assert op(d).dtype == torch.float16
    assert op(d).dtype == torch.float32


@on_device
def test_vmap() -> None:
    op, calls = define("vmap", device_types="cpu")
    with_kernel(op, calls)
    op.register_vmap("broadcast_all")
    d = torch.arange(6.0, device="npy").view(3, 2)
    assert torch.vmap(op)(d).tolist() == (d * 2).tolist()
    assert torch.vmap(lambda x: op(x, 3.0), in_dims=1)(d).device.type == "npy"


@on_device
def test_compile() -> None:
    op, calls = define("compile", device_types="cpu")
    with_kernel(op, calls)
    for backend in ("eager", "aot_eager"):
        compiled = torch.compile(lambda x: op(x + 1).sin(), backend=backend, fullgraph=True)
        x = torch.arange(3.0)
        d = x.npy().requires_grad_()
        got = compiled(d)
        assert_close(got.cpu(), ((x + 1) * 2).sin())
        got.sum().backward()
        assert_close(d.grad.cpu(), ((x + 1) * 2).cos() * 2)
    assert "npy kernel" in calls
    exported = torch.export.export(Program(op), (torch.ones(2, device="npy"),))
    assert exported.module()(torch.ones(2, device="npy")).tolist() == [2, 2]


class Program(torch.nn.Module):
    def __init__(self, op) -> None:
        super().__init__()
        self.op = op

    def forward(self, x: Tensor) -> Tensor:
        return self.op(x)


@on_device
def test_opcheck() -> None:
    op, calls = define("opcheck", device_types="cpu")
    with_kernel(op, calls)
    for device in ("npy", "npy:1", "cpu"):
        for requires_grad in (False, True):
            result = opcheck(op, (torch.randn(3, device=device, requires_grad=requires_grad),))
            assert set(result.values()) <= {"SUCCESS"}
            expected = {"test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"}
            assert expected <= set(result)
    assert "npy kernel" in calls


@on_device
def test_opcheck_finds_what_is_wrong() -> None:
    backend = get_backend()
    op, _ = define("wrong", device_types="cpu")
    op.register_kernel("npy", backend.access()(lambda x, by: backend.wrap(backend.host(x).t() * by, x.device)))
    with pytest.raises(customops.errors.OpCheckError, match="promises what the operator does not return"):
        opcheck(op, (torch.randn(2, 3, device="npy"),))
    lib = torch.library.Library("t_backend_misplaced", "DEF")
    lib.define("f(Tensor x) -> Tensor")
    lib.impl("f", Misplaced.apply, "PrivateUse1")
    x = torch.randn(2, device="npy", requires_grad=True)
    with pytest.raises(customops.errors.OpCheckError, match="incorrectly registered"):
        opcheck(torch.ops.t_backend_misplaced.f.default, (x,), test_utils="test_autograd_registration")


class Misplaced(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


@on_device
def test_writing_and_bypass() -> None:
    backend = get_backend()

    @custom_op("t_backend::write", mutates_args=("out",), device_types="cpu")
    def write(x: Tensor, out: Tensor) -> None:
        out.copy_(x + 1)

    d, out = torch.ones(2, device="npy"), torch.zeros(2, device="npy")
    write(d, out)
    assert out.tolist() == [2, 2]
    assert out._version == 1

    @write.register_kernel("npy")
    @backend.access()
    def _(x, out):
        backend.numpy(out)[:] = 9

    write(d, out)
    assert out.tolist() == [9, 9]
    assert out._version == 2

    @custom_op("t_backend::fast", mutates_args=(), bypass=True)
    def fast(x: Tensor) -> Tensor:
        return x + 1

    assert fast(d).tolist() == [2, 2]
    assert fast(d).device.type == "npy"


@on_device
def test_a_factory() -> None:
    @custom_op("t_backend::make", mutates_args=(), device_types="cpu")
    def make(n: int, device: torch.device) -> Tensor:
        return torch.full((n,), 7.0, device=device)

    made = make(2, torch.device("npy:1"))
    assert made.device == torch.device("npy:1")
    assert made.tolist() == [7, 7]


@on_device
def test_ops_of_torch_library() -> None:
    @torch.library.custom_op("t_backend::theirs", mutates_args=(), device_types="cpu")
    def theirs(x: Tensor) -> Tensor:
        return x + 1

    d = torch.ones(2, device="npy")
    assert theirs(d).tolist() == [2, 2]
    backend = get_backend()
    theirs.register_kernel("npy", backend.access()(lambda x: backend.wrap(backend.host(x) + 5)))
    assert theirs(d).tolist() == [6, 6]
    lib = torch.library.Library("t_backend_raw", "DEF")
    lib.define("f(Tensor x) -> Tensor")
    triple = backend.access()(lambda x: backend.wrap(backend.host(x) * 3))
    torch.library.impl("t_backend_raw::f", "npy", lib=lib)(triple)
    assert torch.ops.t_backend_raw.f(d).tolist() == [3, 3]
    lib.define("g(Tensor x) -> Tensor")
    handle = backend.kernel("t_backend_raw::g")(lambda x: backend.wrap(backend.host(x) * 4))
    assert torch.ops.t_backend_raw.g(d).tolist() == [4, 4]
    handle.remove()
