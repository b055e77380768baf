"""`Lowering`: the callbacks of an op with rich types, as the dispatcher's side of the op calls them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from customops._codegen.rich import Plan
from customops._dispatch.callbacks import Fn, bind, bind_kernel
from customops._dispatch.results import describe
from customops._schema.infer import is_part
from customops._schema.model import names_in
from customops._schema.structure import MAYBE_TENSOR, Group, Leaf, Node, SequenceCodec, Values
from customops.errors import AutogradError, CallbackError, where

# ----------------------------------------------------------------------------------------------------------------------
# Formulas of ops with rich types: what they are given and what they return, in the form of the signature
# Only tensors have gradients. In an object that holds gradients or tangents, the field of a tensor holds that of the
# tensor, and every other field holds None.

__tracebackhide__ = True  # pytest leaves the frames out


def of_tensors(node: Node, values: Mapping[str, Any]) -> Any:
    """An object like a value of the node, of something that is known for each of its tensors."""
    parts: Values = {}
    for leaf in node.leaves:
        value = values.get(leaf.name)
        if not leaf.holds_tensors and not leaf.counts_tensors:
            value = None
        elif leaf.codec is MAYBE_TENSOR:
            value = value[0] if value else None
        elif isinstance(leaf.codec, SequenceCodec) and isinstance(value, (list, tuple)) and leaf.holds_tensors:
            value = leaf.codec.container(value)
        parts[leaf.name] = value
    return node.assemble(parts)


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
        """``ctx.needs_input_grad`` has an entry for each parameter while the callback runs.

        It is the flag of a tensor, or a list of them; of an object, whether any of its tensors needs a gradient.
        """
        needs = getattr(ctx, "needs_input_grad", None)
        if needs is None:
            yield
            return
        flags = dict(zip((argument.name for argument in self.plan.schema.operands), needs, strict=False))
        entries = []
        for parameter in self.plan.operands:
            found = [flags.get(leaf.name, False) for leaf in parameter.node.leaves]
            is_one = isinstance(parameter.node, Leaf)
            entries.append(found[0] if is_one else any(any(f) if isinstance(f, list) else f for f in found))
        ctx.needs_input_grad = tuple(entries)
        try:
            yield
        finally:
            ctx.needs_input_grad = needs


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
        named = {"keyword_only_inputs": kwargs} if plan.parameters.keyword_only else {}
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
            is_one = len(operands) == 1 and type(found) is not tuple  # perhaps the gradient of a NamedTuple
            given = found if isinstance(found, tuple) and not is_one else (found,)
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
            raise AutogradError(
                "jvp returned tangents whose structure is not that of the result",
                op=plan.op,
                argument=f"return{wrong[0]}",
                expected=wrong[1],
                got=describe(found),
                where=where(self.fn),
            )
        values = result.take_apart(found)
        flat = [list(x) if isinstance(x, tuple) else x for x in (values[leaf.name] for leaf in result.leaves)]
        for place, i in enumerate(plan.maybe_tensors):
            flat[i] = [flat[i]] * ctx._customops_present[place]
        return tuple(flat) if len(flat) > 1 else flat[0]


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


# ----------------------------------------------------------------------------------------------------------------------
# vmap rules of ops with rich types: dimensions come, and are returned, in the form of the signature


class BatchingRule:
    """``rule(info, in_dims, *args, **kwargs) -> (result, out_dims)``"""

    def __init__(self, plan: Plan, fn: Fn) -> None:
        self.plan, self.fn = plan, fn
        self.lower_result = plan.lower_result(fn, "vmap rule")

    def __call__(self, info: Any, in_dims: tuple[Any, ...], /, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        plan, result_node = self.plan, self.plan.signature.result
        dims = dict(zip((argument.name for argument in plan.schema.operands), in_dims, strict=True))
        values = dict(zip((a.name for a in plan.schema.positional), args, strict=True)) | kwargs
        dims |= {name: values[name] for name in plan.counted}
        restored, named = plan.restored_call(*args, **kwargs)
        result, out_dims = self.fn(info, tuple(of_tensors(x.node, dims) for x in plan.operands), *restored, **named)
        if plan.signature.returns_plainly or result_node is None:
            return result, out_dims
        return self._lowered(result_node, self.lower_result(result), out_dims)

    def _lowered(self, node: Node, result: Any, out_dims: Any) -> tuple[Any, Any]:
        """The result, and a dimension for each tensor of it: one for all of them is allowed."""
        leaves = node.leaves
        dims = dict.fromkeys([leaf.name for leaf in leaves], out_dims)
        if not (out_dims is None or isinstance(out_dims, int)):
            if (wrong := misfit_of(node, out_dims)) is not None:
                raise CallbackError(
                    "the vmap rule returned out_dims whose structure is not that of the result",
                    op=self.plan.op,
                    argument=f"return{wrong[0]}",
                    expected=f"a dimension for all, or {wrong[1]}",
                    got=repr(out_dims),
                    where=where(self.fn),
                )
            dims = node.take_apart(out_dims)
        results = [list(x) if isinstance(x, tuple) else x for x in (result if len(leaves) > 1 else (result,))]
        flat: list[Any] = []  # as functorch wants it: a list for a list, None for what is no tensor
        for leaf, value in zip(leaves, results, strict=True):
            dim = dims[leaf.name] if leaf.holds_tensors else None
            if isinstance(value, list):
                dim = list(dim) if isinstance(dim, (list, tuple)) else [dim] * len(value)
            flat.append(dim)
        return (tuple(results), tuple(flat)) if len(leaves) > 1 else (results[0], flat[0])


# ----------------------------------------------------------------------------------------------------------------------
# `Lowering`: the callbacks of an op with rich types, as the dispatcher's side of the op calls them


class Lowering(Plan):
    """Wraps callbacks that take and return what the signature says into such as the schema says."""

    def kernel(self, fn: Fn, role: str = "kernel", *, warn: bool = True) -> Fn:
        """A kernel or fake impl of the schema, around one of the signature.

        Raises:
            CallbackError: `fn` does not take the parameters of the signature.
        """
        bound = bind_kernel(fn, self.parameters, self.op, role, warn=warn)
        return _standing_for(fn, self.callback(bound, role))

    def setup_context(self, fn: Fn | None) -> Fn | None:
        if fn is None:
            return SetupContext(self, None) if self.counted or self.maybe_tensors else None
        by_keyword = ["keyword_only_inputs"] if self.parameters.keyword_only else []
        names = ["ctx", "inputs", *by_keyword, "output"]
        bind(fn, self.op, "setup_context", **{name: name for name in names})
        return _standing_for(fn, SetupContext(self, fn))

    def backward(self, fn: Fn, options: Any) -> Fn:
        """A backward; by its options, it also gets the gradients of some mutated arguments."""
        followed = options.get("grads_of")
        if followed is None:
            written = {argument.name for argument in self.schema.mutated} - set(options.get("nondiff_args", ()))
            followed = () if self.schema.returns else written
        bind(fn, self.op, "backward", "ctx", *(f"grad{i}" for i in range(len(self.results) + len(followed))))
        return _standing_for(fn, Backward(self, fn))

    def jvp(self, fn: Fn) -> Fn:
        bind(fn, self.op, "jvp", "ctx", *(f"{each.name}_tangent" for each in self.operands))
        return _standing_for(fn, Jvp(self, fn))

    def function(self, fn: Fn, *, with_written: bool) -> Fn:
        """The function that `register_autograd_from` differentiates; does it return more than the result?"""
        bound = bind_kernel(fn, self.parameters, self.op, "function to differentiate")
        return _standing_for(fn, Function(self, bound, with_written=with_written))

    def vmap(self, fn: Fn) -> Fn:
        bound = bind_kernel(fn, self.parameters, self.op, "vmap rule", "info", "in_dims", warn=True)
        return _standing_for(fn, BatchingRule(self, bound))

    # Names ------------------------------------------------------------------------------------------------------

    def names(self, given: Any, option: str) -> Any:
        """The tensors of the schema that names of parameters, or paths of parts of them, stand for."""
        if given is None:
            return None
        tensors = [leaf for each in self.signature.parameters for leaf in each.node.leaves if leaf.holds_tensors]
        names: list[str] = []
        for name in names_in(given, option, self.op):
            parts = [leaf.name for leaf in tensors if is_part(leaf.path, name)]
            names += parts or [name]  # which then is refused
        return tuple(names)

    def options(self, options: Any) -> Any:
        """The options of a formula, with names of the schema."""
        known = [key for key in ("nondiff_args", "grads_of", "originals") if key in options]
        return options | {key: self.names(options[key], key) for key in known}


def _standing_for(fn: Fn, made: Callable[..., Any]) -> Fn:
    """`made`, with the name of the user's function and a way to it."""
    functools.update_wrapper(made, fn, updated=())
    return made
