"""quack: ops that write, called past the dispatcher."""

from __future__ import annotations

from types import ModuleType
from typing import Any, Optional

import pytest
import torch
from helpers.migration import Twins, message
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from customops.errors import SchemaError

pytestmark = pytest.mark.compile


def gemm(a: Tensor, b: Tensor, out: Tensor, c: Optional[Tensor] = None, beta: float = 1.0, swap: bool = False) -> None:
    product = (b.mT @ a.mT).mT if swap else a @ b
    out.copy_(product if c is None else product + beta * c)


def softmax_fwd(x: Tensor, out: Tensor, lse: Optional[Tensor]) -> None:
    torch._check(x.dim() == 2, lambda: "x must have two dimensions")
    out.copy_(x.softmax(-1))
    if lse is not None:
        lse.copy_(x.logsumexp(-1))


KINDS: list[tuple[Any, ...]] = [
    (gemm, ("out",), None, lambda n: (torch.randn(n, 3), torch.randn(3, 2), torch.zeros(n, 2), torch.ones(n, 2), 0.5)),
    (softmax_fwd, ("out", "lse"), "cpu", lambda n: (torch.randn(n, 4), torch.zeros(n, 4), torch.zeros(n))),
    (
        softmax_fwd,
        ("out", "lse"),
        ["cpu", "cuda"],
        lambda n: (torch.randn(n, 4), torch.zeros(4, n).mT, None),
    ),
]


@pytest.mark.parametrize(("fn", "writes", "devices", "arguments"), KINDS, ids=["gemm", "softmax", "softmax_of_two"])
def test_same_as_by_hand(
    helpers: ModuleType, by_hand: ModuleType, ns: str, fn: Any, writes: tuple[str, ...], devices: Any, arguments: Any
) -> None:
    ours = helpers.torch_library_op(f"{ns}::{fn.__name__}", mutates_args=writes, device_types=devices)(fn)
    theirs = by_hand.quack(f"{ns}_hand::{fn.__name__}", fn, mutates_args=writes, device_types=devices)
    theirs._op_of = getattr(getattr(torch.ops, f"{ns}_hand"), fn.__name__)
    Twins(ours, theirs, fn, arguments).check()
    assert ours.__wrapped__ is fn


def rmsnorm_fwd(
    x: Tensor,
    weight: Optional[Tensor],
    out: Tensor,
    bias: Optional[Tensor] = None,
    rstd: Optional[Tensor] = None,
    mean: Optional[Tensor] = None,
    residual: Optional[Tensor] = None,
    residual_out: Optional[Tensor] = None,
    eps: float = 1e-6,
    is_layernorm: bool = False,
) -> None:
    x = x if residual is None else x + residual
    inverse = (x.square().mean(-1) + eps).rsqrt()
    y = x * inverse[:, None] * (1 if weight is None else weight)
    out.copy_(y if bias is None else y + bias)
    for written, value in ((rstd, inverse), (residual_out, x)):
        if written is not None:
            written.copy_(value)


def test_the_rmsnorm_of_quack(helpers: ModuleType, by_hand: ModuleType, ns: str) -> None:
    """Its signature, its schema, and its test: against torch's own, with a residual that comes out, too."""
    schema = (
        "(Tensor x, Tensor? weight, Tensor(a2!) out, Tensor? bias, Tensor(a4!)? rstd, Tensor(a5!)? mean, "
        "Tensor? residual, Tensor(a7!)? residual_out, float eps=1e-6, bool is_layernorm=False) -> ()"
    )
    options: dict[str, Any] = {"mutates_args": ("out", "rstd", "mean", "residual_out"), "schema": schema}
    op = helpers.torch_library_op(f"{ns}::_rmsnorm_fwd", device_types="cpu", **options)(rmsnorm_fwd)
    theirs = by_hand.quack(f"{ns}_hand::_rmsnorm_fwd", rmsnorm_fwd, device_types="cpu", **options)
    theirs._op_of = getattr(torch.ops, f"{ns}_hand")._rmsnorm_fwd

    def arguments(n: int) -> tuple[Any, ...]:
        return torch.randn(n, 4), torch.randn(4), torch.zeros(n, 4), None, torch.zeros(n), None, torch.randn(n, 4), None

    Twins(op, theirs, rmsnorm_fwd, arguments).check()
    x, residual, weight = torch.randn(3, 4), torch.randn(3, 4), torch.randn(4)
    out, residual_out = torch.zeros(3, 4), torch.zeros(3, 4)
    op(x, weight, out, None, None, None, residual, residual_out)
    torch.testing.assert_close(out, torch.nn.functional.rms_norm(x + residual, (4,), weight, eps=1e-6))
    torch.testing.assert_close(residual_out, x + residual)


def test_a_schema_by_hand(helpers: ModuleType, ns: str) -> None:
    schema = "(Tensor x, Tensor(a!) out, Tensor(b!)? lse=None) -> ()"
    op = helpers.torch_library_op(f"{ns}::f", mutates_args=("out", "lse"), schema=schema)(softmax_fwd)
    op(x := torch.randn(2, 3), out := torch.zeros(2, 3))
    torch.testing.assert_close(out, x.softmax(-1))
    with pytest.raises(SchemaError, match="the schema and mutates_args disagree"):
        helpers.torch_library_op(f"{ns}::g", mutates_args=("out",), schema=schema)(softmax_fwd)


# Dynamo makes an instance of each `autograd.Function` that it traces.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
def test_inside_an_autograd_function_that_is_compiled(helpers: ModuleType, ns: str) -> None:
    """quack returns a function, because objects could not be traced there."""
    op = helpers.torch_library_op(f"{ns}::softmax", mutates_args=("out", "lse"))(softmax_fwd)

    class Softmax(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            op(x, out := torch.empty_like(x), None)
            ctx.save_for_backward(out)
            return out

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            (out,) = ctx.saved_tensors
            return out * (gradient - (gradient * out).sum(-1, keepdim=True))

    x, weight = torch.randn(2, 3, requires_grad=True), torch.randn(2, 3)
    (expected,) = torch.autograd.grad((x.softmax(-1) * weight).sum(), x)
    for fn in (Softmax.apply, torch.compile(lambda x: Softmax.apply(x), fullgraph=True, backend="aot_eager")):
        torch.testing.assert_close(torch.autograd.grad((fn(x) * weight).sum(), x)[0], expected)


def test_what_a_call_past_the_dispatcher_may_not_miss(helpers: ModuleType, by_hand: ModuleType, ns: str) -> None:
    """By hand, the kernel is run on tensors without data, below modes, and unseen by the profiler."""
    runs: list[Any] = []

    def kernel(x: Tensor, out: Tensor) -> None:
        runs.append(type(x).__name__)

    ours = helpers.torch_library_op(f"{ns}::unseen", mutates_args=("out",))(kernel)
    theirs = by_hand.quack(f"{ns}_hand::unseen", kernel, mutates_args=("out",))
    seen: dict[str, Any] = {}
    for name, op in (("ours", ours), ("theirs", theirs)):
        runs.clear()
        with FakeTensorMode():
            op(torch.ones(2), torch.ones(2))
        with torch.profiler.profile() as profile:
            op(torch.ones(2), torch.ones(2))
        seen[name] = [*runs], any("::unseen" in event.name for event in profile.events())
    assert seen == {"ours": (["Tensor"], True), "theirs": (["FakeTensor", "Tensor"], False)}


def test_errors(helpers: ModuleType, by_hand: ModuleType, ns: str) -> None:
    ours = helpers.torch_library_op(f"{ns}::gemm", mutates_args=("out",))(gemm)
    theirs = by_hand.quack(f"{ns}_hand::gemm", gemm, mutates_args=("out",))
    x = torch.ones(2, 2)
    for args, kwargs, wrong in [((x, x), {}, "'out'"), ((x, x, x), {"swp": True}, "'swp'"), ((x, "b", x), {}, "'b'")]:
        text = message(lambda a=args, k=kwargs: ours(*a, **k))
        assert "gemm" in text
        assert wrong in text
        message(lambda a=args, k=kwargs: theirs(*a, **k))
    assert "two dimensions" in message(lambda: helpers.rmsnorm(torch.ones(2)))
