"""Sample inputs of an op, for checks, and the changes that checks may make to them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from customops import _torch
from customops._dispatch.callbacks import Fn
from customops._places import where
from customops._rules.out import out_names
from customops._schema.defaults import filler
from customops.errors import ArgumentError, CallbackError, brief

#: The kinds of change to a sample, to all of its arguments, or to one, as ``"x.layout"``.
KINDS = ("size", "layout", "dtype", "value", "choice", "optional", "list", "same", "device")
#: The properties of a tensor that have values to try, as in ``vary={"x.dtype": ...}``.
ASPECTS = ("dtype", "shape")

Constraints = Callable[..., bool] | Iterable[Callable[..., bool]]
#: Whether the op's gradient is the exact derivative, or another one that its author chose.
GradientIs = Literal["exact", "chosen"]


class Sample(NamedTuple):
    """The arguments of one call of an op, ``(args, kwargs)``, for checks."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def samples_of(fn: Fn, op: str) -> Iterator[Sample]:
    """Yield the samples of a samples function."""
    items = fn()
    if not isinstance(items, Iterable):
        expected, got = "tuples of arguments, each args or (args, kwargs)", type(items).__name__
        fix = "yield (x,) for each call, or return a list of tuples"
        raise CallbackError("the samples are not iterable", op=op, expected=expected, got=got, fix=fix)
    for item in items:
        if not isinstance(item, tuple):
            raise CallbackError(
                "a sample must be a tuple of arguments, or (args, kwargs)",
                op=op,
                got=type(item).__name__,
                fix="yield (x,) for one argument",
            )
        has_kwargs = len(item) == 2 and isinstance(item[0], tuple) and isinstance(item[1], dict)
        yield Sample(*item) if has_kwargs else Sample(item, {})


@dataclass(frozen=True)
class Samples:
    """A samples function, and its options for the inputs that are derived from the samples."""

    fn: Fn
    #: Argument, ``"x.dtype"`` or ``"x.shape"`` -> the values to try, or a function of the value in a sample for them.
    vary: Mapping[str, Any] = field(default_factory=dict)
    #: Arguments, kinds, or a kind of an argument (``"x.layout"``) that must not change.
    fixed: frozenset[str] = frozenset()
    #: Conditions on the arguments: each is called with those that it names.
    constraints: tuple[Callable[..., bool], ...] = ()
    gradient: GradientIs = "exact"


def samples_with(
    fn: Fn,
    op: str,
    arguments: Mapping[str, bool],
    vary: Mapping[str, Any] | None,
    fixed: str | Iterable[str],
    constraints: Constraints,
    gradient: GradientIs,
) -> Samples:
    """Return the record of a samples function and its options. `arguments`: name -> whether it holds tensors."""
    vary, fixed = dict(vary or {}), frozenset([fixed] if isinstance(fixed, str) else fixed)
    of_tensors = [
        f"{name}.{aspect}" for name, holds_tensors in arguments.items() if holds_tensors for aspect in ASPECTS
    ]
    kinds_of_arguments = [f"{name}.{kind}" for name in arguments for kind in KINDS]
    _check_names("vary", vary, [*arguments, *of_tensors], (), op)
    _check_names("fixed", fixed, [*arguments, *KINDS], kinds_of_arguments, op)
    for key, values in vary.items():
        if not callable(values) and (isinstance(values, str) or not isinstance(values, Iterable)):
            raise ArgumentError(
                "vary needs the values to try, or a function that returns them",
                op=op,
                argument=f"vary[{key!r}]",
                got=brief(values),
                fix=f"vary={{{key!r}: [{brief(values)}]}}",
            )
    rules = (constraints,) if callable(constraints) or not isinstance(constraints, Iterable) else tuple(constraints)
    for rule in rules:
        if not callable(rule):
            raise ArgumentError("a constraint must be callable", op=op, argument="constraints", got=brief(rule))
        for each in inspect.signature(rule).parameters.values():
            is_open = each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL) or each.default is not each.empty
            if each.kind is each.POSITIONAL_ONLY or not (is_open or each.name in arguments):
                raise ArgumentError(
                    "a constraint takes arguments of the op, by their names",
                    op=op,
                    argument="constraints",
                    expected=f"some of {', '.join(arguments)}",
                    got=each.name,
                    where=where(rule),
                )
    return Samples(fn, vary, fixed, rules, gradient)


def _check_names(option: str, given: Iterable[str], shown: list[str], more: Iterable[str], op: str) -> None:
    known = {*shown, *more}
    for name in given:
        if name not in known:
            raise ArgumentError(
                f"{option} names something that the op does not have",
                op=op,
                argument=option,
                expected=f"some of {', '.join(shown)}" + (", or a kind of one argument, as x.layout" if more else ""),
                got=repr(name),
            )


def samples_with_out(op: Any) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yield the samples of the out variant of an op, a `CustomOpDef`: those of the op, and tensors to write to."""
    variant, names, fill = op._rules.out_variant, out_names(op.schema), filler(op.schema)
    for sample in op.samples():
        lowered = op.lower(*sample.args, **sample.kwargs)
        args, kwargs = _torch.trees.tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, lowered)
        if fill is not None:
            args, kwargs = fill(args, kwargs)
        results = op._opoverload(*args, **kwargs)
        outs = map(torch.zeros_like, results if len(names) > 1 else (results,))
        kwargs = kwargs | dict(zip(names, outs, strict=True))
        yield (args, kwargs) if variant._lowering is None else variant._lowering.restored_call(*args, **kwargs)
