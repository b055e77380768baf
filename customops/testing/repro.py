"""Scripts that reproduce what a generated test found."""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from customops import _compat

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
    op: _compat.libraries.OpOverload,
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
    schema = _compat.schemas.schema_of(op)
    name = ".".join([*schema.name.split("::"), schema.overload_name or "default"])
    return _SCRIPT.format(op=name, inputs=inputs, test=test)


def _quoted(path: str) -> str:
    """A Python string literal, in double quotes."""
    return '"' + path.replace("\\", "\\\\").replace('"', '\\"') + '"'
