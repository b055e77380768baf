"""test_schema: writes and aliases that a schema does not declare are found, and others are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.libraries import Ops

from customops.checks import NotExercised, SchemaCheckError, schema_check

aten = torch.ops.aten


def then(result: Any, *_done: Any) -> Any:
    return result


MUTATED = "Argument x is not defined as mutable but was mutated"
ALIASED = "Argument x is not defined to alias output but was aliasing"


# -- writes ------------------------------------------------------------------------------------


def test_undeclared_write(define: Ops) -> None:
    op = define("f(Tensor x) -> Tensor", lambda x: then(x.clone(), x.sin_()))
    with pytest.raises(SchemaCheckError, match=MUTATED) as caught:
        schema_check(op, (torch.ones(4),))
    error = caught.value
    assert isinstance(error, RuntimeError)
    assert (error.op, error.argument) == (op.name(), "x")
    assert "4 of 4 elements changed, the first at index (0,)" in str(error)
    assert "mutates_args={'x'}" in str(error)


def test_write_through_a_graph(define: Ops) -> None:
    """The operator is judged below autograd, when its own autograd kernel calls it again."""
    op = define("f(Tensor x) -> Tensor", lambda x: then(x.clone(), x.sin_()))

    class Foo(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                return op(x)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            return grad

    define.lib.impl("f", Foo.apply, "Autograd")
    with pytest.raises(SchemaCheckError, match=MUTATED):
        schema_check(op, (torch.tensor(1.0, requires_grad=True),))


@pytest.mark.parametrize("value", [1e-9, float("nan"), float("inf")])
def test_small_changes_count(define: Ops, value: float) -> None:
    op = define("f(Tensor x) -> Tensor", lambda x: then(x.clone(), x[1].add_(1e-12)))
    x = torch.full((3,), 1e-9)
    x[0] = value
    with pytest.raises(SchemaCheckError, match="1 of 3 elements changed, the first at index \\(1,\\)"):
        schema_check(op, (x,))


def test_write_of_the_same_values(define: Ops) -> None:
    op = define("f(Tensor x) -> Tensor", lambda x: then(x.clone(), x.relu_()))
    with pytest.raises(SchemaCheckError, match=MUTATED) as caught:
        schema_check(op, (torch.ones(3),))
    assert "with the values it already had" in str(caught.value)


@torch.library.custom_op("checks_schema::relu_quietly", mutates_args=())
def relu_quietly(x: torch.Tensor) -> torch.Tensor:
    x.relu_()
    return x.clone()


@pytest.mark.parity(80)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_write_of_the_same_values_by_a_custom_op(requires_grad: bool) -> None:
    with pytest.raises(SchemaCheckError, match=MUTATED):
        schema_check(relu_quietly._opoverload, (torch.ones(3, requires_grad=requires_grad),))


def test_write_of_metadata(define: Ops) -> None:
    op = define("f(Tensor x) -> Tensor", lambda x: then(x.clone(), x.t_()))
    with pytest.raises(SchemaCheckError, match=MUTATED):
        schema_check(op, (torch.ones(2, 3),))


@pytest.mark.parametrize(
    "x",
    [
        torch.ones(3, dtype=torch.int64),
        torch.ones(3, dtype=torch.float8_e4m3fn),
        torch.ones(3, dtype=torch.bool),
        torch.ones(3, dtype=torch.complex128),
        torch.ones(3, 4)[:, ::2],
    ],
    ids=["int64", "float8", "bool", "complex128", "strided"],
)
def test_write_to_any_dtype(define: Ops, x: torch.Tensor) -> None:
    quiet = define("quiet(Tensor x) -> Tensor", torch.clone)
    schema_check(quiet, (x,))
    loud = define("loud(Tensor x) -> Tensor", lambda x: then(x.clone(), x.zero_()))
    with pytest.raises(SchemaCheckError, match=MUTATED):
        schema_check(loud, (x,))
    assert bool(x.to(torch.complex64).real.all()), "the user's tensor is left alone"


def test_write_to_a_list_and_by_keyword(define: Ops) -> None:
    op = define("f(Tensor[] xs, *, Tensor? y) -> ()", lambda xs, *, y: then(None, xs[1].zero_()))
    with pytest.raises(SchemaCheckError, match="Argument xs is not defined as mutable"):
        schema_check(op, ([torch.ones(2), torch.ones(3)],), {"y": None})
    op = define("g(Tensor[] xs, *, Tensor? y) -> ()", lambda xs, *, y: then(None, y.zero_()))
    with pytest.raises(SchemaCheckError, match="Argument y is not defined as mutable"):
        schema_check(op, (), {"xs": [], "y": torch.ones(2)})


def test_write_to_sparse(define: Ops) -> None:
    op = define("f(Tensor x) -> Tensor", lambda x: then(x.clone(), x._values().zero_()), key="SparseCPU")
    with pytest.raises(SchemaCheckError, match=MUTATED):
        schema_check(op, (torch.eye(3).to_sparse(),))


def test_declared_writes_pass(define: Ops) -> None:
    op = define("f(Tensor(a!) x, Tensor(b!)[] ys, Tensor(c!)? z) -> ()", lambda x, ys, z: then(None, x.zero_()))
    schema_check(op, (torch.ones(3), [torch.ones(2)], None))
    schema_check(op, (torch.ones(3), [], torch.ones(2)))


def test_same_tensor_passed_as_written_and_as_read(define: Ops) -> None:
    op = define("f(Tensor(a!) x, Tensor y) -> ()", lambda x, y: then(None, x.zero_()))
    x = torch.ones(3)
    schema_check(op, (x, x))


@pytest.mark.parametrize("dim", [0, 1])
def test_slices_of_one_buffer_are_told_apart(define: Ops, dim: int) -> None:
    right = define("right(Tensor(a!) x, Tensor y) -> ()", lambda x, y: then(None, x.zero_()))
    wrong = define("wrong(Tensor(a!) x, Tensor y) -> ()", lambda x, y: then(None, y.zero_()))
    x, y = torch.ones(2, 2).unbind(dim)
    schema_check(right, (x, y))
    with pytest.raises(SchemaCheckError, match="Argument y is not defined as mutable"):
        schema_check(wrong, (x, y))


# -- aliases -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [lambda x: x[:], lambda x: x, lambda x: x[1:]], ids=["view", "itself", "part"])
def test_undeclared_alias(define: Ops, kernel: Callable[..., Any]) -> None:
    op = define("f(Tensor x) -> Tensor", kernel, key="CompositeExplicitAutograd")
    with pytest.raises(SchemaCheckError, match=ALIASED):
        schema_check(op, (torch.ones(3),))


def test_views_are_declared_for_one_argument(define: Ops) -> None:
    schema = "(Tensor(a) x, Tensor y) -> Tensor(a)[]"
    schema_check(define("f" + schema, lambda x, y: list(x.split(1))), (torch.ones(2), torch.ones(2)))
    with pytest.raises(SchemaCheckError, match="Argument y is not defined to alias output"):
        schema_check(define("g" + schema, lambda x, y: list(y.split(1))), (torch.ones(2), torch.ones(2)))


def test_a_view_op_returns_a_new_view(define: Ops) -> None:
    schema_check(define("f(Tensor(a) x) -> Tensor(a)", lambda x: x.view_as(x)), (torch.ones(2),))
    with pytest.raises(SchemaCheckError, match="Argument x is returned as it is"):
        schema_check(define("g(Tensor(a) x) -> Tensor(a)", lambda x: x), (torch.ones(2),))


def test_in_place_returns_its_argument(define: Ops) -> None:
    schema_check(define("f(Tensor(a!) x) -> Tensor(a!)", lambda x: x.sin_()), (torch.ones(2),))


def test_an_empty_output_aliases_nothing(define: Ops) -> None:
    schema_check(define("f(Tensor x) -> Tensor", lambda x: x[:0]), (torch.ones(2),))


def test_outputs_that_alias(define: Ops) -> None:
    def halves(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.clone().split(1)

    with pytest.raises(SchemaCheckError, match="Outputs 0 and 1 alias unexpectedly"):
        schema_check(define("f(Tensor x) -> (Tensor, Tensor)", halves), (torch.ones(2),))
    schema_check(define("g(Tensor x) -> Tensor[]", lambda x: list(halves(x))), (torch.ones(2),))
    with pytest.raises(SchemaCheckError, match="Outputs 0\\[0\\] and 0\\[1\\] alias unexpectedly"):
        schema_check(define("h(Tensor x) -> Tensor[]", lambda x: [x.clone()] * 2), (torch.ones(2),))


# -- what is judged ----------------------------------------------------------------------------

x = torch.randn(4, 4)
ATEN = {
    "sin": (aten.sin.default, (x,), {}),
    "sin_grad": (aten.sin.default, (x.clone().requires_grad_(),), {}),
    "add_": (aten.add_.Tensor, (x, x), {}),
    "sort": (aten.sort.default, (x,), {}),
    "mm_out": (aten.mm.out, (x, x), {"out": torch.empty(4, 4)}),
    "split": (aten.split.Tensor, (x, 2), {}),
    "unbind": (aten.unbind.int, (x,), {}),
    "view": (aten.view.default, (x, [16]), {}),
    "t_": (aten.t_.default, (x,), {}),
    "detach": (aten.detach.default, (x.clone().requires_grad_(),), {}),
    "foreach": (aten._foreach_add_.Scalar, ([x, x.clone()], 1), {}),
    "resize_": (aten.resize_.default, (torch.randn(4), [2, 2]), {}),
    "sparse": (aten.clone.default, (torch.eye(3).to_sparse(),), {}),
}


@pytest.mark.parametrize(("op", "args", "kwargs"), ATEN.values(), ids=ATEN)
def test_aten_passes(op: Any, args: Any, kwargs: Any) -> None:
    schema_check(op, args, kwargs)


def test_no_tensor_inputs(define: Ops) -> None:
    op = define("f(int x, int y=3, str z='a') -> int", lambda x, *_: x + 1, key="CompositeExplicitAutograd")
    schema_check(op, (3,))
    schema_check(op, (), {"x": 3, "z": "b"})


def test_parts_of_a_composite_are_judged(define: Ops) -> None:
    part = define("part(Tensor x) -> Tensor", lambda x: x[:])
    whole = define("whole(Tensor x) -> Tensor", lambda x: part(x) + 1, key="CompositeImplicitAutograd")
    with pytest.raises(SchemaCheckError, match=ALIASED) as caught:
        schema_check(whole, (torch.ones(2),))
    assert caught.value.op == part.name()


def test_a_composite_of_aten_is_not_exercised(define: Ops) -> None:
    op = define("f(Tensor x) -> Tensor", lambda x: x + 1, key="CompositeImplicitAutograd")
    with pytest.raises(NotExercised, match="made of aten operators"):
        schema_check(op, (torch.ones(2),))


def test_abstract_inputs_are_not_exercised() -> None:
    with pytest.raises(NotExercised, match="no data"):
        schema_check(aten.sin.default, (torch.empty(3, device="meta"),))


def test_a_failing_operator_is_reported_as_such(define: Ops) -> None:
    op = define("f(Tensor x) -> Tensor", lambda x: x.view(7))
    with pytest.raises(SchemaCheckError, match="itself fails on these inputs") as caught:
        schema_check(op, (torch.ones(2),))
    assert "shape '\\[7\\]' is invalid".replace("\\", "") in str(caught.value)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_the_number_of_elements_is_of_elements(define: Ops) -> None:
    op = define("f(Tensor x) -> Tensor", lambda x: then(x.clone(), x[1].mul_(2)))
    x = torch.full((3, 2), 1 + 1j, dtype=torch.complex128)
    with pytest.raises(SchemaCheckError, match=r"2 of 6 elements changed, the first at index \(1, 0\)"):
        schema_check(op, (x,))


def test_sparsity_of_an_input(define: Ops) -> None:
    def shrink(x: torch.Tensor) -> torch.Tensor:
        return then(x.clone(), x.sparse_resize_and_clear_((3, 3), 2, 0))

    with pytest.raises(SchemaCheckError, match=MUTATED):
        schema_check(define("f(Tensor x) -> Tensor", shrink, key="SparseCPU"), (torch.eye(3).to_sparse(),))


def test_inference_tensors(define: Ops) -> None:
    op = define("f(Tensor x) -> Tensor", lambda x: then(x.clone(), x.sin_()))
    with torch.inference_mode():
        x = torch.ones(3)
        with pytest.raises(SchemaCheckError, match=MUTATED):
            schema_check(op, (x,))
    with pytest.raises(SchemaCheckError, match=MUTATED):
        schema_check(op, (x,))


def test_jagged_tensors_share_their_offsets() -> None:
    x = torch.nested.nested_tensor([torch.randn(2), torch.randn(3)], layout=torch.jagged)
    schema_check(aten.sin.default, (x,))
