"""Several kernels for one device: which of them runs for the arguments of a call.

The kernels of a device, and those for all devices, are *alternatives*. They are asked in order: those that are
preferred (`_dispatch.preference`), then by their priority, those of the device itself before those of all, the newest
first. The reference is the last. The first that has no ``when``, or whose ``when`` says yes, runs.

What was chosen is kept. By default the key is all that a tensor without data shows of the arguments: so ``when`` gets
tensors without data, in eager mode, too, and cannot read what the key does not hold.
"""

from __future__ import annotations

import functools
import itertools
import logging
import types
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from customops import _torch
from customops._codegen.choice import Holds, choice
from customops._dispatch.callbacks import Fn
from customops._dispatch.current_kernel import CurrentKernel
from customops._dispatch.operator import OperatorHandle
from customops._dispatch.preference import Tables, here, is_name, names_for, preferred_by_name
from customops._dispatch.results import given
from customops._places import innermost, where
from customops._schema.model import Schema
from customops._torch.trees import tensors_in
from customops.errors import (
    CallbackError,
    CustomOpsError,
    KernelError,
    NoKernelError,
    RegistrationError,
    brief,
    did_you_mean,
    first_line,
)

__tracebackhide__ = True  # pytest leaves the frames out

log = logging.getLogger("customops")

#: The names of the kernel that was registered without one, and of the op's reference.
DEFAULT, REFERENCE = "default", "reference"
#: A key: what a tensor without data shows of the arguments.
ARGUMENTS = "arguments"
#: So many choices are kept for a device of an op, so many have a guard of those whose first tensor has one shape, and
#: so many are looked for first.
_KEPT, _ALIKE, _RECENT = 256, 8, 3
PLAIN = (Tensor, torch.nn.Parameter)
_numbers = itertools.count()


class StoredChoices(Protocol):
    """The stored choices for an op on a device.

    Attributes:
        choices: hardware and bucket of arguments -> the kernel, and the file.
    """

    choices: dict[tuple[str, str], tuple[str, str]]

    def __call__(self, keys: Sequence[Fn], args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[str, str] | None:
        """Return the name of the kernel for these arguments, and the file; None if no choice is stored."""

    def at(self, keys: Sequence[Fn], args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[str, str]:
        """Return the hardware and the bucket of arguments."""


#: ``stored_choices(op, schema, device_type)``, or None. `customops.tuning` sets it when it is loaded.
stored_choices: Callable[[str, Schema, str | None], StoredChoices | None] = lambda op, schema, device_type: None  # noqa: E731


@dataclass(frozen=True, eq=False)
class Alternative:
    """A kernel, and when it is to run.

    Attributes:
        name: unique among those of a device.
        when: takes all arguments of the op, and returns True, False, or why not, a string. None: it always may run.
        key: how long an answer of `when` holds: "arguments", a function of the arguments, or None: for the call.
        number: grows with each one that is made.
    """

    fn: Fn
    name: str = DEFAULT
    when: Fn | None = None
    priority: float = 0
    key: Any = ARGUMENTS
    number: int = field(default_factory=lambda: next(_numbers))


def alternative(
    operator: OperatorHandle, fn: Fn, name: str | None, when: Any, priority: float, key: Any
) -> Alternative:
    """The alternative of what `register_kernel` was given.

    Raises:
        RegistrationError, CallbackError: an option has an invalid value.
    """
    op = operator.qualname

    def refuse(option: str, value: Any, expected: str, fix: str | None = None) -> RegistrationError:
        problem = f"register_kernel(): {option} has an invalid value"
        return RegistrationError(problem, op=op, argument=option, expected=expected, got=brief(value), fix=fix)

    name = DEFAULT if name is None else name
    if not is_name(name) or name == REFERENCE:
        fix = "op.register_reference(fn)" if name == REFERENCE else None
        raise refuse("name", name, 'a word without any of * , ; = # [ ]; "reference" is taken', fix)
    if isinstance(priority, bool) or not isinstance(priority, (int, float)) or priority != priority:
        raise refuse("priority", priority, "a number")
    if not (key is None or key == ARGUMENTS or callable(key)):
        raise refuse("key", key, f'"{ARGUMENTS}", None, or a function of the arguments')
    if when is not None and not callable(when):
        raise refuse("when", when, "a function of the arguments that returns True, False or a reason (a string)")
    return Alternative(fn, name, when, priority, key)


def in_order(own: Sequence[Alternative], general: Sequence[Alternative]) -> tuple[Alternative, ...]:
    """The alternatives of a device and those of all devices, in the order in which they are asked."""
    ranked = [*((each, 1) for each in own), *((each, 0) for each in general)]
    ranked.sort(key=lambda item: (item[0].name != REFERENCE, item[0].priority, item[1], item[0].number), reverse=True)
    return tuple(each for each, _ in ranked)


def hidden_in(alternatives: Iterable[Alternative]) -> list[Alternative]:
    """Those with a predicate that nobody asks, of alternatives in order: one without a predicate is before them."""
    rest = itertools.dropwhile(lambda each: each.when is not None, alternatives)
    return [each for each in rest if each.when is not None]


def buckets_of(alternatives: Iterable[Alternative]) -> tuple[Fn, ...]:
    """The ``key=`` functions of alternatives, each once, in the order of their registration."""
    ordered = sorted(alternatives, key=lambda each: each.number)
    return tuple(dict.fromkeys(each.key for each in ordered if callable(each.key)))


def device_of(schema: Schema, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.device | None:
    """Return the device on which a call runs, or None for a call without tensors and devices."""
    values = given(schema, args, kwargs)
    devices: list[Any] = [x.device for x in tensors_in([value for _, value in values])]
    devices += [value for argument, value in values if argument is schema.device_argument and value]
    # Beside tensors of another device, those of the CPU are numbers: the dispatcher goes by the former.
    return next((each for each in map(torch.device, devices) if each.type != "cpu"), None) or (
        torch.device(devices[0]) if devices else None
    )


class Chooser:
    """Chooses among the alternatives of a device, and keeps the choices.

    Attributes:
        fn: what is called in the place of a kernel.
        kernels: the alternatives in order, each with its `CurrentKernel`.
        stored: the choices that were stored, which come after what is preferred, or None.
        buckets: the ``key=`` functions of the alternatives, by which such choices are stored.
    """

    def __init__(
        self,
        operator: OperatorHandle,
        kernels: Sequence[tuple[Alternative, CurrentKernel]],
        stored: StoredChoices | None,
    ) -> None:
        self.operator, self.kernels, self.stored = operator, tuple(kernels), stored
        asked = [each for each, _ in kernels if each.when is not None]
        self.buckets = buckets_of(each for each, _ in kernels)
        keys = [each.key for each in asked if callable(each.key)] if stored is None else [*self.buckets]
        self.holds: Holds = "keyed"
        if stored is not None or any(each.key == ARGUMENTS for each in asked):
            self.holds = "alike" if operator.schema.tensors else "keyed"
        if any(each.key is None for each in asked):
            self.holds = "once"
        # Without tensors there are no guards: where no function says what counts, all arguments do.
        all_count = any(not callable(each.key) for each in asked) or (stored is not None and not self.buckets)
        if self.holds == "keyed" and all_count:
            keys.append(lambda *args, **kwargs: str((args, kwargs)))
        #: By the scopes that are open: the names that are preferred; and, with a name that was stored, the order.
        self.preferred = functools.lru_cache(64)(functools.partial(names_for, operator.qualname))
        self.order = functools.lru_cache(64)(self._order)
        #: What was chosen last, each with a guard for the tensors and the rest of its key; all with guards, by the rest
        #: and a shape; and all that was chosen, by key.
        self.recent: tuple[tuple[Any, Any, CurrentKernel], ...] = ()
        self.guarded: dict[Any, tuple[tuple[Any, Any, CurrentKernel], ...]] = {}
        self.known: dict[Any, Any] = {}
        self.used: set[CurrentKernel] = set()
        #: The kernel of the device, in the place of which this chooses.
        self.current: CurrentKernel | None = None
        self.keys = keys
        self.fn = self._function(keys)
        self.fn.call_if_allocated = self._function(keys, "fn_if_allocated")

    @functools.cached_property
    def call_named(self) -> Any:
        """The function for calls while a profiler records."""
        return self._function(self.keys, "named()")

    def _function(self, keys: list[Fn], of_kernel: str = "fn") -> Any:
        fn: Any = choice(self.operator.spec, self.holds, self, keys, fn=of_kernel)
        fn = _torch.dynamo.outside_dynamo(fn)
        first: Any = innermost(self.kernels[0][0].fn)
        names = ", ".join(each.name for each, _ in self.kernels)
        fn.chooser = self
        # What errors name, which are found in what the call returned.
        name, code = f"one of the kernels {names}", getattr(first, "__code__", None)
        fn.__wrapped__ = types.SimpleNamespace(__name__=name, __code__=code)
        return fn

    def named(self, name: str) -> CurrentKernel | None:
        """The kernel of an alternative."""
        return next((current for each, current in self.kernels if each.name == name), None)

    # Calls ------------------------------------------------------------------------------------------------------

    def find(self, values: Any, given_tensors: tuple[Any, ...], /, *args: Any, **kwargs: Any) -> CurrentKernel:
        """The kernel for a call that was not among the last.

        Args:
            values: the part of its key that is no tensor.
            given_tensors: the arguments of types with tensors, as they are.
        """
        if self.holds == "once":
            return self._first(self.choose(args, kwargs))
        at = (values, getattr(given_tensors[0], "shape", None) if given_tensors else None)
        try:
            for seen in self.guarded.get(at, ()):
                if seen[0](*given_tensors):
                    self.recent = (seen, *self.recent[: _RECENT - 1])
                    return seen[2]
            key, tensors = self._key(values, args, kwargs)
            if key is None:
                return self._first(self.choose(args, kwargs))
            entry = self.known.get(key)
        except TypeError as error:
            if self.holds == "alike" and not self.keys:  # an object that cannot be a key
                return self._first(self.choose(args, kwargs))
            problem, got = "a key= function returns a value that is not hashable", brief(values[1:])
            fix = "return numbers, strings, dtypes, or tuples of these"
            raise KernelError(problem, op=self.operator.qualname, got=got, fix=fix) from error
        if entry is None:
            kernel = self._first(self.choose(args, kwargs))
            if len(self.known) >= _KEPT:
                self.known.clear()
                self.guarded.clear()
                self.recent = ()
            self.known[key] = kernel if self.holds == "keyed" else [kernel, True]
            return kernel
        if self.holds == "keyed":  # of a thread that was faster
            return entry  # type: ignore[no-any-return]
        kernel, may_be_guarded = entry
        others = self.guarded.get(at, ())
        # Guards are made for what comes again. They see more than the key: gradients, and tensors of inference mode.
        if may_be_guarded and len(others) < _ALIKE:
            looks_same = self._guard(tensors, args, kwargs)
            entry[1] = looks_same is not None
            if looks_same is not None:
                self.guarded[at] = (*others, (looks_same, values, kernel))
        return kernel  # type: ignore[no-any-return]

    def _key(self, values: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Tensor]]:
        """The key of a call in `known`, or None: its choice is not kept; and its tensors."""
        tensors = tensors_in((*args, *kwargs.values()))
        if self.holds == "keyed":
            return values, tensors
        if not all(type(x) in PLAIN and x.layout is torch.strided and not x.is_nested for x in tensors):
            return None, tensors
        looks = [(x.dtype, x.device, x.shape, x.stride(), x.is_conj(), x.is_neg()) for x in tensors]
        return (values, tuple(looks), tuple(each is None for each in (*args, *kwargs.values()))), tensors

    def kept(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Alternative | None:
        """What was chosen for a call with the same key, and runs, whatever its ``when`` would say of this one."""
        found = types.SimpleNamespace(recent=(), known={})
        found.find = lambda values, *_, **__: types.SimpleNamespace(fn=lambda *_, **__: values)
        values = choice(self.operator.spec, self.holds, found, self.keys)(*args, **kwargs)
        with suppress(TypeError):  # what cannot be a key
            entry = self.known.get(self._key(values, args, kwargs)[0])
            current = entry[0] if isinstance(entry, list) else entry
            return next((each for each, kernel in self.kernels if kernel is current), None)
        return None

    def _guard(self, tensors: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A guard to be called with the tensor arguments as they are, or None if there is none for these."""
        looks_same = _torch.dispatcher.exact_guard_of(tensors)
        arguments = [each for each in given(self.operator.schema, args, kwargs) if each[0].holds_tensors]
        if looks_same is None or all(isinstance(value, Tensor) for _, value in arguments):
            return looks_same
        if any(argument.type == "Tensor" and value is None for argument, value in arguments):  # as in backwards
            return None
        return lambda *values: looks_same(*tensors_in(values))

    def _first(self, alternative: Alternative) -> CurrentKernel:
        current = next(current for each, current in self.kernels if each is alternative)
        if current not in self.used:
            self.used.add(current)
            if self.current is not None:  # a policy of checks counts for each of them
                self.current.unchecked = True
        return current

    def choose(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Alternative:
        """The alternative for a call, found out anew. What is preferred and cannot be used is logged once.

        Raises:
            NoKernelError: none fits.
        """
        scopes = here()
        chosen, refused = self.asked(scopes, args, kwargs)
        if chosen is None:
            problem = "no kernel takes these arguments"
            fix = "register a kernel that takes them, or the op's reference"
            got = ", ".join(f"{a.name}={_look(value)}" for a, value in given(self.operator.schema, args, kwargs))
            raise NoKernelError(problem, op=self.operator.qualname, got=got, fix=fix, refused=refused)
        self._tell(scopes, chosen, refused)
        return chosen

    def asked(
        self, scopes: Tables, args: tuple[Any, ...], kwargs: dict[str, Any], *, traced: bool = False
    ) -> tuple[Alternative | None, dict[str, str]]:
        """The first alternative that may run, or None; and the names of those before it, with their reasons.

        Args:
            scopes: what is preferred.
            traced: the tensors are fakes of a compiler.
        """
        refused: dict[str, str] = {}
        with _WithoutData(args, kwargs, traced=traced) as without_data:
            stored = None
            if self.stored is not None:  # like the functions of keys, which get the arguments
                stored = self.stored(self.buckets, *((args, kwargs) if self.buckets else without_data()))
            for each in self.order(scopes, None if stored is None else stored[0]):
                if each.when is None:
                    return each, refused
                given_args, given_kwargs = without_data() if each.key == ARGUMENTS else (args, kwargs)
                answer = self._ask(each, given_args, given_kwargs)
                if answer is True:
                    return each, refused
                refused.setdefault(each.name, answer or f"{where(each.when)} says no")
        return None, refused

    def _order(self, scopes: Tables, stored: str | None) -> tuple[Alternative, ...]:
        """The order in which alternatives are asked: first what is preferred, then what was stored."""
        names = dict.fromkeys([*self.preferred(scopes), *([stored] if stored is not None else ())])
        rank = {name: i for i, name in enumerate(names)}
        if stored is not None and self.named(stored) is None:
            near = did_you_mean(stored, (each.name for each, _ in self.kernels))
            text = "%s: the kernel %s was tuned, and is not there%s"
            log.warning(text, self.operator.qualname, stored, f"; {near}" if near else "")
        return tuple(sorted((each for each, _ in self.kernels), key=lambda each: rank.get(each.name, len(rank))))

    def _ask(self, each: Alternative, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert each.when is not None
        try:
            answer = each.when(*args, **kwargs)
            if isinstance(answer, torch.SymBool) or type(answer).__name__ in ("bool", "bool_"):  # of NumPy
                answer = bool(answer)  # of a symbol, that makes a guard
        except Exception as error:
            if not _torch.fakes.asks_for_data(error):
                if isinstance(error, CustomOpsError) or type(error).__module__.partition(".")[0] == "torch":
                    raise
                problem, got = (
                    f"the predicate of the kernel {each.name!r} raised an error",
                    f"{type(error).__name__}: {first_line(error)}",
                )
                fix = "return False, or a reason (a string), for arguments that the kernel does not take"
                raise KernelError(
                    problem, op=self.operator.qualname, got=got, where=where(each.when), fix=fix
                ) from error
            if each.key != ARGUMENTS:
                raise
            raise KernelError(
                f"the predicate of the kernel {each.name!r} reads data, and gets tensors without data: its answer is "
                "kept for arguments that look the same",
                op=self.operator.qualname,
                where=where(each.when),
                fix="decide by shapes, strides, dtypes and devices; or register it with key=None, and it is asked in "
                "each call",
            ) from error
        if not isinstance(answer, (bool, str)):
            raise CallbackError(
                f"the predicate of the kernel {each.name!r} returns neither True, False nor a string",
                op=self.operator.qualname,
                got=brief(answer),
                where=where(each.when),
            )
        return answer

    def _tell(self, scopes: Tables, chosen: Alternative, refused: dict[str, str]) -> None:
        """Say of what was preferred, and comes before what was chosen, why it is not used: once for each op."""
        op = self.operator.qualname
        for name in itertools.takewhile(lambda name: name != chosen.name, self.preferred(scopes)):
            if (op, name) not in _told:
                _told.add((op, name))
                is_unknown = all(self.named(each) is None for each in preferred_by_name(op, scopes) or (chosen.name,))
                level = logging.WARNING if name in refused or is_unknown else logging.INFO
                near = did_you_mean(name, (each.name for each, _ in self.kernels))
                unknown = "there is no such kernel for this device" + (f" ({near})" if near else "")
                why = refused.get(name, unknown)
                text = "%s: the kernel %s is preferred, and cannot be used: %s; %s runs"
                log.log(level, text, op, name, why, chosen.name)

    # Compilers --------------------------------------------------------------------------------------------------

    def traced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """The name of what is chosen for fakes in a trace, or None: it is left to each call.

        What ``when`` asks of sizes that are symbols becomes guards of the graph.
        """
        if any(each.when is not None and each.key is None for each, _ in self.kernels):
            return None
        try:
            chosen, refused = self.asked(_torch.dynamo.of_trace(here), args, kwargs, traced=True)
        except Exception as error:
            cause = error.__cause__ if isinstance(error, KernelError) else error
            if cause is None or not _torch.fakes.asks_for_data(cause):
                raise
            log.info("%s: which kernel runs is left to each call: %s", self.operator.qualname, first_line(error))
            return None
        if chosen is None:  # the call says so
            return None
        self._tell(_torch.dynamo.of_trace(here), chosen, refused)
        return chosen.name

    def digested(self) -> Any:
        """All by which compilers choose."""
        preferred = self.preferred(_torch.dynamo.of_trace(here))
        chosen_by = [(each.name, each.when, each.key, each.priority) for each, _ in self.kernels]
        stored = None if self.stored is None else sorted((*at, name) for at, (name, _) in self.stored.choices.items())
        return preferred, chosen_by, stored, self.operator.options.choose_when_traced


@functools.lru_cache(maxsize=1024)
def _as_text(op: str, scopes: Tables) -> str:
    return " ".join(names_for(op, scopes))


_torch.dynamo.preferred = lambda op: _as_text(op, here())

#: Of which op and name it was said that it cannot be used.
_told: set[tuple[str, str]] = set()


def chooser_of(current: CurrentKernel | None) -> Chooser | None:
    """What chooses in the place of a kernel, or None: there is one."""
    return None if current is None else getattr(current.registered, "chooser", None)


class _WithoutData:
    """The arguments of a call with tensors without data, made when they are first asked for.

    They look like the arguments, but begin where their memory begins.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, traced: bool) -> None:
        self.given, self.traced = (args, kwargs), traced
        self.made: Any = None
        self.context: Any = None

    def __enter__(self) -> Callable[[], Any]:
        if self.traced:
            self.context = _torch.fakes.without_fresh_symbols(self.given)
            self.context.__enter__()
        return self._make

    def _make(self) -> Any:
        if self.made is None and self.traced:
            self.made = _torch.fakes.like_in_trace(self.given)
        elif self.made is None:
            self.context = _torch.fakes.stand_ins(*self.given)
            self.made = self.context.__enter__()
        return self.made

    def __exit__(self, *error: Any) -> None:
        if self.context is not None:
            self.context.__exit__(*error)


def _look(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{[*value.shape]}"
    return brief(value, 30)
