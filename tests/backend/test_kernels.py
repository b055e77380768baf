"""Kernels for the device: what they are given, and what they may return."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.isolated import isolated
from helpers.npy import backend_kernels, equal, ones, register
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

from customops.backend import BackendError, get_backend
from customops.backend.errors import WrongDeviceError

pytestmark = pytest.mark.process


on_device = isolated(register, imports=["helpers.inductor"])


# Kernels ----------------------------------------------------------------------------------------------------------


@on_device
def test_a_kernel_and_its_removal() -> None:
    backend = get_backend()

    @backend.kernel("aten::add.Tensor")
    def add(a, b, *, alpha=1):
        return backend.wrap(np.add(backend.numpy(a), backend.numpy(b)) + 100)

    assert (ones(2) + ones(2)).tolist() == [102, 102]
    assert backend.fallback_counts().keys() == {"aten::fill_.Scalar"}
    assert repr(add).startswith("<kernel aten::add.Tensor: add (")
    assert add.op == "aten::add.Tensor"
    assert add(ones(1), ones(1)).item() == 102  # still a function
    add.remove()
    add.remove()
    assert (ones(2) + ones(2)).tolist() == [2, 2]
    assert "aten::add.Tensor" in backend.fallback_counts()
    again = backend.kernel("aten::add.Tensor")(lambda a, b, alpha=1: backend.wrap(torch.zeros(2)))
    assert (ones(2) + ones(2)).tolist() == [0, 0]
    again.remove()


@on_device
def test_one_out_kernel_serves_all_forms() -> None:
    backend = get_backend()

    @backend.kernel("aten::mul.out")
    def mul(a, b, *, out):
        np.multiply(backend.numpy(a), b if isinstance(b, float) else backend.numpy(b), out=backend.numpy(out))

    d = torch.arange(4.0, device="npy")
    backend.reset_fallback_counts()
    out = torch.empty(4, device="npy")
    assert torch.mul(d, d, out=out) is out
    with backend.no_fallback():
        product = d * d
        doubled = d * 2.0
        written = torch.arange(4.0).npy().mul_(d)
    assert backend.fallback_counts() == {}
    for result in (product, written, out):
        assert result.tolist() == [0, 1, 4, 9]
    assert doubled.tolist() == [0, 2, 4, 6]
    for empty in (torch.empty(0, device="npy"), torch.empty(3, 0, device="npy")):
        assert torch.mul(d.view(4, 1), d, out=empty) is empty
        assert_close(empty.cpu(), d.cpu().outer(d.cpu()))
    with pytest.raises(RuntimeError, match="broadcast"):
        torch.mul(d, d[:3], out=torch.empty(0, device="npy"))
    w = torch.arange(4.0).npy().requires_grad_()
    (w * d).sum().backward()
    assert w.grad.tolist() == [0, 1, 2, 3]
    mul.remove()
    assert (d * d).tolist() == [0, 1, 4, 9]
    assert "aten::mul.Tensor" in backend.fallback_counts()


@on_device
def test_dtypes_and_not_implemented() -> None:
    backend = get_backend()
    called = []

    @backend.kernel("aten::relu", dtypes=[torch.float32])
    def relu(x):
        called.append(x.dtype)
        return NotImplemented if x.dim() > 1 else backend.wrap(np.maximum(backend.numpy(x), 0))

    assert torch.relu(torch.tensor([-1.0, 2.0], device="npy")).tolist() == [0, 2]
    assert torch.relu(torch.tensor([[-1.0, 2.0]], device="npy")).tolist() == [[0, 2]]
    assert torch.relu(torch.tensor([-1, 2], device="npy")).tolist() == [0, 2]
    assert called == [torch.float32, torch.float32]
    assert backend.fallback_counts()["aten::relu"] == 2
    relu.remove()


@on_device
def test_what_a_kernel_may_not_return() -> None:
    backend = get_backend()
    for wrong, got in (
        (None, "None"),
        (torch.ones(2), "a tensor on cpu"),
        (np.ones(2), "ndarray"),
        (3, "int"),
        ([1, 2], "list"),
        (torch.ones(2, device="npy:1"), "a tensor on npy:1"),
        (torch.empty(2, device="meta"), "a tensor on meta"),
    ):
        handle = backend.kernel("aten::relu")(lambda x, wrong=wrong: wrong)
        with pytest.raises(RuntimeError, match="the kernel returned something else") as info:
            torch.relu(ones(2))
        assert (info.value.op, info.value.expected, info.value.got) == ("aten::relu", "a tensor on npy:0", got)
        assert "test_kernels.py" in info.value.where
        if isinstance(wrong, np.ndarray):
            assert info.value.fix == "backend.wrap(array)"
        handle.remove()


@on_device
def test_wrong_results_of_other_shapes() -> None:
    backend = get_backend()
    d = ones(3)
    written = "the tensor that it writes to, or None"
    for op, wrong, call, expected in (
        ("aten::sort", d, lambda: d.sort(), "a tuple of 2"),
        ("aten::sort", (d,), lambda: d.sort(), "a tuple of 2"),
        ("aten::sort", (d, None), lambda: d.sort(), "a tensor on npy:0"),
        ("aten::unsafe_split.Tensor", d, lambda: torch.unsafe_split(d, 1), "a list of tensors"),
        ("aten::add_.Tensor", ones(3), lambda: d.add_(d), written),
        ("aten::add.out", ones(3), lambda: torch.add(d, d, out=ones(3)), written),
        ("aten::_foreach_add_.Scalar", 3, lambda: torch._foreach_add_([d], 1.0), "nothing"),
    ):
        handle = backend.kernel(op)(lambda *args, wrong=wrong, **kwargs: wrong)
        with pytest.raises(RuntimeError, match="the kernel returned something else") as info:
            call()
        assert (info.value.op, info.value.expected) == (op, expected)
        assert info.value.fix == ("drop the return" if expected == "nothing" else None)
        handle.remove()


@on_device
def test_results_of_other_shapes() -> None:
    backend = get_backend()
    with backend_kernels(
        backend,
        {
            "aten::sort": lambda x, *_: (backend.wrap(torch.zeros(3)), backend.wrap(torch.arange(3))),
            "aten::unsafe_split.Tensor": lambda x, n: [backend.wrap(torch.full((1,), 7.0))],
            "aten::_foreach_add_.Scalar": lambda xs, n: [backend.host(x).add_(n) for x in xs] and None,
            "aten::equal": lambda a, b: True,
        },
    ):
        d = ones(3)
        assert [part.tolist() for part in d.sort()] == [[0, 0, 0], [0, 1, 2]]
        assert torch.unsafe_split(d, 1)[0].item() == 7
        torch._foreach_add_([d], 2.0)
        assert d.tolist() == [3, 3, 3]
        assert torch.equal(d, ones(3))


@on_device
def test_errors_of_a_kernel_come_through() -> None:
    backend = get_backend()

    class MyError(Exception): ...

    @backend.kernel("aten::relu")
    def relu(x):
        raise MyError("mine")

    with pytest.raises(MyError, match="mine"):
        torch.relu(ones(2))
    relu.remove()
    handle = backend.kernel("aten::add.Tensor")(lambda a: a)  # one parameter too few
    with pytest.raises(RuntimeError, match=r"add\.Tensor: the kernel raised TypeError: .*takes 1 positional argument"):
        torch.add(ones(1), ones(1))
    handle.remove()


@on_device
def test_errors_of_kernels_under_operators() -> None:
    """An operator takes a TypeError for "not implemented": `==` would be False, and `+` unsupported."""
    backend, d = get_backend(), ones(2)
    for wrong in (lambda *_: None, lambda *_: torch.ones(2), lambda *_: np.ones(2), lambda: 0, lambda *_: 1 + "1"):
        for op, call in (
            ("aten::eq.Scalar", lambda: d == 0),
            ("aten::gt.Scalar", lambda: d > 0),
            ("aten::add.Tensor", lambda: d + d),
            ("aten::rsub.Scalar", lambda: 1 - d),
            ("aten::dot", lambda: d @ d),
        ):
            handle = backend.kernel(op)(wrong)
            with pytest.raises(BackendError, match=r"the kernel (returned something else|raised TypeError)") as info:
                call()
            assert info.value.op == op
            assert "test_kernels.py" in info.value.where
            handle.remove()


@on_device
def test_a_bfloat16_for_numpy_under_an_operator() -> None:
    backend = get_backend()
    with (
        backend_kernels(backend, {"aten::add.Tensor": lambda a, b: backend.wrap(backend.numpy(a) + backend.numpy(b))}),
        pytest.raises(BackendError, match=r"the kernel raised DtypeError: .*NumPy has no such dtype") as info,
    ):
        ones(2, dtype=torch.bfloat16) + ones(2, dtype=torch.bfloat16)
    assert isinstance(info.value.__cause__, TypeError)


@on_device
def test_results_that_are_no_tensors() -> None:
    backend, d = get_backend(), ones(2)
    lib = torch.library.Library("t_backend_results", "DEF")
    calls = {}
    for i, (returned, wrong) in enumerate(
        {
            "bool": None,
            "int": None,
            "float": "1",
            "Tensor?": torch.ones(2),
            "str": 3,
            "Tensor[]": d,
            "SymInt": 1.5,
        }.items()
    ):
        lib.define(f"f{i}(Tensor x) -> {returned}")
        calls[f"t_backend_results::f{i}"] = wrong
    for op, wrong in calls.items():
        handle = backend.kernel(op)(lambda x, wrong=wrong: wrong)
        with pytest.raises(BackendError, match="the kernel returned something else") as info:
            getattr(torch.ops.t_backend_results, op.partition("::")[2])(d)
        assert info.value.op == op
        handle.remove()
    with backend_kernels(backend, {"aten::equal": lambda a, b: np.bool_(True)}):
        assert torch.equal(d, d) is True
    with backend_kernels(backend, {"t_backend_results::f3": lambda x: None}):
        assert torch.ops.t_backend_results.f3(d) is None


@on_device
def test_registrations_that_are_refused() -> None:
    backend = get_backend()
    for name in ("aten::nothing", "add", "aten::add.nothing", "nothing::relu"):
        with pytest.raises(KeyError, match="there is no such op") as info:
            backend.kernel(name)
        assert info.value.op == name
    with pytest.raises(KeyError, match=r"one of .*aten::add\.Tensor"):
        backend.kernel("aten::add")
    with pytest.raises(BackendError, match="a kernel is for an op"):
        backend.kernel(3)
    handle = backend.kernel(torch.ops.aten.relu.default)(lambda x: x)
    with pytest.raises(BackendError, match="there is a kernel already") as info:
        backend.kernel("aten::relu")(lambda x: x)
    assert "test_kernels.py" in info.value.where
    handle.remove()
    for dtypes in (["float"], [], [None]):
        with pytest.raises(ValueError, match="dtypes= takes torch dtypes"):
            backend.kernel("aten::relu", dtypes=dtypes)
    with pytest.raises(ValueError, match="autocast casts to a dtype"):
        backend.autocast_kernel("aten::mm", "float16")


@on_device
def test_what_is_no_kernel() -> None:
    backend = get_backend()
    with pytest.raises(BackendError, match="a kernel is a function"):
        backend.kernel("aten::mm")(3)
    for op in ("aten::mm", "aten::sin"):
        with pytest.raises(BackendError, match="a view kernel is for an op that returns nothing but views"):
            backend.view_kernel(op)
    assert (ones(1, 1) @ ones(1, 1)).item() == 1


@on_device
def test_tensors_of_the_cpu_are_refused_as_in_the_fallback() -> None:
    backend = get_backend()
    d, c, seen = ones(2, 2), torch.ones(2, 2), []

    def note(*args, **kwargs):
        seen.append(args)
        return NotImplemented

    handles = [backend.kernel(op)(note) for op in ("aten::mm", "aten::cos.out", "aten::cat", "aten::index.Tensor")]
    calls = {
        "self": lambda: torch.mm(c, d),
        "mat2": lambda: torch.mm(d, c),
        "out": lambda: torch.cos(d, out=c),
        "tensors": lambda: torch.cat([d, c]),
    }
    for argument, call in calls.items():
        with pytest.raises(WrongDeviceError, match="Expected all tensors to be on the same device") as info:
            call()
        assert (info.value.argument, info.value.fix) == (argument, ".to('npy')")
    assert seen == []
    equal(d[torch.tensor([0, 1])], c)  # an index may be on the CPU, and so may what has no dimensions, or is copied
    equal(d + torch.tensor(1.0), c + 1)
    equal(torch.zeros(2, 2, device="npy").copy_(c), c)
    assert len(seen) == 1
    for handle in handles:
        handle.remove()


@on_device
def test_arguments_that_may_be_on_the_cpu() -> None:
    """As without a kernel, or with one of torch's for another device."""
    d, c, seen = ones(2, 2), torch.full((2, 2), 3.0), []
    calls = {
        "aten::_foreach_copy_": lambda: torch._foreach_copy_([d], [c]),
        "aten::_foreach_addcdiv_.Tensor": lambda: torch._foreach_addcdiv_([d], [d], [d], torch.tensor([2.0])),
        "aten::_pack_padded_sequence": lambda: torch.nn.utils.rnn.pack_padded_sequence(d, torch.tensor([2, 1])),
        "aten::resize_as_": lambda: ones(4).resize_as_(c),
        "aten::expand_as": lambda: d.expand_as(c),
    }
    for op, call in calls.items():
        call()

        def note(*args: object, op: str = op, **kwargs: object) -> object:
            seen.append(op)
            return NotImplemented

        with backend_kernels(get_backend(), {op: note}), torch.no_grad():
            call()
    assert seen == list(calls)


@on_device
def test_python_numbers_stay_numbers() -> None:
    backend = get_backend()
    seen = []

    @backend.kernel("aten::add.Tensor")
    def add(a, b, *, alpha=1):
        seen.append(b)
        return NotImplemented

    ones(2) + 1
    ones(2) + 1.5
    assert [type(b) for b in seen] == [int, float]
    add.remove()


@on_device
def test_a_view_kernel() -> None:
    backend = get_backend()
    lib = torch.library.Library("t_backend_view", "DEF")
    lib.define("halves(Tensor(a) x) -> Tensor(a)")
    lib.impl("halves", lambda x: x[: len(x) // 2], "CPU")
    d = torch.arange(4.0, device="npy")
    torch.ops.t_backend_view.halves(d).zero_()  # the fallback sees that it is one
    assert d.tolist() == [0, 0, 2, 3]
    handle = backend.view_kernel("t_backend_view::halves")
    with pytest.raises(BackendError, match="there is a kernel already") as info:
        backend.view_kernel("t_backend_view::halves")
    assert "test_kernels.py" in info.value.where
    torch.ops.t_backend_view.halves(d).fill_(5)
    assert d.tolist() == [5, 5, 2, 3]
    assert "t_backend_view::halves" not in backend.fallback_counts()
    handle.remove()


@on_device
def test_kernels_of_composites_keep_the_gradient() -> None:
    backend = get_backend()
    host, wrap, functional, called = backend.host, backend.wrap, torch.nn.functional, []

    def softmax(x, dim, dtype=None):
        called.append("softmax")
        return wrap(torch.softmax(host(x), dim))

    def linear(x, weight, bias=None):
        called.append("linear")
        return wrap(functional.linear(host(x), host(weight), bias if bias is None else host(bias)))

    def layer_norm(x, shape, weight=None, bias=None, eps=1e-5, cudnn_enable=True):
        called.append("layer_norm")
        return wrap(functional.layer_norm(host(x), shape, host(weight), host(bias), eps))

    def run(model, x):
        y = model(x)
        return (torch.softmax(y, -1) * y).sum()

    torch.manual_seed(0)
    model, x = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4)), torch.randn(2, 3)
    run(model, x).backward()
    expected = [p.grad for p in model.parameters()]
    of_device = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    of_device.load_state_dict(model.state_dict())
    of_device.npy()
    kernels = {"aten::softmax.int": softmax, "aten::linear": linear, "aten::layer_norm": layer_norm}
    with backend_kernels(backend, kernels):
        run(of_device, x.npy()).backward()
        assert called == []
        for parameter, grad in zip(of_device.parameters(), expected, strict=True):
            assert_close(parameter.grad.cpu(), grad)
        with torch.no_grad():
            assert_close(run(of_device, x.npy()).cpu(), run(model, x))
        with torch.inference_mode():
            assert_close(run(of_device, x.npy()).cpu(), run(model, x))
        assert called == ["linear", "layer_norm", "softmax"] * 2
        z, t = torch.randn(3), torch.randn(3)
        tangent = torch.func.jvp(lambda v: torch.softmax(v, 0), (z.npy(),), (t.npy(),))[1]
        assert_close(tangent.cpu(), torch.func.jvp(lambda v: torch.softmax(v, 0), (z,), (t,))[1])
        assert_close(
            torch.func.jacrev(lambda v: torch.softmax(v, 0))(z.npy()).cpu(),
            torch.func.jacrev(lambda v: torch.softmax(v, 0))(z),
        )
    called.clear()
    torch.softmax(ones(2), 0)
    assert called == []
    with backend_kernels(backend, {"aten::softmax.int": lambda *_: NotImplemented}):
        backend.reset_fallback_counts()
        torch.softmax(ones(2), 0)
        assert list(backend.fallback_counts()) == ["aten::fill_.Scalar", "aten::_softmax"]  # its part, as before
    x = torch.ones(2, device="npy", requires_grad=True)
    graph = make_fx(lambda x: torch.softmax(x, 0).sum(), tracing_mode="fake")(x)  # torch remembers removed kernels
    assert "_softmax" in graph.code


@on_device
def test_not_implemented_is_what_ran_before() -> None:
    backend, called = get_backend(), []

    def copy(source, target, non_blocking=False):
        called.append(source.dtype)
        memory = [backend.host(x) if x.is_npy else x for x in (target, source)]
        memory[0].copy_(memory[1])
        return target

    handle = backend.kernel("aten::_copy_from", dtypes=[torch.float64])(copy)
    assert torch.ones(2).npy().cpu().tolist() == [1, 1]
    assert called == []
    assert torch.ones(2).double().npy().cpu().tolist() == [1, 1]
    assert called == [torch.float64] * 2
    handle.remove()
    with backend_kernels(backend, {op: lambda *_, **__: NotImplemented for op in ("aten::resize_", "aten::view")}):
        d = ones(2)
        assert d.resize_(6).view(2, 3).shape == (2, 3)
