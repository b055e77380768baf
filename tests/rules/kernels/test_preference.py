"""Which kernels are preferred: in a scope, by the environment, by a file; and who sees it."""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.several import Several, up_to
from torch import ones

import customops
from customops import Registry
from customops._rules.kernel import KernelRule
from customops.errors import RegistrationError


@pytest.fixture
def three(several: Several) -> Several:
    several.add("small", up_to(4), priority=2)
    several.add("even", lambda x: x.shape[-1] % 2 == 0 or "an odd size", priority=1)
    return several


# Scopes ---------------------------------------------------------------------------------------------------------------


def test_a_scope_of_an_op(three: Several) -> None:
    for _ in range(3):
        assert three.runs(ones(4)) == "small"
        with three.op.prefer("even"):
            assert [three.runs(ones(n)) for n in (4, 3, 8, 9)] == ["even", "small", "even", "default"]
            with three.op.prefer("default"):
                assert three.runs(ones(4)) == "default"
            assert three.runs(ones(4)) == "even"
        with three.op.prefer("reference"):
            assert three.runs(ones(4)) == ""
    assert three.runs(ones(4)) == "small"


def test_several_names_in_their_order(three: Several) -> None:
    with three.op.prefer("even", "default"):
        assert [three.runs(ones(n)) for n in (4, 3)] == ["even", "default"]


def test_patterns(registry: Registry, three: Several, ns: str) -> None:
    other = Several(registry, f"{ns}::g")
    other.add("even")
    other.add("newest")
    with customops.prefer({f"{ns}::*": ["even", "reference"]}):
        assert (three.runs(ones(4)), other.runs(ones(4)), three.runs(ones(3))) == ("even", "even", "")
        late = Several(registry, f"{ns}::late")
        assert late.runs(ones(3)) == ""
    assert (three.runs(ones(4)), other.runs(ones(4)), late.runs(ones(3))) == ("small", "newest", "default")
    with customops.prefer({f"{ns}::*": "default", f"{ns}::f": "even", f"{ns}::f*": "small"}):
        assert (three.runs(ones(4)), other.runs(ones(4))) == ("even", "default")


def test_ops_instead_of_names(three: Several, ns: str) -> None:
    packet = getattr(torch.ops, ns).f
    for op in (three.op, packet, packet.default):
        with customops.prefer({op: "even"}):
            assert three.runs(ones(4)) == "even"
    assert three.runs(ones(4)) == "small"


def test_an_op_with_one_kernel(several: Several) -> None:
    with several.op.prefer("reference"):
        assert several.runs(ones(3)) == ""
    assert several.runs(ones(3)) == "default"


def test_a_scope_is_of_its_thread_and_task(three: Several) -> None:
    found = []
    with three.op.prefer("even"):
        thread = threading.Thread(target=lambda: found.append(three.runs(ones(4))))
        thread.start()
        thread.join()
    assert found == ["small"]

    async def task(name: str) -> str:
        with three.op.prefer(name):
            await asyncio.sleep(0)
            return three.runs(ones(4))

    async def both() -> list[str]:
        return await asyncio.gather(task("even"), task("default"))

    assert asyncio.run(both()) == ["even", "default"]


def test_a_thread_that_enters_while_another_tells_the_ops(several: Several, ns: str, monkeypatch: Any) -> None:
    """It waits until all ops look for the preference."""
    inside, go, ran = threading.Event(), threading.Event(), []
    tell = KernelRule.preferences_changed

    def slowly(self: KernelRule) -> None:
        if not inside.is_set():
            inside.set()
            assert go.wait(20)
        tell(self)

    monkeypatch.setattr(KernelRule, "preferences_changed", slowly)
    table = {f"{ns}::f": "reference"}
    assert several.runs(ones(2)) == "default"
    several.ran.clear()

    def enter() -> None:
        with customops.prefer(table):
            several.op(ones(2))
            ran.append([*several.ran])

    threads = [threading.Thread(target=enter) for _ in range(2)]
    threads[0].start()
    assert inside.wait(20)
    threads[1].start()
    threads[1].join(0.3)
    go.set()
    for thread in threads:
        thread.join()
    assert ran == [[], []]  # the reference, which says nothing


def test_out_variants_have_names_of_their_own(several: Several, ns: str) -> None:
    ran = []

    def fill(name: str) -> Any:
        return lambda x, by, *, out: ran.append(name) or torch.mul(x, by, out=out)

    several.op.register_out(fill("default"))
    customops.adopt(f"{ns}::f.out").register_kernel("cpu", fill("fast"), name="fast")
    call = getattr(torch.ops, ns).f.out
    for name in ("fast", "default"):
        with several.op.prefer(name):
            call(ones(3), 2.0, out=torch.empty(3))
        assert ran.pop() == name


def test_names_that_there_are_not(three: Several) -> None:
    with pytest.raises(RegistrationError, match="has no kernel 'smal'") as caught:
        three.op.prefer("smal")
    assert caught.value.fix == "did you mean small?"
    with pytest.raises(RegistrationError, match="takes names"):
        three.op.prefer()


@pytest.mark.parametrize("table", ["v2", {"f": "v2"}, {"a::f": 3}, {"a::f": []}, {"a::f": [""]}, {"a::f": "a,b"}, None])
def test_tables_that_are_none(table: Any) -> None:
    with pytest.raises(RegistrationError, match="a preference is a table") as caught:
        customops.prefer(table)
    assert caught.value.where.startswith(__file__)


# The environment ------------------------------------------------------------------------------------------------------


def test_the_environment(registry: Registry, ns: str, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("CUSTOMOPS_PREFER", f"other::*=x; {ns}::* = even, small")
    several = Several(registry, f"{ns}::f")
    several.add("small", up_to(4), priority=2)
    several.add("even", lambda x: x.shape[-1] % 2 == 0)
    assert [several.runs(ones(n)) for n in (4, 3)] == ["even", "small"]
    with several.op.prefer("default"):
        assert several.runs(ones(4)) == "default"
    file = tmp_path / "prefer.txt"
    file.write_text(f"# for the servers\n{ns}::g = small  # not yet\n\n{ns}::h = even\n")
    monkeypatch.setenv("CUSTOMOPS_PREFER_FILE", str(file))
    monkeypatch.delenv("CUSTOMOPS_PREFER")
    other = Several(registry, f"{ns}::h")
    other.add("small", up_to(4), priority=2)
    other.add("even", lambda x: x.shape[-1] % 2 == 0)
    assert [other.runs(ones(n)) for n in (4, 3)] == ["even", "small"]


def test_an_environment_that_is_wrong(registry: Registry, ns: str, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("CUSTOMOPS_PREFER", f"{ns}=even")
    with pytest.raises(RegistrationError, match="a preference is a table") as caught:
        Several(registry, f"{ns}::f")
    assert caught.value.where == "CUSTOMOPS_PREFER:1"
    assert len(str(caught.value).splitlines()) <= 5
    assert f"{ns}::f" not in registry
    monkeypatch.delenv("CUSTOMOPS_PREFER")
    monkeypatch.setenv("CUSTOMOPS_PREFER_FILE", str(tmp_path / "none"))
    with pytest.raises(RegistrationError, match="cannot be read"):
        Several(registry, f"{ns}::f")


# Who sees it ----------------------------------------------------------------------------------------------------------


def test_what_cannot_be_used_is_said_once(three: Several, ns: str, caplog: Any) -> None:
    with caplog.at_level(logging.INFO, "customops"), customops.prefer({f"{ns}::*": ["cutlass", "small"]}):
        for _ in range(3):
            for n in (9, 11):
                three.op(ones(n))
    said = [(record.levelname, record.getMessage()) for record in caplog.records if record.name == "customops"]
    end = "is preferred, and cannot be used"
    assert said == [
        ("INFO", f"{ns}::f: the kernel cutlass {end}: there is no such kernel for this device; default runs"),
        ("WARNING", f"{ns}::f: the kernel small {end}: rows of 4 elements at most; default runs"),
    ]


def test_a_name_that_there_is_not_is_a_warning_if_it_is_all_that_an_op_was_to_run(three: Several, caplog: Any) -> None:
    op = three.op._qualname
    with caplog.at_level(logging.WARNING, "customops"):
        for names in ("gone", ["nowhere", "default"]):
            with customops.prefer({op: names}):
                assert three.runs(ones(9)) == "default"
    (said,) = [record.getMessage() for record in caplog.records if record.name == "customops"]
    assert said == (
        f"{op}: the kernel gone is preferred, and cannot be used: there is no such kernel for this device; default runs"
    )


def test_a_misspelt_name_is_logged_with_the_nearest(registry: Registry, ns: str, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setenv("CUSTOMOPS_PREFER", f"{ns}::f=tritno")
    several = Several(registry, f"{ns}::f")
    several.add("triton", priority=-1)
    with caplog.at_level(logging.WARNING, "customops"):
        for _ in range(2):
            assert several.runs(ones(2)) == "default"
    assert [record.getMessage() for record in caplog.records if record.name == "customops"] == [
        f"{ns}::f: the kernel tritno is preferred, and cannot be used: there is no such kernel for this device "
        "(did you mean triton?); default runs"
    ]


def test_a_description(three: Several) -> None:
    with three.op.prefer("even"):
        found = {rule.note.split(",")[0]: rule for rule in three.op.describe().rules if rule.kind == "kernel"}
        assert "preferred" in found["named even"].note
        assert "preferred" not in found["named small"].note
    assert [rule.target for rule in found.values()].count("cpu") == 2
    assert "priority 2, when fits (" in found["named small"].note


def test_an_explanation(three: Several) -> None:
    found = three.op.explain(ones(7))
    assert found.kernel is not None
    assert found.kernel.note == "named default"
    step = found.steps[-1]
    assert step.action == "handles"
    assert step.what.endswith("named default, one of 4; not small: rows of 4 elements at most; not even: an odd size")
    with three.op.prefer("even"):
        assert "named even, one of 4, preferred" in three.op.explain(ones(8)).steps[-1].what


def test_an_explanation_where_none_fits(registry: Registry, ns: str) -> None:
    for bypass in (False, True):
        several = Several(registry, f"{ns}::f", device_types="cuda", reference=None, bypass=bypass)
        several.add("small", up_to(4))
        found = several.op.explain(ones(7))
        assert found.raises
        assert "not small: rows of 4" in found.steps[-1].what


@pytest.mark.parametrize("others", [False, True])
def test_an_explanation_says_what_a_key_of_the_author_keeps(several: Several, others: bool) -> None:
    if others:  # whose answers are kept by how the arguments look
        several.add("none", lambda x: False)
    several.add("few", lambda x: bool((x <= 5).all()), key=lambda x: x.shape[-1])
    explained = lambda x: several.op.explain(x).steps[-1].what  # noqa: E731
    big = torch.full((4,), 7.0)
    assert ", named default, one of " in explained(big)
    assert several.runs(ones(4)) == several.runs(big) == "few"
    assert ", named few, one of " in explained(big)
    assert explained(big).endswith("; chosen by an earlier call with the same key, and kept")
    assert explained(ones(4)).endswith(f", named few, one of {3 + others}")
    assert several.runs(torch.full((3,), 7.0)) == "default"


def test_profiles_and_logs(three: Several, ns: str) -> None:
    three.op(ones(9))
    with torch.profiler.profile() as profile:
        for n in (3, 8, 9):
            three.op(ones(n))
        with three.op.prefer("reference"):
            three.op(ones(3))
    names = {event.name for event in profile.events() if event.name.startswith(f"{ns}::f[")}
    assert names == {f"{ns}::f[{name}]" for name in ("small", "even", "default", "reference")}
    with customops.recording.record() as calls:
        for n in (3, 9):
            three.op(ones(n))
    assert [call.kernel for call in calls] == ["run[small]", "run[default]"]
