"""The name of the device and the methods called after it: torch's functions, with all that can fail found before.

torch takes nearly any string for a name, for good, and finds out later that no device can be called so, or that
``Tensor`` has a method of that name. Here a call either does everything or raises and changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch

from customops.backend import _compat
from customops.backend.errors import BackendError, BackendNameError

#: What PrivateUse1 is called until somebody renames it.
UNNAMED = "privateuseone"

#: Device types that torch has code for. ("maia", "fpga" and the like are only reserved, and can be had.)
TAKEN = frozenset("cpu cuda hip xpu mps mtia hpu xla ipu meta lazy vulkan mkldnn ideep opengl opencl".split())

METHODS = ("tensor", "module", "packed_sequence", "storage")


def rename_privateuse1_backend(backend_name: str) -> None:
    """Set the name of PrivateUse1, once per process. Setting the same name again does nothing.

    Raises:
        BackendNameError: torch cannot parse the name as a device, or the name would hide an attribute of torch.
        BackendError: it has another name already.
    """
    check_name(backend_name)
    _compat.rename(backend_name)


def check_name(name: object) -> None:
    """Raise what `rename_privateuse1_backend` raises, and change nothing."""
    name = check_spelling(name)
    current = _compat.backend_name()
    if current == name:
        return
    if current != UNNAMED:
        raise BackendError(
            f"the name of the device has already been set to {current!r}, once for this process",
            got=repr(name),
            fix="use one name in a process; run_isolated of customops.testing starts another one",
        )
    taken = [f"torch.{name}"] if hasattr(torch, name) else []
    taken += [f"{cls.__name__}.{name}" for cls in _all_classes() if hasattr(cls, name)]
    if taken:
        raise BackendNameError("the name is taken", expected="a name that torch does not use", got=", ".join(taken))


def check_spelling(name: object) -> str:
    """Raise for a name that no device of one's own could ever have."""
    if not isinstance(name, str) or not re.fullmatch("[a-z][a-z_]*", name):
        raise BackendNameError(
            "torch cannot read this as a device", expected="a string of a-z and _ (no digits)", got=repr(name)
        )
    if name in TAKEN or name == UNNAMED:
        raise BackendNameError("this device type is torch's own", got=repr(name), fix="choose another name")
    return name


def _all_classes() -> list[type]:
    return [cls for classes in _compat.classes_with_methods().values() for cls in classes]


def generate_methods_for_privateuse1_backend(
    for_tensor: bool = True,
    for_module: bool = True,
    for_packed_sequence: bool = True,
    for_storage: bool = False,
    unsupported_dtype: Iterable[torch.dtype] | None = None,
) -> None:
    """Add ``.<name>()`` and ``.is_<name>`` to tensors, modules, packed sequences and storages.

    Args:
        unsupported_dtype: dtypes whose typed storages cannot be moved to the device; trying to raises.

    Raises:
        BackendError: the device has no name yet, or one of the methods exists.
    """
    flags = dict(zip(METHODS, (for_tensor, for_module, for_packed_sequence, for_storage), strict=True))
    check_methods([method for method, wanted in flags.items() if wanted], unsupported_dtype)
    _compat.generate_methods(
        for_tensor=for_tensor,
        for_module=for_module,
        for_packed_sequence=for_packed_sequence,
        for_storage=for_storage,
        unsupported_dtype=list(unsupported_dtype) if unsupported_dtype is not None else None,
    )


def check_methods(
    methods: Iterable[str], unsupported_dtype: Iterable[torch.dtype] | None, *, name: str | None = None
) -> None:
    """Raise what `generate_methods_for_privateuse1_backend` raises, and change nothing."""
    name = name or _compat.backend_name()
    if name == UNNAMED:
        raise BackendError("the device has no name yet", fix='rename_privateuse1_backend("...") comes first')
    wrong = [dtype for dtype in unsupported_dtype or () if not isinstance(dtype, torch.dtype)]
    if wrong:
        raise BackendNameError("unsupported_dtype takes torch dtypes only", expected="torch dtypes", got=repr(wrong[0]))
    methods = list(methods)
    if "tensor" not in methods and not hasattr(torch.Tensor, name):
        needy = [method for method in methods if method != "storage"]
        if needy:
            raise BackendError(
                f"the methods of {needy[0]} call Tensor.{name}(), which is not there", fix="for_tensor=True"
            )
    for method in methods:
        for cls in _compat.classes_with_methods()[method]:
            attributes = [name] if method == "module" else [name, f"is_{name}"]
            there = [attribute for attribute in attributes if hasattr(cls, attribute)]
            if there:
                raise BackendError(
                    f"The custom device module of {cls} has already been registered with {there[0]}",
                    fix="call it once, or leave this class out",
                )


def get_custom_mod_func(func_name: str) -> Callable[..., Any]:
    """The function of this name in the device module, ``torch.<name>``.

    Raises:
        BackendError: there is no device module, or it has no such function.
    """
    if not isinstance(func_name, str):
        raise BackendNameError("the name of a function is a string", got=repr(func_name))
    name = _compat.backend_name()
    function = getattr(getattr(torch, name, None), func_name, None)
    if function is None:
        raise BackendError(
            f"Try to call torch.{name}.{func_name}: there is none",
            fix=f"register_backend makes torch.{name}; or define {func_name} in the module given to torch",
        )
    return _compat.custom_mod_func(func_name)  # type: ignore[no-any-return]
