"""`CustomOpDef`: a definition and its rules, as one callable object."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, Generic, ParamSpec, TypeVar, cast

import torch
from torch.compiler import is_dynamo_compiling

from customops import _compat, _fingerprint
from customops._codegen.function import source_of
from customops._compat.libraries import Library, OpOverload
from customops._dispatch.callbacks import Fn, bind
from customops._dispatch.operator import Definition
from customops._dispatch.registrations import Undo, end_with, lock
from customops._dispatch.results import CheckPolicy, check_policy
from customops._lifetime import Owner
from customops._rules import Rules
from customops._rules.methods import Register
from customops._samples import Sample, samples_of
from customops._schema.differentiability import ALL, Differentiable
from customops._schema.model import Schema
from customops.errors import UnregisteredError, name_of, user_source

__tracebackhide__ = True  # pytest leaves the frames out

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])


class CustomOpDef(Register, Generic[P, R]):
    """An operator: callable, and the place where its rules are registered.

    Made by `custom_op`, or by `adopt` for an op that somebody else defined. Registering again replaces what was
    registered before, at once, also for calls through ``torch.ops``.

    Example:
        >>> @custom_op("mylib::double", mutates_args=())
        ... def double(x: Tensor) -> Tensor:
        ...     return x * 2
        >>> double(torch.ones(2))
        tensor([2., 2.])
    """

    _opoverload: OpOverload

    def __init__(
        self,
        owner: Owner,
        definition: Definition,
        fn: Callable[P, R] | None,
        text: str | None = None,
        when: CheckPolicy | None = None,
        differentiable: Differentiable = ALL,
    ) -> None:
        self._owner = owner
        self._text = text  # the schema as the user wrote it
        self._definition = definition
        self._opoverload = definition.overload
        self._init_fn = fn
        self._samples: Fn | None = None
        self._source = user_source()
        name = name_of(fn) if fn is not None else definition.name.name
        definition.differentiable = differentiable
        definition.when = when or check_policy(None, self._qualname)
        self._rules = Rules(definition, fn, name)
        self.__name__ = definition.name.name
        if fn is not None:
            functools.update_wrapper(cast(Any, self), cast(Any, fn), updated=())
        _fingerprint.ops.add(self)

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if is_dynamo_compiling():
            return self._opoverload(*args, **kwargs)  # type: ignore[no-any-return]
        try:
            return self._definition.entry(*args, **kwargs)  # type: ignore[no-any-return]
        except RuntimeError as error:
            self._definition.explain(error)
            raise

    # Traced where a compiled function calls it, but not compiled as a frame of its own after a graph break.
    _compat.dynamo.outside_dynamo(__call__)

    def __repr__(self) -> str:
        return f"<CustomOpDef({self._qualname})>"

    # A copy of a module that holds an op holds the same op: there is one in the dispatcher.
    def __copy__(self) -> CustomOpDef[P, R]:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> CustomOpDef[P, R]:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return self._owner._reduce(self._qualname)

    @property
    def schema(self) -> Schema:
        """The op's signature."""
        return self._definition.schema

    @property
    def tags(self) -> list[torch.Tag]:
        """The op's tags, as the dispatcher has them."""
        return list(self._opoverload.tags)

    @property
    def source(self) -> str:
        """``file:line`` where the op was defined."""
        return self._source

    def explain_call(self) -> str:
        """The Python code between the dispatcher and the kernels, as it runs in each call.

        Example:
            >>> print(double.explain_call())
            # Autograd
            def autograd(_keyset, /, x): ...
        """
        texts: dict[str, str] = {}
        if type(self) is not CustomOpDef:
            texts["bypass=True"] = source_of(type(self).__call__)
        for key, kernel in self._definition.newest_kernels().items():
            texts[key] = source_of(kernel.fn)
            if kernel.cell is not None and kernel.cell.direct is not kernel.fn:
                texts[f"{key}, called directly"] = source_of(kernel.cell.direct)
        texts |= self._rules.autograd.sources()
        return "\n".join(f"# {key}\n{text}" for key, text in texts.items() if text)

    # Samples ----------------------------------------------------------------------------------------------------

    def register_samples(self, fn: F, /) -> F:
        """Attach sample inputs: a function that yields ``args`` tuples or ``(args, kwargs)`` pairs.

        Example:
            >>> @double.register_samples
            ... def _():
            ...     yield (torch.randn(3),)
            ...     yield (torch.randn(2, 3, requires_grad=True),), {}
        """
        bind(fn, self._qualname, "samples function")
        with lock:
            before, self._samples = self._samples, fn
            self._record(functools.partial(self._unset_samples, fn, before))
        return fn

    def _unset_samples(self, fn: Fn, before: Fn | None) -> None:
        if self._samples is fn:
            self._samples = before

    def samples(self) -> Iterator[Sample]:
        """The op's sample inputs, made anew."""
        return samples_of(self._samples, self._qualname) if self._samples is not None else iter(())

    # Compilers --------------------------------------------------------------------------------------------------

    def _names_in_graphs(self) -> tuple[str, ...]:
        """The names under which graphs hold the op; none once it is removed."""
        definition = self._definition
        if definition.removed is not None:
            return ()
        return (self._qualname,) if definition.twin is None else (self._qualname, str(definition.twin.name))

    @property
    def _digest_key(self) -> str:
        return self._qualname

    def _traced(self) -> tuple[Any, ...]:
        """All that compilers may trace through, or decide by."""
        definition = self._definition
        said = (str(definition.schema), [str(tag) for tag in definition.tags], definition.differentiable)
        return (*said, *self._rules.traced())

    # Lifetime ---------------------------------------------------------------------------------------------------

    def unregister(self) -> None:
        """Remove the op from ``torch.ops``, the dispatcher, torch's registry of fakes and the registry that owns it.

        Its name is free again. Calling this object, or an OpOverload taken from it, then raises UnregisteredError.
        An adopted op loses what was registered through this object, and stays.
        """
        self._owner._remove(self)

    def _install(self, devices: tuple[str | None, ...] = ()) -> None:
        """Put all rules into the dispatcher, the op's own function for `devices`, and the op into torch's tables."""
        self._rules.install(self._definition, devices)
        library = self._definition.library
        if library is not None:
            self._torch_view = _compat.registries.claim(self._qualname, self, library)
            _compat.libraries.on_library_destroyed(
                library, functools.partial(self._owner._library_destroyed, self, library)
            )

    def _reinstall(self) -> None:
        """Come back after having been removed."""
        old = self._definition
        self._definition = Definition.define(old.name, old.schema, old.tags, self._text)
        self._definition.when, self._definition.differentiable = old.when, old.differentiable
        self._opoverload = self._definition.overload
        self._install()

    def _uninstall(self, error: UnregisteredError) -> None:
        definition = self._definition
        if definition.library is not None:
            _compat.registries.disclaim(self._qualname, definition.library)
        definition.remove(error)

    def _register(self, lib: Library | None, register: Callable[..., Undo], *args: Any) -> None:
        """``register(*args)``; what it did ends with `lib`, or with the open scope of the registry."""
        with lock:
            if self._definition.removed is not None:
                raise self._definition.removed
            if lib is None or lib is self._definition.library:
                self._record(register(*args))
                return
            self._definition.check_library(lib)
            undo = register(*args)
            self._record(undo)
            end_with(lib, undo)

    def _record(self, undo: Undo) -> None:
        self._owner._record(undo)
