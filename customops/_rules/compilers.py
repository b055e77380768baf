"""For compilers: code in the place of the op, the op in the place of code, and calls without the dispatcher."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Literal

import torch

from customops import _torch
from customops._codegen.bypass import graph_call
from customops._dispatch.callbacks import Fn, bind_kernel
from customops._dispatch.names import Name
from customops._dispatch.operator import OperatorHandle
from customops._dispatch.registrations import Registration, Undo
from customops._dispatch.rule import Rule
from customops._places import where
from customops._schema.defaults import completer
from customops._schema.model import Argument
from customops._schema.types import ROWS, item_type
from customops.errors import RegistrationError, UnsupportedError, brief


def check_functional(operator: OperatorHandle, role: str) -> None:
    """Raise unless the op only returns new tensors: what compilers put in the place of a call is computed, not done."""
    schema = operator.schema
    if schema.mutated or schema.is_view or any("Tensor" not in ret.type for ret in schema.returns):
        raise UnsupportedError(
            f"{role} is for ops that return new tensors and write nothing",
            op=operator.qualname,
            got=str(schema),
            fix="define a functional op for the computation, and let this one write its result",
        )


class Equivalent:
    """Plain torch code that computes what an op does, called with the arguments of a call in a graph."""

    def __init__(self, operator: OperatorHandle, fn: Fn, role: str) -> None:
        self.operator, self.role, self.schema = operator, role, operator.schema
        self.fn = bind_kernel(fn, self.schema, operator.qualname, role)
        #: All arguments: in a graph those that are positional may be there by name.
        self.arguments = completer(self.schema)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self.arguments(args, kwargs)
        return self.fn(*args, **kwargs)

    def substitute(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, random: bool = True) -> Any:
        """What is traced in the place of a call with fake tensors, or NotImplemented (`_torch.inductor.substitute`)."""
        try:
            return _torch.inductor.substitute(self.operator.live.overload, self, args, kwargs, self._fault, random)
        except RecursionError as error:
            fix = "return NotImplemented for arguments on which the op itself should run"
            raise self._fault("calls the op itself, without end", fix=fix) from error

    def _fault(
        self,
        problem: str,
        expected: str | None = None,
        got: str | None = None,
        fix: str = "correct it, or let it return NotImplemented for such arguments",
    ) -> Exception:
        problem, op, place = f"the {self.role} {problem}", self.operator.qualname, where(self.fn)
        return RegistrationError(problem, op=op, expected=expected, got=got, where=place, fix=fix)


# Decompositions: plain torch code that compilers put in the place of a call of the op ---------------------------------
# inductor takes the op apart below autograd, so its formula still counts; then the code is fused with what is around
# it. Export does so when a program is decomposed (``program.run_decompositions()``). For all others the op stays whole.

#: Who takes an op apart; or a predicate of the arguments, where it is true: inductor and export.
When = Literal["inductor", "export"] | Callable[..., bool]

COMPILERS = ("inductor", "export")


class DecompositionRule(Rule[str, tuple[Equivalent, Equivalent | None]]):
    """compiler -> the decomposition for it, and the predicate that says where it is one, or None for everywhere."""

    def traced(self) -> Any:
        return {key: (fn.fn, None if applies is None else applies.fn) for key, (fn, applies) in self.values.items()}

    def equivalents(self) -> list[Fn]:
        return [functools.partial(self._call, False, compiler) for compiler in self.values]

    def register(self, fn: Fn, when: Any, *, is_derived: bool = False) -> Registration:
        check_functional(self.operator, "a decomposition")
        chosen = when if isinstance(when, tuple) else (when,)
        if not callable(when) and not {*chosen} <= {*COMPILERS}:
            raise RegistrationError(
                "when= has an invalid value",
                op=self.operator.qualname,
                expected='"inductor", "export" or a predicate of the arguments',
                got=brief(when),
            )
        decomposition = Equivalent(self.operator, fn, "decomposition")
        applies = Equivalent(self.operator, when, "predicate") if callable(when) else None
        keys = COMPILERS if callable(when) else chosen
        return self.set_all(keys, (decomposition, applies), is_derived=is_derived)

    def _install(self, compiler: str, own_library: bool) -> Undo:
        if compiler == "export":
            _torch.patches.apply("export")
        undo = _torch.inductor.enter(self.operator.overload, compiler, functools.partial(self._call, True, compiler))
        self.operator.on_removal.append(undo)
        return undo

    def _call(self, is_traced: bool, compiler: str, /, *args: Any, **kwargs: Any) -> Any:
        fn, applies = self.values[compiler]
        if applies is not None and not applies(*args, **kwargs):
            return NotImplemented
        return fn.substitute(args, kwargs) if is_traced else fn(*args, **kwargs)


# Lowerings: plain torch code that inductor generates code for in the place of a call of the op ------------------------
# Unlike a decomposition it counts last, when inductor makes a graph into code: up to then the op is one node, which
# autograd, partitioners, checkpointing policies and patterns see whole.


class InductorLoweringRule(Rule[None, Equivalent]):
    """The lowering that was registered last."""

    def traced(self) -> Any:
        return [lowering.fn for lowering in self.values.values()]

    def equivalents(self) -> list[Fn]:
        return [*self.values.values()]

    def register(self, fn: Fn) -> Registration:
        check_functional(self.operator, "a lowering")
        return self.set(None, Equivalent(self.operator, fn, "lowering"))

    def _install(self, _: None, own_library: bool) -> Undo:
        def trace(*args: Any, **kwargs: Any) -> Any:
            return self.values[None].substitute(args, kwargs, random=False)

        undo = _torch.inductor.enter(self.operator.overload, "lowering", trace)
        self.operator.on_removal.append(undo)
        return undo


# Direct calls: in a graph of inductor, a call of an op of ours runs its kernel without the dispatcher -----------------
# Inductor writes ``torch.ops.ns.f.default(...)`` for such a call. When the graph runs, there is mostly nothing left for
# the dispatcher to do, and it costs more than many kernels. So the code calls a function that is generated for the op
# (`_codegen.bypass`), which looks for what the dispatcher would have to do, and leaves it to the dispatcher.

#: What may be called directly: name -> the handle, that of the op also under the name of its mutation-only variant.
_operators: weakref.WeakValueDictionary[str, OperatorHandle] = weakref.WeakValueDictionary()


def bind_direct_calls(operator: OperatorHandle) -> None:
    """Nothing to register: the code of a graph asks for the function by the name of the op."""
    variant = operator.mutation_only
    for handle in (operator, variant) if variant is not None else (operator,):
        direct = operator.options.direct_in_graphs and not (handle is variant and operator.spec.reserved_names)
        if operator.has_own_rules and direct:
            _operators[handle.qualname] = operator
        else:
            _operators.pop(handle.qualname, None)
    if variant is not None:
        operator.on_removal.append(_torch.inductor.enter_variant(operator.overload, variant.overload))


def may_be_direct(qualname: str, device: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """May a graph call the op without the dispatcher, with these arguments?"""
    operator = _operators.get(qualname)
    if operator is None or operator.removed is not None or operator.find_fast_path_in_graphs(device) is None:
        return False
    schema = operator.schema
    if len(args) > len(schema.positional) or any(ret.type not in ("Tensor", "Tensor[]") for ret in schema.returns):
        return False
    given = schema.by_name(args, kwargs)
    passed = [argument for argument in schema.arguments if argument.name in given]
    return all(_arrives_unchanged(argument, argument.type, given[argument.name]) for argument in passed)


def _arrives_unchanged(argument: Argument, type_: str, value: Any) -> bool:
    """Would the dispatcher hand on what a graph has for an argument, or for an item of it, as it is?"""
    if value is None:
        return type_.endswith("?") or (type_ == "Tensor" and argument.type == "Tensor")
    type_ = type_.removesuffix("?")
    item = item_type(type_)
    if item is not None:
        return isinstance(value, list) and all(_arrives_unchanged(argument, item, each) for each in value)
    if value is _torch.inductor.TENSOR:
        return type_ == "Tensor"
    if isinstance(value, torch.SymInt):
        return type_ in ("SymInt", "int")
    row = ROWS.get(type_)
    if row is None or type(value) not in row.unchanged or type_ == "Tensor":
        return False
    return type(value) is not int or -(2**63) <= value < 2**63


def kernel_for(qualname: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """The name of the kernel that was chosen for a call in a graph; None if each call chooses, or there is one."""
    operator = _operators.get(qualname)
    if operator is None or operator.removed is not None:
        return None
    return operator.choose_in_trace(*completer(operator.schema)(args, kwargs))


def direct_call(
    qualname: str, device: str, *, allocated: bool = False, kernel: str | None = None
) -> Callable[..., Any]:
    """The function that graphs call for an op, on tensors of a device that is given by its dispatch key.

    `allocated`: for an out variant whose tensors the graph allocated. `kernel`: one of several, by its name.
    """
    operator, name = _operators.get(qualname), Name.parse(qualname)

    def dispatched(*args: Any, **kwargs: Any) -> Any:
        """Call the op that has the name now, as ``torch.ops`` in the code of a graph would."""
        return _torch.library.overload_of(name.packet, name.overload)(*args, **kwargs)

    return (
        dispatched
        if operator is None
        else graph_call(operator, device if kernel is None else (device, kernel), dispatched, allocated=allocated)
    )


_torch.hooks.may_be_direct, _torch.hooks.direct_call, _torch.hooks.kernel_for = may_be_direct, direct_call, kernel_for
