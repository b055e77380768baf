"""Changes to modules of torch that are not imported yet, made when they are."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any


class _Waiting(MetaPathFinder):
    """Calls functions with modules that are imported later."""

    def __init__(self) -> None:
        self.actions: dict[str, list[Callable[[Any], object]]] = {}

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name not in self.actions:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            loader.exec_module = followed(loader.exec_module, self._loaded)
        return spec

    def _loaded(self, module: Any) -> None:
        for action in self.actions.pop(module.__name__, ()):
            action(module)


_waiting = _Waiting()

sys.meta_path.insert(0, _waiting)


def when_imported(name: str, action: Callable[[Any], object]) -> None:
    """Call ``action(module)`` once the module of this name is there."""
    if name in sys.modules:
        action(sys.modules[name])
    else:
        _waiting.actions.setdefault(name, []).append(action)


def followed(function: Any, then: Callable[..., object]) -> Any:
    """A function that calls `function`, then `then` with the same arguments."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        then(*args, **kwargs)
        return result

    return wrapper
