"""Tensors of a device written in Python: made, copied, viewed, resized, printed, counted; the CPU is the oracle."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from helpers.isolated import isolated
from helpers.npy import equal, register
from torch.testing import assert_close

from customops.backend import get_backend

pytestmark = pytest.mark.process


on_device = isolated(register)


DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex32, torch.complex64, torch.complex128,
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


@on_device
def test_factories() -> None:
    for make in (
        lambda device: torch.zeros(2, 3, device=device),
        lambda device: torch.ones(2, 3, device=device),
        lambda device: torch.full((2,), 7.5, device=device),
        lambda device: torch.arange(2, 9, 3, device=device),
        lambda device: torch.eye(3, device=device),
        lambda device: torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=device),
        lambda device: torch.tensor(3, device=device),
        lambda device: torch.linspace(0, 1, 5, device=device),
        lambda device: torch.tril_indices(3, 4, device=device),
        lambda device: torch.zeros(0, 4, device=device),
        lambda device: torch.hann_window(5, device=device),
        lambda device: torch.ones(1, 2, 3, 4, device=device).to(memory_format=torch.channels_last),
        lambda device: torch.zeros_like(torch.ones(2, 3, device=device).t()),
        lambda device: torch.ones(2, device=device).new_full((3,), 2),
        lambda device: torch.scalar_tensor(2.5, device=device),
    ):
        equal(make("npy"), make("cpu"))


@on_device
def test_every_dtype_goes_and_comes() -> None:
    for dtype in DTYPES:
        x = torch.tensor([0, 1, 1], dtype=torch.uint8).to(dtype)
        d = x.to("npy")
        assert d.dtype == dtype
        assert torch.empty(3, dtype=dtype, device="npy").dtype == dtype
        assert torch.equal(d.cpu().view(torch.uint8), x.view(torch.uint8))


@on_device
def test_copies_in_all_directions() -> None:
    x = torch.randn(3, 4)
    d = x.npy()
    equal(d, x)
    assert d.is_npy
    assert not x.is_npy
    assert d.npy() is d
    assert d.npy(1).device == torch.device("npy:1")
    equal(x.t().to("npy"), x.t())
    equal(d.t(), x.t())
    equal(d.double(), x.double())
    equal(d.to(torch.bfloat16), x.to(torch.bfloat16))
    for source, target in (
        (x.t(), torch.empty(4, 3, device="npy")),
        (d.t(), torch.empty(4, 3)),
        (d, d.t().contiguous().t()),
    ):
        assert_close(target.copy_(source).cpu(), source.cpu())
    half = torch.empty(3, 4, dtype=torch.float16, device="npy").copy_(x)
    equal(half, x.half())
    filled = torch.zeros(3, 4, device="npy")
    filled[1:, ::2] = d[1:, ::2]
    expected = torch.zeros(3, 4)
    expected[1:, ::2] = x[1:, ::2]
    equal(filled, expected)
    equal(torch.empty(2, 4, device="npy").copy_(x[0]), x[0].expand(2, 4).contiguous())
    equal(torch.zeros(3, 4, device="npy").copy_(d, non_blocking=True), x)


@on_device
def test_conjugate_and_negative_copies() -> None:
    x = torch.randn(3, dtype=torch.complex64)
    d = x.npy()
    equal(d.conj(), x.conj())
    equal(x.conj().to("npy"), x.conj().resolve_conj())
    assert_close(d.conj().imag.cpu(), x.conj().imag)  # lazily negated
    assert_close(torch.empty(3, dtype=torch.complex64).copy_(d.conj()), x.conj().resolve_conj())
    target = torch.zeros(3, dtype=torch.complex64, device="npy")
    target.conj().copy_(d)
    assert_close(target.cpu(), x.conj().resolve_conj())
    backend = get_backend()
    with backend.access():
        assert_close(backend.host(d.conj()), x.conj())
        assert_close(backend.host(d.conj().imag), x.conj().imag)


@on_device
def test_views_share_memory() -> None:
    x = torch.arange(12.0)
    for view in (
        lambda t: t.view(3, 4),
        lambda t: t.as_strided((2, 2), (5, 1), 3),
        lambda t: t.unfold(0, 3, 2),
        lambda t: t.view(3, 4).t()[1:, ::2],
        lambda t: t[:1].expand(4),
        lambda t: t.view(torch.int32),
        lambda t: t.view(6, 2).view(torch.complex64),
        lambda t: torch.view_as_real(t.view(6, 2).view(torch.complex64)),
        lambda t: t.unsqueeze(0).squeeze().movedim(0, -1),
        lambda t: t.diagonal() if t.dim() > 1 else t.view(3, 4).diagonal(),
        lambda t: t.split([5, 7])[1],
        lambda t: t.reshape(4, 3),
    ):
        d = x.npy()
        seen = view(d)
        equal(seen, view(x))
        assert seen.untyped_storage().data_ptr() == d.untyped_storage().data_ptr()
        assert seen.storage_offset() == view(x).storage_offset()
        if seen.numel() == x.numel() and seen.dtype == x.dtype:
            seen.zero_()
            assert d.sum().item() == 0
            assert seen._is_view()
            assert (seen._base is d) == (view(x)._base is x)


@on_device
def test_slices_write_through() -> None:
    d, x = torch.zeros(3, 4, device="npy"), torch.zeros(3, 4)
    for t in (d, x):
        t[1] = 1
        t[:, 2].add_(5)
        t[t > 5] = -1
        t[[0, 2], [1, 3]] = t.new_tensor([8.0, 9.0])
    equal(d, x)


@on_device
def test_arithmetic() -> None:
    x, y = torch.randn(3, 4), torch.randn(4)
    i = torch.arange(4)
    for f in (
        lambda a, b, n: a + b,
        lambda a, b, n: 2 - a * 3.5,
        lambda a, b, n: (a + 1).abs() / (b**2 + 1),
        lambda a, b, n: n + b,
        lambda a, b, n: n / 2,
        lambda a, b, n: n + 1.5,
        lambda a, b, n: torch.remainder(n, 2.5),
        lambda a, b, n: a.half() + 1e-3,
        lambda a, b, n: a.sum(0) @ b,
        lambda a, b, n: a[:, n[1:]],
        lambda a, b, n: a.sort(dim=1).values,
        lambda a, b, n: a.topk(2)[1],
        lambda a, b, n: torch.cat([a, a], 1),
        lambda a, b, n: a.max(),
        lambda a, b, n: torch.where(a > 0, a, 0.0),
        lambda a, b, n: torch.einsum("ij,j->i", a, b),
    ):
        equal(f(x.npy(), y.npy(), i.npy()), f(x, y, i))


@on_device
def test_outs() -> None:
    x = torch.randn(3, 4)
    d = x.npy()
    out = torch.empty(3, 4, device="npy")
    assert torch.add(d, 1, out=out) is out
    equal(out, x + 1)
    grown = torch.empty(0, device="npy")
    torch.mul(d, 2, out=grown)
    equal(grown, x * 2)
    values, indices = torch.empty(0, device="npy"), torch.empty(0, dtype=torch.long, device="npy")
    torch.kthvalue(d, 2, dim=1, out=(values, indices))
    expected = torch.kthvalue(x, 2, dim=1)
    equal(values, expected.values)
    equal(indices, expected.indices)
    small = torch.ones(2, device="npy")
    with pytest.warns(UserWarning, match="An output with one or more elements was resized"):
        torch.add(d, 1, out=small)
    equal(small, x + 1)
    big = torch.ones(20, device="npy")
    with pytest.warns(UserWarning, match="An output with one or more elements was resized"):
        torch.add(d, 1, out=big)
    equal(big, x + 1)
    strided = torch.zeros(4, 3, device="npy").t()
    torch.add(d, 1, out=strided)
    assert_close(strided.cpu(), x + 1)
    assert strided.stride() == (1, 3)


@on_device
def test_overlapping_memory() -> None:
    """What the CPU refuses, and what it computes, of tensors that share memory."""

    def cases(x):
        square = x[:4].view(2, 2)
        yield lambda: x[1:].add_(x[:-1])
        yield lambda: x[1:].copy_(x[:-1])
        yield lambda: x.__setitem__(slice(1, None), x[:-1])
        yield lambda: torch.cat([x[2:], x[:2]], out=x)
        yield lambda: square.add_(square.t())
        yield lambda: torch.mul(square.t(), 2.0, out=square)
        yield lambda: torch._foreach_add_([x[1:]], [x[:-1]])
        yield lambda: x[:1].expand(3).add_(1)
        yield lambda: square.add_(square)
        yield lambda: square[0].add_(square[1])
        yield lambda: x[::2].copy_(x[1::2])
        yield lambda: x[2:4].conj().add_(x[:2].imag)
        yield lambda: torch._foreach_mul_([x[:2], x[2:4]], [x[2:4], x[4:]])
        yield lambda: torch.cat([x[:2], x[2:4]], out=x[2:])

    for dtype in (torch.float32, torch.complex64):
        count = len(list(cases(torch.arange(6.0))))
        for i in range(count):
            host = torch.arange(6.0).to(dtype)
            device = host.npy()
            outcomes = []
            for x in (host, device):
                try:
                    list(cases(x))[i]()
                except (RuntimeError, TypeError) as error:
                    outcomes.append(type(error))
                else:
                    outcomes.append(None)
            assert outcomes[0] is outcomes[1], (i, dtype, outcomes)
            equal(device, host)


@on_device
def test_a_device_that_is_named_counts() -> None:
    d = torch.ones(2, device="npy:1")
    assert torch.linspace(d[0], 3, 3, device="cpu").tolist() == [1, 2, 3]
    assert torch.linspace(d[0], 3, 3, device="cpu").device.type == "cpu"
    assert torch.linspace(d[0], 3, 3, device="meta").device.type == "meta"
    assert str(torch.linspace(d[0], 3, 3, device="npy:1").device) == "npy:1"
    lib = torch.library.Library("t_backend_device", "DEF")
    lib.define("like(Tensor x, Device? device=None) -> Tensor")
    lib.impl("like", lambda x, device=None: torch.ones(len(x), device=device), "CPU")
    assert torch.ops.t_backend_device.like(d, torch.device("cpu")).device.type == "cpu"
    assert str(torch.ops.t_backend_device.like(d, torch.device("npy:1")).device) == "npy:1"


@on_device
def test_in_place_changes_of_shape() -> None:
    x = torch.randn(2, 3)
    d = x.npy()
    before = d.data_ptr()
    equal(d.t_(), x.clone().t_())
    d.unsqueeze_(0).squeeze_(0).transpose_(0, 1)
    equal(d, x)
    assert d.data_ptr() == before
    equal(d.as_strided_((2,), (1,), 2), x.clone().as_strided_((2,), (1,), 2))


@on_device
def test_versions_are_counted() -> None:
    d = torch.ones(3, device="npy")
    d.add_(1).mul_(2)
    assert d._version == 2
    d[0] = 4
    assert d._version == 3
    w = torch.ones(3, device="npy", requires_grad=True)
    y = w.exp()
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@on_device
def test_resize() -> None:
    d = torch.arange(6.0, device="npy")
    d.resize_(2, 2)
    equal(d, torch.tensor([[0.0, 1.0], [2.0, 3.0]]))
    d.resize_(3, 4)
    assert d.shape == (3, 4)
    assert d.cpu().flatten()[:4].tolist() == [0, 1, 2, 3]
    d.resize_as_(torch.empty(5, device="npy"))
    assert d.shape == (5,)
    d.resize_(0)
    assert d.numel() == 0
    d.resize_(1, 2, 3, 4, memory_format=torch.channels_last)
    assert d.stride() == torch.empty(1, 2, 3, 4).to(memory_format=torch.channels_last).stride()
    tail = torch.arange(6.0, device="npy")[4:]
    tail.resize_(4)
    assert tail[:2].tolist() == [4, 5]


@on_device
def test_set() -> None:
    d, other = torch.arange(6.0, device="npy"), torch.empty(0, device="npy")
    other.set_(d)
    equal(other, torch.arange(6.0))
    other.set_(d.untyped_storage(), 2, (2, 2), (2, 1))
    equal(other, torch.tensor([[2.0, 3.0], [4.0, 5.0]]))
    other.zero_()
    assert d.tolist() == [0, 1, 0, 0, 0, 0]
    assert other.set_().numel() == 0


@on_device
def test_storages() -> None:
    d = torch.arange(4.0, device="npy:1")
    storage = d.untyped_storage()
    assert storage.device == torch.device("npy:1")
    assert storage.nbytes() == 16
    assert storage.is_npy
    made = torch.UntypedStorage(8, device="npy")  # torch alone: a segfault
    assert (made.nbytes(), made.device) == (8, torch.device("npy:0"))
    assert torch.UntypedStorage(device="npy").nbytes() == 0
    assert torch.UntypedStorage(8).device.type == "cpu"
    assert storage.new().device == torch.device("npy:1")  # here, too
    assert torch.UntypedStorage(8).new().device.type == "cpu"
    assert torch.UntypedStorage([1, 2]).tolist() == [1, 2]
    moved = torch.arange(3, dtype=torch.uint8).untyped_storage().npy()
    assert moved.is_npy
    assert moved.cpu().tolist() == [0, 1, 2]
    assert moved.clone().device == torch.device("npy:0")
    with pytest.raises(RuntimeError, match="Invalid device"):
        moved.npy("cpu")


@on_device
def test_typed_storages() -> None:
    warnings.simplefilter("ignore")  # they are deprecated
    d = torch.arange(4.0, device="npy")
    assert d.storage().is_npy
    assert torch.arange(3.0).storage().npy().cpu().tolist() == [0, 1, 2]


@on_device
def test_printing_and_python_numbers() -> None:
    d = torch.tensor([[1.0, 2.5], [3.0, -4.0]], device="npy")
    assert repr(d) == "tensor([[ 1.0000,  2.5000],\n        [ 3.0000, -4.0000]], device='npy:0')"
    assert f"{d[0, 0]:.1f}" == "1.0"
    assert d.tolist() == [[1.0, 2.5], [3.0, -4.0]]
    assert bool(d[0, 0] == 1)
    assert int(d.sum()) == 2
    assert (d[0, 1].item(), len(d), [row.sum().item() for row in d]) == (2.5, 2, [3.5, -1.0])
    assert torch.empty(0, device="npy").tolist() == []
    assert "npy:1" in repr(torch.ones(1, device="npy:1"))
    with get_backend().no_fallback():  # a debugger may print
        assert repr(d[0]) == str(d[0]) == "tensor([1.0000, 2.5000], device='npy:0')"
        with pytest.raises(NotImplementedError, match="no kernel for 'npy'"):
            d.abs()


@on_device
def test_deepcopy_and_equality() -> None:
    d = torch.randn(3, device="npy")
    pair = copy.deepcopy([d, d[1:]])
    assert pair[0].device == d.device
    assert torch.equal(pair[0], d)
    pair[1].zero_()
    assert pair[0][1:].tolist() == [0, 0]  # sharing is kept
    assert d[1:].abs().sum() > 0
