"""Fakes that are declared: each result is like an argument, but for what is said."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from customops import _compat
from customops._dispatch.callbacks import Fn, bind_kernel
from customops._dispatch.spec import OpSpec
from customops._schema.model import Return, Schema
from customops.errors import CallbackError, KernelError, RegistrationError, brief, user_source, where

__tracebackhide__ = True  # pytest leaves the frames out

#: A size, or the name of an argument that is one.
Size = int | torch.SymInt | str
#: The name of a tensor or of a list of sizes, sizes, or a function of arguments, by their names, that returns sizes.
Shape = str | Sequence[Size] | Callable[..., Sequence[Any]]

_SIZE = ("int", "SymInt")
_NOT_BY_NAME = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.VAR_POSITIONAL,
    inspect.Parameter.VAR_KEYWORD,
)
_SIZES = ("int[", "SymInt[")

_UNKNOWN = "like() names something that the op does not have"
_WRONG = "like() has an invalid value"


@dataclass(frozen=True)
class Like:
    """What `like` returns."""

    argument: str
    shape: Shape | None = None
    dtype: torch.dtype | str | None = None
    device: str | None = None
    memory_format: torch.memory_format = torch.preserve_format

    def make(self, given: dict[str, Any], op: str) -> Any:
        """The result, without data, of a call of `op` with these arguments.

        Raises:
            KernelError: what `shape` says gives no sizes.
        """
        value = given[self.argument]
        if value is None:
            return None
        if isinstance(value, Tensor):
            return self._one(value, given, op)
        return [self._one(each, given, op) for each in value]

    def _one(self, tensor: Tensor | None, given: dict[str, Any], op: str) -> Tensor | None:
        if tensor is None:
            return None
        dtype = _attribute(self.dtype, "dtype", given) or tensor.dtype
        device = _attribute(self.device, "device", given) or tensor.device
        if self.shape is None:
            return torch.empty_like(tensor, dtype=dtype, device=device, memory_format=self.memory_format)
        memory_format = self.memory_format
        if memory_format is torch.preserve_format:
            memory_format = torch.contiguous_format
        return torch.empty(self._checked_sizes(given, op), dtype=dtype, device=device, memory_format=memory_format)

    def _checked_sizes(self, given: dict[str, Any], op: str) -> Any:
        sizes = self._sizes(given)
        if isinstance(sizes, (tuple, list)) and all(map(_is_size, sizes)):
            return sizes
        raise KernelError(
            "the shape of a like() gives no sizes",
            op=op,
            argument=self.shape if isinstance(self.shape, str) else None,
            expected="a tuple or list of int, each 0 or more",
            got=brief(sizes),
            where=where(self.shape) if callable(self.shape) else None,
        )

    def _sizes(self, given: dict[str, Any]) -> Any:
        shape: Any = self.shape
        if isinstance(shape, str):
            return given[shape].shape if isinstance(given[shape], Tensor) else given[shape]
        if callable(shape):
            sizes = shape(**{name: given[name] for name in inspect.signature(shape).parameters})
            return sizes if isinstance(sizes, (Tensor, str)) or not isinstance(sizes, Iterable) else tuple(sizes)
        return tuple(given[each] if isinstance(each, str) else each for each in shape)


def like(
    argument: str,
    /,
    *,
    shape: Shape | None = None,
    dtype: torch.dtype | str | None = None,
    device: str | None = None,
    memory_format: torch.memory_format = torch.preserve_format,
) -> Like:
    """Declare that a result is like an argument, for `register_fake`.

    The result has the argument's dtype and device, and the shape and strides that `torch.empty_like` gives. With
    `shape`, it has that shape and is contiguous. If the argument is a list of tensors, so is the result; if it is None,
    the result is None.

    Args:
        argument: the name of a tensor argument, or of a list of tensors.
        shape: sizes, each a number or the name of an ``int`` argument; or the name of a tensor with this shape, or of a
            list of sizes; or a function that takes arguments of the op by name, and returns sizes.
        dtype: a dtype, or the name of a tensor with this dtype, or of a ``torch.dtype`` argument.
        device: the name of a tensor on this device, or of a ``torch.device`` argument.
        memory_format: the memory format of the result. For example ``torch.contiguous_format`` if the kernel's result
            is contiguous for arguments of any strides.

    Example:
        >>> double.register_fake(like("x"))
        >>> topk.register_fake((like("x", shape=("n", "k")), like("x", shape=("n", "k"), dtype=torch.int64)))
        >>> outer.register_fake(like("x", shape=lambda x, y: (len(x), len(y))))
    """
    return Like(argument, shape if not isinstance(shape, list) else tuple(shape), dtype, device, memory_format)


def declared(given: Any, spec: OpSpec) -> Fn:
    """The fake impl that is declared by `Like`, by several, or by the word "kernel".

    Raises:
        RegistrationError: it names what the op does not have, or the op has another number of returns.
    """
    if given == "kernel":
        return _kernel(spec)
    likes = tuple(given) if isinstance(given, (tuple, list)) else (given,)
    if not likes or not all(isinstance(each, Like) for each in likes):
        raise CallbackError(
            "the fake impl must be callable, or be declared",
            op=spec.qualname,
            expected='a function, like("x"), a tuple of these, or "kernel"',
            got=brief(given),
            where=user_source(),
            fix="register_fake(fn), where fn takes the op's arguments and returns tensors like the results",
        )
    if len(likes) != len(spec.schema.returns):
        raise RegistrationError(
            "register_fake needs one like() for each return",
            op=spec.qualname,
            expected=f"{len(spec.schema.returns)} for {spec.schema}",
            got=str(len(likes)),
            where=user_source(),
        )
    for each, result in zip(likes, spec.schema.returns, strict=True):
        _Names(spec.schema, spec.qualname).check(each, result)
    return DeclaredFake(likes, spec)


def _kernel(spec: OpSpec) -> Fn:
    if spec.kernel is None:
        raise RegistrationError(
            'the fake "kernel" is the function that the op was defined from, and it was defined without one',
            op=spec.qualname,
            where=user_source(),
            fix="register_fake(fn), with a function made of torch's ops",
        )
    kernel = bind_kernel(spec.kernel, spec.schema, spec.qualname, "fake impl")

    @functools.wraps(spec.kernel)
    def fake(*args: Any, **kwargs: Any) -> Any:
        return _compat.kernel_state.call_plainly_in_trace(kernel, *args, **kwargs)

    return fake


class DeclaredFake:
    """The fake impl of an op all results of which are declared."""

    def __init__(self, likes: tuple[Like, ...], spec: OpSpec) -> None:
        self.likes, self.op = likes, spec.qualname
        self.returns_tuple = len(likes) > 1 or spec.schema.returns[0].type.startswith("(")
        self.positional = tuple(argument.name for argument in spec.schema.positional)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(self.positional, args, strict=False)), **kwargs}
        results = tuple(each.make(given, self.op) for each in self.likes)
        return results if self.returns_tuple else results[0]


class _Names:
    """The names in a `Like`, held against an op."""

    def __init__(self, schema: Schema, op: str) -> None:
        self.op = op
        self.arguments = {argument.name: argument for argument in schema.arguments}
        self.tensors = [name for name, argument in self.arguments.items() if argument.holds_tensors]
        self.plain_tensors = [name for name in self.tensors if self.arguments[name].is_tensor]

    def check(self, like: Like, result: Return) -> None:
        self._refuse_unknown("like", like.argument, self.tensors, "tensors")
        argument = self.arguments[like.argument]
        kind = result.type.strip("()")  # a tuple of one is "(Tensor)"
        if kind != ("Tensor[]" if argument.is_tensor_list else "Tensor"):
            raise RegistrationError(
                f"like() makes what {like.argument} is, and the op returns something else",
                op=self.op,
                argument=like.argument,
                expected=result.type,
                got=argument.type,
                where=user_source(),
                fix="register_fake(fn), with a function",
            )
        if like.dtype is not None and not isinstance(like.dtype, torch.dtype):
            self._refuse_unknown("dtype", like.dtype, self.plain_tensors + self._of("ScalarType"), "arguments")
        if like.device is not None:
            self._refuse_unknown("device", like.device, self.plain_tensors + self._of("Device"), "arguments")
        if not isinstance(like.memory_format, torch.memory_format):
            raise self._error("memory_format", "a torch.memory_format", brief(like.memory_format), _WRONG)
        self._check_shape(like.shape)

    def _check_shape(self, shape: Any) -> None:
        if shape is None:
            return
        if isinstance(shape, str):
            self._refuse_unknown("shape", shape, self.plain_tensors + self._of(*_SIZES), "arguments")
        elif callable(shape):
            for each in inspect.signature(shape).parameters.values():
                if each.name not in self.arguments or each.kind in _NOT_BY_NAME:
                    raise self._error("shape", f"some of {', '.join(self.arguments)}", f"{each} of {where(shape)}")
        elif isinstance(shape, Sequence):
            for size in shape:
                if isinstance(size, str):
                    sizes = [name for name, argument in self.arguments.items() if argument.type in _SIZE]
                    self._refuse_unknown("shape", size, sizes, "int arguments")
                elif not _is_size(size):
                    raise self._error("shape", "an int, 0 or more, or the name of an int argument", brief(size), _WRONG)
        else:
            raise self._error("shape", "sizes, a name, or a function", brief(shape), _WRONG)

    def _of(self, *types: str) -> list[str]:
        return [name for name, argument in self.arguments.items() if argument.type.startswith(types)]

    def _refuse_unknown(self, option: str, name: Any, known: list[str], kind: str) -> None:
        if name not in known:
            expected = f"the name of one of the {kind} {', '.join(known)}" if known else f"the op has no {kind}"
            raise self._error(option, expected, brief(name))

    def _error(self, option: str, expected: str, got: str, problem: str = _UNKNOWN) -> RegistrationError:
        return RegistrationError(
            problem,
            op=self.op,
            argument=option,
            expected=expected,
            got=got,
            where=user_source(),
        )


def _is_size(value: Any) -> bool:
    """Is it an int of 0 or more? Of a symbol that is not asked: it would be a guard."""
    if isinstance(value, torch.SymInt):
        return True
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _attribute(said: Any, attribute: str, given: dict[str, Any]) -> Any:
    """What is said of a dtype or device: itself, or that of the argument it names."""
    value = given[said] if isinstance(said, str) else said
    return getattr(value, attribute) if isinstance(value, Tensor) else value
