"""test_kernels: kernels of one operator agree, and with a plain function if there is one.

Compared are, where they exist: the operator and a reference function; the operator and what compilers take for it,
decompositions, lowerings and replacements; the kernels of a device that has several, and which of them a compiler
chooses; a device's kernel and the one for all devices, which it stands in for; the kernels of two devices; the operator
and its out variant, on tensors that hold NaN. For the kernels of one device, also with other values: NaN, zeros,
halves, negative and large ones, and other numbers and flags.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from customops import _torch
from customops._dispatch.current_kernel import CurrentKernel
from customops._dispatch.preference import choose_from_now_on, here, prefer
from customops._places import innermost, where
from customops._rules.choice import DEFAULT, REFERENCE
from customops._rules.out import Checked, is_stub
from customops._schema.defaults import completer
from customops.checks import _memory
from customops.checks._outcome import NotExercised
from customops.checks._runs import Results, attempt, compare, require_steady, results_of, results_once, tolerance_of
from customops.checks._trial import Trial, failed_call
from customops.checks._variants import are_plain, is_list, other_numbers, repeated, with_large_integers
from customops.errors import CheckError

_FOR_ALL = ("CompositeExplicitAutograd", "CompositeImplicitAutograd", "CompositeExplicitAutogradNonFunctional")
_INTEGERS = (torch.int32, torch.int64)
_SMALL = (torch.int8, torch.uint8)
_FIX = "one of the two is wrong for these inputs"
REFUSED = "the operator takes inputs that its reference function refuses"
#: A call, its results, the right ones, and what a difference means: the fields of a fault.
_Pair = tuple[Trial, Results, Results, dict[str, Any]]


def check(trial: Trial) -> None:
    trial.require_data()
    trial = trial.detached()
    expected = results_once(trial)
    tried = False
    try:
        for pairs in (_plain_functions, _alternatives, _kernel_for_all, _devices, _out_variant):
            for changed, actual, right, fields in pairs(trial, expected):
                tried = True
                compare(changed, actual, right, ties=True, coarse=True, **{"fix": _FIX, **fields})
    except CheckError:
        require_steady(trial, expected)
        raise
    if not tried:
        raise NotExercised(
            "there is one kernel for these inputs, no reference function (reference= of check or custom_op, a plain "
            "function that computes the same, finds what nothing else can), and nothing that compilers take for it: "
            "there is nothing to compare"
        )


def _plain_functions(trial: Trial, expected: Results) -> Iterator[_Pair]:
    """The reference function; and decompositions, lowerings and replacements, which compilers take for the operator."""
    if trial.reference is not None:
        try:
            right = results_of(trial, op=trial.reference)
        except Exception as error:
            fix = "refuse them in kernel and fake impl, too, with torch._check(...); or have the reference take them"
            raise failed_call(trial.name, REFUSED, error, fix) from error
        if trial.mutated and right.get("the output") is None:
            right.pop("the output", None)  # it writes as the operator does, and returns nothing
        problem = "the operator has other results than its reference function"
        returned, wanted = ([n for n in each if not n.startswith("argument ")] for each in (right, expected))
        if returned and len(returned) != len(wanted):
            got = f"{len(wanted)} results, and {len(returned)} of {where(trial.reference)}"
            raise trial.fault(problem, got, "return from both what the schema has", expected="as many results")
        fields = {"problem": problem, "expected": f"the results of {where(trial.reference)}"}
        yield trial, expected, {name: value for name, value in right.items() if name in expected}, fields
        for changed in _values_for_reference(trial):
            # The reference is first: it says whether small integers are indices, which a kernel may not look at.
            right = attempt(changed, op=trial.reference) or {}
            actual = attempt(changed) if right else None
            if actual is not None and all(right.get(name) is not None for name in actual):
                yield changed, actual, {name: right[name] for name in actual}, fields
    for function in trial.custom_op._rules.equivalents() if trial.custom_op is not None else ():
        right = results_of(trial, op=function)
        if not any(value is NotImplemented for value in right.values()):
            problem = "the operator has other results than what compilers take for it"
            fields = {"problem": problem, "expected": "the results of its decomposition, lowering or replacement"}
            yield trial, expected, right, fields


def _values_for_reference(trial: Trial) -> Iterator[Trial]:
    """Large integers; the ends of those of 8 bits; zeros, and -inf, for tensors of one shape among several.

    And lists of which the last member has no elements.
    """
    lists = {name: value for name, value in trial.arguments.items() if is_list(value) and len(value) > 1}
    if lists and all(value[-1].dim() for value in lists.values()):
        yield trial.with_arguments(**{name: [*value[:-1], value[-1][:0].clone()] for name, value in lists.items()})
    if (large := with_large_integers(trial, trial.reference)) is not None:
        yield large
    small = [tensor for tensor in trial.distinct if tensor.dtype in _SMALL and tensor.numel()]
    for swap in (False, True) if small else ():
        changed = {}
        for i, tensor in enumerate(small):
            ends = torch.tensor([torch.iinfo(tensor.dtype).min, torch.iinfo(tensor.dtype).max], dtype=tensor.dtype)
            order = (torch.arange(tensor.numel()) + i + swap) % 2 if tensor.dim() > 1 else torch.tensor((i + swap) % 2)
            changed[id(tensor)] = ends[order.expand(tensor.numel())].reshape(tensor.shape).to(tensor.device)
        yield trial.replaced(changed)
    floats = [tensor for tensor in trial.distinct if tensor.is_floating_point() and tensor.numel()]
    for shape in {tensor.shape for tensor in floats}:
        alike = [tensor for tensor in floats if tensor.shape == shape]
        for value in (0.0, -float("inf")) if 1 < len(alike) < len(floats) else ():
            yield trial.replaced({id(tensor): torch.full_like(tensor, value) for tensor in alike})


def _alternatives(trial: Trial, expected: Results) -> Iterator[_Pair]:
    """The kernels of the device, each where it may run, and the one that a call chooses."""
    rule, op = (None if trial.custom_op is None else trial.custom_op._rules.kernel), trial.name
    if rule is None or len({*rule.names()} - {REFERENCE}) < 2:
        return
    complete = completer(rule.operator.schema)
    choose_from_now_on([op])
    for changed in (trial, *_other_values(trial)):
        call = complete(changed.args, changed.kwargs)
        chooser, right = rule.chooser_for(*call), expected if changed is trial else attempt(changed)
        if chooser is None or right is None:
            continue
        chosen, _ = chooser.asked(here(), *call)
        in_trace = _chosen_in_trace(changed, chooser, complete)
        if in_trace not in (None, chosen.name):
            problem, fix = (
                "compiled code chooses another kernel than a call",
                "let when= read nothing but the arguments",
            )
            two = [each for each, _ in chooser.kernels if each.name in (in_trace, chosen.name)]
            got, place = f"{in_trace}, and {chosen.name} in a call", where(two[0].when or two[0].fn)
            raise changed.fault(problem, got, fix, where=place)
        for each, _ in chooser.kernels:
            with prefer({op: each.name}):
                if each is chosen or chooser.asked(here(), *call)[0] is not each:
                    continue
                fields = {"where": where(each.fn), "expected": f"the results of the kernel {chosen.name}"}
                try:
                    actual = results_of(changed)
                except Exception as error:
                    problem = f"the kernel {each.name} fails on inputs that {chosen.name} takes"
                    fix = "refuse them by when=" if each.when is None else f"let when= refuse them ({where(each.when)})"
                    raise failed_call(op, problem, error, fix, where=fields["where"]) from error
            yield changed, actual, right, {"problem": f"the kernel {each.name} has other results", **fields}


def _chosen_in_trace(trial: Trial, chooser: Any, complete: Any) -> str | None:
    """The name of the kernel that a compiler chooses for these inputs, or None: it leaves that to the call."""
    if not chooser.operator.options.choose_when_traced:
        return None
    with _torch.fakes.fake_mode() as mode, _torch.fakes.quiet_fakes():
        try:
            fake = trial.faked(mode)
        except _torch.fakes.NoFakeTensor:
            return None
        name: str | None = chooser.traced(*complete(fake.args, fake.kwargs))
        return name


def _kernel_for_all(trial: Trial, expected: Results) -> Iterator[_Pair]:
    """A device's own kernel, and the one for all devices that it stands in for."""
    devices = {tensor.device.type for tensor in trial.tensors}
    if len(devices) != 1 or trial.is_builtin:
        return
    (device,) = devices
    has_own = _torch.dispatcher.has_kernel(trial.name, _torch.dispatcher.device_key(device))
    if not has_own or not any(_torch.dispatcher.has_kernel(trial.name, key) for key in _FOR_ALL):
        return
    fields = {
        "problem": f"the kernel for {device} has other results than the kernel for all devices",
        "fix": f"{_FIX}: both are the same operator",
        "expected": "the results of the kernel for all devices",
    }
    for changed in (trial, *_other_values(trial)):
        own = expected if changed is trial else attempt(changed)
        general = attempt(changed, op=_torch.dispatcher.without_device_kernel(trial.op))
        if own is not None and general is not None:
            yield changed, own, general, fields


def _other_values(trial: Trial) -> Iterator[Trial]:
    """Other numbers and flags; one size made 1, wherever it is; special, larger and negative values."""
    yield from other_numbers(trial)
    for size in sorted({size for tensor in trial.tensors for size in tensor.shape if size > 1}):
        yield trial.map_tensors(lambda _, x, size=size: repeated(x, {size: 1}))  # type: ignore[misc]
    tensors = [tensor for tensor in trial.tensors if tensor.numel()]
    if not all(map(_memory.is_dense, tensors)):
        return
    if any(tensor.is_floating_point() for tensor in tensors):
        for values in ((float("nan"),), (float("inf"),), (-float("inf"),), (0.0,), (0.5, 1.5, 2.5, -0.5, -1.5)):
            yield trial.map_floats(functools.partial(_with_values, values))
        for by in (-1.0, 8.0, 0.125):
            yield trial.map_floats(lambda x, by=by: (x * by).to(x.dtype))  # type: ignore[misc]
    if trial.kernels and any(tensor.dtype in _INTEGERS for tensor in tensors):
        for factor in (-1, 2**24 + 1, 2**29 + 1):
            yield trial.map_tensors(
                lambda _, x, by=factor: x * by + (by > 0) if x.dtype in _INTEGERS else x  # type: ignore[misc]
            )


def _with_values(values: tuple[float, ...], tensor: torch.Tensor) -> torch.Tensor:
    """The first elements replaced."""
    flat = tensor.reshape(-1).clone()
    new = torch.tensor(values[: tensor.numel()], dtype=torch.float64).to(tensor.device, tensor.dtype)
    flat[: len(new)] = new
    return flat.reshape(tensor.shape)


def _devices(trial: Trial, expected: Results) -> Iterator[_Pair]:
    """The kernels of two devices."""
    if any(tensor.device.type != "cpu" for tensor in trial.tensors) or not trial.tensors:
        return
    if any(isinstance(value, torch.device) for value in trial.arguments.values()):
        return
    # Devices have functions of other precision, and sum in other orders.
    dtypes = [value.dtype for value in expected.values() if isinstance(value, torch.Tensor)]
    rtol = trial.rtol or max([1e-3, *(10 * tolerance_of(dtype) for dtype in dtypes)])
    for device in _torch.dispatcher.devices_at_hand():
        try:
            moved = trial.map_tensors(lambda _name, tensor, to=device: tensor.to(to))  # type: ignore[misc]
        except Exception:  # a device that does not hold this dtype
            continue
        actual = attempt(moved)
        if actual is not None:
            problem = f"the operator has other results on {device} than on the CPU"
            fields = {"problem": problem, "expected": "the results on the CPU"}
            on_cpu = _torch.trees.tree_map(lambda x: x.cpu() if isinstance(x, torch.Tensor) else x, actual)
            yield replace(moved, rtol=rtol), on_cpu, expected, fields


def _out_variant(trial: Trial, _expected: Results) -> Iterator[_Pair]:
    """The operator and its out variant, which has to fill what it is given, whatever that held before."""
    variant: Any = trial.custom_op._rules.out_variant if trial.custom_op is not None else None
    if variant is None:
        return
    kernels = [kernel for kernel in variant._rules.kernel.kernels.values() if isinstance(kernel, Checked)]
    in_place = sorted(frozenset().union(*(kernel.inplace for kernel in kernels)))  # arguments that may serve as out
    for changed in (trial, *_other_values(trial)):
        right = attempt(changed)
        if right is None:
            continue
        outs = [  # filled with what no result has
            torch.full_like(value, float("nan") if value.is_floating_point() or value.is_complex() else 77)
            for value in right.values()
            if isinstance(value, torch.Tensor)
        ]
        fix = "write every element of out, and the same as the operator"
        yield _called_with_out(variant, changed, changed.copy(), outs, right, fix)
        for name, (i, out) in itertools.product(in_place, enumerate(outs)):
            given = changed.arguments[name]
            if not isinstance(given, torch.Tensor) or not are_plain(changed) or _memory.overlaps_itself(given):
                continue
            if (given.shape, given.dtype, given.device) == (out.shape, out.dtype, out.device):
                copy = changed.copy()
                replaced = [*outs[:i], copy.arguments[name], *outs[i + 1 :]]
                fix = f"read each element of {name} before that of out is written; or leave {name} out of inplace="
                yield _called_with_out(variant, changed, copy, replaced, right, fix, f" where out is {name}")


def _called_with_out(
    variant: Any, given: Trial, copy: Trial, outs: list[Any], right: Results, fix: str, how: str = ""
) -> _Pair:
    names = [argument.name for argument in variant.schema.mutated]
    try:
        variant._opoverload(*copy.args, **copy.kwargs, **dict(zip(names, outs, strict=True)))
    except Exception as error:
        raise failed_call(copy.name, f"the out variant fails{how} on inputs that the operator takes", error) from error
    fields = {
        "problem": f"the out variant writes other results than the operator returns{how}",
        "fix": fix,
        "expected": "the results of the operator",
        "where": where(variant._init_fn),
    }
    return given, dict(zip(right, outs, strict=True)), right, fields


class Reached:
    """Observes which kernels of an operator run, to say of the others that nothing is known of them."""

    def __init__(self, trial: Trial) -> None:
        self.trial, self.devices = trial, set[str]()
        self.seen: set[tuple[str | None, Any]] = set()

    def around_call(self, _op: Any, fn: Callable[..., Any]) -> Callable[..., Any]:
        return fn

    def around_kernel(self, current: CurrentKernel, fn: Callable[..., Any]) -> Callable[..., Any]:
        if current.op != self.trial.name:
            return fn

        @functools.wraps(fn, updated=())
        def reached(*args: Any, **kwargs: Any) -> Any:
            kernel = innermost(current.registered)
            self.seen |= {(current.device_type, kernel), (None, kernel)}
            return fn(*args, **kwargs)

        return reached

    def others(self) -> Iterator[tuple[str, str]]:
        """What to call each kernel that did not run, and where it is."""
        own = {} if self.trial.custom_op is None else self.trial.custom_op._rules.kernel.values
        for (device, name), each in own.items():
            if name != REFERENCE and not is_stub(each.fn) and (device, innermost(each.fn)) not in self.seen:
                shown = "kernel" if name == DEFAULT else f"kernel {name}"
                yield f"{shown} for {device or 'other devices'}", where(each.fn)
        for key, places in _torch.dispatcher.registered_at(self.trial.name).items():
            device = _torch.dispatcher.device_of_key(key)
            if device not in (None, "meta", *self.devices, *(of for of, _ in own)) and not self.trial.is_builtin:
                yield f"kernel for {device}", places[0]
