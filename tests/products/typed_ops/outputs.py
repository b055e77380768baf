"""Rows: returns."""

from __future__ import annotations

from typing import Annotated, Any, Optional

import torch
from products.typed_ops.classes import Named, Parts, Scaled
from products.typed_ops.row import NOT_SAVED, Case, Row, call, exactly
from products.typed_ops.tensors import save, saved, zero
from torch import Tensor

from customops import Keys


def maybe(x: Tensor, want: bool) -> Optional[Tensor]:
    return x * 2 if want else None


def maybe_in_tuple(x: Tensor, want: bool) -> tuple[Tensor, Optional[Tensor]]:
    return x * 3, x * 2 if want else None


def some(x: Tensor, count: int) -> tuple[Tensor, ...]:
    return tuple(x * i for i in range(1, count + 1))


def some_fake(x: Tensor, count: int) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x) for _ in range(count))


def named_tuple(x: Tensor, want: bool) -> Scaled:
    return Scaled(x * 2, x.sum() if want else None, 7)


def named_tuple_fake(x: Tensor, want: bool) -> Scaled:
    return Scaled(torch.empty_like(x), x.new_empty(()) if want else None, 7)


def _named_tuple_rules(op: Any) -> None:
    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        exactly(output, Scaled)
        save(ctx, x=inputs[0], want=inputs[1])

    def backward(ctx: Any, out: Any, total: Any, length: Any) -> Any:
        assert length is None
        return zero(out) * 2 + zero(total) + torch.zeros_like(saved(ctx)["x"]), None

    def jvp(ctx: Any, x: Any, want: Any) -> Any:
        return Scaled(x * 2, x.sum() if saved(ctx)["want"] else None, None)  # type: ignore[arg-type]

    def vmap(info: Any, in_dims: Any, x: Tensor, want: bool) -> Any:
        x = x.movedim(in_dims[0], 0)
        total = x.flatten(1).sum(1) if want else None
        return Scaled(x * 2, total, 7), Scaled(0, 0 if want else None, None)  # type: ignore[arg-type]

    op.register_autograd(backward, setup_context=setup)
    op.register_jvp(jvp, setup_context=setup)
    op.register_vmap(vmap)


def a_dataclass(x: Tensor, by: float) -> Parts:
    return Parts(x * by, x * x)


def a_dataclass_fake(x: Tensor, by: float) -> Parts:
    return Parts(torch.empty_like(x), torch.empty_like(x))


def _dataclass_rules(op: Any) -> None:
    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        exactly(output, Parts)
        save(ctx, x=inputs[0], by=inputs[1])

    def backward(ctx: Any, grads: Any) -> Any:
        exactly(grads, Parts)
        s = saved(ctx)
        return zero(grads.out) * s["by"] + 2 * s["x"] * zero(grads.rest), None

    def jvp(ctx: Any, x: Any, by: Any) -> Any:
        return Parts(x * saved(ctx)["by"], 2 * saved(ctx)["x"] * x)

    def vmap(info: Any, in_dims: Any, x: Tensor, by: float) -> Any:
        return op(x, by), Parts(in_dims[0], in_dims[0])

    op.register_autograd(backward, setup_context=setup)
    op.register_jvp(jvp, setup_context=setup)
    op.register_vmap(vmap)


def keyed_result(x: Tensor, by: float) -> Annotated[dict[str, Tensor], Keys("out", "rest")]:
    return {"out": x * by, "rest": x * x}


def keyed_result_fake(x: Tensor, by: float) -> dict[str, Tensor]:
    return {"out": torch.empty_like(x), "rest": torch.empty_like(x)}


def _keyed_rules(op: Any) -> None:
    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        exactly(output, dict)
        save(ctx, x=inputs[0], by=inputs[1])

    def backward(ctx: Any, grads: Any) -> Any:
        s = saved(ctx)
        return {"x": zero(grads["out"]) * s["by"] + 2 * s["x"] * zero(grads["rest"])}

    def jvp(ctx: Any, x: Any, by: Any) -> Any:
        return {"out": x * saved(ctx)["by"], "rest": 2 * saved(ctx)["x"] * x}

    def vmap(info: Any, in_dims: Any, x: Tensor, by: float) -> Any:
        return op(x, by), {"out": in_dims[0], "rest": in_dims[0]}

    op.register_autograd(backward, setup_context=setup)
    op.register_jvp(jvp, setup_context=setup)
    op.register_vmap(vmap)


def typed_result(x: Tensor, by: float) -> Named:
    return {"out": x * by, "rest": x * x}


def int_list(x: Tensor, sizes: list[int]) -> list[int]:
    return [2 * size for size in sizes]


def text(x: Tensor, name: str) -> str:
    return f"{name}!"


def text_and_tensor(x: Tensor, name: str) -> tuple[Tensor, str]:
    return x * 2, f"{name}\u2713"


def text_and_tensor_fake(x: Tensor, name: str) -> tuple[Tensor, str]:
    return torch.empty_like(x), f"{name}\u2713"


def nested_tuples(x: Tensor, by: float) -> tuple[Tensor, tuple[Tensor, Optional[Tensor]]]:
    return x * by, (x * x, x * 3 if by > 2 else None)


def nested_tuples_fake(x: Tensor, by: float) -> tuple[Tensor, tuple[Tensor, Optional[Tensor]]]:
    return torch.empty_like(x), (torch.empty_like(x), torch.empty_like(x) if by > 2 else None)


def _case(value: Any, expected: Any) -> Case:
    return Case(lambda x: call(x, value), lambda x: call(x, value), expected)


def _list_of(value: Any) -> list[Any]:
    return [] if value is None else [value]


NO_TENSORS = frozenset({"reverse", "forward"})

# fmt: off
OUTPUTS = [
    Row(
        "`Optional[Tensor]`", maybe, "(Tensor x, bool want) -> Tensor[]",
        (_case(True, lambda x: x * 2), _case(False, lambda x: None)),
        fake=lambda x, want: torch.empty_like(x) if want else None,
        flat=_list_of,
        refused=NOT_SAVED,
    ),
    Row(
        "`tuple[Tensor, Optional[Tensor]]`", maybe_in_tuple, "(Tensor x, bool want) -> (Tensor, Tensor[])",
        (_case(True, lambda x: (x * 3, x * 2)), _case(False, lambda x: (x * 3, None))),
        fake=lambda x, want: (torch.empty_like(x), torch.empty_like(x) if want else None),
        flat=lambda result: (result[0], _list_of(result[1])),
    ),
    Row(
        "`tuple[Tensor, ...]`", some, "(Tensor x, SymInt count) -> Tensor[]",
        (_case(3, lambda x: (x, x * 2, x * 3)), _case(1, lambda x: (x,))),
        fake=some_fake, flat=list,
    ),
    Row(
        "`NamedTuple`", named_tuple, "(Tensor x, bool want) -> (Tensor, Tensor[], SymInt)",
        (_case(True, lambda x: Scaled(x * 2, x.sum(), 7)), _case(False, lambda x: Scaled(x * 2, None, 7))),
        fake=named_tuple_fake, rules=_named_tuple_rules,
        flat=lambda result: (result.out, _list_of(result.total), result.length),
    ),
    Row(
        "dataclass", a_dataclass, "(Tensor x, float by) -> (Tensor, Tensor)",
        (_case(2.5, lambda x: Parts(x * 2.5, x * x)), _case(1.5, lambda x: Parts(x * 1.5, x * x))),
        fake=a_dataclass_fake, rules=_dataclass_rules,
        flat=lambda result: (result.out, result.rest),
    ),
    Row(
        "`dict[str, Tensor]` with `Keys`", keyed_result, "(Tensor x, float by) -> (Tensor, Tensor)",
        (_case(2.5, lambda x: {"out": x * 2.5, "rest": x * x}), _case(1.5, lambda x: {"out": x * 1.5, "rest": x * x})),
        fake=keyed_result_fake, rules=_keyed_rules,
        flat=lambda result: (result["out"], result["rest"]),
    ),
    Row(
        "`TypedDict`", typed_result, "(Tensor x, float by) -> (Tensor, Tensor)",
        (_case(2.5, lambda x: {"out": x * 2.5, "rest": x * x}), _case(1.5, lambda x: {"out": x * 1.5, "rest": x * x})),
        fake=keyed_result_fake,
        flat=lambda result: (result["out"], result["rest"]),
    ),
    Row(
        "nested tuples", nested_tuples, "(Tensor x, float by) -> (Tensor, Tensor, Tensor[])",
        (
            _case(2.5, lambda x: (x * 2.5, (x * x, x * 3))),
            _case(1.5, lambda x: (x * 1.5, (x * x, None))),
        ),
        fake=nested_tuples_fake,
        flat=lambda result: (result[0], result[1][0], _list_of(result[1][1])),
    ),
    Row(
        "`list[int]`", int_list, "(Tensor x, SymInt[] sizes) -> SymInt[]",
        (_case([1, 2], lambda x: [2, 4]), _case([3], lambda x: [6])),
        fake=int_list, without=NO_TENSORS,
        refused=NOT_SAVED,
    ),
    Row(
        "`str`", text, "(Tensor x, str name) -> SymInt[]",
        (_case("a", lambda x: "a!"), _case("bc", lambda x: "bc!")),
        fake=text, without=NO_TENSORS,
        flat=lambda result: [ord(char) for char in result],
        refused=NOT_SAVED,
    ),
    Row(
        "`tuple[Tensor, str]`", text_and_tensor, "(Tensor x, str name) -> (Tensor, SymInt[])",
        (_case("a", lambda x: (x * 2, "a\u2713")), _case("bc", lambda x: (x * 2, "bc\u2713"))),
        fake=text_and_tensor_fake,
        flat=lambda result: (result[0], [ord(char) for char in result[1]]),
        refused=NOT_SAVED,
    ),
]
