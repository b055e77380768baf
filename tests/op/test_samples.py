"""Samples of an op, and what is said with them about other inputs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from customops import Registry
from customops._op.samples import KINDS
from customops.checks._trial import Kind
from customops.errors import ArgumentError, CallbackError


def roll_of(registry: Registry) -> Any:
    @registry.custom_op("samples_tests::roll", mutates_args=())
    def roll(x: Tensor, by: int = 1, dims: list[int] | None = None) -> Tensor:
        return x.roll(by, dims or [0])

    return roll


def samples() -> Iterator[tuple[Any, ...]]:
    yield (torch.arange(3.0),)


def test_bare_and_with_options(registry: Registry) -> None:
    roll = roll_of(registry)
    assert roll.register_samples(samples) is samples
    assert roll.register_samples()(samples) is samples
    assert roll.register_samples(fixed="by")(samples) is samples
    assert roll.register_samples(samples, fixed="by") is samples
    assert [len(sample.args) for sample in roll.samples()] == [1]


def test_kinds_are_those_of_cases() -> None:
    # Numbers, padding and indices are values to who fixes them, and broadcast tensors sizes.
    assert {*KINDS, "sample", "number", "broadcast", "padding", "index"} == set(get_args(Kind))


@pytest.mark.parametrize(
    ("options", "argument", "text"),
    [
        ({"vary": {"y": [1]}}, "vary", "vary names something that the op does not have"),
        ({"vary": {"by.dtype": [torch.float64]}}, "vary", "some of x, by, dims, x.dtype, x.shape"),
        ({"vary": {"by": 3}}, "vary['by']", "vary={'by': [3]}"),
        ({"fixed": "strides"}, "fixed", "some of x, by, dims, size, layout"),
        ({"fixed": ("x.strides",)}, "fixed", "'x.strides'"),
        ({"constraints": 3}, "constraints", "must be callable"),
        ({"constraints": lambda x, n: True}, "constraints", "some of x, by, dims"),
    ],
)
def test_options_that_make_no_sense(registry: Registry, options: Any, argument: str, text: str) -> None:
    roll = roll_of(registry)
    with pytest.raises(ArgumentError, match=re.escape(text)) as caught:
        roll.register_samples(samples, **options)
    assert caught.value.argument == argument
    assert list(roll.samples()) == []


@pytest.mark.parametrize(("found", "got"), [(None, "NoneType"), (3, "int")])
def test_samples_that_are_not_iterable(registry: Registry, found: Any, got: str) -> None:
    roll = roll_of(registry)
    roll.register_samples(lambda: found)
    with pytest.raises(CallbackError, match="the samples are not iterable") as caught:
        roll.samples()
    error = caught.value
    assert (error.op, error.got) == ("samples_tests::roll", got)
    assert error.expected == "tuples of arguments, each args or (args, kwargs)"
    assert error.fix is not None
    assert error.fix.startswith("yield (x,) for each call")


def test_options_end_with_their_scope(registry: Registry) -> None:
    roll = roll_of(registry)
    roll.register_samples(samples, fixed="by")
    with registry.scope():
        roll.register_samples(samples)
        assert roll._samples.fixed == frozenset()
    assert roll._samples.fixed == {"by"}
