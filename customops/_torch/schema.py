"""Schemas: torch's parser, the enums and special types in them, and the names an op may have."""

from __future__ import annotations

import functools
import importlib
import inspect
import keyword
import operator
import typing
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
from torch._library import opaque_object as _opaque
from torch._ops import OpOverload as OpOverload
from torch._ops import _OpNamespace

_C: Any = torch._C

__tracebackhide__ = True  # pytest leaves the frames out


#: Without: no op can be defined from a schema
#: Parses ``name(args) -> returns`` (RuntimeError on bad text).
parse_schema: Callable[[str], Any] = _C.parse_schema


@functools.cache
def dtypes_by_number() -> dict[int, torch.dtype]:
    """The dtypes by the numbers by which schemas hold them (6 -> torch.float32)."""
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    schemas = {dtype: f"f(ScalarType x={str(dtype).removeprefix('torch.')}) -> ()" for dtype in dtypes}
    return {_C.parse_schema(text).arguments[0].default_value: dtype for dtype, text in schemas.items()}


#: In the order of c10::Layout and c10::MemoryFormat.
_ENUMS = {
    "Layout": "strided sparse_coo sparse_csr _mkldnn sparse_csc sparse_bsr sparse_bsc jagged".split(),
    "MemoryFormat": "contiguous_format preserve_format channels_last channels_last_3d".split(),
}


#: The schema of an `OpOverload`, as torch holds it.
schema_of: Callable[[OpOverload], Any] = operator.attrgetter("_schema")


def enum_from(type_: str, value: Any) -> Any:
    """The torch.layout or torch.memory_format behind the number by which schemas hold it."""
    return getattr(torch, _ENUMS[type_][value]) if isinstance(value, int) else value


def enum_text(value: torch.layout | torch.memory_format) -> str:
    """One of them as that number: the schema language has words for the first of each only."""
    names = _ENUMS["Layout" if isinstance(value, torch.layout) else "MemoryFormat"]
    return str(names.index(str(value).removeprefix("torch.")))


def name_problem(name: tuple[str, str, str]) -> str | None:
    """Why no op can be defined by ``(namespace, name, overload)``, or found by it; None if one can.

    Graphs are Python source, with the names in it. And an op is an attribute in ``torch.ops``, beside others.
    """
    namespace, op, overload = name
    for part in name:
        if keyword.iskeyword(part) or not _is_word_of_schema(part):
            return f"{part!r} is a keyword of Python or of schemas"
    of_namespaces, of_packets = _attributes_in_ops()
    found = vars(torch.ops).get(namespace) or inspect.getattr_static(torch.ops, namespace, None)
    if found is not None and not isinstance(found, _OpNamespace):
        return f"torch.ops.{namespace} is something else"
    if op in of_namespaces:
        return f"torch.ops.{namespace}.{op} is something else"
    return f"torch.ops.{namespace}.{op}.{overload} is something else" if overload in of_packets else None


@functools.lru_cache(maxsize=64)
def _is_word_of_schema(part: str) -> bool:
    try:
        _C.parse_schema(f"{part or 'op'}() -> ()")
    except RuntimeError:
        return False
    return True


@functools.cache
def _attributes_in_ops() -> tuple[frozenset[str], frozenset[str]]:
    """Names that each namespace, and each packet of overloads, has as attributes of its own."""
    namespace, packet = _OpNamespace("_"), torch.ops.aten.sin
    of_packet = {*dir(type(packet)), *vars(packet)}.difference(packet.overloads())
    return frozenset({*dir(type(namespace)), *vars(namespace)}), frozenset(of_packet)


def defined_at(qualname: str) -> str:
    """``file:line`` of the registration that defined an op, as the dispatcher remembers it."""
    for line in _C._dispatch_dump(qualname).splitlines():
        if line.startswith("debug: "):
            return cast(str, line.removeprefix("debug: registered at "))
    return "<unknown>"


#: Without: classes of register_opaque_type are no parameter types
def opaque_type_name(annotation: Any, *, as_return: bool = False) -> str | None:
    """The schema name of a class made known through torch's `register_opaque_type`, or None."""
    annotation = typing.get_origin(annotation) or annotation
    if not isinstance(annotation, type):  # torch logs a warning for anything else
        return None
    # The older names log a deprecation on 2.15, the newer ones are not on 2.13.
    newer, older = ("is_custom_class", "is_opaque_type")
    if as_return:
        newer, older = ("is_opaque_symbolic_type", "is_opaque_reference_type")
    known = getattr(_opaque, newer, None) or getattr(_opaque, older)
    info = _opaque.get_opaque_obj_info(annotation) if known(annotation) else None
    return info.class_name if info is not None else None


#: The base that torch wants of a class whose objects are inputs of graphs.
OpaqueBase: Any = getattr(_opaque, "CustomClassBase", None) or getattr(_opaque, "OpaqueBase", object)


def register_opaque(cls: type) -> None:
    """Let objects of a class be arguments of ops, and in compiled code inputs that are guarded by their type alone."""
    if hasattr(_opaque, "register_custom_class"):  # the older name logs a deprecation where there is this one
        _opaque.register_custom_class(cls, typ="symbolic")
    else:
        _opaque.register_opaque_type(cls, typ="reference")


def group_name_type() -> Any | None:
    """torch.distributed's GroupName, or None where torch was built without distributed."""
    if not torch.distributed.is_available():
        return None
    return importlib.import_module("torch.distributed.distributed_c10d").GroupName


# Tags of ops, those among them that only newer versions of torch have -------------------------------------------------

_NAMES = ("inplace", "out")


class _LaterTag:
    """A tag that this torch does not have: customops goes by it, the dispatcher does not get it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<Tag.{self.name}>"

    def __str__(self) -> str:
        return f"Tag.{self.name}"

    def __reduce__(self) -> str:  # pickled by its name in this module, as `Tag` is
        return f"Tag.{self.name}"


class _Tags:
    """What stands for `torch.Tag` where that lacks some."""

    def __init__(self) -> None:
        for name in _NAMES:
            setattr(self, name, getattr(torch.Tag, name) if _is_here(name) else _LaterTag(name))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.Tag, name)

    def __reduce__(self) -> str:
        return "Tag"


def _is_here(name: str) -> bool:
    # not by hasattr: while customops is imported, what a newer torch lacks has a stand-in
    return isinstance(getattr(torch.Tag, name, None), torch.Tag)


if TYPE_CHECKING:
    Tag = torch.Tag
else:
    #: `torch.Tag`, with ``inplace`` and ``out`` on every torch.
    Tag = torch.Tag if all(map(_is_here, _NAMES)) else _Tags()


def is_tag(value: object) -> TypeGuard[torch.Tag]:
    """Is it a tag of torch, or one that stands for a tag of a newer torch?"""
    return isinstance(value, (torch.Tag, _LaterTag))


def for_dispatcher(tags: Iterable[Any]) -> tuple[torch.Tag, ...]:
    """The tags of an op that this torch knows. Before 2.13 inductor finds out variants by another tag."""
    known: dict[torch.Tag, None] = {}
    for tag in tags:
        if isinstance(tag, torch.Tag):
            known[tag] = None
        elif tag is Tag.out:
            known[torch.Tag.out_variant] = None
    return tuple(known)


def of_op(tags: Iterable[Any], overload: Any) -> list[torch.Tag]:
    """The tags that the dispatcher has of an op, and those of `tags` that it cannot have."""
    return [*overload.tags, *(tag for tag in tags if not isinstance(tag, torch.Tag))]
