"""Out ops."""

from __future__ import annotations

from typing import Any, List, Optional, Tuple

import pytest
import torch
from helpers.inplace_out import OUT, aliases, define_double, define_sincos, double, sincos
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

import customops
from customops import Registry
from customops.errors import AutogradError, KernelError, RegistrationError, SchemaError

# Out: definition ------------------------------------------------------------------------------------------------


@pytest.mark.parity(34)
def test_out(registry: Registry, ns: str) -> None:
    op = define_double(registry, ns)
    x, out = torch.randn(3), torch.zeros(3)
    assert op(x, out=out) is out
    assert_close(out, x + x)
    assert getattr(torch.ops, ns).double(x, out=out) is out
    assert OUT in op.tags
    assert [argument.kwarg_only for argument in op._opoverload._schema.arguments] == [False, True]
    written, returned = aliases(op)
    assert written == returned
    assert len(written) == 1


@pytest.mark.parity(34)
def test_several_outs(registry: Registry, ns: str) -> None:
    op = define_sincos(registry, ns)
    x, sin, cos = torch.randn(3), torch.zeros(3), torch.zeros(3)
    result = op(x, cos=cos, sin=sin)
    assert type(result) is tuple
    assert result[0] is sin
    assert result[1] is cos
    assert_close(result, (torch.sin(x), torch.cos(x)))
    assert [argument.kwarg_only for argument in op._opoverload._schema.arguments] == [False, True, True]
    written, returned = aliases(op)
    assert written == returned
    assert written[0] != written[1]


@pytest.mark.parity(34)
def test_outs_among_other_keyword_arguments(registry: Registry, ns: str) -> None:
    def f(x: Tensor, *, first: Tensor, by: float = 2.0, second: Tensor, n: int) -> Tuple[Tensor, Tensor]:
        return first.copy_(x * by), second.copy_(x + n)

    op = registry.custom_op(f"{ns}::f", f, mutates_args=("second", "first"), tags=OUT)
    x, first, second = torch.randn(3), torch.zeros(3), torch.zeros(3)
    result = op(x, n=3, second=second, first=first)
    assert result[0] is first
    assert result[1] is second
    assert_close(result, (x * 2, x + 3))


@pytest.mark.parity(34)
def test_outs_by_manual_schema(registry: Registry, ns: str) -> None:
    schema = "(Tensor x, *, Tensor(a!) sin, Tensor(b!) cos) -> (Tensor(a!), Tensor(b!))"
    op = define_sincos(registry, ns, schema=schema)
    x, sin, cos = torch.randn(3), torch.zeros(3), torch.zeros(3)
    result = op(x, sin=sin, cos=cos)
    assert (result[0] is sin, result[1] is cos) == (True, True)
    assert_close(result, (torch.sin(x), torch.cos(x)))
    assert aliases(op) == ([{"a"}, {"b"}], [{"a"}, {"b"}])
    one = define_double(registry, ns, schema="(Tensor x, *, Tensor(z!) out) -> Tensor(z!)")
    assert one(x, out=sin) is sin
    assert_close(sin, x + x)


@pytest.mark.parity(34)
def test_out_needs_no_fake(registry: Registry, ns: str) -> None:
    one, two = define_double(registry, ns), define_sincos(registry, ns)

    def check(x: Tensor, a: Tensor, b: Tensor) -> None:
        assert one(x, out=a) is a
        result = two(x, sin=a, cos=b)
        assert (result[0] is a, result[1] is b) == (True, True)

    with FakeTensorMode():
        check(torch.empty(3), torch.empty(3), torch.empty(3))
    check(*(torch.empty(3, device="meta") for _ in range(3)))


def positional_out(x: Tensor, out: Tensor) -> Tensor:
    return out


def optional_out(x: Tensor, *, out: Optional[Tensor]) -> Tensor:
    return out  # type: ignore[return-value]


def list_out(x: Tensor, *, out: List[Tensor]) -> Tensor:
    return out[0]


def fewer_returns(x: Tensor, *, sin: Tensor, cos: Tensor) -> Tensor:
    return sin


def no_returns(x: Tensor, *, out: Tensor) -> None:
    return None


def tuple_of_one(x: Tensor, *, out: Tensor) -> Tuple[Tensor]:
    return (out,)


def tuple_of_two(x: Tensor, *, out: Tensor) -> Tuple[Tensor, Tensor]:
    return out, out


@pytest.mark.parity(39)
@pytest.mark.parametrize(
    ("fn", "mutates_args", "phrase"),
    [
        (positional_out, ("out",), "keyword-only"),
        (double, ("x", "out"), "keyword-only"),
        (double, (), "at least one"),
        (positional_out, (), "at least one"),
        (optional_out, ("out",), "only supports"),
        (list_out, ("out",), "only supports"),
        (fewer_returns, ("sin", "cos"), "return annotation"),
        (no_returns, ("out",), "return annotation"),
        (tuple_of_one, ("out",), "return annotation"),
        (tuple_of_two, ("out",), "return annotation"),
        (sincos, ("sin",), "return annotation"),
    ],
)
def test_out_definitions_that_are_refused(registry: Registry, ns: str, fn: Any, mutates_args: Any, phrase: str) -> None:
    with pytest.raises(ValueError, match=phrase) as caught:
        define_double(registry, ns, fn, mutates_args=mutates_args)
    assert isinstance(caught.value, SchemaError)
    assert len(registry) == 0


@pytest.mark.parity(39)
@pytest.mark.parametrize(
    ("schema", "phrase"),
    [
        ("(Tensor x, Tensor(a!) out) -> Tensor(a!)", "keyword-only"),
        ("(Tensor x, *, Tensor(a!)? out) -> Tensor(a!)", "only supports Tensor"),
        ("(Tensor x, *, Tensor(a!)[] out) -> Tensor(a!)", "only supports Tensor"),
        ("(Tensor x, *, int(a!) out) -> int(a!)", "only supports Tensor"),
        ("(Tensor x, *, Tensor(a!) out) -> Tensor", "return annotation"),
        ("(Tensor x, *, Tensor(a!) out) -> ()", "return annotation"),
    ],
)
def test_manual_out_schemas_that_are_refused(registry: Registry, ns: str, schema: str, phrase: str) -> None:
    with pytest.raises(ValueError, match=phrase):
        define_double(registry, ns, schema=schema)
    assert len(registry) == 0


@pytest.mark.parity(39)
def test_outs_returned_in_another_order_are_refused(registry: Registry, ns: str) -> None:
    schema = "(Tensor x, *, Tensor(a!) sin, Tensor(b!) cos) -> (Tensor(b!), Tensor(a!))"
    with pytest.raises(ValueError, match="return annotation"):
        define_sincos(registry, ns, schema=schema)


@pytest.mark.parity(18)
def test_keyword_only_tensors_beside_the_outs(registry: Registry, ns: str) -> None:
    def f(x: Tensor, *, y: Tensor, out: Tensor) -> Tensor:
        return torch.add(x, y, out=out)

    op = registry.custom_op(f"{ns}::f", f, mutates_args=("out",), tags=OUT)
    x, y, out = torch.randn(3), torch.randn(3), torch.zeros(3)
    assert op(x, out=out, y=y) is out
    assert_close(out, x + y)


# Out: calls -----------------------------------------------------------------------------------------------------


@pytest.mark.parity(35)
@pytest.mark.parametrize(
    "kernel",
    [
        lambda x, *, sin, cos: (cos, sin),
        lambda x, *, sin, cos: (sin, cos.clone()),
        lambda x, *, sin, cos: (sin, cos.view_as(cos)),
        lambda x, *, sin, cos: (sin, cos, cos),
        lambda x, *, sin, cos: (sin,),
        lambda x, *, sin, cos: sin,
        lambda x, *, sin, cos: None,
        lambda x, *, sin, cos: (x, x),
    ],
)
def test_an_out_kernel_must_return_its_outs(registry: Registry, ns: str, kernel: Any) -> None:
    op = define_sincos(registry, ns)
    op.register_kernel("cpu", kernel)
    with pytest.raises(RuntimeError, match=f"{ns}::sincos: .*mutable keyword-only arguments") as caught:
        op(torch.ones(2), sin=torch.ones(2), cos=torch.ones(2))
    assert isinstance(caught.value, KernelError)
    assert caught.value.expected == "sin, cos"
    assert caught.value.where == f"<lambda> ({kernel.__code__.co_filename}:{kernel.__code__.co_firstlineno})"


@pytest.mark.parity(35)
@pytest.mark.parametrize("kernel", [lambda x, *, out: x, lambda x, *, out: x * 2, lambda x, *, out: (out,)])
def test_a_kernel_with_one_out_must_return_it(registry: Registry, ns: str, kernel: Any) -> None:
    op = define_double(registry, ns, kernel, schema="(Tensor x, *, Tensor(a!) out) -> Tensor(a!)")
    with pytest.raises(RuntimeError, match="mutable keyword-only arguments"):
        op(torch.ones(2), out=torch.ones(2))


def test_outs_may_come_back_in_a_list(registry: Registry, ns: str) -> None:
    op = define_sincos(registry, ns)
    op.register_kernel("cpu", lambda x, *, sin, cos: [sin.fill_(1), cos.fill_(2)])
    sin, cos = torch.zeros(1), torch.zeros(1)
    result = op(torch.ones(1), sin=sin, cos=cos)
    assert type(result) is tuple
    assert (result[0] is sin, result[1] is cos, sin.item(), cos.item()) == (True, True, 1, 2)


@pytest.mark.parity(36)
@pytest.mark.parametrize("which", ["x", "out"])
def test_out_refuses_to_be_differentiated(registry: Registry, ns: str, which: str) -> None:
    op = define_double(registry, ns)
    x, out = torch.ones(2, requires_grad=which == "x"), torch.zeros(2, requires_grad=which == "out")
    phrase = r"functions with out=\.\.\. arguments don't support automatic differentiation"
    with pytest.raises(RuntimeError, match=phrase) as caught:
        op(x, out=out)
    assert isinstance(caught.value, AutogradError)
    assert out.tolist() == [0, 0]
    with pytest.raises(RuntimeError, match=phrase):
        getattr(torch.ops, ns).double(x, out=out)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert op(x, out=out) is out
        assert out.tolist() == [2, 2]
        assert out.requires_grad == (which == "out")
        assert out.grad_fn is None


@pytest.mark.parity(36)
def test_out_refuses_grad_in_a_list(registry: Registry, ns: str) -> None:
    op = registry.custom_op(
        f"{ns}::total",
        lambda xs, *, out: out.copy_(sum(xs)),
        mutates_args=("out",),
        tags=OUT,
        schema="(Tensor[] xs, *, Tensor(a!) out) -> Tensor(a!)",
    )
    xs = [torch.ones(2), torch.ones(2)]
    assert op(xs, out=torch.zeros(2)).tolist() == [2, 2]
    xs[1].requires_grad_()
    with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
        op(xs, out=torch.zeros(2))


@pytest.mark.parity(37)
def test_out_refuses_a_gradient_formula(registry: Registry, ns: str) -> None:
    op = define_double(registry, ns)
    for register in (
        op.register_autograd,
        lambda fn: customops.register_autograd(op, fn),
        lambda fn: customops.register_autograd(f"{ns}::double", fn),
        lambda fn: customops.register_autograd(op._opoverload, fn),
    ):
        with pytest.raises(RuntimeError, match="Out variants do not support autograd") as caught:
            register(lambda ctx, grad: grad)
        assert isinstance(caught.value, RegistrationError)


@pytest.mark.skipif(not isinstance(OUT, torch.Tag), reason="Tag.out is not in this torch")
@pytest.mark.parity(37)
def test_an_out_op_that_torch_defined_refuses_a_gradient_formula(registry: Registry, ns: str) -> None:
    with torch.library._scoped_library(ns, "FRAGMENT") as lib:
        lib.define("f(Tensor x, *, Tensor(a!) out) -> Tensor(a!)", tags=OUT)
        with pytest.raises(RuntimeError, match="Out variants do not support autograd"):
            registry.adopt(f"{ns}::f").register_autograd(lambda ctx, grad: grad, lib=lib)
        with pytest.raises(RuntimeError, match="Out variants do not support autograd"):
            customops.register_autograd(getattr(torch.ops, ns).f.default, lambda ctx, grad: grad, lib=lib)


def test_out_versions(registry: Registry, ns: str) -> None:
    def fill(x: Tensor, *, a: Tensor, b: Tensor) -> Tuple[Tensor, Tensor]:
        a.numpy()[...] = b.numpy()[...] = 7  # behind autograd's back
        return a, b

    op = registry.custom_op(f"{ns}::fill", fill, mutates_args=("a", "b"), tags=OUT)
    x, a, b = torch.zeros(2), torch.zeros(2), torch.zeros(2)
    op(x, a=a, b=b)
    assert (x._version, a._version, b._version) == (0, 1, 1)
    assert_close((a, b), (torch.full((2,), 7.0),) * 2)


# Out: compiled --------------------------------------------------------------------------------------------------


@pytest.mark.compile
@pytest.mark.parity(38)
@pytest.mark.parametrize(
    "options",
    [{"backend": "eager"}, {"backend": "eager", "fullgraph": True}],
    ids=["eager", "eager-fullgraph"],
)
def test_out_compiled(registry: Registry, ns: str, options: Any) -> None:
    one, two = define_double(registry, ns), define_sincos(registry, ns)
    x, a, b = torch.randn(3), torch.zeros(3), torch.zeros(3)
    assert torch.compile(lambda x, a: one(x, out=a), **options)(x, a) is a
    assert_close(a, x + x)
    first, second = torch.compile(lambda x, a, b: two(x, sin=a, cos=b), **options)(x, a, b)
    assert (first is a, second is b) == (True, True)
    assert_close((a, b), (torch.sin(x), torch.cos(x)))


@pytest.mark.compile
@pytest.mark.parity(38)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_out_compiled_values(registry: Registry, ns: str, backend: str) -> None:
    op = define_sincos(registry, ns)
    x, a, b = torch.randn(3), torch.zeros(3), torch.zeros(3)
    got = torch.compile(lambda x, a, b: op(x, sin=a, cos=b), fullgraph=True, backend=backend)(x, a, b)
    assert_close(got, (torch.sin(x), torch.cos(x)))
    assert_close((a, b), (torch.sin(x), torch.cos(x)))


@pytest.mark.compile
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_the_outs_are_right_after_compiled_writes(registry: Registry, ns: str, backend: str) -> None:
    one, two = define_double(registry, ns), define_sincos(registry, ns)

    def program(x: Tensor, a: Tensor) -> Tensor:
        sin, cos = torch.empty_like(x), torch.empty_like(x)
        two(x, sin=sin, cos=cos)
        one(x, out=a)
        return sin + cos + a

    x, a = torch.randn(3), torch.zeros(3)
    got = torch.compile(program, fullgraph=True, backend=backend)(x, a)
    assert_close(got, torch.sin(x) + torch.cos(x) + 2 * x)
    assert_close(a, x + x)


@pytest.mark.compile
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_the_result_of_a_compiled_out_op_is_the_argument(registry: Registry, ns: str, backend: str) -> None:
    op = define_sincos(registry, ns)

    def program(x: Tensor, a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        cos = torch.empty_like(x)
        first, second = op(x, sin=a, cos=cos)
        return first * 2, second - 1, cos + 1

    x, a = torch.randn(3), torch.zeros(3)
    got = torch.compile(program, fullgraph=True, backend=backend)(x, a)
    assert_close(got, (torch.sin(x) * 2, torch.cos(x) - 1, torch.cos(x) + 1))
    assert_close(a, torch.sin(x))
