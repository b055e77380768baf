"""Functions of TVM-FFI: in Python here, which get what compiled ones do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import customops
from customops import errors

tvm_ffi = pytest.importorskip("tvm_ffi")
np = pytest.importorskip("numpy")


def add_into(x: Any, y: Any, out: Any) -> None:
    np.from_dlpack(out)[...] = np.from_dlpack(x) + np.from_dlpack(y)


@pytest.fixture
def add(registry: customops.Registry, ns: str) -> Any:
    kernel = customops.languages.from_tvm_ffi(tvm_ffi.convert(add_into))

    @registry.custom_op(f"{ns}::add", mutates_args=())
    def add(x: Tensor, y: Tensor) -> Tensor:
        out = torch.empty_like(x)
        kernel(x, y, out)
        return out

    add.register_fake(lambda x, y: torch.empty_like(x))
    add.register_autograd(lambda ctx, grad: (grad, grad))
    return add


def test_an_op(add: Any) -> None:
    for x in (torch.randn(3, 4), torch.randn(4, 3).t(), torch.randn(6, 8)[::2, ::2], torch.randn(3, 4).double()):
        torch.testing.assert_close(add(x, x), x + x)
    x = torch.randn(3, 4, requires_grad=True)
    add(x, x).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((3, 4), 2.0))
    customops.opcheck(add, (x, torch.randn(3, 4)))


def test_as_a_kernel_for_a_device(add: Any) -> None:
    seen = []

    def subtract(x: Any, y: Any) -> Any:
        seen.append(x)
        return tvm_ffi.from_dlpack(np.from_dlpack(x) - np.from_dlpack(y))

    add.register_kernel("cpu", customops.languages.from_tvm_ffi(tvm_ffi.convert(subtract)))
    x, y = torch.randn(3), torch.randn(3)
    torch.testing.assert_close(add(x, y), x - y)
    assert isinstance(seen[0], tvm_ffi.Tensor)


def test_values_of_other_types() -> None:
    got: list[Any] = []
    kernel = customops.languages.from_tvm_ffi(tvm_ffi.convert(lambda *args: got.extend(args)))
    x = torch.randn(3)
    kernel([x, x], 3, 2.5, None, "a", [1, 2])
    assert [type(item) for item in got[0]] == [tvm_ffi.Tensor] * 2
    assert (*got[1:5], list(got[5])) == (3, 2.5, None, "a", [1, 2])
    both = customops.languages.from_tvm_ffi(tvm_ffi.convert(lambda x: [x, x]))(x)
    assert isinstance(both, tuple)
    assert all(isinstance(each, Tensor) and each.data_ptr() == x.data_ptr() for each in both)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64], ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    same = customops.languages.from_tvm_ffi(tvm_ffi.convert(lambda x: x))
    assert same(torch.zeros(2, dtype=dtype)).dtype == dtype


@pytest.mark.parametrize("is_called_before", [False, True])
def test_refused(is_called_before: bool) -> None:
    kernel = customops.languages.from_tvm_ffi(tvm_ffi.convert(lambda *args: None))
    if is_called_before:  # types that are known, and others
        kernel(torch.zeros(2)), kernel(torch.zeros(2), 1), kernel([torch.zeros(2)])
    with pytest.raises(errors.UnsupportedError, match=r"(?s)is not its values.*argument: argument 0.*resolve_neg"):
        kernel([torch._neg_view(torch.zeros(2))])
    with pytest.raises(errors.UnsupportedError, match=r"(?s)is not its values.*resolve_conj"):
        kernel(torch.randn(2, dtype=torch.complex64).conj())
    with pytest.raises(errors.UnsupportedError, match="to_dense"):
        kernel(torch.zeros(2, 2).to_sparse())
    with pytest.raises(errors.ArgumentError, match=r"(?s)by position only.*got: +y"):
        kernel(torch.zeros(2), y=1)
    with pytest.raises(errors.ArgumentError, match=r"(?s)expected: a tvm_ffi.Function.*fix: +tvm_ffi.load_module"):
        customops.languages.from_tvm_ffi(add_into)


def test_errors_of_the_function() -> None:
    def fails(x: Any, y: Any) -> None:
        raise ValueError("of the kernel")

    kernel = customops.languages.from_tvm_ffi(tvm_ffi.convert(fails))
    for _ in range(2):
        with pytest.raises(ValueError, match="of the kernel"):
            kernel(torch.zeros(2), torch.zeros(2))


def test_a_tensor_that_requires_a_gradient() -> None:
    same = customops.languages.from_tvm_ffi(tvm_ffi.convert(lambda x: x))
    x = torch.ones(2, requires_grad=True)
    for given in (x, x * 1):
        assert not same(given).requires_grad
        assert same(given).data_ptr() == given.data_ptr()
