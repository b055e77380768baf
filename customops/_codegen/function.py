"""Functions as Python source, made from the schema of an op: so that a call pays for no loop over its arguments."""

from __future__ import annotations

import functools
import inspect
import keyword
import linecache
import textwrap
import types
import weakref
import zlib
from collections.abc import Callable, Iterable
from typing import Any, cast

from customops import _compat
from customops._schema.model import Argument, Schema
from customops.errors import UnsupportedError

__tracebackhide__ = True  # pytest leaves the frames out


class Source:
    """A function in the making: its parameters, its lines, and the objects that they refer to.

    ``$name`` is a name of ours, spelled so that no argument of the op has it. Arguments go by their own names.
    """

    def __init__(self, name: str, schema: Schema) -> None:
        self.name = name
        self.parameters: list[str] = []
        self.lines: list[str] = []
        self.indent = ""
        self.objects: dict[str, Any] = {}
        self._prefix = "_"
        while any(argument.name.startswith(self._prefix) for argument in schema.arguments):
            self._prefix += "_"

    def line(self, text: str, **objects: Any) -> None:
        """Add a line. `objects` are what its ``$names`` stand for, where these are not variables of the function."""
        self.lines.append(self.indent + text)
        self.objects |= objects

    def fill(self, template: str, /, **holes: str | list[str]) -> None:
        """Add the lines of a function given whole, ``{name}`` being a hole: for text, or alone on its line for lines.

        The first line is ``def name({parameters}):``, and gives the parameters.
        """
        _, *lines = textwrap.dedent(template).strip("\n").splitlines()
        self.parameters = [*holes.pop("parameters")]
        texts = {name: hole for name, hole in holes.items() if isinstance(hole, str)}
        for line in lines:
            text = line.removeprefix("    ")
            hole = holes.get(text.strip()[1:-1]) if text.strip().startswith("{") else None
            if isinstance(hole, list):
                indent = text[: len(text) - len(text.lstrip())]
                self.lines += [self.indent + indent + each for each in hole]
            else:
                self.lines.append(self.indent + text.format_map(texts))

    @property
    def text(self) -> str:
        body = "".join(f"    {line}\n" for line in self.lines)
        return f"def {self.name}({', '.join(self.parameters)}):\n{body}".replace("$", self._prefix)

    def build(self) -> Any:
        namespace = {self._prefix + name: value for name, value in self.objects.items()}
        namespace["__tracebackhide__"] = True
        exec(_compiled(self.text, self.name), namespace)
        function = namespace[self.name]
        function.text = self.text
        return function


Write = Callable[[], Source]


def compile_on_first_call(name: str, write: Write) -> Callable[..., Any]:
    """A function that is written when it is first called: of a library's ops, most programs call few."""
    namespace: dict[str, Any] = {}
    fn = types.FunctionType(_stub.__code__, namespace, name)
    namespace["become"] = functools.partial(_specialize, fn, write)
    return _compat.dynamo.outside_dynamo(fn)


def _stub(*args: Any, **kwargs: Any) -> Any:
    return become(*args, **kwargs)  # type: ignore[name-defined]  # noqa: F821 (in the namespace of each function)


def _specialize(fn: Any, write: Write, *args: Any, **kwargs: Any) -> Any:
    """Make a blank function what it is to be, and call it. The dispatcher keeps the object that it was given."""
    written = write().build()
    _compat.dynamo.outside_dynamo(written)
    fn.__globals__.update(written.__globals__)
    fn.__defaults__, fn.__kwdefaults__ = written.__defaults__, written.__kwdefaults__
    fn.__code__ = written.__code__  # last: another thread may be about to call it
    return fn(*args, **kwargs)


def source_of(fn: Any) -> str:
    """The text of a function that was made here; "" for others."""
    fn = inspect.unwrap(fn)
    become = getattr(fn, "__globals__", {}).get("become")
    if isinstance(become, functools.partial) and become.func is _specialize:
        return cast(str, become.args[1]().text)
    return getattr(fn, "text", "")


#: The code of the functions, by the names of their files. Where linecache has their lines, as long as they live.
_codes: weakref.WeakValueDictionary[str, types.CodeType] = weakref.WeakValueDictionary()


@functools.lru_cache(maxsize=512)  # ops of one shape share the code
def _compiled(text: str, name: str) -> Any:
    """Code of a file that debuggers, tracebacks and `inspect` find the source of."""
    file = f"<customops {name} {zlib.crc32(text.encode()):08x}>"
    module = compile(text, file, "exec")
    code = next(const for const in module.co_consts if isinstance(const, types.CodeType))
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    _codes[file] = code
    weakref.finalize(code, _forget_lines, file).atexit = False
    return module


def _forget_lines(file: str) -> None:
    if file not in _codes:  # else it was compiled anew
        linecache.cache.pop(file, None)


# Arguments ------------------------------------------------------------------------------------------------------


def always_passed(schema: Schema) -> int:
    """How many positional arguments a call always has: trailing ones that equal their default are not passed."""
    return max((i + 1 for i, argument in enumerate(schema.positional) if not argument.has_default), default=0)


def variable_name(argument: Argument) -> str:
    """The variable that holds an argument. Positional ones may be called anything; keyword-only ones are parameters."""
    if not keyword.iskeyword(argument.name) and argument.name != "__debug__":
        return argument.name
    if argument.kwarg_only:
        raise UnsupportedError(
            f"a keyword-only argument cannot be called {argument.name!r}: that is a keyword of Python",
            argument=argument.name,
            fix="rename it, or make it positional",
        )
    return f"${argument.name}"


def may_be_none(argument: Argument, schema: Schema) -> bool:
    """Torch takes None for a Tensor, too; but a call with no tensor at all does not get to a kernel of a device."""
    return argument.type != "Tensor" or sum(a.holds_tensors for a in schema.arguments) > 1


def as_tuple(items: Iterable[str]) -> str:
    return "(" + "".join(f"{item}, " for item in items).rstrip() + ")"
