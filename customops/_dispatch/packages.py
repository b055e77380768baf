"""Kernels that installed packages offer for ops of others, by entry points ``mylib.norm.cuda.v2 = pkg:register``."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
from dataclasses import dataclass
from typing import Any

from customops._dispatch import preference
from customops._dispatch.names import first_line

log = logging.getLogger("customops")

GROUP = "customops.kernels"


@dataclass(eq=False)
class Offer:
    """A kernel of a package: what its entry point registers when the device of the op is first used.

    Attributes:
        reported: was it said that it is passed over?
    """

    op: str
    device_type: str
    kernel: str
    entry_point: importlib.metadata.EntryPoint
    reported: bool = False

    @property
    def package(self) -> tuple[str, str]:
        """Name and version."""
        found = self.entry_point.dist
        return ("an unknown package", "") if found is None else (found.name, found.version)

    def is_of_package(self, fn: Any) -> bool:
        """Is a function of the package of the entry point?"""
        packages = (name.partition(".")[0] for name in (getattr(fn, "__module__", None) or "", self.entry_point.module))
        return len({*packages}) == 1

    def load(self) -> str | None:
        """Let it register its kernel; returns why that failed, or None."""
        try:
            loaded = self.entry_point.load()
            if self.entry_point.attr:
                loaded()
        except (Exception, SystemExit) as error:  # of a package that the user's program need not know of
            return f"{type(error).__name__}: {first_line(error)}"
        return None

    def report(self, problem: str) -> None:
        """Say once that it is passed over."""
        if self.reported:
            return
        self.reported = True
        text = "%s: the kernel %s for %s of %s %s is passed over: %s (%s: %s = %s)"
        point = self.entry_point
        log.warning(
            text, self.op, self.kernel, self.device_type, *self.package, problem, GROUP, point.name, point.value
        )


@functools.lru_cache(maxsize=1)
def offers() -> tuple[Offer, ...]:
    """What the installed packages offer. They are looked for once, with the first op; none is loaded."""
    found = []
    for each in importlib.metadata.entry_points(group=GROUP):
        namespace, _, rest = each.name.partition(".")
        op, _, last = rest.rpartition(".")
        op, _, device_type = op.rpartition(".")
        if namespace and op and device_type and last:
            found.append(Offer(f"{namespace}::{op}", device_type, last, each))
            preference.expect(f"{GROUP}: {each.name} of {' '.join(found[-1].package)}", found[-1].op)
        else:
            expected = "the name of an entry point is <namespace>.<op>.<device type>.<kernel>"
            log.warning("%s: %s = %s is passed over: %s", GROUP, each.name, each.value, expected)
    return tuple(found)
