"""``customops doctor``: which private names of torch are used, and whether this torch has them.

The names are read off the modules of `customops._torch`, where each name stands once. A comment ``#: Without: ...``
says what does not work without the names between it and the next such comment, or the end of the file;
``#: Without (since 2.14): ...`` that they came with that torch. Names behind `getattr` or `hasattr` may be missing.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import importlib
import itertools
import platform
import types
from pathlib import Path
from typing import Any, NamedTuple

import torch

import customops
from customops import _torch
from customops._cli.screen import FAULTY, FINE, say, wrapped
from customops._describe.render import table, width_of_screen
from customops._torch.patches import PATCHES, STAGES, TABLES, Patch
from customops._torch.stand_ins import WITHOUT
from customops._versions import NEWEST, OLDEST, spelled
from customops._versions import release as release_of


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="say which private parts of torch are used, and whether this torch has them",
        description="Try each private name of torch that customops uses, and list the places of torch that it changes. "
        "For each missing name, say what does not work.",
        epilog="Exit status: 0 if all are there that this torch should have, 1 if one is missing.",
    )
    parser.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    release, tested = release_of(torch.__version__), f"torch {spelled(OLDEST)} to {spelled(NEWEST)}"
    width = width_of_screen()
    say(f"customops {customops.__version__}, torch {torch.__version__}, Python {platform.python_version()}")
    if release is None or release > NEWEST:
        say(wrapped(f"This torch is newer than those that customops was tested on, {tested}.", width))
    rows, later, gone, found = [], [], [], set[str]()
    for subsystem, group in itertools.groupby(probes(), lambda probe: probe.subsystem):
        there, states, needs = 0, [], []
        for probe in group:
            needs.append(probe.without)
            names = missing(probe)
            there += len(probe.names) - len(names)
            found.update(name for name in probe.names if name not in names)
            if names and probe.since is not None and release is not None and release < probe.since:
                states.append(f"not yet there: {', '.join(names)}")
                later.append(f"from torch {spelled(probe.since)} on; until then: {probe.without}")
            elif names:
                states.append(f"missing: {', '.join(names)}")
                gone.append(f"missing: {probe.without}")
        rows.append((subsystem, "; ".join(states) or f"all {there} there", "; ".join(needs)))
    say(table(rows, ("part of torch", "state", "needed, or else"), width))
    say(
        wrapped(
            "Places of torch that customops changes. CUSTOMOPS_PATCH_TORCH=0 in the environment changes none.", width
        )
    )
    changes = [(patch.place.replace(":", "."), STAGES[patch.stage], without(patch)) for patch in PATCHES]
    say(table(changes, ("place", "changed when", "without the change"), width))
    advice = f"Use a torch that customops is tested on, {tested}, or report this output."
    fine = f"All of {len(found)} names are there. Some have several uses."
    for line in (*later, *gone, advice if gone else fine):
        say(wrapped(line, width))
    return FAULTY if gone else FINE


def without(patch: Patch) -> str:
    """Return what torch does without a change, and the issue."""
    return f"{patch.without} ({patch.issue})" if patch.issue else patch.without


class Probe(NamedTuple):
    """Names that are used together, dotted, and what they are for."""

    subsystem: str  #: the module of `customops._torch`
    without: str  #: what does not work without them
    names: tuple[str, ...]
    since: tuple[int, int] | None = None  #: the first torch that has them, if that is not the oldest supported one


@functools.cache
def probes() -> tuple[Probe, ...]:
    """Return a probe for each ``#: Without`` of the modules."""
    folder = Path(str(_torch.__file__)).parent
    sources = {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py"))}
    changes = [(patch.place.partition(":")[0], patch.change) for patch in PATCHES] + [*TABLES]
    found: list[Probe] = []
    for module, source in sources.items():
        handlers = {change.__name__: name for name, change in changes if change.__module__.endswith(f".{module}")}
        starts = {i: match for i, line in enumerate(source.splitlines(), 1) if (match := WITHOUT.match(line))}
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


def missing(probe: Probe) -> list[str]:
    """Return the names of a probe that this torch lacks. This loads the modules that the names are in, Dynamo too."""
    return [name for name in probe.names if not _is_there(name)]


def _is_there(name: str) -> bool:
    found: Any = torch
    for part in name.split(".")[1:]:
        if not hasattr(found, part) and isinstance(found, types.ModuleType) and hasattr(found, "__path__"):
            with contextlib.suppress(ImportError):
                importlib.import_module(f"{found.__name__}.{part}")
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True
