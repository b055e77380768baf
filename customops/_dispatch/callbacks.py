"""Check that a callback of the user accepts the arguments of its op; call it without those that it leaves out."""

from __future__ import annotations

import functools
import inspect
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from customops._places import name_of, user_stacklevel, where
from customops._schema.model import Argument, Schema
from customops.errors import CallbackError, RegistrationError, brief

__tracebackhide__ = True  # pytest leaves the frames out


Fn = Callable[..., Any]
#: What is passed by name to callbacks that may take it by position, too.
_NAMED_BY_US = {"ctx", "inputs", "output", "keyword_only_inputs"}


def bind(fn: Fn, op: str, role: str, /, *args: str, **kwargs: str) -> None:
    """Raise CallbackError unless `fn` can be called with these arguments (their names stand for them)."""
    signature = _own_signature(fn, op, role)
    try:
        if signature is not None:
            signature.bind(*args, **kwargs)
    except TypeError as error:
        own = [*args, "*"] if kwargs and not {*kwargs} <= _NAMED_BY_US else list(args)
        raise CallbackError(
            f"the {role} does not fit the operator: {error}",
            op=op,
            expected=f"callable as {name_of(fn)}({', '.join([*args, *(f'{key}={key}' for key in kwargs)])})",
            got=f"{name_of(fn)}{signature}",
            where=where(fn),
            fix=f"def {name_of(fn).replace('<lambda>', '_')}({', '.join([*own, *kwargs])})",
        ) from None


def _own_signature(fn: Fn, op: str, role: str) -> inspect.Signature | None:
    """The parameters of `fn` itself: what it wraps need not be called with the same. None if they cannot be known."""
    if not callable(fn):
        raise CallbackError(f"the {role} must be callable", op=op, got=brief(fn))
    try:
        return inspect.signature(fn, follow_wrapped=False)
    except (ValueError, TypeError):
        return None  # built-in callables tell nothing about themselves


def bind_kernel(fn: Fn, schema: Schema, op: str, role: str, /, *before: str, warn: bool = False) -> Fn:
    """`fn`, to be called with every argument: positional ones by position, keyword-only ones by name.

    It may leave out arguments with a default: see `WithoutDefaults`. With `warn`, its author is told. Arguments called
    `before` come before those of the op.

    Raises:
        CallbackError: it cannot be called so.
    """
    positional = [argument.name for argument in schema.positional]
    if type(fn) is types.FunctionType and not schema.keyword_only and not hasattr(fn, "__signature__"):
        code = fn.__code__  # of most functions it is known without a signature, which is slow
        varied = code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS) or code.co_kwonlyargcount
        if not varied and code.co_varnames[: code.co_argcount] == (*before, *positional):
            return fn
    signature = _own_signature(fn, op, role)
    left_out = _left_out(signature, schema, before) if signature is not None else ()
    if not left_out:
        names = {argument.name: argument.name for argument in schema.keyword_only}
        bind(fn, op, role, *before, *positional, **names)
        return fn
    shorter = WithoutDefaults(fn, schema, op, role, left_out)
    if warn:
        warnings.warn(
            f"{op}: the {role} {where(fn)} has no parameter for {', '.join(each.name for each in left_out)}. It is "
            "called without it, and raises if a call passes another value than the default.",
            UserWarning,
            stacklevel=user_stacklevel(),
        )
    return shorter


def _left_out(signature: inspect.Signature, schema: Schema, before: tuple[str, ...]) -> tuple[Argument, ...]:
    """The fewest arguments with a default without which a function of this signature can be called."""
    parameters = signature.parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    unknown = [a for a in schema.keyword_only if a.has_default and not (takes_any or a.name in parameters)]
    named = {a.name: a.name for a in schema.keyword_only if a not in unknown}
    positional = list(schema.positional)
    while True:
        try:
            signature.bind(*before, *(argument.name for argument in positional), **named)
        except TypeError:
            if not (positional and positional.pop().has_default):
                return ()
        else:
            return (*schema.positional[len(positional) :], *unknown)


class WithoutDefaults:
    """A callback that has no parameter for some arguments with a default: it is called without them.

    That is how the dispatcher calls it, too, which does not pass what equals its default. With another value the
    call would do what the caller did not ask for, so it raises.
    """

    def __init__(self, fn: Fn, schema: Schema, op: str, role: str, left_out: tuple[Argument, ...]) -> None:
        functools.update_wrapper(self, fn, updated=())
        self.fn, self.op, self.role, self.left_out = fn, op, role, left_out
        self.positional = sum(1 for argument in schema.positional if argument not in left_out)
        self.missing = {argument.name for argument in left_out}

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self.shorten(args, kwargs)
        return self.fn(*args, **kwargs)

    def shorten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments that `fn` takes, out of all."""
        given = dict(zip([a.name for a in self.left_out], args[self.positional :], strict=False)) | kwargs
        for argument in self.left_out:
            value = given.get(argument.name, argument.default)
            if not _equal(value, argument.default):
                raise RegistrationError(  # Dynamo hides a TypeError
                    f"the {self.role} has no parameter for an argument that was given",
                    op=self.op,
                    argument=argument.name,
                    expected=f"the default, {argument.default!r}",
                    got=repr(value),
                    where=where(self.fn),
                    fix=f"add the parameter {argument.name} to {name_of(self.fn)}",
                )
        return args[: self.positional], {name: value for name, value in kwargs.items() if name not in self.missing}


def _equal(value: Any, default: Any) -> bool:
    """Is `value` what the dispatcher would leave out?"""
    if isinstance(default, tuple):
        return isinstance(value, (list, tuple)) and len(value) == len(default) and all(map(_equal, value, default))
    if value is default or isinstance(value, (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value is default
    return bool(value == default or (value != value and default != default))  # the latter is NaN
