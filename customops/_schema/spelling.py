"""Types and values as one would write them."""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import sys
import types
import typing
from typing import Any, Literal, Union

import torch
from torch import Tensor

from customops._schema.annotations import Keys
from customops.errors import brief


def show(annotation: Any) -> str:
    """``int`` rather than ``<class 'int'>``; everything else as Python prints it, on one short line."""
    if isinstance(annotation, type) and not typing.get_origin(annotation):
        module = _public_module(annotation)
        return annotation.__qualname__ if module == "builtins" else f"{module}.{annotation.__qualname__}"
    return brief(annotation, 120)


def _public_module(cls: type) -> str:
    """Where users import a class from: ``pathlib`` where Python 3.13 has it in ``pathlib._local``."""
    outer, _, inner = cls.__module__.rpartition(".")
    is_public = inner.startswith("_") and getattr(sys.modules.get(outer), cls.__qualname__, None) is cls
    return outer if is_public else cls.__module__


def code(hint: Any) -> str:
    """A type as one would write it."""
    origin, items = typing.get_origin(hint), typing.get_args(hint)
    if hint is None or hint is type(None):
        return "None"
    if hint is Ellipsis:
        return "..."
    if hint in (Tensor, torch.types.Number):
        return "Tensor" if hint is Tensor else "torch.types.Number"
    if origin in (Union, types.UnionType):
        return " | ".join(map(code, sorted(items, key=lambda item: item is type(None))))
    if origin is Literal:
        return f"Literal[{', '.join(map(literal, items))}]"
    if origin is typing.Annotated:
        return _annotated(items[0], items[1:])
    if origin is not None:
        name = "Sequence" if origin is collections.abc.Sequence else getattr(origin, "__name__", str(origin))
        return f"{name}[{', '.join(map(code, items))}]" if items else name
    if isinstance(hint, type):
        return f"torch.{hint.__name__}" if hint.__module__ == "torch" else hint.__name__
    return str(hint)


def _annotated(inner: Any, metadata: tuple[Any, ...]) -> str:
    keys = next((item for item in metadata if isinstance(item, Keys)), None)
    return code(inner) if keys is None else f"Annotated[{code(inner)}, Keys({', '.join(map(literal, keys))})]"


def literal(value: Any) -> str:
    """A value as one would write it; ``Config(...)`` of a class."""
    if isinstance(value, str) and type(value) is str:
        return repr(value) if '"' in value else f'"{value}"'
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return f"{type(value).__name__}(...)"
    return brief(value)
