"""Defaults: from a Python signature to schema text, the dispatcher, and every callback of an op."""

# No `from __future__ import annotations` here: the hints are values of the tests.

import enum
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, List, Optional

import numpy as np
import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.types import Number

import customops
from customops import infer_schema
from customops._schema.infer import schema_of
from customops._schema.parse import parse
from customops.errors import CallbackError, RegistrationError, SchemaError

GroupName = torch.distributed.distributed_c10d.GroupName
inf, nan = math.inf, math.nan

#: Tests may share the machine.
LOADED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def exact(value: Any) -> Any:
    """A form that is equal only for values that a kernel cannot tell apart (1, 1.0 and True; 0.0 and -0.0; nan)."""
    if isinstance(value, (list, tuple)):
        return list, [exact(item) for item in value]
    return type(value), repr(value) if isinstance(value, float) else value


#: (hint, default, schema type and text of the default). Kernels receive exactly the default, tuples as lists.
SAID: list[tuple[Any, Any, str]] = [
    (int, 0, "SymInt y=0"),
    (int, -3, "SymInt y=-3"),
    (int, 2**63 - 1, "SymInt y=9223372036854775807"),
    (int, -(2**63), "SymInt y=-9223372036854775808"),
    (Optional[int], None, "SymInt? y=None"),
    (Optional[int], 3, "SymInt? y=3"),
    (float, 3.14, "float y=3.14"),
    (float, 0.0, "float y=0.0"),
    (float, -0.0, "float y=-0.0"),
    (float, 1e22, "float y=1e+22"),
    (float, 0.1 + 0.2, "float y=0.30000000000000004"),
    (float, 1.7976931348623157e308, "float y=1.7976931348623157e+308"),
    (float, 2.0**-1022, "float y=2.2250738585072014e-308"),
    (Optional[float], None, "float? y=None"),
    (Optional[float], -2.5, "float? y=-2.5"),
    (bool, True, "bool y=True"),
    (bool, False, "bool y=False"),
    (Optional[bool], None, "bool? y=None"),
    (Optional[bool], False, "bool? y=False"),
    (str, "foo", 'str y="foo"'),
    (str, "", 'str y=""'),
    (str, "it's", 'str y="it\'s"'),
    (str, 'say "hi"', r'str y="say \"hi\""'),
    (str, "a\\b", r'str y="a\\b"'),
    (str, "a\b", r'str y="a\010"'),
    (str, "one\ntwo", r'str y="one\ntwo"'),
    (str, "\r\t\x00\x7f", r'str y="\015\011\000\177"'),
    (str, "\x007", r'str y="\0007"'),
    (str, "\\n", r'str y="\\n"'),
    (str, 'a\\"', r'str y="a\\\""'),
    (str, "größe 日本 \N{GRINNING FACE}", 'str y="größe 日本 \N{GRINNING FACE}"'),
    (str, "\u2028", r'str y="\342\200\250"'),
    (str, "a, b) -> (c, [d", 'str y="a, b) -> (c, [d"'),
    (str, "None", 'str y="None"'),
    (Optional[str], None, "str? y=None"),
    (Optional[str], 'q"\\', r'str? y="q\"\\"'),
    (GroupName, "0", 'str y="0"'),
    (Optional[GroupName], None, "str? y=None"),
    (Number, 1, "Scalar y=1"),
    (Number, 1.0, "Scalar y=1.0"),
    (Number, True, "Scalar y=True"),
    (Number, -0.0, "Scalar y=-0.0"),
    (Number, 2**63 - 1, "Scalar y=9223372036854775807"),
    (Optional[Number], None, "Scalar? y=None"),
    (Optional[Number], 0.5, "Scalar? y=0.5"),
    (torch.dtype, torch.float, "ScalarType y=float32"),
    (torch.dtype, torch.int, "ScalarType y=int32"),
    (torch.dtype, torch.half, "ScalarType y=float16"),
    (torch.dtype, torch.bool, "ScalarType y=bool"),
    (Optional[torch.dtype], None, "ScalarType? y=None"),
    (Optional[torch.dtype], torch.bfloat16, "ScalarType? y=bfloat16"),
    (torch.device, torch.device("cpu"), 'Device y="cpu"'),
    (torch.device, torch.device("cpu:0"), 'Device y="cpu:0"'),
    (torch.device, torch.device("cuda:3"), 'Device y="cuda:3"'),
    (Optional[torch.device], None, "Device? y=None"),
    (Optional[torch.device], torch.device("meta"), 'Device? y="meta"'),
    (List[int], [], "SymInt[] y=[]"),
    (Sequence[int], (1, -2), "SymInt[] y=[1, -2]"),
    (list[int], [2**63 - 1], "SymInt[] y=[9223372036854775807]"),
    (List[int], torch.Size([4, 5]), "SymInt[] y=[4, 5]"),
    (List[float], [], "float[] y=[]"),
    (List[float], [0.1, -0.0], "float[] y=[0.1, -0.0]"),
    (List[bool], [], "bool[] y=[]"),
    (List[bool], (True, False), "bool[] y=[True, False]"),
    (Optional[List[int]], None, "SymInt[]? y=None"),
    (Optional[List[float]], None, "float[]? y=None"),
    (Optional[List[bool]], None, "bool[]? y=None"),
    (int, None, "SymInt? y=None"),
    (float, None, "float? y=None"),
    (str, None, "str? y=None"),
    ("torch.dtype", None, "ScalarType? y=None"),
    (List[int], None, "SymInt[]? y=None"),
]
#: Defaults for which the schema language has no word: None stands in the text, and the call path puts them back.
UNSAID: list[tuple[Any, Any, str]] = [
    (float, inf, "float? y=None"),
    (float, -inf, "float? y=None"),
    (float, nan, "float? y=None"),
    (float, 5e-324, "float? y=None"),
    (float, -(2.0**-1023), "float? y=None"),
    (Number, inf, "Scalar? y=None"),
    (Number, nan, "Scalar? y=None"),
    (List[float], [inf], "float[]? y=None"),
    (List[float], [1.0, nan, -inf, -0.0, 5e-324], "float[]? y=None"),
    (Sequence[Number], [], "Scalar[]? y=None"),
    (Sequence[Number], [1, 1.0, True, inf], "Scalar[]? y=None"),
]
#: Tensors have no defaults but None and lists without one. They may not be keyword-only.
TENSORS: list[tuple[Any, Any, str]] = [
    (Optional[Tensor], None, "Tensor? y=None"),
    (Tensor, None, "Tensor? y=None"),
    (List[Tensor], None, "Tensor[]? y=None"),
    (List[Tensor], [], "Tensor[]? y=None"),
    (List[Optional[Tensor]], [], "Tensor?[]? y=None"),
    (List[Optional[Tensor]], [None, None], "Tensor?[]? y=None"),
]


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

POSITIONAL = [*SAID, *UNSAID, *TENSORS]
KEYWORD = [*SAID, *UNSAID]
CASES = [(False, *case) for case in POSITIONAL] + [(True, *case) for case in KEYWORD]
each_case = pytest.mark.parametrize(
    ("keyword", "hint", "default", "text"),
    CASES,
    ids=[f"{'*, ' if keyword else ''}{text}-{i}" for i, (keyword, _, _, text) in enumerate(CASES)],
)


def taking(hint: Any, default: Any, keyword: bool = False, seen: Optional[List[Any]] = None) -> Callable[..., Tensor]:
    """A function with a parameter ``y: hint = default``, and one more behind it, that notes the `y` it is given."""
    notes = [] if seen is None else seen
    if keyword:

        def fn(x: Tensor, *, y: hint = default, z: int = 1) -> Tensor:
            notes.append(y)
            return x.clone()

        return fn

    def fn(x: Tensor, y: hint = default, z: int = 1) -> Tensor:
        notes.append(y)
        return x.clone()

    return fn


@dataclass
class Recorder:
    """An op whose kernel, fake and setup_context note the value of `y`."""

    op: Any
    packet: Any
    kernel: List[Any]
    keyword: bool
    fake: List[Any] = field(default_factory=list)
    setup: List[Any] = field(default_factory=list)

    @classmethod
    def define(cls, registry: customops.Registry, ns: str, hint: Any, default: Any, keyword: bool) -> "Recorder":
        kernel: List[Any] = []
        op = registry.custom_op(f"{ns}::take", taking(hint, default, keyword, kernel), mutates_args=())
        recorder = cls(op, getattr(torch.ops, ns).take, kernel, keyword)
        op.register_fake(taking(hint, default, keyword, recorder.fake))
        op.register_autograd(recorder.backward, setup_context=recorder.with_keyword if keyword else recorder.positional)
        return recorder

    def positional(self, ctx: Any, inputs: Any, output: Any) -> None:
        self.setup.append(inputs[1])
        assert len(inputs) == 3

    def with_keyword(self, ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
        self.setup.append(keyword_only_inputs["y"])
        assert len(inputs) == 1

    def backward(self, ctx: Any, grad: Any) -> Any:
        return grad if self.keyword else (grad, None, None)

    def omitting(self, x: Tensor) -> None:
        """Call the op in every way that leaves `y` out."""
        for call in (self.op, self.packet, self.packet.default, self.op._opoverload):
            call(x)
            call(x=x)
            call(x, z=2)


# Text -----------------------------------------------------------------------------------------------------------


def test_defaults_in_schema_text() -> None:  # 7
    def fn(
        x: Tensor,
        a: Optional[int] = None,
        b: float = 3.14,
        c: bool = True,
        d: int = 3,
        e: str = "foo",
        f: torch.dtype = torch.float,
        g: torch.dtype = torch.float32,
        h: torch.dtype = torch.int,
        i: torch.device = torch.device("cpu:0"),  # noqa: B008
        j: torch.device = "cpu",
    ) -> Tensor: ...

    assert_expected_inline(
        infer_schema(fn, mutates_args=()).replace(", ", ",\n"),
        """\
(Tensor x,
SymInt? a=None,
float b=3.14,
bool c=True,
SymInt d=3,
str e="foo",
ScalarType f=float32,
ScalarType g=float32,
ScalarType h=int32,
Device i="cpu:0",
Device j="cpu") -> Tensor""",
    )
    assert infer_schema(fn, mutates_args=()) == torch.library.infer_schema(fn, mutates_args=())


@each_case
def test_text(keyword: bool, hint: Any, default: Any, text: str) -> None:  # 7
    star = "*, " if keyword else ""
    fn = taking(hint, default, keyword)
    assert infer_schema(fn, mutates_args=()) == f"(Tensor x, {star}{text}, SymInt z=1) -> Tensor"


@pytest.mark.parametrize("dtype", sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str))
def test_every_dtype_keeps_its_canonical_name(dtype: torch.dtype) -> None:  # 7
    text = infer_schema(taking(torch.dtype, dtype), mutates_args=())
    assert text == f"(Tensor x, ScalarType y={str(dtype).removeprefix('torch.')}, SymInt z=1) -> Tensor"
    assert parse(text).arguments[1].default is dtype


@pytest.mark.parametrize(("hint", "default", "text"), UNSAID, ids=str)
def test_default_without_a_word_is_none_in_the_text(hint: Any, default: Any, text: str) -> None:
    argument = schema_of(taking(hint, default), ()).arguments[1]
    assert argument.default_is_none_in_text
    assert exact(argument.default) == exact(default)
    assert parse(infer_schema(taking(hint, default), mutates_args=())).arguments[1].default is None


# From the dispatcher to the callbacks -----------------------------------------------------------------------------


@each_case
def test_omitted_default_reaches_the_kernel(
    registry: customops.Registry, ns: str, keyword: bool, hint: Any, default: Any, text: str
) -> None:  # 7, 17
    recorder = Recorder.define(registry, ns, hint, default, keyword)
    recorder.omitting(torch.ones(1))
    assert [exact(y) for y in recorder.kernel] == [exact(default)] * 12
    assert not any(isinstance(y, tuple) for y in recorder.kernel)


@each_case
def test_omitted_default_reaches_the_fake(
    registry: customops.Registry, ns: str, keyword: bool, hint: Any, default: Any, text: str
) -> None:  # 17, 40
    recorder = Recorder.define(registry, ns, hint, default, keyword)
    recorder.omitting(torch.ones(1, device="meta"))
    with FakeTensorMode():
        recorder.omitting(torch.ones(1))
    assert [exact(y) for y in recorder.fake] == [exact(default)] * 24
    assert recorder.kernel == []


@each_case
def test_omitted_default_reaches_setup_context(
    request: pytest.FixtureRequest,
    registry: customops.Registry,
    ns: str,
    keyword: bool,
    hint: Any,
    default: Any,
    text: str,
) -> None:  # 17
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


def test_dispatcher_holds_its_own_values(registry: customops.Registry, ns: str) -> None:  # 17
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


def test_device_as_a_string_stays_one(registry: customops.Registry, ns: str) -> None:  # 17
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


def test_default_of_a_mutated_list(registry: customops.Registry, ns: str) -> None:  # 6, 20
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


def test_kernels_of_every_device_get_defaults(registry: customops.Registry, ns: str) -> None:  # 17
    seen: List[Any] = []

    def kernel(x: Tensor, y: Any, z: Any) -> Tensor:
        seen.append((y, z))
        return x.clone()

    op = registry.custom_op(f"{ns}::op", taking(List[float], [inf, 1.0]), mutates_args=())
    op.register_kernel("cpu", kernel)
    op(torch.ones(1))
    assert seen == [([inf, 1.0], 1)]


def test_compiled_call_gets_defaults(registry: customops.Registry, ns: str) -> None:
    recorder = Recorder.define(registry, ns, float, -inf, False)
    compiled = torch.compile(lambda x: recorder.op(x) + recorder.op(x, z=2), backend="eager", fullgraph=True)
    assert compiled(torch.ones(1)).tolist() == [2]
    assert recorder.kernel == [-inf, -inf]
    assert recorder.fake[:2] == [-inf, -inf]


def test_manual_schema_defaults_reach_callbacks_in_python_form(registry: customops.Registry, ns: str) -> None:  # 17, 65
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


def test_adopted_op_gives_kernels_defaults_in_python_form(registry: customops.Registry, ns: str) -> None:  # 22
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


# Generated ------------------------------------------------------------------------------------------------------

integers = st.integers(-(2**63), 2**63 - 1)
strings = st.text(st.characters(exclude_categories=("Cs",)))
numbers = st.one_of(integers, st.floats(), st.booleans())
DEFAULTS = st.one_of(
    *(
        st.tuples(st.just(hint), values)
        for hint, values in {
            int: integers,
            float: st.floats(),
            bool: st.booleans(),
            str: strings,
            Number: numbers,
            List[int]: st.lists(integers),
            List[float]: st.lists(st.floats()),
            List[bool]: st.lists(st.booleans()),
            List[Number]: st.lists(numbers),
            Optional[int]: st.none() | integers,
            Optional[bool]: st.none() | st.booleans(),
            Optional[str]: st.none() | strings,
            Optional[float]: st.none() | st.floats(allow_nan=False, allow_infinity=False, allow_subnormal=False),
        }.items()
    )
)


@settings(LOADED, max_examples=150)
@given(DEFAULTS, st.booleans())
def test_any_default_survives(case: tuple[Any, Any], keyword: bool) -> None:
    hint, default = case
    registry = customops.Registry()
    try:
        recorder = Recorder.define(registry, "t_any_default", hint, default, keyword)
        recorder.op(torch.ones(1))
        recorder.packet(torch.ones(1), z=2)
        recorder.op(torch.ones(1, requires_grad=True), y=default)
        recorder.op(torch.ones(1, device="meta"))
        seen = [*recorder.kernel, *recorder.setup, *recorder.fake]
        assert [exact(y) for y in seen] == [exact(default)] * 5
    finally:
        registry.clear()


@settings(LOADED, max_examples=150)
@given(DEFAULTS)
def test_text_of_any_default_reads_back(case: tuple[Any, Any]) -> None:
    schema = schema_of(taking(*case), ())
    again = parse(str(schema)).arguments[1]
    if schema.arguments[1].default_is_none_in_text:
        assert again.default is None
        assert again.type.endswith("?")
    else:
        assert again == schema.arguments[1]
        assert exact(again.default) == exact(case[1])


# Refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hint", "default", "match"),
    [
        (int, 2**63, "integers have 64 bits"),
        (int, -(2**63) - 1, "integers have 64 bits"),
        (Number, 2**64, "integers have 64 bits"),
        (List[int], [1, 2**63], "integers have 64 bits"),
        (float, 10**400, "too large for a float"),
        (int, 1.0, "a float cannot be the default of a SymInt"),
        (int, "1", "a str cannot be the default of a SymInt"),
        (int, np.int64(1), "a int64 cannot be the default of a SymInt"),
        (float, "1", "a str cannot be the default of a float"),
        (float, 1j, "a complex cannot be the default of a float"),
        (bool, 1, "a int cannot be the default of a bool"),
        (str, 1, "a int cannot be the default of a str"),
        (str, "\ud800", "holds surrogates"),
        (Number, "1", "a str cannot be the default of a Scalar"),
        (torch.dtype, "float32", "a str cannot be the default of a ScalarType"),
        (torch.dtype, float, "a type cannot be the default of a ScalarType"),
        (torch.device, "bogus", "torch knows no such device"),
        (torch.device, "", "torch knows no such device"),
        (torch.device, 0, "a int cannot be the default of a Device"),
        (Tensor, torch.ones(20, 20), "a Tensor cannot be the default of a Tensor"),
        (Optional[Tensor], torch.ones(1), "a Tensor cannot be the default of a Tensor"),
        (List[Tensor], [torch.ones(20, 20)], "a Tensor cannot be the default of a Tensor"),
        (List[int], 3, "expected a list, got int"),
        (List[int], "ab", "expected a list, got str"),
        (List[int], {1}, "expected a list, got set"),
        (List[int], [None], "None is not a SymInt"),
        (List[bool], [1], "a int cannot be the default of a bool"),
        (List[Number], None, r"None is not a Scalar\[\]"),
        (List[int], [*range(1000), 2**63], "integers have 64 bits"),
        (Optional[float], inf, "schema text cannot hold it, and None has its own meaning"),
        (Optional[Number], nan, "schema text cannot hold it, and None has its own meaning"),
        (Optional[List[int]], [1], "schema text cannot hold it, and None has its own meaning"),
        (Optional[List[float]], [], "schema text cannot hold it, and None has its own meaning"),
    ],
)
@pytest.mark.parametrize("keyword", [False, True])
def test_unsupported_default(
    registry: customops.Registry, ns: str, keyword: bool, hint: Any, default: Any, match: str
) -> None:
    fn = taking(hint, default, keyword)
    with pytest.raises(SchemaError, match=match) as caught:
        infer_schema(fn, mutates_args=())
    message = str(caught.value)
    assert message.startswith("fn: parameter y has an unsupported default: ")
    assert f"fn ({__file__}:{fn.__code__.co_firstlineno})" in message
    assert len(message.splitlines()) < 8
    assert max(map(len, message.splitlines())) < 200
    with pytest.raises(ValueError, match=match):
        registry.custom_op(f"{ns}::op", fn, mutates_args=())
    assert len(registry) == 0


def test_a_default_of_none_makes_the_type_optional(registry: customops.Registry, ns: str) -> None:
    """torch writes ``Tensor bias=None``, and refuses the other types or a None that is passed."""

    @registry.custom_op(f"{ns}::linear", mutates_args=())
    def linear(x: Tensor, bias: Tensor = None, k: int = None) -> Tensor:  # noqa: RUF013
        y = x * (1 if k is None else k)
        return y if bias is None else y + bias

    linear.register_fake(lambda x, bias, k: torch.empty_like(x))
    linear.register_autograd(lambda ctx, g: (g, None if not ctx.needs_input_grad[1] else g, None))
    x, bias = torch.rand(2), torch.rand(2, requires_grad=True)
    for call in (linear, torch.compile(linear, fullgraph=True, backend="aot_eager")):
        assert torch.equal(call(x * 2), x * 2)
        assert torch.equal(call(x, None, None), x * 1)
        assert torch.equal(call(x, k=3), x * 3)
        assert torch.equal(call(x, bias, 3), x * 3 + bias)
        assert torch.equal(torch.autograd.grad(call(x, bias, 3).sum(), bias)[0], torch.ones(2))


# Callbacks without a parameter for a default ---------------------------------------------------------------------


def scale(
    x: Tensor, k: int = 2, sizes: Sequence[int] = (1, 2), *, s: float = 1.5, device: torch.device = "cpu"
) -> Tensor:
    return x * k + sum(sizes)


LEFT_OUT = "has no parameter for k, sizes, s, device. It is called without"


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
