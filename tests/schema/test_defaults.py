"""Defaults: from a Python signature to schema text, the dispatcher, and every callback of an op."""

from typing import Any, List, Optional

import numpy as np
import pytest
import torch
from expecttest import assert_expected_inline
from helpers.defaults import (
    UNSAID,
    each_case,
    exact,
    inf,
    nan,
    taking,
)
from torch import Tensor
from torch.types import Number

import customops
from customops import infer_schema
from customops._schema.infer import read
from customops._schema.parse import parse
from customops.errors import SchemaError

# Text -----------------------------------------------------------------------------------------------------------


@pytest.mark.parity(7)
def test_defaults_in_schema_text() -> None:
    def fn(
        x: Tensor,
        a: Optional[int] = None,
        b: float = 3.14,
        c: bool = True,
        d: int = 3,
        e: str = "foo",
        f: torch.dtype = torch.float,
        g: torch.dtype = torch.float32,
        h: torch.dtype = torch.int,
        i: torch.device = torch.device("cpu:0"),  # noqa: B008
        j: torch.device = "cpu",
    ) -> Tensor: ...

    assert_expected_inline(
        infer_schema(fn, mutates_args=()).replace(", ", ",\n"),
        """\
(Tensor x,
SymInt? a=None,
float b=3.14,
bool c=True,
SymInt d=3,
str e="foo",
ScalarType f=float32,
ScalarType g=float32,
ScalarType h=int32,
Device i="cpu:0",
Device j="cpu") -> Tensor""",
    )
    assert infer_schema(fn, mutates_args=()) == torch.library.infer_schema(fn, mutates_args=())


@pytest.mark.parity(7)
@each_case
def test_text(keyword: bool, hint: Any, default: Any, text: str) -> None:
    star = "*, " if keyword else ""
    fn = taking(hint, default, keyword)
    assert infer_schema(fn, mutates_args=()) == f"(Tensor x, {star}{text}, SymInt z=1) -> Tensor"


@pytest.mark.parity(7)
@pytest.mark.parametrize("dtype", sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str))
def test_every_dtype_keeps_its_canonical_name(dtype: torch.dtype) -> None:
    text = infer_schema(taking(torch.dtype, dtype), mutates_args=())
    assert text == f"(Tensor x, ScalarType y={str(dtype).removeprefix('torch.')}, SymInt z=1) -> Tensor"
    assert parse(text).arguments[1].default is dtype


@pytest.mark.parametrize(("hint", "default", "text"), UNSAID, ids=str)
def test_default_without_a_word_is_none_in_the_text(hint: Any, default: Any, text: str) -> None:
    argument = read(taking(hint, default), ()).schema.arguments[1]
    assert argument.default_is_none_in_text
    assert exact(argument.default) == exact(default)
    assert parse(infer_schema(taking(hint, default), mutates_args=())).arguments[1].default is None


# Refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hint", "default", "match"),
    [
        (int, 2**63, "integers have 64 bits"),
        (int, -(2**63) - 1, "integers have 64 bits"),
        (Number, 2**64, "integers have 64 bits"),
        (List[int], [1, 2**63], "integers have 64 bits"),
        (float, 10**400, "too large for a float"),
        (int, 1.0, "a float cannot be the default of an int"),
        (int, "1", "a str cannot be the default of an int"),
        (int, np.int64(1), "a int64 cannot be the default of an int"),
        (float, "1", "a str cannot be the default of a float"),
        (float, 1j, "a complex cannot be the default of a float"),
        (bool, 1, "a int cannot be the default of a bool"),
        (str, 1, "a int cannot be the default of a str"),
        (str, "\ud800", "holds surrogates"),
        (Number, "1", "a str cannot be the default of a Scalar"),
        (torch.dtype, "float32", "a str cannot be the default of a ScalarType"),
        (torch.dtype, float, "a type cannot be the default of a ScalarType"),
        (torch.device, "bogus", "torch knows no such device"),
        (torch.device, "", "torch knows no such device"),
        (torch.device, 0, "a int cannot be the default of a Device"),
        (Tensor, torch.ones(20, 20), "a Tensor cannot be the default of a Tensor"),
        (Optional[Tensor], torch.ones(1), "a Tensor cannot be the default of a Tensor"),
        (List[Tensor], [torch.ones(20, 20)], "a Tensor cannot be the default of a Tensor"),
        (List[int], 3, "expected a list, got int"),
        (List[int], "ab", "expected a list, got str"),
        (List[int], {1}, "expected a list, got set"),
        (List[int], [None], "None is not a SymInt"),
        (List[bool], [1], "a int cannot be the default of a bool"),
        (List[Number], None, r"None is not a Scalar\[\]"),
        (List[int], [*range(1000), 2**63], "integers have 64 bits"),
        (Optional[float], inf, "schema text cannot hold it, and None has its own meaning"),
        (Optional[Number], nan, "schema text cannot hold it, and None has its own meaning"),
        (Optional[List[int]], [1], "schema text cannot hold it, and None has its own meaning"),
        (Optional[List[float]], [], "schema text cannot hold it, and None has its own meaning"),
    ],
)
@pytest.mark.parametrize("keyword", [False, True])
def test_unsupported_default(
    registry: customops.Registry, ns: str, keyword: bool, hint: Any, default: Any, match: str
) -> None:
    fn = taking(hint, default, keyword)
    with pytest.raises(SchemaError, match=match) as caught:
        infer_schema(fn, mutates_args=())
    message = str(caught.value)
    assert message.startswith("fn: parameter y has an unsupported default: ")
    assert f"fn ({fn.__code__.co_filename}:{fn.__code__.co_firstlineno})" in message
    assert len(message.splitlines()) < 8
    assert max(map(len, message.splitlines())) < 200
    with pytest.raises(ValueError, match=match):
        registry.custom_op(f"{ns}::op", fn, mutates_args=())
    assert len(registry) == 0


@pytest.mark.compile
def test_a_default_of_none_makes_the_type_optional(registry: customops.Registry, ns: str) -> None:
    """torch writes ``Tensor bias=None``, and refuses the other types or a None that is passed."""

    @registry.custom_op(f"{ns}::linear", mutates_args=())
    def linear(x: Tensor, bias: Tensor = None, k: int = None) -> Tensor:  # noqa: RUF013
        y = x * (1 if k is None else k)
        return y if bias is None else y + bias

    linear.register_fake(lambda x, bias, k: torch.empty_like(x))
    linear.register_autograd(lambda ctx, g: (g, None if not ctx.needs_input_grad[1] else g, None))
    x, bias = torch.rand(2), torch.rand(2, requires_grad=True)
    for call in (linear, torch.compile(linear, fullgraph=True, backend="aot_eager")):
        assert torch.equal(call(x * 2), x * 2)
        assert torch.equal(call(x, None, None), x * 1)
        assert torch.equal(call(x, k=3), x * 3)
        assert torch.equal(call(x, bias, 3), x * 3 + bias)
        assert torch.equal(torch.autograd.grad(call(x, bias, 3).sum(), bias)[0], torch.ones(2))
