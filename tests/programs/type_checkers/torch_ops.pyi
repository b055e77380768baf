# fmt: off
# ruff: noqa
# mypy: disable-error-code="overload-cannot-match, overload-overlap"
# pyright: reportOverlappingOverload=false
"""The ops of helpers.stubbed, as torch.ops has them.

Written by `python -m customops stubs`. Do not edit.
"""

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import SymInt, Tensor
from torch._ops import OpOverload, OpOverloadPacket

class _Overload(OpOverload[..., Any]): ...

class _Packet(OpOverloadPacket[..., Any]):
    __getattr__: None  # type: ignore[assignment, misc]  # there are no other overloads

class _stubbed_add_default_call:
    def __call__(
        _self,
        self: Tensor,
        other: Tensor,
    ) -> Tensor: ...

class _stubbed_add_default(_stubbed_add_default_call, _Overload): ...

class _stubbed_add_int_call:
    def __call__(
        _self,
        self: Tensor,
        other: int,
    ) -> int: ...

class _stubbed_add_int(_stubbed_add_int_call, _Overload): ...

class _stubbed_add_Tensor_call:
    def __call__(
        _self,
        self: Tensor,
        other: Tensor,
        alpha: float,
    ) -> float: ...

class _stubbed_add_Tensor(_stubbed_add_Tensor_call, _Overload): ...

class _stubbed_add_call:
    @overload
    def __call__(
        _self,
        self: Tensor,
        other: Tensor,
    ) -> Tensor: ...
    @overload
    def __call__(
        _self,
        self: Tensor,
        other: int,
    ) -> int: ...
    @overload
    def __call__(
        _self,
        self: Tensor,
        other: Tensor,
        alpha: float,
    ) -> float: ...

class _stubbed_add(_stubbed_add_call, _Packet):
    default: _stubbed_add_default
    int: _stubbed_add_int
    Tensor: _stubbed_add_Tensor

class _stubbed_nothing_default_call:
    def __call__(
        self,
    ) -> None: ...

class _stubbed_nothing_default(_stubbed_nothing_default_call, _Overload): ...

class _stubbed_nothing(_stubbed_nothing_default_call, _Packet):
    default: _stubbed_nothing_default

class _stubbed_plain_default_call:
    def __call__(
        self,
        x: Tensor,
        maybe: Tensor | None,
        tensors: Sequence[Tensor],
        gaps: Sequence[Tensor | None],
        n: int | SymInt,
        limit: float | None = float("inf"),
        number: int | float | complex = 2,
        text: str = 'it\'s "here"\n',
        dtype: torch.dtype = torch.float16,
        device: torch.device | str | None = None,
        layout: torch.layout = torch.strided,
        memory_format: torch.memory_format = torch.channels_last,
        z: complex = complex(0.0, 2.0),
        generator: torch.Generator | None = None,
        floats: Sequence[float] | None = (1.0, float("-inf")),
        ints: Sequence[int | SymInt] = (3,),
        flags: Sequence[bool] = (),
        dtypes: Sequence[torch.dtype] = (torch.int8, torch.float32),
    ) -> Tensor: ...

class _stubbed_plain_default(_stubbed_plain_default_call, _Overload): ...

class _stubbed_plain(_stubbed_plain_default_call, _Packet):
    default: _stubbed_plain_default

class _stubbed_range_default_call:
    def __call__(
        self,
        from_: int | Sequence[int],
        /,
        n: int = 1,
        to: float | Sequence[float] = (1.0, 1.0),
        *,
        out: Tensor | None = None,
        **kwargs: Any,  # lambda
    ) -> Tensor: ...

class _stubbed_range_default(_stubbed_range_default_call, _Overload): ...

class _stubbed_range(_stubbed_range_default_call, _Packet):
    default: _stubbed_range_default

class _stubbed_rich_default_call:
    def __call__(
        self,
        x: Tensor,
        window: Sequence[int | SymInt] = (-1, -1),
        *,
        kind: Literal["a", "b"] = "a",
        kinds: Sequence[Literal[1, 2]] = (1,),
        maybe: Literal["c"] | None = None,
        mode: Literal["FAST", "SLOW"] = "SLOW",
        bits: Literal[4, 8] = 8,
        config_block: int | SymInt = 3,  # config.block
        config_mode: Literal["FAST", "SLOW"] = "FAST",  # config.mode
        config_weight: Tensor | None = None,  # config.weight
        cap: Tensor | None = None,
        cap_number: float | None = 1.0,  # cap
    ) -> tuple[Tensor, list[Tensor], int, list[int]]:
        """Many types."""

class _stubbed_rich_default(_stubbed_rich_default_call, _Overload): ...

class _stubbed_rich(_stubbed_rich_default_call, _Packet):
    default: _stubbed_rich_default

class _stubbed_scale_default_call:
    def __call__(
        self,
        x: Tensor,
        by: float = 2.0,
        *,
        times: int | SymInt = 1,
    ) -> Tensor:
        """Scale a tensor, \\o/.

        Args:
            by: a "number"
        """

class _stubbed_scale_default(_stubbed_scale_default_call, _Overload): ...

class _stubbed_scale(_stubbed_scale_default_call, _Packet):
    default: _stubbed_scale_default

class _stubbed_several_default_call:
    def __call__(
        self,
        x: Tensor,
        xs: Sequence[Tensor],
    ) -> tuple[Tensor, list[Tensor], int, float, bool, int | float | complex]: ...

class _stubbed_several_default(_stubbed_several_default_call, _Overload): ...

class _stubbed_several(_stubbed_several_default_call, _Packet):
    default: _stubbed_several_default

class _stubbed_write_default_call:
    def __call__(
        self,
        x: Tensor,
        y: Tensor,
        z: Tensor,
    ) -> None:
        """Write z.

        Writes to x, y.
        """

class _stubbed_write_default(_stubbed_write_default_call, _Overload): ...

class _stubbed_write(_stubbed_write_default_call, _Packet):
    default: _stubbed_write_default

class _stubbed:
    add: _stubbed_add
    nothing: _stubbed_nothing
    plain: _stubbed_plain
    range: _stubbed_range
    rich: _stubbed_rich
    scale: _stubbed_scale
    several: _stubbed_several
    write: _stubbed_write

class _Ops:
    stubbed: _stubbed

ops: _Ops
