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
from customops._dispatch.preference import prefer
from customops._op.op import CustomOpDef
from customops._op.registry import Registry
from customops._op.registry import default as default_registry
from customops._op.samples import Sample
from customops._op.triton import triton_op, wrap_triton
from customops._places import helper
from customops._schema.annotations import Keys, Mut, SameAs
from customops._schema.infer import infer_schema
from customops._schema.named import Named
from customops._torch.schema import Tag
from customops.errors import CustomOpsError, did_you_mean
from customops.library import (
    Library,
    adopt,
    custom_op,
    define,
    get_ctx,
    impl,
    register_autocast,
    register_autograd,
    register_effect,
    register_fake,
    register_flops,
    register_jvp,
    register_kernel,
    register_out,
    register_reference,
    register_sharding,
    register_torch_dispatch,
    register_vmap,
)

if TYPE_CHECKING:
    from customops import recording as recording
    from customops.checking import check
    from customops.checks import opcheck


__version__ = "0.1.0"

__all__ = [
    "CustomOpDef",
    "CustomOpsError",
    "Keys",
    "Library",
    "Mut",
    "Named",
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
    "get_ctx",
    "helper",
    "impl",
    "infer_schema",
    "opcheck",
    "prefer",
    "register_autocast",
    "register_autograd",
    "register_effect",
    "register_fake",
    "register_flops",
    "register_jvp",
    "register_kernel",
    "register_out",
    "register_reference",
    "register_sharding",
    "register_torch_dispatch",
    "register_vmap",
    "triton_op",
    "wrap_triton",
]


def __dir__() -> list[str]:
    return __all__


#: What is loaded on first use: the checks, which an op's users need only in tests, and what needs another package.
_LATE = {
    "check": "customops.checking",
    "opcheck": "customops.checks",
}


def __getattr__(name: str) -> Any:
    if name in _LATE:
        return getattr(importlib.import_module(_LATE[name]), name)
    if name in ("backend", "languages", "recording", "testing", "tuning"):
        return importlib.import_module(f"customops.{name}")
    near = did_you_mean(name, __all__)
    if not name.startswith("_") and hasattr(torch.library, name):
        near = f"torch.library.{name} works on ops of customops"
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}" + (f": {near}" if near else ""))


if os.environ.get("CUSTOMOPS_TUNED_FILE"):
    importlib.import_module("customops.tuning")
if os.environ.get("CUSTOMOPS_LOG"):
    importlib.import_module("customops.recording._calls").log_as_environment_says()
