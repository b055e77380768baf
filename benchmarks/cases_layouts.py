"""Layouts of arguments in differentiated calls, beside an op with positional tensors.

Each layout adds two tensors of four elements, as the op `(Tensor x, Tensor y) -> Tensor` does:

    list           (Tensor[] xs) -> Tensor
    list and x     (Tensor[] xs, Tensor y) -> Tensor
    optional list  (Tensor x, Tensor[]? ys) -> Tensor
    keyword-only   (Tensor x, *, Tensor y) -> Tensor
    returns list   (Tensor[] xs) -> Tensor[]      beside  (Tensor x, Tensor y) -> (Tensor, Tensor)
    in-place       (Tensor(a!) x, Tensor y) -> Tensor(a!), with a new tensor for x in each call
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from cases import Case, Contenders, Fn, Statement
from torch import Tensor

import customops
from customops import Tag


def positional(x: Tensor, y: Tensor) -> Tensor:
    return x + y


def with_list(xs: list[Tensor]) -> Tensor:
    return xs[0] + xs[1]


def with_list_and_tensor(xs: list[Tensor], y: Tensor) -> Tensor:
    return xs[0] + y


def with_optional_list(x: Tensor, ys: list[Tensor] | None) -> Tensor:
    return x if ys is None else x + ys[0]


def with_keyword(x: Tensor, *, y: Tensor) -> Tensor:
    return x + y


def two(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x + y, x - y


def list_of_two(xs: list[Tensor]) -> list[Tensor]:
    return [xs[0] + xs[1], xs[0] - xs[1]]


def add_(x: Tensor, y: Tensor) -> Tensor:
    return x.add_(y)


#: Function of an op -> its backward.
BACKWARD: dict[Fn, Fn] = {
    positional: lambda ctx, grad: (grad, grad),
    with_list: lambda ctx, grad: ([grad, grad],),
    with_list_and_tensor: lambda ctx, grad: ([grad], grad),
    with_optional_list: lambda ctx, grad: (grad, [grad]),
    with_keyword: lambda ctx, grad: (grad, grad),
    two: lambda ctx, a, b: (a, b),
    list_of_two: lambda ctx, grads: (grads,),
    add_: lambda ctx, grad: (grad, grad),
}

#: Name of a layout -> its statement and function, those of the op beside it, and the limit of the ratio.
LAYOUTS: dict[str, tuple[str, Fn, str, Fn, float | None]] = {
    "list": ("f([x, y])", with_list, "f(x, y)", positional, 1.5),
    "list and x": ("f([x], y)", with_list_and_tensor, "f(x, y)", positional, 1.5),
    "optional list": ("f(x, [y])", with_optional_list, "f(x, y)", positional, 1.5),
    "keyword-only": ("f(x, y=y)", with_keyword, "f(x, y)", positional, 1.5),
    "returns list": ("f([x, y])[0]", list_of_two, "f(x, y)[0]", two, 1.5),
    "in-place": ("f(x.detach().clone(), y)", add_, "f(x.detach().clone(), y)", positional, None),
}


@cache
def define(fn: Fn) -> Fn:
    options: dict[str, Any] = {"mutates_args": ("x",), "tags": Tag.inplace} if fn is add_ else {"mutates_args": ()}
    op = customops.custom_op(f"bench_layouts::{fn.__name__}", fn, **options)
    op.register_autograd(BACKWARD[fn])
    return op


def inputs() -> dict[str, Any]:
    x, y = torch.ones(4, requires_grad=True), torch.arange(4.0, requires_grad=True)
    return {"x": x, "y": y, "grad_out": torch.ones(4), "grad": torch.autograd.grad}


def contenders(layout: str, form: str) -> Contenders:
    code, fn, plain_code, plain, _ = LAYOUTS[layout]
    return {
        "layout": Statement(form.format(code), define(fn)),
        "positional": Statement(form.format(plain_code), define(plain)),
    }


def cases() -> list[Case]:
    forms = {"forward": "{}", "forward and backward": "grad({}, y, grad_out)"}
    return [
        Case(
            f"{layout}: {name}",
            "layouts",
            lambda layout=layout, form=form: contenders(layout, form),
            inputs=inputs,
            rounds=100,
            runs=100,
            limit=limit,
        )
        for layout, (*_, limit) in LAYOUTS.items()
        for name, form in forms.items()
    ]
