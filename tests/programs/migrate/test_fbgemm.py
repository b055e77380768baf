"""FBGEMM: rules, each once, for ops that are mostly defined elsewhere."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from helpers.migration import Twins, message, on_fakes
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.library import Library

from customops import define
from customops.errors import CallbackError, RegistrationError

pytestmark = pytest.mark.compile


class JaggedSum(torch.autograd.Function):
    """A gradient as a kernel at the autograd key of a device."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(offsets)
        ctx.n = len(values)
        return jagged_sum(values, offsets)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (offsets,) = ctx.saved_tensors
        return gradient.repeat_interleave(offsets.diff(), output_size=ctx.n), None


def jagged_sum(values: Tensor, offsets: Tensor) -> Tensor:
    return torch.stack([values[a:b].sum() for a, b in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)])


def jagged_sum_meta(values: Tensor, offsets: Tensor) -> Tensor:
    return values.new_empty(offsets.shape[0] - 1)


KERNELS = {"CPU": jagged_sum, "CUDA": jagged_sum, "Meta": jagged_sum_meta}
SCHEMA = "(Tensor values, Tensor offsets) -> Tensor"


def jagged(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(2 * n), torch.tensor([0, n, n + 1, 2 * n])


def register(helpers: ModuleType, lib: Library, name: str, schema: str, kernels: dict[str, Any]) -> Any:
    define(f"{lib.ns}::{name}", schema, lib=lib, on_conflict="skip")
    for key, fn in kernels.items():
        helpers.op_registeration(lib, name, fn, key)
    return getattr(getattr(torch.ops, lib.ns), name)


def test_kernels_by_dispatch_key(helpers: ModuleType, by_hand: ModuleType, lib: Library, hand: Library) -> None:
    ours = register(helpers, lib, "jagged_sum", SCHEMA, KERNELS)
    theirs = by_hand.fbgemm(hand, "jagged_sum", SCHEMA, KERNELS)
    for key in (*KERNELS, "AutogradCPU"):
        has = [torch._C._dispatch_has_kernel_for_dispatch_key(f"{each.ns}::jagged_sum", key) for each in (lib, hand)]
        assert has == [key in KERNELS] * 2
    Twins(ours, theirs, jagged_sum, jagged).check()


def permute_1d_sparse_data(
    permute: Tensor, lengths: Tensor, values: Tensor, weights: Tensor | None = None, permuted_lengths_sum: Any = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    starts = lengths.cumsum(0) - lengths
    index = torch.cat([torch.arange(int(lengths[i])) + starts[i] for i in permute])
    return lengths[permute], values[index], None if weights is None else weights[index]


def permute_1d_sparse_data_meta(
    permute: Tensor, lengths: Tensor, values: Tensor, weights: Tensor | None = None, permuted_lengths_sum: Any = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    total = torch.library.get_ctx().new_dynamic_size() if permuted_lengths_sum is None else permuted_lengths_sum
    permuted = None if weights is None else weights.new_empty(total)
    return lengths.new_empty(len(permute)), values.new_empty(total), permuted


def test_the_permutation_of_fbgemm(helpers: ModuleType, by_hand: ModuleType, lib: Library, hand: Library) -> None:
    """Its schema, and its test: against lists, with weights and without."""
    schema = (
        "(Tensor permute, Tensor lengths, Tensor values, Tensor? weights=None, SymInt? permuted_lengths_sum=None)"
        " -> (Tensor, Tensor, Tensor?)"
    )
    kernels = {"CPU": permute_1d_sparse_data, "Meta": permute_1d_sparse_data_meta}
    permute, lengths, values = torch.tensor([2, 0, 1]), torch.tensor([2, 1, 3]), torch.arange(6)
    for op in (
        register(helpers, lib, "permute_1D_sparse_data", schema, kernels),
        by_hand.fbgemm(hand, "permute_1D_sparse_data", schema, kernels),
    ):
        for weights in (None, torch.arange(6) / 2):
            results = op(permute, lengths, values, weights, 6)
            assert [results[0].tolist(), results[1].tolist()] == [[3, 2, 1], [3, 4, 5, 0, 1, 2]]
            assert results[2] is None if weights is None else results[2].tolist() == [1.5, 2, 2.5, 0, 0.5, 1]
            with FakeTensorMode() as mode:
                fakes = [None if x is None else mode.from_tensor(x) for x in (permute, lengths, values, weights)]
                assert op(*fakes, 6)[1].shape == (6,)
        compiled = torch.compile(lambda *args, op=op: op(*args, 6)[:2], fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(permute, lengths, values, values), results[:2])


def test_a_gradient_as_a_kernel(helpers: ModuleType, by_hand: ModuleType, lib: Library, hand: Library) -> None:
    kernels = KERNELS | {"AutogradCPU": JaggedSum.apply}
    values, offsets = jagged(3)
    for op in (
        register(helpers, lib, "jagged_sum", SCHEMA, kernels),
        by_hand.fbgemm(hand, "jagged_sum", SCHEMA, kernels),
    ):
        assert torch.autograd.gradcheck(lambda x, op=op: op(x, offsets), values.double().requires_grad_())


def test_gradients(helpers: ModuleType, by_hand: ModuleType, lib: Library, hand: Library) -> None:
    schema, kernels = helpers.OPS["permute_1d"]
    ours = register(helpers, lib, "permute_1d", schema, kernels)
    rules = helpers.permute_1d_backward, helpers.keep_inverse
    helpers.impl_autograd(f"{lib.ns}::permute_1d", rules[0], setup_context=rules[1])
    # torch hands in zeros, where an integer has no gradient.
    theirs = by_hand.fbgemm(hand, "permute_1d", schema, kernels, rules)
    arguments = lambda n: (torch.randperm(n), torch.randn(n))  # noqa: E731
    Twins(ours, theirs, helpers.permute_1d, arguments).check()
    permute, lengths = torch.tensor([2, 0, 1]), torch.randn(3, requires_grad=True)
    for op in (ours, theirs, torch.compile(ours, fullgraph=True, backend="aot_eager")):
        (gradient,) = torch.autograd.grad(op(permute, lengths)[0] @ torch.tensor([1.0, 2.0, 3.0]), lengths)
        assert gradient.tolist() == [2, 3, 1]


def test_sizes_that_depend_on_data(helpers: ModuleType, by_hand: ModuleType, lib: Library, hand: Library) -> None:
    schema, kernels = helpers.OPS["dense_to_jagged"]
    ours = register(helpers, lib, "dense_to_jagged", schema, kernels)
    theirs = by_hand.fbgemm(hand, "dense_to_jagged", schema, kernels)
    args = torch.randn(2, 4, 3), torch.tensor([1, 4])
    for op in (ours, theirs):
        with FakeTensorMode(shape_env=ShapeEnv()) as mode:
            assert "u" in str(op(*map(mode.from_tensor, args)).shape[0])
        with pytest.raises(DynamicOutputShapeException), FakeTensorMode() as mode:
            op(*map(mode.from_tensor, args))
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            compiled = torch.compile(lambda *args, op=op: op(*args) * 2, fullgraph=True, backend="aot_eager")
            torch.testing.assert_close(compiled(*args), 2 * torch.cat([args[0][0, :1], args[0][1]]))


# What is there stays ----------------------------------------------------------------------------------------------


def test_again_changes_nothing(helpers: ModuleType, by_hand: ModuleType, lib: Library, hand: Library) -> None:
    others = dict.fromkeys(KERNELS, lambda values, offsets: values.new_zeros(7))
    for op, again in (
        (register(helpers, lib, "f", SCHEMA, KERNELS), lambda: register(helpers, lib, "f", SCHEMA, others)),
        (by_hand.fbgemm(hand, "f", SCHEMA, KERNELS), lambda: by_hand.fbgemm(hand, "f", SCHEMA, others)),
    ):
        again()
        assert op(torch.ones(3), torch.tensor([0, 1, 3])).tolist() == [1, 2]
        assert on_fakes(op, jagged(3), None)[0].startswith("(3,)")
    helpers.setup()


@pytest.mark.parametrize("key", ["Meta", "CompositeImplicitAutograd"])
def test_a_fake_that_a_library_brings(helpers: ModuleType, lib: Library, key: str) -> None:
    """As ops of C++ do: a kernel for meta tensors, or one made of torch's ops, which needs no fake."""
    lib.define("brought(Tensor x) -> Tensor")
    lib.impl("brought", lambda x: x.new_zeros(2), key)
    helpers.impl_abstract(f"{lib.ns}::brought", lambda x: x.new_zeros(7))
    assert getattr(torch.ops, lib.ns).brought(torch.ones(3, device="meta")).shape == (2,)


# Mistakes -------------------------------------------------------------------------------------------------------


def test_errors(helpers: ModuleType, by_hand: ModuleType, lib: Library, hand: Library) -> None:
    define(f"{lib.ns}::f", SCHEMA, lib=lib)
    with pytest.raises(CallbackError, match="the fake impl does not fit the operator"):
        helpers.impl_abstract(f"{lib.ns}::f", lambda values: values)
    with pytest.raises(RegistrationError, match="there is no such operator"):
        helpers.impl_abstract(f"{lib.ns}::g", jagged_sum_meta)
    with pytest.raises(CallbackError, match="setup_context"):
        helpers.impl_autograd(f"{lib.ns}::f", lambda ctx, gradient: gradient, setup_context=lambda ctx: None)
    with pytest.raises(RegistrationError, match=r"(?i)gpu"):
        helpers.op_registeration(lib, "f", jagged_sum, "GPU")
    ours = getattr(torch.ops, lib.ns).f
    theirs = by_hand.fbgemm(hand, "f", SCHEMA, {})
    x = torch.ones(2)
    for args in [(x,), (x, "offsets"), (x, x)]:
        messages = [message(lambda op=op, a=args: op(*a)) for op in (ours, theirs)]
        assert messages[0].splitlines()[0] == messages[1].replace(hand.ns, lib.ns).splitlines()[0]
