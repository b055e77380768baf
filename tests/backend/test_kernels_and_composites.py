"""Kernels beside those that torch has: of composites, essential ops, attention."""

from __future__ import annotations

import warnings

import pytest
import torch
from helpers.isolated import isolated
from helpers.npy import ones, register
from torch.testing import assert_close

from customops.backend import get_backend

pytestmark = pytest.mark.process


on_device = isolated(register)


# Kernels ----------------------------------------------------------------------------------------------------------


@on_device
def test_dtypes_of_lists() -> None:
    backend, called = get_backend(), []
    handle = backend.kernel("aten::cat", dtypes=[torch.float32])(lambda xs, dim=0: called.append(dim) or NotImplemented)
    for dtype in (torch.float64, torch.float32):
        assert torch.cat([ones(1, dtype=dtype), ones(2, dtype=dtype)]).tolist() == [1, 1, 1]
    assert called == [0]
    handle.remove()


@on_device
def test_kernels_from_torch_library_count() -> None:
    """The shortcuts of a family go with its first kernel, whoever writes it."""
    backend = get_backend()
    lib = torch.library.Library("aten", "IMPL")
    lib.impl(op_name="sub.out", fn=lambda a, b, *, alpha=1, out: out.fill_(7), dispatch_key="PrivateUse1")
    d = ones(2)
    assert (d - d).tolist() == [7, 7]
    backend.reset_fallback_counts()
    assert (d * d).tolist() == [1, 1]
    assert backend.fallback_counts() == {"aten::mul.Tensor": 1}


@on_device
def test_a_kernel_of_an_essential_op() -> None:
    backend = get_backend()
    sizes = []

    @backend.kernel("aten::empty.memory_format")
    def empty(size, **options):
        sizes.append(list(size))
        return backend.wrap(torch.zeros(size, dtype=options.get("dtype") or torch.float32))

    assert torch.empty(2, 3, device="npy").sum().item() == 0
    empty.remove()
    assert torch.empty(4, device="npy").shape == (4,)
    assert sizes == [[2, 3]]


@on_device
def test_attention() -> None:
    backend = get_backend()
    q, k, v = (torch.randn(2, 2, 4, 8, dtype=torch.float64) for _ in range(3))
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    calls = []

    def attend(q, k, v, bias, causal, scale):
        scores = q @ k.mT * (scale if scale is not None else q.shape[-1] ** -0.5)
        if causal:
            scores = scores.masked_fill(~mask, -torch.inf)
        return (scores if bias is None else scores + bias).softmax(-1) @ v

    def forward(q, k, v, bias=None, dropout=0.0, causal=False, debug=False, *, scale=None):
        calls.append("forward")
        host = backend.host
        out = attend(host(q), host(k), host(v), None if bias is None else host(bias), causal, scale)
        empty = lambda: backend.wrap(torch.zeros(0, dtype=torch.long))  # noqa: E731
        return (
            backend.wrap(out),
            backend.wrap(torch.zeros(q.shape[:3])),
            empty(),
            empty(),
            4,
            4,
            empty(),
            empty(),
            empty(),
        )

    def backward(grad, q, k, v, bias, wanted, out, lse, cq, ck, mq, mk, p, causal, seed, offset, *, scale=None):
        calls.append("backward")
        grad, q, k, v = map(backend.host, (grad, q, k, v))
        factor = scale if scale is not None else q.shape[-1] ** -0.5
        weights = attend(
            q,
            k,
            torch.eye(4, dtype=v.dtype).expand(2, 2, 4, 4),
            None if bias is None else backend.host(bias),
            causal,
            scale,
        )
        through = grad @ v.mT
        scores = weights * (through - (through * weights).sum(-1, keepdim=True)) * factor
        grads = scores @ k, scores.mT @ q, weights.mT @ grad
        return (*map(backend.wrap, grads), None)

    sdpa = torch.nn.functional.scaled_dot_product_attention
    assert_close(sdpa(q.npy(), k.npy(), v.npy()).cpu(), sdpa(q, k, v))
    name = "aten::_scaled_dot_product_fused_attention_overrideable"
    handles = [backend.kernel(name)(forward), backend.kernel(f"{name}_backward")(backward)]
    for options in ({}, {"is_causal": True}, {"attn_mask": mask}, {"scale": 0.5}):
        here = [t.clone().requires_grad_() for t in (q, k, v)]
        there = [t.npy().requires_grad_() for t in (q, k, v)]
        on_npy = {n: o.npy() if isinstance(o, torch.Tensor) else o for n, o in options.items()}
        expected, got = sdpa(*here, **options), sdpa(*there, **on_npy)
        assert_close(got.cpu(), expected)
        weights = torch.randn_like(expected)
        expected.backward(weights)
        got.backward(weights.npy())
        for ours, theirs in zip(there, here, strict=True):
            assert_close(ours.grad.cpu(), theirs.grad)
    assert calls == ["forward", "backward"] * 4
    for handle in handles:
        handle.remove()
    calls.clear()
    assert_close(sdpa(q.npy(), k.npy(), v.npy()).cpu(), sdpa(q, k, v))
    assert calls == []
    handle = backend.kernel(name, dtypes=[torch.float32])(lambda *_, **__: NotImplemented)
    q, k, v = q.double(), k.double(), v.double()
    assert_close(sdpa(q.npy(), k.npy(), v.npy()).cpu(), sdpa(q, k, v))  # not asked
    with pytest.raises(NotImplementedError, match="the CPU has no such op to fall back to"):
        sdpa(q.float().npy(), k.float().npy(), v.float().npy())
    handle.remove()


@on_device
def test_kernels_by_way_of_torch_library() -> None:
    """torch's own route to kernels from Python, beside ours."""
    backend = get_backend()
    calls = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it overrides the fallback

        @backend.access()
        def add(a, b, *, alpha=1):
            calls.append("add")
            return backend.wrap(backend.host(a) + alpha * backend.host(b), a.device)

        @backend.access()
        def total(a, *, dtype=None):
            calls.append("sum")
            return backend.wrap(backend.host(a).sum(), a.device)

        library = torch.library.Library("aten", "IMPL")
        for op, kernel in (("add.Tensor", add), ("sum", total)):
            library.impl(op, kernel, "PrivateUse1", allow_override=True)  # before torch 2.13 it refuses otherwise

    a = torch.ones(3).to("npy").requires_grad_()
    loss = (a + a).sum()
    loss.backward()
    assert loss.item() == 6
    assert a.grad.tolist() == [2, 2, 2]
    assert a.grad.is_npy
    assert {"add", "sum"} <= set(calls)
    assert torch.ones(2).is_pinned() is False
