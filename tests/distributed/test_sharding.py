"""Ops with sharding rules in processes of a mesh (gloo), which are forks of one that is spawned once."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.process,
    pytest.mark.compile,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed"),
]

SECTIONS = {
    2: (
        "every_pair_of_placements",
        "communicates_only_what_is_needed",
        "other_arguments",
        "forms_of_arguments_and_results",
        "writes",
        "compiled",
        "tensor_parallel_and_fsdp",
    ),
    4: ("two_dimensions", "both_at_once"),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], dict[str, str]]:
    program: Any = importlib.import_module("helpers.sharding")
    folder = tmp_path_factory.mktemp("sharding")
    before = {name: os.environ.get(name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS")}
    os.environ |= {"TORCHINDUCTOR_CACHE_DIR": str(folder / "caches"), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    try:
        process = multiprocessing.get_context("spawn").Process(target=program.run, args=(str(folder),))
        process.start()
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    process.join(240)
    if process.is_alive():
        process.kill()
        process.join()
    assert {world: (*sections,) for world, sections in program.SECTIONS.items()} == SECTIONS
    return {(world, rank): read(folder / f"{world}_{rank}.json") for world in SECTIONS for rank in range(world)}


def read(file: Path) -> dict[str, str]:
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}  # type: ignore[no-any-return]


@pytest.mark.parametrize(("world", "section"), [(world, name) for world, names in SECTIONS.items() for name in names])
def test_section(results: dict[tuple[int, int], dict[str, str]], world: int, section: str) -> None:
    for (of, rank), found in results.items():
        if of == world:
            error = found.get(section, "the process did not come to it")
            assert not error, f"process {rank} of {world}:\n{error}"
