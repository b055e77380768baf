"""test_backward: what is checked of the results of an operator, checked of its gradients.

The backward of a call is a function of the call's tensors and of the gradients of its results. As an operator of its
own it is given to the checks that need no reference: each element of a batch has its own gradient, whatever the size of
the batch; where order does not matter, it does not; a gradient in a narrow dtype is near that in a wider one; and
strides and the memory it comes to lie in change nothing. Gradients that are derived from the reference function are
left out: what most operators promise need not hold for the reference, and test_gradients compares it with the kernel.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from customops.checks import laws, precision, repeat, writes
from customops.checks._derivatives import differentiable, generator, place_of_formula, random_like
from customops.checks._outcome import NotExercised, require
from customops.checks._trial import FAILS, Trial, as_operator
from customops.checks._variants import are_plain
from customops.errors import CheckError

#: What is checked of a backward, on its ordinary inputs.
_CHECKS: tuple[Callable[[Trial], None], ...] = (
    repeat.check_memory,
    laws.check_batches,
    laws.check_permutations,
    precision.check,
    precision.check_stability,
)


def check(trial: Trial) -> None:
    require(are_plain(trial) and not trial.schema.mutated, "an input is written, or is no plain strided tensor")
    require(not trial.is_builtin, "it is an operator of torch itself")
    require(
        not trial.gradient_is_reference, "the gradients are those of the reference function, which says what is right"
    )
    with differentiable(trial) as (function, wanted):
        labels = {function.inputs[i].label for i in wanted}
    with _as_operator(trial, labels) as lifted:
        tried = [_run(trial, each, lifted) for each in _CHECKS]
        transposed = lifted.map_tensors(lambda _, x: x.mT.contiguous().mT if x.dim() > 1 else x)
        tried.append(_run(trial, writes.check_layouts, transposed))
        for dtype in (torch.bfloat16, torch.float16):
            tried.append(_run(trial, precision.check, lifted.map_floats(lambda x, to=dtype: x.to(to))))  # type: ignore[misc]
    require(any(tried), "nothing is known that would have to be true of these gradients")


def _run(trial: Trial, check: Callable[[Trial], None], lifted: Trial) -> bool:
    """Was there something to check? A finding is told as one about the backward."""
    try:
        check(lifted)
    except NotExercised:
        return False
    except CheckError as error:
        if error.problem == FAILS:  # it does not take these: a dtype, say
            return False
        place = place_of_formula(trial, "backward")
        raise CheckError(
            f"of the gradients: {error.problem}",
            op=trial.name,
            argument=error.argument,
            expected=error.expected,
            got=error.got,
            where=place,
            fix=error.fix,
        ) from error
    return True


@contextmanager
def _as_operator(trial: Trial, labels: set[str]) -> Iterator[Trial]:
    """A call of the backward as an operator: of the tensors of the trial, and of gradients of its results."""
    known = [(label, tensor) for _, label, tensor in trial.named_tensors]
    tensors = trial.distinct
    names = [next(label for label, tensor in known if tensor is each) for each in tensors]
    wanted = [name in labels for name in names]

    def record(values: tuple[torch.Tensor, ...]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        leaves = [x.detach().requires_grad_(w) for x, w in zip(values, wanted, strict=True)]
        call = trial.replaced({id(tensor): leaf for tensor, leaf in zip(tensors, leaves, strict=True)})
        with torch.inference_mode(False), torch.enable_grad():
            results = call.by_return(call.op(*call.args, **call.kwargs))
        outputs = [y for y in results if isinstance(y, torch.Tensor) and y.grad_fn is not None]
        return [leaf for leaf in leaves if leaf.requires_grad], outputs

    def backward(*values: torch.Tensor) -> Any:
        leaves, outputs = record(values[: len(tensors)])
        found = torch.autograd.grad(outputs, leaves, values[len(tensors) :], allow_unused=True)
        gradients = [torch.zeros_like(x) if g is None else g.clone() for x, g in zip(leaves, found, strict=True)]
        return gradients[0] if len(gradients) == 1 else tuple(gradients)

    with torch.random.fork_rng(devices=()):
        _, outputs = record(tuple(tensors))
    require(outputs and any(wanted), "no result has a gradient")
    cotangents = random_like([y.detach() for y in outputs], generator())
    arguments = [*(re.sub(r"\W+", "_", name).strip("_") for name in names), *(f"grad_{i}" for i in range(len(outputs)))]
    count = sum(wanted)
    result = "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"
    schema = f"({', '.join(f'Tensor {name}' for name in arguments)}) -> {result}"
    with as_operator(backward, schema) as op:
        values = [x.detach() for x in tensors] + [g for g in cotangents if g is not None]
        scale = max(float(x.abs().max()) for x in values if x.is_floating_point() and x.numel())
        yield Trial(op, tuple(values), scale=scale)
