"""`register_shapes`: validation, and what follows from a line."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import customops
from customops import Cost, CustomOpDef, Mut, Registry
from customops.errors import ArgumentError, DefinitionError, KernelError, SchemaError, UnsupportedError

LINE = "*batch n k, k m -> *batch n m"


def mm_fn(x: Tensor, y: Tensor) -> Tensor:
    return torch.from_numpy(x.detach().numpy() @ y.detach().numpy())


Op = CustomOpDef[..., Tensor]


class Pair(NamedTuple):
    values: Tensor
    indices: Tensor


@pytest.fixture
def mm(registry: Registry, ns: str) -> Op:
    op = registry.custom_op(f"{ns}::mm", mm_fn, mutates_args=())
    op.register_shapes(LINE, parallel="*batch n m", reduces="k", flops="2*batch*n*k*m")
    return op


def refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        call()
    assert message in str(caught.value)


# Validation -----------------------------------------------------------------------------------------------------------


def test_a_call_is_validated(mm: Op, ns: str) -> None:
    for x, y in ((torch.ones(2, 3), torch.ones(3, 4)), (torch.randn(5, 2, 3), torch.randn(3, 4))):
        torch.testing.assert_close(mm(x, y), x @ y)
    message = "k is 3 in x (argument 1) and 4 in y (argument 2)"
    overload = getattr(torch.ops, ns).mm
    for call in (mm, overload):
        refused(lambda call=call: call(torch.ones(2, 3), torch.ones(4, 4)), message)
    refused(
        lambda: mm(torch.ones(3), torch.ones(3, 4)), "x (argument 1) has 1 dimensions, and the line says *batch n k"
    )
    refused(lambda: mm(torch.ones(2, 3), torch.ones(3)), "y (argument 2) has 1 dimensions, and the line says k m")
    x = torch.ones(2, 3, requires_grad=True)
    refused(lambda: mm(x, torch.ones(4, 4)), message)
    with torch.inference_mode():
        refused(lambda: mm(torch.ones(2, 3), torch.ones(4, 4)), message)


def test_a_kernel_without_a_hash(registry: Registry, ns: str) -> None:
    class Kernel(dict[str, int]):
        def __call__(self, x: Tensor) -> Tensor:
            return x.clone()

    op = registry.custom_op(f"{ns}::f", lambda x: x * 2, schema="(Tensor x) -> Tensor")
    op.register_shapes("n -> n")
    op.register_kernel("cpu", Kernel())
    assert op(torch.ones(2)).tolist() == [1, 1]
    refused(lambda: op(torch.ones(2, 2)), "has 2 dimensions")


def test_never_checked(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::f", lambda x: x.clone(), schema="(Tensor x) -> Tensor", check="never")
    op.register_shapes("n 3 -> n 3")
    assert op(torch.ones(2)).shape == (2,)
    registry.configure(ns, check="always")
    refused(lambda: op(torch.ones(2)), "has 1 dimensions")
    registry.configure(ns, check="never")
    assert op(torch.ones(2)).shape == (2,)


def test_it_ends_and_is_replaced(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::f", lambda x: x.clone(), schema="(Tensor x) -> Tensor")
    with registry.scope():
        op.register_shapes("n 3 -> n 3")
        refused(lambda: op(torch.ones(2)), "has 1 dimensions")
        op.register_shapes("n -> n")
        assert op(torch.ones(2)).shape == (2,)
    assert op(torch.ones(2, 2, 2)).shape == (2, 2, 2)
    with pytest.raises(customops.errors.MissingFakeError):
        op(torch.ones(2, device="meta"))
    op.register_kernel("cpu", lambda x: x + 1)
    op.register_shapes("n -> n")
    assert op(torch.ones(2)).tolist() == [2, 2]
    refused(lambda: op(torch.ones(2, 2)), "has 2 dimensions")


@pytest.mark.parametrize(
    ("line", "shapes", "message"),
    [
        ("n, n -> n", [(2,), (3,)], "n is 2 in x (argument 1) and 3 in y (argument 2)"),
        ("n 3, _ -> n", [(2, 4), (3,)], "x (argument 1) has 4 for 3"),
        ("n, n+1 -> n", [(2,), (2,)], "n+1 is 3, and y (argument 2) has 2"),
        ("n, 2*n-1 -> n", [(2,), (2,)], "2*n-1 is 3, and y (argument 2) has 2"),
        ("n, n//2 -> n", [(3,), (1,)], "3"),
        ("n, 4*m -> m", [(3,), (6,)], "4*m of y (argument 2): 4 does not divide 6"),
        ("*b n, *b -> n", [(2, 3, 4), (2, 4)], "*b is (2, 3) in x (argument 1) and (2, 4) in y (argument 2)"),
        ("n ... m, ... -> ...", [(2, 3, 4), (2,)], "... is (3) in x (argument 1) and (2) in y (argument 2)"),
    ],
)
def test_what_does_not_fit(registry: Registry, ns: str, line: str, shapes: Any, message: str) -> None:
    op = registry.custom_op(f"{ns}::f", lambda x, y: x.clone(), schema="(Tensor x, Tensor y) -> Tensor")
    op.register_shapes(line)
    refused(lambda: op(*map(torch.ones, shapes)), message)
    refused(lambda: op(*(torch.ones(shape, device="meta") for shape in shapes)), message)


def test_integers_and_optional_tensors(registry: Registry, ns: str) -> None:
    def fn(x: Tensor, w: Tensor, h: int, bias: Tensor | None = None, *, scale: Tensor | None = None) -> Tensor:
        return x.new_zeros(x.shape[0], h, w.shape[0] // h)

    op = registry.custom_op(f"{ns}::heads", fn, mutates_args=())
    op.register_shapes("n k, h*d k, h*d, n -> n h d")
    x, w = torch.ones(2, 3), torch.ones(8, 3)
    assert op(x, w, 4).shape == (2, 4, 2)
    assert op(x, w, 2, torch.ones(8)).shape == (2, 2, 4)
    assert op(x.to("meta"), w.to("meta"), 2, scale=torch.ones(2, device="meta")).shape == (2, 2, 4)
    refused(lambda: op(x, w, 3), "h*d of w (argument 2): 3 does not divide 8")
    refused(lambda: op(x, w, 4, torch.ones(7)), "h*d is 8, and bias (argument 4) has 7")
    refused(lambda: op(x, w, 4, scale=torch.ones(3)), "n is 2 in x (argument 1) and 3 in scale (argument 5)")


def test_lists(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::cat", lambda xs: torch.cat(xs), schema="(Tensor[] xs) -> Tensor")
    op.register_shapes("*n d -> *n d")
    xs = [torch.ones(2, 3), torch.ones(4, 3)]
    assert op(xs).shape == op([x.to("meta") for x in xs]).shape == (6, 3)
    refused(
        lambda: op([torch.ones(2, 3), torch.ones(2, 2)]), "d is 3 in xs[0] (argument 1) and 2 in xs[1] (argument 1)"
    )


def test_a_function_in_the_place_of_the_line(registry: Registry, ns: str) -> None:
    def fn(x: Tensor, dim: int = 0) -> Tensor:
        return x.detach().sum(dim)

    def line(x: Tensor, dim: int) -> str:
        names = [f"d{i}" for i in range(x.dim())]
        return f"{' '.join(names)} -> {' '.join(names[:dim] + names[dim + 1 :])}"

    op = registry.custom_op(f"{ns}::total", fn, mutates_args=(), shapes=line)
    for shape, dim in (((2, 3), 0), ((2, 3), 1), ((4, 5, 6), 1)):
        assert op(torch.ones(shape), dim).shape == op(torch.ones(shape, device="meta"), dim).shape
    op.register_shapes(lambda x, dim: 3)  # type: ignore[arg-type, return-value]
    with pytest.raises(KernelError, match="returned no line"):
        op(torch.ones(2))


# What follows ---------------------------------------------------------------------------------------------------------


def test_the_fake(registry: Registry, ns: str) -> None:
    def fn(x: Tensor, k: int) -> Pair:
        values, indices = x.detach().topk(k)
        return Pair(values, indices)

    op = registry.custom_op(f"{ns}::topk", fn, mutates_args=())
    op.register_shapes("*b n -> *b k, *b k", dtype=("x", torch.int64))
    made = op(torch.ones(2, 3, 4, device="meta", dtype=torch.float16), 2)
    assert isinstance(made, Pair)
    assert [(x.shape, x.dtype) for x in made] == [((2, 3, 2), torch.float16), ((2, 3, 2), torch.int64)]
    assert op.describe().rule("fake").name == "by the shapes"  # type: ignore[union-attr]
    op.register_fake(lambda x, k: Pair(x.new_empty(1), x.new_empty(1)))
    assert op(torch.ones(2, 3, device="meta"), 2).values.shape == (1,)


@pytest.mark.compile
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_with_dynamic_sizes(mm: Op, backend: str) -> None:
    graphs = []

    def counted(module: Any, inputs: Any) -> Any:
        graphs.append(module)
        return torch._dynamo.lookup_backend(backend)(module, inputs)

    compiled = torch.compile(lambda x, y: mm(x, y) + 1, fullgraph=True, dynamic=True, backend=counted)
    for n, k, m in ((5, 6, 7), (8, 9, 4), (6, 3, 10)):
        x, y = torch.randn(n, k), torch.randn(k, m)
        torch.testing.assert_close(compiled(x, y), x @ y + 1)
    assert len(graphs) == 1
    with pytest.raises(Exception, match=r"in x \(argument 1\)"):
        compiled(torch.ones(5, 6), torch.ones(4, 7))


@pytest.mark.compile
def test_sizes_that_depend_on_data(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::nz", lambda x: x.nonzero(), schema="(Tensor x) -> Tensor")
    op.register_shapes("n d -> ?k 2", dtype=torch.int64)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(lambda x: op(x) + 1, fullgraph=True, backend="aot_eager")
        for x in (torch.eye(3), torch.ones(3, 3)):
            assert torch.equal(compiled(x), x.nonzero() + 1)
    assert customops.check(op, [(torch.eye(3),)], effort="quick", only="test_shapes").passed


def test_exported(mm: Op) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return mm(x, y)

    dims = ({0: torch.export.Dim.DYNAMIC}, {1: torch.export.Dim.DYNAMIC})
    program = torch.export.export(Model(), (torch.ones(4, 3), torch.ones(3, 5)), dynamic_shapes=dims)
    assert program.module()(torch.ones(7, 3), torch.ones(3, 6)).shape == (7, 6)


def test_vmap(mm: Op) -> None:
    x, y = torch.randn(4, 2, 3), torch.randn(3, 5)
    torch.testing.assert_close(torch.vmap(mm, (0, None))(x, y), x @ y)
    torch.testing.assert_close(torch.vmap(mm, (1, None))(x, y), x.transpose(0, 1) @ y)
    nested = torch.vmap(torch.vmap(mm, (0, None)), (0, None))
    torch.testing.assert_close(nested(x[None], y), (x @ y)[None])
    ys = torch.randn(4, 3, 5)  # for the batch of which the line has no place
    torch.testing.assert_close(torch.vmap(mm, (0, 0))(x, ys), x @ ys)
    torch.testing.assert_close(torch.vmap(mm, (None, 0))(x[0], ys), x[0] @ ys)


def test_vmap_of_what_is_not_batched(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::add", lambda x, y: x + y, schema="(Tensor x, Tensor y) -> Tensor")
    op.register_shapes("... n, ... n -> ... n", parallel="... n")
    x, y = torch.randn(4, 2, 3), torch.randn(2, 3)
    torch.testing.assert_close(torch.vmap(op, (0, None))(x, y), x + y)


def test_no_vmap_rule_follows_from_a_batch_that_is_not_independent(registry: Registry, ns: str) -> None:
    def center(x: Tensor) -> Tensor:
        return x - x.mean(tuple(range(x.dim() - 1)), keepdim=True)

    op = registry.custom_op(f"{ns}::center", center, mutates_args=(), shapes="*batch c -> *batch c")
    x = torch.randn(3, 4, 5)
    with pytest.warns(UserWarning, match="no vmap rule"):
        torch.testing.assert_close(torch.vmap(op)(x), torch.stack(list(map(center, x))))


def test_no_vmap_rule_follows_for_ops_that_draw_or_write(registry: Registry, ns: str) -> None:
    tags = (torch.Tag.nondeterministic_seeded,)
    draw = registry.custom_op(f"{ns}::draw", torch.rand_like, schema="(Tensor x) -> Tensor", tags=tags)
    draw.register_shapes("*batch n -> *batch n", parallel="*batch")
    with pytest.warns(UserWarning, match="no vmap rule"):
        same = torch.vmap(draw, randomness="same")(torch.zeros(2, 3))
    assert torch.equal(same[0], same[1])

    def add(x: Mut[Tensor], y: Tensor) -> Tensor:
        return x.add_(y) * 2

    write = registry.custom_op(f"{ns}::write", add)
    write.register_shapes("*batch n, *batch n -> *batch n", parallel="*batch")
    with pytest.warns(UserWarning, match="no vmap rule"), pytest.raises(UnsupportedError, match="not batched itself"):
        torch.vmap(write, (None, 0))(torch.zeros(3), torch.ones(2, 3))


def test_flops(mm: Op) -> None:
    x, y = torch.ones(5, 2, 3), torch.ones(3, 4)
    assert mm.cost(x, y) == Cost(2 * 5 * 2 * 3 * 4, 4 * (30 + 12 + 40))
    with FlopCounterMode(display=False) as counter:
        mm(x, y)
    assert counter.get_total_flops() == 240


def test_shardings(mm: Op) -> None:
    assert mm._rules.shapes is not None
    x, y = mm.schema.arguments
    assert mm._rules.shapes.shardings([(x, 3), (y, 2)]) == [
        ([0], [0, None]),
        ([1], [1, None]),
        ([2], [None, 1]),
        (["sum"], [2, 0]),
    ]


# Other forms ----------------------------------------------------------------------------------------------------------


def test_an_op_that_writes(registry: Registry, ns: str) -> None:
    def fn(cache: Mut[Tensor], new: Tensor, slots: Tensor) -> None:
        cache[slots] = new

    op = registry.custom_op(f"{ns}::write", fn, shapes="_ d, n d, n -> ")
    cache = torch.zeros(4, 2)
    op(cache, torch.ones(2, 2), torch.tensor([0, 2]))
    assert cache.sum() == 4
    refused(lambda: op(cache, torch.ones(2, 3), torch.tensor([0, 1])), "d is 2 in cache (argument 1) and 3 in new")


def test_of_the_hints(registry: Registry, ns: str) -> None:
    class Float:  # as jaxtyping's ``Float[Tensor, "k m"]``
        array_type, dim_str = Tensor, "k m"

    def fn(x: Annotated[Tensor, "n k"], y: Float, mask: Tensor | None = None) -> Annotated[Tensor, "n m"]:  # type: ignore[name-defined]
        return x.detach() @ y.detach()

    fn.__annotations__ |= {
        "x": Annotated[Tensor, "n k"],
        "y": Float,
        "mask": Tensor | None,
        "return": Annotated[Tensor, "n m"],
    }
    op = registry.custom_op(f"{ns}::mm", fn, mutates_args=(), shapes=True)
    assert str(op.schema) == "(Tensor x, Tensor y, Tensor? mask=None) -> Tensor"
    assert op(torch.ones(2, 3), torch.ones(3, 4)).shape == (2, 4)
    refused(lambda: op(torch.ones(2, 3), torch.ones(4, 4)), "k is 3 in x (argument 1) and 4 in y (argument 2)")

    def other(x: Tensor) -> Tensor:
        return x.clone()

    with pytest.raises(SchemaError, match="the hints say nothing of the shape of a result"):
        registry.custom_op(f"{ns}::other", other, mutates_args=(), shapes=True)
    assert f"{ns}::other" not in registry


def test_a_lazy_op(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::mm", mm_fn, mutates_args=(), lazy=True, shapes=LINE)
    assert "not defined yet" in repr(op)
    refused(lambda: op(torch.ones(2, 3), torch.ones(4, 4)), "k is 3")


def test_the_function_form(ns: str) -> None:
    library = torch.library.Library(ns, "FRAGMENT")
    library.define("f(Tensor x) -> Tensor")
    library.impl("f", lambda x: x.sin(), "CPU")
    customops.register_shapes(f"{ns}::f", "*n -> *n")
    assert getattr(torch.ops, ns).f(torch.ones(2, 3, device="meta")).shape == (2, 3)
    customops.adopt(f"{ns}::f").unregister()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("n k, k m", "it has no ->"),
        ("n k k m -> n m", "it needs an entry for each tensor argument"),
        ("n k, k m -> n m, n", "it needs an entry for each returned tensor"),
        ("n k, k m -> n q", "nothing determines q"),
        ("n k, k m -> n _", "nothing determines _"),
        ("n k, k m -> *b m", "nothing determines b"),
        ("n k, a*b m -> a b", "a*b of y has several solutions"),
        ("n k, a//2 m -> a", "a//2 of y has several solutions"),
        ("n k, f(k) m -> n", "an expression has names and numbers"),
        ("n k, k$ m -> n", "this is no dimension"),
        ("*a *b, k m -> k m", "one item of an entry may stand for several dimensions"),
        ("n ?k, k m -> n m", "only the size of a result depends on data"),
        (3, "shapes= must be a line"),
    ],
)
def test_wrong_lines(mm: Op, line: Any, message: str) -> None:
    before = str(mm.describe())
    with pytest.raises(DefinitionError) as caught:
        mm.register_shapes(line)
    assert message in str(caught.value)
    assert str(mm.describe()) == before


def test_wrong_options(mm: Op, registry: Registry, ns: str) -> None:
    for options in ({"parallel": "q"}, {"reduces": "*q"}, {"dtype": "q"}, {"dtype": (None, None)}):
        with pytest.raises(DefinitionError):
            mm.register_shapes(LINE, **options)  # type: ignore[arg-type]
    with pytest.raises(DefinitionError, match="it has no ->"):
        registry.custom_op(f"{ns}::other", mm_fn, mutates_args=(), shapes="n k")
    assert f"{ns}::other" not in registry


# The checker ----------------------------------------------------------------------------------------------------------


def test_the_line_is_checked(mm: Op, registry: Registry, ns: str) -> None:
    sample = (torch.randn(2, 4, 6), torch.randn(6, 4))
    assert customops.check(mm, sample, only="test_shapes").passed
    most = registry.custom_op(f"{ns}::most", lambda x: x.amax(1), schema="(Tensor x) -> Tensor")
    soft = registry.custom_op(f"{ns}::soft", lambda x: x.softmax(1), schema="(Tensor x) -> Tensor")
    cases: list[tuple[Op, Any, str, dict[str, Any], str]] = [
        (mm, sample, "*batch n k, k m -> *batch n k", {}, "says another shape"),
        (soft, sample[1], "n k -> n k", {"parallel": "k"}, "not computed independently"),
        (most, sample[1], "n k -> n", {"reduces": "k"}, "not reduced by a sum"),
    ]
    for op, inputs, line, options, message in cases:
        op.register_shapes(line, **options)
        report = customops.check(op, inputs if isinstance(inputs, tuple) else (inputs,), only="test_shapes")
        assert message in str(report), report


@pytest.mark.parametrize(
    ("schema", "line", "options", "message"),
    [
        ("(Tensor x) -> (Tensor, Tensor)", "n d -> n d, d", {"parallel": "n"}, "not in every result"),
        ("(Tensor x, SymInt n) -> Tensor", "n d -> n d", {"parallel": "n"}, "an integer argument"),
        ("(Tensor x) -> Tensor", "n d -> 2*n d", {"parallel": "n"}, "part of an expression"),
        ("(Tensor x) -> Tensor", "*batch d -> batch*d", {"parallel": "*batch"}, "part of an expression"),
        ("(Tensor x) -> Tensor", "*batch d -> *batch batch", {"parallel": "*batch"}, "part of an expression"),
        ("(Tensor x) -> Tensor", "n n -> n n", {"parallel": "n"}, "one tensor twice"),
        ("(Tensor x) -> Tensor", "n d -> n d", {"reduces": "n"}, "a dimension of a result"),
        ("(Tensor x) -> Tensor", "n d -> n d", {"flops": "2*q"}, "names what the line does not: q"),
        ("(Tensor x) -> Tensor", "n d -> n d", {"flops": "n.real"}, "is no formula"),
        ("(Tensor x, Tensor? y) -> Tensor", "n, m -> m", {}, "nothing determines m"),
        ("(Tensor[] xs) -> Tensor[]", "n -> n", {}, "returns Tensor[]"),
        ("(Tensor x) -> SymInt", "n ->", {}, "returns int"),
        ("(Tensor(a) x) -> Tensor(a)", "n -> n", {}, "returns a view"),
    ],
)
def test_what_would_be_wrong_is_refused(
    registry: Registry, ns: str, schema: str, line: str, options: dict[str, Any], message: str
) -> None:
    op = registry.custom_op(f"{ns}::f", lambda x, *args: x, schema=schema)
    with pytest.raises(DefinitionError, match=re.escape(message)):
        op.register_shapes(line, **options)
    assert op._rules.shapes is None


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_divisions_are_exact_and_sizes_are_none_below_zero(registry: Registry, ns: str, device: str) -> None:
    def some(x: Tensor, block: int) -> Tensor:
        return x.new_empty(max(len(x) // block, 0))

    op = registry.custom_op(f"{ns}::some", some, mutates_args=(), shapes="n -> n//block")
    assert op(torch.ones(6, device=device), 2).shape == (3,)
    refused(lambda: op(torch.ones(7, device=device), 2), "n//block of result 0: 2 does not divide 7")
    refused(lambda: op(torch.ones(7, device=device), 0), "0 does not divide 7")
    op.register_shapes("n+block-1 -> n")
    refused(lambda: op(torch.ones(2, device=device), 6), "which makes n -3")
    op.register_shapes("h*block -> h")
    assert op(torch.ones(6, device=device), 2).shape == (3,)
    refused(lambda: op(torch.ones(7, device=device), 2), "2 does not divide 7")


def test_a_product_of_the_batch_and_no_dimensions(registry: Registry, ns: str) -> None:
    def flat(x: Tensor, by: Tensor) -> Tensor:
        return (x * by).reshape(-1, x.shape[-1])

    op = registry.custom_op(f"{ns}::flat", flat, mutates_args=(), shapes="*batch n, () -> batch n")
    for device in ("cpu", "meta"):
        assert op(torch.ones(2, 3, 4, device=device), torch.ones((), device=device)).shape == (6, 4)
    refused(lambda: op(torch.ones(2, 3), torch.ones(1)), "by (argument 2) has 1 dimensions")
