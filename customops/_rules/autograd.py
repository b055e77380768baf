"""Gradients: backward and setup_context, applied in a kernel at the Autograd key.

That kernel builds the graph node with the class functorch itself uses for one level of differentiation, so that
``torch.func.grad``, ``vjp``, ``jacrev`` and their compositions see the op as they see an aten op.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from customops import _compat
from customops._call import Fn, bind, filler
from customops._definition import Definition, Undo
from customops._schema import Argument, Schema
from customops.errors import AutogradError, RegistrationError, UnsupportedError, where


class AutogradRule:
    """backward and setup_context of one op; without them, backward raises."""

    def __init__(self, definition: Definition) -> None:
        self.definition = definition
        self.backward: Fn | None = None
        self.setup_context: Fn | None = None
        self._installed = False

    def install(self, definition: Definition) -> None:
        self.definition = definition
        definition.impl(_trampoline(self, definition), "Autograd", with_keyset=True)
        self._installed = True

    def register(self, backward: Fn, setup_context: Fn | None) -> Undo:
        self._refuse()
        op, schema = str(self.definition.name), self.definition.schema
        bind(backward, op, "backward", "ctx", *(f"grad{i}" for i in range(len(schema.returns))))
        if setup_context is not None:
            names = ["ctx", "inputs", "keyword_only_inputs", "output"]
            if not schema.keyword_only:
                names.remove("keyword_only_inputs")
            bind(setup_context, op, "setup_context", **{name: name for name in names})
        before = self.backward, self.setup_context, self._installed
        self.backward, self.setup_context = backward, setup_context
        undo = self._install_apart()
        return lambda: self._restore(before, undo)

    def _refuse(self) -> None:
        """Raise for an op that cannot have a gradient formula."""
        op, schema = str(self.definition.name), self.definition.schema
        if torch.Tag.out in self.definition.tags:
            raise RegistrationError(
                "Out variants do not support autograd", op=op, fix="register the gradient on the functional op"
            )
        if not schema.is_differentiable:
            raise RegistrationError(
                "cannot register autograd on a non-functional operator: it mutates an input, returns a view in a way "
                "autograd has no rule for, or returns nothing",
                op=op,
                got=str(schema),
                fix="register the gradient on an op that returns new tensors",
            )
        if schema.keyword_only_tensors:
            raise keyword_only_tensors_error("register_autograd", op, schema.keyword_only_tensors)

    def _install_apart(self) -> Undo:
        if self._installed:
            return lambda: None
        self._installed = True
        trampoline = _trampoline(self, self.definition)
        return self.definition.impl(trampoline, "Autograd", with_keyset=True, apart=True)

    def _restore(self, before: tuple[Fn | None, Fn | None, bool], undo: Undo) -> None:
        self.backward, self.setup_context, self._installed = before
        undo()


def keyword_only_tensors_error(what: str, op: str, arguments: tuple[Argument, ...]) -> UnsupportedError:
    return UnsupportedError(
        f"{what} with kwarg-only Tensor args is not supported",
        op=op,
        argument=", ".join(argument.name for argument in arguments),
        fix="make the tensors positional: move them before the *",
    )


class _Call:
    """One differentiated call: how to reach the op, and how flat values map to the user's arguments."""

    __slots__ = ("backward", "input_lengths", "keyset", "kwargs", "output_lengths")

    def __init__(
        self, backward: Fn | None, keyset: Any, kwargs: dict[str, Any], input_lengths: list[int | None]
    ) -> None:
        self.backward = backward
        self.keyset = keyset
        self.kwargs = kwargs
        self.input_lengths = input_lengths
        self.output_lengths: list[int | None] = []


def _trampoline(rule: AutogradRule, definition: Definition) -> Callable[..., Any]:
    """The function at the Autograd key."""
    overload, after = definition.overload, _compat.after_autograd
    node = _node(rule, definition)
    is_out = torch.Tag.out in definition.tags
    returns_one = len(definition.schema.returns) == 1 and not definition.schema.returns[0].type.startswith("(")
    list_inputs = tuple(argument.is_tensor_list for argument in definition.schema.positional)

    def autograd(keyset: Any, /, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and _compat.any_requires_grad(*args, **kwargs):
            if is_out:
                raise _out_error(definition)
        elif not (_compat.forward_ad_active() and _compat.any_tangent((*args, *kwargs.values()))):
            with _compat.below_autograd():
                return overload.redispatch(keyset & after, *args, **kwargs)
        flat, lengths = _flatten(args, list_inputs)
        call = _Call(rule.backward, keyset, kwargs, lengths)
        result = _compat.apply_function(node, call, *flat)
        if not definition.schema.returns:
            return None
        outputs = _regroup(result if isinstance(result, tuple) else (result,), call.output_lengths)
        return outputs[0] if returns_one else outputs

    return _compat.outside_dynamo(autograd)


def _node(rule: AutogradRule, definition: Definition) -> Any:
    """The autograd.Function of an op.

    The rule is read when the op is called, so that registering again is an assignment. A graph keeps the formula it was
    made with: another one need not fit what its setup_context saved.
    """
    overload, after, fill = definition.overload, _compat.after_autograd, filler(definition.schema)
    list_outputs = _list_outputs(definition.schema)
    in_place = torch.Tag.inplace in definition.tags
    written = tuple(argument.is_written for argument in definition.schema.positional)

    def forward(ctx: Any, call: _Call, *flat: Any) -> Any:
        args = _regroup(flat, call.input_lengths)
        with _modes_of_lower_levels(call.keyset), _compat.below_autograd():
            result = overload.redispatch(call.keyset & after, *args, **call.kwargs)
        ctx.needs_input_grad = _regroup(ctx.needs_input_grad[1:], call.input_lengths)
        ctx._customops_call = call
        if rule.setup_context is not None:
            inputs, keywords = fill(args, call.kwargs) if fill else (args, call.kwargs)
            extra = {"keyword_only_inputs": keywords} if definition.schema.keyword_only else {}
            rule.setup_context(ctx=ctx, inputs=inputs, output=result, **extra)
        outputs, call.output_lengths = _flatten(result if isinstance(result, tuple) else (result,), list_outputs)
        if definition.schema.mutated:
            outputs = _with_history(ctx, outputs, args, written, in_place)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def backward(ctx: Any, *grads: Any) -> Any:
        call: _Call = ctx._customops_call
        if call.backward is None:
            raise AutogradError(
                "Trying to backward through an op, but no autograd formula was registered",
                op=str(definition.name),
                fix="op.register_autograd(backward, setup_context=...)",
            )
        result = call.backward(ctx, *_regroup(grads, call.output_lengths))
        return (None, *_input_gradients(result, call.backward, definition, call.input_lengths))

    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise UnsupportedError(
            "forward-mode differentiation (jvp, jacfwd, dual numbers) of an op without a jvp rule",
            op=str(definition.name),
            fix="use reverse mode (torch.func.grad, vjp, jacrev; jacrev(jacrev(f)) for a hessian), "
            "or write the op with torch operations",
        )

    name = f"{definition.name.name}_{definition.name.overload}".strip("_")
    members = {"forward": forward, "backward": backward, "jvp": jvp}
    for member in members.values():
        _compat.outside_dynamo(member)
    return type(f"{name}_backward", (_compat.SingleLevelFunction,), {k: staticmethod(v) for k, v in members.items()})


_AS_THEY_ARE = nullcontext()


def _modes_of_lower_levels(keyset: Any) -> Any:
    """Context manager for going on inside an autograd.Function's forward, which switches differentiation off.

    Off is right at the bottom. Inside a functorch transform the next level below differentiates too, so both modes go
    on again, as in functorch's own forward; where the caller had them off, functorch sees to that itself.
    """
    if keyset.has(_compat.DispatchKey.FuncTorchDynamicLayerBackMode):
        return torch.inference_mode(False)  # the public switch for reverse and forward mode at once
    return _AS_THEY_ARE


def _with_history(
    ctx: Any, outputs: list[Any], args: tuple[Any, ...], written: tuple[bool, ...], in_place: bool
) -> list[Any]:
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
        return [args[0]]  # the argument itself: under functionalization the result is another object
    return outputs + [tensor for tensor in dirty if all(tensor is not output for output in outputs)]


def _out_error(definition: Definition) -> AutogradError:
    return AutogradError(
        f"{definition.name.name}(): functions with out=... arguments don't support automatic differentiation, "
        "but one of the arguments requires grad",
        op=str(definition.name),
        fix="call the functional op, or call this one under torch.no_grad()",
    )


# autograd.Function takes and returns flat tensors only; lists of tensors are laid out flat around it ---------------


def _flatten(values: tuple[Any, ...], are_lists: tuple[bool, ...]) -> tuple[list[Any], list[int | None]]:
    """Lay lists of tensors out flat. Lengths tell how: None for a value on its own."""
    flat: list[Any] = []
    lengths: list[int | None] = []
    for value, is_list in zip(values, are_lists, strict=False):  # arguments left at their default are not there
        if is_list and value is not None:
            flat += value
            lengths.append(len(value))
        else:
            flat.append(value)
            lengths.append(None)
    return flat, lengths


def _list_outputs(schema: Schema) -> tuple[bool, ...]:
    """Which of the outputs are lists of tensors?"""
    types = [ret.type for ret in schema.returns]
    if len(types) == 1 and types[0].startswith("("):
        types = types[0][1:-1].split(", ")
    return tuple(type_.startswith("Tensor") and type_.endswith("]") for type_ in types)


def _regroup(flat: tuple[Any, ...], lengths: list[int | None]) -> tuple[Any, ...]:
    """Undo `_flatten`."""
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


def _input_gradients(result: Any, backward: Fn, definition: Definition, lengths: list[int | None]) -> list[Any]:
    """The flat gradients for the inputs that were passed, from what the user's backward returned."""
    gradients = result if isinstance(result, tuple) else (result,)
    passed, every = len(lengths), len(definition.schema.positional)
    op = str(definition.name)
    if len(gradients) not in (passed, every):
        expected = f"{passed} or {every}" if passed != every else f"{passed}"
        raise AutogradError(
            f"backward returned an incorrect number of gradients (expected {expected}, got {len(gradients)})",
            op=op,
            expected=f"one for each of {', '.join(a.name for a in definition.schema.positional)}",
            where=where(backward),
            fix="return None for an input that has no gradient",
        )
    flat: list[Any] = []
    for argument, gradient, length in zip(definition.schema.positional, gradients, lengths, strict=False):
        if length is None:
            flat.append(_checked(gradient, argument.name, op, backward))
            continue
        if gradient is None:
            gradient = [None] * length
        if not isinstance(gradient, (list, tuple)) or len(gradient) != length:
            raise _bad_gradient(gradient, argument.name, op, backward, f"a list of {length} gradients")
        flat += [_checked(item, f"{argument.name}[{i}]", op, backward) for i, item in enumerate(gradient)]
    for argument, gradient in zip(definition.schema.positional[passed:], gradients[passed:], strict=False):
        if gradient is not None:
            raise _bad_gradient(gradient, argument.name, op, backward, "None: the argument was left at its default")
    return flat


def _checked(gradient: Any, argument: str, op: str, backward: Fn) -> Any:
    if gradient is None or isinstance(gradient, Tensor):
        return gradient
    raise _bad_gradient(gradient, argument, op, backward, "a Tensor or None")


def _bad_gradient(gradient: Any, argument: str, op: str, backward: Fn, expected: str) -> AutogradError:
    size = f" of {len(gradient)}" if isinstance(gradient, (list, tuple)) else ""
    return AutogradError(
        "backward returned a gradient that does not fit its input",
        op=op,
        argument=argument,
        expected=expected,
        got=type(gradient).__name__ + size,
        where=where(backward),
    )
