"""The fake impl: how the op runs on tensors without data."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor

from customops import _torch
from customops._dispatch import names
from customops._dispatch.callbacks import Fill, Fn, bind_kernel, filler
from customops._dispatch.operator import OpSpec
from customops._dispatch.registrations import Registration, Undo
from customops._dispatch.results import (
    ResultCheck,
    mutated_results,
    result_error,
    structure_check,
)
from customops._dispatch.rule import Rule
from customops._rules.out import asking
from customops._schema.model import Return, Schema
from customops._torch.schema import Tag
from customops._torch.tensors import tensors_in
from customops._versions import cached_property
from customops.errors import (
    ArgumentError,
    CallbackError,
    CustomOpsError,
    KernelError,
    MissingFakeError,
    RegistrationError,
    brief,
    is_deliberate,
    name_of,
    user_source,
    user_stacklevel,
    users_frames,
    where,
)

__tracebackhide__ = True  # pytest leaves the frames out


class FakeRule(Rule[None, Fn]):
    """The fake of one op. Without one, the function that comes with the op says how to register it."""

    _with_op: tuple[None, ...] = (None,)
    #: What is called as long as none is registered.
    default: Fn | None = None
    #: What became of the one of an op that this one replaced; "" if that had none.
    lost = ""

    def follow(self, old: FakeRule, place: str) -> None:
        """The op of another rule was replaced by this one's, at a place."""
        source = old.source(None)
        replaced = f"the one registered at {source} is of the op that was replaced by the definition at {place}"
        self.lost = replaced if source else old.lost

    @property
    def fn(self) -> Fn | None:
        registered = self.values.get(None)
        return registered if registered is not None else self._kernel

    @cached_property
    def _kernel(self) -> Fn | None:
        """The function of the op, where that runs without data. Where the schema says what comes out, none is run."""
        spec = self.operator.spec
        if not spec.traceable or spec.kernel is None or self.trivial():
            return None
        return bind_kernel(spec.kernel, spec.schema, spec.qualname, "kernel")

    @cached_property
    def _by_schema(self) -> tuple[Fill | None, ResultCheck, Fn | None]:
        """What puts defaults in, checks a result, and gives what an in-place or out op returns, of its arguments."""
        schema, op, tags = self.operator.schema, self.operator.qualname, self.operator.tags
        return filler(schema), structure_check(schema, op, "fake impl"), mutated_results(schema, tags)

    def register(self, fn: Fn, allow_override: bool = True) -> Registration:
        op = self.operator.qualname
        ours = self.operator.library is not None
        fn = bind_kernel(fn, self.operator.schema, op, "fake impl", warn=ours)
        if _torch.dispatcher.has_kernel(op, "CompositeImplicitAutograd"):
            raise RegistrationError(
                "the op has a CompositeImplicitAutograd kernel: it is traced through to the ops it is made of",
                op=op,
                fix="register fakes for those ops, or define this one below autograd (CompositeExplicitAutograd)",
            )
        if not allow_override:
            record, source = _torch.library.fake_record(op), self.source(None)
            known = _torch.library.torch_op_of(op)
            # For an op made by torch's own custom_op without a fake, one that raises is on record.
            if not source and record is not None and (known is None or known._abstract_fn is not None):
                source = record.source
            if source:
                raise RegistrationError(f"the op already has a fake impl registered at {source}", op=op)
            if record is None and _torch.dispatcher.has_kernel(op, "Meta"):  # a fake has one beside its record
                raise RegistrationError("the op already has a DispatchKey::Meta implementation", op=op)
        for tag in (Tag.inplace, Tag.out):
            if tag in self.operator.tags:
                warnings.warn(
                    f"{op}: an op with torch.{tag} has a fake impl already; the one registered now "
                    "replaces it, and must return the argument that the op writes",
                    UserWarning,
                    stacklevel=user_stacklevel(),
                )
        return self.set(None, fn)

    def trivial(self) -> bool:
        """Does the schema alone say what comes out? (what was written to, or nothing)"""
        tags, schema = self.operator.tags, self.operator.schema
        return Tag.inplace in tags or Tag.out in tags or bool(schema.mutated and not schema.returns)

    def _missing(self) -> MissingFakeError:
        spec = self.operator.spec
        name = name_of(spec.fn) if spec.fn is not None else self.operator.name.name
        parameters = spec.schema.arguments if spec.signature is None else spec.signature.parameters
        names = ", ".join(each.name for each in parameters)
        return MissingFakeError(  # torch's words
            f"There was no fake impl registered for <CustomOpDef({spec.qualname})>. "
            "This is necessary for torch.compile/export/fx tracing to work."
            + (f" There was one: {self.lost}. Register it again." if self.lost else ""),
            op=spec.qualname,
            fix=f"Please use `{name}.register_fake` to add a fake impl: fn({names}) "
            "that returns tensors like the kernel's, e.g. torch.empty_like(x)",
        )

    def _install(self, _: None, own_library: bool) -> Undo:
        """Put the function that calls the fake into torch's registry of fakes."""
        operator = self.operator
        overload, op, namespace = operator.overload, operator.qualname, operator.name.namespace

        def fake(*args: Any, **kwargs: Any) -> Any:
            names.use(namespace)
            is_compiled = not asking.get() and _torch.dynamo.traced(overload, op)
            fn, (fill, check, mutated) = self.fn or self.default, self._by_schema
            if fill is not None:
                args, kwargs = fill(args, kwargs)
            try:
                kernel = operator.choose_in_trace(args, kwargs) if is_compiled else None
                if kernel is not None:
                    _torch.dynamo.guard_preference(op)
                    _torch.dynamo.note("customops_kernel", f"{op}[{kernel}]")
                if fn is None and not self.trivial():
                    raise self._missing()
                result = check(fn(*args, **kwargs), fn) if fn is not None else None
                if mutated is None:
                    if is_compiled:
                        operator.inspect_compiled()
                    return result
                expected = mutated(args, kwargs)
                if fn is not None and not all(map(is_, tensors_in((result,)), tensors_in((expected,)))):
                    raise result_error(operator.schema, op, result, fn, role="fake impl")
                return expected
            except Exception as error:
                clear = _for_dynamo(error, op)
                if clear is error:
                    raise
                raise clear from None

        fn = _torch.dynamo.outside_dynamo(fake)
        return operator.impl_fake(fn, operator.spec.source, own_library=own_library)

    def _changed(self) -> None:
        if self.operator.removed is None:  # else the name may be another op's by now
            self.operator.recompile()
            record = _torch.library.fake_record(self.operator.qualname)
            if record is not None and None in self._uninstall:  # else it is the record of a fake of others
                record.source = self.source(None) or self.operator.spec.source


#: What Dynamo takes from a fake as a fault of it, and wraps: not the kinds that it handles.
_FAULTS = (AttributeError, NameError, KeyError, ValueError, RuntimeError, AssertionError, UnboundLocalError)


def _for_dynamo(error: Exception, op: str) -> Exception:
    """What to raise for what a fake raised: where Dynamo would hide where and why, an error that says it."""
    if isinstance(error, CustomOpsError):
        return _torch.dynamo.said_plainly(error)
    reads_data = _torch.tensors.reads_data(error)
    frames = users_frames(error)
    if not frames or not (reads_data or type(error) in _FAULTS):
        return error
    frame = frames[-1]
    said = str(error).partition("\n")[0]
    kind: type[CustomOpsError] = KernelError
    problem = f"the fake impl raised: {type(error).__name__}: {said}"
    fix = "correct it: it gets tensors without data, of which it may use shape, dtype and device"
    if reads_data:
        problem = f"the fake impl asks for data, which a fake tensor does not have: {type(error).__name__}: {said}"
        fix = "decide by shapes and dtypes; for a size that depends on data: customops.get_ctx().new_dynamic_size()"
    elif is_deliberate(error):
        problem, kind = f"{said} ({type(error).__name__} of the fake impl, which refuses these inputs)", ArgumentError
        fix = "pass inputs that the op takes; if its kernel takes these, have the fake impl take them, too"
    made = kind(
        problem,
        op=op,
        where=f"{frame.tb_frame.f_code.co_name} ({frame.tb_frame.f_code.co_filename}:{frame.tb_lineno})",
        fix=fix,
    )
    shown = _torch.dynamo.said_plainly(made, breaks=reads_data)
    return error if shown is made else shown


# Fakes that are declared: each result is like an argument, but for what is said ---------------------------------------


#: A size, or the name of an argument that is one.
Size = int | torch.SymInt | str
#: The name of a tensor or of a list of sizes, sizes, or a function of arguments, by their names, that returns sizes.
Shape = str | Sequence[Size] | Callable[..., Sequence[Any]]


@dataclass(frozen=True)
class Like:
    """What `like` returns."""

    argument: str
    shape: Shape | None = None
    dtype: torch.dtype | str | None = None
    device: str | None = None
    memory_format: torch.memory_format = torch.preserve_format

    def make(self, tensor: Tensor | None, given: dict[str, Any], op: str) -> Tensor | None:
        """The result, without data, like a tensor of a call of `op` with these arguments. Sizes are checked."""
        if tensor is None:
            return None
        options: dict[str, Any] = {"dtype": tensor.dtype, "device": tensor.device}
        for name, option in (("dtype", self.dtype), ("device", self.device)):
            value = given[option] if isinstance(option, str) else option
            options[name] = (getattr(value, name) if isinstance(value, Tensor) else value) or options[name]
        if self.shape is None:
            return torch.empty_like(tensor, **options, memory_format=self.memory_format)
        shape: Any = self.shape
        if isinstance(shape, str):
            sizes = given[shape].shape if isinstance(given[shape], Tensor) else given[shape]
        elif callable(shape):
            sizes = shape(**{name: given[name] for name in inspect.signature(shape).parameters})
            sizes = tuple(sizes) if isinstance(sizes, Iterable) and not isinstance(sizes, (Tensor, str)) else sizes
        else:
            sizes = tuple(given[each] if isinstance(each, str) else each for each in shape)
        if not isinstance(sizes, (tuple, list)) or not all(map(_is_size, sizes)):
            raise KernelError(
                "the shape of a like() gives no sizes",
                op=op,
                argument=shape if isinstance(shape, str) else None,
                expected="a tuple or list of int, each 0 or more",
                got=brief(sizes),
                where=where(shape) if callable(shape) else None,
            )
        is_default = self.memory_format is torch.preserve_format
        memory_format = torch.contiguous_format if is_default else self.memory_format
        return torch.empty(sizes, **options, memory_format=memory_format)


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
            return _torch.dispatcher.call_plainly_in_trace(kernel, *args, **kwargs)

        return fake
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
        _check_names(each, result, spec.schema, spec.qualname)
    return DeclaredFake(likes, spec)


class DeclaredFake:
    """The fake impl of an op all results of which are declared."""

    def __init__(self, likes: tuple[Like, ...], spec: OpSpec) -> None:
        self.likes, self.op = likes, spec.qualname
        self.returns_tuple = len(likes) > 1 or spec.schema.returns[0].type.startswith("(")
        self.positional = tuple(argument.name for argument in spec.schema.positional)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(self.positional, args, strict=False)), **kwargs}
        results: list[Any] = []
        for each in self.likes:
            value = given[each.argument]
            if isinstance(value, (list, tuple)):
                results.append([each.make(tensor, given, self.op) for tensor in value])
            else:
                results.append(each.make(value, given, self.op))
        return tuple(results) if self.returns_tuple else results[0]


_NOT_BY_NAME = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_UNKNOWN = "like() names something that the op does not have"
_WRONG = "like() has an invalid value"


def _check_names(like: Like, result: Return, schema: Schema, op: str) -> None:
    """Raise for a `Like` that names what an op does not have, or does not make its result."""
    arguments = {argument.name: argument for argument in schema.arguments}
    names, place = [*arguments], user_source()

    def wrong(option: str, expected: str, got: str, problem: str = _WRONG) -> RegistrationError:
        return RegistrationError(problem, op=op, argument=option, expected=expected, got=got, where=place)

    def check(option: str, name: Any, known: list[str], kind: str) -> None:
        if name not in known:
            expected = f"the name of one of the {kind} {', '.join(known)}" if known else f"the op has no {kind}"
            raise wrong(option, expected, brief(name), _UNKNOWN)

    def of(*types: str) -> list[str]:
        tensors = [name for name in names if arguments[name].is_tensor]
        return tensors + [name for name in names if arguments[name].type.startswith(types)]

    check("like", like.argument, [name for name in names if arguments[name].holds_tensors], "tensors")
    argument, shape = arguments[like.argument], like.shape
    kind = result.type.strip("()")  # a tuple of one is "(Tensor)"
    if kind != ("Tensor[]" if argument.is_tensor_list else "Tensor"):
        raise RegistrationError(
            f"like() makes what {like.argument} is, and the op returns something else",
            op=op,
            argument=like.argument,
            expected=result.type,
            got=argument.type,
            where=place,
            fix="register_fake(fn), with a function",
        )
    if like.dtype is not None and not isinstance(like.dtype, torch.dtype):
        check("dtype", like.dtype, of("ScalarType"), "arguments")
    if like.device is not None:
        check("device", like.device, of("Device"), "arguments")
    if not isinstance(like.memory_format, torch.memory_format):
        raise wrong("memory_format", "a torch.memory_format", brief(like.memory_format))
    if isinstance(shape, str):
        check("shape", shape, of("int[", "SymInt["), "arguments")
    elif callable(shape):
        for each in inspect.signature(shape).parameters.values():
            if each.name not in names or each.kind in _NOT_BY_NAME:
                raise wrong("shape", f"some of {', '.join(names)}", f"{each} of {where(shape)}", _UNKNOWN)
    elif isinstance(shape, Sequence):
        for size in shape:
            if isinstance(size, str):
                sizes = [name for name in names if arguments[name].type in ("int", "SymInt")]
                check("shape", size, sizes, "int arguments")
            elif not _is_size(size):
                raise wrong("shape", "an int, 0 or more, or the name of an int argument", brief(size))
    elif shape is not None:
        raise wrong("shape", "sizes, a name, or a function", brief(shape))


def _is_size(value: Any) -> bool:
    """Is it an int of 0 or more? Of a symbol that is not asked: it would be a guard."""
    if isinstance(value, torch.SymInt):
        return True
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
