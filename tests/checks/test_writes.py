"""test_writes: memory around tensors, and what a schema declares of writes and aliases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.libraries import Ops

import customops
from customops import Registry
from customops.checks import NotExercised, Trial, writes
from customops.errors import CheckError

aten = torch.ops.aten
WRITES = "(Tensor(a!) x, Tensor y) -> ()"


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(8, 6)[::2, ::2]


@pytest.fixture
def y() -> torch.Tensor:
    return torch.randn(4, 3)


def flat(x: torch.Tensor) -> torch.Tensor:
    return x.as_strided((x.numel(),), (1,))


def to_a_copy(x: torch.Tensor, y: torch.Tensor) -> None:
    x.contiguous().copy_(y)


def around(x: torch.Tensor, y: torch.Tensor) -> None:
    flat(x).copy_(y.reshape(-1))


def by_numpy(x: torch.Tensor, y: torch.Tensor) -> None:
    x.numpy()[:] = y.numpy()


def transposes(x: torch.Tensor, y: torch.Tensor) -> None:
    x.t_()


def other_storage(x: torch.Tensor, y: torch.Tensor) -> None:
    x.data = y


def wide_rows(x: torch.Tensor, y: torch.Tensor) -> None:
    """Write an element more a row, except in the last one."""
    x.copy_(y)
    if x.stride(0) > x.shape[1]:
        x.as_strided((len(x) - 1, 1), (x.stride(0), 1), x.storage_offset() + x.shape[1]).fill_(7)


@pytest.mark.parametrize(
    ("schema", "kernel", "message"),
    [
        ("(Tensor x, Tensor y) -> Tensor", lambda x, y: flat(x).sum() + y, "depends on memory outside"),
        (WRITES, around, "writes memory outside of argument x"),
        (WRITES, wide_rows, "writes memory outside of argument x"),
        (WRITES, by_numpy, "autograd does not notice that argument x is written"),
        (WRITES, transposes, "changes the sizes, strides or storage of argument x"),
        (WRITES, other_storage, "changes the sizes, strides or storage of argument x"),
        ("(Tensor(a!) x, Tensor y) -> Tensor(a!)", lambda x, y: x.copy_(y).clone(), "returns another tensor"),
        ("(Tensor(a) x, Tensor y) -> Tensor(a)", lambda x, y: x.clone(), "returns a copy"),
    ],
)
def test_faults(
    define: Ops, x: torch.Tensor, y: torch.Tensor, schema: str, kernel: Callable[..., Any], message: str
) -> None:
    before = x.clone(), y.clone()
    with pytest.raises(CheckError, match=message) as caught:
        writes.check_writes(Trial(define(f"f{schema}", kernel), (x, y)))
    assert caught.value.fix
    assert torch.equal(x, before[0])
    assert torch.equal(y, before[1])


def test_a_declared_write(define: Ops, x: torch.Tensor, y: torch.Tensor) -> None:
    op = define(f"f{WRITES}", to_a_copy)
    with pytest.raises(CheckError, match="argument x is declared as written, and no call was seen to write it"):
        writes.check_writes(Trial(op, (x, y)))
    writes.check_writes(Trial(op, (x.contiguous(), y)))


def test_each_member_of_a_list_is_written(define: Ops) -> None:
    def first_two(xs: list[torch.Tensor]) -> None:
        for x in xs[:2]:
            x.mul_(2)

    op = define("f(Tensor(a!)[] xs) -> ()", first_two)
    writes.check_writes(Trial(op, ([torch.ones(2), torch.ones(3)],)))
    with pytest.raises(CheckError, match=r"argument xs\[2\] is declared as written"):
        writes.check_writes(Trial(op, ([torch.ones(2), torch.ones(3), torch.ones(4)],)))


def test_what_leaves_nothing_to_write_is_no_finding(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::advance", mutates_args={"places"})
    def advance(places: torch.Tensor, by: torch.Tensor) -> None:
        places.add_(by)

    args = torch.zeros(4, dtype=torch.int64), torch.tensor([0, 1, 1, 1])
    assert not customops.check(advance, [args], only="test_writes").failures


def in_place(x: torch.Tensor, y: torch.Tensor) -> None:
    x.copy_(y)


def only_if_infinite(x: torch.Tensor, y: torch.Tensor) -> None:
    if not y.isfinite().all():
        x.fill_(1)


def only_if_negative(x: torch.Tensor, y: torch.Tensor) -> None:
    x.clamp_(min=0)


@pytest.mark.parametrize(
    ("schema", "kernel"),
    [
        ("(Tensor x, Tensor y) -> Tensor", torch.add),
        ("(Tensor x, Tensor y) -> Tensor", lambda x, y: torch.empty(3)),
        (WRITES, in_place),
        (WRITES, only_if_infinite),
        (WRITES, only_if_negative),
        ("(Tensor(a!) x, Tensor y) -> Tensor(a!)", lambda x, y: x.copy_(y)),
        ("(Tensor(a) x, Tensor y) -> Tensor(a)", lambda x, y: x.t()),
        ("(Tensor(a) x, Tensor y) -> Tensor(a)", lambda x, y: x.contiguous()),
    ],
)
def test_right_kernels(define: Ops, x: torch.Tensor, y: torch.Tensor, schema: str, kernel: Callable[..., Any]) -> None:
    writes.check_writes(Trial(define(f"f{schema}", kernel), (x.abs(), y)))


def test_a_write_that_an_option_turns_on(define: Ops, x: torch.Tensor, y: torch.Tensor) -> None:
    def kernel(x: torch.Tensor, y: torch.Tensor, training: bool) -> None:
        if training:
            x.copy_(y)

    writes.check_writes(Trial(define("f(Tensor(a!) x, Tensor y, bool training) -> ()", kernel), (x, y, False)))


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.mul.Tensor, (torch.randn(4, 3), torch.randn(8, 6)[::2, ::2])),
        (aten.t_.default, (torch.randn(4, 3),)),
        (aten.reshape.default, (torch.randn(8, 6)[::2, ::2], [12])),
        (aten.native_dropout.default, (torch.randn(4, 3), 0.5, True)),
        (aten.index_put_.default, (torch.randn(4, 3), [torch.tensor([1, 3])], torch.randn(3))),
        (aten.fft_fft.default, (torch.randn(4, 3),)),
    ],
)
def test_operators_of_torch(op: Any, args: tuple[Any, ...]) -> None:
    writes.check_writes(Trial(op, args))


def test_nothing_to_try() -> None:
    with pytest.raises(NotExercised, match="works on storages"):
        writes.check_writes(Trial(aten.as_strided.default, (torch.randn(4), (2,), (1,))))
    with pytest.raises(NotExercised, match="no input"):
        writes.check_writes(Trial(aten.clone.default, (torch.randn(0),)))


def test_inputs_that_cannot_be_surrounded(registry: Registry, ns: str) -> None:
    """Without a declared write, nothing is left to try for inputs that share memory."""

    @registry.custom_op(f"{ns}::add", mutates_args=())
    def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y

    memory = torch.rand(4)
    writes.check_writes(Trial(add._opoverload, (memory[:3].clone(), memory[1:].clone())))
    with pytest.raises(NotExercised, match="share memory or are expanded"):
        writes.check_writes(Trial(add._opoverload, (memory[:3], memory[1:])))
