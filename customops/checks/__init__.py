"""`opcheck`: test an operator against its schema, its fake impl and its autograd registration.

Each check is a function of a trial. `CHECKS` is the table of the checks by name. `run_check` runs one check and returns
its outcome; `opcheck` runs several, with the interface of `torch.library.opcheck`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

from customops._op.op import CustomOpDef
from customops.checks._inputs import alone
from customops.checks._outcome import NotExercised, Outcome, SchemaCheckError, UsageError, leave_frames_out
from customops.checks._table import CHECKS, DEFAULT_CHECKS, Check
from customops.checks._trial import Trial, resolve
from customops.checks.aot_dispatch import aot_autograd_check, aot_dispatch_check
from customops.checks.autograd_registration import autograd_registration_check
from customops.checks.faketensor import fake_check
from customops.checks.writes import schema_check
from customops.errors import CheckError, OpCheckError

__tracebackhide__ = True  # pytest leaves the frames out

__all__ = [
    "CHECKS",
    "DEFAULT_CHECKS",
    "Check",
    "NotExercised",
    "Outcome",
    "SchemaCheckError",
    "Trial",
    "UsageError",
    "aot_autograd_check",
    "aot_dispatch_check",
    "autograd_registration_check",
    "fake_check",
    "opcheck",
    "run_check",
    "schema_check",
]


def opcheck(
    op: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    test_utils: str | Sequence[str] = DEFAULT_CHECKS,
    raise_exception: bool = True,
    atol: float | None = None,
    rtol: float | None = None,
) -> dict[str, str | Exception]:
    """Check an operator on one set of inputs.

    The result is "SUCCESS" also for a check that had nothing to test, such as test_autograd_registration if no input
    requires grad. `run_check` distinguishes the two.

    Args:
        op: an OpOverload, an OpOverloadPacket with one overload, or a `CustomOpDef`.
        args, kwargs: inputs for which the operator works. It runs on copies of them.
        test_utils: names of checks, in the order in which to run them; "all" for all of `CHECKS`.
        raise_exception: raise an OpCheckError at the first failure, instead of returning it in the result.
        atol, rtol: absolute and relative tolerance for results; give both or neither. The defaults depend on the dtype.

    Returns:
        A dict: "SUCCESS" or the exception, by name of the check.

    Raises:
        OpCheckError: a check failed, and `raise_exception` is True.
        UsageError: `op` is not an operator, or an argument is invalid.
    """
    trial = _trial(op, args, kwargs, atol, rtol)
    results: dict[str, str | Exception] = {}
    for name in _names(test_utils):
        outcome = _run(name, trial)
        if outcome.error is not None and raise_exception:
            failure = OpCheckError(f"opcheck(op, ...): {name} failed with {outcome.error}")
            leave_frames_out(outcome.error)
            # `raise ... from` sets the cause alone where no exception is being handled; code that was written for
            # torch.library looks for the context.
            failure.__context__ = outcome.error
            raise failure from outcome.error
        results[name] = outcome.error or "SUCCESS"
    return results


def run_check(
    name: str,
    op: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    atol: float | None = None,
    rtol: float | None = None,
) -> Outcome:
    """Run one check of an operator on one set of inputs. The arguments are as for `opcheck`."""
    (name,) = _names([name])
    return _run(name, _trial(op, args, kwargs, atol, rtol))


def _run(name: str, trial: Trial) -> Outcome:
    start = time.perf_counter()
    outcome = Outcome(name, "passed")
    try:
        with alone():
            CHECKS[name](trial)
    except NotExercised as nothing:
        outcome = Outcome(name, "not exercised", reason=str(nothing))
    except Exception as error:
        outcome = Outcome(name, "failed", error)
    except SystemExit as error:  # of a kernel, say: it must not pass for the end of a successful run
        outcome = Outcome(name, "failed", CheckError(f"the operator raised {error!r}", op=trial.name))
    return dataclasses.replace(outcome, seconds=time.perf_counter() - start)


def _trial(
    op: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None, atol: float | None, rtol: float | None
) -> Trial:
    if (atol is None) != (rtol is None):
        raise UsageError("opcheck(op, ...): if you give one of atol and rtol, give both")
    if not isinstance(args, (tuple, list)):
        raise UsageError(
            "opcheck(op, args, ...): args holds the arguments of one call",
            argument="args",
            expected="a tuple",
            got=type(args).__name__,
            fix="for an operator of one argument write opcheck(op, (x,))",
        )
    return Trial(resolve(op), *lowered(op, args, kwargs or {}), atol, rtol)


def lowered(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that the overload of `op` takes for a call of `op`."""
    if isinstance(op, CustomOpDef):
        return op.lower(*args, **kwargs)
    return tuple(args), dict(kwargs)


def _names(test_utils: str | Sequence[str]) -> tuple[str, ...]:
    if test_utils in ("ALL", "all"):
        return tuple(CHECKS)
    names = (test_utils,) if isinstance(test_utils, str) else tuple(test_utils)
    unknown = [name for name in names if name not in CHECKS]
    if unknown:
        raise UsageError(
            f"opcheck(op, ..., test_utils=...): expected test_utils to be subset of {tuple(CHECKS)}",
            argument="test_utils",
            got=", ".join(map(repr, unknown)),
        )
    return names
