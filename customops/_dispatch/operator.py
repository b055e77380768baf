"""An operator in the dispatcher: its overload, and the libraries through which kernels reach it."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from customops import _compat
from customops._compat.libraries import Library, OpOverload
from customops._dispatch.callbacks import Fn
from customops._dispatch.fast_path import DirectKernels, _direct
from customops._dispatch.name import Name
from customops._dispatch.registrations import Undo, lock, nothing
from customops._dispatch.results import CheckPolicy
from customops._schema.differentiability import ALL, Differentiable
from customops._schema.model import Schema
from customops._schema.parse import from_dispatcher
from customops.errors import DefinitionError, RegistrationError, UnsupportedError, user_stacklevel

__tracebackhide__ = True  # pytest leaves the frames out


class Kernel(NamedTuple):
    """A function at a dispatch key."""

    fn: Callable[..., Any]
    with_keyset: bool  # is it given the key set?
    #: The cell that it reads (see `_trampoline`), if a trampoline above may do in its place what it does.
    cell: Any
    #: Is it the user's own, put at a key of their choice?
    raw: bool


#: What the dispatcher says to an argument that is no tensor, where it wants one or a list of them.
_WRONG_TYPE = re.compile(r".*Expected a value of type '(Tensor|List\[Tensor\])' for argument '(\w+)' but instead found")


@dataclass(eq=False)
class Definition:
    """Where rules are installed: an overload, and the libraries that their kernels go through.

    A definition with a `library` made the op and removes it again. The others attach to an op that exists.
    """

    name: Name
    schema: Schema
    tags: tuple[torch.Tag, ...]
    overload: OpOverload
    library: Library | None = None
    #: What to raise for an op that is gone.
    removed: Exception | None = None
    when: CheckPolicy = "always"
    differentiable: Differentiable = ALL
    #: What stands for an in-place or out op under functionalization.
    twin: Definition | None = None
    _added: list[Library] = field(default_factory=list)
    #: The Python kernels at each key, newest last.
    _kernels: dict[str, list[Kernel]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.direct = _direct.setdefault(str(self.name), DirectKernels())
        #: What calling the overload comes to, a frame later.
        self.entry = _compat.libraries.entry_of(self.overload)

    @property
    def _digest_key(self) -> str:
        return str(self.name)

    @classmethod
    def define(
        cls, name: Name, schema: Schema | None, tags: tuple[torch.Tag, ...], text: str | None = None
    ) -> Definition:
        """Define an op by its schema, or by `text`, which then is what the dispatcher gets.

        Raises:
            DefinitionError: torch refuses the schema or the tags. Nothing is left behind.
        """
        known = _compat.libraries.namespace_exists(name.namespace)
        library = Library(name.namespace, "FRAGMENT")
        try:
            library.define(name.local + (text or str(schema)), tags=tags)
            overload = _compat.libraries.overload_of(name.packet, name.overload)
        except Exception as error:
            _compat.libraries.destroy_library(library)
            if not known:
                _compat.libraries.forget_namespace(name.namespace)
            raise refused_error(error, name, text or str(schema)) from error
        return cls(name, schema or from_dispatcher(overload._schema), tags, overload, library)

    @classmethod
    def attach(cls, overload: OpOverload) -> Definition:
        """A definition for an op that exists already."""
        name = _compat.libraries.name_of_overload(overload)
        return cls(Name.parse(name), from_dispatcher(overload._schema), tuple(overload.tags), overload)

    def check_library(self, lib: Library) -> None:
        """Raise unless registrations on the op can end with `lib`."""
        if not _compat.libraries.library_alive(lib):
            raise RegistrationError("the library given as lib= has been destroyed", op=str(self.name))
        if lib.ns != self.name.namespace:
            raise RegistrationError(
                "the library given as lib= is of another namespace than the op",
                op=str(self.name),
                got=f"a Library of namespace {lib.ns!r}",
                fix=f'Library("{self.name.namespace}", "FRAGMENT")',
            )

    def impl(
        self,
        fn: Callable[..., Any],
        key: str,
        *,
        with_keyset: bool = False,
        apart: bool = False,
        cell: Any = None,
        raw: bool = False,
    ) -> Undo:
        """Install `fn` at a dispatch key; calling what is returned takes it away again.

        The dispatcher takes kernels back only with their library. What comes with the op goes through the op's own;
        what is added later (`apart`) has a library of its own.
        """
        library, undo = self._library(apart)
        try:
            _compat.libraries.impl(library, self.name.local, fn, key, with_keyset=with_keyset)
        except BaseException:
            undo()
            raise
        kernel = Kernel(fn, with_keyset, cell, raw)
        self._kernels.setdefault(key, []).append(kernel)
        self._forget_dispatch()
        return undo if undo is nothing else functools.partial(self._take_back, undo, key, kernel)

    def impl_fake(self, fn: Callable[..., Any], source: str, *, apart: bool = False) -> Undo:
        """Install `fn`, of `source`, as the fake: at Meta, and in the registry where FakeTensorMode looks."""
        library, undo = self._library(apart)
        if self.library is not None:
            _compat.registries.enter_fake(library, str(self.name), fn, source)
        else:
            _compat.registries.register_fake(library, self.name.local, fn, user_stacklevel())
        return undo

    def impl_torch_dispatch(self, cls: type, fn: Callable[..., Any], *, apart: bool = False) -> Undo:
        """Install `fn` as the rule of a dispatch mode or tensor subclass."""
        library, undo = self._library(apart)
        _compat.registries.register_torch_dispatch(library, self.name.local, cls, fn)
        return undo

    def impl_effect(self, effect: Any) -> Undo:
        """Tell torch which side effect calls of the op have."""
        library, undo = self._library(apart=True)
        _compat.registries.register_effect(library, str(self.name), effect)
        self.recompile()
        return undo

    def impl_view_fallback(self) -> None:
        """Let torch make the outputs of a view op true views of its input."""
        library, _ = self._library(apart=False)
        _compat.libraries.install_view_fallback(library, self.name.local)

    def _library(self, apart: bool) -> tuple[Library, Undo]:
        if self.library is not None and not apart:
            return self.library, nothing
        library = Library(self.name.namespace, "FRAGMENT")
        self._added.append(library)
        return library, functools.partial(self._drop, library)

    def _drop(self, library: Library) -> None:
        _compat.libraries.destroy_library(library)
        if library in self._added:
            self._added.remove(library)

    def _take_back(self, undo: Undo, key: str, kernel: Kernel) -> None:
        undo()
        self._forget(key, kernel)
        self._forget_dispatch()

    def _forget(self, key: str, kernel: Kernel) -> None:
        """A kernel is gone from the dispatcher; let torch remember the one that now runs in its place."""
        kernels = self._kernels[key]
        if kernel not in kernels:
            return
        kernels.remove(kernel)
        # On a living op without a kernel at the key nothing calls what is remembered; with one, it is somebody else's.
        gone = _compat.libraries.find_overload(self.name.packet, self.name.overload) is None
        if kernels or gone or _compat.dispatch.has_kernel(str(self.name), key):
            newest = kernels[-1][:2] if kernels else None
            _compat.libraries.remember_kernel(self.name.namespace, self.name.local, key, newest)

    def recompile(self) -> None:
        """What compilers trace of the op has changed: compiled code that holds it is compiled anew."""
        _compat.dynamo.recompile(str(self.name))

    def _forget_dispatch(self) -> None:
        """Kernels came or went: where a key leads has to be found out anew."""
        self.direct.clear()
        _compat.libraries.forget_dispatch(self.overload)

    def saw_tangents(self) -> None:
        """From now on look for tangents in each call: it is not called directly any more.

        A compiled graph opens levels of forward mode without telling Python, so that none may seem to be open where
        one is. But what it does was traced before, and then this op saw the tangents.
        """
        with lock:
            self.direct.tangents_seen = True
            self.direct.clear()

    def find_direct(self, keyset: Any) -> Any:
        """The cell of the kernel that may be called directly for a key set at Autograd, or None: use the dispatcher.

        That is the kernel of the device, if the key set holds nothing else that acts, and if all kernels that the
        dispatcher could come to are ours: it does not tell which of several it would choose.
        """
        with lock:
            backend = _compat.dispatch.plain_backend(keyset, writes=bool(self.schema.mutated))
            self.direct.at_autograd[keyset.raw_repr()] = found = self._find_cell(backend, ["ADInplaceOrView"])
        return found

    def find_direct_of(self, keys: Any, included: Any) -> None:
        """The same for the keys of a tensor and those that are active in a thread. An op with autocast has none."""
        with lock:
            backend, counts_versions = _compat.dispatch.plain_tensor(keys, included)
            above = ["ADInplaceOrView", "Autograd", f"Autograd{backend}", f"Autocast{backend}", "BackendSelect"]
            found = self._find_cell(backend, above)
            if self._kernels.get(f"Autocast{backend}") or (self.schema.mutated and not counts_versions):
                found = None
            self.direct.of_tensors[keys.raw_repr(), included.raw_repr()] = found

    def _find_cell(self, backend: str | None, above: list[str]) -> Any:
        """The cell of the kernel that a device runs, if all kernels there, at the keys `above` and below are rules'."""
        if backend is None or self.removed is not None or self.direct.tangents_seen:
            return None
        counts = _compat.dispatch.count_kernels(str(self.name))
        below = ["CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional", backend]  # the last one wins
        for key in (*above, *below):
            if counts[key] != sum(not kernel.raw for kernel in self._kernels.get(key, ())):
                return None
        cell = next((self._kernels[key][-1].cell for key in reversed(below) if self._kernels.get(key)), None)
        return cell if cell is not None and cell.direct is not None else None

    def explain(self, error: RuntimeError) -> None:
        """Raise, in the place of what a call of the op raised, what says more in fewer lines; or add what to do."""
        text = str(error)
        if text.startswith(f"Could not run '{self.name}' with arguments from the "):
            raise self._no_kernel(text.split("'")[3]) from None
        given = _WRONG_TYPE.match(text)
        if given is not None and text.startswith(f"{self.name}() "):
            convert = "[torch.as_tensor(x) for x in {}]" if given[1].startswith("List") else "torch.as_tensor({})"
            error.args = (f"{text}\nfix: {convert.format(given[2])}",)

    def _no_kernel(self, backend: str) -> UnsupportedError:
        """The error for tensors of a backend for which there is no kernel. It starts as torch's, which is 47 lines."""
        present = _compat.dispatch.devices_with_kernel(str(self.name))
        device = _compat.dispatch.device_of_key(backend)
        register = (
            f'op.register_kernel("{device}", fn)' if device else f'customops.impl("{self.name}", "{backend}", fn)'
        )
        return UnsupportedError(
            f"Could not run '{self.name}' with arguments from the '{backend}' backend: it has no kernel there",
            op=str(self.name),
            expected=f"tensors on {' or '.join(present)}" if present else "some kernel",
            fix=register + (f', or move the tensors to "{present[0]}"' if present else ""),
        )

    def newest_kernels(self) -> dict[str, Kernel]:
        """The kernel of ours that counts at each dispatch key, the keys above first."""
        keys = sorted(self._kernels, key=lambda key: key != "Autograd")
        return {key: self._kernels[key][-1] for key in keys if self._kernels[key]}

    def remove(self, error: Exception) -> None:
        """Take everything back that went through this definition; handles to a removed op raise `error`."""
        self.removed = error
        self.recompile()
        if self.twin is not None:
            self.twin.remove(error)
        for library in self._added:
            _compat.libraries.destroy_library(library)
        self._added.clear()
        if self.library is not None:
            _compat.libraries.destroy_library(self.library)  # also where somebody else has destroyed it: see there
            _compat.libraries.forget_signature(self.name.packet, self.name.overload)
            _compat.registries.forget_entry(str(self.name))
            _compat.libraries.retire_overload(self.overload, error)
            self.entry = _compat.libraries.entry_of(self.overload)
        for key, kernels in self._kernels.items():
            for kernel in list(kernels):
                self._forget(key, kernel)
        self._forget_dispatch()
        self.direct = DirectKernels()  # the other one is of the name, which may soon be another op's
        if self.library is not None:
            _compat.libraries.remember_kernel(self.name.namespace, self.name.local, "Meta", None)


def with_pt2_compliant(tags: tuple[torch.Tag, ...]) -> tuple[torch.Tag, ...]:
    """The tags of an op that torch.compile may rely on."""
    compliant = torch.Tag.pt2_compliant_tag
    return (compliant, *(tag for tag in tags if tag is not compliant))


def refused_error(error: Exception, name: Name, text: str) -> DefinitionError:
    """torch's reason, in one line, for not defining an op."""
    reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return DefinitionError(f"torch refuses the definition: {reason}", op=str(name), got=text)


class CurrentKernel:
    """What a kernel's trampoline calls. Registering again, or switching off, changes `fn`; the trampoline stays."""

    __slots__ = ("direct", "fn", "unchecked")

    def __init__(self, fn: Fn) -> None:
        self.set(fn)
        #: The kernel's trampoline, for a call that skips the keys between autograd and the device.
        self.direct: Fn | None = None

    def set(self, fn: Fn) -> None:
        self.fn = fn
        self.unchecked = True
