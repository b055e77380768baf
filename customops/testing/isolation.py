"""A process of its own for what cannot be undone, or may end the process: a device registration, a segfault.

`run_isolated` runs one function, piece of code or file in a fresh interpreter. `run_each_isolated` runs many functions
after one set-up, each in a fork of the same fresh interpreter, so that importing torch is paid once.
"""

from __future__ import annotations

import contextlib
import functools
import gc
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
from typing import Any

from customops.errors import CustomOpsError

_Task = Callable[[], Any]


def sendable(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, so that it can be pickled for a process which finds its module by file."""
    if isinstance(function, functools.partial):
        return functools.partial(sendable(function.func), *function.args, **function.keywords)
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    if module and name and not (module == "__main__" and file is None):  # typed in
        found: Any = sys.modules.get(module)
        for part in name.split("."):
            found = getattr(found, part, None)
        decorators = 0  # how many are around it in that file
        while found is not None:
            # A class method is another object each time.
            if found is function or (isinstance(found, types.MethodType) and found == function):
                return functools.partial(_call_by_name, module, file, name, decorators)
            found, decorators = getattr(found, "__wrapped__", None), decorators + 1
    is_bound = isinstance(function, types.MethodType) and not isinstance(function.__self__, type)
    fix = "move it to the top of a file, or pass its code as a string"
    if is_bound:
        fix = f"functools.partial({name}, object) sends the object along"
    expected = "a function that the module of a file has under its name"
    raise CustomOpsError("another process cannot find this function", expected=expected, got=repr(function), fix=fix)


def _call_by_name(module: str, file: str | None, name: str, decorators: int, /, *args: Any, **keywords: Any) -> Any:
    """Call a function of a file, which the child imports under the same name as here."""
    # As under another name: ``__main__`` here is the child's own program there.
    key = "__isolated_main__" if module == "__main__" else module
    if key not in sys.modules and file is not None and not key.startswith("customops."):
        spec: Any = importlib.util.spec_from_file_location(key, file)
        sys.modules[key] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[key])
    function: Any = functools.reduce(getattr, name.split("."), importlib.import_module(key))
    for _ in range(decorators):
        function = function.__wrapped__
    return function(*args, **keywords)


def _run_program(code: str | None, path: str = "<isolated>") -> Any:
    """Run code, or a file, as ``__main__``; returns its variable ``result``."""
    module = sys.modules["__main__"] = types.ModuleType("__main__")  # pickle and multiprocessing look there
    if code is None:
        sys.argv[:] = [path]
        sys.path.insert(0, os.path.dirname(path))  # as for `python FILE`
        module.__file__ = path
    source = Path(path).read_bytes() if code is None else code
    try:  # the __future__ imports here are not its own
        exec(compile(source, path, "exec", dont_inherit=True), vars(module))
    except SystemExit as stop:
        if stop.code not in (None, 0):
            raise
    return vars(module).get("result")


STARTING = 60.0  #: seconds that importing torch may take on a busy machine
GRACE = 1.0  #: seconds that a process has for ending by itself when its alarm rings
LATE = -int(getattr(signal, "SIGALRM", 14))  #: the exit code of a process that ran out of time, whatever ended it


class IsolationError(CustomOpsError, RuntimeError):
    """A child process gave no result: a signal killed it, it timed out, or its result or error cannot be pickled.

    Attributes:
        returncode: the exit code of the process; negative if a signal killed it, None if it timed out.
        stdout, stderr: the output of the process.
    """

    def __init__(self, problem: str, *, returncode: int | None = None, stdout: str = "", stderr: str = "") -> None:
        self.returncode = returncode
        self.stdout = stdout
        self.stderr = stderr
        tail = "\n".join(stderr.rstrip().splitlines()[-30:])
        super().__init__(f"{problem}\n\n{tail}" if tail else problem)


@dataclass(frozen=True)
class Isolated:
    """The outcome of a child process.

    Attributes:
        value: what the function returned.
        error: the exception that it raised, or None.
        stdout, stderr: the output of the process.
    """

    value: Any = None
    error: BaseException | None = None
    stdout: str = ""
    stderr: str = ""

    def get(self) -> Any:
        """Return `value`, or raise `error` if there is one."""
        if self.error is not None:
            raise self.error
        return self.value


def outcome_of_fork(path: Path, timeout: float, default: int = 0) -> Isolated:
    """What a fork left; `default` is the exit code of the process that should have waited for it."""
    code = int(_read(path.with_suffix(".code")) or default)
    return _outcome(path, timeout, code, _read(path.with_suffix(".out")), _read(path.with_suffix(".err")))


def _outcome(path: Path, timeout: float, code: int, stdout: str, stderr: str) -> Isolated:
    """What a process with this exit code left in a file."""
    returned = path.exists()
    if returned:
        try:
            value, error = pickle.loads(path.read_bytes())
        except Exception as unreadable:
            value = None
            error = IsolationError(f"what the child process sent cannot be read here: {unreadable}", stderr=stderr)
        if code != LATE or error is not None:
            return Isolated(value, error, stdout, stderr)
    if code == LATE and returned:
        problem = f"what ran in the child process returned, but the process did not end within {timeout:g} seconds: "
        problem += "it waits for a thread or a process that was started there"
    elif code == LATE:
        problem = f"the child process ran out of time: it was still running after {timeout:g} seconds"
    elif code < 0:
        problem = f"the child process died of {signal.Signals(-code).name}"
    else:
        problem = f"the child process ended without a result (status {code})"
    error = IsolationError(problem, returncode=None if code == LATE else code, stdout=stdout, stderr=stderr)
    return Isolated(None, error, stdout, stderr)


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


#: What the fresh interpreter runs.
PROGRAM = "import sys; from customops.testing.isolation import child; child(sys.argv[1])"


def child(directory: str) -> None:
    place = Path(directory)
    paths, limit, work = pickle.loads((place / "tasks").read_bytes())
    _set_alarm(limit + STARTING)  # for when the parent is no more
    sys.path[:] = list(dict.fromkeys([*paths, *sys.path]))
    setup, tasks, timeout, fork = pickle.loads(work)
    if setup is not None:
        if fork:
            _set_alarm(timeout + STARTING)
        try:
            setup()
        except BaseException as error:
            _save(place / "setup", None, error)
            return
    _set_alarm(limit + STARTING)
    if fork:
        gc.collect()
        gc.freeze()  # else the first collection in each fork writes to, and so copies, all that they share
    (place / "ready").touch()
    for i, task in enumerate(tasks):
        if fork:
            fork_and_wait(task, place / str(i), timeout)
        else:
            _call_and_save(task, place / str(i))


def _set_alarm(seconds: float) -> None:
    if hasattr(signal, "setitimer"):  # not on Windows
        signal.setitimer(signal.ITIMER_REAL, seconds)


def fork_and_wait(function: Callable[[], Any], place: Path, timeout: float) -> None:
    """Call a function in a fork. One that does not heed its alarm is killed; so is one at a Ctrl-C here."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        try:
            for stream, suffix in ((1, ".out"), (2, ".err")):
                os.dup2(os.open(place.with_suffix(suffix), os.O_CREAT | os.O_WRONLY), stream)
            _set_alarm(timeout)
            if torch := sys.modules.get("torch"):
                # A fork has to make torch's pool of threads anew. On torch 2.15 autograd's threads would do it all at
                # once, which ends the process.
                torch.set_num_threads(torch.get_num_threads())
            _call_and_save(function, place)
            sys.stdout.flush()
            sys.stderr.flush()
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # never back into the loop that forks
        os._exit(0)
    end, pause, running, status = time.monotonic() + timeout + GRACE, 0.0005, True, 0
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
    place.with_suffix(".code").write_text(str(LATE if running else os.waitstatus_to_exitcode(status)))


def _call_and_save(function: Callable[[], Any], path: Path) -> None:
    try:
        value, failed = function(), None
    except BaseException as error:
        value, failed = None, error
    _save(path, value, failed)


def _save(path: Path, value: Any, error: BaseException | None) -> None:
    """Write the outcome; one that cannot be pickled is told as text."""
    text = "" if error is None else "".join(traceback.format_exception(error))
    if error is not None:
        error.add_note(f"in the child process:\n{text}")
    try:
        data = pickle.dumps((value, error))
        pickle.loads(data)  # an exception may well be pickled and not be made again
    except Exception as problem:
        what = text or traceback.format_exc()
        kind = "value" if error is None else f"error ({type(error).__name__}: {error})"
        data = pickle.dumps((None, IsolationError(f"the {kind} cannot be sent: {problem}", stderr=what)))
    temporary = path.with_suffix(".partial")
    temporary.write_bytes(data)
    temporary.rename(path)


def run_isolated(
    target: Callable[..., Any] | str | os.PathLike[str],
    /,
    *args: Any,
    timeout: float = 120.0,
    cwd: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
) -> Isolated:
    """Run a function, Python code, or a Python file in a new interpreter process.

    Args:
        target: a module-level function (not a lambda or a nested function), which is found by its file and name, or a
            `functools.partial` of one. Or a program: a file, given as a `pathlib.Path` or a one-line string that ends
            in ``.py``; any other string is Python code. The value of a program is that of its variable ``result``.
        args: arguments of the function. These and its value are pickled. Return ``x.cpu()`` if this process does not
            have the device of a tensor.
        timeout: seconds after which the process and its child processes are killed.
        cwd: the working directory of the process. A file is looked up from the directory of this process.
        env: variables to set in addition to the environment of this process.

    Returns:
        The value, and the output of the process.

    Raises:
        CustomOpsError: another process cannot find the function, there is no such file, or a program got arguments.
        IsolationError: the process died (for example of a segfault), or timed out.
        BaseException: the exception of the function or program, with the traceback of the child process in its notes.
            ``sys.exit(0)`` ends a program normally.
    """
    if not isinstance(target, (str, os.PathLike)):
        task = functools.partial(sendable(target), *args)
    elif args:
        raise CustomOpsError("only a function takes arguments", got=f"{len(args)} for a program")
    elif isinstance(target, str) and ("\n" in target or not target.endswith(".py")):
        task = functools.partial(_run_program, target)
    else:
        path = Path(target).resolve()
        if not path.is_file():
            expected = "a Python file; a string of one line that ends in .py is the path of one, any other is code"
            raise CustomOpsError("no such file", expected=expected, got=str(path))
        task = functools.partial(_run_program, None, str(path))
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
    """Run functions without arguments, each in a fork of a new interpreter process in which `setup` has run.

    Use `functools.partial` to bind arguments. Functions do not see changes that others make to their process, and one
    that dies does not affect the others. `setup` must not start threads (a backward does), because they do not survive
    a fork. On platforms without fork (Windows), each function has its own interpreter.

    Args:
        functions: module-level functions, as for `run_isolated`.
        setup: a function to run first, in the process that is forked.
        timeout: seconds for each function. A function that takes longer is killed; the others continue.
        cwd, env: as for `run_isolated`.

    Returns:
        An `Isolated` for each function, in order. Errors of the functions are not raised.

    Raises:
        Exception: the exception that `setup` raised.
        IsolationError: the process died or timed out in `setup`.
    """
    tasks = [sendable(function) for function in functions]
    first = sendable(setup) if setup is not None else None
    if hasattr(os, "fork"):
        return _run(tasks, first, timeout, cwd, env, fork=True)
    return [done for task in tasks for done in _run([task], first, timeout, cwd, env, fork=False)]


def _run(
    tasks: Sequence[_Task], setup: _Task | None, timeout: float, cwd: Any, env: Mapping[str, str] | None, *, fork: bool
) -> list[Isolated]:
    # What the child left running may hold its files open, and Windows does not delete such files.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        place = Path(directory)
        # Each fork has a limit of its own; this is for what hangs where none should.
        limit = (timeout + STARTING) * 2 + (timeout + GRACE) * len(tasks) if fork else timeout
        # In two steps: the tasks may need the path to be read.
        work = pickle.dumps((setup, list(tasks), timeout, fork))
        (place / "tasks").write_bytes(pickle.dumps((list(sys.path), limit, work)))
        environment = {**os.environ, **(env or {})}
        # The package may be there only because this process has its directory on the path.
        root = str(Path(__file__).parents[2])
        environment["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [environment.get("PYTHONPATH")])])
        with (place / "all.out").open("wb") as out, (place / "all.err").open("wb") as err:
            process = subprocess.Popen(
                [sys.executable, "-X", "faulthandler", "-c", PROGRAM, str(place)],
                cwd=cwd,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,  # so that it can be killed with all that it started
            )
        try:  # it is over when it ends: what it started may go on, and hold its output open
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = LATE
        finally:
            # It is late, or this process got a Ctrl-C; or a fork was late, in a process that it waited for.
            if process.poll() is None or any(_read(path) == str(LATE) for path in place.glob("*.code")):
                if hasattr(os, "killpg"):
                    with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left
                        os.killpg(process.pid, signal.SIGKILL)
                else:
                    process.kill()
                process.wait()
        stdout, stderr = _read(place / "all.out"), _read(place / "all.err")
        if (place / "setup").exists():
            _outcome(place / "setup", limit, 0, stdout, stderr).get()  # which raises
        if not fork:
            return [_outcome(place / str(i), limit, code, stdout, stderr) for i in range(len(tasks))]
        if not (place / "ready").exists():
            _outcome(place / "ready", timeout + STARTING, code, stdout, stderr).get()  # which raises
        return [outcome_of_fork(place / str(i), timeout, code) for i in range(len(tasks))]


def in_fork(function: Callable[[], Any], timeout: float) -> Isolated:
    """Call a function in a fork of this process, and bring back what it returned, raised or printed."""
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory) / "outcome"
        fork_and_wait(function, place, timeout)
        return outcome_of_fork(place, timeout)
