"""Calls and definitions of ops, beside the ways that torch offers.

    customops   customops.custom_op
    custom_op   torch.library.custom_op
    Library     torch.library.Library: define and impl by hand, without checks
    Function    torch.autograd.Function without an op, or for `eager` the Python function itself

The kernels do little, on tensors of four elements, so that the time is that of the way to the kernel and back.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from cases import Case, Fn, Statement, each, inference_tensors, tensors, with_gradient
from torch import Tensor
from torch.library import Library

import customops
from customops import Tag

# Kernels --------------------------------------------------------------------------------------------------------


def plus(x: Tensor, y: Tensor, by: float) -> Tensor:
    return x + y  # the number is passed and not used


def add_to(x: Tensor, y: Tensor) -> None:
    x.add_(y)


def add_(x: Tensor, y: Tensor) -> Tensor:
    return x.add_(y)


def add_out(x: Tensor, y: Tensor, *, out: Tensor) -> Tensor:
    return torch.add(x, y, out=out)


def plus_out(x: Tensor, y: Tensor, by: float, *, out: Tensor) -> Tensor:
    return torch.add(x, y, out=out)


def many(
    a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor, f: Tensor, g: Tensor, h: Tensor, i: Tensor, j: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return a.add(b), c.add(d), e.add(f)


def add_each(xs: list[Tensor], y: Tensor) -> list[Tensor]:
    return [x.add(y) for x in xs]


def with_defaults(x: Tensor, by: float = 1.0, n: int = 2, *, flag: bool = True, name: str = "name") -> Tensor:
    return x.mul(by)


def write(x: Tensor, y: Tensor) -> None:
    """Do nothing, as a kernel in another language does for torch."""


@dataclass(frozen=True)
class Kernel:
    """A kernel and its properties, from which each contender defines an op."""

    fn: Fn
    schema: str
    mutates: tuple[str, ...] = ()
    tags: tuple[torch.Tag, ...] = ()
    check: str = "always"


PLUS = Kernel(plus, "(Tensor x, Tensor y, float by) -> Tensor")
ADD_TO = Kernel(add_to, "(Tensor(a!) x, Tensor y) -> ()", ("x",))
ADD_ = Kernel(add_, "(Tensor(a!) x, Tensor y) -> Tensor(a!)", ("x",), (Tag.inplace,))
ADD_OUT = Kernel(add_out, "(Tensor x, Tensor y, *, Tensor(a!) out) -> Tensor(a!)", ("out",), (Tag.out,))
PLUS_OUT = Kernel(plus_out, "(Tensor x, Tensor y, float by, *, Tensor(a!) out) -> Tensor(a!)", ("out",), (Tag.out,))
MANY = Kernel(many, f"({', '.join(f'Tensor {name}' for name in 'abcdefghij')}) -> (Tensor, Tensor, Tensor)")
ADD_EACH = Kernel(add_each, "(Tensor[] xs, Tensor y) -> Tensor[]")
WITH_DEFAULTS = Kernel(
    with_defaults, '(Tensor x, float by=1.0, SymInt n=2, *, bool flag=True, str name="name") -> Tensor'
)
WRITE = Kernel(write, "(Tensor(a!) x, Tensor y) -> ()", ("x",))


# Definitions ----------------------------------------------------------------------------------------------------

NAMESPACES = {"customops": "bench_customops", "custom_op": "bench_custom_op", "Library": "bench_library"}
#: Keeps the libraries alive. The ops stay defined until the process ends.
LIBRARIES: list[Library] = []
NAMES = map("op_{}".format, itertools.count())


def define_ours(name: str, kernel: Kernel, **options: Any) -> Fn:
    options = {"tags": kernel.tags, "check": kernel.check, **options}
    return customops.custom_op(f"{NAMESPACES['customops']}::{name}", kernel.fn, mutates_args=kernel.mutates, **options)


def define_custom_op(name: str, kernel: Kernel) -> Fn:
    name = f"{NAMESPACES['custom_op']}::{name}"
    return torch.library.custom_op(name, kernel.fn, mutates_args=kernel.mutates, tags=kernel.tags)


def define_library(name: str, kernel: Kernel) -> Fn:
    library = Library(NAMESPACES["Library"], "FRAGMENT")
    library.define(name + kernel.schema, tags=kernel.tags)
    library.impl(name, kernel.fn, "CompositeExplicitAutograd")
    LIBRARIES.append(library)
    return getattr(getattr(torch.ops, NAMESPACES["Library"]), name).default


DEFINE: dict[str, Fn] = {"customops": define_ours, "custom_op": define_custom_op, "Library": define_library}


@cache
def defined(kernel: Kernel, name: str | None = None) -> dict[str, Any]:
    """Return the op of each contender with this kernel."""
    name = name or kernel.fn.__name__
    return {contender: define(name, kernel) for contender, define in DEFINE.items()}


@cache
def with_library(kernel: Kernel, **options: Any) -> dict[str, Fn]:
    """Return an op of customops with some options, and a bare op."""
    name = next(NAMES)
    return {"customops": define_ours(name, kernel, **options), "Library": define_library(name, kernel)}


def packets() -> dict[str, Fn]:
    """Return the ops with the kernel `plus` as `torch.ops` has them."""
    defined(PLUS)
    return {contender: getattr(torch.ops, namespace).plus for contender, namespace in NAMESPACES.items()}


# Gradients ------------------------------------------------------------------------------------------------------


def keep_factor(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
    ctx.by = inputs[2]


def plus_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    return grad, grad, None


class Plus(torch.autograd.Function):
    """The kernel and its gradient without an op. A separate setup_context would make `apply` much slower."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, by: float) -> Tensor:
        ctx.by = by
        return plus(x, y, by)

    backward = staticmethod(plus_backward)


class PlusOp(Plus):
    """The kernel at the Autograd key of the bare op."""

    op: Fn

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, by: float) -> Tensor:
        ctx.by = by
        with torch._C._AutoDispatchBelowAutograd():
            return PlusOp.op(x, y, by)


@cache
def differentiable() -> dict[str, Fn]:
    ops = defined(PLUS, "plus_with_gradient")
    for contender in ("customops", "custom_op"):
        ops[contender].register_autograd(plus_backward, setup_context=keep_factor)
    PlusOp.op = ops["Library"]
    LIBRARIES[-1].impl("plus_with_gradient", PlusOp.apply, "Autograd")
    return ops | {"Function": Plus.apply}


# Out variants ---------------------------------------------------------------------------------------------------


@cache
def with_out_variant() -> dict[str, Any]:
    """Return ops with a fake impl. The ops of customops and Library also have an out variant."""
    ops = defined(PLUS, "plus_with_out")
    for contender in ("customops", "custom_op"):
        ops[contender].register_fake(lambda x, y, by: torch.empty_like(x))
    ops["customops"].register_out(plus_out)
    library = LIBRARIES[-1]
    library._register_fake("plus_with_out", lambda x, y, by: torch.empty_like(x))
    library.define(f"plus_with_out.out{PLUS_OUT.schema}", tags=PLUS_OUT.tags)
    library.impl("plus_with_out.out", plus_out, "CompositeExplicitAutograd")
    return ops


def out_variants() -> dict[str, Fn]:
    return {
        "customops": with_out_variant()["customops"].out,
        "custom_op": define_custom_op("plus_out", PLUS_OUT),
        "Library": torch.ops.bench_library.plus_with_out.out,
    }


# Cases ----------------------------------------------------------------------------------------------------------


def eager(kernel: Kernel) -> dict[str, Fn]:
    return {**with_library(kernel, eager=True), "Function": kernel.fn}


def call(name: str, code: str, kernel: Kernel) -> Case:
    return Case(name, "calls", each(code, lambda: defined(kernel)))


def definition(name: str, code: str, **options: Any) -> Case:
    return Case(
        name,
        "definitions",
        lambda: {contender: Statement(code, define) for contender, define in DEFINE.items()},
        inputs=lambda: tensors() | {"names": NAMES, "kernel": PLUS},
        runs=1,
        **options,
    )


def cases() -> list[Case]:
    forward, backward = "f(x, y, 2.0)", "grad(f(x, y, 2.0), x, grad_out)"
    inference: dict[str, Any] = {"context": torch.inference_mode, "inputs": inference_tensors}
    return [
        call("no gradient", forward, PLUS),
        Case("no gradient, torch.ops", "calls", each(forward, packets)),
        Case("inference mode", "calls", each(forward, lambda: defined(PLUS)), **inference),
        Case("forward", "calls", each(forward, differentiable), inputs=with_gradient),
        Case("forward and backward", "calls", each(backward, differentiable), inputs=with_gradient),
        call("mutates, returns None", "f(x, y)", ADD_TO),
        call("in-place", "f(x, y)", ADD_),
        call("out=", "f(x, y, out=out)", ADD_OUT),
        Case("out variant", "calls", each("f(x, y, 2.0, out=out)", out_variants)),
        call("10 inputs, 3 outputs", "f(x, y, x, y, x, y, x, y, x, y)", MANY),
        call("lists of tensors", "f([x, y, x, y], y)", ADD_EACH),
        call("defaults, by keyword", "f(x, 2.0, flag=False)", WITH_DEFAULTS),
        Case("one number, eager", "calls", each(forward, lambda: eager(PLUS)), context=torch.no_grad),
        Case("mutates, eager", "calls", each("f(x, y)", lambda: eager(WRITE)), context=torch.no_grad),
        definition("defining an op", "f(next(names), kernel)", then="(x, y, 2.0)"),
        definition("defining and calling", "f(next(names), kernel)(x, y, 2.0)"),
    ]
