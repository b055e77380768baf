"""Kernels in other languages: wrap functions that take the arrays of another language, so that they take tensors.

Call a wrapped function in the function of an op, use the wrapper as a decorator, or register the wrapped function as a
kernel. Tensors are not copied: a kernel reads and writes their memory. A tensor raises if the language does not support
its dtype, strides or device. The package of a language is imported when its wrapper is called.
"""

from customops.languages._arrays import from_cupy, from_jax, from_numpy, from_tvm_ffi, from_warp
from customops.languages._c import DLTensor, from_c

__all__ = ["DLTensor", "from_c", "from_cupy", "from_jax", "from_numpy", "from_tvm_ffi", "from_warp"]
