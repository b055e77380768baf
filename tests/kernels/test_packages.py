"""Kernels that installed packages offer for ops of others: a small package in a folder, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.processes import Program, outputs

import customops

pytestmark = pytest.mark.process

ROOT = Path(customops.__file__).parents[1]

#: An op of a library, that knows nothing of the package.
OP = """
import logging, sys, torch, customops
from torch import Tensor
logging.basicConfig(format="%(message)s", stream=sys.stdout)
ran = []
def plain(x: Tensor) -> Tensor:
    return x * 2
@customops.custom_op("pack::twice", mutates_args=(), reference=plain)
def twice(x: Tensor) -> Tensor:
    ran.append("default")
    return x * 2
loaded = lambda: "vendor_kernels" in sys.modules
"""

KERNELS = """
import __main__, customops, torch
def kernel(x):
    __main__.ran.append("v2")
    return x + x
def register():
    customops.register_kernel("pack::twice", "cpu", kernel, name="v2", when=lambda x: x.shape[0] > 2 or "3 rows")
def misfit():
    customops.register_kernel("pack::twice", "cpu", kernel, name="early")
    customops.register_kernel("pack::twice", "cpu", lambda x, y, z: x, name="bad")
def calls():
    assert torch.ops.pack.twice(torch.ones(1)).item() == 2
    register()
def exits():
    raise SystemExit(3)
def takes(device):
    register()
def none():
    customops.register_kernel("pack::twice", "cpu", lambda x: None, name="none")
def other():
    customops.register_kernel("pack::twice", "cpu", kernel, name="elsewhere")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "vendor_kernels.py").write_text(KERNELS)
    (tmp_path / "broken_kernels.py").write_text("def register(:\n")
    return tmp_path


def install(folder: Path, *points: str, name: str = "vendor-kernels") -> None:
    metadata = folder / f"{name.replace('-', '_')}-1.5.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
    (metadata / "entry_points.txt").write_text("\n".join(["[customops.kernels]", *points, ""]))


def python(folder: Path, *command: str) -> Any:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "caches")
    run = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


def run(folder: Path, code: str) -> list[str]:
    program = Program(f"import sys\nsys.path.insert(0, {str(folder)!r})\n{OP}{code}")
    (printed,) = outputs([program], folder / "caches")
    return printed.splitlines()


def test_it_is_loaded_when_the_device_is_first_used(folder: Path) -> None:
    install(folder, "pack.twice.cpu.v2 = vendor_kernels:register")
    code = """
print(loaded(), twice(torch.ones(2, device="meta")).shape, loaded(), twice.describe() and loaded())
for n in (4, 4, 2):
    assert twice(torch.full((n,), 3.0)).tolist() == [6.0] * n
print(loaded(), ran, twice.explain(torch.ones(4)).steps[-1].what)
with twice.prefer("reference"):
    assert twice(torch.ones(4)).tolist() == [2.0] * 4
print(ran)
"""
    assert run(folder, code) == [
        "False torch.Size([2]) False False",
        "True ['v2', 'v2', 'default'] the kernel for cpu, kernel, named v2, one of 3",
        "['v2', 'v2', 'default']",
    ]


def test_an_op_that_there_is_not(folder: Path) -> None:
    install(folder, "pack.twiec.cpu.v2 = vendor_kernels:register", "nowhere.twice.cpu.v2 = vendor_kernels:register")
    assert run(folder, "twice(torch.ones(2))") == [
        "customops.kernels: pack.twiec.cpu.v2 of vendor-kernels 1.5: there is no op pack::twiec so far; "
        "did you mean twice?"
    ]


def test_gradients_and_a_preference_of_what_is_not_loaded_yet(folder: Path) -> None:
    install(folder, "pack.twice.cpu.v2 = vendor_kernels:register")
    code = """
x = torch.ones(4, requires_grad=True)
with customops.prefer({"pack::*": "v2"}):
    twice(x).sum().backward()
print(ran, x.grad.tolist())
"""
    assert run(folder, code) == ["['v2'] [2.0, 2.0, 2.0, 2.0]"]


@pytest.mark.compile
def test_compiled_code(folder: Path) -> None:
    install(folder, "pack.twice.cpu.v2 = vendor_kernels:register")
    code = """
compiled = torch.compile(lambda x: twice(x) + 1, fullgraph=True, backend="aot_eager")
for n in (4, 4, 2):
    assert compiled(torch.full((n,), 3.0)).tolist() == [7.0] * n
print(ran)
"""
    assert run(folder, code) == ["['v2', 'v2', 'default']"]


@pytest.mark.compile
def test_code_of_inductor_and_of_a_second_process(folder: Path) -> None:
    """It calls the package's kernel, which the process loads; the keys of caches hold it, and what was tuned."""
    install(folder, "pack.twice.cpu.v2 = vendor_kernels:register")
    code = """
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code
torch._inductor.config.compile_threads = 1
def call(*sizes):
    compiled = torch.compile(lambda x: twice(x) + 1, fullgraph=True, dynamic=False)
    for n in sizes:
        result, (source,) = run_and_get_code(compiled, torch.full((n,), 3.0))
        assert result.tolist() == [7.0] * n
        print([*ran], [line.partition("kernel=")[2][:6] for line in source.splitlines() if "direct_call(" in line])
        ran.clear()
call(4, 2)
hits = counters["inductor"]["fxgraph_cache_hit"]
twice.autotune([(torch.ones(4),)], ["default"])
ran.clear()
call(4)
print(hits)
"""
    chosen = ["['v2'] [\"'v2')\"]", "['default'] [\"'defau\"]", "['default'] [\"'defau\"]"]
    assert run(folder, code) == [*chosen, "0"]
    assert run(folder, code) == [*chosen, "2"]


def test_several_threads(folder: Path) -> None:
    install(folder, "pack.twice.cpu.v2 = vendor_kernels:register")
    code = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(8) as pool:
    assert all(y.tolist() == [2.0] * 4 for y in pool.map(twice, [torch.ones(4)] * 64))
print({*ran}, len(ran), twice.describe().text().count("v2"))
"""
    assert run(folder, code)[0].startswith("{'v2'} 64")


def test_a_package_that_calls_the_op(folder: Path) -> None:
    install(folder, "pack.twice.cpu.v2 = vendor_kernels:calls")
    assert run(folder, "twice(torch.ones(4)); print(ran)") == ["['default', 'v2']"]


@pytest.mark.parametrize(
    ("point", "problem"),
    [
        ("v2 = gone_kernels:register", "ModuleNotFoundError: No module named 'gone_kernels'"),
        ("v2 = vendor_kernels:gone", "AttributeError: "),
        ("v2 = broken_kernels:register", "SyntaxError: invalid syntax (broken_kernels.py, line 1)"),
        ("v2 = vendor_kernels:exits", "SystemExit: 3"),
        ("v2 = vendor_kernels:takes", "TypeError: "),
        ("bad = vendor_kernels:misfit", "CallbackError: "),
        ("v2 = vendor_kernels:other", "it registered no kernel of this name for this device"),
    ],
)
def test_what_fails_is_reported_once_and_leaves_nothing(folder: Path, point: str, problem: str) -> None:
    install(folder, f"pack.twice.cpu.{point}")
    code = """
for _ in range(2):
    assert twice(torch.ones(4)).tolist() == [2.0] * 4
print(ran, twice._rules.kernel.names())
"""
    first, *others = run(folder, code)
    name = point.partition(" ")[0]
    assert first.startswith(f"pack::twice: the kernel {name} for cpu of vendor-kernels 1.5 is passed over: {problem}")
    assert others[-1] == "['default', 'default'] ['default', 'reference']"
    assert len([line for line in (first, *others) if "passed over" in line]) == 1


def test_two_packages_offer_a_kernel_of_one_name(folder: Path) -> None:
    point = "pack.twice.cpu.v2 = vendor_kernels:register"
    install(folder, point)
    install(folder, point, name="other-kernels")
    first, *others = run(folder, "twice(torch.ones(4)); twice(torch.ones(4)); print(ran)")
    assert "is passed over: " in first
    assert first.partition("passed over: ")[2].startswith(
        ("other-kernels 1.5 offers a kernel of this name, too", "vendor-kernels 1.5 offers a kernel of this name, too")
    )
    assert others == ["['v2', 'v2']"]


def test_a_kernel_of_the_op_with_the_name_of_an_offered_one(folder: Path) -> None:
    install(folder, "pack.twice.cpu.v2 = vendor_kernels:register")
    code = """
twice.register_kernel("cpu", lambda x: ran.append("own") or x * 2, name="v2")
twice(torch.ones(4))
print(ran, loaded())
"""
    first, second = run(folder, code)
    assert "is passed over: the op has a kernel of this name, which counts" in first
    assert second == "['own'] False"


def test_a_module_that_registers_two_kernels_when_it_is_imported(folder: Path) -> None:
    """With the entry point of the first comes the second, which is no other's."""
    (folder / "at_import.py").write_text(
        "import customops\n"
        'one = customops.register_kernel("pack::twice", "cpu", name="a", when=lambda x: True)(lambda x: x + x)\n'
        'two = customops.register_kernel("pack::twice", "cpu", name="b", when=lambda x: True)(lambda x: x + x)\n'
    )
    install(folder, "pack.twice.cpu.a = at_import", "pack.twice.cpu.b = at_import")
    (line,) = run(folder, "twice(torch.ones(4)); print(twice._rules.kernel.names())")
    assert line == "['default', 'reference', 'a', 'b']"


def test_an_offered_kernel_is_known_before_it_is_loaded(folder: Path) -> None:
    install(folder, "pack.twice.cpu.v2 = vendor_kernels:register")
    code = """
print(twice.explain(torch.ones(4)).steps[-1].what, loaded())
with twice.prefer("v2"):
    twice(torch.ones(4))
print(ran)
"""
    assert run(folder, code) == [
        "the kernel for cpu, the kernels of packages, which the first call loads False",
        "['v2']",
    ]


def test_a_device_type_that_torch_does_not_know_here(folder: Path) -> None:
    install(folder, "pack.twice.npuu.v2 = vendor_kernels:register")
    first, second = run(folder, "twice(torch.ones(4)); print(ran, loaded())")
    assert "is passed over: there is no device type npuu here" in first
    assert second == "['default'] False"


def test_an_error_of_the_first_call_names_the_kernel(folder: Path) -> None:
    install(folder, "pack.twice.cpu.none = vendor_kernels:none")
    code = """
for _ in range(2):
    try:
        twice(torch.ones(4))
    except customops.CustomOpsError as error:
        print(error.where.partition(" (")[0], "vendor_kernels.py" in error.where)
"""
    assert run(folder, code) == ["<lambda> True"] * 2


def test_a_device_that_has_no_other_kernel(folder: Path) -> None:
    install(folder, "lone.twice.cpu.v2 = gone_kernels")
    code = """
@customops.custom_op("lone::twice", mutates_args=(), device_types="cuda")
def lone(x: Tensor) -> Tensor:
    return x
for _ in range(2):
    try:
        lone(torch.ones(1))
    except NotImplementedError as error:
        print(str(error).splitlines()[0])
"""
    _, *errors = run(folder, code)
    assert len(errors) == 2
    assert all("Could not run 'lone::twice'" in each for each in errors)


def test_a_name_that_says_too_little(folder: Path) -> None:
    install(folder, "twice = vendor_kernels:register")
    (line,) = run(folder, "twice(torch.ones(4))")
    assert "twice = vendor_kernels:register is passed over" in line


def test_the_command_line_lists_them_and_loads_none(folder: Path) -> None:
    install(folder, "pack.twice.cpu.v2 = gone_kernels", "pack.norm.out.cuda.fast = vendor_kernels:register")
    listed = json.loads(python(folder, "-m", "customops", "list", "--kernels", "--json"))
    package = {"package": "vendor-kernels", "version": "1.5"}
    assert [each for each in listed if each["package"] == "vendor-kernels"] == [
        {"op": "pack::twice", "device": "cpu", "kernel": "v2", **package, "from": "gone_kernels"},
        {"op": "pack::norm.out", "device": "cuda", "kernel": "fast", **package, "from": "vendor_kernels:register"},
    ]
    wrong = subprocess.run(
        [sys.executable, "-m", "customops", "list", "--kernels", "vendor_kernels.py"], capture_output=True, text=True
    )
    assert wrong.returncode == 2
    assert "vendor_kernels.py: --kernels takes ops" in wrong.stderr
    table = python(folder, "-m", "customops", "list", "--kernels", "pack::norm*")
    assert "fast" in table
    assert "v2" not in table
