"""Calls of ops with rich types: what they look like from outside, and what reaches the dispatcher."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Annotated, Any, List, Literal, NamedTuple, Optional, Tuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from customops import Mut, Registry, SameAs
from customops.errors import DefinitionError, KernelError, SchemaError, UnregisteredError


class Mode(Enum):
    FAST = "fast"
    EXACT = "exact"


class Bits(IntEnum):
    FOUR = 4
    EIGHT = 8


@dataclass(frozen=True)
class Inner:
    factor: float = 2.0
    sizes: Tuple[int, int] = (1, 2)


@dataclass(frozen=True)
class Config:
    block: int
    mode: Mode = Mode.FAST
    limit: float = float("inf")
    inner: Inner = field(default_factory=Inner)
    weight: Optional[Tensor] = None


def configured(x: Tensor, config: Config, bits: Bits = Bits.EIGHT, *, other: Optional[Config] = None) -> Tensor:
    assert type(config) is Config
    assert type(config.mode) is Mode
    assert type(config.inner.sizes) is tuple
    result = x.clamp(max=config.limit) * config.block * config.inner.factor * bits
    result = result if config.weight is None else result * config.weight
    return result if other is None else result + other.block


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: List[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((str(func), args[1:], kwargs or {}))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def op(registry: Registry, ns: str) -> Any:
    return registry.custom_op(f"{ns}::configured", configured)


def test_schema(op: Any) -> None:
    assert str(op.schema) == (
        '(Tensor x, SymInt config_block, int bits=8, *, str config_mode="FAST", float? config_limit=None, '
        "float config_inner_factor=2.0, SymInt[2] config_inner_sizes=[1, 2], Tensor? config_weight=None, "
        'bool other_given=False, SymInt? other_block=None, str? other_mode="FAST", float? other_limit=None, '
        "float? other_inner_factor=2.0, SymInt[2]? other_inner_sizes=None, Tensor? other_weight=None) -> Tensor"
    )


@pytest.mark.parametrize(
    "config",
    [
        Config(3),
        Config(3, Mode.EXACT, 0.5, Inner(3.0, (4, 5)), torch.tensor(2.0)),
        Config(3, limit=-0.0),
        Config(3, inner=Inner(factor=-0.0)),
    ],
    ids=["defaults", "all", "negative zero", "negative zero inside"],
)
@pytest.mark.parametrize("other", [None, Config(7), Config(7, Mode.EXACT, 1.0, Inner(1.0))], ids=["none", "7", "all"])
def test_values_reach_the_kernel(op: Any, config: Config, other: Optional[Config]) -> None:
    x = torch.tensor([-1.0, 0.0, 2.0])
    expected = configured(x, config, Bits.FOUR, other=other)
    for result in (
        op(x, config, Bits.FOUR, other=other),
        op(x, config=config, bits=Bits.FOUR, other=other),
        (lambda args, kwargs: op._opoverload(*args, **kwargs))(*op.lower(x, config, Bits.FOUR, other=other)),
    ):
        torch.testing.assert_close(result, expected, rtol=0, atol=0)
        assert torch.equal(result.signbit(), expected.signbit())


def test_what_is_at_its_default_is_not_passed(op: Any) -> None:
    with Calls() as seen:
        op(torch.ones(2), Config(3))
        op(torch.ones(2), Config(3, Mode.EXACT, 2.0), other=Config(1))
    (_, first, named), (_, _, others) = (call for call in seen.calls if "configured" in call[0])
    assert first == (3,)
    assert {name: value for name, value in named.items() if value is not None} == {}
    assert {name: others[name] for name in ("config_mode", "config_limit", "other_given", "other_block")} == {
        "config_mode": "EXACT",
        "config_limit": 2.0,
        "other_given": True,
        "other_block": 1,
    }


def test_the_object_at_a_default_is_the_one_of_the_parameter(registry: Registry, ns: str) -> None:
    """A default of a parameter counts more than those of the fields."""

    def fn(x: Tensor, config: Config = Config(1, Mode.EXACT, 4.0)) -> Tensor:
        return x * config.limit * (10 if config.mode is Mode.EXACT else 1)

    op = registry.custom_op(f"{ns}::f", fn)
    x = torch.ones(1)
    for args in ((), (Config(1),), (Config(1, Mode.EXACT),), (Config(1, Mode.FAST, 4.0),)):
        torch.testing.assert_close(op(x, *args), fn(x, *args))


def test_python_names_the_op_where_arguments_are_missing(op: Any) -> None:
    with pytest.raises(TypeError, match=r"configured\(\) missing 1 required positional argument: 'config'"):
        op(torch.ones(2))
    with pytest.raises(TypeError, match=r"configured\(\) got an unexpected keyword argument 'conf'"):
        op(torch.ones(2), conf=Config(3))


def test_removed_and_back(op: Any, registry: Registry) -> None:
    x = torch.ones(2)
    with registry.scope():
        registry.custom_op(op._qualname, lambda x: x + 1, schema="(Tensor x) -> Tensor")
    torch.testing.assert_close(op(x, Config(3)), configured(x, Config(3)))
    op.unregister()
    with pytest.raises(UnregisteredError):
        op(x, Config(3))


def test_reuse_needs_the_same_types(registry: Registry, ns: str) -> None:
    def of_mode(x: Tensor, mode: Mode) -> Tensor:
        return x + 1

    def of_text(x: Tensor, mode: Literal["FAST", "EXACT"]) -> Tensor:
        return x + 1

    op = registry.custom_op(f"{ns}::f", of_mode)
    assert registry.custom_op(f"{ns}::f", of_mode, on_conflict="reuse") is op
    with pytest.raises(DefinitionError, match="needs the same types"):
        registry.custom_op(f"{ns}::f", of_text, on_conflict="reuse")


def test_same_as_of_another_parameter(registry: Registry, ns: str) -> None:
    def fn(p: Tensor, q: Mut[Tensor]) -> Annotated[Tensor, SameAs("q")]:
        return q

    with pytest.raises(SchemaError, match="make q the first parameter"):
        registry.custom_op(f"{ns}::f", fn)


class Out(NamedTuple):
    out: Tensor
    more: Optional[Tensor]


@pytest.mark.parametrize(
    ("returned", "argument", "got"),
    [
        (lambda x: Out(None, x), "return.out", "None"),
        (lambda x: Out(x * 1, 3), "return.more", "int"),
        (lambda x: x * 1, None, "Tensor"),
        (lambda x: [x * 1, None], None, "list of 2"),
    ],
    ids=["none", "number", "alone", "list"],
)
def test_results_that_do_not_fit(registry: Registry, ns: str, returned: Any, argument: Any, got: str) -> None:
    def fn(x: Tensor) -> Out:
        return returned(x)  # type: ignore[no-any-return]

    op = registry.custom_op(f"{ns}::f", fn)
    with pytest.raises(KernelError, match="does not fit the signature") as caught:
        op(torch.ones(2))
    assert caught.value.argument == argument
    assert str(caught.value.got).startswith(got)
    assert "test_calls.py" in str(caught.value.where)
