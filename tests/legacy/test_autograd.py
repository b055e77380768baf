"""Gradients by the old functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers.legacies import op_of, sine, with_formula
from helpers.tensors import leaf
from torch import Tensor
from torch.library import Library
from torch.testing import assert_close

import customops
from customops import default_registry, legacy
from customops.errors import CallbackError, RegistrationError
from customops.legacy import objects


@pytest.fixture(autouse=True)
def _clean(ns: str) -> Iterator[None]:
    """Destroy what a test leaves in the global registry, as users' fixtures do."""
    yield
    for key in [key for key in objects.global_registry if key.startswith(f"{ns}")]:
        objects.global_registry[key]._destroy()


# Gradients ------------------------------------------------------------------------------------------------------


@pytest.mark.parity(72)
@pytest.mark.parametrize("has_kernel", [False, True])
@pytest.mark.parametrize(
    ("schema", "make"),
    [
        ("(Tensor x) -> Tensor", lambda g, p: (g,)),
        ("(Tensor x, Tensor y) -> Tensor", lambda g, p: (p, g)),
        ("(Tensor x, Tensor y) -> Tensor", lambda g, p: (g, p)),
        ("(Tensor[] xs) -> Tensor", lambda g, p: ([p, g],)),
        ("(Tensor? x, Tensor y) -> Tensor", lambda g, p: (None, g)),
        ("(int n, Tensor?[] xs) -> Tensor", lambda g, p: (1, [None, g])),
    ],
)
def test_a_call_that_needs_a_gradient_without_formula(ns: str, schema: str, make: Any, has_kernel: bool) -> None:
    legacy.custom_op(f"{ns}::foo", schema)
    if has_kernel:
        legacy.impl(f"{ns}::foo", func=lambda *args: torch.zeros(2))
    args = make(leaf(1.0, 2.0), torch.ones(2))
    with pytest.raises(RuntimeError, match=f"Autograd has not been implemented for operator {ns}::foo"):
        op_of(ns)(*args)
    if has_kernel:
        with torch.no_grad():
            assert op_of(ns)(*args).tolist() == [0, 0]
        plain = make(torch.ones(2), torch.ones(2))
        assert not op_of(ns)(*plain).requires_grad


def test_a_gradient_of_keyword_only_tensors(ns: str) -> None:
    legacy.custom_op(f"{ns}::foo", "(*, Tensor x) -> Tensor")
    with pytest.raises(RuntimeError, match="Autograd has not been implemented"):
        op_of(ns)(x=leaf(1.0))
    legacy.impl(f"{ns}::foo", func=lambda *, x: x * 3)
    legacy.impl_save_for_backward(f"{ns}::foo", func=lambda inputs, output: None)
    legacy.impl_backward(f"{ns}::foo", func=lambda ctx, saved, grad: {"x": grad * 3})
    x = leaf(1.0)
    op_of(ns)(x=x).backward()
    assert x.grad == 3


def test_forward_mode_raises(ns: str) -> None:
    legacy.custom_op(f"{ns}::foo", "(Tensor x) -> Tensor")
    legacy.impl(f"{ns}::foo", func=torch.sin)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            torch.func.jvp(op_of(ns), (torch.ones(1),), (torch.ones(1),))
        if f"{ns}::foo" in objects.global_registry and objects.global_registry[f"{ns}::foo"]._pair.save is None:
            legacy.impl_save_for_backward(f"{ns}::foo", func=lambda inputs, output: inputs.x)
            legacy.impl_backward(f"{ns}::foo", func=lambda ctx, x, grad: {"x": grad * x.cos()})


@pytest.mark.compile
@pytest.mark.parity(73)
def test_a_formula(ns: str) -> None:
    op = sine(ns)
    x = leaf(0.1, 0.2, 0.3)
    op(x).sum().backward()
    assert_close(x.grad, x.detach().cos())
    legacy.impl_abstract(f"{ns}::foo", func=torch.empty_like)
    compiled = torch.compile(lambda x: op(x).sum(), fullgraph=True, backend="aot_eager")
    x.grad = None
    compiled(x).backward()
    assert_close(x.grad, x.detach().cos())
    double = leaf(0.1, 0.2).double().detach().requires_grad_()
    assert torch.autograd.gradcheck(op, (double,))
    assert_close(torch.func.grad(lambda x: torch.sin(op(x)).sum())(double.detach()),
                 torch.func.grad(lambda x: torch.sin(torch.sin(x)).sum())(double.detach()))  # fmt: skip


@pytest.mark.parity(73)
def test_what_save_for_backward_is_given(ns: str) -> None:
    seen: list[Any] = []

    def save(inputs: Any, output: Any) -> Any:
        seen.append((inputs, output))
        return {"of": (inputs.x, [output[1][0], 7]), "name": "saved"}

    def backward(ctx: Any, saved: Any, grad: Tensor, grads: list[Tensor]) -> Any:
        x, (y, seven) = saved["of"]
        assert seven == 7
        assert saved["name"] == "saved"
        return {"x": grad * seven + grads[0] * y, "ys": [None, grads[1] * x]}

    op = with_formula(
        ns,
        "(Tensor x, Tensor[] ys, *, int n=4, str? s=None) -> (Tensor, Tensor[])",
        lambda x, ys, *, n, s: (x * n, [x + 0, ys[1] * n]),
        save,
        backward,
    )
    x, y = leaf(1.0, 2.0), leaf(3.0, 4.0)
    out, (first, second) = op(x, [torch.ones(2), y])
    assert len(seen) == 1  # once per forward
    inputs, output = seen[0]
    assert inputs._fields == ("x", "ys", "n", "s")
    assert inputs.x is x
    assert (inputs.ys[1].tolist(), inputs.n, inputs.s) == ([3, 4], 4, None)
    assert [out.tolist() for out in (output[0], *output[1])] == [[4, 8], [1, 2], [12, 16]]
    (out.sum() + (2 * first).sum() + (3 * second).sum()).backward()
    assert_close(x.grad, torch.tensor([7.0, 7.0]) + 2 * torch.tensor([1.0, 2.0]))
    assert_close(y.grad, 3 * torch.tensor([1.0, 2.0]))
    op(x.detach(), [torch.ones(2), y.detach()])
    with torch.no_grad():
        op(x, [x, y])
    assert len(seen) == 1


@pytest.mark.parity(73)
def test_half_a_formula(ns: str) -> None:
    legacy.custom_op(f"{ns}::foo", "(Tensor x) -> Tensor")
    legacy.impl(f"{ns}::foo", func=torch.sin)
    legacy.impl_backward(f"{ns}::foo", func=lambda ctx, x, grad: {"x": grad * x.cos()})
    for x in (torch.ones(1), leaf(1.0)):
        with pytest.raises(RuntimeError, match="unable to find a 'save_for_backward'"):
            op_of(ns)(x)
    legacy.impl_save_for_backward(f"{ns}::foo", func=lambda inputs, output: inputs.x)
    assert_close(op_of(ns)(leaf(1.0)), torch.ones(1).sin(), check_stride=False)


@pytest.mark.parity(73)
def test_the_other_half_of_a_formula(ns: str, lib: Library) -> None:
    lib.define("foo(Tensor x) -> Tensor")
    legacy.impl(f"{ns}::foo", func=torch.sin)
    legacy.impl_save_for_backward(f"{ns}::foo", func=lambda inputs, output: inputs.x)
    with pytest.raises(RuntimeError, match="unable to find a 'backward'"):
        op_of(ns)(leaf(1.0))
    legacy.impl_backward(f"{ns}::foo", func=lambda ctx, x, grad: {"x": grad * x.cos()})
    x = leaf(0.3)
    op_of(ns)(x).backward()
    assert_close(x.grad, torch.tensor([0.3]).cos())
    legacy._destroy(f"{ns}::foo")
    lib.impl("foo", torch.sin, "CompositeExplicitAutograd")
    with torch.no_grad():
        assert_close(op_of(ns)(x), x.detach().sin())


def test_a_second_formula(ns: str) -> None:
    sine(ns)
    with pytest.raises(RuntimeError, match="already has a save_for_backward impl"):
        legacy.impl_save_for_backward(f"{ns}::foo", func=lambda inputs, output: None)
    with pytest.raises(RuntimeError, match="already has a backward impl"):
        legacy.impl_backward(f"{ns}::foo", func=lambda ctx, saved, grad: {})


def test_a_formula_ends_with_its_scope(ns: str) -> None:
    legacy.custom_op(f"{ns}::foo", "(Tensor x) -> Tensor")
    legacy.impl(f"{ns}::foo", func=torch.sin)
    for _ in range(2):
        with default_registry.scope():
            legacy.impl_save_for_backward(f"{ns}::foo", func=lambda inputs, output: inputs.x)
            legacy.impl_backward(f"{ns}::foo", func=lambda ctx, x, grad: {"x": grad * x.cos()})
            x = leaf(0.3)
            op_of(ns)(x).backward()
            assert_close(x.grad, torch.tensor([0.3]).cos())
        with pytest.raises(RuntimeError, match="Autograd has not been implemented"):
            op_of(ns)(leaf(1.0))


def test_callbacks_that_do_not_fit(ns: str) -> None:
    legacy.custom_op(f"{ns}::foo", "(Tensor x) -> Tensor")
    with pytest.raises(CallbackError, match="save_for_backward function does not fit"):
        legacy.impl_save_for_backward(f"{ns}::foo", func=lambda inputs: None)
    with pytest.raises(CallbackError, match="backward does not fit"):
        legacy.impl_backward(f"{ns}::foo", func=lambda ctx, grad: None)


@pytest.mark.parity(74)
@pytest.mark.parametrize(
    ("result", "phrase"),
    [
        (lambda x, grad: grad, "to be a dict"),
        (lambda x, grad: None, "to be a dict"),
        (lambda x, grad: (grad,), "to be a dict"),
        (lambda x, grad: {"x": grad, "y": grad}, "to have keys {'x'}"),
        (lambda x, grad: {"y": grad}, "to have keys {'x'}"),
        (lambda x, grad: {"x": grad, 3: None}, "to have keys {'x'}"),
        (lambda x, grad: {}, "to have keys {'x'}"),
        (lambda x, grad: {"x": 1.0}, "either None or a Tensor"),
        (lambda x, grad: {"x": (grad,)}, "either None or a Tensor"),
    ],
)
def test_a_backward_that_returns_something_else(ns: str, result: Any, phrase: str) -> None:
    out = sine(ns, result)(leaf(1.0))
    with pytest.raises(RuntimeError, match=phrase):
        out.backward()


@pytest.mark.parity(74)
@pytest.mark.parametrize("type_", ["Tensor", "Tensor?"])
def test_a_missing_key_of_a_tensor(ns: str, type_: str) -> None:
    op = with_formula(
        ns,
        f"(Tensor x, {type_} y) -> Tensor",
        lambda x, y: x.clone(),
        lambda inputs, output: None,
        lambda ctx, saved, grad: {"x": grad},
    )
    others = [leaf(1.0)] if type_ == "Tensor" else [leaf(1.0), None]
    for y in others:
        with pytest.raises(RuntimeError, match=r"to have keys {.*'y'.*}"):
            op(leaf(1.0), y).backward()


@pytest.mark.parity(74)
def test_a_key_of_an_argument_that_is_no_tensor(ns: str) -> None:
    op = with_formula(
        ns,
        "(Tensor x, int n) -> Tensor",
        lambda x, n: x * n,
        lambda inputs, output: inputs.n,
        lambda ctx, n, grad: {"x": grad * n, "n": None},
    )
    with pytest.raises(RuntimeError, match="non-Tensor-like types"):
        op(leaf(1.0), 3).backward()


@pytest.mark.parity(74)
@pytest.mark.parametrize(
    ("gradients", "phrase"),
    [
        (lambda grad: grad, "list of gradients"),
        (lambda grad: None, "list of gradients"),
        (lambda grad: [grad, grad], "3 gradients but got 2"),
        (lambda grad: [grad, None, 3], "None or Tensor"),
        (lambda grad: [grad, [grad], None], "None or Tensor"),
    ],
)
def test_gradients_of_a_list(ns: str, gradients: Any, phrase: str) -> None:
    op = with_formula(
        ns,
        "(Tensor[] xs) -> Tensor",
        lambda xs: sum(xs),
        lambda inputs, output: None,
        lambda ctx, saved, grad: {"xs": gradients(grad)},
    )
    out = op([leaf(1.0), leaf(2.0), torch.ones(1)])
    with pytest.raises(RuntimeError, match=phrase):
        out.backward()


@pytest.mark.parity(74)
@pytest.mark.parametrize("container", [list, tuple])
def test_gradients_of_a_list_that_fit(ns: str, container: Any) -> None:
    op = with_formula(
        ns,
        "(Tensor[] xs, Tensor? y=None) -> Tensor",
        lambda xs, y: sum((i + 1) * x for i, x in enumerate(xs)),
        lambda inputs, output: len(inputs.xs),
        lambda ctx, n, grad: {"xs": container([grad, None, *(grad * (i + 1) for i in range(2, n))]), "y": None},
    )
    xs = [leaf(1.0), torch.ones(1), leaf(3.0)]
    op(xs).backward()
    assert [x.grad and x.grad.item() for x in xs] == [1, None, 3]


@pytest.mark.parity(75)
@pytest.mark.parametrize("value", [True, (True, True), [True], [True, True, True], [1, 0], [], "ab", [True, None]])
def test_output_differentiability_must_fit(ns: str, value: Any) -> None:
    legacy.custom_op(f"{ns}::foo", "(Tensor x) -> (Tensor, Tensor)")
    with pytest.raises(RuntimeError, match="output_differentiability"):
        legacy.impl_backward(f"{ns}::foo", output_differentiability=value)(lambda ctx, saved, a, b: {"x": a})
    with pytest.raises(RuntimeError, match="output_differentiability"):
        objects.global_registry[f"{ns}::foo"].impl_backward(value)


@pytest.mark.parity(75)
def test_outputs_that_are_not_differentiable(ns: str) -> None:
    op = with_formula(
        ns,
        "(Tensor x) -> (Tensor[], Tensor, Tensor, int)",
        lambda x: ([x * 2, x * 3], x * 4, x * 5, 6),
        lambda inputs, output: None,
        lambda ctx, saved, many, one, other, number: {"x": one * 4},
        [False, True, False, False],
    )
    x = leaf(1.0, 2.0)
    many, one, other, number = op(x)
    assert [out.requires_grad for out in (*many, one, other)] == [False, False, True, False]
    assert number == 6
    one.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [4, 4]


@pytest.mark.parity(75)
def test_a_number_that_is_differentiable(ns: str) -> None:
    op = with_formula(
        ns,
        "(Tensor x) -> (Tensor, int)",
        lambda x: (x.clone(), 3),
        lambda inputs, output: None,
        lambda ctx, saved, grad, _: {"x": grad},
        [True, True],
    )
    with pytest.raises(RuntimeError, match="is not a Tensor"):
        op(leaf(1.0))


def halves(ns: str) -> list[Callable[[], Any]]:
    return [
        lambda: legacy.impl_save_for_backward(f"{ns}::foo", func=lambda inputs, output: None),
        lambda: legacy.impl_backward(f"{ns}::foo", func=lambda ctx, saved, *grads: {}),
    ]


@pytest.mark.parity(76)
@pytest.mark.parametrize(
    ("schema", "phrase"),
    [
        ("(Tensor(a) x) -> Tensor(a)", "operator that returns views"),
        ("(Tensor(a!) x) -> Tensor", "non-functional"),
        ("(Tensor(a!) x) -> Tensor(a!)", "non-functional"),
        ("(Tensor x) -> ()", "no returns"),
    ],
)
def test_a_gradient_for_a_schema_that_has_none(ns: str, lib: Library, schema: str, phrase: str) -> None:
    lib.define(f"foo{schema}")
    for register in halves(ns):
        with pytest.raises(RuntimeError, match=phrase):
            register()


@pytest.mark.parity(76)
@pytest.mark.parametrize("key", ["CompositeImplicitAutograd", "Autograd", "AutogradCPU", "AutogradCUDA"])
def test_a_gradient_for_an_op_that_has_one(ns: str, lib: Library, key: str) -> None:
    lib.define("foo(Tensor x) -> Tensor")
    lib.impl("foo", lambda x: x.sin().cos(), key)
    is_composite = key == "CompositeImplicitAutograd"
    problem = "it is differentiated through the ops" if is_composite else "a kernel for gradients already, at "
    for register in halves(ns):
        with pytest.raises(RegistrationError, match=problem) as caught:
            register()
        assert f"{key}" in str(caught.value.problem)
        assert caught.value.op == f"{ns}::foo"
        assert (caught.value.fix == "register gradients for those ops") is is_composite


def test_a_gradient_for_an_op_of_customops(ns: str) -> None:
    customops.custom_op(f"{ns}::foo", torch.sin, mutates_args=(), schema="(Tensor x) -> Tensor")
    for register in halves(ns):
        with pytest.raises(RegistrationError, match="Autograd"):
            register()
    objects.global_registry[f"{ns}::foo"]._destroy()  # of the entry, not of the op
    assert_close(op_of(ns)(torch.ones(1)), torch.ones(1).sin())
    default_registry[f"{ns}::foo"].unregister()
