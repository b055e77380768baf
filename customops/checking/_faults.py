"""What an exception of a call, or a finding of a check, means: whether it is a fault, and which."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import ModuleType, NoneType
from typing import Any

import torch

from customops._places import where
from customops.checks._inputs import as_ordinary, is_ordinary
from customops.checks._limits import Limits, TookTooLong
from customops.checks._outcome import NotExercised, in_short, is_accident, is_alias, is_mistake, raised_at
from customops.checks._runs import attempt, fake_error
from customops.checks._trial import Case, Trial, of_reference
from customops.errors import CheckError

__tracebackhide__ = True  # pytest leaves the frames out

#: The checks whose faults are mostly those of the fake impl.
_OF_FAKES = ("test_faketensor", "test_symbolic_sizes")
#: The checks whose faults are those of the kernel that ran, where they do not say more.
_OF_KERNELS = ("test_schema", "test_writes", "test_unchecked", "test_modes")
#: What else can be done about inputs that the author did not mean to allow, by what was changed.
_REFUSE = {
    "dtype": "refuse the dtype in kernel and fake impl, with torch._check(...); "
    "fixed='dtype' of register_samples keeps others from being tried",
    "size": "refuse these sizes in kernel and fake impl, with torch._check(...); "
    "constraints= of register_samples keeps them from being tried",
}
_REFUSE["broadcast"] = _REFUSE["size"]
#: What errors about shapes say.
_SHAPES = re.compile(r"shape|size|broadcast|dimension|out of bounds|out of range")
#: Kinds of inputs that have the shapes and dtypes of the sample. If one implementation accepts such an input, the
#: others have to. Other kinds are left to the checks of results: many kernels accept by accident what they are not for.
OF_VALUES = ("number", "choice", "optional", "value", "padding", "index")
#: Expectations that need not hold for the reference function either: they were learnt from some calls, or are what most
#: operators promise of rounding and of points where they are not smooth. By the check, how such problems begin.
_NOT_OF_ALL = {
    **dict.fromkeys(("test_batches", "test_permutations", "test_symmetries", "test_precision", "test_stability"), ""),
    "test_backward": "of the gradients: ",
    "test_gradients": "the gradients at a kink, or a tie",
    "test_second_order": "the second derivative is wrong",
}
#: What differs in the messages of one cause: numbers, dtypes.
VARYING = re.compile(r"\d+|torch\.\w+")


def exits(op: str, source: str | None) -> CheckError:
    """Return the fault of an operator that raises SystemExit."""
    fix = "raise another error: SystemExit passes by `except Exception`"
    return CheckError("the operator exits the program, with sys.exit()", op=op, where=source, fix=fix)


def exceeds(exceeded: str, error: BaseException, op: str, source: str | None) -> CheckError:
    """Return the fault of a call that exceeds a limit, which `exceeded` describes."""
    fix = "refuse such inputs, by torch._check(...); check(timeout=, memory=) allow more"
    return CheckError(exceeded, op=op, where=raised_at(error) or source, fix=fix)


def fault_of_call(case: Case, error: BaseException, sample: Trial, limits: Limits, custom_op: Any) -> CheckError | None:
    """Return the fault of a call that raised `error`, or None if the operator refused its inputs.

    `sample` is the call that the case was made of.
    """
    accident, expected, fix, trial = is_accident(error), None, None, case.trial
    of_types, source = (AttributeError, TypeError), None if custom_op is None else str(custom_op.source)
    if exceeded := limits.is_exceeded_by(error):
        return exceeds(exceeded, error, trial.name, source)
    if case.kind == "sample":
        if isinstance(error, CheckError):
            return error
        problem = "the operator itself fails on its sample"
    elif isinstance(error, SystemExit):
        return exits(trial.name, source)
    elif is_mistake(error):
        problem, of = "the code of the kernel is wrong: a name is not there", getattr(error, "obj", None)
        fix = "correct the name"
        if not isinstance(of, (NoneType, ModuleType, torch.Tensor)):
            fix = f"this {type(of).__name__} is taken for something else: NumPy makes numbers of arrays without "
            fix += "dimensions, np.asarray(...) arrays; or refuse such inputs, by torch._check(...)"
    elif is_alias(error):
        problem = "for some inputs the operator returns an input itself, a view of one, or the same memory twice"
        expected = "new tensors, as the schema says, or none for these inputs"
        fix = "return a clone() there; or check the inputs first, and refuse these with an error that says so"
    elif accident and case.kind == "layout" and custom_op is not None and _takes_contiguous(trial):
        problem = "the kernel fails on a tensor that is laid out otherwise, by an error that does not say so"
        fix = "call x.contiguous() first, or .reshape() in the place of .view(); or refuse such tensors in kernel "
        fix += "and fake impl, with torch._check(x.is_contiguous(), ...)"
    elif accident and case.kind == "value" and custom_op is not None and _is_about_values(trial, error, sample):
        problem = "the kernel fails for some values of an input, by an error about shapes that does not say so"
        fix = "elements may be equal, and a selection by them of another size than usual; or refuse such values, "
        fix += "with torch._check(...)"
    elif accident and case.kind == "optional" and isinstance(error, of_types) and "NoneType" in str(error):
        problem = "the kernel fails where an optional argument is None"
        fix = "test `is not None`; or say by the type that it is not optional"
    elif accident and _has_to_take(case, error) and trial.reference and attempt(trial, op=trial.reference):
        problem = "the kernel fails by an error that does not say so, on inputs that the reference takes"
        fix = "have the kernel take them; or refuse them in kernel, fake impl and reference, by torch._check(...)"
    else:
        return None
    fields = {"got": in_short(error), "expected": expected, "where": raised_at(error), "fix": fix}
    return CheckError(problem, op=trial.name, **fields)


def _takes_contiguous(trial: Trial) -> bool:
    """Return whether an op that makes no views accepts the same tensors in their ordinary layout."""
    ordinary = trial.map_tensors(lambda _, x: x if is_ordinary(x) else as_ordinary(x))
    return not trial.schema.is_view and attempt(ordinary) is not None


def _is_about_values(trial: Trial, error: BaseException, sample: Trial) -> bool:
    """Return whether only finite floats were changed, and shapes do not fit in the kernel, but do in the fake impl."""
    given = {id(tensor) for tensor in sample.tensors}
    changed = [tensor for tensor in trial.tensors if id(tensor) not in given]
    are_numbers = all(tensor.is_floating_point() and bool(tensor.isfinite().all()) for tensor in changed)
    return are_numbers and bool(_SHAPES.search(str(error))) and isinstance(fake_error(trial), NoneType | NotExercised)


def _has_to_take(case: Case, error: BaseException) -> bool:
    """Return whether only values were changed, or a kernel divides by a size of zero, or indexes what is empty."""
    is_empty = any(not tensor.numel() for tensor in case.trial.tensors)
    return case.kind in OF_VALUES[:3] or (is_empty and isinstance(error, (ArithmeticError, LookupError)))


def is_of_reference(name: str, check: Callable[[Trial], None], trial: Trial, error: CheckError, limits: Limits) -> bool:
    """Return whether a check reports the same for the reference function: the operator then has to compute that."""
    start = _NOT_OF_ALL.get(name)
    if trial.reference is None or start is None or not error.problem.startswith(start):
        return False
    try:
        with of_reference(trial) as reference, limits.applied(times=10):
            check(reference)
    except CheckError as other:
        return other.problem == error.problem
    except (Exception, TookTooLong):  # nothing is known of the reference then
        return False
    return False


def complete(error: CheckError, check: str, case: Case, custom_op: Any) -> None:
    """Add to a fault what else can be done about such inputs, and where the code is that is probably wrong."""
    if case.kind in _REFUSE:
        error.fix = f"{error.fix or 'correct the op for this input'}; or {_REFUSE[case.kind]}"
    if check in _OF_FAKES and error.where is None and custom_op is not None:
        fake = custom_op._rules.fake.fn
        error.where = None if fake is None else where(fake)
    elif check in _OF_KERNELS and error.where is None and len(case.trial.kernels) > 1:
        error.where = case.trial.place


def identity_of(error: CheckError) -> tuple[str, str]:
    """Return what the reports of one fault have in common: the problem and the cause, without numbers and dtypes."""
    cause = error.__cause__
    raised = "" if cause is None else f"{type(cause).__name__}: {str(cause).partition(chr(10))[0]}"
    return VARYING.sub("", error.problem), VARYING.sub("", raised)
