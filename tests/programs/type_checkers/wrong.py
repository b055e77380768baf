"""Wrong code: each line with an ignore is an error for mypy and pyright, and one without an error has no ignore."""

from __future__ import annotations

from typing import Any

import torch
from defined import add_, configured, make, maybe, moments, named, out, pair, parts, several, size, text, three, write
from torch import Tensor

import customops
from customops import custom_op

one = torch.ones(2)

# Calls.
three(one)  # type: ignore[call-arg]
three(one, "y")  # type: ignore[arg-type]
three(one, one, factor=2.0)  # type: ignore[call-arg]
add_(one, 3)  # type: ignore[arg-type]
write("x", 3.0)  # type: ignore[arg-type]
named(one, 2, 3)  # type: ignore[call-arg]
out(one)  # type: ignore[call-arg]
configured(one, {"scale": one})  # type: ignore[arg-type]
add_(one, one).no_such_method()  # type: ignore[attr-defined]
three.lower(one)  # type: ignore[call-arg]
custom_op("typing::f", 3)  # type: ignore[call-overload]
custom_op("typing::f", mutates=())  # type: ignore[call-overload]


# Results of fakes and kernels.
@three.register_fake  # type: ignore[arg-type]
def returns_text(x: Tensor, y: Tensor, by: float) -> str:
    return ""


@three.register_fake  # type: ignore[arg-type]
def returns_nothing(x: Tensor, y: Tensor, by: float) -> None: ...


@three.register_fake  # type: ignore[arg-type]
def returns_two_at_once(x: Tensor, y: Tensor, by: float) -> tuple[Tensor, Tensor]:
    return x, y


@three.register_fake()  # type: ignore[arg-type]
def returns_two(x: Tensor, y: Tensor, by: float) -> tuple[Tensor, Tensor]:
    return x, y


@three.register_fake  # type: ignore[arg-type]
def returns_one_or_none(x: Tensor, y: Tensor, by: float) -> Tensor | None:
    return x


@pair.register_kernel("cuda")  # type: ignore[arg-type]
def returns_one(x: Tensor, y: Tensor) -> Tensor:
    return x


@several.register_fake  # type: ignore[arg-type]
def returns_no_list(x: Tensor) -> Tensor:
    return x


@size.register_fake  # type: ignore[arg-type]
def returns_no_number(x: Tensor) -> Tensor:
    return x


@write.register_kernel("cuda")  # type: ignore[arg-type]
def returns_something(x: Tensor, value: float) -> Tensor:
    return x


@maybe.register_fake  # type: ignore[arg-type]
def returns_text_too(x: Tensor, wanted: bool) -> str:
    return ""


@text.register_fake  # type: ignore[arg-type]
def returns_bytes(x: Tensor) -> bytes:
    return b""


@moments.register_fake  # type: ignore[arg-type]
def returns_no_moments(x: Tensor) -> Tensor:
    return x


@parts.register_fake  # type: ignore[arg-type]
def returns_no_parts(x: Tensor) -> Tensor:
    return x


@configured.register_fake  # type: ignore[arg-type]
def returns_no_config(x: Tensor, config: Any) -> Tensor:
    return x


three.register_fake(lambda x, y, by: "text")  # type: ignore[arg-type, return-value]
three.register_kernel("cuda", lambda x, y, by: None)  # type: ignore[arg-type, return-value]
pair.register_fake(lambda x, y: torch.empty_like(x))  # type: ignore[arg-type, return-value]


# Parameters of fakes and kernels.
@three.register_fake  # type: ignore[arg-type]
def takes_nothing() -> Tensor:
    return one


@pair.register_kernel("cuda")  # type: ignore[arg-type]
def takes_nothing_either() -> tuple[Tensor, Tensor]:
    return one, one


@text.register_fake  # type: ignore[arg-type]
def takes_nothing_at_all() -> str:
    return ""


three.register_fake(lambda: one)  # type: ignore[arg-type, misc]
three.register_fake(3)  # type: ignore[call-overload]
make.register_fake(lambda n, device: "text")  # type: ignore[arg-type, return-value]


# Gradients.
@three.register_autograd  # type: ignore[call-overload]
def takes_no_gradient(ctx: Any) -> Tensor:
    return one


@three.register_autograd(nondiff_args="y")  # type: ignore[type-var]
def takes_no_context() -> Tensor:
    return one


def other_names(context: Any, inputs: Any, output: Any) -> None: ...
def no_output(ctx: Any, inputs: Any) -> None: ...
def other_output(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None: ...


three.register_autograd(lambda ctx, grad: grad, setup_context=other_names)  # type: ignore[call-overload]
three.register_autograd(lambda ctx, grad: grad, setup_context=no_output)  # type: ignore[call-overload]
three.register_autograd(lambda ctx, grad: grad, setup_context=other_output)  # type: ignore[call-overload]
three.register_autograd(lambda ctx, grad: grad, setup_context=lambda ctx: None)  # type: ignore[call-overload]
three.register_autograd(lambda ctx, grad: grad, nondiff=())  # type: ignore[call-overload]
three.register_autograd(backward=lambda ctx, grad: grad)  # type: ignore[call-overload]
three.register_jvp(lambda ctx: one)  # type: ignore[call-overload]
three.register_jvp(lambda ctx, x: x, setup_context=other_names)  # type: ignore[call-overload]
three.register_reference(lambda x, y, by: x, gives="gradient")  # type: ignore[arg-type]


# vmap, samples, modes.
@three.register_vmap  # type: ignore[call-overload]
def without_dims(info: Any, in_dims: Any, x: Tensor, y: Tensor, by: float) -> Tensor:
    return x


three.register_vmap("sequentially")  # type: ignore[call-overload]
three.register_vmap(lambda x: (x, 0))  # type: ignore[call-overload]
three.register_vmap(lambda info, in_dims, x, y, by: three(x, y, by))  # type: ignore[call-overload]


@three.register_samples  # type: ignore[type-var]
def takes_something(n: int) -> list[tuple[Any, ...]]:
    return []


@three.register_samples  # type: ignore[type-var]
def yields_tensors() -> list[Tensor]:
    return [one]


three.register_torch_dispatch(Tensor, lambda mode, func: func)  # type: ignore[type-var]

# The function forms.
customops.register_fake("aten::sin", 3)  # type: ignore[call-overload]
customops.register_autograd("aten::sin", lambda ctx: None)  # type: ignore[arg-type]
customops.register_vmap("aten::sin", "sequentially")  # type: ignore[call-overload]
