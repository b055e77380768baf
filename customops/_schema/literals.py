"""Single default values: how a schema writes them, how it hands them back, and which of them it cannot hold."""

from __future__ import annotations

import sys
from typing import Any

import torch

from customops import _compat

_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n"}


def literal(value: Any) -> str | None:
    """A number, a bool or a string as schema text, or None where the schema language has no word for it."""
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, float):
        # The parser has no inf or nan, and refuses numbers too small to have all their digits.
        return repr(value) if value == 0 or sys.float_info.min <= abs(value) <= sys.float_info.max else None
    if isinstance(value, complex):
        return f"{value.imag!r}j" if value.real == 0 else None
    if isinstance(value, int):
        return str(int(value))
    return quoted(value) if isinstance(value, str) else None


def quoted(value: Any) -> str:
    """A string, or the text of an object, as a string of a schema."""
    return '"' + "".join(_ESCAPES.get(c) or (c if c.isprintable() else _octal(c)) for c in str(value)) + '"'


def _octal(char: str) -> str:
    return "".join(f"\\{byte:03o}" for byte in char.encode())


def dtype_text(value: torch.dtype) -> str:
    return str(value).removeprefix("torch.")


def dtype_from(value: Any) -> Any:
    """The dtype behind the number by which the dispatcher holds it."""
    return _compat.schemas.dtype_from_number(value) if isinstance(value, int) else value


def enum_text(value: torch.layout | torch.memory_format) -> str:
    """A layout or memory format as a number: the schema language has words for the first of each only."""
    return str(_compat.schemas.enum_to_number(value))


def layout_from(value: Any) -> Any:
    """The layout behind the number by which the dispatcher holds it."""
    return _compat.schemas.enum_from_number("Layout", value) if isinstance(value, int) else value


def memory_format_from(value: Any) -> Any:
    """The memory format behind the number by which the dispatcher holds it."""
    return _compat.schemas.enum_from_number("MemoryFormat", value) if isinstance(value, int) else value


def plain_number(value: Any) -> int | float:
    """A number of a subclass (a member of an IntEnum, a numpy float64) as a plain one. A bool stays one."""
    if isinstance(value, bool):
        return value
    return float(value) if isinstance(value, float) else int(value)


def int_problem(value: Any) -> str | None:
    """Why the dispatcher cannot hold an int, or None; a number of another type is for others to judge."""
    if not isinstance(value, int) or -(2**63) <= value < 2**63:
        return None
    return "the dispatcher's integers have 64 bits"


def float_problem(value: int | float) -> str | None:
    """Why a number cannot be a float, or None."""
    return "the number is too large for a float" if isinstance(value, int) and abs(value) > sys.float_info.max else None


def str_problem(value: str) -> str | None:
    """Why a schema cannot hold a string, or None."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return "the string holds surrogates, which UTF-8 cannot encode"
    return None


def device_problem(value: torch.device | str) -> str | None:
    """Why something is no device, or None."""
    try:
        torch.device(value)
    except RuntimeError:
        return "torch knows no such device"
    except UnicodeEncodeError:
        return str_problem(str(value))
    return None
