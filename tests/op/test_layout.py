"""``layout=``: the strides that inductor gives the tensors of an op."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from customops import Registry
from customops.errors import DefinitionError

STRIDES: list[Any] = []


def double(x: Tensor) -> Tensor:
    STRIDES.append(x.stride())
    return x * 2


TAGS = {
    "needs_contiguous": torch.Tag.needs_contiguous_strides,
    "exact_strides": torch.Tag.needs_exact_strides,
    "stride_order": torch.Tag.needs_fixed_stride_order,
    "flexible": torch.Tag.flexible_layout,
}


@pytest.mark.parametrize("layout", TAGS)
def test_a_layout_is_a_tag(registry: Registry, ns: str, layout: Any) -> None:
    op = registry.custom_op(f"{ns}::double", double, mutates_args=(), layout=layout)
    assert TAGS[layout] in op.tags
    again = registry.custom_op(f"{ns}::double", double, mutates_args=(), layout=layout, tags=TAGS[layout])
    assert again.tags.count(TAGS[layout]) == 1


@pytest.mark.compile
@pytest.mark.parametrize(
    ("layout", "strides"), [("needs_contiguous", (3, 1)), ("exact_strides", (1, 4)), ("stride_order", (1, 4))]
)
def test_what_kernels_get_in_compiled_code(registry: Registry, ns: str, layout: Any, strides: Any) -> None:
    op = registry.custom_op(f"{ns}::double", double, mutates_args=(), layout=layout)
    op.register_fake(lambda x: torch.empty_like(x))
    x = torch.randn(3, 4).t()
    for inputs in (x, torch.randn(3, 4).t()):
        STRIDES.clear()
        result = torch.compile(lambda x: op(x).sin(), fullgraph=True)(inputs)
        assert STRIDES == [strides]
        assert_close(result, (inputs * 2).sin())
    STRIDES.clear()
    op(x)
    assert STRIDES == [(1, 4)]  # as it is given


def test_what_is_refused(registry: Registry, ns: str) -> None:
    with pytest.raises(DefinitionError, match="layout= has an invalid value"):
        registry.custom_op(f"{ns}::double", double, mutates_args=(), layout="contiguous")  # type: ignore[call-overload]
    with pytest.raises(DefinitionError, match="layout= and tags= disagree"):
        registry.custom_op(
            f"{ns}::double", double, mutates_args=(), layout="flexible", tags=torch.Tag.needs_exact_strides
        )
    assert len(registry) == 0
