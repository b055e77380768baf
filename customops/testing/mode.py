"""The mode in which generated tests run: each call of an operator is also checked.

Errors of a check do not disturb the test. They are kept, and judged against the failures dict once the test is over.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from customops import _compat
from customops.checks import NotExercised, Trial
from customops.checks._outcome import in_short
from customops.checks._trial import resolve
from customops.errors import OpCheckError
from customops.testing._called import has_no_fake, runs_operator
from customops.testing.environment import accepts_changes, dynamo, saves_inputs
from customops.testing.failures import FailuresDict
from customops.testing.repro import generate_repro

#: ``util(op, args, kwargs)`` raises what it finds. It leaves the inputs as they are.
TestUtil = Callable[[_compat.libraries.OpOverload, tuple[Any, ...], dict[str, Any]], object]


class _Inside(threading.local):
    modes = 0


_inside = _Inside()


def is_inside_opcheck_mode() -> bool:
    """True if an `OpCheckMode` is active in the calling thread."""
    return _inside.modes > 0


@dataclass(frozen=True)
class _Failure:
    error: Exception
    trial: Trial  #: the inputs as they were before the call; only those of the first failure are kept


class OpCheckMode(TorchFunctionMode):
    """A mode that runs a check on each operator call, and raises on exit if a result was not expected.

    Operators get the same arguments and return the same results as without the mode. If the block raises, only that
    exception is raised. While a thread is in such a mode, `torch.compile` does nothing.

    Args:
        namespaces: the namespaces of the operators to check.
        test_util_name: the name of the check, for the script that reproduces a failure.
        test_util: the check.
        failures_dict: the expected failures; None if every check must pass.
        test_name: the key of the test in `failures_dict`, "TestClass.test".
        failures_dict_path: the failures file, for messages.
    """

    def __init__(
        self,
        namespaces: Sequence[str],
        test_util_name: str,
        test_util: TestUtil,
        failures_dict: FailuresDict | None,
        test_name: str,
        failures_dict_path: str,
    ) -> None:
        super().__init__()
        self.namespaces = (namespaces,) if isinstance(namespaces, str) else tuple(namespaces)
        self.test_util_name = test_util_name
        self.test_util = test_util
        self.failures_dict = failures_dict
        self.test_name = test_name
        self.failures_dict_path = failures_dict_path
        self._seen: dict[str, _Failure | None] = {}

    def __enter__(self) -> OpCheckMode:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._seen = {}
        _inside.modes += 1
        dynamo.off()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        dynamo.restore()
        _inside.modes -= 1
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        if error is None:
            self._judge()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        op = self._operator(func)
        if op is None or self._status(op.name()) == "skip":
            return func(*args, **kwargs)
        trial, failure = self._copy(op, args, kwargs)
        result = func(*args, **kwargs)
        if self._seen.get(op.name()) is None:
            self._seen[op.name()] = failure or self._check(trial)
        return result

    def _operator(self, func: Any) -> _compat.libraries.OpOverload | None:
        """The operator to check, if that is what is called."""
        if not runs_operator(func):
            return None
        namespace = str(func).partition(".")[0]
        return resolve(func) if namespace in self.namespaces else None

    def _status(self, qualname: str) -> str:
        return self.failures_dict.get_status(qualname, self.test_name) if self.failures_dict else "xsuccess"

    def _copy(
        self, op: _compat.libraries.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Trial | None, _Failure | None]:
        """The inputs before the operator writes to them, or None if there is nothing to try it on."""
        trial = Trial(op, args, kwargs)
        has_failed = self._seen.get(op.name()) is not None
        # Inside a FakeTensorMode a new tensor is fake: copies would be, and each check's runs.
        if has_failed or any(_compat.memory.is_abstract(tensor) for tensor in [*trial.tensors, torch.empty(0)]):
            return None, None
        try:
            return trial.copy(), None
        except Exception as error:
            return None, _Failure(error, trial)

    def _check(self, trial: Trial | None) -> _Failure | None:
        if trial is None:
            return None
        try:
            self.test_util(trial.op, trial.args, trial.kwargs)
        except NotExercised:
            return None
        except Exception as error:
            return None if has_no_fake(error) else _Failure(error, trial)
        return None

    # At the end ---------------------------------------------------------------------------------------------

    def _judge(self) -> None:
        found = {name: failure for name, failure in self._seen.items() if failure is not None}
        failed = [name for name in found if self._status(name) == "xsuccess"]
        passed = [name for name in self._seen if name not in found and self._status(name) == "xfail"]
        if accepts_changes() and self.failures_dict is not None:
            self._accept(self.failures_dict, failed, passed)
            return
        if failed:
            first = found[failed[0]]
            raise self._failed(first, failed[1:]) from first.error
        if passed:
            raise self._passed(passed)

    def _accept(self, failures: FailuresDict, failed: list[str], passed: list[str]) -> None:
        for name in failed:
            failures.set_status(name, self.test_name, "xfail")
        for name in passed:
            failures.set_status(name, self.test_name, "xsuccess")
        if failed or passed:
            failures.save()

    def _failed(self, failure: _Failure, others: list[str]) -> OpCheckError:
        also = f" (and for {', '.join(others)})" if others else ""
        return OpCheckError(
            f"{self.test_util_name} failed in the generated test {self.test_name}{also}",
            op=failure.trial.name,
            got=in_short(failure.error),
            fix="correct the operator: it may be silently incorrect; or expect the failure, in "
            f"{self.failures_dict_path}, by hand or with PYTORCH_OPCHECK_ACCEPT=1. This shows it by itself "
            f"(PYTORCH_OPCHECK_PRINT_BETTER_REPRO=1 saves the inputs):\n{self._repro(failure.trial)}",
        )

    def _passed(self, passed: list[str]) -> OpCheckError:
        return OpCheckError(
            f"Unexpected success of {self.test_util_name} in the generated test {self.test_name}",
            op=", ".join(passed),
            expected="a failure",
            fix=f"remove the entry from {self.failures_dict_path}, by hand or with PYTORCH_OPCHECK_ACCEPT=1",
        )

    def _repro(self, trial: Trial) -> str:
        call = (self.test_util_name, trial.op, trial.args, trial.kwargs)
        try:
            return generate_repro(*call, save_data=saves_inputs())
        except Exception as error:
            # What was found matters more than that it can be saved.
            return f"# The inputs cannot be saved: {in_short(error)}\n" + generate_repro(*call, save_data=False)
