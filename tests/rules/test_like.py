"""Fakes that are declared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch._subclasses import FakeTensorMode

import customops
from customops import Registry, like, opcheck
from customops._dispatch import fingerprint
from customops._rules.fake import DeclaredFake
from customops.errors import CallbackError, KernelError, RegistrationError


def fit(
    x: Tensor, y: Tensor, n: int, dtype: torch.dtype | None = None, sizes: Sequence[int] = (1, 2)
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_zeros(n, 2).to(dtype or x.dtype), x * 2, y.new_zeros(sizes)


FIT = (like("x", shape=("n", 2), dtype="dtype"), like("x"), like("y", shape="sizes"))


def looks(tensors: Any) -> list[Any]:
    return [(tuple(each.shape), each.stride(), each.dtype, each.device.type) for each in tensors]


LAYOUTS = {
    "contiguous": torch.ones(2, 3, 4, 5),
    "channels_last": torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "permuted": torch.ones(2, 3, 4, 5).permute(3, 1, 0, 2),
    "sliced": torch.ones(4, 3, 4, 5)[::2],
    "expanded": torch.ones(2, 1, 4, 5).expand(2, 3, 4, 5),
    "scalar": torch.ones(()),
    "empty": torch.ones(0, 3),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_are_those_of_empty_like(registry: Registry, ns: str, layout: str) -> None:
    def double(x: Tensor) -> Tensor:
        return x * 2

    op = registry.custom_op(f"{ns}::f", double, mutates_args=())
    op.register_fake(like("x"))
    x = LAYOUTS[layout]
    with FakeTensorMode() as mode:
        fake = op(mode.from_tensor(x))
    assert looks([fake]) == looks([op(x)])
    meta = op(torch.empty_strided(x.shape, x.stride(), device="meta"))
    assert looks([meta])[0][:3] == looks([op(x)])[0][:3]


@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_names_are_those_of_arguments(registry: Registry, ns: str, dtype: Any) -> None:
    op = registry.custom_op(f"{ns}::f", fit, mutates_args=())
    assert op.register_fake(FIT) is FIT
    args = torch.ones(4, 3).t(), torch.ones(2, dtype=torch.int64), 5, dtype
    with FakeTensorMode() as mode:
        fakes = op(*(mode.from_tensor(each) if isinstance(each, Tensor) else each for each in args))
    assert looks(fakes) == looks(op(*args))


@pytest.mark.compile
def test_compiled_with_dynamic_sizes(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::f", fit, mutates_args=())
    op.register_fake(FIT)
    count = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(op, fullgraph=True, dynamic=True, backend=count)
    for rows, n in ((4, 5), (6, 7)):
        args = torch.rand(rows, 3), torch.ones(2, dtype=torch.int64), n, torch.float16
        for got, expected in zip(compiled(*args), op(*args), strict=True):
            torch.testing.assert_close(got, expected)
    assert count.frame_count == 1


@pytest.mark.compile
def test_inductor(registry: Registry, ns: str) -> None:
    def outer(x: Tensor, y: Tensor) -> Tensor:
        return x[:, None] * y[None]

    op = registry.custom_op(f"{ns}::outer", outer, mutates_args=())
    op.register_fake(like("x", shape=lambda y, x: (len(x), len(y)), dtype="y"))
    x, y = torch.rand(3, dtype=torch.float64), torch.rand(4, dtype=torch.float64)
    compiled = torch.compile(lambda x, y: op(x, y).t() + 1, fullgraph=True)
    torch.testing.assert_close(compiled(x, y), torch.outer(x, y).t() + 1)


def test_other_ways_to_say_it(registry: Registry, ns: str) -> None:
    def f(x: Tensor, y: Tensor, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return x.new_empty(y.shape), x.contiguous().clone(), x.to(device) + 1, x.new_empty(2, 3).t()

    op = registry.custom_op(f"{ns}::f", f, mutates_args=())
    declared = (
        like("x", shape="y", device="y"),
        like("x", memory_format=torch.contiguous_format),
        like("x", device="device", dtype=torch.int8),
        like("x", shape=[3, 2]),
    )
    customops.register_fake(f"{ns}::f", declared)
    with FakeTensorMode() as mode:
        x, y = torch.ones(4, 3).t(), torch.ones(2, 2, dtype=torch.int8)
        fakes = op(mode.from_tensor(x), mode.from_tensor(y), torch.device("cuda"))
    assert looks(fakes) == [
        ((2, 2), (2, 1), torch.float32, "cpu"),
        ((3, 4), (4, 1), torch.float32, "cpu"),
        ((3, 4), (1, 3), torch.int8, "cuda"),
        ((3, 2), (2, 1), torch.float32, "cpu"),
    ]


def test_lists_and_none(registry: Registry, ns: str) -> None:
    def doubled(xs: list[Tensor]) -> list[Tensor]:
        return [x * 2 for x in xs]

    def maybe(x: Tensor, y: Tensor | None = None) -> Tensor:
        return x if y is None else y * 2

    op = registry.custom_op(f"{ns}::doubled", doubled, mutates_args=())
    op.register_fake(like("xs"))
    xs = [torch.ones(2, device="meta"), torch.ones(3, 1, dtype=torch.int8, device="meta")]
    assert looks(op(xs)) == looks(xs)
    op = registry.custom_op(f"{ns}::maybe", maybe, mutates_args=())
    op.register_fake(like("y"))
    assert op(xs[0], xs[1]).shape == (3, 1)
    with pytest.raises(KernelError, match="fake impl returned something that does not fit"):
        op(xs[0])


def test_the_kernel_as_fake(registry: Registry, ns: str) -> None:
    def f(x: Tensor, n: int = 2) -> tuple[Tensor, Tensor]:
        return x.sin().repeat(n, 1), x.argmax(0)

    op = registry.custom_op(f"{ns}::f", f, mutates_args=(), device_types="cpu")
    op.register_fake("kernel")
    x = torch.rand(3, 4)
    with FakeTensorMode() as mode:
        fakes = op(mode.from_tensor(x))
    assert looks(fakes) == looks(f(x))
    assert set(opcheck(op, (x,), test_utils=("test_schema", "test_faketensor")).values()) == {"SUCCESS"}
    op.register_kernel("cpu", lambda x, n: (x, x))
    assert looks(op(x.to("meta")))[1][0] == (4,)


def test_ops_that_only_write_need_none(registry: Registry, ns: str) -> None:
    def clear(x: Tensor) -> None:
        x.zero_()

    op = registry.custom_op(f"{ns}::clear", clear, mutates_args={"x"})
    with FakeTensorMode() as mode:
        assert op(mode.from_tensor(torch.ones(2))) is None
    compiled = torch.compile(lambda x: (op(x), x + 1)[1], fullgraph=True, backend="aot_eager")
    assert compiled(torch.ones(2)).tolist() == [1, 1]


@pytest.mark.parametrize(
    ("declared", "argument", "expected"),
    [
        ((like("q"), *FIT[1:]), "like", "x, y"),
        ((like("n"), *FIT[1:]), "like", "x, y"),
        ((like("x", dtype="sizes"), *FIT[1:]), "dtype", "x, y, dtype"),
        ((like("x", device="dtype"), *FIT[1:]), "device", "x, y"),
        ((like("x", shape="n"), *FIT[1:]), "shape", "x, y, sizes"),
        ((like("x", shape=("x",)), *FIT[1:]), "shape", "n"),
        ((like("x", shape=(1.5,)), *FIT[1:]), "shape", "an int, 0 or more, or the name of an int argument"),  # type: ignore[arg-type]
        ((like("x", shape=(-1,)), *FIT[1:]), "shape", "an int, 0 or more, or the name of an int argument"),
        ((like("x", shape=lambda *x: x), *FIT[1:]), "shape", "some of x, y, n, dtype, sizes"),
        ((like("x", shape=lambda z: z), *FIT[1:]), "shape", "some of x, y, n, dtype, sizes"),
        ((like("x", shape=3), *FIT[1:]), "shape", "sizes, a name, or a function"),  # type: ignore[arg-type]
        (FIT[:2], None, "3 for"),
        (FIT[1], None, "3 for"),
    ],
)
def test_names_that_are_none(registry: Registry, ns: str, declared: Any, argument: str | None, expected: str) -> None:
    op = registry.custom_op(f"{ns}::f", fit, mutates_args=())
    with pytest.raises(RegistrationError) as caught:
        op.register_fake(declared)
    assert caught.value.argument == argument
    assert expected in str(caught.value.expected)
    assert "test_like.py" in str(caught.value.where)
    assert op._abstract_fn is None


def doubled_by_transforms(x: Tensor) -> Tensor:
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad((leaf * leaf).sum(), leaf)
    return torch.vmap(lambda row: row / 2)(gradient) + torch.func.grad(lambda z: (z * z).sum() / 2)(x)


@pytest.mark.compile
def test_the_kernel_is_traced_in_the_state_of_a_kernel(registry: Registry, ns: str) -> None:
    """It may use autograd and `torch.func`, also where AOTAutograd has left them out."""
    op = registry.custom_op(f"{ns}::f", doubled_by_transforms, mutates_args=())
    op.register_fake("kernel")
    compiled = torch.compile(lambda x: op(x) + 1, fullgraph=True, backend="aot_eager", dynamic=True)
    for size in (2, 3):
        torch.testing.assert_close(compiled(torch.ones(size)), torch.full((size,), 3.0))


def test_an_error_of_the_kernel_as_a_fake_names_the_kernel(registry: Registry, ns: str) -> None:
    def forgotten(x: Tensor) -> Tensor:
        return None  # type: ignore[return-value]

    op = registry.custom_op(f"{ns}::f", forgotten, mutates_args=())
    op.register_fake("kernel")
    with pytest.raises(KernelError) as caught:
        op(torch.ones(2, device="meta"))
    assert "forgotten" in str(caught.value.where)


def test_sizes_below_zero_are_none(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::f", lambda x, n: x.new_empty(n), schema="(Tensor x, int n) -> Tensor")
    op.register_fake(like("x", shape=("n",)))
    with pytest.raises(KernelError, match=r"gives no sizes(.|\n)*each 0 or more(.|\n)*-1"):
        op(torch.ones(2, device="meta"), -1)
    assert op(torch.ones(2, device="meta"), 0).shape == (0,)


def first_of(xs: list[Tensor]) -> Tensor:
    return xs[0].clone()


def clones(x: Tensor) -> list[Tensor]:
    return [x.clone()]


def count(x: Tensor) -> int:
    return len(x)


@pytest.mark.parametrize(("fn", "name"), [(first_of, "xs"), (clones, "x"), (count, "x")])
def test_results_that_are_like_no_argument(registry: Registry, ns: str, fn: Any, name: str) -> None:
    op = registry.custom_op(f"{ns}::f", fn, mutates_args=())
    with pytest.raises(RegistrationError, match=f"makes what {name} is, and the op returns something else"):
        op.register_fake(like(name))
    assert op._abstract_fn is None


def test_a_tuple_of_one(registry: Registry, ns: str) -> None:
    def one(x: Tensor) -> tuple[Tensor]:
        return (x.clone(),)

    op = registry.custom_op(f"{ns}::f", one, mutates_args=())
    for fake in (like("x"), (like("x"),)):
        op.register_fake(fake)
        (result,) = op(torch.ones(2, device="meta"))
        assert result.shape == (2,)


@pytest.mark.parametrize("shape", ["y", lambda y: y, lambda x: 5, lambda x: "n", lambda x: (1.5,)], ids=range(5))
def test_a_shape_that_gives_no_sizes_names_the_op(registry: Registry, ns: str, shape: Any) -> None:
    def maybe(x: Tensor, y: Tensor | None = None) -> Tensor:
        return x.clone()

    op = registry.custom_op(f"{ns}::f", maybe, mutates_args=())
    op.register_fake(like("x", shape=shape))
    with pytest.raises(KernelError, match="f: the shape of a like\\(\\) gives no sizes") as caught:
        op(torch.ones(2, device="meta"))
    assert shape == "y" or "test_like.py" in str(caught.value.where)


def test_other_things_are_no_fakes(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::f", fit, mutates_args=())
    for wrong in ("kernels", 3, (), (like("x"), torch.empty_like), [None]):
        with pytest.raises(CallbackError, match="must be callable, or be declared"):
            op.register_fake(wrong)
    library = torch.library.Library(ns, "FRAGMENT")
    library.define("g(Tensor x) -> Tensor")
    with pytest.raises(RegistrationError, match="it was defined without one"):
        registry.adopt(f"{ns}::g").register_fake("kernel")
    registry.adopt(f"{ns}::g").register_fake(like("x"))
    assert getattr(torch.ops, ns).g(torch.ones(3, device="meta")).shape == (3,)


def test_equal_declarations_have_one_digest(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::f", fit, mutates_args=())

    def digest(declared: Any) -> str:
        op.register_fake(declared)
        assert isinstance(op._rules.fake.fn, DeclaredFake)
        return fingerprint.fingerprint({f"{ns}::f"}) or ""

    first = digest(FIT)
    assert digest((like("x", shape=("n", 2), dtype="dtype"), like("x"), like("y", shape="sizes"))) == first
    assert digest((like("x", shape=("n", 3), dtype="dtype"), like("x"), like("y", shape="sizes"))) != first
