"""An operator as a function of the tensors that it can be differentiated by, in the precision that shows most.

`Function.of` makes float64 of the floating-point tensors of a trial if the operator takes that. It has copies of all
tensors; a call gets fresh ones where the operator writes to its arguments. Each call has the same random seed.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import linecache
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from customops import _torch
from customops._autograd import recompute
from customops.checks._inputs import is_plain, seeded, tensors_in
from customops.checks._outcome import NotExercised, in_short
from customops.checks._trial import FAILS, Trial, failed_call
from customops.errors import CheckError, UnsupportedError, is_users, where

_WIDE = {
    torch.float64: torch.float64,
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
    torch.complex128: torch.complex128,
}
_MIDDLE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
OTHER_SEED = 1  #: Not that of `seeded`.
_COARSE = 1e-3  #: What resolves less than this is too coarse for finite differences.

Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class Input:
    """A tensor to differentiate by: the argument, what to call it, and whether the user's tensor requires grad."""

    argument: str
    label: str
    tensor: torch.Tensor
    requires_grad: bool


def has_formula(trial: Trial) -> bool:
    """Is there a kernel at an autograd key, or is the operator made of others?"""
    key = _torch.dispatcher.autograd_key(trial.tensors)
    keys = ("Autograd", "CompositeImplicitAutograd", *([key] if key else []))
    return any(_torch.dispatcher.has_kernel(trial.name, each) for each in keys)


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Gradients are recorded, whatever the caller has switched off; torch's warnings about them are not shown."""
    with torch.inference_mode(False), torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Function:
    """The operator of a trial as a function of `inputs`, which gives `outputs`: floating-point tensors."""

    def __init__(self, trial: Trial) -> None:
        self.trial = own = trial.copy(leaves=True)
        self.writes = bool(trial.schema.mutated)
        self._leaves, self._spec = _torch.tensors.tree_flatten((own.args, own.kwargs))
        self._leaves = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in self._leaves]
        self.inputs, self._positions = self._find_inputs(trial)
        #: Of all tensors that a call leaves behind, those that may have a gradient.
        self._kept: tuple[int, ...] | None = None
        #: The history of what the latest call was given to write to.
        self.entered: list[Any] = []
        #: What is called.
        self.called: Callable[..., Any] = trial.op

    @classmethod
    def of(cls, trial: Trial) -> Function:
        """The function in the widest precision that the operator takes.

        Raises:
            NotExercised: there is nothing to differentiate by, or it differs from call to call, or it is too coarse.
        """
        trial.require_data()
        own = cls(trial)
        if not own.inputs:
            raise NotExercised("there is no floating-point input that may have a gradient")
        if not has_formula(trial) and not any(tensor.requires_grad for tensor in trial.tensors):
            raise NotExercised("the op has no gradient formula (register_autograd), and the sample requires none")
        for dtypes in (_WIDE, _MIDDLE):
            wider = own.wider(trial, dtypes)
            if wider is not None and wider.epsilon < _COARSE:
                return wider
        try:
            own.settle()
        except NotExercised:
            raise
        except Exception as error:
            raise failed_call(trial.name, FAILS, error) from error
        if own.epsilon >= _COARSE:
            raise NotExercised("the operator takes no dtype that is fine enough for finite differences: try float64")
        return own

    def wider(self, trial: Trial, dtypes: dict[torch.dtype, torch.dtype]) -> Function | None:
        """The same function on tensors of other dtypes, if the operator takes them."""
        if all(dtypes.get(tensor.dtype, tensor.dtype) == tensor.dtype for tensor in trial.tensors):
            return None
        function = Function(trial.map_tensors(lambda _name, tensor: _convert(tensor, dtypes)))
        try:
            function.settle()
        except NotExercised:
            raise
        except Exception:  # other dtypes may be refused, by any kind of error
            return None
        return function

    def settle(self) -> None:
        """Call it twice at the given inputs, to see what it returns and that this is no matter of chance."""
        results = self._results(self.values)
        self._kept = tuple(i for i, x in enumerate(results) if isinstance(x, torch.Tensor) and x.dtype in _WIDE)
        if not self._kept:
            raise NotExercised("the operator has no floating-point output")
        again = self(self.values)
        self.base = [results[i].detach() for i in self._kept]
        for one, other in zip(self.base, again, strict=True):
            if one.shape != other.shape or not torch.equal(one.nan_to_num(), other.nan_to_num()):
                raise NotExercised("the results differ from call to call, also with the same random seed")

    def reference(self) -> Function | None:
        """The plain function that computes the same, of the same inputs, if there is one."""
        if self.trial.reference is None:
            return None
        function = copy.copy(self)
        function.called, function.entered = self.trial.reference, []
        return function

    @property
    def values(self) -> Tensors:
        return [item.tensor for item in self.inputs]

    @property
    def epsilon(self) -> float:
        """What the coarsest of inputs and outputs resolves."""
        return max(torch.finfo(tensor.dtype).eps for tensor in [*self.values, *self.base])

    def __call__(self, values: Sequence[torch.Tensor]) -> Tensors:
        """The outputs for these inputs, on which the operator may write if they are no leaves."""
        results = self._results(values)
        return [results[i] for i in self._kept or ()]

    def fault(
        self, problem: str, expected: str, got: str, fix: str, *, argument: str | None = None, kind: str = "backward"
    ) -> CheckError:
        """The finding that the formula is wrong, with its place."""
        where = place_of_formula(self.trial, kind)
        fields = {"argument": argument, "expected": expected, "got": got, "where": where, "fix": fix}
        return CheckError(problem, op=self.trial.name, **fields)

    def is_random(self) -> bool:
        """Does another random seed make another result?"""
        args, kwargs = self._arguments(self.values)
        with torch.no_grad(), seeded((args, kwargs)):
            torch.default_generator.manual_seed(OTHER_SEED)
            results = _torch.tensors.tree_leaves(self.trial.op(*args, **kwargs))
        pairs = zip(results, self.base, strict=False)
        return any(isinstance(x, torch.Tensor) and x.shape == y.shape and not torch.equal(x, y) for x, y in pairs)

    def call_with_other_numbers(self, values: Sequence[torch.Tensor]) -> None:
        """Call it with these inputs, and with other floating-point numbers in the place of numbers."""
        args, kwargs = _torch.tensors.tree_map(_other_number, self._arguments(values))
        with seeded((args, kwargs)):
            self.trial.op(*args, **kwargs)

    def _arguments(self, values: Sequence[torch.Tensor]) -> Any:
        leaves = list(self._leaves)
        if self.writes:
            values = [value.clone() for value in values]
            self.entered = [value.grad_fn for value in values]
            leaves = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        for positions, value in zip(self._positions, values, strict=True):
            for position in positions:
                leaves[position] = value
        return _torch.tensors.tree_unflatten(leaves, self._spec)

    def _results(self, values: Sequence[torch.Tensor]) -> list[Any]:
        """What a call returns and writes, each tensor once."""
        args, kwargs = self._arguments(values)
        with seeded((args, kwargs)):
            returned = self.called(*args, **kwargs)
        results = _torch.tensors.tree_leaves(returned)
        if self.writes:
            known = {id(result) for result in results}
            call = Trial(self.trial.op, args, kwargs)
            results += [tensor for tensor in tensors_in(call.mutated) if id(tensor) not in known]
        return results

    def _find_inputs(self, trial: Trial) -> tuple[list[Input], list[list[int]]]:
        """The tensors to differentiate by, and where each is among the leaves."""
        passed = _torch.tensors.tree_leaves((trial.args, trial.kwargs))
        without = arguments_without_gradient(trial)
        inputs, positions = [], []
        for name, label, tensor in named_tensors(trial):
            at = [i for i, value in enumerate(passed) if value is tensor]
            if name in without or tensor.dtype not in _WIDE or not is_plain(tensor) or at in positions:
                continue
            inputs.append(Input(name, label, self._leaves[at[0]], tensor.requires_grad))
            positions.append(at)
        return inputs, positions


def arguments_without_gradient(trial: Trial) -> frozenset[str]:
    """The arguments that are declared to have none.

    Raises:
        NotExercised: the operator has no gradients at all.
    """
    found = trial.custom_op
    if found is None:
        return frozenset()
    said, formulas = found._definition.differentiable, found._rules.autograd.formulas
    if not said.op:
        raise NotExercised("the operator is declared not to be differentiable")
    declared: frozenset[str] = said.nondiff_args.union(*(formula.nondiff_args for formula in formulas.values()))
    return declared


def place_of_formula(trial: Trial, kind: str = "backward") -> str | None:
    """Where the user wrote the formula, or the function it is derived from, if that is known."""
    found = trial.custom_op
    formula = found and found._rules.autograd.formulas.get(kind)
    return where(derived_from(trial, kind) or formula.fn) if formula else None


def derived_from(trial: Trial, kind: str = "backward") -> Callable[..., Any] | None:
    """The function that `register_autograd_from` was given, if the formula is its derivative."""
    found = trial.custom_op
    formula = found and found._rules.autograd.formulas.get(kind)
    return recompute.derived_from(formula.fn) if formula else None


def named_tensors(trial: Trial) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Each tensor, with the argument that it is or is part of, and what to call it: ``xs[1]``."""
    for name, value in trial.arguments.items():
        tensors = tensors_in(value)
        for i, tensor in enumerate(tensors):
            yield name, name if tensor is value else f"{name}[{i}]", tensor


def _other_number(value: Any) -> Any:
    return value * 1.25 + 0.1 if isinstance(value, float) else value


def _convert(tensor: torch.Tensor, dtypes: dict[torch.dtype, torch.dtype]) -> torch.Tensor:
    if not is_plain(tensor) or dtypes.get(tensor.dtype, tensor.dtype) == tensor.dtype:
        return tensor
    return tensor.detach().to(dtypes[tensor.dtype]).requires_grad_(tensor.requires_grad)


Gradients = list[torch.Tensor | None]

#: What messages say that refuse, on purpose, to differentiate.
_REFUSALS = (
    "not implemented",
    "not support",
    "unsupported",
    "not differentiable",
    "isn't differentiable",
    "differentiable once",
    "once_differentiable",
    "can't differentiate",
    "cannot differentiate",
    "register_autograd",
    "register_jvp",
    "no backward",
    "not require grad",
    "requires grad",
    "require gradients",
    "second derivative",
    "is a view",
    "inplace arithmetic",
)
#: What autograd says of gradients that do not fit.
_MISFITS = ("invalid gradient", "incorrect number of gradients", "backward returned", "jvp returned")


class Recorded:
    """A call that autograd recorded: its inputs, its outputs, and which of them have a gradient."""

    def __init__(
        self, function: Function, point: Sequence[torch.Tensor], wanted: Collection[int] | None = None
    ) -> None:
        """Call `function` at `point`; the inputs of the numbers `wanted` require grad, by default all."""
        self.function = function
        wanted = range(len(point)) if wanted is None else wanted
        self.leaves = [x.detach().clone().requires_grad_(i in wanted) for i, x in enumerate(point)]
        self.outputs: Tensors = function(self.leaves)
        self.tracked = [i for i, output in enumerate(self.outputs) if self._is_recorded(output.grad_fn)]

    def _is_recorded(self, node: Any) -> bool:
        """Did autograd record what the operator did? It may know no gradient of it, or not see a write at all."""
        unseen = any(node is entered for entered in self.function.entered)
        return node is not None and node.name() != "WarnNotImplemented" and not unseen

    def returns_an_input(self) -> bool:
        """Is a result an input as it is? The operator may be there for what its backward does."""
        pairs = itertools.product(self.leaves, self.outputs)
        return any(x.shape == y.shape and torch.equal(x, y) for x, y in pairs)

    def gradients(self, cotangents: Sequence[torch.Tensor | None], create_graph: bool = False) -> Gradients:
        """The gradients of the inputs, for gradients of the outputs, of which None are left out."""
        given = [(self.outputs[i], cotangents[i]) for i in self.tracked if cotangents[i] is not None]
        wanted = [leaf for leaf in self.leaves if leaf.requires_grad]
        if not given or not wanted:
            return [None] * len(self.leaves)
        outputs, grads = zip(*given, strict=True)
        with seeded(()):
            # What backward draws anew is not to be, by chance, what forward drew.
            torch.default_generator.manual_seed(OTHER_SEED)
            found = iter(
                torch.autograd.grad(
                    outputs, wanted, grads, retain_graph=True, create_graph=create_graph, allow_unused=True
                )
            )
        return [next(found) if leaf.requires_grad else None for leaf in self.leaves]


def refuses_gradients(error: BaseException) -> bool:
    """Does an error say that something is not supported, rather than that it went wrong?"""
    if isinstance(error, (NotImplementedError, UnsupportedError, NotExercised)):
        return True
    text = str(error)
    if any(said in text for said in _MISFITS):
        return False
    if isinstance(error, (RuntimeError, ValueError)) and any(said in text.lower() for said in _REFUSALS):
        return True
    frames = list(traceback.walk_tb(error.__traceback__))
    of_user = [(frame, line) for frame, line in frames if is_users(frame.f_code.co_filename)]
    if not of_user:
        return True  # torch's own code, or that of an extension: it knows what it refuses
    frame, line = of_user[-1]
    is_last = frame is frames[-1][0]
    return is_last and linecache.getline(frame.f_code.co_filename, line).strip().startswith(("raise", "assert"))


@contextmanager
def backward_may_fail(function: Function, problem: str, kind: str = "backward") -> Iterator[None]:
    """What the block raises becomes a finding with this problem, or NotExercised if it is a refusal."""
    try:
        yield
    except (CheckError, NotExercised):
        raise
    except Exception as error:
        if refuses_gradients(error):
            raise NotExercised(f"the operator refuses to be differentiated: {in_short(error, 200)}") from error
        fix = "have the formula take what the operator itself takes, or refuse it with a NotImplementedError"
        where = place_of_formula(function.trial, kind)
        raise failed_call(function.trial.name, problem, error, fix, where=where) from error


def differentiable_inputs(function: Function) -> list[int]:
    """The inputs that may require grad, if not all may.

    Raises:
        NotExercised: none may, or no output has a gradient then.
    """
    everything = list(range(len(function.inputs)))
    try:
        with backward_may_fail(function, "the operator fails where its inputs require grad"):
            recorded = Recorded(function, function.values)
            recorded.gradients([torch.ones_like(output) for output in recorded.outputs])
            accepted = everything
    except NotExercised:
        accepted = [i for i in everything if len(everything) > 1 and _accepts(function, i)]
        if not accepted:
            raise
        recorded = Recorded(function, function.values, accepted)
    if not recorded.tracked:
        raise NotExercised("no output requires grad: the operator has no gradient formula, or says that it has none")
    return accepted


def requiring_grad(trial: Trial) -> Trial:
    """The same call, in which every differentiable input requires grad.

    Raises:
        NotExercised: no input is differentiable.
    """
    with recording():
        function = Function.of(trial)
        labels = {function.inputs[i].label for i in differentiable_inputs(function)}
    chosen = {id(tensor) for _, label, tensor in named_tensors(trial) if label in labels}
    return trial.map_tensors(lambda _, x: x.detach().requires_grad_() if id(x) in chosen else x)


def _accepts(function: Function, i: int) -> bool:
    try:
        recorded = Recorded(function, function.values, [i])
        recorded.gradients([torch.ones_like(output) for output in recorded.outputs])
    except Exception:  # of whatever kind: with all inputs it was a refusal
        return False
    return True


def are_finite(gradients: Gradients) -> bool:
    return all(gradient is None or bool(gradient.isfinite().all()) for gradient in gradients)


def only(cotangents: Sequence[torch.Tensor], chosen: Sequence[int], outputs: Sequence[torch.Tensor]) -> Gradients:
    """The gradients of these outputs, of the outputs' dtypes, and None for the others."""
    pairs = zip(cotangents, outputs, strict=True)
    return [v.to(output.dtype) if i in chosen else None for i, (v, output) in enumerate(pairs)]


# Derivatives along a direction, by central differences. `error` of a slope is made of three parts: what half the step
# changes; what remains, at half the step, of the difference between the slopes to the two sides, which at a kink does
# not get smaller with the step; and rounding. It is large near kinks and jumps, for steep functions and for those that
# round inside, and small wherever the function is smooth at the scale of the step.
Evaluate = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor | None]]

Verdict = Literal["agrees", "unclear", "differs"]

_SEED = 0x5EED
_FINE = 1e-10  #: What resolves less is compared with other steps and tolerances.


def generator() -> torch.Generator:
    """Random numbers of one's own, the same in every run."""
    return torch.Generator().manual_seed(_SEED)


def random_like(tensors: Sequence[torch.Tensor], numbers: torch.Generator) -> Tensors:
    """Tensors of normally distributed numbers."""
    return [torch.randn(t.shape, dtype=t.dtype, generator=numbers).to(t.device) for t in tensors]


def scale_of(tensor: torch.Tensor) -> float:
    """The size of a typical element; 1 if there is none."""
    size = tensor.detach().abs()
    finite = size[size.isfinite() & (size > 0)]
    typical = float(finite.mean()) if finite.numel() else 1.0
    return min(max(typical, 1e-6), 1e6)


def random_direction(
    point: Sequence[torch.Tensor],
    scales: Sequence[float],
    moving: Collection[int],
    numbers: torch.Generator,
    *,
    symmetric: bool = False,
) -> Tensors:
    """Random changes of the tensors of the numbers `moving`, of these sizes, and zeros for the others."""
    random = zip(random_like(point, numbers), scales, strict=True)
    found = [u * scale if i in moving else torch.zeros_like(u) for i, (u, scale) in enumerate(random)]
    return [as_symmetric(u) for u in found] if symmetric else found


def shifted(point: Sequence[torch.Tensor], direction: Sequence[torch.Tensor], step: float) -> Tensors:
    return [x + step * u for x, u in zip(point, direction, strict=True)]


def as_symmetric(direction: torch.Tensor) -> torch.Tensor:
    """A direction in which square matrices stay symmetric; functions of symmetric matrices read one triangle alone."""
    is_square = direction.dim() > 1 and direction.shape[-1] == direction.shape[-2]
    return direction + direction.mH if is_square else direction


def inner(one: Sequence[torch.Tensor | None], other: Sequence[torch.Tensor | None]) -> float:
    """The real part of the inner product of tensors; None counts as zero."""
    return sum(
        float((a.conj() * b).real.sum(dtype=torch.float64))
        for a, b in zip(one, other, strict=True)
        if a is not None and b is not None
    )


def size_of_terms(one: Sequence[torch.Tensor | None], other: Sequence[torch.Tensor | None]) -> float:
    """The sum of the sizes of the terms of the inner product."""
    return sum(
        float((a.abs() * b.abs()).sum(dtype=torch.float64))
        for a, b in zip(one, other, strict=True)
        if a is not None and b is not None
    )


@dataclass(frozen=True)
class Accuracy:
    """The steps to take, the best one first, and how far apart results may be, relatively to the sum of all terms."""

    epsilon: float
    steps: tuple[float, ...]
    tolerance: float

    @classmethod
    def of(cls, epsilon: float) -> Accuracy:
        if epsilon < _FINE:
            return cls(epsilon, (1e-4, 1e-3, 1e-5, 1e-2), 1e-4)
        return cls(epsilon, (1e-2, 3e-2, 1e-1), 2e-2)


@dataclass(frozen=True)
class Slope:
    """The derivative of each output along a direction, and its error, both elementwise."""

    value: Tensors
    error: Tensors

    def is_zero(self) -> bool:
        return not any(bool((value != 0).any()) for value in self.value)

    def is_finite(self) -> bool:
        return all(bool((value + error).isfinite().all()) for value, error in zip(self.value, self.error, strict=True))


def slope(
    function: Evaluate,
    point: Sequence[torch.Tensor],
    direction: Sequence[torch.Tensor],
    step: float,
    epsilon: float,
    base: Sequence[torch.Tensor | None] | None = None,
) -> Slope | None:
    """The slope of a function at a point; None if it is not defined around it, or changes its shape there.

    None, too, if the elements are so large that a step is lost in rounding.
    """
    if not all(map(functools.partial(_can_step, step / 2), point, direction)):
        return None
    try:
        with torch.no_grad():
            at = [
                _wide(base if base is not None and factor == 0 else function(shifted(point, direction, factor * step)))
                for factor in (0.0, 1.0, -1.0, 0.5, -0.5)
            ]
    except Exception:  # the neighbourhood may be refused: the operator need take the given inputs alone
        return None
    values, errors = [], []
    for outputs in zip(*at, strict=True):
        if any(output.shape != outputs[0].shape for output in outputs):
            return None
        value, error = _of_output(outputs, step, epsilon)
        values.append(value)
        errors.append(error)
    return Slope(values, errors)


def _can_step(step: float, x: torch.Tensor, direction: torch.Tensor) -> bool:
    if not x.numel():
        return True
    way = step * direction
    return bool((((x + way) - x - way).abs() <= 1e-3 * way.abs() + torch.finfo(x.dtype).tiny).all())


def judge(
    found: Slope | None,
    cotangents: Sequence[torch.Tensor | None],
    gradients: Sequence[torch.Tensor | None],
    direction: Sequence[torch.Tensor],
    tolerance: float,
) -> Verdict:
    """Is the slope, weighed with `cotangents`, that along `direction` by the gradients?"""
    if found is None or not found.is_finite():
        return "unclear"
    numeric, analytic = inner(cotangents, found.value), inner(gradients, direction)
    size = size_of_terms(cotangents, found.value) + size_of_terms(gradients, direction)
    error = size_of_terms(cotangents, found.error)
    if not abs(numeric) + abs(analytic) + size + error < float("inf"):
        return "unclear"
    if abs(numeric - analytic) > 10 * error + tolerance * size:
        return "differs"
    return "unclear" if error > 0.01 * size > 0 else "agrees"


def confirmed(verdicts: Sequence[Verdict]) -> bool:
    """Do the differences with all steps that can be trusted say so?"""
    return verdicts.count("differs") >= 2 and "agrees" not in verdicts


def _of_output(at: Sequence[torch.Tensor], step: float, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    here, ahead, behind, half_ahead, half_behind = at
    whole, half = (ahead - behind) / (2 * step), (half_ahead - half_behind) / step
    bend = (ahead - 2 * here + behind) / step
    half_bend = (half_ahead - 2 * here + half_behind) / (step / 2)
    rounding = 8 * epsilon * torch.maximum(ahead.abs(), behind.abs()) / step
    error = (half - whole).abs() + (2 * half_bend - bend).abs() + rounding
    return half + (half - whole) / 3, error


def _wide(outputs: Sequence[torch.Tensor | None]) -> Tensors:
    return [
        output.detach().to(torch.complex128 if output.is_complex() else torch.float64)
        for output in outputs
        if output is not None
    ]
