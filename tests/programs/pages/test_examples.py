"""Every example runs, and its op holds in whatever torch has: checks, compilers, exporters, tracers."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers.compiling import dynamo
from helpers.covers import beyond, cover, every
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import customops
from customops import CustomOpDef, Sample
from customops.testing import run_isolated

pytestmark = pytest.mark.compile


EXAMPLES = Path(__file__).parents[3] / "examples"
#: They make a device, each in a process of its own (see below), and define no op.
DEVICES = {"numpy_device", "device_ddp"}
#: Under Triton's interpreter, which has to be there before Triton is imported: in processes of their own, too.
INTERPRETED = {"triton_rms_norm"}
#: Its ops are for several processes: see tests/programs/distributed.
IN_PROCESSES = {"tensor_parallel"}
#: What examples need besides torch.
NEEDS = {"numba_scan": "numba", "tvm_ffi_add": "tvm_ffi", "jax_gelu": "jax", "warp_axpy": "warp"}
PATHS = sorted(
    path
    for path in EXAMPLES.glob("*.py")
    if path.stem not in DEVICES | INTERPRETED | IN_PROCESSES and importlib.util.find_spec(NEEDS.get(path.stem, "torch"))
)
STEMS = [path.stem for path in PATHS]
OPS = [
    f"{path.stem} {name}"
    for path in PATHS
    for name in re.findall(r'^@custom_op\("(examples::\w+)"', path.read_text(encoding="utf-8"), re.MULTILINE)
]


Op = CustomOpDef[Any, Any]


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, ModuleType]]:
    """The examples by name; their ops are gone after the tests of this file."""
    loaded = {}
    with customops.default_registry.scope():
        for path in PATHS:
            spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
            assert spec is not None
            assert spec.loader is not None
            loaded[path.stem] = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(loaded[path.stem])
        # For those who look for the tensors of a sample.
        torch.export.register_dataclass(loaded["quantized_gemm"].Quantization)
        yield loaded
        for module in loaded.values():
            del sys.modules[module.__name__]


@pytest.fixture(params=STEMS)
def module(request: pytest.FixtureRequest, modules: dict[str, ModuleType]) -> ModuleType:
    return modules[request.param]


BACKENDS = ["eager", "aot_eager", "inductor"]
#: `make test` compiles each op by one backend, and exports it in one mode; `make test-all` tries all.
COMPILED = cover(OPS, BACKENDS, of_first=1)
EXPORTED = cover(OPS, [False, True], of_first=1)

some_ops = pytest.mark.parametrize("op", every(3, OPS), indirect=True)


def pairs(second: Sequence[Any], covered: set[Any]) -> list[Any]:
    """Return parameters for each op with each of `second`; the pairs out of the cover are marked `full`."""
    return [pair if pair in covered else beyond(pair) for pair in itertools.product(OPS, second)]


@pytest.fixture(params=OPS)
def op(request: pytest.FixtureRequest, modules: dict[str, ModuleType]) -> Op:
    stem, name = request.param.split()
    values = vars(modules[stem]).values()
    (found,) = (value for value in values if isinstance(value, CustomOpDef) and value._qualname == name)
    return found


def samples(op: Op) -> list[Sample]:
    """The op's samples: fresh tensors, and the same numbers each time."""
    torch.manual_seed(0)
    return list(op.samples())


def richest(op: Op) -> int:
    """The number of the sample with most tensors that require grad."""
    counts = [sum(tensor.requires_grad for tensor in tensors_in(sample)) for sample in samples(op)]
    return counts.index(max(counts))


def tensors_in(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tuple(tree)) if isinstance(leaf, torch.Tensor)]


def outcome(fn: Callable[..., Any], sample: Sample) -> dict[str, Any]:
    """All that a call does: what it returns, what it makes of its arguments, and the gradients."""
    result = fn(*sample.args, **sample.kwargs)
    outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    leaves = [tensor for tensor in tensors_in(sample) if tensor.requires_grad]
    assert any(output.requires_grad for output in outputs) == bool(leaves)
    weighted = [(y * torch.linspace(1, 2, y.numel()).view(y.shape)).sum() for y in outputs if y.requires_grad]
    gradients = torch.autograd.grad(sum(weighted, torch.zeros(())), leaves) if leaves else ()
    return {"result": result, "arguments": tensors_in(sample), "gradients": gradients}


# -- the examples as they stand ----------------------------------------------------------------


def test_there_are_examples() -> None:
    assert {"numpy_sin", "inplace", "out", "nonzero", "factory", "lists", "train"} <= set(STEMS)
    assert {op.split()[0] for op in OPS} == set(STEMS)


def test_main_runs(module: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    module.main()
    assert capsys.readouterr().out


def test_losses_are_equal(modules: dict[str, ModuleType]) -> None:
    eager, compiled = (modules["train"].train(compiled=compiled, steps=10) for compiled in (False, True))
    assert eager == pytest.approx(compiled, rel=1e-4)
    assert eager[-1] < eager[0] / 2


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
def test_a_device_on_two_processes() -> None:
    lines = [line.split() for line in run_isolated(EXAMPLES / "device_ddp.py").stdout.splitlines()]
    assert [line[0] for line in lines] == ["DDP", "FSDP2"]
    assert all(line[2:5] == line[6:] for line in lines)


def test_a_device_in_numpy() -> None:
    code = f"import runpy; result = runpy.run_path({str(EXAMPLES / 'numpy_device.py')!r})['main']()"
    done = run_isolated(code)
    on_cpu, on_npy, counts = done.value
    assert on_npy == pytest.approx(on_cpu, rel=1e-3)
    assert on_npy[-1] < on_npy[0] / 2
    assert counts["aten::native_layer_norm"] == 2 * 30
    assert not {"aten::mm.out", "aten::addmm.out", "aten::bmm.out", "aten::_softmax.out", "aten::relu"} & set(counts)
    assert "on the CPU instead:" in done.stdout


def test_the_device_in_numpy_is_short() -> None:
    source = (EXAMPLES / "numpy_device.py").read_text(encoding="utf-8")
    (device,) = (node for node in ast.parse(source).body if getattr(node, "name", "") == "make_device")
    assert device.end_lineno - device.lineno < 60


# -- checks ------------------------------------------------------------------------------------


def test_samples(op: Op) -> None:
    assert op._qualname.startswith("examples::")
    assert len(samples(op)) >= 2
    if "backward" in op._rules.autograd.formulas:
        assert any(tensor.requires_grad for sample in samples(op) for tensor in tensors_in(sample))


@some_ops
def test_opcheck(op: Op) -> None:
    for args, kwargs in samples(op):
        customops.opcheck(op, args, kwargs)


def test_check(op: Op) -> None:
    customops.check(op, effort="quick").raise_on_failure()


# On 2.15 torch's opcheck warns so for any op, its own too.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@some_ops
def test_opcheck_of_torch(op: Op) -> None:
    for args, kwargs in samples(op):
        torch.library.opcheck(op._opoverload, *op.lower(*args, **kwargs))


# -- compilers ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("op", "backend"), pairs(BACKENDS, COMPILED), indirect=["op"])
def test_compile(op: Op, backend: str) -> None:
    expected = [outcome(op, sample) for sample in samples(op)]
    # Inductor takes seconds a program.
    chosen = [richest(op)] if backend == "inductor" else range(len(expected))
    for i in chosen:
        torch._dynamo.reset()
        compiled = torch.compile(lambda *args, **kwargs: op(*args, **kwargs), backend=backend, fullgraph=True)
        assert_close(outcome(compiled, samples(op)[i]), expected[i])


@some_ops
def test_compiled_once(op: Op) -> None:
    counter = dynamo("testing").CompileCounter()
    compiled = torch.compile(lambda *args, **kwargs: op(*args, **kwargs), backend=counter, fullgraph=True)
    for args, kwargs in [samples(op)[0], samples(op)[0]]:
        compiled(*args, **kwargs)
    assert counter.frame_count == 1


# -- exporters and tracers ---------------------------------------------------------------------


class Program(nn.Module):
    """Calls an op as a sample does. The sample's tensors are inputs, everything else is a constant."""

    def __init__(self, op: Op, sample: Sample) -> None:
        super().__init__()
        self.op = op
        self.leaves, self.spec = tree_flatten(tuple(sample))

    def forward(self, *tensors: torch.Tensor) -> Any:
        remaining = list(tensors)
        leaves = [remaining.pop(0) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        args, kwargs = tree_unflatten(leaves, self.spec)
        return self.op(*args, **kwargs)


class Tensors(Program):
    """Returns the tensors of a result, and what was made of the inputs.

    torch saves no program that returns nothing, or a NamedTuple it does not know.
    """

    def forward(self, *tensors: torch.Tensor) -> Any:
        results = tree_leaves(super().forward(*tensors))
        return [result for result in results if result is not None] + [tensor.clone() for tensor in tensors]


def flat(sample: Sample) -> Sample:
    """The inputs of its program."""
    return Sample(tuple(tensors_in(sample)), {})


@pytest.mark.parametrize(("op", "strict"), pairs([False, True], EXPORTED), indirect=["op"])
def test_export(op: Op, strict: bool) -> None:
    sample = samples(op)[richest(op)]
    exported = torch.export.export(Program(op, sample), *flat(sample), strict=strict)
    assert str(op._opoverload) in exported.graph_module.code
    expected = outcome(Program(op, sample), flat(sample))
    assert_close(outcome(exported.module(), flat(samples(op)[richest(op)])), expected)


def test_reload_where_the_example_is_imported(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    stems = ["fused_attention", "quantized_gemm", "rotary"]
    for stem in stems:
        (op, *_) = (value for value in vars(modules[stem]).values() if isinstance(value, CustomOpDef))
        sample = samples(op)[richest(op)]
        program = Tensors(op, sample)
        torch.export.save(torch.export.export(program, *flat(sample)), tmp_path / f"{stem}.pt2")
        inputs = tuple(tensor.detach() for tensor in tensors_in(sample))
        torch.save([inputs, program(*(each.clone() for each in inputs)), stem], tmp_path / f"{stem}.pt")
    done = run_isolated(RELOAD.format(folder=str(tmp_path), examples=str(EXAMPLES), stems=stems))
    assert done.value == stems


RELOAD = """
import sys, torch
sys.path.insert(0, {examples!r})
result = []
for stem in {stems}:
    __import__(stem)
    inputs, expected, name = torch.load(f"{folder}/{{stem}}.pt", weights_only=False)
    torch.testing.assert_close(torch.export.load(f"{folder}/{{stem}}.pt2").module()(*inputs), expected)
    result.append(name)
"""


def test_make_fx(op: Op) -> None:
    for i, sample in enumerate(samples(op)):
        traced = make_fx(Program(op, sample), tracing_mode="symbolic")(*tensors_in(sample))
        assert str(op._opoverload) in traced.code
        with torch.no_grad():
            ours, theirs = samples(op)[i], samples(op)[i]
            assert_close(traced(*tensors_in(ours)), op(*theirs.args, **theirs.kwargs))
            assert_close(tensors_in(ours), tensors_in(theirs))
