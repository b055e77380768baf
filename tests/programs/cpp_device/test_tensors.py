"""The device of `examples/cpp_device`: its memory and its tensors equal the CPU's."""

from __future__ import annotations

import copy
import os
import sys
import threading
import warnings

import pytest
import torch
from helpers.cpp_device import (
    DTYPES,
    counted,
    equal,
    main,
    on_device,
    sample,
)
from torch import nn
from torch.testing import assert_close

pytestmark = pytest.mark.process


# -- memory and devices ------------------------------------------------------------------------


@on_device
def test_live_bytes() -> None:
    assert [torch.toy.memory_allocated(i) for i in range(2)] == [0, 0]
    x = torch.empty(256, device="toy")
    y = torch.empty(1000, dtype=torch.uint8, device="toy:1")
    view = x[10:]
    assert [torch.toy.memory_allocated(i) for i in range(2)] == [1024, 1000]
    del x
    assert torch.toy.memory_allocated(0) == 1024  # the view keeps it
    del view, y
    assert [torch.toy.memory_allocated(i) for i in range(2)] == [0, 0]


@on_device
def test_live_bytes_after_training() -> None:
    def train() -> None:
        net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1)).to("toy:1")
        optimizer = torch.optim.AdamW(net.parameters())
        for _ in range(3):
            net(torch.randn(5, 4, device="toy:1")).square().mean().backward()
            optimizer.step()

    train()
    assert [torch.toy.memory_allocated(i) for i in range(2)] == [0, 0]


@on_device
def test_current_device() -> None:
    assert torch.toy.current_device() == 0
    with torch.toy.device(1):
        assert torch.empty(1, device="toy").device == torch.device("toy:1")
        with torch.toy.device("toy:0"):
            assert torch.empty(1, device="toy").device.index == 0
        assert torch.empty(1, device="toy").device.index == 1
    with torch.toy.device_of(torch.empty(1, device="toy:1")), torch.toy.device_of(torch.empty(1)):
        assert torch.toy.current_device() == 1
    with pytest.raises(KeyError), torch.toy.device(1):
        raise KeyError
    assert torch.toy.current_device() == 0
    torch.toy.set_device(1)
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(torch.toy.current_device()))
    thread.start()
    thread.join()
    assert (seen, torch.toy.current_device()) == ([0], 1)  # each thread has its own
    torch.set_default_device("toy:0")
    assert torch.ones(2).device == torch.device("toy:0")


@on_device
def test_wrong_index() -> None:
    for use in [
        lambda: torch.empty(1, device="toy:2"),
        lambda: torch.empty_strided((1,), (1,), device="toy:2"),
        lambda: torch.ones(1).to("toy:2"),
        lambda: torch.ones(1).toy(2),
        lambda: torch.toy.set_device(2),
        lambda: torch.toy.memory_allocated(2),
        lambda: torch.toy.default_generator("toy:2"),
        lambda: torch.Generator(device="toy:2"),
        lambda: torch.accelerator.set_device_index(2),
    ]:
        with pytest.raises(RuntimeError, match="there is no toy:2: the last one is toy:1"):
            use()
    with pytest.raises(ValueError, match="expected a toy device, got cpu"):
        torch.toy.set_device("cpu")
    assert torch.toy.current_device() == 0


@on_device
def test_tensors_of_different_devices() -> None:
    x, y, z = torch.ones(2, device="toy:0"), torch.ones(2, device="toy:1"), torch.ones(2)
    for op in [torch.add, torch.sub, torch.mul, torch.dot, torch._foreach_add]:
        for other in [y, z]:
            with pytest.raises(RuntimeError, match="to be on the same device"):
                op(x, other) if op is not torch._foreach_add else op([x], [other])
    with pytest.raises(RuntimeError, match="to be on the same device"):
        torch.add(x, x, out=y)
    equal(x + torch.tensor(2.0), torch.full((2,), 3.0))  # a number may be on the CPU
    for op in [torch.add, torch.sub, torch.mul, torch.atan2]:
        equal(op(torch.tensor(2.0), y), op(torch.tensor(2.0), z))
        assert op(torch.tensor(2), y).device == y.device
    with pytest.raises(RuntimeError, match="to be on the same device"):
        z[torch.tensor([0], device="toy")]
    equal(x[torch.tensor([0])], torch.ones(1))


@on_device
def test_device_module() -> None:
    assert torch.get_device_module("toy") is torch.toy
    assert torch.toy.is_available()
    assert torch.toy.device_count() == torch.accelerator.device_count() == 2
    assert torch.accelerator.current_accelerator() == torch.device("toy")
    with torch.accelerator.device_index(1):
        assert torch.toy.current_device() == torch.accelerator.current_device_index() == 1
    torch.accelerator.synchronize()
    if hasattr(torch.accelerator, "empty_host_cache"):  # from torch 2.13 on
        torch.accelerator.empty_host_cache()
    torch.toy.synchronize()
    x = torch.ones(2).toy(1)
    assert (x.is_toy, x.cpu().is_toy, x.device) == (True, False, torch.device("toy:1"))
    assert next(nn.Linear(1, 1).toy().parameters()).is_toy
    assert nn.utils.rnn.pack_sequence([torch.ones(2, 1)]).toy().data.is_toy
    assert torch.ones(2).untyped_storage().toy().device.type == "toy"
    torch.toy.register()  # nothing to do
    with pytest.raises(RuntimeError, match="has already been set"):
        torch.utils.rename_privateuse1_backend("another")


@on_device
def test_missing_tools() -> None:
    os.environ["PATH"] = ""
    with pytest.raises(RuntimeError, match=r"cannot be built without .* and ninja: install it"):
        torch.toy.load()


# -- tensors -----------------------------------------------------------------------------------


@on_device
def test_empty() -> None:
    for dtype in [*DTYPES, torch.float8_e4m3fn, torch.uint16, torch.complex32]:
        x = torch.empty(2, 3, dtype=dtype, device="toy:1")
        assert (x.shape, x.stride(), x.dtype, x.device) == ((2, 3), (3, 1), dtype, torch.device("toy:1"))
    assert torch.empty(2, 3, 4, 5, device="toy", memory_format=torch.channels_last).stride() == (60, 1, 15, 3)
    assert torch.empty(0, 3, device="toy:1").stride() == (3, 1)
    assert torch.empty(0, 3, device="toy:1").device.index == 1
    x = torch.empty_strided((2, 3), (1, 4), device="toy")
    assert (x.stride(), x.untyped_storage().nbytes()) == ((1, 4), 40)
    for wrong in [lambda: torch.empty(-1, device="toy"), lambda: torch.empty_strided((-1,), (1,), device="toy")]:
        with pytest.raises(RuntimeError, match="negative dimension"):
            wrong()


@on_device
def test_factories() -> None:
    for make in [
        lambda device: torch.zeros(2, 3, device=device),
        lambda device: torch.ones(3, dtype=torch.int8, device=device),
        lambda device: torch.full((2,), 1 + 2j, device=device),
        lambda device: torch.arange(5, device=device),
        lambda device: torch.eye(3, device=device),
        lambda device: torch.linspace(0, 1, 4, device=device),
        lambda device: torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=device),
        lambda device: torch.triu_indices(3, 4, device=device),
        lambda device: torch._efficientzerotensor(3, device=device).clone(),
    ]:
        equal(make("toy:1"), make("cpu"))
        assert make("toy:1").device.index == 1


@on_device
def test_copies() -> None:
    for dtype in DTYPES:
        x = sample(dtype, 4, 6)
        equal(x.toy(), x)
        equal(x.t()[1:].toy(), x.t()[1:])
        equal(x.toy().t()[1:].to("toy:1"), x.t()[1:])
        equal(x.to("toy:1").to("toy:0"), x)
        for other in [torch.float64, torch.complex64] if dtype.is_complex else [torch.float64, torch.int32, torch.bool]:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Casting complex values to real")
                equal(x.to("toy", other), x.to(other))
                equal(x.toy().to(other), x.to(other))
    x = torch.zeros(3, 4, device="toy")
    x.copy_(torch.arange(4))  # another dtype, another shape
    equal(x, torch.arange(4.0).expand(3, 4))
    y = torch.zeros(4)
    y.copy_(x[1])
    assert y.tolist() == [0, 1, 2, 3]
    x[:, 1] = -1
    equal(x, torch.tensor([0.0, -1, 2, 3]).expand(3, 4))
    assert x[0, 1].item() == -1
    assert x[0].tolist() == [0, -1, 2, 3]
    assert str(x[0]) == "tensor([ 0., -1.,  2.,  3.], device='toy:0')"
    row = torch.arange(4.0).toy()
    for overlapping in (lambda: row[1:].copy_(row[:-1]), lambda: row[:1].expand(3).copy_(row[1:])):
        with pytest.raises(RuntimeError, match="to a single memory location"):
            overlapping()
    row[:2].copy_(row[2:])
    assert row.tolist() == [2, 3, 2, 3]


@on_device
def test_conjugate_and_negative_views() -> None:
    x = sample(torch.complex64, 3, 2)
    for view in [
        lambda x: x.conj(),
        lambda x: x.conj().imag,  # a negative view
        lambda x: x.conj().t().imag[1:],
        lambda x: x.conj().conj(),
    ]:
        ours, expected = view(x.toy()), view(x)
        assert (ours.is_conj(), ours.is_neg()) == (expected.is_conj(), expected.is_neg())
        assert_close(ours.cpu(), expected.resolve_conj().resolve_neg())
        equal(ours.clone(), expected.clone())
        equal(ours.resolve_conj().resolve_neg(), expected.resolve_conj().resolve_neg())
        equal(ours.to("toy:1"), expected.resolve_conj().resolve_neg())
        equal(ours + 1, expected + 1)
        equal(ours - 1, expected - 1)
    ours, expected = x.toy(), x.clone()
    for y in [ours, expected]:
        y.conj().copy_(torch.full((3, 2), 1 + 2j))
        y.conj().imag[0] = 5
    equal(ours, expected)
    equal(torch.linalg.inv(x[:2].toy().conj()).mH, torch.linalg.inv(x[:2].conj()).mH.resolve_conj())


@on_device
def test_views() -> None:
    x = torch.arange(24.0)
    for view in [
        lambda x: x.as_strided((3, 2), (2, 5), 3),
        lambda x: x.view(4, 6)[1:3, ::2].t(),
        lambda x: x.view(2, 3, 4).permute(2, 0, 1).unflatten(0, (2, 2)),
        lambda x: x.unfold(0, 4, 3),
        lambda x: x.view(torch.int32),
        lambda x: x.view(torch.uint8).view(torch.float64),
        lambda x: x.view(12, 2).view(torch.complex64).squeeze(),
        lambda x: torch.view_as_complex(x.view(12, 2)),
        lambda x: torch.view_as_real(x.view(12, 2).view(torch.complex64)),
        lambda x: x.view(4, 6).diagonal().expand(2, 4),
        lambda x: x.view(6, 4).t().reshape(2, 12),
    ]:
        ours = x.toy()
        equal(view(ours), view(x))
        assert view(ours).stride() == view(x).stride()
    ours = x.toy()
    ours.view(4, 6)[1].unfold(0, 2, 2).fill_(7)
    expected = x.clone()
    expected[6:12] = 7
    equal(ours, expected)
    assert counted(lambda: ours.view(4, 6).t()[2:].unfold(1, 2, 1)) == {}
    with pytest.raises(RuntimeError, match="shape '\\[5, 5\\]' is invalid"):
        ours.view(5, 5)


@on_device
def test_set() -> None:
    x, y = torch.arange(6.0, device="toy:1"), torch.empty(0, device="toy:1")
    y.set_(x)
    assert y.data_ptr() == x.data_ptr()
    y.set_(x.untyped_storage(), 2, (2, 2), (1, 2))
    equal(y, torch.tensor([[2.0, 4.0], [3.0, 5.0]]))
    y.set_(x.untyped_storage(), 0, (10,), (1,))  # the storage grows, on its own device
    assert (x.untyped_storage().nbytes(), x.untyped_storage().device) == (40, torch.device("toy:1"))
    equal(x, torch.arange(6.0))
    y.set_()
    assert (y.numel(), y.device) == (0, torch.device("toy:1"))
    with pytest.raises(RuntimeError, match="different device"):
        y.set_(torch.ones(2).untyped_storage())


@on_device
def test_resize() -> None:
    x = torch.arange(4.0).to("toy:1")
    assert torch.toy.storage_resizes(x) == 0
    x.resize_(2, 4)
    assert torch.toy.storage_resizes(x) == 1
    assert (x.shape, x.device, torch.toy.memory_allocated(1)) == ((2, 4), torch.device("toy:1"), 32)
    equal(x[0], torch.arange(4.0))
    x.resize_(3)
    equal(x, torch.arange(3.0))
    x.resize_(1, 2, 2, 2, memory_format=torch.channels_last)
    assert x.stride() == (8, 1, 4, 2)
    assert torch.toy.storage_resizes(x) == 1  # it never shrinks
    x = torch.ones(2, device="toy")
    x[1:].resize_(3)  # from an offset
    assert x.untyped_storage().nbytes() == 16


@on_device
def test_storage_resize() -> None:
    x = torch.arange(4, dtype=torch.uint8).to("toy:1")
    storage = x.untyped_storage()
    storage.resize_(100)
    assert (storage.nbytes(), storage.device, torch.toy.memory_allocated(1)) == (100, torch.device("toy:1"), 100)
    equal(x, torch.arange(4, dtype=torch.uint8))
    storage.resize_(0)
    assert torch.toy.memory_allocated(1) == 0
    storage.resize_(4)
    assert torch.toy.storage_resizes(x) == 3


@on_device
def test_storage_of_our_own() -> None:
    storage = torch.UntypedStorage(12, device="toy:1")
    assert (storage.nbytes(), storage.device) == (12, torch.device("toy:1"))
    storage.fill_(7)
    assert (storage[3], storage.tolist()) == (7, [7] * 12)
    x = torch.empty(0, device="toy:1").set_(storage)
    assert torch.toy.storage_resizes(x) == 0  # raises for any StorageImpl but ours
    for tensor in [torch.ones(2, device="toy"), torch.ones(2).toy(), copy.deepcopy(x), x + x, x.new_empty(3)]:
        assert torch.toy.storage_resizes(tensor) == 0
    with pytest.raises(RuntimeError):
        torch.toy.storage_resizes(torch.ones(2))


if __name__ == "__main__":
    main(sys.argv[1])
