"""The errors for calls that the dispatcher refuses: wrong arguments, and devices without a kernel."""

from __future__ import annotations

import re
from typing import Any

from customops import _torch
from customops._dispatch.names import Name
from customops._schema.advice import may_be_none, part_with, type_of
from customops._schema.model import Schema
from customops._schema.parse import signature_of
from customops._schema.structure import Signature
from customops.errors import ArgumentError, UnsupportedError, brief, did_you_mean

__tracebackhide__ = True  # pytest leaves the frames out

#: The message of the dispatcher for an argument of another type.
_WRONG_VALUE = re.compile(
    r".*Expected a value of type '(.+)' for argument '(\w+)' but instead found type '(.+)'\.\n.*\nValue: (.*)"
)

#: A part of the message of DTensor for an op without a rule.
_NO_SHARDING = "does not have a sharding strategy"


def explain(
    error: RuntimeError,
    name: Name,
    schema: Schema,
    signature: Signature | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Raise a clearer error for an error of the dispatcher in a call of an op."""
    text = str(error)
    if text.startswith(f"Could not run '{name.qualname}' with arguments from the "):
        raise no_kernel(name.qualname, text.split("'")[3]) from None
    if isinstance(error, NotImplementedError) and _NO_SHARDING in text and f"{name.namespace}.{name.name}." in text:
        raise no_sharding(name.qualname, schema) from None
    if not text.startswith((f"{name.qualname}() ", "Unknown keyword argument ")):
        return
    wrong = _WRONG_VALUE.match(text)
    if wrong is None:
        _raise_if_misfit(name, schema, args, kwargs)
        return
    wanted, path, found, value = wrong.groups()
    expected = wanted
    problem = f"Expected a value of type {wanted!r} for argument {path!r} but instead found type {found!r}"
    # That is torch's text. For an op with a signature of its own, the message uses the terms of the signature.
    parts = (part_with(each.node, path) for each in signature.parameters) if signature is not None else ()
    part = next((each for each in parts if each is not None), None)
    if part is not None:
        problem, path = "an argument has a value that the signature does not allow", part.path
        expected = type_of(part) + " | None" * may_be_none(part)
    raise ArgumentError(
        problem,
        op=name.qualname,
        argument=path,
        expected=expected,
        got=value if len(value) <= 80 else f"{value[:77]}...",
        fix=_conversion(wanted, path, found),
    ) from None


def _raise_if_misfit(op: Name, schema: Schema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise ArgumentError for unknown and for missing arguments."""
    signature, positional = signature_of(schema), len(schema.positional)
    try:
        signature.bind(*args, **kwargs)
        return
    except TypeError as error:
        problem = str(error)
    names = [argument.name for argument in schema.arguments]
    given = [*(brief(each, 30) for each in args), *(f"{name}={brief(each, 30)}" for name, each in kwargs.items())]
    argument = next((name for name in kwargs if name not in names), None)
    if argument is not None:
        problem, fix = f"there is no argument {argument!r}", did_you_mean(argument, names)
        left = [name for name in names[len(args) :] if name not in kwargs]
        fix = fix or (f"did you mean {left[0]}?" if len(left) == 1 else f"leave {argument} out")
    elif len(args) > positional:
        problem = f"it takes {positional} by position, and {len(args)} were given"
        argument = next((each.name for each in schema.keyword_only if each.name not in kwargs), None)
        fix = (
            f"{argument}={given[positional]}, by name"
            if argument
            else f"leave out {', '.join(given[positional : len(args)])}"
        )
    else:
        argument = problem.rpartition("argument")[2].strip(": '")
        fix = f"give {argument} once" if argument in kwargs else f"pass {argument}"
    raise ArgumentError(
        f"the arguments do not fit: {problem}",
        op=op.qualname,
        argument=argument,
        expected=f"{op.name}{signature.replace(return_annotation=signature.empty)}".replace("'", ""),
        got=f"{op.name}({', '.join(given)})",
        fix=fix,
    )


def no_kernel(op: str, backend: str) -> UnsupportedError:
    """Return the error for tensors of a backend without a kernel. It begins as torch's, which has 47 lines."""
    devices = map(_torch.dispatcher.device_of_key, _torch.dispatcher.registered_at(op))
    present = [each for each in devices if each is not None]
    device = _torch.dispatcher.device_of_key(backend)
    register = f'customops.impl("{op}", "{backend}", fn)'
    if device is not None:
        register = f'op.register_kernel("{device}", fn)'
    return UnsupportedError(
        f"Could not run '{op}' with arguments from the '{backend}' backend: it has no kernel there",
        op=op,
        expected=f"tensors on {' or '.join(present)}" if present else "some kernel",
        fix=register + (f', or move the tensors to "{present[0]}"' if present else ""),
    )


def no_sharding(op: str, schema: Schema) -> UnsupportedError:
    """Return the error for DTensors. It shows the rule of an elementwise op."""
    names = ", ".join(argument.name for argument in schema.arguments)
    first = next(argument.name for argument in schema.arguments if argument.holds_tensors)
    results, tensors = (", ".join(["Shard(i)"] * len(of)) for of in (schema.returns, schema.tensors))
    rule = f"lambda {names}: [([{results}], [{tensors}]) for i in range({first}.ndim)]"
    return UnsupportedError(
        "a call with a DTensor: the op has no sharding rule",
        op=op,
        expected="a rule that lists which placements of the results belong to which placements of the arguments",
        fix=f"op.register_sharding(rule); for an elementwise op: op.register_sharding({rule})",
    )


#: Types of the dispatcher that are the names of Python functions which make such values.
_MAKERS = ("int", "float", "bool", "str")


def _conversion(wanted: str, name: str, found: str) -> str:
    """Return an expression that converts an argument, of the type `found`, to the type `wanted`."""
    wanted = wanted.removeprefix("Optional[").removesuffix("]" * wanted.startswith("Optional["))
    is_list, item = wanted.startswith("List["), wanted.removeprefix("List[").removesuffix("]")
    if item == "Tensor":
        make = "torch.as_tensor({})" if found not in ("str", "dict") else "a tensor"
    elif item in _MAKERS:
        is_number = found in (*_MAKERS, "Tensor", "list", "tuple") or "numpy" in found
        make = ("{}.item()" if found == "Tensor" and not is_list else f"{item}({{}})") if is_number else f"a {item}"
    else:
        make = f"a value of type {item}"
    if make.startswith("a "):
        return f"pass {make}" if not is_list else f"pass a list, each item {make}"
    if not is_list:
        return make.format(name)
    fits = found in (item, "int" if item == "float" else item)
    return f"[{name}]" if fits else f"[{make.format('x')} for x in {name}]"
