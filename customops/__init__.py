"""Custom operators for PyTorch: define one, attach what it needs, and know that it is right."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from customops import errors as errors
from customops import schema as schema
from customops._compat.tags import Tag
from customops._op import CustomOpDef
from customops._registry import Registry
from customops._registry import default as default_registry
from customops._samples import Sample
from customops._schema.annotations import Keys, Mut, Mutates, SameAs
from customops._schema.infer import infer_schema
from customops._triton import triton_op, wrap_triton
from customops.errors import CustomOpsError, OpCheckError
from customops.library import (
    Library,
    adopt,
    custom_op,
    define,
    fallthrough_kernel,
    get_ctx,
    get_kernel,
    impl,
    register_autocast,
    register_autograd,
    register_autograd_from,
    register_effect,
    register_fake,
    register_jvp,
    register_kernel,
    register_out,
    register_torch_dispatch,
    register_vmap,
)

if TYPE_CHECKING:
    from customops.checking import check
    from customops.checks import opcheck
    from customops.languages import from_tvm_ffi


__version__ = "0.1.0"

__all__ = [
    "CustomOpDef",
    "CustomOpsError",
    "Keys",
    "Library",
    "Mut",
    "Mutates",
    "OpCheckError",
    "Registry",
    "SameAs",
    "Sample",
    "Tag",
    "adopt",
    "check",
    "custom_op",
    "default_registry",
    "define",
    "errors",
    "fallthrough_kernel",
    "from_tvm_ffi",
    "get_ctx",
    "get_kernel",
    "impl",
    "infer_schema",
    "opcheck",
    "register_autocast",
    "register_autograd",
    "register_autograd_from",
    "register_effect",
    "register_fake",
    "register_jvp",
    "register_kernel",
    "register_out",
    "register_torch_dispatch",
    "register_vmap",
    "schema",
    "triton_op",
    "wrap_triton",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    # Loaded on first use: the checks, which an op's users need only in tests, and what needs another package.
    if name == "check":
        from customops.checking import check

        return check
    if name == "opcheck":
        from customops.checks import opcheck

        return opcheck
    if name == "from_tvm_ffi":
        from customops.languages import from_tvm_ffi

        return from_tvm_ffi
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
