"""A function of TVM-FFI as the kernel of an op: what TVM, TileLang or CuteDSL compile to is called in the same way.

Here the function is written in Python, which gets what a compiled one does: DLPack tensors, to write the result to.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import tvm_ffi
from torch import Tensor

from customops import custom_op
from customops.languages import from_tvm_ffi


def add_into(x: Any, y: Any, out: Any) -> None:
    np.add(np.from_dlpack(x), np.from_dlpack(y), out=np.from_dlpack(out))


add_kernel = from_tvm_ffi(tvm_ffi.convert(add_into))  # of a library: tvm_ffi.load_module("add.so").add


@custom_op("examples::tvm_ffi_add", mutates_args=(), device_types="cpu")
def add(x: Tensor, y: Tensor) -> Tensor:
    out = torch.empty_like(x)
    add_kernel(x, y, out)
    return out


@add.register_fake
def _(x: Tensor, y: Tensor) -> Tensor:
    return torch.empty_like(x)


@add.register_autograd
def _(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    return grad, grad


@add.register_samples(constraints=lambda x, y: x.shape == y.shape and x.dtype == y.dtype)
def _() -> Iterator[tuple[Tensor, Tensor]]:
    yield torch.randn(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    yield torch.randn(4, 3).t(), torch.randn(6, 8)[::2, ::2]


def main() -> None:
    x, y = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4)
    for fn in (add, torch.compile(add, fullgraph=True)):
        torch.testing.assert_close(fn(x, y), x + y)
    add(x, y).sum().backward()
    print("x + y and its gradient, by a function of TVM-FFI:", x.grad.unique().tolist())


if __name__ == "__main__":
    main()
