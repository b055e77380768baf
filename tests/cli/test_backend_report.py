"""`python -m customops backend-report`: a script's ops, torch's op tests, crashes, and what goes wrong on the way."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers.isolated import isolated

import customops.__main__
from customops.backend import coverage, fallbacks, get_backend, op_tests, register_backend
from customops.backend.fallbacks import Spent
from customops.testing.isolation import in_fork

pytestmark = pytest.mark.process


DEVICE = """\
import torch
from customops.backend import register_backend

backend = register_backend("npy")

@backend.kernel("aten::mul.out")
def mul(a, b, *, out):
    torch.mul(backend.host(a), b if isinstance(b, float) else backend.host(b), out=backend.host(out))
"""


PROGRAM = (
    DEVICE
    + """
import sys

@backend.kernel("aten::sin", dtypes=[torch.float32])
def sin(x):
    return backend.wrap(backend.host(x).sin())

if __name__ == "__main__":
    d = torch.ones(3, device="npy")
    (d * d).cos()
    d.sin(), d.double().sin()
    print("arguments:", sys.argv[1:])
    if "fail" in sys.argv:
        d @ torch.ones(4, device="npy")
"""
)


def run(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "customops", "backend-report", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, encoding="utf-8")


def run_in_fork(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The same, much faster: in a fork of this process. For what ends before tensors are computed with."""
    command = ["customops", "backend-report", *map(str, arguments)]

    def main() -> tuple[object, str, str]:
        os.chdir(cwd)
        sys.argv, sys.path[:0] = command, [str(cwd)]
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code: object = customops.__main__.main()
            except SystemExit as end:
                code = end.code
        return code, out.getvalue(), err.getvalue()

    return subprocess.CompletedProcess(command, *in_fork(main, 60).get())


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    (tmp_path / "device.py").write_text(DEVICE, encoding="utf-8")
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    return tmp_path


def lines(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_a_script(program: Path) -> None:
    done = run("program.py", "one", "two", "--json", "out.json", cwd=program)
    assert done.returncode == 0, done.stderr
    assert "arguments: ['one', 'two']" in done.stdout
    rows = {line[0]: line[1:4] for line in lines(done.stdout) if line[:1] and line[0].startswith("aten::")}
    assert rows["aten::mul.out"] == ["native", "1", "-"]
    assert rows["aten::cos"] == ["fallback", "-", "1"]
    assert rows["aten::sin"] == ["both", "1", "1"]
    assert "ops on npy: 1 native, 1 both native and on the CPU" in done.stdout
    found = json.loads((program / "out.json").read_text(encoding="utf-8"))
    ops, advice = found["ops"], found["program"]["advice"]
    mul = ops["aten::mul.out"]
    assert (mul["native"]["calls"], mul["fallback"]["calls"], mul["error"]) == (1, 0, None)
    assert mul["native"]["nbytes"] == 2 * 3 * 4  # the argument that is given twice, and the result
    (site,) = ops["aten::cos"]["sites"]
    line = 1 + (program / "program.py").read_text(encoding="utf-8").splitlines().index("    (d * d).cos()")
    assert site["where"] == f"program.py:{line}"
    assert f"program.py:{line}" in done.stdout

    seconds = {(of, op): row[of]["seconds"] for op, row in ops.items() for of in ("native", "fallback")}
    assert sum(seconds.values()) == pytest.approx(advice["seconds"])
    assert advice["seconds"] < found["program"]["seconds"]
    native = sum(taken for (of, _), taken in seconds.items() if of == "native")
    then = native + sum(seconds["fallback", op] for op in advice["write"])
    assert (advice["now"], advice["then"]) == pytest.approx((native / advice["seconds"], then / advice["seconds"]))
    assert "of that in kernels of npy" in done.stdout


def test_a_module_that_fails(program: Path) -> None:
    done = run("program", "fail", cwd=program)
    assert done.returncode == 1
    (failed,) = [line for line in lines(done.stdout) if "FAILED" in line]
    assert failed[0].startswith("aten::")
    assert f"\n{failed[0]}: RuntimeError:" in done.stdout
    assert "program ended with RuntimeError" in done.stdout
    assert "Traceback" in done.stderr


def test_what_is_no_device(program: Path) -> None:
    (program / "nothing.py").write_text("x = 1\n", encoding="utf-8")
    done = run_in_fork("nothing.py", cwd=program)
    assert done.returncode == 2
    assert "nothing.py registers no device" in done.stderr
    for missing in ("missing.py", "missing", "missing.part", "no/file"):
        done = run_in_fork(missing, cwd=program)
        assert done.returncode == 2
        assert "error: no such file or module" in done.stderr
        assert missing in done.stderr
    done = run_in_fork("program.py", "--dtype", "float32", cwd=program)
    assert done.returncode == 2
    assert "go with --opinfo" in done.stderr
    done = run_in_fork("device.py", "3", "--opinfo", cwd=program)
    assert done.returncode == 2
    assert "3: with --opinfo no program is run" in done.stderr
    assert (
        "no such dtype"
        in run_in_fork("program.py", "--opinfo", "--dtype", "float", "--dtype", "nothing", cwd=program).stderr
    )


def test_a_program_that_fails_before_there_is_a_device(program: Path) -> None:
    (program / "early.py").write_text("import nothing_of_this_name\n", encoding="utf-8")
    for target in ("early.py", "early"):
        done = run_in_fork(target, cwd=program)
        assert done.returncode == 2
        assert f"{target} ended with ModuleNotFoundError before it registered a device" in done.stderr
        assert "register_backend" not in done.stderr
        assert "No module named 'nothing_of_this_name'" in done.stderr


def test_options_of_the_program(program: Path) -> None:
    done = run("--json", "out.json", "program.py", "--", "--epochs", "3", cwd=program)
    assert done.returncode == 0, done.stderr
    assert "arguments: ['--epochs', '3']" in done.stdout
    assert (program / "out.json").exists()
    assert "after --" in run("--help", cwd=program).stdout


@pytest.mark.parametrize("number", ["0", "-1"])
def test_no_samples_are_refused(program: Path, number: str) -> None:
    for arguments in (["--opinfo", "--op", "cos"], []):
        done = run_in_fork("device.py", *arguments, "--samples", number, cwd=program)
        assert done.returncode == 2
        assert ("at least 1" if arguments else "go with --opinfo") in done.stderr


def test_a_file_that_cannot_be_written_is_found_before_the_program_runs(program: Path) -> None:
    for path, problem in (("missing/out.json", "there is no directory"), (".", "this is a directory")):
        done = run_in_fork("program.py", "--json", path, cwd=program)
        assert done.returncode == 2
        assert problem in done.stderr
        assert "Traceback" not in done.stderr
        assert "arguments:" not in done.stdout


def test_the_file_is_mutated_where_the_command_was_given(program: Path) -> None:
    (program / "leaving.py").write_text(DEVICE + "import os\nos.chdir('/')\n", encoding="utf-8")
    assert run("leaving.py", "--json", "out.json", cwd=program).returncode == 0
    assert json.loads((program / "out.json").read_text(encoding="utf-8"))["ops"] == {}


def test_ops_that_failed_are_in_the_table(program: Path) -> None:
    failing = '\n@backend.kernel("aten::cos")\ndef cos(x):\n    raise ValueError("no cos")\n'
    (program / "failing.py").write_text(DEVICE + failing, encoding="utf-8")
    done = run("failing.py", "--opinfo", "--op", "cos", "--samples", 1, "--forward-only", cwd=program)
    assert done.returncode == 1
    assert ["aten::cos", "FAILED", "-", "-"] in lines(done.stdout)
    assert "aten::cos: ValueError: no cos" in done.stdout
    assert "1 failed; 1 of the op tests failed" in done.stdout


def test_a_module_that_is_there_already_is_not_run_again(program: Path) -> None:
    """`import torch` loads the devices of installed packages, and a package loads its device."""
    package = program / "of_package"
    package.mkdir()
    (package / "__init__.py").write_text("import of_package.device\n", encoding="utf-8")
    (package / "device.py").write_text(DEVICE, encoding="utf-8")
    for module in ("of_package.device", "of_package"):
        done = run(module, "--opinfo", "--op", "mul", "--samples", 1, "--forward-only", cwd=program)
        assert done.returncode == 0, done.stderr
        assert "1 of 1 ops pass" in done.stdout
        assert "RuntimeWarning" not in done.stderr


def test_op_tests(program: Path) -> None:
    arguments = ["--opinfo", "--op", "mul", "--op", "cos", "--op", "to_sparse", "--samples", 2, "--json", "out.json"]
    done = run("device.py", *arguments, "--dtype", "float32", "--dtype", "int64", cwd=program)
    assert done.returncode == 1  # to_sparse
    assert "float32    forward                  2 of 3 ops pass" in done.stdout
    assert "float32    forward and backward     2 of 3 ops pass" in done.stdout
    assert "int64      forward                  2 of 3 ops pass" in done.stdout
    assert "    to_sparse: UnsupportedError" in done.stdout
    assert any(line[:1] == ["aten::mul.out"] for line in lines(done.stdout))
    scores = json.loads((program / "out.json").read_text(encoding="utf-8"))["scores"]
    assert [(score["dtype"], score["backward"]) for score in scores] == [
        ("float32", False),
        ("float32", True),
        ("int64", False),
    ]
    assert scores[0]["passed"] == ["cos", "mul"]


def register() -> None:
    register_backend("npy")
    importlib.import_module("torch.testing._internal.common_methods_invocations")  # once, and not in each fork


on_device = isolated(register)


def score_of(op: str, **options) -> op_tests.Score:
    return next(op_tests.run(get_backend(), [torch.float32], patterns=[op], samples=2, **options))


@on_device
def test_a_wrong_kernel_fails() -> None:
    backend = get_backend()
    backend.kernel("aten::cos")(lambda x: backend.wrap(backend.host(x).sin()))
    score = score_of("cos", backward=False)
    assert list(score.failed) == ["cos"]
    assert "Tensor-likes are not close" in score.failed["cos"]
    assert (score.total, score.passed, score.backward) == (1, [], False)
    assert sum(spent.calls for (op, _), spent in score.journal.native.items() if op == "aten::cos") == 1  # but wrong


@on_device
def test_a_test_that_fails_leaves_its_record() -> None:
    get_backend().kernel("aten::cos")(refuse)
    score = score_of("cos", backward=False)
    assert score.failed == {"cos": "ValueError: no cosines"}
    assert score.journal.failed == {"aten::cos": "ValueError: no cosines"}


def sample(*args: object, **options: object):
    core = importlib.import_module("torch.testing._internal.opinfo.core")  # takes seconds
    return core.SampleInput(*args, **options)


def refuse(x):
    raise ValueError("no cosines")


@on_device
def test_results_are_on_the_cpu_where_nothing_of_the_device_is_named() -> None:
    (score,) = op_tests.run(get_backend(), [torch.int64], patterns=["arange", "linspace", "randint"])
    assert score.passed == ["arange", "linspace", "randint"]
    ones = torch.ones(2, device="npy")
    assert not op_tests._asks_for(sample(1, args=(3, 1)), "npy")
    assert op_tests._asks_for(sample(1, args=(3, 1), kwargs={"device": "npy:0"}), "npy")
    assert op_tests._asks_for(sample([ones], args=(torch.ones(2),)), "npy")
    assert not op_tests._asks_for(sample(ones, kwargs={"device": torch.device("cpu")}), "npy")


class Misplaced:
    """An op whose results are on the CPU."""

    name, variant_test_name = "misplaced", ""

    def sample_inputs(self, device, dtype, requires_grad):
        yield sample(torch.ones(2, device=device, dtype=dtype))

    def __call__(self, x):
        return x.cpu()


class Doubled(Misplaced):
    """An op that returns two results on the device, and one on the CPU."""

    def __call__(self, x):
        return x if x.is_cpu else (x, x)


@on_device
def test_another_number_of_results_fails() -> None:
    _, _, error = op_tests._check(get_backend(), Doubled(), torch.float32, False, None)
    assert error.startswith("AssertionError: 2 results instead of 1")


@on_device
def test_a_result_on_the_cpu_fails() -> None:
    _, _, error = op_tests._check(get_backend(), Misplaced(), torch.float32, False, None)
    assert error.startswith("AssertionError: a result is on cpu")


@on_device
def test_a_kernel_that_crashes_is_one_failure() -> None:
    backend = get_backend()
    backend.kernel("aten::cos")(crash)
    score = score_of("cos*")
    assert set(score.failed) == {"cos"}
    assert "SIGSEGV" in score.failed["cos"]
    assert "cosh" in score.passed


def crash(x):
    import ctypes  # noqa: PLC0415

    ctypes.string_at(0)


@on_device
def test_what_the_cpu_cannot_do_is_skipped() -> None:
    score = score_of("jiterator_unary", backward=False)
    assert score.skipped == ["jiterator_unary"]


@on_device
def test_rows() -> None:
    record = fallbacks.Journal()
    record.native.update({("aten::a", "x.py:1"): Spent(3, 1.0), ("aten::b", "x.py:2"): Spent(1, 1.0)})
    record.fallback.update({("aten::b", "x.py:2"): Spent(90, 1.0), ("aten::c", "x.py:3"): Spent(1, 5.0)})
    record.fallback["aten::c", "x.py:4"] = Spent(2, 12.0)
    record.failed["aten::d"] = "ValueError: wrong"
    found = coverage.rows(record)
    assert [(row.op, row.status) for row in found] == [
        ("aten::d", "FAILED"),
        ("aten::c", "fallback"),
        ("aten::b", "both"),
        ("aten::a", "native"),
    ]
    assert found[0].error == "ValueError: wrong"
    assert found[1].fallback == Spent(3, 17.0)
    assert [place for place, _ in found[1].sites] == ["x.py:4", "x.py:3"]
    assert coverage.advice(found) == coverage.Advice(20.0, 0.1, ["aten::c"], 0.95)


@on_device
def test_advice_where_nothing_ran_on_the_cpu_or_much_did() -> None:
    assert coverage.advice([]) == coverage.Advice(0.0, 1.0, [], 1.0)
    record = fallbacks.Journal()
    record.fallback.update({(f"aten::op{i}", "x.py:1"): Spent(1, 1.0) for i in range(20)})
    found = coverage.advice(coverage.rows(record))
    assert (found.now, len(found.write)) == (0.0, 10)
    assert found.then == pytest.approx(0.5)


@on_device
def test_the_time_of_a_kernel_is_its_own() -> None:
    """What a kernel calls on the device counts for the op that it calls, and a failure does not count."""
    backend = get_backend()

    @backend.kernel("aten::sin")
    def slow(x):
        time.sleep(0.2)
        return backend.wrap(backend.host(x).sin())

    backend.kernel("aten::cos")(lambda x: x.sin())
    backend.kernel("aten::tan")(refuse)
    backend.kernel("aten::exp")(lambda x: NotImplemented)
    x = torch.ones(4, device="npy")
    record = fallbacks.start()
    x.cos()
    x.exp()
    with pytest.raises(ValueError, match="no cosines"):
        x.tan()
    fallbacks.open_journals.clear()
    found = {row.op: row for row in coverage.rows(record)}
    assert {op: row.status for op, row in found.items()} == {
        "aten::sin": "native",
        "aten::cos": "native",
        "aten::exp": "fallback",
        "aten::tan": "FAILED",
    }
    assert found["aten::cos"].native.seconds < 0.1 < 0.2 <= found["aten::sin"].native.seconds
    assert [(row.native + row.fallback).nbytes for row in found.values()] == [0, 32, 32, 32]  # of tan, then by time
    x.cos()
    assert found["aten::cos"].native.calls == 1  # nobody measures
