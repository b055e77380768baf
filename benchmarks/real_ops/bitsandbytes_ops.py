"""The ops of bitsandbytes, on small versions of the inputs of its tests (`tests/test_ops.py`)."""

from __future__ import annotations

import torch
from real_ops import library
from real_ops.subject import Sample

REQUIREMENTS = ("bitsandbytes==0.50.2",)
NAMESPACES = ("bitsandbytes",)


def load() -> None:
    library.site("bitsandbytes", *REQUIREMENTS)
    import bitsandbytes  # noqa: F401, PLC0415


def samples() -> dict[str, list[Sample]]:
    return {**_int8(), **_blockwise(), **_four_bits(), **_optimizers()}


def _int8() -> dict[str, list[Sample]]:
    ops = torch.ops.bitsandbytes
    a, b = (torch.randint(-128, 127, size, dtype=torch.int8) for size in ((10, 20), (30, 20)))
    rows, columns = torch.rand(10), torch.rand(30)
    product = ops.int8_linear_matmul(a, b)
    activations = torch.randn(10, 20, dtype=torch.float16)
    activations[0, 3] = activations[4, 7] = 7.0
    quantized, row_stats, outliers = ops.int8_vectorwise_quant(activations.clone(), 6.0)
    weights, weight_stats, _ = ops.int8_vectorwise_quant(torch.randn(30, 20, dtype=torch.float16))
    bias = torch.randn(30, dtype=torch.float16)
    return {
        "bitsandbytes::int8_linear_matmul": [((a, b), {})],
        "bitsandbytes::int8_linear_matmul.out": [((a, b, torch.empty(10, 30, dtype=torch.int32)), {})],
        "bitsandbytes::int8_mm_dequant": [
            ((product, rows, columns), {}),
            ((product, rows, columns), {"dtype": torch.float32, "bias": bias.float()}),
        ],
        "bitsandbytes::int8_scaled_mm": [((a, b, rows, columns), {"bias": bias, "dtype": torch.float16})],
        "bitsandbytes::int8_vectorwise_dequant": [((a, rows), {})],
        "bitsandbytes::int8_vectorwise_quant": [((activations, 0.0), {}), ((activations, 6.0), {})],
        "bitsandbytes::int8_mixed_scaled_mm": [
            ((activations, quantized, weights, row_stats, weight_stats, outliers, bias), {}),
        ],
    }


def _blockwise() -> dict[str, list[Sample]]:
    import bitsandbytes.functional as functional  # noqa: PLC0415

    ops = torch.ops.bitsandbytes
    code, a = functional.create_dynamic_map(), torch.randn(8, 64)
    quantized, absmax = ops.quantize_blockwise(a, code, 64)
    return {
        "bitsandbytes::quantize_blockwise": [((a, code, 64), {}), ((a[:, :33].clone(), code, 64), {})],
        "bitsandbytes::dequantize_blockwise": [((quantized, absmax, code, 64, torch.float32), {})],
    }


def _four_bits() -> dict[str, list[Sample]]:
    import bitsandbytes.functional as functional  # noqa: PLC0415

    ops = torch.ops.bitsandbytes
    weight, a = torch.randn(16, 64), torch.randn(1, 64)
    found: dict[str, list[Sample]] = {}
    for kind in ("nf4", "fp4"):
        quantized, absmax = ops.quantize_4bit(weight, 64, kind, torch.uint8)
        code = functional.get_4bit_type(kind, device="cpu")
        calls = {
            "quantize_4bit": (weight, 64, kind, torch.uint8),
            "dequantize_4bit": (quantized, absmax, 64, kind, [16, 64], torch.float32),
            "gemv_4bit": (a, quantized, [16, 64], absmax, code, 64),
            "gemm_4bit": (torch.randn(3, 64), quantized, [16, 64], absmax, 64, kind, torch.randn(16)),
        }
        for name, args in calls.items():
            found.setdefault(f"bitsandbytes::{name}", []).append((args, {}))
    return found


def _optimizers() -> dict[str, list[Sample]]:
    import bitsandbytes.functional as functional  # noqa: PLC0415

    gradient, parameter, first = torch.randn(64, 8), torch.randn(64, 8), torch.randn(64, 8)
    second = torch.rand(64, 8)
    signed, unsigned = functional.create_dynamic_map(signed=True), functional.create_dynamic_map(signed=False)
    state1, state2 = (torch.randint(0, 255, (64, 8), dtype=torch.uint8) for _ in range(2))
    norm, norms1, norms2 = torch.zeros(1), torch.rand(2), torch.rand(2)
    numbers = {"beta1": 0.9, "beta2": 0.99, "beta3": 0.0, "alpha": 0.0, "eps": 1e-8, "weight_decay": 0.01, "step": 7}
    numbers |= {"lr": 1e-3, "gnorm_scale": 1.0}
    return {
        "bitsandbytes::optimizer_update_32bit": [
            (("adam", gradient, parameter, first, second, norm, 0.0, 0.0), numbers),
            (("momentum", gradient, parameter, first, None, None, 0.0, 0.0), numbers),
        ],
        "bitsandbytes::optimizer_update_8bit_blockwise": [
            (
                ("adam", gradient, parameter, state1, state2),
                {**numbers, "qmap1": signed, "qmap2": unsigned, "absmax1": norms1, "absmax2": norms2},
            ),
        ],
    }
