"""Version counters of what an op writes to, and true views for view ops (the ADInplaceOrView key)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.autograd.graph import increment_version

from customops import _compat
from customops._codegen.ad_inplace_or_view import ad_inplace_or_view as generate
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
            fix="split it into two ops, or call it under torch.inference_mode()",
        )

    return _compat.dynamo.outside_dynamo(refuse)


def _trampoline(operator: OperatorHandle) -> Callable[..., Any]:
    """Count the write, and call the kernel of the device where it is what comes next, as at Autograd."""
    return generate(
        operator.schema,
        operator.tags,
        operator.qualname,
        operator.when,
        operator.fast_path.by_keyset,
        _general(operator),
    )


def _general(operator: OperatorHandle) -> Callable[..., Any]:
    """Go on below this key, then count the write, as torch does: modes below look at the version from before."""
    overload, after = operator.overload, _compat.dispatch.after_adinplaceorview
    known = operator.fast_path.by_keyset
    positions = [i for i, argument in enumerate(operator.schema.positional) if argument.is_mutated]
    names = [argument.name for argument in operator.schema.keyword_only if argument.is_mutated]

    def general(keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if keyset.raw_repr() not in known:
            operator.find_fast_path(keyset)  # for the next call
        mutated = [args[i] for i in positions if i < len(args)]
        mutated += [kwargs[name] for name in names if name in kwargs]
        try:
            return overload.redispatch(keyset & after, *args, **kwargs)
        finally:
            increment_version(tensors_in(mutated))

    return _compat.dynamo.outside_dynamo(general)
