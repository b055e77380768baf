"""FBGEMM's helpers: rules for ops that are defined elsewhere, mostly in C++, each of them once.

FBGEMM asks private functions of torch whether an op has a kernel at a key, a fake or a gradient, before it registers
one, and guards the whole with a flag, since registering twice raises. Here `define` and `impl` take
``on_conflict="skip"``, and registering a gradient again replaces it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from customops import adopt, define, helper, impl
from customops.errors import CallbackError, RegistrationError

Fn = Callable[..., Any]


@helper
def impl_abstract(op_name: str, fn: Fn) -> None:
    """Give an op its fake, unless it has one, or needs none because it is made of torch's ops."""
    op = adopt(op_name)
    try:
        op.register_fake(fn, allow_override=False)
    except CallbackError:
        raise
    except RegistrationError:
        pass  # what was there stays


@helper
def impl_autograd(op_name: str, fn: Fn, setup_context: Fn | None = None) -> None:
    """Give an op its gradient."""
    adopt(op_name).register_autograd(fn, setup_context=setup_context)


@helper
def op_registeration(lib: Library, op_name: str, fn: Fn, dispatch_key: str) -> None:
    """Register a kernel at a dispatch key that has none."""
    if dispatch_key == "Meta":
        impl_abstract(f"{lib.ns}::{op_name}", fn)
    else:
        impl(f"{lib.ns}::{op_name}", dispatch_key, fn, lib=lib, on_conflict="skip")


# Ops of the kinds that FBGEMM has: jagged tensors, a table of kernels by dispatch key, sizes that depend on data ------


lib = Library("examples_fbgemm", "FRAGMENT")


def dense_to_jagged(dense: Tensor, lengths: Tensor) -> Tensor:
    return torch.cat([row[:n] for row, n in zip(dense, lengths.tolist(), strict=True)])


def dense_to_jagged_abstract(dense: Tensor, lengths: Tensor) -> Tensor:
    return dense.new_empty((torch.library.get_ctx().new_dynamic_size(), *dense.shape[2:]))


def permute_1d(permute: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    torch._check(permute.dtype == torch.int64 and permute.dim() == 1, lambda: "permute must be a list of int64")
    return lengths[permute], permute.argsort()


def permute_1d_abstract(permute: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(lengths), torch.empty_like(permute)


def keep_inverse(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])


def permute_1d_backward(ctx: Any, gradient: Tensor, _: None) -> tuple[None, Tensor]:
    (inverse,) = ctx.saved_tensors
    return None, gradient[inverse]


OPS: dict[str, tuple[str, dict[str, Fn]]] = {
    "dense_to_jagged": (
        "(Tensor dense, Tensor lengths) -> Tensor",
        {"CPU": dense_to_jagged, "CUDA": dense_to_jagged, "Meta": dense_to_jagged_abstract},
    ),
    "permute_1d": (
        "(Tensor permute, Tensor lengths) -> (Tensor, Tensor)",
        {"CPU": permute_1d, "CUDA": permute_1d, "Meta": permute_1d_abstract},
    ),
}


def setup() -> None:
    """May run as often as it likes."""
    for name, (schema, kernels) in OPS.items():
        define(f"examples_fbgemm::{name}", schema, on_conflict="skip")
        for dispatch_key, fn in kernels.items():
            op_registeration(lib, name, fn, dispatch_key)
    impl_autograd("examples_fbgemm::permute_1d", permute_1d_backward, setup_context=keep_inverse)


setup()


@adopt("examples_fbgemm::dense_to_jagged").register_samples
def _() -> Iterator[tuple[Tensor, Tensor]]:
    yield torch.randn(3, 4, 2), torch.tensor([2, 4, 1])


@adopt("examples_fbgemm::permute_1d").register_samples(fixed=("permute", "lengths.size"))
def _() -> Iterator[tuple[Tensor, Tensor]]:
    yield torch.tensor([2, 0, 1]), torch.randn(3, requires_grad=True)


def main() -> None:
    setup()
    print(torch.ops.examples_fbgemm.dense_to_jagged(torch.arange(6.0).view(2, 3), torch.tensor([1, 2])))
    lengths = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    permuted, _ = torch.ops.examples_fbgemm.permute_1d(torch.tensor([2, 0, 1]), lengths)
    permuted[0].backward()
    print("gradient:", lengths.grad)


if __name__ == "__main__":
    main()
