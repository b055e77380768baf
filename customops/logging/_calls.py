"""`Call`: one call of an op, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from customops import _compat
from customops._describe.screen import shorter_place
from customops._describe.values import outlined
from customops._timing import in_words
from customops.errors import brief

#: How much a line says; each level says what those before it say.
Level = Literal["calls", "kernels", "times"]

LEVELS: tuple[Level, ...] = ("calls", "kernels", "times")

#: Of a list of tensors that are described.
_ITEMS = 16


@dataclass(frozen=True)
class TensorInfo:
    """What a tensor was when the op was called. Sizes that are symbols are text.

    Attributes:
        shape, strides: () where the layout has none.
        dtype, device, layout: as torch writes them, without ``torch.``.
        requires_grad: did it?
        text: all of it, ``float32[2, 3] strides=[1, 2]``.
    """

    shape: tuple[int | str, ...]
    dtype: str
    strides: tuple[int | str, ...]
    device: str
    layout: str
    requires_grad: bool
    text: str

    @classmethod
    def of(cls, tensor: Tensor) -> TensorInfo:
        dtype, layout = (str(each).removeprefix("torch.") for each in (tensor.dtype, tensor.layout))
        device, requires_grad = str(tensor.device), tensor.requires_grad
        if tensor.is_nested:
            return cls((), dtype, (), device, layout, requires_grad, f"{dtype} nested")
        strides = _sizes(tensor.stride()) if tensor.layout is torch.strided else ()
        return cls(_sizes(tensor.shape), dtype, strides, device, layout, requires_grad, outlined(tensor))

    def __str__(self) -> str:
        return self.text


def _sizes(sizes: Any) -> tuple[int | str, ...]:
    return tuple(size if type(size) is int else str(size) for size in sizes)


@dataclass
class Call:
    """One call of an op.

    Attributes:
        op: qualified name.
        arguments: name -> a `TensorInfo`, a list of these, or a text for other values. Those of the schema; what was
            left out is not there.
        caller: ``file:line`` of the code that called the op; "" if it was no Python code, as in a backward.
        through: "object" (``op(x)``), "dispatcher" (``torch.ops``, backward, a transform) or "graph" (the code of a
            compiled graph).
        kernel: the name of the function that ran; "" if none did, as while tracing.
        where: its ``file:line``.
        device_type: what it was registered for; "" for the kernel of all devices.
        runs: how often a kernel ran: more than once inside vmap, say.
        seconds: of the whole call; of the kernel alone, if the call was not through the object.
        kernel_seconds: of the kernel. On an accelerator both are those of the launch, unless ``synchronize=True``.
        error: what the call raised, in one line; "" if it did not.
        thread: the name of the thread.
    """

    op: str
    arguments: dict[str, Any]
    caller: str = ""
    through: Literal["object", "dispatcher", "graph"] = "object"
    kernel: str = ""
    where: str = ""
    device_type: str = ""
    runs: int = 0
    seconds: float = 0.0
    kernel_seconds: float = 0.0
    error: str = ""
    thread: str = field(default="", repr=False)

    def line(self, level: Level = "times") -> str:
        """The call on one line."""
        arguments = ", ".join(f"{name}: {_text(value)}" for name, value in self.arguments.items())
        parts = [f"{self.op}({arguments})"]
        if level != "calls":
            times = f" {self.runs} times" if self.runs > 1 else ""
            parts.append(f"-> {self.kernel} ({shorter_place(self.where)}){times}" if self.kernel else "-> no kernel")
        if level == "times":
            parts.append(f"{in_words(self.seconds)}, kernel {in_words(self.kernel_seconds)}")
        if self.error:
            parts.append(f"raised {self.error}")
        graph = " in a compiled graph" if self.through == "graph" else ""
        if self.caller or graph:
            parts.append(f"at {shorter_place(self.caller)}{graph}" if self.caller else graph.strip())
        return "  ".join(parts)

    def __str__(self) -> str:
        return self.line()

    def to_dict(self) -> dict[str, Any]:
        """The call as lists, dicts, strings and numbers."""
        return asdict(self)


def _text(value: Any) -> str:
    return f"[{', '.join(map(_text, value))}]" if isinstance(value, list) else str(value)


def outline_arguments(names: list[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by name, without what they hold."""
    with _compat.dispatch.without_torch_function():
        named = dict(zip([*names, *map(str, range(len(names), len(args)))], args, strict=False)) | dict(kwargs)
        return {name: _outline(value) for name, value in named.items()}


def _outline(value: Any) -> Any:
    if isinstance(value, Tensor):
        return TensorInfo.of(value)
    if isinstance(value, (list, tuple)) and any(isinstance(item, Tensor) for item in value):
        return [_outline(item) for item in value[:_ITEMS]] + ["..."] * (len(value) > _ITEMS)
    return brief(value)
