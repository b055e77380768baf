"""test_shapes: a line of shapes says what the operator does.

The results have the shapes of the line. Along a dimension that is said to be parallel, the results for two parts of the
inputs are the two parts of the results; for one that is reduced, their sum is the whole.
"""

from __future__ import annotations

from typing import Any

import torch

from customops._dispatch.callbacks import completer
from customops.checks._inputs import tensors_in
from customops.checks._outcome import require
from customops.checks._runs import attempt, difference, steady_results
from customops.checks._trial import Trial


def check(trial: Trial) -> None:
    shapes: Any = trial.custom_op._rules.shapes if trial.custom_op is not None else None
    require(shapes is not None, "the operator has no line of shapes")
    trial = trial.detached()
    results = list(steady_results(trial).values())[: len(trial.schema.returns)]
    made = tensors_in(results)
    expected = shapes.expected(*completer(trial.schema)(trial.args, trial.kwargs))
    for i, (value, shape) in enumerate(zip(made, expected, strict=False)):
        got = tuple(value.shape)
        if len(got) != len(shape) or any(size not in (None, own) for own, size in zip(got, shape, strict=True)):
            raise trial.fault(
                "the line of shapes says another shape than the operator returns",
                f"{got}, for result {i}",
                "correct the line, or the kernel",
                expected=f"{tuple('?' if size is None else size for size in shape)}, by {shapes.said}",
            )
    if shapes.line is not None:
        arguments = {argument.name: argument for argument in trial.schema.arguments}
        tensors = [(arguments[name], tensor.dim()) for name, _, tensor in trial.named_tensors]
        for outputs, inputs in shapes.shardings(tensors):
            _check_parts(trial, made, outputs, inputs)


def _check_parts(trial: Trial, whole: list[torch.Tensor], outputs: list[Any], inputs: list[Any]) -> None:
    """Compare with the results of two parts; a dimension of one element has no parts."""
    sizes = {x.shape[dim] for x, dim in zip(trial.tensors, inputs, strict=True) if dim is not None}
    if len(sizes) != 1 or min(sizes) < 2:
        return
    (size,) = sizes
    found = []
    for start, length in ((0, size // 2), (size // 2, size - size // 2)):
        pairs = zip(trial.tensors, inputs, strict=True)
        parts = {id(x): x.narrow(dim, start, length).clone() for x, dim in pairs if dim is not None}
        part = attempt(trial.replaced(parts))
        if part is None:
            return
        found.append(tensors_in(list(part.values())[: len(trial.schema.returns)]))
    for i, (dim, value, one, other) in enumerate(zip(outputs, whole, *found, strict=False)):
        joined = one + other if dim == "sum" else one if dim is None else torch.cat([one, other], dim)
        wide = value.dtype in (torch.float64, torch.complex128) or not value.is_floating_point()
        if (differs := difference(joined, value, rtol=1e-5 if wide else 2e-2)) is not None:
            names = [name for name, _, _ in trial.named_tensors]
            split = ", ".join(f"{name} along {d}" for name, d in zip(names, inputs, strict=True) if d is not None)
            raise trial.fault(
                "a dimension of the line of shapes is not "
                + ("reduced by a sum" if dim == "sum" else "computed independently"),
                f"result {i}: {differs}",
                f"leave it out of {'reduces' if dim == 'sum' else 'parallel'}=",
                expected=f"the result, of the results for two parts of {split}",
            )
