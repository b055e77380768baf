"""``when=False``: the object in the place of an op that is not defined."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from customops import Registry, like
from customops.errors import DefinitionError, UndefinedError


def scale(x: Tensor, by: float, *, plus: float = 0.0) -> Tensor:
    return x * by + plus


@pytest.fixture
def off(registry: Registry, ns: str) -> Any:
    return registry.custom_op(f"{ns}::scale", scale, mutates_args=(), when=False)


def test_runs_the_function_and_defines_nothing(registry: Registry, ns: str, off: Any) -> None:
    assert off(torch.ones(2), 3.0, plus=1.0).tolist() == [4, 4]
    assert len(registry) == 0
    assert not torch._C._jit_get_schemas_for_operator(f"{ns}::scale")
    assert not hasattr(off, "_opoverload")
    assert inspect.signature(off) == inspect.signature(scale)


@pytest.mark.parametrize(
    "fake", [like("x"), (like("x"),), "kernel", lambda x, by, plus: x], ids=["like", "likes", "kernel", "function"]
)
def test_takes_every_form_of_a_fake(off: Any, fake: Any) -> None:
    assert off.register_fake(fake) is fake
    assert off.register_fake()(scale) is scale


def test_the_error_names_the_line_of_the_definition(off: Any) -> None:
    with pytest.raises(UndefinedError, match=r"because when= is False, so it has no 'schema'") as caught:
        _ = off.schema
    assert off.source in str(caught.value)
    assert off.source.startswith(__file__)


@pytest.mark.parametrize("when", [True, False])
def test_arguments_are_computed_as_in_an_op(registry: Registry, ns: str, when: bool) -> None:
    options: Any = {"by": lambda x: float(len(x)), "plus": lambda by, x: by + x.dim()}
    op: Any = registry.custom_op(f"{ns}::scale", scale, mutates_args=(), computed_args=options, when=when)
    x = torch.ones(3)
    assert op(x).tolist() == [7, 7, 7]
    assert op(x=x, by=2.0).tolist() == [5, 5, 5]
    assert op(x, plus=0.5).tolist() == [3.5] * 3
    with pytest.raises(TypeError):
        op(x, 2.0)
    with pytest.raises(TypeError):
        op()


@pytest.mark.compile
def test_computed_arguments_compile(registry: Registry, ns: str) -> None:
    op: Any = registry.custom_op(
        f"{ns}::scale", scale, mutates_args=(), computed_args={"by": lambda x: 2.0 * x.dim()}, when=False
    )
    compiled = torch.compile(lambda x: op(x) + 1, fullgraph=True, backend="aot_eager")
    assert compiled(torch.ones(2)).tolist() == [3, 3]


def test_wrong_computed_arguments_are_refused(registry: Registry, ns: str) -> None:
    for given in ({"to": len}, {"by": 2.0}, {"by": lambda y: y}, 5):
        with pytest.raises(DefinitionError, match="scale: "):
            registry.custom_op(f"{ns}::scale", scale, mutates_args=(), computed_args=given, when=False)  # type: ignore[call-overload]
