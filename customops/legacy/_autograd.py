"""The old form of a gradient, ``save(inputs, output)`` and ``backward(ctx, saved, *grads) -> dict``, on the new one."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from customops import _torch
from customops._autograd.rule import AutogradRule
from customops._codegen import autograd
from customops._dispatch.callbacks import Fn
from customops._dispatch.operator import OperatorHandle
from customops._dispatch.registrations import Registration
from customops._schema.model import Schema
from customops.errors import AutogradError, RegistrationError, brief, where


class Pair:
    """The two functions of one op, and what stands between them and `CustomOpDef.register_autograd`."""

    def __init__(self, op: str, schema: Schema) -> None:
        self.op = op
        self.schema = schema
        self.save: Fn | None = None
        self.backward: Fn | None = None
        self.differentiable: list[bool] | None = None

    @functools.cached_property
    def inputs_type(self) -> Any:
        """The namedtuple that `save` is given."""
        names = [argument.name for argument in self.schema.arguments]
        return cast(Any, collections.namedtuple)(f"{self.op.rpartition(':')[2]}_inputs", names, rename=True)

    def refuse_call(self, differentiated: bool) -> None:
        """Raise where a call needs a gradient formula, or where half of one was registered."""
        found = self.save or self.backward
        if found is not None:
            kinds = ("save_for_backward", "backward")
            has, lacks = kinds if self.backward is None else kinds[::-1]
            raise AutogradError(
                f"a {has!r} was registered, but we were unable to find a {lacks!r}",
                op=self.op,
                where=where(found),
                fix=f"register it, too: impl_{lacks}({self.op!r})",
            )
        if differentiated:
            raise AutogradError(
                f"Autograd has not been implemented for operator {self.op}, and an input requires grad",
                op=self.op,
                fix=f"impl_save_for_backward({self.op!r}) and impl_backward({self.op!r}), or call it under no_grad",
            )

    def setup_context(
        self, ctx: Any, inputs: tuple[Any, ...], output: Any, keyword_only_inputs: dict[str, Any] | None = None
    ) -> None:
        assert self.save is not None
        values = dict(zip((a.name for a in self.schema.positional), inputs, strict=True)) | (keyword_only_inputs or {})
        saved = self.save(self.inputs_type(*(values[a.name] for a in self.schema.arguments)), output)
        leaves, spec = _torch.tensors.tree_flatten(saved)
        ctx.save_for_backward(*(leaf for leaf in leaves if isinstance(leaf, Tensor)))
        ctx._legacy_saved = spec, [None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves]
        ctx._legacy_lengths = {name: len(value) for name, value in values.items() if isinstance(value, (list, tuple))}
        self._mark(ctx, output)

    def _mark(self, ctx: Any, output: Any) -> None:
        """Mark what `output_differentiability` says has no gradient."""
        if self.differentiable is None:
            return
        outputs = output if isinstance(output, tuple) else (output,)
        without: list[Tensor] = []
        for i, (is_differentiable, value) in enumerate(zip(self.differentiable, outputs, strict=True)):
            if is_differentiable and not isinstance(value, (Tensor, list, tuple)):
                raise AutogradError(
                    f"output {i} is not a Tensor, so output_differentiability cannot say that it is differentiable",
                    op=self.op,
                    got=f"{type(value).__name__}, output_differentiability={self.differentiable}",
                )
            if not is_differentiable:
                without += [leaf for leaf in _torch.tensors.tree_leaves(value) if isinstance(leaf, Tensor)]
        ctx.mark_non_differentiable(*without)

    def run_backward(self, ctx: Any, *grads: Any) -> tuple[Any, ...]:
        assert self.backward is not None
        spec, others = ctx._legacy_saved
        tensors = iter(ctx.saved_tensors)
        saved = _torch.tensors.tree_unflatten([next(tensors) if other is None else other[0] for other in others], spec)
        gradients = self.backward(ctx, saved, *grads)
        self._check(gradients, ctx._legacy_lengths)
        return tuple(gradients.get(argument.name) for argument in self.schema.operands)

    def _check(self, gradients: Any, lengths: dict[str, int]) -> None:
        if not isinstance(gradients, dict):
            raise self._error("the result of backward is expected to be a dict", type(gradients).__name__)
        wanted = [argument.name for argument in self.schema.arguments if argument.holds_tensors]
        if set(gradients) != set(wanted):
            expected, got = (f"{{{', '.join(sorted(map(repr, names)))}}}" for names in (set(wanted), gradients))
            raise self._error(
                f"the dict that backward returns is expected to have keys {expected}, one for each input that is a "
                "Tensor or a list of them; inputs of non-Tensor-like types have none",
                got,
            )
        for name, gradient in gradients.items():
            items, problem = {name: gradient}, "a gradient is expected to be either None or a Tensor"
            if name in lengths:
                if not isinstance(gradient, (list, tuple)):
                    wrong = "a list of Tensors is expected to have a list of gradients"
                    raise self._error(wrong, type(gradient).__name__, name)
                if len(gradient) != lengths[name]:
                    wrong = f"the input is expected to have a list of {lengths[name]} gradients but got {len(gradient)}"
                    raise self._error(wrong, None, name)
                items = {f"{name}[{i}]": item for i, item in enumerate(gradient)}
                problem = "a list of gradients is expected to hold None or Tensor"
            for argument, item in items.items():
                if item is not None and not isinstance(item, Tensor):
                    raise self._error(problem, type(item).__name__, argument)

    def _error(self, problem: str, got: str | None, argument: str | None = None) -> AutogradError:
        assert self.backward is not None
        return AutogradError(problem, op=self.op, argument=argument, got=got, where=where(self.backward))


class GatedAutograd(AutogradRule):
    """Until there is a formula, differentiated calls raise before the op runs, not in backward."""

    _with_op = ()

    def __init__(self, pair: Pair) -> None:
        super().__init__()
        self.pair = pair

    def bind(self, operator: OperatorHandle, guard_changed: Callable[[], None]) -> None:
        install_gate(operator, self.pair)
        super().bind(operator, guard_changed)


def install_gate(operator: OperatorHandle, pair: Pair) -> Registration:
    """Put the kernel that refuses calls at Autograd; a formula's takes its place."""
    overload, after = operator.overload, _torch.dispatcher.after_autograd
    any_requires_grad = autograd.any_requires_grad(operator.schema)

    def gate(keyset: Any, /, *args: Any, **kwargs: Any) -> Any:
        has_tangent = _torch.autograd.forward_ad_active() and _torch.autograd.any_tangent((*args, *kwargs.values()))
        pair.refuse_call(has_tangent or (torch.is_grad_enabled() and any_requires_grad(*args, **kwargs)))
        with _torch.dispatcher.below_autograd():
            return overload.redispatch(keyset & after, *args, **kwargs)

    kernel = _torch.dynamo.outside_dynamo(gate)
    return Registration(operator.impl(kernel, "Autograd", with_keyset=True, own_library=True))


def check_can_differentiate(op: str, schema: Schema) -> None:
    """Raise for an op whose schema leaves no place for a formula."""
    detail = None
    if schema.mutated:
        detail = "non-functional operator: it writes to an argument"
    elif not schema.returns:
        detail = "operator with no returns"
    elif schema.is_view:
        detail = "operator that returns views"
    if detail is not None:
        raise RegistrationError(
            f"a gradient cannot be registered with the legacy API on a {detail}", op=op, got=str(schema)
        )


def check_no_autograd(op: str) -> None:
    """Raise for an op that brings its own gradients."""
    if _torch.dispatcher.has_kernel(op, "CompositeImplicitAutograd"):
        raise RegistrationError(
            "the op has a CompositeImplicitAutograd kernel: it is differentiated through the ops it is made of",
            op=op,
            fix="register gradients for those ops",
        )
    for key in ("Autograd", "AutogradCPU", "AutogradCUDA"):
        if _torch.dispatcher.has_kernel(op, key):
            raise RegistrationError(f"the op has a kernel for gradients already, at {key}", op=op)


def check_differentiability(value: Any, op: str, schema: Schema) -> None:
    is_list = isinstance(value, list) and all(isinstance(item, bool) for item in value)
    if value is not None and not (is_list and len(value) == len(schema.returns)):
        raise RegistrationError(
            "output_differentiability must be a list of bools, one for each output",
            op=op,
            expected=f"{len(schema.returns)} bools",
            got=brief(value),
        )
