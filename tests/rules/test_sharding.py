"""Sharding rules, in one process: their forms, the decisions that are kept, wrong rules and the check."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.warm import PYTHON
from torch import Tensor

import customops
from customops import CustomOpDef, Registry, _torch
from customops._rules.sharding import key_of
from customops.checks import run_check
from customops.errors import CallbackError, KernelError, UnsupportedError

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed")

if dist.is_available():
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

Op = CustomOpDef[Any, Any]


@pytest.fixture
def double(registry: Registry) -> Op:
    @registry.custom_op("tests_sharding_rules::double", mutates_args=())
    def double(x: Tensor, by: float = 2.0) -> Tensor:
        return x * by

    double.register_fake(lambda x, by: torch.empty_like(x))
    return double


@contextmanager
def ranks(*shape: int) -> Iterator[Any]:
    with _torch.distributed.simulated_ranks("cpu", shape) as mesh:
        yield mesh


def split(x: Tensor, mesh: Any, *placements: Any) -> Any:
    return distribute_tensor(x, mesh, placements, src_data_rank=None)


def whole(x: Any) -> Tensor:
    return _torch.distributed.whole_of(x)


# Calls ----------------------------------------------------------------------------------------------------------


def test_a_call_without_a_rule_says_how_to_give_one(double: Op) -> None:
    with ranks(2) as mesh, pytest.raises(UnsupportedError, match="the op has no sharding rule") as caught:
        double(split(torch.ones(4), mesh, Shard(0)))
    assert caught.value.op == double._qualname
    example = str(caught.value.fix).partition("for an elementwise op: ")[2]
    assert example == "op.register_sharding(lambda x, by: [([Shard(i)], [Shard(i)]) for i in range(x.ndim)])"
    eval(example, {"op": double, "Shard": Shard})
    with ranks(2) as mesh:
        result = double(split(torch.arange(4.0), mesh, Shard(0)))
        assert result.placements == (Shard(0),)
        torch.testing.assert_close(whole(result), torch.arange(4.0) * 2)


def test_forms_of_registration(double: Op) -> None:
    x = torch.arange(4.0)

    def rule(x: Any, by: float = 2.0) -> Any:
        return [([Shard(0)], [Shard(0), None])]

    def placements() -> Any:
        with ranks(2) as mesh:
            result = double(split(x, mesh, Shard(0)))
            torch.testing.assert_close(whole(result), x * 2)
            overloaded = getattr(torch.ops, "tests_sharding_rules").double.default  # noqa: B009
            assert overloaded(split(x, mesh, Shard(0))).placements == result.placements
            return result.placements

    assert double.register_sharding(rule) is rule
    assert placements() == (Shard(0),)
    with double._owner.scope():

        @double.register_sharding()
        def _(x: Any, by: float = 2.0) -> Any:
            return [(Replicate(), {})]

        assert placements() == (Replicate(),)
        found = next(each for each in double.describe().rules if each.kind == "sharding")
        assert found.target == "DTensor"
        assert found.origin == "registered"
        assert __file__ in found.registered
    assert placements() == (Shard(0),)
    library = torch.library.Library("tests_sharding_rules", "FRAGMENT")
    double.register_sharding(lambda x, by: [(Replicate(), {"x": Replicate()})], lib=library)
    assert placements() == (Replicate(),)
    library._destroy()
    assert placements() == (Shard(0),)


def test_the_function_of_the_package(double: Op) -> None:
    @customops.register_sharding(double._opoverload)
    def _(x: Any, by: float = 2.0) -> Any:
        return [([Partial()], [Partial(), None]), ([Shard(0)], [Shard(0), None])]

    with ranks(2) as mesh:
        x = split(torch.arange(4.0), mesh, Shard(0))
        torch.testing.assert_close(whole(double(x, 3.0)), torch.arange(4.0) * 3)


def test_rules_are_registered_before_dtensor_is_loaded() -> None:
    program = """
import sys, torch, customops

@customops.custom_op("ns::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2

double.register_fake(torch.empty_like)

@double.register_sharding
def _(x):
    from torch.distributed.tensor import Shard
    return [([Shard(0)], [Shard(0)])]

assert "torch.distributed.tensor" not in sys.modules
from customops import _torch
from torch.distributed.tensor import Shard, distribute_tensor

with _torch.distributed.simulated_ranks("cpu", (2,)) as mesh:
    result = double(distribute_tensor(torch.ones(4), mesh, [Shard(0)], src_data_rank=None))
    assert result.placements == (Shard(0),)
"""
    subprocess.run([PYTHON, "-W", "ignore", "-c", program], check=True, timeout=120)


def test_other_arguments_are_part_of_what_is_kept(registry: Registry) -> None:
    def reduce(x: Tensor, keepdim: bool, sizes: list[int], mode: str = "sum", *, frac: float = 1.0) -> Tensor:
        x = F.pad(x[:, : int(x.shape[1] * frac)], [0, sizes[0]])
        return x.sum(1, keepdim=keepdim) if mode == "sum" else x.amax(1, keepdim=keepdim)

    op = registry.custom_op("tests_sharding_rules::reduce", reduce, mutates_args=())
    op.register_fake(reduce)

    @op.register_sharding
    def _(x: Any, keepdim: bool, sizes: list[int], mode: str = "sum", *, frac: float = 1.0) -> Any:
        partial = [(Partial(mode), {"x": Shard(1)})] if frac == 1.0 and sizes == [0] else []
        return [([Shard(0)], [Shard(0)]), *partial]

    x = -torch.rand(4, 6)
    with ranks(2) as mesh:
        for place in (Shard(0), Shard(1)):
            given = split(x, mesh, place)
            for keepdim in (True, False):
                for sizes in ([0], [2], [0]):
                    for mode in ("sum", "max"):
                        for frac in (1.0, 0.5):
                            got = op(given, keepdim, sizes, mode, frac=frac)
                            torch.testing.assert_close(whole(got), reduce(x, keepdim, sizes, mode, frac=frac))


def test_keys_tell_apart_what_equality_does_not() -> None:
    values = [1, 1.0, True, 0.0, -0.0, "1", None, [1], [1.0], [[1]], torch.float32, 1j]
    assert len({key_of(value) for value in values}) == len(values)
    assert key_of([math.nan]) == key_of([math.nan])


def test_a_rule_whose_placements_do_not_fit_replicates(double: Op) -> None:
    """One element cannot be split over two processes."""
    double.register_sharding(lambda x, by: [([Shard(0)], [Shard(0), None])])
    with ranks(2) as mesh:
        result = double(split(torch.ones(1, 3), mesh, Replicate()))
        assert result.placements == (Replicate(),)


# Rules that are wrong -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (None, "did not return a list of shardings"),
        ([], "did not return a list of shardings"),
        ([1], "returned something other than pairs"),
        (lambda: [([], [Shard(0)])], "wrong number of output placements"),
        (lambda: [([Shard(0), Shard(0)], [Shard(0)])], "wrong number of output placements"),
        (lambda: [([Shard(0)], [])], "wrong number of input placements"),
        (lambda: [([Shard(0)], [Shard(0), Shard(0)])], "wrong number of input placements"),
        (lambda: [([Shard(0)], ["x"])], "returned no placement for x"),
        (lambda: [([Shard(0)], [Shard(2)])], "a Shard of a dimension that is not there"),
        (lambda: [([Shard(-3)], [Shard(0)])], "a Shard of a dimension that is not there"),
        (lambda: [([None], [Shard(0)])], "returned no placement for return 0"),
        (lambda: [([Shard(0)], {"y": Shard(0)})], "names 'y', which is no tensor of the op"),
    ],
)
def test_wrong_answers(double: Op, answer: Any, problem: str) -> None:
    found = answer() if callable(answer) else answer
    double.register_sharding(lambda x, by: found)
    with ranks(2) as mesh, pytest.raises(KernelError, match=problem) as caught:
        double(split(torch.ones(4, 2), mesh, Shard(0)))
    assert caught.value.op == double._qualname
    assert __file__ in str(caught.value.where)
    assert caught.value.expected
    assert caught.value.got


def test_a_rule_with_other_parameters_is_refused(double: Op) -> None:
    with pytest.raises(CallbackError, match="sharding rule"):
        double.register_sharding(lambda y, z, more: [])


def linear(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w)


def mean(x: Tensor) -> Tensor:
    return x.mean(0)


def maybe(x: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.amax(0) if bias is None else x.amax(0) * bias


def numbers(*shape: int) -> Tensor:
    return torch.rand(shape)


def test_gradients_that_cannot_be_compared_are_said(double: Op) -> None:
    """A formula with an op that has no sharding rule."""
    other = double._owner.custom_op("tests_sharding_rules::other", lambda x: x * 1, schema="(Tensor x) -> Tensor")
    double.register_autograd(lambda ctx, grad: (other(grad) * 2, None))
    double.register_sharding(lambda x, by: [([Shard(0)], [Shard(0), None])])
    outcome = run_check("test_sharding", double, (torch.randn(4),))
    assert outcome.status == "not exercised"
    assert "the calls are right; gradients could not be compared" in str(outcome.reason)


# The check ------------------------------------------------------------------------------------------------------

CASES: dict[str, tuple[Any, tuple[Any, ...], Any, Any]] = {
    "mean": (mean, (numbers(8, 6),), lambda: [([Shard(0)], [Shard(1)])], lambda: [([Replicate()], [Shard(0)])]),
    "sum": (maybe, (numbers(8, 6),), lambda: [([Partial("max")], [Shard(0)])], lambda: [([Partial()], [Shard(0)])]),
    "softmax": (
        lambda x: x.softmax(1),
        (numbers(8, 6),),
        lambda: [([Shard(0)], [Shard(0)])],
        lambda: [([Shard(1)], [Shard(1)])],
    ),
    "output": (
        linear,
        (numbers(8, 6), numbers(4, 6)),
        lambda: [([Shard(1)], [Replicate(), Shard(0)])],
        lambda: [([Shard(0)], [Replicate(), Shard(0)])],
    ),
    "swapped": (
        lambda x, y: x - y.sum(),
        (numbers(8, 6), numbers(8, 6)),
        lambda: [([Shard(0)], [Shard(0), Replicate()])],
        lambda: [([Shard(0)], [Replicate(), Shard(0)])],
    ),
    "uneven": (mean, (numbers(5, 6),), lambda: [([Shard(0)], [Shard(1)])], lambda: [([Partial("avg")], [Shard(0)])]),
    "partial inputs": (
        lambda x: x.relu(),
        (numbers(8, 6) - 0.5,),
        lambda: [([Shard(0)], [Shard(0)])],
        lambda: [([Partial()], [Partial()])],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_wrong_rules_are_found(registry: Registry, case: str) -> None:
    fn, args, right, wrong = CASES[case]
    schema = f"(Tensor x{', Tensor? y=None' if fn is maybe else ', Tensor y' * (len(args) > 1)}) -> Tensor"
    op = registry.custom_op("tests_sharding_rules::checked", fn, mutates_args=(), schema=schema)
    op.register_fake(fn)
    op.register_reference(fn, gives="gradients")
    assert "no sharding rule" in str(run_check("test_sharding", op, args).reason)
    op.register_sharding(lambda *args: right())
    outcome = run_check("test_sharding", op, args)
    assert outcome.status == "passed", outcome.error
    op.register_sharding(lambda *args: wrong())
    outcome = run_check("test_sharding", op, args)
    assert outcome.status == "failed"
    assert "the sharding rule is wrong" in str(outcome.error)
    assert __file__ in str(outcome.error)
    assert not dist.is_initialized()


def test_a_wrong_gradient_through_dtensor_is_found(registry: Registry) -> None:
    """The formula sums over the processes what each has for all."""
    op = registry.custom_op(
        "tests_sharding_rules::scaled", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    op.register_fake(torch.empty_like)

    def backward(ctx: Any, grad: Any) -> Any:
        if isinstance(grad, DTensor):
            return DTensor.from_local(grad.to_local() * 3, grad.device_mesh, grad.placements)
        return grad * 2

    op.register_autograd(backward)
    op.register_sharding(lambda x: [([Shard(0)], [Shard(0)])])
    outcome = run_check("test_sharding", op, (numbers(4, 2),))
    assert outcome.status == "failed"
    assert "the gradient of x" in str(outcome.error)


def test_beside_a_process_group_only_results_are_checked(double: Op) -> None:
    double.register_sharding(lambda x, by: [([Shard(0)], [Shard(0), None])])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert run_check("test_sharding", double, (numbers(4),)).status == "passed"
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()
