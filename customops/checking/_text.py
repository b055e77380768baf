"""A report as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from customops._describe.screen import plural
from customops._describe.values import described
from customops.checking._data import Fault, Findings, Result


def arguments(failure: Fault) -> list[str]:
    """The input of a failure, a line for each argument."""
    from_position = [f"{described(value)}" for value in failure.args]
    return [*from_position, *(f"{name}={described(value)}" for name, value in failure.kwargs.items())]


def failure(failure: Fault) -> str:
    """What is wrong, the input that shows it, the fix."""
    error = failure.error
    shown = f"{failure.input} ({plural(failure.inputs, 'input')} of this kind)" if failure.inputs > 1 else failure.input
    fields: dict[str, str | None] = {
        "input": shown,
        "call": f"op({', '.join(arguments(failure))})",
        "argument": error.argument,
        "expected": error.expected,
        "got": error.got,
        "at": error.where or failure.source,
        "fix": error.fix,
    }
    lines = [f"{failure.check}: {error.problem}"]
    for name, value in fields.items():
        if value:
            lines.append(textwrap.indent(f"{name + ':':<10}{value}", "  "))
    return "\n".join(lines)


def report(report: Findings) -> str:
    return "\n".join(_lines(report))


def _lines(report: Findings) -> Iterator[str]:
    yield headline(report)
    for i, found in enumerate(report.failures, 1):
        yield ""
        yield f"{i}. {failure(found)}"
    if report.failures:
        yield ""
        yield "report.failures[0].script() is a program that shows the first one by itself."
    yield ""
    width = max((len(name) for name in report.by_check()), default=0)
    for name, results in report.by_check().items():
        yield f"  {name:<{width}}  {in_words(results)}"
    for reason in report.left_out:
        yield f"left out: {reason}"


def headline(report: Findings) -> str:
    """One line that says how it went."""
    if report.failures:
        verdict = plural(len(report.failures), "fault")
    else:
        verdict = "no fault found" if report.passed else "nothing was tried"
    inputs = len({result.input for result in report.results if result.check != "inputs"})
    rejected = report.count("rejected")
    tried = f"{plural(inputs, 'input')}" + (f", {rejected} more rejected by the operator" if rejected else "")
    return f"{report.op}: {verdict} ({tried}; {report.effort} effort, {report.seconds:.1f} s)"


def in_words(results: list[Result]) -> str:
    """``passed on 12 inputs, not exercised on 2: the op has no vmap rule  0.01 s``."""
    parts: list[str] = []
    for status in ("failed", "passed", "rejected", "not exercised"):
        count = sum(result.status == status for result in results)
        if count == len(results) and status == "not exercised":
            parts.append(status)
        elif count:
            inputs = plural(count, "input")
            parts.append(f"{status} on {inputs}" if status != "rejected" else f"{inputs} rejected")
    text = ", ".join(parts)
    reasons = dict.fromkeys(r.reason for r in results if r.status in ("not exercised", "rejected") and r.reason)
    if reasons:
        text += ": " + "; ".join(str(reason) for reason in list(reasons)[:2])
    return f"{text} ({sum(result.seconds for result in results):.2f} s)"
