"""``bypass=True``: nothing but the profiler may tell."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any, Optional

import pytest
import torch
from helpers.modes import DispatchLog, FunctionLog
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import Library
from torch.utils._python_dispatch import TorchDispatchMode

import customops
from customops import Registry
from customops.errors import AliasError, UnsupportedError


class Frames:
    """Counts the calls of other written functions than the kernel: there is one where the dispatcher takes part."""

    def __init__(self, f: Callable[..., Any]) -> None:
        self.f = f

    def __call__(self, *args: Any, **kwargs: Any) -> int:

        names: list[str] = []

        def profile(frame: Any, event: str, _: Any) -> None:
            if event == "call" and frame.f_code.co_filename.startswith("<customops"):
                names.append(frame.f_code.co_name)

        sys.setprofile(profile)
        try:
            self.f(*args, **kwargs)
        finally:
            sys.setprofile(None)
        assert names[0] == "__call__"
        return len(names) - names.count("__call__") - names.count("kernel")


def scale_fn(x: Tensor, y: Tensor, by: float = 2.0, n: int = 1, bias: Optional[Tensor] = None) -> Tensor:
    return (x + y) * by * n + (0 if bias is None else bias)


def make(registry: Registry, name: str, **options: Any) -> Any:
    op = registry.custom_op(name, scale_fn, mutates_args=(), **options)
    op.register_fake(lambda x, y, by, n, bias: torch.empty_like(x))

    def backward(ctx: Any, grad: Tensor) -> Any:
        g = grad * ctx.factor
        return g, g, None, None, grad if ctx.has_bias else None

    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.factor, ctx.has_bias = inputs[2] * inputs[3], inputs[4] is not None

    op.register_autograd(backward, setup_context=setup_context)
    op.register_vmap("broadcast_all")
    return op


@pytest.fixture
def scale(registry: Registry, ns: str) -> Any:
    op = make(registry, f"{ns}::scale", bypass=True)
    op(torch.ones(2), torch.ones(2), 2.0, 1, None)  # the kernel for plain tensors is known from here on
    return op


@pytest.fixture
def plain(registry: Registry, ns: str) -> Any:
    return make(registry, f"{ns}::plain")


ONE = torch.ones(2)


@pytest.mark.parametrize(
    "args",
    [
        (ONE, ONE, 3.0, 2, None),
        (ONE, ONE, 3.0, 2, ONE),
        (torch.nn.Parameter(ONE, requires_grad=False), ONE.double().float(), 0.5, -1, None),
        (torch.ones(2, 2).t(), torch.ones(2, 2), 1.0, 1, None),
    ],
)
def test_what_goes_past_the_dispatcher(scale: Any, plain: Any, args: Any) -> None:
    assert Frames(scale)(*args) == 0
    assert torch.equal(scale(*args), plain(*args))
    with torch.no_grad():
        assert Frames(scale)(*args) == 0
    with torch.inference_mode():
        assert Frames(scale)(*args) == 0
        inference = torch.ones(2)
        scale(inference, inference, 1.0, 1, None)
        assert Frames(scale)(inference, inference, 1.0, 1, None) == 0
        assert torch.equal(scale(inference, inference, 1.0, 1, None), plain(inference, inference, 1.0))


class Plain(Tensor):
    pass


def leaf() -> Tensor:
    return torch.ones(2, requires_grad=True)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((ONE, ONE), {}),  # defaults
        ((ONE, ONE, 2.0, 1), {"bias": None}),
        ((leaf(), ONE, 2.0, 1, None), {}),
        ((ONE, ONE, 2.0, 1, leaf()), {}),
        ((leaf() * 2, ONE, 2.0, 1, None), {}),
        ((ONE, ONE, 2, 1, None), {}),  # an int for a float
        ((ONE, ONE, True, 1, None), {}),
        ((ONE, ONE, 2.0, True, None), {}),
        ((ONE, ONE.as_subclass(Plain), 2.0, 1, None), {}),
        ((torch.ones(2, dtype=torch.complex64).conj(), ONE, 2.0, 1, None), {}),
        ((torch.ones(2, dtype=torch.complex64).conj().imag, ONE, 2.0, 1, None), {}),
        ((ONE, torch._efficientzerotensor(2), 2.0, 1, None), {}),
        ((ONE.to("meta"), ONE.to("meta"), 2.0, 1, None), {}),
    ],
)
def test_what_takes_the_dispatcher(scale: Any, plain: Any, args: Any, kwargs: Any) -> None:
    ours, theirs = scale(*args, **kwargs), plain(*args, **kwargs)
    assert type(ours) is type(theirs)
    assert (ours.dtype, ours.device, ours.requires_grad, ours.layout) == (
        theirs.dtype,
        theirs.device,
        theirs.requires_grad,
        theirs.layout,
    )
    if not ours.is_meta:
        assert torch.equal(ours.to_dense(), theirs.to_dense())
    if ours.requires_grad:
        inputs = [arg for arg in args if isinstance(arg, Tensor) and arg.requires_grad]
        for a, b in zip(
            torch.autograd.grad(ours.sum(), inputs), torch.autograd.grad(theirs.sum(), inputs), strict=True
        ):
            assert torch.equal(a, b)


@pytest.mark.parametrize(
    "args",
    [
        ("x", ONE, 2.0, 1, None),
        (ONE, None, 2.0, 1, None),
        (ONE,),
        (ONE, ONE, "2", 1, None),
        (ONE, ONE, 2.0, 2**63, None),
    ],
)
def test_wrong_calls(scale: Any, plain: Any, args: Any) -> None:
    with pytest.raises((RuntimeError, TypeError)) as theirs:
        plain(*args)
    with pytest.raises(theirs.type):
        scale(*args)


def test_modes_see_it(scale: Any, plain: Any) -> None:
    for mode_type in (DispatchLog, FunctionLog):
        logs = []
        for op in (scale, plain):
            with mode_type() as mode:
                op(ONE, ONE, 2.0, 1, None)
            logs.append([str(each).replace("plain", "scale") for each in mode.seen])
        assert logs[0] == logs[1]
        assert any("scale" in each for each in logs[0])


def test_fake_tensors(scale: Any) -> None:
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.ones(2))
        result = scale(fake, fake, 2.0, 1, None)
    assert type(result) is type(fake)
    assert result.shape == (2,)


def test_transforms(scale: Any) -> None:
    x = torch.rand(3)
    assert torch.equal(torch.func.grad(lambda x: scale(x, x, 2.0, 1, None).sum())(x), torch.full((3,), 4.0))
    assert torch.equal(torch.vmap(lambda x: scale(x, x, 2.0, 1, None))(x), 4 * x)
    assert torch.equal(torch.func.functionalize(lambda x: scale(x, x, 2.0, 1, None))(x), 4 * x)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        with pytest.raises(UnsupportedError, match="forward-mode"):
            scale(dual, dual, 2.0, 1, None)


@pytest.mark.compile
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled(scale: Any, backend: str) -> None:
    f = torch.compile(lambda x, y: scale(x, y, 2.0, 1, None).sin(), fullgraph=True, backend=backend)
    assert torch.allclose(f(ONE, ONE), torch.full((2,), 4.0).sin())
    x = leaf()
    (grad,) = torch.autograd.grad(f(x, ONE).sum(), x)
    assert torch.allclose(grad, 2 * torch.full((2,), 4.0).cos())


def test_autocast(scale: Any) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert scale(ONE, ONE, 2.0, 1, None).dtype == torch.float32
    scale.register_autocast("cpu", torch.bfloat16)
    assert scale(ONE, ONE, 2.0, 1, None).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert scale(ONE, ONE, 2.0, 1, None).dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_registrations_count_at_once(registry: Registry, scale: Any, ns: str) -> None:
    call = (ONE, ONE, 2.0, 1, None)
    scale.register_kernel("cpu", lambda x, y, by, n, bias: x + 10)
    assert scale(*call).tolist() == [11, 11]
    with scale.set_kernel_enabled("cpu", False):
        assert scale(*call).tolist() == [4, 4]
    for key in ("CPU", "AutogradCPU", "BackendSelect"):
        other = Library(ns, "FRAGMENT")
        other.impl("scale", lambda *args: args[0] + 20, key)
        assert scale(*call).tolist() == [21, 21], key
        other._destroy()
        assert scale(*call).tolist() == [11, 11]
    for key in ("CPU", "ADInplaceOrView", "AutogradCPU", "Autograd", "BackendSelect"):
        with registry.scope():
            registry.impl(f"{ns}::scale", key, lambda *args: args[0] + 20)
            for _ in range(2):
                assert scale(*call).tolist() == [21, 21], key
        assert scale(*call).tolist() == [11, 11]
    assert Frames(scale)(*call) == 0
    scale.unregister()
    with pytest.raises(customops.errors.UnregisteredError):
        scale(*call)


def test_the_profiler_is_what_is_given_up(scale: Any, plain: Any, ns: str) -> None:
    names = []
    for op in (scale, plain):
        with torch.profiler.profile() as profile:
            op(ONE, ONE, 2.0, 1, None)
        names.append({event.name for event in profile.events() if event.name.startswith(ns)})
    assert names == [set(), {f"{ns}::plain"}]


def test_results_are_checked(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::f", lambda x: x, mutates_args=(), schema="(Tensor x) -> Tensor", bypass=True)
    for _ in range(2):
        with pytest.raises(AliasError):
            op(ONE)


@pytest.mark.parametrize("check", ["always", "first", "never"])
@pytest.mark.parametrize("kernel", [lambda x: torch.max(x, 0), lambda x: [x + 1, x + 2]])
def test_several_returns_are_a_tuple(registry: Registry, ns: str, kernel: Any, check: Any) -> None:
    schema = "(Tensor x) -> (Tensor, Tensor)"
    op = registry.custom_op(f"{ns}::f", kernel, mutates_args=(), schema=schema, check=check, bypass=True)
    assert [type(op(ONE)) for _ in range(3)] == [tuple] * 3


def test_writes_are_counted(registry: Registry, ns: str) -> None:
    def add(x: Tensor, y: Tensor) -> None:
        x.numpy()[:] += y.numpy()

    op = registry.custom_op(f"{ns}::add", add, mutates_args={"x"}, bypass=True)
    x = torch.zeros(2)
    for i in range(1, 4):
        op(x, ONE)
        assert (x._version, x.tolist()) == (i, [i, i])
    for context in (torch.inference_mode(), contextlib.nullcontext()):
        with torch.inference_mode():
            y = torch.zeros(2)
        with context:
            op(y, ONE)
            op(y, ONE)
        assert y.tolist() == [2, 2]


def test_writes_are_not_counted_inside_a_mode(registry: Registry, ns: str) -> None:
    def add(x: Tensor, y: Tensor) -> None:
        x.numpy()[:] += y.numpy()

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            for op in ops:
                op(x, ONE)
                versions.append(x._version)
            return func(*args, **(kwargs or {}))

    ops = [registry.custom_op(f"{ns}::add{i}", add, mutates_args={"x"}, bypass=bool(i)) for i in range(2)]
    x, versions = torch.zeros(2), list[int]()
    for op in ops * 2:
        op(x, ONE)
    with Mode():
        ONE.neg()
    assert versions == [4, 4]
    assert x.tolist() == [6, 6]


def test_inplace(registry: Registry, ns: str) -> None:
    def add_(x: Tensor, y: Tensor) -> Tensor:
        return x.add_(y)

    op = registry.custom_op(f"{ns}::add_", add_, mutates_args={"x"}, tags=torch.Tag.inplace, bypass=True)
    x = torch.zeros(2)
    assert op(x, ONE) is x
    assert op(x, ONE) is x
    assert x.tolist() == [2, 2]
    with pytest.raises(RuntimeError, match="no autograd formula"):
        op(leaf() * 1, ONE).sum().backward()


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ("(Tensor[] xs) -> Tensor", "'xs' is a Tensor"),
        ("(Tensor x, int[] n) -> Tensor", "'n' is a int"),
        ("(Tensor x, *, int n) -> Tensor", "'n' is always passed by keyword"),
        ("(Tensor? x) -> Tensor", "always a Tensor"),
        ("(int n) -> Tensor", "always a Tensor"),
        ("(Tensor x) -> int", "something else"),
        ("(Tensor x) -> Tensor[]", "something else"),
        ("(Tensor(a) x) -> Tensor(a)", "something else"),
    ],
)
def test_ops_that_cannot(registry: Registry, ns: str, schema: str, problem: str) -> None:
    with pytest.raises(UnsupportedError, match=f"cannot bypass the dispatcher: .*{problem}"):
        registry.custom_op(f"{ns}::f", lambda *args, **kwargs: 1, mutates_args=(), schema=schema, bypass=True)
    assert not hasattr(getattr(torch.ops, ns), "f")


def test_a_removed_op_does_not_run_its_successor(registry: Registry, ns: str, scale: Any) -> None:
    call = (ONE, ONE, 2.0, 1, None)
    with registry.scope():
        successor = make(registry, f"{ns}::scale", bypass=True)
        successor(*call)
        for _ in range(2):
            with pytest.raises(customops.errors.UnregisteredError):
                scale(*call)
            assert Frames(successor)(*call) == 0
    scale(*call)
    for _ in range(2):
        with pytest.raises(customops.errors.UnregisteredError):
            successor(*call)
        assert Frames(scale)(*call) == 0


def test_a_value_there_is_not(registry: Registry, ns: str) -> None:
    with pytest.raises(customops.errors.DefinitionError, match="bypass must be True or False"):
        make(registry, f"{ns}::scale", bypass="no")


def test_it_comes_back_from_a_scope(registry: Registry, ns: str, scale: Any) -> None:
    with registry.scope():
        make(registry, f"{ns}::scale")
    assert scale(ONE, ONE, 2.0, 1, None).tolist() == [4, 4]
    assert Frames(scale)(ONE, ONE, 2.0, 1, None) == 0
    assert repr(scale) == f"<CustomOpDef({ns}::scale)>"
    assert "of_tensors" in scale.explain_call()
