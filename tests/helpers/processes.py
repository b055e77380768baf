"""Programs that run one after another, each in a process of its own, with the compile caches of the ones before."""

from __future__ import annotations

import faulthandler
import functools
import json
import multiprocessing
import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from customops.testing import run_each_isolated, run_isolated
from helpers import warm


class Program(NamedTuple):
    """Python code, its arguments, and what the environment has besides."""

    code: str
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = {}


def compiling_in(caches: Path) -> dict[str, str]:
    """The environment of a process with compile caches of its own."""
    return {"TORCHINDUCTOR_CACHE_DIR": str(caches), "TORCHINDUCTOR_COMPILE_THREADS": "1"}


def outputs(programs: Sequence[Program], caches: Path) -> list[str]:
    """What each of the programs printed. They are forks of one interpreter that has inductor."""
    tasks = [functools.partial(run, program) for program in programs]
    environment = compiling_in(caches)
    with warm.with_modules("helpers.inductor"):
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


def run_spawned(
    target: Callable[..., object], arguments: tuple[object, ...], caches: Path, seconds: float, *, ranks: int = 0
) -> None:
    """Run a function in a new interpreter, with compile caches of its own; one that takes longer is killed.

    With `ranks`, it runs in as many interpreters, and gets its rank in front of the arguments. A fork would share what
    threads of its parent held at that moment, such as a lock.
    """
    environment = compiling_in(caches)
    before = {name: os.environ.get(name) for name in environment}
    os.environ |= environment
    try:
        start = multiprocessing.get_context("spawn").Process
        several = [(rank, *arguments) for rank in range(ranks)] or [arguments]
        processes = [start(target=target, args=each) for each in several]
        for process in processes:
            process.start()
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    end = time.monotonic() + seconds
    for process in processes:
        process.join(max(0, end - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


def end_in_time(file: Path, seconds: float) -> None:
    """Have this process end after that time, and write beside a file of its results where all its threads were."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=file.with_suffix(".late").open("w", encoding="utf-8"))


def outcomes(file: Path, names: Iterable[str]) -> dict[str, str]:
    """What a process has written of each of these: "" or an error."""
    found: dict[str, str] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    late = file.with_suffix(".late")
    where = late.read_text(encoding="utf-8") if late.exists() else "it did not start"
    missing = f"process {file.stem} did not come to it. {where or 'It has ended.'}"
    return dict.fromkeys(names, missing) | found


def run_apart(target: Callable[..., object], arguments: tuple[object, ...], caches: Path, seconds: float) -> None:
    """`run_spawned` in a fork of an interpreter that has inductor, which is there sooner."""
    with warm.with_modules("helpers.inductor"):
        run_isolated(target, *arguments, timeout=seconds, env=compiling_in(caches))
