"""Functions of JAX."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import customops
from customops import errors
from customops.languages import _arrays, from_jax

jax = pytest.importorskip("jax")
pytestmark = pytest.mark.slow


@pytest.fixture
def tanh(registry: customops.Registry, ns: str) -> Any:
    @registry.custom_op(f"{ns}::tanh", mutates_args=())
    @from_jax
    @jax.jit
    def tanh(x: Tensor) -> Tensor:
        return jax.numpy.tanh(x)  # type: ignore[no-any-return]

    tanh.register_fake(torch.empty_like)
    tanh.register_autograd(
        lambda ctx, grad: grad * (1 - ctx.saved_tensors[0] ** 2),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
    )
    return tanh


def test_an_op(tanh: Any) -> None:
    for x in (torch.randn(3, 4), torch.randn(4, 3).t(), torch.randn(0, 3), torch.tensor(1.0)):
        torch.testing.assert_close(tanh(x), x.tanh())
    x = torch.randn(3, dtype=torch.bfloat16)
    torch.testing.assert_close(tanh(x), x.tanh())
    x = torch.randn(3, 4, requires_grad=True)
    tanh(x).sum().backward()
    torch.testing.assert_close(x.grad, 1 - x.detach().tanh() ** 2)
    fn = torch.compile(lambda x: tanh(x) * 2, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(fn(x.detach()), x.detach().tanh() * 2)


def test_memory_is_shared() -> None:
    seen = []
    x = torch.randn(3, 4)
    if _arrays._strides_are_read(jax):  # JAX 0.6 does not read them, and copies
        x = x.t()
    from_jax(lambda x: seen.append(x.unsafe_buffer_pointer()))(x)
    assert seen == [x.data_ptr()]


def test_several_results_and_lists() -> None:
    xs = [torch.randn(3), torch.randn(4)]
    sums, number = from_jax(lambda xs: (jax.numpy.concatenate(xs), 3))(xs)
    torch.testing.assert_close(sums, torch.cat(xs))
    assert number == 3


def test_an_argument_that_is_returned(registry: customops.Registry, ns: str) -> None:
    same = registry.custom_op(f"{ns}::same", from_jax(lambda x: x), mutates_args=(), schema="(Tensor x) -> Tensor")
    with pytest.raises(errors.AliasError):
        same(torch.randn(3))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64], ids=str)
def test_a_dtype_that_would_be_narrowed(tanh: Any, dtype: torch.dtype) -> None:
    with pytest.raises(errors.UnsupportedError, match=rf"(?s)argument: x.*it would make.*{dtype}.*jax_enable_x64"):
        tanh(torch.zeros(3, dtype=dtype))


def test_strides() -> None:
    kernel = lambda x: x + 1  # noqa: E731
    for x in (torch.randn(6)[::2], torch.randn(3, 1).expand(3, 4)):
        with pytest.raises(errors.UnsupportedError, match=r"(?s)argument: x.*strides.*x.contiguous.*copy=True"):
            from_jax(kernel)(x)
        torch.testing.assert_close(from_jax(copy=True)(kernel)(x), x + 1)
    x = torch.randn(2, 1, 3).permute(2, 0, 1)
    torch.testing.assert_close(from_jax(kernel)(x), x + 1)


def test_a_jax_that_does_not_read_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_arrays, "_strides_are_read", lambda jax: False)
    taken = []
    monkeypatch.setattr(jax.dlpack, "from_dlpack", lambda x, take=jax.dlpack.from_dlpack: taken.append(x) or take(x))
    for x in (torch.randn(3, 4).t(), torch.randn(2, 3, 4).permute(2, 0, 1), torch.randn(5)):
        torch.testing.assert_close(from_jax(lambda x: x + 1)(x), x + 1)
    assert all(x.is_contiguous() for x in taken)
