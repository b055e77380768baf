"""Arguments of a call in a few words."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from customops._describe.render import described, outlined


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.ones(3, 4), "float32[3, 4]"),
        (torch.ones((), dtype=torch.int64), "int64[]"),
        (torch.ones(2, requires_grad=True), "float32[2] requires_grad"),
        (torch.nn.Parameter(torch.ones(2)), "float32[2] requires_grad"),
        (torch.ones(4)[::2], "float32[2] strides=[2]"),
        (torch.ones(2, device="meta"), "float32[2] on meta"),
        (torch.ones(2, 2).to_sparse(), "float32[2, 2] torch.sparse_coo"),
        ([torch.ones(1), None], "[float32[1], None]"),
        (list(range(9)), "[0, 1, 2, 3, ...]"),
        (torch.float16, "torch.float16"),
        ("x" * 100, "'" + "x" * 76 + "..."),
    ],
)
def test_outlined(value: Any, text: str) -> None:
    assert outlined(value) == text


def test_described_shows_few_values() -> None:
    assert described(torch.tensor([1.0, 2.5])) == "float32[2] = [1.0, 2.5]"
    assert described(torch.ones(9)) == "float32[9]"


@pytest.mark.parametrize("tensor", [torch.ones(2, device="meta"), torch.empty(2, dtype=torch.bits8)])
def test_described_says_what_it_can(tensor: torch.Tensor) -> None:
    assert described(tensor) == outlined(tensor)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_have_no_sizes() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.strided)
    assert described(nested) == outlined(nested) == "float32 nested"
