"""`Watch`: what a kind of call is, and which calls are noted."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from customops import Registry
from customops.checks import Trial
from customops.testing.watch import Watch, checked, kind_of, why_unchecked

aten = torch.ops.aten


@pytest.fixture
def op(registry: Registry, ns: str) -> Any:
    def fn(x: Tensor, by: float = 1.0, *, mode: str = "a") -> Tensor:
        return x * by

    op = registry.custom_op(f"{ns}::op", fn)
    op.register_fake(lambda x, by, mode: torch.empty_like(x))
    return op


def watch() -> Watch:
    """One that wants all, each kind once."""
    return Watch(lambda name: True, set())


X = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("tensor", "kind"),
    [
        (X, "float32 2d"),
        (X[0, 0].int(), "int32 0d"),
        (X.t(), "float32 2d strided"),
        (X[:1].expand(4, 3), "float32 2d expanded"),
        (X[:0], "float32 2d empty"),
        (torch.ones(2, dtype=torch.complex64).conj(), "complex64 1d conj"),
        (X.to_sparse(), "float32 2d sparse_coo"),
        (X.clone().requires_grad_(), "float32 2d grad"),
        (torch.nn.Parameter(X), "float32 2d grad"),
        (torch.ones(2, 3).as_subclass(type("Mine", (torch.Tensor,), {})), "float32 2d Mine"),
    ],
)
def test_kinds_of_tensors(tensor: Tensor, kind: str) -> None:
    assert kind_of(Trial(aten.sin.default, (tensor,))) == f"self: {kind}"


def test_kinds_of_other_arguments() -> None:
    cat = Trial(aten.cat.default, ([X, X.double(), X], 1))
    assert kind_of(cat) == "tensors: [float32 2d | float64 2d], dim: int"
    summed = Trial(aten.sum.dim_IntList, (X, [0]), {"keepdim": True, "dtype": torch.float64})
    assert kind_of(summed) == "self: float32 2d, dim: [int], keepdim: True, dtype: torch.float64"
    assert kind_of(Trial(aten.clamp.default, (X, None, 2.0))) == "self: float32 2d, min: None, max: float"


def test_each_kind_is_noted_once_on_copies(op: Any) -> None:
    x = torch.ones(3)
    with watch() as seen:
        op(x)
        x.zero_()
        op(torch.ones(5))
        op(x, 2.0)
        op(x, mode="b")
        getattr(torch.ops, op._qualname.split("::")[0]).op(x, 3.0)
        torch.sin(x)
        aten.sin.default(x)
    assert [call.kind for call in seen.calls] == [
        "x: float32 1d",
        "x: float32 1d, by: float",
        "x: float32 1d, mode: 'b'",
    ]
    assert seen.calls[0].trial.args[0].tolist() == [1, 1, 1]
    assert dict(seen.made) == {op._qualname: 5}
    checks = ["test_schema", "test_faketensor", "test_autograd_registration"]
    assert [checked(seen.calls[0], check).status for check in checks] == ["passed", "passed", "not exercised"]


def test_the_overload_of_a_packet_is_found(op: Any) -> None:
    @op.register_out
    def _(x: Tensor, by: float, *, mode: str, out: Tensor) -> None:
        torch.mul(x, by, out=out)

    packet = getattr(torch.ops, op._qualname.split("::")[0]).op
    with watch() as seen:
        packet(X)
        packet(X, out=torch.empty(2, 3))
    assert [call.trial.name for call in seen.calls] == [op._qualname, f"{op._qualname}.out"]
    assert not any(why_unchecked(call) for call in seen.calls)


def test_what_cannot_be_tried_again(op: Any) -> None:
    op.register_vmap("sequential")
    with watch() as seen:
        with pytest.raises(RuntimeError):
            op(X, torch.ones(2))
        with FakeTensorMode():
            op(torch.ones(2))
        op(torch.ones(2, device="meta"))
        torch.func.vmap(op)(X)
        op(torch.ones(1).expand(5000, 5000))
    assert not [call for call in seen.calls if call.trial.tensors[0].is_meta]
    assert seen.left_out["meta, fake or functorch tensors"] == 2
    assert seen.left_out["made under a mode"] == 1
    assert seen.left_out["more than 16 million elements"] == 1
    assert seen.calls == []


def test_a_call_that_raises_stands_for_no_other(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::root")
    def root(x: Tensor) -> Tensor:
        torch._check(bool((x >= 0).all()), lambda: "negative")
        return x.sqrt()

    with watch() as seen:
        with pytest.raises(RuntimeError, match="negative"):
            root(-X)
        root(X)
    assert [call.trial.args[0].tolist() for call in seen.calls] == [X.tolist()]


def test_inference_tensors_are_copied_as_others(op: Any) -> None:
    with watch() as seen, torch.inference_mode():
        op(torch.ones(2))
    assert not seen.calls[0].trial.args[0].is_inference()


def test_a_call_without_grad_is_checked_without(op: Any) -> None:
    x = X.clone().requires_grad_()
    with watch() as seen:
        with torch.no_grad():
            op(x)
        op(x)
    assert [call.kind for call in seen.calls] == ["x: float32 2d", "x: float32 2d grad"]


def test_what_goes_by_more_than_its_inputs_is_not_checked(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::under")
    def under(x: Tensor) -> Tensor:
        torch._check(is_open, lambda: "it is closed")
        return x.clone()

    is_open = True
    with watch() as seen:
        under(X)
    is_open = False
    assert why_unchecked(seen.calls[0]) == "the op refused the same inputs when the test was over"


def test_a_graph_that_is_traced_is_the_same(op: Any) -> None:
    def trace() -> str:
        return make_fx(lambda x: op(x), tracing_mode="symbolic")(X).code

    with watch():
        watched = trace()
    assert watched == trace()


def test_other_threads_are_not_seen(op: Any) -> None:
    with watch() as seen:
        thread = threading.Thread(target=op, args=(X,))
        thread.start()
        thread.join()
    assert not seen.made


def test_an_op_that_is_replaced_is_not_called(registry: Registry, ns: str) -> None:
    with watch() as seen:
        registry.custom_op(f"{ns}::short", lambda x: x.clone(), schema="(Tensor x) -> Tensor")(X)
        registry.clear()
    assert why_unchecked(seen.calls[0]) == "the op was gone when the test was over"
    registry.custom_op(f"{ns}::short", lambda x: x + 1, schema="(Tensor x) -> Tensor")
    assert why_unchecked(seen.calls[0]) == "the op was gone when the test was over"
