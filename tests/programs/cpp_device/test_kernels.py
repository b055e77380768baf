"""The device of `examples/cpp_device`: kernels, the fallback, autograd."""

from __future__ import annotations

import copy
import sys
import warnings
from typing import Any

import pytest
import torch
from helpers.cpp_device import (
    DTYPES,
    Model,
    counted,
    equal,
    main,
    on_device,
    sample,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from customops import custom_op

pytestmark = pytest.mark.process


# -- kernels -----------------------------------------------------------------------------------


@on_device
def test_add() -> None:
    for a in DTYPES:
        for b in DTYPES:
            x, y = sample(a, 3, 1), sample(b, 4)
            equal(x.toy() + y.toy(), x + y)
    x, y = torch.randn(3, 4), torch.randn(4, 3).t()
    ours = x.toy()
    assert counted(lambda: (ours + 1, ours + y.toy(), ours.add_(y.toy(), alpha=2))) == {}
    equal(ours, x + 2 * y)
    equal(x.toy() + 1, x + 1)
    equal(x.toy().int() + 1.5, x.int() + 1.5)
    equal(torch.add(x.bfloat16().toy(), 1.5), x.bfloat16() + 1.5)
    assert torch.add(x.bfloat16().toy(), 1.5).dtype == torch.bfloat16
    assert (x.toy() + y.toy()).stride() == (x + y).stride()
    out = torch.empty(0, dtype=torch.float64, device="toy")
    assert torch.add(x.toy(), y.toy(), out=out) is out
    equal(out, torch.add(x, y, out=torch.empty(0, dtype=torch.float64)))
    with pytest.raises(RuntimeError, match="result type Float can't be cast to"):
        x.int().toy().add_(x.toy())
    with pytest.raises(RuntimeError, match="single memory location"):
        torch.ones(1, device="toy").expand(3).add_(1)


@on_device
def test_abs() -> None:
    for dtype in set(DTYPES) - {torch.bool}:
        x = sample(dtype, 3, 4)
        equal(x.toy().abs(), x.abs())
        equal(x.t().toy().abs(), x.t().abs())
        if not dtype.is_complex:
            equal(x.toy().abs_(), x.abs())
    x = torch.randn(3)
    assert counted(lambda: x.toy().abs()) == {}
    out = torch.empty(3, device="toy:1")
    assert torch.abs(x.to("toy:1"), out=out) is out
    equal(out, x.abs())


@on_device
def test_fill() -> None:
    for dtype in [*DTYPES, torch.float8_e4m3fn, torch.uint16]:
        for value in [0, 1, 1.0]:
            expected = torch.empty(3, 4, dtype=dtype).fill_(value)
            ours = torch.empty(3, 4, dtype=dtype, device="toy")
            ours.t()[1:].fill_(value)
            ours[:, 0].fill_(value)
            equal(ours.view(torch.uint8), expected.view(torch.uint8))
    x = torch.ones(3, device="toy")
    assert counted(lambda: (x.zero_(), x.fill_(2))) == {}
    equal(x, torch.full((3,), 2.0))


@on_device
def test_quantize() -> None:
    warnings.filterwarnings("ignore", ".*quantized tensor creation functions")  # deprecated in torch
    x = torch.randn(3, 4, 5)
    for dtype in [torch.qint8, torch.quint8, torch.qint32]:
        for value in [x, x.permute(2, 0, 1)]:
            ours = torch.quantize_per_tensor(value.to("toy:1"), 0.1, 10, dtype)
            expected = torch.quantize_per_tensor(value, 0.1, 10, dtype)
            assert (ours.device, ours.dtype, ours.shape) == (torch.device("toy:1"), dtype, value.shape)
            assert (ours.q_scale(), ours.q_zero_point(), ours.qscheme()) == (0.1, 10, torch.per_tensor_affine)
            equal(ours.int_repr(), expected.int_repr())
            equal(ours.dequantize(), expected.dequantize())


@on_device
def test_attention() -> None:
    tensors = [torch.randn(2, 3, 5, 8) for _ in range(3)]
    mask = torch.randn(5, 5)

    def run(device: str, **options: Any) -> tuple[Tensor, list[Any]]:
        options = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in options.items()}
        inputs = [t.detach().to(device).requires_grad_() for t in tensors]
        out = F.scaled_dot_product_attention(*inputs, **options)
        (out * torch.linspace(0, 1, 8, device=device)).sum().backward()
        return out, [t.grad for t in inputs]

    for options in [{}, {"is_causal": True}, {"attn_mask": mask}, {"attn_mask": mask > 0}, {"scale": 0.3}]:
        ours, expected = run("toy:1", **options), run("cpu", **options)
        assert "OverrideableBackward" in type(ours[0].grad_fn).__name__
        for a, b in zip([ours[0], *ours[1]], [expected[0], *expected[1]], strict=True):
            assert a.device == torch.device("toy:1")
            assert_close(a.cpu(), b)
    inputs = [t.toy().requires_grad_() for t in tensors]
    F.scaled_dot_product_attention(*inputs).sum().backward()  # the gradient is a number, expanded
    assert inputs[2].grad.sum().item() == pytest.approx(2 * 3 * 5 * 8)
    used = counted(lambda: F.scaled_dot_product_attention(*[t.toy() for t in tensors]))
    assert used == {}


@on_device
def test_attention_that_our_kernel_cannot_do() -> None:
    q, k, v = (torch.randn(2, 4, 5, 8) for _ in range(3))
    mask = torch.randn(5, 5)
    for args, options in [
        ((q[0], k[0], v[0]), {}),
        ((q, k, v[..., :3]), {}),
        ((q, k[:, :2], v[:, :2]), {"enable_gqa": True}),
        ((q, k, v, mask.expand(4, 5, 5).contiguous()), {}),
        ((q, k, v.mT.contiguous().mT), {}),
        ((q, k[:1], v[:1]), {}),
        ((q[:0], k[:0], v[:0]), {}),
        ((q, k, v, mask.clone().requires_grad_()), {}),
    ]:
        expected = F.scaled_dot_product_attention(*args, **options)
        ours = [t.toy() for t in args]
        for t in [q, *ours]:
            t.requires_grad_()
        result = F.scaled_dot_product_attention(*ours, **options)
        assert "Overrideable" not in type(result.grad_fn).__name__
        assert_close(result.detach().cpu(), expected.detach())
    with pytest.raises(RuntimeError, match="same device"):
        F.scaled_dot_product_attention(q.toy(), k.toy(), v.toy(), mask)  # which is on the CPU
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        assert counted(lambda: F.scaled_dot_product_attention(q.toy(), k.toy(), v.toy()))


@on_device
def test_convolution() -> None:
    for net, size in [
        (nn.Conv2d(2, 4, 3, stride=2, padding=1), (3, 2, 7, 7)),
        (nn.Conv1d(4, 4, 3, bias=False, groups=2), (3, 4, 7)),
        (nn.ConvTranspose2d(2, 4, 3), (3, 2, 5, 5)),
    ]:
        x, ours = torch.randn(size, requires_grad=True), copy.deepcopy(net).to("toy:1")
        y = x.detach().to("toy:1").requires_grad_()
        expected, result = net(x), ours(y)
        expected.sin().sum().backward()
        result.sin().sum().backward()
        assert_close(result.cpu(), expected)
        pairs = zip([y, *ours.parameters()], [x, *net.parameters()], strict=True)
        for a, b in pairs:
            assert_close(a.grad.cpu(), b.grad)


# -- the fallback ------------------------------------------------------------------------------


@on_device
def test_fallback_is_counted() -> None:
    x, y = torch.randn(3, device="toy:1"), torch.randn(3, device="toy:1")
    index = torch.tensor([2, 0], device="toy:1")
    for name, fn, expected in [
        ("aten::sub.Tensor", lambda: x - y, lambda: x.cpu() - y.cpu()),
        ("aten::_foreach_add.List", lambda: torch._foreach_add([x], [y])[0], lambda: x.cpu() + y.cpu()),
        ("aten::index.Tensor", lambda: x[index], lambda: x.cpu()[index.cpu()]),
        (
            "aten::triu_indices",
            lambda: torch.triu_indices(3, 3, device="toy:1"),
            lambda: torch.triu_indices(3, 3),
        ),
        ("aten::cumsum.out", lambda: x.cumsum(0), lambda: x.cpu().cumsum(0)),
        ("aten::mul.out", lambda: x.clone().mul_(y), lambda: x.cpu() * y.cpu()),
        ("aten::nonzero", lambda: x.nonzero(), lambda: x.cpu().nonzero()),
        ("aten::topk.values", lambda: x.topk(2)[1], lambda: x.cpu().topk(2)[1]),
    ]:
        assert counted(fn) == {name: 1}
        equal(fn(), expected())
        assert fn().device == torch.device("toy:1")
    assert counted(lambda: (x - y, x - y)) == {"aten::sub.Tensor": 2}


@on_device
def test_fallback_writes_back() -> None:
    x, y = torch.randn(3, 4), torch.randn(4, 3)
    ours = x.toy()
    ours.t()[1:].mul_(y.toy()[1:])  # through a view
    x.t()[1:].mul_(y[1:])
    equal(ours, x)
    values, indices = torch.empty(0, device="toy"), torch.empty(0, dtype=torch.int64, device="toy")
    torch.sort(ours, out=(values, indices))
    equal(values, x.sort().values)
    equal(indices, x.sort().indices)
    first, second = torch.ones(2, device="toy"), torch.ones(2, device="toy")
    torch._foreach_mul_([first, second], 3)
    equal(first + second, torch.full((2,), 6.0))
    ours[torch.tensor([0, 2])] = 5.0
    x[torch.tensor([0, 2])] = 5.0
    equal(ours, x)


@on_device
def test_fallback_with_numbers() -> None:
    number = torch.tensor(2.5)
    for dtype in set(DTYPES) - {torch.bool}:
        for size in [(3,), ()]:
            x = sample(dtype, *size)
            for op in [
                lambda x: 2 - x,
                lambda x: 1.1 - x,
                lambda x: x - 1.1,
                lambda x: number.to(x.device) - x,
                lambda x: number - x,
                lambda x: x - number,
                lambda x: torch.where(x == x, 1, x),
                lambda x: torch.where(torch.tensor(True), x, x),
                lambda x: torch.gather(x, 0, torch.zeros_like(x, dtype=torch.int64)),
            ]:
                equal(op(x.to("toy:1")), op(x))
                assert op(x.to("toy:1")).device == torch.device("toy:1")
            if not dtype.is_complex:
                positive = x.abs().clamp(min=1)
                equal(5 // positive.to("toy:1"), 5 // positive)
                equal(positive.toy() // 2, positive // 2)


@on_device
def test_fallback_of_ops_of_others() -> None:
    library = torch.library.Library("test_cpp_device", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.define("tail(Tensor(a) x) -> Tensor(a)")
    library.impl("twice", lambda x: x * 2, "CPU")
    library.impl("tail", lambda x: x[1:], "CPU")
    library.define("count(Tensor x, Tensor(a!) n) -> ()")
    library.impl("count", lambda x, n: n.add_(x.numel()) and None, "CPU")
    x = torch.ones(2, device="toy:1")
    equal(torch.ops.test_cpp_device.twice(x), torch.full((2,), 2.0))
    assert counted(lambda: torch.ops.test_cpp_device.twice(x)) == {"test_cpp_device::twice": 1}
    n = torch.zeros((), device="toy:1")
    torch.ops.test_cpp_device.count(x, n)
    assert n.item() == 2
    with pytest.raises(NotImplementedError, match="_copy_from_and_resize"):  # torch cannot write to the CPU here
        torch.ops.test_cpp_device.count(x, torch.zeros(()))
    with pytest.raises(RuntimeError, match="tail"):  # a view of a copy would be no view
        torch.ops.test_cpp_device.tail(x)


# -- autograd ----------------------------------------------------------------------------------


@on_device
def test_backward_on_both_devices() -> None:
    x = torch.randn(3, 4)
    for device in ["toy:0", "toy:1"]:
        ours, expected = x.to(device).requires_grad_(), x.clone().requires_grad_()
        for y in [ours, expected]:
            y = y.abs() + y.t().reshape(3, 4) * y[0]
            (y.softmax(-1) - y.sin()).square().sum().backward()
        assert ours.grad.device == torch.device(device)
        assert_close(ours.grad.cpu(), expected.grad)


@on_device
def test_backward_across_devices() -> None:
    x, y = torch.randn(3, requires_grad=True), torch.randn(3, device="toy:1", requires_grad=True)
    z = x.to("toy:0").sin().to("toy:1") * y
    z.sum().backward()
    assert (x.grad.device.type, y.grad.device) == ("cpu", torch.device("toy:1"))
    assert_close(x.grad, x.cos().detach() * y.detach().cpu())
    assert_close(y.grad.cpu(), x.detach().sin())


@on_device
def test_backward_thread_of_a_device() -> None:
    seen: list[tuple[str, int]] = []

    class Spy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            seen.append((str(grad.device), torch.toy.current_device()))
            return grad

    for device in ["toy:0", "toy:1"]:
        Spy.apply(torch.ones(2, device=device, requires_grad=True)).sum().backward()
    assert seen == [("toy:0", 0), ("toy:1", 1)]  # the engine makes the device current


@on_device
def test_gradcheck() -> None:
    x = torch.randn(2, 3, dtype=torch.float64, device="toy:1", requires_grad=True)
    y = torch.randn(3, dtype=torch.complex128, device="toy:1", requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, y: (x + y).abs().sub(x), (x, y))
    assert torch.autograd.gradgradcheck(lambda x: x * x.sin() + x, (x,))


@on_device
def test_training() -> None:
    def losses(device: str, **options: Any) -> list[float]:
        torch.manual_seed(0)
        model, tokens = Model(), torch.randint(11, (4, 6))
        model, tokens = model.to(device), tokens.to(device)
        optimizer, found = torch.optim.AdamW(model.parameters(), lr=0.01, **options), []
        for _ in range(5):
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            found.append(loss.item())
        return found

    expected = losses("cpu")
    assert expected[-1] < expected[0]
    assert losses("toy:0") == pytest.approx(expected, rel=1e-4)
    assert losses("toy:1", foreach=True) == pytest.approx(expected, rel=1e-4)


@on_device
def test_custom_op() -> None:
    @custom_op("test_cpp_device_ops::scale", mutates_args=())
    def scale(x: Tensor, by: float) -> Tensor:
        raise AssertionError("the kernel for other devices")

    ran = []

    @scale.register_kernel("toy")
    def scale_toy(x: Tensor, by: float) -> Tensor:
        ran.append(x.device)
        return x * by

    @scale.register_fake
    def scale_fake(x: Tensor, by: float) -> Tensor:
        return torch.empty_like(x)

    scale.register_autograd(lambda ctx, grad: (scale(grad, ctx.by), None), setup_context=keep_by)
    x = torch.randn(3, device="toy:1", requires_grad=True)
    y = scale(x, 2.5)
    y.backward(torch.arange(3.0, device="toy:1"))
    equal(y.detach(), x.detach().cpu() * 2.5)
    equal(x.grad, torch.arange(3.0) * 2.5)
    assert ran == [torch.device("toy:1")] * 2
    compiled = torch.compile(lambda x: scale(x, 2.0) + 1, backend="aot_eager", fullgraph=True)
    equal(compiled(x.detach()), x.detach().cpu() * 2 + 1)


def keep_by(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.by = inputs[1]


@on_device
def test_custom_op_without_a_kernel_for_us() -> None:
    @custom_op("test_cpp_device_ops::cpu_only", mutates_args=(), device_types="cpu")
    def cpu_only(x: Tensor) -> Tensor:
        assert x.device.type == "cpu"
        return x + 1

    x = torch.ones(2, device="toy:1")
    equal(cpu_only(x), torch.full((2,), 2.0))
    assert counted(lambda: cpu_only(x)) == {"test_cpp_device_ops::cpu_only": 1}


if __name__ == "__main__":
    main(sys.argv[1])
