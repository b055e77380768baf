"""Other values for the same call: same shapes and dtypes, and in the range of the values there are."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from customops.checks._calls import attempt
from customops.checks._check import Effort
from customops.checks._compare import difference
from customops.checks._trial import Trial
from customops.checks.inputs.derive import derive
from customops.checks.inputs.variation import variation_of


def other_values(trial: Trial) -> Trial | None:
    """The call with other values, which the operator takes; None if none were found.

    The rows of floating-point tensors are shuffled, and elements made smaller. Tensors of integers and bools are
    often indices or sizes: theirs are shuffled, where that is accepted and nothing else can change.
    """
    for change in (_scaled, _shuffled):
        other = trial.map_tensors(change)
        if difference([*other.tensors], [*trial.tensors], exact=True) and attempt(other) is not None:
            return other
    return None


def _scaled(_name: str, tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point() or tensor.layout is not torch.strided or tensor.is_quantized:
        return tensor
    factor = 1 - torch.rand(tensor.shape, generator=torch.Generator().manual_seed(2)) / 2
    return (_shuffled(_name, tensor) * factor.to(tensor.device)).to(tensor.dtype)


def _shuffled(_name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return tensor
    with torch.no_grad():
        # Rows stay together where there are several: what stands in one may mean different things.
        rows = tensor.detach() if tensor.dim() > 1 and len(tensor) > 2 else tensor.detach().reshape(-1)
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1)).to(tensor.device)
        return rows[order].reshape(tensor.shape)


def other_numbers(trial: Trial) -> Iterator[Trial]:
    """The call with another value for one of its numbers. It need not be accepted."""
    for name, value in trial.arguments.items():
        if type(value) is float:
            yield trial.with_arguments(**{name: value * 1.5 + 0.25})
            yield trial.with_arguments(**{name: value * 0.5})
        elif type(value) is int:
            yield trial.with_arguments(**{name: value + 1})
        elif type(value) is bool:
            yield trial.with_arguments(**{name: not value})


def other_arguments(trial: Trial, effort: Effort) -> Iterator[Trial]:
    """The same tensors with other numbers and choices, and with optional arguments given or absent.

    They need not be accepted. What the author said about inputs is kept to, and defaults count as given.
    """
    for case in derive(trial, variation_of(trial.custom_op), effort):
        if case.kind in ("number", "choice", "optional"):
            yield case.trial
