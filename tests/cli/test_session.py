"""A session: a fault is found by the command line, looked at, recorded, replayed and fixed."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from helpers.command_line import Command, write

import customops

WRONG = """
@custom_op("cli::softplus", mutates_args=())
def softplus(x: Tensor) -> Tensor:
    if x.dim() == 3:
        raise ValueError("three dimensions")
    return torch.log1p(torch.exp(x))

softplus.register_fake(torch.empty_like)

def setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)

@softplus.register_autograd(setup_context=setup)
def backward(ctx, grad):
    (x,) = ctx.saved_tensors
    return grad * torch.exp(-x)

@softplus.register_samples
def _():
    yield (torch.linspace(-1, 1, 4, dtype=torch.float64, requires_grad=True),)
"""


def test_a_wrong_gradient_is_found_looked_at_replayed_and_fixed(run: Command, here: Path) -> None:
    code, out, _ = run("check", write("ops.py", WRONG), "--only", "gradients", "--effort", "quick", "--no-isolate")
    assert code == 1
    assert "FAILED      cli::softplus" in out
    assert "test_gradients: the gradient" in out
    assert "correct the formula for x" in " ".join(out.split())

    _, out, _ = run("describe", "cli::softplus", "ops.py")
    assert re.search(r"backward +backward \(ops.py:\d+\)", out)
    assert "forward mode         no: there is no jvp" in out

    op = customops.default_registry["cli::softplus"]
    with customops.recording.record(op) as calls, customops.recording.dump("dumps", ops=op) as paths:
        x = torch.zeros(2, requires_grad=True)
        op(x).sum().backward()
        with pytest.raises(ValueError, match="three dimensions"):
            op(torch.ones(1, 1, 1))
    assert [call.error for call in calls] == ["", "ValueError('three dimensions')"]
    with pytest.raises(ValueError, match="three dimensions"):
        customops.recording.replay(paths[0])

    write("ops.py", WRONG.replace("torch.exp(-x)", "torch.sigmoid(x)").replace("x.dim() == 3", "x.dim() > 9"))
    del sys.modules["ops"]  # as in another process
    code, out, _ = run("check", "ops.py", "--only", "gradients", "--effort", "quick", "--no-isolate")
    assert (code, out.split()[:2]) == (0, ["ok", "cli::softplus"])
    result = customops.recording.replay(paths[0])
    torch.testing.assert_close(result, torch.nn.functional.softplus(torch.ones(1, 1, 1)))
