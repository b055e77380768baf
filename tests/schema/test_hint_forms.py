"""Quoted annotations, callables that are not plain functions, and texts as hints."""

import functools
import importlib.util
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, List, Optional, Sequence, Tuple

import pytest
import torch
from expecttest import assert_expected_inline
from helpers.hints import complaint
from torch import Tensor
from torch.types import Number

import customops
from customops import infer_schema
from customops._schema import infer
from customops.errors import SchemaError

MyTensor = Tensor
MyList = List


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


# Quoted annotations ---------------------------------------------------------------------------------------------


@pytest.mark.parity(9)
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
def test_quoted_annotation(hint: Any, type_: str) -> None:
    def fn(x: Tensor, y: hint) -> "MyTensor": ...

    assert infer_schema(fn, mutates_args=()) == f"(Tensor x, {type_} y) -> Tensor"


@pytest.mark.parity(9)
def test_quoted_return() -> None:
    def fn(x: "MyTensor") -> "Tuple['MyTensor', MyList['MyTensor']]": ...

    assert infer_schema(fn, mutates_args=()) == "(Tensor x) -> (Tensor, Tensor[])"


@pytest.mark.parity(9)
@pytest.mark.parametrize("name", ["_TestTensor", "_Row"])
def test_names_of_the_inference_module_do_not_resolve(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(infer, name, Tensor, raising=False)

    def fn(x: f"list[{name}]") -> Tensor: ...

    with pytest.raises(ValueError, match=rf"Unsupported type annotation list\[{name}\]\. It is not a type\."):
        infer_schema(fn, mutates_args=())


@pytest.mark.parity(9)
def test_name_that_only_the_function_body_has() -> None:
    Local = Tensor

    def fn(x: "Local") -> Tensor: ...

    assert Local is Tensor
    assert "not inside a function" in complaint(fn, r"Unsupported type annotation Local\. It is not a type\.")


@pytest.mark.parity(9)
@pytest.mark.parametrize("text", ["1/0", "x y", "list[", "undefined.Tensor", "torch.nope"])
def test_quoted_annotation_that_cannot_be_evaluated(text: str) -> None:
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


@pytest.mark.parity(9)
def test_future_annotations(registry: customops.Registry, ns: str, tmp_path: Path) -> None:
    module = load(tmp_path, FUTURE)
    schema = "(Tensor x, float by=2.0, *, SymInt[]? dims=None) -> (Tensor, Tensor[])"
    assert infer_schema(module.scale, mutates_args=()) == schema
    op = registry.custom_op(f"{ns}::scale", module.scale, mutates_args=())
    first, (second,) = op(torch.ones(2), 3.0)
    assert (first.tolist(), second.tolist()) == ([3, 3], [2, 2])


@pytest.mark.parity(9)
def test_future_annotation_imported_for_type_checkers_only(tmp_path: Path) -> None:
    fn = load(tmp_path, FUTURE).typing_only
    message = complaint(fn, r"Unsupported type annotation Vector\. It is not a type\. \(NameError")
    assert "import or define the name there" in message


@pytest.mark.parity(9)
def test_future_annotation_local_to_a_function(tmp_path: Path) -> None:
    complaint(load(tmp_path, FUTURE).make_local(), r"Unsupported type annotation Local\. It is not a type\.")


@pytest.mark.parity(9)
def test_decorated_function_is_read_in_its_own_module(tmp_path: Path) -> None:
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
    with pytest.raises(
        ValueError, match=rf"{name}: (the signature cannot be read|parameter iterable must have)"
    ) as caught:
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
