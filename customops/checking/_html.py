"""A report as HTML, for notebooks."""

from __future__ import annotations

from html import escape

from customops.checking import _text
from customops.checking._data import Findings, Result

_COLORS = {"failed": "#c62828", "passed": "#2e7d32", "not exercised": "#9e7700", "rejected": "#757575"}


def report(report: Findings) -> str:
    color = _COLORS["failed" if report.failures else "passed" if report.passed else "not exercised"]
    parts = [f'<div><b style="color:{color}">{escape(_text.headline(report))}</b>']
    parts += [f"<pre>{escape(_text.failure(failure))}</pre>" for failure in report.failures]
    parts.append("<table><tr><th>check</th><th>result</th></tr>")
    parts += [_row(name, results) for name, results in report.by_check().items()]
    parts.append("</table>")
    parts += [f"<p>left out: {escape(reason)}</p>" for reason in report.left_out]
    return "".join(parts) + "</div>"


def _row(name: str, results: list[Result]) -> str:
    statuses = {result.status for result in results}
    status = next(s for s in ("failed", "passed", "not exercised", "rejected") if s in statuses)
    words = escape(_text.in_words(results))
    return f'<tr><td>{escape(name)}</td><td style="color:{_COLORS[status]}">{words}</td></tr>'
