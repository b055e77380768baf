"""Replacements: plain torch code in the place of which inductor calls the op.

A pattern is traced as a program is, on tensors like those of the samples, and looked for in the graphs that inductor
gets, before they are split into forward and backward: with gradients, code is replaced together with its backward.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from customops import _compat
from customops._dispatch.callbacks import Fn
from customops._dispatch.operator import OperatorHandle
from customops._dispatch.registrations import Registration, Undo, nothing
from customops._rules.compilers import Equivalent, check_functional
from customops._samples import Sample
from customops._schema.model import Argument, Schema
from customops.errors import UnsupportedError


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
        _varied(self.operator.schema, self.operator.qualname)
        pattern = _Replacement(self, Equivalent(self.operator, fn, "pattern"), op, samples, has_backward)
        self._patterns.append(pattern)
        pattern.install()
        return pattern

    def forget(self, pattern: _Replacement) -> None:
        if pattern in self._patterns:
            self._patterns.remove(pattern)


def _varied(schema: Schema, op: str) -> list[Argument]:
    """The arguments that a pattern is a function of; the others have their defaults."""
    for argument in schema.arguments:
        if argument.type not in ("Tensor", "float") and not argument.has_default:
            raise UnsupportedError(
                "register_replacement takes the default of an argument that is no tensor or float: this one has none",
                op=op,
                argument=argument.name,
                got=argument.type,
                fix="give it a default",
            )
    return [argument for argument in schema.arguments if argument.type in ("Tensor", "float")]


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
        self.varied = _varied(self.schema, rule.operator.qualname)
        self.uninstall: Undo = nothing

    def install(self) -> None:
        operator = self.rule.operator
        names = [argument.name for argument in self.varied]
        floats = [argument.name for argument in self.varied if argument.type == "float"]
        pattern = _compat.replacement.Pattern(
            operator.qualname,
            _Function("pattern", names, functools.partial(self._call, self.equivalent)),
            _Function("replacement", names, functools.partial(self._call, self.op)),
            self._examples,
            # Not the value of any number in a program, to be told from all others when it is traced.
            {name: 0.1234567 + i / 1000 for i, name in enumerate(floats)},
            self.has_backward,
        )
        self.uninstall = _compat.replacement.add_pattern(pattern)
        operator.on_removal.append(self.uninstall)

    def unregister(self) -> None:
        self.rule.forget(self)
        self.uninstall()

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        """The pattern's result for a call of the op, or NotImplemented where no such call takes its place."""
        given, named = self.equivalent.arguments(args, kwargs)
        values = dict(zip((a.name for a in self.schema.positional), given, strict=False)) | named
        fixed = [argument for argument in self.schema.arguments if argument not in self.varied]
        if any(values.get(argument.name, argument.default) != argument.default for argument in fixed):
            return NotImplemented
        return self.equivalent(*args, **kwargs)

    def _call(self, fn: Fn, values: dict[str, Any]) -> Any:
        values = {
            argument.name: argument.default for argument in self.schema.arguments if argument.has_default
        } | values
        positional = [values[argument.name] for argument in self.schema.positional]
        return fn(*positional, **{argument.name: values[argument.name] for argument in self.schema.keyword_only})

    def _examples(self) -> Iterator[tuple[Any, ...]]:
        """The arguments of the samples; each kind of tensors once."""
        seen = set()
        for sample in self.samples():
            args, kwargs = self.equivalent.arguments(sample.args, sample.kwargs)
            values = dict(zip((a.name for a in self.schema.positional), args, strict=False)) | kwargs
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
