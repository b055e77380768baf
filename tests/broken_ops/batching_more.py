"""Rules for vmap that forget unbatched arguments, other positions of the batch, or batches of one or none."""

import torch
from broken_ops.corpus import fault
from broken_ops.needs_more import dense, floating, rank, same_shape
from torch import Tensor

from customops import custom_op

UNBATCHED = "the rule forgets that an argument may be unbatched, and indexes or moves it all the same"
OUT = "the rule gives the wrong out_dims, or is wrong in nested vmap or for a batch of size 0 or 1"


@fault(
    kind=UNBATCHED,
    note="An argument without a batch is taken to have it in front; in_dims=(0, None) shows it.",
    sample=lambda: (torch.randn(3), torch.randn(3)),
)
def squared_distance(name: str, broken: bool):
    @custom_op(name, mutates_args=())
    def op(x: Tensor, y: Tensor) -> Tensor:
        floating(x, y)
        same_shape(x, y)
        rank(x, 1)
        return dense((x - y).square().sum(-1))

    @op.register_fake
    def _(x, y):
        floating(x, y)
        same_shape(x, y)
        rank(x, 1)
        return x.new_empty(x.shape[:-1])

    @op.register_vmap
    def _(info, in_dims, x, y):
        def front(t: Tensor, dim: int | None) -> Tensor:
            if dim is None and not broken:
                return t.expand(info.batch_size, *t.shape)
            return t.movedim(dim or 0, 0)

        return op(front(x, in_dims[0]), front(y, in_dims[1])), 0

    return op


@fault(
    kind=UNBATCHED,
    note="The weight is moved whether it is batched or not; in_dims=(0, None) shows it.",
    sample=lambda: (torch.randn(2, 3), torch.randn(3)),
)
def column_weights(name: str, broken: bool):
    def check(x: Tensor, weight: Tensor) -> None:
        floating(x, weight)
        if x.dim() < 1 or torch.broadcast_shapes(x.shape, weight.shape) != x.shape:
            raise ValueError("the weight is not broadcast to x")

    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor, weight: Tensor) -> Tensor:
        check(x, weight)
        return dense(x * weight)

    @op.register_fake
    def _(x, weight):
        check(x, weight)
        return x.new_empty(x.shape)

    @op.register_vmap
    def _(info, in_dims, x, weight):
        x_dim, weight_dim = in_dims
        x = x.expand(info.batch_size, *x.shape) if x_dim is None else x.movedim(x_dim, 0)
        if weight_dim is not None or broken:
            weight = weight.movedim(weight_dim, 0)
            weight = weight[(slice(None), *[None] * (x.dim() - weight.dim()))]
        return op(x, weight), 0

    return op


@fault(
    kind=UNBATCHED,
    note="Every tensor of the list is moved by the dimension of the first; a list with one unbatched shows it.",
    sample=lambda: ([torch.randn(3), torch.randn(3)],),
)
def stacked_total(name: str, broken: bool):
    def check(xs: list[Tensor]) -> None:
        if not xs:
            raise ValueError("expected at least one tensor")
        floating(*xs)
        same_shape(*xs)

    @custom_op(name, mutates_args=())
    def op(xs: list[Tensor]) -> Tensor:
        check(xs)
        return dense(torch.stack(xs).sum(0))

    @op.register_fake
    def _(xs):
        check(xs)
        return xs[0].new_empty(xs[0].shape)

    @op.register_vmap
    def _(info, in_dims, xs):
        (dims,) = in_dims
        if broken:
            dims = [next(dim for dim in dims if dim is not None)] * len(xs)
        pairs = zip(xs, dims, strict=True)
        return op([x.expand(info.batch_size, *x.shape) if d is None else x.movedim(d, 0) for x, d in pairs]), 0

    return op


@fault(
    kind=OUT,
    note="The batch is moved to the front and said to be where it was; in_dims=1 shows it.",
    sample=lambda: (torch.randn(3, 3),),
)
def centred_rows(name: str, broken: bool):
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floating(x)
        rank(x, 1)
        return dense(x - x.mean(-1, keepdim=True))

    @op.register_fake
    def _(x):
        floating(x)
        rank(x, 1)
        return x.new_empty(x.shape)

    @op.register_vmap
    def _(info, in_dims, x):
        return op(x.movedim(in_dims[0], 0)), in_dims[0] if broken else 0

    return op


@fault(
    kind=OUT,
    note="The result of a batch is squeezed; a batch of one shows it.",
    sample=lambda: (torch.randn(4),),
)
def batched_energy(name: str, broken: bool):
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floating(x)
        return x.square().sum()

    @op.register_fake
    def _(x):
        floating(x)
        return x.new_empty(())

    @op.register_vmap
    def _(info, in_dims, x):
        size = info.batch_size
        rows = x.movedim(in_dims[0], 0).reshape(size, x.numel() // size if size else 0)
        sums = rows.square().sum(-1, keepdim=True)
        return sums.squeeze() if broken else sums.squeeze(-1), 0

    return op


@fault(
    kind=OUT,
    note="The results of a batch are stacked; an empty batch shows it.",
    sample=lambda: (torch.randn(2, 4),),
)
def halved_rows(name: str, broken: bool):
    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floating(x)
        rank(x, 2, 2)
        return dense(x[::2])

    @op.register_fake
    def _(x):
        floating(x)
        rank(x, 2, 2)
        return x.new_empty((x.shape[0] + 1) // 2, x.shape[1])

    @op.register_vmap
    def _(info, in_dims, x):
        rows = x.movedim(in_dims[0], 0)
        if info.batch_size == 0 and not broken:
            return dense(rows[:, ::2]), 0
        return torch.stack([op(row) for row in rows.unbind()]), 0

    return op
