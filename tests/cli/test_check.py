"""``customops check``: what it prints and writes, and how it exits."""

from __future__ import annotations

import functools
import json
import os
import pickle
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import torch
from expecttest import assert_expected_inline
from helpers.command_line import BARE, BROKEN, GOOD, RAISING, Command, Result, in_shell, write
from helpers.warm import PYTHON

import customops
from customops._cli import check as checking_command
from customops._cli.check import Checked

LINE = 6  #: of the first op in a file of `write`

#: One cheap check, in this process.
CHEAP = ("--only", "schema", "--effort", "quick", "--no-isolate")


@pytest.fixture
def check(run: Command) -> Command:
    """``customops check``, with `CHEAP` options; times are masked."""

    def check(*arguments: str) -> Result:
        cheap = () if "--only" in arguments else CHEAP
        code, out, err = run("check", *arguments, *cheap)
        return Result(code, re.sub(r"\d+\.\d s", "0.0 s", out), err)

    return check


faketensor = ("--only", "faketensor", "--effort", "quick", "--no-isolate")


# -- what is printed ---------------------------------------------------------------------------


def test_a_line_for_each_op(check: Command) -> None:
    code, out, err = check(write("ops.py", GOOD, BARE))
    assert re.sub(r"\d+ inputs", "9 inputs", out) == (
        "ok          cli::good  9 inputs, 0.0 s\n"
        "no samples  cli::bare  attach some with @bare.register_samples\n"
        "\n"
        "2 ops: 1 ok, 0 with faults, 1 without samples, in 0.0 s\n"
    )
    assert (code, err) == (0, "")


@pytest.mark.parametrize("width", [60, 100])
def test_a_fault_is_explained(check: Command, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    code, out, _ = check(write("ops.py", BROKEN), *faketensor)
    assert code == 1
    assert re.match(
        rf"FAILED      cli::broken  1 fault, \d+ inputs, 0.0 s\n\nFAILED cli::broken  \(ops.py:{LINE}\)\n", out
    )
    assert "test_faketensor: " in out
    assert "  at:       _ (ops.py:10)\n" in out
    assert out.count("FAILED") == 2
    assert out.endswith("1 op: 0 ok, 1 with faults, in 0.0 s\n")
    assert max(map(len, out.splitlines())) <= width


def test_the_samples_function_raises(check: Command) -> None:
    code, out, _ = check(write("ops.py", RAISING))
    assert_expected_inline(
        out.replace(f"ops.py:{LINE}", "ops.py:LINE"),
        """\
FAILED      cli::raising

FAILED cli::raising  (ops.py:LINE)
the samples function raised
Traceback (most recent call last):
  File "ops.py", line 15, in _
    raise LookupError("no data here")
LookupError: no data here

1 op: 0 ok, 1 with faults, in 0.0 s
""",
    )
    assert code == 1


def test_bad_sample(check: Command) -> None:
    code, out, _ = check(write("ops.py", BARE, "bare.register_samples(lambda: [torch.ones(1)])"))
    assert "a sample must be a tuple of arguments, or (args, kwargs)" in " ".join(out.split())
    assert "Traceback" not in out
    assert code == 1


@pytest.mark.parametrize(
    ("option", "path", "problem"),
    [
        ("--json", "nowhere/report", "there is no directory nowhere"),
        ("--junit", "nowhere/report", "there is no directory nowhere"),
        ("--json", "report", "you have no permission to write it"),
        ("--repro", "ops.py", "this is not a directory"),
    ],
)
def test_a_file_that_cannot_be_written_is_told_before_ops_run(
    check: Command,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    option: str,
    path: str,
    problem: str,
) -> None:
    write("ops.py", GOOD)
    monkeypatch.setattr("customops._cli.screen.os.access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(SystemExit):
        check("ops.py", option, path)
    out, err = capsys.readouterr()
    assert f"customops check: error: {option} {path}: {problem}" in err
    assert out == ""


def test_nobody_has_checked_anything(check: Command) -> None:
    code, out, _ = check(write("ops.py", BARE))
    assert out.endswith("1 op: 0 ok, 0 with faults, 1 without samples, in 0.0 s\n")
    assert code == 2


def test_same_samples_each_time(check: Command) -> None:
    seen = "seen = []\n@bare.register_samples\ndef _():\n    seen.append(torch.randn(3))\n    yield (seen[-1],)\n"
    for _ in range(2):
        check(write("ops.py", BARE, seen))
        torch.randn(5)
    first, second = sys.modules["ops"].seen
    assert torch.equal(first, second)


def test_a_kernel_that_exits_is_a_fault(check: Command) -> None:
    exiting = BARE.replace("return x * 2", "raise SystemExit(0)") + "bare.register_samples(lambda: [(torch.ones(2),)])"
    code, out, _ = check(write("ops.py", exiting))
    assert code == 1
    assert "sys.exit()" in out


def test_a_kernel_that_raises_is_told_once_with_its_line(check: Command) -> None:
    raising = (
        BARE.replace("return x * 2", "raise ValueError('boo')") + "bare.register_samples(lambda: [(torch.ones(2),)])"
    )
    code, out, _ = check(write("ops.py", raising), "--only", "schema,faketensor,determinism", "--no-isolate")
    assert code == 1
    assert out.count("boo") == 1
    assert "at:       bare (ops.py:8)" in out


@pytest.mark.process
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_crash_is_told_once_with_its_line(check: Command) -> None:
    crashing = BARE.replace("return x * 2", "import ctypes; ctypes.string_at(0)")
    file = write("ops.py", crashing + "bare.register_samples(lambda: [(torch.ones(2),)])\n", GOOD)
    code, out, _ = check(file, "--only", "schema,faketensor", "--effort", "quick")
    assert code == 1
    assert out.count("SIGSEGV") == 1
    assert "at:       bare (ops.py:8)" in out
    assert "ok          cli::good" in out  # and the others are checked


# -- options -----------------------------------------------------------------------------------


DEFINED = """
import torch
import customops

customops.define("cli_defined::f", "(Tensor x) -> Tensor")


@customops.impl("cli_defined::f", "cpu")
def kernel(x):
    return x.double()


customops.register_fake("cli_defined::f", lambda x: torch.empty_like(x))


@customops.adopt("cli_defined::f").register_samples
def _():
    yield (torch.randn(3),)
"""


def test_ops_that_are_defined_by_a_schema_are_checked(run: Command) -> None:
    Path("by_schema.py").write_text(DEFINED)
    for arguments in (["by_schema.py"], ["by_schema.py", "cli_defined::*"]):
        code, out, _ = run("check", *arguments, *faketensor)
        assert code == 1
        assert "FAILED      cli_defined::f  1 fault" in out
    assert "cli_defined::f" in run("list", "by_schema.py").out


def test_op_pattern(check: Command) -> None:
    file = write("ops.py", GOOD, BARE, BROKEN)
    code, out, _ = check(file, "*::g*", "cli::bare")
    assert ("cli::good" in out, "cli::bare" in out, "cli::broken" in out) == (True, True, False)
    assert code == 0


def test_op_pattern_without_match(check: Command) -> None:
    code, out, err = check(write("ops.py", GOOD, BARE), "cli::goood")
    assert (code, out) == (2, "")
    assert_expected_inline(
        err,
        """\
error: there is no op cli::goood
  got:      cli::good, cli::bare
  fix:      did you mean cli::good?
""",
    )


def test_only_and_skip(run: Command) -> None:
    write("ops.py", GOOD)
    _, out, _ = run("check", "ops.py", "--only", "schema,test_faketensor", "--skip", "schema", "--json", "-")
    found = json.loads(out)["ops"][0]
    assert {result["check"] for result in found["report"]["results"]} - {"inputs"} == {"test_faketensor"}


def test_a_removed_check_can_be_skipped(run: Command) -> None:
    _, out, _ = run("check", write("ops.py", GOOD), *faketensor, "--skip", "first_calls,test_shapes")
    assert "cli::good" in out
    with pytest.raises(SystemExit):
        run("check", "ops.py", "--only", "first_calls")


def test_fail_fast(check: Command) -> None:
    code, out, _ = check(write("ops.py", BROKEN, GOOD), "--fail-fast", *faketensor)
    assert out.endswith("1 op: 0 ok, 1 with faults, in 0.0 s; stopped at the first fault\n")
    assert "cli::good" not in out
    assert code == 1


def test_verbose_says_what_had_nothing_to_try(check: Command) -> None:
    _, out, _ = check(write("ops.py", GOOD), "--only", "autocast,schema", "-v", "--no-isolate")
    assert "not exercised: test_autocast: " in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--only", "nothing"), "--only nothing: no such check"),
        (("--skip", "nothing"), "--skip nothing: no such check"),
        (("--effort", "much"), "argument --effort: invalid choice: 'much'"),
        (("--nothing",), "there is no option --nothing"),
        (("--jobs", "-1"), "--jobs -1: must be 0 or more"),
    ],
)
def test_bad_arguments(
    run: Command, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SystemExit) as exit_:
        run("check", write("ops.py", GOOD), *arguments)
    assert exit_.value.code == 2
    assert f"customops check: error: {message}" in capsys.readouterr().err


@pytest.mark.process
def test_files_for_other_programs(check: Command, here: Path) -> None:
    files = ("--json", "found.json", "--junit", "found.xml", "--repro", "programs")
    code, out, _ = check(write("ops.py", BROKEN, GOOD, BARE), *faketensor, *files)
    assert code == 1
    found = json.loads(Path("found.json").read_text())
    assert found["customops"] == customops.__version__
    assert {op["op"]: op["status"] for op in found["ops"]} == {
        "cli::broken": "failed",
        "cli::good": "passed",
        "cli::bare": "no samples",
    }
    suites = ET.parse("found.xml").getroot()
    assert [suite.get("failures") for suite in suites] == ["1", "0", "0"]
    assert suites[2].find("testcase/skipped") is not None
    (program,) = Path("programs").iterdir()
    assert f"wrote {program}" in out
    folders = [folder for folder in sys.path if folder and Path(folder).resolve() != here]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(folders)}  # it finds the op's module by itself
    command = [PYTHON, str(program.resolve())]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd="/", check=False)
    assert "CheckError" in done.stderr


@pytest.mark.process
def test_programs_are_written_beside_json_on_stdout(check: Command, here: Path) -> None:
    code, out, _ = check(write("ops.py", BROKEN), *faketensor, "--json", "-", "--repro", "programs")
    assert code == 1
    assert [op["status"] for op in json.loads(out)["ops"]] == ["failed"]
    assert list(Path("programs").iterdir())


def test_a_broken_samples_function_in_junit() -> None:
    broken = Checked("cli::f", "f", "ops.py:1", problem="the samples function raised\nLookupError: \x00")
    (suite,) = ET.fromstring(checking_command.as_junit([broken]).encode())
    error = suite.find("testcase/error")
    assert error is not None
    assert error.get("message") == "the samples function raised"


@pytest.mark.process
def test_jobs(check: Command) -> None:
    """Each process imports the targets; the lines are in the order of the ops."""
    one = check(write("ops.py", BROKEN, GOOD, BARE), *faketensor)
    two = check("ops.py", *faketensor, "--jobs", "2")
    assert (two.code, two.err) == (one.code, one.err)
    assert two.out == one.out


# -- targets -----------------------------------------------------------------------------------


def test_file_is_a_module_named_after_it(check: Command) -> None:
    write("some/deep/cli_neighbour.py", "NUMBER = 1\n")
    check(write("some/deep/cli_ops.py", "from cli_neighbour import NUMBER\nclass Public: ...\n", GOOD))
    module = sys.modules["cli_ops"]
    assert module.good.__module__ == "cli_ops"
    assert pickle.loads(pickle.dumps((module.Public, module.good))) == (module.Public, module.good)


def test_files_of_one_name(check: Command) -> None:
    first, second = write("a/ops.py", GOOD), write("b/ops.py", BARE)
    _, out, _ = check(first, second)
    assert "2 ops: " in out
    assert sys.modules["ops"].good is not None
    assert sys.modules["ops_2"].bare is not None
    assert "2 ops: " in check(first, second).out  # they are imported already


def test_module_and_package(check: Command) -> None:
    write("cli_package/__init__.py", "from . import inner\n")
    write("cli_package/inner.py", GOOD)
    write("cli_package/other.py", BARE)
    assert "1 op: " in check("cli_package.inner").out
    assert "1 op: " in check("cli_package").out
    assert "2 ops: " in check("cli_package", "cli_package.other").out


@pytest.mark.parametrize("target", ["cli_package", "cli_package/", "./cli_package", "src"])
def test_a_package_that_imports_nothing_is_walked(check: Command, monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    """Also where the working directory is not in `sys.path`, as for the script ``customops``."""
    top = "src/cli_package" if target == "src" else "cli_package"
    for name in ("inner.py", "deep/ops.py", "deeper/__init__.py", "tests/helper.py", "test_all.py", "__main__.py"):
        op = GOOD.replace("cli::good", f"cli::in_{name[:-3]}".replace("/", "_")) if name[0] != "d" else ""
        write(f"{top}/{name}", op)
    Path(top, "__init__.py").write_text("")
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != os.getcwd()])
    code, out, err = check(target)
    assert (code, re.findall(r"cli::\w+", out)) == (0, ["cli::in_inner"])
    walked = "cli_package.deep.ops, cli_package.deeper, cli_package.inner"
    assert err == f"{target} itself defines no op; imported {walked}\n"


def test_nothing_to_check(check: Command) -> None:
    assert check(write("cli_empty.py")) == (2, "", "error: cli_empty.py defines no op\n")
    write("cli_ops.py", GOOD)
    code, _, err = check(write("cli_users.py", "import cli_ops\n"))
    assert code == 2
    assert_expected_inline(
        err.replace(f"ops.py:{LINE}", "ops.py:LINE"),
        """\
error: cli_users.py defines no op itself; it imports some
  got:      cli::good (cli_ops.py:LINE)
  fix:      name the module they are in
""",
    )


def test_a_file_of_ops_of_torch_library(check: Command) -> None:
    """It can be checked: adopted, with samples; or moved."""
    source = """
        lib = torch.library.Library("cli_native", "FRAGMENT")
        lib.define("f(Tensor x) -> Tensor")
        lib.impl("f", torch.clone, "CompositeExplicitAutograd")
        torch.library.register_fake("cli_native::f", torch.empty_like, lib=lib)
    """
    code, _, err = check(write("native.py", textwrap.dedent(source)))
    assert code == 2
    assert_expected_inline(
        err,
        """\
error: native.py defines ops by torch.library alone
  got:      cli_native::f
  fix:      @customops.adopt("cli_native::f").register_samples gives it samples; customops migrate moves native.py
""",
    )
    samples = 'customops.adopt("cli_native::f").register_samples(lambda: [(torch.ones(3),)])\n'
    code, out, err = check(write("native_samples.py", "import customops, native\n", samples))
    assert (code, out.partition("  ")[0]) == (0, "ok"), err


def test_little_was_tried(check: Command) -> None:
    check_first = "    torch._check(x.shape == (3,) and x.dtype is torch.float32)\n    return x * 2"
    picky = GOOD.replace("    return x * 2", check_first)
    _, out, _ = check(write("picky.py", picky))
    assert re.match(r"ok          cli::good  \d+ inputs \(\d+ more refused\), 0.0 s\n", out)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nothing.py", "error: no such file: nothing.py\n  got:      looked in HERE"),
        ("ns:op", "error: no such file: ns:op\n  got:      looked in HERE\n  fix:      ops are named ns::op"),
        ("no/thing", "error: no such file: no/thing\n  got:      looked in no"),
        (
            "cli_nothing",
            "error: no module named 'cli_nothing'\n  got:      looked in FOLDERS\n"
            "  fix:      name a file with its .py, and an op with its namespace, as in ns::cli_nothing",
        ),
        (
            "customops.nothing",
            f"error: no module named 'customops.nothing'\n  got:      looked in {Path(customops.__file__).parent}",
        ),
        (
            "json.tool.nothing",
            "error: no module named 'json.tool.nothing'\n  got:      looked in nothing: json.tool is no package",
        ),
        ("ops", "error: no module named 'ops'\n  got:      looked in FOLDERS\n  fix:      the file is ops.py"),
        ("folder", "error: folder defines no op\n  got:      imported folder/x.py"),
        ("package", "error: package defines no op\n  got:      imported package, package.x"),
        ("text.txt", "error: not a Python file: text.txt"),
        ("sys", "error: sys defines no op"),
    ],
)
def test_no_such_target(check: Command, monkeypatch: pytest.MonkeyPatch, target: str, message: str) -> None:
    write("ops.py", GOOD)
    for file in ("folder/x.py", "text.txt", "package/__init__.py", "package/x.py"):
        write(file)
    folders = [p for p in sys.path if p != os.getcwd() and os.path.isdir(p)]
    monkeypatch.setattr(sys, "path", [*folders])
    message = message.replace("HERE", os.getcwd()).replace("FOLDERS", ", ".join(folders))
    code, out, err = check(target)
    assert (code, out) == (2, "")
    assert err.endswith(f"{message}\n")  # after what was imported


def test_import_error(check: Command) -> None:
    code, out, err = check(write("ops.py", "def divide():\n    return 1 / 0\n\ndivide()\n"))
    err = re.sub(r"\n *[~^]+", "", err)  # Python 3.11 and later point at the place
    assert_expected_inline(
        err,
        """\
error: ops.py cannot be imported: ZeroDivisionError: division by zero

Traceback (most recent call last):
  File "ops.py", line 8, in <module>
    divide()
  File "ops.py", line 6, in divide
    return 1 / 0
ZeroDivisionError: division by zero
""",
    )
    assert (code, out) == (2, "")
    assert "ops" not in sys.modules


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import nothing_of_this_name", "No module named 'nothing_of_this_name'"),
        ("raise SystemExit('bye')", "SystemExit: bye"),
        ("def f(:", "SyntaxError"),
        ("custom_op('cli::x', lambda x: x, mutates_args=())", "parameter x must have a type annotation"),
        ("from . import sibling", "fix:      name the module instead of the file"),
    ],
)
@pytest.mark.parametrize("as_module", [False, True], ids=["file", "module"])
def test_import_errors(check: Command, source: str, message: str, as_module: bool) -> None:
    write("cli_wrong.py", source)
    code, _, err = check("cli_wrong" if as_module else "cli_wrong.py")
    assert code == 2
    assert "cannot be imported" in err
    assert message in err
    assert "_cli.py" not in err


def test_two_targets_define_the_same_op(check: Command) -> None:
    code, _, err = check(write("first.py", GOOD), write("second.py", GOOD))
    assert code == 2
    assert err == f"error: second.py replaces cli::good (first.py:{LINE})\n  fix:      name them in two runs\n"


def test_a_folder_stands_for_its_files(check: Command) -> None:
    write("folder/a.py", GOOD)
    write("folder/deep/b.py", BARE)
    write("folder/.hidden/c.py", BROKEN)
    _, out, _ = check("folder")
    assert "2 ops: " in out


def test_names_of_ops(check: Command) -> None:
    file = write("ops.py", GOOD, BARE)
    assert "1 op: " in check("cli::good", file).out
    assert "2 ops: " in check("cli::*", file).out
    code, _, err = check("cli::nothing", file)
    assert code == 2
    assert "error: there is no op cli::nothing\n  got:      cli::good, cli::bare\n" in err


def test_a_namespace_is_looked_for_as_a_module(check: Command) -> None:
    write("cli.py", GOOD)
    assert "1 op: " in check("cli::good").out
    code, _, err = check("nobody::f")
    assert code == 2
    assert "fix:      name the file or module that defines it as well: nobody::f ops.py" in err


def test_an_op_that_a_helper_defined_belongs_to_its_samples(check: Command) -> None:
    helper = """
def make(name):
    return custom_op(name, lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor")
"""
    user = """
from helper_of_ops import make
op = make("cli::helped")
op.register_fake(torch.empty_like)

@op.register_samples
def _():
    yield (torch.ones(2),)
"""
    write("helper_of_ops.py", helper)
    code, out, _ = check(write("ops.py", user))
    assert code == 0
    assert "cli::helped" in out


# -- as a program ------------------------------------------------------------------------------


@pytest.mark.process
def test_several_examples() -> None:
    """In a pipe there are no escape codes."""
    files = [f"examples/{name}.py" for name in ("linear_gelu", "lists", "rotary")]  # `make demo-all` checks all of them
    code, out, err = in_shell("check", *files, "--effort", "quick", COLUMNS="60")
    assert code == 0, out + err
    assert "\x1b" not in out
    assert re.search(r"ok +examples::linear_gelu", out)
    assert int(re.search(r"(\d+) ops: ", out)[1]) >= len(files)  # type: ignore[index]


def test_colors(check: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[32mok\x1b[0m          cli::good" in check(write("ops.py", GOOD)).out
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in check("ops.py").out


def test_what_an_encoding_does_not_have(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Ascii:
        encoding = "ascii"
        write, flush = staticmethod(functools.partial(sys.stdout.write)), staticmethod(lambda: None)

    checking_command.say("caf\xe9", Ascii())  # type: ignore[arg-type]
    assert capsys.readouterr().out == "caf?\n"
