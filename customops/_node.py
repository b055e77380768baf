"""The graph node of an op: an autograd.Function made for its formula.

It derives from the class that functorch itself uses for one level of differentiation, so that ``torch.func.grad``,
``vjp``, ``jvp`` and their compositions see the op as they see an aten op.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from customops import _compat
from customops._call import Fn, filler
from customops._definition import Definition, When
from customops._formula import Formula, Layout, is_differentiable
from customops._gradients import InputGradients, OutputTangents, expected_of
from customops._history import check_write, remember_lost, unfollowed_write, watched
from customops._schema import Schema
from customops.errors import AutogradError, UnsupportedError


def converts_nothing(schema: Schema) -> bool:
    """Does a kernel get and return the same objects, whether the dispatcher is between or not? (lists are new ones)"""
    return all("[" not in argument.type for argument in schema.arguments) and all(
        ret.type == "Tensor" for ret in schema.returns
    )


def is_flat(schema: Schema) -> bool:
    """Does a node for the op take and return what the op does? Then it needs no `Call` around the kernel."""
    return converts_nothing(schema) and bool(schema.returns) and not (schema.mutated or schema.keyword_only)


def node(definition: Definition, layout: Layout, backward: Formula | None, jvp: Formula | None) -> Any:
    """The autograd.Function of an op and its formulas. Its first argument reaches the op.

    That is a `Call`; for an op that `is_flat`, what the arguments are given to.
    """
    formulas = [formula for formula in (backward, jvp) if formula is not None]
    set_up = _SetUp(definition.schema, formulas)
    finish = _Outputs(layout, for_jvp=jvp is not None, materializes=all(f.materialize_grads for f in formulas))
    has_formula, compares = bool(formulas), Compares(definition.when)
    statics = {
        "forward": _flat_forward(definition.schema, layout, set_up, finish, compares)
        if is_flat(definition.schema)
        else _forward(definition, layout, set_up, finish, compares, has_formula=has_formula),
        "backward": _backward(definition, layout, backward, compares),
        "jvp": _jvp(definition, layout, jvp),
    }
    name = "_".join(part for part in definition.name if part)  # torch puts "Backward" after it
    marked = {key: staticmethod(_compat.outside_dynamo(member)) for key, member in statics.items()}
    function = type(name, (_compat.SingleLevelFunction,), marked)
    _compat.context_class(function).set_materialize_grads = _set_materialize_grads
    return function


class Compares:
    """Are the gradients of a formula compared with its inputs? As ``check=`` says; "first" is the first backward."""

    __slots__ = ("is_on", "once")

    def __init__(self, when: When) -> None:
        self.is_on = when != "never"
        self.once = when == "first"

    def was_right(self) -> None:
        if self.once:
            self.is_on = False


# Forward --------------------------------------------------------------------------------------------------------


class _SetUp:
    """Calls the setup_contexts of the formulas, each once."""

    def __init__(self, schema: Schema, formulas: Sequence[Formula]) -> None:
        given = [formula.setup_context for formula in formulas]
        self.callbacks = tuple(dict.fromkeys(callback for callback in given if callback is not None))
        self.fill = filler(schema)
        self.has_keywords = bool(schema.keyword_only)

    def __call__(self, ctx: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self.fill is not None:
            args, kwargs = self.fill(args, kwargs)
        if not _compat.transforms_active():
            self._call(ctx, args, kwargs, output)
            return
        with torch.inference_mode(False):  # what it computes is recorded at the levels further out
            self._call(ctx, args, kwargs, output)

    def _call(self, ctx: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        for callback in self.callbacks:
            if self.has_keywords:
                callback(ctx=ctx, inputs=args, keyword_only_inputs=kwargs, output=output)
            else:
                callback(ctx=ctx, inputs=args, output=output)


class _Outputs:
    """What is to be known of a node's outputs once they are there.

    torch fills in zeros for outputs that were not used, also for those that can have no gradient. Where there are such,
    this is done here. ``ctx._customops_zeros`` has what the zeros are like, None for what stays None.
    """

    def __init__(self, layout: Layout, *, for_jvp: bool, materializes: bool) -> None:
        self.flags = layout.outputs
        self.for_jvp = for_jvp
        self.materializes = materializes
        self.all_differentiable = all(layout.outputs)
        self.are_several = len(layout.outputs) > 1 or any(layout.list_outputs)
        #: Is there nothing to be done for an op with one output?
        self.is_idle = self.all_differentiable and materializes and not (for_jvp or self.are_several)

    def __call__(self, ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> None:
        """`outputs` has an item for each, lists as lists; `inputs` are flat."""
        if not self.all_differentiable:
            ctx.mark_non_differentiable(
                *(x for each, flag in zip(outputs, self.flags, strict=True) if not flag for x in _tensors(each))
            )
        metadata = [_metadata(each, flag) for each, flag in zip(outputs, self.flags, strict=True)]
        if self.for_jvp:
            ctx._customops_results = metadata
        if not self.materializes or not ctx.__dict__.get("_customops_materialize", True):
            ctx.materialize_grads = False
        elif self.are_several and any(each is None for each in _flat(metadata)):
            ctx.materialize_grads = False
            ctx._customops_zeros = metadata
            if self.for_jvp:
                ctx._customops_zero_tangents = [_metadata(x, True) for x in inputs]


def _metadata(value: Any, flag: bool) -> Any:
    if isinstance(value, (list, tuple)):
        return [_metadata(item, flag) for item in value]
    return _compat.metadata(value) if flag and is_differentiable(value) else None


def _set_materialize_grads(ctx: Any, value: bool) -> None:
    """``ctx.set_materialize_grads``; torch's own cannot be asked what it was set to."""
    ctx._customops_materialize = value


def _tensors(value: Any) -> list[Tensor]:
    items = value if isinstance(value, (list, tuple)) else (value,)
    return [item for item in items if isinstance(item, Tensor)]


def _flat_forward(schema: Schema, layout: Layout, set_up: _SetUp, finish: _Outputs, compares: Compares) -> Fn:
    """The forward of an op whose arguments and returns are those of the node."""
    below_autograd, metadata, returns_tuple = _compat.below_autograd, _compat.metadata, len(schema.returns) > 1
    sets_up, differentiable = bool(set_up.callbacks), layout.differentiable
    ignores = any(a.holds_tensors and not flag for a, flag in zip(layout.inputs, differentiable, strict=True))

    def forward(ctx: Any, kernel: Any, *args: Any) -> Any:
        guard = below_autograd()
        try:
            result = kernel(*args)
        finally:
            del guard
        if returns_tuple and type(result) is not tuple:
            result = tuple(result)
        needed = ctx.needs_input_grad[1:]
        if ignores:
            needed = tuple(map(_mask, needed, differentiable))
        ctx.needs_input_grad = needed
        if sets_up:
            set_up(ctx, args, {}, result)
            remember_lost(ctx, args, result if returns_tuple else (result,))
        if not finish.is_idle or "_customops_materialize" in ctx.__dict__:
            finish(ctx, args, result if returns_tuple else (result,))
        is_on = compares.is_on
        ctx._customops_expected = [metadata(x) if n and is_on else None for x, n in zip(args, needed, strict=True)]
        return result

    return forward


def _forward(
    definition: Definition,
    layout: Layout,
    set_up: _SetUp,
    finish: _Outputs,
    compares: Compares,
    *,
    has_formula: bool,
) -> Fn:
    """The forward of any op. Its `Call` knows which inputs there are, and is told which outputs there are."""
    op, writes = str(definition.name), bool(layout.written)
    returns_tuple = len(definition.schema.returns) > 1

    def forward(ctx: Any, call: Call, *flat: Any) -> Any:
        values, passed = regroup(flat, call.lengths), call.indices(layout)
        inputs = dict(zip(passed, values, strict=True))
        if writes and has_formula:
            _check_writes(layout, inputs, op)
        before = _copies(layout, inputs)
        args, kwargs = call.arguments(inputs, layout)
        guard = _compat.below_autograd()
        try:
            result = call.fn(*args, **kwargs)
        finally:
            del guard
        if layout.in_place:
            result = args[0]
        elif returns_tuple and type(result) is not tuple:
            result = tuple(result)
        outputs = result if isinstance(result, tuple) else () if result is None else (result,)
        outputs += tuple(inputs.get(i) for i in layout.new_values)
        needed = regroup(ctx.needs_input_grad[1:], call.lengths)
        flags = {i: _mask(flag, layout.differentiable[i]) for i, flag in zip(passed, needed, strict=True)}
        ctx.needs_input_grad = call.needs_input_grad(flags, layout)
        if set_up.callbacks:
            seen = call.arguments({**inputs, **before}, layout) if before else (args, kwargs)
            set_up(ctx, *seen, result)
            remember_lost(ctx, (*flat, *_flat(before.values())), _flat(outputs))
        finish(ctx, flat, outputs)
        ctx._customops_passed = passed
        ctx._customops_expected = [expected_of(inputs[i], flags[i], compares.is_on) for i in passed]
        dirty = _dirty(layout, inputs, has_formula) if writes else []
        return _laid_out(ctx, call, layout, outputs, dirty)

    return forward


def _laid_out(ctx: Any, call: Call, layout: Layout, outputs: tuple[Any, ...], dirty: list[Tensor]) -> Any:
    """What the node returns: its outputs, lists laid out flat, and everything that it is the new history of."""
    if dirty:
        ctx.mark_dirty(*dirty)
    leaves, lengths = flatten(outputs, layout.list_outputs)
    lengths = lengths or [None] * len(leaves)
    leaves += tuple(x for x in dirty if all(x is not leaf for leaf in leaves))
    ctx._customops_outputs = call.output_lengths = lengths
    return leaves[0] if len(leaves) == 1 else leaves


def _mask(flag: Any, is_differentiable: bool) -> Any:
    if is_differentiable:
        return flag
    return [False] * len(flag) if isinstance(flag, list) else False


def _flat(values: Iterable[Any]) -> list[Any]:
    return [x for value in values for x in (value if isinstance(value, (list, tuple)) else (value,))]


def _check_writes(layout: Layout, inputs: dict[int, Any], op: str) -> None:
    """Raise for a write that would go past the history of a tensor, before it is done."""
    is_only = len(layout.outputs) == 1 and not layout.list_outputs[0]
    for i in layout.written:
        followed = layout.in_place or i in layout.new_values
        for tensor in _tensors(inputs.get(i)):
            if followed:
                check_write(tensor, layout.inputs[i].name, op, is_only=is_only)
            elif tensor.requires_grad:
                raise unfollowed_write(layout.inputs[i].name, op)


def _copies(layout: Layout, inputs: dict[int, Any]) -> dict[int, Any]:
    """Copies of inputs from before the write, with their history."""
    if not layout.originals:
        return {}
    with torch.inference_mode(False):  # the public switch for reverse and forward mode at once
        return {
            i: [x.clone() if isinstance(x, Tensor) else x for x in value]
            if isinstance(value, (list, tuple))
            else value.clone()
            for i in layout.originals
            if (value := inputs.get(i)) is not None
        }


def _dirty(layout: Layout, inputs: dict[int, Any], has_formula: bool) -> list[Tensor]:
    """The tensors of which this node is to be the history.

    Without a formula, those that have one: else a later backward would go past the write as if it had not happened.
    """
    if has_formula:
        indices = layout.written[:1] if layout.in_place else layout.new_values
        return [tensor for i in indices for tensor in _tensors(inputs.get(i))]
    written = [tensor for i in layout.written for tensor in _tensors(inputs.get(i))]
    return [tensor for tensor in written if tensor.requires_grad and not tensor.is_leaf]


# Backward and jvp -----------------------------------------------------------------------------------------------


def _backward(definition: Definition, layout: Layout, formula: Formula | None, compares: Compares) -> Fn:
    if formula is None:
        return _missing(definition)
    user_backward, op, flat = formula.fn, str(definition.name), is_flat(definition.schema)
    check = InputGradients(layout, op, user_backward)
    of_tensors = tuple(argument.holds_tensors for argument in layout.inputs)

    def backward(ctx: Any, *grads: Any) -> Any:
        if not flat:
            grads = regroup(grads, ctx._customops_outputs)
        zeros = ctx.__dict__.get("_customops_zeros")
        if zeros is not None:
            grads = tuple(map(_or_zeros, grads, zeros))
        result = user_backward(watched(ctx, op) if torch.is_grad_enabled() else ctx, *grads)
        expected = ctx._customops_expected
        if flat:
            values = result if type(result) is tuple else (result,)
            if len(values) == len(expected) and all(map(_is_like, values, expected, of_tensors)):
                compares.was_right()
                return (None, *values)
        passed = range(len(expected)) if flat else ctx._customops_passed
        none_allowed = any(grad is None for grad in _flat(grads))
        gradients = check.flat(result, passed, expected, none_allowed=none_allowed)
        compares.was_right()
        return (None, *gradients)

    return backward


def _is_like(gradient: Any, expected: Any, is_tensor: bool) -> bool:
    """Is it the gradient that was expected? If in doubt, no: then `InputGradients` looks."""
    if gradient is None:
        return expected is None
    if not isinstance(gradient, Tensor):
        return False
    return bool(expected == (gradient.shape, gradient.dtype, gradient.device)) if expected is not None else is_tensor


def _or_zeros(grad: Any, like: Any) -> Any:
    if isinstance(like, list):
        return [_or_zeros(*pair) for pair in zip(grad, like, strict=True)]
    if grad is not None or like is None:
        return grad
    shape, dtype, device = like
    if shape is None:
        raise UnsupportedError(
            "zeros for the gradient of a nested tensor that was not used",
            fix="register_autograd(..., materialize_grads=False), and None stands for them",
        )
    return torch.zeros(shape, dtype=dtype, device=device)


def _missing(definition: Definition) -> Fn:
    def backward(ctx: Any, *grads: Any) -> Any:
        raise _no_formula(definition)

    return backward


def _jvp(definition: Definition, layout: Layout, formula: Formula | None) -> Fn:
    if formula is None:
        return _missing_jvp(definition)
    user_jvp, check = formula.fn, OutputTangents(layout, str(definition.name), formula.fn)

    def jvp(ctx: Any, _: None, *flat: Any) -> Any:
        expected = ctx._customops_expected
        lengths = [len(each) if isinstance(each, list) else None for each in expected]
        passed = ctx.__dict__.get("_customops_passed", range(len(expected)))
        flat = tuple(map(_or_zeros, flat, ctx.__dict__.get("_customops_zero_tangents", (None,) * len(flat))))
        given = dict(zip(passed, regroup(flat, lengths), strict=True))
        tangents = [given.get(i) if has else None for i, has in enumerate(layout.differentiable)]
        result = _compat.call_jvp(user_jvp, ctx, *tangents)
        results = result if isinstance(result, tuple) else (result,)
        check.check(results, ctx._customops_results)
        outputs = tuple(map(_compat.without_tangent, flatten(results, layout.list_outputs)[0]))
        if layout.written:
            outputs = _compat.call_jvp(_written_tangents, layout, given, outputs)
        return outputs[0] if len(outputs) == 1 else outputs

    return jvp


def _written_tangents(layout: Layout, given: dict[int, Any], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """What torch wants of an op that writes: the tangent of what is written is written too, and returned."""
    indices = [0] if layout.in_place else layout.new_values
    before = [tangent for i in indices for tangent in _flat([given.get(i)])]
    first = len(outputs) - len(before)
    written = zip(before, outputs[first:], strict=True)
    return (*outputs[:first], *(new if old is None else old.copy_(new) for old, new in written))


def _missing_jvp(definition: Definition) -> Fn:
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise UnsupportedError(
            "forward-mode differentiation (jvp, jacfwd, dual numbers) of an op without a jvp rule",
            op=str(definition.name),
            fix="op.register_jvp(jvp, setup_context=...); or use reverse mode: jacrev(jacrev(f)) is a hessian, too",
        )

    return jvp


def _no_formula(definition: Definition) -> AutogradError:
    if not definition.differentiable.op:
        problem = "Trying to backward through an op that is declared not to be differentiable, but wrote its argument"
        fix = "call it under torch.no_grad() or on x.detach()"
    elif definition.schema.mutated:
        problem = "Trying to backward through an op that writes to its argument, but no autograd formula was registered"
        fix = "op.register_autograd(backward, setup_context=...); or call it under torch.no_grad() or on x.detach()"
    else:
        problem = "Trying to backward through an op, but no autograd formula was registered"
        fix = "op.register_autograd(backward, setup_context=...)"
    return AutogradError(problem, op=str(definition.name), fix=fix)


# autograd.Function takes and returns flat tensors only; lists of tensors are laid out flat around it ---------------

#: How many flat values each value became, None for a value on its own. None instead: there are no lists at all.
Lengths = list["int | None"] | None


class Call:
    """How one differentiated call reaches the op, and how the node's flat inputs map to the user's arguments."""

    __slots__ = ("fn", "keywords", "lengths", "names", "output_lengths", "passed")

    def __init__(self, fn: Fn, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: tuple[str, ...]) -> None:
        self.fn = fn
        self.passed = len(args)
        #: The keyword-only arguments that are inputs of the node, and the others.
        self.names = [name for name in tensors if name in kwargs] if tensors else []
        self.keywords = {key: value for key, value in kwargs.items() if key not in tensors} if tensors else kwargs
        self.lengths: Lengths = None
        self.output_lengths: Lengths = None

    def flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any], layout: Layout) -> tuple[Any, ...]:
        """The node's inputs."""
        passed = self.indices(layout)
        values = [args[i] if i < self.passed else kwargs[layout.inputs[i].name] for i in passed]
        flat, self.lengths = flatten(tuple(values), tuple(layout.inputs[i].is_tensor_list for i in passed))
        return flat

    def indices(self, layout: Layout) -> list[int]:
        """Which inputs were passed, in the order in which the node has them."""
        passed = list(range(self.passed))
        if self.names:
            rest = range(layout.positional, len(layout.inputs))
            passed += [i for i in rest if layout.inputs[i].name in self.names]
        if layout.first in passed:
            passed.remove(layout.first)
            passed.insert(0, layout.first)
        return passed

    def arguments(self, inputs: dict[int, Any], layout: Layout) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the op is called with; `inputs` are by index, lists as lists."""
        args = tuple(inputs[i] for i in range(self.passed))
        named = {layout.inputs[i].name: value for i, value in inputs.items() if i >= layout.positional}
        return args, {**self.keywords, **named} if named else self.keywords

    def needs_input_grad(self, flags: dict[int, Any], layout: Layout) -> tuple[Any, ...]:
        """The flags of the inputs that were passed, as a backward sees them.

        That is an entry for each positional argument that was passed; if there are tensors that are keyword-only, for
        each positional argument and each of them, so that each has its place.
        """
        entries = self.passed if layout.positional == len(layout.inputs) else len(layout.inputs)
        return tuple(flags.get(i, False) for i in range(entries))


def flatten(values: tuple[Any, ...], are_lists: tuple[bool, ...]) -> tuple[tuple[Any, ...], Lengths]:
    """Lay lists of tensors out flat."""
    if True not in are_lists:
        return values, None
    flat: list[Any] = []
    lengths: list[int | None] = []
    for value, is_list in zip(values, are_lists, strict=False):  # arguments left at their default are not there
        if is_list and value is not None:
            flat += value
            lengths.append(len(value))
        else:
            flat.append(value)
            lengths.append(None)
    return tuple(flat), lengths


def regroup(flat: tuple[Any, ...], lengths: Lengths) -> tuple[Any, ...]:
    """Undo `flatten`."""
    if lengths is None:
        return flat
    values: list[Any] = []
    i = 0
    for length in lengths:
        if length is None:
            values.append(flat[i])
            i += 1
        else:
            values.append(list(flat[i : i + length]))
            i += length
    return tuple(values)
