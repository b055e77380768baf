"""Python programs in forks of an interpreter that has imported the package: importing torch takes seconds each time.

`Popen` takes the place of `subprocess.Popen` in a run of the tests. It gives to such an interpreter the programs of
``customops.testing.isolation`` and ``python -m customops``, and those whose first word is `PYTHON`. All others are what
they are elsewhere, as are these if the environment has what is read during an import.

What forks is a process of its own (`main`), one for each set of modules that are to be there (`with_modules`).
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import gc
import importlib
import os
import pickle
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from customops.testing import isolation


class _Python(str):
    __slots__ = ()


#: ``[PYTHON, ...]`` in the place of ``[sys.executable, ...]``: a program that may run in a fork.
PYTHON = _Python(sys.executable)

#: Variables that are read while Python starts, and torch and the package are imported; but for some.
_EARLY = ("PYTHON", "TORCH_", "TORCHDYNAMO_", "PYTORCH_", "CUSTOMOPS_", "TRITON_", "CUDA_", "OMP_", "MKL_", "LD_")
_LATER = ("PYTHONPATH", "PYTHONIOENCODING", "CUSTOMOPS_TEST")
#: Where the interpreter finds the package and this module, beside what every interpreter has.
_PATHS = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]
#: Modules -> the interpreter that has imported them.
_interpreters: dict[tuple[str, ...], Interpreter] = {}
_modules: tuple[str, ...] = ()
_environment: dict[str, str] = {}


def begin() -> None:
    """From now on, and with the environment of now."""
    _environment.update(os.environ)
    subprocess.Popen = Popen


@contextlib.contextmanager
def with_modules(*names: str) -> Iterator[None]:
    """Programs that are started here find these modules imported."""
    global _modules
    before, _modules = _modules, names
    try:
        yield
    finally:
        _modules = before


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """`subprocess.Popen`, which has some programs run in a fork of an interpreter that is there."""

    _connection: socket.socket | None = None

    def _execute_child(self, args: Any, *others: Any) -> None:
        executable, preexec_fn, _, pass_fds, cwd, env, _, _, shell, *fds = others[:15]
        words = [args] if isinstance(args, (str, bytes, os.PathLike)) else [*map(os.fspath, args)]
        plain = executable is None and preexec_fn is None and not pass_fds and not shell
        if not (plain and hasattr(os, "fork") and _may_be_forked(args, words, env)):
            super()._execute_child(args, *others)  # type: ignore[misc]
            return
        p2cread, _, _, c2pwrite, _, errwrite = fds
        interpreter = _interpreters.get(_modules)
        if interpreter is None:
            interpreter = _interpreters[_modules] = Interpreter(_modules)
        streams = [given if given != -1 else stream for stream, given in enumerate((p2cread, c2pwrite, errwrite))]
        directory = os.getcwd() if cwd is None else os.fspath(cwd)
        request = words[1:], os.path.abspath(directory), dict(os.environ if env is None else env)
        self._connection, self.pid = interpreter.start(pickle.dumps(request), streams)
        self._child_created = True
        self._close_pipe_fds(*fds)  # type: ignore[attr-defined]

    def _internal_poll(self, *args: Any, **kwargs: Any) -> int | None:
        if self._connection is None:
            return super()._internal_poll(*args, **kwargs)  # type: ignore[misc, no-any-return]
        if self.returncode is None and select.select([self._connection], [], [], 0)[0]:
            self._ended()
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self._connection is None:
            return super()._wait(timeout)  # type: ignore[misc, no-any-return]
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self._ended()
        return self.returncode

    def _ended(self) -> None:
        assert self._connection is not None
        status = _receive(self._connection)
        self.returncode = -signal.SIGKILL if status is None else os.waitstatus_to_exitcode(status)
        self._connection.close()


def _may_be_forked(args: Any, words: list[Any], env: Any) -> bool:
    if isinstance(args, (str, bytes, os.PathLike)) or words[0] != sys.executable:
        return False
    is_isolated = isolation.PROGRAM in words
    if not (is_isolated or words[1:3] == ["-m", "customops"] or isinstance(args[0], _Python)):
        return False
    before, now = _environment, os.environ if env is None else env
    changed = {name for name in before.keys() | now.keys() if before.get(name) != now.get(name)}
    return not any(name.startswith(_EARLY) and name not in _LATER for name in changed)


class Interpreter:
    """The process that forks, as those see it that start programs."""

    def __init__(self, modules: tuple[str, ...]) -> None:
        self.directory = tempfile.TemporaryDirectory()
        self.path = os.path.join(self.directory.name, "socket")
        environment = {name: value for name, value in _environment.items() if name != "PYTHONPATH"}
        program = f"import sys; sys.path[1:1] = {_PATHS}; from helpers import warm; warm.main(*sys.argv[1:])"
        command = [sys.executable, "-X", "faulthandler", "-c", program, self.path, *modules]
        self.process: Any = Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.process.stdout.readline()  # it is listening
        atexit.register(self.end)

    def end(self) -> None:
        self.process.communicate()
        self.directory.cleanup()

    def start(self, request: bytes, streams: list[int]) -> tuple[socket.socket, int]:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self.path)
        socket.send_fds(connection, [len(request).to_bytes(8, "big")], streams)
        connection.sendall(request)
        return connection, _receive(connection) or 0


def _send(connection: socket.socket, number: int) -> None:
    connection.sendall(number.to_bytes(8, "big"))


def _receive(connection: socket.socket) -> int | None:
    """A number, or None if the other side has gone."""
    found = connection.recv(8, socket.MSG_WAITALL)
    return int.from_bytes(found, "big") if found else None


# The process that forks -----------------------------------------------------------------------------------------------


def main(path: str, *modules: str) -> None:
    for name in modules:
        importlib.import_module(name)
    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    server.listen()
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # those that wait for programs need not be waited for
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print("listening", flush=True)
    while True:
        readable, _, _ = select.select([server, 0], [], [])
        if 0 in readable:
            os._exit(0)
        connection, _ = server.accept()
        if os.fork() == 0:
            server.close()
            break
        connection.close()
    length, streams, _, _ = socket.recv_fds(connection, 8, 3)
    request = b""
    while len(request) < int.from_bytes(length, "big"):
        request += connection.recv(1 << 20)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    program = os.fork()
    if program != 0:  # wait for it, and tell how it ended
        os.setsid()
        _send(connection, program)
        for fd in streams:
            os.close(fd)
        _send(connection, os.waitpid(program, 0)[1])
        os._exit(0)
    connection.close()
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for fd, given in enumerate(streams):
        os.dup2(given, fd)
        os.close(given)
    _run(*pickle.loads(request))


def _run(words: list[str], directory: str, environment: dict[str, str]) -> None:
    """Be ``python *words``."""
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    random.seed()
    while words[0] in ("-X", "-W"):
        if words[0] == "-W":
            action, _, category = words[1].partition("::")
            warnings.simplefilter(action, getattr(builtins, category or "Warning"))
        words = words[2:]
    added = [each for each in environment.get("PYTHONPATH", "").split(os.pathsep) if each]
    sys.path[:] = ["" if words[0] == "-c" else directory, *added, *sys.path[1 + len(_PATHS) :]]
    for name in [name for name in sys.modules if name.partition(".")[0] == "helpers"]:
        del sys.modules[name]
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    if words[0] == "-c":
        sys.argv[:] = ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec"), vars(module))
    elif words[0] == "-m":
        sys.argv[:] = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = words
        sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
        runpy.run_path(words[0], run_name="__main__")
