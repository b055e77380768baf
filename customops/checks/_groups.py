"""Groups of dimensions of the inputs that may belong together: of one size, at most one of each tensor."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

#: The number of a tensor, and a dimension of it, for some tensors.
Group = tuple[tuple[int, int], ...]


def groups_of(tensors: list[torch.Tensor]) -> Iterator[Group]:
    """Groups of dimensions of one size; those of most tensors first."""
    sizes = sorted({size for tensor in tensors for size in tensor.shape if 1 < size <= 4096})
    for size in sizes:
        choices = [[None, *(dim for dim, s in enumerate(tensor.shape) if s == size)] for tensor in tensors[:6]]
        combinations = itertools.islice(itertools.product(*choices), 256)
        groups = [tuple((i, dim) for i, dim in enumerate(dims) if dim is not None) for dims in combinations]
        yield from itertools.islice(sorted(filter(None, groups), key=lambda group: -len(group)), 8)
