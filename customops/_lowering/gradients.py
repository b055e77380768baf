"""Formulas of ops with rich types: what they are given and what they return, in the form of the signature.

Only tensors have gradients. In an object that holds gradients or tangents, the field of a tensor holds that of the
tensor, and every other field holds None.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from customops._dispatch.callbacks import Fn
from customops._dispatch.results import describe
from customops._lowering.plan import Plan
from customops._schema.codecs import MaybeTensor, SequenceCodec
from customops._schema.nodes import Group, Leaf, Node, Values
from customops.errors import AutogradError, where

__tracebackhide__ = True  # pytest leaves the frames out


def of_tensors(node: Node, values: Mapping[str, Any]) -> Any:
    """An object like a value of the node, of something that is known for each of its tensors."""
    return node.assemble({leaf.name: _of_leaf(leaf, values.get(leaf.name)) for leaf in node.leaves})


def _of_leaf(leaf: Leaf, value: Any) -> Any:
    if not leaf.holds_tensors:
        return value if leaf.counts_tensors else None
    if isinstance(leaf.codec, MaybeTensor):
        return value[0] if value else None
    if isinstance(leaf.codec, SequenceCodec) and isinstance(value, (list, tuple)):
        return leaf.codec.container(value)
    return value


def misfit_of(node: Node, value: Any) -> tuple[str, str] | None:
    """The path and the form of the first group that a value does not have the form of; None is of any form."""
    if not isinstance(node, Group) or value is None:
        return None
    if not node.form.holds(value):
        return node.path, node.form.name
    found = (misfit_of(each, node.form.get(value, key)) for key, each in node.fields.items())
    return next((wrong for wrong in found if wrong is not None), None)


class _InContext:
    """Wraps a callback of a formula."""

    def __init__(self, plan: Plan, fn: Any) -> None:
        self.plan, self.fn = plan, fn

    @contextmanager
    def flags(self, ctx: Any) -> Iterator[None]:
        """``ctx.needs_input_grad`` has an entry for each parameter while the callback runs."""
        needs = getattr(ctx, "needs_input_grad", None)
        if needs is None:
            yield
            return
        flags = dict(zip((argument.name for argument in self.plan.schema.operands), needs, strict=False))
        ctx.needs_input_grad = tuple(_flag(each.node, flags) for each in self.plan.operands)
        try:
            yield
        finally:
            ctx.needs_input_grad = needs


def _flag(node: Node, flags: Mapping[str, Any]) -> Any:
    """The flag of a tensor, or a list of them; of an object, whether any of its tensors needs a gradient."""
    if isinstance(node, Leaf):
        return flags.get(node.name, False)
    found = [flags.get(leaf.name, False) for leaf in node.leaves]
    return any(any(flag) if isinstance(flag, list) else flag for flag in found)


class SetupContext(_InContext):
    """``setup_context(ctx, inputs, output)``; it also keeps how long lists are whose tangents may all be None."""

    def __call__(self, ctx: Any, inputs: Any, output: Any, keyword_only_inputs: Any = None) -> Any:
        plan, by_keyword = self.plan, keyword_only_inputs or {}
        if plan.counted or plan.maybe_tensors:
            values = dict(zip((a.name for a in plan.schema.positional), inputs, strict=False)) | by_keyword
            outputs = output if len(plan.schema.returns) > 1 else (output,)
            ctx._customops_lengths = {name: values[name] for name in plan.counted}
            ctx._customops_present = [len(outputs[i]) for i in plan.maybe_tensors]
        if self.fn is None:
            return
        args, kwargs = plan.restore(*inputs, **by_keyword)
        named = {"keyword_only_inputs": kwargs} if plan.has_keywords else {}
        with self.flags(ctx):
            self.fn(ctx=ctx, inputs=args, **named, output=plan.restore_result(output))


class Backward(_InContext):
    """``backward(ctx, *grads)``: a gradient for each field of a returned tuple, or one like what is returned."""

    def __call__(self, ctx: Any, *grads: Any) -> Any:
        plan, result = self.plan, self.plan.signature.result
        count = len(result.leaves) if result is not None else 0
        values = dict(zip([leaf.name for leaf in result.leaves], grads, strict=False)) if result is not None else {}
        with self.flags(ctx):
            found = self.fn(ctx, *(of_tensors(node, values) for node in plan.results), *grads[count:])
        return self._lowered(found)

    def _lowered(self, found: Any) -> Values:
        """By names of the schema, what was returned for the parameters."""
        operands = self.plan.operands
        if not isinstance(found, dict):
            given = found if isinstance(found, tuple) and not _is_one(found, operands) else (found,)
            if len(given) != len(operands):
                raise AutogradError(
                    "backward returned the wrong number of gradients",
                    op=self.plan.op,
                    expected=f"{len(operands)}, for {', '.join(each.name for each in operands)}",
                    got=str(len(given)),
                    where=where(self.fn),
                )
            found = {each.name: grad for each, grad in zip(operands, given, strict=True)}
        nodes = {each.name: each.node for each in operands}
        gradients: Values = {}
        for name, grad in found.items():
            gradients |= self._of(nodes[name], grad) if name in nodes else {name: grad}
        known = {argument.name for argument in self.plan.schema.operands}
        return {name: grad for name, grad in gradients.items() if grad is not None or name in known}

    def _of(self, node: Node, grad: Any) -> Values:
        """The gradients of the leaves: of an object, or of a dict of fields some of which may be left out."""
        if not isinstance(node, Group) or grad is None:
            parts = node.take_apart(grad)
            return parts | {leaf.name: None for leaf in node.leaves if leaf.counts_tensors}
        if not isinstance(grad, dict) and not node.form.holds(grad):
            raise AutogradError(
                f"backward returned something other than the gradient of {node.path}",
                op=self.plan.op,
                argument=node.path,
                expected=f"{node.form.name}, or a dict of gradients by field, or None",
                got=describe(grad),
                where=where(self.fn),
            )
        if isinstance(grad, dict):
            parts = {key: grad.get(key) for key in node.fields}
            if unknown := grad.keys() - parts.keys():
                raise AutogradError(
                    f"backward returned a gradient for a field that {node.path} does not have",
                    op=self.plan.op, argument=node.path, expected=", ".join(node.fields),
                    got=", ".join(map(repr, sorted(unknown))), where=where(self.fn),
                )  # fmt: skip
        else:
            parts = {key: node.form.get(grad, key) for key in node.fields}
        gradients: Values = {}
        for key, each in node.fields.items():
            gradients |= self._of(each, parts[key])
        return gradients


def _is_one(found: tuple[Any, ...], operands: tuple[Any, ...]) -> bool:
    """Is a tuple the gradient of the only parameter, which is a NamedTuple?"""
    return len(operands) == 1 and type(found) is not tuple


class Jvp(_InContext):
    """``jvp(ctx, *tangents)``"""

    def __call__(self, ctx: Any, *tangents: Any) -> Any:
        plan, result = self.plan, self.plan.signature.result
        values = dict(zip((argument.name for argument in plan.schema.operands), tangents, strict=False))
        values |= ctx._customops_lengths if plan.counted else {}
        with self.flags(ctx):
            found = self.fn(ctx, *(of_tensors(each.node, values) for each in plan.operands))
        if plan.signature.returns_plainly or result is None:
            return found
        if (wrong := misfit_of(result, found)) is not None:
            problem, expected = "jvp returned tangents whose structure is not that of the result", wrong[1]
            raise AutogradError(
                problem, op=plan.op, argument=f"return{wrong[0]}", expected=expected, got=describe(found),
                where=where(self.fn),
            )  # fmt: skip
        values = result.take_apart(found)
        flat = [_lower_tangent(values[leaf.name]) for leaf in result.leaves]
        for place, i in enumerate(plan.maybe_tensors):
            flat[i] = [flat[i]] * ctx._customops_present[place]
        return tuple(flat) if len(flat) > 1 else flat[0]


def _lower_tangent(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


class Function:
    """The function that is differentiated by running it again."""

    def __init__(self, plan: Plan, fn: Fn, *, with_written: bool) -> None:
        self.plan, self.fn, self.with_written = plan, fn, with_written
        self.lower_result = plan.lower_result(fn, "function to differentiate")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self.plan.restored_call(*args, **kwargs)
        result = self.fn(*args, **kwargs)
        if self.plan.signature.returns_plainly:
            return result
        lowered, written = (result[0], result[1:]) if self.with_written else (result, ())
        lowered = self.lower_result(lowered)
        values = lowered if len(self.plan.schema.returns) > 1 else (lowered,)
        tensors = (x if each.holds_tensors else None for x, each in zip(values, self.plan.schema.returns, strict=True))
        return *tensors, *written
