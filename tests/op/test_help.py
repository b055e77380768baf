"""What `help`, `inspect` and editors show of an op is its function."""

from __future__ import annotations

import inspect
import pydoc
import re
import subprocess
import sys
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from helpers.warm import PYTHON
from torch import Tensor

import customops
from customops import CustomOpDef, Mut, Registry

CORPUS = Path(__file__).parents[1] / "programs" / "type_checkers"


@dataclass(frozen=True)
class Window:
    left: int = -1
    right: int = -1


def plain(x: Tensor, by: float = 2.0, *, shift: int = 0) -> Tensor:
    """Scale, then shift."""
    return x * by + shift


def rich(x: Tensor, window: Window = Window(), *, mode: Literal["a", "b"] = "a") -> Tensor:
    """Attend.

    In a window.
    """
    return x * window.left


def silent(x: Tensor) -> Tensor:
    return x * 2


FORMS = {
    "plain": (plain, {}),
    "rich": (rich, {}),
    "bypass": (plain, {"bypass": True}),
    "without a docstring": (silent, {}),
}


@pytest.fixture(params=list(FORMS))
def fn(request: pytest.FixtureRequest) -> Any:
    return FORMS[request.param][0]


@pytest.fixture
def op(registry: Registry, ns: str, request: pytest.FixtureRequest, fn: Any) -> CustomOpDef[Any, Any]:
    return registry.custom_op(f"{ns}::f", fn, **FORMS[request.node.callspec.params["fn"]][1])


def test_the_signature_is_that_of_the_function(op: CustomOpDef[Any, Any], fn: Any) -> None:
    assert inspect.signature(op) == inspect.signature(fn)
    assert inspect.signature(op, eval_str=True) == inspect.signature(fn, eval_str=True)
    assert typing.get_type_hints(op, include_extras=True) == typing.get_type_hints(fn, include_extras=True)
    assert op.__wrapped__ is fn
    assert inspect.unwrap(op) is fn


def test_help_shows_the_function(op: CustomOpDef[Any, Any], fn: Any) -> None:
    shown, of_function = (pydoc.render_doc(each, renderer=pydoc.plaintext).partition("\n\n")[2] for each in (op, fn))
    assert shown == of_function
    assert re.match(rf"{fn.__name__}\(\s*x: ", shown)  # Python 3.13 breaks long lines
    assert inspect.getdoc(op) == inspect.getdoc(fn)
    assert "CustomOpDef" not in shown


def test_keyword_arguments_are_completed(op: CustomOpDef[Any, Any], fn: Any) -> None:
    """By shells and editors, which ask for the signature of the object."""
    keywords = {plain: ["x", "by", "shift"], rich: ["x", "window", "mode"], silent: ["x"]}
    assert list(inspect.signature(op).parameters) == keywords[fn]


def test_values_in_help() -> None:
    assert str(inspect.signature(plain)) == "(x: 'Tensor', by: 'float' = 2.0, *, shift: 'int' = 0) -> 'Tensor'"


def test_help_of_a_module_lists_its_ops_as_functions(registry: Registry, ns: str) -> None:
    module = types.ModuleType("mylib", "Ops.")
    module.plain = registry.custom_op(f"{ns}::f", plain)  # type: ignore[attr-defined]
    module.plain.__module__ = "mylib"
    sys.modules["mylib"] = module
    try:
        shown = pydoc.render_doc(module, renderer=pydoc.plaintext)
    finally:
        del sys.modules["mylib"]
    functions = shown.partition("FUNCTIONS\n")[2]
    assert functions.startswith("    plain(x: 'Tensor', by: 'float' = 2.0, *, shift: 'int' = 0) -> 'Tensor'\n")
    assert "        Scale, then shift.\n" in functions


SCHEMAS = {
    "(Tensor x, int n=3, *, bool f) -> (int, int)": "(x: 'Tensor', n: 'int' = 3, *, f: 'bool') -> '(int, int)'",
    "(Tensor(a!) x, SymInt[]? sizes=None) -> ()": "(x: 'Tensor(a!)', sizes: 'SymInt[]?' = None) -> None",
    "(Tensor x, int from) -> Tensor": "(*args, **kwargs)",
}


@pytest.mark.parametrize("schema", SCHEMAS)
def test_an_op_without_a_function_shows_its_schema(registry: Registry, ns: str, schema: str) -> None:
    registry.define(f"{ns}::f", schema)
    assert str(inspect.signature(registry.adopt(f"{ns}::f"))) == SCHEMAS[schema]


def test_an_op_of_torch_shows_its_schema(registry: Registry) -> None:
    op = registry.adopt("aten::sin")
    assert str(inspect.signature(op)) == "(self: 'Tensor') -> 'Tensor'"
    assert pydoc.render_doc(op, renderer=pydoc.plaintext).endswith("sin(self: 'Tensor') -> 'Tensor'\n")


def test_a_callable_without_a_signature_shows_its_schema(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::f", torch.sin, schema="(Tensor x) -> Tensor")
    assert str(inspect.signature(op)) == "(x: 'Tensor') -> 'Tensor'"


def test_the_class_has_its_own_signature() -> None:
    assert list(inspect.signature(CustomOpDef).parameters) == ["owner", "name", "fn"]
    assert pydoc.render_doc(CustomOpDef, renderer=pydoc.plaintext).count("An operator: callable") == 1


# An op in a class is no method ---------------------------------------------------------------------------------------


class Plain:
    op: Callable[..., Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        return self.op(x) + type(self).op(x, by=3.0)


def test_an_op_in_a_class_is_the_op(registry: Registry, ns: str) -> None:
    Plain.op = registry.custom_op(f"{ns}::f", plain)
    assert Plain().op is Plain.op
    assert Plain()(torch.ones(())).item() == 5.0


@pytest.mark.compile
def test_an_op_in_a_class_is_compiled(registry: Registry, ns: str) -> None:
    Plain.op = op = registry.custom_op(f"{ns}::f", plain)
    op.register_fake(lambda x, by, *, shift: torch.empty_like(x))
    assert torch.compile(Plain(), fullgraph=True, backend="aot_eager")(torch.ones(())).item() == 5.0


# Type checkers -------------------------------------------------------------------------------------------------------


@pytest.mark.process
@pytest.mark.parametrize("name", ["right", "untyped"])
def test_what_type_checkers_take_for_right_is_right(name: str) -> None:
    """mypy has no error in these files (`make typecheck`), and customops neither."""
    command = [PYTHON, "-W", "ignore::UserWarning", str(CORPUS / f"{name}.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_annotations_of_the_package_are_exported() -> None:
    assert {"Keys", "Mut", "SameAs"} <= set(customops.__all__)
    assert typing.get_args(Mut[Tensor])[0] is Tensor
    assert issubclass(customops.errors.ArgumentError, customops.CustomOpsError)
