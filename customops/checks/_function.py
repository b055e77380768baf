"""An operator as a function of the tensors that it can be differentiated by, in the precision that shows most.

`Function.of` makes float64 of the floating-point tensors of a trial if the operator takes that. It has copies of all
tensors; a call gets fresh ones where the operator writes to its arguments. Each call has the same random seed.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from customops import _compat
from customops._autograd import recompute
from customops.checks._inputs import is_plain, seeded, tensors_in
from customops.checks._outcome import NotExercised
from customops.checks._trial import FAILS, Trial, failed_call
from customops.errors import where

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
    key = _compat.dispatch.autograd_key(trial.tensors)
    keys = ("Autograd", "CompositeImplicitAutograd", *([key] if key else []))
    return any(_compat.dispatch.has_kernel(trial.name, each) for each in keys)


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
        self._leaves, self._spec = _compat.tracing.tree_flatten((own.args, own.kwargs))
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

    def is_random(self) -> bool:
        """Does another random seed make another result?"""
        args, kwargs = self._arguments(self.values)
        with torch.no_grad(), seeded((args, kwargs)):
            torch.default_generator.manual_seed(OTHER_SEED)
            results = _compat.tracing.tree_leaves(self.trial.op(*args, **kwargs))
        pairs = zip(results, self.base, strict=False)
        return any(isinstance(x, torch.Tensor) and x.shape == y.shape and not torch.equal(x, y) for x, y in pairs)

    def call_with_other_numbers(self, values: Sequence[torch.Tensor]) -> None:
        """Call it with these inputs, and with other floating-point numbers in the place of numbers."""
        args, kwargs = _compat.tracing.tree_map(_other_number, self._arguments(values))
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
        return _compat.tracing.tree_unflatten(leaves, self._spec)

    def _results(self, values: Sequence[torch.Tensor]) -> list[Any]:
        """What a call returns and writes, each tensor once."""
        args, kwargs = self._arguments(values)
        with seeded((args, kwargs)):
            returned = self.called(*args, **kwargs)
        results = _compat.tracing.tree_leaves(returned)
        if self.writes:
            known = {id(result) for result in results}
            call = Trial(self.trial.op, args, kwargs)
            results += [tensor for tensor in tensors_in(call.mutated) if id(tensor) not in known]
        return results

    def _find_inputs(self, trial: Trial) -> tuple[list[Input], list[list[int]]]:
        """The tensors to differentiate by, and where each is among the leaves."""
        passed = _compat.tracing.tree_leaves((trial.args, trial.kwargs))
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
