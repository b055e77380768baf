"""The layer table and the house rules a machine can hold, read off the source with `ast`."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "customops"

#: First component of a module's name -> layer. A module imports from strictly smaller layers.
LAYERS = {
    "errors": 0,
    "_compat": 0.5,
    "_schema": 1,
    "_hints": 2,
    "_formula": 2,
    "_history": 3,
    "_definition": 3,
    "_call": 3,
    "_slots": 4,
    "_gradients": 4,
    "_flattening": 4,
    "_context": 4,
    "_source": 4,
    "_flat_node": 5,
    "_trampoline": 5,
    "_node": 6,
    "_recompute": 5,
    "_bypass": 7,
    "_rules": 7,
    "_rule_set": 7.5,
    "_samples": 4,
    "_digest": 1,
    "_compat_tracing": 0,
    "_op": 8,
    "_plan": 9,
    "_registry": 10,
    "library": 11,
    "legacy": 11,
    "schema": 11,
    "fake_profile": 11,
    "checks": 11,
    "testing": 12,
    "pytest_plugin": 13,
    "backend": 13,
    "_cli_backend": 14,
    "_cli": 15,
    "__main__": 16,
    # The package itself imports what it likes; those built on the public API may import it.
    "__init__": 12,
}
#: Packages whose modules may import each other. `_rules` is not one: a transform stands alone.
FAMILIES = {"checks", "legacy", "testing", "backend"}
#: Modules that load something late to keep `import customops` cheap; "checks" is its `__init__`.
LATE_IMPORTS = {"__init__", "__main__", "_compat", "checks", "backend._compat"}
#: Not even `_compat` builds on these: customops replaces them.
REPLACED = ("torch.library.custom_op", "torch._library.custom_ops.custom_op")
#: `_compat` is long because every private name is in one place; it is a list, to be looked things up in.
MAX_LINES = {"_compat": 900}
DEFAULT_MAX_LINES = 500
HEAVY = [
    "torch._dynamo",
    "torch.testing._internal.common_utils",
    "pytest",
    "expecttest",
    "rich",
]


@dataclass
class Import:
    line: int
    target: str  #: absolute dotted name: a module, or a name in one
    typing_only: bool


@dataclass
class Module:
    """One parsed file, and what the rules ask about it; every finding is a line of text."""

    name: str  #: dotted, below `customops`; the package itself is `__init__`
    source: str
    is_package: bool = False
    imports: list[Import] = field(default_factory=list)
    torch_names: list[tuple[int, str]] = field(default_factory=list)
    late_imports: list[str] = field(default_factory=list)
    deep_functions: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        tree = ast.parse(self.source)
        Imports(self).visit(tree)
        Names(self, torch_aliases(tree)).visit(tree)

    @property
    def top(self) -> str:
        return self.name.partition(".")[0]

    def absolute(self, node: ast.ImportFrom) -> str:
        """The module a `from ... import` reads, with the leading dots resolved."""
        if not node.level:
            return node.module or ""
        parts = ["customops"] if self.name == "__init__" else ["customops", *self.name.split(".")]
        cut = node.level - 1 if self.is_package else node.level
        parts = parts[: len(parts) - cut]
        return ".".join([*parts, node.module] if node.module else parts)

    def upward_imports(self) -> list[str]:
        if self.name == "__init__":
            return []
        wrong = []
        for found in self.imports:
            if found.typing_only or not is_within(found.target, "customops"):
                continue
            parts = found.target.split(".")
            top = parts[1] if len(parts) > 1 and parts[1] in LAYERS else "__init__"
            if top == self.top and top in FAMILIES:
                continue
            if LAYERS[top] >= LAYERS[self.top]:
                wrong.append(
                    f"line {found.line}: {self.name} (layer {LAYERS[self.top]}) imports "
                    f"{found.target} ({top}, layer {LAYERS[top]})"
                )
        return wrong

    def private_names(self) -> list[str]:
        if self.name.rpartition(".")[2].startswith("_compat"):
            return []
        return [f"line {line}: {name}" for line, name in self.torch_names if is_private(name)]

    def replaced_names(self) -> list[str]:
        return [
            f"line {line}: {name}"
            for line, name in self.torch_names
            if "optests" in name.split(".") or any(is_within(name, old) for old in REPLACED)
        ]


class Imports(ast.NodeVisitor):
    """Collects imports, whether they come late, and functions nested too deep."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.functions: list[str] = []
        self.typing_only = False

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) not in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            self.generic_visit(node)
            return
        outer, self.typing_only = self.typing_only, True
        for child in node.body:
            self.visit(child)
        self.typing_only = outer
        for child in node.orelse:
            self.visit(child)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.functions.append(node.name)
        if len(self.functions) > 2:
            self.module.deep_functions.append(f"line {node.lineno}: {' > '.join(self.functions)}")
        self.generic_visit(node)
        self.functions.pop()

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.record(node, alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = self.module.absolute(node)
        for alias in node.names:
            self.record(node, f"{base}.{alias.name}")

    def record(self, node: ast.Import | ast.ImportFrom, target: str) -> None:
        self.module.imports.append(Import(node.lineno, target, self.typing_only))
        if is_within(target, "torch"):
            self.module.torch_names.append((node.lineno, target))
        if self.functions and self.module.name not in LATE_IMPORTS:
            self.module.late_imports.append(f"line {node.lineno}: {target} in {self.functions[-1]}()")


class Names(ast.NodeVisitor):
    """Collects the torch names used through an attribute, `getattr` or `import_module`."""

    def __init__(self, module: Module, aliases: dict[str, str]) -> None:
        self.module = module
        self.aliases = aliases

    def dotted(self, node: ast.expr) -> str | None:
        if isinstance(node, ast.Name):
            return self.aliases.get(node.id)
        if isinstance(node, ast.Attribute):
            base = self.dotted(node.value)
            return base and f"{base}.{node.attr}"
        return None

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name = self.dotted(node)
        if name is None:
            self.generic_visit(node)
        else:
            self.module.torch_names.append((node.lineno, name))

    def visit_Call(self, node: ast.Call) -> None:
        texts = [arg.value for arg in node.args[:2] if isinstance(arg, ast.Constant)]
        called = ast.unparse(node.func)
        if called in ("getattr", "hasattr", "setattr") and texts:
            base = self.dotted(node.args[0])
            if base is not None:
                self.module.torch_names.append((node.lineno, f"{base}.{texts[0]}"))
        elif called.endswith(("import_module", "__import__")) and texts:
            if is_within(str(texts[0]), "torch"):
                self.module.torch_names.append((node.lineno, str(texts[0])))
        self.generic_visit(node)


def torch_aliases(tree: ast.Module) -> dict[str, str]:
    """Local name -> dotted torch name, for every torch import in a file."""
    aliases = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if is_within(alias.name, "torch"):
                    aliases[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            if is_within(node.module, "torch"):
                for alias in node.names:
                    aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return aliases


def is_within(name: str, ancestor: str) -> bool:
    return name == ancestor or name.startswith(ancestor + ".")


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in name.split("."))


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


def load(path: Path) -> Module:
    source = path.read_text(encoding="utf-8")
    return Module(module_name(path), source, is_package=path.name == "__init__.py")


PATHS = sorted(PACKAGE.rglob("*.py"))
every_module = pytest.mark.parametrize("path", PATHS, ids=[module_name(path) for path in PATHS])


def report(path: Path, rule: str, findings: list[str]) -> str:
    return "\n  ".join([f"{path.relative_to(ROOT)}: {rule}", *findings])


# -- the rules, module by module ---------------------------------------------------------------


def test_there_is_a_package() -> None:
    assert PATHS
    assert (PACKAGE / "py.typed").exists()


@every_module
def test_has_a_layer(path: Path) -> None:
    name = load(path).top
    assert name in LAYERS, f"{name} is in no layer: add it to LAYERS, or to a module that is there"


@every_module
def test_imports_point_down(path: Path) -> None:
    findings = load(path).upward_imports()
    assert not findings, report(path, "imports only from lower layers", findings)


@every_module
def test_private_torch_names_live_in_compat(path: Path) -> None:
    findings = load(path).private_names()
    assert not findings, report(path, "private torch names belong in a _compat.py", findings)


@every_module
def test_does_not_build_on_what_it_replaces(path: Path) -> None:
    findings = load(path).replaced_names()
    assert not findings, report(path, "torch's custom_op and optests are not used", findings)


@every_module
def test_fits_one_sitting(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    cap = MAX_LINES.get(path.stem, DEFAULT_MAX_LINES)
    assert lines <= cap, f"{path.relative_to(ROOT)} has {lines} lines, {cap} is the cap"
    assert path.stem.strip("_") not in ("utils", "util"), "name a module after what it does"


@every_module
def test_functions_nest_one_level(path: Path) -> None:
    findings = load(path).deep_functions
    assert not findings, report(path, "a second nested level wants a named class", findings)


@every_module
def test_imports_stand_at_the_top(path: Path) -> None:
    findings = load(path).late_imports
    assert not findings, report(path, f"only {sorted(LATE_IMPORTS)} import late", findings)


def test_import_is_light() -> None:
    script = "import customops, json, sys; print(json.dumps(sorted(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, text=True)
    loaded = set(HEAVY) & set(json.loads(run.stdout))
    assert not loaded, f"`import customops` loads {sorted(loaded)}"


# -- the detectors themselves ------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        "import torch._C",
        "import torch._library.utils as u",
        "from torch import _C",
        "from torch._library import utils",
        "from torch.library import _del_library",
        "import torch.testing._internal.common_utils",
        "import torch\ntorch._C._dispatch_keys()",
        "import torch as t\nt.library._del_library",
        "from torch import library as lib\nlib._del_library()",
        "from torch import Tensor\nTensor._make_subclass",
        "import torch\ngetattr(torch, '_C')",
        "import importlib\nimportlib.import_module('torch._dynamo')",
        "if TYPE_CHECKING:\n    from torch._ops import OpOverload",
    ],
)
def test_private_names_are_caught(source: str) -> None:
    assert Module("_op", source).private_names()
    assert not Module("_compat", source).private_names()
    assert not Module("backend._compat", source).private_names()
    assert Module("backend.compat", source).private_names()


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.__version__\ntorch.library.Library",
        "from customops import _compat\n_compat._x\nself._torch._C",
        "from customops._compat import op_overload",
    ],
)
def test_other_names_pass(source: str) -> None:
    assert not Module("_op", source).private_names()


@pytest.mark.parametrize(
    "source",
    [
        "from torch.library import custom_op",
        "import torch\n@torch.library.custom_op('a::b', mutates_args=())\ndef f(): ...",
        "from torch._library.custom_ops import custom_op",
        "from torch.testing._internal import optests",
        "import torch.testing._internal.optests.generate_tests as g",
    ],
)
def test_replaced_names_are_caught(source: str) -> None:
    assert Module("_compat", source).replaced_names()


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("_schema", "from customops._op import CustomOpDef"),
        ("_schema", "from customops import _op"),
        ("_schema", "from . import _op"),
        ("_schema", "import customops"),
        ("_op", "from customops import custom_op"),
        ("_hints", "from customops._definition import define"),
        ("_rules.fake", "from customops._rules.kernel import Kernel"),
        ("_rules.fake", "from .kernel import Kernel"),
        ("_rules.fake", "from .._op import CustomOpDef"),
        ("checks.schema", "from ..testing import samples"),
        ("_op", "def f():\n    from customops import _registry"),
    ],
)
def test_upward_imports_are_caught(name: str, source: str) -> None:
    assert Module(name, source).upward_imports()


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("_op", "from customops._rules import kernel\nfrom customops import errors"),
        ("_op", "from ._rules.kernel import Kernel\nfrom . import _compat"),
        ("_rules.fake", "from .._call import bind"),
        ("checks.schema", "from ._result import Result\nfrom customops.checks import table"),
        ("backend.device", "from customops import custom_op\nfrom . import memory"),
        ("__main__", "from customops._cli import main"),
        ("__init__", "from customops.checks import opcheck\nfrom . import backend"),
        ("_rules.fake", "if TYPE_CHECKING:\n    from customops._op import CustomOpDef"),
    ],
)
def test_downward_imports_pass(name: str, source: str) -> None:
    assert not Module(name, source).upward_imports()


def test_nesting_is_counted() -> None:
    once = "def f():\n    def g(): ...\nclass C:\n    def m(self):\n        def g(): ..."
    twice = "def f():\n    def g():\n        async def h(): ..."
    through_a_class = "def f():\n    def g():\n        class C:\n            def m(self): ..."
    assert not Module("_op", once).deep_functions
    assert Module("_op", twice).deep_functions == ["line 3: f > g > h"]
    assert Module("_op", through_a_class).deep_functions


def test_late_imports_are_caught() -> None:
    source = "def f():\n    import json"
    assert Module("_op", source).late_imports == ["line 2: json in f()"]
    assert Module("checks.schema", source).late_imports
    assert not Module("checks", source, is_package=True).late_imports
    assert not Module("_compat", source).late_imports
