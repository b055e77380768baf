"""What a sample is made of: its tensors and its other arguments, and how to put others in their places.

A tensor of another size has to be as valid as the one that it is made of: indices that are in range, probabilities that
are positive, offsets that are sorted. So its elements lie between the smallest and the largest of the old ones.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from customops import _torch
from customops._schema.infer import is_part
from customops._schema.model import REQUIRED
from customops._schema.structure import EnumCodec, Group, Leaf, Node, SequenceCodec
from customops._versions import cached_property
from customops.checks._inputs import is_plain
from customops.checks._trial import EFFORTS, Case, Kind, Trial
from customops.errors import CustomOpsError

#: How early an input is tried: with every effort, or only with more.
QUICK, NORMAL, THOROUGH = range(len(EFFORTS))

#: Makes another tensor of one; None where it cannot, or nothing would change.
Change = Callable[[torch.Tensor], torch.Tensor | None]


def in_turn(iterators: Iterable[Iterator[Case]]) -> Iterator[Case]:
    """One case of each, then the next of each."""
    for cases in itertools.zip_longest(*iterators):
        yield from (case for case in cases if case is not None)


# What the author said of the inputs


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
        aspect = {"size": "shape", "dtype": "dtype"}.get(kind)  # as the keys of `vary` say it
        return f"{argument}.{aspect}" not in self.vary

    def values(self, key: str, value: Any) -> Iterable[Any]:
        """The values to try under a key of `vary`, where the sample has `value`."""
        given = self.vary[key]
        values: Iterable[Any] = given(value) if callable(given) else given
        return values

    def holds(self, trial: Trial) -> bool:
        """Are the constraints true of a call? One that raises is not."""
        if not self.constraints:
            return True
        try:
            given = arguments_of(trial)
        except CustomOpsError:  # there are no such values
            return False
        for constraint in self.constraints:
            parameters = inspect.signature(constraint).parameters
            takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
            named = {name: value for name, value in given.items() if takes_all or name in parameters}
            try:
                if not constraint(**named):
                    return False
            except Exception:  # written for ordinary inputs: what it cannot judge is none
                return False
        return True


def variation_of(op: Any) -> Variation:
    """What was said at `register_samples`, of a `CustomOpDef`; None stands for another operator."""
    samples = getattr(op, "_samples", None)
    if samples is None:
        return Variation()
    lowering = getattr(op, "_lowering", None)
    leaves = [leaf for each in (lowering.signature.parameters if lowering else ()) for leaf in each.node.leaves]
    fixed: set[str] = set()
    for name in (*samples.fixed, *(name for name in samples.vary if "." not in name)):
        argument, dot, kind = name.partition(".")
        # And what it is called where the arguments are those of the schema.
        fixed |= {name, *(f"{leaf.name}{dot}{kind}" for leaf in leaves if is_part(leaf.path, argument))}
    return Variation(samples.vary, frozenset(fixed), samples.constraints)


def arguments_of(trial: Trial) -> dict[str, Any]:
    """The arguments of a call by name, as the op's function gets them, with the defaults."""
    lowering = getattr(trial.custom_op, "_lowering", None)
    schema = trial.schema if lowering is None else lowering.schema
    given: dict[str, Any] = {each.name: each.default for each in schema.arguments if each.has_default}
    given |= trial.arguments
    if lowering is None:
        return given
    by_position = [given[argument.name] for argument in schema.positional]
    values, named = lowering.restore(*by_position, **{a.name: given[a.name] for a in schema.keyword_only})
    names = [each.name for each in lowering.signature.parameters if not each.by_keyword]
    return {**dict(zip(names, values, strict=True)), **named}


def with_argument(trial: Trial, name: str, value: Any) -> Trial:
    """The call with another value for an argument, as the op's function would get it."""
    lowering = getattr(trial.custom_op, "_lowering", None)
    if lowering is None:
        return trial.with_arguments(**{name: value})
    values = arguments_of(trial) | {name: value}
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for each in lowering.signature.parameters:
        if each.stars == "**":
            kwargs |= values[each.name]
        elif each.by_keyword:
            kwargs[each.name] = values[each.name]
        else:
            args += values[each.name] if each.stars else (values[each.name],)
    lowered_args, lowered_kwargs = trial.custom_op.lower(*args, **kwargs)
    return replace(trial, args=tuple(lowered_args), kwargs=dict(lowered_kwargs))


# The sample, taken apart


@dataclass(frozen=True)
class Spot:
    """A tensor of the sample."""

    tensor: torch.Tensor
    argument: str  #: the name of the argument that it is, or that is a list with it
    label: str  #: what to call it: ``x``, ``xs[1]``
    is_written: bool
    seed: int


@dataclass(frozen=True)
class Place:
    """An argument of the schema."""

    name: str
    type: str  #: in the schema, with a ``?`` only where None is a value of its own
    default: Any = REQUIRED
    choices: tuple[Any, ...] = ()  #: all its values, where they are known; of a list those of an item
    length: int | None = None  #: of a list that has just one
    is_bound: bool = False  #: it goes with other arguments, and is not changed by itself


class Parts:
    """A sample, taken apart once."""

    def __init__(self, trial: Trial, variation: Variation, outcomes: Mapping[str, bool] | None = None) -> None:
        self.trial, self.variation = trial, variation
        #: By the labels of inputs that were tried: were they accepted?
        self.outcomes = {} if outcomes is None else outcomes
        self.spots: list[Spot] = []
        seen: set[int] = set()
        written = {argument.name for argument in trial.schema.mutated}
        for name, label, tensor in trial.named_tensors:
            if id(tensor) not in seen:
                seen.add(id(tensor))
                self.spots.append(Spot(tensor, name, label, name in written, len(seen)))

    @property
    def nodes(self) -> list[Node]:
        """The parameters of an op with types that the dispatcher lacks."""
        lowering = getattr(self.trial.custom_op, "_lowering", None)
        return [] if lowering is None else [parameter.node for parameter in lowering.signature.parameters]

    @cached_property
    def places(self) -> dict[str, Place]:
        """All arguments that the schema has, by name; also those that hold tensors."""
        custom = self.trial.custom_op
        ours = {} if custom is None else {argument.name: argument for argument in custom.schema.arguments}
        places: dict[str, Place] = {}
        for argument in self.trial.schema.arguments:
            argument = ours.get(argument.name, argument)
            type_ = argument.type.removesuffix("?") if argument.default_is_none_in_text else argument.type
            places[argument.name] = Place(argument.name, type_, argument.default)
        for node in self.nodes:
            for place in _places(node, self.trial.arguments):
                if place.name in places:
                    places[place.name] = replace(place, default=places[place.name].default)
        return places

    @cached_property
    def numbers(self) -> list[tuple[Place, Any]]:
        """The arguments without tensors that may be changed by themselves, and the values they have."""
        given = self.trial.arguments
        places = [place for place in self.places.values() if not place.is_bound and "Tensor" not in place.type]
        values = [(place, given.get(place.name, place.default)) for place in places]
        return [(place, value) for place, value in values if value is not REQUIRED]

    @cached_property
    def is_careful(self) -> bool:
        """Are inputs to belong together as the sample's do, as a kernel may read memory without looking at sizes?"""
        return not self.trial.is_builtin and _torch.library.torch_op_of(self.trial.name) is None

    def resizable(self, kind: str) -> list[Spot]:
        """The tensors of which this kind of thing may be changed, and can."""
        return [spot for spot in self.spots if is_plain(spot.tensor) and self.variation.allows(kind, spot.argument)]

    def each(self, spots: Iterable[Spot], change: Change) -> Trial | None:
        """The sample with `change` of each of these tensors in its place; None if nothing changes."""
        return self.changed((spot, change) for spot in spots)

    def changed(self, changes: Iterable[tuple[Spot, Change]]) -> Trial | None:
        """The sample with some of its tensors changed, each in its own way; None if nothing changes."""
        changed: dict[int, torch.Tensor] = {}
        for spot, change in changes:
            try:
                with torch.no_grad():
                    new = change(spot.tensor.detach())
            except (RuntimeError, TypeError):  # torch or the device has no such function for this dtype
                continue
            if new is None:
                continue
            if is_symmetric(spot.tensor.detach()) and new.dim() > 1 and new.shape[-1] == new.shape[-2]:
                if is_inexact(new.dtype) and not is_symmetric(new):  # an op of such matrices may read one triangle
                    new = ((new + new.mH) / 2).to(new.dtype)
            if spot.tensor.requires_grad and not new.requires_grad and is_inexact(new.dtype):
                new = new.detach().requires_grad_()
                if not spot.tensor.is_leaf:
                    with torch.enable_grad():
                        new = torch.ops.aten.alias.default(new)
            changed[id(spot.tensor)] = new
        return self.trial.replaced(changed) if changed else None

    def cases(self, spots: Iterable[Spot], change: Change, kind: Kind, label: str) -> Iterator[Case]:
        """The case of `each`, if there is one."""
        trial = self.each(spots, change)
        if trial is not None:
            yield Case(trial, kind, label)

    def without(self, name: str) -> Trial:
        """The sample with an argument left to its default."""
        names = [argument.name for argument in self.trial.schema.positional][: len(self.trial.args)]
        at = names.index(name) if name in names else len(names)
        later = dict(zip(names[at + 1 :], self.trial.args[at + 1 :], strict=False))
        kwargs = {key: value for key, value in (later | self.trial.kwargs).items() if key != name}
        return replace(self.trial, args=self.trial.args[:at], kwargs=kwargs)


def _places(node: Node, given: Mapping[str, Any], *, is_bound: bool = False) -> Iterator[Place]:
    if isinstance(node, Leaf):
        length = node.codec.length if isinstance(node.codec, SequenceCodec) else None
        codec = node.codec
        while isinstance(codec, SequenceCodec):
            codec = codec.item
        choices: dict[int, Any] = {}
        for lowered, value in codec.choices.items():
            choices.setdefault(id(value), lowered)  # a member of an enum may have several names
        if isinstance(codec, EnumCodec) and not choices:
            choices = dict(enumerate(member.value for member in codec.cls))
        yield Place(node.name, node.type, REQUIRED, tuple(choices.values()), length, is_bound)
    elif isinstance(node, Group):
        is_absent = node.given is not None and given.get(node.given.name) is not True
        if node.given is not None:
            yield Place(node.given.name, "bool", is_bound=True)
        for part in node.fields.values():  # those of an object that is not there are None, and stay so
            yield from _places(part, given, is_bound=is_bound or is_absent)
    else:
        for leaf in node.leaves:
            yield Place(leaf.name, leaf.type, is_bound=True)


# Elements


def resized(tensor: torch.Tensor, shape: Sequence[int], seed: int = 0) -> torch.Tensor:
    """A contiguous tensor of this shape, with elements like those of `tensor`; no two alike, of floats but masks."""
    count = math.prod(shape)
    old = wide(tensor.detach().cpu().resolve_conj().resolve_neg().reshape(-1))
    if not old.numel():  # there is none to go by
        old = (torch.arange(7) * 0.125 + 0.25).to(old.dtype) if is_inexact(old.dtype) else old.new_zeros(1)
    new = old.repeat(-(-count // old.numel()))[:count]
    if is_inexact(tensor.dtype) and old.numel() < count:
        among = old.to(torch.complex128 if old.is_complex() else torch.float64)
        is_mask = not old.is_complex() and bool((among == among.round()).all()) and among.unique().numel() <= 2
        if not is_mask and bool(among.isfinite().all()):  # each element lies between two of the old ones
            generator = torch.Generator().manual_seed(seed)
            share = torch.rand(count, generator=generator, dtype=torch.float64) * 0.5
            other = among[torch.randint(among.numel(), (count,), generator=generator)]
            new = (new.to(among.dtype) * (1 - share) + other * share).to(new.dtype)
    new = new.reshape(tuple(shape))
    if len(shape) and not is_inexact(tensor.dtype) and _is_sorted(old):
        new = new.sort(dim=-1).values
    return new.to(tensor.device, tensor.dtype)


def follow(tensor: torch.Tensor, sizes: Mapping[int, int]) -> torch.Tensor:
    """Integers that pointed into, or at the end of, a dimension whose size changes go on doing so."""
    if not is_integer(tensor) or not tensor.numel():
        return tensor
    dtype, tensor = tensor.dtype, wide(tensor)
    top = int(tensor.max())
    if top in sizes and (sizes[top] < top or _is_sorted(tensor.reshape(-1))):  # lengths; offsets
        new = min(sizes[top], torch.iinfo(dtype).max)
        return torch.where(tensor == top, new, tensor).clamp(max=new).to(dtype)
    above = [size for size in sizes if top < size]
    if not above or int(tensor.min()) < 0:
        return tensor.to(dtype)
    return tensor.clamp(max=max(sizes[min(above)] - 1, 0)).to(dtype)


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in a dtype that torch has all functions for, unlike floats of 8 bits and larger unsigned ints."""
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1:
        return tensor.float()
    return tensor.long() if is_integer(tensor) else tensor


def is_inexact(dtype: torch.dtype) -> bool:
    """Is it a dtype of numbers that are not just integers?"""
    return dtype.is_floating_point or dtype.is_complex


def is_symmetric(tensor: torch.Tensor) -> bool:
    """Is it of symmetric, or Hermitian, matrices with several different elements?"""
    if tensor.dim() < 2 or tensor.shape[-1] != tensor.shape[-2] or tensor.shape[-1] < 2 or not tensor.numel():
        return False
    if not is_inexact(tensor.dtype) or tensor.dtype.itemsize == 1 or tensor.layout is not torch.strided:
        return False
    return bool((tensor != tensor.flatten()[0]).any()) and torch.allclose(tensor, tensor.mH, equal_nan=True)


def is_integer(tensor: torch.Tensor) -> bool:
    return not (is_inexact(tensor.dtype) or tensor.dtype is torch.bool)


def _is_sorted(old: torch.Tensor) -> bool:
    return old.numel() > 1 and old.dtype is not torch.bool and bool((old[1:] >= old[:-1]).all())
