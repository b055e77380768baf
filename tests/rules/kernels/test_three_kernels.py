"""Three kernels of one op on the CPU, in NumPy, numba and Triton (under its interpreter), chosen by size."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
import torch
from helpers.isolated import isolated
from helpers.several import Several
from torch import Tensor

import customops

pytestmark = [pytest.mark.process, pytest.mark.slow]

several: Any = None


def setup() -> None:
    global several
    os.environ["TRITON_INTERPRET"] = "1"
    helpers = importlib.import_module("helpers.triton_ops")
    numba, numpy = importlib.import_module("numba"), importlib.import_module("numpy")
    several = Several(customops.default_registry, "three::f")
    ran = several.ran

    @numba.njit  # type: ignore[untyped-decorator]
    def multiply(x: Any, by: float, out: Any) -> None:
        for i in range(x.size):
            out[i] = x[i] * by

    def in_numpy(x: Tensor, by: float) -> Tensor:
        ran.append("numpy")
        return torch.from_numpy(numpy.multiply(x.numpy(), numpy.float32(by)))

    def in_numba(x: Tensor, by: float) -> Tensor:
        ran.append("numba")
        out = torch.empty_like(x)
        multiply(x.numpy(), by, out.numpy())
        return out

    def in_triton(x: Tensor, by: float) -> Tensor:
        ran.append("triton")
        return helpers.add(x, x * (by - 1))  # type: ignore[no-any-return]

    register = several.op.register_kernel
    register("cpu", in_numpy, name="numpy", when=lambda x: x.numel() <= 16 or "16 elements at most", priority=2)
    register("cpu", in_numba, name="numba", when=lambda x: x.numel() <= 64 or "64 elements at most", priority=1)
    register("cpu", in_triton, name="triton")


interpreted = isolated(setup)


@pytest.fixture(autouse=True)
def _languages() -> None:
    for name in ("triton", "numba"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"needs {name}")


def inputs() -> dict[str, Tensor]:
    return {name: torch.randn(n) for name, n in (("numpy", 16), ("numba", 17), ("triton", 65))}


@interpreted
def test_chosen_by_size() -> None:
    for _ in range(3):
        for name, x in inputs().items():
            several.ran.clear()
            torch.testing.assert_close(several.op(x, 3.0), torch.mul(x, 3.0))
            assert several.ran == [name]


@interpreted
def test_each_against_torch() -> None:
    x = torch.randn(8)
    for name in ("numpy", "numba", "triton", "default", "reference"):
        with several.op.prefer(name):
            torch.testing.assert_close(several.op(x, 3.0), torch.mul(x, 3.0))


@interpreted
def test_in_compiled_code() -> None:
    compiled = torch.compile(lambda x: several.op(x, 3.0) + 1, fullgraph=True, backend="aot_eager")
    for name, x in inputs().items():
        several.ran.clear()
        torch.testing.assert_close(compiled(x), torch.mul(x, 3.0) + 1)
        assert several.ran == [name]
