"""``customops stubs``: what `torch.ops` has of a module's ops, as a file for type checkers and editors."""

from __future__ import annotations

import argparse
import difflib
import keyword
import math
import re
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from customops._cli.screen import FAULTY, FINE, NOTHING
from customops._cli.targets import Op, TargetError, load
from customops._describe.description import doc_of
from customops._schema.model import Argument, Return
from customops._schema.parse import from_dispatcher
from customops._schema.structure import Codec, Leaf, SequenceCodec
from customops._schema.types import converted, item_type, row_of
from customops._torch.library import OpOverload, OpOverloadPacket

# Types and values, as source.

#: A default of which only is known that there is one.
UNKNOWN = "..."


def argument_type(argument: Argument, codec: Codec | None) -> str:
    """What can be given for an argument; `codec` says how the parameter that it is of travels."""
    while isinstance(codec, SequenceCodec):
        codec = codec.item
    choices = ", ".join(map(expression, codec.choices if codec is not None else ()))
    return _type(argument.type, f"Literal[{choices}]" if choices else row_of(argument.type).stub)


def return_type(returns: tuple[Return, ...]) -> str:
    types = [_type(each.type, None) for each in returns]
    return f"tuple[{', '.join(types)}]" if len(types) > 1 else types[0] if types else "None"


def _type(type_: str, given: str | None) -> str:
    """A type of the schema in Python: of an argument whose innermost type is `given`, or of a return."""
    if type_.endswith("?"):
        text = _type(type_[:-1], given)
        return text if text == "Any" else f"{text} | None"
    if type_.startswith("(") and type_.endswith(")") and "," not in type_:
        return f"tuple[{_type(type_[1:-1], given)}]"
    item = item_type(type_)
    if item is None:
        return given or row_of(type_).stub_return or row_of(type_).stub
    each = _type(item, given)
    if given is None:
        return f"list[{each}]"
    may_be_alone = row_of(type_).repeated and not type_.endswith("[]")
    return f"{each} | Sequence[{each}]" if may_be_alone else f"Sequence[{each}]"


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
    lines = [escaped(line).rstrip(" ") for line in text.split("\n")]
    for i, line in enumerate(lines):
        touching = ['"{3,}', *(['^"+'] if i == 0 else []), *(['"+$'] if len(lines) == 1 else [])]
        lines[i] = re.sub("|".join(touching), lambda quotes: '\\"' * len(quotes[0]), line)
    lines[0] = f'"""{lines[0]}'
    return [f'{lines[0]}"""'] if len(lines) == 1 else [*lines, '"""']


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


def stub_of(title: str, ops: Iterable[Op]) -> str:
    """The stub of some ops: for each a class with its overloads, of which each has a class whose call is typed."""
    known: dict[Any, Op] = {op._opoverload: op for op in ops}
    packets = {op._definition.name[:2]: overload.overloadpacket for overload, op in known.items()}
    taken = {"_Ops", "_Overload", "_Packet"}
    for (namespace, name), packet in packets.items():
        taken |= {namespace, name, *packet.overloads()}

    def unique(name: str) -> str:
        """A name for a class that no other class has, nor an attribute: in classes these would hide it."""
        while name in taken:
            name += "_"
        taken.add(name)
        return name

    classes: list[str] = []
    code: list[str] = []  # all types and defaults, to see what has to be imported
    namespaces: dict[str, list[str]] = {}
    overlaps = False
    for (namespace, name), packet in sorted(packets.items(), key=lambda item: item[0]):
        overloads = [Overload(each, known.get(each)) for each in (getattr(packet, o) for o in packet.overloads())]
        prefix = f"_{namespace}_{name}"
        of_packet, call, attributes = unique(prefix), "", []
        for each in overloads:
            cls = unique(f"{prefix}_{each.name}")
            call = unique(f"{cls}_call")
            classes += [class_(call, "", each.call()), class_(cls, f"({call}, _Overload)", [])]
            attributes += [] if keyword.iskeyword(each.name) else [f"{each.name}: {cls}"]
            code += each.signature()
        if len(overloads) > 1:
            overlaps, call = True, unique(f"{prefix}_call")
            classes.append(class_(call, "", [line for each in overloads for line in ("@overload", *each.call())]))
        classes.append(class_(of_packet, f"({call}, _Packet)", attributes))
        namespaces.setdefault(namespace, []).append(f"{name}: {of_packet}")
    named = {namespace: unique(f"_{namespace}") for namespace in namespaces}
    classes += [class_(named[namespace], "", attributes) for namespace, attributes in namespaces.items()]
    classes.append(class_("_Ops", "", [f"{namespace}: {cls}" for namespace, cls in named.items()]))

    used = set(re.findall(r"\w+", "\n".join(code)))
    typing = ["Any", *(["Literal"] if "Literal" in used else []), *(["overload"] if overlaps else [])]
    of_torch = [name for name in ("SymInt", "Tensor") if name in used]
    imports = ["from collections.abc import Sequence"] if "Sequence" in used else []
    imports += [f"from typing import {', '.join(typing)}", ""]
    imports += ["import torch"] if "torch" in used else []
    imports += [f"from torch import {', '.join(of_torch)}"] if of_torch else []
    imports += [f"from {OpOverload.__module__} import {OpOverload.__name__}, {OpOverloadPacket.__name__}"]
    head = _HEAD.format(title=title, options=_OVERLAP if overlaps else "")
    return "\n".join([head, *imports, _BASES, *classes, "ops: _Ops\n"])


def class_(name: str, bases: str, body: list[str]) -> str:
    return "\n".join([f"class {name}{bases}:", *indented(body), ""]) if body else f"class {name}{bases}: ...\n"


def indented(lines: Iterable[str]) -> list[str]:
    return [textwrap.indent(line, "    ") for line in lines]


class Overload:
    """An overload of an op: one schema. It may be of another library: then `op` is None."""

    def __init__(self, overload: Any, op: Op | None) -> None:
        self.name = overload.name().partition("::")[2].partition(".")[2] or "default"
        self.schema = from_dispatcher(overload._schema) if op is None else op.schema
        self.names = {argument.name for argument in self.schema.arguments}
        #: Name of an argument -> the part of a parameter that it is.
        self.leaves: dict[str, Leaf] = {}
        self.doc = ""
        if op is not None:
            spec = op._definition.spec
            self.doc = doc_of(spec.fn)
            parameters = spec.signature.parameters if spec.signature is not None else ()
            self.leaves = {leaf.name: leaf for parameter in parameters for leaf in parameter.node.leaves}
        if self.schema.mutated:
            written = f"Writes to {', '.join(argument.name for argument in self.schema.mutated)}."
            self.doc = f"{self.doc}\n\n{written}" if self.doc else written

    def call(self) -> list[str]:
        """The lines of its ``__call__``."""
        *start, end = self.signature()
        return [*start, f"{end}:", *indented(docstring(self.doc))] if self.doc else [*start, f"{end}: ..."]

    def signature(self) -> list[str]:
        """The lines up to the colon. An argument whose name is a keyword of Python is given by position only."""
        positional, named = self.schema.positional, self.schema.keyword_only
        lines = [f"{self.free('_self') if 'self' in self.names else 'self'},"]
        unnamed = [argument for argument in positional if _is_keyword(argument.name)]
        for argument in positional:
            lines.append(self.parameter(argument))
            if unnamed and argument is unnamed[-1]:
                lines.append("/,")
        typed = [argument for argument in named if not _is_keyword(argument.name)]
        lines += [*(["*,"] if typed else []), *map(self.parameter, typed)]
        if len(typed) < len(named):
            others = ", ".join(argument.name for argument in named if _is_keyword(argument.name))
            lines.append(f"**{self.free('kwargs')}: Any,  # {others}")
        return ["def __call__(", *indented(lines), f") -> {return_type(self.schema.returns)}"]

    def parameter(self, argument: Argument) -> str:
        leaf = self.leaves.get(argument.name)
        name = self.free(argument.name) if _is_keyword(argument.name) else argument.name
        text = f"{name}: {argument_type(argument, None if leaf is None else leaf.codec)}"
        if argument.has_default:
            text += f" = {expression(converted(row_of(argument.type).canonical_default, argument.default))}"
        return f"{text}," if leaf is None or leaf.path == leaf.name else f"{text},  # {leaf.path}"

    def free(self, name: str) -> str:
        """A name for a parameter that no other has."""
        while name in self.names or _is_keyword(name):
            name += "_"
        return name


def _is_keyword(name: str) -> bool:
    return keyword.iskeyword(name) or name == "__debug__"


# The command.

#: How many lines of a difference are shown.
_SHOWN = 12


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
        parser.error(f"the name of a stub must end in .pyi: -o {output.with_suffix('.pyi')}")
    loaded = load(options.module)
    ops = loaded.ops or loaded.imported
    if not ops:
        raise TargetError(f"{options.module} defines no op")
    text = stub_of(f"The ops of {loaded.module.__name__}, as torch.ops has them.", ops)
    if output is None:
        sys.stdout.write(text)
        return FINE
    if options.check:
        again = f"python -m customops stubs {options.module} -o {output}"
        if not output.is_file():
            print(f"{output} is not there; write it: {again}")
            return FAULTY
        old = output.read_text(encoding="utf-8")
        if old == text:
            return FINE
        print(f"{output} is stale; write it anew: {again}")
        lines = list(difflib.unified_diff(old.splitlines(), text.splitlines(), "there", "now", n=1, lineterm=""))
        print("\n".join(lines[:_SHOWN]))
        if lines[_SHOWN:]:
            print(f"... and {len(lines) - _SHOWN} lines more")
        return FAULTY
    try:
        output.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        print(f"error: {output} cannot be written: {error.strerror}", file=sys.stderr)
        return NOTHING
    module = output.with_suffix(".py")
    if not module.exists():
        print(f"note: Python itself imports {module}; write there: from torch import ops as ops", file=sys.stderr)
    return FINE
