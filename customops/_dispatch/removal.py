"""Removing an op: what it has in the dispatcher and in torch's tables goes, and handles to it raise."""

from __future__ import annotations

from customops import _compat
from customops._dispatch.fast_path import FastPath
from customops._dispatch.operator import OperatorHandle


def remove(operator: OperatorHandle, error: Exception) -> None:
    """Remove an op of ours, or from an adopted one what was registered; handles to a removed op raise `error`."""
    operator.removed = error
    operator.recompile()
    if operator.mutation_only is not None:
        remove(operator.mutation_only, error)
    while operator.on_removal:
        operator.on_removal.pop()()
    for library in operator._added:
        _compat.libraries.destroy_library(library)
    operator._added.clear()
    if operator.library is not None:
        # also where it was destroyed outside customops: see there
        _compat.libraries.destroy_operator(operator.library, operator.name.packet)
        _compat.libraries.forget_signature(operator.name.packet, operator.name.overload)
        _compat.registries.forget_entry(operator.qualname)
        _compat.libraries.retire_overload(operator.overload, error)
    for key, kernels in operator._kernels.items():
        for kernel in list(kernels):
            operator.forget(key, kernel)
    operator._forget_dispatch()
    operator.fast_path = FastPath()  # the other one is of the name, which may soon be another op's
    if operator.library is not None:
        _compat.libraries.remember_kernel(operator.name.namespace, operator.name.local, "Meta", None)
