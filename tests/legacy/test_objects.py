"""The object layer under the old functions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import List

import pytest
import torch
from helpers.legacies import op_of, sine
from helpers.tensors import leaf
from torch import Tensor
from torch.library import Library

import customops
from customops import legacy
from customops.errors import UnregisteredError
from customops.legacy import objects


@pytest.fixture(autouse=True)
def _clean(ns: str) -> Iterator[None]:
    """Destroy what a test leaves in the global registry, as users' fixtures do."""
    yield
    for key in [key for key in objects.global_registry if key.startswith(f"{ns}")]:
        objects.global_registry[key]._destroy()


# The object layer -----------------------------------------------------------------------------------------------


@pytest.mark.parity(77)
def test_get_op(ns: str, lib: Library) -> None:
    assert objects.get_op("aten::sin") is torch.ops.aten.sin.default
    lib.define("bar(Tensor x) -> Tensor")
    assert objects.get_op(f"{ns}::bar") is getattr(torch.ops, ns).bar.default
    legacy.custom_op(f"{ns}::foo", "(Tensor x) -> Tensor")
    assert objects.get_op(f"{ns}::foo") is getattr(torch.ops, ns).foo.default
    for missing in (f"{ns}::baz", "no_such_namespace::foo", "foo"):
        with pytest.raises(ValueError, match=r"Could not find the operator|namespace"):
            objects.get_op(missing)


@pytest.mark.parity(77)
def test_the_global_registry(ns: str, lib: Library) -> None:
    lib.define("bar(Tensor x) -> Tensor")
    legacy.custom_op(f"{ns}::foo", "(Tensor x) -> Tensor")
    legacy.impl(f"{ns}::bar", func=torch.sin)
    assert isinstance(objects.global_registry, dict)
    keys = [key for key in list(objects.global_registry.keys()) if key.startswith(f"{ns}::")]
    assert keys == [f"{ns}::foo", f"{ns}::bar"]
    for key in keys:
        assert isinstance(objects.global_registry[key], objects.CustomOp)
        objects.global_registry[key]._destroy()
    assert not [key for key in objects.global_registry if key.startswith(f"{ns}::")]


@pytest.mark.parity(77)
def test_the_object_is_callable(ns: str) -> None:
    @objects.custom_op(f"{ns}::foo")
    def foo(x: Tensor, ys: List[Tensor]) -> Tensor:
        "Adds."
        raise NotImplementedError

    @foo.impl(["cpu", "cuda"])
    def add(x: Tensor, ys: list[Tensor]) -> Tensor:
        return x + sum(ys)

    foo.impl_save_for_backward()(lambda inputs, output: len(inputs.ys))
    foo.impl_backward()(lambda ctx, n, grad: {"x": grad, "ys": [grad] * n})
    assert objects.global_registry[f"{ns}::foo"] is foo
    assert repr(foo) == f'<CustomOp(op="{ns}::foo")>'
    assert (foo.__name__, foo.__doc__, foo.__module__) == ("foo", "Adds.", __name__)
    y = leaf(1.0)
    foo(torch.ones(1), [y, y]).backward()
    assert y.grad is not None
    assert y.grad.item() == 2
    foo._destroy()
    foo._destroy()  # an op that is gone already is none to complain about
    with pytest.raises(UnregisteredError):
        foo(y, [y])


@pytest.mark.parity(77)
def test_new_registrations_on_an_old_op(ns: str) -> None:
    legacy.custom_op(f"{ns}::foo", "(Tensor x) -> Tensor")
    new = customops.adopt(f"{ns}::foo")
    new.register_kernel("cpu", torch.sin)
    torch.library.register_fake(f"{ns}::foo", torch.empty_like)
    new.register_autograd(lambda ctx, grad: grad * 7)
    x = leaf(1.0)
    new(x).backward()
    assert x.grad is not None
    assert x.grad.item() == 7
    assert new(torch.ones(2, device="meta")).shape == (2,)
    legacy._destroy(f"{ns}::foo")
    legacy.custom_op(f"{ns}::foo", "(Tensor x) -> Tensor")
    with pytest.raises(NotImplementedError, match="no fake impl or Meta kernel"):
        op_of(ns)(torch.ones(2, device="meta"))


@pytest.mark.parity(77)
def test_opcheck_passes(ns: str) -> None:
    op = sine(ns)
    legacy.impl_abstract(f"{ns}::foo", func=torch.empty_like)
    result = customops.opcheck(op, (leaf(0.1, 0.2),))
    assert set(result.values()) == {"SUCCESS"}
