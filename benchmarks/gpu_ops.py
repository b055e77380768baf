"""The time per token of a layer's Triton kernels on a GPU, by the way that their ops are defined.

A token goes through `--layers` layers of four kernels, with the shapes of a model that serves `--tokens` sequences: RMS
norm, rotary embedding of queries and keys, writing keys and values to a cache, and SiLU times gate of an MLP (whose
matrix products are torch's). Each kernel writes to its arguments, as in vLLM, SGLang and quack. All ways launch the
same Triton kernels:

    function    the Python functions, without ops: the time of the launches
    customops   customops.custom_op(..., kernel_calls_torch=False)
    bypass      the same with bypass=True
    custom_op   torch.library.custom_op
    vLLM        a schema, a kernel and a fake impl in a Library, as vLLM's direct_register_custom_op
    quack       the function in eager mode, torch's custom_op while a compiler traces

in four modes:

    eager       including the launches of torch's own operations
    compiled    torch.compile, fullgraph=True
    overhead    torch.compile with mode="reduce-overhead", which captures CUDA graphs
    captured    eager, captured by hand in one CUDA graph, and replayed

Times are wall time, because launches are asynchronous and a token waits for the launches and for the GPU. Without a
CUDA device, the script times nothing. `--check` compares the results of all ways with plain torch, without a device
under Triton's interpreter.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported

import triton
import triton.language as tl
from bench import Times, take_turns
from torch import Tensor
from torch.library import Library, infer_schema

import customops

Fn = Callable[..., Any]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


# The kernels, and the functions that launch them ----------------------------------------------------------------------


@triton.jit
def norm_kernel(x, weight, out, columns, eps, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, BLOCK)
    at = tl.program_id(0) * columns + i
    row = tl.load(x + at, mask=i < columns, other=0.0).to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(row * row, axis=0) / columns + eps)
    result = row * scale * tl.load(weight + i, mask=i < columns, other=0.0).to(tl.float32)
    tl.store(out + at, result.to(out.dtype.element_ty), mask=i < columns)


@triton.jit
def rotary_kernel(x, cos, sin, heads, half, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, BLOCK)
    row = tl.program_id(0)
    at = row * 2 * half + i
    c = tl.load(cos + row // heads * half + i, mask=i < half, other=0.0).to(tl.float32)
    s = tl.load(sin + row // heads * half + i, mask=i < half, other=0.0).to(tl.float32)
    first = tl.load(x + at, mask=i < half, other=0.0).to(tl.float32)
    second = tl.load(x + at + half, mask=i < half, other=0.0).to(tl.float32)
    tl.store(x + at, (first * c - second * s).to(x.dtype.element_ty), mask=i < half)
    tl.store(x + at + half, (second * c + first * s).to(x.dtype.element_ty), mask=i < half)


@triton.jit
def cache_kernel(key, value, keys, values, slots, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, BLOCK)
    token = tl.program_id(0)
    slot = tl.load(slots + token)
    at = token * width + i
    tl.store(keys + slot * width + i, tl.load(key + at, mask=i < width), mask=i < width)
    tl.store(values + slot * width + i, tl.load(value + at, mask=i < width), mask=i < width)


@triton.jit
def mlp_kernel(gate_up, out, columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(0)
    gate = tl.load(gate_up + row * 2 * columns + i, mask=i < columns, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * columns + columns + i, mask=i < columns, other=0.0).to(tl.float32)
    tl.store(out + row * columns + i, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=i < columns)


def rms_norm(x: Tensor, weight: Tensor, out: Tensor, eps: float) -> None:
    columns = x.shape[-1]
    norm_kernel[(x.shape[0],)](x, weight, out, columns, eps, BLOCK=triton.next_power_of_2(columns))


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    tokens, heads, size = x.shape
    rotary_kernel[(tokens * heads,)](x, cos, sin, heads, size // 2, BLOCK=triton.next_power_of_2(size // 2))


def write_cache(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    width = key.shape[1] * key.shape[2]
    cache_kernel[(key.shape[0],)](key, value, keys, values, slots, width, BLOCK=triton.next_power_of_2(width))


def silu_and_mul(gate_up: Tensor, out: Tensor) -> None:
    rows, columns = out.shape
    mlp_kernel[(rows, triton.cdiv(columns, 1024))](gate_up, out, columns, BLOCK=1024)


#: Function -> the arguments that it writes.
KERNELS: dict[Fn, tuple[str, ...]] = {
    rms_norm: ("out",),
    rotary: ("x",),
    write_cache: ("keys", "values"),
    silu_and_mul: ("out",),
}


# The ways to define their ops -----------------------------------------------------------------------------------------

LIBRARY = Library("bench_gpu_vllm", "FRAGMENT")


def nothing(*args: Any) -> None:
    """The fake impl of ops that return nothing."""


def by_customops(fn: Fn, mutated: tuple[str, ...], bypass: bool = False) -> Fn:
    name = f"bench_gpu{'_bypass' * bypass}::{fn.__name__}"
    op = customops.custom_op(name, fn, mutates_args=mutated, bypass=bypass, kernel_calls_torch=False)
    op.register_fake(nothing)
    return op


def by_custom_op(fn: Fn, mutated: tuple[str, ...]) -> Fn:
    op = torch.library.custom_op(f"bench_gpu_torch::{fn.__name__}", fn, mutates_args=mutated)
    op.register_fake(nothing)
    return op


def as_vllm(fn: Fn, mutated: tuple[str, ...]) -> Fn:
    name = fn.__name__
    LIBRARY.define(name + infer_schema(fn, mutates_args=mutated))
    LIBRARY.impl(name, fn, DEVICE.upper())
    LIBRARY._register_fake(name, nothing)
    return getattr(torch.ops.bench_gpu_vllm, name)


def as_quack(fn: Fn, mutated: tuple[str, ...]) -> Fn:
    op = torch.library.custom_op(f"bench_gpu_quack::{fn.__name__}", fn, mutates_args=mutated)
    op.register_fake(nothing)
    overload = op._opoverload

    def call(*args: Any) -> Any:
        return (overload if torch.compiler.is_compiling() else fn)(*args)

    return call


WAYS: dict[str, Callable[[Fn, tuple[str, ...]], Fn]] = {
    "function": lambda fn, mutated: fn,
    "customops": by_customops,
    "bypass": lambda fn, mutated: by_customops(fn, mutated, bypass=True),
    "custom_op": by_custom_op,
    "vLLM": as_vllm,
    "quack": as_quack,
}


# A token --------------------------------------------------------------------------------------------------------------


class Model:
    """Layers of the four kernels, and of the matrix products between them."""

    def __init__(self, layers: int, tokens: int, heads: int, size: int, hidden: int, dtype: torch.dtype) -> None:
        options: dict[str, Any] = {"device": DEVICE, "dtype": dtype}
        generator = torch.Generator(DEVICE).manual_seed(0)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, **options) / shape[-1] ** 0.5

        width = heads * size
        self.layers, self.tokens, self.heads, self.size, self.hidden = layers, tokens, heads, size, hidden
        self.norm = torch.ones(width, **options)
        self.qkv, self.up, self.down = randn(width, 3 * width), randn(width, 2 * hidden), randn(hidden, width)
        angles = torch.arange(tokens, device=DEVICE)[:, None] / 10000 ** (torch.arange(size // 2, device=DEVICE) / size)
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)
        self.keys, self.values = (torch.zeros(4 * tokens, width, **options) for _ in range(2))
        self.slots = torch.randperm(4 * tokens, generator=generator, device=DEVICE)[:tokens]
        self.x = randn(tokens, width) * width**0.5

    def step(self, ops: dict[str, Fn]) -> Callable[[Tensor], Tensor]:
        def step(x: Tensor) -> Tensor:
            for _ in range(self.layers):
                normed, out = torch.empty_like(x), x.new_empty(self.tokens, self.hidden)
                ops["rms_norm"](x, self.norm, normed, 1e-6)
                query, key, value = (normed @ self.qkv).view(self.tokens, 3, self.heads, self.size).unbind(1)
                query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
                ops["rotary"](query, self.cos, self.sin)
                ops["rotary"](key, self.cos, self.sin)
                ops["write_cache"](key, value, self.keys, self.values, self.slots)
                ops["silu_and_mul"](query.flatten(1) @ self.up, out)
                x = x + out @ self.down
            return x

        return step

    def outcome(self, step: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        self.keys.zero_()
        self.values.zero_()
        result = step(self.x).clone()
        return result, self.keys.clone(), self.values.clone()


def in_torch() -> dict[str, Fn]:
    """Return functions of plain torch that compute the same as the kernels."""

    def norm(x: Tensor, weight: Tensor, out: Tensor, eps: float) -> None:
        wide = x.float()
        out.copy_(wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float())

    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
        first, second = x.float().chunk(2, -1)
        c, s = cos.float()[:, None], sin.float()[:, None]
        x.copy_(torch.cat([first * c - second * s, second * c + first * s], -1))

    def write(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        keys[slots], values[slots] = key.flatten(1), value.flatten(1)

    def mlp(gate_up: Tensor, out: Tensor) -> None:
        gate, up = gate_up.float().chunk(2, -1)
        out.copy_(torch.nn.functional.silu(gate) * up)

    return {"rms_norm": norm, "rotary": rotate, "write_cache": write, "silu_and_mul": mlp}


def captured(step: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[Tensor], Any]:
    for _ in range(3):
        step(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(x)
    return lambda x: graph.replay()


MODES: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Callable[[Tensor], Any]]] = {
    "eager": lambda step, x: step,
    "compiled": lambda step, x: torch.compile(step, fullgraph=True),
    "overhead": lambda step, x: torch.compile(step, fullgraph=True, mode="reduce-overhead"),
    "captured": captured,
}


def microseconds(step: Callable[[Tensor], Any], x: Tensor) -> float:
    """Return the time of a token, over ten tokens."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(10):
        step(x)
    torch.cuda.synchronize()
    return 1e5 * (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare the results on small shapes; time nothing")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=50)
    options = parser.parse_args()
    every_way = {way: {fn.__name__: define(fn, KERNELS[fn]) for fn in KERNELS} for way, define in WAYS.items()}
    with torch.inference_mode():
        small = Model(layers=2, tokens=3, heads=2, size=8, hidden=24, dtype=torch.float32)
        expected = small.outcome(small.step(in_torch()))
        for way, ops in every_way.items():
            steps = [small.step(ops)]
            if options.check and way != "function":  # the interpreter has no launch to trace
                steps.append(torch.compile(steps[0], fullgraph=True, backend="aot_eager"))
            for step in steps:
                torch.testing.assert_close(small.outcome(step), expected, rtol=1e-4, atol=1e-4)
        if options.check:
            print(f"{len(every_way)} ways on {DEVICE}: they agree with plain torch")
            return
        if DEVICE == "cpu":
            print("skipped: there is no CUDA device")
            return
        model = Model(options.layers, options.tokens, heads=32, size=128, hidden=11008, dtype=torch.bfloat16)
        versions = f"torch {torch.__version__}, Triton {triton.__version__}, Python {platform.python_version()}"
        print(f"{versions}, {torch.cuda.get_device_name()}; us of a token: median ± half the distance of the quartiles")
        print(f"{'':12}" + "".join(f"{mode:>18}" for mode in MODES))
        for way, ops in every_way.items():
            cells = ""
            for prepare in MODES.values():
                # One way at a time: Dynamo would search the graphs of all ways, which share the code of the step.
                torch._dynamo.reset()
                step = prepare(model.step(ops), model.x)
                meters = {way: lambda step=step: microseconds(step, model.x)}
                cells += f"{Times(take_turns(meters, options.rounds)).cell(way):>18}"
            print(f"{way:12}{cells}")


if __name__ == "__main__":
    main()
