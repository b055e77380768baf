"""Nothing is kept: of ops that are gone, of registrations that were replaced, of calls."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.library import Library

from customops import Registry

pytestmark = pytest.mark.slow


HERE = Path(__file__).parent
SCHEMA = "(Tensor x, float by=2.0) -> Tensor"


def objects() -> int:
    gc.collect()
    return len(gc.get_objects())


def resident() -> int:
    """Bytes of memory that the process holds."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("needs /proc")
    return int(statm.read_text().split()[1]) * 4096


def grown(work: Callable[[int], Any], times: int) -> tuple[int, int]:
    """Objects and bytes that are there after `times`, and were not before."""
    for i in range(times // 10):
        work(-1 - i)
    before = objects(), resident()
    for i in range(times):
        work(i)
    return objects() - before[0], resident() - before[1]


def define_and_remove(registry: Registry, name: str) -> None:
    op = registry.custom_op(name, lambda x, by: x * by, mutates_args=(), schema=SCHEMA)
    op.register_fake(lambda x, by: torch.empty_like(x))
    op.register_autograd(lambda ctx, grad: (grad, None))
    op.register_kernel("cpu", lambda x, by: x + by)
    x = torch.ones(2, requires_grad=True)
    op(x).sum().backward()
    op(x.detach())
    op.unregister()


def define_and_remove_by_hand(ns: str, name: str) -> None:
    library = Library(ns, "FRAGMENT")
    library.define(name + SCHEMA)
    for key in ("CPU", "CompositeExplicitAutograd", "Autograd", "FuncTorchBatched", "Meta"):
        library.impl(name, lambda x, by: x, key)
    getattr(getattr(torch.ops, ns), name)
    library._destroy()


def test_ops(registry: Registry, ns: str) -> None:
    assert grown(lambda i: define_and_remove(registry, f"{ns}::op{i % 2**32}"), 2000)[0] < 100


@pytest.mark.full
def test_bytes_of_ops(ns: str) -> None:
    """torch itself keeps something of each name it has seen; we do not keep more. (In a process of its own: what a heap
    has free from before would not show. The sets of names that torch keeps grow by doubling, which so
    many ops hide.)"""
    script = f"""
        import test_memory as t
        by_hand = t.grown(lambda i: t.define_and_remove_by_hand("{ns}", f"hand{{i % 2**32}}"), 6000)
        ours = t.grown(lambda i: t.define_and_remove(t.Registry(), f"{ns}::op{{i % 2**32}}"), 6000)
        print(by_hand[1] // 6000, ours[1] // 6000)
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)],
        env={
            "PYTHONPATH": os.pathsep.join(map(str, [HERE.parents[2], HERE.parents[1], HERE])),
            "PATH": os.environ["PATH"],
        },
        capture_output=True,
        text=True,
        check=True,
    )
    by_hand, ours = map(int, done.stdout.split())
    assert ours < by_hand + 1000


def test_registering_again(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::f", lambda x: x + 1, mutates_args=(), schema="(Tensor x) -> Tensor")

    def again(i: int) -> None:
        op.register_kernel("cpu", lambda x: x + i)
        op.register_fake(lambda x: torch.empty_like(x))
        op.register_autograd(lambda ctx, grad: grad)
        op(torch.ones(1))

    assert grown(again, 2000)[0] < 100


@pytest.mark.parametrize(("needs_grad", "calls"), [(False, 100_000), (True, 20_000)])
def test_calls(registry: Registry, ns: str, needs_grad: bool, calls: int) -> None:
    op = registry.custom_op(f"{ns}::f", lambda x, by: x * by, mutates_args=(), schema=SCHEMA)
    op.register_autograd(
        lambda ctx, grad: (grad * 2, None), setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0])
    )
    x = torch.ones(1, requires_grad=needs_grad)

    def call(_: int) -> None:
        y = op(x)
        if needs_grad:
            torch.autograd.grad(y, x, torch.ones(1))

    for _ in range(4):  # the heap of a process that ran other tests may grow for a while; what leaks does so each time
        new_objects, new_bytes = grown(call, calls)
        if new_bytes < 1_600_000:
            break
    assert new_objects < 100
    assert new_bytes < 1_600_000
