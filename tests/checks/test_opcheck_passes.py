"""opcheck passes what is right: operators with autograd and fakes of the usual kinds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from helpers.libraries import Ops
from helpers.opchecks import (
    SUCCESS,
    aten,
    cat,
    cube,
    mul,
    mul_scalar,
    order,
    split_copy,
    split_copy_with_int,
    take,
    to_numpy,
    view_copy,
)

from customops.checks import _memory, opcheck
from customops.checks._inputs import tensors_in
from customops.errors import OpCheckError

# -- operators that pass: autograd and fakes of the usual kinds ----------------------------------


@torch.library.custom_op("checks_opcheck::sort", mutates_args=())
def sort(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    order = np.argsort(to_numpy(x), axis=dim)
    values = np.take_along_axis(to_numpy(x), order, axis=dim)
    return torch.tensor(values), torch.tensor(order), torch.tensor(np.argsort(order, axis=dim))


def sort_fake(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.int64), torch.empty_like(x, dtype=torch.int64)


def sort_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.dim = inputs[1]
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])


def sort_backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[torch.Tensor, None]:
    order, inverse = ctx.saved_tensors
    return take(grad, inverse, order, ctx.dim), None


sort.register_fake(sort_fake)
sort.register_autograd(sort_backward, setup_context=sort_setup)


@torch.library.custom_op("checks_opcheck::nonzero", mutates_args=())
def nonzero(x: torch.Tensor) -> torch.Tensor:
    return torch.tensor(np.stack(np.nonzero(to_numpy(x)), axis=1))


@nonzero.register_fake
def nonzero_fake(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((torch.library.get_ctx().new_dynamic_size(), x.dim()), dtype=torch.int64)


@torch.library.custom_op("checks_opcheck::nms", mutates_args=())
def nms(boxes: torch.Tensor, scores: torch.Tensor, threshold: float) -> torch.Tensor:
    corners, left, kept = to_numpy(boxes), list(np.argsort(-to_numpy(scores))), []
    while left:
        best, *rest = left
        kept.append(best)
        size = np.minimum(corners[rest, 2:], corners[best, 2:]) - np.maximum(corners[rest, :2], corners[best, :2])
        shared = np.prod(np.maximum(size, 0), axis=1)
        areas = np.prod(corners[:, 2:] - corners[:, :2], axis=1)
        left = [i for i, s in zip(rest, shared, strict=True) if s <= threshold * (areas[best] + areas[i] - s)]
    return torch.tensor(kept)


@nms.register_fake
def nms_fake(boxes: torch.Tensor, scores: torch.Tensor, threshold: float) -> torch.Tensor:
    return boxes.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.int64)


@torch.library.custom_op("checks_opcheck::write_all", mutates_args={"x", "ys", "z"})
def write_all(x: torch.Tensor, ys: Sequence[torch.Tensor], z: torch.Tensor | None = None, scale: float = 2.0) -> None:
    for tensor in [x, *ys] if z is None else [x, *ys, z]:
        tensor.mul_(scale)


@torch.library.custom_op("checks_opcheck::noise", mutates_args=())
def noise(shape: Sequence[int], device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.rand(shape, device=device, dtype=dtype)


noise.register_fake(lambda shape, device, dtype=None: torch.empty(shape, device=device, dtype=dtype))


def rand(*size: int, grad: bool = True) -> torch.Tensor:
    return torch.rand(*size, requires_grad=grad)


boxes = torch.rand(20, 4).cumsum(dim=1)
CUSTOM: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "cube": (cube, (rand(3),), {}),
    "cube, no grad": (cube, (rand(3, grad=False),), {}),
    "cube, empty": (cube, (rand(0, 2),), {}),
    "mul": (mul, (rand(2, 3), rand(3)), {}),
    "mul, one grad": (mul, (rand(2, 3), rand(3, grad=False)), {}),
    "mul, same": (mul, (boxes, boxes), {}),
    "mul_scalar": (mul_scalar, (rand(4),), {"scalar": 3.14}),
    "sort": (sort, (rand(3, 5), 1), {}),
    "sort, negative dim": (sort, (rand(3, 5), -2), {}),
    "take": (take, (rand(3, 5), order, torch.argsort(order, dim=1), 1), {}),
    "nonzero": (nonzero, (torch.tensor([[0.0, 1.0], [2.0, 3.0]]),), {}),
    "nms": (nms, (boxes, torch.rand(20), 0.3), {}),
    "view_copy": (view_copy, (rand(2, 3, 4), [2, 12]), {}),
    "cat": (cat, ([rand(2, 3), rand(4, 3), rand(5, 3, grad=False)], 0), {}),
    "split_copy": (split_copy, (rand(2, 9), [1, 3, 6], 1), {}),
    "split_copy_with_int": (split_copy_with_int, (rand(2, 9), [1, 3, 6], 1), {}),
    "write_all": (write_all, (rand(3, grad=False), [rand(2, grad=False)]), {"z": rand(4, grad=False)}),
    "write_all, defaults": (write_all, (rand(3, grad=False), []), {}),
    "noise": (noise, ([3, 4], torch.device("cpu")), {"dtype": torch.float64}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CUSTOM)
def test_custom_ops_pass(name: str) -> None:
    op, args, kwargs = CUSTOM[name]
    before = [_memory.bits(x).clone() for x in tensors_in((args, kwargs))]
    assert opcheck(op, args, kwargs) == SUCCESS
    assert all(map(torch.equal, before, map(_memory.bits, tensors_in((args, kwargs)))))


ATEN: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "sin": (aten.sin.default, (rand(3),), {}),
    "add_": (aten.add_.Tensor, (rand(3, grad=False), rand(3, grad=False)), {"alpha": 2}),
    "sort": (aten.sort.default, (rand(3, 4),), {}),
    "mm": (aten.mm.default, (rand(2, 3), rand(3, 4)), {}),
    "mm.out": (aten.mm.out, (rand(2, 3, grad=False), rand(3, 4, grad=False)), {"out": torch.empty(2, 4)}),
    "view": (aten.view.default, (rand(2, 3), [6]), {}),
    "split": (aten.split.Tensor, (rand(4, 3), 2), {}),
    "composite": (aten.silu.default, (rand(3),), {}),
}


@pytest.mark.parametrize(("op", "args", "kwargs"), ATEN.values(), ids=ATEN)
def test_aten_passes(op: Any, args: Any, kwargs: Any) -> None:
    assert opcheck(op, args, kwargs) == SUCCESS


@pytest.mark.gpu
@pytest.mark.parametrize("requires_grad", [False, True])
def test_on_a_gpu(define: Ops, requires_grad: bool) -> None:
    x = torch.rand(3, 4, device="cuda", requires_grad=requires_grad)
    for op, args in [
        (aten.sin.default, (x,)),
        (aten.sort.default, (x[:, ::2],)),
        (aten.dropout.default, (x, 0.5, True)),
        (aten.mul.Tensor, (x, torch.tensor(2.0))),
    ]:
        assert opcheck(op, args) == SUCCESS
    with pytest.raises(OpCheckError, match="is not defined as mutable but was mutated"):
        opcheck(define("f(Tensor x) -> Tensor", CUDA=lambda x: x.mul_(2) + 1), (x.detach(),))


@pytest.mark.gpu
def test_random_state_of_a_gpu_is_left_alone() -> None:
    x = torch.rand(8, device="cuda")
    state = torch.cuda.get_rng_state()
    assert opcheck(aten.bernoulli.p, (x, 0.5)) == SUCCESS
    assert torch.equal(torch.cuda.get_rng_state(), state)


@pytest.mark.gpu
def test_pinned_memory_stays_pinned(define: Ops) -> None:
    def kernel(x: torch.Tensor) -> torch.Tensor:
        assert x.is_pinned()
        return x.clone()

    op = define("f(Tensor x) -> Tensor", CPU=kernel)
    assert opcheck(op, (torch.rand(3).pin_memory(),), test_utils="test_schema") == {"test_schema": "SUCCESS"}
