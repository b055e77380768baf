"""A frozen `Schema`: what the rest of the package knows about an operator's signature.

Parsed from text or inferred from hints once; nothing downstream re-reads strings or hints.
"""

from __future__ import annotations

import functools
import itertools
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import torch

from customops import _compat
from customops.errors import DefinitionError, SchemaError, TagError, brief

Tags = torch.Tag | Sequence[torch.Tag] | None


class _Required(Enum):
    REQUIRED = "required"

    def __repr__(self) -> str:
        return "REQUIRED"


#: Stands for "no default".
REQUIRED: Final = _Required.REQUIRED

_ALIAS = re.compile(r"(Tensor[?\[\]\d]*)\(([^()]*)\)")  # torch prints Tensor(a!)?[] as Tensor?(a!)[]


@dataclass(frozen=True)
class Alias:
    """Alias sets of an argument or return: ``Tensor(a|b!)`` has sets {a, b} and is written."""

    sets: frozenset[str]
    write: bool = False

    @classmethod
    def parse(cls, text: str) -> Alias:
        before = text.split("->")[0]
        return cls(frozenset(name.strip(" !") for name in before.split("|")), "!" in text)

    def __str__(self) -> str:
        return "|".join(sorted(self.sets)) + ("!" if self.write else "")


@dataclass(frozen=True)
class Typed:
    """What arguments and returns share: a type without its alias annotation (``Tensor?[]``), and the alias."""

    type: str
    alias: Alias | None = None

    @property
    def is_tensor(self) -> bool:
        return self.type in ("Tensor", "Tensor?")

    @property
    def is_tensor_list(self) -> bool:
        return self.type.startswith(("Tensor[", "Tensor?["))

    @property
    def holds_tensors(self) -> bool:
        return self.is_tensor or self.is_tensor_list

    @property
    def is_written(self) -> bool:
        return self.alias is not None and self.alias.write

    @property
    def type_text(self) -> str:
        if self.alias is None:
            return self.type
        return self.type.replace("Tensor", f"Tensor({self.alias})", 1)


@dataclass(frozen=True)
class Argument(Typed):
    """One argument. `default` is the Python value a kernel receives when the caller omits the argument."""

    name: str = ""
    default: Any = REQUIRED
    kwarg_only: bool = False
    #: The default cannot be written in schema text (inf, nan, a list of floats with one ...), so the text says
    #: ``None`` and the call path puts `default` in its place.
    default_is_none_in_text: bool = False

    @property
    def has_default(self) -> bool:
        return self.default is not REQUIRED

    def __str__(self) -> str:
        text = f"{self.type_text} {self.name}"
        if not self.has_default:
            return text
        if self.default_is_none_in_text:
            return f"{text}=None"
        return f"{text}={default_text(self.type, self.default)}"


@dataclass(frozen=True)
class Return(Typed):
    """One return. A return of type ``(Tensor)`` is a tuple of length one."""

    def __str__(self) -> str:
        return self.type_text


@dataclass(frozen=True)
class Schema:
    """Arguments and returns of an operator, without its name."""

    arguments: tuple[Argument, ...]
    returns: tuple[Return, ...]

    def __str__(self) -> str:
        parts = [str(argument) for argument in self.positional]
        if self.keyword_only:
            parts += ["*", *map(str, self.keyword_only)]
        if len(self.returns) == 1:
            (only,) = self.returns
            returns = f"({only})" if only.type.startswith("(") else str(only)
        else:
            returns = f"({', '.join(map(str, self.returns))})"
        return f"({', '.join(parts)}) -> {returns}"

    @functools.cached_property
    def positional(self) -> tuple[Argument, ...]:
        return tuple(a for a in self.arguments if not a.kwarg_only)

    @functools.cached_property
    def keyword_only(self) -> tuple[Argument, ...]:
        return tuple(a for a in self.arguments if a.kwarg_only)

    @functools.cached_property
    def mutated(self) -> tuple[Argument, ...]:
        return tuple(a for a in self.arguments if a.is_written)

    @functools.cached_property
    def takes_tensors(self) -> bool:
        return any(a.holds_tensors for a in self.arguments)

    @functools.cached_property
    def keyword_only_tensors(self) -> tuple[Argument, ...]:
        return tuple(a for a in self.keyword_only if a.holds_tensors)

    @functools.cached_property
    def operands(self) -> tuple[Argument, ...]:
        """What rules have an entry for, gradients and batch dimensions: positional ones, then keyword-only tensors."""
        return (*self.positional, *self.keyword_only_tensors)

    @functools.cached_property
    def is_view(self) -> bool:
        return any(r.alias is not None and not r.alias.write for r in self.returns)

    @functools.cached_property
    def is_functional(self) -> bool:
        """Mutates nothing, returns something, and what it returns is fresh memory."""
        return bool(self.returns) and not self.mutated and not self.is_view

    @functools.cached_property
    def is_differentiable(self) -> bool:
        """Can it have a formula? Not if it neither returns nor writes, nor if it returns a view but a plain one."""
        if not self.is_view:
            return bool(self.returns or self.mutated)
        tensors_in = sum(a.is_tensor for a in self.arguments)
        return not self.mutated and tensors_in == 1 and sum(r.is_tensor for r in self.returns) == 1

    @functools.cached_property
    def device_argument(self) -> Argument | None:
        """The ``Device device`` argument that a factory function dispatches on."""
        return next((a for a in self.arguments if a.name == "device" and a.type == "Device"), None)


def check_nameless(text: str, op: str) -> None:
    """Raise SchemaError unless `text` starts with the arguments."""
    if not isinstance(text, str) or not text.lstrip().startswith("("):
        raise SchemaError(
            'expected schema to look like "(Tensor x) -> Tensor": the name is given already',
            op=op,
            got=brief(text, limit=500),
        )


def parse(text: str) -> Schema:
    """Parse ``(args) -> returns`` or ``name(args) -> returns``.

    Raises:
        SchemaError: torch's parser refuses the text.
    """
    named = text if not text.lstrip().startswith("(") else "op" + text
    try:
        parsed = _compat.parse_schema(named)
    except (RuntimeError, IndexError, UnicodeError) as error:
        raise SchemaError(
            f"the schema cannot be parsed: {_reason(error)}",
            got=repr(text),
            fix='a schema looks like "(Tensor x, float scale=1.0) -> Tensor"',
        ) from error
    return from_dispatcher(parsed)


def _reason(error: Exception) -> str:
    """What torch's parser found, and the word it points at."""
    if isinstance(error, IndexError):
        return "a number in it is out of range"
    if isinstance(error, UnicodeError):
        return "names must be ASCII"
    text = str(error).rpartition("please report a bug to PyTorch. ")[2]  # what an internal assert says after its own
    lines = [line for line in text.splitlines() if line.strip()]
    reason = lines[0].removesuffix(" here:").rstrip(" :") if lines else "syntax error"
    for line, below in itertools.pairwise(lines):
        if "<--- HERE" in below:
            return f"{reason} at {line[below.index('~') :][:20]!r}"
    return reason


def from_dispatcher(parsed: Any) -> Schema:
    """The `Schema` of torch's FunctionSchema object."""
    # torch's printed form is the only exact source of types (its type objects say `int` for SymInt).
    arguments_text, returns_text = _split_schema(str(parsed))
    if "..." in (*_split_commas(arguments_text), *_returns_of(returns_text)):
        raise SchemaError("a schema with ... is not supported", got=str(parsed), fix="write every argument out")
    types = [_type_of(part) for part in _split_commas(arguments_text) if part != "*"]
    arguments = tuple(
        Argument(
            *_split_alias(type_text),
            name=argument.name,
            default=_python_default(type_text, argument.default_value) if argument.has_default_value() else REQUIRED,
            kwarg_only=argument.kwarg_only,
        )
        for type_text, argument in zip(types, parsed.arguments, strict=True)
    )
    returns = [_split_alias(_type_of(part, named=bool(ret.name)))
               for part, ret in zip(_returns_of(returns_text), parsed.returns, strict=True)]  # fmt: skip
    return Schema(arguments, tuple(Return(*typed) for typed in returns))


def _split_schema(text: str) -> tuple[str, str]:
    """``name(ARGS) -> RETURNS`` -> (ARGS, RETURNS)."""
    start = text.index("(")
    end = next(i for i in _top_level(text, start) if text[i] == ")")
    return text[start + 1 : end], text[end + 1 :].removeprefix(" -> ")


def _returns_of(text: str) -> list[str]:
    return _split_commas(text[1:-1]) if text.startswith("(") else [text]


def _split_commas(text: str) -> list[str]:
    cuts = [-1, *(i for i in _top_level("(" + text, 0, shift=-1) if text[i : i + 1] == ","), len(text)]
    parts = [text[a + 1 : b].strip() for a, b in itertools.pairwise(cuts)]
    return [part for part in parts if part]


def _top_level(text: str, start: int, *, shift: int = 0) -> Iterator[int]:
    """Indices (plus `shift`) of commas directly inside the bracket at `start`, and of the bracket's end."""
    depth, quoted, i = 0, False, start
    while i < len(text):
        char = text[i]
        if quoted:
            i += char == "\\"  # skip the escaped character
            quoted = char != '"'
        elif char == '"':
            quoted = True
        elif char in "([":
            depth += 1
        elif char in ")]":
            depth -= 1
            if depth == 0:
                yield i + shift
                return
        elif char == "," and depth == 1:
            yield i + shift
        i += 1


def _type_of(part: str, *, named: bool = True) -> str:
    """``Tensor(a!)[] x=None`` -> ``Tensor(a!)[]``; the type may hold spaces only inside brackets."""
    if not named:
        return part
    depth = 0
    for i, char in enumerate(part):
        depth += (char in "([") - (char in ")]")
        if char == " " and depth == 0:
            return part[:i]
    return part


def _split_alias(type_text: str) -> tuple[str, Alias | None]:
    match = _ALIAS.match(type_text)
    if match is None:
        return type_text, None
    return match[1] + type_text[match.end() :], Alias.parse(match[2])


# Defaults -------------------------------------------------------------------------------------------------------

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
        return str(_compat.enum_to_number(value))  # the language has words for the first of each only
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, (list, tuple)) and _LIST_WITH_DEFAULT.fullmatch(type_):
        parts = [default_text(type_, item) for item in value]
        return None if None in parts else f"[{', '.join(map(str, parts))}]"
    return None


def _octal(char: str) -> str:
    return "".join(f"\\{byte:03o}" for byte in char.encode())


def _python_default(type_text: str, value: Any) -> Any:
    """A dispatcher default in the form in which kernels receive it: dtypes and devices as objects."""
    if isinstance(value, list):
        return tuple(_python_default(type_text, item) for item in value)
    base = type_text.split("[")[0].rstrip("?")
    if isinstance(value, int) and base == "ScalarType":
        return _compat.dtype_from_number(value)
    if isinstance(value, int) and base in ("Layout", "MemoryFormat"):
        return _compat.enum_from_number(base, value)
    # The dispatcher keeps these as the text has them: ``bool b=1``, ``float? f=1``, ``Device? d="cpu"``.
    convert = {"bool": bool, "float": float, "Device": torch.device}.get(base)
    return value if convert is None or value is None else convert(value)


# Tags -----------------------------------------------------------------------------------------------------------


def normalize_tags(tags: Tags) -> tuple[torch.Tag, ...]:
    """One tag, several or None -> a tuple without repetitions.

    Raises:
        DefinitionError: something is not a `torch.Tag`.
        TagError: both `Tag.inplace` and `Tag.out`.
    """
    given: Any = () if tags is None else tags
    given = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)
    for tag in given:
        if not isinstance(tag, torch.Tag):
            raise DefinitionError(
                "tags must be torch.Tag members",
                argument="tags",
                expected="a torch.Tag, or a list or tuple of them",
                got=brief(tag),
                fix="e.g. tags=torch.Tag.pointwise",
            )
    result = tuple(dict.fromkeys(given))
    if torch.Tag.inplace in result and torch.Tag.out in result:
        raise TagError("torch.Tag.inplace and torch.Tag.out are mutually exclusive", argument="tags")
    return result


def check_tags(schema: Schema, tags: tuple[torch.Tag, ...], **context: str) -> None:
    """Raise SchemaError unless `schema` has the shape its `Tag.inplace` or `Tag.out` promises."""
    problem = None
    if torch.Tag.inplace in tags:
        problem = _inplace_problem(schema)
    elif torch.Tag.out in tags:
        problem = _out_problem(schema)
    if problem:
        raise SchemaError(problem, got=str(schema), **context)


def _inplace_problem(schema: Schema) -> str | None:
    if not schema.positional:
        return "torch.Tag.inplace needs a positional argument of type Tensor to write to"
    first = schema.positional[0]
    if first.type != "Tensor":
        return f"torch.Tag.inplace: the first positional argument must be a Tensor, {first.name!r} is {first.type}"
    if schema.mutated != (first,):
        names = [a.name for a in schema.mutated]
        return f"torch.Tag.inplace: mutates_args must hold the first argument {first.name!r} alone, not {names}"
    if [r.type for r in schema.returns] != ["Tensor"] or schema.returns[0].alias != first.alias:
        return (
            f"torch.Tag.inplace: the one return must alias the first argument {first.name!r}: "
            "the return annotation is torch.Tensor, in a manual schema Tensor(a!)"
        )
    return None


def _out_problem(schema: Schema) -> str | None:
    outs = schema.mutated
    if not outs:
        return "torch.Tag.out needs at least one mutated argument: name it in mutates_args"
    for out in outs:
        if not out.kwarg_only:
            return f"torch.Tag.out: the mutated argument {out.name!r} must be keyword-only (after the *)"
        if out.type != "Tensor":
            return f"torch.Tag.out only supports Tensor outputs: {out.name!r} is {out.type}"
    if [r.type for r in schema.returns] != ["Tensor"] * len(outs) or [r.alias for r in schema.returns] != [
        a.alias for a in outs
    ]:
        names = ", ".join(a.name for a in outs)
        return (
            f"torch.Tag.out: the returns must be the mutated arguments ({names}) in order: the return annotation is "
            f"{'torch.Tensor' if len(outs) == 1 else 'a tuple of torch.Tensor, one each'}, each aliasing its argument"
        )
    return None
