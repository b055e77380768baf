"""The generated functions of each shape of op, as files in tests/codegen/generated, and how Python finds their lines.

The file of a shape shows the differences from its base, `plain` for most shapes; a shape without a base has its whole
code in a file. A change of these files is a change of the code that runs in each call: ``make generated`` writes the
files again, for review.
"""

from __future__ import annotations

import difflib
import inspect
import io
import os
import pdb
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import customops
from customops import Registry, Tag
from customops._codegen.function import fill, source_of

FOLDER = Path(customops.__file__).parents[1] / "tests" / "codegen" / "generated"
ACCEPT = bool(os.environ.get("EXPECTTEST_ACCEPT"))


def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...


WITH_SETUP = {"setup_context": setup_context}


@dataclass(frozen=True)
class Shape:
    """An op, the options of its backward, None for an op without one, and the shape that it is shown beside."""

    schema: str
    tags: tuple[torch.Tag, ...] = ()
    check: str = "always"
    bypass: bool = False
    backward: dict[str, Any] | None = None
    base: str | None = "plain"

    def define(self, registry: Registry, name: str) -> Any:
        op = registry.custom_op(
            name,
            lambda *args, **kwargs: None,
            mutates_args=re.findall(r"!\)\S* (\w+)", self.schema.partition("->")[0]),
            schema=self.schema,
            tags=self.tags,
            check=self.check,
            bypass=self.bypass,
        )
        if self.backward is not None:
            op.register_autograd(lambda ctx, *grads: None, **self.backward)
        return op

    def __str__(self) -> str:
        options = [f"tags={tag}" for tag in self.tags]
        options += [f'check="{self.check}"'] if self.check != "always" else []
        options += ["bypass=True"] if self.bypass else []
        if self.backward is None:
            options.append("no backward")
        options += [key if callable(value) else f"{key}={value}" for key, value in (self.backward or {}).items()]
        return "".join(f"# {line}\n" for line in (self.schema, ", ".join(options)) if line)


SHAPES = {
    "plain": Shape("(Tensor x, Tensor y, float by) -> Tensor", backward=WITH_SETUP, base=None),
    "no_setup": Shape("(Tensor x, Tensor y, float by) -> Tensor", backward={}),
    "no_backward": Shape("(Tensor x, Tensor y, float by) -> Tensor"),
    "once_differentiable": Shape("(Tensor x, Tensor y, float by) -> Tensor", backward={"once_differentiable": True}),
    "random": Shape("(Tensor x, Tensor y, float by) -> Tensor", (Tag.nondeterministic_seeded,), backward=WITH_SETUP),
    "bypass": Shape("(Tensor x, Tensor y, float by) -> Tensor", bypass=True, backward=WITH_SETUP),
    "defaults": Shape("(Tensor x, Tensor y, float by=1.0, SymInt n=2) -> Tensor", backward=WITH_SETUP),
    "list_default": Shape("(Tensor x, Tensor y, int[] by=[1, 2]) -> Tensor", backward=WITH_SETUP, base="defaults"),
    "keyword_only": Shape("(Tensor x, Tensor y, *, float by, bool flag=True) -> Tensor", backward={}, base="no_setup"),
    "keyword_only_tensor": Shape(
        "(Tensor x, *, Tensor? y=None, float[] by=[3.]) -> Tensor", backward={}, base="no_setup"
    ),
    "optional": Shape("(Tensor? x, Tensor y, float? by=None) -> Tensor", backward=WITH_SETUP),
    "many_tensors": Shape("(Tensor x, Tensor y, Tensor z, Tensor w, float by) -> Tensor", backward=WITH_SETUP),
    "lists": Shape("(Tensor[] x, Tensor y, float by) -> Tensor[]", backward=WITH_SETUP),
    "list_with_gaps": Shape(
        "(Tensor?[] x, Tensor y, float by) -> (Tensor, Tensor[])", backward=WITH_SETUP, base="lists"
    ),
    "several_returns": Shape("(Tensor x, Tensor y, float by) -> (Tensor, Tensor)", backward=WITH_SETUP),
    "check_first": Shape(
        "(Tensor x, Tensor y, float by) -> (Tensor, Tensor)",
        check="first",
        backward=WITH_SETUP,
        base="several_returns",
    ),
    "check_never": Shape(
        "(Tensor x, Tensor y, float by) -> (Tensor, Tensor)",
        check="never",
        backward=WITH_SETUP,
        base="several_returns",
    ),
    "tensor_and_number": Shape(
        "(Tensor x, Tensor y, float by) -> (Tensor, int)", backward=WITH_SETUP, base="several_returns"
    ),
    "no_returns": Shape("(Tensor x, Tensor y, float by) -> ()", base="no_backward"),
    "number": Shape("(Tensor x, Tensor y, float by) -> float", base="no_returns"),
    "mutates_one": Shape("(Tensor(a!) x, Tensor y, float by) -> ()", backward=WITH_SETUP),
    "mutates_several": Shape("(Tensor(a!) x, Tensor(b!)[] y, float by) -> Tensor", backward=WITH_SETUP),
    "mutates_optional": Shape(
        "(Tensor x, Tensor(a!)? y, float by) -> Tensor", backward=WITH_SETUP, base="mutates_several"
    ),
    "inplace": Shape(
        "(Tensor(a!) x, Tensor y, float by=1.0) -> Tensor(a!)", (Tag.inplace,), backward=WITH_SETUP, base="mutates_one"
    ),
    "out": Shape("(Tensor x, Tensor y, *, Tensor(a!) out) -> Tensor(a!)", (Tag.out,), base=None),
    "several_outs": Shape(
        "(Tensor x, Tensor y, *, Tensor(a!) out, Tensor(b!) more) -> (Tensor(a!), Tensor(b!))", (Tag.out,), base="out"
    ),
    "bypass_mutates": Shape("(Tensor(a!) x, Tensor y, *, int n=1) -> ()", bypass=True, base=None),
    "view": Shape("(Tensor(a) x, int dim) -> Tensor(a)", backward={}, base=None),
    "no_tensors": Shape("(SymInt[] size, *, Device device) -> Tensor", base=None),
    "odd_names": Shape(
        "(Tensor from, Tensor _result, int __fn, int type, float __debug__, float await=1.0) -> Tensor",
        backward={},
        base=None,
    ),
}


def generated(registry: Registry, ns: str, name: str) -> str:
    op = SHAPES[name].define(registry, f"{ns}::{name}")
    return f"{SHAPES[name]}\n{op.explain_call()}"


@pytest.mark.parametrize("name", SHAPES)
def test_generated_functions_are_those_of_the_file(
    registry: Registry, ns: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUSTOMOPS_CHECK", raising=False)
    text, base = generated(registry, ns, name), SHAPES[name].base
    compile(text, name, "exec")
    if base is not None:
        before = generated(registry, ns, base)
        difference = difflib.unified_diff(before.splitlines(), text.splitlines(), base, name, n=0, lineterm="")
        text = "".join(f"{line}\n" for line in difference)
    file = file_of(name)
    if ACCEPT:
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8"), "make generated, and review what changed"


def file_of(name: str) -> Path:
    return FOLDER / f"{name}.{'py' if SHAPES[name].base is None else 'diff'}"


def test_each_file_is_of_a_shape() -> None:
    files, shown = set(FOLDER.iterdir()), {file_of(name) for name in SHAPES}
    for file in files - shown if ACCEPT else ():
        file.unlink()
    assert ACCEPT or files == shown


# Reading it in a program ----------------------------------------------------------------------------------------


def functions(op: Any) -> dict[str, Callable[..., Any]]:
    """The generated functions of an op that bypasses the dispatcher and has a backward."""
    kernels = op._definition.newest_kernels()
    rule = op._rules.autograd
    node = rule.node(rule.current()).function
    return {
        "__call__": type(op).__call__,
        "autograd": kernels["Autograd"].fn,
        "kernel": kernels["CompositeExplicitAutograd"].fn,
        "forward": node.forward,
        "backward": node.backward,
    }


def test_sources_are_found(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::f", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor", bypass=True)
    op.register_autograd(lambda ctx, grad: grad * 2)
    before = op.explain_call()  # compiles those that were not called yet
    for name, fn in functions(op).items():
        assert inspect.getsource(inspect.unwrap(fn)).startswith(f"def {name}(")
        assert inspect.getsource(inspect.unwrap(fn)) in before
    x = torch.ones(1, requires_grad=True)
    op(x).backward()
    assert (op(x.detach()).item(), x.grad) == (2, 2)
    assert op.explain_call() == before


def test_other_functions_have_no_source_here() -> None:
    assert source_of(source_of) == source_of(len) == source_of(functions) == ""


def test_a_debugger_shows_the_lines(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::f", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor")
    kernel = op._definition.newest_kernels()["CompositeExplicitAutograd"].fn
    kernel(torch.ones(1))
    shown = io.StringIO()
    debugger = pdb.Pdb(stdin=io.StringIO("next\nlonglist\np x\ncontinue\n"), stdout=shown, nosigint=True, readrc=False)
    debugger.runcall(kernel, torch.ones(1))
    assert "-> _fn = _current.fn" in shown.getvalue()
    assert "def kernel(x):" in shown.getvalue()
    assert "tensor([1.])" in shown.getvalue()


def test_a_call_that_compiles_is_not_in_the_traceback_of_the_kernel(registry: Registry, ns: str) -> None:
    def fail(x: Tensor) -> Tensor:
        raise ValueError("here")

    op = registry.custom_op(f"{ns}::f", fail, mutates_args=())
    with pytest.raises(ValueError, match="here") as caught:
        op._opoverload(torch.ones(1))
    names = [entry.name for entry in caught.traceback]
    assert names[-3:] == ["kernel", "__call__", "fail"]  # it is inspected
    assert "_specialize" not in names


# Templates ------------------------------------------------------------------------------------------------------

TEMPLATE = """\
def f(self, {arguments}):
    {first}
    if {condition}:
        {block}
    return {}, {condition}
"""


def test_holes() -> None:
    filled = fill(TEMPLATE, arguments="x, y", first="", condition="x", block="y = {condition}\nz = 1\n")
    assert filled == "def f(self, x, y):\n    if x:\n        y = {condition}\n        z = 1\n    return {}, x\n"
    assert [fill("f(a, {b})\n", b=b) for b in ("", [], "b, c", ["b", "c"])] == ["f(a)\n"] * 2 + ["f(a, b, c)\n"] * 2
    assert [fill("{b}\n", b=b) for b in ("", [], "b\nc", ["b", "c"])] == [""] * 2 + ["b\nc\n"] * 2
    with pytest.raises(KeyError, match="arguments"):
        fill(TEMPLATE)


def test_a_number_and_a_tensor_of_no_tensors(registry: Registry, ns: str) -> None:
    """There is nothing that the tensor could alias."""
    op = registry.custom_op(
        f"{ns}::f",
        lambda n, device: (torch.ones(n, device=device), n),
        mutates_args=(),
        schema="(SymInt n, Device device) -> (Tensor, int)",
    )
    tensor, number = op(2, "cpu")
    assert (tensor.tolist(), number) == ([1, 1], 2)
