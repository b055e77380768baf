"""Every public name with its signature, as a golden file: a change of the API is seen in review.

``make generated`` writes ``public_api.txt`` again.
"""

from __future__ import annotations

import inspect
import os
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import customops

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).with_name("public_api.txt")


def signature(value: Any) -> str:
    if not isinstance(value, types.FunctionType | types.MethodType):
        return ""
    return re.sub("<Registry: .*?>", "<Registry>", str(inspect.signature(value)))  # it shows how many ops it has


def lines() -> Iterator[str]:
    for name in customops.__all__:
        value = getattr(customops, name)
        if not inspect.isclass(value):
            yield name + signature(value)
            continue
        yield f"class {name}"
        if value.__module__.startswith("customops"):
            members = {each for cls in value.__mro__ if cls.__module__.startswith("customops") for each in vars(cls)}
            for member in sorted(each for each in members if not each.startswith("_")):
                yield f"    {member}{signature(getattr(value, member))}"


def test_the_public_names_and_their_signatures() -> None:
    text = "".join(f"{line}\n" for line in lines())
    if os.environ.get("EXPECTTEST_ACCEPT"):
        GOLDEN.write_text(text, encoding="utf-8")
    assert text == GOLDEN.read_text(encoding="utf-8"), "make generated, and review the change of the API"


def test_each_registration_is_in_the_table_of_the_docs() -> None:
    """The table has one row for each of them, and names no other."""
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"^## To say this, write that\n(.*?)^## ", text, re.MULTILINE | re.DOTALL)
    written = "\n".join(line.split("|")[2] for line in table.splitlines() if line.startswith("| "))
    named = re.findall(r"op\.(register_\w+)", written)
    assert sorted(named) == sorted(name for name in dir(customops.CustomOpDef) if name.startswith("register_"))


def test_there_are_few_names() -> None:
    assert len(customops.__all__) <= 36
    options = inspect.signature(customops.custom_op).parameters.keys() - {"self", "name", "fn"}
    assert len(options) <= 16
