"""Ops that write to their inputs: values, version counters, gradients of what else is there, compiled code."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Sequence
from typing import Any, List, Optional

import numpy as np
import pytest
import torch
from helpers.warm import PYTHON
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

from customops import Registry, Tag
from customops.errors import KernelError


def bumps(call: Callable[[], Any], *tensors: Tensor) -> list[int]:
    """By how much a call raises the version counter of each tensor."""
    before = [tensor._version for tensor in tensors]
    call()
    return [tensor._version - old for tensor, old in zip(tensors, before, strict=True)]


def write(*tensors: Tensor) -> None:
    """Set to 7 behind autograd's back, as a C++ or Triton kernel does: no aten op that counts versions."""
    for tensor in tensors:
        tensor.numpy()[...] = 7


# Versions -------------------------------------------------------------------------------------------------------


@pytest.mark.parity(20)
def test_versions_of_what_is_mutated_go_up_and_no_others(registry: Registry, ns: str) -> None:
    def f(w: Tensor, x: Tensor, y: Tensor, z: Tensor) -> None:
        write(w, y)

    op = registry.custom_op(f"{ns}::f", f, mutates_args={"w", "y"})
    w, x, y, z = (torch.zeros(2) for _ in range(4))
    assert bumps(lambda: op(w, x, y, z), w, x, y, z) == [1, 0, 1, 0]
    assert bumps(lambda: op(w, z=z, y=y, x=x), w, x, y, z) == [1, 0, 1, 0]
    assert_close([w, x, y, z], [torch.full((2,), 7.0), torch.zeros(2)] * 2)


@pytest.mark.parity(20)
@pytest.mark.parametrize("hint", [Sequence[Tensor], List[Tensor], list[Tensor], list[Optional[Tensor]]])
def test_versions_in_lists(registry: Registry, ns: str, hint: Any) -> None:
    def f(xs: Any, ys: Any) -> None:
        write(*(x for x in xs if x is not None))

    f.__annotations__ |= {"xs": hint, "ys": hint}
    op = registry.custom_op(f"{ns}::f", f, mutates_args=("xs",))
    a, b, c, d = (torch.zeros(2) for _ in range(4))
    assert bumps(lambda: op([a, b], [c, d]), a, b, c, d) == [1, 1, 0, 0]
    assert bumps(lambda: op((a,), [b, c]), a, b, c, d) == [1, 0, 0, 0]
    assert bumps(lambda: op([], [a]), a) == [0]
    if hint == list[Optional[Tensor]]:
        assert bumps(lambda: op([None, a, None], [None, b]), a, b) == [1, 0]
    assert_close([a, b, c, d], [torch.full((2,), 7.0)] * 2 + [torch.zeros(2)] * 2)


@pytest.mark.parity(20)
@pytest.mark.parametrize("hint", [Optional[list[Tensor]], Optional[Sequence[Optional[Tensor]]]])
def test_versions_in_optional_lists(registry: Registry, ns: str, hint: Any) -> None:
    def f(x: Tensor, ys: Any = None) -> None:
        write(*(y for y in ys or () if y is not None))

    f.__annotations__ |= {"ys": hint}
    op = registry.custom_op(f"{ns}::f", f, mutates_args=("ys",))
    x, a, b = (torch.zeros(2) for _ in range(3))
    assert bumps(lambda: op(x), x) == [0]
    assert bumps(lambda: op(x, None), x) == [0]
    assert bumps(lambda: op(x, []), x) == [0]
    assert bumps(lambda: op(x, ys=(a, b)), x, a, b) == [0, 1, 1]
    assert_close([x, a, b], [torch.zeros(2), *[torch.full((2,), 7.0)] * 2])


@pytest.mark.parity(20)
def test_an_optional_argument_is_counted_when_it_is_there(registry: Registry, ns: str) -> None:
    def f(x: Tensor, y: Optional[Tensor] = None, z: Optional[Tensor] = None) -> None:
        write(*(tensor for tensor in (y, z) if tensor is not None))

    op = registry.custom_op(f"{ns}::f", f, mutates_args=("y", "z"))
    x, y, z = (torch.zeros(2) for _ in range(3))
    assert bumps(lambda: op(x), x, y, z) == [0, 0, 0]
    assert bumps(lambda: op(x, None, None), x, y, z) == [0, 0, 0]
    assert bumps(lambda: op(x, y), x, y, z) == [0, 1, 0]
    assert bumps(lambda: op(x, z=z), x, y, z) == [0, 0, 1]
    assert bumps(lambda: op(x, z=z, y=y), x, y, z) == [0, 1, 1]
    assert_close([x, y, z], [torch.zeros(2), torch.full((2,), 7.0), torch.full((2,), 7.0)])


@pytest.mark.parity(20)
def test_unknown_counts_everything(registry: Registry, ns: str) -> None:
    def f(x: Tensor, n: int, y: Optional[Tensor], zs: list[Tensor], ws: list[Optional[Tensor]]) -> None:
        write(x)

    op = registry.custom_op(f"{ns}::f", f, mutates_args="unknown")
    x, y, z, w = (torch.zeros(2) for _ in range(4))
    assert bumps(lambda: op(x, 3, y, [z], [None, w]), x, y, z, w) == [1, 1, 1, 1]
    assert bumps(lambda: op(x, 3, None, [z, z], []), x, y, z, w) == [1, 0, 2, 0]
    assert x.tolist() == [7, 7]


@pytest.mark.parity(20)
def test_versions_by_manual_schema_and_of_a_lent_op(registry: Registry, ns: str) -> None:
    op = registry.custom_op(
        f"{ns}::f", lambda x, y: write(y), mutates_args=("y",), schema="(Tensor x, Tensor(a!) y) -> ()"
    )
    x, y = torch.zeros(2), torch.zeros(2)
    assert bumps(lambda: op(x, y), x, y) == [0, 1]
    assert bumps(lambda: getattr(torch.ops, ns).f(x, y), x, y) == [0, 1]
    assert bumps(lambda: op._opoverload(x, y=y), x, y) == [0, 1]


@pytest.mark.parity(20)
@pytest.mark.parametrize("context", [torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_versions_in_every_grad_mode(registry: Registry, ns: str, context: Any, requires_grad: bool) -> None:
    op = registry.custom_op(f"{ns}::f", lambda x, y: None, mutates_args=("y",), schema="(Tensor x, Tensor(a!) y) -> ()")
    x, y = torch.zeros(2, requires_grad=requires_grad), torch.zeros(2)
    with context():
        becomes_part_of_a_graph = requires_grad and torch.is_grad_enabled()  # autograd counts that, too
        assert bumps(lambda: op(x, y), x, y) == [0, 1 + becomes_part_of_a_graph]


@pytest.mark.parity(20)
def test_versions_agree_with_aten(registry: Registry, ns: str) -> None:
    def add_into(x: Tensor, y: Tensor) -> None:
        np.add(x.numpy(), y.numpy(), out=x.numpy())

    op = registry.custom_op(f"{ns}::f", add_into, mutates_args=("x",))
    y = torch.ones(2)

    def compare(make: Callable[[], tuple[Tensor, list[Tensor]]]) -> None:
        (x, watched), (other, others) = make(), make()
        assert bumps(lambda: op(x, y), *watched) == bumps(lambda: other.add_(y), *others)
        assert_close(watched, others)

    def plain() -> tuple[Tensor, list[Tensor]]:
        x = torch.zeros(2)
        return x, [x]

    def view() -> tuple[Tensor, list[Tensor]]:
        base = torch.zeros(3, 2)
        return base[1], [base]

    def detached() -> tuple[Tensor, list[Tensor]]:
        base = torch.zeros(2, requires_grad=True)
        return base.detach(), [base]

    def two() -> tuple[Tensor, list[Tensor]]:
        base = TwoTensor(torch.zeros(2), torch.ones(2))
        return base, [base]

    for make in (plain, view, detached, two):
        compare(make)


@pytest.mark.parity(20)
def test_a_stale_saved_tensor_is_noticed(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::f", write, mutates_args=("x",), schema="(Tensor(a!) x) -> ()")
    x = torch.ones(2, requires_grad=True)
    y = x * 1
    z = (y * y).sum()
    op(y.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.backward()


@pytest.mark.parity(20)
def test_versions_with_a_mode_and_in_inference_mode(registry: Registry, ns: str) -> None:
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    op = registry.custom_op(f"{ns}::f", write, mutates_args=("x",), schema="(Tensor(a!) x) -> ()")
    x = torch.zeros(2)
    with Mode():
        assert bumps(lambda: op(x), x) == [1]
    with torch.inference_mode():
        y = torch.zeros(2)
        op(y)
    assert_close([x, y], [torch.full((2,), 7.0)] * 2)


@pytest.mark.process
@pytest.mark.parity(20)
@pytest.mark.parametrize(
    "definition",
    [
        "f(x: Tensor) -> None, mutates_args=('x',)",
        "f(x: Tensor, y: Optional[Tensor] = None) -> None, mutates_args='unknown'",
        "f(x: Tensor) -> Tensor, mutates_args=('x',), tags=Tag.inplace",
        "f(*, out: Tensor) -> Tensor, mutates_args=('out',), tags=Tag.out",
    ],
)
def test_defining_and_calling_emits_no_warning(definition: str, ns: str) -> None:
    head, options = definition.split(", mutates_args=")
    call = "f(out=torch.ones(2))" if "out:" in head else "f(torch.ones(2))"
    script = f"""
import torch, warnings
torch.set_warn_always(True)
from typing import Optional
from torch import Tensor
import customops
from customops import Tag

def {head}:
    return {"out" if "out:" in head else "x" if "-> Tensor" in head else "None"}

f = customops.custom_op("{ns}::f", f, mutates_args={options})
{call}
f.register_kernel("cpu", f.__wrapped__)
f.register_kernel(["cpu", "cuda"], f.__wrapped__)
{call}
f.unregister()
f = customops.custom_op("{ns}::f", f.__wrapped__, mutates_args={options})
{call}
print("done")
"""
    done = subprocess.run([PYTHON, "-W", "error", "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("done\n", "")


# Values in every context ----------------------------------------------------------------------------------------


def define(registry: Registry, ns: str) -> Any:
    def sort_into(x: Tensor, values: Tensor, indices: Optional[Tensor]) -> None:
        order = np.argsort(x.numpy())
        values.copy_(torch.from_numpy(np.sort(x.numpy())))
        if indices is not None:
            indices.copy_(torch.from_numpy(order))

    return registry.custom_op(f"{ns}::sort_into", sort_into, mutates_args=("values", "indices"), device_types="cpu")


def use(op: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    values, indices = torch.empty_like(x), torch.empty(x.shape, dtype=torch.int64)
    op(x, values, indices)
    op(x, values, None)
    return values, indices


def expected(x: Tensor) -> tuple[Tensor, Tensor]:
    return tuple(torch.sort(x))  # type: ignore[return-value]


def test_results_come_back_in_the_arguments(registry: Registry, ns: str) -> None:
    op, x = define(registry, ns), torch.randn(9)
    assert_close(use(op, x), expected(x))
    assert op(x, torch.empty(9), None) is None
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert_close(use(op, x), expected(x))


@pytest.mark.compile
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled(registry: Registry, ns: str, backend: str) -> None:
    op, x = define(registry, ns), torch.randn(9)
    assert_close(torch.compile(lambda x: use(op, x), fullgraph=True, backend=backend)(x), expected(x))


@pytest.mark.compile
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_writes_reach_the_inputs_their_views_and_bases(registry: Registry, ns: str, backend: str) -> None:
    def fill(xs: list[Tensor], by: float) -> None:
        for x in xs:
            x.fill_(by)

    op = registry.custom_op(f"{ns}::fill", fill, mutates_args=("xs",))

    def program(x: Tensor, y: Tensor) -> Tensor:
        op([x, y[1]], 3.0)
        total = x.sum() + y.sum()
        op([y.t()[0]], 5.0)
        return total + y.sum()

    def by_hand(x: Tensor, y: Tensor) -> Tensor:
        x.fill_(3.0)
        y[1].fill_(3.0)
        total = x.sum() + y.sum()
        y.t()[0].fill_(5.0)
        return total + y.sum()

    inputs, others = (torch.ones(2), torch.ones(3, 2)), (torch.ones(2), torch.ones(3, 2))
    result = torch.compile(program, fullgraph=True, backend=backend)(*inputs)
    assert_close(result, by_hand(*others))
    assert_close(inputs, others)


@pytest.mark.compile
def test_a_write_orders_the_ops_around_it(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::f", write, mutates_args=("x",), schema="(Tensor(a!) x) -> ()")

    def program(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x.clone()
        before = y + 1
        op(y)
        after = y + 1
        y.zero_()
        return before, after, y

    got = torch.compile(program, fullgraph=True, backend="aot_eager")(torch.zeros(2))
    assert_close(got, (torch.ones(2), torch.full((2,), 8.0), torch.zeros(2)))


def test_fake_and_meta_tensors_need_no_fake_impl(registry: Registry, ns: str) -> None:
    op = define(registry, ns)
    with FakeTensorMode():
        x = torch.empty(3)
        assert op(x, torch.empty(3), None) is None
        values, indices = use(op, x)
        assert (values.shape, indices.dtype) == ((3,), torch.int64)
    meta = torch.empty(3, device="meta")
    assert bumps(lambda: op(meta, meta.clone(), None), meta) == [0]


@pytest.mark.compile
def test_an_op_that_writes_and_returns_needs_a_fake(registry: Registry, ns: str) -> None:
    def pop(x: Tensor) -> Tensor:
        last = x[-1].clone()
        x[-1] = 0
        return last

    op = registry.custom_op(f"{ns}::pop", pop, mutates_args=("x",))
    x = torch.tensor([1.0, 2.0])
    assert op(x).item() == 2
    assert x.tolist() == [1, 0]
    with FakeTensorMode(), pytest.raises(RuntimeError, match="There was no fake impl registered"):
        op(torch.empty(2))
    op.register_fake(lambda x: x.new_empty(()))

    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        last = op(x)
        return last * 2, x + 1

    for backend in ("eager", "aot_eager"):
        x = torch.tensor([1.0, 2.0])
        got = torch.compile(program, fullgraph=True, backend=backend)(x)
        assert_close(got, (torch.tensor(4.0), torch.tensor([2.0, 1.0])))
        assert x.tolist() == [1, 0]


def test_a_kernel_that_returns_something_all_the_same(registry: Registry, ns: str) -> None:
    def kernel(x: Tensor) -> None:
        return x.zero_()  # type: ignore[return-value]

    op = registry.custom_op(f"{ns}::f", kernel, mutates_args=("x",))
    with pytest.raises(KernelError, match=f"{ns}::f: the kernel returned something that does not fit") as caught:
        op(torch.ones(2))
    assert (caught.value.expected, caught.value.got) == ("None", "Tensor")
    assert caught.value.where == f"kernel ({kernel.__code__.co_filename}:{kernel.__code__.co_firstlineno})"


def test_device_kernels_of_a_mutating_op(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::f", write, mutates_args=("x",), schema="(Tensor(a!) x) -> ()")

    def ones(x: Tensor) -> None:
        x.numpy()[...] = 1

    op.register_kernel(["cpu", "cuda"], ones)
    x, y = torch.zeros(2), torch.zeros(2)
    assert bumps(lambda: op(x), x) == [1]
    with op.set_kernel_enabled("cpu", False):
        assert bumps(lambda: op(y), y) == [1]
    assert_close([x, y], [torch.ones(2), torch.full((2,), 7.0)])


def test_wrapper_subclass_and_plain_subclass(registry: Registry, ns: str) -> None:
    class Plain(Tensor):
        pass

    op = registry.custom_op(f"{ns}::f", write, mutates_args=("x",), schema="(Tensor(a!) x) -> ()")
    two, plain = TwoTensor(torch.zeros(2), torch.ones(2)), torch.zeros(2).as_subclass(Plain)
    assert bumps(lambda: op(two), two) == [1]
    assert bumps(lambda: op(plain), plain) == [1]
    assert [two.a.tolist(), two.b.tolist(), plain.tolist()] == [[7, 7]] * 3


def test_from_several_threads(registry: Registry, ns: str) -> None:
    op, tensors, wrong = define(registry, ns), [torch.randn(50) for _ in range(4)], []

    def work(x: Tensor) -> None:
        try:
            for _ in range(50):
                assert_close(use(op, x), expected(x))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(x,)) for x in tensors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


# Gradients: never past a write as if it had not happened -----------------------------------------------------------


def double_list_(x: Tensor, xs: List[Tensor]) -> Tensor:
    for item in xs:
        item.mul_(2)
    return x.clone()


@pytest.mark.parity(20)
def test_backward_of_what_was_written_raises(registry: Registry, ns: str) -> None:
    double_ = registry.custom_op(f"{ns}::double_", lambda x: None, schema="(Tensor(a!) x) -> ()", mutates_args=("x",))
    double_.register_kernel("cpu", lambda x: x.mul_(2) and None)
    leaf = torch.ones(1, requires_grad=True)
    y = leaf * 3
    double_(y)
    assert y.item() == 6
    with pytest.raises(RuntimeError, match=f"{ns}::double_: .*no autograd formula"):
        y.backward()


def test_backward_of_an_item_that_was_written_raises(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::op", double_list_, mutates_args=("xs",))
    leaf = torch.ones(1, requires_grad=True)
    y, z = leaf * 3, torch.ones(1)
    op(leaf, [y, z])
    assert (y.item(), z.item()) == (6, 2)
    for item in (y, z):
        with pytest.raises(RuntimeError, match="no autograd formula"):
            item.backward()


def test_an_inplace_op_has_the_history_of_its_argument(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::op", double_inplace, mutates_args=("x",), tags=Tag.inplace)
    y = torch.ones(1, requires_grad=True) * 3
    assert op(y) is y
    with pytest.raises(RuntimeError, match="no autograd formula"):
        y.backward()


def double_inplace(x: Tensor) -> Tensor:
    return x.mul_(2)


def test_what_is_not_written_keeps_its_history(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::op", double_list_, mutates_args=("xs",))
    leaf = torch.ones(1, requires_grad=True)
    x = leaf * 5
    op(x, [torch.ones(1)])
    (gradient,) = torch.autograd.grad(x, leaf)
    assert gradient.item() == 5


@pytest.mark.compile
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_backward_of_what_was_written_raises(registry: Registry, ns: str, backend: str) -> None:
    op = registry.custom_op(f"{ns}::op", double_inplace, mutates_args=("x",), tags=Tag.inplace)

    def program(x: Tensor) -> Tensor:
        y = x * 3
        op(y)
        return y * 1

    compiled = torch.compile(program, backend=backend, fullgraph=True)
    assert compiled(torch.ones(1)).item() == 6
    with pytest.raises(Exception, match="no autograd formula"):
        compiled(torch.ones(1, requires_grad=True)).backward()


def test_without_gradients_leaves_may_be_written(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::op", double_inplace, mutates_args=("x",), tags=Tag.inplace)
    leaf = torch.ones(1, requires_grad=True)
    with torch.no_grad():
        assert op(leaf) is leaf
    assert leaf.item() == 2
    assert leaf.is_leaf


def test_a_view_of_a_leaf_may_not_be_written(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::op", double_inplace, mutates_args=("x",), tags=Tag.inplace)
    with pytest.raises(RuntimeError, match="a view of a leaf Variable that requires grad"):
        op(torch.ones(2, requires_grad=True)[:1])
