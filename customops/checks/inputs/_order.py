"""The order in which inputs are tried."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from customops.checks._case import Case


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
