"""What a kernel returns, and that results share no memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers.kernels import constant, define, located, run_at, which
from torch import Tensor
from torch.testing import assert_close

from customops import Registry
from customops.errors import AliasError, KernelError

# What a kernel returns ------------------------------------------------------------------------------------------

T = torch.zeros(2)
GOOD = [
    ("Tensor", T),
    ("Tensor?", T),
    ("Tensor?", None),
    ("Tensor[]", [T, T + 1]),
    ("Tensor[]", []),
    ("SymInt", 3),
    ("SymInt", np.int64(3)),
    ("int", 3),
    ("float", 0.5),
    ("float", 2),
    ("bool", True),
    ("Scalar", 1),
    ("Scalar", 1.5),
    ("Scalar", 1j),
    ("Scalar", True),
    ("(Tensor, Tensor)", (T, T + 1)),
    ("(Tensor, Tensor)", [T, T + 1]),
    ("(Tensor[], SymInt, float, bool)", ([T], 1, 2.0, False)),
    ("(Tensor, Tensor?)", (T, None)),
    ("()", None),
]


@pytest.mark.parametrize(("returns", "value"), GOOD)
def test_results_that_fit(registry: Registry, ns: str, returns: str, value: Any) -> None:
    op = define(registry, ns, lambda x: value, schema=f"(Tensor x) -> {returns}")
    result = op(torch.zeros(1))
    assert_close(result, tuple(value) if returns.startswith("(") and value is not None else value, check_dtype=False)


A = np.zeros(2)
MISFITS = [
    ("Tensor", None, "None"),
    ("Tensor", A, r"numpy\.ndarray"),
    ("Tensor", 1.0, "float"),
    ("Tensor", (T,), r"tuple of 1 \(Tensor\)"),
    ("Tensor", [T], r"list of 1 \(Tensor\)"),
    ("Tensor?", A, r"numpy\.ndarray"),
    ("Tensor[]", None, "None"),
    ("Tensor[]", T, "Tensor"),
    ("Tensor[]", A, r"numpy\.ndarray"),
    ("Tensor[]", [T, None], r"list of 2 \(Tensor, None\)"),
    ("Tensor[]", [T, A], r"numpy\.ndarray"),
    ("Tensor[]", {"a": T}, "dict"),
    ("SymInt", None, "None"),
    ("SymInt", 1.0, "float"),
    ("SymInt", "1", "str"),
    ("SymInt", A, r"numpy\.ndarray"),
    ("SymInt", (1,), "tuple of 1"),
    ("float", None, "None"),
    ("float", "1", "str"),
    ("float", 1j, "complex"),
    ("float", A, r"numpy\.ndarray"),
    ("float", T, "Tensor"),
    ("bool", None, "None"),
    ("bool", 1, "int"),
    ("bool", A, r"numpy\.ndarray"),
    ("Scalar", None, "None"),
    ("Scalar", "1", "str"),
    ("Scalar", A, r"numpy\.ndarray"),
    ("Scalar", np.float32(1), r"numpy\.float32"),
    ("(Tensor, Tensor)", None, "None"),
    ("(Tensor, Tensor)", T, "Tensor"),
    ("(Tensor, Tensor)", (T,), "tuple of 1"),
    ("(Tensor, Tensor)", (T, T, T), "tuple of 3"),
    ("(Tensor, Tensor)", (T, A), r"numpy\.ndarray"),
    ("(Tensor, SymInt)", (T, 1.5), "float"),
    ("(Tensor[], Tensor)", (T, T), r"tuple of 2 \(Tensor, Tensor\)"),
    ("(Tensor, float, bool)", (T, 1.0, 1), "int"),
    ("()", T, "Tensor"),
    ("()", 0, "int"),
    ("()", (), "tuple of 0"),
]


@pytest.mark.parametrize(("returns", "value", "got"), MISFITS)
def test_results_that_do_not_fit(registry: Registry, ns: str, returns: str, value: Any, got: str) -> None:
    def bad(x: Tensor) -> Any:
        return value

    op = define(registry, ns, bad, schema=f"(Tensor x) -> {returns}")
    with pytest.raises(KernelError, match=rf"(?s){ns}::f: the kernel returned something .* got: +.*{got}") as caught:
        op(torch.zeros(1))
    assert caught.value.op == f"{ns}::f"
    assert caught.value.where == located(bad)
    assert isinstance(caught.value, RuntimeError)


def test_a_tuple_of_one(registry: Registry, ns: str) -> None:
    def good(x: Tensor) -> tuple[Tensor]:
        return (x + 1,)

    def bad(x: Tensor) -> tuple[Tensor]:
        return x + 1  # type: ignore[return-value]

    (result,) = registry.custom_op(f"{ns}::good", good, mutates_args=())(torch.zeros(2))
    assert result.tolist() == [1, 1]
    with pytest.raises(KernelError, match="does not fit the schema"):
        registry.custom_op(f"{ns}::bad", bad, mutates_args=())(torch.zeros(2))


def test_results_are_checked_whichever_kernel_runs(registry: Registry, ns: str) -> None:
    op = define(registry, ns)

    def bad(x: Tensor) -> None:
        return None

    op.register_kernel("cuda", bad)
    with pytest.raises(KernelError, match="does not fit the schema") as caught:
        run_at(op, "CUDA", torch.zeros(1))
    assert caught.value.where == located(bad)
    assert caught.value.fix is not None


def test_the_hint_to_a_misfit_helps(registry: Registry, ns: str) -> None:
    for value, hint in ((A, "torch.from_numpy"), (None, "return the result"), ((T,), "return the value itself")):
        op = define(registry, ns, lambda x, value=value: value, schema="(Tensor x) -> Tensor")
        with pytest.raises(KernelError, match=hint):
            op(torch.zeros(1))


# Results share no memory ----------------------------------------------------------------------------------------

ALIASES: list[tuple[str, Any, str]] = [
    ("(Tensor x) -> Tensor", lambda x: x, "the return is argument 'x'"),
    ("(Tensor x) -> Tensor", lambda x: x[:1], "the return shares memory with argument 'x'"),
    ("(Tensor x) -> Tensor", lambda x: x.detach(), "the return shares memory with argument 'x'"),
    ("(Tensor x, *, int n=0) -> Tensor", lambda x, *, n: x.view(-1), "the return shares memory with argument 'x'"),
    ("(Tensor x) -> (Tensor, Tensor)", lambda x: (x + 1, x), "return 1 is argument 'x'"),
    ("(Tensor x) -> (Tensor, Tensor)", lambda x: (x.t(), x + 1), "return 0 shares memory with argument 'x'"),
    ("(Tensor x) -> Tensor[]", lambda x: [x + 1, x[0]], r"the return\[1\] shares memory with argument 'x'"),
    ("(Tensor x) -> (Tensor, Tensor[])", lambda x: (x + 1, [x + 1, x]), r"return 1\[1\] is argument 'x'"),
]


@pytest.mark.parity(19)
@pytest.mark.parametrize(("schema", "kernel", "phrase"), ALIASES)
def test_outputs_that_alias_an_input(registry: Registry, ns: str, schema: str, kernel: Any, phrase: str) -> None:
    op = define(registry, ns, kernel, schema=schema)
    with pytest.raises(RuntimeError, match=f"{ns}::f: {phrase}; an output may not alias") as caught:
        op(torch.zeros(3))
    assert isinstance(caught.value, AliasError)
    assert caught.value.argument is not None
    assert caught.value.argument.strip("'") == "x"
    assert caught.value.where == located(kernel)
    assert caught.value.fix is not None


@pytest.mark.parity(19)
def test_an_output_that_aliases_an_item_of_a_list(registry: Registry, ns: str) -> None:
    op = define(registry, ns, lambda xs: xs[1], schema="(Tensor[] xs) -> Tensor")
    with pytest.raises(AliasError, match=r"the return is argument 'xs'\[1\]; an output may not alias"):
        op([torch.zeros(3), torch.zeros(3)])
    op = define(registry, ns, lambda xs: [xs[0].clone(), xs[2]], schema="(Tensor?[] xs) -> Tensor[]")
    with pytest.raises(AliasError, match=r"the return\[1\] is argument 'xs'\[2\]; an output may not alias"):
        op([torch.zeros(3), None, torch.zeros(3)])


@pytest.mark.parity(19)
def test_an_output_that_aliases_a_keyword_argument(registry: Registry, ns: str) -> None:
    def kernel(x: Tensor, *, y: Tensor) -> Tensor:
        return y

    with torch.library._scoped_library(ns, "FRAGMENT") as lib:
        lib.define("f(Tensor x, *, Tensor y) -> Tensor")
        op = registry.adopt(f"{ns}::f")
        op.register_kernel("cpu", kernel, lib=lib)
        with pytest.raises(AliasError, match="the return is argument 'y'; an output may not alias") as caught:
            op(torch.zeros(3), y=torch.zeros(3))
        assert caught.value.where == located(kernel)


@pytest.mark.parity(19)
def test_two_outputs_that_alias_each_other(registry: Registry, ns: str) -> None:
    def twice(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x + 1
        return y, y

    def halves(x: Tensor) -> list[Tensor]:
        return list((x + 1).split(1))

    op = registry.custom_op(f"{ns}::twice", twice, mutates_args=())
    with pytest.raises(AliasError, match="return 1 is return 0; an output may not alias"):
        op(torch.zeros(2))
    op = registry.custom_op(f"{ns}::halves", halves, mutates_args=())
    with pytest.raises(
        AliasError, match=r"the return\[1\] shares memory with the return\[0\]; an output may not alias"
    ):
        op(torch.zeros(2))


@pytest.mark.parity(19)
def test_a_mutated_input_may_not_be_returned(registry: Registry, ns: str) -> None:
    def kernel(x: Tensor, y: Tensor) -> Tensor:
        return y.add_(1)

    op = registry.custom_op(f"{ns}::f", kernel, mutates_args=("y",))
    with pytest.raises(RuntimeError, match="the return is argument 'y'; an output may not alias") as caught:
        op(torch.zeros(2), torch.zeros(2))
    assert caught.value.where == located(kernel)  # type: ignore[attr-defined]


@pytest.mark.parity(19)
def test_aliasing_is_looked_for_in_every_call(registry: Registry, ns: str) -> None:
    op = define(registry, ns, lambda x: x.contiguous())
    x = torch.randn(3, 2)
    for _ in range(3):
        assert_close(op(x.t()), x.t())
        with pytest.raises(RuntimeError, match="may not alias"):
            op(x)


@pytest.mark.compile
@pytest.mark.parity(19)
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_aliasing_is_looked_for_in_every_mode(registry: Registry, ns: str, context: Any) -> None:
    op = define(registry, ns, lambda x: x.view_as(x))
    op.register_fake(torch.empty_like)
    op.register_autograd(lambda ctx, grad: grad)
    with context():
        for x in (torch.randn(3), torch.randn(3, requires_grad=True)):
            with pytest.raises(RuntimeError, match="may not alias"):
                op(x)
            with pytest.raises(RuntimeError, match="may not alias"):
                torch.compile(op, fullgraph=True, backend="aot_eager")(x)


@pytest.mark.parity(19)
def test_the_error_names_the_kernel_that_ran(registry: Registry, ns: str) -> None:
    op = define(registry, ns)

    def special(x: Tensor) -> Tensor:
        return x

    op.register_kernel(["cpu", "cuda"], constant(1))
    op.register_kernel("cuda", special)
    assert which(op, "CPU") == 1
    with pytest.raises(AliasError) as caught:
        run_at(op, "CUDA", torch.zeros(1))
    assert caught.value.where == located(special)


@pytest.mark.parity(19)
def test_what_shares_no_memory_is_no_alias(registry: Registry, ns: str) -> None:
    op = define(registry, ns, lambda xs: [torch.empty(0) for _ in xs], schema="(Tensor[] xs) -> Tensor[]")
    assert [x.numel() for x in op([torch.empty(0), torch.empty(0)])] == [0, 0]
    schema, x = "(Tensor x, Tensor y) -> (Tensor, Tensor)", torch.zeros(3)
    op = define(registry, ns, lambda x, y: (x.clone(), y.clone()), schema=schema)
    assert_close(op(x, x), (x, x))  # the inputs may be one


@pytest.mark.parity(19)
def test_aliasing_next_to_a_tensor_without_a_storage(registry: Registry, ns: str) -> None:
    op = define(registry, ns, lambda x, y: y, schema="(Tensor x, Tensor y) -> Tensor")
    with pytest.raises(RuntimeError, match="the return is argument 'y'; an output may not alias"):
        op(torch.eye(2).to_sparse(), torch.ones(2))


class Plain(Tensor):
    """A subclass whose instances reach the kernels."""


@pytest.mark.parity(19)
def test_aliasing_of_a_plain_subclass(registry: Registry, ns: str) -> None:
    op = define(registry, ns, lambda x: x)
    with pytest.raises(AliasError, match="the return is argument 'x'"):
        op(torch.zeros(2).as_subclass(Plain))
