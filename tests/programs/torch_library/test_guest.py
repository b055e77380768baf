"""What customops changes of torch, and that programs without an op of customops do not notice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.process, pytest.mark.compile]

#: Records the functions, classes and their members of all modules of torch that are loaded, and what else an import
#: can change in a process.
SNAPSHOT = """
import atexit, json, logging, os, sys, threading, warnings
import torch

def snapshot():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] != "torch" or module is None or name.startswith("torch._C"):
            continue
        for key, value in list(vars(module).items()):
            if callable(value):
                found[f"{name}:{key}"] = value
            if isinstance(value, type) and value.__module__ == name:
                found.update({f"{name}:{key}.{member}": each for member, each in vars(value).items() if callable(each)})
    return found

def state():
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    handlers = [str(handler) for logger in loggers for handler in getattr(logger, "handlers", ())]
    filters = list(map(str, warnings.filters))
    process = [threading.active_count(), atexit._ncallbacks(), dict(os.environ), str(sys.excepthook)]
    return [list(map(str, sys.meta_path)), handlers, filters, *process]

def changed(before, after):
    return sorted(key for key in before if before[key] is not after.get(key))
"""

#: Defines ops of several kinds and compiles them.
OPS = """
from torch import Tensor
import customops
from customops import Mut

@customops.custom_op("guest::double")
def double(x: Tensor) -> Tensor:
    return x * 2

@double.register_fake
def _(x):
    return torch.empty_like(x)

double.register_autograd(lambda ctx, grad: grad * 2)

@customops.custom_op("guest::add_")
def add_(x: Mut[Tensor], by: Tensor, mode: str = "once") -> None:
    x.add_(by)

@customops.custom_op("guest::add_and_count")
def add_and_count(x: Mut[Tensor]) -> tuple[Tensor, int]:
    x.add_(1)
    return x * 2, 3

@add_and_count.register_fake
def _(x):
    return torch.empty_like(x), 3

def functional(x):
    return double(x.sin()) + 1

def writes(x, by):
    y = x.clone()
    add_(y[1:], by)
    add_(y[0], by[0], mode="twice")
    return y * 2

def counts(x):
    y = x.clone()
    z, n = add_and_count(y)
    return y + z * n

def check(backend, dynamic=False):
    x = torch.arange(6.0).view(3, 2)
    for fn, args in ((functional, (x,)), (writes, (x, x[1:] + 1)), (counts, (x,))):
        torch._dynamo.reset()
        got = torch.compile(fn, backend=backend, fullgraph=True, dynamic=dynamic)(*args)
        torch.testing.assert_close(got, fn(*args))
"""


def run(program: str, tmp_path: Path, **environment: str) -> Any:
    """Run a program in a process of its own, with caches of its own, and return its last line, which is JSON."""
    variables = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), **environment}
    parts = (SNAPSHOT, *map(textwrap.dedent, program.split("#---\n")))
    result = subprocess.run([sys.executable, "-c", "\n".join(parts)], env=variables, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_the_import_changes_nothing(tmp_path: Path) -> None:
    program = """
        before = snapshot(), state()
        import customops
        after = snapshot(), state()
        print(json.dumps([changed(before[0], after[0]), before[1] == after[1]]))
    """
    assert run(program, tmp_path) == [[], True]


def test_ops_that_are_not_traced_change_two_places(tmp_path: Path) -> None:
    program = (
        """
        import torch._dynamo, torch.utils.flop_counter
        before = snapshot()
#---
        """
        + OPS
        + """
#---
        x = torch.ones(2, requires_grad=True)
        double(x).sum().backward()
        add_(torch.ones(2), torch.ones(2))
        with torch.profiler.profile(), torch.utils.flop_counter.FlopCounterMode(display=False):
            double(x)
        print(json.dumps(changed(before, snapshot())))
    """
    )
    assert run(program, tmp_path) == [
        "torch._ops:_Ops.load_library",
        "torch.library:Library.impl",
    ]


@pytest.mark.parametrize("backend", [pytest.param("aot_eager", marks=pytest.mark.full), "inductor"])
def test_ops_that_are_traced_change_eight_places_at_most(backend: str, tmp_path: Path) -> None:
    program = (
        """
        import torch._dynamo, torch._inductor.compile_fx, torch._inductor.lowering, torch._inductor.fx_passes.reinplace
        import torch.distributed.tensor, torch.utils.flop_counter
        torch.compile(lambda x: x + 1)(torch.ones(2))
        before = snapshot()
        table = dict(torch._inductor.lowering.lowerings)
#---
        """
        + OPS
        + f"""
#---
        check({backend!r})
        double.register_decomposition(lambda x: x + x)
        double.register_decomposition(lambda x: x + x, when="export")
        check({backend!r}, dynamic=True)
        places = set(changed(before, snapshot()))
        now = torch._inductor.lowering.lowerings
        entries = [str(op) for op in now if now[op] is not table.get(op) and "guest" not in str(op)]
        patches = customops._torch.patches
        listed = [each.place for each in patches.PATCHES if each not in patches.pending.get(each.stage, ())]
        print(json.dumps([sorted(places), entries, listed]))
    """
    )
    places, entries, listed = run(program, tmp_path)
    assert entries == ["aten.sym_storage_offset.default"]
    assert len(listed) == 8
    assert set(places) <= set(listed)  # nothing is changed that `patches` does not list
    assert len(places) == 6  # the others are the entry, and a default of `split_const_subgraphs`


#: A program of torch alone, and what it sees: graphs, cache keys, numbers and errors.
PLAIN = """
import functorch.compile, torch.distributed.tensor
from torch.testing._internal.distributed import fake_pg
import torch._dynamo, torch._inductor.codecache as codecache, torch._inductor.compile_fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

seen = {}

@torch.library.custom_op("plain::add_", mutates_args=("x",))
def plain_add_(x: torch.Tensor, by: torch.Tensor) -> None:
    x.add_(by)

@torch.library.custom_op("plain::triple", mutates_args=())
def triple(x: torch.Tensor) -> torch.Tensor:
    return x * 3

triple.register_fake(torch.empty_like)

def program(x, by):
    y = x.clone()
    plain_add_(y[1:], by[1:])
    return triple(y).sum() + y.sin().sum()

x = torch.arange(12.0).view(4, 3)
graphs = []
keys = []

def backend(gm, inputs):
    def compiler(gm, inputs):
        graphs.append(gm.print_readable(print_output=False))
        keys.append(codecache.FxGraphCachePickler(gm).get_hash(codecache.FxGraphHashDetails(gm, inputs, {}, [])))
        return gm.forward
    boxed = lambda gm, inputs: functorch.compile.make_boxed_func(compiler(gm, inputs))
    return torch._dynamo.backends.common.aot_autograd(fw_compiler=boxed)(gm, inputs)

for dynamic in (False, True):
    torch._dynamo.reset()
    seen[f"aot {dynamic}"] = float(torch.compile(program, backend=backend, dynamic=dynamic)(x, x))
    torch._dynamo.reset()
    seen[f"inductor {dynamic}"] = float(torch.compile(program, dynamic=dynamic)(x, x))
seen["graphs"], seen["keys"] = graphs, keys
seen["make_fx"] = make_fx(program)(x, x).code
with FlopCounterMode(display=False) as counter:
    torch.mm(x, x.T)
    triple(x)
seen["flops"] = counter.get_total_flops(), str(counter.get_flop_counts())
buffer = torch.ones(3)

def reads(x):
    plain_add_(buffer, torch.ones(3))
    return x * buffer

value, jvp = torch.func.linearize(reads, torch.ones(3))
seen["linearize"] = [value.tolist(), jvp(torch.ones(3)).tolist(), jvp(torch.ones(3)).tolist()]
exported = torch.export.export(torch.nn.Linear(3, 2), (torch.ones(1, 3),))
seen["export"] = str(exported.run_decompositions().graph)
with torch.profiler.profile() as profile:
    triple(x)
seen["profile"] = sorted({event.name for event in profile.events()})
torch.library._register_effectful_op("plain::triple", torch._library.effects.EffectType.ORDERED)
torch._dynamo.reset()
seen["effects"] = float(torch.compile(program, backend=backend)(x, x))
torch.distributed.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=2)
mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
parts = torch.distributed.tensor.distribute_tensor(x, mesh, [torch.distributed.tensor.Shard(0)])
seen["dtensor"] = str((parts.sum(), (parts * 2).to_local()))
for call in (lambda: triple(x.tolist()), lambda: triple(parts), lambda: torch.ops.plain.nothing(x)):
    try:
        call()
    except Exception as error:
        seen.setdefault("errors", []).append([type(error).__name__, str(error)])
print(json.dumps(seen))
"""


def test_programs_without_our_ops_do_not_notice(tmp_path: Path) -> None:
    alone = run(PLAIN, tmp_path / "alone")
    guest = run(OPS + "\ncheck('inductor')\ncheck('inductor', dynamic=True)\n" + PLAIN, tmp_path / "guest")
    assert alone == guest


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_torch_can_be_left_as_it_is(backend: str, tmp_path: Path) -> None:
    program = (
        """
        import torch._dynamo, torch._inductor.compile_fx, torch._inductor.lowering
        torch.compile(lambda x: x + 1)(torch.ones(2))
        before = snapshot()
#---
        """
        + OPS.replace("(counts, (x,))", "")
        + f"""
#---
        check({backend!r})
        x = torch.ones(2, requires_grad=True)
        double(x).sum().backward()
        assert x.grad.tolist() == [2, 2]
        library = torch.library.Library("guest", "FRAGMENT")
        double(torch.ones(2))
        library.impl("double", lambda x: x * 5, "CPU")
        assert double(torch.ones(2)).tolist() == [5, 5]  # calls take the dispatcher, so the kernel is not missed
        print(json.dumps(changed(before, snapshot())))
    """
    )
    assert run(program, tmp_path, CUSTOMOPS_PATCH_TORCH="0") == []
