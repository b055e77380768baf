"""Two transformer blocks with ops of ours under tensor and sequence parallelism, under FSDP2, and under both.

    $ python examples/tensor_parallel.py     # four processes on gloo; the losses are those of one process

The ops get DTensors: `rms_norm` gets sequences that are split over processes, `swiglu` gets split features. Each op has
a plain function, which gives its fake impl and gradients, and a sharding rule.
"""

from __future__ import annotations

import copy
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from customops import custom_op

# Ops ------------------------------------------------------------------------------------------------------------


def plain_rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


@custom_op("examples::sharded_rms_norm", mutates_args=(), reference=plain_rms_norm)
def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return plain_rms_norm(x, weight, eps)  # launch a kernel here


def plain_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


@custom_op("examples::sharded_swiglu", mutates_args=(), reference=plain_swiglu)
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return plain_swiglu(gate, up)  # launch a kernel here


@rms_norm.register_sharding
def _(x: Any, weight: Any, eps: float) -> Any:
    """Every dimension but the last, over which the op takes a mean, can be split."""
    return [([Shard(dim)], [Shard(dim), Replicate()]) for dim in range(x.ndim - 1)]


@swiglu.register_sharding
def _(gate: Any, up: Any) -> Any:
    return [([Shard(dim)], [Shard(dim), Shard(dim)]) for dim in range(gate.ndim)]


@rms_norm.register_samples
def _() -> Iterator[Any]:
    yield torch.randn(2, 4, 6, requires_grad=True), torch.randn(6, requires_grad=True)


@swiglu.register_samples
def _() -> Iterator[Any]:
    yield torch.randn(2, 4, 6, requires_grad=True), torch.randn(2, 4, 6, requires_grad=True)


# The model ------------------------------------------------------------------------------------------------------


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight)


class Block(nn.Module):
    def __init__(self, width: int = 8, heads: int = 4) -> None:
        super().__init__()
        self.head = width // heads
        self.norm, self.norm2 = Norm(width), Norm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (each(y).unflatten(-1, (-1, self.head)).transpose(1, 2) for each in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(swiglu(self.gate(y), self.up(y)))


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Between the layers each process has a part of the sequence; in them, heads, or hidden features."""
    for block in model.children():
        plan = {
            "norm": SequenceParallel(),
            "norm2": SequenceParallel(),
            **{name: ColwiseParallel(input_layouts=Shard(1)) for name in "qkv"},
            "o": RowwiseParallel(output_layouts=Shard(1)),
            **{name: ColwiseParallel(input_layouts=Shard(1), use_local_output=False) for name in ("gate", "up")},
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh, plan)
    split = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True)
    parallelize_module(model, mesh, split)
    parallelize_module(model, mesh, PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate()))


def train(model: Any, data: Tensor, group: Any = None) -> list[float]:
    """The losses of three steps, as means over the processes of a group that have other data."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.3), []
    for _ in range(3):
        loss = model(data).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        if group is not None:
            dist.all_reduce(mean, dist.ReduceOp.AVG if data.is_cuda else dist.ReduceOp.SUM, group=group)
            mean /= 1 if data.is_cuda else dist.get_world_size(group)
        losses.append(mean.item())
    return losses


def compare(way: str, backend: str | None = None) -> list[float]:
    """Train by "tensor", "fsdp" or "both", with the losses of one process, which it returns; `backend` compiles."""
    torch.manual_seed(0)
    plain = nn.Sequential(Block(), Block())
    model, data = copy.deepcopy(plain), torch.randn(4, 8, 8)
    expected, world = train(plain, data), dist.get_world_size()
    ways = {"tensor": (1, world), "fsdp": (world, 1), "both": (2, world // 2)}
    mesh = init_device_mesh("cpu", ways[way], mesh_dim_names=("data", "tensor"))
    if way != "fsdp":
        tensor_parallel(model, mesh["tensor"])
    group = None
    if way != "tensor":
        for block in model:
            fully_shard(block, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
        data, group = data.chunk(ways[way][0])[mesh.get_local_rank("data")], mesh.get_group("data")
    if backend is not None:
        for block in model:
            block.compile(backend=backend, fullgraph=True)
    losses = train(model, data, group)
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-6)
    return losses


def process(rank: int, folder: str, world: int = 4) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    for way in ("tensor", "fsdp", "both"):
        losses = compare(way)
        if rank == 0:
            print(f"{way:<6} losses {losses}, as in one process")
    dist.destroy_process_group()
    time.sleep(0.5)  # torch ends a process by abort() where gloo's threads still hold tensors


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(process, (folder,), 4)
    sys.exit(0)
