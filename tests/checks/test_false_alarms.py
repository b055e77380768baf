"""Correct ops that a check once reported as broken. Most of them are modeled on ops of aten."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Shard

import customops
from customops import Registry
from customops.checks import CHECKS, NotExercised, Trial, run_check
from customops.checks.inputs import derive
from customops.checks.inputs.parts import follow
from customops.checks.modes import _Through
from customops.errors import CheckError

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("check", "op", "args"),
    [
        ("test_symbolic_sizes", aten.acos_.default, (torch.rand(21)[1:],)),
        ("test_symbolic_sizes", aten.slice.Tensor, (torch.rand(21)[1:], 0, 1, 4)),
    ],
    ids=["acos_", "slice"],
)
def test_no_finding(check: str, op: Any, args: tuple[Any, ...]) -> None:
    report = customops.check(op, [args], only=check, effort="quick")
    assert not report.failures, str(report)
    assert any(result.status == "passed" for result in report.results)


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.pow.Tensor_Scalar, (torch.rand(5, 2, 3), 2)),  # its exponent grows with a size of 2
        (aten.adaptive_max_pool3d.default, (torch.randn(2, 2, 5, 3, 5), [4, 3, 5])),  # of windows of one element
        (aten.adaptive_max_pool3d.default, (4 * torch.randn(4, 4, 3, 5), [4, 3, 5])),
        (aten.upsample_nearest1d.default, (torch.randn(2, 1, 2), [3])),  # whose scale counts if it is positive
    ],
    ids=["pow", "adaptive_max_pool3d", "adaptive_max_pool3d of cubes", "upsample_nearest1d"],
)
def test_what_values_do_depends_on_more_than_sizes(op: Any, args: tuple[Any, ...]) -> None:
    report = customops.check(op, [args], only="test_symmetries", isolate=True)
    assert not report.failures, str(report)


def test_what_values_do_depends_on_indices_that_repeat(registry: Registry, ns: str) -> None:
    """Two rows at two places have no duplicates; four at three places do."""

    @registry.custom_op(f"{ns}::scatter_add", mutates_args=())
    def scatter_add(x: Tensor, index: Tensor, rows: Tensor) -> Tensor:
        torch._check(x.dim() == 2 and x.shape[1:] == rows.shape[1:])
        return x.index_add(0, index, rows)

    args = (torch.rand(3, 2).double(), torch.tensor([2, 0]), torch.rand(2, 2).double())
    report = customops.check(scatter_add, [args], only="test_symmetries")
    assert not report.failures, str(report)


def test_bits_of_negative_numbers_are_as_many_as_the_dtype_has(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::ones", mutates_args=(), differentiable=False)
    def ones(x: Tensor) -> Tensor:
        return torch.tensor([bin(n % 2 ** (8 * x.itemsize)).count("1") for n in x.tolist()], dtype=torch.uint8)

    assert run_check("test_precision", ones, (torch.tensor([0, 1, 255, -1], dtype=torch.int32),)).status == "passed"


def test_few_samples_may_be_the_same(registry: Registry, ns: str) -> None:
    """One of two rows is drawn, from two seeds: often the same one."""

    @registry.custom_op(f"{ns}::pick", mutates_args=(), tags=torch.Tag.nondeterministic_seeded)
    def pick(x: Tensor) -> Tensor:
        return x[torch.randint(len(x), ())].clone()

    assert run_check("test_determinism", pick, (torch.rand(2, 1),)).status == "passed"


def test_samples_of_weights_of_which_one_is_not_zero(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::sample", mutates_args=(), tags=torch.Tag.nondeterministic_seeded)
    def sample(weights: Tensor) -> Tensor:
        sums = weights.cumsum(-1)
        return (sums <= torch.rand(len(weights), 1) * sums[:, -1:]).sum(-1)

    report = customops.check(sample, [(torch.tensor([[0.0, 1.0], [2.0, 0.0]]),)], only="test_determinism")
    assert not report.failures, str(report)


def test_rows_that_are_kept_for_their_first_element(registry: Registry, ns: str) -> None:
    """Whether there is a row depends on the order; of the sample, no element comes first that keeps it."""

    @registry.custom_op(f"{ns}::positive_rows", mutates_args=())
    def positive_rows(x: Tensor) -> Tensor:
        torch._check(x.dim() == 2 and x.shape[1] > 0)
        return x[x[:, 0] > 0]

    for seed in range(8):
        x = torch.randn(1, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        report = customops.check(positive_rows, [(x,)], only="test_permutations")
        assert not report.failures, str(report)


def test_a_clamp_by_the_smallest_number_is_no_loss_of_precision(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::scale", mutates_args=(), differentiable=False)
    def scale(x: Tensor) -> Tensor:
        return x.abs().amax(-1).clamp(min=torch.finfo(x.dtype).tiny) / 127

    assert run_check("test_precision", scale, (torch.zeros(3, 4),)).status == "passed"


def test_where_all_elements_tie_a_gradient_is_one_of_several(registry: Registry, ns: str) -> None:
    """Along each single direction the largest two of zeros have a slope, of which a gradient has two elements."""

    @registry.custom_op(f"{ns}::largest_two", mutates_args=())
    def largest_two(x: Tensor) -> Tensor:
        return x.gather(-1, x.abs().argsort(stable=True, dim=-1, descending=True)[..., :2])

    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.zeros_like(x).scatter(-1, x.abs().argsort(stable=True, dim=-1, descending=True)[..., :2], gradient)

    largest_two.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
    largest_two.register_fake(lambda x: x.new_empty((*x.shape[:-1], 2)))
    for x in (torch.zeros(2, 4), torch.zeros(1, 4, dtype=torch.float64)):
        result = run_check("test_gradients", largest_two, (x.requires_grad_(),))
        assert result.status == "passed", result
    largest_two.register_autograd(
        lambda ctx, gradient: backward(ctx, gradient * 2),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    assert run_check("test_gradients", largest_two, (torch.zeros(2, 4).requires_grad_(),)).status == "failed"


@pytest.mark.compile
@pytest.mark.parametrize("op", [aten.allclose.default, aten.equal.default], ids=str)
def test_an_op_tagged_as_depending_on_data_is_not_traced(op: Any) -> None:
    with pytest.raises(NotExercised, match="tagged as depending on data"):
        CHECKS["test_aot_dispatch_dynamic"](Trial(op, (torch.ones(3), torch.ones(3))))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_gradients_of_sparse_results() -> None:
    """They were compared by `nan_to_num`, which sparse matrices do not have."""
    x = torch.eye(2).to_sparse_csr().requires_grad_()
    report = customops.check(
        aten.sparse_sampled_addmm.default,
        [(x, torch.rand(2, 2), torch.rand(2, 2))],
        only="test_gradients",
        effort="quick",
    )
    assert not report.failures, str(report)


def test_inputs_are_derived_of_complex_tensors() -> None:
    assert len(list(derive(Trial(aten.view_as_real.default, (torch.rand(3, 4, dtype=torch.complex64),))))) > 5


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.uint8, torch.uint16, torch.int8], ids=str
)
def test_inputs_are_derived_of_all_dtypes(dtype: torch.dtype) -> None:
    x = torch.arange(1, 9).to(dtype)
    cases = list(derive(Trial(aten.index_select.default, (torch.rand(300), 0, x.view(torch.uint8).int()))))
    cases += list(derive(Trial(aten.stack.default, ([x, x.clone()],))))
    assert {"value", "size", "layout"} <= {case.kind for case in cases}


def test_indices_stay_in_their_dtype_where_a_dimension_outgrows_it() -> None:
    index = torch.tensor([3, 7], dtype=torch.uint8)
    for sizes in ({8: 300}, {7: 300}):
        assert follow(index, sizes).dtype is torch.uint8


def test_a_dispatch_mode_passes_higher_order_ops_on() -> None:
    with _Through():
        torch.ops.higher_order.out_dtype(aten.mm.default, torch.int32, *[torch.ones(2, 2, dtype=torch.int8)] * 2)


# ----------------------------------------------------------------------------------------------------------------------
# What holds at the sample's sizes, and is no law


def unit_rows(x: Tensor, least: float) -> Tensor:
    """While they are short, elements are divided by a constant, each by itself."""
    return x / x.norm(dim=-1, keepdim=True).clamp(min=least)


def dilated(x: Tensor) -> Tensor:
    return torch.nn.functional.max_pool1d(x.float()[None], 3, 1, 1)[0].bool()


def unwrapped(x: Tensor) -> Tensor:
    """Where no step is large, these are the elements themselves."""
    steps = x.diff(dim=-1)
    turns = (steps.abs() > math.pi) * steps.sign() * 2 * math.pi
    return x - torch.nn.functional.pad(turns, (1, 0)).cumsum(-1)


def moved(x: Tensor, mean: Tensor, step: Tensor) -> Tensor:
    """Where all have one sign, it does not matter whose it is."""
    return x - torch.from_numpy(np.sign((mean + step).numpy()))


@pytest.mark.parametrize(
    ("check", "fn", "args"),
    [
        ("test_batches", unit_rows, (torch.tensor([1.0, 2.0], dtype=torch.float64), 10.0)),
        ("test_batches", dilated, (torch.tensor([[True, False]]),)),
        ("test_permutations", unwrapped, (torch.tensor([0.0, 2.0, -1.0, -2.5, 0.5], dtype=torch.float64),)),
        ("test_permutations", unwrapped, (torch.tensor([[1.0, 2.0]], dtype=torch.float64),)),
        ("test_permutations", moved, tuple(torch.arange(1.0, 3.0, dtype=torch.float64) for _ in range(3))),
    ],
    ids=["rows below a limit", "a few flags", "small steps", "two steps", "one sign"],
)
def test_a_law_of_some_values_is_none(registry: Registry, ns: str, check: str, fn: Any, args: Any) -> None:
    op = registry.custom_op(f"{ns}::f", fn, mutates_args=(), differentiable=False)
    assert run_check(check, op, args).status != "failed"


def test_a_law_of_nearly_equal_numbers_is_none(registry: Registry, ns: str) -> None:
    """What is added to them rounds them, differently for each size."""

    @registry.custom_op(f"{ns}::spread", mutates_args=(), differentiable=False)
    def spread(x: Tensor) -> Tensor:
        return (x.var(-1, correction=0) + 1e-6).rsqrt()

    x = 999.7 + torch.rand(7, 3, generator=torch.Generator().manual_seed(1)) / 5
    assert run_check("test_symmetries", spread, (x,)).status != "failed"


def test_lengths_say_how_many_elements_count(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::sums", mutates_args=(), differentiable=False)
    def sums(x: Tensor, lengths: Tensor, most: int = 4) -> Tensor:
        inside = torch.arange(x.shape[1]) < lengths[:, None].clamp(max=most)
        return x.where(inside, 0.0).sum(1)

    for lengths in (torch.tensor([4, 4]), torch.tensor([100, 100])):
        assert run_check("test_permutations", sums, (torch.rand(2, 4), lengths)).status != "failed"


def test_indices_say_which_rows_count(registry: Registry, ns: str) -> None:
    """A sample that names all of three points depends on each; of a thousand points the same indices name three."""

    @registry.custom_op(f"{ns}::corners", mutates_args=(), differentiable=False)
    def corners(points: Tensor, triangles: Tensor) -> Tensor:
        return points[triangles.long()].sum((0, 1))

    triangles = torch.tensor([[2, 1, 0]], dtype=torch.int32)
    assert run_check("test_permutations", corners, (torch.rand(3, 3), triangles)).status != "failed"


def test_the_last_of_many_is_as_the_first(registry: Registry, ns: str) -> None:
    """A result may depend on the first since it is large, and not on the last, as it is small."""

    @registry.custom_op(f"{ns}::above", mutates_args=(), differentiable=False)
    def above(x: Tensor, limits: Tensor) -> Tensor:
        return (x.clamp(-9, 9) * (x.abs() > limits)).sum()

    for seed in range(4):
        x = torch.rand(6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        assert run_check("test_permutations", above, (x, x.flip(0) / 2)).status != "failed"


def test_a_gradient_that_counts_among_all_is_no_fault(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::balance", mutates_args=())
    def balance(p: Tensor, experts: Tensor) -> Tensor:
        return p * torch.bincount(experts.reshape(-1), minlength=p.shape[1]) / experts.numel()

    args = (torch.rand(2, 4, dtype=torch.float64), torch.tensor([[3], [3]]))
    assert run_check("test_batches", balance, args).status != "failed"


def test_a_law_that_the_reference_breaks_is_none(registry: Registry, ns: str) -> None:
    def plain(x: Tensor) -> Tensor:
        return x * (2 if x.shape[0] > 40 else 1)

    def kernel(x: Tensor) -> Tensor:
        return x + x if x.shape[0] > 40 else x.clone()

    with_reference = registry.custom_op(f"{ns}::f", kernel, mutates_args=(), reference=plain)
    without = registry.custom_op(f"{ns}::g", kernel, mutates_args=())
    without.register_fake(torch.empty_like)
    sample = [(torch.randn(5, 3),)]
    results = customops.check(with_reference, sample, only="test_batches").results
    (result,) = (each for each in results if (each.check, each.input) == ("test_batches", "sample 1"))
    assert result.reason == "what is expected here does not hold for the reference either"
    assert customops.check(without, sample, only="test_batches").failures


def test_a_law_that_the_reference_of_an_op_that_writes_breaks_is_none(registry: Registry, ns: str) -> None:
    """Elements of a row look like a batch while its mask is short."""

    def plain(x: Tensor, mask: Tensor) -> Tensor:
        at = torch.arange(x.shape[1])
        return x.masked_fill((mask[:, at // 32] >> (at % 32)) & 1 == 0, 0.0)

    @registry.custom_op(f"{ns}::mask_", mutates_args=("x",), differentiable=False, reference=plain)
    def mask_(x: Tensor, mask: Tensor) -> None:
        x.copy_(plain(x, mask))

    sample = [(torch.tensor([[1.0, 2.0]]), torch.tensor([[32]]))]
    results = customops.check(mask_, sample, only="test_batches").results
    assert not [each for each in results if each.status == "failed"]
    assert "what is expected here does not hold for the reference either" in {each.reason for each in results}


def test_a_second_derivative_beside_a_pole_is_that_of_the_reference(registry: Registry, ns: str) -> None:
    """Differences have no digits there."""

    def plain(x: Tensor) -> Tensor:
        return torch.log(-torch.expm1(x.double())).to(x.dtype)

    op = registry.custom_op(f"{ns}::log1mexp", lambda x: plain(x), schema="(Tensor x) -> Tensor", reference=plain)
    sample = [(torch.tensor([-1e-8, -0.5], requires_grad=True),)]
    results = customops.check(op, sample, only="test_second_order").results
    (result,) = (each for each in results if (each.check, each.input) == ("test_second_order", "sample 1"))
    assert result.reason == "what is expected here does not hold for the reference either"


def test_a_gradient_is_as_precise_as_that_of_the_reference(registry: Registry, ns: str) -> None:
    def plain(x: Tensor) -> Tensor:
        return x.exp().log().clamp(max=80)  # its gradient overflows where it does not

    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x.exp() / x.exp()

    with_reference = registry.custom_op(f"{ns}::f", lambda x: plain(x), schema="(Tensor x) -> Tensor", reference=plain)
    without = registry.custom_op(f"{ns}::g", lambda x: x.clone(), schema="(Tensor x) -> Tensor", mutates_args=())
    without.register_fake(torch.empty_like)
    without.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
    sample = [(torch.randn(4, requires_grad=True),)]
    assert not customops.check(with_reference, sample, only="test_backward").failures
    assert customops.check(without, sample, only="test_backward").failures


def test_windows_that_do_not_overlap_show_no_law(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::overlap_add", mutates_args=(), differentiable=False)
    def overlap_add(frames: Tensor, hop: int) -> Tensor:
        count, size = frames.shape[-2:]
        out = frames.new_zeros(*frames.shape[:-2], (count - 1) * hop + size)
        for i in range(count):
            out[..., i * hop : i * hop + size] += frames[..., i, :]
        return out

    for seed in range(4):
        frames = torch.rand(2, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        assert run_check("test_symmetries", overlap_add, (frames, 3)).status != "failed"


def test_what_rounding_leaves_beside_nan_is_no_fault(registry: Registry, ns: str) -> None:
    """Of a * b - b * a a kernel with fused steps has the rounding of one product; all other results are NaN."""

    def plain(x: Tensor) -> Tensor:
        torch._check(x.dtype is torch.float32)
        a, b = x.double().unbind(1)
        return ((a * b).float().double() - a * b).to(x.dtype)

    @registry.custom_op(f"{ns}::areas", mutates_args=(), differentiable=False, reference=plain)
    def areas(x: Tensor) -> Tensor:
        torch._check(x.dtype is torch.float32)
        a, b = x.unbind(1)
        return a * b - b * a

    x = torch.rand(4, 2)
    x[1:] = float("inf")
    assert not customops.check(areas, [(x,)], only="test_kernels").failures


def test_what_an_op_leaves_as_it_was_follows_no_law(registry: Registry, ns: str) -> None:
    """A rotation of part of each head: in the sample it is all of it."""

    @registry.custom_op(f"{ns}::rotate_", mutates_args=("q", "k"), differentiable=False)
    def rotate_(at: Tensor, q: Tensor, k: Tensor, turns: Tensor) -> None:
        torch._check(turns.shape[1] % 2 == 0 and turns.shape[1] <= q.shape[2] and at.dtype is torch.int64)
        torch._check(q.shape[0] == k.shape[0] == at.shape[0] and q.shape[2] == k.shape[2])
        half, by = turns.shape[1] // 2, turns[at]
        cos, sin = by[:, None, :half], by[:, None, half:]
        for x in (q, k):
            a, b = x[..., :half].clone(), x[..., half : 2 * half].clone()
            x[..., : 2 * half] = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    for seed in range(4):
        numbers = torch.Generator().manual_seed(seed)
        q, k, turns = (torch.randn(*shape, generator=numbers) for shape in ((3, 4, 2), (3, 2, 2), (5, 2)))
        assert run_check("test_symmetries", rotate_, (torch.tensor([0, 1, 1]), q, k, turns)).status != "failed"


def test_padding_by_a_size_is_symbolic(registry: Registry, ns: str) -> None:
    """torch has it for symbols in Python alone, which tracing asks first."""

    def padded(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x, (0, -x.shape[-1] % 8))

    op = registry.custom_op(f"{ns}::padded", padded, mutates_args=(), reference=padded)
    assert run_check("test_symbolic_sizes", op, (torch.rand(3, 11),)).status == "passed"


def test_parts_of_lists_that_are_written_are_placed_each_by_itself(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::average")
    def average(averages: customops.Mut[list[Tensor]], values: list[Tensor]) -> None:
        for a, v in zip(averages, values, strict=True):
            a.mul_(0.5).add_(v, alpha=0.5)

    @average.register_sharding
    def _(averages: Any, values: Any) -> Any:
        return [([], [Shard(0)] * (len(averages) + len(values)))]

    sample = ([torch.rand(3), torch.rand(2, 2)], [torch.rand(3), torch.rand(2, 2)])
    report = customops.check(average, [sample], only="test_sharding", effort="normal")
    assert not report.failures, report
    assert any(result.status == "passed" for result in report.results)


@pytest.mark.compile
def test_gradients_of_a_size_that_depends_on_data_are_not_traced(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::rows", mutates_args=())
    def rows(x: Tensor, lengths: Tensor) -> Tensor:
        return x[: int(lengths.sum())].clone()

    @rows.register_fake
    def _(x: Tensor, lengths: Tensor) -> Tensor:
        return x.new_empty(customops.get_ctx().new_dynamic_size(), x.shape[1])

    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.new_zeros(ctx.shape).index_add(0, torch.arange(gradient.shape[0]), gradient), None

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.shape = inputs[0].shape

    rows.register_autograd(backward, setup_context=setup)
    args = (torch.rand(4, 2).requires_grad_(), torch.tensor([1, 2]))
    assert run_check("test_aot_dispatch_dynamic", rows, args).status in ("passed", "not exercised")
    calls: list[float] = []

    def other_each_time(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Torch traces this one, and what it makes is wrong."""
        calls.append(1.0)
        return gradient.new_zeros(ctx.shape) + gradient.sum() * len(calls), None

    rows.register_autograd(other_each_time, setup_context=setup)
    assert run_check("test_aot_dispatch_dynamic", rows, args).status == "failed"


def test_a_matrix_without_an_inverse_is_refused(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::logdet", mutates_args=())
    def logdet(a: Tensor) -> Tensor:
        return torch.from_numpy(np.asarray(np.linalg.slogdet(a.detach().numpy())[1]))

    logdet.register_fake(lambda a: a.new_empty(()))
    logdet.register_autograd(
        lambda ctx, gradient: gradient * torch.linalg.inv(ctx.saved_tensors[0]).t(),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    for a in (torch.zeros(2, 2), torch.eye(2) + torch.rand(2, 2)):
        outcome = run_check("test_gradients", logdet, (a.double().requires_grad_(),))
        assert outcome.status == ("passed" if a.any() else "not exercised"), outcome


def test_an_element_without_a_weight_is_not_lost(registry: Registry, ns: str) -> None:
    """0 * NaN is NaN, and so is 0 * inf."""

    @registry.custom_op(f"{ns}::leaky", mutates_args=(), differentiable=False)
    def leaky(x: Tensor, a: float) -> Tensor:
        rows, last = [], torch.zeros(())
        for each in x:
            last = a * each + (1 - a) * last
            rows.append(last)
        return torch.stack(rows)

    assert run_check("test_permutations", leaky, (torch.rand(3, dtype=torch.float64), 1.0)).status != "failed"


def test_what_is_nearly_zero_may_be_rounding(registry: Registry, ns: str) -> None:
    def in_two_passes(x: Tensor) -> Tensor:
        return (x - x.mean(0)).square().mean(0)

    @registry.custom_op(f"{ns}::variance", mutates_args=(), reference=in_two_passes)
    def variance(x: Tensor) -> Tensor:
        return x.var(0, correction=0)

    x = torch.full((25, 1), 0.7)
    CHECKS["test_kernels"](Trial(variance._opoverload, (x,), reference=lambda x: in_two_passes(x) + 3e-27))
    with pytest.raises(CheckError):
        CHECKS["test_kernels"](Trial(variance._opoverload, (x,), reference=lambda x: in_two_passes(x) + 1e-3))


def test_a_rule_that_torch_refuses_to_batch(registry: Registry, ns: str) -> None:
    def plain(x: Tensor) -> Tensor:
        return torch.unique(x)

    @registry.custom_op(f"{ns}::unique", mutates_args=(), reference=plain, differentiable=False)
    def unique(x: Tensor) -> Tensor:
        return torch.from_numpy(np.unique(x.numpy()))

    assert run_check("test_vmap", unique, (torch.tensor([1, 2, 1]),)).status == "not exercised"


def test_a_tensor_for_an_argument_without_a_gradient_is_constant(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::scaled", mutates_args=())
    def scaled(x: Tensor, by: Tensor) -> Tensor:
        return x * by

    scaled.register_autograd(
        lambda ctx, gradient: {"x": gradient * ctx.saved_tensors[1]},
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
        nondiff_args="by",
    )
    scaled.register_fake(lambda x, by: torch.empty_like(x))
    x = torch.rand(3, dtype=torch.float64, requires_grad=True)
    assert run_check("test_gradients", scaled, (x, x.detach() + 1)).status == "passed"
    assert run_check("test_gradients", scaled, (x, x)).status == "not exercised"


def test_what_two_elements_leave_alone_more_of_them_write(registry: Registry, ns: str) -> None:
    """The ends are held: of two elements nothing is written."""

    @registry.custom_op(f"{ns}::smooth_")
    def smooth_(x: customops.Mut[Tensor]) -> None:
        x[1:-1] = (x[2:] + x[:-2]) / 2

    @registry.custom_op(f"{ns}::reads")
    def reads(x: customops.Mut[Tensor]) -> None:
        x.sum()

    assert run_check("test_writes", smooth_, (torch.rand(2),)).status == "passed"
    assert run_check("test_writes", reads, (torch.rand(2),)).status == "failed"

    @registry.custom_op(f"{ns}::put")
    def put(x: customops.Mut[Tensor], at: Tensor) -> None:
        x[at] = 1.0

    nothing = torch.tensor([], dtype=torch.int64)
    assert run_check("test_writes", put, (torch.rand(2), nothing)).status == "passed"


def test_infinite_elements_beside_zeros_stay_what_they_are(registry: Registry, ns: str) -> None:
    """Zeros are made to differ, by numbers that are small beside the finite ones."""
    seen = []

    @registry.custom_op(f"{ns}::total", mutates_args=(), differentiable=False)
    def total(x: Tensor) -> Tensor:
        seen.append(x.clone())
        return x.logsumexp(0)

    run_check("test_permutations", total, (torch.tensor([0.0, 1.0, -math.inf, 2.0]),))
    assert seen
    assert not any(bool(x.isnan().any()) for x in seen if len(x) > 4)
    assert all(float(x.max()) < math.inf for x in seen if len(x) > 256)


@pytest.mark.parametrize("check", ["test_modes", "test_aot_dispatch_dynamic", "test_determinism"])
def test_generators_of_samples_start_where_they_are(registry: Registry, ns: str, check: str) -> None:
    @registry.custom_op(f"{ns}::draw", tags=torch.Tag.nondeterministic_seeded, mutates_args=())
    def draw(shape: list[int], generator: torch.Generator | None = None) -> Tensor:
        return torch.rand(shape, generator=generator)

    @draw.register_fake
    def _(shape: list[int], generator: torch.Generator | None = None) -> Tensor:
        return torch.empty(shape)

    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()
    assert run_check(check, draw, ([5], generator)).status == "passed"
    assert torch.equal(generator.get_state(), before)


def test_a_slope_that_no_finite_difference_resolves(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::normalized", mutates_args=())
    def normalized(x: Tensor) -> Tensor:
        return x / (x.sum() + 1e-20)

    normalized.register_autograd(
        lambda ctx, grad: grad / ctx.total - (grad * ctx.x).sum() / ctx.total**2,
        setup_context=lambda ctx, inputs, output: vars(ctx).update(x=inputs[0], total=inputs[0].sum() + 1e-20),
    )

    @registry.custom_op(f"{ns}::wrong", mutates_args=())
    def wrong(x: Tensor) -> Tensor:
        return x * 2 + 1

    wrong.register_autograd(lambda ctx, grad: grad * 1e18)
    zeros = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    assert run_check("test_gradients", normalized, (zeros,)).status == "not exercised"
    assert run_check("test_gradients", wrong, (zeros,)).status == "failed"


def test_what_is_declared_as_written_need_not_be_by_each_sample(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::step_", differentiable=False)
    def step_(params: list[customops.Mut[Tensor]], count: customops.Mut[Tensor], mode: Literal["skip", "run"]) -> None:
        if mode == "run":
            for x in params:
                x.sub_(1)
            count.add_(1)

    def sample(mode: str) -> Any:
        return [torch.rand(3), torch.rand(2)], torch.zeros(1), mode

    report = customops.check(step_, [sample("skip"), sample("run")], only="test_writes")
    assert not report.failures, str(report)

    @registry.custom_op(f"{ns}::reads", differentiable=False)
    def reads(x: customops.Mut[Tensor], y: customops.Mut[Tensor], skip: bool) -> None:
        if not skip:
            x.sub_(y)

    report = customops.check(reads, [(torch.rand(2), torch.rand(2), s) for s in (True, False)], only="test_writes")
    assert {failure.error.argument for failure in report.failures} == {"y"}


def test_a_gradient_that_the_last_digits_decide(registry: Registry, ns: str) -> None:
    """Large triangular matrices of random numbers are nearly singular."""

    @registry.custom_op(f"{ns}::update", mutates_args=())
    def update(factor: Tensor, x: Tensor) -> Tensor:
        low, v = factor.tril(), x.clone()
        for i in range(len(v)):
            r = torch.hypot(low[i, i], v[i])
            c, s, column = low[i, i] / r, v[i] / r, low[i:, i].clone()
            low[i:, i], v[i:] = c * column + s * v[i:], c * v[i:] - s * column
        return low

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        factor, x, new = ctx.saved_tensors
        phi = (new.mT @ grad.tril()).tril()
        phi = phi - phi.diagonal().diag_embed() / 2
        phi = torch.linalg.solve_triangular(new.mT, phi, upper=True)
        phi = torch.linalg.solve_triangular(new, phi, upper=False, left=False)
        both = phi + phi.mT
        return (both @ factor.tril()).tril(), both @ x

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs, output)

    update.register_autograd(backward, setup_context=setup_context)
    numbers = torch.Generator().manual_seed(0)
    for size, status in ((3, "passed"), (70, "not exercised")):
        factor = torch.randn(size, size, generator=numbers, dtype=torch.float64, requires_grad=True)
        x = torch.randn(size, generator=numbers, dtype=torch.float64, requires_grad=True)
        assert run_check("test_gradients", update, (factor, x)).status == status


def test_a_common_step_is_as_small_as_most_elements(registry: Registry, ns: str) -> None:
    """Steps that go by a million are longer than the period."""

    def sincos(x: Tensor) -> tuple[Tensor, Tensor]:
        angle = math.pi * x.fmod(2.0)
        return torch.sin(angle), torch.cos(angle)

    op = registry.custom_op(f"{ns}::sincos", sincos, mutates_args=())

    def backward(ctx: Any, of_sin: Tensor, of_cos: Tensor) -> Tensor:
        sin, cos = op(ctx.x)
        return math.pi * (of_sin * cos - of_cos * sin)

    op.register_autograd(backward, setup_context=lambda ctx, inputs, output: setattr(ctx, "x", inputs[0]))
    x = torch.tensor([0.5, 1.0, -1.5, 1e6], dtype=torch.float64, requires_grad=True)
    assert run_check("test_gradients", op, (x,)).status != "failed"


def test_a_law_that_holds_nearly_is_none(registry: Registry, ns: str) -> None:
    """After five steps of this filter, a hundred-thousandth of the start is left; after two, a hundredth."""

    @registry.custom_op(f"{ns}::last", mutates_args=(), differentiable=False)
    def last(x: Tensor, start: Tensor) -> Tensor:
        y = start.clone()
        for each in x:
            y = 0.9 * each + 0.1 * y
        return y

    outcome = run_check("test_symmetries", last, (torch.arange(1.0, 6.0), torch.tensor(0.37)))
    assert outcome.status != "failed", outcome


def test_a_law_of_values_beside_a_threshold_is_none(registry: Registry, ns: str) -> None:
    """None of these lies between a half of the threshold and it, where doubling tells."""

    @registry.custom_op(f"{ns}::above", mutates_args=(), differentiable=False)
    def above(x: Tensor) -> Tensor:
        return (x > 0.5).to(x.dtype)

    for values in ([-1.7, 2.2, -2.1, 0.245], [3.0, -0.1, 0.2, 1.5]):
        outcome = run_check("test_symmetries", above, (torch.tensor(values, dtype=torch.float64),))
        assert outcome.status != "failed", outcome


def test_elements_beyond_a_number_that_is_passed(registry: Registry, ns: str) -> None:
    """All of five are among the hundred largest."""

    def largest(x: Tensor, k: int) -> Tensor:
        at = x.argsort(dim=1, descending=True, stable=True)[:, :k]
        return torch.full_like(x, -math.inf).scatter(1, at, x.gather(1, at))

    def define(name: str, fn: Any) -> Any:
        return registry.custom_op(f"{ns}::{name}", fn, mutates_args=(), schema="(Tensor x, int k) -> Tensor")

    def forgets(x: Tensor, k: int) -> Tensor:
        return torch.cat([x[:, :128] * 2, x[:, 128:]], 1)

    args = torch.randn(1, 5), 100
    assert run_check("test_batches", define("largest", largest), args).status != "failed"
    assert run_check("test_batches", define("forgets", forgets), args).status == "failed"
