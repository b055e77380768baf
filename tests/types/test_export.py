"""Exported programs of each type: saved here, read in a fresh process, with the same results. A column of the table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.typed_ops import OPS, ROWS
from helpers.typed_ops.row import inputs
from helpers.typed_ops.same import leaves, outcome, same
from torch import Tensor

from customops.testing import run_isolated

pytestmark = [pytest.mark.compile, pytest.mark.process]


class Program(torch.nn.Module):
    """Both calls of a row; what they return is laid out flat, for export knows few types of results."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.op, self.cases = OPS[name], ROWS[name].cases

    def forward(self, *tensors: Tensor) -> tuple[Any, ...]:
        found: list[Any] = []
        for case in self.cases:
            args, kwargs = case.arguments(*tensors)
            found += leaves(self.op(*args, **kwargs))
        return tuple(found)


def expected(name: str) -> Any:
    """The same of a row in plain torch."""
    return lambda *tensors: tuple(x for case in ROWS[name].cases for x in leaves(case.expected(*tensors)))


def export(name: str, folder: Path) -> None:
    program = torch.export.export(Program(name), tuple(inputs(ROWS[name])))
    torch.export.save(program, folder / f"{name}.pt2")


def reload(folder: Path) -> None:
    """Fails unless the programs in a folder do what the rows say."""
    failures = []
    for file in sorted(folder.glob("*.pt2")):
        try:
            program = torch.export.load(file).module()
            same(outcome(program, inputs(ROWS[file.stem])), outcome(expected(file.stem), inputs(ROWS[file.stem])))
        except Exception as error:
            failures.append(f"{file.stem}: {type(error).__name__}: {error}")
    assert not failures, "\n".join(failures)


def test_exported_programs_are_read_in_a_fresh_process(tmp_path: Path) -> None:
    failures = []
    for name, row in ROWS.items():
        if "export" in row.refused:
            continue
        try:
            export(name, tmp_path)
        except Exception as error:
            failures.append(f"{name}: {type(error).__name__}: {error}")
    run_isolated(reload, tmp_path, timeout=300)
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if "export" in row.refused])
def test_refused(name: str, tmp_path: Path) -> None:
    refusal = ROWS[name].refused["export"]
    with pytest.raises(refusal.error, match=refusal.match):
        export(name, tmp_path)
