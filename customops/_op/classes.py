"""The class of an op's object; of one op alone, if its ``__call__`` is generated for it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar, cast

from customops import _torch
from customops._codegen import bypass, computed
from customops._codegen.lowering import Lowering
from customops._dispatch.scopes import Sample
from customops._dispatch.spec import OpSpec, Options
from customops._op.op import CustomOpDef
from customops._schema.parse import has_signature
from customops.errors import DefinitionError, UndefinedError, brief, user_source


def class_of(spec: OpSpec, options: Options) -> type[CustomOpDef[Any, Any]]:
    """The class for an op that is called as `options` say."""
    cls: type[CustomOpDef[Any, Any]] = CustomOpDef
    if spec.fn is None:
        return cls
    if options.skip_dispatcher and bypass.obstacle(spec.schema, eager=options.eager) is None:
        call = bypass.call(spec.schema, spec.tags, spec.qualname, options.check, eager=options.eager)
        cls = _calling(cls, _torch.dynamo.outside_dynamo(call))
    parameters = spec.schema
    if spec.signature is not None:
        lowering = Lowering(spec.signature, spec.schema, spec.qualname)
        parameters = lowering.parameters
        cls = _calling(cls, lowering.call(cls.__call__ if cls is not CustomOpDef else None), _lowering=lowering)
    if spec.computed_args:
        call, complete = computed.functions(parameters, spec.computed_args, spec.qualname, cls.__call__)
        complete = staticmethod(functools.partial(complete, None))
        cls = _calling(cls, _torch.dynamo.outside_dynamo(call), _complete=complete)
        if has_signature(spec.fn):
            cls.__signature__ = computed.signature(spec.fn, spec.computed_args)  # type: ignore[assignment]
    return cls


def _calling(cls: type[CustomOpDef[Any, Any]], call: Any, **attributes: Any) -> type[CustomOpDef[Any, Any]]:
    _torch.dynamo.hidden_files.add(call.__code__.co_filename)
    return type(CustomOpDef.__name__, (cls,), {"__call__": call, **attributes})


# ``when=``: the object in the place of an op that is not to be defined here -------------------------------------------

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
