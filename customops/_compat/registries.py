"""torch's own tables of custom ops, fakes and torch_dispatch rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch._library import custom_ops as _torch_custom_ops
from torch._library import simple_registry as _torch_registry
from torch.library import Library as Library

__tracebackhide__ = True  # pytest leaves the frames out


def torch_library_of(qualname: str) -> Library | None:
    """The Library through which `torch.library.custom_op` (or we) defined `qualname`, or None."""
    return _torch_custom_ops.OPDEF_TO_LIB.get(qualname)


class _TorchView(_torch_custom_ops.CustomOpDef):
    """What torch's tables hold for an op of ours: an object of torch's class, every attribute of which is ours.

    torch's functions ask ``isinstance`` before they call a method of what they find in the table.
    """

    def __init__(self, op: Any) -> None:
        object.__setattr__(self, "_customops_op", op)

    def __getattribute__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_customops_op"), name)


def torch_op_of(qualname: str) -> Any | None:
    """The object in torch's table of custom ops: one of ours, or one of `torch.library.custom_op`'s, or None."""
    found = _torch_custom_ops.OPDEFS.get(qualname)
    return object.__getattribute__(found, "_customops_op") if type(found) is _TorchView else found


class TorchOp(NamedTuple):
    """The functions of an op of `torch.library.custom_op`."""

    fn: Callable[..., Any]
    fake: Callable[..., Any] | None
    backward: Callable[..., Any] | None


def made_by_torch(qualname: str) -> TorchOp | None:
    """What `torch.library.custom_op` knows of an op that it made; None for all others, and for ours."""
    op = _torch_custom_ops.OPDEFS.get(qualname)
    if type(op) is not _torch_custom_ops.CustomOpDef:
        return None
    return TorchOp(op._init_fn, op._abstract_fn, op._backward_fn)


def claim(qualname: str, op: Any, library: Library) -> object:
    """Enter an op of ours in torch's tables of custom ops, for as long as the object returned is kept.

    Then torch's ``register_*`` functions call our methods when given the name, `has_fake_kernel` asks ``_abstract_fn``
    instead of taking the raising default fake for a real one, and a later `torch.library.custom_op` of the same name
    replaces ours instead of failing.
    """
    _torch_custom_ops.OPDEF_TO_LIB[qualname] = library
    return announce(qualname, op)


def announce(qualname: str, op: Any) -> object:
    """`claim` for an op that is not defined yet."""
    view = _torch_custom_ops.OPDEFS[qualname] = _TorchView(op)
    return view


def disclaim(qualname: str, library: Library) -> None:
    """Undo `claim`, unless another library has taken the name since."""
    if _torch_custom_ops.OPDEF_TO_LIB.get(qualname) is library:
        del _torch_custom_ops.OPDEF_TO_LIB[qualname]
        _torch_custom_ops.OPDEFS.pop(qualname, None)


def register_fake(library: Library, name: str, fn: Callable[..., Any], stacklevel: int) -> None:
    """Enter a fake in torch's registry, where FakeTensorMode and meta tensors look.

    `stacklevel` leads from the caller to the frame that torch is to take for the place of the registration.
    """
    library._register_fake(name, fn, _stacklevel=stacklevel + 1, allow_override=True)


def enter_fake(library: Library, qualname: str, fn: Callable[..., Any], source: str) -> None:
    """`register_fake` for an op that Python defined, by someone who knows the place: finding it is most of the cost."""
    holder = _torch_registry.singleton.find(qualname).fake_impl
    library._registration_handles.append(holder.register(fn, source, lib=library, allow_override=True))


register_torch_dispatch: Callable[..., None] = Library._register_torch_dispatch_rule

register_effect: Callable[..., None] = Library._register_effectful_op


def set_fake_source(qualname: str, source: str) -> None:
    """Tell torch's registry where the fake that a trampoline now calls was written."""
    record = fake_record(qualname)
    if record is not None:
        record.source = source


def forget_entry(qualname: str) -> None:
    """Drop what torch's registry keeps for a removed op, unless somebody has something registered there."""
    entry = _torch_registry.singleton._data.get(qualname)
    if entry is not None and not (entry.fake_impl.kernels or entry.torch_dispatch_rules._data):
        del _torch_registry.singleton._data[qualname]


def fake_record(qualname: str) -> Any | None:
    """torch's record of the newest fake of an op (fields ``func`` and ``source``), or None."""
    entry = _torch_registry.singleton._data.get(qualname)
    return entry.fake_impl.kernel if entry is not None else None
