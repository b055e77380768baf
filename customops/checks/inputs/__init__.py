"""Inputs derived from samples: other sizes, layouts, dtypes and values of what an op is known to accept.

`derive` makes the inputs, most revealing first. `probe` finds the inputs that the operator accepts. `shrink` makes an
input that shows a fault smaller.
"""

from __future__ import annotations

from customops.checks.inputs.derive import derive
from customops.checks.inputs.parts import Variation, variation_of
from customops.checks.inputs.probe import Probed, Rejection, probe, shrink

__all__ = ["Probed", "Rejection", "Variation", "derive", "probe", "shrink", "variation_of"]
