"""vmap of ops without a rule, and of random ops."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from customops import Registry, Tag
from customops.errors import UnsupportedError

# Without a rule -------------------------------------------------------------------------------------------------

slow = pytest.mark.filterwarnings("ignore:There is a performance drop")


#: Op (as a function in torch operations), and how it is called on x, y of shape [3, 4].
WITHOUT_RULE: dict[str, tuple[Callable[..., Any], Any, str, Callable[..., Any]]] = {}


def without_rule(mutates_args: Any, schema: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def add(fn: Callable[..., Any]) -> Callable[..., Any]:
        WITHOUT_RULE[fn.__name__] = fn, mutates_args, schema, call
        return fn

    return add


@without_rule((), "(Tensor x, Tensor? y=None) -> Tensor", lambda f, x, y: (f(x), f(x, y)))
def plain(x: Tensor, y: Tensor | None = None) -> Tensor:
    return x * 2 if y is None else x * y


@without_rule((), "(Tensor[] xs, Tensor?[] ys) -> Tensor", lambda f, x, y: f([x, y], [None, x]))
def from_lists(xs: list[Tensor], ys: list[Tensor | None]) -> Tensor:
    return sum(xs) + sum(y * 3 for y in ys if y is not None)


@without_rule((), "(Tensor x, Tensor y) -> (Tensor[], Tensor)", lambda f, x, y: f(x, y))
def to_lists(x: Tensor, y: Tensor) -> tuple[list[Tensor], Tensor]:
    return [x + y, x - y], x * y


@without_rule((), "(Tensor x) -> (Tensor, SymInt)", lambda f, x, y: f(x)[0] + y)
def with_an_int(x: Tensor) -> tuple[Tensor, int]:
    return x * 2, x.shape[0]


def then_read(f: Callable[..., Any], x: Tensor, y: Tensor) -> Any:
    x = x * 1
    f(x, y)
    return x * y


@without_rule(("x",), "(Tensor(a!) x, Tensor y) -> ()", then_read)
def write(x: Tensor, y: Tensor) -> None:
    x.mul_(y)


def both(f: Callable[..., Any], x: Tensor, y: Tensor) -> Any:
    x = x * 1
    return f([x, x * 1], y), x


@without_rule(("xs",), "(Tensor(a!)[] xs, Tensor y) -> Tensor", both)
def write_and_return(xs: list[Tensor], y: Tensor) -> Tensor:
    for x in xs:
        x.add_(y)
    return y * 2


SIZES: dict[str, dict[str, Any]] = {
    "both": {"in_dims": (0, 0)},
    "another dimension": {"in_dims": (1, 1), "out_dims": 1},
    "two": {"in_dims": (1, 0), "shape": (3, 3)},
    "the first": {"in_dims": (0, None), "shapes": ((3, 4), (4,))},
}


@slow
@pytest.mark.parametrize("how", SIZES)
@pytest.mark.parametrize("name", WITHOUT_RULE)
def test_without_a_rule_the_op_runs_for_each_element(registry: Registry, ns: str, name: str, how: str) -> None:
    fn, mutates, schema, call = WITHOUT_RULE[name]
    op = registry.custom_op(f"{ns}::{name}", fn, mutates_args=mutates, schema=schema)
    dims = dict(SIZES[how])
    shapes = dims.pop("shapes", (dims.pop("shape", (3, 4)),) * 2)
    x, y = torch.rand(shapes[0]), torch.rand(shapes[1])

    def run(f: Any) -> Any:
        return torch.vmap(lambda x, y: call(f, x, y), **dims)(x.clone(), y.clone())

    torch.testing.assert_close(run(op), run(fn))
    if how == "both":  # nested, with another batch for each level
        xs, ys = torch.rand(2, 3, 4), torch.rand(3, 2, 4)

        def nested(f: Any) -> Any:
            inner = torch.vmap(lambda x, y: call(f, x, y))
            return torch.vmap(inner, in_dims=(0, 1))(xs.clone(), ys.clone())

        torch.testing.assert_close(nested(op), nested(fn))


@pytest.mark.compile
@slow
@pytest.mark.parametrize("name", WITHOUT_RULE)
def test_without_a_rule_compiled(registry: Registry, ns: str, name: str) -> None:
    fn, mutates, schema, call = WITHOUT_RULE[name]
    op = registry.custom_op(f"{ns}::{name}", fn, mutates_args=mutates, schema=schema)
    if name != "write":
        op.register_fake(fn if name != "write_and_return" else lambda xs, y: torch.empty_like(y))

    def run(f: Any, x: Tensor, y: Tensor) -> Any:
        return torch.vmap(lambda x, y: call(f, x, y), in_dims=(0, 1))(x.clone(), y.clone())

    compiled = torch.compile(lambda x, y: run(op, x, y), fullgraph=True, backend="aot_eager")
    for size in (4, 5):  # the second one may be dynamic
        x, y = torch.rand(3, size), torch.rand(size, 3)
        torch.testing.assert_close(compiled(x, y), run(fn, x, y))


@pytest.mark.compile
@slow
@pytest.mark.parametrize("compiled", [False, True])
def test_without_a_rule_gradients(registry: Registry, ns: str, compiled: bool) -> None:
    """vmap of grad and grad of vmap, of an op that takes and returns lists."""

    def fn(xs: list[Tensor]) -> list[Tensor]:
        return [x.sin() * xs[0] for x in xs]

    op = registry.custom_op(f"{ns}::sines", fn, mutates_args=())
    op.register_fake(lambda xs: [torch.empty_like(x) for x in xs])
    op.register_reference(fn, gives="gradients")

    def per_sample(f: Any, x: Tensor, y: Tensor) -> Any:
        return torch.vmap(torch.func.grad(lambda x, y: sum(out.sum() for out in f([x, y])), (0, 1)))(x, y)

    def of_vmap(f: Any, x: Tensor, y: Tensor) -> Any:
        def total(x: Tensor, y: Tensor) -> Tensor:
            return sum((out * 2).sum() for out in torch.vmap(lambda x, y: f([x, y]), in_dims=(1, 0))(x, y))

        return torch.func.grad(total, (0, 1))(x.t(), y)

    x, y = torch.rand(3, 2), torch.rand(3, 2)
    for take in (per_sample, of_vmap):
        run = functools.partial(take, op)
        run = torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run
        torch.testing.assert_close(run(x, y), take(fn, x, y))
        torch.compiler.reset()


def test_what_is_said_without_a_rule(scale: Any) -> None:
    x = torch.rand(2, 3)
    with pytest.warns(UserWarning, match=r"There is a performance drop: .*::scale has no vmap rule"):
        torch.vmap(scale)(x, x)
    torch.vmap(scale)(x, x)  # once
    scale.register_vmap("sequential")
    torch.vmap(scale)(x, x)


@pytest.mark.compile
@slow
@pytest.mark.parametrize("compiled", [False, True])
def test_a_write_to_what_is_not_batched(registry: Registry, ns: str, compiled: bool) -> None:
    def accumulate(buffers: list[Tensor | None], x: Tensor) -> None:
        for buffer in buffers:
            if buffer is not None:
                buffer.add_(x)

    op = registry.custom_op(f"{ns}::accumulate", accumulate, mutates_args=("buffers",))
    batched, single = torch.zeros(3, 2), torch.zeros(2)

    def run(x: Tensor) -> Any:
        return torch.vmap(lambda b, x: op([None, b, single], x))(batched, x)

    run = torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run
    with pytest.raises(Exception, match="accumulate: vmap over an op that writes to a tensor which is not batched"):
        run(torch.ones(3, 2))
    torch.vmap(lambda b, x: op([None, b], x) or b)(batched, torch.ones(3, 2))
    assert torch.equal(batched, torch.ones(3, 2))
    optional = registry.custom_op(f"{ns}::maybe", lambda x, y: None, mutates_args=("x",),
                                  schema="(Tensor(a!)? x, Tensor y) -> ()")  # fmt: skip
    torch.vmap(lambda y: optional(None, y) or y)(batched)  # nothing is there to be written


@pytest.mark.compile
@slow
@pytest.mark.parametrize("compiled", [False, True])
def test_an_out_op(registry: Registry, ns: str, compiled: bool) -> None:
    def fn(x: Tensor, *, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        return torch.sub(x, 1, out=low), torch.add(x, 1, out=high)

    op = registry.custom_op(f"{ns}::near", fn, mutates_args={"low", "high"}, tags=Tag.out)
    x, low, high = torch.rand(3, 2), torch.zeros(2, 3), torch.zeros(3, 2)

    def run(x: Tensor, low: Tensor, high: Tensor) -> Any:
        return torch.vmap(lambda x, a, b: op(x, low=a, high=b), in_dims=(0, 1, 0))(x, low, high)

    results = (torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run)(x, low, high)
    for result, expected in zip((*results, low.t(), high), (x - 1, x + 1) * 2, strict=True):
        torch.testing.assert_close(result, expected)
    with pytest.raises(NotImplementedError, match="not batched itself\n  argument: high"):
        torch.vmap(lambda x, a: op(x, low=a, high=high[0]))(x, high)


@slow
def test_results_that_make_no_batch(registry: Registry, ns: str) -> None:
    shapes = registry.custom_op(f"{ns}::positive", lambda x: x[x > 0], mutates_args=(), schema="(Tensor x) -> Tensor")
    lists = registry.custom_op(f"{ns}::rows", lambda x: [x * 1] * int(x.sum()) and [x * i for i in range(int(x.sum()))],
                               mutates_args=(), schema="(Tensor x) -> Tensor[]")  # fmt: skip
    x = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    for op, what in ((shapes, "shapes"), (lists, "lists")):
        with pytest.raises(NotImplementedError, match=f"{what} that differ between the elements"):
            torch.vmap(op)(x)
    with pytest.raises(NotImplementedError, match="over an empty batch"):
        torch.vmap(shapes)(x[:0])


def test_no_strategy_for_a_view(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::half", lambda x: x[::2], mutates_args=(), schema="(Tensor(a) x) -> Tensor(a)")
    with pytest.raises(UnsupportedError, match="a vmap strategy for an op that returns a view"):
        op.register_vmap("sequential")


# Random ops -----------------------------------------------------------------------------------------------------


@pytest.fixture
def noise(registry: Registry, ns: str) -> Any:
    op = registry.custom_op(f"{ns}::noise", lambda x: x * 0 + torch.rand(x.shape), mutates_args=(),
                            schema="(Tensor x) -> Tensor", tags=torch.Tag.nondeterministic_seeded)  # fmt: skip
    op.register_fake(torch.empty_like)
    return op


def rows_differ(result: Tensor) -> bool:
    return len({tuple(row.flatten().tolist()) for row in result}) == len(result)


@slow
@pytest.mark.parametrize("rule", [None, "sequential"])
def test_random_numbers(noise: Any, rule: str | None) -> None:
    if rule is not None:
        noise.register_vmap(rule)
    x, one = torch.zeros(3, 8), torch.zeros(8)
    calls = {"batched": lambda row: noise(row), "not batched": lambda row: noise(one) + row}
    for call in calls.values():
        assert rows_differ(torch.vmap(call, randomness="different")(x))
        state = torch.get_rng_state()
        same = torch.vmap(call, randomness="same")(x)
        assert torch.equal(same, same[:1].expand(3, 8))
        assert not torch.equal(torch.vmap(call, randomness="same")(x), same)  # the generator moves on, by one call
        torch.set_rng_state(state)
        assert torch.equal(same[0], torch.rand(8))
    nested = torch.vmap(torch.vmap(calls["not batched"], randomness="same"), randomness="different")(
        torch.zeros(3, 2, 8)
    )
    assert torch.equal(nested[:, 0], nested[:, 1])
    assert rows_differ(nested)
    nested = torch.vmap(torch.vmap(calls["batched"], randomness="different"), randomness="same")(torch.zeros(3, 2, 8))
    assert torch.equal(nested[0], nested[1])
    assert not torch.equal(nested[0, 0], nested[0, 1])


@slow
def test_random_numbers_where_they_are_an_error(noise: Any) -> None:
    x = torch.zeros(3, 2)
    for call in (noise, lambda row: noise(x[0]) + row, noise.register_vmap("sequential") and noise):
        with pytest.raises(RuntimeError, match="a random op was called inside"):
            torch.vmap(call)(x)
    noise.register_vmap(lambda info, in_dims, x: (noise(x), in_dims[0]))  # a rule sees to it itself
    assert rows_differ(torch.vmap(noise)(x))


@pytest.mark.compile
@slow
def test_random_numbers_compiled(noise: Any) -> None:
    x = torch.zeros(3, 8)

    def run(randomness: str) -> Callable[[Tensor], Tensor]:
        return lambda x: torch.vmap(lambda row: noise(row) + noise(x[0]) * 10, randomness=randomness)(x)

    compiled = torch.compile(run("different"), fullgraph=True, backend="aot_eager")
    assert rows_differ(compiled(x) % 1)
    assert rows_differ(compiled(x).div(1, rounding_mode="floor"))
    with pytest.raises(Exception, match="while it is traced"):
        torch.compile(run("same"), fullgraph=True, backend="aot_eager")(x)
    noise.register_vmap("expand_dims")
    with pytest.raises(NotImplementedError, match="by a strategy that calls it once for all elements"):
        torch.vmap(noise, randomness="same")(x)


@slow
def test_a_random_op_that_writes_and_is_not_batched(registry: Registry, ns: str) -> None:
    def fill(x: Tensor) -> None:
        x.uniform_()

    op = registry.custom_op(f"{ns}::fill", fill, mutates_args=("x",), tags=torch.Tag.nondeterministic_seeded)
    x = torch.zeros(2)
    with pytest.raises(NotImplementedError, match="not batched itself\n  argument: x"):
        torch.vmap(lambda row: op(x) or row, randomness="different")(torch.zeros(3, 2))
    rows = torch.zeros(3, 2)
    torch.vmap(lambda row: op(row) or row, randomness="different")(rows)
    assert rows_differ(rows)
