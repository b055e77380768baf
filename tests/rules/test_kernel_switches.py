"""Kernels are switched off and on."""

from __future__ import annotations

import logging
import threading

import pytest
import torch
from helpers.kernels import constant, define, which

from customops import Registry

# Switching kernels off ------------------------------------------------------------------------------------------


@pytest.mark.parity(24)
def test_a_disabled_kernel_leaves_the_call_to_the_default(registry: Registry, ns: str) -> None:
    op = define(registry, ns, constant(1))
    op.register_kernel("cpu", constant(2))
    with op.set_kernel_enabled("cpu", enabled=False):
        assert op(torch.zeros(())).item() == 1
    assert op(torch.zeros(())).item() == 2


@pytest.mark.parity(24)
def test_disabling_one_of_several_devices(registry: Registry, ns: str) -> None:
    op = define(registry, ns, constant(1))
    op.register_kernel(["cpu", "cuda"], constant(2))
    with op.set_kernel_enabled("cpu", False):
        assert (which(op, "CPU"), which(op, "CUDA")) == (1, 2)
    with op.set_kernel_enabled("cuda", False):
        assert (which(op, "CPU"), which(op, "CUDA")) == (2, 1)
        op.register_kernel("cpu", constant(3))
        assert (which(op, "CPU"), which(op, "CUDA")) == (3, 1)
    assert (which(op, "CPU"), which(op, "CUDA")) == (3, 2)


@pytest.mark.parity(24)
def test_switches_nest(registry: Registry, ns: str) -> None:
    op = define(registry, ns, constant(1))
    op.register_kernel("cpu", constant(2))
    seen = []
    with op.set_kernel_enabled("cpu", False):
        seen.append(which(op))
        with op.set_kernel_enabled("cpu", True):
            seen.append(which(op))
            with op.set_kernel_enabled("cpu", False):
                seen.append(which(op))
            seen.append(which(op))
        seen.append(which(op))
    assert [*seen, which(op)] == [1, 2, 1, 2, 1, 2]


@pytest.mark.parity(24)
def test_the_switch_goes_back_after_an_error(registry: Registry, ns: str) -> None:
    op = define(registry, ns, constant(1))
    op.register_kernel("cpu", constant(2))
    with pytest.raises(ZeroDivisionError), op.set_kernel_enabled("cpu", False):
        raise ZeroDivisionError
    assert which(op) == 2


@pytest.mark.parity(24)
def test_a_kernel_registered_while_switched_off_stays_off(registry: Registry, ns: str) -> None:
    op = define(registry, ns, constant(1))
    op.register_kernel("cpu", constant(2))
    with op.set_kernel_enabled("cpu", False):
        op.register_kernel("cpu", constant(3))
        assert which(op) == 1
    assert which(op) == 3


@pytest.mark.parity(24)
@pytest.mark.parametrize(
    ("device_type", "enabled", "phrase"),
    [
        ("xpu", False, "no kernel was registered for this device type"),
        ("xpu", True, "no kernel was registered for this device type"),
        ("cpu", True, "already enabled"),
    ],
)
def test_a_switch_without_effect_is_logged(
    registry: Registry, ns: str, caplog: pytest.LogCaptureFixture, device_type: str, enabled: bool, phrase: str
) -> None:
    op = define(registry, ns, constant(1))
    op.register_kernel("cpu", constant(2))
    with caplog.at_level(logging.INFO, "customops"), op.set_kernel_enabled(device_type, enabled):
        assert (which(op, "CPU"), which(op, "XPU")) == (2, 1)
    (record,) = [record for record in caplog.records if record.name == "customops"]
    assert phrase in record.getMessage()
    assert f"{ns}::f" in record.getMessage()
    assert record.levelno >= logging.INFO
    assert (which(op, "CPU"), which(op, "XPU")) == (2, 1)


@pytest.mark.parity(24)
def test_disabling_twice_is_logged(registry: Registry, ns: str, caplog: pytest.LogCaptureFixture) -> None:
    op = define(registry, ns, constant(1))
    op.register_kernel("cpu", constant(2))
    with op.set_kernel_enabled("cpu", False), caplog.at_level(logging.INFO, "customops"):
        assert not caplog.records
        with op.set_kernel_enabled("cpu", False):
            assert which(op) == 1
        assert which(op) == 1
    assert "already disabled" in caplog.text
    assert which(op) == 2


@pytest.mark.parity(24)
def test_an_op_without_a_default_says_so_when_its_kernel_is_off(registry: Registry, ns: str) -> None:
    with torch.library._scoped_library(ns, "FRAGMENT") as lib:
        lib.define("f(Tensor x) -> Tensor")
        op = registry.adopt(f"{ns}::f")
        op.register_kernel("cpu", constant(2))
        with op.set_kernel_enabled("cpu", False), pytest.raises(RuntimeError, match="there is no kernel for cpu"):
            which(op)
        assert which(op) == 2


@pytest.mark.parity(24)
def test_contexts_of_two_threads_may_end_in_any_order(registry: Registry, ns: str) -> None:
    op = define(registry, ns, constant(1))
    op.register_kernel("cpu", constant(2))
    entered, leave = threading.Event(), threading.Event()

    def switch_off() -> None:
        with op.set_kernel_enabled("cpu", False):
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=switch_off)
    with op.set_kernel_enabled("cpu", False):
        thread.start()
        assert entered.wait(60)
    assert which(op) == 1  # the other thread has it switched off still
    leave.set()
    thread.join(60)
    assert which(op) == 2


@pytest.mark.parity(24)
def test_the_default_is_the_newest_one(registry: Registry, ns: str) -> None:
    op = define(registry, ns, constant(1))
    op.register_kernel("cpu", constant(2))
    with op.set_kernel_enabled("cpu", False):
        with registry.scope():
            op.register_kernel(None, constant(3))
            assert (which(op, "CPU"), which(op, "XPU")) == (3, 3)
        assert (which(op, "CPU"), which(op, "XPU")) == (1, 1)
    assert (which(op, "CPU"), which(op, "XPU")) == (2, 1)


@pytest.mark.parity(24)
def test_the_default_of_an_op_that_torch_defined(registry: Registry, ns: str) -> None:
    with torch.library._scoped_library(ns, "FRAGMENT") as lib:
        lib.define("f(Tensor x) -> Tensor")
        op = registry.adopt(f"{ns}::f")
        op.register_kernel(None, constant(1))
        op.register_kernel("cpu", constant(2))
        with op.set_kernel_enabled("cpu", False):
            assert which(op) == 1
        assert which(op) == 2


@pytest.mark.compile
@pytest.mark.parity(24)
def test_the_switch_reaches_compiled_code_and_other_threads(registry: Registry, ns: str) -> None:
    op = define(registry, ns, constant(1))
    op.register_kernel("cpu", constant(2))
    op.register_fake(torch.empty_like)
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
    x, seen = torch.zeros(2), []
    assert compiled(x).tolist() == [2, 2]
    with op.set_kernel_enabled("cpu", False):
        assert compiled(x).tolist() == [1, 1]
        thread = threading.Thread(target=lambda: seen.append(which(op)))
        thread.start()
        thread.join(60)
    assert seen == [1]
    assert compiled(x).tolist() == [2, 2]
