"""Changes of torch's modules for a device, which are made when a module is imported.

Importing `customops` adds no import hook. The first device that is registered adds the hook here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

from customops import _torch


def when_loaded(module: str, change: Callable[[Any], object]) -> None:
    """Call ``change(module)`` now, or when the module is imported."""
    if module in sys.modules:
        change(sys.modules[module])
        return
    if _waiting not in sys.meta_path:
        sys.meta_path.insert(0, _waiting)
    _waiting.changes.setdefault(module, []).append(change)


class _Waiting(MetaPathFinder):
    """Calls functions with modules that are imported later."""

    def __init__(self) -> None:
        self.changes: dict[str, list[Callable[[Any], object]]] = {}

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name not in self.changes:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            loader.exec_module = _torch.library.followed(loader.exec_module, self._loaded)
        return spec

    def _loaded(self, module: Any) -> None:
        for change in self.changes.pop(module.__name__, ()):
            change(module)


_waiting = _Waiting()
