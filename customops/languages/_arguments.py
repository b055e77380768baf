"""The arguments of functions of other languages, and of each language its package and devices."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from customops import _torch
from customops._codegen.function import Source
from customops._places import name_of, where
from customops._schema.model import Schema
from customops.errors import ArgumentError, UnsupportedError, brief

Function = Callable[..., Any]

#: A wrapped function before its first call, and then: what arguments of the types of that call need is known.
UNCALLED = "def kernel(*$args, **$named):\n    return $find(*$args, **$named)(*$args, **$named)\n"
CALL = """
def kernel(*$args, **$named):
    if $len($args) == {count} and {has_names}:
        {take_apart}
        if {same_types}:
            try:
                {refuse_lazy}
                $value = $fn({converted})
            except $Exception:
                $explain(*$args, **$named)
                raise
            return $value if $value is None else $back($value)
    return $find(*$args, **$named)(*$args, **$named)
"""


@dataclass(frozen=True)
class Language:
    """A row of the table of languages."""

    name: str
    module: str = ""
    package: str = ""  #: the package that has the module, if its name differs
    devices: tuple[str, ...] = ()  #: whose tensors the language takes; () for all

    def load(self) -> Any:
        """Import the module of the language."""
        try:
            return importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            problem = f"kernels in {self.name} need a package: pip install {self.package or self.module} ({error})"
            raise ImportError(problem) from error


class Arguments:
    """Converts the tensors among the arguments of a function of another language."""

    def __init__(self, fn: Function, language: Language, names: Iterable[str] | None = None) -> None:
        self.fn, self.language, self.by_position = fn, language, names is not None
        if not callable(fn):
            raise ArgumentError(f"a {language.name} kernel must be a function", argument="fn", got=brief(fn))
        if names is None:
            parameters: Iterable[inspect.Parameter] = ()
            with contextlib.suppress(ValueError, TypeError):  # they cannot be known
                parameters = inspect.signature(fn).parameters.values()
            is_open = any(each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in parameters)
            names = () if is_open else (each.name for each in parameters)
        self.names = tuple(names)

    def adapter(
        self, convert: Function, back: Function, hints: Any = None, *, as_is: bool = False, with_others: bool = False
    ) -> Function:
        """Return the function for tensors: ``convert(name, tensor)`` makes arrays, ``back(value, hint)`` tensors.

        `as_is`: `fn` gets the tensors themselves; if it raises, `convert` says why. `with_others`: `convert` also gets
        values that are not tensors.
        """
        self.convert, self.as_is, self.with_others, self.known = convert, as_is, with_others, dict[Any, Any]()
        self.objects: dict[str, Any] = {"fn": self.fn, "back": functools.partial(_each_back, back, hints)}
        self.objects |= {"find": self.find, "explain": self.explain}
        self.kernel = self.generated(UNCALLED, self.objects)
        return functools.update_wrapper(self.kernel, self.fn)

    def generated(self, template: str, objects: dict[str, Any], **holes: Any) -> Any:
        source = Source("kernel", Schema((), ()))
        source.fill(template, **holes)
        return _torch.dynamo.outside_dynamo(source.build(**objects))

    def find(self, /, *args: Any, **named: Any) -> Any:
        """Return the function for arguments of these types. The wrapper itself gets the code for the first types."""
        types = (*map(type, args), *((name, type(value)) for name, value in named.items()))
        if types in self.known:
            return self.known[types]
        if named and self.by_position:
            problem, got = f"a function of {self.language.name} takes arguments by position only", ", ".join(named)
            raise ArgumentError(problem, op=name_of(self.fn), got=got)
        objects, same_types, lazy, converted = {**self.objects, "names": [*named]}, [], [], list[str]()
        for i, (name, value) in enumerate(self.by_name(*args, **named)):
            convert, item = functools.partial(self.convert, name), f"${i}"
            same_types.append(f"$type({item}) is $type{i}")
            if self.as_is and isinstance(value, Tensor):
                lazy.append(f"{item}.is_conj() or {item}.is_neg()")
            elif self.with_others or isinstance(value, (Tensor, tuple, list)):
                convert = functools.partial(_each, convert) if isinstance(value, (tuple, list)) else convert
                item = f"$convert{i}({item})"
            objects |= {f"name{i}": name, f"type{i}": type(value), f"convert{i}": convert}
            converted.append(item if i < len(args) else f"**{{$name{i}: {item}}}")
        names = "".join(f"${i}, " for i in range(len(converted)))
        self.known[types] = known = self.generated(
            CALL,
            objects,
            count=str(len(args)),
            has_names="[*$named] == $names" if named else "not $named",
            take_apart=f"{names}= {'*$args, *$named.values()' if named else '$args'}" if names else "",
            same_types=" and ".join(same_types) or "True",
            refuse_lazy=f"if {' or '.join(lazy)}:\n    $explain(*$args, **$named)" if lazy else "",
            converted=converted,
        )
        if self.known.setdefault("first", known) is known:
            self.kernel.__globals__.update(known.__globals__)
            self.kernel.__code__ = known.__code__  # last: another thread may be about to call it
        return known

    def by_name(self, /, *args: Any, **named: Any) -> list[tuple[str, Any]]:
        names = [*self.names, *(f"argument {i}" for i in range(len(self.names), len(args)))]
        return [*zip(names, args, strict=False), *named.items()]

    def explain(self, /, *args: Any, **named: Any) -> None:
        """Raise an error if the language does not take a tensor of a call that failed."""
        for name, value in self.by_name(*args, **named):
            _each(functools.partial(self.convert, name), value)

    def plain(self, name: str, tensor: Tensor) -> Tensor:
        """Return the tensor without its autograd graph: the op has a gradient rule. Raise if it has no plain memory."""
        language, devices = self.language.name, self.language.devices
        if devices and not (tensor.is_cpu and "cpu" in devices) and tensor.device.type not in devices:
            problem = f"{language} takes tensors of no such device"
            expected = f"a tensor on {' or '.join(devices)}"
            fix = f'{name}.to("{devices[0]}"), or op.register_kernel("{tensor.device.type}", fn)'
            raise self.refusal(name, problem, expected=expected, got=str(tensor.device), fix=fix)
        if tensor.layout is not torch.strided:
            got = str(tensor.layout)
            raise self.refusal(name, f"{language} takes strided tensors", got=got, fix=f"{name}.to_dense()")
        if tensor.is_conj() or tensor.is_neg():
            resolve = "resolve_conj" if tensor.is_conj() else "resolve_neg"
            raise self.refusal(name, "the memory of a conjugated or negated view is not its values", fix=f"{resolve}()")
        return tensor.detach() if tensor.requires_grad else tensor

    def converted(self, name: str, tensor: Tensor, convert: Function) -> Any:
        """Return the array that `convert` makes of a plain tensor. Raise if the language has no such arrays."""
        try:
            return convert(tensor)
        except (TypeError, ValueError, RuntimeError, BufferError) as error:
            problem = f"{self.language.name} does not take the tensor: {error}"
            got = f"{tensor.dtype}, shape {tuple(tensor.shape)}, on {tensor.device}"
            fix = f"{name}.float(), and the result .to({name}.dtype), if {self.language.name} lacks the dtype"
            raise self.refusal(name, problem, got=got, fix=fix) from error

    def refusal(self, name: str, problem: str, **fields: str) -> UnsupportedError:
        return UnsupportedError(problem, op=name_of(self.fn), argument=name, where=where(self.fn), **fields)

    def wrong_dtype(self, name: str, tensor: Tensor, fix: str, **fields: str) -> UnsupportedError:
        problem = f"{self.language.name} takes no tensor of this dtype here"
        return self.refusal(name, problem, got=str(tensor.dtype), fix=fix, **fields)


def _each(convert: Callable[[Tensor], Any], value: Any) -> Any:
    """Convert a tensor, or the tensors in a list. Return other values unchanged."""
    if isinstance(value, Tensor):
        return convert(value)
    if isinstance(value, (tuple, list)) and True in [isinstance(item, Tensor) for item in value]:
        return [_each(convert, item) for item in value]
    return value


def _each_back(convert_back: Callable[[Any, Any], Any], hints: Any, value: Any) -> Any:
    if not isinstance(value, (tuple, list)):
        return convert_back(value, hints)
    of_each = hints if isinstance(hints, tuple) and len(hints) == len(value) else (None,) * len(value)
    converted = [convert_back(*pair) for pair in zip(value, of_each, strict=True)]
    return converted if isinstance(value, list) else tuple(converted)
