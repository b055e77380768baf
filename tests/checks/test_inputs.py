"""Copies of inputs keep what a kernel can see of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from customops.checks import _memory
from customops.checks._inputs import copy_tensors, seeded, tensors_in


def strided(*size: int) -> torch.Tensor:
    return torch.randn(100).as_strided(size, [7, 3][: len(size)], 5)


LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "scalar": lambda: torch.tensor(3.0),
    "contiguous": lambda: torch.randn(3, 4),
    "transposed": lambda: torch.randn(3, 4).t(),
    "gaps": lambda: strided(3, 2),
    "expanded": lambda: torch.randn(3, 1).expand(3, 4),
    "overlapping": lambda: torch.arange(5).as_strided((3, 3), (1, 1)),
    "offset": lambda: torch.randn(10_000)[7_001:7_010],
    "empty": lambda: torch.empty(0, 3),
    "bool": lambda: torch.tensor([True, False]),
    "float8": lambda: torch.randn(4).to(torch.float8_e4m3fn),
    "complex128": lambda: torch.randn(2, 3, dtype=torch.complex128).t(),
    "conj": lambda: torch.randn(3, dtype=torch.complex64).conj(),
    "parameter": lambda: torch.nn.Parameter(torch.randn(3)),
}


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
def test_layout_and_values_are_kept(make: Callable[[], torch.Tensor]) -> None:
    tensor = make()
    copy = copy_tensors(tensor)
    assert (copy.shape, copy.stride(), copy.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    assert (copy.requires_grad, copy.is_conj()) == (tensor.requires_grad, tensor.is_conj())
    assert copy.data_ptr() % 64 == tensor.data_ptr() % 64
    assert torch.equal(_memory.bits(copy), _memory.bits(tensor))
    assert not _memory.share_memory(copy, tensor)


def test_only_the_used_part_of_a_storage_is_copied() -> None:
    cache = torch.zeros(1 << 20)
    copy = copy_tensors(cache[1000:1010])
    assert copy.untyped_storage().nbytes() < 4096


def test_sharing_among_inputs_is_kept() -> None:
    buffer = torch.randn(10)
    first, second, again = copy_tensors((buffer[:6], [buffer[4:]], {"x": buffer}))
    first[5] = 42.0
    assert second[0][1] == 42.0
    assert again["x"][5] == 42.0
    assert buffer[5] != 42.0


def test_the_same_tensor_is_copied_once() -> None:
    x = torch.randn(3)
    first, second = copy_tensors((x, x))
    assert first is second


def test_leaves_stay_leaves_and_others_stay_others() -> None:
    leaf = torch.randn(3, requires_grad=True)
    copies = copy_tensors((leaf, leaf * 2))
    assert [x.is_leaf for x in copies] == [True, False]
    assert all(x.requires_grad for x in copies)
    copies[1].add_(1)  # a leaf would refuse
    assert [x.is_leaf for x in copy_tensors((leaf, leaf * 2), leaves=True)] == [True, True]


def test_sparse_tensors_are_copied() -> None:
    x = torch.eye(3).to_sparse()
    copy = copy_tensors(x)
    copy._values().zero_()
    assert torch.equal(x.to_dense(), torch.eye(3))


def test_other_values_are_passed_on() -> None:
    values = [1, None, "s", torch.float16, torch.device("cpu"), (2.5, [True])]
    assert copy_tensors(values) == values
    assert tensors_in(values) == []


def test_bits_tell_apart_what_arithmetic_does_not() -> None:
    nan = torch.tensor(float("nan"))
    assert torch.equal(_memory.bits(nan), _memory.bits(nan.clone()))
    assert not torch.equal(_memory.bits(torch.tensor(0.0)), _memory.bits(torch.tensor(-0.0)))


def test_overlap_looks_at_elements() -> None:
    buffer = torch.zeros(4, 4)
    assert not _memory.overlap(buffer[:2], buffer[2:])
    assert not _memory.overlap(buffer[:, ::2], buffer[:, 1::2])
    assert _memory.overlap(buffer[:, ::2], buffer[1])
    assert _memory.share_memory(buffer[:2], buffer[2:])
    assert not _memory.share_memory(buffer[:0], buffer)
    assert not _memory.overlap(buffer, torch.zeros(4, 4))


def test_seeded_repeats_and_restores() -> None:
    state = torch.get_rng_state()
    with seeded(()):
        first = torch.rand(3)
    with seeded(()):
        assert torch.equal(torch.rand(3), first)
    assert torch.equal(torch.get_rng_state(), state)


def test_subclasses_that_only_override_functions_are_plain() -> None:
    class Named(torch.Tensor):
        pass

    copy = copy_tensors(strided(3, 2).as_subclass(Named))
    assert copy.stride() == (7, 3)
