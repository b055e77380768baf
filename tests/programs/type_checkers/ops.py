"""What type checkers see of an op. `make typecheck` runs mypy over this file; an unused ignore is an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import assert_type

import customops
from customops import CustomOpDef, custom_op


@custom_op("typing::scale", mutates_args=())
def scale(x: Tensor, by: float = 2.0, *, times: int = 1) -> Tensor:
    return x * by * times


def split(x: Tensor, at: int) -> tuple[Tensor, Tensor]:
    return x[:at].clone(), x[at:].clone()


# The original parameters and return type are those of the call.
assert_type(scale(torch.ones(2), 3.0, times=2), Tensor)
scale("x")  # type: ignore[arg-type]
scale(torch.ones(2), by="x")  # type: ignore[arg-type]
scale(torch.ones(2), twice=2)  # type: ignore[call-arg]
scale()  # type: ignore[call-arg]

direct = custom_op("typing::split", split, mutates_args=())
assert_type(direct(torch.ones(4), 2), tuple[Tensor, Tensor])
as_def: CustomOpDef[[Tensor, int], tuple[Tensor, Tensor]] = direct


# Decorators return the user's function.
@scale.register_kernel("cuda")
def scale_cuda(x: Tensor, by: float, *, times: int) -> Tensor:
    return x


assert_type(scale_cuda(torch.ones(2), 1.0, times=1), Tensor)


@scale.register_fake
def scale_fake(x: Tensor, by: float, *, times: int) -> Tensor:
    return torch.empty_like(x)


assert_type(scale_fake(torch.ones(2), 1.0, times=1), Tensor)


@scale.register_samples
def scale_samples() -> list[tuple[Tensor]]:
    return [(torch.ones(2),)]


assert_type(scale_samples(), list[tuple[Tensor]])

scale.register_autograd(lambda ctx, grad: (grad, None))
scale.register_autograd(backward=lambda ctx, grad: grad)  # type: ignore[call-overload]
scale.register_autocast("cpu", torch.bfloat16)
scale.register_autocast("cpu", "bfloat16")  # type: ignore[arg-type]

with scale.set_kernel_enabled("cuda", False):
    pass

custom_op("typing::f", split, mutates_args=(), on_conflict="ignore")  # type: ignore[call-overload]

# Function forms and adoption.
assert_type(customops.adopt("aten::sin"), CustomOpDef[Any, Any])
assert_type(customops.infer_schema(split, mutates_args=()), str)
registry = customops.Registry()
decorator: Callable[[Callable[[Tensor], Tensor]], CustomOpDef[[Tensor], Tensor]]
decorator = registry.custom_op("typing::g", mutates_args=())

customops.define("typing::h", "(Tensor x) -> Tensor", tags=torch.Tag.pointwise)
assert_type(customops.impl("typing::h", ["cpu", "cuda"], split)(torch.ones(2), 1), tuple[Tensor, Tensor])
customops.impl("typing::h", 3, split)  # type: ignore[call-overload]
