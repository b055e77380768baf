"""What all registrations have in common, and the options of `custom_op`."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from typing import Any, get_type_hints

import pytest
import torch
from torch import Tensor

import customops
from customops import CustomOpDef, Registry, library
from customops._op import definitions
from customops.errors import DefinitionError, RegistrationError, UnregisteredError


def double_fn(x: Tensor) -> Tensor:
    return x * 2


def setup(ctx: Any, inputs: Any, output: Any) -> None: ...


def fill(x: Tensor, *, out: Tensor) -> None:
    torch.mul(x, 2, out=out)


#: The arguments of a valid call of each method.
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "register_kernel": ("cpu", lambda x: x * 2),
    "register_fake": (torch.empty_like,),
    "register_out": (fill,),
    "register_autograd": (lambda ctx, grad: grad * 2,),
    "register_jvp": (lambda ctx, tangent: tangent * 2,),
    "register_reference": (lambda x: x * 2,),
    "register_flops": (lambda x: x.numel(),),
    "register_sharding": (lambda x: [],),
    "register_autocast": ("cpu", torch.bfloat16),
    "register_vmap": ("sequential",),
    "register_torch_dispatch": (torch.utils._python_dispatch.TorchDispatchMode, lambda mode, func, types, args, kw: 0),
    "register_effect": (None,),
    "register_samples": (lambda: [(torch.ones(2),)],),
    "register_decomposition": (lambda x: x + x,),
    "register_lowering": (lambda x: x + x,),
}


#: The position of the function among the arguments, where it is not the first; None: the method takes no function.
FUNCTION_AT: dict[str, int | None] = {
    "register_kernel": 1,
    "register_torch_dispatch": 1,
    "register_autocast": None,
    "register_effect": None,
}


FUNCTIONS = [name for name in dir(library) if name.startswith("register_")]


def test_the_table_has_all_methods() -> None:
    methods = [name for name in dir(CustomOpDef) if name.startswith("register_")]
    assert sorted(ARGUMENTS) == sorted(methods)
    assert set(FUNCTIONS) < set(methods)
    assert all(getattr(customops, name) is getattr(library, name) for name in FUNCTIONS)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_each_is_taken_also_as_a_decorator(registry: Registry, ns: str, name: str) -> None:
    args = ARGUMENTS[name]
    ops = [registry.custom_op(f"{ns}::{letter}", double_fn, mutates_args=()) for letter in "fg"]
    result = getattr(ops[0], name)(*args)
    _, *parameters = inspect.signature(getattr(CustomOpDef, name)).parameters
    at = FUNCTION_AT.get(name, 0)
    if at is None:
        assert result is None
        assert not {"fn", "func"} & set(parameters)
        getattr(ops[1], name)(*args)
    else:
        assert parameters[at] in ("fn", "func", "backward", "jvp", "rule")
        assert result in (None, args[at])
        assert getattr(ops[1], name)(*args[:at])(args[at]) is args[at]
    described = [[(rule.kind, rule.origin) for rule in op.describe().rules] for op in ops]
    assert described[0] == described[1]
    for op in ops:
        assert op(torch.ones(2)).tolist() == [2, 2]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_does_what_the_method_does(registry: Registry, ns: str, name: str) -> None:
    ops = [registry.custom_op(f"{ns}::{letter}", double_fn, mutates_args=()) for letter in "fg"]
    result = getattr(ops[0], name)(*ARGUMENTS[name])
    assert getattr(library, name)(f"{ns}::g", *ARGUMENTS[name]) in (None, result)
    described = [[(rule.kind, rule.origin) for rule in op.describe().rules] for op in ops]
    assert described[0] == described[1]
    function, method = (inspect.signature(getattr(holder, name)).parameters for holder in (library, CustomOpDef))
    keywords = [
        [each.name for each in found.values() if each.kind is each.KEYWORD_ONLY] for found in (function, method)
    ]
    assert keywords[0] == keywords[1]
    with pytest.raises(TypeError, match=name):
        getattr(library, name)()


def test_the_options_of_custom_op_are_said_once() -> None:
    fields = {field.name: field for field in dataclasses.fields(definitions.OpOptions)}
    assert set(get_type_hints(definitions.DefinitionOptions)) == set(fields)
    parameters = inspect.signature(Registry.custom_op).parameters
    assert list(parameters) == ["self", "name", "fn", *fields]
    assert {name: each.default for name, each in parameters.items() if name in fields} == {
        name: field.default for name, field in fields.items()
    }
    documented = str(Registry.custom_op.__doc__)
    assert [name for name in fields if f"\n            {name}:" not in documented] == []
    assert inspect.signature(customops.custom_op).parameters.keys() == set(parameters) - {"self"}


@pytest.mark.parametrize(
    "option", ["check", "bypass", "eager", "direct_in_graphs", "choose_when_traced", "traceable", "on_conflict"]
)
def test_a_value_that_no_option_has(registry: Registry, ns: str, option: str) -> None:
    with pytest.raises(DefinitionError, match=option):
        registry.custom_op(f"{ns}::f", double_fn, mutates_args=(), **{option: 3})  # type: ignore[call-overload]


@pytest.mark.parametrize("option", ["fn", "name", "self", "mutate_args", "lazy", "when"])
def test_an_option_that_is_none(registry: Registry, ns: str, option: str) -> None:
    with pytest.raises(TypeError, match=rf"custom_op\(\) got an unexpected keyword argument '{option}'"):
        registry.custom_op(f"{ns}::f", **{option: double_fn})  # type: ignore[call-overload]


def test_arguments_that_a_registration_does_not_take(registry: Registry, ns: str) -> None:
    """Also where the function is still to come."""
    op: Any = registry.custom_op(f"{ns}::f", double_fn, mutates_args=())
    for call in (
        lambda: op.register_fake(torch.empty_like, library=None),
        lambda: op.register_fake(library=None),
        lambda: op.register_kernel(),
        lambda: op.register_autocast("cpu"),
    ):
        with pytest.raises(TypeError):
            call()
    for call in (
        lambda: op.register_kernel("gpu", double_fn),
        lambda: op.register_kernel("gpu"),
        lambda: op.register_out(fill, device_types="gpu"),
        lambda: op.register_reference(double_fn, gradients=True),
        lambda: op.register_reference(recomputes=True),
    ):
        with pytest.raises(RegistrationError):
            call()


def test_a_function_form_needs_its_formula(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::f", double_fn, mutates_args=())
    for function in (library.register_autograd, library.register_jvp):
        with pytest.raises(TypeError, match="missing 1 required positional argument"):
            function(op, setup_context=setup)  # type: ignore[call-arg]


def test_samples_of_an_op_that_is_gone(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::f", double_fn, mutates_args=())
    op.unregister()
    with contextlib.suppress(UnregisteredError):
        op.register_samples(lambda: [])
    assert [*op.samples()] == []


def test_an_op_that_comes_back_has_the_call_it_had(registry: Registry, ns: str, monkeypatch: Any) -> None:
    op = registry.custom_op(f"{ns}::f", double_fn, mutates_args=(), bypass=True)
    cls = type(op)
    with registry.scope():
        registry.custom_op(f"{ns}::f", double_fn, mutates_args=())
    assert type(op) is cls
    with registry.scope():
        monkeypatch.setenv("CUSTOMOPS_BYPASS", f"{ns}=0")
        registry.custom_op(f"{ns}::f", double_fn, mutates_args=(), bypass=True)
    assert "without the dispatcher" in op.explain_call() or len(op._calls) == 1
    assert op(torch.ones(1)) == 2


@pytest.mark.compile
def test_an_op_that_comes_back_has_rules_that_call_it(registry: Registry, ns: str) -> None:
    """Strategies and decompositions hold the op that they were registered on, which then was removed."""
    options: dict[str, Any] = {"schema": "(Tensor x) -> Tensor", "mutates_args": ()}
    registrations: dict[str, Any] = {
        "strategy": lambda op: op.register_vmap("broadcast_all"),
        "reference": lambda op: op.register_reference(lambda x: x * 2),
        "decomposition": lambda op: op.register_decomposition(lambda x: x + x),
        "lowering": lambda op: op.register_lowering(lambda x: x + x),
    }
    ops = {}
    for name, register in registrations.items():
        ops[name] = registry.custom_op(f"{ns}::{name}", double_fn, **options)
        ops[name].register_fake(torch.empty_like)
        register(ops[name])
    for _ in range(2):
        with registry.scope():
            for name in ops:
                registry.custom_op(f"{ns}::{name}", double_fn, **options)
    x = torch.randn(2, 3)
    for name in ("strategy", "reference"):
        torch.testing.assert_close(torch.vmap(ops[name])(x), x * 2)
    for name in ("decomposition", "lowering"):
        torch.testing.assert_close(torch.compile(ops[name])(x), x * 2)
