"""`Variation`: what an op's author said about inputs that are made of the samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from customops._schema.arguments import is_part


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
