"""Effects of ops that come back, and definitions that are compared and digested to the last default."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.effects import _EffectType, _get_effect

from customops import Registry, Tag
from customops._dispatch import fingerprint
from customops.errors import DefinitionError, RegistrationError, UnsupportedError


def log(x: Tensor) -> None: ...


def test_an_effect_comes_back_with_its_op(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::log", log, mutates_args=())
    op.register_effect(_EffectType.ORDERED)
    with registry.scope():
        registry.custom_op(f"{ns}::log", log, mutates_args=())
        assert _get_effect(getattr(torch.ops, ns).log.default) is None
    assert _get_effect(getattr(torch.ops, ns).log.default) is _EffectType.ORDERED
    with registry.scope():
        op.register_effect(None)
        assert _get_effect(getattr(torch.ops, ns).log.default) is None
    assert _get_effect(getattr(torch.ops, ns).log.default) is _EffectType.ORDERED


def test_digests_tell_effects_apart(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::log", log, mutates_args=())
    before = fingerprint.fingerprint({f"{ns}::log"})
    op.register_effect(_EffectType.ORDERED)
    assert fingerprint.fingerprint({f"{ns}::log"}) != before


def test_digests_tell_defaults_apart(registry: Registry, ns: str) -> None:
    digests = set()
    for default in (math.inf, -math.inf, math.nan, 1e-320, 1.0, 0.0, -0.0):

        def scale(x: Tensor, by: float = default) -> Tensor:
            return x * by

        registry.custom_op(f"{ns}::scale", scale, mutates_args=())
        digests.add(fingerprint.fingerprint({f"{ns}::scale"}))
    assert len(digests) == 7


@pytest.mark.parametrize(("before", "after", "is_same"), [(math.nan, math.nan, True), (0.0, -0.0, False)])
def test_reuse_compares_defaults_exactly(
    registry: Registry, ns: str, before: float, after: float, is_same: bool
) -> None:
    def define(default: float) -> Any:
        def scale(x: Tensor, by: float = default) -> Tensor:
            return x * by

        return registry.custom_op(f"{ns}::scale", scale, mutates_args=(), on_conflict="reuse")

    op = define(before)
    if is_same:
        assert define(after) is op
        return
    with pytest.raises(DefinitionError, match="needs the same schema"):
        define(after)


@pytest.mark.parametrize("default", [math.inf, -0.0])
def test_bypass_gives_a_kernel_what_the_dispatcher_gives(registry: Registry, ns: str, default: float) -> None:
    seen: list[Any] = []

    def record(x: Tensor, by: float = default) -> Tensor:
        seen.append(by)
        return x + 1

    op: Any = registry.custom_op(f"{ns}::record", record, mutates_args=(), bypass=True)
    for _ in range(3):
        op(torch.ones(1), 0.0 if default == 0 else None)
    assert list(map(repr, seen)) == [repr(default)] * 3


def test_a_keyword_of_python_is_found_before_anything_changes(registry: Registry, ns: str) -> None:
    first = registry.custom_op(f"{ns}::f", lambda x: x + 1, mutates_args=(), schema="(Tensor x) -> Tensor")
    handle = getattr(torch.ops, ns).f.default
    with pytest.raises(UnsupportedError, match="lambda"):
        registry.custom_op(f"{ns}::f", lambda x, **kw: x, mutates_args=(), schema="(Tensor x, *, int lambda) -> Tensor")
    assert first(torch.zeros(1)).item() == handle(torch.zeros(1)).item() == 1


def test_device_types_of_an_iterator(registry: Registry, ns: str) -> None:
    def devices() -> Iterator[str]:
        yield "cpu"

    op: Any = registry.custom_op(
        f"{ns}::f",
        lambda x: x + 1,
        mutates_args=(),
        schema="(Tensor x) -> Tensor",
        device_types=devices(),  # type: ignore[arg-type]
    )
    assert op(torch.zeros(1)).item() == 1
    op.register_kernel(devices(), lambda x: x + 2)
    assert op(torch.zeros(1)).item() == 2


def test_lib_is_a_library(registry: Registry, ns: str) -> None:
    op: Any = registry.custom_op(f"{ns}::f", lambda x: x + 1, mutates_args=(), schema="(Tensor x) -> Tensor")
    with pytest.raises(RegistrationError, match="lib= must be a"):
        op.register_fake(lambda x: x, lib=3)


def test_the_name_of_a_variant_that_is_taken(registry: Registry, ns: str) -> None:
    def add_(x: Tensor) -> Tensor:
        return x.add_(1)

    registry.custom_op(f"{ns}::f__writes", lambda x: x + 1, mutates_args=(), schema="(Tensor x) -> Tensor")
    first = registry.custom_op(f"{ns}::f", lambda x: x + 1, mutates_args=(), schema="(Tensor x) -> Tensor")
    handle = getattr(torch.ops, ns).f.default
    with pytest.raises(DefinitionError, match="f__writes exists"):
        registry.custom_op(f"{ns}::f", add_, mutates_args=("x",), tags=Tag.inplace)
    assert first(torch.zeros(1)).item() == handle(torch.zeros(1)).item() == 1
    registry.custom_op(f"{ns}::g", add_, mutates_args=("x",), tags=Tag.inplace)
    again = registry.custom_op(f"{ns}::g", add_, mutates_args=("x",), tags=Tag.inplace)
    assert again(torch.zeros(1)).item() == 1
