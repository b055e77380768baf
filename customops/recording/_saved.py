"""Arguments of calls in files: `dump` writes them, `load` and `replay` run them again."""

from __future__ import annotations

import itertools
import logging
import os
import pickle
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.serialization import config

from customops import _torch
from customops._describe.render import seconds_per_call
from customops._dispatch.current_kernel import observe
from customops._op.op import CustomOpDef
from customops._op.registry import default
from customops._op.samples import Sample
from customops.checks._inputs import copy_tensors, quiet
from customops.checks._trial import Trial
from customops.errors import ArgumentError, UnsupportedError, brief
from customops.recording._calls import Call, Given, Ops, Watcher

log = logging.getLogger("customops")

#: What is written, for files that later versions read.
_FORMAT = 1

#: Which calls: those that raise, all, or those for which a function of the `Call` is true.
When = Literal["failing", "all"] | Callable[[Call], bool]


@contextmanager
def dump(directory: str | Path, *, ops: Ops = None, when: When = "failing", limit: int = 100) -> Iterator[list[Path]]:
    """Write the arguments of calls inside the context to files, one file for each call.

    With `when` "failing" or a function, mutated arguments are copied before the call. Other tensors are written with
    their values after the call.

    Args:
        directory: the directory; it is created if it does not exist.
        ops: as in `record`.
        when: the calls to write. "failing": calls that raise. "all": all calls; they are written before they run, so
            that a call that kills the process is written too. A function: takes the `Call` after it has ended, and
            returns a bool.
        limit: the maximum number of files.

    Yields:
        The paths of the files written so far, in a list that grows.

    Raises:
        ArgumentError: `when` is something else.

    Example:
        >>> with customops.recording.dump("dumps"):
        ...     model(x)
        >>> customops.recording.replay("dumps/mylib.scale-1234-0.pt")
    """
    if when not in ("failing", "all") and not callable(when):
        raise ArgumentError(
            "when= has an invalid value",
            argument="when",
            expected='"failing", "all" or a function of the call',
            got=brief(when),
        )
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    writer = _Writer(directory, limit)
    if when == "all":
        watcher = Watcher(lambda call, given: None, ops, begun=writer.write)
    else:

        def with_copies(call: Call, given: Given) -> Given:
            """The arguments, with copies of those that the op writes to."""
            trial = Trial(default.adopt(call.op)._opoverload, *given)
            if trial.mutated:
                with _unseen():
                    trial = trial.with_arguments(**copy_tensors(trial.mutated, leaves=True))
            return trial.args, trial.kwargs

        def done(call: Call, given: Given) -> None:
            if call.error if when == "failing" else when(call):
                writer.write(call, given)

        watcher = Watcher(done, ops, begun=with_copies)
    with observe(watcher):
        yield writer.paths


@contextmanager
def _unseen() -> Iterator[None]:
    """A block that no mode of the user sees."""
    with torch.no_grad(), _torch.dispatcher.without_torch_function(), _torch.dispatcher.without_torch_dispatch():
        yield


class _Writer:
    def __init__(self, directory: Path, limit: int) -> None:
        self.directory, self.limit = directory, limit
        self.paths: list[Path] = []
        self._calls, self._numbers = itertools.count(), itertools.count()

    def write(self, call: Call, given: Given) -> Given:
        if next(self._calls) >= self.limit:
            return given
        # A file that was not there: neither that of another `dump`, nor of a process that had this number before.
        while True:
            path = self.directory / f"{call.op.replace('::', '.')}-{os.getpid()}-{next(self._numbers)}.pt"
            with suppress(FileExistsError):
                path.touch(exist_ok=False)
                break
        op = default.adopt(call.op)
        texts = {"caller": call.caller, "error": call.error, "kernel": call.kernel, "line": call.line()}
        try:
            # Checksums are the default; `load` needs them.
            with _unseen(), config.patch("save.compute_crc32", True):  # type: ignore[attr-defined]
                held = {"args": _encoded(given[0]), "kwargs": {name: _encoded(x) for name, x in given[1].items()}}
                held = copy_tensors(held, leaves=True, bare=True)  # torch writes all the memory that a view looks at
                head = {"format": _FORMAT, "op": call.op, "schema": str(op.schema), "source": op.source}
                torch.save(head | held | texts, path)
        except Exception as error:  # must not take the place of what the call does
            log.warning("%s: the arguments of a call were not written to %s: %s", call.op, path, brief(error, 200))
            path.unlink(missing_ok=True)
        else:
            self.paths.append(path)
        return given


#: Types that files hold as they are.
_PLAIN = (type(None), bool, int, float, complex, str)


def _encoded(value: Any) -> Any:
    """A value of a type of the dispatcher, as one that `torch.load` reads without running code."""
    if isinstance(value, Tensor):
        if type(value) not in (Tensor, torch.nn.Parameter) or _torch.fakes.is_abstract(value):
            raise UnsupportedError("a tensor without data of its own, or of a subclass", got=type(value).__name__)
        return value.detach().requires_grad_(value.requires_grad)
    if isinstance(value, (list, tuple)):
        return [_encoded(item) for item in value]
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if not isinstance(value, _PLAIN):
        raise UnsupportedError("a file cannot hold an argument of this type", got=type(value).__name__)
    return value


def _decoded(value: Any) -> Any:
    """The inverse, for what a file holds; it raises for everything that `_encoded` does not write."""
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if isinstance(value, dict):
        ((kind, name),) = value.items()
        value = torch.device(name) if kind == "device" else vars(torch)[name]
        if isinstance(value, (torch.device, torch.dtype, torch.layout, torch.memory_format)):
            return value
    elif isinstance(value, (Tensor, *_PLAIN)):
        return value
    raise TypeError(f"an argument is {brief(value)}")


@dataclass(frozen=True)
class SavedCall:
    """A call that `dump` wrote to a file.

    Attributes:
        op: qualified name.
        args, kwargs: the arguments in the form that ``torch.ops`` takes.
        schema: the schema of the op when the file was written.
        source: ``file:line`` of its definition when the file was written.
        caller, kernel, error, line: as in `Call`; ``line`` is its text.
    """

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    schema: str = ""
    source: str = ""
    caller: str = ""
    kernel: str = ""
    error: str = ""
    line: str = ""

    def _runnable(self, torch_ops: bool) -> CustomOpDef[Any, Any]:
        """The op, unless the file names one that nobody meant to run: among torch's own are some that create files."""
        if not torch_ops and self.op.partition("::")[0] in _torch.library.TORCHS:
            raise UnsupportedError(
                "the file holds a call of one of torch's own ops, which may do more than compute",
                op=self.op,
                fix="pass torch_ops=True if you know where the file comes from",
            )
        return default.adopt(self.op)

    @property
    def sample(self) -> Sample:
        """A copy of the arguments in the form that the op's object takes: ``customops.check(op, [saved.sample])``."""
        op, (args, kwargs) = default.adopt(self.op), copy_tensors((self.args, self.kwargs), leaves=True)
        return Sample(args, kwargs) if op._lowering is None else Sample(*op._lowering.restored_call(*args, **kwargs))

    def replay(self, *, torch_ops: bool = False) -> Any:
        """Call the op again, on copies of the arguments.

        Args:
            torch_ops: if True, also run an op of torch's own namespaces, such as ``aten``.

        Raises:
            RegistrationError: there is no op of this name. Import the module that defines it first.
            UnsupportedError: the op is one of torch's own, and `torch_ops` is False.
        """
        op, sample = self._runnable(torch_ops), self.sample
        return op(*sample.args, **sample.kwargs)

    def benchmark(self, seconds: float = 0.2, *, torch_ops: bool = False) -> float:
        """The duration of a call in seconds, the median of several rounds. Mutated arguments are not reset.

        The errors, and `torch_ops`, are those of `replay`.
        """
        op, sample = self._runnable(torch_ops), self.sample
        return seconds_per_call(lambda: op(*sample.args, **sample.kwargs), seconds)

    def __str__(self) -> str:
        return self.line


def load(file: str | Path, *, map_location: Any = None) -> SavedCall:
    """Load a call that `dump` wrote. Loading runs no code from the file.

    Args:
        map_location: the device for the tensors, as in `torch.load`; for example "cpu" if their device is missing.

    Raises:
        ArgumentError: `dump` did not write the file, it is damaged, or the device of a tensor is missing.
    """
    with open(file, "rb") as stream, quiet():
        try:
            archive = zipfile.ZipFile(stream)
            damaged = archive.testzip()  # torch does not verify the checksums
            # Of what is marked as a folder, torch reads nothing, and takes the memory as it is.
            folders = (each.filename for each in archive.infolist() if each.external_attr & 0x10)
            if (damaged := damaged or next(folders, None)) is not None:
                raise zipfile.BadZipFile(f"{damaged} is damaged")
            stream.seek(0)
            # What `dump` does not write is refused.
            held = dict(torch.load(stream, map_location=map_location, weights_only=True))
            version, args, kwargs = held.pop("format"), held.pop("args"), held.pop("kwargs")
            texts = (*held.values(), *kwargs)
            if version != _FORMAT or not isinstance(args, list) or not all(isinstance(text, str) for text in texts):
                raise ValueError(f"format {_FORMAT} was expected")
            named = {name: _decoded(value) for name, value in kwargs.items()}
            return SavedCall(args=tuple(_decoded(args)), kwargs=named, **held)
        except Exception as error:
            is_advice = isinstance(error, pickle.UnpicklingError)  # to run the code in the file
            raise ArgumentError(
                "the file was not written by customops.recording.dump, or it is damaged",
                argument="file",
                got=str(file) if is_advice else f"{file}: {brief(error, 300)}",
                fix='map_location="cpu", if it holds tensors of a device that is not here',
            ) from (None if is_advice else error)


def replay(file: str | Path, *, map_location: Any = None, torch_ops: bool = False) -> Any:
    """Run a call again that `dump` wrote: ``load(file).replay()``.

    The file names the op: replay only files of which you know where they come from.

    Args:
        map_location: as in `load`.
        torch_ops: if True, also run an op of torch's own namespaces, such as ``aten``.

    Raises:
        ArgumentError: as in `load`.
        RegistrationError: there is no op of this name. Import the module that defines it first.
        UnsupportedError: the op is one of torch's own, and `torch_ops` is False.
    """
    return load(file, map_location=map_location).replay(torch_ops=torch_ops)
