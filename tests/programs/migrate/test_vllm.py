"""vLLM: ops of a library, with a kernel at one dispatch key."""

from __future__ import annotations

from contextlib import nullcontext
from types import ModuleType
from typing import Any, Optional

import pytest
import torch
from helpers.migration import Twins, message, outcome, overload
from torch import Tensor
from torch._library.opaque_object import register_opaque_type
from torch._opaque_base import OpaqueBase
from torch.library import Library
from torch.testing import assert_close

from customops.errors import AliasError, AutogradError, CallbackError, DefinitionError, RegistrationError, SchemaError

pytestmark = pytest.mark.compile


class LayerName(OpaqueBase):
    """A name of a layer, of a type that torch lifts out of graphs."""

    def __init__(self, value: str) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LayerName) and self.value == other.value

    def __hash__(self) -> int:
        return hash(self.value)

    def __fx_repr__(self) -> Any:
        return f"LayerName({self.value!r})", {"LayerName": LayerName}


SCALES = {"layers.0": 2.0, "layers.1": 3.0}


def attention(query: Tensor, output: Tensor, layer_name: str, scale: Optional[float] = None) -> None:
    output.copy_(query * SCALES[layer_name] * (1.0 if scale is None else scale))


def experts(x: Tensor, w: Tensor, ids: Tensor, activation: str = "silu", bias: Optional[Tensor] = None) -> Tensor:
    y = torch.einsum("td,tdf->tf", x, w[ids])
    y = y if bias is None else y + bias
    return torch.nn.functional.silu(y) if activation == "silu" else y


def experts_fake(x: Tensor, w: Tensor, ids: Tensor, activation: str = "silu", bias: Optional[Tensor] = None) -> Tensor:
    return x.new_empty((x.shape[0], w.shape[-1]))


def align(ids: Tensor, blocks: list[int], caches: list[Tensor]) -> tuple[Tensor, Tensor]:
    for cache in caches:
        cache.add_(len(blocks))
    return ids.argsort().to(ids.dtype), ids.new_zeros(sum(blocks))


def align_fake(ids: Tensor, blocks: list[int], caches: list[Tensor]) -> tuple[Tensor, Tensor]:
    return torch.empty_like(ids), ids.new_empty(sum(blocks))


KINDS: list[tuple[Any, ...]] = [
    (attention, ["output"], None, lambda n: (torch.randn(n, 2), torch.zeros(n, 2), "layers.1", 0.5)),
    (experts, [], experts_fake, lambda n: (torch.randn(n, 4), torch.randn(2, 4, 6), torch.arange(n) % 2)),
    (align, ["caches"], align_fake, lambda n: (torch.randn(n), [n, 2], [torch.zeros(n), torch.zeros(2)])),
]


@pytest.mark.parametrize(("fn", "mutates", "fake", "arguments"), KINDS, ids=[kind[0].__name__ for kind in KINDS])
@pytest.mark.parametrize("key", ["CPU", "CompositeExplicitAutograd"])
def test_same_as_by_hand(
    helpers: ModuleType, by_hand: ModuleType, lib: Library, hand: Library, fn: Any, mutates: Any, fake: Any,
    arguments: Any, key: str,
) -> None:  # fmt: skip
    tags = (torch.Tag.needs_fixed_stride_order,)
    helpers.direct_register_custom_op(fn.__name__, fn, mutates, fake, lib, key, tags)
    ours = getattr(getattr(torch.ops, lib.ns), fn.__name__)
    # By hand an op that only writes needs a fake, too.
    theirs = by_hand.vllm(hand, fn.__name__, fn, mutates, fake or (lambda *args: None), key, tags)
    assert set(theirs.default.tags) <= set(ours.default.tags)
    twins = Twins(ours, theirs, fn, arguments)
    twins.check() if key == "CPU" else twins.check_eager()


def test_the_op_lives_as_long_as_its_library(helpers: ModuleType, ns: str) -> None:
    library = Library(ns, "FRAGMENT")
    helpers.direct_register_custom_op("experts", experts, fake_impl=experts_fake, target_lib=library)
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"{ns}::experts", "CPU")  # the platform is the CPU here
    library._destroy()
    assert not hasattr(getattr(torch.ops, ns), "experts")
    helpers.direct_register_custom_op("experts", attention, ["output"], target_lib=(again := Library(ns, "FRAGMENT")))
    assert "output" in str(overload(getattr(torch.ops, ns).experts)._schema)
    again._destroy()


def by_name(x: Tensor, out: Tensor, layer: LayerName) -> None:
    out.copy_(x * SCALES[layer.value])


def test_names_of_layers_that_are_opaque(helpers: ModuleType, by_hand: ModuleType, lib: Library, hand: Library) -> None:
    """All layers have one graph, in which no name is."""
    register_opaque_type(LayerName, typ="value", hoist=True)
    helpers.direct_register_custom_op("by_name", by_name, ["out"], target_lib=lib)
    ours = getattr(torch.ops, lib.ns).by_name
    theirs = by_hand.vllm(hand, "by_name", by_name, ["out"], lambda *args: None)
    assert [str(each.type) for each in overload(ours)._schema.arguments] == ["Tensor", "Tensor", "PyObject"]
    graphs = {graph_of_layer(op, layer) for op in (ours, theirs) for layer in SCALES}
    assert len({graph.replace(hand.ns, lib.ns) for graph in graphs}) == 1
    assert "layers." not in graphs.pop()


def graph_of_layer(op: Any, layer: str) -> str:
    graphs: list[str] = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph.code)
        return graph.forward

    opaque, out = LayerName(layer), torch.zeros(2)
    torch.compile(lambda x, out: op(x, out, opaque), fullgraph=True, backend=keep)(torch.ones(2), out)
    assert out.tolist() == [SCALES[layer]] * 2
    return graphs[0]


# What comes back, and keys ---------------------------------------------------------------------------------------


def same(x: Tensor) -> Tensor:
    return x


def first_rows(x: Tensor) -> Tensor:
    return x[:2]


def both(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x, y + 1


def counted(x: Tensor, n: int) -> tuple[Tensor, int]:
    return x, n


def double_to(x: Tensor, out: Optional[Tensor] = None) -> Tensor:
    out = torch.empty_like(x) if out is None else out
    return out.copy_(x * 2)


def add_(x: Tensor, y: Tensor) -> Tensor:
    return x.add_(y)


RETURN_ARGUMENTS: list[tuple[Any, ...]] = [
    (same, [], torch.empty_like, lambda n: (torch.randn(n),)),
    (both, [], lambda x, y: (torch.empty_like(x), torch.empty_like(y)), lambda n: (torch.randn(n), torch.randn(n))),
    (counted, [], lambda x, n: (torch.empty_like(x), n), lambda n: (torch.randn(n), 3)),
    (double_to, ["out"], lambda x, out=None: torch.empty_like(x), lambda n: (torch.randn(n), torch.zeros(n))),
    (double_to, ["out"], lambda x, out=None: torch.empty_like(x), lambda n: (torch.randn(n),)),
    (add_, ["x"], lambda x, y: x, lambda n: (torch.randn(n), torch.randn(n))),
]


@pytest.mark.filterwarnings("ignore:.*_hand.*must not also be an input")  # torch, of what is compiled by hand
@pytest.mark.parametrize(("fn", "mutates", "fake", "arguments"), RETURN_ARGUMENTS)
def test_an_op_may_return_an_argument(
    helpers: ModuleType, by_hand: ModuleType, lib: Library, hand: Library, fn: Any, mutates: Any, fake: Any,
    arguments: Any,
) -> None:  # fmt: skip
    helpers.direct_register_custom_op(fn.__name__, fn, mutates, fake, lib)
    ours = getattr(getattr(torch.ops, lib.ns), fn.__name__)
    config = torch._functorch.config
    warns = {"error_on_custom_op_aliasing": False}  # where the environment has CI, torch raises
    with config.patch(warns) if hasattr(config, "error_on_custom_op_aliasing") else nullcontext():
        Twins(ours, by_hand.vllm(hand, fn.__name__, fn, mutates, fake), fn, arguments).check()
    args = arguments(3)
    with torch.inference_mode():
        assert_close(outcome(ours, args), outcome(fn, args))


def test_inductor_leaves_the_arguments_that_come_back(helpers: ModuleType, lib: Library) -> None:
    """It writes into what it takes for new; by hand `x` becomes 2, and `out` 3."""
    for fn, mutates in ((same, []), (double_to, ["out"])):
        helpers.direct_register_custom_op(fn.__name__, fn, mutates, lambda x, out=None: torch.empty_like(x), lib)
    ours, x, out = getattr(torch.ops, lib.ns), torch.ones(3), torch.zeros(3)
    program = torch.compile(lambda x, out: (ours.same(x) + 1, ours.double_to(x, out) + 1), fullgraph=True)
    assert [each.tolist() for each in program(x, out)] == [[2] * 3, [3] * 3]
    assert (x.tolist(), out.tolist()) == ([1] * 3, [2] * 3)


def test_a_kernel_that_autograd_and_compilers_trace(
    helpers: ModuleType, by_hand: ModuleType, lib: Library, hand: Library
) -> None:
    key = "CompositeImplicitAutograd"
    helpers.direct_register_custom_op("experts", experts, target_lib=lib, dispatch_key=key)
    ours, theirs = getattr(torch.ops, lib.ns).experts, by_hand.vllm(hand, "experts", experts, (), None, key)
    Twins(ours, theirs, experts, lambda n: (torch.randn(n, 4), torch.randn(2, 4, 6), torch.arange(n) % 2)).check()
    x, w, ids = torch.randn(3, 4, requires_grad=True), torch.randn(2, 4, 6, requires_grad=True), torch.arange(3) % 2
    assert torch.autograd.gradcheck(lambda x, w: ours(x, w, ids), (x.double(), w.double()))
    helpers.direct_register_custom_op("same", same, target_lib=lib, dispatch_key=key)
    assert getattr(torch.ops, lib.ns).same(x) is x
    with pytest.raises(RegistrationError, match="traced through"):
        helpers.direct_register_custom_op("no", same, fake_impl=same, target_lib=lib, dispatch_key=key)
    assert "CompositeImplicitAutograd" in message(lambda: by_hand.vllm(hand, "no", same, (), same, key))


# A test of vLLM's own: a model with an attention that counts its calls, compiled whole ----------------------------


def test_a_model_of_layers_that_count(helpers: ModuleType, lib: Library) -> None:
    calls = 0

    def silly_attention(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        nonlocal calls
        calls += 1
        out.copy_(q + k + v)

    helpers.direct_register_custom_op(
        op_name="attention",
        op_func=silly_attention,
        mutates_args=["out"],
        fake_impl=lambda q, k, v, out: None,
        target_lib=lib,
        tags=(torch.Tag.cudagraph_unsafe,),
    )
    op = getattr(torch.ops, lib.ns).attention

    def model(x: Tensor) -> Tensor:
        for step in (1, 2):
            x = x + step
            out = torch.empty_like(x)
            op(x, x, x, out)
            x = out
        return x + 3

    x = torch.randn(2)
    assert_close(torch.compile(model, fullgraph=True)(x), 9 * x + 18)
    assert calls == 2
    assert torch.Tag.cudagraph_unsafe in op.default.tags


# Mistakes -------------------------------------------------------------------------------------------------------


def test_wrong_calls_raise_alike(helpers: ModuleType, by_hand: ModuleType, lib: Library, hand: Library) -> None:
    helpers.direct_register_custom_op("experts", experts, fake_impl=experts_fake, target_lib=lib)
    ours, theirs = getattr(torch.ops, lib.ns).experts, by_hand.vllm(hand, "experts", experts, (), experts_fake)
    x = torch.ones(2, 2)
    for args, kwargs in [((x,), {}), ((x, x, "ids"), {}), ((x, x, x, 1), {}), ((x, x, x), {"bia": x})]:
        messages = [message(lambda op=op, a=args, k=kwargs: op(*a, **k)) for op in (ours, theirs)]
        assert messages[0] == messages[1].replace(hand.ns, lib.ns)


def test_twice(helpers: ModuleType, by_hand: ModuleType, lib: Library, hand: Library) -> None:
    helpers.direct_register_custom_op("align", align, ["caches"], align_fake, lib)
    with pytest.raises(DefinitionError, match=r"align: an op of this name exists, defined at .*test_vllm\.py:\d+"):
        helpers.direct_register_custom_op("align", align, ["caches"], align_fake, lib)
    by_hand.vllm(hand, "align", align, ["caches"], align_fake)
    assert "multiple times" in message(lambda: by_hand.vllm(hand, "align", align, ["caches"]))
    assert getattr(torch.ops, lib.ns).align(torch.tensor([2, 1]), [1], [])[0].tolist() == [1, 0]


def test_what_goes_unnoticed_by_hand(helpers: ModuleType, by_hand: ModuleType, lib: Library, hand: Library) -> None:
    with pytest.raises(CallbackError, match="same: the fake impl does not fit the operator"):
        helpers.direct_register_custom_op("same", same, fake_impl=lambda: None, target_lib=lib)
    x = torch.ones(2, requires_grad=True)
    helpers.direct_register_custom_op("alias", first_rows, fake_impl=torch.empty_like, target_lib=lib)
    helpers.direct_register_custom_op("attention", attention, ["output"], target_lib=lib)
    ours = getattr(torch.ops, lib.ns)
    with pytest.raises(AliasError, match="argument 'x'"):
        ours.alias(x.detach())
    assert by_hand.vllm(hand, "alias", first_rows)(x.detach()).data_ptr() == x.data_ptr()

    # A gradient that nobody wrote: by hand it is that of the torch operations in the kernel, if there are any.
    output = torch.zeros(2) * x
    ours.attention(x, output, "layers.0")
    with pytest.raises(AutogradError, match="attention"):
        output.sum().backward()


def test_hints_that_make_no_schema(helpers: ModuleType, by_hand: ModuleType, lib: Library, hand: Library) -> None:
    def bad(x: Tensor, options: dict) -> Tensor: ...  # type: ignore[type-arg]

    with pytest.raises(SchemaError, match="parameter options has unsupported type dict") as caught:
        helpers.direct_register_custom_op("bad", bad, target_lib=lib)
    assert len(str(caught.value)) < len(message(lambda: by_hand.vllm(hand, "bad", bad)))
