"""A pytest plugin that puts `customops` in the place of `torch.library` before a package is imported: ``-p swap``.

Each public function that both have stays callable under torch's name, served by `customops`. So a package that says
``torch.library.custom_op`` or ``from torch.library import register_fake`` is run on `customops` as it is.
"""

from __future__ import annotations

import torch.library
import torch.testing._internal.optests as optests

import customops
import customops.testing

#: `Library` and `fallthrough_kernel` are torch's own in both.
swapped = [name for name in customops.__all__ if hasattr(torch.library, name)] + ["opcheck"]
for name in swapped:
    setattr(torch.library, name, getattr(customops, name))
for name in customops.testing.__all__:
    if hasattr(optests, name):
        setattr(optests, name, getattr(customops.testing, name))


def pytest_report_header() -> str:
    return f"customops in the place of torch.library: {', '.join(sorted(set(swapped)))}"
