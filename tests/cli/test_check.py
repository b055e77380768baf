"""The command line: what it prints, and how it exits."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
import pickle
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

import customops
from customops import __main__
from customops._cli import check as command
from customops._cli import outcomes
from customops.checks import Outcome, run_check

ROOT = Path(__file__).parents[2]


HEAD = """
import torch
from torch import Tensor
from customops import custom_op
"""


GOOD = """
@custom_op("cli::good", mutates_args=())
def good(x: Tensor) -> Tensor:
    return x * 2

good.register_fake(torch.empty_like)
good.register_autograd(lambda ctx, grad: grad * 2)

@good.register_samples
def _():
    yield (torch.randn(3),)
    yield (torch.randn(3, requires_grad=True),)
"""


BROKEN = """
@custom_op("cli::broken", mutates_args=())
def broken(x: Tensor, sizes: list[int], *, name: str = "a") -> Tensor:
    return x * 2

@broken.register_fake
def _(x, sizes, name):
    return torch.empty_like(x, dtype=torch.float64)

@broken.register_samples
def _():
    yield (torch.randn(2, 3, requires_grad=True).t(), [1, 2]), {"name": "[bold]"}
"""


BARE = """
@custom_op("cli::bare", mutates_args=())
def bare(x: Tensor) -> Tensor:
    return x * 2
"""


RAISING = """
@custom_op("cli::raising", mutates_args=())
def raising(x: Tensor) -> Tensor:
    return x * 2

raising.register_fake(torch.empty_like)

@raising.register_samples
def _():
    yield (torch.randn(3),)
    raise LookupError("no data here")
"""


class Result(NamedTuple):
    code: int
    out: str
    err: str


Check = Callable[..., Result]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory; what is imported from it, and the ops that defines, are gone after the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for variable in ("COLUMNS", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(variable, raising=False)
    with customops.default_registry.scope():
        yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]
    importlib.invalidate_caches()


@pytest.fixture
def check(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Check:
    """Run `python -m customops check` in this process; times, the path and blanks at ends of lines are masked."""

    def in_no_time(*args: Any) -> Outcome:
        return dataclasses.replace(run_check(*args), seconds=0.0)

    monkeypatch.setattr(outcomes, "run_check", in_no_time)

    def run(*arguments: str) -> Result:
        code = command.main(["check", *arguments])
        out, err = (stream.replace(f"{here}{os.sep}", "") for stream in capsys.readouterr())
        return Result(code, "\n".join(line.rstrip() for line in out.splitlines()), err)

    return run


def write(name: str, *parts: str) -> str:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text("".join([HEAD, *parts]), encoding="utf-8")
    importlib.invalidate_caches()
    return name


def in_shell(*arguments: str, script: str | None = None, **environment: str) -> Result:
    start = ["-m", "customops"] if script is None else ["-c", script]
    run = subprocess.run(
        [sys.executable, *start, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONIOENCODING": "utf-8", **environment},
        capture_output=True,
        encoding="utf-8",
    )
    return Result(run.returncode, run.stdout, run.stderr)


# -- the report --------------------------------------------------------------------------------


def test_table(check: Check) -> None:
    code, out, err = check(write("ops.py", GOOD, BARE))
    assert_expected_inline(
        out,
        """\
                                                       aot
                             autograd                dispatch
op         sample  schema  registration  faketensor  dynamic    time
────────────────────────────────────────────────────────────────────
cli::good       1  passed       -          passed     passed   0.00s
                2  passed     passed       passed     passed   0.00s
cli::bare    none    -          -            -          -

not exercised (-):
  test_autograd_registration: no input has requires_grad=True (1 sample)
  cli::bare: no samples; attach some with @bare.register_samples (ops.py:18)

2 ops, 2 samples: 7 passed, 0 failed, 1 not exercised; 1 op without samples, not exercised at all""",
    )
    assert (code, err) == (0, "")


def test_failure_is_explained(check: Check) -> None:
    code, out, _ = check(write("ops.py", BROKEN), "--check", "test_faketensor")
    (sample,) = customops.default_registry["cli::broken"].samples()
    error = run_check("test_faketensor", customops.adopt("cli::broken"), *sample).error
    table, _, explanation = out.partition("\n\n")
    assert table.endswith("FAILED    0.00s")
    assert explanation == (
        "FAILED cli::broken, sample 1, test_faketensor  (ops.py:6)\n"
        "  x: float32[3, 2] strides=[1, 3] requires_grad\n"
        "  sizes: [1, 2]\n"
        "  name: '[bold]'\n"
        "\n"
        f"{textwrap.indent(str(error), '  ')}\n"
        "\n"
        "1 op, 1 sample: 0 passed, 1 failed, 0 not exercised"
    )
    assert code == 1


def test_samples_function_raises(check: Check) -> None:
    code, out, _ = check(write("ops.py", RAISING), "--check", "test_schema")
    assert_expected_inline(
        out,
        """\
op            sample  schema   time
───────────────────────────────────
cli::raising       1  passed  0.00s
              FAILED    -

FAILED cli::raising, sample 2, the samples function raised  (ops.py:6)

  Traceback (most recent call last):
    File "ops.py", line 15, in _
      raise LookupError("no data here")
  LookupError: no data here

1 op, 1 sample: 1 passed, 1 failed, 0 not exercised""",
    )
    assert code == 1


def test_bad_sample(check: Check) -> None:
    code, out, _ = check(write("ops.py", BARE, "bare.register_samples(lambda: [torch.ones(1)])"))
    assert "cli::bare: a sample must be a tuple of arguments, or (args, kwargs)" in out
    assert "Traceback" not in out
    assert code == 1


def test_nothing_exercised(check: Check) -> None:
    code, out, _ = check(write("ops.py", BARE))
    assert out.endswith(
        "1 op, 0 samples: 0 passed, 0 failed, 0 not exercised; 1 op without samples, not exercised at all"
    )
    assert code == 2  # nobody has checked anything


def test_same_samples_each_time(check: Check) -> None:
    seen = "seen = []\n@bare.register_samples\ndef _():\n    seen.append(torch.randn(3))\n    yield (seen[-1],)\n"
    for _ in range(2):
        check(write("ops.py", BARE, seen), "--check", "test_schema")
        torch.randn(5)
    first, second = sys.modules["ops"].seen
    assert torch.equal(first, second)


# -- options -----------------------------------------------------------------------------------


def test_op_pattern(check: Check) -> None:
    file = write("ops.py", GOOD, BARE, BROKEN)
    code, out, _ = check(file, "--op", "*::g*", "--op", "cli::bare", "--check", "test_schema")
    assert ("cli::good" in out, "cli::bare" in out, "cli::broken" in out) == (True, True, False)
    assert code == 0


def test_op_pattern_without_match(check: Check) -> None:
    code, out, err = check(write("ops.py", GOOD, BARE), "--op", "good")
    assert (code, out) == (2, "")
    assert_expected_inline(
        err,
        """\
error: no op matches --op good
  got:      cli::good, cli::bare
  fix:      e.g. --op "*::name"
""",
    )


def test_checks_in_the_order_asked_for(check: Check) -> None:
    code, out, _ = check(write("ops.py", GOOD), "--check", "test_faketensor", "--check", "test_schema")
    assert out.splitlines()[0].split() == ["op", "sample", "faketensor", "schema", "time"]
    assert out.endswith("1 op, 2 samples: 4 passed, 0 failed, 0 not exercised")
    assert code == 0


def test_fail_fast(check: Check) -> None:
    code, out, _ = check(write("ops.py", BROKEN, GOOD), "--fail-fast", "--check", "test_faketensor")
    assert out.endswith("1 op, 1 sample: 0 passed, 1 failed, 0 not exercised; stopped at the first failure")
    assert "cli::good" not in out
    assert code == 1


def test_tolerance(check: Check) -> None:
    counting = "calls = []\n" + BARE.replace("return x * 2", "calls.append(x)\n    return x + 0.01 * len(calls)")
    rules = "bare.register_fake(torch.empty_like)\nbare.register_samples(lambda: [(torch.ones(2),)])\n"
    traced = (write("ops.py", counting, rules), "--check", "test_aot_dispatch_dynamic")
    assert check(*traced).code == 1
    assert check(*traced, "--atol", "0.1", "--rtol", "0").code == 0


@pytest.mark.parametrize(
    "arguments", [("--atol", "1"), ("--check", "test_nothing"), ("--rtol", "much", "--atol", "1"), ("--nothing",)]
)
def test_bad_arguments(check: Check, arguments: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as exit_:
        check(write("ops.py", GOOD), *arguments)
    assert exit_.value.code == 2


# -- targets -----------------------------------------------------------------------------------


def test_file_is_a_module_named_after_it(check: Check) -> None:
    write("some/deep/cli_neighbour.py", "NUMBER = 1\n")
    check(write("some/deep/cli_ops.py", "from cli_neighbour import NUMBER\nclass Public: ...\n", GOOD))
    module = sys.modules["cli_ops"]
    assert module.good.__module__ == "cli_ops"
    assert pickle.loads(pickle.dumps((module.Public, module.good))) == (module.Public, module.good)


def test_files_of_one_name(check: Check) -> None:
    first, second = write("a/ops.py", GOOD), write("b/ops.py", BARE)
    _, out, _ = check(first, second, "--check", "test_schema")
    assert "2 ops, 2 samples" in out
    assert sys.modules["ops"].good is not None
    assert sys.modules["ops_2"].bare is not None
    assert "2 ops, 2 samples" in check(first, second, "--check", "test_schema").out  # they are imported already


def test_module_and_package(check: Check) -> None:
    write("cli_package/__init__.py", "from . import inner\n")
    write("cli_package/inner.py", GOOD)
    write("cli_package/other.py", BARE)
    assert "1 op, 2 samples" in check("cli_package.inner", "--check", "test_schema").out
    assert "1 op, 2 samples" in check("cli_package", "--check", "test_schema").out
    assert "2 ops, 2 samples" in check("cli_package", "cli_package.other", "--check", "test_schema").out


def test_nothing_to_check(check: Check) -> None:
    assert check(write("cli_empty.py")) == (2, "", "error: cli_empty.py defines no op\n")
    write("cli_ops.py", GOOD)
    code, _, err = check(write("cli_users.py", "import cli_ops\n"))
    assert code == 2
    assert_expected_inline(
        err,
        """\
error: cli_users.py defines no op itself; it imports some
  got:      cli::good (cli_ops.py:6)
  fix:      name the module they are in
""",
    )


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nothing.py", "error: no such file: nothing.py"),
        ("no/thing", "error: no such file: no/thing"),
        ("cli_nothing", "error: no module named 'cli_nothing'"),
        ("customops.nothing", "error: no module named 'customops.nothing'"),
        ("ops", "error: no module named 'ops'\n  fix:      the file is ops.py"),
        ("folder", "error: folder is a directory\n  fix:      name its files (folder/*.py), or the package"),
        ("text.txt", "error: not a Python file: text.txt"),
        ("sys", "error: sys defines no op"),
    ],
)
def test_no_such_target(check: Check, monkeypatch: pytest.MonkeyPatch, target: str, message: str) -> None:
    write("ops.py", GOOD)
    write("folder/x.py")
    write("text.txt")
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != os.getcwd()])
    assert check(target) == (2, "", f"{message}\n")


def test_import_error(check: Check) -> None:
    code, out, err = check(write("ops.py", "def divide():\n    return 1 / 0\n\ndivide()\n"))
    err = re.sub(r"\n *[~^]+", "", err)  # Python 3.11 and later point at the place
    assert_expected_inline(
        err,
        """\
error: ops.py cannot be imported

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
def test_import_errors(check: Check, source: str, message: str, as_module: bool) -> None:
    write("cli_wrong.py", source)
    code, _, err = check("cli_wrong" if as_module else "cli_wrong.py")
    assert code == 2
    assert "cannot be imported" in err
    assert message in err
    assert "_cli.py" not in err


def test_two_targets_define_the_same_op(check: Check) -> None:
    code, _, err = check(write("first.py", GOOD), write("second.py", GOOD))
    assert code == 2
    assert err == "error: second.py replaces cli::good (first.py:6)\n  fix:      check them in two runs\n"


# -- as a program ------------------------------------------------------------------------------


@pytest.mark.process
def test_examples_pass() -> None:
    """In a pipe there are no escape codes, and nothing is cut."""
    files = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("examples/*.py"))
    files = [file for file in files if not file.endswith("_device.py")]  # these define no op
    needs = {"triton": "triton", "numba": "numba", "tvm": "tvm_ffi", "jax": "jax", "warp": "warp"}
    files = [file for file in files if importlib.util.find_spec(needs.get(Path(file).stem.split("_")[0], "torch"))]
    code, out, err = in_shell("check", *files, COLUMNS="40")
    assert code == 0, out + err
    assert [line for line in err.splitlines() if not line.startswith("Warp CUDA warning")] == []
    assert "\x1b" not in out
    assert "…" not in out
    assert re.search(r"examples::linear_gelu +1  passed     passed       passed     passed", out)
    assert int(re.search(r"(\d+) ops, ", out)[1]) >= len(files)  # type: ignore[index]
    assert ", 0 failed, " in out


@pytest.mark.process
def test_ascii_output(here: Path) -> None:
    code, out, _ = in_shell("check", str(here / write("ops.py", GOOD)), PYTHONIOENCODING="ascii")
    assert code == 0
    assert out.isascii()


def test_terminal(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # what rich takes for a terminal
    monkeypatch.setenv("TERM", "xterm")
    _, out, err = check(write("ops.py", GOOD), "--check", "test_schema")
    assert "\x1b[32mpassed" in out
    assert "cli::good" in err  # the progress bar


@pytest.mark.process
def test_without_rich() -> None:
    script = "import sys; sys.modules['rich'] = None; from customops.__main__ import main; sys.exit(main())"
    code, out, err = in_shell("check", "examples/out.py", script=script)
    assert (code, out) == (2, "")
    assert err == 'error: the command line needs rich; pip install "customops[cli]"\n'


def test_main_is_the_command_line(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["customops", "check", "nothing.py"])
    assert __main__.main() == 2


def test_a_kernel_that_exits_is_a_failure(check: Check) -> None:
    exiting = """
@custom_op("cli::exiting", mutates_args=())
def exiting(x: Tensor) -> Tensor:
    raise SystemExit(0)

@exiting.register_samples
def _():
    yield (torch.ones(2),)
"""
    code, out, _ = check(write("ops.py", exiting))
    assert code == 1
    assert "SystemExit(0)" in out


def test_an_op_that_a_helper_defined_belongs_to_its_samples(check: Check) -> None:
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
