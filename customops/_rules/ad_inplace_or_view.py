"""Version counters of what an op writes to, and true views for view ops (the ADInplaceOrView key)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.autograd.graph import increment_version

from customops import _compat
from customops._dispatch.operator import OperatorHandle
from customops._dispatch.results import tensors_in
from customops.errors import UnsupportedError

__tracebackhide__ = True  # pytest leaves the frames out


def bind(operator: OperatorHandle) -> None:
    """Nothing to register: the schema says which arguments are written and which returns are views."""
    schema = operator.schema
    if not operator.has_own_rules:
        return
    if schema.is_view and schema.mutated:
        operator.impl(_refusal(operator), "ADInplaceOrView")
    elif schema.is_view:
        operator.impl_view_fallback()
    elif schema.mutated:
        operator.impl(_trampoline(operator), "ADInplaceOrView", with_keyset=True)


def _refusal(operator: OperatorHandle) -> Callable[..., Any]:
    """Torch's view kernel takes no op that writes as well. In inference mode, where it has no part, such an op runs."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(
            "an op cannot both return a view and write to an argument",
            op=operator.qualname,
            got=str(operator.schema),
            fix="make it two ops, or call it under torch.inference_mode()",
        )

    return _compat.dynamo.outside_dynamo(refuse)


def _trampoline(operator: OperatorHandle) -> Callable[..., Any]:
    """Go on below this key, then count the write, as torch does: modes below look at the version from before."""
    overload, after = operator.overload, _compat.dispatch.after_adinplaceorview
    positions = [i for i, argument in enumerate(operator.schema.positional) if argument.is_mutated]
    names = [argument.name for argument in operator.schema.keyword_only if argument.is_mutated]
    if [argument.type for argument in operator.schema.mutated] == ["Tensor"] and positions:
        (only,) = positions

        def bump_one(keyset: Any, /, *args: Any, **kwargs: Any) -> Any:
            try:
                return overload.redispatch(keyset & after, *args, **kwargs)
            finally:
                if args[only] is not None:  # torch takes None for a Tensor; that is the kernel's business
                    increment_version(args[only])

        return _compat.dynamo.outside_dynamo(bump_one)

    def bump(keyset: Any, /, *args: Any, **kwargs: Any) -> Any:
        mutated = [args[i] for i in positions if i < len(args)]
        mutated += [kwargs[name] for name in names if name in kwargs]
        try:
            return overload.redispatch(keyset & after, *args, **kwargs)
        finally:
            increment_version(tensors_in(mutated))

    return _compat.dynamo.outside_dynamo(bump)
