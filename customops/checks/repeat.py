"""test_determinism, test_uninitialized_memory and test_state: equal calls have equal results, and leave nothing behind.

Each makes the same call several times: at once, in memory that holds something else, after other calls, and in other
settings of the program.
"""

from __future__ import annotations

import contextlib
import gc
import pickle
import random
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from customops import _torch
from customops._dispatch.random_states import RandomStates
from customops._places import innermost, is_users
from customops._rules.inspection import Inspection
from customops.checks import _memory
from customops.checks._inputs import has_threads, quiet, tensors_in
from customops.checks._outcome import NotExercised, require
from customops.checks._runs import (
    Results,
    attempt,
    call,
    compare,
    copied,
    first_difference,
    nudge,
    require_comparable,
    results_in,
    steady_results,
)
from customops.checks._trial import Trial
from customops.checks._variants import other_arguments, other_numbers, other_values, repeated
from customops.errors import KernelError

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


def check_determinism(trial: Trial) -> None:
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
    """Raise CheckError if an op that is tagged as random gives the same for two seeds, with other inputs as well."""
    takes_generator = any(argument.type.startswith("Generator") for argument in trial.schema.arguments)
    if takes_generator or first_difference(other, first, exact=True):
        return
    # Of weights of which one alone is not zero, there is one sample.
    equal = trial.map_floats(torch.ones_like)
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
    """Raise CheckError if numbers were drawn from a generator, and its state after the call is the one before."""
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
    """Return the outputs that keep what new memory is filled with; None if the operator does not take the inputs."""
    with _marked():
        marks = attempt(trial)
    if marks is None:
        return None
    # A sum with what was there would differ from it.
    return {name for name, value in marks.items() if all(bool((x == _mark_of(x)).all()) for x in _tensors(value))}


def _marked() -> Any:
    """Fill new memory that Python code asks for with marks: as it comes, it may still hold an earlier fill."""
    return _filling(_ALLOCATING, lambda tensor: tensor.detach().fill_(_mark_of(tensor)))


def _tensors(value: Any) -> list[torch.Tensor]:
    return list(filter(_memory.is_dense, tensors_in(value)))


def _is_fill(tensor: torch.Tensor) -> bool:
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().all())
    return tensor.dtype is torch.bool or bool((tensor == torch.iinfo(tensor.dtype).max).all())


@contextlib.contextmanager
def _deterministic(*, fill: bool) -> Iterator[None]:
    """Use deterministic algorithms where torch has them; with `fill`, fill new memory with NaN, or large numbers."""
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


@contextlib.contextmanager
def _filled() -> Iterator[None]:
    """Fill new memory of torch, and of numpy where it is loaded, with NaN or with large numbers."""
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


@contextlib.contextmanager
def _filling(names: Sequence[tuple[Any, str]], fill: Callable[[Any], Any]) -> Iterator[None]:
    """Fill what the functions of these names of modules and classes return."""
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
    """Return the number with which `_unwritten` fills new memory of this dtype."""
    return 77.25 if tensor.is_floating_point() or tensor.is_complex() else 77


# ----------------------------------------------------------------------------------------------------------------------
# test_state: a call neither depends on what happened before it, or around it, nor leaves anything behind.
#
# Calls with equal inputs have to have equal results: again after others, with a tensor that was written in between,
# with another number, and with autograd on and off, in inference mode, and with another default dtype. What a first
# call returned, and what it was given, is the same after a second call. Settings and generators stay as they were.

_COPIES = 3
_SPARES = 2048
_LARGEST_CACHE = 600  #: calls whose tensors may be kept
_DEFAULT_DTYPE = "the default dtype"
_EARLIER = "results depend on earlier calls"
_KEPT = (
    "something is kept between calls: a cache whose key lacks what the result depends on (values are not told by "
    "shape, id() or data_ptr()), a counter, a buffer; compute it in each call"
)


def check_state(trial: Trial) -> None:
    trial.require_data()
    trial = trial.detached()
    _check_operations(trial)
    _check_settings(trial)
    expected = steady_results(trial)
    other = other_values(trial)
    if other is not None:
        _check_caches(trial, other)
        _check_kept(trial, other)
        _check_released(trial)
        _check_shapes(trial, other)
    _check_reused(trial, other)
    again = attempt(trial)
    how = "called again, after calls with other values: "
    if again is None:
        raise trial.fault(_EARLIER, f"{how}the call: it fails", _KEPT)
    compare(trial, again, expected, _EARLIER, _KEPT, how=how)
    _check_states(trial, expected)


def _check_operations(trial: Trial) -> None:
    """Look at this call of an op with ``kernel_calls_torch=False``, as at the first call of each kernel."""
    definition = getattr(trial.custom_op, "_definition", None)
    if definition is None or definition.spec.kernel_calls_torch:
        return
    newest = definition.newest_kernels().values()
    before = {each.current_kernel: each.current_kernel.inspected for each in newest if each.current_kernel is not None}
    try:
        for current in before:
            current.inspected = Inspection(current, definition, compiled=False)
            current._look_for_observers()
        call(trial.copy())
    except KernelError as error:
        raise trial.finding(error.problem, got=error.got, fix=error.fix, where=error.where) from error
    except Exception:  # a derived input need not be accepted
        return
    finally:
        for current, inspected in before.items():
            current.inspected = inspected
            current._look_for_observers()


def _check_settings(trial: Trial) -> None:
    changed = None
    accepted = False
    for other in (False, True):
        with kept_settings() as before:
            # What an earlier call left changed does not change once more: so from the usual settings, and from others.
            torch.set_default_dtype(torch.float64 if other else torch.float32)
            _torch.dispatcher.set_deterministic(other, other)
            if other and has_threads():
                torch.set_num_threads(before.values["the number of threads"] + 1)
            start = Settings.now()
            accepted = attempt(trial) is not None or accepted
            changed = changed or start.change()
    if changed:
        raise trial.fault(
            f"a call changes a setting of the program: {changed[0]}",
            changed[1],
            "set it back in a finally clause, or use the context manager that torch has for it",
        )
    found = _reseeds(trial) if accepted else None
    if found:
        raise trial.fault(
            f"a call seeds the random numbers of {found}, of which the whole program takes",
            "whatever the state of its generator was, it is the same after the call",
            "use a generator of your own: torch.Generator().manual_seed(...), numpy.random.default_rng(...), "
            "random.Random(...)",
        )


def _check_caches(trial: Trial, other: Trial) -> None:
    """Empty the containers that grew in a call of a new size, and compare the results."""
    caches = _caches_of(trial.kernels)
    if not caches or trial.mutated:
        return
    sizes = list(map(_size_of, caches))
    for first, second in ((trial, other), (_enlarged(trial), _enlarged(other))):
        if attempt(first) is None:
            continue
        kept = attempt(second)
        grown = [cache for cache, size in zip(caches, sizes, strict=True) if _size_of(cache) > size]
        if kept is None or not grown:
            continue
        contents = [(cache, cache.copy()) for cache in grown if not hasattr(cache, "cache_clear")]
        try:
            for cache in grown:
                (cache.cache_clear if hasattr(cache, "cache_clear") else cache.clear)()
            fresh = attempt(second)
        finally:  # what a memoized function kept is gone
            for cache, content in contents:
                cache.clear()
                (cache.extend if isinstance(cache, list) else cache.update)(content)
        if fresh is not None:
            compare(trial, kept, fresh, _EARLIER, _KEPT, how="other than when what is kept is emptied: ")


def _check_kept(trial: Trial, other: Trial) -> None:
    """Raise CheckError if a second call changes what the first returned or was given, or returns the same memory."""
    first, second = trial.copy(), other.copy()
    try:
        outputs = call(first)
        results, given = results_in(first, outputs), copied(first.arguments)
        later = call(second)
    except Exception as error:
        raise NotExercised("a second call with other values fails") from error
    if first_difference(results_in(first, outputs), results, exact=True):
        raise trial.fault(
            "what a call returned is changed by the next call",
            "the first result, after a second call with other values, has other elements",
            "return new memory from each call, not a buffer that is kept",
        )
    if first_difference(first.arguments, given, exact=True):
        raise trial.fault(
            "a call writes to a tensor that an earlier call was given",
            "an argument of the first call, after a second call with tensors of its own, has other elements",
            "keep no tensors that a call was given",
        )
    returned = [one for one in tensors_in(outputs) if not any(_memory.share_memory(one, x) for x in first.tensors)]
    # Who writes to a result would change the next one.
    if any(_memory.share_memory(one, two) for one in returned for two in tensors_in(later)):
        raise trial.fault(
            "two calls return the same memory",
            "a tensor that the second call returned shares memory with one of the first",
            "return new memory from each call, e.g. a clone of what is kept: compiled code, and users, write to "
            "results",
        )


def _check_released(trial: Trial) -> None:
    """Raise CheckError if tensors of calls stay alive. A cache may hold those of the last few hundred calls."""
    calls = [_tensors_of_a_call(trial) for _ in range(_COPIES)]

    def are_alive() -> bool:
        """Return whether a tensor of each call is alive, another one each time."""
        alive = [{id(tensor()) for tensor in tensors if tensor() is not None} for tensors in calls]
        return all(found.difference(*alive[:i], *alive[i + 1 :]) for i, found in enumerate(alive))

    if not are_alive():
        return
    for _ in range(_LARGEST_CACHE):
        _tensors_of_a_call(trial)
    gc.collect()
    if are_alive():
        raise trial.fault(
            "each call keeps tensors alive: the memory of the program grows",
            f"tensors of a call are in use {_LARGEST_CACHE} calls after it",
            f"hold arguments and results by weakref.ref, or in a cache of fewer than {_LARGEST_CACHE} entries",
        )


def _tensors_of_a_call(trial: Trial) -> list[weakref.ref[torch.Tensor]]:
    copy = trial.copy()
    try:
        outputs = call(copy)
    except Exception:  # it may not take the same inputs twice
        return []
    given = set(map(id, trial.tensors))
    return [weakref.ref(tensor) for tensor in tensors_in((copy.args, copy.kwargs, outputs)) if id(tensor) not in given]


def _check_reused(trial: Trial, other: Trial | None) -> None:
    """Call again with the same tensors: after they were written, and with another number."""
    if trial.mutated:
        return
    changes = [] if other is None else [("called again with a tensor that was written in between: ", other)]
    changes += [("called with the same tensors and another number: ", each) for each in other_numbers(trial)]
    for how, changed in changes:
        fresh, *copies = _unknown_copies(changed, *[trial] * (_COPIES if changed is other else 1))
        found = []
        try:
            expected = results_in(fresh, call(fresh))
            for copy in copies:
                call(copy)
                with torch.no_grad():
                    for tensor, old, new in zip(copy.tensors, trial.tensors, changed.tensors, strict=True):
                        if new is not old:
                            tensor.copy_(new)
                again = changed.replaced(dict(zip(map(id, changed.tensors), copy.tensors, strict=True)))
                found.append(results_in(again, call(again)))
        except Exception:  # a derived input need not be accepted, and tensors whose elements overlap cannot be written
            continue
        for actual in found:
            compare(trial, actual, expected, _EARLIER, _KEPT, how=how)


def _unknown_copies(*trials: Trial) -> list[Trial]:
    """Make copies that no cache of earlier calls knows, by id or by address.

    New tensors get the ids of freed ones. Spare tensors take such ids first.
    """
    spares = [torch.empty(0) for _ in range(_SPARES)]
    copies = [trial.copy(unseen=True) for trial in trials]
    del spares
    return copies


def _check_shapes(trial: Trial, other: Trial) -> None:
    """Compare float32 with float64 for a new size, after a call of that size with other values."""
    if not trial.tensors or not all(t.dtype is torch.float32 or not t.is_floating_point() for t in trial.tensors):
        return
    enlarged, other_enlarged = _enlarged(trial), _enlarged(other)
    if not any(tensor.dtype is torch.float32 for tensor in enlarged.tensors):
        return
    wide = other_enlarged.in_float64()
    in_order = (wide, enlarged, other_enlarged, wide.map_tensors(nudge(1e-6)))
    truth, first, second, near = map(_attempt_in_float64, in_order)
    if truth is None or first is None or second is None or near is None:
        return
    if first_difference(near, truth, rtol=1e-4):
        return  # too steep to tell
    stale = first_difference(second, truth, rtol=1e-2)
    if stale and not first_difference(_attempt_in_float64(enlarged) or first, first, rtol=1e-4):
        started = _attempt_in_float64(enlarged.in_float64())
        if started is None or first_difference(first, started, rtol=1e-2):
            return  # float32 and float64 differ in any case
        raise trial.fault(_EARLIER, f"after a call with other values of the same shape: {': '.join(stale)}", _KEPT)


def _enlarged(trial: Trial) -> Trial:
    """Make every dimension of more than one element twice and a bit as large, by repetition."""
    return trial.map_tensors(
        lambda _, x: x if x.numel() > 10_000 else repeated(x, {size: 2 * size + 1 for size in x.shape if size > 1})
    )


def _attempt_in_float64(trial: Trial) -> Results | None:
    """Return the floating-point results of a call, as float64."""
    results = attempt(trial)
    if results is None:
        return None
    floating = {n: v for n, v in results.items() if isinstance(v, torch.Tensor) and v.is_floating_point()}
    return {name: value.double() for name, value in floating.items()}


def _check_states(trial: Trial, expected: Results) -> None:
    if trial.is_builtin:
        return
    states: dict[str, contextlib.AbstractContextManager[Any]] = {
        "whether gradients are recorded": torch.no_grad(),
        "inference mode": torch.inference_mode(),
    }
    if any(tensor.is_floating_point() or tensor.is_complex() for tensor in trial.tensors):
        states[_DEFAULT_DTYPE] = contextlib.nullcontext()
    for name, state in states.items():
        with kept_settings(), state:
            if name == _DEFAULT_DTYPE:
                torch.set_default_dtype(torch.float64)
            actual = attempt(trial)
        if actual is None:
            continue
        dtypes, expected_dtypes = ([tensor.dtype for tensor in tensors_in(each)] for each in (actual, expected))
        if name == _DEFAULT_DTYPE and dtypes == expected_dtypes:
            continue  # random numbers of its own, say, or tables of another precision
        compare(
            trial,
            actual,
            expected,
            f"results depend on a setting of the program: {name}",
            "take dtypes and devices from the inputs: torch.zeros(n, dtype=x.dtype, device=x.device), "
            "x.new_zeros(n), torch.tensor(1.0, dtype=x.dtype)",
            how="other than by default: ",
        )


# Settings of the program that a call has to leave as they are, and the generators of random numbers


_DENORMAL = sys.float_info.min / 2
#: What it is, how to ask for it, how to set it.
_SETTINGS: tuple[tuple[str, Callable[[], Any], Callable[[Any], Any]], ...] = (
    ("whether gradients are recorded", torch.is_grad_enabled, torch.set_grad_enabled),
    (_DEFAULT_DTYPE, torch.get_default_dtype, torch.set_default_dtype),
    ("the number of threads", torch.get_num_threads, torch.set_num_threads),
    (
        "whether autocast is on",
        lambda: torch.is_autocast_enabled("cpu"),
        lambda on: torch.set_autocast_enabled("cpu", on),
    ),
    ("the precision of matrix products", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (
        "whether denormal numbers are taken for zero",
        lambda: _DENORMAL * 1.0 == 0.0,  # the setting is one of the processor, for floats of Python as well
        lambda flushed: bool(torch.set_flush_denormal(flushed)),
    ),
    ("whether anomalies are detected", torch.is_anomaly_enabled, torch.set_anomaly_enabled),
    (
        "whether algorithms have to be deterministic",
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda modes: _torch.dispatcher.set_deterministic(*modes),
    ),
    (
        "how numpy treats errors (numpy.seterr)",
        lambda: sys.modules["numpy"].geterr() if "numpy" in sys.modules else None,
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
        """Return what has changed, and from what to what."""
        for name, value in Settings.now().values.items():
            before = self.values[name]
            if before is not None and value != before:
                is_long = isinstance(before, (tuple, dict))
                text = "it is another" if is_long else f"it was {before}, and is {value}"
                return name, f"{text} after the call"
        return None

    def restore(self) -> None:
        for name, get, put in _SETTINGS:
            if self.values[name] is not None and get() != self.values[name]:
                put(self.values[name])


@contextlib.contextmanager
def kept_settings() -> Iterator[Settings]:
    before = Settings.now()
    try:
        yield before
    finally:
        before.restore()


def _reseeds(trial: Trial) -> str | None:
    """Return the library whose generator has the same state after the call whatever it was before, or None."""
    numpy: Any = sys.modules.get("numpy")
    libraries: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[int], Any]]] = {
        "torch": (torch.get_rng_state, torch.set_rng_state, torch.default_generator.manual_seed),
        "random": (random.getstate, random.setstate, random.seed),
    }
    if numpy is not None:
        libraries["numpy"] = (numpy.random.get_state, numpy.random.set_state, numpy.random.seed)
    for name, (get, put, seed) in libraries.items():
        before = get()
        try:
            if _state_after(trial, seed, 101, get) == _state_after(trial, seed, 202, get):
                return name
        finally:
            put(before)
    return None


def _state_after(trial: Trial, seed: Callable[[int], Any], number: int, get: Callable[[], Any]) -> bytes:
    """Return the state of a generator after a call, seeded with this number before it."""

    def seeded_call(*args: Any, **kwargs: Any) -> bytes:
        seed(number)
        with contextlib.suppress(Exception):  # the state is what counts
            trial.op(*args, **kwargs)
        state = get()
        return pickle.dumps(state.tolist() if isinstance(state, torch.Tensor) else state)

    state: bytes = call(trial.copy(), op=seeded_call)
    return state


# What functions keep between calls


def _caches_of(functions: list[Callable[..., Any]]) -> list[Any]:
    """Find the dicts, lists, sets and memoized functions that functions can reach."""
    found: list[Any] = []
    seen: set[int] = set()
    waiting: list[Any] = functions[::-1]
    while waiting and len(seen) <= 200:
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


def _size_of(cache: Any) -> int:
    return int(cache.cache_info().currsize) if hasattr(cache, "cache_clear") else len(cache)
