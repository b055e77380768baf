"""Differentiable ops of every shape, made with customops or with torch.library, and what each of them computes.

An op is defined by a function that takes a `Maker`, and returns a `Program`: a function of tensors that calls the op,
and the same one in plain torch operations, whose derivatives are torch's own. Kernels are plain torch, too; autograd
does not look into them, and the formulas are written by hand.
"""

from __future__ import annotations

from collections.abc import Callable

from products.gradient_ops.arguments import (
    broadcast,
    complex_numbers,
    four,
    index,
    keyword,
    keyword_list,
    keyword_optional,
    keyword_scalar,
    linear,
    list_with_none,
    one,
    optional,
    scalars,
    tensor_list,
    two,
    two_lists,
)
from products.gradient_ops.maker import Maker as Maker
from products.gradient_ops.maker import MakerFromFunctions as MakerFromFunctions
from products.gradient_ops.maker import Program as Program
from products.gradient_ops.maker import TorchMaker as TorchMaker
from products.gradient_ops.mutated import (
    accumulate,
    buffer,
    buffers,
    cache,
    counter,
    everything,
    in_place,
    in_place_original,
    keyword_buffer,
)
from products.gradient_ops.results import (
    flags,
    four_results,
    list_and_tensor,
    list_result,
    mixed_results,
    nondiff_args,
    not_differentiable,
    two_results,
    view,
)

SHAPES: list[Callable[[Maker], Program]] = [
    one,
    two,
    four,
    scalars,
    broadcast,
    complex_numbers,
    index,
    tensor_list,
    two_lists,
    optional,
    list_with_none,
    keyword,
    keyword_list,
    keyword_optional,
    keyword_scalar,
    linear,
    two_results,
    four_results,
    list_result,
    mixed_results,
    list_and_tensor,
    view,
    nondiff_args,
    not_differentiable,
    flags,
    counter,
    cache,
    in_place,
    in_place_original,
    buffer,
    accumulate,
    buffers,
    keyword_buffer,
    everything,
]
