"""What is printed of an error: the user's frames, and a message with op, argument, line and fix."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch._dynamo.exc
from torch import Tensor

import customops
from customops import Registry
from customops.errors import (
    ArgumentError,
    AutogradError,
    CustomOpsError,
    DefinitionError,
    KernelError,
    MissingFakeError,
    RegistrationError,
)


class Pair(NamedTuple):
    w: Tensor
    b: Tensor


def scale(x: Tensor, by: float = 2.0) -> Tensor:
    return x * by


@pytest.fixture
def op(registry: Registry, ns: str) -> Any:
    return registry.custom_op(f"{ns}::scale", scale, mutates_args=())


def raised(call: Callable[[], Any], kind: type[BaseException] = CustomOpsError) -> Any:
    with pytest.raises(kind) as caught:
        call()
    return caught.value


#: The package: another path may have its name in it.
PACKAGE = str(Path(customops.__file__).parent)


def frames_of_ours(error: BaseException) -> list[str]:
    names = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return [name for name in names if name.startswith((PACKAGE, "<customops"))]


def no_hints(registry: Registry, ns: str, op: Any) -> None:
    registry.custom_op(f"{ns}::f", lambda x: x, mutates_args=())


def no_schema(registry: Registry, ns: str, op: Any) -> None:
    registry.custom_op(f"{ns}::f", scale, mutates_args=(), schema="(Tensor x, flot by) -> Tensor")


def no_namespace(registry: Registry, ns: str, op: Any) -> None:
    registry.custom_op("scale", mutates_args=())


def kernel_for_gpu(registry: Registry, ns: str, op: Any) -> None:
    op.register_kernel("gpu", scale)


def fake_of_one(registry: Registry, ns: str, op: Any) -> None:
    op.register_fake(lambda: None)


def unknown_op(registry: Registry, ns: str, op: Any) -> None:
    customops.register_fake(f"{ns}::scal", scale)


def wrong_argument(registry: Registry, ns: str, op: Any) -> None:
    op("x")


def missing_argument(registry: Registry, ns: str, op: Any) -> None:
    op()


@pytest.mark.parametrize(
    ("mistake", "fix"),
    [
        (no_hints, "def instead of lambda"),
        (no_schema, "correct the schema"),
        (no_namespace, '"mylib::scale"'),
        (kernel_for_gpu, '"cuda"'),
        (fake_of_one, "def _(x, by)"),
        (unknown_op, "::scale?"),
        (wrong_argument, "pass a tensor"),
        (missing_argument, "pass x"),
    ],
)
def test_only_frames_of_the_user_are_shown(
    registry: Registry, ns: str, op: Any, mistake: Callable[..., None], fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = raised(lambda: mistake(registry, ns, op))
    assert frames_of_ours(error) == []
    assert len(traceback.format_exception(error)) <= 5  # no other error before it
    assert fix in str(error).splitlines()[-1]
    monkeypatch.setenv("CUSTOMOPS_TRACEBACK", "full")
    assert len(frames_of_ours(raised(lambda: mistake(registry, ns, op)))) > 1


def test_an_error_of_a_callback_shows_the_callback(registry: Registry, ns: str, op: Any) -> None:
    @registry.custom_op(f"{ns}::outer", mutates_args=())
    def outer(x: Tensor) -> Tensor:
        return op("x")  # type: ignore[no-any-return]

    error = raised(lambda: outer(torch.ones(1)), ArgumentError)
    assert "outer" in [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def test_what_is_no_error_of_ours_keeps_its_frames(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::f", mutates_args=())
    def f(x: Tensor) -> Tensor:
        raise RuntimeError("of the kernel")

    assert frames_of_ours(raised(lambda: f(torch.ones(1)), RuntimeError))


def test_arguments_of_a_registration_that_do_not_fit(registry: Registry, ns: str, op: Any) -> None:
    text = str(raised(lambda: op.register_autograd(lambda ctx, grad: grad, print), TypeError))
    assert text.startswith(
        f"{op._qualname}: register_autograd() takes at most 1 positional arguments, and 2 were given"
    )
    assert text.endswith("fix:      give it by name: register_autograd(backward, setup_context=...)")
    text = str(raised(lambda: registry.custom_op(f"{ns}::f", mutate_args=()), TypeError))  # type: ignore[call-overload]
    assert "at:       " in text
    assert text.endswith("did you mean mutates_args?")
    text = str(raised(lambda: op.register_autocast("cpu"), TypeError))
    assert text.startswith(f"{op._qualname}: register_autocast() missing 1 required positional argument: 'cast_inputs'")


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("register_fakes", "register_fake"),
        ("register_backward", "register_autograd"),
        ("impl_abstract", "register_fake"),
    ],
)
def test_a_misspelled_method(op: Any, written: str, meant: str) -> None:
    error = raised(lambda: getattr(op, written), AttributeError)
    assert str(error) == f"{op._qualname}: an op has no attribute {written!r}\n  fix:      did you mean {meant}?"
    assert not hasattr(op, "_anything")
    assert "has no out variant" in str(raised(lambda: op.out, AttributeError))  # what a property says stays
    with pytest.raises(AttributeError, match="did you mean register_fake"):
        customops.register_fakes  # noqa: B018


# Gradients ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gradient", "fix"),
    [
        (lambda grad: (grad[:2], None), "return a gradient of the shape of the input"),
        (lambda grad: (grad.reshape(3, 1, 1)[:, 0], None), "gradient.reshape([3])"),
        (lambda grad: (grad.numpy(), None), "torch.from_numpy(gradient)"),
        (lambda grad: (2.0, None), "torch.full_like(x, 2.0)"),
        (lambda grad: grad, "return grad_x, None"),
        (lambda grad: (grad, grad), "return None in its place"),
    ],
)
def test_a_gradient_that_does_not_fit_has_a_fix(op: Any, gradient: Callable[[Tensor], Any], fix: str) -> None:
    op.register_autograd(lambda ctx, grad: gradient(grad))
    error = raised(lambda: op(torch.ones(3, requires_grad=True), 2.5).sum().backward(), AutogradError)
    assert error.fix.startswith((fix, f"compute it with torch, or wrap the array: {fix}"))


def test_names_are_those_of_the_signature(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::linear", mutates_args=())
    def linear(x: Tensor, p: Pair) -> Tensor:
        return p.w if x.dim() == 0 else x * p.w + p.b

    error = raised(lambda: linear(torch.ones(()), Pair(torch.ones(3), torch.ones(3))))
    assert error.argument == "p.w"
    linear.register_autograd(lambda ctx, grad: (grad, Pair(grad[:2], grad)))
    x = torch.ones(3, requires_grad=True)
    error = raised(lambda: linear(x, Pair(x * 1, x * 2)).sum().backward())
    assert error.argument == "p.w"


def test_a_vmap_rule_that_does_not_return_two_values(op: Any) -> None:
    for returned, got in ((lambda x: x, "Tensor"), (lambda x: (x, 5), "a result of 2 dimensions")):
        op.register_vmap(lambda info, in_dims, x, by, returned=returned: returned(x))
        error = raised(lambda: torch.vmap(op)(torch.ones(3, 2)), KernelError)
        assert (error.op, error.got) == (op._qualname, got)
        assert error.fix.startswith("return result, 0")


def test_what_an_autocast_rule_casts_to(op: Any) -> None:
    assert raised(lambda: op.register_autocast("cpu", torch.int32), DefinitionError).argument == "cast_inputs"


def test_a_class_is_no_formula(op: Any) -> None:
    class Function(torch.autograd.Function):
        pass

    assert "Function.backward" in raised(lambda: op.register_autograd(Function), RegistrationError).fix


# Compiled ---------------------------------------------------------------------------------------------------------


def call_it(op: Any) -> Callable[[Tensor], Tensor]:
    def model(x: Tensor) -> Tensor:
        return op(x + 1, 3.0)  # type: ignore[no-any-return]

    return model


def printed(error: BaseException) -> str:
    """Return what Python prints of an error; Dynamo shows ours inside its own text, on one line."""
    return "".join(traceback.format_exception(error)).replace("\\n", "\n")


def compile_error(op: Any, kind: type[BaseException] = torch._dynamo.exc.TorchRuntimeError, **options: Any) -> str:
    return printed(raised(lambda: torch.compile(call_it(op), backend="eager", **options)(torch.ones(2)), kind))


@pytest.mark.compile
@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiling_without_a_fake(op: Any, fullgraph: bool) -> None:
    text = compile_error(op, fullgraph=fullgraph)
    assert f"{op._qualname}: There was no fake impl registered for <CustomOpDef({op._qualname})>" in text
    assert f"\n  at:       model ({__file__}:" in text
    assert "\n  fix:      Please use `scale.register_fake` to add a fake impl: fn(x, by)" in text
    op.register_fake(lambda x, by: torch.empty_like(x))
    torch._dynamo.reset()
    compiled = torch.compile(call_it(op), backend="eager", fullgraph=fullgraph)
    assert compiled(torch.ones(2)).tolist() == [6, 6]


@pytest.mark.compile
@pytest.mark.parametrize("strict", [False, True])
def test_exporting_without_a_fake(op: Any, strict: bool) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return op(x + 1, 3.0)  # type: ignore[no-any-return]

    kind = torch._dynamo.exc.TorchRuntimeError if strict else MissingFakeError
    text = printed(raised(lambda: torch.export.export(Model(), (torch.ones(2),), strict=strict), kind))
    assert f"{op._qualname}: There was no fake impl registered" in text
    assert f"\n  at:       forward ({__file__}:" in text
    assert "\n  fix:      Please use `scale.register_fake`" in text


def raises(x: Tensor, by: float) -> Tensor:
    return torch.empty_lik(x)  # type: ignore[attr-defined, no-any-return]


def reads(x: Tensor, by: float) -> Tensor:
    return x if x.sum() > 0 else x + 1


def nothing(x: Tensor, by: float) -> None:
    pass


@pytest.mark.compile
@pytest.mark.parametrize(
    ("fake", "problem", "fix"),
    [
        (raises, "the fake impl raised: AttributeError: module 'torch' has no attribute 'empty_lik'", "correct it"),
        (
            reads,
            "the fake impl asks for data, which a fake tensor does not have: GuardOnDataDependentSymNode",
            "decide by shapes and dtypes",
        ),
        (nothing, "the fake impl returned something that does not fit the schema", "return the result"),
    ],
)
def test_a_fake_that_fails_under_compile(op: Any, fake: Callable[..., Any], problem: str, fix: str) -> None:
    """Dynamo keeps the note that tells of data: it breaks the graph at the error, or raises one of its own from it."""
    op.register_fake(fake)
    text = compile_error(op, torch._dynamo.exc.UserError if fake is reads else Exception, fullgraph=True)
    assert f"{op._qualname}: {problem}" in text
    assert f"\n  at:       {fake.__name__} ({__file__}:" in text
    assert f"\n  fix:      {fix}" in text


def refuses(x: Tensor, by: float) -> Tensor:
    torch._check(x.dim() == 2, lambda: "x needs two dimensions")
    return torch.empty_like(x)


def refuses_too(x: Tensor, by: float) -> Tensor:
    if x.dim() != 2:
        raise ValueError("x needs two dimensions")
    return torch.empty_like(x)


@pytest.mark.compile
@pytest.mark.parametrize("fake", [refuses, refuses_too])
def test_a_fake_that_refuses_an_input_is_not_told_to_be_corrected(op: Any, fake: Callable[..., Any]) -> None:
    op.register_fake(fake)
    text = compile_error(op, fullgraph=True)
    assert f"ArgumentError('{op._qualname}: x needs two dimensions (" in text
    assert "Error of the fake impl, which refuses these inputs)" in text
    assert f"\n  at:       {fake.__name__} ({__file__}:" in text
    assert "\n  fix:      pass inputs that the op takes" in text
    assert "correct it" not in text
    torch._dynamo.reset()
    torch.compile(call_it(op), backend="eager", fullgraph=True)(torch.ones(2, 2))


@pytest.mark.compile
def test_a_fake_that_reads_data_breaks_the_graph(op: Any) -> None:
    op.register_fake(reads)
    assert torch.compile(call_it(op), backend="eager")(torch.ones(2)).tolist() == [6, 6]


@pytest.mark.compile
@pytest.mark.skipif(not hasattr(torch._dynamo.exc, "FakeTensorObservedException"), reason="Dynamo raises at once")
def test_traced_code_catches_what_a_fake_raises(op: Any) -> None:
    @op.register_fake
    def _(x: Tensor, by: float) -> Tensor:
        raise RuntimeError("no")

    def model(x: Tensor) -> Tensor:
        try:
            return op(x + 1, 3.0)  # type: ignore[no-any-return]
        except RuntimeError:
            return x - 1

    assert torch.compile(model, backend="eager", fullgraph=True)(torch.ones(2)).tolist() == [0, 0]
