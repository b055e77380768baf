"""What the dispatcher has for an op, key by key, and the keys of a call: for who explains, not for who calls."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from customops._compat.dispatch import DispatchKey

_C: Any = torch._C


class Entry(NamedTuple):
    """What the dispatcher runs at a key."""

    place: str  #: ``file:line`` of the registration, as torch knows it
    falls_through: bool  #: it is left out of the keys of a call
    kind: str  #: "kernel", "autograd kernel", "default backend kernel", "math kernel", "backend fallback"


def registered_at(qualname: str) -> dict[str, list[str]]:
    """Dispatch key or alias -> where kernels of an op were registered, those that others override included."""
    found: dict[str, list[str]] = {}
    for line in _C._dispatch_dump(qualname).splitlines():
        key, is_kernel, rest = line.partition(": registered at ")
        if is_kernel and key != "debug":
            found.setdefault(key.partition("[")[0].partition(" ")[0], []).append(rest.partition(" :: ")[0])
    return found


def runs_at(qualname: str) -> dict[str, Entry]:
    """Dispatch key -> what runs there, aliases and fallbacks resolved."""
    found = {}
    for line in _C._dispatch_dump_table(qualname).splitlines():
        key, is_entry, rest = line.partition(": ")
        before, is_place, place = rest.partition("registered at ")
        if is_entry and is_place:
            place, _, kind = place.rpartition(" [")
            found[key] = Entry(place, before.startswith("fallthrough"), kind.rstrip("]"))
    return found


def keys_of_call(tensors: Iterable[torch.Tensor]) -> Any:
    """The key set of a call with these tensors in this thread, before keys that fall through are left out."""
    keys = _C._dispatch_tls_local_include_set()
    for tensor in tensors:
        keys = keys | _C._dispatch_keys(tensor)
    return keys - _C._dispatch_tls_local_exclude_set()


def in_order(keyset: Any) -> Iterator[str]:
    """The names of the keys, in the order of the dispatcher."""
    while (key := keyset.highestPriorityTypeId()) != DispatchKey.Undefined:
        yield key.name
        keyset = keyset.remove(key)


def innermost_mode() -> str | None:
    """The name of the innermost dispatch mode."""
    count = _C._len_torch_dispatch_stack()
    return type(_C._get_dispatch_stack_at(count - 1)).__name__ if count else None


def infra_mode() -> str | None:
    """The class of the mode of compilers that is active: fake, proxy or functional tensors."""
    for key in ("FUNCTIONAL", "PROXY", "FAKE"):
        mode = _C._get_dispatch_mode(getattr(_C._TorchDispatchModeKey, key))
        if mode is not None:
            return type(mode).__name__
    return None


def transform() -> str | None:
    """The innermost functorch transform: "Vmap", "Grad", "Jvp", "Functionalize"."""
    interpreter = _C._functorch.peek_interpreter_stack()
    return None if interpreter is None else str(interpreter.key()).rpartition(".")[2]


def sharding_of(overload: Any) -> Callable[..., Any] | None:
    """The rule of DTensor for an operator: the function given to `register_sharding`, or torch's own."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    if module is None:
        return None
    propagator = module.DTensor._op_dispatcher.sharding_propagator
    found: Callable[..., Any] | None = propagator.op_strategy_funcs.get(overload)
    return found.args[0] if isinstance(found, functools.partial) and found.args else found
