"""The values of a call: pytrees, and the tensors in lists."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

__tracebackhide__ = True  # pytest leaves the frames out

#: Without: no op can be called
tree_flatten = torch.utils._pytree.tree_flatten
tree_unflatten = torch.utils._pytree.tree_unflatten


_LEAVES = {int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}


def tree_leaves(tree: Any) -> list[Any]:
    """Return the leaves of a tree, as torch does, but without a spec for lists, tuples and dicts."""
    kind = type(tree)
    if kind is tuple or kind is list:
        return [leaf for item in tree for leaf in tree_leaves(item)]
    if kind is dict:
        return [leaf for item in tree.values() for leaf in tree_leaves(item)]
    return [tree] if kind in _LEAVES or isinstance(tree, torch.Tensor) else torch.utils._pytree.tree_leaves(tree)


def tree_map(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Return a tree with ``fn(leaf)`` for each leaf, as torch does, but without a spec for lists, tuples and dicts."""
    kind = type(tree)
    if kind is tuple:
        return tuple([tree_map(fn, item) for item in tree])
    if kind is list:
        return [tree_map(fn, item) for item in tree]
    if kind is dict:
        return {key: tree_map(fn, item) for key, item in tree.items()}
    is_leaf = kind in _LEAVES or isinstance(tree, torch.Tensor)
    return fn(tree) if is_leaf else torch.utils._pytree.tree_map(fn, tree)


def flat_items(values: Iterable[Any]) -> list[Any]:
    """Return the values, with the items of a list in its place."""
    return [item for value in values for item in (value if isinstance(value, (list, tuple)) else (value,))]


def tensors_in(values: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors among the values and in lists among them."""
    return [item for item in flat_items(values) if isinstance(item, torch.Tensor)]
