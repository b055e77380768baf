"""Functions generated from the schema of an op, as Python source: so that a call pays for no loop over its arguments.

The text of a function is a template with holes: ``{hole}`` is code that depends on the op. Helpers named ``emit_*``
return that code. See `fill` for holes, and `Source` for the ``$names`` in a template.
"""

from __future__ import annotations

import builtins
import collections
import functools
import inspect
import linecache
import re
import types
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from customops import _torch
from customops._schema.model import Argument, Schema
from customops._versions import cached_property

__tracebackhide__ = True  # pytest leaves the frames out


# Templates ------------------------------------------------------------------------------------------------------

#: A hole alone on its line, or one within a line, with the comma before it.
_HOLE = re.compile(r"^( *)\{(\w+)\}\n|(, )?\{(\w+)\}", re.MULTILINE)

#: Of each template the texts before a hole with the groups of `_HOLE`, and the text after the last hole.
_parts: dict[str, list[tuple[str, Any, Any, Any, Any]]] = {}


def fill(template: str, /, **holes: str | Sequence[str]) -> str:
    """The template with code in its holes.

    A hole that is alone on its line is for a block: lines, or a text of lines, which are indented as the hole is. Any
    other is for a text, or for texts that are joined with commas. With an empty block goes the line; with an empty text
    goes the comma before it.
    """
    pieces = []
    if template not in _parts:
        split = iter([*_HOLE.split(template), None, None, None, None])
        _parts[template] = list(zip(*[split] * 5, strict=True))
    for text, indent, block, comma, hole in _parts[template]:
        pieces.append(text)
        if block is not None:
            code = holes[block]
            lines = code.splitlines() if isinstance(code, str) else code
            if lines:
                pieces += [indent, f"\n{indent}".join(lines), "\n"]
        elif hole is not None:
            code = holes[hole]
            code = code if isinstance(code, str) else ", ".join(code)
            pieces += [comma or "", code] if code else []
    return "".join(pieces)


class Source:
    """A function to generate: its text, and the objects that the text refers to.

    ``$name`` in the text is a name that no argument of the op has. It stands for a local variable, for one of `objects`
    or for what Python calls so: ``$len``. Arguments go by their own names, see `Argument.variable`.
    """

    def __init__(self, name: str, schema: Schema) -> None:
        self.name, self.schema = name, schema
        self.template = ""
        self.objects: dict[str, Any] = {}
        #: Objects that are other ones for each op: functions that make them of its name.
        self.objects_of_op: dict[str, Callable[[str], Any]] = {}
        self._prefix, names = "_", ",".join(["", *[argument.name for argument in schema.arguments]])
        while f",{self._prefix}" in names:
            self._prefix += "_"

    def fill(self, template: str, /, **holes: str | Sequence[str]) -> None:
        """Set the template, with its holes filled: see `fill`."""
        self.template = fill(template.lstrip("\n"), **holes)

    def build(self, op: str = "", **objects: Any) -> Callable[..., Any]:
        """The function for one op, with the objects that are its own. It is compiled once."""
        first = self._first
        namespace = dict(first.__globals__)
        for name, make in self.objects_of_op.items():
            namespace[self._prefix + name] = make(op)
        for name, value in objects.items():
            namespace[self._prefix + name] = value
        function = types.FunctionType(first.__code__, namespace, self.name, first.__defaults__)
        function.__kwdefaults__ = first.__kwdefaults__
        return function

    @cached_property
    def _first(self) -> Any:
        """The function without the objects of an op."""
        code, names = _compiled(self.template, self._prefix, self.name)
        known, namespace = vars(builtins) | self.objects, {"__tracebackhide__": True}
        for name in names & known.keys():
            namespace[self._prefix + name] = known[name]
        exec(code, namespace)
        return namespace.pop(self.name)


# Compiling ------------------------------------------------------------------------------------------------------


def compile_on_first_call(name: str, generate: Callable[[], types.FunctionType]) -> Callable[..., Any]:
    """A function that is generated and compiled when it is first called: programs call few of a library's ops."""
    namespace: dict[str, Any] = {"__tracebackhide__": True}
    fn = types.FunctionType(_stub.__code__, namespace, name)
    namespace["specialize"] = functools.partial(_specialize, fn, generate)
    return _torch.dynamo.outside_dynamo(fn)


def _stub(*args: Any, **kwargs: Any) -> Any:
    return specialize()(*args, **kwargs)  # type: ignore[name-defined]  # noqa: F821 (in the namespace of each function)


def _specialize(fn: types.FunctionType, generate: Callable[[], types.FunctionType]) -> types.FunctionType:
    """Give a stub the code that is generated for it. The dispatcher keeps the function that it was given."""
    generated = generate()
    _torch.dynamo.outside_dynamo(generated)
    fn.__globals__.update(generated.__globals__)
    fn.__defaults__, fn.__kwdefaults__ = generated.__defaults__, generated.__kwdefaults__
    fn.__code__ = generated.__code__  # last: another thread may be about to call it
    return fn


def source_of(fn: Any) -> str:
    """The source of a generated function, which is compiled for that if it was never called; "" for others."""
    fn = inspect.unwrap(fn)
    if getattr(fn, "__code__", None) is _stub.__code__:
        fn.__globals__["specialize"]()
    is_generated = inspect.isfunction(fn) and fn.__code__.co_filename.startswith(_FILE)
    return inspect.getsource(fn) if is_generated else ""


_NAME = re.compile(r"\$(\w+)")

#: How the names of the files of generated functions start.
_FILE = "<customops "

#: How many code objects there are of each file. As long as there is one, linecache has the lines.
_living: collections.Counter[str] = collections.Counter()


@functools.lru_cache(maxsize=512)  # ops of one shape share the code
def _compiled(template: str, prefix: str, name: str) -> tuple[types.CodeType, frozenset[str]]:
    """Code of a file that tracebacks, debuggers and `inspect.getsource` find the lines of; and the ``$names`` in it."""
    text, names = template.replace("$", prefix), frozenset(_NAME.findall(template))
    file = f"{_FILE}{name} {zlib.crc32(text.encode()):08x}>"
    module = compile(text, file, "exec")
    (code,) = [const for const in module.co_consts if isinstance(const, types.CodeType)]
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    _living[file] += 1
    weakref.finalize(code, _forget_lines, file).atexit = False
    return module, names


def _forget_lines(file: str) -> None:
    _living[file] -= 1
    if not _living[file]:  # else it was compiled anew
        del _living[file]
        linecache.cache.pop(file, None)


# Parameters and expressions ----------------------------------------------------------------------------------


def emit_parameters(
    positional: Iterable[Argument], keyword_only: Iterable[Argument], defaults: Mapping[str, str], *, rest: str = ""
) -> list[str]:
    """The parameters of a function that takes arguments of an op.

    `defaults`: expressions for those that a call may leave out, by name. `rest`: takes more positional ones.
    """
    texts, named = list[str](), list[str]()
    for arguments, into in ((positional, texts), (keyword_only, named)):
        for argument in arguments:
            default = defaults.get(argument.name)
            into.append(argument.variable if default is None else f"{argument.variable}={default}")
    star = rest or "*" * bool(named)
    return [*texts, *[star] * bool(star), *named]


#: What the ``__call__`` of an op's object does by way of the dispatcher.
ENTER = """\
try:
    {take} $self._entry({passed})
except $RuntimeError as $error:
    try:
        $self._definition.explain($error)
        raise
    except $CustomOpsError as $said:
        $cut($said)
        raise
"""


def as_tuple(items: Iterable[str]) -> str:
    """A tuple display."""
    items = list(items)
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"


def as_dict(items: Mapping[str, str]) -> str:
    """A dict display, of expressions by key."""
    return f"{{{', '.join([f'{key!r}: {value}' for key, value in items.items()])}}}"


def joined(operator: str, operands: Iterable[str]) -> str:
    """Operands of which there are several are put in parentheses."""
    operands = list(operands)
    return operands[0] if len(operands) == 1 else f"({f' {operator} '.join(operands)})"
