"""Two processes with a device and a process group: each collective, and training, as on the CPU."""

from __future__ import annotations

import datetime
import gc
import importlib
import io
import json
import pickle
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from helpers.processes import end_in_time

Case = Callable[[int, str], Any]
#: Seconds that all of it may take.
PATIENCE = 115

#: What is called with a rank and a device, and returns the same values on each device.
COLLECTIVES: dict[str, Case] = {}
TRAINING: dict[str, Case] = {}
#: What has its own assertions, and gets the rank.
OTHERS: dict[str, Callable[[int], None]] = {}


def collective(fn: Case) -> Case:
    COLLECTIVES[fn.__name__] = fn
    return fn


def training(fn: Case) -> Case:
    TRAINING[fn.__name__] = fn
    return fn


def other(fn: Callable[[int], None]) -> Callable[[int], None]:
    OTHERS[fn.__name__] = fn
    return fn


def x_of(rank: int, device: str) -> Tensor:
    return (torch.arange(4.0) + 1 + 10 * rank).to(device)


def zeros(*shape: int, device: str) -> Tensor:
    return torch.zeros(shape, device=device)


# Collectives ----------------------------------------------------------------------------------------------------------


@collective
def broadcast(rank: int, device: str) -> Any:
    x = x_of(rank, device)
    dist.broadcast(x, 1)
    return x


@collective
def all_reduce(rank: int, device: str) -> Any:
    results = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.AVG):
        x = x_of(rank, device)
        dist.all_reduce(x, op)
        results.append(x)
    return results


@collective
def all_reduce_bits(rank: int, device: str) -> Any:
    results = []
    for op in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR):
        x = x_of(rank, device).int()
        dist.all_reduce(x, op)
        results.append(x)
    return results


@collective
def all_reduce_dtypes(rank: int, device: str) -> Any:
    results = []
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.uint8):
        x = (torch.arange(4) + 1 + rank).to(dtype).to(device)
        dist.all_reduce(x)
        results.append(x)
    return results


@collective
def all_reduce_of_views(rank: int, device: str) -> Any:
    """The rest of the memory is left alone."""
    whole = torch.arange(12.0).to(device)
    dist.all_reduce(whole[2:6])
    return whole


@collective
def reduce(rank: int, device: str) -> Any:
    x = x_of(rank, device)
    dist.reduce(x, 0, dist.ReduceOp.MAX)
    return x if rank == 0 else None


@collective
def all_gather(rank: int, device: str) -> Any:
    outs = [zeros(4, device=device) for _ in range(2)]
    dist.all_gather(outs, x_of(rank, device))
    return outs


@collective
def all_gather_into_tensor(rank: int, device: str) -> Any:
    out, rows = zeros(8, device=device), zeros(4, 2, device=device)
    dist.all_gather_into_tensor(out, x_of(rank, device))
    dist.all_gather_into_tensor(rows, x_of(rank, device).view(2, 2))
    return out, rows


@collective
def gather(rank: int, device: str) -> Any:
    outs = [zeros(4, device=device) for _ in range(2)] if rank == 1 else None
    dist.gather(x_of(rank, device), outs, 1)
    return outs


@collective
def gather_single(rank: int, device: str) -> Any:
    """From 2.15 on, and not by gloo."""
    if not BY_STORE or not hasattr(dist, "gather_single"):
        return None
    if device == "cpu":
        return torch.cat([x_of(0, device), x_of(1, device)]) if rank == 0 else None
    out = zeros(8, device=device) if rank == 0 else None
    dist.gather_single(x_of(rank, device), out, 0)
    return out


@collective
def scatter(rank: int, device: str) -> Any:
    out = zeros(4, device=device)
    dist.scatter(out, [x_of(0, device), x_of(5, device)] if rank == 0 else None, 0)
    return out


@collective
def reduce_scatter(rank: int, device: str) -> Any:
    out = zeros(2, device=device)
    dist.reduce_scatter(out, list(x_of(rank, device).chunk(2)))
    return out


@collective
def reduce_scatter_tensor(rank: int, device: str) -> Any:
    outs = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        outs.append(zeros(2, device=device))
        dist.reduce_scatter_tensor(outs[-1], x_of(rank, device), op)
    return outs


@collective
def all_to_all(rank: int, device: str) -> Any:
    outs = list(zeros(4, device=device).chunk(2))
    dist.all_to_all(outs, list(x_of(rank, device).chunk(2)))
    return outs


@collective
def all_to_all_single(rank: int, device: str) -> Any:
    out = zeros(4, device=device)
    dist.all_to_all_single(out, x_of(rank, device))
    sizes, from_ = ([1, 3], [1, 2]) if rank == 0 else ([2, 2], [3, 2])
    uneven = zeros(sum(from_), device=device)
    dist.all_to_all_single(uneven, x_of(rank, device), from_, sizes)
    return out, uneven


@collective
def barrier(rank: int, device: str) -> Any:
    dist.barrier()


@collective
def send_and_recv(rank: int, device: str) -> Any:
    x, out = x_of(rank, device), zeros(4, device=device)
    if rank == 0:
        dist.send(x, 1, tag=3)
        dist.recv(out, 1)
    else:
        dist.recv(out, 0, tag=3)
        dist.send(x, 0)
    return out


@collective
def batch_isend_irecv(rank: int, device: str) -> Any:
    out = zeros(4, device=device)
    ops = [dist.P2POp(dist.isend, x_of(rank, device), 1 - rank), dist.P2POp(dist.irecv, out, 1 - rank)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return out


@collective
def coalesced(rank: int, device: str) -> Any:
    xs = [x_of(rank, device), x_of(rank, device) * 2]
    with dist._coalescing_manager(async_ops=True) as manager:
        for x in xs:
            dist.all_reduce(x)
    manager.wait()
    gathered, scattered = ([zeros(size, device=device) for _ in xs] for size in (8, 2))
    with dist._coalescing_manager():
        for x, out in zip(xs, gathered, strict=True):
            dist.all_gather_into_tensor(out, x)
    with dist._coalescing_manager():
        for x, out in zip(xs, scattered, strict=True):
            dist.reduce_scatter_tensor(out, x)
    lists = [[zeros(4, device=device) for _ in xs] for _ in range(2)]
    both = [x.clone() for x in xs]
    with warnings.catch_warnings(category=FutureWarning, action="ignore"):
        dist.all_gather_coalesced(lists, xs)
        dist.all_reduce_coalesced(both)
    return xs, gathered, scattered, lists, both


@collective
def asynchronous(rank: int, device: str) -> Any:
    x = x_of(rank, device)
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    (result,) = work.get_future().wait()
    assert result.device == x.device
    assert work.is_completed()
    return x, result


@collective
def objects(rank: int, device: str) -> Any:
    found: list[Any] = [None, None]
    dist.all_gather_object(found, {"rank": rank})
    return found


@collective
def subgroups(rank: int, device: str) -> Any:
    groups = [dist.new_group([0, 1]), dist.new_group([rank], use_local_synchronization=True)]
    xs = [x_of(rank, device) for _ in groups]
    for group, x in zip(groups, xs, strict=True):
        dist.all_reduce(x, group=group)
        dist.destroy_process_group(group)
    return xs


@collective
def functional(rank: int, device: str) -> Any:
    """What FSDP2 and DTensor call, and graphs hold."""
    ops, name = torch.ops._c10d_functional, dist.group.WORLD.group_name
    x, pair = x_of(rank, device), [x_of(rank, device), x_of(rank, device) * 2]
    results = [
        ops.all_reduce(x, "sum", name),
        ops.all_reduce(x, "avg", name),
        ops.all_reduce_(x.clone(), "max", name),
        ops.broadcast(x, 1, name),
        ops.all_gather_into_tensor(x, 2, name),
        ops.reduce_scatter_tensor(x, "sum", 2, name),
        ops.all_to_all_single(x, [2, 2], [2, 2], name),
        *ops.all_reduce_coalesced(pair, "sum", name),
        *ops.all_gather_into_tensor_coalesced(pair, 2, name),
        *ops.reduce_scatter_tensor_coalesced(pair, "sum", 2, name),
        ops.all_gather_into_tensor_out(x, 2, name, out=zeros(8, device=device)),
    ]
    if hasattr(ops, "reduce_scatter_tensor_out"):
        results.append(ops.reduce_scatter_tensor_out(x, "sum", 2, name, out=zeros(2, device=device)))
    return [ops.wait_tensor(result) for result in results]


@collective
def differentiable(rank: int, device: str) -> Any:
    ops, name = torch.ops._c10d_functional_autograd, dist.group.WORLD.group_name
    x = x_of(rank, device).requires_grad_()
    gathered = torch.ops._c10d_functional.wait_tensor(ops.all_gather_into_tensor(x, 2, name))
    (gathered**2).sum().backward()
    return x.grad


@collective
def compiled(rank: int, device: str) -> Any:
    collectives, group = importlib.import_module("torch.distributed._functional_collectives"), dist.group.WORLD
    torch._dynamo.reset()
    fn = torch.compile(lambda x: collectives.all_reduce(x * 2, "sum", group) + 1, backend="aot_eager", fullgraph=True)
    return fn(x_of(rank, device))


# Training -------------------------------------------------------------------------------------------------------------


def model_of(device: str, *layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), *layers, nn.Linear(8, 3))
    return model.to(device)


def losses(model: nn.Module, rank: int, device: str, **options: Any) -> list[float]:
    optimizer = options.get("optimizer", torch.optim.AdamW)(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(rank)
    x, target = torch.randn(5, 4, generator=generator).to(device), torch.arange(5).remainder(3).to(device)
    found = []
    for _ in range(4):
        loss = nn.functional.cross_entropy(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def in_parallel(device: str, **options: Any) -> Any:
    return nn.parallel.DistributedDataParallel(model_of(device, nn.BatchNorm1d(8)), **options)


@training
def ddp(rank: int, device: str) -> Any:
    model = in_parallel(device)
    return losses(model, rank, device), dict(model.named_parameters()), dict(model.named_buffers())


@training
def ddp_with_options(rank: int, device: str) -> Any:
    options = {} if device == "cpu" else {"device_ids": [0]}
    return losses(in_parallel(device, gradient_as_bucket_view=True, bucket_cap_mb=1e-4, **options), rank, device)


@training
def ddp_with_a_hook(rank: int, device: str) -> Any:
    hooks = importlib.import_module("torch.distributed.algorithms.ddp_comm_hooks.default_hooks")
    model = in_parallel(device)
    model.register_comm_hook(None, hooks.fp16_compress_hook)
    return losses(model, rank, device)


@training
def ddp_compiled(rank: int, device: str) -> Any:
    torch._dynamo.reset()
    return losses(torch.compile(in_parallel(device), backend="aot_eager"), rank, device)


class Branches(nn.Module):
    """Each call leaves parameters without a use, on one process others than on the other."""

    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.first, self.branches = nn.Linear(4, 4), nn.ModuleList(nn.Linear(4, 3) for _ in range(3))
        self.calls, self.fixed = dist.get_rank(), fixed

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.branches[0 if self.fixed else self.calls % 2](self.first(x))  # type: ignore[no-any-return]


def with_unused(rank: int, device: str, *, fixed: bool = False, backend: str | None = None, **options: Any) -> Any:
    torch.manual_seed(0)
    model: Any = nn.parallel.DistributedDataParallel(Branches(fixed).to(device), **options)
    called = model if backend is None else torch.compile(model, backend=backend)
    found = [losses(called, rank, device), [each.grad for each in model.parameters() if each.grad is not None]]
    assert any(each.grad is None for each in model.parameters())
    return found


@training
def ddp_with_unused_parameters(rank: int, device: str) -> Any:
    return with_unused(rank, device, find_unused_parameters=True)


@training
def ddp_with_a_static_graph(rank: int, device: str) -> Any:
    return with_unused(rank, device, fixed=True, static_graph=True)


@training
def ddp_with_unused_parameters_compiled(rank: int, device: str) -> Any:
    torch._dynamo.reset()
    return with_unused(rank, device, fixed=True, backend="aot_eager", find_unused_parameters=True)


@training
def zero(rank: int, device: str) -> Any:
    optimizer = importlib.import_module("torch.distributed.optim").ZeroRedundancyOptimizer
    make = lambda parameters, lr: optimizer(parameters, torch.optim.SGD, lr=lr)  # noqa: E731
    return losses(in_parallel(device), rank, device, optimizer=make)


def sharded(device: str, **options: Any) -> nn.Module:
    fully_shard = importlib.import_module("torch.distributed.fsdp").fully_shard
    mesh, model = init_device_mesh(device, (2,)), model_of(device)
    for layer in (model[0], model[-1]):
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)  # type: ignore[no-any-return]


@training
def fsdp(rank: int, device: str) -> Any:
    model = sharded(device)
    return losses(model, rank, device), [parameter.full_tensor() for parameter in model.parameters()]


@training
def fsdp_on_the_host(rank: int, device: str) -> Any:
    """Parameters and their gradients wait on the CPU."""
    module: Any = importlib.import_module("torch.distributed.fsdp")
    torch.manual_seed(0)
    mesh, model = init_device_mesh(device, (2,)), nn.Linear(4, 4)
    module.fully_shard(model, mesh=mesh, offload_policy=module.CPUOffloadPolicy(pin_memory=False))
    return losses(model, rank, device)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


@training
def fsdp_compiled(rank: int, device: str) -> Any:
    fully_shard = importlib.import_module("torch.distributed.fsdp").fully_shard
    torch._dynamo.reset()
    torch.manual_seed(0)
    mesh, model = init_device_mesh(device, (2,)), nn.Sequential(Block(), Block()).to(device)
    for block in model:
        fully_shard(block, mesh=mesh).compile(backend="aot_eager", fullgraph=True)
    return losses(fully_shard(model, mesh=mesh), rank, device)


@training
def fsdp_from_meta(rank: int, device: str) -> Any:
    fully_shard = importlib.import_module("torch.distributed.fsdp").fully_shard
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3))
    fully_shard(model, mesh=init_device_mesh(device, (2,))).to_empty(device=device)
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.1)
    loss = model(x_of(rank, device)).square().sum()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return loss, norm.full_tensor(), [parameter.grad.full_tensor() for parameter in model.parameters()]


@training
def fsdp_mixed_precision(rank: int, device: str) -> Any:
    policy = importlib.import_module("torch.distributed.fsdp").MixedPrecisionPolicy
    return losses(sharded(device, mp_policy=policy(torch.bfloat16, torch.float32)), rank, device)


@training
def fsdp_on_a_mesh(rank: int, device: str) -> Any:
    """Hybrid: replicated over one dimension of the mesh, and sharded over the other one."""
    fully_shard = importlib.import_module("torch.distributed.fsdp").fully_shard
    mesh = init_device_mesh(device, (2, 1), mesh_dim_names=("replicate", "shard"))
    assert mesh["shard"].size() == 1
    return losses(fully_shard(model_of(device), mesh=mesh), rank, device)


@training
def tensor_parallel(rank: int, device: str) -> Any:
    parallel = importlib.import_module("torch.distributed.tensor.parallel")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3)).to(device)
    plan = {"0": parallel.ColwiseParallel(), "2": parallel.RowwiseParallel()}
    return losses(parallel.parallelize_module(model, init_device_mesh(device, (2,)), plan), 0, device)


@training
def dtensor(rank: int, device: str) -> Any:
    tensor = importlib.import_module("torch.distributed.tensor")
    mesh = init_device_mesh(device, (2,))
    rows, columns, whole = [tensor.Shard(0)], [tensor.Shard(1)], [tensor.Replicate()]
    x, w = torch.linspace(-1, 1, 12).reshape(4, 3).to(device), torch.linspace(0, 1, 6).reshape(3, 2).to(device)
    a = tensor.distribute_tensor(x, mesh, rows).requires_grad_()
    b = tensor.distribute_tensor(w, mesh, whole).requires_grad_()
    product = (a @ b).relu()
    product.sum().backward()
    partial = tensor.distribute_tensor(x, mesh, columns) @ tensor.distribute_tensor(w, mesh, rows)
    moved = partial.redistribute(mesh, columns).redistribute(mesh, rows)
    assert product.to_local().device.type == device
    return [each.full_tensor() for each in (product, moved, a.grad, b.grad)]


@training
def checkpoint(rank: int, device: str) -> Any:
    saving = importlib.import_module("torch.distributed.checkpoint")
    states = importlib.import_module("torch.distributed.checkpoint.state_dict")
    folder = f"{FOLDER}/checkpoint_{device}_{dist.group.WORLD._collectives is not None if device != 'cpu' else 0}"
    model, other = sharded(device), sharded(device)
    optimizers = [torch.optim.AdamW(each.parameters()) for each in (model, other)]
    model(x_of(rank, device).repeat(3, 1)).sum().backward()
    optimizers[0].step()
    model_state, optimizer_state = states.get_state_dict(model, optimizers[0])
    saving.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    for parameter in other.parameters():
        nn.init.zeros_(parameter)
    model_state, optimizer_state = states.get_state_dict(other, optimizers[1])
    saving.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    states.set_state_dict(other, optimizers[1], model_state_dict=model_state, optim_state_dict=optimizer_state)
    return [parameter.full_tensor() for parameter in other.parameters()]


@training
def pipeline(rank: int, device: str) -> Any:
    pipelining = importlib.import_module("torch.distributed.pipelining")
    model = model_of(device)
    part = model[:2] if rank == 0 else model[2:]
    stage = pipelining.PipelineStage(part, rank, 2, torch.device(device))
    schedule = pipelining.ScheduleGPipe(stage, 2, loss_fn=lambda out, target: (out - target).square().sum())
    if rank == 0:
        schedule.step(torch.linspace(-1, 1, 16).reshape(4, 4).to(device))
    else:
        schedule.step(target=zeros(4, 3, device=device))
    return [parameter.grad for parameter in part.parameters()]


# What only the device has ---------------------------------------------------------------------------------------------


@other
def random_numbers_of_shards(rank: int) -> None:
    """Replicas draw the same, shards others, and all ranks go on with the same state."""
    tensor = importlib.import_module("torch.distributed.tensor")
    mesh = init_device_mesh("npy", (2,))
    torch.manual_seed(3)
    drawn = [tensor.randn(4, 4, device_mesh=mesh, placements=[placement]) for placement in (tensor.Shard(0),) * 2]
    parts = [part for each in drawn for part in each.full_tensor().chunk(2)]
    assert len({tuple(part.flatten().tolist()) for part in parts}) == 4
    same = tensor.rand(4, device_mesh=mesh, placements=[tensor.Replicate()]).to_local()
    parameter = nn.Parameter(tensor.distribute_tensor(torch.zeros(4, 2), mesh, [tensor.Shard(0)]))
    nn.init.uniform_(parameter)
    assert len(set(parameter.full_tensor().flatten().tolist())) == 8
    dropped = nn.functional.dropout(tensor.distribute_tensor(torch.ones(64, 8), mesh, [tensor.Shard(0)]), 0.5)
    upper, lower = (dropped.full_tensor() == 0).chunk(2)
    assert not torch.equal(upper, lower)
    for each in (same, torch.rand(3, device="npy")):
        found = [torch.zeros_like(each) for _ in range(2)]
        dist.all_gather(found, each)
        assert torch.equal(*found)


@other
def errors_of_collectives(rank: int) -> None:
    """An error of gloo comes out of `wait`, as on the CPU."""
    x = torch.ones(3 + rank, device="npy")
    with pytest.raises(RuntimeError, match="gloo refuses it") as error:
        dist.all_gather_into_tensor(torch.ones(3, device="npy"), x)
    assert "invalid tensor size" in error.value.got
    dist.barrier()
    if rank == 0:
        group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=1))
        ops = torch.ops._c10d_functional
        with pytest.raises(RuntimeError, match="Timed out"):
            dist.all_reduce(x, group=group)
        with pytest.raises(RuntimeError):
            ops.wait_tensor(ops.all_reduce(x, "sum", group.group_name))
    else:
        dist.new_group([0, 1], timeout=datetime.timedelta(seconds=1))
    dist.barrier()


@other
def memory_of_fsdp(rank: int) -> None:
    """What was gathered for a layer is given back after it, unless that is to wait for the backward."""
    fully_shard = importlib.import_module("torch.distributed.fsdp").fully_shard
    layers, peaks = 6, {}
    for reshard in (True, False):
        model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(layers))).to("npy")
        of_layer = model[0].weight.nbytes
        for layer in model:
            fully_shard(layer, mesh=init_device_mesh("npy", (2,)), reshard_after_forward=reshard)
        fully_shard(model, mesh=init_device_mesh("npy", (2,)))
        gc.collect()
        torch.npy.synchronize()
        torch.npy.reset_peak_memory_stats()
        before = torch.npy.memory_allocated()
        output = model(torch.ones(1, 256, device="npy"))
        torch.npy.synchronize()
        peaks[reshard] = (torch.npy.max_memory_allocated() - before) / of_layer
        end = time.monotonic() + 10  # a thread of gloo gives the last layer back after the collective
        while (gathered := (torch.npy.memory_allocated() - before) / of_layer) > 0.1 and reshard:
            assert time.monotonic() < end, gathered
            time.sleep(0.01)
        assert reshard or gathered > layers - 0.1, gathered
        output.sum().backward()
        torch.npy.synchronize()
        assert torch.npy.memory_allocated() - before < (layers / 2 + 0.2) * of_layer  # the gradients, of this half
    assert peaks[True] < 4 < layers < peaks[False]


# The user's collectives -----------------------------------------------------------------------------------------------


class ByStore:
    """Collectives through the store of the group, one tensor at a time."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.store, self.rank, self.size = group.get_group_store(), group.rank(), group.size()
        self.calls: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()

    def _put(self, key: str, value: list[Tensor]) -> None:
        file = io.BytesIO()
        torch.save([each.cpu() for each in value], file)
        self.store.set(key, pickle.dumps(file.getvalue()))

    def _get(self, key: str) -> list[Tensor]:
        return torch.load(io.BytesIO(pickle.loads(self.store.get(key))))  # type: ignore[no-any-return]

    def _exchange(self, what: str, value: list[Tensor]) -> list[list[Tensor]]:
        """What each process gave."""
        self.calls[what] += 1
        number = sum(self.calls.values())
        self._put(f"{number}/{self.rank}", value)
        return [self._get(f"{number}/{rank}") for rank in range(self.size)]

    def _reduced(self, values: list[Tensor], op: Any) -> Tensor:
        stacked = torch.stack(values)
        if op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            total = stacked.sum(0, dtype=stacked.dtype)
            return total / self.size if op == dist.ReduceOp.AVG else total
        if op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX):
            return stacked.amin(0) if op == dist.ReduceOp.MIN else stacked.amax(0)
        assert op == dist.ReduceOp.PRODUCT
        return stacked.prod(0)

    def broadcast(self, x: Tensor, src: int) -> None:
        x.copy_(self._exchange("broadcast", [x])[src][0])

    def all_reduce(self, x: Tensor, op: Any) -> Any:
        if op in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR):
            return NotImplemented
        x.copy_(self._reduced([each for (each,) in self._exchange("all_reduce", [x])], op))
        return None

    def reduce(self, x: Tensor, dst: int, op: Any) -> None:
        values = [each for (each,) in self._exchange("reduce", [x])]
        if self.rank == dst:
            x.copy_(self._reduced(values, op))

    def all_gather(self, outs: list[Tensor], x: Tensor) -> torch.futures.Future[None]:
        future: torch.futures.Future[None] = torch.futures.Future()
        for out, (value,) in zip(outs, self._exchange("all_gather", [x]), strict=True):
            out.copy_(value)
        future.set_result(None)
        return future

    def gather(self, outs: list[Tensor] | None, x: Tensor, dst: int) -> None:
        values = self._exchange("gather", [x])
        assert (outs is not None) == (self.rank == dst)
        for out, (value,) in zip(outs or [], values, strict=False):
            out.copy_(value)

    def scatter(self, out: Tensor, xs: list[Tensor] | None, src: int) -> None:
        out.copy_(self._exchange("scatter", xs or [])[src][self.rank])

    def reduce_scatter(self, out: Tensor, xs: list[Tensor], op: Any) -> None:
        values = self._exchange("reduce_scatter", xs)
        out.copy_(self._reduced([each[self.rank] for each in values], op))

    def all_to_all(self, outs: list[Tensor], xs: list[Tensor]) -> None:
        for out, values in zip(outs, self._exchange("all_to_all", xs), strict=True):
            out.copy_(values[self.rank])

    def send(self, x: Tensor, dst: int, tag: int) -> None:
        self.sent["send"] += 1
        self._put(f"{self.rank} to {dst}, {tag}, {self.sent['send']}", [x])

    def recv(self, x: Tensor, src: int, tag: int) -> None:
        self.sent["recv"] += 1
        x.copy_(self._get(f"{src} to {self.rank}, {tag}, {self.sent['recv']}")[0])

    def barrier(self) -> None:
        self._exchange("barrier", [])


#: Does the next group get its collectives?
BY_STORE = False
FOLDER = ""


# The processes --------------------------------------------------------------------------------------------------------


def run(rank: int, folder: str, chosen: Collection[str], *, own_memory: bool) -> None:
    """Run the chosen cases in one of two processes with a device.

    Args:
        chosen: ``way: case`` of each.
        own_memory: the memory is not the host's, and what is done with it is done by a thread of each stream.
    """
    global FOLDER
    FOLDER = folder
    backend = importlib.import_module("customops.backend")
    options = {"memory": backend.ProtectedMemory(), "stream": backend.ThreadStream} if own_memory else {}
    backend.register_backend(
        "npy", device_count=2, collectives=lambda group: ByStore(group) if BY_STORE else None, **options
    )
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    go_through(rank, folder, chosen)


def go_through(rank: int, folder: str, chosen: Collection[str]) -> None:
    """Write ``{"way: case": error or ""}`` to a file of this process."""
    results: dict[str, str] = {}
    end_in_time(Path(folder) / f"{rank}.json", PATIENCE)
    group_type: Any = importlib.import_module("customops.backend.process_group").DeviceGroup
    lend = group_type._lend
    for way in dict.fromkeys(case.partition(":")[0] for case in chosen):
        global BY_STORE
        BY_STORE = way == "store"
        group_type._lend = (lambda group, tensor: lend(group, tensor).clone()) if way == "copies" else lend
        patience = datetime.timedelta(seconds=20)
        dist.init_process_group(init_method=f"file://{folder}/{way}", rank=rank, world_size=2, timeout=patience)
        for name, case in (COLLECTIVES | TRAINING).items():
            if f"{way}: {name}" in chosen:
                results[f"{way}: {name}"] = outcome(compare, case, rank)
        for name, check in OTHERS.items():
            if f"{way}: {name}" in chosen:
                results[f"{way}: {name}"] = outcome(check, rank)
        if way == "store":
            own = dist.group.WORLD._collectives
            results["store: calls"] = " ".join(sorted({*own.calls, *own.sent}))
        (Path(folder) / f"{rank}.json").write_text(json.dumps(results), encoding="utf-8")
        dist.destroy_process_group()


def compare(case: Case, rank: int) -> None:
    expected, found = case(rank, "cpu"), case(rank, "npy")
    assert all(each.is_npy for each in pytree.tree_leaves(found) if isinstance(each, Tensor))  # type: ignore[attr-defined]
    found = pytree.tree_map(lambda each: each.cpu() if isinstance(each, Tensor) else each, found)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def outcome(fn: Callable[..., None], *args: Any) -> str:
    try:
        fn(*args)
    except Exception:
        return traceback.format_exc()
    return ""
