"""A device written in Python trains on two processes: the losses are those of the CPU, with DDP and with FSDP2.

What the processes tell each other goes through gloo, on the memory of the device. All-reduces go through a method of
our own, as they would for hardware with a network of its own.

    python examples/device_ddp.py
"""

from __future__ import annotations

import math
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from customops.backend import register_backend


class Network:
    """What a driver would do: here each process puts its numbers into the store of the group, and adds up all."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.store, self.rank, self.size = group.get_group_store(), group.rank(), group.size()
        self.calls = 0

    def all_reduce(self, x: Tensor, op: Any) -> Any:
        if op != dist.ReduceOp.SUM or x.dtype != torch.float32:
            return NotImplemented  # gloo does it
        self.calls += 1
        self.store.set(f"{self.calls}/{self.rank}", x.cpu().numpy().tobytes())
        parts = [self.store.get(f"{self.calls}/{rank}") for rank in range(self.size)]
        x.copy_(sum(torch.frombuffer(bytearray(part), dtype=x.dtype) for part in parts).view(x.shape))
        return None


register_backend("npy", collectives=Network)  # at the top: a process that is started runs it, too


def train(way: str, device: str) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).to(device)
    if way == "DDP":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        model = fully_shard(model, mesh=init_device_mesh(device, (dist.get_world_size(),)))
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.02), []
    generator = torch.Generator().manual_seed(dist.get_rank())  # each process has data of its own
    x = torch.randn(32, 8, generator=generator).to(device)
    target = x[:, :4].argmax(1)
    for _ in range(20):
        loss = nn.functional.cross_entropy(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def process(rank: int, folder: str, world: int = 2) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(init_method=f"file://{folder}/store", rank=rank, world_size=world)  # the device's own
    for way in ("DDP", "FSDP2"):
        on_cpu, on_npy = train(way, "cpu"), train(way, "npy")
        assert all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(on_cpu, on_npy, strict=True))
        assert on_npy[-1] < on_npy[0] / 2
        if rank == 0:
            print(f"{way:<6} cpu {on_cpu[0]:.4f} -> {on_cpu[-1]:.4f}   npy {on_npy[0]:.4f} -> {on_npy[-1]:.4f}")
    dist.destroy_process_group()
    time.sleep(0.5)  # torch ends a process by abort() where gloo's threads still hold tensors


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(process, (folder,), 2)
