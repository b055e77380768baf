"""`Watch`: notes which operators a test calls, so that each kind of call can be checked when the test is over.

The test runs as without it. Operators see and return the same, `torch.compile` compiles as ever, and checks run on
copies, after the test, where none of its modes and contexts act on them any more. Its fixtures are there until the
checks are done.
"""

from __future__ import annotations

import collections
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode

import customops
from customops import _compat
from customops.checks import Outcome, Trial, run_check
from customops.checks.inputs.probe import kernel_error
from customops.testing._called import OPERATORS, has_no_fake, runs_operator
from customops.testing.kinds import kind_of

__tracebackhide__ = True  # pytest leaves the frames out

#: Elements of all tensors of a call, above which it is not copied.
TOO_MANY = 1 << 24

#: Calls that these make are not those of a test.
_CHECKERS = (
    *(str(Path(customops.__file__).parent / name) for name in ("checks", "checking")),
    str(Path(torch.__file__).parent / "testing" / "_internal" / "optests"),
)


@dataclass(frozen=True)
class Call:
    """A call of an operator, on copies of the inputs as they were before it, and the kind of call that it is."""

    trial: Trial
    kind: str


class Kinds(Protocol):
    """Kinds of calls, as a set has them."""

    def __contains__(self, kind: tuple[str, str], /) -> bool: ...

    def add(self, kind: tuple[str, str], /) -> None: ...


class Watch(TorchFunctionMode):
    """Notes the calls of operators in its block.

    Args:
        wants: is an operator of this name (``ns::op``, with its overload if it has one) to be noted?
        known: the kinds of calls that need not be noted, ``(name, kind)``; those that are noted are added.

    Attributes:
        calls: those that were noted, and went well.
        made: the number of calls of each operator that is wanted, noted or not.
        left_out: why calls cannot be checked -> the number of such calls.
    """

    def __init__(self, wants: Callable[[str], bool], known: Kinds) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.made: collections.Counter[str] = collections.Counter()
        self.left_out: collections.Counter[str] = collections.Counter()
        self._wants, self._known = wants, known

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # Dynamo traces through these lines, and drops them: the graph is the same as without the mode.
        if torch.compiler.is_compiling() or not isinstance(func, OPERATORS):
            return func(*args, **kwargs)
        call = self._noted(func, args, kwargs)
        result = func(*args, **kwargs)
        if call is not None:  # and it did not raise
            self._known.add((call.trial.name, call.kind))
            self.calls.append(call)
        return result

    def _noted(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        if (
            not runs_operator(func) or str(func).partition(".")[0] in _compat.namespaces.TORCHS
        ):  # as old as torch, and not what a suite is there to test
            return None
        try:
            return self._copied(func, args, kwargs)
        except Exception as error:  # whatever it is, the test is not to notice
            self.left_out[f"its inputs cannot be copied ({type(error).__name__})"] += 1
            return None

    def _copied(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        is_packet = isinstance(func, _compat.libraries.OpOverloadPacket)
        op = _compat.libraries.called_overload(func, args, kwargs) if is_packet else func
        trial = Trial(op, args, kwargs)
        trial = (
            trial if torch.is_grad_enabled() else trial.detached()
        )  # it is not recorded, so it need not be recordable
        if not self._wants(trial.name) or _is_of_checker():
            return None
        self.made[trial.name] += 1
        reason = _why_not(trial)
        if reason is not None:
            self.left_out[reason] += 1
            return None
        kind = kind_of(trial)
        if (trial.name, kind) in self._known:
            return None
        with torch.inference_mode(False):
            return Call(trial.copy(), kind)


def _is_of_checker() -> bool:
    frame: types.FrameType | None = sys._getframe(3)
    while frame is not None:
        if frame.f_code.co_filename.startswith(_CHECKERS):
            return True
        frame = frame.f_back
    return False


def _why_not(trial: Trial) -> str | None:
    """Why a call cannot be tried again, if it cannot."""
    if _compat.dispatch.any_mode_of_users():
        return "made under a mode"  # which would see how the inputs are copied
    if any(_compat.memory.is_abstract(tensor) for tensor in trial.tensors):
        return "meta, fake or functorch tensors"
    if sum(tensor.numel() for tensor in trial.tensors) > TOO_MANY:
        return "more than 16 million elements"
    return None


def why_unchecked(call: Call) -> str | None:
    """Why a call cannot be made once more now, when the test is over, if it cannot."""
    name, _, overload = call.trial.name.partition(".")
    if _compat.libraries.find_overload(name, overload) is not call.trial.op:
        return "the op was gone when the test was over"  # many a test defines one for itself
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        error, _ = kernel_error(call.trial)
    # Under autocast, say: it goes by more than its inputs.
    return None if error is None else "the op refused the same inputs when the test was over"


def checked(call: Call, checks: Sequence[str]) -> Iterator[Outcome]:
    """What these checks say of a call, unless it is `why_unchecked`."""
    trial = call.trial
    for name in checks:
        with warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore")  # of the test they say nothing
            outcome = run_check(name, trial.op, trial.args, trial.kwargs)
        if has_no_fake(outcome.error):
            outcome = replace(outcome, status="not exercised", error=None, reason="torch has no fakes of the inputs")
        yield outcome
