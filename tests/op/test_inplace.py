"""In-place ops; in-place and out ops in every context."""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Callable
from typing import Any, List, Optional, Tuple

import pytest
import torch
from helpers.inplace_out import INPLACE, OUT, aliases, define_double, define_sincos, sincos
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.testing import assert_close
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

from customops import Registry
from customops.errors import AutogradError, KernelError, SchemaError, TagError, UnsupportedError


def add_(x: Tensor, y: Tensor) -> Tensor:
    return x.add_(y)


def define_add_(registry: Registry, ns: str, fn: Any = add_, **options: Any) -> Any:
    return registry.custom_op(f"{ns}::add_", fn, **{"mutates_args": {"x"}, "tags": INPLACE} | options)


# In-place: definition -------------------------------------------------------------------------------------------


@pytest.mark.parity(28)
@pytest.mark.parametrize("mutates_args", [{"x"}, ("x",), ["x"]])
def test_inplace(registry: Registry, ns: str, mutates_args: Any) -> None:
    op = define_add_(registry, ns, mutates_args=mutates_args)
    x, y = torch.randn(3), torch.randn(3)
    expected = x + y
    assert op(x, y) is x
    assert_close(x, expected)
    assert op(x=x, y=y) is x
    assert_close(x, expected + y)
    assert getattr(torch.ops, ns).add_(x, y) is x
    assert op._opoverload(x, y) is x
    assert_close(x, expected + 3 * y)
    assert INPLACE in op.tags
    written, returned = aliases(op)
    assert written == returned == [{"a0"}]


@pytest.mark.parity(28)
def test_mutates_args_may_be_a_generator(registry: Registry, ns: str) -> None:
    op = define_add_(registry, ns, mutates_args=(name for name in ["x"]))
    x = torch.zeros(2)
    assert op(x, torch.ones(2)) is x
    assert x.tolist() == [1, 1]
    double = define_double(registry, ns, mutates_args=(name for name in ["out"]))
    assert double(torch.ones(2), out=x) is x
    assert x.tolist() == [2, 2]


@pytest.mark.parity(28)
def test_inplace_by_manual_schema(registry: Registry, ns: str) -> None:
    op = define_add_(registry, ns, lambda x, y: x.add_(y), schema="(Tensor(a!) x, Tensor y) -> Tensor(a!)")
    x, y = torch.randn(3), torch.randn(3)
    expected = x + y
    assert op(x, y) is x
    assert_close(x, expected)
    written, returned = aliases(op)
    assert written == returned == [{"a"}]
    assert INPLACE in op.tags


@pytest.mark.parity(28)
def test_inplace_needs_no_fake(registry: Registry, ns: str) -> None:
    op = define_add_(registry, ns)
    with FakeTensorMode():
        x = torch.empty(3)
        assert op(x, torch.empty(3)) is x
    x = torch.empty(3, device="meta")
    assert op(x, x) is x


def no_arguments() -> Tensor:
    raise NotImplementedError


def keyword_only(*, x: Tensor) -> Tensor:
    return x


def first_is_a_number(n: int, x: Tensor) -> Tensor:
    return x


def first_is_optional(x: Optional[Tensor]) -> Tensor:
    return x  # type: ignore[return-value]


def returns_nothing(x: Tensor, y: Tensor) -> None:
    x.add_(y)


def returns_two(x: Tensor, y: Tensor) -> Tuple[Tensor, Tensor]:
    return x, y


def returns_a_list(x: Tensor, y: Tensor) -> List[Tensor]:
    return [x]


@pytest.mark.parity(33)
@pytest.mark.parametrize(
    ("fn", "mutates_args", "phrase"),
    [
        (no_arguments, (), r"torch\.Tag\.inplace"),
        (keyword_only, ("x",), r"torch\.Tag\.inplace"),
        (first_is_a_number, (), "first positional argument"),
        (first_is_a_number, ("x",), "first positional argument"),
        (first_is_optional, ("x",), "first positional argument"),
        (add_, ("y",), "mutates_args"),
        (add_, ("x", "y"), "mutates_args"),
        (add_, (), "mutates_args"),
        (returns_nothing, ("x",), "return annotation"),
        (returns_two, ("x",), "return annotation"),
        (returns_a_list, ("x",), "return annotation"),
    ],
)
def test_inplace_definitions_that_are_refused(
    registry: Registry, ns: str, fn: Any, mutates_args: Any, phrase: str
) -> None:
    with pytest.raises(ValueError, match=phrase) as caught:
        define_add_(registry, ns, fn, mutates_args=mutates_args)
    assert isinstance(caught.value, SchemaError)
    assert len(registry) == 0


@pytest.mark.parity(33)
@pytest.mark.parametrize("returns", ["Tensor", "()", "Tensor(b!)", "(Tensor(a!), Tensor)"])
def test_the_return_of_a_manual_inplace_schema_must_alias(registry: Registry, ns: str, returns: str) -> None:
    with pytest.raises(ValueError, match="return must alias"):
        define_add_(registry, ns, schema=f"(Tensor(a!) x, Tensor y) -> {returns}")


@pytest.mark.parity(33)
def test_both_tags(registry: Registry, ns: str) -> None:
    with pytest.raises(AssertionError, match="mutually exclusive") as caught:
        define_add_(registry, ns, tags=[INPLACE, OUT])
    assert isinstance(caught.value, TagError)


# In-place: calls ------------------------------------------------------------------------------------------------


@pytest.mark.parity(29)
@pytest.mark.parametrize(
    "kernel",
    [
        lambda x, y: x + y,
        lambda x, y: x.add_(y).view_as(x),
        lambda x, y: y,
        lambda x, y: None,
        lambda x, y: (x,),
        lambda x, y: x.detach(),
    ],
)
def test_an_inplace_kernel_must_return_its_first_argument(registry: Registry, ns: str, kernel: Any) -> None:
    op = define_add_(registry, ns)
    op.register_kernel(["cpu", "cuda"], kernel)
    with pytest.raises(RuntimeError, match=f"{ns}::add_: .* must return its first argument") as caught:
        op(torch.ones(2), torch.ones(2))
    assert isinstance(caught.value, KernelError)
    assert caught.value.argument == "x"
    assert caught.value.where == f"<lambda> ({kernel.__code__.co_filename}:{kernel.__code__.co_firstlineno})"


def test_inplace_versions_and_views(registry: Registry, ns: str) -> None:
    def fill_(x: Tensor, by: float = 7.0) -> Tensor:
        x.numpy()[...] = by  # behind autograd's back
        return x

    op = registry.custom_op(f"{ns}::fill_", fill_, mutates_args=("x",), tags=INPLACE)
    base = torch.zeros(3, 2)
    row, same = base[1], base.detach()
    assert op(row) is row
    assert (base._version, row._version, same._version) == (1, 1, 1)
    assert base.tolist() == [[0, 0], [7, 7], [0, 0]]


@pytest.mark.parity(30)
def test_inplace_on_what_requires_grad(registry: Registry, ns: str) -> None:
    op = define_add_(registry, ns)
    x = torch.ones(2, requires_grad=True) * 1
    result = op(x, torch.ones(2))
    assert result.requires_grad
    assert result.tolist() == x.tolist() == [2, 2]
    with pytest.raises(RuntimeError, match="no autograd formula") as caught:
        result.sum().backward()
    assert isinstance(caught.value, AutogradError)
    z = torch.ones(2)
    result = op(z, torch.ones(2, requires_grad=True))
    assert result.requires_grad
    with pytest.raises(RuntimeError, match="no autograd formula"):
        result.sum().backward()


@pytest.mark.parity(30)
def test_inplace_without_grad_mode(registry: Registry, ns: str) -> None:
    op = define_add_(registry, ns)
    x = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        assert op(x, torch.ones(2)) is x
    assert (x.tolist(), x.requires_grad, x.grad_fn) == ([2, 2], True, None)
    with torch.inference_mode():
        y = torch.ones(2)
        assert op(y, y) is y
        assert y.tolist() == [2, 2]


@pytest.mark.parity(31)
@pytest.mark.parametrize("tag", [INPLACE, OUT])
def test_a_fake_for_a_tagged_op_is_used_with_a_warning(registry: Registry, ns: str, tag: Any) -> None:
    used = []

    def fake_add_(x: Tensor, y: Tensor) -> Tensor:
        used.append("add_")
        return x

    def fake_double(x: Tensor, *, out: Tensor) -> Tensor:
        used.append("double")
        return out

    inplace = tag is INPLACE
    op = define_add_(registry, ns) if inplace else define_double(registry, ns)
    with pytest.warns(UserWarning, match=re.escape(f"torch.{tag}")) as caught:
        op.register_fake(fake_add_ if inplace else fake_double)
    assert [warning.filename for warning in caught] == [__file__]
    with FakeTensorMode():
        x = torch.empty(2)
        assert (op(x, x) if inplace else op(torch.empty(2), out=x)) is x
    assert used == ["add_" if inplace else "double"]


@pytest.mark.parity(31)
def test_a_fake_for_an_ordinary_op_gives_no_warning(registry: Registry, ns: str) -> None:
    used = []

    def fake(x: Tensor) -> Tensor:
        used.append(1)
        return torch.empty_like(x)

    op = registry.custom_op(f"{ns}::f", lambda x: x + 1, mutates_args=(), schema="(Tensor x) -> Tensor")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        op.register_fake(fake)
    with FakeTensorMode():
        assert op(torch.empty(2)).shape == (2,)
    assert used == [1]


# In-place: compiled ---------------------------------------------------------------------------------------------


@pytest.mark.compile
@pytest.mark.parity(32)
@pytest.mark.parametrize(
    "options",
    [
        {"backend": "eager"},
        {"backend": "eager", "fullgraph": True},
        {"backend": "inductor", "fullgraph": True},
    ],
    ids=["eager", "eager-fullgraph", "inductor"],
)
def test_inplace_compiled(registry: Registry, ns: str, options: Any) -> None:
    op = define_add_(registry, ns)
    x, y = torch.randn(3), torch.randn(3)
    expected = x + y
    assert torch.compile(lambda x, y: op(x, y), **options)(x, y) is x
    assert_close(x, expected)


@pytest.mark.compile
def test_inplace_compiled_by_aot(registry: Registry, ns: str) -> None:
    op = define_add_(registry, ns)
    x, y = torch.randn(3), torch.randn(3)
    expected = x + y
    assert_close(torch.compile(lambda x, y: op(x, y), fullgraph=True, backend="aot_eager")(x, y), expected)
    assert_close(x, expected)


@pytest.mark.compile
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_the_written_argument_is_right_after_several_compiled_writes(registry: Registry, ns: str, backend: str) -> None:
    op = define_add_(registry, ns)

    def program(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = x.sin()
        before = z * 2
        for written in (z, y, z, y):
            op(written, x)
        return before, z + y

    x, y = torch.randn(3), torch.randn(3)
    expected = (x.sin() * 2, x.sin() + y + 4 * x), y + 2 * x
    got = torch.compile(program, fullgraph=True, backend=backend)(x, y)
    assert_close((got, y), expected)


# Torch's functionalization of tagged ops wraps the result anew, so that it and the argument no longer share memory:
# what is written through one does not reach the other, and inductor hands the argument's buffer out while the
# result still lives in it. Ops of torch.library suffer it; ours go another way there.


@pytest.mark.compile
@pytest.mark.parity(32)
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_the_result_of_a_compiled_inplace_op_is_the_argument(registry: Registry, ns: str, backend: str) -> None:
    op = define_add_(registry, ns)

    def program(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x.sin()
        before = y * 2
        z = op(op(y, x), x)
        return before, y + z, z

    x = torch.randn(3)
    y = x.sin() + 2 * x
    assert_close(torch.compile(program, fullgraph=True, backend=backend)(x), (x.sin() * 2, y * 2, y))


@pytest.mark.compile
def test_the_result_of_a_compiled_inplace_op_keeps_its_memory(registry: Registry, ns: str) -> None:
    op, other = define_add_(registry, ns), define_sincos(registry, ns)

    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.clone()
        z = op(y, x)
        sin, cos = torch.empty_like(x), torch.empty_like(x)  # must not get the buffer of y
        other(x, sin=sin, cos=cos)
        return torch.cat([z, y]), torch.cat([sin, cos])

    x = torch.randn(3, 4)
    expected = (torch.cat([2 * x, 2 * x]), torch.cat([x.sin(), x.cos()]))
    assert_close(torch.compile(program, fullgraph=True)(x), expected)


# Both, in every context -----------------------------------------------------------------------------------------


def both(inplace: Any, out: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    y, sin, cos = x.clone(), torch.empty_like(x), torch.empty_like(x)
    assert inplace(y, x) is y
    first, second = out(x, sin=sin, cos=cos)
    assert first is sin
    assert second is cos
    return y, sin + cos


def expected(x: Tensor) -> tuple[Tensor, Tensor]:
    return x * 2, torch.sin(x) + torch.cos(x)


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, DispatchMode, FunctionMode])
def test_the_same_objects_in_every_context(registry: Registry, ns: str, context: Callable[[], Any]) -> None:
    inplace, out = define_add_(registry, ns), define_sincos(registry, ns)
    with context():
        x = torch.randn(3)
        assert_close(both(inplace, out, x), expected(x))


class Plain(Tensor):
    pass


def test_the_same_objects_of_subclasses(registry: Registry, ns: str) -> None:
    inplace, out, x = define_add_(registry, ns), define_sincos(registry, ns), torch.randn(3)
    results = both(inplace, out, x.as_subclass(Plain))
    assert [type(result) for result in results] == [Plain, Plain]
    assert_close([result.as_subclass(Tensor) for result in results], list(expected(x)))
    two = both(inplace, out, TwoTensor(x, x + 1))
    assert_close([result.a for result in two], list(expected(x)))
    assert_close([result.b for result in two], list(expected(x + 1)))


def test_function_transforms(registry: Registry, ns: str) -> None:
    inplace, out, x = define_add_(registry, ns), define_sincos(registry, ns), torch.randn(3)

    def beside(x: Tensor) -> Tensor:
        y, sin, cos = x.detach().clone(), torch.empty(3), torch.empty(3)
        inplace(y, x.detach())
        out(x.detach(), sin=sin, cos=cos)
        return (x * y * (sin + cos)).sum()

    y, z = expected(x)
    assert_close(torch.func.grad(beside)(x), y * z)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        torch.func.grad(lambda x: inplace(x.clone(), x).sum())(x)
    with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
        torch.func.grad(lambda x: out(x, sin=torch.empty(3), cos=torch.empty(3))[0].sum())(x)
    for fn in (
        lambda x: inplace(x.clone(), x).sum(),
        lambda x: out(x, sin=torch.empty(3), cos=torch.empty(3))[0].sum(),
    ):
        with pytest.raises(UnsupportedError, match="forward-mode"):  # zeros would be wrong
            torch.func.jvp(fn, (x,), (torch.ones(3),))


def test_from_several_threads(registry: Registry, ns: str) -> None:
    inplace, out, wrong = define_add_(registry, ns), define_sincos(registry, ns), []

    def work(seed: int) -> None:
        x = torch.full((5,), float(seed))
        try:
            for i in range(100):
                if i % 10 == seed:
                    inplace.register_kernel(["cpu", "cuda"], lambda x, y: x.add_(y))
                    out.register_kernel("cpu", sincos)
                assert_close(both(inplace, out, x), expected(x))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
