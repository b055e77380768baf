"""Whole programs on the device of `examples/numpy_device.py`, against the CPU: training, loading data, generation."""

from __future__ import annotations

import contextlib
import copy
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from helpers.isolated import isolated
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils.data import DataLoader, Dataset, TensorDataset

from customops.backend import BackendError, get_backend, registration
from customops.testing import run_isolated

pytestmark = pytest.mark.process


EXAMPLES = Path(__file__).parents[2] / "examples"


def register(**options) -> None:
    torch.set_num_threads(1)
    runpy.run_path(str(EXAMPLES / "numpy_device.py"))["make_device"](**options)


on_device = isolated(register, imports=["helpers.inductor"])


Loss = Callable[[nn.Module, Tensor], Tensor]


def train(model: nn.Module, batches: list[Tensor], loss_of: Loss, device: str, *, steps: int = 6) -> list[float]:
    """The losses of a model that goes to the device when its optimizer is there already."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss_of(model, batches[0]).backward()  # where it was made
    before = list(model.parameters())
    assert model.to(device) is model
    assert [id(p) for p in model.parameters()] == [id(p) for p in before]
    assert {p.grad.device.type for p in before} == {p.device.type for p in before} == {torch.device(device).type}
    losses = []
    for step in range(steps):
        loss = loss_of(model, batches[step % len(batches)].to(device, non_blocking=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().to("cpu", non_blocking=True))
        torch.accelerator.synchronize()
    return [loss.item() for loss in losses]


def trained_alike(model: nn.Module, batches: list[Tensor], loss_of: Loss) -> nn.Module:
    """Train it on the CPU and on the device, compare losses and all of its state, and return the one on the device."""
    here, there = copy.deepcopy(model), copy.deepcopy(model)
    expected, got = train(here, batches, loss_of, "cpu"), train(there, batches, loss_of, "npy")
    assert got == pytest.approx(expected, rel=1e-3)
    assert expected[-1] < expected[0]
    assert len({*got}) > 1
    for (name, a), (_, b) in zip(here.state_dict().items(), there.state_dict().items(), strict=True):
        assert b.is_npy, name
        assert_close(b.cpu(), a, rtol=1e-2, atol=1e-3, msg=lambda text, name=name: f"{name}: {text}")
    return there


# Modules that move ------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """The weights of the first layer are those of the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 8)
        self.head = nn.Linear(8, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens).tanh())


def next_token(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


@on_device
def test_tied_weights_stay_tied() -> None:
    model = trained_alike(Tied(), [torch.arange(24).view(3, 8) % 7], next_token)
    assert model.head.weight is model.embedding.weight
    assert len(list(model.parameters())) == 1
    weight = model.head.weight
    for device in ("cpu", "npy", torch.float64, "cpu", torch.float32):
        model.to(device)
        assert model.head.weight is model.embedding.weight is weight
    x = torch.tensor([[1, 2]])
    before = model(x)
    assert_close(model.to("npy")(x.npy()).cpu(), before)


@on_device
def test_ways_to_move_a_module() -> None:
    w = nn.Parameter(torch.ones(2))
    data, version = w.data, w._version
    w.data = torch.full((2,), 3.0, device="npy")
    assert w.is_npy
    assert data.tolist() == [1, 1]
    assert w._version == version
    (w * w).sum().backward()
    assert w.grad.tolist() == [6, 6]
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        w.data = torch.eye(2).to_sparse()

    for future in (torch.__future__.set_overwrite_module_params_on_conversion, swap_parameters):
        future(True)
        model = nn.Linear(2, 2).to("npy")
        future(False)
        assert model.weight.is_npy
        model(torch.ones(1, 2, device="npy")).sum().backward()
        assert model.weight.grad.tolist() == [[1, 1], [1, 1]]


swap_parameters = torch.__future__.set_swap_module_params_on_conversion


@on_device
def test_copies_that_need_not_wait() -> None:
    x = torch.randn(3, 4)
    d = x.npy()
    for non_blocking in (True, False):
        for dtype in (None, torch.float64, torch.int64, torch.bfloat16):
            options = {"non_blocking": non_blocking, "dtype": dtype}
            for there, here in ((d, x), (d.t(), x.t()), (d[:, ::2], x[:, ::2]), (d.expand(2, 3, 4), x.expand(2, 3, 4))):
                expected = here.to(dtype=dtype, copy=True)
                for got in (there.to("cpu", **options), here.to("npy", **options), there.to(copy=True, **options)):
                    assert torch.equal(got.cpu(), expected)
                    assert got.stride() == expected.stride()
        channels = torch.randn(2, 3, 4, 4).npy().to("cpu", memory_format=torch.channels_last, non_blocking=non_blocking)
        assert channels.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(torch.empty(3, 4).copy_(d, non_blocking=non_blocking), x)
        assert torch.equal(torch.empty(3, 4).npy().copy_(x, non_blocking=non_blocking).cpu(), x)
    w = d.clone().requires_grad_()
    w.to("cpu", torch.float64, non_blocking=True).sum().backward()
    assert torch.equal(w.grad.cpu(), torch.ones(3, 4))
    compiled = torch.compile(lambda t: t.to("cpu", non_blocking=True) + 1, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(d), x + 1)
    z = torch.randn(3, dtype=torch.complex64)
    assert torch.equal(z.npy().conj().to("cpu", non_blocking=True), z.conj())
    assert torch.equal(z.conj().to("npy", non_blocking=True).cpu(), z.conj())


@on_device
def test_copies_by_kernels_of_ones_own() -> None:
    """They are what copies are made of, where there are any."""
    backend, copies = get_backend(), []

    @backend.kernel("aten::_copy_from")
    def copy_from(source, target, non_blocking=False):
        copies.append((source.device.type, target.device.type))
        return NotImplemented

    d = torch.ones(2).to("npy")
    assert d.to("cpu", non_blocking=True).tolist() == [1, 1]
    assert d.double().dtype == torch.float64
    assert copies == [("cpu", "npy"), ("npy", "cpu"), ("npy", "npy")]
    copy_from.remove()
    assert d.cpu().tolist() == [1, 1]
    assert len(copies) == 3


# Models -----------------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self, cell: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.layers = cell(6, 8, num_layers=2, batch_first=True)
        self.head = nn.Linear(8, 7)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(tokens))[0])


@on_device
def test_recurrent_networks() -> None:
    for cell in (nn.RNN, nn.GRU, nn.LSTM):
        model = trained_alike(Recurrent(cell), [torch.arange(24).view(3, 8) % 7], next_token)
        x = torch.arange(6).view(2, 3)
        expected = copy.deepcopy(model).cpu()(x)
        assert_close(model(x.npy()).cpu(), expected)


def stripes(model: nn.Module, images: Tensor) -> Tensor:
    """Are stripes in an image upright? Every second image has such."""
    return F.cross_entropy(model(images), torch.arange(len(images), device=images.device) % 2)


@on_device
def test_a_convolutional_network() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 3, padding=1, groups=2, bias=False),
        nn.GELU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 2),
    )
    lines = (torch.arange(8) % 2).float().expand(8, 8)
    images = torch.stack([lines if i % 2 else lines.t() for i in range(6)])[:, None] + 0.1 * torch.randn(6, 1, 8, 8)
    there = trained_alike(model, [images], stripes)
    assert there[1].num_batches_tracked.item() == 7
    there.eval()
    here = copy.deepcopy(there).cpu()
    assert_close(there(images.npy()).cpu(), here(images), rtol=1e-4, atol=1e-4)


class Block(nn.Module):
    """A layer of a decoder, which may be given the keys and values of what came before."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, cache: Tensor | None, start: int) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.first(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if cache is not None:
            cache[0, :, :, start : start + length] = k
            cache[1, :, :, start : start + length] = v
            k, v = cache[:, :, :, : start + length]
        mask = torch.ones(length, k.shape[2], dtype=torch.bool, device=x.device).tril(start)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.second(x))


class Decoder(nn.Module):
    """A small language model, its embedding tied to its head."""

    def __init__(self, tokens: int = 7, width: int = 16, heads: int = 2, layers: int = 2) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(tokens, width), nn.Embedding(32, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, tokens, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, caches: list[Tensor] | None = None, start: int = 0) -> Tensor:
        places = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens) + self.positions(places)
        for number, block in enumerate(self.blocks):
            x = block(x, caches[number] if caches is not None else None, start)
        return self.head(x)

    @torch.no_grad()
    def generate(self, prompt: Tensor, length: int, *, cached: bool) -> Tensor:
        """The most likely tokens after a prompt, one by one."""
        heads = self.blocks[0].heads
        size = (2, len(prompt), heads, prompt.shape[1] + length, self.embedding.embedding_dim // heads)
        caches = [torch.zeros(size, device=prompt.device) for _ in self.blocks] if cached else None
        tokens = prompt
        for _ in range(length):
            start = tokens.shape[1] - 1 if cached and tokens is not prompt else 0
            logits = self(tokens[:, start:], caches, start)
            tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
        return tokens


@on_device
def test_a_transformer_that_generates() -> None:
    there = trained_alike(Decoder(), [torch.arange(40).view(4, 10) % 7], next_token)
    assert there.head.weight is there.embedding.weight
    here = copy.deepcopy(there).cpu()
    prompt = torch.tensor([[1, 2, 3], [4, 5, 6]])
    expected = here.generate(prompt, 8, cached=False)
    for cached in (False, True):
        tokens = there.generate(prompt.npy(), 8, cached=cached)
        assert tokens.is_npy
        assert tokens.tolist() == expected.tolist()
        with torch.inference_mode():
            assert there.generate(prompt.npy(), 8, cached=cached).tolist() == expected.tolist()
    compiled = torch.compile(there, backend="aot_eager", fullgraph=True)
    for length in (3, 5):
        tokens = torch.arange(length)[None]
        assert_close(compiled(tokens.npy()).cpu(), here(tokens), rtol=1e-4, atol=1e-4)


# Other processes --------------------------------------------------------------------------------------------------


class Squares(Dataset):
    """Items that are made on the device, where they are asked for."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> tuple[Tensor, dict[str, Tensor], int]:
        x = torch.full((2, 3), float(i), device="npy")
        return x * x, {"twice": (2 * x)[0]}, i


def check_squares(batches: list) -> None:
    assert len(batches) == 3
    for number, (squares, others, numbers) in enumerate(batches):
        i = torch.tensor([2.0 * number, 2.0 * number + 1])
        assert squares.is_npy
        assert_close(squares.cpu(), (i * i)[:, None, None].expand(2, 2, 3))
        assert_close(others["twice"].cpu(), (2 * i)[:, None].expand(2, 3))
        assert numbers.tolist() == i.tolist()


@on_device
def test_workers_of_data_loaders() -> None:
    for strategy in ("file_descriptor", "file_system"):
        torch.multiprocessing.set_sharing_strategy(strategy)
        check_squares(list(DataLoader(Squares(), batch_size=2, num_workers=2, timeout=60)))
    data = TensorDataset(torch.arange(12.0).view(6, 2).npy(), torch.arange(6).npy())
    for options in ({"batch_size": 3}, {"batch_size": None}, {"batch_size": 2, "persistent_workers": True}):
        here, there = (
            DataLoader(data, **{**options, "persistent_workers": False}),
            DataLoader(data, num_workers=1, timeout=60, multiprocessing_context="fork", **options),
        )
        for (x, y), (a, b) in zip(here, there, strict=True):
            assert a.is_npy
            assert torch.equal(x, a)
            assert torch.equal(y, b)
    on_cpu = TensorDataset(torch.arange(4.0))
    for (batch,) in DataLoader(on_cpu, batch_size=2, num_workers=1, pin_memory=True, timeout=60):
        assert batch.is_pinned()
        assert batch.to("npy", non_blocking=True).is_npy


def answer(questions: torch.multiprocessing.Queue, answers: torch.multiprocessing.Queue) -> None:
    """A process that gets tensors and sends others back."""
    x, whole, row, parameter, empty = questions.get(timeout=60)
    row += 10  # of `whole`, in this process too
    answers.put((x * 2, whole, parameter.detach() + 1, type(parameter), empty))
    questions.get(timeout=60)  # until the answers have arrived


@contextlib.contextmanager
def answering(context) -> Iterator[tuple[torch.multiprocessing.Queue, torch.multiprocessing.Queue]]:
    questions, answers = context.Queue(), context.Queue()
    process = context.Process(target=answer, args=(questions, answers))
    process.start()
    yield questions, answers
    questions.put(None)
    process.join(60)
    assert process.exitcode == 0


def ask(context) -> None:
    x, whole = torch.tensor([1j, 2.0, 3 - 1j], device="npy"), torch.zeros(2, 2, device="npy")
    with answering(context) as (questions, answers):
        questions.put((x, whole, whole[1], nn.Parameter(torch.ones(2).npy()), torch.empty(0, 3, device="npy")))
        twice, whole_there, parameter, cls, empty = answers.get(timeout=60)
    assert twice.is_npy
    assert torch.equal(twice.cpu(), 2 * x.cpu())
    assert whole_there.tolist() == [[0, 0], [10, 10]]  # views arrive as views
    assert whole.tolist() == [[0, 0], [0, 0]]  # and the memory as a copy
    assert (parameter.tolist(), cls, parameter.is_npy) == ([2, 2], nn.Parameter, True)
    assert (empty.is_npy, empty.shape) == (True, (0, 3))


@on_device
def test_queues() -> None:
    ask(torch.multiprocessing.get_context("fork"))
    get_backend()
    x = torch.arange(3.0, device="npy")
    del x
    assert get_backend().memory_allocated() == 0  # nothing that was sent is kept


SPAWNED = """
import sys
import torch
sys.path[:0] = {paths!r}
import test_models as models  # a spawned process runs this, too
models.register()

def main():
    context = torch.multiprocessing.get_context("spawn")
    models.ask(context)
    options = dict(num_workers=1, timeout=60, multiprocessing_context=context)
    models.check_squares(list(models.DataLoader(models.Squares(), batch_size=2, **options)))
    return "done"

if __name__ == "__main__":
    result = main()
    print(result)
"""


def test_spawned_processes(tmp_path: Path) -> None:
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    (tmp_path / "program.py").write_text(SPAWNED.format(paths=paths), encoding="utf-8")
    assert run_isolated(tmp_path / "program.py").value == "done"


def test_a_process_without_the_device() -> None:
    with pytest.raises(BackendError, match="sent to a process that has not made this device") as info:
        registration.rebuild("npy", 0, torch.ones(2).untyped_storage())
    assert "register_backend('npy')" in info.value.fix
    assert "__main__" in info.value.fix
