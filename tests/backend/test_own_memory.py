"""Memory that is not the host's: hooks, handles, protected pages; and the device of the other tests in such memory."""

from __future__ import annotations

import copy
import ctypes
import gc
import io
import pickle

import numpy as np
import pytest
import torch
from backend import test_custom_ops, test_fallback, test_kernels, test_models, test_tensors, test_torch, test_training
from helpers.isolated import isolated
from helpers.npy import equal, register_asynchronous, register_protected
from torch import nn
from torch.testing import assert_close

from customops.backend import (
    BackendError,
    Block,
    DeviceMemory,
    ProtectedMemory,
    ThreadStream,
    get_backend,
    register_backend,
)
from customops.errors import UnsupportedError
from customops.testing import IsolationError, run_isolated

pytestmark = pytest.mark.process


# Memory far away: its handles are no addresses --------------------------------------------------------------------


class FarMemory(DeviceMemory):
    """Bytes that only these methods reach. Handles are no addresses: to read there would be a crash."""

    def __init__(self) -> None:
        self.blocks: dict[int, bytearray] = {}
        self.calls: list[str] = []
        self.next = 0xDEAD_0000

    def allocate(self, nbytes: int, index: int) -> int:
        self.next += 1 << 20
        self.blocks[self.next] = bytearray(b"\xa5" * nbytes)
        return self.next

    def free(self, handle: int, nbytes: int, index: int) -> None:
        assert len(self.blocks.pop(handle)) == nbytes

    def _bytes(self, block: Block) -> slice:
        assert 0 <= block.offset <= block.offset + block.nbytes <= len(self.blocks[block.handle])
        return slice(block.offset, block.offset + block.nbytes)

    def copy_to_host(self, source: Block, host: torch.Tensor) -> None:
        self.calls.append("to host")
        assert host.dtype == torch.uint8 and host.shape == (source.nbytes,) and host.is_contiguous()  # noqa: PT018
        host.numpy()[:] = np.frombuffer(self.blocks[source.handle], np.uint8)[self._bytes(source)]

    def copy_from_host(self, host: torch.Tensor, target: Block) -> None:
        self.calls.append("from host")
        assert host.dtype == torch.uint8 and host.shape == (target.nbytes,) and host.is_contiguous()  # noqa: PT018
        self.blocks[target.handle][self._bytes(target)] = host.numpy().tobytes()

    def copy_on_device(self, source: Block, target: Block) -> None:
        self.calls.append("on device")
        self.blocks[target.handle][self._bytes(target)] = self.blocks[source.handle][self._bytes(source)]

    def info(self, index: int) -> tuple[int, int]:
        return 1000 - sum(map(len, self.blocks.values())), 1000


far = FarMemory()


def register_far() -> None:
    register_backend("npy", device_count=2, memory=far)


on_far = isolated(register_far)


@on_far
def test_handles() -> None:
    backend = get_backend()
    x = torch.arange(6, dtype=torch.int16, device="npy:1").view(2, 3)
    (handle,) = far.blocks
    assert x.data_ptr() == x.untyped_storage().data_ptr() == handle
    assert x[1].data_ptr() == handle + 6
    assert backend.handle(x[1, 1:]) == Block(handle, 8, 4, 1)
    assert backend.handle(x[:, 0]) == Block(handle, 0, 8, 1)
    assert np.frombuffer(far.blocks[handle], np.int16).tolist() == [0, 1, 2, 3, 4, 5]
    del x
    gc.collect()
    assert far.blocks == {}
    assert torch.empty(0, 3, device="npy").tolist() == []
    assert far.blocks == {}


@on_far
def test_the_host_is_refused() -> None:
    backend = get_backend()
    x = torch.ones(2, device="npy")
    for function in (backend.host, backend.numpy):
        for scope in (backend.access, lambda: torch.no_grad()):
            with scope(), pytest.raises(UnsupportedError, match="cannot read or write") as info:
                function(x)
            assert "x.cpu()" in info.value.fix
            assert "backend.handle(x)" in info.value.fix
        with pytest.raises(ValueError, match="expects a tensor"):
            function(torch.ones(1))
    for value in (torch.ones(1), 3):
        with pytest.raises(ValueError, match=r"handle\(\) expects a tensor"):
            backend.handle(value)


@on_far
def test_an_empty_tensor_has_handle_0() -> None:
    for x in (torch.empty(0, device="npy:1"), torch.empty(2, 0, 3, device="npy:1")):
        assert get_backend().handle(x) == Block(0, 0, 0, 1)
    x = torch.ones(2, device="npy")
    assert get_backend().handle(x[2:]) == Block(*far.blocks, 8, 0, 0)


@on_far
def test_what_info_returns_is_checked() -> None:
    assert torch.npy.mem_get_info() == (1000, 1000)
    far.info = lambda index: [np.int64(3), 1000]
    assert torch.npy.mem_get_info() == (3, 1000)
    for wrong in ({"free": 1, "total": 2}, (2, 1), 5, None, (1, 2, 3), ("1", "2")):
        far.info = lambda index, wrong=wrong: wrong
        with pytest.raises(BackendError, match="info returned something else") as error:
            torch.npy.get_device_properties()
        assert error.value.got == repr(wrong)


@on_far
def test_copies_take_the_shortest_way() -> None:
    x = torch.arange(6.0).view(2, 3)
    d = x.to("npy")
    assert far.calls == ["from host"]
    far.calls.clear()
    e = torch.empty(2, 3, device="npy:1").copy_(d)
    f = d.clone()
    assert far.calls == ["on device", "on device"]
    equal(e, x)
    equal(f, x)
    far.calls.clear()
    assert torch.equal(d.t().cpu(), x.t())  # as dense as it lies there
    assert far.calls == ["to host"]
    far.calls.clear()
    d.copy_(x.double())
    assert far.calls == ["from host"]
    far.calls.clear()
    d[:, 1].copy_(torch.tensor([7.0, 8.0]))  # between other elements, which stay
    assert d.tolist() == [[0, 7, 2], [3, 8, 5]]
    d[0, 1:].copy_(d[0, :2].clone())
    assert d.tolist() == [[0, 0, 7], [3, 8, 5]]
    assert d.half().dtype == torch.float16
    assert d.to("npy:1", torch.float64).tolist() == d.tolist()
    assert torch.empty(2, 3, device="npy").copy_(torch.ones(3)).sum().item() == 6
    assert torch.ones(3, device="npy").expand(2, 3).contiguous().sum().item() == 6


@on_far
def test_writes_reach_the_device() -> None:
    d = torch.zeros(2, 3, device="npy")
    torch._foreach_add_([d[:, 0], d[:, 1]], [1.0, 2.0])  # one lies between the elements of the other
    assert d.tolist() == [[1, 2, 0], [1, 2, 0]]
    d[:, 2].add_(d[:, 0])
    assert d.tolist() == [[1, 2, 1], [1, 2, 1]]
    assert torch.add(d, d, out=torch.empty(0, device="npy")).tolist() == [[2, 4, 2], [2, 4, 2]]
    assert torch.add(d, 1, out=torch.empty(2, 6, device="npy")[:, ::2]).tolist() == [[2, 3, 2], [2, 3, 2]]
    view = d[1]
    view.resize_(2).fill_(9)
    assert d.tolist() == [[1, 2, 1], [9, 9, 1]]
    assert d.resize_(3, 3)[:2].tolist() == [[1, 2, 1], [9, 9, 1]]
    t = torch.arange(6.0, device="npy").view(2, 3)[:, 1:]
    assert t.t_().tolist() == [[1, 4], [2, 5]]
    assert t.mul_(2).tolist() == [[2, 8], [4, 10]]
    z = torch.tensor([1 + 2j], device="npy")
    z.conj().mul_(1j)
    assert z.tolist() == [(1j * (1 + 2j).conjugate()).conjugate()]
    value, index = torch.tensor([1.0, 3, 2], device="npy").max(0)
    assert (value.item(), index.item()) == (3, 1)
    x = torch.arange(5.0, device="npy")
    x[1:].copy_(x[:-1].clone())
    assert x.tolist() == [0, 0, 1, 2, 3]


@on_far
def test_files_and_copies() -> None:
    d = torch.arange(4.0, device="npy:1")
    assert repr(d) == "tensor([0., 1., 2., 3.], device='npy:1')"
    for value in (pickle.loads(pickle.dumps(d)), copy.deepcopy(d)):
        equal(value, torch.arange(4.0))
        assert value.device == d.device
    file = io.BytesIO()
    torch.save({"d": d, "part": d[1:]}, file)
    file.seek(0)
    loaded = torch.load(file)
    loaded["d"].zero_()
    assert loaded["part"].tolist() == [0, 0, 0]
    storage = d.untyped_storage()
    assert storage.tolist() == storage.cpu().tolist() == list(np.arange(4, dtype=np.float32).tobytes())
    assert storage[7] == 63
    storage[4:8] = 0
    assert d.tolist() == [0, 0, 2, 3]


def train(model: nn.Module, device: str, steps: int = 5) -> list[float]:
    torch.manual_seed(1)
    x, y = torch.randn(16, 4).to(device), torch.randn(16, 2).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@on_far
def test_training_and_its_end() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 2))
    there = copy.deepcopy(model).npy()
    assert train(there, "npy") == pytest.approx(train(model, "cpu"), rel=1e-5)
    for here, parameter in zip(model.parameters(), there.parameters(), strict=True):
        assert_close(parameter.cpu(), here)
    del there, parameter
    gc.collect()
    assert far.blocks == {}
    assert get_backend().memory_allocated() == 0


@on_far
def test_kernels_over_handles() -> None:
    backend = get_backend()

    @backend.kernel("aten::relu")
    def relu(x):
        out, where = torch.empty_like(x, memory_format=torch.contiguous_format), backend.handle(x)
        values = np.frombuffer(far.blocks[where.handle], np.float32, x.numel(), where.offset)
        far.blocks[backend.handle(out).handle][:] = np.maximum(values, 0).tobytes()
        return out

    d = torch.tensor([5.0, -1.0, 2.0], device="npy")[1:]
    with backend.no_fallback():
        result = torch.relu(d)
    assert result.tolist() == [0, 2]
    assert backend.wrap(np.arange(3.0), 1).tolist() == [0, 1, 2]  # a copy
    relu.remove()


@on_far
def test_statistics() -> None:
    accelerator, npy = torch.accelerator, torch.npy
    x = torch.empty(100, dtype=torch.uint8, device="npy")
    y = torch.empty(50, dtype=torch.uint8, device="npy")
    del y
    gc.collect()
    assert npy.memory_allocated() == npy.memory_reserved() == accelerator.memory_allocated() == 100
    assert npy.max_memory_allocated() == accelerator.max_memory_allocated() == accelerator.max_memory_reserved() == 150
    stats = npy.memory_stats("npy:0")
    assert stats == accelerator.memory_stats(0)
    assert stats["allocated_bytes.all.allocated"] == 150
    assert stats["allocated_bytes.all.freed"] == 50
    npy.reset_peak_memory_stats()
    assert npy.max_memory_allocated() == 100
    accelerator.reset_accumulated_memory_stats()
    stats = npy.memory_stats()
    counted = [stats[f"allocated_bytes.all.{name}"] for name in ("allocated", "freed", "peak", "current")]
    assert counted == [0, 0, 100, 100]  # as torch.cuda counts
    assert npy.memory_allocated(1) == npy.max_memory_allocated(1) == 0
    assert npy.mem_get_info() == accelerator.get_memory_info() == (900, 1000)
    assert npy.get_device_properties(1).name == "npy:1"
    assert npy.get_device_properties().total_memory == 1000
    assert npy.empty_cache() is accelerator.empty_cache() is None
    del x
    assert npy.memory_allocated() == 0
    assert npy.memory_stats()["allocated_bytes.all.freed"] == 100


# Errors -----------------------------------------------------------------------------------------------------------

alone = isolated()


@alone
def test_options_that_are_refused() -> None:
    class Half(DeviceMemory):
        """Lacks all methods."""

    with pytest.raises(TypeError, match="allocate"):
        Half()
    for options, message in (
        ({"memory": 3}, "memory= takes hooks"),
        ({"memory": FarMemory}, "memory= takes hooks"),
        ({"stream": ThreadStream}, "stream= orders"),
        ({"stream": 3, "memory": far}, "stream= takes a class"),
        ({"memory": far, "allocate": np.empty}, "allocate= is for memory of the host"),
    ):
        with pytest.raises(ValueError, match=message):
            register_backend("npy", **options)
    with pytest.raises(BackendError, match="no memory of its own"):
        register_backend("npy").handle(torch.ones(1, device="npy"))


class Broken(FarMemory):
    answer: object = None

    def allocate(self, nbytes: int, index: int) -> int:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    info = DeviceMemory.info


@alone
def test_hooks_that_fail() -> None:
    memory = Broken()
    register_backend("npy", memory=memory)
    for memory.answer in (None, 0, -1, "1", True, 2**63):
        with pytest.raises(BackendError, match="something else than a handle"):
            torch.empty(1, device="npy")
    memory.answer = np.int64(4096)
    kept = torch.empty(1, device="npy")
    assert kept.data_ptr() == 4096
    with pytest.raises(BackendError, match="something else than a handle") as info:
        torch.empty(1, device="npy")
    assert "not in use" in info.value.expected
    memory.copy_to_host = lambda source, host: torch.ones(4, dtype=torch.uint8)  # type: ignore[method-assign]
    with pytest.raises(BackendError, match="returned something, and is to copy in place"):
        kept.cpu()
    with pytest.raises(BackendError, match="takes a function without arguments"):
        get_backend().submit(3)
    memory.answer = MemoryError("full")
    with pytest.raises(MemoryError, match="full"):
        torch.ones(1).npy()
    with pytest.raises(UnsupportedError, match="does not say how much memory"):
        torch.npy.mem_get_info()


@isolated(register_protected)
def test_protected_memory_is_as_large_as_that_of_the_host() -> None:
    free, total = torch.npy.mem_get_info()
    assert 0 < free <= total == torch.npy.get_device_properties().total_memory


# Protected memory -------------------------------------------------------------------------------------------------

on_protected = isolated(register_protected)


@on_protected
def test_kernels_have_access_and_nobody_else() -> None:
    backend = get_backend()
    d = torch.tensor([-1.0, 2.0], device="npy")

    @backend.kernel("aten::relu")
    def relu(x):
        return backend.wrap(np.maximum(backend.numpy(x), 0))

    @backend.kernel("aten::add.out")
    def add(a, b, *, alpha=1, out):
        np.add(backend.numpy(a), backend.numpy(b), out=backend.numpy(out))

    with backend.no_fallback():
        results = torch.relu(d), d + d
    assert [result.tolist() for result in results] == [[0, 2], [-2, 4]]
    with pytest.raises(UnsupportedError, match="in kernels alone") as info:
        backend.numpy(d)
    assert "backend.access()" in info.value.fix
    with backend.access():
        backend.numpy(d)[0] = 5
        backend.host(d)[1] = 6
    assert d.tolist() == [5, 6]


@on_protected
def test_dtypes_that_no_tensor_of_the_device_has() -> None:
    memory = get_backend()._options.memory
    before = len(memory._pages)
    with pytest.raises(UnsupportedError, match=r"plain dtypes: not torch\.bits8"):
        torch.empty(2, device="npy", dtype=torch.bits8)
    assert len(memory._pages) == before


def stray() -> None:
    register_protected()
    ctypes.string_at(torch.ones(4, device="npy").data_ptr(), 4)


def stray_write() -> None:
    register_protected()
    ctypes.memset(torch.ones(4, device="npy").data_ptr(), 0, 4)


def kept_array() -> None:
    register_protected()
    backend, d = get_backend(), torch.ones(4, device="npy")
    with backend.access():
        array = backend.numpy(d)
        array += 1
    array += 1


@pytest.mark.parametrize("access", [stray, stray_write, kept_array])
def test_a_stray_access_ends_the_process(access) -> None:
    with pytest.raises(IsolationError, match="SIGSEGV"):
        run_isolated(access)


@on_protected
def test_pages_are_given_back() -> None:
    backend = get_backend()
    memory = backend._options.memory
    for _ in range(3):
        model = nn.Linear(4, 4).npy()
        model(torch.ones(2, 4, device="npy")).sum().backward()
    del model
    gc.collect()
    assert isinstance(memory, ProtectedMemory)
    assert memory._pages == {}


# The device of the other tests, in protected memory ---------------------------------------------------------------

#: In protected memory, without streams and with those that are threads.
TESTS = [
    test_training.test_layers,
    test_training.test_convolutions,
    test_training.test_recurrent_layers,
    test_training.test_optimisers,
    test_training.test_foreach_ops,
    test_training.test_modules_move,
    test_training.test_functions_and_checkpoints,
    test_training.test_a_transformer_learns_as_on_the_cpu,
    test_training.test_the_second_device,
    test_tensors.test_factories,
    test_tensors.test_every_dtype_goes_and_comes,
    test_tensors.test_copies_in_all_directions,
    test_tensors.test_conjugate_and_negative_copies,
    test_tensors.test_views_share_memory,
    test_tensors.test_slices_write_through,
    test_tensors.test_outs,
    test_tensors.test_overlapping_memory,
    test_tensors.test_in_place_changes_of_shape,
    test_tensors.test_resize,
    test_tensors.test_set,
    test_tensors.test_storages,
    test_tensors.test_printing_and_python_numbers,
    test_tensors.test_deepcopy_and_equality,
    test_fallback.test_numbers_where_a_tensor_is_due,
    test_fallback.test_lu_solve_of_complex_numbers,
    test_fallback.test_gradients_that_are_zero_tensors,
    test_kernels.test_one_out_kernel_serves_all_forms,
    test_kernels.test_kernels_of_composites_keep_the_gradient,
    test_custom_ops.test_gradients,
    test_custom_ops.test_vmap,
    test_custom_ops.test_opcheck,
    test_torch.test_save_and_load,
    test_torch.test_pickle_files_and_modules,
    test_torch.test_seeds,
    test_torch.test_pinned_memory,
    test_torch.test_data_loaders,
    test_torch.test_training_under_autocast,
    test_torch.test_transforms,
    test_torch.test_compile,
    test_torch.test_a_fork_goes_on,
]
#: With the NumPy kernels of the example, as the device of that file has.
MODELS = [
    test_models.test_tied_weights_stay_tied,
    test_models.test_recurrent_networks,
    test_models.test_a_convolutional_network,
    test_models.test_a_transformer_that_generates,
    test_models.test_workers_of_data_loaders,
    test_models.test_queues,
]


def register_numpy_kernels() -> None:
    test_models.register(memory=ProtectedMemory(), stream=ThreadStream)


def in_memory(register, tests, step: int = 1) -> list:
    device = isolated(register, imports=["helpers.inductor"])
    rest = [pytest.mark.full]
    return [
        pytest.param(
            device(test.__wrapped__), id=f"{register.__name__}-{test.__name__}", marks=rest if at % step else []
        )
        for at, test in enumerate(tests)
    ]


EVERYWHERE = [
    *in_memory(register_protected, [test_models.test_copies_that_need_not_wait, *TESTS], step=3),  # streams would wait
    *in_memory(register_asynchronous, TESTS, step=2),
    *in_memory(register_numpy_kernels, MODELS),
]


@pytest.mark.parametrize("test", EVERYWHERE)
def test_what_holds_in_host_memory(test) -> None:
    test()
