"""run_isolated and run_each_isolated: values, errors, output, time, and processes that die."""

from __future__ import annotations

import ctypes
import os
import sys
import time

import pytest
import torch

from customops.errors import CustomOpsError
from customops.testing import IsolationError, run_each_isolated, run_isolated

state: list[str] = []


class LocalError(Exception):
    """Of this file, which is no module that could be imported by its name."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(f"{number}: {text}")  # cannot be made again from its args
        self.number = number


def add(a: torch.Tensor, b: int) -> torch.Tensor:
    print("adding")
    print("to stderr", file=sys.stderr)
    return a + b


def process() -> int:
    return os.getpid()


def fail() -> None:
    raise KeyError("missing")


def fail_oddly() -> None:
    raise LocalError(3, "three")


def crash() -> None:
    ctypes.string_at(0)


def leave() -> None:
    os._exit(7)


def sleep() -> None:
    time.sleep(60)


def give_a_function() -> object:
    return lambda: 0


def set_up() -> None:
    state.append("set up")


def change() -> list[str]:
    state.append("changed")
    return state


def look() -> list[str]:
    return state


def directory() -> str:
    return os.getcwd() + os.environ["CUSTOMOPS_TEST"]


def test_a_function() -> None:
    done = run_isolated(add, torch.ones(2), 2)
    assert torch.equal(done.value, torch.full((2,), 3.0))
    assert done.stdout == "adding\n"
    assert "to stderr" in done.stderr


def test_code() -> None:
    assert run_isolated("import os\nresult = os.getpid(), __name__").value[1] == "__main__"
    assert run_isolated("x = 1").value is None


def test_it_is_another_process() -> None:
    assert run_isolated(process).value != os.getpid()
    assert state == []


def test_an_error_is_raised_with_its_traceback() -> None:
    with pytest.raises(KeyError, match="missing") as info:
        run_isolated(fail)
    if sys.version_info >= (3, 11):
        assert "in fail" in "\n".join(info.value.__notes__)
    with pytest.raises(ZeroDivisionError):
        run_isolated("1 / 0")


def test_an_error_that_cannot_be_sent_is_told() -> None:
    with pytest.raises(IsolationError, match=r"LocalError: 3: three"):
        run_isolated(fail_oddly)


def test_a_value_that_cannot_be_sent_is_told() -> None:
    with pytest.raises(IsolationError, match="the value cannot be sent"):
        run_isolated(give_a_function)


def test_a_segfault_is_an_error() -> None:
    with pytest.raises(IsolationError, match="died of SIGSEGV") as info:
        run_isolated(crash)
    assert info.value.returncode == -11
    assert "in crash" in info.value.stderr  # faulthandler says where


def test_leaving_is_an_error() -> None:
    with pytest.raises(IsolationError, match="without a result \\(status 7\\)"):
        run_isolated(leave)


def test_time_runs_out() -> None:
    start = time.monotonic()
    with pytest.raises(IsolationError, match="still running"):
        run_isolated("import time; time.sleep(60)", timeout=5)
    assert time.monotonic() - start < 30


@pytest.mark.parametrize("function", [lambda: 0, print, test_code.__call__])
def test_what_cannot_be_found_is_refused(function) -> None:
    if function is print:
        assert run_isolated(print, "x").stdout == "x\n"
        return
    with pytest.raises(CustomOpsError, match="another process cannot find"):
        run_isolated(function)


def test_cwd_and_env(tmp_path) -> None:
    done = run_isolated(directory, cwd=tmp_path, env={"CUSTOMOPS_TEST": "!"})
    assert done.value == f"{tmp_path}!"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_each_has_a_fork_of_its_own() -> None:
    changed, looked, died, failed, late = run_each_isolated([change, look, crash, fail, sleep], setup=set_up, timeout=3)
    assert changed.get() == ["set up", "changed"]
    assert looked.get() == ["set up"]
    assert isinstance(died.error, IsolationError)
    assert "SIGSEGV" in str(died.error)
    assert isinstance(failed.error, KeyError)
    assert "ran out of time" in str(late.error)


def test_a_set_up_that_fails_is_raised() -> None:
    with pytest.raises(KeyError, match="missing"):
        run_each_isolated([look], setup=fail)
