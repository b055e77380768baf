"""``customops stubs``: what `torch.ops` has of a module's ops, as a file for type checkers and editors."""

from __future__ import annotations

import argparse
import difflib
import keyword
import math
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from customops import _torch
from customops._cli.targets import Op, TargetError, defined, load
from customops._describe.description import doc_of
from customops._schema.model import Argument, Return, Schema
from customops._schema.parse import from_dispatcher
from customops._schema.structure import Codec, Leaf, SequenceCodec
from customops._schema.types import dispatched, item_type, row_of
from customops._torch.library import OpOverload, OpOverloadPacket

#: A default of which only is known that there is one.
UNKNOWN = "..."


def argument_type(argument: Argument, codec: Codec | None) -> str:
    """What can be given for an argument; `codec` says how the parameter that it is of travels."""
    choices = ", ".join(map(expression, _choices(codec)))
    return _argument_type(argument.type, f"Literal[{choices}]" if choices else row_of(argument.type).stub)


def _argument_type(type_: str, innermost: str) -> str:
    if type_.endswith("?"):
        return _optional(_argument_type(type_[:-1], innermost))
    item = item_type(type_)
    if item is None:
        return innermost
    each = _argument_type(item, innermost)
    alone = row_of(type_).repeated and not type_.endswith("[]")
    return f"{each} | Sequence[{each}]" if alone else f"Sequence[{each}]"


def return_type(returns: tuple[Return, ...]) -> str:
    types = [_return_type(each.type) for each in returns]
    if not types:
        return "None"
    return types[0] if len(types) == 1 else f"tuple[{', '.join(types)}]"


def _return_type(type_: str) -> str:
    if type_.endswith("?"):
        return _optional(_return_type(type_[:-1]))
    if type_.startswith("(") and type_.endswith(")") and "," not in type_:
        return f"tuple[{_return_type(type_[1:-1])}]"
    item = item_type(type_)
    if item is not None:
        return f"list[{_return_type(item)}]"
    return row_of(type_).stub_return or row_of(type_).stub


def _optional(text: str) -> str:
    return text if text == "Any" else f"{text} | None"


def _choices(codec: Codec | None) -> Iterable[Any]:
    if isinstance(codec, SequenceCodec):
        return _choices(codec.item)
    return () if codec is None else codec.choices


def expression(value: Any) -> str:
    """A value as Python source, in the form that formatters give it."""
    if isinstance(value, (list, tuple)):
        items = [expression(item) for item in value]
        if UNKNOWN in items:
            return UNKNOWN
        return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else f'float("{value}")'
    if isinstance(value, complex):
        return f"complex({expression(value.real)}, {expression(value.imag)})"
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, torch.device):
        return f'torch.device("{value}")'
    if isinstance(value, int) and not isinstance(value, bool):
        return str(int(value))
    if value is None or isinstance(value, (bool, torch.dtype, torch.layout, torch.memory_format)):
        return str(value)
    return UNKNOWN


def quoted(text: str) -> str:
    """A string as source: in the quotes of which it has fewer, double ones if it has as many."""
    quote = "'" if text.count('"') > text.count("'") else '"'
    return quote + escaped(text).replace(quote, "\\" + quote) + quote


def docstring(text: str) -> list[str]:
    """The lines of a docstring. Quotes are escaped where they would end it, or touch those that do."""
    first, *others = (escaped(line).rstrip(" ") for line in text.split("\n"))
    if not others:
        return ['"""' + re.sub('"{3,}|^"+|"+$', _escaped_quotes, first) + '"""']
    others = [re.sub('"{3,}', _escaped_quotes, line) for line in others]
    return ['"""' + re.sub('"{3,}|^"+', _escaped_quotes, first), *others, '"""']


def _escaped_quotes(quotes: re.Match[str]) -> str:
    return '\\"' * len(quotes[0])


def escaped(text: str) -> str:
    """Text without backslashes of its own, and without what cannot be printed."""
    return "".join(c if c.isprintable() and c != "\\" else c.encode("unicode_escape").decode() for c in text)


# The text of a stub: `torch.ops` with the classes of some ops.

_HEAD = '''\
# fmt: off
# ruff: noqa
{options}"""{title}

Written by `python -m customops stubs`. Do not edit.
"""
'''
#: Overloads may overlap: the first one that takes the arguments is called.
_OVERLAP = """\
# mypy: disable-error-code="overload-cannot-match, overload-overlap"
# pyright: reportOverlappingOverload=false
"""
#: torch gives any attribute of a packet the type of an overload, whose call takes anything.
_BASES = """
class _Overload(OpOverload[..., Any]): ...

class _Packet(OpOverloadPacket[..., Any]):
    __getattr__: None  # type: ignore[assignment, misc]  # there are no other overloads
"""


@dataclass
class StubFile:
    """The stub of some ops."""

    title: str
    taken: set[str] = field(default_factory=lambda: {"_Ops", "_Overload", "_Packet"})
    #: Namespace -> name of an op -> its class.
    namespaces: dict[str, dict[str, str]] = field(default_factory=dict)
    classes: list[str] = field(default_factory=list)
    #: All types and defaults, to see what has to be imported.
    code: list[str] = field(default_factory=list)
    overlaps: bool = False

    def text(self, ops: Iterable[Op]) -> str:
        known: dict[Any, Op] = {op._opoverload: op for op in ops}
        packets = {op._definition.name[:2]: overload.overloadpacket for overload, op in known.items()}
        for (namespace, name), packet in packets.items():
            self.taken |= {namespace, name, *packet.overloads()}
        for (namespace, name), packet in sorted(packets.items(), key=lambda item: item[0]):
            overloads = [Overload.of(each, known.get(each)) for each in _torch.library.overloads_of(packet)]
            cls = self.add_packet(f"_{namespace}_{name}", overloads)
            self.namespaces.setdefault(namespace, {})[name] = cls
        return "\n".join(self.parts())

    def parts(self) -> Iterator[str]:
        ops = {namespace: self.unique(f"_{namespace}") for namespace in self.namespaces}
        yield _HEAD.format(title=self.title, options=_OVERLAP if self.overlaps else "")
        yield self.imports() + _BASES
        yield from self.classes
        for namespace, classes in self.namespaces.items():
            yield class_(ops[namespace], "", [f"{name}: {cls}" for name, cls in classes.items()])
        yield class_("_Ops", "", [f"{namespace}: {cls}" for namespace, cls in ops.items()])
        yield "ops: _Ops\n"

    def add_packet(self, prefix: str, overloads: list[Overload]) -> str:
        """Add the classes of an op; returns the name of that which has its overloads."""
        packet, call = self.unique(prefix), ""
        attributes = []
        for each in overloads:
            cls = self.unique(f"{prefix}_{each.name}")
            call = self.unique(f"{cls}_call")
            self.classes.append(class_(call, "", each.call()))
            self.classes.append(class_(cls, f"({call}, _Overload)", []))
            attributes += [] if keyword.iskeyword(each.name) else [f"{each.name}: {cls}"]
            self.code += each.signature()
        if len(overloads) > 1:
            self.overlaps = True
            call = self.unique(f"{prefix}_call")
            self.classes.append(class_(call, "", [line for each in overloads for line in ("@overload", *each.call())]))
        self.classes.append(class_(packet, f"({call}, _Packet)", attributes))
        return packet

    def unique(self, name: str) -> str:
        """A name for a class that no other class has, nor an attribute: in classes these would hide it."""
        while name in self.taken:
            name += "_"
        self.taken.add(name)
        return name

    def imports(self) -> str:
        used = set(re.findall(r"\w+", "\n".join(self.code)))
        typing = ["Any", *(["Literal"] if "Literal" in used else []), *(["overload"] if self.overlaps else [])]
        torch = [name for name in ("SymInt", "Tensor") if name in used]
        lines = ["from collections.abc import Sequence"] if "Sequence" in used else []
        lines += [f"from typing import {', '.join(typing)}", ""]
        lines += ["import torch"] if "torch" in used else []
        lines += [f"from torch import {', '.join(torch)}"] if torch else []
        lines += [f"from {OpOverload.__module__} import {OpOverload.__name__}, {OpOverloadPacket.__name__}"]
        return "\n".join([*lines, ""])


def class_(name: str, bases: str, body: list[str]) -> str:
    if not body:
        return f"class {name}{bases}: ...\n"
    return "\n".join([f"class {name}{bases}:", *indented(body), ""])


def indented(lines: Iterable[str]) -> list[str]:
    return [textwrap.indent(line, "    ") for line in lines]


@dataclass(frozen=True)
class Overload:
    """An overload of an op: one schema."""

    name: str
    schema: Schema
    doc: str = ""
    #: Name of an argument -> the part of a parameter that it is.
    leaves: dict[str, Leaf] = field(default_factory=dict)

    @classmethod
    def of(cls, overload: Any, op: Op | None) -> Overload:
        """From the object in `torch.ops`, which may be of another library, and ours."""
        name = overload.name().partition("::")[2].partition(".")[2] or "default"
        if op is None:
            return cls(name, from_dispatcher(overload._schema))
        spec = op._definition.spec
        parameters = spec.signature.parameters if spec.signature is not None else ()
        leaves = {leaf.name: leaf for parameter in parameters for leaf in parameter.node.leaves}
        return cls(name, op.schema, doc_of(spec.fn), leaves)

    def call(self) -> list[str]:
        """The lines of its ``__call__``."""
        doc = indented(docstring(self.full_doc)) if self.full_doc else []
        *start, end = self.signature()
        return [*start, f"{end}:", *doc] if doc else [*start, f"{end}: ..."]

    def signature(self) -> list[str]:
        receiver = self.free("_self") if "self" in self.names else "self"
        result = return_type(self.schema.returns)
        return ["def __call__(", *indented([f"{receiver},", *self.parameters()]), f") -> {result}"]

    def parameters(self) -> Iterator[str]:
        """A line for each. One whose name is a keyword of Python, as ``from``, can be given by its position only."""
        unnamed = [a for a in self.schema.positional if _is_keyword(a.name)]
        for argument in self.schema.positional:
            yield self.parameter(argument)
            if unnamed and argument is unnamed[-1]:
                yield "/,"
        named = [a for a in self.schema.keyword_only if not _is_keyword(a.name)]
        yield from ["*,"] if named else []
        yield from map(self.parameter, named)
        if len(named) < len(self.schema.keyword_only):
            others = ", ".join(a.name for a in self.schema.keyword_only if _is_keyword(a.name))
            yield f"**{self.free('kwargs')}: Any,  # {others}"

    def parameter(self, argument: Argument) -> str:
        leaf = self.leaves.get(argument.name)
        name = self.free(argument.name) if _is_keyword(argument.name) else argument.name
        text = f"{name}: {argument_type(argument, None if leaf is None else leaf.codec)}"
        if argument.has_default:
            text += f" = {expression(dispatched(argument.type, argument.default))}"
        return f"{text}," if leaf is None or leaf.path == leaf.name else f"{text},  # {leaf.path}"

    @property
    def names(self) -> set[str]:
        return {a.name for a in self.schema.arguments}

    def free(self, name: str) -> str:
        """A name for a parameter that no other has."""
        while name in self.names or _is_keyword(name):
            name += "_"
        return name

    @property
    def full_doc(self) -> str:
        written = ", ".join(argument.name for argument in self.schema.mutated)
        return "\n\n".join(part for part in (self.doc, written and f"Writes to {written}.") if part)


def _is_keyword(name: str) -> bool:
    return keyword.iskeyword(name) or name == "__debug__"


#: Exit statuses.
UP_TO_DATE, STALE, NOTHING_WRITTEN = 0, 1, 2
#: How many lines of a difference are printed.
_LINES = 12


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "stubs",
        help="write a .pyi file for the ops of a module in torch.ops",
        description="Import MODULE and write a stub: torch.ops with the ops that MODULE defines (or, if it defines "
        "none, those that importing it defined), as type checkers and editors read it.",
        epilog="Exit status: 0 if the file was written or is up to date, 1 if --check finds it stale, 2 if MODULE "
        "cannot be imported or brings no op.",
    )
    parser.add_argument("module", metavar="MODULE", help="the name of a module or package, or a Python file")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="e.g. mylib/torch_ops.pyi; default: stdout")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if FILE is not what would be written")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    output: Path | None = options.output
    if options.check and output is None:
        parser.error("--check needs the file to compare: -o FILE")
    if output is not None and output.suffix != ".pyi":
        parser.error(f"a stub ends in .pyi: -o {output.with_suffix('.pyi')}")
    loaded = load(options.module)
    ops = loaded.ops or defined(loaded.imported)
    if not ops:
        raise TargetError(f"{options.module} defines no op")
    text = StubFile(f"The ops of {loaded.module.__name__}, as torch.ops has them.").text(ops)
    if output is None:
        sys.stdout.write(text)
        return UP_TO_DATE
    return _compare(output, text, options.module) if options.check else _write(output, text)


def _write(output: Path, text: str) -> int:
    try:
        output.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        print(f"error: {output} cannot be written: {error.strerror}", file=sys.stderr)
        return NOTHING_WRITTEN
    if not output.with_suffix(".py").exists():
        module = output.with_suffix(".py")
        print(f"note: Python itself imports {module}; write there: from torch import ops as ops", file=sys.stderr)
    return UP_TO_DATE


def _compare(output: Path, text: str, module: str) -> int:
    again = f"python -m customops stubs {module} -o {output}"
    if not output.is_file():
        print(f"{output} is not there; write it: {again}")
        return STALE
    old = output.read_text(encoding="utf-8")
    if old == text:
        return UP_TO_DATE
    print(f"{output} is stale; write it anew: {again}")
    lines = list(difflib.unified_diff(old.splitlines(), text.splitlines(), "there", "now", n=1, lineterm=""))
    print("\n".join(lines[:_LINES]))
    if lines[_LINES:]:
        print(f"... and {len(lines) - _LINES} lines more")
    return STALE
