"""Training on the device: gradients, layers, recurrent cells, convolutions, optimisers; losses equal the CPU's."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.isolated import isolated
from helpers.npy import register
from torch import nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from customops.backend import register_backend

pytestmark = pytest.mark.process


on_device = isolated(register, imports=["helpers.inductor"])


def both(module: nn.Module, *inputs: torch.Tensor, device: str = "npy") -> None:
    """Outputs, gradients of inputs and of parameters are those of the CPU."""
    there = copy.deepcopy(module).to(device)
    here_inputs = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    there_inputs = [x.to(device).requires_grad_(x.is_floating_point()) for x in inputs]
    expected, got = flat(module(*here_inputs)), flat(there(*there_inputs))
    for a, b in zip(expected, got, strict=True):
        assert b.device == torch.device(device if ":" in device else f"{device}:0")
        assert_close(b.cpu(), a)
    weights = [torch.randn_like(a) for a in expected]
    torch.autograd.backward(expected, weights)
    torch.autograd.backward(got, [w.to(device) for w in weights])
    pairs = zip([*here_inputs, *module.parameters()], [*there_inputs, *there.parameters()], strict=True)
    for a, b in pairs:
        if a.grad is not None:
            assert b.grad.device.type == "npy"
            assert_close(b.grad.cpu(), a.grad)


def flat(value) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in flat(item)]


@on_device
def test_layers() -> None:
    x = torch.randn(2, 4, 8)
    both(nn.Linear(8, 3), x)
    both(nn.LayerNorm(8), x)
    both(nn.GroupNorm(2, 4), x)
    both(nn.BatchNorm1d(4), x)
    both(nn.Embedding(10, 3), torch.tensor([[1, 2], [3, 9]]))
    both(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Softmax(-1)), x)
    both(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), x)
    both(nn.MultiheadAttention(8, 2, batch_first=True), x, x, x)
    both(nn.Bilinear(8, 8, 2), x, x)


@on_device
def test_convolutions() -> None:
    for bias in (True, False):
        both(nn.Conv1d(4, 6, 3, bias=bias), torch.randn(2, 4, 9))
        both(nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2, bias=bias), torch.randn(2, 4, 8, 8))
        both(nn.Conv3d(2, 3, 2, dilation=2, bias=bias), torch.randn(1, 2, 5, 5, 5))
        both(nn.ConvTranspose2d(4, 2, 3, stride=2, output_padding=1, bias=bias), torch.randn(2, 4, 5, 5))
    both(nn.Conv2d(4, 6, 3, padding="same"), torch.randn(4, 6, 6))
    both(nn.Sequential(nn.Conv2d(1, 2, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(18, 2)), torch.randn(2, 1, 8, 8))


@on_device
def test_recurrent_layers() -> None:
    for cls in (nn.LSTM, nn.GRU, nn.RNN):
        for options in ({}, {"num_layers": 2, "bidirectional": True}, {"bias": False}, {"batch_first": True}):
            both(cls(4, 5, **options), torch.randn(3, 2, 4))
    both(nn.LSTM(4, 5, proj_size=3), torch.randn(3, 2, 4))


class LastCell(nn.Module):
    """Only the cell state: the hidden state has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[1][1]


@on_device
def test_recurrent_cells() -> None:
    state = torch.randn(2, 5)
    both(nn.GRUCell(4, 5), torch.randn(2, 4), state)
    both(nn.RNNCell(4, 5), torch.randn(2, 4), state)
    both(LSTMCell(4, 5), torch.randn(2, 4), state, state)
    both(LastCell(), torch.randn(3, 2, 4))
    cell = nn.LSTMCell(4, 5).double().npy()
    inputs = [torch.randn(2, n, dtype=torch.float64, device="npy", requires_grad=True) for n in (4, 5, 5)]
    assert torch.autograd.gradcheck(lambda x, h, c: cell(x, (h, c)), inputs)
    gru = nn.GRUCell(4, 5).double().npy()
    assert torch.autograd.gradcheck(gru, inputs[:2])


class LSTMCell(nn.LSTMCell):
    def forward(self, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor):
        return super().forward(x, (h, c))


@on_device
def test_packed_sequences() -> None:
    x = torch.randn(5, 2, 4)
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3]))
    moved = packed.npy()
    assert moved.is_npy
    assert not packed.is_npy
    assert moved.batch_sizes.device.type == "cpu"
    lstm = nn.LSTM(4, 5)
    there = copy.deepcopy(lstm).npy()
    expected, _ = nn.utils.rnn.pad_packed_sequence(lstm(packed)[0])
    got, lengths = nn.utils.rnn.pad_packed_sequence(there(moved)[0])
    assert lengths.tolist() == [5, 3]
    assert_close(got.cpu(), expected)
    got.sum().backward()
    expected.sum().backward()
    assert_close(there.weight_ih_l0.grad.cpu(), lstm.weight_ih_l0.grad)
    assert nn.utils.rnn.pack_padded_sequence(x.npy(), torch.tensor([5, 3])).data.is_npy


@on_device
def test_losses() -> None:
    x, target = torch.randn(4, 5), torch.tensor([0, 4, 2, 1])
    for loss in (nn.CrossEntropyLoss(), nn.NLLLoss(), nn.CrossEntropyLoss(label_smoothing=0.1)):
        here, there = x.clone().requires_grad_(), x.npy().requires_grad_()
        a, b = loss(here, target), loss(there, target.npy())
        assert_close(b.cpu(), a)
        a.backward()
        b.backward()
        assert_close(there.grad.cpu(), here.grad)


OPTIMISERS = [
    lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9),
    lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, fused=True),
    lambda p: torch.optim.SGD(p, lr=0.02, foreach=True),
    lambda p: torch.optim.Adam(p, lr=0.02),
    lambda p: torch.optim.Adam(p, lr=0.02, foreach=True),
    lambda p: torch.optim.AdamW(p, lr=0.02, fused=True),
    lambda p: torch.optim.AdamW(p, lr=0.02, amsgrad=True),
    lambda p: torch.optim.Adagrad(p, lr=0.02),
    lambda p: torch.optim.RMSprop(p, lr=0.02),
]


@on_device
def test_optimisers() -> None:
    x, y = torch.randn(8, 4), torch.randn(8, 2)
    for make in OPTIMISERS:
        losses = []
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        for device in ("cpu", "npy"):
            there = copy.deepcopy(model).to(device)
            optimiser = make(there.parameters())
            losses.append([])
            for _ in range(5):
                optimiser.zero_grad()
                loss = nn.functional.mse_loss(there(x.to(device)), y.to(device))
                loss.backward()
                nn.utils.clip_grad_norm_(there.parameters(), 1.0)
                optimiser.step()
                losses[-1].append(loss.item())
        assert losses[1] == pytest.approx(losses[0], rel=1e-4)
        assert min(losses[0]) < losses[0][0]


@on_device
def test_foreach_ops() -> None:
    xs = [torch.randn(3), torch.randn(2, 2)]
    ds = [x.npy() for x in xs]
    for f in (
        lambda ts: torch._foreach_add(ts, 1.0),
        lambda ts: torch._foreach_mul(ts, ts),
        lambda ts: torch._foreach_norm(ts),
        lambda ts: torch._foreach_add(ts, [1.0, 2.0]),
        lambda ts: torch._foreach_lerp(ts, torch._foreach_neg(ts), 0.25),
    ):
        for got, expected in zip(f(ds), f(xs), strict=True):
            assert got.is_npy
            assert_close(got.cpu(), expected)
    torch._foreach_mul_(ds, 2.0)
    assert_close(ds[0].cpu(), xs[0] * 2)


@on_device
def test_gradcheck() -> None:
    w = torch.randn(3, 3, dtype=torch.float64, device="npy", requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: (x @ x).tanh(), w)
    assert torch.autograd.gradgradcheck(lambda x: (x * x).sin().sum(0), w)


@on_device
def test_second_derivatives_and_hooks() -> None:
    w = torch.tensor([2.0], device="npy", requires_grad=True)
    (g,) = torch.autograd.grad(w**3, w, create_graph=True)
    (h,) = torch.autograd.grad(g, w)
    assert (g.item(), h.item()) == (12, 12)
    seen = []
    w.register_hook(lambda grad: seen.append(grad.item()) or grad * 2)
    (w * 5).backward()
    assert (seen, w.grad.item()) == ([5.0], 10.0)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        return grad * 3 * ctx.saved_tensors[0] ** 2


@on_device
def test_functions_and_checkpoints() -> None:
    w = torch.tensor([2.0], device="npy", requires_grad=True)
    Cube.apply(w).backward()
    assert w.grad.item() == 12
    block = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).npy()
    x = torch.randn(2, 4, device="npy", requires_grad=True)
    torch.manual_seed(3)
    expected = block(x)
    expected.sum().backward()
    plain, x.grad = x.grad, None
    torch.manual_seed(3)
    checkpoint(block, x, use_reentrant=False).sum().backward()  # draws the same numbers again
    assert_close(x.grad, plain)


@on_device
def test_modules_move() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    assert model.npy() is model
    assert {t.device.type for t in model.state_dict().values()} == {"npy"}
    assert {t.device.type for t in model.cpu().state_dict().values()} == {"cpu"}
    assert model.npy(1)[0].weight.device == torch.device("npy:1")
    assert nn.Linear(2, 3, device="npy").weight.is_npy
    with torch.device("npy:1"):
        assert nn.Linear(2, 3).weight.device == torch.device("npy:1")
        assert torch.zeros(2).device == torch.device("npy:1")
    empty = nn.Linear(2, 3, device="meta").to_empty(device="npy")
    empty.load_state_dict(nn.Linear(2, 3).state_dict())
    assert empty.weight.is_npy
    torch.set_default_device("npy")
    assert torch.arange(3).is_npy
    torch.set_default_device(None)
    assert math.isfinite(nn.utils.parameters_to_vector(empty.parameters()).sum().item())


@on_device
def test_a_transformer_learns_as_on_the_cpu() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Embedding(11, 16), layer, nn.Linear(16, 11))
    tokens = torch.randint(11, (4, 7))
    losses = {}
    for device in ("cpu", "npy", "npy:1"):
        there, data = copy.deepcopy(model).to(device), tokens.to(device)
        optimiser = torch.optim.AdamW(there.parameters(), lr=1e-2)
        losses[device] = []
        for _ in range(5):
            loss = nn.functional.cross_entropy(there(data)[:, :-1].reshape(-1, 11), data[:, 1:].reshape(-1))
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses[device].append(loss.item())
    assert losses["npy"] == pytest.approx(losses["cpu"], rel=1e-4)
    assert losses["npy:1"] == losses["npy"]
    assert losses["cpu"][-1] < losses["cpu"][0]


# Two devices ------------------------------------------------------------------------------------------------------


@on_device
def test_the_second_device() -> None:
    x = torch.randn(2, 4)
    both(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), x, device="npy:1")
    both(nn.Conv1d(2, 2, 3), torch.randn(1, 2, 6), device="npy:1")
    both(nn.GRU(4, 3), torch.randn(3, 2, 4), device="npy:1")
    first, second = x.npy(0), x.npy(1)
    for call in (lambda: first + second, lambda: torch.cat([first, second]), lambda: first @ second.t()):
        with pytest.raises((ValueError, RuntimeError), match=r"same device"):
            call()
    with pytest.raises(ValueError, match="same device") as info:
        torch.relu_(torch.where(first > 0, first, second))
    assert info.value.got == "one on npy:1"
    assert torch.empty(2, device="npy:1").copy_(first[0, :2]).device.index == 1
    assert torch.rand(3, device="npy:1").device.index == 1
    assert torch.tril_indices(2, 2, device="npy:1").device.index == 1
    assert second.new_zeros(2).device.index == 1
    assert second.sum().item() == first.sum().item()
    gradient_across = x.npy(0).requires_grad_()
    (gradient_across.npy(1) * 2).sum().backward()  # a graph over both
    assert gradient_across.grad.device.index == 0
    assert gradient_across.grad.sum().item() == 16


@on_device
def test_the_current_device() -> None:
    npy = torch.npy
    assert (npy.device_count(), npy.current_device()) == (2, 0)
    with npy.device(1):
        assert npy.current_device() == 1
        assert torch.empty(1, device="npy").device.index == 1
        assert torch.ones(1).npy().device.index == 1
        assert torch.arange(3, device="npy").device.index == 1
        with npy.device("npy:0"), npy.device(-1), npy.device(None):
            assert npy.current_device() == 0
        with npy.device_of(torch.ones(1)):
            assert npy.current_device() == 1
        with npy.device_of(torch.ones(1, device="npy:0")):
            assert npy.current_device() == 0
    assert npy.current_device() == 0
    npy.set_device("npy:1")
    assert npy.current_device() == 1
    for wrong in (2, -1, "cpu", "npy:2"):
        with pytest.raises(RuntimeError, match=r"no such device|Invalid device"):
            npy.set_device(wrong)


@on_device
def test_backward_in_threads_of_ones_own() -> None:

    grads = []

    def work() -> None:
        w = torch.ones(2, device="npy:1", requires_grad=True)
        (w * 3).sum().backward()
        grads.append(w.grad.tolist())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert grads == [[3, 3]]


class _Raises(TorchDispatchMode):
    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _Of(str(op))


class _Of(BaseException):
    pass


def raises(*_: Any) -> None:
    raise _Of("a hook")


@on_device
def test_an_exception_of_a_hook_comes_out_of_backward() -> None:
    """It ended the process: torch asks the guard of the device, in Python, while the exception is pending."""
    add: list[Callable[[torch.Tensor, torch.Tensor], Any]] = [
        lambda x, y: y.register_hook(raises),
        lambda x, y: y.grad_fn.register_hook(raises),
        lambda x, y: y.grad_fn.register_prehook(raises),
        lambda x, y: x.register_hook(raises),
        lambda x, y: x.register_post_accumulate_grad_hook(raises),
        lambda x, y: torch.autograd.graph.register_multi_grad_hook((x,), raises),
    ]
    for each in add:
        x = torch.ones(2, device="npy", requires_grad=True)
        y = x * x
        handle = each(x, y)
        with pytest.raises(_Of, match="a hook") as caught:
            y.sum().backward(retain_graph=True)
        assert caught.traceback[-1].name == "raises"
        handle.remove()
        x.grad = None
        y.sum().backward()
        assert x.grad.tolist() == [2, 2]


@on_device
def test_an_exception_of_code_that_a_graph_calls_comes_out() -> None:
    x = torch.ones(2, device="npy", requires_grad=True)
    with pytest.raises(_Of), torch.autograd.graph.saved_tensors_hooks(raises, lambda kept: kept):
        x * x
    with torch.autograd.graph.saved_tensors_hooks(lambda kept: kept, raises):
        y = x * x
    with pytest.raises(_Of):
        y.sum().backward()
    with pytest.raises(_Of), _Raises():
        (x * 2).sum().backward()
    y = x * 2
    y.register_hook(lambda gradient: "text")
    with pytest.raises(TypeError, match="hook returned 'str'"):
        y.sum().backward()


alone = isolated()


@alone
def test_a_backward_before_there_is_a_device() -> None:
    """It starts the engine's threads, for the devices of then."""
    w = torch.ones(2, requires_grad=True)
    (w * 2).sum().backward()
    register_backend("npy")
    d = torch.ones(2, device="npy", requires_grad=True)
    (d * 3).sum().backward()
    assert d.grad.tolist() == [3, 3]
    (gradient,) = torch.autograd.grad((d.exp() * w.npy()).sum(), w)
    assert_close(gradient, torch.ones(2).exp())
