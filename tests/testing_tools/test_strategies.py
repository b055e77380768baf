"""Strategies for the arguments of ops: all that a signature allows is drawn, and nothing else."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.signatures import FUNCTIONS, Access, Bits, Epilogue, Mode
from hypothesis import HealthCheck, Phase, find, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor

import customops
from customops.checks import opcheck
from customops.errors import ArgumentError, UnsupportedError
from customops.testing.strategies import LAYOUTS, arguments, tensors

#: Nothing is remembered from one run to the next, and each run draws the same.
QUIET = settings(
    database=None, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck), report_multiple_bugs=False
)

BY_NAME = {fn.__name__: fn for fn in FUNCTIONS}

Op = Callable[[str], Any]


@pytest.fixture
def op(registry: customops.Registry, ns: str) -> Op:
    """Makes an op of one of the functions, by its name."""

    def make(name: str) -> Any:
        return registry.custom_op(f"{ns}::{name}", BY_NAME[name])

    return make


def draws(strategy: st.SearchStrategy[Any], count: int = 25) -> list[Any]:
    drawn = []

    @settings(QUIET, max_examples=count, phases=[Phase.generate])
    @given(strategy)
    def draw(value: Any) -> None:
        drawn.append(value)

    draw()
    return drawn


def simplest(strategy: st.SearchStrategy[Any]) -> Any:
    return draws(strategy, 1)[0]


def shrunk(strategy: st.SearchStrategy[Any], condition: Callable[[Any], bool]) -> Any:
    return find(strategy, condition, settings=QUIET)


def tensors_of(sample: customops.Sample) -> list[Tensor]:
    values = [*sample.args, *sample.kwargs.values()]
    lists = [value if isinstance(value, list) else [value] for value in values]
    return [value for values in lists for value in values if isinstance(value, Tensor)]


# All that there is ---------------------------------------------------------------------------------------------------


def the(name: str, place: int) -> Callable[[customops.Sample], Any]:
    """What a sample has for a parameter; "left out" if it has nothing."""

    def get(sample: customops.Sample) -> Any:
        return sample.args[place] if len(sample.args) > place else sample.kwargs.get(name, "left out")

    return get


def kinds_of(get: Callable[[customops.Sample], Any]) -> Callable[[customops.Sample], Any]:
    return lambda sample: type(get(sample)).__name__


def config(field: str) -> Callable[[customops.Sample], Any]:
    return lambda sample: getattr(the("config", 1)(sample), field)


def kind_of_cache(cache: Any) -> str:
    if cache is None:
        return "none"
    access = "None" if cache.access is None else "Access"
    return access if cache.extras is None else f"{access} with extras"


#: Op -> what to look at in each sample, and all that is to be seen there.
SEEN: dict[str, list[tuple[Callable[[customops.Sample], Any], set[Any]]]] = {
    "enums": [
        (the("mode", 1), set(Mode)),
        (the("bits", 2), {*Bits, "left out"}),
        (the("maybe", 3), {*Mode, None, "left out"}),
    ],
    "flags": [(the("epilogue", 1), {Epilogue(i) for i in range(8)})],
    "literals": [
        (the("kind", 1), {"a", "b", None}),
        (the("n", 2), {1, 2, "left out"}),
        (lambda s: repr(the("m", 3)(s)), {"3", "'3'", "True", "'left out'"}),
    ],
    "numbers": [
        (kinds_of(the("n", 2)), {"int", "float"}),
        (kinds_of(the("either", 3)), {"float", "Tensor"}),
        (kinds_of(the("maybe", 4)), {"int", "Tensor", "NoneType", "str"}),
    ],
    "optionals": [
        (kinds_of(the("x", 0)), {"Tensor", "NoneType"}),
        (kinds_of(the("by", 2)), {"float", "NoneType", "str"}),
        (kinds_of(the("inf", 3)), {"float", "str"}),
    ],
    "lists": [(lambda s: len(the("names", 4)(s)), {0, 1, 2, 3})],
    "tensor_lists": [
        (lambda s: len(the("xs", 1)(s)), {0, 1, 2, 3}),
        (lambda s: {type(x) for x in the("maybe", 2)(s)} >= {Tensor, type(None)}, {True, False}),
        (kinds_of(the("none", 3)), {"list", "NoneType"}),
    ],
    "only_lists": [(lambda s: len(the("xs", 0)(s)), {1, 2, 3})],
    "nested": [
        (lambda s: len(the("parts", 1)(s)), {0, 1, 2, 3}),
        (kinds_of(the("maybe", 2)), {"list", "NoneType", "str"}),
    ],
    "typed_dicts": [
        (lambda s: "-".join(the("extras", 1)(s)), {"bias", "bias-eps", "bias-mask", "bias-eps-mask"}),
    ],
    "by_keyword": [(lambda s: "-".join(sorted({*s.kwargs} - {"x"})), {"", "eps", "mode", "eps-mode"})],
    "variadic": [(lambda s: max(0, len(s.args) - 2), {0, 1, 2, 3})],
    "positional": [
        (lambda s: (len(s.args), "y" in s.kwargs), {(1, False), (1, True), (2, False), (2, True), (3, False)}),
    ],
    "plain": [
        (lambda s: len(s.args), {0, 1, 2, 3}),
        (kinds_of(the("by", 2)), {"float", "str"}),
        (the("flag", 4), {True, False, "left out"}),
    ],
    "configs": [
        (lambda s: config("mode")(s), set(Mode)),
        (lambda s: config("tile")(s).columns == 5, {True, False}),
        (lambda s: config("weight")(s) is None, {True, False}),
        (lambda s: config("tile2")(s) is None, {True, False}),
        (kinds_of(the("other", 2)), {"Config", "NoneType", "str"}),
    ],
    "named_tuples": [(lambda s: getattr(the("maybe", 1)(s), "kind", None), {"a", "b", None})],
    "deep": [
        (
            lambda s: kind_of_cache(the("setup", 1)(s).cache),
            {"none", "None", "Access", "None with extras", "Access with extras"},
        ),
        (lambda s: the("setup", 1)(s).sizes == (1, 2), {True, False}),
        (kinds_of(the("parts", 2)), {"dict", "NoneType", "str"}),
    ],
    "unnamed": [(kinds_of(the("u", 2)), {"tuple", "NoneType", "str"})],
    "modes": [
        (lambda s: set(s.args[1:]) == set(Mode), {True, False}),
        (lambda s: s.kwargs.get("access", "left out"), {Access(i) for i in range(4)} | {"left out"}),
    ],
    "devices": [(kinds_of(the("device", 1)), {"str", "device"})],
    "generators": [(kinds_of(the("generator", 1)), {"Generator", "NoneType"})],
}


@pytest.mark.parametrize("name", BY_NAME)
def test_all_that_a_signature_allows_is_drawn_and_nothing_else(name: str, op: Op) -> None:
    made = op(name)
    samples = draws(arguments(made), 80 if name in SEEN else 20)
    for sample in samples:
        assert isinstance(sample, customops.Sample)
        made.lower(*sample.args, **sample.kwargs)
        made(*sample.args, **sample.kwargs)  # where the function looks at what it is given
    for get, expected in SEEN.get(name, ()):
        assert {get(sample) for sample in samples} == expected


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_drawn(layout: Any) -> None:
    tensor = simplest(tensors((2, 3), layouts=[layout]))
    strides = {"contiguous": (3, 1), "transposed": (1, 2), "sliced": (7, 2), "expanded": (0, 1)}
    assert tensor.shape == (2, 3)
    assert tensor.stride() == strides[layout] or (layout, tensor.stride()) == ("expanded", (1, 0))
    assert any(each.stride() == tensor.stride() for each in draws(tensors((2, 3)), 100))


def test_shapes_and_values_of_tensors() -> None:
    drawn = draws(tensors(dtypes=[torch.float32, torch.bool, torch.complex64, torch.uint8, torch.bfloat16]), 200)
    assert {each.dim() for each in drawn} == {0, 1, 2, 3}
    assert {each.dtype for each in drawn} == {
        torch.float32, torch.bool, torch.complex64, torch.uint8, torch.bfloat16
    }  # fmt: skip
    assert any(each.numel() == 0 for each in drawn)
    assert all(each.isfinite().all() for each in drawn)
    assert all(max(each.shape, default=0) <= 3 for each in drawn)
    assert {each.shape for each in draws(tensors((5, 20)), 3)} == {(5, 20)}


# Other ops -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "enums", "configs", "flags", "typed_dicts", "by_keyword"])
def test_the_lowered_form_has_lowered_arguments(name: str, op: Op) -> None:
    overload = op(name)._opoverload
    for sample in draws(arguments(overload), 30):
        overload(*sample.args, **sample.kwargs)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("aten::add.Tensor", {}),
        ("aten::where.self", {"dtypes": {"condition": torch.bool}}),
        ("aten::mul.out", {"broadcast": True, "requires_grad": True}),
        ("aten::lerp_.Scalar", {"requires_grad": True}),
        ("aten::stack", {"dim": st.just(0)}),
        ("aten::zeros", {"size": st.lists(st.integers(0, 3))}),
        ("aten::rand.generator", {"size": st.just([2]), "dtype": st.just(torch.float32)}),
        ("aten::clone", {}),
        ("aten::clamp.Tensor", {"min": tensors((), torch.float32)}),
        ("aten::mm", {"dtypes": torch.float64, "shapes": {"self": (2, 3), "mat2": [(3, 1), (3, 4)]}}),
    ],
)
def test_ops_of_torch(name: str, options: dict[str, Any]) -> None:
    overload = customops.adopt(name)._opoverload
    for sample in draws(arguments(overload, **options), 30):
        overload(*sample.args, **sample.kwargs)


def test_ops_of_torch_library(lib: torch.library.Library, ns: str) -> None:
    lib.define("f(Tensor x, int n=2, float? inf=None, *, str[]? names=None, Tensor?[]? maybe=None) -> Tensor")
    lib.impl("f", lambda x, *_args, **_kwargs: x.clone(), "CPU")
    packet = getattr(torch.ops, ns).f
    for which in (packet, packet.default, f"{ns}::f", customops.adopt(packet)):
        for sample in draws(arguments(which), 15):
            packet(*sample.args, **sample.kwargs)
    customops.default_registry.clear()


def test_every_draw_can_be_repeated(op: Op) -> None:
    strategy = arguments(op("configs"), requires_grad=st.booleans())
    first, second = repeatable(strategy), repeatable(strategy)
    assert first == second
    assert len(set(first)) > 10


def repeatable(strategy: st.SearchStrategy[Any]) -> list[str]:
    drawn: list[str] = []
    test = given(strategy)(lambda sample: drawn.append(str(sample)))
    seed(7)(settings(QUIET, derandomize=False, max_examples=20)(test))()
    return drawn


# Options -------------------------------------------------------------------------------------------------------------


def test_tensors_of_a_draw_share_shape_and_dtype(op: Op) -> None:
    for sample in draws(arguments(op("writes"))):
        assert len({(each.shape, each.dtype) for each in tensors_of(sample)}) == 1


def test_what_is_written_is_not_expanded_and_needs_no_gradient(op: Op) -> None:
    for sample in draws(arguments(op("writes"), shapes=(3,), requires_grad=True)):
        x, y, caches = (the(*each)(sample) for each in (("x", 0), ("y", 1), ("caches", 2)))
        assert all(each.stride() != (0,) and not each.requires_grad for each in (x, *caches))
        assert y.requires_grad


def drawn_shapes(strategy: st.SearchStrategy[Any], count: int = 25) -> set[tuple[Any, ...]]:
    return {(tuple(the("x", 0)(s).shape), tuple(the("by", 1)(s).shape)) for s in draws(strategy, count)}


@pytest.fixture
def two(registry: customops.Registry, ns: str) -> Any:
    """An op of two tensors."""

    @registry.custom_op(f"{ns}::two")
    def two(x: Tensor, by: Tensor, device: int = 0) -> Tensor:
        return x * by

    return two


def test_shapes(two: Any) -> None:
    assert drawn_shapes(arguments(two, shapes=(2,))) == {((2,), (2,))}
    assert drawn_shapes(arguments(two, shapes=())) == {((), ())}
    assert drawn_shapes(arguments(two, shapes=[(1,), (2, 2)])) == {((1,), (1,)), ((2, 2), (2, 2))}
    assert drawn_shapes(arguments(two, shapes={"x": (4,), "by": [(1,), ()]})) == {((4,), (1,)), ((4,), ())}
    sizes = st.integers(1, 2).map(lambda n: {"x": (n, 3), "by": (n, 1)})
    assert drawn_shapes(arguments(two, shapes=sizes)) == {((1, 3), (1, 1)), ((2, 3), (2, 1))}
    broadcast = drawn_shapes(arguments(two, shapes=(2, 3), broadcast=True), 80)
    assert broadcast == {((2, 3), each) for each in [(2, 3), (1, 3), (2, 1), (1, 1), (3,), (1,), ()]}


def test_dtypes_gradients_elements_and_devices(two: Any) -> None:
    def one(**options: Any) -> list[Tensor]:
        return tensors_of(simplest(arguments(two, **options)))

    assert [each.dtype for each in one(dtypes=torch.int8)] == [torch.int8, torch.int8]
    assert one(dtypes={"by": torch.bool})[1].dtype == torch.bool
    assert [each.requires_grad for each in one(requires_grad=True)] == [True, True]
    assert [each.requires_grad for each in one(requires_grad={"by": True})] == [False, True]
    assert not one(requires_grad=True, dtypes=torch.int64)[0].requires_grad
    assert one(elements=st.just(7.0), shapes=(2,))[0].tolist() == [7.0, 7.0]
    assert all(each.is_contiguous() for s in draws(arguments(two, layouts=["contiguous"])) for each in tensors_of(s))
    assert one(device="meta")[0].is_meta
    assert {s.args[1] for s in draws(arguments(customops.adopt("aten::to.device"), device="meta")) if len(s.args) > 1} \
        == {torch.device("meta")}  # fmt: skip
    customops.default_registry.clear()


def test_strategies_for_single_parameters(two: Any, op: Op) -> None:
    def values(strategy: st.SearchStrategy[Any], get: Any) -> set[Any]:
        return {get(sample) for sample in draws(strategy, 30)}

    assert values(arguments(two, by=tensors((1, 1))), lambda s: tuple(the("by", 1)(s).shape)) == {(1, 1)}
    # A name that an option has. What has a strategy is not left out.
    assert values(arguments(two, {"device": st.just(5)}), the("device", 2)) == {5}
    # Parts, and one of the **options.
    made = op("configs")
    assert values(arguments(made, {"config.tile.rows": st.just(9)}), lambda s: config("tile")(s).rows) == {9}
    others = values(arguments(made, {"other.mode": st.just(Mode.SLOW)}), the("other", 2))
    assert {getattr(other, "mode", None) for other in others} == {None, Mode.SLOW}
    assert values(arguments(op("by_keyword"), eps=st.just(0.5)), lambda s: s.kwargs["eps"]) == {0.5}
    assert values(arguments(op("variadic"), xs=st.just(())), lambda s: len(s.args) <= 2) == {True}


def test_what_is_refused(two: Any, op: Op) -> None:
    with pytest.raises(ArgumentError, match=r"no such parameter\n  argument: y\n  expected: some of x, by, device"):
        arguments(two, y=tensors())
    with pytest.raises(ArgumentError, match=r"no such parameter\n  argument: y"):
        arguments(two, shapes={"y": (2,)})
    with pytest.raises(ArgumentError, match=r"this is not a strategy(.|\n)*just"):
        arguments(two, by=torch.ones(2))  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match=r"no strategy for Storage\n  argument: source"):
        arguments(torch.ops.aten.set_.source_Storage)
    with pytest.raises(customops.CustomOpsError, match="several overloads"):
        arguments(torch.ops.aten.add)


# Examples ------------------------------------------------------------------------------------------------------------


def test_simplest_examples(op: Op) -> None:
    zero = torch.zeros(())
    assert simplest(arguments(op("plain"))) == ((zero, 0), {})
    assert simplest(arguments(op("positional"))) == ((zero,), {})
    assert simplest(arguments(op("variadic"))) == ((zero,), {})
    assert simplest(arguments(op("by_keyword"))) == ((zero,), {})
    assert simplest(arguments(op("enums"))) == ((zero, Mode.FAST), {})
    assert simplest(arguments(op("typed_dicts"))) == ((zero, {"bias": zero}), {})
    assert simplest(arguments(op("nested"))) == ((zero, []), {})
    assert simplest(arguments(op("named_tuples"))) == (((zero, "a"),), {})


def test_failures_shrink(op: Op) -> None:
    many = shrunk(arguments(op("variadic")), lambda s: len(s.args) > 3)
    assert [each if isinstance(each, int) else each.numel() for each in many.args] in ([1, 0, 1, 1], [0, 0, 0, 0])
    assert shrunk(tensors(), lambda x: bool((x > 2).any())).tolist() == 2.125
    strided = shrunk(tensors(), lambda x: not x.is_contiguous() and x.dim() > 1)
    assert strided.numel() <= 4


def test_a_failing_test_tells_how_tensors_lie_in_memory(two: Any) -> None:
    @settings(QUIET)
    @given(arguments(two))
    def test(sample: customops.Sample) -> None:
        assert tensors_of(sample)[0].is_contiguous()

    with pytest.raises(AssertionError) as caught:
        test()
    assert any("x is sliced: strides (2,)" in note for note in caught.value.__notes__)


def test_samples_are_for_opcheck(two: Any) -> None:
    two.register_fake(lambda x, by, device: torch.empty_like(x * by))
    for sample in draws(arguments(two, shapes=(2,)), 2):
        opcheck(two, *sample, test_utils="test_faketensor")


def test_without_hypothesis(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = [name for name in sys.modules if name.startswith("customops.testing")]
    for name in ours:
        monkeypatch.delitem(sys.modules, name)
    for name in [name for name in sys.modules if name.partition(".")[0] == "hypothesis"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(customops, "testing", None, raising=False)
    importlib.import_module("customops.testing")
    with pytest.raises(ImportError, match=r"needs hypothesis(.|\n)*customops\[strategies\]"):
        importlib.import_module("customops.testing.strategies")
