"""``customops migrate``: move a package's sources from `torch.library` to `customops`, as far as their text tells.

Nothing is imported. `Reader` reads a file: the edits that move it, and what a person has to look at.
"""

from __future__ import annotations

import argparse
import ast
import functools
import itertools
import json
import keyword
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch.library

import customops
from customops import legacy, testing
from customops._cli.screen import FAULTY, FINE, say
from customops._cli.targets import TargetError
from customops._describe.render import plural

#: Modules of torch whose names are moved, and the module that has them here.
HOMES = {
    "torch.library": customops,
    "torch._library.custom_ops": customops,
    "torch._library.infer_schema": customops,
    "torch._library.triton": customops,
    "torch._custom_ops": legacy,
    "torch._custom_op.impl": legacy,
    "torch.testing._internal.optests": testing,
}
_RENAMED = {"impl_abstract": "register_fake", "capture_triton": "wrap_triton"}
_SETUP = (["ctx", "inputs", "output"], ["ctx", "inputs", "keyword_only_inputs", "output"])
#: What needs an op that is there, where torch waits for it.
_NEEDS_OP = ("register_kernel", "register_fake", "register_autograd", "register_vmap", "register_autocast")


class Edit(NamedTuple):
    """Bytes to replace: first and last line, counted from 0, and first and last column."""

    first: int
    start: int
    last: int
    end: int
    text: str


class Note(NamedTuple):
    line: int
    text: str


def home_of(dotted: str) -> str | None:
    """What a name of torch is called here, ``customops.custom_op``; None if it has no counterpart, or is the same."""
    module, _, name = dotted.rpartition(".")
    home = HOMES.get(module)
    found = getattr(home, _RENAMED.get(name, name), None) if not name.startswith("_") else None
    is_same = found is None or found is getattr(torch.library, name, None)
    return None if home is None or is_same else f"{home.__name__}.{_RENAMED.get(name, name)}"


class Reader(ast.NodeVisitor):
    """Collects `edits` and `notes` of one file, the ops that it `defines`, and those that it `needs`."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self.encoding, _ = tokenize.detect_encoding(file.readline)
        text = path.read_bytes().decode(self.encoding)  # without a byte order mark
        self.path, self.source = path, text.encode()  # in the bytes that `ast` counts
        self.lines = self.source.splitlines(keepends=True)
        self.edits: list[Edit] = []
        self.notes: list[Note] = []
        self.defines: set[str] = set()
        self.needs: list[tuple[int, str, str]] = []
        self.known: dict[str, str] = {}  # names of Python -> dotted names of torch
        self.modules: dict[str, None] = {}  # those of customops to import
        self.libraries: dict[str, str] = {}  # variables -> the namespaces of their Library
        self.functions: dict[str, ast.FunctionDef] = {}
        tree = ast.parse(text)
        #: The calls whose results nobody takes.
        self.alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        parameters = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
        for node in ast.walk(tree):  # before the visit: names are used above their definition, too
            if isinstance(node, ast.FunctionDef):
                self.functions[node.name] = node
            elif isinstance(node, ast.ImportFrom) and node.module == "torch.library":
                self.known |= {each.asname or each.name: f"torch.library.{each.name}" for each in node.names}
        for node in ast.walk(tree):
            made = getattr(node, "context_expr", None) or getattr(node, "value", None)
            targets: Any = [getattr(node, "optional_vars", None) or getattr(node, "target", None)]
            if isinstance(made, ast.Call) and made.args:
                cls = (self.dotted(made.func) or ast.unparse(made.func)).rpartition(".")[2]
                for each in map(ast.unparse, filter(None, getattr(node, "targets", targets))):
                    if cls in ("Library", "_scoped_library"):
                        is_one = self.libraries.get(each, _text(made.args[0])) == _text(made.args[0])
                        self.libraries[each] = _text(made.args[0]) if is_one and each not in parameters else ""
        self.visit(tree)
        if self.modules:
            self._import(tree)

    def _import(self, tree: ast.Module) -> None:
        """Import the modules of customops that the edits name, directly before torch: what is above may have to be."""
        imports = [node for node in _own(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
        there = {each.asname or each.name for node in imports if isinstance(node, ast.Import) for each in node.names}
        new = [f"import {module}" for module in self.modules if module not in there]
        if not new:
            return
        of_torch = (node for node in imports if any(f"{name}.".startswith("torch.") for name in _modules_of(node)))
        first = min(of_torch, key=lambda node: (node.lineno, node.col_offset), default=None)
        if first is not None:
            column = first.col_offset
            is_after = self.lines[first.lineno - 1][:column].strip()  # of another statement in its line
            text = "".join(each + ("; " if is_after else "\n" + " " * column) for each in new)
            self.edits.append(Edit(first.lineno - 1, column, first.lineno - 1, column, text))
        else:  # torch is imported in functions alone
            above: list[ast.stmt] = [node for node in imports if getattr(node, "module", None) == "__future__"]
            above += tree.body[:1] if ast.get_docstring(tree) is not None else []
            comments = sum(1 for _ in itertools.takewhile(lambda line: line.startswith(b"#"), self.lines))
            line = max((node.end_lineno or 0 for node in above), default=comments)
            self.edits.append(Edit(line, 0, line, 0, "".join(f"{each}\n" for each in new)))

    def replace(self, node: ast.AST, text: str) -> None:
        span: Any = node
        self.edits.append(Edit(span.lineno - 1, span.col_offset, span.end_lineno - 1, span.end_col_offset, text))

    def note(self, node: ast.AST, text: str) -> None:
        self.notes.append(Note(node.lineno, text))  # type: ignore[attr-defined]

    def dotted(self, node: ast.AST) -> str:
        if isinstance(node, ast.Name):
            return self.known.get(node.id, "")
        base = self.dotted(node.value) if isinstance(node, ast.Attribute) else ""
        return f"{base}.{node.attr}" if base and isinstance(node, ast.Attribute) else ""

    def visit_Import(self, node: ast.Import) -> None:
        self.known |= {each.asname or each.name.partition(".")[0]: each.name if each.asname else "torch"
                       for each in node.names if each.name.partition(".")[0] == "torch"}  # fmt: skip

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level or node.module is None or node.module.partition(".")[0] != "torch":
            return
        moved: dict[str, list[str]] = {}
        for each in node.names:
            if each.name == "*":
                if node.module in HOMES:
                    self.note(node, f"stays, and what it names is not looked at: import the names of {node.module}")
                return
            dotted, bound = f"{node.module}.{each.name}", each.asname or each.name
            home, _, name = (home_of(dotted) or "").rpartition(".")
            home = home or node.module
            spelled = f"{name or each.name} as {bound}" if bound != (name or each.name) else bound
            moved.setdefault(home, []).append(spelled)
            self.known[bound] = dotted
            if home == node.module in HOMES and dotted != "torch.library.Library":
                self.note(node, f"{dotted} stays: customops has no {each.name}")
        if list(moved) != [node.module]:
            before = self.lines[node.lineno - 1][: node.col_offset]
            between = "; " if before.strip() else "\n" + " " * node.col_offset
            self.replace(node, between.join(f"from {home} import {', '.join(names)}" for home, names in moved.items()))

    def visit_Assign(self, node: ast.Assign) -> None:
        """``register_fake = torch.library.register_fake``"""
        if dotted := self.dotted(node.value):  # another value does not hide what is bound elsewhere in the file
            self.known |= {ast.unparse(each): dotted for each in node.targets}
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        dotted = self.dotted(node)
        home = home_of(dotted)
        if home is not None:
            self.modules[home.rpartition(".")[0]] = None
            self.replace(node, home)
        elif dotted.rpartition(".")[0] in HOMES and dotted not in HOMES and dotted != "torch.library.Library":
            self.note(node, f"{dotted} stays: customops has no {node.attr}")
        elif not dotted:
            self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for decorator in node.decorator_list:
            call = decorator if isinstance(decorator, ast.Call) else None
            if call is None or ast.unparse(call.func).rpartition(".")[2] != "register_kernel":
                continue
            parameters = [each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)]
            for each in _own(node):
                if isinstance(each, ast.Return) and isinstance(each.value, ast.Name) and each.value.id in parameters:
                    given = each.value.id
                    self.note(each, f"raises AliasError if that is the argument: return {given}.clone(), or use impl")
        self.generic_visit(node)

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

    def visit_Call(self, node: ast.Call) -> None:
        function = self.dotted(node.func)
        last = ast.unparse(node.func).rpartition(".")[2]
        given = _text(node.args[0]) if node.args else ""
        if last in ("hasattr", "getattr") and node.args and self.dotted(node.args[0]) in HOMES:
            self.note(node, "stays: it asks torch; customops has the name in each torch that it supports, so drop this")
            for each in node.args[1:]:
                self.visit(each)
            return
        if last in ("custom_op", "define", "triton_op", "impl") and function.rpartition(".")[0] in HOMES:
            self._name(node, given)
        elif last in ("custom_op", "define") and "::" in given:  # of a helper
            self.defines.add(given.partition("(")[0])
        if last in _NEEDS_OP and function.rpartition(".")[0] in HOMES and "::" in given:
            self.needs.append((node.lineno, last, given))
        owner = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        may_be_library = not function and owner and re.search(r"(^|[._])lib(rary)?\d*$", owner, re.IGNORECASE)
        if last in ("define", "impl", "_register_fake") and (owner in self.libraries or may_be_library):
            self._library(node, owner, last.removeprefix("_"), given)
        for setup in [each.value for each in node.keywords if each.arg == "setup_context"]:
            target = self.functions.get(setup.id) if isinstance(setup, ast.Name) else setup
            if isinstance(target, (ast.FunctionDef, ast.Lambda)):
                names = [each.arg for each in (*target.args.args, *target.args.kwonlyargs)]
                if last == "register_autograd" and names not in _SETUP and not target.args.kwarg:
                    got = ", ".join(names)
                    self.note(target, f"raises CallbackError: setup_context({got}) has to be (ctx, inputs, output)")
        self.generic_visit(node)

    def _name(self, node: ast.Call, given: str) -> None:
        namespace, _, name = given.partition("(")[0].partition("::")
        if not name:
            return
        if ast.unparse(node.func).rpartition(".")[2] != "impl":
            self.defines.add(f"{namespace}::{name}")
        for part in (namespace, *name.split(".")):
            if keyword.iskeyword(part) or part == "name":
                self.note(node, f"raises DefinitionError: {part} cannot be looked up in torch.ops; name it {part}_")

    def _library(self, node: ast.Call, owner: str, function: str, given: str) -> None:
        """A call of a method of a Library: ``lib.define(schema)``, ``lib.impl(name, fn, key)``."""
        text = functools.partial(ast.get_source_segment, self.source.decode())
        namespace = self.libraries.get(owner, "")
        name, bracket, signature = given.partition("(")
        qualname = name if "::" in name else f"{namespace}::{name}"
        arguments, options = node.args[1:], {each.arg for each in node.keywords}
        if namespace and name and function == "define":
            self.defines.add(qualname)
        if namespace and function == "register_fake":
            self.needs.append((node.lineno, function, qualname))
        takes = {"define": 0, "register_fake": 1, "impl": 2}[function]
        is_plain = len(arguments) == takes and options <= {"tags"} and id(node) in self.alone
        if any(home_of(self.dotted(each)) for each in ast.walk(node)) or "#" in (text(node) or ""):
            is_plain = False
        if not (namespace and name and is_plain):
            use = f'"{qualname}", ' if namespace and name else ""
            self.note(node, f"stays: torch's {ast.unparse(node.func)}; customops.{function}({use}..., lib={owner}) "
                      "checks its arguments")  # fmt: skip
            return
        schema = json.dumps(bracket + signature, ensure_ascii=False) if bracket else None
        rest = [f'"{qualname}"', schema, *map(text, reversed(arguments))]
        rest += [f"{each.arg}={text(each.value)}" for each in node.keywords]
        self.modules["customops"] = None
        self.replace(node, f"customops.{function}({', '.join(filter(None, rest))}, lib={owner})")

    def changed(self) -> bytes:
        """The file with its edits."""
        ending = b"\r\n" if b"\r\n" in self.source else b"\n"
        return _edited([*self.lines, b""], self.edits, 0, ending).decode().encode(self.encoding)


def _edited(lines: list[bytes], edits: list[Edit], first: int, ending: bytes = b"\n") -> bytes:
    """Lines from `first` on with edits, the last ones first, so that places stay what they are."""
    for edit in sorted(edits, reverse=True):
        at, last = edit.first - first, edit.last - first
        head, tail = lines[at][: edit.start], lines[last][edit.end :]
        lines[at : last + 1] = [head + edit.text.encode().replace(b"\n", ending) + tail]
    return b"".join(lines)


def _own(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes in a module or function that run with it: not in a function or class of it, nor for type checkers."""
    for node in ast.iter_child_nodes(scope):
        is_typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if not is_typing and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            yield node
            yield from _own(node)


def _modules_of(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [each.name for each in node.names]
    return [node.module] if node.module and not node.level else []


def _text(node: ast.expr) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def sources(target: Path) -> Iterator[Path]:
    for path in sorted(target.rglob("*.py")) if target.is_dir() else [target]:
        if not any(part.startswith(".") or part == "site-packages" for part in path.relative_to(target).parts):
            yield path


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "migrate",
        help="list what uses torch.library in sources, with the line to change, or change it",
        description="Read the Python files of SRC, without importing them. List each line that uses torch.library, "
        "with the line in its place, what would raise then, and what stays. With --write, change the files.",
        epilog="Exit status: 0 if there is nothing to change or it was changed, 1 if there is, 2 if there is no SRC.",
    )
    parser.add_argument("source", type=Path, metavar="SRC", help="a Python file, or the folder of a package")
    parser.add_argument("--write", action="store_true", help="change the files")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    if not options.source.exists():
        raise TargetError(f"no such file or folder: {options.source}")
    readers = []
    for path in sources(options.source):
        try:
            readers.append(Reader(path))
        except (SyntaxError, UnicodeDecodeError) as error:
            say(f"{path}: left as it is, since it cannot be read: {error}")
    defined = set[str]().union(*(reader.defines for reader in readers))
    files = lines = notes = 0
    for reader in readers:
        absent = "raises RegistrationError if {} is not defined by then: import the library that defines the op first"
        found = [*reader.notes, *(Note(at, absent.format(op)) for at, _, op in reader.needs if op not in defined)]
        for (first, _), group in itertools.groupby(sorted(reader.edits), lambda edit: (edit.first, bool(edit.end))):
            edits = [*group]  # an import that is added is one by itself
            whole = reader.lines[first : max(edit.last + bool(edit.end) for edit in edits)]
            say(f"{reader.path}:{first + 1}:")
            for sign, code in (("-", b"".join(whole)), ("+", _edited([*whole, b""], edits, first))):
                for line in code.decode(errors="replace").splitlines():
                    say(f"  {sign} {line}")
        for note in sorted(set(found)):
            say(f"{reader.path}:{note.line}: {note.text}")
        files, lines, notes = files + bool(reader.edits), lines + len(reader.edits), notes + len(set(found))
        if options.write and reader.edits:
            reader.path.write_bytes(reader.changed())
    done = "changed" if options.write else "to change (--write does it)"
    places = f"{plural(lines, 'place')} in {plural(files, 'file')}"
    say(f"{places} {done}, {notes} to look at; what raises: docs/torch_library.md")
    return FAULTY if lines and not options.write else FINE
