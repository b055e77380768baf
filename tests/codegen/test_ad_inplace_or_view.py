"""Ops that write, called in inference mode: the first function of ours that a call gets to is at ADInplaceOrView."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from customops import Registry


@pytest.fixture
def add(registry: Registry, ns: str) -> Any:
    def add(x: Tensor, y: Tensor, by: float = 2.0, sizes: list[int] = [1, 2]) -> None:  # noqa: B006
        assert sizes == [1, 2]
        sizes.append(3)
        x.numpy()[:] += y.numpy() * by

    return registry.custom_op(f"{ns}::add", add, mutates_args={"x"})


def frames(op: Any, *args: Any, **kwargs: Any) -> list[str]:
    """The generated functions that a call runs."""
    names: list[str] = []

    def profile(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith("<customops"):
            names.append(frame.f_code.co_name)

    sys.setprofile(profile)
    try:
        op(*args, **kwargs)
    finally:
        sys.setprofile(None)
    return names


def test_the_kernel_is_called_directly(add: Any) -> None:
    x, y = torch.zeros(2), torch.ones(2)
    with torch.inference_mode():
        for i in range(1, 4):
            add(x, y)
            add(x=x, y=y, by=1.0)
            assert (x._version, x.tolist()) == (2 * i, [3 * i, 3 * i])
        assert frames(add, x, y) == ["ad_inplace_or_view"]
        assert frames(add, x, y + 1, by=1.0) == ["ad_inplace_or_view"]
        assert frames(add, torch.zeros(2), y * 1) == ["kernel"]


def test_writes_are_seen_by_backward(add: Any) -> None:
    x = torch.ones(2, requires_grad=True) * 2
    z = (x * x).sum()
    with torch.inference_mode():
        add(x.detach(), torch.ones(2))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.backward()


def test_modes_see_the_version_from_before(add: Any) -> None:
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is add._opoverload:
                versions.append(args[0]._version)
            return func(*args, **(kwargs or {}))

    x, versions = torch.zeros(2), list[int]()
    with torch.inference_mode():
        add(x, torch.ones(2))
        with Mode():
            add(x, torch.ones(2))
    assert (versions, x._version, x.tolist()) == ([1], 2, [4, 4])


def test_a_kernel_registered_later_counts(add: Any) -> None:
    def erase(x: Tensor, y: Tensor, by: float, sizes: list[int]) -> None:
        x.zero_()

    x, y = torch.zeros(2), torch.ones(2)
    with torch.inference_mode():
        add(x, y)
        add.register_kernel("cpu", erase)
        add(x, y)
    assert x.tolist() == [0, 0]
