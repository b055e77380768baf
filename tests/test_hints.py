"""A function's hints -> its schema: types, returns, mutation, tags, quoted annotations, and every refusal."""

# No `from __future__ import annotations` here: most tests need annotations that are objects.

import collections.abc
import functools
import importlib.util
import inspect
import itertools
import re
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Dict, List, Literal, NamedTuple, Optional, Sequence, Set, Tuple, Union

import numpy as np
import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor
from torch._library import infer_schema as theirs
from torch.types import Number

import customops
from customops import infer_schema
from customops._schema import infer
from customops.errors import DefinitionError, KernelError, SchemaError
from customops.schema import SUPPORTED_PARAM_TYPES, SUPPORTED_RETURN_TYPES, tuple_to_list

GroupName = torch.distributed.distributed_c10d.GroupName
MyTensor = Tensor
MyList = List

SEQUENCES = (Sequence, List, collections.abc.Sequence, list)
PLAIN = {
    Tensor: "Tensor",
    int: "SymInt",
    float: "float",
    bool: "bool",
    str: "str",
    Number: "Scalar",
    torch.dtype: "ScalarType",
    torch.device: "Device",
    GroupName: "str",
}
#: Item 2, written out apart from the package's own table.
PARAM_TYPES: list[tuple[Any, str]] = [
    *PLAIN.items(),
    *((Optional[type_], f"{name}?") for type_, name in PLAIN.items()),
    *((seq[t], f"{PLAIN[t]}[]") for t in (Tensor, int, float, bool, Number) for seq in SEQUENCES),
    *((seq[Optional[Tensor]], "Tensor?[]") for seq in SEQUENCES),
    *((Optional[seq[t]], f"{PLAIN[t]}[]?") for t in (Tensor, int, float, bool) for seq in SEQUENCES),
    *((Optional[seq[Optional[Tensor]]], "Tensor?[]?") for seq in SEQUENCES),
]
#: Item 4.
RETURN_TYPES: list[tuple[Any, str]] = [
    (Tensor, "Tensor"),
    (List[Tensor], "Tensor[]"),
    (list[Tensor], "Tensor[]"),
    (int, "SymInt"),
    (float, "float"),
    (bool, "bool"),
    (Number, "Scalar"),
]
#: Values to pass for a schema type, and what the kernel receives for them where that is not the same.
EXAMPLES: dict[str, list[Any]] = {
    "Tensor": [torch.arange(3.0), torch.zeros(0, 2, dtype=torch.int8)],
    "SymInt": [0, -7, 2**63 - 1, -(2**63)],
    "float": [0.5, -0.0, float("inf"), float("nan"), 5e-324],
    "bool": [True, False],
    "str": ["", 'q"\\\n\t\x00é'],
    "Scalar": [3, 2.5, True, -0.0],
    "ScalarType": [torch.bfloat16, torch.bool],
    "Device": [torch.device("cpu"), torch.device("cuda:1")],
}


def examples(type_: str) -> list[Any]:
    """Values to pass for any type of the table."""
    if type_.endswith("?"):
        return [*examples(type_[:-1]), None]
    if type_.endswith("[]"):
        return [examples(type_[:-2]), []]
    return EXAMPLES[type_]


def exact(value: Any) -> Any:
    """A form that is equal only for values that a kernel cannot tell apart (1, 1.0 and True; 0.0 and -0.0; nan)."""
    if isinstance(value, Tensor):
        return "Tensor", value.dtype, tuple(value.shape), value.tolist()
    if isinstance(value, (list, tuple)):
        return type(value), [exact(item) for item in value]
    return type(value), repr(value) if isinstance(value, float) else value


def annotated(*, ret: Any = Tensor, **hints: Any) -> Callable[..., Any]:
    """A function with one parameter for each of `hints`."""
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in hints]

    def fn(*args: Any) -> Any:
        raise AssertionError("only its signature is of interest")

    fn.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [p.replace(annotation=hints[p.name]) for p in parameters], return_annotation=ret
    )
    return fn


def load(path: Path, text: str) -> ModuleType:
    """Import a module of this text."""
    file = path / "user_module.py"
    file.write_text(textwrap.dedent(text))
    spec = importlib.util.spec_from_file_location("user_module", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def complaint(fn: Callable[..., Any], match: Optional[str] = None, *, mutates_args: Any = (), **options: Any) -> str:
    """The message for a function that has no schema: short, and it names the function and its line."""
    with pytest.raises(SchemaError, match=match) as caught:
        infer_schema(fn, mutates_args=mutates_args, **options)
    message = str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert len(message.splitlines()) < 8
    assert max(map(len, message.splitlines())) < 300
    code = inspect.unwrap(fn).__code__
    place = f"{fn.__name__} ({code.co_filename}:{code.co_firstlineno})"
    assert place in message
    assert message.startswith(f"{fn.__name__}: ")
    return message.replace(place, "FUNCTION (FILE:LINE)")


# Parameters -----------------------------------------------------------------------------------------------------


def test_schema_has_no_name() -> None:  # 1
    def scale(x: Tensor) -> Tensor: ...

    assert infer_schema(scale, mutates_args=()) == "(Tensor x) -> Tensor"


def test_op_name_goes_in_front() -> None:  # 1
    def scale(x: Tensor) -> Tensor: ...

    assert infer_schema(scale, mutates_args=(), op_name="myop") == "myop(Tensor x) -> Tensor"


def test_function_is_positional_and_the_rest_by_keyword() -> None:  # 1
    parameters = inspect.signature(infer_schema).parameters.values()
    assert [(p.name, p.kind.name) for p in parameters] == [
        ("fn", "POSITIONAL_ONLY"),
        ("mutates_args", "KEYWORD_ONLY"),
        ("op_name", "KEYWORD_ONLY"),
        ("tags", "KEYWORD_ONLY"),
    ]


def test_table_of_parameter_types() -> None:  # 2
    assert dict(PARAM_TYPES) == SUPPORTED_PARAM_TYPES
    assert len(SUPPORTED_PARAM_TYPES) == 62  # torch 2.13 has 54 of them: no optional lists of tensors


def test_tables_agree_with_torch() -> None:  # 2, 4
    newer = {hint for hint, text in PARAM_TYPES if text in ("Tensor[]?", "Tensor?[]?")}  # torch 2.14
    known = {hint: text for hint, text in SUPPORTED_PARAM_TYPES.items() if hint not in newer}
    assert known.items() <= theirs.SUPPORTED_PARAM_TYPES.items() <= SUPPORTED_PARAM_TYPES.items()
    assert SUPPORTED_RETURN_TYPES == theirs.SUPPORTED_RETURN_TYPES


@pytest.mark.parametrize(("hint", "type_"), PARAM_TYPES, ids=str)
def test_parameter_type(hint: Any, type_: str) -> None:  # 2
    fn = annotated(x=Tensor, y=hint)
    assert infer_schema(fn, mutates_args=()) == f"(Tensor x, {type_} y) -> Tensor"
    if hint in theirs.SUPPORTED_PARAM_TYPES:
        assert infer_schema(fn, mutates_args=()) == torch.library.infer_schema(fn, mutates_args=())


@pytest.mark.parametrize("hint", SUPPORTED_PARAM_TYPES, ids=str)
def test_value_reaches_the_kernel(registry: customops.Registry, ns: str, hint: Any) -> None:  # 2
    seen: list[Any] = []

    @registry.custom_op(f"{ns}::take", mutates_args=())
    def take(x: Tensor, y: hint) -> Tensor:
        seen.append(y)
        return x.clone()

    packet = getattr(torch.ops, ns).take
    x = torch.ones(2)
    values = examples(dict(PARAM_TYPES)[hint])
    for value, op in itertools.product(values, (take, packet, packet.default)):
        op(x, value)
        op(x, y=value)
        assert [exact(y) for y in seen] == [exact(value)] * 2
        seen.clear()


@pytest.mark.parametrize("hint", [t for t, name in SUPPORTED_PARAM_TYPES.items() if "Tensor" not in name], ids=str)
def test_keyword_only_value_reaches_the_kernel(registry: customops.Registry, ns: str, hint: Any) -> None:  # 2, 3
    seen: list[Any] = []

    @registry.custom_op(f"{ns}::take", mutates_args=())
    def take(x: Tensor, *, y: hint) -> Tensor:
        seen.append(y)
        return x.clone()

    for value in examples(dict(PARAM_TYPES)[hint]):
        take(torch.ones(2), y=value)
        getattr(torch.ops, ns).take(torch.ones(2), y=value)
        assert [exact(y) for y in seen] == [exact(value)] * 2
        seen.clear()


@pytest.mark.parametrize(
    ("new", "old"),
    [
        (int | None, Optional[int]),
        (None | Tensor, Optional[Tensor]),
        (int | float | bool, Number),
        (bool | float | int | None, Optional[Number]),
        (list[Tensor | None], List[Optional[Tensor]]),
        (Sequence[int] | None, Optional[Sequence[int]]),
    ],
    ids=str,
)
def test_new_spelling_of_unions(new: Any, old: Any) -> None:  # 2
    assert infer_schema(annotated(y=new), mutates_args=()) == infer_schema(annotated(y=old), mutates_args=())


@pytest.mark.parametrize(
    ("fn", "schema"),
    [
        (lambda: annotated(), "() -> Tensor"),
        (lambda: keyword_and_positional, "(Tensor x, *, SymInt y, float z) -> Tensor"),
        (lambda: keyword_only, "(*, Tensor y) -> Tensor"),
    ],
    ids=["none", "both", "only"],
)
def test_keyword_only_arguments_follow_a_star(fn: Callable[[], Any], schema: str) -> None:  # 3
    assert infer_schema(fn(), mutates_args=()) == schema


def keyword_and_positional(x: Tensor, *, y: int, z: float) -> Tensor: ...


def keyword_only(*, y: Tensor) -> Tensor: ...


class Numbers(collections.abc.Sequence):
    """A sequence that is neither a list nor a tuple."""

    def __init__(self, *items: int) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: Any) -> Any:
        return self.items[i]


@pytest.mark.parametrize("given", [(1, 2), [1, 2], Numbers(1, 2), torch.Size([1, 2])], ids=lambda v: type(v).__name__)
@pytest.mark.parametrize("hint", [Sequence[int], collections.abc.Sequence[int], List[int], list[int]], ids=str)
def test_any_sequence_arrives_as_a_list(registry: customops.Registry, ns: str, hint: Any, given: Any) -> None:  # 13
    seen: list[Any] = []

    @registry.custom_op(f"{ns}::take", mutates_args=())
    def take(x: Tensor, y: hint) -> Tensor:
        seen.append(y)
        return x.clone()

    take(torch.ones(1), given)
    getattr(torch.ops, ns).take(torch.ones(1), y=given)
    assert [exact(y) for y in seen] == [exact([1, 2])] * 2


def named(name: str, keyword: bool) -> Callable[..., Tensor]:
    """A function with a parameter of this name, by which it multiplies."""
    namespace: dict[str, Any] = {"T": Tensor}
    star = "*, " if keyword else ""
    exec(f"def fn(x: T, {star}{name}: float = 2.0) -> T:\n    return x * {name}", namespace)
    fn: Callable[..., Tensor] = namespace["fn"]
    return fn


#: Names that a wrapper around the function might use itself.
NAMES = "args kwargs cls input device dtype out ctx call rule inputs output mode types func name lib default".split()
#: Names of parameters of functions on the way: of ours, and of torch's (`OpOverload.redispatch`, `Kernel.__call__`).
TAKEN, TAKEN_BY_TORCH = "op fn role".split(), "keyset self".split()


@pytest.mark.parametrize(
    ("name", "keyword"),
    [
        *itertools.product(NAMES, [False, True]),
        *((name, False) for name in (*TAKEN, *TAKEN_BY_TORCH)),
        *((name, True) for name in TAKEN),
        *(pytest.param(name, True, marks=pytest.mark.xfail(raises=TypeError)) for name in TAKEN_BY_TORCH),
    ],
)
def test_parameter_of_any_name(registry: customops.Registry, ns: str, name: str, keyword: bool) -> None:  # 2, 3
    op = registry.custom_op(f"{ns}::op", named(name, keyword), mutates_args=())
    op.register_kernel("cpu", named(name, keyword))
    op.register_fake(named(name, keyword))
    for x in (torch.ones(1), torch.ones(1, requires_grad=True)):
        assert op(x).tolist() == [2]
        assert op(x, **{name: 3.0}).tolist() == [3]
        assert getattr(torch.ops, ns).op(x, **{name: 3.0}).tolist() == [3]
    assert op(torch.ones(1, device="meta"), **{name: 3.0}).is_meta


# Returns --------------------------------------------------------------------------------------------------------


def test_table_of_return_types() -> None:  # 4
    assert dict(RETURN_TYPES) == SUPPORTED_RETURN_TYPES


@pytest.mark.parametrize(
    ("hint", "text"),
    [
        (None, "()"),
        (type(None), "()"),
        *RETURN_TYPES,
        (Tuple[Tensor, int, float, bool], "(Tensor, SymInt, float, bool)"),
        (tuple[List[Tensor], Tensor], "(Tensor[], Tensor)"),
        (Tuple[Number, list[Tensor]], "(Scalar, Tensor[])"),
        (Tuple[Tensor], "((Tensor))"),
        (Tuple[List[Tensor]], "((Tensor[]))"),
        *((Tuple[hint, hint], f"({text}, {text})") for hint, text in RETURN_TYPES),
    ],
    ids=str,
)
def test_return_type(hint: Any, text: str) -> None:  # 4, 5
    fn = annotated(x=Tensor, ret=hint)
    assert infer_schema(fn, mutates_args=()) == f"(Tensor x) -> {text}"


def produced(type_: str) -> list[Any]:
    """Values for a kernel to return."""
    if type_ == "Tensor[]":
        return [[torch.arange(2.0), torch.ones(1)], []]
    return [torch.arange(3)] if type_ == "Tensor" else [v for v in EXAMPLES[type_] if v == v]


@pytest.mark.parametrize("hint", SUPPORTED_RETURN_TYPES, ids=str)
def test_value_comes_back(registry: customops.Registry, ns: str, hint: Any) -> None:  # 4
    for i, value in enumerate(produced(SUPPORTED_RETURN_TYPES[hint])):

        @registry.custom_op(f"{ns}::one{i}", mutates_args=())
        def one(x: Tensor) -> hint:
            return value  # noqa: B023

        for op in (one, getattr(getattr(torch.ops, ns), f"one{i}")):
            assert exact(op(torch.ones(1))) == exact(value)
            assert exact(op(torch.ones(1, requires_grad=True))) == exact(value)


@pytest.mark.parametrize("hint", SUPPORTED_RETURN_TYPES, ids=str)
def test_two_values_come_back(registry: customops.Registry, ns: str, hint: Any) -> None:  # 4
    type_ = SUPPORTED_RETURN_TYPES[hint]
    pairs = zip(produced(type_), reversed(produced(type_)), strict=True)
    for i, pair in enumerate(pairs):

        @registry.custom_op(f"{ns}::two{i}", mutates_args=())
        def two(x: Tensor) -> Tuple[hint, hint]:
            return pair  # noqa: B023

        for op in (two, getattr(getattr(torch.ops, ns), f"two{i}")):
            assert exact(op(torch.ones(1))) == exact(pair)


def test_nothing_comes_back(registry: customops.Registry, ns: str) -> None:  # 4
    @registry.custom_op(f"{ns}::fill", mutates_args={"x"})
    def fill(x: Tensor) -> None:
        x.fill_(7)

    x = torch.zeros(2)
    assert fill(x) is None
    assert x.tolist() == [7, 7]


def test_one_tuple_comes_back_as_one(registry: customops.Registry, ns: str) -> None:  # 5
    @registry.custom_op(f"{ns}::single", mutates_args=())
    def single(x: Tensor) -> Tuple[Tensor]:
        return (x * 2,)

    single.register_fake(lambda x: (torch.empty_like(x),))
    for x in (torch.ones(2), torch.ones(2, requires_grad=True)):
        for op in (single, getattr(torch.ops, ns).single):
            result = op(x)
            assert type(result) is tuple
            assert len(result) == 1
            assert result[0].tolist() == [2, 2]
    (fake,) = single(torch.ones(2, device="meta"))
    assert fake.shape == (2,)


def test_one_tuple_is_not_a_tensor(registry: customops.Registry, ns: str) -> None:  # 5
    @registry.custom_op(f"{ns}::single", mutates_args=())
    def single(x: Tensor) -> Tuple[Tensor]:
        return x * 2

    with pytest.raises(KernelError, match="does not fit the schema"):
        single(torch.ones(2))


# Mutation -------------------------------------------------------------------------------------------------------


def four_kinds(x: Tensor, n: int, z: List[Tensor], w: List[Optional[Tensor]], v: Optional[Tensor]) -> None: ...


@pytest.mark.parametrize("nothing", [(), {}, [], set(), frozenset(), iter(())], ids=lambda v: type(v).__name__)
def test_nothing_is_mutated(nothing: Iterable[str]) -> None:  # 6
    assert infer_schema(four_kinds, mutates_args=nothing) == (
        "(Tensor x, SymInt n, Tensor[] z, Tensor?[] w, Tensor? v) -> ()"
    )


@pytest.mark.parametrize(
    ("mutates_args", "args"),
    [
        (("x",), "Tensor(a0!) x, SymInt n, Tensor[] z, Tensor?[] w, Tensor? v"),
        (["z"], "Tensor x, SymInt n, Tensor(a2!)[] z, Tensor?[] w, Tensor? v"),
        ({"w"}, "Tensor x, SymInt n, Tensor[] z, Tensor(a3!)?[] w, Tensor? v"),
        ({"v": 1}, "Tensor x, SymInt n, Tensor[] z, Tensor?[] w, Tensor(a4!)? v"),
        ("unknown", "Tensor(a0!) x, SymInt n, Tensor(a2!)[] z, Tensor(a3!)?[] w, Tensor(a4!)? v"),
    ],
    ids=str,
)
def test_mutated_argument_has_the_alias_set_of_its_index(mutates_args: Any, args: str) -> None:  # 6
    assert infer_schema(four_kinds, mutates_args=mutates_args) == f"({args}) -> ()"


def test_mutates_args_is_read_once() -> None:  # 6, 28
    names = (name for name in ("x", "z"))
    assert infer_schema(four_kinds, mutates_args=names) == (
        "(Tensor(a0!) x, SymInt n, Tensor(a2!)[] z, Tensor?[] w, Tensor? v) -> ()"
    )


def test_mutated_keyword_only_argument_counts_on() -> None:  # 6
    def fn(n: int, *, m: int, out: Tensor) -> None: ...

    assert infer_schema(fn, mutates_args=("out",)) == "(SymInt n, *, SymInt m, Tensor(a2!) out) -> ()"


# Tags -----------------------------------------------------------------------------------------------------------


def test_inplace_tag_makes_the_return_alias_the_first_argument() -> None:  # 8
    def add_(x: Tensor) -> Tensor: ...

    assert infer_schema(add_, mutates_args=("x",), tags=torch.Tag.inplace) == "(Tensor(a0!) x) -> Tensor(a0!)"


def test_out_tag_makes_the_returns_alias_the_mutated_arguments() -> None:  # 8, 34
    def add(x: Tensor, *, out: Tensor) -> Tensor: ...

    def split(x: Tensor, *, low: Tensor, n: int, high: Tensor) -> Tuple[Tensor, Tensor]: ...

    tags = [torch.Tag.out]
    assert infer_schema(add, mutates_args=("out",), tags=tags) == "(Tensor x, *, Tensor(a1!) out) -> Tensor(a1!)"
    assert infer_schema(split, mutates_args=("high", "low"), tags=tags) == (
        "(Tensor x, *, Tensor(a1!) low, SymInt n, Tensor(a3!) high) -> (Tensor(a1!), Tensor(a3!))"
    )


def test_other_tags_leave_the_schema_alone() -> None:  # 8
    def fn(x: Tensor) -> Tensor: ...

    tags = (torch.Tag.pointwise, torch.Tag.needs_exact_strides)
    assert infer_schema(fn, mutates_args=(), tags=tags) == "(Tensor x) -> Tensor"


def hints(**types: Any) -> Callable[..., Any]:
    """A function of these annotations; those after `_` are keyword-only, `ret` is the return."""
    names = [name for name in types if name not in ("ret", "_")]
    keyword = names[list(types).index("_") :] if "_" in types else []
    fn = annotated(ret=types["ret"], **{name: types[name] for name in names})
    signature = fn.__signature__  # type: ignore[attr-defined]
    parameters = [
        p.replace(kind=p.KEYWORD_ONLY if p.name in keyword else p.kind) for p in signature.parameters.values()
    ]
    fn.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return fn


@pytest.mark.parametrize(
    ("fn", "mutates_args", "match"),
    [
        (hints(ret=Tensor), (), "torch.Tag.inplace needs a positional argument"),
        (hints(_=None, x=Tensor, ret=Tensor), ("x",), "torch.Tag.inplace needs a positional argument"),
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
        (hints(x=Tensor, ret=List[Tensor]), ("x",), "return annotation"),
    ],
)
def test_inplace_tag_wants(registry: customops.Registry, ns: str, fn: Any, mutates_args: Any, match: str) -> None:  # 33
    with pytest.raises(SchemaError, match=match):
        infer_schema(fn, mutates_args=mutates_args, tags=torch.Tag.inplace)
    with pytest.raises(ValueError, match=match):
        registry.custom_op(f"{ns}::op", fn, mutates_args=mutates_args, tags=torch.Tag.inplace)
    assert len(registry) == 0


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
        (hints(x=Tensor, _=None, out=Tensor, ret=Tuple[Tensor, Tensor]), ("out",), "return annotation"),
        (hints(x=Tensor, _=None, a=Tensor, b=Tensor, ret=Tuple[Tensor, int]), ("a", "b"), "return annotation"),
    ],
)
def test_out_tag_wants(registry: customops.Registry, ns: str, fn: Any, mutates_args: Any, match: str) -> None:  # 39
    with pytest.raises(SchemaError, match=match):
        infer_schema(fn, mutates_args=mutates_args, tags=torch.Tag.out)
    with pytest.raises(ValueError, match=match):
        registry.custom_op(f"{ns}::op", fn, mutates_args=mutates_args, tags=torch.Tag.out)
    assert len(registry) == 0


def test_inplace_and_out_exclude_each_other(registry: customops.Registry, ns: str) -> None:  # 33
    def add_(x: Tensor) -> Tensor: ...

    tags = (torch.Tag.inplace, torch.Tag.out)
    with pytest.raises(AssertionError, match="mutually exclusive"):
        infer_schema(add_, mutates_args=("x",), tags=tags)
    with pytest.raises(AssertionError, match="mutually exclusive"):
        registry.custom_op(f"{ns}::op", add_, mutates_args=("x",), tags=tags)


@pytest.mark.parametrize("tags", ["inplace", 3, [3], ["inplace"], [torch.Tag.out, "x"], [[torch.Tag.out]], {"a": 1}])
def test_tags_that_are_none(tags: Any) -> None:  # 25
    def fn(x: Tensor) -> Tensor: ...

    with pytest.raises(DefinitionError, match=r"tags must be torch\.Tag members") as caught:
        infer_schema(fn, mutates_args=(), tags=tags)
    assert len(str(caught.value).splitlines()) < 8


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
def test_tags_arrive_once_with_pt2_compliant(registry: customops.Registry, ns: str, tags: Any) -> None:  # 25
    @registry.custom_op(f"{ns}::op", mutates_args=(), tags=tags)
    def op(x: Tensor) -> Tensor: ...

    wanted = [torch.Tag.pointwise, torch.Tag.pt2_compliant_tag]
    assert sorted(op._opoverload.tags, key=str) == wanted
    assert sorted(op.tags, key=str) == wanted


@pytest.mark.parametrize("tags", [None, (), []], ids=str)
def test_no_tags_still_pt2_compliant(registry: customops.Registry, ns: str, tags: Any) -> None:  # 25
    @registry.custom_op(f"{ns}::op", mutates_args=(), tags=tags)
    def op(x: Tensor) -> Tensor: ...

    assert op._opoverload.tags == [torch.Tag.pt2_compliant_tag]


# Quoted annotations ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hint", "type_"),
    [
        ("MyList[torch.Tensor]", "Tensor[]"),
        ("MyTensor", "Tensor"),
        ("Optional['MyTensor']", "Tensor?"),
        ("'MyTensor'", "Tensor"),
        (list["MyTensor"], "Tensor[]"),
        (List["MyTensor"], "Tensor[]"),
        (Sequence["Optional[MyTensor]"], "Tensor?[]"),
        (Optional["int"], "SymInt?"),
        (Optional[List["int"]], "SymInt[]?"),
        ("int | None", "SymInt?"),
        ("Number", "Scalar"),
    ],
    ids=str,
)
def test_quoted_annotation(hint: Any, type_: str) -> None:  # 9
    def fn(x: Tensor, y: hint) -> "MyTensor": ...

    assert infer_schema(fn, mutates_args=()) == f"(Tensor x, {type_} y) -> Tensor"


def test_quoted_return() -> None:  # 9
    def fn(x: "MyTensor") -> "Tuple['MyTensor', MyList['MyTensor']]": ...

    assert infer_schema(fn, mutates_args=()) == "(Tensor x) -> (Tensor, Tensor[])"


@pytest.mark.parametrize("name", ["_TestTensor", "_Row"])
def test_names_of_the_inference_module_do_not_resolve(monkeypatch: pytest.MonkeyPatch, name: str) -> None:  # 9
    monkeypatch.setattr(infer, name, Tensor, raising=False)
    monkeypatch.setattr(customops.schema, name, Tensor, raising=False)

    def fn(x: f"list[{name}]") -> Tensor: ...

    with pytest.raises(ValueError, match=rf"Unsupported type annotation list\[{name}\]\. It is not a type\."):
        infer_schema(fn, mutates_args=())


def test_name_that_only_the_function_body_has() -> None:  # 9
    Local = Tensor

    def fn(x: "Local") -> Tensor: ...

    assert Local is Tensor
    assert "not inside a function" in complaint(fn, r"Unsupported type annotation Local\. It is not a type\.")


@pytest.mark.parametrize("text", ["1/0", "x y", "list[", "undefined.Tensor", "torch.nope"])
def test_quoted_annotation_that_cannot_be_evaluated(text: str) -> None:  # 9
    def fn(x: text) -> Tensor: ...

    complaint(fn, rf"Unsupported type annotation {re.escape(text)}\. It is not a type\.")


FUTURE = """\
    from __future__ import annotations

    import functools
    from typing import TYPE_CHECKING

    import torch
    from torch import Tensor

    if TYPE_CHECKING:
        from nowhere import Vector

    Vectors = list[Tensor]

    def scale(x: Tensor, by: float = 2.0, *, dims: list[int] | None = None) -> tuple[Tensor, Vectors]:
        return x * by, [x + 1]

    def typing_only(x: Vector) -> Tensor: ...

    def make_local():
        Local = Tensor
        def local(x: Tensor) -> Local: ...
        return local

    class Scale:
        def __init__(self, by: float) -> None:
            self.by = by
        def method(self, xs: Vectors) -> Tensor:
            return xs[0] * self.by
        def __call__(self, xs: Vectors) -> Tensor:
            return xs[0] * self.by
"""


def test_future_annotations(registry: customops.Registry, ns: str, tmp_path: Path) -> None:  # 9
    module = load(tmp_path, FUTURE)
    schema = "(Tensor x, float by=2.0, *, SymInt[]? dims=None) -> (Tensor, Tensor[])"
    assert infer_schema(module.scale, mutates_args=()) == schema
    op = registry.custom_op(f"{ns}::scale", module.scale, mutates_args=())
    first, (second,) = op(torch.ones(2), 3.0)
    assert (first.tolist(), second.tolist()) == ([3, 3], [2, 2])


def test_future_annotation_imported_for_type_checkers_only(tmp_path: Path) -> None:  # 9
    fn = load(tmp_path, FUTURE).typing_only
    message = complaint(fn, r"Unsupported type annotation Vector\. It is not a type\. \(NameError")
    assert "import or define the name there" in message


def test_future_annotation_local_to_a_function(tmp_path: Path) -> None:  # 9
    complaint(load(tmp_path, FUTURE).make_local(), r"Unsupported type annotation Local\. It is not a type\.")


def test_decorated_function_is_read_in_its_own_module(tmp_path: Path) -> None:  # 9
    def passes_on(fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return fn(*args, **kwargs)

        return wrapper

    module = load(tmp_path, FUTURE)
    wrapped = passes_on(passes_on(module.scale))  # `Vectors` is no name of this module
    assert infer_schema(wrapped, mutates_args=()) == infer_schema(module.scale, mutates_args=())
    complaint(passes_on(module.typing_only), "annotation Vector")  # checks that the place is the inner function's


# Callables that are not plain functions ---------------------------------------------------------------------------


def test_bound_method(registry: customops.Registry, ns: str, tmp_path: Path) -> None:
    scale = load(tmp_path, FUTURE).Scale(3.0)
    assert infer_schema(scale.method, mutates_args=()) == "(Tensor[] xs) -> Tensor"
    op = registry.custom_op(f"{ns}::op", scale.method, mutates_args=())
    assert op([torch.ones(2)]).tolist() == [3, 3]


def test_callable_object(registry: customops.Registry, ns: str, tmp_path: Path) -> None:
    scale = load(tmp_path, FUTURE).Scale(3.0)
    assert infer_schema(scale, mutates_args=()) == "(Tensor[] xs) -> Tensor"
    op = registry.custom_op(f"{ns}::op", scale, mutates_args=())
    assert op([torch.ones(2)]).tolist() == [3, 3]


def test_partial(registry: customops.Registry, ns: str) -> None:
    def fn(x: Tensor, by: float, plus: int = 1) -> Tensor:
        return x * by + plus

    partial = functools.partial(fn, by=2.0)
    assert infer_schema(partial, mutates_args=()) == "(Tensor x, *, float by=2.0, SymInt plus=1) -> Tensor"
    op = registry.custom_op(f"{ns}::op", partial, mutates_args=())
    assert op(torch.ones(2)).tolist() == [3, 3]
    assert op(torch.ones(2), by=4.0, plus=0).tolist() == [4, 4]
    first = functools.partial(fn, torch.ones(1))
    assert infer_schema(first, mutates_args=()) == "(float by, SymInt plus=1) -> Tensor"


def test_error_in_a_partial_names_the_function() -> None:
    def fn(x: Tensor, by: dict) -> Tensor: ...

    with pytest.raises(SchemaError, match=rf"fn: parameter by has unsupported type dict(.|\n)*fn \({__file__}:\d+\)"):
        infer_schema(functools.partial(fn), mutates_args=())


def test_function_built_by_exec(registry: customops.Registry, ns: str) -> None:
    namespace: dict[str, Any] = {}
    exec("import torch as t\ndef double(x: t.Tensor) -> 't.Tensor':\n    return x * 2", namespace)
    assert infer_schema(namespace["double"], mutates_args=()) == "(Tensor x) -> Tensor"
    op = registry.custom_op(f"{ns}::double", namespace["double"], mutates_args=())
    assert op(torch.ones(2)).tolist() == [2, 2]


def test_error_in_a_function_built_by_exec_has_its_line() -> None:
    namespace: dict[str, Any] = {}
    exec("\n\ndef double(x):\n    return x * 2", namespace)
    with pytest.raises(
        SchemaError, match=r"double: parameter x must have a type annotation\n *at: +double \(<string>:3\)"
    ):
        infer_schema(namespace["double"], mutates_args=())


def test_exec_with_builtins_of_its_own() -> None:
    namespace: dict[str, Any] = {"Tensor": Tensor, "__builtins__": {"int": float}}
    exec("def fn(x: Tensor, y: 'int') -> Tensor: ...", namespace)
    assert infer_schema(namespace["fn"], mutates_args=()) == "(Tensor x, float y) -> Tensor"


def test_lambda(registry: customops.Registry, ns: str) -> None:
    with pytest.raises(ValueError, match=r"<lambda>: parameter x must have a type annotation"):
        infer_schema(lambda x: x, mutates_args=())
    op = registry.custom_op(f"{ns}::op", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor")
    assert op(torch.ones(1)).tolist() == [2]


@pytest.mark.parametrize("builtin", [torch.sin, torch.add, torch._C._nn.gelu, dict.fromkeys], ids=lambda f: f.__name__)
def test_builtin_without_a_signature(builtin: Any) -> None:
    name = builtin.__name__
    with pytest.raises(ValueError, match=rf"{name}: (the signature cannot be read|positional-only)") as caught:
        infer_schema(builtin, mutates_args=())
    assert len(str(caught.value).splitlines()) < 8


def test_builtin_with_a_manual_schema(registry: customops.Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::sin", torch.sin, mutates_args=(), schema="(Tensor x) -> Tensor")
    assert op(torch.zeros(1)).tolist() == [0]


class TakesTensor:
    def __init__(self, x: Tensor) -> None: ...

    def __call__(self, x: Tensor) -> Tensor: ...


@pytest.mark.parametrize("wrong", [TakesTensor, dict, 3, None, "fn", [len]], ids=str)
def test_what_is_no_function(wrong: Any) -> None:
    with pytest.raises(ValueError, match="expected a function") as caught:
        infer_schema(wrong, mutates_args=())
    assert repr(wrong)[:40] in str(caught.value)
    assert len(str(caught.value).splitlines()) < 8


# Texts ----------------------------------------------------------------------------------------------------------


def test_schema_texts() -> None:
    def rms_norm(x: Tensor, weight: Optional[Tensor] = None, eps: float = 1e-6) -> Tensor: ...

    def attention(
        q: Tensor, k: Tensor, v: Tensor, scale: Optional[float], *, causal: bool = False
    ) -> Tuple[Tensor, Tensor]: ...

    def reshape_and_cache(key: Tensor, caches: List[Tensor], slots: Sequence[Optional[Tensor]], kind: str) -> None: ...

    def cat(xs: Sequence[Tensor], dim: int = 0) -> Tensor: ...

    def split(x: Tensor, sizes: Sequence[int], dims: Optional[List[int]] = None) -> List[Tensor]: ...

    def rand(n: int, *, device: torch.device, dtype: torch.dtype = torch.float) -> Tensor: ...

    def stats(x: Tensor, p: Number = 2, name: str = "l2") -> Tuple[int, float, bool, Number]: ...

    mutated = {reshape_and_cache: ("key", "caches", "slots")}
    functions = (rms_norm, attention, reshape_and_cache, cat, split, rand, stats)
    texts = [infer_schema(fn, mutates_args=mutated.get(fn, ()), op_name=fn.__name__) for fn in functions]
    assert_expected_inline(
        "\n".join(texts),
        """\
rms_norm(Tensor x, Tensor? weight=None, float eps=1e-06) -> Tensor
attention(Tensor q, Tensor k, Tensor v, float? scale, *, bool causal=False) -> (Tensor, Tensor)
reshape_and_cache(Tensor(a0!) key, Tensor(a1!)[] caches, Tensor(a2!)?[] slots, str kind) -> ()
cat(Tensor[] xs, SymInt dim=0) -> Tensor
split(Tensor x, SymInt[] sizes, SymInt[]? dims=None) -> Tensor[]
rand(SymInt n, *, Device device, ScalarType dtype=float32) -> Tensor
stats(Tensor x, Scalar p=2, str name="l2") -> (SymInt, float, bool, Scalar)""",
    )


# Refusals -------------------------------------------------------------------------------------------------------


def test_varargs() -> None:  # 10
    def fn(x: Tensor, *rest: Tensor) -> Tensor: ...

    assert "varkwargs" not in complaint(fn, r"varargs \(\*rest\) are not supported")


def test_varkwargs() -> None:  # 10
    def fn(x: Tensor, **rest: Tensor) -> Tensor: ...

    complaint(fn, r"varkwargs \(\*\*rest\) are not supported")


def test_positional_only() -> None:
    def fn(x: Tensor, /) -> Tensor: ...

    complaint(fn, r"positional-only parameters \(x\) are not supported")


def test_unannotated_parameter() -> None:  # 10
    def fn(x: Tensor, y) -> Tensor: ...  # type: ignore[no-untyped-def]

    complaint(fn, "parameter y must have a type annotation")


def test_unbound_method_has_an_unannotated_self() -> None:  # 10
    class Model:
        def forward(self, x: Tensor) -> Tensor: ...

    complaint(Model.forward, "a method cannot be an op: its first parameter is self")


@pytest.mark.parametrize(
    "hint",
    [
        Tuple[Tensor, ...],
        Tuple[Tensor, Optional[Tensor]],
        Optional[Tensor],
        List[int],
        str,
        torch.dtype,
        Dict[str, Tensor],
        tuple,
        Tuple[()],
        Tuple,
        Tuple[Tuple[Tensor], Tensor],
        np.ndarray,
        Any,
    ],
    ids=str,
)
def test_unsupported_return(hint: Any) -> None:  # 10
    def fn(x: Tensor) -> hint: ...

    complaint(fn, "the return has unsupported type")


@pytest.mark.parametrize(
    ("mutates_args", "match"),
    [
        (("n",), "parameter n is in mutates_args, but only Tensors or collections of Tensors can be mutated"),
        (("y",), r"\{'y'\} in mutates_args were not found"),
        (("z", "x", "y"), r"\{'y', 'z'\} in mutates_args were not found"),
        ("x", "the string 'unknown', not 'x'"),
        ("", "the string 'unknown', not ''"),
        (None, "an iterable of names or the string 'unknown'"),
        (3, "an iterable of names or the string 'unknown'"),
        ([["x"]], "an iterable of names or the string 'unknown'"),
        ([1], "an iterable of names or the string 'unknown'"),
    ],
)
def test_wrong_mutates_args(mutates_args: Any, match: str) -> None:  # 10
    def fn(x: Tensor, n: int) -> Tensor: ...

    complaint(fn, match, mutates_args=mutates_args)


@pytest.mark.parametrize("hint", [List[int], Optional[str], Number, torch.dtype], ids=str)
def test_only_tensors_can_be_mutated(hint: Any) -> None:  # 10
    def fn(x: Tensor, y: hint) -> Tensor: ...

    complaint(fn, "parameter y is in mutates_args, .* can be mutated", mutates_args={"y"})


def test_no_return_annotation() -> None:  # 10
    def fn(x: Tensor): ...  # type: ignore[no-untyped-def]

    complaint(fn, r"No return type annotation was provided\. Please add one\.")


def test_name_that_no_schema_can_hold() -> None:
    def fn(x: Tensor, größe: int) -> Tensor: ...

    complaint(fn, "parameter größe: names in a schema are ASCII")


class Pair(NamedTuple):
    low: int
    high: int


@pytest.mark.parametrize(
    "hint",
    [
        List[Optional[int]],
        Tuple[int, int],
        Tuple[int, float],
        Callable,
        Callable[[int], int],
        Pair,
        dict,
        Dict[str, int],
        set,
        object,
        Any,
        None,
        3,
        [int],
        Ellipsis,
        complex,
        bytes,
        List[str],
        List[List[int]],
        Optional[List[List[Tensor]]],
        Union[int, str],
        Annotated[Tensor, "x"],
        Literal["a"],
        torch.Size,
        torch.layout,
        torch.SymInt,
        np.ndarray,
        Path,
        type,
    ],
    ids=str,
)
def test_unsupported_parameter(hint: Any) -> None:  # 11
    def fn(x: Tensor, y: hint) -> Tensor: ...

    complaint(fn, "parameter y has unsupported type")


@pytest.mark.parametrize(
    ("hint", "nearest"),
    [
        (Tuple[int, int], "For example, list[int]."),
        (Tuple[int, ...], "For example, list[int]."),
        (tuple[float, float, float], "For example, list[float]."),
        (Tuple[Tensor, Tensor], "For example, list[torch.Tensor]."),
        (Tuple[Tensor, Optional[Tensor]], f"For example, {list[Optional[Tensor]]}."),
        (List[Optional[int]], "works is list[int]."),
        (List[List[int]], "works is list[int]."),
        (Set[float], "works is list[float]."),
        (collections.abc.Iterable[Tensor], "works is list[torch.Tensor]."),
        (Annotated[Optional[int], "n"], f"works is {Optional[int]}."),
        (Literal["a", "b"], "works is str."),
        (Literal[1, 2], "works is int."),
        (Union[int, float], f"works is {Number}."),
        (Union[Tensor, str], "works is torch.Tensor."),
        (torch.nn.Parameter, "works is torch.Tensor."),
        (torch.Size, "works is Sequence[int]."),
        (np.ndarray, "works is torch.Tensor."),
        (complex, "works is torch.types.Number."),
        (bytes, "works is str."),
        (Pair, "one parameter for each of its fields (low, high)."),
    ],
    ids=str,
)
def test_unsupported_parameter_is_told_the_nearest_type(hint: Any, nearest: str) -> None:  # 11
    def fn(x: Tensor, y: hint) -> Tensor: ...

    assert nearest in complaint(fn, "unsupported type")


@pytest.mark.parametrize("hint", [Tuple[int, float], Tuple[str, str], tuple, Tuple], ids=str)
def test_tuple_without_a_list_form_has_no_suggestion(hint: Any) -> None:  # 11
    def fn(x: Tensor, y: hint) -> Tensor: ...

    assert "For example" not in complaint(fn, "unsupported type")


@pytest.mark.parametrize("t", [int, float, bool, str, torch.device, Tensor, torch.dtype, Number], ids=str)
def test_tuple_to_list(t: Any) -> None:  # 12
    assert tuple_to_list(Tuple[t]) == list[t]
    assert tuple_to_list(Tuple[t, ...]) == list[t]
    assert tuple_to_list(Tuple[t, t, t]) == list[t]
    assert tuple_to_list(tuple[t, t]) == list[t]
    assert tuple_to_list(Tuple[t, Optional[t]]) == list[Optional[t]]
    assert tuple_to_list(Tuple[t, t, Optional[t]]) == list[Optional[t]]


def test_tuple_to_list_without_items() -> None:  # 12
    assert tuple_to_list(Tuple) is list
    assert tuple_to_list(tuple) is list


def test_tuple_to_list_of_mixed_items() -> None:  # 12
    assert tuple_to_list(Tuple[int, float]) == list[int | float]
    assert tuple_to_list(Tuple[int, float, str]) == list[int | float | str]


def test_tuple_to_list_gives_the_builtin_list() -> None:  # 12
    assert str(tuple_to_list(Tuple[int, int])) == "list[int]"


def test_failed_inference_defines_nothing(registry: customops.Registry, ns: str) -> None:
    def fn(x: Tensor, y: dict) -> Tensor: ...

    with pytest.raises(ValueError, match="unsupported type"):
        registry.custom_op(f"{ns}::op", fn, mutates_args=())
    assert len(registry) == 0
    assert not hasattr(getattr(torch.ops, ns), "op")


# Messages -------------------------------------------------------------------------------------------------------


def test_message_for_a_type() -> None:
    def scale(x: Tensor, sizes: Tuple[int, int]) -> Tensor: ...

    assert_expected_inline(
        complaint(scale),
        """\
scale: parameter sizes has unsupported type typing.Tuple[int, int]. Tuples are not supported here; use a list. For example, list[int].
  at:       FUNCTION (FILE:LINE)
  fix:      write a schema by hand with schema= if the dispatcher has such a type""",  # noqa: E501
    )


def test_message_for_a_type_with_a_relative() -> None:
    def scale(x: np.ndarray) -> Tensor: ...

    assert_expected_inline(
        complaint(scale),
        """\
scale: parameter x has unsupported type numpy.ndarray. The nearest type that works is torch.Tensor.
  at:       FUNCTION (FILE:LINE)
  fix:      write a schema by hand with schema= if the dispatcher has such a type""",
    )


def test_message_for_a_dict() -> None:
    def scale(x: Tensor, options: Dict[str, int]) -> Tensor: ...

    assert_expected_inline(
        complaint(scale),
        """\
scale: parameter options has unsupported type typing.Dict[str, int]. The nearest type that works is list[int], of its \
values; let a function around the op deal with the dict.
  at:       FUNCTION (FILE:LINE)
  fix:      write a schema by hand with schema= if the dispatcher has such a type""",
    )


def test_message_for_a_return() -> None:
    def scale(x: Tensor) -> Tuple[Tensor, ...]: ...

    assert_expected_inline(
        complaint(scale),
        """\
scale: the return has unsupported type typing.Tuple[torch.Tensor, ...]. For example, list[torch.Tensor].
  at:       FUNCTION (FILE:LINE)
  fix:      write a schema by hand with schema= if the dispatcher has such a type""",
    )


def test_message_for_a_missing_annotation() -> None:
    def scale(x: Tensor, by) -> Tensor: ...  # type: ignore[no-untyped-def]

    assert_expected_inline(
        complaint(scale),
        """\
scale: parameter by must have a type annotation
  at:       FUNCTION (FILE:LINE)
  fix:      e.g. by: torch.Tensor""",
    )


def test_message_for_a_missing_return() -> None:
    def scale(x: Tensor): ...  # type: ignore[no-untyped-def]

    assert_expected_inline(
        complaint(scale),
        """\
scale: No return type annotation was provided. Please add one.
  at:       FUNCTION (FILE:LINE)
  fix:      e.g. -> torch.Tensor, or -> None for an op that only mutates""",
    )


def test_message_for_varargs() -> None:
    def scale(*xs: Tensor) -> Tensor: ...

    assert_expected_inline(
        complaint(scale),
        """\
scale: varargs (*xs) are not supported
  at:       FUNCTION (FILE:LINE)
  fix:      write every argument as a named, typed parameter""",
    )


def test_message_for_a_quoted_name() -> None:
    def scale(x: "Vector") -> Tensor: ...  # noqa: F821

    assert_expected_inline(
        complaint(scale),
        """\
scale: Unsupported type annotation Vector. It is not a type. (NameError: name 'Vector' is not defined)
  at:       FUNCTION (FILE:LINE)
  fix:      a quoted annotation (or any, after `from __future__ import annotations`) is evaluated in the function's module: import or define the name there, not inside a function""",  # noqa: E501
    )


def test_message_for_a_plain_string() -> None:
    def scale_(x: Tensor) -> None: ...

    assert_expected_inline(
        complaint(scale_, mutates_args="x"),
        """\
scale_: mutates_args must be an iterable of names or the string 'unknown', not 'x'
  at:       FUNCTION (FILE:LINE)
  fix:      mutates_args=('x',)""",
    )


def test_message_for_an_unknown_name() -> None:
    def scale_(x: Tensor, by: float) -> None: ...

    assert_expected_inline(
        complaint(scale_, mutates_args={"y"}),
        """\
scale_: {'y'} in mutates_args were not found among the parameters
  got:      (x, by)
  at:       FUNCTION (FILE:LINE)""",
    )


def test_message_for_what_cannot_be_mutated() -> None:
    def scale_(x: Tensor, by: float) -> None: ...

    assert_expected_inline(
        complaint(scale_, mutates_args={"by"}),
        """\
scale_: parameter by is in mutates_args, but only Tensors or collections of Tensors can be mutated
  at:       FUNCTION (FILE:LINE)""",
    )


def test_message_for_a_default() -> None:
    def scale(x: Tensor, by: int = 2**64) -> Tensor: ...

    assert_expected_inline(
        complaint(scale),
        """\
scale: parameter by has an unsupported default: the dispatcher's integers have 64 bits
  expected: SymInt
  got:      18446744073709551616
  at:       FUNCTION (FILE:LINE)""",
    )


def test_message_for_a_default_of_an_optional() -> None:
    def scale(x: Tensor, by: Optional[float] = float("inf")) -> Tensor: ...

    assert_expected_inline(
        complaint(scale),
        """\
scale: parameter by has an unsupported default: schema text cannot hold it, and None has its own meaning here
  expected: float?
  got:      inf
  at:       FUNCTION (FILE:LINE)
  fix:      drop Optional[...] from by, or default to None and fill the value in the kernel""",
    )


def test_message_for_an_inplace_tag() -> None:
    def scale_(x: Tensor, y: Tensor) -> Tensor: ...

    assert_expected_inline(
        complaint(scale_, mutates_args={"y"}, tags=torch.Tag.inplace),
        """\
scale_: torch.Tag.inplace: mutates_args must hold the first argument 'x' alone, not ['y']
  got:      (Tensor x, Tensor(a1!) y) -> Tensor
  at:       FUNCTION (FILE:LINE)""",
    )


def test_message_for_an_out_tag() -> None:
    def scale(x: Tensor, *, out: Tensor) -> Tuple[Tensor]: ...

    assert_expected_inline(
        complaint(scale, mutates_args={"out"}, tags=torch.Tag.out),
        """\
scale: torch.Tag.out: the returns must be the mutated arguments (out) in order: the return annotation is torch.Tensor, each aliasing its argument
  got:      (Tensor x, *, Tensor(a1!) out) -> ((Tensor(a1!)))
  at:       FUNCTION (FILE:LINE)""",  # noqa: E501
    )


def test_message_for_contradicting_tags() -> None:
    def scale_(x: Tensor) -> Tensor: ...

    with pytest.raises(DefinitionError) as caught:
        infer_schema(scale_, mutates_args={"x"}, tags=(torch.Tag.inplace, torch.Tag.out))
    assert_expected_inline(
        str(caught.value),
        """\
torch.Tag.inplace and torch.Tag.out are mutually exclusive
  argument: tags""",
    )
