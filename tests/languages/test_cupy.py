"""Functions of CuPy, on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import customops
from customops import errors

pytestmark = pytest.mark.gpu


def test_an_op(registry: customops.Registry, ns: str) -> None:
    cupy = pytest.importorskip("cupy")

    @registry.custom_op(f"{ns}::sin", mutates_args=(), device_types="cuda")
    @customops.languages.from_cupy
    def sin(x: Tensor) -> Tensor:
        return cupy.sin(x)  # type: ignore[no-any-return]

    sin.register_fake(torch.empty_like)
    for x in (torch.randn(3, 4, device="cuda"), torch.randn(8, 8, device="cuda")[::2, ::2].t()):
        torch.testing.assert_close(sin(x), x.sin())
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.testing.assert_close(sin(x), x.sin())
    customops.opcheck(sin, (torch.randn(3, 4, device="cuda"),))


def test_refused() -> None:
    pytest.importorskip("cupy")
    with pytest.raises(errors.UnsupportedError, match="a tensor on cuda"):
        customops.languages.from_cupy(lambda x: x)(torch.zeros(2))
