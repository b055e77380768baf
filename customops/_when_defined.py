"""Registrations on ops that are not there yet."""

from __future__ import annotations

import atexit
import functools
import logging
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Literal, TypeVar, get_args, overload

from customops._dispatch import first_use
from customops._dispatch.first_use import Callback
from customops._dispatch.name import Name
from customops._dispatch.registrations import Registration
from customops._lifetime import Owner, outside_scopes
from customops._op import CustomOpDef
from customops.errors import RegistrationError, asked_for_at, brief, user_source

F = TypeVar("F", bound=Callable[[CustomOpDef[Any, Any]], object])

#: What becomes of a callback whose op was not there when the process ended.
IfNever = Literal["skip", "report"]

log = logging.getLogger("customops")

#: The callbacks to report at exit, if they still wait.
_reported: list[Callback] = []


class WhenDefined(Owner):
    """`Registry.when_defined`."""

    def __init__(self) -> None:
        super().__init__()
        self._callbacks: list[Registration] = []

    @abstractmethod
    def adopt(self, op: Any) -> CustomOpDef[Any, Any]:
        """The object to register rules on."""

    @overload
    def when_defined(self, qualname: str, fn: None = None, /, *, if_never: IfNever = "skip") -> Callable[[F], F]: ...
    @overload
    def when_defined(self, qualname: str, fn: F, /, *, if_never: IfNever = "skip") -> F: ...
    def when_defined(self, qualname: str, fn: Any = None, /, *, if_never: IfNever = "skip") -> Any:
        """Call ``fn(op)`` now if the op is defined, or else as soon as it is defined.

        `fn` is called right after customops or `torch.library.custom_op` defines the op, or a shared library that does
        is loaded. An op defined in another way is found on its first lookup in ``torch.ops``; `fn` is called before the
        lookup returns. For a lazy op, `fn` is called when the op is actually defined. `fn` is called once, even if the
        op is defined again.

        Args:
            qualname: ``namespace::name``, or ``namespace::name.overload``.
            fn: takes the `CustomOpDef` of the op, as `adopt` returns it. Without it, a decorator is returned.
            if_never: "report": log a warning at exit if `fn` was never called; "skip": do not.

        Raises:
            DefinitionError: `qualname` is not a valid name of an op.
            RegistrationError: `if_never` has an invalid value, `fn` is not callable, or `fn` raised. An error in `fn`
                is raised here, or where the op is defined.

        Example:
            >>> @when_defined("mylib::double")
            ... def _(op):
            ...     op.register_kernel("cuda", double_cuda)
        """
        name = Name.parse(qualname)
        if if_never not in get_args(IfNever):
            expected = '"skip" or "report"'
            raise RegistrationError(
                "if_never has an invalid value", op=qualname, expected=expected, got=brief(if_never)
            )
        if fn is None:
            return functools.partial(self.when_defined, qualname, if_never=if_never)
        if not callable(fn):
            raise RegistrationError("when_defined takes a function", op=qualname, got=brief(fn))
        source = user_source()
        if first_use.is_defined(str(name)):
            Callback(str(name), functools.partial(self._call, str(name), fn), source)()
            return fn
        callback = Callback(str(name), functools.partial(self._call_later, str(name), fn, source), source)
        first_use.call_when_defined(callback)
        self._callbacks.append(Registration(functools.partial(first_use.cancel, callback)))
        self.record(self._callbacks[-1])
        if if_never == "report":
            _reported.append(callback)
        return fn

    def _call(self, qualname: str, fn: Callable[..., Any]) -> None:
        fn(self.adopt(qualname))

    def _call_later(self, qualname: str, fn: Callable[..., Any], source: str) -> None:
        with outside_scopes(), asked_for_at(source):
            self._call(qualname, fn)


@atexit.register
def _report() -> None:
    for callback in _reported:
        if first_use.is_waiting(callback):
            log.warning(
                "%s was never defined: what when_defined was given at %s was not called",
                callback.qualname,
                callback.source,
            )
