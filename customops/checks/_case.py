"""One input to try an operator on, and how it was made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from customops.checks._trial import Trial

#: What was changed of a sample.
Kind = Literal[
    "sample",  # nothing
    "size",  # other sizes, empty ones among them; 0-dimensional tensors
    "broadcast",  # a dimension of one tensor of several is missing, or has size 1
    "layout",  # other strides, storage offsets, alignment, conjugate and negative views
    "dtype",
    "value",  # other elements
    "padding",  # -1 among integers, if it stands for none of them
    "number",  # another number among the arguments
    "choice",  # a member of an enum or Literal, a bool, a dtype argument
    "optional",  # an optional argument that is absent
    "list",  # another number of tensors or numbers
    "same",  # one tensor in two places
    "device",
]


@dataclass(frozen=True)
class Case:
    """One input to try an operator on.

    Attributes:
        trial: the call.
        kind: what was changed.
        label: how it differs from its sample, for people: ``"x: transposed"``; empty for a sample as it is.
        sample: the number of the sample that it was made of.
    """

    trial: Trial
    kind: Kind = "sample"
    label: str = ""
    sample: int = 0
