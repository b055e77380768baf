"""What torch does itself, and what code written for custom ops relies on: it works on beside `customops`, and the same.

Nothing of this is of this package. The tests notice a torch that does it differently, or an import of `customops`
that gets in its way.
"""

from __future__ import annotations

import inspect
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tensors import leaf
from helpers.warm import PYTHON
from torch import Tensor
from torch._C import FunctionSchema, parse_schema
from torch._library import opaque_object
from torch._library.autograd import supports_tensorlist
from torch._library.utils import get_layout_constraint_tag, is_functional_schema, is_tensorlist_like_type
from torch.library import Library
from torchgen.model import FunctionSchema as TorchgenSchema

import customops
from customops import Registry

ROOT = Path(__file__).resolve().parents[3]


aten, Tag = torch.ops.aten, torch.Tag


@pytest.fixture
def beside(registry: Registry, ns: str) -> Any:
    """An op of ours in the namespace of `lib`."""
    return registry.custom_op(f"{ns}::beside", lambda x: x + 1, mutates_args=(), schema="(Tensor x) -> Tensor")


# autograd.Function with lists -----------------------------------------------------------------------------------------


@supports_tensorlist
class Scale(torch.autograd.Function):
    """Multiplies item i of a list by i + 1, and `y` by 10. Notes what needs a gradient."""

    needed: list[Any] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx: Any, xs: list[Tensor], y: Tensor) -> tuple[list[Tensor], Tensor]:
        return [x * (i + 1) for i, x in enumerate(xs)], y * 10

    @staticmethod
    def backward(ctx: Any, grads: list[Tensor], grad: Tensor) -> tuple[list[Tensor], Tensor]:  # type: ignore[override]
        Scale.needed.append(ctx.needs_input_grad)
        return [g * (i + 1) for i, g in enumerate(grads)], grad * 10


@pytest.mark.parity(57)
def test_lists_in_and_out_of_a_function() -> None:
    Scale.needed.clear()
    a, b, y = leaf(1.0), torch.ones(1), leaf(2.0)
    (first, second), third = Scale.apply([a, b], y)
    assert (first.item(), second.item(), third.item()) == (1, 2, 20)
    found = torch.autograd.grad(first + 3 * second + third, (a, y), retain_graph=True)
    assert [g.item() for g in found] == [1, 10]
    found = torch.autograd.grad(first + 5 * second, (a, y))  # once more, of the same graph
    assert [g.item() for g in found] == [1, 0]
    assert Scale.needed == [([True, False], True)] * 2


@pytest.mark.parity(57)
def test_applies_of_such_functions_may_interleave() -> None:
    a, y = leaf(1.0), leaf(2.0)
    one, two = Scale.apply([a, a], y), Scale.apply([y], a)
    (third,), fourth = Scale.apply([one[0][1]], two[1])
    assert (third.item(), fourth.item()) == (2, 100)
    found = torch.autograd.grad(third + fourth + two[0][0] + one[1], (a, y))
    assert [g.item() for g in found] == [2 + 100, 1 + 10]


@supports_tensorlist
class Power(torch.autograd.Function):
    """``x ** n`` of each item, by recursion in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, xs: list[Tensor], n: int) -> list[Tensor]:
        ctx.save_for_backward(*xs)
        ctx.n = n
        return [x.clone() for x in xs] if n == 1 else [x * y for x, y in zip(xs, Power.apply(xs, n - 1), strict=True)]

    @staticmethod
    def backward(ctx: Any, grads: list[Tensor]) -> tuple[list[Tensor], None]:
        xs = list(ctx.saved_tensors)
        below = Power.apply(xs, ctx.n - 1) if ctx.n > 1 else [torch.ones_like(x) for x in xs]
        return [g * ctx.n * y for g, y in zip(grads, below, strict=True)], None


@pytest.mark.parity(57)
def test_such_functions_may_recurse() -> None:
    a, b = leaf(2.0), leaf(3.0)
    first, second = Power.apply([a, b], 3)
    assert (first.item(), second.item()) == (8, 27)
    found = torch.autograd.grad(first + second, (a, b))
    assert [g.item() for g in found] == [3 * 4, 3 * 9]


@pytest.mark.parity(57)
def test_such_functions_are_not_called_directly() -> None:
    with pytest.raises(NotImplementedError, match=r"Function\.forward directly"):
        Scale.forward(None, [leaf(1.0)], leaf(1.0))
    with pytest.raises(NotImplementedError, match=r"Function\.backward directly"):
        Scale.backward(object(), [leaf(1.0)], leaf(1.0))


# Schemas --------------------------------------------------------------------------------------------------------------


@pytest.mark.parity(98)
@pytest.mark.parametrize(
    ("type_", "phrase"),
    [
        ("Matrix", "unknown type specifier"),
        ("int64_t", "Use `SymInt` or `int`"),
        ("double", "Use `float`"),
    ],
)
def test_types_that_no_schema_has(lib: Library, beside: Any, type_: str, phrase: str) -> None:
    with pytest.raises(RuntimeError, match=phrase):
        lib.define(f"f(Tensor x, {type_} y) -> Tensor")
    assert beside(torch.zeros(1)).item() == 1


@pytest.mark.parity(98)
def test_an_opaque_type_once_it_is_registered(lib: Library, registry: Registry, ns: str) -> None:
    base = opaque_object.OpaqueBase if hasattr(opaque_object, "OpaqueBase") else opaque_object.CustomClassBase
    counter = type("Counter", (base,), {"n": 3, "__module__": ns})  # a class of its own, as torch keeps it for good
    with pytest.raises(RuntimeError, match="unknown type specifier"):
        lib.define(f"f(Tensor x, {ns}.Counter counter) -> Tensor")
    opaque_object.register_opaque_type(counter, typ="reference")
    name = opaque_object.get_opaque_type_name(counter)
    lib.define(f"f(Tensor x, {name} counter) -> Tensor")
    lib.impl("f", lambda x, counter: x + counter.n, "CompositeExplicitAutograd")
    assert getattr(torch.ops, ns).f(torch.zeros(1), counter()).item() == 3

    def g(x: Tensor, c: Any) -> Tensor:
        return x * c.n

    g.__annotations__["c"] = counter
    assert registry.custom_op(f"{ns}::g", g, mutates_args=())(torch.ones(1), counter()).item() == 3


@pytest.mark.parity(98)
@pytest.mark.parametrize(
    ("schema", "functional"),
    [
        ("f(Tensor x) -> Tensor", True),
        ("f(Tensor(a) x) -> Tensor", True),
        ("f(Tensor(a!) x) -> Tensor", False),
        ("f(Tensor(a!) x, Tensor y) -> Tensor", False),
        ("f(Tensor(a) x) -> Tensor(a)", False),
        ("f(Tensor x) -> ()", False),
    ],
)
def test_functional_schemas(schema: str, functional: bool) -> None:
    parsed: FunctionSchema = parse_schema(schema)
    for form in (schema, TorchgenSchema.parse(schema), parsed):
        assert is_functional_schema(form) is functional


@pytest.mark.parity(98)
@pytest.mark.parametrize(
    ("type_", "is_list"),
    [
        *((type_, True) for type_ in ("Tensor[]", "Tensor?[]", "Tensor[]?", "Tensor?[]?")),
        *((type_, False) for type_ in ("Tensor", "Tensor?", "int[]", "Scalar")),
    ],
)
def test_lists_of_tensors(type_: str, is_list: bool) -> None:
    assert is_tensorlist_like_type(parse_schema(f"f({type_} x) -> ()").arguments[0].type) is is_list


@pytest.mark.parity(98)
def test_layout_constraints(lib: Library, registry: Registry, ns: str) -> None:
    # From the one that constrains most.
    tags = [Tag.needs_exact_strides, Tag.needs_contiguous_strides, Tag.needs_fixed_stride_order, Tag.flexible_layout]
    lib.define("none(Tensor x) -> Tensor")
    assert get_layout_constraint_tag(getattr(torch.ops, ns).none.default) is Tag.needs_exact_strides
    for i, tag in enumerate(tags):
        lib.define(f"f{i}(Tensor x) -> Tensor", tags=tags[i:][::-1])
        assert get_layout_constraint_tag(getattr(getattr(torch.ops, ns), f"f{i}").default) is tag
        ours = registry.custom_op(
            f"{ns}::g{i}", lambda x: x + 1, mutates_args=(), schema="(Tensor x) -> Tensor", tags=tags[i:][::-1]
        )
        assert get_layout_constraint_tag(ours._opoverload) is tag


@pytest.mark.parity(98)
def test_tags_of_builtin_ops(beside: Any) -> None:
    assert {Tag.core, Tag.pointwise, Tag.pt2_compliant_tag} <= set(aten.sin.default.tags)
    assert Tag.nondeterministic_seeded in aten.rand.default.tags
    assert Tag.dynamic_output_shape in aten.nonzero.default.tags
    assert Tag.inplace_view in aten.t_.default.tags
    assert beside._opoverload.tags == [Tag.pt2_compliant_tag]


# The dispatcher -------------------------------------------------------------------------------------------------------


@pytest.mark.parity(98)
def test_overload_resolution(registry: Registry, ns: str) -> None:
    with pytest.raises(RuntimeError, match="failed to match any schema"):
        aten.add(torch.ones(1), "text")
    registry.custom_op(f"{ns}::f", lambda x: x + 1, mutates_args=(), schema="(Tensor x) -> Tensor")
    registry.custom_op(f"{ns}::f.n", lambda x, n: x + n, mutates_args=(), schema="(Tensor x, int n) -> Tensor")
    f = getattr(torch.ops, ns).f
    assert (f(torch.zeros(1)).item(), f(torch.zeros(1), 5).item()) == (1, 5)
    with pytest.raises(RuntimeError, match="failed to match any schema"):
        f("text")


@pytest.mark.compile
@pytest.mark.parity(98)
def test_a_return_with_an_alias_annotation_is_not_functionalized(lib: Library, ns: str) -> None:
    lib.define("f(Tensor(a) x) -> Tensor(a)")
    lib.impl("f", lambda x: x.view_as(x), "CompositeExplicitAutograd")
    f = getattr(torch.ops, ns).f
    phrase = "We only support functionalizing operators whose outputs do not have alias annotations"
    with pytest.raises(RuntimeError, match=phrase):
        torch.compile(lambda x: f(x) * 2, backend="aot_eager", fullgraph=True)(torch.ones(2))


@pytest.mark.parity(98)
def test_who_defined_a_namespace_first(ns: str) -> None:
    first = Library(ns, "DEF")
    line = inspect.currentframe().f_lineno - 1  # type: ignore[union-attr]
    try:
        with pytest.raises(RuntimeError, match=rf"{__file__}:{line}\b"):
            Library(ns, "DEF")
        other = customops.Registry()
        op = other.custom_op(f"{ns}::f", lambda x: x + 1, mutates_args=(), schema="(Tensor x) -> Tensor")
        assert op(torch.zeros(1)).item() == 1  # ours goes in beside it
        other.clear()
    finally:
        first._destroy()


@pytest.mark.parity(98)
def test_what_requires_grad() -> None:
    requires_grad, x, y = torch._C._any_requires_grad, leaf(1.0), torch.ones(1)
    for args, kwargs in [((x,), {}), ((1, [y, x]), {}), ((y,), {"k": x}), ((), {"k": [x]})]:
        assert requires_grad(*args, **kwargs)
    for args, kwargs in [((), {}), ((y, None, "s"), {"k": [y, 1]}), (([[x]],), {})]:  # one level of lists
        assert not requires_grad(*args, **kwargs)
    before = sys.getrefcount(x)
    for _ in range(10):
        requires_grad(x, [x], k=[x])
    assert sys.getrefcount(x) == before


@pytest.mark.parity(98)
def test_what_aliases() -> None:
    alias, x = torch._C._any_output_is_alias_to_input_or_output, torch.ones(3)
    for args, kwargs, outputs in [
        ((x,), {}, (x,)),
        ((x,), {}, (x[1:],)),
        (([[x]],), {}, (x,)),
        ((), {"k": [x]}, ([[x]],)),
        ((), {}, ([x], x[0])),
    ]:
        assert alias(args, kwargs, outputs)
    assert not alias((x,), {"k": x}, (x.clone(), [x + 1]))
    assert not alias((torch.empty(0),), {}, (torch.empty(0), torch.empty(2, 0)))


# C++ ------------------------------------------------------------------------------------------------------------------

CUBE = """
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>
using namespace torch::autograd;
struct Cube : Function<Cube> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x) {
    ctx->save_for_backward({x});
    return x.mul(x).mul(x);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    auto x = ctx->get_saved_variables()[0];
    return {grads[0].mul(3).mul(x).mul(x)};
  }
};
TORCH_LIBRARY_FRAGMENT(NAMESPACE, m) {
  m.def("cube(Tensor x) -> Tensor", [](const at::Tensor& x) { return Cube::apply(x); });
}
"""


@pytest.mark.parity(98)
def test_a_library_that_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Could not load this library"):
        torch.ops.load_library(tmp_path / "none.so")


@pytest.mark.process
@pytest.mark.parity(98)
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_an_autograd_function_in_cpp(tmp_path: Path, registry: Registry, ns: str, beside: Any) -> None:
    source, binary = tmp_path / "cube.cpp", tmp_path / "cube.so"
    source.write_text(CUBE.replace("NAMESPACE", ns))
    home = Path(torch.__file__).parent
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    options = ["-std=c++20", "-O0", "-w", "-shared", "-fPIC", abi, f"-I{home}/include", f"-L{home}/lib"]
    subprocess.run(["g++", *options, source, "-o", binary, "-ltorch_cpu", "-lc10"], check=True)
    torch.ops.load_library(binary)
    cube, x = getattr(torch.ops, ns).cube, leaf(2.0)
    y = cube(beside(x.detach()).requires_grad_())
    assert y.item() == 27
    assert "CppNode" in repr(cube(x))  # its backward is C++
    assert torch.autograd.grad(cube(x), x)[0].item() == 12
    assert set(customops.opcheck(cube, (x,)).values()) == {"SUCCESS"}
    customops.register_autocast(f"{ns}::cube", "cpu", torch.bfloat16)  # its formula stays below our rule
    with torch.autocast("cpu"):
        z = cube(x)
    assert z.dtype is torch.bfloat16
    assert torch.autograd.grad(z, x)[0].item() == 12
    customops.adopt(f"{ns}::cube").unregister()


# A backend in Python --------------------------------------------------------------------------------------------------

#: Tensors of the private-use device whose data is a CPU tensor, with just the kernels that the scripts need, and an op
#: of ours. It runs after a script that set the device up, and left its name in DEVICE.
BACKEND = """
import torch, customops
from torch import Tensor

class OnDevice(Tensor):
    @staticmethod
    def __new__(cls, data):
        made = torch._C._acc.create_empty_tensor(data.shape, data.dtype)
        made.__class__ = cls
        return made

    def __init__(self, data):
        self.on_cpu = data

def kernel(name):
    return torch.library.impl(f"aten::{name}", "privateuseone")

kernel("empty_strided")(lambda size, stride, *, dtype, **_: OnDevice(torch.empty_strided(size, stride, dtype=dtype)))
kernel("add.Tensor")(lambda x, y, alpha=1: OnDevice(x.on_cpu + y.on_cpu))
kernel("sum")(lambda x: OnDevice(x.on_cpu.sum()))
kernel("ones_like")(lambda x, **_: OnDevice(torch.ones_like(x.on_cpu)))
kernel("expand")(lambda x, size: OnDevice(x.on_cpu.expand(size)))
kernel("detach")(lambda x: OnDevice(x.on_cpu))

@kernel("_copy_from")
def _(source, target, non_blocking=False):
    getattr(target, "on_cpu", target).copy_(getattr(source, "on_cpu", source))
    return target

@customops.custom_op("beside::scale", mutates_args=())
def scale(x: Tensor, by: float = 3.0) -> Tensor:
    return x * by

ran = []

@scale.register_kernel(DEVICE)
def _(x, by):
    ran.append(x.device.type)
    return OnDevice(x.on_cpu * by)

def setup_context(ctx, inputs, output):
    ctx.by = inputs[1]

scale.register_autograd(lambda ctx, grad: (scale(grad, ctx.by), None), setup_context=setup_context)

def value_and_gradients(x, y):
    result = (scale(x) + y).sum()
    result.backward()
    return [getattr(each, "on_cpu", each).tolist() for each in (result, x.grad, y.grad)]

def leaves(device):
    values = [1.0, 2.0], [0.5, 0.25]
    return [torch.tensor(each).to(device).requires_grad_() for each in values]
"""


def run(*scripts: str) -> None:
    """Run scripts in a fresh interpreter: a process has one private-use backend, for good."""
    # os._exit skips the shutdown of the interpreter, in which torch may abort while threads of a backward run.
    script = "\n".join([*map(textwrap.dedent, scripts), "import os, sys", "sys.stderr.flush()", "os._exit(0)"])
    done = subprocess.run([PYTHON, "-W", "error", "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.process
@pytest.mark.parity(99)
def test_a_backend_in_python() -> None:
    set_up = """
        import customops
        from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
        DEVICE = "npy"
        _setup_privateuseone_for_python_backend(DEVICE)
    """
    script = """
        assert not torch.ones(1).is_pinned()
        there = leaves("privateuseone")
        assert [(type(x), x.device) for x in there] == [(OnDevice, torch.device("npy", 0))] * 2

        (there[0] + there[1]).sum().backward()  # without an op of ours
        for x in there:
            assert type(x.grad) is OnDevice
            assert x.grad.on_cpu.tolist() == [1.0, 1.0]
            x.grad = None

        found = value_and_gradients(*there)
        assert ran == ["npy", "npy"]  # forward and backward
        assert found == value_and_gradients(*leaves("cpu")) == [9.75, [3.0, 3.0], [1.0, 1.0]]
        assert type(there[0].grad) is OnDevice
        assert ran == ["npy", "npy"]  # not on the CPU
    """
    run(set_up, BACKEND, script)


@pytest.mark.process
@pytest.mark.parity(100)
def test_a_renamed_backend_and_its_module() -> None:
    rename = """
        import customops, torch
        from torch.utils import backend_registration as backend

        def message(error, call, *args):
            try:
                call(*args)
            except error as caught:
                return str(caught)
            raise AssertionError(f"no {error}")

        DEVICE = "maia"
        torch.utils.rename_privateuse1_backend("maia")
        torch.utils.rename_privateuse1_backend("maia")
        assert "has already been set" in message(RuntimeError, torch.utils.rename_privateuse1_backend, "other")
        assert torch._C._get_privateuse1_backend_name() == "maia"

        message(AttributeError, getattr, torch, "maia")
        assert "Tried to use AMP with the" in message(AssertionError, torch.autocast, "maia")

        class Module(backend._DummyBackendModule):
            def get_amp_supported_dtype(self):
                return [torch.float64]

        torch._register_device_module("maia", Module())
        assert type(torch.maia) is Module
        assert torch._utils._get_device_index("maia:1") == 1

        # What tensors of the device need besides.
        torch._C._acc.register_python_privateuseone_hook(backend._DummyPrivateUse1Hook())
        torch._C._acc.register_python_privateuseone_device_guard(backend._DummyDeviceGuard())
    """
    script = """
        there = leaves("maia")
        assert value_and_gradients(*there) == value_and_gradients(*leaves("cpu")) == [9.75, [3.0, 3.0], [1.0, 1.0]]
        assert ran == ["maia", "maia"]

        kernel("_to_copy")(lambda x, *, dtype, **_: OnDevice(x.on_cpu.to(dtype)))
        others = torch.library.Library("_", "IMPL")
        others.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
        scale.register_autocast("maia", torch.float64)
        with torch.autocast("maia", dtype=torch.float64):
            assert scale(there[0].detach()).on_cpu.dtype is torch.float64
        assert scale(there[0].detach()).on_cpu.dtype is torch.float32
    """
    run(rename, BACKEND, script)
