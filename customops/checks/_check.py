"""A check: a row of `CHECKS`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from customops.checks._trial import Case, Trial

#: How much `customops.check` tries, from least to most.
Effort = Literal["quick", "normal", "thorough"]
EFFORTS: tuple[Effort, ...] = ("quick", "normal", "thorough")

#: Picks, of the inputs that an operator accepts, those that a check runs on. The first is the first sample.
Selection = Callable[[Sequence[Case], Effort], Iterable[Case]]


def samples(cases: Sequence[Case], effort: Effort) -> Iterable[Case]:
    """The samples without changes; in a quick run only the first."""
    unchanged = [case for case in cases if case.kind == "sample"]
    return unchanged[:1] if effort == "quick" else unchanged


def everything(cases: Sequence[Case], effort: Effort) -> Iterable[Case]:
    """Every input there is."""
    return cases


def of_kinds(*kinds: str, each: int | None = None, **limits: int) -> Selection:
    """The samples, and the inputs of these kinds; at most `each` of a kind in a run that is not thorough.

    Args:
        limits: kinds, too, of which there may be others than `each`.
    """

    def select(cases: Sequence[Case], effort: Effort) -> Iterable[Case]:
        yield from samples(cases, effort)
        for kind, limit in {**dict.fromkeys(kinds, each), **limits}.items():
            yield from [case for case in cases if case.kind == kind][: None if effort == "thorough" else limit]

    return select


def steered(cases: Sequence[Case], effort: Effort) -> Iterable[Case]:
    """The inputs with other numbers, flags, indices, counts or masks, and the numbers of floating point of the sample.

    It is by these that a kernel chooses what to do; few choose by the others. Negative numbers are left out where the
    sample has none: what a mode or a count of -1 means, not every kernel asks.
    """
    given = {case.sample: case.trial for case in cases if case.kind == "sample"}
    for case in cases:
        sample = given.get(case.sample)
        if sample is None or case.kind not in ("value", "number", "choice", "optional"):
            continue
        known = {id(tensor) for tensor in sample.tensors}
        if any(tensor.is_floating_point() and id(tensor) not in known for tensor in case.trial.tensors):
            continue
        numbers = {name: value for name, value in case.trial.arguments.items() if isinstance(value, int | float)}
        if not any(value < 0 and sample.arguments.get(name) != value for name, value in numbers.items()):
            yield case


def indexed(cases: Sequence[Case], effort: Effort) -> Iterable[Case]:
    """The inputs with other integers and bools in tensors, and the numbers of floating point of the sample."""
    found = [case for case in steered(cases, effort) if case.kind == "value"]
    return found if effort == "thorough" else found[:6]


def both(first: Selection, second: Selection) -> Selection:
    """What one picks, then what only the other picks."""

    def select(cases: Sequence[Case], effort: Effort) -> Iterable[Case]:
        picked = {id(case): case for case in itertools.chain(first(cases, effort), second(cases, effort))}
        return picked.values()

    return select


@dataclass(frozen=True)
class Check:
    """One row of `CHECKS`.

    Attributes:
        run: the check, a function of a `Trial`. It raises CheckError for a fault, and NotExercised if the input gives
            it nothing to test. It does not change the tensors of the trial.
        about: what it compares, in a few words.
        inputs: selects the inputs that it runs on.
        effort: the lowest effort of `customops.check` at which it runs.
        after: checks whose failures are the likely cause of a failure of this one. If one of them fails, this check
            does not run.
        takes_reference: it compares with the reference function. If there is one, the check runs at any effort.
    """

    run: Callable[[Trial], None]
    about: str
    inputs: Selection = samples
    effort: Effort = "normal"
    after: tuple[str, ...] = ()
    takes_reference: bool = False

    def __call__(self, trial: Trial) -> None:
        self.run(trial)
