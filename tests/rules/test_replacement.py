"""Plain torch code that inductor replaces by an op."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.processes import Program, outputs
from torch import Tensor
from torch.testing import assert_close

import customops
from customops import Registry
from customops.errors import CallbackError, OpCheckError, RegistrationError, UnsupportedError

pytestmark = pytest.mark.compile

ROOT = Path(__file__).parents[2]
CALLS: list[float] = []


def plain(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    CALLS.append(eps)
    return plain(x, weight, eps)


def samples() -> Iterator[Any]:
    for dtype in (torch.float32, torch.float64):
        yield torch.randn(3, 8, dtype=dtype), torch.randn(8, dtype=dtype)


@pytest.fixture
def op(registry: Registry, ns: str) -> Any:
    op = registry.custom_op(f"{ns}::norm", norm, mutates_args=())
    op.register_fake(lambda x, weight, eps: torch.empty_like(x))
    op.register_samples(samples)
    return op


def compiled(f: Any, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(f, fullgraph=True, **options)


def calls(f: Any, *args: Any) -> list[float]:
    CALLS.clear()
    f(*args)
    return [*CALLS]


def program(x: Tensor, weight: Tensor) -> Tensor:
    x = x.sin()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight).cos()


@pytest.mark.parametrize("dynamic", [False, True])
def test_code_is_replaced(op: Any, dynamic: bool) -> None:
    op.register_replacement(plain)
    f = compiled(program, dynamic=dynamic)
    for shape, dtype in (((4, 16), torch.float32), ((5, 8), torch.float32), ((4, 16), torch.float64)):
        x, weight = torch.randn(*shape, dtype=dtype), torch.randn(shape[-1], dtype=dtype)
        assert_close(f(x, weight), program(x, weight))
        assert calls(f, x, weight) == [1e-5]
    assert calls(compiled(program, backend="aot_eager"), x, weight) == []


def test_other_code_is_not(op: Any) -> None:
    op.register_replacement(plain)
    x, weight = torch.randn(4, 16), torch.randn(16)
    for other in (
        lambda x, weight: x * torch.rsqrt(x.square().mean(0, keepdim=True) + 1e-5) * weight,
        lambda x, weight: x * torch.rsqrt(x.square().mean(-1, keepdim=True) - 1e-5) + weight,
        lambda x, weight: (y := torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5), x * y * weight),
    ):
        f = compiled(other)
        assert_close(f(x, weight), other(x, weight), equal_nan=True)
        assert calls(f, x, weight) == []


def test_gradients_without_a_formula(op: Any) -> None:
    op.register_replacement(plain)
    x, weight = torch.randn(4, 16, requires_grad=True), torch.randn(16)
    f = compiled(program)
    assert_close(torch.autograd.grad(f(x, weight).sum(), x), torch.autograd.grad(program(x, weight).sum(), x))
    assert calls(f, x, weight) == []


def test_gradients_with_a_formula(op: Any) -> None:
    op.register_autograd_from(plain)
    op.register_replacement(plain)
    x, weight = torch.randn(4, 16, requires_grad=True), torch.randn(16, requires_grad=True)
    f = compiled(program)
    assert_close(
        torch.autograd.grad(f(x, weight).sum(), (x, weight)),
        torch.autograd.grad(program(x, weight).sum(), (x, weight)),
    )
    assert calls(f, x, weight) == [1e-5]


def test_it_ends(registry: Registry, op: Any) -> None:
    x, weight = torch.randn(4, 16), torch.randn(16)
    with registry.scope():
        op.register_replacement(plain)
        assert calls(compiled(program), x, weight)
    assert not calls(compiled(program), x, weight)
    op.register_replacement(plain)
    assert calls(compiled(program), x, weight)
    op.unregister()
    assert not calls(compiled(program), x, weight)


def test_the_checker_compares_it(op: Any) -> None:
    args = next(samples())
    op.register_replacement(plain)
    customops.opcheck(op, args, test_utils="test_kernels")
    op.register_replacement(lambda x, weight, eps: plain(x, weight, eps) + 1e-3)
    with pytest.raises(OpCheckError, match="other results than"):
        customops.opcheck(op, args, test_utils="test_kernels")


@pytest.mark.parametrize("register", ["register_decomposition", "register_lowering"])
def test_the_checker_compares_what_inductor_takes(op: Any, register: str) -> None:
    args = next(samples())
    getattr(op, register)(lambda x, weight, eps: NotImplemented)
    getattr(op, register)(lambda x, weight, eps: plain(x, weight, eps).half().to(x.dtype))
    with pytest.raises(OpCheckError, match="other results than"):
        customops.opcheck(op, args, test_utils="test_kernels")
    getattr(op, register)(plain)
    customops.opcheck(op, args, test_utils="test_kernels")


def test_what_is_refused(registry: Registry, ns: str, op: Any) -> None:
    other = registry.custom_op(f"{ns}::f", lambda x, n: x, schema="(Tensor x, int n) -> Tensor")
    with pytest.raises(RegistrationError, match="samples"):
        other.register_replacement(lambda x, n: x)
    with pytest.raises(UnsupportedError, match="has none"):
        other.register_replacement(lambda x, n: x, samples=samples)
    writes = registry.custom_op(f"{ns}::add", lambda x: None, schema="(Tensor(a!) x) -> ()")
    with pytest.raises(UnsupportedError, match="write nothing"):
        writes.register_replacement(lambda x: None, samples=samples)
    with pytest.raises(CallbackError, match="pattern"):
        op.register_replacement(lambda x: x)


@pytest.mark.compile
@pytest.mark.parametrize(
    ("x", "y"),
    [
        (torch.randn(1, 4), torch.randn(3, 4)),
        (torch.randn(3, 4), torch.randn(1, 4)),
        (torch.randn(3, 4), torch.randn(3, 4).double()),
        (torch.randn(3, 4).double(), torch.randn(3, 4).double()),
        (torch.randn(3, 4), 2.0),
    ],
)
def test_code_of_other_tensors_is_not_replaced(registry: Registry, ns: str, x: torch.Tensor, y: Any) -> None:
    calls = []

    @registry.custom_op(f"{ns}::mul", schema="(Tensor x, Tensor y) -> Tensor")
    def mul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x.sin() * y

    mul.register_fake(lambda x, y: torch.empty_like(x))
    mul.register_replacement(lambda x, y: x.sin() * y, samples=lambda: [(torch.ones(3, 4), torch.ones(3, 4))])
    program = torch.compile(lambda x: x.sin() * y, fullgraph=True)
    torch.testing.assert_close(program(x), x.sin() * y)
    assert not calls


@pytest.mark.compile
def test_a_pattern_that_fails_is_left_out(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::sin", lambda x: x.sin(), schema="(Tensor x) -> Tensor")
    op.register_fake(torch.empty_like)
    op.register_replacement(lambda x: 1 / 0, samples=lambda: [(torch.ones(3),)])
    x = torch.ones(5)
    with pytest.warns(UserWarning, match="a pattern of register_replacement cannot be traced"):
        result = torch.compile(lambda x: x.cos() + 3, fullgraph=True)(x)
    torch.testing.assert_close(result, x.cos() + 3)


PROGRAM = """
    import sys, torch
    from torch import Tensor
    import customops

    calls = []

    @customops.custom_op("replacement_disk::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        calls.append(1)
        return x.sin() * 2

    twice.register_fake(torch.empty_like)
    if sys.argv[1] == "1":
        twice.register_replacement(lambda x: x.sin() * 2, samples=lambda: [(torch.ones(3),)])
    f = torch.compile(lambda x: (x + 1).sin() * 2, fullgraph=True)
    f(torch.ones(3))
    from torch._dynamo.utils import counters
    print(bool(calls), counters["aot_autograd"]["autograd_cache_hit"])
"""


@pytest.mark.process
def test_the_cache_on_disk(tmp_path: Path) -> None:
    """A process that has no such replacement does not find the code of one that has."""
    programs = [Program(PROGRAM, (value,)) for value in ("0", "1", "0", "1")]
    found = [output.strip() for output in outputs(programs, tmp_path)]
    assert found == ["False 0", "True 0", "False 1", "True 1"]


def test_the_description_says_where_a_replacement_was_registered(op: Any) -> None:
    op.register_replacement(plain)
    (rule,) = [rule for rule in op.describe().rules if rule.kind == "replacement"]
    assert Path(str(rule.registered).rpartition(":")[0]).name == Path(__file__).name
