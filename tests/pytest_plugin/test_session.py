"""A session: a wrong gradient is found by pytest, described, logged, replayed and fixed."""

from __future__ import annotations

import torch
from helpers.projects import Project

import customops

WRONG = """
import torch
from torch import Tensor
from customops import custom_op

@custom_op("NS::softplus", mutates_args=())
def softplus(x: Tensor) -> Tensor:
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


def test_a_wrong_gradient(project: Project) -> None:
    command = ["--customops", f"{project.ops}.py", "--customops-effort", "quick", "-k", "test_gradients"]
    file = project.write(f"{project.ops}.py", WRONG)
    said = project.run(*command, status=1)
    assert "NS::softplus[sample1-test_gradients]" in said
    assert "the gradient of x is not the derivative of what the operator computes" in said
    line = WRONG.splitlines().index("def backward(ctx, grad):")  # its decorator
    assert f"backward (OPS.py:{line})" in said.replace(f"{file.parent}/", "")

    op = customops.default_registry[f"{project.ns}::softplus"]
    (described,) = [rule for rule in op.describe().rules if rule.kind == "backward"]
    assert described.where.endswith(f"{project.ops}.py:{line}")
    with customops.recording.record(op) as calls, customops.recording.dump("dumps", ops=op, when="all") as paths:
        x = torch.linspace(-1, 1, 4, dtype=torch.float64, requires_grad=True)
        op(x).sum().backward()
    assert [call.op for call in calls] == [op._qualname]
    wrong = x.grad

    project.write(f"{project.ops}.py", WRONG.replace("torch.exp(-x)", "torch.sigmoid(x)"))
    assert "1 passed" in project.run(*command, status=0)
    saved = customops.recording.load(paths[0])
    (again,) = saved.sample.args
    customops.recording.replay(paths[0]).sum().backward()
    fixed = customops.default_registry[op._qualname]
    y = again.detach().requires_grad_()
    fixed(y).sum().backward()
    torch.testing.assert_close(y.grad, torch.sigmoid(y.detach()))
    assert not torch.allclose(y.grad, wrong)
