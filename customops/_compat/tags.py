"""Tags of ops, those among them that only newer versions of torch have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

_NAMES = ("inplace", "out")


class _LaterTag:
    """A tag that this torch does not have: customops goes by it, the dispatcher does not get it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<Tag.{self.name}>"

    def __str__(self) -> str:
        return f"Tag.{self.name}"

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (Tag, self.name)


class _Tags:
    """What stands for `torch.Tag` where that lacks some."""

    def __init__(self) -> None:
        for name in _NAMES:
            setattr(self, name, getattr(torch.Tag, name) if _is_here(name) else _LaterTag(name))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.Tag, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _tags, ()


def _tags() -> Any:
    return Tag


def _is_here(name: str) -> bool:
    # not by hasattr: while customops is imported, what a newer torch lacks has a stand-in
    return isinstance(getattr(torch.Tag, name, None), torch.Tag)


if TYPE_CHECKING:
    Tag = torch.Tag
else:
    #: `torch.Tag`, with ``inplace`` and ``out`` on every torch.
    Tag = torch.Tag if all(map(_is_here, _NAMES)) else _Tags()


def is_tag(value: object) -> TypeGuard[torch.Tag]:
    """Is it a tag of torch, or one that stands for a tag of a newer torch?"""
    return isinstance(value, (torch.Tag, _LaterTag))


def for_dispatcher(tags: Iterable[Any]) -> tuple[torch.Tag, ...]:
    """The tags of an op that this torch knows. Before 2.13 inductor finds out variants by another tag."""
    known = (torch.Tag.out_variant if tag is Tag.out and not isinstance(tag, torch.Tag) else tag for tag in tags)
    return tuple(dict.fromkeys(tag for tag in known if isinstance(tag, torch.Tag)))


def of_op(tags: Iterable[Any], overload: Any) -> list[torch.Tag]:
    """The tags that the dispatcher has of an op, and those of `tags` that it cannot have."""
    return [*overload.tags, *(tag for tag in tags if not isinstance(tag, torch.Tag))]
