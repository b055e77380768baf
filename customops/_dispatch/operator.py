"""`OpSpec`, what an op is, and `OperatorHandle`: its overload, and the libraries through which kernels reach it."""

from __future__ import annotations

import contextlib
import itertools
import operator as operators
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from customops import _torch
from customops._dispatch import call_errors
from customops._dispatch.callbacks import Fn
from customops._dispatch.current_kernel import CurrentKernel
from customops._dispatch.devices import DeviceTypes
from customops._dispatch.names import Name
from customops._dispatch.options import DEFAULTS, Options, check_policy
from customops._dispatch.registrations import Undo, lock, nothing
from customops._places import location_of, user_stacklevel
from customops._schema.model import ALL, Differentiable, Schema
from customops._schema.parse import from_dispatcher
from customops._schema.structure import Signature
from customops._torch.library import Library, OpOverload
from customops._torch.schema import Tag, for_dispatcher
from customops._versions import cached_property
from customops.errors import DefinitionError, first_line

__tracebackhide__ = True  # pytest leaves the frames out


@dataclass(frozen=True)
class OpSpec:
    """The frozen description of an op, by its definition. An op that is restored after its removal keeps it."""

    name: Name
    schema: Schema
    tags: tuple[torch.Tag, ...] = ()
    #: The schema as the user wrote it, for the dispatcher.
    text: str | None = None
    #: The function that the op was defined from. None: it was defined by its schema, or outside customops.
    fn: Fn | None = None
    #: The types of the function's parameters and results, if the schema lacks some of them.
    signature: Signature | None = None
    #: `fn` with the schema's parameters, if these are others.
    lowered_fn: Fn | None = None
    #: The devices that `fn` is the kernel of.
    device_types: DeviceTypes = None
    options: Options = DEFAULTS
    differentiable: Differentiable = ALL
    #: Whether compilers may trace into `fn`, and run it on tensors without data.
    traceable: bool = False
    #: Whether kernels may call torch functions whose result depends on gradient mode, autocast or modes.
    kernel_calls_torch: bool = True
    #: ``file:line`` of the definition.
    source: str = ""

    qualname: str = field(init=False, repr=False, compare=False)
    #: The kernel that comes with the op.
    kernel: Fn | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        vars(self).update(qualname=self.name.qualname, kernel=self.lowered_fn or self.fn)  # the instance is frozen

    @property
    def place(self) -> str:
        """Return ``file:line`` of the function, else of the definition."""
        return location_of(self.fn) if self.fn is not None else self.source

    @cached_property
    def mutation_only(self) -> OpSpec | None:
        """Return the variant of an op for functionalization, or None if the op itself will do.

        The variant of an in-place or out op returns nothing. Arguments with reserved names have other names there.
        """
        returns_mutated = Tag.inplace in self.tags or Tag.out in self.tags
        taken = self.reserved_names if self.schema.mutated else {}
        if not (returns_mutated or taken) or self.fn is None or self.schema.is_view:
            return None
        name = Name(self.name.namespace, f"{self.name.name}__writes", self.name.overload)
        tags = tuple(tag for tag in self.tags if tag not in (Tag.inplace, Tag.out))
        schema = replace(self.schema, returns=()) if returns_mutated else self.schema
        if taken:
            arguments = [replace(a, name=taken[a.name]) if a.name in taken else a for a in schema.arguments]
            schema = replace(schema, arguments=tuple(arguments))
        return OpSpec(name, schema, tags)

    @cached_property
    def reserved_names(self) -> dict[str, str]:
        """Return other names for arguments of an op that writes, if torch's functionalization uses their names."""
        names = [argument.name for argument in self.schema.arguments]
        taken = _torch.functionalization.RESERVED.intersection(names)
        return {name: next(f"{name}{i}" for i in itertools.count() if f"{name}{i}" not in names) for name in taken}


# The fast path: kernels that may be called without going through the dispatcher again ---------------------------------

#: A guard for one kind of call, the number of its tensors, whether one requires grad, and the kernel that it runs.
Kind = tuple[_torch.dispatcher.Guard, int, bool, Any]
#: Maximum numbers of the kinds of call of an op, and of those that each call looks for.
_KINDS, _RECENT = 32, 3


class FastPath:
    """The kernels that may be called directly. Each change of the op's kernels clears it."""

    def __init__(self) -> None:
        #: Whether the op was called with tangents: see `OperatorHandle.saw_tangents`.
        self.tangents_seen = False
        #: Key set at Autograd or ADInplaceOrView, as a number -> the current kernel, or None: use the dispatcher.
        self.by_keyset: dict[int, Any] = {}
        #: Key of a device -> the same, for calls past the dispatcher, and in compiled graphs.
        self.by_device: dict[str | None, Any] = {}
        self.in_graphs: dict[Any, Any] = {}
        #: The kinds of call that go past the dispatcher, by the dtypes and dimensions of the tensors.
        self.kinds: dict[Any, list[Kind]] = {}
        #: The kinds that were used last.
        self.recent: tuple[Kind, ...] = ()

    def clear(self) -> None:
        self.by_keyset.clear()
        self.by_device.clear()
        self.in_graphs.clear()
        self.kinds, self.recent = {}, ()


#: By the name of the op, because objects of several registries can stand for one op.
_fast_paths: weakref.WeakValueDictionary[str, FastPath] = weakref.WeakValueDictionary()


def forget_fast_paths(qualname: str | None = None) -> None:
    """Clear the fast paths of an op, or of all: a kernel was registered outside customops."""
    with lock:
        paths = list(_fast_paths.values()) if qualname is None else filter(None, [_fast_paths.get(qualname)])
        for path in paths:
            path.clear()


# An operator in the dispatcher: its overload, and the libraries through which kernels reach it ------------------------


class Kernel(NamedTuple):
    """A function at a dispatch key."""

    fn: Callable[..., Any]
    with_keyset: bool  # whether it takes the key set
    #: The kernel that it calls, if the fast path may call that instead.
    current_kernel: CurrentKernel | None
    #: Whether the user chose the key, and no trampoline stands before it.
    raw: bool


class OperatorHandle:
    """An op in the dispatcher: an overload, and the libraries that its kernels go through.

    A handle with a `library` made the op and removes it. Other handles attach to an op that exists.
    """

    def __init__(
        self,
        spec: OpSpec,
        overload: OpOverload,
        library: Library | None = None,
        mutation_only: OperatorHandle | None = None,
        made_namespace: bool = False,
    ) -> None:
        if "defined" in _torch.patches.pending:
            _torch.patches.apply("defined")
        self.spec: Final = spec
        self.name: Final = spec.name
        self.qualname: Final = spec.qualname
        self.schema: Final = spec.schema
        self.tags: Final = spec.tags
        self.options: Final = spec.options
        self.differentiable: Final = spec.differentiable
        self.overload: Final = overload
        self.library: Final = library
        #: Whether rules come with the op. Otherwise it has only what is registered.
        self.has_own_rules: Final = library is not None and spec.fn is not None
        #: The variant that replaces an in-place or out op under functionalization.
        self.mutation_only: Final = mutation_only
        #: The error that a removed op raises.
        self.removed: Exception | None = None
        #: Chooses among several kernels for fakes in a trace: see `KernelRule.choose_in_trace`.
        self.choose_in_trace: Callable[[tuple[Any, ...], dict[str, Any]], str | None] = lambda args, kwargs: None
        #: Undone with the removal, beside what libraries hold.
        self.on_removal: list[Undo] = []
        known = _fast_paths.get(spec.qualname)
        self.fast_path = known or _fast_paths.setdefault(spec.qualname, FastPath())
        if known is not None and library is not None:
            known.clear()  # it may be that of an op that had the name
        #: Whether the definition made the namespace in ``torch.ops``.
        self.made_namespace: Final = made_namespace
        #: The handle of the op after it was removed and restored.
        self.successor: OperatorHandle | None = None
        self._added: list[Library] = []
        #: The Python kernels at each key, newest last.
        self._kernels: dict[str, list[Kernel]] = {}

    @property
    def _digest_key(self) -> str:
        return self.qualname

    @property
    def live(self) -> OperatorHandle:
        """Return the current handle of the op, also after it was removed and restored."""
        handle = self
        while handle.successor is not None:
            handle = handle.successor
        return handle

    @classmethod
    def define(cls, spec: OpSpec) -> OperatorHandle:
        """Define an op.

        Raises:
            DefinitionError: torch refuses the schema or the tags. Nothing has changed then.
        """
        made_namespace = not _torch.library.exists(spec.name.namespace)
        library, overload = _define(spec.name, spec.text or spec.schema.text, spec.tags, made_namespace)
        try:
            variant = cls.define(spec.mutation_only) if spec.mutation_only is not None else None
        except BaseException:
            _torch.library.destroy_library(library)
            raise
        return cls(spec, overload, library, variant, made_namespace)

    def restored(self) -> OperatorHandle:
        """Define the op again, after its removal."""
        self.successor = self.define(self.spec)
        return self.successor

    @classmethod
    def define_from_text(cls, name: Name, text: str, tags: tuple[torch.Tag, ...], source: str) -> OperatorHandle:
        """Define an op by a schema that torch reads."""
        options = Options(check_policy(None, name.qualname))
        library, overload = _define(name, text, tags, not _torch.library.exists(name.namespace))
        spec = OpSpec(name, from_dispatcher(overload._schema), tags, text, options=options, source=source)
        return cls(spec, overload, library)

    @classmethod
    def attach(cls, overload: OpOverload, source: str) -> OperatorHandle:
        """Return a handle to an op that exists."""
        name = Name.parse(_torch.library.name_of_overload(overload))
        options = Options(check_policy(None, name.qualname))
        spec = OpSpec(name, from_dispatcher(overload._schema), tuple(overload.tags), options=options, source=source)
        return cls(spec, overload)

    def impl(
        self,
        fn: Callable[..., Any],
        key: str,
        *,
        with_keyset: bool = False,
        own_library: bool = False,
        current_kernel: CurrentKernel | None = None,
        raw: bool = False,
    ) -> Undo:
        """Install `fn` at a dispatch key, and return how to remove it.

        The dispatcher removes kernels only with their library, so later kernels (`own_library`) have their own.
        """
        library, undo = self._library(own_library)
        try:
            if library is self.library:  # what comes with the op overrides nothing
                _torch.library.torch_impl(
                    library, self.name.local, fn, key, with_keyset=with_keyset, allow_override=True
                )
            else:
                _torch.library.impl(library, self.name.local, fn, key, with_keyset=with_keyset)
        except BaseException:
            undo()
            raise
        kernel = Kernel(fn, with_keyset, current_kernel, raw)
        self._kernels.setdefault(key, []).append(kernel)
        if library is self.library:  # nothing is remembered of an op that is being defined
            return undo
        self._forget_dispatch()

        def take_back() -> None:
            undo()
            self.forget(key, kernel)
            self._forget_dispatch()

        return take_back

    def impl_fake(self, fn: Callable[..., Any], source: str, *, own_library: bool = False) -> Undo:
        """Install `fn`, of `source`, as the fake: at Meta, and in the registry where FakeTensorMode looks."""
        library, undo = self._library(own_library)
        try:
            if self.library is not None:
                _torch.library.enter_fake(library, self.qualname, fn, source)
            else:
                stacklevel = user_stacklevel()  # torch takes that frame for the place of the registration
                _torch.library.register_fake(library, self.name.local, fn, _stacklevel=stacklevel, allow_override=True)
        except BaseException:
            undo()
            raise
        return undo

    def impl_torch_dispatch(self, cls: type, fn: Callable[..., Any], *, own_library: bool = False) -> Undo:
        """Install `fn` as the rule of a dispatch mode or tensor subclass."""
        library, undo = self._library(own_library)
        try:
            _torch.library.register_torch_dispatch(library, self.name.local, cls, fn)
        except BaseException:
            undo()
            raise
        return undo

    def impl_effect(self, effect: Any) -> Undo:
        """Tell torch which side effect calls of the op have."""
        library, undo = self._library(own_library=True)
        try:
            _torch.library.register_effect(library, self.qualname, effect)
        except BaseException:
            undo()
            raise
        self.recompile()
        return undo

    def impl_view_fallback(self) -> None:
        """Let torch make the outputs of a view op true views of its input."""
        library, _ = self._library(own_library=False)
        _torch.library.install_view_fallback(library, self.name.local)

    def _library(self, own_library: bool) -> tuple[Library, Undo]:
        if self.library is not None and not own_library:
            return self.library, nothing
        library = Library(self.name.namespace, "FRAGMENT")
        self._added.append(library)

        def drop() -> None:
            _torch.library.destroy_library(library)
            if library in self._added:
                self._added.remove(library)

        return library, drop

    def forget(self, key: str, kernel: Kernel) -> None:
        """Let torch remember the kernel that runs in the place of one that is gone from the dispatcher."""
        kernels = self._kernels[key]
        if kernel not in kernels:
            return
        kernels.remove(kernel)
        # On a living op, nothing calls the remembered kernel of a key without kernels; others may have one there.
        gone = _torch.library.find_overload(self.name.packet, self.name.overload) is None
        if kernels or gone or _torch.dispatcher.has_kernel(self.qualname, key):
            newest = kernels[-1][:2] if kernels else None
            if newest is None and not gone:
                newest = _torch.library.lost_kernel(self.qualname, key), False
            _torch.library.remember_kernel(self.name.namespace, self.name.local, key, newest)

    def recompile(self) -> None:
        """Let compiled code that holds the op be compiled anew: what compilers trace has changed."""
        _torch.dynamo.recompile(self.qualname)
        if Tag.out in self.tags and self.name.overload:  # inductor calls it in the place of the functional op
            _torch.dynamo.recompile(self.name.packet)

    def inspect_compiled(self) -> None:
        """Inspect the next call of each kernel, because a compiler relies on the fake impl."""
        for kernels in self._kernels.values():
            for kernel in kernels:
                if kernel.current_kernel is not None:
                    kernel.current_kernel.inspect(compiled=True)

    def _forget_dispatch(self) -> None:
        """Forget which kernels keys lead to."""
        self.fast_path.clear()
        _torch.library.dispatch_cache(self.overload).clear()

    def saw_tangents(self) -> None:
        """Turn off the fast path, so that each call looks for tangents.

        A compiled graph can open a forward-mode level that Python does not see; the op saw the tangents when traced.
        """
        with lock:
            self.fast_path.tangents_seen = True
            self.fast_path.clear()

    def find_fast_path(self, keyset: Any) -> Any:
        """Return the kernel that may be called directly for a key set at Autograd or ADInplaceOrView, or None.

        It is the kernel of the device, if no other key of the key set acts, and all kernels on the way are ours: the
        dispatcher does not tell which of several it would choose.
        """
        with lock:
            backend = _torch.dispatcher.plain_backend(keyset.raw_repr(), bool(self.schema.mutated))
            self.fast_path.by_keyset[keyset.raw_repr()] = found = self._find_kernel(backend, dispatched=True)
        return found

    def find_past_dispatcher(self, tensors: Sequence[Tensor]) -> Any:
        """Return the kernel that a call with these tensors may run without the dispatcher, or None."""
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            return None
        if _torch.dispatcher.mode_count() or _torch.dispatcher.transforms_active():
            return None
        if _torch.dispatcher.autocast_is_on():
            return None
        path, tensors = self.fast_path, list({id(tensor): tensor for tensor in tensors}.values())
        key = tuple([(tensor.dtype, tensor.ndim) for tensor in tensors])
        with lock:
            for kind in path.kinds.get(key, ()):
                if kind[0](*tensors):  # the next call looks for it first
                    path.recent = (kind, *(each for each in path.recent if each is not kind))[:_RECENT]
                    return kind[-1]
            if sum(map(len, path.kinds.values())) >= _KINDS:  # looking for kinds takes time
                return None
            backend = _torch.dispatcher.plain_tensors(tensors)
            if backend not in path.by_device:
                path.by_device[backend] = self._find_kernel(backend, dispatched=False)
            current_kernel = path.by_device[backend]
            looks_same = None if current_kernel is None else _torch.dispatcher.guard_of(tensors)
            if looks_same is None:
                return None
            kind = (looks_same, len(tensors), any(tensor.requires_grad for tensor in tensors), current_kernel)
            path.kinds.setdefault(key, []).append(kind)
            path.recent = (kind, *path.recent)[:_RECENT]
            return current_kernel

    def find_fast_path_in_graphs(self, backend: str | tuple[str, str]) -> Any:
        """Return the kernel that graphs may call for dense tensors of a device, given by its key or ``(key, name)``.

        An op with an autocast rule has none.
        """
        known = self.fast_path.in_graphs
        with contextlib.suppress(KeyError):  # in one step: another thread may clear the table
            return known[backend]
        with lock:
            key, name = (backend, None) if isinstance(backend, str) else backend
            has_autocast = bool(self._kernels.get(f"Autocast{key}"))
            found = None if has_autocast else self._find_kernel(key, dispatched=False)
            chooser = getattr(found and found.registered, "chooser", None)
            if name is not None and chooser is not None:
                found = chooser.named(name)
            known[backend] = found
        return found

    def _find_kernel(self, backend: str | None, *, dispatched: bool) -> Any:
        """Return the kernel that a device runs, if all kernels on the way are those of rules.

        The way starts at ADInplaceOrView for a dispatched call; for others, which have no keys of modes, above it.
        """
        # Meta has no fast path: registrations there, as of each fake, clear none.
        if backend is None or backend == "Meta" or self.fast_path.tangents_seen or not _torch.patches.enabled:
            return None
        above = [] if dispatched else ["Autograd", f"Autograd{backend}", f"Autocast{backend}", "BackendSelect"]
        current_kernel = self.kernel_on(backend, ["ADInplaceOrView", *above])
        return current_kernel if current_kernel is not None and current_kernel.direct is not None else None

    def kernel_on(self, backend: str, above: Iterable[str] = ()) -> CurrentKernel | None:
        """Return the kernel that a device runs, or None if a kernel on the way is not one of a rule."""
        if self.removed is not None:
            return None
        registered, found = _torch.dispatcher.registered_at(self.qualname), None
        below = ["CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional", backend]  # the last one wins
        for key in (*above, *below):
            kernels = self._kernels.get(key, ())
            if len(registered.get(key, ())) != len(kernels) - sum(map(_is_raw, kernels)):
                return None
            if kernels and key in below:
                found = kernels[-1].current_kernel
        return found

    def explain(self, error: RuntimeError, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> None:
        """Raise a clearer error for an error of the dispatcher in a call of the op."""
        call_errors.explain(error, self.name, self.schema, self.spec.signature, args, kwargs or {})

    def newest_kernels(self) -> dict[str, Kernel]:
        """Return our newest kernel at each dispatch key, with Autograd first."""
        keys = sorted(self._kernels, key=lambda key: key != "Autograd")
        return {key: self._kernels[key][-1] for key in keys if self._kernels[key]}


_is_raw = operators.attrgetter("raw")


def _define(name: Name, text: str, tags: tuple[torch.Tag, ...], made_namespace: bool) -> tuple[Library, OpOverload]:
    """Define an op in a library of its own, and leave nothing behind if torch refuses.

    `made_namespace`: the definition makes the namespace in ``torch.ops``.
    """
    library = Library(name.namespace, "FRAGMENT")
    try:
        define_in(library, name, text, tags)
        return library, _torch.library.overload_of(name.packet, name.overload)
    except Exception:
        _torch.library.destroy_library(library)
        if made_namespace:
            _torch.library.forget(name.namespace)
        raise


def define_in(library: Library, name: Name, text: str, tags: tuple[torch.Tag, ...]) -> None:
    """Define an op in a library, or raise DefinitionError with the first line of torch's reason."""
    try:
        library.define(name.local + text, tags=for_dispatcher(tags))
        _torch.library.move_stand_ins(name.packet)
    except Exception as error:
        reason = first_line(error) or type(error).__name__
        raise DefinitionError(
            f"torch refuses the definition: {reason.rstrip(' :')}",
            op=name.qualname,
            got=text,
            fix='correct the schema, which looks like "(Tensor x, float by=1.0) -> Tensor"',
        ) from error


# Removing an op from the dispatcher and from torch's tables -----------------------------------------------------------


def remove(operator: OperatorHandle, error: Exception) -> None:
    """Remove an op of ours, or from an adopted one what was registered; handles to a removed op raise `error`."""
    operator.removed = error
    operator.recompile()
    _torch.inductor.forget(operator.overload)
    if operator.mutation_only is not None:
        remove(operator.mutation_only, error)
    while operator.on_removal:
        operator.on_removal.pop()()
    for library in operator._added:
        _torch.library.destroy_library(library)
    operator._added.clear()
    if operator.library is not None:
        # also if it was destroyed outside customops: see there
        _torch.library.destroy_operator(operator.library, operator.name.packet)
        _torch.library.forget_signature(operator.name.packet, operator.name.overload)
        _torch.library.forget_entry(operator.qualname)
        _torch.library.retire_overload(operator.overload, error)
    for key, kernels in operator._kernels.items():
        for kernel in list(kernels):
            operator.forget(key, kernel)
    operator._forget_dispatch()
    operator.fast_path = FastPath()  # the other one belongs to the name, which another op may take
    if operator.library is not None:
        _torch.library.remember_kernel(operator.name.namespace, operator.name.local, "Meta", None)


_torch.hooks.kernel_registered = forget_fast_paths
