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
from customops.checks._fills import Surrounded
from customops.checks._inputs import is_plain
from customops.checks._memory import overlaps_itself, share_storage
from customops.checks._outcome import NotExercised
from customops.checks._runs import (
    Results,
    attempt,
    call,
    compare,
    is_rounding,
    is_tie_of_indices,
    steady_results,
)
from customops.checks._trial import Trial

#: Operators that read strides, or memory beyond a view, on purpose.
_ABOUT_STRIDES = ("aten::as_strided", "aten::_reshape_alias", "aten::set_", "aten::resize", "prims::as_strided")


def check(trial: Trial) -> None:
    if trial.name.startswith(_ABOUT_STRIDES):
        raise NotExercised("the result depends on strides by definition")
    if any(share_storage(one, other) for one, other in itertools.combinations(trial.distinct, 2)):
        raise NotExercised("tensors of the call share memory")
    trial = trial.detached()
    arguments = [name for name, _, tensor in named_tensors(trial) if not _is_ordinary(tensor)]
    if not arguments and not trial.mutated:
        raise NotExercised("every tensor is contiguous, and none is written")
    expected = steady_results(trial.map_tensors(_ordinary))
    if arguments:
        _compare(trial, ", ".join(dict.fromkeys(arguments)), expected)
    _check_margins(trial)


def _is_ordinary(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided:
        return True
    plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    return plain and tensor.storage_offset() * tensor.element_size() % 16 == 0 == tensor.storage_offset()


def _ordinary(_name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return tensor
    return tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def _compare(trial: Trial, arguments: str, expected: Results) -> None:
    actual = attempt(trial)
    if actual is None:
        raise NotExercised("the operator does not take tensors of this layout")
    compare(
        trial,
        actual,
        expected,
        "results depend on the layout of an input: other values than for the same values in contiguous tensors",
        "the kernel takes memory for contiguous: call x.contiguous() first (for an argument that is written, copy the "
        "result back), or use x.stride() and x.storage_offset(); see resolve_conj() and resolve_neg() for lazy views",
        argument=arguments,
        expected="the values of the call on contiguous tensors",
        is_excused=lambda name, one, other: (
            is_tie_of_indices(trial, other, one) or is_rounding(trial, name, one, other)
        ),
    )


def _check_margins(trial: Trial) -> None:
    written = set(trial.mutated)
    if not written:
        return
    surrounded = Surrounded(
        trial.copy(), 0x35, lambda name, tensor: name in written and is_plain(tensor) and _can_be_moved(tensor)
    )
    try:
        call(surrounded.trial)
    except Exception:  # memory that is part of more: the operator need not take it
        return
    found = surrounded.written_outside()
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


def _can_be_moved(tensor: torch.Tensor) -> bool:
    return not tensor.is_conj() and tensor.numel() > 0 and not overlaps_itself(tensor)
