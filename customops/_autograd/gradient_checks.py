"""What a backward and a jvp returned: put in order, counted, and compared with what it is the gradient of.

As with any autograd.Function, a gradient may be one that was not summed over what was broadcast, of another floating
dtype, or complex for a real input.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, Final

from torch import Tensor

from customops import _torch
from customops._autograd.layout import Layout, NodeArguments
from customops._dispatch.callbacks import Fn
from customops._dispatch.results import CheckPolicy
from customops.errors import AutogradError, where

#: What a gradient is to be like. Of a tensor, `_torch.autograd.metadata`; of what has no gradient, None; a list of
#: these for a list of tensors; LEFT_OUT for an input that a call has left at its default.
Expected = Any

LEFT_OUT: Final = "left out"

_LEFT_OUT = "None: the argument was left at its default"
_RETURN_NONE = "return None in its place"


class GradientCheck:
    """Are the gradients of a formula compared with its inputs? With check="first", until they fit as they are."""

    __slots__ = ("is_on", "once")

    def __init__(self, when: CheckPolicy) -> None:
        self.is_on = when != "never"
        self.once = when == "first"

    def was_right(self) -> None:
        if self.once:
            self.is_on = False


class InputGradients:
    """Checks what the backward of an op returns, and makes it like the inputs."""

    def __init__(self, arguments: NodeArguments, op: str, backward: Fn, compares: GradientCheck) -> None:
        self.arguments = arguments
        self.layout = arguments.layout
        self.op = op
        self.backward = backward
        self.compares = compares

    def flat(self, result: Any, expected: Sequence[Expected], *, none_allowed: bool) -> list[Any]:
        """The gradients of the node's inputs, lists flattened.

        Args:
            result: a gradient for each input, or for each one that was passed, or a dict by name.
            expected: for each input of the node.
            none_allowed: None may stand for zero: a return was not used, and its gradient was None too.
        """
        inputs = self.layout.inputs
        indices = self.arguments.indices(len(expected))
        passed = [i for i, each in zip(indices, expected, strict=True) if each is not LEFT_OUT]
        gradients = self._by_name(result) if isinstance(result, dict) else result
        gradients = gradients if isinstance(gradients, tuple) else (gradients,)
        are_first = sorted(passed) == list(range(len(passed)))
        if len(gradients) != len(inputs) and not (are_first and len(gradients) == len(passed)):
            count = len(passed) if are_first else len(inputs)
            raise self._wrong_count(len(gradients), count, dict(zip(indices, expected, strict=True)))
        for i, gradient in enumerate(gradients):
            if gradient is not None and i not in passed:
                raise self._misfit(inputs[i].shown, _LEFT_OUT, _describe(gradient), _RETURN_NONE)
        returned: list[Any] = []
        flat: list[Any] = []
        for i, each in zip(indices, expected, strict=True):
            name, gradient = inputs[i].shown, None if each is LEFT_OUT else gradients[i]
            if each is LEFT_OUT:
                flat.append(None)
                returned.append(None)
            elif isinstance(each, list):
                items = self._items(gradient, name, len(each))
                for k, (item, of_item) in enumerate(zip(items, each, strict=True)):
                    flat.append(self._fitted(item, of_item, f"{name}[{k}]", none_allowed))
                returned += items
            elif gradient is not None and not inputs[i].holds_tensors:
                raise self._misfit(name, f"None: the argument is a {inputs[i].type}", _describe(gradient), _RETURN_NONE)
            else:
                flat.append(self._fitted(gradient, each, name, none_allowed))
                returned.append(gradient)
        if all(map(operator.is_, flat, returned)):
            self.compares.was_right()
        return flat

    def _by_name(self, gradients: dict[str, Any]) -> tuple[Any, ...]:
        """Gradients by the names of their arguments, in the order of the schema; those that are not there are None."""
        names = [argument.name for argument in self.layout.inputs]
        unknown = [name for name in gradients if name not in names]
        if unknown:
            raise AutogradError(
                "backward returned gradients by name, and one name is not that of a differentiable argument",
                op=self.op,
                argument=str(unknown[0]),
                expected=", ".join(names),
                where=where(self.backward),
            )
        return tuple(gradients.get(name) for name in names)

    def _items(self, gradient: Any, name: str, length: int) -> Sequence[Any]:
        if gradient is None:
            return [None] * length
        if not isinstance(gradient, (list, tuple)) or len(gradient) != length:
            fix = _as_list(name, length)
            raise self._misfit(name, f"a list of {length} gradients", _describe(gradient), fix)
        return gradient

    def _fitted(self, gradient: Any, expected: Expected, name: str, none_allowed: bool) -> Any:
        if gradient is None:
            if expected is not None and not none_allowed:
                raise self._none(name)
            return None
        if not isinstance(gradient, Tensor):
            raise self._misfit(name, "a Tensor or None", _describe(gradient), _made_of(gradient))
        if expected is None or expected == (got := _torch.autograd.metadata(gradient)):
            return gradient
        if not _is_compatible(got, expected):
            fix = _remedy(got, expected)
            raise self._misfit(
                name, f"like the argument, or of a shape that sums to it: {_text(expected)}", _text(got), fix
            )
        shape, dtype, _ = expected
        if shape != got[0]:
            gradient = gradient.sum_to_size(list(shape))
        return (gradient.real if gradient.is_complex() and not dtype.is_complex else gradient).to(dtype)

    def _none(self, name: str) -> AutogradError:
        argument = name.partition("[")[0]
        return AutogradError(
            "backward returned None for an argument that needs a gradient",
            op=self.op,
            argument=name,
            expected="its gradient, or a tensor of zeros",
            got="None",
            where=where(self.backward),
            fix=f'if the op is not differentiable in it, say so: register_autograd(..., nondiff_args=("{argument}",))',
        )

    def _wrong_count(self, got: int, passed: int, expected_of_passed: dict[int, Expected]) -> AutogradError:
        inputs = self.layout.inputs
        lists = {inputs[i].shown: len(each) for i, each in expected_of_passed.items() if isinstance(each, list)}
        expected = f"{passed}" if passed == len(inputs) else f"{passed} or {len(inputs)}"
        return AutogradError(
            f"backward returned an incorrect number of gradients (expected {expected}, got {got})",
            op=self.op,
            expected=f"one for each of {', '.join(argument.shown for argument in inputs)}",
            where=where(self.backward),
            fix="; ".join(_as_list(*pair) for pair in lists.items())
            or f"return {', '.join(f'grad_{each.name}' if each.holds_tensors else 'None' for each in inputs)}: "
            "None for an input that has no gradient",
        )

    def _misfit(self, argument: str, expected: str, got: str, fix: str | None = None) -> AutogradError:
        problem = "backward returned a gradient that does not fit its input"
        return _misfit(problem, self.op, self.backward, argument, expected, got, fix)


class OutputTangents:
    """Checks what the jvp of an op returns."""

    def __init__(self, layout: Layout, op: str, jvp: Fn) -> None:
        self.layout = layout
        self.op = op
        self.jvp = jvp

    def check(self, tangents: tuple[Any, ...], expected: Sequence[Expected]) -> None:
        """Raise unless there is a tangent for each output, like it; None for what has none."""
        if len(tangents) != len(expected):
            raise self._misfit("the returns", f"{len(expected)} tangents", f"{len(tangents)}")
        for i, (tangent, each) in enumerate(zip(tangents, expected, strict=True)):
            name = self.layout.name_of_output(i)
            if not isinstance(each, list):
                self._check(tangent, each, name)
                continue
            if not isinstance(tangent, (list, tuple)) or len(tangent) != len(each):
                raise self._misfit(name, f"a list of {len(each)} tangents", _describe(tangent))
            for k, (item, of_item) in enumerate(zip(tangent, each, strict=True)):
                self._check(item, of_item, f"{name}[{k}]")

    def _check(self, tangent: Any, expected: Expected, name: str) -> None:
        if expected is None:
            if tangent is not None:
                raise self._misfit(name, "None: it is not differentiable", _describe(tangent))
        elif not isinstance(tangent, Tensor):
            raise self._misfit(name, "a Tensor; zeros, if it is zero", _describe(tangent))
        elif expected != (got := _torch.autograd.metadata(tangent)) and not _is_like(got, expected):
            raise self._misfit(name, f"like the return: {_text(expected)}", _text(got))

    def _misfit(self, name: str, expected: str, got: str) -> AutogradError:
        return _misfit("jvp returned tangents that do not fit the returns", self.op, self.jvp, name, expected, got)


def _misfit(
    problem: str, op: str, callback: Fn, argument: str, expected: str, got: str, fix: str | None = None
) -> AutogradError:
    return AutogradError(problem, op=op, argument=argument, expected=expected, got=got, where=where(callback), fix=fix)


def _as_list(name: str, length: int) -> str:
    items = ", ".join(["g"] * length) if length <= 4 else "g, g, ..., g"
    return f"{name} is a list: return [{items}]"


def _describe(value: Any) -> str:
    size = f" of {len(value)}" if isinstance(value, (list, tuple)) else ""
    return type(value).__name__ + size


def _text(metadata: Any) -> str:
    shape, dtype, device = metadata
    return f"shape {list(shape)}, {dtype}, {device}"


def _is_compatible(got: Any, expected: Any) -> bool:
    """Would autograd take a gradient, summed and cast?"""
    (shape, dtype, device), (wanted, wanted_dtype, wanted_device) = got, expected
    if device != wanted_device or not (dtype.is_floating_point or dtype.is_complex or not wanted_dtype.is_complex):
        return False
    return bool(wanted == shape) or (
        shape is not None and wanted is not None and _torch.autograd.sums_to(shape, wanted)
    )


def _is_like(got: Any, expected: Any) -> bool:
    """Would autograd take a tangent? It may have another floating dtype."""
    (shape, dtype, device), (wanted, wanted_dtype, wanted_device) = got, expected
    kinds = dtype.is_floating_point, dtype.is_complex
    return kinds == (wanted_dtype.is_floating_point, wanted_dtype.is_complex) and (wanted, wanted_device) == (
        shape,
        device,
    )


def _made_of(gradient: Any) -> str:
    """What turns something else into a gradient."""
    if type(gradient).__module__ == "numpy":
        return "compute it with torch, or wrap the array: torch.from_numpy(gradient).to(grad.device)"
    if isinstance(gradient, (int, float)):
        return f"torch.full_like(x, {gradient}), for its input x"
    if isinstance(gradient, (list, tuple)):
        return "return one gradient for each input, side by side: return grad_x, grad_y"
    return "return a Tensor like the input, or None if it has no gradient"


def _remedy(got: Any, expected: Any) -> str:
    """What turns a gradient into what was expected."""
    (shape, _, device), (wanted, wanted_dtype, wanted_device) = got, expected
    if device != wanted_device:
        return f'gradient.to("{wanted_device}")'
    if shape == wanted:
        return f"gradient.to({wanted_dtype})"
    if shape is not None and wanted is not None and _torch.autograd.sums_to(wanted, shape):
        return f"if all elements have the same gradient: gradient.expand({list(wanted)})"
    if shape is not None and wanted is not None and math.prod(shape) == math.prod(wanted):
        if [size for size in shape if size != 1] == [size for size in wanted if size != 1]:
            return f"gradient.reshape({list(wanted)})"
        if sorted(shape) == sorted(wanted):
            return "gradient.mT" if len(shape) == 2 else "gradient.permute(...): its dimensions are in another order"
    return "return a gradient of the shape of the input: one value for each of its elements"
