"""Autocast: what is cast, to which dtype, and how that goes with gradients, transforms and tracing."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any, List, Optional

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import Library
from torch.utils.checkpoint import checkpoint

import customops
from customops import Registry, Tag
from customops.errors import DefinitionError, RegistrationError

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def sin_fn(x: Tensor) -> Tensor:
    return torch.sin(x)


@pytest.fixture
def sin(registry: Registry, ns: str) -> Any:
    op = registry.custom_op(f"{ns}::my_sin", sin_fn, mutates_args=())
    op.register_fake(torch.empty_like)
    op.register_autograd(
        lambda ctx, grad: grad * torch.cos(*ctx.saved_tensors),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    return op


@pytest.fixture
def foreign(ns: str) -> Iterator[Any]:
    """An op of a library, as the object to register on."""
    library = Library(ns, "FRAGMENT")
    library.define("foreign(Tensor x) -> Tensor")
    library.impl("foreign", sin_fn, "CompositeExplicitAutograd")
    yield customops.adopt(f"{ns}::foreign")
    customops.default_registry.clear()
    library._destroy()


def cast_to(op: Any, dtype: torch.dtype = BF16) -> torch.dtype:
    """What the op makes of float32, under CPU autocast to `dtype`."""
    with torch.autocast("cpu", dtype=dtype):
        result = op(torch.ones(2))
    assert isinstance(result, Tensor)
    return result.dtype


# Registering ------------------------------------------------------------------------------------------------------


@pytest.mark.parity(60)
@pytest.mark.parametrize("form", ["op", "name", "overload"])
@pytest.mark.parametrize("which", ["sin", "foreign"])
def test_function_forms(request: pytest.FixtureRequest, which: str, form: str) -> None:
    op = request.getfixturevalue(which)
    handle = {"op": op, "name": op._qualname, "overload": op._opoverload}[form]
    assert cast_to(op) is F32
    assert customops.register_autocast(handle, "cpu", F16) is None
    # The dtype is the one that was registered, whichever the context has.
    assert [cast_to(f, dtype) for f in (op, op._opoverload) for dtype in (BF16, F16)] == [F16] * 4
    x = torch.rand(3)
    with torch.autocast("cpu"):
        assert torch.equal(op(x), torch.sin(x.half()))
    assert torch.equal(op(x), torch.sin(x))


@pytest.mark.parametrize("form", ["op", "name", "overload"])
def test_function_forms_on_an_op_of_torch_custom_op(ns: str, form: str) -> None:
    theirs = torch.library.custom_op(f"{ns}::theirs", sin_fn, mutates_args=())
    handle = {"op": theirs, "name": f"{ns}::theirs", "overload": theirs._opoverload}[form]
    rules = Library(ns, "FRAGMENT")
    customops.register_autocast(handle, "cpu", F16, lib=rules)
    assert cast_to(theirs) is F16
    rules._destroy()
    assert cast_to(theirs) is F32


def test_an_op_from_cpp(ns: str) -> None:
    foobar = torch.ops.aten._foobar.default
    rules = Library("aten", "FRAGMENT")
    customops.register_autocast(foobar, "cpu", F16, lib=rules)
    try:
        assert cast_to(foobar) is F16
    finally:
        rules._destroy()
    assert cast_to(foobar) is F32


@pytest.mark.slow
@pytest.mark.parity(60)
@pytest.mark.parametrize("end", ["destroyed", "collected"])
@pytest.mark.parametrize("which", ["sin", "foreign"])
def test_a_rule_ends_with_its_library(request: pytest.FixtureRequest, ns: str, which: str, end: str) -> None:
    op = request.getfixturevalue(which)
    op.register_autocast("cpu", BF16)
    rules = Library(ns, "FRAGMENT")
    customops.register_autocast(op, "cpu", F16, lib=rules)
    assert cast_to(op) is F16
    if end == "destroyed":
        rules._destroy()
    del rules
    gc.collect()
    assert cast_to(op) is BF16


def test_a_scope_takes_a_rule_back(registry: Registry, sin: Any, foreign: Any) -> None:
    sin.register_autocast("cpu", BF16)
    with registry.scope(), customops.default_registry.scope():
        sin.register_autocast("cpu", F16)
        sin.register_autocast("cuda", F16)
        foreign.register_autocast("cpu", F16)
        assert (cast_to(sin), cast_to(foreign)) == (F16, F16)
    assert (cast_to(sin), cast_to(foreign)) == (BF16, F32)
    foreign.register_autocast("cpu", BF16)
    assert cast_to(foreign) is BF16


@pytest.mark.parity(60)
def test_registering_again_replaces(sin: Any, foreign: Any) -> None:
    for op in sin, foreign:
        for dtype in F16, BF16, F32, F16:
            op.register_autocast("cpu", dtype)
            assert cast_to(op) is dtype


def test_a_rule_ends_with_its_library_also_under_a_mode(sin: Any, ns: str) -> None:
    sin.register_autocast("cpu", BF16)
    rules = Library(ns, "FRAGMENT")
    sin.register_autocast("cpu", F16, lib=rules)
    rules._destroy()
    with FakeTensorMode():
        assert cast_to(sin) is BF16


@pytest.mark.parity(60)
def test_the_newest_rule_wins_over_a_scoped_one(sin: Any, ns: str) -> None:
    rules = Library(ns, "FRAGMENT")
    sin.register_autocast("cpu", BF16)
    sin.register_autocast("cpu", F16, lib=rules)
    sin.register_autocast("cpu", BF16)
    assert cast_to(sin) is BF16


def test_what_cannot_be_registered(sin: Any) -> None:
    with pytest.raises(ValueError, match="'meta' does not support autocast") as raised:
        sin.register_autocast("meta", F16)
    assert isinstance(raised.value, DefinitionError)
    assert raised.value.op == sin._qualname
    with pytest.raises(RegistrationError, match="unknown device type: Expected one of cpu, cuda"):
        sin.register_autocast("nope", F16)
    with pytest.raises(DefinitionError, match="expects the device type as a string"):
        sin.register_autocast(torch.device("cpu"), F16)
    with pytest.raises(DefinitionError, match=r"expects a torch\.dtype") as raised:
        sin.register_autocast("cpu", "float16")
    assert (raised.value.argument, raised.value.got) == ("cast_inputs", "'float16'")
    assert cast_to(sin) is F32


# What is cast ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F64, torch.int64, torch.bool, torch.complex64, torch.uint8])
def test_other_dtypes_are_left_alone(registry: Registry, ns: str, dtype: torch.dtype) -> None:
    copy = registry.custom_op(f"{ns}::copy", lambda x: x.clone(), mutates_args=(), schema="(Tensor x) -> Tensor")
    copy.register_autocast("cpu", F16)
    with torch.autocast("cpu"):
        assert copy(torch.ones(2, dtype=dtype)).dtype is dtype
        assert [copy(torch.ones(2, dtype=d)).dtype for d in (F16, BF16, F32)] == [F16] * 3


@pytest.mark.parity(60)
def test_every_kind_of_argument(registry: Registry, ns: str) -> None:
    seen: list[Any] = []

    @registry.custom_op(f"{ns}::op", mutates_args=())
    def op(
        x: Tensor, xs: List[Tensor], ys: List[Optional[Tensor]], z: Optional[Tensor] = None,
        n: int = 2, sizes: List[float] = (1.5,), *, scale: float = 3.0, flag: bool = False,
    ) -> Tensor:  # fmt: skip
        seen.append((x.dtype, [t.dtype for t in xs], [t if t is None else t.dtype for t in ys],
                     z if z is None else z.dtype, n, list(sizes), scale, flag))  # fmt: skip
        return (x + sum(xs)) * scale

    op.register_autocast("cpu", BF16)
    x, d, i = torch.ones(2), torch.ones(2, dtype=F64), torch.ones(2, dtype=torch.int64)
    with torch.autocast("cpu"):
        result = op(x, [x, x], [None, x, d, i])
        assert result.dtype is BF16
        assert result.tolist() == [9.0, 9.0]
        op(x, [d], [], d, scale=2.0)
        op(x, [], [None], z=x, n=5, sizes=[2.5], flag=True, scale=1.0)
    assert seen == [
        (BF16, [BF16, BF16], [None, BF16, F64, torch.int64], None, 2, [1.5], 3.0, False),
        (BF16, [F64], [], F64, 2, [1.5], 2.0, False),
        (BF16, [], [None], BF16, 5, [2.5], 1.0, True),
    ]


def test_what_is_mutated_to_is_not_cast(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::add_", mutates_args={"x", "rest"})
    def add_(x: Tensor, y: Tensor, rest: List[Tensor]) -> Tensor:
        assert y.dtype is BF16
        for t in x, *rest:
            t.add_(y)
        return y * 2

    inplace = registry.custom_op(
        f"{ns}::inplace", lambda x, y: x.add_(y), mutates_args={"x"}, tags=Tag.inplace,
        schema="(Tensor(a!) x, Tensor y) -> Tensor(a!)",
    )  # fmt: skip
    out_op = registry.custom_op(
        f"{ns}::out", lambda x, *, out: out.copy_(x), mutates_args={"out"}, tags=Tag.out,
        schema="(Tensor x, *, Tensor(a!) out) -> Tensor(a!)",
    )  # fmt: skip
    for op in add_, inplace, out_op:
        op.register_autocast("cpu", BF16)
    x, rest, y = torch.zeros(2), [torch.zeros(2)], torch.ones(2)
    with torch.autocast("cpu"):
        assert add_(x, y, rest).dtype is BF16
        assert inplace(x, y) is x
        assert out_op(torch.full((2,), 7.0), out=y) is y
    assert (x.tolist(), rest[0].tolist(), y.tolist()) == ([2.0, 2.0], [1.0, 1.0], [7.0, 7.0])
    assert {t.dtype for t in (x, y, *rest)} == {F32}


def test_an_op_without_tensors(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::full", mutates_args=())
    def full(n: int, device: torch.device) -> Tensor:
        return torch.ones(n, device=device)

    full.register_autocast("cpu", BF16)
    with torch.autocast("cpu"):
        assert full(3, torch.device("cpu")).dtype is F32


# Contexts -------------------------------------------------------------------------------------------------------------


def test_autocast_switched_off(sin: Any) -> None:
    sin.register_autocast("cpu", BF16)
    x = torch.ones(2)
    with torch.autocast("cpu"):
        with torch.autocast("cpu", enabled=False):
            assert sin(x).dtype is F32
        assert sin(x).dtype is BF16
    with torch.autocast("cpu", enabled=False):
        assert sin(x).dtype is F32


def test_the_kernel_runs_with_autocast_switched_off(registry: Registry, ns: str) -> None:
    inner = registry.custom_op(f"{ns}::inner", sin_fn, mutates_args=())
    inner.register_autocast("cpu", F16)
    dtypes = []

    @registry.custom_op(f"{ns}::outer", mutates_args=())
    def outer(x: Tensor) -> Tensor:
        dtypes.append((x @ x).dtype)  # an op that CPU autocast casts
        dtypes.append(inner(x).dtype)
        return x * 1

    outer.register_autocast("cpu", F32)
    with torch.autocast("cpu"):
        outer(torch.ones(2, 2))
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is BF16
        assert inner(torch.ones(2)).dtype is F16
    assert dtypes == [F32, F32]


class CudaAutocast:
    """torch.autocast("cuda") for machines without CUDA, where the public context switches itself off."""

    def __enter__(self) -> None:
        self.before = torch.is_autocast_enabled("cuda")
        torch.set_autocast_enabled("cuda", True)

    def __exit__(self, *exception: object) -> None:
        torch.set_autocast_enabled("cuda", self.before)


@pytest.mark.parity(60)
def test_nested_autocast_of_two_devices(sin: Any) -> None:
    x = torch.ones(2)
    sin.register_autocast("cuda", F16)
    with CudaAutocast():
        assert sin(x).dtype is F32  # only tensors of the device are cast
        with torch.autocast("cpu"):
            assert sin(x).dtype is F32
    sin.register_autocast("cpu", BF16)
    with CudaAutocast():
        assert sin(x).dtype is F32
        with torch.autocast("cpu"):
            assert sin(x).dtype is BF16
    with torch.autocast("cpu"), CudaAutocast():
        assert torch.equal(sin(x), torch.sin(x.bfloat16()))
    with FakeTensorMode(), torch.autocast("cpu"), CudaAutocast():
        assert sin(torch.ones(2)).dtype is BF16
        assert sin(torch.ones(2, device="cuda")).dtype is F16


def test_only_tensors_of_the_device_are_cast(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::op", mutates_args=())
    def op(xs: List[Tensor], y: Tensor) -> Tensor:
        raise NotImplementedError

    op.register_fake(lambda xs, y: seen.append([*(x.dtype for x in xs), y.dtype]) or torch.empty_like(y))
    op.register_autocast("cpu", BF16)
    op.register_autocast("cuda", F16)
    seen: list[Any] = []
    with FakeTensorMode():
        cpu, cuda = torch.ones(2), torch.ones(2, device="cuda")
        with torch.autocast("cpu"):
            op([cpu, cuda], cuda)
        with CudaAutocast():
            op([cpu, cuda], cpu)
        with torch.autocast("cpu"), CudaAutocast():
            op([cpu, cuda], cuda)
    assert seen == [[BF16, F32, F32], [F32, F16, F32], [BF16, F16, F16]]


def test_threads_have_their_own_autocast(sin: Any) -> None:
    sin.register_autocast("cpu", BF16)
    barrier, found = threading.Barrier(2), {}

    def work(enabled: bool) -> None:
        for _ in range(50):
            with torch.autocast("cpu", enabled=enabled):
                barrier.wait()
                found.setdefault(enabled, set()).add(sin(torch.ones(2)).dtype)

    threads = [threading.Thread(target=work, args=(enabled,)) for enabled in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {True: {BF16}, False: {F32}}


# Gradients and transforms ---------------------------------------------------------------------------------------------


def reference(x: Tensor) -> Tensor:
    """sin in bfloat16, in torch operations."""
    return torch.sin(x.to(BF16))


def gradient(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    f(x).float().pow(2).sum().backward()
    assert x.grad is not None
    return x.grad


def test_gradients_go_through_the_cast(sin: Any) -> None:
    sin.register_autocast("cpu", BF16)
    x = torch.rand(5)
    with torch.autocast("cpu"):
        got = gradient(sin, x)
    assert got.dtype is F32
    assert torch.equal(got, gradient(reference, x))


def test_transforms(sin: Any) -> None:
    sin.register_autocast("cpu", BF16)
    x = torch.rand(5)
    for transform in torch.func.grad, torch.func.jacrev:
        with torch.autocast("cpu"):
            got = transform(lambda x: sin(x).float().pow(2).sum())(x)
        assert torch.equal(got, transform(lambda x: reference(x).float().pow(2).sum())(x))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap(sin: Any) -> None:
    sin.register_autocast("cpu", BF16)
    x = torch.rand(3, 2)
    with torch.autocast("cpu"):
        assert torch.equal(torch.vmap(sin)(x), reference(x))


def test_checkpointing(sin: Any) -> None:
    sin.register_autocast("cpu", BF16)
    x = torch.rand(3)
    with torch.autocast("cpu"):
        got = gradient(lambda x: checkpoint(sin, x, use_reentrant=False), x)
    assert torch.equal(got, gradient(reference, x))


def test_grad_modes(sin: Any) -> None:
    sin.register_autocast("cpu", BF16)
    x = torch.rand(3, requires_grad=True)
    for mode in torch.no_grad, torch.inference_mode:
        with mode(), torch.autocast("cpu"):
            assert torch.equal(sin(x), reference(x))
            assert not sin(x).requires_grad


# The state of formulas and rules --------------------------------------------------------------------------------------


def wave(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).sin()


def with_formula(op: Any) -> None:
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, w = inputs
        ctx.save_for_backward(x, w)
        ctx.save_for_forward(x, w, (x @ w).cos())

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        by_product = (x @ w).cos() * grad
        return by_product @ w.T, x.T @ by_product

    def jvp(ctx: Any, dx: Tensor, dw: Tensor) -> Tensor:
        x, w, cos = ctx.saved_tensors
        return cos * (dx @ w + x @ dw)  # type: ignore[no-any-return]

    op.register_autograd(backward, setup_context=setup_context)
    op.register_jvp(jvp)


def vmap_rule(info: Any, in_dims: Any, x: Tensor, w: Tensor) -> tuple[Tensor, int]:
    assert in_dims == (0, 0)
    return wave(x, w), 0


FORMULAS: dict[str, Callable[[Any], Any]] = {
    "formula": with_formula,
    "function": lambda op: op.register_reference(wave, gives="gradients"),
    "recorded function": lambda op: op.register_reference(wave, recompute=False, gives="gradients"),
}


def make_wave(registry: Registry, ns: str, formula: str) -> Any:
    op = registry.custom_op(f"{ns}::wave", wave, mutates_args=())
    op.register_fake(lambda x, w: x.new_empty(*x.shape[:-1], w.shape[-1]))
    op.register_vmap(vmap_rule)
    FORMULAS[formula](op)
    return op


def gradients(f: Any, x: Tensor, w: Tensor, forward: bool = True, backward: bool = True) -> Any:
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    with torch.autocast("cpu", enabled=forward):
        y = f(x, w)
    loss = y.float().sum()
    with torch.autocast("cpu", enabled=backward):
        return torch.autograd.grad(loss, (x, w))


def in_autocast(transform: Callable[..., Any]) -> Callable[..., Any]:
    def run(f: Any, *args: Tensor) -> Any:
        with torch.autocast("cpu"):
            return transform(f, *args)

    return run


def loss_of(f: Any) -> Any:
    return lambda *args: f(*args).float().sum()


#: What is differentiated, where autocast is on.
UNDER_AUTOCAST: dict[str, Callable[..., Any]] = {
    "forward": lambda f, x, w: gradients(f, x, w, backward=False),
    "backward": lambda f, x, w: gradients(f, x, w, forward=False),
    "both": gradients,
    "func.grad": in_autocast(lambda f, x, w: torch.func.grad(loss_of(f), (0, 1))(x, w)),
    "jvp": in_autocast(lambda f, x, w: torch.func.jvp(f, (x, w), (w, x))),
    "vmap": in_autocast(lambda f, x, w: torch.vmap(f)(x.expand(2, 4, 4), w.expand(2, 4, 4))),
    "vmap of grad": in_autocast(
        lambda f, x, w: torch.vmap(torch.func.grad(loss_of(f), (0, 1)))(x.expand(2, 4, 4), w.expand(2, 4, 4))
    ),
}


@pytest.mark.parametrize("how", UNDER_AUTOCAST)
@pytest.mark.parametrize("formula", FORMULAS)
def test_formulas_and_rules_run_with_autocast_switched_off(registry: Registry, ns: str, formula: str, how: str) -> None:
    op, (x, w) = make_wave(registry, ns, formula), (torch.rand(4, 4) for _ in "xw")
    found = UNDER_AUTOCAST[how](op, x, w)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "autocast", lambda device, enabled=True: contextlib.nullcontext())
        expected = UNDER_AUTOCAST[how](wave, x, w)
    torch.testing.assert_close(found, expected)


@pytest.mark.compile
@pytest.mark.parametrize("how", ["forward", "both", "func.grad", "jvp"])
@pytest.mark.parametrize("formula", FORMULAS)
def test_compiled_formulas_run_with_autocast_switched_off(registry: Registry, ns: str, formula: str, how: str) -> None:
    op, (x, w) = make_wave(registry, ns, formula), (torch.rand(4, 4) for _ in "xw")
    run, compiled = UNDER_AUTOCAST[how], functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    is_transform = how in ("func.grad", "jvp")  # which Dynamo takes inside of what it compiles
    found = compiled(lambda x, w: run(op, x, w))(x, w) if is_transform else run(compiled(op), x, w)
    torch.testing.assert_close(found, run(op, x, w))


@pytest.mark.parametrize("how", UNDER_AUTOCAST)
def test_formulas_and_rules_see_what_is_cast(registry: Registry, ns: str, how: str) -> None:
    """The function returns what the kernel does, which gets bfloat16: also below a level of functorch."""
    op, (x, w) = make_wave(registry, ns, "function"), (torch.rand(4, 4) for _ in "xw")
    op.register_autocast("cpu", BF16)
    found = UNDER_AUTOCAST[how](op, x, w)
    expected = UNDER_AUTOCAST[how](wave, x, w)  # in which torch casts the product
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_a_formula_that_switches_autocast_on(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::wave", wave, mutates_args=())

    @op.register_reference(gives="gradients")
    def in_bf16(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=BF16):
            product = x @ w
        assert product.dtype is BF16
        assert (x @ w).dtype is F32
        return product.float().sin()

    x, w = (torch.rand(4, 4) for _ in "xw")
    for forward, backward in (False, False), (True, True):
        found = gradients(op, x, w, forward, backward)
        torch.testing.assert_close(found, gradients(in_bf16, x, w, forward=False, backward=False))


# Tracing --------------------------------------------------------------------------------------------------------------


@pytest.mark.compile
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("inside", [True, False])
def test_compiled(sin: Any, backend: str, inside: bool) -> None:
    sin.register_autocast("cpu", BF16)
    x = torch.rand(3)

    def run(x: Tensor) -> Tensor:
        if inside:
            with torch.autocast("cpu"):
                return sin(x)
        return sin(x)

    compiled = torch.compile(run, backend=backend, fullgraph=True)
    with torch.autocast("cpu", enabled=not inside):
        assert torch.equal(compiled(x), reference(x))
        assert torch.equal(gradient(compiled, x), gradient(reference, x))
    if not inside:  # outside of autocast it is compiled anew
        assert torch.equal(compiled(x), torch.sin(x))


@pytest.mark.compile
def test_compiled_with_autocast_switched_off_inside(sin: Any) -> None:
    sin.register_autocast("cpu", BF16)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu"):
            first = sin(x)
            with torch.autocast("cpu", enabled=False):
                return first, sin(x)

    x = torch.rand(3)
    first, second = run(x)
    assert torch.equal(first, reference(x))
    assert torch.equal(second, torch.sin(x))


def test_traced(sin: Any, ns: str) -> None:
    sin.register_autocast("cpu", BF16)

    def run(x: Tensor) -> Tensor:
        with torch.autocast("cpu"):
            return sin(x)

    x = torch.rand(3)
    graph = make_fx(run, tracing_mode="fake")(x)
    assert f"torch.ops.{ns}.my_sin.default(_to_copy)" in graph.code
    assert torch.equal(graph(x), reference(x))


@pytest.mark.compile
def test_exported(sin: Any) -> None:
    sin.register_autocast("cpu", BF16)

    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu"):
                return sin(x)

    x = torch.rand(3)
    exported = torch.export.export(Model(), (x,)).module()
    assert torch.equal(exported(x), reference(x))
