"""Schema texts that several tests use."""

from __future__ import annotations

from hypothesis import strategies as st

from customops._schema.model import Alias, Argument, Return
from customops._schema.parse import parse


def only(text: str) -> Argument:
    """The argument of ``(text) -> ()``."""
    (argument,) = parse(f"({text}) -> ()").arguments
    return argument


aliases = st.none() | st.builds(Alias, st.frozensets(st.sampled_from("abcd"), min_size=1), st.booleans())


@st.composite
def returns(draw: st.DrawFn) -> tuple[Return, ...]:
    types = ("Tensor", "Tensor[]", "Tensor?", "SymInt", "int", "float", "bool", "Scalar", "str", "(Tensor)")
    chosen = draw(st.lists(st.sampled_from(types), max_size=4))
    return tuple(Return(type_, draw(aliases) if type_.startswith("Tensor") else None) for type_ in chosen)
