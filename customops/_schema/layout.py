"""What compilers have to keep of the strides of an op's tensors, by name."""

from __future__ import annotations

from typing import Any, Literal

import torch

from customops.errors import DefinitionError, brief

#: "needs_contiguous": the kernel gets contiguous tensors. "exact_strides": it gets the strides that it would get
#: without a compiler; so does an op that says nothing. "stride_order": the same order of strides. "flexible": any.
Layout = Literal["needs_contiguous", "exact_strides", "stride_order", "flexible"]

_TAGS = {
    "needs_contiguous": torch.Tag.needs_contiguous_strides,
    "exact_strides": torch.Tag.needs_exact_strides,
    "stride_order": torch.Tag.needs_fixed_stride_order,
    "flexible": torch.Tag.flexible_layout,
}


def with_layout(tags: tuple[torch.Tag, ...], layout: Any, op: str) -> tuple[torch.Tag, ...]:
    """The tags of an op, with that of a layout if there is one.

    Raises:
        DefinitionError: there is no such layout, or a tag says another one.
    """
    if layout is None:
        return tags
    if not isinstance(layout, str) or layout not in _TAGS:
        expected = " or ".join(f'"{name}"' for name in _TAGS)
        raise DefinitionError("layout= has an invalid value", op=op, expected=expected, got=brief(layout))
    wanted = _TAGS[layout]
    other = next((tag for tag in _TAGS.values() if tag in tags and tag is not wanted), None)
    if other is not None:
        raise DefinitionError(
            "layout= and tags= disagree", op=op, expected=f"tags without {other}", got=f"layout={layout!r}, {other}"
        )
    return tags if wanted in tags else (*tags, wanted)
