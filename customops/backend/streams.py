"""Streams and events: work of a device in order, beside the program. By default all work runs at once."""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from customops.backend import _compat
from customops.backend.errors import BackendError
from customops.errors import UnsupportedError

Work = Callable[[], object]


class Stream(torch.Stream):
    """Work of a device, in order: ``torch.<name>.Stream``. It runs at once, unless a subclass overrides `start`.

    A subclass, for ``register_backend(..., stream=)``, may keep work for a thread or for hardware; where nobody runs it
    by itself, it overrides `wait_for`, too. Everything else, events as well, is made of these. An error of work is
    raised by the next call that waits for the stream.
    """

    streams: ClassVar[Streams]

    def __new__(cls, device: Any = None, priority: int = 0) -> Stream:
        if not hasattr(cls, "streams"):
            fix = f"torch.<name>.Stream(); and the class itself in register_backend(..., stream={cls.__name__})"
            raise BackendError("a stream is made for a device that is registered", op=cls.__name__, fix=fix)
        return cls.streams.make(cls, cls.streams.index_of(device), next(cls.streams.ids))  # type: ignore[no-any-return]

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self._last: threading.Event | None = None  #: the end of what was submitted last
        self._order = threading.RLock()  #: of the threads that submit
        self._error: BaseException | None = None

    def start(self, work: Work) -> None:
        """Have ``work()`` run after all that was started before. It may return earlier."""
        work()

    def wait_for(self, done: threading.Event) -> None:
        """Return when some work of this stream has set `done`. Another thread may call it, or work of another stream.

        Here it waits. A stream whose work nobody runs by itself runs it here, until `done` is set.
        """
        done.wait()

    def after_fork(self) -> None:
        """This is another process now, without the threads of the first."""

    def submit(self, work: Work, *, keep: object = None, wait: bool = False) -> None:
        """Have ``work()`` run after all that was submitted before, with `keep` alive until then."""
        if not self.streams.asynchronous or self.streams.here.running is self:
            work()
            return
        self.enqueue(work, keep)
        if wait:
            self.synchronize()

    def enqueue(self, work: Work, keep: object = None) -> threading.Event:
        """The same, after what was submitted before even if that is what calls this; it returns what says the end."""
        done = threading.Event()
        with self._order:  # what was started last is what is waited for
            self._last = done
            try:
                self.start(functools.partial(self._run, [keep, work], done))
            except BaseException:
                done.set()  # nothing is to wait for what was not started
                raise
        return done

    def _run(self, item: list[Any], done: threading.Event) -> None:
        here = self.streams.here
        before, here.running = here.running, self
        try:
            with self:
                item.pop()()
        except BaseException as error:  # the thread that waits raises it
            self._error = self._error or error
        finally:
            item.clear()  # memory that only this work used is gone when it is over
            here.running = before
            done.set()

    def query(self) -> bool:
        """Is all work over? A stream whose work nobody runs by itself may run what is ready before it answers."""
        return self._last is None or self._last.is_set()

    def synchronize(self) -> None:
        """Wait until all work is over."""
        if self._last is not None and self.streams.here.running is not self:
            self.wait_for(self._last)
        error, self._error = self._error, None
        if error is not None:
            raise error

    def record_event(self, event: Any = None) -> Any:
        event = event if event is not None else self.streams.Event()
        event.record(self)
        return event

    def wait_event(self, event: Any) -> None:
        """Have later work wait for what `event` has recorded."""
        if not isinstance(event, Event):
            fix = f"torch.{self.streams.name}.Event()"
            raise BackendError("this is no event of the device", got=repr(event), fix=fix)
        if event._done is not None and event._stream is not self:  # whose work is in order as it is
            self.submit(functools.partial(event._stream.wait_for, event._done))

    def wait_stream(self, stream: Any) -> None:
        """Have later work wait for all work that another stream has now."""
        self.wait_event(self.streams.find(stream).record_event())

    def __enter__(self) -> Stream:
        self.streams.enter(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.streams.leave()


class ThreadStream(Stream):
    """A stream whose work runs in a thread of its own."""

    _queue: queue.SimpleQueue[Work | None] | None = None
    _starting = threading.RLock()

    def start(self, work: Work) -> None:
        with self._starting:
            if self._queue is None:
                self._queue = queue.SimpleQueue()
                threading.Thread(target=_serve, args=(self._queue,), daemon=True, name=repr(self)).start()
                weakref.finalize(self, self._queue.put, None)
        self._queue.put(work)

    def after_fork(self) -> None:
        self._queue = None


def _serve(work_of: queue.SimpleQueue[Work | None]) -> None:
    while (work := work_of.get()) is not None:
        work()
        work = None  # what it kept alive goes now


class Event(torch.Event):
    """A point in the work of a stream: ``torch.<name>.Event``."""

    streams: ClassVar[Streams]

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Event:
        if interprocess:
            problem = "events of a device written in Python are those of one process"
            raise UnsupportedError(problem, op="Event", got="interprocess=True", fix="leave it out")
        return super().__new__(cls, device=torch.device(cls.streams.name), enable_timing=enable_timing)

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self._timed = enable_timing
        self._done: threading.Event | None = None
        self._stream: Any = None  #: the one that it was recorded on
        self._time = 0.0

    def record(self, stream: Any = None) -> None:
        """Stand for all work that the stream has now; by default, the current one."""
        self._stream = self.streams.find(stream)
        self._done = self._stream.enqueue(self._mark)

    def _mark(self) -> None:
        self._time = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Have later work of the stream wait for this."""
        self.streams.find(stream).wait_event(self)

    def query(self) -> bool:
        if self._done is not None and not self._done.is_set():
            self._stream.query()
        return self._done is None or self._done.is_set()

    def synchronize(self) -> None:
        """Wait here until the work is over."""
        if self._done is None or self._done.is_set():
            return
        if self.streams.here.running is self._stream:
            problem, fix = "work of a stream waits for what comes after it", "leave it out: a stream keeps the order"
            raise BackendError(problem, op="Event.synchronize", got=repr(self._stream), fix=fix)
        self._stream.wait_for(self._done)

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this event to another one."""
        for event in (self, end_event):
            if not event._timed or event._done is None or not event.query():
                problem = "no time was taken, or the work is not over"
                fix = f"torch.{self.streams.name}.Event(enable_timing=True), record() and synchronize() of both"
                raise BackendError(problem, op="elapsed_time", fix=fix)
        return float(end_event._time - self._time) * 1000


def standing_in(original: type, make: Callable[..., Any]) -> type:
    """A class for the place of one of torch's, whose attributes cannot be set: ``make(...)`` may return something else.

    Torch's own guard for a device in Python makes streams and events that do nothing.
    """

    class Meta(type(original)):  # type: ignore[misc]
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            if cls is not stand_in:
                return super().__call__(*args, **kwargs)
            made = make(*args, **kwargs)
            return original(*args, **kwargs) if made is NotImplemented else made

        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, original) if cls is stand_in else super().__instancecheck__(value)

        def __subclasscheck__(cls, other: Any) -> bool:
            return issubclass(other, original) if cls is stand_in else super().__subclasscheck__(other)

    names = {"__module__": original.__module__, "__doc__": original.__doc__}
    stand_in: Any = Meta(original.__name__, (original,), names)
    return stand_in  # type: ignore[no-any-return]


class Streams:
    """The streams of a device type: which is current, by thread and device."""

    index_of: Callable[[Any], int]  #: the device module's

    def __init__(self, name: str, kind: type[Stream]) -> None:
        self.name = name
        self.asynchronous = kind.start is not Stream.start
        self.ids = itertools.count(1)
        self.Stream: Any = type("Stream", (kind,), {"streams": self, "__doc__": kind.__doc__})
        self.Event: Any = type("Event", (Event,), {"streams": self, "__doc__": Event.__doc__})
        self._default: dict[int, Stream] = {}
        self._all: weakref.WeakValueDictionary[tuple[int, int], Stream] = weakref.WeakValueDictionary()
        self._lock = threading.RLock()
        self.here = Current()
        if self.asynchronous:
            atexit.register(self.wait)
            os.register_at_fork(after_in_child=self._after_fork)

    def make(self, kind: Any, index: int, number: int) -> Any:
        stream = torch.Stream.__new__(kind, stream_id=number, device_index=index, device_type=_compat.DEVICE_TYPE)
        self._all[index, number] = stream
        return stream

    def _is_ours(self, device: Any) -> bool:
        """Is it a device of this type, as torch names one? None and a number are of the current accelerator's."""
        found = torch.accelerator.current_accelerator() if device is None or type(device) is int else device
        return found is not None and torch.device(found).type == self.name

    def make_stream(self, device: Any = None, priority: int = 0, **other: Any) -> Any:
        """What ``torch.Stream(...)`` is to return."""
        return NotImplemented if other or not self._is_ours(device) else self.Stream(device, priority)

    def make_event(self, device: Any = None, **options: Any) -> Any:
        return self.Event(**options) if self._is_ours(device) else NotImplemented

    def default(self, index: int) -> Any:
        with self._lock:
            if index not in self._default:
                self._default[index] = self.make(self.Stream, index, 0)
                self._default[index].__init__()  # type: ignore[misc]
        return self._default[index]

    def current(self, index: int) -> Any:
        return self.here.streams.get(index) or self._default.get(index) or self.default(index)

    def find(self, stream: Any = None) -> Any:
        """Ours of torch's stream; None is the current one."""
        if stream is None:
            return self.current(self.here.index)
        if isinstance(stream, Stream):
            return stream
        if isinstance(stream, torch.Stream) and stream.device.type == self.name:
            found = self._all.get((stream.device_index, stream.stream_id))
            if found is not None or stream.stream_id == 0:
                return found or self.default(stream.device_index)
        expected, fix = f"a stream of {self.name!r}", f"torch.{self.name}.Stream()"
        raise BackendError("this is no stream of the device", expected=expected, got=repr(stream), fix=fix)

    def set(self, stream: Any) -> None:
        found = self.find(stream)
        self.here.streams[found.device_index] = found
        self.here.index = found.device_index

    def enter(self, stream: Stream) -> None:
        self.here.entered.append((self.here.streams.get(stream.device_index), stream, self.here.index))
        self.set(stream)

    def leave(self) -> None:
        before, stream, self.here.index = self.here.entered.pop()
        self.here.streams[stream.device_index] = before

    def wait(self, index: int | None = None) -> None:
        """Wait for all work of a device, or of all."""
        for stream in list(self._all.values()):
            if index is None or stream.device_index == index:
                stream.synchronize()

    def _after_fork(self) -> None:
        for stream in list(self._all.values()):
            stream._last = stream._error = None
            stream._order = threading.RLock()
            stream.after_fork()


class Current(threading.local):
    """The state of a thread: the device, the streams, and what has access to memory of the device."""

    index = 0  #: of the current device
    running: Stream | None = None  #: the one whose work this thread runs

    def __init__(self) -> None:
        self.streams: dict[int, Stream | None] = {}  #: by device: those that are not the default
        self.entered: list[tuple[Stream | None, Stream, int]] = []  #: what was current before, and the one entered
        self.scopes: list[Any] = []  #: the kernels, or blocks of the user, in which memory is open to the host
