"""torchao's helpers: functions that export keeps whole and inductor takes apart, and names for two functions of torch.

`_register_custom_op` defines an op with a kernel that autograd traces through, and puts the same function into
inductor's table of decompositions. `_register_meta_op` adds a meta kernel; `register_custom_op` is `register_fake`
under another name, and `register_custom_op_impl` is `custom_op` for functions that write nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from customops import adopt, custom_op, define, helper, impl, infer_schema, register_fake

Fn = Callable[..., Any]


@helper
def _register_custom_op(lib: Library, inductor_decomposed: bool = True) -> Callable[[Fn], Any]:
    """A decorator for a function ``_name`` of torch's ops, which returns ``torch.ops.<namespace>.<name>``.

    With `inductor_decomposed` gradients flow through the function, and inductor sees what it is made of.
    """

    def decorator(fn: Fn) -> Any:
        name = fn.__name__.removeprefix("_")
        qualname = f"{lib.ns}::{name}"
        if inductor_decomposed:
            define(qualname, infer_schema(fn, mutates_args=()), lib=lib)
            impl(qualname, "CompositeImplicitAutograd", fn, lib=lib)
            adopt(qualname).register_decomposition(fn, lib=lib)
        else:
            custom_op(qualname, fn, mutates_args=(), lib=lib, on_conflict="error")
        return getattr(getattr(torch.ops, lib.ns), name)

    return decorator


@helper
def _register_meta_op(lib: Library, op_name: str) -> Callable[[Fn], Fn]:
    """A decorator for the fake of an op of the library."""
    return register_fake(f"{lib.ns}::{op_name}", lib=lib)


#: A decorator for the fake of an op, by its name.
register_custom_op = register_fake

#: A decorator that defines an op that writes nothing.
register_custom_op_impl = functools.partial(custom_op, mutates_args=())


# Ops of the kinds that torchao has ------------------------------------------------------------------------------------


lib = Library("examples_torchao", "FRAGMENT")


@_register_custom_op(lib)
def _choose_scale(x: Tensor, bits: int = 8) -> Tensor:
    return x.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)


@_register_custom_op(lib, False)
def _quantize_affine(x: Tensor, scale: Tensor) -> Tensor:
    torch._check(scale.shape == (*x.shape[:-1], 1), lambda: "scale must have a number for each row of x")
    return torch.clamp(torch.round(x / scale), -128, 127).to(torch.int8)


@_register_meta_op(lib, "quantize_affine")
def _(x: Tensor, scale: Tensor) -> Tensor:
    return torch.empty_like(x, dtype=torch.int8)


@register_custom_op_impl("examples_torchao::dequantize")
def dequantize(x: Tensor, scale: Tensor) -> Tensor:
    torch._check(scale.shape == (*x.shape[:-1], 1), lambda: "scale must have a number for each row of x")
    return x.to(scale.dtype) * scale


@register_custom_op("examples_torchao::dequantize")
def _(x: Tensor, scale: Tensor) -> Tensor:
    return torch.empty_like(x, dtype=scale.dtype)


@dequantize.register_samples
def _() -> Iterator[tuple[Tensor, Tensor]]:
    yield torch.randint(-128, 128, (3, 4)).to(torch.int8), torch.rand(3, 1)


@adopt("examples_torchao::quantize_affine").register_samples
def _() -> Iterator[tuple[Tensor, Tensor]]:
    yield torch.randn(3, 4), torch.rand(3, 1) + 0.5


def main() -> None:
    x = torch.tensor([[1.0, -2.0]])
    scale = torch.ops.examples_torchao.choose_scale(x)
    print("and back:", dequantize(torch.ops.examples_torchao.quantize_affine(x, scale), scale))


if __name__ == "__main__":
    main()
