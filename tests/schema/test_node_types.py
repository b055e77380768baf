"""Nodes in the words of the signature that they were read from."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, Optional, TypedDict

import pytest
import torch
from torch import Tensor

from customops import Keys
from customops._schema.advice import may_be_none, part_with, type_of
from customops._schema.infer import read
from customops._schema.structure import Group, Node
from customops.errors import SchemaError


class Mode(enum.Enum):
    UP = 1


class Pair(NamedTuple):
    weight: Tensor
    by: float = 1.0


class Settings(TypedDict):
    by: float


@dataclass(frozen=True)
class Config:
    settings: Settings
    limit: float | Tensor = 0.0
    window: tuple[int, str] = (1, "a")


def node_of(hint: Any) -> Node:
    def f(x: Tensor, y: Any, *, mode: Mode = Mode.UP) -> Tensor: ...

    f.__annotations__["y"] = hint
    signature = read(f, None).signature
    assert signature is not None
    return signature.parameters[1].node


@pytest.mark.parametrize(
    ("hint", "written"),
    [
        (int, "int"),
        (torch.dtype, "torch.dtype"),
        (Sequence[int], "list[int]"),
        (Mode, "Mode"),
        (Literal["a", 4], 'Literal["a", 4]'),
        (tuple[int, int], "tuple[int, int]"),
        (tuple[Mode, ...], "tuple[Mode, ...]"),
        (torch.Size, "torch.Size"),
        (list[torch.dtype], "list[torch.dtype]"),
        (tuple[int, Optional[str]], "tuple[int, str | None]"),
        (float | Tensor, "float | Tensor"),
        (list[list[Tensor]], "list[list[Tensor]]"),
        (Pair, "Pair"),
        (Config, "Config"),
        (Settings, "Settings"),
        (Annotated[dict[str, Tensor], Keys("q")], 'Annotated[dict[str, Tensor], Keys("q")]'),
    ],
)
def test_type_of(hint: Any, written: str) -> None:
    node = node_of(hint)
    assert (type_of(node), may_be_none(node)) == (written, False)
    optional = node_of(Optional[hint])
    assert (type_of(optional), may_be_none(optional)) == (written, True)


@pytest.mark.parametrize(
    ("name", "path"),
    [("y_settings_by", "y.settings['by']"), ("y_limit_number", "y.limit"), ("y_window_0", "y.window[0]")],
)
def test_part_with(name: str, path: str) -> None:
    node = node_of(Config)
    assert isinstance(node, Group)
    part = part_with(node, name)
    assert part is not None
    assert part.path == path
    assert part_with(node, "x") is None


@pytest.mark.parametrize(
    ("default", "fix"),
    [
        (Config(None), "y.settings: Settings | None = None"),  # type: ignore[arg-type]
        (Config({"by": 1.0}, None), "y.limit: float | Tensor | None = None"),  # type: ignore[arg-type]
        (Config({"by": 1.0}, 1.0, None), "y.window: tuple[int, str] | None = None"),  # type: ignore[arg-type]
    ],
)
def test_a_default_of_none_is_told_the_type_that_may_be_none(default: Config, fix: str) -> None:
    def f(x: Tensor, y: Config = default) -> Tensor: ...

    with pytest.raises(SchemaError) as caught:
        read(f, None)
    assert caught.value.fix == fix
