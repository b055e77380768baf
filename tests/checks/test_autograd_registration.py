"""test_autograd_registration: gradients that come from a kernel below autograd are found, on any device."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.libraries import Ops
from helpers.warm import PYTHON

from customops.checks import NotExercised, autograd_registration_check
from customops.errors import CheckError


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(3, requires_grad=True)


@pytest.mark.parametrize("key", ["Autograd", "AutogradCPU", "CompositeImplicitAutograd"])
def test_registered_where_autograd_looks(define: Ops, x: torch.Tensor, key: str) -> None:
    autograd_registration_check(define("f(Tensor x) -> Tensor", **{key: Double.apply}), (x,), {})


@pytest.mark.parametrize("key", ["CPU", "CompositeExplicitAutograd"])
@pytest.mark.parametrize("kernel", [Double.apply, lambda x: x.sin().cos()], ids=["function", "operators"])
def test_registered_below(define: Ops, x: torch.Tensor, key: str, kernel: Callable[..., Any]) -> None:
    op = define("f(Tensor x) -> Tensor", **{key: kernel})
    with pytest.raises(AssertionError, match="does not have an autograd kernel") as caught:
        autograd_registration_check(op, (x,), {})
    assert isinstance(caught.value, CheckError)
    assert "incorrectly registered" in str(caught.value)
    assert "a kernel at AutogradCPU or Autograd" in str(caught.value)


def test_kernel_for_the_device_overrules_a_composite(define: Ops, x: torch.Tensor) -> None:
    op = define("f(Tensor x) -> Tensor", CompositeImplicitAutograd=torch.sin, CPU=Double.apply)
    with pytest.raises(CheckError, match="incorrectly registered"):
        autograd_registration_check(op, (x,), {})


def test_outputs_in_lists_and_by_keyword(define: Ops, x: torch.Tensor) -> None:
    op = define("f(*, Tensor[] xs) -> Tensor[]", CPU=lambda *, xs: [torch.zeros(1), xs[0] * 2])
    with pytest.raises(CheckError, match="output 1 requires grad"):
        autograd_registration_check(op, (), {"xs": [x]})


def test_an_argument_that_was_written_below_autograd(define: Ops, x: torch.Tensor) -> None:
    def copy(x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x)

    out = torch.zeros(3)
    with pytest.raises(CheckError, match="argument out requires grad after the call"):
        autograd_registration_check(define("f(Tensor x, Tensor(a!) out) -> ()", CPU=copy), (x, out), {})
    assert not out.requires_grad


def test_not_differentiable_at_all(define: Ops, x: torch.Tensor) -> None:
    autograd_registration_check(define("f(Tensor x) -> Tensor", CPU=lambda x: x.detach() * 2), (x,), {})


def test_in_place_returns_its_argument(define: Ops, x: torch.Tensor) -> None:
    autograd_registration_check(define("f(Tensor(a!) x) -> Tensor(a!)", CPU=lambda x: x), (x * 2,), {})


def test_several_devices_enter_at_one_key(define: Ops, x: torch.Tensor) -> None:
    op = define("f(Tensor x, Tensor y) -> Tensor", SparseCPU=lambda x, y: y.clone(), AutogradCPU=Double.apply)
    autograd_registration_check(op, (torch.eye(3).to_sparse(), x), {})


@pytest.mark.parametrize("op", [torch.ops.aten.sin.default, torch.ops.aten.selu.default])
def test_aten(op: Any, x: torch.Tensor) -> None:
    autograd_registration_check(op, (x,))


def test_what_cannot_be_exercised(define: Ops, x: torch.Tensor) -> None:
    op = define("f(Tensor x) -> Tensor", CPU=Double.apply)
    with pytest.raises(NotExercised, match="no input has requires_grad=True"):
        autograd_registration_check(op, (x.detach(),), {})
    with pytest.raises(NotExercised, match="no data"):
        autograd_registration_check(op, (torch.empty(3, device="meta", requires_grad=True),), {})
    with torch.no_grad(), pytest.raises(NotExercised, match="gradients are disabled"):
        autograd_registration_check(op, (x,), {})


def test_the_fallback_mode_is_restored(define: Ops, x: torch.Tensor) -> None:
    before = torch._C._get_autograd_fallback_mode()
    with pytest.raises(CheckError, match="itself fails"):
        autograd_registration_check(define("f(Tensor x) -> Tensor", CPU=lambda x: 1 / 0), (x,), {})
    assert torch._C._get_autograd_fallback_mode() == before


# A device of PrivateUse1 that has no kernels but the one under test: nothing to copy tensors with.
PRIVATEUSE1 = """
import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
_setup_privateuseone_for_python_backend("npy")

class Tensor(torch.Tensor):
    @staticmethod
    def __new__(cls, data):
        result = torch._C._acc.create_empty_tensor(data.shape, data.dtype)
        result.__class__ = Tensor
        return result
    def __init__(self, data):
        self.data_ = data

class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return Tensor(x.data_ * 2)
    @staticmethod
    def backward(ctx, grad):
        return grad

lib = torch.library.Library("npy_ops", "DEF")
lib.define("f(Tensor x) -> Tensor")
lib.impl("f", Double.apply, "PrivateUse1")
x = Tensor(torch.ones(3)).requires_grad_()

from customops.checks import autograd_registration_check
try:
    autograd_registration_check(torch.ops.npy_ops.f.default, (x,), {})
except AssertionError as error:
    assert "a kernel at AutogradPrivateUse1" in str(error), error
    lib.impl("f", Double.apply, "AutogradPrivateUse1")
    autograd_registration_check(torch.ops.npy_ops.f.default, (x,), {})
    print("found")
"""


@pytest.mark.process
def test_a_device_of_ones_own() -> None:
    root = Path(__file__).parents[2]
    run = subprocess.run([PYTHON, "-c", PRIVATEUSE1], cwd=root, capture_output=True, text=True)
    assert run.stdout == "found\n", run.stderr
