"""Kernels in other languages: wrap functions that take the arrays of another language, so that they take tensors.

Call a wrapped function in the function of an op, use the wrapper as a decorator, or register the wrapped function as a
kernel. Tensors are not copied: a kernel reads and writes their memory. A tensor raises if the language does not support
its dtype, strides or device.

`_arguments` is what the modules share. Each other module is for one language, and imports its package. Names are
therefore imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from customops.languages._c import DLTensor, from_c
    from customops.languages._cupy import from_cupy
    from customops.languages._jax import from_jax
    from customops.languages._numpy import from_numpy
    from customops.languages._tvm_ffi import from_tvm_ffi
    from customops.languages._warp import from_warp

__all__ = ["DLTensor", "from_c", "from_cupy", "from_jax", "from_numpy", "from_tvm_ffi", "from_warp"]

#: name -> the module it is in, and what to install for it
_MODULES = {
    "DLTensor": ("_c", "cffi"),
    "from_c": ("_c", "cffi"),
    "from_cupy": ("_cupy", "cupy"),
    "from_jax": ("_jax", "jax"),
    "from_numpy": ("_numpy", "numpy"),
    "from_tvm_ffi": ("_tvm_ffi", "apache-tvm-ffi"),
    "from_warp": ("_warp", "warp-lang"),
}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, package = _MODULES[name]
    try:
        return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    except ModuleNotFoundError as error:
        raise ImportError(f"customops.languages.{name} needs a package: pip install {package} ({error})") from error
