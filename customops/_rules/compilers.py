"""What the rules for compilers share: which ops have them, and how their functions get the arguments of a call."""

from __future__ import annotations

from typing import Any

from customops import _compat
from customops._dispatch.callbacks import Fn, bind_kernel
from customops._dispatch.fill_defaults import filler
from customops._dispatch.operator import OperatorHandle
from customops.errors import RegistrationError, UnsupportedError, where


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
        self.fill = filler(self.schema)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self.arguments(args, kwargs)
        return self.fn(*args, **kwargs)

    def substitute(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, random: bool = True) -> Any:
        """What is traced in the place of a call with fake tensors, or NotImplemented: see `substitution`."""
        try:
            return _compat.substitution.substitute(self.operator.overload, self, args, kwargs, self._fault, random)
        except RecursionError as error:
            problem = f"the {self.role} calls the op itself, without end"
            fix = "return NotImplemented for arguments on which the op itself should run"
            raise RegistrationError(problem, op=self.operator.qualname, where=where(self.fn), fix=fix) from error

    def _fault(self, problem: str, expected: str, got: str) -> Exception:
        return RegistrationError(
            f"the {self.role} {problem}",
            op=self.operator.qualname,
            expected=expected,
            got=got,
            where=where(self.fn),
            fix="correct it, or let it return NotImplemented for such arguments",
        )

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """All arguments, with defaults: in a graph those that are positional may be there by name."""
        given = list(args)
        for argument in self.schema.positional[len(args) :]:
            if argument.name not in kwargs:
                break
            given.append(kwargs[argument.name])
        named = {name: value for name, value in kwargs.items() if name in {a.name for a in self.schema.keyword_only}}
        return self.fill(tuple(given), named) if self.fill is not None else (tuple(given), named)
