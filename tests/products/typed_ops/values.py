"""Rows: parameters that hold no tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal, Optional, Union

import torch
from products.typed_ops.classes import (
    AnyMode,
    Bits,
    Count,
    Form,
    Mode,
    Options,
    Scale,
    StrForm,
    Window,
)
from products.typed_ops.row import NOT_SAVED, Case, Refusal, Row, call, exactly, of, times
from torch import Tensor


def literal_str(x: Tensor, how: Literal["up", "down"]) -> Tensor:
    exactly(how, str)
    return x * (2 if how == "up" else 3)


def literal_int(x: Tensor, bits: Literal[4, 8]) -> Tensor:
    exactly(bits, int)
    return x * bits


def literal_bool(x: Tensor, exact: Literal[True]) -> Tensor:
    exactly(exact, bool)
    return x * (2 if exact else 3)


def literal_none(x: Tensor, how: Literal["up", None]) -> Tensor:
    return x * (3 if how is None else 2)


def literal_mixed(x: Tensor, how: Literal["auto", 4, True]) -> Tensor:
    return x * {str: 2, int: 4, bool: 5}[type(how)]


def enum(x: Tensor, mode: Mode) -> Tensor:
    exactly(mode, Mode)
    return x * (2 if mode is Mode.UP else 3)


def int_enum(x: Tensor, bits: Bits) -> Tensor:
    exactly(bits, Bits)
    return x * bits.value


def str_enum(x: Tensor, form: StrForm) -> Tensor:
    exactly(form, StrForm)
    return x * (2 if form is StrForm("round") else 3)


def str_and_enum(x: Tensor, form: Form) -> Tensor:
    exactly(form, Form)
    return x * (2 if form is Form.ROUND else 3)


def flag(x: Tensor, options: Options) -> Tensor:
    exactly(options, Options)
    return x * (2 if Options.FAST in options else 1) * (3 if Options.SAFE in options else 1)


def optional_enum(x: Tensor, mode: Optional[Mode]) -> Tensor:
    return x * (3 if mode is None else {Mode.UP: 2, Mode.DOWN: 5}[mode])


def size(x: Tensor, shape: torch.Size) -> Tensor:
    exactly(shape, torch.Size)
    return x * shape.numel()


def two_ints(x: Tensor, window: tuple[int, int]) -> Tensor:
    exactly(window, tuple)
    return x * window[0] + window[1]


def ints(x: Tensor, sizes: tuple[int, ...]) -> Tensor:
    exactly(sizes, tuple)
    return x * sum(sizes) + len(sizes)


def two_floats(x: Tensor, limits: tuple[float, float]) -> Tensor:
    exactly(limits, tuple)
    return x * limits[0] + limits[1]


def mixed_tuple(x: Tensor, how: tuple[Mode, float, str]) -> Tensor:
    exactly(how, tuple)
    return x * (how[1] if how[0] is Mode.UP else -how[1]) + len(how[2])


def strings(x: Tensor, names: list[str]) -> Tensor:
    exactly(names, list)
    return x * len(names) + len("".join(names))


def dtypes(x: Tensor, types: list[torch.dtype]) -> Tensor:
    exactly(types, list)
    return x * sum(each.itemsize for each in types)


def bools(x: Tensor, flags: list[bool]) -> Tensor:
    exactly(flags, list)
    return x * sum(flags) + len(flags)


def optional_bools(x: Tensor, flags: Optional[list[bool]]) -> Tensor:
    return x * (5 if flags is None else sum(flags))


def sequence_of_bools(x: Tensor, flags: Sequence[bool]) -> Tensor:
    return x * sum(flags) + len(flags)


def tuple_of_bools(x: Tensor, flags: tuple[bool, ...]) -> Tensor:
    exactly(flags, tuple)
    return x * sum(flags) + len(flags)


def enums(x: Tensor, modes: list[Mode]) -> Tensor:
    return x * sum(2 if mode is Mode.UP else 3 for mode in modes)


def literals(x: Tensor, axes: tuple[Literal["x", "y"], ...]) -> Tensor:
    exactly(axes, tuple)
    return x * sum(2 if axis == "x" else 3 for axis in axes)


def layout(x: Tensor, kind: torch.layout) -> Tensor:
    exactly(kind, torch.layout)
    return x * (2 if kind is torch.strided else 3)


def memory_format(x: Tensor, kind: torch.memory_format) -> Tensor:
    exactly(kind, torch.memory_format)
    return x * (2 if kind is torch.contiguous_format else 3)


def complex_number(x: Tensor, by: complex) -> Tensor:
    exactly(by, complex)
    return x * by.real + by.imag


def int_or_float(x: Tensor, by: Union[int, float]) -> Tensor:
    return x * by


def generator(x: Tensor, source: torch.Generator) -> Tensor:
    exactly(source, torch.Generator)
    return x * source.initial_seed()


def new_type(x: Tensor, count: Count, scale: Scale) -> Tensor:
    return x * count + scale


def alias(x: Tensor, window: Window) -> Tensor:
    exactly(window, tuple)
    return x * window[0] + window[1]


def annotated(x: Annotated[Tensor, "of any shape"], by: Annotated[float, "positive", 3]) -> Tensor:
    return x * by


def type_var(x: Tensor, mode: AnyMode) -> Tensor:
    exactly(mode, Mode)
    return x * (2 if mode is Mode.UP else 3)


def positional_only(x: Tensor, mode: Mode, /) -> Tensor:
    return x * (2 if mode is Mode.UP else 3)


def keyword_only(x: Tensor, *, mode: Mode) -> Tensor:
    return x * (2 if mode is Mode.UP else 3)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(2)


NO_GENERATOR = {
    column: Refusal("refused", RuntimeError, "Generator") for column in ("aot_eager", "inductor", "dynamic")
}

# Dynamo cannot trace the call of a NewType.
TWO, THREE, HALF = Count(2), Count(3), Scale(0.5)
UP_OR_DOWN = (of(Mode.UP, "UP", times(2)), of(Mode.DOWN, "DOWN", times(3)))

# fmt: off
VALUES = [
    Row(
        '`Literal["up", "down"]`', literal_str, "(Tensor x, str how) -> Tensor",
        (of("up", "up", times(2)), of("down", "down", times(3))),
        default=lambda: "down", by_default=times(3),
    ),
    Row(
        "`Literal[4, 8]`", literal_int, "(Tensor x, int bits) -> Tensor",
        (of(4, 4, times(4)), of(8, 8, times(8))),
        default=lambda: 8, by_default=times(8),
    ),
    Row(
        "`Literal[True]`", literal_bool, "(Tensor x, bool exact) -> Tensor",
        (of(True, True, times(2)), of(True, True, times(2))),
        default=lambda: True, by_default=times(2), recompiles=None,
    ),
    Row(
        '`Literal["up", None]`', literal_none, "(Tensor x, str? how) -> Tensor",
        (of("up", "up", times(2)), of(None, None, times(3))),
        default=lambda: None, by_default=times(3),
    ),
    Row(
        '`Literal["auto", 4, True]`', literal_mixed, "(Tensor x, str how) -> Tensor",
        (of("auto", "'auto'", times(2)), of(4, "4", times(4))),
        default=lambda: True, by_default=times(5),
    ),
    Row(
        "`Enum`", enum, "(Tensor x, str mode) -> Tensor", UP_OR_DOWN,
        default=lambda: Mode.DOWN, by_default=times(3),
    ),
    Row(
        "`IntEnum`", int_enum, "(Tensor x, int bits) -> Tensor",
        (of(Bits.FOUR, 4, times(4)), of(Bits.EIGHT, 8, times(8))),
        default=lambda: Bits.EIGHT, by_default=times(8),
    ),
    Row(
        "`StrEnum`", str_enum, "(Tensor x, str form) -> Tensor",
        (of(StrForm("round"), "round", times(2)), of(StrForm("square"), "square", times(3))),
        default=lambda: StrForm("square"), by_default=times(3),
    ),
    Row(
        "`class Form(str, Enum)`", str_and_enum, "(Tensor x, str form) -> Tensor",
        (of(Form.ROUND, "round", times(2)), of(Form.SQUARE, "square", times(3))),
        default=lambda: Form.SQUARE, by_default=times(3),
    ),
    Row(
        "`Flag`", flag, "(Tensor x, int options) -> Tensor",
        (of(Options.SAFE, 2, times(3)), of(Options.FAST | Options.SAFE, 3, times(6))),
        default=lambda: Options.FAST | Options.SAFE, by_default=times(6),
    ),
    Row(
        "`Optional[Enum]`", optional_enum, "(Tensor x, str? mode) -> Tensor",
        (of(Mode.UP, "UP", times(2)), of(None, None, times(3))),
        default=lambda: None, by_default=times(3),
    ),
    Row(
        "`torch.Size`", size, "(Tensor x, SymInt[] shape) -> Tensor",
        (of(torch.Size([2, 3]), [2, 3], times(6)), of(torch.Size([4, 5]), [4, 5], times(20))),
        default=lambda: torch.Size([3, 3]), by_default=times(9), recompiles=False,
    ),
    Row(
        "`tuple[int, int]`", two_ints, "(Tensor x, SymInt[2] window) -> Tensor",
        (of((2, 3), [2, 3], times(2, 3)), of((4, 5), [4, 5], times(4, 5))),
        default=lambda: (6, 7), by_default=times(6, 7), recompiles=False,
    ),
    Row(
        "`tuple[int, ...]`", ints, "(Tensor x, SymInt[] sizes) -> Tensor",
        (of((2, 3, 4), [2, 3, 4], times(9, 3)), of((4, 5, 6), [4, 5, 6], times(15, 3))),
        default=lambda: (6, 7), by_default=times(13, 2), recompiles=False,
    ),
    Row(
        "`tuple[float, float]`", two_floats, "(Tensor x, float[2] limits) -> Tensor",
        (of((2.0, 0.5), [2.0, 0.5], times(2, 0.5)), of((4.0, 5.0), [4.0, 5.0], times(4, 5))),
        default=lambda: (math.inf, 1.0), by_default=times(math.inf),
    ),
    Row(
        "`tuple[Mode, float, str]`", mixed_tuple, "(Tensor x, str how_0, float how_1, str how_2) -> Tensor",
        (
            of((Mode.UP, 2.0, "a"), (("UP", 2.0, "a"), {}), times(2, 1)),
            of((Mode.DOWN, 3.0, "bc"), (("DOWN", 3.0, "bc"), {}), times(-3, 2)),
        ),
        default=lambda: (Mode.DOWN, 5.0, ""), by_default=times(-5),
    ),
    Row(
        "`list[str]`", strings, "(Tensor x, str[] names) -> Tensor",
        (of(["a", "bc"], ["a", "bc"], times(2, 3)), of([], [], times(0))),
        default=lambda: ["abc"], by_default=times(1, 3),
    ),
    Row(
        "`list[torch.dtype]`", dtypes, "(Tensor x, ScalarType[] types) -> Tensor",
        (of([torch.float64, torch.int8], [torch.float64, torch.int8], times(9)), of([], [], times(0))),
        default=lambda: [torch.half], by_default=times(2),
        refused=NOT_SAVED,
    ),
    Row(
        "`list[bool]`", bools, "(Tensor x, bool[] flags) -> Tensor",
        (of([True, False], [True, False], times(1, 2)), of([True, True], [True, True], times(2, 2))),
        default=lambda: [False, True, True], by_default=times(2, 3),
    ),
    Row(
        "`Optional[list[bool]]`", optional_bools, "(Tensor x, bool[]? flags) -> Tensor",
        (of([True, False], [True, False], times(1)), of(None, None, times(5))),
        default=lambda: None, by_default=times(5),
    ),
    Row(
        "`Sequence[bool]`", sequence_of_bools, "(Tensor x, bool[] flags) -> Tensor",
        (of((True, False), [True, False], times(1, 2)), of([True, True], [True, True], times(2, 2))),
        default=lambda: (False, True, True), by_default=times(2, 3),
    ),
    Row(
        "`tuple[bool, ...]`", tuple_of_bools, "(Tensor x, bool[] flags) -> Tensor",
        (of((True, False), [True, False], times(1, 2)), of((True, True), [True, True], times(2, 2))),
        default=lambda: (False, True, True), by_default=times(2, 3),
    ),
    Row(
        "`list[Mode]`", enums, "(Tensor x, str[] modes) -> Tensor",
        (of([Mode.UP, Mode.DOWN], ["UP", "DOWN"], times(5)), of([Mode.UP], ["UP"], times(2))),
        default=lambda: [Mode.DOWN], by_default=times(3),
    ),
    Row(
        '`tuple[Literal["x", "y"], ...]`', literals, "(Tensor x, str[] axes) -> Tensor",
        (of(("x", "y"), ["x", "y"], times(5)), of(("x",), ["x"], times(2))),
        default=lambda: ("y",), by_default=times(3),
    ),
    Row(
        "`torch.layout`", layout, "(Tensor x, Layout kind) -> Tensor",
        (of(torch.strided, torch.strided, times(2)), of(torch.sparse_coo, torch.sparse_coo, times(3))),
        default=lambda: torch.sparse_csr, by_default=times(3),
    ),
    Row(
        "`torch.memory_format`", memory_format, "(Tensor x, MemoryFormat kind) -> Tensor",
        (
            of(torch.contiguous_format, torch.contiguous_format, times(2)),
            of(torch.channels_last, torch.channels_last, times(3)),
        ),
        default=lambda: torch.channels_last, by_default=times(3),
    ),
    Row(
        "`complex`", complex_number, "(Tensor x, complex by) -> Tensor",
        (of(2 + 3j, 2 + 3j, times(2, 3)), of(4 - 1j, 4 - 1j, times(4, -1))),
        default=lambda: 1 - 2j, by_default=times(1, -2),
    ),
    Row(
        "`int \\| float`", int_or_float, "(Tensor x, Scalar by) -> Tensor",
        (of(2, 2, times(2)), of(2.5, 2.5, times(2.5))),
        default=lambda: 3.5, by_default=times(3.5),
    ),
    Row(
        "`torch.Generator`", generator, "(Tensor x, Generator source) -> Tensor",
        (
            Case(lambda x: call(x, seeded()), lambda x: call(x, seeded()), times(2)),
            Case(lambda x: call(x, source=seeded()), lambda x: call(x, source=seeded()), times(2)),
        ),
        recompiles=None, refused=NO_GENERATOR,
    ),
    Row(
        "`NewType`", new_type, "(Tensor x, SymInt count, float scale) -> Tensor",
        (
            Case(lambda x: call(x, TWO, HALF), lambda x: call(x, 2, 0.5), times(2, 0.5)),
            Case(lambda x: call(x, THREE, HALF), lambda x: call(x, 3, 0.5), times(3, 0.5)),
        ),
        recompiles=False,
    ),
    Row(
        "PEP 695 alias", alias, "(Tensor x, SymInt[2] window) -> Tensor",
        (of((2, 3), [2, 3], times(2, 3)), of((4, 5), [4, 5], times(4, 5))),
        default=lambda: (6, 7), by_default=times(6, 7), recompiles=False,
    ),
    Row(
        "`Annotated[float, ...]`", annotated, "(Tensor x, float by) -> Tensor",
        (of(2.0, 2.0, times(2)), of(3.5, 3.5, times(3.5))),
        default=lambda: 4.5, by_default=times(4.5),
    ),
    Row(
        "`TypeVar` bound to `Enum`", type_var, "(Tensor x, str mode) -> Tensor", UP_OR_DOWN,
        default=lambda: Mode.DOWN, by_default=times(3),
    ),
    Row(
        "positional-only", positional_only, "(Tensor x, str mode) -> Tensor", UP_OR_DOWN,
        default=lambda: Mode.DOWN, by_default=times(3),
    ),
    Row(
        "keyword-only", keyword_only, "(Tensor x, *, str mode) -> Tensor",
        (
            Case(lambda x: call(x, mode=Mode.UP), lambda x: call(x, mode="UP"), times(2)),
            Case(lambda x: call(x, mode=Mode.DOWN), lambda x: call(x, mode="DOWN"), times(3)),
        ),
        default=lambda: Mode.DOWN, by_default=times(3),
    ),
]
