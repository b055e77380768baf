"""test_faketensor, test_symbolic_sizes, test_errors and test_late_errors: the fake impl against the kernel."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import torch

from customops import _torch
from customops._places import is_users
from customops._torch.schema import Tag
from customops.checks import _memory
from customops.checks._inputs import quiet, tensors_in
from customops.checks._outcome import NotExercised, in_short, is_accident, raised_at, require
from customops.checks._runs import call, fake_error
from customops.checks._trial import JudgingMode, Trial, failed_call, is_untraceable, resolve
from customops.checks._variants import are_plain, can_surround, other_sizes, resized, surrounded
from customops.errors import CheckError, CustomOpsError, MissingFakeError

_INT = re.compile(r"\bint\(")
_ENOUGH = 3  #: other sizes, of those that the operator accepts
#: What is wrong in calls that a fake impl can tell as well as a kernel.
_SIZES_DIFFER, _OUT_OF_RANGE = "sizes of two tensors differ", "a dimension is out of range"

# ----------------------------------------------------------------------------------------------------------------------
# test_faketensor: the fake impl promises what the operator returns.
#
# The operator runs once on real inputs and once on fakes of them (each part by itself if it is made of others that are
# not torch's own), and whatever a tracer goes by has to agree: how many outputs there are, their shape, stride, dtype,
# device, and which of them are or alias which inputs. Sizes that the fake leaves open
# (``get_ctx().new_dynamic_size()``) agree with any size in the range it gives them, and with one another.
#
# Both runs are made without gradients. What autograd does with an operator is not the fake impl's business, and a fake
# that is right below autograd stays right above it.


def fake_check(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
    """Raise CheckError if the results of `op` on fake tensors do not match those on real tensors.

    Raises:
        NotExercised: torch cannot make fake tensors of these inputs, or the operator has a tag that says it cannot be
            traced.
    """
    check(Trial(resolve(op), tuple(args), kwargs or {}))


def check(trial: Trial) -> None:
    trial.require_data()
    copy = trial.copy(leaves=True)
    mode = JudgingMode(trial.op, _compare)
    with torch.no_grad(), mode:
        copy.run()
    if not mode.judged:  # it is made of builtin operators
        with torch.no_grad():
            _compare(trial.copy(leaves=True), is_composite=True)
    elif _fake_is_by_hand(trial) and _is_new(trial) and are_plain(trial) and all(x.is_cpu for x in trial.tensors):
        _check_on_meta(trial)
        _check_on_another_device(trial)


def _fake_is_by_hand(trial: Trial) -> bool:
    """Did somebody write the fake impl, of an op that has a kernel for all devices?"""
    if trial.custom_op is None or trial.custom_op._rules.fake.fn is None or trial.fake_is_reference:
        return False
    return None in trial.custom_op._rules.kernel.kernels


def _is_new(trial: Trial) -> bool:
    """Is it a sample, or differs it from all samples by more than sizes, strides and data?"""

    def form(call: Trial) -> str:
        kinds = _torch.trees.tree_map(lambda v: v.dtype if isinstance(v, torch.Tensor) else repr(v), call.arguments)
        return str(kinds)

    return trial.is_sample or form(trial) not in map(form, trial.samples)


def _check_on_meta(trial: Trial) -> None:
    """What models are made of before they have memory: tensors of the meta device, which are no fakes."""
    with torch.no_grad(), quiet():
        metas = trial.map_tensors(lambda _, x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta"))
        try:
            metas.op(*metas.args, **metas.kwargs)
        except Exception as error:
            if is_accident(error) and not isinstance(error, RuntimeError):  # as for sizes that depend on data
                fix = "use shapes, strides and dtypes alone: the device of an input may be meta"
                problem = "the fake impl fails on tensors of the meta device, and not on fakes of others"
                raise failed_call(trial.name, problem, error, fix) from error


def _check_on_another_device(trial: Trial) -> None:
    """The fake impl makes its results where the inputs are. A fake may be of a device that is not there."""
    if not trial.tensors or any(argument.type.startswith("Device") for argument in trial.schema.arguments):
        return
    mode = _torch.fakes.fake_mode()
    with torch.no_grad(), quiet(), mode:
        elsewhere = trial.map_tensors(
            lambda _, x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")
        )
        try:
            results = elsewhere.by_return(elsewhere.op(*elsewhere.args, **elsewhere.kwargs))
        except Exception:  # a constant on the CPU, say, which the kernel may move
            return
    for i, result in enumerate(tensors_in(results)):
        if result.device.type == "cpu" and result.dim():
            raise trial.finding(
                "the fake impl promises a result on the CPU, whatever the device of the inputs",
                expected=f"output {i} on {elsewhere.tensors[0].device}, where the inputs are",
                got=f"on {result.device}",
                fix="x.new_empty(...), torch.empty_like(x), or device=x.device",
            )


def _compare(real: Trial, *, is_composite: bool = False) -> Any:
    """Run the operator on real inputs and on fakes of them, and compare; returns what it returned on real ones."""
    mode = _torch.fakes.fake_mode()
    try:
        fake = real.faked(mode)
    except _torch.fakes.NoFakeTensor as error:
        raise NotExercised(f"torch cannot make a fake of an input: {error}") from error
    real_outputs = real.run()
    try:
        with mode:
            fake_outputs = fake.op(*fake.args, **fake.kwargs)
    except Exception as error:
        if _torch.fakes.needs_data(error):
            if is_composite:
                raise NotExercised("the operator is made of aten operators, and reads the data of one") from error
            if is_untraceable(fake.op):
                raise NotExercised("the operator is tagged as depending on data, and its fake impl refuses") from error
        problem = f"{fake.op} fails on fake tensors, and not on real ones"
        fix = (
            "a fake impl returns one fake for each return of the schema. It has shapes, strides and dtypes to go by; "
            "there is no data, and real tensors may not be used"
        )
        if _torch.fakes.reads_data(error):
            fix = (
                "this line reads the data of a tensor, and a fake has none. int(x), x.item(), `if x:` and x[i] with a "
                "0-dimensional tensor i read data; torch.where, gather and index_select do not"
            )
        if isinstance(error, MissingFakeError) or _has_no_fake_impl(error):
            require(not real.schema.is_view, "it has no fake impl, and torch traces no such operators that make views")
            problem = f"{fake.op} has no fake impl, so that nothing that calls it can be traced or compiled"
            fix = "register one with register_fake"
        raise failed_call(fake.name, problem, error, fix) from error
    _Comparison(real).compare(real_outputs, fake, fake_outputs)
    returned = [a.name for a in real.schema.mutated if any(a.may_alias(ret) for ret in real.schema.returns)]
    tags = real.op.tags if real.custom_op is None else real.custom_op.tags
    if returned and not is_composite and not real.is_builtin and not {Tag.inplace, Tag.out}.intersection(tags):
        raise real.finding(
            f"the operator returns {returned[0]}, which it writes, without Tag.inplace: it cannot be compiled",
            argument=returned[0],
            expected="tags=customops.Tag.inplace, or Tag.out: torch does not functionalize others that return an alias",
            got=str(_torch.schema.schema_of(real.op)),
            fix="define it by custom_op with the tag; or return nothing",
        )
    return real_outputs


#: What to do where the strides of the reference are others.
_OF_REFERENCE = "; the fake impl is the reference: let it return such tensors, for example by .contiguous()"


class _Comparison:
    """Compares the real run of an operator with the fake one, and raises a CheckError at the first difference."""

    def __init__(self, real: Trial) -> None:
        self.real = real
        self.sizes: dict[Any, int] = {}  # the real values of the sizes that a fake impl left open

    def compare(self, real_outputs: Any, fake: Trial, fake_outputs: Any) -> None:
        pairs = list(self._pairs("output", self.real.by_return(real_outputs), fake.by_return(fake_outputs)))
        for where, ours, promised in pairs:
            if any(isinstance(ours, kind) != isinstance(promised, kind) for kind in (torch.Tensor, type(None))):
                raise self._error(f"{where}: the kinds differ", type(ours).__name__, type(promised).__name__)
            if isinstance(ours, torch.Tensor):
                self._compare_tensors(where, ours, promised)
            elif not isinstance(promised, (torch.SymBool, torch.SymFloat)) and not self._agree(promised, ours):
                raise self._error(f"{where}: the values differ", ours, promised)

        outputs = [pair for pair in pairs if isinstance(pair[1], torch.Tensor)]
        inputs = [
            (f"argument {name}", ours, promised)
            for (name, _, ours), (_, _, promised) in zip(self.real.named_tensors, fake.named_tensors, strict=True)
        ]
        for one, other in [*itertools.product(outputs, inputs), *itertools.combinations(outputs, 2)]:
            ours, promised = _relation(one[1], other[1]), _relation(one[2], other[2])
            if one[1].numel() and ours != promised:
                problem = f"{one[0]} and {other[0]}: the aliasing differs"
                raise self._error(problem, *(f"{one[0]} {relation} {other[0]}" for relation in (ours, promised)))
        for where, ours, promised in inputs:
            self._compare_tensors(f"{where} after the call", ours, promised)

    def _pairs(self, where: str, real: Any, fake: Any) -> Iterator[tuple[str, Any, Any]]:
        """Matching values of two nests of lists and tuples, with what to call them."""
        if not isinstance(real, (list, tuple)) or not isinstance(fake, (list, tuple)):
            yield where, real, fake
            return
        if len(real) != len(fake):
            raise self._error(f"{where}: the number of values differs", len(real), len(fake))
        for i, (one, other) in enumerate(zip(real, fake, strict=True)):
            yield from self._pairs(f"{where} {i}" if where == "output" else f"{where}[{i}]", one, other)

    def _compare_tensors(self, where: str, real: torch.Tensor, fake: torch.Tensor) -> None:
        for what, ours, promised in [
            ("Layouts", real.layout, fake.layout),
            ("Dtypes", real.dtype, fake.dtype),
            ("Devices", real.device, fake.device),
            ("Conjugate bits", real.is_conj(), fake.is_conj()),
            ("Negative bits", real.is_neg(), fake.is_neg()),
        ]:
            if ours != promised:
                raise self._error(f"{where}: {what} {ours} and {promised} are not equal", ours, promised)
        shape: tuple[Any, ...] = tuple(real.shape)
        fake_shape: tuple[Any, ...] = tuple(fake.shape)
        if len(shape) != len(fake_shape) or not all(map(self._agree, fake_shape, shape)):
            open_sizes = [
                f"{size} is {known if known.is_number else f'from {bounds.lower} to {bounds.upper}'}"
                for size in fake_shape
                if isinstance(size, torch.SymInt)
                for known, bounds in [self._known(size)]
            ]
            problem = f"{where}: Shapes {shape} and {fake_shape} are not equal"
            raise self._error(problem, shape, ", ".join([str(fake_shape), *open_sizes]))
        if real.layout is not torch.strided or not real.numel():
            return
        # The stride of a dimension of one element is never used.
        used = [dim for dim, size in enumerate(shape) if size > 1]
        if not all(self._agree(fake.stride(dim), real.stride(dim)) for dim in used):
            raise self._error(
                f"{where}: Stride mismatch",
                real.stride(),
                fake.stride(),
                "return the layout the kernel makes, e.g. torch.empty_like(x) keeps that of x, x.new_empty(x.shape) "
                "is contiguous" + (_OF_REFERENCE if self.real.fake_is_reference else ""),
            )
        if not self._agree(fake.storage_offset(), real.storage_offset()):
            raise self._error(f"{where}: the storage offsets differ", real.storage_offset(), fake.storage_offset())

    def _known(self, size: torch.SymInt) -> tuple[Any, Any]:
        """A size that was left open with what is known by now, and its bounds."""
        return size.node.expr.subs(self.sizes), size.node.shape_env.bound_sympy(size.node.expr)

    def _agree(self, fake: Any, real: Any) -> bool:
        if isinstance(real, torch.SymInt):
            return True  # a ragged dimension, which has no one size
        if not isinstance(fake, torch.SymInt):
            return bool(fake == real or (fake != fake and real != real))  # the latter is NaN
        known, bounds = self._known(fake)
        if known.is_number:
            return bool(known == real)
        if fake.node.expr.is_symbol and real in bounds:
            self.sizes[fake.node.expr] = real
        return real in bounds

    def _error(self, problem: str, real: Any, fake: Any, fix: str | None = None) -> CheckError:
        return self.real.finding(
            f"the fake impl promises what the operator does not return: {problem}",
            expected=f"{real} (the operator)",
            got=f"{fake} (its fake impl)",
            fix=fix,
        )


def _relation(tensor: torch.Tensor, other: torch.Tensor) -> str:
    if tensor is other:
        return "is"
    return "shares memory with" if _memory.share_storage(tensor, other) else "does not share memory with"


# ----------------------------------------------------------------------------------------------------------------------
# test_symbolic_sizes: one run of the fake impl on sizes that are symbols is right for every size.
#
# ``torch.compile`` and ``torch.export`` run a fake impl once, on symbols, and use what it promised for other sizes. So
# it runs here on inputs each size of which is a symbol of its own, and its promises are worked out for the sizes of the
# sample, and for others that the operator accepts, and compared with what the operator returns there. As in an export,
# `torch.compiler.is_compiling` says yes meanwhile. Sizes for which compiled code would be traced again (they fail a
# guard) are left out: the fake impl may branch on a size.
#
# A size that ``int()`` made a number is a fault of its own: all sizes are compiled anew, and an export with dynamic
# sizes is refused. It is reported where the operator was seen to accept another size, and the call of ``int`` is in the
# user's code.


def check_symbolic_sizes(trial: Trial) -> None:
    trial.require_data()
    require(are_plain(trial), "an input is not a plain strided tensor")
    if not any(size > 1 for tensor in trial.tensors for size in tensor.shape):
        raise NotExercised("no input has a size of two or more: one of 0 or 1 is never a symbol")
    trial = trial.detached()
    run = _torch.for_checks.SymbolicRun()
    with torch.no_grad(), quiet():
        try:
            fake = trial.map_tensors(lambda _, tensor: run.fake(tensor))
        except _torch.fakes.NoFakeTensor as error:
            raise NotExercised(f"torch cannot make a fake of an input: {in_short(error)}") from error
        try:
            with run.active(), _torch.for_checks.as_if_compiling():
                promised = _torch.trees.tree_leaves(fake.results())
        except Exception as error:
            # Where it does not run on numbers either, it is test_faketensor that says so.
            if _torch.fakes.needs_data(error) or trial.is_builtin or _fake_error(trial) is not None:
                raise NotExercised(f"its fake impl refuses: {in_short(error, 200)}") from error
            raise failed_call(
                trial.name,
                "the fake impl fails on sizes that are symbols, and not on numbers",
                error,
                fix="torch.compile and torch.export pass symbols (SymInt) for sizes: use arithmetic and torch "
                "functions on them, nothing that insists on an int, such as numpy or isinstance(n, int)",
            ) from error
        seen = 0
        for other in (trial, *other_sizes(trial)):
            seen += _compare_sizes(run, trial, other, promised)
            if seen > _ENOUGH:
                break
        _judge_constants(run, trial)


def _leaves_of_a_call(trial: Trial) -> list[Any] | None:
    """What a call of the operator returned and wrote, as it is; None if it does not take the inputs."""
    copy = trial.copy()
    try:
        return _torch.trees.tree_leaves([*copy.by_return(call(copy)), *copy.mutated.values()])
    except Exception:  # a derived input need not be accepted
        return None


def _compare_sizes(run: Any, trial: Trial, other: Trial, promised: list[Any]) -> bool:
    """Compare with one call of the operator; False if it says nothing."""
    values = run.values(other.distinct)
    leaves = _leaves_of_a_call(other) if run.holds_for(values) else None
    if leaves is None:
        return False
    # What was promised of strides and offsets is for inputs that lie in memory in the same way.
    offsets, other_offsets = ([int(tensor.storage_offset()) for tensor in each.tensors] for each in (trial, other))
    lies_alike = other is trial or (offsets == other_offsets and all(map(_is_dense, trial.tensors)))
    # Else the number of tensors depends on a size.
    pairs = zip(leaves, promised, strict=True) if len(leaves) == len(promised) else ()
    for i, (real, fake) in enumerate(pairs):
        found = _differs(run, values, real, fake, lies_alike)
        if found is not None:
            what, got, expected = found
            sizes = ", ".join(str(tuple(tensor.shape)) for tensor in other.tensors)
            raise trial.finding(
                f"the fake impl, run on sizes that are symbols, promises another {what} than the operator returns",
                expected=f"result {i}: {expected} (the operator, on sizes {sizes})",
                got=f"{got} (its fake impl)",
                fix="compute it from the sizes of the inputs, with the arithmetic the kernel uses; a number is right "
                "for one size only, and so is a branch on symbols or on is_compiling()",
            )
    return True


def _is_dense(tensor: torch.Tensor) -> bool:
    """Is it contiguous, in some order of its dimensions?"""
    order = sorted(range(tensor.dim()), key=lambda dim: (tensor.stride(dim), tensor.shape[dim]), reverse=True)
    return tensor.permute(order).is_contiguous()


def _differs(run: Any, values: dict[Any, int], real: Any, fake: Any, lies_alike: bool) -> tuple[str, str, str] | None:
    """What differs, what was promised of it, and what it is."""
    if not isinstance(real, torch.Tensor):
        promised = run.evaluate(fake, values) if isinstance(fake, torch.SymInt) else None
        return None if promised is None or promised == real else ("number", str(promised), str(real))
    if not isinstance(fake, torch.Tensor) or real.layout is not torch.strided:
        return None
    if real.dtype != fake.dtype:
        return "dtype", str(fake.dtype), str(real.dtype)
    shape, strides = ([run.evaluate(size, values) for size in sizes] for sizes in (fake.shape, fake.stride()))
    if not _agree(shape, list(real.shape)):
        return "shape", _text(shape), str(tuple(real.shape))
    if not lies_alike:
        return None
    used = [dim for dim, size in enumerate(real.shape) if size > 1 and real.numel()]
    if not _agree([strides[dim] for dim in used], [real.stride(dim) for dim in used]):
        return "stride", _text(strides), str(real.stride())
    offset = run.evaluate(fake.storage_offset(), values)
    if not _agree([offset], [int(real.storage_offset())]):
        return "storage offset", str(offset), str(real.storage_offset())
    return None


def _agree(promised: list[Any], real: list[int]) -> bool:
    return len(promised) == len(real) and all(p is None or p == r for p, r in zip(promised, real, strict=True))


def _text(sizes: list[Any]) -> str:
    return "(" + ", ".join("?" if size is None else str(size) for size in sizes) + ")"


def _judge_constants(run: Any, trial: Trial) -> None:
    made = [each for each in run.made_constant() if _INT.search(each[3]) and is_users(each[1])]
    constants = [(number, f"{file}:{line}") for number, file, line, _ in made]
    first = _leaves_of_a_call(trial) if constants and not trial.is_builtin else None
    for other in other_sizes(trial) if first is not None else ():
        real = None if run.holds_for(run.values(other.distinct)) else _leaves_of_a_call(other)
        if first is None or real is None or len(tensors_in(real)) != len(tensors_in(first)):
            continue
        number, place = constants[0]
        raise trial.finding(
            "the fake impl makes a number of a size, so that each size is compiled anew, and none can be exported as "
            "dynamic",
            got=f"int() of a size, {number} here",
            where=place,
            fix="leave the size as it is, a torch.SymInt: it can be computed with, and passed on as a size",
        )


# ----------------------------------------------------------------------------------------------------------------------
# test_errors and test_late_errors: kernel and fake impl refuse the same calls.
#
# Calls that are wrong are made of one that is right: sizes that agreed between two tensors made to differ, another
# number of dimensions, numbers of dimensions that are out of range, other dtypes.
#
# - The kernel takes a call and its fake impl raises: compiled code refuses what runs in eager mode.
# - The kernel fails by accident, with a name that is not defined: code that nobody has run.
# - test_late_errors, a thorough check: the kernel refuses sizes of two tensors that do not agree, or a dimension that
#   is out of range, and its fake impl returns a result. Compiled code then fails late, inside a kernel. For dtypes and
#   values a kernel may be stricter, and many right ops leave sizes to their kernel, too: so this is not asked by
#   default.


def check_errors(trial: Trial, *, late: bool = False) -> None:
    trial.require_data()
    if trial.is_builtin or not _torch.dispatcher.runs_python(trial.name):
        raise NotExercised("the kernel is not Python: a wrong call might end the process")
    if late and trial.schema.mutated:
        raise NotExercised("the operator writes: its fake impl may be that which its schema implies")
    require(are_plain(trial) and trial.tensors, "no input is a plain strided tensor")
    trial = trial.detached()
    tried = 0
    with torch.no_grad():
        for what, name, value in _wrong_values(trial):
            if not late or what in (_SIZES_DIFFER, _OUT_OF_RANGE):
                tried += 1
                _judge_wrong_call(trial.with_arguments(**{name: value}), what, name, late=late)
    require(tried, "there is no tensor or dimension to make a wrong call of")


def _wrong_values(trial: Trial) -> Iterator[tuple[str, str, Any]]:
    """What is wrong, with which argument, and its value."""
    tensors = {name: value for name, value in trial.arguments.items() if isinstance(value, torch.Tensor)}
    # One size that another tensor has, too, made larger by one.
    for name, tensor in tensors.items():
        of_others = {size for other, value in tensors.items() if other != name for size in value.shape}
        for dim, size in enumerate(tensor.shape):
            if size > 1 and size in of_others:
                shape = (*tensor.shape[:dim], size + 1, *tensor.shape[dim + 1 :])
                yield _SIZES_DIFFER, name, resized(tensor, shape)
    most = max(tensor.dim() for tensor in trial.tensors)
    for name, value in trial.arguments.items():
        is_dim = isinstance(value, int) and not isinstance(value, bool) and ("dim" in name or "axis" in name)
        if is_dim and -most <= value < most:
            yield from ((_OUT_OF_RANGE, name, wrong) for wrong in (most, -most - 1))
    for name, tensor in tensors.items():
        if tensor.dim():
            yield "other dimensions", name, tensor[0].clone()
        yield "other dimensions", name, torch.stack([tensor, tensor])
    for name, tensor in tensors.items():
        if not tensor.is_complex():
            yield "another dtype", name, tensor.to(torch.int64 if tensor.is_floating_point() else torch.float32)


def _judge_wrong_call(trial: Trial, what: str, argument: str, *, late: bool) -> None:
    # A kernel that does not look at sizes reads, and writes, past the end: let it be memory that nobody uses.
    copy = surrounded(trial, 0)[0] if can_surround(trial) else trial.copy()
    error: Exception | None = None
    try:
        call(copy)
    except Exception as raised:
        error = raised
    if late and error is not None and _fake_error(trial) is None:
        raise trial.finding(
            f"the fake impl accepts a call that the kernel refuses: {what}",
            argument=argument,
            expected=f"{in_short(error, 200)} (the kernel)",
            got="a result (its fake impl), so that torch.compile takes it, and the error comes when it runs",
            fix="check sizes in the fake impl as the kernel does, with torch._check(x.shape == y.shape, ...)",
        )
    if late:
        return
    if isinstance(error, NameError) and raised_at(error):
        problem = "the kernel uses a name that is not defined there"
        raise failed_call(trial.name, problem, error, "correct the name") from error
    fake_error = _fake_error(trial) if error is None else None
    if fake_error is not None and not isinstance(fake_error, NotExercised):
        problem = fake_error.problem if isinstance(fake_error, CustomOpsError) else in_short(fake_error, 200)
        raise trial.finding(
            "the fake impl refuses a call that the kernel accepts",
            argument=argument,
            expected="a result, as in eager mode",
            got=f"{problem} (its fake impl, {what})",
            fix="torch.compile fails where eager mode works: make the kernel refuse it, too, or the fake impl accept "
            "it",
        )


def _fake_error(trial: Trial) -> Exception | None:
    """What the fake impl raises, if anything; NotExercised if it is no refusal."""
    error = fake_error(trial)
    return NotExercised("no fake impl") if error is not None and _has_no_fake_impl(error) else error


def _has_no_fake_impl(error: Exception) -> bool:
    return isinstance(error, _torch.fakes.NoFakeImpl) or "no fake impl" in str(error)
