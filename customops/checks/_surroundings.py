"""Tensors in the middle of larger storages, so that what lies around them can be watched.

A kernel that reads past a tensor, or between its rows where it is a slice, then gives another result when something
else lies there; one that writes there leaves a trace.
"""

from __future__ import annotations

import torch

from customops.checks import _memory
from customops.checks._trial import Trial

_PADDING = 1024  #: bytes before and after the elements; a multiple of the alignment of allocators


class Surrounded:
    """A call with each tensor in a storage of its own, amid bytes of one value.

    Attributes:
        trial: the call.
    """

    def __init__(self, trial: Trial, byte: int) -> None:
        self._byte = byte
        self._bases: list[tuple[str, torch.Tensor, torch.Tensor]] = []  # name, bytes, where elements are
        self.trial = trial.map_tensors(self._put)

    def _put(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        width = tensor.element_size()
        start, end = _memory.byte_range(tensor)
        base = torch.full((end - start + 2 * _PADDING,), self._byte, dtype=torch.uint8, device=tensor.device)
        offset = _PADDING // width
        inside = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        inside.set_(base.untyped_storage(), offset, tuple(tensor.shape), tensor.stride())
        taken = torch.zeros(base.shape[0] // width, dtype=torch.bool, device=tensor.device)
        taken[torch.arange(len(taken)).as_strided(tensor.shape, tensor.stride(), offset)] = True
        whole = base[: len(taken) * width].view(len(taken), width)
        elements = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        elements.set_(tensor.untyped_storage(), tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        _memory.bits(inside).copy_(_memory.bits(elements))
        self._bases.append((name, whole, taken))
        return inside

    def written_outside(self) -> str | None:
        """The name of an argument around which something was written."""
        for name, whole, taken in self._bases:
            if bool((whole[~taken] != self._byte).any()):
                return name
        return None


def can_surround(trial: Trial) -> bool:
    """Have the tensors a storage each, and elements that can be copied one by one?"""
    distinct = list({id(tensor): tensor for tensor in trial.tensors}.values())
    alone = not any(_memory.share_storage(one, other) for i, one in enumerate(distinct) for other in distinct[:i])
    return (
        bool(distinct) and alone and not any(_memory.overlaps_itself(t) or t.is_conj() or t.is_neg() for t in distinct)
    )
