"""Definitions by the old functions."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from typing import Any, NamedTuple, Optional, Tuple

import pytest
import torch
from helpers.legacies import op_of, signature, sine
from helpers.tensors import leaf
from torch import Tensor
from torch.library import Library
from torch.testing import assert_close

import customops
from customops import default_registry, legacy
from customops._schema import infer
from customops.errors import CustomOpsError, DefinitionError, UnregisteredError
from customops.legacy import objects


@pytest.fixture(autouse=True)
def _clean(ns: str) -> Iterator[None]:
    """Destroy what a test leaves in the global registry, as users' fixtures do."""
    yield
    for key in [key for key in objects.global_registry if key.startswith(f"{ns}")]:
        objects.global_registry[key]._destroy()


class Named(NamedTuple):
    low: Tensor
    high: Tensor


# Names ----------------------------------------------------------------------------------------------------------


def test_names() -> None:
    assert set(legacy.__all__) == {
        "custom_op", "get_ctx", "impl", "impl_abstract", "impl_backward", "impl_save_for_backward"
    }  # fmt: skip
    assert callable(legacy._destroy)
    assert all(hasattr(objects, name) for name in objects.__all__)
    assert {"prim", "prims", "aten", "at", "torch", "pytorch"} == objects.RESERVED_NS
    assert objects.SUPPORTED_DEVICE_TYPE_TO_KEY == {"cpu": "CPU", "cuda": "CUDA"}
    assert infer.infer_schema is customops.infer_schema


# Defining -------------------------------------------------------------------------------------------------------


def test_a_function_is_returned_and_its_hints_make_the_schema(ns: str) -> None:
    def foo(x: Tensor, n: int = 3, *, by: Optional[float] = None) -> Tuple[Tensor, Tensor]:
        raise NotImplementedError

    assert legacy.custom_op(f"{ns}::foo")(foo) is foo
    assert str(op_of(ns)._schema) == f"{ns}::foo(Tensor x, SymInt n=3, *, float? by=None) -> (Tensor, Tensor)"
    assert torch.Tag.needs_fixed_stride_order in op_of(ns).tags


def test_a_schema_instead_of_a_function(ns: str) -> None:
    assert legacy.custom_op(f"{ns}::foo", "(Tensor x) -> Tensor") is None
    assert str(op_of(ns)._schema) == f"{ns}::foo(Tensor x) -> Tensor"


@pytest.mark.parity(67)
@pytest.mark.parametrize("schema", ["(", "(Tensor x)", "(Tensr x) -> Tensor", "foo(Tensor x) -> Tensor", ""])
def test_a_malformed_schema(ns: str, schema: str) -> None:
    with pytest.raises(AssertionError, match="Invalid function schema: foo") as info:
        legacy.custom_op(f"{ns}::foo", schema)
    assert isinstance(info.value, CustomOpsError)


@pytest.mark.parity(67)
@pytest.mark.parametrize("name", ["foo.Tensor", "foo.out"])
def test_an_overload_in_the_name(ns: str, name: str) -> None:
    with pytest.raises(DefinitionError, match="the legacy API does not support overloads") as caught:
        legacy.custom_op(f"{ns}::{name}", "() -> ()")
    assert (caught.value.op, caught.value.fix) == (f"{ns}::{name}", f"use '{ns}::foo'")


def test_the_default_overload_in_the_name(ns: str) -> None:
    with pytest.raises(ValueError, match='the overload name "default" is taken'):
        legacy.custom_op(f"{ns}::foo.default", "() -> ()")


@pytest.mark.parity(67)
@pytest.mark.parametrize("custom_op", [legacy.custom_op, objects.custom_op])
def test_the_function_must_have_the_name_of_the_op(ns: str, custom_op: Any) -> None:
    def baz(x: Tensor) -> Tensor:
        raise NotImplementedError

    with pytest.raises(ValueError, match="to have name 'foo'"):
        custom_op(f"{ns}::foo")(baz)
    with pytest.raises(ValueError, match="decorates a Python function"):
        custom_op(f"{ns}::foo")(torch.sin)


@pytest.mark.parity(67)
@pytest.mark.parametrize("schema", ["(Tensor(a!) x) -> Tensor", "(Tensor(a) x) -> Tensor(a)", "(Tensor x) -> ()"])
def test_only_functional_ops(ns: str, schema: str) -> None:
    with pytest.raises(ValueError, match="only supports functional"):
        legacy.custom_op(f"{ns}::foo", schema)


@pytest.mark.parity(67)
@pytest.mark.parametrize("schema", ["(Tensor self) -> Tensor", "(Tensor self) -> ()"])
def test_no_argument_named_self(ns: str, schema: str) -> None:
    with pytest.raises(ValueError, match="self"):
        legacy.custom_op(f"{ns}::foo", schema)


@pytest.mark.parity(11, 67)
@pytest.mark.parametrize("custom_op", [legacy.custom_op, objects.custom_op])
def test_types_that_only_the_new_api_takes(ns: str, custom_op: Any) -> None:
    def pair(x: Tensor, y: Tuple[int, int]) -> Tensor: ...
    def named(x: Tensor) -> Named: ...
    def first(x: Tensor, /) -> Tensor: ...
    def several(*x: Tensor) -> Tensor: ...

    for fn, problem in {
        pair: r"parameter y has unsupported type Tuple\[int, int\]",
        named: "the return has unsupported type .*Named",
        first: "parameter x: positional-only parameters, varargs and varkwargs are not supported",
        several: "parameter x: positional-only parameters, varargs and varkwargs are not supported",
    }.items():
        name = f"{ns}::{fn.__name__}"
        with pytest.raises(ValueError, match=rf"{name}: {problem}(.|\n)*test_define\.py(.|\n)*customops\.custom_op"):
            custom_op(name)(fn)
        assert not torch._C._dispatch_has_kernel(name)
        assert name not in objects.global_registry


@pytest.mark.parity(67)
@pytest.mark.parametrize("reserved", sorted(objects.RESERVED_NS))
def test_reserved_namespaces(reserved: str) -> None:
    def foo(x: Tensor) -> Tensor:
        raise NotImplementedError

    for define in (
        lambda: legacy.custom_op(f"{reserved}::foo", "(Tensor x) -> Tensor"),
        lambda: legacy.custom_op(f"{reserved}::foo"),  # the decorator raises before it decorates
        lambda: objects.custom_op(f"{reserved}::foo")(foo),
    ):
        with pytest.raises(ValueError, match="is a reserved namespace"):
            define()


@pytest.mark.parity(68)
@pytest.mark.parametrize(
    ("schema", "code"),
    [
        ("(Tensor y) -> Tensor", "x"),
        ("(Tensor x, *, Tensor y) -> Tensor", "x, y"),
        ("(Tensor x, Tensor y) -> Tensor", "x, *, y"),
        ("(Tensor x, *, Tensor y, Tensor z) -> Tensor", "x, *, z, y"),
        ("(Tensor x, Tensor y) -> Tensor", "y, x"),
        ("(Tensor x, Tensor y) -> Tensor", "x"),
        ("(Tensor x) -> Tensor", "x, y"),
    ],
)
def test_a_manual_schema_and_another_signature(ns: str, schema: str, code: str) -> None:
    with pytest.raises(ValueError, match="signature to match"):
        objects.custom_op(f"{ns}::foo", schema)(signature(code))


@pytest.mark.parity(68)
@pytest.mark.parametrize("code", ["x, *args", "x, **kwargs", "*args", "**kwargs", "x, /"])
def test_a_manual_schema_and_a_signature_of_any_arguments(ns: str, code: str) -> None:
    with pytest.raises(ValueError, match="not supported"):
        objects.custom_op(f"{ns}::foo", "(Tensor x) -> Tensor")(signature(code))


@pytest.mark.parity(68)
@pytest.mark.parametrize(
    ("schema", "code"),
    [
        ("(Tensor x, *, Tensor y) -> Tensor", "x=1, *, y"),
        ("(Tensor x, *, Tensor y) -> Tensor", "x, *, y=1"),
        ("(Tensor x, int n=1) -> Tensor", "x, n"),
    ],
)
def test_a_manual_schema_and_defaults(ns: str, schema: str, code: str) -> None:
    with pytest.raises(ValueError, match="default arguments"):
        objects.custom_op(f"{ns}::foo", schema)(signature(code))


def test_a_manual_schema_and_annotations(ns: str) -> None:
    with pytest.raises(ValueError, match="no annotations"):
        objects.custom_op(f"{ns}::foo", "(Tensor x) -> Tensor")(signature("x: int"))


@pytest.mark.parity(68)
@pytest.mark.parametrize(
    ("schema", "code"),
    [
        ("(Tensor x, int n) -> Tensor", "x, n"),
        ("(*, Tensor y) -> Tensor", "*, y"),
        ("(int n, *, Tensor y) -> Tensor", "n, *, y"),
    ],
)
def test_a_manual_schema_that_fits(ns: str, schema: str, code: str) -> None:
    foo = objects.custom_op(f"{ns}::foo", schema)(signature(code))
    assert str(op_of(ns)._schema) == f"{ns}::foo{schema}"
    foo.impl("cpu")(lambda *args, **kwargs: kwargs.get("y", torch.zeros(2)) + 1)
    arguments: dict[str, Any] = {"x": torch.zeros(2), "n": 1, "y": torch.zeros(2)}
    names = re.findall(r"\w+", code)
    assert foo(**{name: arguments[name] for name in names}).tolist() == [1, 1]


@pytest.mark.parity(69)
@pytest.mark.parametrize(
    "schema",
    [
        "(Tensor x) -> Tensor",
        "(Tensor x) -> Tensor y",
        "(Tensor[] x) -> Tensor y",
        "(Tensor x) -> (Tensor, Tensor)",
        "(Tensor x) -> (Tensor y, Tensor z)",
        "(Tensor[] x) -> Tensor",
        "(Tensor? x) -> Tensor",
        "(Tensor x) -> Tensor[]",
        "(Tensor x, int[] y) -> Tensor",
        "(Tensor x, SymInt[] y) -> Tensor",
        "(Tensor x, Scalar y) -> Tensor",
        "(Tensor x, float y) -> Tensor",
        "(Tensor x, float? y) -> Tensor",
        "(Tensor x, bool[] y) -> Tensor",
    ],
)
def test_schemas_that_are_accepted(ns: str, schema: str) -> None:
    legacy.custom_op(f"{ns}::foo", schema)
    assert op_of(ns).name() == f"{ns}::foo"
    legacy._destroy(f"{ns}::foo")


@pytest.mark.parity(69)
@pytest.mark.parametrize("args", [(), (None, "foo", None, "foo", None)])
def test_the_constructor_is_private(args: Any) -> None:
    with pytest.raises(RuntimeError, match="CustomOp constructor is private"):
        objects.CustomOp(*args)


@pytest.mark.parity(69)
def test_defining_twice(ns: str, lib: Library) -> None:
    def foo(x: Tensor) -> Tensor:
        raise NotImplementedError

    legacy.custom_op(f"{ns}::foo")(foo)
    lib.define("bar(Tensor x) -> Tensor")
    for define in (
        lambda: legacy.custom_op(f"{ns}::foo", foo),
        lambda: legacy.custom_op(f"{ns}::foo", "(Tensor x) -> Tensor"),
        lambda: objects.custom_op(f"{ns}::foo")(foo),
        lambda: legacy.custom_op(f"{ns}::bar", "(Tensor x) -> Tensor"),
    ):
        with pytest.raises(RuntimeError, match="multiple times"):
            define()
    assert str(op_of(ns)._schema) == f"{ns}::foo(Tensor x) -> Tensor"


@pytest.mark.slow
@pytest.mark.parity(69)
def test_destroy_and_define_again(ns: str) -> None:
    for factor in (2, 3, 4):
        legacy.custom_op(f"{ns}::foo", "(Tensor x) -> Tensor")
        legacy.impl(f"{ns}::foo", func=lambda x, factor=factor: x * factor)
        legacy.impl_abstract(f"{ns}::foo", func=torch.empty_like)
        handle = op_of(ns)
        assert getattr(torch.ops, ns).foo(torch.ones(1)).item() == factor
        assert f"{ns}::foo" in default_registry
        legacy._destroy(f"{ns}::foo")
        assert f"{ns}::foo" not in objects.global_registry
        assert f"{ns}::foo" not in default_registry
        with pytest.raises(UnregisteredError):
            handle(torch.ones(1))
        with pytest.raises(AttributeError):
            _ = getattr(torch.ops, ns).foo
        assert not torch._C._jit_get_schemas_for_operator(f"{ns}::foo")
        assert not [key for key in torch._C._dispatch_get_all_op_names() if key.startswith(f"{ns}::")]
        assert torch._library.simple_registry.singleton.find(f"{ns}::foo").fake_impl.kernel is None
        gc.collect()
    with pytest.raises(RuntimeError, match="Could not find"):
        legacy._destroy(f"{ns}::foo")


def test_an_op_that_somebody_else_removed_can_be_defined_again(ns: str) -> None:
    with default_registry.scope():
        legacy.custom_op(f"{ns}::foo", "(Tensor x) -> Tensor")
    entry = objects.global_registry[f"{ns}::foo"]
    with pytest.raises(DefinitionError, match="Could not find the operator"):
        legacy.impl(f"{ns}::foo", func=torch.sin)
    entry._destroy()
    legacy.custom_op(f"{ns}::foo", "(Tensor x) -> Tensor")
    assert objects.global_registry[f"{ns}::foo"] is not entry


def test_an_op_of_a_scope_comes_back_with_what_it_had(ns: str) -> None:
    op = sine(ns)
    with default_registry.scope():
        customops.custom_op(f"{ns}::foo", lambda x: x + 1, mutates_args=(), schema="(Tensor x) -> Tensor")
        assert op_of(ns)(torch.zeros(1)).item() == 1
    op = op_of(ns)
    x = leaf(0.5)
    op(x).backward()
    assert_close(x.grad, torch.tensor([0.5]).cos())
    with pytest.raises(NotImplementedError, match="no fake impl or Meta kernel"):
        op(torch.zeros(1, device="meta"))
