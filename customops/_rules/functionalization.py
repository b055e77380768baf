"""In-place and out ops under functionalization (AOTAutograd, torch.compile, export): as ops that only write.

Such an op returns what it was given to write to. Functionalized, its result becomes a tensor of its own, and nothing
says that it is the memory of the argument: a compiler hands that memory out again while the result is still in use,
and what is written through one does not reach the other. So an op that does the same and returns nothing takes its
place there, and the result is the argument.
"""

from __future__ import annotations

from typing import Any

import torch

from customops import _compat
from customops._call import written_results
from customops._definition import Definition
from customops._schema import Schema


def install(definition: Definition) -> None:
    written = written_results(definition.schema, definition.tags)
    if written is None or definition.library is None:
        return
    name = definition.name._replace(name=f"{definition.name.name}__writes")
    tags = tuple(tag for tag in definition.tags if tag not in (torch.Tag.inplace, torch.Tag.out))
    twin = Definition.define(name, Schema(definition.schema.arguments, ()), tags)
    definition.twin = twin
    overload = definition.overload

    def write(*args: Any, **kwargs: Any) -> None:
        overload(*args, **kwargs)

    def rule(mode: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with mode:
            twin.overload(*args, **kwargs)
        return written(args, kwargs)

    twin.impl(_compat.outside_dynamo(write), "CompositeExplicitAutograd")
    twin.impl_fake(write, __file__)  # the fake of the op has its say
    definition.impl_torch_dispatch(_compat.FunctionalTensorMode, rule)
