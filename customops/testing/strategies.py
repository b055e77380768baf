"""Hypothesis strategies for inputs of operators: `arguments` of a call, and `tensors`.

This module needs hypothesis, which is an optional dependency: ``pip install customops[strategies]``.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from inspect import Parameter as Kind
from typing import Any, Literal

import torch
from torch import Tensor

from customops import _torch
from customops._dispatch import fingerprint
from customops._dispatch.names import find_op
from customops._op.op import CustomOpDef
from customops._op.samples import Sample
from customops._schema.infer import is_part
from customops._schema.model import REQUIRED, Argument
from customops._schema.parse import from_dispatcher
from customops._schema.structure import (
    AS_IT_IS,
    DEVICE,
    Codec,
    DataclassForm,
    DictForm,
    Either,
    EnumCodec,
    Group,
    Leaf,
    LiteralCodec,
    Nested,
    Node,
    Parameter,
    SequenceCodec,
    TupleForm,
)
from customops._schema.types import item_type, row_of
from customops.errors import ArgumentError, UnsupportedError

try:
    from hypothesis import currently_in_test_context, note, reject
    from hypothesis import strategies as st
except ImportError as error:
    raise ImportError(
        "customops.testing.strategies needs hypothesis, which is not installed\n"
        "  fix:      pip install hypothesis, or customops[strategies]"
    ) from error

__all__ = ["LAYOUTS", "arguments", "tensors"]
Strategy = st.SearchStrategy[Any]
Shape = tuple[int, ...]
Layout = Literal["contiguous", "transposed", "sliced", "expanded"]
#: The memory layouts of tensors. Elements of an expanded tensor share memory, so mutated arguments are never expanded.
LAYOUTS: tuple[Layout, ...] = ("contiguous", "transposed", "sliced", "expanded")
#: Of a tensor of more elements this many are drawn, and repeated. A prime number: rows seldom become equal.
DRAWN_ELEMENTS = 11

#: Up to three dimensions; every fourth strategy may draw a size of zero.
SHAPES: st.SearchStrategy[Shape] = st.one_of(
    *[st.lists(st.integers(1, 3), max_size=3)] * 3, st.lists(st.integers(0, 3), max_size=3)
).map(tuple)

DTYPES: st.SearchStrategy[torch.dtype] = st.sampled_from([torch.float32, torch.float64])
#: On a grid that float16 and bfloat16 have too: what is drawn is what a tensor holds.
_REALS = st.integers(-64, 64).map(lambda eighths: eighths / 8)


@functools.cache
def elements_of(dtype: torch.dtype) -> st.SearchStrategy[Any]:
    """Small and finite values."""
    if dtype is torch.bool:
        return st.booleans()
    if dtype.is_complex:
        return st.builds(complex, _REALS, _REALS)
    if dtype.is_floating_point:
        return _REALS
    return st.integers(-8 if dtype.is_signed else 0, 8)


def dtype_of(option: Any) -> st.SearchStrategy[torch.dtype]:
    """A strategy for what an option allows: one, several, or what a strategy draws."""
    if option is None or isinstance(option, st.SearchStrategy):
        return DTYPES if option is None else option
    return st.just(option) if isinstance(option, torch.dtype) else st.sampled_from(list(option))


def shape_of(option: Any) -> st.SearchStrategy[Shape]:
    """The same for shapes, of which one is a sequence of numbers."""
    if option is None or isinstance(option, st.SearchStrategy):
        return SHAPES if option is None else option
    is_one = all(isinstance(size, int) for size in option)
    return st.just(tuple(option)) if is_one else st.sampled_from([tuple(shape) for shape in option])


def tensors(
    shapes: Shape | Sequence[Shape] | st.SearchStrategy[Shape] | None = None,
    dtypes: torch.dtype | Sequence[torch.dtype] | st.SearchStrategy[torch.dtype] | None = None,
    *,
    elements: st.SearchStrategy[Any] | None = None,
    layouts: Iterable[Layout] = LAYOUTS,
    requires_grad: bool | st.SearchStrategy[bool] = False,
    device: str | torch.device = "cpu",
) -> st.SearchStrategy[Tensor]:
    """A strategy for tensors: contiguous, transposed, sliced and expanded ones, also 0-dimensional and empty ones.

    Args:
        shapes: a shape, several shapes, or a strategy. By default up to three dimensions of up to three elements.
        dtypes: a dtype, several dtypes, or a strategy. By default float32 and float64.
        elements: a strategy for the elements. By default they are finite, and between -8 and 8.
        layouts: the memory layouts to draw from, some of `LAYOUTS`.
        requires_grad: whether tensors of floating-point or complex dtypes require grad, or a strategy that draws it.
        device: the device of the tensors.

    Example:
        >>> @given(tensors((2, 3), torch.float32, layouts=["transposed"]))
        ... def test(x): ...
    """
    return _tensors(shape_of(shapes), dtype_of(dtypes), elements, tuple(layouts), requires_grad, device)


def draw_tensor(
    draw: st.DrawFn,
    shape: Shape | st.SearchStrategy[Shape],
    dtype: torch.dtype | st.SearchStrategy[torch.dtype],
    elements: Strategy | None,
    layouts: Collection[Layout],
    requires_grad: bool | st.SearchStrategy[bool],
    device: str | torch.device,
    name: str = "a tensor",
) -> Tensor:
    """One tensor. Where a test fails, hypothesis tells how it lies in memory, which its repr does not."""
    shape = draw(shape) if isinstance(shape, st.SearchStrategy) else shape
    dtype = draw(dtype) if isinstance(dtype, st.SearchStrategy) else dtype
    count = math.prod(shape)
    drawn = min(count, DRAWN_ELEMENTS)
    some = draw(st.lists(elements_of(dtype) if elements is None else elements, min_size=drawn, max_size=drawn))
    values = [some[i % drawn] for i in range(count)]
    tensor = torch.tensor(values, dtype=dtype, device=device).reshape(shape)
    wide = [dim for dim, size in enumerate(shape) if size > 1 and count]
    needed = {"contiguous": 0, "transposed": 2, "sliced": 1, "expanded": 1}  # with fewer it would be contiguous
    possible = [each for each in LAYOUTS if each in layouts and len(wide) >= needed[each]]
    layout = draw(st.sampled_from(possible or LAYOUTS[:1]))
    if layout == "expanded":
        tensor = tensor.narrow(draw(st.sampled_from(wide)), 0, 1).contiguous().expand(shape)
    elif layout == "transposed":
        turned = tuple(reversed(range(tensor.dim())))
        tensor = tensor.permute(turned).contiguous().permute(turned)
    elif layout == "sliced":  # every second element of a larger one, but for its first
        larger = torch.zeros((*shape[:-1], 2 * shape[-1] + 1), dtype=dtype, device=device)
        larger[..., 1::2] = tensor
        tensor = larger[..., 1::2]
    if layout != "contiguous" and currently_in_test_context():
        note(f"{name} is {layout}: strides {tuple(tensor.stride())}")
    is_wanted = draw(requires_grad) if isinstance(requires_grad, st.SearchStrategy) else requires_grad
    return tensor.requires_grad_(is_wanted and (dtype.is_floating_point or dtype.is_complex))


_tensors = st.composite(draw_tensor)
#: Lists have no more items than this.
MAX_ITEMS = 3
#: The 2 of ``SymInt[2]``.
_FIXED = re.compile(r"\[(\d+)\]$")
_INTS = st.integers(-8, 8)
_FLOATS = st.floats(-8, 8, allow_nan=False, allow_subnormal=False)
_LETTERS = st.characters(min_codepoint=32, max_codepoint=126)
_DTYPES = "float32 float64 float16 bfloat16 int64 int32 uint8 bool".split()

#: The Python type of an argument -> its values, but for those that depend on the device. Numbers are small and finite;
#: layouts and memory formats are those that every tensor can have.
_VALUES: dict[Any, Strategy] = {
    int: _INTS,
    float: _FLOATS,
    bool: st.booleans(),
    complex: st.builds(complex, _FLOATS, _FLOATS),
    torch.types.Number: _INTS | _FLOATS,
    str: st.text(_LETTERS, max_size=5),
    torch.dtype: st.sampled_from([getattr(torch, name) for name in _DTYPES]),
    torch.layout: st.just(torch.strided),
    torch.memory_format: st.sampled_from([torch.contiguous_format, torch.preserve_format]),
}


def sizes(type_: str, least: int = 0) -> tuple[int, int]:
    """The least and the greatest number of items of a list of this type."""
    fixed = _FIXED.search(type_)
    return (int(fixed[1]), int(fixed[1])) if fixed else (least, MAX_ITEMS)


def values_of(type_: str, codec: Codec, device: str | torch.device) -> Strategy | None:
    """The values, without None, of a leaf that holds no tensors; None if there is no strategy for its type."""
    if isinstance(codec, LiteralCodec):
        return st.sampled_from(codec.values)
    if isinstance(codec, EnumCodec):  # with the combinations of flags
        return st.sampled_from(codec.cls)
    if codec is DEVICE:
        return st.sampled_from([str(device), torch.device(device)])
    if type_.endswith("?"):
        values = values_of(type_[:-1], codec, device)
        return None if values is None else st.none() | values
    item = item_type(type_)
    if item is not None:
        of_item, container = (codec.item, codec.container) if isinstance(codec, SequenceCodec) else (AS_IT_IS, list)
        items, (least, most) = values_of(item, of_item, device), sizes(type_)
        return None if items is None else st.lists(items, min_size=least, max_size=most).map(container)
    if type_ == "Device":
        return st.just(torch.device(device))
    if type_ == "Generator":
        return st.integers(0, 2**31).map(lambda seed: torch.Generator(device).manual_seed(seed))
    if type_ == "int":  # the hint ``int`` is a SymInt
        return _INTS
    return next((_VALUES.get(hint) for hint in row_of(type_).hints), None)


# Arguments of a call


class Plan:
    """An op's parameters, strategies for them, and options of tensors: all that can be wrong is found in making it."""

    shapes: Strategy
    dtypes: Strategy
    broadcast: bool
    elements: Strategy | None
    layouts: tuple[Layout, ...]
    requires_grad: bool | Mapping[str, bool] | st.SearchStrategy[bool]

    def __init__(self, op: Any, given: Mapping[str, Strategy], device: str | torch.device) -> None:
        overload = find_op(op)
        lowering = getattr(op, "_lowering", None)
        schema = op.schema if isinstance(op, CustomOpDef) else from_dispatcher(_torch.schema.schema_of(overload))
        self.op, self.device = _torch.library.name_of_overload(overload), device
        self.parameters: tuple[Parameter, ...] = (
            tuple(map(_parameter, schema.arguments)) if lowering is None else lowering.signature.parameters
        )
        self.given = self.by_path(given)
        if self.op.startswith("aten::"):  # it takes CUDA
            self.given |= {each.name: st.just(False) for each in self.parameters if each.name == "pin_memory"}
        for path, strategy in self.given.items():
            if not isinstance(strategy, st.SearchStrategy):
                problem = "this is not a strategy"
                fix = "hypothesis.strategies.just(...) for a single value"
                raise ArgumentError(problem, op=self.op, argument=path, got=type(strategy).__name__, fix=fix)
        self.written = {argument.name for argument in schema.mutated}
        #: May its tensors require gradients? torch refuses it of out ops.
        self.is_differentiable = not (
            any(each.is_mutated and each.kwarg_only for each in schema.arguments)
            and any(each.is_mutated for each in schema.returns)
        )
        #: The tensor that has the whole shape where others are broadcast to it.
        self.whole = next((argument.name for argument in schema.arguments if argument.holds_tensors), None)
        #: The least number of tensors in a list: none, if there is a tensor in each call.
        self.least = 0 if any(_is_sure(each.node) for each in self.parameters if each.default is REQUIRED) else 1
        leaves = [leaf for each in self.parameters for leaf in each.node.leaves if not leaf.holds_tensors]
        #: By the name of the leaf; none for a type that we know no value of.
        self.values: dict[str, Any] = {
            leaf.name: values_of(leaf.type.removesuffix("?"), leaf.codec, device) for leaf in leaves
        }
        for each in self.parameters:
            self._check_drawable(each.node)

    def __repr__(self) -> str:  # messages of hypothesis hold it
        return self.op

    def may_be_left_out(self, node: Node) -> bool:
        """Not where there is a strategy of the user's for it, or for a part of it."""
        return node.default is not REQUIRED and not any(is_part(path, node.path) for path in self.given)

    def is_drawable(self, node: Node) -> bool:
        """Do we know values of it, other than None?"""
        if node.path in self.given or not isinstance(node, Leaf):
            return True
        return node.holds_tensors or self.values[node.name] is not None

    def by_path(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values by path of a parameter or its part. The name alone stands for one of the ``**options``."""
        rest = [each.node for each in self.parameters if each.kind is Kind.VAR_KEYWORD]
        paths = {key: node.path for group in rest if isinstance(group, Group) for key, node in group.fields.items()}
        by_path = {paths.get(name, name): value for name, value in values.items()}
        known = [path for each in self.parameters for path in _paths(each.node)]
        for path in by_path:
            if path not in known:
                expected = f"some of {', '.join(known) or 'none'}"
                raise ArgumentError("no such parameter", op=self.op, argument=path, expected=expected)
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
            fix = f"arguments(op, {{{node.path!r}: a strategy}})"
            raise UnsupportedError(f"there is no strategy for {node.type}", op=self.op, argument=node.path, fix=fix)


def _parameter(argument: Argument) -> Parameter:
    """An argument of a schema as a parameter."""
    kind = Kind.KEYWORD_ONLY if argument.kwarg_only else Kind.POSITIONAL_OR_KEYWORD
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
    rich: CustomOpDef[Any, Any] | None = None  # the op with rich types of which `op` is the lowered form
    if not isinstance(op, CustomOpDef):
        overload = find_op(op)
        ours = (each for each in fingerprint.ops if isinstance(each, CustomOpDef) and each._lowering is not None)
        rich = next((each for each in ours if each._opoverload is overload), None)
    plan = Plan(op if rich is None else rich, {**(given or {}), **more}, device)
    plan.shapes, plan.dtypes = plan.strategy(shapes, shape_of), plan.strategy(dtypes, dtype_of)
    plan.broadcast, plan.elements, plan.layouts = broadcast, elements, tuple(layouts)
    plan.requires_grad = plan.by_path(requires_grad) if isinstance(requires_grad, Mapping) else requires_grad
    samples = _samples(plan)
    return samples if rich is None else samples.map(lambda sample: Sample(*rich.lower(*sample.args, **sample.kwargs)))


class _Draw:
    """The arguments of one call."""

    def __init__(self, draw: st.DrawFn, plan: Plan) -> None:
        self.draw, self.plan = draw, plan
        self.shape, self.shapes = self._shared(plan.shapes, SHAPES)
        self.dtype, self.dtypes = self._shared(plan.dtypes, DTYPES)

    def _shared(self, strategy: Strategy, default: Strategy) -> tuple[Any, Mapping[str, Any]]:
        """The value for all tensors, and those for some by name."""
        drawn = self.draw(strategy)
        if not isinstance(drawn, Mapping):
            return drawn, {}
        return self.draw(default), self.plan.by_path(drawn)

    def sample(self) -> Sample:
        positional = [*self._of(Kind.POSITIONAL_ONLY), *self._of(Kind.POSITIONAL_OR_KEYWORD)]
        extra = [x for each in self._of(Kind.VAR_POSITIONAL) for x in self.value(each.node)]
        count = len(positional) if extra else self._count(positional)
        args = [self.value(each.node) for each in positional[:count]]
        named = [each for each in positional[count:] if each.kind is not Kind.POSITIONAL_ONLY]
        named += self._of(Kind.KEYWORD_ONLY)
        kwargs = {each.name: self.value(each.node) for each in named if not self.is_left_out(each.node)}
        for each in self._of(Kind.VAR_KEYWORD):
            kwargs |= self.value(each.node)
        return Sample((*args, *extra), kwargs)

    def _of(self, kind: Any) -> list[Parameter]:
        return [each for each in self.plan.parameters if each.kind is kind]

    def _count(self, positional: list[Parameter]) -> int:
        """Draw how many are given by position. The simplest number is that of the first ones without a default."""
        needed = [not self.plan.may_be_left_out(each.node) for each in positional]
        only = [each.kind is Kind.POSITIONAL_ONLY for each in positional]
        least = max((i for i, both in enumerate(zip(needed, only, strict=True), 1) if all(both)), default=0)
        most = [*(self.plan.is_drawable(each.node) for each in positional), False].index(False)
        simplest = max(least, [*needed, False].index(False))
        return self.draw(st.sampled_from([simplest, *(n for n in range(least, most + 1) if n != simplest)]))

    def is_left_out(self, node: Node) -> bool:
        may_be = self.plan.may_be_left_out(node)
        return may_be and (not self.plan.is_drawable(node) or self.draw(st.sampled_from([True, False])))

    def value(self, node: Node, *, may_be_none: bool = True) -> Any:
        if node.path in self.plan.given:
            return self.draw(self.plan.given[node.path])
        if isinstance(node, Either):
            kinds = ["number", "tensor", *(["none"] if node.may_be_none and may_be_none else [])]
            kind = self.draw(st.sampled_from(kinds))
            if kind == "tensor":
                return self._tensor(node.tensor)
            return None if kind == "none" else self.draw(self.plan.values[node.number.name])
        is_optional = node.given is not None if isinstance(node, Group) else node.leaves[0].is_optional
        if may_be_none and is_optional:
            if not self.plan.is_drawable(node) or self.draw(st.sampled_from([True, False])):
                return None
        if isinstance(node, Group):
            return self._group(node)
        if isinstance(node, Nested):
            count = self.draw(st.integers(*sizes("Tensor[]", self.plan.least)))
            return [self._tensor_list(node.tensors, list) for _ in range(count)]
        if not node.holds_tensors:
            return self.draw(self.plan.values[node.name])
        if item_type(node.type.removesuffix("?")) is None:
            return self._tensor(node)
        return self._tensor_list(node, node.codec.container if isinstance(node.codec, SequenceCodec) else list)

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
        try:
            return form.cls(**fields)
        except (ValueError, AssertionError):  # what its class refuses to be made of is no argument
            reject()

    def _tensor_list(self, leaf: Leaf, container: Any) -> Any:
        type_ = leaf.type.removesuffix("?")
        may_be_none = (item_type(type_) or "").endswith("?")
        count = self.draw(st.integers(*sizes(type_, self.plan.least)))
        draws = (may_be_none and self.draw(st.sampled_from([True, False])) for _ in range(count))
        return container([None if is_none else self._tensor(leaf) for is_none in draws])

    def _tensor(self, leaf: Leaf) -> Tensor:
        is_written = leaf.name in self.plan.written
        shape: Shape | None = _of_path(self.shapes, leaf.path, None)
        if shape is None:
            shape = tuple(self.shape)
            if self.plan.broadcast and not is_written and leaf.name != self.plan.whole:
                lacking = self.draw(st.integers(0, len(shape)))
                shape = tuple(self.draw(st.sampled_from([size, 1])) for size in shape[lacking:])
        dtype = _of_path(self.dtypes, leaf.path, self.dtype)
        layouts = [each for each in self.plan.layouts if not (is_written and each == "expanded")]
        option = self.plan.requires_grad
        if is_written or not self.plan.is_differentiable:
            option = False
        elif isinstance(option, Mapping):
            option = bool(_of_path(option, leaf.path, False))
        return draw_tensor(self.draw, shape, dtype, self.plan.elements, layouts, option, self.plan.device, leaf.path)


@st.composite
def _samples(draw: st.DrawFn, plan: Plan) -> Sample:
    return _Draw(draw, plan).sample()


def _of_path(values: Mapping[str, Any], path: str, default: Any) -> Any:
    """The value for a part, which that for the whole is too."""
    return next((value for whole, value in values.items() if is_part(path, whole)), default)
