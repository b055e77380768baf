"""The modules of ``examples/migrate`` as they stand: their programs, their samples, and inductor."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from helpers.migration import ROOT, forget, load

import customops
from customops import __main__

pytestmark = pytest.mark.compile

PATHS = sorted((ROOT / "examples" / "migrate").glob("*.py"))


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, ModuleType]]:
    with customops.default_registry.scope():
        loaded = {path.stem.removeprefix("from_"): load(path) for path in PATHS}
        yield loaded
    for module in loaded.values():
        forget(module)


@pytest.mark.parametrize("name", [path.stem.removeprefix("from_") for path in PATHS])
def test_main_runs(modules: dict[str, ModuleType], name: str, capsys: pytest.CaptureFixture[str]) -> None:
    modules[name].main()
    assert capsys.readouterr().out


def test_check(modules: dict[str, ModuleType]) -> None:
    """An op of each library, or two."""
    ops = [op for op in customops.default_registry if op._qualname.startswith("examples_") and op._samples is not None]
    assert {op._qualname.partition("::")[0] for op in ops} == {f"examples_{name}" for name in modules}
    for op in ops:
        customops.check(op, effort="quick").raise_on_failure()


def test_check_on_the_command_line(
    modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["customops", "check", modules["vllm"].__file__])
    assert __main__.main() == 0
    assert "examples_vllm::unified_attention_with_output" in capsys.readouterr().out


def test_inductor(modules: dict[str, ModuleType]) -> None:
    """An op of each library in one program."""
    moe, vllm_attention = modules["sglang"].moe, modules["vllm"].attention
    flashinfer_softmax, attention = modules["flashinfer"].softmax, modules["flash_attention"].attention_forward
    dequantize, rmsnorm = modules["torchao"].dequantize, modules["quack"].rmsnorm

    def program(x: torch.Tensor, cache: torch.Tensor) -> list[torch.Tensor]:
        normed = rmsnorm(x)
        out = vllm_attention(normed, x, x, "layers.1")
        scale = torch.ops.examples_torchao.choose_scale(out)
        back = dequantize(torch.ops.examples_torchao.quantize_affine(out, scale), scale)
        first, inverse = torch.ops.examples_fbgemm.permute_1d(cache.long(), back[:, 0])
        weights = flashinfer_softmax(cache, back)
        mixed = moe(weights, torch.eye(2))
        return [normed, out, back, first, inverse, weights, mixed, *attention(x, out, back, 0.5, True, None)]

    x, caches = torch.randn(3, 2), [torch.tensor([2.0, 0.0, 1.0]) for _ in range(2)]
    results = torch.compile(program, fullgraph=True)(x, caches[0])
    torch.testing.assert_close(results, program(x, caches[1]), atol=1e-6, rtol=1e-5)
    assert caches[0].tolist() == caches[1].tolist() == [0, 0, 0]
    torch.testing.assert_close(results[1], torch.nn.functional.rms_norm(x, (2,), eps=1e-6) * x * 2)
    assert (results[2] - results[1]).abs().max() <= results[1].abs().max() / 127
