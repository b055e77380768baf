"""Functions without annotations: whatever they may return, type checkers have nothing to say."""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs

from __future__ import annotations

import torch
from defined import add_, make, maybe, moments, named, out, pair, parts, several, size, text, three, write, zeros
from torch import Tensor
from typing_extensions import assert_type

from customops import custom_op


@custom_op("typing::untyped", schema="(Tensor x) -> Tensor")
def untyped(x):
    return x.sin()


@custom_op("typing::not_here", schema="(Tensor x) -> Tensor", device_types="cuda")
def not_here(x):
    raise NotImplementedError


@untyped.register_fake
def untyped_fake(x):
    return torch.empty_like(x)


@untyped.register_kernel("cuda")
def untyped_kernel(x: Tensor) -> Tensor:
    return x


@not_here.register_fake
def not_here_fake(x):
    return torch.empty_like(x)


@not_here.register_kernel("cuda")
def not_here_kernel(x: Tensor) -> Tensor:
    return x


@three.register_fake
def three_fake(a, b, c):
    return a.new_empty(a.shape)


@three.register_fake()
def three_short(a, b):
    return torch.empty_like(a)


@three.register_kernel("cuda")
def three_any(*args, **kwargs):
    return args[0]


@named.register_fake
def named_fake(x, n, *, times):
    return torch.empty_like(x)


@out.register_fake
def out_fake(x, *, out, eps):
    pass


@add_.register_fake
def add_fake(x, y):
    return x


@write.register_kernel("cuda")
def write_kernel(x, value):
    x.fill_(value)


@pair.register_fake
def pair_fake(x, y):
    return [torch.empty_like(x), torch.empty_like(y)]


@pair.register_kernel("cuda")
def pair_kernel(*both):
    return tuple(torch.empty_like(each) for each in both)


@several.register_fake
def several_fake(x):
    return torch.empty_like(x), torch.empty_like(x)


@size.register_fake
def size_fake(x):
    return x.shape[0]


@maybe.register_fake
def maybe_fake(x, wanted):
    return torch.empty_like(x) if wanted else None


@text.register_fake
def text_fake(x):
    return str(x.dtype)


@moments.register_fake
def moments_fake(x):
    return torch.empty(()), torch.empty(())


@parts.register_fake
def parts_fake(x):
    return {"a": torch.empty_like(x), "b": torch.empty_like(x)}


@make.register_fake
def make_fake(*, n, device):
    return torch.empty(n, device=device)


@zeros.register_fake
def zeros_fake(n):
    return torch.empty(n)


def setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


@three.register_autograd(setup_context=setup)
def three_backward(ctx, grad):
    return grad, None, None


@three.register_jvp
def three_jvp(ctx, x, y, by):
    return x


@three.register_reference
def three_from(x, y, by):
    return x * y * by


@three.register_vmap
def three_vmap(info, in_dims, x, y, by):
    return three(x, y, by), in_dims[0]


@three.register_samples
def three_samples():
    yield torch.ones(2), torch.ones(2)
    yield (torch.ones(2), torch.ones(2)), {"by": 3.0}


assert_type(three(torch.ones(2), torch.ones(2)), Tensor)
