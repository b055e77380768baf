"""`Registry.configure`, and what a `Registry` itself is given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from customops import Registry
from customops.errors import AliasError, DefinitionError


def same(x: Tensor) -> Tensor:
    return x


def test_counts_for_ops_before_and_after_and_ends_with_the_scope(registry: Registry, ns: str) -> None:
    before = registry.custom_op(f"{ns}::before", same, mutates_args=())
    lazy = registry.custom_op(f"{ns}::lazy", same, mutates_args=(), lazy=True)
    x = torch.ones(1)
    with registry.scope():
        registry.configure(ns, check="never")
        after = registry.custom_op(f"{ns}::after", same, mutates_args=())
        assert before(x) is x
        assert after(x) is x
        assert getattr(torch.ops, ns).before(x) is x
    for op in (before, lazy):
        with pytest.raises(AliasError):
            op(x)


def test_the_environment_counts_more(registry: Registry, ns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUSTOMOPS_CHECK", f"never, {ns} = always")
    op = registry.custom_op(f"{ns}::f", same, mutates_args=(), check="never")
    registry.configure(ns, check="never")
    with pytest.raises(AliasError):
        op(torch.ones(1))


def test_eager_goes_on_and_off(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::f", same, mutates_args=())
    x = torch.ones(1)
    registry.configure(ns, eager=True)
    assert op(x) is x
    registry.configure(ns, eager=None)
    with pytest.raises(AliasError):
        op(x)


def test_a_wrong_environment_changes_nothing(registry: Registry, ns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op = registry.custom_op(f"{ns}::f", same, mutates_args=())
    with monkeypatch.context() as wrong:
        wrong.setenv("CUSTOMOPS_CHECK", "sometimes")
        with pytest.raises(DefinitionError, match="CUSTOMOPS_CHECK has an invalid value"):
            registry.configure(ns, check="never")
    later = registry.custom_op(f"{ns}::later", same, mutates_args=())
    for each in (op, later):
        with pytest.raises(AliasError):
            each(torch.ones(1))


@pytest.mark.parametrize("options", [{"check": "sometimes"}, {"eager": 1}, {"chek": "never"}])
def test_wrong_options(registry: Registry, ns: str, options: Any) -> None:
    with pytest.raises(DefinitionError, match=ns):
        registry.configure(ns, **options)


@pytest.mark.parametrize("options", [{"lazy": 1}, {"lazy": None}, {"direct_in_graphs": "no"}])
def test_wrong_options_of_a_registry(options: Any) -> None:
    with pytest.raises(DefinitionError, match="of a Registry must be True or False"):
        Registry(**options)
