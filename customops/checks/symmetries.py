"""test_symmetries: what a change of values does to the results of a sample, it does at other sizes.

Three changes of one tensor of floats are tried: a constant is added to it, it is doubled, it is negated. Where the
results of the sample, and of two other draws of values, follow by a simple law, such as f(x + c) = f(x) for a softmax
and f(2x) = 2 f(x) for a sum, they have to at other sizes: what the rest of a block or an idle lane adds to a result
does not follow. A constant that leaves the results as they are does so if it is large, too: a variance that is
computed from sums of squares, or a mask of -10,000, does not.

A number of 0.0 gives nearly the results of a tiny one, and not those of None.

The members of a list are such a law as well: where each has the result that it has alone, so it has in a list of 40,
and among tensors of other sizes.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from customops import _torch
from customops.checks._outcome import processor_time, require
from customops.checks._runs import Results, attempt, difference, first_difference, steady_results
from customops.checks._trial import Trial
from customops.checks._variants import are_plain, is_list, resized
from customops.checks.inputs.derive import derive
from customops.checks.inputs.parts import variation_of

_MOST_TENSORS = 4
_MOST_SIZES = 10
_SECONDS = 0.5  #: of processor time, after which no further size is tried
_LEARNT, _HOLDS, _AT_EASE = 1e-4, 2e-3, 0.05  #: relative tolerances: at the sample, at other sizes, far away
_FAR = (2.0**12, -(2.0**12), 2.0**14, -(2.0**14))  #: A float32 holds these, and in addition a number to 2**-8.


def check(trial: Trial) -> None:
    trial = trial.detached()
    require(are_plain(trial), "an input is no plain strided tensor")
    expected = steady_results(trial)
    tried = [_check_members(trial, expected), _check_values(trial), _check_zero(trial)]
    require(any(tried), "no change of values has a simple effect on the results of the sample")


# ----------------------------------------------------------------------------------------------------------------------
# A constant added, a factor, a sign


@dataclass(frozen=True, eq=False)
class _Change:
    """A change of a tensor, and the laws by which results may follow."""

    about: str
    make: Callable[[torch.Tensor, float], torch.Tensor]  #: of a tensor, and of a constant of its size
    laws: Mapping[str, Callable[[torch.Tensor, float], torch.Tensor]]  #: by what to say of them


_SAME = "leaves it as it is"
_SHIFTS = (
    _Change(
        "adding a constant to {}",
        lambda x, c: x + c,
        {_SAME: lambda y, c: y, "adds the constant to it": lambda y, c: y + c},
    ),
    _Change(
        "subtracting a constant from {}",
        lambda x, c: x - c,
        {_SAME: lambda y, c: y, "subtracts the constant from it": lambda y, c: y - c},
    ),
)
_CHANGES = (
    *_SHIFTS,
    _Change(
        "doubling {}",
        lambda x, c: x * 2,
        {_SAME: lambda y, c: y} | {f"multiplies it by {f:g}": lambda y, c, f=f: y * f for f in (2.0, 4.0, 0.5, 0.25)},
    ),
    _Change("negating {}", lambda x, c: -x, {_SAME: lambda y, c: y, "negates it": lambda y, c: -y}),
)


#: By the change and the name of a result: the law.
_Laws = dict[tuple[_Change, str], str]


def _check_values(trial: Trial) -> bool:
    labels = [label for _, label, x in trial.named_tensors if x.dtype in (torch.float32, torch.float64) and x.numel()]
    start, tried = processor_time(), False
    found = [(label, _laws_of(trial, label)) for label in dict.fromkeys(labels[:_MOST_TENSORS])]
    found = [(label, laws) for label, laws in found if laws]
    if not found:
        return False
    laws_by_label = dict(found)
    agreeing = {(label, *key): [trial] for label, laws in found for key in laws}
    broken: list[tuple[Any, Trial, str, str]] = []
    for case in itertools.islice(_other_sizes(trial), _MOST_SIZES):
        if processor_time() - start > _SECONDS:
            break
        for label, laws in found:
            other = _with(case.trial, label, lambda x: _drawn(x, 0))  # sums of two are exact
            for key, differs in _compare(other, label, laws, _HOLDS):
                tried, of = True, (label, *key)
                if differs is None:
                    agreeing[of].append(other)
                else:
                    broken.append((of, other, case.label, differs))
    for of, other, sizes, differs in broken:
        label, change, name = of
        law = laws_by_label[label][change, name]
        if len(agreeing[of]) > 2 and _is_believed(agreeing[of], other):
            raise trial.fault(
                "what a change of values does to a result at the sample's sizes, it does not at other sizes",
                argument=label,
                expected=f"{change.about.format(label)} {law}, as for the sample",
                got=f"{name}, {sizes}: {differs}",
                fix="check what the kernel reads for the rest of a row after the last whole block, what idle lanes "
                "start from (-inf for a maximum, and not 0), and which size it divides by",
            )
    for label, laws in found:
        _check_far(trial, label, laws)
    return tried


def _is_believed(agreeing: Sequence[Trial], broken: Trial) -> bool:
    """Is a law that some calls follow one of the operator, which all should?

    A middle element depends on whether there is one, so that a call with the same parities has to follow. So has one
    as large in each dimension: the windows of a pooling have one element each in small tensors. A number of windows
    that is a size of the tensor makes windows of one element, too; and windows overlap that are longer than the step
    between them. So in that call, the integers that are passed have to be smaller than the same sizes, or equal, or
    larger.
    """

    def sizes(trial: Trial) -> list[int]:
        return [size for tensor in trial.tensors for size in tensor.shape]

    def parities(trial: Trial) -> list[int]:
        return [size % 2 for size in sizes(trial)]

    def beside_numbers(trial: Trial) -> list[tuple[bool, bool]]:
        numbers = [n for n in _torch.trees.tree_leaves(list(trial.arguments.values())) if type(n) is int]
        return [(n < size, n > size) for n, size in itertools.product(numbers, sizes(trial))]

    if all(parities(each) != parities(broken) for each in agreeing):
        return False
    alike = [each for each in agreeing if beside_numbers(each) == beside_numbers(broken)]
    return any(all(map(operator.ge, sizes(each), sizes(broken))) for each in alike)


def _laws_of(trial: Trial, label: str) -> _Laws:
    """The laws that hold for the values of the sample, for two other draws, and for other signs and sizes."""
    draws = [_with(trial, label, lambda x, seed=seed: _drawn(x, seed)) for seed in (0, 1, 2)]  # type: ignore[misc]
    results = [attempt(draw) for draw in draws]
    if any(each is None for each in results):
        return {}
    first, *others = (each or {} for each in results)
    # Where a result is the same for all draws, nothing can be learnt.
    names = [n for n, y in first.items() if _is_float(y) and any(difference(o[n], y, rtol=1e-3) for o in others)]
    # A threshold may lie beyond these values.
    others_too = [_with(draws[0], label, change) for change in (torch.neg, lambda x: x * 64, lambda x: x / 64)]
    laws: _Laws = {}
    for change, name in itertools.product(_CHANGES, names):
        for law in change.laws:
            key = (change, name)
            outcomes = [dict(_compare(draw, label, {key: law}, _LEARNT)).get(key, "not compared") for draw in draws]
            if all(differs is None for differs in outcomes):
                if all(dict(_compare(draw, label, {key: law}, _LEARNT)).get(key) is None for draw in others_too):
                    laws[key] = law
                break
            if outcomes[0] == "not compared":
                break
    # A maximum with zero follows in one direction alone.
    one_way = [key for key in laws if key[0] in _SHIFTS and not all((change, key[1]) in laws for change in _SHIFTS)]
    return {key: law for key, law in laws.items() if key not in one_way}


def _compare(trial: Trial, label: str, laws: _Laws, rtol: float) -> Iterator[tuple[tuple[_Change, str], str | None]]:
    """For each law whether it holds: None, or how the result differs. Left out is what is not finite."""
    tensor = _tensor(trial, label)
    if tensor is None or not tensor.numel() or not bool(tensor.isfinite().all()):
        return
    constant = 4 * _unit(tensor)
    before = attempt(trial)
    for change in dict.fromkeys(change for change, _ in laws) if before is not None else ():
        after = attempt(_with(trial, label, lambda x, change=change: change.make(x, constant)))  # type: ignore[misc]
        for (of, name), law in laws.items() if after is not None else ():
            y, z = before[name], after[name]  # type: ignore[index]
            if of is change and _is_float(y) and _is_float(z) and y.shape == z.shape and bool(y.isfinite().all()):
                right = change.laws[law](y, constant)
                # Zeros that fill up rows depend on no tensor, nor does what an op that writes leaves as it was.
                if change in _SHIFTS or name.startswith("argument "):
                    right = right.where(z != y, y)
                tolerance = rtol if change in _SHIFTS else rtol**2  # powers of two round nothing
                yield (change, name), difference(z, right, rtol=tolerance, scale=float(y.abs().max()))


def _check_far(trial: Trial, label: str, laws: _Laws) -> None:
    """A result that a constant leaves as it is, a large one does, too."""
    names = [name for (change, name), law in laws.items() if change is _SHIFTS[0] and law == _SAME]
    tensor = _tensor(trial, label)
    if not names or tensor is None or tensor.dtype is not torch.float32:
        return
    unit = _unit(tensor)
    near = _with(trial, label, lambda x: (x / unit * 64).round() / 64 * unit)
    before = attempt(near) or {}
    for far in _FAR:
        after = attempt(_with(near, label, lambda x, far=far: x + far * unit)) or {}  # type: ignore[misc]
        for name in names if before and after else ():
            y, z = before[name], after[name]
            if y.shape != z.shape or not bool(y.isfinite().all()):
                continue
            differs = difference(z, y, rtol=_AT_EASE)
            if differs:
                raise trial.fault(
                    "a result is left as it is by adding a small constant to all elements, and not by a large one",
                    argument=label,
                    expected=f"the result without {far * unit:g} added to {label}, to {_AT_EASE:.0%}",
                    got=f"{name}: {differs}",
                    fix="digits are lost in a difference, as in mean(x**2) - mean(x)**2: subtract the mean (or the "
                    "largest element) first; or a mask has a finite value, such as -10,000, in the place of -inf",
                )


def _unit(tensor: torch.Tensor) -> float:
    """The power of two that is as large as the largest element, at least."""
    largest = float(tensor.abs().max())
    return 2.0 ** math.ceil(math.log2(largest)) if largest > 0 and math.isfinite(largest) else 1.0


def _drawn(x: torch.Tensor, seed: int) -> torch.Tensor:
    """Elements in another order and a little smaller; without a seed rounded alone, so that sums of two are exact.

    Rounding makes no zeros: -0 is 0, and an operator need not negate its result there.
    """
    unit = _unit(x)
    if seed:
        numbers = torch.Generator().manual_seed(seed)
        order = torch.randperm(x.numel(), generator=numbers).to(x.device)
        factor = 1 - torch.rand(x.shape, generator=numbers, dtype=torch.float32) / 4
        x = x.reshape(-1)[order].reshape(x.shape) * factor.to(x.device, x.dtype)
    rounded = (x / unit * 1024).round()
    return rounded.where(rounded != 0, x.sign()) / 1024 * unit


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.float32, torch.float64) and value.numel() > 0


def _tensor(trial: Trial, label: str) -> torch.Tensor | None:
    return next((x for _, each, x in trial.named_tensors if each == label), None)


def _with(trial: Trial, label: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Trial:
    tensor = _tensor(trial, label)
    return trial if tensor is None else trial.replaced({id(tensor): change(tensor)})


def _other_sizes(trial: Trial) -> Iterator[Any]:
    """The cases with other sizes, of which none is less than two that was more in the sample."""
    least = min((size for tensor in trial.tensors for size in tensor.shape), default=0)
    for case in derive(trial, variation_of(trial.custom_op), "normal"):
        sizes = [size for tensor in case.trial.tensors for size in tensor.shape]
        if case.kind == "size" and min(sizes, default=0) >= min(least, 2) > 0:
            yield case


def _check_zero(trial: Trial) -> bool:
    """An optional number of 0.0 is not None: results are near those for a tiny number."""
    tried = False
    for name in [argument.name for argument in trial.schema.arguments if argument.type == "float?"]:
        values = (None, 0.0, 1e-30, 5e-31, -1.0)
        absent, zero, tiny, half, negative = (attempt(trial.with_arguments(**{name: value})) for value in values)
        if absent is None or zero is None or tiny is None or half is None:
            continue
        if negative is not None and not first_difference(absent, negative, exact=True):
            continue  # what is not positive means that it is absent, as for scales of torch's upsampling
        tried = True
        scale = max((float(y.abs().max()) for y in absent.values() if _is_float(y)), default=0.0)
        if first_difference(absent, zero, exact=True) or first_difference(half, tiny, scale=scale):
            continue
        if differs := first_difference(zero, tiny, rtol=0.01, scale=scale):
            raise trial.fault(
                "an optional number of 0.0 has the result of None",
                argument=name,
                expected=f"{name}=0.0 gives nearly what {name}=1e-30 gives",
                got=": ".join(differs),
                fix=f"test `{name} is not None`: `{name} or default` takes zero for None, too",
            )
    return tried


# ----------------------------------------------------------------------------------------------------------------------
# Members of lists


def _check_members(trial: Trial, expected: Results) -> bool:
    """Of operators on lists of which each member has its own result: it has that in other lists, too."""
    lists = {name: value for name, value in trial.arguments.items() if is_list(value)}
    counts = {len(value) for value in lists.values()}
    if len(counts) != 1 or not all(is_list(value) and len(value) in counts for value in expected.values()):
        return False
    (count,) = counts
    if count < 2 or _differing_member(trial, lists, range(count)) is not None:
        return False

    def grown(i: int) -> dict[str, torch.Tensor]:
        """Member `i` with more elements than those before it."""
        return {
            n: resized(v[i], (*v[i].shape[:-1], v[i].shape[-1] + i)) if v[i].dim() else v[i] for n, v in lists.items()
        }

    variants: dict[str, list[dict[str, torch.Tensor]]] = {
        "tensors of different sizes": [grown(i) for i in range(count)],
        "40 tensors": [{name: value[i % count].clone() for name, value in lists.items()} for i in range(40)],
        "100 tensors": [{name: value[i % count].clone() for name, value in lists.items()} for i in range(100)],
    }
    tried = False
    for about, members in variants.items():
        others = {name: [member[name] for member in members] for name in lists}
        other = trial.with_arguments(**others)
        if attempt(other) is None:
            continue
        tried = True
        found = _differing_member(other, others, range(len(members) - 1, -1, -max(1, len(members) // 8)))
        if found is not None:
            i, differs = found
            raise trial.fault(
                "a member of a list has another result than alone, where the list is another",
                expected=f"the result of a list with this member alone, as for the {count} members of the sample",
                got=f"a list of {about}, member {i}: {differs}",
                fix="look at sizes that are taken from the first member for all, and how many a launch takes at most",
            )
    return tried


def _differing_member(
    trial: Trial, lists: Mapping[str, Sequence[torch.Tensor]], numbers: Sequence[int]
) -> tuple[int, str] | None:
    """The first member whose result is not the one it has alone, and how it differs."""
    results = attempt(trial)
    for i in numbers if results is not None else ():
        alone = attempt(trial.with_arguments(**{name: [value[i]] for name, value in lists.items()}))
        for name, value in (results or {}).items():
            if alone is None or not is_list(alone[name]) or len(value) <= i:
                return i, "a list with it alone is not taken"
            if differs := difference(value[i], alone[name][0]):
                return i, differs
    return None
