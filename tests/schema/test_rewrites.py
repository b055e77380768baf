"""What hints cannot say: each error names the parameter, the place and a rewrite, and each rewrite works."""

# No `from __future__ import annotations` here: hints are objects.

from typing import Any, NamedTuple

import pytest
import torch
from helpers.hint_classes import Config, function

import customops
from customops import infer_schema
from customops.errors import SchemaError


class Case(NamedTuple):
    """A signature that is refused, and one that is suggested."""

    #: The parameters behind ``x: Tensor``, or ``-> `` and the return.
    refused: str
    #: What the error says besides "parameter y has unsupported type" and the hint.
    phrase: str
    #: What its last line says.
    fix: str
    #: The parameters that the fix leads to, "" if `fix` is the same word for word.
    works: str
    #: Arguments of a call, or what the function returns.
    value: str
    #: Source in front of the function that works.
    before: str = ""


def hint(refused: str, shown: str, fix: str, value: str, works: str = "", before: str = "", at: str = "y") -> Case:
    """A type that is refused."""
    return Case(refused, f"parameter {at} has unsupported type {shown}", fix, works, value, before)


def default(
    refused: str, problem: str, fix: str, works: str = "", value: str = "", at: str = "y", before: str = ""
) -> Case:
    return Case(refused, f"parameter {at} has an unsupported default: {problem}", fix, works, value, before)


def returned(refused: str, shown: str, fix: str, value: str, works: str = "", before: str = "", at: str = "") -> Case:
    return Case(f"-> {refused}", f"the return{at} has unsupported type {shown}", fix, works, value, before)


NAMES = 'y: Literal["name", "other"]'
DICT = 'y: Annotated[dict[str, {}], Keys("a", "b")]'
FROZEN = "@dataclass(frozen=True)\nclass {}:\n    block: int\n"
CLASS = "@dataclass(frozen=True)\nclass New:\n    {}"
HINTS = [
    hint("y: dict", "dict", DICT.format("Tensor"), "y={'a': x, 'b': x}"),
    hint("y: dict[str, Tensor]", "dict[str, torch.Tensor]", DICT.format("Tensor"), "y={'a': x, 'b': x}"),
    hint("y: dict[int, float]", "dict[int, float]", DICT.format("float"), "y={'a': 1.0, 'b': 2.0}"),
    hint("y: dict[str, Any]", "dict[str, typing.Any]", DICT.format("Tensor"), "y={'a': x, 'b': x}"),
    hint("y: Mapping[str, int]", "collections.abc.Mapping[str, int]", DICT.format("int"), "y={'a': 1, 'b': 2}"),
    hint("y: collections.OrderedDict[str, int]", "collections.OrderedDict[str, int]", DICT.format("int"),
         "y={'a': 1, 'b': 2}"),
    hint("y: dict[str, set[int]]", "dict[str, set[int]]", DICT.format("list[int]"), "y={'a': [1], 'b': [2]}"),
    hint("y: Optional[dict[str, int]]", "typing.Optional[dict[str, int]]", DICT.format("int") + " | None", "y=None"),
    hint("y: Annotated[dict[str, int], Keys()]", "typing.Annotated[dict[str, int], Keys()]", DICT.format("int"),
         "y={'a': 1, 'b': 2}"),
    hint("y: set", "set", "y: list[Tensor]", "y=[x]"),
    hint("y: set[int]", "set[int]", "y: list[int]", "y=[1]"),
    hint("y: frozenset[float]", "frozenset[float]", "y: list[float]", "y=[1.0]"),
    hint("y: set[set[int]]", "set[set[int]]", "y: list[int], y_counts: list[int]", "y=[1, 2], y_counts=[1, 1]"),
    hint("y: Optional[set[int]]", "typing.Optional[set[int]]", "y: list[int] | None", "y=None"),
    hint("y: Iterable[Tensor]", "collections.abc.Iterable[torch.Tensor]", "y: list[Tensor]", "y=[x]"),
    hint("y: collections.deque", "collections.deque", "y: list[Tensor]", "y=[x]"),
    hint("y: bytes", "bytes", "y: Tensor", "y=torch.frombuffer(bytearray(2), dtype=torch.uint8)"),
    hint("y: list[bytes]", "list[bytes]", "y: list[Tensor]", "y=[torch.frombuffer(bytearray(2), dtype=torch.uint8)]"),
    hint("y: Any", "typing.Any", "y: Tensor", "y=x"),
    hint("y: object", "object", "y: Tensor", "y=x"),
    hint("y: Callable[[Tensor], Tensor]", "collections.abc.Callable[[torch.Tensor], torch.Tensor]", NAMES, "y='name'"),
    hint("y: Callable", "collections.abc.Callable", NAMES, "y='name'"),
    hint("y: type", "type", NAMES, "y='name'"),
    hint("y: type[int]", "type[int]", NAMES, "y='name'"),
    hint("y: np.ndarray", "numpy.ndarray", "y: Tensor", "y=torch.from_numpy(np.ones(1))"),
    hint("y: np.float32", "numpy.float32", "y: float", "y=float(np.float32(1))"),
    hint("y: np.int64", "numpy.int64", "y: int", "y=int(np.int64(1))"),
    hint("y: torch.SymInt", "torch.SymInt", "y: int", "y=1"),
    hint("y: slice", "slice", "y: tuple[int, int, int]", "y=(0, 2, 1)"),
    hint("y: pathlib.Path", "pathlib.Path", "y: str", "y='a'"),
    hint("y: list[list[int]]", "list[list[int]]", "y: list[int], y_counts: list[int]", "y=[1, 2], y_counts=[1, 1]"),
    hint("y: list[list[list[Tensor]]]", "list[list[list[torch.Tensor]]]",
         "y: list[list[Tensor]], y_counts: list[int]", "y=[[x], []], y_counts=[2]"),
    hint("y: list", "list", "y: list[Tensor]", "y=[x]"),
    hint("y: tuple", "tuple", "y: tuple[int, int]", "y=(1, 2)"),
    hint("y: tuple[set[int], int]", "set[int]", "y[0]: list[int]", "y=([1], 2)",
         works="y: tuple[list[int], int]", at="y[0]"),
    hint("y: str | int", "str | int", "y_str: str | None = None, y_int: int | None = None", "y_int=1"),
    hint("y: int | str | None", "int | str | None", "y_int: int | None = None, y_str: str | None = None", "y_str='a'"),
    hint("y: Tensor | str", "torch.Tensor | str", "y_tensor: Tensor | None = None, y_str: str | None = None",
         "y_tensor=x"),
    hint("y: Literal['auto'] | int", "typing.Union[typing.Literal['auto'], int]",
         'y_choice: Literal["auto"] | None = None, y_int: int | None = None', "y_choice='auto'"),
    hint("y: Config | Point", "helpers.hint_classes.Config | helpers.hint_classes.Point",
         "y_config: Config | None = None, y_point: Point | None = None", "y_point=Point(1, x)"),
    hint("y: int | tuple[int, int]", "int | tuple[int, int]", "y: tuple[int, int]", "y=(1, 1)"),
    hint("y: Tensor | list[Tensor]", "torch.Tensor | list[torch.Tensor]", "y: list[Tensor]", "y=[x]"),
    hint("y: Tensor | np.ndarray", "torch.Tensor | numpy.ndarray", "y: Tensor", "y=x"),
    hint("y: Literal[1.5]", "typing.Literal[1.5]", "y: float", "y=1.5"),
    hint("y: Literal[Mode.FAST]", "typing.Literal[<Mode.FAST: 'f'>]", "y: Mode", "y=Mode.FAST"),
    hint("y: torch.qscheme", "torch.qscheme", "schema=", "", works=" "),
    # Classes.
    hint("y: Plain", "helpers.hint_classes.Plain", "@dataclass(frozen=True) above Plain", "y=Plain(1)",
         works="y: Plain", before=FROZEN.format("Plain")),
    hint("y: Runs", "helpers.hint_classes.Runs", "@dataclass(frozen=True) above Runs", "y=Runs(1)", works="y: Runs",
         before=FROZEN.format("Runs")),
    hint("y: Table", "dict[str, int]", 'y.named: Annotated[dict[str, int], Keys("a", "b")]',
         "y=New({'a': 1, 'b': 2})", works="y: New", at="y.named",
         before=CLASS.format('named: Annotated[dict[str, int], Keys("a", "b")]')),
    hint("y: Deep", "dict[str, int]", 'y.inner.named: Annotated[dict[str, int], Keys("a", "b")]',
         "y=New({'a': 1, 'b': 2})", works="y: New", at="y.inner.named",
         before=CLASS.format('named: Annotated[dict[str, int], Keys("a", "b")]')),
    hint("y: Choice", "typing.Union[int, str]",
         "y.block_int: int | None = None, y.block_str: str | None = None", "y=New(1)", works="y: New", at="y.block",
         before=CLASS.format("block_int: int | None = None\n    block_str: str | None = None")),
    Case("y: Mutable", "parameter y: Mutable is a dataclass that can change", "@dataclass(frozen=True) above Mutable",
         "y: Mutable", "y=Mutable(1)", FROZEN.format("Mutable")),
    Case("y: WithInitVar", "parameter y: WithInitVar is not made of its fields alone",
         "seed as a field of WithInitVar", "y: WithInitVar", "y=WithInitVar(1, 2)",
         FROZEN.format("WithInitVar") + "    seed: int = 0"),
    Case("y: Chain", "parameter y.next: Chain holds itself", "leave y.next out of Chain", "y: Chain", "y=Chain(1)",
         FROZEN.format("Chain")),
    Case("y: Tree", "parameter y.leaves: Tree holds itself", "leave y.leaves out of Tree", "y: Tree", "y=Tree(1)",
         FROZEN.format("Tree")),
    hint("y: dict[str, Tree]", "dict[str, helpers.hint_classes.Tree]", "schema=", "", works=" "),
    Case("y: NoneOrAbsent", "parameter y: whether the key 'k' is there could not be told from None",
         "k: Required[int | None]", "y: New", "y={'k': None}",
         "from typing_extensions import TypedDict\nclass New(TypedDict):\n    k: Required[int | None]"),
    Case("y: Optional[Sometimes]", "parameter y: which keys are there could not be told from whether there is a dict",
         "y: Sometimes", "", "y={}"),
    # Forms of parameters.
    Case("*y", "varargs (*y) must have a type annotation", "e.g. *y: torch.Tensor", "*y: torch.Tensor", "x, x"),
    Case("**y", "varkwargs (**y) must have a type", "e.g. **y: Unpack[Options]", "**y: Unpack[Options]", "k=1"),
    Case("y", "parameter y must have a type annotation", "e.g. y: torch.Tensor", "y: torch.Tensor", "x"),
    Case("**y: Tensor", "varkwargs (**y) are not supported", "**y: Unpack[Options]", "", "k=1"),
    Case("**y: Unpack[Config]", "varkwargs (**y) are not supported", "**y: Unpack[Options]", "", "k=1"),
    Case("y: 'Vector'", "Unsupported type annotation Vector. It is not a type.", "import or define the name there",
         "y: 'Vector'", "y=x", "Vector = Tensor"),
    # Annotations of ours.
    Case("y: Annotated[dict[str, int], Keys('a b')]", "parameter y: a key is no name of ASCII letters, digits and _",
         '"a_b"', 'y: Annotated[dict[str, int], Keys("a_b")]', "y={'a_b': 1}"),
    Case("y: Annotated[int, Keys('a')]", "parameter y is annotated with Keys, which is for a dict",
         "leave Keys('a') out", "y: int", "y=1"),
    Case("y: Mut[int]", "parameter y is annotated with Mut, which is for arguments with tensors",
         "y: Mut[Tensor]", "", "y=torch.ones(1)"),
    Case("y: Mut[Config]", "parameter y is annotated with Mut", "leave Mut out", "y: Config", "y=Config(1)"),
    Case("y: Annotated[Tensor, SameAs('x')]", "parameter y: SameAs('x') is for a returned Tensor",
         '-> Annotated[Tensor, SameAs("x")]', '-> Annotated[Tensor, SameAs("x")]', "x.add_(1)"),
    Case("cfg: Config, cfg_block: int", "parameters cfg.block and cfg_block both are cfg_block in the schema",
         "another name for cfg_block", "cfg: Config, block: int", "Config(1), 2"),
    Case("cfg_block: int, cfg: Config", "parameters cfg_block and cfg.block both are cfg_block in the schema",
         "another name for cfg_block", "block: int, cfg: Config", "1, Config(1)"),
]  # fmt: skip

LITERAL = 'y: Literal["a", "b"]'
THREE = "y: tuple[int, int, int] = (1, 2, 3)"
KEPT = "and the value in the kernel"
DEFAULTS = [
    default(f"{LITERAL} = 'c'", "it is not one of 'a', 'b'", f'{LITERAL} = "a"'),
    default("y: Mode = 'FAST'", "it is not one of Mode.FAST, Mode.SLOW", "y: Mode = Mode.FAST"),
    default("y: Mode = 's'", "it is not one of Mode.FAST, Mode.SLOW", "y: Mode = Mode.SLOW"),
    default("y: Mode = Bits.INT4", "it is not one of Mode.FAST, Mode.SLOW", "y: Mode = Mode.FAST"),
    default("y: Bits = 8", "it is not one of Bits.INT4, Bits.INT8", "y: Bits = Bits.INT8"),
    default("y: list[Mode] = ['SLOW']", "it is not a list of one of Mode", "y: list[Mode] = [Mode.SLOW]"),
    default("y: tuple[Mode, ...] = ('SLOW',)", "it is not a tuple of one of", "y: tuple[Mode, ...] = (Mode.SLOW,)"),
    default("y: tuple[int, int] = (1, 2, 3)", "it is not a tuple of 2", THREE),
    default("y: tuple[int, int] = 3", "it is not a tuple of 2", "y: tuple[int, int] = (3, 3)"),
    default("y: tuple[int, float] = (1, 2, 3)", "it is not a tuple of 2", THREE),
    default("y: tuple[int, float] = 1", "it is not a tuple of 2", "y: int = 1"),
    default("y: Config = 3", "it is not Config", "y: Config = Config(block=...)", works="y: Config = Config(block=3)"),
    default("y: Config = Mutable(3)", "it is not Config", "y: Config = Config(block=...)",
            works="y: Config = Config(block=3)"),
    default("y: Outer = Outer(3)", "it is not Config", "y.inner: Config = Config(block=...)", at="y.inner",
            works="y: Outer = Outer(Config(block=3))"),
    default("y: Outer = Outer(None)", "None is not allowed", "y.inner: Config | None = None", at="y.inner",
            works="y: Optional[Config] = None"),
    default("y: Config = Config('x')", "a str cannot be the default of an int", 'y.block: str = "x"', at="y.block",
            works="y: str = 'x'"),
    default("y: Stats = [1, 2]", "it is not Stats", "y: Stats = Stats(out=..., lse=...)", works="y: Stats",
            value="y=Stats(x, x)"),
    default("y: Annotated[dict[str, int], Keys('a')] = {'b': 1}", "it is not a dict with the keys 'a'",
            '= {"a": ...}', works="y: Annotated[dict[str, int], Keys('a')] = {'a': 1}"),
    default("y: list[list[Tensor]] = [3]", "it is not a list of lists of tensors",
            "y: list[list[Tensor]] | None = None"),
    default("y: WithTensor", "a Tensor cannot be the default of a Tensor", f"y.w: Tensor | None = None, {KEPT}",
            works="y: New = New()", at="y.w", before=CLASS.format("w: Tensor | None = None")),
    default("y: WrongDefault", "a str cannot be the default of an int", 'y.block: str = "x"', works="y: str = 'x'",
            at="y.block"),
    default("y: Tensor = torch.ones(1)", "a Tensor cannot be", f"y: Tensor | None = None, {KEPT}",
            works="y: Tensor | None = None"),
    default("y: int = 1.0", "a float cannot be the default of an int", "y: float = 1.0"),
    default("y: int = np.int64(1)", "a int64 cannot be the default of an int", "y: int = 1"),
    default("y: int = 2**63", "the dispatcher's integers have 64 bits", f"y: int | None = None, {KEPT}",
            works="y: int | None = None"),
    default("y: float = 'a'", "a str cannot be the default of a float", 'y: str = "a"'),
    default("y: float = Mode.FAST", "a Mode cannot be the default of a float", "y: Mode = Mode.FAST"),
    default("y: list[int] = 3", "expected a list, got int", "y: list[int] = [3]"),
    default("y: Optional[float] = float('inf')", "schema text cannot hold it", "drop Optional[...] from y",
            works="y: float = float('inf')"),
]  # fmt: skip

RETURNS = [
    returned("Optional[list[Tensor]]", "typing.Optional[list[torch.Tensor]]", "-> list[Tensor]", "[]"),
    returned("Mode", "helpers.hint_classes.Mode", "-> str", "Mode.FAST.name"),
    returned("Bits", "helpers.hint_classes.Bits", "-> int", "int(Bits.INT4)"),
    returned("bytes", "bytes", "-> Tensor", "torch.frombuffer(bytearray(2), dtype=torch.uint8)"),
    returned("set[int]", "set[int]", "-> list[int]", "[1, 2]"),
    returned("list[float]", "list[float]", "-> Tensor", "torch.tensor([1.5])"),
    returned("tuple[float, ...]", "tuple[float, ...]", "-> Tensor", "torch.tensor([1.5])"),
    returned("dict", "dict", '-> Annotated[dict[str, Tensor], Keys("a", "b")]', "{'a': x + 1, 'b': x + 2}"),
    returned("dict[str, Tensor]", "dict[str, torch.Tensor]", '-> Annotated[dict[str, Tensor], Keys("a", "b")]',
             "{'a': x + 1, 'b': x + 2}"),
    returned("Any", "typing.Any", "-> Tensor", "x + 1"),
    returned("np.ndarray", "numpy.ndarray", "-> Tensor", "torch.from_numpy(np.ones(1))"),
    returned("complex", "complex", "-> torch.types.Number", "1j"),
    returned("torch.dtype", "torch.dtype", "-> str", "str(torch.half)"),
    returned("Literal['a']", "typing.Literal['a']", "-> str", "'a'"),
    returned("Callable", "collections.abc.Callable", "-> str", "'a'"),
    returned("float | Tensor", "float | torch.Tensor", "-> Tensor", "x + 1"),
    returned("Tensor | list[Tensor]", "torch.Tensor | list[torch.Tensor]", "-> list[Tensor]", "[x + 1]"),
    returned("Iterable[Tensor]", "collections.abc.Iterable[torch.Tensor]", "-> list[Tensor]", "[x + 1]"),
    returned("tuple", "tuple", "-> tuple[Tensor, Tensor]", "(x + 1, x + 2)"),
    returned("tuple[Mode, Tensor]", "helpers.hint_classes.Mode", "[0]: str", "('FAST', x + 1)",
             works="-> tuple[str, Tensor]", at="[0]"),
    returned("Config", "helpers.hint_classes.Mode", "mode: str", "New('FAST')", works="-> New", at=".mode",
             before=CLASS.format("mode: str")),
    returned("Plain", "helpers.hint_classes.Plain", "@dataclass(frozen=True) above Plain", "Plain(1)",
             works="-> Plain", before=FROZEN.format("Plain")),
    Case("-> Mut[Tensor]", "the return is annotated with Mut", "-> Tensor", "", "x + 1"),
    Case("-> Annotated[int, SameAs('x')]", "the return: SameAs('x') is for a returned Tensor",
         '-> Annotated[Tensor, SameAs("x")]', "", "x.add_(1)"),
    Case("-> Annotated[Tensor, SameAs('x')]", "SameAs is for an op that returns all that it writes, and nothing else",
         '-> Annotated[Tensor, SameAs("x")]', "", "x.add_(1)"),
    Case("-> Annotated[Tensor, SameAs('z')]", "SameAs is for an op that returns all that it writes, and nothing else",
         '-> Annotated[Tensor, SameAs("x")]', "", "x.add_(1)"),
]  # fmt: skip


def source(signature: str, value: str, before: str = "", x: str = "Tensor") -> str:
    """The source of a function with these parameters, or this return, from its second line on."""
    if signature.startswith("-> "):
        return f"{before}\ndef f(x: {x}) {signature}:\n    return {value}\n"
    return f"{before}\ndef f(x: Tensor, {signature.strip()}) -> Tensor:\n    return x.clone()\n"


def refusal(case: Case) -> str:
    with pytest.raises(SchemaError) as caught:
        infer_schema(function(source(case.refused, case.value)))
    return str(caught.value)


@pytest.mark.parity(10, 11)
@pytest.mark.parametrize("case", [*HINTS, *DEFAULTS, *RETURNS], ids=lambda case: case.refused)
def test_refusal(case: Case) -> None:
    message = refusal(case)
    lines = message.splitlines()
    assert lines[0].startswith(f"f: {case.phrase}")
    assert "  at:       f (user.py:2)" in lines
    assert lines[-1].startswith("  fix:      ")
    assert case.fix in lines[-1]
    assert len(lines) <= 6
    assert max(map(len, lines)) < 250


@pytest.mark.parametrize(
    "hint", ["list[Config]", "list[Optional[int]]", "torch.nn.Linear", "np.dtype", "T", "3", "Box[int]"]
)
@pytest.mark.parametrize("is_return", [False, True])
def test_without_a_near_type_the_supported_ones_are_named(hint: str, is_return: bool) -> None:
    message = refusal(Case(f"-> {hint}" if is_return else f"y: {hint}", "", "", "", ""))
    assert " has unsupported type " in message
    fix = message.splitlines()[-1]
    assert fix.startswith("  fix:      use Tensor, ")
    assert "schema=" in fix


@pytest.mark.parametrize("case", [*HINTS, *DEFAULTS, *RETURNS], ids=lambda case: case.refused)
def test_rewrite(registry: customops.Registry, ns: str, case: Case) -> None:
    works = case.works or case.fix
    fn = function(source(works, case.value, case.before, "Mut[Tensor]" if "SameAs" in works else "Tensor"))
    names = fn.__globals__ | {"x": torch.ones(2)}
    op = registry.custom_op(f"{ns}::f", fn)
    if works.startswith("->"):
        result = op(names["x"])
        assert type(result) is type(eval(case.value, names))
    else:
        args, kwargs = eval(f"(lambda *args, **kwargs: (args, kwargs))({case.value})", names)
        assert torch.equal(op(names["x"], *args, **kwargs), names["x"])


X, Y = "x: Mut[Tensor]", "y: Mut[Tensor]"


@pytest.mark.parametrize(
    ("refused", "mutates_args", "phrase", "fix", "works", "then"),
    [
        (f"{X}, y: Tensor", ("y",), "mutates_args and the annotations disagree on whether x is written",
         "leave mutates_args out", f"{X}, y: Tensor", None),
        (f"{X}, y: Tensor", (), "mutates_args and the annotations disagree on whether x is written",
         "leave mutates_args out", f"{X}, y: Tensor", None),
        ("x: Tensor, y: Tensor", ("z",), "{'z'} in mutates_args were not found among the parameters",
         "mutates_args=('x',)", "x: Tensor, y: Tensor", ("x",)),
        ("x: int, y: int", ("z",), "{'z'} in mutates_args were not found among the parameters",
         "mutates_args=()", "x: Tensor, y: Tensor", ()),
        ("x: Tensor, y: Config", ("y.block",), "{'y.block'} in mutates_args were not found among the parameters",
         "mutates_args=('x',)", "x: Tensor, y: Config", ("x",)),
        ("x: Tensor, y: Config", ("y",), "parameter y is in mutates_args, but only Tensors or collections of Tensors",
         "leave y out of mutates_args", "x: Tensor, y: Config", ()),
        ("x: Tensor, y: Tensor", "x", "mutates_args must be an iterable of names or the string 'unknown', not 'x'",
         "mutates_args=('x',)", "x: Tensor, y: Tensor", ("x",)),
    ],
)  # fmt: skip
def test_what_is_written(
    registry: customops.Registry, ns: str, refused: str, mutates_args: Any, phrase: str, fix: str, works: str, then: Any
) -> None:
    with pytest.raises(SchemaError) as caught:
        infer_schema(function(f"\ndef f({refused}) -> None: ..."), mutates_args=mutates_args)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(f"f: {phrase}")
    assert fix in lines[-1]
    assert "  at:       f (user.py:2)" in lines
    op = registry.custom_op(f"{ns}::f", function(f"def f({works}) -> None: ..."), mutates_args=then)
    x = torch.ones(1)
    op(x, Config(1) if "Config" in works else x.clone())


ALL = "SameAs is for an op that returns all that it writes, and nothing else"
ITS_FIRST = "SameAs is for an op that writes to its first argument alone, or to keyword-only ones"
SAME_X, SAME_Y = 'Annotated[Tensor, SameAs("x")]', 'Annotated[Tensor, SameAs("y")]'


@pytest.mark.parametrize(
    ("parameters", "refused", "phrase", "fix", "works", "result"),
    [
        (f"{X}, {Y}", SAME_X, ALL, "-> None", "None", "None"),
        (f"*, {X}, {Y}", SAME_Y, ALL, f"-> tuple[{SAME_X}, {SAME_Y}]", f"tuple[{SAME_X}, {SAME_Y}]", "x, y"),
        (f"{X}, y: Tensor", SAME_Y, ALL, f"-> {SAME_X}", SAME_X, "x"),
        (f"{X}, y: Tensor", f"tuple[{SAME_X}, Tensor]", ALL, "return only what is new", "Tensor", "x + 1"),
        (f"{X}, {Y}", f"tuple[{SAME_X}, {SAME_Y}]", ITS_FIRST, "-> None", "None", "None"),
        (f"x: Tensor, {Y}", SAME_Y, ITS_FIRST, "-> None", "None", "None"),
    ],
)  # fmt: skip
def test_same_as(
    registry: customops.Registry, ns: str, parameters: str, refused: str, phrase: str, fix: str, works: str, result: str
) -> None:
    with pytest.raises(SchemaError) as caught:
        infer_schema(function(f"\ndef f({parameters}) -> {refused}: ..."))
    lines = str(caught.value).splitlines()
    assert lines[0] == f"f: {phrase}"
    assert "  at:       f (user.py:2)" in lines
    assert lines[-1].startswith(f"  fix:      {fix}")
    op = registry.custom_op(f"{ns}::f", function(f"def f({parameters}) -> {works}: return {result}"))
    op(x=torch.ones(1), y=torch.ones(1))
