"""Custom operators for PyTorch: define ops, register their rules, and check that they are correct.

(For pytest, whose plugin comes along: PYTEST_DONT_REWRITE.)
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

import torch as torch  # before all others: it may load a device that is made with parts of this package

from customops import _versions as _versions  # first: it refuses a torch that is too old
from customops import errors as errors
from customops import schema as schema
from customops._dispatch import current_kernel as _current_kernel
from customops._dispatch import fingerprint as _fingerprint
from customops._dispatch import names as _names
from customops._dispatch import operator as _operator
from customops._dispatch.preference import prefer
from customops._dispatch.scopes import Sample
from customops._dispatch.tuning import tuned
from customops._op.autotune import check_tuned
from customops._op.kernel_ops import kernel_functions as _kernel_functions
from customops._op.op import CustomOpDef, Undefined
from customops._op.registry import Registry
from customops._op.registry import default as default_registry
from customops._op.triton import triton_op, wrap_triton
from customops._rules import compilers as _compilers
from customops._rules import sharding as _sharding
from customops._rules.cost import Cost
from customops._schema.annotations import Keys, Mut, Mutates, SameAs
from customops._schema.infer import infer_schema
from customops._schema.named import Named
from customops._torch.patches import install as _install
from customops._torch.schema import Tag
from customops.errors import CustomOpsError, OpCheckError, did_you_mean, helper
from customops.library import (
    Library,
    adopt,
    custom_op,
    define,
    fallthrough_kernel,
    get_ctx,
    get_kernel,
    impl,
    like,
    register_autocast,
    register_autograd,
    register_autograd_from,
    register_effect,
    register_fake,
    register_flops,
    register_jvp,
    register_kernel,
    register_out,
    register_reference,
    register_shapes,
    register_sharding,
    register_torch_dispatch,
    register_vmap,
    when_defined,
)

if TYPE_CHECKING:
    from customops import logging as logging
    from customops._describe.description import Description
    from customops._describe.explanation import Explanation
    from customops.checking import check
    from customops.checks import opcheck
    from customops.languages import from_tvm_ffi


__version__ = "0.1.0"

__all__ = [
    "Cost",
    "CustomOpDef",
    "CustomOpsError",
    "Description",
    "Explanation",
    "Keys",
    "Library",
    "Mut",
    "Mutates",
    "Named",
    "OpCheckError",
    "Registry",
    "SameAs",
    "Sample",
    "Tag",
    "Undefined",
    "adopt",
    "check",
    "check_tuned",
    "custom_op",
    "default_registry",
    "define",
    "errors",
    "fallthrough_kernel",
    "from_tvm_ffi",
    "get_ctx",
    "get_kernel",
    "helper",
    "impl",
    "infer_schema",
    "like",
    "opcheck",
    "prefer",
    "register_autocast",
    "register_autograd",
    "register_autograd_from",
    "register_effect",
    "register_fake",
    "register_flops",
    "register_jvp",
    "register_kernel",
    "register_out",
    "register_reference",
    "register_shapes",
    "register_sharding",
    "register_torch_dispatch",
    "register_vmap",
    "schema",
    "triton_op",
    "tuned",
    "when_defined",
    "wrap_triton",
]


def __dir__() -> list[str]:
    return __all__


#: What is loaded on first use: the checks, which an op's users need only in tests, and what needs another package.
_LATE = {
    "check": "customops.checking",
    "opcheck": "customops.checks",
    "Description": "customops._describe.description",
    "Explanation": "customops._describe.explanation",
    "from_tvm_ffi": "customops.languages",
}


def __getattr__(name: str) -> Any:
    if name in _LATE:
        return getattr(importlib.import_module(_LATE[name]), name)
    if name in ("backend", "languages", "logging", "testing"):  # not in `__all__`: `logging` would replace Python's
        return importlib.import_module(f"customops.{name}")
    near = did_you_mean(name, __all__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}" + (f": {near}" if near else ""))


_install(
    before_use=_names.use,
    looks_up=_names.look_up,
    definition_begins=_names.being_defined.add,
    definition_ends=_names.torch_defined,
    kernel_registered=_operator.forget_fast_paths,
    library_loaded=_operator.library_loaded,
    profiling_changed=_current_kernel.profiling_changed,
    fingerprint=_fingerprint.fingerprint,
    may_be_direct=_compilers.may_be_direct,
    direct_call=_compilers.direct_call,
    kernel_for=_compilers.kernel_for,
    kernel_functions=_kernel_functions,
    explain_sharding=_sharding.missing,
)

if os.environ.get("CUSTOMOPS_LOG"):
    importlib.import_module("customops.logging._calls").log_as_environment_says()
