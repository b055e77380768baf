"""C functions, loaded with ctypes or cffi: tensors as pointers to their data, or as DLPack's DLTensor."""

from __future__ import annotations

import ctypes
import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]

from customops._places import name_of
from customops.errors import ArgumentError, brief
from customops.languages._arguments import Arguments, Language


class DLTensor(ctypes.Structure):
    """DLPack's tensor struct, for ``argtypes``: ``POINTER(DLTensor)``. It holds shape, strides, dtype and device."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype_code", ctypes.c_uint8),
        ("dtype_bits", ctypes.c_uint8),
        ("dtype_lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


#: By letters of ctypes.
_LETTERS = {"f": torch.float32, "d": torch.float64, "?": torch.bool}
#: By names of cffi.
_FLOATS = {
    **{"float": torch.float32, "double": torch.float64, "_Bool": torch.bool},
    **{"float _Complex": torch.complex64, "double _Complex": torch.complex128},
}
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
#: The letters of ctypes for integers.
_INTEGERS = tuple("bhilqBHILQ")
#: What a pointer points to (a dtype, `DLTensor`, or None for void), and what makes one of an address.
Pointer = tuple[Any, Callable[[int], Any]]


def from_c(fn: Any, /) -> Callable[..., Any]:
    """Wrap a C function of ctypes or cffi so that it takes CPU tensors for pointers. Other arguments do not change.

    For a pointer to a number type, a tensor must be contiguous and have the corresponding dtype. For ``void *``, it
    must be contiguous. For a pointer to a `DLTensor`, it may have any strides and dtype, because the struct holds them.
    Nothing is copied, so the function can write to the tensors. For any other pointer, pass what ctypes or cffi takes.
    The result is that of the C function.

    Args:
        fn: a function of ``ctypes.CDLL`` with ``argtypes``, or of a cffi library.

    Raises:
        ArgumentError: the types of the parameters of `fn` are unknown; or in a call of a function of ctypes, an integer
            does not fit its type. (cffi raises an OverflowError.)
        UnsupportedError: in a call, a tensor has another device, dtype or layout.

    Example:
        >>> lib.scale.argtypes = [POINTER(c_float), POINTER(c_float), c_int64, c_float]
        >>> scale = from_c(lib.scale)
        >>> @custom_op("mylib::double", mutates_args=())
        ... def double(x: Tensor) -> Tensor:
        ...     out = torch.empty_like(x)
        ...     scale(out, x, x.numel(), 2.0)
        ...     return out
    """
    arguments = Arguments(fn, Language("C", devices=("cpu",)), names=())
    kinds: list[Any] = []  #: of ctypes
    if not isinstance(fn, ctypes._CFuncPtr):  # type: ignore[attr-defined]
        points_to = _pointers_of_cffi(fn)
    elif fn.argtypes is None:
        raise ArgumentError(
            "the ctypes function has no argtypes: ctypes would truncate pointers",
            op=name_of(fn),
            fix="fn.argtypes = [ctypes.POINTER(ctypes.c_float), ctypes.c_int64, ...]",
        )
    else:
        kinds, points_to = list(fn.argtypes), [_pointer_of_ctypes(kind) for kind in fn.argtypes]
    pointers = {f"argument {i}": pointer for i, pointer in enumerate(points_to)}
    letters = (*_INTEGERS, "P")  # an address is one
    integers = {f"argument {i}": kind for i, kind in enumerate(kinds) if getattr(kind, "_type_", None) in letters}

    def convert(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            if name in integers and hasattr(value, "__index__"):
                _check_integer(fn, name, integers[name], value)
            return value
        target, cast = pointers.get(name) or (None, None)
        if cast is None:
            raise arguments.refusal(name, "the C function takes no tensor here", got="a tensor")
        tensor = arguments.plain(name, value)
        if target is DLTensor:
            capsule = to_dlpack(tensor)
            pointer = cast(_capsule_pointer(capsule, b"dltensor"))
            weakref.finalize(pointer, id, capsule)  # which lives as long
            return pointer
        if target is not None and tensor.dtype is not target:
            raise arguments.wrong_dtype(name, tensor, f"x.to({target})", expected=str(target))
        if not tensor.is_contiguous():
            problem = "a pointer says nothing of strides, and the tensor is not contiguous"
            got = f"shape {tuple(tensor.shape)}, strides {tensor.stride()}"
            raise arguments.refusal(name, problem, got=got, fix="x.contiguous(); or let the C function take a DLTensor")
        return cast(tensor.data_ptr())

    return arguments.adapter(convert, lambda value, hint: value, with_others=True)


def _check_integer(fn: Any, name: str, kind: Any, value: Any) -> None:
    if (kind(value).value or 0) != value:  # ctypes would drop bits, and say nothing
        bits, is_signed = 8 * ctypes.sizeof(kind), kind._type_.islower()
        values = f"-2**{bits - 1} to 2**{bits - 1} - 1" if is_signed else f"0 to 2**{bits} - 1"
        problem, expected = "an integer does not fit the type of C", f"{kind.__name__}: {values}"
        raise ArgumentError(problem, op=name_of(fn), argument=name, expected=expected, got=brief(value))


def _pointer_of_ctypes(kind: Any) -> Pointer | None:
    """What a parameter of this type points to; None for what takes no tensor."""
    if kind is ctypes.c_void_p:
        return None, lambda address: address
    target = getattr(kind, "_type_", None)
    if not isinstance(target, type):  # no pointer
        return None
    cast = target.from_address  # type: ignore[attr-defined]  # ctypes passes its address
    if target.__name__ == DLTensor.__name__:
        return DLTensor, cast
    letter = getattr(target, "_type_", None)
    if letter in _INTEGERS:
        return (_SIGNED if letter.islower() else _UNSIGNED)[ctypes.sizeof(target)], cast
    return (_LETTERS[letter], cast) if isinstance(letter, str) and letter in _LETTERS else None


def _pointers_of_cffi(fn: Any) -> list[Pointer | None]:
    """The same for each parameter of a function of cffi."""
    try:
        ffi: Any = sys.modules["_cffi_backend"].FFI()
        kinds = ffi.typeof(fn).args
    except (KeyError, TypeError, AttributeError):
        problem = "from_c takes a C function"
        raise ArgumentError(problem, argument="fn", expected="one of ctypes or cffi", got=type(fn).__name__) from None
    return [_pointer_of_cffi(ffi, kind) for kind in kinds]


def _pointer_of_cffi(ffi: Any, kind: Any) -> Pointer | None:
    if kind.kind != "pointer":
        return None
    target, cast = kind.item, functools.partial(ffi.cast, kind)
    if target.kind == "void":
        return None, cast
    if target.kind == "struct" and target.cname.removeprefix("struct ") == DLTensor.__name__:
        return DLTensor, cast
    if target.kind != "primitive":  # of whatever name: a struct may be called d
        return None
    if target.cname in _FLOATS:
        return _FLOATS[target.cname], cast
    signed = target.cname == "char" or int(ffi.cast(target, -1)) < 0
    return (_SIGNED if signed else _UNSIGNED)[ffi.sizeof(target)], cast


_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_size_t, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)  # not its attribute, which is one for all: others set other types
)
