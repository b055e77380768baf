"""Kernels for the device: what they are given, what they may return, and what runs where there is none."""

from __future__ import annotations

import contextlib
import threading
import warnings

import numpy as np
import pytest
import torch
from isolated import isolated
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

from customops.backend import BackendError, get_backend, register_backend
from customops.backend.coverage import journal


def register() -> None:
    register_backend("npy", device_count=2)


on_device = isolated(register)


def ones(*shape: int, **options) -> torch.Tensor:
    return torch.ones(*shape, device="npy", **options)


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
        assert "test_backend_kernels.py" in info.value.where
        if isinstance(wrong, np.ndarray):
            assert info.value.fix == "backend.wrap(array)"
        handle.remove()


@on_device
def test_wrong_results_of_other_shapes() -> None:
    backend = get_backend()
    d = ones(3)
    for op, wrong, call in (
        ("aten::sort", d, lambda: d.sort()),
        ("aten::sort", (d,), lambda: d.sort()),
        ("aten::sort", (d, None), lambda: d.sort()),
        ("aten::unsafe_split.Tensor", d, lambda: torch.unsafe_split(d, 1)),
        ("aten::add_.Tensor", ones(3), lambda: d.add_(d)),
        ("aten::add.out", ones(3), lambda: torch.add(d, d, out=ones(3))),
        ("aten::_foreach_add_.Scalar", 3, lambda: torch._foreach_add_([d], 1.0)),
    ):
        handle = backend.kernel(op)(lambda *args, wrong=wrong, **kwargs: wrong)
        with pytest.raises(RuntimeError, match="the kernel returned something else"):
            call()
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


class backend_kernels:
    def __init__(self, backend, functions) -> None:
        self.handles = [backend.kernel(op)(fn) for op, fn in functions.items()]

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()


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
            assert "test_backend_kernels.py" in info.value.where
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
    assert "test_backend_kernels.py" in info.value.where
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
    assert "test_backend_kernels.py" in info.value.where
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


@on_device
def test_dtypes_of_lists() -> None:
    backend, called = get_backend(), []
    handle = backend.kernel("aten::cat", dtypes=[torch.float32])(lambda xs, dim=0: called.append(dim) or NotImplemented)
    for dtype in (torch.float64, torch.float32):
        assert torch.cat([ones(1, dtype=dtype), ones(2, dtype=dtype)]).tolist() == [1, 1, 1]
    assert called == [0]
    handle.remove()


@on_device
def test_kernels_from_torch_library_count() -> None:
    """The shortcuts of a family go with its first kernel, whoever writes it."""
    backend = get_backend()
    lib = torch.library.Library("aten", "IMPL")
    lib.impl(op_name="sub.out", fn=lambda a, b, *, alpha=1, out: out.fill_(7), dispatch_key="PrivateUse1")
    d = ones(2)
    assert (d - d).tolist() == [7, 7]
    backend.reset_fallback_counts()
    assert (d * d).tolist() == [1, 1]
    assert backend.fallback_counts() == {"aten::mul.Tensor": 1}


@on_device
def test_a_kernel_of_an_essential_op() -> None:
    backend = get_backend()
    sizes = []

    @backend.kernel("aten::empty.memory_format")
    def empty(size, **options):
        sizes.append(list(size))
        return backend.wrap(torch.zeros(size, dtype=options.get("dtype") or torch.float32))

    assert torch.empty(2, 3, device="npy").sum().item() == 0
    empty.remove()
    assert torch.empty(4, device="npy").shape == (4,)
    assert sizes == [[2, 3]]


@on_device
def test_attention() -> None:
    backend = get_backend()
    q, k, v = (torch.randn(2, 2, 4, 8, dtype=torch.float64) for _ in range(3))
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    calls = []

    def attend(q, k, v, bias, causal, scale):
        scores = q @ k.mT * (scale if scale is not None else q.shape[-1] ** -0.5)
        if causal:
            scores = scores.masked_fill(~mask, -torch.inf)
        return (scores if bias is None else scores + bias).softmax(-1) @ v

    def forward(q, k, v, bias=None, dropout=0.0, causal=False, debug=False, *, scale=None):
        calls.append("forward")
        host = backend.host
        out = attend(host(q), host(k), host(v), None if bias is None else host(bias), causal, scale)
        empty = lambda: backend.wrap(torch.zeros(0, dtype=torch.long))  # noqa: E731
        return (
            backend.wrap(out),
            backend.wrap(torch.zeros(q.shape[:3])),
            empty(),
            empty(),
            4,
            4,
            empty(),
            empty(),
            empty(),
        )

    def backward(grad, q, k, v, bias, wanted, out, lse, cq, ck, mq, mk, p, causal, seed, offset, *, scale=None):
        calls.append("backward")
        grad, q, k, v = map(backend.host, (grad, q, k, v))
        factor = scale if scale is not None else q.shape[-1] ** -0.5
        weights = attend(
            q,
            k,
            torch.eye(4, dtype=v.dtype).expand(2, 2, 4, 4),
            None if bias is None else backend.host(bias),
            causal,
            scale,
        )
        through = grad @ v.mT
        scores = weights * (through - (through * weights).sum(-1, keepdim=True)) * factor
        grads = scores @ k, scores.mT @ q, weights.mT @ grad
        return (*map(backend.wrap, grads), None)

    sdpa = torch.nn.functional.scaled_dot_product_attention
    assert_close(sdpa(q.npy(), k.npy(), v.npy()).cpu(), sdpa(q, k, v))
    name = "aten::_scaled_dot_product_fused_attention_overrideable"
    handles = [backend.kernel(name)(forward), backend.kernel(f"{name}_backward")(backward)]
    for options in ({}, {"is_causal": True}, {"attn_mask": mask}, {"scale": 0.5}):
        here = [t.clone().requires_grad_() for t in (q, k, v)]
        there = [t.npy().requires_grad_() for t in (q, k, v)]
        on_npy = {n: o.npy() if isinstance(o, torch.Tensor) else o for n, o in options.items()}
        expected, got = sdpa(*here, **options), sdpa(*there, **on_npy)
        assert_close(got.cpu(), expected)
        weights = torch.randn_like(expected)
        expected.backward(weights)
        got.backward(weights.npy())
        for ours, theirs in zip(there, here, strict=True):
            assert_close(ours.grad.cpu(), theirs.grad)
    assert calls == ["forward", "backward"] * 4
    for handle in handles:
        handle.remove()
    calls.clear()
    assert_close(sdpa(q.npy(), k.npy(), v.npy()).cpu(), sdpa(q, k, v))
    assert calls == []
    handle = backend.kernel(name, dtypes=[torch.float32])(lambda *_, **__: NotImplemented)
    q, k, v = q.double(), k.double(), v.double()
    assert_close(sdpa(q.npy(), k.npy(), v.npy()).cpu(), sdpa(q, k, v))  # not asked
    with pytest.raises(NotImplementedError, match="the CPU has no such op to fall back to"):
        sdpa(q.float().npy(), k.float().npy(), v.float().npy())
    handle.remove()


@on_device
def test_kernels_by_way_of_torch_library() -> None:
    """torch's own route to kernels from Python, beside ours."""
    backend = get_backend()
    calls = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it overrides the fallback

        @torch.library.impl("aten::add.Tensor", "privateuseone")
        def add(a, b, *, alpha=1):
            calls.append("add")
            return backend.wrap(backend.host(a) + alpha * backend.host(b), a.device)

        @torch.library.impl("aten::sum", "npy")
        def total(a, *, dtype=None):
            calls.append("sum")
            return backend.wrap(backend.host(a).sum(), a.device)

    a = torch.ones(3).to("npy").requires_grad_()
    loss = (a + a).sum()
    loss.backward()
    assert loss.item() == 6
    assert a.grad.tolist() == [2, 2, 2]
    assert a.grad.is_npy
    assert {"add", "sum"} <= set(calls)
    assert torch.ones(2).is_pinned() is False


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
    record = journal.start()
    with backend_kernels(get_backend(), {"aten::sin": lambda x: None}), pytest.raises(BackendError):
        ones(2).sin()
    journal.open_journals.clear()
    assert (record.native["aten::sin"], list(record.failed)) == (0, ["aten::sin"])


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
