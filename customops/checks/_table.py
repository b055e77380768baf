"""The table of checks: what each compares, on which inputs it runs, and after which others."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from customops import _torch
from customops.checks import (
    aot_dispatch,
    autocast,
    autograd_registration,
    backward,
    compiled,
    faketensor,
    grad_modes,
    gradients,
    kernels,
    laws,
    modes,
    precision,
    repeat,
    sharding,
    threads,
    unchecked,
    vmap,
    writes,
)
from customops.checks._trial import EFFORTS, Case, Effort, Trial

#: Picks, of the inputs that an operator accepts, those that a check runs on. The first is the first sample.
Selection = Callable[[Sequence[Case], Effort], Iterable[Case]]


def samples(cases: Sequence[Case], effort: Effort) -> Iterable[Case]:
    """The samples without changes; in a quick run only the first."""
    unchanged = [case for case in cases if case.kind == "sample"]
    return unchanged[:1] if effort == "quick" else unchanged


def first(cases: Sequence[Case], effort: Effort) -> Iterable[Case]:
    """The first sample."""
    return cases[:1]


def forms(cases: Sequence[Case], effort: Effort) -> Iterable[Case]:
    """The first sample of each form, at most two of them: what traces a call does not see values of tensors."""
    found: dict[Any, Case] = {}
    for case in samples(cases, effort):
        found.setdefault(_form(case), case)
    return [*found.values()][: None if effort == "thorough" else 2]


def first_or_forms(cases: Sequence[Case], effort: Effort) -> Iterable[Case]:
    """The first sample; in a thorough run the first of each form."""
    return forms(cases, effort) if effort == "thorough" else first(cases, effort)


def _form(case: Case) -> Any:
    def of(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.layout, value.dim(), value.requires_grad, value.is_contiguous()
        return type(value) if isinstance(value, int | float) and not isinstance(value, bool) else repr(value)

    leaves, spec = _torch.trees.tree_flatten((case.trial.args, case.trial.kwargs))
    return *map(of, leaves), str(spec)


def everything(cases: Sequence[Case], effort: Effort) -> Iterable[Case]:
    """Every input there is."""
    return cases


def of_kinds(
    *kinds: str,
    each: int | None = None,
    start: Selection = samples,
    also: Selection | None = None,
    **limits: int | None,
) -> Selection:
    """The samples (those that `start` picks), the inputs of these kinds, and what `also` picks.

    At most `each` of a kind in a run that is not thorough; `limits` are kinds of which there may be others than `each`,
    None for all.
    """

    def select(cases: Sequence[Case], effort: Effort) -> Iterable[Case]:
        picked = list(start(cases, effort))
        for kind, limit in {**dict.fromkeys(kinds, each), **limits}.items():
            picked += [case for case in cases if case.kind == kind][: None if effort == "thorough" else limit]
        picked += also(cases, effort) if also is not None else ()
        return {id(case): case for case in picked}.values()

    return select


def with_reference(select: Selection) -> Selection:
    """All inputs, if they have a reference function; else what `select` picks."""

    def chosen(cases: Sequence[Case], effort: Effort) -> Iterable[Case]:
        return cases if all(case.trial.reference is not None for case in cases) else select(cases, effort)

    return chosen


def without_data(select: Selection) -> Selection:
    """What `select` picks, but of inputs that differ in data alone, as do their results, the first: a fake has none."""

    def chosen(cases: Sequence[Case], effort: Effort) -> Iterable[Case]:
        if effort == "thorough":
            return select(cases, effort)
        found: dict[Any, Case] = {}
        for case in select(cases, effort):
            found.setdefault((case.trial.without_data, case.results), case)
        return found.values()

    return chosen


def fewer_if(condition: Callable[[Trial], Any], few: Selection, select: Selection = samples) -> Selection:
    """What `few` picks where the condition holds for the first input, unless the run is thorough; else as `select`.

    With a reference function few inputs will do for what is derived from it, and for what says less than a comparison
    with it: test_kernels compares on all inputs.
    """

    def chosen(cases: Sequence[Case], effort: Effort) -> Iterable[Case]:
        return (few if effort != "thorough" and condition(cases[0].trial) else select)(cases, effort)

    return chosen


def named(cases: Sequence[Case], effort: Effort) -> Iterable[Case]:
    """The inputs that were changed to what the code of the op mentions."""
    found = [case for case in cases if case.is_named]
    return found if effort == "thorough" else found[:12]


def deeper(cases: Sequence[Case], effort: Effort) -> Iterable[Case]:
    """The first input of each sample that has one more dimension."""
    found = [case for case in cases if case.kind == "size" and case.label.endswith("one more dimension")]
    return {case.sample: case for case in reversed(found)}.values()


def steered(cases: Sequence[Case], effort: Effort) -> Iterable[Case]:
    """The inputs with other numbers, flags, indices, counts or masks, by which kernels choose what to do.

    Tensors of floating point are the sample's. Negative numbers are left out where the sample has none: what a mode or
    a count of -1 means, not every kernel asks.
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


def _has_reference(trial: Trial) -> bool:
    return trial.reference is not None


def _fake_is_derived(trial: Trial) -> bool:
    return trial.fake_is_reference


def _gradient_is_derived(trial: Trial) -> bool:
    return trial.gradient_is_reference


def _is_traced_from_reference(trial: Trial) -> bool:
    """Are the fake impl and the gradients, if there are any, those of the reference function?"""
    return trial.fake_is_reference and (trial.gradient_is_reference or not trial.custom_op._rules.autograd.formulas)


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
        effort_if: a condition on the first sample, and the lowest effort if it holds.
    """

    run: Callable[[Trial], None]
    about: str
    inputs: Selection = samples
    effort: Effort = "normal"
    after: tuple[str, ...] = ()
    effort_if: tuple[Callable[[Trial], bool], Effort] | None = None

    def effort_for(self, trial: Trial) -> Effort:
        """The lowest effort at which it runs for an operator with this first sample."""
        return self.effort_if[1] if self.effort_if is not None and self.effort_if[0](trial) else self.effort

    def __call__(self, trial: Trial) -> None:
        self.run(trial)


#: What explains failures of many others: a call that writes what it must not, or is not the same twice.
_CALL = ("test_schema", "test_determinism", "test_uninitialized_memory", "test_state")
#: A kernel that is wrong for some inputs, whatever is then done with it.
_KERNEL = (*_CALL, "test_layouts", "test_writes", "test_batches", "test_permutations")
_FAKE = ("test_schema", "test_faketensor")
_COMPILED = (*_CALL, *_FAKE, "test_aot_dispatch_dynamic")
_WAYS = ("choice", "optional", "list")  #: kinds of inputs for which code goes other ways
_KINDS = (*_WAYS, "size", "dtype", "layout", "value", "number")  #: the common kinds of inputs
_DIFFERENTIATED = ("value", "choice", "same", "optional", "padding", "broadcast")  #: kinds of inputs
_GRADIENTS = (*_KERNEL, "test_autograd_registration", "test_gradients")

#: The checks by name, in the order in which they run: a check whose failures explain those of others comes first. No
#: name is a prefix of another one, because names of generated tests begin with them.
CHECKS: Mapping[str, Check] = MappingProxyType(
    {
        # What a call does to memory, and whether it does the same again.
        "test_schema": Check(
            writes.check_schema, "what the kernel writes and aliases, against the schema", everything, "quick"
        ),
        "test_determinism": Check(repeat.check_determinism, "two calls, and the seed of each", effort="quick"),
        "test_uninitialized_memory": Check(
            repeat.check_memory,
            "results in filled memory against results in memory as it comes",
            of_kinds("size", "dtype", each=4, size=16, also=lambda *of: [*steered(*of), *named(*of)]),
            "quick",
        ),
        "test_state": Check(
            repeat.check_state,
            "a call against the same call after others, in other settings",
            after=("test_determinism", "test_uninitialized_memory"),
        ),
        "test_layouts": Check(
            writes.check_layouts,
            "strided inputs against contiguous ones",
            of_kinds("layout"),
            "quick",
            after=("test_schema", "test_determinism", "test_uninitialized_memory"),
        ),
        "test_writes": Check(
            writes.check_writes,
            "memory around tensors, and writes and aliases that the schema declares",
            of_kinds("layout", "size", "dtype", "choice", "list", each=4, layout=None),
            "quick",
            after=("test_schema", "test_layouts"),
        ),
        "test_unchecked": Check(
            unchecked.check,
            "calls of an op with check= or bypass=True against calls that are checked",
            of_kinds("layout", "dtype", each=1),
            after=_CALL,
        ),
        # The fake impl.
        "test_faketensor": Check(
            faketensor.check,
            "fake impl against kernel",
            fewer_if(_fake_is_derived, without_data(of_kinds(*_KINDS, each=1)), without_data(everything)),
            "quick",
        ),
        "test_symbolic_sizes": Check(
            faketensor.check_symbolic_sizes,
            "fake impl on symbolic sizes against the kernel on several sizes",
            fewer_if(
                _fake_is_derived,
                of_kinds(*_WAYS, each=1, start=first),
                without_data(of_kinds(*_WAYS, "layout", "value", "number", each=1, start=forms)),
            ),
            after=_FAKE,
        ),
        "test_errors": Check(
            faketensor.check_errors, "wrong calls that the fake impl refuses against the kernel", after=_FAKE
        ),
        "test_late_errors": Check(
            functools.partial(faketensor.check_errors, late=True),
            "wrong calls that the kernel refuses against the fake impl",
            effort="thorough",
            after=_FAKE,
        ),
        # What the kernel computes.
        "test_batches": Check(
            laws.check_batches,
            "elements of a batch against the same ones in batches of other sizes",
            fewer_if(_has_reference, first, lambda *of: [*samples(*of), *deeper(*of), *indexed(*of)]),
            after=_CALL,
        ),
        "test_kernels": Check(
            kernels.check,
            "kernels against each other, and against a reference function",
            with_reference(
                of_kinds(
                    *("size", "dtype", "value", "number", "choice", "layout", "broadcast", "optional", "list"),
                    *("padding", "index"),
                    each=3,
                    size=16,
                    value=8,
                    also=named,
                )
            ),
            after=_CALL,
            effort_if=(_has_reference, "quick"),
        ),
        "test_precision": Check(
            precision.check,
            "narrow dtypes against wider ones",
            of_kinds("dtype", "value", each=4, number=2),
            after=(*_CALL, "test_layouts", "test_kernels"),
        ),
        "test_resolution": Check(
            precision.check_resolution,
            "float64 results, whether they are computed in float32",
            effort="thorough",
            after=(*_CALL, "test_precision"),
        ),
        "test_permutations": Check(
            laws.check_permutations,
            "elements against the same ones in another order",
            fewer_if(_has_reference, first),
            after=(*_CALL, "test_batches", "test_precision"),
        ),
        "test_pointwise": Check(
            laws.check_pointwise, "ops tagged as pointwise, with one element of an input changed", after=_CALL
        ),
        "test_symmetries": Check(
            laws.check_symmetries,
            "what a change of values does to results, at other sizes and far away",
            fewer_if(_has_reference, first),
            after=(*_CALL, "test_layouts", "test_batches", "test_kernels", "test_precision"),
        ),
        "test_stability": Check(
            precision.check_stability,
            "float32 against float64, on values for which formulas overflow on the way",
            after=(*_CALL, "test_layouts", "test_precision"),
        ),
        "test_sharding": Check(
            sharding.check,
            "calls that are split over processes as the sharding rule says against whole ones",
            of_kinds("size", *_WAYS, each=1, start=forms),
            after=(*_CALL, "test_batches"),
        ),
        "test_threads": Check(threads.check, "two threads against one", after=_CALL),
        # Derivatives.
        "test_autograd_registration": Check(autograd_registration.check, "where gradients come from", effort="quick"),
        "test_gradients": Check(
            gradients.check_gradients,
            "gradients against finite differences, and with each other",
            fewer_if(
                _gradient_is_derived,
                of_kinds(*_DIFFERENTIATED, "number", "size", "list", each=1, value=4),
                of_kinds(
                    *_DIFFERENTIATED, each=4, number=8, size=8, list=6, also=lambda *of: [*indexed(*of), *named(*of)]
                ),
            ),
            effort="quick",
            after=(*_KERNEL, "test_autograd_registration"),
        ),
        "test_grad_modes": Check(
            grad_modes.check,
            "gradients under checkpointing, hooks, torch.func, and with calls and writes in between",
            fewer_if(_gradient_is_derived, first),
            after=_GRADIENTS,
        ),
        "test_backward": Check(
            backward.check,
            "gradients in batches of other sizes, in another order, layout and dtype, as results are",
            forms,
            after=(*_GRADIENTS, "test_grad_modes", "test_precision", "test_stability"),
        ),
        "test_second_order": Check(
            gradients.check_second_order,
            "gradients of gradients against finite differences",
            after=(*_GRADIENTS, "test_grad_modes"),
        ),
        "test_forward_mode": Check(
            gradients.check_forward_mode,
            "tangents against finite differences",
            fewer_if(_gradient_is_derived, samples, of_kinds("value", "size", "choice", "optional", each=1, number=2)),
            after=_GRADIENTS,
        ),
        # Transforms, modes and compilers.
        "test_vmap": Check(
            vmap.check,
            "vmap against a loop",
            fewer_if(
                vmap.is_derived,
                of_kinds(*_WAYS, each=1, start=first),
                of_kinds(*_WAYS, "value", "number", "layout", "size", "padding", each=2),
            ),
            after=(*_KERNEL, "test_grad_modes"),
        ),
        "test_empty_batch": Check(
            functools.partial(vmap.check, empty=True),
            "vmap of a batch of none",
            effort="thorough",
            after=("test_vmap",),
        ),
        "test_autocast": Check(autocast.check, "autocast against casts by hand", after=_KERNEL),
        "test_modes": Check(
            modes.check,
            "calls under modes, in threads, on parameters and subclasses, against plain ones",
            after=_KERNEL,
        ),
        "test_aot_dispatch_dynamic": Check(
            functools.partial(aot_dispatch.check, dynamic=True),
            "eager mode against AOTDispatcher with symbolic sizes",
            first_or_forms,
            effort_if=(_is_traced_from_reference, "thorough"),
            after=(*_CALL, *_FAKE, "test_symbolic_sizes", "test_grad_modes"),
        ),
        "test_aot_backward": Check(
            aot_dispatch.check_backward,
            "gradients, where samples ask for none, against AOTDispatcher with symbolic sizes",
            first_or_forms,
            after=(*_GRADIENTS, *_FAKE, "test_symbolic_sizes", "test_grad_modes", "test_aot_dispatch_dynamic"),
        ),
        "test_aot_dispatch_static": Check(
            functools.partial(aot_dispatch.check, dynamic=False),
            "eager mode against AOTDispatcher with static sizes",
            fewer_if(_is_traced_from_reference, first),
            effort="thorough",
            effort_if=(_is_traced_from_reference, "normal"),
            after=(*_CALL, *_FAKE, "test_aot_dispatch_dynamic"),
        ),
        "test_compiled": Check(
            compiled.check,
            "torch.compile against eager mode, on other values and sizes",
            effort="thorough",
            after=_COMPILED,
        ),
        "test_inductor": Check(
            compiled.inductor_check,
            "torch.compile with inductor against eager mode, on other values and sizes",
            effort="thorough",
            after=(*_COMPILED, "test_compiled"),
        ),
        "test_exported": Check(
            compiled.export_check,
            "torch.export, saved and loaded, against eager mode",
            effort="thorough",
            after=_COMPILED,
        ),
    }
)


#: Names of removed checks, and the check that replaces each. For one release, `skip=` and files of expected failures
#: accept these names and ignore them.
RETIRED: Mapping[str, str] = MappingProxyType(
    {"test_declared_writes": "test_writes", "test_first_calls": "test_state", "test_shapes": "test_faketensor"}
)


def checks_at(effort: Effort, trial: Trial) -> list[str]:
    """The names of the checks that run at an effort for an operator with this first sample."""
    allowed = EFFORTS[: EFFORTS.index(effort) + 1]
    return [name for name, row in CHECKS.items() if row.effort_for(trial) in allowed]


#: The names of the checks that `opcheck` runs by default.
DEFAULT_CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
