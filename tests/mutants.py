"""Break the package on purpose, one mistake at a time, and see which tests fail: `make mutants`.

`mutants.toml` lists the mistakes. Each one replaces a piece of a source file and names the tests that must notice the
replacement. A mutant that no test notices means that the suite has lost protection: restore a test, or write one.

The tests run in a copy of the repository. The copy has an interpreter of its own, which sees the installed packages of
this one but not an editable install of `customops`. Therefore every process that a test starts imports the copy, too.
Bytecode is never written there, and each run has empty compile caches, so no run can use results of another one.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import shutil
import signal
import site
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
DATA = Path(__file__).with_suffix(".toml")


@dataclass(frozen=True)
class Mutant:
    """A mistake in `file`: the code has `new` where it should have `old`. `what` says what the mistake breaks."""

    id: str
    file: str
    what: str
    old: str
    new: str
    tests: tuple[str, ...]

    def problem(self) -> str | None:
        """Return why the mutant cannot be tried, or None."""
        if not (ROOT / self.file).is_file():
            return f"there is no file {self.file}"
        count = (ROOT / self.file).read_text(encoding="utf-8").count(self.old)
        if count != 1:
            return f"`old` occurs {count} times in {self.file}"
        if self.old == self.new or not self.tests:
            return "`new` equals `old`, or `tests` is empty"
        missing = [test for test in self.tests if not (ROOT / test.partition("::")[0]).exists()]
        return f"there is no {', '.join(missing)}" if missing else None


@dataclass
class Run:
    """The result of one run of pytest. `ended` says why the run did not finish; it is empty if the run did."""

    run: int = 0
    failed: list[str] = field(default_factory=list)
    seconds: float = 0.0
    ended: str = ""


class Copy:
    """A copy of the repository, and an interpreter that imports `customops` from the copy only."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "repository"
        listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.run(listing, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0"):
            if name and (ROOT / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
        self.python = folder / "venv" / "bin" / "python"
        (packages,) = (folder / "venv").glob("lib/python*/site-packages")
        # Python does not read the .pth files in the folders that a .pth file adds: they name the editable install.
        (packages / "copy.pth").write_text("\n".join([str(self.root), *site.getsitepackages()]), encoding="utf-8")
        program = "import customops, customops_pytest as plugin; print(customops.__file__, plugin.__file__, sep='\\n')"
        command = [self.python, "-I", "-c", program]  # without PYTHONPATH and the current folder
        imported = subprocess.run(command, cwd="/", check=True, capture_output=True, text=True).stdout.split("\n")[:2]
        assert all(Path(each).is_relative_to(self.root) for each in imported), imported
        folders = ["customops", "customops_pytest", "tests"]
        subprocess.run([self.python, "-m", "compileall", "-q", *folders], cwd=self.root, check=True)

    def write(self, file: str, text: str) -> None:
        """Write a source file, and remove its bytecode: Python compares times in seconds, and sizes."""
        path = self.root / file
        path.write_text(text, encoding="utf-8")
        for bytecode in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            bytecode.unlink()

    def run_mutant(self, mutant: Mutant, tests: Sequence[str], options: argparse.Namespace) -> Run:
        """Run tests while the copy contains the mistake."""
        before = (self.root / mutant.file).read_text(encoding="utf-8")
        self.write(mutant.file, before.replace(mutant.old, mutant.new))
        try:
            return self.run(tests, options.timeout, first_only=options.x)
        finally:
            self.write(mutant.file, before)

    def run(self, tests: Sequence[str], timeout: float | None, *, first_only: bool = False) -> Run:
        """Run tests, in a process whose children end with it after `timeout` seconds."""
        command = [self.python, "-m", "pytest", "-q", "--tb=no", "-rfE", "-p", "no:cacheprovider", *["-x"] * first_only]
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as caches, open(f"{caches}/output", "w+", encoding="utf-8") as output:
            own = {name: f"{caches}/{name}" for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
            inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
            process = subprocess.Popen(
                [*command, *tests],
                cwd=self.root,
                env=inherited | own | {"PYTHONDONTWRITEBYTECODE": "1"},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status, ended = process.wait(timeout), ""
            except subprocess.TimeoutExpired:
                status, ended = -1, f"no end after {timeout:g} s"
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            output.seek(0)
            text = output.read()
        failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", text, re.MULTILINE)
        *_, last = ["", *re.findall(r"^.*\d (?:passed|failed|errors?).* in [\d.]+s.*$", text, re.MULTILINE)]
        counts = {word.rstrip("s"): int(number) for number, word in re.findall(r"(\d+) (passed|failed|errors?)", last)}
        if not ended and (status not in (0, 1) or (status == 1 and not failed)):
            ended = f"status {status}: {last or text[-80:].strip()}"
        return Run(sum(counts.values()), failed, round(time.perf_counter() - start, 1), ended)


def read(names: Sequence[str]) -> list[Mutant]:
    """Return the mutants of these names, or all of them."""
    rows = tomllib.loads(DATA.read_text(encoding="utf-8"))["mutant"]
    mutants = [Mutant(**{**row, "tests": tuple(row["tests"])}) for row in rows]
    known = [mutant.id for mutant in mutants]
    if len({*known}) != len(known):
        sys.exit(f"{DATA.name}: two mutants have the same id")
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"there is no mutant {', '.join(unknown)}; --list shows all of them")
    return [mutant for mutant in mutants if not names or mutant.id in names]


def main() -> int:
    parser = argparse.ArgumentParser(description="Run tests against mutants of the package, listed in mutants.toml.")
    parser.add_argument("names", nargs="*", metavar="MUTANT", help="ids of mutants; default: all of them")
    parser.add_argument("--list", action="store_true", help="print the mutants, and run nothing")
    parser.add_argument("--all-tests", action="store_true", help="run the whole suite for each mutant")
    parser.add_argument("--tests", nargs="+", metavar="PATH", help="run these tests, and not those that a mutant names")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to a file, too")
    parser.add_argument("--jobs", type=int, default=2, help="mutants to run at the same time; default: 2")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for each mutant; default: 300")
    parser.add_argument("-x", action="store_true", help="stop the run of each mutant at the first failing test")
    options = parser.parse_args()

    mutants, is_fine, start = read(options.names), True, time.perf_counter()
    for mutant in mutants if options.list else ():
        print(f"{mutant.id:<34} {mutant.file}: {mutant.what}")
    for mutant in mutants:
        if problem := mutant.problem():
            is_fine = False
            print(f"{mutant.id}: {problem}", file=sys.stderr)
    if options.list or not is_fine:
        return not is_fine

    def tests_of(mutant: Mutant) -> Sequence[str]:
        return ["tests"] if options.all_tests else options.tests or mutant.tests

    with tempfile.TemporaryDirectory(prefix="customops-mutants-") as folder:
        copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for number in range(options.jobs):
            copies.put(Copy(Path(folder, str(number))))

        def try_out(mutant: Mutant) -> Run:
            copy = copies.get()
            try:
                return copy.run_mutant(mutant, tests_of(mutant), options)
            finally:
                copies.put(copy)

        def unmutated() -> Run:
            copy = copies.get()
            try:
                return copy.run(sorted({test for mutant in mutants for test in tests_of(mutant)}), None)
            finally:
                copies.put(copy)

        results: dict[str, Run] = {}
        with ThreadPoolExecutor(options.jobs) as pool:
            baseline, runs = pool.submit(unmutated), [pool.submit(try_out, mutant) for mutant in mutants]
            right = baseline.result()
            print(f"{'unmutated':<34} {len(right.failed):>4} of {right.run:<5} {right.seconds:>6.1f} s  {right.ended}")
            is_fine = not (right.failed or right.ended) and right.run > 0
            print(*(f"    fails without a mutant: {each}" for each in right.failed), sep="\n", end="", flush=True)
            for mutant, run in zip(mutants, runs, strict=True):
                result = results[mutant.id] = run.result()
                result.failed = [each for each in result.failed if each not in right.failed]
                shown = result.ended or ", ".join(result.failed[:3]) or "NO TEST NOTICES"
                is_fine &= bool(result.failed or result.ended)
                counts = f"{len(result.failed):>4} of {result.run:<5} {result.seconds:>6.1f} s"
                print(f"{mutant.id:<34} {counts}  {shown}", flush=True)
    unnoticed = [name for name, result in results.items() if not (result.failed or result.ended)]
    print(f"{len(mutants) - len(unnoticed)} of {len(mutants)} mutants noticed, in {time.perf_counter() - start:.0f} s")
    if options.json is not None:
        options.json.write_text(json.dumps({name: asdict(run) for name, run in results.items()}, indent=1) + "\n")
    return not is_fine


if __name__ == "__main__":
    sys.exit(main())
