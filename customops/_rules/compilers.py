"""What the rules for compilers share: which ops have them, and how their functions get the arguments of a call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch

from customops import _torch
from customops._dispatch.callbacks import Fn, bind_kernel, filler
from customops._dispatch.operator import OperatorHandle
from customops._dispatch.registrations import Registration, RegistrationGroup, Slots, Undo, nothing
from customops._dispatch.scopes import Sample
from customops.errors import RegistrationError, UnsupportedError, brief, where


def check_functional(operator: OperatorHandle, role: str) -> None:
    """Raise unless the op only returns new tensors: what compilers put in the place of a call is computed, not done."""
    schema = operator.schema
    if schema.mutated or schema.is_view or any("Tensor" not in ret.type for ret in schema.returns):
        raise UnsupportedError(
            f"{role} is for ops that return new tensors and write nothing",
            op=operator.qualname,
            got=str(schema),
            fix="define a functional op for the computation, and let this one write its result",
        )


class Equivalent:
    """Plain torch code that computes what an op does, called with the arguments of a call in a graph."""

    def __init__(self, operator: OperatorHandle, fn: Fn, role: str) -> None:
        self.operator, self.role, self.schema = operator, role, operator.schema
        self.fn = bind_kernel(fn, self.schema, operator.qualname, role)
        self.fill = filler(self.schema)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self.arguments(args, kwargs)
        return self.fn(*args, **kwargs)

    def substitute(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, random: bool = True) -> Any:
        """What is traced in the place of a call with fake tensors, or NotImplemented: see `substitution`."""
        try:
            return _torch.inductor.substitute(self.operator.overload, self, args, kwargs, self._fault, random)
        except RecursionError as error:
            problem = f"the {self.role} calls the op itself, without end"
            fix = "return NotImplemented for arguments on which the op itself should run"
            raise RegistrationError(problem, op=self.operator.qualname, where=where(self.fn), fix=fix) from error

    def _fault(self, problem: str, expected: str, got: str) -> Exception:
        return RegistrationError(
            f"the {self.role} {problem}",
            op=self.operator.qualname,
            expected=expected,
            got=got,
            where=where(self.fn),
            fix="correct it, or let it return NotImplemented for such arguments",
        )

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """All arguments, with defaults: in a graph those that are positional may be there by name."""
        given = list(args)
        for argument in self.schema.positional[len(args) :]:
            if argument.name not in kwargs:
                break
            given.append(kwargs[argument.name])
        named = {name: value for name, value in kwargs.items() if name in {a.name for a in self.schema.keyword_only}}
        return self.fill(tuple(given), named) if self.fill is not None else (tuple(given), named)


# Decompositions: plain torch code that compilers put in the place of a call of the op ---------------------------------
# inductor takes the op apart below autograd, so its formula still counts; then the code is fused with what is around
# it. Export does so when a program is decomposed (``program.run_decompositions()``). For all others the op stays whole.

#: Who takes an op apart; or a predicate of the arguments, where it is true: inductor and export.
When = Literal["inductor", "export"] | Callable[..., bool]

_COMPILERS = ("inductor", "export")


class DecompositionRule:
    """compiler -> the decomposition for it, and the predicate that says where it is one, or None for everywhere."""

    operator: OperatorHandle

    def __init__(self) -> None:
        self._slots = Slots[str, tuple[Equivalent, Equivalent | None]](
            self._install_for, lambda: self.operator.recompile()
        )

    def bind(self, operator: OperatorHandle) -> None:
        self.operator = operator
        self._slots.reset()

    def traced(self) -> Any:
        return {
            compiler: (fn.fn, None if applies is None else applies.fn)
            for compiler, (fn, applies) in self._slots.values.items()
        }

    def equivalents(self) -> list[Fn]:
        """What must compute the same as the op. Each returns NotImplemented where it does not apply."""
        return [functools.partial(self._decompose, compiler) for compiler in self._slots.values]

    def register(self, fn: Fn, when: Any) -> Registration:
        check_functional(self.operator, "a decomposition")
        if not callable(when) and when not in _COMPILERS:
            raise RegistrationError(
                "when= has an invalid value",
                op=self.operator.qualname,
                expected='"inductor", "export" or a predicate of the arguments',
                got=brief(when),
            )
        decomposition = Equivalent(self.operator, fn, "decomposition")
        if not callable(when):
            return self._slots.set(when, (decomposition, None))
        applies = Equivalent(self.operator, when, "predicate")
        return RegistrationGroup([self._slots.set(compiler, (decomposition, applies)) for compiler in _COMPILERS])

    def _install_for(self, compiler: str, own_library: bool) -> Undo:
        undo = _torch.inductor.enter(self.operator.overload, compiler, functools.partial(self._trace, compiler))
        self.operator.on_removal.append(undo)
        return undo

    def _trace(self, compiler: str, /, *args: Any, **kwargs: Any) -> Any:
        fn, applies = self._slots.values[compiler]
        return fn.substitute(args, kwargs) if applies is None or applies(*args, **kwargs) else NotImplemented

    def _decompose(self, compiler: str, /, *args: Any, **kwargs: Any) -> Any:
        fn, applies = self._slots.values[compiler]
        return fn(*args, **kwargs) if applies is None or applies(*args, **kwargs) else NotImplemented


# Lowerings: plain torch code that inductor generates code for in the place of a call of the op ------------------------
# Unlike a decomposition it counts last, when inductor makes a graph into code: up to then the op is one node, which
# autograd, partitioners, checkpointing policies and patterns see whole.


class InductorLoweringRule:
    """The lowering that was registered last."""

    operator: OperatorHandle

    def __init__(self) -> None:
        self._slots: Slots[None, Equivalent] = Slots(self._install, lambda: self.operator.recompile())

    def bind(self, operator: OperatorHandle) -> None:
        self.operator = operator
        self._slots.reset()

    def traced(self) -> Any:
        return [lowering.fn for lowering in self._slots.values.values()]

    def equivalents(self) -> list[Fn]:
        """What must compute the same as the op. Each returns NotImplemented where it does not apply."""
        return [*self._slots.values.values()]

    def register(self, fn: Fn) -> Registration:
        check_functional(self.operator, "a lowering")
        return self._slots.set(None, Equivalent(self.operator, fn, "lowering"))

    def _install(self, _: None, own_library: bool) -> Undo:
        undo = _torch.inductor.enter(self.operator.overload, "lowering", self._trace)
        self.operator.on_removal.append(undo)
        return undo

    def _trace(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._slots.values[None].substitute(args, kwargs, random=False)


# Replacements: plain torch code in the place of which inductor calls the op -------------------------------------------
# A pattern is traced as a program is, on tensors like those of the samples, and looked for in the graphs that inductor
# gets, before they are split into forward and backward: with gradients, code is replaced together with its backward.


class ReplacementRule:
    """The patterns of an op: there may be several."""

    operator: OperatorHandle

    def __init__(self) -> None:
        self._patterns: list[_Replacement] = []

    def bind(self, operator: OperatorHandle) -> None:
        self.operator = operator
        for pattern in self._patterns:
            pattern.install()

    def traced(self) -> Any:
        return [pattern.equivalent.fn for pattern in self._patterns]

    def equivalents(self) -> list[Fn]:
        """What must compute the same as the op. Each returns NotImplemented where it does not apply."""
        return [pattern.compute for pattern in self._patterns]

    def register(
        self, fn: Fn, op: Fn, samples: Callable[[], Iterable[Sample]], has_backward: Callable[[], bool]
    ) -> Registration:
        check_functional(self.operator, "a replacement")
        for argument in self.operator.schema.arguments:
            if argument.type not in ("Tensor", "float") and not argument.has_default:
                raise UnsupportedError(
                    "register_replacement takes the default of an argument that is no tensor or float: this one has "
                    "none",
                    op=self.operator.qualname,
                    argument=argument.name,
                    got=argument.type,
                    fix="give it a default",
                )
        pattern = _Replacement(self, Equivalent(self.operator, fn, "pattern"), op, samples, has_backward)
        self._patterns.append(pattern)
        pattern.install()
        return pattern


class _Replacement(Registration):
    """The registration of a pattern."""

    def __init__(
        self,
        rule: ReplacementRule,
        equivalent: Equivalent,
        op: Fn,
        samples: Callable[[], Iterable[Sample]],
        has_backward: Callable[[], bool],
    ) -> None:
        super().__init__()
        self.rule, self.equivalent, self.op = rule, equivalent, op
        self.samples, self.has_backward = samples, has_backward
        self.schema = rule.operator.schema
        #: The arguments that the pattern is a function of, and the values of the others.
        self.varied = [argument for argument in self.schema.arguments if argument.type in ("Tensor", "float")]
        self.fixed = {a.name: a.default for a in self.schema.arguments if a not in self.varied}
        self.uninstall: Undo = nothing

    def install(self) -> None:
        operator = self.rule.operator
        names = [argument.name for argument in self.varied]
        floats = [argument.name for argument in self.varied if argument.type == "float"]
        pattern = _torch.inductor.Pattern(
            operator.qualname,
            _Function("pattern", names, functools.partial(self._call, self.equivalent)),
            _Function("replacement", names, functools.partial(self._call, self.op)),
            self._examples,
            # Not the value of any number in a program, to be told from all others when it is traced.
            {name: 0.1234567 + i / 1000 for i, name in enumerate(floats)},
            self.has_backward,
        )
        self.uninstall = _torch.inductor.add_pattern(pattern)
        operator.on_removal.append(self.uninstall)

    def unregister(self) -> None:
        if self in self.rule._patterns:
            self.rule._patterns.remove(self)
        self.uninstall()

    def _by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call of the op."""
        args, kwargs = self.equivalent.arguments(args, kwargs)
        return {**dict(zip((a.name for a in self.schema.positional), args, strict=False)), **kwargs}

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        """The pattern's result for a call of the op, or NotImplemented where no such call takes its place."""
        values = self._by_name(args, kwargs)
        if any(values.get(name, default) != default for name, default in self.fixed.items()):
            return NotImplemented
        return self.equivalent(*args, **kwargs)

    def _call(self, fn: Fn, values: dict[str, Any]) -> Any:
        values = {a.name: a.default for a in self.schema.arguments if a.has_default} | values
        positional = [values[argument.name] for argument in self.schema.positional]
        return fn(*positional, **{argument.name: values[argument.name] for argument in self.schema.keyword_only})

    def _examples(self) -> Iterator[tuple[Any, ...]]:
        """The arguments of the samples; each kind of tensors once."""
        seen = set()
        for sample in self.samples():
            values = self._by_name(sample.args, sample.kwargs)
            example = tuple(values[argument.name] for argument in self.varied)
            tensors = [each for each in example if isinstance(each, torch.Tensor)]
            kind = tuple((each.dtype, each.dim(), each.device) for each in tensors)
            if kind not in seen and len(tensors) == sum(argument.type == "Tensor" for argument in self.varied):
                seen.add(kind)
                yield example


class _Function:
    """A function with these parameters, of which torch asks the names."""

    def __init__(self, name: str, parameters: list[str], call: Callable[[dict[str, Any]], Any]) -> None:
        self.__name__ = name
        self.parameters, self.call = parameters, call
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        self.__signature__ = inspect.Signature([inspect.Parameter(each, kind) for each in parameters])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call({**dict(zip(self.parameters, args, strict=False)), **kwargs})
