"""What the processes of a mesh do with ops that have sharding rules; each section by itself says what went wrong."""

from __future__ import annotations

import contextlib
import datetime
import importlib
import importlib.util
import itertools
import json
import os
import traceback
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from customops import CustomOpDef, custom_op
from customops.errors import ArgumentError, UnsupportedError
from helpers.processes import end_in_time

#: By the number of processes.
SECTIONS: dict[int, dict[str, Callable[[], None]]] = {2: {}, 4: {}}


def section(world: int) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def add(fn: Callable[[], None]) -> Callable[[], None]:
        SECTIONS[world][fn.__name__] = fn
        return fn

    return add


def tensor() -> Any:
    return importlib.import_module("torch.distributed.tensor")


# Ops ------------------------------------------------------------------------------------------------------------


def linear_(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    return F.linear(x, w, b)


def rms_norm_(x: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w


def swiglu_(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def softmax_(x: Tensor, dim: int = -1) -> Tensor:
    return torch.softmax(x, dim)


def concat_(xs: list[Tensor], dim: int = 0) -> Tensor:
    return torch.cat(xs, dim)


def of(name: str, fn: Callable[..., Any]) -> CustomOpDef[Any, Any]:
    op = custom_op(f"tests_sharding::{name}", lambda *args: fn(*args).clone(), mutates_args=(), schema=SCHEMAS[fn])
    op.register_fake(lambda *args: torch.empty_like(fn(*args), memory_format=torch.contiguous_format))
    op.register_reference(fn, gives="gradients")
    return op


SCHEMAS = {
    linear_: "(Tensor x, Tensor w, Tensor? b=None) -> Tensor",
    rms_norm_: "(Tensor x, Tensor w, float eps=1e-6) -> Tensor",
    swiglu_: "(Tensor gate, Tensor up) -> Tensor",
    softmax_: "(Tensor x, int dim=-1) -> Tensor",
    concat_: "(Tensor[] xs, int dim=0) -> Tensor",
}


def rules() -> dict[Any, Callable[..., Any]]:
    distributed = tensor()
    shard, whole, partial = distributed.Shard, distributed.Replicate(), distributed.Partial()

    def linear(x: Any, w: Any, b: Any = None) -> Any:
        rest = [] if b is None else [whole]
        rows = [([shard(dim)], [shard(dim), whole, *rest]) for dim in range(x.ndim - 1)]
        inner = [([partial], [shard(x.ndim - 1), shard(1)])] if b is None else []
        columns = ([shard(x.ndim - 1)], [whole, shard(0), *([] if b is None else [shard(0)])])
        return [*rows, columns, *inner, ([whole], [whole, whole, *rest])]

    def rms_norm(x: Any, w: Any, eps: float = 1e-6) -> Any:
        return [([shard(dim)], [shard(dim), whole, None]) for dim in range(x.ndim - 1)]

    def swiglu(gate: Any, up: Any) -> Any:
        return [(shard(dim), {"gate": shard(dim), "up": shard(dim)}) for dim in range(gate.ndim)]

    def softmax(x: Any, dim: int = -1) -> Any:
        return [([shard(d)], [shard(d), None]) for d in range(x.ndim) if d != dim % x.ndim]

    def concat(xs: Any, dim: int = 0) -> Any:
        return [([shard(d)], [[shard(d)] * len(xs), None]) for d in range(xs[0].ndim) if d != dim % xs[0].ndim]

    return {linear_: linear, rms_norm_: rms_norm, swiglu_: swiglu, softmax_: softmax, concat_: concat}


def with_rule(name: str, fn: Callable[..., Any]) -> CustomOpDef[Any, Any]:
    op = of(name, fn)
    op.register_sharding(rules()[fn])
    return op


def distribute(x: Any, mesh: Any, placements: Sequence[Any]) -> Any:
    """A DTensor, or a list of them; of a partial sum the first process has all."""
    partial = [i for i, each in enumerate(placements) if each.is_partial()]
    if partial:
        first = all(mesh.get_local_rank(i) == 0 for i in partial)
        local = (
            tensor()
            .distribute_tensor(
                x if first else torch.zeros_like(x),
                mesh,
                [tensor().Replicate() if i in partial else each for i, each in enumerate(placements)],
                src_data_rank=None,
            )
            .to_local()
        )
        strides = x.stride()
        return tensor().DTensor.from_local(local, mesh, placements, shape=x.shape, stride=strides)
    return tensor().distribute_tensor(x, mesh, placements, src_data_rank=None)


def compare(op: Any, fn: Callable[..., Any], args: Sequence[Any], mesh: Any, placements: Sequence[Any]) -> None:
    """A call with DTensors, and its gradients, against the plain ones; `placements` of each tensor in turn."""
    places = iter(placements)
    of_lists = [each if isinstance(each, list) else [each] for each in args]
    plain = [[x.clone().requires_grad_() if isinstance(x, Tensor) else x for x in each] for each in of_lists]
    split = [
        [distribute(x, mesh, next(places)).detach().requires_grad_() if isinstance(x, Tensor) else x for x in each]
        for each in of_lists
    ]
    calls = [[e if isinstance(a, list) else e[0] for a, e in zip(args, s, strict=True)] for s in (plain, split)]
    expected, got = fn(*calls[0]), op(*calls[1])
    torch.testing.assert_close(got.full_tensor(), expected)
    weights = torch.linspace(-1, 2, expected.numel()).reshape(expected.shape)
    (expected * weights).sum().backward()
    (got.full_tensor() * weights).sum().backward()
    for one, other in zip(itertools.chain(*split), itertools.chain(*plain), strict=True):
        if isinstance(one, Tensor):
            torch.testing.assert_close(one.grad.full_tensor(), other.grad)


def numbers(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator)


def inputs() -> dict[Any, list[list[Any]]]:
    """For each function calls with tensors of which some do not split evenly."""
    return {
        linear_: [[numbers(5, 4), numbers(6, 4)], [numbers(2, 3, 4), numbers(5, 4), numbers(5)]],
        rms_norm_: [[numbers(5, 4), numbers(4)], [numbers(4, 3, 2), numbers(2), 1e-5]],
        swiglu_: [[numbers(4, 3), numbers(4, 3)]],
        softmax_: [[numbers(5, 4), 0], [numbers(4, 3, 2)]],
        concat_: [[[numbers(4, 3), numbers(2, 3)]], [[numbers(3, 4), numbers(3, 2), numbers(3, 2)], 1]],
    }


# Two processes --------------------------------------------------------------------------------------------------


@section(2)
def every_pair_of_placements() -> None:
    distributed = tensor()
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    for fn, calls in inputs().items():
        op = with_rule(fn.__name__, fn)
        for args in calls:
            tensors = [x for each in args for x in (each if isinstance(each, list) else [each])]
            tensors = [x for x in tensors if isinstance(x, Tensor)]
            options = [
                [distributed.Replicate(), *map(distributed.Shard, range(x.dim())), distributed.Partial()]
                for x in tensors[:2]
            ] + [[distributed.Replicate(), distributed.Shard(0)] for _ in tensors[2:]]
            for placements in itertools.islice(itertools.product(*options), 0, None, 2):
                compare(op, fn, args, mesh, [[each] for each in placements])


@section(2)
def communicates_only_what_is_needed() -> None:
    """What an op can compute on its part stays there; RMS norm gathers the dimension that it reduces, and no other."""
    distributed = tensor()
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    counting = importlib.import_module("torch.distributed.tensor.debug").CommDebugMode
    shard, whole = distributed.Shard, distributed.Replicate()

    def counted(op: Any, *args: Any) -> tuple[int, Any]:
        with counting() as mode:
            result = op(*args)
        return mode.get_total_counts(), result

    x, w = numbers(4, 6), numbers(8, 6)
    linear = with_rule("counted_linear", linear_)
    rows = counted(linear, distribute(x, mesh, [shard(0)]), distribute(w, mesh, [whole]))
    columns = counted(linear, distribute(x, mesh, [whole]), distribute(w, mesh, [shard(0)]))
    inner = counted(linear, distribute(x, mesh, [shard(1)]), distribute(w, mesh, [shard(1)]))
    found = [(count, result.placements[0]) for count, result in (rows, columns, inner)]
    assert found == [(0, shard(0)), (0, shard(1)), (0, distributed.Partial())]
    norm, weight = with_rule("counted_norm", rms_norm_), distribute(numbers(6), mesh, [whole])
    assert counted(norm, distribute(x, mesh, [shard(0)]), weight)[0] == 0
    assert counted(norm, distribute(x, mesh, [shard(1)]), weight)[0] == 1


@section(2)
def several_kernels() -> None:
    """Each process chooses for its part of a tensor; a preference counts for that, too."""
    distributed = tensor()
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    ran: list[str] = []

    def double(x: Tensor) -> Tensor:
        return x * 2

    def logged(name: str) -> Callable[[Tensor], Tensor]:
        return lambda x: ran.append(name) or x * 2  # type: ignore[func-returns-value]

    op = custom_op("tests_sharding::several", double, mutates_args=(), reference=double)
    placements = [distributed.Replicate(), distributed.Shard(0)]
    op.register_sharding(lambda x: [([each], [each]) for each in placements])
    op.register_kernel("cpu", logged("few"), name="few", when=lambda x: x.shape[0] <= 4 or "4 rows")
    op.register_kernel("cpu", logged("many"), name="many", priority=-1)
    compiled = torch.compile(lambda x: op(x) + 0, backend="aot_eager", fullgraph=True)
    for call in (op, compiled):
        for rows, placement, name in (
            (8, distributed.Shard(0), "few"),
            (10, distributed.Shard(0), "default"),
            (8, distributed.Replicate(), "default"),
            (3, distributed.Shard(0), "few"),  # parts of other sizes
        ):
            x = numbers(rows, 6)
            with op.prefer("few", "many") if name == "default" else contextlib.nullcontext():
                result = call(distribute(x, mesh, [placement]))
            torch.testing.assert_close(result.full_tensor(), 2 * x)
            assert ran == ["few" if name == "few" else "many"], (rows, placement)
            ran.clear()


@section(2)
def other_arguments() -> None:
    """Each of the arguments that are no tensors is part of what is decided."""
    distributed = tensor()
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))

    def reduce(x: Tensor, keepdim: bool, mode: str = "sum", *, frac: float = 1.0) -> Tensor:
        x = x[:, : int(x.shape[1] * frac)]
        return x.sum(1, keepdim=keepdim) if mode == "sum" else x.amax(1, keepdim=keepdim)

    def pad(x: Tensor, sizes: list[int]) -> Tensor:
        return F.pad(x, [0, sizes[0] - x.shape[1]])

    def stated(x: Any, keepdim: bool, mode: str = "sum", *, frac: float = 1.0) -> Any:
        reduced = distributed.Partial(mode if frac == 1.0 else "sum")
        rows = ([distributed.Shard(0)], [distributed.Shard(0), None])
        return [rows, ([reduced], [distributed.Shard(1), None])] if frac == 1.0 else [rows]

    def stated_pad(x: Any, sizes: list[int]) -> Any:
        return [([distributed.Shard(0)], [distributed.Shard(0), None])]

    op = custom_op("tests_sharding::reduce", reduce, mutates_args=())
    padded = custom_op("tests_sharding::pad", pad, mutates_args=())
    op.register_fake(lambda x, keepdim, mode="sum", *, frac=1.0: reduce(x, keepdim, mode, frac=frac))
    padded.register_fake(pad)
    op.register_sharding(stated)
    padded.register_sharding(stated_pad)
    x = numbers(4, 6)
    for place in (0, 1):
        for order in (1, -1):
            split = distribute(x, mesh, [distributed.Shard(place)])
            for keepdim, mode, frac in [*itertools.product((True, False), ("sum", "max"), (0.5, 1.0))][::order]:
                got = op(split, keepdim, mode, frac=frac)
                torch.testing.assert_close(got.full_tensor(), reduce(x, keepdim, mode, frac=frac))
            for size in (7, 9, 8):
                torch.testing.assert_close(padded(split, [size]).full_tensor(), pad(x, [size]))


class Parts(NamedTuple):
    whole: Tensor
    double: Tensor | None


@section(2)
def forms_of_arguments_and_results() -> None:
    distributed = tensor()
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    shard, whole = distributed.Shard, distributed.Replicate()
    x = numbers(4, 6)

    def parts(xs: list[Tensor], twice: bool) -> Parts:
        return Parts(torch.cat(xs, 1), xs[0] * 2 if twice else None)

    def pieces(x: Tensor, count: int) -> list[Tensor]:
        return [each.clone() for each in x.chunk(count, -1)]

    def scale(x: Tensor, *, by: Tensor | None = None) -> Tensor:
        return x * by if by is not None else x.clone()

    def shards(x: Any, *rest: Any, **named: Any) -> Any:
        return [(shard(0), dict.fromkeys(("xs",) if isinstance(x, tuple) else ("x",), shard(0)))]

    ops: dict[Any, Any] = {}
    for fn in (parts, pieces, scale):
        ops[fn] = custom_op(f"tests_sharding::{fn.__name__}", fn, mutates_args=())
        ops[fn].register_fake(fn)
    ops[parts].register_sharding(lambda x, y: shards(x, y))
    ops[pieces].register_sharding(lambda x, y: shards(x, y))
    ops[scale].register_sharding(lambda x, *, by=None: [([shard(0)], [shard(0)] if by is None else [shard(0), whole])])
    for place, twice in itertools.product((shard(0), shard(1), whole), (True, False)):
        split = distribute(x, mesh, [place])
        got, expected = ops[parts]([split, split], twice), parts([x, x], twice)
        torch.testing.assert_close(got.whole.full_tensor(), expected.whole)
        assert type(got) is Parts
        assert (got.double is not None) is twice
        if twice:
            torch.testing.assert_close(got.double.full_tensor(), expected.double)
        for one, other in zip(ops[pieces](split, 3), pieces(x, 3), strict=True):
            torch.testing.assert_close(one.full_tensor(), other)
        by = distribute(x[0].clone(), mesh, [shard(0)])  # a keyword that has to be gathered
        torch.testing.assert_close(ops[scale](split, by=by).full_tensor(), x * x[0])
        torch.testing.assert_close(ops[scale](split).full_tensor(), x)
    with pytest.raises(ArgumentError, match="a tensor that is none"):
        ops[scale](split, by=x[0])
    other = dist.device_mesh.init_device_mesh("cpu", (1, 2))
    with pytest.raises(ArgumentError, match="a call has DTensors of two meshes") as caught:
        ops[scale](split, by=distribute(x[0].clone(), other, [whole, whole]))
    error = caught.value
    assert (error.op, error.argument) == (ops[scale]._qualname, "by")
    assert (error.expected, error.got) == (str(mesh), str(other))
    assert str(error.fix).startswith("distribute_tensor(by.full_tensor(), mesh, placements)")


@section(2)
def writes() -> None:
    """An argument that is written stays where it is; the others come to it."""
    distributed = tensor()
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    shard, whole = distributed.Shard, distributed.Replicate()
    x = numbers(4, 6)

    @custom_op("tests_sharding::accumulate", mutates_args=("out",))
    def accumulate(x: Tensor, out: Tensor) -> None:
        out.add_(x)

    @custom_op("tests_sharding::scale_", mutates_args=("x",), tags=importlib.import_module("customops").Tag.inplace)
    def scale_(x: Tensor, by: float) -> Tensor:
        return x.mul_(by)

    accumulate.register_sharding(lambda x, out: [([], [each, each]) for each in (shard(0), whole)])
    scale_.register_sharding(lambda x, by: [([each], [each]) for each in (shard(0), whole)])
    for place, into in itertools.product((shard(0), shard(1), whole), (shard(0), whole)):
        out = distribute(torch.ones(4, 6), mesh, [into])
        accumulate(distribute(x, mesh, [place]), out)
        torch.testing.assert_close(out.full_tensor(), x + 1)
        assert out.placements == (into,)
        assert scale_(out, 2.0) is out
        torch.testing.assert_close(out.full_tensor(), 2 * (x + 1))
    with pytest.raises(UnsupportedError, match="writes to a DTensor"):
        scale_(distribute(x, mesh, [shard(1)]), 2.0)


@section(2)
def compiled() -> None:
    """Compiled calls do what eager ones do, of the object and of the overload."""
    distributed = tensor()
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    shard, whole = distributed.Shard, distributed.Replicate()
    pairs = (shard(0), whole), (whole, shard(0)), (shard(1), shard(1))
    op = with_rule("compiled_linear", linear_)
    for call, backend in ((op, "aot_eager"), (op._opoverload, "aot_eager"), (op, "inductor")):
        for rows, places in itertools.product((4, 5), pairs) if backend == "aot_eager" else [(5, pairs[2])]:
            torch._dynamo.reset()  # for other sizes torch's own ops communicate differently in each process
            step = torch.compile(lambda x, w, call=call: call(x * 2, w).relu(), backend=backend, fullgraph=True)
            compare(step, lambda x, w: F.linear(x * 2, w).relu(), [numbers(rows, 6), numbers(8, 6)], mesh,
                    [[place] for place in places])  # fmt: skip


def example() -> types.ModuleType:
    path = Path(__file__).parents[2] / "examples" / "tensor_parallel.py"
    spec = importlib.util.spec_from_file_location("example_tensor_parallel", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@section(2)
def tensor_parallel_and_fsdp() -> None:
    """The losses are those of one process, eager and compiled."""
    module = example()
    for way, backend in itertools.product(("tensor", "fsdp"), (None, "aot_eager")):
        torch._dynamo.reset()
        module.compare(way, backend)


# Four processes -------------------------------------------------------------------------------------------------


@section(4)
def two_dimensions() -> None:
    distributed = tensor()
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2))
    for fn in (linear_, rms_norm_, concat_):
        args = inputs()[fn][0]
        op = with_rule(f"{fn.__name__}_in_two", fn)
        tensors = [x for each in args for x in (each if isinstance(each, list) else [each])]
        options = [
            list(itertools.product([distributed.Replicate(), *map(distributed.Shard, range(x.dim()))], repeat=2))
            for x in tensors
        ]
        for placements in itertools.islice(itertools.product(*options), 0, None, 17):
            compare(op, fn, args, mesh, placements)


@section(4)
def both_at_once() -> None:
    module = example()
    for backend in (None, "aot_eager"):
        torch._dynamo.reset()
        module.compare("both", backend)


# The processes --------------------------------------------------------------------------------------------------


def run(folder: str, world: int) -> None:
    """A process with inductor, which loads what else takes long, and forks those of the mesh."""
    torch.set_num_threads(1)
    for name in ("torch.distributed.fsdp", "torch.distributed.tensor.parallel"):
        importlib.import_module(name)
    torch._inductor.config.cpp.simdlen = 1
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            try:
                go_through(world, rank, folder)
            finally:
                os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


def go_through(world: int, rank: int, folder: str) -> None:
    """Write ``{section: error or ""}`` to a file of this process."""
    end_in_time(Path(folder) / f"{world}_{rank}.json", 220)
    store, patience = f"file://{folder}/store{world}", datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=patience)
    results = {}
    for name, fn in SECTIONS[world].items():
        try:
            fn()
            results[name] = ""
        except Exception:
            results[name] = traceback.format_exc()
        (Path(folder) / f"{world}_{rank}.json").write_text(json.dumps(results), encoding="utf-8")
    dist.destroy_process_group()
