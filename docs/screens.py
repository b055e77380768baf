"""Writes screens.md: what `describe`, `explain`, recordings and the command line show, at 60 and 120 columns.

python docs/screens.py            write it anew
python docs/screens.py --check    is it what would be written? Else the exit status is 1
python docs/screens.py --photos   take docs/pictures/notebook_light.png and _dark.png, with chromium
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
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

What ops, calls and the command line show, at 60 and at 120 columns, and in a notebook. `python docs/screens.py` writes
this page; a test compares the two. Times are masked. The ops are these:
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
    with customops.logging.record() as calls:
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
    yield "\n## In a notebook\n"
    rotate = ops.rotate  # type: ignore[attr-defined]
    call = rotate.explain(torch.ones(2, 4), torch.ones(2, 2), torch.ones(2, 2))
    for shown in (report_of(ops), rotate, call, customops.default_registry):
        yield f"\n```{{raw}} html\n{_TIME.sub(_MASKED, html(shown))}\n```\n"
    yield "\nA browser shows the same as follows, in a notebook with a light and with a dark theme:\n"
    yield "\n![A report, an op and a call, light](pictures/notebook_light.png)\n"
    yield "\n![The same, dark](pictures/notebook_dark.png)\n"


def html(shown: object) -> str:
    text: str = shown._repr_html_()  # type: ignore[attr-defined]
    return text.replace(f"{os.getcwd()}/", "")


def report_of(ops: object) -> customops.checking.Report:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transpose = ops.transpose  # type: ignore[attr-defined]
        return customops.check(transpose, only=["test_schema", "test_faketensor"], effort="quick")


#: What the themes of JupyterLab do to tables and text that matters to what is shown.
NOTEBOOK = """<meta charset="utf-8"><style>
body{font:13px/1.4 system-ui,sans-serif;margin:16px;background:%s;color:%s}table{table-layout:fixed;font-size:12px}
td,th{text-align:right;vertical-align:middle}code{font-family:monospace}body>div{margin-bottom:24px}
</style>"""
THEMES = {"light": ("#ffffff", "#212121"), "dark": ("#111111", "#e0e0e0")}


def photographs(ops: object) -> Iterator[str]:
    """A report, an op and a call as a notebook shows them; the text is that of a browser's page."""
    rotate = ops.rotate  # type: ignore[attr-defined]
    call = rotate.explain(torch.ones(2, 4, requires_grad=True), torch.ones(2, 2), torch.ones(2, 2))
    inside = "".join(html(shown) for shown in (report_of(ops), rotate, call))
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("docs/screens.py --photos needs chromium")
    for theme, colors in THEMES.items():
        Path("page.html").write_text(NOTEBOOK % colors + inside, encoding="utf-8")
        file = PAGE.parent / "pictures" / f"notebook_{theme}.png"
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
        options += ["--disable-component-update", "--disable-sync", "--disable-quic", "--hide-scrollbars"]
        options += [f"--user-data-dir={Path('browser').absolute()}", "--window-size=880,730", f"--screenshot={file}"]
        subprocess.run([browser, *options, Path("page.html").absolute().as_uri()], check=True, stderr=subprocess.PIPE)
        yield f"wrote {file.relative_to(PAGE.parent)}\n"


def made(make: Callable[[object], Iterator[str]] = page) -> str:
    """What `make` makes, in a directory of its own: places are those of a file there."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        sys.path.insert(0, directory)
        try:
            Path("ops.py").write_text(OPS)
            return "".join(make(importlib.import_module("ops")))
        finally:
            os.chdir(before)
            sys.path.remove(directory)


def main() -> int:
    if sys.argv[1:] == ["--photos"]:
        print(made(photographs), end="")
        return 0
    text = made()
    if sys.argv[1:] == ["--check"]:
        is_same = PAGE.exists() and PAGE.read_text() == text
        print("screens.md is up to date" if is_same else "screens.md is stale: python docs/screens.py")
        return int(not is_same)
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
