"""test_pointwise: an op tagged as pointwise computes each element of its results from the elements at that place.

Compilers fuse and split such ops as they like. Here one element of one input is changed: results may change where it is
broadcast to, and nowhere else.
"""

from __future__ import annotations

import torch

from customops.checks._derivatives import named_tensors
from customops.checks._outcome import NotExercised
from customops.checks._runs import attempt, difference, steady_results
from customops.checks._trial import Trial
from customops.checks._variants import are_plain


def check(trial: Trial) -> None:
    if torch.Tag.pointwise not in trial.op.tags or trial.is_builtin:
        raise NotExercised("the operator is not tagged as pointwise")
    trial = trial.detached()
    if not are_plain(trial):
        raise NotExercised("an input is not a plain strided tensor")
    expected = steady_results(trial)
    tried = False
    for _, label, tensor in named_tensors(trial):
        for place in (0, -1) if tensor.is_floating_point() and tensor.numel() > 1 else ():
            at = torch.zeros(tensor.shape, dtype=torch.bool, device=tensor.device)
            at.view(-1)[place] = True
            changed = tensor.where(~at, tensor * 1.5 + 1)
            actual = attempt(trial.map_tensors(lambda _, x, old=tensor, new=changed: new if x is old else x))  # type: ignore[misc]
            for name, after in actual.items() if actual is not None else ():
                before = expected[name]
                try:
                    others = ~at.expand(before.shape)
                except (
                    AttributeError,
                    RuntimeError,
                ):  # it is a number, or of sizes to which the input is not broadcast
                    continue
                if after.shape != before.shape:
                    continue
                tried = True
                found = difference(after[others], before[others], exact=True)
                if found:
                    raise trial.fault(
                        "the operator is tagged as pointwise, and an element of the result depends on other elements",
                        argument=label,
                        expected=f"no change of {name} beside the place of the element that was changed",
                        got=found,
                        fix="leave out torch.Tag.pointwise",
                    )
    if not tried:
        raise NotExercised(
            "no input of floating point has several elements and the sizes of a result, but for broadcast"
        )
