"""``computed_args=``: arguments that a call of the object leaves out, and that are computed of the others.

That happens before the dispatcher, or a compiler, sees the call: for these they are arguments like any other.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from customops._codegen.function import Source, as_tuple, fill
from customops._dispatch.callbacks import Fn
from customops._schema.model import Argument, Schema
from customops.errors import DefinitionError, brief, where

__tracebackhide__ = True  # pytest leaves the frames out

CALL = """\
def __call__({parameters}):
    {compute}
    return $call($self, {arguments})
"""

ARGUMENTS = """\
def arguments({parameters}):
    {compute}
    return {args}, {kwargs}
"""

COMPUTE = """\
if {name} is $missing:
    {name} = $compute_{i}({given})
"""


class _Missing:
    """The default of what is computed."""

    def __repr__(self) -> str:
        return "<computed>"


MISSING = _Missing()


def read(given: Any, names: Sequence[str], op: str, *, starred: bool) -> tuple[tuple[str, Fn], ...]:
    """What was given as ``computed_args=``.

    Args:
        given: name -> function, or None.
        names: those of the op's parameters, as its signature has them.
        op: for messages.
        starred: has the signature ``*args`` or ``**kwargs``?

    Raises:
        DefinitionError: a name is no parameter, or a function asks for something that is none, or not there yet.
    """
    if given is None:
        return ()
    if not isinstance(given, Mapping):
        raise DefinitionError("computed_args must be a dict of functions, by name", op=op, got=brief(given))
    if starred and given:
        raise DefinitionError(
            "computed_args is for signatures without *args and **kwargs", op=op, fix="name the parameters"
        )
    known = {name for name in names if name not in given}
    for name, fn in given.items():
        if name not in names:
            raise DefinitionError(
                "computed_args names an argument that the op does not have", op=op, expected=", ".join(names), got=name
            )
        if not callable(fn):
            raise DefinitionError(
                "computed_args needs a function for each argument", op=op, argument=name, got=brief(fn)
            )
        _wanted(fn, known, op, name)
        known.add(name)
    return tuple(given.items())


def _wanted(fn: Fn, known: set[str], op: str, name: str) -> list[str]:
    """The arguments that a function is called with."""
    wanted: list[str] = []
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (ValueError, TypeError):
        raise DefinitionError(
            f"Python does not know the parameters of the function that computes {name}",
            op=op,
            argument=name,
            got=brief(fn),
            fix="wrap it: lambda x: f(x)",
        ) from None
    for parameter in parameters:
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            wanted += sorted(known - set(wanted))
        elif parameter.name in known and parameter.kind is not inspect.Parameter.POSITIONAL_ONLY:
            wanted.append(parameter.name)
        elif parameter.default is inspect.Parameter.empty:
            raise DefinitionError(
                f"the function that computes {name} has a parameter that is not an argument before it",
                op=op,
                argument=name,
                expected=f"parameters among {', '.join(sorted(known)) or '(none)'}, called by name",
                got=str(parameter),
                where=where(fn),
            )
    return wanted


def call(parameters: Schema, computed: tuple[tuple[str, Fn], ...], op: str, inner: Callable[..., Any]) -> Fn:
    """The ``__call__`` of an op's object, around the one that takes all arguments."""
    source, holes = _source("__call__", parameters, computed, op)
    source.template = fill(CALL, arguments=[*holes["args"], *(f"{n}={n}" for n in holes["named"])], **holes["lines"])
    source.objects |= {"call": inner}
    function: Any = source.build(op)
    function.__qualname__ = op
    return function  # type: ignore[no-any-return]


def arguments(parameters: Schema, computed: tuple[tuple[str, Fn], ...], op: str) -> Fn:
    """``arguments(self, *args, **kwargs) -> (args, kwargs)``, computed ones included."""
    source, holes = _source("arguments", parameters, computed, op)
    named = ", ".join(f"{name!r}: {name}" for name in holes["named"])
    source.template = fill(ARGUMENTS, args=as_tuple(holes["args"]), kwargs=f"{{{named}}}", **holes["lines"])
    return source.build(op)


def _source(
    name: str, parameters: Schema, computed: tuple[tuple[str, Fn], ...], op: str
) -> tuple[Source, dict[str, Any]]:
    source = Source(name, parameters)
    source.objects["missing"] = MISSING
    by_name, functions = {argument.name: argument for argument in parameters.arguments}, dict(computed)
    known, lines = set(by_name) - set(functions), ""
    for i, (each, fn) in enumerate(computed):
        source.objects[f"compute_{i}"] = fn
        given = [f"{wanted}={by_name[wanted].variable}" for wanted in _wanted(fn, known, op, each)]
        lines += fill(COMPUTE, name=by_name[each].variable, i=str(i), given=given)
        known.add(each)
    texts = _parameters(source, parameters, functions)
    args = [argument.variable for argument in parameters.positional]
    named = [argument.variable for argument in parameters.keyword_only]
    return source, {"args": args, "named": named, "lines": {"parameters": texts, "compute": lines}}


def _parameters(source: Source, parameters: Schema, computed: Mapping[str, Fn]) -> list[str]:
    """The parameters of a call: what is computed may be given by keyword."""
    positional = [argument for argument in parameters.positional if argument.name not in computed]
    named = [argument for argument in parameters.keyword_only if argument.name not in computed]
    last = max((i for i, argument in enumerate(positional) if not argument.has_default), default=-1)
    texts = [_parameter(source, argument, optional=i > last) for i, argument in enumerate(positional)]
    texts += ["*", *(_parameter(source, argument, optional=argument.has_default) for argument in named)]
    return ["$self", "/", *texts, *(f"{_of(parameters, name).variable}=$missing" for name in computed)]


def _of(parameters: Schema, name: str) -> Argument:
    return next(argument for argument in parameters.arguments if argument.name == name)


def _parameter(source: Source, argument: Argument, *, optional: bool) -> str:
    if not optional:
        return argument.variable
    source.objects[f"default_of_{argument.name}"] = None if argument.default_is_none_in_text else argument.default
    return f"{argument.variable}=$default_of_{argument.name}"


def plain(fn: Fn, given: Any, op: str) -> Fn:
    """`fn` itself with ``computed_args``, where there is no op.

    Raises:
        DefinitionError: as `read` does.
    """
    whole = inspect.signature(fn)
    starred = any(each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in whole.parameters.values())
    computed = read(given, list(whole.parameters), op, starred=starred)
    outer = signature(fn, computed)
    known, wanted = {name for name in whole.parameters if name not in dict(computed)}, {}
    for name, compute in computed:
        wanted[name] = _wanted(compute, known, op, name)
        known.add(name)

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = outer.bind(*args, **kwargs)
        bound.apply_defaults()
        values = bound.arguments
        for name, compute in computed:
            if values[name] is MISSING:
                values[name] = compute(**{each: values[each] for each in wanted[name]})
        complete = inspect.BoundArguments(whole, OrderedDict((name, values[name]) for name in whole.parameters))
        return fn(*complete.args, **complete.kwargs)

    return call if computed else fn


def signature(fn: Fn, computed: tuple[tuple[str, Fn], ...]) -> inspect.Signature:
    """The signature of the object: what is computed comes last, and may be left out."""
    whole, names = inspect.signature(fn), [name for name, _ in computed]
    given = [parameter for parameter in whole.parameters.values() if parameter.name not in names]
    last = [
        whole.parameters[name].replace(kind=inspect.Parameter.KEYWORD_ONLY, default=MISSING)
        for name in names
        if name in whole.parameters
    ]
    return whole.replace(parameters=[*given, *last])
