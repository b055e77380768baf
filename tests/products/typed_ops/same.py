"""Comparing results, types included; and the tensors of a result."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


def same(found: Any, expected: Any, *, values: bool = True) -> None:
    """Fails unless these are the same, down to the types of what they are made of."""
    if isinstance(expected, Tensor):
        assert isinstance(found, Tensor)
        assert (found.shape, found.dtype, found.device.type) == (expected.shape, expected.dtype, expected.device.type)
        if values:
            torch.testing.assert_close(found, expected)
        return
    assert type(found) is type(expected), f"{found!r} is not like {expected!r}"
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        found, expected = list(found.values()), list(expected.values())
    elif dataclasses.is_dataclass(expected):
        names = [field.name for field in dataclasses.fields(expected)]
        found, expected = ([getattr(each, name) for name in names] for each in (found, expected))
    if isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for each, other in zip(found, expected, strict=True):
            same(each, other, values=values)
    else:
        assert found == expected


def leaves(value: Any) -> Iterator[Any]:
    """What a result is made of, from left to right."""
    if dataclasses.is_dataclass(value):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from leaves(each)
    elif value is not None:
        yield value


def tensors(value: Any) -> tuple[Tensor, ...]:
    return tuple(each for each in leaves(value) if isinstance(each, Tensor))


def outcome(program: Callable[..., Any], inputs: list[Tensor]) -> Any:
    """What a program returns, and its tensors after it: those it writes to are changed."""
    inputs = [each.clone() for each in inputs]
    return program(*inputs), tuple(inputs)
