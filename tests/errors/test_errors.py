"""What is said, and what to do next."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import customops
from customops import Registry, Tag
from customops._places import is_deliberate
from customops.errors import (
    AutogradError,
    ContextError,
    CustomOpsError,
    DefinitionError,
    RegistrationError,
    SchemaError,
    UnsupportedError,
    brief,
)


def double(x: Tensor) -> Tensor:
    return x * 2


def message(call: Callable[[], Any], kind: type[Exception] = CustomOpsError) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


# Names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["loaded_libraries::f", "load_library::f", "higher_order::f", "_dir::f", "__file__::f", "__class__::f", "{}::name",
     "{}::_dir", "{}::__init__", "{}::__file__", "{}::f.overloads", "{}::f.op", "{}::f._op", "{}::f._dir",
     "{}::f._qualified_op_name"],
)  # fmt: skip
@pytest.mark.parametrize("form", ["custom_op", "define"])
def test_names_that_torch_ops_has_already(registry: Registry, ns: str, name: str, form: str) -> None:
    name, before = name.format(ns), list(torch.ops)
    text = message(lambda: define(registry, form, name), DefinitionError)
    assert re.search(r"an op cannot have this name: torch\.ops\.\S+ is something else", text)
    assert list(torch.ops) == before  # nothing was changed
    assert not torch._C._jit_get_schemas_for_operator(name.partition(".")[0])


@pytest.mark.parametrize("name", ["import::f", "{}::class", "{}::f.None", "{}::f.import", "{}::lambda", "True::f"])
@pytest.mark.parametrize("form", ["custom_op", "define"])
def test_keywords(registry: Registry, ns: str, name: str, form: str) -> None:
    text = message(lambda: define(registry, form, name.format(ns)), DefinitionError)
    assert "is a keyword of Python or of schemas" in text


def define(registry: Registry, form: str, name: str) -> None:
    if form == "custom_op":
        registry.custom_op(name, double, mutates_args=())
    else:
        registry.define(name, "(Tensor x) -> Tensor")


@pytest.mark.compile
def test_names_that_look_like_others_and_are_none(registry: Registry, ns: str) -> None:
    names = [f"{ns}::{name}" for name in ("match", "self", "op", "f.name", "g.self", "h.two")]
    for name in [*names, f"print_{ns}::f"]:
        op = registry.custom_op(name, double, mutates_args=())
        compiled = torch.compile(lambda x, op=op: op(x) + 1, fullgraph=True, backend="eager")
        op.register_fake(torch.empty_like)
        assert compiled(torch.ones(1)).item() == 3


def test_a_long_name(registry: Registry, ns: str) -> None:
    for text in (f"{ns}::" + "f" * 3000, "n" * 3000 + "::f"):
        op = registry.custom_op(text, double, mutates_args=())
        assert op(torch.ones(1)).item() == 2
        assert len(message(lambda op=op: op.register_kernel("cuda:0", double))) < 500
        assert len(message(lambda op=op: op.register_fake(lambda: None))) < 500
    assert len(message(lambda: registry.custom_op("n" * 3000, double, mutates_args=()))) < 500
    assert len(message(lambda: registry.custom_op("ns::" + "-" * 3000, double, mutates_args=()))) < 500


# Options --------------------------------------------------------------------------------------------------------


class Unprintable:
    def __repr__(self) -> str:
        raise ValueError("no")


def test_a_repr_that_raises() -> None:
    assert brief(Unprintable()) == "<Unprintable, whose __repr__ raises ValueError>"
    assert brief("a\n b") == "'a\\n b'"
    assert len(brief("x" * 1000)) == 80


OPTIONS = ["nondiff_args", "device_types", "on_conflict", "check", "bypass", "differentiable", "tags", "schema",
           "mutates_args"]  # fmt: skip


@pytest.mark.parametrize("value", [5, 5.0, Unprintable(), ["x", 5]])
@pytest.mark.parametrize("option", OPTIONS)
def test_options_of_a_wrong_kind(registry: Registry, ns: str, option: str, value: Any) -> None:
    options = {"mutates_args": (), option: value}
    text = message(lambda: registry.custom_op(f"{ns}::f", double, **options))
    assert len(text.splitlines()) <= 5
    assert len(text) < 500


@pytest.mark.parametrize("option", ["nondiff_args", "grads_of", "originals"])
@pytest.mark.parametrize("value", [5, Unprintable(), [5]])
def test_options_of_a_formula(registry: Registry, ns: str, option: str, value: Any) -> None:
    op = registry.custom_op(f"{ns}::f", double, mutates_args=())
    text = message(lambda: op.register_autograd(lambda ctx, g: g, **{option: value}), DefinitionError)
    assert text.startswith(f"{ns}::f: {option}= must be the name of an argument, or a tuple of names\n  got:      ")


def test_an_unprintable_argument(registry: Registry, ns: str) -> None:
    for first in (Unprintable(), lambda: None):
        assert "must be a string" in message(lambda first=first: registry.custom_op(first, mutates_args=()))
    assert "expected an operator" in message(lambda: registry.adopt(Unprintable()))


# Definitions ----------------------------------------------------------------------------------------------------


def test_without_parentheses(registry: Registry) -> None:
    text = message(lambda: registry.custom_op(double), DefinitionError)
    assert 'fix:      @custom_op("mylib::double", mutates_args=())' in text


def test_without_mutates_args(registry: Registry, ns: str) -> None:
    assert str(registry.custom_op(f"{ns}::f", double).schema) == "(Tensor x) -> Tensor"


@dataclasses.dataclass
class Config:
    size: int
    scale: float = 1.0


class Model:
    def forward(self, x: Tensor) -> Tensor:
        return x


def of_dataclass(x: Tensor, config: Config) -> Tensor: ...


def of_dict(x: Tensor, named: dict[str, Tensor]) -> Tensor: ...


def of_plain_dict(x: Tensor, named: dict) -> Tensor: ...  # type: ignore[type-arg]


def of_array(x: np.ndarray) -> Tensor: ...  # type: ignore[type-arg]


@pytest.mark.parametrize(
    ("fn", "text"),
    [
        (Model.forward, "a method cannot be an op: its first parameter is self"),
        (of_dataclass, "fix:      @dataclass(frozen=True) above Config"),
        (of_dict, 'fix:      named: Annotated[dict[str, Tensor], Keys("a", "b")]'),
        (of_plain_dict, 'fix:      named: Annotated[dict[str, Tensor], Keys("a", "b")]'),
        (of_array, "fix:      x: Tensor, which torch.from_numpy makes"),
    ],
)
def test_functions_that_are_no_ops(registry: Registry, ns: str, fn: Any, text: str) -> None:
    assert text in message(lambda: registry.custom_op(f"{ns}::f", fn, mutates_args=()), SchemaError)


@pytest.mark.parametrize(
    ("device", "fix"),
    [("gpu", '"cuda", for all'), ("cuda:0", '"cuda", for all'), ("CPU:0", '"cpu", for all'),
     ("GPU:1", '"cuda", for all'), (torch.device("cuda:0"), '"cuda"')],
)  # fmt: skip
def test_devices_that_are_none(registry: Registry, ns: str, device: Any, fix: str) -> None:
    op = registry.custom_op(f"{ns}::f", double, mutates_args=())
    for call in (
        lambda: op.register_kernel(device, double),
        lambda: registry.custom_op(f"{ns}::g", double, mutates_args=(), device_types=device),
    ):
        assert f"fix:      {fix}" in message(call)


@pytest.mark.parametrize("schema", ["(Tensor x, *, int(a!) out) -> int(a!)", "(Tensor x, int(a!) n) -> ()"])
@pytest.mark.parametrize("mutates_args", [(), "out", ("out",)])
def test_a_write_to_what_is_no_tensor(registry: Registry, ns: str, schema: str, mutates_args: Any) -> None:
    def register() -> None:
        registry.custom_op(f"{ns}::f", double, mutates_args=mutates_args, schema=schema, tags=Tag.out)

    if mutates_args == "out":
        mutates_args = ("out",)
    text = message(register, SchemaError)
    assert "a schema only supports Tensor arguments that are written" in text
    assert "(of no dimensions, for a number), or drop the annotation" in text


# Calls ----------------------------------------------------------------------------------------------------------


@pytest.mark.compile
@pytest.mark.parametrize("bypass", [False, True])
def test_a_device_without_a_kernel(registry: Registry, ns: str, bypass: bool) -> None:
    op = registry.custom_op(f"{ns}::f", double, mutates_args=(), device_types=["cuda", "xpu"], bypass=bypass)
    op.register_autograd(lambda ctx, grad: grad * 2)
    x, packet = torch.ones(2), getattr(torch.ops, ns).f
    expected = (
        f"{ns}::f: Could not run '{ns}::f' with arguments from the 'CPU' backend: it has no kernel there\n"
        '  expected: tensors on cuda or xpu\n  fix:      op.register_kernel("cpu", fn), or move the tensors to "cuda"'
    )
    for call in (op, packet, op._opoverload):
        for arg in (x, x.clone().requires_grad_()):
            assert message(lambda call=call, arg=arg: call(arg), NotImplementedError) == expected
            with torch.no_grad():
                assert message(lambda call=call, arg=arg: call(arg), UnsupportedError) == expected
    assert message(lambda: torch.func.grad(lambda x: op(x).sum())(x)) == expected
    with torch.inference_mode():
        assert message(lambda: op(x)) == expected
    op.register_fake(torch.empty_like)
    compiled = torch.compile(lambda x: op(x), fullgraph=True, backend="aot_eager")
    assert message(lambda: compiled(x)) == expected
    sparse = message(lambda: op(x.to_sparse()))
    assert f'fix:      customops.impl("{ns}::f", "SparseCPU", fn)' in sparse
    op.register_kernel("cpu", double)
    assert op(x).tolist() == packet(x).tolist() == [2, 2]


def test_a_device_without_a_kernel_of_an_op_that_a_kernel_calls(registry: Registry, ns: str) -> None:
    inner = registry.custom_op(f"{ns}::inner", double, mutates_args=(), device_types="cuda")
    outer = registry.custom_op(f"{ns}::outer", lambda x: inner(x), mutates_args=(), schema="(Tensor x) -> Tensor")
    assert message(lambda: outer(torch.ones(2))).startswith(f"{ns}::inner: Could not run '{ns}::inner'")

    def own(x: Tensor) -> Tensor:
        raise NotImplementedError("not for this dtype")

    outer.register_kernel("cpu", own)
    with pytest.raises(NotImplementedError, match=r"^not for this dtype$"):
        outer(torch.ones(2))


def test_a_device_without_a_kernel_for_an_op_that_writes_or_takes_lists(registry: Registry, ns: str) -> None:
    def fill(xs: list[Tensor], *, out: Tensor) -> None: ...

    op = registry.custom_op(f"{ns}::fill", fill, mutates_args={"out"}, device_types="cuda")
    for x in (torch.ones(2), torch.ones(2, requires_grad=True)):
        text = message(lambda x=x: op([x], out=torch.ones(2)), UnsupportedError)
        assert f"Could not run '{ns}::fill'" in text
        assert len(text.splitlines()) == 3


def test_no_kernel_at_all(registry: Registry, ns: str) -> None:
    registry.define(f"{ns}::f", "(Tensor x) -> Tensor")
    op = registry.adopt(f"{ns}::f")
    assert 'fix:      op.register_kernel("cpu", fn)' in message(lambda: op(torch.ones(2)), UnsupportedError)


@pytest.mark.parametrize("bypass", [False, True])
def test_arguments_that_are_no_tensors(registry: Registry, ns: str, bypass: bool) -> None:
    op = registry.custom_op(f"{ns}::f", double, mutates_args=(), bypass=bypass)
    total = registry.custom_op(f"{ns}::total", lambda xs: sum(xs), mutates_args=(), schema="(Tensor[] xs) -> Tensor")
    array = np.ones(2)
    for value in (array, np.float64(1), [1.0], 1):
        text = message(lambda value=value: op(value), RuntimeError)
        assert "Expected a value of type 'Tensor' for argument 'x'" in text  # torch's words go on being there
        assert text.endswith("\n  fix:      torch.as_tensor(x)")
    for value in (array, [array]):
        assert message(lambda value=value: total(value), RuntimeError).endswith(
            "fix:      [torch.as_tensor(x) for x in xs]"
        )
    assert message(lambda: total(torch.ones(2)), RuntimeError).endswith("fix:      [xs]")
    assert message(lambda: op("x"), RuntimeError).endswith("fix:      pass a tensor")
    text = message(lambda: op(torch.ones(2), 3), TypeError if bypass else RuntimeError)
    assert bypass or text.endswith("fix:      leave out 3")


def test_the_class_of_each(registry: Registry, ns: str) -> None:
    with pytest.raises(RegistrationError):
        registry.custom_op(f"{ns}::f", double, mutates_args=(), device_types="gpu")


# The package ----------------------------------------------------------------------------------------------------


def test_dir_lists_what_is_public() -> None:
    assert dir(customops) == sorted(customops.__all__)
    assert "opcheck" in dir(customops)
    needs_package = set() if importlib.util.find_spec("tvm_ffi") else {"from_tvm_ffi"}
    assert all(getattr(customops, name) is not None for name in dir(customops) if name not in needs_package)


# Formulas -------------------------------------------------------------------------------------------------------


@pytest.fixture
def scaled(registry: Registry, ns: str) -> Any:
    def scale(x: Tensor, by: float = 2.0) -> Tensor:
        return x * by

    op = registry.custom_op(f"{ns}::scale", scale, mutates_args=())
    op.register_fake(lambda x, by: torch.empty_like(x))
    return op


def save_a_float(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0], inputs[1])


def mark_an_input(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.mark_dirty(inputs[0])


def mark_a_float(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.mark_dirty(inputs[1])


@pytest.mark.compile
@pytest.mark.parametrize(
    ("setup_context", "problem", "fix"),
    [
        (save_a_float, "ctx.save_for_backward is for tensors", "keep anything else as an attribute: ctx.k = k"),
        (
            mark_an_input,
            "ctx.mark_dirty on a tensor that the op, by its schema, does not write",
            "mutates_args says what is written",
        ),
        (mark_a_float, "ctx.mark_dirty is for tensors", "mutates_args says what is written"),
    ],
)
@pytest.mark.parametrize("how", ["eager", "torch.ops", "func", "list", "compiled"])
def test_what_setup_context_gives_to_ctx(scaled: Any, setup_context: Any, problem: str, fix: str, how: str) -> None:
    scaled.register_autograd(lambda ctx, grad: (grad, None), setup_context=setup_context)
    x = torch.ones(2, requires_grad=True)
    packet = scaled._opoverload
    if how == "list":
        registry, ns = scaled._owner, scaled._definition.name.namespace
        scaled = registry.custom_op(f"{ns}::scales", lambda xs, by: [x * by for x in xs], mutates_args=(),
                                    schema="(Tensor[] xs, float by) -> Tensor[]")  # fmt: skip

        def of_list(ctx: Any, inputs: Any, output: Any) -> None:
            setup_context(ctx, (inputs[0][0], inputs[1]), output)

        scaled.register_autograd(lambda ctx, grads: (grads, None), setup_context=of_list)
    call: Callable[[], Any] = {
        "eager": lambda: scaled(x, 3.0),
        "torch.ops": lambda: packet(x, 3.0),
        "func": lambda: torch.func.grad(lambda x: scaled(x, 3.0).sum())(x),
        "list": lambda: scaled([x], 3.0),
        "compiled": lambda: torch.compile(lambda x: scaled(x, 3.0), backend="aot_eager")(x),
    }[how]
    with pytest.raises(Exception, match=re.escape(problem)) as caught:
        call()
    text = str(caught.value)
    name = "of_list" if how == "list" else setup_context.__name__
    assert f"{scaled._qualname}: {problem}" in text
    assert f"at:       {name} ({__file__}:" in text
    assert fix in text


@pytest.mark.compile
def test_an_attribute_that_ctx_has_not(scaled: Any) -> None:
    def backward(ctx: Any, grad: Tensor) -> Any:
        assert getattr(ctx, "other", None) is None
        assert not hasattr(ctx, "other")
        return grad * ctx.by, None

    scaled.register_autograd(backward)
    x = torch.ones(2, requires_grad=True)
    for run in (lambda: scaled(x).sum().backward(), lambda: torch.func.grad(lambda x: scaled(x).sum())(x)):
        text = message(run, ContextError)
        assert text.startswith(f"{scaled._qualname}: ctx has no attribute 'by': no setup_context is registered\n")
        assert f"at:       backward ({__file__}:" in text
        assert text.endswith("fix:      ctx.by = ... in setup_context, given with setup_context=")
    compiled = torch.compile(lambda x: scaled(x).sum(), backend="aot_eager")
    assert "ctx has no attribute 'by'" in message(lambda: compiled(x).backward(), Exception)
    scaled.register_autograd(backward, setup_context=lambda ctx, inputs, output: setattr(ctx, "bye", inputs[1]))
    text = message(lambda: scaled(x).sum().backward(), AttributeError)
    assert "expected: one that setup_context set: bye" in text
    scaled.register_autograd(backward, setup_context=lambda ctx, inputs, output: setattr(ctx, "by", inputs[1]))
    scaled(x, 3.0).sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 3.0))


def test_an_attribute_that_ctx_has_not_outside_of_backward(scaled: Any) -> None:
    x = torch.ones(2, requires_grad=True)
    backward = lambda ctx, grad: (grad, None)  # noqa: E731
    scaled.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.by)
    for run in (lambda: scaled(x), lambda: torch.func.grad(lambda x: scaled(x).sum())(x)):
        assert "ctx has no attribute 'by'\n" in message(run, ContextError)
    keep = lambda ctx, inputs, output: setattr(ctx, "bye", inputs[1])  # noqa: E731
    scaled.register_autograd(backward, setup_context=keep)
    scaled.register_jvp(lambda ctx, tangent, _: tangent * ctx.by, setup_context=keep)
    text = message(lambda: torch.func.jvp(scaled, (x.detach(),), (x.detach(),)), ContextError)
    assert "expected: one that setup_context set: bye" in text


def test_an_attribute_that_something_else_has_not_is_no_matter_of_ctx(scaled: Any) -> None:
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.by, None

    scaled.register_autograd(backward)
    total = scaled(torch.ones(2, requires_grad=True)).sum()
    with pytest.raises(AttributeError, match="'Tensor' object has no attribute 'by'") as caught:
        total.backward()
    assert not isinstance(caught.value, ContextError)


def test_flat_gradients_for_a_list(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::total", lambda xs, y: sum(xs) + y, mutates_args=(),
                            schema="(Tensor[] xs, Tensor y) -> Tensor")  # fmt: skip
    x = torch.ones(2, requires_grad=True)
    for length, items in ((1, "g"), (2, "g, g"), (7, "g, g, ..., g")):
        op.register_autograd(lambda ctx, g, length=length: (g,) * (length + 1))
        text = message(lambda length=length: op([x * i for i in range(length)], x).sum().backward(), AutogradError)
        assert text.endswith(f"fix:      xs is a list: return [{items}]")
        op.register_autograd(lambda ctx, g: (g, g))
        text = message(lambda length=length: op([x * i for i in range(length)], x).sum().backward(), AutogradError)
        assert text.endswith(f"fix:      xs is a list: return [{items}]")


@pytest.mark.compile
def test_formulas_are_registered_by_decorators(registry: Registry, ns: str, scaled: Any) -> None:
    def keep(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.by = inputs[1]

    @scaled.register_autograd(setup_context=keep)
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.by, None

    @scaled.register_jvp(setup_context=keep)
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return tangent * ctx.by

    assert callable(backward)
    assert callable(jvp)

    def check(op: Any) -> None:
        x = torch.ones(2, requires_grad=True)
        op(x, 3.0).sum().backward()
        assert torch.equal(x.grad, torch.full((2,), 3.0))
        assert torch.equal(torch.func.jvp(lambda x: op(x, 3.0), (x,), (x,))[1], torch.full((2,), 3.0))
        compiled = torch.compile(lambda x: op(x, 4.0), fullgraph=True, backend="aot_eager")
        assert torch.equal(torch.autograd.grad(compiled(x).sum(), x)[0], torch.full((2,), 4.0))

    check(scaled)
    other = registry.custom_op(f"{ns}::other", scaled._init_fn, mutates_args=())
    other.register_fake(lambda x, by: torch.empty_like(x))
    for register, fn in ((customops.register_autograd, backward), (customops.register_jvp, jvp)):
        assert register(other, fn, setup_context=keep) is None  # as torch's
    check(other)

    @other.register_autograd
    def nothing(ctx: Any, grad: Tensor) -> Any:
        return grad * 0, None

    x = torch.ones(2, requires_grad=True)
    assert torch.equal(torch.autograd.grad(nothing and other(x).sum(), x)[0], torch.zeros(2))


@pytest.mark.parametrize("form", ["register_autograd", "register_jvp"])
def test_an_option_that_there_is_not(scaled: Any, form: str) -> None:
    with pytest.raises(TypeError, match="a formula has no option 'setup_contex'") as caught:
        getattr(scaled, form)(lambda ctx, *gs: None, setup_contex=lambda ctx, inputs, output: None)
    assert "expected: setup_context, lib, nondiff_args" in str(caught.value)


# Fixes that lead on --------------------------------------------------------------------------------------------------


def test_a_gradient_in_another_order_is_not_to_be_reshaped(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::f", double, mutates_args=())
    x = torch.ones(2, 3, requires_grad=True)
    op.register_autograd(lambda ctx, grad: grad.mT)
    assert "fix:      gradient.mT" in message(lambda: op(x).sum().backward())
    op.register_autograd(lambda ctx, grad: grad[:, None])
    assert "fix:      gradient.reshape([2, 3])" in message(lambda: op(x).sum().backward())
    op.register_autograd(lambda ctx, grad: grad.reshape(6))
    assert "reshape" not in message(lambda: op(x).sum().backward())


def test_the_dtype_that_a_string_names(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::f", double, mutates_args=())
    text = message(lambda: op.register_autocast("cuda", "float16"))
    assert 'register_autocast("cuda", torch.float16)' in text


def test_the_nearest_name_is_proposed(registry: Registry, ns: str) -> None:
    def f(x: Tensor, output: Tensor) -> None: ...

    text = message(lambda: registry.custom_op(f"{ns}::f", f, mutates_args={"out"}))
    assert "fix:      mutates_args=('output',)" in text


def scale(x: Tensor, by: float = 2.0) -> Tensor:
    return x * by


def test_an_unknown_keyword_where_there_are_defaults(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::f", scale, mutates_args=())
    text = message(lambda: op(torch.ones(1), factor=2.0))
    assert "there is no argument 'factor'" in text
    assert "fix:      did you mean by?" in text


def test_what_no_function_makes_a_number_of(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::f", scale, mutates_args=())
    assert "fix:      float(by)" in message(lambda: op(torch.ones(1), "3"))
    assert "fix:      pass a float" in message(lambda: op(torch.ones(1), object()))


def in_several_lines(x: int) -> None:
    assert (
        x == 2
    ), "x is 2"  # fmt: skip


def by_a_call(x: int) -> None:
    torch._check(
        x == 2,
        lambda: "x is 2",
    )


def with_the_word(x: Any) -> None:
    x.foo = x.foo  # we could raise here


def by_another_call(x: Any) -> None:
    _checksum(x)


def _checksum(x: Any) -> Any:
    return x.foo


def test_what_raises_on_purpose() -> None:
    """`raise`, `assert` and `torch._check` over several lines; not a comment, nor a function of a like name."""
    for refuses, expected in (
        (in_several_lines, True),
        (by_a_call, True),
        (with_the_word, False),
        (by_another_call, False),
    ):
        with pytest.raises(Exception) as caught:  # noqa: PT011
            refuses(1)
        assert is_deliberate(caught.value) is expected
