"""Calls of an operator whose results are compared with each other.

A call runs on copies of its inputs, from the same seed, without warnings. Its results are what it returned and what it
left in the arguments that it writes; they are copied at once, so that no later call changes them.

Results are compared only where it means something: `steady_results` refuses operators whose results are random,
differ between equal calls, or are memory that nobody wrote.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from customops import _torch
from customops.checks._inputs import quiet, seeded, tensors_in
from customops.checks._outcome import NotExercised, require
from customops.checks._trial import Trial

# Tolerances go by dtype, and by the largest element of the expected tensor: sums in another order differ by rounding
# of the largest term, however small the sum is.

#: Relative tolerances; about the square root of what the dtype resolves, for float32 and below somewhat less.
_TOLERANCES = {
    torch.float64: 1e-9,
    torch.complex128: 1e-9,
    torch.float32: 2e-5,
    torch.complex64: 2e-5,
    torch.float16: 4e-3,
    torch.complex32: 4e-3,
    torch.bfloat16: 3e-2,
}


def tolerance_of(dtype: torch.dtype) -> float:
    """How far apart two elements of a dtype may be, relatively; 0 for integers and bools."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    return _TOLERANCES.get(dtype, 0.25)  # of floats of 8 bits and less


def difference(
    actual: Any, expected: Any, *, rtol: float | None = None, exact: bool = False, scale: float = 0.0
) -> str | None:
    """What differs between two nests of tensors, numbers and None; None if nothing does.

    NaN equals NaN. Shapes and dtypes have to agree, strides need not.

    Args:
        rtol: the tolerance, relative to the largest finite element of the expected tensor; by default that of the
            coarser dtype.
        exact: compare bit by bit, but for NaN.
        scale: the size of elements that counts as ordinary, where all of these may be zero but for rounding.
    """
    actual_leaves, leaves = _torch.trees.tree_leaves(actual), _torch.trees.tree_leaves(expected)
    if len(leaves) != len(actual_leaves):
        return f"{len(actual_leaves)} values and not {len(leaves)}"
    for i, (one, other) in enumerate(zip(actual_leaves, leaves, strict=True)):
        if isinstance(one, float) and isinstance(other, float):
            one, other = (torch.tensor(value, dtype=torch.float64) for value in (one, other))
        if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
            is_same = one is other or (type(one) is type(other) and (one == other or (one != one and other != other)))
            found = None if is_same else f"{one!r} and not {other!r}"
        elif one.shape != other.shape:
            found = f"shape {tuple(one.shape)} and not {tuple(other.shape)}"
        elif one.dtype != other.dtype:
            found = f"dtype {one.dtype} and not {other.dtype}"
        else:
            found = _tensors_differ(one, other, rtol, exact, scale)
        if found:
            return found if len(leaves) == 1 else f"value {i}: {found}"
    return None


def _tensors_differ(
    actual: torch.Tensor, expected: torch.Tensor, rtol: float | None, exact: bool, scale: float
) -> str | None:
    with torch.no_grad():
        one, other = _comparable(actual), _comparable(expected)
        if torch.equal(one, other):
            return None
        differs = (one != other) & ~((one != one) & (other != other))
        if not exact and differs.any():
            dtype, finite = expected.dtype, other[other.isfinite()]
            largest = max(float(finite.abs().max()) if finite.numel() else 0.0, scale) or 1.0
            tiny = torch.finfo(dtype).tiny if dtype.is_floating_point or dtype.is_complex else 0.0
            allowed = (tolerance_of(dtype) if rtol is None else rtol) * largest + tiny
            differs &= ~((one - other).abs() <= allowed)
        if not differs.any():
            return None
        where = tuple(differs.nonzero()[0].tolist())
        text = told_apart(one[where].item(), other[where].item())
        if differs.dim() == 0:
            return text
        return f"{int(differs.sum())} of {differs.numel()} elements, the first at {where}: {text}"


def told_apart(value: Any, expected: Any) -> str:
    """Two numbers, with so many digits that they read differently."""
    texts = [str(value), str(expected)]
    for digits in (6, 9, 17) if isinstance(value, float) else ():
        texts = [f"{each:.{digits}g}" for each in (value, expected)]
        if texts[0] != texts[1]:
            break
    return " and not ".join(texts)


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    """Its values as dense float64, complex128 or integers, on the CPU."""
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    tensor = (tensor.dequantize() if tensor.is_quantized else tensor.detach()).cpu()
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.to(torch.float64) if tensor.is_floating_point() else tensor.to(torch.int64)


def nudge(size: float, seed: int | None = None) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """A small change of floating-point numbers: all in one direction, or with a seed each in its own."""

    def change(_name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point() or tensor.is_quantized or tensor.layout is not torch.strided:
            return tensor
        if seed is None:
            return tensor * (1 + size)
        signs = torch.randint(-1, 2, tensor.shape, generator=torch.Generator().manual_seed(seed))
        return (tensor * (1 + size * signs.to(tensor.device))).to(tensor.dtype)

    return change


Results = dict[str, Any]

_ROUNDINGS = 32.0  #: Sums of many terms in another order differ by more than one change of each by rounding makes.

#: Operators of torch that return memory as it is, or resize what they are given.
_ALLOCATING = ("aten::empty", "aten::new_empty", "aten::resize", "aten::set_", "aten::_resize", "prims::empty")


def call(trial: Trial, *, moved: bool = False, op: Callable[..., Any] | None = None) -> Any:
    """Call the operator, or `op`, on these very tensors and copies of generators; from another seed if `moved`."""

    args, kwargs = _torch.trees.tree_map(
        lambda value: value.clone_state() if isinstance(value, torch.Generator) else value, (trial.args, trial.kwargs)
    )
    with quiet(), seeded((args, kwargs)):
        if moved:
            torch.default_generator.manual_seed(12345)
            for device in {tensor.device for tensor in trial.tensors if tensor.device.type == "cuda"}:
                torch.rand(1, device=device)  # `seeded` puts the state back
        return (trial.op if op is None else op)(*args, **kwargs)


def results_of(trial: Trial, **options: Any) -> Results:
    """The results of a `call` on copies of the inputs. Raises what the operator raises."""
    copy = trial.copy()
    return results_in(copy, call(copy, **options))


def results_in(trial: Trial, outputs: Any) -> Results:
    """Copies of what a call returned, and of what it wrote."""
    outputs = trial.by_return(outputs)
    results = {f"output {i}" if len(outputs) > 1 else "the output": value for i, value in enumerate(outputs)}
    results |= {f"argument {name} after the call": value for name, value in trial.mutated.items()}
    return {name: copied(value) for name, value in results.items()}


def attempt(trial: Trial, **options: Any) -> Results | None:
    """The results of a `call` on copies, or None if the operator does not take these inputs."""
    try:
        return results_of(trial, **options)
    except Exception:  # a derived input need not be accepted
        return None


def fake_error(trial: Trial) -> Exception | None:
    """What the fake impl raises; NotExercised where it needs the data, or torch has no fake of an input."""
    mode = _torch.fakes.fake_mode()
    try:
        fake = trial.faked(mode)
        with mode, _torch.fakes.quiet_fakes(), quiet():
            fake.op(*fake.args, **fake.kwargs)
    except _torch.fakes.NoFakeTensor:
        return NotExercised("torch cannot make a fake of an input")
    except Exception as error:
        return NotExercised("the fake impl needs data") if _torch.fakes.needs_data(error) else error
    return None


def results_near(
    trial: Trial, dtype: torch.dtype, then: Callable[[str, torch.Tensor], torch.Tensor] = lambda _, tensor: tensor
) -> list[Results]:
    """Results for inputs that are changed by about what a dtype resolves: they say how well results are determined.

    `then`: what is made of the inputs after that.
    """
    eps = torch.finfo(dtype).eps
    sizes = enumerate((eps, -eps, 4 * eps, -4 * eps))
    nudged = [trial.map_tensors(nudge(size, seed)) for i, size in sizes for seed in (None, i)]
    found = [attempt(each.map_tensors(then)) for each in nudged]
    return [results for results in found if results is not None]


def steady_results(trial: Trial) -> Results:
    """The results of a call; NotExercised if equal calls differ, by the seed or in any way, or there are no results."""
    first = results_once(trial)
    require_steady(trial, first)
    return first


def results_once(trial: Trial) -> Results:
    """The results of a call; NotExercised if there are none to compare. Another call may have others."""
    require_comparable(trial)
    if torch.Tag.nondeterministic_seeded in trial.op.tags:
        raise NotExercised("the operator is tagged as random: the results of two calls cannot be compared")
    results = attempt(trial)
    if results is None:
        raise NotExercised("the operator does not take these inputs")
    require(results, "the operator neither returns nor writes anything that could be compared")
    return results


def require_steady(trial: Trial, results: Results) -> None:
    """Raise NotExercised if another call, from another seed, has other results."""
    second = attempt(trial, moved=True)
    if second is None or difference(second, results):
        raise NotExercised("equal calls have different results: there is nothing to compare with")


def require_comparable(trial: Trial) -> None:
    """Raise NotExercised where results cannot be compared."""
    trial.require_data()
    require(not trial.name.startswith(_ALLOCATING), "the operator returns uninitialized memory")
    require(not any(tensor.is_nested for tensor in trial.tensors), "nested tensors are not compared")
    if trial.custom_op is not None and trial.custom_op._rules.effect.values:
        raise NotExercised("the operator is registered with a side effect")


def _is_rounding(trial: Trial, name: str, actual: Any, expected: Any) -> bool:
    """Is a result no further off than those for inputs that differ by rounding? Sums in which much cancels are not."""

    def distance(one: Any) -> float | None:
        """How far apart the finite elements are; None if they cannot be compared so."""
        if not isinstance(one, torch.Tensor) or one.shape != expected.shape or one.layout is not torch.strided:
            return None
        one, other = one.double(), expected.double()
        finite = other.isfinite()
        if not finite.any() or not torch.equal(one.isfinite(), finite):
            return None
        return float((one - other)[finite].abs().max())

    def contiguous(_name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous() if tensor.layout is torch.strided else tensor

    if not isinstance(expected, torch.Tensor) or not expected.is_floating_point():
        return False
    apart = distance(actual)
    if apart is None:
        return False
    steps = [distance(results[name]) for results in results_near(trial.map_tensors(contiguous), expected.dtype)]
    return apart <= _ROUNDINGS * max((step for step in steps if step is not None), default=0.0)


def first_difference(actual: Results, expected: Results, **options: Any) -> tuple[str, str] | None:
    """The name of the first result that differs, and how; see `difference`."""
    for name, value in expected.items():
        found = difference(actual[name], value, **options)
        if found:
            return name, found
    return None


def compare(
    trial: Trial,
    actual: Results,
    right: Results,
    problem: str,
    fix: str,
    *,
    how: str = "",
    ties: bool = False,
    rounding: bool = False,
    coarse: bool = False,
    **fields: str | None,
) -> None:
    """Raise the fault `problem` of a trial for the first result that is not the right one.

    Args:
        how: what `got` begins with: how the call was made.
        ties: results of indices may differ where an input has equal elements.
        rounding: floats may be as far off as those for inputs that differ by rounding.
        coarse: floats may be as far off as those of the coarsest input, in whose dtype one of two ways may compute.
    """
    of_inputs = max((tolerance_of(x.dtype) for x in trial.tensors), default=0.0) if coarse else 0.0
    for name, value in right.items():
        found = difference(actual[name], value, rtol=trial.rtol)
        if found and trial.rtol is None and _is_wide(value, of_inputs):
            found = difference(actual[name], value, rtol=of_inputs)
        if found and coarse and _is_nearly_zero(trial, value) and _is_rounding(trial, name, actual[name], value):
            continue
        if not found or (ties and is_tie_of_indices(trial, value, actual[name])):
            continue
        if not rounding or not _is_rounding(trial, name, actual[name], value):
            raise trial.fault(problem, f"{how}{name}: {found}", fix, **fields)


def _is_wide(value: Any, tolerance: float) -> bool:
    """Is it a tensor of floats of which fewer digits are compared with this tolerance?"""
    return isinstance(value, torch.Tensor) and 0 < tolerance_of(value.dtype) < tolerance


def _is_nearly_zero(trial: Trial, value: Any) -> bool:
    """Are all finite elements small beside those of the inputs? They may be what rounding leaves of differences."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.layout is not torch.strided:
        return False
    inputs = [x.double().abs() for x in trial.tensors if x.is_floating_point() and x.layout is torch.strided]
    largest = max((float(x.nan_to_num(0.0, 0.0).max()) for x in inputs if x.numel()), default=0.0)
    return bool((value.double().nan_to_num(0.0, 0.0, 0.0).abs() <= tolerance_of(value.dtype) * largest).all())


def copied(value: Any) -> Any:
    """The same nest with copies of its tensors."""
    return _torch.trees.tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf, value)


def is_tie_of_indices(trial: Trial, *values: Any) -> bool:
    """May results of indices differ between two right calls, since an input has equal elements?"""
    tensors = tensors_in(list(values))
    most = max((tensor.numel() for tensor in trial.tensors), default=0)
    if not tensors or any(tensor.dtype is not torch.int64 for tensor in tensors):
        return False
    if any(tensor.numel() and not 0 <= int(tensor.min()) <= int(tensor.max()) < most for tensor in tensors):
        return False
    return any(
        tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.dtype.is_complex
        or tensor.detach().cpu().to(torch.float64).unique().numel() < tensor.numel()
        for tensor in trial.tensors
    )
