"""Tags of an op, and what `Tag.inplace` and `Tag.out` ask of its schema."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from customops._schema.model import Schema
from customops._torch.schema import Tag, is_tag
from customops.errors import DefinitionError, SchemaError, TagError, brief

Tags = torch.Tag | Sequence[torch.Tag] | None


def normalize_tags(tags: Tags) -> tuple[torch.Tag, ...]:
    """One tag, several or None as a tuple without repetitions."""
    given: Any = () if tags is None else tags
    given = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)
    for tag in given:
        if not is_tag(tag):
            raise DefinitionError(
                "tags must be torch.Tag members",
                argument="tags",
                expected="a torch.Tag, or a list or tuple of them",
                got=brief(tag),
                fix="e.g. tags=torch.Tag.pointwise",
            )
    result = tuple(dict.fromkeys(given))
    if Tag.inplace in result and Tag.out in result:
        raise TagError("torch.Tag.inplace and torch.Tag.out are mutually exclusive", argument="tags")
    return result


def check_tags(schema: Schema, tags: tuple[torch.Tag, ...], **context: str) -> None:
    """Raise SchemaError unless `schema` has the shape its `Tag.inplace` or `Tag.out` promises."""
    problem, outs, returns = None, schema.mutated, [ret.type for ret in schema.returns]
    aliases = [ret.alias for ret in schema.returns]
    if Tag.inplace in tags:
        first = schema.positional[0] if schema.positional else None
        if first is None:
            problem = "torch.Tag.inplace needs a positional argument of type Tensor to write to"
        elif first.type != "Tensor":
            what = f"{first.name!r} is {first.type}"
            problem = f"torch.Tag.inplace: the first positional argument must be a Tensor, {what}"
        elif outs != (first,):
            only = f"the first argument {first.name!r} alone, not {[a.name for a in outs]}"
            problem = f"torch.Tag.inplace: mutates_args must hold {only}"
        elif returns != ["Tensor"] or aliases != [first.alias]:
            problem = (
                f"torch.Tag.inplace: the one return must alias the first argument {first.name!r}: "
                "the return annotation is torch.Tensor, in a manual schema Tensor(a!)"
            )
    elif Tag.out in tags:
        wrong = next((a for a in outs if not a.kwarg_only or a.type != "Tensor"), None)
        if not outs:
            problem = "torch.Tag.out needs at least one mutated argument: name it in mutates_args"
        elif wrong is not None and not wrong.kwarg_only:
            problem = f"torch.Tag.out: the mutated argument {wrong.name!r} must be keyword-only (after the *)"
        elif wrong is not None:
            problem = f"torch.Tag.out only supports Tensor outputs: {wrong.name!r} is {wrong.type}"
        elif returns != ["Tensor"] * len(outs) or aliases != [a.alias for a in outs]:
            names = ", ".join(a.name for a in outs)
            annotation = "torch.Tensor" if len(outs) == 1 else "a tuple of torch.Tensor, one each"
            problem = (
                f"torch.Tag.out: the returns must be the mutated arguments ({names}) in order: the return annotation "
                f"is {annotation}, each aliasing its argument"
            )
    if problem:
        raise SchemaError(problem, got=str(schema), **context)


def tags_of(given: Tags) -> tuple[torch.Tag, ...]:
    """Return the tags of an op, and the tag by which torch.compile may rely on it."""
    return tuple(dict.fromkeys((torch.Tag.pt2_compliant_tag, *normalize_tags(given))))
