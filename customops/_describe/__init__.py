"""Descriptions of ops and of calls: as data, and as text of 60 to 120 columns.

`rules` reads a line for each rule off an op, and what each feature has or lacks; `description` puts them together.
`explanation` follows a call from key to key. `render` lays text out. Here are the
methods that ops and registries get of it; they load the rest when they are called.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Generic, ParamSpec

if TYPE_CHECKING:
    from customops._describe.description import Description
    from customops._describe.explanation import Explanation

P = ParamSpec("P")


class Described(Generic[P]):
    """Methods of `CustomOpDef`."""

    def describe(self) -> Description:
        """Describe the op: its schema, kernels and rules, and what is missing for compilers, training and vmap.

        Example:
            >>> print(double.describe())
            >>> double.describe().missing
        """
        from customops._describe.description import Description

        return Description.of(self)

    def explain(self, /, *args: P.args, **kwargs: P.kwargs) -> Explanation:
        """Show which kernel a call with these arguments would run, and why, without running it.

        The dispatch modes that are active in this thread are taken into account.

        Returns:
            An `Explanation`: one step for each dispatch key of the call, and the kernel that runs.

        Raises:
            ArgumentError: the arguments do not match the op's schema.
            UnregisteredError: the op was unregistered.

        Example:
            >>> print(double.explain(torch.ones(2)))
            >>> double.explain(torch.ones(2)).kernel.where
        """
        from customops._describe.explanation import Explanation

        return Explanation.of(self, args, kwargs)


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
