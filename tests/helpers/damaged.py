"""A JSON file with one thing wrong: cut short, a bit flipped, another value at one place, or nested too deeply."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

_DEEP = 100_000
_VALUES = (None, True, -1, 3.5, 10**30, "", "x", "cuda:-3", "\ud800", [], [1], [None], {}, {"a": {"b": {"status": 1}}})


def damaged(text: str) -> Iterator[bytes]:
    whole = text.encode()
    for at in range(1, len(whole) - 2):
        yield whole[:at]
        yield whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :]
    yield from (b"[" * _DEEP, b"[" * _DEEP + b"]" * _DEEP, b'{"a":' * _DEEP + b"1" + b"}" * _DEEP, b"\xff", b"\x00")
    for place in _places(json.loads(text)):
        for value in _VALUES:
            changed = json.dumps(_put(json.loads(text), place, value), indent=2, sort_keys=True)
            yield (changed + "\n").encode()


def _places(tree: Any) -> Iterator[tuple[Any, ...]]:
    """The way to each value in nested lists and dicts."""
    yield ()
    for key in tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ():
        yield from ((key, *rest) for rest in _places(tree[key]))


def _put(tree: Any, place: tuple[Any, ...], value: Any) -> Any:
    if not place:
        return value
    tree[place[0]] = _put(tree[place[0]], place[1:], value)
    return tree
