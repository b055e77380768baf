"""An operator as a function of the tensors that it can be differentiated by, in the precision that shows most.

`Function.of` makes float64 of the floating-point tensors of a trial if the operator takes that. It has copies of all
tensors; a call gets fresh ones where the operator writes to its arguments. Each call has the same random seed.
"""

from __future__ import annotations

import itertools
import linecache
import re
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal, NamedTuple

import torch

from customops import _torch
from customops._autograd import recompute
from customops._places import is_users, where
from customops.checks._inputs import is_plain, seeded, tensors_in
from customops.checks._outcome import NotExercised, in_short, is_singular, raised_at, require
from customops.checks._runs import difference
from customops.checks._trial import FAILS, Trial, failed_call
from customops.errors import CheckError, UnsupportedError

_WIDE = dict.fromkeys((torch.float64, torch.float32, torch.float16, torch.bfloat16), torch.float64)
_WIDE |= dict.fromkeys((torch.complex128, torch.complex64), torch.complex128)
_MIDDLE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
_OTHER_SEED = 1  #: Not that of `seeded`.
_COARSE = 1e-3  #: What resolves less than this is too coarse for finite differences.

Tensors = list[torch.Tensor]
Gradients = Sequence[torch.Tensor | None]


class Input(NamedTuple):
    """A tensor to differentiate by, what to call it, and whether the user's tensor requires grad."""

    label: str
    tensor: torch.Tensor
    requires_grad: bool


@contextmanager
def recording() -> Iterator[None]:
    """Record gradients, whatever the caller has switched off, without torch's warnings about them."""
    with torch.inference_mode(False), torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Function:
    """The operator of a trial as a function of `inputs`, floating-point tensors, which gives such tensors."""

    def __init__(self, trial: Trial) -> None:
        self.trial = own = trial.copy(leaves=True)
        self.writes = bool(trial.schema.mutated)
        #: Of all tensors that a call leaves behind, those that may have a gradient.
        self._kept: tuple[int, ...] | None = None
        #: The history of what the latest call was given to write to.
        self.entered: list[Any] = []
        #: What is called: the operator, or its reference function.
        self.called: Callable[..., Any] = trial.op
        without: frozenset[str] = frozenset()
        if trial.custom_op is not None:
            declared, formulas = trial.custom_op._definition.differentiable, trial.custom_op._rules.autograd.formulas
            require(declared.op, "the operator is declared not to be differentiable")
            without = declared.nondiff_args.union(*(formula.nondiff_args for formula in formulas.values()))
        leaves, self._spec = _torch.trees.tree_flatten((own.args, own.kwargs))
        self._leaves = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.inputs: list[Input] = []
        self._positions: list[list[int]] = []  #: of each input among the leaves
        passed = _torch.trees.tree_leaves((trial.args, trial.kwargs))
        constant = {id(tensor) for name, _, tensor in trial.named_tensors if name in without}  # also for another name
        for _, label, tensor in trial.named_tensors:
            at = [i for i, value in enumerate(passed) if value is tensor]
            if id(tensor) not in constant and tensor.dtype in _WIDE and is_plain(tensor) and at not in self._positions:
                self.inputs.append(Input(label, self._leaves[at[0]], tensor.requires_grad))
                self._positions.append(at)

    @classmethod
    def of(cls, trial: Trial) -> Function:
        """Return the function in the widest precision that the operator takes; NotExercised if none compares."""
        trial.require_data()
        require(cls(trial).inputs, "there is no floating-point input that may have a gradient")
        keys = ("Autograd", "CompositeImplicitAutograd", _torch.dispatcher.autograd_key(trial.tensors))
        has_formula = any(key and _torch.dispatcher.has_kernel(trial.name, key) for key in keys)
        if not has_formula and not any(tensor.requires_grad for tensor in trial.tensors):
            raise NotExercised("the op has no gradient formula (register_autograd), and the sample requires none")
        for dtypes in (_WIDE, _MIDDLE, {}):
            if dtypes and all(dtypes.get(tensor.dtype, tensor.dtype) == tensor.dtype for tensor in trial.tensors):
                continue
            others = [x for x in trial.distinct if is_plain(x) and dtypes.get(x.dtype, x.dtype) != x.dtype]
            wider = [x.detach().to(dtypes[x.dtype]).requires_grad_(x.requires_grad) for x in others]
            function = cls(trial.replaced(dict(zip(map(id, others), wider, strict=True))))
            try:
                function.settle()
            except NotExercised:
                raise
            except Exception as error:
                if dtypes:  # other dtypes may be refused, by any kind of error
                    continue
                raise failed_call(trial.name, FAILS, error) from error
            if function.epsilon < _COARSE:
                return function
        raise NotExercised("the operator takes no dtype that is fine enough for finite differences: try float64")

    def settle(self) -> None:
        """Call it twice at the given inputs, to see what it returns and that this is no matter of chance."""
        results = self._results(self.values)
        self._kept = tuple(i for i, x in enumerate(results) if isinstance(x, torch.Tensor) and x.dtype in _WIDE)
        require(self._kept, "the operator has no floating-point output")
        again = self(self.values)
        self.base = [results[i].detach() for i in self._kept]
        for one, other in zip(self.base, again, strict=True):
            if one.shape != other.shape or not torch.equal(*(each.to_dense().nan_to_num() for each in (one, other))):
                raise NotExercised("the results differ from call to call, also with the same random seed")

    @property
    def values(self) -> Tensors:
        return [item.tensor for item in self.inputs]

    @property
    def epsilon(self) -> float:
        """Return what the coarsest of inputs and outputs resolves."""
        return max(torch.finfo(tensor.dtype).eps for tensor in [*self.values, *self.base])

    def __call__(self, values: Sequence[torch.Tensor], seed: int | None = None) -> Tensors:
        """Return the outputs for these inputs, on which the operator may write if they are no leaves."""
        results = self._results(values, seed)
        return [results[i] for i in self._kept or ()]

    def of_some(self, numbers: Sequence[int]) -> Callable[..., tuple[torch.Tensor, ...]]:
        """Return the function of the inputs of these numbers alone, as `torch.func` takes functions."""

        def call(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
            by_number = dict(zip(numbers, values, strict=True))
            return tuple(self([by_number.get(i, x) for i, x in enumerate(self.values)]))

        return call

    def fault(
        self, problem: str, expected: str, got: str, fix: str, *, argument: str | None = None, kind: str = "backward"
    ) -> CheckError:
        """Return the finding that the formula is wrong, with its place."""
        fields = {"argument": argument, "expected": expected, "where": place_of_formula(self.trial, kind)}
        return self.trial.finding(problem, got=got, fix=fix, **fields)

    def is_random(self) -> bool:
        """Return whether another random seed makes another result."""
        with torch.no_grad():
            pairs = zip(self(self.values, _OTHER_SEED), self.base, strict=True)
            return any(x.shape == y.shape and not torch.equal(x, y) for x, y in pairs)

    def call_with_other_numbers(self, values: Sequence[torch.Tensor]) -> None:
        """Call it with these inputs, and with other floating-point numbers in the place of numbers."""
        args, kwargs = _torch.trees.tree_map(
            lambda value: value * 1.25 + 0.1 if isinstance(value, float) else value, self._arguments(values)
        )
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
        return _torch.trees.tree_unflatten(leaves, self._spec)

    def _results(self, values: Sequence[torch.Tensor], seed: int | None = None) -> list[Any]:
        """Return what a call returns and writes, each tensor once."""
        args, kwargs = self._arguments(values)
        with seeded((args, kwargs)):
            if seed is not None:
                torch.default_generator.manual_seed(seed)
            results = _torch.trees.tree_leaves(self.called(*args, **kwargs))
        if self.writes:
            known = {id(result) for result in results}
            call = Trial(self.trial.op, args, kwargs)
            results += [tensor for tensor in tensors_in(call.mutated) if id(tensor) not in known]
        return results


def function_derived(trial: Trial, kind: str = "backward") -> Callable[..., Any] | None:
    """Return the reference whose derivative the formula is, or None if the user wrote the formula."""
    formula = trial.custom_op and trial.custom_op._rules.autograd.formulas.get(kind)
    return recompute.derived_from(formula.fn) if formula else None


def place_of_formula(trial: Trial, kind: str = "backward") -> str | None:
    """Return where the user wrote the formula, or the function it is derived from, if that is known."""
    formula = trial.custom_op and trial.custom_op._rules.autograd.formulas.get(kind)
    return where(function_derived(trial, kind) or formula.fn) if formula else None


#: What messages say that refuse, on purpose, to differentiate.
_REFUSALS = re.compile(
    "not implemented|not support|unsupported|not differentiable|isn't differentiable|differentiable once"
    "|once_differentiable|can't differentiate|cannot differentiate|register_autograd|register_jvp|no backward"
    "|not require grad|requires grad|require gradients|second derivative|is a view|inplace arithmetic"
)
#: What autograd says of gradients that do not fit.
_MISFITS = ("invalid gradient", "incorrect number of gradients", "backward returned", "jvp returned")


class Recorded:
    """A call that autograd recorded: its inputs, its outputs, and which of them have a gradient."""

    def __init__(self, function: Function, point: Sequence[torch.Tensor], wanted: Collection[int]) -> None:
        """Call `function` at `point`; the inputs of the numbers `wanted` require grad."""
        self.leaves = [x.detach().clone().requires_grad_(i in wanted) for i, x in enumerate(point)]
        self.outputs: Tensors = function(self.leaves)
        self.tracked: list[int] = []
        for k, output in enumerate(self.outputs):
            # Autograd may know no gradient of what the operator did, or not see a write at all.
            node: Any = output.grad_fn
            is_unseen = any(node is entered for entered in function.entered)
            if node is not None and node.name() != "WarnNotImplemented" and not is_unseen:
                self.tracked.append(k)

    def returns_an_input(self) -> bool:
        """Return whether a result is an input as it is. The operator may be there for what its backward does."""
        pairs = itertools.product(self.leaves, self.outputs)
        return any(x.shape == y.shape and torch.equal(x, y) for x, y in pairs)

    def cotangents(self, numbers: torch.Generator, chosen: Collection[int] | None = None) -> Gradients:
        """Return random gradients of the outputs of the numbers `chosen`, by default of all that have one."""
        return only(random_like(self.outputs, numbers), self.tracked if chosen is None else chosen)

    def gradients(self, cotangents: Gradients, create_graph: bool = False) -> Gradients:
        """Return the gradients of the inputs, for gradients of the outputs, of which None are left out."""
        given = [(self.outputs[i], cotangents[i]) for i in self.tracked if cotangents[i] is not None]
        if not given or not any(leaf.requires_grad for leaf in self.leaves):
            return [None] * len(self.leaves)
        outputs, grads = zip(*given, strict=True)
        with seeded(()):
            # What backward draws anew is not to be, by chance, what forward drew.
            torch.default_generator.manual_seed(_OTHER_SEED)
            return gradients_of(outputs, self.leaves, grads, retain_graph=True, create_graph=create_graph)


def gradients_of(outputs: Sequence[torch.Tensor], leaves: Tensors, weights: Any, **options: Any) -> Gradients:
    """Return the gradients by some leaves, as `torch.autograd.grad` gives them; None for leaves that require none."""
    asked = [leaf for leaf in leaves if leaf.requires_grad]
    found = iter(torch.autograd.grad(outputs, asked, weights, allow_unused=True, **options))
    return [next(found) if leaf.requires_grad else None for leaf in leaves]


def refuses_gradients(error: BaseException) -> bool:
    """Return whether an error says that something is not supported, rather than that it went wrong."""
    if isinstance(error, (NotImplementedError, UnsupportedError, NotExercised)) or is_singular(error):
        return True
    text = str(error)
    if any(misfit in text for misfit in _MISFITS):
        return False
    if isinstance(error, (RuntimeError, ValueError)) and _REFUSALS.search(text.lower()):
        return True
    frames = list(traceback.walk_tb(error.__traceback__))
    of_user = [(frame, line) for frame, line in frames if is_users(frame.f_code.co_filename)]
    if not of_user:
        return True  # torch's own code, or that of an extension: it knows what it refuses
    frame, line = of_user[-1]
    is_last = frame is frames[-1][0]
    return is_last and linecache.getline(frame.f_code.co_filename, line).strip().startswith(("raise", "assert"))


@contextmanager
def formula_may_fail(function: Function, problem: str, kind: str = "backward") -> Iterator[None]:
    """Make what the block raises a finding with this problem, or NotExercised if it is a refusal."""
    try:
        yield
    except (CheckError, NotExercised):
        raise
    except Exception as error:
        if refuses_gradients(error):
            what = "forward mode" if kind == "jvp" else "to be differentiated"
            raise NotExercised(f"the operator refuses {what}: {in_short(error, 200)}") from error
        fix = "have the formula take what the operator itself takes, or refuse it with a NotImplementedError"
        if kind == "jvp":
            fix = "the tangent of an input that has none is None, or zeros: the formula has to take both"
        place = raised_at(error) or place_of_formula(function.trial, kind)
        raise failed_call(function.trial.name, problem, error, fix, where=place) from error


def differentiable_inputs(function: Function) -> list[int]:
    """Return the inputs that may require grad; NotExercised if none may, or no output has a gradient then."""

    def record(wanted: list[int]) -> Recorded:
        recorded = Recorded(function, function.values, wanted)
        recorded.gradients([torch.ones_like(output) for output in recorded.outputs])
        return recorded

    accepted = list(range(len(function.inputs)))
    try:
        with formula_may_fail(function, "the operator fails where its inputs require grad"):
            recorded = record(accepted)
    except NotExercised:
        everything, accepted = accepted, []
        for i in everything if len(everything) > 1 else ():
            with suppress(Exception):  # of whatever kind: with all inputs it was a refusal
                record([i])
                accepted.append(i)
        if not accepted:
            raise
        recorded = Recorded(function, function.values, accepted)
    require(recorded.tracked, "no output requires grad: the operator has no gradient formula, or says that it has none")
    return accepted


@contextmanager
def differentiable(trial: Trial) -> Iterator[tuple[Function, list[int]]]:
    """Yield the operator as a function, and the inputs to differentiate it by. Gradients are recorded in the block."""
    with recording():
        function = Function.of(trial)
        yield function, differentiable_inputs(function)


def requiring_grad(trial: Trial) -> Trial:
    """Return the call with every differentiable input requiring grad; NotExercised if none is differentiable."""
    with differentiable(trial) as (function, wanted):
        labels = {function.inputs[i].label for i in wanted}
    chosen = {id(tensor): tensor for _, label, tensor in trial.named_tensors if label in labels}
    return trial.replaced({key: tensor.detach().requires_grad_() for key, tensor in chosen.items()})


def are_finite(gradients: Gradients) -> bool:
    return all(gradient is None or bool(gradient.isfinite().all()) for gradient in gradients)


def only(cotangents: Gradients, chosen: Collection[int]) -> Gradients:
    """Return the tensors of the numbers `chosen`, and None for the others."""
    return [v if i in chosen else None for i, v in enumerate(cotangents)]


class Ordinary:
    """The gradients of one call as they are ordinarily asked for. However else they are, they have to be equal."""

    def __init__(self, function: Function, wanted: Sequence[int]) -> None:
        self.function, self.wanted = function, wanted
        self.recorded = Recorded(function, function.values, wanted)
        self.cotangents = self.recorded.cotangents(generator())
        self.rtol = 1e-7 if function.epsilon < 1e-7 else 1e-3

    def settle(self) -> bool:
        """Find the gradients, and return whether they are finite. CheckError if backward writes to what it must not."""
        kept = {
            "the gradient that it is given": [v for v in self.cotangents if v is not None],
            "an input of the operator": self.recorded.leaves,
            "a result of the operator": self.recorded.outputs,
        }
        before = {what: [tensor.detach().clone() for tensor in tensors] for what, tensors in kept.items()}
        with formula_may_fail(self.function, "backward fails"):
            gradients = self.recorded.gradients(self.cotangents)
        for what, tensors in kept.items():
            found = difference([tensor.detach() for tensor in tensors], before[what], exact=True)
            if found:
                fix = "use operations that make a new tensor, in the place of those that end in _; or write to a clone"
                raise self.function.fault(f"backward writes to {what}", "the values it had", found, fix)
        self.expected = [None if gradient is None else gradient.detach().clone() for gradient in gradients]
        return are_finite(self.expected)

    def judge(self, found: Gradients, expected: Gradients, problem: str, fix: str, argument: str | None = None) -> None:
        """Raise CheckError for a gradient that is not the expected one."""
        for i in self.wanted:
            leaf, ordinary = self.recorded.leaves[i], self.expected[i]
            one, other = (torch.zeros_like(leaf) if g is None else g.detach() for g in (found[i], expected[i]))
            # The gradient of a sum over a normalisation, say, is zero but for rounding.
            scale = 0.0 if ordinary is None or not ordinary.numel() else float(ordinary.abs().max())
            differs = difference(one, other, rtol=self.rtol, scale=scale)
            if differs:
                expected_text = f"the gradient of {self.function.inputs[i].label} as ordinarily"
                raise self.function.fault(problem, expected_text, differs, fix, argument=argument)

    def compare_choice(self, chosen: Sequence[int], problem: str, argument: str | None = None) -> None:
        """Compare the gradients of some inputs where these alone require grad."""
        problem = f"{problem} require{'s' if len(chosen) == 1 else ''} grad"
        with formula_may_fail(self.function, problem):
            found = Recorded(self.function, self.function.values, chosen).gradients(self.cotangents)
        some: Gradients = [gradient if k in chosen else None for k, gradient in enumerate(self.expected)]
        fix = "return a gradient for each argument in its place; ctx.needs_input_grad[i] is for argument i"
        self.judge(found, some, problem, fix, argument)


Verdict = Literal["agrees", "unclear", "differs"]

_FINE = 1e-10  #: What resolves less is compared with other steps and tolerances.


def generator() -> torch.Generator:
    """Return a generator of its own, whose numbers are the same in every run."""
    return torch.Generator().manual_seed(0x5EED)


def random_like(tensors: Sequence[torch.Tensor], numbers: torch.Generator) -> Tensors:
    """Return tensors of normally distributed numbers."""
    return [torch.randn(t.shape, dtype=t.dtype, generator=numbers).to(t.device) for t in tensors]


def scale_of(tensor: torch.Tensor) -> float:
    """Return the size of a typical element; 1 if there is none."""
    size = tensor.detach().abs()
    finite = size[size.isfinite() & (size > 0)]
    typical = float(finite.mean()) if finite.numel() else 1.0
    return min(max(typical, 1e-6), 1e6)


def shifted(point: Sequence[torch.Tensor], direction: Sequence[torch.Tensor], step: float) -> Tensors:
    return [x + step * u for x, u in zip(point, direction, strict=True)]


def inner(one: Gradients, other: Gradients) -> tuple[float, float]:
    """Return the real part of the inner product of tensors, and the sum of the sizes of its terms; None is zero."""
    pairs = [(a, b) for a, b in zip(one, other, strict=True) if a is not None and b is not None]
    product = sum(float((a.conj() * b).real.sum(dtype=torch.float64)) for a, b in pairs)
    return product, sum(float((a.abs() * b.abs()).sum(dtype=torch.float64)) for a, b in pairs)


class Slope(NamedTuple):
    """The derivative of each output along a direction, and its error, both elementwise, and both finite."""

    value: Tensors
    error: Tensors


class Claim(NamedTuple):
    """A statement of a formula: `weights` times the slope along a direction is `one` times `other`, as inner products.

    Gradients claim this of themselves and the direction, and tangents of the weights and themselves.
    """

    weights: Gradients
    one: Gradients
    other: Gradients


class Differences:
    """Slopes of a function along directions, by central differences, and claims that are judged by them."""

    def __init__(self, function: Function, wanted: Sequence[int] = ()) -> None:
        """Take the inputs of the numbers `wanted` as those to differentiate by."""
        self.function, self.wanted, self.point = function, wanted, function.values
        #: What the slopes are of: the function itself, or something derived from it.
        self.evaluate: Callable[[Sequence[torch.Tensor]], Tensors] = function
        self.scales = [scale_of(x) for x in self.point]
        self.numbers = generator()  #: random directions come from it
        is_fine = function.epsilon < _FINE
        self.steps = (1e-4, 1e-3, 1e-5, 1e-2) if is_fine else (1e-2, 3e-2, 1e-1)  #: the best one first
        self.tolerance = 1e-6 if is_fine else 2e-2  #: relatively to the sum of all terms, beside the error

    def direction(self, moving: Collection[int], *, symmetric: bool = False) -> Tensors:
        """Return random changes of the tensors `moving`, zeros for others; `symmetric` keeps symmetric matrices so."""
        random = zip(random_like(self.point, self.numbers), self.scales, strict=True)
        found = [u * scale if i in moving else torch.zeros_like(u) for i, (u, scale) in enumerate(random)]
        if not symmetric:
            return found
        return [u + u.mH if u.dim() > 1 and u.shape[-1] == u.shape[-2] else u for u in found]

    def slope(self, point: Tensors, direction: Tensors, step: float | None = None) -> Slope | None:
        """Return the slope at a point; None if the function is undefined around it, not finite, or changes its shape.

        The error is what half the step changes; what remains, at half the step, of the difference between the slopes to
        the two sides, which at a kink does not get smaller with the step; and rounding. It is small wherever the
        function is smooth at the scale of the step.
        """
        step = step or self.steps[0]
        for x, u in zip(point, direction, strict=True):
            way = step / 2 * u
            # Is the step lost in rounding?
            if not bool((((x + way) - x - way).abs() <= 1e-3 * way.abs() + torch.finfo(x.dtype).tiny).all()):
                return None
        try:
            with torch.no_grad():
                at = [self.evaluate(shifted(point, direction, by * step)) for by in (0.0, 1.0, -1.0, 0.5, -0.5)]
        except Exception:  # the neighbourhood may be refused: the operator need take the given inputs alone
            return None
        found = Slope([], [])
        for outputs in zip(*at, strict=True):
            if any(y.shape != outputs[0].shape for y in outputs):
                return None
            wide = torch.complex128 if outputs[0].is_complex() else torch.float64
            here, ahead, behind, half_ahead, half_behind = (y.detach().to(wide) for y in outputs)
            whole, half = (ahead - behind) / (2 * step), (half_ahead - half_behind) / step
            bend = (ahead - 2 * here + behind) / step
            half_bend = (half_ahead - 2 * here + half_behind) / (step / 2)
            rounding = 8 * self.function.epsilon * torch.maximum(ahead.abs(), behind.abs()) / step
            found.value.append(half + (half - whole) / 3)
            found.error.append((half - whole).abs() + (2 * half_bend - bend).abs() + rounding)
            if not (found.value[-1] + found.error[-1]).isfinite().all():
                return None
        return found

    def gradients_at(self, point: Tensors, chosen: Collection[int] | None = None) -> tuple[Gradients, Gradients]:
        """Return random gradients of the outputs `chosen`, by default of all, and those of the inputs that follow."""
        recorded = Recorded(self.function, point, self.wanted)
        cotangents = recorded.cotangents(self.numbers, chosen)
        return cotangents, recorded.gradients(cotangents)

    def judge(self, found: Slope | None, claim: Claim) -> Verdict:
        """Compare a claim about a slope with what was found of the slope."""
        if found is None:
            return "unclear"
        (numeric, size), (analytic, more) = inner(claim.weights, found.value), inner(claim.one, claim.other)
        _, error = inner(claim.weights, found.error)
        size += more
        if not abs(numeric) + abs(analytic) + size + error < float("inf"):
            return "unclear"
        # What is zero but for rounding is no slope.
        weight = inner(claim.weights, [torch.ones_like(y) for y in found.value])[1]
        farthest = max((float(u.abs().max()) for u in claim.other if u is not None and u.numel()), default=0.0)
        least = 64 * self.function.epsilon * weight * farthest
        if abs(numeric - analytic) > 10 * error + self.tolerance * size + least:
            return "differs"
        return "unclear" if error > 0.01 * size > 0 else "agrees"

    def differs(self, point: Tensors, direction: Tensors, claim: Claim) -> bool:
        """Return whether the claim differs from the slopes for all steps that can be trusted."""
        verdicts = [self.judge(self.slope(point, direction, step), claim) for step in self.steps]
        return verdicts.count("differs") >= 2 and "agrees" not in verdicts
