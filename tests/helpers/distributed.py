"""What two processes with one process group do with the same ops; each section by itself says what went wrong."""

from __future__ import annotations

import copy
import datetime
import importlib
import json
import os
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import customops
from customops import custom_op
from customops.errors import RegistrationError
from customops.tuning._choices import write
from helpers.processes import end_in_time

SECTIONS: dict[str, Callable[[int], None]] = {}


def section(fn: Callable[[int], None]) -> Callable[[int], None]:
    SECTIONS[fn.__name__] = fn
    return fn


# Ops, defined in each process by importing this module ----------------------------------------------------------


@custom_op("tests_distributed::gelu", mutates_args=())
def gelu(x: Tensor) -> Tensor:
    return F.gelu(x)


gelu.register_fake(torch.empty_like)
gelu.register_autograd(
    lambda ctx, grad: torch.ops.aten.gelu_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@custom_op("tests_distributed::add_", mutates_args=("out",))
def add_(x: Tensor, out: Tensor) -> None:
    out.add_(x)


class Gelu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return gelu(x)


class PlainGelu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x)


def models() -> tuple[nn.Module, nn.Module]:
    """A model with the op, and one of the same weights without."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), Gelu(), nn.Linear(6, 2))
    plain = nn.Sequential(copy.deepcopy(model[0]), PlainGelu(), copy.deepcopy(model[2]))
    return model, plain


def batch(rank: int) -> Tensor:
    return torch.linspace(-1, 1 + rank, 12).reshape(3, 4)


def expected_gradients(plain: nn.Module) -> list[Tensor]:
    """The mean of the gradients of both processes."""
    sum(plain(batch(rank)).square().sum() / 2 for rank in range(2)).backward()
    return [parameter.grad for parameter in plain.parameters() if parameter.grad is not None]


# Before there is a process group --------------------------------------------------------------------------------


@section
def pickled_by_name(rank: int) -> None:
    assert HANDED_OVER is gelu


@section
def fork_after_threads(rank: int) -> None:
    """A child of fork runs ops, defines one and compiles, though threads of its parent used ops and are gone."""
    threads = [threading.Thread(target=lambda: gelu(torch.randn(3))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            use_in_child()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    torch.testing.assert_close(gelu(torch.ones(2)), F.gelu(torch.ones(2)))
    assert not hasattr(torch.ops.tests_distributed, "of_the_child")


def use_in_child() -> None:
    x = torch.randn(3, requires_grad=True)
    (grad,) = torch.autograd.grad(gelu(x).sum(), x)
    torch.testing.assert_close(grad, torch.autograd.grad(F.gelu(x).sum(), x)[0])
    late = custom_op("tests_distributed::of_the_child", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor")
    gelu.register_kernel("cpu", lambda x: x * 3)
    assert late(gelu(torch.ones(1))).item() == 6


# With one -------------------------------------------------------------------------------------------------------


@section
def ddp(rank: int) -> None:
    model, plain = models()
    wrapped = nn.parallel.DistributedDataParallel(model)
    compiled = torch.compile(wrapped, backend="aot_eager")
    expected = expected_gradients(plain)
    for run in (wrapped, compiled):
        model.zero_grad()
        run(batch(rank)).square().sum().backward()
        for parameter, grad in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, grad)


@section
def fsdp(rank: int) -> None:
    fully_shard = importlib.import_module("torch.distributed.fsdp").fully_shard
    model, plain = models()
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    expected = expected_gradients(plain)
    torch.testing.assert_close(model(batch(rank)), plain(batch(rank)))
    model(batch(rank)).square().sum().backward()
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), grad)  # type: ignore[union-attr]


@section
def pipeline(rank: int) -> None:
    pipelining = importlib.import_module("torch.distributed.pipelining")
    model, plain = models()
    part = model[:2] if rank == 0 else model[2:]  # type: ignore[index]
    stage = pipelining.PipelineStage(part, rank, 2, torch.device("cpu"))
    schedule = pipelining.ScheduleGPipe(stage, n_microbatches=3, loss_fn=lambda out, _: out.square().sum())
    x = batch(0)
    if rank == 0:
        schedule.step(x)
    else:
        out = schedule.step(target=torch.zeros(3, 2))
        torch.testing.assert_close(out, plain(x))
    (plain(x).square().sum() / 3).backward()  # the schedule takes the mean over the parts of a batch
    reference = plain[:2] if rank == 0 else plain[2:]  # type: ignore[index]
    for parameter, other in zip(part.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad)


@section
def dtensor(rank: int) -> None:
    """Elementwise: any dimension may be sharded. Without a rule DTensor refuses the op."""
    tensor = importlib.import_module("torch.distributed.tensor")
    experimental = importlib.import_module("torch.distributed.tensor.experimental")
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    whole = torch.linspace(-2, 2, 8).reshape(4, 2)
    sharded = tensor.distribute_tensor(whole, mesh, [tensor.Shard(0)])
    with pytest.raises(NotImplementedError, match="tests_distributed"):
        gelu(sharded)

    @experimental.register_sharding(gelu._opoverload)
    def _(x: Any) -> Any:
        places = [tensor.Replicate(), *(tensor.Shard(dim) for dim in range(x.ndim))]
        return [([place], [place]) for place in places]

    sharded.requires_grad_()
    result = gelu(sharded)
    assert result.placements == (tensor.Shard(0),)
    assert result.to_local().shape == (2, 2)
    torch.testing.assert_close(result.full_tensor(), F.gelu(whole))
    result.sum().backward()
    whole.requires_grad_()
    F.gelu(whole).sum().backward()
    torch.testing.assert_close(sharded.grad.full_tensor(), whole.grad)


@section
def writes_below_dtensor(rank: int) -> None:
    """Parts of a DTensor are plain tensors, so local_map needs no rule."""
    tensor = importlib.import_module("torch.distributed.tensor")
    local_map = importlib.import_module("torch.distributed.tensor.experimental").local_map
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    whole, out = torch.arange(4.0), torch.ones(4)
    sharded, into = (tensor.distribute_tensor(each, mesh, [tensor.Shard(0)]) for each in (whole, out))

    def add(x: Tensor, out: Tensor) -> Tensor:
        add_(x, out)
        return out.clone()

    placements = [tensor.Shard(0)]
    result = local_map(add, out_placements=placements, in_placements=(placements, placements), device_mesh=mesh)
    torch.testing.assert_close(result(sharded, into).full_tensor(), whole + 1)


@section
def caches(rank: int) -> None:
    """Code that one process compiled is found on disk by the other, which has the same definitions."""
    counters = importlib.import_module("torch._dynamo.utils").counters
    torch._inductor.config.cpp.simdlen = 1
    x = torch.linspace(-1, 1, 5)
    for turn in range(2):
        if turn == rank:
            counters.clear()
            torch._dynamo.reset()
            compiled = torch.compile(lambda x: gelu(x) * 2 + 1, fullgraph=True)
            torch.testing.assert_close(compiled(x), F.gelu(x) * 2 + 1)
            found = counters["inductor"]
            assert (found["fxgraph_cache_miss"], found["fxgraph_cache_hit"]) == ((1, 0) if rank == 0 else (0, 1))
        dist.barrier()


@section
def named(rank: int) -> None:
    """A name stands for an object in each process."""
    target = PlainGelu()
    handle = customops.Named("tests_distributed.layer", target)
    handles: list[Any] = [None, None]
    dist.all_gather_object(handles, handle)
    assert all(each.get() is target for each in handles)


@section
def tuning(rank: int) -> None:
    """One rank measures, and all take its choices; a file that differs is an error that names the rank."""

    def double(x: Tensor) -> Tensor:
        return x * 2

    op = custom_op("tests_distributed::tuned", mutates_args=(), schema="(Tensor x) -> Tensor")(double)
    sleepy = [0.002, 0.0][rank], [0.0, 0.002][rank]  # rank 1 by itself would choose the other
    ran: list[str] = []

    def kernel(name: str, seconds: float) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            ran.append(name)
            time.sleep(seconds)
            return x * 2

        return run

    for name, seconds in zip(("one", "two"), sleepy, strict=True):
        op.register_kernel("cpu", kernel(name, seconds), name=name)
    (found,) = customops.tuning.autotune(op, [(torch.ones(8),)], ["one", "two"])
    assert found.kernel == "two"
    assert len(ran) > 0 if rank == 0 else not ran
    op(torch.ones(7))
    assert ran[-1] == "two"
    customops.tuning.check_tuned()

    problem = (
        "there are no samples to tune with" if rank == 0 else "rank 0, which measures the kernels, raised an error"
    )
    with pytest.raises(customops.CustomOpsError, match=problem) as caught:
        customops.tuning.autotune(op)
    assert rank == 0 or "there are no samples to tune with" in str(caught.value.got)
    key = ("tests_distributed::tuned", "cpu", "torch 2.13", "x=float32[8]")
    with tempfile.TemporaryDirectory() as folder:
        write(f"{folder}/tuned.toml", {key: ["v1", "v2"][rank]})
        registration = customops.tuning.tuned(f"{folder}/tuned.toml")
    for compare in (customops.tuning.check_tuned, lambda: customops.tuning.autotune(op, [(torch.ones(8),)])):
        with pytest.raises(RegistrationError, match="rank 1 has another tuned choice than rank 0") as caught:
            compare()
        assert "v2, in " in str(caught.value)
        assert "v1, as in " in str(caught.value)
    registration.unregister()
    customops.tuning.check_tuned()


# The processes --------------------------------------------------------------------------------------------------

HANDED_OVER: Any = None
WITHOUT_GROUP = ("pickled_by_name", "fork_after_threads")


def run(folder: str, op: Any) -> None:
    """A process that is spawned, and one that it forks when inductor is imported and threads have used ops."""
    global HANDED_OVER
    HANDED_OVER = op
    torch.set_num_threads(1)
    importlib.import_module("torch._inductor.compile_fx")
    results = [{name: outcome(SECTIONS[name], 0) for name in WITHOUT_GROUP}, {}]
    child = os.fork()
    rank = int(child == 0)
    try:
        go_through(rank, folder, results[rank])
    finally:
        if child == 0:
            os._exit(0)
    os.waitpid(child, 0)


def go_through(rank: int, folder: str, results: dict[str, str]) -> None:
    """Write ``{section: error or ""}`` to a file of this process."""
    end_in_time(Path(folder) / f"{rank}.json", 140)
    store, patience = f"file://{folder}/store", datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=patience)
    for name, fn in SECTIONS.items():
        if name not in WITHOUT_GROUP:
            results[name] = outcome(fn, rank)
            (Path(folder) / f"{rank}.json").write_text(json.dumps(results), encoding="utf-8")
    dist.destroy_process_group()


def outcome(fn: Callable[[int], None], rank: int) -> str:
    try:
        fn(rank)
    except Exception:
        return traceback.format_exc()
    return ""
