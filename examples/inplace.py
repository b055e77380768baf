"""An op that writes to its first argument and returns it, as torch's own methods with a trailing underscore do.

Shows `torch.Tag.inplace`. With it the op needs no fake impl (what comes out is what went in), the schema says that
the return is the argument, and calls can be chained.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from customops import Tag, custom_op


@custom_op("examples::scale_", mutates_args={"x"}, tags=Tag.inplace)
def scale_(x: Tensor, by: float) -> Tensor:
    x.mul_(by)
    return x  # the argument itself: anything else is an error


@scale_.register_samples
def _() -> Iterator[tuple[Tensor, float]]:
    yield (torch.randn(4), 2.0)
    yield (torch.randn(4, 6)[:, ::2], -0.5)  # a view: the tensor behind it changes too


def main() -> None:
    print("schema:", scale_.schema)

    x = torch.ones(3)
    assert scale_(scale_(x, 2.0), 5.0) is x
    print("scaled twice:", x.tolist())

    # Autograd keeps count of writes, so that a stale value can never slip into a gradient.
    weight = torch.ones(3, requires_grad=True)
    y = weight.exp()
    scale_(y.detach(), 2.0)
    try:
        y.sum().backward()
    except RuntimeError as error:
        print("autograd noticed:", str(error).partition(":")[0])

    @torch.compile(fullgraph=True)
    def compiled(x: Tensor) -> Tensor:
        return scale_(x + 1, 10.0) - 1

    print("compiled:", compiled(torch.ones(3)).tolist())


if __name__ == "__main__":
    main()
