"""Ops that write, and have arguments with names that torch's functionalization uses for parameters of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from customops import Registry
from customops._torch.functionalization import RESERVED

pytestmark = pytest.mark.compile

SCHEMAS = {
    "by position": "(Tensor(a!) x, {name}) -> ()",
    "by keyword": "(Tensor(a!) x, *, {name}) -> ()",
    "new tensor": "(Tensor(a!) x, {name}) -> Tensor",
    "new list": "(Tensor(a!) x, *, {name}) -> Tensor[]",
}


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("form", SCHEMAS)
@pytest.mark.parametrize("name", sorted(RESERVED))
def test_a_number(registry: Registry, ns: str, name: str, form: str, backend: str) -> None:
    if backend == "inductor" and name not in ("mode", "self"):
        pytest.skip("the backends see the same variant of the op")
    if name == "self" and "*" in SCHEMAS[form]:
        pytest.skip("FakeTensorMode of torch takes no keyword-only argument of this name")
    result = {"new tensor": lambda x: x * 2, "new list": lambda x: [x * 2, x * 3]}.get(form, lambda x: None)

    def kernel(x: torch.Tensor, *args: int, **kwargs: int) -> Any:
        (by,) = (*args, *kwargs.values())
        x.add_(by)
        return result(x)

    schema = SCHEMAS[form].format(name=f"int {name}")
    op = registry.custom_op(f"{ns}::f", kernel, schema=schema)
    op.register_fake(lambda x, *args, **kwargs: result(torch.empty_like(x)))

    def call(x: torch.Tensor) -> Any:
        y = x.clone()
        got = op(y, **{name: 3}) if "*" in schema else op(y, 3)
        return y, got

    x = torch.arange(4.0)
    torch.testing.assert_close(torch.compile(call, backend=backend, fullgraph=True)(x), call(x))


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_a_tensor_that_is_written(registry: Registry, ns: str, name: str) -> None:
    schema = f"(Tensor x, Tensor(a!) {name}) -> ()"

    def kernel(*args: torch.Tensor) -> None:
        args[1].mul_(args[0][1:])

    op = registry.custom_op(f"{ns}::f", kernel, schema=schema)

    def call(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        op(x, y[1:])
        return y

    x = torch.arange(3.0)
    torch.testing.assert_close(torch.compile(call, backend="aot_eager", fullgraph=True)(x), call(x))
