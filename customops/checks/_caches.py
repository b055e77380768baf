"""What kernels written in Python keep between calls: the containers that grow when they are called."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

from customops import _compat
from customops.checks._trial import Trial
from customops.errors import innermost, is_users

_MOST = 200  #: objects that are looked at


def functions_of(trial: Trial) -> list[Callable[..., Any]]:
    """The kernels of an operator, as far as they are known: those of customops and of `torch.library.custom_op`."""
    op = _compat.registries.torch_op_of(trial.name)
    found = [getattr(op, "_init_fn", None)]
    if trial.custom_op is not None:
        found += list(trial.custom_op._rules.kernel.kernels.values())
    return [fn for fn in found if fn is not None]


class Caches:
    """The dicts, lists, sets and memoized functions that functions can reach, and how large they are now."""

    def __init__(self, functions: list[Callable[..., Any]]) -> None:
        self.found: dict[int, Any] = {}
        self._seen: set[int] = set()
        for fn in functions:
            self._look(fn)
        self._sizes = {key: _size(cache) for key, cache in self.found.items()}

    def grown(self) -> list[Any]:
        return [cache for key, cache in self.found.items() if _size(cache) > self._sizes[key]]

    def _look(self, value: Any) -> None:
        if id(value) in self._seen or len(self._seen) > _MOST:
            return
        self._seen.add(id(value))
        if isinstance(value, (dict, list, set)) or hasattr(value, "cache_clear"):
            self.found[id(value)] = value
        for part in _parts(value):
            self._look(part)


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, types.MethodType):
        yield value.__self__
    fn = innermost(value) if callable(value) and not isinstance(value, type) else value
    if isinstance(fn, types.FunctionType):
        if not is_users(fn.__code__.co_filename):
            return
        yield from (cell.cell_contents for cell in fn.__closure__ or () if _is_filled(cell))
        yield from (fn.__globals__[name] for name in fn.__code__.co_names if name in fn.__globals__)
        yield from fn.__defaults__ or ()
        yield from vars(fn).values()
    elif type(value).__module__.partition(".")[0] not in ("builtins", "torch", "numpy", "customops"):
        yield from getattr(value, "__dict__", {}).values()


def _is_filled(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _size(cache: Any) -> int:
    return int(cache.cache_info().currsize) if hasattr(cache, "cache_clear") else len(cache)


@contextlib.contextmanager
def emptied(caches: list[Any]) -> Iterator[None]:
    """Containers are empty, and afterwards as they were. What a memoized function kept is gone."""
    before = [cache.copy() for cache in caches if not hasattr(cache, "cache_clear")]
    containers = [cache for cache in caches if not hasattr(cache, "cache_clear")]
    try:
        for cache in caches:
            (cache.cache_clear if hasattr(cache, "cache_clear") else cache.clear)()
        yield
    finally:
        for cache, content in zip(containers, before, strict=True):
            cache.clear()
            (cache.extend if isinstance(cache, list) else cache.update)(content)
