"""Many processes: a process group of torch.distributed for the device, made of gloo and of the backend's collectives.

torch hands each operation to a method of a `ProcessGroup`, from Python and from C++ (DDP's reducer, the functional
collectives). Here each of these methods lends the tensors and calls gloo, or calls an object of the user.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from customops import _torch
from customops.backend import _compat
from customops.backend._imports import when_loaded
from customops.backend.errors import BackendError, WrongDeviceError

if TYPE_CHECKING:
    from customops.backend.device_module import DeviceModule
    from customops.backend.memory import Memory

#: ``collectives(group)``: an object with some of the methods below, for one group of processes.
Collectives = Callable[[dist.ProcessGroup], object]

_zip = functools.partial(zip, strict=True)

# What torch asks for, in terms of the methods of `Collectives` --------------------------------------------------------


def _parts(whole: Tensor, processes: int, like: Tensor) -> list[Tensor]:
    """A tensor for each process, each as large as `like`."""
    return list(whole.view(processes, *like.shape).unbind())


def _split(whole: Tensor, processes: int, sizes: Sequence[int]) -> list[Tensor]:
    return list(whole.split(list(sizes) or [len(whole) // processes] * processes))


def _op(options: Any) -> Any:
    """``dist.ReduceOp.SUM``; an object that holds the factor too, and is equal to none of these, for PREMUL_SUM."""
    op = options.reduceOp
    return op if op.op == dist.ReduceOp.PREMUL_SUM else op.op


#: A method of torch's groups, by the method of the user that does the same for one tensor, and by what this gets for
#: each tensor; n is the number of processes. ``all_gather``, ``scatter`` and the like get lists of tensors, one for
#: each process, in the place of a tensor of all as well.
FORMS: dict[str, tuple[str, Callable[..., list[tuple[Any, ...]]]]] = {
    "broadcast": ("broadcast", lambda n, xs, o: [(x, o.rootRank) for x in xs]),
    "allreduce": ("all_reduce", lambda n, xs, o: [(x, _op(o)) for x in xs]),
    "allreduce_coalesced": ("all_reduce", lambda n, xs, o: [(x, _op(o)) for x in xs]),
    "reduce": ("reduce", lambda n, xs, o: [(x, o.rootRank, _op(o)) for x in xs]),
    "allgather": ("all_gather", lambda n, outs, xs, o=None: [*_zip(outs, xs)]),
    "allgather_coalesced": ("all_gather", lambda n, outs, xs, o=None: [*_zip([*map(list, _zip(*outs))], xs)]),
    "all_gather_single": ("all_gather", lambda n, out, x, o=None: [(_parts(out, n, x), x)]),
    "all_gather_single_coalesced": (
        "all_gather",
        lambda n, outs, xs, o=None: [(_parts(out, n, x), x) for out, x in _zip(outs, xs)],
    ),
    "gather": ("gather", lambda n, outs, xs, o: [(outs[0] if outs else None, xs[0], o.rootRank)]),
    "gather_single": ("gather", lambda n, out, x, o: [(_parts(out, n, x) if len(out) else None, x, o.rootRank)]),
    "scatter": ("scatter", lambda n, outs, xs, o: [(outs[0], xs[0] if xs else None, o.rootRank)]),
    "reduce_scatter": ("reduce_scatter", lambda n, outs, xs, o: [(out, x, _op(o)) for out, x in _zip(outs, xs)]),
    "reduce_scatter_single": ("reduce_scatter", lambda n, out, x, o: [(out, _parts(x, n, out), _op(o))]),
    "reduce_scatter_single_coalesced": (
        "reduce_scatter",
        lambda n, outs, xs, o: [(out, _parts(x, n, out), _op(o)) for out, x in _zip(outs, xs)],
    ),
    "alltoall": ("all_to_all", lambda n, outs, xs, o: [(outs, xs)]),
    "all_to_all_single": ("all_to_all", lambda n, out, x, to, of, o: [(_split(out, n, to), _split(x, n, of))]),
    "send": ("send", lambda n, xs, to, tag: [(xs[0], to, tag)]),
    "recv": ("recv", lambda n, xs, origin, tag: [(xs[0], origin, tag)]),
    "recv_anysource": ("recv", lambda n, xs, tag: [(xs[0], None, tag)]),
    "barrier": ("barrier", lambda n, o=None: [()]),
}
#: What older callers still call some of them.
ALIASES = {
    "_allgather_base": "all_gather_single",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "_reduce_scatter_base": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
    "alltoall_base": "all_to_all_single",
    "gather_into_tensor": "gather_single",
}
FORMS |= {alias: FORMS[name] for alias, name in ALIASES.items()}

# The group ------------------------------------------------------------------------------------------------------------


class DeviceGroup(dist.ProcessGroup):
    """A group of processes for the tensors of the device, and for those of the CPU."""

    def __init__(
        self,
        module: DeviceModule,
        collectives: Collectives | None,
        store: Any,
        rank: int,
        size: int,
        timeout: timedelta,
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # of two, the one for classes of Python
        self._module, self._store = module, store
        self._memory: Memory = module._memory
        gloo = _compat.gloo(store, rank, size, timeout)
        self._host = dist.ProcessGroup(store, rank, size)  #: torch's own, for the tensors that are lent
        _compat.serve(self._host, ("cpu",), self.BackendType.GLOO, gloo)
        _compat.serve(self, (self._memory.name, "cpu"), self.BackendType.CUSTOM, gloo)
        self._collectives = collectives(self) if collectives is not None else None

    def get_group_store(self) -> Any:
        return self._store

    def _run(self, name: str, *args: Any) -> Any:
        """A method of torch's groups."""
        here, kinds = self._memory.name, {tensor.device.type for tensor in _flat(args)}
        if len(kinds) > 1 or not kinds <= {here, "cpu"}:
            problem = "one collective has tensors of one device, which the group serves"
            expected, got = f"tensors on {here}, or on the CPU", ", ".join(sorted(kinds))
            raise WrongDeviceError(problem, op=name, expected=expected, got=got, fix=f"x.to({here!r})")
        method, form = FORMS[name]
        own = getattr(self._collectives, method, None) if kinds != {"cpu"} else None
        if own is None:
            return self._by_gloo(name, args)
        try:
            calls = form(self.size(), *args)
        except (AttributeError, TypeError) as error:
            fix = f"torch.distributed.{method}(...), which takes a group"
            raise BackendError("this method of a group is called in a short form", op=name, fix=fix) from error
        work = self._by_user(name, own, calls, _flat(args[:1]))
        return self._by_gloo(name, args) if work is NotImplemented else work

    def _by_user(self, name: str, own: Callable[..., Any], calls: list[tuple[Any, ...]], outputs: list[Tensor]) -> Any:
        """Work of the user's method, which may go on when it returns; NotImplemented where gloo is to do it."""
        futures: list[torch.futures.Future[Any]] = []
        for number, each in enumerate(calls):
            with torch.no_grad():
                result = own(*each)
            if result is NotImplemented and not number:
                return result
            if isinstance(result, torch.futures.Future):
                futures.append(result)
            elif result is not None:
                got = "NotImplemented, after it took some of the tensors" if result is NotImplemented else repr(result)
                problem = f"{own.__name__} returned something else than a collective does"
                raise BackendError(problem, op=name, expected="None, or a torch.futures.Future", got=got)
        return _Work(_Futures(futures), lambda: outputs)

    def _by_gloo(self, name: str, args: tuple[Any, ...]) -> Any:
        """Work of gloo on memory of the host, and what is written there goes back where that is a copy."""
        pairs: list[tuple[Tensor, Tensor]] = []

        def lend(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            pairs.append((value, self._lend(value)))
            return pairs[-1][1]

        lent = _torch.trees.tree_map(lend, args)
        try:
            work = getattr(self._host, name)(*lent)
        except RuntimeError as error:
            if type(error) is not RuntimeError:  # of the connection
                raise
            fix = f"tensors of fitting sizes and dtypes; or a method {FORMS[name][0]} of what collectives= returns"
            raise BackendError("gloo refuses it", op=name, got=str(error), fix=fix) from error
        written = pairs[: len(_flat(args[:1]))] if name != "send" else []
        copies = [(tensor, host) for tensor, host in written if tensor.data_ptr() != host.data_ptr()]
        lock = threading.Lock()

        def finish() -> list[Tensor]:
            with lock:
                while copies:
                    tensor, host = copies.pop()
                    tensor.copy_(host)
            return [tensor for tensor, _ in written]

        return _Work(work, finish)

    def _lend(self, tensor: Tensor) -> Tensor:
        """The bytes of a tensor, for gloo: its own, or a copy of them where its memory is not that of the host."""
        if not tensor.is_cpu:
            self._module.synchronize(tensor.device)
        return self._memory.lend(tensor)


class _Work(dist.Work):
    """Work that results in the tensors of the device. (What torch makes of a future swallows its error in `wait`.)"""

    def __init__(self, work: Any, finish: Callable[[], list[Tensor]]) -> None:
        super().__init__()
        self._work, self._finish = work, finish

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._work.wait(timeout)
        self._finish()
        return True

    def synchronize(self) -> None:
        self.wait()

    block_current_stream = synchronize

    def is_completed(self) -> bool:
        return self._work.is_completed()  # type: ignore[no-any-return]

    def get_future(self) -> torch.futures.Future[Any]:
        return self._work.get_future().then(lambda done: (done.wait(), self._finish())[1])  # type: ignore[no-any-return]

    def _source_rank(self) -> int:
        return self._work._source_rank()  # type: ignore[no-any-return]


class _Futures:
    """Work of the user: that of several futures, of none where it was done at once."""

    def __init__(self, futures: list[torch.futures.Future[Any]]) -> None:
        self.futures = futures

    def wait(self, timeout: object = None) -> None:
        for future in self.futures:
            future.wait()

    def is_completed(self) -> bool:
        return all(future.done() for future in self.futures)

    def get_future(self) -> torch.futures.Future[Any]:
        return torch.futures.collect_all(self.futures).then(self.wait)  # where one has failed, it is done as well


def _flat(value: Any) -> list[Tensor]:
    return [leaf for leaf in _torch.trees.tree_leaves(value) if isinstance(leaf, Tensor)]


def _method(name: str) -> Callable[..., Any]:
    def method(group: DeviceGroup, *args: Any, **options: Any) -> Any:
        return group._run(name, *args, *options.values())

    return _torch.dynamo.outside_dynamo(method)


for _name in FORMS:
    if hasattr(dist.ProcessGroup, _name):
        setattr(DeviceGroup, _name, _method(_name))


# What torch finds by itself -------------------------------------------------------------------------------------------


def install(module: DeviceModule, collectives: Collectives | None, undo: contextlib.ExitStack) -> None:
    """Make the group the default for the device: ``init_process_group()``, or by name, ``"cpu:gloo,<name>:<name>"``."""
    name = module._memory.name
    dist.Backend.register_backend(name, functools.partial(DeviceGroup, module, collectives), devices=[name, "cpu"])
    library = _compat.Library("_c10d_functional", "IMPL", "PrivateUse1")
    undo.callback(_torch.library.destroy_library, library)
    for op, kernel in _compat.functional_outs():
        _torch.library.impl(library, op, kernel, "PrivateUse1")
    change = functools.partial(_compat.change_offsets, _ShardState)
    when_loaded("torch.distributed.tensor._random", change)


class _ShardState:
    """The state of a CPU generator, for DTensor, which moves the offset of Philox, so that shards draw other numbers.

    It first sets the offset to that of the shard, and at the end to what comes next on all ranks.
    """

    def __init__(self, state: Tensor) -> None:
        generator = torch.Generator()
        generator.set_state(state.cpu())
        seed = int(torch.randint(2**62, (), generator=generator))
        self.state, self._next, self._seed = state.cpu(), generator.get_state(), seed
        self._of_shard = False

    @property
    def offset(self) -> Tensor:
        return torch.zeros(1, dtype=torch.int64)

    @offset.setter
    def offset(self, offset: Tensor) -> None:
        shard = torch.Generator().manual_seed(self._seed + int(offset))
        self.state = self._next if self._of_shard else shard.get_state()
        self._of_shard = True
