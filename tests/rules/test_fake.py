"""register_fake: how, when it is called, and ops that have one by their tag."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from typing import Any, List, Optional, Tuple

import numpy as np
import pytest
import torch
from helpers.fakes import fake_shape, meta_shape, rows, source_of
from helpers.functions import double_fn
from torch import Tensor
from torch._library.simple_registry import singleton as torch_fakes
from torch._library.utils import has_fake_kernel
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import Library

import customops
from customops import Registry, Tag
from customops.errors import CallbackError, KernelError, MissingFakeError, RegistrationError

CPU = torch.device("cpu")
FORMS = ["op", "name", "overload"]


def handle(op: Any, form: str) -> Any:
    return {"op": op, "name": op._qualname, "overload": op._opoverload}[form]


# Registering ------------------------------------------------------------------------------------------------------


@pytest.mark.parity(40)
@pytest.mark.parametrize("form", FORMS)
def test_function_forms_on_an_op_of_ours(double: Any, form: str) -> None:
    # A CustomOpDef, a name or an OpOverload; called with the function, or as a decorator.
    direct, decorating = rows(3), rows(4)
    assert customops.register_fake(handle(double, form), direct) is direct
    assert (fake_shape(double, torch.ones(2)), meta_shape(double, torch.ones(2))) == ([3], [3])
    assert customops.register_fake(handle(double, form))(decorating) is decorating
    assert (fake_shape(double, torch.ones(2)), meta_shape(double, torch.ones(2))) == ([4], [4])


@pytest.mark.parity(40)
def test_method_forms(double: Any) -> None:
    @double.register_fake
    def bare(x: Tensor) -> Tensor:
        return x.new_empty(3)

    assert bare(torch.ones(1)).shape == (3,)
    assert fake_shape(double, torch.ones(2)) == [3]

    @double.register_fake()
    def parametrised(x: Tensor) -> Tensor:
        return x.new_empty(4)

    assert fake_shape(double, torch.ones(2)) == [4]
    assert parametrised(torch.ones(1)).shape == (4,)


@pytest.mark.parity(40)
@pytest.mark.parametrize("form", FORMS)
def test_function_forms_on_an_op_of_a_library(foreign: Any, form: str) -> None:
    assert not has_fake_kernel(foreign._opoverload)
    customops.register_fake(handle(foreign, form), rows(3))
    assert (fake_shape(foreign, torch.ones(2)), meta_shape(foreign, torch.ones(2))) == ([3], [3])
    assert has_fake_kernel(foreign._opoverload)
    # The function that runs on real tensors is as it was.
    assert foreign(torch.ones(2)).tolist() == [2.0, 2.0]


@pytest.mark.parametrize("form", ["op", "name", "overload"])
def test_function_forms_on_an_op_of_torch_custom_op(ns: str, form: str) -> None:
    theirs = torch.library.custom_op(f"{ns}::theirs", double_fn, mutates_args=())
    op = {"op": theirs, "name": f"{ns}::theirs", "overload": theirs._opoverload}[form]
    rules = Library(ns, "FRAGMENT")
    customops.register_fake(op, rows(3), lib=rules)
    assert (fake_shape(theirs, torch.ones(2)), meta_shape(theirs, torch.ones(2))) == ([3], [3])
    rules._destroy()
    with pytest.raises(RuntimeError, match="no fake impl"):
        fake_shape(theirs, torch.ones(2))


@pytest.mark.xfail(reason="torch asks its own object, which does not hear of our registration", strict=True)
def test_torch_knows_that_its_own_op_has_a_fake_of_ours(ns: str) -> None:
    theirs = torch.library.custom_op(f"{ns}::theirs", double_fn, mutates_args=())
    rules = Library(ns, "FRAGMENT")
    assert not has_fake_kernel(theirs._opoverload)
    customops.register_fake(theirs, rows(3), lib=rules)
    assert has_fake_kernel(theirs._opoverload)


def test_an_op_from_cpp_gets_a_fake_and_loses_it(ns: str) -> None:
    rules = Library("aten", "FRAGMENT")
    foobar = torch.ops.aten._foobar.default  # a test op of torch's, without a fake
    with pytest.raises(NotImplementedError):
        meta_shape(foobar, torch.ones(2))
    customops.register_fake(foobar, lambda self, arg1, arg2, *, arg3: self.new_empty(arg1 + 2 * arg2 + arg3), lib=rules)
    try:
        # True, True, True are the defaults in its schema.
        assert (fake_shape(foobar, torch.ones(2)), meta_shape(foobar, torch.ones(2))) == ([4], [4])
    finally:
        rules._destroy()
    with pytest.raises(NotImplementedError):
        meta_shape(foobar, torch.ones(2))


@pytest.mark.slow
@pytest.mark.parametrize("end", ["destroyed", "collected"])
def test_a_fake_ends_with_its_library(foreign: Any, ns: str, end: str) -> None:
    rules = Library(ns, "FRAGMENT")
    customops.register_fake(foreign, rows(3), lib=rules)
    assert fake_shape(foreign, torch.ones(2)) == [3]
    if end == "destroyed":
        rules._destroy()
    del rules
    gc.collect()
    assert not has_fake_kernel(foreign._opoverload)
    assert torch_fakes.find(foreign._qualname).fake_impl.kernel is None
    with pytest.raises(NotImplementedError):
        foreign(torch.ones(2, device="meta"))


def test_a_destroyed_library_takes_no_registration(foreign: Any, ns: str) -> None:
    rules = Library(ns, "FRAGMENT")
    rules._destroy()
    with pytest.raises(RegistrationError, match="the library given as lib= has been destroyed"):
        customops.register_fake(foreign, rows(3), lib=rules)


def test_a_scope_takes_a_fake_back(registry: Registry, double: Any, foreign: Any) -> None:
    double.register_fake(rows(3))
    source = source_of(double)
    with registry.scope(), customops.default_registry.scope():
        double.register_fake(rows(4))
        foreign.register_fake(rows(5))
        assert (fake_shape(double, torch.ones(2)), fake_shape(foreign, torch.ones(2))) == ([4], [5])
    assert (fake_shape(double, torch.ones(2)), source_of(double)) == ([3], source)
    assert not has_fake_kernel(foreign._opoverload)
    assert torch_fakes.find(foreign._qualname).fake_impl.kernel is None


def test_a_fake_must_take_the_arguments_of_the_op(double: Any) -> None:
    with pytest.raises(CallbackError, match="the fake impl does not fit the operator") as raised:
        double.register_fake(lambda x, y: x)
    assert "<lambda>(x)" in str(raised.value)
    with pytest.raises(CallbackError, match="must be callable"):
        double.register_fake(3)
    assert not has_fake_kernel(double._opoverload)


# Calling ------------------------------------------------------------------------------------------------------------


@pytest.mark.parity(40)
def test_a_fake_gets_defaults_and_keywords(registry: Registry, ns: str) -> None:
    seen = []

    @registry.custom_op(f"{ns}::op", mutates_args=())
    def op(x: Tensor, n: int = 3, dtype: torch.dtype = torch.float64, *, to: torch.device = CPU) -> Tensor:
        return torch.zeros(n, dtype=dtype)

    @op.register_fake
    def _(x: Tensor, n: int, dtype: torch.dtype, *, to: torch.device) -> Tensor:
        seen.append((n, dtype, to))
        return torch.empty(n, dtype=dtype, device=to)

    with FakeTensorMode():
        result = op(torch.ones(2))
        assert (result.shape, result.dtype) == ((3,), torch.float64)
        result = op(torch.ones(2), 5, to=torch.device("meta"))
        assert (result.shape, result.device.type) == ((5,), "meta")
    assert seen == [(3, torch.float64, torch.device("cpu")), (5, torch.float64, torch.device("meta"))]


@pytest.mark.parametrize(
    ("fake", "got"),
    [
        (lambda x: None, "None"),
        (lambda x: x.shape, "Size of 1"),
        (lambda x: (x.clone(), 1), "tuple of 2"),
        (lambda x: np.ones(2), "numpy.ndarray"),
    ],
)
def test_what_a_fake_returns_is_checked(double: Any, fake: Callable[..., Any], got: str) -> None:
    double.register_fake(fake)
    with pytest.raises(KernelError, match="the fake impl returned something that does not fit the schema") as raised:
        double(torch.ones(2, device="meta"))
    assert raised.value.op == double._qualname
    assert got in str(raised.value.got)


def test_every_kind_of_return(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::op", mutates_args=())
    def op(xs: List[Optional[Tensor]], n: int) -> Tuple[List[Tensor], Tensor, int, float, bool]:
        present = [x for x in xs if x is not None]
        return [x * 2 for x in present], present[0].sum(), n, n / 2, n > 2

    @op.register_fake
    def _(xs: list[Tensor | None], n: int) -> Any:
        return [torch.empty_like(x) for x in xs if x is not None], xs[0].new_empty(()), n, n / 2, n > 2  # type: ignore[union-attr]

    args = [torch.ones(2, 3), None, torch.ones(4)], 3
    real = op(*args)
    with FakeTensorMode() as mode:
        fake = op([None if x is None else mode.from_tensor(x) for x in args[0]], 3)
    assert [t.shape for t in fake[0]] == [t.shape for t in real[0]] == [(2, 3), (4,)]
    assert fake[1].shape == real[1].shape == ()
    assert fake[2:] == real[2:] == (3, 1.5, True)


def test_strides_and_dtypes_are_those_of_the_fake(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::op", mutates_args=())
    def op(x: Tensor) -> Tensor:
        return x.to(torch.int16).t().clone(memory_format=torch.preserve_format)

    op.register_fake(lambda x: x.to(torch.int16).t())
    real = op(torch.ones(2, 3))
    with FakeTensorMode():
        fake = op(torch.ones(2, 3))
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


@pytest.mark.compile
def test_mutation_alone_needs_no_fake(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::fill_", mutates_args={"x"})
    def fill_(x: Tensor, value: float) -> None:
        x.fill_(value)

    with FakeTensorMode():
        x = torch.zeros(3)
        assert fill_(x, 2.0) is None
    assert has_fake_kernel(fill_._opoverload)
    meta = torch.zeros(3, device="meta")
    assert fill_(meta, 2.0) is None

    @torch.compile(backend="aot_eager", fullgraph=True)
    def run(x: Tensor) -> Tensor:
        fill_(x, 2.0)
        return x + 1

    assert run(torch.zeros(3)).tolist() == [3.0] * 3


def test_mutation_with_a_return_needs_one(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::fill_and_sum", mutates_args={"x"})
    def fill_and_sum(x: Tensor, value: float) -> Tensor:
        return x.fill_(value).sum()

    with pytest.raises(MissingFakeError):
        fill_and_sum(torch.zeros(3, device="meta"), 1.0)
    fill_and_sum.register_fake(lambda x, value: x.new_empty(()))
    assert fill_and_sum(torch.zeros(3, device="meta"), 1.0).shape == ()


# In-place and out ops have a fake by their tag ------------------------------------------------------------------------


def inplace_fn(x: Tensor) -> Tensor:
    return x.mul_(2)


def out_fn(x: Tensor, *, out: Tensor) -> Tensor:
    return out.copy_(x)


def test_a_fake_on_an_inplace_or_out_op_warns_and_counts(registry: Registry, ns: str) -> None:
    inplace = registry.custom_op(f"{ns}::inplace", inplace_fn, mutates_args={"x"}, tags=Tag.inplace)
    out = registry.custom_op(f"{ns}::out", out_fn, mutates_args={"out"}, tags=Tag.out)
    with FakeTensorMode():
        x, y = torch.ones(2), torch.ones(2)
        assert inplace(x) is x
        assert out(x, out=y) is y
    calls = []
    with pytest.warns(UserWarning, match=re.escape("torch.Tag.inplace")) as warned:
        inplace.register_fake(lambda x: calls.append("inplace") or x)
    assert warned[0].filename == __file__
    with pytest.warns(UserWarning, match=re.escape("torch.Tag.out")):
        out.register_fake(lambda x, *, out: calls.append("out") or out)
    with FakeTensorMode():
        inplace(torch.ones(2))
        out(torch.ones(2), out=torch.ones(2))
    assert calls == ["inplace", "out"]


@pytest.mark.compile
@pytest.mark.parity(31)
@pytest.mark.filterwarnings("ignore:.*has a fake impl already")
@pytest.mark.parametrize("wrong", [lambda x: torch.empty_like(x), lambda x: x.view(x.shape), lambda x: x.new_empty(7)])
def test_a_fake_that_does_not_return_what_is_mutated(registry: Registry, ns: str, wrong: Callable[..., Any]) -> None:
    inplace = registry.custom_op(f"{ns}::inplace", inplace_fn, mutates_args={"x"}, tags=Tag.inplace)
    out = registry.custom_op(f"{ns}::out", out_fn, mutates_args={"out"}, tags=Tag.out)
    inplace.register_fake(wrong)
    out.register_fake(lambda x, *, out: wrong(x))
    calls = {
        "torch.Tag.inplace must return its first argument": lambda x: inplace(x.clone()),
        "torch.Tag.out must return its mutable keyword-only arguments": lambda x: out(x, out=torch.empty_like(x)),
    }
    for text, call in calls.items():
        with FakeTensorMode(), pytest.raises(KernelError, match=re.escape(f"a fake impl of an op with {text}")):
            call(torch.ones(2))
        with pytest.raises(KernelError, match=re.escape(text)):
            call(torch.ones(2, device="meta"))
        with pytest.raises(Exception, match=re.escape(text)):
            torch.compile(call, fullgraph=True, backend="aot_eager")(torch.ones(2))


@pytest.mark.compile
@pytest.mark.parity(31)
@pytest.mark.filterwarnings("ignore:.*has a fake impl already")
def test_a_fake_of_an_inplace_or_out_op_is_called_in_compiled_code(registry: Registry, ns: str) -> None:
    inplace = registry.custom_op(f"{ns}::inplace", inplace_fn, mutates_args={"x"}, tags=Tag.inplace)
    out = registry.custom_op(f"{ns}::out", out_fn, mutates_args={"out"}, tags=Tag.out)
    seen = []

    def fake(x: Tensor) -> Tensor:
        seen.append(x.shape)
        return x

    inplace.register_fake(fake)
    out.register_fake(lambda x, *, out: fake(out))

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.clone()
        return inplace(y) + y, out(x, out=y) * 1

    results = torch.compile(run, fullgraph=True, backend="aot_eager")(torch.ones(2))
    torch.testing.assert_close(results, (torch.full((2,), 4.0), torch.ones(2)))
    assert seen.count((2,)) >= 4  # Dynamo's, and AOTAutograd's


def test_the_fake_of_others_keeps_its_place(registry: Registry, ns: str) -> None:
    """Where one of ours, which took its place for a while, is gone."""
    library = Library(ns, "FRAGMENT")
    library.define("f(Tensor x) -> Tensor")
    torch.library.register_fake(f"{ns}::f", lambda x: torch.empty_like(x), lib=library)
    op = registry.adopt(f"{ns}::f")
    before = source_of(op)
    with registry.scope():
        op.register_fake(double_fn)
        assert source_of(op) != before
    assert source_of(op) == before
    library._destroy()
