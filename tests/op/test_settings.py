"""Environment variables that override how the ops of a namespace are called, and the options of a registry."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from customops import Registry
from customops.errors import AliasError, DefinitionError


def same_fn(x: Tensor) -> Tensor:
    return x


def double_fn(x: Tensor) -> Tensor:
    return x * 2


def skips_dispatcher(op: Any) -> bool:
    return "# A call of the object" in op.explain_call()


def test_a_variable_applies_to_ops_defined_after_it_is_set(
    registry: Registry, ns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = registry.custom_op(f"{ns}::before", same_fn, mutates_args=())
    x = torch.ones(1)
    with pytest.raises(AliasError):
        before(x)
    with monkeypatch.context() as variables:
        variables.setenv("CUSTOMOPS_CHECK", f"always,{ns}=never")
        variables.setenv("CUSTOMOPS_BYPASS", f"{ns}=1")
        after = registry.custom_op(f"{ns}::after", same_fn, mutates_args=(), check="always")
        other = registry.custom_op(f"{ns}_other::f", same_fn, mutates_args=(), check="never")
        assert after(x) is x
        for op in (before, other):
            with pytest.raises(AliasError):
                op(x)
        assert [skips_dispatcher(op) for op in (before, after, other)] == [False, True, False]
    assert after(x) is x
    registry.clear()
    again = registry.custom_op(f"{ns}::after", same_fn, mutates_args=())
    assert not skips_dispatcher(again)
    with pytest.raises(AliasError):
        again(x)


def test_a_variable_applies_to_all_registries(registry: Registry, ns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUSTOMOPS_BYPASS", f"{ns}=1")
    other = Registry()
    for each in (registry, other):
        op = each.custom_op(f"{ns}::f", double_fn, mutates_args=())
        assert op(torch.ones(1)).item() == 2
        assert skips_dispatcher(op)
    other.clear()


@pytest.mark.parametrize(
    ("value", "bypasses"),
    [("1", True), ("0", False), ("{ns}=1", True), ("1,{ns}=0", False), ("other=1", False), (" {ns} = 1 , 0 ", True)],
)
def test_a_variable_overrides_the_option(
    registry: Registry, ns: str, monkeypatch: pytest.MonkeyPatch, value: str, bypasses: bool
) -> None:
    monkeypatch.setenv("CUSTOMOPS_BYPASS", value.format(ns=ns))
    op = registry.custom_op(f"{ns}::f", double_fn, mutates_args=(), bypass=not bypasses and "other" not in value)
    assert skips_dispatcher(op) is bypasses


@pytest.mark.parametrize("option", ["bypass", "eager", "direct_in_graphs", "choose_when_traced"])
@pytest.mark.parametrize("value", ["0", "1"])
def test_each_switch_has_a_variable(
    registry: Registry, ns: str, monkeypatch: pytest.MonkeyPatch, option: str, value: str
) -> None:
    monkeypatch.setenv(f"CUSTOMOPS_{option.upper()}", f"{ns}={value}")
    given: dict[str, Any] = {option: value == "0"}
    op = registry.custom_op(f"{ns}::f", double_fn, mutates_args=(), **given)
    assert getattr(op._definition.options, option) is (value == "1")
    assert op(torch.ones(1)).item() == 2


def test_eager_by_the_environment(registry: Registry, ns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(1)
    monkeypatch.setenv("CUSTOMOPS_EAGER", f"{ns}=1")
    assert registry.custom_op(f"{ns}::f", same_fn, mutates_args=())(x) is x
    monkeypatch.setenv("CUSTOMOPS_EAGER", f"{ns}=0")
    op = registry.custom_op(f"{ns}::f", same_fn, mutates_args=(), eager=True, bypass=True)
    assert skips_dispatcher(op)
    with pytest.raises(AliasError):
        op(x)


@pytest.mark.compile
def test_direct_calls_in_graphs_by_the_environment(
    registry: Registry, ns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUSTOMOPS_DIRECT_IN_GRAPHS", f"{ns}=0")
    op = registry.custom_op(f"{ns}::f", double_fn, mutates_args=(), direct_in_graphs=True)
    op.register_fake(torch.empty_like)
    _, (code,) = torch._inductor.utils.run_and_get_code(torch.compile(op, fullgraph=True), torch.ones(2))
    assert f"torch.ops.{ns}.f.default" in code
    assert "direct_call(" not in code


def test_an_op_that_comes_back_has_the_options_it_was_defined_with(
    registry: Registry, ns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUSTOMOPS_BYPASS", f"{ns}=1")
    op = registry.custom_op(f"{ns}::f", double_fn, mutates_args=())
    monkeypatch.setenv("CUSTOMOPS_BYPASS", f"{ns}=0")
    with registry.scope():
        inner = registry.custom_op(f"{ns}::f", same_fn, mutates_args=())
        assert not skips_dispatcher(inner)
    assert skips_dispatcher(op)
    assert op(torch.ones(1)).item() == 2


@pytest.mark.parametrize(
    ("variable", "values"),
    [
        ("CUSTOMOPS_EAGER", ("yes", "=1", "{ns}=never")),
        ("CUSTOMOPS_CHECK", ("sometimes", "=never", "{ns}=1", "never,{ns}=once")),
    ],
)
def test_an_invalid_value_is_rejected_and_changes_nothing(
    registry: Registry, ns: str, monkeypatch: pytest.MonkeyPatch, variable: str, values: tuple[str, ...]
) -> None:
    before = registry.custom_op(f"{ns}::before", same_fn, mutates_args=())
    for value in values:
        with monkeypatch.context() as wrong:
            wrong.setenv(variable, value.format(ns=ns))
            with pytest.raises(DefinitionError, match=f"the environment variable {variable} has an invalid value"):
                registry.custom_op(f"{ns}::f", double_fn, mutates_args=())
        assert not hasattr(getattr(torch.ops, ns), "f")
    after = registry.custom_op(f"{ns}::f", same_fn, mutates_args=())
    for op in (before, after):
        with pytest.raises(AliasError):
            op(torch.ones(1))


def test_the_options_of_a_registry_are_switches() -> None:
    wrong: Any = {"direct_in_graphs": "no"}
    with pytest.raises(DefinitionError, match="direct_in_graphs of a Registry must be True or False"):
        Registry(**wrong)
