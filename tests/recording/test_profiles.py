"""Kernels have names in profiles, inside what the profiler shows for their op."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import profile

from customops import Registry
from customops._dispatch import current_kernel


def scale(x: Tensor) -> Tensor:
    return x * 2


def scale_on_cpu(x: Tensor) -> Tensor:
    return x * 2


def name_of(op: Any, fn: Any, device: str) -> str:
    return f"{op._qualname}[{device}: test_profiles.py:{fn.__code__.co_firstlineno}]"


def parents(found: Any, name: str) -> list[str]:
    return [event.cpu_parent.name for event in found.events() if event.name == name]


@pytest.mark.parametrize("bypass", [False, True])
def test_a_kernel_is_below_its_op(registry: Registry, ns: str, bypass: bool) -> None:
    op = registry.custom_op(f"{ns}::scale", scale, bypass=bypass)
    op(torch.ones(2))
    with profile() as found:
        op(torch.ones(2))
        op.register_kernel("cpu", scale_on_cpu)
        op(torch.ones(2))
    assert parents(found, name_of(op, scale, "default")) == [op._qualname]
    assert parents(found, name_of(op, scale_on_cpu, "cpu")) == [op._qualname]
    below = [event.name for event in found.events() if event.cpu_parent and event.cpu_parent.name.startswith(ns)]
    assert below.count("aten::mul") == 2


@pytest.mark.parametrize("profiler", [profile, torch.autograd.profiler.profile])
def test_a_profiler_changes_no_op(registry: Registry, ns: str, profiler: Any) -> None:
    op = registry.custom_op(f"{ns}::scale", scale)
    kernel = op._definition.newest_kernels()["CompositeExplicitAutograd"].current_kernel
    kernel.passed()  # else the first call is inspected
    with profiler() as found:
        assert kernel.fn is scale
        assert not current_kernel.observers
        op(torch.ones(2))
    assert name_of(op, scale, "default") in [event.key for event in found.key_averages()]


@pytest.mark.compile
def test_compiled_code(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::scale", scale)
    op.register_fake(torch.empty_like)
    compiled = torch.compile(lambda x: op(x) + 1, fullgraph=True)
    compiled(torch.ones(3))
    with profile() as found:
        compiled(torch.ones(3))
    assert parents(found, name_of(op, scale, "default")) == [op._qualname]
