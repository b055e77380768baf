"""Rows: parameters that hold tensors. Their formulas and vmap rules see objects of the types of the signature."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Optional, Union

import torch
from products.typed_ops.classes import Affine, Pair, Weights
from products.typed_ops.row import Case, Row, call, exactly
from torch import Tensor

from customops import Keys


def save(ctx: Any, **values: Any) -> None:
    """Keep these for backward and for jvp."""
    tensors = {key: value for key, value in values.items() if isinstance(value, Tensor)}
    ctx.save_for_backward(*tensors.values())
    ctx.save_for_forward(*tensors.values())
    ctx.names = tuple(tensors)
    ctx.others = {key: value for key, value in values.items() if key not in tensors}


def saved(ctx: Any) -> Any:
    """What `save` kept."""
    return {**dict(zip(ctx.names, ctx.saved_tensors, strict=True)), **ctx.others}


def zero(value: Any) -> Any:
    return 0 if value is None else value


def front(x: Any, dim: int | None) -> Any:
    """With the batch in front, of length one if there is none."""
    return x if x is None else x.unsqueeze(0) if dim is None else x.movedim(dim, 0)


def rules(op: Any, setup: Any, backward: Any, jvp: Any, vmap: Any) -> None:
    op.register_autograd(backward, setup_context=setup)
    op.register_jvp(jvp, setup_context=setup)
    op.register_vmap(vmap)


# float | Tensor ---------------------------------------------------------------------------------------------------


def float_or_tensor(x: Tensor, by: Union[float, Tensor]) -> Tensor:
    return x * by


def _float_or_tensor_rules(op: Any) -> None:
    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        save(ctx, x=inputs[0], by=inputs[1])

    def backward(ctx: Any, grad: Tensor) -> Any:
        x, by = saved(ctx)["x"], saved(ctx)["by"]
        return grad * by, grad * x if isinstance(by, Tensor) else None

    def jvp(ctx: Any, x_tangent: Any, by_tangent: Any) -> Any:
        x, by = saved(ctx)["x"], saved(ctx)["by"]
        return zero(x_tangent) * by + zero(by_tangent) * x

    def vmap(info: Any, in_dims: Any, x: Tensor, by: Any) -> Any:
        by = front(by, in_dims[1]) if isinstance(by, Tensor) else by
        return op(front(x, in_dims[0]), by), 0

    rules(op, setup, backward, jvp, vmap)


# Classes with tensors -------------------------------------------------------------------------------------------


def affine(x: Tensor, affine: Affine) -> Tensor:
    exactly(affine, Affine)
    result = x * affine.weight * affine.by
    return result if affine.bias is None else result + affine.bias


def _affine_rules(op: Any) -> None:
    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        x, given = inputs
        exactly(given, Affine)
        save(ctx, x=x, weight=given.weight, by=given.by, has_bias=given.bias is not None)

    def backward(ctx: Any, grad: Tensor) -> Any:
        s = saved(ctx)
        grads = {"weight": grad * s["x"] * s["by"], "bias": grad if s["has_bias"] else None}
        return grad * s["weight"] * s["by"], grads

    def jvp(ctx: Any, x_tangent: Any, tangent: Any) -> Any:
        exactly(tangent, Affine)
        s = saved(ctx)
        product = zero(x_tangent) * s["weight"] + s["x"] * zero(tangent.weight)
        return product * s["by"] + zero(tangent.bias)

    def vmap(info: Any, in_dims: Any, x: Tensor, given: Affine) -> Any:
        dim, dims = in_dims
        exactly(dims, Affine)
        weight, bias = front(given.weight, dims.weight), front(given.bias, dims.bias)
        return op(front(x, dim), dataclasses.replace(given, weight=weight, bias=bias)), 0

    rules(op, setup, backward, jvp, vmap)


def optional_affine(x: Tensor, affine: Optional[Affine]) -> Tensor:
    return x * 2 if affine is None else x * affine.weight * affine.by


def pair(x: Tensor, pair: Pair) -> Tensor:
    exactly(pair, Pair)
    return x * pair.weight * pair.by


def _pair_rules(op: Any) -> None:
    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        exactly(inputs[1], Pair)
        save(ctx, x=inputs[0], weight=inputs[1].weight, by=inputs[1].by)

    def backward(ctx: Any, grad: Tensor) -> Any:
        s = saved(ctx)
        return grad * s["weight"] * s["by"], Pair(grad * s["x"] * s["by"], None)  # type: ignore[arg-type]

    def jvp(ctx: Any, x_tangent: Any, tangent: Any) -> Any:
        exactly(tangent, Pair)
        s = saved(ctx)
        return (zero(x_tangent) * s["weight"] + s["x"] * zero(tangent.weight)) * s["by"]

    def vmap(info: Any, in_dims: Any, x: Tensor, given: Pair) -> Any:
        exactly(in_dims[1], Pair)
        return op(front(x, in_dims[0]), Pair(front(given.weight, in_dims[1].weight), given.by)), 0

    rules(op, setup, backward, jvp, vmap)


# Dicts ------------------------------------------------------------------------------------------------------------


def weights(x: Tensor, weights: Weights) -> Tensor:
    exactly(weights, dict)
    return x * weights["weight"] + weights["bias"] if "bias" in weights else x * weights["weight"]


def _weights_rules(op: Any) -> None:
    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        exactly(inputs[1], dict)
        save(ctx, x=inputs[0], weight=inputs[1]["weight"], has_bias="bias" in inputs[1])

    def backward(ctx: Any, grad: Tensor) -> Any:
        s = saved(ctx)
        grads = {"weight": grad * s["x"]}
        return grad * s["weight"], {**grads, "bias": grad} if s["has_bias"] else grads

    def jvp(ctx: Any, x_tangent: Any, tangent: Any) -> Any:
        exactly(tangent, dict)
        s = saved(ctx)
        return zero(x_tangent) * s["weight"] + s["x"] * zero(tangent["weight"]) + zero(tangent["bias"])

    def vmap(info: Any, in_dims: Any, x: Tensor, given: Any) -> Any:
        return op(front(x, in_dims[0]), {key: front(given[key], in_dims[1][key]) for key in given}), 0

    rules(op, setup, backward, jvp, vmap)


def keyed(parts: Annotated[dict[str, Tensor], Keys("q", "k")]) -> Tensor:
    exactly(parts, dict)
    return parts["q"] * parts["k"]


def _keyed_rules(op: Any) -> None:
    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        save(ctx, **inputs[0])

    def backward(ctx: Any, grad: Tensor) -> Any:
        s = saved(ctx)
        return {"parts": {"q": grad * s["k"], "k": grad * s["q"]}}

    def jvp(ctx: Any, tangent: Any) -> Any:
        s = saved(ctx)
        return zero(tangent["q"]) * s["k"] + zero(tangent["k"]) * s["q"]

    def vmap(info: Any, in_dims: Any, parts: Any) -> Any:
        return op({key: front(parts[key], in_dims[0][key]) for key in parts}), 0

    rules(op, setup, backward, jvp, vmap)


# Lists and tuples -------------------------------------------------------------------------------------------------


def nested_lists(groups: list[list[Tensor]]) -> Tensor:
    exactly(groups, list)
    result = sum(i * sum(group) for i, group in enumerate(groups, 1))
    assert isinstance(result, Tensor)
    return result


def _nested_rules(op: Any) -> None:
    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.lengths = [len(group) for group in inputs[0]]

    def backward(ctx: Any, grad: Tensor) -> Any:
        return [[grad * i] * length for i, length in enumerate(ctx.lengths, 1)]

    def jvp(ctx: Any, tangents: Any) -> Any:
        assert [len(group) for group in tangents] == ctx.lengths
        return sum(i * sum(map(zero, group)) for i, group in enumerate(tangents, 1))

    def vmap(info: Any, in_dims: Any, groups: Any) -> Any:
        return op([[front(x, dim) for x, dim in zip(xs, dims, strict=True)]
                   for xs, dims in zip(groups, in_dims[0], strict=True)]), 0  # fmt: skip

    rules(op, setup, backward, jvp, vmap)


def tensor_tuple(x: Tensor, how: tuple[Tensor, float]) -> Tensor:
    exactly(how, tuple)
    return x * how[0] * how[1]


def tuple_of_tensors(xs: tuple[Tensor, ...]) -> Tensor:
    exactly(xs, tuple)
    return torch.stack(xs).prod(0)


def variadic(*xs: Tensor) -> Tensor:
    exactly(xs, tuple)
    return torch.stack(xs).prod(0)


def parameter(x: Tensor, weight: torch.nn.Parameter) -> Tensor:
    return x * weight


def one_shape(first: Any, *args: Any) -> Tensor:
    """The fake of an op with tensors in the first argument."""
    while not isinstance(first, Tensor):
        first = next(iter(first.values() if isinstance(first, dict) else first))
    return torch.empty_like(first)


def both(arguments: Any, lowered: Any, expected: Any) -> Case:
    return Case(arguments, lowered, expected)


# fmt: off
TENSORS = [
    Row(
        "`float \\| Tensor`", float_or_tensor, "(Tensor x, Tensor? by, float? by_number) -> Tensor",
        (
            both(lambda x, y: call(x, y), lambda x, y: call(x, y, None), lambda x, y: x * y),
            both(lambda x, y: call(x, 2.5), lambda x, y: call(x, None, 2.5), lambda x, y: x * 2.5),
        ),
        rules=_float_or_tensor_rules, tensors=2,
        default=lambda: 1.5, by_default=lambda x, y: x * 1.5,
    ),
    Row(
        "`nn.Parameter`", parameter, "(Tensor x, Tensor weight) -> Tensor",
        (
            both(lambda x, y: call(x, y), lambda x, y: call(x, y), lambda x, y: x * y),
            both(lambda x, y: call(x, weight=y), lambda x, y: call(x, weight=y), lambda x, y: x * y),
        ),
        tensors=2, recompiles=None,
    ),
    Row(
        "dataclass with tensors", affine,
        "(Tensor x, Tensor affine_weight, *, float affine_by=1.0, Tensor? affine_bias=None) -> Tensor",
        (
            both(lambda x, w, b: call(x, Affine(w)), lambda x, w, b: call(x, w), lambda x, w, b: x * w),
            both(
                lambda x, w, b: call(x, Affine(w, 2.5, b)),
                lambda x, w, b: call(x, w, affine_by=2.5, affine_bias=b),
                lambda x, w, b: x * w * 2.5 + b,
            ),
        ),
        rules=_affine_rules, tensors=3,
    ),
    Row(
        "`Optional` of one", optional_affine,
        "(Tensor x, bool affine_given, Tensor? affine_weight, *, float? affine_by=1.0, Tensor? affine_bias=None)"
        " -> Tensor",
        (
            both(lambda x, w: call(x, Affine(w, 2.5)), lambda x, w: call(x, True, w, affine_by=2.5),
                 lambda x, w: x * w * 2.5),
            both(lambda x, w: call(x, None), lambda x, w: call(x, False, None), lambda x, w: x * 2),
        ),
        tensors=2, default=lambda: None, by_default=lambda x, w: x * 2,
    ),
    Row(
        "`NamedTuple`", pair, "(Tensor x, Tensor pair_weight, *, float pair_by=1.0) -> Tensor",
        (
            both(lambda x, w: call(x, Pair(w)), lambda x, w: call(x, w), lambda x, w: x * w),
            both(lambda x, w: call(x, Pair(w, 2.5)), lambda x, w: call(x, w, pair_by=2.5), lambda x, w: x * w * 2.5),
        ),
        rules=_pair_rules, tensors=2,
    ),
    Row(
        "`TypedDict` with tensors", weights,
        "(Tensor x, Tensor weights_weight, *, Tensor? weights_bias=None) -> Tensor",
        (
            both(lambda x, w, b: call(x, {"weight": w}), lambda x, w, b: call(x, w), lambda x, w, b: x * w),
            both(
                lambda x, w, b: call(x, {"weight": w, "bias": b}),
                lambda x, w, b: call(x, w, weights_bias=b),
                lambda x, w, b: x * w + b,
            ),
        ),
        rules=_weights_rules, tensors=3,
    ),
    Row(
        "`dict[str, Tensor]` with `Keys`", keyed, "(Tensor parts_q, Tensor parts_k) -> Tensor",
        (
            both(lambda q, k: call({"q": q, "k": k}), lambda q, k: call(q, k), lambda q, k: q * k),
            both(lambda q, k: call({"k": k, "q": q}), lambda q, k: call(parts_q=q, parts_k=k), lambda q, k: q * k),
        ),
        fake=one_shape, rules=_keyed_rules, tensors=2,
    ),
    Row(
        "`list[list[Tensor]]`", nested_lists, "(Tensor[] groups, SymInt[] groups_lengths) -> Tensor",
        (
            both(lambda a, b, c: call([[a, b], [c]]), lambda a, b, c: call([a, b, c], [2, 1]),
                 lambda a, b, c: a + b + 2 * c),
            both(lambda a, b, c: call([[a], [], [b, c]]), lambda a, b, c: call([a, b, c], [1, 0, 2]),
                 lambda a, b, c: a + 3 * b + 3 * c),
        ),
        fake=one_shape, rules=_nested_rules, tensors=3,
    ),
    Row(
        "`tuple[Tensor, float]`", tensor_tuple, "(Tensor x, Tensor how_0, float how_1) -> Tensor",
        (
            both(lambda x, w: call(x, (w, 2.0)), lambda x, w: call(x, w, 2.0), lambda x, w: x * w * 2),
            both(lambda x, w: call(x, (w, 2.5)), lambda x, w: call(x, w, 2.5), lambda x, w: x * w * 2.5),
        ),
        tensors=2,
    ),
    Row(
        "`tuple[Tensor, ...]`", tuple_of_tensors, "(Tensor[] xs) -> Tensor",
        (
            both(lambda x, w: call((x, w)), lambda x, w: call([x, w]), lambda x, w: x * w),
            both(lambda x, w: call((x, w, w)), lambda x, w: call([x, w, w]), lambda x, w: x * w * w),
        ),
        fake=one_shape, tensors=2,
    ),
    Row(
        "`*xs: Tensor`", variadic, "(Tensor[] xs) -> Tensor",
        (
            both(lambda x, w: call(x, w), lambda x, w: call([x, w]), lambda x, w: x * w),
            both(lambda x, w: call(x, w, w), lambda x, w: call([x, w, w]), lambda x, w: x * w * w),
        ),
        fake=one_shape, tensors=2,
    ),
]
