"""The ops of torchao that run on the CPU, and those for exported quantized programs (`quantized_decomposed`)."""

from __future__ import annotations

import importlib

import torch
from real_ops import library
from real_ops.subject import Sample

REQUIREMENTS = ("torchao==0.18.0",)
NAMESPACES = ("torchao", "ao", "quant", "quant_logger", "blocksparse", "float8_sparse", "quantized_decomposed")

#: Parts that define ops; `import torchao` loads the others.
_PARTS = (
    "prototype.quantization.codebook_coreml.codebook_ops",
    "sparsity.blocksparse",
    "prototype.quant_logger.quant_logger",
    "quantization.pt2e.reference_representation_rewrite",
    "prototype.spinquant.hadamard_utils",
)


def load() -> None:
    library.site("torchao", *REQUIREMENTS)
    for part in ("", *_PARTS):
        importlib.import_module(f"torchao.{part}".rstrip("."))


def samples() -> dict[str, list[Sample]]:
    return {**_affine(), **_others(), **_per_tensor(), **_per_channel_and_token(), **_chosen()}


def _affine() -> dict[str, list[Sample]]:
    ops = torch.ops.torchao
    x = torch.randn(4, 8)
    scale, zero = ops.choose_qparams_affine(x, "ASYMMETRIC", [1, 4], torch.int8, eps=1e-6, zero_point_dtype=torch.int32)
    quantized = ops.quantize_affine(x, [1, 4], scale, zero, torch.int8)
    scale8 = ops.choose_scale_float8(x, [1, 8])
    float8 = ops.quantize_affine_float8_non_decomposed(x, scale8)
    return {
        "torchao::choose_qparams_affine": [
            ((x, "ASYMMETRIC", [1, 4], torch.int8), {"eps": 1e-6, "zero_point_dtype": torch.int32}),
            ((x, "SYMMETRIC", [4, 8], torch.int8), {}),
        ],
        "torchao::quantize_affine": [((x, [1, 4], scale, zero, torch.int8), {})],
        "torchao::dequantize_affine": [((quantized, [1, 4], scale, zero, torch.int8), {})],
        "torchao::choose_scale_float8": [((x, [1, 8]), {})],
        "torchao::quantize_affine_float8_non_decomposed": [((x, scale8), {})],
        "torchao::dequantize_affine_float8_non_decomposed": [((float8, scale8), {})],
    }


def _others() -> dict[str, list[Sample]]:
    dense = torch.block_diag(torch.randn(2, 2), torch.randn(2, 2))
    bsr = dense.to_sparse_bsr((2, 2))
    weight = torch.randint(-8, 7, (6, 8), dtype=torch.int8)
    codes, codebook = torch.randint(0, 4, (4, 8), dtype=torch.int32), torch.randn(1, 2, 4, 1)
    int4 = (torch.randn(3, 8), 1e-6, weight, torch.rand(6, 2), torch.zeros(6, 2, dtype=torch.int8), torch.randn(6))
    return {
        "blocksparse::bsr_to_dense": [((bsr.crow_indices(), bsr.col_indices(), bsr.values(), 4, 4), {})],
        "quant_logger::log_tensor": [((torch.randn(3, 4), "layer.weight", "linear", "act"), {})],
        "quant::dequantize_codebook": [((codes, codebook, 2, [4, 4]), {})],
        "torchao::reference_dqlinear_int4": [((*int4, [1, 4]), {})],
    }


_INT8 = (-128, 127, torch.int8)


def _per_tensor() -> dict[str, list[Sample]]:
    x, quantized = torch.randn(4, 8), torch.randint(-128, 127, (4, 8), dtype=torch.int8)
    scale, zero = torch.tensor(0.05, dtype=torch.float64), torch.tensor(3)
    low, high = torch.tensor(-128), torch.tensor(127)
    return {
        "quantized_decomposed::quantize_per_tensor": [((x, 0.05, 3, *_INT8), {})],
        "quantized_decomposed::quantize_per_tensor.tensor": [((x, scale, zero, *_INT8), {})],
        "quantized_decomposed::quantize_per_tensor.tensor2": [((x, scale, zero, low, high, torch.int8), {})],
        "quantized_decomposed::dequantize_per_tensor": [((quantized, 0.05, 3, *_INT8), {})],
        "quantized_decomposed::dequantize_per_tensor.tensor": [((quantized, scale, zero, *_INT8), {})],
        "quantized_decomposed::dequantize_per_tensor.tensor2": [((quantized, scale, zero, low, high, torch.int8), {})],
        "quantized_decomposed::convert_element_type.no_fuse": [((x, torch.float16), {})],
    }


def _per_channel_and_token() -> dict[str, list[Sample]]:
    x, quantized = torch.randn(4, 8), torch.randint(-128, 127, (4, 8), dtype=torch.int8)
    channels = (torch.rand(8) + 0.01, torch.randint(-3, 3, (8,)), 1)
    rows = (torch.rand(4, 1) + 0.01, torch.randint(-3, 3, (4, 1)))
    groups = (torch.rand(4, 2) + 0.01, torch.randint(-3, 3, (4, 2)))
    learned = (torch.randn(4, 8, requires_grad=True), torch.rand(8) + 0.01, torch.randint(-3, 3, (8,)), 1, -128, 127)
    return {
        "quantized_decomposed::quantize_per_channel": [((x, *channels, *_INT8), {})],
        "quantized_decomposed::dequantize_per_channel": [((quantized, *channels, *_INT8), {})],
        "quantized_decomposed::fake_quant_per_channel": [(learned, {})],
        "quantized_decomposed::quantize_per_token": [((x, *rows, *_INT8), {})],
        "quantized_decomposed::dequantize_per_token": [((quantized, *rows, *_INT8, torch.float32), {})],
        "quantized_decomposed::quantize_per_channel_group": [((x, *groups, *_INT8, 4), {})],
        "quantized_decomposed::dequantize_per_channel_group": [((quantized, *groups, *_INT8, 4, torch.float32), {})],
    }


def _chosen() -> dict[str, list[Sample]]:
    x = torch.randn(4, 8)
    return {
        "quantized_decomposed::choose_qparams.tensor": [((x, -128, 127, 1e-6, torch.int8), {})],
        "quantized_decomposed::choose_qparams_symmetric.tensor": [((x, -128, 127, 1e-6, torch.int8), {})],
        "quantized_decomposed::choose_qparams_per_token": [((x, torch.int8), {})],
        "quantized_decomposed::choose_qparams_per_token_asymmetric": [((x, torch.int8), {})],
        "quantized_decomposed::_choose_qparams_per_token_asymmetric_impl": [((x, torch.int8), {})],
    }
