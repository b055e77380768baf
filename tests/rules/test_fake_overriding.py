"""Ops without a fake, fakes over other fakes, and fakes that are replaced."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
import torch
from helpers.compiling import draft_export
from helpers.fakes import fake_shape, meta_shape, rows, source_of
from helpers.functions import add_fn, double_fn
from torch import Tensor
from torch._library.simple_registry import singleton as torch_fakes
from torch._library.utils import has_fake_kernel
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.library import Library

import customops
from customops import Registry
from customops.errors import MissingFakeError, RegistrationError


def here(above: int = 0) -> str:
    """This test's file and the caller's line, or one `above` it."""
    frame = sys._getframe(1)
    return f"{frame.f_code.co_filename}:{frame.f_lineno - above}"


# No fake --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def add(registry: Registry, ns: str) -> Any:
    op = registry.custom_op(f"{ns}::add_op", add_fn, mutates_args=())
    return op


def says_what_is_missing(error: BaseException, op: Any, name: str) -> bool:
    first, *_, last = str(error).splitlines()
    return first == (
        f"{op._qualname}: There was no fake impl registered for <CustomOpDef({op._qualname})>. "
        "This is necessary for torch.compile/export/fx tracing to work."
    ) and last.startswith(f"  fix:      Please use `{name}.register_fake` to add a fake impl: fn(")


@pytest.mark.compile
@pytest.mark.parity(41)
def test_the_message_without_a_fake_has_the_words_of_torch(add: Any) -> None:
    with pytest.raises(RuntimeError) as raised, FakeTensorMode():
        add(torch.ones(2), torch.ones(2))
    # The name of the function: that is what its author calls it.
    assert says_what_is_missing(raised.value, add, "add_fn")
    assert isinstance(raised.value, MissingFakeError)
    with pytest.raises(RuntimeError) as raised:
        add(torch.ones(2, device="meta"), torch.ones(2, device="meta"))
    assert says_what_is_missing(raised.value, add, "add_fn")


@pytest.mark.compile
@pytest.mark.parity(27, 41)
def test_compiling_needs_a_fake_and_registering_it_then_helps(add: Any) -> None:
    compiled = torch.compile(lambda x, y: add(x, y), backend="eager", fullgraph=True)
    x, y = torch.rand(3), torch.rand(3)
    with pytest.raises(RuntimeError, match="no fake impl"):
        compiled(x, y)
    add.register_fake(lambda x, y: torch.empty_like(x))
    torch._dynamo.reset()
    assert torch.equal(compiled(x, y), x + y)
    assert fake_shape(add, x, y) == [3]


@pytest.mark.parity(41)
def test_torch_is_told_whether_there_is_a_fake(registry: Registry, double: Any) -> None:
    assert not has_fake_kernel(double._opoverload)
    with registry.scope():
        double.register_fake(rows(3))
        assert has_fake_kernel(double._opoverload)
    assert not has_fake_kernel(double._opoverload)


@pytest.mark.parity(41)
def test_torch_is_told_of_a_scoped_fake(double: Any, ns: str) -> None:
    rules = Library(ns, "FRAGMENT")
    double.register_fake(rows(3), lib=rules)
    assert has_fake_kernel(double._opoverload)
    rules._destroy()
    assert not has_fake_kernel(double._opoverload)


@pytest.mark.compile
@pytest.mark.parity(41)
def test_real_tensors_propagate_where_there_is_no_fake(add: Any) -> None:
    x = torch.rand(3, 4).t()
    with torch._functorch.config.patch(fake_tensor_propagate_real_tensors=True):
        mode = FakeTensorMode(shape_env=ShapeEnv())
        with mode:
            fake = add(mode.from_tensor(x), mode.from_tensor(x))
        assert isinstance(fake, FakeTensor)
        assert torch.equal(fake.real_tensor, x + x)
        assert (fake.dtype, fake.dim()) == (x.dtype, 2)
    with pytest.raises(RuntimeError) as raised, FakeTensorMode():
        add(torch.ones(2), torch.ones(2))
    assert says_what_is_missing(raised.value, add, "add_fn")


@pytest.mark.compile
@pytest.mark.parity(41)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_draft_export_infers_a_fake(add: Any) -> None:
    class Module(torch.nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return add(x, y) * 2

    x, y = torch.rand(3, 4), torch.rand(3, 4)
    with pytest.raises(Exception, match="no fake impl"):
        torch.export.export(Module(), (x, y), strict=False)
    program = draft_export(Module(), (x, y))
    report = program._report
    assert [failure.failure_type.name for failure in report.failures] == ["MISSING_FAKE_KERNEL"]
    assert report.failures[0].data == {"op": str(add._opoverload)}
    assert torch.allclose(program.module()(x, y), (x + y) * 2)
    # What was inferred is not left behind.
    with pytest.raises(RuntimeError) as raised, FakeTensorMode():
        add(torch.ones(2), torch.ones(2))
    assert says_what_is_missing(raised.value, add, "add_fn")


# Overriding -----------------------------------------------------------------------------------------------------------


@pytest.mark.parity(42)
def test_the_newest_fake_wins(double: Any, foreign: Any) -> None:
    for op in double, foreign:
        for n in 3, 4:
            customops.register_fake(op, rows(n))
            assert (fake_shape(op, torch.ones(2)), meta_shape(op, torch.ones(2))) == ([n], [n])


@pytest.mark.parity(42)
def test_a_scoped_fake_gives_way_to_the_one_before(double: Any, foreign: Any, ns: str) -> None:
    for op in double, foreign:
        customops.register_fake(op, rows(3))
        outer, inner = Library(ns, "FRAGMENT"), Library(ns, "FRAGMENT")
        customops.register_fake(op, rows(4), lib=outer)
        customops.register_fake(op, rows(5), lib=inner)
        shapes = [fake_shape(op, torch.ones(2)) + meta_shape(op, torch.ones(2))]
        for library in inner, outer:
            library._destroy()
            shapes.append(fake_shape(op, torch.ones(2)) + meta_shape(op, torch.ones(2)))
        assert shapes == [[5, 5], [4, 4], [3, 3]]


def test_a_scoped_fake_is_replaced_in_its_own_library(foreign: Any, ns: str) -> None:
    rules = Library(ns, "FRAGMENT")
    customops.register_fake(foreign, rows(3))
    customops.register_fake(foreign, rows(4), lib=rules)
    customops.register_fake(foreign, rows(5), lib=rules)
    assert fake_shape(foreign, torch.ones(2)) == [5]
    rules._destroy()
    assert fake_shape(foreign, torch.ones(2)) == [3]


@pytest.mark.parity(42)
def test_the_newest_fake_wins_over_a_scoped_one(double: Any, foreign: Any, ns: str) -> None:
    for op in double, foreign:
        rules = Library(ns, "FRAGMENT")
        customops.register_fake(op, rows(3))
        customops.register_fake(op, rows(4), lib=rules)
        customops.register_fake(op, rows(5))
        assert fake_shape(op, torch.ones(2)) == [5]
        assert source_of(op) == here(above=2)
        rules._destroy()
        assert fake_shape(op, torch.ones(2)) == [5]


@pytest.mark.parity(42)
@pytest.mark.parametrize("key", ["Meta", "CompositeExplicitAutograd"])
def test_a_fake_wins_over_a_kernel(ns: str, key: str) -> None:
    library, rules = Library(ns, "FRAGMENT"), Library(ns, "FRAGMENT")
    library.define("op(Tensor x) -> Tensor")
    library.impl("op", rows(2), key)
    op = getattr(torch.ops, ns).op.default
    x = torch.ones(9)
    assert (fake_shape(op, x), meta_shape(op, x)) == ([2], [2])
    customops.register_fake(op, rows(3), lib=rules)
    assert (fake_shape(op, x), meta_shape(op, x)) == ([3], [3])
    rules._destroy()
    assert meta_shape(op, x) == [2]
    if key != "Meta":  # under a mode, torch goes on calling a Meta kernel whose library is gone
        assert fake_shape(op, x) == [2]
    library._destroy()


def test_a_fake_wins_over_the_function_of_a_traceable_op(registry: Registry, ns: str) -> None:
    options: dict[str, Any] = {"mutates_args": (), "schema": "(Tensor x) -> Tensor", "traceable": True}
    op, x = registry.custom_op(f"{ns}::f", lambda x: x + 1, **options), torch.ones(9)
    assert (fake_shape(op, x), meta_shape(op, x)) == ([9], [9])
    with registry.scope():
        op.register_fake(rows(3))
        assert (fake_shape(op, x), meta_shape(op, x)) == ([3], [3])
    assert (fake_shape(op, x), meta_shape(op, x)) == ([9], [9])


@pytest.mark.parity(43)
def test_overriding_can_be_refused(double: Any, foreign: Any) -> None:
    for op in double, foreign:
        customops.register_fake(op, rows(3), allow_override=False)  # the first is no override
        first = here(above=1)
        with pytest.raises(RuntimeError, match=rf"already has a fake impl.*{re.escape(first)}"):
            customops.register_fake(op, rows(4), allow_override=False)
        with pytest.raises(RuntimeError, match=r"already has a fake impl.*test_fake_overriding\.py:\d+"):
            op.register_fake(allow_override=False)(rows(4))
        assert fake_shape(op, torch.ones(2)) == [3]


def test_overriding_the_fake_of_somebody_else_can_be_refused(foreign: Any, ns: str) -> None:
    rules = Library(ns, "FRAGMENT")
    torch.library.register_fake(foreign._qualname, rows(3), lib=rules)
    line = here(above=1)
    with pytest.raises(RuntimeError, match=rf"already has a fake impl.*{re.escape(line)}"):
        customops.register_fake(foreign, rows(4), allow_override=False)
    assert fake_shape(foreign, torch.ones(2)) == [3]
    customops.register_fake(foreign, rows(4))
    assert fake_shape(foreign, torch.ones(2)) == [4]
    rules._destroy()


def test_overriding_our_fake_from_a_library_can_be_refused(double: Any, ns: str) -> None:
    rules = Library(ns, "FRAGMENT")
    customops.register_fake(double, rows(3), lib=rules, allow_override=False)  # the first is no override
    assert fake_shape(double, torch.ones(2)) == [3]
    rules._destroy()
    customops.register_fake(double, rows(4))
    with pytest.raises(RuntimeError, match=r"already has a fake impl.*test_fake_overriding\.py:\d+"):
        customops.register_fake(double, rows(5), lib=Library(ns, "FRAGMENT"), allow_override=False)


def test_the_first_fake_of_an_op_of_torch_custom_op_overrides_nothing(ns: str) -> None:
    theirs = torch.library.custom_op(f"{ns}::theirs", double_fn, mutates_args=())
    rules = Library(ns, "FRAGMENT")
    customops.register_fake(theirs, rows(3), lib=rules, allow_override=False)
    assert fake_shape(theirs, torch.ones(2)) == [3]
    rules._destroy()
    theirs.register_fake(rows(4))
    with pytest.raises(RuntimeError, match="already has a fake impl"):
        customops.register_fake(theirs, rows(5), allow_override=False)


@pytest.mark.parity(43)
def test_overriding_a_meta_kernel_can_be_refused(foreign: Any, lib: Library) -> None:
    lib.impl("foreign", rows(2), "Meta")
    with pytest.raises(RuntimeError, match=r"already has .*Meta implementation"):
        customops.register_fake(foreign, rows(3), allow_override=False)
    assert meta_shape(foreign, torch.ones(9)) == [2]


@pytest.mark.parity(44)
@pytest.mark.parametrize("allow_override", [True, False])
def test_an_op_that_is_traced_through_needs_no_fake(ns: str, allow_override: bool) -> None:
    library = Library(ns, "FRAGMENT")
    library.define("op(Tensor x) -> Tensor")
    library.impl("op", double_fn, "CompositeImplicitAutograd")
    with pytest.raises(RuntimeError, match="CompositeImplicitAutograd") as raised:
        customops.register_fake(f"{ns}::op", rows(3), allow_override=allow_override)
    assert isinstance(raised.value, RegistrationError)
    assert "traced through" in str(raised.value)
    assert torch_fakes.find(f"{ns}::op").fake_impl.kernel is None
    op = getattr(torch.ops, ns).op.default
    assert (fake_shape(op, torch.ones(2)), meta_shape(op, torch.ones(2))) == ([2], [2])
    library._destroy()


# Sources --------------------------------------------------------------------------------------------------------------


@pytest.mark.parity(45)
def test_sources_of_fakes(registry: Registry, ns: str, double: Any, foreign: Any) -> None:
    for op in double, foreign:
        customops.register_fake(op, rows(1))
        assert source_of(op) == here(above=1)

        @customops.register_fake(op)
        def decorated(x: Tensor) -> Tensor:
            return torch.empty_like(x)

        assert source_of(op) == here(above=4)
        op.register_fake(rows(2))
        assert source_of(op) == here(above=1)

        @op.register_fake
        def bare(x: Tensor) -> Tensor:
            return torch.empty_like(x)

        assert source_of(op) == here(above=4)

        @op.register_fake(allow_override=True)
        def parametrised(x: Tensor) -> Tensor:
            return torch.empty_like(x)

        assert source_of(op) == here(above=4)
        rules = Library(ns, "FRAGMENT")
        customops.register_fake(op, rows(3), lib=rules)
        assert source_of(op) == here(above=1)
        rules._destroy()
        assert source_of(op) == here(above=9)


@pytest.mark.parity(45)
def test_source_of_the_default_fake(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::direct", double_fn, mutates_args=())
    assert source_of(op) == here(above=1)

    @registry.custom_op(f"{ns}::decorated", mutates_args=())
    def decorated(x: Tensor) -> Tensor:
        return x * 2

    assert source_of(decorated) == here(above=4)


# Registering again ----------------------------------------------------------------------------------------------------


def test_registering_again_reaches_a_mode_that_knows_the_op(double: Any, foreign: Any) -> None:
    for op in double, foreign:
        customops.register_fake(op, rows(3))
        with FakeTensorMode() as mode:
            x = torch.ones(2)
            shapes = [op(x).shape, op(x).shape]
            customops.register_fake(op, rows(4))
            shapes += [op(x).shape, op(mode.from_tensor(torch.ones(2))).shape]
        assert [list(shape) for shape in shapes] == [[3], [3], [4], [4]]


def test_a_scoped_fake_reaches_a_mode_that_knows_the_op(double: Any, ns: str) -> None:
    double.register_fake(rows(3))
    rules = Library(ns, "FRAGMENT")
    with FakeTensorMode():
        x = torch.ones(2)
        shapes = [double(x).shape]
        double.register_fake(rows(4), lib=rules)
        shapes.append(double(x).shape)
        rules._destroy()
        shapes.append(double(x).shape)
    assert [list(shape) for shape in shapes] == [[3], [4], [3]]


@pytest.mark.compile
def test_registering_again_reaches_compiled_functions_after_a_reset(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::head", mutates_args=(), check="never")
    def head(x: Tensor, n: int) -> Tensor:
        return x[:n].clone()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def run(x: Tensor) -> Any:
        y = head(x, 2)
        return y + 1, y.shape[0]

    head.register_fake(lambda x, n: x.new_empty(7))
    assert run(torch.arange(5.0))[1] == 7  # what the fake says, wrong as it is
    head.register_fake(lambda x, n: x.new_empty(n))
    torch._dynamo.reset()
    result, n = run(torch.arange(5.0))
    assert (result.tolist(), n) == ([1.0, 2.0], 2)
