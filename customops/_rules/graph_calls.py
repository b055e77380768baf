"""Direct calls: in a graph of inductor, a call of an op of ours runs its kernel without the dispatcher.

Inductor writes ``torch.ops.ns.f.default(...)`` for such a call. When the graph runs, there is mostly nothing left for
the dispatcher to do, and it costs more than many kernels. So the code calls a function that is generated for the op
(`_codegen.bypass`), which looks for what the dispatcher would have to do, and leaves it to the dispatcher.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from customops import _torch
from customops._codegen.bypass import graph_call
from customops._dispatch.names import Name
from customops._dispatch.operator import OperatorHandle
from customops._schema.model import Argument
from customops._schema.types import ROWS, item_type

#: What may be called directly: name -> the handle, that of the op also under the name of its mutation-only variant.
_operators: weakref.WeakValueDictionary[str, OperatorHandle] = weakref.WeakValueDictionary()


def bind(operator: OperatorHandle) -> None:
    """Nothing to register: the code of a graph asks for the function by the name of the op."""
    names = [operator.qualname] + ([operator.mutation_only.qualname] if operator.mutation_only is not None else [])
    for name in names:
        if operator.has_own_rules and operator.options.direct_in_graphs:
            _operators[name] = operator
        else:
            _operators.pop(name, None)


def may_be_direct(qualname: str, device: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """May a graph call the op without the dispatcher, with these arguments?"""
    operator = _operators.get(qualname)
    if operator is None or operator.removed is not None or operator.find_fast_path_in_graphs(device) is None:
        return False
    schema = operator.schema
    if len(args) > len(schema.positional) or any(ret.type not in ("Tensor", "Tensor[]") for ret in schema.returns):
        return False
    by_name = {argument.name: argument for argument in schema.arguments}
    given = [*zip(schema.positional, args, strict=False), *((by_name[name], value) for name, value in kwargs.items())]
    return all(_arrives_unchanged(argument, argument.type, value) for argument, value in given)


def _arrives_unchanged(argument: Argument, type_: str, value: Any) -> bool:
    """Would the dispatcher hand on what a graph has for an argument, or for an item of it, as it is?"""
    if value is None:
        return type_.endswith("?") or (type_ == "Tensor" and argument.type == "Tensor")
    type_ = type_.removesuffix("?")
    item = item_type(type_)
    if item is not None:
        return isinstance(value, list) and all(_arrives_unchanged(argument, item, each) for each in value)
    if value is _torch.inductor.TENSOR:
        return type_ == "Tensor"
    if isinstance(value, torch.SymInt):
        return type_ in ("SymInt", "int")
    row = ROWS.get(type_)
    if row is None or type(value) not in row.unchanged or type_ == "Tensor":
        return False
    return type(value) is not int or -(2**63) <= value < 2**63


def direct_call(qualname: str, device: str) -> Callable[..., Any]:
    """The function that graphs call for an op, on tensors of a device that is given by its dispatch key."""
    operator, name = _operators.get(qualname), Name.parse(qualname)

    def dispatched(*args: Any, **kwargs: Any) -> Any:
        """Call the op that has the name now, as ``torch.ops`` in the code of a graph would."""
        return _torch.library.overload_of(name.packet, name.overload)(*args, **kwargs)

    return dispatched if operator is None else graph_call(operator, device, dispatched)
