"""flash-attention: ops where torch has them, a gradient around two of them, and ops of Triton kernels with a schema."""

from __future__ import annotations

from types import FunctionType, ModuleType
from typing import Any, Optional

import pytest
import torch
from helpers.migration import Twins, message, signature
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from customops.errors import SchemaError

pytestmark = pytest.mark.compile


def forward_args(n: int) -> tuple[Any, ...]:
    return *torch.randn(3, 2, n, 4), 0.5, True, None


def backward_args(n: int) -> tuple[Any, ...]:
    dout, q, k, v = torch.randn(4, 2, n, 4)
    return dout, q, k, v, (q @ k.mT * 0.5).logsumexp(-1), torch.zeros(2, n, 4), None, torch.zeros(2, n, 4), 0.5, True


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_same_as_by_hand(helpers: ModuleType, by_hand: ModuleType, ns: str, name: str) -> None:
    ours = getattr(helpers, f"attention_{name}")
    kernel = ours.__wrapped__
    writes = ("dq", "dk", "dv") if name == "backward" else ()
    theirs = by_hand.flash_attention(
        f"{ns}::{name}", kernel, ours._abstract_fn, mutates_args=writes, device_types="cpu"
    )
    Twins(ours, theirs, kernel, {"forward": forward_args, "backward": backward_args}[name]).check()


def flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Optional[Tensor],
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * softmax_scale
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)
    return out, scores.logsumexp(-1), q.new_empty(0), torch.zeros(2, dtype=torch.int64)


def flash_attn_forward_fake(q: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1])
    return torch.empty_like(q), lse, q.new_empty(0), torch.empty(2, dtype=torch.int64)


@pytest.mark.parametrize("causal", [False, True])
def test_the_forward_of_flash_attention(helpers: ModuleType, by_hand: ModuleType, ns: str, causal: bool) -> None:
    """Its signature, and its test: against torch's attention, of sequences before heads."""
    options: dict[str, Any] = {"mutates_args": (), "device_types": "cpu"}
    ours = helpers.custom_op_wrapper(f"{ns}::_flash_attn_forward", flash_attn_forward, **options)
    helpers.register_fake_wrapper(f"{ns}::_flash_attn_forward", flash_attn_forward_fake)
    theirs = by_hand.flash_attention(f"{ns}_hand::forward", flash_attn_forward, flash_attn_forward_fake, **options)

    def arguments(n: int) -> tuple[Any, ...]:
        return *torch.randn(3, 2, n, 3, 4), 0.0, 0.5, causal, -1, -1, 0.0, None, False

    for op in (ours, theirs):
        args = arguments(3)
        q, k, v = (x.transpose(1, 2) for x in args[:3])
        expected = scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.5).transpose(1, 2)
        torch.testing.assert_close(op(*args)[0], expected)
    text = [signature(op).partition("(")[2] for op in (ours, theirs)]
    assert text[0] == text[1]
    compiled = torch.compile(ours, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (3, 5):
        torch.testing.assert_close(compiled(*(args := arguments(n))), flash_attn_forward(*args))


# Dynamo makes an instance of each `autograd.Function` that it traces.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
@pytest.mark.parametrize("causal", [False, True])
def test_the_gradient_around_them(helpers: ModuleType, causal: bool) -> None:
    """Against torch's attention, and the same under a compiler."""
    q, k, v = (torch.randn(2, 3, 4, requires_grad=True) for _ in range(3))
    expected = torch.autograd.grad(scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.5).sum(), (q, k, v))

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return helpers.Attention.apply(q, k, v, 0.5, causal)

    for fn in (attention, torch.compile(attention, fullgraph=True, backend="aot_eager")):
        torch.testing.assert_close(torch.autograd.grad(fn(q, k, v).sum(), (q, k, v)), expected)


def test_where_torch_is_too_old(helpers: ModuleType, ns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helpers, "SUPPORTED", False)

    @helpers.custom_op_wrapper(f"{ns}::f", mutates_args=())
    def f(x: Tensor) -> Tensor:
        return x + 1

    @helpers.register_fake_wrapper(f"{ns}::f")
    def _(x: Tensor) -> Tensor:
        raise AssertionError

    assert not torch._C._dispatch_has_kernel(f"{ns}::f")
    assert f(torch.ones(1)).item() == 2
    assert isinstance(f, FunctionType)


def add(x: Tensor, y: Tensor, alpha: float = 1.0) -> Tensor:
    return x + alpha * y


def test_a_schema_for_an_op_of_triton_kernels(helpers: ModuleType, ns: str) -> None:
    """torch's `triton_op` does not look at ``schema=``. Compilers trace into it, or do not."""
    schema = "(Tensor x, Tensor y, *, float alpha=2.0) -> Tensor"

    def only_by_keyword(x: Tensor, y: Tensor, *, alpha: float) -> Tensor:
        return add(x, y, alpha)

    for traced in (True, False):
        op = helpers.triton_op(
            f"{ns}::add_{traced}", only_by_keyword, mutates_args=(), schema=schema, allow_decomposition=traced
        )
        assert signature(op) == f"add_{traced}{schema}".replace("2.0", "2.")
        graphs: list[str] = []
        x = torch.ones(2)
        assert compiled(op, graphs)(x, x).tolist() == [3, 3]
        assert (f"add_{traced}" in graphs[0]) != traced


def compiled(op: Any, graphs: list[str]) -> Any:
    from torch._dynamo.backends.common import aot_autograd  # noqa: PLC0415
    from torch._functorch.aot_autograd import make_boxed_func  # noqa: PLC0415

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph.code)
        return make_boxed_func(graph.forward)

    return torch.compile(lambda x, y: op(x, y), fullgraph=True, backend=aot_autograd(fw_compiler=keep))


def test_errors(helpers: ModuleType, by_hand: ModuleType, ns: str) -> None:
    def bad(x: Tensor, window: tuple) -> Tensor: ...  # type: ignore[type-arg]

    with pytest.raises(SchemaError, match="parameter window") as caught:
        helpers.custom_op_wrapper(f"{ns}::bad", bad, mutates_args=())
    assert len(str(caught.value)) < len(message(lambda: by_hand.flash_attention(f"{ns}::bad", bad, mutates_args=())))
    kernel = helpers.attention_forward.__wrapped__
    theirs = by_hand.flash_attention(f"{ns}::forward", kernel, mutates_args=(), device_types="cpu")
    x = torch.ones(2, 2)
    texts = [message(lambda op=op: op(x, "k", x, 1.0, True, None)) for op in (helpers.attention_forward, theirs)]
    problem = texts[1].partition("() ")[2].partition(".")[0]
    assert texts[0].startswith(f"examples_flash_attention::forward: {problem}")  # and how to mend it
