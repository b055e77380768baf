"""`op.describe()`: what an op has and lacks, as data and text; what registries and the repr show."""

from __future__ import annotations

import contextlib
import enum
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.functions import double_fn
from torch import Tensor
from torch._subclasses import FakeTensorMode

import customops
from customops import Mut, Registry

HERE = Path(__file__).name


class Mode(enum.Enum):
    FAST = "fast"
    EXACT = "exact"


def scale(x: Tensor, by: float = 2.0) -> Tensor:
    """Scale a tensor.

    By a number.
    """
    return x * by


def scale_on_cpu(x: Tensor, by: float) -> Tensor:
    return x * by


def fill(x: Mut[Tensor], mode: Mode = Mode.FAST) -> None:
    x.fill_(1)


def line_of(fn: Any) -> str:
    return f"{fn.__code__.co_filename}:{fn.__code__.co_firstlineno}"


@pytest.fixture
def op(registry: Registry, ns: str) -> Any:
    return registry.custom_op(f"{ns}::scale", scale, mutates_args=())


def states(op: Any) -> dict[str, str]:
    return {support.feature: support.state for support in op.describe().supports}


def test_a_bare_op_lacks_nearly_everything(op: Any) -> None:
    found = op.describe()
    assert (found.op, found.schema) == (op._qualname, "(Tensor x, float by=2.0) -> Tensor")
    assert found.doc == "Scale a tensor."
    assert found.source == line_of(scale)
    kernel = found.rule("kernel")
    assert (kernel.target, kernel.name, kernel.where) == ("any device", "scale", line_of(scale))
    assert kernel.origin == "with the op"
    assert {kind: found.rule(kind).origin for kind in ("fake", "backward", "jvp", "vmap", "samples")} == {
        "fake": "missing",
        "backward": "missing",
        "jvp": "missing",
        "vmap": "derived",
        "samples": "missing",
    }
    assert states(op) == {
        "torch.compile": "no",
        "torch.export": "no",
        "training": "no",
        "forward mode": "no",
        "vmap": "slow",
    }
    assert {support.fix for support in found.missing} == {
        "op.register_fake(fn)",
        "op.register_autograd(fn)",
        "op.register_jvp(fn)",
    }


def test_what_is_missing_is_what_torch_refuses(op: Any) -> None:
    """The words are compared with what happens."""
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError, match="register_autograd"):
        op(x).sum().backward()
    with FakeTensorMode() as mode, pytest.raises(RuntimeError, match="no fake impl"):
        op(mode.from_tensor(torch.ones(2)))
    op.register_fake(lambda x, by: torch.empty_like(x))
    op.register_autograd(lambda ctx, grad: (grad * 2, None))
    assert states(op)["torch.compile"] == states(op)["training"] == "yes"
    op(x).sum().backward()
    with FakeTensorMode() as mode:
        assert op(mode.from_tensor(torch.ones(2))).shape == (2,)


def test_each_rule_says_where_it_is_and_where_it_was_registered(op: Any) -> None:
    op.register_kernel("cpu", scale_on_cpu)
    op.register_fake(torch.empty_like)
    op.register_reference(lambda x, by: x * by, gives="gradients")
    op.register_vmap("sequential")
    op.register_autocast("cpu", torch.bfloat16)
    op.register_samples(lambda: iter(()))
    customops.impl(op._qualname, "AutogradXPU", scale)
    found = op.describe()
    cpu = found.rule("kernel", "cpu")
    assert (cpu.name, cpu.where, cpu.origin) == ("scale_on_cpu", line_of(scale_on_cpu), "registered")
    assert HERE in cpu.registered
    assert cpu.registered != cpu.where
    assert found.rule("kernel", "other devices").name == "scale"
    fake = found.rule("fake")
    assert (fake.name, fake.where) == ("empty_like", "")
    assert HERE in fake.registered
    assert [found.rule(kind).origin for kind in ("backward", "jvp")] == ["derived", "derived"]
    assert found.rule("backward").name == "by the reference"
    assert HERE in found.rule("reference").where
    assert found.rule("vmap").name == "sequential"
    assert (found.rule("autocast").target, found.rule("autocast").name) == ("cpu", "bfloat16")
    assert found.rule("impl", "AutogradXPU").name == "scale"
    assert set(states(op).values()) == {"yes"}


def test_unregistering_shows(registry: Registry, op: Any) -> None:
    with registry.scope():
        op.register_kernel("cpu", scale_on_cpu)
        assert op.describe().rule("kernel", "cpu") is not None
    assert op.describe().rule("kernel", "cpu") is None


def test_a_switched_off_kernel_says_so(op: Any) -> None:
    op.register_kernel("cpu", scale_on_cpu)
    with op.set_kernel_enabled("cpu", False):
        assert op.describe().rule("kernel", "cpu").note == "switched off"
    assert op.describe().rule("kernel", "cpu").note == ""


def test_an_op_with_rich_types_that_writes(registry: Registry, ns: str) -> None:
    found = registry.custom_op(f"{ns}::fill", fill, bypass=True).describe()
    assert found.signature == "(x: Mut[Tensor], mode: Mode = Mode.FAST) -> None"
    assert found.schema == '(Tensor(a0!) x, str mode="FAST") -> ()'
    assert found.options == ("bypass=True",)
    assert (found.rule("fake").origin, found.rule("fake").name) == ("derived", "returns nothing")


def test_returned_aliases_are_not_compiled(registry: Registry, ns: str, lib: Any) -> None:
    """As torch.compile itself says."""
    lib.define("scale_(Tensor(a!) x) -> Tensor(a!)")
    lib.impl("scale_", lambda x: x.mul_(2), "CompositeExplicitAutograd")
    torch.library.register_fake(f"{lib.ns}::scale_", lambda x: x, lib=lib)
    first = registry.custom_op(f"{ns}::first", lambda x: x[:1], schema="(Tensor(a) x) -> Tensor(a)")
    first.register_fake(lambda x: x[:1])
    tagged = registry.custom_op(
        f"{ns}::double_", lambda x: x.mul_(2), schema="(Tensor(a!) x) -> Tensor(a!)", tags=customops.Tag.inplace
    )
    by_torch = registry.adopt(f"{lib.ns}::scale_")
    for op, fix in ((by_torch, "define it with customops.Tag"), (first, "return a copy"), (tagged, "")):
        support = next(each for each in op.describe().supports if each.feature == "torch.compile")
        assert (support.state, support.fix[: len(fix)]) == ("no" if fix else "yes", fix)
        with pytest.raises(Exception, match="alias annotations") if fix else contextlib.nullcontext():
            torch.compile(op._opoverload, fullgraph=True, backend="aot_eager")(torch.ones(2))
    assert states(registry.adopt("aten::t"))["torch.compile"] == "yes"


def test_options_are_those_in_force(registry: Registry, ns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert registry.custom_op(f"{ns}::f", double_fn, mutates_args=()).describe().options == ()
    op = registry.custom_op(f"{ns}::g", double_fn, mutates_args=(), check="first", kernel_calls_torch=False)
    assert op.describe().options == ('check="first"', "kernel_calls_torch=False")
    monkeypatch.setenv("CUSTOMOPS_EAGER", f"{ns}=1")
    monkeypatch.setenv("CUSTOMOPS_CHECK", f"{ns}=always")
    op = registry.custom_op(f"{ns}::h", double_fn, mutates_args=(), check="first")
    assert op.describe().options == ("eager=True",)


def test_an_out_variant_is_part_of_its_op(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::double", double_fn, mutates_args=())

    @op.register_out(device_types="cpu")
    def double_out(x: Tensor, *, out: Tensor) -> None:
        torch.mul(x, 2, out=out)

    found = op.describe()
    assert found.rule("out", "cpu").name == "double_out"
    assert {s.feature: s.state for s in op.out.describe().supports}["training"] == "not applicable"


def test_ops_of_others(registry: Registry, foreign: Any) -> None:
    found = foreign.describe()
    assert (found.rule("kernel", "cpu").origin, found.rule("fake").origin) == ("others", "missing")
    sin = registry.adopt("aten::sin").describe()
    assert {rule.kind: rule.origin for rule in sin.rules if rule.kind in ("fake", "backward", "vmap")} == {
        "fake": "others",
        "backward": "others",
        "vmap": "others",
    }
    assert {support.feature: support.state for support in sin.supports}["forward mode"] == "unknown"
    linear = registry.adopt("aten::linear").describe()
    assert not linear.missing


def test_ops_of_torch_library_lack_what_was_not_registered(registry: Registry, lib: Any) -> None:
    @torch.library.custom_op(f"{lib.ns}::double", mutates_args=())
    def double(x: Tensor) -> Tensor:
        return x * 2

    op = registry.adopt(f"{lib.ns}::double")
    assert {states(op)[feature] for feature in ("torch.compile", "training", "forward mode")} == {"no"}
    assert op.explain(torch.ones(2, device="meta")).raises
    double.register_fake(lambda x: torch.empty_like(x))
    double.register_autograd(lambda ctx, grad: grad * 2)
    assert states(op)["torch.compile"] == states(op)["training"] == "yes"
    found = op.describe()
    assert found.rule("fake").where.startswith(__file__)
    assert found.source.startswith(__file__)


@pytest.mark.parametrize("flag", [{"differentiable": False}, {}])
def test_declared_not_differentiable(registry: Registry, ns: str, flag: dict[str, Any]) -> None:
    op = registry.custom_op(f"{ns}::f", scale, **flag)
    assert states(op)["training"] == ("not applicable" if flag else "no")


def test_a_removed_op(registry: Registry, op: Any) -> None:
    op.unregister()
    assert op.describe().removed
    assert "calls of it raise" in str(op.describe())
    assert repr(op) == f"<CustomOpDef({op._qualname}) unregistered>"


# How it is shown -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [60, 80, 120])
def test_text_keeps_to_the_width(registry: Registry, ns: str, width: int) -> None:
    op = registry.custom_op(f"{ns}::an_operator_with_quite_a_long_name_forward", fill)
    op.register_kernel(["cpu", "cuda"], fill)
    text = op.describe().text(width)
    assert max(len(line) for line in text.splitlines() if HERE not in line) <= width
    assert "kernel cuda" in text
    assert f"{HERE}:" in text


def test_the_width_is_that_of_the_screen(op: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for columns, width in (("20", 60), ("90", 90), ("400", 120)):
        monkeypatch.setenv("COLUMNS", columns)
        assert str(op.describe()) == op.describe().text(width)


def test_the_text_of_an_op(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    op = registry.custom_op("t_described::scale", scale, mutates_args=())
    assert op.describe().text(80).splitlines() == [
        "t_described::scale (Tensor x, float by=2.0) -> Tensor",
        "  doc                  Scale a tensor.",
        f"  defined              {HERE}:{scale.__code__.co_firstlineno}",
        "  tags                 pt2_compliant_tag",
        "",
        f"  kernel any device    scale ({HERE}:{scale.__code__.co_firstlineno})",
        "  fake                 none",
        "  backward             none",
        "  jvp                  none",
        "  vmap                 one call for each element, derived",
        "  samples              none",
        "",
        "  torch.compile        no: there is no fake impl; op.register_fake(fn)",
        "  torch.export         no: there is no fake impl; op.register_fake(fn)",
        "  training             no: there is no backward; op.register_autograd(fn)",
        "  forward mode         no: there is no jvp; op.register_jvp(fn)",
        "  vmap                 slow: one call for each element; op.register_vmap(fn)",
    ]


def test_it_is_data(op: Any) -> None:
    found = json.loads(json.dumps(op.describe().to_dict()))
    assert found["rules"][0]["kind"] == "kernel"


def test_registries_list_their_ops(registry: Registry, op: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert repr(registry) == f"<Registry: {op._qualname}>"
    assert repr(Registry()) == "<Registry: no ops>"
    monkeypatch.setenv("COLUMNS", "60")
    assert max(map(len, registry.describe().splitlines())) <= 60 + len(str(Path(__file__)))
    assert f"{op._qualname}\n  schema   (Tensor x, float by=2.0) -> Tensor\n" in registry.describe()


def test_the_repr_has_the_schema(op: Any) -> None:
    assert repr(op) == f"<CustomOpDef({op._qualname}) (Tensor x, float by=2.0) -> Tensor>"


def test_the_doc_of_a_partial_is_not_that_of_partials(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::f", functools.partial(torch.mul, other=2), schema="(Tensor x) -> Tensor")
    assert op.describe().doc == ""
