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
from customops.checks._runs import Results, attempt, first_difference, require_comparable, where_of
from customops.checks._trial import Trial
from customops.errors import CheckError

_TAG = torch.Tag.nondeterministic_seeded


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
        _judge_repeated(trial, found)
    other = attempt(trial, moved=True)
    if other is not None:
        _judge_seeded(trial, first, other)
    _judge_generator(trial)


def _judge_repeated(trial: Trial, found: tuple[str, str]) -> None:
    with is_filled():
        first, second = attempt(trial), attempt(trial)
    if first is not None and second is not None and not first_difference(second, first, rtol=trial.rtol):
        raise NotExercised("the difference is in uninitialized memory: see test_uninitialized_memory")
    raise CheckError(
        "two calls with equal inputs and the same torch seed have different results",
        op=trial.name,
        got=": ".join(found),
        where=where_of(trial),
        fix="take random numbers from torch (torch.rand, or a generator seeded by torch.randint), not from numpy or "
        "random; and have nothing kept from earlier calls",
    )


def _judge_seeded(trial: Trial, first: Results, other: Results) -> None:
    found = first_difference(other, first, rtol=trial.rtol)
    if not found or _TAG in trial.op.tags or trial.op.namespace in ("aten", "prims"):
        return
    if _given_generators(trial):
        raise _ignores_generator(trial, found)
    raise CheckError(
        "results are random, and the operator has no tag that says so",
        op=trial.name,
        expected="the tag nondeterministic_seeded, or the same result whatever the seed",
        got=": ".join(found),
        where=where_of(trial),
        fix="define it with tags=(torch.Tag.nondeterministic_seeded,): without the tag compilers may merge two calls, "
        "or compute one again in the backward",
    )


def _judge_generator(trial: Trial) -> None:
    """Does a call that is given a generator depend on another?"""
    if trial.op.namespace in ("aten", "prims"):
        return
    names = [a.name for a in trial.schema.positional if a.type.startswith("Generator")]
    names += [a.name for a in trial.schema.keyword_only if a.type.startswith("Generator")]
    if not names:
        return
    device = trial.tensors[0].device if trial.tensors else torch.device("cpu")
    if device.type != "cpu":
        return
    given = trial.with_arguments(**{name: torch.Generator().manual_seed(1) for name in names})
    first, other = attempt(given), attempt(given, moved=True)
    if first is None or other is None:
        return
    found = first_difference(other, first, rtol=trial.rtol)
    if found:
        raise _ignores_generator(trial, found)


def _given_generators(trial: Trial) -> bool:
    return any(isinstance(value, torch.Generator) for value in trial.arguments.values())


def _ignores_generator(trial: Trial, found: tuple[str, str]) -> CheckError:
    return CheckError(
        "a call that is given a generator depends on torch's default generator",
        op=trial.name,
        got=": ".join(found),
        where=where_of(trial),
        fix="pass generator=generator on to each function of torch that draws numbers",
    )
