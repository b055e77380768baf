"""What a torch function is that a mode sees: a call of an operator, or something else."""

from __future__ import annotations

from typing import Any

import torch

from customops import _compat

_jit: Any = torch.jit  # which does not declare what it exports

#: What operators look like where they are called.
OPERATORS = (_compat.libraries.OpOverload, _compat.libraries.OpOverloadPacket)


def runs_operator(func: Any) -> bool:
    """Is it an operator, called to be run? A compiler calls them to see what they do."""
    if not isinstance(func, OPERATORS):
        return False
    return not (torch.compiler.is_compiling() or _jit.is_tracing() or _jit.is_scripting())


def has_no_fake(error: BaseException | None) -> bool:
    """Did a check fail because torch cannot make fakes of the inputs? That is not the operator's fault."""
    while error is not None and not isinstance(error, _compat.tracing.NoFakeTensor):
        error = error.__cause__
    return error is not None
