"""``--customops-mode``: the ops that tests call are checked, and the tests notice nothing of it."""

from __future__ import annotations

import re

import pytest
from helpers.projects import Project

FEW = ("--customops-checks", "test_schema,test_faketensor")

TESTS = """
import torch
import OPS as ops

def test_double():
    for size in (2, 3, 4):
        assert torch.equal(ops.double(torch.ones(size)), torch.full((size,), 2.0))
    assert ops.double(torch.ones(2, dtype=torch.int64)).tolist() == [2, 2]

def test_flip():
    assert ops.flip(torch.ones(2, 3)).shape == (3, 2)

def test_flip_again():
    assert ops.flip(torch.ones(4, 5)).shape == (5, 4)
"""


def test_each_kind_of_input_is_checked_once(project: Project) -> None:
    project.write("test_own.py", TESTS)
    said = project.run("--customops-mode", *FEW, status=1)
    assert "NS::double  4 calls, 2 kinds of input: 4 passed\n" in said
    assert "NS::flip    2 calls, 1 kind of input: 1 passed, 1 failed\n" in said
    assert "  FAILED test_faketensor on x: float32 2d  (test_own.py::test_flip)\n" in said
    assert "2 ops, 3 kinds of input" in said
    assert "1 failed, 2 passed" in said
    assert "FAILED test_own.py::test_flip - the fake impl promises" in said


def test_all_checks_each_kind_in_each_test(project: Project) -> None:
    project.write("test_own.py", TESTS)
    said = project.run("--customops-mode=all", *FEW, status=1)
    assert "NS::flip    2 calls, 1 kind of input: 2 passed, 2 failed\n" in said
    assert "2 failed, 1 passed" in said


def test_without_the_option_nothing_is_checked(project: Project) -> None:
    project.write("test_own.py", TESTS)
    said = project.run(status=0)
    assert "3 passed" in said
    assert "= customops =" not in said


def test_checks_are_those_of_opcheck(project: Project) -> None:
    project.write("test_own.py", "import torch\nimport OPS as ops\n\ndef test_double(): ops.double(torch.ones(2))\n")
    said = project.run("--customops-mode", status=0)
    assert "NS::double  1 call, 1 kind of input: 3 passed, 1 not exercised" in said
    checks = "test_schema,test_autograd_registration,test_faketensor,test_aot_dispatch_dynamic"
    assert f"only {checks.replace(',', ', ')}, and not test_" in said
    assert f"; with others: --customops-checks {checks},test_gradients\n" in said


def test_what_torch_logs_of_checks_is_not_shown(project: Project) -> None:
    project.write("test_own.py", "import torch\nimport OPS as ops\n\ndef test_flip(): ops.flip(torch.ones(2, 3))\n")
    said = project.run("--customops-mode", "--customops-checks", "test_faketensor,test_aot_dispatch_dynamic", status=1)
    assert "Captured log" not in said


def test_only_some_ops(project: Project) -> None:
    project.write("test_own.py", TESTS)
    said = project.run("--customops-mode", "--customops-ops", "*::double", *FEW, status=0)
    assert "1 op, 2 kinds of input" in said


def test_ops_of_other_libraries_are_watched(project: Project) -> None:
    """Of torch.library, by packets and overloads; the ops of torch itself are not."""
    project.write(
        "test_own.py",
        """
import torch

@torch.library.custom_op("NS::theirs", mutates_args=())
def theirs(x: torch.Tensor) -> torch.Tensor:
    return x.t().clone()

theirs.register_fake(lambda x: x.new_empty(x.shape[1], x.shape[0]))

def test_calls():
    x = torch.ones(2, 3)
    theirs(x)
    torch.ops.NS.theirs(x)
    torch.ops.NS.theirs.default(x)
    torch.ops.aten.sin(x)
""",
    )
    said = project.run("--customops-mode", *FEW, status=1)
    assert "NS::theirs  3 calls, 1 kind of input: 1 passed, 1 failed" in said
    assert "1 op, 1 kind of input" in said
    assert re.search(r"  at:       .*test_own\.py:4\n", said)


QUIET = """
import pytest
import torch
import OPS as ops
from torch.utils._python_dispatch import TorchDispatchMode

class Log(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))

def test_a_mode_sees_the_call_alone():
    with Log() as log:
        ops.flip(torch.ones(2, 2, dtype=torch.float64))
    assert "NS.flip.default" in log.names
    assert not [name for name in log.names if "set_" in name or "clone" in name]

def test_a_call_that_raises():
    with pytest.raises(RuntimeError):
        ops.flip(torch.ones(2, 2, 2))

def test_writes_are_seen_before_they_happen():
    x = torch.ones(2)
    ops.add_one(x)
    assert x.tolist() == [2, 2]

def test_without_grad():
    with torch.inference_mode():
        assert ops.double(torch.ones(2)).is_inference()
    x = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        assert not ops.double(x).requires_grad
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ops.double(torch.ones(2, 2)).dtype is torch.float32

@pytest.mark.filterwarnings("ignore: There is a performance drop")
def test_in_vmap_and_on_meta():
    assert torch.func.vmap(ops.double)(torch.ones(2, 3)).shape == (2, 3)
    assert ops.double(torch.ones(2, device="meta")).is_meta

def test_random_numbers():
    torch.manual_seed(0)
    ops.double(torch.ones(1, 1, 1))
    assert torch.rand(3).tolist() == torch.rand(3, generator=torch.Generator().manual_seed(0)).tolist()
"""


def test_a_test_notices_nothing(project: Project) -> None:
    project.write("test_own.py", QUIET)
    text = (project.pytester.path / f"{project.ops}.py").read_text()
    in_place = """
@custom_op("NS::add_one", mutates_args=("x",))
def add_one(x: Tensor) -> None:
    assert x.sum() == x.numel()  # as it was in the call
    x.add_(1)
"""
    project.write(f"{project.ops}.py", text + in_place)
    said = project.run("--customops-mode", *FEW, status=0)
    assert "6 passed" in said
    assert "NS::add_one  1 call, 1 kind of input: 2 passed" in said
    assert "NS::flip     2 calls, 0 kinds of input: nothing checked" in said
    assert "not checked: 1 call: made under a mode" in said


@pytest.mark.compile
def test_programs_are_compiled_as_ever(project: Project) -> None:
    project.write(
        "test_own.py",
        """
import torch
import OPS as ops
from torch._dynamo.testing import CompileCounterWithBackend

def test_one_graph_and_then_a_dynamic_one():
    def f(x):
        return ops.double(x.sin()) + 1
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(f, fullgraph=True, backend=counter)
    for size in (3, 3, 4, 5):
        x = torch.randn(size)
        torch.testing.assert_close(compiled(x), f(x))
    assert counter.frame_count == 2
""",
    )
    said = project.run("--customops-mode", *FEW, status=0)
    assert "NS::double" in said


def test_an_op_that_is_gone_after_the_test(project: Project) -> None:
    """Calling one would end the process."""
    project.write(
        "test_own.py",
        """
import torch

def test_library():
    library = torch.library.Library("NS", "FRAGMENT")
    library.define("short(Tensor x) -> Tensor")
    library.impl("short", lambda x: x.clone(), "CPU")
    torch.ops.NS.short(torch.ones(2))
    library._destroy()
""",
    )
    said = project.run("--customops-mode", *FEW, status=0)
    assert "not checked: 1 call: the op was gone when the test was over" in said


def test_what_a_checker_calls_is_not_watched(project: Project) -> None:
    project.write(
        "test_own.py",
        "import customops, torch\nimport OPS as ops\n\n"
        "def test_check(): customops.check(ops.double, effort='quick', only='test_schema').raise_on_failure()\n",
    )
    assert "no test called an op" in project.run("--customops-mode", *FEW, status=0)


def test_a_call_that_raises_is_shown_without_the_mode(project: Project) -> None:
    project.write("test_own.py", "import torch\nimport OPS as ops\n\ndef test_flip(): ops.flip(torch.ones(2, 2, 2))\n")
    said = project.run("--customops-mode", *FEW, status=1)
    assert "watching.py" not in said


def test_an_op_that_takes_its_inputs_once(project: Project) -> None:
    project.write(
        "test_own.py",
        """
import torch

held = set()

@torch.library.custom_op("NS::acquire", mutates_args=())
def acquire(handle: int) -> int:
    held.add(handle)
    return handle

@torch.library.custom_op("NS::release", mutates_args=())
def release(handle: int) -> None:
    held.remove(handle)

acquire.register_fake(lambda handle: handle)
release.register_fake(lambda handle: None)

def test_release():
    release(acquire(3))
    assert not held
""",
    )
    said = project.run("--customops-mode", *FEW, status=0)
    assert "not checked: 1 call: the op refused the same inputs when it was called again" in said


def test_a_test_that_fails_shows_both(project: Project) -> None:
    project.write(
        "test_own.py",
        "import torch\nimport OPS as ops\n\ndef test_flip():\n    ops.flip(torch.ones(2, 3))\n    assert 0\n",
    )
    said = project.run("--customops-mode", *FEW, status=1)
    assert "assert 0" in said
    assert "the fake impl promises" in said
    assert "check:    test_faketensor" in said


def test_a_finding_is_not_hidden_by_a_test_that_is_expected_to_fail(project: Project) -> None:
    project.write(
        "test_own.py",
        "import pytest, torch\nimport OPS as ops\n\n@pytest.mark.xfail\ndef test_flip():\n"
        "    ops.flip(torch.ones(2, 3))\n    assert 0\n",
    )
    said = project.run("--customops-mode", *FEW, status=1)
    assert "test_own.py::test_flip is skipped, and calls ops that are wrong" in said


def test_classes_of_unittest_are_watched(project: Project) -> None:
    project.write(
        "test_own.py",
        "import unittest, torch\nimport OPS as ops\n\nclass Flip(unittest.TestCase):\n"
        "    def test_flip(self): ops.flip(torch.ones(2, 3))\n",
    )
    assert "FAILED test_faketensor on x: float32 2d  (test_own.py::Flip::test_flip)" in project.run(
        "--customops-mode", *FEW, status=1
    )
