"""Settings of the program that a call has to leave as they are, and the generators of random numbers."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from customops import _compat
from customops.checks._calls import attempt, own_generators
from customops.checks._inputs import quiet, seeded
from customops.checks._trial import Trial

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
        _compat.kernel_state.set_deterministic(False, False)

    def make_other(self) -> None:
        """Set the same to what is not its default."""
        torch.set_default_dtype(torch.float64)
        _compat.kernel_state.set_deterministic(True, True)
        torch.set_num_threads(self.values["the number of threads"] + 1)

    def restore(self) -> None:
        now = Settings.now()
        for name, _, put in _SETTINGS:
            if now.values[name] != self.values[name]:
                put(self.values[name])
        if now.deterministic != self.deterministic:
            _compat.kernel_state.set_deterministic(*self.deterministic)
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
