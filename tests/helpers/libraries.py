"""Ops that torch.library defines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class Ops:
    """Defines ops in a namespace, each with a kernel (at `key`), perhaps a fake, and kernels at other keys by name."""

    def __init__(self, ns: str) -> None:
        self.ns = ns
        self.lib = torch.library.Library(ns, "FRAGMENT")

    def __call__(
        self,
        schema: str,
        kernel: Callable[..., Any] | None = None,
        fake: Callable[..., Any] | None = None,
        key: str = "CPU",
        tags: Sequence[torch.Tag] = (),
        **kernels: Callable[..., Any],
    ) -> Any:
        name = schema.partition("(")[0]
        self.lib.define(schema, tags=tags)
        for at, fn in (({key: kernel} if kernel else {}) | kernels).items():
            self.lib.impl(name, fn, at)
        if fake is not None:
            torch.library.register_fake(f"{self.ns}::{name}", fake, lib=self.lib)
        packet, _, overload = name.partition(".")
        return getattr(getattr(getattr(torch.ops, self.ns), packet), overload or "default")
