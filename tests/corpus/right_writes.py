"""Right ops that write to arguments, return arguments or return views."""

from typing import Any

import torch
from corpus.entries import right_op
from corpus.parts import FLOATS, dense, float_only, floats, require, require_dtype, require_same_dtype, rnd
from torch import Tensor

from customops import Tag, custom_op


@right_op(
    why="The schema declares that the result is a view.",
    witness={
        "checks/_outcome.py: torch_refuses": "test_aot_backward",
        "checks/writes.py: _judge_aliases": "test_writes",
        "checks/writes.py: _judge": "test_schema",
        "checking/_faults.py: fault_of_call": "inputs",
        "checking/_faults.py: _takes_contiguous": "inputs",
    },
    sample=lambda: (rnd(3, 4),),
)
def as_row(name: str):
    def kernel(x):
        return x.view(1, -1)

    def setup_context(ctx, inputs, output):
        ctx.shape = inputs[0].shape
        ctx._is_pure_view = True

    op = custom_op(name, kernel, mutates_args=(), schema="(Tensor(a) x) -> Tensor(a)")
    op.register_fake(kernel)
    op.register_autograd(lambda ctx, grad: grad.reshape(ctx.shape), setup_context=setup_context)
    return op


@right_op(
    why="The op writes to its argument, and its gradient uses the new value.",
    witness={
        "checks/_derivatives.py: Ordinary.settle": "test_gradients",
        "checks/writes.py: _judge_written": "test_writes",
        "checks/faketensor.py: _compare": "test_faketensor",
        "checks/faketensor.py: _judge_wrong_call": "test_errors",
        "checks/gradients.py: _Relations.run": "test_gradients",
        "checks/gradients.py: _Comparison._look_for_nan": "test_gradients",
        "checks/writes.py: _judge": "test_schema",
    },
    sample=lambda: (rnd(3, 4),),
)
def exp_(name: str):
    @float_only
    def kernel(x: Tensor) -> Tensor:
        return x.exp_()

    op = custom_op(name, kernel, mutates_args={"x"}, tags=Tag.inplace)
    op.register_autograd(
        lambda ctx, grad: grad * ctx.saved_tensors[0],
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
    )
    return op


@right_op(
    why="The op declares a write that the sample does not cause, because its values are below the peaks.",
    witness={
        "checks/writes.py: _likely_to_write.filled": "test_writes",
    },
    sample=lambda: (torch.full((4,), 10.0), torch.rand(4)),
)
def raise_peaks(name: str) -> Any:
    @custom_op(name, mutates_args={"peaks"})
    def op(peaks: Tensor, x: Tensor) -> None:
        require_dtype(peaks, FLOATS)
        require_same_dtype(peaks, x)
        if peaks.shape != x.shape:
            raise ValueError(f"expected one shape, got {tuple(peaks.shape)} and {tuple(x.shape)}")
        if bool((x > peaks).any()):
            peaks.copy_(torch.maximum(peaks, x))

    @op.register_fake
    def _(peaks, x):
        require_dtype(peaks, FLOATS)
        require_same_dtype(peaks, x)
        if peaks.shape != x.shape:
            raise ValueError(f"expected one shape, got {tuple(peaks.shape)} and {tuple(x.shape)}")

    return op


@right_op(
    why="The op moves a position that it declares as written, so that a second call differs.",
    witness={
        "checks/writes.py: _judge_written": "test_writes",
    },
    sample=lambda: (torch.randn(4), torch.zeros((), dtype=torch.int64)),
)
def t_next_element(name: str) -> Any:
    def valid(x, position):
        floats(x, dims=1)
        require(x.shape[0] > 0, "an element is needed")
        require(position.dtype == torch.int64 and position.dim() == 0, "a position is needed")

    @custom_op(name, mutates_args={"position"})
    def op(x: Tensor, position: Tensor) -> Tensor:
        valid(x, position)
        value = dense(x[int(position) % len(x)])
        position.add_(1)
        return value

    @op.register_fake
    def _(x, position):
        valid(x, position)
        return x.new_empty(())

    return op


@right_op(
    why="The op returns a list of results for a list of arguments.",
    witness={
        "checks/_memory.py: overlap": "test_schema",
    },
    sample=lambda: ([rnd(3), rnd(2, 4, seed=1)], 2.0),
)
def foreach_scale(name: str):
    @float_only
    def kernel(xs: list[Tensor], by: float) -> list[Tensor]:
        return [(x * by).contiguous() for x in xs]

    op = custom_op(name, kernel, mutates_args=())
    op.register_fake(float_only(lambda xs, by: [x.new_empty(x.shape) for x in xs]))
    op.register_autograd(
        lambda ctx, grads: ([grad * ctx.by for grad in grads], None),
        setup_context=lambda ctx, inputs, output: setattr(ctx, "by", inputs[1]),
    )
    return op
