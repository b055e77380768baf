"""Inputs by what the code of an op mentions; and what else a run of `check` finds on derived inputs."""

from __future__ import annotations

from typing import Any, Optional

import pytest
import torch
from torch import Tensor

import customops
from customops import Registry
from customops.checks._trial import Trial
from customops.checks.inputs import derive
from customops.checks.inputs.constants import constants_of
from customops.errors import ArgumentError

BLOCK = 96


def by_mode(x: Tensor, mode: str) -> Tensor:
    return x * 3 if mode == "thirds" else x * 2


def faulty(x: Tensor, mode: str = "plain", limit: float = 1.0) -> Tensor:
    """Docstrings are no words to try."""
    y = by_mode(x, mode)
    if x.dtype == torch.bfloat16:
        y = y + 1
    if limit > 7.25:
        y = -y
    return torch.where(torch.arange(x.shape[-1]) < BLOCK, y, 0.0).to(y.dtype)


def define(registry: Registry, ns: str, fn: Any, **options: Any) -> Any:
    op = registry.custom_op(f"{ns}::f", fn, mutates_args=(), **options)
    op.register_fake(lambda x, *args: torch.empty_like(x))
    return op


def test_what_the_code_mentions(registry: Registry, ns: str) -> None:
    op = define(registry, ns, faulty)
    found = constants_of(Trial(op._opoverload, (torch.ones(3),)))
    assert {BLOCK, 3, 2, 1} <= found.ints.keys()
    assert {7.25, 0.0} <= found.floats.keys()
    assert {"thirds", "plain"} <= found.strings.keys()
    assert torch.bfloat16 in found.dtypes
    assert not any("Docstrings" in each for each in found.strings)
    assert {BLOCK, BLOCK + 1} <= {*found.sizes}


@pytest.mark.parametrize(
    "label",
    ["sizes: 5 to 97", "sizes: 5 to 96", "mode='thirds'", "limit=7.25", "x alone: bfloat16", "x: around 7.25"],
)
def test_they_are_tried(registry: Registry, ns: str, label: str) -> None:
    trial = Trial(define(registry, ns, faulty)._opoverload, (torch.randn(2, 5), "plain", 1.0))
    assert label in [case.label for case in derive(trial, effort="normal") if case.is_named]
    assert not [case for case in derive(trial, effort="quick") if case.is_named]


def plain(x: Tensor, mode: str = "plain", limit: float = 1.0) -> Tensor:
    return x * 2


def test_a_size_beyond_a_block(registry: Registry, ns: str) -> None:
    def cut(x: Tensor) -> Tensor:
        return torch.where(torch.arange(x.shape[-1]) < BLOCK, x * 2, 0.0).to(x.dtype)

    report = customops.check(define(registry, ns, cut), [(torch.randn(2, 5),)], reference=lambda x: x * 2)
    assert "test_kernels" in [failure.check for failure in report.failures]


def left_out(x: Tensor) -> Tensor:
    return x.reshape(-1)[:2048].sum().reshape(1)


def with_nan_lost(x: Tensor) -> Tensor:
    best = x[0].clone()
    for each in x[1:]:
        best = torch.where(each > best, each, best)
    return best.reshape(1)


@pytest.mark.parametrize(
    ("fn", "problem"),
    [(left_out, "the last of many elements is left out"), (with_nan_lost, "the result depends on where NaN is")],
)
def test_order(registry: Registry, ns: str, fn: Any, problem: str) -> None:
    op = registry.custom_op(f"{ns}::f", fn, mutates_args=(), schema="(Tensor x) -> Tensor")
    op.register_fake(lambda x: x.new_empty(1))
    report = customops.check(op, [(torch.randn(6),)], only="test_permutations")
    (failure,) = report.failures
    assert problem in failure.error.problem
    for right in (lambda x: x.sum().reshape(1), lambda x: x.amax().reshape(1), lambda x: x.nansum().reshape(1)):
        op.register_kernel(None, right)
        assert customops.check(op, [(torch.randn(6),)], only="test_permutations").passed


def views(x: Tensor) -> Tensor:
    return x.view(-1).mul(2).view(x.shape)


def refuses(x: Tensor) -> Tensor:
    torch._check(x.is_contiguous(), lambda: "x must be contiguous")
    return views(x)


def raises(x: Tensor) -> Tensor:
    if not x.is_contiguous():
        raise ValueError("x must be contiguous")
    return views(x)


def test_layouts_that_fail_by_accident(registry: Registry, ns: str) -> None:
    x = torch.randn(3, 4)
    report = customops.check(define(registry, ns, views), [(x,)], only="test_schema")
    (failure,) = report.failures
    assert "laid out otherwise" in failure.error.problem
    assert "views (" in (failure.error.where or "")
    for right in (refuses, raises):
        assert customops.check(define(registry, ns, right), [(x,)], only="test_schema").passed


def test_none_that_fails_by_accident(registry: Registry, ns: str) -> None:
    def scaled(x: Tensor, by: Optional[Tensor] = None) -> Tensor:
        return x * by.exp()  # type: ignore[union-attr]

    x = torch.randn(3)
    report = customops.check(define(registry, ns, scaled), [(x, x)], only="test_schema")
    assert ["optional argument is None" in each.error.problem for each in report.failures] == [True]

    def refusing(x: Tensor, by: Optional[Tensor] = None) -> Tensor:
        if by is None:
            raise TypeError("by must be a tensor, not NoneType")
        return x * by.exp()

    assert customops.check(define(registry, ns, refusing), [(x, x)], only="test_schema").passed


def test_fakes_on_meta_and_elsewhere(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::f", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor")
    x = torch.randn(3)
    op.register_fake(lambda x: torch.empty_like(x) if x.fake_mode else x)
    (failure,) = customops.check(op, [(x,)], only="test_faketensor").failures
    assert "on tensors of the meta device" in failure.error.problem
    op.register_fake(lambda x: torch.empty(x.shape, dtype=x.dtype))
    (failure,) = customops.check(op, [(x,)], only="test_faketensor").failures
    assert "on the CPU, whatever the device" in failure.error.problem
    op.register_fake(lambda x: torch.empty(x.shape, dtype=x.dtype, device=x.device))
    assert customops.check(op, [(x,)], only="test_faketensor").passed


def norm_gradient(summed: Any) -> Any:
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad * weight, summed(grad * x).to(weight.dtype)

    return backward


def save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def one_by_one(rows: Tensor) -> Tensor:
    total = torch.zeros_like(rows[0])
    for row in rows:
        total = total + row
    return total


@pytest.mark.parametrize(
    ("summed", "problem"),
    [
        (lambda rows: rows.float().sum(0) if rows.dtype.itemsize < 4 else rows.sum(0), None),
        (one_by_one, "is far from that for the same numbers in float64"),
        (lambda rows: rows[:128].sum(0), "of the gradients: the last of many elements is left out"),
    ],
)
def test_backward(registry: Registry, ns: str, summed: Any, problem: str | None) -> None:
    op = registry.custom_op(f"{ns}::f", lambda x, w: x * w, mutates_args=(), schema="(Tensor x, Tensor w) -> Tensor")
    op.register_fake(lambda x, w: torch.empty_like(x))
    op.register_autograd(
        norm_gradient(summed), setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
    )
    sample = torch.randn(4, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    report = customops.check(op, [sample], only="test_backward")
    if problem is None:
        assert report.passed
    else:
        assert any(problem in each.error.problem for each in report.failures), str(report)
        assert "backward (" in (report.failures[0].error.where or "")


def test_a_gradient_that_is_chosen(registry: Registry, ns: str) -> None:
    def rounded(x: Tensor) -> Tensor:
        scale = x.abs().max() / 7
        return torch.round(x / scale) * scale

    op = define(registry, ns, rounded)
    samples = [(torch.randn(4, 5, requires_grad=True),)]
    op.register_autograd(lambda ctx, grad: grad)  # a rounding that passes its gradient on needs no word
    assert not customops.check(op, samples, only="test_gradients").failures
    op.register_autograd(lambda ctx, grad: grad * 0.5)
    assert not customops.check(op, samples, only="test_gradients").passed
    op.register_samples(lambda: samples, gradient="chosen")
    report = customops.check(op, only="test_gradients")
    (result,) = [each for each in report.results if each.check == "test_gradients"][:1]
    assert not report.failures
    assert "its author chose it" in (result.reason or "")
    op.register_autograd(lambda ctx, grad: grad.view(-1)[:1].expand(grad.shape))
    assert not customops.check(op, only="test_gradients").passed
    with pytest.raises(ArgumentError, match="gradient has an invalid value"):
        op.register_samples(lambda: samples, gradient="none")


def test_gradients_of_zero_under_vmap(registry: Registry, ns: str) -> None:
    """Rounding leaves another number near zero in a batch than in a loop."""

    def centred(x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True)

    op = define(registry, ns, centred, reference=True)
    x = torch.randn(3, 7, requires_grad=True) * 1e3
    assert customops.check(op, [(x.detach().requires_grad_(),)], only="test_vmap").passed


def cut_softmax(x: Tensor) -> Tensor:
    kept = x[..., :2000]
    return torch.nn.functional.pad(kept.softmax(-1), (0, x.shape[-1] - kept.shape[-1]))


@pytest.mark.parametrize(("fn", "passes"), [(cut_softmax, False), (lambda x: x.softmax(-1), True), (torch.exp, True)])
def test_the_end_of_a_row(registry: Registry, ns: str, fn: Any, passes: bool) -> None:
    op = registry.custom_op(f"{ns}::f", fn, mutates_args=(), schema="(Tensor x) -> Tensor")
    op.register_fake(lambda x: torch.empty_like(x))
    report = customops.check(op, [(torch.randn(2, 5),)], only="test_permutations")
    assert bool(report.failures) is not passes


def test_what_does_not_depend_on_values_may_have_nan(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::f", lambda x: x.nan_to_num(), mutates_args=(), schema="(Tensor x) -> Tensor")
    op.register_fake(lambda x: torch.empty_like(x))
    op.register_autograd(
        lambda ctx, grad: grad * ctx.saved_tensors[0].isfinite(),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    assert customops.check(op, [(torch.randn(4, 3, requires_grad=True),)], only="test_backward").passed


def test_a_gradient_of_nan(registry: Registry, ns: str) -> None:
    def power(x: Tensor, n: float) -> Tensor:
        return x**n

    op = define(registry, ns, power)

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return grad * ctx.n * x**ctx.n / x, None

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.n = inputs[1]

    op.register_autograd(backward, setup_context=setup)
    sample = torch.randn(3, requires_grad=True), 3.0
    (failure,) = customops.check(op, [sample], only="test_gradients").failures
    assert "is NaN where the operator has a derivative" in failure.error.problem
    op.register_autograd(
        lambda ctx, grad: (grad * ctx.n * ctx.saved_tensors[0] ** (ctx.n - 1), None), setup_context=setup
    )
    assert customops.check(op, [sample], only="test_gradients").passed


def test_a_root_has_no_slope_at_zero(registry: Registry, ns: str) -> None:
    """Its gradient there is infinite, and zero times that is NaN."""
    op = define(registry, ns, lambda x: (x * x).sqrt(), schema="(Tensor x) -> Tensor")
    op.register_autograd(
        lambda ctx, grad: grad * ctx.saved_tensors[0] / (ctx.saved_tensors[0] ** 2).sqrt(),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    assert not customops.check(op, [(torch.randn(3, requires_grad=True),)], only="test_gradients").failures


@pytest.mark.parametrize(("negated", "passes"), [(lambda mask: ~mask, False), (torch.logical_not, True)])
def test_masks_of_uint8(registry: Registry, ns: str, negated: Any, passes: bool) -> None:
    def fill(x: Tensor, mask: Tensor) -> Tensor:
        return torch.where(negated(mask) > 0, x, 0.0).to(x.dtype)

    op = define(registry, ns, fill)
    sample = torch.randn(4), torch.tensor([True, False, True, True])
    assert customops.check(op, [sample], only="test_precision").passed is passes


@pytest.mark.parametrize(("eps", "passes"), [(1e-8, False), (1e-3, True)])
def test_zeros_in_float16(registry: Registry, ns: str, eps: float, passes: bool) -> None:
    def unit(x: Tensor) -> Tensor:
        return x / (x.abs().sum(-1, keepdim=True) + torch.tensor(eps, dtype=x.dtype))

    op = define(registry, ns, unit)
    assert customops.check(op, [(torch.rand(3, 4) + 0.5,)], only="test_precision").passed is passes


def test_places_that_a_mask_leaves_out(registry: Registry, ns: str) -> None:
    def chosen(x: Tensor, mask: Tensor) -> Tensor:
        y = torch.empty_like(x)
        y[mask] = x[mask] * 2
        return y

    op = define(registry, ns, chosen)
    sample = torch.randn(4, 3), torch.ones(4, dtype=torch.bool)
    assert not customops.check(op, [sample], only="test_uninitialized_memory").passed


def test_denormal_numbers(registry: Registry, ns: str) -> None:
    if not torch.set_flush_denormal(False):
        pytest.skip("this processor has no such mode")

    def fast(x: Tensor) -> Tensor:
        torch.set_flush_denormal(True)
        return x.tanh()

    (failure,) = customops.check(define(registry, ns, fast), [(torch.randn(3),)], only="test_state").failures
    assert "whether denormal numbers are taken for zero" in failure.error.problem
    assert (torch.tensor(1e-40) * 1).item() != 0


def test_dims_in_lists(registry: Registry, ns: str) -> None:
    """Several dimensions where the sample has one, and a permutation that is not its own inverse."""

    def summed(x: Tensor, dims: list[int]) -> Tensor:
        return x.sum(dims)

    def permuted(x: Tensor, dims: list[int]) -> Tensor:
        return x.permute(dims).contiguous()

    op = registry.custom_op(f"{ns}::summed", summed, mutates_args=())
    labels = [case.label for case in derive(Trial(op._opoverload, (torch.randn(2, 3, 4), [1])), effort="quick")]
    assert {"dims=[0, 1]", "dims=[0, 1, 2]"} <= {*labels}
    op = registry.custom_op(f"{ns}::permuted", permuted, mutates_args=())
    labels = [case.label for case in derive(Trial(op._opoverload, (torch.randn(3, 4), [1, 0])), effort="normal")]
    assert "x: one more dimension, dims=[1, 2, 0]" in labels


def test_a_tensor_for_a_number(registry: Registry, ns: str) -> None:
    def times(x: Tensor, by: float | Tensor) -> Tensor:
        return x * by

    op = registry.custom_op(f"{ns}::times", times, mutates_args=())
    args, kwargs = op.lower(torch.randn(2, 3), 2.0)
    cases = {case.label: case.trial for case in derive(Trial(op._opoverload, args, kwargs), effort="normal")}
    assert cases["by: a tensor"].tensors[1].shape == ()
    assert cases["by: a tensor for each column"].tensors[1].tolist() == [2.0, 1.5, 1.0]


def test_lengths_that_differ(registry: Registry, ns: str) -> None:
    """All are cut at the first one's length, which the sample does not show, as all are equal there."""

    def mean(x: Tensor, lengths: Tensor) -> Tensor:
        return torch.stack([row[: int(lengths[0])].mean(0) for row in x])

    op = registry.custom_op(f"{ns}::mean", mean, mutates_args=())
    op.register_fake(lambda x, lengths: x.new_empty(x.shape[0], x.shape[2]))
    report = customops.check(op, [(torch.randn(2, 5, 3), torch.tensor([4, 4]))], only="test_batches")
    assert report.failures[0].error.problem == (
        "an element of a batch has another result beside elements with other integers"
    )
    assert report.failures[0].error.argument == "lengths"


def test_equal_results_show_no_batch(registry: Registry, ns: str) -> None:
    """The stop sequence is as long as there are rows, and no row ends with it: it looks like a part of the batch."""

    def ends_with(tokens: Tensor, lengths: Tensor, stop: Tensor) -> Tensor:
        stops = stop.tolist()
        rows = zip(tokens.tolist(), lengths.tolist(), strict=True)
        return torch.tensor([row[max(end - len(stops), 0) : end] == stops for row, end in rows])

    op = registry.custom_op(f"{ns}::ends_with", ends_with, mutates_args=())
    op.register_fake(lambda tokens, lengths, stop: tokens.new_empty(tokens.shape[0], dtype=torch.bool))
    sample = torch.tensor([[1, 1, 2], [2, 3, 3]]), torch.tensor([3, 3]), torch.tensor([2, 2])
    assert not customops.check(op, [sample], only="test_batches").failures


def test_a_generator_goes_on(registry: Registry, ns: str) -> None:
    def jitter(x: Tensor, generator: Optional[torch.Generator] = None) -> Tensor:
        if generator is not None:
            generator = torch.Generator().manual_seed(generator.initial_seed())
        return x + torch.rand(x.shape, generator=generator)

    op = registry.custom_op(f"{ns}::jitter", jitter, mutates_args=(), tags=torch.Tag.nondeterministic_seeded)
    report = customops.check(op, [(torch.randn(4),)], only="test_determinism")
    assert "draws the same numbers" in report.failures[0].error.problem


def test_bfloat16_is_no_float16(registry: Registry, ns: str) -> None:
    def doubled(x: Tensor) -> Tensor:
        narrow = x.half() if x.dtype is torch.bfloat16 else x
        return (narrow * 2).to(x.dtype)

    op = registry.custom_op(f"{ns}::doubled", doubled, mutates_args=())
    op.register_fake(lambda x: torch.empty_like(x))
    (failure,) = customops.check(op, [(torch.randn(4),)], only="test_stability").failures
    assert "65504" in str(failure.error.fix)


def test_float64_in_the_default_dtype(registry: Registry, ns: str) -> None:
    def ramped(x: Tensor) -> Tensor:
        return x * torch.linspace(0, 1, x.shape[-1])

    op = registry.custom_op(f"{ns}::ramped", ramped, mutates_args=())
    op.register_fake(lambda x: torch.empty_like(x))
    (failure,) = customops.check(op, [(torch.randn(7),)], only="test_resolution").failures
    assert failure.error.problem == "a result for float64 has the precision of torch's default dtype"


def test_small_terms_of_gradients(registry: Registry, ns: str) -> None:
    """Finite differences are trusted to their own error."""

    def scaled(x: Tensor) -> Tensor:
        return 2 * x

    op = registry.custom_op(f"{ns}::scaled", scaled, mutates_args=())
    op.register_autograd(lambda ctx, grad: grad * 2.00002)
    (failure,) = customops.check(op, [(torch.randn(4, requires_grad=True),)], only="test_gradients").failures
    assert failure.check == "test_gradients"


def test_symmetric_matrices_stay_so(registry: Registry, ns: str) -> None:
    def inverse(x: Tensor) -> Tensor:
        return torch.linalg.pinv(x, hermitian=True)

    op = registry.custom_op(f"{ns}::inverse", inverse, mutates_args=())
    op.register_fake(torch.empty_like)
    op.register_reference(inverse, gives="gradients")
    x = torch.randn(4, 4)
    assert not customops.check(op, [(x + x.mT,)], only="test_gradients").failures


def test_a_quantized_row_of_zeros(registry: Registry, ns: str) -> None:
    def quantized(x: Tensor) -> Tensor:
        return (x / (x.abs().amax(-1, keepdim=True) / 448)).to(torch.float8_e4m3fn)

    op = registry.custom_op(f"{ns}::quantized", quantized, mutates_args=())
    (failure,) = customops.check(op, [(torch.randn(4, 8),)], only="test_stability").failures
    assert "row of zeros" in failure.error.problem

    def shares(x: Tensor) -> Tensor:
        return x / x.sum(-1, keepdim=True)

    op = registry.custom_op(f"{ns}::shares", shares, mutates_args=())
    assert not customops.check(op, [(torch.rand(4, 8),)], only="test_stability").failures


def test_a_selection_by_values(registry: Registry, ns: str) -> None:
    """Ties select more than k elements."""

    def largest(x: Tensor, k: int) -> Tensor:
        bound = x.sort(-1, descending=True).values[:, k - 1 : k]
        return x[x >= bound].reshape(len(x), k)

    op = registry.custom_op(f"{ns}::largest", largest, mutates_args=())
    op.register_fake(lambda x, k: x.new_empty(len(x), k))
    failure = customops.check(op, [(torch.randn(4, 8), 2)], only="test_schema").failures[0]
    assert failure.check == "inputs"
    assert "for some values" in failure.error.problem


def test_a_tag_that_is_not_kept(registry: Registry, ns: str) -> None:
    """The tag says random; the numbers are the same in each call."""

    def noisy(x: Tensor) -> Tensor:
        return x + torch.rand(x.shape, generator=torch.Generator().manual_seed(0))

    op = registry.custom_op(f"{ns}::noisy", noisy, mutates_args=(), tags=torch.Tag.nondeterministic_seeded)
    (failure,) = customops.check(op, [(torch.randn(4),)], only="test_determinism").failures
    assert "do not depend on torch's seed" in failure.error.problem


def test_keys_longer_than_queries(registry: Registry, ns: str) -> None:
    def scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).softmax(-1) @ v

    op = registry.custom_op(f"{ns}::scores", scores, mutates_args=())
    cases = derive(Trial(op._opoverload, tuple(torch.randn(5, 8) for _ in range(3))), effort="normal")
    assert "all of size 5 but q: 7" in [case.label for case in cases if case.is_named]
