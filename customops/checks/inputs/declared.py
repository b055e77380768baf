"""What an op's author said about its inputs, applied: values to try, and what has to be true of all."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from customops._schema.model import Schema
from customops.checks._trial import Case, Kind, Trial
from customops.checks.inputs._elements import resized
from customops.checks.inputs.parts import QUICK, Parts, Variation
from customops.checks.inputs.values import as_dtype, in_words, name_of
from customops.errors import CustomOpsError


def declared(parts: Parts, rank: int) -> Iterator[Case]:
    """The values that `Variation.vary` gives."""
    if rank != QUICK:
        return
    given = arguments_of(parts.trial) if parts.variation.vary else {}
    for key in parts.variation.vary:
        name, _, aspect = key.rpartition(".") if key.endswith((".dtype", ".shape")) else (key, "", "")
        if aspect:
            yield from _of_tensor(parts, name, aspect, key)
            continue
        for value in parts.variation.values(key, given.get(key)):
            kind: Kind = "choice" if isinstance(value, bool | str | torch.dtype) else "number"
            yield Case(with_argument(parts.trial, name, value), kind, f"{name}={in_words(value)}")


def _of_tensor(parts: Parts, name: str, aspect: str, key: str) -> Iterator[Case]:
    for spot in parts.spots:
        for new in parts.variation.values(key, getattr(spot.tensor, aspect)) if spot.argument == name else ():
            if aspect == "dtype":
                trial = parts.each([spot], functools.partial(as_dtype, dtype=new))
            else:
                trial = parts.each([spot], functools.partial(resized, shape=new, seed=spot.seed))
            if trial is not None:
                kind: Kind = "dtype" if aspect == "dtype" else "size"
                yield Case(trial, kind, f"{spot.label}: {name_of(new) if aspect == 'dtype' else f'shape {tuple(new)}'}")


def holds(variation: Variation, trial: Trial) -> bool:
    """Are the constraints true of a call? One that raises is not."""
    if not variation.constraints:
        return True
    try:
        given = arguments_of(trial)
    except CustomOpsError:  # there are no such values
        return False
    return all(_holds(constraint, given) for constraint in variation.constraints)


def _holds(constraint: Callable[..., bool], given: dict[str, Any]) -> bool:
    parameters = inspect.signature(constraint).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    try:
        return bool(constraint(**{name: value for name, value in given.items() if takes_all or name in parameters}))
    except Exception:  # written for ordinary inputs: what it cannot judge is none
        return False


def arguments_of(trial: Trial) -> dict[str, Any]:
    """The arguments of a call by name, as the op's function gets them, with the defaults."""
    lowering = getattr(trial.custom_op, "_lowering", None)
    if lowering is None:
        return _with_defaults(trial, trial.schema)
    given = _with_defaults(trial, lowering.schema)
    by_position = [given[argument.name] for argument in lowering.schema.positional]
    values, named = lowering.restore(*by_position, **{a.name: given[a.name] for a in lowering.schema.keyword_only})
    names = [each.name for each in lowering.signature.parameters if not each.by_keyword]
    return {**dict(zip(names, values, strict=True)), **named}


def _with_defaults(trial: Trial, schema: Schema) -> dict[str, Any]:
    defaults: dict[str, Any] = {each.name: each.default for each in schema.arguments if each.has_default}
    return defaults | trial.arguments


def with_argument(trial: Trial, name: str, value: Any) -> Trial:
    """The call with another value for an argument, as the op's function would get it."""
    lowering = getattr(trial.custom_op, "_lowering", None)
    if lowering is None:
        return trial.with_arguments(**{name: value})
    values = arguments_of(trial) | {name: value}
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for each in lowering.signature.parameters:
        if each.stars == "**":
            kwargs |= values[each.name]
        elif each.by_keyword:
            kwargs[each.name] = values[each.name]
        else:
            args += values[each.name] if each.stars else (values[each.name],)
    lowered_args, lowered_kwargs = trial.custom_op.lower(*args, **kwargs)
    return replace(trial, args=tuple(lowered_args), kwargs=dict(lowered_kwargs))
