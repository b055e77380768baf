"""Ops with sharding rules in processes of a mesh (gloo), which are forks of one that loads what takes long."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.processes import outcomes, run_apart

pytestmark = [
    pytest.mark.process,
    pytest.mark.compile,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed"),
]

SECTIONS = {
    2: (
        "every_pair_of_placements",
        "communicates_only_what_is_needed",
        "several_kernels",
        "other_arguments",
        "forms_of_arguments_and_results",
        "writes",
        "compiled",
        "tensor_parallel_and_fsdp",
    ),
    4: ("two_dimensions", "both_at_once"),
}


@pytest.mark.parametrize("world", SECTIONS)
def test_in_processes(tmp_path: Path, world: int) -> None:
    """All sections in one test: a worker that steals one would start the processes again."""
    program: Any = importlib.import_module("helpers.sharding")
    run_apart(program.run, (str(tmp_path), world), tmp_path / "caches", 240)
    assert (*program.SECTIONS[world],) == SECTIONS[world]
    for rank in range(world):
        for section, error in outcomes(tmp_path / f"{world}_{rank}.json", SECTIONS[world]).items():
            assert not error, f"{section}, process {rank} of {world}:\n{error}"
