"""Memory of the device: counted, freed, from one's own allocator; what Python cannot have."""

from __future__ import annotations

import gc
import threading
import types
import warnings

import numpy as np
import pytest
import torch
from helpers.isolated import isolated
from helpers.npy import equal, register
from torch._subclasses import FakeTensorMode
from torch.testing import assert_close

from customops.backend import BackendError, _compat, get_backend, register_backend
from customops.errors import UnsupportedError

pytestmark = pytest.mark.process


on_device = isolated(register)


# Memory ---------------------------------------------------------------------------------------------------------


@on_device
def test_host_numpy_and_wrap_copy_nothing() -> None:
    backend = get_backend()
    d = torch.zeros(2, 3, device="npy")
    backend.host(d)[0] = 1
    backend.numpy(d)[1] = 2
    assert d.tolist() == [[1, 1, 1], [2, 2, 2]]
    assert backend.numpy(d.t()).strides == (4, 12)
    array = np.arange(4.0)
    wrapped = backend.wrap(array, 1)
    assert wrapped.device == torch.device("npy:1")
    array[0] = 9
    assert wrapped.tolist() == [9, 1, 2, 3]
    assert backend.wrap(np.float32(2.5)).shape == ()
    assert backend.wrap(np.maximum(backend.numpy(torch.ones((), device="npy")), 3)).item() == 3
    host = torch.ones(2)
    assert backend.wrap(host, wrapped.device).add_(1).device == wrapped.device
    assert host.tolist() == [2, 2]
    assert backend.wrap(host, "npy:1").device == wrapped.device
    assert backend.wrap(torch._efficientzerotensor((2,))).tolist() == [0, 0]  # without memory of its own
    del array, host
    gc.collect()
    assert wrapped[0].item() == 9  # the owner is kept


@on_device
def test_host_numpy_and_wrap_refuse() -> None:
    backend = get_backend()
    for function in (backend.host, backend.numpy):
        for wrong in (torch.ones(1), torch.empty(1, device="meta"), 3):
            with pytest.raises(ValueError, match="expects a tensor"):
                function(wrong)
    with pytest.raises(TypeError, match="NumPy has no such dtype"):
        backend.numpy(torch.ones(1, dtype=torch.bfloat16, device="npy"))
    with pytest.raises(NotImplementedError, match="lazily conjugated"):
        backend.numpy(torch.ones(1, dtype=torch.complex64, device="npy").conj())
    for wrong in (torch.empty(1, device="meta"), torch.ones(1, device="npy"), torch.eye(2).to_sparse(),
                  torch.quantize_per_tensor(torch.ones(1), 0.1, 0, torch.qint8)):  # fmt: skip
        with pytest.raises(ValueError, match=r"wrap\(\) takes"):
            backend.wrap(wrong)
    with pytest.raises(BackendError, match="takes a CPU tensor or a writable NumPy array"):
        backend.wrap([1, 2])
    for dtype in (torch.uint4, torch.int3):  # DLPack would make bytes of them
        with pytest.raises(UnsupportedError, match="plain dtypes"):
            torch.empty(2, dtype=dtype, device="npy")
    with pytest.raises(BackendError, match="negative"):
        backend.wrap(np.arange(3.0)[::-1])
    with pytest.raises(BackendError, match="there is no such device"):
        backend.wrap(torch.ones(1), 2)

    with FakeTensorMode():
        with pytest.raises(ValueError, match="with memory"):
            backend.host(torch.empty(2, device="npy"))
        with pytest.raises(ValueError, match=r"wrap\(\) takes a tensor with memory") as raised:
            backend.wrap(torch.empty(2))
    assert (raised.value.op, raised.value.got) == ("npy", "a FakeTensor, while tracing")
    for function in (backend.host, backend.wrap):  # without the check: a segfault
        with pytest.raises(ValueError, match="memory"):
            torch.func.functionalize(lambda x, function=function: function(x) + 1)(torch.ones(2, device="npy"))
    with pytest.raises(BackendError, match="a read-only NumPy array") as info:
        backend.wrap(np.broadcast_to(np.ones(1), (3,)))
    assert info.value.fix == "wrap(array.copy())"
    for wrong in ("npy:2", torch.device("cuda:1"), "cpu"):
        with pytest.raises(BackendError, match=r"there is no such device|Invalid device"):
            backend.wrap(torch.ones(1), wrong)
        with pytest.raises(BackendError, match=r"there is no such device|Invalid device"):
            backend.default_generator(wrong)


@on_device
def test_bytes_are_counted() -> None:
    backend = get_backend()
    assert backend.memory_allocated() == 0
    d = torch.empty(100, device="npy")
    e = torch.empty(10, dtype=torch.int16, device="npy:1")
    assert (backend.memory_allocated(), backend.memory_allocated(1)) == (400, 20)
    view = d[:10]
    del d
    assert backend.memory_allocated(0) == 400
    result = view + 1  # through the fallback
    assert backend.memory_allocated(0) == 440
    del view, e
    gc.collect()
    assert torch.npy.memory_allocated("npy:0") == 40
    assert torch.npy.memory_allocated(1) == 0
    del result
    assert backend.memory_allocated(0) == 0
    host = torch.ones(3)
    first, second = backend.wrap(host), backend.wrap(host)  # two entries of one owner
    assert backend.memory_allocated() == 24
    del first, second, host
    assert backend.memory_allocated() == 0
    with pytest.raises(BackendError, match="there is no such device"):
        backend.memory_allocated(2)


@on_device
def test_training_leaks_nothing() -> None:
    backend = get_backend()
    model = torch.nn.Linear(4, 4).npy()
    for _ in range(200):
        model(torch.ones(2, 4, device="npy")).sum().backward()
    del model
    gc.collect()
    assert backend.memory_allocated() == 0


@on_device
def test_threads() -> None:
    results = []

    def work() -> None:
        w = torch.ones(3, 3, device="npy", requires_grad=True)
        for _ in range(50):
            (w @ w).sum().backward()
        results.append(w.grad.sum().item())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [50 * 54.0] * 4


# What Python cannot have ------------------------------------------------------------------------------------------


@on_device
def test_storages_of_another_torch_keep_their_size() -> None:
    """Where a storage is not laid out as it is here, nothing is written into it."""
    x, other = torch.ones(3, device="npy"), torch.ones(2, device="npy")
    storage = x.untyped_storage()
    unknown = types.SimpleNamespace(_cdata=storage._cdata, data_ptr=lambda: 1, nbytes=storage.nbytes)
    with pytest.raises(UnsupportedError, match=r"unknown layout.*\n.*x\.resize_"):
        _compat.swap_memory(unknown, other.untyped_storage())
    assert (x.tolist(), other.tolist()) == ([1, 1, 1], [1, 1])


@on_device
def test_torch_says_where_numpy_is() -> None:
    d = torch.ones(3, device="npy")
    for function in (d.numpy, lambda: np.asarray(d)):
        with pytest.raises(TypeError, match=r"backend\.numpy\(x\)|Tensor\.cpu\(\)"):
            function()
    assert d.cpu().numpy().tolist() == [1, 1, 1]


@on_device
def test_sparse_and_quantized_are_refused() -> None:
    warnings.simplefilter("ignore")  # they are in beta, or deprecated
    d = torch.eye(3, device="npy")
    for function in (
        lambda: torch.eye(3).to_sparse().to("npy"),
        lambda: torch.eye(3).to_sparse_csr().to("npy").to_dense(),
        lambda: torch.nested.nested_tensor([torch.ones(2)]).to("npy"),
        lambda: d.to_sparse(),
        lambda: d.to_sparse_csr(),
        lambda: torch.sparse_coo_tensor([[0], [1]], [1.0], (2, 2), device="npy"),
        lambda: torch.empty(2, 2, layout=torch.sparse_coo, device="npy"),
        lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8).to("npy"),
        lambda: torch.quantize_per_tensor(d, 0.1, 0, torch.qint8),
    ):
        with pytest.raises(NotImplementedError, match=r"to_dense|dequantize"):
            function()
    layer = torch.nn.TransformerEncoderLayer(4, 2, batch_first=True)
    mask = torch.tensor([[False, True]], device="npy")
    for enabled in (True, False):  # by default nested tensors are how it leaves out what is masked
        encoder = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=enabled).eval().npy()
        with torch.no_grad():
            if enabled:
                with pytest.raises(NotImplementedError, match="enable_nested_tensor=False"):
                    encoder(torch.ones(1, 2, 4, device="npy"), src_key_padding_mask=mask)
            else:
                assert encoder(torch.ones(1, 2, 4, device="npy"), src_key_padding_mask=mask).shape == (1, 2, 4)


@on_device
def test_dlpack() -> None:
    d = torch.ones(3, device="npy:1")
    assert tuple(d.__dlpack_device__()) == tuple(torch.nn.Parameter(d).__dlpack_device__()) == (12, 1)
    assert tuple(torch.ones(1).__dlpack_device__()) == (1, 0)


@on_device
def test_an_index_that_is_not_there() -> None:
    for function in (
        lambda: torch.empty(1, device="npy:2"),
        lambda: torch.ones(1).to("npy:2"),
        lambda: torch.arange(3, device="npy:7"),
        lambda: torch.ones(1).npy(2),
    ):
        with pytest.raises(BackendError, match="there is no such device"):
            function()


# Allocators -------------------------------------------------------------------------------------------------------

blocks: list[tuple[int, int]] = []


def allocate(nbytes: int, index: int) -> np.ndarray:
    blocks.append((nbytes, index))
    return np.zeros(nbytes, np.uint8)


alone = isolated()


@alone
def test_an_allocator_of_ones_own() -> None:
    backend = register_backend("npy", device_count=2, allocate=allocate)
    d = torch.empty(3, 4, dtype=torch.float64, device="npy:1")
    assert blocks == [(96, 1)]
    assert d.abs().sum().item() == 0
    blocks.clear()
    x = torch.randn(3, 4)
    equal(x.t().npy(), x.t())
    result = x.npy() @ x.npy().t()  # what the fallback makes is put there, too
    assert_close(result.cpu(), x @ x.t())
    assert (36, 0) in blocks
    for wrong in (lambda: torch.empty(-1, device="npy"), lambda: torch.empty_strided((2,), (-1,), device="npy")):
        with pytest.raises(RuntimeError, match=r"negative|overflow"):
            wrong()
    assert torch.empty(0, device="npy").numel() == 0
    assert backend.memory_allocated(1) == 96
    del d
    assert backend.memory_allocated(1) == 0


@alone
def test_allocators_that_return_something_else() -> None:
    answer = [None]
    register_backend("npy", allocate=lambda nbytes, index: answer[0])
    for wrong in (None, b"1234", np.zeros(3, np.uint8), np.zeros(4, np.int8), np.zeros(8, np.uint8)[::2]):
        answer[0] = wrong
        with pytest.raises(BackendError, match="allocate returned something else"):
            torch.empty(1, device="npy")
    answer[0] = np.zeros(4, np.uint8)
    assert torch.empty(1, device="npy").item() == 0


@alone
def test_an_allocator_that_raises() -> None:
    def full(nbytes: int, index: int) -> None:
        raise MemoryError("full")

    register_backend("npy", allocate=full)
    with pytest.raises(MemoryError, match="full"):
        torch.ones(3).npy()
