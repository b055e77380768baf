"""Out variants: `register_out` and `op.out`."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from helpers.out_variants import axpy, axpy_out, bounds, define_axpy, define_bounds
from helpers.registries import state
from torch import Tensor
from torch._library._out_variant import check_out_variant
from torch.library import Library
from torch.testing import assert_close

import customops
from customops import Registry, Tag
from customops.errors import (
    AliasError,
    ArgumentError,
    CallbackError,
    DefinitionError,
    KernelError,
    MissingFakeError,
    RegistrationError,
    UnregisteredError,
    UnsupportedError,
)


def exact(actual: Any, expected: Any) -> None:
    assert_close(actual, expected, rtol=0, atol=0)


@pytest.fixture
def op(registry: Registry, ns: str) -> Any:
    return define_axpy(registry, ns)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(3, 4)


# The pair -------------------------------------------------------------------------------------------------------


def test_the_variant_is_an_op(op: Any, ns: str, registry: Registry) -> None:
    assert str(op.out.schema) == "(Tensor x, float by, Tensor y, *, Tensor(a0!) out) -> Tensor(a0!)"
    assert Tag.out in op.out.tags
    assert torch.Tag.pt2_compliant_tag in op.out.tags
    assert op.out._opoverload is getattr(torch.ops, ns).axpy.out
    assert f"{ns}::axpy.out" in registry
    assert customops.adopt(f"{ns}::axpy") is op
    assert customops.adopt(f"{ns}::axpy.out") is op.out


def test_torch_finds_the_pair(op: Any, registry: Registry, ns: str) -> None:
    check_out_variant(op._opoverload, op.out._opoverload)
    several = define_bounds(registry, ns)
    check_out_variant(several._opoverload, several.out._opoverload)


def test_call(op: Any, ns: str, x: Tensor) -> None:
    y, out = torch.randn(3, 4), torch.full((3, 4), torch.nan)
    for call in (op.out, getattr(torch.ops, ns).axpy.out, getattr(torch.ops, ns).axpy):
        version = out._version
        assert call(x, 2.0, y, out=out.fill_(torch.nan)) is out
        exact(out, x * 2 + y)
        assert out._version > version + 1  # the write counts
    exact(op(x, 2.0, y), x * 2 + y)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_grad_modes(op: Any, x: Tensor, mode: Any) -> None:
    with mode():
        inside = torch.empty(3, 4)
        for out in (inside, torch.empty(3, 4)):
            exact(op.out(x, 3.0, x, out=out), x * 4)


def test_several_outs(registry: Registry, ns: str, x: Tensor) -> None:
    op = define_bounds(registry, ns)
    schema = "(Tensor[] xs, SymInt dim=0, *, float scale=1.0, Tensor(a0!) out0, Tensor(a1!) out1)"
    assert str(op.out.schema) == f"{schema} -> (Tensor(a0!), Tensor(a1!))"
    low, high = torch.empty(3, 4), torch.empty(3, 4)
    for outs in ((low, high), [low, high]):
        result = op.out([x, -x], scale=2.0, out=outs)
        assert result[0] is low
        assert result[1] is high
        exact(result, bounds([x, -x], scale=2.0))
    returned = getattr(torch.ops, ns).bounds.out([x, -x], 1, out0=low[:2], out1=high[:2])
    exact(returned, bounds([x, -x], 1))
    with pytest.raises(ArgumentError, match=r"argument: out\n.*a tuple of 2"):
        op.out([x], out=low)


class Parts(NamedTuple):
    even: Tensor
    odd: Tensor


@dataclasses.dataclass(frozen=True)
class Config:
    step: int = 2
    scale: float = 1.0


def test_rich_types(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::split")
    def split(x: Tensor, config: Config) -> Parts:
        return Parts(x[:: config.step] * config.scale, x[1 :: config.step] * config.scale)

    @split.register_fake
    def _(x: Tensor, config: Config) -> Parts:
        return Parts(torch.empty_like(x[:: config.step]), torch.empty_like(x[1 :: config.step]))

    @split.register_out
    def _(x: Tensor, config: Config, *, out: Parts) -> None:
        assert type(out) is Parts
        torch.mul(x[:: config.step], config.scale, out=out.even)
        torch.mul(x[1 :: config.step], config.scale, out=out.odd)

    x, outs = torch.arange(5.0), Parts(torch.empty(3), torch.empty(2))
    result = split.out(x, Config(scale=3.0), out=outs)
    assert result.even is outs.even
    exact(outs.even, torch.tensor([0.0, 6.0, 12.0]))
    exact(outs.odd, torch.tensor([3.0, 9.0]))


def test_decorators_and_devices(registry: Registry, ns: str, x: Tensor) -> None:
    op = registry.custom_op(f"{ns}::axpy", axpy, mutates_args=())
    op.register_fake(lambda x, by, y: torch.empty_like(x))
    calls = []

    @op.register_out(device_types="cpu")
    def on_cpu(x: Tensor, by: float, y: Tensor, *, out: Tensor) -> Tensor:
        calls.append("cpu")
        axpy_out(x, by, y, out=out)
        return out

    exact(op.out(x, 2.0, x, out=torch.empty(3, 4)), x * 3)
    op.register_out(axpy_out)
    exact(op.out(x, 2.0, x, out=torch.empty(3, 4)), x * 3)
    assert calls == ["cpu", "cpu"]
    op.register_out(axpy_out, device_types="cpu")
    exact(op.out(x, 2.0, x, out=torch.empty(3, 4)), x * 3)
    assert calls == ["cpu", "cpu"]


def test_a_device_without_a_kernel_copies(registry: Registry, ns: str, x: Tensor) -> None:
    op = registry.custom_op(f"{ns}::axpy", axpy, mutates_args=())
    op.register_fake(lambda x, by, y: torch.empty_like(x))
    op.register_out(axpy_out, device_types="cuda")
    exact(op.out(x, 2.0, x, out=torch.empty(3, 4)), x * 3)
    with pytest.raises(ArgumentError, match="neither resized nor cast"):
        op.out(x, 2.0, x, out=torch.empty(4, 4))


# The functional kernel ------------------------------------------------------------------------------------------


def test_derived_from_a_schema(registry: Registry, ns: str, x: Tensor) -> None:
    registry.define(f"{ns}::axpy", "(Tensor x, float by, Tensor y) -> Tensor")
    op = registry.adopt(f"{ns}::axpy")
    op.register_out(axpy_out)
    with pytest.raises(MissingFakeError, match="no fake impl says which tensors to allocate"):
        op(x, 2.0, x)
    op.register_fake(lambda x, by, y: torch.empty_like(x))
    exact(op(x, 2.0, x), x * 3)
    exact(op(x.double(), 2.0, x.double()), x.double() * 3)
    assert op(x.t(), 2.0, x.t()).stride() == (1, 4)  # as the fake impl says


def test_derived_for_a_stub(registry: Registry, ns: str, x: Tensor) -> None:
    @registry.custom_op(f"{ns}::double", mutates_args=())
    def double(x: Tensor) -> Tensor:
        """Twice `x`."""
        ...

    double.register_fake(torch.empty_like)
    with pytest.raises(KernelError):
        double(x)
    double.register_out(lambda x, *, out: torch.mul(x, 2, out=out))
    exact(double(x), x * 2)
    double.register_kernel("cpu", lambda x: x * 3)
    exact(double(x), x * 3)


def test_derived_for_a_device(registry: Registry, ns: str, x: Tensor) -> None:
    op = registry.custom_op(f"{ns}::axpy", axpy, mutates_args=(), device_types="cuda")
    op.register_fake(lambda x, by, y: torch.empty_like(x))
    with pytest.raises(UnsupportedError, match="no kernel there"):
        op(x, 2.0, x)
    op.register_out(axpy_out, device_types="cuda")
    with pytest.raises(UnsupportedError, match="neither the op nor its out variant has a kernel for cpu"):
        op.out(x, 2.0, x, out=torch.empty(3, 4))
    op.register_out(axpy_out)
    exact(op(x, 2.0, x), x * 3)


def test_a_kernel_stays(op: Any, x: Tensor) -> None:
    assert "axpy" in op._rules.kernel.kernels[None].__name__
    exact(op(x, 2.0, x), x * 3)


def test_another_fake_counts_at_once(registry: Registry, ns: str, x: Tensor) -> None:
    registry.define(f"{ns}::fill", "(Tensor x) -> Tensor")
    op = registry.adopt(f"{ns}::fill")
    op.register_out(lambda x, *, out: out.fill_(1))
    op.register_fake(torch.empty_like)
    assert op(x).shape == (3, 4)
    op.register_fake(lambda x: x.new_empty(2))
    assert op(x).shape == (2,)
    op.out(x, out=torch.empty(2))
    with pytest.raises(ArgumentError):
        op.out(x, out=torch.empty(3, 4))


def test_a_fake_that_goes_by_a_setting(registry: Registry, ns: str, x: Tensor) -> None:
    size = [2]
    registry.define(f"{ns}::fill", "(Tensor x) -> Tensor")
    op = registry.adopt(f"{ns}::fill")
    op.register_out(lambda x, *, out: out.fill_(1))
    op.register_fake(lambda x: x.new_empty(size[0]))
    op.out(x, out=torch.empty(2))
    size[0] = 5
    exact(op.out(x, out=torch.empty(5)), torch.ones(5))  # what was remembered is no reason to refuse it


def test_what_is_remembered_of_a_fake(registry: Registry, ns: str, x: Tensor) -> None:
    registry.define(f"{ns}::fill", "(Tensor x, Scalar[] sizes) -> Tensor")
    op = registry.adopt(f"{ns}::fill")
    op.register_out(lambda x, sizes, *, out: out.fill_(1))
    kinds = {int: torch.int64, float: torch.float32, bool: torch.bool}
    op.register_fake(lambda x, sizes: torch.empty(len(sizes), dtype=kinds[type(sizes[0])]))
    for sizes in ([1, 2], [1.0, 2.0], [True, 2]):
        exact(op(x, sizes), torch.ones(2, dtype=kinds[type(sizes[0])]))


# What the caller gives ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "out", [torch.empty(4, 3), torch.empty(0), torch.empty(3, 4, dtype=torch.float64), torch.empty(3, 4, device="meta")]
)
def test_other_tensors_are_refused(op: Any, x: Tensor, out: Tensor) -> None:
    shape = out.shape
    with pytest.raises((ArgumentError, UnsupportedError, RuntimeError)) as caught:
        op.out(x, 2.0, x, out=out)
    assert out.shape == shape
    if out.device.type == "cpu":
        assert isinstance(caught.value, ArgumentError)
        assert caught.value.argument == "out"
        assert "torch.empty((3, 4), dtype=torch.float32" in str(caught.value.fix)


def test_what_was_accepted_for_one_number_is_refused_for_another(registry: Registry, ns: str, x: Tensor) -> None:
    registry.define(f"{ns}::fill", "(Tensor x, int size) -> Tensor")
    op = registry.adopt(f"{ns}::fill")
    op.register_out(lambda x, size, *, out: out.fill_(size))
    op.register_fake(lambda x, size: x.new_empty(size))
    out = torch.zeros(2)
    for _ in range(3):  # the later calls are known to be accepted
        exact(op.out(x, 2, out=out), torch.full((2,), 2.0))
    with pytest.raises(ArgumentError, match="neither resized nor cast") as caught:
        op.out(x, 5, out=out)
    assert "torch.empty((5,)" in str(caught.value.fix)
    exact(out, torch.full((2,), 2.0))


def test_no_tensor_is_refused(op: Any, x: Tensor) -> None:
    with pytest.raises(ArgumentError, match="the out tensor is missing") as caught:
        op.out(x, 2.0, x, out=None)
    error = caught.value
    assert (error.op, error.argument) == (f"{op._qualname}.out", "out")
    assert (error.expected, error.got) == ("a tensor", "None")


def test_the_second_out_is_named(registry: Registry, ns: str, x: Tensor) -> None:
    op = define_bounds(registry, ns)
    with pytest.raises(ArgumentError, match="argument: out1"):
        op.out([x, x], out=(torch.empty(3, 4), torch.empty(3)))


def test_strides(op: Any, x: Tensor) -> None:
    seen = []

    def kernel(x: Tensor, by: float, y: Tensor, *, out: Tensor) -> None:
        seen.append(out.stride())
        axpy_out(x, by, y, out=out)

    op.register_out(kernel)
    room = torch.zeros(3, 8)
    out = room[:, ::2]
    assert op.out(x, 2.0, x, out=out) is out
    exact(out, x * 3)
    exact(room[:, 1::2], torch.zeros(3, 4))
    assert seen == [(4, 1)]  # kernels get what the fake impl says
    op.out(x[:1], 2.0, x[:1], out=torch.empty_strided((1, 4), (77, 1)))
    assert seen[1] == (77, 1)  # which makes no difference


def test_memory_that_is_read(op: Any, registry: Registry, ns: str) -> None:
    product = registry.custom_op(f"{ns}::product", lambda_product, mutates_args=())
    product.register_fake(lambda x, y: torch.empty_like(x))
    product.register_out(product_out)
    x = torch.randn(3, 3)
    expected, y = x @ x, x.clone()
    assert product.out(y, y, out=y) is y
    assert_close(y, expected)
    room = torch.randn(5, 3)
    a, b = room[:3].clone(), room[2:]
    expected = a @ b
    product.out(a, b, out=room[:3])  # a row of it is read
    assert_close(room[:3], expected)
    cache = torch.randn(2, 3, 3)
    expected = cache[0] @ cache[0]
    product.out(cache[0], cache[0], out=cache[1])  # another part of one storage
    assert_close(cache[1], expected)


def lambda_product(x: Tensor, y: Tensor) -> Tensor:
    return x @ y


def product_out(x: Tensor, y: Tensor, *, out: Tensor) -> None:
    out.zero_()  # before anything is read
    for i in range(x.shape[1]):
        out += x[:, i : i + 1] * y[i]


@pytest.mark.parametrize("inplace", ["x", ("x", "y")])
def test_in_place(registry: Registry, ns: str, inplace: Any) -> None:
    seen: list[bool] = []

    def kernel(x: Tensor, by: float, y: Tensor, *, out: Tensor) -> None:
        seen.append(out.data_ptr() == x.data_ptr())
        axpy_out(x, by, y, out=out)

    op = define_axpy(registry, ns, kernel, inplace=inplace)
    x, y = torch.randn(4), torch.randn(4)
    expected = x * 2 + y
    assert op.out(x, 2.0, y, out=x) is x
    exact(x, expected)
    assert seen == [True]
    x = torch.randn(5)
    expected = x[:4] * 2 + y
    op.out(x[:4], 2.0, y, out=x[1:])  # no element is at its place
    exact(x[1:], expected)
    assert seen == [True, False]
    y = x = torch.randn(4)
    expected = x * 3
    exact(op.out(x, 2.0, y, out=x), expected)


def test_two_outs_in_one_memory(registry: Registry, ns: str, x: Tensor) -> None:
    op, out = define_bounds(registry, ns), torch.empty(3, 4)
    with pytest.raises(AliasError, match="two out tensors share memory") as caught:
        op.out([x, x], out=(out, out))
    assert (caught.value.op, caught.value.argument) == (f"{op._qualname}.out", "out1")
    assert caught.value.fix == "pass tensors with separate memory"


def test_two_outs_in_one_buffer_without_common_elements(registry: Registry, ns: str, x: Tensor) -> None:
    op, expected = define_bounds(registry, ns), bounds([x, -x])
    buffer = torch.empty(3, 8)
    parts = [(buffer[:, :4], buffer[:, 4:]), (buffer[:, ::2], buffer[:, 1::2]), buffer.view(6, 4).split(3)]
    for low, high in parts:
        exact(op.out([x, -x], out=(low, high)), expected)
    with pytest.raises(AliasError, match="argument: out1"):
        op.out([x, x], out=(buffer[:, :4], buffer[:, 3:7]))


def test_no_elements(op: Any) -> None:
    x = torch.empty(0, 4)
    assert op.out(x, 2.0, x, out=torch.empty(0, 4)).shape == (0, 4)


# What kernels do ------------------------------------------------------------------------------------------------


def test_resizing_and_returning_are_refused(op: Any, x: Tensor) -> None:
    for shape in ((2,), (2, 4), (3, 4, 1)):
        op.register_out(lambda x, by, y, *, out, shape=shape: out.resize_(shape))
        with pytest.raises(KernelError, match="resized an out tensor") as caught:
            op.out(x, 2.0, x, out=torch.empty(3, 4))
        assert caught.value.argument == "out"
        assert caught.value.got == f"shape {shape} after the call"
    op.register_out(lambda x, by, y, *, out: out + 1)
    with pytest.raises(KernelError, match="returned something other than its out tensors"):
        op.out(x, 2.0, x, out=torch.empty(3, 4))


def test_sizes_that_depend_on_data(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::positive", lambda_positive, mutates_args=())
    op.register_fake(lambda x: x.new_empty(customops.get_ctx().new_dynamic_size()))
    op.register_out(lambda x, *, out: torch.masked_select(x, x > 0, out=out))
    with pytest.raises(UnsupportedError, match="result sizes depend on data"):
        op.out(torch.randn(4), out=torch.empty(2))


def lambda_positive(x: Tensor) -> Tensor:
    return x[x > 0]


def test_without_a_fake(registry: Registry, ns: str, x: Tensor) -> None:
    op = registry.custom_op(f"{ns}::axpy", axpy, mutates_args=())
    op.register_out(axpy_out)
    exact(op.out(x, 2.0, x, out=torch.empty(3, 4)), x * 3)


# What is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ("(Tensor(a!) x) -> Tensor", "it is not functional"),
        ("(Tensor(a) x) -> Tensor(a)", "it is not functional"),
        ("(Tensor x) -> ()", "it is not functional"),
        ("(Tensor x) -> Tensor[]", "something else than tensors"),
        ("(Tensor x) -> (Tensor, int)", "something else than tensors"),
        ("(Tensor x, Tensor out) -> Tensor", "it has an argument out"),
        ("(Tensor x, int out1) -> (Tensor, Tensor)", "it has an argument out1"),
    ],
)
def test_ops_without_an_out_variant(registry: Registry, ns: str, schema: str, problem: str) -> None:
    registry.define(f"{ns}::f", schema)
    before = state(ns)
    with pytest.raises(RegistrationError, match=problem):
        registry.adopt(f"{ns}::f").register_out(lambda *args, out: None)
    assert state(ns) == before


def test_a_failed_registration_leaves_nothing(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::axpy", axpy, mutates_args=())
    before = state(ns)
    with pytest.raises(CallbackError, match="does not fit the operator"):
        op.register_out(lambda x, *, out: None)
    with pytest.raises(CallbackError):
        op.register_out(lambda x, by, y: None)
    with pytest.raises(DefinitionError, match="inplace= names something that is not a tensor"):
        op.register_out(axpy_out, inplace="by")
    with pytest.raises(RegistrationError, match="unknown device type"):
        op.register_out(axpy_out, device_types="gpu")
    assert state(ns) == before
    with pytest.raises(AttributeError, match=r"has no out variant: op.register_out"):
        _ = op.out
    assert not hasattr(op, "out")


def test_a_taken_name(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::axpy", axpy, mutates_args=())
    registry.define(f"{ns}::axpy.out", "(Tensor x) -> Tensor")
    with pytest.raises(RegistrationError, match="an op with the name of the out variant exists"):
        op.register_out(axpy_out)


def test_gradients_go_through_the_functional_op(op: Any, x: Tensor) -> None:
    op.register_autograd(lambda ctx, grad: (grad * 2, None, grad))
    leaf = x.clone().requires_grad_()
    op(leaf, 2.0, x).sum().backward()
    exact(leaf.grad, torch.full((3, 4), 2.0))
    with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
        op.out(leaf, 2.0, x, out=torch.empty(3, 4))
    with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
        op.out(x, 2.0, x, out=torch.empty(3, 4, requires_grad=True))
    with torch.no_grad():
        exact(op.out(leaf, 2.0, x, out=torch.empty(3, 4)), x * 3)
    with pytest.raises(RegistrationError, match="register the gradient on the functional op"):
        op.out.register_autograd(lambda ctx, grad: None)


# Transforms -----------------------------------------------------------------------------------------------------


def test_vmap(op: Any, x: Tensor) -> None:
    op.register_vmap("expand_dims")
    y = torch.randn(4)
    result = torch.vmap(lambda x, out: op.out(x, 2.0, y, out=out))(x, torch.empty(3, 4))
    exact(result, x * 2 + y)
    result = torch.vmap(lambda x, out: op.out(x, 2.0, x, out=out), in_dims=1, out_dims=1)(x, torch.empty(3, 4))
    exact(result, x * 3)
    nested = torch.vmap(torch.vmap(lambda x, out: op.out(x, 2.0, x, out=out)))
    exact(nested(x, torch.empty(3, 4)), x * 3)
    exact(torch.vmap(lambda out: op.out(y, 2.0, y, out=out))(torch.empty(3, 4)), (y * 3).expand(3, 4))
    with pytest.raises(UnsupportedError, match="is not batched itself"):
        torch.vmap(lambda x: op.out(x, 2.0, y, out=torch.empty(4)))(x)
    with pytest.raises(ArgumentError, match="neither resized nor cast"):
        torch.vmap(lambda x, out: op.out(x, 2.0, y, out=out))(x, torch.empty(3, 1))


def test_vmap_of_several(registry: Registry, ns: str, x: Tensor) -> None:
    op = define_bounds(registry, ns)
    op.register_vmap("sequential")
    outs = torch.empty(3, 4), torch.empty(3, 4)
    result = torch.vmap(lambda x, a, b: op.out([x, -x], out=(a, b)))(x, *outs)
    exact(result, (-x.abs(), x.abs()))
    exact(outs, (-x.abs(), x.abs()))


def test_autocast(op: Any, x: Tensor) -> None:
    halves = (x.bfloat16() * 2 + x.bfloat16()).float()
    op.register_autocast("cpu", torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        out = op.out(x, 2.0, x, out=torch.empty(3, 4, dtype=torch.bfloat16))
        assert_close(out.float(), halves, rtol=2e-2, atol=2e-2)
        assert op(x, 2.0, x).dtype is torch.bfloat16
        with pytest.raises(ArgumentError, match="bfloat16"):
            op.out(x, 2.0, x, out=torch.empty(3, 4))
    exact(op.out(x, 2.0, x, out=torch.empty(3, 4)), x * 3)


def test_autocast_that_was_there_before_and_ends(registry: Registry, ns: str, x: Tensor) -> None:
    op = registry.custom_op(f"{ns}::axpy", axpy, mutates_args=())
    with registry.scope():
        op.register_autocast("cpu", torch.bfloat16)
        op.register_fake(lambda x, by, y: torch.empty_like(x))
        op.register_out(axpy_out)
        with torch.autocast("cpu", torch.bfloat16):
            op.out(x, 2.0, x, out=torch.empty(3, 4, dtype=torch.bfloat16))
    op.register_out(axpy_out)
    with torch.autocast("cpu", torch.bfloat16):
        exact(op.out(x, 2.0, x, out=torch.empty(3, 4)), x * 3)


# Lifetime -------------------------------------------------------------------------------------------------------


def test_unregister(op: Any, ns: str, registry: Registry) -> None:
    out = op.out
    op.unregister()
    with pytest.raises(UnregisteredError):
        out(torch.ones(1), 2.0, torch.ones(1), out=torch.empty(1))
    assert len(registry) == 0
    assert not state(ns)["dispatcher"]


def test_unregister_the_variant_alone(op: Any, ns: str, x: Tensor) -> None:
    op.out.unregister()
    with pytest.raises(AttributeError):
        _ = op.out
    exact(op(x, 2.0, x), x * 3)
    op.register_out(axpy_out)
    exact(op.out(x, 2.0, x, out=torch.empty(3, 4)), x * 3)


def test_scope(registry: Registry, ns: str, x: Tensor) -> None:
    op = registry.custom_op(f"{ns}::axpy", axpy, mutates_args=())
    before = state(ns)
    with registry.scope():
        op.register_out(axpy_out)
        op.out(x, 2.0, x, out=torch.empty(3, 4))
    assert state(ns) == before
    assert not hasattr(op, "out")


def test_scope_around_a_second_kernel(op: Any, registry: Registry, x: Tensor) -> None:
    with registry.scope():
        op.register_out(lambda x, by, y, *, out: out.fill_(7))
        exact(op.out(x, 2.0, x, out=torch.empty(3, 4)), torch.full((3, 4), 7.0))
    exact(op.out(x, 2.0, x, out=torch.empty(3, 4)), x * 3)


def test_library(registry: Registry, ns: str, x: Tensor) -> None:
    op = registry.custom_op(f"{ns}::axpy", axpy, mutates_args=())
    lib = Library(ns, "FRAGMENT")
    op.register_out(axpy_out, lib=lib)
    op.out(x, 2.0, x, out=torch.empty(3, 4))
    lib._destroy()
    assert not hasattr(op, "out")


def test_replaced_and_back(registry: Registry, ns: str, x: Tensor) -> None:
    op = define_axpy(registry, ns)
    with registry.scope():
        other = registry.custom_op(f"{ns}::axpy", lambda_positive, mutates_args=())
        assert not hasattr(other, "out")
        with pytest.raises(UnregisteredError):
            op(x, 2.0, x)
    exact(op(x, 2.0, x), x * 3)
    exact(op.out(x, 2.0, x, out=torch.empty(3, 4)), x * 3)
    op.register_vmap("expand_dims")
    exact(torch.vmap(lambda x, out: op.out(x, 2.0, x, out=out))(x, torch.empty(3, 4)), x * 3)


def test_adopted(lib: Library, ns: str, x: Tensor) -> None:
    lib.define("axpy(Tensor x, float by, Tensor y) -> Tensor")
    lib.impl("axpy", axpy, "CPU")
    op = customops.adopt(f"{ns}::axpy")
    op.register_fake(lambda x, by, y: torch.empty_like(x))
    assert customops.register_out(f"{ns}::axpy", axpy_out) is axpy_out
    exact(op.out(x, 2.0, x, out=torch.empty(3, 4)), x * 3)
    exact(getattr(torch.ops, ns).axpy(x, 2.0, x), x * 3)
    op.unregister()
    assert not hasattr(getattr(torch.ops, ns).axpy, "out")
    customops.default_registry.clear()


# The checker ----------------------------------------------------------------------------------------------------


def test_samples(op: Any, x: Tensor) -> None:
    assert list(op.out.samples()) == []
    op.register_samples(lambda: [(x.clone().requires_grad_(), 2.0, x)])
    ((args, kwargs),) = op.out.samples()
    assert kwargs["out"].shape == (3, 4)
    exact(op.out(*args, **kwargs), x * 3)


def test_samples_of_several(registry: Registry, ns: str, x: Tensor) -> None:
    op = define_bounds(registry, ns)
    op.register_samples(lambda: [(([x, -x],), {"scale": 2.0})])
    ((args, kwargs),) = op.out.samples()
    exact(op.out(*args, **kwargs), bounds([x, -x], scale=2.0))


@pytest.mark.slow
def test_right_ones_pass(op: Any, registry: Registry, ns: str, x: Tensor) -> None:
    op.register_samples(lambda: [(x, 2.0, x)])
    op.register_autograd(lambda ctx, grad: (grad * ctx.by, None, grad), setup_context=save_by)
    op.register_vmap("expand_dims")
    several = define_bounds(registry, ns)
    several.register_vmap("sequential")
    several.register_samples(lambda: [(([x, -x],), {"scale": 2.0})])
    for each in (op, op.out, several.out):
        report = customops.check(each, effort="quick")
        assert report.passed, str(report)
    assert customops.check(op, only="test_kernels").passed


def save_by(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.by = inputs[1]


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (lambda x, by, y, *, out: (out[1:].copy_((x * by + y)[1:]), None)[1], "writes other results than the operator"),
        (lambda x, by, y, *, out: out.copy_(x * by - y), "writes other results than the operator"),
        (lambda x, by, y, *, out: out.add_(x * by + y), "writes other results than the operator"),
        (lambda x, by, y, *, out: x * by + y, "fails on inputs that the operator takes"),
    ],
)
def test_wrong_ones_are_found(op: Any, x: Tensor, wrong: Any, problem: str) -> None:
    op.register_samples(lambda: [(x, 2.0, x)])
    op.register_out(wrong)
    report = customops.check(op, only="test_kernels")
    assert not report.passed
    assert f"the out variant {problem}" in str(report)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_tensors_without_strides(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::f", lambda x, y: x @ y, mutates_args=(), schema="(Tensor x, Tensor y) -> Tensor")
    op.register_fake(lambda x, y: y.new_empty(x.shape[0], y.shape[1]))
    op.register_out(lambda x, y, *, out: out.copy_(x @ y))
    x, y = torch.randn(3, 3), torch.randn(3, 2)
    for each in (x, x.to_sparse_csr(), x.to_sparse_csr(), x, x.to_sparse()):
        assert_close(op.out(each, y, out=torch.empty(3, 2)), x @ y)
