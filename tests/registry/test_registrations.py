"""The table of registrations, and what follows it; the options of `custom_op`, which are said once."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import sys
import threading
from typing import Any, get_type_hints

import pytest
import torch
from torch import Tensor

import customops
from customops import CustomOpDef, Registry, Undefined, library
from customops._op import definitions
from customops._op.register import REGISTRATIONS
from customops.errors import CallbackError, DefinitionError, RegistrationError, UnregisteredError


def double_fn(x: Tensor) -> Tensor:
    return x * 2


def setup(ctx: Any, inputs: Any, output: Any) -> None: ...


def fill(x: Tensor, *, out: Tensor) -> None:
    torch.mul(x, 2, out=out)


#: Of each registration the arguments of a call that is right.
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "register_kernel": ("cpu", lambda x: x * 2),
    "register_fake": (torch.empty_like,),
    "register_out": (fill,),
    "register_autograd": (lambda ctx, grad: grad * 2,),
    "register_jvp": (lambda ctx, tangent: tangent * 2,),
    "register_autograd_from": (lambda x: x * 2,),
    "register_reference": (lambda x: x * 2,),
    "register_flops": (lambda x: x.numel(),),
    "register_shapes": ("*n -> *n",),
    "register_sharding": (lambda x: [],),
    "register_autocast": ("cpu", torch.bfloat16),
    "register_vmap": ("sequential",),
    "register_torch_dispatch": (torch.utils._python_dispatch.TorchDispatchMode, lambda mode, func, types, args, kw: 0),
    "register_effect": (None,),
    "register_samples": (lambda: [(torch.ones(2),)],),
    "register_decomposition": (lambda x: x + x,),
    "register_lowering": (lambda x: x + x,),
    "register_replacement": (lambda x: x + x,),
}


FUNCTIONS = [name for name in dir(library) if name.startswith("register_")]


def test_the_table_has_all_methods() -> None:
    methods = [name for name in dir(CustomOpDef) if name.startswith("register_")]
    assert sorted(REGISTRATIONS) == sorted(methods)
    assert set(FUNCTIONS) < set(methods)
    assert all(getattr(customops, name) is getattr(library, name) for name in FUNCTIONS)


def test_where_the_function_stands() -> None:
    for name, row in REGISTRATIONS.items():
        _, *parameters = inspect.signature(getattr(CustomOpDef, name)).parameters
        if row.function is not None:
            assert parameters[row.function] in ("fn", "func", "backward", "jvp", "pattern", "rule")
        else:
            assert not {"fn", "func"} & set(parameters)


@pytest.mark.parametrize("name", REGISTRATIONS)
def test_each_is_remembered_taken_and_ignored(registry: Registry, ns: str, name: str) -> None:
    """By an op that is defined, by a lazy one, whose definition makes it, and by one that is not to be defined."""
    args = ARGUMENTS[name]
    op = registry.custom_op(f"{ns}::double", double_fn, mutates_args=())
    lazy = registry.custom_op(f"{ns}::lazy", double_fn, mutates_args=(), lazy=True)
    undefined = registry.custom_op(f"{ns}::undefined", double_fn, mutates_args=(), when=False)
    assert isinstance(undefined, Undefined)
    results = []
    for each in (op, lazy, undefined):
        each.register_samples(lambda: [(torch.ones(2),)])
        results.append(getattr(each, name)(*args))
        at = REGISTRATIONS[name].function
        if at is not None and name != "register_autograd_from":
            assert getattr(each, name)(*args[:at])(args[at]) is args[at]
    assert results[0] is results[1] is results[2]
    assert bool(torch._C._jit_get_schemas_for_operator(lazy._qualname)) is REGISTRATIONS[name].defines
    assert lazy(torch.ones(2)).tolist() == undefined(torch.ones(2)).tolist() == [2, 2]
    rules = [[(rule.kind, rule.origin) for rule in each.describe().rules] for each in (op, lazy)]
    assert rules[0] == rules[1]


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


@pytest.mark.parametrize("option", ["check", "bypass", "eager", "direct_in_graphs", "traceable", "lazy", "on_conflict"])
def test_a_value_that_no_option_has(registry: Registry, ns: str, option: str) -> None:
    with pytest.raises(DefinitionError, match=option):
        registry.custom_op(f"{ns}::f", double_fn, mutates_args=(), **{option: 3})  # type: ignore[call-overload]


@pytest.mark.parametrize("option", ["fn", "name", "self", "mutate_args"])
def test_an_option_that_is_none(registry: Registry, ns: str, option: str) -> None:
    with pytest.raises(TypeError, match=rf"custom_op\(\) got an unexpected keyword argument '{option}'"):
        registry.custom_op(f"{ns}::f", **{option: double_fn})  # type: ignore[call-overload]


@pytest.mark.parametrize("kind", [{}, {"lazy": True}, {"when": False}], ids=["defined", "lazy", "undefined"])
def test_arguments_that_a_registration_does_not_take(registry: Registry, ns: str, kind: dict[str, Any]) -> None:
    """Also where the registration is remembered, or has no effect, and where the function is to come."""
    op: Any = registry.custom_op(f"{ns}::f", double_fn, mutates_args=(), **kind)
    for call in (
        lambda: op.register_fake(torch.empty_like, library=None),
        lambda: op.register_fake(library=None),
        lambda: op.register_kernel(),
        lambda: op.register_autocast("cpu"),
        lambda: op.register_autograd_from(recompute=False),
    ):
        with pytest.raises(TypeError):
            call()
    for call in (
        lambda: op.register_kernel("gpu", double_fn),
        lambda: op.register_kernel("gpu"),
        lambda: op.register_out(fill, device_types="gpu"),
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


def test_a_lazy_op_that_cannot_be_defined_is_replaced(registry: Registry, ns: str) -> None:
    """Without being defined; with what was registered on it in the log."""

    def untyped(x):  # type: ignore[no-untyped-def]
        return x

    old = registry.custom_op(f"{ns}::f", untyped, mutates_args=(), lazy=True)
    old.register_fake(torch.empty_like)
    with registry.scope():
        inner = registry.custom_op(f"{ns}::f", double_fn, mutates_args=())
        assert inner(torch.ones(1)) == 2
    assert registry[f"{ns}::f"] is old
    new = registry.custom_op(f"{ns}::f", double_fn, mutates_args=())
    assert new(torch.ones(1)) == 2
    with pytest.raises(UnregisteredError):
        old(torch.ones(1))


def test_an_op_that_comes_back_has_the_call_it_had(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::f", double_fn, mutates_args=(), bypass=True)
    cls = type(op)
    with registry.scope():
        registry.custom_op(f"{ns}::f", double_fn, mutates_args=())
    assert type(op) is cls
    with registry.scope():
        registry.configure(ns, bypass=False)
        registry.custom_op(f"{ns}::f", double_fn, mutates_args=())
    assert "without the dispatcher" in op.explain_call() or len(op._calls) == 1
    assert op(torch.ones(1)) == 2


@pytest.mark.parametrize("failing", [True, False])
def test_attributes_of_a_lazy_op_while_another_thread_defines_it(registry: Registry, ns: str, failing: bool) -> None:
    """A definition that fails leaves no moment in which the op has neither a declaration nor a definition."""
    errors: list[BaseException] = []

    def ask(op: Any) -> None:
        for _ in range(20):
            try:
                op.schema  # noqa: B018
            except CallbackError:
                pass
            except BaseException as error:
                errors.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for i in range(30):
            op = registry.custom_op(f"{ns}::op{i}", double_fn, mutates_args=(), lazy=True)
            op.register_fake((lambda a, b, c: a) if failing else torch.empty_like)
            threads = [threading.Thread(target=ask, args=(op,)) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(before)
    assert errors == []


@pytest.mark.compile
def test_an_op_that_comes_back_has_rules_that_call_it(registry: Registry, ns: str) -> None:
    """Strategies, decompositions and lines hold the op that they were registered on, which then was removed."""
    options: dict[str, Any] = {"schema": "(Tensor x) -> Tensor", "mutates_args": ()}
    registrations: dict[str, Any] = {
        "strategy": lambda op: op.register_vmap("broadcast_all"),
        "reference": lambda op: op.register_reference(lambda x: x * 2, vmap="sequential"),
        "line": lambda op: op.register_shapes("*b -> *b", parallel="*b"),
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
    for name in ("strategy", "reference", "line"):
        torch.testing.assert_close(torch.vmap(ops[name])(x), x * 2)
    for name in ("decomposition", "lowering"):
        torch.testing.assert_close(torch.compile(ops[name])(x), x * 2)
