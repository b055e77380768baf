"""Tags: what an in-place or an out op has to look like."""

from typing import Any, List, Optional, Tuple

import pytest
import torch
from helpers.hints import hints
from torch import Tensor

import customops
from customops import Tag, infer_schema
from customops.errors import DefinitionError, SchemaError

# Tags -----------------------------------------------------------------------------------------------------------


@pytest.mark.parity(8)
def test_inplace_tag_makes_the_return_alias_the_first_argument() -> None:
    def add_(x: Tensor) -> Tensor: ...

    assert infer_schema(add_, mutates_args=("x",), tags=Tag.inplace) == "(Tensor(a0!) x) -> Tensor(a0!)"


@pytest.mark.parity(8, 34)
def test_out_tag_makes_the_returns_alias_the_mutated_arguments() -> None:
    def add(x: Tensor, *, out: Tensor) -> Tensor: ...

    def split(x: Tensor, *, low: Tensor, n: int, high: Tensor) -> Tuple[Tensor, Tensor]: ...

    tags = [Tag.out]
    assert infer_schema(add, mutates_args=("out",), tags=tags) == "(Tensor x, *, Tensor(a1!) out) -> Tensor(a1!)"
    assert infer_schema(split, mutates_args=("high", "low"), tags=tags) == (
        "(Tensor x, *, Tensor(a1!) low, SymInt n, Tensor(a3!) high) -> (Tensor(a1!), Tensor(a3!))"
    )


@pytest.mark.parity(8)
def test_other_tags_leave_the_schema_alone() -> None:
    def fn(x: Tensor) -> Tensor: ...

    tags = (torch.Tag.pointwise, torch.Tag.needs_exact_strides)
    assert infer_schema(fn, mutates_args=(), tags=tags) == "(Tensor x) -> Tensor"


def add_to_nothing(x: Tensor = None) -> Tensor: ...  # type: ignore[assignment]
def write_to_nothing(x: Tensor, *, out: Tensor = None) -> Tensor: ...  # type: ignore[assignment]


@pytest.mark.parity(33)
@pytest.mark.parametrize(
    ("fn", "mutates_args", "match"),
    [
        (hints(ret=Tensor), (), r"torch\.Tag\.inplace needs a positional argument"),
        (hints(_=None, x=Tensor, ret=Tensor), ("x",), r"torch\.Tag\.inplace needs a positional argument"),
        (hints(n=int, x=Tensor, ret=Tensor), ("x",), "first positional argument must be a Tensor, 'n' is SymInt"),
        (hints(x=List[Tensor], ret=Tensor), ("x",), r"first positional argument must be a Tensor, 'x' is Tensor\[\]"),
        (hints(x=Optional[Tensor], ret=Tensor), ("x",), r"first positional argument .* is Tensor\?"),
        (hints(x=Tensor, ret=Tensor), (), "mutates_args must hold the first argument 'x' alone"),
        (hints(x=Tensor, y=Tensor, ret=Tensor), ("y",), r"mutates_args must hold .* not \['y'\]"),
        (hints(x=Tensor, y=Tensor, ret=Tensor), ("x", "y"), r"mutates_args must hold .* not \['x', 'y'\]"),
        (hints(x=Tensor, y=Tensor, ret=Tensor), "unknown", "mutates_args"),
        (hints(x=Tensor, ret=None), ("x",), "return annotation"),
        (hints(x=Tensor, ret=Tuple[Tensor, Tensor]), ("x",), "return annotation"),
        (hints(x=Tensor, ret=Tuple[Tensor]), ("x",), "return annotation"),
        (hints(x=Tensor, ret=int), ("x",), "return annotation"),
        (add_to_nothing, ("x",), r"first positional argument .* is Tensor\?"),
        (hints(x=Tensor, ret=List[Tensor]), ("x",), "return annotation"),
    ],
)
def test_inplace_tag_wants(registry: customops.Registry, ns: str, fn: Any, mutates_args: Any, match: str) -> None:
    with pytest.raises(SchemaError, match=match):
        infer_schema(fn, mutates_args=mutates_args, tags=Tag.inplace)
    with pytest.raises(ValueError, match=match):
        registry.custom_op(f"{ns}::op", fn, mutates_args=mutates_args, tags=Tag.inplace)
    assert len(registry) == 0


@pytest.mark.parity(39)
@pytest.mark.parametrize(
    ("fn", "mutates_args", "match"),
    [
        (hints(x=Tensor, ret=Tensor), ("x",), "'x' must be keyword-only"),
        (hints(x=Tensor, _=None, out=Tensor, ret=Tensor), "unknown", "'x' must be keyword-only"),
        (hints(x=Tensor, _=None, out=Tensor, ret=Tensor), (), "at least one"),
        (hints(x=Tensor, _=None, out=Optional[Tensor], ret=Tensor), ("out",), r"only supports Tensor.*Tensor\?"),
        (hints(x=Tensor, _=None, out=List[Tensor], ret=Tensor), ("out",), r"only supports Tensor.*Tensor\[\]"),
        (hints(x=Tensor, _=None, a=Tensor, b=Tensor, ret=Tensor), ("a", "b"), "return annotation"),
        (hints(x=Tensor, _=None, out=Tensor, ret=Tuple[Tensor]), ("out",), "return annotation"),
        (hints(x=Tensor, _=None, out=Tensor, ret=None), ("out",), "return annotation"),
        (write_to_nothing, ("out",), r"only supports Tensor.*Tensor\?"),
        (hints(x=Tensor, _=None, out=Tensor, ret=Tuple[Tensor, Tensor]), ("out",), "return annotation"),
        (hints(x=Tensor, _=None, a=Tensor, b=Tensor, ret=Tuple[Tensor, int]), ("a", "b"), "return annotation"),
    ],
)
def test_out_tag_wants(registry: customops.Registry, ns: str, fn: Any, mutates_args: Any, match: str) -> None:
    with pytest.raises(SchemaError, match=match):
        infer_schema(fn, mutates_args=mutates_args, tags=Tag.out)
    with pytest.raises(ValueError, match=match):
        registry.custom_op(f"{ns}::op", fn, mutates_args=mutates_args, tags=Tag.out)
    assert len(registry) == 0


@pytest.mark.parity(33)
def test_inplace_and_out_exclude_each_other(registry: customops.Registry, ns: str) -> None:
    def add_(x: Tensor) -> Tensor: ...

    tags = (Tag.inplace, Tag.out)
    with pytest.raises(AssertionError, match="mutually exclusive"):
        infer_schema(add_, mutates_args=("x",), tags=tags)
    with pytest.raises(AssertionError, match="mutually exclusive"):
        registry.custom_op(f"{ns}::op", add_, mutates_args=("x",), tags=tags)


@pytest.mark.parity(25)
@pytest.mark.parametrize("tags", ["inplace", 3, [3], ["inplace"], [Tag.out, "x"], [[Tag.out]], {"a": 1}])
def test_tags_that_are_none(tags: Any) -> None:
    def fn(x: Tensor) -> Tensor: ...

    with pytest.raises(DefinitionError, match=r"tags must be torch\.Tag members") as caught:
        infer_schema(fn, mutates_args=(), tags=tags)
    assert len(str(caught.value).splitlines()) < 8


@pytest.mark.parity(25)
@pytest.mark.parametrize(
    "tags",
    [
        torch.Tag.pointwise,
        [torch.Tag.pointwise],
        (torch.Tag.pointwise, torch.Tag.pointwise),
        {torch.Tag.pointwise},
        [torch.Tag.pt2_compliant_tag, torch.Tag.pointwise],
    ],
    ids=str,
)
def test_tags_arrive_once_with_pt2_compliant(registry: customops.Registry, ns: str, tags: Any) -> None:
    @registry.custom_op(f"{ns}::op", mutates_args=(), tags=tags)
    def op(x: Tensor) -> Tensor: ...

    wanted = [torch.Tag.pointwise, torch.Tag.pt2_compliant_tag]
    assert sorted(op._opoverload.tags, key=str) == wanted
    assert sorted(op.tags, key=str) == wanted


@pytest.mark.parity(25)
@pytest.mark.parametrize("tags", [None, (), []], ids=str)
def test_no_tags_still_pt2_compliant(registry: customops.Registry, ns: str, tags: Any) -> None:
    @registry.custom_op(f"{ns}::op", mutates_args=(), tags=tags)
    def op(x: Tensor) -> Tensor: ...

    assert op._opoverload.tags == [torch.Tag.pt2_compliant_tag]
