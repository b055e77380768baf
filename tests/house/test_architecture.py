"""The order of the rooms and the house rules a machine can hold, read off the source with `ast`."""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from torch import Tensor, UntypedStorage
from torch._ops import OpOverload, OpOverloadPacket
from torch.autograd import Function, forward_ad, profiler
from torch.library import Library

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "customops"
#: Beside the package: pytest loads it in each run, and must not load torch for it.
PLUGIN = ROOT / "customops_pytest"

#: The rooms, lowest first: folders of the package, and modules beside them. A module imports from rooms before its own.
#: The package itself (`__init__`) stands after `library`; what is built on the public API may import it.
ROOMS = (
    "_versions",
    "errors",
    "_places",
    "_torch",
    "_schema",
    "_dispatch",
    "_codegen",
    "_autograd",
    "_rules",
    "_describe",
    "_op",
    "library",
    "checks",
    "__init__",
    "tuning",
    "recording",
    "languages",
    "legacy",
    "testing",
    "checking",
    "backend",
    "_cli",
    "__main__",
)
#: Modules that load something late to keep `import customops` cheap; a folder stands for its `__init__`.
LATE_IMPORTS = {"__init__", "_torch.autograd", "_describe", "checks", "backend._compat"}
#: Not even `_torch` builds on these: customops replaces them.
REPLACED = ("torch.library.custom_op", "torch._library.custom_ops.custom_op")
MAX_LINES = 1000
HEAVY = [
    "torch._dynamo",
    "torch.testing._internal.common_utils",
    "pytest",
    "expecttest",
    "hypothesis",
    "rich",
    "triton",
    "numba",
    "jax",
    "warp",
    "tvm_ffi",
    "cffi",
    "cupy",
]


@dataclass
class Import:
    line: int
    target: str  #: absolute dotted name: a module, or a name in one


@dataclass
class Module:
    """One parsed file, and what the rules ask about it; every finding is a line of text."""

    name: str  #: dotted, below `customops`; the package itself is `__init__`
    source: str
    is_package: bool = False
    imports: list[Import] = field(default_factory=list)
    torch_names: list[tuple[int, str]] = field(default_factory=list)
    #: Private attributes of anything, and those in source for generated functions.
    attributes: list[tuple[int, str]] = field(default_factory=list)
    #: Names that it gives to something.
    given: set[str] = field(default_factory=set)
    late_imports: list[str] = field(default_factory=list)
    deep_functions: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        tree = ast.parse(self.source)
        Imports(self).visit(tree)
        Names(self, torch_aliases(tree)).visit(tree)
        Attributes(self).visit(tree)

    def absolute(self, node: ast.ImportFrom) -> str:
        """The module a `from ... import` reads, with the leading dots resolved."""
        if not node.level:
            return node.module or ""
        parts = ["customops"] if self.name == "__init__" else ["customops", *self.name.split(".")]
        cut = node.level - 1 if self.is_package else node.level
        parts = parts[: len(parts) - cut]
        return ".".join([*parts, node.module] if node.module else parts)

    def targets(self, known: Collection[str]) -> Iterator[tuple[int, str]]:
        """The modules of the package that this one imports, wherever and for whatever."""
        for found in self.imports:
            if is_within(found.target, "customops"):
                name = found.target.removeprefix("customops").removeprefix(".") or "__init__"
                while name not in known and "." in name:
                    name = name.rpartition(".")[0]
                target = name if name in known or name in ROOMS else "__init__"
                if target != self.name:
                    yield found.line, target

    def upward_imports(self, known: Collection[str] = ()) -> list[str]:
        if self.name == "__init__":
            return []
        return [
            f"line {line}: {self.name} imports {target}, of a later room"
            for line, target in self.targets(known)
            if room(target) != room(self.name) and ROOMS.index(room(target)) > ROOMS.index(room(self.name))
        ]

    def private_names(self) -> list[str]:
        if self.name.split(".")[0] == "_torch" or self.name == "backend._compat":
            return []
        return [f"line {line}: {name}" for line, name in self.torch_names if is_private(name)]

    def private_attributes(self, others: Collection[str]) -> list[str]:
        if self.name.split(".")[0] == "_torch" or self.name == "backend._compat":
            return []
        return [f"line {line}: .{name}" for line, name in self.attributes if name in others]

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
        self.module.imports.append(Import(node.lineno, target))
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


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in name.split("."))


class Attributes(ast.NodeVisitor):
    """Collects private attributes, also in source of generated functions, and the names that are given."""

    def __init__(self, module: Module) -> None:
        self.module = module

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.ctx, ast.Store):
            self.module.given.add(node.attr)
        elif is_private(node.attr):
            self.module.attributes.append((node.lineno, node.attr))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and "$" in node.value:
            self.module.attributes += [(node.lineno, name) for name in re.findall(r"\.(_\w+)", node.value)]

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self.module.given.add(node.id)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.ClassDef) -> None:
        self.module.given.add(node.name)
        self.generic_visit(node)

    visit_ClassDef = visit_FunctionDef


#: The classes and modules of torch whose objects the package handles most.
TORCHS = (Tensor, UntypedStorage, OpOverload, OpOverloadPacket, Library, Function, forward_ad, profiler)
TORCHS_ATTRIBUTES = {name for each in TORCHS for name in dir(each) if is_private(name)}


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


def room(name: str) -> str:
    return name.partition(".")[0]


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


def load(path: Path) -> Module:
    source = path.read_text(encoding="utf-8")
    return Module(module_name(path), source, is_package=path.name == "__init__.py")


@functools.cache
def modules() -> dict[str, Module]:
    return {module_name(path): load(path) for path in sorted(PACKAGE.rglob("*.py"))}


PLUGIN_MODULES = {path.stem: Module(path.stem, path.read_text(encoding="utf-8")) for path in PLUGIN.glob("*.py")}


def findings(look: Callable[[Module], list[str]]) -> list[str]:
    """What is found in any module, with its name."""
    return [f"{name}: {finding}" for name, module in modules().items() for finding in look(module)]


# -- the rules ---------------------------------------------------------------------------------


def test_there_is_a_package() -> None:
    assert modules()
    assert (PACKAGE / "py.typed").exists()


def test_every_module_has_a_room() -> None:
    assert {room(name) for name in modules()} == set(ROOMS)


def test_imports_point_to_earlier_rooms() -> None:
    assert findings(lambda module: module.upward_imports(modules())) == []


def test_imports_go_in_no_circle() -> None:
    graph = {
        name: {target for _, target in module.targets(modules()) if target != room(name)}
        for name, module in modules().items()
        if name != "__init__"
    }
    list(TopologicalSorter(graph).static_order())  # raises CycleError, with the circle


def test_private_torch_names_live_in_one_package() -> None:
    assert findings(Module.private_names) == []


def test_private_attributes_of_torch_are_read_in_one_package() -> None:
    ours = set().union(*(module.given for module in modules().values()))
    assert findings(lambda module: module.private_attributes(TORCHS_ATTRIBUTES - ours)) == []


@pytest.mark.parametrize("source", ["x._base", 'F"$x._base {y}"', '"if $forward_ad._current_level"'])
def test_private_attributes_are_caught(source: str) -> None:
    assert Module("_op", source).private_attributes(TORCHS_ATTRIBUTES)
    assert not Module("_torch.memory", source).private_attributes(TORCHS_ATTRIBUTES)


def test_nothing_builds_on_what_it_replaces() -> None:
    assert findings(Module.replaced_names) == []


def test_modules_fit_one_sitting() -> None:
    lengths = {name: len(module.source.splitlines()) for name, module in modules().items()}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_LINES} == {}


def test_modules_are_named_after_what_they_do() -> None:
    assert [name for name in modules() if name.rpartition(".")[2].strip("_") in ("util", "utils")] == []


def test_folders_say_what_lives_in_them() -> None:
    folders = [module for module in modules().values() if module.is_package]
    assert [module.name for module in folders if not ast.get_docstring(ast.parse(module.source))] == []


def test_functions_nest_one_level() -> None:
    assert findings(lambda module: module.deep_functions) == []  # a second nested level wants a named class


def test_imports_stand_at_the_top() -> None:
    assert findings(lambda module: module.late_imports) == []


def test_import_is_light() -> None:
    script = "import customops, json, sys; print(json.dumps(sorted(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, text=True)
    loaded = set(HEAVY) & set(json.loads(run.stdout))
    assert not loaded, f"`import customops` loads {sorted(loaded)}"


@pytest.mark.process
def test_pytest_loads_the_plugin_without_torch() -> None:
    script = "import customops_pytest.plugin, json, sys; print(json.dumps(sorted(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, text=True)
    assert not {"torch", "customops"} & set(json.loads(run.stdout))


def test_the_plugin_is_held_to_the_rules() -> None:
    found = {
        name: [*module.private_names(), *module.replaced_names(), *module.deep_functions]
        + (module.late_imports if name != "plugin" else [])
        + ([] if len(module.source.splitlines()) <= MAX_LINES else ["too long"])
        for name, module in PLUGIN_MODULES.items()
    }
    assert {name: said for name, said in found.items() if said} == {}
    assert not [name for name, module in modules().items() for i in module.imports if "customops_pytest" in i.target]


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
    assert not Module("_torch.dispatcher", source).private_names()
    assert not Module("backend._compat", source).private_names()
    assert Module("backend.compat", source).private_names()


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.__version__\ntorch.library.Library",
        "from customops import _torch\n_compat._x\nself._torch._C",
        "from customops._torch import op_overload",
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
    assert Module("_torch", source).replaced_names()


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("_schema", "from customops._op.op import CustomOpDef"),
        ("_schema", "from customops import _op"),
        ("_schema", "from . import _op"),
        ("_schema", "import customops"),
        ("_op", "from customops import custom_op"),
        ("_schema.infer", "from customops._dispatch.operator import define"),
        ("_rules.fake", "from .._op import CustomOpDef"),
        ("_rules.fake", "if TYPE_CHECKING:\n    from customops._op.op import CustomOpDef"),
        ("checks.writes", "from ..testing import samples"),
        ("_op", "def f():\n    from customops import _registry"),
    ],
)
def test_upward_imports_are_caught(name: str, source: str) -> None:
    assert Module(name, source).upward_imports()


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("_op", "from customops._rules import kernel\nfrom customops import errors"),
        ("_op", "from ._rules.kernel import Kernel\nfrom . import _torch"),
        ("_rules.fake", "from .._dispatch.callbacks import bind"),
        ("checks.writes", "from ._result import Result\nfrom customops.checks import table"),
        ("backend.device", "from customops import custom_op\nfrom . import memory"),
        ("__main__", "from customops._cli.main import main"),
        ("__init__", "from customops.checks import opcheck\nfrom . import backend"),
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
    assert Module("checks.writes", source).late_imports
    assert not Module("checks", source, is_package=True).late_imports
    assert not Module("_torch.autograd", source).late_imports
