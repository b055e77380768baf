"""A process of its own for what cannot be undone, or may end the process: a device registration, a segfault.

`run_isolated` runs one function or piece of code in a fresh interpreter. `run_each_isolated` runs many functions after
one set-up, each in a fork of the same fresh interpreter, so that importing torch is paid once.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from customops.errors import CustomOpsError, innermost


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
    target: Callable[..., Any] | str,
    /,
    *args: Any,
    timeout: float = 120.0,
    cwd: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
) -> Isolated:
    """Run a function, or code, in a fresh interpreter.

    Args:
        target: a function of a module (not a lambda or a nested one), found there by file and name; or Python code,
            whose value is what it leaves in the name ``result``.
        args: arguments of the function; these and its value are pickled. Return ``x.cpu()``, not tensors of a device
            that this process does not have.
        timeout: seconds after which the process is killed.
        env: set on top of the environment of this process.

    Returns:
        The value, and what was printed.

    Raises:
        IsolationError: the process died (of a segfault, say), or ran out of time.
        BaseException: what the function raised; its traceback there is in the notes of the exception.
    """
    task = _Task(_Code(target) if isinstance(target, str) else _Reference.to(target), args)
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

    What one does to its process the next does not see, and one that dies is an error of its own. `setup` must start no
    threads (a backward does): they do not survive a fork. Where there is no fork (Windows), each has its own
    interpreter.

    Args:
        timeout: for each.

    Returns:
        One for each function, in order; none of the errors is raised.

    Raises:
        Exception: what `setup` raised.
    """
    tasks = [_Task(_Reference.to(function), ()) for function in functions]
    first = _Reference.to(setup) if setup is not None else None
    if hasattr(os, "fork"):
        return _run(tasks, first, timeout, cwd, env, fork=True)
    return [done for task in tasks for done in _run([task], first, timeout, cwd, env, fork=False)]


# What to run ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Reference:
    """A function by file and name: the child imports the file, under the same name as here."""

    module: str
    file: str | None
    name: str

    @classmethod
    def to(cls, function: Callable[..., Any]) -> _Reference:
        inner = innermost(function)
        module, name = getattr(inner, "__module__", None), getattr(inner, "__qualname__", "<lambda>")
        if not module or "<" in name:
            raise CustomOpsError(
                "another process cannot find this function",
                expected="a function at the top of a module",
                got=repr(function),
                fix="move it there, or pass its code as a string",
            )
        return cls(module, getattr(sys.modules.get(module), "__file__", None), name)

    def load(self) -> Callable[..., Any]:
        value: Any = self._module()
        for part in self.name.split("."):
            value = getattr(value, part)
        return innermost(value)

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


@dataclass(frozen=True)
class _Code:
    text: str

    def load(self) -> Callable[..., Any]:
        return self

    def __call__(self) -> Any:
        namespace: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(self.text, "<isolated>", "exec"), namespace)
        return namespace.get("result")


@dataclass(frozen=True)
class _Task:
    target: Any
    args: tuple[Any, ...]

    def __call__(self) -> Any:
        return self.target.load()(*self.args)


#: What the fresh interpreter runs.
_PROGRAM = "import sys; from customops.testing.isolation import _child; _child(sys.argv[1])"


# The parent -----------------------------------------------------------------------------------------------------


def _run(
    tasks: Sequence[_Task],
    setup: _Reference | None,
    timeout: float,
    cwd: str | os.PathLike[str] | None,
    env: Mapping[str, str] | None,
    *,
    fork: bool,
) -> list[Isolated]:
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        # In two steps: the tasks may need the path to be read.
        work = pickle.dumps((setup, list(tasks), timeout, fork))
        (place / "tasks").write_bytes(pickle.dumps((list(sys.path), work)))
        command = [sys.executable, "-X", "faulthandler", "-c", _PROGRAM, directory]
        environment = {**os.environ, **(env or {})}
        # The package may be there only because this process has its directory on the path.
        root = str(Path(__file__).parents[2])
        environment["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [environment.get("PYTHONPATH")])])
        whole = timeout * (len(tasks) + 1) if fork else timeout
        try:
            done = subprocess.run(
                command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=whole, errors="replace"
            )
        except subprocess.TimeoutExpired as error:
            raise IsolationError(
                f"the child process was still running after {whole:g} seconds",
                stdout=_text(error.stdout),
                stderr=_text(error.stderr),
            ) from None
        if (place / "setup").exists():
            raise _load(place / "setup", done.stdout, done.stderr).error or IsolationError("the set-up failed")
        if fork and done.returncode:  # not a fork died, but what forks them
            raise IsolationError(
                f"the child process {_ending(done.returncode)}", returncode=done.returncode, stderr=done.stderr
            )
        return [_outcome(place / str(i), None if fork else done) for i in range(len(tasks))]


def _outcome(path: Path, done: subprocess.CompletedProcess[str] | None = None) -> Isolated:
    """What the process left at `path`; of a fork it is all in files, of an interpreter of its own `done` has more."""
    if done is None:
        stdout, stderr = _read(path.with_suffix(".out")), _read(path.with_suffix(".err"))
        code = int(_read(path.with_suffix(".code")) or 0)
    else:
        stdout, stderr, code = done.stdout, done.stderr, done.returncode
    if path.exists():
        return _load(path, stdout, stderr)
    error = IsolationError(f"the child process {_ending(code)}", returncode=code, stdout=stdout, stderr=stderr)
    return Isolated(error=error, stdout=stdout, stderr=stderr)


def _load(path: Path, stdout: str, stderr: str) -> Isolated:
    try:
        value, error = pickle.loads(path.read_bytes())
    except Exception as problem:
        error = IsolationError(f"what the child process sent cannot be read here: {problem}", stderr=stderr)
        return Isolated(error=error, stdout=stdout, stderr=stderr)
    return Isolated(value, error, stdout, stderr)


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def _ending(code: int) -> str:
    if code == -signal.SIGALRM:
        return "ran out of time"
    if code < 0:
        return f"died of {signal.Signals(-code).name}"
    return f"ended without a result (status {code})"


# The child ------------------------------------------------------------------------------------------------------


def _child(directory: str) -> None:
    place = Path(directory)
    paths, work = pickle.loads((place / "tasks").read_bytes())
    sys.path[:] = list(dict.fromkeys([*paths, *sys.path]))
    setup, tasks, timeout, fork = pickle.loads(work)
    if setup is not None:
        outcome = _attempt(_Task(setup, ()))
        if outcome[1] is not None:
            _save(place / "setup", *outcome)
            return
    for i, task in enumerate(tasks):
        if fork:
            _fork(task, place / str(i), timeout)
        else:
            _save(place / str(i), *_attempt(task))


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
        return _outcome(place)


def _fork(function: Callable[[], Any], place: Path, timeout: float) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        for stream, suffix in ((1, ".out"), (2, ".err")):
            os.dup2(os.open(place.with_suffix(suffix), os.O_CREAT | os.O_WRONLY), stream)
        signal.alarm(max(1, int(timeout)))
        _save(place, *_attempt(function))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    place.with_suffix(".code").write_text(str(os.waitstatus_to_exitcode(status)))


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
