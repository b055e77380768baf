"""Rows: parameters that hold several values, none of them a tensor."""

from __future__ import annotations

from typing import Any, Optional

from products.typed_ops.classes import Blocks, Mode, Outer, Settings
from products.typed_ops.row import Case, Row, call, exactly, of, times
from torch import Tensor
from typing_extensions import Unpack


def _scaled(x: Tensor, blocks: Blocks) -> Tensor:
    return x * blocks.size * blocks.scale * (1 if blocks.mode is Mode.UP else -1) + len(blocks.names)


def dataclass(x: Tensor, blocks: Blocks) -> Tensor:
    exactly(blocks, Blocks)
    exactly(blocks.mode, Mode)
    exactly(blocks.names, tuple)
    return _scaled(x, blocks)


def nested_dataclass(x: Tensor, outer: Outer) -> Tensor:
    exactly(outer, Outer)
    exactly(outer.blocks, Blocks)
    exactly(outer.window, tuple)
    return _scaled(x, outer.blocks) + (0 if outer.limit is None else outer.limit) + sum(outer.window)


def optional_dataclass(x: Tensor, blocks: Optional[Blocks]) -> Tensor:
    return x.clone() if blocks is None else _scaled(x, blocks)


def settings(x: Tensor, settings: Settings) -> Tensor:
    exactly(settings, dict)
    return x * settings["by"] * {None: 1, Mode.UP: 2, Mode.DOWN: 3}[settings.get("mode")]


def unpacked(x: Tensor, **options: Unpack[Settings]) -> Tensor:
    return x * options["by"] * {None: 1, Mode.UP: 2, Mode.DOWN: 3}[options.get("mode")]


def named(**options: Any) -> Case:
    """A call with options by name, which are lowered to those of the same name."""
    lowered = {key: value.name if isinstance(value, Mode) else value for key, value in options.items()}
    by = options.get("by", 1.0) * {None: 1, Mode.UP: 2, Mode.DOWN: 3}[options.get("mode")]
    return Case(lambda x: call(x, **options), lambda x: call(x, **lowered), times(by))


# fmt: off
RECORDS = [
    Row(
        "frozen dataclass", dataclass,
        '(Tensor x, SymInt blocks_size, *, float blocks_scale=2.0, str blocks_mode="UP", '
        "str[]? blocks_names=None) -> Tensor",
        (
            of(Blocks(3), ((3,), {}), times(6, 1)),
            of(
                Blocks(4, 0.5, Mode.DOWN, ("a", "b")),
                ((4,), {"blocks_scale": 0.5, "blocks_mode": "DOWN", "blocks_names": ["a", "b"]}),
                times(-2, 2),
            ),
        ),
        default=lambda: Blocks(5, names=()), by_default=times(10),
    ),
    Row(
        "nested dataclass", nested_dataclass,
        '(Tensor x, SymInt outer_blocks_size, *, float outer_blocks_scale=2.0, str outer_blocks_mode="UP", '
        "str[]? outer_blocks_names=None, float? outer_limit=None, SymInt[2] outer_window=[-1, -1]) -> Tensor",
        (
            of(Outer(Blocks(3)), ((3,), {}), times(6, -1)),
            of(
                Outer(Blocks(4, names=()), limit=0.5, window=(2, 3)),
                ((4,), {"outer_blocks_names": [], "outer_limit": 0.5, "outer_window": [2, 3]}),
                times(8, 5.5),
            ),
        ),
        default=lambda: Outer(Blocks(5, mode=Mode.DOWN)), by_default=times(-10, -1),
    ),
    Row(
        "`Optional[dataclass]`", optional_dataclass,
        '(Tensor x, bool blocks_given, SymInt? blocks_size, *, float? blocks_scale=2.0, str? blocks_mode="UP", '
        "str[]? blocks_names=None) -> Tensor",
        (of(Blocks(3), ((True, 3), {}), times(6, 1)), of(None, ((False, None), {}), times(1))),
        default=lambda: None, by_default=times(1),
    ),
    Row(
        "`TypedDict`", settings, "(Tensor x, float settings_by, *, str? settings_mode=None) -> Tensor",
        (
            of({"by": 2.0}, ((2.0,), {}), times(2)),
            of({"by": 3.0, "mode": Mode.DOWN}, ((3.0,), {"settings_mode": "DOWN"}), times(9)),
        ),
        default=lambda: {"by": 2.0, "mode": Mode.UP}, by_default=times(4),
    ),
    Row(
        "`**options: Unpack[TypedDict]`", unpacked, "(Tensor x, *, float by, str? mode=None) -> Tensor",
        (named(by=2.0), named(by=3.0, mode=Mode.DOWN)),
    ),
]
