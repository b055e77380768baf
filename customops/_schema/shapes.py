"""A line that says the shapes of an op: ``"*batch n k, k m -> *batch n m"``.

There is an entry for each tensor argument, in the order of the schema, and one for each returned tensor. An entry of a
list of tensors is for each of them. A dimension is a name, a number, ``_`` (any), an expression of names and integer
arguments (``h*d``, ``n+p-1``, ``n//block``, which divides exactly), ``?k`` in a return (its size depends on data), or
``*n`` in the entry of a list (each tensor has another size; in a return it is their sum). One item of an entry may
stand for any number of dimensions: ``*batch``, or ``...``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

from customops._schema.model import Argument, Schema
from customops.errors import DefinitionError

__tracebackhide__ = True  # pytest leaves the frames out

_ITEM = re.compile(r"[^\s,]+")
_INTEGERS = ("SymInt", "int")


class Dim(NamedTuple):
    """One dimension of an entry, and the names in it."""

    text: str
    #: "name", "expression", "number", "any", "data" (``?k``) or "each" (``*n`` in a list).
    kind: str
    names: tuple[str, ...] = ()

    @property
    def code(self) -> str:
        """The expression as Python code: names are ``$d_name``, and a division that has to be exact is ``$exact``."""
        return code_of(ast.parse(self.text, mode="eval").body)


def code_of(tree: ast.expr) -> str:
    if isinstance(tree, ast.Name):
        return f"$d_{tree.id}"
    if isinstance(tree, ast.Constant):
        return repr(tree.value)
    assert isinstance(tree, ast.BinOp)
    left, right = code_of(tree.left), code_of(tree.right)
    if isinstance(tree.op, ast.FloorDiv):
        return f"$exact({left}, {right})"
    return f"({left} {_SIGNS[type(tree.op)]} {right})"


_SIGNS: dict[type, str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*"}


class Entry(NamedTuple):
    """The dimensions of a tensor: those before and after what stands for any number of them."""

    text: str
    before: tuple[Dim, ...]
    after: tuple[Dim, ...] = ()
    #: The name of what stands for any number of dimensions; "..." has one, too. "" if there is none.
    star: str = ""

    @property
    def dims(self) -> tuple[Dim, ...]:
        return self.before + self.after

    def places(self) -> Iterator[tuple[Dim, int]]:
        """The dimensions, and their indices: those after the star are counted from the end."""
        yield from ((dim, i) for i, dim in enumerate(self.before))
        yield from ((dim, i - len(self.after)) for i, dim in enumerate(self.after))


class Line:
    """A line for an op: its entries, and the steps in which its names are bound."""

    def __init__(self, text: str, schema: Schema, op: str) -> None:
        self.text, self.schema, self.op = text, schema, op
        head, arrow, tail = text.partition("->")
        self.arguments = [argument for argument in schema.arguments if argument.holds_tensors]
        returns = [ret for ret in schema.returns if ret.holds_tensors]
        other = next((ret.type for ret in returns if not ret.is_tensor and ret.type != "(Tensor)"), None)
        other = other or next((ret.type for ret in schema.returns if not ret.holds_tensors), None)
        if other is not None or schema.is_view:
            what = "a view" if schema.is_view else str(other).replace("SymInt", "int")
            raise self._error(f"the op returns {what}, of which no line tells", "new tensors", str(schema))
        if not arrow:
            raise self._error("it has no ->", 'such as "n k, k m -> n m"', text)
        self.inputs = dict(
            zip(self.arguments, self._entries(head, len(self.arguments), "tensor argument"), strict=True)
        )
        self.outputs = self._entries(tail, len(returns), "returned tensor")
        #: The integer arguments that the line names.
        integers = {argument.name for argument in schema.arguments if argument.type in _INTEGERS}
        self.integers = sorted(integers & {name for entry in self.entries for dim in entry.dims for name in dim.names})
        self.steps = self._plan()
        self.names = list(dict.fromkeys([*self.integers, *(name for *_, name in self.steps if name)]))
        #: The names that stand for any number of dimensions.
        self.stars = {entry.star for entry in self.inputs.values() if entry.star}
        # What only tensors say that may be left out determines no result.
        sure = {argument for argument in self.arguments if not argument.type.endswith("?")}
        known = {*self.integers, *(name for _, a, _, _, name in self.steps if name and a in sure)}
        known |= {entry.star for argument, entry in self.inputs.items() if entry.star and argument in sure}
        for entry in self.outputs:
            open_names = [name for dim in entry.dims if dim.kind != "data" for name in dim.names if name not in known]
            open_names += [dim.text for dim in entry.dims if dim.kind == "any"]
            open_names += [entry.star] * (entry.star not in ("", *known))
            if open_names:
                raise self._error(
                    f"nothing determines {open_names[0]}, a size of a result", "a name of an input", entry.text
                )

    @property
    def entries(self) -> list[Entry]:
        return [*self.inputs.values(), *self.outputs]

    def _error(self, problem: str, expected: str, got: str) -> DefinitionError:
        return DefinitionError(f"shapes={self.text!r}: {problem}", op=self.op, expected=expected, got=got)

    # Reading the text -----------------------------------------------------------------------------------------------

    def _entries(self, text: str, count: int, what: str) -> list[Entry]:
        parts = [part.strip() for part in text.split(",")] if text.strip() or count == 1 else []
        if len(parts) != count:
            raise self._error(
                f"it needs an entry for each {what}", f"{count} of {self.schema}", f"{len(parts)}: {text.strip()}"
            )
        is_input = what.startswith("tensor")
        return [self._entry(part, self.arguments[i] if is_input else None) for i, part in enumerate(parts)]

    def _entry(self, text: str, argument: Argument | None) -> Entry:
        dims: list[Dim] = []
        at, star = None, ""
        for item in _ITEM.findall("" if text == "()" else text):
            is_list = argument is not None and argument.is_tensor_list
            if item == "..." or (item.startswith("*") and not (is_list or self._is_each(item[1:], argument))):
                if at is not None:
                    raise self._error("one item of an entry may stand for several dimensions", "one * or ...", text)
                at, star = len(dims), "..." if item == "..." else item[1:]
                self._check_name(star) if star != "..." else None
            else:
                dims.append(self._dim(item, text, is_input=argument is not None))
        at = len(dims) if at is None else at
        return Entry(text, tuple(dims[:at]), tuple(dims[at:]), star)

    def _is_each(self, name: str, argument: Argument | None) -> bool:
        """Is it, in a return, the sum of the sizes of a list?"""
        return argument is None and any(
            dim.kind == "each" and dim.names == (name,) for e in self.inputs.values() for dim in e.dims
        )

    def _check_name(self, name: str) -> None:
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise self._error("this is no name", "letters, digits and underscores", name)

    def _dim(self, item: str, entry: str, *, is_input: bool) -> Dim:
        if item == "_":
            return Dim(item, "any")
        if item.isdecimal():
            return Dim(item, "number")
        if item[0] in "?*":
            self._check_name(item[1:])
            if item[0] == "?" and is_input:
                raise self._error("only the size of a result depends on data", f"{item[1:]} or _", entry)
            return Dim(item, "data" if item[0] == "?" else "each", (item[1:],) if item[0] == "*" else ())
        try:
            tree = ast.parse(item, mode="eval").body
        except SyntaxError:
            raise self._error("this is no dimension", "a name, a number, _, ... or an expression", item) from None
        names = []
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                names.append(node.id)
            elif not isinstance(node, (ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Load)) and not (
                isinstance(node, ast.Constant) and type(node.value) is int
            ):
                raise self._error("an expression has names and numbers, and + - * //", "such as h*d or n//2", item)
        is_name = isinstance(tree, ast.Name)
        return Dim(item, "name" if is_name else "expression", tuple(dict.fromkeys(names)))

    # What is bound, and what is compared, in which order --------------------------------------------------------------

    def _plan(self) -> list[tuple[str, Argument, Dim, int, str]]:
        """Steps ``(kind, argument, dim, index, name)``: "bind" a name, "solve" an expression for one, or "check"."""
        places = [(a, dim, i) for a, entry in self.inputs.items() for dim, i in entry.places() if dim.kind != "any"]
        # What may not be there determines nothing that another may.
        places.sort(key=lambda place: place[0].type.endswith("?"))
        steps: list[tuple[str, Argument, Dim, int, str]] = []
        known, waiting = set(self.integers), []
        for argument, dim, i in places:
            if dim.kind == "name" and dim.text not in known:
                known.add(dim.text)
                steps.append(("bind", argument, dim, i, dim.text))
            elif dim.kind == "each":
                known.add(dim.names[0])
                steps.append(("each", argument, dim, i, dim.names[0]))
            else:
                waiting.append((argument, dim, i))
        while waiting:
            left = []
            for argument, dim, i in waiting:
                unknown = [name for name in dim.names if name not in known]
                if not unknown:
                    steps.append(("check", argument, dim, i, ""))
                elif len(unknown) == 1 and solved(dim.text, unknown[0]) is not None:
                    known.add(unknown[0])
                    steps.append(("solve", argument, dim, i, unknown[0]))
                else:
                    left.append((argument, dim, i))
            if len(left) == len(waiting):
                argument, dim, _ = left[0]
                problem = f"{dim.text} of {argument.shown} has several solutions"
                raise self._error(problem, "an argument that determines all but one name", self.inputs[argument].text)
            waiting = left
        return steps


def solved(text: str, name: str) -> str | None:
    """The code that gives `name`, of ``$size``, the value of an expression; None unless it is in it once, undivided."""
    tree, result = ast.parse(text, mode="eval").body, "$size"
    while not isinstance(tree, ast.Name):
        if not isinstance(tree, ast.BinOp) or isinstance(tree.op, ast.FloorDiv):
            return None
        is_left, is_right = (
            [n for n in ast.walk(side) if isinstance(n, ast.Name) and n.id == name] for side in (tree.left, tree.right)
        )
        if len(is_left) + len(is_right) != 1:
            return None
        inner, other = (tree.left, tree.right) if is_left else (tree.right, tree.left)
        value = code_of(other)
        if isinstance(tree.op, ast.Mult):
            result = f"$exact({result}, {value})"
        elif isinstance(tree.op, ast.Add):
            result = f"({result} - {value})"
        else:
            result = f"({result} + {value})" if is_left else f"({value} - {result})"
        tree = inner
    return result
