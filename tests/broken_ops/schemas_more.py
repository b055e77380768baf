"""Writes that nobody declared, and returns that are not memory of their own."""

import torch
from broken_ops.corpus import fault
from broken_ops.needs_more import dense, floating, rank, single
from torch import Tensor

from customops import custom_op

WRITES = "an argument is written which mutates_args does not name"
ALIASES = "the return aliases an input, or two returns share memory, for some inputs"


@fault(
    kind=WRITES,
    note="The copy in double is no copy of what is double already; a float64 input shows it.",
    sample=lambda: (torch.randn(4),),
)
def deviation(name: str, broken: bool):
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floating(x)
        work = x.to(torch.float64, copy=not broken)
        work.sub_(work.mean())
        return work.norm()

    @op.register_fake
    def _(x):
        floating(x)
        return x.new_empty((), dtype=torch.float64)

    return op


@fault(
    kind=WRITES,
    note="The input is divided in place where there is a temperature.",
    sample=lambda: (torch.randn(2, 4),),
)
def tempered(name: str, broken: bool):
    def check(x: Tensor, temperature: float) -> None:
        single(x)
        rank(x, 1)
        if not temperature > 0:
            raise ValueError(f"a temperature of {temperature} is not positive")

    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor, temperature: float = 1.0) -> Tensor:
        check(x, temperature)
        if temperature != 1.0:
            x = x.div_(temperature) if broken else x.div(temperature)
        return dense(torch.softmax(x, -1))

    @op.register_fake
    def _(x, temperature=1.0):
        check(x, temperature)
        return x.new_empty(x.shape)

    return op


@fault(
    kind=WRITES,
    note="The rows are flattened to be sorted, which copies those alone that are not contiguous.",
    sample=lambda: (torch.randn(4, 3).t(),),
)
def median_of_all(name: str, broken: bool):
    def check(x: Tensor) -> None:
        single(x)
        if x.numel() == 0:
            raise ValueError("there is no median of nothing")

    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        check(x)
        values = x.reshape(-1) if broken else x.flatten().clone()
        torch.sort(values.clone(), out=(values, torch.empty(0, dtype=torch.int64)))
        return dense(values[(len(values) - 1) // 2])

    @op.register_fake
    def _(x):
        check(x)
        return x.new_empty(())

    return op


@fault(
    kind=ALIASES,
    note="A gain of 1 gives the input itself.",
    sample=lambda: (torch.randn(4), 2.0),
)
def gain_or_itself(name: str, broken: bool):
    @custom_op(name, mutates_args=())
    def op(x: Tensor, gain: float) -> Tensor:
        floating(x)
        return x if broken and gain == 1.0 else dense(x * gain)

    @op.register_fake
    def _(x, gain):
        floating(x)
        return x.new_empty(x.shape)

    return op


@fault(
    kind=ALIASES,
    note="What is float32 already is returned as it is.",
    sample=lambda: (torch.randn(4, dtype=torch.float64),),
)
def to_single(name: str, broken: bool):
    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floating(x)
        return x.float().contiguous() if broken else dense(x.float())

    @op.register_fake
    def _(x):
        floating(x)
        return x.new_empty(x.shape, dtype=torch.float32)

    return op


@fault(
    kind=ALIASES,
    note="For rows of one element both bounds are the same tensor.",
    sample=lambda: (torch.randn(3, 4),),
)
def row_bounds(name: str, broken: bool):
    def check(x: Tensor) -> None:
        floating(x)
        rank(x, 1)
        if x.shape[-1] == 0:
            raise ValueError("there are no bounds of an empty row")

    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> tuple[Tensor, Tensor]:
        check(x)
        low = dense(x.amin(-1))
        return low, low if broken and x.shape[-1] == 1 else dense(x.amax(-1))

    @op.register_fake
    def _(x):
        check(x)
        return x.new_empty(x.shape[:-1]), x.new_empty(x.shape[:-1])

    return op
