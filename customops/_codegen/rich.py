"""The generated functions: rich arguments to lowered ones and back, and the same for results."""

from __future__ import annotations

import builtins
import functools
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from customops import _torch
from customops._codegen.function import Source, as_tuple, fill
from customops._dispatch.callbacks import Fn
from customops._dispatch.results import describe
from customops._schema.annotations import code
from customops._schema.model import REQUIRED, Argument, Schema
from customops._schema.structure import DataclassForm, Either, Group, Leaf, Nested, Node, Signature, split
from customops._schema.types import hint_of
from customops.errors import ArgumentError, CustomOpsError, KernelError, brief, cut, where

# What generated functions call: tensors or numbers, and the errors for values that do not fit -------------------------

__tracebackhide__ = True  # pytest leaves the frames out


def tensor_of(value: Any) -> Any:
    """A tensor, or None for a number."""
    return value if isinstance(value, Tensor) else None


def number_of(value: Any) -> Any:
    """A number, or None for a tensor."""
    return None if isinstance(value, Tensor) else value


def bad_argument(op: str) -> Callable[[Any, str, str], ArgumentError]:
    """What makes the error for an argument with a value that its type does not allow."""
    return functools.partial(_bad_argument, op)


def _bad_argument(op: str, value: Any, path: str, expected: str) -> ArgumentError:
    if is_dynamo_compiling():  # which cannot trace the making of the error
        problem = "an argument has a value that the signature does not allow"
        _torch.dynamo.stop_tracing(problem, op, f"pass {expected}", path, expected)
    return ArgumentError(
        "an argument has a value that the signature does not allow",
        op=op,
        argument=path,
        expected=expected,
        got=brief(value),
        fix=_fix(type(value), expected),
    )


def _fix(cls: type, expected: str) -> str:
    """What to do about a value, which may be of a class that has the name of the one that is expected."""
    if cls.__module__ == "builtins" or not re.match(rf"(one of )?{re.escape(cls.__name__)}\b", expected):
        return f"pass {expected}"
    return f"define the op again: {cls.__module__}.{cls.__qualname__} was defined again after it"


def absent(op: str) -> Callable[[str, str], Any]:
    """What raises the error for None in the place of a value, in the lowered form."""
    return functools.partial(_absent, op)


def _absent(op: str, path: str, expected: str) -> Any:
    raise _bad_argument(op, None, path, expected)


@dataclass(frozen=True)
class Lists:
    """Makes a list of lists. The dispatcher does not look at their lengths."""

    path: str
    op: str

    def __call__(self, items: list[Any], lengths: list[int] | None) -> list[list[Any]]:
        if lengths is None or any(length < 0 for length in lengths) or sum(lengths) != len(items):
            raise ArgumentError(
                "the lengths of the lists do not add up to the number of items",
                op=self.op,
                argument=self.path,
                expected=f"lengths that add up to {len(items)}",
                got=brief(lengths),
            )
        return list(split(items, lengths))


def misfit(op: str, role: str, fn: Callable[..., Any]) -> Callable[[Any, str, str], KernelError]:
    """What makes the error for a result, or part of one, that is not what the signature says."""
    return functools.partial(_misfit, op, role, fn)


def _misfit(op: str, role: str, fn: Callable[..., Any], value: Any, path: str, expected: str) -> KernelError:
    return KernelError(
        f"the {role} returned something that does not fit the signature",
        op=op,
        argument=f"return{path}" if path else None,
        expected=expected,
        got=describe(value),
        where=where(fn),
    )


# `Writer`: the lines and expressions of which generated functions are made --------------------------------------------

CHECK = """\
if not ({test}):
    raise $bad({value}, {path!r}, {expected!r})
"""

MAY_BE_NONE = """\
if {value} is None:
    {none}
else:
    {some}
"""


class Writer:
    """Writes a function of one op. It has what codecs ask for: see `codecs.Objects`.

    `bad` makes the error for a value that does not fit; a function that only restores lowers none.
    """

    def __init__(self, name: str, signature: Signature, schema: Schema, op: str, bad: Fn | None = None) -> None:
        names = (*schema.arguments, *(Argument("", name=each.name) for each in signature.parameters))
        self.source = Source(name, Schema(names, ()))
        self.source.objects |= {
            "Tensor": Tensor,
            "bad": bad,
            "number_of": number_of,
            "absent": absent(op),
            "tensor_of": tensor_of,
        }
        self.signature = signature
        self.schema = schema
        self.op = op

    def ref(self, name: str, value: Any) -> str:
        # A user's class may be called as something of Python, or as a variable here: these have no capitals.
        known, name = self.source.objects, re.sub(r"\W", "_", name)
        name = f"Of_{name}" if name == name.lower() else name
        while hasattr(builtins, name) or known.get(name, value) is not value:
            name += "_"
        known[name] = value
        return f"${name}"

    def build(self, template: str, /, **objects: Any) -> Fn:
        self.source.objects |= objects
        self.source.template = template
        return self.source.build(self.op)

    # Parameters -------------------------------------------------------------------------------------------------

    def rich_parameters(self) -> list[str]:
        """The parameters of the function, defaults included."""
        texts: list[str] = []
        parameters = self.signature.parameters
        for i, parameter in enumerate(parameters):
            kind, before = parameter.kind, parameters[i - 1].kind if i else None
            if before is inspect.Parameter.POSITIONAL_ONLY is not kind:
                texts.append("/")
            if kind is inspect.Parameter.KEYWORD_ONLY and before not in (kind, inspect.Parameter.VAR_POSITIONAL):
                texts.append("*")
            default = "" if parameter.default is REQUIRED else f"={self.ref(f'Default_{i}', parameter.default)}"
            texts.append(f"{parameter.stars}{parameter.name}{default}")
        if parameters and parameters[-1].kind is inspect.Parameter.POSITIONAL_ONLY:
            texts.append("/")
        return texts

    def flat_parameters(self) -> list[str]:
        star = ["*"] if self.schema.keyword_only else []
        positional, named = self._variables(self.schema.positional), self._variables(self.schema.keyword_only)
        return [*positional, *star, *named]

    def _variables(self, arguments: tuple[Argument, ...]) -> list[str]:
        return [argument.variable for argument in arguments]

    # Lowering ---------------------------------------------------------------------------------------------------

    def lower_parameters(self) -> tuple[list[str], dict[str, str]]:
        """Lines, and after them the expression for each argument of the schema."""
        lines: list[str] = []
        values: dict[str, str] = {}
        for parameter in self.signature.parameters:
            values |= self.lower(parameter.node, parameter.name, lines)
        return lines, values

    def flat_arguments(self, values: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
        positional = [values[argument.name] for argument in self.schema.positional]
        return positional, {argument.name: values[argument.name] for argument in self.schema.keyword_only}

    def defaults_of_fields(self) -> dict[str, tuple[str, Any]]:
        """Of arguments that may be left out, because a field is at its default: the field, and the default."""
        found: dict[str, tuple[str, Any]] = {}
        for parameter in self.signature.parameters:
            if isinstance(parameter.node, Group) and parameter.node.given is None:
                self._add_defaults(parameter.node, parameter.name, parameter.default, found)
        return found

    def _add_defaults(self, group: Group, value: str, whole: Any, found: dict[str, tuple[str, Any]]) -> None:
        """`whole` is the default of the group, if it has one."""
        for key, node in group.fields.items():
            default = node.default if whole is REQUIRED else group.form.get(whole, key)
            if isinstance(node, Group):
                if node.given is None:
                    self._add_defaults(node, group.form.item(value, key), default, found)
            elif isinstance(node, Leaf) and node.default is not REQUIRED and _never_changes(default):
                found[node.name] = group.form.item(value, key), default

    def lower(self, node: Node, value: str, lines: list[str], *, in_optional: bool = False) -> dict[str, str]:
        """Expressions for the leaves of a value; checks and what has to be done before are added to `lines`.

        The dispatcher knows of no None that an argument may not be, where the argument is part of an optional object.
        """
        if isinstance(node, Leaf):
            if in_optional and node.is_plain and not node.is_optional:
                self._check(f"{value} is not None", value, node.path, code(hint_of(node.type)), lines)
            return {node.name: self._lower_leaf(node, value, lines)}
        if isinstance(node, Either):
            if not node.may_be_none:
                self._check(f"{value} is not None", value, node.path, "a Tensor or a number", lines)
            return {
                node.tensor.name: f"$tensor_of({value})",
                node.number.name: f"$number_of({value})",
            }
        if isinstance(node, Nested):
            none = f"None if {value} is None else " if node.tensors.is_optional else ""
            test = f"$isinstance({value}, $list) and $all([$isinstance($items, ($list, $tuple)) for $items in {value}])"
            test = f"{value} is None or {test}" if none else test
            self._check(test, value, node.path, f"a list of lists of tensors{', or None' * bool(none)}", lines)
            return {
                node.tensors.name: f"{none}[$x for $items in {value} for $x in $items]",
                node.lengths.name: f"{none}[$len($items) for $items in {value}]",
            }
        if node.given is None:
            return self._lower_fields(node, value, lines, in_optional=in_optional)
        return self._lower_optional(node, node.given, value, lines)

    def _lower_leaf(self, leaf: Leaf, value: str, lines: list[str]) -> str:
        if leaf.is_plain:
            return value
        test, lowered = leaf.codec.test(value, self), leaf.codec.lower(value, self)
        if test:
            expected = leaf.codec.expected
            if leaf.is_optional:
                test, expected = f"{value} is None or {test}", f"{expected}, or None"
            self._check(test, value, leaf.path, expected, lines)
        return f"(None if {value} is None else {lowered})" if leaf.is_optional and lowered != value else lowered

    def _check(self, test: str, value: str, path: str, expected: str, lines: list[str]) -> None:
        lines += CHECK.format(test=test, value=value, path=path, expected=expected).splitlines()

    def _lower_fields(self, group: Group, value: str, lines: list[str], *, in_optional: bool) -> dict[str, str]:
        test = group.form.test(value, self._class(group))
        or_none = ", or None" if group.given is not None else ""
        self._check(test, value, group.path, group.form.name + or_none, lines)
        values: dict[str, str] = {}
        for key, node in group.fields.items():
            values |= self.lower(node, group.form.item(value, key), lines, in_optional=in_optional)
        return values

    def _lower_optional(self, group: Group, given: Leaf, value: str, lines: list[str]) -> dict[str, str]:
        inside: list[str] = []
        values = {given.name: "True"} | self._lower_fields(group, value, inside, in_optional=True)
        names = {name: f"$lowered_{name}" for name in values}
        none = [f"{name} = None" for name in names.values()]
        none[0] = f"{names[given.name]} = False"
        some = [*inside, *(f"{names[key]} = {code}" for key, code in values.items())]
        lines += fill(MAY_BE_NONE.replace("{value}", value), none=none, some=some).splitlines()
        return names

    def _class(self, group: Group) -> str:
        cls = getattr(group.form, "cls", None)
        return "" if cls is None else self.ref(cls.__name__, cls)

    # Restoring --------------------------------------------------------------------------------------------------

    def restored(self) -> dict[str, str]:
        """An expression for each parameter, of the arguments of the schema."""
        values = {argument.name: argument.variable for argument in self.schema.arguments}
        return {each.name: self.restore(each.node, values) for each in self.signature.parameters}

    def restore(self, node: Node, values: Mapping[str, str], *, in_optional: bool = False) -> str:
        if isinstance(node, Leaf):
            value = values[node.name]
            if in_optional and node.is_plain and not node.is_optional:
                return self._present(value, node.path, code(hint_of(node.type)))
            restored = node.codec.restore(value, node.path, self)
            return f"(None if {value} is None else {restored})" if node.is_optional and restored != value else restored
        if isinstance(node, Either):
            tensor, number = values[node.tensor.name], values[node.number.name]
            if not node.may_be_none:
                number = self._present(number, node.path, "a Tensor or a number")
            return f"({number} if {tensor} is None else {tensor})"
        if isinstance(node, Nested):
            tensors, lengths = values[node.tensors.name], values[node.lengths.name]
            none = f"None if {tensors} is None else " if node.tensors.is_optional else ""
            return f"({none}{self.ref('Lists', Lists(node.path, self.op))}({tensors}, {lengths}))"
        in_optional = in_optional or node.given is not None
        fields = {key: self.restore(each, values, in_optional=in_optional) for key, each in node.fields.items()}
        make = self._class(node)
        if isinstance(node.form, DataclassForm):
            make = self.ref(f"New_{node.form.name}", node.form.maker())
        built = node.form.build(make, fields)
        return built if node.given is None else f"({built} if {values[node.given.name]} else None)"

    def _present(self, value: str, path: str, expected: str) -> str:
        """An expression for a value that a call through ``torch.ops`` may have left out."""
        return f"({value} if {value} is not None else $absent({path!r}, {expected!r}))"

    def callback_arguments(self) -> list[str]:
        """How a callback is called: as the function that the op was defined from."""
        restored = self.restored()
        return [
            f"{each.stars}{restored[each.name]}"
            if each.kind is not inspect.Parameter.KEYWORD_ONLY
            else f"{each.name}={restored[each.name]}"
            for each in self.signature.parameters
        ]

    # Results ----------------------------------------------------------------------------------------------------

    def restore_result(self) -> str:
        node = self.signature.result
        if self.signature.returns_plainly or node is None:
            return "$result"
        leaves = node.leaves
        values = {leaf.name: f"$result[{i}]" for i, leaf in enumerate(leaves)}
        return self.restore(node, {leaves[0].name: "$result"} if len(leaves) == 1 else values)

    def lower_result(self) -> tuple[list[str], str]:
        """Lines, and after them what is returned to the dispatcher."""
        node = self.signature.result
        if self.signature.returns_plainly or node is None:
            return [], "$result"
        lines: list[str] = []
        values = self.lower(node, "$result", lines, in_optional=True)  # in which the dispatcher looks for no None
        return lines, as_tuple(values.values()) if len(values) > 1 else next(iter(values.values()))


_CONSTANTS = (int, float, complex, str, NoneType, Enum, torch.dtype, torch.device, torch.layout, torch.memory_format)


def _never_changes(default: Any) -> bool:
    """Is a default still the value that it was when the op was defined, if it is the same object?"""
    if isinstance(default, tuple):
        return all(map(_never_changes, default))
    return isinstance(default, _CONSTANTS)


# The generated functions: rich arguments to lowered ones and back, and the same for results ---------------------------

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
