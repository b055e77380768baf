"""Streams and events of a device whose work runs in threads; and those of a device whose work runs at once."""

from __future__ import annotations

import gc
import threading
import time

import numpy as np
import pytest
import torch
from helpers.isolated import isolated
from helpers.npy import backend_kernels, register_asynchronous, register_host
from torch import nn
from torch.testing import assert_close

from customops.backend import BackendError, ProtectedMemory, Stream, ThreadStream, get_backend, register_backend
from customops.errors import UnsupportedError
from customops.testing import run_isolated

pytestmark = pytest.mark.process

on_threads = isolated(register_asynchronous)
at_once = isolated(register_host)

gate = threading.Event()


def wait_at_gate() -> None:
    assert gate.wait(30)


def add_later() -> None:
    """A kernel for ``x + y`` that returns before the sum is there, and waits at the gate."""
    backend = get_backend()

    @backend.kernel("aten::add.Tensor")
    def add(a, b, *, alpha=1):
        out = torch.empty_like(a)

        def work() -> None:
            wait_at_gate()
            np.add(backend.numpy(a), b if isinstance(b, int) else backend.numpy(b), out=backend.numpy(out))

        backend.submit(work)
        return out


def live() -> int:
    return len(get_backend()._options.memory._pages)


@on_threads
def test_work_runs_later_and_in_order() -> None:
    add_later()
    x = torch.ones(3, device="npy")
    y = x + 1 + x
    stream = torch.npy.current_stream()
    assert not stream.query()
    gate.set()
    assert y.tolist() == [3, 3, 3]  # to read it is to wait
    stream.synchronize()  # memory of `x + 1` may be freed after that, as work of the stream
    assert stream.query()
    gate.clear()
    z = x + x
    threading.Timer(0.05, gate.set).start()
    assert (z * 2).tolist() == [4, 4, 4]  # so is a fallback


@on_threads
def test_the_current_stream() -> None:
    npy = torch.npy
    default, side = npy.current_stream(), npy.Stream()
    assert default == npy.default_stream() == torch.accelerator.current_stream()
    assert isinstance(side, torch.Stream)
    assert side.device == torch.device("npy:0")
    assert side != default
    with npy.stream(side) as entered:
        assert entered is side is npy.current_stream()
        assert torch.accelerator.current_stream() == side
        with npy.stream(None):
            assert npy.current_stream() == side
        with npy.Stream() as inner:
            assert npy.current_stream() is inner
        assert npy.current_stream() is side
        with npy.Stream("npy:1") as other:
            assert npy.current_device() == 1
            assert npy.current_stream() == other
            assert npy.current_stream(0) == side
    assert npy.current_stream() == default
    assert npy.current_device() == 0
    torch.accelerator.set_stream(side)
    assert npy.current_stream() == side
    seen = []
    thread = threading.Thread(target=lambda: seen.append(npy.current_stream()))
    thread.start()
    thread.join()
    assert seen == [default]  # of each thread


@on_threads
def test_streams_wait_for_streams() -> None:
    add_later()
    npy, x = torch.npy, torch.ones(3, device="npy")
    side = npy.Stream()
    with side:
        y = x + 1
    npy.current_stream().wait_stream(side)
    copy = torch.empty(3, device="npy").copy_(y)
    event = side.record_event()
    assert not event.query()
    assert not side.query()
    assert not npy.current_stream().query()
    threading.Timer(0.05, gate.set).start()
    assert copy.tolist() == [2, 2, 2]
    assert event.query()
    event.synchronize()
    side.synchronize()
    assert side.query()


@on_threads
def test_streams_do_not_wait_for_others() -> None:
    add_later()
    npy, x = torch.npy, torch.ones(3, device="npy")
    with npy.Stream() as side:
        y = x + 1
    assert (x * 2).tolist() == [2, 2, 2]
    assert not side.query()
    gate.set()
    npy.synchronize()
    assert side.query()
    assert y.tolist() == [2, 2, 2]


@on_threads
def test_events_take_the_time() -> None:
    npy = torch.npy
    start, end = npy.Event(enable_timing=True), torch.Event("npy", enable_timing=True)
    assert start.query()
    start.synchronize()  # of nothing
    start.record()
    get_backend().submit(lambda: time.sleep(0.03))
    end.record()
    with pytest.raises(BackendError, match="the work is not over"):
        start.elapsed_time(end)
    end.synchronize()
    assert 30 <= start.elapsed_time(end) < 3000
    with pytest.raises(BackendError, match="enable_timing=True"):
        npy.Event().elapsed_time(end)
    with pytest.raises(UnsupportedError, match="one process"):
        npy.Event(interprocess=True)
    other = npy.Stream()
    end.wait(other)
    other.synchronize()


@on_threads
def test_memory_lives_until_streams_have_passed() -> None:
    npy, backend = torch.npy, get_backend()
    side = npy.Stream()
    x = torch.ones(3, device="npy")
    npy.synchronize()
    side.submit(wait_at_gate)
    x.record_stream(side)
    del x
    gc.collect()
    assert live() == 1
    gate.set()
    npy.synchronize()
    assert live() == 0
    gate.clear()
    y = torch.ones(3, device="npy")
    backend.submit(wait_at_gate)  # the stream that it was made on
    del y
    assert live() == 1
    gate.set()
    npy.synchronize()
    assert live() == 0
    z = torch.ones(3, device="npy")
    z.record_stream(side)
    del z
    assert live() == 0  # nothing is pending


@on_threads
def test_copies_that_do_not_block() -> None:
    npy, backend = torch.npy, get_backend()
    x = torch.ones(3, device="npy")
    backend.submit(wait_at_gate)
    pinned = torch.full((3,), 7.0).pin_memory()
    d = pinned.to("npy", non_blocking=True)
    e = torch.arange(3).to("npy", torch.float64, non_blocking=True)
    f = torch.empty(3, device="npy").copy_(d, non_blocking=True)
    assert live() == 4
    back = x.to("cpu", non_blocking=True)
    target = torch.zeros(3).pin_memory()
    target.copy_(x, non_blocking=True)
    assert target.tolist() == [0, 0, 0]
    assert not npy.current_stream().query()
    gate.set()
    npy.synchronize()
    assert (back.tolist(), target.tolist()) == ([1, 1, 1], [1, 1, 1])
    assert (d.tolist(), e.tolist(), f.tolist()) == ([7, 7, 7], [0, 1, 2], [7, 7, 7])
    assert x.to("cpu").tolist() == [1, 1, 1]
    loader = torch.utils.data.DataLoader(torch.arange(4.0), batch_size=2, pin_memory=True)
    assert [batch.npy().tolist() for batch in loader] == [[0, 1], [2, 3]]


@on_threads
def test_errors_of_work_reach_who_waits() -> None:
    npy, backend = torch.npy, get_backend()

    def fail() -> None:
        raise ValueError("in a stream")

    backend.submit(fail)
    with pytest.raises(BackendError, match="work on a stream raised ValueError: in a stream") as info:
        npy.synchronize()
    assert isinstance(info.value.__cause__, ValueError)
    assert info.value.where.startswith("test_errors_of_work_reach_who_waits (")
    npy.synchronize()
    x = torch.ones(2, device="npy")
    backend.submit(fail)
    with pytest.raises(BackendError, match="in a stream"):
        x.tolist()
    assert x.tolist() == [1, 1]


@on_threads
def test_errors_of_work_name_the_op_and_the_line() -> None:
    backend, x = get_backend(), torch.ones(2, device="npy")

    def fails(x):
        backend.submit(lambda: backend.numpy(x) @ "no number")
        return x.clone()

    def calls_another() -> None:
        torch.neg(x)

    with backend_kernels(backend, {"aten::neg": fails}):
        for call in (lambda: nn.Sequential(nn.Identity(), Neg())(x), lambda: backend.submit(calls_another)):
            call()
            with pytest.raises(BackendError, match="aten::neg: work on a stream raised") as info:
                torch.npy.synchronize()
            assert info.value.op == "aten::neg"
            assert info.value.where.partition(" ")[0] in ("forward", "calls_another")
            assert f"{__file__}:" in info.value.where
            torch.npy.synchronize()


class Neg(nn.Module):
    def forward(self, x):
        return -x


@on_threads
def test_errors_of_copies_name_the_hook() -> None:
    x, memory = torch.ones(2, device="npy"), get_backend()._options.memory

    def copy_on_device(source, target) -> None:
        raise OSError("the link is down")

    memory.copy_on_device = copy_on_device
    x.clone()
    with pytest.raises(BackendError, match="copy_on_device: work on a stream raised OSError: the link is down") as info:
        torch.npy.synchronize()
    assert info.value.where.startswith("test_errors_of_copies_name_the_hook (")


@on_threads
def test_work_may_use_torch() -> None:
    backend, x, seen = get_backend(), torch.ones(2, device="npy"), []
    with torch.npy.Stream() as side:
        backend.submit(lambda: seen.extend([(x + 1).sum().item(), torch.npy.current_stream()]))
    side.synchronize()
    assert seen == [4, side]


@on_threads
def test_work_that_waits_for_its_own_stream() -> None:
    npy, backend, seen = torch.npy, get_backend(), []

    def work() -> None:
        event = npy.current_stream().record_event()
        npy.current_stream().wait_event(event)  # it is in order as it is
        seen.append(event.query())
        with pytest.raises(BackendError, match="waits for what comes after it"):
            event.synchronize()

    backend.submit(work)
    npy.synchronize()
    assert seen == [False]


@on_threads
def test_threads_submit_to_one_stream() -> None:
    """What `synchronize` waits for is what was started last."""
    backend, stream, seen = get_backend(), torch.npy.current_stream(), []
    start, first, second = type(stream).start, threading.Event(), threading.Event()

    def slowly(self, work) -> None:
        if not first.is_set():
            first.set()
            second.wait(0.3)
        start(self, work)

    type(stream).start = slowly
    threads = [threading.Thread(target=backend.submit, args=(lambda i=i: seen.append(i),)) for i in range(2)]
    threads[0].start()
    assert first.wait(20)
    threads[1].start()
    threads[1].join(0.1)
    second.set()
    for thread in threads:
        thread.join()
    stream.synchronize()
    assert seen == [0, 1]


@on_threads
def test_work_of_another_device() -> None:
    """Kernels have the device of their tensors as the current one, and submit to its stream."""
    add_later()
    npy, seen = torch.npy, []
    x = torch.ones(3, device="npy:1")
    y = x + 1
    assert npy.current_device() == 0
    assert npy.current_stream(0).query()
    assert not npy.current_stream(1).query()
    gate.set()
    assert y.tolist() == [2, 2, 2]
    for _ in range(20):
        assert (x + 1 + x).tolist() == [3, 3, 3]

    def full(size, value, **_):
        seen.append(npy.current_device())
        return NotImplemented

    with backend_kernels(get_backend(), {"aten::full": full}):
        assert torch.full((2,), 3.0, device="npy:1").device.index == 1
        assert torch.full((2,), 3.0, device="npy").device.index == 0
        with torch.npy.device(1):
            assert torch.full((2,), 3.0, device="npy").device.index == 1
    assert seen == [1, 0, 1]


@on_threads
def test_training_on_a_stream() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 2), torch.randn(3, 4)
    model(x).sum().backward()
    expected = model.weight.grad
    model.zero_grad()
    with torch.npy.Stream():
        there = model.npy()
        there(x.npy()).sum().backward()
        assert_close(there.weight.grad.cpu(), expected)


@on_threads
def test_what_is_no_stream() -> None:
    npy = torch.npy
    with pytest.raises(BackendError, match="no stream of the device"):
        npy.set_stream(3)
    with pytest.raises(BackendError, match="no event of the device"):
        npy.current_stream().wait_event(3)
    with pytest.raises(BackendError, match="there is no such device"):
        npy.Stream("npy:2")


@at_once
def test_streams_of_a_device_whose_work_runs_at_once() -> None:
    npy = torch.npy
    start, end = (npy.Event(enable_timing=True) for _ in range(2))
    with npy.Stream() as side:
        start.record()
        x = torch.ones(2, device="npy") + 1
        end.record()
    npy.current_stream().wait_stream(side)
    x.record_stream(side)
    assert side.query()
    assert end.query()
    assert start.elapsed_time(end) > 0
    seen = []
    get_backend().submit(lambda: seen.append(1))
    assert seen == [1]
    assert x.to("cpu", non_blocking=True).tolist() == [2, 2]
    npy.synchronize()
    assert torch.ones(1, device="npy").to("cpu", non_blocking=True).item() == 1
    with pytest.raises(ValueError, match="now"):
        get_backend().submit(fail_now)


def fail_now() -> None:
    raise ValueError("now")


@at_once
def test_torch_makes_the_streams_of_the_device() -> None:
    npy = torch.npy
    for stream in (torch.Stream("npy:1"), torch.Stream(torch.device("npy:1")), torch.Stream(1), torch.Stream(device=1)):
        assert type(stream) is npy.Stream
        assert stream.device == torch.device("npy:1")
    assert torch.Stream().device.index == 0
    assert type(torch.Event()) is type(torch.Event("npy", enable_timing=True)) is npy.Event
    assert isinstance(torch.Stream(), torch.Stream)
    assert issubclass(npy.Stream, torch.Stream)
    assert not isinstance(3, torch.Event)

    class Own(torch.Event):
        """A class of somebody else's."""

    assert isinstance(Own(), Own)
    assert not isinstance(torch.Event(), Own)


# A stream of the user's own ---------------------------------------------------------------------------------------


class Ring(Stream):
    """Runs what was started when somebody waits for it, as a driver that is polled."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__()
        self.pending: list = []

    def start(self, work) -> None:
        self.pending.append(work)

    def wait_for(self, done) -> None:
        while not done.is_set():
            self.pending.pop(0)()

    def query(self) -> bool:
        if self.pending:
            self.pending.pop(0)()
        return super().query()


alone = isolated()


@alone
def test_a_stream_of_ones_own() -> None:
    backend = register_backend("npy", memory=ProtectedMemory(), stream=Ring)
    seen = []
    backend.submit(lambda: seen.append(1))
    backend.submit(lambda: seen.append(2))
    assert seen == []
    x = torch.arange(3.0, device="npy")
    assert (x + 1).tolist() == [1, 2, 3]
    assert seen == [1, 2]
    torch.npy.synchronize()
    side, event = torch.npy.Stream(), torch.npy.Event()
    with side:
        backend.submit(lambda: seen.append(3))
        event.record()
        backend.submit(lambda: seen.append(4))
    torch.npy.current_stream().wait_event(event)
    backend.submit(lambda: seen.append(5))
    torch.npy.current_stream().synchronize()
    assert seen == [1, 2, 3, 5]
    assert event.query()
    last = side.record_event()
    assert not last.query()  # which runs some of it
    last.synchronize()
    assert last.query()
    assert seen == [1, 2, 3, 5, 4]


class Full(Stream):
    """It cannot begin any work."""

    def start(self, work) -> None:
        raise RuntimeError("the queue is full")


def full() -> None:
    register_backend("npy", memory=ProtectedMemory(), stream=Full)
    with pytest.raises(RuntimeError, match="the queue is full"):
        torch.ones(2, device="npy")
    torch.npy.synchronize()


def test_nothing_waits_for_work_that_was_not_started() -> None:
    """Nor does the end of the process."""
    run_isolated(full, timeout=60)


def test_a_stream_without_a_device() -> None:
    with pytest.raises(BackendError, match="a stream is made for a device") as info:
        ThreadStream()
    assert "stream=ThreadStream" in info.value.fix
