"""Ops with rich types in what surrounds a call: modes, subclasses, transforms, threads, checkpoints, caches."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.covers import every
from helpers.processes import Program, outputs
from products.typed_ops import OPS, ROWS
from products.typed_ops.classes import Affine, Blocks, Mode, Outer, Scaled
from products.typed_ops.row import inputs
from products.typed_ops.same import leaves, outcome, same, tensors
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from customops._dispatch.fingerprint import of_values
from customops.testing import run_isolated

every_row = pytest.mark.parametrize("name", every(4, ROWS))


def program_of(name: str, case: int = 0) -> Callable[..., Any]:
    def program(*tensors: Tensor) -> Any:
        args, kwargs = ROWS[name].cases[case].arguments(*tensors)
        return OPS[name](*args, **kwargs)

    return program


class Watching(TorchDispatchMode):
    """Notes the ops that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Wrapped(torch.Tensor):
    """A subclass that counts on nothing but ``__torch_function__`` as torch has it."""


@every_row
def test_a_dispatch_mode_sees_the_lowered_op(name: str) -> None:
    row = ROWS[name]
    with Watching() as mode:
        same(outcome(program_of(name), inputs(row)), outcome(row.cases[0].expected, inputs(row)))
    assert OPS[name]._opoverload in mode.seen


@every_row
def test_a_subclass(name: str) -> None:
    row = ROWS[name]
    found = program_of(name)(*(each.as_subclass(Wrapped) for each in inputs(row)))
    expected = row.cases[0].expected(*inputs(row))
    for x, y in zip(leaves(found), leaves(expected), strict=True):
        same(x.as_subclass(Tensor) if isinstance(x, Tensor) else x, y)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@every_row
def test_without_gradients(name: str, mode: Any) -> None:
    row = ROWS[name]
    with mode():
        same(outcome(program_of(name), inputs(row)), outcome(row.cases[0].expected, inputs(row)))


def loss(name: str) -> Callable[..., Tensor]:
    """A number of the tensors of a result."""
    program = program_of(name)
    return lambda *given: sum((x.sin().sum() for x in tensors(program(*(y.clone() for y in given)))), torch.zeros(()))


def expected_loss(name: str) -> Callable[..., Tensor]:
    expected = ROWS[name].cases[0].expected
    return lambda *given: sum((x.sin().sum() for x in tensors(expected(*(y.clone() for y in given)))), torch.zeros(()))


differentiable = pytest.mark.parametrize(
    "name", every(3, [name for name, row in ROWS.items() if row.cell("reverse") == "yes"])
)


@differentiable
def test_func_grad_and_vmap_of_it(name: str) -> None:
    given = inputs(ROWS[name])
    batches = [torch.stack([each, each + 1]) for each in given]
    same(torch.func.grad(loss(name))(*given), torch.func.grad(expected_loss(name))(*given))
    per_sample = torch.vmap(torch.func.grad(expected_loss(name)))
    same(torch.vmap(torch.func.grad(loss(name)))(*batches), per_sample(*batches))


@pytest.mark.parametrize("reentrant", [False, True])
@differentiable
def test_checkpoint(name: str, reentrant: bool) -> None:
    given = [each.requires_grad_() for each in inputs(ROWS[name])]
    wanted = torch.autograd.grad(expected_loss(name)(*given), given, allow_unused=True)
    checkpoint(loss(name), *given, use_reentrant=reentrant).backward()
    for x, grad in zip(given, wanted, strict=True):
        torch.testing.assert_close(x.grad, grad)


def test_two_threads() -> None:
    failures: list[BaseException] = []

    def work(case: int) -> None:
        try:
            for _ in range(200):
                for each in ("dataclass", "named_tuple", "affine"):
                    row = ROWS[each]
                    same(outcome(program_of(each, case), inputs(row)), outcome(row.cases[case].expected, inputs(row)))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(case,)) for case in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# Compilers --------------------------------------------------------------------------------------------------------


@pytest.mark.compile
def test_one_graph_with_rich_arguments_made_inside_and_passed_through() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, example: Any) -> Any:
        graphs.append(graph)
        return graph

    outer = Outer(Blocks(2), window=(0, 0))

    def program(x: Tensor, mode: Mode, given: Affine) -> Any:
        x = OPS["nested_dataclass"](x, outer)
        x = OPS["dataclass"](x, Blocks(1, 1.0, mode, ()))
        x = OPS["affine"](x, given)
        scaled = OPS["named_tuple"](x, True)
        assert isinstance(scaled, Scaled)
        return OPS["a_dataclass"](scaled.out, 3.0), scaled

    x, w = inputs(ROWS["affine"])[:2]
    found = torch.compile(program, backend=backend, fullgraph=True)(x, Mode.DOWN, Affine(w))
    same(found, program(x, Mode.DOWN, Affine(w)))
    (graph,) = graphs
    called = {node.target for node in graph.graph.nodes if node.op == "call_function"}
    names = ("nested_dataclass", "dataclass", "affine", "named_tuple", "a_dataclass")
    assert {OPS[name]._opoverload for name in names} <= called


@pytest.mark.compile
@pytest.mark.parametrize("name", ["affine", "named_tuple", "float_or_tensor", "weights", "keyed", "nested_lists"])
def test_gradients_of_compiled_calls(name: str) -> None:
    given = [each.requires_grad_() for each in inputs(ROWS[name])]
    compiled = torch.compile(loss(name), backend="aot_eager", fullgraph=True)
    found = torch.autograd.grad(compiled(*given), given, allow_unused=True)
    wanted = torch.autograd.grad(expected_loss(name)(*given), given, allow_unused=True)
    for x, y in zip(found, wanted, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            torch.testing.assert_close(x, y)


CACHED = """
import sys
sys.path.insert(0, {tests!r})
import torch
from products.typed_ops import OPS
from products.typed_ops.classes import Blocks, Mode

def program(x, mode):
    return OPS["dataclass"](x.sin(), Blocks(2, 3.0, mode)).cos(), OPS["maybe"](x, True), OPS["enum"](x, mode)

x = torch.ones(3, dtype=torch.float64)
for mode in Mode:
    for y, z in zip(torch.compile(program, fullgraph=True)(x, mode), program(x, mode)):
        torch.testing.assert_close(y, z)
counters = torch._dynamo.utils.counters
result = counters["aot_autograd"]["autograd_cache_hit"], counters["aot_autograd"]["autograd_cache_miss"]
"""


def digests() -> dict[str, str]:
    """What caches on disk tell the ops by."""
    return {name: of_values(op._traced()) for name, op in OPS.items()}


@pytest.mark.process
def test_digests_are_the_same_in_each_process() -> None:
    first, second = (run_isolated(digests, env={"PYTHONHASHSEED": seed}).value for seed in ("0", "1"))
    assert first == second


@pytest.mark.compile
@pytest.mark.process
def test_a_second_process_takes_what_the_first_compiled(tmp_path: Path) -> None:
    code = CACHED.format(tests=str(Path(__file__).parents[2]))
    found = [output.split() for output in outputs([Program(code + "print(*result)")] * 2, tmp_path)]
    assert found == [["0", "2"], ["2", "0"]]
