"""Ops that take and return only tensors: from torch 2.14 on, kernels get arguments without a conversion to C++."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.threads import in_threads
from helpers.versions import is_before
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import customops
from customops import Registry
from customops.errors import UnregisteredError

pytestmark = pytest.mark.skipif(is_before(2, 14), reason="needs torch 2.14: torch converts all arguments before")


def takes_objects(op: Any) -> bool:
    return bool(op._opoverload._is_pyobj_dispatcher_enabled())


def of_tensors(x: Tensor, y: Tensor) -> Tensor:
    return x * y


def of_lists(x: Tensor, ys: list[Tensor]) -> Tensor:
    return x + sum(ys)


def writes(x: Tensor, y: Tensor) -> None:
    x.copy_(y)


def several(x: Tensor) -> tuple[Tensor, Tensor]:
    return x + 1, x + 2


def with_number(x: Tensor, by: float) -> Tensor:
    return x * by


def with_default(x: Tensor, y: Tensor | None = None) -> Tensor:
    return x.clone() if y is None else x + y


def with_keyword(x: Tensor, *, y: Tensor) -> Tensor:
    return x + y


def returns_list(x: Tensor) -> list[Tensor]:
    return [x + 1]


@pytest.mark.parametrize(
    ("fn", "mutates", "expected"),
    [
        (of_tensors, (), True),
        (of_lists, (), False),
        (writes, ("x",), True),
        (several, (), True),
        (with_number, (), False),
        (with_default, (), False),
        (with_keyword, (), False),
        (returns_list, (), False),
    ],
)
def test_which_ops_do(registry: Registry, ns: str, fn: Any, mutates: Any, expected: bool) -> None:
    op = registry.custom_op(f"{ns}::f", fn, mutates_args=mutates)
    assert takes_objects(op) is expected
    assert op._entry is op._opoverload._op


@pytest.fixture
def times(registry: Registry, ns: str) -> Any:
    op = registry.custom_op(f"{ns}::times", of_tensors, mutates_args=())
    op.register_fake(lambda x, y: torch.empty_like(x))
    op.register_autograd(
        lambda ctx, grad: (grad * ctx.saved_tensors[1], grad * ctx.saved_tensors[0]),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    op.register_vmap(lambda info, in_dims, x, y: (x * y, 0))
    return op


def test_values_and_gradients(times: Any) -> None:
    x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    for call in (times, times._opoverload, times._opoverload._overloadpacket):
        result = call(x, y)
        assert_close(result, x * y)
        assert_close(torch.autograd.grad(result.sum(), (x, y)), (y, x))
    with torch.inference_mode():
        assert_close(times(x, y), x * y)


def test_transforms(times: Any) -> None:
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    assert_close(torch.func.vmap(times)(x, y), x * y)
    assert_close(torch.func.grad(lambda x: times(x, y).sum())(x), y)
    assert_close(torch.func.vmap(torch.func.grad(lambda x, y: times(x, y).sum()))(x, y), y)


def test_modes_and_subclasses(times: Any) -> None:
    seen: list[str] = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(f"function {func}")
            return func(*args, **(kwargs or {}))

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(f"dispatch {func}")
            return func(*args, **(kwargs or {}))

    class Named(Tensor):
        pass

    x = torch.randn(3)
    for mode in (Functions, Dispatch):
        with mode():
            assert_close(times(x, x), x * x)
    assert [each for each in seen if "times" in each] == [
        f"function {times._opoverload}",
        f"dispatch {times._opoverload}",
    ]
    assert type(times(x.as_subclass(Named), x)) is Named
    with FakeTensorMode() as mode:
        assert times(mode.from_tensor(x), mode.from_tensor(x)).shape == (3,)
    with torch.autocast("cpu"):
        assert times(x, x).dtype == torch.float32


@pytest.mark.compile
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(times: Any, backend: str) -> None:
    compiled = torch.compile(lambda x, y: times(x, y).sum(), backend=backend, fullgraph=True)
    for size in (3, 4):
        x, y = torch.randn(size, requires_grad=True), torch.randn(size)
        compiled(x, y).backward()
        assert_close(x.grad, y)


def test_what_does_not_fit_raises_what_it_does_elsewhere(times: Any) -> None:
    x = torch.randn(3)
    for args, kwargs in (((x, 2.0), {}), ((x, None), {}), ((x,), {}), ((x, x, x), {}), ((x,), {"z": x})):
        with pytest.raises(Exception) as ours:  # noqa: PT011
            times(*args, **kwargs)
        times._opoverload._enable_pyobj_dispatch(False)
        times._compute_entry()
        with pytest.raises(type(ours.value)) as expected:
            times(*args, **kwargs)
        times._look_for_observers()
        assert str(ours.value) == str(expected.value)
    assert takes_objects(times)


def test_a_profiler_sees_the_op(times: Any) -> None:
    x = torch.randn(3)
    with torch.profiler.profile() as profile:
        assert takes_objects(times)
        times(x, x)
        times._opoverload(x, x)
    names = [event.name for event in profile.events()]
    assert names.count(times._opoverload._name) == 2  # the kernel opens the range, because torch opens none
    assert times._entry is times._opoverload._op


def test_an_op_that_is_gone(times: Any) -> None:
    overload, keys, x = times._opoverload, torch._C._dispatch_keys(torch.ones(1)), torch.ones(1)
    times.unregister()
    for call in (times, overload, lambda *args: overload.redispatch(keys, *args)):
        with pytest.raises(UnregisteredError):
            call(x, x)


def test_another_kernel_is_called_at_once(times: Any) -> None:
    x = torch.randn(3)
    times(x, x)
    times.register_kernel("cpu", lambda x, y: x - y)
    assert_close(times(x, x), torch.zeros(3))


@pytest.mark.parametrize("check", ["always", "first", "never"])
def test_what_is_no_tensor_is_not_returned(registry: Registry, ns: str, check: Any) -> None:
    op = registry.custom_op(f"{ns}::f", of_tensors, mutates_args=(), check=check)
    x, returned = torch.ones(2), [torch.ones(2), 3]
    op.register_kernel("cpu", lambda x, y: returned[0])
    assert takes_objects(op) is (check == "always")
    op(x, x)
    returned.pop(0)
    for call in (op, op._opoverload):
        with pytest.raises(RuntimeError):
            call(x, x)


def test_another_policy_of_checks(registry: Registry, ns: str) -> None:
    for check in ("never", "always"):
        op = registry.custom_op(f"{ns}::{check}", of_tensors, mutates_args=(), check=check)
        assert takes_objects(op) is (check == "always")
        assert op._entry is op._opoverload._op


def test_several_threads(times: Any) -> None:
    def work() -> None:
        x = torch.randn(3, requires_grad=True)  # not one for all: torch itself may then deadlock (GIL, accumulator)
        for _ in range(200):
            (gradient,) = torch.autograd.grad(times(x, x).sum(), x)
            assert_close(gradient, 2 * x)

    in_threads(work, 3)


def test_ops_of_others_are_left_alone(lib: Any, ns: str) -> None:
    lib.define("other(Tensor x) -> Tensor")
    lib.impl("other", torch.sin, "CPU")
    assert not takes_objects(customops.adopt(f"{ns}::other"))
    customops.default_registry.clear()


def test_by_keyword(registry: Registry, ns: str) -> None:
    """The arguments are passed on by position."""
    op = registry.custom_op(f"{ns}::f", lambda x, y: x - 2 * y, schema="(Tensor x, Tensor y) -> Tensor")
    op.register_fake(lambda x, y: torch.empty_like(x))
    x, y = torch.arange(3.0), torch.ones(3)
    given = []
    entry, op._entry = op._entry, lambda *args, **kwargs: given.append((len(args), [*kwargs])) or entry(*args, **kwargs)
    for result in (op(x=x, y=y), op(y=y, x=x), op(x, y=y), op(x, y)):
        assert_close(result, x - 2 * y)
    assert given == [(2, [])] * 4
    compiled = torch.compile(lambda x, y: op(y=y, x=x), backend="aot_eager", fullgraph=True)
    assert_close(compiled(x, y), x - 2 * y)


@pytest.mark.parametrize(
    ("names", "message"),
    [(("x", "z"), "no argument named z|did you mean|z"), (("x",), "y"), (("x", "y", "z"), "z")],
)
def test_wrong_keywords(registry: Registry, ns: str, names: tuple[str, ...], message: str) -> None:
    """The dispatcher says what is wrong, as it does for others."""
    errors = []
    for check in ("always", "never"):  # the latter takes no objects
        op = registry.custom_op(f"{ns}::f", of_tensors, mutates_args=(), check=check)
        with pytest.raises(Exception, match=message) as raised:
            op(**dict.fromkeys(names, torch.ones(2)))
        errors.append((type(raised.value), str(raised.value)))
    assert errors[0] == errors[1]


def test_torch_functions_see_keywords(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::f", of_tensors, mutates_args=())
    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append((len(args), [*kwargs]))
            return func(*args, **kwargs)

    class Subclass(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append((len(args), [*(kwargs or {})]))
            return super().__torch_function__(func, types, args, kwargs or {})

    x = torch.ones(2)
    with Mode():
        op(x, y=x)
    op(x, y=x.as_subclass(Subclass))
    assert seen[0] == (1, ["y"])
    assert (1, ["y"]) in seen[1:]
