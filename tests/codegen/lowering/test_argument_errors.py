"""Arguments with values that the signature does not allow: named by path, with the choices, before any kernel runs."""

# No `from __future__ import annotations` here: hints are objects.

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Optional, Union

import pytest
import torch
from helpers.hint_classes import Bits, Config, Mode, Mutable, Outer, Point
from torch import Tensor
from typing_extensions import NotRequired, TypedDict

import customops
from customops import Registry
from customops._schema.annotations import Keys
from customops.errors import ArgumentError

NOT_ALLOWED = "an argument has a value that the signature does not allow"
X = torch.ones(1)


class Sizes(TypedDict):
    k: int
    j: NotRequired[float]


@dataclass
class Taken:
    """An op with a parameter of each kind, and how often one of its kernels ran."""

    op: Any
    packet: Any
    runs: list[str]

    @classmethod
    def define(cls, registry: Registry, ns: str) -> "Taken":
        runs: list[str] = []

        @registry.custom_op(f"{ns}::take")
        def take(
            x: Tensor,
            kind: Literal["a", "b"] = "a",
            count: Literal[1, 2, None] = 1,
            window: tuple[int, int] = (1, 1),
            point: Optional[Point] = None,
            cfg: Config = Config(1),  # noqa: B008
            *,
            mode: Mode = Mode.FAST,
            bits: Bits = Bits.INT4,
            modes: list[Mode] = [Mode.FAST],  # noqa: B006
            sizes: Sizes = {"k": 1},  # noqa: B006
            named: Optional[Annotated[dict[str, int], Keys("a", "b")]] = None,
            outer: Optional[Outer] = None,
            cap: Union[float, Tensor] = 1.0,
            device: Union[torch.device, str] = "cpu",
            mixed: tuple[int, float] = (1, 2.0),
            nested: Optional[list[list[Tensor]]] = None,
            dtype: torch.dtype = torch.half,
        ) -> Tensor:
            runs.append("kernel")
            return x.clone()

        @take.register_fake
        def _(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            runs.append("fake")
            return torch.empty_like(x)

        return cls(take, getattr(torch.ops, ns).take, runs)


@pytest.fixture
def taken(registry: Registry, ns: str) -> Taken:
    return Taken.define(registry, ns)


FAST_OR_SLOW = "one of Mode.FAST, Mode.SLOW"
#: argument, value, path, expected, got
WRONG: list[tuple[str, Any, str, str, str]] = [
    ("kind", "c", "kind", "one of 'a', 'b'", "'c'"),
    ("kind", None, "kind", "one of 'a', 'b'", "None"),
    ("kind", ["a"], "kind", "one of 'a', 'b'", "['a']"),
    ("count", 3, "count", "one of 1, 2, or None", "3"),
    ("count", True, "count", "one of 1, 2, or None", "True"),
    ("count", 1.0, "count", "one of 1, 2, or None", "1.0"),
    ("window", (1, 2, 3), "window", "a tuple of 2", "(1, 2, 3)"),
    ("window", 3, "window", "a tuple of 2", "3"),
    ("window", None, "window", "a tuple of 2", "None"),
    ("mixed", (1, 2.0, 3), "mixed", "a tuple of 2", "(1, 2.0, 3)"),
    ("point", [1, X], "point", "Point, or None", "[1, tensor([1.])]"),
    ("point", (1,), "point", "Point, or None", "(1,)"),
    ("point", Point(None, X), "point.a", "int", "None"),  # type: ignore[arg-type]
    ("cfg", 3, "cfg", "Config", "3"),
    ("cfg", None, "cfg", "Config", "None"),
    ("cfg", Mutable(3), "cfg", "Config", "Mutable(block=3)"),
    ("cfg", {"block": 3}, "cfg", "Config", "{'block': 3}"),
    ("cfg", Config(1, "FAST"), "cfg.mode", FAST_OR_SLOW, "'FAST'"),  # type: ignore[arg-type]
    ("mode", "FAST", "mode", FAST_OR_SLOW, "'FAST'"),
    ("mode", Bits.INT4, "mode", FAST_OR_SLOW, "<Bits.INT4: 4>"),
    ("bits", 4, "bits", "one of Bits.INT4, Bits.INT8", "4"),
    ("modes", ["FAST"], "modes", f"a list of {FAST_OR_SLOW}", "['FAST']"),
    ("modes", Mode.FAST, "modes", f"a list of {FAST_OR_SLOW}", "<Mode.FAST: 'f'>"),
    ("modes", [None], "modes", f"a list of {FAST_OR_SLOW}", "[None]"),
    ("sizes", {}, "sizes", "a dict with the keys 'k', and maybe 'j'", "{}"),
    ("sizes", {"k": 1, "z": 2}, "sizes", "a dict with the keys 'k', and maybe 'j'", "{'k': 1, 'z': 2}"),
    ("sizes", {"k": 1, "j": None}, "sizes", "a dict with the keys 'k', and maybe 'j'", "{'k': 1, 'j': None}"),
    ("named", {"a": 1}, "named", "a dict with the keys 'a', 'b', or None", "{'a': 1}"),
    ("named", [1, 2], "named", "a dict with the keys 'a', 'b', or None", "[1, 2]"),
    ("named", {"a": 1, "b": None}, "named['b']", "int", "None"),
    ("outer", 3, "outer", "Outer, or None", "3"),
    ("outer", Outer(3), "outer.inner", "Config", "3"),  # type: ignore[arg-type]
    ("outer", Outer(Config(1, "z")), "outer.inner.mode", FAST_OR_SLOW, "'z'"),  # type: ignore[arg-type]
    ("outer", Outer(Config(None)), "outer.inner.block", "int", "None"),  # type: ignore[arg-type]
    ("cap", None, "cap", "a Tensor or a number", "None"),
    ("device", 3.5, "device", "a torch.device, or the name of one", "3.5"),
    ("nested", [X], "nested", "a list of lists of tensors, or None", "[tensor([1.])]"),
    ("nested", X, "nested", "a list of lists of tensors, or None", "tensor([1.])"),
]
#: Of types that the dispatcher has: it is the judge.
WRONG_FOR_THE_DISPATCHER: list[tuple[str, Any, str, str, str]] = [
    ("window", ("a", "b"), "window", "tuple[int, int]", "('a', 'b')"),
    ("point", Point("a", X), "point.a", "int", "'a'"),  # type: ignore[arg-type]
    ("cfg", Config("a"), "cfg.block", "int", "'a'"),  # type: ignore[arg-type]
    ("sizes", {"k": "a"}, "sizes['k']", "int", "'a'"),
    ("outer", Outer(Config(1), "z"), "outer.scale", "float", "'z'"),  # type: ignore[arg-type]
    ("cap", "a", "cap", "float | Tensor", "'a'"),
    ("mixed", ("a", 2.0), "mixed[0]", "int", "'a'"),
    ("nested", [[1]], "nested", "list[list[Tensor]] | None", "[1]"),
    ("dtype", "half", "dtype", "torch.dtype", "'half'"),
]


def shown(op: str, path: str, expected: str, got: str, problem: str = NOT_ALLOWED) -> str:
    return f"{op}: {problem}\n  argument: {path}\n  expected: {expected}\n  got:      {got}"


def raised(call: Callable[[], Any]) -> ArgumentError:
    with pytest.raises(ArgumentError) as caught:
        call()
    return caught.value


@pytest.mark.parametrize(("name", "value", "path", "expected", "got"), [*WRONG, *WRONG_FOR_THE_DISPATCHER])
def test_call(taken: Taken, name: str, value: Any, path: str, expected: str, got: str) -> None:
    error = raised(lambda: taken.op(X, **{name: value}))
    assert str(error).startswith(shown(taken.op._qualname, path, expected, got))
    assert error.fix
    assert (error.argument, error.expected, error.got) == (path, expected, got)
    assert isinstance(error, (ValueError, RuntimeError))
    assert taken.runs == []


@pytest.mark.parametrize(("name", "value", "path", "expected", "got"), WRONG)
def test_lower(taken: Taken, name: str, value: Any, path: str, expected: str, got: str) -> None:
    """The dispatcher is not asked."""
    assert raised(lambda: taken.op.lower(X, **{name: value})).argument == path


def test_values_that_are_right(taken: Taken) -> None:
    taken.op(X, "b", None, [3, 4], (1, X), Config(2, Mode.SLOW), cap=X, device=torch.device("cpu"), mixed=[1, 2.0])
    taken.op(X, sizes={"k": 1, "j": 2.0}, named={"b": 1, "a": 2}, outer=Outer(Config(1)), nested=[[X], (), [X, X]])
    assert taken.runs == ["kernel"] * 2


def test_wrong_keywords_are_those_of_a_function(taken: Taken) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'cfg_block'"):
        taken.op(X, cfg_block=3)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        taken.op()


def test_many_choices_are_not_all_shown(registry: Registry, ns: str) -> None:
    many = Literal.__getitem__(tuple(range(100)))

    @registry.custom_op(f"{ns}::f")
    def f(x: Tensor, n: many) -> Tensor:  # type: ignore[valid-type]
        return x.clone()

    assert raised(lambda: f(X, 100)).expected == f"one of {', '.join(map(str, range(16)))} and 84 more"
    assert f(X, 99).item() == 1


# Calls through torch.ops ----------------------------------------------------------------------------------------

LISTS = "the lengths of the lists do not add up to the number of items"
ONE_OF = "not one of the values that are allowed"


@pytest.mark.parametrize(
    ("given", "problem", "path", "expected", "got"),
    [
        ({"kind": "z"}, ONE_OF, "kind", "one of 'a', 'b'", "'z'"),
        ({"mode": "NOPE"}, ONE_OF, "mode", "one of 'FAST', 'SLOW'", "'NOPE'"),
        ({"mode": "f"}, ONE_OF, "mode", "one of 'FAST', 'SLOW'", "'f'"),
        ({"bits": 99}, ONE_OF, "bits", "one of 4, 8", "99"),
        ({"modes": ["FAST", "NOPE"]}, ONE_OF, "modes", "one of 'FAST', 'SLOW'", "'NOPE'"),
        ({"cfg_mode": "NOPE"}, ONE_OF, "cfg.mode", "one of 'FAST', 'SLOW'", "'NOPE'"),
        ({"window": [1, 2, 3]}, "the length is wrong", "window", "2 items", "[1, 2, 3]"),
        ({"point_given": True}, NOT_ALLOWED, "point.a", "int", "None"),
        ({"point_given": True, "point_a": 1}, NOT_ALLOWED, "point.t", "Tensor", "None"),
        ({"named_given": True, "named_a": 1}, NOT_ALLOWED, "named['b']", "int", "None"),
        ({"cap_number": None}, NOT_ALLOWED, "cap", "a Tensor or a number", "None"),
        ({"nested": [X]}, LISTS, "nested", "lengths that add up to 1", "None"),
        ({"nested": [X, X], "nested_lengths": [1]}, LISTS, "nested", "lengths that add up to 2", "[1]"),
        ({"nested": [X], "nested_lengths": [-1, 2]}, LISTS, "nested", "lengths that add up to 1", "[-1, 2]"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_lowered_values(
    taken: Taken, device: str, given: dict[str, Any], problem: str, path: str, expected: str, got: str
) -> None:
    error = raised(lambda: taken.packet(X.to(device), **given))
    assert str(error).startswith(shown(taken.op._qualname, path, expected, got, problem))
    assert taken.runs == []


# Compilers ------------------------------------------------------------------------------------------------------

COMPILED = [case for case in WRONG if case[0] in ("kind", "mode", "window", "cfg", "named", "outer", "cap")]


@pytest.mark.compile
@pytest.mark.parametrize(("name", "value", "path", "expected", "got"), COMPILED)
def test_compiled(taken: Taken, name: str, value: Any, path: str, expected: str, got: str) -> None:
    """The call is not compiled, and raises as in eager mode; of what must be one graph, the compiler says the same."""

    def call(x: Tensor) -> Any:
        return taken.op(x + 1, **{name: value})

    error = raised(lambda: torch.compile(call, backend="eager")(X))
    assert (error.argument, error.expected, error.got) == (path, expected, got)
    torch.compiler.reset()  # else it knows that the call is not compiled
    error = raised(lambda: torch.compile(call, backend="eager", fullgraph=True)(X))
    assert (error.argument, error.expected) == (path, expected)
    assert error.where is not None
    assert error.where.startswith("call (")
    assert taken.runs == []


@pytest.mark.compile
def test_compiled_for_values_of_which_only_some_are_right(taken: Taken) -> None:
    """A value that changes from call to call is checked in each."""
    compiled = torch.compile(lambda x, mode: taken.op(x, mode=mode) + 1, backend="eager")
    assert compiled(X, Mode.FAST).item() == 2
    assert raised(lambda: compiled(X, "FAST")).argument == "mode"
    assert compiled(X, Mode.SLOW).item() == 2


def test_results_are_no_arguments(registry: Registry, ns: str) -> None:
    """What a kernel returns is the kernel's fault."""

    @registry.custom_op(f"{ns}::f")
    def f(x: Tensor) -> Point:
        return 3  # type: ignore[return-value]

    with pytest.raises(customops.errors.KernelError, match="does not fit the signature") as caught:
        f(X)
    assert (caught.value.expected, caught.value.got) == ("Point", "int")
