"""Classes in signatures, as their authors write them: what a kernel sees is what the caller had."""

from __future__ import annotations

import enum
from collections import namedtuple
from dataclasses import dataclass, field, make_dataclass
from typing import Any, ClassVar, List, NamedTuple, Optional, Tuple

import pytest
import torch
from helpers.compiling import BACKENDS, compiled
from torch import Tensor

from customops import Mut, Registry
from customops._dispatch import fingerprint
from customops.errors import ArgumentError, CustomOpsError, SchemaError


class HasScale:
    scale: float


class Base(NamedTuple):
    block: float
    scale: float


class Mixed(Base, HasScale):
    LIMIT: ClassVar[int] = 3


class Made(Base):
    def __new__(cls, block: float, scale: float) -> Any:
        return super().__new__(cls, block * 2, scale)


@dataclass(frozen=True)
class Doubled:
    degrees: float
    calls: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "degrees", self.degrees * 2)
        object.__setattr__(self, "calls", self.calls + 1)


@dataclass(frozen=True)
class Slotted:
    __slots__ = ("degrees",)
    degrees: float


@dataclass
class Result:
    out: Tensor
    times: int = 1

    def __post_init__(self) -> None:
        self.times *= 2


Odd = make_dataclass("Odd", [(name, int) for name in ("fields", "made", "cls", "object", "v0")], frozen=True)


def op_of(registry: Registry, ns: str, cls: Any, seen: List[Any]) -> Any:
    def fn(x: Tensor, value: Any) -> Tensor:
        seen.append(value)
        return x * 1

    fn.__annotations__["value"] = cls
    return registry.custom_op(f"{ns}::f", fn)


@pytest.mark.parametrize(
    "value",
    [Base(1.0, 2.0), Mixed(1.0, 2.0), Made(1.0, 2.0), Doubled(1.0), Slotted(1.0), Odd(1, 2, 3, 4, 5)],
    ids=lambda value: type(value).__name__,
)
def test_kernels_see_the_object(registry: Registry, ns: str, value: Any) -> None:
    seen: List[Any] = []
    op_of(registry, ns, type(value), seen)(torch.ones(1), value)
    assert seen == [value]
    assert type(seen[0]) is type(value)
    assert getattr(seen[0], "calls", 1) == 1


@pytest.mark.compile
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cls", [Made, Doubled, Slotted, Result], ids=lambda cls: cls.__name__)
def test_returned_objects_are_those_of_the_kernel(registry: Registry, ns: str, cls: Any, backend: str) -> None:
    def make(x: Tensor) -> Any:
        return {Made: lambda: Both(x * 2, x * 3), Doubled: lambda: Noted(x * 2), Slotted: lambda: Narrow(x)}.get(
            cls, lambda: Result(x * 2, 3)
        )()

    def fn(x: Tensor) -> Any:
        return make(x.clone())

    fn.__annotations__["return"] = {Made: Both, Doubled: Noted, Slotted: Narrow}.get(cls, Result)
    op = registry.custom_op(f"{ns}::f", fn)
    op.register_fake(make)
    x = torch.ones(2)
    assert repr(compiled(lambda x: op(x), backend)(x)) == repr(fn(x))


class Pair(NamedTuple):
    a: Tensor
    b: Tensor


class Both(Pair):
    def __new__(cls, a: Tensor, b: Tensor) -> Any:
        return super().__new__(cls, a + 1, b)


@dataclass(frozen=True)
class Noted:
    out: Tensor
    calls: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "calls", self.calls + 1)


@dataclass(frozen=True)
class Narrow:
    __slots__ = ("out",)
    out: Tensor


# Defaults that change -------------------------------------------------------------------------------------------


class Sizes(NamedTuple):
    sizes: List[int] = [1]  # noqa: RUF012


@pytest.mark.compile
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_default_that_was_changed(registry: Registry, ns: str, backend: str) -> None:
    def fn(x: Tensor, p: Sizes) -> Tensor:
        return x * sum(p.sizes)

    op = registry.custom_op(f"{ns}::f", fn)
    op.register_fake(lambda x, p: torch.empty_like(x))
    p = Sizes([1])
    object_at_default = Sizes()
    object_at_default.sizes.append(5)
    try:
        assert compiled(lambda x: op(x, object_at_default), backend)(torch.ones(1)).item() == 6
        assert compiled(lambda x: op(x, p), backend)(torch.ones(1)).item() == 1
    finally:
        object_at_default.sizes.pop()


# Names ----------------------------------------------------------------------------------------------------------

NAMES = [
    "result",
    "named",
    "error",
    "self",
    "bypass",
    "type",
    "tuple",
    "len",
    "fn",
    "item",
    "value",
    "Tensor",
    "my cfg",
]


@pytest.mark.parametrize("name", [*NAMES, "RuntimeError", "Choices", "Default"])
def test_names_of_classes(registry: Registry, ns: str, name: str) -> None:
    config = make_dataclass(name, [("v", int), ("w", int, 3)], frozen=True)
    kind = enum.Enum(name, "A B")

    def fn(x: Tensor, c: Any, k: Any, window: Tuple[int, int] = (1, 2), d: Optional[Any] = None) -> Tuple[Tensor, Any]:
        assert type(window) is tuple
        return x * c.v * c.w * k.value + (0 if d is None else d.v), None if d is None else x + 1

    fn.__annotations__ |= {"c": config, "k": kind, "d": Optional[config], "return": Tuple[Tensor, Optional[Tensor]]}
    op = registry.custom_op(f"{ns}::f", fn)
    assert op(torch.ones(1), config(7), kind.B)[0].item() == 42
    out, more = op(torch.ones(1), config(7, 1), kind.A, (3, 4), config(1))
    assert (out.item(), more.item()) == (8, 2)
    with pytest.raises(ArgumentError):
        op(torch.ones(1), config(7), "A")


class Parts(str, enum.Enum):
    def __new__(cls, text: str, n: int) -> Any:
        member = str.__new__(cls, text)
        member._value_ = (text, n)
        return member

    A = ("a", 1)


class Renamed(enum.Enum):
    NEW = "b"
    OLD = "b"


def test_enums_whose_values_are_no_strings(registry: Registry, ns: str) -> None:
    seen: List[Any] = []
    op = op_of(registry, ns, Parts, seen)
    assert op.lower(torch.ones(1), Parts.A)[0][1] == "A"
    op(torch.ones(1), Parts.A)
    assert seen == [Parts.A]


def test_the_old_name_of_a_member(registry: Registry, ns: str) -> None:
    seen: List[Any] = []
    op = op_of(registry, ns, Renamed, seen)
    op._opoverload(torch.ones(1), "OLD")
    assert seen == [Renamed.NEW]


# Refusals -------------------------------------------------------------------------------------------------------


def test_fields_without_types(registry: Registry, ns: str) -> None:
    with pytest.raises(SchemaError, match=r"has unsupported type .*Q: its field a has no type"):
        op_of(registry, ns, namedtuple("Q", "a b"), [])


class Unknown(NamedTuple):
    scale: Nowhere  # type: ignore[name-defined]  # noqa: F821


def test_fields_whose_types_are_unknown(registry: Registry, ns: str) -> None:
    with pytest.raises(SchemaError, match="the annotations of Unknown cannot be read: NameError") as caught:
        op_of(registry, ns, Unknown, [])
    assert f"{ns}::f: parameter value: " in str(caught.value)
    assert caught.value.fix == "import the names that they hold in the module of Unknown"


def test_another_named_tuple(registry: Registry, ns: str) -> None:
    class Other(NamedTuple):
        scale: float
        block: float

    seen: List[Any] = []
    op = op_of(registry, ns, Base, seen)
    with pytest.raises(ArgumentError, match="expected: Base"):
        op(torch.ones(1), Other(1.0, 2.0))
    op(torch.ones(1), (1.0, 2.0))
    assert seen == [Base(1.0, 2.0)]


def test_a_class_that_was_defined_again(registry: Registry, ns: str) -> None:
    def defined() -> Any:
        return make_dataclass("Config", [("n", int)], frozen=True)

    op = op_of(registry, ns, defined(), [])
    with pytest.raises(ArgumentError, match=r"define the op again: .*Config was defined again after it"):
        op(torch.ones(1), defined()(3))


def test_a_rule_with_dimensions_of_another_form(registry: Registry, ns: str) -> None:
    def fn(x: Tensor) -> Any:
        return Pair(x * 1, x * 2)

    fn.__annotations__["return"] = Pair
    op = registry.custom_op(f"{ns}::f", fn)
    op.register_vmap(lambda info, in_dims, x: (Pair(x * 1, x * 2), (0,)))
    with pytest.raises(CustomOpsError, match="out_dims whose structure"):
        torch.vmap(op)(torch.ones(2, 3))


def test_a_digest_knows_what_formulas_see(registry: Registry, ns: str) -> None:
    """An op that only writes has no fake of its own, and its schema has the names of members alone."""

    def digest_with(value: int) -> Any:
        kind = enum.Enum("Kind", {"A": value})

        def fn(x: Mut[Tensor], kind: Any) -> None:
            x.mul_(kind.value)

        fn.__annotations__["kind"] = kind
        op = registry.custom_op(f"{ns}::f", fn)
        op.register_autograd(
            lambda ctx, grad: (grad * ctx.by, None),
            setup_context=lambda ctx, inputs, output: setattr(ctx, "by", inputs[1].value),
        )
        return fingerprint.fingerprint({f"{ns}::f"})

    assert digest_with(2) == digest_with(2)
    assert digest_with(2) != digest_with(3)
