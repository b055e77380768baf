"""Calls like a given one: with other elements, sizes, numbers and choices, and amid other memory.

Elements are those of the given tensors in another order, repeated where there are more. So indices stay in range, and
what has to be positive stays so. Sizes only grow, for the same reason.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping

import torch

from customops.checks import _memory
from customops.checks._inputs import is_plain, tensors_in
from customops.checks._outcome import processor_time
from customops.checks._runs import attempt, difference
from customops.checks._trial import Effort, Trial
from customops.checks.inputs.derive import derive
from customops.checks.inputs.parts import is_integer, variation_of

_SOON = 0.04  #: seconds of processor time of two calls
#: Operators of torch that are about storages, or that return memory as they find it.
_ABOUT_STORAGES = ("as_strided", "resize", "set_", "empty", "storage", "alias", "_reinterpret", "lift")


def is_about_storages(trial: Trial) -> bool:
    """Return whether it is an operator of torch that goes by more than the elements of its tensors."""
    return trial.is_builtin and any(word in trial.name for word in _ABOUT_STORAGES)


def are_plain(trial: Trial) -> bool:
    """Return whether all tensors are strided, with data in a storage, and no subclass hides them."""
    return all(is_plain(tensor) and not tensor.is_conj() for tensor in trial.tensors)


def _rows(tensor: torch.Tensor, least: int) -> torch.Tensor:
    """Return the rows of a tensor, as columns may mean different things; if it has few, its elements."""
    return tensor.detach() if tensor.dim() > 1 and len(tensor) >= least else tensor.detach().reshape(-1)


def reordered(tensor: torch.Tensor, by: int) -> torch.Tensor:
    """Move the rows of a tensor, or the elements of a single one, by `by` places; the strides stay."""
    with torch.no_grad():
        return like(_rows(tensor, 2).roll(by, 0).reshape(tensor.shape), tensor)


def reordered_values(trial: Trial) -> Trial:
    """Return the same call with the elements of each tensor in another order."""
    return trial.map_tensors(lambda _, tensor: reordered(tensor, 1))


def is_list(value: object) -> bool:
    """Return whether it is a list of tensors, with one at least."""
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(x, torch.Tensor) for x in value)


def other_scales(trial: Trial) -> Iterator[Trial]:
    """Make the call with larger and smaller numbers, signs and flags at random, and integers at other places."""
    numbers = torch.Generator().manual_seed(2)

    def signed(_name: str, tensor: torch.Tensor) -> torch.Tensor:
        signs = torch.randint(0, 2, tensor.shape, generator=numbers).to(tensor.device)
        if tensor.dtype is torch.bool:
            return signs.bool()
        return tensor * (2 * signs - 1).to(tensor.dtype) if tensor.is_floating_point() else tensor

    for factor in (64, 1 / 64):
        yield trial.map_floats(lambda x, by=factor: x * by)  # type: ignore[misc]
    yield trial.map_tensors(signed)
    for _ in range(2 if any(map(is_integer, trial.tensors)) else 0):
        yield trial.map_tensors(lambda _, x: redrawn(x, numbers) if is_integer(x) else x)


def redrawn(tensor: torch.Tensor, numbers: torch.Generator) -> torch.Tensor:
    """Put the elements at other places, and make numbers of floating point a little smaller, so that they differ."""
    order = torch.randperm(tensor.numel(), generator=numbers).to(tensor.device)
    values = tensor.reshape(-1)[order].reshape(tensor.shape)
    if not tensor.is_floating_point():
        return values
    factor = 1 - torch.rand(tensor.shape, generator=numbers, dtype=torch.float32) / 4
    return (values * factor.to(tensor.device)).to(tensor.dtype)


def with_large_integers(trial: Trial, op: Callable[..., object] | None = None) -> Trial | None:
    """Return the call with integers near the end of their dtype: the sum of two is more than it holds.

    None where they may be indices into other tensors, sizes of results, or counts of what is to be done. `op`: what is
    asked for that, in the place of the operator.
    """
    dtypes = {tensor.dtype for tensor in trial.tensors}
    if len(dtypes) != 1 or not all(is_integer(tensor) and tensor.numel() for tensor in trial.tensors):
        return None
    (dtype,) = dtypes
    room = torch.iinfo(dtype).max // max(1, *(abs(int(end)) for x in trial.tensors for end in x.aminmax()))
    start = processor_time()
    several = [attempt(trial.map_tensors(lambda _, x, by=by: x * by), op=op) for by in (1, min(room, 4096))]  # type: ignore[misc]
    if None in several or processor_time() - start > _SOON:
        return None
    shapes = [[tensor.shape for tensor in tensors_in([*results.values()])] for results in several if results]
    return trial.map_tensors(lambda _, x: x * room) if all(each == shapes[0] for each in shapes) else None


def resized(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor of another shape, with elements repeated or cut, and dimensions in the same order in memory."""
    with torch.no_grad():
        flat = tensor.detach().reshape(-1)
        filled = flat[torch.arange(math.prod(shape), device=flat.device) % max(flat.numel(), 1)].reshape(shape)
        if len(shape) != tensor.dim():
            return filled
        order = sorted(range(len(shape)), key=tensor.stride, reverse=True)
        back = [order.index(dim) for dim in range(len(shape))]
        return filled.permute(order).contiguous().permute(back)


def repeated(tensor: torch.Tensor, sizes: Mapping[int, int]) -> torch.Tensor:
    """Give the dimensions of some sizes other sizes: what they hold is repeated, or cut."""
    for dim, size in enumerate(tensor.shape if _memory.is_dense(tensor) else ()):
        if size in sizes:
            tensor = tensor.index_select(dim, (torch.arange(sizes[size]) % size).to(tensor.device))
    return tensor


def like(values: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return `values` with the strides of `tensor`, requiring grad if it does."""
    if any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)):
        return tensor.detach()  # an expanded tensor has but one element there
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(values).requires_grad_(tensor.requires_grad)


def other_sizes(trial: Trial) -> Iterator[Trial]:
    """Make the call with other sizes: all doubled, and all sizes of one value, which may belong together, plus one."""
    if not are_plain(trial) or any(tensor.numel() == 0 for tensor in trial.tensors):
        return
    sizes = sorted({size for tensor in trial.tensors for size in tensor.shape if size > 1})
    changes = [{size: 2 * size for size in sizes}, *({size: size + 1} for size in reversed(sizes))]
    for change in changes if sizes else []:
        shapes = [tuple(change.get(size, size) for size in tensor.shape) for tensor in trial.distinct]
        pairs = zip(trial.distinct, shapes, strict=True)
        yield trial.replaced({id(tensor): resized(tensor, shape) for tensor, shape in pairs})


def other_values(trial: Trial) -> Trial | None:
    """Return the call with other values, which the operator takes; None if none were found.

    Integers and bools are often indices or sizes: they are shuffled where nothing else can change.
    """

    def shuffled(_name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not _memory.is_dense(tensor):
            return tensor
        rows = _rows(tensor, 3)
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1)).to(tensor.device)
        return rows[order].reshape(tensor.shape)

    def scaled(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point() or not _memory.is_dense(tensor):
            return tensor
        factor = 1 - torch.rand(tensor.shape, generator=torch.Generator().manual_seed(2)) / 2
        return (shuffled(name, tensor) * factor.to(tensor.device)).to(tensor.dtype)

    for change in (scaled, shuffled):
        other = trial.map_tensors(change)
        if difference([*other.tensors], [*trial.tensors], exact=True) and attempt(other) is not None:
            return other
    return None


def other_numbers(trial: Trial) -> Iterator[Trial]:
    """Make the call with another value for one of its numbers. The operator need not accept it."""
    for name, value in trial.arguments.items():
        if type(value) is float:
            yield trial.with_arguments(**{name: value * 1.5 + 0.25})
            yield trial.with_arguments(**{name: value * 0.5})
        elif type(value) is int:
            yield trial.with_arguments(**{name: value + 1})
        elif type(value) is bool:
            yield trial.with_arguments(**{name: not value})


def other_arguments(trial: Trial, effort: Effort) -> Iterator[Trial]:
    """Make the call with other numbers and choices, as the author allows them. The operator need not accept it."""
    for case in derive(trial, variation_of(trial.custom_op), effort):
        if case.kind in ("number", "choice", "optional"):
            yield case.trial


# Tensors in the middle of larger storages. A kernel that reads past a tensor, or between its rows where it is a slice,
# then gives another result when something else lies there; one that writes there leaves a trace.

_PADDING = 1024  #: bytes before and after the elements; a multiple of the alignment of allocators


def surrounded(trial: Trial, byte: int) -> tuple[Trial, Callable[[], str | None]]:
    """Put each tensor of a call into a storage of its own, amid bytes of one value.

    With it comes a function that returns the argument around which something was written since, if any.
    """
    bases: list[tuple[str, torch.Tensor, torch.Tensor]] = []  # name, bytes, where elements are

    def put(name: str, tensor: torch.Tensor) -> torch.Tensor:
        width = tensor.element_size()
        start, end = _memory.byte_range(tensor)
        base = torch.full((end - start + 2 * _PADDING,), byte, dtype=torch.uint8, device=tensor.device)
        offset = _PADDING // width + tensor.storage_offset() % 16  # as little aligned as it was
        inside = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        inside.set_(base.untyped_storage(), offset, tuple(tensor.shape), tensor.stride())
        taken = torch.zeros(base.shape[0] // width, dtype=torch.bool, device=tensor.device)
        taken[torch.arange(len(taken)).as_strided(tensor.shape, tensor.stride(), offset)] = True
        _memory.bits(inside).copy_(_memory.bits(tensor))
        bases.append((name, base[: len(taken) * width].view(len(taken), width), taken))
        return inside

    def written_outside() -> str | None:
        return next((name for name, whole, taken in bases if bool((whole[~taken] != byte).any())), None)

    return trial.map_tensors(put), written_outside


def can_surround(trial: Trial) -> bool:
    """Return whether each tensor has a storage of its own, and elements that can be copied one by one."""
    shared = any(_memory.share_storage(one, other) for one, other in itertools.combinations(trial.distinct, 2))
    are_lazy = any(_memory.overlaps_itself(t) or t.is_conj() or t.is_neg() for t in trial.distinct)
    return bool(trial.distinct) and not shared and not are_lazy
