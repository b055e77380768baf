"""Inputs derived from samples: other sizes, layouts, dtypes and values of what an op is known to accept.

`derive` makes them, most revealing first. `probe` finds out which the operator accepts. `shrink` makes one that shows a
fault smaller. `search` finds inputs for which the code takes branches that it took for none before.
"""

from __future__ import annotations

from customops.checks.inputs.branches import Branches
from customops.checks.inputs.derive import derive
from customops.checks.inputs.parts import Variation, variation_of
from customops.checks.inputs.probe import Probed, Rejection, probe, search, shrink

__all__ = ["Branches", "Probed", "Rejection", "Variation", "derive", "probe", "search", "shrink", "variation_of"]
