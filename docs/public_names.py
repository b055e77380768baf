"""The text of docs/reference.md: every public name, with its entry in docs/api.md, docs/api_checks.md or here."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import customops

HERE = Path(__file__).parent
#: Modules that have `__all__` for the rest of the package.
INTERNAL = {"customops.checks.inputs"}
DIRECTIVE = re.compile(
    r"^\.\. (?:py:)?(?:auto)?(?:function|class|data|exception|method|module)::\s+([\w.]+)", re.MULTILINE
)


def modules() -> Iterator[ModuleType]:
    """The public modules."""
    yield customops
    for found in pkgutil.walk_packages(customops.__path__, "customops."):
        if re.search(r"\._", found.name) or found.name in INTERNAL:
            continue
        module = importlib.import_module(found.name)
        if "__all__" in vars(module):
            yield module


def names(module: ModuleType) -> list[str]:
    return sorted(module.__all__, key=str.lower)


def find(path: str) -> Any:
    """What a full name stands for; None where that needs a package that is not there."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError:
        return None


def api_pages() -> str:
    return "".join((HERE / page).read_text(encoding="utf-8") for page in ("api.md", "api_checks.md"))


def entries() -> dict[str, Any]:
    """The full names that the API pages has entries for, and what they stand for."""
    text = api_pages()
    found = (name if name.startswith("customops.") else f"customops.{name}" for name in DIRECTIVE.findall(text))
    return {name: find(name) for name in found}


def entry_of(path: str, known: dict[str, Any]) -> str | None:
    """The full name under which the API pages describes a name, if it does."""
    if path in known:
        return path
    value = find(path)
    same = (name for name, other in known.items() if value is not None and _is(value, other))
    return next(same, None)


def _is(value: Any, other: Any) -> bool:
    """Whether both are one object; a bound method is made anew each time."""
    return value is other or (inspect.ismethod(value) and value == other)


def directive(path: str) -> str:
    """An entry for a name that the API pages does not have."""
    value = find(path)
    if inspect.isclass(value):
        kind = "autoexception" if issubclass(value, BaseException) else "autoclass"
        return f".. {kind}:: {path}()\n" + ("   :members:\n" if kind == "autoclass" else "")
    if callable(value):
        return f".. autofunction:: {path}\n"
    return f".. data:: {path}\n\n   {summary(path)}\n"


def summary(path: str) -> str:
    """The first sentence of the docstring; for data that of the API pages, or of the comment above the assignment."""
    value = find(path)
    documented = inspect.isroutine(value) or inspect.isclass(value) or inspect.ismodule(value)
    text = inspect.getdoc(value) if documented else _described(path) or _comment(path)
    paragraph = " ".join((text or "").split("\n\n")[0].split())
    return re.split(r"(?<=\.)\s", paragraph)[0].replace("|", "\\|")


def _described(path: str) -> str:
    """What the API pages says below the directive of a name."""
    name = re.escape(path.removeprefix("customops."))
    pattern = rf"^\.\. \w+:: (?:customops\.)?{name}\b[^\n]*\n\n((?:   [^\n]+\n)+)"
    match = re.search(pattern, api_pages(), re.MULTILINE)
    return "" if match is None else match[1].replace("``", "`")


def _comment(path: str) -> str:
    """The `#:` lines above an assignment."""
    module, _, name = path.rpartition(".")
    source = inspect.getsource(importlib.import_module(module))
    match = re.search(rf"((?:^#: .*\n)+){name}\b", source, re.MULTILINE)
    return "" if match is None else match[1].replace("#: ", "")


def text() -> str:
    """Markdown: a table a module, and the entries that the API pages does not have."""
    known = entries()
    described: dict[int, str] = {}
    parts = []
    for module in modules():
        rows, own = [], []
        for name in names(module):
            path = f"{module.__name__}.{name}"
            target = entry_of(path, known)
            if target is None and inspect.ismodule(find(path)):
                rows.append(f"| `{name}` | the module, below |")
                continue
            if target is None:
                target = described.setdefault(id(find(path)), path)
                if target == path:
                    own.append(directive(path))
            rows.append(f"| {{py:obj}}`{name} <{target}>` | {summary(path)} |")
        parts += [f"## `{module.__name__}`\n", summary_of_module(module), "\n| | |\n|---|---|", *rows, ""]
        if own:
            parts += ["```{eval-rst}", *own, "```\n"]
    return "\n".join(parts)


def summary_of_module(module: ModuleType) -> str:
    return (inspect.getdoc(module) or "").split("\n")[0]


def without_a_page() -> list[str]:
    """The public names that no page but docs/reference.md has: neither an entry nor a sentence."""
    pages = (page for page in sorted(HERE.rglob("*.md")) if page.name != "reference.md")
    words = set(re.findall(r"\w+", "".join(page.read_text(encoding="utf-8") for page in pages)))
    return [f"{module.__name__}.{name}" for module in modules() for name in names(module) if name not in words]
