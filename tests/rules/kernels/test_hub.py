"""`examples/hub_kernel.py`: where kernels of the Hugging Face hub lie on disk, and which build is taken."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import customops

EXAMPLE = Path(__file__).parents[3] / "examples" / "hub_kernel.py"
ACTIVATION = "examples-community/activation"


@pytest.fixture
def example() -> Iterator[dict[str, Any]]:
    before = {*sys.modules}
    with customops.default_registry.scope():
        yield runpy.run_path(str(EXAMPLE))
    for name in {*sys.modules} - before:
        if name.startswith("activation_"):
            del sys.modules[name]


def test_the_kernel_of_the_hub_runs_and_can_be_asked_for(example: dict[str, Any]) -> None:
    op, ran = example["silu_and_mul"], []
    activation = example["activation"]
    kernel, activation.silu_and_mul = activation.silu_and_mul, lambda out, x: ran.append("hub") or kernel(out, x)
    x = torch.randn(3, 8)
    expected = torch.nn.functional.silu(x[:, :4]) * x[:, 4:]
    torch.testing.assert_close(op(x), expected)
    with op.prefer("reference"):
        torch.testing.assert_close(op(x), expected)
    torch.testing.assert_close(op(x[:, ::2]), torch.nn.functional.silu(x[:, 0:4:2]) * x[:, 4::2])
    assert ran == ["hub"]


def test_the_most_special_build_is_taken(example: dict[str, Any], tmp_path: Path) -> None:
    for build in (example["builds"]()[0], "torch-universal", "torch12-cu90-x86_64-linux"):
        (tmp_path / build).mkdir()
        example["write_kernel"](tmp_path / build, ACTIVATION, build)
    snapshot = next(tmp_path.glob("torch-universal/models--*/snapshots/*"))
    (next(tmp_path.glob(f"{example['builds']()[0]}/*/*/*/build/*"))).rename(snapshot / "build" / example["builds"]()[0])
    module = example["from_hub"](ACTIVATION, cache=tmp_path / "torch-universal")
    assert Path(module.__file__).parent.name == example["builds"]()[0]
    assert example["from_hub"](ACTIVATION, snapshot.name, cache=tmp_path / "torch-universal") is module


def test_what_is_not_there(example: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="hf download nobody/nothing"):
        example["from_hub"]("nobody/nothing")
    example["write_kernel"](tmp_path, ACTIVATION, "torch12-cu90-x86_64-linux")
    with pytest.raises(ModuleNotFoundError, match="but: torch12-cu90-x86_64-linux"):
        example["from_hub"](ACTIVATION)
