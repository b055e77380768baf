"""Calls through `torch_ops.pyi`, the stub of tests/helpers/stubbed.py; see `ops` for how a wrong one is an error."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch_ops import ops
from typing_extensions import assert_type

x = torch.ones(2)

assert_type(ops.stubbed.scale(x, 3.0, times=2), Tensor)
assert_type(ops.stubbed.scale.default(x), Tensor)
ops.stubbed.scale("x")  # type: ignore[arg-type]
ops.stubbed.scale(x, by="x")  # type: ignore[arg-type]
ops.stubbed.scale.default(x, by="x")  # type: ignore[arg-type]
ops.stubbed.scale(x, 3.0, 2)  # type: ignore[call-arg]
ops.stubbed.scale(x, twice=2)  # type: ignore[call-arg]
ops.stubbed.scale()  # type: ignore[call-arg]

# They are what torch makes of them, too.
overload: OpOverload = ops.stubbed.scale.default
packet: OpOverloadPacket = ops.stubbed.scale
torch.library.opcheck(ops.stubbed.scale.default, (x,))

# Names that there are not.
ops.stubbed.skale(x)  # type: ignore[attr-defined]
ops.stubbed.scale.defualt(x)  # type: ignore[attr-defined]
ops.stupped.scale(x)  # type: ignore[attr-defined]

assert_type(ops.stubbed.plain(x, None, [x], (x, None), 3, device="cpu", dtype=torch.int8), Tensor)
ops.stubbed.plain(x, None, [x], [x], x.shape[0], 1, True, "", memory_format=torch.contiguous_format, z=1)
ops.stubbed.plain(None, None, [x], [x], 3)  # type: ignore[arg-type]
ops.stubbed.plain(x, None, [None], [x], 3)  # type: ignore[list-item]
ops.stubbed.plain(x, None, [x], [x], 3, dtype="float32")  # type: ignore[arg-type]
ops.stubbed.plain(x, None, [x], [x], 3, ints=3)  # type: ignore[arg-type]
ops.stubbed.plain(x, None, [x], [x], 3, layout=torch.channels_last)  # type: ignore[arg-type]

# Enums by the names of their members, a config by its fields.
out = ops.stubbed.rich(x, (1, 2), kind="b", kinds=[2, 1], mode="FAST", bits=4, config_block=3, cap=x)
assert_type(out, tuple[Tensor, list[Tensor], int, list[int]])
ops.stubbed.rich(x, kind="c")  # type: ignore[arg-type]
ops.stubbed.rich(x, kinds=[3])  # type: ignore[list-item]
ops.stubbed.rich(x, mode="f")  # type: ignore[arg-type]
ops.stubbed.rich(x, bits=5)  # type: ignore[arg-type]
ops.stubbed.rich(x, config=3)  # type: ignore[call-arg]

assert_type(ops.stubbed.several(x, [x]), tuple[Tensor, list[Tensor], int, float, bool, int | float | complex])
ops.stubbed.write(x, x, z=x)

assert_type(ops.stubbed.add(x, other=x), Tensor)
assert_type(ops.stubbed.add(self=x, other=3), int)
assert_type(ops.stubbed.add(x, x, 1.0), float)
assert_type(ops.stubbed.add.Tensor(x, x, alpha=1.0), float)
ops.stubbed.add(x, "x")  # type: ignore[call-overload]
ops.stubbed.add.int(x, x)  # type: ignore[arg-type]

# What is called as a keyword of Python goes by its position, or by a dict.
ops.stubbed.range(3, n=2)
ops.stubbed.range([3, 4], to=[1.0, 2.0], out=x, **{"lambda": 3})
ops.stubbed.range(n=2)  # type: ignore[call-arg]
ops.stubbed.nothing()
ops.stubbed.nothing(x)  # type: ignore[call-arg]
