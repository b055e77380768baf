"""Writes tutorial.ipynb: the pages of this folder as one notebook, executed. `make notebook`."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
NOTEBOOK = HERE / "tutorial.ipynb"
PAGES = sorted(HERE.glob("[0-9]_*.md"))
BLOCK = re.compile(r"^```(python|output)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
#: In a notebook all pages share a process, in which the checks of the first page import Triton.
SETUP = """\
# Before anything imports Triton: without a GPU, its interpreter runs the kernels of part 2.
import os
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
"""


def cells() -> list[tuple[str, str, str | None]]:
    """The kind and the source of each cell, and the output block after it: that is in no cell."""
    found: list[tuple[str, str, str | None]] = [("code", SETUP, None)]
    for page in PAGES:
        end = 0
        text = page.read_text(encoding="utf-8")
        for block in BLOCK.finditer(text):
            if between := text[end : block.start()].strip():
                found.append(("markdown", between, None))
            end = block.end()
            if block[1] == "python":
                found.append(("code", block[2], None))
            else:
                found[-1] = (*found[-1][:2], block[2])
        found.append(("markdown", text[end:].strip(), None))
    return found


def run(sources: list[str]) -> list[str]:
    """What each prints, in one namespace. Each is a file: Triton and the checks read the source of functions."""
    module = types.ModuleType("tutorial")
    sys.modules[module.__name__] = module
    printed = []
    for number, source in enumerate(sources):
        Path(f"cell_{number}.py").write_text(source, encoding="utf-8")
        with contextlib.redirect_stdout(io.StringIO()) as stdout:
            exec(compile(source, f"cell_{number}.py", "exec"), vars(module))
        printed.append(stdout.getvalue())
    return printed


def lines(text: str) -> list[str]:
    return text.rstrip("\n").splitlines(keepends=True)


def notebook() -> dict[str, Any]:
    pages = cells()
    os.chdir(tempfile.mkdtemp())
    printed = iter(run([source for kind, source, _ in pages if kind == "code"]))
    written: list[dict[str, Any]] = []
    count = 0
    for number, (kind, source, _) in enumerate(pages):
        cell = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": lines(source)}
        if kind == "code":
            count += 1
            text = next(printed)
            stream = {"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}
            cell |= {"execution_count": count, "outputs": [stream] if text else []}
        written.append(cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": written, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


if __name__ == "__main__":
    os.environ["COLUMNS"] = "120"
    NOTEBOOK.write_text(json.dumps(notebook(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
