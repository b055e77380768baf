"""Descriptions of ops and of calls: as data, and as text of 60 to 120 columns.

`rules` reads a line for each rule off an op, and what each feature has or lacks; `description` puts them together.
`explanation` follows a call from key to key. `render` lays text out. The functions
and the class of this module serve ops and registries, and load these modules on use.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from customops._describe.description import Description
    from customops._describe.explanation import Explanation


def describe(op: Any) -> Description:
    """Describe an op, as `CustomOpDef.describe` does."""
    from customops._describe.description import Description

    return Description.of(op)


def explain(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Explanation:
    """Explain a call of an op, as `CustomOpDef.explain` does."""
    from customops._describe.explanation import Explanation

    return Explanation.of(op, args, kwargs)


class Listed:
    """Methods of `Registry`."""

    if TYPE_CHECKING:  # the registry has it

        def __iter__(self) -> Iterator[Any]: ...

    def __repr__(self) -> str:
        names = [op._qualname for op in self]
        shown = ", ".join(names[:8]) + (f", ... ({len(names)} ops)" if names[8:] else "")
        return f"<Registry: {shown or 'no ops'}>"

    def describe(self) -> str:
        """A table with one row for each op. If it is wider than the terminal, each op is a block of lines instead.

        Example:
            >>> print(default_registry.describe())
        """
        from customops._describe.description import OUTLINE, outline
        from customops._describe.render import table, width_of_screen

        return table([outline(op) for op in self], OUTLINE, width_of_screen())
