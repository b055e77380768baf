"""test_kernels: kernels of one operator agree."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.numeric_checks import Finds
from torch import Tensor

import customops
from customops.checks import NotExercised, kernels
from customops.checks._trial import Trial, resolve
from customops.errors import CheckError

aten = torch.ops.aten


@pytest.fixture
def op(registry: customops.Registry, ns: str) -> Finds:
    return Finds(kernels.check, registry, ns)


def doubled(x: Tensor) -> Tensor:
    return x * 2


def sigmoid(x: Tensor) -> Tensor:
    return x.sigmoid()


def with_kernel(op: Finds, fn: Any, kernel: Any) -> Any:
    made = op.define(fn)
    made.register_kernel("cpu", kernel)
    return made


def test_a_kernel_for_the_cpu(op: Finds) -> None:
    op.passes(with_kernel(op, sigmoid, lambda x: 1 / (1 + (-x).exp())), torch.randn(5))
    error = op.finds(with_kernel(op, sigmoid, lambda x: x.sigmoid() + 0.01), torch.randn(5), match="kernel for cpu")
    assert "test_kernels" in str(error.where)


def test_a_call_for_each_input(op: Finds) -> None:
    """Another one, whether the kernel is random, only where the reference has other results."""
    calls = []

    def noisy(x: Tensor, noise: float) -> Tensor:
        calls.append(1)
        return x * 2 + noise * torch.rand_like(x)

    made = resolve(op.define(noisy))
    kernels.check(Trial(made, (torch.randn(5), 0.0), reference=lambda x, noise: x * 2))
    assert len(calls) == 1
    with pytest.raises(NotExercised, match="equal calls have different results"):
        kernels.check(Trial(made, (torch.randn(5), 1.0), reference=lambda x, noise: x * 2))


KERNELS = {
    "nan": (lambda x: x.clamp(min=0), lambda x: torch.where(x > 0, x, 0)),
    "zero": (lambda x: x.sign(), lambda x: torch.where(x >= 0, 1.0, -1.0).to(x.dtype)),
    "inf": (
        lambda x: x.logsumexp(0).expand(len(x)),
        lambda x: ((x - x.max()).exp().sum().log() + x.max()).expand(len(x)),
    ),
    "-inf": (lambda x: x.exp(), lambda x: (x - x.min()).exp() * x.min().exp()),
    "halves": (lambda x: x.round(), lambda x: torch.where(x.isnan(), x, (x + 0.5).floor())),
}


@pytest.mark.parametrize(("general", "own"), KERNELS.values(), ids=KERNELS.keys())
def test_special_values(op: Finds, general: Any, own: Any) -> None:
    def f(x: Tensor) -> Tensor:
        return torch.empty_like(x).copy_(general(x))

    op.finds(with_kernel(op, f, lambda x: own(x).clone()), torch.rand(5) + 0.1, match="kernel for cpu")
    op.passes(with_kernel(op, f, lambda x: general(x).clone()), torch.rand(5) + 0.1)


def test_a_flag(op: Finds) -> None:
    def f(x: Tensor, exact: bool) -> Tensor:
        return x * 2 if exact else x * 3

    op.finds(with_kernel(op, f, lambda x, exact: x * 2), torch.randn(5), True, match="kernel for cpu")


def test_integers(op: Finds) -> None:
    def f(x: Tensor, size: int) -> Tensor:
        return torch.div(x, size, rounding_mode="floor")

    def truncating(x: Tensor, size: int) -> Tensor:
        return torch.div(x, size, rounding_mode="trunc")

    def narrow(x: Tensor, size: int) -> Tensor:
        return torch.div(x.to(torch.int16), size, rounding_mode="floor").long()

    x = torch.tensor([0, 5, 12])
    op.finds(with_kernel(op, f, truncating), x, 4, match="kernel for cpu")
    op.finds(with_kernel(op, f, narrow), x, 4, match="kernel for cpu")
    op.passes(with_kernel(op, f, lambda x, size: x // size), x, 4)


def test_kernels_of_torch_library(op: Finds, ns: str) -> None:
    lib = torch.library.Library(ns, "FRAGMENT")
    lib.define("f(Tensor x) -> Tensor")
    lib.impl("f", lambda x: x * 2, "CompositeExplicitAutograd")
    lib.impl("f", lambda x: x * 3, "CPU")
    op.finds(getattr(torch.ops, ns).f.default, torch.randn(3), match="kernel for cpu")
    lib._destroy()


def test_a_reference(op: Finds) -> None:
    made = op.define(doubled)
    trial = Trial(resolve(made), (torch.randn(3),), reference=lambda x: x * 2)
    kernels.check(trial)
    with pytest.raises(CheckError, match="than its reference function"):
        kernels.check(replace(trial, reference=lambda x: x * 3))


def test_a_reference_that_writes(op: Finds) -> None:
    def f(x: Tensor) -> None:
        x.mul_(2)

    made = op.define(f, mutates_args=("x",))
    trial = Trial(resolve(made), (torch.randn(3),), reference=lambda x: write(x, 2))
    kernels.check(trial)
    with pytest.raises(CheckError, match="than its reference function"):
        kernels.check(replace(trial, reference=lambda x: write(x, 3)))


def write(x: Tensor, factor: int) -> None:
    x.mul_(factor)


def test_one_kernel_is_nothing_to_compare(op: Finds) -> None:
    op.has_nothing(doubled, torch.randn(3), match="one kernel")


@pytest.mark.parametrize("inplace", [(), ("x",)], ids=str)
def test_an_out_variant_that_reads_what_it_has_written(op: Finds, inplace: Any) -> None:
    made = op.define(lambda x: x - x.roll(1), schema="(Tensor x) -> Tensor")
    made.register_fake(torch.empty_like)

    @made.register_out(inplace=inplace)
    def _(x: Tensor, *, out: Tensor) -> None:
        last = x[-1].clone()
        for i in range(len(x)):
            out[i] = x[i] - (x[i - 1] if i else last)

    if inplace:
        op.finds(made, torch.randn(5), match="where out is x")
    else:
        op.passes(made, torch.randn(5))


def test_a_reference_with_another_number_of_results(op: Finds) -> None:
    """Nothing was compared."""

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x * 3

    trial = Trial(resolve(op.define(both)), (torch.randn(3),))
    kernels.check(replace(trial, reference=lambda x: (x * 2, x * 3)))
    for reference in (lambda x: x * 2, lambda x: (x * 2, x * 3, x)):
        with pytest.raises(CheckError, match="than its reference function") as caught:
            kernels.check(replace(trial, reference=reference))
        assert caught.value.expected == "as many results"


def test_a_reference_without_a_length(op: Finds) -> None:
    """An object that is false is a function, too."""

    class Empty:
        def __len__(self) -> int:
            return 0

        def __call__(self, x: Tensor) -> Tensor:
            return x * 3

    trial = Trial(resolve(op.define(doubled)), (torch.randn(3),), reference=Empty())
    with pytest.raises(CheckError, match="than its reference function"):
        kernels.check(trial)


def test_the_message_has_the_digits_that_differ(op: Finds) -> None:
    made = op.define(sigmoid)
    trial = Trial(resolve(made), (torch.ones(1, dtype=torch.float64),), reference=lambda x: x.sigmoid() + 1e-8)
    with pytest.raises(CheckError, match="than its reference function") as caught:
        kernels.check(trial)
    assert "0.731058579 and not 0.731058589" in str(caught.value.got)


# -- values that only a reference judges ---------------------------------------------------------


def centred(w: Tensor, zero: Tensor) -> Tensor:
    return (w - zero).float()


def centred_wide(w: Tensor, zero: Tensor) -> Tensor:
    return w.float() - zero.float()


def merged(a: Tensor, low: Tensor, b: Tensor, high: Tensor) -> Tensor:
    top = torch.maximum(low, high)
    return a * (low - top).exp()[:, None] + b * (high - top).exp()[:, None]


def merged_with_care(a: Tensor, low: Tensor, b: Tensor, high: Tensor) -> Tensor:
    top = torch.maximum(low, high)
    top = top.where(top > -torch.inf, 0.0)
    return a * (low - top).exp()[:, None] + b * (high - top).exp()[:, None]


def buckets(ids: Tensor, count: int = 7) -> Tensor:
    return torch.fmod(ids * 31, count)


def positive_buckets(ids: Tensor, count: int = 7) -> Tensor:
    return torch.remainder(ids * 31, count)


def repeats(counts: Tensor) -> Tensor:
    return torch.repeat_interleave(counts)


def quotient(x: Tensor) -> Tensor:
    """Wrong near zero, where the difference has no digits."""
    return (x.exp() - 1) / x


def quotient_with_digits(x: Tensor) -> Tensor:
    return x.expm1() / x


SMALL = torch.tensor([[3, -5], [7, 2]], dtype=torch.int8)


@pytest.mark.parametrize(
    ("fn", "reference", "args"),
    [
        (centred, centred_wide, (SMALL, SMALL[0].clone())),
        (merged, merged_with_care, tuple(torch.randn(shape) for shape in ((3, 2), (3,), (3, 2), (3,)))),
        (buckets, positive_buckets, (torch.tensor([10, 20, 30]),)),
        (quotient, quotient_with_digits, (torch.rand(3, 4) + 0.5,)),
    ],
    ids=["8 bits", "two of -inf", "large ids", "near zero"],
)
def test_values_at_which_a_reference_differs(op: Finds, fn: Any, reference: Any, args: Any) -> None:
    made = op.define(fn, reference=reference, differentiable=False)
    (failure,) = customops.check(made, [args], only="test_kernels").failures
    assert failure.error.problem == "the operator has other results than its reference function"
    right = op.define(reference, reference=fn_of(reference), differentiable=False)
    assert not customops.check(right, [args], only="test_kernels").failures


def fn_of(reference: Any) -> Any:
    """Another function that computes the same."""
    return lambda *args, **kwargs: reference(*args, **kwargs)


def test_a_list_whose_last_member_is_empty(op: Finds) -> None:
    def plain(xs: list[Tensor]) -> list[Tensor]:
        return [x * 2 for x in xs]

    def late(xs: list[Tensor]) -> list[Tensor]:
        """Writes what waits with the last one, if there is one to write."""
        return [x * 2 if xs[-1].numel() else x.clone() for x in xs]

    sample = [([torch.rand(2), torch.rand(3, 2)],)]
    wrong = op.define(late, reference=plain, differentiable=False)
    (failure,) = customops.check(wrong, sample, only="test_kernels").failures
    assert failure.error.problem == "the operator has other results than its reference function"
    right = op.define(fn_of_list(plain), reference=plain, differentiable=False)
    assert not customops.check(right, sample, only="test_kernels").failures


def fn_of_list(reference: Any) -> Any:
    def same(xs: list[Tensor]) -> list[Tensor]:
        return reference(xs)  # type: ignore[no-any-return]

    return same


def test_counts_are_not_made_large(op: Finds) -> None:
    made = op.define(repeats, reference=fn_of(repeats), differentiable=False)
    assert not customops.check(made, [(torch.tensor([1, 2, 3]),)], only="test_kernels").failures


def test_a_reference_may_compute_in_the_dtype_of_the_inputs(op: Finds) -> None:
    def wide(x: Tensor) -> Tensor:
        return x.float().sum(-1)

    def narrow(x: Tensor) -> Tensor:
        return x.sum(-1).float()

    x = torch.rand(3, 40, generator=torch.Generator().manual_seed(0)).bfloat16()
    kernels.check(Trial(op.define(wide)._opoverload, (x,), reference=narrow))
    with pytest.raises(CheckError):
        kernels.check(Trial(op.define(wide)._opoverload, (x,), reference=lambda x: narrow(x) * 1.1))


# -- what a reference takes --------------------------------------------------------------------


def rows_by_numpy(table: Tensor, at: Tensor) -> Tensor:
    """Counts from the end, where `at` is negative."""
    return torch.from_numpy(table.numpy()[at.numpy()])


def rows_of_torch(table: Tensor, at: Tensor) -> Tensor:
    return torch.nn.functional.embedding(at, table)


def rows_that_are_there(table: Tensor, at: Tensor) -> Tensor:
    torch._check(bool((at >= 0).all()), lambda: "at is negative")
    return rows_by_numpy(table, at)


def inverse_of_number(x: Tensor, by: float = 2.0) -> Tensor:
    return x * (1 / by)


def sums_of_blocks(x: Tensor) -> Tensor:
    rows, columns = x.shape
    at_once = max(64 // columns, 1)
    return torch.cat([x[i : i + at_once].sum(-1) for i in range(0, max(rows, 1), at_once)])


TAKES_MORE = "the operator takes inputs that its reference function refuses"
TAKES_LESS = "the kernel fails by an error that does not say so, on inputs that the reference takes"
BY_NUMBER = "(Tensor x, float by=2.0) -> Tensor"


@pytest.mark.parametrize(
    ("schema", "fn", "reference", "problems"),
    [
        ("(Tensor table, Tensor at) -> Tensor", rows_by_numpy, rows_of_torch, [TAKES_MORE]),
        ("(Tensor table, Tensor at) -> Tensor", rows_that_are_there, rows_of_torch, []),
        ("(Tensor table, Tensor at) -> Tensor", rows_by_numpy, rows_by_numpy, []),
        (BY_NUMBER, inverse_of_number, lambda x, by=2.0: x / by, [TAKES_LESS]),
        (BY_NUMBER, lambda x, by=2.0: x / by, inverse_of_number, [TAKES_MORE]),
        # Of a matrix without columns, the sums are zeros.
        ("(Tensor x) -> Tensor", sums_of_blocks, lambda x: torch.einsum("ij->i", x), [TAKES_LESS]),
        # A reference for two dimensions alone: it may be the kernel that takes others by accident.
        (BY_NUMBER, lambda x, by: x.sum(-1) * by, lambda x, by=2.0: torch.einsum("ij->i", x) * by, []),
    ],
)
def test_kernel_and_reference_take_the_same(op: Finds, schema: str, fn: Any, reference: Any, problems: Any) -> None:
    made = op.define(fn, schema=schema)
    args = (torch.randn(3, 4),) if "table" not in schema else (torch.randn(5, 3), torch.tensor([0, 3, 2]))
    report = customops.check(made, [args], only="test_kernels", reference=reference)
    assert [each.problem for each in report.failures] == problems, report
