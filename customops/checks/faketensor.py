"""test_faketensor: the fake impl promises what the operator returns.

The operator runs once on real inputs and once on fakes of them (each part by itself if it is made of others that are
not torch's own), and whatever a tracer goes by has to agree: how many outputs there are, their shape, stride, dtype,
device, and which of them are or alias which inputs. Sizes that the fake leaves open (``get_ctx().new_dynamic_size()``)
agree with any size in the range it gives them, and with one another.

Both runs are made without gradients. What autograd does with an operator is not the fake impl's business, and a fake
that is right below autograd stays right above it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from customops import _torch
from customops.checks import _memory
from customops.checks._inputs import tensors_in
from customops.checks._outcome import NotExercised
from customops.checks._trial import JudgingMode, Trial, failed_call, is_untraceable, resolve
from customops.errors import CheckError, MissingFakeError


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


def _compare(real: Trial, *, is_composite: bool = False) -> Any:
    """Run the operator on real inputs and on fakes of them, and compare; returns what it returned on real ones."""
    mode = _torch.tensors.fake_mode()
    try:
        fake = real.faked(mode)
    except _torch.tensors.NoFakeTensor as error:
        raise NotExercised(f"torch cannot make a fake of an input: {error}") from error
    real_outputs = real.run()
    try:
        with mode:
            fake_outputs = fake.op(*fake.args, **fake.kwargs)
    except Exception as error:
        if _torch.tensors.needs_data(error):
            if is_composite:
                raise NotExercised("the operator is made of aten operators, and reads the data of one") from error
            if is_untraceable(fake.op):
                raise NotExercised("the operator is tagged as depending on data, and its fake impl refuses") from error
        if isinstance(error, (_torch.tensors.NoFakeImpl, MissingFakeError)) or "no fake impl" in str(error):
            raise failed_call(
                fake.name,
                f"{fake.op} has no fake impl, so that nothing that calls it can be traced or compiled",
                error,
                fix="register one with register_fake",
            ) from error
        raise failed_call(
            fake.name,
            f"{fake.op} fails on fake tensors, and not on real ones",
            error,
            fix="a fake impl returns one fake for each return of the schema. It has shapes, strides and dtypes to go "
            "by; there is no data, and real tensors may not be used",
        ) from error
    _Comparison(real.name).compare(real, real_outputs, fake, fake_outputs)
    return real_outputs


class _Comparison:
    """Compares the real run of an operator with the fake one, and raises a CheckError at the first difference."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.sizes: dict[Any, int] = {}  # the real values of the sizes that a fake impl left open

    def compare(self, real: Trial, real_outputs: Any, fake: Trial, fake_outputs: Any) -> None:
        pairs = list(self._pairs("output", real.by_return(real_outputs), fake.by_return(fake_outputs)))
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
            for name, value in real.arguments.items()
            for ours, promised in zip(tensors_in(value), tensors_in(fake.arguments[name]), strict=True)
        ]
        for one, other in [*itertools.product(outputs, inputs), *itertools.combinations(outputs, 2)]:
            ours, promised = _relation(one[1], other[1]), _relation(one[2], other[2])
            if one[1].numel() and ours != promised:
                raise self._error(
                    f"{one[0]} and {other[0]}: the aliasing differs",
                    f"{one[0]} {ours} {other[0]}",
                    f"{one[0]} {promised} {other[0]}",
                )
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
            open_sizes = [self._explained(size) for size in fake_shape if isinstance(size, torch.SymInt)]
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
                "is contiguous",
            )
        if not self._agree(fake.storage_offset(), real.storage_offset()):
            raise self._error(f"{where}: the storage offsets differ", real.storage_offset(), fake.storage_offset())

    def _agree(self, fake: Any, real: Any) -> bool:
        if isinstance(real, torch.SymInt):
            return True  # a ragged dimension, which has no one size
        if not isinstance(fake, torch.SymInt):
            return bool(fake == real or (fake != fake and real != real))  # the latter is NaN
        expression = fake.node.expr
        known = expression.subs(self.sizes)
        bounds = fake.node.shape_env.bound_sympy(expression)
        if known.is_number:
            return bool(known == real)
        if expression.is_symbol and real in bounds:
            self.sizes[expression] = real
        return real in bounds

    def _explained(self, size: torch.SymInt) -> str:
        known = size.node.expr.subs(self.sizes)
        bounds = size.node.shape_env.bound_sympy(size.node.expr)
        return f"{size} is {known if known.is_number else f'from {bounds.lower} to {bounds.upper}'}"

    def _error(self, problem: str, real: Any, fake: Any, fix: str | None = None) -> CheckError:
        return CheckError(
            f"the fake impl promises what the operator does not return: {problem}",
            op=self.name,
            expected=f"{real} (the operator)",
            got=f"{fake} (its fake impl)",
            fix=fix,
        )


def _relation(tensor: torch.Tensor, other: torch.Tensor) -> str:
    if tensor is other:
        return "is"
    return "shares memory with" if _memory.share_storage(tensor, other) else "does not share memory with"
