"""An op that writes rows into a cache and returns nothing, as the key-value caches of language models are filled.

Shows `mutates_args` for an op without a return: no fake impl is needed, and compilers know that the cache changed, so
what reads it later comes after the write.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from customops import custom_op


@custom_op("examples::store", mutates_args={"cache"})
def store(cache: Tensor, rows: Tensor, slots: Tensor) -> None:
    """cache[slots[i]] = rows[i]; a slot of -1 drops the row."""
    kept = slots >= 0
    cache[slots[kept]] = rows[kept]


@store.register_samples
def _() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    yield torch.zeros(8, 4), torch.randn(3, 4), torch.tensor([5, 0, 2])
    yield torch.zeros(2, 8, 4)[1], torch.randn(2, 4), torch.tensor([-1, 7])


class Memory(nn.Module):
    """Remembers the last rows it has seen, and returns their mean."""

    def __init__(self, slots: int, width: int) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(slots, width))

    def forward(self, rows: Tensor, slots: Tensor) -> Tensor:
        store(self.cache, rows, slots)
        return self.cache.mean(0)


def main() -> None:
    eager, compiled = Memory(4, 2), torch.compile(Memory(4, 2), fullgraph=True)
    for step in range(3):
        rows, slots = torch.full((2, 2), float(step + 1)), torch.tensor([step, -1])
        mean = eager(rows, slots)
        torch.testing.assert_close(compiled(rows, slots), mean)
        print(f"step {step}: mean {mean.tolist()}")
    torch.testing.assert_close(compiled.cache, eager.cache)
    print("the caches of the eager and of the compiled module are equal:")
    print(eager.cache)


if __name__ == "__main__":
    main()
