"""Ops that write, and return what compilers know no functional form of: lists, numbers, strings, optional tensors."""

from __future__ import annotations

from typing import Any, List, NamedTuple, Optional, Tuple

import pytest
import torch
from helpers.compiling import BACKENDS, compiled
from torch import Tensor

from customops import Mut, Registry


class Buffer(NamedTuple):
    cache: Mut[Tensor]
    by: int = 1


RETURNS: dict[str, Tuple[Any, Any]] = {
    "optional beside": (Tuple[Tensor, Optional[Tensor]], lambda x, want: (x * 2, x * 3 if want else None)),
    "optional": (Optional[Tensor], lambda x, want: x * 2 if want else None),
    "list": (List[Tensor], lambda x, want: [x * 2, x * 3][: 2 if want else 1]),
    "tuple of any length": (Tuple[Tensor, ...], lambda x, want: (x * 2, x * 3)),
    "number beside": (Tuple[Tensor, int], lambda x, want: (x * 2, x.shape[0])),
    "numbers": (List[int], lambda x, want: [x.shape[0], 3]),
    "text": (str, lambda x, want: "on" if want else "off"),
}


def op_returning(registry: Registry, ns: str, kind: str) -> Any:
    returned, make = RETURNS[kind]

    def fn(x: Tensor, buffer: Buffer, want: bool = True) -> Any:
        buffer.cache.add_(x * buffer.by)
        return make(x, want)

    fn.__annotations__["return"] = returned
    op = registry.custom_op(f"{ns}::f", fn)
    op.register_fake(lambda x, buffer, want: make(x, want))
    return op


@pytest.mark.compile
@pytest.mark.parametrize("kind", RETURNS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled(registry: Registry, ns: str, kind: str, backend: str) -> None:
    op = op_returning(registry, ns, kind)

    def f(x: Tensor, cache: Tensor, want: bool) -> Any:
        return op(x, Buffer(cache[1:], 2), want), op(x + 1, Buffer(cache[1:]), want), cache * 1

    for want in (True, False):
        got_cache, cache = torch.zeros(4), torch.zeros(4)
        got = compiled(f, backend)(torch.ones(3), got_cache, want)
        expected = f(torch.ones(3), cache, want)
        assert repr(got) == repr(expected)
        assert got_cache.tolist() == cache.tolist() == [0, 4, 4, 4]


@pytest.mark.compile
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_nothing_to_write(registry: Registry, ns: str, backend: str) -> None:
    def fn(x: Tensor, cache: Mut[Optional[Tensor]] = None) -> Optional[Tensor]:
        return x * 2 if cache is None else cache.add_(x) and None

    op = registry.custom_op(f"{ns}::f", fn)
    op.register_fake(lambda x, cache: torch.empty_like(x) if cache is None else None)
    result = compiled(lambda x: op(x), backend)(torch.ones(3))
    assert result.tolist() == [2, 2, 2]


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_decomposed(registry: Registry, ns: str) -> None:
    op = op_returning(registry, ns, "optional beside")

    class Model(torch.nn.Module):
        def forward(self, x: Tensor, cache: Tensor) -> Any:
            return op(x, Buffer(cache))[0], cache + 1

    program = torch.export.export(Model(), (torch.ones(3), torch.zeros(3))).run_decompositions()
    out, cache = program.module()(torch.ones(3), torch.zeros(3))
    assert (out.tolist(), cache.tolist()) == ([2, 2, 2], [2, 2, 2])
