"""``bypass=True``: a call of the op's object runs the kernel without the dispatcher, where that cannot be told apart.

The dispatcher's work is to find out that there is nothing to do but to call the kernel. For tensors that are plain, in
a thread where nothing is active, that can be found out at a fraction of the price. What is given up is the profiler's
entry for the op. Whatever is not certain goes to the dispatcher, and so do calls through ``torch.ops``.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from customops import _compat
from customops._codegen.function import Shape, Source, any_of, as_tuple, fill, variable_name
from customops._codegen.kernel import emit_kernel_call
from customops._dispatch.fill_defaults import is_altered
from customops._dispatch.results import CheckPolicy
from customops._schema.model import Argument, Schema
from customops._schema.types import ROWS, TypeRow
from customops.errors import UnsupportedError

CALL = """\
def __call__($self, /, *$args, **$kwargs):
    if $is_dynamo_compiling():
        return $self._opoverload(*$args, **$kwargs)
    $op = $self._definition
    if not $kwargs and $len($args) == {count}:
        {names} = $args
        if (
            {arrive_unchanged}
            and not $is_torch_function_mode_enabled()
            and not ({requires_grad} and $is_grad_enabled())
            and $forward_ad._current_level < 0
            {counts_versions}
        ):
            $keys = $keys_of({first})
            $where = $keys.raw_repr(), $included_keys().raw_repr()
            $current = $op.fast_path.of_tensors.get($where)
            if $current is not None{same_keys}:
                {kernel_call}
            if $current is None and $where not in $op.fast_path.of_tensors:
                $op.find_fast_path_of($keys, $included_keys())  # for the next call
    try:
        return $self._entry(*$args, **$kwargs)
    except $RuntimeError as $error:
        $op.explain($error)
        raise
"""

#: What the template refers to.
_OBJECTS: dict[str, Any] = {
    "counting": _compat.dispatch.DispatchKey.ADInplaceOrView,
    "forward_ad": _compat.autograd.forward_ad,
    "included_keys": _compat.dispatch.included_keys,
    "is_dynamo_compiling": is_dynamo_compiling,
    "is_excluded": _compat.dispatch.is_excluded,
    "is_grad_enabled": torch.is_grad_enabled,
    "is_torch_function_mode_enabled": _compat.dispatch.is_torch_function_mode_enabled,
    "keys_of": _compat.dispatch.keys_of,
}


def refuse(schema: Schema, op: str) -> None:
    """Raise for an op that cannot be called without the dispatcher."""
    problem = None
    if schema.is_view or any(ret.type != "Tensor" for ret in schema.returns):
        problem = "it returns something else than new tensors or what it writes to"
    if not any(argument.type == "Tensor" for argument in schema.positional):
        problem = "no argument is always a Tensor, to tell the device by"
    for argument in schema.arguments:
        if _row(argument) is None:
            problem = f"the argument {argument.name!r} is a {argument.type}, which the dispatcher converts"
        elif argument.kwarg_only and (argument.holds_tensors or not argument.has_default):
            problem = f"the argument {argument.name!r} is always passed by keyword"
    if problem is not None:
        raise UnsupportedError(
            f"the op cannot bypass the dispatcher: {problem}", op=op, got=str(schema), fix="leave bypass=True out"
        )


def call(schema: Schema, tags: tuple[torch.Tag, ...], op: str, when: CheckPolicy) -> Any:
    """The ``__call__`` of an op's object."""
    return _source(Shape.of(schema, tags, when)).build(op)


@functools.lru_cache(maxsize=512)
def _source(shape: Shape) -> Source:
    """The source of the ``__call__`` of an op's object.

    Conditions that rule most calls out come first; what a torch function mode would see comes after it was looked for.
    Dynamo is to see the first condition alone.
    """
    schema = shape.schema
    source = Source("__call__", schema, shape.tags, shape.when)
    source.objects |= _OBJECTS
    names = [variable_name(argument) for argument in schema.positional]
    tensors = sorted((a for a in schema.positional if a.holds_tensors), key=lambda argument: argument.type != "Tensor")
    first, *others = tensors  # the first one is there in each call
    source.template = fill(
        CALL,
        count=str(len(names)),
        names=as_tuple(names)[1:-1],
        arrive_unchanged="\nand ".join(_emit_arrives_unchanged(source, argument) for argument in schema.positional),
        requires_grad=any_of(map(_emit_requires_grad, tensors)),
        # Inside __torch_dispatch__ versions are not counted.
        counts_versions="and not $is_excluded($counting)" if schema.mutated else "",
        first=variable_name(first),
        same_keys="".join(f" and {_emit_same_keys(argument)}" for argument in others),
        kernel_call=_emit_kernel_call(source, names),
    )
    return source


def _emit_kernel_call(source: Source, names: list[str]) -> str:
    if source.schema.keyword_only:  # left out: the kernel's function knows the defaults
        return f"return $current.direct({', '.join(names)})\n"
    return emit_kernel_call(source, bump=bool(source.schema.mutated), direct=True)


def _row(argument: Argument) -> TypeRow | None:
    """The row of an argument of which some values reach a kernel as they are."""
    row = ROWS.get(argument.type.removesuffix("?"))
    return row if row is not None and row.unchanged else None


def _emit_arrives_unchanged(source: Source, argument: Argument) -> str:
    """The condition under which a value reaches a kernel as it is."""
    name, row = variable_name(argument), _row(argument)
    assert row is not None  # see `refuse`
    if len(row.unchanged) == 1:
        (type_,) = row.unchanged
        source.objects[type_.__name__] = type_
        test = f"$type({name}) is ${type_.__name__}"
    else:
        source.objects[f"{row.schema.lower()}s"] = frozenset(row.unchanged)
        test = f"$type({name}) in ${row.schema.lower()}s"
    if row.unchanged_if:
        test = f"{test} and {row.unchanged_if.format(*[name] * row.unchanged_if.count('{}'))}"
    if is_altered(argument) or (
        type(argument.default) is float and argument.default == 0
    ):  # the dispatcher would put the author's default in its place
        source.objects[f"default_{name}"] = None if argument.default_is_none_in_text else argument.default
        return f"{test} and {name} != $default_{name}"
    return f"({name} is None or {test})" if argument.type.endswith("?") else test


def _emit_requires_grad(argument: Argument) -> str:
    name = variable_name(argument)
    return f"({name} is not None and {name}.requires_grad)" if argument.type.endswith("?") else f"{name}.requires_grad"


def _emit_same_keys(argument: Argument) -> str:
    name = variable_name(argument)
    test = f"$keys_of({name}) == $keys"
    return f"({name} is None or {test})" if argument.type.endswith("?") else test
