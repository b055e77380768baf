"""Defaults on their way from the dispatcher to kernels, fakes and rules."""

import enum
import functools
import itertools
import warnings
from collections.abc import Sequence
from typing import Any, List, Optional

import numpy as np
import pytest
import torch
from helpers.defaults import (
    UNSAID,
    Recorder,
    each_case,
    exact,
    inf,
    nan,
    taking,
)
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.types import Number

import customops
from customops import infer_schema
from customops.errors import CallbackError, RegistrationError


class Mode(enum.IntEnum):
    SUM = 2


class Name(str, enum.Enum):
    MEAN = "mean"


#: Values of a subclass, or of a type that Python takes as well: kernels receive what the dispatcher makes of them.
#: (hint, default, schema text, what the kernel receives)
ADAPTED: list[tuple[Any, Any, str, Any]] = [
    (float, 3, "float y=3.0", 3.0),
    (float, True, "float y=1.0", 1.0),
    (float, 2**70, "float y=1.1805916207174113e+21", 2.0**70),
    (float, np.float64(1.5), "float y=1.5", 1.5),
    (Optional[float], 3, "float? y=3.0", 3.0),
    (List[float], [1, 2.5], "float[] y=[1.0, 2.5]", [1.0, 2.5]),
    (int, True, "SymInt y=1", 1),
    (int, Mode.SUM, "SymInt y=2", 2),
    (List[int], [Mode.SUM, True], "SymInt[] y=[2, 1]", [2, 1]),
    (Number, np.float64(-0.0), "Scalar y=-0.0", -0.0),
    (Number, Mode.SUM, "Scalar y=2", 2),
    (str, Name.MEAN, 'str y="mean"', "mean"),
]


# From the dispatcher to the callbacks -----------------------------------------------------------------------------


@pytest.mark.parity(7, 17)
@each_case
def test_omitted_default_reaches_the_kernel(
    registry: customops.Registry, ns: str, keyword: bool, hint: Any, default: Any, text: str
) -> None:
    recorder = Recorder.define(registry, ns, hint, default, keyword)
    recorder.omitting(torch.ones(1))
    assert [exact(y) for y in recorder.kernel] == [exact(default)] * 12
    assert not any(isinstance(y, tuple) for y in recorder.kernel)


@pytest.mark.parity(17, 40)
@each_case
def test_omitted_default_reaches_the_fake(
    registry: customops.Registry, ns: str, keyword: bool, hint: Any, default: Any, text: str
) -> None:
    recorder = Recorder.define(registry, ns, hint, default, keyword)
    recorder.omitting(torch.ones(1, device="meta"))
    with FakeTensorMode():
        recorder.omitting(torch.ones(1))
    assert [exact(y) for y in recorder.fake] == [exact(default)] * 24
    assert recorder.kernel == []


@pytest.mark.parity(17)
@each_case
def test_omitted_default_reaches_setup_context(
    request: pytest.FixtureRequest,
    registry: customops.Registry,
    ns: str,
    keyword: bool,
    hint: Any,
    default: Any,
    text: str,
) -> None:
    recorder = Recorder.define(registry, ns, hint, default, keyword)
    x = torch.ones(1, requires_grad=True)
    recorder.omitting(x)
    assert [exact(y) for y in recorder.setup] == [exact(default)] * 12
    assert [exact(y) for y in recorder.kernel] == [exact(default)] * 12
    recorder.op(x).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1]


@each_case
def test_default_given_in_the_call(
    registry: customops.Registry, ns: str, keyword: bool, hint: Any, default: Any, text: str
) -> None:
    recorder = Recorder.define(registry, ns, hint, default, keyword)
    x = torch.ones(1, requires_grad=True)
    for call in (recorder.op, recorder.packet, recorder.packet.default):
        call(x, y=default)
        call(x, z=2, y=default)
        if not keyword:
            call(x, default)
            call(x, default, 2)
    for values in (recorder.kernel, recorder.setup):
        assert [exact(y) for y in values] == [exact(default)] * (6 if keyword else 12)


@pytest.mark.parametrize(("hint", "default", "text"), UNSAID, ids=str)
@pytest.mark.parametrize("keyword", [False, True])
def test_none_stands_for_a_default_without_a_word(
    registry: customops.Registry, ns: str, hint: Any, default: Any, text: str, keyword: bool
) -> None:
    recorder = Recorder.define(registry, ns, hint, default, keyword)
    recorder.op(torch.ones(1, requires_grad=True), y=None)
    recorder.packet(torch.ones(1), y=None, z=2)
    seen = [*recorder.kernel, *recorder.setup]
    assert [exact(y) for y in seen] == [exact(default)] * 3


OTHER_VALUES: list[tuple[Any, Any, Any]] = [
    (int, 3, 4),
    (float, inf, -1.5),
    (float, inf, nan),
    (float, nan, 0.0),
    (bool, True, False),
    (str, 'a"b', "a"),
    (Number, 1, True),
    (Number, 1, 1.0),
    (Number, True, 1),
    (Number, nan, 7),
    (torch.dtype, torch.float, torch.int),
    (torch.device, torch.device("cpu:0"), torch.device("cpu")),
    (List[int], [1], []),
    (List[float], [inf], []),
    (List[float], [inf], [1.0, -inf]),
    (List[Number], [1], [1.0]),
    (Optional[int], 3, None),
    (Optional[float], 0.5, None),
    (Optional[str], "a", None),
    (Optional[torch.device], torch.device("cpu"), None),
    (Optional[List[int]], None, [1, 2]),
]


@pytest.mark.parametrize("keyword", [False, True])
@pytest.mark.parametrize(("hint", "default", "value"), OTHER_VALUES, ids=str)
def test_another_value_replaces_the_default(
    registry: customops.Registry, ns: str, hint: Any, default: Any, value: Any, keyword: bool
) -> None:
    recorder = Recorder.define(registry, ns, hint, default, keyword)
    recorder.op(torch.ones(1, requires_grad=True), y=value)
    recorder.packet(torch.ones(1), y=value)
    recorder.op(torch.ones(1, device="meta"), y=value)
    seen = [*recorder.kernel, *recorder.setup, *recorder.fake]
    assert [exact(y) for y in seen] == [exact(value)] * 4


@pytest.mark.parametrize(("hint", "default", "text", "received"), ADAPTED, ids=str)
@pytest.mark.parametrize("keyword", [False, True])
def test_default_of_another_type(
    registry: customops.Registry, ns: str, hint: Any, default: Any, text: str, received: Any, keyword: bool
) -> None:
    recorder = Recorder.define(registry, ns, hint, default, keyword)
    assert text in str(recorder.op.schema)
    recorder.omitting(torch.ones(1))
    recorder.omitting(torch.ones(1, requires_grad=True))
    recorder.omitting(torch.ones(1, device="meta"))
    for values, count in ((recorder.kernel, 24), (recorder.setup, 12), (recorder.fake, 12)):
        assert [exact(y) for y in values] == [exact(received)] * count


@pytest.mark.parity(17)
def test_dispatcher_holds_its_own_values(registry: customops.Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::op", mutates_args=())
    def op(
        x: Tensor,
        a: Optional[int] = None,
        b: float = 3.14,
        c: bool = True,
        d: int = 3,
        e: str = 'f"oo',
        f: torch.dtype = torch.float,
        g: torch.dtype = torch.int,
        h: torch.device = torch.device("cpu:0"),  # noqa: B008
        i: torch.device = "cpu",
        j: List[int] = [1, 2],  # noqa: B006
        k: float = inf,
    ) -> Tensor: ...

    defaults = [a.default_value for a in op._opoverload._schema.arguments]
    expected = [None, None, 3.14, True, 3, 'f"oo', 6, 3, torch.device("cpu:0"), torch.device("cpu"), [1, 2], None]
    assert [exact(value) for value in defaults] == [exact(value) for value in expected]


@pytest.mark.parity(17)
def test_device_as_a_string_stays_one(registry: customops.Registry, ns: str) -> None:
    recorder = Recorder.define(registry, ns, torch.device, "cpu:0", False)
    recorder.op(torch.ones(1))
    recorder.packet(torch.ones(1, requires_grad=True))
    recorder.op(torch.ones(1, device="meta"))
    assert [*recorder.kernel, *recorder.setup, *recorder.fake] == ["cpu:0"] * 4
    assert recorder.op._opoverload._schema.arguments[1].default_value == torch.device("cpu:0")


def test_device_as_a_string_stays_one_before_an_argument_that_is_given(registry: customops.Registry, ns: str) -> None:
    recorder = Recorder.define(registry, ns, torch.device, "cpu:0", False)
    recorder.op(torch.ones(1), z=2)
    assert [exact(y) for y in recorder.kernel] == [exact("cpu:0")]  # as it does where `z` is omitted too


def test_several_defaults_some_of_them_given(registry: customops.Registry, ns: str) -> None:
    seen: List[Any] = []

    @registry.custom_op(f"{ns}::op", mutates_args=())
    def op(
        x: Tensor,
        a: float = inf,
        b: List[float] = [nan],  # noqa: B006
        c: int = 3,
        *,
        d: Number = -inf,
        e: str = "\\",
        f: List[int] = [],  # noqa: B006
    ) -> Tensor:
        seen.append({"a": a, "b": b, "c": c, "d": d, "e": e, "f": f})
        return x.clone()

    defaults = {"a": inf, "b": [nan], "c": 3, "d": -inf, "e": "\\", "f": []}
    others = {"a": 1.0, "b": [], "c": 4, "d": True, "e": "", "f": [5]}
    x = torch.ones(1)
    for count in range(len(others) + 1):
        for chosen in itertools.combinations(others, count):
            given_ = {name: others[name] for name in chosen}
            op(x, **given_)
            assert exact(list(seen.pop().items())) == exact(list((defaults | given_).items()))
    op(x, 1.0, [2.0])
    assert exact(list(seen.pop().items())) == exact(list((defaults | {"a": 1.0, "b": [2.0]}).items()))


@pytest.mark.parametrize("default", [[], [1.5], [inf]], ids=str)
@pytest.mark.parametrize("keyword", [False, True])
def test_list_default_is_a_new_list_in_each_call(
    registry: customops.Registry, ns: str, keyword: bool, default: List[float]
) -> None:
    recorder = Recorder.define(registry, ns, List[float], default, keyword)
    for _ in range(2):
        recorder.op(torch.ones(1))
        recorder.op(torch.ones(1), z=2)
        recorder.op(torch.ones(1, device="meta"))
    for y in (*recorder.kernel, *recorder.fake):
        assert y == default
        y.append(0.0)  # must not be seen by any other


@pytest.mark.parity(6, 20)
def test_default_of_a_mutated_list(registry: customops.Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::fill", mutates_args={"ys"})
    def fill(x: Tensor, ys: List[Tensor] = []) -> None:  # noqa: B006
        for y in ys:
            y.fill_(len(ys))

    assert str(fill.schema) == "(Tensor x, Tensor(a1!)[]? ys=None) -> ()"
    assert fill(torch.ones(1)) is None
    y, z = torch.zeros(1), torch.zeros(1)
    versions = y._version, z._version
    fill(torch.ones(1), [y, z])
    assert (y.tolist(), z.tolist()) == ([2], [2])
    assert y._version > versions[0]
    assert z._version > versions[1]


@pytest.mark.parity(17)
def test_kernels_of_every_device_get_defaults(registry: customops.Registry, ns: str) -> None:
    seen: List[Any] = []

    def kernel(x: Tensor, y: Any, z: Any) -> Tensor:
        seen.append((y, z))
        return x.clone()

    op = registry.custom_op(f"{ns}::op", taking(List[float], [inf, 1.0]), mutates_args=())
    op.register_kernel("cpu", kernel)
    op(torch.ones(1))
    assert seen == [([inf, 1.0], 1)]


@pytest.mark.compile
def test_compiled_call_gets_defaults(registry: customops.Registry, ns: str) -> None:
    recorder = Recorder.define(registry, ns, float, -inf, False)
    compiled = torch.compile(lambda x: recorder.op(x) + recorder.op(x, z=2), backend="eager", fullgraph=True)
    assert compiled(torch.ones(1)).tolist() == [2]
    assert recorder.kernel == [-inf, -inf]
    assert recorder.fake[:2] == [-inf, -inf]


@pytest.mark.parity(17, 65)
def test_manual_schema_defaults_reach_callbacks_in_python_form(registry: customops.Registry, ns: str) -> None:
    seen: List[Any] = []

    def kernel(x, *args):  # type: ignore[no-untyped-def]
        seen.append(list(args))
        return x.clone()

    schema = (
        "(Tensor x, ScalarType a=float, Device b='cpu:0', Device? c='cpu:0', Layout d=strided, MemoryFormat e=2, "
        r'ScalarType[] f=[int, bool], int[2] g=1, float? h=1, str i="\"\\b", bool j=1, Scalar k=1.0, int z=1) -> Tensor'
    )
    op = registry.custom_op(f"{ns}::op", kernel, mutates_args=(), schema=schema)
    op.register_fake(kernel)
    op(torch.ones(1))
    op(torch.ones(1, device="meta"))
    device = torch.device("cpu:0")
    expected = [torch.float32, device, device, torch.strided, torch.channels_last, [torch.int32, torch.bool]]
    expected += [[1, 1], 1.0, '"\\b', True, 1.0, 1]
    assert [exact(args) for args in seen] == [exact(expected)] * 2


@pytest.mark.parity(22)
def test_adopted_op_gives_kernels_defaults_in_python_form(registry: customops.Registry, ns: str) -> None:
    seen: List[Any] = []

    def kernel(x: Tensor, d: torch.dtype, e: torch.device, f: List[int]) -> Tensor:
        seen.append([d, e, f])
        return x.clone()

    with torch.library._scoped_library(ns, "FRAGMENT") as library:
        library.define("op(Tensor x, ScalarType d=float, Device e='cpu', int[] f=[3]) -> Tensor")
        registry.adopt(f"{ns}::op").register_kernel("cpu", kernel)
        getattr(torch.ops, ns).op(torch.ones(1))
        registry.clear()
    assert [exact(value) for value in seen] == [exact([torch.float32, torch.device("cpu"), [3]])]


def test_op_that_comes_back_has_its_defaults(registry: customops.Registry, ns: str) -> None:
    recorder = Recorder.define(registry, ns, float, inf, False)
    with registry.scope():
        other = Recorder.define(registry, ns, float, nan, False)
        other.op(torch.ones(1))
    recorder.op(torch.ones(1))
    assert [exact(y) for y in recorder.kernel] == [exact(inf)]
    assert [exact(y) for y in other.kernel] == [exact(nan)]


# Callbacks without a parameter for a default ---------------------------------------------------------------------


def scale(
    x: Tensor, k: int = 2, sizes: Sequence[int] = (1, 2), *, s: float = 1.5, device: torch.device = "cpu"
) -> Tensor:
    return x * k + sum(sizes)


LEFT_OUT = "has no parameter for k, sizes, s, device. It is called without"


@pytest.mark.compile
@pytest.mark.parametrize("mine", [True, False])
def test_a_callback_may_leave_out_what_has_a_default(registry: customops.Registry, ns: str, mine: bool) -> None:
    """As in torch, where the dispatcher does not pass what equals its default."""
    lib = torch.library.Library(ns, "FRAGMENT")
    if mine:
        registry.custom_op(f"{ns}::scale", scale, mutates_args=())
    else:
        lib.define("scale(Tensor x, int k=2, int[] sizes=[1, 2], *, float s=1.5, Device device='cpu') -> Tensor")
    op, adopted = getattr(torch.ops, ns).scale.default, registry.adopt(f"{ns}::scale")
    x = torch.rand(3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        adopted.register_kernel("cpu", lambda x: x * 2 + 3)
        adopted.register_fake(lambda x: torch.empty_like(x))
        adopted.register_vmap(lambda info, in_dims, x, **named: (x * 2 + 3, in_dims[0]))
    texts = [str(each.message) for each in caught if LEFT_OUT[:21] in str(each.message)]
    assert len(texts) == (3 if mine else 0)
    if mine:
        assert LEFT_OUT in texts[0]
        assert LEFT_OUT in texts[1]
        assert all(each.filename == __file__ for each in caught)
    compiled = torch.compile(lambda x, **named: op(x, **named), fullgraph=True, backend="aot_eager")
    for call in (op, compiled, torch.vmap(op)):
        assert torch.equal(call(x), x * 2 + 3)
        assert torch.equal(call(x, k=2, sizes=[1, 2], s=1.5, device="cpu"), x * 2 + 3)
    calls = [
        (op, {"k": 3}),
        (op, {"sizes": [2, 1]}),
        (op, {"sizes": [1]}),
        (op, {"s": 1.0}),
        (torch.vmap(op), {"k": 3}),
    ]
    for call, named in calls:
        with pytest.raises(RegistrationError, match="has no parameter for an argument that was given") as error:
            call(x, **named)
        assert error.value.argument == next(iter(named))
    if mine:
        with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match="has no parameter for an argument"):
            compiled(x, k=3)


def test_only_defaults_may_be_left_out(registry: customops.Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::scale", scale, mutates_args=())
    for fake in (lambda: 0, lambda x, k, sizes, more, *, s, device: x, lambda x, k, *, s, device, other: x):
        with pytest.raises(CallbackError, match="does not fit the operator"):
            op.register_fake(fake)


def test_a_function_with_a_schema_may_leave_out_defaults(registry: customops.Registry, ns: str) -> None:
    with pytest.warns(UserWarning, match="has no parameter for k. It is called without") as caught:
        op = registry.custom_op(
            f"{ns}::twice", lambda x: x * 2, mutates_args=(), schema="(Tensor x, int k=2) -> Tensor"
        )
    assert len(caught) == 1
    assert op(torch.ones(1), 2).item() == 2
    with pytest.raises(RegistrationError, match=r"fix: +add the parameter k to <lambda>"):
        op(torch.ones(1), 3)


@pytest.mark.compile
def test_a_kernel_is_bound_by_its_own_parameters(registry: customops.Registry, ns: str) -> None:
    def plan(x: Tensor, workspace: Tensor, k: int) -> Tensor:
        return x * k + workspace

    @registry.custom_op(f"{ns}::run", mutates_args=(), schema="(Tensor x, int k) -> Tensor")
    @functools.wraps(plan)
    def run(*args: Any) -> Tensor:
        return plan(args[0], torch.ones_like(args[0]), *args[1:])

    @run.register_fake
    @functools.wraps(plan)
    def fake(*args: Any) -> Tensor:
        return torch.empty_like(args[0])

    x = torch.rand(2)
    for call in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        assert torch.equal(call(x, 3), x * 3 + 1)

    @functools.wraps(run)
    def too_few(x: Tensor) -> Tensor:
        return x.clone()

    with pytest.raises(CallbackError, match="too many positional arguments"):
        run.register_kernel("cpu", too_few)


def test_hints_are_those_of_what_is_wrapped(registry: customops.Registry, ns: str) -> None:
    """The schema is read through ``functools.wraps``, as torch reads it."""

    def twice(x: Tensor, k: int = 2) -> Tensor:
        return x * k

    @functools.wraps(twice)
    def wrapper(*args: Any) -> Tensor:
        return twice(*args)

    assert infer_schema(wrapper, mutates_args=()) == torch.library.infer_schema(wrapper, mutates_args=())
    assert registry.custom_op(f"{ns}::twice", wrapper, mutates_args=())(torch.ones(1), 3).item() == 3
