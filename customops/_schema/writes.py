"""What an op writes: ``mutates_args``, the marks in the signature, and the returns that are what was written."""

from __future__ import annotations

import collections.abc
import re
from collections.abc import Callable, Iterable
from typing import NoReturn

import torch

from customops._compat.tags import Tag
from customops._schema.arguments import is_part
from customops._schema.model import Argument, Return
from customops._schema.nodes import Node, Parameter
from customops.errors import SchemaError, brief

#: Raises for the function whose signature is read.
Fail = Callable[..., NoReturn]


def mutates_args_names(mutates_args: str | Iterable[str], op: str, place: str | None = None) -> str | tuple[str, ...]:
    """Check `mutates_args`, and return it as "unknown" or as a tuple: it may be an iterator, to be read once.

    Raises:
        SchemaError: it is neither the word nor names.
    """
    if isinstance(mutates_args, str) and mutates_args == "unknown":
        return mutates_args
    problem = "mutates_args must be an iterable of names or the string 'unknown'"
    if isinstance(mutates_args, str):
        fix = f"mutates_args={tuple(re.findall('[^, ]+', mutates_args))}"
        raise SchemaError(f"{problem}, not {mutates_args!r}", op=op, where=place, fix=fix)
    names = tuple(mutates_args) if isinstance(mutates_args, collections.abc.Iterable) else (mutates_args,)
    if not all(isinstance(name, str) for name in names):
        fix = "mutates_args=() for a function that writes to none of its arguments"
        raise SchemaError(problem, op=op, got=brief(mutates_args), where=place, fix=fix)
    return names


def mutated_paths(
    given: str | tuple[str, ...] | None, parameters: tuple[Parameter, ...], fail: Fail
) -> frozenset[str] | None:
    """The names that `mutates_args_names` found, each one of a parameter, or the path of a part of one.

    None stands for "unknown". Nothing was given where annotations alone are to tell.
    """
    if given == "unknown":
        return None
    if given is not None:
        _refuse_other_marks(given, parameters, fail)
    if not given:
        return frozenset()
    names, tensors = frozenset(given), [leaf for each in parameters for leaf in each.node.leaves if leaf.holds_tensors]
    known = {each.name for each in parameters}
    missing = {name for name in names - known if not any(is_part(leaf.path, name) for leaf in tensors)}
    if missing:
        listed = ", ".join(sorted(map(repr, missing)))
        fail(
            f"{{{listed}}} in mutates_args were not found among the parameters",
            got=f"({', '.join(each.name for each in parameters)})",
            fix=f"mutates_args=({tensors[0].path!r},)" if tensors else "mutates_args=()",
        )
    for name in names:
        if not any(is_part(leaf.path, name) for leaf in tensors):
            fail(
                f"parameter {name} is in mutates_args, but only Tensors or collections of Tensors can be mutated",
                fix=f"leave {name} out of mutates_args",
            )
    return names


def _refuse_other_marks(given: Iterable[str], parameters: tuple[Parameter, ...], fail: Fail) -> None:
    """Raise where annotations say that something is written, and ``mutates_args`` something else."""
    tensors = [leaf for each in parameters for leaf in each.node.leaves if leaf.holds_tensors]
    if not any(leaf.is_mutated for leaf in tensors):
        return
    for leaf in tensors:
        if leaf.is_mutated != any(is_part(leaf.path, path) for path in given):
            fail(
                f"mutates_args and the annotations disagree on whether {leaf.path} is written",
                expected=f"{leaf.path} in both, or in none",
                fix="leave mutates_args out",
            )


def implied_tags(
    tags: tuple[torch.Tag, ...], result: Node | None, arguments: tuple[Argument, ...], fail: Fail
) -> tuple[torch.Tag, ...]:
    """The tags with the one that `SameAs` in the annotation of the return stands for."""
    same_as = [leaf.same_as for leaf in (result.leaves if result is not None else ())]
    if not any(same_as):
        return tags
    written = [argument for argument in arguments if argument.is_mutated]
    if same_as != [argument.name for argument in written]:
        fail(
            "SameAs is for an op that returns all that it writes, and nothing else",
            expected=", ".join(f'SameAs("{argument.name}")' for argument in written) or "something that is written",
            got=", ".join("another return" if name is None else f'SameAs("{name}")' for name in same_as),
            fix=_instead_of_same_as(same_as, arguments, written),
        )
    if not _may_be_returned(written, arguments):
        fail(
            "SameAs is for an op that writes to its first argument alone, or to keyword-only ones",
            got=", ".join(argument.name for argument in written),
            fix="-> None" if len(written) > 1 else f"-> None, or make {written[0].name} the first parameter",
        )
    tag = Tag.out if written[0].kwarg_only else Tag.inplace
    return tags if tag in tags else (*tags, tag)


def _instead_of_same_as(same_as: list[str | None], arguments: tuple[Argument, ...], written: list[Argument]) -> str:
    known = {argument.name for argument in arguments if argument.type == "Tensor"}
    name = next((each for each in same_as if each in known), min(known, default="x"))
    if not written:
        return f'{name}: Mut[Tensor], and -> Annotated[Tensor, SameAs("{name}")]'
    if None in same_as:
        return "return only what is new: an op cannot also return what it writes"
    if not _may_be_returned(written, arguments):
        return "-> None"
    types_ = [f'Annotated[Tensor, SameAs("{argument.name}")]' for argument in written]
    return f"-> {types_[0]}" if len(types_) == 1 else f"-> tuple[{', '.join(types_)}]"


def _may_be_returned(written: list[Argument], arguments: tuple[Argument, ...]) -> bool:
    """Are these the first argument alone, or keyword-only ones?"""
    return all(argument.kwarg_only for argument in written) or written == [arguments[0]]


def alias_returns(
    arguments: tuple[Argument, ...], returns: tuple[Return, ...], tags: tuple[torch.Tag, ...]
) -> tuple[Return, ...]:
    """The returns with the aliases that an in-place or out op has; `check_tags` judges the result."""
    targets: list[Argument] = []
    if Tag.inplace in tags:
        targets = [a for a in arguments if not a.kwarg_only][:1]
    elif Tag.out in tags:
        targets = [a for a in arguments if a.is_mutated]
    if len(targets) != len(returns):
        return returns
    return tuple(Return(r.type, target.alias) for r, target in zip(returns, targets, strict=True))
