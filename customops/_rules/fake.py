"""The fake impl: how the op runs on tensors without data."""

from __future__ import annotations

import functools
import warnings
from operator import is_
from typing import Any

from customops import _torch
from customops._dispatch.callbacks import Fn, bind_kernel
from customops._dispatch.operator import OpSpec
from customops._dispatch.registrations import Registration, Undo
from customops._dispatch.results import ResultCheck, mutated_results, result_error, structure_check
from customops._dispatch.rule import Rule
from customops._places import is_deliberate, name_of, user_source, user_stacklevel, users_call, users_frames
from customops._rules.expected import asking_fake
from customops._schema.defaults import Fill, filler
from customops._torch.schema import Tag
from customops._torch.trees import tensors_in
from customops._versions import cached_property
from customops.errors import (
    ArgumentError,
    CallbackError,
    CustomOpsError,
    KernelError,
    MissingFakeError,
    RegistrationError,
    brief,
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
        overload, op = operator.overload, operator.qualname

        def fake(*args: Any, **kwargs: Any) -> Any:
            is_compiled = not asking_fake.get() and _torch.dynamo.traced(overload, op)
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
                clear = _for_compilers(error, op)
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


def _for_compilers(error: Exception, op: str) -> Exception:
    """Return the error to raise for an error in a fake impl: in a trace, an error that names the op, line and fix."""
    if isinstance(error, CustomOpsError):
        if error.where is None:
            error.where = _torch.dynamo.traced_call() or users_call()
            error.args = (error._message(),)
        return error
    reads_data = _torch.fakes.reads_data(error)
    frames = users_frames(error)
    if not frames or not (reads_data or type(error) in _FAULTS) or not _torch.dynamo.is_tracing():
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
    place = f"{frame.tb_frame.f_code.co_name} ({frame.tb_frame.f_code.co_filename}:{frame.tb_lineno})"
    explained = kind(problem, op=op, where=place, fix=fix)
    if reads_data:  # Dynamo breaks the graph at an error of this type
        error.add_note(str(explained))
        return error
    return explained


def of_kernel(given: Any, spec: OpSpec) -> Fn:
    """Return the fake impl for `given`, the word "kernel": the op's own function, run on tensors without data.

    Raises:
        CallbackError: `given` is neither a function nor "kernel".
        RegistrationError: the op was defined without a function.
    """
    if given != "kernel":
        raise CallbackError(
            'the fake impl must be callable, or "kernel"',
            op=spec.qualname,
            got=brief(given),
            where=user_source(),
            fix="register_fake(fn), where fn takes the op's arguments and returns tensors like the results",
        )
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
