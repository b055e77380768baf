"""Programs that run one after another, each in a process of its own, with the compile caches of the ones before."""

from __future__ import annotations

import functools
import multiprocessing
import os
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
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


def run_spawned(target: Callable[..., object], arguments: tuple[object, ...], caches: Path, seconds: float) -> None:
    """Run a function in a new interpreter, with compile caches of its own; one that takes longer is killed."""
    before = {name: os.environ.get(name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS")}
    os.environ |= {"TORCHINDUCTOR_CACHE_DIR": str(caches), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    try:
        process = multiprocessing.get_context("spawn").Process(target=target, args=arguments)
        process.start()
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    process.join(seconds)
    if process.is_alive():
        process.kill()
        process.join()
