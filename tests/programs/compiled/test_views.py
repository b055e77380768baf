"""Compiled writes through views of an input that does not start its storage, and through views of another dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from customops import Registry, Tag

BACKENDS = pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
Add = Callable[[Tensor, float], Any]


@pytest.fixture(params=["mutates", "in place"])
def add(request: pytest.FixtureRequest, registry: Registry, ns: str) -> Add:
    def mutate(x: Tensor, by: float) -> None:
        x.add_(by)

    def in_place(x: Tensor, by: float) -> Tensor:
        return x.add_(by)

    if request.param == "mutates":
        return registry.custom_op(f"{ns}::add", mutate, mutates_args=("x",))
    return registry.custom_op(f"{ns}::add_", in_place, mutates_args=("x",), tags=Tag.inplace)


def tail(x: Tensor, add: Add) -> Tensor:
    add(x[1:], 2.0)
    return x * 2


def columns(x: Tensor, add: Add) -> Tensor:
    add(x[:, 1:], 2.0)
    return x * 2


def row(x: Tensor, add: Add) -> Tensor:
    add(x[1], 2.0)
    return x * 2


def steps(x: Tensor, add: Add) -> Tensor:
    add(x[::2], 2.0)
    add(x[1:3], 1.0)
    return x * 2


def add_in_torch(x: Tensor, by: float) -> Tensor:
    return x.add_(by)


def check(program: Callable[..., Tensor], add: Add, make: Callable[[], tuple[Tensor, Tensor]], backend: str) -> None:
    """The compiled program with the op writes what the eager one writes with torch's own."""
    base, part = make()
    expected = program(part, add_in_torch)
    compiled_base, compiled_part = make()
    result = torch.compile(program, backend=backend, fullgraph=True)(compiled_part, add)
    torch.testing.assert_close(result, expected, rtol=0, atol=0)
    torch.testing.assert_close(compiled_base, base, rtol=0, atol=0)


@BACKENDS
@pytest.mark.parametrize("program", [tail, columns, row, steps])
def test_write_to_a_slice_of_an_input_with_an_offset(program: Any, add: Add, backend: str) -> None:
    def make() -> tuple[Tensor, Tensor]:
        base = torch.zeros(3, 4, 5)
        return base, base[1]

    check(program, add, make, backend)


def test_write_to_a_slice_of_an_input_with_a_small_offset(add: Add) -> None:
    """The offset of the slice into the memory would be one into the input, too, and a wrong one."""

    def make() -> tuple[Tensor, Tensor]:
        base = torch.zeros(9)
        return base, base[1:]

    check(steps, add, make, "aot_eager")


@pytest.mark.parametrize("program", [tail, steps])
def test_the_same_with_a_second_size(program: Any, add: Add) -> None:
    compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
    for size in (4, 6, 9):
        base, other = torch.zeros(2, size), torch.zeros(2, size)
        expected, result = program(base[1], add_in_torch), compiled(other[1], add)
        torch.testing.assert_close((result, other), (expected, base), rtol=0, atol=0)


def cache(k: Tensor, v: Tensor, new: Tensor, position: int, add: Add) -> Tensor:
    add(k[:, position : position + 1], 1.0)
    add(v[:, position : position + 1], 2.0)
    return k.sum() + v.sum() + new.sum()


@BACKENDS
def test_cache_whose_halves_are_inputs(add: Add, backend: str) -> None:
    compiled = torch.compile(cache, backend=backend, fullgraph=True)
    for position in (1, 2):
        kv, other = torch.zeros(2, 1, 3), torch.zeros(2, 1, 3)
        expected = cache(kv[0], kv[1], torch.ones(2), position, add_in_torch)
        result = compiled(other[0], other[1], torch.ones(2), position, add)
        torch.testing.assert_close((result, other), (expected, kv), rtol=0, atol=0)


def real_parts(x: Tensor, add: Add) -> Tensor:
    add(torch.view_as_real(x)[1], 1.0)
    return x * 1


def halves_of_doubles(x: Tensor, add: Add) -> Tensor:
    add(x.view(torch.float32)[2:5], 1.0)
    return x * 1


@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
@BACKENDS
@pytest.mark.parametrize(("program", "dtype"), [(real_parts, torch.cfloat), (halves_of_doubles, torch.double)])
def test_write_through_a_view_of_another_dtype(program: Any, dtype: torch.dtype, add: Add, backend: str) -> None:
    def make() -> tuple[Tensor, Tensor]:
        base = torch.zeros(4, dtype=dtype)
        return base, base

    check(program, add, make, backend)


# Rules that compilers trace in the place of the op ----------------------------------------------------------------


def test_vmap_rule_that_does_not_call_the_op(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::same", mutates_args=())
    def same(x: Tensor) -> Tensor:
        return x.clone()

    same.register_fake(torch.empty_like)
    same.register_vmap(lambda info, in_dims, x: (x * 2, in_dims[0]))
    compiled = torch.compile(lambda x: torch.vmap(same)(x), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(torch.ones(2, 2)), torch.full((2, 2), 2.0))
    same.register_vmap(lambda info, in_dims, x: (x * 5, in_dims[0]))
    torch.testing.assert_close(compiled(torch.ones(2, 2)), torch.full((2, 2), 5.0))
    same.unregister()
    with pytest.raises(Exception, match="unregistered"):
        compiled(torch.ones(2, 2))


def test_composite_kernel(registry: Registry, ns: str) -> None:
    registry.define(f"{ns}::scaled", "(Tensor x) -> Tensor")
    compiled = torch.compile(lambda x: getattr(torch.ops, ns).scaled(x) + 0, backend="aot_eager", fullgraph=True)
    for factor in (2, 5):
        with registry.scope():
            registry.impl(f"{ns}::scaled", "CompositeImplicitAutograd", lambda x, factor=factor: x * factor)
            torch.testing.assert_close(compiled(torch.ones(2)), torch.full((2,), float(factor)))
