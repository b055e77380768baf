"""``customops bench``: what a call of each op costs, and where its time goes."""

from __future__ import annotations

import argparse
import itertools
import json
import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from customops import Library, _torch
from customops._cli.screen import FINE, NOTHING, say, wrapped
from customops._cli.targets import TARGET_HELP, Op, ops_of, trace
from customops._describe.render import in_words, outlined, seconds_per_call, table, width_of_screen
from customops._schema.defaults import filler
from customops._schema.model import REQUIRED
from customops._torch.trees import tensors_in
from customops.checks._trial import Trial

_number = itertools.count()


@dataclass(frozen=True)
class Cost:
    """The seconds of a call of one op, on one sample."""

    op: str
    sample: str = ""
    call: float = 0.0  #: through the op's object, with nothing to differentiate
    kernel: float | None = None  #: the user's function alone
    bare: float | None = None  #: the same function in an op of `torch.library.Library` without checks or rules
    with_grad: float | None = None  #: a call that autograd records; None for an op that has no backward
    problem: str = ""  #: why there are no figures

    @property
    def dispatch(self) -> float | None:
        """What of a call is not the kernel's."""
        return None if self.kernel is None else max(self.call - self.kernel, 0.0)


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="time calls of ops: the kernel, what is around it, and a bare registration",
        description="Time a call of each op on its samples. kernel: the function alone; dispatch: the rest of the "
        "call; bare call: the same function in an op of torch.library.Library without checks or rules; with grad: a "
        "call that autograd records.",
        epilog="Exit status: 0, or 2 if nothing could be measured.",
    )
    parser.add_argument("targets", nargs="+", metavar="TARGET", help=TARGET_HELP)
    samples = "the first N samples of each op; default: 1"
    parser.add_argument("--samples", type=int, default=1, metavar="N", help=samples)
    parser.add_argument("--seconds", type=float, default=0.1, metavar="S", help="for each figure; default: 0.1")
    parser.add_argument("--json", action="store_true", help="print a list of objects; times in seconds")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    if options.samples < 1:
        parser.error(f"--samples {options.samples}: at least 1")
    if not 0 < options.seconds < math.inf:
        parser.error(f"--seconds {options.seconds}: more than 0")
    ops = ops_of(options.targets)
    costs = [cost for op in ops for cost in costs_of(op, options.samples, options.seconds)]
    measured = [cost for cost in costs if not cost.problem]
    if options.json:
        say(json.dumps([asdict(cost) | {"dispatch": cost.dispatch} for cost in costs], indent=2))
        return FINE if measured else NOTHING
    rows, width = [], width_of_screen()
    for cost in measured:
        times = (cost.call, cost.kernel, cost.dispatch, cost.bare, cost.with_grad)
        rows.append((cost.op, *("-" if each is None else in_words(each) for each in times), cost.sample))
    if rows:
        head = ("op", "call", "kernel", "dispatch", "bare call", "with grad", "sample")
        say(table(rows, head, width, right=(1, 2, 3, 4, 5)))
    for cost in costs:
        if cost.problem:
            say(wrapped(f"{cost.op}: {cost.problem}", width))
    return FINE if measured else NOTHING


def costs_of(op: Op, samples: int, seconds: float) -> list[Cost]:
    """The costs of an op on its first samples."""
    if op._samples is None:
        return [Cost(op._qualname, problem=f"no samples; attach some with @{op.__name__}.register_samples")]
    try:
        return [_cost_of(op, each.args, each.kwargs, seconds) for each in itertools.islice(op.samples(), samples)]
    except Exception as error:
        return [Cost(op._qualname, problem=f"it could not be measured\n{trace(error)}")]


def _cost_of(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], seconds: float) -> Cost:
    args, kwargs = _torch.trees.tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, (args, kwargs))
    lowered = Trial(op._opoverload, *op.lower(*args, **kwargs))
    sample = ", ".join(f"{name}: {outlined(value)}" for name, value in lowered.arguments.items())
    call = seconds_per_call(lambda: op(*args, **kwargs), seconds)
    kernel, bare = _without_op(op, lowered, seconds)
    cost = Cost(op._qualname, sample, call, kernel, bare)
    backward = op.describe().rule("backward")
    if backward is None or backward.origin == "missing" or op.schema.mutated:
        return cost

    def leaf(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex()):
            return value.detach().requires_grad_()
        return value

    args, kwargs = _torch.trees.tree_map(leaf, (args, kwargs))
    if not any(tensor.requires_grad for tensor in tensors_in([*args, *kwargs.values()])):
        return cost
    return replace(cost, with_grad=seconds_per_call(lambda: op(*args, **kwargs), seconds))


def _without_op(op: Op, call: Trial, seconds: float) -> tuple[float | None, float | None]:
    """The times of the kernel alone, and of a bare op around it; None if it is not a kernel of customops."""
    tensors, fill = call.tensors, filler(op.schema)
    key = _torch.dispatcher.device_key(tensors[0].device.type) if tensors else "CompositeExplicitAutograd"
    current = op._definition.kernel_on(key)
    if current is None:
        return None, None
    fn = current.registered
    args, kwargs = fill(call.args, call.kwargs) if fill is not None else (call.args, call.kwargs)
    with torch.no_grad():
        kernel = seconds_per_call(lambda: fn(*args, **kwargs), seconds)
    # A default would not be passed on, and the kernel may have none.
    required = replace(op.schema, arguments=tuple(replace(a, default=REQUIRED) for a in op.schema.arguments))
    library = Library(f"customops_bench_{next(_number)}", "FRAGMENT")
    try:
        library.define(f"bare{required}")
        library.impl("bare", fn, "CompositeExplicitAutograd")
        bare = getattr(torch.ops, library.ns).bare
        return kernel, seconds_per_call(lambda: bare(*args, **kwargs), seconds)
    finally:
        _torch.library.destroy_library(library)
        _torch.library.forget(library.ns)
