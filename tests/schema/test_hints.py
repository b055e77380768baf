"""A function's hints -> its schema: types, returns, mutation, tags, quoted annotations, and every refusal."""

import collections.abc
import inspect
import itertools
from collections.abc import Callable, Iterable
from typing import Any, List, Optional, Sequence, Tuple, Union

import pytest
import torch
from helpers.hints import annotated
from helpers.tensors import exact
from torch import Tensor
from torch._library import infer_schema as theirs
from torch.types import Number

import customops
from customops import infer_schema
from customops._schema.types import SUPPORTED_PARAM_TYPES, SUPPORTED_RETURN_TYPES
from customops.errors import KernelError

GroupName = torch.distributed.distributed_c10d.GroupName


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
#: What torch refuses.
SINGLE = {torch.layout: "Layout", torch.memory_format: "MemoryFormat", torch.Generator: "Generator"}
LISTED = {complex: "complex", str: "str", GroupName: "str", torch.dtype: "ScalarType"}
#: The dispatcher hands over numbers for it: it is lowered, and no row of the table.
NOT_IN_TABLE = [(Optional[seq[torch.dtype]], "ScalarType[]?") for seq in SEQUENCES]
NUMBERS = (Union[int, float], Union[int, float, complex], Union[int, float, bool, complex])
ALONE = {torch.nn.Parameter: "Tensor", complex: "complex", **SINGLE, **dict.fromkeys(NUMBERS, "Scalar")}
MORE_PARAM_TYPES: list[tuple[Any, str]] = [
    *ALONE.items(),
    *((Optional[t], f"{name}?") for t, name in ALONE.items()),
    *((seq[torch.nn.Parameter], "Tensor[]") for seq in SEQUENCES),
    *((seq[union], "Scalar[]") for union in NUMBERS for seq in SEQUENCES),
    *((Optional[seq[torch.nn.Parameter]], "Tensor[]?") for seq in SEQUENCES),
    *((seq[Optional[torch.nn.Parameter]], "Tensor?[]") for seq in SEQUENCES),
    *((Optional[seq[Optional[torch.nn.Parameter]]], "Tensor?[]?") for seq in SEQUENCES),
    *((seq[t], f"{name}[]") for t, name in LISTED.items() for seq in SEQUENCES),
    *((Optional[seq[t]], f"{name}[]?") for t, name in LISTED.items() for seq in SEQUENCES if t is not torch.dtype),
]
ALL_PARAM_TYPES = [*PARAM_TYPES, *MORE_PARAM_TYPES, *NOT_IN_TABLE]
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
MORE_RETURN_TYPES: list[tuple[Any, str]] = [
    (torch.nn.Parameter, "Tensor"),
    (List[torch.nn.Parameter], "Tensor[]"),
    (list[torch.nn.Parameter], "Tensor[]"),
    *((union, "Scalar") for union in NUMBERS),
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
    "complex": [1j, 2.5 - 0.5j],
    "Layout": [torch.strided, torch.sparse_coo],
    "MemoryFormat": [torch.channels_last, torch.preserve_format],
    "Generator": [torch.Generator()],
}


def examples(type_: str) -> list[Any]:
    """Values to pass for any type of the table."""
    if type_.endswith("?"):
        return [*examples(type_[:-1]), None]
    if type_.endswith("[]"):
        return [examples(type_[:-2]), []]
    return EXAMPLES[type_]


# Parameters -----------------------------------------------------------------------------------------------------


@pytest.mark.parity(1)
def test_schema_has_no_name() -> None:
    def scale(x: Tensor) -> Tensor: ...

    assert infer_schema(scale, mutates_args=()) == "(Tensor x) -> Tensor"


@pytest.mark.parity(1)
def test_op_name_goes_in_front() -> None:
    def scale(x: Tensor) -> Tensor: ...

    assert infer_schema(scale, mutates_args=(), op_name="myop") == "myop(Tensor x) -> Tensor"


@pytest.mark.parity(1)
def test_function_is_positional_and_the_rest_by_keyword() -> None:
    parameters = inspect.signature(infer_schema).parameters.values()
    assert [(p.name, p.kind.name) for p in parameters] == [
        ("fn", "POSITIONAL_ONLY"),
        ("mutates_args", "KEYWORD_ONLY"),
        ("op_name", "KEYWORD_ONLY"),
        ("tags", "KEYWORD_ONLY"),
    ]


@pytest.mark.parity(2)
def test_table_of_parameter_types() -> None:
    assert dict(PARAM_TYPES + MORE_PARAM_TYPES) == SUPPORTED_PARAM_TYPES
    assert len(PARAM_TYPES) == 62  # torch 2.13 has 54 of them: no optional lists of tensors


@pytest.mark.parity(2, 4)
def test_tables_agree_with_torch() -> None:
    newer = {hint for hint, text in PARAM_TYPES if text in ("Tensor[]?", "Tensor?[]?")}  # torch 2.14
    known = {hint: text for hint, text in PARAM_TYPES if hint not in newer}
    assert known.items() <= theirs.SUPPORTED_PARAM_TYPES.items() <= SUPPORTED_PARAM_TYPES.items()
    assert dict(RETURN_TYPES) == theirs.SUPPORTED_RETURN_TYPES


@pytest.mark.parity(2)
@pytest.mark.parametrize(("hint", "type_"), ALL_PARAM_TYPES, ids=str)
def test_parameter_type(hint: Any, type_: str) -> None:
    fn = annotated(x=Tensor, y=hint)
    assert infer_schema(fn, mutates_args=()) == f"(Tensor x, {type_} y) -> Tensor"
    if hint in theirs.SUPPORTED_PARAM_TYPES:
        assert infer_schema(fn, mutates_args=()) == torch.library.infer_schema(fn, mutates_args=())


@pytest.mark.parity(2)
@pytest.mark.parametrize("hint", dict(ALL_PARAM_TYPES), ids=str)
def test_value_reaches_the_kernel(registry: customops.Registry, ns: str, hint: Any) -> None:
    seen: list[Any] = []

    @registry.custom_op(f"{ns}::take", mutates_args=())
    def take(x: Tensor, y: hint) -> Tensor:
        seen.append(y)
        return x.clone()

    packet = getattr(torch.ops, ns).take
    x = torch.ones(2)
    values = examples(dict(ALL_PARAM_TYPES)[hint])
    for value, op in itertools.product(values, (take, packet, packet.default)):
        op(x, value)
        op(x, y=value)
        assert [exact(y) for y in seen] == [exact(value)] * 2
        seen.clear()


@pytest.mark.parity(2, 3)
@pytest.mark.parametrize("hint", [t for t, name in ALL_PARAM_TYPES if "Tensor" not in name], ids=str)
def test_keyword_only_value_reaches_the_kernel(registry: customops.Registry, ns: str, hint: Any) -> None:
    seen: list[Any] = []

    @registry.custom_op(f"{ns}::take", mutates_args=())
    def take(x: Tensor, *, y: hint) -> Tensor:
        seen.append(y)
        return x.clone()

    for value in examples(dict(ALL_PARAM_TYPES)[hint]):
        take(torch.ones(2), y=value)
        getattr(torch.ops, ns).take(torch.ones(2), y=value)
        assert [exact(y) for y in seen] == [exact(value)] * 2
        seen.clear()


@pytest.mark.parity(2)
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
def test_new_spelling_of_unions(new: Any, old: Any) -> None:
    assert infer_schema(annotated(y=new), mutates_args=()) == infer_schema(annotated(y=old), mutates_args=())


@pytest.mark.parity(3)
@pytest.mark.parametrize(
    ("fn", "schema"),
    [
        (lambda: annotated(), "() -> Tensor"),
        (lambda: keyword_and_positional, "(Tensor x, *, SymInt y, float z) -> Tensor"),
        (lambda: keyword_only, "(*, Tensor y) -> Tensor"),
    ],
    ids=["none", "both", "only"],
)
def test_keyword_only_arguments_follow_a_star(fn: Callable[[], Any], schema: str) -> None:
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


@pytest.mark.parity(13)
@pytest.mark.parametrize("given", [(1, 2), [1, 2], Numbers(1, 2), torch.Size([1, 2])], ids=lambda v: type(v).__name__)
@pytest.mark.parametrize("hint", [Sequence[int], collections.abc.Sequence[int], List[int], list[int]], ids=str)
def test_any_sequence_arrives_as_a_list(registry: customops.Registry, ns: str, hint: Any, given: Any) -> None:
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


@pytest.mark.parity(2, 3)
@pytest.mark.parametrize(
    ("name", "keyword"),
    [
        *itertools.product(NAMES, [False, True]),
        *((name, False) for name in (*TAKEN, *TAKEN_BY_TORCH)),
        *((name, True) for name in TAKEN),
        *(pytest.param(name, True, marks=pytest.mark.xfail(raises=TypeError)) for name in TAKEN_BY_TORCH),
    ],
)
def test_parameter_of_any_name(registry: customops.Registry, ns: str, name: str, keyword: bool) -> None:
    op = registry.custom_op(f"{ns}::op", named(name, keyword), mutates_args=())
    op.register_kernel("cpu", named(name, keyword))
    op.register_fake(named(name, keyword))
    for x in (torch.ones(1), torch.ones(1, requires_grad=True)):
        assert op(x).tolist() == [2]
        assert op(x, **{name: 3.0}).tolist() == [3]
        assert getattr(torch.ops, ns).op(x, **{name: 3.0}).tolist() == [3]
    assert op(torch.ones(1, device="meta"), **{name: 3.0}).is_meta


# Returns --------------------------------------------------------------------------------------------------------


@pytest.mark.parity(4)
def test_table_of_return_types() -> None:
    assert dict(RETURN_TYPES + MORE_RETURN_TYPES) == SUPPORTED_RETURN_TYPES


@pytest.mark.parity(4, 5)
@pytest.mark.parametrize(
    ("hint", "text"),
    [
        (None, "()"),
        (type(None), "()"),
        *RETURN_TYPES,
        *MORE_RETURN_TYPES,
        (Tuple[Tensor, int, float, bool], "(Tensor, SymInt, float, bool)"),
        (tuple[List[Tensor], Tensor], "(Tensor[], Tensor)"),
        (Tuple[Number, list[Tensor]], "(Scalar, Tensor[])"),
        (Tuple[Tensor], "((Tensor))"),
        (Tuple[List[Tensor]], "((Tensor[]))"),
        *((Tuple[hint, hint], f"({text}, {text})") for hint, text in RETURN_TYPES),
    ],
    ids=str,
)
def test_return_type(hint: Any, text: str) -> None:
    fn = annotated(x=Tensor, ret=hint)
    assert infer_schema(fn, mutates_args=()) == f"(Tensor x) -> {text}"


def produced(type_: str) -> list[Any]:
    """Values for a kernel to return."""
    if type_ == "Tensor[]":
        return [[torch.arange(2.0), torch.ones(1)], []]
    return [torch.arange(3)] if type_ == "Tensor" else [v for v in EXAMPLES[type_] if v == v]


@pytest.mark.parity(4)
@pytest.mark.parametrize("hint", SUPPORTED_RETURN_TYPES, ids=str)
def test_value_comes_back(registry: customops.Registry, ns: str, hint: Any) -> None:
    for i, value in enumerate(produced(SUPPORTED_RETURN_TYPES[hint])):

        @registry.custom_op(f"{ns}::one{i}", mutates_args=())
        def one(x: Tensor) -> hint:
            return value  # noqa: B023

        for op in (one, getattr(getattr(torch.ops, ns), f"one{i}")):
            assert exact(op(torch.ones(1))) == exact(value)
            assert exact(op(torch.ones(1, requires_grad=True))) == exact(value)


@pytest.mark.parity(4)
@pytest.mark.parametrize("hint", SUPPORTED_RETURN_TYPES, ids=str)
def test_two_values_come_back(registry: customops.Registry, ns: str, hint: Any) -> None:
    type_ = SUPPORTED_RETURN_TYPES[hint]
    pairs = zip(produced(type_), reversed(produced(type_)), strict=True)
    for i, pair in enumerate(pairs):

        @registry.custom_op(f"{ns}::two{i}", mutates_args=())
        def two(x: Tensor) -> Tuple[hint, hint]:
            return pair  # noqa: B023

        for op in (two, getattr(getattr(torch.ops, ns), f"two{i}")):
            assert exact(op(torch.ones(1))) == exact(pair)


@pytest.mark.parity(4)
def test_nothing_comes_back(registry: customops.Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::fill", mutates_args={"x"})
    def fill(x: Tensor) -> None:
        x.fill_(7)

    x = torch.zeros(2)
    assert fill(x) is None
    assert x.tolist() == [7, 7]


@pytest.mark.parity(5)
def test_one_tuple_comes_back_as_one(registry: customops.Registry, ns: str) -> None:
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


@pytest.mark.parity(5)
def test_one_tuple_is_not_a_tensor(registry: customops.Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::single", mutates_args=())
    def single(x: Tensor) -> Tuple[Tensor]:
        return x * 2

    with pytest.raises(KernelError, match="does not fit the schema"):
        single(torch.ones(2))


# Mutation -------------------------------------------------------------------------------------------------------


def four_kinds(x: Tensor, n: int, z: List[Tensor], w: List[Optional[Tensor]], v: Optional[Tensor]) -> None: ...


@pytest.mark.parity(6)
@pytest.mark.parametrize("nothing", [(), {}, [], set(), frozenset(), iter(())], ids=lambda v: type(v).__name__)
def test_nothing_is_mutated(nothing: Iterable[str]) -> None:
    assert infer_schema(four_kinds, mutates_args=nothing) == (
        "(Tensor x, SymInt n, Tensor[] z, Tensor?[] w, Tensor? v) -> ()"
    )


@pytest.mark.parity(6)
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
def test_mutated_argument_has_the_alias_set_of_its_index(mutates_args: Any, args: str) -> None:
    assert infer_schema(four_kinds, mutates_args=mutates_args) == f"({args}) -> ()"


@pytest.mark.parity(6, 28)
def test_mutates_args_is_read_once() -> None:
    names = (name for name in ("x", "z"))
    assert infer_schema(four_kinds, mutates_args=names) == (
        "(Tensor(a0!) x, SymInt n, Tensor(a2!)[] z, Tensor?[] w, Tensor? v) -> ()"
    )


@pytest.mark.parity(6)
def test_mutated_keyword_only_argument_counts_on() -> None:
    def fn(n: int, *, m: int, out: Tensor) -> None: ...

    assert infer_schema(fn, mutates_args=("out",)) == "(SymInt n, *, SymInt m, Tensor(a2!) out) -> ()"
