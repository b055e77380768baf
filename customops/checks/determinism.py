"""test_determinism and test_uninitialized_memory: equal calls have equal results."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from customops import _torch
from customops._dispatch.random_states import RandomStates
from customops.checks._inputs import quiet, tensors_in
from customops.checks._outcome import NotExercised, require
from customops.checks._runs import Results, attempt, compare, first_difference, require_comparable
from customops.checks._trial import Trial
from customops.checks._variants import other_arguments

# ----------------------------------------------------------------------------------------------------------------------
# test_determinism: results differ by randomness alone that torch governs and the schema tells of.
#
# The operator is called twice from the same seed, and once from another. Two calls from one seed that differ take their
# randomness from elsewhere, or depend on something else that changes. A call that depends on the seed belongs to an
# operator with the tag ``nondeterministic_seeded``: without it, compilers take two such calls for one. A call that was
# given a generator takes its numbers from that one.
#
# Differences within the tolerance of the dtype are sums in another order. Memory that nobody wrote is left to
# test_uninitialized_memory.

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
    require(first, "the operator neither returns nor writes anything")
    found = first_difference(second, first, rtol=trial.rtol)
    if found:
        with _filled():
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
    if other is not None and torch.Tag.nondeterministic_seeded in trial.op.tags:
        _check_seed(trial, first, other)
    elif other is not None:
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
        _check_advanced(given, names, first)


def _check_seed(trial: Trial, first: Results, other: Results) -> None:
    """What is tagged as random depends on the seed, if not with these values, numbers and choices, then with others."""
    takes_generator = any(argument.type.startswith("Generator") for argument in trial.schema.arguments)
    if takes_generator or first_difference(other, first, exact=True):
        return
    # Of weights of which one alone is not zero, there is one sample.
    equal = trial.map_tensors(lambda _, x: torch.ones_like(x) if x.is_floating_point() else x)
    for each in (equal, *other_arguments(trial, "normal")):
        one, two = attempt(each), attempt(each, moved=True)
        if one is not None and two is not None and first_difference(one, two, exact=True):
            return
    if sum(tensor.numel() for tensor in tensors_in([*first.values()])) <= _FEW:
        copy = trial.copy()
        states = RandomStates([*copy.args, *copy.kwargs.values()])
        with quiet(), torch.no_grad(), states.again():
            copy.op(*copy.args, **copy.kwargs)
            if states.have_changed():
                return  # numbers were drawn: of few elements, two samples may be the same
    raise trial.fault(
        "the operator is tagged as random, and results do not depend on torch's seed",
        "the same results after torch.manual_seed(0) and after torch.manual_seed(12345)",
        "draw from torch's generator: torch.rand, or a seed by torch.randint for another library; or leave out the tag",
    )


_FEW = 8  #: elements of results, which may be the same by chance


def _check_advanced(given: Trial, names: list[str], first: Results) -> None:
    """A generator that numbers were drawn from has another state after the call."""
    generators = {name: torch.Generator().manual_seed(2) for name in names}
    reseeded = given.with_arguments(**generators)
    results = attempt(reseeded)
    if results is None or not first_difference(results, first):
        return  # nothing was drawn
    before = [generator.get_state() for generator in generators.values()]
    copy = reseeded.copy()
    with quiet():
        copy.op(*copy.args, **copy.kwargs)
    after = [generator.get_state() for generator in generators.values()]
    if all(torch.equal(one, other) for one, other in zip(before, after, strict=True)):
        raise given.fault(
            "a call leaves the generator that it is given as it was: the next call draws the same numbers",
            "the state of the generator after the call is the one before it",
            "pass the generator itself on to torch's functions, and no copy of it, nor one with its seed",
            argument=names[0],
        )


# ----------------------------------------------------------------------------------------------------------------------
# test_uninitialized_memory: no result is what happened to be in memory.
#
# The operator runs with all new memory filled with NaN (integers: with the largest number), and again with memory as it
# comes, or filled with another number. All else is the same, so a result that differs was never written, or was
# computed from what was not. An output no element of which is written is taken for a work space, unless that is so for
# empty inputs alone.


def check_memory(trial: Trial) -> None:
    require_comparable(trial)
    trial = trial.detached()
    with _deterministic(fill=False), _marked():
        ordinary = attempt(trial)
    with _filled():
        filled, again = attempt(trial), attempt(trial)
    if ordinary is None or filled is None or again is None:
        raise NotExercised("the operator does not take these inputs with deterministic algorithms")
    require(not first_difference(again, filled), "equal calls have different results: there is nothing to compare with")
    if any(all(_is_fill(tensor) for tensor in _tensors(value)) for value in filled.values()):
        work_space = _unwritten(trial) or set()
        if work_space and any(tensor.numel() == 0 for tensor in trial.tensors):
            with_elements = _unwritten(
                trial.map_tensors(lambda _, x: x if x.numel() else x.new_ones([size or 2 for size in x.shape]))
            )
            if with_elements is not None:
                work_space &= with_elements
        ordinary = {name: value for name, value in ordinary.items() if name not in work_space}
    found = first_difference(filled, ordinary, rtol=trial.rtol)
    if found:
        raise trial.fault(
            "a result depends on memory that was never written",
            got=f"{found[0]}, where new memory is filled, with two values: {found[1]}",
            fix="write every element of what torch.empty, empty_like, new_empty or numpy.empty returned, also at the "
            "ends and for small sizes; or use zeros",
        )


def _unwritten(trial: Trial) -> set[str] | None:
    """The outputs that keep what new memory is filled with; None if the operator does not take the inputs."""
    with _marked():
        marks = attempt(trial)
    if marks is None:
        return None
    # A sum with what was there would differ from it.
    return {name for name, value in marks.items() if all(bool((x == _mark_of(x)).all()) for x in _tensors(value))}


def _marked() -> Any:
    """New memory that Python code asks for is filled with marks: as it comes, it may still hold an earlier fill."""
    return _filling(_ALLOCATING, lambda tensor: tensor.detach().fill_(_mark_of(tensor)))


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tensors_in(value) if leaf.layout is torch.strided and not leaf.is_quantized]


def _is_fill(tensor: torch.Tensor) -> bool:
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().all())
    return tensor.dtype is torch.bool or bool((tensor == torch.iinfo(tensor.dtype).max).all())


@contextmanager
def _deterministic(*, fill: bool) -> Iterator[None]:
    """Deterministic algorithms, where there are any; with `fill`, torch fills new memory with NaN, or large numbers."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    filling = settings.fill_uninitialized_memory
    _torch.dispatcher.set_deterministic(True, True)
    settings.fill_uninitialized_memory = fill
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = filling
        _torch.dispatcher.set_deterministic(*before)


@contextmanager
def _filled() -> Iterator[None]:
    """New memory of torch, and of numpy where it is loaded, is filled with NaN, or with large numbers."""
    numpy: Any = sys.modules.get("numpy")

    def fill(array: Any) -> None:
        if array.dtype.kind in "fc":
            array.fill(float("nan"))
        elif array.dtype.kind in "iu":
            array.fill(numpy.iinfo(array.dtype).max)

    names = [(numpy, name) for name in ("empty", "empty_like")] if numpy is not None else []
    with _deterministic(fill=True), _filling(names, fill):
        yield


#: What Python code calls for new memory.
_ALLOCATING = (
    *((torch, name) for name in ("empty", "empty_like", "empty_strided")),
    *((torch.Tensor, name) for name in ("new_empty", "new_empty_strided")),
)


@contextmanager
def _filling(names: Sequence[tuple[Any, str]], fill: Callable[[Any], Any]) -> Iterator[None]:
    """What the functions of these names of modules and classes return is filled."""
    before = [(owner, name, getattr(owner, name)) for owner, name in names]
    try:
        for owner, name, make in before:
            setattr(owner, name, _and_fill(make, fill))
        yield
    finally:
        for owner, name, make in before:
            setattr(owner, name, make)


def _and_fill(make: Callable[..., Any], fill: Callable[[Any], Any]) -> Callable[..., Any]:
    def empty(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        fill(made)
        return made

    return empty


def _mark_of(tensor: torch.Tensor) -> float:
    """What `_unwritten` fills new memory of this dtype with."""
    return 77.25 if tensor.is_floating_point() or tensor.is_complex() else 77
