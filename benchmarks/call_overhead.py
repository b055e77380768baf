"""What a call of an op costs, and what defining one costs, next to the ways torch offers.

A case is one statement, timed for each contender with the same kernel function and the same arguments:

    customops   customops.custom_op
    custom_op   torch.library.custom_op
    Library     torch.library.Library: define and impl by hand, nothing is checked
    Function    torch.autograd.Function, no op at all; where gradients are timed

In rows with "bypass" in their names ours is customops.custom_op(..., bypass=True). In those with "eager" it is
custom_op(..., eager=True), and "Function" the Python function by itself; in those with "raw" it is
custom_op(..., kernel_calls_torch=False).

In rows that begin with "as", ours is a helper of examples/migrate, and "Library" or "custom_op" is what the library
that has such a helper does by hand (benchmarks/by_hand.py); for quack that goes past the dispatcher, too.

In the rows "from_tvm_ffi", ours calls the wrapped function of TVM-FFI, and "Function" the function itself: each in an
op with bypass=True, and without an op. They need tvm_ffi.

In the rows of Triton, `customops` and `custom_op` stand for the ``triton_op`` of each. They need Triton, and run its
interpreter; without a launch, what is left is the way to the kernel.

Contenders take turns, so that what disturbs the machine disturbs all of them; a ratio is that of two medians. The
kernels do next to nothing, on tensors of four elements: what is measured is the way to them and back.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import platform
import statistics
import time
import timeit
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

import customops
from customops import Tag

Fn = Callable[..., Any]

OURS = "customops"
RIVALS = ("custom_op", "Library", "Function")
NAMESPACES = {OURS: "bench_customops", "custom_op": "bench_custom_op", "Library": "bench_library"}


# Kernels --------------------------------------------------------------------------------------------------------


def plus(x: Tensor, y: Tensor, by: float) -> Tensor:
    return x + y  # the number is only passed


def add_to(x: Tensor, y: Tensor) -> None:
    x.add_(y)


def add_(x: Tensor, y: Tensor) -> Tensor:
    return x.add_(y)


def add_out(x: Tensor, y: Tensor, *, out: Tensor) -> Tensor:
    return torch.add(x, y, out=out)


def plus_out(x: Tensor, y: Tensor, by: float, *, out: Tensor) -> Tensor:
    return torch.add(x, y, out=out)


def many(
    a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor, f: Tensor, g: Tensor, h: Tensor, i: Tensor, j: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return a.add(b), c.add(d), e.add(f)


def add_each(xs: list[Tensor], y: Tensor) -> list[Tensor]:
    return [x.add(y) for x in xs]


def with_defaults(x: Tensor, by: float = 1.0, n: int = 2, *, flag: bool = True, name: str = "name") -> Tensor:
    return x.mul(by)


def served(x: Tensor, y: Tensor) -> None:
    """As a kernel in another language: nothing of torch is called."""


def served_defaults(x: Tensor, y: Tensor, eps: float = 1e-5, n: int = 2, flag: bool = False) -> None: ...


def served_lists(xs: list[Tensor], y: Tensor, sizes: list[int], scale: float) -> None: ...


def served_several(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x.detach(), y.detach()


def served_list(xs: list[Tensor], y: Tensor) -> list[Tensor]:
    return [x.detach() for x in xs]


@dataclass(frozen=True)
class Kernel:
    """A kernel, and what the contenders have to be told of it."""

    fn: Fn
    schema: str
    mutates: tuple[str, ...] = ()
    tags: tuple[torch.Tag, ...] = ()
    #: In rows of what a call costs, not what the kernel or its check does.
    check: str = "always"


PLUS = Kernel(plus, "(Tensor x, Tensor y, float by) -> Tensor")
ADD_TO = Kernel(add_to, "(Tensor(a!) x, Tensor y) -> ()", ("x",))
ADD_ = Kernel(add_, "(Tensor(a!) x, Tensor y) -> Tensor(a!)", ("x",), (Tag.inplace,))
ADD_OUT = Kernel(add_out, "(Tensor x, Tensor y, *, Tensor(a!) out) -> Tensor(a!)", ("out",), (Tag.out,))
PLUS_OUT = Kernel(
    plus_out,
    "(Tensor x, Tensor y, float by, *, Tensor(a!) out) -> Tensor(a!)",
    ("out",),
    (Tag.out,),
)
MANY = Kernel(many, f"({', '.join(f'Tensor {name}' for name in 'abcdefghij')}) -> (Tensor, Tensor, Tensor)")
ADD_EACH = Kernel(add_each, "(Tensor[] xs, Tensor y) -> Tensor[]")
WITH_DEFAULTS = Kernel(
    with_defaults, '(Tensor x, float by=1.0, SymInt n=2, *, bool flag=True, str name="name") -> Tensor'
)
SERVED = Kernel(served, "(Tensor(a!) x, Tensor y) -> ()", ("x",))
SERVED_DEFAULTS = Kernel(
    served_defaults, "(Tensor(a!) x, Tensor y, float eps=1e-05, SymInt n=2, bool flag=False) -> ()", ("x",)
)
SERVED_LISTS = Kernel(served_lists, "(Tensor(a!)[] xs, Tensor y, SymInt[] sizes, float scale) -> ()", ("xs",))
SERVED_SEVERAL = Kernel(served_several, "(Tensor x, Tensor y) -> (Tensor, Tensor)", check="never")
SERVED_LIST = Kernel(served_list, "(Tensor[] xs, Tensor y) -> Tensor[]", check="never")


# Contenders -----------------------------------------------------------------------------------------------------

#: Libraries made by hand. Nothing that is defined here is removed again: what that costs is not the question.
LIBRARIES: list[Library] = []


def define_ours(name: str, kernel: Kernel, bypass: bool = False, **more: Any) -> Fn:
    name = f"{NAMESPACES[OURS]}{'_bypass' * bypass}::{name}"
    options: dict[str, Any] = {"tags": kernel.tags, "check": kernel.check, "bypass": bypass, **more}
    return customops.custom_op(name, kernel.fn, mutates_args=kernel.mutates, **options)


def define_custom_op(name: str, kernel: Kernel) -> Fn:
    name = f"{NAMESPACES['custom_op']}::{name}"
    return torch.library.custom_op(name, kernel.fn, mutates_args=kernel.mutates, tags=kernel.tags)


def define_library(name: str, kernel: Kernel) -> Fn:
    library = Library(NAMESPACES["Library"], "FRAGMENT")
    library.define(name + kernel.schema, tags=kernel.tags)
    library.impl(name, kernel.fn, "CompositeExplicitAutograd")
    LIBRARIES.append(library)
    return getattr(getattr(torch.ops, NAMESPACES["Library"]), name).default


NAMES = map("op_{}".format, itertools.count())
DEFINE: dict[str, Fn] = {OURS: define_ours, "custom_op": define_custom_op, "Library": define_library}


def defined(kernel: Kernel, name: str | None = None) -> dict[str, Any]:
    return {contender: define(name or kernel.fn.__name__, kernel) for contender, define in DEFINE.items()}


def packets(name: str) -> dict[str, Fn]:
    return {contender: getattr(getattr(torch.ops, namespace), name) for contender, namespace in NAMESPACES.items()}


def with_library(kernel: Kernel, bypass: bool, **options: Any) -> dict[str, Fn]:
    """Ours, and a bare op."""
    name = f"{kernel.fn.__name__}_{next(NAMES)}"
    return {OURS: define_ours(name, kernel, bypass, **options), "Library": define_library(name, kernel)}


# Gradients ------------------------------------------------------------------------------------------------------


def keep_factor(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
    ctx.by = inputs[2]


def plus_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    return grad, grad, None


class Plus(torch.autograd.Function):
    """The kernel and its gradient without an op. (With a setup_context of its own, apply would be much slower.)"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, by: float) -> Tensor:
        ctx.by = by
        return plus(x, y, by)

    backward = staticmethod(plus_backward)


class PlusOp(Plus):
    """What goes to the Autograd key of an op that is defined by hand; `op` is set to it."""

    op: Fn

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, by: float) -> Tensor:
        ctx.by = by
        with torch._C._AutoDispatchBelowAutograd():
            return PlusOp.op(x, y, by)


def differentiable() -> dict[str, Fn]:
    ops = defined(PLUS, "plus_with_gradient")
    for contender in (OURS, "custom_op"):
        ops[contender].register_autograd(plus_backward, setup_context=keep_factor)
    PlusOp.op = ops["Library"]
    LIBRARIES[-1].impl("plus_with_gradient", PlusOp.apply, "Autograd")
    return ops | {"Function": Plus.apply}


# Compiled -------------------------------------------------------------------------------------------------------


def in_a_graph() -> dict[str, Fn]:
    """Ten calls in one graph of inductor, which keeps them apart."""
    ops = defined(PLUS, "plus_in_a_graph")
    for contender in (OURS, "custom_op"):
        ops[contender].register_fake(lambda x, y, by: torch.empty_like(x))
    LIBRARIES[-1]._register_fake("plus_in_a_graph", lambda x, y, by: torch.empty_like(x))
    return {contender: torch.compile(ten_times(op), fullgraph=True, dynamic=False) for contender, op in ops.items()}


def ten_times(op: Fn) -> Fn:
    def ten(x: Tensor, y: Tensor) -> Tensor:
        for _ in range(10):
            x = op(x, y, 2.0)
        return x

    return ten


def with_out_variant() -> tuple[dict[str, Fn], dict[str, Fn]]:
    """Ops with an out variant: that variant, and ten calls of the op in a graph, which inductor makes it of."""
    ops = {contender: define("plus_with_out", PLUS) for contender, define in DEFINE.items()}
    for contender in (OURS, "custom_op"):
        ops[contender].register_fake(lambda x, y, by: torch.empty_like(x))
    LIBRARIES[-1]._register_fake("plus_with_out", lambda x, y, by: torch.empty_like(x))
    ops[OURS].register_out(plus_out)
    LIBRARIES[-1].define(f"plus_with_out.out{PLUS_OUT.schema}", tags=PLUS_OUT.tags)
    LIBRARIES[-1].impl("plus_with_out.out", plus_out, "CompositeExplicitAutograd")
    variants = {OURS: ops[OURS].out, "Library": torch.ops.bench_library.plus_with_out.out}
    variants["custom_op"] = define_custom_op("plus_out", PLUS_OUT)
    graphs = {contender: ten_times(op) for contender, op in ops.items() if contender != "Library"}  # its call is wrong
    return variants, {name: torch.compile(ten, fullgraph=True, dynamic=False) for name, ten in graphs.items()}


# Cases ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One statement, in which `f` stands for each contender in turn."""

    name: str
    statement: str
    contenders: dict[str, Fn]
    requires_grad: bool = False
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    calls: int = 200  #: in one round
    then: str = ""  #: appended to the statement where results are compared
    #: Where tensors are made; None: in `context`.
    made_in: Callable[[], contextlib.AbstractContextManager[Any]] | None = None

    def variables(self, contender: str) -> dict[str, Any]:
        with (self.made_in or self.context)():
            tensors = {name: torch.ones(4) for name in ("y", "out", "grad_out")}
            x = torch.arange(1.0, 5.0, requires_grad=self.requires_grad)
        others = {"grad": torch.autograd.grad, "kernel": PLUS, "names": NAMES}
        return {"f": self.contenders[contender], "x": x, **tensors, **others}

    def outcome(self, contender: str) -> tuple[Any, list[Tensor]]:
        """What the statement returns, and what it makes of the tensors it is given."""
        variables = self.variables(contender)
        with self.context():
            result = eval(self.statement + self.then, variables)
        return result, [value for value in variables.values() if isinstance(value, Tensor)]

    def verify(self) -> None:
        """Raise AssertionError unless the statement does the same for all contenders, each time."""
        expected, *others = (self.outcome(contender) for contender in [*self.contenders] * 2)
        for other in others:
            torch.testing.assert_close(other, expected, rtol=0, atol=0)


#: Forms of a call of an op that writes, as programs that serve models make them.
FORMS: dict[str, tuple[str, Kernel]] = {
    "": ("f(x, y)", SERVED),
    ", by keyword": ("f(x=x, y=y)", SERVED),
    ", defaults": ("f(x, y)", SERVED_DEFAULTS),
    ", some by keyword": ("f(x, y, n=3, flag=True)", SERVED_DEFAULTS),
}

#: What a call is made in, and where its tensors are from.
WHERE: dict[str, tuple[Fn, Fn]] = {
    "grad mode": (contextlib.nullcontext, contextlib.nullcontext),
    "no_grad": (torch.no_grad, contextlib.nullcontext),
    "inference": (torch.inference_mode, contextlib.nullcontext),
    "inference, its own": (torch.inference_mode, torch.inference_mode),
}


def serving() -> list[Case]:
    return [
        Case(
            f"{place}{form}{', raw' * raw}{', bypass' * bypass}",
            statement,
            with_library(kernel, bypass, kernel_calls_torch=not raw),
            False,
            context,
            made_in=made,
        )
        for bypass in (False, True)
        for raw in (False, True)
        for place, (context, made) in WHERE.items()
        for form, (statement, kernel) in FORMS.items()
        if not (raw and form)
    ]


def validating() -> list[Case]:
    """Calls whose shapes are compared with a line: to be compared with the row ``no_grad``."""
    lines = {"shapes": "n, n ->", "shapes, any batch": "*batch n, *batch n ->"}
    return [
        Case(f"no_grad, {name}", "f(x, y)", with_library(SERVED, False, shapes=line), context=torch.no_grad)
        for name, line in lines.items()
    ]


def bypassing() -> list[Case]:
    """Other kinds of arguments and results."""
    forms = {
        "one number": ("f(x, y, 2.0)", PLUS),
        "lists, numbers": ("f([x, y], out, [2, 3], 2)", SERVED_LISTS),
        "several returns": ("f(x, y)", SERVED_SEVERAL),
        "returns a list": ("f([x, y], out)", SERVED_LIST),
    }
    return [
        Case(f"{name}, bypass", statement, with_library(kernel, True), False, torch.no_grad)
        for name, (statement, kernel) in forms.items()
    ]


def eagerly() -> list[Case]:
    forms = {"one number": ("f(x, y, 2.0)", PLUS), "mutates": ("f(x, y)", SERVED)}
    return [
        Case(f"{name}, eager", statement, {**beside, "Function": kernel.fn}, False, torch.no_grad)
        for name, (statement, kernel) in forms.items()
        for beside in [with_library(kernel, False) | {OURS: define_ours(next(NAMES), kernel, eager=True)}]
    ]


def cases() -> list[Case]:
    plain, with_gradient = defined(PLUS), differentiable()
    out_variant, with_out_in_a_graph = with_out_variant()
    return [
        Case("no gradient", "f(x, y, 2.0)", plain),
        Case("no gradient, torch.ops", "f(x, y, 2.0)", packets("plus")),
        Case("inference mode", "f(x, y, 2.0)", plain, context=torch.inference_mode),
        Case("forward", "f(x, y, 2.0)", with_gradient, requires_grad=True),
        Case("forward and backward", "grad(f(x, y, 2.0), x, grad_out)", with_gradient, requires_grad=True),
        Case("mutates, returns None", "f(x, y)", defined(ADD_TO)),
        Case("in-place", "f(x, y)", defined(ADD_)),
        Case("out=", "f(x, y, out=out)", defined(ADD_OUT)),
        Case("out variant", "f(x, y, 2.0, out=out)", out_variant),
        Case("10 inputs, 3 outputs", "f(x, y, x, y, x, y, x, y, x, y)", defined(MANY)),
        Case("lists of tensors", "f([x, y, x, y], y)", defined(ADD_EACH)),
        Case("defaults, by keyword", "f(x, 2.0, flag=False)", defined(WITH_DEFAULTS)),
        Case("graph direct", "f(x, y)", in_a_graph(), context=torch.no_grad, calls=40),
        *triton_cases(),
        Case("the same, out variant", "f(x, y)", with_out_in_a_graph, context=torch.no_grad, calls=40),
        Case("defining an op", "f(next(names), kernel)", DEFINE, calls=1, then="(x, y, 2.0)"),
        Case("defining and calling", "f(next(names), kernel)(x, y, 2.0)", DEFINE, calls=1),
        *serving(),
        *validating(),
        *bypassing(),
        *eagerly(),
        *(Case(name, "f(x, y)", rivals, context=torch.no_grad) for name, rivals in migrated()),
        *wrapping(),
    ]


def wrapping() -> list[Case]:
    if importlib.util.find_spec("tvm_ffi") is None:
        return []
    import tvm_ffi  # noqa: PLC0415 (the other rows do without it)

    function = tvm_ffi.get_global_func("testing.nop")
    alone = {OURS: customops.from_tvm_ffi(function), "Function": function}
    in_ops = {name: define_ours(next(NAMES), calling(fn), bypass=True) for name, fn in alone.items()}
    return [
        Case(f"from_tvm_ffi{place}", "f(x, y, out)", rivals, context=torch.no_grad)
        for place, rivals in {"": alone, ", in an op": in_ops}.items()
    ]


def calling(fn: Fn) -> Kernel:
    def called(x: Tensor, y: Tensor, out: Tensor) -> None:
        fn(x, y, out)

    return Kernel(called, "(Tensor x, Tensor y, Tensor(a!) out) -> ()", ("out",))


def triton_cases() -> list[Case]:
    if importlib.util.find_spec("triton") is None:
        return []
    from triton_row import contenders  # noqa: PLC0415 (the other rows do without it)

    return [
        Case("Triton, interpreted", "f(x, y)", contenders(1), context=torch.no_grad, calls=2),
        Case("Triton, no launch", "f(x, y)", contenders(0), context=torch.no_grad),
    ]


def migrated() -> Iterable[tuple[str, dict[str, Fn]]]:
    from migrate_rows import contenders  # noqa: PLC0415 (it loads the examples)

    return contenders().items()


# Timing ---------------------------------------------------------------------------------------------------------


class Times:
    """Microseconds of one case: for each contender, one number a round."""

    def __init__(self, case: str, rounds: dict[str, list[float]]) -> None:
        self.case = case
        self.rounds = rounds

    def median(self, contender: str) -> float:
        return statistics.median(self.rounds[contender])

    def spread(self, contender: str) -> float:
        """Half the distance of the quartiles, in percent of the median."""
        low, _, high = statistics.quantiles(self.rounds[contender], n=4)
        return 50 * (high - low) / self.median(contender)

    def ratio(self, rival: str) -> float:
        return self.median(OURS) / self.median(rival)

    def figures(self) -> dict[str, dict[str, float]]:
        return {
            contender: {"us": self.median(contender), "spread": self.spread(contender), "ratio": self.ratio(contender)}
            for contender in self.rounds
        }


def take_turns(contenders: list[str], rounds: int, seconds: Callable[[str], float]) -> dict[str, list[float]]:
    """Measure every contender once a round; each round begins with another one."""
    microseconds: dict[str, list[float]] = {contender: [] for contender in contenders}
    for i in range(-3, rounds):  # the first ones warm up
        first = i % len(contenders)
        for contender in contenders[first:] + contenders[:first]:
            measured = 1e6 * seconds(contender)
            if i >= 0:
                microseconds[contender].append(measured)
    return microseconds


def time_case(case: Case, rounds: int) -> Times:
    # Processor time: waiting for a core that is lent to somebody else does not count.
    timers = {c: timeit.Timer(case.statement, "", time.process_time, case.variables(c)) for c in case.contenders}
    with case.context():
        return Times(case.name, take_turns(list(timers), rounds, lambda c: timers[c].timeit(case.calls) / case.calls))


# Printing -------------------------------------------------------------------------------------------------------


def print_table(all_times: list[Times]) -> None:
    print("processor time in us: median ± half the distance of the quartiles; ratio: customops to the one before it\n")
    print(f"{'':36}{OURS:>15}" + "".join(f"{rival:>15} ratio" for rival in RIVALS))
    for times in all_times:
        rivals = (
            f"{cell(times, rival)} {times.ratio(rival):5.2f}" if rival in times.rounds else " " * 21 for rival in RIVALS
        )
        print(f"{times.case:36}{cell(times, OURS)}{''.join(rivals)}")


def cell(times: Times, contender: str) -> str:
    return f"{times.median(contender):9.2f} ±{times.spread(contender):3.0f}%"


def plot(all_times: list[Times], file: Path) -> None:
    """Bars: what each rival costs, in costs of customops."""
    from matplotlib.figure import Figure  # noqa: PLC0415 (the rest does without it)

    timed = [times for times in all_times if not times.case.startswith("defining") and "custom_op" in times.rounds]
    figure = Figure(figsize=(8, 0.55 * len(timed) + 1), layout="constrained")
    axes = figure.subplots()
    for i, rival in enumerate(("Library", "Function", "custom_op")):
        rows = [(y, times) for y, times in enumerate(timed) if rival in times.rounds]
        places = [y + 0.27 * (i - 1) for y, _ in rows]
        bars = axes.barh(places, [1 / times.ratio(rival) for _, times in rows], height=0.25, label=rival)
        axes.bar_label(bars, fmt="%.1f", padding=2, fontsize=7)
    axes.axvline(1, color="black", linewidth=1, label="customops")
    axes.set_yticks(range(len(timed)), [times.case for times in timed])
    axes.invert_yaxis()
    axes.set_xlabel("processor time of a call, customops = 1")
    axes.legend(fontsize=8)
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only verify that the contenders agree; time nothing")
    parser.add_argument("--quick", action="store_true", help="a tenth of the rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE, too")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them to FILE, too (needs matplotlib)")
    parser.add_argument("--only", metavar="TEXT", help="only the cases with TEXT in their names")
    options = parser.parse_args()
    if torch.__version__ < (2, 13):
        parser.error(f"torch {torch.__version__} has no custom_op for in-place ops, nor for out=; take 2.13 or newer")
    torch.set_num_threads(1)

    every_case = [case for case in cases() if options.only is None or options.only in case.name]
    for case in every_case:
        case.verify()
    if options.check:
        print(f"{len(every_case)} cases: the contenders agree")
        return

    rounds = 30 if options.quick else 300
    print(f"torch {torch.__version__}, Python {platform.python_version()}, one thread, {rounds} rounds")
    all_times = [time_case(case, rounds) for case in every_case]
    print_table(all_times)
    if any(times.spread(contender) > 20 for times in all_times for contender in times.rounds):
        print("\nthe machine is busy: figures that spread by more than 20% are not to be trusted")
    if options.plot is not None:
        plot(all_times, options.plot)
    if options.json is not None:
        figures = {times.case: times.figures() for times in all_times}
        measured = {"torch": torch.__version__, "python": platform.python_version(), "date": date.today().isoformat()}
        options.json.write_text(json.dumps(measured | {"cases": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
