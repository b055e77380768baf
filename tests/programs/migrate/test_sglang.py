"""SGLang: fakes by the name of an argument, and ops of other libraries' functions."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any, Optional

import pytest
import torch
from helpers.compiling import dynamo
from helpers.migration import Twins, message, overload
from torch import Tensor
from torch.library import Library

from customops.errors import MissingFakeError

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


def add(x: Tensor, y: Tensor) -> Tensor:  # the second example of SGLang's own docstring
    return x.add_(y)


def store_cache(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, indices: Tensor, *, row_bytes: int = 0, num_split: int = 0
) -> None:
    k_cache[indices], v_cache[indices] = k, v


def gather(x: Tensor, out: Optional[Tensor] = None) -> Tensor:
    return x if out is None else out.copy_(x)


def two(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 2), torch.rand(n, 2) + 1


KINDS: list[tuple[Any, dict[str, Any], Any]] = [
    (add_one_, {"mutates_args": ["x"]}, lambda n: (torch.randn(n),)),
    (add_into, {"mutates_args": ["x"], "out_shape": "y"}, two),
    (quantize, {"fake_impl": quantize_fake}, two),
    (add, {"mutates_args": ["x"], "out_shape": "x"}, two),
    (store_cache, {"mutates_args": ["k_cache", "v_cache"]}, lambda n: (*two(n), *two(2 * n), torch.arange(n))),
    (gather, {"mutates_args": ["out"], "out_shape": "x"}, lambda n: (torch.randn(n), torch.zeros(n))),
    (gather, {"mutates_args": ["out"], "out_shape": "x"}, lambda n: (torch.randn(n),)),
]


@pytest.mark.filterwarnings("ignore:.*_hand.*must not also be an input")  # torch, of what is compiled by hand
@pytest.mark.parametrize(("fn", "options", "arguments"), KINDS)
@pytest.mark.parametrize("eager", [True, False])
def test_same_as_by_hand(
    helpers: ModuleType, by_hand: ModuleType, hand: Library, fn: Any, options: dict[str, Any], arguments: Any,
    eager: bool,
) -> None:  # fmt: skip
    # A position stands for a name.
    given = options | ({"out_shape": 0} if options.get("out_shape") == "x" and eager else {})
    ours = helpers.register_custom_op(op_name=f"{fn.__name__}_{eager}", eager=eager, **given)(fn)
    theirs = by_hand.sglang(hand, f"{fn.__name__}_{eager}", fn, **options)
    twins = Twins(ours, theirs, fn, arguments)
    twins.check() if eager else twins.check_compiled()  # the first call is in compiled code
    twins.check_eager()


@pytest.mark.parametrize("eager", [True, False])
def test_an_argument_comes_back_whole(helpers: ModuleType, eager: bool) -> None:
    """Inductor writes into what it takes for new: by hand into `x`."""
    op = helpers.register_custom_op(add, op_name=f"back_{eager}", mutates_args=["x"], out_shape=0, eager=eager)
    x, y = torch.ones(3), torch.ones(3)
    assert torch.compile(lambda x: op(x, y) * 10, fullgraph=True)(x).tolist() == [20] * 3
    assert x.tolist() == [2] * 3


@pytest.mark.parametrize(("device", "key"), [("xpu", "XPU"), ("privateuseone", "PrivateUse1"), ("cuda", "CUDA")])
def test_the_key_is_that_of_the_device(
    helpers: ModuleType, by_hand: ModuleType, hand: Library, monkeypatch: pytest.MonkeyPatch, device: str, key: str
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **options: torch.device(device))
    ours = helpers.register_custom_op(op_name=f"on_{device}", mutates_args=["x"])(add_one_)
    theirs = by_hand.sglang(hand, f"on_{device}", add_one_, ["x"], key=key)
    for op in (ours, theirs):
        name = overload(op)._schema.name
        assert torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
        assert not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU")
        with pytest.raises(NotImplementedError, match="CPU"):
            op(torch.zeros(1))


def test_the_function_below(helpers: ModuleType, lib: Library) -> None:
    for fn in (add_one_, quantize):  # the second does nothing
        helpers.direct_register_custom_op(op_name="below", op_func=fn, mutates_args=["x"], target_lib=lib)
    x = torch.zeros(2)
    getattr(torch.ops, lib.ns).below(x)
    assert x.tolist() == [1, 1]


def test_calls_are_logged(
    helpers: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    silent = helpers.register_custom_op(add_one_, op_name="silent", mutates_args=["x"])
    monkeypatch.setenv("SGLANG_KERNEL_API_LOGLEVEL", "10")
    monkeypatch.setenv("SGLANG_KERNEL_API_DUMP_DIR", str(tmp_path))
    loud = helpers.register_custom_op(add_one_, op_name="loud", mutates_args=["x"], eager=False)
    x = torch.zeros(2)
    with helpers.LOGS, caplog.at_level("INFO", "customops"):
        silent(x), loud(x)
        torch.compile(loud, fullgraph=True, backend="aot_eager")(x)
        assert ["::loud" in line for line in caplog.messages] == [True, True]
        assert len([*tmp_path.iterdir()]) == 2
        assert helpers.debug_torch_op(add_one_, "silent") is silent
        silent(x)
        assert "::silent" in caplog.messages[-1]
    assert x.tolist() == [4, 4]


def test_an_op_is_found_by_name_before_its_first_call(helpers: ModuleType) -> None:
    helpers.register_custom_op(add_one_, op_name="later", mutates_args=["x"], eager=False)
    x = torch.zeros(2)
    torch.compile(lambda: getattr(torch.ops, helpers.NAMESPACE).later(x), fullgraph=True, backend="aot_eager")()
    assert x.tolist() == [1, 1]


def test_twice_is_once(helpers: ModuleType, by_hand: ModuleType, hand: Library) -> None:
    for eager in (True, False):
        first = helpers.register_custom_op(add_one_, op_name=f"once_{eager}", mutates_args=["x"], eager=eager)
        again = helpers.register_custom_op(add_into, op_name=f"once_{eager}", mutates_args=["x"], eager=eager)
        assert again is first
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
            assert "::wrong" in text
            assert wrong in text

    with pytest.raises(TypeError, match="give one of them"):
        helpers.register_custom_op(add_into, op_name="both", out_shape=0, fake_impl=torch.empty_like)
    # An op with a result, of which nothing is said: by hand its fake returns None.
    assert on_meta(theirs) is None
    with pytest.raises(MissingFakeError, match="register_fake"):
        on_meta(ours)
    with pytest.raises(TypeError, match="add_into: out_shape='z' is not a parameter; expected one of x, y, alpha"):
        helpers.register_custom_op(add_into, op_name="misnamed", mutates_args=["x"], out_shape="z")


def on_meta(op: Any) -> Any:
    return op(torch.ones(2, device="meta"), torch.ones(2, device="meta"))
