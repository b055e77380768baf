"""Version counters of what an op writes to, and true views for view ops (the ADInplaceOrView key)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.autograd.graph import increment_version

from customops import _compat
from customops._dispatch.operator import Definition
from customops._dispatch.results import tensors_in
from customops.errors import UnsupportedError

__tracebackhide__ = True  # pytest leaves the frames out


def install(definition: Definition) -> None:
    """Nothing to register: the schema says which arguments are written and which returns are views."""
    schema = definition.schema
    if schema.is_view and schema.mutated:
        definition.impl(_refusal(definition), "ADInplaceOrView")
    elif schema.is_view:
        definition.impl_view_fallback()
    elif schema.mutated:
        definition.impl(_trampoline(definition), "ADInplaceOrView", with_keyset=True)


def _refusal(definition: Definition) -> Callable[..., Any]:
    """Torch's view kernel takes no op that writes as well. In inference mode, where it has no part, such an op runs."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(
            "an op cannot both return a view and write to an argument",
            op=str(definition.name),
            got=str(definition.schema),
            fix="make it two ops, or call it under torch.inference_mode()",
        )

    return _compat.dynamo.outside_dynamo(refuse)


def _trampoline(definition: Definition) -> Callable[..., Any]:
    """Go on below this key, then count the write, as torch does: modes below look at the version from before."""
    overload, after = definition.overload, _compat.dispatch.after_adinplaceorview
    positions = [i for i, argument in enumerate(definition.schema.positional) if argument.is_mutated]
    names = [argument.name for argument in definition.schema.keyword_only if argument.is_mutated]
    if [argument.type for argument in definition.schema.mutated] == ["Tensor"] and positions:
        (only,) = positions

        def bump_one(keyset: Any, /, *args: Any, **kwargs: Any) -> Any:
            try:
                return overload.redispatch(keyset & after, *args, **kwargs)
            finally:
                if args[only] is not None:  # torch takes None for a Tensor; that is the kernel's business
                    increment_version(args[only])

        return _compat.dynamo.outside_dynamo(bump_one)

    def bump(keyset: Any, /, *args: Any, **kwargs: Any) -> Any:
        written = [args[i] for i in positions if i < len(args)]
        written += [kwargs[name] for name in names if name in kwargs]
        try:
            return overload.redispatch(keyset & after, *args, **kwargs)
        finally:
            increment_version(tensors_in(written))

    return _compat.dynamo.outside_dynamo(bump)
