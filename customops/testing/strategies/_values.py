"""Values that are no tensors, by the types of a schema and by the codecs of rich types."""

from __future__ import annotations

import functools
import re
from typing import Any

import torch
from hypothesis import strategies as st

from customops._schema.codecs import Codec, DeviceCodec, EnumCodec, LiteralCodec, SequenceCodec
from customops._schema.nodes import Leaf
from customops._schema.types import item_type, row_of

Strategy = st.SearchStrategy[Any]

#: Lists have no more items than this.
MAX_ITEMS = 3

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


def fixed_length(type_: str) -> int | None:
    """The 2 of ``SymInt[2]``."""
    found = re.search(r"\[(\d+)\]$", type_)
    return int(found[1]) if found else None


def sizes(type_: str, at_least: int = 0) -> st.SearchStrategy[int]:
    """How many items a list of this type may have."""
    length = fixed_length(type_)
    return st.integers(at_least, MAX_ITEMS) if length is None else st.just(length)


def values_of(leaf: Leaf, device: str | torch.device) -> Strategy | None:
    """The values, without None, of a leaf that holds no tensors; None if there is no strategy for its type."""
    return _coded(leaf.type.removesuffix("?"), leaf.codec, device)


def _coded(type_: str, codec: Codec, device: str | torch.device) -> Strategy | None:
    if isinstance(codec, LiteralCodec):
        return st.sampled_from(codec.values)
    if isinstance(codec, EnumCodec):  # with the combinations of flags
        return st.sampled_from(codec.cls)
    if isinstance(codec, DeviceCodec):
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
        return st.integers(0, 2**31).map(functools.partial(_generator, device))
    if type_ == "int":  # the hint ``int`` is a SymInt
        return _INTS
    return next((_VALUES.get(hint) for hint in row_of(type_).hints), None)


def _lists(type_: str, items: Strategy) -> Strategy:
    length = fixed_length(type_)
    return st.lists(items, min_size=length or 0, max_size=MAX_ITEMS if length is None else length)


def _generator(device: str | torch.device, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)
