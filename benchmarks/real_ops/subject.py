"""An op to check: what `torch.ops` calls it, and calls of it that work."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch

Sample = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Subject:
    """An op to check.

    Attributes:
        library: who defines it: "aten", or the name of a package.
        name: as the dispatcher spells it: ``aten::add.Tensor``.
        samples: calls that work, as arguments and keyword arguments.
    """

    library: str
    name: str
    samples: list[Sample] = field(default_factory=list)

    @property
    def op(self) -> Any:
        qualified, _, overload = self.name.partition(".")
        packet = functools.reduce(getattr, qualified.split("::"), torch.ops)
        return getattr(packet, overload or "default")
