"""A torch newer than those tested, which has lost private names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from customops._cli.doctor import probes
from customops._torch import patches
from customops.errors import UnsupportedError

#: What a program can do without, and still define ops.
PARTS = (
    "no op can be called without the dispatcher",
    "kernels have no names in profiles",
    "op.describe() and op.explain() do not work",
    "results that alias an argument are not found",
    "torch.vmap over ops does not work",
    "ops have no gradients",
    "calls in compiled graphs go through the dispatcher",
)

#: Loses the names of one probe after another, each in a fork, and imports customops there.
PROGRAM = """
import importlib, json, os, sys
import torch

def lose(name):
    found = torch
    *path, last = name.split(".")[1:]
    for part in path:
        found = getattr(found, part, None)
    if hasattr(found, last):
        delattr(found, last)
        return found, last

def run(names):
    lost = list(filter(None, map(lose, names)))
    import customops
    assert not any(hasattr(*each) for each in lost)  # torch is left as it was
    op = customops.custom_op("later::f", lambda x: x * 2, schema="(Tensor x) -> Tensor")
    assert op._qualname == "later::f"
    return "ok"

torch.__version__ = "2.99.0"
found = {}
for key, names in json.loads(sys.argv[1]).items():
    reading, writing = os.pipe()
    if os.fork() == 0:
        try:
            result = run(names)
        except BaseException as error:
            result = repr(error)
        os.write(writing, result.encode())
        os._exit(0)
    os.close(writing)
    found[key] = os.fdopen(reading).read()
    os.wait()
print(json.dumps(found))
"""


@pytest.mark.process
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_what_is_lost_is_lost_alone() -> None:
    # Of public names, and of the module of ops, torch itself makes use when it is imported.
    lost = {
        part: [
            name
            for probe in probes()
            if probe.without == part
            for name in probe.names
            if name.rpartition(".")[2].startswith("_") and not name.startswith("torch._ops")
        ]
        for part in PARTS
    }
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(PROGRAM), json.dumps(lost)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(run.stdout.splitlines()[-1])
    assert found == dict.fromkeys(PARTS, "ok")


def test_a_stand_in_says_what_is_missing() -> None:
    code = """
        import torch
        torch.__version__ = "2.99.0"
        del torch._C._len_torch_dispatch_stack
        import customops
        print(customops._torch.dispatcher.mode_count())
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert "UnsupportedError: torch 2.99.0 has no torch._C._len_torch_dispatch_stack" in run.stderr
    assert "fix:      customops doctor" in run.stderr


def test_a_torch_that_lost_a_place_that_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    patch = patches.Patch("export", "torch.export:gone", lambda module: module.gone, "nothing else is lost")
    monkeypatch.setattr(patches, "pending", {"export": [patch]})
    with pytest.raises(UnsupportedError, match=r"(?s)customops cannot change torch.export.gone.*nothing else is lost"):
        patches.apply("export")
    assert patches.pending == {"export": [patch]}
