"""What was found of ops: as lines, JSON, JUnit XML and programs."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree as ET

import customops
from customops._cli.checked import Checked
from customops._cli.terminal import colored, wrapped
from customops._describe.screen import plural, shorter_place
from customops.checking import _text

_WORDS = {
    "passed": ("ok", "green"),
    "failed": ("FAILED", "red"),
    "broken": ("FAILED", "red"),
    "not exercised": ("nothing", "yellow"),
    "no samples": ("no samples", "yellow"),
}
_COLUMN = 12


def line_of(checked: Checked, width: int) -> str:
    """``ok          mylib::scale  19 inputs, 2.1 s``; on two lines if it is too long for the screen."""
    word, color = _WORDS[checked.status]
    first, detail = f"{word:<{_COLUMN}}{checked.op}", _detail(checked)
    gap = "  " if len(first) + 2 + len(detail) <= width else "\n" + " " * _COLUMN
    text = f"{first}{gap}{detail}" if detail else first
    return colored(word, color) + text[len(word) :]


def _detail(checked: Checked) -> str:
    report = checked.report
    if report is None:
        return f"attach some with @{checked.name}.register_samples" if checked.status == "no samples" else ""
    inputs = len({result.input for result in report.results if result.check != "inputs"})
    faults = f"{plural(len(report.failures), 'fault')}, " if report.failures else ""
    return f"{faults}{plural(inputs, 'input')}, {checked.seconds:.1f} s"


def details(results: Sequence[Checked], width: int) -> Iterator[str]:
    """A paragraph for each fault."""
    for checked in results:
        head = f"{colored('FAILED', 'red')} {checked.op}  ({shorter_place(checked.source)})"
        if checked.problem:
            yield f"{head}\n{wrapped(checked.problem, width)}\n"
        for failure in checked.report.failures if checked.report is not None else ():
            yield f"{head}\n{wrapped(_relative(_text.failure(failure)), width)}\n"


#: A place in a fault: absolute, with a line.
_PLACE = re.compile(r"(?<![\w/.])(/[^\s:()]+\.py:\d+)")


def _relative(text: str) -> str:
    """Places below the current directory without it."""
    return _PLACE.sub(lambda found: shorter_place(found[1], len(found[1])), text)


def not_exercised(results: Sequence[Checked]) -> dict[str, list[str]]:
    """Reason -> the ops in which a check had nothing to try."""
    reasons: dict[str, list[str]] = {}
    for checked in results:
        for name, found in checked.report.by_check().items() if checked.report is not None else ():
            if {result.status for result in found} == {"not exercised"}:
                reasons.setdefault(f"{name}: {found[0].reason}", []).append(checked.op)
    return reasons


def summary(results: Sequence[Checked], stopped: bool, seconds: float) -> str:
    """``3 ops: 1 ok, 1 with faults, 1 without samples, in 3.2 s``."""
    statuses = [checked.status for checked in results]
    faults = sum(checked.is_fault for checked in results)
    parts = [
        f"{statuses.count('passed')} ok",
        f"{faults} with faults",
        f"{statuses.count('not exercised')} not exercised" if "not exercised" in statuses else "",
        f"{statuses.count('no samples')} without samples" if "no samples" in statuses else "",
    ]
    text = f"{plural(len(results), 'op')}: {', '.join(filter(None, parts))}, in {seconds:.1f} s"
    text += "; stopped at the first fault" if stopped else ""
    return colored(text, "red" if faults else "green" if "passed" in statuses else "yellow")


def as_json(results: Sequence[Checked]) -> str:
    ops = [
        {
            "op": checked.op,
            "source": checked.source,
            "status": checked.status,
            **({"problem": checked.problem} if checked.problem else {}),
            **({"report": checked.report.to_dict()} if checked.report is not None else {}),
        }
        for checked in results
    ]
    return json.dumps({"customops": customops.__version__, "ops": ops}, indent=2) + "\n"


def as_junit(results: Sequence[Checked]) -> str:
    """One test suite for each op."""
    root = ET.Element("testsuites")
    for checked in results:
        if checked.report is not None:
            root.extend(ET.fromstring(checked.report.to_junit_xml().encode()))
        else:
            root.append(_suite_without_report(checked))
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _suite_without_report(checked: Checked) -> ET.Element:
    is_error = bool(checked.problem)
    counts = {"tests": "1", "failures": "0", "errors": str(int(is_error)), "skipped": str(int(not is_error))}
    suite = ET.Element(
        "testsuite", {"name": f"customops.check({checked.op})", "time": f"{checked.seconds:.3f}"} | counts
    )
    case = ET.SubElement(suite, "testcase", classname=checked.op, name="samples", time="0")
    message = checked.problem or "no samples"
    text = "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in message)
    ET.SubElement(case, "error" if is_error else "skipped", message=text.partition("\n")[0]).text = text
    return suite


def write_programs(results: Sequence[Checked], directory: Path) -> list[Path]:
    """A program for each fault, which shows it by itself."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for checked in results:
        for number, failure in enumerate(checked.report.failures if checked.report is not None else (), 1):
            name = re.sub(r"\W+", "_", f"{checked.op}_{number}_{failure.check.removeprefix('test_')}")
            paths.append(failure.save_script(directory / f"{name}.py"))
    return paths


def why_not_written(path: Path) -> str | None:
    """What would be in the way of writing a file."""
    if path.is_dir():
        return "this is a directory"
    if not path.parent.is_dir():
        return f"there is no directory {path.parent}"
    return None if os.access(path if path.exists() else path.parent, os.W_OK) else "it cannot be written"
