"""The graph node of an op: an autograd.Function made for its formula.

It derives from the class that functorch itself uses for one level of differentiation, so that ``torch.func.grad``,
``vjp``, ``jvp`` and their compositions see the op as they see an aten op.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from customops import _compat
from customops._call import Fn, filler
from customops._definition import Definition
from customops._schema import Schema
from customops.errors import AutogradError, UnsupportedError, where


class Formula(NamedTuple):
    """How to differentiate an op in one mode: its backward, or its jvp."""

    fn: Fn
    setup_context: Fn | None


def converts_nothing(schema: Schema) -> bool:
    """Does a kernel get and return the same objects, whether the dispatcher is between or not? (lists are new ones)"""
    return all("[" not in argument.type for argument in schema.arguments) and all(
        ret.type == "Tensor" for ret in schema.returns
    )


def is_flat(schema: Schema) -> bool:
    """Does a node for the op take and return what the op does? Then it needs no `_Call` around the kernel."""
    return converts_nothing(schema) and bool(schema.returns) and not (schema.mutated or schema.keyword_only)


def node(definition: Definition, backward: Formula | None, jvp: Formula | None) -> Any:
    """The autograd.Function of an op and its formulas. Its first argument is called to reach the op."""
    setups = [formula.setup_context for formula in (backward, jvp) if formula is not None]
    setup_contexts = tuple(dict.fromkeys(setup for setup in setups if setup is not None))  # the same one once
    statics = {
        "forward": _forward(definition, setup_contexts, keeps_results=jvp is not None),
        "backward": _backward(definition, backward),
        "jvp": _jvp(definition, jvp),
    }
    name = "_".join(part for part in definition.name if part)  # torch puts "Backward" after it
    marked = {key: staticmethod(_compat.outside_dynamo(member)) for key, member in statics.items()}
    return type(name, (_compat.SingleLevelFunction,), marked)


def _forward(definition: Definition, setup_contexts: tuple[Fn, ...], *, keeps_results: bool) -> Fn:
    below_autograd, fill = _compat.below_autograd, filler(definition.schema)
    flat_only, list_outputs = is_flat(definition.schema), _list_outputs(definition.schema)
    returns_tuple = len(definition.schema.returns) > 1
    in_place, has_keywords = torch.Tag.inplace in definition.tags, bool(definition.schema.keyword_only)
    written = tuple(argument.is_written for argument in definition.schema.positional if definition.schema.mutated)

    def forward(ctx: Any, call: Any, *flat: Any) -> Any:
        args = flat if flat_only else regroup(flat, call.input_lengths)
        guard = below_autograd()
        try:
            result = call(*args)
        finally:
            del guard
        if returns_tuple and type(result) is not tuple:
            result = tuple(result)
        needed = ctx.needs_input_grad[1:]
        ctx.needs_input_grad = needed if flat_only else regroup(needed, call.input_lengths)
        if setup_contexts:
            inputs, keywords = fill(args, call.keywords if has_keywords else {}) if fill else (args, {})
            extra = {"keyword_only_inputs": keywords or call.keywords} if has_keywords else {}
            for setup_context in setup_contexts:
                setup_context(ctx=ctx, inputs=inputs, output=result, **extra)
        if keeps_results:
            ctx._customops_results = _metadata(result)
        if flat_only:
            return result
        outputs, lengths = flatten(result if isinstance(result, tuple) else (result,), list_outputs)
        if written:
            lengths = lengths or [None] * len(outputs)
            outputs = _with_history(ctx, outputs, args, written, in_place)
        ctx._customops_outputs = call.output_lengths = lengths
        return outputs[0] if len(outputs) == 1 else outputs

    return forward


def _backward(definition: Definition, formula: Formula | None) -> Fn:
    flat_only, user_backward = is_flat(definition.schema), formula.fn if formula is not None else None
    are_tensors = tuple(argument.holds_tensors for argument in definition.schema.positional)

    def backward(ctx: Any, *grads: Any) -> Any:
        if user_backward is None:
            raise _no_formula(definition)
        result = user_backward(ctx, *(grads if flat_only else regroup(grads, ctx._customops_outputs)))
        if flat_only and type(result) is tuple and len(result) == len(ctx.needs_input_grad):
            for gradient, is_tensor in zip(result, are_tensors, strict=False):
                if gradient is not None and not (is_tensor and isinstance(gradient, Tensor)):
                    break  # look closer
            else:
                return (None, *result)
        if isinstance(result, dict):
            result = _in_order(result, user_backward, definition)
        return (None, *_input_gradients(result, user_backward, definition, ctx.needs_input_grad))

    return backward


def _jvp(definition: Definition, formula: Formula | None) -> Fn:
    list_outputs, inputs = _list_outputs(definition.schema), len(definition.schema.positional)

    def jvp(ctx: Any, _: None, *flat: Any) -> Any:
        if formula is None:
            raise _no_jvp(definition)
        lengths = [len(needs) if isinstance(needs, list) else None for needs in ctx.needs_input_grad]
        left_out = [None] * (inputs - len(lengths))
        result = _compat.call_jvp(formula.fn, ctx, *regroup(flat, lengths), *left_out)
        tangents = result if isinstance(result, tuple) else (result,)
        _check_tangents(tangents, ctx._customops_results, definition, formula.fn)
        outputs = tuple(map(_compat.without_tangent, flatten(tangents, list_outputs)[0]))
        return outputs[0] if len(outputs) == 1 else outputs

    return jvp


def _no_formula(definition: Definition) -> AutogradError:
    if definition.schema.mutated:
        problem = "Trying to backward through an op that writes to its argument: it can have no autograd formula"
        fix = "call it under torch.no_grad() or on x.detach(); or make it an op that returns new tensors"
    else:
        problem = "Trying to backward through an op, but no autograd formula was registered"
        fix = "op.register_autograd(backward, setup_context=...)"
    return AutogradError(problem, op=str(definition.name), fix=fix)


def _no_jvp(definition: Definition) -> UnsupportedError:
    return UnsupportedError(
        "forward-mode differentiation (jvp, jacfwd, dual numbers) of an op without a jvp rule",
        op=str(definition.name),
        fix="op.register_jvp(jvp, setup_context=...); or use reverse mode: jacrev(jacrev(f)) is a hessian, too",
    )


def _with_history(
    ctx: Any, outputs: tuple[Any, ...], args: tuple[Any, ...], written: tuple[bool, ...], in_place: bool
) -> tuple[Any, ...]:
    """Make this node the history of what the op wrote to, if that has one.

    Else a later backward would go past the write as if it had not happened. A leaf has no history, and is left alone.
    """
    dirty: list[Tensor] = []
    for value in (arg for arg, is_written in zip(args, written, strict=False) if is_written):
        items = value if isinstance(value, list) else [value]
        dirty += [item for item in items if isinstance(item, Tensor) and item.requires_grad and not item.is_leaf]
    if not dirty:
        return outputs
    ctx.mark_dirty(*dirty)
    if in_place:
        return (args[0],)  # the argument itself: under functionalization the result is another object
    return (*outputs, *(tensor for tensor in dirty if all(tensor is not output for output in outputs)))


# autograd.Function takes and returns flat tensors only; lists of tensors are laid out flat around it ---------------

#: How many flat values each value became, None for a value on its own. None instead: there are no lists at all.
Lengths = list["int | None"] | None


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


def _list_outputs(schema: Schema) -> tuple[bool, ...]:
    """Which of the outputs are lists of tensors?"""
    types = [ret.type for ret in schema.returns]
    if len(types) == 1 and types[0].startswith("("):
        types = types[0][1:-1].split(", ")
    return tuple(type_.startswith("Tensor") and type_.endswith("]") for type_ in types)


def _input_gradients(result: Any, backward: Fn, definition: Definition, needed: tuple[Any, ...]) -> Sequence[Any]:
    """The flat gradients for the inputs that were passed, from what the user's backward returned.

    `needed` is what ``ctx.needs_input_grad`` was: one entry for each input that was passed, a list for a list.
    """
    gradients = result if isinstance(result, tuple) else (result,)
    arguments, passed = definition.schema.positional, len(needed)
    if len(gradients) != passed and len(gradients) != len(arguments):
        raise _wrong_count(len(gradients), passed, definition, backward)
    flat: list[Any] = []
    for argument, gradient, needs in zip(arguments, gradients, needed, strict=False):
        if not isinstance(needs, list):
            if gradient is not None and not argument.holds_tensors:
                expected = f"None: the argument is a {argument.type}"
                raise _bad_gradient(gradient, argument.name, definition, backward, expected)
            if gradient is not None and not isinstance(gradient, Tensor):
                raise _bad_gradient(gradient, argument.name, definition, backward, "a Tensor or None")
            flat.append(gradient)
        else:
            flat += _list_gradients(gradient, backward, definition, argument.name, len(needs))
    for argument, gradient in zip(arguments[passed:], gradients[passed:], strict=False):
        if gradient is not None:
            expected = "None: the argument was left at its default"
            raise _bad_gradient(gradient, argument.name, definition, backward, expected)
    return flat


def _in_order(gradients: dict[str, Any], backward: Fn, definition: Definition) -> tuple[Any, ...]:
    """Gradients by the names of their arguments, in the order of the schema; those that are not there are None."""
    names = [argument.name for argument in definition.schema.positional]
    unknown = [name for name in gradients if name not in names]
    if unknown:
        raise AutogradError(
            "backward returned gradients by name, and one has the name of no positional argument",
            op=str(definition.name),
            argument=str(unknown[0]),
            expected=", ".join(names),
            where=where(backward),
        )
    return tuple(gradients.get(name) for name in names)


def _list_gradients(gradient: Any, backward: Fn, definition: Definition, name: str, length: int) -> Sequence[Any]:
    if gradient is None:
        return [None] * length
    if not isinstance(gradient, (list, tuple)) or len(gradient) != length:
        raise _bad_gradient(gradient, name, definition, backward, f"a list of {length} gradients")
    for i, item in enumerate(gradient):
        if item is not None and not isinstance(item, Tensor):
            raise _bad_gradient(item, f"{name}[{i}]", definition, backward, "a Tensor or None")
    return gradient


def _wrong_count(got: int, passed: int, definition: Definition, backward: Fn) -> AutogradError:
    arguments = definition.schema.positional
    expected = f"{passed}" if passed == len(arguments) else f"{passed} or {len(arguments)}"
    return AutogradError(
        f"backward returned an incorrect number of gradients (expected {expected}, got {got})",
        op=str(definition.name),
        expected=f"one for each of {', '.join(argument.name for argument in arguments)}",
        where=where(backward),
        fix="return None for an input that has no gradient",
    )


def _bad_gradient(gradient: Any, argument: str, definition: Definition, backward: Fn, expected: str) -> AutogradError:
    size = f" of {len(gradient)}" if isinstance(gradient, (list, tuple)) else ""
    return AutogradError(
        "backward returned a gradient that does not fit its input",
        op=str(definition.name),
        argument=argument,
        expected=expected,
        got=type(gradient).__name__ + size,
        where=where(backward),
    )


# Tangents -------------------------------------------------------------------------------------------------------


def _metadata(result: Any) -> tuple[Any, ...]:
    """What is to be known of results to check their tangents: shape and dtype, a list of these, None for numbers."""
    results = result if isinstance(result, tuple) else (result,)
    return tuple(
        [_of_tensor(x) for x in each] if isinstance(each, (list, tuple)) else _of_tensor(each) for each in results
    )


def _of_tensor(value: Any) -> tuple[torch.Size, torch.dtype] | None:
    return (value.shape, value.dtype) if isinstance(value, Tensor) else None


def _check_tangents(tangents: tuple[Any, ...], results: tuple[Any, ...], definition: Definition, jvp: Fn) -> None:
    if len(tangents) != len(results):
        raise _bad_tangent(definition, jvp, "the returns", f"{len(results)} tangents", f"{len(tangents)}")
    for i, (tangent, result) in enumerate(zip(tangents, results, strict=True)):
        name = f"return {i}" if len(results) > 1 else "the return"
        if not isinstance(result, list):
            _check_tangent(tangent, result, definition, jvp, name)
            continue
        if not isinstance(tangent, (list, tuple)) or len(tangent) != len(result):
            raise _bad_tangent(definition, jvp, name, f"a list of {len(result)} tangents", type(tangent).__name__)
        for k, (item, expected) in enumerate(zip(tangent, result, strict=True)):
            _check_tangent(item, expected, definition, jvp, f"{name}[{k}]")


def _check_tangent(tangent: Any, result: Any, definition: Definition, jvp: Fn, name: str) -> None:
    if tangent is None:
        return
    if result is None:
        raise _bad_tangent(definition, jvp, name, "None: it is not a Tensor", type(tangent).__name__)
    if not isinstance(tangent, Tensor):
        raise _bad_tangent(definition, jvp, name, "a Tensor or None", type(tangent).__name__)
    if (tangent.shape, tangent.dtype) != result:
        shape, dtype = result
        got = f"{list(tangent.shape)}, {tangent.dtype}"
        raise _bad_tangent(definition, jvp, name, f"shape and dtype of the return: {list(shape)}, {dtype}", got)


def _bad_tangent(definition: Definition, jvp: Fn, name: str, expected: str, got: str) -> AutogradError:
    return AutogradError(
        "jvp returned tangents that do not fit the returns",
        op=str(definition.name),
        argument=name,
        expected=expected,
        got=got,
        where=where(jvp),
    )
