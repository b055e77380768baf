"""What the command line and the pytest plugin are given: files, modules, folders, and names of ops."""

from __future__ import annotations

import fnmatch
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from customops import CustomOpDef, CustomOpsError, default_registry

Op = CustomOpDef[Any, Any]

#: Files of a folder that define no ops.
_NO_OPS = ("test_*.py", "*_test.py", "conftest.py", "setup.py")


class TargetError(CustomOpsError):
    """A target is of no use."""


class Target(NamedTuple):
    """What importing a target brought."""

    module: ModuleType
    #: The ops that it defines itself.
    ops: list[Op]
    #: All ops that were not there before it was imported.
    imported: list[Op]


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
        known = {op._qualname: op for op in default_registry}
    found: dict[str, Op] = {}
    for name in names:
        matching = [op for qualname, op in known.items() if fnmatch.fnmatchcase(qualname, name)]
        if not matching:
            try:
                matching = [default_registry.adopt(name)]
            except CustomOpsError as error:
                got = ", ".join([*known][:5]) + (", ..." if len(known) > 5 else "") or "no ops"
                fix = f"name the file or module that defines it as well: {name} ops.py" if only_names else error.fix
                raise TargetError(f"there is no op {name}", got=got, fix=fix) from None
        found |= {op._qualname: op for op in matching}
    return defined(found.values())


def _ops_in(target: str, may_have_none: bool) -> list[Op]:
    """The ops of one target. It may have none beside a name of ops, which finds what it defines by torch.library."""
    parts = expand(target)
    loaded = [load(part) for part in parts]
    ops = [op for each in loaded for op in each.ops]
    if ops or may_have_none:
        return ops
    if parts != [target]:
        raise TargetError(f"no file in {target} defines an op", got=f"{len(parts)} files")
    elsewhere = loaded[0].imported
    if not elsewhere:
        raise TargetError(f"{target} defines no op")
    names = ", ".join(f"{op._qualname} ({op.source})" for op in elsewhere[:3]) + (", ..." if elsewhere[3:] else "")
    raise TargetError(f"{target} defines no op itself; it imports some", got=names, fix="name the module they are in")


def defined(ops: Iterable[Op]) -> list[Op]:
    """The ops, lazy ones defined. Raises TargetError if one cannot be."""
    found = list(ops)
    for op in found:
        try:
            _ = op.schema
        except Exception as error:
            raise TargetError(f"the lazy op {op._qualname} cannot be defined\n\n{error_text(error)}") from error
    return found


def load(target: str) -> Target:
    """Import a Python file, or a module or package by its name. Whatever prevents that is a TargetError."""
    path = Path(target)
    is_name = not path.is_file() and path.suffix != ".py" and _is_name(target)
    if path.is_dir() and not (is_name and (path / "__init__.py").exists()):
        raise TargetError(f"{target} is a directory", fix=f"name its files ({path / '*.py'}), or the package")
    if not is_name and not path.is_file():
        raise TargetError(f"no such file: {path}")
    before = set(default_registry)
    try:
        module = importlib.import_module(target) if is_name else _import_file(path.resolve())
    except (Exception, SystemExit) as error:
        if isinstance(error, TargetError):
            raise
        missing = error.name if is_name and isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{target}.".startswith(f"{missing}."):  # and not something that it imports
            fix = f"the file is {target}.py" if Path(f"{target}.py").exists() else None
            raise TargetError(f"no module named {missing!r}", fix=fix) from None
        is_relative = isinstance(error, ImportError) and "attempted relative import" in str(error)
        fix = "name the module instead of the file: package.module" if is_relative else None
        shown = target if is_name else path.resolve()
        raise TargetError(f"{shown} cannot be imported\n\n{trace(error)}", fix=fix) from error
    defined(op for op in default_registry if _is_inside(module, op))
    ops = [op for op in default_registry if _is_inside(module, op)]  # with the out variants that came just now
    return Target(module, ops, [op for op in default_registry if op not in before])


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
    if not path.is_dir() or (_is_name(target) and (path / "__init__.py").exists()):
        return [target]
    return list(_inside(path.resolve()))


def _inside(folder: Path) -> Iterator[str]:
    if (folder / "__init__.py").exists():
        top = next(parent for parent in folder.parents if not (parent / "__init__.py").exists())
        _import_from(top)
        yield ".".join(folder.relative_to(top).parts)
        return
    for path in sorted(folder.iterdir()):
        if path.name.startswith((".", "__")):
            continue
        if path.is_dir():
            yield from _inside(path)
        elif path.suffix == ".py" and not any(path.match(pattern) for pattern in _NO_OPS):
            yield str(path)


def _is_name(target: str) -> bool:
    return all(part.isidentifier() for part in target.split("."))


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
