"""The function that the code of a graph calls: the kernel at once, or the dispatcher where that has something to do."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from typing import Any, Optional

import pytest
import torch
from helpers.modes import DispatchLog, FunctionLog
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import Library
from torch.utils._python_dispatch import TorchDispatchMode

from customops import Registry
from customops._rules.compilers import direct_call, may_be_direct
from customops._torch.inductor import TENSOR
from customops.errors import AliasError, KernelError, UnregisteredError

ONE = torch.ones(2)
CALLERS: list[str] = []


def note_caller() -> None:
    frame = sys._getframe(2)
    if frame.f_code.co_name == "__call__" and frame.f_back is not None:  # first calls are inspected
        frame = frame.f_back
    CALLERS.append(frame.f_code.co_name)


def is_direct(f: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    """Does a call of the function run the kernel without the dispatcher?"""
    CALLERS.clear()
    f(*args, **kwargs)
    (caller,) = CALLERS
    return caller == "graph_call"


def scale(x: Tensor, y: Tensor, by: float = 2.0, bias: Optional[Tensor] = None, *, n: int = 1) -> Tensor:
    note_caller()
    return (x + y) * by * n + (0 if bias is None else bias)


def save(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
    ctx.by = inputs[2]


@pytest.fixture
def op(registry: Registry, ns: str) -> Any:
    op = registry.custom_op(f"{ns}::scale", scale, mutates_args=())
    op.register_fake(lambda x, y, by, bias, n: torch.empty_like(x))

    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.by, grad * ctx.by, None, None

    op.register_autograd(backward, setup_context=save)
    op.register_vmap("broadcast_all")
    return op


@pytest.fixture
def direct(op: Any) -> Any:
    return direct_call(op._qualname, "CPU")


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((ONE, ONE), {}),
        ((ONE, ONE, 3.0), {"n": 2}),
        ((ONE, ONE, 3.0, ONE), {}),
        ((ONE, torch.nn.Parameter(ONE, requires_grad=False)), {"bias": None}),
        ((torch.ones(2, 2).t(), torch.ones(2, 2)), {}),
    ],
)
def test_direct(op: Any, direct: Any, args: Any, kwargs: Any) -> None:
    for context in (contextlib.nullcontext, torch.no_grad, torch.enable_grad, torch.inference_mode):
        with context():
            assert is_direct(direct, *args, **kwargs)
            assert torch.equal(direct(*args, **kwargs), op(*args, **kwargs))


class Plain(Tensor):
    pass


def test_gradients_take_the_dispatcher(direct: Any) -> None:
    x = torch.ones(2, requires_grad=True)
    for args in ((x, ONE), (ONE, x), (x * 1, ONE)):
        assert not is_direct(direct, *args)
        assert direct(*args).requires_grad
        assert is_direct(torch.no_grad()(direct), *args)
        assert not torch.no_grad()(direct)(*args).requires_grad
    assert torch.autograd.grad(direct(x, ONE).sum(), x)[0].tolist() == [2, 2]


def test_subclasses_take_the_dispatcher(direct: Any) -> None:
    assert not is_direct(direct, ONE, ONE.as_subclass(Plain))
    assert type(direct(ONE, ONE.as_subclass(Plain))) is Plain
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(ONE)
    assert type(direct(fake, fake)) is type(fake)


@pytest.mark.parametrize("mode_type", [DispatchLog, FunctionLog])
def test_modes_see_the_call(op: Any, direct: Any, mode_type: Any) -> None:
    logs = []
    for f in (direct, op._opoverload):
        with mode_type() as mode:
            assert not is_direct(f, ONE, ONE)
        logs.append([str(each) for each in mode.seen])
    assert logs[0] == logs[1]
    assert any(op.__name__ in each for each in logs[0])


def test_a_call_below_a_mode(op: Any, direct: Any) -> None:
    """Conjugation, which is left out below a mode, is not left out in the kernel."""
    found = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found.append(is_direct(direct, ONE, ONE))
            return func(*args, **(kwargs or {}))

    with Mode():
        ONE.neg()
    assert found == [False]


def test_transforms(direct: Any) -> None:
    x = torch.rand(3)
    assert torch.equal(torch.func.grad(lambda x: direct(x, x).sum())(x), torch.full((3,), 4.0))
    assert torch.equal(torch.vmap(lambda x: direct(x, x))(x), 4 * x)
    assert torch.equal(torch.func.functionalize(lambda x: direct(x, x))(x), 4 * x)


def test_profilers_see_the_call(op: Any, direct: Any) -> None:
    assert is_direct(direct, ONE, ONE)
    with torch.profiler.profile() as profile:
        assert not is_direct(direct, ONE, ONE)
    assert op._qualname in {event.name for event in profile.events()}
    assert is_direct(direct, ONE, ONE)


def test_autocast(op: Any, direct: Any) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert direct(ONE, ONE).dtype == torch.float32
    op.register_autocast("cpu", torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert not is_direct(direct, ONE, ONE)
        assert direct(ONE, ONE).dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_registrations_count_at_once(registry: Registry, op: Any, direct: Any, ns: str) -> None:
    op.register_kernel("cpu", lambda x, y, by, bias, n: x + 10)
    assert direct(ONE, ONE).tolist() == [11, 11]
    with op.set_kernel_enabled("cpu", False):
        assert direct(ONE, ONE).tolist() == [4, 4]
    for key in ("CPU", "AutogradCPU", "BackendSelect"):
        other = Library(ns, "FRAGMENT")
        other.impl("scale", lambda *args, **kwargs: args[0] + 20, key, allow_override=True)
        assert direct(ONE, ONE).tolist() == [21, 21], key
        other._destroy()
        assert direct(ONE, ONE).tolist() == [11, 11]
    for key in ("CPU", "ADInplaceOrView", "AutogradCPU", "Autograd", "BackendSelect"):
        with registry.scope():
            registry.impl(f"{ns}::scale", key, lambda *args, **kwargs: args[0] + 20)
            for _ in range(2):
                assert direct(ONE, ONE).tolist() == [21, 21], key
        assert direct(ONE, ONE).tolist() == [11, 11]


def test_another_op_of_the_name(registry: Registry, op: Any, direct: Any) -> None:
    with registry.scope():
        registry.custom_op(op._qualname, lambda x, y: x - y, mutates_args=(), schema="(Tensor x, Tensor y) -> Tensor")
        with pytest.raises(RuntimeError, match="expected at most 2 argument"):
            direct(ONE, ONE)
    assert direct(ONE, ONE).tolist() == [4, 4]
    op.unregister()
    with pytest.raises((UnregisteredError, AttributeError)):
        direct(ONE, ONE)


def test_an_op_that_is_not_defined(ns: str) -> None:
    with pytest.raises(AttributeError, match=ns):
        direct_call(f"{ns}::gone", "CPU")(ONE)


@pytest.mark.parametrize("check", ["always", "first", "never"])
def test_types_of_results_are_checked(registry: Registry, ns: str, check: Any) -> None:
    """In place of the dispatcher, which does so whatever the policy."""
    results = iter([ONE + 1, 3.0, ONE])
    registry.custom_op(f"{ns}::f", lambda x: next(results), mutates_args=(), schema="(Tensor x) -> Tensor", check=check)
    direct = direct_call(f"{ns}::f", "CPU")
    direct(ONE)
    with pytest.raises(KernelError):
        direct(ONE)
    if check == "always":
        with pytest.raises(AliasError):
            direct(ONE)


@pytest.mark.parametrize("check", ["always", "first", "never"])
@pytest.mark.parametrize("kernel", [lambda x: torch.max(x, 0), lambda x: [x + 1, x + 2]])
def test_several_results_are_a_tuple(registry: Registry, ns: str, kernel: Any, check: Any) -> None:
    registry.custom_op(f"{ns}::f", kernel, mutates_args=(), schema="(Tensor x) -> (Tensor, Tensor)", check=check)
    direct = direct_call(f"{ns}::f", "CPU")
    assert [type(direct(ONE)) for _ in range(3)] == [tuple] * 3


def add_to(x: Tensor, y: Tensor) -> None:
    note_caller()
    x.numpy()[:] += y.numpy()


def test_writes_are_counted(registry: Registry, ns: str) -> None:
    registry.custom_op(f"{ns}::add", add_to, mutates_args={"x"})
    direct = direct_call(f"{ns}::add", "CPU")
    for context in (contextlib.nullcontext, torch.no_grad, torch.inference_mode):
        x = torch.zeros(2)
        with context():
            for i in range(1, 4):
                assert is_direct(direct, x, ONE)
                assert (x._version, x.tolist()) == (i, [i, i])


@pytest.mark.parametrize("context", [contextlib.nullcontext, torch.inference_mode])
def test_writes_to_tensors_of_inference_mode(registry: Registry, ns: str, context: Any) -> None:
    op = registry.custom_op(f"{ns}::add", add_to, mutates_args={"x"})
    direct = direct_call(f"{ns}::add", "CPU")
    with torch.inference_mode():
        x, y = torch.zeros(2), torch.zeros(2)
    with context():
        op(x, ONE)
        direct(y, ONE)
    assert x.tolist() == y.tolist() == [1, 1]


def test_threads(op: Any, direct: Any) -> None:
    """A mode of one thread says nothing of another."""
    found = []
    with DispatchLog():
        thread = threading.Thread(target=lambda: found.append(direct(ONE, ONE).tolist()))
        thread.start()
        thread.join()
    assert found == [[4, 4]]
    assert CALLERS[-1] == "graph_call"


T: Any = object()


@pytest.mark.parametrize(
    ("schema", "args", "kwargs", "expected"),
    [
        ("(Tensor x, float by) -> Tensor", (T, 2.0), {}, True),
        ("(Tensor x, float by) -> Tensor", (T, 2), {}, False),
        ("(Tensor x, float by) -> Tensor", (T,), {"by": 2.0}, True),
        ("(Tensor x, SymInt n, bool b, str s) -> Tensor", (T, 3, True, "s"), {}, True),
        ("(Tensor x, SymInt n) -> Tensor", (T, True), {}, False),
        ("(Tensor x, SymInt n) -> Tensor", (T, 2**63), {}, False),
        ("(Tensor x, SymInt[] n) -> Tensor", (T, [1, 2]), {}, True),
        ("(Tensor x, SymInt[2] n) -> Tensor", (T, 1), {}, False),
        ("(Tensor x, SymInt[] n) -> Tensor", (T, (1, 2)), {}, False),
        ("(Tensor x, ScalarType? d, Device? e) -> Tensor", (T, torch.float32, None), {}, True),
        ("(Tensor x, Generator? g) -> Tensor", (T, torch.Generator()), {}, False),
        ("(Tensor? x, Tensor y) -> Tensor", (None, T), {}, True),
        ("(Tensor[] xs, Tensor?[] ys) -> Tensor[]", ([T, T], [T, None]), {}, True),
        ("(Tensor x, Tensor y) -> Tensor", (T, 2.0), {}, False),
        ("(Tensor x, *, float by) -> Tensor", (T,), {"by": 1.0}, True),
        ("(Tensor x) -> (Tensor, int)", (T,), {}, False),
        ("(Tensor(a) x) -> Tensor(a)", (T,), {}, False),
    ],
)
def test_which_calls_may_be_direct(
    registry: Registry, ns: str, schema: str, args: Any, kwargs: Any, expected: bool
) -> None:
    def with_tensors(value: Any) -> Any:
        return [with_tensors(each) for each in value] if type(value) is list else TENSOR if value is T else value

    registry.custom_op(f"{ns}::f", lambda *args, **kwargs: 0, mutates_args=(), schema=schema)
    args = tuple(map(with_tensors, args))
    assert may_be_direct(f"{ns}::f", "CPU", args, kwargs) is expected
