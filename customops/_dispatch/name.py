"""Qualified names of ops."""

from __future__ import annotations

import keyword
import re
from typing import NamedTuple

from customops import _compat
from customops.errors import DefinitionError, brief, name_of

__tracebackhide__ = True  # pytest leaves the frames out


_IDENTIFIER = re.compile(r"[A-Za-z_]\w*", re.ASCII)

#: Namespaces that are torch's own.
RESERVED_NAMESPACES = frozenset({"aten", "at", "prim", "prims", "pytorch", "torch"})


class Name(NamedTuple):
    """``namespace::name`` or ``namespace::name.overload``."""

    namespace: str
    name: str
    overload: str = ""

    @classmethod
    def parse(cls, text: str) -> Name:
        """Split a qualified name.

        Raises:
            DefinitionError: it is not of the form ``namespace::name`` or ``namespace::name.overload``.
        """
        example = 'a name looks like "mylib::scale"'
        if callable(text):
            example = f'@custom_op("mylib::{name_of(text)}", mutates_args=())'
        if not isinstance(text, str):
            raise DefinitionError("the name of an op must be a string", got=brief(text), fix=example)
        words = _IDENTIFIER.findall(text)
        if 1 <= len(words) <= 2 and len(text) < 100:
            example = f'"{"::".join(["mylib", *words][-2:])}"'
        namespace, separator, rest = text.partition("::")
        name, dot, overload = rest.partition(".")
        parts = [namespace, name, overload] if dot else [namespace, name]
        if not separator:
            raise DefinitionError(
                "the name of an op needs a namespace", expected='"namespace::name"', got=brief(text), fix=example
            )
        for part in parts:
            if not _IDENTIFIER.fullmatch(part):
                raise DefinitionError(
                    f"{brief(part)} is not a valid part of an op name",
                    expected="namespace::name or namespace::name.overload, of letters, digits and _",
                    got=brief(text),
                    fix=example,
                )
        if overload == "default":
            raise DefinitionError(
                'the overload name "default" is taken: it stands for the overload without a name',
                got=brief(text),
                fix=f'"{namespace}::{name}"',
            )
        return cls(namespace, name, overload)

    def check_new(self) -> None:
        """Raise DefinitionError if no op can be defined by this name, or none that could be found by it.

        Graphs are Python source, with the names in it. And an op is an attribute in ``torch.ops``, beside others.
        """
        problem = None
        for part in self:
            if keyword.iskeyword(part) or not _compat.schemas.is_word_of_schema(part):
                problem = f"{part!r} is a keyword of Python or of schemas"
        if _compat.schemas.taken_by_torch(self):
            problem = f"{_compat.schemas.taken_by_torch(self)} is something else"
        if problem is not None:
            raise DefinitionError(f"an op cannot have this name: {problem}", op=str(self), fix="choose another name")

    @property
    def packet(self) -> str:
        """The name all overloads share."""
        return f"{self.namespace}::{self.name}"

    @property
    def local(self) -> str:
        """The name inside the namespace."""
        return f"{self.name}.{self.overload}" if self.overload else self.name

    def __str__(self) -> str:
        return f"{self.namespace}::{self.local}"


def own_name(text: str) -> Name:
    """The name for an op to be defined."""
    name = Name.parse(text)
    if name.namespace in RESERVED_NAMESPACES:
        raise DefinitionError(
            f"{name.namespace!r} is a reserved namespace of torch itself",
            got=brief(text),
            fix=f'use one of your own, e.g. "mylib::{name.name}"',
        )
    name.check_new()
    return name
