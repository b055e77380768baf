"""What a backward and a jvp returned: put in order, counted, and compared with what it is the gradient of.

As with any autograd.Function, a gradient may be one that was not summed over what was broadcast, of another floating
dtype, or complex for a real input.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor

from customops import _torch
from customops._autograd.layout import Layout
from customops._dispatch.callbacks import Fn
from customops._dispatch.options import CheckPolicy
from customops._places import where
from customops.errors import AutogradError, describe

#: What a gradient is to be like. Of a tensor, `_torch.autograd.metadata`; of what has no gradient, None; a list of
#: these for a list of tensors; LEFT_OUT for an input that a call has left at its default.
Expected = Any

LEFT_OUT: Final = "left out"


@dataclass(slots=True)
class GradientCheck:
    """Are the gradients of a formula compared with its inputs? With check="first", until they fit as they are."""

    when: CheckPolicy
    is_on: bool = True  #: counts with "first"


class InputGradients:
    """Checks what the backward of an op returns, and makes it like the inputs."""

    def __init__(self, layout: Layout, op: str, backward: Fn, compares: GradientCheck) -> None:
        self.layout, self.inputs = layout, layout.operands
        self.op, self.backward, self.compares = op, backward, compares

    def flat(self, result: Any, expected: Sequence[Expected], *, none_allowed: bool) -> list[Any]:
        """The gradients of the node's inputs, lists flattened; backward returned all, those passed, or a dict.

        `none_allowed`: None may stand for zero: a return was not used, and its gradient was None too.
        """
        inputs, likes = self.inputs, dict(zip(self.layout.indices(len(expected)), expected, strict=True))
        passed = [i for i, like in likes.items() if like is not LEFT_OUT]
        gradients = result if isinstance(result, tuple) else (result,)
        if isinstance(result, dict):  # by the names of the arguments; those that are not there are None
            names = [argument.name for argument in inputs]
            if unknown := [name for name in result if name not in names]:
                problem = "backward returned gradients by name, and one name is not that of a differentiable argument"
                raise self._error(problem, argument=str(unknown[0]), expected=", ".join(names))
            gradients = tuple(map(result.get, names))
        are_first = sorted(passed) == list(range(len(passed)))
        if len(gradients) != len(inputs) and not (are_first and len(gradients) == len(passed)):
            counts = sorted({len(passed) if are_first else len(inputs), len(inputs)})
            of_lists = [_as_list(inputs[i].shown, len(like)) for i, like in likes.items() if isinstance(like, list)]
            returned = ", ".join([f"grad_{each.name}" if each.holds_tensors else "None" for each in inputs])
            raise self._error(
                "backward returned an incorrect number of gradients "
                f"(expected {' or '.join(map(str, counts))}, got {len(gradients)})",
                expected=f"one for each of {', '.join(argument.shown for argument in inputs)}",
                fix="; ".join(of_lists) or f"return {returned}: None for an input that has no gradient",
            )
        for i, gradient in enumerate(gradients):
            if gradient is not None and i not in passed:
                left_out = "None: the argument was left at its default"
                raise self._misfit(inputs[i].shown, left_out, describe(gradient), "return None in its place")
        given: list[Any] = []
        flat: list[Any] = []
        for i, like in likes.items():
            name, gradient = inputs[i].shown, None if like is LEFT_OUT else gradients[i]
            if isinstance(like, list):
                items = [None] * len(like) if gradient is None else gradient
                if not isinstance(items, (list, tuple)) or len(items) != len(like):
                    expects = f"a list of {len(like)} gradients"
                    raise self._misfit(name, expects, describe(gradient), _as_list(name, len(like)))
                for k, (item, of_item) in enumerate(zip(items, like, strict=True)):
                    flat.append(self._fitted(item, of_item, f"{name}[{k}]", none_allowed))
                given += items
            elif gradient is not None and not inputs[i].holds_tensors:
                none = f"None: the argument is a {inputs[i].type}"
                raise self._misfit(name, none, describe(gradient), "return None in its place")
            else:
                flat.append(self._fitted(gradient, None if like is LEFT_OUT else like, name, none_allowed))
                given.append(gradient)
        if all(map(operator.is_, flat, given)):
            self.compares.is_on = False
        return flat

    def _fitted(self, gradient: Any, expected: Expected, name: str, none_allowed: bool) -> Any:
        if gradient is None:
            if expected is None or none_allowed:
                return None
            raise self._error(
                "backward returned None for an argument that needs a gradient",
                argument=name,
                expected="its gradient, or a tensor of zeros",
                got="None",
                fix="if the op is not differentiable in it, say so: "
                f'register_autograd(..., nondiff_args=("{name.partition("[")[0]}",))',
            )
        if not isinstance(gradient, Tensor):
            raise self._misfit(name, "a Tensor or None", describe(gradient), _made_of(gradient))
        if expected is None or expected == (got := _torch.autograd.metadata(gradient)):
            return gradient
        shape, dtype, device = expected
        # Autograd takes a gradient that fits when it is summed and cast.
        has_kind = got[1].is_floating_point or got[1].is_complex or not dtype.is_complex
        has_shape = bool(shape == got[0]) or (
            got[0] is not None and shape is not None and _torch.autograd.sums_to(got[0], shape)
        )
        if got[2] != device or not has_kind or not has_shape:
            like = f"like the argument, or of a shape that sums to it: {_text(expected)}"
            raise self._misfit(name, like, _text(got), _remedy(got, expected))
        if shape != got[0]:
            gradient = gradient.sum_to_size(list(shape))
        return (gradient.real if gradient.is_complex() and not dtype.is_complex else gradient).to(dtype)

    def _misfit(self, argument: str, expected: str, got: str, fix: str) -> AutogradError:
        problem = "backward returned a gradient that does not fit its input"
        return self._error(problem, argument=argument, expected=expected, got=got, fix=fix)

    def _error(self, problem: str, **fields: str) -> AutogradError:
        return AutogradError(problem, op=self.op, where=where(self.backward), **fields)


def check_tangents(layout: Layout, op: str, jvp: Fn, tangents: tuple[Any, ...], expected: Sequence[Expected]) -> None:
    """Raise unless the jvp of an op returned a tangent for each output, like it; None for what has none."""

    def misfit(name: str, expected: str, got: str) -> AutogradError:
        problem = "jvp returned tangents that do not fit the returns"
        return AutogradError(problem, op=op, argument=name, expected=expected, got=got, where=where(jvp))

    if len(tangents) != len(expected):
        raise misfit("the returns", f"{len(expected)} tangents", f"{len(tangents)}")
    for i, (each, likes) in enumerate(zip(tangents, expected, strict=True)):
        name = layout.name_of_output(i)
        items = [(name, each, likes)]
        if isinstance(likes, list):
            if not isinstance(each, (list, tuple)) or len(each) != len(likes):
                raise misfit(name, f"a list of {len(likes)} tangents", describe(each))
            items = [(f"{name}[{k}]", *pair) for k, pair in enumerate(zip(each, likes, strict=True))]
        for place, tangent, like in items:
            if like is None:
                if tangent is not None:
                    raise misfit(place, "None: it is not differentiable", describe(tangent))
            elif not isinstance(tangent, Tensor):
                raise misfit(place, "a Tensor; zeros, if it is zero", describe(tangent))
            elif like != (got := _torch.autograd.metadata(tangent)):
                (shape, dtype, device), (has_shape, has_dtype, has_device) = like, got
                kinds = [(one.is_floating_point, one.is_complex) for one in (dtype, has_dtype)]
                # Autograd takes a tangent of another floating dtype.
                if kinds[0] != kinds[1] or (shape, device) != (has_shape, has_device):
                    raise misfit(place, f"like the return: {_text(like)}", _text(got))


def _as_list(name: str, length: int) -> str:
    items = ", ".join(["g"] * length) if length <= 4 else "g, g, ..., g"
    return f"{name} is a list: return [{items}]"


def _text(metadata: Any) -> str:
    shape, dtype, device = metadata
    return f"shape {list(shape)}, {dtype}, {device}"


def _made_of(gradient: Any) -> str:  # what turns something else into a gradient
    if type(gradient).__module__ == "numpy":
        return "compute it with torch, or wrap the array: torch.from_numpy(gradient).to(grad.device)"
    if isinstance(gradient, (int, float)):
        return f"torch.full_like(x, {gradient}), for its input x"
    if isinstance(gradient, (list, tuple)):
        return "return one gradient for each input, side by side: return grad_x, grad_y"
    return "return a Tensor like the input, or None if it has no gradient"


def _remedy(got: Any, expected: Any) -> str:  # what turns a gradient into what was expected
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
