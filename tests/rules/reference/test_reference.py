"""`register_reference`: precedence, options, other forms of ops, states, faults. The given rules: test_fifteen."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, get_args

import pytest
import torch
from helpers.modes import DispatchLog
from helpers.processes import Program, outputs
from helpers.threads import in_threads
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import customops
from customops import CustomOpDef, Mut, Registry, Tag
from customops._rules.reference import Given
from customops.errors import (
    AutogradError,
    CallbackError,
    DefinitionError,
    KernelError,
    MissingFakeError,
    RegistrationError,
    UnsupportedError,
)


def plain_norm(x: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w


def norm_fn(x: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
    """A kernel that neither fakes, nor vmap, nor autograd can go through."""
    a = x.detach().numpy()
    return torch.from_numpy(a / ((a * a).mean(-1, keepdims=True) + eps) ** 0.5 * w.detach().numpy())


Norm = CustomOpDef[..., Tensor]


@pytest.fixture
def norm(registry: Registry, ns: str) -> Norm:
    return registry.custom_op(f"{ns}::norm", norm_fn, mutates_args=(), reference=plain_norm)


def inputs(n: int = 3, *, requires_grad: bool = False) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 4, requires_grad=requires_grad), torch.randn(4, requires_grad=requires_grad)


def counted(op: Any, *args: Any, **kwargs: Any) -> int:
    """Return the floating-point operations of a call, as torch counts them."""
    with FlopCounterMode(display=False) as counter:
        op(*args, **kwargs)
    return counter.get_total_flops()


#: All rules that a reference can give.
EVERYTHING: Any = get_args(Given)


def gradient(op: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(op(*args).square().sum(), args)


# Precedence ----------------------------------------------------------------------------------------------------------


def test_by_hand_counts_before_and_after(registry: Registry, ns: str) -> None:
    """A rule by hand counts whether it came before the reference or later, and the reference's again when it ends."""
    op = registry.custom_op(f"{ns}::norm", norm_fn, mutates_args=())
    x, w = inputs(requires_grad=True)
    op.register_autograd(lambda ctx, grad: (torch.full_like(x, 7.0), None, None))
    op.register_reference(plain_norm)
    (found,) = torch.autograd.grad(op(x, w.detach()).sum(), x)
    assert (found == 7).all()
    with registry.scope():
        op.register_fake(lambda x, w, eps: x.new_empty(5))
        assert op(x.to("meta"), w.to("meta")).shape == (5,)
    assert op(x.to("meta"), w.to("meta")).shape == x.shape
    with registry.scope():
        op.register_vmap(lambda info, in_dims, x, w, eps: (x * 0, 0))
        assert not torch.vmap(op, (0, None))(x.detach(), w.detach()).any()
    torch.testing.assert_close(torch.vmap(op, (0, None))(x.detach(), w.detach()), plain_norm(x, w).detach())


def test_gradients_by_hand_end(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::norm", norm_fn, mutates_args=(), reference=plain_norm)
    args = inputs(requires_grad=True)
    with registry.scope():
        op.register_autograd(lambda ctx, grad: (torch.zeros(3, 4), torch.zeros(4), None))
        assert not torch.autograd.grad(op(*args).sum(), args[0])[0].any()
    torch.testing.assert_close(gradient(op, args), gradient(plain_norm, args))


def test_a_newer_reference_counts(norm: Norm) -> None:
    args = inputs(requires_grad=True)
    norm.register_reference(lambda x, w, eps: x * w * 2)
    torch.testing.assert_close(torch.autograd.grad(norm(*args).sum(), args[0])[0], 2 * args[1].expand(3, 4).detach())


def test_it_ends_with_its_scope(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::norm", norm_fn, mutates_args=())
    x, w = inputs(requires_grad=True)
    with registry.scope():
        op.register_reference(plain_norm, gives=EVERYTHING)
        assert op.reference is plain_norm
        gradient(op, (x, w))
    assert op.reference is None
    assert {rule.kind for rule in op.describe().rules if rule.name == "by the reference"} == set()
    with pytest.raises(MissingFakeError):
        op(x.to("meta"), w.to("meta"))
    with pytest.raises(AutogradError):
        op(x, w).sum().backward()
    with pytest.warns(UserWarning, match="no vmap rule"):
        torch.vmap(op, (0, None))(x.detach(), w.detach())


def test_with_a_library(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::norm", norm_fn, mutates_args=())
    library = torch.library.Library(ns, "FRAGMENT")
    op.register_reference(plain_norm, lib=library)
    assert op.reference is plain_norm
    library._destroy()
    assert op.reference is None


def test_a_backward_by_hand_does_not_wait_for_the_derived_jvp(norm: Norm) -> None:
    """The derived jvp saves inputs in its setup_context: only where there are tangents."""
    saved: list[int] = []
    norm.register_autograd(
        lambda ctx, grad: (ctx.k * grad, None, None), setup_context=lambda ctx, inputs, output: setattr(ctx, "k", 3)
    )
    x, w = inputs()
    x.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(1) or t, lambda t: t):
        y = norm(x, w)
    assert saved == []
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], torch.full_like(x, 3))
    primals, tangents = (x.detach(), w), inputs()
    torch.testing.assert_close(torch.func.jvp(norm, primals, tangents), torch.func.jvp(plain_norm, primals, tangents))


def test_a_backward_by_hand_costs_as_much_with_a_reference(registry: Registry, ns: str) -> None:
    walks = []
    for name, reference in (("without", None), ("with_one", plain_norm)):
        op = registry.custom_op(f"{ns}::{name}", norm_fn, mutates_args=(), reference=reference)
        op.register_fake(lambda x, w, eps: torch.empty_like(x))
        op.register_autograd(lambda ctx, grad: (grad, None, None))
        x, w = inputs()
        x.requires_grad_()
        op(x, w).sum().backward()
        walks.append(_walk(lambda op=op, x=x, w=w: op(x, w).sum().backward()))
    assert walks[0] == walks[1]


def _walk(action: Any) -> list[str]:
    import sys  # noqa: PLC0415

    entered: list[str] = []
    sys.setprofile(lambda frame, event, _: entered.append(frame.f_code.co_name) if event == "call" else None)
    try:
        action()
    finally:
        sys.setprofile(None)
    return entered


# Options -------------------------------------------------------------------------------------------------------------


def test_the_functions_of_a_definition_and_of_the_library(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::norm", plain_norm_typed, mutates_args=(), reference=True)
    assert op.reference is plain_norm_typed
    other = registry.custom_op(f"{ns}::other", norm_fn, mutates_args=())
    customops.register_reference(other, plain_norm)
    customops.register_flops(other, lambda x, w, eps: 11)
    assert counted(other, *inputs()) == 11
    decorated = other.register_reference(gives="fake")(plain_norm)
    assert decorated is plain_norm


def plain_norm_typed(x: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
    return plain_norm(x, w, eps)


def test_a_reference_that_returns_its_argument(registry: Registry, ns: str) -> None:
    def fn(x: Tensor) -> Tensor:
        return x.clone()

    op = registry.custom_op(f"{ns}::f", fn, mutates_args=(), device_types="cuda")
    op.register_reference(lambda x: x.view(-1), gives=("kernel", "vmap"))
    x = torch.randn(2, 3)
    y = op(x)
    y.zero_()
    assert x.all()
    assert torch.vmap(op)(x).zero_().shape == (2, 3)
    assert x.all()


def test_a_reference_that_returns_a_tensor_twice(registry: Registry, ns: str) -> None:
    def twice(x: Tensor) -> tuple[Tensor, list[Tensor]]:
        y = x + 1
        return y, [y, y.view(-1)]

    op = registry.custom_op(f"{ns}::f", twice, mutates_args=(), device_types="cuda")
    op.register_reference(twice, gives=("kernel", "fake", "gradients", "vmap"))
    x = torch.randn(2, 3)
    for call in (op, torch.vmap(op)):
        one, (two, three) = call(x)
        one.zero_()
        two.fill_(7)
        torch.testing.assert_close(three.flatten(), (x + 1).flatten())
        assert one.eq(0).all()
        assert two.eq(7).all()


def test_on_other_devices(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::norm", norm_fn, mutates_args=(), device_types="cuda")
    args = inputs(requires_grad=True)
    op.register_reference(plain_norm)
    with pytest.raises(NotImplementedError):
        op(*args)
    op.register_reference(plain_norm, gives=("kernel", "gradients"))
    torch.testing.assert_close(op(*args), plain_norm(*args))
    torch.testing.assert_close(gradient(op, args), gradient(plain_norm, args))
    assert "by the reference" in str(op.describe())
    with torch.autocast("cpu"):
        assert op(*args).dtype == torch.float32


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # run_decompositions copies them
@pytest.mark.compile
def test_decompositions(registry: Registry, ns: str) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            return op(x, w)

    op = registry.custom_op(f"{ns}::norm", norm_fn, mutates_args=(), reference=plain_norm)
    args = inputs()

    def is_whole() -> bool:
        program = torch.export.export(Model(), args).run_decompositions()
        torch.testing.assert_close(program.module()(*args), plain_norm(*args))
        return any(getattr(node.target, "namespace", "") == ns for node in program.graph.nodes)

    assert is_whole()
    op.register_reference(plain_norm, gives=("fake", "export"))
    assert not is_whole()
    calls = []

    def counted(x: Tensor, w: Tensor, eps: float) -> Tensor:
        calls.append(1)
        return norm_fn(x, w, eps)

    op.register_kernel("cpu", counted)
    op.register_reference(plain_norm, gives=("fake", "inductor", "export"))
    torch.testing.assert_close(torch.compile(op, fullgraph=True)(*args), plain_norm(*args))
    assert calls == []


def test_without_gradients(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::norm", norm_fn, mutates_args=())
    op.register_reference(plain_norm, gives=("fake", "vmap"))
    with pytest.raises(AutogradError, match="no autograd formula"):
        op(*inputs(requires_grad=True)).sum().backward()
    never = registry.custom_op(f"{ns}::never", norm_fn, mutates_args=(), differentiable=False, reference=plain_norm)
    assert not never(*inputs(requires_grad=True)).requires_grad


def test_saving_in_the_place_of_recomputing(registry: Registry, ns: str) -> None:
    calls = []

    def counted(x: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
        calls.append(1)
        return plain_norm(x, w, eps)

    op = registry.custom_op(f"{ns}::norm", norm_fn, mutates_args=())
    op.register_reference(counted, recompute=False)
    args = inputs(requires_grad=True)
    y = op(*args)
    assert calls == [1]
    torch.testing.assert_close(torch.autograd.grad(y.square().sum(), args), gradient(plain_norm, args))
    assert calls == [1]


# Ops of other forms --------------------------------------------------------------------------------------------------


def test_in_place(registry: Registry, ns: str) -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(y)
        return x

    op = registry.custom_op(f"{ns}::mul_", fn, schema="(Tensor(a!) x, Tensor y) -> Tensor(a!)", tags=Tag.inplace)
    op.register_reference(lambda x, y: x * y)
    x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    z = x * 1
    assert op(z, y) is z
    torch.testing.assert_close(torch.autograd.grad(z.sum(), (x, y)), (y.detach(), x.detach()))
    batch, others = torch.randn(2, 3), torch.randn(2, 3)
    expected = batch * others
    assert torch.equal(torch.vmap(op)(batch, others), expected)
    assert torch.equal(batch, expected)
    assert counted(op, z.detach(), y) == 0


def test_out(registry: Registry, ns: str) -> None:
    def fn(x: Tensor, *, out: Tensor) -> Tensor:
        return torch.mul(x, 2, out=out)

    op = registry.custom_op(
        f"{ns}::double", fn, schema="(Tensor x, *, Tensor(a!) out) -> Tensor(a!)", tags=Tag.out, device_types="cuda"
    )
    op.register_reference(lambda x: x * 2, gives="kernel")
    x, out = torch.ones(3), torch.empty(3)
    assert op(x, out=out) is out
    assert out.tolist() == [2, 2, 2]


def test_an_out_variant_is_counted_as_the_op(registry: Registry, ns: str) -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        return x @ y

    op = registry.custom_op(f"{ns}::mm", fn, mutates_args=(), reference=fn)

    @op.register_out
    def _(x: Tensor, y: Tensor, *, out: Tensor) -> None:
        torch.mm(x, y, out=out)

    with FlopCounterMode(display=False) as counter:
        op.out(torch.ones(2, 3), torch.ones(3, 4), out=torch.empty(2, 4))
    assert counter.get_total_flops() == 48


def test_writes_and_returns(registry: Registry, ns: str) -> None:
    def fn(total: Mut[Tensor], count: Mut[Tensor], x: Tensor) -> Tensor:
        total.add_(x)
        count.add_(1)
        return total * 2

    def plain(total: Tensor, count: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return (total + x) * 2, total + x, count + 1

    op = registry.custom_op(f"{ns}::add", fn, device_types="cuda")
    op.register_reference(plain, gives=("kernel", "gradients"), grads_of="total")
    total, count, x = (
        torch.zeros(2, requires_grad=True),
        torch.zeros(2, dtype=torch.int64),
        torch.ones(2, requires_grad=True),
    )
    written = total * 1
    result = op(written, count, x)
    assert (written.tolist(), count.tolist(), result.tolist()) == ([1, 1], [1, 1], [2, 2])
    grads = torch.autograd.grad((result + 10 * written).sum(), (total, x))
    assert [grad.tolist() for grad in grads] == [[12, 12], [12, 12]]


def test_a_view(registry: Registry, ns: str) -> None:
    op = registry.custom_op(
        f"{ns}::tail", lambda x: x[1:], schema="(Tensor(a) x) -> Tensor(a)", reference=lambda x: x[1:]
    )
    x = torch.ones(3, requires_grad=True)
    op(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0, 1, 1]
    fake = op(torch.ones(3, device="meta"))
    assert fake._is_view()


def test_swapped(registry: Registry, ns: str) -> None:
    def fn(x: Mut[Tensor], y: Mut[Tensor]) -> None: ...

    op = registry.custom_op(f"{ns}::swap", fn, device_types="cuda")
    op.register_reference(lambda x, y: (y, x), gives="kernel")
    x, y = torch.zeros(2), torch.ones(2)
    op(x, y)
    assert (x.tolist(), y.tolist()) == ([1, 1], [0, 0])


class Split(NamedTuple):
    low: Tensor
    high: Tensor | None
    count: int


def test_rich_types(registry: Registry, ns: str) -> None:
    def fn(xs: list[Tensor], flag: bool, size: tuple[int, int] = (1, 2)) -> Split:
        return Split(xs[0].detach() * 2, xs[1].detach() * 3 if flag else None, len(xs) + size[1])

    def plain(xs: list[Tensor], flag: bool, size: tuple[int, int] = (1, 2)) -> Split:
        return Split(xs[0] * 2, xs[1] * 3 if flag else None, len(xs) + size[1])

    op = registry.custom_op(f"{ns}::split", fn, mutates_args=(), reference=plain)
    xs = [torch.randn(2, requires_grad=True), torch.randn(3, requires_grad=True)]
    for flag in (True, False):
        found = op(xs, flag)
        assert isinstance(found, Split)
        assert found.count == 4
        outputs = [x for x in (found.low, found.high) if x is not None]
        grads = torch.autograd.grad([x.sum() for x in outputs], xs, allow_unused=True)
        assert grads[0].tolist() == [2, 2]
        assert grads[1] is None or grads[1].tolist() == [3 * flag] * 3
        made = torch.compile(op, backend="aot_eager", fullgraph=True)([x.detach() for x in xs], flag)
        torch.testing.assert_close(made, plain([x.detach() for x in xs], flag))


def test_keyword_only(registry: Registry, ns: str) -> None:
    def fn(x: Tensor, *, y: Tensor, by: float = 2.0) -> Tensor:
        return x.detach() * y.detach() * by

    def plain(x: Tensor, *, y: Tensor, by: float = 2.0) -> Tensor:
        return x * y * by

    op = registry.custom_op(f"{ns}::f", fn, mutates_args=(), reference=plain)
    x, y = torch.randn(2, requires_grad=True), torch.randn(2, requires_grad=True)
    grads = torch.autograd.grad(op(x, y=y, by=3.0).sum(), (x, y))
    torch.testing.assert_close(grads, (3 * y.detach(), 3 * x.detach()))
    batched = torch.vmap(lambda x, y: op(x, y=y))(x.detach(), y.detach())
    torch.testing.assert_close(batched, 2 * (x * y).detach())


def test_random(registry: Registry, ns: str) -> None:
    def fn(x: Tensor) -> Tensor:
        return x.detach() * torch.rand_like(x)

    op = registry.custom_op(f"{ns}::noisy", fn, mutates_args=(), tags=Tag.nondeterministic_seeded)
    op.register_reference(lambda x: x * torch.rand_like(x))
    x = torch.ones(4, requires_grad=True)
    y = op(x)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], y.detach())
    assert torch.vmap(op, randomness="different")(torch.ones(3, 2)).unique().numel() == 6
    with pytest.raises((UnsupportedError, RuntimeError)):
        torch.vmap(op)(torch.ones(3, 2))


def test_an_op_of_torch(ns: str) -> None:
    """`torch.library.custom_op`, and an op defined in a Library: what they have counts."""

    @torch.library.custom_op(f"{ns}::f", mutates_args=())
    def f(x: Tensor) -> Tensor:
        return x.detach().exp()

    customops.register_reference(f"{ns}::f", torch.exp)
    x = torch.randn(3, requires_grad=True)
    torch.testing.assert_close(torch.autograd.grad(f(x).sum(), x)[0], x.detach().exp())
    assert f(x.to("meta")).shape == (3,)
    library = torch.library.Library(ns, "FRAGMENT")
    library.define("g(Tensor x) -> Tensor")
    library.impl("g", lambda x: x.sin(), "CPU")
    library.impl("g", lambda x: x.new_empty(7), "Meta")
    customops.register_reference(f"{ns}::g", torch.sin)
    g = getattr(torch.ops, ns).g
    assert g(x.to("meta")).shape == (7,)
    torch.testing.assert_close(torch.vmap(g)(x.detach()), x.detach().sin())
    torch.testing.assert_close(torch.autograd.grad(g(x).sum(), x)[0], x.detach().cos())
    customops.adopt(f"{ns}::f").unregister()
    customops.adopt(f"{ns}::g").unregister()


# States --------------------------------------------------------------------------------------------------------------


def test_states(norm: Norm) -> None:
    args = inputs(requires_grad=True)
    expected, wanted = plain_norm(*args).detach(), gradient(plain_norm, args)
    with torch.no_grad():
        assert not norm(*args).requires_grad
    with torch.inference_mode():
        torch.testing.assert_close(norm(*args), expected)
    checkpointed = torch.utils.checkpoint.checkpoint
    torch.testing.assert_close(gradient(lambda *a: checkpointed(norm, *a, use_reentrant=False), args), wanted)
    with DispatchLog() as log:
        torch.testing.assert_close(gradient(norm, args), wanted)
    assert any(norm._qualname.replace("::", ".") in name for name in log.seen)
    torch.testing.assert_close(torch.func.grad(lambda x: norm(x, args[1]).square().sum())(args[0]), wanted[0])
    found = torch.func.hessian(lambda x: norm(x, args[1].detach()).square().sum())(args[0].detach())
    torch.testing.assert_close(
        found, torch.func.hessian(lambda x: plain_norm(x, args[1].detach()).square().sum())(args[0].detach())
    )
    parameter = torch.nn.Parameter(args[0].detach())
    torch.testing.assert_close(gradient(norm, (parameter, args[1])), wanted)


@pytest.mark.parametrize("outer", ["grad", "vmap", "jvp"])
def test_vmap_inside_others(norm: Norm, outer: str) -> None:
    x, w = torch.randn(2, 3, 4), torch.randn(4)

    def per_row(op: Any) -> Any:
        return torch.vmap(op, (0, None))

    def run(op: Any) -> Any:
        if outer == "grad":
            return torch.func.grad(lambda x: per_row(op)(x, w).square().sum())(x)
        if outer == "jvp":
            return torch.func.jvp(lambda x: per_row(op)(x, w), (x,), (x,))
        return torch.vmap(per_row(op), (1, None))(x, w)

    torch.testing.assert_close(run(norm), run(plain_norm))


@pytest.mark.compile
def test_vmap_in_compiled_code(norm: Norm) -> None:
    x, w = torch.randn(2, 3, 4), torch.randn(4)
    for backend in ("aot_eager", "inductor"):
        compiled = torch.compile(lambda x, w: torch.vmap(norm, (0, None))(x, w), backend=backend, fullgraph=True)
        torch.testing.assert_close(compiled(x, w), plain_norm(x, w))


def test_threads(norm: Norm) -> None:
    def work() -> None:
        for _ in range(20):
            args = inputs(requires_grad=True)
            torch.testing.assert_close(gradient(norm, args), gradient(plain_norm, args))

    in_threads(work, 4)


PROGRAM = """
import sys
import torch
from torch import Tensor
from torch._dynamo.utils import counters
import customops

by = float(sys.argv[1])

@customops.custom_op("cached::f", mutates_args=(), reference=lambda x: x * by)
def f(x: Tensor) -> Tensor:
    return x.detach() * by

x = torch.ones(3, requires_grad=True)
torch.compile(lambda x: f(x) + 1, fullgraph=True)(x).sum().backward()
found = counters["aot_autograd"]
print(x.grad[0].item(), "hit" if found["autograd_cache_hit"] else "miss")
"""


@pytest.mark.process
@pytest.mark.compile
def test_compile_caches_know_the_reference(tmp_path: Path) -> None:
    """A second process gets the first one's graph, and another reference a graph of its own."""
    programs = [Program(PROGRAM, (by,)) for by in ("2", "2", "5")]
    assert outputs(programs, tmp_path) == ["2.0 miss\n", "2.0 hit\n", "5.0 miss\n"]


# Checking ------------------------------------------------------------------------------------------------------------


def test_check_compares_with_it(registry: Registry, ns: str) -> None:
    def wrong(x: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
        return norm_fn(x, w, eps) * 1.1

    op = registry.custom_op(f"{ns}::norm", wrong, mutates_args=())
    op.register_reference(plain_norm)
    report = customops.check(op, [inputs()], effort="quick")
    assert "other results than its reference function" in str(report)
    assert customops.check(op, [inputs()], effort="quick", only="test_kernels", reference=wrong).failures == ()


def test_check_of_arguments_by_name(registry: Registry, ns: str) -> None:
    """The reference is called with them in their places: else it would fail, and the check would not be made."""
    op = registry.custom_op(f"{ns}::norm", norm_fn, mutates_args=())
    op.register_reference(plain_norm)
    x, w = inputs()
    report = customops.check(op, [((x,), {"eps": 1.0, "w": w})], effort="quick", only="test_kernels")
    assert {result.status for result in report.results if result.check == "test_kernels"} == {"passed"}


def test_check_of_an_op_that_writes(registry: Registry, ns: str) -> None:
    def fn(cache: Mut[Tensor], x: Tensor) -> None:
        cache[: len(x)] = x + 1

    def plain(cache: Tensor, x: Tensor) -> Tensor:
        return torch.cat([x, cache[len(x) :]])

    op = registry.custom_op(f"{ns}::write", fn)
    op.register_reference(plain)
    report = customops.check(op, [(torch.zeros(4), torch.ones(2))], effort="quick")
    assert "other results than its reference function" in str(report)


# Floating-point operations --------------------------------------------------------------------------------------------


def test_what_is_not_known_is_said_once(registry: Registry, ns: str, caplog: pytest.LogCaptureFixture) -> None:
    op = registry.custom_op(f"{ns}::norm", norm_fn, mutates_args=())
    args = inputs()
    with FlopCounterMode(display=False) as counter:
        op(*args), op(*args)
    assert counter.get_total_flops() == 0
    assert [record.message for record in caplog.records] == [
        f"{ns}::norm: its floating-point operations are not known, and are not counted: there is neither a formula nor "
        "a reference; op.register_flops(fn)"
    ]


def test_a_formula(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::norm", norm_fn, mutates_args=(), reference=plain_norm)
    op.register_flops(lambda x, w, eps: 4 * x.numel())
    args = inputs()
    assert counted(op, *args) == 48
    assert counted(op, args[0], eps=1.0, w=args[1]) == 48
    with torch._subclasses.FakeTensorMode() as mode:
        assert counted(op, *map(mode.from_tensor, args)) == 48
    op.register_flops(lambda x, w, eps: -1)
    with pytest.raises(KernelError, match="did not return a number of operations"):
        counted(op, *args)


def test_the_backward_is_counted(registry: Registry, ns: str) -> None:
    """Backward runs the reference again, and its two products."""

    def fn(x: Tensor, y: Tensor) -> Tensor:
        return x.detach() @ y.detach()

    op = registry.custom_op(f"{ns}::mm", fn, mutates_args=(), reference=torch.mm)
    x, y = torch.ones(2, 3, requires_grad=True), torch.ones(3, 4, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        op(x, y).sum().backward()
    assert counter.get_total_flops() == 4 * 48


# Faults --------------------------------------------------------------------------------------------------------------


def test_another_signature(registry: Registry, ns: str) -> None:
    with pytest.raises(CallbackError, match="reference does not fit the operator"):
        registry.custom_op(f"{ns}::norm", norm_fn, mutates_args=(), reference=lambda x: x)
    assert f"{ns}::norm" not in registry
    with pytest.raises(DefinitionError, match="reference must be a function"):
        registry.custom_op(f"{ns}::norm", norm_fn, mutates_args=(), reference=3)  # type: ignore[call-overload]


def test_a_failed_registration_leaves_all_as_it_was(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::norm", norm_fn, mutates_args=())
    before = str(op.describe())
    for options, error in (
        ({"gives": "gradient"}, RegistrationError),
        ({"gives": ("fake", "magic")}, RegistrationError),
        ({"gives": 3}, RegistrationError),
        ({"nondiff_args": "z"}, DefinitionError),
    ):
        with pytest.raises(error):
            op.register_reference(plain_norm, **options)  # type: ignore[arg-type]
        assert str(op.describe()) == before
    with pytest.raises(RegistrationError, match="did you mean gives"):
        op.register_reference(plain_norm, give="fake")  # type: ignore[call-overload]


def test_a_stated_rule_that_is_not_possible_raises(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::flat", lambda x: x.view(-1), schema="(Tensor(a) x) -> Tensor(a)")
    op.register_reference(lambda x: x.view(-1))  # gives what is possible
    with pytest.raises(UnsupportedError, match=r"register_vmap\(fn\)"):
        op.register_reference(lambda x: x.view(-1), gives="vmap")


def test_an_op_that_is_replaced_comes_back(registry: Registry, ns: str) -> None:
    def fn(x: Mut[Tensor], w: Tensor, eps: float = 1e-6) -> None: ...

    op = registry.custom_op(f"{ns}::norm", norm_fn, mutates_args=(), reference=plain_norm)
    with pytest.raises(CallbackError):
        registry.custom_op(f"{ns}::norm", fn, reference=lambda: 0)
    torch.testing.assert_close(op(*inputs()[:1], torch.ones(4)).shape, torch.Size([3, 4]))


def test_another_number_of_results(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::norm", norm_fn, mutates_args=(), reference=lambda x, w, eps: (x, w))
    with pytest.raises(KernelError) as caught:
        op(*(x.to("meta") for x in inputs()))
    assert "the reference does not return what the op does" in str(caught.value)
    assert "expected: 1 results" in str(caught.value)

    def fn(x: Mut[Tensor]) -> None:
        x.add_(1)

    def writes(x: Tensor) -> None:
        x.add_(1)

    writing = registry.custom_op(f"{ns}::add", fn, device_types="cuda")
    writing.register_reference(writes, gives="kernel")
    with pytest.raises(KernelError, match="the reference does not return what the op does"):
        writing(torch.ones(2))


def test_another_result_than_the_kernel(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::norm", norm_fn, mutates_args=(), reference=lambda x, w, eps: x.sum() * w.sum())
    with pytest.raises(AutogradError, match="does not return what the op does"):
        op(*inputs(requires_grad=True)).sum().backward()


def test_a_reference_that_calls_its_op(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::norm", norm_fn, mutates_args=())
    op.register_reference(lambda x, w, eps: op(x, w, eps))
    with pytest.raises(KernelError, match="the reference calls the op itself, without end"):
        op(*(x.to("meta") for x in inputs()))


def test_a_reference_that_reads_data(registry: Registry, ns: str) -> None:
    def plain(x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x

    op = registry.custom_op(f"{ns}::f", lambda x: x * 2, schema="(Tensor x) -> Tensor", reference=plain)
    with pytest.raises(Exception, match="data"):
        torch.compile(op, backend="aot_eager", fullgraph=True)(torch.ones(2))
    x = torch.ones(2, requires_grad=True)
    assert torch.autograd.grad(op(x).sum(), x)[0].tolist() == [2, 2]


def test_flops_of_an_op_of_others_that_two_registries_adopt(ns: str) -> None:
    """Only the registry that has a formula counts."""
    op = torch.library.custom_op(f"{ns}::twice", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor")
    op.register_fake(torch.empty_like)
    customops.register_flops(op._qualname, lambda x: 7)
    customops.Registry().adopt(op._qualname)
    with FlopCounterMode(display=False) as counter:
        op(torch.ones(2))
    assert counter.get_total_flops() == 7
