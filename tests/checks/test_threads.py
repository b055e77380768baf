"""test_threads: calls at the same time do not disturb each other."""

from __future__ import annotations

import gc
import itertools
import sys
import threading
import time

import pytest
import torch
from helpers.numeric_checks import Finds
from torch import Tensor

import customops
from customops.checks import threads

aten = torch.ops.aten


@pytest.fixture
def op(registry: customops.Registry, ns: str) -> Finds:
    return Finds(threads.check, registry, ns)


def doubled(x: Tensor) -> Tensor:
    return x * 2


WRONG = "two calls at the same time, in two threads"


def test_a_buffer_that_calls_share(op: Finds) -> None:
    buffer = torch.zeros(5)

    def f(x: Tensor) -> Tensor:
        buffer.copy_(x)
        twice = buffer * 2
        thrice = buffer * 3
        return twice + thrice

    op.finds(f, torch.randn(5), match=WRONG)


def test_turns_are_the_same_each_time(op: Finds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_MOST_CALLS", 0)  # none at the same time
    monkeypatch.setattr(threads, "_WAIT", 60.0)
    order: list[float] = []

    def f(x: Tensor) -> Tensor:
        first = float(x[0])
        order.append(first)
        total = x + 1
        order.append(-first)
        return total * 2

    orders = []
    for _ in range(3):
        op.passes(f, torch.arange(1.0, 6.0))
        orders.append([*order])
        order.clear()
    assert orders[0] == orders[1] == orders[2]
    steps = orders[0]
    assert any(one > 0 and other > 0 for one, other in itertools.pairwise(steps)), "one call began within another"


@pytest.mark.parametrize("late", [0, 1])
def test_turns_do_not_depend_on_which_thread_comes_first(late: int) -> None:
    turns = threads._Turns(60.0, 60.0)
    order: list[int] = []

    def run(number: int) -> None:
        if number == late:
            time.sleep(0.05)
        turns.begin(number)
        for _ in range(40):
            order.append(number)
            turns.step(number)
        turns.end(number)

    both = [threading.Thread(target=run, args=(number,)) for number in (0, 1)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert order[:10] == [0, 1, 0, 1, 0, 1, 0, 1, 0, 1]
    assert len(order) == 80


class Finalized:
    """A cycle, which only the garbage collector frees, with a finalizer that has several lines."""

    def __init__(self) -> None:
        self.own = self

    def __del__(self) -> None:
        one = 1
        two = one + 1
        del one, two


def test_turns_do_not_depend_on_the_garbage_collector(op: Finds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_MOST_CALLS", 0)
    monkeypatch.setattr(threads, "_WAIT", 60.0)
    order: list[float] = []

    def f(x: Tensor) -> Tensor:
        order.append(float(x[0]))
        garbage = [Finalized() for _ in range(5)]
        del garbage
        order.append(-float(x[0]))
        return x * 2

    orders, before = [], gc.get_threshold()
    try:
        for threshold in (3, 7, 1_000):
            gc.set_threshold(threshold, 2, 2)
            op.passes(f, torch.arange(1.0, 6.0))
            orders.append([*order])
            order.clear()
    finally:
        gc.set_threshold(*before)
    assert orders[0] == orders[1] == orders[2]


def test_a_buffer_in_one_line(op: Finds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_MOST_CALLS", 0)
    buffer = torch.zeros(5)

    def f(x: Tensor) -> Tensor:
        return buffer.copy_(x) * 2

    op.finds(f, torch.randn(5), match=WRONG)


def test_a_lock(op: Finds) -> None:
    buffer = torch.zeros(5)
    lock = threading.Lock()

    def f(x: Tensor) -> Tensor:
        with lock:
            buffer.copy_(x)
            twice = buffer * 2
            thrice = buffer * 3
        return twice + thrice

    op.passes(f, torch.randn(5))


def test_what_only_one_thread_has(op: Finds) -> None:
    local = threading.local()
    local.factor = 2

    def f(x: Tensor) -> Tensor:
        return x * local.factor

    op.finds(f, torch.randn(5), match="fails in a thread other than the main one")


def test_calls_that_wait_for_each_other(op: Finds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_PATIENCE", 0.3)
    monkeypatch.setattr(threads, "_CALLS", 1)
    released, before = threading.Event(), set(threading.enumerate())

    def f(x: Tensor) -> Tensor:
        if threading.current_thread() is not threading.main_thread():
            released.wait(60)
        return x * 2

    op.finds(f, torch.randn(5), match="do not end")
    released.set()
    for thread in {*threading.enumerate()} - before:
        thread.join(60)  # the op is to outlive its calls


def test_right_operators(op: Finds) -> None:
    interval = sys.getswitchinterval()
    op.passes(doubled, torch.randn(5))
    op.passes(aten.add_.Tensor, torch.randn(3), torch.randn(3))
    op.has_nothing(aten.native_dropout.default, torch.rand(5), 0.5, True)
    assert sys.getswitchinterval() == interval
