"""Settings of threads and scopes; functions that cannot compute an argument."""

from __future__ import annotations

import threading

import pytest
from torch import Tensor

from customops import Registry
from customops.errors import DefinitionError


def scale_fn(x: Tensor, n: int, by: float = 1.0) -> Tensor:
    return x * n * by


def plus_one(x: Tensor) -> Tensor:
    return x + 1


def test_a_scope_takes_back_what_was_set_inside_it_alone(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::f", plus_one, mutates_args=())
    with registry.scope():
        registry.configure(ns, check="never")
        other = threading.Thread(target=lambda: registry.configure(ns, bypass=True))
        other.start()
        other.join()
        assert op._definition.options[:2] == ("never", True)
    assert op._definition.options[:2] == ("always", True)


def test_a_function_without_a_signature_cannot_compute(registry: Registry, ns: str) -> None:
    with pytest.raises(DefinitionError, match=r"does not know the parameters[\s\S]*lambda x: f\(x\)"):
        registry.custom_op(f"{ns}::f", scale_fn, mutates_args=(), computed_args={"n": max})
    assert f"{ns}::f" not in registry
