"""`op.explain(...)`: the way of a call, compared with what runs when the call is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import customops
from customops import Mut, Registry
from customops.errors import ArgumentError, MissingFakeError, UnregisteredError


class Ran(list):  # type: ignore[type-arg]
    """What ran, by name."""

    def kernel(self, name: str) -> Callable[..., Tensor]:
        def run(x: Tensor, by: float = 2.0) -> Tensor:
            self.append(name)
            return x * by

        run.__name__ = name
        return run


@pytest.fixture
def ran() -> Ran:
    return Ran()


@pytest.fixture
def op(registry: Registry, ns: str, ran: Ran) -> Any:
    op = registry.custom_op(f"{ns}::f", ran.kernel("everywhere"), schema="(Tensor x, float by=2.0) -> Tensor")
    op.register_kernel("cpu", ran.kernel("on_cpu"))
    return op


def actions(found: Any) -> dict[str, str]:
    return {step.key: step.action for step in found.steps}


def what(found: Any, key: str) -> str:
    return next(step.what for step in found.steps if step.key == key)


def test_the_kernel_that_is_named_is_the_one_that_runs(op: Any, ran: Ran) -> None:
    for enabled in (True, False):
        with op.set_kernel_enabled("cpu", enabled):
            found = op.explain(torch.ones(2))
            assert not ran
            op(torch.ones(2))
            assert ran == [found.kernel.name]
            ran.clear()


def test_nothing_requires_grad(op: Any) -> None:
    found = op.explain(torch.ones(2), by=3.0)
    assert actions(found) == {"AutogradCPU": "redispatches", "CPU": "handles"}
    assert "nothing requires grad; calls the kernel of the device directly" in what(found, "AutogradCPU")
    assert found.arguments == {"x": "float32[2]", "by": "3.0"}
    assert not found.raises


def test_gradients(op: Any) -> None:
    x = torch.ones(2, requires_grad=True)
    assert "whose backward raises: there is none" in what(op.explain(x), "AutogradCPU")

    def halve(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return grad / 2, None

    op.register_autograd(halve)
    assert "x requires grad: records a node, with the backward halve" in what(op.explain(x), "AutogradCPU")
    with torch.no_grad():
        assert "gradient mode is off" in what(op.explain(x), "AutogradCPU")
    with torch.inference_mode():
        assert "AutogradCPU" not in actions(op.explain(torch.ones(2)))


def test_a_device_without_a_kernel_of_its_own(op: Any) -> None:
    op.register_fake(lambda x, by: torch.empty_like(x))
    found = op.explain(torch.ones(2, device="meta"))
    assert found.kernel.kind == "fake"
    sparse = op.explain(torch.ones(2).to_sparse())
    assert "that for other devices, everywhere" in sparse.steps[-1].what


def test_no_kernel_at_all(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::f", lambda x: x.clone(), schema="(Tensor x) -> Tensor", device_types="cuda")
    found = op.explain(torch.ones(2))
    assert found.raises
    assert found.kernel is None
    assert 'op.register_kernel("cpu", fn)' in found.steps[-1].what
    with pytest.raises(NotImplementedError):
        op(torch.ones(2))


def test_fake_tensors(op: Any) -> None:
    with FakeTensorMode() as mode:
        x = mode.from_tensor(torch.ones(2))
        assert op.explain(x).raises
        op.register_fake(lambda x, by: torch.empty_like(x))
        found = op.explain(x)
    assert found.kernel.kind == "fake"
    assert what(found, "Python").startswith("FakeTensorMode: the fake impl")


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_meta_tensors_without_a_fake(op: Any) -> None:
    x = torch.ones(2, device="meta")
    found = op.explain(x)
    assert found.raises
    assert "op.register_fake(fn)" in what(found, "Meta")
    with pytest.raises(MissingFakeError):
        op(x)
    op.register_fake(lambda x, by: torch.empty_like(x))
    assert op.explain(x).kernel.kind == "fake"


def test_modes(op: Any, ran: Ran) -> None:
    with Mode():
        found = op.explain(torch.ones(2))
        op(torch.ones(2))
    assert "the __torch_dispatch__ of Mode" in what(found, "Python")
    assert ran == [found.kernel.name] == ["on_cpu"]

    def rule(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return torch.zeros(())

    op.register_torch_dispatch(Mode, rule)
    with Mode():
        found = op.explain(torch.ones(2))
    assert found.steps[-1].what == "the rule for Mode: rule"
    assert found.kernel is None


def test_autocast(op: Any) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert actions(op.explain(torch.ones(2)))["AutocastCPU"] == "falls through"
        op.register_autocast("cpu", torch.float16)
        assert what(op.explain(torch.ones(2)), "AutocastCPU") == "casts floating tensors to float16"
    assert "AutocastCPU" not in actions(op.explain(torch.ones(2)))


def test_transforms(op: Any) -> None:
    found: list[Any] = []
    op.register_autograd(lambda ctx, grad: (grad, None))

    def look(x: Tensor) -> Tensor:
        found.append(op.explain(x))
        return x.sum()

    torch.func.grad(look)(torch.ones(2))
    torch.vmap(look)(torch.ones(2, 2))
    grad, vmap = found
    assert "records a node" in what(grad, "AutogradCPU")
    assert grad.kernel.name == "on_cpu"
    assert "the vmap rule: one call for each element" in what(vmap, "FuncTorchBatched")
    assert vmap.kernel is None


def test_an_op_that_writes(registry: Registry, ns: str) -> None:
    def fill(x: Mut[Tensor]) -> None:
        x.fill_(1)

    op = registry.custom_op(f"{ns}::fill", fill)
    assert what(op.explain(torch.ones(2)), "CPU").startswith("no kernel for cpu alone")
    with torch.inference_mode():
        x = torch.ones(2)
    with Mode():
        assert what(op.explain(torch.ones(2)), "ADInplaceOrView") == "counts the write to x"
    assert x.shape == (2,)


def test_factories(registry: Registry, ns: str) -> None:
    def ramp(n: int, device: torch.device) -> Tensor:
        return torch.arange(n, device=device)

    op = registry.custom_op(f"{ns}::ramp", ramp, device_types="cpu")
    found = op.explain(3, torch.device("cpu"))
    assert "the argument does: cpu" in what(found, "BackendSelect")
    assert found.kernel.name == "ramp"
    assert op.explain(3, torch.device("cuda")).raises
    everywhere = registry.custom_op(f"{ns}::one", lambda: torch.ones(()), schema="() -> Tensor")
    assert everywhere.explain().kernel.target == "Undefined"


def test_bypass(registry: Registry, ns: str, ran: Ran) -> None:
    op = registry.custom_op(f"{ns}::f", ran.kernel("k"), schema="(Tensor x, float by=2.0) -> Tensor", bypass=True)
    found = op.explain(torch.ones(2))
    assert [step.key for step in found.steps] == ["call"]
    assert found.kernel.name == "k"
    assert len(op.explain(torch.ones(2, requires_grad=True)).steps) > 1


def test_an_option_of_the_environment(registry: Registry, ns: str, ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    for value, expected in (("1", ["eager=True: runs the kernel without the dispatcher"]), ("0", None)):
        monkeypatch.setenv("CUSTOMOPS_EAGER", f"{ns}={value}")
        op = registry.custom_op(f"{ns}::f", ran.kernel("k"), schema="(Tensor x, float by=2.0) -> Tensor")
        steps = op.explain(torch.ones(2)).steps
        if expected is not None:
            assert [(step.key, step.what) for step in steps] == [("call", *expected)]
        else:
            assert len(steps) > 1


def test_kernels_put_at_keys(op: Any, ran: Ran) -> None:
    customops.impl(op._qualname, "CPU", ran.kernel("raw"))
    found = op.explain(torch.ones(2))
    op(torch.ones(2))
    assert ran == [found.kernel.name] == ["raw"]


def test_ops_of_others(registry: Registry, foreign: Any) -> None:
    found = foreign.explain(torch.ones(2))
    assert "no gradient is recorded" in what(found, "AutogradCPU")
    assert found.kernel.origin == "others"
    assert registry.adopt("aten::linear").explain(torch.ones(2), torch.ones(2)).steps[-1].key == "AutogradCPU"


def test_wrong_arguments(op: Any) -> None:
    for args, kwargs, problem in (
        ((), {}, "'x' is missing"),
        ((1, 2, 3), {}, "3 arguments by position, of 2"),
        ((1,), {"z": 1}, "there is no argument 'z'"),
        ((torch.ones(1),), {"x": torch.ones(1)}, "Argument 'x' specified both as positional and keyword argument"),
        (("a",), {}, "Expected a value of type 'Tensor' for argument 'x' but instead found type 'str'"),
    ):
        with pytest.raises(ArgumentError, match=problem):
            op.explain(*args, **kwargs)


def test_wrong_arguments_of_an_op_of_several_overloads(registry: Registry) -> None:
    with pytest.raises(ArgumentError, match="Expected a value of type 'Tensor' for argument"):
        registry.adopt("aten::add.Tensor").explain("a", torch.ones(1))


def test_a_removed_op(op: Any) -> None:
    op.unregister()
    with pytest.raises(UnregisteredError):
        op.explain(torch.ones(2))


@pytest.mark.parametrize("width", [60, 120])
def test_how_it_is_shown(op: Any, width: int) -> None:
    found = op.explain(torch.ones(2, requires_grad=True))
    lines = found.text(width).splitlines()
    assert lines[0] == f"{op._qualname}(x: float32[2] requires_grad)"
    assert lines[-1].split()[-1].endswith(")")
    assert max(len(line) for line in lines if ".py" not in line) <= width
    assert found.to_dict()["steps"][0]["key"] == "AutogradCPU"
