"""Kernels of NumPy and Numba."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import customops
from customops import errors
from customops.languages import from_numpy

np = pytest.importorskip("numpy")


@pytest.fixture
def sin(registry: customops.Registry, ns: str) -> Any:
    @registry.custom_op(f"{ns}::sin", mutates_args=())
    @from_numpy
    def sin(x: Tensor) -> Tensor:
        return np.sin(x)  # type: ignore[no-any-return]

    sin.register_fake(torch.empty_like)
    sin.register_autograd(
        lambda ctx, grad: grad * ctx.saved_tensors[0].cos(),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    return sin


LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t(),
    "sliced": lambda x: x[1:, ::2],
    "expanded": lambda x: x[:1].expand(5, 4),
    "empty": lambda x: x[:0],
    "scalar": lambda x: x[0, 0],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.complex64], ids=str)
def test_values(sin: Any, layout: str, dtype: torch.dtype) -> None:
    x = LAYOUTS[layout](torch.randn(3, 4, dtype=dtype))
    torch.testing.assert_close(sin(x), x.sin())
    assert sin(x).dtype == dtype


def test_memory_is_shared() -> None:
    seen = []
    kernel = from_numpy(lambda x: seen.append((x.__array_interface__["data"][0], x.strides)))
    x = torch.randn(3, 4).t()
    kernel(x)
    assert seen == [(x.data_ptr(), (4, 16))]


def test_gradients_and_conjugates(sin: Any) -> None:
    x = torch.randn(3, 4, requires_grad=True)
    sin(x).sum().backward()
    torch.testing.assert_close(x.grad, x.detach().cos())
    z = torch.randn(3, dtype=torch.complex64).conj()
    torch.testing.assert_close(sin(z), z.sin())  # the dispatcher resolves it first
    with pytest.raises(errors.UnsupportedError, match=r"(?s)is not its values.*resolve_conj"):
        from_numpy(np.sin)(z)


def test_opcheck(sin: Any) -> None:
    customops.opcheck(sin, (torch.randn(3, 4, requires_grad=True),))


@pytest.mark.compile
def test_compiled(sin: Any) -> None:
    x = torch.randn(3, 4)
    fn = torch.compile(lambda x: sin(x) * 2, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(fn(x), x.sin() * 2)


def test_a_dtype_that_numpy_has_not(sin: Any) -> None:
    sin(torch.zeros(2))
    with pytest.raises(
        errors.UnsupportedError, match=r"(?s)sin: NumPy does not take the tensor.*BFloat16.*argument: x.*x.float"
    ):
        sin(torch.zeros(2, dtype=torch.bfloat16))


def test_a_tensor_elsewhere() -> None:
    with FakeTensorMode(), pytest.raises(RuntimeError, match="is not supported for tensor subclasses"):
        from_numpy(lambda x: x)(torch.zeros(2))
    with pytest.raises(errors.UnsupportedError, match=r"(?s)argument: x.*expected: a tensor on cpu.*got: +meta"):
        from_numpy(lambda x: x)(torch.zeros(2, device="meta"))
    with pytest.raises(errors.UnsupportedError, match="to_dense"):
        from_numpy(lambda x: x)(torch.zeros(2, 2).to_sparse())


def test_a_write_that_was_not_declared(registry: customops.Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::bump", mutates_args=())
    @from_numpy
    def bump(x: Tensor) -> Tensor:
        x += 1
        return x

    x = torch.zeros(3)
    with pytest.raises(ValueError, match="read-only"):
        bump(x)
    assert not x.any()


def test_a_write_that_is_declared(registry: customops.Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::scale_", mutates_args=("x", "others"))
    @from_numpy(writable=("x", "others"))
    def scale_(x: Tensor, others: list[Tensor], by: float = 2.0) -> None:
        for array in (x, *others):
            array *= by

    x, others = torch.ones(2, 3).t(), [torch.ones(2), torch.ones(4)[::2]]
    version = x._version
    scale_(x, others)
    assert all(bool((tensor == 2).all()) for tensor in (x, *others))
    assert x._version > version
    customops.opcheck(scale_, (x, others, 3.0))
    with pytest.raises(errors.ArgumentError, match=r"(?s)writable names.*expected: some of x, others, by.*got: +y"):
        from_numpy(writable="y")(scale_.__wrapped__)


def test_results(registry: customops.Registry, ns: str) -> None:
    x = torch.arange(4.0)
    total, pair, number = from_numpy(lambda x: (x.sum(), (x + 1)[::2], x.sum().item()))(x)
    assert (total.dtype, total.shape, total.item()) == (torch.float32, (), 6)
    assert pair.tolist() == [1, 3]
    assert number == 6.0
    for result, problem in (
        (lambda x: x[::-1].copy()[::-1], "negative"),
        (lambda x: np.broadcast_to(x, (2, 4)), "read-only"),
        (lambda x: x.astype("longdouble"), "no tensor can be this array"),
        (lambda x: np.array(["a"]), "no tensor can be this array"),
        (lambda x: x.astype(">f4"), "no tensor can be this array"),
    ):
        with pytest.raises(errors.KernelError, match=rf"(?s){problem}.*got: +dtype.*fix: +return array.copy"):
            from_numpy(result)(x)


def test_numba_njit(registry: customops.Registry, ns: str) -> None:
    numba = pytest.importorskip("numba")

    @numba.njit
    def cumulate(x, out):  # type: ignore[no-untyped-def]
        total = 0.0
        for i in range(x.shape[0]):
            total += x[i]
            out[i] = total

    run = from_numpy(cumulate, writable="out")

    @registry.custom_op(f"{ns}::cumulate", mutates_args=())
    def op(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        run(x, out)
        return out

    op.register_fake(torch.empty_like)
    for x in (torch.randn(5), torch.randn(10)[::2], torch.randn(5).double()):
        torch.testing.assert_close(op(x), x.cumsum(0))
    customops.opcheck(op, (torch.randn(5),))
    typed = numba.njit("float32[:](float32[:])")(lambda x: x * 2)
    torch.testing.assert_close(from_numpy(typed, writable="x")(torch.ones(3)), torch.full((3,), 2.0))


def test_numba_vectorize() -> None:
    numba = pytest.importorskip("numba")
    mixed = from_numpy(numba.vectorize(lambda a, b: a + b))
    x, y = torch.randn(3, 4).t(), torch.randn(4, 1)
    torch.testing.assert_close(mixed(x, y), x + y)


def test_numbers(registry: customops.Registry, ns: str) -> None:
    """A scalar of NumPy is a tensor or a number, as the hint says."""

    @registry.custom_op(f"{ns}::sums", mutates_args=())
    @from_numpy
    def sums(x: Tensor) -> tuple[Tensor, float, int]:
        return x.sum(), x.sum(), (x > 0).sum()  # type: ignore[return-value]

    total, number, count = sums(torch.tensor([1.5, -2.0, 3.0]))
    assert isinstance(total, Tensor)
    assert (total.item(), number, count) == (2.5, 2.5, 2)
    assert (type(number), type(count)) == (float, int)

    @registry.custom_op(f"{ns}::largest", mutates_args=())
    @from_numpy
    def largest(x: Tensor) -> float:
        return x.max()  # type: ignore[return-value]

    assert largest(torch.tensor([1.5, -2.0, 3.0])) == 3.0
