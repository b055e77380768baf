"""`Registry.configure` and the environment: how the ops of a namespace are called."""

from __future__ import annotations

import threading
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


def passes(op: Any) -> bool:
    """Do calls of the object pass the dispatcher by?"""
    return "# A call of the object" in op.explain_call()


def test_it_counts_before_and_after(registry: Registry, ns: str) -> None:
    before = registry.custom_op(f"{ns}::before", same_fn, mutates_args=())
    x = torch.ones(1)
    with pytest.raises(AliasError):
        before(x)
    registry.configure(ns, check="never", bypass=True)
    after = registry.custom_op(f"{ns}::after", same_fn, mutates_args=(), check="always")
    other = registry.custom_op(f"{ns}_other::f", same_fn, mutates_args=())
    assert before(x) is x
    assert after(x) is x
    assert [passes(op) for op in (before, after, other)] == [True, True, False]
    with pytest.raises(AliasError):
        other(x)
    registry.configure(ns, check=None)
    for op in (before, after):
        with pytest.raises(AliasError):
            op(x)
        assert passes(op)
    registry.clear()
    again = registry.custom_op(f"{ns}::after", same_fn, mutates_args=())
    assert not passes(again)


def test_it_ends_with_its_scope(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::f", same_fn, mutates_args=(), bypass=True)
    x = torch.ones(1)
    registry.configure(ns, eager=True)
    assert op(x) is x
    with registry.scope():
        registry.configure(ns, eager=False, bypass=False)
        assert not passes(op)
        with pytest.raises(AliasError):
            op(x)
    assert passes(op)
    assert op(x) is x


def test_other_registries_and_lazy_ops(registry: Registry, ns: str) -> None:
    other = Registry()
    theirs = other.custom_op(f"{ns}::theirs", double_fn, mutates_args=())
    lazy = registry.custom_op(f"{ns}::lazy", double_fn, mutates_args=(), lazy=True)
    registry.configure(ns, bypass=True)
    assert lazy(torch.ones(1)).item() == 2
    assert passes(lazy)
    assert not passes(theirs)
    other.clear()


def test_what_is_refused_changes_nothing(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::f", double_fn, mutates_args=())
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        (ns, {"bypass": True, "check": "sometimes"}, 'check= has an invalid value(.|\n)*"always", "first" or "never"'),
        (ns, {"bypass": 1}, "bypass= has an invalid value"),
        (ns, {"bypas": True}, "configure has no such option"),
        (f"{ns}::f", {"bypass": True}, "takes the name of a namespace"),
        (None, {"bypass": True}, "takes the name of a namespace"),
    ]
    for namespace, options, problem in wrong:
        with pytest.raises(DefinitionError, match=problem):
            registry.configure(namespace, **options)
    assert not passes(op)


@pytest.mark.parametrize(
    ("value", "bypasses"),
    [("1", True), ("0", False), ("{ns}=1", True), ("1,{ns}=0", False), ("other=1", False), (" {ns} = 1 , 0 ", True)],
)
def test_the_environment_counts_most(
    registry: Registry, ns: str, monkeypatch: pytest.MonkeyPatch, value: str, bypasses: bool
) -> None:
    monkeypatch.setenv("CUSTOMOPS_BYPASS", value.format(ns=ns))
    op = registry.custom_op(f"{ns}::f", double_fn, mutates_args=(), bypass=not bypasses and "other" not in value)
    assert passes(op) is bypasses
    if "other" not in value:
        registry.configure(ns, bypass=not bypasses)
        assert passes(op) is bypasses


def test_a_value_that_the_environment_cannot_have(registry: Registry, ns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("yes", "=1", f"{ns}=never"):
        monkeypatch.setenv("CUSTOMOPS_EAGER", value)
        with pytest.raises(DefinitionError, match="the environment variable CUSTOMOPS_EAGER has an invalid value"):
            registry.custom_op(f"{ns}::f", double_fn, mutates_args=())
        assert not hasattr(getattr(torch.ops, ns), "f")


@pytest.mark.compile
def test_direct_calls_in_graphs_are_switched(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::f", double_fn, mutates_args=())
    assert op._definition.options.direct_in_graphs
    registry.configure(ns, direct_in_graphs=False)
    assert not op._definition.options.direct_in_graphs
    op.register_fake(torch.empty_like)
    assert torch.compile(op, fullgraph=True, backend="aot_eager")(torch.ones(2)).tolist() == [2, 2]


def test_an_op_that_comes_back_is_as_the_namespace_says(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::f", double_fn, mutates_args=())
    with registry.scope():
        registry.custom_op(f"{ns}::f", same_fn, mutates_args=())
    registry.configure(ns, bypass=True)
    assert passes(op)
    with registry.scope():
        op.unregister()
        registry.configure(ns, bypass=False)
    op = registry.custom_op(f"{ns}::f", double_fn, mutates_args=())
    assert passes(op)


def test_eager_goes_on_and_off(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::f", same_fn, mutates_args=())
    x = torch.ones(1)
    registry.configure(ns, eager=True)
    assert op(x) is x
    registry.configure(ns, eager=None)
    with pytest.raises(AliasError):
        op(x)


def test_a_wrong_environment_changes_nothing(registry: Registry, ns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op = registry.custom_op(f"{ns}::f", same_fn, mutates_args=())
    with monkeypatch.context() as wrong:
        wrong.setenv("CUSTOMOPS_CHECK", "sometimes")
        with pytest.raises(DefinitionError, match="CUSTOMOPS_CHECK has an invalid value"):
            registry.configure(ns, check="never")
    later = registry.custom_op(f"{ns}::later", same_fn, mutates_args=())
    for each in (op, later):
        with pytest.raises(AliasError):
            each(torch.ones(1))


@pytest.mark.parametrize("options", [{"lazy": 1}, {"lazy": None}, {"direct_in_graphs": "no"}])
def test_wrong_options_of_a_registry(options: Any) -> None:
    with pytest.raises(DefinitionError, match="of a Registry must be True or False"):
        Registry(**options)


def test_a_scope_takes_back_what_was_set_inside_it_alone(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::f", double_fn, mutates_args=())
    with registry.scope():
        registry.configure(ns, check="never")
        other = threading.Thread(target=lambda: registry.configure(ns, bypass=True))
        other.start()
        other.join()
        assert op._definition.options[:2] == ("never", True)
    assert op._definition.options[:2] == ("always", True)
