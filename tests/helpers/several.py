"""An op with several kernels that write down which of them ran."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from customops import Registry


class Several:
    """The op ``f(x, by=2.0)``, which multiplies. What its kernels, and its function, run is in `ran`."""

    def __init__(self, registry: Registry, qualname: str, **options: Any) -> None:
        self.ran: list[str] = []
        options = {"mutates_args": (), "reference": scale} | options
        self.op: Any = registry.custom_op(qualname, self._typed("default"), **options)
        if options["reference"] is None:
            self.op.register_fake(lambda x, by: torch.empty_like(x))

    def kernel(self, name: str) -> Callable[..., Any]:
        def run(x: Tensor, by: float) -> Tensor:
            self.ran.append(name)
            return x * by

        return run

    def _typed(self, name: str) -> Callable[..., Any]:
        def run(x: Tensor, by: float = 2.0) -> Tensor:
            self.ran.append(name)
            return x * by

        return run

    def add(self, name: str, when: Any = None, device: Any = "cpu", **options: Any) -> None:
        self.op.register_kernel(device, self.kernel(name), name=name, when=when, **options)

    def runs(self, *args: Any, call: Any = None, **kwargs: Any) -> str:
        """Call the op, and return which kernels ran; "" for the reference, which says nothing."""
        self.ran.clear()
        result = (call or self.op)(*args, **kwargs)
        if call is None:
            torch.testing.assert_close(result, args[0] * (args[1] if len(args) > 1 else kwargs.get("by", 2.0)))
        return " ".join(self.ran)


def scale(x: Tensor, by: float = 2.0) -> Tensor:
    return x * by


def up_to(size: int) -> Callable[[Tensor], bool | str]:
    """A predicate: the last dimension has at most so many elements."""

    def fits(x: Tensor) -> bool | str:
        return x.shape[-1] <= size or f"rows of {size} elements at most"

    return fits
