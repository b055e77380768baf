"""`OpSpec`: what an op is."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from customops._dispatch.callbacks import Fn
from customops._dispatch.devices import DeviceTypes
from customops._dispatch.names import Name
from customops._dispatch.results import CheckPolicy
from customops._schema.model import ALL, Differentiable, Schema
from customops._schema.structure import Signature
from customops._torch.schema import Tag
from customops.errors import location_of


class Options(NamedTuple):
    """How an op is called: what its definition says, until `Registry.configure` says something else."""

    check: CheckPolicy = "always"
    bypass: bool = False
    eager: bool = False
    #: May the code of a graph run the kernel without the dispatcher?
    direct_in_graphs: bool = True

    @property
    def skip_dispatcher(self) -> bool:
        """May calls of the object run the kernel without the dispatcher?"""
        return self.bypass or self.eager


DEFAULTS = Options()


@dataclass(frozen=True)
class OpSpec:
    """What an op is: all that its definition says. An op that is defined anew after its removal has the same one."""

    name: Name
    schema: Schema
    tags: tuple[torch.Tag, ...] = ()
    #: The schema as the user wrote it, which then is what the dispatcher gets.
    text: str | None = None
    #: What the op was defined from. An op without one was defined by its schema alone, or outside customops.
    fn: Fn | None = None
    #: What the function takes and returns, if that is not just what the schema says.
    signature: Signature | None = None
    #: `fn`, as it is called with what the schema says. None: as it is.
    lowered_fn: Fn | None = None
    #: The devices that `fn` is the kernel of.
    device_types: DeviceTypes = None
    options: Options = DEFAULTS
    differentiable: Differentiable = ALL
    #: May compilers trace into `fn`, and run it on tensors without data?
    traceable: bool = False
    #: Arguments that calls of the object leave out: what computes them of the others.
    computed_args: tuple[Any, ...] = ()  # of `_codegen.computed.Computed`
    #: ``file:line`` of the definition.
    source: str = ""

    qualname: str = field(init=False, repr=False, compare=False)
    #: The kernel that comes with the op.
    kernel: Fn | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        vars(self).update(  # the instance is frozen
            qualname=self.name.qualname,
            kernel=self.lowered_fn or self.fn,
        )

    @property
    def place(self) -> str:
        """``file:line`` of the function, else of the definition."""
        return location_of(self.fn) if self.fn is not None else self.source

    @cached_property
    def mutation_only(self) -> OpSpec | None:
        """The variant of an in-place or out op that returns nothing, for functionalization; None for other ops."""
        returns_mutated = Tag.inplace in self.tags or Tag.out in self.tags
        if not returns_mutated or self.fn is None or self.schema.is_view:
            return None
        name = self.name._replace(name=f"{self.name.name}__writes")
        tags = tuple(tag for tag in self.tags if tag not in (Tag.inplace, Tag.out))
        return OpSpec(name, replace(self.schema, returns=()), tags)
