"""What a sample is made of: its tensors and its other arguments, and how to put others in their places."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from customops import _torch
from customops._schema.infer import is_part
from customops._schema.model import REQUIRED, Argument
from customops._schema.structure import AS_IT_IS, Codec, Either, EnumCodec, Group, Leaf, Nested, Node, SequenceCodec
from customops._schema.types import item_type
from customops.checks._check import EFFORTS, Effort
from customops.checks._inputs import is_plain, tensors_in
from customops.checks._trial import Case, Kind, Trial
from customops.checks.inputs._elements import is_inexact

#: How early an input is tried: with every effort, or only with more.
QUICK, NORMAL, THOROUGH = range(len(EFFORTS))


def ranks(effort: Effort) -> range:
    """The ranks that are tried with an effort."""
    return range(EFFORTS.index(effort) + 1)


def made(trial: Trial | None, kind: Kind, label: str) -> Iterator[Case]:
    """The case of a call, if there is one."""
    if trial is not None:
        yield Case(trial, kind, label)


def in_turn(iterators: Iterable[Iterator[Case]]) -> Iterator[Case]:
    """One case of each, then the next of each."""
    left = list(iterators)
    while left:
        for iterator in list(left):
            case = next(iterator, None)
            if case is None:
                left.remove(iterator)
            else:
                yield case


@dataclass(frozen=True)
class Variation:
    """What may be changed of a sample, and to what. The one without arguments is that of an op nothing is known of.

    Attributes:
        vary: values to try instead of those that would be guessed: for an argument (``"dim"``), for the dtype of a
            tensor (``"x.dtype"``) or for its shape (``"x.shape"``). A callable gets the value of the sample and returns
            them.
        fixed: what is not changed: arguments (``"dim"``), kinds (``"layout"``), or a kind of one (``"x.layout"``).
        constraints: what has to be true of the arguments; each is called with those that it names.
    """

    vary: Mapping[str, Any] = field(default_factory=dict)
    fixed: frozenset[str] = frozenset()
    constraints: tuple[Callable[..., bool], ...] = ()

    def allows(self, kind: str, argument: str | None = None) -> bool:
        """May this kind of thing be changed, of this argument, by a guess?"""
        if kind in self.fixed:
            return False
        if argument is None:
            return True
        if argument in self.fixed or f"{argument}.{kind}" in self.fixed or argument in self.vary:
            return False
        return f"{argument}.{_ASPECTS.get(kind)}" not in self.vary

    def values(self, key: str, value: Any) -> Iterable[Any]:
        """The values to try under a key of `vary`, where the sample has `value`."""
        given = self.vary[key]
        values: Iterable[Any] = given(value) if callable(given) else given
        return values


def variation_of(op: Any) -> Variation:
    """What was said at `register_samples`, of a `CustomOpDef`; None stands for another operator."""
    samples = getattr(op, "_samples", None)
    if samples is None:
        return Variation()
    fixed = {lowered for name in samples.fixed for lowered in _lowered(op, name)}
    fixed |= {lowered for name in samples.vary if "." not in name for lowered in _lowered(op, name)}
    return Variation(samples.vary, frozenset(fixed), samples.constraints)


def _lowered(op: Any, name: str) -> list[str]:
    """What a name of `fixed` is called where the arguments are those of the schema."""
    lowering = getattr(op, "_lowering", None)
    argument, dot, kind = name.partition(".")
    leaves = [leaf for each in (lowering.signature.parameters if lowering else ()) for leaf in each.node.leaves]
    parts = [f"{leaf.name}{dot}{kind}" for leaf in leaves if is_part(leaf.path, argument)]
    return [name, *parts]


#: What of a tensor a kind of change changes, as keys of `vary` say it.
_ASPECTS = {"size": "shape", "dtype": "dtype"}


@dataclass(frozen=True)
class Spot:
    """A tensor of the sample.

    Attributes:
        argument: the name of the argument that it is, or that is a list with it.
        label: what to call it: ``x``, ``xs[1]``.
    """

    tensor: torch.Tensor
    argument: str
    label: str
    is_written: bool
    seed: int


@dataclass(frozen=True)
class Place:
    """An argument that is no tensor.

    Attributes:
        type: its type in the schema, with a ``?`` only where None is a value of its own.
        default: the default, or REQUIRED.
        choices: all its values, where they are known; of a list those of an item.
        length: the length of a list that has just one.
        is_bound: it goes with other arguments, and is not changed by itself.
    """

    name: str
    type: str
    default: Any = REQUIRED
    choices: tuple[Any, ...] = ()
    length: int | None = None
    is_bound: bool = False

    @property
    def is_optional(self) -> bool:
        return self.type.endswith("?")

    @property
    def item_type(self) -> str | None:
        return item_type(self.type)


class Parts:
    """A sample, taken apart once."""

    def __init__(self, trial: Trial, variation: Variation) -> None:
        self.trial, self.variation = trial, variation
        self.spots = list(_spots(trial))

    @functools.cached_property
    def places(self) -> dict[str, Place]:
        """All arguments that the schema has, by name; also those that hold tensors."""
        arguments = {argument.name: argument for argument in self.trial.schema.arguments}
        custom = self.trial.custom_op
        if custom is None:
            return {name: _place(argument) for name, argument in arguments.items()}
        lowering = getattr(custom, "_lowering", None)
        ours = {argument.name: argument for argument in custom.schema.arguments}
        places = {name: _place(ours.get(name, argument)) for name, argument in arguments.items()}
        for parameter in lowering.signature.parameters if lowering is not None else ():
            for place in _places(parameter.node, self.trial.arguments):
                if place.name in places:
                    places[place.name] = replace(place, default=places[place.name].default)
        return places

    @property
    def groups(self) -> Iterator[Node]:
        """The parameters that are several arguments of the schema, and their parts that are."""
        lowering = getattr(self.trial.custom_op, "_lowering", None)
        for parameter in lowering.signature.parameters if lowering is not None else ():
            yield from _groups(parameter.node)

    @functools.cached_property
    def numbers(self) -> list[tuple[Place, Any]]:
        """The arguments without tensors that may be changed by themselves, and the values they have."""
        given = self.trial.arguments
        places = [place for place in self.places.values() if not place.is_bound and "Tensor" not in place.type]
        values = [(place, given.get(place.name, place.default)) for place in places]
        return [(place, value) for place, value in values if value is not REQUIRED]

    @functools.cached_property
    def is_careful(self) -> bool:
        """May a kernel be called that does not look at its inputs before it reads memory?

        Then only inputs are tried that belong together as those of the sample do.
        """
        if self.trial.is_builtin:
            return False
        return _torch.library.torch_op_of(self.trial.name) is None

    def resizable(self, kind: str) -> list[Spot]:
        """The tensors of which this kind of thing may be changed, and can."""
        return [spot for spot in self.spots if is_plain(spot.tensor) and self.variation.allows(kind, spot.argument)]

    def with_tensors(self, changed: Mapping[int, torch.Tensor], trial: Trial | None = None) -> Trial:
        """The sample with other tensors for some, by the `id` of those; they require grad as those do."""
        made = {
            id(spot.tensor): like(changed[id(spot.tensor)], spot.tensor)
            for spot in self.spots
            if id(spot.tensor) in changed
        }
        return (trial or self.trial).map_tensors(lambda _, tensor: made.get(id(tensor), tensor))

    def each(
        self,
        spots: Iterable[Spot],
        change: Callable[[torch.Tensor], torch.Tensor | None],
        trial: Trial | None = None,
    ) -> Trial | None:
        """The sample, or `trial`, with `change` of each of these tensors in its place; None if nothing changes."""
        changed = {id(spot.tensor): _changed(spot.tensor, change) for spot in spots}
        new = {key: tensor for key, tensor in changed.items() if tensor is not None}
        return self.with_tensors(new, trial) if new else None

    def with_arguments(self, values: Mapping[str, Any]) -> Trial:
        return self.trial.with_arguments(**values)

    def without(self, name: str) -> Trial:
        """The sample with an argument left to its default."""
        names = [argument.name for argument in self.trial.schema.positional][: len(self.trial.args)]
        at = names.index(name) if name in names else len(names)
        later = dict(zip(names[at + 1 :], self.trial.args[at + 1 :], strict=False))
        kwargs = {key: value for key, value in (later | self.trial.kwargs).items() if key != name}
        return replace(self.trial, args=self.trial.args[:at], kwargs=kwargs)


def _changed(tensor: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor | None]) -> torch.Tensor | None:
    try:
        with torch.no_grad():
            return change(tensor.detach())
    except (RuntimeError, TypeError):  # torch or the device has no such function for this dtype
        return None


def like(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """`new`, requiring grad as `old` does, and a leaf if that is one."""
    if not old.requires_grad or new.requires_grad or not is_inexact(new.dtype):
        return new
    new = new.detach().requires_grad_()
    if old.is_leaf:
        return new
    with torch.enable_grad():
        alias: torch.Tensor = torch.ops.aten.alias.default(new)
        return alias


def _spots(trial: Trial) -> Iterator[Spot]:
    seen: set[int] = set()
    written = {argument.name for argument in trial.schema.mutated}
    for name, value in trial.arguments.items():
        tensors = tensors_in(value)
        for i, tensor in enumerate(tensors):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                label = name if tensor is value else f"{name}[{i}]"
                yield Spot(tensor, name, label, name in written, len(seen))


def _place(argument: Argument) -> Place:
    type_ = argument.type.removesuffix("?") if argument.default_is_none_in_text else argument.type
    return Place(argument.name, type_, argument.default)


def _places(node: Node, given: Mapping[str, Any], *, is_bound: bool = False) -> Iterator[Place]:
    if isinstance(node, Leaf):
        yield Place(node.name, node.type, REQUIRED, _choices(node.codec), _length(node.codec), is_bound)
    elif isinstance(node, Group):
        is_absent = node.given is not None and given.get(node.given.name) is not True
        if node.given is not None:
            yield Place(node.given.name, "bool", is_bound=True)
        for field in node.fields.values():  # those of an object that is not there are None, and stay so
            yield from _places(field, given, is_bound=is_bound or is_absent)
    else:
        for leaf in node.leaves:
            yield Place(leaf.name, leaf.type, is_bound=True)


def _choices(codec: Codec) -> tuple[Any, ...]:
    if isinstance(codec, SequenceCodec):
        return _choices(codec.item)
    if isinstance(codec, EnumCodec) and not codec.choices:
        return tuple(member.value for member in codec.cls)
    values: dict[int, Any] = {}
    for lowered, value in codec.choices.items():
        values.setdefault(id(value), lowered)  # a member of an enum may have several names
    return tuple(values.values())


def _length(codec: Codec) -> int | None:
    return codec.length if codec is not AS_IT_IS and isinstance(codec, SequenceCodec) else None


def _groups(node: Node) -> Iterator[Node]:
    if isinstance(node, (Either, Nested)):
        yield node
    elif isinstance(node, Group):
        yield node
        for field in node.fields.values():
            yield from _groups(field)
