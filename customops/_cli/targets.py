"""What the command line and the pytest plugin are given: files, modules, folders, and names of ops."""

from __future__ import annotations

import fnmatch
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from customops import CustomOpDef, CustomOpsError, _torch, default_registry
from customops._cli.screen import say
from customops.errors import did_you_mean

Op = CustomOpDef[Any, Any]

TARGET_HELP = "a Python file, a folder, the name of a module or package, or ops: mylib::scale, 'mylib::*'"

#: Files and folders of a folder that define no ops.
_NO_OPS = ("test_*.py", "*_test.py", "conftest.py", "setup.py", "tests")


class TargetError(CustomOpsError):
    """A target is of no use."""


class Target(NamedTuple):
    """What importing a target brought."""

    module: ModuleType
    #: The ops that it defines itself.
    ops: list[Op]
    #: All ops that were not there before it was imported.
    imported: list[Op]
    #: The modules of a package that were imported, since the package by itself defines no op.
    walked: list[str]
    #: Names of ops that are not those of customops, and were not there before it was imported.
    others: list[str]


def ops_of(targets: Sequence[str]) -> list[Op]:
    """The ops that targets name: files, folders, modules, packages, and ops (``ns::op`` or a pattern, ``ns::*``).

    Ops are looked for among those that the other targets define; where there is no other target, the module that is
    called as their namespace is imported, if there is one, and torch's own ops are found, too. Raises TargetError if
    there is no such thing, or none that defines an op.
    """
    names = [target for target in targets if "::" in target]
    known: dict[str, Op] = {}
    for target in targets:
        for op in _ops_in(target, may_have_none=bool(names)) if target not in names else ():
            if known.setdefault(op._qualname, op) is not op:
                older = known[op._qualname].source
                raise TargetError(f"{target} replaces {op._qualname} ({older})", fix="name them in two runs")
    if not names:
        return list(known.values())
    only_names = len(names) == len(targets)
    if only_names:
        for namespace in dict.fromkeys(name.partition("::")[0] for name in names):
            if namespace.isidentifier() and importlib.util.find_spec(namespace) is not None:
                load(namespace)
        known = {op._qualname: op for op in default_registry._to_check()}
    found: dict[str, Op] = {}
    for name in names:
        matching = [op for qualname, op in known.items() if fnmatch.fnmatchcase(qualname, name)]
        if not matching:
            try:
                matching = [default_registry.adopt(name)]
            except CustomOpsError:
                got = in_short([*known]) or (None if only_names else "no ops")
                fix = did_you_mean(name, [*known, *_torch.library.names_in(name.partition("::")[0])])
                if fix is None and only_names:
                    fix = f"name the file or module that defines it as well: {name} ops.py"
                raise TargetError(f"there is no op {name}", got=got, fix=fix) from None
        found |= {op._qualname: op for op in matching}
    return list(found.values())


def _ops_in(target: str, may_have_none: bool) -> list[Op]:
    """The ops of one target. It may have none beside a name of ops, which finds what it defines by torch.library."""
    parts = expand(target)
    loaded = [load(part) for part in parts]
    walked = [name for each in loaded for name in each.walked]
    if walked:
        say(f"{target} itself defines no op; imported {in_short(walked)}", sys.stderr)
    ops = [op for each in loaded for op in each.ops]
    if ops or may_have_none:
        return ops
    elsewhere = [op for each in loaded for op in each.imported]
    if others := [name for each in loaded for name in each.others] if not elsewhere else []:
        fix = f'@customops.adopt("{others[0]}").register_samples gives it samples; customops migrate moves {target}'
        raise TargetError(f"{target} defines ops by torch.library alone", got=in_short(others), fix=fix)
    if not elsewhere or len(parts) > 1:
        looked = [*parts, *walked]
        raise TargetError(f"{target} defines no op", got=f"imported {in_short(looked)}" if looked != [target] else None)
    names = in_short([f"{op._qualname} ({op.source})" for op in elsewhere], 3)
    raise TargetError(f"{target} defines no op itself; it imports some", got=names, fix="name the module they are in")


def in_short(names: Sequence[str], most: int = 5) -> str:
    """``a, b, c, ...``"""
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def load(target: str) -> Target:
    """Import a Python file, or a module or package by its name. Whatever prevents that is a TargetError.

    If importing a package defines no op in it, its modules are imported, tests apart.
    """
    path = Path(target)
    is_name = not path.is_file() and path.suffix != ".py" and all(map(str.isidentifier, target.split(".")))
    if path.is_dir() and (path / "__init__.py").exists():
        (target,), is_name = expand(target), True
    elif path.is_dir() and not is_name:
        raise TargetError(f"{target} is a directory", fix=f"name its files ({path / '*.py'}), or the package")
    if not is_name and not path.is_file():
        fix = f"ops are named {target.replace(':', '::')}" if ":" in target else None
        raise TargetError(f"no such file: {path}", got=f"looked in {path.absolute().parent}", fix=fix)
    before, known, walked = set(default_registry), {*_torch.library.names_in()}, list[str]()
    module = _imported(target, is_name)
    if not any(_is_inside(module, op) for op in default_registry._to_check()):
        for name in _submodules(target, getattr(module, "__path__", ())):
            _imported(name, is_name=True)
            walked.append(name)
    ops = [op for op in default_registry._to_check() if _is_inside(module, op)]
    imported = [op for op in default_registry if op not in before]
    known |= {op._qualname.partition(".")[0] for op in imported}
    return Target(module, ops, imported, walked, [n for n in _torch.library.names_in() if n not in known])


def _imported(target: str, is_name: bool) -> ModuleType:
    try:
        return importlib.import_module(target) if is_name else _import_file(Path(target).resolve())
    except (Exception, SystemExit) as error:
        if isinstance(error, TargetError):
            raise
        missing = error.name if is_name and isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{target}.".startswith(f"{missing}."):  # and not something that it imports
            parent, _, _ = missing.rpartition(".")
            folders = getattr(sys.modules.get(parent), "__path__", ()) if parent else sys.path
            looked = ", ".join(filter(os.path.isdir, folders)) or f"nothing: {parent} is no package"
            fix = f"the file is {target}.py" if Path(f"{target}.py").exists() else None
            if fix is None and not parent:
                fix = f"name a file with its .py, and an op with its namespace, as in ns::{target}"
            raise TargetError(f"no module named {missing!r}", got=f"looked in {looked}", fix=fix) from None
        is_relative = isinstance(error, ImportError) and "attempted relative import" in str(error)
        fix = "name the module instead of the file: package.module" if is_relative else None
        why = f"{type(error).__name__}: {error}".partition("\n")[0]  # first, since summaries show one line
        raise TargetError(f"{target} cannot be imported: {why}\n\n{trace(error)}", fix=fix) from error


def _submodules(package: str, folders: Iterable[str]) -> Iterator[str]:
    """The modules of a package that can be imported, which ``01_demo.py`` cannot; tests apart."""
    for folder in map(Path, folders):
        for file in _files(folder):
            parts = file.relative_to(folder).with_suffix("").parts
            if parts != ("__init__",) and all(map(str.isidentifier, parts)):
                yield ".".join([package, *parts]).removesuffix(".__init__")


def _import_file(path: Path) -> ModuleType:
    # Its stem is the name of the module, so that pickle and torch.compile find its names; numbered if another has it.
    name, number = path.stem, 1
    while name in sys.modules:
        file = getattr(sys.modules[name], "__file__", None)
        if file is not None and Path(file).resolve() == path:
            return sys.modules[name]
        number += 1
        name = f"{path.stem}_{number}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise TargetError(f"not a Python file: {path}")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    _import_from(path.parent)  # as for `python FILE`: it may import its neighbours
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _is_inside(module: ModuleType, op: Op) -> bool:
    """Was the op defined, or given its samples, in the module's file, or in a package's directory?"""
    sources = [Path(place.rpartition(":")[0]).resolve() for place in op._places()]
    if hasattr(module, "__path__"):
        roots = [Path(directory).resolve() for directory in module.__path__]
        return any(source.is_relative_to(root) for source in sources for root in roots)
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).resolve() in sources


def expand(target: str) -> list[str]:
    """The modules and files that a target stands for: itself, or what is in a folder.

    A folder with an ``__init__.py`` is that package, by its name; the folder that its outermost package is in becomes
    part of `sys.path`. Of another folder it is the Python files and packages in it and below, tests apart.
    """
    path = Path(target)
    return list(_inside(path.resolve())) if path.is_dir() else [target]


def _inside(folder: Path) -> Iterator[str]:
    if (folder / "__init__.py").exists():
        top = next(parent for parent in folder.parents if not (parent / "__init__.py").exists())
        _import_from(top)
        yield ".".join(folder.relative_to(top).parts)
        return
    for path in _entries(folder):
        if path.is_dir():
            yield from _inside(path)
        elif path.name != "__init__.py":
            yield str(path)


def _entries(folder: Path) -> Iterator[Path]:
    """The Python files and the folders in a folder, tests apart."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith((".", "__")) and path.name != "__init__.py":
            continue
        if path.is_dir() or path.suffix == ".py":
            if not any(map(path.match, _NO_OPS)):
                yield path


def _files(folder: Path) -> Iterator[Path]:
    for path in _entries(folder):
        yield from _files(path) if path.is_dir() else (path,)


def _import_from(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def error_text(error: BaseException) -> str:
    """The message of an error of ours, the traceback of another."""
    return str(error) if isinstance(error, CustomOpsError) else trace(error)


def trace(error: BaseException) -> str:
    """The traceback without the frames of this package and of the import system."""
    trace = traceback.TracebackException.from_exception(error)
    ours = (str(Path(__file__).parents[1]), importlib.__file__, "<frozen importlib")
    trace.stack = traceback.StackSummary.from_list([f for f in trace.stack if not f.filename.startswith(ours)])
    return "".join(trace.format()).rstrip()
