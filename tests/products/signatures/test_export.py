"""Exported programs of each type: saved here, read in a fresh process, with the same results. A column of the table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from products.typed_ops import OPS, ROWS
from products.typed_ops.row import inputs
from products.typed_ops.same import leaves, outcome, same
from torch import Tensor

from customops.testing import run_isolated

pytestmark = [pytest.mark.compile, pytest.mark.process]


class Program(torch.nn.Module):
    """Both calls of a row; what they return is laid out flat, and something is: export knows few types of results."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.op, self.cases = OPS[name], ROWS[name].cases

    def forward(self, *tensors: Tensor) -> tuple[Any, ...]:
        found: list[Any] = []
        for case in self.cases:
            args, kwargs = case.arguments(*tensors)
            found += leaves(self.op(*args, **kwargs))
        return *found, tensors[0] + 1


def expected(name: str) -> Any:
    """The same of a row in plain torch."""

    def program(*tensors: Tensor) -> tuple[Any, ...]:
        found = [x for case in ROWS[name].cases for x in leaves(case.expected(*tensors))]
        return *found, tensors[0] + 1

    return program


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
def test_an_exported_program_that_torch_cannot_save_is_right_and_raises_when_saved_or_read(
    name: str, tmp_path: Path
) -> None:
    row, refusal = ROWS[name], ROWS[name].refused["export"]
    program = torch.export.export(Program(name), tuple(inputs(row)))
    same(outcome(program.module(), inputs(row)), outcome(expected(name), inputs(row)))
    with pytest.raises(refusal.error, match=refusal.match):
        save_and_load(program, tmp_path / "program.pt2")


def save_and_load(program: Any, file: Path) -> None:
    torch.export.save(program, file)
    torch.export.load(file)
