"""Right ops whose fake impls look wrong."""

from typing import Any

import torch
from corpus.entries import right_op
from corpus.parts import dense, floats, require, rnd
from torch import Tensor

from customops import custom_op, get_ctx


@right_op(
    why="The size of the result depends on data.",
    witness={
        "checks/faketensor.py: _check_on_meta": "test_faketensor",
        "checks/faketensor.py: _Comparison._agree": "test_faketensor",
    },
    sample=lambda: (rnd(4, 5), 0.0),
)
def values_above(name: str):
    def kernel(x: Tensor, threshold: float) -> Tensor:
        return x[x > threshold].contiguous()

    op = custom_op(name, kernel, mutates_args=(), differentiable=False)

    @op.register_fake
    def _(x, threshold):
        return x.new_empty(get_ctx().new_dynamic_size())

    return op


@right_op(
    why="Two results share a size that depends on data.",
    witness={
        "checks/faketensor.py: _Comparison._agree": "test_faketensor",
    },
    sample=lambda: (torch.tensor([5, 1, 5, 2]),),
)
def counted(name: str) -> Any:
    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor) -> tuple[Tensor, Tensor]:
        require(x.dtype == torch.int64, "int64 is needed")
        values, counts = x.unique(return_counts=True)
        return dense(values), dense(counts)

    @op.register_fake
    def _(x):
        require(x.dtype == torch.int64, "int64 is needed")
        size = torch.library.get_ctx().new_dynamic_size()
        return x.new_empty(size), x.new_empty(size)

    return op


@right_op(
    why="The fake impl calls `len(x)`, which fixes a symbolic size.",
    witness={
        "checks/faketensor.py: _compare_sizes": "test_symbolic_sizes",
    },
    sample=lambda: (torch.randn(3, 4),),
)
def to_fp8(name: str) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> tuple[Tensor, Tensor]:
        floats(x, dims=2)
        scale = dense((x.abs().sum(1) / 448 + 1e-6).float())
        return dense((x / scale[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)), scale

    @op.register_fake
    def _(x):
        floats(x, dims=2)
        return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), x.new_empty(len(x), dtype=torch.float32)

    return op


@right_op(
    why="The op returns a number that follows from the shape.",
    witness={
        "checks/faketensor.py: _Comparison.compare": "test_faketensor",
        "checks/faketensor.py: _differs": "test_symbolic_sizes",
    },
    sample=lambda: (torch.randn(5, 3), 4),
)
def t_padded_count(name: str) -> Any:
    def valid(x, multiple):
        floats(x, dims=2)
        require(0 < multiple <= 1024, "a multiple of 1 to 1024 is needed")

    @custom_op(name, mutates_args=())
    def op(x: Tensor, multiple: int) -> tuple[Tensor, int]:
        valid(x, multiple)
        missing = -len(x) % multiple
        return dense(torch.nn.functional.pad(x, (0, 0, 0, missing))), missing

    @op.register_fake
    def _(x, multiple):
        valid(x, multiple)
        missing = (multiple - x.shape[0] % multiple) % multiple
        return x.new_empty(x.shape[0] + missing, x.shape[1]), missing

    return op


@right_op(
    why="The op is a view and has no fake impl.",
    witness={
        "checks/faketensor.py: _fake_error": "test_errors",
    },
)
def split_heads(name: str) -> Any:
    @custom_op(name, mutates_args=(), schema="(Tensor(a) x) -> Tensor(a)")
    def split_heads(x):
        torch._check(
            x.dim() == 3 and x.shape[2] % 4 == 0,
            lambda: "split_heads: expected (batch, length, width), a multiple of 4 wide",
        )
        return x.unflatten(2, (4, x.shape[2] // 4)).transpose(1, 2)

    def setup_context(ctx, inputs, output):
        ctx._is_pure_view = True

    split_heads.register_autograd(lambda ctx, grad: grad.transpose(1, 2).flatten(2), setup_context=setup_context)

    @split_heads.register_samples
    def _():
        yield (torch.randn(2, 3, 8, requires_grad=True),)

    return split_heads
