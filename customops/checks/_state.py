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
from customops.checks._runs import own_generators
from customops.checks._trial import Trial
from customops.errors import innermost, is_users


def _errors_of_numpy() -> Any:
    numpy: Any = sys.modules.get("numpy")
    return numpy.geterr() if numpy is not None else None


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
    ("the precision of matrix products", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    ("whether anomalies are detected", torch.is_anomaly_enabled, torch.set_anomaly_enabled),
    (
        "whether algorithms have to be deterministic",
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda modes: _torch.thread_state.set_deterministic(*modes),
    ),
    (
        "how numpy treats errors (numpy.seterr)",
        _errors_of_numpy,
        lambda errors: sys.modules["numpy"].seterr(**errors),
    ),
)


@dataclass(frozen=True)
class Settings:
    """The settings at one time, by name; None for one of a library that is not loaded."""

    values: dict[str, Any]

    @classmethod
    def now(cls) -> Settings:
        return cls({name: get() for name, get, _ in _SETTINGS})

    def change(self) -> tuple[str, str] | None:
        """What has changed, and from what to what."""
        for name, value in Settings.now().values.items():
            before = self.values[name]
            if before is not None and value != before:
                is_long = isinstance(before, (tuple, dict))
                text = "it is another" if is_long else f"it was {before}, and is {value}"
                return name, f"{text} after the call"
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
        for name, get, put in _SETTINGS:
            if self.values[name] is not None and get() != self.values[name]:
                put(self.values[name])


def reseeds(trial: Trial) -> str | None:
    """The library whose generator has the same state after the call whatever it was before; None if there is none."""
    cpu: Any = torch.default_generator
    # The name, how to get, set and seed the state, and the state as something that can be compared.
    generators: list[tuple[str, Callable[[], Any], Callable[[Any], Any], Callable[[int], Any], Callable[[], Any]]] = [
        ("torch", cpu.get_state, cpu.set_state, cpu.manual_seed, lambda: cpu.get_state().tolist()),
        ("random", random.getstate, random.setstate, random.seed, random.getstate),
    ]
    if "numpy" in sys.modules:
        of: Any = sys.modules["numpy"].random
        state = lambda: (of.get_state()[1].tolist(), of.get_state()[2])  # noqa: E731
        generators.append(("numpy", of.get_state, of.set_state, of.seed, state))
    for name, get, put, seed, compared in generators:
        before, states = get(), []
        try:
            for number in (101, 202):
                copy = own_generators(trial.copy())
                with quiet(), seeded((copy.args, copy.kwargs)):
                    seed(number)
                    with contextlib.suppress(Exception):  # the state is what counts
                        copy.op(*copy.args, **copy.kwargs)
                    states.append(compared())
        finally:
            put(before)
        if states[0] == states[1]:
            return name
    return None


_MOST = 200  #: objects that are looked at


def functions_of(trial: Trial) -> list[Callable[..., Any]]:
    """The kernels of an operator, as far as they are known: those of customops and of `torch.library.custom_op`."""
    op = _torch.library.torch_op_of(trial.name)
    found = [getattr(op, "_init_fn", None)]
    if trial.custom_op is not None:
        found += list(trial.custom_op._rules.kernel.kernels.values())
    return [fn for fn in found if fn is not None]


def caches_of(functions: list[Callable[..., Any]]) -> list[Any]:
    """The dicts, lists, sets and memoized functions that functions can reach."""
    found: list[Any] = []
    seen: set[int] = set()
    waiting: list[Any] = functions[::-1]
    while waiting and len(seen) <= _MOST:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, (dict, list, set)) or hasattr(value, "cache_clear"):
            found.append(value)
        waiting += [*_parts(value)][::-1]
    return found


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, types.MethodType):
        yield value.__self__
    fn = innermost(value) if callable(value) and not isinstance(value, type) else value
    if isinstance(fn, types.FunctionType):
        if not is_users(fn.__code__.co_filename):
            return
        for cell in fn.__closure__ or ():
            with contextlib.suppress(ValueError):  # it is empty
                yield cell.cell_contents
        yield from (fn.__globals__[name] for name in fn.__code__.co_names if name in fn.__globals__)
        yield from fn.__defaults__ or ()
        yield from vars(fn).values()
    elif type(value).__module__.partition(".")[0] not in ("builtins", "torch", "numpy", "customops"):
        yield from getattr(value, "__dict__", {}).values()


def size_of(cache: Any) -> int:
    return int(cache.cache_info().currsize) if hasattr(cache, "cache_clear") else len(cache)


@contextlib.contextmanager
def emptied(caches: list[Any]) -> Iterator[None]:
    """Containers are empty, and afterwards as they were. What a memoized function kept is gone."""
    before = [(cache, cache.copy()) for cache in caches if not hasattr(cache, "cache_clear")]
    try:
        for cache in caches:
            (cache.cache_clear if hasattr(cache, "cache_clear") else cache.clear)()
        yield
    finally:
        for cache, content in before:
            cache.clear()
            (cache.extend if isinstance(cache, list) else cache.update)(content)
