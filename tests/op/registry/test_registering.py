"""How libraries register: names that exist, libraries that end, helpers, dispatch keys."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.functions import add_one, double_fn
from torch import Tensor

import customops
from customops import Registry, helper
from customops.errors import (
    CallbackError,
    DefinitionError,
    RegistrationError,
    SchemaError,
    UnregisteredError,
)
from customops.library import Library

DOUBLE = "(Tensor x) -> Tensor"


def foreign(ns: str) -> Library:
    library = Library(ns, "FRAGMENT")
    library.define(f"f{DOUBLE}")
    library.impl("f", double_fn, "CompositeExplicitAutograd")
    return library


# on_conflict="skip" ---------------------------------------------------------------------------------------------------


def test_skip_returns_any_op_that_exists(registry: Registry, ns: str) -> None:
    def skip(fn: Any = add_one) -> Any:
        return registry.custom_op(f"{ns}::f", fn, mutates_args=(), on_conflict="skip")

    library = foreign(ns)
    op = skip()
    assert op(torch.ones(3)).tolist() == [2, 2, 2]
    assert op is customops.adopt(f"{ns}::f") or op is registry.adopt(f"{ns}::f")
    assert list(registry) == []
    assert skip(lambda untyped: untyped) is op
    library._destroy()
    assert skip()(torch.full((), 3.0)) == 4
    torch.library.custom_op(f"{ns}::f", double_fn, mutates_args=())
    assert skip()(torch.full((), 3.0)) == 6


def test_skip_finds_ops_of_c(registry: Registry) -> None:
    with pytest.raises(DefinitionError, match="reserved namespace"):
        registry.custom_op("aten::sin", add_one, mutates_args=(), on_conflict="skip")
    name = "quantized::add"
    assert str(registry.custom_op(name, add_one, mutates_args=(), on_conflict="skip").schema).startswith("(Tensor qa")


def test_skip_where_the_name_is_free_defines(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::f", add_one, mutates_args=(), on_conflict="skip")
    assert op(torch.ones(1)) == 2
    assert list(registry) == [op]
    with pytest.raises(SchemaError):
        registry.custom_op(f"{ns}::g", lambda x: x, mutates_args=(), on_conflict="skip")


# define and impl ------------------------------------------------------------------------------------------------------


def test_define_leaves_what_is_there(registry: Registry, ns: str) -> None:
    registry.define(f"{ns}::f", DOUBLE)
    registry.impl(f"{ns}::f", "default", double_fn)
    for _ in range(2):
        registry.define(f"{ns}::f", DOUBLE, on_conflict="reuse")
        registry.define(f"{ns}::f", "(Tensor x, Tensor y) -> Tensor", on_conflict="skip")
    with pytest.raises(DefinitionError, match="needs the same schema and tags") as caught:
        registry.define(f"{ns}::f", "(Tensor x, Tensor y) -> Tensor", on_conflict="reuse")
    assert caught.value.got is not None
    with pytest.raises(DefinitionError, match="needs the same schema and tags"):
        registry.define(f"{ns}::f", DOUBLE, tags=torch.Tag.pointwise, on_conflict="reuse")
    with pytest.raises(DefinitionError, match="tried to register an operator multiple times"):
        registry.define(f"{ns}::f", DOUBLE)
    with pytest.raises(DefinitionError, match="on_conflict has an invalid value"):
        registry.define(f"{ns}::f", DOUBLE, on_conflict="ignore")  # type: ignore[arg-type]
    assert getattr(torch.ops, ns).f(torch.ones(1)) == 2


def test_define_replaces(registry: Registry, ns: str) -> None:
    registry.define(f"{ns}::f", DOUBLE)
    registry.impl(f"{ns}::f", "CPU", double_fn)
    with registry.scope():
        registry.define(f"{ns}::f", "(Tensor x, Tensor y) -> Tensor", on_conflict="replace")
        customops.impl(f"{ns}::f", "default", torch.add)
        assert getattr(torch.ops, ns).f(torch.ones(1), torch.ones(1)) == 2
        with pytest.raises(DefinitionError, match="torch refuses"):
            registry.define(f"{ns}::f", "(Tensor x) -> Nothing", on_conflict="replace")
        assert getattr(torch.ops, ns).f(torch.ones(1), torch.ones(1)) == 2
    assert getattr(torch.ops, ns).f(torch.full((), 3.0)) == 6


def test_define_replaces_no_op_of_others(registry: Registry, ns: str) -> None:
    library = foreign(ns)
    with pytest.raises(DefinitionError, match="customops did not define it, so it cannot be replaced"):
        registry.define(f"{ns}::f", DOUBLE, on_conflict="replace")
    customops.define(f"{ns}::f", DOUBLE, on_conflict="reuse")
    customops.define(f"{ns}::f", DOUBLE, on_conflict="skip", lib=library)
    assert getattr(torch.ops, ns).f(torch.ones(1)) == 2


@pytest.mark.parametrize("defined", [False, True])
def test_impl_where_there_is_a_kernel(registry: Registry, ns: str, defined: bool) -> None:
    name = f"{ns}::f"
    if defined:
        registry.define(name, DOUBLE)
    registry.impl(name, "CPU", double_fn, on_conflict="error")
    registry.impl(name, "CPU", add_one, on_conflict="skip")
    registry.impl(name, ["CPU", "Meta"], on_conflict="skip")(torch.empty_like)
    with pytest.raises(RegistrationError, match="there is a kernel at CPU already"):
        registry.impl(name, ["cpu", "XPU"], add_one, on_conflict="error")
    with pytest.raises(RegistrationError, match="on_conflict has an invalid value"):
        registry.impl(name, "CPU", add_one, on_conflict="reuse")  # type: ignore[arg-type]
    registry.define(name, DOUBLE, on_conflict="skip")
    x = torch.full((), 3.0)
    assert getattr(torch.ops, ns).f(x) == 6
    assert getattr(torch.ops, ns).f(x.to("meta")).is_meta
    assert not torch._C._dispatch_has_kernel_for_dispatch_key(name, "XPU")
    if defined:
        customops.impl(name, "CPU", add_one, on_conflict="replace")
        assert getattr(torch.ops, ns).f(x) == 4


# lib= -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("used", [False, True])
def test_an_op_lives_as_long_as_its_library(registry: Registry, ns: str, used: bool) -> None:
    library = Library(ns, "FRAGMENT")
    op = registry.custom_op(f"{ns}::f", double_fn, mutates_args=(), lib=library)
    if used:
        assert op(torch.ones(1)) == 2
    library._destroy()
    with pytest.raises(UnregisteredError):
        op(torch.ones(1))
    assert list(registry) == []
    assert registry.custom_op(f"{ns}::f", add_one, mutates_args=())(torch.ones(1)) == 2


def test_a_library_ends_what_it_defined_only(registry: Registry, ns: str) -> None:
    library = Library(ns, "FRAGMENT")
    old = registry.custom_op(f"{ns}::f", double_fn, mutates_args=())
    assert registry.custom_op(f"{ns}::f", double_fn, mutates_args=(), lib=library, on_conflict="reuse") is old
    assert registry.custom_op(f"{ns}::f", double_fn, mutates_args=(), lib=library, on_conflict="skip") is old
    new = registry.custom_op(f"{ns}::g", add_one, mutates_args=(), lib=library)
    newer = registry.custom_op(f"{ns}::g", double_fn, mutates_args=())
    library._destroy()
    assert old(torch.ones(1)) == 2
    assert newer(torch.ones(1)) == 2
    with pytest.raises(UnregisteredError, match="was replaced"):
        new(torch.ones(1))


def test_libraries_that_cannot_own_an_op(registry: Registry, ns: str) -> None:
    dead = Library(ns, "FRAGMENT")
    dead._destroy()
    for lib, reason in (
        (Library(f"{ns}_other", "FRAGMENT"), "of another namespace"),
        (dead, "has been destroyed"),
        (ns, "must be a torch.library.Library"),
    ):
        with pytest.raises(RegistrationError, match=reason):
            registry.custom_op(f"{ns}::f", double_fn, mutates_args=(), lib=lib)
    assert not hasattr(getattr(torch.ops, ns), "f")


# Helpers --------------------------------------------------------------------------------------------------------------


@helper
def register_all(registry: Registry, name: str, fn: Callable[..., Any], fake: Any = None) -> Any:
    op = registry.custom_op(name, fn, mutates_args=())
    if fake is not None:
        op.register_fake(fake)
    return op


@helper
def decorator(registry: Registry, name: str) -> Callable[[Callable[..., Any]], Any]:
    def decorate(fn: Callable[..., Any]) -> Any:
        return registry.custom_op(name, fn, mutates_args=())

    return decorate


def here(offset: int = 0) -> str:
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return f"{__file__}:{frame.f_back.f_lineno + offset}"


def test_the_source_is_the_line_of_the_helpers_caller(registry: Registry, ns: str) -> None:
    assert register_all(registry, f"{ns}::f", double_fn).source == here()

    @decorator(registry, f"{ns}::g")
    def g(x: Tensor) -> Tensor:
        return x * 3

    assert g.source == here(-4)
    assert g(torch.ones(1)) == 3
    assert g.source == here(-6)


def test_errors_and_warnings_name_the_helpers_caller(registry: Registry, ns: str) -> None:
    op = register_all(registry, f"{ns}::f", double_fn, torch.empty_like)
    place = here(-1)
    with pytest.raises(RegistrationError, match="already has a fake impl registered at") as caught:
        op.register_fake(torch.empty_like, allow_override=False)
    assert place in str(caught.value)
    with pytest.raises(CallbackError, match="the fake impl must be callable") as caught:
        register_all(registry, f"{ns}::g", double_fn, 3)
    assert caught.value.where == here(-1)

    def inplace(x: Tensor) -> Tensor:
        return x.mul_(2)

    def tagged(fn: Any) -> Any:
        return registry.custom_op(f"{ns}::h", fn, mutates_args={"x"}, tags=customops.Tag.inplace)

    with pytest.warns(UserWarning, match="has a fake impl already") as warned:
        helper(lambda op: op.register_fake(lambda x: x))(tagged(inplace))
    assert f"{warned[0].filename}:{warned[0].lineno}" == here(-1)


# Dispatch keys --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "device"), [("CPU", "cpu"), ("CUDA", "cuda"), ("CompositeExplicitAutograd", None), ("default", None)]
)
def test_the_key_of_a_device_stands_for_it(registry: Registry, ns: str, given: str, device: str | None) -> None:
    op = registry.custom_op(f"{ns}::f", double_fn, mutates_args=(), device_types=given)
    assert set(op._rules.kernel.kernels) == {device}
    op.register_kernel([given, "xpu"], add_one)
    assert set(op._rules.kernel.kernels) == {device, "xpu"}
    if given != "CUDA":
        assert op(torch.full((), 3.0)) == 4


@pytest.mark.parametrize("given", ["AutogradCPU", "CompositeImplicitAutograd", "Meta", "ADInplaceOrView"])
def test_other_keys_are_for_impl(registry: Registry, ns: str, given: str) -> None:
    op = registry.custom_op(f"{ns}::f", double_fn, mutates_args=())
    with pytest.raises(RegistrationError, match=r"customops\.impl takes dispatch keys"):
        op.register_kernel(given, add_one)
