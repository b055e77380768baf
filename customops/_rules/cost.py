"""What a call costs: floating-point operations, and bytes."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch
from torch import Tensor

from customops import _torch
from customops._dispatch.callbacks import Fn, bind_kernel
from customops._dispatch.operator import OperatorHandle
from customops._dispatch.registrations import Registration, Undo, nothing
from customops._dispatch.results import given
from customops._dispatch.rule import Rule
from customops._rules.reference import Reference
from customops._rules.shapes import Shapes
from customops._torch.tensors import tensors_in
from customops.errors import KernelError, brief, where

log = logging.getLogger("customops")


class Cost(NamedTuple):
    """What a call of an op costs.

    Attributes:
        flops: floating-point operations, counted as by `torch.utils.flop_counter`: those of matrix products,
            convolutions and attention, two for each multiplication with an addition. None if it is not known.
        bytes: the bytes of the tensors that the op is given, returns and writes. None if they depend on data.
    """

    flops: int | None
    bytes: int | None


class FlopsRule(Rule[None, Fn]):
    """The formula for the floating-point operations of a call. Without one, the reference is counted."""

    _warned = False

    def register(self, fn: Fn) -> Registration:
        ours = self.operator.library is not None
        return self.set(None, bind_kernel(fn, self.operator.schema, self.operator.qualname, "formula", warn=ours))

    def _install(self, _: None, own_library: bool) -> Undo:
        return nothing

    def _changed(self) -> None:
        """Compiled code does not depend on it."""

    def count(
        self, reference: Reference | None, shapes: Shapes | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> int | None:
        """The operations of a call; None if nothing tells, which is said once."""
        op, formula = self.operator.qualname, self.values.get(None)
        if formula is None and shapes is not None and shapes.flops_formula is not None:
            formula = shapes.flops
        if formula is not None:
            found = formula(*args, **kwargs)
            if not isinstance(found, (int, torch.SymInt)) or found < 0:
                raise KernelError(
                    "the formula of register_flops did not return a number of operations",
                    op=op,
                    expected="an int, 0 or more",
                    got=brief(found),
                    where=where(formula),
                )
            return found  # type: ignore[return-value]
        why = "there is neither a formula nor a reference"
        if reference is not None:
            try:
                return reference.flops(args, kwargs)
            except Exception as error:
                if not _torch.tensors.needs_data(error):
                    raise
                why = f"the reference needs data: {str(error).splitlines()[0]}"
        if not self._warned:
            self._warned = True
            text = "%s: its floating-point operations are not known, and are not counted: %s; op.register_flops(fn)"
            log.warning(text, op, why)
        return None


def bytes_of(operator: OperatorHandle, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """The bytes that a call reads, returns and writes. What it returns is asked of the fake impl."""
    sparse = [x for x in tensors_in((*args, *kwargs.values())) if x.layout is not torch.strided]
    with _torch.tensors.stand_ins(args, kwargs) as (args, kwargs):
        try:
            made = tensors_in((operator.overload(*args, **kwargs),))
        except Exception as error:
            if not _torch.tensors.needs_data(error):
                raise
            return None
    read, pairs = tensors_in((*args, *kwargs.values())), given(operator.schema, args, kwargs)
    written = [x for argument, value in pairs if argument.is_mutated for x in tensors_in((value,))]
    inputs = {_torch.tensors.memory_or_id(x) for x in read}
    tensors = [*read, *written, *(x for x in made if _torch.tensors.memory_or_id(x) not in inputs)]
    return sum(map(_bytes, [*sparse, *(x for x in tensors if x.layout is torch.strided)]))


def _bytes(tensor: Tensor) -> int:
    return sum(part.numel() * part.element_size() for part in _torch.tensors.sparse_parts(tensor) or [tensor])
