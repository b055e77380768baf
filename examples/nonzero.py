"""An op whose output has a size that depends on data: how many elements there are is known after computing them.

Shows `get_ctx().new_dynamic_size()`, which stands for such a size in a fake impl. The compiler carries it along as a
symbol, and no graph break is needed.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from customops import custom_op, get_ctx


@custom_op("examples::nonzero", mutates_args=())
def nonzero(x: Tensor) -> Tensor:
    return torch.nonzero(x)


@nonzero.register_fake
def _(x: Tensor) -> Tensor:
    count = get_ctx().new_dynamic_size()
    # torch.nonzero fills its result column by column, and a fake impl has to say so.
    return torch.empty_strided((count, x.dim()), (1, count), dtype=torch.int64, device=x.device)


@nonzero.register_samples
def _() -> Iterator[tuple[Tensor]]:
    yield (torch.tensor([[1, 0, 2], [0, 0, 3]]),)
    yield (torch.tensor([0.0, 1.0, 0.0, 2.0, 3.0]),)


def main() -> None:
    x = torch.tensor([0.0, 1.0, 0.0, 2.0])
    print("nonzero(x) =", nonzero(x).tolist())

    # The number of rows leaves the op as a symbol, so compiled code has to be ready for it.
    @torch.compile(fullgraph=True, dynamic=True)
    def compiled(x: Tensor) -> Tensor:
        return nonzero(x) * 10

    for size in (3, 5):
        print(f"compiled, {size} ones: {len(compiled(torch.ones(size)))} rows")


if __name__ == "__main__":
    main()
