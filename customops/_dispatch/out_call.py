"""A call of the kernel of an out variant: what it is given to write to, and what it returns.

The kernel gets tensors that it can just fill. What the caller gave is looked at before: tensors of another shape, dtype
or device than the result are refused. Where they have other strides than the fake impl says, or lie in memory that the
kernel reads, it gets tensors of its own, and the result is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any, Protocol

from torch import Tensor

from customops import _compat
from customops._dispatch.callbacks import Fn
from customops._dispatch.expected import Expected, Foresight, lookup, remember
from customops._dispatch.results import describe, tensors_in
from customops._schema.model import Schema
from customops._schema.outs import out_names
from customops.errors import AliasError, ArgumentError, KernelError, where

__tracebackhide__ = True  # pytest leaves the frames out


class HasForesight(Protocol):
    foresight: Foresight


def misfit(op: str, argument: str, expected: Expected, out: Tensor) -> ArgumentError:
    return ArgumentError(
        "an out tensor does not match the result, and is neither resized nor cast",
        op=op,
        argument=argument,
        expected=str(expected),
        got=str(Expected.like(out)),
        fix=f'{argument}=torch.empty({tuple(expected.shape)}, dtype={expected.dtype}, device="{expected.device}")',
    )


def check_given(op: str, names: Sequence[str], outs: Sequence[Tensor | None]) -> None:
    """Raise if one is None: the dispatcher takes that for a tensor."""
    for name, out in zip(names, outs, strict=True):
        if out is None:
            raise ArgumentError("the out tensor is missing", op=op, argument=name, expected="a tensor", got="None")


class ReturnsOut:
    """A kernel of the user as one that returns ``out``: it may return nothing, or that."""

    def __init__(self, fn: Fn, op: str) -> None:
        self.fn, self.op = fn, op
        self.__wrapped__ = fn

    def __call__(self, /, *args: Any, out: Any, **kwargs: Any) -> Any:
        result = self.fn(*args, out=out, **kwargs)
        if result is not None and result is not out and not _same_items(result, out):
            raise KernelError(
                "a kernel of an out variant returned something other than its out tensors",
                op=self.op,
                expected="out itself, or None",
                got=describe(result),
                where=where(self.fn),
                fix="write into out and end with `return out`, or without a return",
            )
        return out


def _same_items(result: Any, out: Any) -> bool:
    return (
        isinstance(result, (list, tuple))
        and isinstance(out, (list, tuple))
        and len(result) == len(out)
        and all(one is other for one, other in zip(result, out, strict=True))
    )


class Checked:
    """A kernel of an out variant, called with tensors that it can just fill: see the module.

    Args:
        fn: takes what the schema of the variant says.
        schema: of the functional op.
        rule: has what is known of the results of the functional op.
        inplace: the arguments that ``out`` may be.
    """

    def __init__(self, fn: Fn, schema: Schema, op: str, rule: HasForesight, inplace: frozenset[str]) -> None:
        self.fn, self.op, self.rule = fn, op, rule
        self.__wrapped__ = fn
        self.inplace = inplace
        self.names = out_names(schema)
        self.positions = [i for i, argument in enumerate(schema.positional) if argument.name in inplace]
        self.keywords = [argument.name for argument in schema.keyword_only if argument.name in inplace]

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        outs = tuple(kwargs.pop(name) for name in self.names)
        foresight = self.rule.foresight
        key = foresight.key((*args, *outs), kwargs)
        expected, targets = lookup(foresight.accepted, key), outs
        if expected is None:
            expected = self._expected(args, kwargs, outs)
            targets = tuple(
                out if each.is_laid_out(out) else each.allocate() for each, out in zip(expected, outs, strict=True)
            )
            if all(map(is_, targets, outs)):
                remember(foresight.accepted, key, expected)
        if _compat.memory.any_alias(args, kwargs, outs):
            targets = self._apart(args, kwargs, outs, targets, expected)
        self.fn(*args, **kwargs, **dict(zip(self.names, targets, strict=True)))
        for name, out, target, was in zip(self.names, outs, targets, expected, strict=True):
            if target.shape != was.shape:
                raise self._resized(name, was, target)
            if target is not out:
                out.copy_(target)
        return outs[0] if len(outs) == 1 else outs

    def _expected(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[Tensor, ...]
    ) -> tuple[Expected, ...]:
        check_given(self.op, self.names, outs)
        foresight = self.rule.foresight
        expected = foresight.of(args, kwargs)
        if expected is None:
            return tuple(map(Expected.like, outs))
        if not all(each.fits(out) for each, out in zip(expected, outs, strict=True)):
            foresight.forget()
            expected = foresight.of(args, kwargs) or expected
            for name, each, out in zip(self.names, expected, outs, strict=True):
                if not each.fits(out):
                    raise misfit(self.op, name, each, out)
        return expected

    def _apart(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outs: tuple[Tensor, ...],
        targets: tuple[Tensor, ...],
        expected: tuple[Expected, ...],
    ) -> tuple[Tensor, ...]:
        """What the kernel is to fill, where it may not write over what it still has to read."""
        for i, out in enumerate(outs):
            if any(_overlap(out, other) for other in outs[:i]):
                raise AliasError(
                    "two out tensors share memory",
                    op=self.op,
                    argument=self.names[i],
                    fix="pass tensors with separate memory",
                )
        replaced = [args[i] for i in self.positions if i < len(args)] + list(map(kwargs.get, self.keywords))
        others = tensors_in([each for i, each in enumerate(args) if i not in self.positions])
        others += tensors_in([each for name, each in kwargs.items() if name not in self.keywords])
        return tuple(
            each.allocate() if target is out and self._is_read(out, others, replaced) else target
            for each, out, target in zip(expected, outs, targets, strict=True)
        )

    @staticmethod
    def _is_read(out: Tensor, others: Sequence[Tensor], replaced: Sequence[Any]) -> bool:
        """Does a tensor to write to lie in memory that the kernel still has to read?"""
        return any(_overlap(out, x) for x in others) or any(
            _overlap(out, x) and not _is_same_view(out, x) for x in replaced if isinstance(x, Tensor)
        )

    def _resized(self, name: str, expected: Expected, target: Tensor) -> KernelError:
        return KernelError(
            "the kernel of an out variant resized an out tensor",
            op=self.op,
            argument=name,
            expected=str(expected),
            got=f"shape {tuple(target.shape)} after the call",
            where=where(self.fn),
            fix="write into the tensor without resizing it; if the new shape is right, correct the fake impl",
        )


def _overlap(one: Tensor, other: Tensor) -> bool:
    """May two tensors have an element in common?"""
    return _compat.memory.overlap(one, other, one.data_ptr(), other.data_ptr())


def _is_same_view(one: Tensor, other: Tensor) -> bool:
    return (
        one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype is other.dtype
    )
