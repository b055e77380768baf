"""`Undefined`: what `custom_op` returns where its option ``when`` is False."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar, cast

from customops._codegen import computed
from customops._dispatch.callbacks import Fn
from customops._dispatch.scopes import Sample
from customops._op.methods import REGISTRATIONS
from customops._op.op import CustomOpDef
from customops.errors import UndefinedError, user_source

P = ParamSpec("P")
R = TypeVar("R")


class Undefined(CustomOpDef[P, R]):
    """What `custom_op` returns if its option ``when`` is False. Calling it calls the function.

    No operator is defined. Rules can be registered on this object, but have no effect.
    """

    def __init__(self, qualname: str, fn: Callable[P, R], computed_args: Any = None) -> None:
        self.__name__ = qualname.partition("::")[2].partition(".")[0]
        functools.update_wrapper(cast(Any, self), cast(Any, fn), updated=())
        self._fn: Any = computed.plain(fn, computed_args, qualname) if computed_args else fn
        self._source = user_source()
        self._qualname = qualname

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._fn(*args, **kwargs)  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return f"<Undefined({self._qualname})>"

    def __getattr__(self, name: str) -> Any:
        raise UndefinedError(
            f"the op is not defined, because when= is False, so it has no {name!r}",
            op=self._qualname,
            where=self._source,
            fix="call it: that runs the function; isinstance(op, customops.Undefined) tells that there is no op",
        )

    def __reduce__(self) -> tuple[Any, ...]:
        raise UndefinedError("an op that is not defined here cannot be pickled", op=self._qualname)

    @property
    def source(self) -> str:
        """``file:line`` where the op would have been defined."""
        return self._source

    def lower(self, /, *args: P.args, **kwargs: P.kwargs) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, kwargs

    def set_kernel_enabled(self, device_type: str, enabled: bool = True) -> Any:
        return contextlib.nullcontext()

    def samples(self) -> Iterator[Sample]:
        return iter(())

    def unregister(self) -> None:
        """Do nothing: there is no op to remove."""


def _ignored(method: str) -> Fn:
    """A registration that has no effect."""
    at = REGISTRATIONS[method].function

    def register(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        fn = args[at] if at is not None and len(args) > at else kwargs.get("func")
        return _same if fn is None and at is not None else fn

    return functools.wraps(getattr(CustomOpDef, method))(register)


def _same(fn: Any) -> Any:
    return fn


for _method in REGISTRATIONS:
    setattr(Undefined, _method, _ignored(_method))
