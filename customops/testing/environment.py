"""What generated tests read from the environment, and what they set in it.

The variables have the names that torch's generated tests read, so that a suite that was moved is run as before; each
has a second name, with CUSTOMOPS in the place of PYTORCH.
"""

from __future__ import annotations

import os
import tempfile
import threading
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from customops import _torch

_DISABLE = "TORCHDYNAMO_DISABLE"


def accepts_changes() -> bool:
    """Are failures files to be updated to what happens, instead of tests to fail?"""
    return "1" in map(os.environ.get, ("PYTORCH_OPCHECK_ACCEPT", "CUSTOMOPS_OPCHECK_ACCEPT"))


def saves_inputs() -> bool:
    """Are the inputs of a failing operator to be saved for the script that reproduces it?"""
    name = "OPCHECK_PRINT_BETTER_REPRO"
    return "1" in map(os.environ.get, (f"PYTORCH_{name}", f"CUSTOMOPS_{name}"))


class _DynamoSwitch:
    """Turns `torch.compile` off from the first `off` to the last `restore`, of whatever thread.

    A function that is compiled calls its operators where no mode sees them. The environment is one for all threads,
    so it is restored when the last of them is done.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before: str | None = None

    def off(self) -> None:
        with self._lock:
            if self._users == 0:
                self._before = os.environ.get(_DISABLE)
                os.environ[_DISABLE] = "1"
            self._users += 1

    def restore(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users:
                return
            if self._before is None:
                os.environ.pop(_DISABLE, None)
            else:
                os.environ[_DISABLE] = self._before


dynamo = _DynamoSwitch()


#: Below the directory for temporary files. Nothing removes it.
DIRECTORY = "customops_opcheck_safe_to_delete"

_RULE = "# " + "=" * 57

_SCRIPT = f"""\
{_RULE}
# BEGIN REPRO SCRIPT
{_RULE}
import torch
from customops import opcheck

# Make sure you have loaded the library that contains the op
# via an import or torch.ops.load_library(...)
op = torch.ops.{{op}}

{{inputs}}
opcheck(op, args, kwargs, test_utils="{{test}}")
{_RULE}
# END REPRO SCRIPT
{_RULE}
"""

_NO_INPUTS = """\
# If you rerun your test with PYTORCH_OPCHECK_PRINT_BETTER_REPRO=1
# we will fill them in same (args, kwargs) as in your test
args = ()  # args to the operator
kwargs = {}  # kwargs to the operator"""


def generate_repro(
    test: str,
    op: _torch.library.OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    save_data: bool,
    dry_run: bool = False,
) -> str:
    """Return a Python script that runs one check of `op`.

    Args:
        test: the name of the check.
        op, args, kwargs: the call.
        save_data: if True, save the inputs to a file that the script loads. If False, the inputs in the script are
            empty, and the reader fills them in.
        dry_run: if True, do not save the file, but return the same script.
    """
    inputs = _NO_INPUTS
    if save_data:
        path = os.path.join(tempfile.gettempdir(), DIRECTORY, f"repro_{uuid.uuid4().hex}.pt")
        if not dry_run:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            torch.save((tuple(args), dict(kwargs)), path)
        inputs = f"args, kwargs = torch.load({_quoted(path)})"
    schema = _torch.schema.schema_of(op)
    name = ".".join([*schema.name.split("::"), schema.overload_name or "default"])
    return _SCRIPT.format(op=name, inputs=inputs, test=test)


def _quoted(path: str) -> str:
    """A Python string literal, in double quotes."""
    return '"' + path.replace("\\", "\\\\").replace('"', '\\"') + '"'
