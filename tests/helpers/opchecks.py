"""What the tests of opcheck share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from customops.checks import DEFAULT_CHECKS

aten = torch.ops.aten
SUCCESS = dict.fromkeys(DEFAULT_CHECKS, "SUCCESS")


def to_numpy(tensor: torch.Tensor) -> Any:
    return tensor.detach().cpu().numpy()


@torch.library.custom_op("checks_opcheck::cube", mutates_args=())
def cube(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(to_numpy(x) ** 3), torch.tensor(3 * to_numpy(x) ** 2)


cube.register_fake(lambda x: (torch.empty_like(x), torch.empty_like(x)))


def cube_backward(ctx: Any, grad: torch.Tensor, grad_slope: torch.Tensor) -> torch.Tensor:
    x, slope = ctx.saved_tensors
    result: torch.Tensor = mul(grad, slope) + 6 * mul(grad_slope, x)
    return result


cube.register_autograd(
    cube_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0], output[1])
)


@torch.library.custom_op("checks_opcheck::mul", mutates_args=())
def mul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.tensor(to_numpy(x) * to_numpy(y))


def mul_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    x, y = ctx.saved_tensors
    return grad * y if ctx.needs_input_grad[0] else None, grad * x if ctx.needs_input_grad[1] else None


mul.register_fake(lambda x, y: (x * y).contiguous())
mul.register_autograd(mul_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


@torch.library.custom_op("checks_opcheck::mul_scalar", mutates_args=())
def mul_scalar(x: torch.Tensor, *, scalar: float) -> torch.Tensor:
    return torch.tensor(to_numpy(x) * scalar)


def mul_scalar_setup(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
    ctx.scalar = keyword_only_inputs["scalar"]


mul_scalar.register_fake(lambda x, *, scalar: (x * scalar).contiguous())
mul_scalar.register_autograd(lambda ctx, grad: grad * ctx.scalar, setup_context=mul_scalar_setup)


@torch.library.custom_op("checks_opcheck::take", mutates_args=())
def take(x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.tensor(np.take_along_axis(to_numpy(x), to_numpy(order), dim))


def take_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.dim = inputs[3]
    ctx.save_for_backward(inputs[1], inputs[2])


def take_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
    order, inverse = ctx.saved_tensors
    return take(grad, inverse, order, ctx.dim), None, None, None


take.register_fake(lambda x, order, inverse, dim: torch.empty_like(x))
take.register_autograd(take_backward, setup_context=take_setup)


@torch.library.custom_op("checks_opcheck::view_copy", mutates_args=())
def view_copy(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    return torch.tensor(to_numpy(x).reshape(shape).copy())


def view_copy_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.shape = inputs[0].shape


view_copy.register_fake(lambda x, shape: x.clone().view(shape).clone())
view_copy.register_autograd(lambda ctx, grad: (view_copy(grad, ctx.shape), None), setup_context=view_copy_setup)


@torch.library.custom_op("checks_opcheck::cat", mutates_args=())
def cat(xs: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    return torch.tensor(np.concatenate([to_numpy(x) for x in xs], axis=dim))


def cat_setup(ctx: Any, inputs: Any, output: Any) -> None:
    xs, ctx.dim = inputs
    ctx.sizes = [x.shape[ctx.dim] for x in xs]


def cat_backward(ctx: Any, grad: torch.Tensor) -> tuple[list[torch.Tensor], None]:
    return split_copy(grad, list(np.cumsum(ctx.sizes)[:-1]), ctx.dim), None


cat.register_fake(lambda xs, dim: torch.cat(xs, dim))
cat.register_autograd(cat_backward, setup_context=cat_setup)


@torch.library.custom_op("checks_opcheck::split_copy", mutates_args=())
def split_copy(x: torch.Tensor, splits: Sequence[int], dim: int) -> list[torch.Tensor]:
    return [torch.tensor(part) for part in np.split(to_numpy(x), splits, axis=dim)]


def split_copy_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.dim = inputs[2]


split_copy.register_fake(lambda x, splits, dim: [part.clone() for part in torch.tensor_split(x, splits, dim)])
split_copy.register_autograd(lambda ctx, grads: (cat(grads, ctx.dim), None, None), setup_context=split_copy_setup)


@torch.library.custom_op("checks_opcheck::split_copy_with_int", mutates_args=())
def split_copy_with_int(x: torch.Tensor, splits: Sequence[int], dim: int) -> tuple[list[torch.Tensor], int]:
    return split_copy(x, splits, dim), len(splits)


split_copy_with_int.register_fake(
    lambda x, splits, dim: ([part.clone() for part in torch.tensor_split(x, splits, dim)], len(splits))
)
split_copy_with_int.register_autograd(
    lambda ctx, grads, _: (cat(grads, ctx.dim), None, None), setup_context=split_copy_setup
)


order = torch.argsort(torch.rand(3, 5), dim=1)
