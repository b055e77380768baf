"""The same elements, laid out in memory in other ways.

A kernel that goes by strides returns the same as for contiguous inputs. (Expanded tensors have other elements than the
sample: a dimension of stride 0 repeats its first.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from customops.checks._case import Case
from customops.checks.inputs._elements import is_inexact
from customops.checks.inputs._parts import Parts, Spot
from customops.checks.inputs._ranks import NORMAL, QUICK, THOROUGH

Layout = Callable[[torch.Tensor], torch.Tensor | None]


def layouts(parts: Parts, rank: int) -> Iterator[Case]:
    """All tensors together, then each by itself."""
    spots = parts.resizable("layout")
    groups = [(spots, TOGETHER[rank])]
    if len(spots) > 1:
        groups += [([spot], ALONE[rank]) for spot in spots]
    for group, table in groups:
        for name, layout in table.items():
            yield from _in_layout(parts, group, name, layout)


def in_layout(parts: Parts, name: str) -> Iterator[Case]:
    """All tensors in one layout, by its name in `TOGETHER`."""
    layout = next(table[name] for table in TOGETHER.values() if name in table)
    yield from _in_layout(parts, parts.resizable("layout"), name, layout)


def _in_layout(parts: Parts, spots: list[Spot], name: str, layout: Layout) -> Iterator[Case]:
    may_have = [spot for spot in spots if not (spot.is_written and layout is expanded)]
    trial = parts.each(may_have, layout)
    if trial is not None:
        label = "all tensors" if len(may_have) > 1 else may_have[0].label
        yield Case(trial, "layout", f"{label}: {name}")


def permuted(tensor: torch.Tensor, dims: list[int]) -> torch.Tensor | None:
    """The tensor, in memory with its dimensions in this order."""
    back = [dims.index(dim) for dim in range(len(dims))]
    new = tensor.permute(dims).clone(memory_format=torch.contiguous_format).permute(back)
    moved = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    return None if len(moved) < 2 or new.stride() == tensor.stride() else new


def transposed(tensor: torch.Tensor) -> torch.Tensor | None:
    rank = tensor.dim()
    return permuted(tensor, [*range(rank - 2), rank - 1, rank - 2]) if rank > 1 else None


def reversed_dims(tensor: torch.Tensor) -> torch.Tensor | None:
    rank = tensor.dim()
    return permuted(tensor, list(reversed(range(rank)))) if rank > 2 else None


def sliced(tensor: torch.Tensor) -> torch.Tensor | None:
    """With other elements between those of the tensor."""
    if not tensor.dim() or not tensor.numel():
        return None
    wide = _filled((*tensor.shape[:-1], 2 * tensor.shape[-1]), tensor)
    return wide[..., ::2].copy_(tensor)


def rows_apart(tensor: torch.Tensor) -> torch.Tensor | None:
    """With other elements between the rows: the last dimension has stride 1."""
    if tensor.dim() < 2 or not tensor.numel():
        return None
    wide = _filled((*tensor.shape[:-1], tensor.shape[-1] + 3), tensor)
    return wide[..., 1 : tensor.shape[-1] + 1].copy_(tensor)


def offset(tensor: torch.Tensor) -> torch.Tensor | None:
    """Not at the start of its storage, and not where memory is aligned."""
    if not tensor.numel():
        return None
    storage = _filled((tensor.numel() + 2,), tensor)
    return storage[1:-1].view(tensor.shape).copy_(tensor)


def long_storage(tensor: torch.Tensor) -> torch.Tensor | None:
    """At the start of a storage that is larger."""
    storage = _filled((tensor.numel() + 9,), tensor)
    return storage[: tensor.numel()].view(tensor.shape).copy_(tensor)


def expanded(tensor: torch.Tensor) -> torch.Tensor | None:
    """The first row, or column, for all others; what would lie there without a stride of 0 is nobody's."""
    sizes = list(tensor.shape)
    dim = next((dim for dim, size in enumerate(sizes) if size > 1), None)
    if dim is None:
        return None
    storage = _filled(tuple(sizes), tensor)
    return storage.narrow(dim, 0, 1).copy_(tensor.narrow(dim, 0, 1)).expand(sizes)


def channels_last(tensor: torch.Tensor) -> torch.Tensor | None:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if tensor.dim() not in formats:
        return None
    new = tensor.clone(memory_format=formats[tensor.dim()])
    return None if new.stride() == tensor.stride() else new


def negative_view(tensor: torch.Tensor) -> torch.Tensor | None:
    """Held in memory with the other sign."""
    if tensor.dtype not in (torch.float32, torch.float64) or tensor.device.type == "mps":
        return None
    return torch.complex(torch.zeros_like(tensor), -tensor).conj().imag


def conjugate_view(tensor: torch.Tensor) -> torch.Tensor | None:
    return tensor.resolve_conj().conj_physical().conj() if tensor.is_complex() else None


def odd_strides(tensor: torch.Tensor) -> torch.Tensor | None:
    """With strides of dimensions of one element that no contiguous tensor has: they mean nothing."""
    if 1 not in tensor.shape or not tensor.numel():
        return None
    new = tensor.clone(memory_format=torch.contiguous_format)
    strides = [
        7 * tensor.numel() + 3 if size == 1 else step for size, step in zip(new.shape, new.stride(), strict=True)
    ]
    return new.as_strided(tuple(new.shape), strides)


def _filled(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Memory that nobody has to read: NaN, or an element that there is."""
    if is_inexact(like.dtype) and like.element_size() > 1:
        return torch.full(shape, float("nan"), dtype=like.dtype, device=like.device)
    first = like.reshape(-1)[:1] if like.numel() else torch.zeros(1, dtype=like.dtype, device=like.device)
    return first.expand(torch.Size(shape).numel()).reshape(shape).clone()


ODD_STRIDES = "with odd strides of dimensions of size 1"
ROWS_APART = "with gaps between the rows"

#: Tried with all tensors alike.
TOGETHER: dict[int, Mapping[str, Layout]] = {
    QUICK: {"transposed": transposed, "with a step of 2": sliced, "at an odd storage offset": offset},
    NORMAL: {
        "expanded": expanded,
        "with its dimensions reversed in memory": reversed_dims,
        "channels last": channels_last,
        ROWS_APART: rows_apart,
        "a conjugate view": conjugate_view,
        "a negative view": negative_view,
        "in a larger storage": long_storage,
        ODD_STRIDES: odd_strides,
    },
    THOROUGH: {},
}
#: Tried with one tensor of several.
ALONE: dict[int, Mapping[str, Layout]] = {
    QUICK: {},
    NORMAL: {"transposed": transposed, "with a step of 2": sliced, "expanded": expanded},
    THOROUGH: {
        "at an odd storage offset": offset,
        ROWS_APART: rows_apart,
        "a negative view": negative_view,
        "a conjugate view": conjugate_view,
        "channels last": channels_last,
    },
}
