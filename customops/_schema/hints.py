"""Type hints as `nodes`: what the parameters and the return of a function are made of."""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, NoReturn, Union

import torch
import typing_extensions
from torch import Tensor

from customops._schema.advice import advice
from customops._schema.annotations import (
    Keys,
    Mutates,
    SameAs,
    annotated,
    code,
    may_be_absent,
    show,
    simplify,
    strip,
    union_members,
    union_of,
)
from customops._schema.model import REQUIRED
from customops._schema.structure import (
    AS_IT_IS,
    DEVICE,
    DTYPE,
    MAYBE_TENSOR,
    TEXT,
    DataclassForm,
    DictForm,
    Either,
    EnumCodec,
    Group,
    Leaf,
    LiteralCodec,
    Nested,
    Node,
    SequenceCodec,
    TupleForm,
)
from customops._schema.types import schema_type
from customops.errors import SchemaError

_SEQUENCES = (list, collections.abc.Sequence)
_NUMBERS: dict[Any, str] = {int: "SymInt", float: "float", bool: "bool", complex: "complex"}
#: What has no more than these members is a number of any type; a bool is an int to Python.
_ANY_NUMBER = {int, float, bool, complex}


@dataclasses.dataclass(frozen=True)
class HintReader:
    """Makes nodes of hints, for parameters or for the return of a function."""

    fail: Callable[..., NoReturn]
    #: Resolves an annotation, and raises for what is wrong with one.
    resolve: Callable[[Any], Any]
    returns: bool = False
    #: Are errors to say what to write instead?
    advises: bool = True
    #: The classes whose fields are read.
    inside: tuple[type, ...] = ()

    def node(self, hint: Any, name: str, path: str, default: Any = REQUIRED, written: Any = None) -> Node:
        """The node of a parameter, a return, or a part of one. `written` is for messages, if that is not the hint."""
        hint = self.resolve(hint)
        found = self._part(hint, name, path)
        if found is None:
            self.fail(
                f"{self._what(path)} has unsupported type {show(written or hint)}",
                fix=advice(hint, path.removeprefix("."), self.accepts, returns=self.returns) if self.advises else None,
            )
        return replace(found, default=default)

    def _part(self, hint: Any, name: str, path: str) -> Node | None:
        bare, metadata = strip(hint)
        metadata += tuple(_marks_of_items(bare))
        found = None if isinstance(bare, (list, dict, set)) else self._node(bare, metadata, name, path)
        return None if found is None else self._marked(found, metadata)

    def _what(self, path: str) -> str:
        return f"the return{path}" if self.returns else f"parameter {path}"

    def accepts(self, hint: Any) -> bool:
        """Is it a hint that works?"""

        def refuse(problem: str, **fields: Any) -> NoReturn:
            raise SchemaError(problem)

        try:
            HintReader(refuse, self.resolve, self.returns, advises=False, inside=self.inside).node(hint, "x", "x")
        except SchemaError:
            return False
        return True

    def _marked(self, node: Node, metadata: tuple[Any, ...]) -> Node:
        """The node with what its annotations say of it."""
        for item in metadata:
            if item is Mutates or isinstance(item, Mutates):
                if self.returns or not node.holds_tensors:
                    self.fail(
                        f"{self._what(node.path)} is annotated with Mut, which is for arguments with tensors",
                        fix="-> Tensor, and Mut[Tensor] for a parameter that the op writes to" if self.returns
                        else f"leave Mut out, or {node.path}: Mut[Tensor]",
                    )  # fmt: skip
                node = _written(node)
            elif isinstance(item, SameAs):
                if not (self.returns and isinstance(node, Leaf) and node.type == "Tensor"):
                    self.fail(
                        f"{self._what(node.path)}: SameAs({item.argument!r}) is for a returned Tensor",
                        fix=f'-> Annotated[Tensor, SameAs("{item.argument}")]',
                    )
                node = replace(node, same_as=item.argument)
            elif isinstance(item, Keys) and not (isinstance(node, Group) and isinstance(node.form, DictForm)):
                problem = f"{self._what(node.path)} is annotated with Keys, which is for a dict"
                self.fail(problem, fix=f"leave {item!r} out")
        return node

    def _node(self, hint: Any, metadata: tuple[Any, ...], name: str, path: str) -> Node | None:
        plain = schema_type(simplify(hint), returns=self.returns)
        if plain is not None:
            return Leaf(name, path, plain, SequenceCodec(list, item=DTYPE) if plain == "ScalarType[]" else AS_IT_IS)
        members = union_members(hint)
        if type(None) in members:
            return self._optional([each for each in members if each is not type(None)], name, path)
        if len(members) > 1:
            return None if self.returns else self._union(members, name, path)
        origin, items = typing.get_origin(hint), typing.get_args(hint)
        if origin is Literal:
            return None if self.returns else _literal(items, name, path)
        if origin is tuple:
            if len(items) == 2 and items[1] is Ellipsis:
                return self._list(items[0], tuple, name, path)
            if not items or items == ((),):
                return None
            kinds = {None if self.returns else _NUMBERS.get(simplify(item)) for item in items} - {"complex"}
            if len(kinds) == 1 and None not in kinds:
                return Leaf(name, path, f"{kinds.pop()}[{len(items)}]", SequenceCodec(tuple, len(items)))
            keys = tuple(map(str, range(len(items))))
            return self._group(TupleForm(tuple, keys), dict(zip(keys, items, strict=True)), {}, name, path)
        if origin in _SEQUENCES and len(items) == 1:
            return self._list(items[0], list, name, path)
        named = next((item for item in metadata if isinstance(item, Keys)), None)
        if named and origin in (dict, collections.abc.Mapping) and items and items[0] is str:
            form = DictForm(tuple(named), written=code(annotated(hint, [named])))
            return self._group(form, dict.fromkeys(named, items[1]), {}, name, path)
        return self._class(hint, name, path) if isinstance(hint, type) else None

    def _optional(self, members: list[Any], name: str, path: str) -> Node | None:
        inner = union_of(members) if members else None
        if self.returns:
            is_tensor = simplify(inner) in (Tensor, torch.nn.Parameter)
            return Leaf(name, path, "Tensor[]", MAYBE_TENSOR) if is_tensor else None
        node = self._part(inner, name, path) if members else None
        if isinstance(node, Group) and isinstance(node.form, DictForm) and node.form.absent:
            self.fail(
                f"{self._what(path)}: which keys are there could not be told from whether there is a dict",
                fix=f"{path}: {code(inner)}, which is empty in the place of None",
            )
        return None if node is None else node.optional()

    def _union(self, members: tuple[Any, ...], name: str, path: str) -> Node | None:
        plain = {simplify(member) for member in members}
        if plain <= _ANY_NUMBER:
            return Leaf(name, path, "Scalar")
        numbers = plain - {Tensor, torch.nn.Parameter}
        if numbers and numbers <= _ANY_NUMBER:
            type_ = _NUMBERS[numbers.pop()] if len(numbers) == 1 else "Scalar"
            tensor, number = Leaf(name, path, "Tensor?"), Leaf(f"{name}_number", path, f"{type_}?")
            return Either(name, path, tensor, number, may_be_none=False)
        if plain <= {torch.device, str, int} and torch.device in plain:
            return Leaf(name, path, "Device", DEVICE)
        if all(typing.get_origin(member) is Literal for member in members):
            return _literal(tuple(value for member in members for value in typing.get_args(member)), name, path)
        return None

    def _list(self, item: Any, container: type, name: str, path: str) -> Node | None:
        """A list, or a tuple of any length."""
        if self.returns:
            type_ = {Tensor: "Tensor[]", int: "SymInt[]"}.get(simplify(item))
            return None if type_ is None else Leaf(name, path, type_, SequenceCodec(container))
        plain = schema_type(list[simplify(item)])  # type: ignore[misc]
        if plain is not None:
            item_codec = DTYPE if plain == "ScalarType[]" else AS_IT_IS
            return Leaf(name, path, plain, SequenceCodec(container, item=item_codec))
        inner = self._part(self.resolve(item), name, path)
        if isinstance(inner, Leaf) and inner.type == "Tensor[]" and container is list:
            lengths = Leaf(f"{name}_lengths", f"the lengths of {path}", "SymInt[]", counts_tensors=True)
            return Nested(name, path, replace(inner, codec=AS_IT_IS), lengths)
        if not isinstance(inner, Leaf) or inner.type not in ("str", "int", "bool", "Device"):
            return None
        return Leaf(name, path, f"{inner.type}[]", SequenceCodec(container, item=inner.codec))

    def _class(self, cls: type, name: str, path: str) -> Node | None:
        if cls in self.inside:
            self.fail(
                f"{self._what(path)}: {cls.__name__} holds itself, and a schema has a number of arguments",
                fix=f"leave {path.removeprefix('.')} out of {cls.__name__}",
            )
        if cls is torch.Size:
            return Leaf(name, path, "SymInt[]", SequenceCodec(torch.Size))
        if cls is str and self.returns:
            return Leaf(name, path, "SymInt[]", TEXT)
        if issubclass(cls, enum.Enum) and len(cls) and not self.returns:
            codec = EnumCodec(cls)
            return Leaf(name, path, codec.schema_type, codec)
        reader = replace(self, inside=(*self.inside, cls))
        if dataclasses.is_dataclass(cls):
            return reader._dataclass(cls, name, path)
        if issubclass(cls, tuple) and hasattr(cls, "_fields"):
            hints, keys = self._hints_of(cls, path), tuple(cls._fields)
            if missing := [key for key in keys if key not in hints]:
                self.fail(
                    f"{self._what(path)} has unsupported type {show(cls)}: its field {missing[0]} has no type",
                    fix=f"class {cls.__name__}(NamedTuple): ..., with a type for each field",
                )
            fields, defaults = {key: hints[key] for key in keys}, cls._field_defaults  # type: ignore[attr-defined]
            return reader._group(TupleForm(cls, keys), fields, defaults, name, path)
        return reader._typed_dict(cls, name, path) if typing_extensions.is_typeddict(cls) else None

    def _group(self, form: Any, hints: Mapping[str, Any], defaults: Mapping[str, Any], name: str, path: str) -> Group:
        fields = {}
        for key, hint in hints.items():
            field_name = f"{name}_{key}" if name else key
            if not field_name.isidentifier() or not field_name.isascii():
                problem = f"{self._what(path)}: a key is no name of ASCII letters, digits and _"
                fix = f'"{re.sub(r"[^A-Za-z0-9_]+", "_", key).strip("_") or "a"}"'
                self.fail(problem, got=repr(key), fix=fix)
            fields[key] = self.node(hint, field_name, path + form.path(key), defaults.get(key, REQUIRED))
        return Group(name, path, form, fields)

    def _dataclass(self, cls: Any, name: str, path: str) -> Group:
        if not cls.__dataclass_params__.frozen and not self.returns:
            self.fail(
                f"{self._what(path)}: {cls.__name__} is a dataclass that can change, and what a kernel changed would "
                "be lost",
                fix=f"@dataclass(frozen=True) above {cls.__name__}",
            )
        fields, names = dataclasses.fields(cls), list(inspect.signature(cls).parameters)
        made_of = {each.name for each in fields if each.init}
        if set(names) != made_of:
            more = ", ".join(name for name in names if name not in made_of)
            self.fail(
                f"{self._what(path)}: {cls.__name__} is not made of its fields alone",
                got=f"{cls.__name__}{inspect.signature(cls)}",
                fix=f"{more or 'what __init__ takes'} as a field of {cls.__name__}, or as a parameter of the op",
            )
        defaults = {each.name: each.default for each in fields if each.default is not dataclasses.MISSING}
        for each in fields:
            if each.default_factory is not dataclasses.MISSING:
                defaults[each.name] = each.default_factory()
        hints = self._hints_of(cls, path)
        return self._group(DataclassForm(cls), {each.name: hints[each.name] for each in fields}, defaults, name, path)

    def _typed_dict(self, cls: Any, name: str, path: str) -> Group:
        hints = self._hints_of(cls, path)
        absent = frozenset(key for key, hint in hints.items() if may_be_absent(hint, key in cls.__optional_keys__))
        group = self._group(DictForm(tuple(hints), absent, cls.__name__), hints, {}, name, path)
        fields = dict(group.fields)
        for key in absent:
            if self.returns or type(None) in union_members(strip(hints[key])[0]):
                self.fail(
                    f"{self._what(path)}: whether the key {key!r} is there could not be told from None",
                    fix=f"{key}: Required[{code(hints[key])}]",
                )
            fields[key] = replace(fields[key].optional(), default=None)
        return replace(group, fields=fields)

    def _hints_of(self, cls: type, path: str) -> dict[str, Any]:
        try:
            return typing_extensions.get_type_hints(cls, include_extras=True)
        except Exception as error:
            problem = f"{self._what(path)}: the annotations of {cls.__name__} cannot be read"
            fix = f"import the names that they hold in the module of {cls.__name__}"
            self.fail(f"{problem}: {type(error).__name__}: {error}", fix=fix)


def _marks_of_items(hint: Any) -> Iterator[Any]:
    """The marks on a member of a union, or on the items of a list: they hold for the whole."""
    origin, items = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType, *_SEQUENCES) or (origin is tuple and items[-1:] == (...,)):
        for item in items:
            bare, metadata = strip(item)
            yield from (each for each in metadata if each is Mutates or isinstance(each, (Mutates, SameAs)))
            yield from _marks_of_items(bare)


def _written(node: Node) -> Node:
    """The node with all its tensors written."""
    if isinstance(node, Leaf):
        return replace(node, is_mutated=node.holds_tensors)
    if isinstance(node, Group):
        return replace(node, fields={key: _written(each) for key, each in node.fields.items()})
    if isinstance(node, Nested):
        return replace(node, tensors=replace(node.tensors, is_mutated=True))
    return replace(node, tensor=replace(node.tensor, is_mutated=True))


def _literal(values: tuple[Any, ...], name: str, path: str) -> Node | None:
    if not values or not all(type(value) in (str, int, bool) for value in values):
        return None
    codec = LiteralCodec(values)
    return Leaf(name, path, codec.schema_type, codec)
