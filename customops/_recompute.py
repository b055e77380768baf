"""Formulas made of a function in plain torch operations that computes what the op does: it is run again, and derived.

``backward`` is the function's vjp, ``jvp`` its jvp, so both are right wherever the function is, at the price of running
it once more. An op is written as a fast kernel, and its gradient as what torch can derive.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from customops import _compat
from customops._call import Fn, bind_kernel
from customops._context import flat_metadata
from customops._definition import Definition
from customops._formula import is_differentiable
from customops._schema import Schema
from customops.errors import AutogradError, name_of, where


class Formulas(NamedTuple):
    """What `register_autograd` and `register_jvp` take."""

    backward: Fn
    jvp: Fn
    setup_context: Fn
    originals: tuple[str, ...]


def formulas(fn: Fn, definition: Definition) -> Formulas:
    """The formulas of an op that computes what `fn` does.

    Raises:
        CallbackError: `fn` does not take the op's arguments.
    """
    op, schema = str(definition.name), definition.schema
    fn = bind_kernel(fn, schema, op, "function to differentiate", warn=definition.library is not None)
    again = _Again(fn, op, schema)
    setup_context = again.setup_with_keywords if schema.keyword_only else again.setup
    return Formulas(again.backward, again.jvp, setup_context, tuple(argument.name for argument in schema.mutated))


class _OfLeaves:
    """The function of some leaves of its arguments, the others being fixed; it returns some leaves of its result."""

    def __init__(self, fn: Fn, leaves: list[Any], spec: Any, chosen: list[int], wanted: Sequence[bool]) -> None:
        self.fn, self.leaves, self.spec, self.chosen, self.wanted = fn, leaves, spec, chosen, wanted

    def __call__(self, *values: Tensor) -> tuple[Any, ...]:
        leaves = list(self.leaves)
        for i, value in zip(self.chosen, values, strict=True):
            leaves[i] = value
        args, kwargs = _compat.tree_unflatten(leaves, self.spec)
        outputs, self.result_spec = _compat.tree_flatten(self.fn(*args, **kwargs))
        if len(outputs) != len(self.wanted):
            return tuple(outputs)  # not what the op returns: see `_Again._check`
        return tuple(output for output, is_wanted in zip(outputs, self.wanted, strict=True) if is_wanted)

    def like_result(self, values: Sequence[Tensor]) -> Any:
        """`values`, one for each output that is wanted, in the structure of the function's result."""
        rest = iter(values)
        return _compat.tree_unflatten(
            [next(rest) if is_wanted else None for is_wanted in self.wanted], self.result_spec
        )


class _Again:
    """One function, and the ways to differentiate it at the inputs of a call."""

    def __init__(self, fn: Fn, op: str, schema: Schema) -> None:
        self.fn = fn
        self.op = op
        self.schema = schema

    def setup(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        self.setup_with_keywords(ctx, inputs, {}, output)

    def setup_with_keywords(self, ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: Any, output: Any) -> None:
        leaves, spec = _compat.tree_flatten((inputs, dict(keyword_only_inputs)))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx._customops_again = [None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves], spec

    def _call(self, ctx: Any, of: Sequence[bool], wanted: Sequence[bool]) -> tuple[_OfLeaves, list[Tensor]]:
        """The function as one of the leaves that `of` chooses, and these."""
        others, spec = ctx._customops_again
        tensors = iter(ctx.saved_tensors)
        leaves = [next(tensors) if other is None else other[0] for other in others]
        chosen = [i for i, is_chosen in enumerate(of) if is_chosen]
        return _OfLeaves(self.fn, leaves, spec, chosen, wanted), [leaves[i] for i in chosen]

    def _inputs(self, leaves: Iterable[Any], spec: Any) -> list[Any]:
        """What stands for each input: the positional arguments, then the tensors that are keyword-only."""
        args, named = _compat.tree_unflatten(leaves, spec)
        return [*args, *(named[argument.name] for argument in self.schema.keyword_only_tensors)]

    def backward(self, ctx: Any, *grads: Any) -> Any:
        others, spec = ctx._customops_again
        places = self._inputs(range(len(others)), spec)
        chosen: set[int] = set()
        for flag, place in zip(ctx.needs_input_grad, places, strict=False):  # the rest is at its default
            if isinstance(flag, list):
                chosen |= {i for i, needs in zip(place, flag, strict=True) if needs}
            elif flag:
                chosen.add(place)
        of = [i in chosen for i in range(len(others))]
        given = _compat.tree_leaves(list(grads))
        call, inputs = self._call(ctx, of, [is_differentiable(leaf) for leaf in given])
        outputs, pull_back, *_ = torch.func.vjp(call, *inputs)
        cotangents = [leaf for leaf in given if is_differentiable(leaf)]
        self._check(outputs, cotangents)
        found = iter(pull_back(tuple(cotangents)))
        gradients = self._inputs([next(found) if is_chosen else None for is_chosen in of], spec)
        operands = self.schema.operands
        return tuple(each if a.holds_tensors else None for a, each in zip(operands, gradients, strict=True))

    def jvp(self, ctx: Any, *_tangents: Any) -> Any:
        """The saved inputs carry their tangents, and torch's own operations take them along."""
        others, _ = ctx._customops_again
        wanted = [metadata is not None for metadata in flat_metadata(ctx._customops_results)]
        call, _inputs = self._call(ctx, [False] * len(others), wanted)
        return call.like_result(_compat.tangents_of(call))

    def _check(self, outputs: tuple[Tensor, ...], expected: list[Tensor]) -> None:
        """The function has to return what the op does, for its gradient to be that of the op."""
        got = [(list(output.shape), output.dtype) for output in outputs]
        wanted = [(list(grad.shape), grad.dtype) for grad in expected]
        if got != wanted:
            raise AutogradError(
                f"{name_of(self.fn)} does not return what the op does, so its gradient is not that of the op",
                op=self.op,
                expected=", ".join(f"{shape} {dtype}" for shape, dtype in wanted),
                got=", ".join(f"{shape} {dtype}" for shape, dtype in got),
                where=where(self.fn),
            )
