"""`Settings`: how the ops of a namespace are called, whatever their definitions say."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, TypedDict

from typing_extensions import Unpack

from customops._codegen.function import generate_again
from customops._dispatch.operator import OperatorHandle
from customops._dispatch.registrations import Registration, Undo, lock
from customops._dispatch.results import VALUES, CheckPolicy, expected, of_environment
from customops._dispatch.scopes import Owner
from customops._dispatch.spec import OpSpec, Options
from customops._op.classes import class_of
from customops._op.op import CustomOpDef
from customops._rules import graph_calls
from customops.errors import DefinitionError, brief


class Configured(TypedDict, total=False):
    """What `Registry.configure` takes. None gives an option back to what each op says."""

    check: CheckPolicy | None
    bypass: bool | None
    eager: bool | None
    direct_in_graphs: bool | None


class Settings:
    """What `Registry.configure` was told, by namespace. The environment counts more, the definition of an op less."""

    def __init__(self) -> None:
        self._of: dict[str, dict[str, Any]] = {}

    def set(self, namespace: str, given: dict[str, Any]) -> Undo:
        """Change the settings of a namespace; what is returned puts them back.

        Raises:
            DefinitionError: the namespace is no name of one, or an option has an invalid value. Nothing is changed.
        """
        if not isinstance(namespace, str) or not namespace.isidentifier():
            raise DefinitionError(
                "configure takes the name of a namespace", got=brief(namespace), fix='registry.configure("mylib", ...)'
            )
        for option, value in given.items():
            if option not in VALUES:
                raise DefinitionError(
                    "configure has no such option", op=namespace, expected=", ".join(VALUES), got=option
                )
            if value is not None and not any(value is each for each in VALUES[option].values()):
                raise DefinitionError(
                    f"{option}= has an invalid value",
                    op=namespace,
                    expected=f"{expected(option) if option == 'check' else 'True, False'}, or None: as each op says",
                    got=brief(value),
                )
        before = self._of.get(namespace, {})
        self._put(namespace, given)
        return functools.partial(self._put, namespace, {option: before.get(option) for option in given})

    def _put(self, namespace: str, given: dict[str, Any]) -> None:
        """Others stay as they are: another thread may have set them inside a scope of this one."""
        settings = self._of.get(namespace, {}) | given
        self._of[namespace] = {option: value for option, value in settings.items() if value is not None}

    def clear(self) -> None:
        self._of.clear()

    def apply(self, ops: Iterable[CustomOpDef[Any, Any]]) -> None:
        """Let ops be called as is set."""
        for op in ops:
            operator = op._definition
            options = self._options(operator.spec, self._of.get(operator.name.namespace, {}))
            if options != operator.options and operator.removed is None:
                _change(op, operator, options)

    def _options(self, spec: OpSpec, settings: dict[str, Any]) -> Options:
        own = spec.options
        if not settings:
            return own
        given = {option: of_environment(option, spec.qualname) for option in settings}
        return own._replace(**{k: settings[k] if value is None else value for k, value in given.items()})


class Configurable(Owner):
    """`Registry.configure`."""

    _ops: dict[str, CustomOpDef[Any, Any]]
    _adopted: dict[str, CustomOpDef[Any, Any]]

    def __init__(self) -> None:
        super().__init__()
        self._settings = Settings()

    def configure(self, namespace: str, **options: Unpack[Configured]) -> None:
        """Override options of all ops of a namespace in this registry, also of ops that are defined later.

        The setting takes effect immediately. It overrides the options given to `custom_op`; environment variables
        override it. Inside `scope` it ends with the scope. For adopted ops, only `check` applies.

        Args:
            namespace: the namespace of the ops, as in ``namespace::name``.
            options: ``check``, ``bypass``, ``eager`` and ``direct_in_graphs``, as for `custom_op`. None ends the
                override of an option. Options that are left out do not change.

        Raises:
            DefinitionError: an option has an invalid value. Nothing is changed.

        Example:
            >>> default_registry.configure("mylib", check="never", bypass=True)
        """
        with lock:
            undo = self._settings.set(namespace, dict(options))
            try:
                self._apply_settings(namespace)
            except BaseException:
                undo()
                raise
            self.record(Registration(functools.partial(self._take_back, namespace, undo)))

    def apply_settings(self, op: CustomOpDef[Any, Any]) -> None:
        """Apply the configured options to an op that was added or restored. Undefined lazy ops are skipped."""
        if "_definition" in vars(op):
            self._settings.apply([op])

    def _take_back(self, namespace: str, undo: Undo) -> None:
        undo()
        self._apply_settings(namespace)

    def _apply_settings(self, namespace: str) -> None:
        known = [*self._ops.values(), *self._adopted.values()]
        for op in known:
            if op._qualname.partition("::")[0] == namespace:
                self.apply_settings(op)


def _change(op: CustomOpDef[Any, Any], operator: OperatorHandle, options: Options) -> None:
    before, operator.options = operator.options, options
    if before.check != options.check:
        for kernel in (each for kernels in operator._kernels.values() for each in kernels if not each.raw):
            generate_again(kernel.fn, when=options.check)
            if kernel.current_kernel is not None:
                kernel.current_kernel.unchecked = True
                if kernel.current_kernel.direct is not None:
                    generate_again(kernel.current_kernel.direct, when=options.check)
        op._rules.autograd.regenerate()
    if operator.spec.fn is not None:
        op.__class__ = class_of(operator.spec, options)
    if before.direct_in_graphs != options.direct_in_graphs:
        graph_calls.bind(operator)
    operator.recompile()
