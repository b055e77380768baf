"""The mode in which generated tests run: each call of an operator is also checked.

Errors of a check do not disturb the test. They are kept, and judged against the failures dict once the test is over.
"""

from __future__ import annotations

import collections
import json
import os
import sys
import tempfile
import threading
import traceback
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

import customops
from customops import _torch
from customops.checks import NotExercised, Outcome, Trial, run_check
from customops.checks._outcome import in_short
from customops.checks._trial import resolve
from customops.checks.inputs.probe import kernel_error
from customops.errors import OpCheckError, brief
from customops.testing.failures import FailuresDict, accepts_changes, is_set

_jit: Any = torch.jit  # which does not declare what it exports
#: The types of operators where a mode sees them called.
OPERATORS = (_torch.library.OpOverload, _torch.library.OpOverloadPacket)


def runs_operator(func: Any) -> bool:
    """Is it an operator, called to be run? A compiler calls them to see what they do."""
    if not isinstance(func, OPERATORS):
        return False
    return not (torch.compiler.is_compiling() or _jit.is_tracing() or _jit.is_scripting())


def has_no_fake(error: BaseException | None) -> bool:
    """Did a check fail because torch cannot make fakes of the inputs? That is not the operator's fault."""
    while error is not None and not isinstance(error, _torch.fakes.NoFakeTensor):
        error = error.__cause__
    return error is not None


#: ``util(op, args, kwargs)`` raises what it finds. It leaves the inputs as they are.
TestUtil = Callable[[_torch.library.OpOverload, tuple[Any, ...], dict[str, Any]], object]


_inside = threading.local()


def is_inside_opcheck_mode() -> bool:
    """True if an `OpCheckMode` is active in the calling thread."""
    return getattr(_inside, "modes", 0) > 0


_DISABLE = "TORCHDYNAMO_DISABLE"


class _DynamoSwitch:
    """Turns `torch.compile`, which calls operators where no mode sees them, off while any thread needs it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before: str | None = None

    def off(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._before = os.environ.get(_DISABLE)
                os.environ[_DISABLE] = "1"

    def restore(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                os.environ.pop(_DISABLE, None)
                if self._before is not None:
                    os.environ[_DISABLE] = self._before


_dynamo = _DynamoSwitch()


@dataclass(eq=False, repr=False)
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

    namespaces: Sequence[str]
    test_util_name: str
    test_util: TestUtil
    failures_dict: FailuresDict | None
    test_name: str
    failures_dict_path: str

    def __post_init__(self) -> None:
        super().__init__()
        self.namespaces = (self.namespaces,) if isinstance(self.namespaces, str) else tuple(self.namespaces)

    def __enter__(self) -> OpCheckMode:
        super().__enter__()  # type: ignore[no-untyped-call]
        #: The first failure of each operator, with the inputs as they were before the call.
        self._seen: dict[str, tuple[Exception, Trial] | None] = {}
        _inside.modes = getattr(_inside, "modes", 0) + 1
        _dynamo.off()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        _dynamo.restore()
        _inside.modes -= 1
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        if error is None:
            self._judge()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not runs_operator(func) or str(func).partition(".")[0] not in self.namespaces:
            return func(*args, **kwargs)
        op = resolve(func)
        name = op.name()
        if self._status(name) == "skip":
            return func(*args, **kwargs)
        trial, before = Trial(op, args, kwargs), None
        failure: tuple[Exception, Trial] | None = None
        has_failed = self._seen.get(name) is not None
        # Inside a FakeTensorMode a new tensor is fake: copies would be, and each check's runs.
        if not (has_failed or any(map(_torch.fakes.is_abstract, [*trial.tensors, torch.empty(0)]))):
            try:
                before = trial.copy()  # the operator may write to its inputs
            except Exception as error:
                failure = (error, trial)
        result = func(*args, **kwargs)
        if before is not None:
            try:
                self.test_util(op, before.args, before.kwargs)
            except NotExercised:
                pass
            except Exception as error:
                failure = None if has_no_fake(error) else (error, before)
        if not has_failed:
            self._seen[name] = failure
        return result

    def _status(self, qualname: str) -> str:
        return self.failures_dict.get_status(qualname, self.test_name) if self.failures_dict else "xsuccess"

    def _judge(self) -> None:
        found = {name: failure for name, failure in self._seen.items() if failure is not None}
        failed = [name for name in found if self._status(name) == "xsuccess"]
        passed = [name for name in self._seen if name not in found and self._status(name) == "xfail"]
        if accepts_changes() and self.failures_dict is not None:
            for name in [*failed, *passed]:
                self.failures_dict.set_status(name, self.test_name, "xfail" if name in found else "xsuccess")
            if failed or passed:
                self.failures_dict.save()
            return
        if failed:
            first, *others = failed
            (cause, trial), also = found[first], f" (and for {', '.join(others)})" if others else ""
            call = (self.test_util_name, trial.op, trial.args, trial.kwargs)
            try:
                repro = generate_repro(*call, save_data=is_set("OPCHECK_PRINT_BETTER_REPRO"))
            except Exception as error:
                # What was found matters more than that it can be saved.
                repro = f"# The inputs cannot be saved: {in_short(error)}\n" + generate_repro(*call, save_data=False)
            raise OpCheckError(
                f"{self.test_util_name} failed in the generated test {self.test_name}{also}",
                op=trial.name,
                got=in_short(cause),
                fix="correct the operator: it may be silently incorrect; or expect the failure, in "
                f"{self.failures_dict_path}, by hand or with PYTORCH_OPCHECK_ACCEPT=1. This shows it by itself "
                f"(PYTORCH_OPCHECK_PRINT_BETTER_REPRO=1 saves the inputs):\n{repro}",
            ) from cause
        if passed:
            problem = f"Unexpected success of {self.test_util_name} in the generated test {self.test_name}"
            fix = f"remove the entry from {self.failures_dict_path}, by hand or with PYTORCH_OPCHECK_ACCEPT=1"
            raise OpCheckError(problem, op=", ".join(passed), expected="a failure", fix=fix)


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
        inputs = f"args, kwargs = torch.load({json.dumps(path, ensure_ascii=False)})"
    schema = _torch.schema.schema_of(op)
    name = ".".join([*schema.name.split("::"), schema.overload_name or "default"])
    return _SCRIPT.format(op=name, inputs=inputs, test=test)


#: Of values of these types every single one is a kind; of numbers the type is.
_CHOICES = (bool, str, torch.dtype, torch.layout, torch.memory_format, type(None))


def kind_of(trial: Trial) -> str:
    """``x: float32 2d grad, by: float``: the arguments of a call, without sizes, elements and values of numbers."""
    return ", ".join(f"{name}: {_kind(value)}" for name, value in trial.arguments.items()) or "no arguments"


def _kind(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{' | '.join(sorted(set(map(_kind, value))))}]"
    if not isinstance(value, torch.Tensor):
        return brief(value, 40) if isinstance(value, _CHOICES) else type(value).__name__
    words = [str(value.dtype).removeprefix("torch."), f"{value.dim()}d"]
    if value.layout is not torch.strided or value.is_nested:
        words.append(str(value.layout).removeprefix("torch."))
    else:
        words += ["conj"] * value.is_conj() + ["neg"] * value.is_neg()
        if value.numel() == 0:
            words.append("empty")
        elif 0 in value.stride():
            words.append("expanded")
        elif not value.is_contiguous():
            words.append("strided")
    if value.device.type != "cpu":
        words.append(value.device.type)
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        words.append(type(value).__name__)
    return " ".join([*words, *["grad"] * value.requires_grad])


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


class Watch(TorchFunctionMode):
    """Notes the calls of operators in its block, so that each kind of call can be checked when the test is over.

    The test runs as without it: operators see and return the same, `torch.compile` compiles as ever, and checks run on
    copies, after the test, where none of its modes and contexts act on them any more. Calls are noted of ops that
    `wants`, by name (``ns::op``, with its overload if it has one), and of kinds, ``(name, kind)``, not yet `known`.
    """

    def __init__(self, wants: Callable[[str], bool], known: set[tuple[str, str]]) -> None:
        super().__init__()
        self.calls: list[Call] = []  #: those that were noted, and went well
        self.made: collections.Counter[str] = collections.Counter()  #: of each operator that is wanted, noted or not
        self.left_out: collections.Counter[str] = collections.Counter()  #: why calls cannot be checked
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
        """The call on copies of its inputs, or None if it is not one to check."""
        if not runs_operator(func) or str(func).partition(".")[0] in _torch.library.TORCHS:
            return None  # those of torch are not what a suite is there to test
        try:
            is_packet = isinstance(func, _torch.library.OpOverloadPacket)
            op = _torch.library.called_overload(func, args, kwargs) if is_packet else func
            trial = Trial(op, args, kwargs)
            if not torch.is_grad_enabled():
                trial = trial.detached()  # it is not recorded, so it need not be recordable
            if not self._wants(trial.name):
                return None
            callers = traceback.walk_stack(sys._getframe(1))
            if any(frame.f_code.co_filename.startswith(_CHECKERS) for frame, _ in callers):
                return None
            self.made[trial.name] += 1
            reason = None
            if _torch.dispatcher.any_mode_of_users():
                reason = "made under a mode"  # which would see how the inputs are copied
            elif any(_torch.fakes.is_abstract(tensor) for tensor in trial.tensors):
                reason = "meta, fake or functorch tensors"
            elif sum(tensor.numel() for tensor in trial.tensors) > TOO_MANY:
                reason = "more than 16 million elements"
            if reason is None and (trial.name, kind := kind_of(trial)) not in self._known:
                with torch.inference_mode(False):
                    return Call(trial.copy(), kind)
        except Exception as error:  # whatever it is, the test is not to notice
            reason = f"its inputs cannot be copied ({type(error).__name__})"
        if reason is not None:
            self.left_out[reason] += 1
        return None


def why_unchecked(call: Call) -> str | None:
    """Why a call cannot be made once more now, when the test is over, if it cannot."""
    name, _, overload = call.trial.name.partition(".")
    if _torch.library.find_overload(name, overload) is not call.trial.op:
        return "the op was gone when the test was over"  # many a test defines one for itself
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        error, _ = kernel_error(call.trial)
    # Under autocast, say: it goes by more than its inputs.
    return None if error is None else "the op refused the same inputs when the test was over"


def checked(call: Call, check: str) -> Outcome:
    """What a check says of a call, unless it is `why_unchecked`."""
    trial = call.trial
    with warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")  # of the test they say nothing
        outcome = run_check(check, trial.op, trial.args, trial.kwargs)
    if has_no_fake(outcome.error):
        return replace(outcome, status="not exercised", error=None, reason="torch has no fakes of the inputs")
    return outcome
