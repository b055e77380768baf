"""Every op of products.gradient_ops, differentiated in every way: by finite differences, and against plain torch."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from helpers.covers import cover
from products import gradient_table
from products.gradient_ops import Maker, MakerFromFunctions, Program
from products.gradient_ops.maker import save
from products.gradient_table import RAISES, RIGHT, SHAPES, TRANSFORMS, Loss, compare
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from customops import Registry
from customops.errors import AutogradError, UnsupportedError

#: torch warns when it batches an op by a loop, and of what it does itself.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
    pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node"),
    pytest.mark.filterwarnings("ignore:`torch._prims_common.check` is deprecated"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated"),
    pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex"),
]


class Refusal(NamedTuple):
    """An error that is meant, and documented."""

    reason: str
    error: type[Exception]
    match: str


FORWARD_MODE = [name for name in TRANSFORMS if re.search("jvp|jacfwd|hessian|linearize|dual", name)]
COMPILED = [name for name in TRANSFORMS if name.startswith("compile")]
EAGER = [name for name in TRANSFORMS if name not in COMPILED]


_NO_TANGENTS_OF_VIEWS = Refusal("an op that returns a view has no rule for forward mode", UnsupportedError, "jvp rule")
_NO_COMPILED_VIEWS = Refusal(
    "torch.compile does not functionalize custom ops that return views", Exception, "alias annotations|INTERNAL ASSERT"
)
#: Cells of the table that are errors, and why.
REFUSALS: dict[tuple[str, str], Refusal] = {
    **{("view", name): _NO_TANGENTS_OF_VIEWS for name in FORWARD_MODE if name not in COMPILED},
    **{("view", name): _NO_COMPILED_VIEWS for name in COMPILED if name != "compile(jacfwd)"},
    ("view", "compile(jacfwd)"): Refusal(_NO_TANGENTS_OF_VIEWS.reason, Exception, "jvp rule"),
    ("view", "export, training step"): _NO_COMPILED_VIEWS,
}
_SAVED = "the tangent of what is written is written after backward has saved it"
#: Cells that are not as they should be: the cell, and what is the matter.
FAULTS: dict[tuple[str, str], tuple[str, str]] = {
    **{(shape, "jacrev(jacfwd)"): (RAISES, _SAVED) for shape in ("in_place", "in_place_original", "buffers")},
}


def expected_cell(shape: str, transform: str) -> str:
    if (shape, transform) in FAULTS:
        return FAULTS[shape, transform][0]
    return RAISES if (shape, transform) in REFUSALS else RIGHT


# Ops ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def makers() -> Iterator[dict[str, Any]]:
    """Makers, of which each defines an op once."""
    registry = Registry()
    makers = Maker(registry, "gradients_by_hand"), MakerFromFunctions(registry, "gradients_from")
    yield {
        name: functools.cache(lambda shape, maker=maker: SHAPES[shape](maker))
        for name, maker in zip(("by hand", "from"), makers, strict=True)
    }
    registry.clear()


@pytest.fixture
def by_hand(makers: dict[str, Any]) -> Any:
    return makers["by hand"]


@pytest.fixture(autouse=True)
def saved_tensors_hooks_work() -> Iterator[None]:
    """torch leaves them off where compiling a transform failed."""
    yield
    torch._C._autograd._saved_tensors_hooks_enable()


def marks(fault: str | None, in_cover: bool = True) -> list[pytest.MarkDecorator]:
    return [pytest.mark.xfail(reason=fault)] * (fault is not None) + [pytest.mark.full] * (not in_cover)


def cells(names: list[str], shapes: Sequence[str] = tuple(SHAPES), each: int = 8) -> list[Any]:
    """Return parameters for the cells of some transforms; `make test` runs a cover, with `each` transforms a shape."""
    covered = cover(shapes, names, of_first=each)
    return [
        pytest.param(
            shape,
            name,
            marks=marks(FAULTS.get((shape, name), (None, None))[1], (shape, name) in covered),
            id=f"{name}-{shape}",
        )
        for shape in shapes
        for name in names
    ]


def check(name: str, shape: str, program: Program) -> None:
    """The cell of a transform and an op is as expected; an error comes through."""
    transform = TRANSFORMS[name]
    refusal = REFUSALS.get((shape, name))
    if refusal is not None:
        with pytest.raises(refusal.error, match=refusal.match):
            transform.run(program.op, program.inputs)
        return
    expected = (transform.plain or transform.run)(program.reference, program.inputs)
    actual = transform.run(program.op, program.inputs)
    assert compare(actual, expected) == RIGHT, (actual, expected)


# Finite differences ---------------------------------------------------------------------------------------------

#: Where it is said that something has no gradient: the inputs that have the one which differences give.
CHECKED = {"nondiff_args": (0,), "cache": (1,), "flags": (), "not_differentiable": ()}
NOT_FROM = {
    "view": "an op that returns a view has no rule for forward mode",
    "accumulate": "without grads_of, a reference gives no gradients of arguments that are written beside a return",
}
_UNBATCHED = "the tangent of what is written is written, too, and has no batch dimension"
#: By test and op.
GRADCHECK_FAULTS: dict[tuple[str, str], str] = {
    ("gradcheck", shape): _UNBATCHED for shape in ("in_place", "in_place_original", "accumulate", "buffers")
}


def checks(test: str) -> list[Any]:
    return [
        pytest.param(shape, formulas, marks=marks(GRADCHECK_FAULTS.get((test, shape))))
        for shape in SHAPES
        for formulas in ("by hand", "from")
        if CHECKED.get(shape) != () and (formulas == "by hand" or shape not in NOT_FROM)
    ]


def inputs_to_check(shape: str, program: Program) -> tuple[Tensor, ...]:
    xs = program.inputs()
    for i in CHECKED.get(shape, range(len(xs))):
        xs[i].requires_grad_()
    return xs


@pytest.mark.parametrize(("shape", "formulas"), checks("gradcheck"))
def test_gradcheck(makers: dict[str, Any], shape: str, formulas: str) -> None:
    program, has_jvp = makers[formulas](shape), shape != "view"
    xs = inputs_to_check(shape, program)
    assert gradcheck(
        program.op, xs, check_batched_grad=True, check_forward_ad=has_jvp, check_batched_forward_grad=has_jvp
    )


@pytest.mark.parametrize(("shape", "formulas"), checks("gradgradcheck"))
def test_gradgradcheck(makers: dict[str, Any], shape: str, formulas: str) -> None:
    program = makers[formulas](shape)
    xs = inputs_to_check(shape, program)
    assert gradgradcheck(program.op, xs, check_batched_grad=True, check_fwd_over_rev=shape != "view")


# Plain torch ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "name"), cells(EAGER))
def test_cell(by_hand: Any, shape: str, name: str) -> None:
    check(name, shape, by_hand(shape))


#: What is not flat, or writes, or is refused.
REPRESENTATIVE = ["two", "list_with_none", "keyword_optional", "mixed_results", "view", "counter", "in_place"]


@pytest.mark.parametrize(("shape", "name"), cells(["compile(jacfwd)", "compile(vmap(grad))"], REPRESENTATIVE))
def test_compiled_cell(by_hand: Any, shape: str, name: str) -> None:
    check(name, shape, by_hand(shape))


class Joint:
    """Functions of different tensors as one."""

    def __init__(self, functions: list[Any], counts: list[int]) -> None:
        self.functions, self.counts = functions, counts

    def __call__(self, *xs: Tensor) -> Tensor:
        losses, rest = [], xs
        for fn, count in zip(self.functions, self.counts, strict=True):
            losses.append(Loss(fn)(*rest[:count]))
            rest = rest[count:]
        return torch.stack(losses)


@pytest.mark.parametrize("name", ["compile, aot_eager", "compile, inductor", "compile(grad)"])
def test_compiled_in_one_graph(by_hand: Any, name: str) -> None:
    """Ops that can be compiled, in one function, so that the compiler runs once: all, or what inductor has time for."""
    shapes = REPRESENTATIVE if "inductor" in name else SHAPES
    programs = [by_hand(shape) for shape in shapes if expected_cell(shape, name) == RIGHT]
    counts = [len(program.shapes) for program in programs]
    op, reference = (Joint([getattr(p, kind) for p in programs], counts) for kind in ("op", "reference"))
    check(name, "all", Program(op, reference, tuple(shape for program in programs for shape in program.shapes)))


@pytest.mark.parametrize("name", ["compile, aot_eager", "compile, inductor", "compile(grad)"])
def test_refused_by_the_compiler(by_hand: Any, name: str) -> None:
    for shape in SHAPES:
        if (shape, name) in REFUSALS:
            check(name, shape, by_hand(shape))


@pytest.mark.parametrize(
    ("shape", "name"),
    cells(
        ["backward", "create_graph", "grad(grad)", "jacfwd", "linearize", "hessian", "vmap(grad)"],
        [shape for shape in SHAPES if shape not in NOT_FROM and shape != "not_differentiable"],
        each=2,
    ),
)
def test_formulas_from_functions(makers: dict[str, Any], shape: str, name: str) -> None:
    check(name, shape, makers["from"](shape))


def test_torch_itself_linearizes_past_a_write() -> None:
    """If this fails, torch got better, and `_torch.autograd` need not see to it for ops that write."""

    def count(x: Tensor) -> Tensor:
        calls = torch.zeros(1)
        torch._foreach_add_([calls], [torch.ones(1)])
        return x * calls

    assert torch.func.linearize(count, torch.ones(1))[1](torch.ones(1)) == 0  # it is 1


# Writes ---------------------------------------------------------------------------------------------------------


def fill(registry: Registry, ns: str) -> Any:
    """An op that returns nothing, with a formula for both modes."""

    def kernel(x: Tensor, out: Tensor) -> None:
        out.copy_(x * x)

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        save(ctx, inputs[0])

    op = registry.custom_op(f"{ns}::fill", kernel, mutates_args={"out"})
    op.register_autograd(
        lambda ctx, grad: (2 * grad * ctx.saved_tensors[0], torch.zeros_like(grad)), setup_context=setup_context
    )
    op.register_jvp(lambda ctx, tangent, _: 2 * ctx.saved_tensors[0] * tangent, setup_context=setup_context)
    return op


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacfwd, torch.func.jacrev])
def test_a_transform_does_not_write_what_is_outside(registry: Registry, ns: str, transform: Any) -> None:
    """The result would be lost. torch refuses that for its own in-place ops, which write their first argument."""
    op, out = fill(registry, ns), torch.zeros(())

    def call(x: Tensor, outer: bool = True) -> Tensor:
        buffer = out if outer else torch.zeros(())
        op(x, out=buffer)
        return buffer * 1

    with pytest.raises(AutogradError, match="captured") as raised:
        transform(call)(torch.tensor(3.0))
    assert raised.value.argument == "out"
    assert out == 0
    with pytest.raises(AutogradError, match="captured"):
        transform(lambda x: torch.vmap(call)(x[None]).sum())(torch.tensor(3.0))
    assert transform(lambda x: call(x, outer=False))(torch.tensor(3.0)) == 6
    assert (
        transform(lambda x: call(x, outer=False) * transform(lambda y: call(y, outer=False))(x))(torch.tensor(3.0))
        == 72 - 18
    )
    call(torch.tensor(2.0))
    assert out == 4


def test_an_argument_that_is_mutated_and_given_twice(registry: Registry, ns: str) -> None:
    """The formula would save x, which is written as `out`."""
    y = torch.tensor(3.0, requires_grad=True) * 1
    with pytest.raises(AutogradError, match="writes to a tensor that is also another argument") as raised:
        fill(registry, ns)(y, y)
    assert raised.value.argument == "out"
    assert y == 3


def test_a_buffer_without_a_formula(registry: Registry, ns: str) -> None:
    def kernel(x: Tensor, out: Tensor) -> None:
        out.copy_(x * x)

    op = registry.custom_op(f"{ns}::fill", kernel, mutates_args={"out"})
    x, out = torch.tensor(3.0, requires_grad=True), torch.zeros(())

    def step() -> None:
        op(x, out)
        (out + x).backward()

    with pytest.raises(AutogradError, match="no autograd formula"):
        step()


# Forward mode and writes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["jvp", "linearize", "dual numbers"])
def test_a_written_tangent_that_no_formula_knows(makers: dict[str, Any], name: str) -> None:
    """As for a tensor that requires grad: a reference without `grads_of`."""
    with pytest.raises(AutogradError, match="its formula gives the new value no gradient"):
        check(name, "accumulate", makers["from"]("accumulate"))


def test_linearize_can_be_called_again(registry: Registry, ns: str) -> None:
    """What is written is made anew in each call; lists and views are written, too."""

    def fill_all(x: Tensor, outs: list[Tensor]) -> None:
        for out in outs:
            out.copy_(x * x)

    def add_one(n: Tensor) -> None:
        n.add_(1)

    op = registry.custom_op(f"{ns}::fill", fill_all, mutates_args={"outs"})
    op.register_reference(lambda x, outs: [x * x for _ in outs], gives="gradients")
    count = registry.custom_op(f"{ns}::count", add_one, mutates_args={"n"})

    def written(x: Tensor) -> Tensor:
        outs, calls = torch.zeros(3, *x.shape), torch.zeros(1)
        op(x, [outs[0], outs[2]])
        count(calls[:])
        count(calls)
        return outs.sin() * x * calls

    def reference(x: Tensor) -> Tensor:
        return torch.stack([x * x, 0 * x, x * x]).sin() * x * 2

    x, t = torch.rand(4), torch.rand(4)
    value, linear = torch.func.linearize(written, x)
    expected = torch.func.jvp(reference, (x,), (t,))
    for _ in range(2):
        torch.testing.assert_close((value, linear(t)), expected)


# The page -------------------------------------------------------------------------------------------------------


def test_the_page_has_the_table() -> None:
    """What the tests above found, cell by cell, is what docs/gradients.md shows."""
    page = (Path(__file__).parents[3] / "docs" / "gradients.md").read_text(encoding="utf-8")
    for name in TRANSFORMS:
        cells = "".join(expected_cell(shape, name) for shape in SHAPES)
        assert re.search(rf"^{re.escape(name)} +{re.escape(cells)}  ", page, re.M), (name, cells)
    letters = gradient_table.letters()
    for letter, shape in zip(letters, SHAPES.values(), strict=True):
        assert f"\n{letter}  {shape.__doc__}\n" in page


def test_the_cells() -> None:
    """The table tells right from wrong, and zeros from both."""
    one = torch.ones(2)
    assert compare([one, None], [one, None]) == RIGHT
    assert compare([one, None], [one, torch.zeros(2)]) == RIGHT
    assert compare([one, torch.zeros(2)], [one, None]) == RIGHT
    assert compare([one, None], [one, one]) == gradient_table.ZERO
    assert compare([one, torch.zeros(2)], [one, one]) == gradient_table.ZERO
    assert compare([one, 2 * one], [one, one]) == gradient_table.WRONG
    assert compare([one], [one, one]) == gradient_table.WRONG
    assert compare(one, one[:1]) == gradient_table.WRONG
