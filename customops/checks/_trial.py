"""An operator and the inputs to try it on: what every check is given."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from customops import _torch
from customops._dispatch.preference import here
from customops._op.op import CustomOpDef
from customops._op.registry import Registry
from customops._places import where
from customops._schema import model, parse
from customops._schema.defaults import completer
from customops._versions import cached_property
from customops.checks._inputs import copy_tensors, seeded, tensors_in
from customops.checks._outcome import NotExercised, UsageError, in_short, raised_at
from customops.errors import CheckError, CustomOpsError, brief

__tracebackhide__ = True  # pytest leaves the frames out

_numbers = itertools.count()
_schemas: weakref.WeakKeyDictionary[Any, model.Schema] = weakref.WeakKeyDictionary()

#: The problem of a call that raises. It is a fault of a sample, and none of an input derived from it.
FAILS = "the operator itself fails on these inputs"


@dataclass(frozen=True)
class Trial:
    """One call of an operator, as a check gets it.

    Attributes:
        op: the operator.
        args, kwargs: the user's inputs. Checks run the operator on copies of them.
        atol, rtol: absolute and relative tolerance for results; None for the defaults of their dtype.
        reference: a plain PyTorch function that computes the same, or None.
        scale: the size of numbers that results may be differences of, as gradients often are.
        samples: the calls that the user gave, of which this is one, or was made of one.
    """

    op: _torch.library.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    atol: float | None = None
    rtol: float | None = None
    reference: Callable[..., Any] | None = None
    scale: float = 0.0
    samples: Sequence[Trial] = field(default=(), repr=False, compare=False)

    @property
    def name(self) -> str:
        return str(self.op.name())

    @cached_property
    def schema(self) -> model.Schema:
        if (known := _schemas.get(self.op)) is None:
            known = _schemas[self.op] = parse.from_dispatcher(_torch.schema.schema_of(self.op))
        return known

    @cached_property
    def tensors(self) -> list[torch.Tensor]:
        return tensors_in((self.args, self.kwargs))

    @cached_property
    def distinct(self) -> list[torch.Tensor]:
        """The tensors, each once."""
        return list({id(tensor): tensor for tensor in self.tensors}.values())

    @property
    def named_tensors(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Each tensor, with the argument that it is or is part of, and what to call it: ``xs[1]``."""
        for name, value in self.arguments.items():
            for i, tensor in enumerate(tensors_in(value)):
                yield name, name if tensor is value else f"{name}[{i}]", tensor

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """The values passed, by argument name, without arguments that were left at their default."""
        return self.schema.by_name(self.args, self.kwargs)

    @property
    def mutated(self) -> dict[str, Any]:
        """The values passed for the arguments that the schema declares as mutated, by name."""
        return {a.name: self.arguments[a.name] for a in self.schema.mutated if a.name in self.arguments}

    def by_return(self, outputs: Any) -> list[Any]:
        """The outputs of a call as a list, one value for each return of the schema."""
        if len(self.schema.returns) > 1 and isinstance(outputs, (list, tuple)):
            return list(outputs)
        return [outputs] if self.schema.returns else []

    def results(self) -> list[Any]:
        """Call the operator on these very tensors: a value for each return of the schema, then what it wrote."""
        return [*self.by_return(self.op(*self.args, **self.kwargs)), *self.mutated.values()]

    @property
    def custom_op(self) -> Any:
        """The `CustomOpDef` of the operator; None if customops did not define it."""
        found = _torch.library.torch_op_of(self.name)
        return found if hasattr(found, "_definition") else None

    @property
    def kernels(self) -> list[Callable[..., Any]]:
        """The kernels, as far as they are known: those of customops and of `torch.library.custom_op`."""
        # `torch.library.custom_op` keeps its kernel under the same name as customops.
        found = [getattr(_torch.library.torch_op_of(self.name), "_init_fn", None)]
        if self.custom_op is not None:
            found += self.custom_op._rules.kernel.kernels.values()
        return [fn for fn in found if fn is not None]

    def map_tensors(self, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Trial:
        """The same call with ``change(name, tensor)`` for each tensor; a tensor passed twice is changed once."""
        changed: dict[int, torch.Tensor] = {}
        for name, _, tensor in self.named_tensors:
            if id(tensor) not in changed:
                changed[id(tensor)] = change(name, tensor)
        return self.replaced(changed)

    def replaced(self, by_id: Mapping[int, Any]) -> Trial:
        """The same call with ``by_id[id(tensor)]`` for each tensor for which there is one."""
        args, kwargs = _torch.trees.tree_map(lambda value: by_id.get(id(value), value), (self.args, self.kwargs))
        return replace(self, args=args, kwargs=kwargs)

    def with_arguments(self, /, **values: Any) -> Trial:
        """The same call with other values for some arguments."""
        names = [argument.name for argument in self.schema.positional]
        args = tuple(values.pop(name, value) for name, value in zip(names, self.args, strict=False))
        return replace(self, args=args, kwargs=self.kwargs | values)

    @cached_property
    def without_data(self) -> str:
        """What a fake impl sees of the call, as a text that differs where it does."""
        return without_data(self.arguments)

    @property
    def is_sample(self) -> bool:
        """Is it a call that the user gave?"""
        return not self.samples or any(self.args is each.args for each in self.samples)

    @property
    def is_builtin(self) -> bool:
        """True for one of torch's own operators."""
        return self.op.namespace in ("aten", "prim", "prims")

    @property
    def fake_is_reference(self) -> bool:
        """Is the fake impl derived from the reference function?"""
        return self.custom_op is not None and bool(self.custom_op._rules.fake.is_derived(None))

    @property
    def gradient_is_reference(self) -> bool:
        """Is the gradient that of the reference function?"""
        return self.custom_op is not None and bool(self.custom_op._rules.autograd.is_derived("backward"))

    def detached(self) -> Trial:
        """The same call on tensors that do not require grad."""
        return self.map_tensors(lambda _name, tensor: tensor.detach())

    def map_floats(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Trial:
        """Return the same call with `change` of each tensor of floating point."""
        return self.map_tensors(lambda _name, tensor: change(tensor) if tensor.is_floating_point() else tensor)

    def in_float64(self) -> Trial:
        """The same call with float64 in the place of other dtypes of floating point."""
        return self.map_floats(torch.Tensor.double)

    def faked(self, mode: Any) -> Trial:
        """The same call on fakes, of sizes that are numbers. Raises NoFakeTensor where torch has none."""
        return self.map_tensors(lambda _name, tensor: mode.from_tensor(tensor, static_shapes=True))

    def copy(self, *, leaves: bool = False, unseen: bool = False) -> Trial:
        """The same call on copies of the tensors; see `copy_tensors`."""
        args, kwargs = copy_tensors((self.args, self.kwargs), leaves=leaves, unseen=unseen)
        return replace(self, args=args, kwargs=kwargs)

    def run(self) -> Any:
        """Call the operator. CheckError if it raises: the inputs of a check must work."""
        try:
            with seeded((self.args, self.kwargs)):
                return self.op(*self.args, **self.kwargs)
        except (CheckError, NotExercised):  # of a part of it
            raise
        except Exception as error:
            raise failed_call(self.name, FAILS, error) from error

    def finding(self, problem: str, **fields: str | None) -> CheckError:
        return CheckError(problem, op=self.name, **fields)

    def fault(self, problem: str, got: str, fix: str, **fields: str | None) -> CheckError:
        """The finding that the kernel is wrong, with the place of the one that these inputs go to."""
        error = self.finding(problem, got=got, fix=fix, **{"where": self.place, **fields})
        error.call = self.args, self.kwargs
        return error

    @property
    def place(self) -> str | None:
        """The kernel that these inputs go to: ``f (file:line)``, with its name where it is chosen among several."""
        rule = None if self.custom_op is None else self.custom_op._rules.kernel
        if rule is not None:
            call = completer(rule.operator.schema)(self.args, self.kwargs)
            chooser = rule.chooser_for(*call)
            chosen = None if chooser is None else chooser.asked(here(), *call)[0]
            if chosen is not None:
                return f"the kernel {chosen.name}, {where(chosen.fn)}"
        by_device = {} if rule is None else rule.kernels
        device = self.tensors[0].device.type if self.tensors else None
        kernel = by_device.get(device) or by_device.get(None) or next(iter(self.kernels), None)
        return None if kernel is None else where(kernel)

    def require_data(self) -> None:
        """Raise NotExercised if an input is a tensor without data."""
        if any(_torch.fakes.is_abstract(tensor) for tensor in self.tensors):
            raise NotExercised("an input is a meta, fake or functorch tensor: there is no data to run the operator on")


def without_data(tree: Any) -> str:
    """All of nested lists, tuples and dicts but the elements of tensors, as a text."""

    def of(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            strides = value.stride() if value.layout is torch.strided and not value.is_nested else None
            return value.dtype, value.shape, strides, value.layout, value.device, value.requires_grad
        return repr(value)

    return str(_torch.trees.tree_map(of, tree))


@contextlib.contextmanager
def as_operator(
    fn: Callable[..., Any], schema: str, *, is_plain: bool = False, written: Sequence[str] = ()
) -> Iterator[Any]:
    """A function as an operator, of `schema` without a name, within the block. A plain one gives the gradients, too."""
    registry = Registry()
    try:
        op = registry.custom_op(
            f"customops_check::function_{next(_numbers)}", fn, schema=schema, mutates_args=written, check="never"
        )
        if is_plain:
            op.register_reference(fn)
        yield op._opoverload
    finally:
        registry.clear()


@contextlib.contextmanager
def of_reference(trial: Trial) -> Iterator[Trial]:
    """The same call of the reference function, as an operator."""
    function: Any = trial.reference
    _, _, schema = str(_torch.schema.schema_of(trial.op)).partition("(")
    written = [argument.name for argument in trial.schema.mutated]

    def copy_of(value: Any) -> Any:
        return value.clone() if isinstance(value, torch.Tensor) else value

    def plain(*args: Any, **kwargs: Any) -> Any:
        return _torch.trees.tree_map(copy_of, function(*args, **kwargs))  # it may return an input

    # One that writes returns what the schema says that it returns, and has no gradients.
    with as_operator(function if written else plain, f"({schema}", is_plain=not written, written=written) as op:
        yield replace(trial, op=op, reference=None)


class JudgingMode(_torch.dispatcher.TorchDispatchMode):
    """Hands calls of an operator, and of others that it calls on the way to a kernel, to `judge`.

    By then the dispatcher has made numbers of tensors that were given for numbers.
    """

    supports_higher_order_operators = True

    def __init__(
        self, op: _torch.library.OpOverload, judge: Callable[[Trial], Any], left_out: Collection[str] = ()
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.op, self.judge, self.left_out = op, judge, left_out
        self.judged = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if isinstance(func, _torch.library.OpOverload) and func.name() not in self.left_out:
            call = Trial(func, args, kwargs or {})
            is_judged = func is self.op or not call.is_builtin
            if is_judged and not any(map(_torch.fakes.is_abstract, call.tensors)):
                self.judged += 1
                return self.judge(call)
        return func(*args, **(kwargs or {}))


def is_untraceable(op: _torch.library.OpOverload) -> bool:
    """May it refuse to be traced? A compiler leaves operators with these tags out of its graphs."""
    return any(tag in op.tags for tag in (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape))


def failed_call(
    name: str | None,
    problem: str,
    error: Exception,
    fix: str | None = None,
    kind: type[CheckError] = CheckError,
    where: str | None = None,
) -> CheckError:
    """The CheckError for a call that raised `error`; what the error says of `fix` and `where` comes first."""
    where = where or raised_at(error)
    if _torch.fakes.asks_for_data(error):
        fix = fix or (
            "this line runs while code is traced, on tensors without data, which NumPy and data_ptr() need: use "
            "functions of torch there, or put it into an op of its own, with a fake impl"
        )
    if not isinstance(error, CustomOpsError):
        return kind(problem, op=name, got=in_short(error), fix=fix, where=where)
    got = f"{type(error).__name__}: {error.problem}" + (f" (got {error.got})" if error.got else "")
    said = {"argument": error.argument, "expected": error.expected, "where": error.where or where}
    return kind(problem, op=name, got=got, fix=error.fix or fix, **said)


def resolve(op: Any) -> _torch.library.OpOverload:
    """The OpOverload that `op` is or stands for.

    Raises:
        UsageError: it is not an operator, or it is one with several overloads.
        UnregisteredError: it was unregistered or replaced.
    """
    if isinstance(op, CustomOpDef) and op._definition.removed is not None:
        raise op._definition.removed
    if isinstance(op, _torch.library.OpOverloadPacket):
        names = op.overloads()
        if len(names) != 1:
            raise UsageError(
                f"{op} has {len(names)} overloads, and opcheck takes one OpOverload at a time",
                argument="op",
                got=", ".join(names),
                fix=f"pass one of them, e.g. {op}.{names[0]}",
            )
        op = getattr(op, names[0])
    overload = op if isinstance(op, _torch.library.OpOverload) else getattr(op, "_opoverload", None)
    if not isinstance(overload, _torch.library.OpOverload):
        raise UsageError(
            "this is not an operator",
            argument="op",
            expected="an OpOverload such as torch.ops.aten.sin.default, or what custom_op returned",
            got=f"{type(op).__name__}: {brief(op)}",
        )
    return overload


#: How much `customops.check` tries, from least to most.
Effort = Literal["quick", "normal", "thorough"]
EFFORTS: tuple[Effort, ...] = ("quick", "normal", "thorough")

#: What was changed of a sample.
Kind = Literal[
    "sample",  # nothing
    "size",  # other sizes, empty ones among them; 0-dimensional tensors
    "broadcast",  # a dimension of one tensor of several is missing, or has size 1
    "layout",  # other strides, storage offsets, alignment, conjugate and negative views
    "dtype",
    "value",  # other elements
    "padding",  # -1 among integers, if it stands for none of them
    "index",  # the same, if it stands for one, and the reference does not take it
    "number",  # another number among the arguments
    "choice",  # a member of an enum or Literal, a bool, a dtype argument
    "optional",  # an optional argument that is absent
    "list",  # another number of tensors or numbers
    "same",  # one tensor in two places
    "device",
]


@dataclass(frozen=True)
class Case:
    """One input to try an operator on."""

    trial: Trial
    kind: Kind = "sample"  #: what was changed
    label: str = ""  #: how it differs from its sample, for people: ``"x: transposed"``; empty for a sample as it is
    sample: int = 0  #: the number of the sample that it was made of
    is_named: bool = False  #: the code of the op mentions what was changed
    results: str = ""  #: what the kernel gave, without data
