"""A report as JUnit XML, the form in which CI systems take test results."""

from __future__ import annotations

from xml.etree import ElementTree as ET

from customops.checking import _text
from customops.checking._data import Findings, Result


def report(report: Findings) -> str:
    failed = {failure.check for failure in report.failures}
    # Inputs that the operator rejects are no test, unless one shows a fault.
    cases = {name: results for name, results in report.by_check().items() if name != "inputs" or name in failed}
    suite = ET.Element(
        "testsuite",
        name=f"customops.check({report.op})",
        tests=str(len(cases)),
        failures=str(len(failed)),
        skipped=str(sum(_is_skipped(results) for results in cases.values())),
        errors="0",
        time=f"{report.seconds:.3f}",
    )
    for name, results in cases.items():
        _add_case(suite, report, name, results)
    root = ET.Element("testsuites")
    root.append(suite)
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _add_case(suite: ET.Element, report: Findings, name: str, results: list[Result]) -> None:
    seconds = sum(result.seconds for result in results)
    case = ET.SubElement(suite, "testcase", classname=report.op, name=name, time=f"{seconds:.3f}")
    for failure in report.failures:
        if failure.check == name:
            element = ET.SubElement(case, "failure", message=_printable(failure.problem), type="CheckError")
            element.text = _printable(_text.failure(failure))
    if _is_skipped(results):
        ET.SubElement(case, "skipped", message=_printable(_text.in_words(results)))


def _is_skipped(results: list[Result]) -> bool:
    return all(result.status == "not exercised" for result in results)


def _printable(text: str) -> str:
    """Without the control characters that XML cannot hold."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
