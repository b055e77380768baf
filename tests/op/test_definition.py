"""Definition: names, forms, tags, overloads."""

from __future__ import annotations

import math
from typing import Any, Optional

import pytest
import torch
from helpers.kernels import run_at
from helpers.ops import increment
from torch import Tensor
from torch.testing import assert_close

from customops import CustomOpDef, Registry
from customops.errors import CallbackError, DefinitionError, SchemaError

# Definition -----------------------------------------------------------------------------------------------------


@pytest.mark.parity(14)
def test_a_definition_gives_a_callable_that_torch_ops_has_too(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::increment", increment, mutates_args=())
    x = torch.tensor([1.0, 2.0])
    assert isinstance(op, CustomOpDef)
    assert repr(op) == f"<CustomOpDef({ns}::increment) {op.schema}>"
    assert op._opoverload is getattr(torch.ops, ns).increment.default
    assert isinstance(op._opoverload, torch._ops.OpOverload)
    for call in (op, op._opoverload, getattr(torch.ops, ns).increment):
        assert call(x).tolist() == [2.0, 3.0]
    assert str(op._opoverload._schema) == f"{ns}::increment(Tensor x) -> Tensor"


@pytest.mark.parity(14)
def test_a_definition_is_a_decorator_without_the_function(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::double", mutates_args=())
    def double(x: Tensor) -> Tensor:
        return x * 2

    assert isinstance(double, CustomOpDef)
    assert double(torch.tensor(3.0)).item() == 6.0


@pytest.mark.parity(14)
@pytest.mark.parametrize("key", ["CPU", "CUDA", "XPU", "MPS", "PrivateUse1", "SparseCPU"])
def test_without_device_types_the_function_serves_every_device(registry: Registry, ns: str, key: str) -> None:
    op = registry.custom_op(f"{ns}::increment", increment, mutates_args=())
    assert run_at(op, key, torch.tensor(1.0)).item() == 2.0


@pytest.mark.parity(14)
def test_a_kernel_for_cpu_takes_over_on_cpu(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::increment", increment, mutates_args=())
    op.register_kernel("cpu")(lambda x: x + 10)
    assert op(torch.tensor(1.0)).item() == 11.0
    assert run_at(op, "CUDA", torch.tensor(1.0)).item() == 2.0


@pytest.mark.parity(15)
def test_defining_a_name_again_replaces_the_op_silently(
    registry: Registry, ns: str, caplog: pytest.LogCaptureFixture
) -> None:
    registry.custom_op(f"{ns}::f", increment, mutates_args=())
    new = registry.custom_op(f"{ns}::f", lambda x: x - 1, mutates_args=(), schema="(Tensor x) -> Tensor")
    assert new(torch.tensor(1.0)).item() == 0.0
    assert getattr(torch.ops, ns).f(torch.tensor(1.0)).item() == 0.0
    assert not [record for record in caplog.records if record.name.startswith("customops")]


@pytest.mark.parity(15)
def test_overloads(registry: Registry, ns: str) -> None:
    one = registry.custom_op(f"{ns}::f", increment, mutates_args=())
    two = registry.custom_op(f"{ns}::f.overload", torch.sub, mutates_args=(), schema="(Tensor x, Tensor y) -> Tensor")
    packet = getattr(torch.ops, ns).f
    x = torch.tensor(3.0)
    assert packet(x).item() == one(x).item() == 4.0
    assert packet(x, x).item() == two(x, x).item() == 0.0
    assert repr(two) == f"<CustomOpDef({ns}::f.overload) {two.schema}>"
    assert two._opoverload is packet.overload
    assert sorted(packet.overloads()) == ["default", "overload"]


@pytest.mark.parity(15)
def test_an_overload_is_redefined_without_touching_the_other(registry: Registry, ns: str) -> None:
    registry.custom_op(f"{ns}::f", increment, mutates_args=())
    registry.custom_op(f"{ns}::f.overload", torch.sub, mutates_args=(), schema="(Tensor x, Tensor y) -> Tensor")
    registry.custom_op(f"{ns}::f.overload", torch.mul, mutates_args=(), schema="(Tensor x, Tensor y) -> Tensor")
    packet, x = getattr(torch.ops, ns).f, torch.tensor(3.0)
    assert packet(x).item() == 4.0
    assert packet(x, x).item() == 9.0


@pytest.mark.parity(16)
def test_manual_schemas(registry: Registry, ns: str) -> None:
    def f(x):  # type: ignore[no-untyped-def]
        return x.cos()

    def g(x):  # type: ignore[no-untyped-def]
        x.sin_()

    functional = registry.custom_op(f"{ns}::f", f, mutates_args=(), schema="(Tensor x) -> Tensor")
    mutating = registry.custom_op(f"{ns}::g", g, mutates_args=["x"], schema="(Tensor(a!) x) -> ()")
    x = torch.randn(3)
    assert_close(functional(x), torch.cos(x))
    y = x.clone()
    assert mutating(y) is None
    assert_close(y, torch.sin(x))


@pytest.mark.parity(16)
@pytest.mark.parametrize(
    ("mutates_args", "schema"), [((), "(Tensor(a!) x) -> ()"), (("x", "y"), "(Tensor(a!) x) -> ()")]
)
def test_a_manual_schema_must_agree_with_mutates_args(
    registry: Registry, ns: str, mutates_args: Any, schema: str
) -> None:
    with pytest.raises(ValueError, match=r"the op mutates \{'x'\}") as caught:
        registry.custom_op(f"{ns}::f", lambda x: None, mutates_args=mutates_args, schema=schema)
    assert isinstance(caught.value, SchemaError)
    assert ns not in vars(torch.ops) or not hasattr(getattr(torch.ops, ns), "f")


@pytest.mark.parity(16)
def test_mutates_args_without_a_write_in_the_manual_schema(registry: Registry, ns: str) -> None:
    with pytest.raises(ValueError, match="the op mutates"):
        registry.custom_op(f"{ns}::f", lambda x: None, mutates_args=("x",), schema="(Tensor x) -> ()")


FIRST_CPU = torch.device("cpu:0")


def with_defaults(
    x: Tensor,
    a: Optional[int] = None,
    b: float = 3.14,
    c: bool = True,
    d: int = 3,
    e: str = "foo",
    f: torch.dtype = torch.float,
    g: torch.dtype = torch.float32,
    h: torch.dtype = torch.int,
    i: torch.device = FIRST_CPU,
    j: torch.device = "cpu",  # type: ignore[assignment]
) -> Tensor:
    received.append((a, b, c, d, e, f, g, h, i, j))
    return x.clone()


received: list[Any] = []


@pytest.mark.parity(17)
def test_defaults_reach_the_kernel_in_python_form(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::f", with_defaults, mutates_args=())
    received.clear()
    op(torch.randn(3))
    expected = (None, 3.14, True, 3, "foo", torch.float32, torch.float32, torch.int32, torch.device("cpu:0"), "cpu")
    assert received == [expected]
    assert type(received[0][-1]) is str
    values = [argument.default_value for argument in op._opoverload._schema.arguments[1:]]
    assert values == [None, 3.14, True, 3, "foo", 6, 6, 3, torch.device("cpu:0"), torch.device("cpu")]
    op(torch.randn(3), 1, d=4, h=torch.int64)
    assert received[1] == (1, 3.14, True, 4, "foo", *expected[5:7], torch.int64, *expected[8:])


@pytest.mark.parity(17)
def test_defaults_reach_every_callback(registry: Registry, ns: str) -> None:
    seen = {}

    def save(ctx: Any, inputs: Any, output: Any) -> None:
        seen["setup_context"] = inputs[1:]

    def fake(x: Tensor, *rest: Any) -> Tensor:
        seen["fake"] = rest
        return torch.empty_like(x)

    op = registry.custom_op(f"{ns}::f", with_defaults, mutates_args=())
    op.register_fake(fake)
    op.register_autograd(lambda ctx, grad: (grad,) + (None,) * 10, setup_context=save)
    received.clear()
    op(torch.randn(3, requires_grad=True))
    op(torch.randn(3, device="meta"))
    assert seen["setup_context"] == seen["fake"] == received[0]


@pytest.mark.parity(17)
def test_keyword_only_defaults(registry: Registry, ns: str) -> None:
    def f(x: Tensor, *, dtype: torch.dtype = torch.float64, by: float = math.inf) -> Tensor:
        return x.to(dtype).clamp(max=by)

    op = registry.custom_op(f"{ns}::f", f, mutates_args=())
    x = torch.tensor([1.0, 2.0])
    assert_close(op(x), x.double())
    assert_close(op(x, by=1.5, dtype=torch.float32), torch.tensor([1.0, 1.5]))


@pytest.mark.parity(25)
@pytest.mark.parametrize(
    "tags",
    [
        torch.Tag.pointwise,
        [torch.Tag.pointwise],
        (torch.Tag.pointwise,),
        [torch.Tag.pointwise, torch.Tag.pt2_compliant_tag],
        [torch.Tag.pt2_compliant_tag, torch.Tag.pointwise, torch.Tag.pointwise],
    ],
)
def test_tags(registry: Registry, ns: str, tags: Any) -> None:
    op = registry.custom_op(f"{ns}::f", increment, mutates_args=(), tags=tags)
    assert set(op._opoverload.tags) == {torch.Tag.pointwise, torch.Tag.pt2_compliant_tag}
    assert len(op._opoverload.tags) == 2
    assert op.tags == list(op._opoverload.tags)


@pytest.mark.parity(25)
@pytest.mark.parametrize("tags", [None, (), [], torch.Tag.pt2_compliant_tag])
def test_pt2_compliant_tag_is_always_there_once(registry: Registry, ns: str, tags: Any) -> None:
    op = registry.custom_op(f"{ns}::f", increment, mutates_args=(), tags=tags)
    assert op._opoverload.tags == [torch.Tag.pt2_compliant_tag]


@pytest.mark.parametrize("tags", ["pointwise", 3, [None]])
def test_tags_must_be_tags(registry: Registry, ns: str, tags: Any) -> None:
    with pytest.raises((DefinitionError, TypeError)):
        registry.custom_op(f"{ns}::f", increment, mutates_args=(), tags=tags)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("nothing", "needs a namespace"),
        ("aten::f", "reserved namespace"),
        ("ns::f.default", '"default" is taken'),
        ("ns::f g", "not a valid part"),
        ("ns::", "not a valid part"),
    ],
)
def test_bad_names(registry: Registry, name: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        registry.custom_op(name, increment, mutates_args=())


def test_the_function_must_take_the_arguments_of_a_manual_schema(registry: Registry, ns: str) -> None:
    with pytest.raises(CallbackError, match="does not fit the operator") as caught:
        registry.custom_op(f"{ns}::f", increment, mutates_args=(), schema="(Tensor x, Tensor y) -> Tensor")
    assert caught.value.where == f"increment ({increment.__code__.co_filename}:{increment.__code__.co_firstlineno})"
    assert len(registry) == 0
