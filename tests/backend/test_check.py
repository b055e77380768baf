"""``check=``: what kernels return is compared with the sizes and dtypes that torch computes for the op."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.isolated import isolated
from helpers.npy import backend_kernels, ones

from customops.backend import BackendError, get_backend, register_backend
from customops.testing import run_isolated

pytestmark = pytest.mark.process


def with_check() -> None:
    register_backend("npy", device_count=2, check="always")


checked = isolated(with_check)


def array(x):
    return get_backend().numpy(x)


def wrap(value):
    return get_backend().wrap(value)


def full(size, value, *, dtype=None, layout=None, device=None, pin_memory=None):
    return wrap(np.full(size, value))


#: op -> a kernel with a fault, a call, what is expected and what it got.
FAULTS = {
    "aten::relu": (lambda x: wrap(array(x)[0]), lambda x: x.relu(), "[2, 3] torch.float32", "[3] torch.float32"),
    "aten::exp.out": (
        lambda x, *, out: out.resize_(5),
        lambda x: x.exp(),
        "[2, 3] torch.float32",
        "[5] torch.float32",
    ),
    "aten::max.dim": (
        lambda x, dim, keepdim=False: (wrap(array(x).max(dim)), wrap(array(x).argmax(dim).astype(np.int32))),
        lambda x: x.max(1),
        "[2] torch.float32; [2] torch.int64",
        "[2] torch.float32; [2] torch.int32",
    ),
    "aten::unsafe_split.Tensor": (
        lambda x, size, dim=0: [x.clone()],
        lambda x: torch.unsafe_split(x, 1),
        "[1, 3] torch.float32; [1, 3] torch.float32",
        "[2, 3] torch.float32",
    ),
    "aten::full": (
        full,
        lambda x: torch.full((2,), 0.5, device="npy"),
        "[2] torch.float32",
        "[2] torch.float64",
    ),
}


@checked
def test_sizes_and_dtypes() -> None:
    for op, (kernel, call, expected, got) in FAULTS.items():
        with backend_kernels(get_backend(), {op: kernel}), pytest.raises(BackendError) as info:
            call(ones(2, 3))
        error = info.value
        assert error.problem == "the kernel returned tensors of other sizes or dtypes than the op"
        assert (error.op, error.expected, error.got) == (op, expected, got)
        assert error.where.startswith("full" if op == "aten::full" else "<lambda>"), error.where


@checked
def test_what_fits_passes() -> None:
    """Also a kernel that leaves a call to the fallback, one of an op that only data can tell the sizes of, and None."""
    seen = []

    def nonzero(x):
        return wrap(np.argwhere(array(x)))

    def copied(x, **options):
        seen.append(x)
        return NotImplemented

    def norm_backward(grad, x, sizes, mean, rstd, weight, bias, mask):
        return [None, None, wrap(array(grad).sum(0))]

    kernels = {"aten::nonzero": nonzero, "aten::_to_copy": copied, "aten::native_layer_norm_backward": norm_backward}
    kernels["aten::relu"] = lambda x: NotImplemented
    with backend_kernels(get_backend(), kernels):
        assert ones(2).nonzero().tolist() == [[0], [1]]
        assert ones(2).double().relu().dtype == torch.float64
        assert seen
        bias = ones(3).requires_grad_()
        torch.nn.functional.layer_norm(ones(2, 3), (3,), None, bias).sum().backward()
        assert bias.grad.tolist() == [2, 2, 2]


PROGRAM = """
import torch
from customops.backend import register_backend

backend = register_backend("npy"{option})
wrong = backend.kernel("aten::relu")(lambda x: x.sum(0))
result = []
for shape in ((3, 1), (1,), (2, 3)):
    try:
        result.append(list(torch.ones(shape, device="npy").relu().shape))
    except RuntimeError as error:
        result.append(type(error).__name__)
"""


@pytest.mark.parametrize(
    ("option", "variable", "expected"),
    [
        ("", None, [[1], [], [3]]),
        ("", "always", ["KernelResultError"] * 3),
        (", check='always'", "npy=never", [[1], [], [3]]),
        (", check='first'", None, ["KernelResultError"] * 3),
    ],
)
def test_who_turns_it_on(option: str, variable: str | None, expected: list[object]) -> None:
    env = {"CUSTOMOPS_BACKEND_CHECK": variable} if variable else {}
    assert run_isolated(PROGRAM.format(option=option), env=env).value == expected


def test_the_first_call_alone() -> None:
    code = PROGRAM.format(option=", check='first'").replace("x.sum(0)", "x.clone() if x.ndim == 1 else x.sum(0)")
    assert run_isolated(code.replace("(3, 1), ", "")).value == [[1], [3]]


def test_other_values_are_refused() -> None:
    with pytest.raises(ValueError, match="check= has an invalid value"):
        register_backend("npy", check="sometimes")  # type: ignore[arg-type]
