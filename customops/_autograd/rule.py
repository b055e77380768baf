"""Gradients: backward, jvp and setup_context, the graph node of them, and the kernel at Autograd that applies it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch

from customops import _torch
from customops._autograd import node_codegen
from customops._autograd.context import (
    AS_IT_IS,
    Guarded,
    NoTensors,
    Outputs,
    SetUp,
    materialize_zeros,
    set_materialize_grads,
)
from customops._autograd.gradient_checks import LEFT_OUT, GradientCheck, check_tangents
from customops._autograd.inplace import Mutation, written_tangent
from customops._autograd.layout import BackwardOptions, Formula, GradientOptions, Layout, flatten, unflatten
from customops._autograd.recompute import RecomputedFormula, draws_again
from customops._codegen.function import source_of
from customops._codegen.kernel import any_requires_grad, function_at
from customops._dispatch.callbacks import Fn, bind
from customops._dispatch.current_kernel import CurrentKernel
from customops._dispatch.operator import OperatorHandle
from customops._dispatch.registrations import Registration, Undo, all_or_none, lock, nothing
from customops._dispatch.results import mutated_results
from customops._dispatch.rule import Rule
from customops._places import where
from customops._schema.model import Names, Schema, tensor_names
from customops._torch.schema import Tag
from customops._torch.trees import flat_items, tensors_in
from customops.errors import (
    AutogradError,
    CallbackError,
    ContextError,
    CustomOpsError,
    RegistrationError,
    UnsupportedError,
    brief,
)

__tracebackhide__ = True  # pytest leaves the frames out


class AutogradRule(Rule[str, Formula]):
    """The formulas of one op. Without a backward, backward raises; without a jvp, forward mode does."""

    _with_op: tuple[str, ...] = ("backward",)
    #: Called when `call_guard` returns something else.
    guard_changed: Callable[[], None]
    #: The ``apply`` of the node for the current formulas, once it was needed. Generated code calls it.
    apply: Fn | None = None
    _current: ActiveFormulas | None = None

    @property
    def formulas(self) -> dict[str, Formula]:
        return self.values

    def register(
        self,
        fn: Fn,
        setup_context: Fn | None,
        options: BackwardOptions,
        kind: Literal["backward", "jvp"] = "backward",
        *,
        is_ours: bool = False,
        is_derived: bool = False,
    ) -> Registration:
        schema, op = self.operator.schema, self.operator.qualname
        known = (GradientOptions if kind == "jvp" else BackwardOptions).__annotations__
        if Tag.out in self.operator.tags:
            raise RegistrationError(
                "Out variants do not support autograd", op=op, fix="register the gradient on the functional op"
            )
        if not self.operator.differentiable.op:
            what = "register_jvp" if kind == "jvp" else "register_autograd"
            raise RegistrationError(
                f"{what} on an op that is declared not to be differentiable", op=op, fix="leave differentiable= out"
            )
        if not schema.is_differentiable or (kind == "jvp" and schema.is_view):
            raise RegistrationError(
                "cannot register autograd on a non-functional operator: it returns a view in a way autograd has no "
                "rule for, or it neither returns nor writes anything",
                op=op,
                got=str(schema),
                fix="register the gradient on an op that returns new tensors, or writes to its arguments",
            )
        if unknown := options.keys() - known:
            raise CallbackError(
                f"a formula has no option {', '.join(map(repr, sorted(unknown)))}",
                op=op,
                expected=", ".join(["setup_context", "lib", *known]),
                where=where(fn),
            )
        nondiff_args = tensor_names(options.get("nondiff_args", ()), "nondiff_args", schema, op)
        originals = tensor_names(options.get("originals", ()), "originals", schema, op)
        grads_of = _mutated_values(options.get("grads_of"), nondiff_args, originals, schema, op)
        for argument in schema.operands:
            # The dispatcher does not look into optional lists: of an op without other tensors, autograd sees no call.
            is_hidden = argument.type == "Tensor[]?" and argument.name not in nondiff_args
            if is_hidden and all(each.type == "Tensor[]?" for each in schema.operands if each.holds_tensors):
                raise RegistrationError(
                    "torch finds no gradients in an optional list of tensors if no other argument is a tensor",
                    op=op,
                    argument=argument.name,
                    got=str(schema),
                    fix=f"make {argument.name} a list (an empty one for None), or pass a tensor besides",
                )
        if isinstance(fn, type):
            raise CallbackError(
                "a formula must be a function, not a class",
                op=op,
                got=brief(fn),
                fix=f"pass its functions: {fn.__name__}.backward, and setup_context={fn.__name__}.setup_context",
            )
        given = [f"{argument.name}_tangent" for argument in schema.operands]
        if kind == "backward":
            given = [f"grad{i}" for i in range(len(schema.returns) + len(grads_of))]
        if setup_context is not None and not is_ours:
            names = ["ctx", "inputs", *["keyword_only_inputs"] * bool(schema.keyword_only), "output"]
            bind(setup_context, op, "setup_context", **dict(zip(names, names, strict=True)))
        if not is_ours:
            bind(fn, op, kind, "ctx", *given)
        materialize_grads, once = options.get("materialize_grads", True), options.get("once_differentiable", False)
        if (undecorated := _torch.autograd.once_differentiable_of(fn)) is not None:
            fn, once = undecorated, True
        formula = Formula(fn, setup_context, nondiff_args, grads_of, originals, materialize_grads, once)
        return self.set(kind, formula, is_derived=is_derived)

    def register_from(self, formula: RecomputedFormula, options: BackwardOptions) -> Registration:
        """Derive the formulas of both modes from a function, or neither."""
        given: Any = {"originals": formula.originals, **options}
        pairs: list[tuple[Literal["jvp", "backward"], Fn]] = [("jvp", formula.jvp), ("backward", formula.backward)]
        return all_or_none(
            self.register(fn, formula.setup_context, given, kind, is_ours=True, is_derived=True)
            for kind, fn in pairs[self.operator.schema.is_view :]  # a view has no jvp
        )

    def _install(self, key: str, own_library: bool) -> Undo:
        operator, self.apply, self._current = self.operator, None, None
        if key == "jvp" and operator.has_own_rules and "backward" in self._with_op:
            return nothing  # the function came with the op
        generated = function_at("Autograd", operator, functools.partial(_general, self, operator))
        return operator.impl(generated, "Autograd", with_keyset=True, own_library=own_library)

    def _changed(self) -> None:
        """Make the node anew: the formulas, or whether gradients are checked, have changed."""
        self.apply = self._current = None
        self.operator.recompile()
        self.guard_changed()

    def call_guard(self, entry: Fn) -> Fn:
        """`entry`, or what is to be called in its place, for an op that writes what is differentiated.

        torch refuses a write inside a transform to a tensor from outside, for ops whose name ends in ``_``; with others
        the new value would be a constant to the transform. In a kernel that cannot be told any more.
        """
        followed = {name for formula in self.values.values() for name in formula.grads_of}
        if not followed:
            return entry
        mutated = [(i, a.name) for i, a in enumerate(self.operator.schema.operands) if a.name in followed]
        op = self.operator.qualname

        def guarded(*args: Any, **kwargs: Any) -> Any:
            for i, name in mutated if _torch.dispatcher.transforms_active() else ():
                tensors = tensors_in([args[i] if i < len(args) else kwargs.get(name)])
                if any(map(_torch.autograd.is_captured, tensors)):
                    raise AutogradError(
                        "inside a transform (grad, vjp, jvp, ...) the op would mutate a tensor captured from outside: "
                        "the transform would not see the new value",
                        op=op,
                        argument=name,
                        fix="create the tensor inside the function, or pass it to the transform as an argument",
                    )
            return entry(*args, **kwargs)

        return guarded

    def current(self) -> ActiveFormulas:
        """What holds for the formulas that are registered now."""
        # A graph keeps the formula it was made with: another backward need not fit what this setup_context saved.
        current = self._current
        if current is None:
            with lock:
                if self._current is None:
                    backward, jvp = map(self.values.get, ("backward", "jvp"))
                    both = ActiveFormulas(self.operator, backward, jvp)
                    self._current = both
                    if backward and jvp and self.is_derived("jvp") and not self.is_derived("backward"):
                        # A backward by hand does not wait for what the derived jvp saves.
                        self._current = ActiveFormulas(self.operator, backward, None)
                        self._current.with_tangents = both
                current = self._current
        return current

    def sources(self) -> dict[str, str]:
        """The source of the node, which runs where there is something to differentiate."""
        function, apply = self.node(self.current())
        steps = {"apply": apply, "forward": function.forward, "backward": function.backward}
        return {f"Autograd, {step}": source_of(fn) for step, fn in steps.items()}

    def explain(self, error: Exception) -> None:
        """Raise, in the place of what torch says to a ctx that setup_context has filled, what names op and place."""
        _torch.autograd.context_class(self.node(self.current()).function)._customops_missing(error)
        callback = next((f.setup_context for f in self.current().formulas if f is not None and f.setup_context), None)
        for start, (problem, fix) in _OF_CONTEXT.items():
            if callback is not None and str(error).startswith(start):
                op = self.operator.qualname
                raise AutogradError(problem, op=op, got=str(error), where=where(callback), fix=fix) from None

    def node(self, current: ActiveFormulas) -> Node:
        """The node of an op, made when it is first differentiated."""
        if current.node is None:
            with lock:
                if current.node is None:
                    current.node = make_node(self.operator, current.layout, *current.formulas)
                    # Where something is ignored, the trampoline's own look at the arguments is not enough.
                    if self._current is current and not current.ignores:
                        self.apply = current.node.apply
        return current.node


def _mutated_values(
    grads_of: Names | None, nondiff_args: frozenset[str], originals: frozenset[str], schema: Schema, op: str
) -> tuple[str, ...]:
    """The written arguments whose new values are outputs to be differentiated, in the order of the schema.

    An op that returns nothing has its results in what it writes; one that returns something is taken by default to
    write only what nobody differentiates, as a counter or a cache.
    """
    chosen = tensor_names(grads_of or (), "grads_of", schema, op)
    mutated = {argument.name: argument.alias for argument in schema.mutated}
    for what, names in (("originals", originals), ("grads_of", chosen)):
        for name in names - mutated.keys():
            raise RegistrationError(f"{what}= names an argument, but the op does not write to it", op=op, argument=name)
    if grads_of is None:
        return () if schema.returns else tuple(name for name in mutated if name not in nondiff_args)
    returned = [ret.alias for ret in schema.returns if ret.alias is not None]
    for name in chosen:
        problem = "it is one of nondiff_args" if name in nondiff_args else ""
        if mutated[name] in returned:
            problem = "it is returned, so backward gets a gradient for it already"
        if problem:
            raise RegistrationError(f"grads_of= names an argument, but {problem}", op=op, argument=name)
    return tuple(name for name in mutated if name in chosen)


#: How what torch says begins -> what was wrong, and what to do.
_OF_CONTEXT = {
    "save_for_backward can only save variables": (
        "ctx.save_for_backward is for tensors",
        "keep anything else as an attribute: ctx.k = k",
    ),
    "Some elements marked as dirty": (
        "ctx.mark_dirty on a tensor that the op, by its schema, does not write",
        "remove the call: mutates_args says what is written",
    ),
    "mark_dirty can only accept variables": (
        "ctx.mark_dirty is for tensors",
        "remove the call: mutates_args says what is written",
    ),
}


class ActiveFormulas:
    """What holds for the formulas of the moment."""

    def __init__(self, operator: OperatorHandle, backward: Formula | None, jvp: Formula | None) -> None:
        self.formulas = backward, jvp
        formulas = [formula for formula in (backward, jvp) if formula is not None]
        self.layout = layout = Layout(operator.schema, operator.tags, operator.differentiable, formulas)
        #: The positional arguments, and the keyword-only ones, that are tensors and without a gradient.
        self.ignores = {
            argument.name if argument.kwarg_only else i
            for i, argument in enumerate(layout.operands)
            if argument.holds_tensors and not layout.differentiable[i] and not argument.is_mutated
        }
        self.node: Node | None = None
        #: What holds for a call with tangents, if that is something else.
        self.with_tangents: ActiveFormulas | None = None

    def not_ignored(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        if not self.ignores:
            return (*args, *kwargs.values())
        values = [value for i, value in enumerate(args) if i not in self.ignores]
        return (*values, *(value for name, value in kwargs.items() if name not in self.ignores))


# The graph node of an op: an autograd.Function made for its formulas --------------------------------------------------
# It derives from the class that functorch itself uses for one level of differentiation, so that ``torch.func.grad``,
# ``vjp``, ``jvp`` and their compositions see the op as they see an aten op.


class Node(NamedTuple):
    """The autograd.Function of an op and its formulas, and what applies it: ``apply(kernel, *args, **kwargs)``."""

    function: Any
    apply: Fn


def make_node(operator: OperatorHandle, layout: Layout, backward: Formula | None, jvp: Formula | None) -> Node:
    """The node of an op for these formulas."""
    op, formulas = operator.qualname, layout.formulas
    if backward is not None and jvp is not None and backward.grads_of != jvp.grads_of:
        raise RegistrationError(  # both are of one node, which has the same outputs for both
            "register_autograd and register_jvp do not agree on which written arguments are differentiable",
            op=op,
            expected=f"grads_of={backward.grads_of}, as for backward",
            got=f"grads_of={jvp.grads_of} for jvp",
            fix="register both with the same grads_of= and nondiff_args=",
        )
    materializes = False not in [formula.materialize_grads for formula in formulas]
    draws = True in [draws_again(formula.fn) for formula in formulas]
    set_up = SetUp(operator.schema, formulas)
    finish = Outputs(layout, for_jvp=jvp is not None, materializes=materializes)
    compares = GradientCheck(operator.options.check)
    mutation = Mutation(layout, op, has_formula=bool(formulas))

    def missing(error: Exception) -> None:
        """Not a ``__getattr__`` of `ctx`: with one, all that is asked of it takes longer."""
        if not isinstance(error, AttributeError) or getattr(type(error.obj), "_forward_cls", None) is not function:
            return
        name, there = error.name, [each for each in vars(error.obj) if not each.startswith("_customops_")]
        raise ContextError(
            f"ctx has no attribute {name!r}" + ("" if set_up.callbacks else ": no setup_context is registered"),
            op=op,
            expected=f"one that setup_context set: {', '.join(there)}" if there else None,
            where=where(formulas[0].fn) if formulas else None,
            fix=f"ctx.{name} = ... in setup_context" + ("" if set_up.callbacks else ", given with setup_context="),
        ).with_traceback(error.__traceback__) from None

    statics = {
        "forward": node_codegen.forward(layout, set_up, finish, compares, mutation, draws_again=draws),
        "backward": node_codegen.backward(layout, op, backward, compares) if backward else _missing(operator),
        "jvp": _jvp(layout, op, jvp) if jvp else _missing(operator, is_jvp=True),
    }
    name = "_".join(filter(None, operator.name))  # torch puts "Backward" after it
    marked = {key: staticmethod(_torch.dynamo.outside_dynamo(member)) for key, member in statics.items()}
    function: Any = type(name, (_torch.autograd.SingleLevelFunction,), marked)
    context = _torch.autograd.context_class(function)
    context.apply = function.backward  # what the engine calls; torch's own looks it up in each call
    context.set_materialize_grads, context._customops_missing = set_materialize_grads, staticmethod(missing)
    context._customops_raw_flags, context.needs_input_grad = context.needs_input_grad, _needs_input_grad(layout)
    # Compiled autograd reads ctx through another object, and its guards take the raw flags for the property.
    context._customops_zeros = context._customops_untracked = context._customops_graph = context._customops_needs = None
    context._customops_hooked, context._customops_links, context._customops_flags = False, (), None
    return Node(function, node_codegen.apply(layout, function))


def _needs_input_grad(layout: Layout) -> property:
    """What formulas see as ``ctx.needs_input_grad``: made of autograd's flags when one asks, with lists as lists.

    For each positional argument that was passed; if there are keyword-only tensors, for each one, and for these.
    """

    def needs(ctx: Any) -> tuple[Any, ...]:
        if ctx._customops_needs is not None:  # it was set
            return tuple(ctx._customops_needs)
        flags = (ctx._customops_flags or ctx._customops_raw_flags)[len(layout.head) :]  # the latter in setup_context
        if layout.is_plain:
            return tuple([flag and has for flag, has in zip(flags, layout.differentiable, strict=False)])
        likes = ctx._customops_expected
        values = unflatten(flags, [len(like) if isinstance(like, list) else None for like in likes])
        by_index = dict(zip(layout.order, values, strict=True))
        found = [
            by_index[i] if has else [False] * len(by_index[i]) if isinstance(by_index[i], list) else False
            for i, has in enumerate(layout.differentiable)
        ]
        count = sum([like is not LEFT_OUT for like in likes]) if layout.positional == len(found) else len(found)
        return tuple(found[:count])

    return property(needs, lambda ctx, value: setattr(ctx, "_customops_needs", NoTensors(value)))


def _missing(operator: OperatorHandle, *, is_jvp: bool = False) -> Fn:
    """What runs in the place of a formula that is not registered."""
    error: type[CustomOpsError] = AutogradError
    place = operator.spec.source
    problem = "Trying to backward through an op, but no autograd formula was registered"
    fix = "op.register_autograd(backward, setup_context=...)"
    if is_jvp:
        error, place = UnsupportedError, ""
        problem = "forward-mode differentiation (jvp, jacfwd, dual numbers) of an op without a jvp rule"
        fix = "op.register_jvp(jvp, setup_context=...); or use reverse mode: jacrev(jacrev(f)) is a hessian, too"
    elif not operator.differentiable.op:
        problem = "Trying to backward through an op that is declared not to be differentiable, but wrote its argument"
        fix = "call it under torch.no_grad() or on x.detach()"
    elif operator.schema.mutated:
        problem = "Trying to backward through an op that writes to its argument, but no autograd formula was registered"
        fix += "; or call it under torch.no_grad() or on x.detach()"

    def formula(ctx: Any, *values: Any) -> Any:
        raise error(problem, op=operator.qualname, where=place or None, fix=fix)

    return formula


def _jvp(layout: Layout, op: str, formula: Formula) -> Fn:
    user_jvp, head = formula.fn, len(layout.head)

    def jvp(ctx: Any, *given: Any) -> Any:
        flat, expected = given[head:], [None] * len(given[head:]) if layout.is_plain else ctx._customops_expected
        lengths = [len(each) if isinstance(each, list) else None for each in expected]
        indices = layout.indices(len(expected))
        before = dict(zip(indices, unflatten(flat, lengths), strict=True))
        if "_customops_zero_tangents" in ctx.__dict__:
            flat = tuple(map(materialize_zeros, flat, ctx._customops_zero_tangents))
        filled = dict(zip(indices, unflatten(flat, lengths), strict=True))
        tangents = [filled.get(i) if has else None for i, has in enumerate(layout.differentiable)]
        seen, untracked = ctx, ctx._customops_untracked
        if untracked is not None:  # if an outer transform differentiates the jvp, untracked tensors raise at once
            with torch.inference_mode(False):  # else no tangents are seen
                if any(map(_torch.autograd.is_tracked_further_out, untracked.links)):
                    seen = Guarded(ctx, op, in_jvp=True)
        result = _torch.autograd.call_jvp(_torch.dispatcher.call_without_autocast, user_jvp, seen, *tangents)
        results = result if isinstance(result, tuple) else (result,)
        check_tangents(layout, op, user_jvp, results, ctx._customops_results)
        outputs = tuple(map(_torch.autograd.without_tangent, flatten(results, layout.list_outputs)[0]))
        if "_customops_writes" in ctx.__dict__:
            (mutated,) = flat_items(before.get(i) for i in ([0] if layout.in_place else layout.new_values))
            outputs = (_torch.autograd.call_jvp(written_tangent, mutated, *outputs),)
        return outputs[0] if len(outputs) == 1 else outputs

    return jvp


# What is done at the Autograd key -------------------------------------------------------------------------------------


def _redispatch(operator: OperatorHandle, keyset: Any, mode: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Go on below this key, under a context manager."""
    try:
        with mode:
            return operator.overload.redispatch(keyset & _torch.dispatcher.after_autograd, *args, **kwargs)
    except NotImplementedError as error:
        operator.explain(error)
        raise


def _general(rule: AutogradRule, operator: OperatorHandle) -> tuple[Fn, AutogradRule | None]:
    """What is done at Autograd where no kernel is called directly; and the rule, if its node may call one."""
    # Results of other types, numbers for one, the dispatcher converts: then no node calls the kernel directly.
    calls_directly = {ret.type for ret in operator.schema.returns} <= {"Tensor", "Tensor[]"}
    overload, path = operator.overload, operator.fast_path
    requires_grad = any_requires_grad(operator.schema)
    mutated = mutated_results(operator.schema, operator.tags)

    def general(
        keyset: Any, current_kernel: CurrentKernel | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        may_have_tangents = _torch.autograd.forward_ad_active()
        if current_kernel is None and keyset.raw_repr() not in path.by_keyset:
            current_kernel = operator.find_fast_path(keyset)
            kernel = None if may_have_tangents or current_kernel is None else current_kernel.direct
            if kernel is not None and not (torch.is_grad_enabled() and requires_grad(*args, *kwargs.values())):
                return kernel(*args, **kwargs)  # as the generated function will from now on
        if _torch.dispatcher.autocast_is_on() and _torch.dispatcher.transforms_active():
            # Autocast comes below a level of functorch, and the formula is to see what the kernel gets.
            casting = _torch.dispatcher.casting_key(operator.qualname, tensors_in((*args, *kwargs.values())))
            if casting is not None:
                return overload.redispatch(casting, *args, **kwargs)  # and comes back

        current = rule.current()
        values = current.not_ignored(args, kwargs)
        may_have_tangents = may_have_tangents or (path.tangents_seen and _torch.autograd.tangents_may_hide())
        has_tangents = may_have_tangents and _torch.autograd.any_tangent(values)
        if has_tangents and not path.tangents_seen:
            operator.saw_tangents()
        if has_tangents and current.with_tangents is not None:
            current = current.with_tangents
        is_recorded = torch.is_grad_enabled() and requires_grad(*values)
        if not (is_recorded or has_tangents):
            # The operations of the kernel are not to take along tangents that the op ignores.
            mode = _torch.dispatcher.below_autograd() if may_have_tangents and current.ignores else AS_IT_IS
            result = _redispatch(operator, keyset, mode, *args, **kwargs)
            return mutated(args, kwargs) if mutated is not None else result

        if is_recorded and Tag.out in operator.tags:
            raise AutogradError(
                f"{operator.name.name}(): functions with out=... arguments don't support automatic differentiation, "
                "but one of the arguments requires grad",
                op=operator.qualname,
                fix="call the functional op, or call this one under torch.no_grad()",
            )
        fn = current_kernel.direct if current_kernel is not None and calls_directly else None
        if fn is None:
            # The node's forward switches differentiation off, which is right at the bottom. Inside a functorch
            # transform the next level below differentiates too, so both modes, reverse and forward, go on again, as in
            # functorch's own forward; where the caller had them off, functorch sees to that itself.
            in_transform = keyset.has(_torch.dispatcher.DispatchKey.FuncTorchDynamicLayerBackMode)
            mode = torch.inference_mode(False) if in_transform else AS_IT_IS
            fn = functools.partial(_redispatch, operator, keyset, mode)
        try:
            return _torch.autograd.apply_function(rule.node(current), fn, *args, **kwargs)
        except (AttributeError, TypeError, RuntimeError) as error:
            rule.explain(error)
            raise

    return _torch.dynamo.outside_dynamo(general), rule if calls_directly and Tag.out not in operator.tags else None
