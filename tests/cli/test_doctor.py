"""``python -m customops doctor``, and its table of private names."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import customops
from customops._cli import main as check
from customops._torch import probes

FOLDER = Path(customops.__file__).parent / "_torch"


def private_names(source: str) -> set[str]:
    """The names under ``_C`` that a module uses, dotted, as far as they go."""
    tree = ast.parse(source)
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    texts = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute) and id(node) not in inner]
    return {"torch." + text.partition("(")[0] for text in texts if text.startswith("_C.")}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_each_name_has_a_probe(path: Path) -> None:
    known = {name for probe in probes.PROBES if probe.subsystem == path.stem for name in probe.names}
    used = private_names(path.read_text(encoding="utf-8"))
    assert {name for name in used if not any(f"{name}.".startswith(f"{each}.") for each in known)} == set()


def test_all_names_are_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main(["doctor"]) == 0
    assert "names are there" in capsys.readouterr().out


def test_what_is_missing_is_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    table = (probes.Probe("dispatch", "nothing works", ("torch._C.DispatchKey", "torch._C._gone", "torch._gone.name")),)
    monkeypatch.setattr("customops._cli.show.PROBES", table)
    assert check.main(["doctor"]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "missing: nothing works" in printed
    assert probes.missing(table[0]) == ["torch._C._gone", "torch._gone.name"]


def test_what_came_later_is_not_missing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    table = (probes.Probe("tags", "there are fewer tags", ("torch.Tag.of_tomorrow",), since=(9, 1)),)
    monkeypatch.setattr("customops._cli.show.PROBES", table)
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
    monkeypatch.setattr("customops._cli.show.PROBES", ())
    monkeypatch.setattr("torch.__version__", version)
    assert check.main(["doctor"]) == 0
    assert ("This torch is newer than those that customops was tested on" in capsys.readouterr().out) == newer
