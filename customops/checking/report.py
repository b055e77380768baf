"""`Report`: what `customops.check` found, and what it did not try."""

from __future__ import annotations

import base64
import collections
import importlib.util
import io
import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree as ET

import torch

from customops import _torch
from customops._describe.render import described, plural
from customops.checks._memory import is_addressable
from customops.errors import CheckError, OpCheckError

# What `customops.check` found, as plain data; `report.Report` shows it ------------------------------------------------

Status = Literal["passed", "failed", "rejected", "not exercised"]


@dataclass(frozen=True)
class Result:
    """One check on one input.

    Attributes:
        check: a key of `customops.checks.CHECKS`, or "inputs" for an input that the operator rejects.
        status: "passed", "failed", "rejected" or "not exercised".
        input: how the input was derived: ``"sample 1"``, ``"sample 1, x: transposed"``.
        seconds: the duration, in seconds.
        reason: why the check had nothing to test, and which inputs would exercise it. For a rejected input, the error
            that the kernel raised.
    """

    check: str
    status: Status
    input: str
    seconds: float = 0.0
    reason: str | None = None


@dataclass(frozen=True)
class Fault:
    """A fault that one check found; for the attributes see `Failure`."""

    op: str
    check: str
    error: CheckError
    input: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    inputs: int = 1
    source: str | None = None

    @property
    def problem(self) -> str:
        """What is wrong, in one sentence."""
        return self.error.problem


@dataclass(frozen=True)
class Findings:
    """What a run found; for the attributes see `Report`."""

    op: str
    effort: str
    results: tuple[Result, ...]
    failures: Sequence[Fault]
    left_out: tuple[str, ...] = ()
    seconds: float = 0.0
    source: str | None = field(default=None, compare=False)

    @property
    def passed(self) -> bool:
        """True if no check failed and at least one passed."""
        return not self.failures and any(result.status == "passed" for result in self.results)

    def count(self, status: Status) -> int:
        """The number of results with this status."""
        return sum(result.status == status for result in self.results)

    def by_check(self) -> dict[str, list[Result]]:
        """The results of each check, in the order in which they ran."""
        found: dict[str, list[Result]] = collections.defaultdict(list)
        for result in self.results:
            found[result.check].append(result)
        return dict(found)


# A report as text -----------------------------------------------------------------------------------------------------


def arguments(failure: Fault) -> list[str]:
    """The input of a failure, a line for each argument."""
    from_position = [f"{described(value)}" for value in failure.args]
    return [*from_position, *(f"{name}={described(value)}" for name, value in failure.kwargs.items())]


def failure_text(failure: Fault) -> str:
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


def as_text(report: Findings) -> str:
    return "\n".join(_lines(report))


def _lines(report: Findings) -> Iterator[str]:
    yield headline(report)
    for i, found in enumerate(report.failures, 1):
        yield ""
        yield f"{i}. {failure_text(found)}"
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


# A report as JUnit XML, the form in which CI systems take test results ------------------------------------------------


def as_junit(report: Findings) -> str:
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
            element.text = _printable(failure_text(failure))
    if _is_skipped(results):
        ET.SubElement(case, "skipped", message=_printable(in_words(results)))


def _is_skipped(results: list[Result]) -> bool:
    return all(result.status == "not exercised" for result in results)


def _printable(text: str) -> str:
    """Without the control characters that XML cannot hold."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


# A report as HTML, for notebooks --------------------------------------------------------------------------------------

_COLORS = {"failed": "#c62828", "passed": "#2e7d32", "not exercised": "#9e7700", "rejected": "#757575"}


def as_html(report: Findings) -> str:
    color = _COLORS["failed" if report.failures else "passed" if report.passed else "not exercised"]
    parts = [f'<div><b style="color:{color}">{escape(headline(report))}</b>']
    parts += [f"<pre>{escape(failure_text(failure))}</pre>" for failure in report.failures]
    parts.append("<table><tr><th>check</th><th>result</th></tr>")
    parts += [_row(name, results) for name, results in report.by_check().items()]
    parts.append("</table>")
    parts += [f"<p>left out: {escape(reason)}</p>" for reason in report.left_out]
    return "".join(parts) + "</div>"


def _row(name: str, results: list[Result]) -> str:
    statuses = {result.status for result in results}
    status = next(s for s in ("failed", "passed", "not exercised", "rejected") if s in statuses)
    words = escape(in_words(results))
    return f'<tr><td>{escape(name)}</td><td style="color:{_COLORS[status]}">{words}</td></tr>'


# Programs that show one fault by themselves ---------------------------------------------------------------------------

#: Tensors with more elements in their storage, and others that a literal cannot give, are held as bytes.
_LITERAL = 256

_SCRIPT = '''\
"""{title}

{message}
"""

{imports}

{load}

op = {op}

{inputs}
{run}
'''

_RUN_CHECK = """\
outcome = run_check({check!r}, op, args, kwargs)
if outcome.error is not None:
    raise outcome.error
print("no fault: {check} " + outcome.status)"""

#: A fault of the inputs shows in the call itself.
_RUN_CALL = """\
print(op(*args, **kwargs))"""


def script_of(failure: Fault) -> str:
    """A program that runs the check of a failure on its input, and raises what it finds."""
    values, spec = _torch.tensors.tree_flatten((failure.args, dict(failure.kwargs)))
    names = _Names()
    shown = _torch.tensors.tree_unflatten([_Code(names.code_of(value)) for value in values], spec)
    args, kwargs = shown
    given = f"args = {_tuple(args)}\nkwargs = {{{', '.join(f'{key!r}: {value!r}' for key, value in kwargs.items())}}}"
    name, _, overload = failure.op.partition(".")
    return _SCRIPT.format(
        title=f"{failure.op}: {failure.check}",
        message=failure_text(failure).replace("\\", "\\\\").replace('"""', "'''"),
        imports="\n".join(names.imports(is_checked=failure.check != "inputs")),
        load=_load(failure),
        op=f"torch.ops.{name.replace('::', '.')}.{overload or 'default'}",
        inputs="\n".join([*names.lines, given]),
        run=_RUN_CALL if failure.check == "inputs" else _RUN_CHECK.format(check=failure.check),
    )


class _Code:
    """Python code whose repr is itself: so the repr of lists and dicts around it is code, too."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _tuple(items: Any) -> str:
    return f"({', '.join(map(repr, items))}{',' if len(items) == 1 else ''})"


class _Names:
    """The variables of the script: one for each tensor, and one for each storage that two of them share."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._tensors: dict[int, str] = {}
        self._storages: dict[int, str] = {}
        self._kept: list[Any] = []  # so that no id is used again

    def code_of(self, value: Any) -> str:
        """An expression for a value; lines that define a variable are added where there has to be one."""
        if isinstance(value, torch.Tensor):
            if id(value) not in self._tensors:
                self._kept.append(value)
                self._tensors[id(value)] = self._define(value)
            return self._tensors[id(value)]
        if isinstance(value, torch.device):
            return f"torch.device({str(value)!r})"
        if isinstance(value, torch.Generator):
            return f"torch.Generator({str(value.device)!r}).manual_seed({value.initial_seed()})"
        return repr(value)

    def imports(self, *, is_checked: bool) -> Iterator[str]:
        text = "\n".join(self.lines)
        yield from (f"import {name}" for name in ("base64", "io") if f"{name}." in text)
        yield "from math import inf, nan  # noqa: F401"
        yield ""
        yield "import torch"
        if is_checked:
            yield "from customops.checks import run_check"

    def _define(self, tensor: torch.Tensor) -> str:
        name = f"tensor_{len(self._tensors)}"
        self.lines.append(f"{name} = {self._expression(tensor)}")
        return name

    def _expression(self, tensor: torch.Tensor) -> str:
        requires_grad = ".requires_grad_()" if tensor.requires_grad else ""
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
        if not plain or tensor.is_quantized or not is_addressable(tensor):
            return self._bytes_of(tensor)
        if tensor.is_neg():
            return self._bytes_of(tensor)
        if tensor.is_conj():
            return f"{self.code_of(tensor.detach().conj())}.conj(){requires_grad}"
        storage = self._storage(tensor)
        if storage is None:
            return self._bytes_of(tensor)
        where = f"{list(tensor.shape)}, {list(tensor.stride())}, {tensor.storage_offset()}"
        return f"{storage}.as_strided({where}){requires_grad}"

    def _storage(self, tensor: torch.Tensor) -> str | None:
        """A variable with all elements of a tensor's storage; None if they are too many."""
        key = _torch.tensors.storage_id(tensor)
        count = tensor.untyped_storage().nbytes() // tensor.element_size()
        if count > _LITERAL:
            return None
        found = self._storages.get(key)
        if found is None:
            self._kept.append(tensor)
            with torch.no_grad():
                elements = tensor.detach().as_strided((count,), (1,), 0)
            wide = (
                elements.to(torch.float32)
                if elements.dtype.itemsize == 1 and elements.is_floating_point()
                else elements
            )
            found = self._storages[key] = f"memory_{len(self._storages)}"
            device = "" if tensor.device.type == "cpu" else f", device={str(tensor.device)!r}"
            self.lines.append(f"{found} = torch.tensor({wide.tolist()!r}, dtype={tensor.dtype}{device})")
        return found

    def _bytes_of(self, tensor: torch.Tensor) -> str:
        file = io.BytesIO()
        torch.save(tensor, file)
        text = base64.b64encode(file.getvalue()).decode()
        return f'torch.load(io.BytesIO(base64.b64decode("{text}")))'


def _load(failure: Fault) -> str:
    """Code that defines the operator: the import of its module, or the execution of its file."""
    custom = _torch.library.torch_op_of(failure.op)
    module = getattr(getattr(custom, "_init_fn", None), "__module__", None)
    if module and module != "__main__" and _can_be_found(module):
        return f"import {module}  # noqa: F401  (it defines the op)"
    file = (failure.source or "").rpartition(":")[0]
    if file and Path(file).is_file():
        return f"import runpy\n\nrunpy.run_path({file!r})  # it defines the op"
    if failure.op.startswith("aten::"):
        return ""
    return textwrap.dedent(
        """\
        # Define the operator here, or import what does:
        # import my_library  /  torch.ops.load_library("my_library.so")"""
    )


def _can_be_found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


# `Report`: what `customops.check` found, and what it did not try ------------------------------------------------------


@dataclass(frozen=True)
class Failure(Fault):
    """One fault that one check found, on one or more inputs.

    Attributes:
        op: qualified name of the operator.
        check: the check that found the fault.
        error: the error; its parts are `error.problem`, `.argument`, `.expected`, `.got`, `.where` and `.fix`.
        input: how the smallest failing input was derived.
        args, kwargs: that input.
        inputs: the number of inputs that show the fault.
        source: ``file:line`` of the operator, if known.
    """

    def script(self) -> str:
        """A Python program that reproduces the fault. The module that defines the operator must be importable."""
        return script_of(self)

    def save_script(self, path: str | Path) -> Path:
        """Write the text of `script` to a file, and return its path."""
        path = Path(path)
        path.write_text(self.script())
        return path

    def __str__(self) -> str:
        return failure_text(self)


@dataclass(frozen=True)
class Report(Findings):
    """What `customops.check` found.

    Attributes:
        op: qualified name of the operator.
        effort: "quick", "normal" or "thorough".
        results: a `Result` for each check and input, in the order in which they ran.
        failures: a `Failure` for each fault.
        left_out: what was not tried, and which option runs it.
        seconds: the duration of the run, in seconds.
        source: ``file:line`` of the operator, if known.

    Example:
        >>> report = customops.check(op, [(torch.randn(3),)])
        >>> report.raise_on_failure()
    """

    failures: tuple[Failure, ...]

    def raise_on_failure(self) -> None:
        """Raise an OpCheckError that lists all faults. Its cause is the error of the first one.

        Raises:
            OpCheckError: there is at least one fault.
        """
        if self.failures:
            problem = f"customops.check found {plural(len(self.failures), 'fault')}"
            told = "\n\n".join(str(failure) for failure in self.failures)
            raise OpCheckError(f"{problem}\n\n{told}", op=self.op) from self.failures[0].error

    def __str__(self) -> str:
        return as_text(self)

    def _repr_html_(self) -> str:
        return as_html(self)

    def to_dict(self) -> dict[str, Any]:
        """The report as lists, dicts, strings and numbers."""
        return {
            "op": self.op,
            "source": self.source,
            "effort": self.effort,
            "passed": self.passed,
            "seconds": round(self.seconds, 4),
            "failures": [_failure_as_dict(failure) for failure in self.failures],
            "results": [
                {
                    "check": result.check,
                    "status": result.status,
                    "input": result.input,
                    "seconds": round(result.seconds, 6),
                    **({"reason": result.reason} if result.reason else {}),
                }
                for result in self.results
            ],
            "left_out": list(self.left_out),
        }

    def to_json(self, indent: int | None = 2) -> str:
        """The result of `to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)

    def to_junit_xml(self) -> str:
        """The report as a JUnit XML test suite: one test case for each check, one failure for each fault."""
        return as_junit(self)


def _failure_as_dict(failure: Failure) -> dict[str, Any]:
    error = failure.error
    fields = {name: getattr(error, name) for name in ("argument", "expected", "got", "where", "fix")}
    return {
        "check": failure.check,
        "problem": failure.problem,
        **{name: value for name, value in fields.items() if value},
        "input": failure.input,
        "arguments": arguments(failure),
        "inputs": failure.inputs,
        "script": failure.script(),
    }
