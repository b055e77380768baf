"""`torch.compile` with inductor on a device written in Python: code over memory of the host, calls of kernels else."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers.isolated import isolated
from helpers.npy import backend_kernels, register
from torch import nn
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves

from customops.backend import get_backend
from customops.backend.memory import Memory
from customops.errors import UnsupportedError
from customops.testing import run_isolated

pytestmark = [pytest.mark.compile, pytest.mark.process]

on_device = isolated(register, imports=["helpers.inductor"])


def pointwise(x, y):
    return (x * 2 + y).relu().sin()


def reductions(x, y):
    return torch.softmax(x, -1), x.sum(0), x.mean(), x.var(1), x.argmax(1), (x - y).amax(1, keepdim=True)


def many(x, i):
    """Most ways of lowering, on a matrix with 8 columns, and on numbers of its rows."""
    yield torch.cat([x, x.flip(0)], 0).softmax(1)
    yield F.layer_norm(x, (8,)), F.gelu(x), x.cumsum(1), x.sort(1).values, x.std(0), torch.var_mean(x, 1)
    yield torch.where(x > 0, x, -x).pow(2), x[i], x.index_select(0, i), x.gather(1, (i[:, None] % 8).expand(-1, 3))
    yield x.half() * 2, x.bfloat16().exp().sum(1), (x * 10).int() // 3, x.to(torch.float64).sin(), x.isnan().any()
    yield F.pad(x, (1, 2)), x.T.contiguous(), x.unfold(1, 3, 2).sum(-1), torch.arange(5, device=x.device) * 2
    yield x.clone().index_put_((i,), x[i] + 1), torch.zeros_like(x).scatter_add(0, i[:, None].expand(-1, 8), x[i])
    yield x @ x.T, torch.addmm(x[0], x[:, :6], x), x.topk(2, 1).values, torch.full((2,), 3.0, device=x.device)


def cpu(values):
    return [value.cpu() for value in tree_leaves(values)]


@on_device
def test_pointwise_and_reductions_run_no_kernel_of_the_cpu() -> None:
    for fn in (pointwise, reductions):
        for dynamic in (None, True):
            torch._dynamo.reset()
            compiled = torch.compile(fn, fullgraph=True, dynamic=dynamic)
            for rows in (5, 9, 11):
                x, y = torch.randn(rows, 7), torch.randn(7)
                there = x.to("npy:1"), y.to("npy:1")
                with get_backend().no_fallback():
                    got = compiled(*there)
                assert {value.device for value in tree_leaves(got)} == {torch.device("npy:1")}
                assert_close(cpu(got), tree_leaves(fn(x, y)))


@on_device
def test_a_second_shape_is_no_third_compilation() -> None:
    compiled, counters = torch.compile(pointwise), torch._dynamo.utils.counters
    y = torch.ones(7, device="npy")
    counts = []
    for rows in (5, 9, 11, 13):
        compiled(torch.ones(rows, 7, device="npy"), y)
        counts.append(counters["stats"]["unique_graphs"])
    assert [count - counts[0] for count in counts] == [0, 1, 1, 1]


@on_device
def test_most_ways_of_lowering() -> None:
    x, i = torch.randn(6, 8), torch.tensor([1, 3, 0, 2])
    compiled = torch.compile(lambda *args: list(many(*args)), fullgraph=True)
    expected = compiled(x, i)
    torch._dynamo.reset()
    assert_close(cpu(compiled(x.npy(), i.npy())), tree_leaves(expected))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.first, self.norm, self.last = (
            nn.Conv2d(1, 4, 3),
            nn.Linear(36, 16),
            nn.LayerNorm(16),
            nn.Linear(16, 3),
        )

    def forward(self, x):
        x = F.max_pool2d(self.conv(x).relu(), 2).flatten(1)
        return self.last(F.gelu(self.norm(self.first(x))))


def losses(net, x, y, run) -> list[float]:
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    found = []
    for rows in (8, 8, 6, 5):  # the last ones with dynamic shapes
        optimizer.zero_grad()
        loss = F.cross_entropy(run(x[:rows]), y[:rows])
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@on_device
def test_training() -> None:
    x, y = torch.randn(8, 1, 8, 8), torch.randint(3, (8,))
    torch.manual_seed(0)
    net = Net()
    state = {name: value.clone() for name, value in net.state_dict().items()}
    expected = losses(net, x, y, net)
    net.load_state_dict(state)
    net.npy()
    assert_close(losses(net, x.npy(), y.npy(), torch.compile(net)), expected, rtol=1e-4, atol=1e-5)


@on_device
def test_gradients_run_no_kernel_of_the_cpu() -> None:
    x = torch.randn(4, 7, requires_grad=True)
    there = x.detach().npy().requires_grad_()
    compiled = torch.compile(lambda x: (x.exp().sum(1) * x.sin().mean(1)).sum(), fullgraph=True)
    with get_backend().no_fallback():
        (grad,) = torch.autograd.grad(
            compiled(there), there, torch.empty((), device="npy").set_(torch.tensor(1.0).npy())
        )
    (expected,) = torch.autograd.grad((x.exp().sum(1) * x.sin().mean(1)).sum(), x)
    assert_close(grad.cpu(), expected)


@on_device
def test_writes_branches_and_tensors_of_the_cpu() -> None:
    def writes(x, y, z):
        x.add_(1).mul_(2)
        y[1:] += x[:-1]
        branch = torch.cond(y.sum() > 100, lambda x: x.cos() + 1, lambda x: x.tan(), (x,))
        return branch, z.to(x.device) + x

    x, y, z = torch.randn(4), torch.randn(4), torch.randn(4)
    there = x.npy(), y.npy(), z
    got = torch.compile(writes, fullgraph=True)(*there)
    assert_close(cpu(got), tree_leaves(writes(x, y, z)))
    assert_close(cpu(there), [x, y, z])


@on_device
def test_random_numbers_follow_the_seed() -> None:
    compiled, x = torch.compile(lambda x: F.dropout(x, 0.5) + torch.rand_like(x)), torch.ones(100, device="npy")
    drawn = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        drawn.append(compiled(x).cpu())
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


@on_device
def test_what_the_user_has_a_kernel_for_is_called() -> None:
    """Also where inductor would take the op apart, or fuse it."""
    backend, called = get_backend(), []

    def sin(x):
        called.append("sin")
        return backend.wrap(backend.host(x).sin() + 100)

    def softmax(x, dim, half_to_float):
        called.append("softmax")
        return backend.wrap(torch.softmax(backend.host(x), dim) + 1)

    def fn(x):
        return torch.softmax(x.sin(), 0) * 2 + x.sin()

    x = torch.zeros(2, device="npy")
    with backend_kernels(backend, {"aten::sin": sin, "aten::_softmax": softmax}):
        assert torch.compile(fn, fullgraph=True)(x).tolist() == [103, 103]
        assert set(called) == {"sin", "softmax"}
        assert_close(torch.compile(fn)(x.cpu()), fn(x.cpu()))
    torch._dynamo.reset()
    with backend.no_fallback():
        assert torch.compile(fn, fullgraph=True)(x).tolist() == [1, 1]


class OwnMemory(Memory):
    """Memory that the code of inductor could not read."""


@contextlib.contextmanager
def memory_that_is_not_the_hosts():
    memory = get_backend()._memory
    memory.__class__ = OwnMemory
    try:
        yield
    finally:
        memory.__class__ = Memory


@on_device
def test_all_ops_are_called_where_the_memory_is_not_the_hosts() -> None:
    backend = get_backend()

    def fn(x, y):
        x.add_(1)
        return torch.softmax(x.view(-1), 0) + y, F.gelu(x).sum(), torch.zeros(2, device=x.device), x[1:].clone()

    x, y = torch.randn(3), torch.randn(3)
    there = x.npy(), y.npy()
    net, z = Net(), torch.randn(3, 1, 8, 8)
    expected = net(z).sin()
    expected.sum().backward()
    gradients = [parameter.grad.clone() for parameter in net.parameters()]
    net.zero_grad()
    net.npy()
    with memory_that_is_not_the_hosts():
        backend.reset_fallback_counts()
        got = torch.compile(fn, fullgraph=True)(*there)
        assert backend.fallback_counts().keys() >= {"aten::_softmax", "aten::gelu", "aten::add.Tensor"}
        result = torch.compile(lambda x: net(x).sin(), fullgraph=True)(z.npy())
        result.sum().backward()
        # One that slips through is refused, and does not read the memory.
        _, wrapper = (getattr(backend.module, name) for name in ("Scheduling", "PythonWrapperCodegen"))
        with pytest.raises(UnsupportedError, match="that of 'npy' is its own"):
            wrapper._generate_kernel_call_helper(wrapper, "kernel", [], device=torch.device("npy:0"))
    assert_close(cpu(got), tree_leaves(fn(x, y)))
    assert_close(result.cpu(), expected)
    assert_close([parameter.grad.cpu() for parameter in net.parameters()], gradients)


def error_of(run) -> UnsupportedError:
    torch._dynamo.reset()
    with pytest.raises(UnsupportedError) as info:
        run()
    assert len(str(info.value).splitlines()) <= 3
    assert "\n  fix:" in str(info.value)
    text = "".join(traceback.format_exception(info.value))
    assert "_inductor" not in text.partition("UnsupportedError")[0]
    return info.value


@on_device
def test_one_short_error_where_nothing_writes_code() -> None:
    x = torch.ones(3, device="npy")
    with torch._inductor.config.patch(cpp_wrapper=True):
        assert error_of(lambda: torch.compile(torch.sin)(x)).fix == "cpp_wrapper=False"


@on_device
def test_one_short_error_without_a_compiler() -> None:
    x = torch.ones(3, device="npy")
    with torch._inductor.config.patch({"cpp.cxx": (None, "no_such_compiler")}):
        error = error_of(lambda: torch.compile(torch.sin)(x))
    assert "no_such_compiler" in error.problem
    assert error.fix == 'install g++; or torch.compile(..., backend="aot_eager")'


@on_device
def test_one_short_error_where_inductor_is_another() -> None:
    del torch._inductor.scheduler.BaseSchedulerNode.is_cpu
    error = error_of(lambda: torch.compile(torch.sin)(torch.ones(3, device="npy")))
    assert error.problem.endswith("it lacks is_cpu")


@on_device
def test_the_interface_that_dynamo_asks_for() -> None:
    interface = torch._dynamo.device_interface.get_interface_for_device("npy")
    assert (interface.device_count(), interface.is_available(), interface.is_triton_capable()) == (2, True, False)
    with torch.npy.device(1):
        assert interface.current_device() == interface.Worker.current_device() == 1
        assert torch._inductor.utils.decode_device("npy") == torch.device("npy:1")


PROGRAM = """\
import sys
import torch
from customops.backend import register_backend

backend = register_backend("npy")
if "kernel" in sys.argv:
    @backend.kernel("aten::sin")
    def sin(x):
        return backend.wrap(backend.host(x).sin() + 100)

print(torch.compile(lambda x: x.sin() * 2 + 1)(torch.zeros(2, device="npy")).tolist())
print(torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"])
"""


@pytest.mark.slow
def test_caches_know_the_kernels(tmp_path: Path) -> None:
    """The code depends on which kernels there are, and is found again where they are the same ones."""
    environment = os.environ | {
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
    }
    outputs = []
    for arguments in ([], ["kernel"], []):
        command = [sys.executable, "-c", PROGRAM, *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout.split("\n")[:2])
    without, with_kernel = "[1.0, 1.0]", "[201.0, 201.0]"
    assert outputs == [[without, "0"], [with_kernel, "0"], [without, "1"]]


def test_registering_loads_no_compiler() -> None:
    code = """
import sys
import torch
from customops.backend import register_backend

register_backend("npy")
result = [name for name in ("torch._dynamo", "torch._inductor", "triton", "sympy") if name in sys.modules]
"""
    assert run_isolated(code).value == []
