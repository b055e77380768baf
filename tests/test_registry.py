"""Ops are owned, replaced, scoped and removed without leaving anything behind."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.operator_schemas import get_signature_for_torch_op

import customops
from customops import Registry
from customops._dispatch.registrations import Registration
from customops.errors import CallbackError, DefinitionError, RegistrationError, SchemaError, UnregisteredError


def add_one(x: Tensor) -> Tensor:
    return x + 1


def add_two(x: Tensor) -> Tensor:
    return x + 2


def define(registry: Registry, name: str, fn: Callable[..., Any] = add_one, **options: Any) -> Any:
    return registry.custom_op(name, fn, mutates_args=(), **options)


def state(ns: str) -> dict[str, Any]:
    """All that a registration may leave behind."""
    singleton = torch._library.simple_registry.singleton
    return {
        "dispatcher": sorted(name for name in torch._C._dispatch_get_all_op_names() if name.startswith(f"{ns}::")),
        "torch.ops": sorted(n for n in vars(getattr(torch.ops, ns, None) or object) if not n.startswith("_"))
        if ns in vars(torch.ops)
        else None,
        "opdefs": sorted(name for name in torch._library.custom_ops.OPDEFS if name.startswith(f"{ns}::")),
        "libraries": sorted(name for name in torch._library.custom_ops.OPDEF_TO_LIB if name.startswith(f"{ns}::")),
        "fakes": sorted(n for n, e in singleton._data.items() if n.startswith(f"{ns}::") and e.fake_impl.kernels),
    }


# Unregister -----------------------------------------------------------------------------------------------------


def test_unregister_removes_the_op_everywhere(registry: Registry, ns: str) -> None:
    before = state(ns)
    op = define(registry, f"{ns}::f")
    op.register_fake(torch.empty_like)
    op.register_autocast("cpu", torch.bfloat16)
    assert state(ns)["dispatcher"] == [f"{ns}::f"]
    op.unregister()
    after = state(ns)
    assert {**after, "torch.ops": None} == {**before, "torch.ops": None}
    assert not hasattr(getattr(torch.ops, ns), "f")
    assert len(registry) == 0


def test_a_removed_name_can_be_defined_again_with_another_schema(registry: Registry, ns: str) -> None:
    define(registry, f"{ns}::f").unregister()

    def scale(x: Tensor, by: float) -> Tensor:
        return x * by

    op = define(registry, f"{ns}::f", scale)
    assert op(torch.ones(2), 3.0).tolist() == [3.0, 3.0]
    assert getattr(torch.ops, ns).f(torch.ones(2), 3.0).tolist() == [3.0, 3.0]


def test_fx_sees_the_signature_of_the_new_op(registry: Registry, ns: str) -> None:
    old = define(registry, f"{ns}::f")
    assert list(get_signature_for_torch_op(old._opoverload)[0].parameters) == ["x"]
    old.unregister()
    new = define(registry, f"{ns}::f", lambda y, z: y + z, schema="(Tensor y, Tensor z) -> Tensor")
    assert list(get_signature_for_torch_op(new._opoverload)[0].parameters) == ["y", "z"]


@pytest.mark.parametrize(
    "call",
    [
        lambda op, overload, packet: op(torch.ones(1)),
        lambda op, overload, packet: overload(torch.ones(1)),
        lambda op, overload, packet: packet(torch.ones(1)),
        lambda op, overload, packet: overload.redispatch(torch._C.DispatchKeySet("CPU"), torch.ones(1)),
        lambda op, overload, packet: overload.op(torch.ones(1)),
    ],
    ids=["op", "overload", "packet", "redispatch", "inner"],
)
def test_every_handle_to_a_removed_op_raises(registry: Registry, ns: str, call: Callable[..., Any]) -> None:
    op = define(registry, f"{ns}::f")
    overload, packet = op._opoverload, getattr(torch.ops, ns).f
    op.unregister()
    with pytest.raises(UnregisteredError, match=rf"{ns}::f: the op was unregistered"):
        call(op, overload, packet)


def test_registering_on_a_removed_op_raises(registry: Registry, ns: str) -> None:
    op = define(registry, f"{ns}::f")
    op.unregister()
    with pytest.raises(UnregisteredError, match="was unregistered"):
        op.register_fake(torch.empty_like)
    assert state(ns)["dispatcher"] == []


def test_unregister_twice_raises(registry: Registry, ns: str) -> None:
    op = define(registry, f"{ns}::f")
    op.unregister()
    with pytest.raises(UnregisteredError, match="not registered any more"):
        op.unregister()


def test_removing_an_overload_leaves_the_others(registry: Registry, ns: str) -> None:
    define(registry, f"{ns}::f")

    def two(x: Tensor, y: Tensor) -> Tensor:
        return x + y

    overload = define(registry, f"{ns}::f.two", two)
    packet = getattr(torch.ops, ns).f
    assert packet(torch.ones(1), torch.ones(1)).item() == 2
    overload.unregister()
    assert packet.overloads() == ["default"]
    assert packet(torch.ones(1)).item() == 2
    assert getattr(torch.ops, ns).f is packet
    with pytest.raises(RuntimeError):
        packet(torch.ones(1), torch.ones(1))


def test_clear_removes_all_ops_of_a_registry_and_no_other(ns: str) -> None:
    one, other = Registry(), Registry()
    define(one, f"{ns}::a"), define(one, f"{ns}::b"), define(other, f"{ns}::c")
    one.clear()
    assert state(ns)["dispatcher"] == [f"{ns}::c"]
    assert len(one) == 0
    assert [op._qualname for op in other] == [f"{ns}::c"]
    other.clear()


def test_a_registry_is_a_collection(registry: Registry, ns: str) -> None:
    op = define(registry, f"{ns}::f")
    assert list(registry) == [op]
    assert len(registry) == 1
    assert f"{ns}::f" in registry
    assert f"{ns}::g" not in registry
    assert registry[f"{ns}::f"] is op
    with pytest.raises(KeyError):
        registry[f"{ns}::g"]


def test_the_default_registry_serves_custom_op(ns: str) -> None:
    op = customops.custom_op(f"{ns}::f", add_one, mutates_args=())
    assert customops.default_registry[f"{ns}::f"] is op
    op.unregister()
    assert f"{ns}::f" not in customops.default_registry


def test_definitions_leave_no_libraries_behind(registry: Registry, ns: str) -> None:
    def libraries() -> int:
        gc.collect()
        return sum(type(o) is torch.library.Library for o in gc.get_objects())

    for _ in range(3):
        define(registry, f"{ns}::f").unregister()
    before = libraries()
    for i in range(300):
        op = define(registry, f"{ns}::f{i}")
        op.register_fake(torch.empty_like)
        op.register_kernel("cpu", add_two)
        op.unregister()
    del op
    assert libraries() <= before


# Conflicts ------------------------------------------------------------------------------------------------------


def test_replace_is_the_default_and_takes_effect_at_once(registry: Registry, ns: str) -> None:
    old = define(registry, f"{ns}::f")
    old.register_fake(torch.empty_like)
    new = define(registry, f"{ns}::f", add_two)
    assert new is not old
    assert new(torch.ones(1)).item() == 3
    assert getattr(torch.ops, ns).f(torch.ones(1)).item() == 3
    assert list(registry) == [new]
    with pytest.raises(RuntimeError, match="no fake impl"):
        new(torch.ones(1, device="meta"))


def test_the_replaced_object_raises_and_names_its_successor(registry: Registry, ns: str) -> None:
    old = define(registry, f"{ns}::f")
    define(registry, f"{ns}::f", add_two)
    with pytest.raises(UnregisteredError, match=r"was replaced by the definition at .*test_registry\.py:\d+"):
        old(torch.ones(1))


def test_error_names_the_existing_definition_and_changes_nothing(registry: Registry, ns: str) -> None:
    op = define(registry, f"{ns}::f")
    with pytest.raises(DefinitionError, match=r"an op of this name exists.*on_conflict='error'"):
        define(registry, f"{ns}::f", add_two, on_conflict="error")
    assert op(torch.ones(1)).item() == 2
    assert define(registry, f"{ns}::g", on_conflict="error")(torch.ones(1)).item() == 2


def test_reuse_returns_the_existing_op_of_the_same_schema(registry: Registry, ns: str) -> None:
    op = define(registry, f"{ns}::f")
    assert define(registry, f"{ns}::f", add_two, on_conflict="reuse") is op
    assert op(torch.ones(1)).item() == 2


@pytest.mark.parametrize("other", [{"tags": torch.Tag.pointwise}, {"schema": "(Tensor y) -> Tensor"}])
def test_reuse_of_another_schema_or_tags_raises(registry: Registry, ns: str, other: dict[str, Any]) -> None:
    op = define(registry, f"{ns}::f")
    with pytest.raises(DefinitionError, match="needs the same schema and tags"):
        define(registry, f"{ns}::f", add_two, on_conflict="reuse", **other)
    assert op(torch.ones(1)).item() == 2


def test_an_unknown_conflict_policy_is_refused(registry: Registry, ns: str) -> None:
    with pytest.raises(DefinitionError, match="on_conflict has no such value"):
        define(registry, f"{ns}::f", on_conflict="ignore")
    assert state(ns)["dispatcher"] == []


def test_an_op_of_a_plain_library_is_not_replaced(registry: Registry, ns: str) -> None:
    lib = torch.library.Library(ns, "FRAGMENT")
    lib.define("f(Tensor x) -> Tensor")
    lib.impl("f", add_two, "CompositeExplicitAutograd")
    for policy in ("replace", "error", "reuse"):
        with pytest.raises(DefinitionError, match=rf"{ns}::f: an op of this name exists, defined at .*test_registry"):
            define(registry, f"{ns}::f", on_conflict=policy)
    assert getattr(torch.ops, ns).f(torch.ones(1)).item() == 3
    lib._destroy()


def test_ops_of_another_registry_are_replaced_in_it(ns: str) -> None:
    one, other = Registry(), Registry()
    old = define(one, f"{ns}::f")
    new = define(other, f"{ns}::f", add_two)
    assert (list(one), list(other)) == ([], [new])
    with pytest.raises(UnregisteredError):
        old(torch.ones(1))
    other.clear()


# Failures leave everything as it was ------------------------------------------------------------------------------


def bad_hints(x: Any) -> Tensor:
    return x


@pytest.mark.parametrize(
    ("fn", "options", "error"),
    [
        (bad_hints, {}, SchemaError),
        (add_one, {"schema": "(Tensor x -> Tensor"}, SchemaError),
        (add_one, {"schema": "(Tensor(a!) x) -> Tensor"}, SchemaError),
        (add_one, {"schema": "(Tensor x, Tensor y) -> Tensor"}, CallbackError),
        (add_one, {"device_types": "toaster"}, RegistrationError),
        (add_one, {"device_types": []}, DefinitionError),
        (add_one, {"tags": "pointwise"}, DefinitionError),
        (add_one, {"tags": torch.Tag.inplace}, SchemaError),
        (add_one, {"differentiable": (True, False)}, DefinitionError),
        (add_one, {"nondiff_args": "z"}, DefinitionError),
    ],
)
@pytest.mark.parametrize("exists", [False, True])
def test_a_failed_definition_changes_nothing(
    registry: Registry, ns: str, fn: Callable[..., Any], options: dict[str, Any], error: type, exists: bool
) -> None:
    old = define(registry, f"{ns}::f") if exists else None
    overload = old._opoverload if old is not None else None
    before = state(ns)
    with pytest.raises(error):
        define(registry, f"{ns}::f", fn, **options)
    assert state(ns) == before
    assert list(registry) == ([old] if exists else [])
    if old is not None:
        assert old._opoverload is overload
        assert old(torch.ones(1)).item() == 2


def test_torch_refusing_a_definition_leaves_nothing(
    registry: Registry, ns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no")

    before = state(ns)
    with monkeypatch.context() as patch:
        patch.setattr(torch.library.Library, "define", refuse)
        with pytest.raises(DefinitionError, match="torch refuses the definition: no"):
            define(registry, f"{ns}::f")
    assert state(ns) == before
    assert define(registry, f"{ns}::f")(torch.ones(1)).item() == 2


def test_a_failed_replacement_brings_the_old_op_back(
    registry: Registry, ns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = define(registry, f"{ns}::f")
    old.register_fake(torch.empty_like)
    old.register_kernel("cpu", add_two)

    calls = []

    def fail_once(self: Any, *args: Any) -> None:
        calls.append(self)
        if len(calls) == 1:
            raise RuntimeError("halfway")
        install(self, *args)

    install = customops.CustomOpDef._bind
    monkeypatch.setattr(customops.CustomOpDef, "_bind", fail_once)
    with pytest.raises(RuntimeError, match="halfway"):
        define(registry, f"{ns}::f", add_one)
    assert list(registry) == [old]
    assert old(torch.ones(1)).item() == 3
    assert old(torch.ones(1, device="meta")).is_meta


@pytest.mark.parametrize(
    "register",
    [
        lambda op: op.register_kernel("toaster", add_two),
        lambda op: op.register_kernel("cpu", lambda: None),
        lambda op: op.register_kernel("cpu", 3),
        lambda op: op.register_fake(lambda x, y: x),
        lambda op: op.register_autograd(lambda ctx: None),
        lambda op: op.register_autograd(lambda ctx, g: g, setup_context=lambda ctx, input, output: None),
        lambda op: op.register_autocast("cpu", "float16"),
        lambda op: op.register_autocast("toaster", torch.float16),
        lambda op: op.register_samples(lambda x: x),
    ],
)
def test_a_failed_registration_changes_nothing(registry: Registry, ns: str, register: Callable[[Any], Any]) -> None:
    op = define(registry, f"{ns}::f")
    dump = torch._C._dispatch_dump(f"{ns}::f")
    with pytest.raises((ValueError, RuntimeError)):
        register(op)
    assert torch._C._dispatch_dump(f"{ns}::f") == dump
    assert op(torch.ones(1)).item() == 2
    assert op._abstract_fn is None


# Scopes ---------------------------------------------------------------------------------------------------------


def test_a_scope_removes_what_was_defined_inside(registry: Registry, ns: str) -> None:
    outer = define(registry, f"{ns}::outer")
    with registry.scope() as inside:
        assert inside is registry
        define(registry, f"{ns}::inner")
        assert state(ns)["dispatcher"] == [f"{ns}::inner", f"{ns}::outer"]
    assert state(ns)["dispatcher"] == [f"{ns}::outer"]
    assert list(registry) == [outer]


def test_a_scope_ends_on_error_too(registry: Registry, ns: str) -> None:
    def body() -> None:
        with registry.scope():
            define(registry, f"{ns}::f")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        body()
    assert state(ns)["dispatcher"] == []


def test_a_scope_takes_rules_of_older_ops_back(registry: Registry, ns: str) -> None:
    op = define(registry, f"{ns}::f")
    op.register_samples(lambda: [(torch.ones(1),)])
    dump = torch._C._dispatch_dump(f"{ns}::f")
    with registry.scope():
        op.register_kernel(["cpu", "cuda"], add_two)
        op.register_fake(torch.empty_like)
        op.register_autograd(lambda ctx, g: g * 7)
        op.register_autocast("cpu", torch.bfloat16)
        op.register_samples(lambda: [(torch.zeros(1),)])
        assert op(torch.ones(1)).item() == 3
        assert op(torch.ones(1, device="meta")).is_meta
    assert op(torch.ones(1)).item() == 2
    assert torch._C._dispatch_dump(f"{ns}::f") == dump
    with pytest.raises(RuntimeError, match="no fake impl"):
        op(torch.ones(1, device="meta"))
    with pytest.raises(RuntimeError, match="no autograd formula"):
        op(torch.ones(1, requires_grad=True)).backward()
    with torch.autocast("cpu"):
        assert op(torch.ones(1)).dtype == torch.float32
    assert [sample.args[0].item() for sample in op.samples()] == [1.0]


def test_a_scope_restores_the_rules_that_were_there(registry: Registry, ns: str) -> None:
    op = define(registry, f"{ns}::f")
    op.register_kernel("cpu", add_two)
    op.register_autocast("cpu", torch.bfloat16)
    with registry.scope():
        op.register_kernel("cpu", lambda x: x + 3)
        op.register_autocast("cpu", torch.float16)
        assert op(torch.ones(1)).item() == 4
    assert op(torch.ones(1)).item() == 3
    with torch.autocast("cpu"):
        assert op(torch.ones(1)).dtype == torch.bfloat16


def test_a_scope_brings_a_replaced_op_back(registry: Registry, ns: str) -> None:
    op = define(registry, f"{ns}::f")
    op.register_fake(torch.empty_like)
    with registry.scope():
        op.register_kernel("cpu", lambda x: x + 9)
        define(registry, f"{ns}::f", add_two)
        assert getattr(torch.ops, ns).f(torch.ones(1)).item() == 3
    assert list(registry) == [op]
    assert op(torch.ones(1)).item() == 2
    assert getattr(torch.ops, ns).f(torch.ones(1)).item() == 2
    assert op(torch.ones(1, device="meta")).is_meta


def test_rules_of_a_replaced_op_end_with_the_scope_they_were_registered_in(registry: Registry, ns: str) -> None:
    op = define(registry, f"{ns}::f")
    with registry.scope():
        op.register_vmap(lambda info, in_dims, x: (x * 0, in_dims[0]))
        assert torch.vmap(op)(torch.ones(2)).tolist() == [0, 0]
        op.register_autocast("cpu", torch.bfloat16)
        op.register_kernel("cpu", add_two)
        with registry.scope():
            define(registry, f"{ns}::f", lambda x: x + 9, schema="(Tensor x) -> Tensor")
        with torch.autocast("cpu"):
            assert op(torch.ones(1)).dtype == torch.bfloat16
    keys = torch._C._dispatch_dump(f"{ns}::f")
    assert "AutocastCPU" not in keys
    assert op(torch.ones(1)).item() == 2
    with pytest.warns(UserWarning, match="has no vmap rule"):
        assert torch.vmap(op)(torch.ones(2)).tolist() == [2, 2]
    with torch.autocast("cpu"):
        assert op(torch.ones(1)).dtype == torch.float32


def test_what_was_registered_since_outlives_a_scope(registry: Registry, ns: str) -> None:
    op = define(registry, f"{ns}::f")

    def register(times: int) -> None:
        op.register_autograd(lambda ctx, g: g * times)
        op.register_fake(lambda x: x.new_empty(times))
        op.register_autocast("cpu", torch.bfloat16 if times > 1 else torch.float16)

    with registry.scope():
        register(1)
        thread = threading.Thread(target=register, args=(5,))
        thread.start()
        thread.join()
    x = torch.ones(1, requires_grad=True)
    assert torch.autograd.grad(op(x), x)[0].item() == 5
    assert op(torch.ones(1, device="meta")).shape == (5,)
    with torch.autocast("cpu"):
        assert op(torch.ones(1)).dtype == torch.bfloat16


def test_scopes_leave_no_libraries_behind(registry: Registry, ns: str) -> None:
    op = define(registry, f"{ns}::f")
    for _ in range(5):
        with registry.scope():
            op.register_kernel("cpu", add_two)
            op.register_autocast("cpu", torch.bfloat16)
    assert op._definition._added == []
    assert {key for key, kernels in op._definition._kernels.items() if kernels} == {
        "CompositeExplicitAutograd",  # the function of the op
        "Autograd",
        "FuncTorchBatched",
    }


def test_a_replaced_op_comes_back_also_if_its_successor_was_unregistered(registry: Registry, ns: str) -> None:
    op = define(registry, f"{ns}::f")
    with registry.scope():
        define(registry, f"{ns}::f", add_two).unregister()
    assert list(registry) == [op]
    assert op(torch.ones(1)).item() == 2


def test_a_library_gives_only_its_lifetime(registry: Registry, ns: str) -> None:
    """Which key it was made for does not matter, nor what torch has it remember."""
    op = define(registry, f"{ns}::f")
    lib = torch.library.Library(ns, "IMPL", "CUDA")
    op.register_kernel("cpu", add_two, lib=lib)
    op.register_kernel("cuda", add_one, lib=lib)
    assert op(torch.ones(1)).item() == 3
    lib._destroy()
    assert op(torch.ones(1)).item() == 2


def test_a_library_of_another_namespace_is_refused(registry: Registry, ns: str) -> None:
    op = define(registry, f"{ns}::f")
    lib = torch.library.Library(f"{ns}_other", "FRAGMENT")
    lib.define("f(Tensor x) -> Tensor")
    with pytest.raises(RegistrationError, match="of another namespace than the op"):
        op.register_kernel("cpu", add_two, lib=lib)
    lib._destroy()


def test_every_undo_of_a_scope_runs(registry: Registry, ns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op = define(registry, f"{ns}::f")

    def fail() -> None:
        raise RuntimeError("an undo failed")

    def body() -> None:
        with registry.scope():
            op.register_kernel("cpu", add_two)
            registry.record(Registration(fail))

    with pytest.raises(RuntimeError, match="an undo failed"):
        body()
    assert op(torch.ones(1)).item() == 2


def test_a_selector_goes_with_the_kernels_it_selects(registry: Registry, ns: str) -> None:
    lib = torch.library.Library(ns, "FRAGMENT")
    lib.define("f(Device device) -> Tensor")
    with registry.scope():
        registry.adopt(f"{ns}::f").register_kernel("cpu", lambda device: torch.ones(1, device=device))
        assert getattr(torch.ops, ns).f(torch.device("cpu")).item() == 1
        assert "BackendSelect" in torch._C._dispatch_dump(f"{ns}::f")
    assert "BackendSelect" not in torch._C._dispatch_dump(f"{ns}::f")
    lib._destroy()


def test_an_op_unregistered_inside_its_scope_stays_removed(registry: Registry, ns: str) -> None:
    with registry.scope():
        define(registry, f"{ns}::f").unregister()
    assert state(ns)["dispatcher"] == []


def test_scopes_nest(registry: Registry, ns: str) -> None:
    op = define(registry, f"{ns}::f")
    with registry.scope():
        op.register_kernel("cpu", add_two)
        with registry.scope():
            op.register_kernel("cpu", lambda x: x + 3)
            assert op(torch.ones(1)).item() == 4
        assert op(torch.ones(1)).item() == 3
    assert op(torch.ones(1)).item() == 2


def test_a_scope_covers_rules_on_ops_of_others(registry: Registry, ns: str) -> None:
    lib = torch.library.Library(ns, "FRAGMENT")
    lib.define("f(Tensor x) -> Tensor")
    lib.impl("f", add_one, "CPU")
    f = getattr(torch.ops, ns).f
    with registry.scope():
        registry.adopt(f"{ns}::f").register_fake(torch.empty_like)
        assert f(torch.ones(1, device="meta")).is_meta
    with pytest.raises(NotImplementedError):
        f(torch.ones(1, device="meta"))
    lib._destroy()


def test_a_scope_is_of_its_own_thread(registry: Registry, ns: str) -> None:
    with registry.scope():
        thread = threading.Thread(target=define, args=(registry, f"{ns}::f"))
        thread.start()
        thread.join()
    assert state(ns)["dispatcher"] == [f"{ns}::f"]


# Adopting -------------------------------------------------------------------------------------------------------


def test_adopt_finds_our_own_op_by_every_name_for_it(registry: Registry, ns: str) -> None:
    op = define(registry, f"{ns}::f")
    packet = getattr(torch.ops, ns).f
    for handle in (op, f"{ns}::f", op._opoverload, packet, f"{ns}::f.default"):
        assert registry.adopt(handle) is op
        assert customops.adopt(handle) is op


def test_adopt_gives_one_object_for_an_op_of_others(registry: Registry) -> None:
    adopted = registry.adopt("aten::sin")
    assert registry.adopt(torch.ops.aten.sin.default) is adopted
    assert repr(adopted) == "<CustomOpDef(aten::sin)>"
    assert str(adopted.schema) == "(Tensor self) -> Tensor"
    x = torch.rand(3)
    assert torch.equal(adopted(x), torch.sin(x))


def test_adopt_takes_an_overload_name(registry: Registry) -> None:
    assert registry.adopt("aten::add.Tensor")._opoverload is torch.ops.aten.add.Tensor


def test_adopt_sees_that_an_op_was_defined_anew(registry: Registry, ns: str) -> None:
    lib = torch.library.Library(ns, "FRAGMENT")
    lib.define("f(Tensor x) -> Tensor")
    first = registry.adopt(f"{ns}::f")
    lib._destroy()
    lib = torch.library.Library(ns, "FRAGMENT")
    lib.define("f(Tensor x, int y) -> Tensor")
    second = registry.adopt(f"{ns}::f")
    assert second is not first
    assert [argument.name for argument in second.schema.arguments] == ["x", "y"]
    lib._destroy()


@pytest.mark.parametrize("gone", [True, False])
def test_rules_for_an_op_of_others_end_when_custom_op_takes_its_name(registry: Registry, ns: str, gone: bool) -> None:
    schema = "(Tensor x) -> Tensor"
    torch.library.custom_op(f"{ns}::f", lambda x: x + 1, mutates_args=(), schema=schema)
    adopted = registry.adopt(f"{ns}::f")
    adopted.register_kernel("cpu", lambda x: x + 2)
    assert adopted(torch.zeros(1)).item() == 2
    if gone:
        torch._library.custom_ops.OPDEF_TO_LIB[f"{ns}::f"]._destroy()
    op = registry.custom_op(f"{ns}::f", lambda x: x + 3, mutates_args=(), schema=schema)
    assert [op(torch.zeros(1)).item() for _ in range(2)] == [3, 3]
    gc.collect()  # torch takes down the names of a library once more when it is collected
    assert registry.adopt(f"{ns}::f") is op
    with pytest.raises(UnregisteredError):
        adopted.register_kernel("cpu", lambda x: x)


def test_rules_for_an_op_of_others_end_when_its_successor_is_adopted(registry: Registry, ns: str) -> None:
    objects = []  # kept: without them, the rules ended some time, with the garbage collector
    for value in (1, 2):
        lib = torch.library.Library(ns, "FRAGMENT")
        lib.define("f(Tensor x) -> Tensor")
        objects.append(registry.adopt(f"{ns}::f"))
        with pytest.raises(NotImplementedError):
            getattr(torch.ops, ns).f(torch.zeros(1))
        objects[-1].register_kernel("cpu", lambda x, value=value: x + value)
        assert getattr(torch.ops, ns).f(torch.zeros(1)).item() == value
        lib._destroy()


@pytest.mark.parametrize(
    ("op", "error", "match"),
    [
        ("nowhere::nothing", RegistrationError, "there is no such operator"),
        ("aten::sin.nothing", RegistrationError, "there is no such operator"),
        ("sin", DefinitionError, "needs a namespace"),
        (torch.ops.aten.add, RegistrationError, "has several overloads"),
        (torch.sin, DefinitionError, "expected an operator"),
        (None, DefinitionError, "expected an operator"),
    ],
)
def test_adopt_refuses_what_is_no_op(registry: Registry, op: Any, error: type, match: str) -> None:
    with pytest.raises(error, match=match):
        registry.adopt(op)


def test_looking_for_an_op_leaves_no_namespace(registry: Registry) -> None:
    with pytest.raises(RegistrationError):
        registry.adopt("nowhere::nothing")
    assert "nowhere" not in vars(torch.ops)


def test_unregistering_an_adopted_op_ends_its_rules_only(registry: Registry, ns: str) -> None:
    lib = torch.library.Library(ns, "FRAGMENT")
    lib.define("f(Tensor x) -> Tensor")
    adopted = registry.adopt(f"{ns}::f")
    adopted.register_kernel("cpu", add_one)
    f = getattr(torch.ops, ns).f
    assert f(torch.ones(1)).item() == 2
    adopted.unregister()
    with pytest.raises(NotImplementedError):
        f(torch.ones(1))
    assert state(ns)["dispatcher"] == [f"{ns}::f"]
    lib._destroy()


def test_a_destroyed_library_is_refused(registry: Registry, ns: str) -> None:
    op = define(registry, f"{ns}::f")
    lib = torch.library.Library(ns, "FRAGMENT")
    lib._destroy()
    with pytest.raises(RegistrationError, match="has been destroyed"):
        op.register_kernel("cpu", add_two, lib=lib)


# Names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("f", "needs a namespace"),
        ("", "needs a namespace"),
        ("::f", "'' is no valid part"),
        ("ns::", "'' is no valid part"),
        ("ns::f.", "'' is no valid part"),
        ("ns::f.a.b", "'a.b' is no valid part"),
        ("ns::f::g", "'f::g' is no valid part"),
        ("my ns::f", "'my ns' is no valid part"),
        ("ns::1f", "'1f' is no valid part"),
        ("ns::f-g", "'f-g' is no valid part"),
        ("ns::f\n", "is no valid part"),
        ("ns::é", "is no valid part"),
        ("ns::f.default", 'overload name "default" is taken'),
        ("aten::f", "'aten' is a reserved namespace"),
        ("prim::f", "'prim' is a reserved namespace"),
        ("torch::f", "'torch' is a reserved namespace"),
        (3, "must be a string"),
        (add_one, "must be a string"),
    ],
)
def test_bad_names(registry: Registry, name: Any, match: str) -> None:
    before = sorted(vars(torch.ops))
    with pytest.raises(DefinitionError, match=match):
        define(registry, name)
    assert sorted(vars(torch.ops)) == before


def test_a_decorator_that_cannot_work_fails_at_its_own_line(registry: Registry, ns: str) -> None:
    with pytest.raises(DefinitionError, match="must be a string"):
        registry.custom_op(add_one, mutates_args=())  # type: ignore[call-overload]
    with pytest.raises(SchemaError, match="mutates_args must be an iterable of names"):
        registry.custom_op(f"{ns}::f", mutates_args=None)  # type: ignore[call-overload]
    op = define(registry, f"{ns}::f")
    with pytest.raises(DefinitionError, match="a device type must be a string"):
        op.register_kernel(add_one)


def test_custom_op_decorates_functions_only(registry: Registry, ns: str) -> None:
    with pytest.raises(DefinitionError, match="decorates a function"):
        registry.custom_op(f"{ns}::f", mutates_args=())(3)  # type: ignore[arg-type]


# Threads --------------------------------------------------------------------------------------------------------


def run_threads(*targets: Callable[[], None]) -> None:
    """Run all at once; the first error is raised here."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(len(targets))

    def run(target: Callable[[], None]) -> None:
        try:
            barrier.wait()
            target()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(target,)) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_ops_can_be_defined_from_several_threads(registry: Registry, ns: str) -> None:
    def work(k: int) -> None:
        for i in range(20):
            op = define(registry, f"{ns}::f{k}_{i}")
            op.register_fake(torch.empty_like)
            assert op(torch.ones(1)).item() == 2

    run_threads(*(lambda k=k: work(k) for k in range(4)))
    assert len(registry) == 80


def test_one_name_defined_from_several_threads_ends_as_one_op(registry: Registry, ns: str) -> None:
    run_threads(*(lambda: define(registry, f"{ns}::f") for _ in range(8)))
    (op,) = registry
    assert op(torch.ones(1)).item() == 2
    assert state(ns)["dispatcher"] == [f"{ns}::f"]


def test_reuse_from_several_threads_gives_one_object(registry: Registry, ns: str) -> None:
    found: list[Any] = []
    run_threads(*(lambda: found.append(define(registry, f"{ns}::f", on_conflict="reuse")) for _ in range(8)))
    assert len({id(op) for op in found}) == 1


def test_registering_while_calling(registry: Registry, ns: str) -> None:
    op = define(registry, f"{ns}::f")
    seen: set[float] = set()

    def call() -> None:
        for _ in range(500):
            seen.add(op(torch.ones(1)).item())

    def register() -> None:
        for i in range(100):
            op.register_kernel("cpu", add_two if i % 2 else add_one)

    run_threads(call, call, register)
    assert seen <= {2.0, 3.0}
    assert op(torch.ones(1)).item() == 3


def test_copies_of_an_op_are_the_op(registry: Registry, ns: str) -> None:
    op = define(registry, f"{ns}::f")
    assert copy.copy(op) is op
    assert copy.deepcopy({"op": op})["op"] is op
