"""The names of torch's older API, `customops.legacy`, and its object layer."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, List, Optional, Tuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._library.utils import has_fake_kernel
from torch._subclasses.fake_tensor import FakeTensorMode, UnsupportedOperatorException
from torch.library import Library
from torch.testing import assert_close

import customops
from customops import default_registry, legacy
from customops._schema import infer
from customops.errors import CallbackError, CustomOpsError, DefinitionError, RegistrationError, UnregisteredError
from customops.legacy import objects


@pytest.fixture(autouse=True)
def _clean(ns: str) -> Iterator[None]:
    """Destroy what a test leaves in the global registry, as users' fixtures do."""
    yield
    for key in [key for key in objects.global_registry if key.startswith(f"{ns}")]:
        objects.global_registry[key]._destroy()


@pytest.fixture
def lib(ns: str) -> Iterator[Library]:
    """A library of the user's own, for ops that exist already."""
    library = Library(ns, "FRAGMENT")
    yield library
    library._destroy()


def op_of(ns: str, name: str = "foo") -> Any:
    return objects.get_op(f"{ns}::{name}")


def leaf(*values: float) -> Tensor:
    return torch.tensor(values, requires_grad=True)


def with_formula(ns: str, schema: str, kernel: Any, save: Any, backward: Any, differentiable: Any = None) -> Any:
    """Define ``ns::foo`` with a kernel and a gradient."""
    legacy.custom_op(f"{ns}::foo", schema)
    legacy.impl(f"{ns}::foo", func=kernel)
    legacy.impl_save_for_backward(f"{ns}::foo", func=save)
    legacy.impl_backward(f"{ns}::foo", differentiable, func=backward)
    return op_of(ns)


def sine(ns: str, result: Callable[[Tensor, Tensor], Any] | None = None) -> Any:
    """``ns::foo``: numpy's sine, whose backward returns what `result` makes of (x, grad)."""
    return with_formula(
        ns,
        "(Tensor x) -> Tensor",
        lambda x: torch.from_numpy(np.sin(x.detach().numpy())),
        lambda inputs, output: inputs.x,
        lambda ctx, x, grad: {"x": grad * x.cos()} if result is None else result(x, grad),
    )


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


# Defining (items 67 - 69) ---------------------------------------------------------------------------------------


def test_a_function_is_returned_and_its_hints_make_the_schema(ns: str) -> None:
    def foo(x: Tensor, n: int = 3, *, by: Optional[float] = None) -> Tuple[Tensor, Tensor]:
        raise NotImplementedError

    assert legacy.custom_op(f"{ns}::foo")(foo) is foo
    assert str(op_of(ns)._schema) == f"{ns}::foo(Tensor x, SymInt n=3, *, float? by=None) -> (Tensor, Tensor)"
    assert torch.Tag.needs_fixed_stride_order in op_of(ns).tags


def test_a_schema_instead_of_a_function(ns: str) -> None:
    assert legacy.custom_op(f"{ns}::foo", "(Tensor x) -> Tensor") is None
    assert str(op_of(ns)._schema) == f"{ns}::foo(Tensor x) -> Tensor"


# item 67
@pytest.mark.parametrize("schema", ["(", "(Tensor x)", "(Tensr x) -> Tensor", "foo(Tensor x) -> Tensor", ""])
def test_a_malformed_schema(ns: str, schema: str) -> None:
    with pytest.raises(AssertionError, match="Invalid function schema: foo") as info:
        legacy.custom_op(f"{ns}::foo", schema)
    assert isinstance(info.value, CustomOpsError)


# item 67
@pytest.mark.parametrize("name", ["foo.Tensor", "foo.default", "foo.out"])
def test_an_overload_in_the_name(ns: str, name: str) -> None:
    with pytest.raises(ValueError, match="overload"):
        legacy.custom_op(f"{ns}::{name}", "() -> ()")


# item 67
@pytest.mark.parametrize("custom_op", [legacy.custom_op, objects.custom_op])
def test_the_function_must_have_the_name_of_the_op(ns: str, custom_op: Any) -> None:
    def baz(x: Tensor) -> Tensor:
        raise NotImplementedError

    with pytest.raises(ValueError, match="to have name 'foo'"):
        custom_op(f"{ns}::foo")(baz)
    with pytest.raises(ValueError, match="decorates a Python function"):
        custom_op(f"{ns}::foo")(torch.sin)


# item 67
@pytest.mark.parametrize("schema", ["(Tensor(a!) x) -> Tensor", "(Tensor(a) x) -> Tensor(a)", "(Tensor x) -> ()"])
def test_only_functional_ops(ns: str, schema: str) -> None:
    with pytest.raises(ValueError, match="only supports functional"):
        legacy.custom_op(f"{ns}::foo", schema)


# item 67
@pytest.mark.parametrize("schema", ["(Tensor self) -> Tensor", "(Tensor self) -> ()"])
def test_no_argument_named_self(ns: str, schema: str) -> None:
    with pytest.raises(ValueError, match="self"):
        legacy.custom_op(f"{ns}::foo", schema)


# item 67
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


def signature(code: str) -> Any:
    names: dict[str, Any] = {}
    exec(f"def foo({code}): pass", names)
    return names["foo"]


# item 68
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


# item 68
@pytest.mark.parametrize("code", ["x, *args", "x, **kwargs", "*args", "**kwargs", "x, /"])
def test_a_manual_schema_and_a_signature_of_any_arguments(ns: str, code: str) -> None:
    with pytest.raises(ValueError, match="not supported"):
        objects.custom_op(f"{ns}::foo", "(Tensor x) -> Tensor")(signature(code))


# item 68
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


# item 68
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


# item 69
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


# item 69
@pytest.mark.parametrize("args", [(), (None, "foo", None, "foo", None)])
def test_the_constructor_is_private(args: Any) -> None:
    with pytest.raises(RuntimeError, match="CustomOp constructor is private"):
        objects.CustomOp(*args)


# item 69
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


# item 69
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


# Kernels and fakes (items 70, 71) -------------------------------------------------------------------------------


# item 70
@pytest.mark.parametrize("device_types", ["cpu", ["cpu"], ("cpu", "cuda"), {"cuda", "cpu"}, iter(["cpu"])])
def test_a_kernel(ns: str, device_types: Any) -> None:
    legacy.custom_op(f"{ns}::foo", "(Tensor x, float by) -> Tensor")

    def kernel(x: Tensor, by: float) -> Tensor:
        return torch.from_numpy(x.numpy() * by)

    assert legacy.impl(f"{ns}::foo", device_types=device_types)(kernel) is kernel
    assert op_of(ns)(torch.ones(2), 2.5).tolist() == [2.5, 2.5]


# item 70
def test_kernels_go_to_their_devices(ns: str) -> None:
    legacy.custom_op(f"{ns}::foo", "(Tensor x) -> Tensor")
    for i, device in enumerate(objects.SUPPORTED_DEVICE_TYPE_TO_KEY):
        legacy.impl(f"{ns}::foo", device_types=device, func=lambda x, i=i: torch.full((1,), float(i)))
    for i, key in enumerate(objects.SUPPORTED_DEVICE_TYPE_TO_KEY.values()):
        keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
        assert op_of(ns).redispatch(keys, torch.zeros(1)).item() == i


# item 70
@pytest.mark.gpu
def test_a_kernel_on_cuda(ns: str) -> None:
    legacy.custom_op(f"{ns}::foo", "(Tensor x) -> Tensor")
    legacy.impl(f"{ns}::foo", func=lambda x: x + 1)
    assert op_of(ns)(torch.zeros(1, device="cuda")).item() == 1


# item 70
@pytest.mark.parametrize("device_types", ["xpu", "meta", ["cpu", "xpu"], "CPU", ""])
def test_other_device_types(ns: str, device_types: Any) -> None:
    legacy.custom_op(f"{ns}::foo", "(Tensor x) -> Tensor")
    with pytest.raises(ValueError, match="we only support device_type"):
        legacy.impl(f"{ns}::foo", device_types=device_types)(torch.sin)
    with pytest.raises(ValueError, match="we only support device_type"):
        objects.global_registry[f"{ns}::foo"].impl(device_types)
    with pytest.raises(NotImplementedError):  # nothing was registered
        op_of(ns)(torch.ones(1))


# item 70
def test_a_kernel_for_an_op_of_a_library(ns: str, lib: Library) -> None:
    lib.define("foo(Tensor x) -> Tensor")
    legacy.impl(f"{ns}::foo", func=lambda x: x * 2)
    assert op_of(ns)(torch.ones(1)).item() == 2
    legacy._destroy(f"{ns}::foo")
    assert f"{ns}::foo" not in objects.global_registry
    with pytest.raises(NotImplementedError, match="Could not run"):  # the op is still there, the kernel is not
        op_of(ns)(torch.ones(1))
    legacy.impl(f"{ns}::foo", func=lambda x: x * 3)
    assert op_of(ns)(torch.ones(1)).item() == 3


# item 70
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("key", ["", "CompositeImplicitAutograd", "CompositeExplicitAutograd"])
def test_an_op_of_a_library_with_a_kernel(ns: str, lib: Library, key: str, device: str) -> None:
    lib.define("foo(Tensor x) -> Tensor")
    lib.impl("foo", lambda x: x + 1, key or device.upper())
    for devices in (device, ["cpu", "cuda"]):
        with pytest.raises(RuntimeError, match="already has an implementation"):
            legacy.impl(f"{ns}::foo", device_types=devices)(lambda x: x * 2)
    if not key:
        other = {"cpu": "cuda", "cuda": "cpu"}[device]
        legacy.impl(f"{ns}::foo", device_types=other)(lambda x: x * 2)


def test_a_second_kernel_for_a_device(ns: str) -> None:
    legacy.custom_op(f"{ns}::foo", "(Tensor x) -> Tensor")
    legacy.impl(f"{ns}::foo", device_types="cpu", func=torch.sin)
    with pytest.raises(RuntimeError, match="already has a cpu impl"):
        legacy.impl(f"{ns}::foo", func=torch.cos)
    legacy.impl(f"{ns}::foo", device_types="cuda", func=torch.cos)
    assert_close(op_of(ns)(torch.ones(1)), torch.ones(1).sin())


def test_an_op_that_does_not_exist(ns: str) -> None:
    for register in (legacy.impl, legacy.impl_abstract, legacy.impl_save_for_backward, legacy.impl_backward):
        with pytest.raises(ValueError, match="Could not find the operator"):
            register(f"{ns}::foo")(lambda x: x)


# item 71
def test_missing_kernels(ns: str) -> None:
    legacy.custom_op(f"{ns}::foo", "(Tensor x) -> Tensor")
    legacy.custom_op(f"{ns}::many", "(Tensor[] xs) -> Tensor")
    for args, name in ((torch.ones(3), "foo"), ([torch.ones(3)], "many")):
        with pytest.raises(NotImplementedError, match="cpu impl registered"):
            op_of(ns, name)(args)
        with torch.inference_mode(), pytest.raises(NotImplementedError, match="cpu impl registered"):
            op_of(ns, name)(args)
    with pytest.raises(NotImplementedError, match="no fake impl or Meta kernel"):
        op_of(ns)(torch.ones(3, device="meta"))
    legacy.impl(f"{ns}::foo", device_types="cuda", func=torch.sin)
    with pytest.raises(NotImplementedError, match="cpu impl registered"):
        op_of(ns)(torch.ones(3))


# item 71
def test_no_tensor_inputs(ns: str) -> None:
    def foo(sizes: Sequence[int]) -> Tensor:
        raise NotImplementedError

    legacy.custom_op(f"{ns}::foo", foo)
    with pytest.raises(NotImplementedError, match="no Tensor inputs"):
        op_of(ns)((1, 2, 3))
    legacy.custom_op(f"{ns}::many", "(Tensor[] xs) -> Tensor")
    legacy.impl(f"{ns}::many", func=lambda xs: torch.zeros(1))
    with pytest.raises(NotImplementedError, match="no Tensor inputs"):
        op_of(ns, "many")([])


def test_a_factory(ns: str) -> None:
    ones = objects.custom_op(f"{ns}::ones", "(int n) -> Tensor")(lambda_named("ones", lambda n: None))
    ones.impl_factory()(torch.ones)
    assert ones(3).tolist() == [1, 1, 1]


def lambda_named(name: str, fn: Any) -> Any:
    fn.__name__ = name
    return fn


def test_a_fake(ns: str) -> None:
    op = sine(ns)
    assert not has_fake_kernel(op)
    with FakeTensorMode(), pytest.raises(UnsupportedOperatorException):
        op(torch.ones(2))
    fake = legacy.impl_abstract(f"{ns}::foo")(lambda x: torch.empty_like(x))
    assert objects.get_abstract_impl(f"{ns}::foo") is fake
    assert has_fake_kernel(op)
    assert op(torch.ones(2, 3, device="meta")).shape == (2, 3)
    with FakeTensorMode():
        assert op(torch.ones(4)).shape == (4,)


def test_an_op_that_goes_before_its_entry(ns: str) -> None:
    for factor in (2, 3):
        lib = Library(ns, "FRAGMENT")
        lib.define("foo(Tensor x) -> Tensor")
        legacy.impl(f"{ns}::foo", func=lambda x, factor=factor: x * factor)
        legacy.impl_abstract(f"{ns}::foo", func=torch.empty_like)
        legacy.impl_save_for_backward(f"{ns}::foo", func=lambda inputs, output: None)
        legacy.impl_backward(f"{ns}::foo", func=lambda ctx, saved, grad, factor=factor: {"x": grad * factor})
        x = leaf(1.0)
        op_of(ns)(x).backward()
        assert x.grad is not None
        assert x.grad.item() == factor
        lib._destroy()  # the second time round, the entry of the first is found stale
    objects.global_registry[f"{ns}::foo"]._destroy()
    assert f"{ns}::foo" not in objects.global_registry


def test_an_op_that_was_unregistered_before_its_entry(ns: str, lib: Library) -> None:
    lib.define("foo(Tensor x) -> Tensor")
    for _ in range(2):
        legacy.impl(f"{ns}::foo", func=torch.sin)
        customops.adopt(f"{ns}::foo").unregister()
        objects.global_registry[f"{ns}::foo"]._destroy()
        with pytest.raises(NotImplementedError, match="Could not run"):
            op_of(ns)(torch.ones(1))


def test_get_abstract_impl_without_one(ns: str) -> None:
    assert objects.get_abstract_impl(f"{ns}::foo") is None
    legacy.custom_op(f"{ns}::foo", "(Tensor x) -> Tensor")
    assert objects.get_abstract_impl(f"{ns}::foo") is None


def test_a_fake_of_an_op_of_a_library_goes_with_its_entry(ns: str, lib: Library) -> None:
    lib.define("foo(Tensor x) -> Tensor")
    legacy.impl_abstract(f"{ns}::foo", func=torch.empty_like)
    assert op_of(ns)(torch.ones(2, device="meta")).shape == (2,)
    legacy._destroy(f"{ns}::foo")
    with pytest.raises(NotImplementedError):
        op_of(ns)(torch.ones(2, device="meta"))


def test_get_ctx_makes_sizes(ns: str) -> None:
    def foo(x: Tensor) -> Tensor:
        raise NotImplementedError

    foo_op = objects.custom_op(f"{ns}::foo")(foo)

    @foo_op.impl_abstract()
    def abstract(x: Tensor) -> Tensor:
        return x.new_empty([objects.get_ctx().new_dynamic_size(), x.dim()], dtype=torch.long)

    foo_op.impl("cpu")(lambda x: torch.from_numpy(np.argwhere(x.numpy())))
    x = torch.tensor([0.0, 1.0, 2.0])
    assert foo_op(x).tolist() == [[1], [2]]
    graph = torch.export.export(Calls(foo_op), (x,)).graph_module
    assert_close(graph(x)[0], torch.nonzero(x))
    assert legacy.get_ctx is objects.get_ctx


class Calls(torch.nn.Module):
    def __init__(self, fn: Any) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor) -> Any:
        return self.fn(x)


def test_the_object_takes_one_fake(ns: str) -> None:
    foo = objects.custom_op(f"{ns}::foo", "(Tensor x) -> Tensor")(signature("x"))
    foo.impl_abstract()(torch.empty_like)
    with pytest.raises(RuntimeError, match="already has a fake impl"):
        foo.impl_abstract()(torch.empty_like)


# Gradients (items 72 - 76) --------------------------------------------------------------------------------------


# item 72
@pytest.mark.parametrize("has_kernel", [False, True])
@pytest.mark.parametrize(
    ("schema", "make"),
    [
        ("(Tensor x) -> Tensor", lambda g, p: (g,)),
        ("(Tensor x, Tensor y) -> Tensor", lambda g, p: (p, g)),
        ("(Tensor x, Tensor y) -> Tensor", lambda g, p: (g, p)),
        ("(Tensor[] xs) -> Tensor", lambda g, p: ([p, g],)),
        ("(Tensor? x, Tensor y) -> Tensor", lambda g, p: (None, g)),
        ("(int n, Tensor?[] xs) -> Tensor", lambda g, p: (1, [None, g])),
    ],
)
def test_a_call_that_needs_a_gradient_without_formula(ns: str, schema: str, make: Any, has_kernel: bool) -> None:
    legacy.custom_op(f"{ns}::foo", schema)
    if has_kernel:
        legacy.impl(f"{ns}::foo", func=lambda *args: torch.zeros(2))
    args = make(leaf(1.0, 2.0), torch.ones(2))
    with pytest.raises(RuntimeError, match=f"Autograd has not been implemented for operator {ns}::foo"):
        op_of(ns)(*args)
    if has_kernel:
        with torch.no_grad():
            assert op_of(ns)(*args).tolist() == [0, 0]
        plain = make(torch.ones(2), torch.ones(2))
        assert not op_of(ns)(*plain).requires_grad


def test_a_gradient_of_keyword_only_tensors(ns: str) -> None:
    legacy.custom_op(f"{ns}::foo", "(*, Tensor x) -> Tensor")
    with pytest.raises(RuntimeError, match="Autograd has not been implemented"):
        op_of(ns)(x=leaf(1.0))
    legacy.impl(f"{ns}::foo", func=lambda *, x: x * 3)
    legacy.impl_save_for_backward(f"{ns}::foo", func=lambda inputs, output: None)
    legacy.impl_backward(f"{ns}::foo", func=lambda ctx, saved, grad: {"x": grad * 3})
    x = leaf(1.0)
    op_of(ns)(x=x).backward()
    assert x.grad == 3


def test_forward_mode_raises(ns: str) -> None:
    legacy.custom_op(f"{ns}::foo", "(Tensor x) -> Tensor")
    legacy.impl(f"{ns}::foo", func=torch.sin)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            torch.func.jvp(op_of(ns), (torch.ones(1),), (torch.ones(1),))
        if f"{ns}::foo" in objects.global_registry and objects.global_registry[f"{ns}::foo"]._pair.save is None:
            legacy.impl_save_for_backward(f"{ns}::foo", func=lambda inputs, output: inputs.x)
            legacy.impl_backward(f"{ns}::foo", func=lambda ctx, x, grad: {"x": grad * x.cos()})


# item 73
def test_a_formula(ns: str) -> None:
    op = sine(ns)
    x = leaf(0.1, 0.2, 0.3)
    op(x).sum().backward()
    assert_close(x.grad, x.detach().cos())
    legacy.impl_abstract(f"{ns}::foo", func=torch.empty_like)
    compiled = torch.compile(lambda x: op(x).sum(), fullgraph=True, backend="aot_eager")
    x.grad = None
    compiled(x).backward()
    assert_close(x.grad, x.detach().cos())
    double = leaf(0.1, 0.2).double().detach().requires_grad_()
    assert torch.autograd.gradcheck(op, (double,))
    assert_close(torch.func.grad(lambda x: torch.sin(op(x)).sum())(double.detach()),
                 torch.func.grad(lambda x: torch.sin(torch.sin(x)).sum())(double.detach()))  # fmt: skip


# item 73
def test_what_save_for_backward_is_given(ns: str) -> None:
    seen: list[Any] = []

    def save(inputs: Any, output: Any) -> Any:
        seen.append((inputs, output))
        return {"of": (inputs.x, [output[1][0], 7]), "name": "saved"}

    def backward(ctx: Any, saved: Any, grad: Tensor, grads: list[Tensor]) -> Any:
        x, (y, seven) = saved["of"]
        assert seven == 7
        assert saved["name"] == "saved"
        return {"x": grad * seven + grads[0] * y, "ys": [None, grads[1] * x]}

    op = with_formula(
        ns,
        "(Tensor x, Tensor[] ys, *, int n=4, str? s=None) -> (Tensor, Tensor[])",
        lambda x, ys, *, n, s: (x * n, [x + 0, ys[1] * n]),
        save,
        backward,
    )
    x, y = leaf(1.0, 2.0), leaf(3.0, 4.0)
    out, (first, second) = op(x, [torch.ones(2), y])
    assert len(seen) == 1  # item 73: once per forward
    inputs, output = seen[0]
    assert inputs._fields == ("x", "ys", "n", "s")
    assert inputs.x is x
    assert (inputs.ys[1].tolist(), inputs.n, inputs.s) == ([3, 4], 4, None)
    assert [out.tolist() for out in (output[0], *output[1])] == [[4, 8], [1, 2], [12, 16]]
    (out.sum() + (2 * first).sum() + (3 * second).sum()).backward()
    assert_close(x.grad, torch.tensor([7.0, 7.0]) + 2 * torch.tensor([1.0, 2.0]))
    assert_close(y.grad, 3 * torch.tensor([1.0, 2.0]))
    op(x.detach(), [torch.ones(2), y.detach()])
    with torch.no_grad():
        op(x, [x, y])
    assert len(seen) == 1


# item 73
def test_half_a_formula(ns: str) -> None:
    legacy.custom_op(f"{ns}::foo", "(Tensor x) -> Tensor")
    legacy.impl(f"{ns}::foo", func=torch.sin)
    legacy.impl_backward(f"{ns}::foo", func=lambda ctx, x, grad: {"x": grad * x.cos()})
    for x in (torch.ones(1), leaf(1.0)):
        with pytest.raises(RuntimeError, match="unable to find a 'save_for_backward'"):
            op_of(ns)(x)
    legacy.impl_save_for_backward(f"{ns}::foo", func=lambda inputs, output: inputs.x)
    assert_close(op_of(ns)(leaf(1.0)), torch.ones(1).sin(), check_stride=False)


# item 73
def test_the_other_half_of_a_formula(ns: str, lib: Library) -> None:
    lib.define("foo(Tensor x) -> Tensor")
    legacy.impl(f"{ns}::foo", func=torch.sin)
    legacy.impl_save_for_backward(f"{ns}::foo", func=lambda inputs, output: inputs.x)
    with pytest.raises(RuntimeError, match="unable to find a 'backward'"):
        op_of(ns)(leaf(1.0))
    legacy.impl_backward(f"{ns}::foo", func=lambda ctx, x, grad: {"x": grad * x.cos()})
    x = leaf(0.3)
    op_of(ns)(x).backward()
    assert_close(x.grad, torch.tensor([0.3]).cos())
    legacy._destroy(f"{ns}::foo")
    lib.impl("foo", torch.sin, "CompositeExplicitAutograd")
    with torch.no_grad():
        assert_close(op_of(ns)(x), x.detach().sin())


def test_a_second_formula(ns: str) -> None:
    sine(ns)
    with pytest.raises(RuntimeError, match="already has a save_for_backward impl"):
        legacy.impl_save_for_backward(f"{ns}::foo", func=lambda inputs, output: None)
    with pytest.raises(RuntimeError, match="already has a backward impl"):
        legacy.impl_backward(f"{ns}::foo", func=lambda ctx, saved, grad: {})


def test_a_formula_ends_with_its_scope(ns: str) -> None:
    legacy.custom_op(f"{ns}::foo", "(Tensor x) -> Tensor")
    legacy.impl(f"{ns}::foo", func=torch.sin)
    for _ in range(2):
        with default_registry.scope():
            legacy.impl_save_for_backward(f"{ns}::foo", func=lambda inputs, output: inputs.x)
            legacy.impl_backward(f"{ns}::foo", func=lambda ctx, x, grad: {"x": grad * x.cos()})
            x = leaf(0.3)
            op_of(ns)(x).backward()
            assert_close(x.grad, torch.tensor([0.3]).cos())
        with pytest.raises(RuntimeError, match="Autograd has not been implemented"):
            op_of(ns)(leaf(1.0))


def test_callbacks_that_do_not_fit(ns: str) -> None:
    legacy.custom_op(f"{ns}::foo", "(Tensor x) -> Tensor")
    with pytest.raises(CallbackError, match="save_for_backward function does not fit"):
        legacy.impl_save_for_backward(f"{ns}::foo", func=lambda inputs: None)
    with pytest.raises(CallbackError, match="backward does not fit"):
        legacy.impl_backward(f"{ns}::foo", func=lambda ctx, grad: None)


# item 74
@pytest.mark.parametrize(
    ("result", "phrase"),
    [
        (lambda x, grad: grad, "to be a dict"),
        (lambda x, grad: None, "to be a dict"),
        (lambda x, grad: (grad,), "to be a dict"),
        (lambda x, grad: {"x": grad, "y": grad}, "to have keys {'x'}"),
        (lambda x, grad: {"y": grad}, "to have keys {'x'}"),
        (lambda x, grad: {"x": grad, 3: None}, "to have keys {'x'}"),
        (lambda x, grad: {}, "to have keys {'x'}"),
        (lambda x, grad: {"x": 1.0}, "either None or a Tensor"),
        (lambda x, grad: {"x": (grad,)}, "either None or a Tensor"),
    ],
)
def test_a_backward_that_returns_something_else(ns: str, result: Any, phrase: str) -> None:
    out = sine(ns, result)(leaf(1.0))
    with pytest.raises(RuntimeError, match=phrase):
        out.backward()


# item 74
@pytest.mark.parametrize("type_", ["Tensor", "Tensor?"])
def test_a_missing_key_of_a_tensor(ns: str, type_: str) -> None:
    op = with_formula(
        ns,
        f"(Tensor x, {type_} y) -> Tensor",
        lambda x, y: x.clone(),
        lambda inputs, output: None,
        lambda ctx, saved, grad: {"x": grad},
    )
    others = [leaf(1.0)] if type_ == "Tensor" else [leaf(1.0), None]
    for y in others:
        with pytest.raises(RuntimeError, match=r"to have keys {.*'y'.*}"):
            op(leaf(1.0), y).backward()


# item 74
def test_a_key_of_an_argument_that_is_no_tensor(ns: str) -> None:
    op = with_formula(
        ns,
        "(Tensor x, int n) -> Tensor",
        lambda x, n: x * n,
        lambda inputs, output: inputs.n,
        lambda ctx, n, grad: {"x": grad * n, "n": None},
    )
    with pytest.raises(RuntimeError, match="non-Tensor-like types"):
        op(leaf(1.0), 3).backward()


# item 74
@pytest.mark.parametrize(
    ("gradients", "phrase"),
    [
        (lambda grad: grad, "list of gradients"),
        (lambda grad: None, "list of gradients"),
        (lambda grad: [grad, grad], "3 gradients but got 2"),
        (lambda grad: [grad, None, 3], "None or Tensor"),
        (lambda grad: [grad, [grad], None], "None or Tensor"),
    ],
)
def test_gradients_of_a_list(ns: str, gradients: Any, phrase: str) -> None:
    op = with_formula(
        ns,
        "(Tensor[] xs) -> Tensor",
        lambda xs: sum(xs),
        lambda inputs, output: None,
        lambda ctx, saved, grad: {"xs": gradients(grad)},
    )
    out = op([leaf(1.0), leaf(2.0), torch.ones(1)])
    with pytest.raises(RuntimeError, match=phrase):
        out.backward()


# item 74
@pytest.mark.parametrize("container", [list, tuple])
def test_gradients_of_a_list_that_fit(ns: str, container: Any) -> None:
    op = with_formula(
        ns,
        "(Tensor[] xs, Tensor? y=None) -> Tensor",
        lambda xs, y: sum((i + 1) * x for i, x in enumerate(xs)),
        lambda inputs, output: len(inputs.xs),
        lambda ctx, n, grad: {"xs": container([grad, None, *(grad * (i + 1) for i in range(2, n))]), "y": None},
    )
    xs = [leaf(1.0), torch.ones(1), leaf(3.0)]
    op(xs).backward()
    assert [x.grad and x.grad.item() for x in xs] == [1, None, 3]


# item 75
@pytest.mark.parametrize("value", [True, (True, True), [True], [True, True, True], [1, 0], [], "ab", [True, None]])
def test_output_differentiability_must_fit(ns: str, value: Any) -> None:
    legacy.custom_op(f"{ns}::foo", "(Tensor x) -> (Tensor, Tensor)")
    with pytest.raises(RuntimeError, match="output_differentiability"):
        legacy.impl_backward(f"{ns}::foo", output_differentiability=value)(lambda ctx, saved, a, b: {"x": a})
    with pytest.raises(RuntimeError, match="output_differentiability"):
        objects.global_registry[f"{ns}::foo"].impl_backward(value)


# item 75
def test_outputs_that_are_not_differentiable(ns: str) -> None:
    op = with_formula(
        ns,
        "(Tensor x) -> (Tensor[], Tensor, Tensor, int)",
        lambda x: ([x * 2, x * 3], x * 4, x * 5, 6),
        lambda inputs, output: None,
        lambda ctx, saved, many, one, other, number: {"x": one * 4},
        [False, True, False, False],
    )
    x = leaf(1.0, 2.0)
    many, one, other, number = op(x)
    assert [out.requires_grad for out in (*many, one, other)] == [False, False, True, False]
    assert number == 6
    one.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [4, 4]


# item 75
def test_a_number_that_is_differentiable(ns: str) -> None:
    op = with_formula(
        ns,
        "(Tensor x) -> (Tensor, int)",
        lambda x: (x.clone(), 3),
        lambda inputs, output: None,
        lambda ctx, saved, grad, _: {"x": grad},
        [True, True],
    )
    with pytest.raises(RuntimeError, match="is not a Tensor"):
        op(leaf(1.0))


def halves(ns: str) -> list[Callable[[], Any]]:
    return [
        lambda: legacy.impl_save_for_backward(f"{ns}::foo", func=lambda inputs, output: None),
        lambda: legacy.impl_backward(f"{ns}::foo", func=lambda ctx, saved, *grads: {}),
    ]


# item 76
@pytest.mark.parametrize(
    ("schema", "phrase"),
    [
        ("(Tensor(a) x) -> Tensor(a)", "operator that returns views"),
        ("(Tensor(a!) x) -> Tensor", "non-functional"),
        ("(Tensor(a!) x) -> Tensor(a!)", "non-functional"),
        ("(Tensor x) -> ()", "no returns"),
    ],
)
def test_a_gradient_for_a_schema_that_has_none(ns: str, lib: Library, schema: str, phrase: str) -> None:
    lib.define(f"foo{schema}")
    for register in halves(ns):
        with pytest.raises(RuntimeError, match=phrase):
            register()


# item 76
@pytest.mark.parametrize("key", ["CompositeImplicitAutograd", "Autograd", "AutogradCPU", "AutogradCUDA"])
def test_a_gradient_for_an_op_that_has_one(ns: str, lib: Library, key: str) -> None:
    lib.define("foo(Tensor x) -> Tensor")
    lib.impl("foo", lambda x: x.sin().cos(), key)
    for register in halves(ns):
        with pytest.raises(RuntimeError, match=rf"{key}\b"):
            register()


def test_a_gradient_for_an_op_of_customops(ns: str) -> None:
    customops.custom_op(f"{ns}::foo", torch.sin, mutates_args=(), schema="(Tensor x) -> Tensor")
    for register in halves(ns):
        with pytest.raises(RegistrationError, match="Autograd"):
            register()
    objects.global_registry[f"{ns}::foo"]._destroy()  # of the entry, not of the op
    assert_close(op_of(ns)(torch.ones(1)), torch.ones(1).sin())
    default_registry[f"{ns}::foo"].unregister()


# The object layer (item 77) -------------------------------------------------------------------------------------


# item 77
def test_get_op(ns: str, lib: Library) -> None:
    assert objects.get_op("aten::sin") is torch.ops.aten.sin.default
    lib.define("bar(Tensor x) -> Tensor")
    assert objects.get_op(f"{ns}::bar") is getattr(torch.ops, ns).bar.default
    legacy.custom_op(f"{ns}::foo", "(Tensor x) -> Tensor")
    assert objects.get_op(f"{ns}::foo") is getattr(torch.ops, ns).foo.default
    for missing in (f"{ns}::baz", "no_such_namespace::foo", "foo"):
        with pytest.raises(ValueError, match=r"Could not find the operator|namespace"):
            objects.get_op(missing)


# item 77
def test_the_global_registry(ns: str, lib: Library) -> None:
    lib.define("bar(Tensor x) -> Tensor")
    legacy.custom_op(f"{ns}::foo", "(Tensor x) -> Tensor")
    legacy.impl(f"{ns}::bar", func=torch.sin)
    assert isinstance(objects.global_registry, dict)
    keys = [key for key in list(objects.global_registry.keys()) if key.startswith(f"{ns}::")]
    assert keys == [f"{ns}::foo", f"{ns}::bar"]
    for key in keys:
        assert isinstance(objects.global_registry[key], objects.CustomOp)
        objects.global_registry[key]._destroy()
    assert not [key for key in objects.global_registry if key.startswith(f"{ns}::")]


# item 77
def test_the_object_is_callable(ns: str) -> None:
    @objects.custom_op(f"{ns}::foo")
    def foo(x: Tensor, ys: List[Tensor]) -> Tensor:
        "Adds."
        raise NotImplementedError

    @foo.impl(["cpu", "cuda"])
    def add(x: Tensor, ys: list[Tensor]) -> Tensor:
        return x + sum(ys)

    foo.impl_save_for_backward()(lambda inputs, output: len(inputs.ys))
    foo.impl_backward()(lambda ctx, n, grad: {"x": grad, "ys": [grad] * n})
    assert objects.global_registry[f"{ns}::foo"] is foo
    assert repr(foo) == f'<CustomOp(op="{ns}::foo")>'
    assert (foo.__name__, foo.__doc__, foo.__module__) == ("foo", "Adds.", __name__)
    y = leaf(1.0)
    foo(torch.ones(1), [y, y]).backward()
    assert y.grad is not None
    assert y.grad.item() == 2
    foo._destroy()
    foo._destroy()  # an op that is gone already is none to complain about
    with pytest.raises(UnregisteredError):
        foo(y, [y])


def test_new_registrations_on_an_old_op(ns: str) -> None:
    legacy.custom_op(f"{ns}::foo", "(Tensor x) -> Tensor")
    new = customops.adopt(f"{ns}::foo")
    new.register_kernel("cpu", torch.sin)
    torch.library.register_fake(f"{ns}::foo", torch.empty_like)
    new.register_autograd(lambda ctx, grad: grad * 7)
    x = leaf(1.0)
    new(x).backward()
    assert x.grad is not None
    assert x.grad.item() == 7
    assert new(torch.ones(2, device="meta")).shape == (2,)
    legacy._destroy(f"{ns}::foo")
    legacy.custom_op(f"{ns}::foo", "(Tensor x) -> Tensor")
    with pytest.raises(NotImplementedError, match="no fake impl or Meta kernel"):
        op_of(ns)(torch.ones(2, device="meta"))


def test_opcheck_passes(ns: str) -> None:
    op = sine(ns)
    legacy.impl_abstract(f"{ns}::foo", func=torch.empty_like)
    result = customops.opcheck(op, (leaf(0.1, 0.2),))
    assert set(result.values()) == {"SUCCESS"}
