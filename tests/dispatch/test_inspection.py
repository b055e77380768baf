"""First calls of a kernel, and after a compilation: what it writes, and whether the fake impl was right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from customops import Registry
from customops.errors import AutogradError, KernelError

X = torch.tensor([1.0, 2.0, 3.0])

#: Fake impls that are wrong for a kernel that returns ``2 * x``.
WRONG = {
    "shape": lambda x: x.new_empty(5),
    "dimensions": lambda x: x.new_empty(3, 1),
    "dtype": lambda x: torch.empty_like(x, dtype=torch.double),
    "device": lambda x: torch.empty_like(x, device="meta"),
}


def double(registry: Registry, ns: str, fake: Callable[..., Any], check: Any = "always") -> Any:
    op = registry.custom_op(f"{ns}::f", lambda x: x * 2, schema="(Tensor x) -> Tensor", check=check)
    op.register_fake(fake)
    return op


@pytest.mark.compile
@pytest.mark.parametrize("check", ["always", "first"])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_fake_that_is_wrong_raises_in_the_first_call(registry: Registry, ns: str, wrong: str, check: Any) -> None:
    op = double(registry, ns, WRONG[wrong], check)
    op(X)  # no fake impl in eager
    compiled = torch.compile(lambda x: op(x), fullgraph=True, backend="aot_eager")
    for _ in range(2):
        with pytest.raises(KernelError, match="something else than the fake impl says") as raised:
            compiled(X)
    assert raised.value.got == "a tensor of shape (3,), torch.float32, on cpu"
    assert __file__ in str(raised.value.fix)


@pytest.mark.compile
def test_inductor_reads_no_memory_of_others(registry: Registry, ns: str) -> None:
    """By the fake impl, the code after the op reads twice as many bytes as there are."""
    op = double(registry, ns, WRONG["dtype"])
    with pytest.raises(KernelError, match="something else than the fake impl says"):
        torch.compile(lambda x: op(x) + 1, fullgraph=True)(X)


@pytest.mark.compile
def test_a_fake_that_is_right_is_asked_once_more(registry: Registry, ns: str) -> None:
    asked = []

    def fake(x: Tensor) -> Tensor:
        asked.append(None)
        return torch.empty_like(x)

    op = double(registry, ns, fake)
    compiled = torch.compile(lambda x: op(x), fullgraph=True, backend="aot_eager", dynamic=True)
    compiled(X)
    count = len(asked)
    for n in range(2, 6):
        assert compiled(torch.ones(n)).tolist() == [2.0] * n
    assert len(asked) == count


@pytest.mark.compile
def test_sizes_that_depend_on_data_are_not_compared(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::f", lambda x: x[x > 1], schema="(Tensor x) -> Tensor")
    op.register_fake(lambda x: x.new_empty(torch.library.get_ctx().new_dynamic_size()))
    assert torch.compile(lambda x: op(x), fullgraph=True, backend="aot_eager")(X).tolist() == [2, 3]


@pytest.mark.compile
def test_lists_of_results(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::f", lambda x: (x * 2, [x + 1, x + 2]), schema="(Tensor x) -> (Tensor, Tensor[])")
    op.register_fake(lambda x: (torch.empty_like(x), [torch.empty_like(x), torch.empty_like(x)]))
    one, (two, three) = torch.compile(lambda x: op(x), fullgraph=True, backend="aot_eager")(X)
    assert (one + two + three).tolist() == [7, 11, 15]
    op.register_fake(lambda x: (torch.empty_like(x), [torch.empty_like(x), x.new_empty(1)]))
    with pytest.raises(KernelError, match="fake impl"):
        torch.compile(lambda x: op(x), fullgraph=True, backend="aot_eager")(X)


@pytest.mark.compile
def test_nothing_is_compared_with_check_never(registry: Registry, ns: str) -> None:
    op = double(registry, ns, WRONG["dtype"], check="never")
    assert torch.compile(lambda x: op(x), fullgraph=True, backend="aot_eager")(X).tolist() == [2, 4, 6]


# Writes -----------------------------------------------------------------------------------------------------------


def _undone(x: Tensor) -> Tensor:
    """Sets outliers aside, and puts them back."""
    first = x[0].clone()
    x[0] = float("nan")
    result = x.nan_to_num() * 2
    x[0] = first
    return result


def _by_a_view(x: Tensor) -> Tensor:
    x.unsqueeze(0)[:, 1:].zero_()
    return x.sum()


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("kernel", [lambda x: x.mul_(2).sum(), _by_a_view], ids=["write", "view"])
def test_a_write_that_is_not_declared_raises(registry: Registry, ns: str, kernel: Any, grad: bool) -> None:
    op = registry.custom_op(f"{ns}::f", kernel, schema="(Tensor x) -> Tensor")
    op.register_fake(lambda x: x.new_empty(()))
    op.register_autograd(lambda ctx, grad: grad.expand(3))
    with pytest.raises(KernelError, match="the kernel writes to an argument") as raised:
        op(X.clone().requires_grad_(grad))
    assert (raised.value.argument, raised.value.op) == ("x", f"{ns}::f")


def test_writes_that_are_right(registry: Registry, ns: str) -> None:
    undone = registry.custom_op(f"{ns}::undone", _undone, schema="(Tensor x) -> Tensor")
    assert undone(X.clone()).tolist() == [0, 4, 6]
    schema = "(Tensor(a!) out, Tensor x) -> ()"
    write = registry.custom_op(f"{ns}::write", lambda out, x: [out.add_(1), None][1], schema=schema)
    memory = X.clone()
    write(memory, memory[:2])  # what is read is of the memory that is written
    assert memory.tolist() == [2, 3, 4]
    with torch.inference_mode():
        assert undone(X.clone()).tolist() == [0, 4, 6]


def test_a_write_is_found_with_the_first_kernel_of_each_device(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::f", lambda x: x * 2, schema="(Tensor x) -> Tensor")
    op(X)
    op.register_kernel("cpu", lambda x: x.mul_(2).clone())
    with pytest.raises(KernelError, match="the kernel writes"):
        op(X.clone())


@pytest.mark.parametrize(
    ("schema", "kernel"),
    [
        ("(Tensor(a!) x) -> ()", lambda x: [x.mul_(2), None][1]),
        ("(Tensor(a!) x, Tensor? y=None) -> Tensor", lambda x, y=None: x.mul_(2).sum()),
        ("(Tensor(a!)[] x) -> ()", lambda x: [x[0].mul_(2), None][1]),
    ],
)
def test_a_leaf_that_requires_grad_is_not_written(registry: Registry, ns: str, schema: str, kernel: Any) -> None:
    """As with torch's own in-place ops: its gradient would be that of the old value."""
    op = registry.custom_op(f"{ns}::f", kernel, schema=schema)
    leaf = X.clone().requires_grad_()
    given = [leaf] if "[]" in schema else leaf
    with pytest.raises(AutogradError, match="a leaf Variable that requires grad is being used in an in-place"):
        op(given)
    assert leaf.tolist() == X.tolist()
    with torch.no_grad():
        op(given)
    assert leaf.tolist() == (X * 2).tolist()
