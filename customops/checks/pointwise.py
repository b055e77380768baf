"""test_pointwise: an op that is tagged as pointwise computes each element from the elements at its place.

Compilers fuse and split such ops as they like. One element of one input is changed: results may change at the places to
which the element is broadcast, and nowhere else.
"""

from __future__ import annotations

import torch

from customops.checks._outcome import require
from customops.checks._runs import attempt, difference, steady_results
from customops.checks._trial import Trial
from customops.checks._variants import are_plain


def check(trial: Trial) -> None:
    require(torch.Tag.pointwise in trial.op.tags and not trial.is_builtin, "the operator is not tagged as pointwise")
    require(are_plain(trial), "an input is not a plain strided tensor")
    trial = trial.detached()
    expected = steady_results(trial)
    tried = False
    for _, label, tensor in trial.named_tensors:
        for place in (0, -1) if tensor.is_floating_point() and tensor.numel() > 1 else ():
            at = torch.zeros(tensor.shape, dtype=torch.bool, device=tensor.device)
            at.view(-1)[place] = True
            changed = trial.replaced({id(tensor): tensor.where(~at, tensor * 1.5 + 1)})
            for name, after in (attempt(changed) or {}).items():
                before = expected[name]
                try:
                    others = ~at.expand(before.shape)
                except (AttributeError, RuntimeError):  # a number, or of sizes to which the input is not broadcast
                    continue
                if after.shape != before.shape:
                    continue
                tried = True
                if found := difference(after[others], before[others], exact=True):
                    raise trial.fault(
                        "the operator is tagged as pointwise, and an element of the result depends on other elements",
                        argument=label,
                        expected=f"no change of {name} beside the place of the element that was changed",
                        got=found,
                        fix="leave out torch.Tag.pointwise",
                    )
    require(tried, "no input of floating point has several elements and the sizes of a result, but for broadcast")
