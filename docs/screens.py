"""Writes screens.md: what `describe`, `explain`, recordings and the command line show, at 60 and 120 columns.

python docs/screens.py           write it anew
python docs/screens.py --check   exit with status 1 if the page is not what the script would write
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import customops
from customops._cli.main import main as command

PAGE = Path(__file__).parent / "screens.md"

OPS = '''\
import torch
from torch import Tensor
from customops import custom_op


@custom_op("screens::rotate", mutates_args=())
def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate pairs of features, as rotary embeddings do."""
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


@rotate.register_kernel("cuda")
def rotate_cuda(x, cos, sin, interleaved):
    raise NotImplementedError("launch here")


@rotate.register_fake
def _(x, cos, sin, interleaved):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@rotate.register_autograd
def rotate_backward(ctx, grad):
    raise NotImplementedError


@rotate.register_samples
def rotate_samples():
    yield torch.ones(2, 4), torch.ones(2, 2), torch.zeros(2, 2)


@custom_op("screens::transpose", mutates_args=())
def transpose(x: Tensor) -> Tensor:
    return x.t().clone()


@transpose.register_fake
def transpose_fake(x):
    return x.new_empty(x.shape[1], x.shape[0])


@transpose.register_samples
def transpose_samples():
    yield (torch.arange(6.0).reshape(2, 3),)
'''

HEAD = """\
# Screens

What ops, calls and the command line show, at 60 and at 120 columns. `python docs/screens.py` writes this page; a test
compares the two. Times are masked. The ops are these:
"""

#: What differs from run to run.
_TIME, _MASKED = re.compile(r"\d+(\.\d+)?(e-\d+)? (us|ms|s)\b"), "0 us"


def said(*arguments: str) -> str:
    """What a command prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        command(list(arguments))
    return out.getvalue()


def screens(ops: object) -> dict[str, tuple[str, Callable[[], object]]]:
    """Title -> what a user types, and what makes the text."""
    x, half = torch.ones(2, 4, requires_grad=True), torch.ones(2, 2)
    rotate = ops.rotate  # type: ignore[attr-defined]
    return {
        "An op": ("print(rotate.describe())", rotate.describe),
        "A call": ("print(rotate.explain(x, cos, sin))", lambda: rotate.explain(x, half, half)),
        "A call below a mode": ("with torch.autocast(...): print(rotate.explain(...))", lambda: below_modes(rotate)),
        "Recorded calls": ("print(calls[0].line('kernels'))", lambda: recorded(rotate)),
        "The ops of a file": ("customops list ops.py", lambda: said("list", "ops.py")),
        "A check": (
            "customops check ops.py --only faketensor,schema",
            lambda: said("check", "ops.py", "--only", "faketensor,schema", "--effort", "quick", "--no-isolate"),
        ),
    }


def below_modes(rotate: customops.CustomOpDef[..., torch.Tensor]) -> object:
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        return rotate.explain(torch.ones(2, 4), torch.ones(2, 2), torch.ones(2, 2), interleaved=True)


def recorded(rotate: customops.CustomOpDef[..., torch.Tensor]) -> str:
    with customops.recording.record() as calls:
        rotate(torch.ones(2, 4), torch.ones(2, 2), torch.ones(2, 2))
    return calls[0].line("kernels").rpartition("  at ")[0]  # without the line in this script


def page(ops: object) -> Iterator[str]:
    yield f"{HEAD}\n```text\n{OPS}```\n"
    for title, (typed, make) in screens(ops).items():
        yield f"\n## {title}\n\n`{typed}`\n"
        for width in ("60", "120"):
            os.environ["COLUMNS"] = width
            text = _TIME.sub(_MASKED, str(make()).rstrip())
            yield f"\n{width} columns:\n\n```text\n{text}\n```\n"


def made() -> str:
    """Return the text of the page, made in a temporary directory, so that places are those of a file there."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        sys.path.insert(0, directory)
        try:
            Path("ops.py").write_text(OPS)
            return "".join(page(importlib.import_module("ops")))
        finally:
            os.chdir(before)
            sys.path.remove(directory)


def main() -> int:
    text = made()
    if sys.argv[1:] == ["--check"]:
        is_same = PAGE.exists() and PAGE.read_text() == text
        print("screens.md is up to date" if is_same else "screens.md is stale: python docs/screens.py")
        return int(not is_same)
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
