"""Rules for dispatch modes and tensor subclasses."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.functions import add_one
from helpers.modes import DispatchLog
from torch import Tensor

import customops
from customops import Registry
from customops.errors import CallbackError


class Wrapped(Tensor):
    """A wrapper subclass; unregistered ops run on what it wraps."""

    elem: Tensor

    @staticmethod
    def __new__(cls, elem: Tensor) -> Any:
        result = Tensor._make_wrapper_subclass(cls, elem.shape, dtype=elem.dtype, device=elem.device)
        result.elem = elem
        return result

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(a.elem if isinstance(a, cls) else a for a in args), **(kwargs or {}))


@pytest.fixture
def op(registry: Registry, ns: str) -> Any:
    return registry.custom_op(f"{ns}::f", add_one, mutates_args=())


def minus(mode: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
    return args[0] - 1


@pytest.mark.parity(61)
@pytest.mark.parametrize("form", ["op", "name", "overload"])
def test_a_rule_runs_instead_of_the_mode(op: Any, form: str) -> None:
    handle = {"op": op, "name": op._qualname, "overload": op._opoverload}[form]
    assert customops.register_torch_dispatch(handle, DispatchLog, minus) is minus
    with DispatchLog() as mode:
        assert op(torch.ones(1)).item() == 0
        torch.zeros(1).sin()
    assert str(op._opoverload) not in mode.seen
    assert "aten.sin.default" in mode.seen
    assert op(torch.ones(1)).item() == 2


@pytest.mark.parity(61)
@pytest.mark.parametrize("by_method", [True, False])
def test_the_mode_itself_is_passed(op: Any, by_method: bool) -> None:
    register = op.register_torch_dispatch if by_method else functools.partial(customops.register_torch_dispatch, op)

    @register(DispatchLog)
    def rule(mode: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
        assert isinstance(mode, DispatchLog)
        assert func is op._opoverload
        assert (len(types), len(args), kwargs or {}) == (0, 1, {})  # no argument is of a subclass
        return args[0] * 10

    with DispatchLog():
        assert op(torch.ones(1)).item() == 10


def test_registering_again_replaces(op: Any) -> None:
    op.register_torch_dispatch(DispatchLog, minus)
    op.register_torch_dispatch(DispatchLog, lambda mode, func, types, args, kwargs: args[0] + 100)
    with DispatchLog():
        assert op(torch.ones(1)).item() == 101


def test_a_subclass_is_passed_as_class(op: Any) -> None:
    classes = []

    @op.register_torch_dispatch(Wrapped)
    def rule(cls: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        classes.append(cls)
        assert list(types) == [Wrapped]
        return Wrapped(func(args[0].elem) * 2)

    result = op(Wrapped(torch.ones(1)))
    assert classes == [Wrapped]
    assert isinstance(result, Wrapped)
    assert result.elem.item() == 4
    assert torch.sin(Wrapped(torch.zeros(1))).item() == 0


@pytest.mark.parity(61)
def test_an_op_without_kernels_needs_none(registry: Registry, ns: str) -> None:
    lib = torch.library.Library(ns, "FRAGMENT")
    lib.define("f(Tensor x) -> Tensor")
    registry.adopt(f"{ns}::f").register_torch_dispatch(DispatchLog, minus, lib=lib)
    with DispatchLog():
        assert getattr(torch.ops, ns).f(torch.ones(1)).item() == 0
    lib._destroy()


@pytest.fixture
def rules(ns: str) -> Iterator[torch.library.Library]:
    with torch.library._scoped_library(ns, "FRAGMENT") as lib:
        yield lib


@pytest.mark.parity(62)
def test_torch_library_has_a_rule_for_a_mode(
    registry: Registry, ns: str, op: Any, rules: torch.library.Library
) -> None:
    other = registry.custom_op(f"{ns}::g", lambda x: x + 5, mutates_args=(), schema="(Tensor x) -> Tensor")
    rules._register_torch_dispatch_rule("f", DispatchLog, minus)
    with DispatchLog() as mode:
        assert op(torch.ones(1)).item() == 0
        assert other(torch.ones(1)).item() == 6
    assert str(op._opoverload) not in mode.seen
    assert str(other._opoverload) in mode.seen


@pytest.mark.parity(62)
def test_torch_library_has_a_rule_for_a_subclass(
    registry: Registry, ns: str, op: Any, rules: torch.library.Library
) -> None:
    other = registry.custom_op(f"{ns}::g", lambda x: x + 5, mutates_args=(), schema="(Tensor x) -> Tensor")
    classes = []

    def rule(cls: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        classes.append(cls)
        return Wrapped(func(args[0].elem) * 2)

    rules._register_torch_dispatch_rule("f", Wrapped, rule)
    assert op(Wrapped(torch.ones(1))).elem.item() == 4
    assert other(Wrapped(torch.ones(1))).item() == 6
    assert classes == [Wrapped]


def test_torch_finds_the_method_by_name(op: Any) -> None:
    torch.library.register_torch_dispatch(op._qualname, DispatchLog, minus)
    with DispatchLog():
        assert op(torch.ones(1)).item() == 0


def test_unregistering_takes_the_rule_away(registry: Registry, ns: str, op: Any) -> None:
    op.register_torch_dispatch(DispatchLog, minus)
    op.unregister()
    again = registry.custom_op(f"{ns}::f", add_one, mutates_args=())
    with DispatchLog():
        assert again(torch.ones(1)).item() == 2


def test_a_scope_takes_the_rule_away(registry: Registry, op: Any) -> None:
    with registry.scope():
        op.register_torch_dispatch(DispatchLog, minus)
    with DispatchLog():
        assert op(torch.ones(1)).item() == 2


def test_a_rule_that_cannot_be_called_is_refused(op: Any) -> None:
    with pytest.raises(CallbackError, match="torch_dispatch rule"):
        op.register_torch_dispatch(DispatchLog, lambda mode, func: None)


def test_a_rule_for_an_object_is_refused(op: Any, ns: str) -> None:
    with pytest.raises(CallbackError, match="a torch_dispatch rule must be registered for a class") as caught:
        op.register_torch_dispatch("DispatchLog", minus)
    error = caught.value
    assert (error.op, error.got) == (f"{ns}::f", "'DispatchLog'")
    assert error.expected == "a subclass of TorchDispatchMode or of Tensor"
    assert error.fix == "register_torch_dispatch(MyMode, fn)"


def test_a_rule_that_torch_refuses_leaves_nothing(op: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise ValueError("no")

    handle = op._definition
    libraries = list(handle._added)
    with monkeypatch.context() as patch:
        patch.setattr("customops._torch.library.register_torch_dispatch", refuse)
        with pytest.raises(ValueError, match="no"):
            op.register_torch_dispatch(DispatchLog, minus)
    assert handle._added == libraries
    op.register_torch_dispatch(DispatchLog, minus)
    with DispatchLog():
        assert op(torch.ones(1)) == 0
