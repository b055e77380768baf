"""C functions, of ctypes and cffi. They are compiled once, if there is a compiler."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import customops
from customops import errors
from customops.languages import DLTensor, from_c

COMPILER = shutil.which("cc") or shutil.which("gcc")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(COMPILER is None, reason="needs a C compiler"),
]

SOURCE = """
#include <stdint.h>
#include <stdbool.h>
void scale(float *out, const float *x, int64_t n, float by) { for (int64_t i = 0; i < n; i++) out[i] = by * x[i]; }
void fill(void *out, int64_t bytes) { for (int64_t i = 0; i < bytes; i++) ((char *)out)[i] = 0; }
int64_t total(const int64_t *x, const bool *mask, int64_t n) {
    int64_t sum = 0;
    for (int64_t i = 0; i < n; i++) if (mask[i]) sum += x[i];
    return sum;
}
int64_t same(int64_t x) { return x; }
"""
DLPACK = """
typedef struct { int32_t device_type; int32_t device_id; } DLDevice;
typedef struct { uint8_t code; uint8_t bits; uint16_t lanes; } DLDataType;
typedef struct { void *data; DLDevice device; int32_t ndim; DLDataType dtype; int64_t *shape; int64_t *strides;
                 uint64_t byte_offset; } DLTensor;
"""
DLPACK_SOURCE = """
int negate(DLTensor *t) {
    if (t->ndim != 2 || t->dtype.code != 2 || t->dtype.bits != 32) return -1;
    float *data = (float *)((char *)t->data + t->byte_offset);
    for (int64_t i = 0; i < t->shape[0]; i++)
        for (int64_t j = 0; j < t->shape[1]; j++) {
            float *at = data + i * t->strides[0] + j * t->strides[1];
            *at = -*at;
        }
    return 0;
}
"""
FUNCTIONS = """
void scale(float *out, const float *x, int64_t n, float by);
void fill(void *out, int64_t bytes);
int64_t total(const int64_t *x, const bool *mask, int64_t n);
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("c")
    (folder / "kernels.c").write_text(SOURCE + DLPACK + DLPACK_SOURCE)
    assert COMPILER is not None
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", folder / "kernels.so", folder / "kernels.c"], check=True)
    return folder / "kernels.so"


@pytest.fixture(params=["ctypes", "cffi"])
def library(request: pytest.FixtureRequest, path: Path) -> Iterator[Any]:
    if request.param == "cffi":
        cffi = pytest.importorskip("cffi")
        ffi = cffi.FFI()
        ffi.cdef(FUNCTIONS + DLPACK + "int negate(DLTensor *t);")
        yield ffi.dlopen(str(path))
        return
    floats, n = ctypes.POINTER(ctypes.c_float), ctypes.c_int64
    lib = ctypes.CDLL(str(path))
    lib.scale.argtypes, lib.scale.restype = [floats, floats, n, ctypes.c_float], None
    lib.fill.argtypes, lib.fill.restype = [ctypes.c_void_p, n], None
    lib.total.argtypes, lib.total.restype = [ctypes.POINTER(n), ctypes.POINTER(ctypes.c_bool), n], n
    lib.negate.argtypes = [ctypes.POINTER(DLTensor)]
    yield lib


@pytest.fixture
def double(library: Any, registry: customops.Registry, ns: str) -> Any:
    scale = from_c(library.scale)

    @registry.custom_op(f"{ns}::double", mutates_args=())
    def double(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        scale(out, x, x.numel(), 2.0)
        return out

    double.register_fake(torch.empty_like)
    double.register_autograd(lambda ctx, grad: double(grad.contiguous()))
    return double


def test_an_op(double: Any) -> None:
    x = torch.randn(3, 4, requires_grad=True)
    torch.testing.assert_close(double(x), 2 * x)
    double(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((3, 4), 2.0))
    torch.testing.assert_close(double(torch.empty(0)), torch.empty(0))


def test_integers_flags_and_bytes(library: Any) -> None:
    assert from_c(library.total)(torch.arange(5), torch.tensor([1, 0, 1, 1, 0]).bool(), 5) == 5
    x = torch.randn(4, dtype=torch.bfloat16)
    from_c(library.fill)(x, x.nbytes)
    assert not x.any()


def test_a_dltensor_has_strides(library: Any, registry: customops.Registry, ns: str) -> None:
    negate = from_c(library.negate)

    @registry.custom_op(f"{ns}::negate_", mutates_args=("x",))
    def negate_(x: Tensor) -> None:
        if negate(x):
            raise TypeError("negate_ takes matrices of float32")

    whole = torch.randn(6, 8)
    before, x = whole.clone(), whole[::2, 1::3].t()
    negate_(x)
    before[::2, 1::3] *= -1
    assert torch.equal(whole, before)
    customops.opcheck(negate_, (torch.randn(3, 4),))
    with pytest.raises(TypeError, match="matrices of float32"):
        negate_(torch.randn(3))


@pytest.mark.parametrize("is_called_before", [False, True])
def test_refused(double: Any, library: Any, is_called_before: bool) -> None:
    scale = from_c(library.scale)
    if is_called_before:
        double(torch.empty(3)), scale(torch.empty(3), torch.empty(3), 3, 2.0)
    with pytest.raises(errors.UnsupportedError, match=r"(?s)argument: argument 1\n.*float32\n.*float64.*x.to"):
        scale(torch.empty(3), torch.empty(3).double(), 3, 2.0)
    with pytest.raises(errors.UnsupportedError, match=r"(?s)not contiguous.*strides \(2,\).*x.contiguous.*DLTensor"):
        double(torch.empty(6)[::2])
    with pytest.raises(errors.UnsupportedError, match=r"(?s)no such device.*got: +meta"):
        scale(torch.empty(3, device="meta"), torch.empty(3), 3, 2.0)
    with pytest.raises(errors.UnsupportedError, match="resolve_neg"):
        scale(torch.empty(3), torch._neg_view(torch.empty(3)), 3, 2.0)
    with pytest.raises(errors.UnsupportedError, match="takes no tensor here"):
        scale(torch.empty(3), torch.empty(3), torch.tensor(3), 2.0)
    with pytest.raises(errors.ArgumentError, match="by position only"):
        scale(torch.empty(3), torch.empty(3), 3, by=2.0)


def test_integers_that_do_not_fit(library: Any) -> None:
    out, x = torch.zeros(2), torch.ones(2)
    for n in (2**70, 2**63, -(2**63) - 1):
        with pytest.raises((errors.ArgumentError, OverflowError)):
            from_c(library.scale)(out, x, n, 2.0)
    from_c(library.scale)(out, x, True, 2**70)  # a flag is an integer, and a float holds it
    assert out.tolist() == [2.0**70, 0]


@pytest.mark.parametrize(
    ("kind", "least", "most"),
    [
        (ctypes.c_int64, -(2**63), 2**63 - 1),
        (ctypes.c_size_t, 0, 2**64 - 1),
        (ctypes.c_int, -(2**31), 2**31 - 1),
        (ctypes.c_uint8, 0, 255),
        (ctypes.c_void_p, 0, 2**64 - 1),
    ],
)
def test_integers_of_ctypes(path: Path, kind: Any, least: int, most: int) -> None:
    fn = ctypes.CDLL(str(path)).same
    fn.argtypes, fn.restype = [kind], kind
    assert [from_c(fn)(least) or 0, from_c(fn)(most)] == [least, most]
    for value in (least - 1, most + 1, 2**70):
        with pytest.raises(errors.ArgumentError, match="does not fit the type of C") as caught:
            from_c(fn)(value)
        assert (caught.value.argument, caught.value.got) == ("argument 0", str(value))
    with pytest.raises(ctypes.ArgumentError):  # no integer: what ctypes says
        from_c(fn)(1.5)


def test_functions_that_do_not_say_what_they_take(path: Path) -> None:
    with pytest.raises(
        errors.ArgumentError, match=r"(?s)has no argtypes: ctypes would truncate pointers.*fn\.argtypes = "
    ):
        from_c(ctypes.CDLL(str(path)).scale)
    with pytest.raises(errors.ArgumentError, match="takes a C function"):
        from_c(lambda x: x)
    prototype: Callable[..., Any] = ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.py_object))
    opaque = from_c(prototype(lambda x: None))
    assert opaque(ctypes.pointer(ctypes.py_object(1))) is None
    with pytest.raises(errors.UnsupportedError, match="takes no tensor here"):
        opaque(torch.ones(1))


def test_others_may_set_the_types_of_what_python_exports(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ctypes.pythonapi` is one for the whole program."""
    monkeypatch.setattr(ctypes.pythonapi.PyCapsule_GetPointer, "restype", None)
    x = torch.ones(2, 3)
    from_c(library.negate)(x)
    assert x.sum() == -6


def test_structs_of_cffi_have_names_of_their_own() -> None:
    """`d` is a double in ctypes; in cffi a struct may be called so."""
    ffi = pytest.importorskip("cffi").FFI()
    ffi.cdef("typedef struct { float value; } d; size_t strlen(d *text);")
    strlen = from_c(ffi.dlopen(None).strlen)
    with pytest.raises(errors.CustomOpsError, match="takes no tensor here"):
        strlen(torch.zeros(1, dtype=torch.float64))
