"""Settings of the program that a call has to leave as they are, and the generators of random numbers."""

from __future__ import annotations

import contextlib
import random
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from customops import _torch
from customops.checks._inputs import quiet, seeded
from customops.checks._runs import attempt, own_generators
from customops.checks._trial import Trial
from customops.errors import innermost, is_users

#: What it is, how to ask for it, how to set it.
_SETTINGS: tuple[tuple[str, Callable[[], Any], Callable[[Any], Any]], ...] = (
    ("whether gradients are recorded", torch.is_grad_enabled, torch.set_grad_enabled),
    ("the default dtype", torch.get_default_dtype, torch.set_default_dtype),
    ("the number of threads", torch.get_num_threads, torch.set_num_threads),
    (
        "whether autocast is on",
        lambda: torch.is_autocast_enabled("cpu"),
        lambda on: torch.set_autocast_enabled("cpu", on),
    ),
    (
        "the precision of matrix products",
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    ("whether anomalies are detected", torch.is_anomaly_enabled, torch.set_anomaly_enabled),
)


@dataclass(frozen=True)
class Settings:
    """The settings at one time."""

    values: dict[str, Any]
    deterministic: tuple[bool, bool]
    errors_of_numpy: Any

    @classmethod
    def now(cls) -> Settings:
        numpy: Any = sys.modules.get("numpy")
        return cls(
            {name: get() for name, get, _ in _SETTINGS},
            (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
            numpy.geterr() if numpy is not None else None,
        )

    def change(self) -> tuple[str, str] | None:
        """What has changed, and from what to what."""
        now = Settings.now()
        for name, value in self.values.items():
            if now.values[name] != value:
                return name, f"it was {value}, and is {now.values[name]} after the call"
        if now.deterministic != self.deterministic:
            return "whether algorithms have to be deterministic", "it is another after the call"
        if self.errors_of_numpy is not None and now.errors_of_numpy != self.errors_of_numpy:
            return "how numpy treats errors (numpy.seterr)", "it is another after the call"
        return None

    def make_usual(self) -> None:
        """Set what calls often leave changed to its default."""
        torch.set_default_dtype(torch.float32)
        _torch.thread_state.set_deterministic(False, False)

    def make_other(self) -> None:
        """Set the same to what is not its default."""
        torch.set_default_dtype(torch.float64)
        _torch.thread_state.set_deterministic(True, True)
        torch.set_num_threads(self.values["the number of threads"] + 1)

    def restore(self) -> None:
        now = Settings.now()
        for name, _, put in _SETTINGS:
            if now.values[name] != self.values[name]:
                put(self.values[name])
        if now.deterministic != self.deterministic:
            _torch.thread_state.set_deterministic(*self.deterministic)
        if self.errors_of_numpy is not None:
            sys.modules["numpy"].seterr(**self.errors_of_numpy)


@dataclass(frozen=True)
class _Generator:
    """A generator of random numbers of the whole program."""

    name: str
    get: Callable[[], Any]
    put: Callable[[Any], Any]
    seed: Callable[[int], Any]
    state: Callable[[], Any]  #: something that can be compared


def _generators() -> Iterator[_Generator]:
    yield _Generator("random", random.getstate, random.setstate, random.seed, random.getstate)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        of = numpy.random
        yield _Generator(
            "numpy",
            of.get_state,
            of.set_state,
            of.seed,
            lambda: (of.get_state()[1].tolist(), of.get_state()[2]),
        )


def reseeds(trial: Trial) -> str | None:
    """The library whose generator has the same state after the call whatever it was before; None if there is none."""
    states = [_torch_state_after(seed, trial) for seed in (101, 202)]
    if states[0] == states[1]:
        return "torch"
    for generator in _generators():
        before = generator.get()
        try:
            states = [_state_after(generator, seed, trial) for seed in (101, 202)]
        finally:
            generator.put(before)
        if states[0] == states[1]:
            return generator.name
    return None


def _torch_state_after(seed: int, trial: Trial) -> Any:
    copy = own_generators(trial.copy())
    with quiet(), seeded((copy.args, copy.kwargs)):
        torch.default_generator.manual_seed(seed)
        with contextlib.suppress(Exception):  # the state is what counts
            copy.op(*copy.args, **copy.kwargs)
        return torch.default_generator.get_state().tolist()


def _state_after(generator: _Generator, seed: int, trial: Trial) -> Any:
    generator.seed(seed)
    attempt(trial)
    return generator.state()


_MOST = 200  #: objects that are looked at


def functions_of(trial: Trial) -> list[Callable[..., Any]]:
    """The kernels of an operator, as far as they are known: those of customops and of `torch.library.custom_op`."""
    op = _torch.library.torch_op_of(trial.name)
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
