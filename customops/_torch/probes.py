"""The private names of torch that this package uses, and what a user loses where one is missing.

They are read off the modules here, where each name stands once. A comment ``#: Without: ...`` says what does not work
without the names between it and the next such comment, or the end of the file; ``#: Without (since 2.12): ...`` that
they came with that torch. Names behind `getattr` or `hasattr` may be missing.

``python -m customops doctor`` tries each name. While the other modules here load under a torch that is newer than those
tested, each missing name is a class that cannot be called: the package loads, and what needs the name raises.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import importlib.util
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from customops import _versions
from customops.errors import UnsupportedError

__tracebackhide__ = True  # pytest leaves the frames out

_WITHOUT = re.compile(r"^#: Without(?: \(since (\d+)\.(\d+)\))?: (.*)$")


class Probe(NamedTuple):
    """Names that are used together, dotted, and what they are for."""

    subsystem: str  #: the module beside this one
    without: str  #: what does not work without them
    names: tuple[str, ...]
    since: tuple[int, int] | None = None  #: the first torch that has them, if that is not the oldest supported one


@functools.cache
def probes() -> tuple[Probe, ...]:
    """A probe for each ``#: Without`` of the modules here."""
    sources = {path.stem: path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("*.py"))}
    pairs = [node.elts for node in ast.walk(ast.parse(sources["patches"])) if isinstance(node, ast.Tuple)]
    patches = {ast.unparse(pair[1]): _text(pair[0]) for pair in pairs if len(pair) == 2 and _text(pair[0])}
    found: list[Probe] = []
    for module, source in sources.items():
        handlers = {change.removeprefix(f"{module}."): name for change, name in patches.items()}
        starts = {i: match for i, line in enumerate(source.splitlines(), 1) if (match := _WITHOUT.match(line))}
        names: dict[tuple[Any, ...], set[str]] = {}
        for line, name in _Uses(ast.parse(source), handlers).found:
            start = max((i for i in starts if i <= line), default=None)
            if start is None:
                raise AssertionError(f"line {line} of {module}: no comment says what does not work without {name}")
            names.setdefault(starts[start].groups(), set()).add(name)
        for (major, minor, without), used in names.items():
            found.append(Probe(module, without, tuple(sorted(used)), (int(major), int(minor)) if major else None))
    return tuple(found)


class _Uses(ast.NodeVisitor):
    """Collects the private names of torch that a module uses, and the lines where."""

    def __init__(self, tree: ast.Module, handlers: dict[str, str]) -> None:
        self.handlers = handlers  # functions of the module -> the module of torch that `patches` calls them with
        self.found: list[tuple[int, str]] = []
        self.known: dict[str, str] = {}  # names of Python -> dotted names of torch
        self.optional: set[str] = set()
        calls = [(ast.unparse(node.func), node.args) for node in ast.walk(tree) if isinstance(node, ast.Call)]
        for function, arguments in calls:
            if function == "hasattr" or (function == "getattr" and len(arguments) == 3):
                self.optional.add(_text(arguments[1]))
        self.visit(tree)

    def visit_Import(self, node: ast.Import) -> None:
        self.known |= {each.asname or "torch": each.name if each.asname else "torch" for each in node.names}

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self.known |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        before, arguments = self.known, [each.arg for each in node.args.args]
        self.known = {name: target for name, target in before.items() if name not in arguments}
        if node.name in self.handlers:
            self.known[arguments[0]] = self.handlers[node.name]
        self.generic_visit(node)
        self.known = before

    def visit_Assign(self, node: ast.Assign | ast.AnnAssign) -> None:
        """``_C: Any = torch._C``, ``config = importlib.import_module("torch._dynamo.config")``"""
        self.generic_visit(node)
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        if isinstance(target, ast.Name):
            name = self.dotted(node.value)
            self.known = {known: of for known, of in self.known.items() if known != target.id}
            self.known |= {target.id: name} if name is not None else {}

    visit_AnnAssign = visit_Assign

    def visit_Name(self, node: ast.Name | ast.Attribute | ast.Call) -> None:
        name = self.dotted(node)
        if name is None:
            self.generic_visit(node)
            return
        name = name.partition(".V.")[0]  # attributes of what inductor works on at the moment
        parts = name.split(".")
        if parts[0] == "torch" and name != "torch._C" and self.optional.isdisjoint(parts):
            if any(part[0] == "_" and part[-1] != "_" for part in parts):
                self.found.append((node.lineno, name))

    visit_Attribute = visit_Call = visit_Name

    def dotted(self, node: ast.AST | None) -> str | None:
        if isinstance(node, ast.Name):
            return self.known.get(node.id)
        if isinstance(node, ast.Attribute):
            base = self.dotted(node.value)
            return base and f"{base}.{node.attr}"
        if isinstance(node, ast.Call):
            function = ast.unparse(node.func)
            if function == "importlib.import_module":
                return _text(node.args[0]) or None
            if function == "cast":
                return self.dotted(node.args[1])
        return None


def _text(node: ast.expr) -> str:
    return str(node.value) if isinstance(node, ast.Constant) else ""


def is_too_new_for(probe: Probe, release: tuple[int, int] | None) -> bool:
    """Does that torch lack the names of a probe because they came later?"""
    return None not in (probe.since, release) and release < probe.since  # type: ignore[operator]


def missing(probe: Probe) -> list[str]:
    """The names of a probe that this torch does not have. Loads what it looks at, Dynamo too."""
    return [name for name in probe.names if _first_missing(name, load=True)[1]]


def _first_missing(name: str, *, load: bool) -> tuple[Any, str]:
    """What lacks the first part of a dotted name that is not there, and that part. A module to be loaded is there."""
    found: Any = torch
    for part in name.split(".")[1:]:
        if not hasattr(found, part) and isinstance(found, types.ModuleType) and hasattr(found, "__path__"):
            module = f"{found.__name__}.{part}"
            if importlib.util.find_spec(module) is not None:
                if not load:
                    break
                with contextlib.suppress(ImportError):
                    importlib.import_module(module)
        if not hasattr(found, part):
            return found, part
        found = getattr(found, part)
    return found, ""


class _Missing(type):
    """The class of a stand-in: its attributes are stand-ins, too, and a call raises."""

    _name: str
    _without: str

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _stand_in(f"{cls._name}.{name}", cls._without)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(
            f"torch {torch.__version__} has no {cls._name}, so {cls._without}",
            expected=f"torch {_versions.spelled(_versions.OLDEST)} to {_versions.spelled(_versions.NEWEST)}",
            fix="customops doctor lists what is missing; a newer customops may know this torch",
        )


def _stand_in(name: str, without: str) -> Any:
    return _Missing(name.rpartition(".")[2], (), {"_name": name, "_without": without})


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """Names are there that this torch does not have, if it is newer than those tested; then torch is as it was."""
    release, put_in = _versions.release(torch.__version__), []
    for probe in probes() if release is None or release > _versions.NEWEST else ():
        for name in probe.names:
            parent, missing = _first_missing(name, load=False)
            if missing:
                setattr(parent, missing, _stand_in(name, probe.without))
                put_in.append((parent, missing))
    try:
        yield
    finally:
        for place in put_in:
            delattr(*place)
