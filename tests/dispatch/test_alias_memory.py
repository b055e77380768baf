"""Results in the memory of an argument that no storage tells: foreign memory, and tensors without a storage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from customops import Registry
from customops.errors import AliasError


def from_numpy(x: Tensor) -> Tensor:
    return torch.from_numpy(x.numpy())


def from_dlpack(x: Tensor) -> Tensor:
    return torch.from_dlpack(x.numpy())


def same(x: Tensor) -> Tensor:
    return x


ALIASES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[], Tensor]]] = {
    "NumPy": (from_numpy, lambda: torch.ones(4)),
    "NumPy, of a view": (from_numpy, lambda: torch.ones(4)[1:]),
    "DLPack, of a view": (from_dlpack, lambda: torch.ones(4, 2)[2]),
    "sparse, itself": (same, lambda: torch.eye(2).to_sparse()),
    "sparse, detached": (lambda x: x.detach(), lambda: torch.eye(2).to_sparse()),
    "values of a sparse one": (lambda x: x._values(), lambda: torch.eye(2).to_sparse()),
    "values of a compressed one": (lambda x: x.values(), lambda: torch.eye(2).to_sparse_csc()),
    "sparse, of a dense one": (
        lambda x: torch.sparse_coo_tensor(torch.tensor([[0, 1]]), x, (4,), check_invariants=False),
        lambda: torch.ones(2),
    ),
    "mkldnn, itself": (same, lambda: torch.ones(2).to_mkldnn()),
}


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")
@pytest.mark.parametrize("case", ALIASES)
def test_memory_of_an_argument(registry: Registry, ns: str, case: str) -> None:
    fn, make = ALIASES[case]
    op: Any = registry.custom_op(f"{ns}::f", fn, mutates_args=(), schema="(Tensor x) -> Tensor")
    with pytest.raises(AliasError, match="'x'"):
        op(make())


OWN: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[], Tensor]]] = {
    "NumPy, new": (lambda x: torch.from_numpy(x.numpy() + 1), lambda: torch.ones(4)),
    "sparse, new": (lambda x: x * 2, lambda: torch.eye(2).to_sparse()),
    "sparse, of a dense one": (lambda x: x.to_sparse(), lambda: torch.eye(2)),
    "dense, of a sparse one": (lambda x: x.to_dense(), lambda: torch.eye(2).to_sparse()),
    "compressed, with the indices of the argument": (lambda x: x * 2, lambda: torch.eye(2).to_sparse_csr()),
    "no elements": (lambda x: torch.from_numpy(x.numpy()[:0]), lambda: torch.ones(4)),
}


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")
@pytest.mark.parametrize("case", OWN)
def test_memory_of_its_own(registry: Registry, ns: str, case: str) -> None:
    fn, make = OWN[case]
    op: Any = registry.custom_op(f"{ns}::f", fn, mutates_args=(), schema="(Tensor x) -> Tensor")
    torch.testing.assert_close(op(make()), fn(make()))
