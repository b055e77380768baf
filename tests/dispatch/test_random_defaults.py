"""Defaults of ops made at random reach every callback."""

from typing import Any, List, Optional

import pytest
import torch
from helpers.defaults import (
    Recorder,
    exact,
    taking,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.types import Number

import customops
from customops._schema.infer import read
from customops._schema.parse import parse

pytestmark = pytest.mark.slow


#: Tests may share the machine.
LOADED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


# Generated ------------------------------------------------------------------------------------------------------

integers = st.integers(-(2**63), 2**63 - 1)
strings = st.text(st.characters(exclude_categories=("Cs",)))
numbers = st.one_of(integers, st.floats(), st.booleans())
DEFAULTS = st.one_of(
    *(
        st.tuples(st.just(hint), values)
        for hint, values in {
            int: integers,
            float: st.floats(),
            bool: st.booleans(),
            str: strings,
            Number: numbers,
            List[int]: st.lists(integers),
            List[float]: st.lists(st.floats()),
            List[bool]: st.lists(st.booleans()),
            complex: st.complex_numbers(allow_nan=False),
            List[str]: st.lists(strings),
            List[torch.dtype]: st.lists(st.sampled_from([torch.float, torch.bool, torch.int8])),
            List[Number]: st.lists(numbers),
            Optional[int]: st.none() | integers,
            Optional[bool]: st.none() | st.booleans(),
            Optional[str]: st.none() | strings,
            Optional[float]: st.none() | st.floats(allow_nan=False, allow_infinity=False, allow_subnormal=False),
        }.items()
    )
)


@settings(LOADED, max_examples=150)
@given(DEFAULTS, st.booleans())
def test_any_default_survives(case: tuple[Any, Any], keyword: bool) -> None:
    hint, default = case
    registry = customops.Registry()
    try:
        recorder = Recorder.define(registry, "t_any_default", hint, default, keyword)
        recorder.op(torch.ones(1))
        recorder.packet(torch.ones(1), z=2)
        recorder.op(torch.ones(1, requires_grad=True), y=default)
        recorder.op(torch.ones(1, device="meta"))
        seen = [*recorder.kernel, *recorder.setup, *recorder.fake]
        assert [exact(y) for y in seen] == [exact(default)] * 5
    finally:
        registry.clear()


@settings(LOADED, max_examples=150)
@given(DEFAULTS)
def test_text_of_any_default_reads_back(case: tuple[Any, Any]) -> None:
    schema = read(taking(*case), ()).schema
    again = parse(str(schema)).arguments[1]
    if schema.arguments[1].default_is_none_in_text:
        assert again.default is None
        assert again.type.endswith("?")
    else:
        assert again == schema.arguments[1]
        assert exact(again.default) == exact(case[1])
