"""``eager=True``: outside of compiled code a call runs the function, where the dispatcher would only run the kernel."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.modes import DispatchLog, FunctionLog
from torch import Tensor
from torch._subclasses import FakeTensorMode

import customops
from customops import Registry
from customops.errors import AliasError


def scale_fn(x: Tensor, ys: list[Tensor], by: float = 2.0) -> Tensor:
    return x * by + sum(ys)


@pytest.fixture
def scale(registry: Registry, ns: str) -> Any:
    op = registry.custom_op(f"{ns}::scale", scale_fn, mutates_args=(), eager=True)
    op.register_fake(lambda x, ys, by: torch.empty_like(x))

    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.by, ctx.n = inputs[2], len(inputs[1])

    op.register_autograd(lambda ctx, g: (g * ctx.by, [g] * ctx.n, None), setup_context=setup_context)
    op.register_vmap("broadcast_all")
    return op


PACKAGE = str(Path(customops.__file__).parent)


def frames(call: Callable[[], Any]) -> list[str]:
    """The functions that a call enters of this package and of what it generates."""
    entered: list[str] = []

    def profile(frame: Any, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith((PACKAGE, "<customops")):
            entered.append(frame.f_code.co_name)

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered


def test_only_the_function_runs(scale: Any) -> None:
    x, ys = torch.randn(3), [torch.randn(3), torch.randn(3)]
    torch.testing.assert_close(scale(x, ys, 3.0), x * 3 + ys[0] + ys[1])
    assert frames(lambda: scale(x, ys, by=3)) == ["__call__"]
    torch.testing.assert_close(scale(x, ys=ys, by=3), x * 3 + ys[0] + ys[1])
    with torch.inference_mode():
        torch.testing.assert_close(scale(x, ys), x * 2 + ys[0] + ys[1])


def test_what_it_leaves_out(registry: Registry, ns: str) -> None:
    """Checks of results, copies of lists, and gradient mode off: it is the function."""
    seen: list[Any] = []

    @registry.custom_op(f"{ns}::same", mutates_args=(), eager=True)
    def same(x: Tensor, ys: list[Tensor]) -> Tensor:
        seen[:] = [ys, torch.is_grad_enabled()]
        return x

    x = torch.ones(1)
    ys = [x]
    assert same(x, ys) is x
    assert seen[0] is ys
    assert seen[1]
    with pytest.raises(AliasError):
        getattr(torch.ops, ns).same(x, ys)


def test_what_the_dispatcher_has_to_do_is_done(scale: Any) -> None:
    x, y = torch.randn(2, requires_grad=True), torch.randn(2)
    gradient = torch.autograd.grad(scale(x, [x, y], 3.0).sum(), x)[0]
    assert gradient.tolist() == [4, 4]
    assert torch.func.grad(lambda x: scale(x, [y]).sum())(y).tolist() == [2, 2]
    torch.testing.assert_close(torch.vmap(lambda x: scale(x, [y]))(torch.ones(3, 2)), (2 + y).expand(3, 2))
    with FakeTensorMode():
        assert type(scale(torch.ones(5), [torch.ones(5)])).__name__ == "FakeTensor"
    with DispatchLog() as dispatched:
        scale(y, [y])
    assert any("scale" in name for name in dispatched.seen)
    with FunctionLog() as functions:
        scale(y, [y])
    assert functions.seen[0] is scale._opoverload
    with torch.profiler.profile() as profile:
        scale(y, [y])
    assert scale._qualname in {event.name for event in profile.events()}
    with torch.no_grad():
        scale(x, [y])
        assert frames(lambda: scale(x, [y])) == ["__call__"]


def test_writes_count_up_versions(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::fill", mutates_args=("out",), eager=True)
    def fill(x: Tensor, out: Tensor) -> None:
        out.numpy()[:] = x.numpy()  # no operation of torch that would count it

    out = torch.zeros(2)
    fill(torch.ones(2), out)
    before = out._version
    fill(torch.ones(2) * 3, out)
    assert out.tolist() == [3, 3]
    assert out._version > before


@pytest.mark.compile
def test_compiled_code_has_the_op(scale: Any) -> None:
    graphs: list[str] = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph.code)
        return graph

    compiled = torch.compile(lambda x, y: scale(x, [y]), fullgraph=True, backend=keep, dynamic=True)
    for n in (2, 3):
        assert compiled(torch.ones(n), torch.ones(n)).tolist() == [3] * n
    assert len(graphs) == 1
    assert scale._qualname.replace("::", ".") in graphs[0]


def test_kernels_of_a_device_and_registered_later(scale: Any) -> None:
    x, y = torch.ones(2), torch.ones(2)
    assert scale(x, [y]).tolist() == [3, 3]
    scale.register_kernel("cpu", lambda x, ys, by: x * 10)
    assert scale(x, [y]).tolist() == [10, 10]
    assert frames(lambda: scale(x, [y])) == ["__call__"]


def test_results_of_any_type(registry: Registry, ns: str) -> None:
    """The dispatcher would convert them, and `bypass` leave the call to it."""

    @registry.custom_op(f"{ns}::count", mutates_args=(), eager=True)
    def count(x: Tensor) -> int:
        return int(x.count_nonzero())

    x = torch.tensor([0, 1, 2])
    assert count(x) == 2
    assert frames(lambda: count(x)) == ["__call__"]
