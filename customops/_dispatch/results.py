"""Result checks of kernels and fakes: types and aliases, and the errors for results that do not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from customops import _torch
from customops._dispatch.callbacks import Fn
from customops._places import where
from customops._schema.model import Argument, Return, Schema
from customops._schema.types import ROWS, item_type
from customops._torch.schema import Tag
from customops.errors import AliasError, KernelError, describe

__tracebackhide__ = True  # pytest leaves the frames out

#: Calls that make a tensor of an array; a device adds its own.
WRAPS = ["torch.from_numpy(result)"]

_NUMBERS = ("int", "SymInt", "float", "bool", "Scalar")


#: Checks the result of a callback: ``(result, callback) -> result``.
ResultCheck = Callable[[Any, Fn], Any]


def structure_check(schema: Schema, op: str, role: str) -> ResultCheck:
    """Return a check that a result has the number and types of the schema. `role`: "kernel" or "fake impl"."""
    returns = schema.returns

    def structure(result: Any, fn: Fn) -> Any:
        if len(returns) > 1:
            if isinstance(result, (list, tuple)):
                result = tuple(result)  # also of a named one
            fits = isinstance(result, tuple) and len(result) == len(returns)
            fits = fits and all(fits_type(item, each.type) for item, each in zip(result, returns, strict=True))
        else:
            fits = fits_type(result, returns[0].type) if returns else result is None
        if not fits:
            raise misfit(op, role, fn, returns, result)
        return result

    return structure


def fits_type(value: Any, type_: str) -> bool:
    """Return whether a value can be returned as a schema type. For types without a row, torch checks."""
    row = ROWS.get(type_)
    if row is not None:
        return row.results is None or isinstance(value, row.results)
    if type_.endswith("?"):
        return value is None or fits_type(value, type_[:-1])
    item = item_type(type_)
    if item is not None:
        return isinstance(value, (list, tuple)) and all(fits_type(each, item) for each in value)
    if type_.startswith("("):
        items = type_[1:-1].split(", ")
        return isinstance(value, tuple) and len(value) == len(items) and all(map(fits_type, value, items))
    return True


def misfit(op: str, role: str, fn: Fn, returns: tuple[Return, ...], result: Any) -> KernelError:
    """Return the error for a result that does not have the schema's types."""
    expected = ", ".join(str(ret) for ret in returns).replace("SymInt", "int") or "None"
    fix = None
    if result is None:
        fix = "return the result; if the op only mutates its inputs, annotate it with -> None"
    elif type(result).__module__ == "numpy":
        fix = f"wrap the array: {', or '.join(WRAPS)}, with .copy() if it may be the memory of an argument"
    elif isinstance(result, tuple) and len(returns) == 1:
        fix = "return the value itself, or annotate the return as a tuple"
    elif isinstance(result, Tensor) and len(returns) == 1 and returns[0].type in _NUMBERS:
        fix = "annotate the function with -> Tensor, or return a number, as result.item() is"
    return KernelError(
        f"the {role} returned something that does not fit the schema",
        op=op,
        expected=expected if len(returns) < 2 else f"a tuple ({expected})",
        got=describe(result),
        where=where(fn),
        fix=fix,
    )


def mutated_results(schema: Schema, tags: tuple[torch.Tag, ...]) -> Fn | None:
    """Return ``f(args, kwargs)``, which returns the arguments that an in-place or out op writes and returns.

    Functionalization returns another tensor, and a compiler would not know that both have the same memory.
    """
    if Tag.inplace in tags:
        return lambda args, kwargs: args[0]
    if Tag.out not in tags:
        return None
    names = [argument.name for argument in schema.mutated]
    if len(names) == 1:
        return lambda args, kwargs: kwargs[names[0]]
    return lambda args, kwargs: tuple(kwargs[name] for name in names)


def result_error(schema: Schema, op: str, result: Any, fn: Fn, *, role: str = "kernel") -> KernelError:
    """Return the error for a kernel (or fake impl) that did not return the arguments that its op writes."""
    is_out = schema.mutated[0] in schema.keyword_only
    written = schema.mutated if is_out else schema.positional[:1]
    names = ", ".join(argument.name for argument in written)
    tag, wanted = ("out", "its mutable keyword-only arguments") if is_out else ("inplace", "its first argument")
    return KernelError(
        f"a {role} of an op with torch.Tag.{tag} must return {wanted}",
        op=op,
        argument=None if is_out else names,
        expected=names if is_out else f"{names} itself",
        got=describe(result),
        where=where(fn),
        fix=f"write into {names} and end with `return {names}`",
    )


def alias_error(
    schema: Schema, op: str, result: Any, fn: Fn, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> AliasError:
    """Return the error for a result that shares memory: which return, and with what."""
    inputs: list[tuple[str, Tensor]] = []
    for argument, value in given(schema, args, kwargs):
        inputs += _labelled(f"argument {argument.shown!r}", value)
    if not isinstance(result, tuple) or len(schema.returns) == 1:
        outputs = list(_labelled("the return", result))
    else:
        outputs = [named for i, value in enumerate(result) for named in _labelled(f"return {i}", value)]
    for i, (label, output) in enumerate(outputs):
        for name, tensor in [*inputs, *outputs[:i]]:
            if tensor is output or _torch.memory.outputs_share_memory((tensor,), (output,)):
                relation = "is" if tensor is output else "shares memory with"
                return AliasError(
                    f"{label} {relation} {name}; an output may not alias an input or another output",
                    op=op,
                    argument=name.removeprefix("argument ").replace("'", ""),
                    where=where(fn),
                    fix="return a copy (.clone()), or declare the alias: an in-place op (Tag.inplace), an out op "
                    "(Tag.out), or a view with schema=",
                )
    return AliasError("an output may not alias an input or another output", op=op, where=where(fn))


def given(schema: Schema, args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[Argument, Any]]:
    """Return the arguments of a call with their values."""
    values: list[tuple[Argument, Any]] = list(zip(schema.positional, args, strict=False))
    return values + [(argument, kwargs.get(argument.name)) for argument in schema.keyword_only]


def _labelled(label: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield label, value
    elif isinstance(value, (list, tuple)):
        yield from ((f"{label}[{i}]", item) for i, item in enumerate(value) if isinstance(item, Tensor))
