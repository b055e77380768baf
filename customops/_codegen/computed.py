"""``computed_args=``: arguments that a call of the object leaves out, and that are computed of the others.

That happens before the dispatcher, or a compiler, sees the call: for these they are arguments like any other.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from customops._codegen.function import Source, as_dict, as_tuple, emit_parameters
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


class Computed(NamedTuple):
    """An argument that is computed."""

    name: str
    fn: Fn
    #: The arguments that the function is called with.
    wanted: tuple[str, ...]


class _Missing:
    """The default of what is computed."""

    def __repr__(self) -> str:
        return "<computed>"


MISSING = _Missing()


def read(given: Any, names: Sequence[str], op: str, *, starred: bool) -> tuple[Computed, ...]:
    """What was given as ``computed_args=``, checked: `names` are the op's parameters, `starred` if there are others."""
    if given is None:
        return ()
    if not isinstance(given, Mapping):
        raise DefinitionError("computed_args must be a dict of functions, by name", op=op, got=brief(given))
    if starred and given:
        problem = "computed_args is for signatures without *args and **kwargs"
        raise DefinitionError(problem, op=op, fix="name the parameters")
    known, computed = {name for name in names if name not in given}, list[Computed]()
    for name, fn in given.items():
        if name not in names:
            problem = "computed_args names an argument that the op does not have"
            raise DefinitionError(problem, op=op, expected=", ".join(names), got=name)
        if not callable(fn):
            problem = "computed_args needs a function for each argument"
            raise DefinitionError(problem, op=op, argument=name, got=brief(fn))
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
        computed.append(Computed(name, fn, tuple(wanted)))
        known.add(name)
    return tuple(computed)


def functions(parameters: Schema, computed: tuple[Computed, ...], op: str, inner: Callable[..., Any]) -> tuple[Fn, Fn]:
    """The ``__call__`` of an op's object, around the one that takes all arguments, and what makes of a call these.

    The latter is ``arguments(self, *args, **kwargs) -> (args, kwargs)``, computed ones included.
    """
    objects: dict[str, Any] = {"missing": MISSING, "call": inner}
    variables = {argument.name: argument.variable for argument in parameters.arguments}
    lines, defaults = list[str](), {each.name: "$missing" for each in computed}
    for i, each in enumerate(computed):
        objects[f"compute_{i}"] = each.fn
        name, wanted = variables[each.name], ", ".join([f"{name}={variables[name]}" for name in each.wanted])
        lines += [f"if {name} is $missing:", f"    {name} = $compute_{i}({wanted})"]
    given = Schema(tuple([argument for argument in parameters.arguments if argument.name not in defaults]), ())
    last = [argument for each in computed for argument in parameters.arguments if argument.name == each.name]
    for argument, may_be_left_out in zip(given.call.arguments, given.call.may_be_left_out, strict=True):
        if may_be_left_out:
            value = None if argument.default_is_none_in_text else argument.default
            objects[f"default_of_{argument.name}"] = value
            defaults[argument.name] = f"$default_of_{argument.name}"
    # What is computed comes last, and may be given by keyword.
    texts = ["$self", "/", *emit_parameters(given.positional, [*given.keyword_only, *last], defaults)]
    args = [argument.variable for argument in parameters.positional]
    named = [argument.variable for argument in parameters.keyword_only]
    call, arguments = Source("__call__", parameters), Source("arguments", parameters)
    call.objects = arguments.objects = objects
    call.fill(CALL, parameters=texts, compute=lines, arguments=[*args, *[f"{name}={name}" for name in named]])
    kwargs = as_dict({name: name for name in named})
    arguments.fill(ARGUMENTS, parameters=texts, compute=lines, args=as_tuple(args), kwargs=kwargs)
    function: Any = call.build(op)
    function.__qualname__ = op
    return function, arguments.build(op)


def plain(fn: Fn, given: Any, op: str) -> Fn:
    """`fn` itself with ``computed_args``, where there is no op."""
    whole = inspect.signature(fn)
    starred = any(each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in whole.parameters.values())
    computed = read(given, list(whole.parameters), op, starred=starred)
    outer = signature(fn, computed)

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = outer.bind(*args, **kwargs)
        bound.apply_defaults()
        values = bound.arguments
        for each in computed:
            if values[each.name] is MISSING:
                values[each.name] = each.fn(**{name: values[name] for name in each.wanted})
        complete = inspect.BoundArguments(whole, OrderedDict((name, values[name]) for name in whole.parameters))
        return fn(*complete.args, **complete.kwargs)

    return call if computed else fn


def signature(fn: Fn, computed: tuple[Computed, ...]) -> inspect.Signature:
    """The signature of the object: what is computed comes last, and may be left out."""
    whole, names = inspect.signature(fn), [each.name for each in computed]
    given = [parameter for parameter in whole.parameters.values() if parameter.name not in names]
    last = [
        whole.parameters[name].replace(kind=inspect.Parameter.KEYWORD_ONLY, default=MISSING)
        for name in names
        if name in whole.parameters
    ]
    return whole.replace(parameters=[*given, *last])
