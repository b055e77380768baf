"""Kernels that are measured, files of the choices, and calls that take them."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.several import Several, scale, up_to
from torch import Tensor, ones

import customops
from customops._dispatch import fingerprint
from customops._rules import choice
from customops.errors import RegistrationError
from customops.tuning import _choices as tuning
from customops.tuning import _measure


@pytest.fixture(autouse=True)
def nothing_tuned() -> Iterator[None]:
    yield
    tuning._files.clear()
    tuning._measured.clear()


@pytest.fixture
def slow(several: Several) -> Several:
    """The default kernel comes first, takes 1 ms; "quick" comes last."""
    several.add("quick", priority=-2)

    def sleepy(x: Tensor, by: float) -> Tensor:
        several.ran.append("slow")
        time.sleep(0.001)
        return x * by

    several.op.register_kernel("cpu", sleepy, name="slow", priority=5)
    return several


def line(op: str, arguments: str, kernel: str, version: str = tuning.VERSION) -> str:
    return f'"{op} | {tuning.hardware(torch.device("cpu"))} | {version} | {arguments}" = "{kernel}"\n'


def test_the_fastest_counts_for_its_bucket(slow: Several, tmp_path: Path) -> None:
    assert slow.runs(ones(8)) == "slow"
    file = tmp_path / "tuned.toml"
    (found,) = customops.tuning.autotune(slow.op, [(ones(7),), (ones(8),)], ["slow", "quick"], file=file)
    assert (found.arguments, found.kernel, found.left_out) == ("x=float32[8]", "quick", {})
    assert found.seconds["slow"] > 0.001 > found.seconds["quick"] > 0
    assert [slow.runs(ones(n)) for n in (4, 5, 8, 9)] == ["slow", "quick", "quick", "slow"]
    assert slow.runs(ones(8, dtype=torch.double)) == "slow"
    assert file.read_text().splitlines()[1:] == line(slow.op._qualname, "x=float32[8]", "quick").splitlines()


def test_the_order(several: Several, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is preferred comes before what is tuned, which comes before priorities; `when` counts; files override."""
    several.add("high", priority=3)
    several.add("few", up_to(6))
    qualname = several.op._qualname
    shipped, own = tmp_path / "shipped.toml", tmp_path / "own.toml"
    shipped.write_text(line(qualname, "x=float32[8]", "few") + line(qualname, "x=float32[2]", "few", "torch 1.0"))
    own.write_text(line(qualname, "x=float32[8]", "default"))
    assert several.runs(ones(5)) == "high"
    registration = customops.tuning.tuned(shipped)
    assert [several.runs(ones(n)) for n in (2, 5, 7)] == ["high", "few", "high"]
    assert f"named few, one of 4, tuned ({shipped})" in several.op.explain(ones(5)).steps[-1].what
    assert "named high, one of 4, not tuned for x=float32[16]" in several.op.explain(ones(9)).steps[-1].what
    notes = [rule.note for rule in several.op.describe().rules if "tuned" in rule.note]
    assert len(notes) == 1
    assert notes[0].startswith("named few, ")
    assert notes[0].endswith(f"tuned ({shipped})")
    with several.op.prefer("high"):
        assert several.runs(ones(5)) == "high"
    monkeypatch.setenv("CUSTOMOPS_TUNED_FILE", str(own))
    several.add("another", priority=-1)  # the environment is read when kernels change
    assert several.runs(ones(5)) == "default"
    monkeypatch.setenv("CUSTOMOPS_TUNED_FILE", str(tmp_path / "gone.toml"))
    with pytest.raises(RegistrationError, match="unset CUSTOMOPS_TUNED_FILE"):
        several.add("more", priority=-2)
    monkeypatch.delenv("CUSTOMOPS_TUNED_FILE")
    registration.unregister()
    assert several.runs(ones(5)) == "high"


def test_an_explanation_says_for_which_hardware_a_file_is(several: Several, tmp_path: Path) -> None:
    several.add("high", priority=3)
    (tmp_path / "t.toml").write_text(
        f'"{several.op._qualname} | cpu z80 | {tuning.VERSION} | x=float32[8]" = "default"\n'
    )
    customops.tuning.tuned(tmp_path / "t.toml")
    assert several.runs(ones(8)) == "high"
    here = tuning.hardware(torch.device("cpu"))
    what = several.op.explain(ones(8)).steps[-1].what
    assert f"named high, one of 3, not tuned for {here}, but for cpu z80" in what


def test_wrong_kernels_are_left_out(several: Several, caplog: pytest.LogCaptureFixture) -> None:
    several.op.register_kernel("cpu", lambda x, by: x * by + 1, name="wrong", priority=9)
    several.add("few", up_to(2))
    with caplog.at_level(logging.WARNING, "customops"):
        (found,) = customops.tuning.autotune(several.op, [(ones(8),)])
    assert found.left_out["wrong"].startswith("its results differ from those of reference: ")
    assert found.left_out["few"] == "rows of 2 elements at most"
    assert "wrong" not in found.seconds
    assert "few" not in found.seconds
    assert "tuning leaves out the kernel wrong for x=float32[8]: its results differ" in caplog.text


def test_kernels_that_fail_are_left_out(several: Several, caplog: pytest.LogCaptureFixture) -> None:
    several.op.register_kernel("cpu", lambda x, by: x.no_such_method(), name="fails", priority=9)
    with caplog.at_level(logging.WARNING, "customops"):
        (found,) = customops.tuning.autotune(several.op, [(ones(8),)])
    assert found.kernel in ("default", "reference")
    assert found.left_out["fails"].startswith("it raises AttributeError: ")
    assert "tuning leaves out the kernel fails" in caplog.text


def test_the_first_one_that_fails_is_left_out(registry: customops.Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::f", mutates_args=())
    def op(x: Tensor) -> Tensor:
        return x * 2

    op.register_kernel("cpu", lambda x: x.no_such_method(), name="fails", priority=3)
    (found,) = customops.tuning.autotune(op, [(ones(3),)])
    assert (found.kernel, [*found.left_out]) == ("default", ["fails"])
    with pytest.raises(AttributeError, match="no_such_method"):
        customops.tuning.autotune(op, [(ones(3),)], ["fails"])


def test_of_equally_fast_ones_the_one_that_is_asked_first(several: Several, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_measure._Call, "_seconds", lambda self, name, count: 1e-3)
    several.add("v2", priority=3)
    assert customops.tuning.autotune(several.op, [(ones(3),)])[0].kernel == "v2"


def test_factories(registry: customops.Registry, ns: str) -> None:
    """What was tuned for some arguments does not count for others: no tensors say which these are."""
    ran: list[str] = []

    def make(name: str) -> Any:
        return lambda n, device: ran.append(name) or torch.zeros(n)

    op = registry.custom_op(f"{ns}::f", make("default"), schema="(int n, Device device) -> Tensor", mutates_args=())
    op.register_kernel("cpu", make("v2"), name="v2")
    hardware = tuning.hardware(torch.device("cpu"))
    tuning.add({(f"{ns}::f", hardware, tuning.VERSION, "n=4 device=cpu"): "default"})
    for n in (4, 1000, 4, 1000):
        op(n, torch.device("cpu"))
    assert ran == ["default", "v2", "default", "v2"]


def test_the_device_of_a_number_beside_tensors(registry: customops.Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::f", mutates_args=())
    def op(scale: Tensor, x: Tensor) -> Tensor:
        return x * scale

    for number in (ones(()), ones((), device="meta")):
        found = choice.device_of(op._definition.schema, (number, ones(2, device="meta")), {})
        assert found == torch.device("meta")


def test_what_would_fail_when_all_is_measured_fails_before(slow: Several, tmp_path: Path) -> None:
    (tmp_path / "broken.toml").write_text("<<<<<<< HEAD\n")
    for file, problem in (
        (tmp_path / "none" / "t.toml", "there is no such folder"),
        (tmp_path / "broken.toml", "cannot be read"),
    ):
        with pytest.raises(RegistrationError, match=problem):
            customops.tuning.autotune(slow.op, [(ones(8),)], file=file)
        assert not slow.ran


def test_names_of_kernels_to_measure(slow: Several) -> None:
    (found,) = customops.tuning.autotune(slow.op, [(ones(8),)], "slow")
    assert [*found.seconds] == ["slow"]
    with pytest.raises(RegistrationError, match="kernels= is empty"):
        customops.tuning.autotune(slow.op, [(ones(8),)], [])


def test_writing_kernels(registry: customops.Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::add_", mutates_args=("x",))
    def add_(x: Tensor, n: int) -> None:
        time.sleep(0.001)
        x.add_(n)

    def wrong(x: Tensor, n: int) -> None:
        x.add_(n + 1)

    def quick(x: Tensor, n: int) -> None:
        x.add_(n)

    add_.register_kernel("cpu", wrong, name="wrong", priority=-1)
    add_.register_kernel("cpu", quick, name="quick", priority=-2)
    x = ones(3)
    (found,) = customops.tuning.autotune(add_, [(x, 5)])
    assert (found.kernel, found.arguments) == ("quick", "x=float32[4] n=8")
    assert found.left_out["wrong"].startswith("its results differ from those of default: ")
    assert x.tolist() == [1, 1, 1]


def test_a_key_is_the_bucket(several: Several) -> None:
    several.add("quick", lambda x: True, key=lambda x: x.shape[0] // 10, priority=-1)
    (found,) = customops.tuning.autotune(several.op, [(ones(21),)], ["quick"])
    assert (found.arguments, found.kernel) == ("x=float32 key=2", "quick")
    assert [several.runs(ones(n)) for n in (20, 29, 30, 19)] == ["quick", "quick", "default", "default"]


@pytest.mark.compile
def test_compiled_code_takes_the_choice(slow: Several, tmp_path: Path) -> None:
    file = tmp_path / "tuned.toml"
    file.write_text(line(slow.op._qualname, "x=float32[16]", "quick"))
    compiled = torch.compile(lambda x: slow.op(x) + 1, backend="aot_eager", fullgraph=True, dynamic=True)
    assert slow.runs(ones(9), call=compiled) == "slow"
    registration = customops.tuning.tuned(file)
    assert [slow.runs(ones(n), call=compiled) for n in (9, 16, 17, 8)] == ["quick", "quick", "slow", "slow"]
    before = fingerprint.of_values([slow.op._rules.kernel.traced()])
    torch.testing.assert_close(compiled(ones(16)), scale(ones(16)) + 1)
    registration.unregister()
    assert fingerprint.of_values([slow.op._rules.kernel.traced()]) != before
    assert slow.runs(ones(9), call=compiled) == "slow"


def test_files(several: Several, tmp_path: Path) -> None:
    file, one, two = tmp_path / "tuned.toml", line("a::b", "x=float32[8]", "v1"), line("a::b", "x=float32[8]", "v2")
    tuning.write(file, {("b::c", "cpu", "torch 2.13", 's="a'): "v"})
    tuning.write(file, {("a::c", "cpu", "torch 2.13", "x"): "v2"})
    lines = ['"a::c | cpu | torch 2.13 | x" = "v2"', '"b::c | cpu | torch 2.13 | s=\\"a" = "v"']
    assert file.read_text().splitlines()[1:] == lines
    assert len(tuning.read(str(file))) == 2
    for text, problem in (
        (one + two, "has two for the same"),
        ("v2\n", "cannot be read"),
        ('"a" = "b"\n', "cannot be read"),
    ):
        file.write_text(text)
        with pytest.raises(RegistrationError, match=problem) as caught:
            customops.tuning.tuned(file)
        assert f"{file}:" in str(caught.value)
    with pytest.raises(RegistrationError, match="cannot be read"):
        customops.tuning.tuned(tmp_path / "none.toml")
    with pytest.raises(RegistrationError, match="no kernel 'qick'"):
        customops.tuning.autotune(several.op, [(ones(2),)], ["qick"])
    with pytest.raises(RegistrationError, match="no samples"):
        customops.tuning.autotune(
            several.op,
        )
