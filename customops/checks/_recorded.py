"""One call of an operator that autograd records, its backward, and what it means if either raises."""

from __future__ import annotations

import itertools
import linecache
import traceback
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from customops.checks._function import OTHER_SEED, Function, Tensors, named_tensors, place_of_formula, recording
from customops.checks._inputs import seeded
from customops.checks._outcome import NotExercised, in_short
from customops.checks._trial import Trial, failed_call
from customops.errors import CheckError, UnsupportedError, is_users

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


def only(cotangents: Sequence[torch.Tensor], chosen: Sequence[int], outputs: Sequence[torch.Tensor]) -> Gradients:
    """The gradients of these outputs, of the outputs' dtypes, and None for the others."""
    pairs = zip(cotangents, outputs, strict=True)
    return [v.to(output.dtype) if i in chosen else None for i, (v, output) in enumerate(pairs)]
