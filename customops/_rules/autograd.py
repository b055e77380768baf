"""Gradients: backward, jvp and setup_context, applied in a kernel at the Autograd key. See `_node`."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from customops import _compat, _node, _trampoline
from customops._call import Fn, bind
from customops._definition import Definition, Undo, lock, nothing
from customops._node import Formula, Lengths
from customops._schema import Argument
from customops._slots import Slots
from customops._trampoline import Cell
from customops.errors import AutogradError, RegistrationError, UnsupportedError


class Node:
    """Holds the ``apply`` of the node for the current formula, once it was needed."""

    __slots__ = ("apply",)

    def __init__(self) -> None:
        self.apply: Fn | None = None


class AutogradRule:
    """The formulas of one op. Without a backward, backward raises; without a jvp, forward mode does."""

    def __init__(self, definition: Definition) -> None:
        self.definition = definition
        self._slots: Slots[str, Formula] = Slots(self._install_trampoline, self._forget_node)
        self._node = Node()

    def install(self, definition: Definition) -> None:
        self.definition = definition
        self._slots.reset(with_op=["backward"])  # without a formula, backward says how to register one

    def register(self, backward: Fn, setup_context: Fn | None) -> Undo:
        self._refuse("register_autograd", self.definition.schema.is_differentiable)
        op, schema = str(self.definition.name), self.definition.schema
        bind(backward, op, "backward", "ctx", *(f"grad{i}" for i in range(len(schema.returns))))
        self._bind_setup_context(setup_context)
        return self._slots.set("backward", Formula(backward, setup_context))

    def register_jvp(self, jvp: Fn, setup_context: Fn | None) -> Undo:
        op, schema = str(self.definition.name), self.definition.schema
        self._refuse("register_jvp", schema.is_differentiable and not schema.is_view)
        bind(jvp, op, "jvp", "ctx", *(f"{argument.name}_tangent" for argument in schema.positional))
        self._bind_setup_context(setup_context)
        return self._slots.set("jvp", Formula(jvp, setup_context))

    def _bind_setup_context(self, setup_context: Fn | None) -> None:
        if setup_context is not None:
            names = ["ctx", "inputs", "keyword_only_inputs", "output"]
            if not self.definition.schema.keyword_only:
                names.remove("keyword_only_inputs")
            bind(setup_context, str(self.definition.name), "setup_context", **{name: name for name in names})

    def _refuse(self, what: str, is_differentiable: bool) -> None:
        """Raise for an op that cannot have a formula of this kind."""
        op, schema = str(self.definition.name), self.definition.schema
        if torch.Tag.out in self.definition.tags:
            raise RegistrationError(
                "Out variants do not support autograd", op=op, fix="register the gradient on the functional op"
            )
        if not is_differentiable:
            raise RegistrationError(
                "cannot register autograd on a non-functional operator: it mutates an input, returns a view in a way "
                "autograd has no rule for, or returns nothing",
                op=op,
                got=str(schema),
                fix="register the gradient on an op that returns new tensors",
            )
        if schema.keyword_only_tensors:
            raise keyword_only_tensors_error(what, op, schema.keyword_only_tensors)

    def _install_trampoline(self, key: str, apart: bool) -> Undo:
        definition = self.definition
        if key == "jvp" and definition.library is not None:
            return nothing  # there is one, with the op
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
        return _general(self, self.definition), self._node if _node.is_flat(self.definition.schema) else None

    def _forget_node(self) -> None:
        self._node.apply = None

    def apply(self) -> Fn:
        """The ``apply`` of the node for the formula that is registered now."""
        # A graph keeps the formula it was made with: another backward need not fit what this setup_context saved.
        with lock:
            values = self._slots.values
            if self._node.apply is None:
                self._node.apply = _node.node(self.definition, values.get("backward"), values.get("jvp")).apply
            return self._node.apply


def keyword_only_tensors_error(what: str, op: str, arguments: tuple[Argument, ...]) -> UnsupportedError:
    return UnsupportedError(
        f"{what} with kwarg-only Tensor args is not supported",
        op=op,
        argument=", ".join(argument.name for argument in arguments),
        fix="make the tensors positional: move them before the *",
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


class _Call:
    """How one differentiated call reaches the op, and how flat values map to the user's arguments."""

    __slots__ = ("definition", "input_lengths", "kernel", "keyset", "keywords", "output_lengths")

    def __init__(
        self,
        definition: Definition,
        keyset: Any,
        kernel: Fn | None,
        keywords: dict[str, Any],
        input_lengths: Lengths,
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


def _general(rule: AutogradRule, definition: Definition) -> Fn:
    """What is done at the Autograd key where the device's kernel is not called directly: see `_trampoline.autograd`."""
    overload, after, below_autograd = definition.overload, _compat.after_autograd, _compat.below_autograd
    schema, direct = definition.schema, definition.direct.at_autograd
    is_out, converts_nothing = torch.Tag.out in definition.tags, _node.converts_nothing(schema)
    returns_one = len(schema.returns) == 1 and not schema.returns[0].type.startswith("(")
    list_inputs = tuple(argument.is_tensor_list for argument in schema.positional)
    any_requires_grad = _trampoline.any_requires_grad(schema)

    def general(keyset: Any, cell: Cell | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if cell is None and keyset.raw_repr() not in direct:
            cell = definition.find_direct(keyset)
        may_have = _compat.forward_ad_active() or (definition.direct.tangents_seen and _compat.tangents_may_hide())
        has_tangents = may_have and _compat.any_tangent((*args, *kwargs.values()))
        if has_tangents and not definition.direct.tangents_seen:
            definition.saw_tangents()
        if torch.is_grad_enabled() and any_requires_grad(*args, **kwargs):
            if is_out:
                raise _out_error(definition)
        elif not has_tangents:
            guard = below_autograd()  # half the price of a `with`
            try:
                return overload.redispatch(keyset & after, *args, **kwargs)
            finally:
                del guard
        flat, lengths = _node.flatten(args, list_inputs)
        kernel = cell.direct if cell is not None and converts_nothing else None
        call = _Call(definition, keyset, kernel, kwargs, lengths)
        result = _compat.apply_function(rule.apply(), call, *flat)
        if not schema.returns:
            return None
        outputs = _node.regroup(result if isinstance(result, tuple) else (result,), call.output_lengths)
        return outputs[0] if returns_one else outputs

    return _compat.outside_dynamo(general)


def _out_error(definition: Definition) -> AutogradError:
    return AutogradError(
        f"{definition.name.name}(): functions with out=... arguments don't support automatic differentiation, "
        "but one of the arguments requires grad",
        op=str(definition.name),
        fix="call the functional op, or call this one under torch.no_grad()",
    )
