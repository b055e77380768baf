"""Ops of Triton kernels on a GPU: compiled by Triton, traced into by inductor, on the device and stream of the call."""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch.nn.functional import rms_norm as rms_norm_of_torch

import customops

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.compile]


@pytest.fixture
def ops() -> Any:
    pytest.importorskip("triton")
    return importlib.import_module("helpers.triton_ops")


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_values_and_gradients(ops: Any, dtype: torch.dtype) -> None:
    x, weight = tensors((50, 70), (70,), dtype=dtype)
    expected = rms_norm_of_torch(x, (70,), weight, 1e-6)
    for fn in (ops.rms_norm, torch.compile(ops.rms_norm, fullgraph=True)):
        torch.testing.assert_close(fn(x, weight), expected)
        ours = torch.autograd.grad(fn(x, weight).square().sum(), (x, weight))
        theirs = torch.autograd.grad(expected.square().sum(), (x, weight), retain_graph=True)
        tolerance = {"rtol": 1e-2, "atol": 1e-2} if dtype is torch.bfloat16 else {}
        torch.testing.assert_close(ours, theirs, **tolerance)


def test_inductor_sees_the_kernel(ops: Any) -> None:
    x, y = (t.detach() for t in tensors((50, 70), (50, 70)))
    fn = torch.compile(lambda x, y: ops.add(x.sin(), y).cos(), fullgraph=True)
    result, (code,) = run_and_get_code(fn, x, y)
    torch.testing.assert_close(result, (x.sin() + y).cos())
    assert "add_kernel" in code
    assert not re.search(r"torch\.ops\.triton_ops", code)


def test_an_op_that_writes(ops: Any) -> None:
    x, cos, sin = ops.rotary_inputs()
    expected = ops.rotary_in_torch(x, cos, sin)
    for fn in (ops.rotary_, torch.compile(ops.rotary_, fullgraph=True)):
        written = x.clone()
        fn(written, cos, sin)
        torch.testing.assert_close(written, expected)


def test_opcheck(ops: Any) -> None:
    customops.opcheck(ops.softmax, tuple(tensors((3, 5))))
    customops.opcheck(ops.rotary_, ops.rotary_inputs())


def test_streams_and_cuda_graphs(ops: Any) -> None:
    x, y = (t.detach() for t in tensors((50, 70), (50, 70)))
    ops.add(x, y)  # compiled before the capture
    with torch.cuda.stream(torch.cuda.Stream()):
        result = ops.add(x, y)
    torch.cuda.synchronize()
    torch.testing.assert_close(result, x + y)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = ops.add(x, y)
    x.mul_(2)
    graph.replay()
    torch.testing.assert_close(result, x + y)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_another_device_than_the_current_one(ops: Any) -> None:
    x = torch.randn(5, 7, device="cuda:1")
    torch.testing.assert_close(ops.add(x, x), x + x)
    with pytest.raises(customops.errors.ArgumentError, match="runs on one device"):
        ops.add(x, x.to("cuda:0"))
