"""test_layouts: values do not depend on where elements lie, and what lies between and around them stays as it is.

An input that is transposed, sliced, aligned otherwise, or a conjugate or negative view has the values of a contiguous
tensor. Both have to give the same results. Operators whose results are random, or differ between equal calls, are not
compared, nor are those of torch that are about strides.

The bytes of a storage that are no elements of its view are nobody's: the operator has to leave them, however it
writes the view. Each tensor of a call lies in a larger storage, with a margin before and after it.
"""

from __future__ import annotations

import itertools

import torch

from customops.checks._derivatives import named_tensors
from customops.checks._fills import surrounded
from customops.checks._inputs import is_plain
from customops.checks._memory import overlaps_itself, share_storage
from customops.checks._outcome import NotExercised
from customops.checks._runs import attempt, call, compare, steady_results
from customops.checks._trial import Trial

#: Operators that read strides, or memory beyond a view, on purpose.
_ABOUT_STRIDES = ("aten::as_strided", "aten::_reshape_alias", "aten::set_", "aten::resize", "prims::as_strided")


def check(trial: Trial) -> None:
    if trial.name.startswith(_ABOUT_STRIDES):
        raise NotExercised("the result depends on strides by definition")
    if any(share_storage(one, other) for one, other in itertools.combinations(trial.distinct, 2)):
        raise NotExercised("tensors of the call share memory")
    trial = trial.detached()
    arguments = dict.fromkeys(name for name, _, tensor in named_tensors(trial) if not _is_ordinary(tensor))
    if not arguments and not trial.mutated:
        raise NotExercised("every tensor is contiguous, and none is written")
    expected = steady_results(trial.map_tensors(_ordinary))
    if arguments:
        actual = attempt(trial)
        if actual is None:
            raise NotExercised("the operator does not take tensors of this layout")
        compare(
            trial,
            actual,
            expected,
            "results depend on the layout of an input: other values than for the same values in contiguous tensors",
            "the kernel takes memory for contiguous: call x.contiguous() first (for an argument that is written, copy "
            "the result back), or use x.stride() and x.storage_offset(); see resolve_conj() and resolve_neg() for lazy "
            "views",
            argument=", ".join(arguments),
            expected="the values of the call on contiguous tensors",
            ties=True,
            rounding=True,
        )
    _check_margins(trial)


def _is_ordinary(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided:
        return True
    plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    return plain and tensor.storage_offset() == 0


def _ordinary(_name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return tensor
    return tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def _check_margins(trial: Trial) -> None:
    written = trial.mutated

    def can_be_moved(name: str, tensor: torch.Tensor) -> bool:
        is_movable = is_plain(tensor) and not tensor.is_conj() and tensor.numel() > 0 and not overlaps_itself(tensor)
        return name in written and is_movable

    if not written:
        return
    moved, written_outside = surrounded(trial.copy(), 0x35, can_be_moved)
    try:
        call(moved)
    except Exception:  # memory that is part of more: the operator need not take it
        return
    found = written_outside()
    if found:
        name, count = found
        raise trial.fault(
            "the operator writes memory that is not of the tensor it was given",
            f"{count} elements outside of it are changed",
            "write through the tensor, or use its strides, sizes and storage offset; a write of whole vectors needs a "
            "narrower last one",
            argument=name,
            expected="elements of the storage outside of the view unchanged",
        )
