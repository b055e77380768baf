"""SGLang: fakes by the name of an argument, ops of other libraries' functions, ops on demand."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from helpers.compiling import dynamo
from helpers.migration import Twins, message
from torch import Tensor
from torch.library import Library

from customops.errors import MissingFakeError, RegistrationError

pytestmark = pytest.mark.compile


def add_one_(x: Tensor) -> None:
    x.add_(1)


def add_into(x: Tensor, y: Tensor, alpha: float = 1.0) -> Tensor:
    x.add_(y, alpha=alpha)
    return x * 2


def quantize(x: Tensor, scale: Tensor) -> Tensor:
    return (x / scale).to(torch.int8)


def quantize_fake(x: Tensor, scale: Tensor) -> Tensor:
    return torch.empty_like(x, dtype=torch.int8)


def two(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 2), torch.rand(n, 2) + 1


KINDS: list[tuple[Any, dict[str, Any], Any]] = [
    (add_one_, {"mutates_args": ["x"]}, lambda n: (torch.randn(n),)),
    (add_into, {"mutates_args": ["x"], "out_shape": "y"}, two),
    (quantize, {"fake_impl": quantize_fake}, two),
]


@pytest.mark.parametrize(("fn", "options", "arguments"), KINDS, ids=[kind[0].__name__ for kind in KINDS])
@pytest.mark.parametrize("eager", [True, False])
def test_same_as_by_hand(
    helpers: ModuleType, by_hand: ModuleType, hand: Library, fn: Any, options: dict[str, Any], arguments: Any,
    eager: bool,
) -> None:  # fmt: skip
    # A position stands for a name.
    given = options | ({"out_shape": 1} if "out_shape" in options and eager else {})
    ours = helpers.register_custom_op(op_name=f"{fn.__name__}_{eager}", eager=eager, **given)(fn)
    theirs = by_hand.sglang(hand, f"{fn.__name__}_{eager}", fn, **options)
    twins = Twins(ours, theirs, fn, arguments)
    twins.check() if eager else twins.check_compiled()  # the first call is in compiled code
    twins.check_eager()


def test_an_op_on_demand_is_found_by_name(helpers: ModuleType) -> None:
    helpers.register_custom_op(add_one_, op_name="later", mutates_args=["x"], eager=False)
    assert not torch._C._dispatch_has_kernel(f"{helpers.NAMESPACE}::later")
    x = torch.zeros(2)
    torch.compile(lambda: getattr(torch.ops, helpers.NAMESPACE).later(x), fullgraph=True, backend="aot_eager")()
    assert x.tolist() == [1, 1]


def test_twice_is_once(helpers: ModuleType, by_hand: ModuleType, hand: Library) -> None:
    for eager in (True, False):
        first = helpers.register_custom_op(add_one_, op_name=f"once_{eager}", mutates_args=["x"], eager=eager)
        again = helpers.register_custom_op(add_into, op_name=f"once_{eager}", mutates_args=["x"], eager=eager)
        assert again is first
    assert not torch._C._dispatch_has_kernel(f"{helpers.NAMESPACE}::once_False")  # asking defined nothing
    packet = by_hand.sglang(hand, "once", add_one_, ["x"])
    assert by_hand.sglang(hand, "once", add_into, ["x"]) is packet


# Functions of other libraries -----------------------------------------------------------------------------------


def extern(x: Tensor, weight: Tensor, tokens: int, bias: float = 0.0) -> Tensor:
    assert tokens == 1 << (len(x) - 1).bit_length()
    return (x @ weight + bias).bfloat16()


def power_of_two(x: Tensor, **others: Any) -> int:
    assert set(others) == {"weight", "bias"}
    return 1 << (len(x) - 1).bit_length()


def test_arguments_that_the_kernel_computes(helpers: ModuleType, by_hand: ModuleType, hand: Library) -> None:
    """They are in no graph, so another size is no other graph."""
    options = {"out_shape": "x", "out_dtype": torch.bfloat16}
    ours = helpers.register_custom_op_from_extern(extern, computed_args={"tokens": power_of_two}, **options)

    def without_tokens(x: Tensor, weight: Tensor, bias: float = 0.0) -> Tensor:
        return extern(x, weight, power_of_two(x, weight=weight, bias=bias), bias)

    theirs = by_hand.sglang(hand, "extern", without_tokens, **options)
    arguments = lambda n: (torch.randn(n, 4).mT.contiguous().mT, torch.eye(4), 0.5)  # noqa: E731
    Twins(ours, theirs, without_tokens, arguments).check()

    counter = dynamo("testing").CompileCounter()
    compiled = torch.compile(ours, fullgraph=True, dynamic=True, backend=counter)
    for n in (3, 5, 17):
        assert compiled(*arguments(n)).shape == (n, 4)
    assert counter.frame_count == 1


# Mistakes -------------------------------------------------------------------------------------------------------


def test_errors(helpers: ModuleType, by_hand: ModuleType, hand: Library) -> None:
    ours = helpers.register_custom_op(add_into, op_name="wrong", mutates_args=["x"])
    theirs = by_hand.sglang(hand, "wrong", add_into, ["x"])
    x = torch.ones(2)
    for args, wrong in [((x,), "'y'"), ((x, "y"), "'y'"), ((x, x, "much"), "'alpha'")]:
        for op in (ours, theirs):
            text = message(lambda op=op, a=args: op(*a))
            assert "::wrong()" in text
            assert wrong in text

    with pytest.raises(TypeError, match="give one of them"):
        helpers.register_custom_op(add_into, op_name="both", out_shape=0, fake_impl=torch.empty_like)
    # An op with a result, of which nothing is said: by hand its fake returns None.
    assert on_meta(theirs) is None
    with pytest.raises(MissingFakeError, match="register_fake"):
        on_meta(ours)
    with pytest.raises(
        RegistrationError, match=r"like\(\) names something that the op does not have(.|\n)*expected: .*x, y"
    ):
        helpers.register_custom_op(add_into, op_name="misnamed", mutates_args=["x"], out_shape="z")


def on_meta(op: Any) -> Any:
    return op(torch.ones(2, device="meta"), torch.ones(2, device="meta"))
