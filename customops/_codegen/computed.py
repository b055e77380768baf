"""``computed_args=``: arguments that a call of the object leaves out, and that are computed of the others.

That happens before the dispatcher, or a compiler, sees the call: for these they are arguments like any other.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from customops._codegen.function import Source, as_dict, as_tuple, emit_parameters, fill
from customops._dispatch.callbacks import Fn
from customops._schema.model import Schema
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


#: Functions by the names of the arguments that they compute, in this order.
Computed = tuple[tuple[str, Fn], ...]


class _Missing:
    """The default of what is computed."""

    def __repr__(self) -> str:
        return "<computed>"


MISSING = _Missing()


def read(given: Any, names: Sequence[str], op: str, *, starred: bool) -> Computed:
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
        problem = "computed_args is for signatures without *args and **kwargs"
        raise DefinitionError(problem, op=op, fix="name the parameters")
    known = {name for name in names if name not in given}
    for name, fn in given.items():
        if name not in names:
            problem = "computed_args names an argument that the op does not have"
            raise DefinitionError(problem, op=op, expected=", ".join(names), got=name)
        if not callable(fn):
            problem = "computed_args needs a function for each argument"
            raise DefinitionError(problem, op=op, argument=name, got=brief(fn))
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


def call(parameters: Schema, computed: Computed, op: str, inner: Callable[..., Any]) -> Fn:
    """The ``__call__`` of an op's object, around the one that takes all arguments."""
    source, holes = _source("__call__", parameters, computed, op)
    named = [f"{argument.variable}={argument.variable}" for argument in parameters.keyword_only]
    source.fill(CALL, arguments=[*[each.variable for each in parameters.positional], *named], **holes)
    source.objects["call"] = inner
    function: Any = source.build(op)
    function.__qualname__ = op
    return function  # type: ignore[no-any-return]


def arguments(parameters: Schema, computed: Computed, op: str) -> Fn:
    """``arguments(self, *args, **kwargs) -> (args, kwargs)``, computed ones included."""
    source, holes = _source("arguments", parameters, computed, op)
    kwargs = as_dict({argument.variable: argument.variable for argument in parameters.keyword_only})
    source.fill(ARGUMENTS, args=as_tuple([each.variable for each in parameters.positional]), kwargs=kwargs, **holes)
    return source.build(op)


def _source(name: str, parameters: Schema, computed: Computed, op: str) -> tuple[Source, dict[str, Any]]:
    """The source of either, without its template, and the holes that both have."""
    source = Source(name, parameters)
    source.objects["missing"] = MISSING
    by_name, functions = {argument.name: argument for argument in parameters.arguments}, dict(computed)
    known, lines = set(by_name) - set(functions), ""
    for i, (each, fn) in enumerate(computed):
        source.objects[f"compute_{i}"] = fn
        given = [f"{wanted}={by_name[wanted].variable}" for wanted in _wanted(fn, known, op, each)]
        lines += fill(COMPUTE, name=by_name[each].variable, i=str(i), given=given)
        known.add(each)
    given_ = Schema(tuple([each for each in parameters.arguments if each.name not in functions]), ())
    defaults = dict.fromkeys(functions, "$missing")
    for argument, may_be_left_out in zip(given_.call.arguments, given_.call.may_be_left_out, strict=True):
        if may_be_left_out:
            value = None if argument.default_is_none_in_text else argument.default
            source.objects[f"default_of_{argument.name}"] = value
            defaults[argument.name] = f"$default_of_{argument.name}"
    last = [by_name[each] for each in functions]  # what is computed may be given by keyword
    texts = emit_parameters(given_.positional, [*given_.keyword_only, *last], defaults)
    return source, {"parameters": ["$self", "/", *texts], "compute": lines}


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


def signature(fn: Fn, computed: Computed) -> inspect.Signature:
    """The signature of the object: what is computed comes last, and may be left out."""
    whole, names = inspect.signature(fn), [name for name, _ in computed]
    given = [parameter for parameter in whole.parameters.values() if parameter.name not in names]
    last = [
        whole.parameters[name].replace(kind=inspect.Parameter.KEYWORD_ONLY, default=MISSING)
        for name in names
        if name in whole.parameters
    ]
    return whole.replace(parameters=[*given, *last])
