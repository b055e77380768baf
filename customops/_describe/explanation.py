"""`Explanation`: which kernel runs for the arguments of a call, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from customops._describe import html
from customops._describe.data import Rule, Step
from customops._describe.route import Route
from customops._describe.screen import entry, filled, shorter_place, width_of_screen
from customops._describe.values import outlined


@dataclass(frozen=True)
class Explanation:
    """Which kernel runs for a call, and why. ``print(explanation)`` shows it; notebooks show a table.

    Attributes:
        op: qualified name.
        arguments: a short text for each value, by argument name.
        steps: what each dispatch key of the call does, in the order of the dispatcher.
        kernel: the kernel or fake impl that runs last. None if the call raises, or if other code decides what runs,
            such as a vmap rule or a tensor subclass; the last step names it.
    """

    op: str
    arguments: dict[str, str]
    steps: tuple[Step, ...]
    kernel: Rule | None

    @classmethod
    def of(cls, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Explanation:
        """Explain a call of a `CustomOpDef`. No code of the op runs."""
        if op._definition.removed is not None:
            raise op._definition.removed
        route = Route(op, *op.lower(*args, **kwargs))
        arguments = {name: outlined(value) for name, value in route.arguments.items()}
        return cls(op._qualname, arguments, tuple(route.steps), route.kernel)

    @property
    def raises(self) -> bool:
        """True if the call would raise because a kernel or a fake impl is missing."""
        return bool(self.steps) and self.steps[-1].action == "raises"

    def to_dict(self) -> dict[str, Any]:
        """The explanation as lists, dicts and strings."""
        return asdict(self)

    def text(self, width: int | None = None) -> str:
        """The explanation as text of `width` columns; by default the width of the terminal, from 60 to 120."""
        return "\n".join(self._lines(width or width_of_screen()))

    @property
    def _call(self) -> str:
        return f"{self.op}({', '.join(f'{name}: {value}' for name, value in self.arguments.items())})"

    def _lines(self, width: int) -> Iterator[str]:
        yield filled(self._call, width, rest="    ")
        column = max(len(step.key) for step in self.steps) + 2
        for step in self.steps:
            place = f" ({shorter_place(step.where, width - 30)})" if step.where else ""
            yield entry(step.key, f"{step.action}: {step.what}{place}", width, column=column)
        yield entry("=>", self._result(), width, column=column)

    def _result(self) -> str:
        if self.raises:
            return "the call raises"
        if self.kernel is None:
            return f"decided at {self.steps[-1].key}"
        name = self.kernel.name or f"the {self.kernel.kind} registered outside customops"
        return f"{name} ({shorter_place(self.kernel.where)})" if self.kernel.where else name

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = [(step.key, step.action, step.what, shorter_place(step.where)) for step in self.steps]
        table = html.table(("dispatch key", "does", "what", "where"), rows)
        return html.page(self._call, table, html.paragraph(f"=> {self._result()}"))
