"""Fake tensors whose sizes are symbols, and what was decided about the symbols on the way."""

from __future__ import annotations

import importlib
from typing import Any

import torch

__tracebackhide__ = True  # pytest leaves the frames out


class SymbolicRun:
    """Makes fake tensors with a symbol for each size of two and more, no two of them the same."""

    def __init__(self) -> None:
        self._shapes: Any = importlib.import_module("torch.fx.experimental.symbolic_shapes")
        self._source: Any = importlib.import_module("torch._dynamo.source").ConstantSource
        self._integer: Any = importlib.import_module("sympy").Integer
        self.env: Any = self._shapes.ShapeEnv(duck_shape=False)
        self.mode: Any = torch._subclasses.FakeTensorMode(shape_env=self.env)
        self._inputs: list[Any] = []

    def fake(self, tensor: torch.Tensor) -> Any:
        """A fake of a tensor."""
        dims = tensor.dim()
        context = self._shapes.StatelessSymbolicContext(
            dynamic_sizes=[self._shapes.DimDynamic.DYNAMIC] * dims, constraint_sizes=[None] * dims
        )
        source = self._source(f"input_{len(self._inputs)}")
        fake = self.mode.from_tensor(tensor, symbolic_context=context, source=source)
        # An operator may change the sizes of what it writes: remember them as they are.
        self._inputs.append([size.node.expr if isinstance(size, torch.SymInt) else None for size in fake.shape])
        return fake

    def values(self, tensors: list[torch.Tensor]) -> dict[Any, Any]:
        """The symbols with their values, for inputs of other sizes in the order in which fakes were made."""
        found: dict[Any, Any] = {}
        for expressions, tensor in zip(self._inputs, tensors, strict=True):
            for expression, size in zip(expressions, tensor.shape, strict=True):
                if expression is not None and expression.is_symbol:
                    found[expression] = self._integer(size)
        return found

    def holds_for(self, values: dict[Any, Any]) -> bool:
        """Do these sizes pass the guards, so that compiled code would be used for them again?"""
        return all(self._value(guard.expr, values) is not False for guard in self.env.guards)

    def evaluate(self, value: Any, values: dict[Any, Any]) -> Any:
        """A size of a result with these sizes of the inputs; None if it depends on something else."""
        if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return value
        return self._value(value.node._expr, values)

    def _value(self, expression: Any, values: dict[Any, Any]) -> Any:
        known = expression.xreplace(values) if hasattr(expression, "xreplace") else expression
        for kind, plain in (("is_Integer", int), ("is_Boolean", bool), ("is_Number", float)):
            if getattr(known, kind, False) and not getattr(known, "free_symbols", None):
                return plain(known)
        return None

    def made_constant(self) -> list[tuple[int, str, int, str]]:
        """Sizes that became numbers while the operator ran: the number, and the file, line and text where that was."""
        found = []
        for guard in self.env.guards:
            numbers = [self.env.replacements.get(symbol) for symbol in guard.expr.free_symbols]
            place = getattr(getattr(guard, "sloc", None), "framework_loc", None)
            is_number = len(numbers) == 1 and getattr(numbers[0], "is_Integer", False)
            if is_number and type(guard.expr).__name__ == "Equality" and hasattr(place, "filename"):
                found.append((int(numbers[0]), place.filename, place.lineno, place.line or ""))  # type: ignore[arg-type]
        return found
