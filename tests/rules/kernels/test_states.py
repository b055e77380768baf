"""Several kernels, and what may be around a call: modes, subclasses, transforms, autograd, traced ops, a mesh."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
import torch
from helpers.several import Several, up_to
from torch import Tensor, ones
from torch.overrides import TorchFunctionMode
from torch.testing import assert_close
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import customops
from customops import Registry
from customops.tuning import _choices as tuning


@pytest.fixture
def pair(several: Several) -> Several:
    """ "small" takes rows of 4, "default" others; both have a gradient."""
    several.add("small", up_to(4))
    several.op.register_autograd(lambda ctx, grad: (several.op(grad, ctx.by), None), setup_context=keep)
    return several


def keep(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
    ctx.by = inputs[1]


class Dispatch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


class Function(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def both() -> Any:
    with Function(), Dispatch():
        yield


STATES: dict[str, Any] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "dispatch mode": Dispatch,
    "function mode": Function,
    "both modes": both,
    "default device": lambda: torch.device("meta"),
    "profiler": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
}


@pytest.mark.parametrize("state", STATES)
def test_a_choice_is_the_same_and_is_kept(pair: Several, state: str) -> None:
    """Before, within and after; a predicate that makes tensors of its own makes them where the caller does."""
    inputs = {n: ones(2, n) for n in (3, 6)}
    names = {3: "small", 6: "default"}
    for _ in range(2):
        for n, x in inputs.items():
            assert pair.runs(x) == names[n]
        with STATES[state]():
            for _ in range(3):
                for n, x in inputs.items():
                    assert pair.runs(x) == names[n]
            with pair.op.prefer("default"):
                assert pair.runs(inputs[3]) == "default"
            with pair.op.prefer("reference"):
                assert pair.runs(inputs[3]) == ""


def test_a_dispatch_mode_sees_one_op(pair: Several, ns: str) -> None:
    with Dispatch() as mode:
        pair.op(ones(3))
    assert [name for name in mode.seen if name.startswith(ns)] == [f"{ns}::f"]


def test_a_predicate_sees_the_modes_of_its_caller_only_by_the_arguments(several: Several) -> None:
    """Stand-ins are made without them: neither mode sees operations that `when` does on tensors without data."""
    several.add("small", lambda x: (x * 2).sum(0).shape == () and x.shape[0] <= 4)
    for state in (Dispatch, Function, torch.inference_mode, torch.no_grad):
        with state() as mode:
            assert [several.runs(ones(n)) for n in (3, 6)] == ["small", "default"]
            assert "aten::sum.dim_IntList" not in getattr(mode, "seen", ())


def test_a_subclass_whose_parts_call_the_op(pair: Several) -> None:
    for n, name in ((3, "small"), (6, "default")):
        pair.ran.clear()
        result: Any = pair.op(TwoTensor(ones(n), 2 * ones(n)), 3.0)
        assert pair.ran == [name, name]
        assert_close(result.b, torch.full((n,), 6.0))


def test_transforms_of_functions(pair: Several) -> None:
    pair.op.register_vmap(lambda info, in_dims, x, by: (pair.op(x, by), in_dims[0]))
    op = pair.op
    for n, name in ((3, "small"), (6, "default")):
        x = torch.randn(5, n)
        pair.ran.clear()
        assert_close(torch.func.vmap(op)(x), 2 * x)  # one call, of the whole batch
        assert pair.ran == [name]
        assert_close(torch.func.vmap(torch.func.grad(lambda x: op(x, 3.0).square().sum()))(x), 18 * x)
        assert set(pair.ran) == {name}
        value, pull = torch.func.vjp(lambda x: op(x, 3.0), x)
        assert_close((value, *pull(x)), (3 * x, 3 * x))
        assert_close(torch.func.jacrev(lambda x: op(x, 3.0))(ones(n)), 3 * torch.eye(n))
        with op.prefer("reference"):
            pair.ran.clear()
            assert_close(torch.func.grad(lambda x: op(x, 3.0).sum())(ones(n)), torch.full((n,), 3.0))
            assert not pair.ran


def test_functionalize(pair: Several) -> None:
    for n, name in ((3, "small"), (6, "default")):
        pair.ran.clear()
        assert_close(torch.func.functionalize(lambda x: pair.op(x, 3.0))(ones(n)), torch.full((n,), 3.0))
        assert pair.ran == [name]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_runs_the_same_kernel_again(pair: Several, reentrant: bool) -> None:
    for n, name in ((3, "small"), (6, "default")):
        x = ones(n, requires_grad=True)
        with pair.op.prefer("reference"):
            y = checkpoint(lambda x: pair.op(x, 3.0).exp(), x, use_reentrant=reentrant)
        pair.ran.clear()
        y.sum().backward()  # by what counts then: the scope has ended
        assert pair.ran == [name, name]  # forward and backward
        assert_close(x.grad, 3 * torch.exp(torch.full((n,), 3.0)))


def test_second_derivatives(pair: Several) -> None:
    x = ones(3, requires_grad=True, dtype=torch.double)
    assert torch.autograd.gradgradcheck(lambda x: pair.op(x, 3.0).square(), (x,))
    assert set(pair.ran) == {"small"}


def test_autocast_casts_first(registry: Registry, ns: str) -> None:
    several = Several(registry, f"{ns}::f")
    several.add("half", lambda x: x.dtype is torch.bfloat16)
    several.op.register_autocast("cpu", torch.bfloat16)
    for _ in range(3):
        several.ran.clear()
        with torch.autocast("cpu", torch.bfloat16):
            assert several.op(ones(3)).dtype is torch.bfloat16
        assert several.ran == ["half"]
        assert several.runs(ones(3)) == "default"


def test_preferences_of_several_threads(pair: Several) -> None:
    wrong = []
    ran = threading.local()
    for name in ("one", "two", "three"):
        run = lambda x, by, name=name: setattr(ran, "name", name) or x * by  # noqa: E731
        pair.op.register_kernel("cpu", run, name=name, priority=-1)

    def work(name: str) -> None:
        for i in range(300):
            with pair.op.prefer(name):
                pair.op(ones(i % 9 + 1))
                if ran.name != name:
                    wrong.append((name, ran.name))

    threads = [threading.Thread(target=work, args=(name,)) for name in ("one", "two", "three") * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# Ops that compilers trace into ---------------------------------------------------------------------------------------


@pytest.mark.compile
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_triton_op(registry: Registry, ns: str, backend: str) -> None:
    ran: list[str] = []

    def plain(x: Tensor) -> Tensor:
        return x * 2

    op = customops.triton_op(f"{ns}::f", plain, mutates_args=(), registry=registry)

    @op.register_kernel("cpu", name="small", when=up_to(4))
    def small(x: Tensor) -> Tensor:
        ran.append("small")
        return x + x

    compiled = torch.compile(lambda x: op(x) + 1, backend=backend, fullgraph=True)
    for call, more in ((op, 0), (compiled, 1)):
        for _ in range(2):
            for n, names in ((3, ["small"]), (6, []), (7, [])):
                assert_close(call(ones(n)), torch.full((n,), 2.0 + more))
                assert ran == names
                ran.clear()
    with op.prefer("default"):
        for call, more in ((op, 0), (compiled, 1)):
            assert_close(call(ones(3)), torch.full((3,), 2.0 + more))
            assert not ran


# Compiled ------------------------------------------------------------------------------------------------------------


@pytest.mark.compile
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_tuned_choice_and_dynamic_shapes(several: Several, backend: str) -> None:
    several.add("other", priority=-1)
    key = several.op._qualname, tuning.hardware(torch.device("cpu")), tuning.VERSION
    registration = tuning.add({(*key, "x=float32[16]"): "other"})
    try:
        compiled = torch.compile(lambda x: several.op(x) + 1, backend=backend, fullgraph=True)
        for n, name in ((9, "other"), (16, "other"), (17, "default"), (8, "default"), (12, "other"), (40, "default")):
            several.ran.clear()
            assert_close(compiled(ones(n)), torch.full((n,), 3.0))
            assert several.ran == [name]
            assert several.runs(ones(n)) == name
        with several.op.prefer("default"):
            several.ran.clear()
            compiled(ones(12))
            assert several.ran == ["default"]
    finally:
        registration.unregister()
    several.ran.clear()
    compiled(ones(12))
    assert several.ran == ["default"]


@pytest.mark.compile
@pytest.mark.parametrize("state", ["no_grad", "inference_mode", "autocast"])
def test_compiled_in_a_state(pair: Several, state: str) -> None:
    compiled = torch.compile(lambda x: pair.op(x) + 1, backend="aot_eager", fullgraph=True)
    with STATES[state]():
        for n, name in ((3, "small"), (6, "default"), (7, "default"), (3, "small")):
            pair.ran.clear()
            assert_close(compiled(ones(n)), torch.full((n,), 3.0))
            assert pair.ran == [name]


@pytest.mark.compile
def test_compiled_checkpointing_and_transforms(pair: Several) -> None:
    def train(x: Tensor) -> Tensor:
        return checkpoint(lambda x: pair.op(x, 3.0).exp(), x, use_reentrant=False).sum()

    step = torch.compile(train, backend="aot_eager", fullgraph=True)
    gradient = torch.compile(torch.func.grad(lambda x: pair.op(x, 3.0).sum()), backend="aot_eager", fullgraph=True)
    for n, name in ((3, "small"), (6, "default")):
        x = ones(n, requires_grad=True)
        pair.ran.clear()
        step(x).backward()
        assert set(pair.ran) == {name}
        assert_close(x.grad, 3 * torch.exp(torch.full((n,), 3.0)))
        pair.ran.clear()
        assert_close(gradient(ones(n)), torch.full((n,), 3.0))
        assert set(pair.ran) == {name}
