"""What runs on the CPU instead, and the policies for it."""

from __future__ import annotations

import contextlib
import threading
import warnings

import pytest
import torch
from helpers.isolated import isolated
from helpers.npy import backend_kernels, ones, register
from torch.testing import assert_close

from customops.backend import BackendError, fallbacks, get_backend, register_backend

pytestmark = pytest.mark.process


on_device = isolated(register)


# The fallback -----------------------------------------------------------------------------------------------------


@on_device
def test_counts() -> None:
    backend = get_backend()
    d = torch.empty(3, device="npy")
    backend.reset_fallback_counts()
    d.cos().cos().sin()
    d.view(1, 3).t().expand(2, 3, 1)  # views move nothing
    assert backend.fallback_counts() == {"aten::cos": 2, "aten::sin": 1}
    assert list(backend.fallback_counts()) == ["aten::cos", "aten::sin"]
    backend.reset_fallback_counts()
    assert backend.fallback_counts() == {}


@on_device
def test_policies() -> None:
    backend = get_backend()
    d = ones(2)
    assert backend.fallback_policy == "cpu"
    backend.fallback_policy = "warn"
    with pytest.warns(UserWarning, match="no kernel for 'npy'; it runs on the CPU") as caught:
        [d.cos(), d.cos(), d.sin()]
    assert [str(warning.message).partition(": ")[0] for warning in caught] == ["aten::cos", "aten::sin"]
    assert caught[0].filename == __file__
    backend.fallback_policy = "error"
    for call in (d.cos, lambda: torch.cos(d, out=torch.empty(2, device="npy")), lambda: d + 1, lambda: d.abs_()):
        with pytest.raises(NotImplementedError, match="no fallback to the CPU") as info:
            call()
        assert "backend.kernel('aten::" in info.value.fix
    assert d.view(1, 2).t().shape == (2, 1)
    assert d.cpu().tolist() == [1, 1]
    assert d.detach().clone()[0].item() == 1
    for wrong in ("gpu", None, 3):
        with pytest.raises(ValueError, match="unknown fallback policy"):
            backend.fallback_policy = wrong
    assert backend.fallback_policy == "error"
    backend.fallback_policy = "cpu"
    with contextlib.suppress(KeyError), backend.no_fallback():
        assert backend.fallback_policy == "error"
        raise KeyError
    assert backend.fallback_policy == "cpu"


@on_device
def test_a_policy_is_of_its_thread() -> None:
    backend, d = get_backend(), ones(2)
    inside, left = threading.Event(), threading.Event()

    def other() -> None:
        with backend.no_fallback():
            inside.set()
            left.wait()

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait()
    assert d.cos().shape == (2,)
    with backend.no_fallback():
        left.set()
        thread.join()
        with pytest.raises(NotImplementedError):
            d.cos()
    assert backend.fallback_policy == "cpu"
    assert d.cos().shape == (2,)


@on_device
def test_the_journal_of_a_kernel_that_is_refused() -> None:
    record = fallbacks.start()
    with backend_kernels(get_backend(), {"aten::sin": lambda x: None}), pytest.raises(BackendError):
        ones(2).sin()
    fallbacks.open_journals.clear()
    assert (dict(record.native), list(record.failed)) == ({}, ["aten::sin"])


@on_device
def test_warnings_can_be_errors() -> None:
    get_backend().fallback_policy = "warn"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="aten::cos"):
            torch.empty(2, device="npy").cos()


@on_device
def test_tensors_of_the_cpu_mix_where_they_have_no_dimensions() -> None:
    d = ones(2)
    assert (d + torch.tensor(2.0)).tolist() == [3, 3]
    assert (torch.tensor(2.0) * d).device.type == "npy"
    for call in (lambda: d + torch.ones(2), lambda: torch.ones(2) @ d, lambda: torch.cat([d, torch.ones(2)]),
                 lambda: torch.add(torch.ones(2), 1, out=torch.empty(2, device="npy")),
                 lambda: torch.nn.functional.linear(d, torch.ones(1, 2))):  # fmt: skip
        with pytest.raises((ValueError, RuntimeError), match="same device"):
            call()
    with pytest.raises(ValueError, match="same device") as info:
        torch.where(d > 0, d, torch.ones(2))
    assert info.value.argument == "other"
    assert info.value.fix == ".to('npy')"


@on_device
def test_indices_may_be_on_the_cpu() -> None:
    d = torch.arange(4.0, device="npy")
    i = torch.tensor([1, 3])
    assert d[i].tolist() == [1, 3]
    d[i] = 0.0
    d[torch.tensor([True, False, True, False])] = d.new_tensor([7.0, 8.0])
    assert d.tolist() == [7, 0, 8, 0]


@on_device
def test_numbers_where_a_tensor_is_due() -> None:
    for f in (
        lambda x: torch.remainder(x, 2.5),
        lambda x: torch.fmod(x, 2),
        lambda x: torch.atan2(x, torch.tensor(2.0)),
        lambda x: torch.float_power(x, 2),
        lambda x: torch.bitwise_and(x.int(), 3),
        lambda x: x.half() + 1e-4,
        lambda x: x.bfloat16() * 0.1,
        lambda x: x.int() * 2.5,
        lambda x: torch.true_divide(x.int(), 3),
        lambda x: torch.maximum(x, x * 0 + 1),
    ):
        x = torch.tensor([1.0, 2.0, 5.0])
        got, expected = f(x.npy()), f(x)
        assert got.dtype == expected.dtype
        assert torch.equal(got.cpu(), expected)


@on_device
def test_lu_solve_of_complex_numbers() -> None:
    """The op leaves its out conjugated; dropped, that bit makes the result silently wrong."""
    a, b = torch.randn(3, 3, dtype=torch.complex128), torch.randn(3, 2, dtype=torch.complex128)
    lu, pivots = torch.linalg.lu_factor(a)
    for options in ({}, {"adjoint": True}, {"left": False}):
        right = b if options.get("left", True) else b.mT
        expected = torch.linalg.lu_solve(lu, pivots, right, **options)
        assert_close(torch.linalg.lu_solve(lu.npy(), pivots.npy(), right.npy(), **options).cpu(), expected)
        out = torch.empty(0, dtype=a.dtype, device="npy")
        torch.linalg.lu_solve(lu.npy(), pivots.npy(), right.npy(), **options, out=out)
        assert_close(out.cpu(), expected)
    assert_close((a.npy().mH @ b.npy()).cpu(), a.mH @ b)
    assert_close(torch.vdot(a.npy()[0].conj(), a.npy()[1]).cpu(), torch.vdot(a[0].conj(), a[1]))


@on_device
def test_gradients_that_are_zero_tensors() -> None:
    x = torch.randn(3, dtype=torch.complex64)
    d = x.npy().requires_grad_()
    d.sgn().abs().sum().backward()  # torch alone: a segfault
    e = x.clone().requires_grad_()
    e.sgn().abs().sum().backward()
    assert_close(d.grad.cpu(), e.grad)
    assert torch._efficientzerotensor((2,), device="npy").tolist() == [0, 0]


@on_device
def test_a_policy_of_errors_from_the_start_is_possible() -> None:
    backend = get_backend()
    lib = torch.library.Library("t_backend_none", "DEF")
    lib.define("f(Tensor x) -> Tensor")
    lib.impl("f", lambda x: x + 1, "CPU")
    assert torch.ops.t_backend_none.f(ones(2)).tolist() == [2, 2]
    with backend.no_fallback(), pytest.raises(NotImplementedError, match="no kernel for 'npy'") as info:
        torch.ops.t_backend_none.f(torch.empty(2, device="npy"))
    assert info.value.fix.startswith("register_kernel('npy') on the op")


@on_device
def test_an_op_without_any_kernel() -> None:
    lib = torch.library.Library("t_backend_bare", "DEF")
    lib.define("f(Tensor x) -> Tensor")
    with pytest.raises(NotImplementedError, match="t_backend_bare::f"):
        torch.ops.t_backend_bare.f(ones(2))


@on_device
def test_the_cpus_own_errors_come_through() -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        ones(2, 3) @ ones(2, 3)
    with pytest.raises(IndexError, match="out of bounds"):
        ones(2)[torch.tensor([5])]
    with pytest.raises(RuntimeError, match="result type Float can't be cast"):
        torch.add(ones(2), 1.5, out=torch.empty(2, dtype=torch.int32, device="npy"))


alone = isolated()


@alone
def test_error_from_the_start() -> None:
    backend = register_backend("npy", fallback="error")
    d = torch.tensor([1.0, 2.0]).npy()
    with pytest.raises(NotImplementedError, match=r"aten::add\.Tensor"):
        d + d
    backend.kernel("aten::add.Tensor")(lambda a, b, alpha=1: backend.wrap(backend.numpy(a) + backend.numpy(b)))
    assert (d + d).cpu().tolist() == [2, 4]


@on_device
def test_an_op_that_is_told_no_device_is_told_none() -> None:
    """The CPU's kernel gets None where the caller says nothing, and not a device that was not asked for."""
    seen = []
    with torch.library._scoped_library("t_fallback_device", "FRAGMENT") as library:
        library.define("like(Tensor x, *, Device? device=None) -> Tensor")
        library.impl("like", lambda x, device=None: seen.append(device) or x.clone(), "CPU")
        torch.ops.t_fallback_device.like(torch.ones(2, device="npy"))
    assert seen == [None]
