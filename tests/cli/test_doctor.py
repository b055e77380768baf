"""``python -m customops doctor``, and its table of private names."""

from __future__ import annotations

import pytest

from customops._cli import doctor
from customops._cli import main as check
from customops._torch import patches


def test_names_are_read_off_the_code() -> None:
    found = {name: probe for probe in doctor.probes() for name in probe.names}
    assert found["torch._C._dynamo.guards.TensorGuards"].without == "no op can be called without the dispatcher"
    found_in = found["torch._inductor.codecache.FxGraphHashDetails.__init__"]
    assert found_in.subsystem == "inductor"  # the argument of a change that `patches` lists
    assert found["torch._functorch.aot_autograd"].subsystem == "for_checks"  # what is imported late
    assert not any("is_wrapper_or_member_descriptor" in name for name in found)  # asked for with getattr
    assert len(found) > 150


def test_all_names_are_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main(["doctor"]) == 0
    assert "names are there" in capsys.readouterr().out


def test_the_places_that_are_changed_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    check.main(["doctor"])
    printed = " ".join(capsys.readouterr().out.split())
    assert all(place in printed for place in ("torch.library.Library.impl", "pytorch/pytorch#144344"))
    assert len(patches.PATCHES) == 8


def test_what_is_missing_is_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    table = (doctor.Probe("dispatch", "nothing works", ("torch._C.DispatchKey", "torch._C._gone", "torch._gone.name")),)
    monkeypatch.setattr("customops._cli.doctor.probes", lambda: table)
    assert check.main(["doctor"]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "missing: nothing works" in printed
    assert doctor.missing(table[0]) == ["torch._C._gone", "torch._gone.name"]


def test_what_came_later_is_not_missing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    table = (doctor.Probe("tags", "there are fewer tags", ("torch.Tag.of_tomorrow",), since=(9, 1)),)
    monkeypatch.setattr("customops._cli.doctor.probes", lambda: table)
    assert check.main(["doctor"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "not yet there: torch.Tag.of_tomorrow" in printed
    assert "from torch 9.1 on; until then: there are fewer tags" in printed
    monkeypatch.setattr("torch.__version__", "9.1.0")
    assert check.main(["doctor"]) == 1
    assert "missing: there are fewer tags" in capsys.readouterr().out


@pytest.mark.parametrize(("version", "newer"), [("2.15.1", False), ("9.0.0.dev1", True), ("source", True)])
def test_a_torch_that_nobody_tested(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, version: str, newer: bool
) -> None:
    monkeypatch.setattr("customops._cli.doctor.probes", tuple)
    monkeypatch.setattr("torch.__version__", version)
    assert check.main(["doctor"]) == 0
    assert ("This torch is newer than those that customops was tested on" in capsys.readouterr().out) == newer
