"""What kernels may do, from several threads, and that dynamo stays out of them."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.compiling import dynamo
from helpers.kernels import constant, define, which
from torch import Tensor
from torch._C._dynamo.eval_frame import set_eval_frame
from torch.testing import assert_close

import customops
from customops import Registry

# What kernels may do --------------------------------------------------------------------------------------------


class Mine(Exception):
    """An error of a kernel."""


@pytest.mark.compile
def test_an_error_in_a_kernel_comes_through(registry: Registry, ns: str) -> None:
    def kernel(x: Tensor, fail: bool) -> Tensor:
        if fail:
            raise Mine("as it is")
        return x + 1

    op = registry.custom_op(f"{ns}::f", kernel, mutates_args=())
    op.register_fake(lambda x, fail: torch.empty_like(x))
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
    x = torch.zeros(2)
    for call in (op, getattr(torch.ops, ns).f, compiled):
        with pytest.raises(Mine, match=r"^as it is$"):
            call(x, True)
        assert call(x, False).tolist() == [1, 1]


def test_a_kernel_may_call_its_own_op(registry: Registry, ns: str) -> None:
    def power(x: Tensor, n: int) -> Tensor:
        return x.clone() if n == 1 else op(x, n - 1) * x

    def gradient(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.n * ctx.saved_tensors[0] ** (ctx.n - 1), None

    def save(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.n = inputs
        ctx.save_for_backward(x)

    op: Any = registry.custom_op(f"{ns}::power", power, mutates_args=())
    op.register_autograd(gradient, setup_context=save)
    x = torch.randn(3, requires_grad=True)
    result = op(x, 4)
    assert_close(result, x**4)
    assert_close(torch.autograd.grad(result.sum(), x)[0], 4 * x**3)


def test_a_kernel_may_replace_itself(registry: Registry, ns: str) -> None:
    def first(x: Tensor) -> Tensor:
        op.register_kernel(["cpu", "cuda"], constant(2))
        return torch.ones_like(x)

    op = define(registry, ns)
    op.register_kernel(["cpu", "cuda"], first)
    assert [which(op, key) for key in ("CPU", "CPU", "CUDA")] == [1, 2, 2]


def test_a_replaced_kernel_is_let_go(registry: Registry, ns: str) -> None:
    op, kernel = define(registry, ns), constant(1)
    alive = weakref.ref(kernel)
    op.register_kernel(["cpu", "cuda"], kernel)
    del kernel
    op.register_kernel(["cpu", "cuda"], constant(2))
    gc.collect()
    assert alive() is None


def test_ops_without_tensors(registry: Registry, ns: str) -> None:
    nothing = define(registry, ns, lambda: torch.ones(2), schema="() -> Tensor")
    assert nothing().tolist() == [1, 1]
    number = define(registry, ns, lambda n, s: n + len(s), schema="(int n, str s) -> int")
    assert number(3, "four") == 7
    with torch.inference_mode():
        assert number(3, s="") == 3


def test_conjugate_and_negative_views_arrive_resolved(registry: Registry, ns: str) -> None:
    seen = []

    def kernel(x: Tensor) -> Tensor:
        seen.append((x.is_conj(), x.is_neg()))
        return torch.from_numpy(x.numpy() * 2)

    op = registry.custom_op(f"{ns}::f", kernel, mutates_args=())
    z = torch.randn(3, dtype=torch.complex64)
    assert_close(op(z.conj()), (z * 2).conj().resolve_conj())
    assert_close(op(z.conj().imag), z.imag * -2)
    assert seen == [(False, False), (False, False)]


# From several threads -------------------------------------------------------------------------------------------


def test_registering_while_other_threads_call(registry: Registry, ns: str) -> None:
    op = define(registry, ns, constant(0))
    stop, wrong, seen = threading.Event(), [], set()

    def call() -> None:
        x = torch.zeros(3)
        try:
            while not stop.is_set():
                values = set(op(x).tolist())
                assert len(values) == 1
                seen.update(values)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for i in range(1, 200):
            op.register_kernel(["cpu", "cuda"], constant(i))
            with registry.scope():
                op.register_kernel("cpu", constant(-i))
                op.register_kernel(None, constant(-i))
            with op.set_kernel_enabled("cpu", False):
                assert op(torch.zeros(())).item() == 0
            assert op(torch.zeros(())).item() == i
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
    assert not wrong
    assert seen <= set(range(-199, 200))


# Dynamo stays out -----------------------------------------------------------------------------------------------


@pytest.mark.compile
def test_kernels_are_not_traced(registry: Registry, ns: str) -> None:
    """Between two graphs the op runs while Dynamo listens to every frame, kernels included."""
    seen: dict[str, bool] = {}
    targets: list[Any] = []

    def note(name: str) -> None:
        seen[name] = torch.compiler.is_compiling()

    def kernel(x: Tensor, by: int = 1) -> Tensor:
        note("kernel")
        return helper(x)

    def helper(x: Tensor) -> Tensor:
        return x.nonzero().to(x.dtype).sinh()

    def fake(x: Tensor, by: int = 1) -> Tensor:
        note("fake")
        n = customops.get_ctx().new_dynamic_size()
        return x.new_empty(n, x.dim())

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        targets.extend(node.target for node in graph.graph.nodes)
        return graph

    op = registry.custom_op(f"{ns}::f", kernel, mutates_args=())
    op.register_fake(fake)

    def program(x: Tensor) -> Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        result: Tensor = op(y).cos()
        return result

    x = torch.tensor([0.0, 1.0, 2.0])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=False):
        compiled = torch.compile(program, backend=backend)
        for _ in range(2):
            assert_close(compiled(x), torch.tensor([[1.0], [2.0]]).sinh().cos())
    assert seen["kernel"] is False
    assert {"sin", "cos"} <= set(targets)
    assert not {"sinh", "nonzero", torch.sinh} & set(targets)


@contextlib.contextmanager
def frames_offered_to_dynamo() -> Iterator[list[str]]:
    """The names of all functions that Dynamo would trace if it compiled what runs inside."""
    names: list[str] = []

    def listen(frame: Any, cache: Any, state: Any) -> Any:
        names.append(frame.f_code.co_name)
        return dynamo("types").ConvertFrameReturn()

    before = set_eval_frame(listen)
    try:
        yield names
    finally:
        set_eval_frame(before)


@pytest.mark.compile
def test_dynamo_is_offered_none_of_the_frames_below_a_call(registry: Registry, ns: str) -> None:
    """Kernels with and without defaults, selection by device, version counting, fakes, gradients."""

    def helper(x: Tensor) -> Tensor:
        return x.tanh()

    def factory(n: int, device: torch.device) -> Tensor:
        return helper(torch.ones(n, device=device))

    def mutating(x: Tensor, by: float = 1.0) -> None:
        x.copy_(helper(x + by))

    def functional(x: Tensor) -> Tensor:
        return helper(x)

    def fake(x: Tensor) -> Tensor:
        return helper(x)

    def save(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(helper(inputs[0]))

    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return helper(grad)

    make = registry.custom_op(f"{ns}::factory", factory, mutates_args=(), device_types="cpu")
    change = registry.custom_op(f"{ns}::mutating", mutating, mutates_args=("x",))
    apply = registry.custom_op(f"{ns}::functional", functional, mutates_args=())
    apply.register_fake(fake)
    apply.register_autograd(backward, setup_context=save)
    apply.register_autocast("cpu", torch.bfloat16)
    x = torch.randn(2, requires_grad=True)
    y, meta = torch.randn(2), torch.empty(2, device="meta")
    with frames_offered_to_dynamo() as names:
        made = make._opoverload(2, "cpu")
        change._opoverload(y)
        applied = apply._opoverload(x)
        apply._opoverload(meta)
        with torch.autocast("cpu", torch.bfloat16):
            apply._opoverload(y)
        torch.autograd.backward(applied, torch.ones(2))
    one = torch.ones(2)
    assert_close([made, applied, x.grad], [one.tanh(), x.tanh(), one.tanh()])
    assert "backward" in names  # torch.autograd.backward itself: Dynamo was listening
    ours = {function.__name__ for function in (helper, factory, mutating, functional, fake, save)}
    ours |= {"kernel", "kernel_with_defaults", "check", "one_tensor", "select", "bump", "autograd", "autocast"}
    assert not ours & set(names)
    assert names.count("backward") == 1
