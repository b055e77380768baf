"""Kernels of NVIDIA Warp, on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import customops
from customops import errors
from customops.languages import from_warp

wp = pytest.importorskip("warp")
pytestmark = pytest.mark.slow
wp.config.log_level = wp.LOG_WARNING


@wp.kernel  # type: ignore[untyped-decorator]
def axpy_kernel(a: float, x: wp.array(dtype=float), y: wp.array(dtype=float)):  # type: ignore[valid-type,no-untyped-def]
    i = wp.tid()
    y[i] = a * x[i] + y[i]


@wp.kernel  # type: ignore[untyped-decorator]
def norms_kernel(x: wp.array(dtype=wp.vec3), out: wp.array(dtype=float)):  # type: ignore[valid-type,no-untyped-def]
    i = wp.tid()
    out[i] = wp.length(x[i])


@pytest.fixture
def axpy_(registry: customops.Registry, ns: str) -> Any:
    launch = from_warp(axpy_kernel)

    @registry.custom_op(f"{ns}::axpy_", mutates_args=("y",))
    def axpy_(a: float, x: Tensor, y: Tensor) -> None:
        launch(x.numel(), a, x, y)

    return axpy_


def test_an_op_that_writes(axpy_: Any) -> None:
    whole = torch.zeros(8)
    for x, y in ((torch.randn(4), torch.randn(4)), (torch.randn(8)[::2], whole[1::2])):
        expected = 2 * x + y
        axpy_(2.0, x, y)
        torch.testing.assert_close(y, expected)
    assert not whole[::2].any()
    customops.opcheck(axpy_, (0.5, torch.randn(4), torch.randn(4)))

    def compiled(x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        axpy_(3.0, x, y)
        return y

    x = torch.randn(5)
    torch.testing.assert_close(torch.compile(compiled, fullgraph=True, backend="aot_eager")(x), 3 * x)


def test_arrays_of_vectors() -> None:
    x, out = torch.randn(5, 3), torch.empty(5)
    from_warp(norms_kernel)(5, x, out)
    torch.testing.assert_close(out, x.norm(dim=1))


def test_refused(axpy_: Any) -> None:
    axpy_(2.0, torch.zeros(3), torch.zeros(3))
    with pytest.raises(errors.UnsupportedError, match=r"(?s)argument: x.*torch.float32.*torch.float64.*x.to"):
        axpy_(2.0, torch.zeros(3).double(), torch.zeros(3))
    with pytest.raises(errors.UnsupportedError, match=r"(?s)takes no array here.*argument: a"):
        from_warp(axpy_kernel)(3, torch.tensor(2.0), torch.zeros(3), torch.zeros(3))
    with pytest.raises(errors.UnsupportedError, match=r"(?s)no such device.*argument: y.*got: +meta"):
        from_warp(axpy_kernel)(3, 2.0, torch.zeros(3), torch.zeros(3, device="meta"))
    with pytest.raises(errors.ArgumentError, match="takes a kernel of Warp"):
        from_warp(lambda x: x)
