"""test_layouts: results do not depend on where elements lie.

An input that is transposed, sliced, aligned otherwise, or a conjugate or negative view has the values of a contiguous
tensor: both have to give the same results.
"""

from __future__ import annotations

import itertools

import torch

from customops.checks import _memory
from customops.checks._inputs import as_ordinary, is_ordinary
from customops.checks._outcome import NotExercised, require
from customops.checks._runs import attempt, compare, steady_results
from customops.checks._trial import Trial

#: Operators that read strides, or memory beyond a view, on purpose.
_ABOUT_STRIDES = ("aten::as_strided", "aten::_reshape_alias", "aten::set_", "aten::resize", "prims::as_strided")


def check(trial: Trial) -> None:
    require(not trial.name.startswith(_ABOUT_STRIDES), "the result depends on strides by definition")
    if any(_memory.share_storage(one, other) for one, other in itertools.combinations(trial.distinct, 2)):
        raise NotExercised("tensors of the call share memory")
    trial = trial.detached()
    strided = [(name, tensor) for name, _, tensor in trial.named_tensors if tensor.layout is torch.strided]
    arguments = dict.fromkeys(name for name, tensor in strided if not is_ordinary(tensor))
    require(arguments, "every tensor is contiguous")
    expected = steady_results(
        trial.map_tensors(lambda _, x: x if x.layout is not torch.strided or x.is_quantized else as_ordinary(x))
    )
    actual = attempt(trial)
    if actual is None:
        raise NotExercised("the operator does not take tensors of this layout")
    compare(
        trial,
        actual,
        expected,
        "results depend on the layout of an input: other values than for the same values in contiguous tensors",
        "the kernel takes memory for contiguous: call x.contiguous() first (for an argument that is written, copy "
        "the result back), and make results by x.new_empty(x.shape), since torch.empty_like(x) has the strides of "
        "x; or use x.stride() and x.storage_offset(); see resolve_conj() and resolve_neg() for lazy views",
        argument=", ".join(arguments),
        expected="the values of the call on contiguous tensors",
        ties=True,
        rounding=True,
    )
