"""Names of ops, and the overloads that users mean by them."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import torch

from customops import _torch
from customops._places import name_of
from customops._torch.library import OpOverload, OpOverloadPacket
from customops.errors import DefinitionError, RegistrationError, brief, did_you_mean

__tracebackhide__ = True  # pytest leaves the frames out


_IDENTIFIER = re.compile(r"[A-Za-z_]\w*", re.ASCII)
#: Namespaces that are torch's own.
RESERVED_NAMESPACES = frozenset({"aten", "at", "prim", "prims", "pytorch", "torch"})


class _Parts(NamedTuple):
    namespace: str
    name: str
    overload: str = ""


class Name(_Parts):
    """``namespace::name`` or ``namespace::name.overload``."""

    packet: str  #: the name all overloads share
    local: str  #: the name inside the namespace
    qualname: str

    def __new__(cls, namespace: str, name: str, overload: str = "") -> Name:
        self = super().__new__(cls, namespace, name, overload)
        self.packet = f"{namespace}::{name}"
        self.local = f"{name}.{overload}" if overload else name
        self.qualname = f"{namespace}::{self.local}"
        return self

    @classmethod
    def parse(cls, text: str) -> Name:
        """Split a qualified name, ``namespace::name`` or ``namespace::name.overload``."""
        example = 'a name looks like "mylib::scale"'
        if callable(text):
            example = f'@custom_op("mylib::{name_of(text)}", mutates_args=())'
        if not isinstance(text, str):
            raise DefinitionError("the name of an op must be a string", got=brief(text), fix=example)
        namespace, separator, rest = text.partition("::")
        name, dot, overload = rest.partition(".")
        parts = [namespace, name, overload] if dot else [namespace, name]
        if not separator or not all(map(_IDENTIFIER.fullmatch, parts)):
            words = _IDENTIFIER.findall(text)
            if 1 <= len(words) <= 2 and len(text) < 100:
                example = f'"{"::".join(["mylib", *words][-2:])}"'
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
        """Raise DefinitionError if no op of this name can be defined, or found in ``torch.ops``."""
        problem = _torch.schema.name_problem(self)
        if problem is not None:
            problem = f"an op cannot have this name: {problem}"
            raise DefinitionError(problem, op=self.qualname, fix="choose another name")

    def __str__(self) -> str:
        return self.qualname


def own_name(text: str) -> Name:
    """Return the checked name of an op that is to be defined."""
    name = Name.parse(text)
    if name.namespace in RESERVED_NAMESPACES:
        raise DefinitionError(
            f"{name.namespace!r} is a reserved namespace of torch itself",
            got=brief(text),
            fix=f'use one of your own, e.g. "mylib::{name.name}"',
        )
    name.check_new()
    return name


def exists(name: Name) -> bool:
    """Return whether an op of this name is defined."""
    return _torch.library.is_defined(name.packet, name.overload)


# The overload that a user means ---------------------------------------------------------------------------------------


def find_op(op: Any) -> OpOverload:
    """Return the overload for an OpOverload, a packet, a name, or torch's own CustomOpDef."""
    overload = getattr(op, "_opoverload", op)
    if isinstance(overload, OpOverload):
        return overload
    if isinstance(op, OpOverloadPacket):
        overloads = op.overloads()
        if len(overloads) != 1:
            raise RegistrationError(
                f"{op} has several overloads", got=", ".join(overloads), fix=f"e.g. {op}.{overloads[0]}"
            )
        return find_op(getattr(op, overloads[0]))
    if not isinstance(op, str):
        raise DefinitionError(
            "expected an operator", expected='a CustomOpDef, an OpOverload or "ns::name"', got=brief(op)
        )
    name = Name.parse(op.removesuffix(".default"))
    found = _torch.library.find_overload(name.packet, name.overload)
    if found is None:
        raise RegistrationError(
            "there is no such operator",
            op=op,
            fix=did_you_mean(op, (f"{name.namespace}::{each}" for each in vars(torch.ops).get(name.namespace, ())))
            or "define it first, or import the library that does; overloads are named ns::name.overload",
        )
    return found
