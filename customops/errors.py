"""Every exception that customops raises.

The data is kept as fields; the message is built from them in one place, so that all errors read alike::

    ns::op: what is wrong
      argument: x
      expected: a Tensor
      got:      numpy.ndarray
      at:       my_kernel (ops.py:12)
      fix:      return torch.from_numpy(...)

Each class also derives from the built-in exception that code written for ``torch.library`` catches. For definitions
torch has two: its Python raises ValueError, its dispatcher RuntimeError.
"""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import linecache
import os
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any, TypeGuard, TypeVar, get_args

import torch

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T", bound=type)

__all__ = [
    "AliasError",
    "ArgumentError",
    "AutogradError",
    "CallbackError",
    "CheckError",
    "ContextError",
    "CustomOpsError",
    "DefinitionError",
    "KernelError",
    "MissingFakeError",
    "NoKernelError",
    "OpCheckError",
    "RegistrationError",
    "SchemaError",
    "TagError",
    "UnboundNameError",
    "UnknownAttributeError",
    "UnregisteredError",
    "UnsupportedError",
]


class CustomOpsError(Exception):
    """Base of all errors of this package.

    Attributes:
        problem: what is wrong, in one sentence.
        op: qualified name of the operator, or of the function where there is no operator yet.
        argument: the argument, return or parameter concerned.
        expected, got: what the call wanted and what came.
        where: file and line of the user's code concerned.
        fix: the next call to make.
    """

    def __init__(
        self,
        problem: str,
        *,
        op: str | None = None,
        argument: str | None = None,
        expected: str | None = None,
        got: str | None = None,
        where: str | None = None,
        fix: str | None = None,
    ) -> None:
        self.problem = problem
        self.op = op
        self.argument = argument
        self.expected = expected
        self.got = got
        self.where = where
        self.fix = fix
        super().__init__(self._message())

    def _message(self) -> str:
        op = self.op if self.op is None or len(self.op) <= 200 else self.op[:197] + "..."
        return "\n  ".join([f"{op}: {self.problem}" if op else self.problem, *field_lines(self)])

    def __reduce__(self) -> tuple[Any, ...]:
        # The default would rebuild from the message alone and lose the fields.
        return _rebuild, (type(self), dict(self.__dict__), self.args)


def field_lines(error: BaseException, place: str | None = None, **before: str) -> list[str]:
    """``got:      2 tensors``: a line for each field of an error that is set, after those of `before`."""
    titles = ("argument", "expected", "got", "at", "fix")
    fields = before | {name: getattr(error, "where" if name == "at" else name, None) for name in titles}
    fields["at"] = fields["at"] or place
    return [f"{name + ':':<9} {value}" for name, value in fields.items() if value]


def _rebuild(cls: type[CustomOpsError], fields: dict[str, Any], args: tuple[Any, ...]) -> Any:
    error = cls.__new__(cls)
    error.__dict__.update(fields)
    error.args = args
    return error


class SchemaError(CustomOpsError, ValueError, RuntimeError):
    """A schema cannot be inferred from a function, or a schema string is wrong."""


class DefinitionError(CustomOpsError, ValueError, RuntimeError):
    """An operator cannot be defined: a bad name, a bad option, a conflict with an existing op."""


class TagError(DefinitionError, AssertionError):
    """The tags of an operator contradict each other."""


class RegistrationError(CustomOpsError, RuntimeError):
    """A rule (kernel, fake, backward, ...) cannot be attached to an operator."""


class CallbackError(RegistrationError, TypeError):
    """A function that was registered cannot be called with the arguments of the operator."""


class UnknownAttributeError(CustomOpsError, AttributeError):
    """An operator was asked for an attribute or method that operators do not have."""


class UnboundNameError(CustomOpsError, LookupError):
    """A `customops.Named` was resolved, and no object is bound to its name."""


class UnsupportedError(CustomOpsError, NotImplementedError):
    """The request is valid, and customops does not support it."""


class NoKernelError(UnsupportedError):
    """An operator has several kernels, and none of them takes the arguments of a call.

    Attributes:
        refused: name of a kernel -> why it does not take them.
    """

    def __init__(self, problem: str, *, refused: dict[str, str], **fields: str | None) -> None:
        self.refused = refused
        super().__init__(problem, **fields)

    def _message(self) -> str:
        return "\n  ".join([f"{self.op}: {self.problem}", *field_lines(self, **self.refused)])


class ArgumentError(CustomOpsError, ValueError, RuntimeError):
    """An argument of a call has a value that the signature of the operator does not allow."""


class KernelError(CustomOpsError, RuntimeError):
    """A kernel or fake impl returned something other than the schema says."""


class AliasError(KernelError):
    """A kernel returned a tensor that shares memory with an input or with another return."""


class MissingFakeError(CustomOpsError, RuntimeError):
    """An operator without a fake impl was traced."""

    def __str__(self) -> str:
        return self._message()  # torch.export adds advice after the fix


class AutogradError(CustomOpsError, RuntimeError):
    """A backward is missing, or the gradients that it returned do not fit the inputs."""


class ContextError(AutogradError, AttributeError):
    """A backward or another function read an attribute of `ctx` that was never set."""


class UnregisteredError(CustomOpsError, RuntimeError):
    """An operator was called after it was unregistered or replaced."""


class CheckError(CustomOpsError, AssertionError):
    """The fault that a check of `opcheck` found; the `OpCheckError` has it as its ``__cause__``."""

    call: tuple[Any, Any] | None = None  #: args and kwargs that show it, which may be others than the check was given


class OpCheckError(CustomOpsError):
    """A check of `opcheck` failed. Its ``__cause__`` is a `CheckError`, or what the operator raised."""


def brief(value: Any, limit: int = 80) -> str:
    """A value on one short line, also where its own ``__repr__`` fails."""
    try:
        text = " ".join(repr(value).split())
    except Exception as error:  # its fault must not take the place of the error that is being made
        text = f"<{type(value).__name__}, whose __repr__ raises {type(error).__name__}>"
    return text if len(text) <= limit else text[: limit - 3] + "..."


def describe(value: Any) -> str:
    """Return the type of a value, and of the items of a list or tuple."""
    if isinstance(value, (list, tuple)):
        items = ", ".join(describe(item) for item in value[:6]) + (", ..." if len(value) > 6 else "")
        return f"{type(value).__name__} of {len(value)} ({items})"
    if value is None:
        return "None"
    module = type(value).__module__
    name = type(value).__qualname__
    return name if module in ("builtins", "torch") else f"{module}.{name}"


def name_of(fn: Callable[..., Any]) -> str:
    """The name a user would recognise `fn` by (``functools.partial`` and callable objects included)."""
    inner = innermost(fn)
    return str(getattr(inner, "__name__", None) or type(inner).__name__)


def innermost(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function behind decorators, partials and bound methods; a callable object stays itself."""
    while True:
        if isinstance(fn, functools.partial):
            fn = fn.func
        elif isinstance(fn, types.MethodType):
            fn = fn.__func__
        elif "__wrapped__" in getattr(fn, "__dict__", ()):
            fn = fn.__wrapped__  # type: ignore[attr-defined]
        else:
            return fn


def location_of(fn: Callable[..., Any]) -> str:
    """``file:line`` of `fn`, from its code object, so that functions built by ``exec`` have one too."""
    fn = innermost(fn)
    code = getattr(fn, "__code__", None) or getattr(type(fn).__call__, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else "<built-in>"


def where(fn: Callable[..., Any]) -> str:
    """``name (file:line)``, the form errors use."""
    return f"{name_of(fn)} ({location_of(fn)})"


def did_you_mean(given: str, known: Iterable[str]) -> str | None:
    """A fix for a name that is not among those that there are, if one of them is near."""
    near = difflib.get_close_matches(given, known, n=1)
    return f"did you mean {near[0]}?" if near else None


def users_frames(error: BaseException) -> list[types.TracebackType]:
    """The frames in a traceback that are the user's, outermost first."""
    found, traceback = [], error.__traceback__
    while traceback is not None:
        found.append(traceback)
        traceback = traceback.tb_next
    return [each for each in found if is_users(each.tb_frame.f_code.co_filename)]


def is_deliberate(error: BaseException) -> bool:
    """Did the innermost of the user's statements raise it on purpose, by ``raise``, ``assert`` or ``torch._check``?"""
    for frame in users_frames(error)[-1:]:
        file, number = frame.tb_frame.f_code.co_filename, frame.tb_lineno or 0
        return any(first <= number <= last for first, last in _refusals("".join(linecache.getlines(file))))
    return False


@functools.lru_cache(maxsize=64)
def _refusals(code: str) -> tuple[tuple[int, int], ...]:
    """The first and the last line of each statement that raises on purpose."""
    try:
        nodes = [*ast.walk(ast.parse(code))]
    except SyntaxError:  # of a notebook, say
        return ()
    return tuple((node.lineno, node.end_lineno or node.lineno) for node in nodes if _is_refusal(node))


def _is_refusal(node: Any) -> TypeGuard[ast.stmt]:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        name = getattr(node.value.func, "attr", None) or getattr(node.value.func, "id", "")
        return f"{name}_".startswith("_check_")  # also torch._check_is_size
    return isinstance(node, (ast.Raise, ast.Assert))


def cut(error: CustomOpsError) -> None:
    """Leave only the user's frames in the traceback of `error`, and its cause only if it has such frames.

    ``raise`` then adds no frame. ``CUSTOMOPS_TRACEBACK=full`` keeps all.
    """
    if os.environ.get("CUSTOMOPS_TRACEBACK") == "full":
        return
    kept = None
    for each in reversed(users_frames(error)):
        each.tb_next, kept = kept, each
    error.__traceback__ = kept
    error.__suppress_context__ = True
    if error.__cause__ is not None and not users_frames(error.__cause__):
        error.__cause__ = None


def entry(fn: F) -> F:
    """Decorate a function that users call: an error of this package shows their frames only.

    Arguments that `fn` does not take raise TypeError, as in Python, which names the parameter that was meant.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return fn(*args, **kwargs)
        except CustomOpsError as error:
            cut(error)
            raise
        except TypeError as error:
            traceback = error.__traceback__
            if traceback is None or traceback.tb_next is not None:
                raise
            error.args = (misused(fn, str(error), args, kwargs),)
            error.__traceback__ = None
            raise

    if isinstance(fn, functools.partial):  # it has no name, and to find that out takes time
        call.__wrapped__ = fn  # type: ignore[attr-defined]
        return call  # type: ignore[return-value]
    return functools.wraps(fn)(call)  # type: ignore[return-value]


def misused(fn: Callable[..., Any], text: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The message for arguments that `fn` does not take, from what Python says of them."""
    name, parameters = name_of(fn), inspect.signature(fn).parameters
    of_method = next(iter(parameters), None) == "self"
    named = [each.name for each in parameters.values() if each.kind is each.KEYWORD_ONLY]
    positional = [each.name for each in parameters.values() if "POSITIONAL_" in each.kind.name][of_method:]
    problem = text.partition("() ")[2].partition(". Did you mean")[0]
    fix = next(filter(None, (did_you_mean(each, named) for each in kwargs if each not in parameters)), None)
    given = len(args) - of_method
    if given > len(positional) and named:
        problem = f"takes at most {len(positional)} positional arguments, and {given} were given"
        fix = f"give it by name: {name}({', '.join([*positional, named[0]])}=...)"
    op = getattr(args[0], "_qualname", None) if of_method and args else None
    expected = f"{name}({', '.join([*positional, '...'])})"
    return str(CustomOpsError(f"{name}() {problem}", op=op, expected=expected, where=user_source(), fix=fix))


def entries(cls: T) -> T:
    """Decorate a class whose public methods are each an `entry`."""
    for name, method in list(vars(cls).items()):
        if isinstance(method, types.FunctionType) and not name.startswith("_"):
            setattr(cls, name, entry(method))
    return cls


#: Where frames are not the user's: this package, and torch's functions that call its methods.
_NOT_THE_USERS = (os.path.dirname(__file__) + os.sep, torch.library.__file__)


def helper(fn: F) -> F:
    """Mark a function that calls this package for its caller: ``source``, errors and warnings name the caller's line.

    Functions nested in it are marked, too, so a decorator can return one.

    Raises:
        RegistrationError: it is not a function written in Python, a method, or an object that is called as one.

    Example:
        >>> @helper
        ... def mylib_op(fn):
        ...     return custom_op(f"mylib::{fn.__name__}", fn, mutates_args=())
    """
    function = innermost(fn.__func__ if isinstance(fn, (staticmethod, classmethod)) else fn)
    code = getattr(function if isinstance(function, types.FunctionType) else type(function).__call__, "__code__", None)
    if not isinstance(code, types.CodeType):
        raise RegistrationError("helper marks a function written in Python", got=brief(fn), where=user_source())
    codes = [code]
    while codes:
        _helpers[id(codes[-1])] = codes[-1]
        codes += [inner for inner in codes.pop().co_consts if isinstance(inner, types.CodeType)]
    return fn


#: The code objects of functions that are marked by `helper`, by their ids: equal ones are others.
_helpers: dict[int, types.CodeType] = {}


def user_stacklevel() -> int:
    """How many frames above the caller the user's code is, counted as `warnings.warn` counts."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith(_NOT_THE_USERS) or id(frame.f_code) in _helpers
    ):
        level, frame = level + 1, frame.f_back
    return level


def is_users(file: str) -> bool:
    """Is a file neither of this package nor of torch, nor written by this package?"""
    return not file.startswith((*_NOT_THE_USERS, os.path.dirname(torch.__file__) + os.sep, "<customops "))


def user_source() -> str:
    """``file:line`` of the user's call into this package."""
    frame = sys._getframe(user_stacklevel() - 1)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def users_call(start: types.FrameType | None = None) -> str | None:
    """``name (file:line)`` of the innermost call in a frame of the user."""
    frame = users_frame(start)
    return frame and f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})"


def users_frame(start: types.FrameType | None = None) -> types.FrameType | None:
    """The innermost frame of the user, from the caller, or another frame, on outwards."""
    frame: types.FrameType | None = start or sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def check_choice(option: str, value: Any, choices: Any, op: str, error: type[CustomOpsError]) -> None:
    """Raise `error` unless `value` is a member of the `Literal` type `choices`."""
    if value not in get_args(choices):
        *first, last = (f'"{choice}"' for choice in get_args(choices))
        allowed = f"{', '.join(first)} or {last}"
        raise error(f"{option} has an invalid value", op=op, expected=allowed, got=brief(value))


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message that has text."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")
