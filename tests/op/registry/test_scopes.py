"""Scopes: what was registered inside is gone after."""

from __future__ import annotations

import contextvars
import functools
import threading

import pytest
import torch
from helpers.functions import add_one
from helpers.modes import DispatchLog
from helpers.registries import add_two, define, state
from torch import Tensor
from torch.library import Library

from customops import Registry
from customops._dispatch.registrations import Registration
from customops._dispatch.scopes import record_in_scope
from customops.errors import RegistrationError

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
            record_in_scope(registry, Registration(fail))

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


@pytest.mark.parametrize("before", [True, False])
def test_scopes_that_overlap(registry: Registry, ns: str, before: bool) -> None:
    """The first to begin is the first to end: its op does not come back when the other ends."""
    x, name = torch.zeros(1), f"{ns}::f"
    define_by = functools.partial(registry.custom_op, name, schema="(Tensor x) -> Tensor")
    outer = define_by(functools.partial(add, 1)) if before else None
    contexts = [contextvars.copy_context() for _ in range(2)]  # as two threads have
    scopes = [registry.scope() for _ in contexts]
    for by, context, scope in zip((10, 100), contexts, scopes, strict=True):
        context.run(scope.__enter__)
        context.run(define_by, functools.partial(add, by))
    contexts[0].run(scopes[0].__exit__, None, None, None)
    assert getattr(torch.ops, ns).f(x).item() == 100
    contexts[1].run(scopes[1].__exit__, None, None, None)
    assert list(registry) == ([outer] if outer else [])
    if outer:
        assert getattr(torch.ops, ns).f(x).item() == outer(x).item() == 1
    else:
        assert not torch._C._jit_get_schemas_for_operator(name)


def add(by: float, x: Tensor) -> Tensor:
    return x + by


def test_an_op_whose_library_ended_does_not_come_back(registry: Registry, ns: str) -> None:
    define(registry, f"{ns}::f")
    lib = Library(ns, "FRAGMENT")
    registry.custom_op(f"{ns}::f", functools.partial(add, 5), schema="(Tensor x) -> Tensor", lib=lib)
    with registry.scope():
        define(registry, f"{ns}::f")
        lib._destroy()
    assert f"{ns}::f" not in registry


def test_under_a_mode_the_kernel_from_before_a_scope_runs(registry: Registry, ns: str) -> None:
    """torch has a table of Python kernels for calls under a mode, which the end of a library does not change."""
    op = registry.custom_op(f"{ns}::f", lambda x: x + 1, mutates_args=(), schema="(Tensor x) -> Tensor")
    with registry.scope():
        registry.impl(op._qualname, "Autograd", lambda x: x + 2)
        with DispatchLog():
            assert op(torch.zeros(1)).item() == 2
    assert op(torch.zeros(1)).item() == 1
    with DispatchLog() as log:
        assert op(torch.zeros(1)).item() == 1
    assert f"{ns}.f.default" in log.seen
