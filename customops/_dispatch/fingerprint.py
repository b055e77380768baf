"""What compiled code depends on of ops, as a digest: by it, caches tell a definition from an earlier one.

Compilers trace through fakes and formulas, and what they find stays in the caches on disk under the name of the op. So
the keys of the graphs with our ops hold a digest of all such functions, `fingerprint`.

A function is taken apart into its bytecode, its constants and defaults, and what its closure and its globals hold for
the names that it uses, functions again in the same way; of a module, what the function looks up there, by its value.
Equal digests mean equal behaviour as far as that goes. Where it does not go (a tensor, an open file, a module that is
used as a whole), the digest is random, another one each time: no cache has such a graph. The caches are not bypassed,
because ``standalone_compile`` can then save nothing.
"""

from __future__ import annotations

import collections
import dis
import enum
import functools
import hashlib
import importlib.util
import logging
import operator
import os
import re
import sys
import types
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from customops import _torch
from customops._torch.library import OpOverload, OpOverloadPacket

#: Packages whose functions and classes go by their names: they change with their version alone, or never.
_BY_NAME = {"torch", "numpy", "triton", "customops", "typing_extensions", *sys.stdlib_module_names} - {"test"}
#: Types of values that `repr` tells apart.
_PLAIN = {type(None), type(...), bool, int, float, complex, str, bytes, slice, range}
_PLAIN_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, torch.Tag)
#: Types whose objects are taken apart here; objects of their subclasses have a class and attributes besides.
_CONTAINERS: tuple[type, ...] = (tuple, list, dict, set, frozenset)
_BUILT_IN: tuple[type, ...] = (*_CONTAINERS, float, int, complex, str, bytes)

#: Names by which a function may come to anything.
_ANYTHING = frozenset(
    """globals locals eval exec environ getenv import_module __import__ _getframe currentframe f_globals f_locals
    __globals__ __builtins__ getmodule""".split()
)

#: What a named tuple has for each of its fields.
_TUPLE_GETTER = type(collections.namedtuple("_", "a").a)  # type: ignore[attr-defined]
#: So many values are looked at before a function is taken for one that cannot be digested.
_MOST = 20_000


#: All ops that there are: objects of `_op` with ``_names_in_graphs()``, and ``_traced()``, what is to be known of them.
ops: weakref.WeakSet[Any] = weakref.WeakSet()


def fingerprint(names: set[str]) -> str | None:
    """The digest of what all our ops are to compilers, or None if none of them is in `names`.

    Of all, because a formula may call any other op.
    """
    living = [(op, found) for op in list(ops) if (found := op._names_in_graphs())]
    if names.isdisjoint(name for _, found in living for name in found):
        return None
    walk = _Walk()  # one for all ops: what many of them use is taken apart once
    walk._text(_package())
    for op, found in sorted(living, key=operator.itemgetter(1)):
        walk._text(str(found))
        for value in op._traced():
            walk.add_or_log(value, of=found[0])
    return walk.hash.hexdigest()


@functools.cache
def _package() -> str:
    """The digest of this package: another version of it may trace other graphs."""
    sources = sorted(Path(__file__).parents[1].rglob("*.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()


class _Undigestible(Exception):
    """A value of which it is not known whether it is the same in another process."""


log = logging.getLogger("customops")
#: What was logged.
_told: set[str] = set()


def of_values(values: Iterable[Any], of: str = "a function") -> str:
    """One digest for functions and other values, in their order. `of`: the op, for the log."""
    walk = _Walk()
    for value in values:
        walk.add_or_log(value, of)
    return walk.hash.hexdigest()


class _Walk:
    """Adds values to a hash, each once."""

    def __init__(self) -> None:
        self.hash = hashlib.sha256()
        self.seen: dict[int, int] = {}
        self.kept: list[Any] = []  # an id is one of a living object
        self.used: set[tuple[int, str, int]] = set()  # modules, by their names and the functions that use them
        self.function: types.FunctionType | None = None  # the innermost that is taken apart
        self.most = _MOST  # so many of `kept` are looked at

    def add_or_log(self, value: Any, of: str) -> None:
        """Add a value, or what is another each time if it cannot be digested, which is logged once."""
        self.most = len(self.kept) + _MOST
        try:
            self.add(value)
        except _Undigestible as reason:
            code, self.function = self.function and self.function.__code__, None
            where = f"{code.co_filename}:{code.co_firstlineno}: " if code else ""
            text = f"{of}: the caches on disk keep no graph with ops of customops: {where}{reason}"
            if text not in _told:
                _told.add(text)
                log.debug(text)
            self._text(os.urandom(16).hex())

    def add(self, value: Any) -> None:
        if type(value) in _PLAIN:
            self._text(f"{type(value).__name__} {value!r}")
            return
        if id(value) in self.seen:
            self._text(f"again {self.seen[id(value)]}")
            return
        if len(self.kept) > self.most:
            raise _Undigestible(f"it reaches more than {_MOST} values")
        if value is sys.modules:
            raise _Undigestible("sys.modules may be used")
        self.seen[id(value)] = len(self.kept)
        self.kept.append(value)
        if type(value) in _CONTAINERS:
            self._add_built_in(value)
            return
        name, parts = _name_of(value), _torch.dynamo.parts_of(value)
        if parts is not None:
            self._all("triton kernel", parts)
        elif name is not None:
            self._text(name)
        elif isinstance(value, types.FunctionType):
            self._add_function(value)
        elif isinstance(value, types.CodeType):
            self._text(_of_code(value))
        elif (taken_apart := next((each for each in _TAKEN_APART if isinstance(value, each[0])), None)) is not None:
            self._all(taken_apart[1], taken_apart[2](value))
        elif isinstance(value, (types.MemberDescriptorType, types.GetSetDescriptorType)):  # of a class with slots
            self._text(f"slot {value.__name__}")
        elif isinstance(value, type):
            self._text(f"class {value.__qualname__}")
            self._all("bases", (type(value), *value.__bases__))
            self.add({name: member for name, member in vars(value).items() if name not in _NOT_OF_CLASS})
        elif isinstance(value, enum.Enum):
            self._text(f"enum {value!r}")
            self.add(type(value))
        elif isinstance(value, _BUILT_IN):
            self._add_built_in(value)
        else:  # an object of a class in Python, by its class and attributes
            state = _state_of(value)
            if state is None or isinstance(value, (torch.Tensor, torch.nn.Module)):
                raise _Undigestible(f"it holds an object of {type(value).__module__}.{type(value).__qualname__}")
            self.add(type(value))
            self.add(state)

    def _text(self, text: str) -> None:
        self.hash.update(f"{len(text)}:{text}".encode("utf-8", "surrogatepass"))

    def _all(self, kind: str, values: Iterable[Any]) -> None:
        values = list(values)
        self._text(f"{kind} {len(values)}")
        for value in values:
            self.add(value)

    def _add_built_in(self, value: Any) -> None:
        """A tuple, dict, number, ...; or an object of a subclass of one, which is of more than its elements."""
        if isinstance(value, (tuple, list)):
            self._all("items", value)
        elif isinstance(value, dict):
            self._all("dict", (item for pair in value.items() for item in pair))
        elif isinstance(value, (set, frozenset)):
            self._all("set", sorted(of_values([each]) for each in value))
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
        outer, self.function = self.function, function
        name, code, uses = _name_of_function(function), function.__code__, uses_in(function.__code__)
        defaults = function.__defaults__ or ()
        first = code.co_argcount - len(defaults)
        cells = zip(code.co_freevars, function.__closure__ or (), strict=False)
        self._text(name or "function")
        for kind, values in (
            ("defaults", [*zip(code.co_varnames[first:], defaults, strict=False)]),
            ("keyword-only defaults", [*(function.__kwdefaults__ or {}).items()]),
            ("closure", [(variable, each) for variable, cell in cells for each in _contents(cell)]),
        ):
            self._text(f"{kind} {len(values)}")
            for variable, value in values:
                self._text(variable)
                self._add_used(value, variable, uses)
        self.add(function.__dict__)
        if name is None:
            self.add(code)
            # What it finds by name: globals, methods put into tensors, and what it imports when it is called.
            for name in sorted(uses.names & _ANYTHING):
                raise _Undigestible(f"by {name}, it may use anything")
            for name in sorted(uses.names & function.__globals__.keys()):
                self._text(name)
                self._add_used(function.__globals__[name], name, uses)
            for name in sorted(uses.names & vars(torch.Tensor).keys()):
                method = vars(torch.Tensor)[name]
                if isinstance(method, types.FunctionType) and _name_of_function(method) is None:
                    self._text(name)
                    self.add(method)
            package = (
                function.__globals__.get("__package__") or function.__globals__.get("__name__", "").rpartition(".")[0]
            )
            for each in uses.imports:
                self._text(each.variable)
                name = importlib.util.resolve_name("." * each.dots + each.module, package) if each.dots else each.module
                if name not in sys.modules:
                    raise _Undigestible(f"it imports {name}, which is not loaded")
                value = sys.modules[name]
                if each.attribute is not None:
                    value = _attribute_of(value, each.attribute, sys.modules.get(f"{name}.{each.attribute}"))
                self._add_used(value, each.variable, uses)
        self.function = outer

    def _add_used(self, value: Any, name: str, uses: Uses) -> None:
        """A value; or of a module, what a function looks up there that has it by this name."""
        if not isinstance(value, types.ModuleType):
            self.add(value)
            return
        self._text(f"module {value.__name__}")
        used = id(value), name, id(uses)
        if used in self.used:  # modules may hold each other
            return
        self.used.add(used)
        self.kept.append(uses)
        attributes = uses.of.get(name, set())
        if None in attributes and (value is sys or not _is_by_name(value.__name__)):
            raise _Undigestible(f"it may use all of the module {value.__name__}: write {name}.attribute")
        for attribute in sorted(attributes - {None}):
            self._text(attribute)
            self._add_used(_attribute_of(value, attribute), attribute, uses)


@functools.lru_cache(maxsize=4096)
def _of_code(code: types.CodeType) -> str:
    """The digest of bytecode and constants, which never change: each compilation asks for those of all ops."""
    walk = _Walk()
    walk.add((code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags, code.co_code))
    walk.add((code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_consts))
    return walk.hash.hexdigest()


#: The size of an object that has nothing but a ``__dict__``.
_PLAIN_SIZE = type("_", (), {}).__basicsize__


def _state_of(value: Any) -> dict[str, Any] | None:
    """The attributes of an object, or None if there may be more to it: its class, or a base, is written in C."""
    cls = type(value)
    if cls is _TUPLE_GETTER:
        return {"index": value.__reduce__()[1][0]}
    slots: list[str] = []
    for base in cls.__mro__:
        names = vars(base).get("__slots__", ())
        slots += (names,) if isinstance(names, str) else names
    slots = [name for name in slots if name not in ("__dict__", "__weakref__")]
    attributes = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    by_attributes = hasattr(value, "__dict__") or bool(attributes)
    is_ours = cls.__module__.partition(".")[0] == "customops"
    # An object that has nothing but attributes is no larger than these; one of a class written in C is.
    is_small = cls.__basicsize__ <= _PLAIN_SIZE + len(slots) * tuple.__itemsize__
    if not by_attributes or not (is_ours or is_small or not _is_by_name(cls.__module__)):
        return None
    return {**getattr(value, "__dict__", {}), **attributes}


#: Names in a class that do not say what it does.
_NOT_OF_CLASS = frozenset(
    """__dict__ __weakref__ __doc__ __module__ __annotations__ __annotations_cache__ __annotate__ __annotate_func__
    __firstlineno__ __static_attributes__ __orig_bases__""".split()
)


def _contents(cell: types.CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # nothing is in it yet
        return ()


#: Class, word for it in the digest, and what an object of it is made of.
_TAKEN_APART: tuple[tuple[type, str, Callable[[Any], Iterable[Any]]], ...] = (
    (functools.partial, "partial", lambda value: (value.func, value.args, value.keywords)),
    (types.MethodType, "method", lambda value: (value.__func__, value.__self__)),
    (types.BuiltinMethodType, "method of", lambda value: (value.__name__, value.__self__)),  # others go by name
    (staticmethod, "staticmethod", lambda value: (value.__func__,)),
    (classmethod, "classmethod", lambda value: (value.__func__,)),
    (property, "property", lambda value: (value.fget, value.fset, value.fdel)),
    (types.CellType, "cell", _contents),
    (re.Pattern, "pattern", lambda value: (value.pattern, value.flags)),
    (types.MappingProxyType, "mapping", lambda value: (dict(value),)),
)


class _Import(NamedTuple):
    """An import in the body of a function: the variable, and what it is bound to."""

    variable: str
    dots: int
    module: str
    attribute: str | None


class Uses(NamedTuple):
    """What a function does with names, functions inside it too.

    Attributes:
        names: all of them, also those that ``getattr`` is given.
        of: name -> the names that are looked up of what has it. None: it is used in another way, too.
    """

    names: frozenset[str]
    of: dict[str, set[Any]]
    imports: tuple[_Import, ...]


@functools.lru_cache(maxsize=4096)
def uses_in(code: types.CodeType) -> Uses:
    steps = [*_steps(code)]
    names, imports = set(code.co_names), [*_imports(steps)]
    of: dict[str, set[Any]] = defaultdict(set)
    for i, (kind, name) in enumerate(steps[:-1]):
        if kind not in ("load", "attribute"):
            continue
        next_kind, next_name = steps[i + 1]
        if next_kind == "attribute":
            of[name].add(next_name)
        elif next_kind == "constant" and isinstance(next_name, str) and _is_argument_of_getattr(steps, i):
            names.add(next_name)
            of[name].add(next_name)
            of[next_name].add(None)
        else:
            of[name].add(None)
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            inner = uses_in(const)
            names |= inner.names
            imports += inner.imports
            for name, used in inner.of.items():
                of[name] |= used
    return Uses(frozenset(names), dict(of), tuple(imports))


def _is_argument_of_getattr(steps: list[tuple[str, Any]], i: int) -> bool:
    """Are the steps up to the i-th, and the string after it, the first arguments of ``getattr``?"""
    while i > 0 and steps[i][0] == "attribute":
        i -= 1
    return steps[i][0] == "load" and steps[i - 1] in (("load", "getattr"), ("load", "hasattr"))


def _steps(code: types.CodeType) -> Iterator[tuple[str, Any]]:
    """What instructions do with names."""
    cells = {*code.co_cellvars, *code.co_freevars}  # LOAD_FAST of these is for the closure of a function inside
    for instruction in dis.get_instructions(code):
        opname, argument = instruction.opname, instruction.argval
        if opname in ("EXTENDED_ARG", "PUSH_NULL", "NOP", "RESUME", "LOAD_CLOSURE"):
            continue
        if opname == "LOAD_CONST":
            yield "constant", argument
        elif opname in ("IMPORT_NAME", "IMPORT_FROM"):
            yield opname, argument
        elif "ATTR" in opname or opname == "LOAD_METHOD":
            yield "attribute", argument
        elif opname.startswith(("LOAD_", "STORE_")) and argument:  # of some, two in one
            kinds = [word.lower() for word in opname.split("_") if word in ("LOAD", "STORE")]
            for kind, name in zip(kinds, argument if isinstance(argument, tuple) else (argument,), strict=True):
                if not ("FAST" in opname and kind == "load" and name in cells):
                    yield kind, name
        else:
            yield "other", None


def _imports(steps: list[tuple[str, Any]]) -> Iterator[_Import]:
    for i, (kind, module) in enumerate(steps):
        if kind != "IMPORT_NAME":
            continue
        dots, wanted = steps[i - 2][1], steps[i - 1][1]
        stores = [j for j in range(i + 1, len(steps)) if steps[j][0] == "store"]
        if wanted is None:  # `import a.b` binds a, and `import a.b as c` takes b of it first
            whole = module if steps[i + 1][0] == "IMPORT_FROM" else module.partition(".")[0]
            yield _Import(steps[stores[0]][1], dots, whole, None)
        else:
            for attribute, j in zip(wanted, stores, strict=False):
                yield _Import(steps[j][1], dots, module, attribute)


def _attribute_of(module: types.ModuleType, name: str, otherwise: Any = None) -> Any:
    """What a module has by a name, of a `__getattr__` too, as tracing finds it."""
    try:
        return getattr(module, name, otherwise)
    except Exception as error:
        raise _Undigestible(f"{module.__name__}.{name} raises {error!r}") from error


def _name_of(value: Any) -> str | None:
    """The name that stands for a value: an op, a logger, or a module, class or built-in of a package in `_BY_NAME`."""
    if isinstance(value, types.ModuleType):
        if not _is_by_name(value.__name__):
            raise _Undigestible(f"it holds the module {value.__name__}")  # nothing says what of it is used
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
        # An object by which a package in `_BY_NAME` wraps a function of its own, as Triton does.
        attributes = getattr(value, "__dict__", {})
        module, name = attributes.get("__module__"), attributes.get("__qualname__")
        package = type(value).__module__.partition(".")[0]
        is_own = isinstance(module, str) and _is_by_name(module) and module.partition(".")[0] == package
        return f"{type(value).__name__} {module} {name}" if is_own and name else None
    module = getattr(value, "__module__", None) or "builtins"
    return f"{type(value).__name__} {module} {value.__qualname__}" if _is_by_name(module) else None


def _name_of_function(function: types.FunctionType) -> str | None:
    """The name of a function of a package in `_BY_NAME`."""
    module = function.__globals__.get("__name__", "")  # not `__module__`, which is the wrapped function's
    return f"function {module} {function.__code__.co_name}" if _is_by_name(module) else None


def _is_by_name(module: str) -> bool:
    return module.partition(".")[0] in _BY_NAME


_torch.hooks.fingerprint = fingerprint
