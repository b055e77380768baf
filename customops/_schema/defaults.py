"""Default values: as Python values, as text of a schema, and which of them a type takes."""

from __future__ import annotations

import re
import sys
from typing import Any

import torch

from customops import _compat

#: The list types for which the schema language has default values.
_LIST_WITH_DEFAULT = re.compile(r"(SymInt|int|float|complex|bool|ScalarType|Layout|MemoryFormat)\[\d*\]")

_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n"}


def default_text(type_: str, value: Any) -> str | None:
    """`value` as schema text for an argument of `type_`, or None where the schema language has no word for it."""
    if value is None or isinstance(value, bool):
        return str(value)
    if isinstance(value, float):
        # The parser has no inf or nan, and refuses numbers too small to have all their digits.
        return repr(value) if value == 0 or sys.float_info.min <= abs(value) <= sys.float_info.max else None
    if isinstance(value, complex):
        return f"{value.imag!r}j" if value.real == 0 else None
    if isinstance(value, int):
        return str(int(value))
    if isinstance(value, str):
        return '"' + "".join(_ESCAPES.get(c) or (c if c.isprintable() else _octal(c)) for c in value) + '"'
    if isinstance(value, torch.device):
        return f'"{value}"'
    if isinstance(value, (torch.layout, torch.memory_format)):
        return str(_compat.schemas.enum_to_number(value))  # the language has words for the first of each only
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, (list, tuple)) and _LIST_WITH_DEFAULT.fullmatch(type_):
        parts = [default_text(type_, item) for item in value]
        return None if None in parts else f"[{', '.join(map(str, parts))}]"
    return None


def _octal(char: str) -> str:
    return "".join(f"\\{byte:03o}" for byte in char.encode())


def python_default(type_text: str, value: Any) -> Any:
    """A dispatcher default in the form in which kernels receive it: dtypes and devices as objects."""
    if isinstance(value, list):
        return tuple(python_default(type_text, item) for item in value)
    base = type_text.split("[")[0].rstrip("?")
    if isinstance(value, int) and base == "ScalarType":
        return _compat.schemas.dtype_from_number(value)
    if isinstance(value, int) and base in ("Layout", "MemoryFormat"):
        return _compat.schemas.enum_from_number(base, value)
    # The dispatcher keeps these as the text has them: ``bool b=1``, ``float? f=1``, ``Device? d="cpu"``.
    convert = {"bool": bool, "float": float, "Device": torch.device}.get(base)
    return value if convert is None or value is None else convert(value)


def default_problem(type_: str, default: Any) -> str | None:
    """Why `default` is no value of schema type `type_`, or None."""
    if default is None:
        return None if type_.endswith("?") else f"None is not a {type_}: make the type Optional[...]"
    base = type_.removesuffix("?")
    if base.endswith("[]"):
        if not isinstance(default, (list, tuple)):
            return f"expected a list, got {type(default).__name__}"
        return next((p for p in (default_problem(base[:-2], item) for item in default) if p), None)
    allowed = DEFAULT_TYPES.get(base)
    if allowed is None or not isinstance(default, allowed):
        return f"a {type(default).__name__} cannot be the default of a {base}"
    if isinstance(default, int):
        return _number_problem(base, default)
    return _text_problem(base, default) if isinstance(default, str) else None


def _number_problem(base: str, default: int) -> str | None:
    if base == "float":
        return "the number is too large for a float" if abs(default) > sys.float_info.max else None
    return None if -(2**63) <= default < 2**63 else "the dispatcher's integers have 64 bits"


def _text_problem(base: str, default: str) -> str | None:
    try:
        if base == "Device":
            torch.device(default)
        default.encode()
    except RuntimeError:
        return "torch knows no such device"
    except UnicodeEncodeError:
        return "the string holds surrogates, which UTF-8 cannot encode"
    return None


DEFAULT_TYPES: dict[str, tuple[type, ...]] = {
    "SymInt": (int,),
    "float": (int, float),
    "bool": (bool,),
    "str": (str,),
    "Scalar": (int, float, bool),
    "ScalarType": (torch.dtype,),
    "Device": (torch.device, str),
}
