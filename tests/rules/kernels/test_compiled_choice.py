"""Several kernels in compiled and exported code: chosen while tracing, or in each call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.processes import Program, outputs
from helpers.several import Several, up_to
from torch import Tensor, ones
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing import assert_close

import customops
from customops import Registry
from customops.errors import NoKernelError, RegistrationError

pytestmark = pytest.mark.compile


def compiled(fn: Any, backend: str = "aot_eager", **options: Any) -> tuple[Any, Any]:
    counter = CompileCounterWithBackend(backend)
    return torch.compile(fn, backend=counter, fullgraph=True, **options), counter


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_what_a_predicate_read_is_a_guard(several: Several, backend: str, dynamic: bool) -> None:
    several.add("small", up_to(4))
    fn, counter = compiled(lambda x: several.op(x, 3.0) + 1, backend, dynamic=dynamic)
    for n, name in ((3, "small"), (4, "small"), (6, "default"), (8, "default"), (3, "small")):
        several.ran.clear()
        assert_close(fn(ones(2, n)), torch.full((2, n), 4.0))
        assert several.ran == [name]
    assert counter.frame_count == (2 if dynamic else 4)


def test_the_choice_is_on_the_node(several: Several, ns: str) -> None:
    several.add("small", up_to(4))
    fn, counter = compiled(lambda x: several.op(x * 2) + 1)
    fn(ones(3))
    noted = [node.meta.get("custom", {}).get("customops_kernel") for node in counter.graphs[0].graph.nodes]
    assert [each for each in noted if each] == [f"{ns}::f[small]"]


def test_the_code_of_inductor_calls_the_kernel(several: Several, ns: str) -> None:
    several.add("small", up_to(4))
    fn = torch.compile(lambda x: several.op(x * 2) + 1, fullgraph=True)
    _, (code,) = torch._inductor.utils.run_and_get_code(fn, ones(3))
    assert f"direct_call('{ns}::f', 'CPU', kernel='small')" in code


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_preference_is_a_guard(several: Several, backend: str) -> None:
    several.add("small", up_to(4))
    fn, counter = compiled(lambda x: several.op(x * 2) + 1, backend)
    assert several.runs(ones(3), call=fn) == "small"
    for _ in range(2):
        with several.op.prefer("default"):
            assert several.runs(ones(3), call=fn) == "default"
        with several.op.prefer("reference"):
            assert several.runs(ones(3), call=fn) == ""
        assert several.runs(ones(3), call=fn) == "small"
    assert counter.frame_count == 4  # the first preference is a change of the op, after which it is compiled anew


def test_a_preference_for_another_op_compiles_nothing_anew(registry: Registry, several: Several, ns: str) -> None:
    several.add("small", up_to(4))
    other = Several(registry, f"{ns}::other")
    fn, counter = compiled(lambda x: several.op(x) + 1)
    assert several.runs(ones(3), call=fn) == "small"
    with other.op.prefer("reference"):
        assert several.runs(ones(3), call=fn) == "small"
    assert counter.frame_count == 1


def test_a_first_preference_for_an_op_with_one_kernel(several: Several) -> None:
    fn, _ = compiled(lambda x: several.op(x) + 1)
    assert several.runs(ones(3), call=fn) == "default"
    with several.op.prefer("reference"):
        assert several.runs(ones(3), call=fn) == ""
    assert several.runs(ones(3), call=fn) == "default"


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_registrations_count_in_code_that_was_compiled(several: Several, backend: str) -> None:
    fn, _ = compiled(lambda x: several.op(x) + 1, backend)
    always = lambda x, by: True  # noqa: E731
    assert several.runs(ones(3), call=fn) == "default"
    several.add("small", up_to(4))
    assert several.runs(ones(3), call=fn) == "small"
    made = several.op._rules.kernel.register("cpu", several.kernel("first"), name="first", when=always, priority=9)
    assert several.runs(ones(3), call=fn) == "first"
    made.unregister()
    assert several.runs(ones(3), call=fn) == "small"


def test_a_preference_inside_of_compiled_code(several: Several, ns: str) -> None:
    """Nobody would read it: the kernel was chosen in the trace. Without fullgraph, the function runs as it is."""
    several.add("small", up_to(4))

    def of_op(x: Tensor) -> Tensor:
        with several.op.prefer("default"):
            return several.op(x) + 1

    def of_name(x: Tensor) -> Tensor:
        with customops.prefer({f"{ns}::f": "default"}):
            return several.op(x) + 1

    for program in (of_op, of_name):
        fn, _ = compiled(program)
        with pytest.raises(RegistrationError, match="cannot be entered in compiled code") as info:
            fn(ones(3))
        assert str(info.value).startswith(f"{ns}::f: a preference cannot")
        assert __file__ in (info.value.where or "")
        assert info.value.fix == "call the compiled function inside prefer(): it is compiled for each preference"
        assert several.runs(ones(3), call=torch.compile(program, backend="aot_eager")) == "default"


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_left_to_each_call(registry: Registry, ns: str, backend: str) -> None:
    several = Several(registry, f"{ns}::f", choose_when_traced=False)
    several.add("small", up_to(4))
    fn, counter = compiled(lambda x: several.op(x) + 1, backend, dynamic=True)
    assert [several.runs(ones(n), call=fn) for n in (3, 6, 9)] == ["small", "default", "default"]
    with several.op.prefer("default"):
        assert several.runs(ones(3), call=fn) == "default"
    assert counter.frame_count == 1


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_predicate_that_reads_data_is_left_to_each_call(several: Several, backend: str, caplog: Any) -> None:
    several.add("positive", lambda x: bool((x > 0).all()), key=None)
    several.add("aligned", lambda x: x.data_ptr() % 8 == 0, key=lambda x: x.data_ptr() % 8, priority=-1)
    fn, counter = compiled(lambda x: several.op(x) + 1, backend)
    assert [several.runs(x, call=fn) for x in (ones(3), -ones(3), ones(3))] == ["positive", "default", "positive"]
    assert counter.frame_count == 1
    with several.op.prefer("aligned"):
        x = ones(8)
        assert [several.runs(x[i : i + 3], call=fn) for i in (0, 1)] == ["aligned", "positive"]


def test_numbers_that_a_predicate_makes_of_data_are_left_to_each_call(several: Several) -> None:
    several.add("positive", lambda x: bool(x.max() < 2), key=lambda x: float(x.max()))
    fn, _ = compiled(lambda x: several.op(x) + 1)
    assert [several.runs(x, call=fn) for x in (ones(3), 3 * ones(3))] == ["positive", "default"]


def test_sizes_that_depend_on_data_are_left_to_each_call(several: Several) -> None:
    several.add("small", up_to(4))
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        fn, _ = compiled(lambda x: several.op(x[x.nonzero()[:, 0]]) + 1)
        assert [several.runs(ones(n), call=fn) for n in (3, 6)] == ["small", "default"]


def test_where_none_fits_the_call_says_so(registry: Registry, ns: str) -> None:
    several = Several(registry, f"{ns}::f", device_types="cuda", reference=None)
    several.add("small", up_to(4))
    fn, _ = compiled(lambda x: several.op(x) + 1, dynamic=True)
    assert several.runs(ones(3), call=fn) == "small"
    with pytest.raises(NoKernelError, match="rows of 4 elements"):
        fn(ones(6))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_training(several: Several, backend: str) -> None:
    several.add("small", up_to(4))
    several.op.register_autograd(lambda ctx, grad: (several.op(grad, 3.0), None))
    fn, _ = compiled(lambda x: several.op(x, 3.0).sum(), backend)
    for n, name in ((3, "small"), (6, "default")):
        x = ones(n, requires_grad=True)
        result = fn(x)
        several.ran.clear()
        result.backward()
        assert several.ran == [name]
        assert_close(x.grad, torch.full((n,), 3.0))


def test_the_backward_keeps_what_was_preferred(several: Several) -> None:
    several.add("small", up_to(4))
    several.op.register_autograd(lambda ctx, grad: (several.op(grad, 3.0), None))
    fn = torch.compile(lambda x: several.op(x, 3.0).sum(), fullgraph=True)
    x = ones(3, requires_grad=True)
    with several.op.prefer("default"):
        result = fn(x)
    several.ran.clear()
    result.backward()
    assert several.ran == ["default"]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_ops_that_write_and_out_variants(registry: Registry, ns: str, backend: str) -> None:
    ran: list[str] = []

    @registry.custom_op(f"{ns}::w", mutates_args=("x",))
    def write(x: Tensor) -> None:
        ran.append("default")
        x.mul_(2)

    @write.register_kernel("cpu", name="small", when=up_to(4))
    def small(x: Tensor) -> None:
        ran.append("small")
        x.mul_(2)

    def double(x: Tensor) -> Tensor:
        y = x + 0
        write(y)
        return y

    fn, _ = compiled(double, backend)
    for n, name in ((3, "small"), (6, "default")):
        assert_close(fn(ones(n)), torch.full((n,), 2.0))
        assert ran.pop() == name
        assert not ran

    op = registry.custom_op(f"{ns}::g", lambda x: x * 2, schema="(Tensor x) -> Tensor", mutates_args=())
    op.register_fake(lambda x: torch.empty_like(x))

    def fill(name: str, x: Tensor, out: Tensor) -> Tensor:
        ran.append(name)
        return torch.mul(x, 2, out=out)

    op.register_out(lambda x, *, out: fill("default", x, out))
    out = customops.adopt(f"{ns}::g.out")
    out.register_kernel("cpu", lambda x, *, out: fill("small", x, out), name="small", when=up_to(4))
    fn, _ = compiled(lambda x: op(x) + 1, backend)
    for n, name in ((3, "small"), (6, "default")):
        assert_close(fn(ones(n)), torch.full((n,), 3.0))
        assert ran == ([name] if backend == "inductor" else [])  # which calls the variant
        ran.clear()


def test_an_export_keeps_the_choice_open(several: Several) -> None:
    several.add("small", up_to(4))

    class Module(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return several.op(x) + 1

    for strict in (False, True):
        size = torch.export.Dim("n", min=2, max=64)
        program = torch.export.export(Module(), (ones(3),), dynamic_shapes=({0: size},), strict=strict)
        module = program.module()
        assert [several.runs(ones(n), call=module) for n in (3, 6, 9)] == ["small", "default", "default"]
        assert not [node for node in program.graph.nodes if "customops_kernel" in node.meta.get("custom", {})]


# Caches on disk -------------------------------------------------------------------------------------------------------

_PROGRAM = """
    import sys, torch, customops
    from torch import Tensor
    from torch._dynamo.utils import counters

    ran = []

    @customops.custom_op("disk_several::f", mutates_args=())
    def f(x: Tensor) -> Tensor:
        ran.append("default")
        return x * 2

    f.register_fake(lambda x: torch.empty_like(x))
    MOST = {most}

    @f.register_kernel("cpu", name="small", when=lambda x: x.shape[0] <= MOST)
    def small(x):
        ran.append("small")
        return x * 2

    if {another}:
        f.register_kernel("cpu", lambda x: ran.append("other") or x * 2, name="other", priority={another})

    with customops.prefer({{"disk_several::*": "{preferred}"}}):
        torch.compile(lambda x: f(x) + 1, fullgraph=True)(torch.ones(5))
    print(*ran, counters["aot_autograd"]["autograd_cache_hit"])
"""


@pytest.mark.process
def test_a_cache_on_disk_knows_kernels_predicates_and_preferences(tmp_path: Path) -> None:
    def program(most: int = 8, another: int = 0, preferred: str = "none") -> Program:
        return Program(_PROGRAM.format(most=most, another=another, preferred=preferred))

    programs = [
        program(),
        program(),
        program(most=4),
        program(another=1),
        program(another=-1),
        program(preferred="default"),
        program(preferred="default"),
        program(most=4),
    ]
    assert [output.split() for output in outputs(programs, tmp_path)] == [
        ["small", "0"],
        ["small", "1"],
        ["default", "0"],
        ["other", "0"],
        ["small", "0"],
        ["default", "0"],
        ["default", "1"],
        ["default", "1"],
    ]
