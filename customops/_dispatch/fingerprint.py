"""What compiled code depends on of ops, as a digest: by it, caches tell a definition from an earlier one.

Compilers trace through fakes and formulas, and what they find stays in the caches on disk under the name of the op. So
the keys of the graphs with our ops hold a digest of all such functions, `fingerprint`.

A function is taken apart into its bytecode, its constants and defaults, and what its closure and its globals hold for
the names that it uses, functions again in the same way. Equal digests mean equal behaviour as far as that goes. Where
it does not go (a tensor, a module, an open file), the digest of a function is a random one, of that object alone.
"""

from __future__ import annotations

import collections
import dis
import enum
import functools
import hashlib
import importlib.util
import logging
import os
import sys
import types
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import torch

from customops import _compat
from customops._compat.libraries import OpOverload, OpOverloadPacket

#: Packages whose functions and classes go by their names: they change with their version alone, or never.
_BY_NAME = {"torch", "numpy", "triton", "customops", "typing_extensions", *sys.stdlib_module_names} - {"test"}

#: Types of values that `repr` tells apart.
_PLAIN = {type(None), type(...), bool, int, float, complex, str, bytes, slice, range}
_PLAIN_OF_TORCH: tuple[type, ...] = (
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
    torch.Tag,
)

#: Types whose objects are taken apart here; objects of their subclasses have a class and attributes besides.
_BUILT_IN: tuple[type, ...] = (tuple, list, dict, set, frozenset, float, int, complex, str, bytes)

#: Names by which a function may come to anything.
_ANYTHING = {"globals", "locals", "eval", "exec", "environ", "getenv", "import_module", "__import__"}

#: The size of an object that has nothing but attributes; one of a class written in C is larger.
_PYTHON_SIZE = type("_", (), {}).__basicsize__
_SLOT_SIZE = tuple.__itemsize__  # of a pointer

#: What the class of an object with slots has for them: their names say it all.
_SLOTS = (types.MemberDescriptorType, types.GetSetDescriptorType)
_TUPLE_GETTER = type(collections.namedtuple("_", "a").a)  # type: ignore[attr-defined]

#: So many values are looked at before a function is taken for one that cannot be digested.
_MOST = 20_000


class Op(Protocol):
    """What is to be known of an op."""

    def _names_in_graphs(self) -> tuple[str, ...]: ...
    def _traced(self) -> Iterable[Any]: ...


#: All ops that there are.
ops: weakref.WeakSet[Op] = weakref.WeakSet()


def fingerprint(names: set[str]) -> str | None:
    """The digest of what all our ops are to compilers, or None if none of them is in `names`.

    Of all, because a formula may call any other op.
    """
    living = [(op, found) for op in list(ops) if (found := op._names_in_graphs())]
    if names.isdisjoint(name for _, found in living for name in found):
        return None
    parts = sorted(f"{found} {of_values(op._traced())}" for op, found in living)
    return hashlib.sha256("".join([_package(), *parts]).encode()).hexdigest()


@functools.cache
def _package() -> str:
    """The digest of this package: another version of it may trace other graphs."""
    sources = sorted(Path(__file__).parents[1].rglob("*.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()


class _Undigestible(Exception):
    """A value of which it is not known whether it is the same in another process."""


def of_values(values: Iterable[Any]) -> str:
    """One digest for functions and other values, in their order."""
    return hashlib.sha256("".join(map(_of_value, values)).encode()).hexdigest()


def _of_value(value: Any) -> str:
    walk = _Walk()
    try:
        walk.add(value)
    except _Undigestible:
        return _nonce(value)
    return walk.hash.hexdigest()


_nonces: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def _nonce(value: Any) -> str:
    """A digest that nothing else has, here or in another process."""
    try:
        return _nonces.setdefault(value, os.urandom(16).hex())
    except TypeError:  # no weak references to it: never the same again
        return os.urandom(16).hex()


class _Walk:
    """Adds values to a hash, each once."""

    def __init__(self) -> None:
        self.hash = hashlib.sha256()
        self.seen: dict[int, int] = {}
        self.kept: list[Any] = []  # an id is one of a living object
        self.used: set[tuple[int, frozenset[str]]] = set()  # modules, by the names that are used of them

    def add(self, value: Any) -> None:
        if type(value) in _PLAIN:
            self._text(f"{type(value).__name__} {value!r}")
            return
        if id(value) in self.seen:
            self._text(f"again {self.seen[id(value)]}")
            return
        if len(self.kept) > _MOST:
            raise _Undigestible
        self.seen[id(value)] = len(self.kept)
        self.kept.append(value)
        self._add_new(value)

    def _text(self, text: str) -> None:
        self.hash.update(f"{len(text)}:{text}".encode("utf-8", "surrogatepass"))

    def _all(self, kind: str, values: Iterable[Any]) -> None:
        values = list(values)
        self._text(f"{kind} {len(values)}")
        for value in values:
            self.add(value)

    def _add_new(self, value: Any) -> None:
        name = _name_of(value)
        parts = _compat.triton.parts_of(value)
        if parts is not None:
            self._all("triton kernel", parts)
        elif name is not None:
            self._text(name)
        elif isinstance(value, types.FunctionType):
            self._add_function(value)
        elif isinstance(value, types.CodeType):
            self._add_code(value)
        elif isinstance(value, functools.partial):
            self._all("partial", (value.func, value.args, value.keywords))
        elif isinstance(value, types.MethodType):
            self._all("method", (value.__func__, value.__self__))
        elif isinstance(value, types.BuiltinMethodType):  # of an object: of modules and classes they go by name
            self._all(f"method {value.__name__}", (value.__self__,))
        elif isinstance(value, (staticmethod, classmethod)):
            self._all(type(value).__name__, (value.__func__,))
        elif isinstance(value, property):
            self._all("property", (value.fget, value.fset, value.fdel))
        elif isinstance(value, types.CellType):
            self._all("cell", _contents(value))
        elif isinstance(value, types.MappingProxyType):
            self.add(dict(value))
        elif isinstance(value, _SLOTS):
            self._text(f"slot {value.__name__}")
        elif isinstance(value, type):
            self._add_class(value)
        elif isinstance(value, enum.Enum):
            self._text(f"enum {value!r}")
            self.add(type(value))
        elif isinstance(value, _BUILT_IN):
            self._add_built_in(value)
        else:
            self._add_object(value)

    def _add_built_in(self, value: Any) -> None:
        """A tuple, dict, number, ...; or an object of a subclass of one, which is of more than its elements."""
        if isinstance(value, (tuple, list)):
            self._all("items", value)
        elif isinstance(value, dict):
            self._all("dict", (item for pair in value.items() for item in pair))
        elif isinstance(value, (set, frozenset)):
            self._all("set", sorted(map(_of_value, value)))
        else:
            base: Any = next(cls for cls in _BUILT_IN if isinstance(value, cls))
            self._text(base.__repr__(value))
        if type(value) not in _BUILT_IN:
            self.add(type(value))
            self.add(getattr(value, "__dict__", {}))
            self.add(getattr(value, "default_factory", None))  # of a defaultdict
        else:
            self._text(type(value).__name__)

    def _add_function(self, function: types.FunctionType) -> None:
        """A function; of a package in `_BY_NAME`, by its name and what is put into it: decorators hold functions."""
        name = _name_of_function(function)
        names = _names_in(function.__code__)
        self._text(name or "function")
        for kind, values in (
            ("defaults", function.__defaults__ or ()),
            ("keyword-only defaults", [item for pair in (function.__kwdefaults__ or {}).items() for item in pair]),
            ("closure", [each for cell in function.__closure__ or () for each in _contents(cell)]),
        ):
            self._text(f"{kind} {len(values)}")
            for value in values:
                self._add_used(value, names)
        self.add(function.__dict__)
        if name is None:
            self.add(function.__code__)
            self._add_globals(function, names)

    def _add_globals(self, function: types.FunctionType, names: set[str]) -> None:
        """What a function finds by name: globals, and what it imports when it is called."""
        if not names.isdisjoint(_ANYTHING):
            raise _Undigestible
        for name in sorted(names & function.__globals__.keys()):
            self._text(name)
            self._add_used(function.__globals__[name], names)
        for name in sorted(_imported_in(function.__code__, function.__globals__)):
            if name not in sys.modules:
                raise _Undigestible
            self._text(name)
            self._add_used(sys.modules[name], names)

    def _add_used(self, value: Any, names: set[str]) -> None:
        """A value, or what a function that uses these names may use of a module."""
        if not isinstance(value, types.ModuleType) or _is_by_name(value.__name__):
            self.add(value)
            return
        self._text(f"module {value.__name__}")
        used = id(value), frozenset(names)
        if used not in self.used:  # modules may hold each other
            self.used.add(used)
            for name in sorted(names & vars(value).keys()):
                self._text(f"{value.__name__}.{name}")
                self._add_used(vars(value)[name], names)

    def _add_code(self, code: types.CodeType) -> None:
        self._text(f"code {code.co_argcount} {code.co_posonlyargcount} {code.co_kwonlyargcount} {code.co_flags}")
        self.add(code.co_code)
        for names in (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars):
            self._all("names", names)
        self._all("constants", code.co_consts)

    def _add_class(self, cls: type) -> None:
        self._text(f"class {cls.__qualname__}")
        self._all("bases", (type(cls), *cls.__bases__))
        self.add({name: member for name, member in vars(cls).items() if _is_of_class(name)})

    def _add_object(self, value: Any) -> None:
        """An object of a class in Python, by its class and attributes."""
        state = _state_of(value)
        if state is None or isinstance(value, (torch.Tensor, torch.nn.Module)):
            raise _Undigestible
        self.add(type(value))
        self.add(state)


def _state_of(value: Any) -> dict[str, Any] | None:
    """The attributes of an object, or None if there may be more to it: its class, or a base, is written in C."""
    cls = type(value)
    if cls is _TUPLE_GETTER:
        return {"index": value.__reduce__()[1][0]}
    slots = [name for base in cls.__mro__ for name in _slots_of(base)]
    attributes = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    by_attributes = hasattr(value, "__dict__") or bool(attributes)
    is_ours = cls.__module__.partition(".")[0] == "customops"
    is_small = cls.__basicsize__ <= _PYTHON_SIZE + len(slots) * _SLOT_SIZE
    if not by_attributes or not (is_ours or is_small or not _is_by_name(cls.__module__)):
        return None
    return {**getattr(value, "__dict__", {}), **attributes}


def _slots_of(cls: type) -> Iterable[str]:
    slots = vars(cls).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else slots
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _is_of_class(name: str) -> bool:
    """Does a name in a class say what it does?"""
    return name not in _NOT_OF_CLASS


_NOT_OF_CLASS = frozenset(
    """__dict__ __weakref__ __doc__ __module__ __annotations__ __annotations_cache__ __annotate__ __annotate_func__
    __firstlineno__ __static_attributes__ __orig_bases__""".split()
)


def _contents(cell: types.CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # nothing is in it yet
        return ()


def _names_in(code: types.CodeType) -> set[str]:
    """The names that a function uses, those of functions inside it too."""
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return set(code.co_names).union(*map(_names_in, inner))


def _imported_in(code: types.CodeType, namespace: dict[str, Any]) -> set[str]:
    """The modules that a function imports when it is called, those of functions inside it too."""
    found = set()
    instructions = list(dis.get_instructions(code))
    for i, instruction in enumerate(instructions):
        if instruction.opname == "IMPORT_NAME":  # on the stack: how many packages up, and the names wanted of it
            dots = "." * instructions[i - 2].argval
            package = namespace.get("__package__") or namespace.get("__name__", "").rpartition(".")[0]
            found.add(importlib.util.resolve_name(dots + instruction.argval, package) if dots else instruction.argval)
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return found.union(*(_imported_in(each, namespace) for each in inner))


def _name_of(value: Any) -> str | None:
    """The name that stands for a value: an op, a logger, or a module, class or built-in of a package in `_BY_NAME`."""
    if isinstance(value, types.ModuleType):
        if not _is_by_name(value.__name__):
            raise _Undigestible  # nothing says what of it is used
        return f"module {value.__name__}"
    if isinstance(value, (OpOverload, OpOverloadPacket)):
        return f"op {value}"
    if isinstance(value, logging.Logger):
        return f"logger {value.name}"
    if isinstance(value, _PLAIN_OF_TORCH):
        return f"{type(value).__name__} {value!r}"
    if hasattr(type(value), "_digest_key"):  # asked of the class: an object may answer to any name
        return f"op {value._digest_key}"
    if isinstance(value, types.BuiltinFunctionType):
        of = value.__self__
        if of is not None and not isinstance(of, (types.ModuleType, type)):
            return None
    elif not isinstance(value, (type, types.MethodDescriptorType, types.WrapperDescriptorType)):
        return None
    module = getattr(value, "__module__", None) or "builtins"
    return f"{type(value).__name__} {module} {value.__qualname__}" if _is_by_name(module) else None


def _name_of_function(function: types.FunctionType) -> str | None:
    """The name of a function of a package in `_BY_NAME`."""
    module = function.__globals__.get("__name__", "")  # not `__module__`, which is the wrapped function's
    return f"function {module} {function.__code__.co_name}" if _is_by_name(module) else None


def _is_by_name(module: str) -> bool:
    return module.partition(".")[0] in _BY_NAME


_compat.inductor.fingerprint_with(fingerprint)
