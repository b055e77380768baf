"""Registrations are removed, one by one."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.functions import add_one
from helpers.modes import DispatchLog
from helpers.registries import add_two, define, state
from torch import Tensor
from torch.fx.operator_schemas import get_signature_for_torch_op

import customops
from customops import Registry
from customops.errors import UnregisteredError

# Unregister -----------------------------------------------------------------------------------------------------


def test_unregister_removes_the_op_everywhere(registry: Registry, ns: str) -> None:
    before = state(ns)
    op = define(registry, f"{ns}::f")
    op.register_fake(torch.empty_like)
    op.register_autocast("cpu", torch.bfloat16)
    assert state(ns)["dispatcher"] == [f"{ns}::f"]
    op.unregister()
    after = state(ns)
    assert {**after, "torch.ops": None} == {**before, "torch.ops": None}
    assert not hasattr(getattr(torch.ops, ns), "f")
    assert len(registry) == 0


def test_a_removed_name_can_be_defined_again_with_another_schema(registry: Registry, ns: str) -> None:
    define(registry, f"{ns}::f").unregister()

    def scale(x: Tensor, by: float) -> Tensor:
        return x * by

    op = define(registry, f"{ns}::f", scale)
    assert op(torch.ones(2), 3.0).tolist() == [3.0, 3.0]
    assert getattr(torch.ops, ns).f(torch.ones(2), 3.0).tolist() == [3.0, 3.0]


def test_fx_sees_the_signature_of_the_new_op(registry: Registry, ns: str) -> None:
    old = define(registry, f"{ns}::f")
    assert list(get_signature_for_torch_op(old._opoverload)[0].parameters) == ["x"]
    old.unregister()
    new = define(registry, f"{ns}::f", lambda y, z: y + z, schema="(Tensor y, Tensor z) -> Tensor")
    assert list(get_signature_for_torch_op(new._opoverload)[0].parameters) == ["y", "z"]


@pytest.mark.parametrize(
    "call",
    [
        lambda op, overload, packet: op(torch.ones(1)),
        lambda op, overload, packet: overload(torch.ones(1)),
        lambda op, overload, packet: packet(torch.ones(1)),
        lambda op, overload, packet: overload.redispatch(torch._C.DispatchKeySet("CPU"), torch.ones(1)),
        lambda op, overload, packet: overload.op(torch.ones(1)),
    ],
    ids=["op", "overload", "packet", "redispatch", "inner"],
)
def test_every_handle_to_a_removed_op_raises(registry: Registry, ns: str, call: Callable[..., Any]) -> None:
    op = define(registry, f"{ns}::f")
    overload, packet = op._opoverload, getattr(torch.ops, ns).f
    op.unregister()
    with pytest.raises(UnregisteredError, match=rf"{ns}::f: the op was unregistered"):
        call(op, overload, packet)


def test_registering_on_a_removed_op_raises(registry: Registry, ns: str) -> None:
    op = define(registry, f"{ns}::f")
    op.unregister()
    with pytest.raises(UnregisteredError, match="was unregistered"):
        op.register_fake(torch.empty_like)
    assert state(ns)["dispatcher"] == []


def test_unregister_twice_raises(registry: Registry, ns: str) -> None:
    op = define(registry, f"{ns}::f")
    op.unregister()
    with pytest.raises(UnregisteredError, match="no longer registered"):
        op.unregister()


def test_removing_an_overload_leaves_the_others(registry: Registry, ns: str) -> None:
    define(registry, f"{ns}::f")

    def two(x: Tensor, y: Tensor) -> Tensor:
        return x + y

    overload = define(registry, f"{ns}::f.two", two)
    packet = getattr(torch.ops, ns).f
    assert packet(torch.ones(1), torch.ones(1)).item() == 2
    overload.unregister()
    assert packet.overloads() == ["default"]
    assert packet(torch.ones(1)).item() == 2
    assert getattr(torch.ops, ns).f is packet
    with pytest.raises(RuntimeError):
        packet(torch.ones(1), torch.ones(1))


def test_clear_removes_all_ops_of_a_registry_and_no_other(ns: str) -> None:
    one, other = Registry(), Registry()
    define(one, f"{ns}::a"), define(one, f"{ns}::b"), define(other, f"{ns}::c")
    one.clear()
    assert state(ns)["dispatcher"] == [f"{ns}::c"]
    assert len(one) == 0
    assert [op._qualname for op in other] == [f"{ns}::c"]
    other.clear()


def test_a_registry_is_a_collection(registry: Registry, ns: str) -> None:
    op = define(registry, f"{ns}::f")
    assert list(registry) == [op]
    assert len(registry) == 1
    assert f"{ns}::f" in registry
    assert f"{ns}::g" not in registry
    assert registry[f"{ns}::f"] is op
    with pytest.raises(KeyError):
        registry[f"{ns}::g"]


def test_the_default_registry_serves_custom_op(ns: str) -> None:
    op = customops.custom_op(f"{ns}::f", add_one, mutates_args=())
    assert customops.default_registry[f"{ns}::f"] is op
    op.unregister()
    assert f"{ns}::f" not in customops.default_registry


@pytest.mark.slow
def test_definitions_leave_no_libraries_behind(registry: Registry, ns: str) -> None:
    def libraries() -> int:
        gc.collect()
        return sum(type(o) is torch.library.Library for o in gc.get_objects())

    for _ in range(3):
        define(registry, f"{ns}::f").unregister()
    before = libraries()
    for i in range(300):
        op = define(registry, f"{ns}::f{i}")
        op.register_fake(torch.empty_like)
        op.register_kernel("cpu", add_two)
        op.unregister()
    del op
    assert libraries() <= before


def test_a_kernel_of_another_library_below_a_mode(ns: str, lib: torch.library.Library) -> None:
    """torch forgets such a kernel when ours is unregistered, and finds it again when it is registered again."""

    def without_autocast(x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return call(x)

    def call(x: Tensor) -> Tensor:
        result: Tensor = getattr(torch.ops, ns).f(x)
        return result

    lib.define("f(Tensor x) -> Tensor")
    lib.impl("f", add_one, "CPU")
    lib.impl("f", without_autocast, "AutocastCPU")
    with torch.library._scoped_library(ns, "FRAGMENT") as ours, torch.autocast("cpu"):
        customops.register_autocast(f"{ns}::f", "cpu", torch.bfloat16, lib=ours)
        assert call(torch.ones(1)).dtype is torch.bfloat16
    with torch.autocast("cpu"):
        assert call(torch.ones(1)).dtype is torch.float32
        with (
            DispatchLog(),
            pytest.raises(UnregisteredError, match="cannot call the AutocastCPU kernel of another library") as caught,
        ):
            call(torch.ones(1))
        assert caught.value.op == f"{ns}::f"
        assert caught.value.fix == "register the kernel again, or call the op outside the mode"
        lib.impl("f", without_autocast, "AutocastCPU", allow_override=True)
        with DispatchLog():
            assert call(torch.ones(1)).item() == 2
