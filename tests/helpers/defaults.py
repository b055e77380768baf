"""Defaults of every type, and what the dispatcher makes of them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, List, Optional, Union

import pytest
import torch
from torch import Tensor
from torch.types import Number

import customops
from helpers.covers import every

GroupName = torch.distributed.distributed_c10d.GroupName
inf, nan = math.inf, math.nan


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
    (complex, 2j, "complex y=2.0j"),
    (Optional[complex], None, "complex? y=None"),
    (List[complex], [1j, -0.5j], "complex[] y=[1.0j, -0.5j]"),
    (List[torch.dtype], [torch.half, torch.bool], "ScalarType[] y=[float16, bool]"),
    (Optional[List[torch.dtype]], None, "ScalarType[]? y=None"),
    (torch.layout, torch.strided, "Layout y=0"),
    (torch.layout, torch.sparse_csr, "Layout y=2"),
    (Optional[torch.layout], None, "Layout? y=None"),
    (torch.memory_format, torch.channels_last, "MemoryFormat y=2"),
    (Optional[torch.memory_format], torch.contiguous_format, "MemoryFormat? y=0"),
    (Optional[torch.Generator], None, "Generator? y=None"),
    (Union[int, float], 3, "Scalar y=3"),
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
    (complex, 1 + 2j, "complex? y=None"),
    (List[complex], [1 + 2j], "complex[]? y=None"),
    (List[str], [], "str[]? y=None"),
    (List[str], ["a", "größe"], "str[]? y=None"),
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


POSITIONAL = [*SAID, *UNSAID, *TENSORS]
KEYWORD = [*SAID, *UNSAID]
CASES = [(False, *case) for case in POSITIONAL] + [(True, *case) for case in KEYWORD]
each_case = pytest.mark.parametrize(
    ("keyword", "hint", "default", "text"),
    every(5, CASES),
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
