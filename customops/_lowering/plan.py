"""`Plan`: how an op's signature and its schema relate, and the functions generated from that."""

from __future__ import annotations

from typing import Any

from customops._dispatch.callbacks import Fn
from customops._lowering import source
from customops._schema.cached import cached_property
from customops._schema.codecs import MaybeTensor
from customops._schema.forms import TupleForm
from customops._schema.model import Argument, Schema
from customops._schema.nodes import Group, Node, Parameter, Signature


class Plan:
    """What stands between the signature of an op and its schema."""

    def __init__(self, signature: Signature, schema: Schema, op: str) -> None:
        self.signature, self.schema, self.op = signature, schema, op
        #: The parameters, as `bind_kernel` asks for them.
        self.parameters = Schema(tuple(map(_as_argument, signature.parameters)), ())

    def __repr__(self) -> str:
        return f"<Plan of {self.op}{self.schema}>"

    @property
    def _digest_key(self) -> Any:
        return self.op, self.schema.exact_key

    @cached_property
    def operands(self) -> tuple[Parameter, ...]:
        """The parameters that formulas and vmap rules have an entry for, in their order."""
        positional = [each for each in self.signature.parameters if not each.by_keyword]
        by_keyword = [each for each in self.signature.parameters if each.by_keyword]
        return (*positional, *(each for each in by_keyword if each.node.holds_tensors))

    @cached_property
    def has_keywords(self) -> bool:
        """Are there keyword-only parameters?"""
        return any(each.by_keyword for each in self.signature.parameters)

    @cached_property
    def results(self) -> tuple[Node, ...]:
        """What backward has a gradient for: the fields of a tuple, or what is returned."""
        result = self.signature.result
        if isinstance(result, Group) and isinstance(result.form, TupleForm):
            return tuple(result.fields.values())
        return () if result is None else (result,)

    @cached_property
    def counted(self) -> tuple[str, ...]:
        """The arguments that say how long lists of lists are."""
        leaves = (leaf for each in self.signature.parameters for leaf in each.node.leaves)
        return tuple(leaf.name for leaf in leaves if leaf.counts_tensors)

    @cached_property
    def maybe_tensors(self) -> tuple[int, ...]:
        """The places of returns that are a tensor or None."""
        leaves = self.signature.result.leaves if self.signature.result is not None else ()
        return tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf.codec, MaybeTensor))

    def restored_call(self, /, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with which a function of the signature is called, of lowered ones."""
        values, named = self.restore(*args, **kwargs)
        stars = [each.stars for each in self.signature.parameters if not each.by_keyword]
        positional: list[Any] = []
        for star, value in zip(stars, values, strict=True):
            positional += value if star else (value,)
        for each in self.signature.parameters:
            if each.stars == "**":
                named |= named.pop(each.name)
        return tuple(positional), named

    # Generated functions ----------------------------------------------------------------------------------------

    def call(self, bypass: Fn | None = None) -> Fn:
        """The ``__call__`` of the op's object; `bypass` is that of an op of the schema that bypasses the dispatcher."""
        return source.call(self.signature, self.schema, self.op, bypass)

    @cached_property
    def lower(self) -> Fn:
        """``lower(*args, **kwargs) -> (args, kwargs)``, of a call's arguments those of the schema."""
        return source.lower(self.signature, self.schema, self.op)

    @cached_property
    def restore(self) -> Fn:
        """The way back."""
        return source.restore(self.signature, self.schema, self.op)

    @cached_property
    def restore_result(self) -> Fn:
        return source.restore_result(self.signature, self.schema, self.op)

    def lower_result(self, fn: Fn, role: str) -> Fn:
        return source.lower_result(self.signature, self.schema, self.op, fn, role)


def _as_argument(parameter: Parameter) -> Argument:
    return Argument("", name=parameter.name, default=parameter.default, kwarg_only=parameter.by_keyword)
