"""Running one check on one op, for the tests of checks that compare values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import customops
from customops.checks import NotExercised
from customops.checks._trial import Trial, resolve
from customops.errors import CheckError

Run = Callable[[Trial], None]


class Finds:
    """Defines ops in a registry, and says what a check makes of them."""

    def __init__(self, check: Run, registry: customops.Registry, ns: str) -> None:
        self.check, self.registry, self.ns, self.count = check, registry, ns, 0

    def define(self, fn: Callable[..., Any], **options: Any) -> Any:
        self.count += 1
        return self.registry.custom_op(f"{self.ns}::op_{self.count}", fn, **{"mutates_args": (), **options})

    def finds(self, op: Any, *args: Any, match: str) -> CheckError:
        with pytest.raises(CheckError, match=match) as caught:
            self.check(Trial(resolve(self._op(op)), args))
        assert caught.value.fix
        return caught.value

    def passes(self, op: Any, *args: Any) -> None:
        self.check(Trial(resolve(self._op(op)), args))

    def has_nothing(self, op: Any, *args: Any, match: str | None = None) -> None:
        with pytest.raises(NotExercised, match=match):
            self.check(Trial(resolve(self._op(op)), args))

    def _op(self, op: Any) -> Any:
        is_op = isinstance(op, (customops.CustomOpDef, torch._ops.OpOverload))
        return op if is_op else self.define(op)
