"""Memory that is never written, randomness that is not declared, and kernels that remember their calls."""

import numpy as np
import torch
from broken_ops.corpus import fault
from broken_ops.needs_more import dense, floating, library, overload, rank, same_shape, single, unshared
from torch import Tensor

from customops import custom_op

UNWRITTEN = "uninitialised memory: part of an output is never written"
RANDOM = "random numbers without the tag, from a generator of its own, or a global seed set as a side effect"
TWICE = "a write that is declared is done, and undone or done twice, on a second call; or the version is wrong"
CALLER = "the kernel looks at how it is called: is_compiling, fake mode, the number of calls so far"


@fault(
    kind=UNWRITTEN,
    note="The sum of an empty segment is never written; a length of 0 shows it.",
    sample=lambda: (torch.randn(6), torch.tensor([2, 1, 3])),
)
def segment_sums(name: str, broken: bool):
    def check(x: Tensor, lengths: Tensor) -> None:
        single(x)
        rank(x, 1, 1)
        rank(lengths, 1, 1)
        if lengths.dtype != torch.int64:
            raise ValueError(f"expected lengths of int64, got {lengths.dtype}")

    @custom_op(name, mutates_args=())
    def op(x: Tensor, lengths: Tensor) -> Tensor:
        check(x, lengths)
        counts = lengths.tolist()
        if any(count < 0 for count in counts) or sum(counts) != len(x):
            raise ValueError(f"segments of {counts} do not make up {len(x)} elements")
        out = x.new_empty(len(counts)) if broken else x.new_zeros(len(counts))
        start = 0
        for i, count in enumerate(counts):
            if count:
                out[i] = x[start : start + count].sum()
            start += count
        return out

    @op.register_fake
    def _(x, lengths):
        check(x, lengths)
        return x.new_empty(lengths.shape)

    return op


@fault(
    kind=UNWRITTEN,
    note="Nothing is written before the first delayed element; steps=1 shows it.",
    sample=lambda: (torch.randn(6), 0),
)
def delayed(name: str, broken: bool):
    def check(x: Tensor, steps: int) -> None:
        floating(x)
        rank(x, 1)
        if steps < 0:
            raise ValueError(f"a delay of {steps} is no delay")

    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor, steps: int) -> Tensor:
        check(x, steps)
        out = x.new_empty(x.shape) if broken else x.new_zeros(x.shape)
        if steps < len(x):
            out[steps:] = x[: len(x) - steps]
        return out

    @op.register_fake
    def _(x, steps):
        check(x, steps)
        return x.new_empty(x.shape)

    return op


@fault(
    kind=UNWRITTEN,
    note="The padding is never written; a last size that is no multiple shows it.",
    sample=lambda: (torch.randn(3, 8), 4),
)
def padded_rows(name: str, broken: bool):
    def size(x: Tensor, multiple: int) -> int:
        floating(x)
        rank(x, 1)
        if not 1 <= multiple <= 1024:
            raise ValueError(f"expected a multiple of up to 1024, got {multiple}")
        return (x.shape[-1] + multiple - 1) // multiple * multiple

    @custom_op(name, mutates_args=())
    def op(x: Tensor, multiple: int) -> Tensor:
        shape = (*x.shape[:-1], size(x, multiple))
        out = x.new_empty(shape) if broken else x.new_zeros(shape)
        out[..., : x.shape[-1]] = x
        return out

    @op.register_fake
    def _(x, multiple):
        last = size(x, multiple)
        return x.new_empty((*x.shape[:-1], last))

    return op


@fault(
    kind=RANDOM,
    note="The op is random and has no tag that says so: two calls may be taken for one.",
    sample=lambda: (torch.randn(16), 0.5),
)
def undeclared_dropout(name: str, broken: bool):
    def check(x: Tensor, p: float) -> None:
        floating(x)
        if not 0 <= p < 1:
            raise ValueError(f"{p} is not the probability of dropping some")

    @custom_op(name, mutates_args=(), tags=() if broken else torch.Tag.nondeterministic_seeded)
    def op(x: Tensor, p: float) -> Tensor:
        check(x, p)
        return dense(torch.where(torch.rand(x.shape) < p, 0.0, x / (1 - p)).to(x.dtype))

    @op.register_fake
    def _(x, p):
        check(x, p)
        return x.new_empty(x.shape)

    return op


@fault(
    kind=RANDOM,
    note="The noise is NumPy's own, which no seed of torch governs.",
    sample=lambda: (torch.randn(8),),
)
def jittered(name: str, broken: bool):
    generator = np.random.default_rng()

    @torch.library.custom_op(name, mutates_args=(), tags=torch.Tag.nondeterministic_seeded)
    def op(x: Tensor) -> Tensor:
        single(x)
        noise = torch.from_numpy(generator.random(tuple(x.shape))) if broken else torch.rand(x.shape)
        return dense(x + noise.to(x.dtype))

    @op.register_fake
    def _(x):
        single(x)
        return x.new_empty(x.shape)

    return op


@fault(
    kind=RANDOM,
    note="The seed is given to the generator of the whole process, whose next numbers are others then.",
    sample=lambda: (torch.randn(8), 3),
)
def dithered(name: str, broken: bool):
    def check(x: Tensor, seed: int) -> None:
        floating(x)
        if not 0 <= seed < 2**31:
            raise ValueError(f"{seed} is no seed")

    @custom_op(name, mutates_args=())
    def op(x: Tensor, seed: int) -> Tensor:
        check(x, seed)
        generator = torch.manual_seed(seed) if broken else torch.Generator().manual_seed(seed)
        return dense((x + torch.rand(x.shape, generator=generator) - 0.5).to(x.dtype))

    @op.register_fake
    def _(x, seed):
        check(x, seed)
        return x.new_empty(x.shape)

    return op


@fault(
    kind=TWICE,
    note="A table at an address that was filled before is left as it is; a second call on it shows it.",
    sample=lambda: (torch.zeros(4), 0.5),
)
def fill_ramp(name: str, broken: bool):
    filled: set[int] = set()

    def check(table: Tensor) -> None:
        floating(table)
        rank(table, 1, 1)
        unshared(table)

    @custom_op(name, mutates_args={"table"})
    def op(table: Tensor, step: float) -> None:
        check(table)
        if broken and table.data_ptr() in filled:
            return
        filled.add(table.data_ptr())
        table.copy_(torch.arange(len(table), dtype=torch.float64) * step)

    op.register_fake(lambda table, step: check(table))
    return op


@fault(
    kind=TWICE,
    note="The first call for a shape tries the kernel on the arguments, so that they are added twice.",
    sample=lambda: (torch.zeros(4), torch.ones(4)),
)
def add_after_tuning(name: str, broken: bool):
    tuned: set[torch.Size] = set()

    def check(total: Tensor, x: Tensor) -> None:
        floating(total, x)
        same_shape(total, x)
        unshared(total)

    @custom_op(name, mutates_args={"total"})
    def op(total: Tensor, x: Tensor) -> None:
        check(total, x)
        if x.shape not in tuned:
            tuned.add(x.shape)
            (total if broken else total.clone()).add_(x.clone())
        total.add_(x.clone())

    op.register_fake(check)
    return op


@fault(
    kind=TWICE,
    note="NumPy writes the counts, and their version stays, so that nobody sees that a saved index was changed.",
    sample=lambda: (torch.zeros(4, dtype=torch.int64), torch.ones(4, dtype=torch.int64)),
)
def advance(name: str, broken: bool):
    def check(places: Tensor, by: Tensor) -> None:
        if places.dtype != torch.int64 or by.dtype != torch.int64:
            raise ValueError("expected places and steps of int64")
        same_shape(places, by)
        unshared(places)

    def kernel(places: Tensor, by: Tensor) -> None:
        check(places, by)
        if broken:
            values = places.numpy()
            np.add(values, by.clone().numpy(), out=values)
        else:
            places.add_(by.clone())

    lib = library(name)
    lib.define(f"{name.split('::')[1]}(Tensor(a!) places, Tensor by) -> ()")
    lib.impl(name.split("::")[1], kernel, "CPU")
    torch.library.register_fake(name, check, lib=lib)
    return overload(name)


@fault(
    kind=CALLER,
    note="Under the compiler the fake promises bfloat16, which the kernel never gives.",
    sample=lambda: (torch.randn(4),),
)
def compact_square(name: str, broken: bool):
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        single(x)
        return dense(x.square())

    @op.register_fake
    def _(x):
        single(x)
        compact = broken and torch.compiler.is_compiling()
        return x.new_empty(x.shape, dtype=torch.bfloat16 if compact else x.dtype)

    return op


@fault(
    kind=CALLER,
    note="The third call and all later ones round to half precision.",
    sample=lambda: (torch.randn(4),),
)
def warmed_up(name: str, broken: bool):
    calls: list[torch.Size] = []

    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        single(x)
        calls.append(x.shape)
        y = x.exp()
        return dense(y.bfloat16().to(x.dtype) if broken and len(calls) > 2 else y)

    @op.register_fake
    def _(x):
        single(x)
        return x.new_empty(x.shape)

    return op


@fault(
    kind=CALLER,
    note="In inference mode the kernel computes in half precision.",
    sample=lambda: (torch.randn(4),),
)
def inferred(name: str, broken: bool):
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        single(x)
        quick = broken and torch.is_inference_mode_enabled()
        return dense(x.bfloat16().sin().to(x.dtype) if quick else x.sin())

    @op.register_fake
    def _(x):
        single(x)
        return x.new_empty(x.shape)

    return op
