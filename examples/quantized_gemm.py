"""A linear layer whose weight is quantized, as libraries for large models have it.

Shows enums, and a frozen dataclass for what belongs together: the kind of quantization, the size of its blocks, and the
scales. Its tensors have gradients as all arguments do, in both modes.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from customops import custom_op
from customops.errors import ArgumentError


class Kind(enum.Enum):
    INT8 = "int8"
    FP8 = "float8_e4m3fn"
    INT4 = "int4"  # two in a uint8, the first in the lower bits


class Activation(enum.Enum):
    NONE = "none"
    RELU = "relu"
    SILU = "silu"


@dataclass(frozen=True)
class Quantization:
    """The weight is ``(values - zeros) * scales``, with a scale and a zero for each block."""

    scales: Tensor  # (rows / block[0], columns / block[1])
    kind: Kind = Kind.INT8
    block: tuple[int, int] = (1, 32)
    zeros: Tensor | None = None  # as scales


@custom_op("examples::quantized_linear")
def quantized_linear(
    x: Tensor,
    weight: Tensor,
    quant: Quantization,
    bias: Tensor | None = None,
    activation: Activation = Activation.NONE,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    # A real one would launch a single kernel here. Like that, this one scales the sums of each block, not the weight.
    blocks = quant.scales.shape
    torch._check(x.shape[-1] == blocks[1] * quant.block[1], lambda: "x needs columns for each of the scales")
    torch._check(quant.zeros is None or quant.zeros.shape == blocks, lambda: "zeros need the shape of scales")
    (height, width), total = quant.block, x.new_zeros(*x.shape[:-1], weight.shape[0])
    values = unpacked(weight, quant.kind, x.dtype)
    torch._check(x.shape[-1] == values.shape[-1], lambda: "x needs a column for each of the weight")
    for j in range(quant.scales.shape[1]):
        columns = slice(j * width, (j + 1) * width)
        zero = 0 if quant.zeros is None else quant.zeros[:, j].repeat_interleave(height).unsqueeze(-1)
        total += x[..., columns] @ (values[:, columns] - zero).t() * quant.scales[:, j].repeat_interleave(height)
    return activate(total if bias is None else total + bias, activation).to(out_dtype or x.dtype)


@quantized_linear.register_reference
def _(x: Tensor, weight: Tensor, quant: Quantization, bias: Any, activation: Activation, *, out_dtype: Any) -> Tensor:
    """The same in torch's operations, from which fake impl, gradients in both modes and more follow."""
    return activate(F.linear(x, dequantized(weight, quant), bias), activation).to(out_dtype or x.dtype).contiguous()


def dequantized(weight: Tensor, quant: Quantization) -> Tensor:
    values, ones = unpacked(weight, quant.kind, quant.scales.dtype), quant.scales.new_ones(quant.block)
    scales, zeros = (x if x is None else torch.kron(x.contiguous(), ones) for x in (quant.scales, quant.zeros))
    return (values - (0 if zeros is None else zeros)) * scales


def unpacked(weight: Tensor, kind: Kind, dtype: torch.dtype) -> Tensor:
    if kind is Kind.INT4:
        weight = torch.stack([weight & 15, weight >> 4], -1).flatten(-2)
    return weight.to(dtype)


def activate(x: Tensor, activation: Activation) -> Tensor:
    return {Activation.NONE: lambda x: x, Activation.RELU: F.relu, Activation.SILU: F.silu}[activation](x)


def inputs(kind: Kind = Kind.INT8, block: tuple[int, int] = (1, 32)) -> tuple[Tensor, Tensor, Quantization]:
    x = torch.rand(2, 5, 64, dtype=torch.float64, requires_grad=True)
    scales, zeros = (torch.rand(4 // block[0], 64 // block[1], dtype=x.dtype, requires_grad=True) for _ in range(2))
    if kind is Kind.INT4:
        return x, torch.randint(256, (4, 32), dtype=torch.uint8), Quantization(scales, kind, block, zeros)
    return x, torch.randint(-9, 10, (4, 64)).to(getattr(torch, kind.value)), Quantization(scales, kind, block)


@quantized_linear.register_samples
def _() -> Iterator[Any]:
    yield (*inputs(), torch.rand(4, dtype=torch.float64, requires_grad=True), Activation.SILU)
    yield inputs(Kind.INT4, (2, 16)), {"activation": Activation.RELU, "out_dtype": torch.float32}


def main() -> None:
    print("schema:", quantized_linear.schema)
    for x, weight, quant in (inputs(), inputs(Kind.FP8), inputs(Kind.INT4, (2, 16))):
        y, expected = quantized_linear(x, weight, quant), F.linear(x, dequantized(weight, quant))
        compiled = torch.compile(quantized_linear, fullgraph=True)(x, weight, quant)
        torch.testing.assert_close((y, compiled), (expected, expected))
        leaves = [leaf for leaf in (x, quant.scales, quant.zeros) if leaf is not None]
        torch.testing.assert_close(*(torch.autograd.grad(each.square().sum(), leaves) for each in (y, expected)))
        print(f"{quant.kind}, {quant.block}: as with the dequantized weight, compiled too, and so are the gradients")
    try:
        quantized_linear(x, weight, quant, activation="relu")  # type: ignore[arg-type]  # refused there, too
    except ArgumentError as error:
        print(error)


if __name__ == "__main__":
    main()
