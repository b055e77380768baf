"""Stored choices: the fastest kernels for buckets of arguments, from files and from measurements in this process.

A file is TOML with one choice on each line, sorted, so that git merges it:
``"mylib::norm | cuda NVIDIA H100 | torch 2.13 | x=float32[64,4096]" = "v2"``.
"""

from __future__ import annotations

import functools
import json
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from customops import _torch
from customops._dispatch import preference
from customops._dispatch.registrations import Registration, lock
from customops._dispatch.results import given
from customops._places import user_source
from customops._rules import choice
from customops._schema.model import Schema
from customops.errors import RegistrationError

__tracebackhide__ = True  # pytest leaves the frames out

#: ``(op, hardware, version of torch, bucket)``; and the kernel of each.
Key = tuple[str, str, str, str]
Choices = Mapping[Key, str]

VERSION = "torch " + ".".join(torch.__version__.split(".")[:2])
_HEAD = "# The fastest kernels, as `python -m customops tune` measured them: op | hardware | torch | arguments.\n"
#: Files, and what was measured here, with their choices; the last one counts most.
_files: list[tuple[str, Choices]] = []
_measured: list[tuple[str, Choices]] = []


def tuned(path: str | os.PathLike[str], /) -> Registration:
    """Let the choices among kernels of a file count, which ``python -m customops tune`` or `autotune` wrote.

    A library calls it where it defines its ops. They come after what is preferred, and before priorities; a later file
    counts more, and the file that ``CUSTOMOPS_TUNED_FILE`` names more than all. Set the variable
    before customops is imported.

    Returns:
        an object; its ``unregister()`` takes the file back.

    Raises:
        RegistrationError: the file cannot be read, or has a line that is no choice.

    Example:
        >>> customops.tuning.tuned(Path(__file__).with_name("tuned.toml"))
    """
    return _add(_files, os.fspath(path), read(os.fspath(path)))


def add(choices: Choices) -> Registration:
    """Let choices count that were measured in this process. They count more than all before them."""
    return _add(_measured, "measured in this process", choices)


def _add(sources: list[tuple[str, Choices]], place: str, choices: Choices) -> Registration:
    source = (place, choices)

    def undo() -> None:
        with lock:
            sources[:] = [each for each in sources if each is not source]
            _tell(choices)

    with lock:
        sources.append(source)
        _tell(choices)
    return Registration(undo)


def _tell(choices: Choices) -> None:
    for listener in list(preference.listeners):
        listener.choices_changed({op for op, *_ in choices})


def read(file: str, place: str | None = None) -> dict[Key, str]:
    """The choices of a file, which `place` names. Raises RegistrationError."""
    found: dict[Key, str] = {}
    try:
        lines = Path(file).read_text("utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        problem = "a file of tuned choices cannot be read"
        fix = "correct the path" if place is None else f"correct the path, or unset {place}"
        raise RegistrationError(problem, got=str(error), where=place or user_source(), fix=fix) from error
    for i, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            key, kernel = json.loads("[" + line.replace('" = "', '", "', 1) + "]")
            op, hardware, version, bucket = key.split(" | ")
        except (ValueError, AttributeError) as error:
            raise RegistrationError(
                "a line of a file of tuned choices cannot be read",
                expected='"mylib::norm | cpu x86_64 AVX2 | torch 2.13 | x=float32[64]" = "v2"',
                got=line[:80],
                where=f"{file}:{i}",
            ) from error
        if found.setdefault((op, hardware, version, bucket), kernel) != kernel:
            problem, fix = "a file of tuned choices has two for the same arguments", "keep one of the lines, or tune"
            raise RegistrationError(problem, op=op, got=line, where=f"{file}:{i}", fix=fix)
    return found


def check_place(file: str | os.PathLike[str]) -> None:
    """Raise RegistrationError where `write` would not find what it needs."""
    path = Path(file)
    if path.exists():
        read(os.fspath(path))
    elif not path.parent.is_dir():
        problem, fix = "a file of tuned choices cannot be written: there is no such folder", "create it"
        raise RegistrationError(problem, got=str(path.parent), where=user_source(), fix=fix)


def write(file: str | os.PathLike[str], choices: Choices) -> None:
    """Put choices into a file, in the place of those for the same arguments; the others stay."""
    path = Path(file)
    merged = {**(read(os.fspath(path)) if path.exists() else {}), **choices}
    text = json.JSONEncoder(ensure_ascii=False).encode
    lines = sorted(f"{text(' | '.join(key))} = {text(kernel)}\n" for key, kernel in merged.items())
    fresh = path.with_name(f"{path.name}.{os.getpid()}")  # nobody reads half of a file
    fresh.write_text(_HEAD + "".join(lines), "utf-8")
    fresh.replace(path)


_of_environment = functools.lru_cache(maxsize=8)(read)


def counting(op: str | None = None) -> dict[Key, tuple[str, str]]:
    """The choices of an op, or of all, that count in this process: the kernel, and the file it is from."""
    file = os.environ.get("CUSTOMOPS_TUNED_FILE")
    of_user = [(file, _of_environment(file, "CUSTOMOPS_TUNED_FILE"))] if file else []
    sources = [*_files, *of_user, *_measured]
    return {
        key: (kernel, place)
        for place, choices in sources
        for key, kernel in choices.items()
        if op is None or key[0] == op
    }


class Stored:
    """The choices that were stored for an op; called, it returns the name of the kernel for arguments, or None.

    Attributes:
        choices: hardware and bucket -> the kernel, and the file.
    """

    def __init__(self, schema: Schema, choices: Iterable[tuple[Key, tuple[str, str]]]) -> None:
        self.schema, self.choices = schema, {(key[1], key[3]): found for key, found in choices}

    def __call__(
        self, keys: Sequence[Callable[..., Any]], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[str, str] | None:
        """The name of the kernel, and the file; see `bucket`."""
        return self.choices.get(self.at(keys, args, kwargs))

    def at(self, keys: Sequence[Callable[..., Any]], args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[str, str]:
        """The hardware and the bucket of arguments."""
        return hardware(choice.device_of(self.schema, args, kwargs)), bucket(self.schema, keys, args, kwargs)


def stored(op: str, schema: Schema, device_type: str | None) -> Stored | None:
    """What counts for an op on a device; the same object while nothing changes. None: there is nothing."""
    found = [
        (key, value)
        for key, value in (counting(op).items() if _files or _measured or "CUSTOMOPS_TUNED_FILE" in os.environ else ())
        if key[2] == VERSION and device_type in (None, key[1].split(" ")[0])
    ]
    return _made(schema, tuple(sorted(found))) if found else None


_made = functools.lru_cache(maxsize=4096)(Stored)


@functools.lru_cache(maxsize=64)
def hardware(device: torch.device | None) -> str:
    """``cuda NVIDIA H100 80GB HBM3``, ``cpu x86_64 AVX512``."""
    if device is None or device.type == "cpu":
        return f"cpu {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    module = torch.get_device_module(device.type)
    name = getattr(module, "get_device_name", None)
    if name is None or not getattr(module, "is_available", bool)():  # fakes of a device that is not here
        return device.type
    return f"{device.type} {name(device)}".replace(" | ", " ")


def bucket(schema: Schema, keys: Sequence[Callable[..., Any]], args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """What arguments are alike to choices: dtypes, sizes up to a power of two, integers likewise, flags and strings.

    Args:
        keys: the kernels' own ``key=`` functions. Their results are in the place of the sizes and values.
    """
    looks = [(argument.name, _look(value, bool(keys))) for argument, value in given(schema, args, kwargs)]
    parts = [f"{name}={look}" for name, look in looks if look]
    for key in keys:
        plain = _torch.trees.tree_map(lambda x: int(x) if isinstance(x, torch.SymInt) else x, key(*args, **kwargs))
        parts.append(f"key={plain!r}")
    return " ".join(parts).replace(" | ", " ")


def _look(value: Any, has_key: bool) -> str:
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return dtype if has_key else f"{dtype}[{','.join(map(_up_to, value.shape))}]"
    if isinstance(value, (list, tuple)) and value:
        return f"({','.join(dict.fromkeys(_look(each, has_key) for each in value))})"
    if has_key or value is None or isinstance(value, (float, torch.SymFloat, complex, list, tuple)):
        return ""
    if isinstance(value, (bool, torch.SymBool)):
        return str(bool(value))
    return _up_to(value) if isinstance(value, (int, torch.SymInt)) else str(value).replace("\n", " ")


def _up_to(size: Any) -> str:
    """The least power of two that is not less; 0 and negative numbers as they are. Of symbols, that makes guards."""
    if size <= 0:
        return str(int(size))
    bound = 1
    while size > bound:
        bound *= 2
    return str(bound)


choice.stored_choices = stored
