"""The generated functions of a node, for each layout of arguments and returns."""

from __future__ import annotations

import ast
import inspect
import itertools
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from helpers.warm import PYTHON
from torch import Tensor

from customops import Registry
from customops.errors import AutogradError

ROOT = Path(__file__).parents[2]


class Case(NamedTuple):
    """A schema, what the op computes, and calls of it in terms of three tensors."""

    schema: str
    fn: Callable[..., Any]
    calls: tuple[Callable[[Any, Tensor, Tensor, Tensor], Any], ...]
    mutates: tuple[str, ...] = ()
    #: What computes the new values, for an op that mutates.
    new_values: Callable[..., Any] | None = None


def _weigh(tensors: Any) -> Any:
    """Something to differentiate by: each tensor counts differently."""
    return sum((tensor.sin() * (i + 2) for i, tensor in enumerate(tensors) if tensor is not None), torch.zeros(()))


def _add_to(x: Tensor, y: Tensor) -> None:
    x.mul_(y)


def _two_buffers(x: Tensor, y: Tensor, z: Tensor) -> None:
    new = x.clone() * z, y.clone() * z * 2
    x.copy_(new[0])
    y.copy_(new[1])


def _new(x: Tensor) -> Tensor:
    return x * 1


#: Layouts that tests/products/gradients does not have, and some that it has.
CASES = {
    "list between tensors": Case(
        "(Tensor x, Tensor[] ys, Tensor z) -> Tensor",
        lambda x, ys, z: _weigh([x, *ys, z]),
        (lambda f, x, y, z: f(x, [y, y * 2], z), lambda f, x, y, z: f(x, [], y), lambda f, x, y, z: f(x, [x], x)),
    ),
    "optional lists": Case(
        "(Tensor x, Tensor[]? ys, Tensor[]? zs=None) -> Tensor",
        lambda x, ys, zs=None: _weigh([x, *(ys or ()), *(zs or ())]),
        (
            lambda f, x, y, z: f(x, None),
            lambda f, x, y, z: f(x, [y]),
            lambda f, x, y, z: f(x, None, [y, z]),
            lambda f, x, y, z: f(x, [], [y]),
        ),
    ),
    "keyword-only, all sorts": Case(
        "(Tensor x, float by=2.0, Tensor? y=None, *, Tensor z, Tensor[]? zs=None, Tensor? w=None, bool s=True) "
        "-> Tensor",
        lambda x, by=2.0, y=None, *, z, zs=None, w=None, s=True: _weigh([x, y, z, *(zs or ()), w]) * by,
        (
            lambda f, x, y, z: f(x, z=z),
            lambda f, x, y, z: f(x, 3.0, y, z=z),
            lambda f, x, y, z: f(x, z=z, zs=[x, y]),
            lambda f, x, y, z: f(x, z=z, w=y, s=False),
            lambda f, x, y, z: f(x, 1.0, z=z, zs=[], w=y),
        ),
    ),
    "sizes and defaults": Case(
        "(Tensor x, int[] dims, Tensor? y=None, int[]? more=None) -> Tensor",
        lambda x, dims, y=None, more=None: _weigh([x, y]) * (sum(dims) + sum(more or ())),
        (lambda f, x, y, z: f(x, [1, 2]), lambda f, x, y, z: f(x, [1], y), lambda f, x, y, z: f(x, [1], y, [2])),
    ),
    "several lists": Case(
        "(Tensor[] xs, Tensor y) -> (Tensor[], Tensor, Tensor[])",
        lambda xs, y: ([x * y for x in xs], y.sin(), [y.cos(), *(x * 2 for x in xs)]),
        (
            lambda f, x, y, z: (lambda a, b, c: _weigh([*a, b, *c]))(*f([x, y], z)),
            lambda f, x, y, z: f([x, y], z)[2][1],
        ),
    ),
    "mutates two": Case(
        "(Tensor(a!) x, Tensor(b!) y, Tensor z) -> ()",
        _two_buffers,
        (lambda f, x, y, z: (lambda a, b: [f(a, b, z), _weigh([a, b])][1])(_new(x), _new(y)),),
        ("x", "y"),
        lambda x, y, z: (x * z, y * z * 2),
    ),
    "mutates a view in a list": Case(
        "(Tensor y, Tensor(a!)[] xs) -> ()",
        lambda y, xs: [_add_to(x, y) for x in xs] and None,
        (
            lambda f, x, y, z: (lambda base: [f(y[:1], [base[1:2]]), base][1])(_new(x)),
            lambda f, x, y, z: (lambda a, b: [f(y, [a, b]), _weigh([a, b])][1])(_new(x), _new(z)),
        ),
        ("xs",),
        lambda y, xs: [x * y for x in xs],
    ),
    "mutates a view that may be left out": Case(
        "(Tensor y, Tensor(a!)? x=None) -> ()",
        lambda y, x=None: None if x is None else _add_to(x, y),
        (lambda f, x, y, z: (lambda base: [f(y[:1], base[1:2]), base][1])(_new(x)),),
        ("x",),
        lambda y, x=None: x * y,
    ),
}

CALLS = [(name, i) for name, case in CASES.items() for i in range(len(case.calls))]


@pytest.fixture(params=CALLS, ids=lambda call: f"{call[0]}, {call[1]}")
def call(request: pytest.FixtureRequest, registry: Registry, ns: str) -> tuple[Any, Any, Any]:
    """A call of an op with a gradient, the same call of its function, and the op."""
    name, i = request.param
    case = CASES[name]
    op = registry.custom_op(f"{ns}::f", case.fn, mutates_args=case.mutates, schema=case.schema)
    op.register_reference(case.new_values or case.fn, gives="gradients")
    return (lambda *xs: case.calls[i](op, *xs)), (lambda *xs: case.calls[i](case.fn, *xs)), op


def leaves() -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    return tuple(torch.rand(2, dtype=torch.float64, requires_grad=True) for _ in range(3))


def gradients(fn: Any, *, twice: bool = False) -> Any:
    inputs = leaves()
    result = fn(*inputs)
    found = torch.autograd.grad(result.sum(), inputs, create_graph=twice, allow_unused=True)
    if not twice:
        return result.detach(), found
    loss = sum(grad.square().sum() for grad in found if grad is not None and grad.requires_grad)
    if not isinstance(loss, Tensor):
        return (None,) * len(inputs)
    return torch.autograd.grad(loss, inputs, allow_unused=True)


def same(found: Any, expected: Any) -> None:
    flat, wanted = (torch.utils._pytree.tree_leaves(each) for each in (found, expected))
    assert len(flat) == len(wanted)
    for one, other in zip(flat, wanted, strict=True):
        one, other = (torch.zeros(2, dtype=torch.float64) if x is None else x for x in (one, other))
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("twice", [False, True])
def test_gradients(call: Any, twice: bool) -> None:
    same(gradients(call[0], twice=twice), gradients(call[1], twice=twice))


def test_forward_mode(call: Any) -> None:
    inputs = tuple(x.detach() for x in leaves())
    tangents = tuple(x + i for i, x in enumerate(inputs))
    same(*(torch.func.jvp(fn, inputs, tangents) for fn in call[:2]))


def test_the_source_is_a_function(call: Any) -> None:
    """What explain_call prints is what linecache has, and Python."""
    fn, _, op = call
    fn(*leaves())
    text = op.explain_call()
    names = [node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    assert names[-2:] == ["forward", "backward"]
    function, apply = op._rules.autograd.node(op._rules.autograd.current())
    is_plain = apply.__name__ not in names or names[-3] != "apply"
    for each in (function.forward, function.backward, *([] if is_plain else [apply])):
        assert inspect.getsource(inspect.unwrap(each).__code__) in text + "\n"


# What the callbacks see -----------------------------------------------------------------------------------------


def test_lists_are_new_ones(registry: Registry, ns: str) -> None:
    """As where the dispatcher calls a kernel: what a callback does to its lists, nobody else sees."""

    def fn(xs: list[Tensor], dims: list[int]) -> list[Tensor]:
        result = [x * len(dims) for x in xs]
        xs.clear()
        dims.clear()
        return result

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        xs, dims = inputs
        ctx.seen = len(xs), list(dims), type(xs), type(output)
        xs.clear()

    def backward(ctx: Any, grads: list[Tensor]) -> Any:
        seen.append(ctx.seen)
        return [grad * 2 for grad in grads], None

    seen: list[Any] = []
    op = registry.custom_op(f"{ns}::f", fn, mutates_args=())
    op.register_autograd(backward, setup_context=setup_context)
    x = torch.ones(2, requires_grad=True)
    given, dims = [x, x], [3, 4]
    for _ in range(2):
        sum(op(given, dims)).sum().backward()
    assert seen == [(2, [3, 4], list, list)] * 2
    assert (len(given), dims) == (2, [3, 4])


def test_a_list_of_results_is_a_list(registry: Registry, ns: str) -> None:
    """Of a kernel that returns a tuple, too."""
    op = registry.custom_op(f"{ns}::f", lambda x: (x * 2, x * 3), mutates_args=(), schema="(Tensor x) -> Tensor[]")
    op.register_autograd(
        lambda ctx, grads: seen.append((ctx.kind, type(grads))) or grads[0],
        setup_context=lambda ctx, inputs, output: setattr(ctx, "kind", type(output)),
    )
    seen: list[Any] = []
    for _ in range(2):
        result = op(torch.ones(2, requires_grad=True))
        assert type(result) is list
        result[0].sum().backward()
    assert seen == [(list, list)] * 2


def test_needs_input_grad(registry: Registry, ns: str) -> None:
    """An entry for each argument; with tensors that are keyword-only, each of them has its place."""
    op = registry.custom_op(
        f"{ns}::f",
        lambda x, n=1, ys=None, *, z=None, flag=True: x * 2,
        mutates_args=(),
        schema="(Tensor x, int n=1, Tensor[]? ys=None, *, Tensor? z=None, bool flag=True) -> Tensor",
    )
    without = registry.custom_op(
        f"{ns}::g",
        lambda x, n=1, ys=None: x * 2,
        mutates_args=(),
        schema="(Tensor x, int n=1, Tensor[]? ys=None) -> Tensor",
    )
    seen: list[Any] = []

    def backward(ctx: Any, grad: Tensor) -> Any:
        seen.append(ctx.needs_input_grad)
        flags = [*ctx.needs_input_grad, False, False, False]
        return (
            grad,
            None,
            [grad for _ in flags[2]] if flags[2] else None,
            *([grad if flags[3] else None] if len(seen) <= 3 else []),
        )

    for each in (op, without):
        each.register_autograd(backward)
    x, y = torch.ones(2, requires_grad=True), torch.ones(2)
    for call in (
        lambda: op(x),
        lambda: op(x, 2, [y, x]),
        lambda: op(y, z=x, flag=False),
        lambda: without(x),
        lambda: without(x, 2),
        lambda: without(x, 2, [x, y]),
    ):
        call().sum().backward()
    assert seen == [
        (True, False, False, False),
        (True, False, [False, True], False),
        (False, False, False, True),
        (True,),
        (True, False),
        (True, False, [True, False]),
    ]


# What backward returns ------------------------------------------------------------------------------------------


@pytest.fixture
def many(registry: Registry, ns: str) -> Any:
    return registry.custom_op(
        f"{ns}::f",
        lambda x, ys, n=1, *, z=None: x * 1,
        mutates_args=(),
        schema="(Tensor x, Tensor[] ys, int n=1, *, Tensor? z=None) -> Tensor",
    )


WRONG = {
    "one too few": (lambda g: (g, [g], None, g), {}, r"a list of 2 gradients"),
    "of no tensor": (lambda g: (g, [g, 1], None, g), {}, r"ys\[1\]"),
    "of another shape": (lambda g: (g, [g, g[:1].repeat(3)], None, g), {}, r"ys\[1\]"),
    "missing in a list": (lambda g: (g, [g, None], None, g), {}, r"None for an argument that needs a gradient"),
    "missing by keyword": (lambda g: (g, [g, g], None, None), {}, r"None for an argument that needs a gradient"),
    "of a number": (lambda g: (g, [g, g], g, g), {"n": 2}, r"None: the argument is a"),
    "of a number left out": (lambda g: (g, [g, g], g, g), {}, r"None: the argument was left at its default"),
    "of a keyword left out": (lambda g: (g, [g, g], None, g), {"z": None}, r"None: the argument was left at its"),
    "one too many": (lambda g: (g, [g, g], None, g, g), {}, r"incorrect number of gradients"),
}


@pytest.mark.parametrize(("returned", "kwargs", "match"), WRONG.values(), ids=WRONG)
def test_gradients_that_do_not_fit(many: Any, returned: Any, kwargs: Any, match: str) -> None:
    many.register_autograd(lambda ctx, grad: returned(grad))
    x = torch.ones(2, requires_grad=True)
    result = many(x, [x, x], **{"z": x, **kwargs})
    with pytest.raises(AutogradError, match=match):
        result.sum().backward()


def test_none_for_lists_without_gradient(many: Any) -> None:
    many.register_autograd(lambda ctx, grad: (grad, None, None, None))
    x = torch.ones(2, requires_grad=True)
    for ys in ([], [torch.ones(2), torch.ones(2)]):
        (found,) = torch.autograd.grad(many(x, ys).sum(), x)
        assert found.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("check", ["always", "first", "never"])
def test_with_less_checks(registry: Registry, ns: str, check: str) -> None:
    schema = "(Tensor x, Tensor[] ys, *, Tensor? z=None) -> Tensor[]"
    op = registry.custom_op(
        f"{ns}::f", lambda x, ys, *, z=None: [x * 2, *(y * 3 for y in ys)], mutates_args=(), schema=schema, check=check
    )
    op.register_autograd(lambda ctx, grads: (grads[0] * 2, [grad * 3 for grad in grads[1:]], None))
    x, y = (torch.ones(2, requires_grad=True) for _ in range(2))
    for z in (None, torch.ones(2)):
        for _ in range(2):
            found = torch.autograd.grad(sum(op(x, [y, y], z=z)).sum(), (x, y))
            assert [each.tolist() for each in found] == [[2.0, 2.0], [6.0, 6.0]]


def test_no_gradient_for_a_list(registry: Registry, ns: str) -> None:
    op = registry.custom_op(
        f"{ns}::f", lambda xs, y, *, z: y * 2, mutates_args=(), schema="(Tensor[] xs, Tensor y, *, Tensor z) -> Tensor"
    )
    op.register_autograd(lambda ctx, grad: (None, grad * 2, None), nondiff_args=("xs", "z"))
    x = torch.ones(2, requires_grad=True)
    for _ in range(2):
        assert torch.autograd.grad(op([x, x], x, z=x).sum(), x)[0].tolist() == [2.0, 2.0]
    assert not op([x], x.detach(), z=x).requires_grad


def test_what_is_saved_of_a_list_without_a_graph_is_found(registry: Registry, ns: str) -> None:
    """A second derivative through it raises, and one through items of the lists is right."""
    op = registry.custom_op(
        f"{ns}::f", lambda xs: [x.exp() for x in xs], mutates_args=(), schema="(Tensor[] xs) -> Tensor[]"
    )
    x = torch.zeros(2, requires_grad=True)
    for save, message in ((lambda xs, ys: ys, None), (lambda xs, ys: [x.exp() for x in xs], "second derivative")):

        def setup_context(ctx: Any, inputs: Any, output: Any, save: Any = save) -> None:
            ctx.save_for_backward(*save(inputs[0], output))

        op.register_autograd(
            lambda ctx, grads: [grad * y for grad, y in zip(grads, ctx.saved_tensors, strict=True)],
            setup_context=setup_context,
        )
        (first,) = torch.autograd.grad(sum(op([x, x])).sum(), x, create_graph=True)
        assert first.tolist() == [2.0, 2.0]
        if message is None:
            assert torch.autograd.grad(first.sum(), x)[0].tolist() == [2.0, 2.0]
        else:
            with pytest.raises(AutogradError, match=message):
                torch.autograd.grad(first.sum(), x)


@pytest.mark.parametrize("name", ["list between tensors", "keyword-only, all sorts", "several lists", "mutates two"])
def test_compiled_with_its_backward(registry: Registry, ns: str, name: str) -> None:
    case = CASES[name]
    op = registry.custom_op(f"{ns}::f", case.fn, mutates_args=case.mutates, schema=case.schema)
    op.register_fake(case.fn if not case.mutates else lambda *args: None)
    op.register_reference(case.new_values or case.fn, gives="gradients")
    fn = torch.compile(lambda *xs: case.calls[-1](op, *xs), backend="aot_eager", fullgraph=True)
    same(gradients(fn), gradients(lambda *xs: case.calls[-1](case.fn, *xs)))


def test_names_do_not_meet_those_of_the_generated_functions(registry: Registry, ns: str) -> None:
    """Arguments may be called what the generated functions use, or a keyword of Python."""
    names = "ctx", "grads", "flag", "x", "_kernel", "lambda", "needs"
    schema = f"({', '.join(f'Tensor[] {name}' if i % 3 == 0 else f'Tensor {name}' for i, name in enumerate(names))})"
    op = registry.custom_op(
        f"{ns}::f",
        lambda *args: _weigh(itertools.chain(*(a if isinstance(a, list) else [a] for a in args))),
        mutates_args=(),
        schema=f"{schema} -> Tensor",
    )
    op.register_autograd(
        lambda ctx, grad: tuple([grad * i] if i % 3 == 0 else grad * i for i in range(len(names))),
    )
    inputs = [torch.ones(2, requires_grad=True) for _ in names]
    result = op(*([x] if i % 3 == 0 else x for i, x in enumerate(inputs)))
    assert [x.tolist() for x in torch.autograd.grad(result.sum(), inputs)] == [[i, i] for i in range(len(names))]


def test_names_of_arguments_that_may_be_left_out(registry: Registry, ns: str) -> None:
    schema = "(Tensor rest, Tensor result, Tensor? likes=None) -> Tensor"
    op = registry.custom_op(f"{ns}::f", lambda rest, result, likes=None: rest * 1, mutates_args=(), schema=schema)
    op.register_autograd(lambda ctx, grad: (grad, grad * 2, grad * 3 if ctx.needs_input_grad[2:] else None))
    inputs = [torch.ones(2, requires_grad=True) for _ in range(3)]
    for count in (2, 3):
        found = torch.autograd.grad(op(*inputs[:count]).sum(), inputs[:count])
        assert [x.tolist() for x in found] == [[i, i] for i in range(1, count + 1)]


def test_results_of_the_benchmark_agree() -> None:
    command = [PYTHON, "benchmarks/bench.py", "--group", "layouts", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "12 cases: the contenders agree\n"
