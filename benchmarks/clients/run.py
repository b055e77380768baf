"""Other people's packages on `customops`: their own tests, with `torch.library` and with `customops` in its place.

    python benchmarks/clients/run.py                      # all of them
    python benchmarks/clients/run.py bitsandbytes         # some
    python benchmarks/clients/run.py aimnet -- -k hessian  # what follows goes to pytest

Each package is installed beside this environment's torch, in ``build/clients/<name>/site``, and its repository cloned
to ``build/clients/<name>/source``. Its tests run twice, in a process each, the second time with `swap` loaded first.
Printed are the tests that end otherwise and are not explained in `packages`, and a row of docs/parity.md for
each package.
"""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from packages import CLIENTS, Client

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
BUILD = ROOT / "build" / "clients"


class Outcome(NamedTuple):
    """How one test ended: "passed", "failed", "error" or "skipped", and the first line of why."""

    kind: str
    reason: str = ""


class Trial(NamedTuple):
    """What both runs of a package's tests gave."""

    client: Client
    with_torch: dict[str, Outcome]
    with_ours: dict[str, Outcome]

    def differences(self) -> Iterator[tuple[str, Outcome, Outcome]]:
        absent = Outcome("absent")
        for test in sorted(self.with_torch.keys() | self.with_ours.keys()):
            before, after = self.with_torch.get(test, absent), self.with_ours.get(test, absent)
            if before.kind != after.kind:
                yield test, before, after

    def unexplained(self) -> list[tuple[str, Outcome, Outcome]]:
        return [difference for difference in self.differences() if difference[0] not in dict(self.client.explained)]

    def row(self) -> str:
        """A row of the table in docs/parity.md."""
        reasons = [why for test, why in self.client.explained if any(test == each for each, _, _ in self.differences())]
        cells = [self.client.name, self.client.commit, count(self.with_torch), count(self.with_ours)]
        return f"| {' | '.join([*cells, '; '.join(dict.fromkeys(reasons)) or 'none'])} |"


def main(arguments: list[str]) -> int:
    split = arguments.index("--") if "--" in arguments else len(arguments)
    names, options = arguments[:split], arguments[split + 1 :]
    unknown = set(names) - {client.name for client in CLIENTS}
    if unknown:
        raise SystemExit(f"no such client: {', '.join(sorted(unknown))}")
    trials = [try_out(client, options) for client in CLIENTS if not names or client.name in names]
    for trial in trials:
        print(trial.row())
    return int(any(trial.unexplained() for trial in trials))


def try_out(client: Client, options: list[str]) -> Trial:
    """Run a package's tests both ways, and print what ends otherwise for no reason that is known."""
    install(client)
    trial = Trial(client, run(client, False, options), run(client, True, options))
    for test, before, after in trial.unexplained():
        print(f"{client.name}: {test}\n  {before.kind} -> {after.kind}: {after.reason or before.reason}")
    return trial


def install(client: Client) -> None:
    folder = BUILD / client.name
    site, source = folder / "site", folder / "source"
    if not site.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site)]
        subprocess.run([*pip, *client.requirements], check=True)
    if not source.exists():
        subprocess.run(["git", "clone", "--quiet", client.repository, str(source)], check=True)
        subprocess.run(["git", "checkout", "--quiet", client.commit], cwd=source, check=True)
        for name, old, new in client.edits:
            file = source / name
            file.write_text(file.read_text().replace(old, new))


def run(client: Client, swap: bool, options: list[str]) -> dict[str, Outcome]:
    """The outcome of each test."""
    folder = BUILD / client.name
    report = folder / f"{'customops' if swap else 'torch'}.xml"
    report.unlink(missing_ok=True)
    paths = [str(HERE), str(folder / "site"), str(ROOT)]
    if client.in_tree:
        paths.insert(0, str(folder / "source"))
    environment = {**os.environ, **dict(client.environment), "PYTHONPATH": os.pathsep.join(paths)}
    cwd = folder / "source" / client.cwd
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}"]
    command += ["-c", "pyproject.toml" if (cwd / "pyproject.toml").exists() else os.devnull, f"--rootdir={cwd}"]
    command += [*(["-p", "swap"] if swap else []), *client.options, *options, *client.tests]
    with report.with_suffix(".log").open("w") as log:
        subprocess.run(command, cwd=cwd, env=environment, stdout=log, stderr=log, check=False)
    if not report.exists():
        raise SystemExit(f"{client.name}: no report; see {log.name}")
    return dict(outcomes(report))


def outcomes(report: Path) -> Iterator[tuple[str, Outcome]]:
    for case in ElementTree.parse(report).iter("testcase"):
        kind = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        name = f"{case.get('classname')}::{case.get('name')}"
        if kind is None:
            yield name, Outcome("passed")
        else:
            reason = (kind.get("message") or "").strip().partition("\n")[0]
            yield name, Outcome({"failure": "failed"}.get(kind.tag, kind.tag), reason)


def count(found: dict[str, Outcome]) -> str:
    return ", ".join(f"{number} {kind}" for kind, number in sorted(Counter(o.kind for o in found.values()).items()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
