"""Dtypes that accelerators compute in and the CPU does not: the device does, in a wider one."""

from __future__ import annotations

import functools
import importlib
import itertools
import warnings

import numpy as np
import pytest
import torch
from helpers.isolated import isolated
from torch.testing import assert_close

from customops.backend import register_backend
from customops.backend.errors import NoKernelError

pytestmark = pytest.mark.process


def register() -> None:
    warnings.simplefilter("ignore")  # complex32 is experimental, says torch
    register_backend("npy")


on_device = isolated(register, imports=["helpers.inductor"])


WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
WIDER |= dict.fromkeys(INTEGERS, torch.float64)
WIDER |= {torch.bool: torch.uint8}


FLOAT8 = [getattr(torch, f"float8_{kind}") for kind in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz")]
WIDER |= dict.fromkeys(FLOAT8, torch.float32)
EXACT = (*INTEGERS, torch.bool, *FLOAT8)  #: not rounded


#: Kernels of CUDA that have no meaning elsewhere, sparse tensors, and one whose random numbers are drawn in its dtype.
SKIPPED = {"torch.ops.aten._flash_attention_forward", "torch.ops.aten._efficient_attention_forward"}
SKIPPED |= {"sparse.sampled_addmm", "nn.functional.rrelu", "nansum", "nanmean"}  # the rest has tests of its own


def is_refused(op, dtype: torch.dtype) -> bool:
    """torch asks the name of the device for it, before any kernel."""
    return op.name.startswith("fft.") and dtype in (torch.float16, torch.bfloat16)


def wider(value, dtype: torch.dtype):
    if isinstance(value, torch.Tensor):
        return value.to(WIDER.get(dtype, dtype)) if value.dtype == dtype else value
    return WIDER.get(dtype, dtype) if value == dtype else value


def there(value):
    return value.to("npy") if isinstance(value, torch.Tensor) else value


@on_device
def test_what_accelerators_have_and_the_cpu_lacks() -> None:
    """Every op of torch's own database that CUDA has in more dtypes, against the CPU in a wider one."""
    tried = set()
    tested = importlib.import_module("torch.testing._internal.common_methods_invocations")  # takes seconds
    for op in tested.op_db:
        for dtype in set(op.dtypesIfCUDA) - set(op.dtypes):
            if op.name in SKIPPED or is_refused(op, dtype) or "conv" in op.name:  # of complex32: the CPU has these
                continue
            if op.variant_test_name == "without_cudnn":  # of batch_norm, which on torch 2.11 rounds at each step
                continue
            for sample in itertools.islice(op.sample_inputs("cpu", dtype), 2):
                if op.name == "__rmod__" and not sample.input.all():
                    continue  # integers refuse to divide by zero, which torch 2.11 draws
                tried.add((op.name, dtype))
                ours, exact = sample.transform(there), sample.transform(functools.partial(wider, dtype=dtype))
                got = op(ours.input, *ours.args, **ours.kwargs)
                expected = op(exact.input, *exact.args, **exact.kwargs)
                assert got.is_npy, op.name
                assert expected.dtype in (got.dtype, WIDER.get(got.dtype)), (op.name, got.dtype)
                tolerance = 0 if got.dtype in EXACT else 1e-2
                assert_close(got.cpu(), expected.to(got.dtype), rtol=tolerance, atol=tolerance, equal_nan=True)
    assert len(tried) > 50
    assert {("histc", torch.int64), ("abs", torch.bool), ("fft.fft", torch.complex32)} <= tried


@on_device
def test_histograms_of_integers() -> None:
    x = torch.tensor([0, 1, 1, 2, 9, 12, -3])
    for bins, low, high in ((5, 0, 9), (3, 1, 10), (4, -3, 12)):
        counts = [0] * bins
        for value in x.tolist():
            if low <= value <= high:
                counts[min((value - low) * bins // (high - low), bins - 1)] += 1
        got = torch.histc(x.npy(), bins, low, high)
        assert (got.tolist(), got.dtype) == (counts, torch.int64)
        out = torch.empty(0, dtype=torch.int64, device="npy")
        assert torch.histc(x.npy(), bins, low, high, out=out) is out
        assert out.tolist() == counts
    with pytest.raises(NotImplementedError, match="not implemented for 'Long'"):
        torch.histc(x, 5)  # the CPU is as it was
    with pytest.raises(NotImplementedError, match="not implemented for 'Long'"):
        torch.softmax(x.npy(), 0)  # no device takes it


@on_device
def test_writes_and_gradients_in_half_precision() -> None:
    x = torch.randn(1, 2, 4, 4, 4)
    here, d = x.clone().requires_grad_(), x.half().npy().requires_grad_()
    torch.nn.functional.avg_pool3d(here, 2).square().sum().backward()
    torch.nn.functional.avg_pool3d(d, 2).square().sum().backward()
    assert d.grad.dtype == torch.float16
    assert_close(d.grad.cpu().float(), here.grad, rtol=1e-2, atol=1e-2)

    z = torch.randn(5, dtype=torch.complex64)
    c = z.to(torch.complex32).npy()
    assert c.sin_() is c
    assert_close(c.cpu().to(torch.complex64), z.sin(), rtol=1e-2, atol=1e-2)
    out = torch.empty(0, dtype=torch.complex32, device="npy")
    torch.exp(c, out=out)
    assert_close(out.cpu().to(torch.complex64), z.sin().exp(), rtol=2e-2, atol=2e-2)
    assert c.angle().dtype == torch.float16
    assert_close(c.angle().cpu().float(), z.sin().angle(), rtol=1e-2, atol=1e-2)

    torch.manual_seed(0)
    noise = torch.zeros(200, dtype=torch.float16, device="npy")
    y = torch.randn(200).half()
    got = torch.ops.aten.rrelu_with_noise(y.npy(), noise, 0.1, 0.3, True)
    assert_close(got, y.npy() * noise)
    assert 0.1 < noise[y.npy() < 0].mean().item() < 0.3


@on_device
def test_sums_of_complex_numbers_that_are_there() -> None:
    nan = float("nan")
    z = torch.tensor([[1 + 1j, complex(nan, 2), 3], [complex(1, nan), 5j, -1]])
    expected = torch.from_numpy(np.nansum(z.numpy(), axis=1))
    for dtype in (torch.complex32, torch.complex64, torch.complex128):
        d = z.to(dtype).npy()
        assert d.nansum(1).dtype == dtype
        assert_close(d.nansum(1).cpu().to(torch.complex64), expected)
        assert_close(d.nansum().cpu().to(torch.complex64), expected.sum())
        assert_close(d.nanmean(1, keepdim=True).cpu().to(torch.complex64), expected[:, None] / 2)
    w = z.npy().requires_grad_()
    w.nansum().abs().backward()
    unit = expected.sum() / expected.sum().abs()
    assert_close(w.grad.cpu(), torch.where(z.isnan(), 0, unit))
    assert torch.tensor([1.0, nan]).npy().nansum().item() == 1


@on_device
def test_products_of_a_wider_dtype() -> None:
    a, b, c = torch.randn(2, 3).bfloat16(), torch.randn(3, 4).bfloat16(), torch.randn(2, 4).bfloat16()
    exact = a.float() @ b.float()
    product = torch.mm(a.npy(), b.npy(), out_dtype=torch.float32)
    assert_close(product.cpu(), exact)
    assert_close(torch.bmm(a[None].npy(), b[None].npy(), out_dtype=torch.float32)[0].cpu(), exact)
    assert_close(torch.addmm(c.npy(), a.npy(), b.npy(), out_dtype=torch.float32, beta=2).cpu(), exact + 2 * c.float())
    total = torch.baddbmm(c[None].npy(), a[None].npy(), b[None].npy(), out_dtype=torch.float32, alpha=3)
    assert_close(total[0].cpu(), 3 * exact + c.float())


@on_device
def test_ops_that_the_cpu_does_not_have() -> None:
    with pytest.raises(NoKernelError, match="neither 'npy' nor the CPU has a kernel") as info:
        torch.ops.aten._fused_dropout(torch.ones(3, device="npy"), 0.5)
    assert info.value.fix == "@backend.kernel('aten::_fused_dropout')"
    assert len(str(info.value).splitlines()) < 4
