"""A process of its own for what cannot be undone, or may end the process: a device registration, a segfault.

`run_isolated` runs one function, piece of code or file in a fresh interpreter. `run_each_isolated` runs many functions
after one set-up, each in a fork of the same fresh interpreter, so that importing torch is paid once.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from customops.errors import CustomOpsError

#: Seconds that importing torch may take on a busy machine.
_STARTING = 60.0

#: Seconds that a process has for ending by itself when its alarm rings.
_GRACE = 1.0

#: The exit code of a process that ran out of time, whatever ended it.
_LATE = -int(getattr(signal, "SIGALRM", 14))


class IsolationError(CustomOpsError, RuntimeError):
    """A child process ended without a result: killed by a signal, out of time, or with an error nobody can send.

    Attributes:
        returncode: of the process; negative for a signal, None for one that ran out of time.
        stdout, stderr: what it printed.
    """

    def __init__(self, problem: str, *, returncode: int | None = None, stdout: str = "", stderr: str = "") -> None:
        self.returncode = returncode
        self.stdout = stdout
        self.stderr = stderr
        tail = "\n".join(stderr.rstrip().splitlines()[-30:])
        super().__init__(f"{problem}\n\n{tail}" if tail else problem)


@dataclass(frozen=True)
class Isolated:
    """What a child process did: `value` is what the function returned, `error` what it raised."""

    value: Any = None
    error: BaseException | None = None
    stdout: str = ""
    stderr: str = ""

    def get(self) -> Any:
        """The value; raises the error if there is one."""
        if self.error is not None:
            raise self.error
        return self.value


def run_isolated(
    target: Callable[..., Any] | str | os.PathLike[str],
    /,
    *args: Any,
    timeout: float = 120.0,
    cwd: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
) -> Isolated:
    """Run a function, code, or a file in a fresh interpreter.

    Args:
        target: a function of a module (not a lambda or a nested one), found there by file and name, or a
            `functools.partial` of one. Or a program, whose value is what it leaves in the name ``result``: a file, as
            a `pathlib.Path` or a string of one line that ends in ``.py``; any other string is Python code.
        args: arguments of the function; these and its value are pickled. Return ``x.cpu()``, not tensors of a device
            that this process does not have.
        timeout: seconds after which the process is killed, and what it started with it.
        cwd: where it runs. A file is looked up from the directory of this process.
        env: set on top of the environment of this process.

    Returns:
        The value, and what was printed.

    Raises:
        CustomOpsError: another process cannot find the function, or there is no such file.
        IsolationError: the process died (of a segfault, say), or ran out of time.
        BaseException: what the function raised, or the program (``sys.exit(0)`` is its end); its traceback there is in
            the notes of the exception.
    """
    if isinstance(target, (str, os.PathLike)):
        if args:
            raise CustomOpsError("only a function takes arguments", got=f"{len(args)} for a program")
        task: Callable[[], Any] = _program(target)
    else:
        task = functools.partial(_sendable(target), *args)
    (done,) = _run([task], None, timeout, cwd, env, fork=False)
    done.get()
    return done


def run_each_isolated(
    functions: Iterable[Callable[[], Any]],
    *,
    setup: Callable[[], Any] | None = None,
    timeout: float = 120.0,
    cwd: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
) -> list[Isolated]:
    """Run functions without arguments, each in a fork of a fresh interpreter in which `setup` has run.

    `functools.partial` binds arguments to one. What one does to its process the next does not see, and one that dies
    is an error of its own. `setup` must start no threads (a backward does): they do not survive a fork. Where there is
    no fork (Windows), each has its own interpreter.

    Args:
        timeout: seconds for each. One that takes longer is killed; the others are not concerned.

    Returns:
        One for each function, in order; none of the errors is raised.

    Raises:
        Exception: what `setup` raised.
        IsolationError: the process died or ran out of time in `setup`.
    """
    tasks = [_sendable(function) for function in functions]
    first = _sendable(setup) if setup is not None else None
    if hasattr(os, "fork"):
        return _run(tasks, first, timeout, cwd, env, fork=True)
    return [done for task in tasks for done in _run([task], first, timeout, cwd, env, fork=False)]


# What to run ----------------------------------------------------------------------------------------------------


def _sendable(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, so that it can be pickled for a process which finds its module by file."""
    if isinstance(function, functools.partial):
        return functools.partial(_sendable(function.func), *function.args, **function.keywords)
    return _Reference.to(function)


@dataclass(frozen=True)
class _Reference:
    """A function by file and name: the child imports the file, under the same name as here."""

    module: str
    file: str | None
    name: str
    decorators: int  #: how many are around it there

    @classmethod
    def to(cls, function: Callable[..., Any]) -> _Reference:
        module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
        file = getattr(sys.modules.get(module or ""), "__file__", None)
        is_typed_in = module == "__main__" and file is None
        decorators = _decorators_of(function, module, name) if module and name and not is_typed_in else None
        if not module or not name or decorators is None:
            is_bound = isinstance(function, types.MethodType) and not isinstance(function.__self__, type)
            raise CustomOpsError(
                "another process cannot find this function",
                expected="a function that the module of a file has under its name",
                got=repr(function),
                fix=f"functools.partial({name}, object) sends the object along"
                if is_bound
                else "move it to the top of a file, or pass its code as a string",
            )
        return cls(module, file, name, decorators)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        function = functools.reduce(getattr, self.name.split("."), self._module())
        for _ in range(self.decorators):
            function = function.__wrapped__
        return function(*args, **keywords)

    def _module(self) -> Any:
        # As under another name: ``__main__`` here is the child's own program there.
        name = "__isolated_main__" if self.module == "__main__" else self.module
        if name in sys.modules:
            return sys.modules[name]
        if self.file is None or name.startswith("customops."):
            return importlib.import_module(name)
        spec = importlib.util.spec_from_file_location(name, self.file)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


def _decorators_of(function: Callable[..., Any], module: str, name: str) -> int | None:
    """How many are around it where its module has it under its name; None if something else is there, or nothing."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    count = 0
    while found is not None:
        # A class method is another object each time.
        if found is function or (isinstance(found, types.MethodType) and found == function):
            return count
        found, count = getattr(found, "__wrapped__", None), count + 1
    return None


def _program(target: str | os.PathLike[str]) -> _Code | _File:
    if isinstance(target, str) and ("\n" in target or not target.endswith(".py")):
        return _Code(target)
    path = Path(target).resolve()
    if not path.is_file():
        raise CustomOpsError(
            "no such file",
            expected="a Python file; a string of one line that ends in .py is the path of one, any other is code",
            got=str(path),
        )
    return _File(str(path))


@dataclass(frozen=True)
class _Code:
    text: str

    def __call__(self) -> Any:
        return _run_as_main(types.ModuleType("__main__"), self.text, "<isolated>")


@dataclass(frozen=True)
class _File:
    path: str

    def __call__(self) -> Any:
        sys.argv[:] = [self.path]
        sys.path.insert(0, os.path.dirname(self.path))  # as for `python FILE`
        module = types.ModuleType("__main__")
        module.__file__ = self.path
        return _run_as_main(module, Path(self.path).read_bytes(), self.path)


def _run_as_main(module: types.ModuleType, source: str | bytes, name: str) -> Any:
    sys.modules["__main__"] = module  # pickle and multiprocessing look there
    code = compile(source, name, "exec", dont_inherit=True)  # the __future__ imports here are not its own
    try:
        exec(code, vars(module))
    except SystemExit as stop:
        if stop.code not in (None, 0):
            raise
    return vars(module).get("result")


#: What the fresh interpreter runs.
_PROGRAM = "import sys; from customops.testing.isolation import _child; _child(sys.argv[1])"


# The parent -----------------------------------------------------------------------------------------------------


def _run(
    tasks: Sequence[Callable[[], Any]],
    setup: Callable[[], Any] | None,
    timeout: float,
    cwd: str | os.PathLike[str] | None,
    env: Mapping[str, str] | None,
    *,
    fork: bool,
) -> list[Isolated]:
    # What the child left running may hold its files open, and Windows does not delete such files.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        place = Path(directory)
        # Each fork has a limit of its own; this is for what hangs where none should.
        whole = (timeout + _STARTING) * 2 + (timeout + _GRACE) * len(tasks) if fork else timeout
        # In two steps: the tasks may need the path to be read.
        work = pickle.dumps((setup, list(tasks), timeout, fork))
        (place / "tasks").write_bytes(pickle.dumps((list(sys.path), whole, work)))
        environment = {**os.environ, **(env or {})}
        # The package may be there only because this process has its directory on the path.
        root = str(Path(__file__).parents[2])
        environment["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [environment.get("PYTHONPATH")])])
        code = _run_session(place, whole, cwd, environment)
        stdout, stderr = _read(place / "all.out"), _read(place / "all.err")
        if (place / "setup").exists():
            raise _load(place / "setup", stdout, stderr).error or IsolationError("the set-up failed")
        if not fork:
            return [_outcome(place / str(i), whole, code, stdout, stderr) for i in range(len(tasks))]
        if not (place / "ready").exists():
            raise _failure(timeout + _STARTING, code, stdout, stderr)
        return [_outcome_of_fork(place / str(i), timeout, code) for i in range(len(tasks))]


def _run_session(place: Path, limit: float, cwd: str | os.PathLike[str] | None, environment: Mapping[str, str]) -> int:
    """The exit code of the child, which is over when it ends: what it started may go on, and hold its output open."""
    command = [sys.executable, "-X", "faulthandler", "-c", _PROGRAM, str(place)]
    with (place / "all.out").open("wb") as out, (place / "all.err").open("wb") as err:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,  # so that it can be killed with all that it started
        )
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return _LATE
    finally:
        # It is out of time, or this process got a Ctrl-C; or a fork was out of time, in a process that it waited for.
        if process.poll() is None or any(_read(path) == str(_LATE) for path in place.glob("*.code")):
            _kill_session(process)


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()


def _outcome_of_fork(path: Path, timeout: float, default: int = 0) -> Isolated:
    """What a fork left; `default` is the exit code of the process that should have waited for it."""
    code = int(_read(path.with_suffix(".code")) or default)
    return _outcome(path, timeout, code, _read(path.with_suffix(".out")), _read(path.with_suffix(".err")))


def _outcome(path: Path, timeout: float, code: int, stdout: str, stderr: str) -> Isolated:
    returned = path.exists()
    if returned:
        done = _load(path, stdout, stderr)
        if code != _LATE or done.error is not None:
            return done
    error = _failure(timeout, code, stdout, stderr, returned=returned)
    return Isolated(error=error, stdout=stdout, stderr=stderr)


def _failure(timeout: float, code: int, stdout: str, stderr: str, *, returned: bool = False) -> IsolationError:
    if code == _LATE and returned:
        problem = f"what ran in the child process returned, but the process did not end within {timeout:g} seconds: "
        problem += "it waits for a thread or a process that was started there"
    elif code == _LATE:
        problem = f"the child process ran out of time: it was still running after {timeout:g} seconds"
    elif code < 0:
        problem = f"the child process died of {signal.Signals(-code).name}"
    else:
        problem = f"the child process ended without a result (status {code})"
    return IsolationError(problem, returncode=None if code == _LATE else code, stdout=stdout, stderr=stderr)


def _load(path: Path, stdout: str, stderr: str) -> Isolated:
    try:
        value, error = pickle.loads(path.read_bytes())
    except Exception as problem:
        error = IsolationError(f"what the child process sent cannot be read here: {problem}", stderr=stderr)
        return Isolated(error=error, stdout=stdout, stderr=stderr)
    return Isolated(value, error, stdout, stderr)


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


# The child ------------------------------------------------------------------------------------------------------


def _child(directory: str) -> None:
    place = Path(directory)
    paths, limit, work = pickle.loads((place / "tasks").read_bytes())
    _set_alarm(limit + _STARTING)  # for when the parent is no more
    sys.path[:] = list(dict.fromkeys([*paths, *sys.path]))
    setup, tasks, timeout, fork = pickle.loads(work)
    if setup is not None:
        if fork:
            _set_alarm(timeout + _STARTING)
        outcome = _attempt(setup)
        if outcome[1] is not None:
            _save(place / "setup", *outcome)
            return
    _set_alarm(limit + _STARTING)
    (place / "ready").touch()
    for i, task in enumerate(tasks):
        if fork:
            _fork(task, place / str(i), timeout)
        else:
            _save(place / str(i), *_attempt(task))


def _set_alarm(seconds: float) -> None:
    if hasattr(signal, "setitimer"):  # not on Windows
        signal.setitimer(signal.ITIMER_REAL, seconds)


def _attempt(function: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    try:
        return function(), None
    except BaseException as error:
        return None, error


def in_fork(function: Callable[[], Any], timeout: float) -> Isolated:
    """Call a function in a fork of this process, and bring back what it returned, raised or printed."""
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory) / "outcome"
        _fork(function, place, timeout)
        return _outcome_of_fork(place, timeout)


def _fork(function: Callable[[], Any], place: Path, timeout: float) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        _be_the_fork(function, place, timeout)
    place.with_suffix(".code").write_text(str(_wait(child, timeout + _GRACE)))


def _be_the_fork(function: Callable[[], Any], place: Path, timeout: float) -> NoReturn:
    try:
        for stream, suffix in ((1, ".out"), (2, ".err")):
            os.dup2(os.open(place.with_suffix(suffix), os.O_CREAT | os.O_WRONLY), stream)
        _set_alarm(timeout)
        _save(place, *_attempt(function))
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # never back into the loop that forks
    os._exit(0)


def _wait(child: int, limit: float) -> int:
    """The exit code of a fork. One that does not heed its alarm is killed; so is one at a Ctrl-C here."""
    end, pause, running, status = time.monotonic() + limit, 0.0005, True, 0
    try:
        while running and time.monotonic() < end:
            time.sleep(pause)
            pause = min(2 * pause, 0.01)
            ended, status = os.waitpid(child, os.WNOHANG)
            running = not ended
    finally:
        if running:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return _LATE if running else os.waitstatus_to_exitcode(status)


def _save(path: Path, value: Any, error: BaseException | None) -> None:
    """Write the outcome; one that cannot be pickled is told as text."""
    if error is not None:
        text = "".join(traceback.format_exception(error))
        _add_note(error, f"in the child process:\n{text}")
    try:
        data = pickle.dumps((value, error))
        pickle.loads(data)  # an exception may well be pickled and not be made again
    except Exception as problem:
        what = traceback.format_exc() if error is None else "".join(traceback.format_exception(error))
        kind = "value" if error is None else f"error ({type(error).__name__}: {error})"
        data = pickle.dumps((None, IsolationError(f"the {kind} cannot be sent: {problem}", stderr=what)))
    temporary = path.with_suffix(".partial")
    temporary.write_bytes(data)
    temporary.rename(path)


def _add_note(error: BaseException, note: str) -> None:
    if sys.version_info >= (3, 11):
        error.add_note(note)
