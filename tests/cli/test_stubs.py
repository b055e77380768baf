"""``python -m customops stubs``: what it writes, what type checkers make of that, and how it exits."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from expecttest import assert_expected_inline
from helpers.warm import PYTHON

import customops
from customops._cli import main as command
from customops._cli import stubs as stub_files
from customops._schema.parse import parse

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "programs" / "type_checkers" / "torch_ops.pyi"
CALLS = ROOT / "tests" / "programs" / "type_checkers" / "stubs.py"

HEAD = "import torch\nfrom torch import Tensor\nimport customops\nfrom customops import custom_op\n"
DOUBLE = '''
@custom_op("stubs::double")
def double(x: Tensor) -> Tensor:
    """Twice x."""
    return x * 2
'''


class Result(NamedTuple):
    code: int
    out: str
    err: str


Stubs = Callable[..., Result]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory; what is imported in the test, and the ops that defines, are gone after it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    before = set(sys.modules)
    with customops.default_registry.scope():
        yield tmp_path
    for name in {*sys.modules}.difference(before):
        if name == "helpers.stubbed" or str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]
    importlib.invalidate_caches()


@pytest.fixture
def stubs(capsys: pytest.CaptureFixture[str]) -> Stubs:
    def run(*arguments: str) -> Result:
        code = command.main(["stubs", *arguments])
        return Result(code, *capsys.readouterr())

    return run


def write(name: str, *parts: str) -> str:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text("".join([HEAD, *parts]), encoding="utf-8")
    importlib.invalidate_caches()
    return name


def run_tool(*arguments: str) -> Result:
    run = subprocess.run([PYTHON, "-m", *arguments], capture_output=True, text=True, timeout=600)
    return Result(run.returncode, run.stdout, run.stderr)


# -- the file ----------------------------------------------------------------------------------


def test_short_file(stubs: Stubs) -> None:
    assert_expected_inline(
        stubs(write("ops.py", DOUBLE)).out,
        '''\
# fmt: off
# ruff: noqa
"""The ops of ops, as torch.ops has them.

Written by `python -m customops stubs`. Do not edit.
"""

from typing import Any

from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

class _Overload(OpOverload[..., Any]): ...

class _Packet(OpOverloadPacket[..., Any]):
    __getattr__: None  # type: ignore[assignment, misc]  # there are no other overloads

class _stubs_double_default_call:
    def __call__(
        self,
        x: Tensor,
    ) -> Tensor:
        """Twice x."""

class _stubs_double_default(_stubs_double_default_call, _Overload): ...

class _stubs_double(_stubs_double_default_call, _Packet):
    default: _stubs_double_default

class _stubs:
    double: _stubs_double

class _Ops:
    stubs: _stubs

ops: _Ops
''',
    )


def test_golden_file(stubs: Stubs) -> None:
    """All kinds of types; ``make generated`` writes it anew. `make typecheck` reads it, and calls through it."""
    check = [] if os.environ.get("EXPECTTEST_ACCEPT") else ["--check"]
    code, out, _ = stubs("helpers.stubbed", "-o", str(GOLDEN), *check)
    assert code == 0, out


@pytest.mark.process
def test_mypy_tells_right_calls_from_wrong_ones(here: Path) -> None:
    pytest.importorskip("mypy")
    text = CALLS.read_text(encoding="utf-8")
    wrong = {(i, code) for i, line in enumerate(text.splitlines(), 1) for code in re.findall(r"ignore\[(.*)\]", line)}
    assert len(wrong) > 20
    (here / "torch_ops.pyi").write_text(GOLDEN.read_text(encoding="utf-8"), encoding="utf-8")
    (here / "calls.py").write_text(re.sub(r"  # type: ignore\[.*\]", "", text), encoding="utf-8")
    cache = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache")]
    _, out, err = run_tool("mypy", "--strict", "--no-pretty", *cache, "calls.py", "torch_ops.pyi")
    found = re.findall(r"^(\S+):(\d+): error: .*\[(\S+)\]$", out, re.MULTILINE)
    assert {(name, int(line), code) for name, line, code in found} == {("calls.py", *each) for each in wrong}, out + err


@pytest.mark.process
def test_formatters_leave_it_alone(here: Path) -> None:
    """Without the comment that keeps them away, too."""
    pytest.importorskip("ruff")
    text = GOLDEN.read_text(encoding="utf-8")
    (here / "kept.pyi").write_text(text, encoding="utf-8")
    (here / "free.pyi").write_text(text.removeprefix("# fmt: off\n"), encoding="utf-8")
    assert run_tool("ruff", "check", "--isolated", "--select", "E,F,I,N,A,PYI,D", ".").code == 0
    for width in ("88", "120"):
        assert run_tool("ruff", "format", "--isolated", "--check", "--line-length", width, "free.pyi").code == 0
    assert run_tool("ruff", "format", "--check", "--config", "format.quote-style='single'", "kept.pyi").code == 0


@pytest.mark.process
@pytest.mark.parametrize("seed", ["1", "2"])
def test_same_file_in_each_process(seed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", seed)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "tests"), str(ROOT)]))
    code, out, err = run_tool("customops", "stubs", "helpers.stubbed", "-o", str(GOLDEN), "--check")
    assert (code, out) == (0, ""), out + err


# -- types and defaults ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("type_", "text", "values"),
    [
        ("Tensor", "Tensor", [torch.ones(1)]),
        ("Tensor?", "Tensor | None", [torch.ones(1), None]),
        ("Tensor[]", "Sequence[Tensor]", [[torch.ones(1)], (torch.ones(1),)]),
        ("Tensor[]?", "Sequence[Tensor] | None", [[torch.ones(1)], None]),
        ("Tensor?[]", "Sequence[Tensor | None]", [[torch.ones(1), None]]),
        ("SymInt", "int | SymInt", [3]),
        ("SymInt[]", "Sequence[int | SymInt]", [[1, 2], (1, 2), torch.Size([1])]),
        ("SymInt[2]", "Sequence[int | SymInt]", [(1, 2)]),
        ("int", "int", [3]),
        ("int[2]", "int | Sequence[int]", [3, (1, 2)]),
        ("int[2]?", "int | Sequence[int] | None", [3, (1, 2), None]),
        ("float", "float", [1.0, 1]),
        ("float[2]", "float | Sequence[float]", [1.0, (1.0, 2.0)]),
        ("bool[2]", "Sequence[bool]", [(True, False)]),
        ("Scalar", "int | float | complex", [1, 1.0, 1j, True]),
        ("complex", "complex", [1, 1.0, 1j]),
        ("str", "str", ["a"]),
        ("str[]", "Sequence[str]", [["a", "b"]]),
        ("ScalarType", "torch.dtype", [torch.int8]),
        ("ScalarType[]", "Sequence[torch.dtype]", [[torch.int8]]),
        ("Device?", "torch.device | str | None", ["cpu", torch.device("cpu"), None]),
        ("Layout", "torch.layout", [torch.strided]),
        ("MemoryFormat", "torch.memory_format", [torch.channels_last]),
        ("Generator", "torch.Generator", [torch.Generator()]),
        ("Dict(str, Tensor)", "Any", [{"a": torch.ones(1)}]),
        ("Dict(str, Tensor)?", "Any", [None]),
        ("Dict(str, Tensor)[]", "Sequence[Any]", [[{}]]),
    ],
)
def test_type_of_an_argument(type_: str, text: str, values: list[Any]) -> None:
    """What the stub says that an argument takes, `torch.ops` takes."""
    (argument,) = parse(f"({type_} x) -> ()").arguments
    assert stub_files.argument_type(argument, None) == text
    customops.define("stubs::takes", f"({type_} x) -> ()")
    customops.impl("stubs::takes", "CompositeExplicitAutograd", lambda x: None)
    for value in values:
        assert torch.ops.stubs.takes(value) is None


@pytest.mark.parametrize(
    ("types", "text"),
    [
        ("()", "None"),
        ("Tensor", "Tensor"),
        ("Tensor?", "Tensor | None"),
        ("Tensor(a!)", "Tensor"),
        ("Tensor[]", "list[Tensor]"),
        ("SymInt", "int"),
        ("(Tensor, SymInt[])", "tuple[Tensor, list[int]]"),
        ("(float, bool, Scalar, str)", "tuple[float, bool, int | float | complex, str]"),
        ("Device", "torch.device"),
        ("((Tensor))", "tuple[Tensor]"),
    ],
)
def test_type_of_returns(types: str, text: str) -> None:
    assert stub_files.return_type(parse(f"(Tensor(a!) x) -> {types}").returns) == text


@pytest.mark.parametrize(
    "value",
    [None, True, 0, -3, 1.5, 1e-20, float("inf"), float("-inf"), 2j, complex(-1.0, float("inf")), "", "a", "it's",
     'say "no"', "it's \"both\"", "\\n\n\t\0é\u2028", torch.float16, torch.strided, torch.channels_last,
     torch.device("cuda", 1), (), (1,), (1, 2), ((1,), ("a", None))],
    ids=repr,
)  # fmt: skip
def test_values(value: Any) -> None:
    text = stub_files.expression(value)
    assert eval(text, {"torch": torch}) == value
    assert not isinstance(value, str) or text == stub_files.quoted(value)


def test_values_without_an_expression() -> None:
    assert stub_files.expression(object()) == "..."
    assert stub_files.expression((1, [object()])) == "..."
    assert stub_files.expression(float("nan")) == 'float("nan")'


@pytest.mark.parametrize(
    "text",
    ["One line.", "Two.\n\n    Indented \\ \\\\n", '"quoted"', 'ends in """', 'two\n"""\n"', '""""""', '"', "\\",
     "\\\"", "tab\there\0\x0c\u2028", "é"],
)  # fmt: skip
def test_docstring(text: str) -> None:
    lines = stub_files.docstring(text)
    source = "\n".join(["class C:", *(textwrap.indent(line, "    ") for line in lines)])
    scope: dict[str, Any] = {}
    exec(source, scope)
    assert inspect.cleandoc(scope["C"].__doc__) == inspect.cleandoc(text)


# -- names -------------------------------------------------------------------------------------


def calls_of(text: str) -> dict[str, str]:
    """The class of each call in a stub -> its parameters, on a line."""
    found = re.findall(r"class (\w+)_call:\n    def __call__\(\n(.*?)\n    \) -> ", text, re.DOTALL)
    return {name: " ".join(line.strip() for line in body.splitlines()) for name, body in found}


@pytest.mark.parametrize(
    ("schema", "parameters"),
    [
        ("(Tensor self) -> ()", "_self, self: Tensor,"),
        ("(Tensor self, Tensor _self) -> ()", "_self_, self: Tensor, _self: Tensor,"),
        ("(Tensor x, int lambda) -> ()", "self, x: Tensor, lambda_: int, /,"),
        ("(int from, int from_, int n=1) -> ()", "self, from__: int, /, from_: int, n: int = 1,"),
        ("(*, int lambda) -> ()", "self, **kwargs: Any,  # lambda"),
        ("(int kwargs, *, int? lambda=None, int n) -> ()", "self, kwargs: int, *, n: int, **kwargs_: Any,  # lambda"),
    ],
)  # fmt: skip
def test_names_of_parameters(stubs: Stubs, schema: str, parameters: str) -> None:
    text = stubs(write("ops.py", f'customops.define("stubs::f", "{schema}")\n')).out
    assert calls_of(text) == {"_stubs_f_default": parameters}
    ast.parse(text)


def test_names_of_classes_are_unique(stubs: Stubs) -> None:
    names = ["Ops::f", "a::b_c", "a_b::c", "a::_a_f", "a::f", "a::f.call", "a::f_call", "Packet::Overload"]
    text = stubs(
        write("ops.py", *(f'customops.define("{name}", "({"int n" * ("." in name)}) -> ()")\n' for name in names))
    ).out
    classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    assert len({node.name for node in classes}) == len(classes)
    attributes = {each.target.id for node in classes for each in node.body
                  if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)}  # fmt: skip
    assert not attributes & {node.name for node in classes}


def test_overloads_of_other_libraries_are_there(stubs: Stubs) -> None:
    with torch.library._scoped_library("stubs", "FRAGMENT") as library:
        library.define("f.int(int n) -> int")
        text = stubs(write("ops.py", 'customops.define("stubs::f", "(Tensor x) -> Tensor")\n')).out
    assert calls_of(text).keys() == {"_stubs_f_int", "_stubs_f_default"}
    assert "    int: _stubs_f_int\n" in text


def test_docs_of_classes_are_not_those_of_ops(stubs: Stubs) -> None:
    source = """
class Callable:
    '''A class.'''
    def __call__(self, x: Tensor) -> Tensor: ...

custom_op("stubs::f", Callable())
"""
    assert "A class." not in stubs(write("ops.py", source)).out


# -- which ops ---------------------------------------------------------------------------------


def test_a_package_has_its_modules_and_no_others(stubs: Stubs) -> None:
    write("other_lib.py", 'customops.define("other::f", "() -> ()")\n')
    write("stubs_lib/__init__.py", "import other_lib\nfrom . import inner\n")
    write("stubs_lib/inner.py", DOUBLE)
    write("stubs_lib/unused.py", 'customops.define("stubs::unused", "() -> ()")\n')
    text = stubs("stubs_lib").out
    assert calls_of(text).keys() == {"_stubs_double_default"}
    assert '"""The ops of stubs_lib, as torch.ops has them.' in text


def test_else_the_ops_that_importing_it_defined(stubs: Stubs) -> None:
    write("factory_of_ops.py", 'def make(name):\n    customops.define(name, "() -> ()")\n')
    write("users.py", 'from factory_of_ops import make\nmake("stubs::made")\n')
    assert calls_of(stubs("users").out).keys() == {"_stubs_made_default"}


def test_module_without_ops(stubs: Stubs) -> None:
    assert stubs("json") == (2, "", "error: json defines no op\n")
    missing = stubs("stubs_nothing")
    assert missing[:2] == (2, "")
    assert missing[2].startswith("error: no module named 'stubs_nothing'\n  got:      looked in ")


# -- files and --check -------------------------------------------------------------------------


def test_output(stubs: Stubs) -> None:
    module = write("ops.py", DOUBLE)
    printed = stubs(module).out
    note = "note: Python itself imports torch_ops.py; write there: from torch import ops as ops\n"
    assert stubs(module, "-o", "torch_ops.pyi") == (0, "", note)
    assert Path("torch_ops.pyi").read_text(encoding="utf-8") == printed
    Path("torch_ops.py").write_text("from torch import ops as ops\n", encoding="utf-8")
    assert stubs(module, "-o", "torch_ops.pyi") == (0, "", "")
    assert importlib.import_module("torch_ops").ops.stubs.double(torch.ones(1)) == 2


def test_output_that_cannot_be_written(stubs: Stubs) -> None:
    code, _, err = stubs(write("ops.py", DOUBLE), "-o", "no/where.pyi")
    assert (code, err) == (2, "error: no/where.pyi cannot be written: No such file or directory\n")


def test_check(stubs: Stubs) -> None:
    module = write("ops.py", DOUBLE)
    again = "python -m customops stubs ops.py -o torch_ops.pyi"
    checked = (module, "-o", "torch_ops.pyi", "--check")
    assert stubs(*checked) == (1, f"torch_ops.pyi is not there; write it: {again}\n", "")
    assert not Path("torch_ops.pyi").exists()
    stubs(module, "-o", "torch_ops.pyi")
    assert stubs(*checked) == (0, "", "")
    stale = Path("torch_ops.pyi").read_text(encoding="utf-8").replace("x: Tensor,", "x: Tensor,\n        n: int,")
    Path("torch_ops.pyi").write_text(stale, encoding="utf-8")
    code, out, err = stubs(*checked)
    assert (code, err) == (1, "")
    assert_expected_inline(
        out,
        """\
torch_ops.pyi is stale; write it anew: python -m customops stubs ops.py -o torch_ops.pyi
--- there
+++ now
@@ -21,3 +21,2 @@
         x: Tensor,
-        n: int,
     ) -> Tensor:
""",
    )
    assert Path("torch_ops.pyi").read_text(encoding="utf-8") == stale


def test_check_finds_a_changed_line(stubs: Stubs) -> None:
    module = write("ops.py", DOUBLE)
    stubs(module, "-o", "torch_ops.pyi")
    written = Path("torch_ops.pyi").read_text(encoding="utf-8")
    Path("torch_ops.pyi").write_text(written.replace("x: Tensor,", "y: Tensor,"), encoding="utf-8")
    code, out, _ = stubs(module, "-o", "torch_ops.pyi", "--check")
    assert code == 1
    assert "-        y: Tensor,\n+        x: Tensor,\n" in out


def test_check_shows_a_few_lines(stubs: Stubs) -> None:
    module = write("ops.py", DOUBLE)
    Path("torch_ops.pyi").write_text("", encoding="utf-8")
    code, out, _ = stubs(module, "-o", "torch_ops.pyi", "--check")
    assert (code, len(out.splitlines())) == (1, 14)
    assert re.search(r"^\.\.\. and \d+ lines more$", out.splitlines()[-1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ops", "--check"], "--check needs the file to compare: -o FILE"),
        (["ops", "-o", "torch_ops.py"], "the name of a stub must end in .pyi: -o torch_ops.pyi"),
        ([], "the following arguments are required: MODULE"),
    ],
)
def test_bad_arguments(stubs: Stubs, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as exit_:
        stubs(*arguments)
    assert exit_.value.code == 2
    assert f"customops stubs: error: {message}\n" in capsys.readouterr().err
