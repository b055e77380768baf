"""How a function is sent to another process: by its name, or as the program around it."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from customops.errors import CustomOpsError


def sendable(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, so that it can be pickled for a process which finds its module by file."""
    if isinstance(function, functools.partial):
        return functools.partial(sendable(function.func), *function.args, **function.keywords)
    return _Reference.to(function)


@dataclass(frozen=True)
class _Reference:
    """A function by file and name: the child imports the file, under the same name as here."""

    module: str
    file: str | None
    name: str
    decorators: int  #: how many are around it there

    @classmethod
    def to(cls, function: Callable[..., Any]) -> _Reference:
        module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
        file = getattr(sys.modules.get(module or ""), "__file__", None)
        is_typed_in = module == "__main__" and file is None
        decorators = _decorators_of(function, module, name) if module and name and not is_typed_in else None
        if not module or not name or decorators is None:
            is_bound = isinstance(function, types.MethodType) and not isinstance(function.__self__, type)
            raise CustomOpsError(
                "another process cannot find this function",
                expected="a function that the module of a file has under its name",
                got=repr(function),
                fix=f"functools.partial({name}, object) sends the object along"
                if is_bound
                else "move it to the top of a file, or pass its code as a string",
            )
        return cls(module, file, name, decorators)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        function = functools.reduce(getattr, self.name.split("."), self._module())
        for _ in range(self.decorators):
            function = function.__wrapped__
        return function(*args, **keywords)

    def _module(self) -> Any:
        # As under another name: ``__main__`` here is the child's own program there.
        name = "__isolated_main__" if self.module == "__main__" else self.module
        if name in sys.modules:
            return sys.modules[name]
        if self.file is None or name.startswith("customops."):
            return importlib.import_module(name)
        spec = importlib.util.spec_from_file_location(name, self.file)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


def _decorators_of(function: Callable[..., Any], module: str, name: str) -> int | None:
    """How many are around it where its module has it under its name; None if something else is there, or nothing."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    count = 0
    while found is not None:
        # A class method is another object each time.
        if found is function or (isinstance(found, types.MethodType) and found == function):
            return count
        found, count = getattr(found, "__wrapped__", None), count + 1
    return None


def _program(target: str | os.PathLike[str]) -> _Code | _File:
    if isinstance(target, str) and ("\n" in target or not target.endswith(".py")):
        return _Code(target)
    path = Path(target).resolve()
    if not path.is_file():
        raise CustomOpsError(
            "no such file",
            expected="a Python file; a string of one line that ends in .py is the path of one, any other is code",
            got=str(path),
        )
    return _File(str(path))


@dataclass(frozen=True)
class _Code:
    text: str

    def __call__(self) -> Any:
        return _run_as_main(types.ModuleType("__main__"), self.text, "<isolated>")


@dataclass(frozen=True)
class _File:
    path: str

    def __call__(self) -> Any:
        sys.argv[:] = [self.path]
        sys.path.insert(0, os.path.dirname(self.path))  # as for `python FILE`
        module = types.ModuleType("__main__")
        module.__file__ = self.path
        return _run_as_main(module, Path(self.path).read_bytes(), self.path)


def _run_as_main(module: types.ModuleType, source: str | bytes, name: str) -> Any:
    sys.modules["__main__"] = module  # pickle and multiprocessing look there
    code = compile(source, name, "exec", dont_inherit=True)  # the __future__ imports here are not its own
    try:
        exec(code, vars(module))
    except SystemExit as stop:
        if stop.code not in (None, 0):
            raise
    return vars(module).get("result")
