"""torch.ops: what is done before an op is found there, and before a namespace is first used."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._library import custom_ops as _torch_custom_ops
from torch._ops import _OpNamespace

__tracebackhide__ = True  # pytest leaves the frames out

#: Namespaces of torch's own operators.
TORCHS = frozenset(
    """aten prim prims c10d _c10d_functional _c10d_functional_autograd c10d_functional _dtensor _native _quantized _test
    debug_mode_ops debugprims export fsdp higher_order inductor inductor_prims mkl mkldnn mkldnn_prepacked onednn onnx
    prepacked profiler quantization quantized quantized_decomposed rngprims sparse static_runtime streams symm_mem
    xnnpack""".split()
)

_ops: Any = torch.ops
_Ops: Any = type(_ops)

#: Code that defines ops: where it looks a namespace up, that is no use of it.
_DEFINES = (
    os.path.dirname(os.path.dirname(__file__)) + os.sep,
    torch.library.__file__,
    os.path.dirname(_torch_custom_ops.__file__) + os.sep,
)

#: Namespaces that are not in `torch.ops` yet, because something comes before their first use.
_held: dict[str, _OpNamespace] = {}


class _Watched(_OpNamespace):
    """A namespace that asks before it looks for an op. What was found once is an attribute, and found without it."""

    __module__ = _OpNamespace.__module__  # programs that are saved hold it, in the names of ops

    def __getattr__(self, op_name: str) -> Any:
        if not op_name.startswith("__"):
            _looks_up(f"{self.name}::{op_name}", _is_use(sys._getframe().f_back))
            if op_name in vars(self):
                return vars(self)[op_name]
        return super().__getattr__(op_name)


def _is_use(caller: types.FrameType | None) -> bool:  # C++ may have no frame
    return caller is None or not caller.f_code.co_filename.startswith(_DEFINES)


def namespace(name: str) -> Any:
    """``torch.ops.<name>``, without that being a use of it."""
    return vars(_ops).get(name) or getattr(_ops, name)


def packet(qualname: str) -> Any:
    """``torch.ops.ns.name`` for an op that is defined, without that being a use of it."""
    found = namespace(qualname.partition("::")[0])
    name = qualname.partition("::")[2]
    return vars(found).get(name) or _OpNamespace.__getattr__(found, name)


def exists(name: str) -> bool:  # torch makes ``torch.ops.<name>`` on first look
    return name in vars(_ops) or name in _held


def forget(name: str) -> None:
    """Undo that look."""
    if vars(_ops).pop(name, None) is not None and name in _ops._dir:
        _ops._dir.remove(name)


def hold(name: str) -> None:
    """Take a namespace out of `torch.ops` until `release`: `before_use` hears of its first use."""
    _held[name] = vars(_ops).get(name) or _OpNamespace(name)
    forget(name)


def release(name: str) -> None:
    found = _held.pop(name, None)
    if found is not None:
        setattr(_ops, name, found)
        _ops._dir.append(name)


def watch(name: str) -> None:
    """Let `looks_up` hear of ops that are looked for in a namespace."""
    found = namespace(name)
    if type(found) is _OpNamespace:
        found.__class__ = _Watched


_make_namespace = _Ops.__getattr__
_before_use: Callable[[str, bool], object]
_looks_up: Callable[[str, bool], object]


def _namespace(ops: Any, name: str) -> Any:
    if not name.startswith("__"):
        _before_use(name, _is_use(sys._getframe().f_back))
    return _held.get(name) or vars(ops).get(name) or _make_namespace(ops, name)


def follow(before_use: Callable[[str, bool], object], looks_up: Callable[[str, bool], object]) -> None:
    """Set who is asked: ``before_use(namespace, is_use)`` before a namespace is made or while it is held,
    ``looks_up("ns::op", is_use)`` before an op that is not found yet in a namespace that is watched.

    torch looks in ``torch.ops.ns`` for what is no attribute yet; that is when, and the only time, this costs anything.
    """
    global _before_use, _looks_up
    _before_use, _looks_up = before_use, looks_up
    _Ops.__getattr__ = _namespace


def watch_definitions(begins: Callable[[str], object], ends: Callable[[str], object]) -> None:
    """Call ``begins(qualname)`` and ``ends(qualname)`` around a definition by torch.library.custom_op."""
    cls: Any = _torch_custom_ops.CustomOpDef
    define = cls.__init__

    def __init__(self: Any, namespace: str, name: str, *args: Any, **kwargs: Any) -> None:
        begins(f"{namespace}::{name}")
        try:
            define(self, namespace, name, *args, **kwargs)
        finally:
            ends(f"{namespace}::{name}")

    cls.__init__ = __init__


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """What is imported or defined in the middle of a program sees none of the modes that are active there."""
    disable = importlib.import_module("torch.utils._python_dispatch")._disable_current_modes
    with disable(), torch.inference_mode(False), torch.enable_grad():
        yield
