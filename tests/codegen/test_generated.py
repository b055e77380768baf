"""The generated functions, one file of them in tests/generated for each shape of op; and that Python finds their lines.

A shape that is like another has only its differences from that one, its base, in a file. A change of these files is a
change of what runs in each call: ``make generated`` writes them anew, for review.
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

FOLDER = Path(customops.__file__).parents[1] / "tests" / "generated"
ACCEPT = bool(os.environ.get("EXPECTTEST_ACCEPT"))


def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...


@dataclass(frozen=True)
class Shape:
    """An op, the options of its backward, None for an op without one, and the shape that it is shown beside."""

    schema: str
    tags: tuple[torch.Tag, ...] = ()
    check: str = "always"
    bypass: bool = False
    backward: dict[str, Any] | None = None
    base: str | None = None

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
    "plain": Shape("(Tensor x, Tensor y, float by) -> Tensor", backward={"setup_context": setup_context}),
    "no_backward": Shape("(Tensor x) -> Tensor", base="once_differentiable"),
    "once_differentiable": Shape("(Tensor x) -> Tensor", backward={"once_differentiable": True}),
    "defaults": Shape("(Tensor x, float by=1.0, SymInt n=2) -> Tensor", backward={}),
    "list_default": Shape("(Tensor x, int[] sizes=[1, 2], *, float[] more=[3.]) -> Tensor", backward={}),
    "keyword_only": Shape("(Tensor x, *, float by, bool flag=True) -> Tensor", backward={}),
    "keyword_only_tensor": Shape("(Tensor x, *, Tensor? y=None) -> Tensor", backward={}),
    "optional": Shape("(Tensor? x, Tensor y, float? by=None) -> Tensor", backward={}, base="plain"),
    "many_tensors": Shape("(Tensor a, Tensor b, Tensor c, Tensor d) -> Tensor", backward={}),
    "lists": Shape("(Tensor[] xs, Tensor y) -> Tensor[]", backward={}),
    "list_with_gaps": Shape("(Tensor?[] xs) -> (Tensor, Tensor[])", backward={}),
    "several_returns": Shape("(Tensor x, Tensor y) -> (Tensor, Tensor)", backward={"setup_context": setup_context}),
    "no_returns": Shape("(Tensor x) -> ()"),
    "number": Shape("(Tensor x) -> float", base="no_returns"),
    "tensor_and_number": Shape("(Tensor x) -> (Tensor, int)", backward={}, base="check_never"),
    "inplace": Shape("(Tensor(a!) x, Tensor y, float alpha=1.0) -> Tensor(a!)", (Tag.inplace,), backward={}),
    "out": Shape("(Tensor x, *, Tensor(a!) out) -> Tensor(a!)", (Tag.out,)),
    "several_outs": Shape("(Tensor x, *, Tensor(a!) u, Tensor(b!) v) -> (Tensor(a!), Tensor(b!))", (Tag.out,)),
    "mutates_one": Shape("(Tensor(a!) x, Tensor y) -> ()", backward={}),
    "mutates_several": Shape("(Tensor(a!) x, Tensor(b!)[] ys) -> Tensor", backward={}),
    "mutates_optional": Shape("(Tensor x, Tensor(a!)? seen) -> Tensor", backward={}),
    "view": Shape("(Tensor(a) x, int dim) -> Tensor(a)", backward={}),
    "no_tensors": Shape("(SymInt[] size, *, Device device) -> Tensor"),
    "keywords_as_names": Shape("(Tensor from, float __debug__, float await=1.0) -> Tensor", backward={}),
    "names_of_ours": Shape(
        "(Tensor _result, Tensor __fn, int type, int len) -> Tensor", backward={}, base="keywords_as_names"
    ),
    "random": Shape(
        "(Tensor x) -> Tensor", (torch.Tag.nondeterministic_seeded,), backward={}, base="once_differentiable"
    ),
    "check_first": Shape("(Tensor x) -> (Tensor, Tensor)", check="first", backward={}),
    "check_never": Shape("(Tensor x) -> (Tensor, Tensor)", check="never", backward={}, base="check_first"),
    "bypass": Shape("(Tensor x, Tensor? y, float by) -> Tensor", bypass=True, backward={}, base="plain"),
    "bypass_mutates": Shape("(Tensor(a!) x, Tensor y, *, int n=1) -> ()", bypass=True),
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
        difference = difflib.unified_diff(before.splitlines(), text.splitlines(), base, name, n=1, lineterm="")
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
