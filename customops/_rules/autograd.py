"""Gradients: backward and setup_context, applied in a kernel at the Autograd key.

That kernel builds the graph node with the class functorch itself uses for one level of differentiation, so that
``torch.func.grad``, ``vjp``, ``jacrev`` and their compositions see the op as they see an aten op.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from customops import _compat, _trampoline
from customops._call import Fn, bind, filler
from customops._definition import Definition, Undo, lock
from customops._schema import Argument, Schema
from customops._slots import Slots
from customops._trampoline import Cell
from customops.errors import AutogradError, RegistrationError, UnsupportedError, where


class Formula(NamedTuple):
    """How to differentiate an op."""

    backward: Fn
    setup_context: Fn | None


class Node:
    """Holds the ``apply`` of the node for the current formula, once it was needed."""

    __slots__ = ("apply",)

    def __init__(self) -> None:
        self.apply: Fn | None = None


class AutogradRule:
    """The formula of one op; without one, backward raises."""

    def __init__(self, definition: Definition) -> None:
        self.definition = definition
        self._slots: Slots[None, Formula] = Slots(self._install_trampoline, self._forget_node)
        self._node = Node()

    @property
    def formula(self) -> Formula | None:
        return self._slots.values.get(None)

    def install(self, definition: Definition) -> None:
        self.definition = definition
        self._slots.reset(with_op=[None])  # without a formula, backward says how to register one

    def register(self, backward: Fn, setup_context: Fn | None) -> Undo:
        self._refuse()
        op, schema = str(self.definition.name), self.definition.schema
        bind(backward, op, "backward", "ctx", *(f"grad{i}" for i in range(len(schema.returns))))
        if setup_context is not None:
            names = ["ctx", "inputs", "keyword_only_inputs", "output"]
            if not schema.keyword_only:
                names.remove("keyword_only_inputs")
            bind(setup_context, op, "setup_context", **{name: name for name in names})
        return self._slots.set(None, Formula(backward, setup_context))

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

    def _install_trampoline(self, _: None, apart: bool) -> Undo:
        definition = self.definition
        trampoline = _trampoline.autograd(
            definition.schema,
            definition.tags,
            str(definition.name),
            definition.when,
            definition.direct.at_autograd,
            self._make,
        )
        return definition.impl(trampoline, "Autograd", with_keyset=True, apart=apart)

    def _make(self) -> tuple[Fn, Node | None]:
        return _general(self, self.definition), self._node if _is_flat(self.definition.schema) else None

    def _forget_node(self) -> None:
        self._node.apply = None

    def apply(self) -> Fn:
        """The ``apply`` of the node for the formula that is registered now."""
        # A graph keeps the formula it was made with: another backward need not fit what this setup_context saved.
        with lock:
            if self._node.apply is None:
                self._node.apply = _node(self.definition, self.formula).apply
            return self._node.apply


def keyword_only_tensors_error(what: str, op: str, arguments: tuple[Argument, ...]) -> UnsupportedError:
    return UnsupportedError(
        f"{what} with kwarg-only Tensor args is not supported",
        op=op,
        argument=", ".join(argument.name for argument in arguments),
        fix="make the tensors positional: move them before the *",
    )


class _Call:
    """How one differentiated call reaches the op, and how flat values map to the user's arguments."""

    __slots__ = ("definition", "input_lengths", "kernel", "keyset", "keywords", "output_lengths")

    def __init__(
        self, definition: Definition, keyset: Any, kernel: Fn | None, keywords: dict[str, Any], input_lengths: Lengths
    ) -> None:
        self.definition = definition
        self.keyset = keyset
        self.kernel = kernel  # what to call for a plain key set; else the op is redispatched
        self.keywords = keywords
        self.input_lengths = input_lengths
        self.output_lengths: Lengths = None

    def __call__(self, *args: Any) -> Any:
        if self.kernel is not None:
            return self.kernel(*args, **self.keywords)
        with _modes_of_lower_levels(self.keyset), _compat.below_autograd():
            keyset = self.keyset & _compat.after_autograd
            return self.definition.overload.redispatch(keyset, *args, **self.keywords)


def _converts_nothing(schema: Schema) -> bool:
    """Does a kernel get and return the same objects, whether the dispatcher is between or not? (lists are new ones)"""
    return all("[" not in argument.type for argument in schema.arguments) and all(
        ret.type == "Tensor" for ret in schema.returns
    )


def _is_flat(schema: Schema) -> bool:
    """Does a node for the op take and return what the op does? Then it needs no `_Call` around the kernel."""
    return _converts_nothing(schema) and bool(schema.returns) and not (schema.mutated or schema.keyword_only)


def _general(rule: AutogradRule, definition: Definition) -> Fn:
    """What is done at the Autograd key where the device's kernel is not called directly: see `_trampoline.autograd`."""
    overload, after, below_autograd = definition.overload, _compat.after_autograd, _compat.below_autograd
    schema, direct = definition.schema, definition.direct.at_autograd
    is_out, converts_nothing = torch.Tag.out in definition.tags, _converts_nothing(schema)
    returns_one = len(schema.returns) == 1 and not schema.returns[0].type.startswith("(")
    list_inputs = tuple(argument.is_tensor_list for argument in schema.positional)
    any_requires_grad = _trampoline.any_requires_grad(schema)

    def general(keyset: Any, cell: Cell | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if cell is None and keyset.raw_repr() not in direct:
            cell = definition.find_direct(keyset)
        if torch.is_grad_enabled() and any_requires_grad(*args, **kwargs):
            if is_out:
                raise _out_error(definition)
        elif not (_compat.forward_ad_active() and _compat.any_tangent((*args, *kwargs.values()))):
            guard = below_autograd()  # half the price of a `with`
            try:
                return overload.redispatch(keyset & after, *args, **kwargs)
            finally:
                del guard
        flat, lengths = _flatten(args, list_inputs)
        kernel = cell.direct if cell is not None and converts_nothing else None
        call = _Call(definition, keyset, kernel, kwargs, lengths)
        result = _compat.apply_function(rule.apply(), call, *flat)
        if not schema.returns:
            return None
        outputs = _regroup(result if isinstance(result, tuple) else (result,), call.output_lengths)
        return outputs[0] if returns_one else outputs

    return _compat.outside_dynamo(general)


def _node(definition: Definition, formula: Formula | None) -> Any:
    """The autograd.Function of an op and a formula. Its first argument is called to reach the op."""
    below_autograd, fill = _compat.below_autograd, filler(definition.schema)
    is_flat, list_outputs = _is_flat(definition.schema), _list_outputs(definition.schema)
    returns_tuple = len(definition.schema.returns) > 1
    in_place, has_keywords = torch.Tag.inplace in definition.tags, bool(definition.schema.keyword_only)
    written = tuple(argument.is_written for argument in definition.schema.positional if definition.schema.mutated)
    backward_fn, setup_context = formula or (None, None)

    def forward(ctx: Any, call: Any, *flat: Any) -> Any:
        args = flat if is_flat else _regroup(flat, call.input_lengths)
        guard = below_autograd()
        try:
            result = call(*args)
        finally:
            del guard
        if returns_tuple and type(result) is not tuple:
            result = tuple(result)
        needed = ctx.needs_input_grad[1:]
        ctx.needs_input_grad = needed if is_flat else _regroup(needed, call.input_lengths)
        if setup_context is not None:
            inputs, keywords = fill(args, call.keywords if has_keywords else {}) if fill else (args, {})
            if has_keywords:
                setup_context(ctx=ctx, inputs=inputs, keyword_only_inputs=keywords or call.keywords, output=result)
            else:
                setup_context(ctx=ctx, inputs=inputs, output=result)
        if is_flat:
            return result
        outputs, lengths = _flatten(result if isinstance(result, tuple) else (result,), list_outputs)
        if written:
            lengths = lengths or [None] * len(outputs)
            outputs = _with_history(ctx, outputs, args, written, in_place)
        ctx._customops_outputs = call.output_lengths = lengths
        return outputs[0] if len(outputs) == 1 else outputs

    def backward(ctx: Any, *grads: Any) -> Any:
        if backward_fn is None:
            raise _no_formula(definition)
        result = backward_fn(ctx, *(grads if is_flat else _regroup(grads, ctx._customops_outputs)))
        return (None, *_input_gradients(result, backward_fn, definition, ctx.needs_input_grad))

    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise _no_jvp(definition)

    name = "_".join(part for part in definition.name if part)  # torch puts "Backward" after it
    members = {"forward": forward, "backward": backward, "jvp": jvp}
    statics = {name: staticmethod(_compat.outside_dynamo(member)) for name, member in members.items()}
    return type(name, (_compat.SingleLevelFunction,), statics)


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
        fix="use reverse mode (torch.func.grad, vjp, jacrev; jacrev(jacrev(f)) for a hessian), "
        "or write the op with torch operations",
    )


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


def _out_error(definition: Definition) -> AutogradError:
    return AutogradError(
        f"{definition.name.name}(): functions with out=... arguments don't support automatic differentiation, "
        "but one of the arguments requires grad",
        op=str(definition.name),
        fix="call the functional op, or call this one under torch.no_grad()",
    )


# autograd.Function takes and returns flat tensors only; lists of tensors are laid out flat around it ---------------

#: How many flat values each value became, None for a value on its own. None instead: there are no lists at all.
Lengths = list["int | None"] | None


def _flatten(values: tuple[Any, ...], are_lists: tuple[bool, ...]) -> tuple[tuple[Any, ...], Lengths]:
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


def _regroup(flat: tuple[Any, ...], lengths: Lengths) -> tuple[Any, ...]:
    """Undo `_flatten`."""
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
