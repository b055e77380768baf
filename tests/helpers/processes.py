"""Programs that run one after another, each in a process of its own, with the compile caches of the ones before."""

from __future__ import annotations

import functools
import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from customops.testing import run_each_isolated
from helpers import warm


class Program(NamedTuple):
    """Python code, its arguments, and what the environment has besides."""

    code: str
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = {}


def outputs(programs: Sequence[Program], caches: Path) -> list[str]:
    """What each of the programs printed. They are forks of one interpreter that has inductor."""
    tasks = [functools.partial(run, program) for program in programs]
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(caches), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    with warm.with_modules("torch._inductor.compile_fx"):
        found = run_each_isolated(tasks, setup=set_up_inductor, env=environment)
    for each in found:
        each.get()
    return [each.stdout for each in found]


def set_up_inductor() -> None:
    import torch._inductor.compile_fx  # noqa: PLC0415

    torch._inductor.config.compile_threads = 1
    torch._inductor.config.cpp.simdlen = 1  # else each compiles a program to see which vector instructions there are


def run(program: Program) -> None:
    os.environ.update(program.environment)
    sys.argv = ["program", *program.arguments]
    main = vars(sys.modules["__main__"])  # where annotations of its classes are looked up
    exec(compile(textwrap.dedent(program.code), "<program>", "exec"), main)
