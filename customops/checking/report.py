"""`Report`: what `customops.check` found, and what it did not try."""

from __future__ import annotations

import base64
import collections
import contextlib
import importlib.util
import io
import json
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree as ET

import torch

from customops import _torch
from customops._describe.render import described, plural
from customops.checks._memory import is_addressable
from customops.checks._outcome import in_short
from customops.errors import CheckError, CustomOpsError, OpCheckError, field_lines

__tracebackhide__ = True  # pytest leaves the frames out

Status = Literal["passed", "failed", "rejected", "not exercised"]
KERNELS = "kernels"  #: stands for the check, in results of kernels that no input reached


@dataclass(frozen=True)
class Result:
    """One check on one input.

    Attributes:
        check: a key of `customops.checks.CHECKS`; "inputs" for an input that the operator rejects; or "kernels" for a
            kernel that no input reached, in the place of the input.
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
class Failure:
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

    @property
    def _arguments(self) -> list[str]:
        own = _texts_of(self.args, self.kwargs)
        shown = own if self.error.call is None else _texts_of(*self.error.call)
        return own if shown == [text.replace(" requires_grad", "") for text in own] else shown

    def script(self) -> str:
        """A Python program that reproduces the fault. The module that defines the operator must be importable."""
        variables = _Variables()
        values, spec = _torch.trees.tree_flatten((self.args, dict(self.kwargs)))
        args, kwargs = _torch.trees.tree_unflatten([_Code(variables.code_of(value)) for value in values], spec)
        imports = [f"import {name}" for name in ("base64", "io") if f"{name}." in "\n".join(variables.lines)]
        imports += ["from math import inf, nan  # noqa: F401", "", "import torch"]
        is_of_call = self.check == "inputs"  # the fault shows in the call itself
        given = [
            f"args = ({', '.join(map(repr, args))}{',' * (len(args) == 1)})",
            f"kwargs = {{{', '.join(f'{key!r}: {value!r}' for key, value in kwargs.items())}}}",
        ]
        name, _, overload = self.op.partition(".")
        return _SCRIPT.format(
            title=f"{self.op}: {self.check}",
            message=str(self).replace("\\", "\\\\").replace('"""', "'''"),
            imports="\n".join(imports if is_of_call else [*imports, "from customops.checks import run_check"]),
            load=_load(self),
            op=f"torch.ops.{name.replace('::', '.')}.{overload or 'default'}",
            inputs="\n".join([*variables.lines, *given]),
            run="print(op(*args, **kwargs))" if is_of_call else _RUN_CHECK.format(check=self.check),
        )

    def save_script(self, path: str | Path) -> Path:
        """Write the text of `script` to a file, and return its path."""
        path = Path(path)
        path.write_text(self.script())
        return path

    def __str__(self) -> str:
        arguments = self._arguments
        shown = self.input + ", changed by the check" * (arguments != _texts_of(self.args, self.kwargs))
        shown += f" ({plural(self.inputs, 'input')} of this kind)" if self.inputs > 1 else ""
        return fault_text(self.check, self.error, self.source, input=shown, call=f"op({', '.join(arguments)})")


def _texts_of(args: Iterable[Any], kwargs: Mapping[str, Any]) -> list[str]:
    return [*map(described, args), *(f"{name}={described(value)}" for name, value in kwargs.items())]


def fault_text(check: str, error: BaseException, place: str | None, **given: str) -> str:
    """What is wrong, the input that shows it, the fix."""
    problem = error.problem if isinstance(error, CustomOpsError) else in_short(error)
    return f"{check}: {problem}\n" + textwrap.indent("\n".join(field_lines(error, place, **given)), "  ")


@dataclass(frozen=True)
class Report:
    """What `customops.check` found.

    Attributes:
        op: qualified name of the operator.
        effort: "quick", "normal" or "thorough".
        results: a `Result` for each check and input, in the order in which they ran.
        failures: a `Failure` for each fault.
        left_out: what was not tried, and which option runs it.
        seconds: the duration of the run, in seconds.
        source: ``file:line`` of the operator, if known.
        incomplete: of `left_out`, what the effort would have tried, had the operator not taken too long, or ended the
            process too often.

    Example:
        >>> report = customops.check(op, [(torch.randn(3),)])
        >>> report.raise_on_failure()
    """

    op: str
    effort: str
    results: tuple[Result, ...]
    failures: tuple[Failure, ...]
    left_out: tuple[str, ...] = ()
    seconds: float = 0.0
    source: str | None = field(default=None, compare=False)
    incomplete: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """True if all was tried that the effort has."""
        return not self.incomplete

    @property
    def passed(self) -> bool:
        """True if no check failed and at least one passed."""
        return not self.failures and any(result.status == "passed" for result in self.results)

    @property
    def _inputs(self) -> int:
        """How many inputs the operator accepted."""
        return len({result.input for result in self.results if result.check not in ("inputs", KERNELS)})

    @property
    def _rejected(self) -> int:
        """How many inputs it refused."""
        return sum(result.check == "inputs" and result.status == "rejected" for result in self.results)

    def count(self, status: Status) -> int:
        """The number of results with this status."""
        return sum(result.status == status for result in self.results)

    def by_check(self) -> dict[str, list[Result]]:
        """The results of each check, in the order in which they ran."""
        found: dict[str, list[Result]] = collections.defaultdict(list)
        for result in self.results:
            found[result.check].append(result)
        return dict(found)

    def raise_on_failure(self) -> None:
        """Raise an OpCheckError that lists all faults. Its cause is the error of the first one.

        Raises:
            OpCheckError: there is at least one fault.
        """
        if self.failures:
            faults = [f"customops.check found {plural(len(self.failures), 'fault')}", *map(str, self.failures)]
            raise OpCheckError("\n\n".join(faults), op=self.op) from self.failures[0].error

    def _headline(self) -> str:
        if self.failures:
            verdict = plural(len(self.failures), "fault")
        else:
            verdict = "no fault found" if self.passed else "nothing was tried"
        if shortfall := self._shortfall():
            verdict += f", {shortfall}"
        rejected = self._rejected
        tried = plural(self._inputs, "input") + (f", {rejected} more rejected by the operator" if rejected else "")
        return f"{self.op}: {verdict} ({tried}; {self.effort} effort, {self.seconds:.1f} s)"

    def _shortfall(self) -> str:
        """``incomplete: 18 checks left out (60 s), kernel for cuda not exercised``; empty if there is none."""
        late, unreached = (
            texts[0] + (f", and {len(texts) - 1} more" if len(texts) > 1 else "") if texts else ""
            for texts in (
                [text.partition(": ")[0] for text in self.incomplete],
                [result.input for result in self.results if result.check == KERNELS],
            )
        )
        return ", ".join([f"incomplete: {late}"] * bool(late) + [f"{unreached} not exercised"] * bool(unreached))

    def __str__(self) -> str:
        lines = [self._headline()]
        for i, found in enumerate(self.failures, 1):
            lines += ["", f"{i}. {found}"]
        if self.failures:
            lines += ["", "report.failures[0].script() is a program that shows the first one by itself."]
        by_check = self.by_check()
        width = max(map(len, by_check), default=0)
        lines += ["", *(f"  {name:<{width}}  {_in_words(results)}" for name, results in by_check.items())]
        return "\n".join([*lines, *(f"left out: {reason}" for reason in self.left_out)])

    def to_dict(self) -> dict[str, Any]:
        """The report as lists, dicts, strings and numbers."""
        failures = []
        for failure in self.failures:
            fields = {name: getattr(failure.error, name) for name in ("argument", "expected", "got", "where", "fix")}
            failures.append(
                {
                    "check": failure.check,
                    "problem": failure.problem,
                    **{name: value for name, value in fields.items() if value},
                    "input": failure.input,
                    "arguments": failure._arguments,
                    "inputs": failure.inputs,
                    "script": failure.script(),
                }
            )
        return {
            "op": self.op,
            "source": self.source,
            "effort": self.effort,
            "passed": self.passed,
            "complete": self.complete,
            "seconds": round(self.seconds, 4),
            "failures": failures,
            "results": [
                {name: value for name, value in vars(result).items() if value is not None}
                | {"seconds": round(result.seconds, 6)}
                for result in self.results
            ],
            "left_out": list(self.left_out),
        }

    def to_json(self, indent: int | None = 2) -> str:
        """The result of `to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)

    def to_junit_xml(self) -> str:
        """The report as a JUnit XML test suite: one test case for each check, one failure for each fault."""
        return junit_xml([self._junit_suite()])

    def _junit_suite(self) -> ET.Element:
        cases: JunitCases = {}
        for name, results in self.by_check().items():
            said = [("failure", each.problem, str(each)) for each in self.failures if each.check == name]
            if all(result.status == "not exercised" for result in results):
                said.append(("skipped", _in_words(results), ""))
            if name != "inputs" or said:  # inputs that the operator rejects are no test, unless one shows a fault
                cases[name] = sum(result.seconds for result in results), said
        return junit_suite(self.op, self.seconds, cases)


def _in_words(results: list[Result]) -> str:
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
        text += ": " + "; ".join(str(reason) for reason in list(reasons)[: None if results[0].check == KERNELS else 2])
    return f"{text} ({sum(result.seconds for result in results):.2f} s)"


#: Name of a test case -> its seconds, and what is said of it: ("failure", "error" or "skipped", message, text).
JunitCases = dict[str, tuple[float, list[tuple[str, str, str]]]]


def junit_suite(op: str, seconds: float, cases: JunitCases) -> ET.Element:
    """What was found of an op, in the form in which CI systems take test results."""
    tags = [{tag for tag, _, _ in said} for _, said in cases.values()]
    names = {"failure": "failures", "skipped": "skipped", "error": "errors"}
    counts = {name: str(sum(tag in each for each in tags)) for tag, name in names.items()}
    fields = {"name": f"customops.check({op})", "tests": str(len(cases)), **counts, "time": f"{seconds:.3f}"}
    suite = ET.Element("testsuite", fields)
    for name, (taken, said) in cases.items():
        case = ET.SubElement(suite, "testcase", classname=op, name=name, time=f"{taken:.3f}")
        for tag, message, text in said:
            element = ET.SubElement(case, tag, message=_printable(message))
            element.text = _printable(text) or None
            if tag == "failure":
                element.set("type", "CheckError")
    return suite


def junit_xml(suites: Iterable[ET.Element]) -> str:
    root = ET.Element("testsuites")
    root.extend(suites)
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _printable(text: str) -> str:
    """Without the control characters that XML cannot hold."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


# A program that shows one fault by itself.

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


class _Code(str):
    """Python code whose repr is itself: so the repr of lists and dicts around it is code, too."""

    __repr__ = str.__str__


class _Variables:
    """The variables of the script: one for each tensor, and one for each storage that two of them share."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._tensors: dict[int, str] = {}
        self._storages: dict[int, str] = {}
        self._kept: list[Any] = []  # so that no id is used again

    def code_of(self, value: Any) -> str:
        """An expression for a value; lines that define a variable are added where there has to be one."""
        if isinstance(value, torch.device):
            return f"torch.device({str(value)!r})"
        if isinstance(value, torch.Generator):
            return f"torch.Generator({str(value.device)!r}).manual_seed({value.initial_seed()})"
        if not isinstance(value, torch.Tensor):
            return repr(value)
        if id(value) not in self._tensors:
            self._kept.append(value)
            name = self._tensors[id(value)] = f"tensor_{len(self._tensors)}"
            self.lines.append(f"{name} = {self._tensor(value)}")
        return self._tensors[id(value)]

    def _tensor(self, tensor: torch.Tensor) -> str:
        is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
        if is_plain and not tensor.is_quantized and is_addressable(tensor) and not tensor.is_neg():
            requires_grad = ".requires_grad_()" if tensor.requires_grad else ""
            if tensor.is_conj():
                return f"{self.code_of(tensor.detach().conj())}.conj(){requires_grad}"
            count = tensor.untyped_storage().nbytes() // tensor.element_size()
            if count <= _LITERAL:
                where = f"{list(tensor.shape)}, {list(tensor.stride())}, {tensor.storage_offset()}"
                return f"{self._memory(tensor, count)}.as_strided({where}){requires_grad}"
        file = io.BytesIO()
        torch.save(tensor, file)
        text = base64.b64encode(file.getvalue()).decode()
        return f'torch.load(io.BytesIO(base64.b64decode("{text}")))'

    def _memory(self, tensor: torch.Tensor, count: int) -> str:
        """A variable with all elements of a tensor's storage."""
        key = _torch.memory.storage_id(tensor)
        if key not in self._storages:
            self._kept.append(tensor)
            elements = tensor.detach().as_strided((count,), (1,), 0)
            if elements.dtype.itemsize == 1 and elements.is_floating_point():
                elements = elements.to(torch.float32)
            device = "" if tensor.device.type == "cpu" else f", device={str(tensor.device)!r}"
            name = self._storages[key] = f"memory_{len(self._storages)}"
            self.lines.append(f"{name} = torch.tensor({elements.tolist()!r}, dtype={tensor.dtype}{device})")
        return self._storages[key]


def _load(failure: Failure) -> str:
    """Code that defines the operator: the import of its module, or the execution of its file."""
    custom = _torch.library.torch_op_of(failure.op)
    module = getattr(getattr(custom, "_init_fn", None), "__module__", None)
    file = (failure.source or "").rpartition(":")[0]
    if module and module != "__main__":
        with contextlib.suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(module)
            depth = module.count(".") + bool(spec and spec.submodule_search_locations)
            path = Path(spec.origin) if spec is not None and spec.origin else None
            if path is not None and (depth or path.stem == module):  # another name stands for a file of another folder
                folder, is_installed = path.parents[depth], {"site-packages", "dist-packages"} & {*path.parts}
                before = "" if is_installed else f"import sys\n\nsys.path.insert(0, {str(folder)!r})\n"
                return f"{before}import {module}  # noqa: E402, F401  (it defines the op)"
    if file and Path(file).is_file():
        return f"import runpy\n\nrunpy.run_path({file!r})  # it defines the op"
    if failure.op.startswith("aten::"):
        return ""
    return (
        "# Define the operator here, or import what does:\n"
        '# import my_library  /  torch.ops.load_library("my_library.so")'
    )
