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

import difflib
from collections.abc import Iterable
from typing import Any, get_args

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
    """Return a line, ``got:      2 tensors``, for each field of an error that is set, after those of `before`."""
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
    """Return a value on one short line, also if its own ``__repr__`` fails."""
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


def did_you_mean(given: str, known: Iterable[str]) -> str | None:
    """Return a fix for an unknown name if a known one is similar."""
    near = difflib.get_close_matches(given, known, n=1)
    return f"did you mean {near[0]}?" if near else None


def check_choice(option: str, value: Any, choices: Any, op: str, error: type[CustomOpsError]) -> None:
    """Raise `error` unless `value` is a member of the `Literal` type `choices`."""
    if value not in get_args(choices):
        *first, last = (f'"{choice}"' for choice in get_args(choices))
        allowed = f"{', '.join(first)} or {last}"
        raise error(f"{option} has an invalid value", op=op, expected=allowed, got=brief(value))


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message that has text."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")
