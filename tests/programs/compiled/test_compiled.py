"""Compiled code: writes to slices, ops that change, caches on disk, checkpoints, and whose line it is."""

from __future__ import annotations

import functools
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.compiling import dynamo
from helpers.processes import Program, outputs
from helpers.warm import PYTHON
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from customops import Registry, Tag
from customops.errors import UnregisteredError

pytestmark = pytest.mark.compile


ROOT = Path(__file__).parents[3]
BACKENDS = pytest.mark.parametrize("backend", ["aot_eager", "inductor"])


# Writes under dynamic shapes ------------------------------------------------------------------------------------


def adder(registry: Registry, ns: str, kind: str) -> Callable[[Tensor, float], Any]:
    """An op that adds to a tensor in place, declared in one of three ways."""
    if kind == "mutates":

        def add(x: Tensor, by: float) -> None:
            x.add_(by)

        return registry.custom_op(f"{ns}::add", add, mutates_args=("x",))
    if kind == "in place":

        def add_(x: Tensor, by: float) -> Tensor:
            return x.add_(by)

        return registry.custom_op(f"{ns}::add_", add_, mutates_args=("x",), tags=Tag.inplace)

    def add_out(x: Tensor, by: float, *, out: Tensor) -> Tensor:
        return out.copy_(x + by)

    op = registry.custom_op(f"{ns}::add_out", add_out, mutates_args=("out",), tags=Tag.out)
    return lambda x, by: op(x, by, out=x)


def rows(x: Tensor, add: Callable[[Tensor, float], Any]) -> Tensor:
    add(x[0], 1.0)
    add(x[1], 2.0)
    return x * 2


def halves(x: Tensor, add: Callable[[Tensor, float], Any]) -> Tensor:
    x, middle = x.clone(), x.shape[1] // 2
    add(x[:, :middle], 1.0)
    add(x[:, middle:], 2.0)
    return x


def of_a_buffer(x: Tensor, add: Callable[[Tensor, float], Any]) -> Tensor:
    buffer = torch.zeros(2, *x.shape[1:])
    add(buffer[1], 1.0)
    add(buffer[0], 2.0)
    return buffer + x


#: Dynamo takes no out= that is not contiguous.
PROGRAMS = {"mutates": (rows, halves, of_a_buffer), "in place": (rows, halves, of_a_buffer), "out": (rows, of_a_buffer)}
WRITES = [
    *((kind, "inductor", None) for kind in PROGRAMS),
    ("mutates", "inductor", True),
    ("mutates", "aot_eager", True),
]


@pytest.mark.parametrize(("kind", "backend", "dynamic"), [*WRITES, ("in place", "aot_eager", None)])
def test_writes_to_slices(registry: Registry, ns: str, backend: str, kind: str, dynamic: bool | None) -> None:
    """With sizes that are symbols, also of a second call, each slice gets its own write, inputs too."""

    def program(x: Tensor, add: Callable[[Tensor, float], Any]) -> list[Tensor]:
        return [program(x, add) for program in PROGRAMS[kind]]

    add = adder(registry, ns, kind)
    compiled = torch.compile(lambda x: program(x, add), fullgraph=True, backend=backend, dynamic=dynamic)
    for size in (4, 6, 8):
        given = torch.randn(2, size, 3)
        wanted = given.clone()
        result = compiled(given)
        torch.testing.assert_close(result, program(wanted, lambda x, by: x.add_(by)))
        torch.testing.assert_close(given, wanted)


@BACKENDS
def test_a_cache_of_keys_and_values(registry: Registry, ns: str, backend: str) -> None:
    """A cache that is an input, written at a position, and read whole."""

    def store(cache: Tensor, new: Tensor, at: int) -> None:
        cache[:, at : at + new.shape[1]] = new

    op = registry.custom_op(f"{ns}::store", store, mutates_args=("cache",))

    def step(caches: Tensor, new: Tensor, at: int) -> Tensor:
        op(caches[0], new, at)
        op(caches[1], new * 2, at)
        return caches.sum(dim=1)

    compiled = torch.compile(step, fullgraph=True, backend=backend, dynamic=True)
    caches, wanted = torch.zeros(2, 3, 8, 4), torch.zeros(2, 3, 8, 4)
    for at, length in ((0, 3), (3, 2), (5, 1)):
        new = torch.randn(3, length, 4)
        result = compiled(caches, new, at)
        wanted[0, :, at : at + length], wanted[1, :, at : at + length] = new, new * 2
        torch.testing.assert_close(caches, wanted)
        torch.testing.assert_close(result, wanted.sum(dim=1))


@BACKENDS
def test_names_of_arguments_that_torch_uses_itself(registry: Registry, ns: str, backend: str) -> None:
    """Functions of torch that take an op which writes have parameters called so (``mode`` is a common name)."""

    def scale(x: Tensor, mode: str, ctx: float, interpreter: int = 1) -> None:
        x.mul_(ctx if mode == "up" else 1 / ctx)

    op = registry.custom_op(f"{ns}::scale", scale, mutates_args=("x",))

    def program(x: Tensor) -> Tensor:
        op(x, "up", ctx=2.0)
        op(x, mode="down", ctx=4.0, interpreter=2)
        return x + 1

    x = torch.ones(3)
    assert torch.compile(program, fullgraph=True, backend=backend)(x).tolist() == [1.5] * 3
    assert x.tolist() == [0.5] * 3


@BACKENDS
def test_a_written_argument_that_is_none(registry: Registry, ns: str, backend: str) -> None:
    def f(x: Tensor, first: Tensor | None = None, second: Tensor | None = None) -> Tensor:
        for written in (first, second):
            if written is not None:
                written.add_(x)
        return x * 2

    op = registry.custom_op(f"{ns}::f", f, mutates_args=("first", "second"))
    op.register_fake(lambda x, first=None, second=None: torch.empty_like(x))
    x = torch.randn(3)
    for chosen in ([], [0], [1], [0, 1]):
        buffers = [torch.zeros(3) if i in chosen else None for i in range(2)]
        result = torch.compile(lambda x, a, b: op(x, a, b) + 1, fullgraph=True, backend=backend)(x, *buffers)
        torch.testing.assert_close(result, x * 2 + 1)
        for buffer in buffers:
            assert buffer is None or torch.equal(buffer, x)


# Ops that change ------------------------------------------------------------------------------------------------


def times(registry: Registry, ns: str, by: float) -> Any:
    op = registry.custom_op(f"{ns}::times", _scaled(by), mutates_args=())
    op.register_fake(lambda x: torch.empty_like(x))
    op.register_autograd(lambda ctx, grad: grad * by)
    return op


def _scaled(by: float) -> Callable[[Tensor], Tensor]:
    def times(x: Tensor) -> Tensor:
        return x * by

    return times


def value_and_grad(fn: Callable[[Tensor], Tensor]) -> tuple[float, float]:
    x = torch.ones(2, requires_grad=True)
    y = fn(x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    return y[0].item(), grad[0].item()


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("by_name", [False, True])
def test_compiled_code_follows_its_op(registry: Registry, ns: str, backend: str, by_name: bool) -> None:
    """Replaced, restored by a scope, removed, given another formula: a call does what an eager one does."""
    ops = {"op": times(registry, ns, 2)}
    packet = getattr(torch.ops, ns)
    compiled = torch.compile(
        (lambda x: packet.times(x) + 1) if by_name else (lambda x: ops["op"](x) + 1), fullgraph=True, backend=backend
    )
    assert value_and_grad(compiled) == (3, 2)
    ops["op"].register_autograd(lambda ctx, grad: grad * 7)
    assert value_and_grad(compiled) == (3, 7)
    ops["op"].register_kernel("cpu", lambda x: x * 5)
    assert value_and_grad(compiled) == (6, 7)
    second = ops["op"] = times(registry, ns, 10)
    packet = getattr(torch.ops, ns)
    assert value_and_grad(compiled) == (11, 10)
    with registry.scope():
        ops["op"] = times(registry, ns, 100)
        packet = getattr(torch.ops, ns)
        assert value_and_grad(compiled) == (101, 100)
    ops["op"] = second
    packet = getattr(torch.ops, ns)
    assert value_and_grad(compiled) == (11, 10)
    second.unregister()
    with pytest.raises(Exception, match=r"unregistered|AttributeError"):
        compiled(torch.ones(2))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_an_old_handle_in_compiled_code(registry: Registry, ns: str, backend: str) -> None:
    old = times(registry, ns, 2)
    compiled = torch.compile(lambda x: old(x) + 1, fullgraph=True, backend=backend)
    assert value_and_grad(compiled) == (3, 2)
    times(registry, ns, 10)
    with pytest.raises(UnregisteredError):
        old(torch.ones(2))
    with pytest.raises(Exception, match="the op was replaced by the definition at"):
        compiled(torch.ones(2))


def test_each_rule_is_followed(registry: Registry, ns: str) -> None:
    op = times(registry, ns, 2)
    counter = dynamo("testing").CompileCounter()
    compiled = torch.compile(op, backend=counter)
    compiled(torch.ones(2))
    for change in (
        lambda: op.register_fake(lambda x: torch.empty_like(x)),
        lambda: op.register_autocast("cpu", torch.bfloat16),
        lambda: op.register_vmap("sequential"),
        lambda: op.register_autograd(lambda ctx, grad: grad),
    ):
        before = counter.frame_count
        change()
        compiled(torch.ones(2))
        compiled(torch.ones(2))
        assert counter.frame_count == before + 1
    op.register_kernel("cpu", lambda x: x * 3)
    assert compiled(torch.ones(2)).tolist() == [3, 3]
    assert counter.frame_count == 5  # a kernel is opaque: nothing is compiled for it


# Caches on disk -------------------------------------------------------------------------------------------------

_PROGRAM = """
    import sys, torch
    from torch import Tensor
    from customops import custom_op

    FACTOR = {factor}

    def scale(grad):
        return grad * FACTOR

    @custom_op("disk::double", mutates_args=())
    def double(x: Tensor) -> Tensor:
        return x * 2

    double.register_fake(lambda x: torch.empty_like(x))
    double.register_autograd(lambda ctx, grad: scale(grad))
    x = torch.ones(3, requires_grad=True)
    torch.compile(lambda x: double(x) + 1, fullgraph=True)(x).sum().backward()
    plain = torch.compile(lambda x: x.sin() * 3, fullgraph=True)
    plain(torch.ones(7))
    from torch._dynamo.utils import counters
    hits = counters["aot_autograd"]["autograd_cache_hit"]
    print(x.grad[0].item(), hits)
"""


def test_a_cache_on_disk_knows_formulas(tmp_path: Path) -> None:
    """The formula of this process counts, and equal ones share what was compiled; other graphs always do."""
    programs = [Program(_PROGRAM.format(factor=factor)) for factor in (2, 5, 2)]
    found = [output.split() for output in outputs(programs, tmp_path)]
    assert found == [["2.0", "0"], ["5.0", "1"], ["2.0", "2"]]


#: Formulas that come to the number {factor} in ways that no digest of globals shows.
_REACHING = """
    import sys, types, torch
    from customops import custom_op
    from torch._dynamo.utils import counters

    def late(name):
        if name == "late":
            return {factor}
        raise AttributeError(name)

    envs = types.ModuleType("envs")
    envs.number, envs.__path__, envs.__getattr__ = {factor}, [], late
    sys.modules["envs"], torch.digest_number, NUMBER = envs, {factor}, {factor}
    torch.nn.functional.selu = lambda g: g * {factor}

    def imported(ctx, g):
        from envs import late
        return g * late

    def gradients(*formulas):
        ops = []
        for i, formula in enumerate(formulas):
            name = f"disk_reaching::op{{i}}_of_{{len(formulas)}}"
            ops.append(custom_op(name, lambda x: x * 2, schema="(Tensor x) -> Tensor"))
            ops[-1].register_fake(lambda x: torch.empty_like(x))
            ops[-1].register_autograd(formula)
        xs = [torch.ones(3, requires_grad=True) for _ in ops]
        before = counters["aot_autograd"]["autograd_cache_hit"]
        compiled = torch.compile(lambda xs: sum(op(x) for op, x in zip(ops, xs)), fullgraph=True)
        compiled(xs).sum().backward()
        print({{x.grad[0].item() for x in xs}}, counters["aot_autograd"]["autograd_cache_hit"] - before)

    gradients(
        lambda ctx, g: g * getattr(envs, "number"),
        lambda ctx, g: g * envs.late,
        lambda ctx, g: g * torch.digest_number,
        lambda ctx, g: torch.nn.functional.selu(g),
        imported,
    )
    gradients(
        lambda ctx, g: g * vars(envs)["number"],
        lambda ctx, g: g * envs.__dict__["number"],
        lambda ctx, g: g * sys.modules["envs"].number,
        lambda ctx, g: g * sys._getframe().f_globals["NUMBER"],
    )
"""


def test_a_cache_on_disk_knows_what_formulas_come_to(tmp_path: Path) -> None:
    """By value where a digest can say it; other graphs are never found again."""
    programs = [Program(_REACHING.format(factor=factor)) for factor in (2.0, 5.0, 2.0)]
    found = [output.splitlines() for output in outputs(programs, tmp_path)]
    assert found == [["{2.0} 0", "{2.0} 0"], ["{5.0} 0", "{5.0} 0"], ["{2.0} 1", "{2.0} 0"]]


def test_a_cache_on_disk_in_one_process(registry: Registry, ns: str, tmp_path: Path, monkeypatch: Any) -> None:
    """As where a cell of a notebook is run again."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for by in (2.0, 5.0):
        torch._dynamo.reset()
        op = times(registry, ns, 3.0)
        op.register_autograd(functools.partial(lambda by, ctx, grad: grad * by, by))
        compiled = torch.compile(lambda x, op=op: op(x) + 1, fullgraph=True)
        assert value_and_grad(compiled) == (4, by)


def test_compilers_are_changed_when_an_op_is_traced() -> None:
    """The order of imports does not matter."""
    script = """
        import importlib.util, sys
        {first}
        importlib.util.find_spec("torch._inductor.codecache")
        import torch._inductor.codecache, torch._inductor.lowering, torch._dynamo.guards
        {then}
        import torch
        assert not hasattr(torch._inductor.codecache.FxGraphHashDetails.__init__, "__wrapped__")
        op = customops.custom_op("changed::f", lambda x: x.clone(), schema="(Tensor x) -> Tensor")
        op.register_fake(torch.empty_like)
        torch.compile(op, backend="aot_eager")(torch.ones(2))
        assert hasattr(torch._inductor.codecache.FxGraphHashDetails.__init__, "__wrapped__")
        assert op._opoverload in torch._inductor.lowering.lowerings
    """
    for python, first, then in ((PYTHON, "import customops", ""), (sys.executable, "import torch", "import customops")):
        text = textwrap.dedent(script).format(first=first, then=then)
        subprocess.run([python, "-W", "ignore", "-c", text], cwd=ROOT, check=True)


# Checkpoints ----------------------------------------------------------------------------------------------------


@pytest.fixture
def counting(registry: Registry, ns: str) -> Any:
    """An op with a result and a gradient, that counts its calls in a buffer."""

    def count(x: Tensor, calls: Tensor) -> Tensor:
        calls.add_(1)
        return x.sin()

    op = registry.custom_op(f"{ns}::count", count, mutates_args=("calls",))
    op.register_fake(lambda x, calls: torch.empty_like(x))

    def save(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    op.register_autograd(lambda ctx, grad: (grad * ctx.saved_tensors[0].cos(), None), setup_context=save)
    return op


@pytest.mark.parametrize("backend", ["aot_eager", "aot_eager_decomp_partition", "inductor"])
@pytest.mark.parametrize(("dtype", "of_slice"), [(torch.float32, False), (torch.int64, True)])
def test_a_counter_under_a_checkpoint(counting: Any, backend: str, dtype: torch.dtype, of_slice: bool) -> None:
    calls = torch.zeros(4, dtype=dtype)

    def body(x: Tensor) -> Tensor:
        return counting(x, calls[1:2] if of_slice else calls).exp()

    compiled = torch.compile(lambda x: checkpoint(body, x, use_reentrant=False), fullgraph=True, backend=backend)
    x = torch.randn(3, requires_grad=True)
    for _ in range(2):
        (grad,) = torch.autograd.grad(compiled(x).sum(), x)
        torch.testing.assert_close(grad, (x.sin().exp() * x.cos()).detach())
    assert calls.tolist() == ([0, 2, 0, 0] if of_slice else [2, 2, 2, 2])


@pytest.mark.parametrize("backend", [None, "aot_eager", "aot_eager_decomp_partition", "inductor"])
@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE])
def test_selective_checkpointing_of_a_write(
    registry: Registry, ns: str, backend: str | None, policy: CheckpointPolicy
) -> None:
    """What was saved by policy cannot stand for what was written: the op writes again when the forward is repeated."""

    def fill(x: Tensor, out: Tensor) -> None:
        out.copy_(x.sin())

    op = registry.custom_op(f"{ns}::fill", fill, mutates_args=("out",))

    def save(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    op.register_autograd(lambda ctx, grad: (grad * ctx.saved_tensors[0].cos(), None), setup_context=save)

    def body(x: Tensor) -> Tensor:
        out = torch.full_like(x, torch.nan)
        op(x, out)
        return out.exp() * out

    def choose(ctx: Any, called: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return policy if called is op._opoverload else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, choose)

    def run(x: Tensor) -> Tensor:
        return checkpoint(body, x, use_reentrant=False, context_fn=contexts)

    if backend is not None:
        run = torch.compile(run, fullgraph=True, backend=backend)
    x = torch.linspace(0, 1, 5, requires_grad=True)
    wanted = torch.autograd.grad((x.sin().exp() * x.sin()).sum(), x)
    for _ in range(2):
        torch.testing.assert_close(torch.autograd.grad(run(x).sum(), x), wanted)


def test_mutation_of_saved_tensors(counting: Any) -> None:
    """torch copies a saved tensor before an op writes to it: the write is counted after it is done."""

    def run(count: Callable[[Tensor, Tensor], Any]) -> Tensor:
        calls = torch.full((3,), 2.0)
        x = torch.randn(3, generator=torch.Generator().manual_seed(0)).requires_grad_()
        y = x * calls
        count(x.detach(), calls)
        (grad,) = torch.autograd.grad((y * y).sum(), x)
        return grad

    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        wanted = run(lambda x, calls: calls.add_(1))
        torch.testing.assert_close(run(counting), wanted)
        torch.testing.assert_close(run(lambda x, calls: torch.ops.aten.add_(calls, 1)), wanted)


# Random ops -----------------------------------------------------------------------------------------------------


@BACKENDS
def test_two_random_calls_are_two(registry: Registry, ns: str, backend: str) -> None:
    def noise(x: Tensor) -> Tensor:
        return torch.rand_like(x)

    op = registry.custom_op(f"{ns}::noise", noise, mutates_args=(), tags=torch.Tag.nondeterministic_seeded)
    op.register_fake(lambda x: torch.empty_like(x))
    op.register_autograd(lambda ctx, grad: torch.zeros_like(grad))

    @torch.compile(fullgraph=True, backend=backend)
    def two(x: Tensor) -> Tensor:
        return torch.stack([op(x), op(x)]) * x

    first, second = two(torch.ones(8, requires_grad=True)).detach()
    assert not torch.equal(first, second)


# Frames and lines -----------------------------------------------------------------------------------------------


@pytest.mark.parity(47)
def test_no_frame_of_ours_is_compiled(registry: Registry, ns: str) -> None:
    """After a graph break in a loop Dynamo leaves the frame, and calls of ops are calls."""
    ops = []
    for i in range(9):
        op = registry.custom_op(f"{ns}::f{i}", _scaled(2.0), mutates_args=(), bypass=i % 2 == 1)
        op.register_fake(lambda x: torch.empty_like(x))
        ops.append(op)

    def with_break(x: Tensor) -> Tensor:
        for i, op in enumerate(ops):
            x = op(x)
            if i == 4:
                print(end="")
        return x

    counters = dynamo("utils").counters
    counters.clear()
    graphs = dynamo("testing").EagerAndRecordGraphs()
    compiled = torch.compile(with_break, backend=graphs)
    for _ in range(2):
        assert compiled(torch.ones(2)).tolist() == [512, 512]
    assert not graphs.graphs
    assert not counters["recompile_limit"]


@pytest.mark.parity(47)
@pytest.mark.parametrize("bypass", [False, True])
def test_a_graph_names_the_line_of_the_user(registry: Registry, ns: str, bypass: bool) -> None:
    op = registry.custom_op(f"{ns}::f", _scaled(2.0), mutates_args=(), bypass=bypass)
    op.register_fake(lambda x: torch.empty_like(x))
    graphs = dynamo("testing").EagerAndRecordGraphs()
    torch.compile(lambda x: op(op(x)), backend=graphs, fullgraph=True)(torch.ones(2))
    _, node = [node for node in graphs.graphs[0].graph.nodes if node.op == "call_function"]
    last = [line for line in node.stack_trace.splitlines() if line.strip().startswith("File")][-1]
    assert Path(__file__).name in last
