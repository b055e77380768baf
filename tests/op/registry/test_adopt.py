"""Adopting ops that torch.library defined."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from helpers.functions import add_one
from helpers.registries import add_two, define, state

import customops
from customops import Registry
from customops.errors import DefinitionError, RegistrationError, UnregisteredError

# Adopting -------------------------------------------------------------------------------------------------------


def test_adopt_finds_our_own_op_by_every_name_for_it(registry: Registry, ns: str) -> None:
    op = define(registry, f"{ns}::f")
    packet = getattr(torch.ops, ns).f
    for handle in (op, f"{ns}::f", op._opoverload, packet, f"{ns}::f.default"):
        assert registry.adopt(handle) is op
        assert customops.adopt(handle) is op


def test_adopt_gives_one_object_for_an_op_of_others(registry: Registry) -> None:
    adopted = registry.adopt("aten::sin")
    assert registry.adopt(torch.ops.aten.sin.default) is adopted
    assert repr(adopted) == "<CustomOpDef(aten::sin) (Tensor self) -> Tensor>"
    assert str(adopted.schema) == "(Tensor self) -> Tensor"
    x = torch.rand(3)
    assert torch.equal(adopted(x), torch.sin(x))


def test_adopt_takes_an_overload_name(registry: Registry) -> None:
    assert registry.adopt("aten::add.Tensor")._opoverload is torch.ops.aten.add.Tensor


def test_adopt_sees_that_an_op_was_defined_anew(registry: Registry, ns: str) -> None:
    lib = torch.library.Library(ns, "FRAGMENT")
    lib.define("f(Tensor x) -> Tensor")
    first = registry.adopt(f"{ns}::f")
    lib._destroy()
    lib = torch.library.Library(ns, "FRAGMENT")
    lib.define("f(Tensor x, int y) -> Tensor")
    second = registry.adopt(f"{ns}::f")
    assert second is not first
    assert [argument.name for argument in second.schema.arguments] == ["x", "y"]
    lib._destroy()


@pytest.mark.slow
@pytest.mark.parametrize("gone", [True, False])
def test_rules_for_an_op_of_others_end_when_custom_op_takes_its_name(registry: Registry, ns: str, gone: bool) -> None:
    schema = "(Tensor x) -> Tensor"
    torch.library.custom_op(f"{ns}::f", lambda x: x + 1, mutates_args=(), schema=schema)
    adopted = registry.adopt(f"{ns}::f")
    adopted.register_kernel("cpu", lambda x: x + 2)
    assert adopted(torch.zeros(1)).item() == 2
    if gone:
        torch._library.custom_ops.OPDEF_TO_LIB[f"{ns}::f"]._destroy()
    op = registry.custom_op(f"{ns}::f", lambda x: x + 3, mutates_args=(), schema=schema)
    assert [op(torch.zeros(1)).item() for _ in range(2)] == [3, 3]
    gc.collect()  # torch takes down the names of a library once more when it is collected
    assert registry.adopt(f"{ns}::f") is op
    with pytest.raises(UnregisteredError):
        adopted.register_kernel("cpu", lambda x: x)


def test_rules_for_an_op_of_others_end_when_its_successor_is_adopted(registry: Registry, ns: str) -> None:
    objects = []  # kept: without them, the rules ended some time, with the garbage collector
    for value in (1, 2):
        lib = torch.library.Library(ns, "FRAGMENT")
        lib.define("f(Tensor x) -> Tensor")
        objects.append(registry.adopt(f"{ns}::f"))
        with pytest.raises(NotImplementedError):
            getattr(torch.ops, ns).f(torch.zeros(1))
        objects[-1].register_kernel("cpu", lambda x, value=value: x + value)
        assert getattr(torch.ops, ns).f(torch.zeros(1)).item() == value
        lib._destroy()


@pytest.mark.parametrize(
    ("op", "error", "match"),
    [
        ("nowhere::nothing", RegistrationError, "there is no such operator"),
        ("aten::sin.nothing", RegistrationError, "there is no such operator"),
        ("sin", DefinitionError, "needs a namespace"),
        (torch.ops.aten.add, RegistrationError, "has several overloads"),
        (torch.sin, DefinitionError, "expected an operator"),
        (None, DefinitionError, "expected an operator"),
    ],
)
def test_adopt_refuses_what_is_no_op(registry: Registry, op: Any, error: type, match: str) -> None:
    with pytest.raises(error, match=match):
        registry.adopt(op)


def test_looking_for_an_op_leaves_no_namespace(registry: Registry) -> None:
    with pytest.raises(RegistrationError):
        registry.adopt("nowhere::nothing")
    assert "nowhere" not in vars(torch.ops)


def test_unregistering_an_adopted_op_ends_its_rules_only(registry: Registry, ns: str) -> None:
    lib = torch.library.Library(ns, "FRAGMENT")
    lib.define("f(Tensor x) -> Tensor")
    adopted = registry.adopt(f"{ns}::f")
    adopted.register_kernel("cpu", add_one)
    f = getattr(torch.ops, ns).f
    assert f(torch.ones(1)).item() == 2
    adopted.unregister()
    with pytest.raises(NotImplementedError):
        f(torch.ones(1))
    assert state(ns)["dispatcher"] == [f"{ns}::f"]
    lib._destroy()


def test_a_destroyed_library_is_refused(registry: Registry, ns: str) -> None:
    op = define(registry, f"{ns}::f")
    lib = torch.library.Library(ns, "FRAGMENT")
    lib._destroy()
    with pytest.raises(RegistrationError, match="has been destroyed"):
        op.register_kernel("cpu", add_two, lib=lib)


@pytest.mark.parametrize("how", ["destroyed", "collected", "redefined"])
def test_an_adopted_op_whose_library_is_gone(registry: Registry, ns: str, how: str) -> None:
    def defined() -> Any:
        if how == "redefined":
            return torch.library.custom_op(f"{ns}::f", add_one, mutates_args=(), schema="(Tensor x) -> Tensor")
        library = torch.library.Library(ns, "FRAGMENT")
        library.define("f(Tensor x) -> Tensor")
        library.impl("f", add_one, "CPU")
        return library

    owner, x = defined(), torch.ones(1)
    op = registry.adopt(f"{ns}::f")
    op.register_kernel("cuda", add_one)
    overload = op._opoverload
    assert op(x).item() == 2
    compiled = torch.compile(lambda x: op(x), backend="eager")
    op.register_fake(torch.empty_like)
    assert compiled(x).item() == 2
    if how == "destroyed":
        owner._destroy()
    elif how == "redefined":
        defined()
    del owner
    gc.collect()
    for call in (op, overload, op.explain, lambda x: op.register_fake(add_one)):
        with pytest.raises(UnregisteredError, match="the library of the op was destroyed"):
            call(x)
    op.unregister()
    if how == "redefined":
        assert registry.adopt(f"{ns}::f")(x).item() == 2
        return
    library = torch.library.Library(ns, "FRAGMENT")
    library.define("f(Tensor x) -> Tensor")
    library.impl("f", add_two, "CPU")
    assert registry.adopt(f"{ns}::f")(x).item() == 3
    assert torch.compile(lambda x: getattr(torch.ops, ns).f(x), backend="eager")(x).item() == 3
    library._destroy()
