"""Rotary position embeddings, written into queries and keys where they lie, as inference engines do.

Shows `Mut[Tensor]` for what an op writes, `SameAs` for an op that returns what it wrote, and `Literal` for a choice of
few words. Compilers learn from the types what is written; a word that is not among them is refused at the call.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args

import torch
from torch import Tensor

from customops import Mut, SameAs, custom_op
from customops.errors import ArgumentError

#: Which dimensions turn together: the first half with the second, or each with its neighbour.
Style = Literal["neox", "gptj"]


@custom_op("examples::rotary")
def rotary(
    positions: Tensor,  # (tokens,)
    q: Mut[Tensor],  # (tokens, heads, width)
    k: Mut[Tensor] | None,  # None: the keys are those of another layer
    table: Tensor,  # (positions, turned): the cosines, and then the sines
    style: Style = "neox",
) -> None:
    for x in (q, k):
        if x is not None:
            turn(x, positions, table, style)


@custom_op("examples::rotary_")
def rotary_(x: Mut[Tensor], positions: Tensor, table: Tensor, style: Style = "neox") -> Annotated[Tensor, SameAs("x")]:
    """The same for one tensor, which is returned: the call can stand in an expression."""
    turn(x, positions, table, style)
    return x


def turn(x: Tensor, positions: Tensor, table: Tensor, style: Style) -> None:
    """Turns pairs of dimensions by the angles of the positions; dimensions past the table's width stay as they are."""
    cos, sin = table[positions].unsqueeze(1).chunk(2, -1)
    turned = x[..., : table.shape[1]]
    first, second = turned.chunk(2, -1) if style == "neox" else (turned[..., ::2], turned[..., 1::2])
    before = first.clone()
    first.mul_(cos).sub_(second * sin)
    second.mul_(cos).add_(before * sin)


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    angles = torch.outer(torch.arange(16), 10000 ** -torch.linspace(0, 1, 4))
    table = torch.cat([angles.cos(), angles.sin()], -1)
    return torch.tensor([3, 0, 7]), torch.randn(3, 4, 8), torch.randn(3, 2, 8), table


@rotary.register_samples
def _() -> Iterator[tuple[Any, ...]]:
    positions, q, k, table = inputs()
    yield positions, q, k, table
    yield positions, q.clone(), None, table[:, 2:6], "gptj"


@rotary_.register_samples
def _() -> Iterator[tuple[Any, ...]]:
    positions, q, k, table = inputs()
    yield q, positions, table
    yield k, positions, table, "gptj"


def in_plain_torch(x: Tensor, positions: Tensor, table: Tensor, style: Style) -> Tensor:
    """Pairs of dimensions as complex numbers, times a complex number of length one."""
    pairs = x.unflatten(-1, (2, -1)).transpose(-1, -2) if style == "neox" else x.unflatten(-1, (-1, 2))
    cos, sin = table[positions].unsqueeze(1).chunk(2, -1)
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.complex(cos, sin))
    return (turned.transpose(-1, -2) if style == "neox" else turned).flatten(-2)


def main() -> None:
    print("schemas:", rotary.schema, rotary_.schema, sep="\n  ")
    positions, q, k, table = inputs()
    for style in get_args(Style):
        expected = [in_plain_torch(x, positions, table, style) for x in (q, k)]
        for fn in (rotary, torch.compile(rotary, fullgraph=True)):
            ours = q.clone(), k.clone()
            fn(positions, *ours, table, style)
            torch.testing.assert_close(ours, tuple(expected))
        print(f"{style}: q and k are as in plain torch, compiled too")

    back = table * torch.tensor([1, -1]).repeat_interleave(4)
    turned = rotary_(rotary_(before := q.clone(), positions, table), positions, back)
    assert turned is before
    torch.testing.assert_close(turned, q)
    print("there and back again: the same tensor, with the same values")
    try:
        rotary(positions, q, k, table, "glm")  # type: ignore[arg-type]  # refused there, too
    except ArgumentError as error:
        print(error)


if __name__ == "__main__":
    main()
