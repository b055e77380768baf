"""Does an operator return an input as it is whatever its other arguments are?"""

from __future__ import annotations

import torch

from customops.checks._function import Function
from customops.checks._other_inputs import other_arguments
from customops.checks._trial import Trial


def is_always_identity(function: Function, i: int, k: int) -> bool:
    """Is output `k` input `i` also with other numbers, and with optional arguments that are absent here?

    If not, returning the input is what the operator computes here, and not something done for the sake of backward.
    """
    label = function.inputs[i].label
    return not any(_changes(trial, label, k) for trial in other_arguments(function.trial, "normal"))


def _changes(trial: Trial, label: str, k: int) -> bool:
    try:
        other = Function(trial)
        other.settle()
        given = next(item.tensor for item in other.inputs if item.label == label)
        return not torch.equal(other.base[k], given)
    except Exception:  # these arguments need not be taken, or the results are other ones
        return False
