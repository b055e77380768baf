"""`define` and `impl`: an op from its schema, kernels as they are."""

from __future__ import annotations

import gc
import inspect
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import fallthrough_kernel

import customops
from customops import Library, Registry, define, impl
from customops.errors import CallbackError, DefinitionError, RegistrationError, SchemaError, UnregisteredError
from customops.testing import assert_raises_regex

POINTWISE, CORE = torch.Tag.pointwise, torch.Tag.nondeterministic_seeded


def op_named(ns: str, name: str = "f") -> Any:
    return getattr(getattr(torch.ops, ns), name)


# define ---------------------------------------------------------------------------------------------------------


@pytest.mark.parity(63)
def test_define_and_impl(registry: Registry, ns: str) -> None:
    registry.define(f"{ns}::f", "(Tensor x, float by=2.0) -> Tensor")
    registry.impl(f"{ns}::f", "default", lambda x, by=2.0: x * by)
    f = op_named(ns)
    assert str(f.default._schema) == f"{ns}::f(Tensor x, float by=2.) -> Tensor"
    assert f.default._defined_in_python
    assert not torch.ops.aten.sin.default._defined_in_python
    assert f(torch.ones(2)).tolist() == [2.0, 2.0]
    assert f(torch.ones(2), by=3.0).tolist() == [3.0, 3.0]


@pytest.mark.parity(63)
@pytest.mark.parametrize(
    ("tags", "expected"),
    [(POINTWISE, [POINTWISE]), ([POINTWISE, CORE], [POINTWISE, CORE]), ((CORE,), [CORE]), ((), [])],
)
@pytest.mark.parametrize("with_lib", [False, True])
def test_tags(registry: Registry, ns: str, tags: Any, expected: Any, with_lib: bool) -> None:
    lib = Library(ns, "FRAGMENT") if with_lib else None
    registry.define(f"{ns}::f", "(Tensor x) -> Tensor", lib=lib, tags=tags)
    assert op_named(ns).default.tags == expected


@pytest.mark.parity(63)
def test_overloads(registry: Registry, ns: str) -> None:
    registry.define(f"{ns}::f", "(Tensor x) -> Tensor")
    registry.define(f"{ns}::f.two", "(Tensor x, Tensor y) -> Tensor")
    registry.impl(f"{ns}::f", "cpu", torch.sin)
    registry.impl(f"{ns}::f.two", "cpu", torch.add)
    f, x = op_named(ns), torch.rand(3)
    assert sorted(f.overloads()) == ["default", "two"]
    torch.testing.assert_close(f(x), x.sin())
    torch.testing.assert_close(f(x, x), 2 * x)
    assert f.two._defined_in_python


@pytest.mark.parity(63)
def test_namespace_of_the_name_does_not_count_with_lib(registry: Registry, ns: str) -> None:
    lib = Library(ns, "FRAGMENT")
    registry.define("{self.ns}::f", "(Tensor x) -> Tensor", lib=lib)
    registry.impl(f"{ns}::f", "default", torch.cos, lib=lib)
    torch.testing.assert_close(op_named(ns)(torch.ones(1)), torch.ones(1).cos())


@pytest.mark.parity(63)
@pytest.mark.parametrize("with_lib", [False, True])
def test_wrong_names_and_schemas(registry: Registry, ns: str, with_lib: bool) -> None:
    lib = Library(ns, "FRAGMENT") if with_lib else None
    with assert_raises_regex(ValueError, "namespace"):
        registry.define("f", "(Tensor x) -> Tensor", lib=lib)
    with assert_raises_regex(SchemaError, "expected schema to look like"):
        registry.define(f"{ns}::f", "f(Tensor x) -> Tensor", lib=lib)
    with assert_raises_regex(RuntimeError, f"{ns}::f: torch refuses the definition"):  # a DefinitionError
        registry.define(f"{ns}::f", "(Tensr x) -> Tensor", lib=lib)
    with assert_raises_regex(DefinitionError, "tags must be torch.Tag members"):
        registry.define(f"{ns}::f", "(Tensor x) -> Tensor", lib=lib, tags="pointwise")  # type: ignore[arg-type]
    assert not hasattr(getattr(torch.ops, ns), "f")
    assert len(registry) == 0


def test_twice(registry: Registry, ns: str) -> None:
    registry.define(f"{ns}::f", "(Tensor x) -> Tensor")
    registry.impl(f"{ns}::f", "default", torch.sin)
    with pytest.raises(DefinitionError, match="multiple times"):
        registry.define(f"{ns}::f", "(Tensor x, Tensor y) -> Tensor")
    assert op_named(ns)(torch.zeros(1)).item() == 0.0


@pytest.mark.parametrize("with_lib", [False, True])
def test_the_second_definition_is_told_where_the_first_is(registry: Registry, ns: str, with_lib: bool) -> None:
    registry.define(f"{ns}::f", "(Tensor x) -> Tensor")
    line = inspect.currentframe().f_lineno - 1  # type: ignore[union-attr]
    lib = Library(ns, "FRAGMENT") if with_lib else None
    with pytest.raises(RuntimeError, match=rf"{__file__}:{line}\b"):  # RuntimeError: code that tries asks for that
        registry.define(f"{ns}::f", "(Tensor x) -> Tensor", lib=lib)
    with pytest.raises(RuntimeError, match=rf"{__file__}:{line}\b"):
        registry.custom_op(f"{ns}::f", torch.sin, mutates_args=(), schema="(Tensor x) -> Tensor")


@pytest.mark.compile
def test_all_rules_attach(registry: Registry, ns: str) -> None:
    registry.define(f"{ns}::f", "(Tensor x) -> Tensor")
    op = registry.adopt(f"{ns}::f")
    assert op is registry[f"{ns}::f"]
    op.register_kernel("cpu", lambda x: x.sin())
    op.register_fake(torch.empty_like)
    op.register_autograd(
        lambda ctx, grad: grad * ctx.saved_tensors[0].cos(),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    op.register_vmap("broadcast_all")
    x = torch.rand(3, 2, requires_grad=True)
    f = op_named(ns).default
    torch.testing.assert_close(f(x), x.sin())
    torch.testing.assert_close(torch.vmap(f)(x), x.sin())
    for call in (f, torch.compile(f, fullgraph=True, backend="aot_eager"), torch.compile(f, fullgraph=True)):
        (grad,) = torch.autograd.grad(call(x).sum(), x)
        torch.testing.assert_close(grad, x.cos())
    assert set(customops.opcheck(f, (x,)).values()) == {"SUCCESS"}


def test_op_and_kernels_go(registry: Registry, ns: str) -> None:
    registry.define(f"{ns}::f", "(Tensor x) -> Tensor")
    registry.impl(f"{ns}::f", "cpu", torch.sin)
    handle = op_named(ns).default
    registry[f"{ns}::f"].unregister()
    with pytest.raises(UnregisteredError):
        handle(torch.ones(1))
    registry.define(f"{ns}::f", "(Tensor x, Tensor y) -> Tensor")
    with pytest.raises(NotImplementedError):
        op_named(ns)(torch.ones(1), torch.ones(1))
    registry.clear()
    assert not hasattr(getattr(torch.ops, ns), "f")


def test_scope_takes_back(registry: Registry, ns: str) -> None:
    registry.define(f"{ns}::g", "(Tensor x) -> Tensor")
    registry.impl(f"{ns}::g", "cpu", torch.sin)
    x = torch.ones(1)
    with registry.scope():
        registry.define(f"{ns}::f", "(Tensor x) -> Tensor")
        registry.impl(f"{ns}::g", "cpu", torch.cos)
        registry.impl(f"{ns}::later", "cpu", torch.cos)
        assert op_named(ns, "g")(x) == x.cos()
    assert op_named(ns, "g")(x) == x.sin()
    assert not hasattr(getattr(torch.ops, ns), "f")
    registry.define(f"{ns}::later", "(Tensor x) -> Tensor")
    with pytest.raises(NotImplementedError):
        op_named(ns, "later")(x)


def test_custom_op_does_not_replace_it(registry: Registry, ns: str) -> None:
    registry.define(f"{ns}::f", "(Tensor x) -> Tensor")

    def f(x: Tensor) -> Tensor:
        return x.clone()

    with pytest.raises(DefinitionError, match="not made by custom_op"):
        registry.custom_op(f"{ns}::f", f, mutates_args=())


def test_op_ends_with_its_library(ns: str) -> None:
    lib = Library(ns, "FRAGMENT")
    define(f"{ns}::f", "(Tensor x) -> Tensor", lib=lib)
    impl(f"{ns}::f", "cpu", torch.sin, lib=lib)
    assert op_named(ns)(torch.zeros(1)).item() == 0.0
    lib._destroy()
    assert not hasattr(getattr(torch.ops, ns), "f")


# impl -----------------------------------------------------------------------------------------------------------


@pytest.mark.parity(64)
@pytest.mark.parametrize("types", ["CPU", "cpu", "default", ["cpu", "cuda"], ("CPU", "cpu")])
@pytest.mark.parametrize("with_lib", [False, True])
def test_types(registry: Registry, ns: str, types: Any, with_lib: bool) -> None:
    lib = Library(ns, "FRAGMENT")
    lib.define("f(Tensor x) -> Tensor")
    registry.impl(f"{ns}::f", types, torch.sin, lib=lib if with_lib else None)
    torch.testing.assert_close(op_named(ns)(torch.ones(1)), torch.ones(1).sin())


def test_types_may_be_any_iterable(registry: Registry, ns: str) -> None:
    registry.define(f"{ns}::f", "(Tensor x) -> Tensor")
    registry.impl(f"{ns}::f", iter(["cpu", "cuda"]))(torch.sin)  # read when it is given, not when it decorates
    assert op_named(ns)(torch.zeros(1)).item() == 0.0
    registry.impl(f"{ns}::f", {"cpu", "cuda"}, torch.cos)
    assert op_named(ns)(torch.zeros(1)).item() == 1.0


@pytest.mark.parametrize("defined", [True, False])
def test_library_of_another_namespace(registry: Registry, ns: str, defined: bool) -> None:
    if defined:
        registry.define(f"{ns}::f", "(Tensor x) -> Tensor")
    with torch.library._scoped_library(f"{ns}_other", "FRAGMENT") as other:
        with pytest.raises(RuntimeError, match="namespace"):
            registry.impl(f"{ns}::f", "cpu", torch.sin, lib=other)
        other.define("f(Tensor x) -> Tensor")
        with pytest.raises(NotImplementedError):  # the kernel did not go there instead
            op_named(f"{ns}_other")(torch.zeros(1))


@pytest.mark.parity(64)
def test_default_serves_every_device(registry: Registry, ns: str) -> None:
    registry.define(f"{ns}::f", "(Tensor x) -> Tensor")
    registry.impl(f"{ns}::f", "default", lambda x: x + 1)
    registry.impl(f"{ns}::f", "cpu", lambda x: x + 2)
    assert op_named(ns)(torch.zeros(1)).item() == 2.0
    assert op_named(ns)(torch.zeros(3, device="meta")).shape == (3,)


@pytest.mark.parity(64)
def test_decorator_keeps_the_function(registry: Registry, ns: str) -> None:
    registry.define(f"{ns}::f", "(Tensor x) -> Tensor")

    @registry.impl(f"{ns}::f", "cpu")  # type: ignore[untyped-decorator]
    def f(x: Tensor) -> Tensor:
        return x + 1

    assert f(1) == 2  # torch's returns None
    assert op_named(ns)(torch.zeros(1)).item() == 1.0


@pytest.mark.parity(64)
@pytest.mark.parametrize(
    ("types", "message"),
    [
        ("gpu", "Expected one of cpu, cuda"),
        (["cpu", "gpu"], "Expected one of cpu, cuda"),
        ([], "no dispatch key"),
        ([None], "must be a string"),
        (None, "must be a string"),
        (torch.device("cpu"), "must be a string"),
    ],
)
def test_unknown_types(registry: Registry, ns: str, types: Any, message: str) -> None:
    registry.define(f"{ns}::f", "(Tensor x) -> Tensor")
    with pytest.raises((RegistrationError, DefinitionError), match=message) as caught:
        registry.impl(f"{ns}::f", types, torch.sin)
    assert f"{ns}::f" in str(caught.value)
    with pytest.raises(NotImplementedError):  # not even at "cpu"
        op_named(ns)(torch.ones(1))


def test_all_keys_or_none(registry: Registry, ns: str) -> None:
    """What torch refuses at the second key is not left at the first."""
    registry.define(f"{ns}::f", "(Tensor x) -> Tensor")
    with pytest.raises(TypeError):
        registry.impl(f"{ns}::f", ["cpu", "Meta"], 3)  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError):
        op_named(ns)(torch.ones(1))


def test_kernel_before_its_op(registry: Registry, ns: str) -> None:
    registry.impl(f"{ns}::f", "cpu", torch.sin)
    registry.define(f"{ns}::f", "(Tensor x) -> Tensor")
    assert op_named(ns)(torch.ones(1)) == torch.ones(1).sin()
    registry.clear()
    registry.define(f"{ns}::f", "(Tensor x) -> Tensor")
    with pytest.raises(NotImplementedError):
        op_named(ns)(torch.ones(1))


@pytest.mark.parity(65)
def test_objects_in_lists(registry: Registry, ns: str) -> None:
    seen: list[Any] = []
    registry.define(f"{ns}::f", "(ScalarType[] a, Layout[] b, MemoryFormat[] c) -> ()")
    registry.impl(f"{ns}::f", "default", lambda *args: seen.extend(args))
    args = [torch.float16, torch.int], [torch.strided, torch.sparse_coo], [torch.channels_last]
    op_named(ns)(*args)
    assert seen == list(args)


def test_fallthrough(registry: Registry, ns: str) -> None:
    registry.define(f"{ns}::f", "(Tensor x) -> Tensor")
    registry.impl(f"{ns}::f", "cpu", torch.sin)
    registry.impl(f"{ns}::f", "Autograd", fallthrough_kernel)
    x = torch.ones(1, requires_grad=True)
    torch.testing.assert_close(op_named(ns)(x.detach()), x.detach().sin())


@pytest.mark.parity(66)
def test_overrides(registry: Registry, ns: str) -> None:
    """By default the newest counts; where the Library is told not to override, torch refuses."""
    lib = Library(ns, "FRAGMENT")
    lib.define("f(Tensor x) -> Tensor")
    lib.impl("f", torch.sin, "CPU")
    registry.impl(f"{ns}::f", "CPU", torch.cos)
    x = torch.ones(1)
    assert op_named(ns)(x) == x.cos()
    with pytest.raises(RuntimeError, match="already a kernel registered"):
        lib.impl("f", torch.tan, "CPU", allow_override=False)
    lib.impl(f"{ns}::f", torch.tan, "CPU", allow_override=True)  # the full name is accepted, too
    assert op_named(ns)(x) == x.tan()


@pytest.mark.parametrize("on_conflict", ["replace", "error", "skip"])
@pytest.mark.parametrize("defined", [True, False])
def test_what_is_no_function(registry: Registry, ns: str, on_conflict: Any, defined: bool) -> None:
    if defined:
        registry.define(f"{ns}::f", "(Tensor x) -> Tensor")
        registry.impl(f"{ns}::f", "CUDA", torch.sin)
    with pytest.raises(CallbackError, match=f"{ns}::f: the kernel must be callable"):
        registry.impl(f"{ns}::f", ("CPU", "CUDA"), 3, on_conflict=on_conflict)  # type: ignore[arg-type]
    if defined:
        with pytest.raises(NotImplementedError):
            op_named(ns)(torch.ones(1))


def test_kernels_on_conflict(registry: Registry, ns: str) -> None:
    registry.define(f"{ns}::f", "(Tensor x) -> Tensor")
    registry.impl(f"{ns}::f", "CPU", torch.sin, on_conflict="error")
    x = torch.ones(1)
    with pytest.raises(RegistrationError, match="there is a kernel at CPU already") as caught:
        registry.impl(f"{ns}::f", ("CPU", "Meta"), torch.cos, on_conflict="error")
    assert __file__ in str(caught.value.where)
    for on_conflict in ("error", "reuse"):
        with pytest.raises(DefinitionError) as conflict:
            registry.define(f"{ns}::f", "(Tensor y) -> Tensor", on_conflict=on_conflict)  # type: ignore[arg-type]
        assert __file__ in str(conflict.value.where)
    with pytest.raises(NotImplementedError):
        op_named(ns)(x.to("meta"))  # at all of the keys, or at none
    registry.impl(f"{ns}::f", ("CPU", "Meta"), torch.cos, on_conflict="skip")
    assert op_named(ns)(x) == x.sin()
    assert op_named(ns)(x.to("meta")).shape == (1,)


def test_replaced_with_a_library_inside_a_scope(registry: Registry, ns: str) -> None:
    """Refused: the library may hold the name longer than the scope lasts."""
    op = registry.custom_op(f"{ns}::f", torch.sin, schema="(Tensor x) -> Tensor")
    lib, x = Library(ns, "FRAGMENT"), torch.ones(1)
    with registry.scope():
        with pytest.raises(DefinitionError, match="with lib= the op may outlive the scope"):
            registry.define(f"{ns}::f", "(Tensor x) -> Tensor", lib=lib, on_conflict="replace")
        assert op(x) == x.sin()
        registry.define(f"{ns}::f", "(Tensor x) -> Tensor", on_conflict="replace")
        registry.impl(f"{ns}::f", "CPU", torch.cos)
        assert op_named(ns)(x) == x.cos()
    assert op(x) == x.sin() == op_named(ns)(x)


def test_on_an_op_of_ours(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::f", mutates_args=())
    def f(x: Tensor) -> Tensor:
        return x + 1

    with registry.scope():
        registry.impl(f"{ns}::f", "CPU", lambda x: x + 2)
        assert f(torch.zeros(1)).item() == 2.0
    assert f(torch.zeros(1)).item() == 1.0


def test_under_modes(registry: Registry, ns: str) -> None:
    registry.define(f"{ns}::f", "(Tensor x) -> Tensor")
    registry.impl(f"{ns}::f", "CompositeImplicitAutograd", lambda x: x.sin().cos())
    x = torch.rand(3, requires_grad=True)
    f = op_named(ns)
    (grad,) = torch.autograd.grad(f(x).sum(), x)
    torch.testing.assert_close(grad, -x.sin().sin() * x.cos())
    torch.testing.assert_close(torch.func.jvp(f, (x.detach(),), (torch.ones(3),))[1], grad)
    with torch._subclasses.FakeTensorMode() as mode:
        assert f(mode.from_tensor(torch.rand(3))).shape == (3,)
    with torch.inference_mode():
        torch.testing.assert_close(f(x.detach()), x.detach().sin().cos())


def test_from_threads(registry: Registry, ns: str) -> None:
    def work(i: int) -> None:
        registry.define(f"{ns}::f{i}", "(Tensor x) -> Tensor")
        registry.impl(f"{ns}::f{i}", "cpu", lambda x: x + i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [op_named(ns, f"f{i}")(torch.zeros(1)).item() for i in range(16)] == list(range(16))


# The older forms ------------------------------------------------------------------------------------------------


@pytest.mark.parity(63)
def test_define_with_a_library_in_front(ns: str) -> None:
    lib = Library(ns, "FRAGMENT")

    @define(lib, "f(Tensor x) -> Tensor")
    def f(x: Tensor) -> Tensor:
        return x + 1

    assert f(1) == 2  # type: ignore[arg-type, comparison-overlap]
    assert op_named(ns)(torch.zeros(1)).item() == 1.0
    lib._destroy()


@pytest.mark.parity(64)
def test_impl_with_a_library_in_front(ns: str) -> None:
    lib = Library(ns, "FRAGMENT")
    lib.define("f(Tensor x) -> Tensor")

    @impl(lib, "f", "CPU")
    def f(x: Tensor) -> Tensor:
        return x + 1

    assert f(1) == 2  # type: ignore[arg-type, comparison-overlap]
    assert op_named(ns)(torch.zeros(1)).item() == 1.0
    lib._destroy()


@pytest.mark.slow
def test_nothing_is_kept(registry: Registry, ns: str) -> None:
    """A kernel is freed with its op."""

    def f(x: Tensor) -> Tensor:
        return x + 1

    registry.define(f"{ns}::f", "(Tensor x) -> Tensor")
    registry.impl(f"{ns}::f", "cpu", f)
    gone = weakref.ref(f)
    del f
    registry.clear()
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("inside", ["before", "inside"])
def test_kernels_come_back_with_a_replaced_op(registry: Registry, ns: str, inside: str) -> None:
    def f(x: Tensor) -> Tensor:
        return x + 1

    def g(x: Tensor) -> Tensor:
        return x + 2

    op = registry.custom_op(f"{ns}::f", f, mutates_args=())
    if inside == "before":
        registry.impl(f"{ns}::f", "cpu", lambda x: x + 5)
    with registry.scope():
        if inside == "inside":
            registry.impl(f"{ns}::f", "cpu", lambda x: x + 5)
        registry.custom_op(f"{ns}::f", g, mutates_args=())
        assert op_named(ns)(torch.zeros(1)).item() == 2
    assert op(torch.zeros(1)).item() == (6 - 1 if inside == "before" else 1)
