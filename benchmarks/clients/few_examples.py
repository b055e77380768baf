"""A pytest plugin: hypothesis tries a few examples of each test, the same ones in each run (``-p few_examples``)."""

from __future__ import annotations

from typing import Any

import hypothesis

MOST = 5

_init = hypothesis.settings.__init__


def _with_few(self: Any, *args: Any, **kwargs: Any) -> None:
    given = kwargs.get("max_examples", MOST)
    kwargs["max_examples"] = min(given, MOST) if isinstance(given, int) else MOST
    kwargs.pop("verbosity", None)
    _init(self, *args, **kwargs)


hypothesis.settings.__init__ = _with_few  # type: ignore[method-assign]
