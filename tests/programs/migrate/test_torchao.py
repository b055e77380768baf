"""torchao: functions that export keeps whole and compilers take apart."""

from __future__ import annotations

from types import ModuleType
from typing import Any, List, Optional, Union

import pytest
import torch
from helpers.migration import Twins, message
from torch import Tensor, nn
from torch.library import Library

import customops
from customops.errors import DefinitionError

pytestmark = pytest.mark.compile


def _choose_scale(x: Tensor, bits: int = 8, eps: float = 0.0) -> Tensor:
    return (x.abs().amax(-1, keepdim=True) + eps) / (2 ** (bits - 1) - 1)


def _quantize(x: Tensor, scale: Tensor) -> Tensor:
    return torch.round(x / scale).to(torch.int8)


class Calls(nn.Module):
    def __init__(self, op: Any) -> None:
        super().__init__()
        self.op = op

    def forward(self, x: Tensor) -> Tensor:
        return self.op(x) * 2


@pytest.fixture
def choose(helpers: ModuleType, by_hand: ModuleType, lib: Library, hand: Library) -> list[Any]:
    return [helpers._register_custom_op(lib)(_choose_scale), by_hand.torchao(hand, "choose_scale", _choose_scale)]


def test_taken_apart(choose: list[Any]) -> None:
    Twins(*choose, _choose_scale, lambda n: (torch.randn(n, 4), 4)).check()
    x = torch.randn(3, 4, requires_grad=True)
    (expected,) = torch.autograd.grad(_choose_scale(x).sum(), x)
    for op in choose:
        torch.testing.assert_close(torch.autograd.grad(op(x).sum(), x)[0], expected)
        exported = torch.export.export(Calls(op), (x.detach(),))
        assert [str(node.target) for node in exported.graph.nodes if "choose_scale" in str(node.target)]
        torch.testing.assert_close(exported.module()(x.detach()), 2 * _choose_scale(x.detach()))
        assert op.default in torch._inductor.decomposition.decompositions


def test_kept_whole(helpers: ModuleType, by_hand: ModuleType, lib: Library, hand: Library) -> None:
    ours, theirs = (
        helpers._register_custom_op(lib, inductor_decomposed=False)(_quantize),
        by_hand.torchao(hand, "quantize", _quantize, False),
    )
    for library in (lib, hand):
        (helpers._register_meta_op(library, "quantize"))(lambda x, scale: torch.empty_like(x, dtype=torch.int8))
    Twins(ours, theirs, _quantize, lambda n: (torch.randn(n, 4), torch.rand(n, 1) + 1)).check()


def _quantize_affine(
    input: Tensor,
    block_size: List[int],
    scale: Tensor,
    zero_point: Optional[Tensor],
    output_dtype: torch.dtype,
    quant_min: Optional[Union[int, float, bool]] = None,
    quant_max: Optional[Union[int, float, bool]] = None,
) -> Tensor:
    quantized = torch.round(input / scale) + (0 if zero_point is None else zero_point)
    return torch.clamp(quantized, quant_min, quant_max).to(output_dtype)


def test_the_quantization_of_torchao(helpers: ModuleType, by_hand: ModuleType, lib: Library, hand: Library) -> None:
    """Its signature, kept whole, and its test: against torch's own quantization of each row."""
    ours, theirs = (
        helpers._register_custom_op(lib, False)(_quantize_affine),
        by_hand.torchao(hand, "quantize_affine", _quantize_affine, False),
    )
    for library in (lib, hand):

        @helpers._register_meta_op(library, "quantize_affine")
        def _(input: Tensor, block_size: Any, scale: Any, zero_point: Any, output_dtype: Any, *others: Any) -> Tensor:
            return torch.empty_like(input, dtype=output_dtype)

    def arguments(n: int) -> tuple[Any, ...]:
        zeros = torch.zeros(n, 1, dtype=torch.int64)
        return torch.randn(n, 4), [1, 4], torch.rand(n, 1) + 0.1, zeros, torch.int8, -128, 127

    Twins(ours, theirs, _quantize_affine, arguments).check()
    x, block, scale, zeros, *others = arguments(3)
    expected = torch.fake_quantize_per_channel_affine(x, scale[:, 0], zeros[:, 0].int(), 0, -128, 127)
    torch.testing.assert_close(ours(x, block, scale, zeros, *others) * scale, expected)


def test_names_for_functions_of_torch(helpers: ModuleType, by_hand: ModuleType, ns: str) -> None:
    def fake(x: Tensor, scale: Tensor) -> Tensor:
        return torch.empty_like(x, dtype=torch.int8)

    ours = helpers.register_custom_op_impl(f"{ns}::quantize")(_quantize)
    assert helpers.register_custom_op(f"{ns}::quantize")(fake) is fake
    theirs = by_hand.flashinfer(f"{ns}_hand::quantize", _quantize, fake, mutates_args=())
    Twins(ours, theirs, _quantize, lambda n: (torch.randn(n, 4), torch.rand(n, 1) + 1)).check()


def test_a_key_that_falls_through(lib: Library, hand: Library) -> None:
    """An op of the library whose autocast does nothing, and whose functionalization is left to torch."""
    for library in (lib, hand):
        library.define("add(Tensor x, Tensor y) -> Tensor")
        library.impl("add", torch.add, "CPU")
    customops.impl(f"{lib.ns}::add", ["AutogradCPU", "AutocastCPU"], torch.library.fallthrough_kernel, lib=lib)
    for key in ("AutogradCPU", "AutocastCPU"):
        hand.impl("add", torch.library.fallthrough_kernel, key)
    x = torch.ones(2, requires_grad=True)
    for library in (lib, hand):
        with torch.autocast("cpu"):
            result = getattr(torch.ops, library.ns).add(x, x)
        assert result.tolist() == [2, 2]
        assert (result.dtype, result.requires_grad) == (torch.float32, True)


def test_the_op_goes_with_its_library(helpers: ModuleType, ns: str) -> None:
    for again in (False, True):
        library = Library(ns, "FRAGMENT")
        op = helpers._register_custom_op(library)(_choose_scale)
        overload = op.default
        assert overload in torch._inductor.decomposition.decompositions, again
        library._destroy()
        assert overload not in torch._inductor.decomposition.decompositions
        assert not hasattr(getattr(torch.ops, ns), "choose_scale")


def test_errors(choose: list[Any], helpers: ModuleType, by_hand: ModuleType, lib: Library, hand: Library) -> None:
    for args in [(), ("x",), (torch.ones(2), "bits")]:
        ours, theirs = (message(lambda op=op, a=args: op(*a)) for op in choose)
        assert ours == theirs.replace(hand.ns, lib.ns)
    with pytest.raises(DefinitionError, match=r"choose_scale: .*multiple times; it is defined at"):
        helpers._register_custom_op(lib)(_choose_scale)
    assert "multiple times" in message(lambda: by_hand.torchao(hand, "choose_scale", _choose_scale))
