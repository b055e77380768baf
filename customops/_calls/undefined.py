"""``when=``: the object in the place of an op that is not to be defined here."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar, cast

from customops._calls import computed
from customops._op import CustomOpDef
from customops._samples import Sample
from customops.errors import DefinitionError, UndefinedError, brief, user_source

P = ParamSpec("P")
R = TypeVar("R")


def is_wanted(when: Any, op: str) -> bool:
    """Is an op to be defined? `when` is a bool, or a function that returns one.

    Raises:
        DefinitionError: it is something else.
    """
    value = when() if callable(when) else when
    if not isinstance(value, bool):
        raise DefinitionError("when must be True or False, or a function that returns one", op=op, got=brief(value))
    return value


class Undefined(CustomOpDef[P, R]):
    """What `custom_op` returns if its option ``when`` is False. Calling it calls the function.

    No operator is defined. Rules can be registered on this object, but have no effect.
    """

    def __init__(self, qualname: str, fn: Callable[P, R], computed_args: Any = None) -> None:
        self.__name__ = qualname.partition("::")[2].partition(".")[0]
        functools.update_wrapper(cast(Any, self), cast(Any, fn), updated=())
        self._fn: Any = computed.plain(fn, computed_args, qualname) if computed_args else fn
        self._source = user_source()
        self._name = qualname
        self._rules = cast(Any, _Nothing())

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._fn(*args, **kwargs)  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return f"<Undefined({self._name})>"

    def __getattr__(self, name: str) -> Any:
        raise UndefinedError(
            f"the op is not defined, because when= is False, so it has no {name!r}",
            op=self._name,
            where=self._source,
            fix="call it: that runs the function; isinstance(op, customops.Undefined) tells that there is no op",
        )

    def __reduce__(self) -> tuple[Any, ...]:
        raise UndefinedError("an op that is not defined here cannot be pickled", op=self._name)

    @property
    def _qualname(self) -> str:
        return self._name

    @property
    def source(self) -> str:
        """``file:line`` where the op would have been defined."""
        return self._source

    def lower(self, /, *args: P.args, **kwargs: P.kwargs) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, kwargs

    def set_kernel_enabled(self, device_type: str, enabled: bool = True) -> Any:
        return contextlib.nullcontext()

    def register_fake(self, fn: Any = None, /, **options: Any) -> Any:  # what is declared by `like`, too
        return _same if fn is None else fn

    def register_autograd_from(self, fn: Any, /, **options: Any) -> Any:
        return fn

    def register_replacement(self, pattern: Any = None, /, **options: Any) -> Any:
        return _same if pattern is None else pattern

    def register_samples(self, fn: Any = None, /, **options: Any) -> Any:
        return _same if fn is None else fn

    def samples(self) -> Iterator[Sample]:
        return iter(())

    def unregister(self) -> None:
        """Do nothing: there is no op to remove."""

    def _register(self, *registration: Any) -> None:
        """Nowhere."""


def _same(fn: Any) -> Any:
    return fn


class _Nothing:
    """In the place of rules, which are handed to `_register`."""

    def __getattr__(self, name: str) -> _Nothing:
        return self
