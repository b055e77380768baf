"""Formulas made of a function in plain torch operations that computes what the op does: it is run again, and derived.

``backward`` is the function's vjp, ``jvp`` its jvp, so both are right wherever the function is, at the price of running
it once more. An op is written as a fast kernel, and its gradient as what torch can derive.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from customops import _torch
from customops._autograd.context import NoTensors, flat_metadata, materialize_zeros, may_be_differentiated
from customops._dispatch.callbacks import Fn, bind_kernel
from customops._dispatch.operator import OperatorHandle
from customops._dispatch.random_states import RandomStates, WatchDraws
from customops._places import name_of, where
from customops._schema.model import is_differentiable
from customops._torch.trees import flat_items
from customops.errors import AutogradError, CustomOpsError, UnsupportedError


def derived_from(formula: Fn) -> Fn | None:
    """The function whose derivative a formula is, if it is one of `RecomputedFormula`."""
    maker = getattr(formula, "__self__", None)
    return maker.fn if isinstance(maker, RecomputedFormula) else None


def draws_again(formula: Fn) -> bool:
    """Does a formula draw the random numbers of the kernel again? Then ``ctx._customops_random`` has the states."""
    maker = getattr(formula, "__self__", None)
    return isinstance(maker, RecomputedFormula) and maker.is_random


#: Stands for a tensor that was saved.
_SAVED = object()


class RecomputedFormula:
    """The formulas of an op that computes what `fn` does: what `register_autograd` and `register_jvp` take."""

    def __init__(self, fn: Fn, operator: OperatorHandle, *, recompute: bool) -> None:
        self.op, self.schema, self.recompute = operator.qualname, operator.schema, recompute
        ours = operator.library is not None
        self.fn = bind_kernel(fn, self.schema, self.op, "function to differentiate", warn=ours)
        has_generator = any(argument.type.startswith("Generator") for argument in self.schema.arguments)
        self.is_random = has_generator or torch.Tag.nondeterministic_seeded in operator.tags
        #: The returns that hold no tensors. A list of tensors may stand for several, where it is the only return.
        several = len(self.schema.returns) > 1
        self.without = [i for i, ret in enumerate(self.schema.returns) if several and not ret.holds_tensors]
        self.originals = tuple(argument.name for argument in self.schema.mutated)

    def setup_context(
        self, ctx: Any, inputs: tuple[Any, ...], output: Any, keyword_only_inputs: dict[str, Any] | None = None
    ) -> None:
        named = keyword_only_inputs or {}
        kwargs = {a.name: named[a.name] for a in self.schema.keyword_only if a.name in named}
        leaves, spec = _torch.trees.tree_flatten((inputs, kwargs))
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        in_transform = _torch.dispatcher.transforms_active()
        ctx._customops_again = NoTensors(([_SAVED if isinstance(x, Tensor) else x for x in leaves], spec, in_transform))
        runs_again = self.recompute or in_transform or _torch.autograd.forward_ad_active()
        if runs_again or (self.is_random and _torch.dynamo.is_traced(())):
            return
        # Run the function now, and keep its graph for a backward that is not differentiated itself.
        variables, outputs = _recorded(*self._function(ctx, tensors, ctx.needs_input_grad), linked=False)
        ends = [
            _End(get_gradient_edge(x) if x.requires_grad else None, x.shape, x.dtype) if is_differentiable(x) else None
            for x in outputs
        ]
        starts = [(get_gradient_edge(x), _torch.autograd.metadata(x)) for x in variables]
        ctx._customops_graph = NoTensors((ends, starts))

    def _call(self, ctx: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call the function: it draws the random numbers that the kernel drew."""
        is_traced = _torch.dynamo.is_traced(())
        if self.is_random and not is_traced and not _torch.autograd.is_batching():
            with ctx._customops_random.again():
                return self.fn(*args, **kwargs)
        if not (self.is_random or is_traced):
            states = RandomStates((*args, *kwargs.values()))
            result = self.fn(*args, **kwargs)
            if not states.have_changed():
                return result
        # It may draw none here. Where the states have changed, that was the function, or another thread.
        error: CustomOpsError = AutogradError(
            "the function to differentiate draws random numbers, but the op has no tag that says so",
            op=self.op,
            where=where(self.fn),
            fix="custom_op(..., tags=torch.Tag.nondeterministic_seeded); the function then draws those of the kernel",
        )
        if self.is_random:
            error = UnsupportedError(
                "the function to differentiate is to draw the kernel's random numbers again, which it cannot "
                + ("in a graph: the state of a generator is no part of one" if is_traced else "inside vmap"),
                op=self.op,
                where=where(self.fn),
                fix="return the numbers (a mask, a seed) from the op, and register_autograd(backward) that uses "
                "them; or differentiate in eager mode and outside of vmap",
            )
        states = RandomStates((*args, *kwargs.values()))
        with WatchDraws(error):
            result = self.fn(*args, **kwargs)
        if _torch.dispatcher.transforms_active() and states.have_changed():  # below a level, the mode may not be seen
            raise error
        return result

    def _function(
        self, ctx: Any, tensors: Sequence[Tensor], flags: Sequence[Any] = ()
    ) -> tuple[Callable[..., tuple[Any, ...]], list[Tensor]]:
        """``(run, chosen)``: the saved tensors that have a flag, and the function of values in their places.

        ``run(*values)`` returns the results of the function flat. The flags are for each positional argument that was
        passed, then for keyword-only tensors; lists as lists.
        """
        leaves, spec, _ = ctx._customops_again
        args, kwargs = _torch.trees.tree_unflatten(leaves, spec)
        operands = [*args, *[kwargs[argument.name] for argument in self.schema.keyword_only_tensors]]
        chosen: list[bool] = []
        for value, flag in zip(operands, flags, strict=False):
            pairs = zip(value, flag, strict=True) if isinstance(flag, list) else [(value, flag)]
            chosen += [is_chosen for x, is_chosen in pairs if x is _SAVED]

        def run(*variables: Tensor) -> tuple[Any, ...]:
            given = iter(variables)
            saved = iter([next(given) if is_chosen else x for x, is_chosen in itertools.zip_longest(tensors, chosen)])
            args, kwargs = _torch.trees.tree_unflatten([next(saved) if x is _SAVED else x for x in leaves], spec)
            with _torch.distributed.with_plain_tensors(variables):
                result = self._call(ctx, *args, **kwargs)
            results = list(result) if isinstance(result, (tuple, list)) else [result]
            for i in self.without:
                results[i] = None
            return tuple(flat_items(results))

        return run, list(itertools.compress(tensors, chosen))

    def backward(self, ctx: Any, *grads: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():  # compiled autograd
            _torch.dynamo.stop_tracing(
                AutogradError,
                "compiled autograd cannot trace the gradients of a reference, and calls them",
                self.op,
                "leave out fullgraph=True, or register_autograd(backward)",
            )
        given = flat_items(grads)
        graph = None if may_be_differentiated() else getattr(ctx, "_customops_graph", None)
        if graph is None:
            found = iter(self._again(ctx, given))
        else:
            ends, starts = graph
            self._check(ends, given)
            pairs = [(end.edge, grad) for end, grad in zip(ends, given, strict=True) if end is not None and end.edge]
            keeps = _torch.autograd.keeps_graph()
            gradients = zip(_gradients(pairs, [edge for edge, _ in starts], retain_graph=keeps), starts, strict=True)
            found = iter([materialize_zeros(grad, (*like, True)) for grad, (_, like) in gradients])
        return _placed(ctx.needs_input_grad, found)

    def _again(self, ctx: Any, grads: list[Any]) -> Sequence[Any]:
        run, saved = self._function(ctx, ctx.saved_tensors, ctx.needs_input_grad)
        *_, was_transformed = ctx._customops_again
        if was_transformed or _torch.dispatcher.transforms_active():  # a vjp may be called when its transform is over
            wanted = [i for i, grad in enumerate(grads) if is_differentiable(grad)]

            def of_variables(*variables: Tensor) -> tuple[Tensor, ...]:
                outputs = run(*variables)
                self._check(outputs, grads)
                return tuple(outputs[i] for i in wanted)

            _, pull_back, *_ = torch.func.vjp(of_variables, *saved)
            return cast(Sequence[Any], pull_back(tuple(grads[i] for i in wanted)))
        variables, outputs = _recorded(run, saved, linked=may_be_differentiated())
        self._check(outputs, grads)
        pairs = [(x, grad) for x, grad in zip(outputs, grads, strict=True) if is_differentiable(x) and x.requires_grad]
        found = _gradients(pairs, variables)
        return [torch.zeros_like(x) if grad is None else grad for x, grad in zip(variables, found, strict=True)]

    def jvp(self, ctx: Any, *_tangents: Any) -> Any:
        """The saved inputs carry their tangents, and torch's own operations take them along."""
        (run, _), results = self._function(ctx, ctx.saved_tensors), ctx._customops_results
        wanted = flat_metadata(results)  # None where there is no tangent
        tangents = _torch.autograd.tangents_of(lambda: tuple(itertools.compress(run(), wanted)))
        return _placed(results, iter(tangents))

    def _check(self, outputs: Sequence[Any], grads: list[Any]) -> None:
        """The function has to return what the op does, for its gradient to be that of the op."""
        if len(outputs) == len(grads) and all(
            x is not None and x.shape == grad.shape and x.dtype == grad.dtype
            for x, grad in zip(outputs, grads, strict=True)
            if is_differentiable(grad)
        ):
            return
        got, wanted = (
            ", ".join(f"{list(x.shape)} {x.dtype}" if hasattr(x, "dtype") else type(x).__name__ for x in values)
            for values in (outputs, grads)
        )
        raise AutogradError(
            f"{name_of(self.fn)} does not return what the op does, so its gradient is not that of the op",
            op=self.op,
            expected=wanted,
            got=got,
            where=where(self.fn),
        )


def _recorded(
    run: Callable[..., tuple[Any, ...]], tensors: list[Tensor], *, linked: bool
) -> tuple[list[Tensor], tuple[Any, ...]]:
    """Variables, `linked` to the graph and tangents of the tensors or not, and what the function makes of them."""
    with torch.inference_mode(False), torch.enable_grad():  # in inference mode the latter alone records nothing
        variables = [x.view_as(x) if linked else x.detach().requires_grad_() for x in tensors]
        return variables, run(*variables)


class _End(NamedTuple):
    """An output of the function: where its graph ends, if it has one."""

    edge: Any
    shape: torch.Size
    dtype: torch.dtype


def _placed(flags: Sequence[Any], found: Iterator[Any]) -> tuple[Any, ...]:
    """What was found, in the places that have a flag, lists as lists; None in the others."""
    return tuple(
        [next(found) if each else None for each in flag] if isinstance(flag, list) else next(found) if flag else None
        for flag in flags
    )


def _gradients(
    pairs: list[tuple[Any, Tensor]], inputs: list[Any], *, retain_graph: bool | None = None
) -> Sequence[Any]:
    """The gradients of outputs that are given with theirs; None for an input that has no part in it."""
    if not pairs or not inputs:
        return [None] * len(inputs)
    ends, grads = zip(*pairs, strict=True)
    with _torch.distributed.with_plain_tensors(grads):
        return torch.autograd.grad(
            ends, inputs, grads, allow_unused=True, create_graph=torch.is_grad_enabled(), retain_graph=retain_graph
        )
