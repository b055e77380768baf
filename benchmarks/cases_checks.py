"""The time of checking an op: `opcheck` beside torch's, and `customops.check` by effort. Times are wall time.

The first call imports modules that checks load late. It is not measured.
"""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from cases import Case, Fn, each
from torch import Tensor

import customops

Op = tuple[Any, tuple[Tensor, ...]]


def like_input(x: Tensor) -> Tensor:
    dtype = x.dtype if x.is_floating_point() or x.is_complex() else torch.get_default_dtype()
    return torch.empty_like(x, dtype=dtype)


def keep_input(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def sine_backward(ctx: Any, grad: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    return grad * x.cos().conj()


@cache
def sine() -> Op:
    """Return a differentiable op and its arguments."""

    @customops.custom_op("bench_checks::sine", mutates_args=())
    def op(x: Tensor) -> Tensor:
        return x.sin()

    op.register_fake(like_input)
    op.register_autograd(sine_backward, setup_context=keep_input)
    return op, (torch.randn(3, 4, requires_grad=True),)


@cache
def product() -> Op:
    """Return an op of two tensors and its arguments."""

    @customops.custom_op("bench_checks::product", mutates_args=())
    def op(x: Tensor, y: Tensor) -> Tensor:
        return x @ y

    op.register_fake(torch.matmul)
    return op, (torch.randn(3, 4), torch.randn(4, 5))


@cache
def add_() -> Op:
    """Return an op that writes and its arguments."""

    @customops.custom_op("bench_checks::add_", mutates_args={"x"})
    def op(x: Tensor, y: Tensor) -> None:
        x.add_(y)

    return op, (torch.randn(3, 4), torch.randn(3, 4))


def check(op: Any, args: tuple[Tensor, ...], effort: str) -> None:
    customops.check(op, [args], effort=effort).raise_on_failure()


def quietly(run: Callable[[], Any]) -> Fn:
    """Return a function that runs a check without its output. The check raises if the op fails."""

    def f() -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            run()

    return f


def checkers(define: Callable[[], Op]) -> dict[str, Fn]:
    op, args = define()
    return {
        "opcheck": quietly(lambda: customops.opcheck(op, args)),
        "torch's opcheck": quietly(lambda: torch.library.opcheck(op._opoverload, args)),
        "check, quick": quietly(lambda: check(op, args, "quick")),
        "check, normal": quietly(lambda: check(op, args, "normal")),
    }


def cases() -> list[Case]:
    return [
        Case(
            f"checks of {define.__name__}",
            "checks",
            each("f()", lambda define=define: checkers(define)),
            rounds=5,
            runs=1,
            unit="s",
            clock=time.perf_counter,
            repeats=1,
        )
        for define in (sine, product, add_)
    ]
