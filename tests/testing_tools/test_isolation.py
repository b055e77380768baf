"""run_isolated and run_each_isolated: values, errors, output, time, and processes that die."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from helpers.warm import PYTHON

from customops.errors import CustomOpsError
from customops.testing import IsolationError, run_each_isolated, run_isolated

pytestmark = pytest.mark.process


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


class OnlyThere:
    def __reduce__(self):
        return eval, ("__import__('os').environ['ONLY_THERE']",)


def give_what_is_only_there() -> object:
    return OnlyThere()


def set_up() -> None:
    state.append("set up")


def change() -> list[str]:
    state.append("changed")
    return state


def look() -> list[str]:
    return state


def first_letters(word: str = "word", *, count: int = 1) -> str:
    return word[:count]


def doubled(function):
    @functools.wraps(function)
    def run(*args):
        return 2 * function(*args)

    return run


def one() -> int:
    return 1


one_undecorated = one
two = one = doubled(one)


class Greeter:
    def __init__(self, word: str) -> None:
        self.word = word

    def greet(self, name: str) -> str:
        return f"{self.word}, {name}"

    @classmethod
    def make(cls) -> str:
        return cls.__name__


def run_out_of_time_deafly() -> None:
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    child = subprocess.Popen(["sleep", "300"])
    Path(os.environ["CUSTOMOPS_TEST"]).write_text(f"{os.getpid()} {child.pid}")
    time.sleep(300)


def leave_a_process_behind() -> int:
    return subprocess.Popen(["sleep", "300"]).pid  # it holds stdout and stderr


def leave_a_thread_behind() -> int:
    threading.Thread(target=time.sleep, args=(300,)).start()
    return 1


def kill_the_parent() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1)


def is_there(pid: int) -> bool:
    """Does it run? One that ended, and that nobody has asked about, does not."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def wait_until(condition, seconds: float = 30) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


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


def test_code_is_a_program_of_its_own() -> None:
    code = "import pickle, sys\nclass A: x: int = 1\nresult = A.__annotations__['x'] is int, bool(pickle.dumps(A()))"
    assert run_isolated(code).value == (True, True)  # no __future__ imports of another file; pickle finds its classes
    assert run_isolated("import sys\nresult = 3\nsys.exit()").value == 3
    with pytest.raises(SystemExit, match="2"):
        run_isolated("import sys\nsys.exit(2)")


@pytest.mark.parametrize("kind", [Path, str])
def test_a_file(kind, tmp_path, monkeypatch) -> None:
    (tmp_path / "other.py").write_text("value = 3\n")
    code = "import other, sys\nresult = [__name__, __file__, sys.argv, other.value]\nprint('hello')\n"
    (tmp_path / "program.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    done = run_isolated(kind("program.py"), cwd="/")
    file = str(tmp_path / "program.py")
    assert done.value == ["__main__", file, [file], 3]
    assert done.stdout == "hello\n"


def test_what_is_no_file_is_refused(tmp_path) -> None:
    for missing in ("missing.py", tmp_path / "missing", tmp_path):
        with pytest.raises(CustomOpsError, match="no such file"):
            run_isolated(missing)
    with pytest.raises(CustomOpsError, match="only a function takes arguments"):
        run_isolated("x = 1", 2)


def test_what_is_bound_goes_along() -> None:
    assert run_isolated(functools.partial(first_letters, "more", count=2)).value == "mo"
    assert run_isolated(functools.partial(first_letters, count=3), "other").value == "oth"
    assert run_isolated(Greeter.make).value == "Greeter"


def test_decorators_go_along() -> None:
    assert run_isolated(two).value == 2
    assert run_isolated(one_undecorated).value == 1


def test_it_is_another_process() -> None:
    assert run_isolated(process).value != os.getpid()
    assert state == []


def test_an_error_is_raised_with_its_traceback() -> None:
    with pytest.raises(KeyError, match="missing") as info:
        run_isolated(fail)
    assert "in fail" in "\n".join(info.value.__notes__)
    with pytest.raises(ZeroDivisionError):
        run_isolated("1 / 0")


def test_an_error_that_cannot_be_sent_is_told() -> None:
    with pytest.raises(IsolationError, match=r"LocalError: 3: three"):
        run_isolated(fail_oddly)


def test_a_value_that_cannot_be_sent_is_told() -> None:
    with pytest.raises(IsolationError, match="the value cannot be sent"):
        run_isolated(give_a_function)


def test_a_value_that_only_the_child_can_read_is_told() -> None:
    with pytest.raises(IsolationError, match="what the child process sent cannot be read here: 'ONLY_THERE'"):
        run_isolated(give_what_is_only_there, env={"ONLY_THERE": "1"})


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
        run_isolated("import time; time.sleep(60)", timeout=2)
    assert time.monotonic() - start < 30


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_ctrl_c_ends_the_child_and_what_it_started(tmp_path) -> None:
    pids = tmp_path / "pids"
    code = f"""
import os, subprocess, time
child = subprocess.Popen(["sleep", "300"])
open({str(pids)!r}, "w").write(f"{{os.getpid()}} {{child.pid}}\\n")
time.sleep(300)
"""
    program = f"""
import signal
from customops.testing import run_isolated
signal.signal(signal.SIGINT, signal.default_int_handler)  # nohup ignores it
run_isolated({code!r})
"""
    parent = subprocess.Popen([PYTHON, "-c", program], stderr=subprocess.PIPE, text=True)
    assert wait_until(lambda: pids.exists() and pids.read_text().endswith("\n"), 60)
    parent.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in parent.communicate(timeout=30)[1]
    assert wait_until(lambda: not any(is_there(int(pid)) for pid in pids.read_text().split()))


@pytest.mark.skipif(os.name == "nt", reason="sleep is a program of Unix")
def test_a_process_left_behind_is_not_waited_for() -> None:
    start = time.monotonic()
    pid = run_isolated(leave_a_process_behind, timeout=60).value
    assert time.monotonic() - start < 50
    os.kill(pid, signal.SIGKILL)  # it was left alone, as by any program


def test_a_process_that_does_not_end_is_told_from_a_function_that_does_not() -> None:
    for seconds in (3, 20, 200):  # on a machine under load, the function may not have returned by then
        with pytest.raises(IsolationError) as caught:
            run_isolated(leave_a_thread_behind, timeout=seconds)
        if f"returned, but the process did not end within {seconds} seconds" in str(caught.value):
            return
    pytest.fail(str(caught.value))


@pytest.mark.parametrize("function", [lambda: 0, print, test_code.__call__])
def test_what_cannot_be_found_is_refused(function) -> None:
    if function is print:
        assert run_isolated(print, "x").stdout == "x\n"
        return
    with pytest.raises(CustomOpsError, match="another process cannot find"):
        run_isolated(function)


def test_a_method_of_an_object_is_refused() -> None:
    with pytest.raises(CustomOpsError, match="another process cannot find") as info:
        run_isolated(Greeter("Hello").greet, "you")
    assert info.value.fix == "functools.partial(Greeter.greet, object) sends the object along"


def test_what_is_not_in_a_file_is_refused() -> None:
    program = "from customops.testing import run_isolated\ndef f(): pass\nrun_isolated(f)"
    done = subprocess.run([PYTHON, "-c", program], capture_output=True, text=True)
    assert "another process cannot find this function" in done.stderr
    assert "pass its code as a string" in done.stderr


def test_cwd_and_env(tmp_path) -> None:
    env = {"CUSTOMOPS_TEST": "!", "PYTHONHASHSEED": "0"}  # by the latter no fork of an interpreter of the tests
    done = run_isolated(directory, cwd=tmp_path, env=env)
    assert done.value == f"{tmp_path}!"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_each_has_a_fork_of_its_own() -> None:
    changed, looked, died, failed, late = run_each_isolated([change, look, crash, fail, sleep], setup=set_up, timeout=3)
    assert changed.get() == ["set up", "changed"]
    assert looked.get() == ["set up"]
    assert isinstance(died.error, IsolationError)
    assert "SIGSEGV" in str(died.error)
    assert isinstance(failed.error, KeyError)
    assert "ran out of time: it was still running after 3 seconds" in str(late.error)
    assert late.error.returncode is None


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_a_fork_that_is_deaf_is_killed_alone(tmp_path) -> None:
    functions = [change, run_out_of_time_deafly, look]
    env = {"CUSTOMOPS_TEST": str(tmp_path / "pids")}
    changed, late, looked = run_each_isolated(functions, setup=set_up, timeout=2, env=env)
    assert changed.get() == ["set up", "changed"]
    assert looked.get() == ["set up"]
    assert "ran out of time" in str(late.error)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    assert wait_until(lambda: not any(map(is_there, pids)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_what_others_did_survives_the_end_of_the_process_that_forks() -> None:
    changed, died, looked = run_each_isolated([change, kill_the_parent, look], setup=set_up)
    assert changed.get() == ["set up", "changed"]
    for done in (died, looked):
        assert "died of SIGKILL" in str(done.error)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_arguments_are_bound_for_each() -> None:
    functions = [functools.partial(first_letters, word, count=2) for word in ("more", "other")]
    assert [done.get() for done in run_each_isolated(functions)] == ["mo", "ot"]


def test_a_set_up_that_fails_is_raised() -> None:
    with pytest.raises(KeyError, match="missing"):
        run_each_isolated([look], setup=fail)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_set_up_that_dies_is_an_error() -> None:
    with pytest.raises(IsolationError, match="without a result \\(status 7\\)"):
        run_each_isolated([look], setup=leave)
