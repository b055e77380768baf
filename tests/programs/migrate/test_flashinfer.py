"""FlashInfer: every kernel an op, or none."""

from __future__ import annotations

from types import ModuleType
from typing import Any, Optional

import pytest
import torch
from helpers.migration import Twins, message
from torch import Tensor

from customops.errors import UnregisteredError

pytestmark = pytest.mark.compile


def paged_run(
    workspace: Tensor, q: Tensor, table: Optional[Tensor], layout: int, o: Tensor, lse: Optional[Tensor] = None
) -> None:
    workspace.fill_(layout)
    o.copy_(q if table is None else q[table])
    if lse is not None:
        lse.copy_(q.sum(-1))


def top_k(probs: Tensor, k: int, deterministic: bool = True) -> tuple[Tensor, Tensor]:
    values, indices = probs.topk(k)
    return values, indices


def top_k_fake(probs: Tensor, k: int, deterministic: bool = True) -> tuple[Tensor, Tensor]:
    return probs.new_empty((*probs.shape[:-1], k)), probs.new_empty((*probs.shape[:-1], k), dtype=torch.int64)


def paged(n: int) -> tuple[Any, ...]:
    return torch.zeros(2), torch.randn(n, 3), torch.arange(n).flip(0), 1, torch.zeros(n, 3), torch.zeros(n)


KINDS: list[tuple[Any, dict[str, Any], Any, Any]] = [
    (paged_run, {"mutates_args": ("workspace", "o", "lse")}, lambda *args: None, paged),
    (top_k, {"mutates_args": (), "device_types": "cpu"}, top_k_fake, lambda n: (torch.rand(n, 4), 2)),
]


@pytest.mark.parametrize(("fn", "options", "fake", "arguments"), KINDS, ids=[kind[0].__name__ for kind in KINDS])
def test_same_as_by_hand(
    helpers: ModuleType, by_hand: ModuleType, ns: str, fn: Any, options: dict[str, Any], fake: Any, arguments: Any
) -> None:
    ours = helpers.register_custom_op(f"{ns}::{fn.__name__}", **options)(fn)
    helpers.register_fake_op(f"{ns}::{fn.__name__}")(fake)
    theirs = by_hand.flashinfer(f"{ns}_hand::{fn.__name__}", fn, fake, **options)
    Twins(ours, theirs, fn, arguments).check()


def softmax(
    workspace_buffer: Tensor,
    logits: Tensor,
    maybe_temperature_arr: Optional[Tensor],
    temperature_val: float,
    enable_pdl: bool,
) -> Tensor:
    workspace_buffer.zero_()
    temperature = temperature_val if maybe_temperature_arr is None else maybe_temperature_arr[:, None]
    return (logits.float() / temperature).softmax(-1)


def softmax_fake(workspace_buffer: Tensor, logits: Tensor, *others: Any) -> Tensor:
    return torch.empty_like(logits, dtype=torch.float32)


@pytest.mark.parametrize("has_array", [True, False])
def test_the_softmax_of_flashinfer(helpers: ModuleType, by_hand: ModuleType, ns: str, has_array: bool) -> None:
    """Its signature, and its test: against torch's own, with one temperature or one for each row, and with -inf."""
    options: dict[str, Any] = {"mutates_args": ("workspace_buffer",)}
    ours = helpers.register_custom_op(f"{ns}::softmax", **options)(softmax)
    helpers.register_fake_op(f"{ns}::softmax")(softmax_fake)
    theirs = by_hand.flashinfer(f"{ns}_hand::softmax", softmax, softmax_fake, **options)

    def arguments(n: int) -> tuple[Any, ...]:
        return torch.ones(2), torch.randn(n, 5).half(), torch.rand(n) + 0.5 if has_array else None, 0.5, True

    Twins(ours, theirs, softmax, arguments).check()
    workspace, logits, array, one, pdl = arguments(3)
    logits[1, 2] = float("-inf")
    expected = torch.softmax(logits.float() / (array[:, None] if has_array else one), -1)
    torch.testing.assert_close(ours(workspace, logits, array, one, pdl), expected)
    assert workspace.tolist() == [0, 0]


def test_switched_off(helpers: ModuleType, ns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The function is what it was, for compilers, too, and nothing is defined."""
    monkeypatch.setenv("FLASHINFER_USE_TORCH_CUSTOM_OPS", "0")
    off = helpers.register_custom_op(f"{ns}::top_k", mutates_args=())(top_k)
    helpers.register_fake_op(f"{ns}::top_k")(top_k_fake)
    probs = torch.rand(2, 4)
    torch.testing.assert_close(off(probs, 2), torch.topk(probs, 2)[:2], check_dtype=True)
    compiled = torch.compile(lambda x: off(x, 2), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(probs), top_k(probs, 2))
    assert off is top_k
    assert not torch._C._dispatch_has_kernel(f"{ns}::top_k")


def test_a_generator(helpers: ModuleType, ns: str) -> None:
    """A hint that older versions of torch refuse: there a fork leaves such functions alone, with a warning."""
    softmax = helpers.sampling_module("f16")
    workspace, logits = torch.ones(2), torch.randn(2, 3)
    torch.testing.assert_close(softmax(workspace, logits, None, torch.Generator()), logits.softmax(-1))
    assert workspace.tolist() == [0, 0]
    assert helpers.sampling_module("f16") is softmax
    assert "Generator? generator=None" in str(softmax.schema)


def test_again_replaces(helpers: ModuleType, by_hand: ModuleType, ns: str) -> None:
    """By hand an old handle runs the new op, if it runs at all."""

    def lowest(probs: Tensor, k: int, deterministic: bool = True) -> tuple[Tensor, Tensor]:
        return top_k(-probs, k)

    probs = torch.tensor([0.5, 0.2, 0.3])
    for name, register in ((f"{ns}::f", helpers.register_custom_op), (f"{ns}_hand::f", by_hand.flashinfer)):
        old, new = (register(name, fn, mutates_args=()) for fn in (top_k, lowest))
        assert new(probs, 1)[1].tolist() == [1]
        assert getattr(torch.ops, name.partition("::")[0]).f(probs, 1)[1].tolist() == [1]
        if register is helpers.register_custom_op:
            with pytest.raises(UnregisteredError, match="was replaced by the definition at"):
                old(probs, 1)


def test_wrong_calls(helpers: ModuleType, by_hand: ModuleType, ns: str) -> None:
    ours = helpers.register_custom_op(f"{ns}::top_k", top_k, mutates_args=())
    theirs = by_hand.flashinfer(f"{ns}_hand::top_k", top_k, mutates_args=())
    x = torch.ones(4)
    for args, kwargs, wrong in [
        ((x,), {}, "'k'"),
        (("x", 1), {}, "'probs'"),
        ((x, 1.5), {}, "'k'"),
        ((x, 1), {"determinist": True}, "'determinist'"),
    ]:
        messages = [message(lambda op=op, a=args, k=kwargs: op(*a, **k)) for op in (ours, theirs)]
        for text in messages:
            assert "::top_k" in text
            assert wrong in text
