"""What compiled code depends on of ops, as a digest: by it, caches tell a definition from an earlier one.

Compilers trace through fakes and formulas, and what they find stays in the caches on disk under the name of the op. So
the keys of the graphs with our ops hold a digest of all such functions, `fingerprint`.

A function is taken apart into its bytecode, its constants and defaults, and what its closure and its globals hold for
the names that it uses, functions again in the same way. Equal digests mean equal behaviour as far as that goes. Where
it does not go (a tensor, a module, an open file), the digest of a function is a random one, of that object alone.
"""

from __future__ import annotations

import enum
import functools
import hashlib
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

#: Values that `repr` tells apart.
_PLAIN: tuple[type, ...] = (type(None), type(...), bool, int, float, complex, str, bytes, slice, range)
_PLAIN_OF_TORCH: tuple[type, ...] = (
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
    torch.Tag,
)

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
    sources = sorted(Path(__file__).parent.rglob("*.py"))
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

    def add(self, value: Any) -> None:
        if isinstance(value, (*_PLAIN, *_PLAIN_OF_TORCH)):
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
        if name is not None:
            self._text(name)
        elif isinstance(value, types.FunctionType):
            self._add_function(value)
        elif isinstance(value, types.CodeType):
            self._add_code(value)
        elif isinstance(value, (tuple, list)):
            self._all(type(value).__name__, value)
        elif isinstance(value, dict):
            self._all("dict", (item for pair in value.items() for item in pair))
        elif isinstance(value, (set, frozenset)):
            self._all("set", sorted(map(_of_value, value)))
        elif isinstance(value, functools.partial):
            self._all("partial", (value.func, value.args, value.keywords))
        elif isinstance(value, types.MethodType):
            self._all("method", (value.__func__, value.__self__))
        elif isinstance(value, (staticmethod, classmethod)):
            self._all(type(value).__name__, (value.__func__,))
        elif isinstance(value, property):
            self._all("property", (value.fget, value.fset, value.fdel))
        elif isinstance(value, types.CellType):
            self._all("cell", _contents(value))
        elif isinstance(value, type):
            self._add_class(value)
        else:
            self._add_object(value)

    def _add_function(self, function: types.FunctionType) -> None:
        self._text("function")
        self._all("defaults", function.__defaults__ or ())
        self.add(function.__kwdefaults__ or {})
        self._all("closure", function.__closure__ or ())
        self.add(function.__code__)
        for name in sorted(_names_in(function.__code__)):
            if name in function.__globals__:
                self._text(name)
                found = function.__globals__[name]
                self.add(found)
                if isinstance(found, types.ModuleType) and not _is_by_name(found.__name__):
                    self._add_attributes(found, function.__code__)

    def _add_attributes(self, module: types.ModuleType, code: types.CodeType) -> None:
        """What a function may use of a module that it names."""
        for name in sorted(_names_in(code)):
            if name in vars(module):
                self._text(f"{module.__name__}.{name}")
                self.add(vars(module)[name])

    def _add_code(self, code: types.CodeType) -> None:
        self._text(f"code {code.co_argcount} {code.co_posonlyargcount} {code.co_kwonlyargcount} {code.co_flags}")
        self.add(code.co_code)
        for names in (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars):
            self._all("names", names)
        self._all("constants", code.co_consts)

    def _add_class(self, cls: type) -> None:
        self._text(f"class {cls.__qualname__}")
        self._all("bases", cls.__bases__)
        methods = {name: member for name, member in vars(cls).items() if _is_of_class(name)}
        self.add(methods)

    def _add_object(self, value: Any) -> None:
        """An object of a class in Python, by its class and attributes."""
        state = getattr(value, "__dict__", None)
        if state is None or isinstance(value, (torch.Tensor, torch.nn.Module)) or _is_foreign(value):
            raise _Undigestible
        self.add(type(value))
        self.add(state)


def _is_foreign(value: Any) -> bool:
    """An object of a package that goes by name is more than its name; of ours, it is what it holds."""
    module = type(value).__module__
    return _is_by_name(module) and module.partition(".")[0] != "customops"


def _is_of_class(name: str) -> bool:
    """Does a name in a class say what it does?"""
    return name not in ("__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__firstlineno__")


def _contents(cell: types.CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # nothing is in it yet
        return ()


def _names_in(code: types.CodeType) -> set[str]:
    """The names that a function uses, those of functions inside it too."""
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return set(code.co_names).union(*map(_names_in, inner))


def _name_of(value: Any) -> str | None:
    """The name that stands for a value: an op, a logger, a module, or what is of a package in `_BY_NAME`."""
    if isinstance(value, types.ModuleType):
        return f"module {value.__name__}"
    if isinstance(value, (OpOverload, OpOverloadPacket)):
        return f"op {value}"
    if isinstance(value, logging.Logger):
        return f"logger {value.name}"
    if isinstance(value, enum.Enum):
        return f"enum {type(value).__qualname__} {value!r}"
    if hasattr(type(value), "_digest_key"):  # asked of the class: an object may answer to any name
        return f"op {value._digest_key}"
    if isinstance(value, types.FunctionType):
        module = value.__globals__.get("__name__", "")  # not `__module__`, which is "builtins" where there is none
    elif isinstance(value, (type, types.BuiltinFunctionType, types.MethodDescriptorType)):
        module = getattr(value, "__module__", None) or "builtins"
    else:
        return None
    return f"{type(value).__name__} {module} {value.__qualname__}" if _is_by_name(module) else None


def _is_by_name(module: str) -> bool:
    return module.partition(".")[0] in _BY_NAME


_compat.inductor.fingerprint_with(fingerprint)
