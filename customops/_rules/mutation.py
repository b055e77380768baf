"""Version counters of what an op writes to, and true views for view ops (the ADInplaceOrView key)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.autograd.graph import increment_version

from customops import _compat
from customops._definition import Definition


def install(definition: Definition) -> None:
    """Nothing to register: the schema says which arguments are written and which returns are views."""
    schema = definition.schema
    below: Callable[..., Any] | None = None
    if schema.is_view:
        definition.impl_view_fallback()
        below = _compat.computed_kernel(str(definition.name), "ADInplaceOrView").call_boxed
    if schema.mutated:
        definition.impl(_trampoline(definition, below), "ADInplaceOrView", with_keyset=True)


def _trampoline(definition: Definition, below: Callable[..., Any] | None) -> Callable[..., Any]:
    """Bump the versions, then go on: to torch's view kernel where there is one, else below this key."""
    overload, after = definition.overload, _compat.after_adinplaceorview
    positions = [i for i, argument in enumerate(definition.schema.positional) if argument.is_written]
    names = [argument.name for argument in definition.schema.keyword_only if argument.is_written]

    def bump(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        written = [args[i] for i in positions if i < len(args)]
        written += [kwargs[name] for name in names if name in kwargs]
        increment_version(list(_tensors(written)))
        if below is not None:
            return below(keyset, *args, **kwargs)
        return overload.redispatch(keyset & after, *args, **kwargs)

    return _compat.outside_dynamo(bump)


def _tensors(values: list[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (item for item in value if isinstance(item, Tensor))
