"""``when=``: an op that is defined in some environments."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import customops
from customops import Registry, Undefined, like
from customops.errors import DefinitionError, UndefinedError


def double_fn(x: Tensor, by: float = 2.0) -> Tensor:
    """Doubles."""
    return x * by


@pytest.fixture
def off(registry: Registry, ns: str) -> Any:
    return registry.custom_op(f"{ns}::double", double_fn, mutates_args=(), when=False)


def test_the_function_is_called(off: Any, registry: Registry, ns: str) -> None:
    assert isinstance(off, Undefined)
    assert off(torch.ones(2), by=3.0).tolist() == [3, 3]
    x = torch.ones(2, requires_grad=True)
    assert torch.autograd.grad(off(x).sum(), x)[0].tolist() == [2, 2]
    assert off.__name__ == "double_fn"
    assert off.__doc__ == "Doubles."
    assert len(registry) == 0
    assert not hasattr(getattr(torch.ops, ns), "double")


def test_registrations_are_taken_and_left_alone(off: Any) -> None:
    """With and without options, as decorators and calls: each gives back the function."""
    for register in (off.register_fake, off.register_autograd, off.register_vmap, off.register_samples):
        assert register(double_fn) in (double_fn, None)
    assert off.register_kernel("cpu", double_fn) is double_fn
    assert off.register_kernel("cpu")(double_fn) is double_fn
    with off.set_kernel_enabled("cpu", False):
        assert off(torch.ones(1)).item() == 2
    off.unregister()


def test_what_needs_an_op_is_refused(off: Any, ns: str) -> None:
    for ask in (lambda: off._opoverload, lambda: off.schema, lambda: pickle.dumps(off)):
        with pytest.raises(UndefinedError, match=f"{ns}::double"):
            ask()
    assert not hasattr(off, "schema")


@pytest.mark.compile
def test_compilers_trace_the_function(off: Any, ns: str) -> None:
    graphs: list[str] = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph.code)
        return graph

    assert torch.compile(off, fullgraph=True, backend=keep)(torch.ones(2)).tolist() == [2, 2]
    assert ns not in graphs[0]


def test_when_is_asked_once(registry: Registry, ns: str) -> None:
    asked: list[int] = []

    def when() -> bool:
        asked.append(1)
        return len(asked) == 2

    first, second = (
        registry.custom_op(f"{ns}::{name}", double_fn, mutates_args=(), when=when) for name in ("first", "second")
    )
    assert [type(first), isinstance(second, Undefined), len(asked)] == [Undefined, False, 2]
    assert second._qualname == f"{ns}::second"


def test_a_value_that_is_neither(registry: Registry, ns: str) -> None:
    with pytest.raises(DefinitionError, match="when must be True or False, or a function that returns one"):
        registry.custom_op(f"{ns}::f", double_fn, mutates_args=(), when="cuda")  # type: ignore[arg-type]
    assert customops.Undefined is Undefined


# Fakes and computed arguments, as in an op ------------------------------------------------------------------------


def scale(x: Tensor, by: float, *, plus: float = 0.0) -> Tensor:
    return x * by + plus


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
