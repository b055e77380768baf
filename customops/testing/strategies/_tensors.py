"""Tensors: small ones, of finite values, in every layout that a kernel may be given."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Literal

import torch
from hypothesis import currently_in_test_context, note
from hypothesis import strategies as st
from torch import Tensor

from customops._schema.structure import DEVICE, Codec, EnumCodec, Leaf, LiteralCodec, SequenceCodec
from customops._schema.types import item_type, row_of

Shape = tuple[int, ...]
Layout = Literal["contiguous", "transposed", "sliced", "expanded"]

#: The memory layouts of tensors. Elements of an expanded tensor share memory, so mutated arguments are never expanded.
LAYOUTS: tuple[Layout, ...] = ("contiguous", "transposed", "sliced", "expanded")

#: Of a tensor of more elements this many are drawn, and repeated. A prime number: rows seldom become equal.
DRAWN_ELEMENTS = 11

#: Up to three dimensions; every fourth strategy may draw a size of zero.
SHAPES: st.SearchStrategy[Shape] = st.one_of(
    *[st.lists(st.integers(1, 3), max_size=3)] * 3, st.lists(st.integers(0, 3), max_size=3)
).map(tuple)

DTYPES: st.SearchStrategy[torch.dtype] = st.sampled_from([torch.float32, torch.float64])

#: On a grid that float16 and bfloat16 have too: what is drawn is what a tensor holds.
_REALS = st.integers(-64, 64).map(lambda eighths: eighths / 8)


@functools.cache
def elements_of(dtype: torch.dtype) -> st.SearchStrategy[Any]:
    """Small and finite values."""
    if dtype is torch.bool:
        return st.booleans()
    if dtype.is_complex:
        return st.builds(complex, _REALS, _REALS)
    if dtype.is_floating_point:
        return _REALS
    return st.integers(-8 if dtype.is_signed else 0, 8)


def dtype_of(option: Any) -> st.SearchStrategy[torch.dtype]:
    """A strategy for what an option allows: one, several, or what a strategy draws."""
    if option is None or isinstance(option, st.SearchStrategy):
        return DTYPES if option is None else option
    return st.just(option) if isinstance(option, torch.dtype) else st.sampled_from(list(option))


def shape_of(option: Any) -> st.SearchStrategy[Shape]:
    """The same for shapes, of which one is a sequence of numbers."""
    if option is None or isinstance(option, st.SearchStrategy):
        return SHAPES if option is None else option
    is_one = all(isinstance(size, int) for size in option)
    return st.just(tuple(option)) if is_one else st.sampled_from([tuple(shape) for shape in option])


def tensors(
    shapes: Shape | Sequence[Shape] | st.SearchStrategy[Shape] | None = None,
    dtypes: torch.dtype | Sequence[torch.dtype] | st.SearchStrategy[torch.dtype] | None = None,
    *,
    elements: st.SearchStrategy[Any] | None = None,
    layouts: Iterable[Layout] = LAYOUTS,
    requires_grad: bool | st.SearchStrategy[bool] = False,
    device: str | torch.device = "cpu",
) -> st.SearchStrategy[Tensor]:
    """A strategy for tensors: contiguous, transposed, sliced and expanded ones, also 0-dimensional and empty ones.

    Args:
        shapes: a shape, several shapes, or a strategy. By default up to three dimensions of up to three elements.
        dtypes: a dtype, several dtypes, or a strategy. By default float32 and float64.
        elements: a strategy for the elements. By default they are finite, and between -8 and 8.
        layouts: the memory layouts to draw from, some of `LAYOUTS`.
        requires_grad: whether tensors of floating-point or complex dtypes require grad, or a strategy that draws it.
        device: the device of the tensors.

    Example:
        >>> @given(tensors((2, 3), torch.float32, layouts=["transposed"]))
        ... def test(x): ...
    """
    chosen = tuple(layouts)
    return _tensors(shape_of(shapes), dtype_of(dtypes), elements, chosen, requires_grad, device)


@st.composite
def _tensors(
    draw: st.DrawFn,
    shapes: st.SearchStrategy[Shape],
    dtypes: st.SearchStrategy[torch.dtype],
    elements: st.SearchStrategy[Any] | None,
    layouts: Collection[Layout],
    requires_grad: bool | st.SearchStrategy[bool],
    device: str | torch.device,
) -> Tensor:
    shape, dtype = draw(shapes), draw(dtypes)
    tensor = draw_tensor(draw, shape, dtype, elements, layouts, device)
    return with_grad(tensor, draw(requires_grad) if isinstance(requires_grad, st.SearchStrategy) else requires_grad)


def with_grad(tensor: Tensor, requires_grad: bool) -> Tensor:
    return tensor.requires_grad_(requires_grad and (tensor.is_floating_point() or tensor.is_complex()))


def draw_tensor(
    draw: st.DrawFn,
    shape: Shape,
    dtype: torch.dtype,
    elements: st.SearchStrategy[Any] | None,
    layouts: Collection[Layout],
    device: str | torch.device,
    name: str = "a tensor",
) -> Tensor:
    """One tensor. Where a test fails, hypothesis tells how it lies in memory, which its repr does not."""
    count = math.prod(shape)
    drawn = min(count, DRAWN_ELEMENTS)
    some = draw(st.lists(elements_of(dtype) if elements is None else elements, min_size=drawn, max_size=drawn))
    values = [some[i % drawn] for i in range(count)]
    tensor = torch.tensor(values, dtype=dtype, device=device).reshape(shape)
    wide = [dim for dim, size in enumerate(shape) if size > 1 and count]
    needed = {"contiguous": 0, "transposed": 2, "sliced": 1, "expanded": 1}  # with fewer it would be contiguous
    possible = [each for each in LAYOUTS if each in layouts and len(wide) >= needed[each]]
    layout = draw(st.sampled_from(possible or LAYOUTS[:1]))
    if layout == "contiguous":
        return tensor
    if layout == "expanded":
        tensor = tensor.narrow(draw(st.sampled_from(wide)), 0, 1).contiguous().expand(shape)
    elif layout == "transposed":
        turned = tuple(reversed(range(tensor.dim())))
        tensor = tensor.permute(turned).contiguous().permute(turned)
    else:  # every second element of a larger one, but for its first
        larger = torch.zeros((*shape[:-1], 2 * shape[-1] + 1), dtype=dtype, device=device)
        larger[..., 1::2] = tensor
        tensor = larger[..., 1::2]
    if currently_in_test_context():
        note(f"{name} is {layout}: strides {tuple(tensor.stride())}")
    return tensor


Strategy = st.SearchStrategy[Any]

#: Lists have no more items than this.
MAX_ITEMS = 3

#: The 2 of ``SymInt[2]``.
_FIXED = re.compile(r"\[(\d+)\]$")

_INTS = st.integers(-8, 8)
_FLOATS = st.floats(-8, 8, allow_nan=False, allow_subnormal=False)
_LETTERS = st.characters(min_codepoint=32, max_codepoint=126)
_DTYPES = "float32 float64 float16 bfloat16 int64 int32 uint8 bool".split()

#: The Python type of an argument -> its values, but for those that depend on the device. Numbers are small and finite;
#: layouts and memory formats are those that every tensor can have.
_VALUES: dict[Any, Strategy] = {
    int: _INTS,
    float: _FLOATS,
    bool: st.booleans(),
    complex: st.builds(complex, _FLOATS, _FLOATS),
    torch.types.Number: _INTS | _FLOATS,
    str: st.text(_LETTERS, max_size=5),
    torch.dtype: st.sampled_from([getattr(torch, name) for name in _DTYPES]),
    torch.layout: st.just(torch.strided),
    torch.memory_format: st.sampled_from([torch.contiguous_format, torch.preserve_format]),
}


def _lists(type_: str, items: Strategy) -> Strategy:
    fixed = _FIXED.search(type_)
    return st.lists(items, min_size=int(fixed[1]) if fixed else 0, max_size=int(fixed[1]) if fixed else MAX_ITEMS)


def sizes(type_: str, at_least: int = 0) -> st.SearchStrategy[int]:
    """How many items a list of this type may have."""
    fixed = _FIXED.search(type_)
    return st.just(int(fixed[1])) if fixed else st.integers(at_least, MAX_ITEMS)


def values_of(leaf: Leaf, device: str | torch.device) -> Strategy | None:
    """The values, without None, of a leaf that holds no tensors; None if there is no strategy for its type."""
    return _coded(leaf.type.removesuffix("?"), leaf.codec, device)


def _coded(type_: str, codec: Codec, device: str | torch.device) -> Strategy | None:
    if isinstance(codec, LiteralCodec):
        return st.sampled_from(codec.values)
    if isinstance(codec, EnumCodec):  # with the combinations of flags
        return st.sampled_from(codec.cls)
    if codec is DEVICE:
        return st.sampled_from([str(device), torch.device(device)])
    if isinstance(codec, SequenceCodec):
        items = _coded(item_type(type_) or "", codec.item, device)
        return None if items is None else _lists(type_, items).map(codec.container)
    return _plain(type_, device)


def _plain(type_: str, device: str | torch.device) -> Strategy | None:
    if type_.endswith("?"):
        values = _plain(type_[:-1], device)
        return None if values is None else st.none() | values
    item = item_type(type_)
    if item is not None:
        items = _plain(item, device)
        return None if items is None else _lists(type_, items)
    if type_ == "Device":
        return st.just(torch.device(device))
    if type_ == "Generator":
        return st.integers(0, 2**31).map(lambda seed: torch.Generator(device).manual_seed(seed))
    if type_ == "int":  # the hint ``int`` is a SymInt
        return _INTS
    return next((_VALUES.get(hint) for hint in row_of(type_).hints), None)
