"""The pictures of docs/pictures are those of the data they show."""

from __future__ import annotations

import importlib.util
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parents[3]
PICTURES = ROOT / "docs" / "pictures"


@pytest.fixture(scope="module")
def draw() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_pictures_draw", PICTURES / "draw.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pictures_are_current(draw: ModuleType) -> None:
    assert {path.stem for path in PICTURES.glob("*.svg")} == set(draw.PICTURES)
    for name, picture in draw.PICTURES.items():
        svg = picture().svg()
        assert (PICTURES / f"{name}.svg").read_text(encoding="utf-8") == svg, "run `make pictures`"
        ElementTree.fromstring(svg)


def test_the_heat_map_has_the_cells_of_the_page(draw: ModuleType) -> None:
    """Counted in the drawing, and compared with the counts below the table, which come from the measurement."""
    page = (ROOT / "docs" / "gradients.md").read_text(encoding="utf-8")
    table, totals = draw.read_table(page)
    drawn = ElementTree.fromstring((PICTURES / "gradients.svg").read_text(encoding="utf-8"))
    cells: Counter[str] = Counter()
    for rect in drawn.iter("{http://www.w3.org/2000/svg}rect"):
        if float(rect.attrib["height"]) == draw.ROW and rect.attrib["class"] in draw.KINDS.values():
            if rect.attrib["width"] != rect.attrib["height"]:  # else of the legend
                cells[rect.attrib["class"]] += round(float(rect.attrib["width"])) // draw.CELL
    assert cells == Counter({draw.KINDS[symbol]: sum(counts) for symbol, counts in totals.items()})
    for symbol, counts in totals.items():
        assert [sum(halves[side].count(symbol) for halves in table.values()) for side in (0, 1)] == counts

    ours, theirs = totals["."]
    alt = f"[Heat map: {ours} of {sum(counts[0] for counts in totals.values())} combinations are right with customops, "
    for page in ("README.md", "docs/index.md", "docs/gradients.md"):
        assert f"{alt}{theirs} with torch.library]" in (ROOT / page).read_text(encoding="utf-8"), page


def test_dispatch_keys_are_in_their_order(draw: ModuleType) -> None:
    """The dispatcher goes from the highest key of those that act down to the device's."""
    names = [key.partition(",")[0].replace("Autograd", "AutogradFunctionality") for key, _, _ in draw.KEYS]
    functionality = [int(getattr(torch._C.DispatchKey, name)) for name in names[:6]]
    assert functionality == sorted(functionality, reverse=True)


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))])
def test_pictures_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for found in text.split("](")[1:]:
        target = found.split(")")[0]
        if target.endswith(".svg"):
            assert ((ROOT / page).parent / target).is_file(), target


def test_the_readme_says_what_was_measured(draw: ModuleType) -> None:
    text = draw.README.read_text(encoding="utf-8")
    assert draw.readme(text) == text, "run `make pictures`"
