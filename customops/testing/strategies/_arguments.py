"""`arguments`: what an op takes, drawn from its signature."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import reject
from hypothesis import strategies as st
from torch import Tensor

from customops._samples import Sample
from customops._schema.arguments import is_part
from customops._schema.codecs import SequenceCodec
from customops._schema.forms import DataclassForm, DictForm, TupleForm
from customops._schema.nodes import Either, Group, Leaf, Nested, Node, Parameter
from customops._schema.types import item_type
from customops.testing.strategies._plan import BY_POSITION, Plan, lowered_from
from customops.testing.strategies._tensors import (
    DTYPES,
    LAYOUTS,
    SHAPES,
    Layout,
    Shape,
    draw_tensor,
    dtype_of,
    shape_of,
    with_grad,
)
from customops.testing.strategies._values import Strategy, sizes


def arguments(
    op: Any,
    given: Mapping[str, Strategy] | None = None,
    /,
    *,
    shapes: Shape | Sequence[Shape] | Mapping[str, Any] | Strategy | None = None,
    dtypes: torch.dtype | Sequence[torch.dtype] | Mapping[str, Any] | Strategy | None = None,
    broadcast: bool = False,
    elements: st.SearchStrategy[Any] | None = None,
    layouts: Iterable[Layout] = LAYOUTS,
    requires_grad: bool | Mapping[str, bool] | st.SearchStrategy[bool] = False,
    device: str | torch.device = "cpu",
    **more: Strategy,
) -> st.SearchStrategy[Sample]:
    """A strategy for the arguments of a call of an op, derived from its signature.

    Each draw is a pair ``(args, kwargs)``. Draws cover every enum member, choice, dict key and None that the signature
    allows. Arguments are passed by position and by name, and some of those with a default are left out. All tensors of
    a draw have the same shape and dtype.

    Args:
        op: a `CustomOpDef`, an OpOverload, an OpOverloadPacket with one overload, or a name.
        given: strategies for single parameters, or for parts of them (``"config.block"``), by name. They can also be
            passed as keywords, ``x=tensors()``, unless the name is one of the following. A parameter with a strategy is
            never left out.
        shapes: the shape of all tensors of a draw: a shape, several shapes, or a strategy; or a mapping with the shapes
            of some parameters, by name. A strategy may draw such a mapping, for shapes that depend on each other.
        dtypes: the same for dtypes. By default float32 and float64.
        broadcast: if True, all tensors but the first one and mutated ones may lack dimensions or have sizes of 1.
        elements: a strategy for the elements of tensors. By default they are finite, and between -8 and 8.
        layouts: the memory layouts of tensors, some of `LAYOUTS`. Mutated arguments are never expanded.
        requires_grad: a bool for all tensors, a mapping by name, or a strategy that draws it for each tensor. Mutated
            arguments and arguments of out ops never require grad.
        device: the device of tensors, and the value of arguments that are a device.

    Raises:
        ArgumentError: there is no such parameter, or the value given for it is not a strategy.
        UnsupportedError: values of a parameter's type cannot be drawn, and there is no strategy for the parameter.

    Example:
        >>> @given(arguments(scale, shapes=(2, 3), by=st.floats(0, 1)))
        ... def test_scale(sample):
        ...     opcheck(scale, *sample)
    """
    rich = lowered_from(op)
    plan = Plan(op if rich is None else rich, {**(given or {}), **more}, device)
    options = Options(
        plan.strategy(shapes, shape_of),
        plan.strategy(dtypes, dtype_of),
        broadcast,
        elements,
        tuple(layouts),
        plan.by_path(requires_grad) if isinstance(requires_grad, Mapping) else requires_grad,
        device,
    )
    samples = _samples(plan, options)
    return samples if rich is None else samples.map(lambda sample: Sample(*rich.lower(*sample.args, **sample.kwargs)))


@dataclass(frozen=True)
class Options:
    """What the user wants of tensors."""

    shapes: Strategy
    dtypes: Strategy
    broadcast: bool
    elements: st.SearchStrategy[Any] | None
    layouts: tuple[Layout, ...]
    requires_grad: bool | Mapping[str, bool] | st.SearchStrategy[bool]
    device: str | torch.device

    def __repr__(self) -> str:  # messages of hypothesis hold it
        return "..."


@st.composite
def _samples(draw: st.DrawFn, plan: Plan, options: Options) -> Sample:
    return _Draw(draw, plan, options).sample()


class _Draw:
    """The arguments of one call."""

    def __init__(self, draw: st.DrawFn, plan: Plan, options: Options) -> None:
        self.draw, self.plan, self.options = draw, plan, options
        self.shape, self.shapes = self._shared(options.shapes, SHAPES)
        self.dtype, self.dtypes = self._shared(options.dtypes, DTYPES)

    def _shared(self, strategy: Strategy, default: Strategy) -> tuple[Any, Mapping[str, Any]]:
        """The value for all tensors, and those for some by name."""
        drawn = self.draw(strategy)
        if not isinstance(drawn, Mapping):
            return drawn, {}
        return self.draw(default), self.plan.by_path(drawn)

    # Parameters -------------------------------------------------------------------------------------------------

    def sample(self) -> Sample:
        positional = [each for each in self.plan.parameters if each.kind in BY_POSITION]
        extra = [x for each in self._of(inspect.Parameter.VAR_POSITIONAL) for x in self.value(each.node)]
        count = len(positional) if extra else self._count(positional)
        args = [self.value(each.node) for each in positional[:count]]
        named = [each for each in positional[count:] if each.kind is not inspect.Parameter.POSITIONAL_ONLY]
        named += self._of(inspect.Parameter.KEYWORD_ONLY)
        kwargs = {each.name: self.value(each.node) for each in named if not self.is_left_out(each.node)}
        for each in self._of(inspect.Parameter.VAR_KEYWORD):
            kwargs |= self.value(each.node)
        return Sample((*args, *extra), kwargs)

    def _of(self, kind: Any) -> list[Parameter]:
        return [each for each in self.plan.parameters if each.kind is kind]

    def _count(self, positional: list[Parameter]) -> int:
        """How many are given by position. Simplest are those without a default, so that the others can be left out."""
        least = simplest = most = 0
        for i, each in enumerate(positional, 1):
            is_needed = not self.plan.may_be_left_out(each.node)
            if is_needed and each.kind is inspect.Parameter.POSITIONAL_ONLY:
                least = i
            if is_needed and simplest == i - 1:
                simplest = i
            if most == i - 1 and self.plan.is_drawable(each.node):
                most = i
        simplest = max(least, simplest)
        return self.draw(st.sampled_from([simplest, *(n for n in range(least, most + 1) if n != simplest)]))

    def is_left_out(self, node: Node) -> bool:
        may_be = self.plan.may_be_left_out(node)
        return may_be and (not self.plan.is_drawable(node) or self.draw(st.sampled_from([True, False])))

    # Values -----------------------------------------------------------------------------------------------------

    def value(self, node: Node, *, may_be_none: bool = True) -> Any:
        if node.path in self.plan.given:
            return self.draw(self.plan.given[node.path])
        if isinstance(node, Either):
            return self._either(node, may_be_none)
        if may_be_none and _is_optional(node) and self._is_none(node):
            return None
        if isinstance(node, Group):
            return self._group(node)
        if isinstance(node, Nested):
            count = self.draw(sizes("Tensor[]", self._least))
            return [self._tensor_list(node.tensors, list) for _ in range(count)]
        if not node.holds_tensors:
            return self.draw(self.plan.values[node.name])  # type: ignore[arg-type]
        if item_type(node.type.removesuffix("?")) is None:
            return self._tensor(node)
        return self._tensor_list(node, node.codec.container if isinstance(node.codec, SequenceCodec) else list)

    def _is_none(self, node: Node) -> bool:
        return not self.plan.is_drawable(node) or self.draw(st.sampled_from([True, False]))

    def _either(self, node: Either, may_be_none: bool) -> Any:
        kinds = ["number", "tensor", *(["none"] if node.may_be_none and may_be_none else [])]
        kind = self.draw(st.sampled_from(kinds))
        if kind == "tensor":
            return self._tensor(node.tensor)
        return None if kind == "none" else self.draw(self.plan.values[node.number.name])  # type: ignore[arg-type]

    def _group(self, group: Group) -> Any:
        form = group.form
        absent = form.absent if isinstance(form, DictForm) else ()
        fields = {
            key: self.value(node, may_be_none=key not in absent)
            for key, node in group.fields.items()
            if not self.is_left_out(node)
        }
        if isinstance(form, DictForm):
            return fields
        if isinstance(form, TupleForm) and not form.is_named:
            return tuple(fields.values())
        assert isinstance(form, DataclassForm | TupleForm)
        return _made(form, fields)

    # Tensors ----------------------------------------------------------------------------------------------------

    @property
    def _least(self) -> int:
        """The least number of tensors in a list."""
        return 0 if self.plan.has_tensor else 1

    def _tensor_list(self, leaf: Leaf, container: Any) -> Any:
        type_ = leaf.type.removesuffix("?")
        items_may_be_none = (item_type(type_) or "").endswith("?")
        items = []
        for _ in range(self.draw(sizes(type_, self._least))):
            is_none = items_may_be_none and self.draw(st.sampled_from([True, False]))
            items.append(None if is_none else self._tensor(leaf))
        return container(items)

    def _tensor(self, leaf: Leaf) -> Tensor:
        is_written = leaf.name in self.plan.written
        layouts = [each for each in self.options.layouts if not (is_written and each == "expanded")]
        tensor = draw_tensor(
            self.draw,
            self._shape(leaf, is_written),
            _of_path(self.dtypes, leaf.path, self.dtype),
            self.options.elements,
            layouts,
            self.options.device,
            leaf.path,
        )
        return tensor if is_written or not self.plan.is_differentiable else with_grad(tensor, self._requires_grad(leaf))

    def _shape(self, leaf: Leaf, is_written: bool) -> Shape:
        shape: Shape | None = _of_path(self.shapes, leaf.path, None)
        if shape is not None:
            return shape
        if not self.options.broadcast or is_written or leaf.name == self.plan.whole:
            return tuple(self.shape)
        lacking = self.draw(st.integers(0, len(self.shape)))
        return tuple(self.draw(st.sampled_from([size, 1])) for size in self.shape[lacking:])

    def _requires_grad(self, leaf: Leaf) -> bool:
        option = self.options.requires_grad
        if isinstance(option, Mapping):
            return bool(_of_path(option, leaf.path, False))
        return self.draw(option) if isinstance(option, st.SearchStrategy) else option


def _is_optional(node: Group | Nested | Leaf) -> bool:
    if isinstance(node, Group):
        return node.given is not None
    return node.leaves[0].is_optional


def _of_path(values: Mapping[str, Any], path: str, default: Any) -> Any:
    """The value for a part, which that for the whole is too."""
    return next((value for whole, value in values.items() if is_part(path, whole)), default)


def _made(form: DataclassForm | TupleForm, fields: Mapping[str, Any]) -> Any:
    """An object of these fields. What its class refuses to be made of is no argument."""
    try:
        return form.cls(**fields)
    except (ValueError, AssertionError):
        reject()
