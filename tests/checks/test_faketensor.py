"""test_faketensor: every way in which a fake impl can promise something else than the operator returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.libraries import Ops
from torch import Tensor

import customops
from customops import Registry, _torch
from customops.checks import NotExercised, _memory, fake_check, opcheck
from customops.errors import CheckError

aten = torch.ops.aten
COMPOSITE = "CompositeImplicitAutograd"


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(4, 3)


def open_size(**limits: int) -> torch.SymInt:
    size: torch.SymInt = torch.library.get_ctx().new_dynamic_size(**limits)
    return size


WRONG: dict[str, tuple[str, Callable[..., Any], Callable[..., Any], str]] = {
    "shape": ("Tensor", lambda x: x**2, lambda x: x.unsqueeze(1) ** 2, "Shapes .* are not equal"),
    "rank": ("Tensor", lambda x: x.sum(), lambda x: x.sum(0, True), "Shapes .* are not equal"),
    "stride": ("Tensor", lambda x: x.t().clone(), lambda x: x.new_empty(3, 4), "Stride mismatch"),
    "stride, permuted": (
        "Tensor",
        lambda x: x.new_empty(3, 4).t(),
        lambda x: torch.empty_like(x),
        "Stride mismatch",
    ),
    "offset": ("Tensor", lambda x: torch.cat([x, x])[4:], torch.empty_like, "storage offsets differ"),
    "dtype": ("Tensor", lambda x: x.double(), torch.empty_like, "Dtypes torch.float64 and torch.float32"),
    "device": ("Tensor", torch.clone, lambda x: torch.empty_like(x, device="cuda"), "Devices cpu and cuda:0"),
    "layout": ("Tensor", lambda x: x.to_sparse(), torch.empty_like, "Layouts"),
    "number of outputs": ("Tensor[]", lambda x: [x + 1], lambda x: [x + 1, x + 2], "number of values differs"),
    "tensor for None": ("Tensor?", lambda x: None, torch.empty_like, "the kinds differ"),
    "None for tensor": ("Tensor?", torch.clone, lambda x: None, "the kinds differ"),
    "int": ("int", lambda x: 3, lambda x: 4, "output 0: the values differ"),
    "float": ("(Tensor, float)", lambda x: (x + 1, 0.5), lambda x: (x + 1, 1.5), "output 1: the values differ"),
    "bool": ("(Tensor, bool)", lambda x: (x + 1, True), lambda x: (x + 1, False), "output 1: the values differ"),
    "returns its input": ("Tensor", torch.clone, lambda x: x, "output 0 and argument x: the aliasing differs"),
    "views its input": ("Tensor", torch.clone, lambda x: x.view_as(x), "output 0 and argument x: the aliasing differs"),
    "outputs share memory": (
        "(Tensor, Tensor)",
        lambda x: (x + 1, x + 1),
        lambda x: (lambda y: (y, y.view_as(y)))(x + 1),
        "output 0 and output 1: the aliasing differs",
    ),
    "second output": ("(Tensor, Tensor)", lambda x: (x + 1, x[0] + 1), lambda x: (x + 1, x + 1), "output 1: Shapes"),
    "item of a list": ("Tensor[]", lambda x: [x + 1, x[0] + 1], lambda x: [x + 1, x + 1], r"output 0\[1\]: Shapes"),
}


@pytest.mark.parametrize(("returns", "kernel", "fake", "message"), WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_wrong_fakes(
    define: Ops,
    x: torch.Tensor,
    returns: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    message: str,
    requires_grad: bool,
) -> None:
    op = define(f"f(Tensor x) -> {returns}", kernel, fake)
    with pytest.raises(CheckError, match=message) as caught:
        fake_check(op, (x.requires_grad_(requires_grad),), {})
    assert caught.value.op == op.name()
    assert len(str(caught.value).splitlines()) <= 4


def test_both_sides_are_shown(define: Ops, x: torch.Tensor) -> None:
    op = define("f(Tensor x) -> Tensor", torch.clone, lambda x: x.new_empty(2))
    with pytest.raises(CheckError) as caught:
        fake_check(op, (x,), {})
    assert caught.value.expected == "(4, 3) (the operator)"
    assert caught.value.got == "(2,) (its fake impl)"


RIGHT: dict[str, tuple[str, Callable[..., Any], Callable[..., Any]]] = {
    "same": ("Tensor", torch.clone, torch.empty_like),
    "list for a tuple": ("(Tensor, Tensor)", lambda x: (x + 1, x + 1), lambda x: [x + 1, x + 1]),
    "nothing": ("()", lambda x: None, lambda x: None),
    "None": ("Tensor?", lambda x: None, lambda x: None),
    "numbers": ("(int, float, bool)", lambda x: (3, float("nan"), True), lambda x: (3, float("nan"), True)),
    "undeclared view on both sides": ("Tensor", lambda x: x[:], lambda x: x[:]),
    "stride of one row": ("Tensor", lambda x: x[:1].clone(), lambda x: x.new_empty_strided((1, 3), (7, 1))),
    "empty": ("Tensor", lambda x: x[:0].t().clone(), lambda x: x.new_empty(3, 0)),
}


@pytest.mark.parametrize(("returns", "kernel", "fake"), RIGHT.values(), ids=RIGHT)
def test_right_fakes(
    define: Ops, x: torch.Tensor, returns: str, kernel: Callable[..., Any], fake: Callable[..., Any]
) -> None:
    fake_check(define(f"f(Tensor x) -> {returns}", kernel, fake), (x,), {})


# -- sizes that depend on the data -------------------------------------------------------------


def two_open(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.SymInt]:
    size = open_size()
    return x.new_empty(size), x.new_empty(2 * size + 1, size), size


def test_open_sizes_agree_with_any_size(define: Ops, x: torch.Tensor) -> None:
    def kernel(x: torch.Tensor) -> torch.Tensor:
        return x.nonzero().contiguous()

    op = define("f(Tensor x) -> Tensor", kernel, lambda x: x.new_empty(open_size(), 2, dtype=torch.int64))
    fake_check(op, (x,), {})
    fake_check(op, (x * 0,), {})


@pytest.mark.parametrize("size", [0, 1, 5])
def test_open_sizes_agree_with_one_another(define: Ops, x: torch.Tensor, size: int) -> None:
    def kernel(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
        return x.new_empty(size), x.new_empty(2 * size + 1, size), size

    fake_check(define("f(Tensor x) -> (Tensor, Tensor, SymInt)", kernel, two_open), (x,), {})


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([(2,), (6, 2), 2], r"output 1: Shapes \(6, 2\) and \(2\*u0 \+ 1, u0\)"),
        ([(2,), (5, 2), 3], "output 2: the values differ"),
    ],
)
def test_open_sizes_that_contradict_one_another(define: Ops, x: torch.Tensor, sizes: list[Any], message: str) -> None:
    def kernel(x: torch.Tensor) -> list[Any]:
        return [x.new_empty(size) if isinstance(size, tuple) else size for size in sizes]

    with pytest.raises(CheckError, match=message):
        fake_check(define("f(Tensor x) -> (Tensor, Tensor, SymInt)", kernel, two_open), (x,), {})


def test_open_sizes_have_limits(define: Ops, x: torch.Tensor) -> None:
    op = define("f(Tensor x) -> Tensor", lambda x: x[:1].clone(), lambda x: x.new_empty(open_size(min=2), 3))
    with pytest.raises(CheckError, match=r"Shapes .* are not equal") as caught:
        fake_check(op, (x,), {})
    assert "u0 is from 2 to int_oo" in str(caught.value)


def test_strides_of_open_sizes(define: Ops, x: torch.Tensor) -> None:
    right = define("right(Tensor x) -> Tensor", lambda x: x.new_empty(3, 2), lambda x: x.new_empty(3, open_size()))
    fake_check(right, (x,), {})
    wrong = define("wrong(Tensor x) -> Tensor", lambda x: x.new_empty(2, 3).t(), lambda x: x.new_empty(3, open_size()))
    with pytest.raises(CheckError, match="Stride mismatch"):
        fake_check(wrong, (x,), {})


# -- arguments that are written ----------------------------------------------------------------


def test_in_place(define: Ops, x: torch.Tensor) -> None:
    schema = "(Tensor(a!) x) -> Tensor(a!)"
    with pytest.raises(CheckError, match="it cannot be compiled") as caught:
        fake_check(define("untagged" + schema, lambda x: x.sin_(), lambda x: x), (x,), {})
    assert caught.value.argument == "x"
    assert "Tag.inplace" in str(caught.value.expected)
    fake_check(define("nothing(Tensor(a!) x) -> ()", lambda x: None, lambda x: None), (x,), {})
    with pytest.raises(CheckError, match="the aliasing differs"):
        fake_check(define("wrong" + schema, lambda x: x.sin_(), torch.empty_like), (x,), {})


def test_shape_of_a_written_argument(define: Ops, x: torch.Tensor) -> None:
    def resize(x: torch.Tensor) -> None:
        x.resize_(2, 6)

    op = define("f(Tensor(a!) x) -> ()", resize, lambda x: None)
    with pytest.raises(CheckError, match=r"argument x after the call: Shapes \(2, 6\) and \(4, 3\)"):
        fake_check(op, (x,), {})
    assert x.shape == (4, 3)


# -- fakes that fail ---------------------------------------------------------------------------


def test_no_fake(define: Ops, x: torch.Tensor) -> None:
    op = define("f(Tensor x) -> Tensor", torch.clone, None)
    with pytest.raises(CheckError, match=f"{define.ns}.f.default has no fake impl"):
        fake_check(op, (x,), {})


@torch.library.custom_op("checks_faketensor::no_fake", mutates_args=())
def no_fake(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def test_custom_op_without_fake(x: torch.Tensor) -> None:
    with pytest.raises(CheckError, match=r"no_fake\.default has no fake impl") as caught:
        fake_check(no_fake._opoverload, (x,), {})
    assert "no_fake.register_fake" in str(caught.value)


def test_fake_that_uses_a_real_tensor(define: Ops, x: torch.Tensor) -> None:
    constant = torch.ones(4, 3)
    op = define("f(Tensor x) -> Tensor", torch.clone, lambda x: x + constant)
    with pytest.raises(CheckError, match="fails on fake tensors, and not on real ones"):
        fake_check(op, (x,), {})


def test_kernel_that_fails(define: Ops, x: torch.Tensor) -> None:
    op = define("f(Tensor x) -> Tensor", lambda x: 1 / 0, torch.empty_like)
    with pytest.raises(CheckError, match="the operator itself fails on these inputs") as caught:
        fake_check(op, (x,), {})
    assert "ZeroDivisionError: division by zero" in str(caught.value)


def test_abstract_inputs_are_not_exercised() -> None:
    with pytest.raises(NotExercised, match="no data"):
        fake_check(aten.sin.default, (torch.empty(3, device="meta"),))


# -- what is run -------------------------------------------------------------------------------


def test_setup_of_autograd_is_not_run(define: Ops, x: torch.Tensor) -> None:
    op = define("f(Tensor x) -> Tensor", torch.clone, torch.empty_like)

    def refuse(*_args: Any) -> None:
        raise AssertionError("not the fake impl's business")

    torch.library.register_autograd(op, refuse, setup_context=refuse, lib=define.lib)
    fake_check(op, (x.requires_grad_(),), {})


def test_composites_are_run_in_parts(define: Ops, x: torch.Tensor) -> None:
    part = define("part(Tensor x) -> Tensor", torch.clone, torch.empty_like)
    fake_check(define("whole(Tensor x) -> Tensor", lambda x: part(x) + 1, None, "CompositeImplicitAutograd"), (x,), {})


square, flat = torch.randn(4, 4), torch.randn(4)
ATEN = {
    "sin": (aten.sin.default, (square.clone().requires_grad_(),), {}),
    "add_": (aten.add_.Tensor, (square, square), {}),
    "sort": (aten.sort.default, (square,), {}),
    "mm_out": (aten.mm.out, (square, square), {"out": torch.empty(4, 4)}),
    "sort_out, resized": (
        aten.sort.values,
        (square,),
        {"values": torch.empty(0), "indices": torch.empty(0, dtype=torch.int64)},
    ),
    "split": (aten.split.Tensor, (square, 2), {}),
    "t_": (aten.t_.default, (square,), {}),
    "resize_": (aten.resize_.default, (flat, [2, 2]), {}),
    "nonzero": (aten.nonzero.default, (square > 0,), {}),
    "item": (aten._local_scalar_dense.default, (torch.tensor(3.0),), {}),
    "float8": (aten.clone.default, (square.to(torch.float8_e5m2),), {}),
    "conj": (aten._conj.default, (torch.randn(3, dtype=torch.complex64),), {}),
    "sparse": (aten.clone.default, (torch.eye(3).to_sparse(),), {}),
    "factory": (aten.rand.default, ([3],), {"device": torch.device("cpu")}),
    "gaps": (aten.add.Tensor, (square[::2], square.t()[::2]), {}),
    "channels_last": (
        aten.conv2d.default,
        (torch.randn(1, 2, 5, 5).to(memory_format=torch.channels_last), torch.randn(3, 2, 2, 2)),
        {},
    ),
    "non-leaf": (aten.relu_.default, (square.clone().requires_grad_() * 2,), {}),
    "foreach": (aten._foreach_add_.Scalar, ([square, flat], 1), {}),
}


@pytest.mark.parametrize(("op", "args", "kwargs"), ATEN.values(), ids=ATEN)
def test_aten_passes(op: Any, args: Any, kwargs: Any) -> None:
    fake_check(op, args, kwargs)


def test_untraceable_operators_are_not_exercised() -> None:
    with pytest.raises(NotExercised, match="tagged as depending on data"):
        fake_check(aten.equal.default, (flat, flat), {})


def test_jagged_tensors() -> None:
    fake_check(aten.sin.default, (torch.nested.nested_tensor([torch.randn(2), torch.randn(3)], layout=torch.jagged),))


# -- composites, and what the dispatcher converts ------------------------------------------------


def test_tensors_given_for_numbers(define: Ops, x: torch.Tensor) -> None:
    """The dispatcher takes the number out of a tensor; on a fake it could not."""
    op = define(
        "fill(Tensor x, SymInt n, float s=1.0) -> Tensor",
        lambda x, n, s=1.0: x.new_full((n,), s),
        lambda x, n, s=1.0: x.new_empty(n),
    )
    fake_check(op, (x, torch.tensor(5), torch.tensor(2.0)), {})
    wrong = define("wrong(Tensor x, SymInt n) -> Tensor", lambda x, n: x.new_ones(n), lambda x, n: x.new_empty(n + 1))
    with pytest.raises(CheckError, match=r"Shapes \(5,\) and \(6,\) are not equal"):
        fake_check(wrong, (x, torch.tensor(5)), {})


def test_a_composite_that_reads_data_of_its_parts(define: Ops, x: torch.Tensor) -> None:
    part = define("part(Tensor x, SymInt n) -> Tensor", lambda x, n: x.new_ones(n), lambda x, n: x.new_empty(n))
    fits = define("fits(Tensor x) -> Tensor", lambda x: part(x, int(x.abs().sum().item())), None, COMPOSITE)
    fake_check(fits, (x,), {})
    wrong = define("wrong_part(Tensor x, SymInt n) -> Tensor", lambda x, n: x.new_ones(n), lambda x, n: x.new_empty(2))
    whole = define("whole(Tensor x) -> Tensor", lambda x: wrong(x, int(x.numel())), None, COMPOSITE)
    with pytest.raises(CheckError, match=r"Shapes \(12,\) and \(2,\) are not equal") as caught:
        fake_check(whole, (x,), {})
    assert caught.value.op == wrong.name()


def test_a_composite_of_aten_operators_that_reads_data_is_not_exercised(define: Ops, x: torch.Tensor) -> None:
    sign = define("sign(Tensor x) -> Tensor", lambda x: x + 1 if x.sum() > 0 else x - 1, None, COMPOSITE)
    with pytest.raises(NotExercised, match="made of aten operators, and reads the data"):
        fake_check(sign, (x,), {})
    plain = define("plain(Tensor x) -> Tensor", lambda x: x.sin() + 1, None, COMPOSITE)
    fake_check(plain, (x,), {})


def test_sizes_that_are_not_known_flow_through_a_composite(define: Ops, x: torch.Tensor) -> None:
    rows = define(
        "rows(Tensor x) -> Tensor",
        lambda x: x.nonzero().contiguous(),
        lambda x: x.new_empty(open_size(), 2, dtype=torch.int64),
    )
    twice = define("twice(Tensor x) -> Tensor", lambda x: x * 2, torch.empty_like)
    both = define("both(Tensor x) -> Tensor", lambda x: twice(rows(x)), None, COMPOSITE)
    assert all(result == "SUCCESS" for result in opcheck(both, (x,)).values())


def test_memory_of_sizes_that_are_not_known() -> None:
    """No guard on them."""
    with _torch.fakes.fake_mode():
        one = torch.ones(3).nonzero()
        assert _memory.share_memory(one, one.t())
        assert not _memory.share_memory(one, one + 1)
        assert not _memory.share_memory(torch.empty(0, 3), torch.empty(0, 3))


def test_conjugate_bits(define: Ops) -> None:
    z = torch.randn(3, dtype=torch.complex64)
    op = define("f(Tensor(a) x) -> Tensor(a)", lambda x: x.conj(), lambda x: x.view_as(x))
    with pytest.raises(CheckError, match="Conjugate bits"):
        fake_check(op, (z,), {})
    fake_check(define("g(Tensor(a) x) -> Tensor(a)", lambda x: x.conj(), lambda x: x.conj()), (z,), {})


def test_a_reference_that_reads_data(registry: Registry, ns: str) -> None:
    def entry(x: Tensor, at: Tensor) -> Tensor:
        return x[int(at)].clone()  # torch 2.15 traces x[at]

    op = registry.custom_op(f"{ns}::entry", lambda x, at: entry(x, at), schema="(Tensor x, Tensor at) -> Tensor")
    op.register_reference(entry)
    failure = customops.check(op, [(torch.randn(3), torch.tensor(1))], effort="quick").failures[0]
    assert "0-dimensional tensor" in str(failure.error.fix)
    assert "TORCH_LOGS" not in str(failure)
