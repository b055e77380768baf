"""Programs that show one fault by themselves."""

from __future__ import annotations

import base64
import importlib.util
import io
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from customops import _compat
from customops.checking import _text
from customops.checking._data import Fault
from customops.checks._memory import is_addressable

#: Tensors with more elements in their storage, and others that a literal cannot give, are held as bytes.
_LITERAL = 256

_SCRIPT = '''\
"""{title}

{message}
"""

{imports}

{load}

op = {op}

{inputs}
{run}
'''

_RUN_CHECK = """\
outcome = run_check({check!r}, op, args, kwargs)
if outcome.error is not None:
    raise outcome.error
print("no fault: {check} " + outcome.status)"""

#: A fault of the inputs shows in the call itself.
_RUN_CALL = """\
print(op(*args, **kwargs))"""


def script_of(failure: Fault) -> str:
    """A program that runs the check of a failure on its input, and raises what it finds."""
    values, spec = _compat.tracing.tree_flatten((failure.args, dict(failure.kwargs)))
    names = _Names()
    shown = _compat.tracing.tree_unflatten([_Code(names.code_of(value)) for value in values], spec)
    args, kwargs = shown
    given = f"args = {_tuple(args)}\nkwargs = {{{', '.join(f'{key!r}: {value!r}' for key, value in kwargs.items())}}}"
    name, _, overload = failure.op.partition(".")
    return _SCRIPT.format(
        title=f"{failure.op}: {failure.check}",
        message=_text.failure(failure).replace("\\", "\\\\").replace('"""', "'''"),
        imports="\n".join(names.imports(is_checked=failure.check != "inputs")),
        load=_load(failure),
        op=f"torch.ops.{name.replace('::', '.')}.{overload or 'default'}",
        inputs="\n".join([*names.lines, given]),
        run=_RUN_CALL if failure.check == "inputs" else _RUN_CHECK.format(check=failure.check),
    )


class _Code:
    """Python code whose repr is itself: so the repr of lists and dicts around it is code, too."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _tuple(items: Any) -> str:
    return f"({', '.join(map(repr, items))}{',' if len(items) == 1 else ''})"


class _Names:
    """The variables of the script: one for each tensor, and one for each storage that two of them share."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._tensors: dict[int, str] = {}
        self._storages: dict[int, str] = {}
        self._kept: list[Any] = []  # so that no id is used again

    def code_of(self, value: Any) -> str:
        """An expression for a value; lines that define a variable are added where there has to be one."""
        if isinstance(value, torch.Tensor):
            if id(value) not in self._tensors:
                self._kept.append(value)
                self._tensors[id(value)] = self._define(value)
            return self._tensors[id(value)]
        if isinstance(value, torch.device):
            return f"torch.device({str(value)!r})"
        if isinstance(value, torch.Generator):
            return f"torch.Generator({str(value.device)!r}).manual_seed({value.initial_seed()})"
        return repr(value)

    def imports(self, *, is_checked: bool) -> Iterator[str]:
        text = "\n".join(self.lines)
        yield from (f"import {name}" for name in ("base64", "io") if f"{name}." in text)
        yield "from math import inf, nan  # noqa: F401"
        yield ""
        yield "import torch"
        if is_checked:
            yield "from customops.checks import run_check"

    def _define(self, tensor: torch.Tensor) -> str:
        name = f"tensor_{len(self._tensors)}"
        self.lines.append(f"{name} = {self._expression(tensor)}")
        return name

    def _expression(self, tensor: torch.Tensor) -> str:
        requires_grad = ".requires_grad_()" if tensor.requires_grad else ""
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
        if not plain or tensor.is_quantized or not is_addressable(tensor):
            return self._bytes_of(tensor)
        if tensor.is_neg():
            return self._bytes_of(tensor)
        if tensor.is_conj():
            return f"{self.code_of(tensor.detach().conj())}.conj(){requires_grad}"
        storage = self._storage(tensor)
        if storage is None:
            return self._bytes_of(tensor)
        where = f"{list(tensor.shape)}, {list(tensor.stride())}, {tensor.storage_offset()}"
        return f"{storage}.as_strided({where}){requires_grad}"

    def _storage(self, tensor: torch.Tensor) -> str | None:
        """A variable with all elements of a tensor's storage; None if they are too many."""
        key = _compat.memory.storage_id(tensor)
        count = tensor.untyped_storage().nbytes() // tensor.element_size()
        if count > _LITERAL:
            return None
        found = self._storages.get(key)
        if found is None:
            self._kept.append(tensor)
            with torch.no_grad():
                elements = tensor.detach().as_strided((count,), (1,), 0)
            wide = (
                elements.to(torch.float32)
                if elements.dtype.itemsize == 1 and elements.is_floating_point()
                else elements
            )
            found = self._storages[key] = f"memory_{len(self._storages)}"
            device = "" if tensor.device.type == "cpu" else f", device={str(tensor.device)!r}"
            self.lines.append(f"{found} = torch.tensor({wide.tolist()!r}, dtype={tensor.dtype}{device})")
        return found

    def _bytes_of(self, tensor: torch.Tensor) -> str:
        file = io.BytesIO()
        torch.save(tensor, file)
        text = base64.b64encode(file.getvalue()).decode()
        return f'torch.load(io.BytesIO(base64.b64decode("{text}")))'


def _load(failure: Fault) -> str:
    """Code that defines the operator: the import of its module, or the execution of its file."""
    custom = _compat.registries.torch_op_of(failure.op)
    module = getattr(getattr(custom, "_init_fn", None), "__module__", None)
    if module and module != "__main__" and _can_be_found(module):
        return f"import {module}  # noqa: F401  (it defines the op)"
    file = (failure.source or "").rpartition(":")[0]
    if file and Path(file).is_file():
        return f"import runpy\n\nrunpy.run_path({file!r})  # it defines the op"
    if failure.op.startswith("aten::"):
        return ""
    return textwrap.dedent(
        """\
        # Define the operator here, or import what does:
        # import my_library  /  torch.ops.load_library("my_library.so")"""
    )


def _can_be_found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
