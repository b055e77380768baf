"""`Mut[...]` in every place of a hint where it can stand."""

from __future__ import annotations

from typing import Any, Optional

import pytest
from torch import Tensor

from customops import Registry
from customops._schema.annotations import Mut
from customops.errors import SchemaError


def schema_of(hint: Any, registry: Registry) -> str:
    def write(x: Any) -> None: ...

    write.__annotations__ = {"x": hint, "return": None}
    return str(registry.custom_op("test_mut::write", write).schema)


@pytest.mark.parametrize(
    ("hint", "written"),
    [
        (Mut[Tensor], "Tensor(a0!) x"),
        (Mut[Tensor] | None, "Tensor(a0!)? x"),
        (Optional[Mut[Tensor]], "Tensor(a0!)? x"),
        (Mut[Tensor | None], "Tensor(a0!)? x"),
        (Mut[Tensor] | float, "Tensor(a0!)? x, float? x_number"),
        (list[Mut[Tensor]], "Tensor(a0!)[] x"),
        (tuple[Mut[Tensor], ...], "Tensor(a0!)[] x"),
        (list[Mut[Tensor]] | None, "Tensor(a0!)[]? x"),
        (list[Mut[Tensor] | None], "Tensor(a0!)?[] x"),
        (list[list[Mut[Tensor]]], "Tensor(a0!)[] x, SymInt[] x_lengths"),
        (tuple[Mut[Tensor], Tensor], "Tensor(a0!) x_0, Tensor x_1"),
        (Mut[tuple[Tensor, Tensor]], "Tensor(a0!) x_0, Tensor(a1!) x_1"),
    ],
    ids=repr,
)
def test_is_written(hint: Any, written: str, registry: Registry) -> None:
    assert schema_of(hint, registry) == f"({written}) -> ()"


@pytest.mark.parametrize("hint", [Mut[int], list[Mut[int]], Mut[int] | None], ids=repr)
def test_a_number_is_not_written(hint: Any, registry: Registry) -> None:
    with pytest.raises(SchemaError, match="annotated with Mut, which is for arguments with tensors"):
        schema_of(hint, registry)


def test_a_mark_where_anything_may_be_written(registry: Registry, ns: str) -> None:
    def write(x: Mut[Tensor], y: Tensor) -> None: ...

    op = registry.custom_op(f"{ns}::write", write, mutates_args="unknown")
    assert str(op.schema) == "(Tensor(a0!) x, Tensor(a1!) y) -> ()"
