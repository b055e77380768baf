"""The command line: import the targets, check the ops they define over their sample inputs, print one table."""

from __future__ import annotations

import argparse
import fnmatch
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from rich.console import Console
from rich.text import Text

from customops import CustomOpsError, default_registry
from customops._cli import backend_report, doctor
from customops._cli.outcomes import Op, Run, print_outcomes, trace
from customops.checks import CHECKS, DEFAULT_CHECKS
from customops.errors import location_of

#: Exit statuses.
ALL_PASSED, SOME_FAILED, NOTHING_RUN = 0, 1, 2


class TargetError(CustomOpsError):
    """The command line names something that cannot be checked."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(argv)
    return options.run(options, parser)  # type: ignore[no-any-return]


def _check(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    if (options.atol is None) != (options.rtol is None):
        parser.error("--atol and --rtol go together: give both or neither")
    errors = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)
    try:
        ops = _selected(_load_all(options.targets), options.op)
    except TargetError as error:
        errors.print(Text("error: ", style="bold red") + Text(str(error)))
        return NOTHING_RUN
    run = Run(list(dict.fromkeys(options.check or DEFAULT_CHECKS)), options.atol, options.rtol, options.fail_fast)
    run.check(ops, errors)
    print_outcomes(run, Console(highlight=False, markup=False, emoji=False))
    if run.failed:
        return SOME_FAILED
    return ALL_PASSED if run.count("passed") else NOTHING_RUN


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m customops", description="Custom operators for PyTorch.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    check = commands.add_parser(
        "check",
        help="check the ops that files or modules define",
        description="Import each TARGET and run the checks of customops.opcheck over the sample inputs of every op it "
        "defines (op.register_samples).",
        epilog="Exit status: 0 if no check failed, 1 if one did, 2 if a TARGET cannot be imported or defines no op.",
    )
    check.add_argument("targets", nargs="+", metavar="TARGET", help="a Python file, or the name of a module or package")
    check.add_argument("--op", action="append", metavar="PATTERN", help='only ops of this name, e.g. "mylib::*"')
    names = ", ".join(CHECKS)
    check.add_argument(
        "--check", action="append", metavar="NAME", choices=CHECKS, help=f"only this check; may be repeated; {names}"
    )
    check.add_argument("--atol", type=float, help="how far apart two results may be, absolutely")
    check.add_argument("--rtol", type=float, help="how far apart two results may be, relatively")
    check.add_argument("--fail-fast", action="store_true", help="stop after the first failure")
    check.set_defaults(run=_check)
    backend_report.add_parser(commands)
    doctor.add_parser(commands)
    return parser


def _load_all(targets: list[str]) -> list[Op]:
    ops: dict[str, Op] = {}
    for target in targets:
        path = Path(target)
        is_file = path.is_file() or path.suffix == ".py"
        is_name = not is_file and all(part.isidentifier() for part in target.split("."))
        if path.is_dir() and not (is_name and (path / "__init__.py").exists()):
            raise TargetError(f"{target} is a directory", fix=f"name its files ({path / '*.py'}), or the package")
        before = set(default_registry)
        module = _import_module(target) if is_name else _import_file(path)
        found = [op for op in default_registry if _is_inside(module, op)]
        if not found:
            raise _no_ops(target, [op for op in default_registry if op not in before])
        for op in found:
            if ops.setdefault(op._qualname, op) is not op:
                older = ops[op._qualname].source
                raise TargetError(f"{target} replaces {op._qualname} ({older})", fix="check them in two runs")
    return list(ops.values())


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
    places = [op.source, *(location_of(fn) for fn in [op._samples] if fn is not None)]
    sources = [Path(place.rpartition(":")[0]).resolve() for place in places]
    if hasattr(module, "__path__"):
        roots = [Path(directory).resolve() for directory in module.__path__]
        return any(source.is_relative_to(root) for source in sources for root in roots)
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).resolve() in sources


def _no_ops(target: str, elsewhere: list[Op]) -> TargetError:
    if not elsewhere:
        return TargetError(f"{target} defines no op")
    names = ", ".join(f"{op._qualname} ({op.source})" for op in elsewhere[:3]) + (", ..." if elsewhere[3:] else "")
    return TargetError(f"{target} defines no op itself; it imports some", got=names, fix="name the module they are in")


def _import_failed(target: str, error: BaseException) -> TargetError:
    """An error that shows the traceback from the user's code on."""
    is_relative = isinstance(error, ImportError) and "attempted relative import" in str(error)
    fix = "name the module instead of the file: package.module" if is_relative else None
    return TargetError(f"{target} cannot be imported\n\n{trace(error)}", fix=fix)


def _selected(ops: list[Op], patterns: list[str] | None) -> list[Op]:
    if patterns is None:
        return ops
    found = [op for op in ops if any(fnmatch.fnmatchcase(op._qualname, pattern) for pattern in patterns)]
    if not found:
        names = ", ".join(op._qualname for op in ops)
        raise TargetError(f"no op matches --op {' '.join(patterns)}", got=names, fix='e.g. --op "*::name"')
    return found
