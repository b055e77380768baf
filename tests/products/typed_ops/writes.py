"""Rows: annotations that say what an op writes to. The expected functions write to their arguments too."""

from __future__ import annotations

from typing import Annotated, Any, Optional

from products.typed_ops.classes import Buffers, MutBuffers
from products.typed_ops.row import Case, Row, call
from torch import Tensor

from customops import Mut, SameAs


def mut_alone(x: Mut[Tensor], by: float) -> None:
    x.mul_(by)


def mut(x: Mut[Tensor], y: Tensor) -> Tensor:
    x.add_(y)
    return x * y


def mut_optional(x: Tensor, seen: Optional[Mut[Tensor]]) -> Tensor:
    if seen is not None:
        seen.add_(x)
    return x * 2


def mut_list(xs: Mut[list[Tensor]], by: float) -> None:
    for x in xs:
        x.mul_(by)


def mut_variadic(*xs: Mut[Tensor]) -> None:
    for x in xs:
        x.mul_(2)


def mut_field(x: Tensor, buffers: MutBuffers) -> Tensor:
    buffers["total"].add_(x * buffers["by"])
    return x * 2


def mut_dataclass(x: Tensor, buffers: Mut[Buffers]) -> None:
    buffers.total.add_(x)
    buffers.by.mul_(2)


def mutates_args(x: Tensor, buffers: Buffers) -> None:
    buffers.total.add_(x * buffers.by)


def same_as(x: Mut[Tensor], by: float) -> Annotated[Tensor, SameAs("x")]:
    return x.mul_(by)


def same_as_out(x: Tensor, by: float, *, out: Mut[Tensor]) -> Annotated[Tensor, SameAs("out")]:
    return out.copy_(x * by)


def _no_rules(op: Any) -> None:
    op.register_vmap("sequential")


def _same_as_rules(op: Any) -> None:
    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.by = inputs[1]

    op.register_autograd(lambda ctx, grad: (grad * ctx.by, None), setup_context=setup)
    op.register_jvp(lambda ctx, x, by: x * ctx.by, setup_context=setup)
    op.register_vmap(lambda info, in_dims, x, by: (op(x, by), in_dims[0]))


def nothing(*args: Any, **kwargs: Any) -> None:
    """The fake of an op that returns nothing."""


def _scale(*xs: Tensor, by: float) -> None:
    for x in xs:
        x.mul_(by)


def _added(x: Tensor, y: Tensor) -> Tensor:
    x.add_(y)
    return x * y


def _total(x: Tensor, total: Tensor, by: Tensor) -> Tensor:
    total.add_(x * by)
    return x * 2


def _sum(x: Tensor, total: Tensor, by: Tensor) -> None:
    total.add_(x)
    by.mul_(2)


def _sum_by(x: Tensor, total: Tensor, by: Tensor) -> None:
    total.add_(x * by)


NO_GRADIENTS = frozenset({"reverse", "forward"})

# fmt: off
WRITES = [
    Row(
        "`Mut[Tensor]`, no result", mut_alone, "(Tensor(a0!) x, float by) -> ()",
        (
            Case(lambda x: call(x, 2.5), lambda x: call(x, 2.5), lambda x: _scale(x, by=2.5)),
            Case(lambda x: call(x, by=1.5), lambda x: call(x, by=1.5), lambda x: _scale(x, by=1.5)),
        ),
        fake=nothing, rules=_no_rules, without=NO_GRADIENTS,
        default=lambda: 3.5, by_default=lambda x: _scale(x, by=3.5),
    ),
    Row(
        "`Mut[Tensor]`", mut, "(Tensor(a0!) x, Tensor y) -> Tensor",
        (
            Case(call, call, _added),
            Case(lambda x, y: call(x, y=y), lambda x, y: call(x, y=y), _added),
        ),
        rules=_no_rules, tensors=2, without=NO_GRADIENTS, recompiles=None,
    ),
    Row(
        "`Optional[Mut[Tensor]]`", mut_optional, "(Tensor x, Tensor(a1!)? seen) -> Tensor",
        (
            Case(call, call, lambda x, seen: (seen.add_(x), x * 2)[1]),
            Case(lambda x, seen: call(x, None), lambda x, seen: call(x, None), lambda x, seen: x * 2),
        ),
        rules=_no_rules, tensors=2, without=NO_GRADIENTS,
        default=lambda: None, by_default=lambda x, seen: x * 2,
    ),
    Row(
        "`Mut[list[Tensor]]`", mut_list, "(Tensor(a0!)[] xs, float by) -> ()",
        (
            Case(lambda *xs: call(list(xs), 2.5), lambda *xs: call(list(xs), 2.5), lambda *xs: _scale(*xs, by=2.5)),
            Case(lambda x, y: call([y], 1.5), lambda x, y: call([y], 1.5), lambda x, y: _scale(y, by=1.5)),
        ),
        fake=nothing, rules=_no_rules, tensors=2, without=NO_GRADIENTS,
        default=lambda: 3.5, by_default=lambda x, y: _scale(x, y, by=3.5),
    ),
    Row(
        "`*xs: Mut[Tensor]`", mut_variadic, "(Tensor(a0!)[] xs) -> ()",
        (
            Case(call, lambda *xs: call(list(xs)), lambda *xs: _scale(*xs, by=2)),
            Case(lambda x, y: call(y), lambda x, y: call([y]), lambda x, y: _scale(y, by=2)),
        ),
        fake=nothing, rules=_no_rules, tensors=2, without=NO_GRADIENTS,
    ),
    Row(
        "`Mut[Tensor]` in a `TypedDict`", mut_field,
        "(Tensor x, Tensor(a1!) buffers_total, Tensor buffers_by) -> Tensor",
        (
            Case(lambda x, total, by: call(x, {"total": total, "by": by}), call, _total),
            Case(lambda x, total, by: call(x, buffers={"by": by, "total": total}), call, _total),
        ),
        rules=_no_rules, tensors=3, without=NO_GRADIENTS, recompiles=None,
    ),
    Row(
        "`Mut[dataclass]`", mut_dataclass, "(Tensor x, Tensor(a1!) buffers_total, Tensor(a2!) buffers_by) -> ()",
        (
            Case(lambda x, total, by: call(x, Buffers(total, by)), call, _sum),
            Case(lambda x, total, by: call(x, buffers=Buffers(by=by, total=total)), call, _sum),
        ),
        fake=nothing, rules=_no_rules, tensors=3, without=NO_GRADIENTS, recompiles=None,
    ),
    Row(
        '`mutates_args=["buffers.total"]`', mutates_args,
        "(Tensor x, Tensor(a1!) buffers_total, Tensor buffers_by) -> ()",
        (
            Case(lambda x, total, by: call(x, Buffers(total, by)), call, _sum_by),
            Case(lambda x, total, by: call(x, buffers=Buffers(by=by, total=total)), call, _sum_by),
        ),
        fake=nothing, rules=_no_rules, tensors=3, without=NO_GRADIENTS, recompiles=None,
        options={"mutates_args": ["buffers.total"]},
    ),
    Row(
        '`-> Annotated[Tensor, SameAs("x")]`', same_as, "(Tensor(a0!) x, float by) -> Tensor(a0!)",
        (
            Case(lambda x: call(x, 2.5), lambda x: call(x, 2.5), lambda x: x.mul_(2.5)),
            Case(lambda x: call(x, 1.5), lambda x: call(x, 1.5), lambda x: x.mul_(1.5)),
        ),
        rules=_same_as_rules, fake=None,
        default=lambda: 3.5, by_default=lambda x: x.mul_(3.5),
    ),
    Row(
        '`SameAs("out")`, keyword-only', same_as_out, "(Tensor x, float by, *, Tensor(a2!) out) -> Tensor(a2!)",
        (
            Case(lambda x, y: call(x, 2.5, out=y), lambda x, y: call(x, 2.5, out=y), lambda x, y: y.copy_(x * 2.5)),
            Case(lambda x, y: call(x, 1.5, out=y), lambda x, y: call(x, 1.5, out=y), lambda x, y: y.copy_(x * 1.5)),
        ),
        rules=_no_rules, tensors=2, without=NO_GRADIENTS, fake=None,
    ),
]
