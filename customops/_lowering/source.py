"""The generated functions: rich arguments to lowered ones and back, and the same for results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.compiler import is_dynamo_compiling

from customops._codegen.function import as_tuple, fill
from customops._dispatch.callbacks import Fn
from customops._lowering.values import bad_argument, misfit
from customops._lowering.writer import Writer
from customops._schema.model import Schema
from customops._schema.nodes import Signature
from customops.errors import CustomOpsError, cut

#: A call of the op's object.
CALL = """\
def {name}({parameters}):
    {lower}
    {call}
    return {result}
"""

#: As `CustomOpDef.__call__`.
DISPATCH = """\
if $is_dynamo_compiling():
    $result = $self._opoverload({arguments})
else:
    {named}
    try:
        $result = $self._entry({passed})
    except $RuntimeError as $error:
        try:
            $self._definition.explain($error)
            raise
        except $CustomOpsError as $said:
            $cut($said)
            raise
"""

#: Passing a keyword costs more than finding that it is at its default.
NAMED = """\
if {value} is not {default}:
    $named[{name!r}] = {lowered}
"""

BYPASS = """\
$result = $bypass($self, {arguments})
"""

#: The arguments of such a call, for ``torch.ops``.
LOWER = """\
def lower({parameters}):
    {lower}
    return {positional}, {keyword_only}
"""

#: What the dispatcher calls, around a kernel or a fake impl.
CALLBACK = """\
def callback({parameters}):
    $result = $fn({arguments})
    {lower}
    return {result}
"""

#: The lowered arguments as the signature has them.
RESTORE = """\
def restore({parameters}):
    return {positional}, {keyword_only}
"""

RESTORE_RESULT = """\
def restore_result($result):
    return {result}
"""

LOWER_RESULT = """\
def lower_result($result):
    {lower}
    return {result}
"""


def _as_dict(values: Mapping[str, str]) -> str:
    return f"{{{', '.join(f'{name!r}: {code}' for name, code in values.items())}}}"


def _by_name(positional: list[str], named: Mapping[str, str]) -> list[str]:
    return [*positional, *(f"{name}={code}" for name, code in named.items())]


def call(signature: Signature, schema: Schema, op: str, bypass: Any = None) -> Fn:
    """The ``__call__`` of an op's object. `bypass` is what it calls in the place of the dispatcher.

    It has the name of the op, which Python's errors for arguments that are missing or too many show.
    """
    name = op.partition("::")[2].partition(".")[0]
    writer = Writer(name, signature, schema, op, bad_argument(op))
    parameters = writer.rich_parameters()
    lines, values = writer.lower_parameters()
    own = ["$self"] if "/" in parameters else ["$self", "/"]
    text = fill(
        CALL,
        name=name,
        parameters=[*own, *parameters],
        lower=lines,
        call=_emit_dispatch(writer, values) if bypass is None else _emit_bypass(writer, values),
        result=writer.restore_result(),
    )
    return writer.build(
        text, bypass=bypass, is_dynamo_compiling=is_dynamo_compiling, CustomOpsError=CustomOpsError, cut=cut
    )


def _emit_bypass(writer: Writer, values: dict[str, str]) -> str:
    return fill(BYPASS, arguments=_by_name(*writer.flat_arguments(values)))


def _emit_dispatch(writer: Writer, values: dict[str, str]) -> str:
    positional, named = writer.flat_arguments(values)
    lines: list[str] = []
    passed = dict(named)
    for name, (value, default) in writer.defaults_of_fields().items():
        refs = {"value": value, "default": writer.ref("Default", default), "name": name, "lowered": passed.pop(name)}
        lines += NAMED.format(**refs).splitlines()
    if lines:
        lines.insert(0, "$named = {}")
    return fill(
        DISPATCH,
        arguments=_by_name(positional, named),
        named=lines,
        passed=[*_by_name(positional, passed), *(["**$named"] if lines else [])],
    )


def lower(signature: Signature, schema: Schema, op: str) -> Fn:
    """``lower(*args, **kwargs) -> (args, kwargs)``"""
    writer = Writer("lower", signature, schema, op, bad_argument(op))
    parameters = writer.rich_parameters()
    lines, values = writer.lower_parameters()
    positional, named = writer.flat_arguments(values)
    text = fill(
        LOWER, parameters=parameters, lower=lines, positional=as_tuple(positional), keyword_only=_as_dict(named)
    )
    return writer.build(text)


def callback(signature: Signature, schema: Schema, op: str, fn: Any, role: str) -> Fn:
    """A kernel or fake impl for the lowered arguments and returns, around one for those of the signature."""
    writer = Writer("callback", signature, schema, op, misfit(op, role, fn))
    lines, result = writer.lower_result()
    text = fill(
        CALLBACK,
        parameters=writer.flat_parameters(),
        arguments=writer.callback_arguments(),
        lower=lines,
        result=result,
    )
    return writer.build(text, fn=fn)


def restore(signature: Signature, schema: Schema, op: str) -> Fn:
    """``restore(*args, **kwargs) -> (args, kwargs)``, of lowered arguments those of the signature."""
    writer = Writer("restore", signature, schema, op)
    restored = writer.restored()
    named = {each.name: restored.pop(each.name) for each in signature.parameters if each.by_keyword}
    text = fill(
        RESTORE,
        parameters=writer.flat_parameters(),
        positional=as_tuple(restored.values()),
        keyword_only=_as_dict(named),
    )
    return writer.build(text)


def restore_result(signature: Signature, schema: Schema, op: str) -> Fn:
    """``restore_result(result) -> result``, of what the dispatcher returns what the signature says."""
    writer = Writer("restore_result", signature, schema, op)
    return writer.build(fill(RESTORE_RESULT, result=writer.restore_result()))


def lower_result(signature: Signature, schema: Schema, op: str, fn: Any, role: str) -> Fn:
    """``lower_result(result) -> result``, of what a callback returned what the dispatcher is to get."""
    writer = Writer("lower_result", signature, schema, op, misfit(op, role, fn))
    lines, result = writer.lower_result()
    return writer.build(fill(LOWER_RESULT, lower=lines, result=result))
