"""`arguments`: what an op takes, drawn from its signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import reject
from hypothesis import strategies as st
from torch import Tensor

from customops import _torch
from customops._dispatch import fingerprint
from customops._dispatch.names import find_op
from customops._dispatch.scopes import Sample
from customops._op.op import CustomOpDef
from customops._schema.infer import is_part
from customops._schema.model import REQUIRED, Argument
from customops._schema.parse import from_dispatcher
from customops._schema.structure import (
    DataclassForm,
    DictForm,
    Either,
    Group,
    Leaf,
    Nested,
    Node,
    Parameter,
    SequenceCodec,
    TupleForm,
)
from customops._schema.types import item_type
from customops.errors import ArgumentError, UnsupportedError
from customops.testing.strategies._tensors import (
    DTYPES,
    LAYOUTS,
    SHAPES,
    Layout,
    Shape,
    Strategy,
    draw_tensor,
    dtype_of,
    shape_of,
    sizes,
    values_of,
    with_grad,
)

BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Plan:
    """The parameters of an op, the user's strategies for some, and ours for the others."""

    def __init__(self, op: Any, given: Mapping[str, Strategy], device: str | torch.device) -> None:
        overload = find_op(op)
        lowering = getattr(op, "_lowering", None)
        schema = from_dispatcher(_torch.schema.schema_of(overload)) if lowering is None else lowering.schema
        if isinstance(op, CustomOpDef):
            schema = op.schema
        self.op = _torch.library.name_of_overload(overload)
        self.parameters: tuple[Parameter, ...] = (
            tuple(map(_parameter, schema.arguments)) if lowering is None else lowering.signature.parameters
        )
        self.given = self.by_path(given)
        if self.op.startswith("aten::"):  # it takes CUDA
            self.given |= {each.name: st.just(False) for each in self.parameters if each.name == "pin_memory"}
        for path, strategy in self.given.items():
            if not isinstance(strategy, st.SearchStrategy):
                raise ArgumentError(
                    "this is not a strategy",
                    op=self.op,
                    argument=path,
                    got=type(strategy).__name__,
                    fix="hypothesis.strategies.just(...) for a single value",
                )
        self.written = {argument.name for argument in schema.mutated}
        is_out = any(each.is_mutated and each.kwarg_only for each in schema.arguments) and any(
            each.is_mutated for each in schema.returns
        )
        #: May its tensors require gradients? torch refuses it of out ops.
        self.is_differentiable = not is_out
        #: The tensor that has the whole shape where others are broadcast to it.
        self.whole = next((argument.name for argument in schema.arguments if argument.holds_tensors), None)
        #: Is there a tensor in each call? Else lists of tensors are not empty.
        self.has_tensor = any(_is_sure(each.node) for each in self.parameters if each.default is REQUIRED)
        #: By the name of the leaf; none for a type that we know no value of.
        self.values = {leaf.name: values_of(leaf, device) for leaf in self._leaves() if not leaf.holds_tensors}
        for each in self.parameters:
            self._check_drawable(each.node)

    def __repr__(self) -> str:  # messages of hypothesis hold it
        return self.op

    def _leaves(self) -> Iterator[Leaf]:
        return (leaf for each in self.parameters for leaf in each.node.leaves)

    def is_given(self, path: str) -> bool:
        """Is there a strategy of the user's for it, or for a part of it? Then it is not left out."""
        return any(is_part(each, path) for each in self.given)

    def may_be_left_out(self, node: Node) -> bool:
        return node.default is not REQUIRED and not self.is_given(node.path)

    def is_drawable(self, node: Node) -> bool:
        """Do we know values of it, other than None?"""
        if node.path in self.given or not isinstance(node, Leaf):
            return True
        return node.holds_tensors or self.values[node.name] is not None

    # What the user gave -----------------------------------------------------------------------------------------

    def by_path(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values by path. The name alone stands for one of the ``**options``.

        Raises:
            ArgumentError: something is neither a parameter nor a part of one.
        """
        rest = [each.node for each in self.parameters if each.kind is inspect.Parameter.VAR_KEYWORD]
        paths = {key: node.path for group in rest if isinstance(group, Group) for key, node in group.fields.items()}
        by_path = {paths.get(name, name): value for name, value in values.items()}
        known = [path for each in self.parameters for path in _paths(each.node)]
        for path in by_path:
            if path not in known:
                raise ArgumentError(
                    "no such parameter", op=self.op, argument=path, expected=f"some of {', '.join(known) or 'none'}"
                )
        return by_path

    def strategy(self, option: Any, of_one: Callable[[Any], Strategy]) -> Strategy:
        """A strategy for a value for all tensors, or for values for some of them, by path."""
        if not isinstance(option, Mapping):
            return of_one(option)
        return st.fixed_dictionaries({path: of_one(each) for path, each in self.by_path(option).items()})

    def _check_drawable(self, node: Node) -> None:
        if node.path in self.given or node.default is not REQUIRED:
            return
        if isinstance(node, Group):
            for each in node.fields.values():
                self._check_drawable(each)
        elif isinstance(node, Leaf) and not node.is_optional and not self.is_drawable(node):
            raise UnsupportedError(
                f"there is no strategy for {node.type}",
                op=self.op,
                argument=node.path,
                fix=f"arguments(op, {{{node.path!r}: a strategy}})",
            )


def lowered_from(op: Any) -> CustomOpDef[Any, Any] | None:
    """The op with rich types of which `op` is the lowered form, or None."""
    overload = find_op(op)
    if isinstance(op, CustomOpDef):
        return None
    ours = (each for each in fingerprint.ops if isinstance(each, CustomOpDef) and each._lowering is not None)
    return next((each for each in ours if each._opoverload is overload), None)


def _parameter(argument: Argument) -> Parameter:
    """An argument of a schema as a parameter."""
    kind = inspect.Parameter.KEYWORD_ONLY if argument.kwarg_only else inspect.Parameter.POSITIONAL_OR_KEYWORD
    # None then stands for the default and is no value of its own.
    type_ = argument.type.removesuffix("?") if argument.default_is_none_in_text else argument.type
    leaf = Leaf(argument.name, argument.name, type_, default=argument.default)
    return Parameter(argument.name, kind, leaf, argument.default)


def _paths(node: Node) -> Iterator[str]:
    """The paths of a parameter and its parts."""
    if node.path:
        yield node.path
    if isinstance(node, Group):
        for each in node.fields.values():
            yield from _paths(each)


def _is_sure(node: Node) -> bool:
    """Does each value hold a tensor?"""
    if isinstance(node, Either | Nested):
        return False
    if isinstance(node, Leaf):
        return node.type == "Tensor"
    return node.given is None and any(_is_sure(each) for each in node.fields.values() if each.default is REQUIRED)


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
        is_optional = node.given is not None if isinstance(node, Group) else node.leaves[0].is_optional
        if may_be_none and is_optional:
            if not self.plan.is_drawable(node) or self.draw(st.sampled_from([True, False])):
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
        if is_written or not self.plan.is_differentiable:
            return tensor
        option = self.options.requires_grad
        if isinstance(option, Mapping):
            return with_grad(tensor, bool(_of_path(option, leaf.path, False)))
        return with_grad(tensor, self.draw(option) if isinstance(option, st.SearchStrategy) else option)

    def _shape(self, leaf: Leaf, is_written: bool) -> Shape:
        shape: Shape | None = _of_path(self.shapes, leaf.path, None)
        if shape is not None:
            return shape
        if not self.options.broadcast or is_written or leaf.name == self.plan.whole:
            return tuple(self.shape)
        lacking = self.draw(st.integers(0, len(self.shape)))
        return tuple(self.draw(st.sampled_from([size, 1])) for size in self.shape[lacking:])


def _of_path(values: Mapping[str, Any], path: str, default: Any) -> Any:
    """The value for a part, which that for the whole is too."""
    return next((value for whole, value in values.items() if is_part(path, whole)), default)


def _made(form: DataclassForm | TupleForm, fields: Mapping[str, Any]) -> Any:
    """An object of these fields. What its class refuses to be made of is no argument."""
    try:
        return form.cls(**fields)
    except (ValueError, AssertionError):
        reject()
