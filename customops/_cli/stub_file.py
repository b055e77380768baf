"""The text of a stub: `torch.ops` with the classes of some ops, for type checkers and editors."""

from __future__ import annotations

import keyword
import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from customops import _compat
from customops._cli.stub_types import argument_type, default_of, docstring, return_type
from customops._compat.libraries import OpOverload, OpOverloadPacket
from customops._describe.description import doc_of
from customops._schema.model import Argument, Schema
from customops._schema.nodes import Leaf
from customops._schema.parse import from_dispatcher
from customops._targets import Op

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
            overloads = [Overload.of(each, known.get(each)) for each in _compat.libraries.overloads_of(packet)]
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
            text += f" = {default_of(argument)}"
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
