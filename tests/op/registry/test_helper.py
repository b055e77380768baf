"""`helper`: what it marks, and what it refuses."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from customops import Registry, helper
from customops.errors import RegistrationError


def double(x: Tensor) -> Tensor:
    return x * 2


class Defines:
    """Defines an op, called in each way."""

    registry: Registry
    name: str

    @helper
    @classmethod
    def of_class(cls) -> Any:
        return cls.registry.custom_op(cls.name, double, mutates_args=())

    @helper
    @staticmethod
    def static() -> Any:
        return Defines.of_class()

    def __call__(self) -> Any:
        return self.of_class()


@pytest.mark.parametrize("call", ["of_class", "static", "__call__"])
def test_the_line_of_the_caller_counts(registry: Registry, ns: str, call: str) -> None:
    Defines.registry, Defines.name = registry, f"{ns}::f"
    made = helper(Defines())
    op, line = getattr(made, call)(), sys._getframe().f_lineno
    assert op.source == f"{__file__}:{line}"


@pytest.mark.parametrize("wrong", [5, None, print, Tensor, torch.sin], ids=["int", "None", "print", "class", "sin"])
def test_what_is_no_function(wrong: Any) -> None:
    with pytest.raises(RegistrationError, match="helper marks a function written in Python") as caught:
        helper(wrong)
    assert __file__ in str(caught.value)
