"""Ops of Triton kernels against plain torch, on CPU tensors under Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.isolated import isolated
from helpers.warm import PYTHON
from torch import Tensor
from torch.nn.functional import rms_norm as rms_norm_of_torch

import customops

pytestmark = [pytest.mark.process, pytest.mark.slow]


ops: Any = None  # helpers.triton_ops, where the tests run


def setup() -> None:
    global ops
    os.environ["TRITON_INTERPRET"] = "1"
    ops = importlib.import_module("helpers.triton_ops")
    importlib.import_module("torch._dynamo")  # once, and not in each fork


interpreted = isolated(setup)


@pytest.fixture(autouse=True)
def _triton() -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs triton")


def compiled(fn: Any, **options: Any) -> Any:
    return torch.compile(fn, fullgraph=True, **options)


@interpreted
def test_values() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x, y, weight = torch.randn(5, 7, dtype=dtype), torch.randn(5, 7, dtype=dtype), torch.randn(7, dtype=dtype)
        torch.testing.assert_close(ops.add(x, y), x + y)
        torch.testing.assert_close(ops.add(x.t(), y.t()), (x + y).t())
        torch.testing.assert_close(ops.softmax(x), x.softmax(-1))
        torch.testing.assert_close(ops.rms_norm(x, weight), rms_norm_of_torch(x, (7,), weight, 1e-6))
    for x in (ops.rotary_inputs()[0], torch.randn(8, 2, 3).transpose(0, 2)):  # one of them with other strides
        _, cos, sin = ops.rotary_inputs()
        expected = ops.rotary_in_torch(x, cos, sin)
        assert ops.rotary_(x, cos, sin) is None
        torch.testing.assert_close(x, expected)


@interpreted
def test_gradients_are_those_of_torch() -> None:
    def gradients(fn: Any, *inputs: Tensor) -> Any:
        leaves = [x.clone().requires_grad_() for x in inputs]
        return torch.autograd.grad(fn(*leaves).square().sum(), leaves)

    x, y, weight = torch.randn(5, 7).double(), torch.randn(5, 7).double(), torch.randn(7).double()
    pairs = [
        (ops.add, torch.add, (x, y)),
        (ops.softmax, lambda x: x.softmax(-1), (x,)),
        (ops.rms_norm, lambda x, w: rms_norm_of_torch(x, (7,), w, 1e-6), (x, weight)),
    ]
    for ours, theirs, inputs in pairs:
        torch.testing.assert_close(gradients(ours, *inputs), gradients(theirs, *inputs))
        aot = compiled(ours, backend="aot_eager")
        torch.testing.assert_close(gradients(aot, *inputs), gradients(theirs, *inputs))


@interpreted
def test_compiled() -> None:
    def model(x: Tensor, y: Tensor) -> Tensor:
        return ops.softmax(ops.add(x, y).sin())

    for options in ({"backend": "aot_eager"}, {"backend": "aot_eager", "dynamic": True}, {"backend": "inductor"}):
        fn = compiled(model, **options)
        for rows in (3, 5):
            x, y = torch.randn(rows, 7), torch.randn(rows, 7)
            torch.testing.assert_close(fn(x, y), (x + y).sin().softmax(-1))

    def writes(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ops.rotary_(x, cos, sin)
        return x * 2

    x, cos, sin = ops.rotary_inputs()
    expected = ops.rotary_in_torch(x, cos, sin)
    torch.testing.assert_close(compiled(writes)(x, cos, sin), expected * 2)
    torch.testing.assert_close(x, expected)


@interpreted
def test_contexts() -> None:
    x, y, weight = torch.randn(5, 7), torch.randn(5, 7), torch.randn(7)
    with torch.inference_mode():
        torch.testing.assert_close(ops.add(x, y), x + y)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = ops.rms_norm(mode.from_tensor(x), mode.from_tensor(weight))
    assert fake.shape == x.shape
    assert ops.softmax(x.to("meta")).shape == x.shape
    torch.testing.assert_close(torch.func.grad(lambda x: ops.softmax(x)[0, 0])(x), torch.func.grad(first)(x))
    batched = torch.vmap(ops.softmax)(torch.stack([x, y]))
    torch.testing.assert_close(batched, torch.stack([x, y]).softmax(-1))
    again = torch.utils.checkpoint.checkpoint(ops.softmax, x.requires_grad_(), use_reentrant=False)
    torch.testing.assert_close(again, x.softmax(-1))
    program = torch.export.export(Softmax(), (x.detach(),))
    assert torch.ops.triton_ops.softmax.default in [node.target for node in program.graph.nodes]
    torch.testing.assert_close(program.module()(y), y.softmax(-1))


def first(x: Tensor) -> Tensor:
    return x.softmax(-1)[0, 0]


class Softmax(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return ops.softmax(x)


@interpreted
def test_opcheck() -> None:
    for op, args in (
        (ops.add, (torch.randn(3, 5), torch.randn(3, 5))),
        (ops.softmax, (torch.randn(3, 5),)),
        (ops.rms_norm, (torch.randn(3, 5), torch.randn(5))),
        (ops.rms_norm_backward, (torch.randn(3, 5), torch.randn(3, 5), torch.randn(5), 1e-6)),
    ):
        grad = op is not ops.rms_norm_backward
        leaves = [a.requires_grad_(grad) if isinstance(a, Tensor) else a for a in args]
        customops.opcheck(op, tuple(leaves))
    customops.opcheck(ops.rotary_, ops.rotary_inputs())


@interpreted
def test_a_kernel_of_ones_own_for_a_device() -> None:
    x = torch.randn(3, 5)
    fn = compiled(lambda x: ops.softmax(x) * 2, backend="aot_eager")
    torch.testing.assert_close(fn(x), x.softmax(-1) * 2)
    with customops.default_registry.scope():
        ops.softmax.register_kernel("cpu", lambda x: x + 1)
        torch.testing.assert_close(fn(x), (x + 1) * 2)
    torch.testing.assert_close(fn(x), x.softmax(-1) * 2)


@interpreted
def test_threads_take_turns() -> None:
    x = torch.randn(5, 7)
    with ThreadPoolExecutor(4) as pool:
        for result in pool.map(lambda _: ops.add(x, x), range(40)):
            torch.testing.assert_close(result, x + x)


@interpreted
def test_the_checker_does_not_blame_an_op_for_the_interpreter() -> None:
    """It cannot run two kernels at a time; only ops that launch theirs by wrap_triton wait for each other."""

    @customops.custom_op("interpreted::add", mutates_args=())
    def add(x: Tensor, y: Tensor) -> Tensor:
        out = torch.empty_like(x)
        ops.add_kernel[(1,)](x, y, out, x.numel(), ops.tl.float32, BLOCK=64)
        return out

    samples = [(torch.randn(5, 7), torch.randn(5, 7))]
    (result,) = [r for r in customops.check(add, samples, only="test_threads").results if r.check != "inputs"]
    assert result.status == "not exercised"
    assert "wrap_triton(kernel)" in str(result.reason)
    (result,) = [r for r in customops.check(ops.add, samples, only="test_threads").results if r.check != "inputs"]
    assert result.status == "passed"


def test_the_interpreter_has_to_be_there_first() -> None:
    script = """if True:
        import triton, os, torch, customops
        os.environ["TRITON_INTERPRET"] = "1"
        from helpers import triton_ops
        try:
            triton_ops.softmax(torch.randn(3, 5))
        except customops.errors.UnsupportedError as error:
            print(error)
    """
    done = in_process("-c", script)
    assert "before triton is first imported" in done


EXAMPLE = Path(__file__).parents[3] / "examples" / "triton_rms_norm.py"


def test_the_example_runs() -> None:
    assert "are those of torch" in in_process(str(EXAMPLE))


def test_the_example_is_right() -> None:
    checks = "schema,autograd_registration,faketensor,aot_dispatch_dynamic"
    told = in_process("-m", "customops", "check", str(EXAMPLE), "--effort", "quick", "--only", checks)
    assert "2 ops: 2 ok, 0 with faults" in told


def in_process(*arguments: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    folders = [str(EXAMPLE.parents[1]), str(EXAMPLE.parents[1] / "tests"), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    command = [PYTHON, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
