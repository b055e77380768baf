"""Small models of many kinds, trained on a device with memory of its own and asynchronous streams, as on the CPU."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import pytest
import torch
from helpers.covers import every
from helpers.isolated import isolated
from helpers.npy import register_asynchronous
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

pytestmark = pytest.mark.process


def register() -> None:
    torch.set_num_threads(1)
    register_asynchronous()


on_device = isolated(register)

#: A model and what it is given; it returns the loss.
Made = tuple[nn.Module, list[Tensor]]


class Net(nn.Module):
    """Layers by name, and the function of them that is the loss."""

    def __init__(self, loss: Callable[..., Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.loss = loss
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.loss(self, *inputs)


def perceptron() -> Made:
    layers = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 3))
    return Net(lambda m, x, y: F.cross_entropy(m.net(x), y), net=layers), [torch.randn(8, 6), torch.arange(8) % 3]


def residual_convolutions() -> Made:
    def loss(m: Net, x: Tensor, y: Tensor) -> Tensor:
        x = F.relu(m.norm(m.first(x)))
        x = x + m.second(x)
        return F.cross_entropy(m.head(F.adaptive_avg_pool2d(x, 1).flatten(1)), y)

    first, second = nn.Conv2d(2, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, groups=8)
    net = Net(loss, first=first, norm=nn.BatchNorm2d(8), second=second, head=nn.Linear(8, 3))
    return net, [torch.randn(4, 2, 6, 6), torch.arange(4) % 3]


def up_and_down() -> Made:
    """An encoder and a decoder, with what is skipped."""

    def loss(m: Net, x: Tensor) -> Tensor:
        high = F.silu(m.down(x))
        low = F.silu(m.middle(F.max_pool2d(high, 2)))
        joined = torch.cat([F.interpolate(low, scale_factor=2, mode="nearest"), high], 1)
        return F.mse_loss(m.up(m.norm(joined)), x)

    parts = {"down": nn.Conv2d(1, 4, 3, padding=1), "middle": nn.Conv2d(4, 4, 3, padding=1)}
    net = Net(loss, **parts, norm=nn.GroupNorm(2, 8), up=nn.ConvTranspose2d(8, 1, 3, padding=1))
    return net, [torch.randn(2, 1, 8, 8)]


def both_directions() -> Made:
    def loss(m: Net, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(m.head(m.rnn(x)[0].amax(1)), y)

    net = Net(loss, rnn=nn.LSTM(4, 6, batch_first=True, bidirectional=True), head=nn.Linear(12, 3))
    return net, [torch.randn(5, 7, 4), torch.arange(5) % 3]


def packed_sequences() -> Made:
    def loss(m: Net, x: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3, 2]), batch_first=True)
        return m.rnn(packed)[1].square().mean()

    return Net(loss, rnn=nn.GRU(4, 6, batch_first=True)), [torch.randn(3, 5, 4)]


def encoder() -> Made:
    def loss(m: Net, tokens: Tensor) -> Tensor:
        padding = tokens == 0
        x = m.layer(m.embed(tokens), src_key_padding_mask=padding)
        return F.cross_entropy(m.head(x).flatten(0, 1), tokens.flatten(), ignore_index=0)

    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    net = Net(loss, embed=nn.Embedding(11, 8, padding_idx=0), layer=layer, head=nn.Linear(8, 11))
    return net, [torch.tensor([[3, 5, 7, 0], [1, 2, 0, 0]])]


def decoder_with_memory() -> Made:
    def loss(m: Net, x: Tensor, memory: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        return (m.layer(x, memory, tgt_mask=mask) - x).square().mean()

    layer = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
    return Net(loss, layer=layer), [torch.randn(2, 5, 8), torch.randn(2, 3, 8)]


def bags() -> Made:
    def loss(m: Net, items: Tensor, starts: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(m.head(m.bag(items, starts)).squeeze(1), y)

    items, starts = torch.arange(9) % 7, torch.tensor([0, 4, 6])
    net = Net(loss, bag=nn.EmbeddingBag(7, 5, mode="sum"), head=nn.Linear(5, 1))
    return net, [items, starts, torch.tensor([1.0, 0.0, 1.0])]


def experts() -> Made:
    """A mixture of experts: two of four for each row."""

    def loss(m: Net, x: Tensor) -> Tensor:
        weights, chosen = m.gate(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for i, expert in enumerate(m.experts):
            rows, place = torch.where(chosen == i)
            out = out.index_add(0, rows, expert(x[rows]) * weights[rows, place, None])
        return (out - x.roll(1, 1)).square().mean()

    return Net(loss, gate=nn.Linear(4, 4), experts=nn.ModuleList(nn.Linear(4, 4) for _ in range(4))), [
        torch.randn(9, 4)
    ]


def graph() -> Made:
    """Messages along the edges of a graph, summed where they arrive."""

    def loss(m: Net, x: Tensor, edges: Tensor) -> Tensor:
        messages = F.elu(m.edge(torch.cat([x[edges[0]], x[edges[1]]], 1)))
        sums = torch.zeros(len(x), 6, device=x.device).scatter_add(0, edges[1][:, None].expand(-1, 6), messages)
        return F.smooth_l1_loss(m.node(sums), x.sum(1, keepdim=True))

    net = Net(loss, edge=nn.Linear(6, 6), node=nn.Linear(6, 1))
    return net, [torch.randn(5, 3), torch.tensor([[0, 1, 2, 3, 4, 0], [1, 2, 3, 4, 0, 2]])]


def variational() -> Made:
    def loss(m: Net, x: Tensor, noise: Tensor) -> Tensor:
        mean, scale = m.encode(x).chunk(2, -1)
        posterior = torch.distributions.Normal(mean, F.softplus(scale))
        prior = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
        found = m.decode(mean + posterior.scale * noise)
        return F.mse_loss(found, x) + 0.01 * torch.distributions.kl_divergence(posterior, prior).mean()

    return Net(loss, encode=nn.Linear(6, 4), decode=nn.Linear(2, 6)), [torch.randn(7, 6), torch.randn(7, 2)]


def pairs() -> Made:
    def loss(m: Net, a: Tensor, b: Tensor) -> Tensor:
        a, b = F.normalize(m.net(a), dim=-1), F.normalize(m.net(b), dim=-1)
        return F.cross_entropy(a @ b.mT / 0.2, torch.arange(len(a), device=a.device))

    return Net(loss, net=nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4))), [torch.randn(6, 5)] * 2


def train(model: nn.Module, inputs: list[Tensor], device: str, optimizer: type[torch.optim.Optimizer]) -> list[float]:
    model.to(device)
    steps, losses = optimizer(model.parameters(), lr=0.02), []  # type: ignore[call-arg]
    given = [x.to(device) for x in inputs]
    for _ in range(4):
        loss = model(*given)
        steps.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        steps.step()
        losses.append(loss.item())
    return losses


def alike(name: str) -> None:
    make, optimizer = next((make, optimizer) for make, optimizer in MODELS.items() if make.__name__ == name)
    torch.manual_seed(0)
    model, inputs = make()
    there = copy.deepcopy(model)
    expected, found = train(model, inputs, "cpu", optimizer), train(there, inputs, "npy", optimizer)
    assert found == pytest.approx(expected, rel=1e-4)
    assert expected[-1] < expected[0]
    for (name, a), (_, b) in zip(model.state_dict().items(), there.state_dict().items(), strict=True):
        assert b.is_npy, name  # type: ignore[attr-defined]
        assert_close(b.cpu(), a, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


MODELS: dict[Callable[[], Made], type[torch.optim.Optimizer]] = {
    perceptron: torch.optim.AdamW,
    residual_convolutions: torch.optim.SGD,
    up_and_down: torch.optim.Adam,
    both_directions: torch.optim.RMSprop,
    packed_sequences: torch.optim.Adam,
    # The gradient of a bias of keys is zero but for rounding, which adaptive optimizers make large.
    encoder: torch.optim.SGD,
    decoder_with_memory: torch.optim.SGD,
    bags: torch.optim.Adagrad,
    experts: torch.optim.Adam,
    graph: torch.optim.Adamax,
    variational: torch.optim.RAdam,
    pairs: torch.optim.Adam,
}
#: One test for each, all of which run in forks of one process.
TESTS = {make.__name__: on_device(functools.partial(alike, make.__name__)) for make in MODELS}


@pytest.mark.parametrize("test", every(2, TESTS.values()), ids=TESTS)
def test_it_trains_as_on_the_cpu(test: Callable[[], None]) -> None:
    test()
