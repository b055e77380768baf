"""`Lowering`: the callbacks of an op with rich types, as the dispatcher's side of the op calls them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from customops._codegen import rich
from customops._dispatch.callbacks import Fn, bind, bind_kernel
from customops._dispatch.results import describe
from customops._schema.infer import is_part
from customops._schema.model import Argument, Schema, cached_property, names_in
from customops._schema.structure import (
    Group,
    Leaf,
    MaybeTensor,
    Node,
    Parameter,
    SequenceCodec,
    Signature,
    TupleForm,
    Values,
)
from customops.errors import AutogradError, CallbackError, where

# `Plan`: how an op's signature and its schema relate, and the functions generated from that ---------------------------


class Plan:
    """What stands between the signature of an op and its schema."""

    def __init__(self, signature: Signature, schema: Schema, op: str) -> None:
        self.signature, self.schema, self.op = signature, schema, op
        #: The parameters, as `bind_kernel` asks for them.
        self.parameters = Schema(tuple(map(_as_argument, signature.parameters)), ())

    def __repr__(self) -> str:
        return f"<Plan of {self.op}{self.schema}>"

    @property
    def _digest_key(self) -> Any:
        return self.op, self.schema.exact_key

    @cached_property
    def operands(self) -> tuple[Parameter, ...]:
        """The parameters that formulas and vmap rules have an entry for, in their order."""
        positional = [each for each in self.signature.parameters if not each.by_keyword]
        by_keyword = [each for each in self.signature.parameters if each.by_keyword]
        return (*positional, *(each for each in by_keyword if each.node.holds_tensors))

    @cached_property
    def has_keywords(self) -> bool:
        """Are there keyword-only parameters?"""
        return any(each.by_keyword for each in self.signature.parameters)

    @cached_property
    def results(self) -> tuple[Node, ...]:
        """What backward has a gradient for: the fields of a tuple, or what is returned."""
        result = self.signature.result
        if isinstance(result, Group) and isinstance(result.form, TupleForm):
            return tuple(result.fields.values())
        return () if result is None else (result,)

    @cached_property
    def counted(self) -> tuple[str, ...]:
        """The arguments that say how long lists of lists are."""
        leaves = (leaf for each in self.signature.parameters for leaf in each.node.leaves)
        return tuple(leaf.name for leaf in leaves if leaf.counts_tensors)

    @cached_property
    def maybe_tensors(self) -> tuple[int, ...]:
        """The places of returns that are a tensor or None."""
        leaves = self.signature.result.leaves if self.signature.result is not None else ()
        return tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf.codec, MaybeTensor))

    def restored_call(self, /, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with which a function of the signature is called, of lowered ones."""
        values, named = self.restore(*args, **kwargs)
        stars = [each.stars for each in self.signature.parameters if not each.by_keyword]
        positional: list[Any] = []
        for star, value in zip(stars, values, strict=True):
            positional += value if star else (value,)
        for each in self.signature.parameters:
            if each.stars == "**":
                named |= named.pop(each.name)
        return tuple(positional), named

    # Generated functions ----------------------------------------------------------------------------------------

    def call(self, bypass: Fn | None = None) -> Fn:
        """The ``__call__`` of the op's object; `bypass` is that of an op of the schema that bypasses the dispatcher."""
        return rich.call(self.signature, self.schema, self.op, bypass)

    @cached_property
    def lower(self) -> Fn:
        """``lower(*args, **kwargs) -> (args, kwargs)``, of a call's arguments those of the schema."""
        return rich.lower(self.signature, self.schema, self.op)

    @cached_property
    def restore(self) -> Fn:
        """The way back."""
        return rich.restore(self.signature, self.schema, self.op)

    @cached_property
    def restore_result(self) -> Fn:
        return rich.restore_result(self.signature, self.schema, self.op)

    def lower_result(self, fn: Fn, role: str) -> Fn:
        return rich.lower_result(self.signature, self.schema, self.op, fn, role)


def _as_argument(parameter: Parameter) -> Argument:
    return Argument("", name=parameter.name, default=parameter.default, kwarg_only=parameter.by_keyword)


# ----------------------------------------------------------------------------------------------------------------------
# Formulas of ops with rich types: what they are given and what they return, in the form of the signature
# Only tensors have gradients. In an object that holds gradients or tangents, the field of a tensor holds that of the
# tensor, and every other field holds None.

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
        flat = [_dims_of(leaf, value, dims[leaf.name]) for leaf, value in zip(leaves, results, strict=True)]
        return (tuple(results), tuple(flat)) if len(leaves) > 1 else (results[0], flat[0])


def _dims_of(leaf: Leaf, value: Any, dims: Any) -> Any:
    """As functorch wants it: a dimension for a tensor, a list for a list, None for what is no tensor."""
    if not leaf.holds_tensors:
        return [None] * len(value) if isinstance(value, list) else None
    if isinstance(value, (list, tuple)):
        return list(dims) if isinstance(dims, (list, tuple)) else [dims] * len(value)
    return dims


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
        return _standing_for(fn, rich.callback(self.signature, self.schema, self.op, bound, role))

    def setup_context(self, fn: Fn | None) -> Fn | None:
        if fn is None:
            return SetupContext(self, None) if self.counted or self.maybe_tensors else None
        names = ["ctx", "inputs", "keyword_only_inputs", "output"]
        if not self.has_keywords:
            names.remove("keyword_only_inputs")
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
        names: list[str] = []
        for name in names_in(given, option, self.op):
            parts = [leaf.name for leaf in self._tensors() if is_part(leaf.path, name)]
            names += parts or [name]  # which then is refused
        return tuple(names)

    def options(self, options: Any) -> Any:
        """The options of a formula, with names of the schema."""
        names = {
            key: self.names(options[key], key) for key in ("nondiff_args", "grads_of", "originals") if key in options
        }
        return options | names

    def _tensors(self) -> Iterable[Any]:
        return (leaf for each in self.signature.parameters for leaf in each.node.leaves if leaf.holds_tensors)


def _standing_for(fn: Fn, made: Callable[..., Any]) -> Fn:
    """`made`, with the name of the user's function and a way to it."""
    functools.update_wrapper(made, fn, updated=())
    return made
