"""The tags that say which strides inductor gives the tensors of an op."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from customops import Registry

STRIDES: list[Any] = []


def double(x: Tensor) -> Tensor:
    STRIDES.append(x.stride())
    return x * 2


@pytest.mark.compile
@pytest.mark.parametrize(
    ("tag", "strides"),
    [
        (torch.Tag.needs_contiguous_strides, (3, 1)),
        (torch.Tag.needs_exact_strides, (1, 4)),
        (torch.Tag.needs_fixed_stride_order, (1, 4)),
    ],
    ids=str,
)
def test_the_strides_that_kernels_get_in_compiled_code(registry: Registry, ns: str, tag: Any, strides: Any) -> None:
    op = registry.custom_op(f"{ns}::double", double, mutates_args=(), tags=tag)
    op.register_fake(lambda x: torch.empty_like(x))
    x = torch.randn(3, 4).t()
    for inputs in (x, torch.randn(3, 4).t()):
        STRIDES.clear()
        result = torch.compile(lambda x: op(x).sin(), fullgraph=True)(inputs)
        assert STRIDES == [strides]
        assert_close(result, (inputs * 2).sin())
    STRIDES.clear()
    op(x)
    assert STRIDES == [(1, 4)]  # the strides of the argument
