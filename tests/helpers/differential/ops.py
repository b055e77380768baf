"""Ops that are defined by both frameworks, and note what their kernels see."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, List, Optional, Sequence, Tuple

import torch
from hypothesis import HealthCheck, settings
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

from customops import Tag

CASES = settings(
    deadline=None,
    max_examples=50,
    print_blob=True,
    derandomize="EXPLORE" not in os.environ,  # a run of all tests passes or fails by the code, not by chance
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


SEEN: list[Any] = []
PARAMETER = torch.nn.Parameter(torch.ones(1))


def see(where: str, *values: Any) -> None:
    """Note what can be seen from inside a kernel or formula: the modes, and what it was given."""
    records = torch.is_grad_enabled(), (PARAMETER * 2).grad_fn is not None
    if where == "kernel":  # never here; in torch a kernel below autograd, or for inference tensors, finds it on
        records = (False, False)
    modes = *records, torch.is_inference_mode_enabled()
    SEEN.append((where, *modes, forward_ad._current_level, [shape_of(value) for value in values]))


def shape_of(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: shape_of(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [shape_of(item) for item in value]
    if isinstance(value, Tensor):
        kind = type(value).__name__, value.dtype, str(value.layout), value.is_conj(), value.is_neg()
        # not is_leaf: inside a dispatch mode torch deadlocks over it for a view whose history has to be made anew
        return *kind, value.requires_grad, getattr(value, "mark", None)
    return value


def times(x: Tensor, by: Any) -> Tensor:
    return x.clone() if x.is_quantized else x * by


def scale(x: Tensor, by: float = 2.0) -> Tensor:
    see("kernel", x, by)
    return times(x, by)


def product(x: Tensor, y: Tensor) -> Tensor:
    see("kernel", x, y)
    return x * y


def both(x: Tensor, y: Tensor) -> Tuple[Tensor, Tensor]:
    see("kernel", x, y)
    return times(x, 2), times(y, 3)


def total(xs: List[Tensor], weights: Optional[Sequence[float]] = None) -> Tensor:
    see("kernel", xs, weights)
    return functools.reduce(torch.add, (times(x, by) for x, by in zip(xs, weights or [1.0] * len(xs), strict=False)))


def each(xs: List[Tensor]) -> List[Tensor]:
    see("kernel", xs)
    return [times(x, 2) for x in xs]


def gaps(xs: Sequence[Optional[Tensor]], n: int) -> Tensor:
    see("kernel", xs, n)
    return sum(times(x, n) for x in xs if x is not None)


def maybe(x: Tensor, bias: Optional[Tensor] = None, sizes: Optional[Sequence[int]] = None) -> Tensor:
    see("kernel", x, bias, sizes)
    return times(x, 2 + len(sizes or [])) if bias is None else x + bias


def options(x: Tensor, n: int, name: str = "a", dtype: Optional[torch.dtype] = None, *, by: float = 1.0) -> Tensor:
    see("kernel", x, n, name, dtype, by)
    return times(x, n * len(name) * by).to(dtype or x.dtype, copy=True)


def mean(x: Tensor) -> Tuple[float, int]:
    see("kernel", x)
    return float(x.abs().sum()), x.numel()


def fill(x: Tensor, by: float = 2.0) -> None:
    see("kernel", x, by)
    x.mul_(by)


def fill_all(xs: List[Tensor], y: Tensor) -> None:
    see("kernel", xs, y)
    for x in xs:
        x.mul_(2)


def accumulate(x: Tensor, into: Tensor) -> Tensor:
    see("kernel", x, into)
    into.add_(1)
    return times(x, 2)


def scale_(x: Tensor, y: Tensor) -> Tensor:
    see("kernel", x, y)
    return x.mul_(2)


def scale_out(x: Tensor, *, out: Tensor) -> Tensor:
    see("kernel", x, out)
    return out.copy_(x)


def ramp(size: List[int], device: torch.device) -> Tensor:
    see("kernel", size, device)
    return torch.arange(size[0], device=device)


def row(x: Tensor, i: int) -> Tensor:
    see("kernel", x, i)
    return x[i]


def same(x: Tensor) -> Tensor:
    see("kernel", x)
    return x


def fails(x: Tensor, y: Tensor) -> Tensor:
    see("kernel", x, y)
    raise KeyError("a kernel's own error")


@dataclass(frozen=True)
class Op:
    """An op to be defined on both sides, and calls of it: ``call(op, *tensors)`` for a number of tensors."""

    fn: Callable[..., Any]
    calls: tuple[Callable[..., Any], ...]
    tensors: int = 1
    name: str = ""
    keywords: dict[str, Any] = field(default_factory=dict)
    fake: Callable[..., Any] | None = None
    factors: tuple[Any, ...] = ()  # gradient of each input
    registered: tuple[str, ...] = ()

    def define(self, custom_op: Callable[..., Any], qualname: str) -> Any:
        op = custom_op(qualname, self.fn, **{"mutates_args": ()} | self.keywords)
        if self.fake is not None:
            op.register_fake(self.fake)
        if self.factors:
            op.register_autograd(self._backward, setup_context=self._with_keywords if self.has_keywords else self._save)
        if "autocast" in self.registered:
            op.register_autocast("cpu", torch.bfloat16)
        if "vmap" in self.registered:
            op.register_vmap(lambda info, dims, x, by=2.0: (see("vmap", dims[0], x, by), (op(x, by), dims[0]))[1])
        return op

    @property
    def has_keywords(self) -> bool:
        return self.fn is options

    def _save(self, ctx: Any, inputs: Any, output: Any) -> None:
        see("setup", inputs, output)
        ctx.save_for_backward(*(value for value in tree_leaves(inputs) if isinstance(value, Tensor)))
        ctx.lengths = [len(value) if isinstance(value, list) else None for value in inputs]

    def _with_keywords(self, ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
        see("keywords", *keyword_only_inputs.items())
        self._save(ctx, inputs, output)

    def _backward(self, ctx: Any, *grads: Any) -> Any:
        see("backward", grads, ctx.needs_input_grad, ctx.saved_tensors)
        first = next(grad for grad in tree_leaves(grads) if grad is not None)
        result = []
        for by, length in zip(self.factors, ctx.lengths[: len(ctx.needs_input_grad)], strict=False):
            one = None if by is None else first * by
            result.append(one if length is None else [one] * length)
        return tuple(result)


def like(x: Any, *_: Any, **__: Any) -> Any:
    return torch.zeros_like(x)  # zeros, as it is also what a mix of dense and meta tensors comes to


OPS = {
    op.name or op.fn.__name__: op
    for op in (
        Op(scale, (lambda op, x: op(x), lambda op, x: op(x, 3.0), lambda op, x: op(by=2.0, x=x)), 1, fake=like,
           factors=(2.0, None), registered=("autocast",)),
        Op(scale, (lambda op, x: op(x), lambda op, x: op(x, 3.0)), 1, "no_formula", fake=like, registered=("vmap",)),
        Op(scale, (lambda op, x: op(x),), 1, "for_cpu", {"device_types": "cpu"}, like, (2.0, None)),
        Op(product, (lambda op, x, y: op(x, y),), 2, fake=like, factors=(2.0, 3.0)),
        Op(both, (lambda op, x, y: op(x, y), lambda op, x, y: op(x, y=y)), 2,
           fake=lambda x, y: (like(x), like(y)), factors=(2.0, 3.0), registered=("autocast",)),
        Op(total, (lambda op, x, y: op([x, y]), lambda op, x, y: op([x, y], [2.0, 3.0]), lambda op, x, y: op((x,))), 2,
           fake=lambda xs, weights=None: like(xs[0]), factors=(2.0, None), registered=("autocast",)),
        Op(each, (lambda op, x, y: op([x, y]), lambda op, x, y: op([x])), 2, fake=lambda xs: list(map(like, xs)),
           factors=(2.0,)),
        Op(gaps, (lambda op, x: op([None, x], 2), lambda op, x: op([x, x], 1)), 1, fake=lambda xs, n: like(xs[-1])),
        Op(maybe, (lambda op, x, y: op(x), lambda op, x, y: op(x, y), lambda op, x, y: op(x, None, [1, 2]),
                   lambda op, x, y: op(x, sizes=[3])), 2, fake=like, factors=(2.0, 3.0, None)),
        Op(options, (lambda op, x: op(x, 2), lambda op, x: op(x, 1, "bc", torch.float64), lambda op, x: op(x, 1, by=3),
                     lambda op, x: op(x, n=2, dtype=torch.float16, by=1.0)), 1,
           fake=lambda x, n, name="a", dtype=None, *, by=1.0: x.new_zeros(x.shape, dtype=dtype),
           factors=(2.0, None, None, None)),
        Op(mean, (lambda op, x: op(x),)),
        Op(fill, (lambda op, x: op(x), lambda op, x: op(x, by=3.0)), 1, "fill", {"mutates_args": {"x"}}),
        Op(fill_all, (lambda op, x, y: op([x, y], y), lambda op, x, y: op([x], y)), 2, "", {"mutates_args": {"xs"}}),
        Op(accumulate, (lambda op, x, y: op(x, y),), 2, "", {"mutates_args": {"into"}}, like),
        Op(scale_, (lambda op, x, y: op(x, y),), 2, "", {"mutates_args": {"x"}, "tags": Tag.inplace}),
        Op(scale_out, (lambda op, x, y: op(x, out=y),), 2, "", {"mutates_args": {"out"}, "tags": Tag.out}),
        Op(ramp, (lambda op: op([3], torch.device("cpu")), lambda op: op([2], torch.device("meta"))), 0, "",
           {"device_types": "cpu"}, lambda size, device: torch.zeros(size, dtype=torch.int64, device=device)),
        Op(row, (lambda op, x: op(x, 0), lambda op, x: op(x, 1)), 1, "row",
           {"schema": "(Tensor(a) x, int i) -> Tensor(a)"}, row),
        Op(same, (lambda op, x: op(x),), 1, fake=like),
        Op(fails, (lambda op, x, y: op(x, y),), 2, fake=like, factors=(2.0, 3.0)),
    )
}  # fmt: skip
