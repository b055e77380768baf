"""Ops by the helpers of `examples/migrate`, and by hand as the libraries' own helpers do, for `call_overhead`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import by_hand
import torch
from torch import Tensor
from torch.library import Library

import customops

EXAMPLES = Path(__file__).parents[1] / "examples" / "migrate"
OURS, THEIRS = Library("bench_migrate", "FRAGMENT"), Library("bench_by_hand", "FRAGMENT")


def write(x: Tensor, y: Tensor, eps: float = 1e-6) -> None:
    """As a kernel in another language: nothing of torch is called."""


def shift(x: Tensor, y: Tensor) -> Tensor:
    return x.add(y)


def helper(library: str) -> ModuleType:
    name = f"from_{library}"
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def named(library: Library, name: str) -> Any:
    return getattr(getattr(torch.ops, library.ns), name)


def contenders() -> dict[str, dict[str, Callable[..., Any]]]:
    """For each library: its helper over customops, and what it does by hand, with a `Library` or with `custom_op`."""
    helper("vllm").direct_register_custom_op("vllm", write, ["x"], target_lib=OURS)
    fbgemm, schema = helper("fbgemm"), "(Tensor(a!) x, Tensor y, float eps=1e-06) -> ()"
    customops.define(f"{OURS.ns}::fbgemm", schema, lib=OURS)
    fbgemm.op_registeration(OURS, "fbgemm", write, "CPU")
    shifts = [lambda x, y: x.add(y) for _ in range(2)]
    for fn in shifts:
        fn.__name__, fn.__annotations__ = "torchao", shift.__annotations__
    quack, flashinfer = helper("quack").torch_library_op, helper("flashinfer").register_custom_op
    flash_attention = helper("flash_attention").custom_op_wrapper
    writes: dict[str, Any] = {"mutates_args": ("x",)}
    return {
        "as vLLM": {"customops": named(OURS, "vllm"), "Library": by_hand.vllm(THEIRS, "vllm", write, ["x"])},
        "as SGLang": {
            "customops": helper("sglang").register_custom_op(write, op_name="bench", mutates_args=["x"]),
            "Library": by_hand.sglang(THEIRS, "sglang", write, ["x"]),
        },
        "as FlashInfer": {
            "customops": flashinfer("bench_migrate::flashinfer", write, **writes),
            "custom_op": by_hand.flashinfer("bench_by_hand::flashinfer", write, **writes),
        },
        "as flash-attention": {
            "customops": flash_attention("bench_migrate::flash_attention", write, **writes),
            "custom_op": by_hand.flash_attention("bench_by_hand::flash_attention", write, **writes),
        },
        "as quack": {
            "customops": quack("bench_migrate::quack", **writes)(write),
            "Library": by_hand.quack("bench_by_hand::quack", write, **writes),
        },
        "as FBGEMM": {
            "customops": named(OURS, "fbgemm"),
            "Library": by_hand.fbgemm(THEIRS, "fbgemm", schema, {"CPU": write}),
        },
        "as torchao": {
            "customops": helper("torchao")._register_custom_op(OURS)(shifts[0]),
            "Library": by_hand.torchao(THEIRS, "torchao", shifts[1]),
        },
    }
