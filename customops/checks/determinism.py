"""test_determinism: equal calls have equal results, but for randomness that torch governs and the schema tells of.

The operator is called twice from the same seed, and once from another. Two calls from one seed that differ take their
randomness from elsewhere, or depend on something else that changes. A call that depends on the seed belongs to an
operator with the tag ``nondeterministic_seeded``: without it, compilers take two such calls for one. A call that was
given a generator takes its numbers from that one.

Differences within the tolerance of the dtype are sums in another order. Memory that nobody wrote is left to
test_uninitialized_memory.
"""

from __future__ import annotations

import torch

from customops.checks._fills import is_filled
from customops.checks._outcome import NotExercised
from customops.checks._runs import attempt, compare, first_difference, require_comparable
from customops.checks._trial import Trial

_IGNORES_GENERATOR = (
    "a call that is given a generator depends on torch's default generator",
    "pass generator=generator on to each function of torch that draws numbers",
)


def check(trial: Trial) -> None:
    require_comparable(trial)
    trial = trial.detached()
    first, second = attempt(trial), attempt(trial)
    if first is None or second is None:
        raise NotExercised("the operator does not take these inputs without gradients")
    if not first:
        raise NotExercised("the operator neither returns nor writes anything")
    found = first_difference(second, first, rtol=trial.rtol)
    if found:
        with is_filled():
            first, second = attempt(trial), attempt(trial)
        if first is not None and second is not None and not first_difference(second, first, rtol=trial.rtol):
            raise NotExercised("the difference is in uninitialized memory: see test_uninitialized_memory")
        raise trial.fault(
            "two calls with equal inputs and the same torch seed have different results",
            got=": ".join(found),
            fix="take random numbers from torch (torch.rand, or a generator seeded by torch.randint), not from numpy "
            "or random; and have nothing kept from earlier calls",
        )
    if trial.is_builtin:
        return
    other = attempt(trial, moved=True)
    if other is not None and torch.Tag.nondeterministic_seeded not in trial.op.tags:
        if any(isinstance(value, torch.Generator) for value in trial.arguments.values()):
            compare(trial, other, first, *_IGNORES_GENERATOR)
        compare(
            trial,
            other,
            first,
            "results are random, and the operator has no tag that says so",
            "define it with tags=(torch.Tag.nondeterministic_seeded,): without the tag compilers may merge two calls, "
            "or compute one again in the backward",
            expected="the tag nondeterministic_seeded, or the same result whatever the seed",
        )
    # Does a call that is given a generator depend on another?
    names = [a.name for a in trial.schema.arguments if a.type.startswith("Generator")]
    if not names or (trial.tensors and trial.tensors[0].device.type != "cpu"):
        return
    given = trial.with_arguments(**{name: torch.Generator().manual_seed(1) for name in names})
    first, other = attempt(given), attempt(given, moved=True)
    if first is not None and other is not None:
        compare(trial, other, first, *_IGNORES_GENERATOR)
