"""The fake impl: how the op runs on tensors without data."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from operator import is_
from typing import Any, NamedTuple

from customops import _compat
from customops._compat.tags import Tag
from customops._dispatch import first_use
from customops._dispatch.callbacks import Fn, bind_kernel
from customops._dispatch.expected import is_asking
from customops._dispatch.fill_defaults import Fill, filler
from customops._dispatch.operator import OperatorHandle
from customops._dispatch.registrations import Registration, Slots, Undo
from customops._dispatch.results import (
    ResultCheck,
    inplace_error,
    mutated_results,
    out_error,
    structure_check,
    tensors_in,
)
from customops.errors import (
    CustomOpsError,
    KernelError,
    MissingFakeError,
    RegistrationError,
    name_of,
    user_source,
    user_stacklevel,
    users_frames,
)

__tracebackhide__ = True  # pytest leaves the frames out


class Fake(NamedTuple):
    """A fake, and the ``file:line`` where it was registered."""

    fn: Fn
    source: str


class FakeRule:
    """The fake of one op."""

    operator: OperatorHandle
    #: What is there without being registered: without a fake it says how to register one.
    _with_op: tuple[None, ...] = (None,)

    def __init__(self) -> None:
        self._slots: Slots[None, Fake] = Slots(self._install_trampoline, self._tell_torch)
        #: What is called as long as none is registered.
        self.default: Fn | None = None
        #: What became of the one of an op that this one replaced; "" if that had none.
        self.lost = ""

    def follow(self, old: FakeRule, place: str) -> None:
        """The op of another rule was replaced by this one's, at a place."""
        fake = old._slots.values.get(None)
        self.lost = old.lost
        if fake is not None:
            self.lost = (
                f"the one registered at {fake.source} is of the op that was replaced by the definition at {place}"
            )

    @property
    def fn(self) -> Fn | None:
        fake = self._slots.values.get(None)
        return fake.fn if fake is not None else self._kernel

    @functools.cached_property
    def _kernel(self) -> Fn | None:
        """The function of the op, where that runs without data. Where the schema says what comes out, none is run."""
        spec = self.operator.spec
        if not spec.traceable or spec.kernel is None or self.trivial():
            return None
        return bind_kernel(spec.kernel, spec.schema, spec.qualname, "kernel")

    def bind(self, operator: OperatorHandle) -> None:
        self.operator = operator
        self._slots.reset(with_op=self._with_op if operator.has_own_rules else ())

    @functools.cached_property
    def fill(self) -> Fill | None:
        return filler(self.operator.schema)

    @functools.cached_property
    def check(self) -> ResultCheck:
        return structure_check(self.operator.schema, self.operator.qualname, "fake impl")

    @functools.cached_property
    def mutated(self) -> Fn | None:
        """What an in-place or out op returns, of its arguments."""
        return mutated_results(self.operator.schema, self.operator.tags)

    def register(self, fn: Fn, allow_override: bool = True) -> Registration:
        op = self.operator.qualname
        ours = self.operator.library is not None
        fn = bind_kernel(fn, self.operator.schema, op, "fake impl", warn=ours)
        self._refuse(op, allow_override)
        for tag in (Tag.inplace, Tag.out):
            if tag in self.operator.tags:
                warnings.warn(
                    f"{op}: an op with torch.{tag} has a fake impl already; the one registered now "
                    "replaces it, and must return the argument that the op writes",
                    UserWarning,
                    stacklevel=user_stacklevel(),
                )
        return self._slots.set(None, Fake(fn, user_source()))

    def trivial(self) -> bool:
        """Does the schema alone say what comes out? (what was written to, or nothing)"""
        tags, schema = self.operator.tags, self.operator.schema
        return Tag.inplace in tags or Tag.out in tags or bool(schema.mutated and not schema.returns)

    def missing(self) -> MissingFakeError:
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

    def _refuse(self, op: str, allow_override: bool) -> None:
        """Raise where a fake is of no use, or where there is one that may not be overridden."""
        if _compat.dispatch.has_kernel(op, "CompositeImplicitAutograd"):
            raise RegistrationError(
                "the op has a CompositeImplicitAutograd kernel: it is traced through to the ops it is made of",
                op=op,
                fix="register fakes for those ops, or define this one below autograd (CompositeExplicitAutograd)",
            )
        if allow_override:
            return
        source = self._existing(op)
        if source is not None:
            raise RegistrationError(f"the op already has a fake impl registered at {source}", op=op)
        if _compat.registries.fake_record(op) is None and _compat.dispatch.has_kernel(
            op, "Meta"
        ):  # a fake has one beside its record
            raise RegistrationError("the op already has a DispatchKey::Meta implementation", op=op)

    def _existing(self, op: str) -> str | None:
        """Where the fake that counts now was written, or None without one."""
        fake = self._slots.values.get(None)
        if fake is not None:
            return fake.source
        known = _compat.registries.torch_op_of(op)
        if known is not None and known._abstract_fn is None:
            return None  # what is on record for an op made by a custom_op is then a fake that raises
        record = _compat.registries.fake_record(op)
        return record.source if record is not None else None

    def _install_trampoline(self, _: None, own_library: bool) -> Undo:
        return self.operator.impl_fake(
            _trampoline(self, self.operator), self.operator.spec.source, own_library=own_library
        )

    def _tell_torch(self) -> None:
        if self.operator.removed is not None:
            return  # the name may be another op's by now
        self.operator.recompile()
        fake = self._slots.values.get(None)
        _compat.registries.set_fake_source(
            self.operator.qualname, fake.source if fake is not None else self.operator.spec.source
        )


def _trampoline(rule: FakeRule, operator: OperatorHandle) -> Callable[..., Any]:
    """The function in torch's registry of fakes."""
    misses = inplace_error if Tag.inplace in operator.tags else out_error
    overload, op, namespace = operator.overload, operator.qualname, operator.name.namespace

    def fake(*args: Any, **kwargs: Any) -> Any:
        first_use.use(namespace)
        is_compiled = not is_asking() and _compat.dynamo.traced(overload, op)
        fn, fill, mutated = rule.fn or rule.default, rule.fill, rule.mutated
        if fill is not None:
            args, kwargs = fill(args, kwargs)
        try:
            if fn is None and not rule.trivial():
                raise rule.missing()
            result = rule.check(fn(*args, **kwargs), fn) if fn is not None else None
            if mutated is None:
                if is_compiled:
                    operator.inspect_compiled()
                return result
            expected = mutated(args, kwargs)
            if fn is not None and not all(map(is_, tensors_in((result,)), tensors_in((expected,)))):
                raise misses(operator.schema, operator.qualname, result, fn, role="fake impl")
            return expected
        except Exception as error:
            said = _said(error, operator.qualname)
            if said is error:
                raise
            raise said from None

    return _compat.dynamo.outside_dynamo(fake)


#: What Dynamo takes from a fake as a fault of it, and wraps: not the kinds that it handles.
_FAULTS = (AttributeError, NameError, KeyError, ValueError, RuntimeError, AssertionError, UnboundLocalError)


def _said(error: Exception, op: str) -> Exception:
    """What to raise for what a fake raised: where Dynamo would hide where and why, an error that says it."""
    if isinstance(error, CustomOpsError):
        return _compat.dynamo.said_plainly(error)
    reads_data = _compat.tracing.reads_data(error)
    frames = users_frames(error)
    if not frames or not (reads_data or type(error) in _FAULTS):
        return error
    frame = frames[-1]
    first = str(error).partition("\n")[0]
    made = KernelError(
        f"the fake impl {'asks for data, which a fake tensor does not have' if reads_data else 'raised'}: "
        f"{type(error).__name__}: {first}",
        op=op,
        where=f"{frame.tb_frame.f_code.co_name} ({frame.tb_frame.f_code.co_filename}:{frame.tb_lineno})",
        fix="decide by shapes and dtypes; for a size that depends on data: customops.get_ctx().new_dynamic_size()"
        if reads_data
        else "correct it: it gets tensors without data, of which it may use shape, dtype and device",
    )
    said = _compat.dynamo.said_plainly(made, breaks=reads_data)
    return error if said is made else said
