"""Gradients: backward, jvp and setup_context, applied in a kernel at the Autograd key. See `node`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from customops import _torch
from customops._autograd.inplace import captured_error
from customops._autograd.layout import BackwardOptions, Formula, GradientOptions, Layout, mutated_names, mutated_values
from customops._autograd.node import Node, is_direct, make_node
from customops._codegen import autograd
from customops._codegen.function import source_of
from customops._dispatch.callbacks import Fn, bind
from customops._dispatch.current_kernel import CurrentKernel
from customops._dispatch.operator import OperatorHandle
from customops._dispatch.registrations import Registration, Slots, Undo, lock, nothing
from customops._dispatch.results import mutated_results, tensors_in
from customops._schema.model import Schema, tensor_names
from customops._torch.schema import Tag
from customops.errors import AutogradError, CallbackError, RegistrationError, brief, where

__tracebackhide__ = True  # pytest leaves the frames out


class NodeRef:
    """Holds the ``apply`` of the node for the current formula, once it was needed."""

    __slots__ = ("apply", "explain")

    def __init__(self, explain: Callable[[Exception], None]) -> None:
        self.apply: Fn | None = None
        #: Raises in the place of what applying it raised, if more can be said.
        self.explain = explain


class AutogradRule:
    """The formulas of one op. Without a backward, backward raises; without a jvp, forward mode does."""

    operator: OperatorHandle
    #: What is there without being registered: without a formula, backward says how to register one.
    _with_op: tuple[str, ...] = ("backward",)

    def __init__(self) -> None:
        self._slots: Slots[str, Formula] = Slots(self._install_trampoline, self._forget_node)
        self._node = NodeRef(self.explain)
        self._current: ActiveFormulas | None = None

    def bind(self, operator: OperatorHandle, guard_changed: Callable[[], None]) -> None:
        self.operator, self._guard_changed = operator, guard_changed
        self._node.apply = self._current = None
        self._slots.reset(with_op=self._with_op if operator.has_own_rules else ())

    @property
    def formulas(self) -> dict[str, Formula]:
        return self._slots.values

    def register(self, backward: Fn, setup_context: Fn | None, options: BackwardOptions) -> Registration:
        self._refuse("register_autograd")
        formula = self._formula(backward, setup_context, options, BackwardOptions)
        formula = formula._replace(once_differentiable=options.get("once_differentiable", False))
        outputs = len(self.operator.schema.returns) + len(formula.grads_of)
        bind(backward, self.operator.qualname, "backward", "ctx", *[f"grad{i}" for i in range(outputs)])
        return self._slots.set("backward", formula)

    def register_jvp(self, jvp: Fn, setup_context: Fn | None, options: GradientOptions) -> Registration:
        self._refuse("register_jvp", is_view=self.operator.schema.is_view)
        formula, schema = self._formula(jvp, setup_context, options, GradientOptions), self.operator.schema
        tangents = (f"{argument.name}_tangent" for argument in schema.operands)
        bind(jvp, self.operator.qualname, "jvp", "ctx", *tangents)
        return self._slots.set("jvp", formula)

    def _formula(self, fn: Fn, setup_context: Fn | None, options: GradientOptions, known: type) -> Formula:
        """The formula with its options, if they are `known` ones and fit the op."""
        schema, op = self.operator.schema, self.operator.qualname
        if unknown := options.keys() - known.__annotations__:
            raise CallbackError(
                f"a formula has no option {', '.join(map(repr, sorted(unknown)))}",
                op=op,
                expected=", ".join(["setup_context", "lib", *known.__annotations__]),
                where=where(fn),
            )
        if setup_context is not None:
            names = ["ctx", "inputs", "keyword_only_inputs", "output"]
            if not schema.keyword_only:
                names.remove("keyword_only_inputs")
            bind(setup_context, op, "setup_context", **{name: name for name in names})
        if isinstance(fn, type):
            raise CallbackError(
                "a formula must be a function, and a class was given",
                op=op,
                got=brief(fn),
                fix=f"the function in it, {fn.__name__}.backward, and setup_context={fn.__name__}.setup_context",
            )
        nondiff_args = tensor_names(options.get("nondiff_args", ()), "nondiff_args", schema, op)
        _refuse_only_optional_lists(schema, nondiff_args, op)
        formula = Formula(
            fn,
            setup_context,
            nondiff_args,
            originals=mutated_names(options.get("originals", ()), "originals", schema, op),
            materialize_grads=options.get("materialize_grads", True),
        )
        grads_of = options.get("grads_of")
        return formula._replace(grads_of=mutated_values(grads_of, formula, schema, op))

    def _refuse(self, what: str, *, is_view: bool = False) -> None:
        """Raise for an op that cannot have a formula of this kind."""
        op, schema = self.operator.qualname, self.operator.schema
        if Tag.out in self.operator.tags:
            raise RegistrationError(
                "Out variants do not support autograd", op=op, fix="register the gradient on the functional op"
            )
        if not self.operator.differentiable.op:
            raise RegistrationError(
                f"{what} on an op that is declared not to be differentiable", op=op, fix="leave differentiable= out"
            )
        if not schema.is_differentiable or is_view:
            raise RegistrationError(
                "cannot register autograd on a non-functional operator: it returns a view in a way autograd has no "
                "rule for, or it neither returns nor writes anything",
                op=op,
                got=str(schema),
                fix="register the gradient on an op that returns new tensors, or writes to its arguments",
            )

    def _install_trampoline(self, key: str, own_library: bool) -> Undo:
        operator = self.operator
        if key == "jvp" and operator.library is not None:
            return nothing  # there is one, with the op
        generated = autograd.autograd(operator, self._make)
        return operator.impl(generated, "Autograd", with_keyset=True, own_library=own_library)

    def _make(self) -> tuple[Fn, NodeRef | None]:
        calls_directly = is_direct(self.operator.schema)
        general = _general(self, self.operator, calls_directly)
        return general, self._node if calls_directly and Tag.out not in self.operator.tags else None

    def _forget_node(self) -> None:
        self._node.apply = self._current = None
        self.operator.recompile()
        self._guard_changed()

    def regenerate(self) -> None:
        """Make the node anew: whether gradients are checked has changed."""
        self._forget_node()

    def call_guard(self, entry: Fn) -> Fn:
        """`entry`, or what is to be called in its place."""
        followed = {name for formula in self._slots.values.values() for name in formula.grads_of}
        if not followed:
            return entry
        mutated = [(i, a.name) for i, a in enumerate(self.operator.schema.operands) if a.name in followed]
        return _CaptureCheck(entry, mutated, self.operator.qualname)

    def current(self) -> ActiveFormulas:
        """What holds for the formulas that are registered now."""
        # A graph keeps the formula it was made with: another backward need not fit what this setup_context saved.
        current = self._current
        if current is not None:
            return current
        with lock:
            if self._current is None:
                backward, jvp = self._slots.values.get("backward"), self._slots.values.get("jvp")
                self._current = ActiveFormulas(self.operator, backward, jvp)
            return self._current

    def sources(self) -> dict[str, str]:
        """The source of the node, which runs where there is something to differentiate."""
        function, apply = self.node(self.current())
        steps = {"apply": apply, "forward": function.forward, "backward": function.backward}
        return {f"Autograd, {step}": source_of(fn) for step, fn in steps.items()}

    def explain(self, error: Exception) -> None:
        """Raise, in the place of what torch says to a ctx that setup_context has filled, what names op and place."""
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
                    _check_agreement(self.operator.qualname, *current.formulas)
                    current.node = make_node(self.operator, current.layout, *current.formulas)
                    # Where something is ignored, the trampoline's own look at the arguments is not enough.
                    if self._current is current and not current.ignores:
                        self._node.apply = current.node.apply
        return current.node


def _refuse_only_optional_lists(schema: Schema, nondiff_args: frozenset[str], op: str) -> None:
    """The dispatcher does not look into optional lists: of an op without other tensors, autograd sees no call."""
    lists = [a.name for a in schema.operands if a.type == "Tensor[]?" and a.name not in nondiff_args]
    if lists and all(argument.type == "Tensor[]?" for argument in schema.operands if argument.holds_tensors):
        raise RegistrationError(
            "torch finds no gradients in an optional list of tensors if no other argument is a tensor",
            op=op,
            argument=lists[0],
            got=str(schema),
            fix=f"make {lists[0]} a list (an empty one for None), or pass a tensor besides",
        )


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


class _CaptureCheck:
    """Calls an op that writes what is differentiated, unless that would be lost.

    torch refuses a write inside a transform to a tensor from outside, for ops whose name ends in ``_``; with others the
    new value would be a constant to the transform. In a kernel that cannot be told any more.
    """

    def __init__(self, entry: Fn, mutated: list[tuple[int, str]], op: str) -> None:
        self.entry, self.mutated, self.op = entry, mutated, op

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _torch.dispatcher.transforms_active():
            for i, name in self.mutated:
                tensors = tensors_in([args[i] if i < len(args) else kwargs.get(name)])
                if any(map(_torch.autograd.is_captured, tensors)):
                    raise captured_error(name, self.op)
        return self.entry(*args, **kwargs)


class ActiveFormulas:
    """What holds for the formulas of the moment."""

    def __init__(self, operator: OperatorHandle, backward: Formula | None, jvp: Formula | None) -> None:
        formulas = [formula for formula in (backward, jvp) if formula is not None]
        self.layout = layout = Layout.of(operator.schema, operator.tags, operator.differentiable, formulas)
        ignored = [
            (i, argument)
            for i, argument in enumerate(layout.inputs)
            if argument.holds_tensors and not layout.differentiable[i] and not argument.is_mutated
        ]
        #: The positional arguments, and the keyword-only ones, that are tensors and without a gradient.
        self.ignores = frozenset(argument.name if argument.kwarg_only else i for i, argument in ignored)
        self.formulas = backward, jvp
        self.node: Node | None = None

    def watched(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """The arguments that matter."""
        if not self.ignores:
            return (*args, *kwargs.values())
        values = [value for i, value in enumerate(args) if i not in self.ignores]
        return (*values, *(value for name, value in kwargs.items() if name not in self.ignores))


def _check_agreement(op: str, backward: Formula | None, jvp: Formula | None) -> None:
    """Raise if the two formulas of an op do not have the same outputs: both are of one node."""
    if backward is not None and jvp is not None and backward.grads_of != jvp.grads_of:
        raise RegistrationError(
            "register_autograd and register_jvp do not agree on which written arguments are differentiable",
            op=op,
            expected=f"grads_of={backward.grads_of}, as for backward",
            got=f"grads_of={jvp.grads_of} for jvp",
            fix="register both with the same grads_of= and nondiff_args=",
        )


_AS_THEY_ARE = nullcontext()


def _modes_of_lower_levels(keyset: Any) -> Any:
    """Context manager for going on inside an autograd.Function's forward, which switches differentiation off.

    Off is right at the bottom. Inside a functorch transform the next level below differentiates too, so both modes go
    on again, as in functorch's own forward; where the caller had them off, functorch sees to that itself.
    """
    if keyset.has(_torch.dispatcher.DispatchKey.FuncTorchDynamicLayerBackMode):
        return torch.inference_mode(False)  # the public switch for reverse and forward mode at once
    return _AS_THEY_ARE


def _redispatch(operator: OperatorHandle, keyset: Any, /, *args: Any, **kwargs: Any) -> Any:
    try:
        with _modes_of_lower_levels(keyset):
            return operator.overload.redispatch(keyset & _torch.dispatcher.after_autograd, *args, **kwargs)
    except NotImplementedError as error:
        operator.explain(error)
        raise


def _general(rule: AutogradRule, operator: OperatorHandle, calls_directly: bool) -> Fn:
    """What is done at the Autograd key where the device's kernel is not called directly: see `_codegen.autograd`."""
    overload, after = operator.overload, _torch.dispatcher.after_autograd
    schema, direct = operator.schema, operator.fast_path.by_keyset
    is_out = Tag.out in operator.tags
    any_requires_grad = autograd.any_requires_grad(schema)
    mutated = mutated_results(schema, operator.tags)

    def general(
        keyset: Any, current_kernel: CurrentKernel | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if current_kernel is None and keyset.raw_repr() not in direct:
            current_kernel = operator.find_fast_path(keyset)
            kernel = None if _torch.autograd.forward_ad_active() or current_kernel is None else current_kernel.direct
            if kernel is not None and not (torch.is_grad_enabled() and any_requires_grad(*args, *kwargs.values())):
                return kernel(*args, **kwargs)  # as the generated function will from now on
        if _torch.thread_state.autocast_is_on() and _torch.dispatcher.transforms_active():
            # Autocast comes below a level of functorch, and the formula is to see what the kernel gets.
            casting = _torch.thread_state.casting_key(operator.qualname, tensors_in((*args, *kwargs.values())))
            if casting is not None:
                return overload.redispatch(casting, *args, **kwargs)  # and comes back
        current = rule.current()
        watched = current.watched(args, kwargs)
        may_have = _torch.autograd.forward_ad_active() or (
            operator.fast_path.tangents_seen and _torch.autograd.tangents_may_hide()
        )
        has_tangents = may_have and _torch.autograd.any_tangent(watched)
        if has_tangents and not operator.fast_path.tangents_seen:
            operator.saw_tangents()
        if torch.is_grad_enabled() and any_requires_grad(*watched):
            if is_out:
                raise _out_error(operator)
        elif not has_tangents:
            try:
                # The operations of the kernel are not to take along tangents that the op ignores.
                with _torch.dispatcher.below_autograd() if may_have and current.ignores else _AS_THEY_ARE:
                    result = overload.redispatch(keyset & after, *args, **kwargs)
            except NotImplementedError as error:
                operator.explain(error)
                raise
            return mutated(args, kwargs) if mutated is not None else result
        fn = current_kernel.direct if current_kernel is not None and calls_directly else None
        fn = fn or functools.partial(_redispatch, operator, keyset)
        try:
            return _torch.autograd.apply_function(rule.node(current), fn, *args, **kwargs)
        except (TypeError, RuntimeError) as error:
            rule.explain(error)
            raise

    return _torch.dynamo.outside_dynamo(general)


def _out_error(operator: OperatorHandle) -> AutogradError:
    return AutogradError(
        f"{operator.name.name}(): functions with out=... arguments don't support automatic differentiation, "
        "but one of the arguments requires grad",
        op=operator.qualname,
        fix="call the functional op, or call this one under torch.no_grad()",
    )
