"""How large the package is, and how far one has to walk in it: what `make house` prints, and a test compares.

A walk is what Python enters of the package while one thing is done: its calls, and how often the next call is in
another file than the one before. Code that is generated for an op counts as one file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import customops

PACKAGE = Path(customops.__file__).parent
#: The package, and the plugin of pytest beside it.
FOLDERS = (PACKAGE, PACKAGE.parent / "customops_pytest")


class Walk(NamedTuple):
    calls: int
    hops: int  #: from one file to another
    files: int


def walk(action: Callable[..., Any], *args: Any) -> tuple[Walk, Any]:
    """What an action enters of the package, and what it returns."""
    entered: list[str] = []

    def profile(frame: Any, event: str, _argument: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith((str(PACKAGE), "<customops")):
            entered.append("<customops" if file.startswith("<") else file)

    sys.setprofile(profile)
    try:
        result = action(*args)
    finally:
        sys.setprofile(None)
    return Walk(len(entered), sum(one != other for one, other in pairwise(entered)), len(set(entered))), result


def scale(x: Tensor, by: float = 2.0) -> Tensor:
    return x * by


def total(xs: list[Tensor]) -> Tensor:
    return torch.stack(xs).sum(0)


def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.by = inputs[1]


def backward(ctx: Any, grad: Tensor) -> Any:
    return grad * ctx.by, None


def backward_of_list(ctx: Any, grad: Tensor) -> Any:
    return [grad] * ctx.length


def walks() -> dict[str, Walk]:
    """The ten walks of the first op of a process: later ops of the same shape find generated code that fits."""
    found: dict[str, Walk] = {}
    registry = customops.Registry()

    def step(title: str, action: Callable[..., Any], *args: Any) -> Any:
        found[title], result = walk(action, *args)
        return result

    x, y = torch.ones(2), torch.ones(2, requires_grad=True)
    with torch.autograd.set_multithreading_enabled(False):  # backward in this thread, to be seen
        op = step("define", lambda: registry.custom_op("house::scale", scale, mutates_args=()))
        step("register_fake", op.register_fake, lambda x, by: torch.empty_like(x))
        step("register_autograd", lambda: op.register_autograd(backward, setup_context=setup_context))
        step("first call", op, x)
        step("call", op, x)
        step("first call with gradient", op, y)
        given = step("call with gradient", lambda: op(y, 3.0))
        left_out = op(y)
        given.backward(torch.ones(2), retain_graph=True), left_out.backward(torch.ones(2), retain_graph=True)
        step("backward, default given", given.backward, torch.ones(2))
        step("backward, default left out", left_out.backward, torch.ones(2))
        of_list = registry.custom_op("house::total", total, mutates_args=())
        of_list.register_autograd(
            backward_of_list, setup_context=lambda ctx, inputs, output: setattr(ctx, "length", len(inputs[0]))
        )
        of_list([y, y]).sum().backward()
        step("list, call and backward", lambda: of_list([y, y]).backward(torch.ones(2)))
    return found


def sizes() -> dict[str, tuple[int, int]]:
    """Lines and files of each folder."""
    found = {}
    for folder in FOLDERS:
        files = [path.read_text(encoding="utf-8") for path in folder.rglob("*.py")]
        found[folder.name] = sum(len(text.splitlines()) for text in files), len(files)
    return found


def main() -> None:
    if "--json" in sys.argv:
        print(json.dumps({"sizes": sizes(), "walks": walks()}))
        return
    for folder, (lines, files) in sizes().items():
        print(f"{folder}: {lines} lines in {files} files")
    print(f"{'walk':28}{'calls':>7}{'hops':>7}{'files':>7}")
    for title, found in walks().items():
        print(f"{title:28}{found.calls:7}{found.hops:7}{found.files:7}")


if __name__ == "__main__":
    main()
