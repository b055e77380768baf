"""`examples/migrate/from_vllm_ir.py`: which provider runs, and values against torch's own rms_norm."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch.nn.functional import rms_norm

import customops


def test_which_provider_runs(helpers: ModuleType) -> None:
    x, half = torch.randn(2, 8), torch.randn(2, 8, dtype=torch.bfloat16)
    ones, chosen = torch.ones(8), helpers.chosen
    for op, residual in ((helpers.rms_norm, False), (helpers.fused_add_rms_norm, True)):
        wide = (x, x) if residual else (x,)
        narrow = (half, half) if residual else (half,)
        assert chosen(op, *wide, ones, 1e-6).startswith("vllm_c, one of 4")
        assert chosen(op, *narrow, ones.bfloat16(), 1e-6).startswith("aiter, one of 4")
        assert chosen(op, *narrow, None, 1e-6).startswith("vllm_c, one of 4; not aiter: needs a weight")
        assert chosen(op, *wide, ones, 1e-6, 4).startswith("default, one of 4")
        with customops.prefer(helpers.PRIORITY):
            assert chosen(op, *narrow, ones.bfloat16(), 1e-6).startswith("vllm_c, one of 4, preferred")


@pytest.mark.parametrize("provider", ["aiter", "vllm_c", "default", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values(helpers: ModuleType, provider: str, dtype: torch.dtype) -> None:
    x, residual, weight = torch.randn(3, 8, dtype=dtype), torch.randn(3, 8, dtype=dtype), torch.randn(8, dtype=dtype)
    with customops.prefer({"examples_vllm_ir::*": provider}):
        torch.testing.assert_close(helpers.rms_norm(x, weight, 1e-6), rms_norm(x, (8,), weight, 1e-6))
        normed, total = helpers.fused_add_rms_norm(x, residual, weight, 1e-6)
    torch.testing.assert_close(total, x + residual)
    expected = rms_norm(x.double() + residual.double(), (8,), weight.double(), 1e-6).to(dtype)
    torch.testing.assert_close(normed, expected)
