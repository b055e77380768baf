"""Targets of the command line: files and modules, imported, and the ops they define."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from customops import CustomOpsError, default_registry
from customops._cli.outcomes import Op, trace
from customops.errors import location_of


class TargetError(CustomOpsError):
    """The command line names something that is of no use."""


class Target(NamedTuple):
    """What importing a target brought."""

    module: ModuleType
    #: The ops that it defines itself.
    ops: list[Op]
    #: All ops that were not there before it was imported.
    imported: list[Op]


def load(target: str) -> Target:
    """Import a Python file, or a module or package by its name.

    Raises:
        TargetError: there is no such thing, or importing it raises.
    """
    path = Path(target)
    is_file = path.is_file() or path.suffix == ".py"
    is_name = not is_file and all(part.isidentifier() for part in target.split("."))
    if path.is_dir() and not (is_name and (path / "__init__.py").exists()):
        raise TargetError(f"{target} is a directory", fix=f"name its files ({path / '*.py'}), or the package")
    before = set(default_registry)
    module = _import_module(target) if is_name else _import_file(path)
    ops = [op for op in default_registry if _is_inside(module, op)]
    return Target(module, ops, [op for op in default_registry if op not in before])


def _import_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _import_failed(name, error) from error  # something that the module imports is missing
        is_file = Path(f"{name}.py").exists()
        raise TargetError(
            f"no module named {error.name!r}", fix=f"the file is {name}.py" if is_file else None
        ) from None
    except (Exception, SystemExit) as error:
        raise _import_failed(name, error) from error


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise TargetError(f"no such file: {path}")
    path = path.resolve()
    name = _module_name(path)
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise TargetError(f"not a Python file: {path}")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # as for `python FILE`: it may import its neighbours
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _import_failed(str(path), error) from error
    return module


def _module_name(path: Path) -> str:
    """The stem of the file, so that pickle and torch.compile find its names; numbered if another module has it."""
    for name in (path.stem, *(f"{path.stem}_{i}" for i in range(2, 1000))):
        file = getattr(sys.modules.get(name), "__file__", None)
        if name not in sys.modules or (file is not None and Path(file).resolve() == path):
            return name
    raise TargetError(f"too many modules are called {path.stem}")


def _is_inside(module: ModuleType, op: Op) -> bool:
    """Was the op defined, or given its samples, in the module's file, or in a package's directory?"""
    # A helper may define the ops of a project: then the samples tell whose they are.
    places = [op.source, *(location_of(samples.fn) for samples in [op._samples] if samples is not None)]
    sources = [Path(place.rpartition(":")[0]).resolve() for place in places]
    if hasattr(module, "__path__"):
        roots = [Path(directory).resolve() for directory in module.__path__]
        return any(source.is_relative_to(root) for source in sources for root in roots)
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).resolve() in sources


def _import_failed(target: str, error: BaseException) -> TargetError:
    """An error that shows the traceback from the user's code on."""
    is_relative = isinstance(error, ImportError) and "attempted relative import" in str(error)
    fix = "name the module instead of the file: package.module" if is_relative else None
    return TargetError(f"{target} cannot be imported\n\n{trace(error)}", fix=fix)
