"""A file without features of our own runs with ``torch.library`` in the place of customops."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

import customops

EXAMPLES = Path(__file__).parents[3] / "examples"


def without_samples(source: str) -> str:
    """Return a file with ``torch.library`` in the place of customops, and without samples, which torch lacks."""
    tree = ast.parse(source)
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module == "customops":
            node.module = "torch.library"
    decorators = [[ast.unparse(each) for each in getattr(node, "decorator_list", ())] for node in tree.body]
    kept = [node for node, of in zip(tree.body, decorators, strict=True) if not any("samples" in each for each in of)]
    return ast.unparse(ast.Module(kept, []))


def run(source: str) -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "example"}
    exec(compile(source, "<example>", "exec"), namespace)
    return namespace


@pytest.mark.parametrize("name", ["linear_gelu", "lists", "nonzero", "numpy_sin", "train"])
def test_an_example_runs_on_torch_library(name: str) -> None:
    source = (EXAMPLES / f"{name}.py").read_text()
    ours = run(source)
    ops = {key: op for key, op in ours.items() if isinstance(op, customops.CustomOpDef)}
    assert ops
    calls = [(key, sample, op(*sample.args, **sample.kwargs)) for key, op in ops.items() for sample in op.samples()]
    theirs = run(without_samples(source))
    for key, sample, expected in calls:
        assert isinstance(theirs[key], torch.library.CustomOpDef)
        args, kwargs = tree_map(
            lambda x: x.detach() if isinstance(x, torch.Tensor) else x, (sample.args, sample.kwargs)
        )
        torch.testing.assert_close(theirs[key](*args, **kwargs), expected, check_stride=False)
