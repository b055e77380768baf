"""The same ops in two processes of one process group (gloo), which are spawned once and go through all sections."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from helpers.processes import outcomes, run_spawned

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed"),
]

SECTIONS = [
    "pickled_by_name",
    "fork_after_threads",
    "ddp",
    "fsdp",
    "pipeline",
    "dtensor",
    "writes_below_dtensor",
    "caches",
    "named",
    "tuning",
]


#: What the first process does before it forks the other.
WITHOUT_GROUP = ("pickled_by_name", "fork_after_threads")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    program: Any = importlib.import_module("helpers.distributed")
    folder = tmp_path_factory.mktemp("two_processes")
    run_spawned(program.run, (str(folder), program.gelu), folder / "caches", 150)
    assert list(program.SECTIONS) == SECTIONS
    return [outcomes(folder / f"{rank}.json", SECTIONS) for rank in range(2)]


@pytest.mark.parametrize("section", SECTIONS)
def test_section(results: list[dict[str, str]], section: str) -> None:
    for rank, found in enumerate(results):
        if rank == 1 and section in WITHOUT_GROUP:
            continue
        assert not found[section], f"process {rank}:\n{found[section]}"
