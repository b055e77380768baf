"""`Named`: one piece of compiled code for all objects that an op may be given by name."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import weakref
from typing import Any

import pytest
import torch
from helpers.compiling import dynamo
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from customops import Named, Registry, opcheck
from customops.errors import DefinitionError, UnboundNameError, UnsupportedError


class Layer(torch.nn.Module):
    """Multiplies by a factor that only kernels see."""

    def __init__(self, op: Any, name: str, factor: float) -> None:
        super().__init__()
        self.op, self.factor = op, factor
        self.named = Named(name, self)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.op(x, self.named) + 1
        return result


def scale_fn(x: Tensor, layer: Named[Layer]) -> Tensor:
    return x * layer.get().factor


def accumulate_fn(x: Tensor, layer: Named[Layer]) -> None:
    x += layer.get().factor


@pytest.fixture
def scale(registry: Registry, ns: str) -> Any:
    """An op whose gradient needs the object, too: it is the op itself."""
    op = registry.custom_op(f"{ns}::scale", scale_fn, mutates_args=())
    op.register_fake(lambda x, layer: torch.empty_like(x))

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.layer = inputs[1]

    op.register_autograd(lambda ctx, grad: (op(grad, ctx.layer), None), setup_context=setup_context)
    return op


@pytest.fixture
def layers(scale: Any, ns: str) -> list[Layer]:
    return [Layer(scale, f"{ns}.{i}", factor) for i, factor in enumerate((2.0, 3.0, 5.0))]


# Names ----------------------------------------------------------------------------------------------------------


def test_an_object_is_found_as_long_as_something_else_holds_it(ns: str) -> None:
    target = Target()
    named = Named(ns, target)
    assert Named(ns).get() is named.get() is target
    held = weakref.ref(target)
    del target
    gc.collect()
    assert held() is None
    with pytest.raises(UnboundNameError, match=f"no object in this process has the name '{ns}'") as caught:
        named.get()
    assert isinstance(caught.value, LookupError)
    assert caught.value.fix == f"Named('{ns}', target), and keep the target: it is held weakly"
    other = Target()
    Named(ns, other)  # the name is free
    assert named.get() is other


def test_a_name_stands_for_one_object(ns: str) -> None:
    first, second = Target(), Target()
    Named(ns, first)
    Named(ns, first)
    with pytest.raises(DefinitionError, match=r"stands for another object[\s\S]*named at .*test_named.py:\d+"):
        Named(ns, second)
    assert Named(ns).get() is first
    Named(ns, second, replace=True)
    assert Named(ns).get() is second
    del first  # whose name it was
    gc.collect()
    assert Named(ns).get() is second


def test_what_cannot_have_a_name(ns: str) -> None:
    for name in ("", 1, None):
        with pytest.raises(DefinitionError, match="a text that is not empty"):
            Named(name)  # type: ignore[arg-type]
    with pytest.raises(DefinitionError, match="a dict cannot be the target of a name: it is held weakly"):
        Named(ns, {})
    with pytest.raises(UnboundNameError):
        Named(ns).get()


def test_a_named_is_its_name(ns: str) -> None:
    target = Target()
    named = Named(ns, target)
    for other in (pickle.loads(pickle.dumps(named)), copy.copy(named), copy.deepcopy(named), Named(ns)):
        assert other == named
        assert hash(other) == hash(named)
        assert other.name == ns
        assert other.get() is target
    assert named not in (Named(ns + "x"), ns)
    assert repr(named) == f"Named('{ns}')"


def test_one_of_many_threads_gets_a_name(ns: str) -> None:
    targets, named, start = [Target() for _ in range(8)], [], threading.Barrier(8)

    def take(target: Target) -> None:
        start.wait()
        try:
            Named(ns, target)
        except DefinitionError:
            return
        named.append(target)

    threads = [threading.Thread(target=take, args=(target,)) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert named == [Named(ns).get()]


class Target:
    pass


# Calls ----------------------------------------------------------------------------------------------------------


def test_calls(layers: list[Layer], scale: Any, registry: Registry, ns: str) -> None:
    x = torch.randn(3, requires_grad=True)
    for layer in layers:
        result = layer(x)
        torch.testing.assert_close(result, x * layer.factor + 1)
        (grad,) = torch.autograd.grad(result.sum(), x)
        assert grad.tolist() == [layer.factor] * 3
        assert torch.func.grad(lambda x, layer=layer: layer(x).sum())(x).tolist() == [layer.factor] * 3
    with FakeTensorMode():
        assert layers[0](torch.empty(7)).shape == (7,)
    with pytest.raises(UnboundNameError):
        scale(x, Named(ns))
    with torch.inference_mode():
        assert layers[1](torch.ones(1)).item() == 4


@pytest.mark.parametrize("option", ["bypass", "eager"])
def test_calls_without_the_dispatcher(registry: Registry, ns: str, layers: list[Layer], option: str) -> None:
    op = registry.custom_op(f"{ns}::add", accumulate_fn, mutates_args=("x",), **{option: True})
    assert "type(layer) is _Named" in op.explain_call()
    x = torch.zeros(2)
    for layer in layers:
        op(x, layer.named)
    assert x.tolist() == [10, 10]
    assert x._version >= 3


def test_it_may_be_left_out(registry: Registry, ns: str, layers: list[Layer]) -> None:
    @registry.custom_op(f"{ns}::maybe", mutates_args=())
    def maybe(x: Tensor, layer: Named[Layer] | None = None) -> Tensor:
        return x * 1.0 if layer is None else x * layer.get().factor

    assert maybe(torch.ones(1)).item() == 1
    assert maybe(torch.ones(1), layers[2].named).item() == 5


@pytest.mark.compile
def test_checks(layers: list[Layer], scale: Any) -> None:
    opcheck(scale, (torch.randn(3, requires_grad=True), layers[0].named))


# Compilers ------------------------------------------------------------------------------------------------------


@pytest.mark.compile
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_layers_share_compiled_code(layers: list[Layer], ns: str, backend: str) -> None:
    """Forward and backward, layers that are compiled one by one, and a name that comes later."""
    counter = dynamo("testing").CompileCounterWithBackend(backend)
    x = torch.randn(4, requires_grad=True)
    for layer in [*layers, Layer(layers[0].op, f"{ns}.late", 7.0)]:
        layer.compile(fullgraph=True, backend=counter)
        result = layer(x)
        torch.testing.assert_close(result, x * layer.factor + 1)
        assert torch.autograd.grad(result.sum(), x)[0].tolist() == [layer.factor] * 4
    assert counter.frame_count == 1
    assert ns + ".0" not in counter.graphs[0].code
    Named(layers[0].named.name, layers[2], replace=True)
    torch.testing.assert_close(layers[0](x), x * 5 + 1)
    assert counter.frame_count == 1


@pytest.mark.compile
def test_a_text_in_its_place_compiles_each_layer(registry: Registry, ns: str) -> None:
    """What `Named` is for: without it, there is a compilation for each layer."""

    @registry.custom_op(f"{ns}::by_text", mutates_args=())
    def by_text(x: Tensor, layer: str) -> Tensor:
        return x * len(layer)

    by_text.register_fake(lambda x, layer: torch.empty_like(x))
    counter = dynamo("testing").CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(by_text, fullgraph=True, backend=counter)
    assert [compiled(torch.ones(()), name).item() for name in ("a", "bb", "ccc")] == [1, 2, 3]
    assert counter.frame_count == 3


@pytest.mark.compile
def test_a_model_whose_layers_are_one_region(scale: Any, layers: list[Layer]) -> None:
    graphs: list[Any] = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    @torch.compiler.nested_compile_region
    def region(x: Tensor, layer: Named[Layer]) -> Tensor:
        result: Tensor = scale(x, layer) + 1
        return result

    def model(x: Tensor, *names: Named[Layer]) -> Tensor:
        for name in names:
            x = region(x, name)
        return x

    names = [layer.named for layer in layers]
    result = torch.compile(model, fullgraph=True, backend=keep)(torch.ones(2), *names)
    assert result.tolist() == [((1 * 2 + 1) * 3 + 1) * 5 + 1] * 2
    assert {str(node.target) for node in graphs[0].graph.nodes if node.op == "get_attr"} == {"subgraph_0"}


@pytest.mark.compile
def test_what_is_written_by_name(registry: Registry, ns: str, layers: list[Layer]) -> None:
    """With symbolic sizes, two names that are one object, and a second call with two."""
    op = registry.custom_op(f"{ns}::add", accumulate_fn, mutates_args=("x",))

    def twice(x: Tensor, one: Named[Layer], other: Named[Layer]) -> Tensor:
        op(x, one)
        op(x, other)
        return x * 2

    compiled = torch.compile(twice, fullgraph=True, backend="aot_eager", dynamic=True)
    first, second, _ = (layer.named for layer in layers)
    for n, (one, other), expected in [(3, (first, first), 8), (4, (first, second), 10), (5, (second, second), 12)]:
        x = torch.zeros(n)
        assert compiled(x, one, other).tolist() == [expected] * n
        assert x.tolist() == [expected / 2] * n


@pytest.mark.compile
def test_exported_programs_hold_the_name(layers: list[Layer], scale: Any) -> None:
    model, x = torch.nn.Sequential(*layers), torch.ones(2)
    program = torch.export.export(model, (x,))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    again = torch.export.load(file).module()
    assert again(x).tolist() == model(x).tolist() == [51, 51]
    layers[0].factor = 0.0
    assert again(x).tolist() == model(x).tolist() == [21, 21]
    traced = make_fx(lambda x: scale(x, layers[1].named), tracing_mode="symbolic")(x)
    assert traced(torch.ones(3)).tolist() == [3, 3, 3]
    with pytest.raises(AttributeError, match=r"AOTInductor cannot pack Named\(.*: its files hold values") as caught:
        _ = layers[0].named.real_obj  # what inductor does: a test that compiles takes 10 seconds to get there
    assert isinstance(caught.value, UnsupportedError)


@pytest.mark.compile
def test_code_that_is_traced_cannot_read_it(registry: Registry, ns: str, layers: list[Layer]) -> None:
    """It would be the same code for all names, which it is not."""

    def looks(x: Tensor, layer: Named[Layer]) -> Tensor:
        return x * layer.get().factor

    with pytest.raises(Exception, match=r"unregistered member on an OpaqueObject|get"):
        torch.compile(looks, fullgraph=True, backend="eager")(torch.ones(1), layers[0].named)
    op = registry.custom_op(f"{ns}::f", scale_fn, mutates_args=())
    op.register_fake(lambda x, layer: x.new_empty(len(layer.name)))
    with pytest.raises(Exception, match="Tried to call __getattr__ with attr 'name'"):
        torch.compile(op, fullgraph=True, backend="aot_eager")(torch.ones(1), layers[0].named)
    with pytest.raises(Exception, match=r"created in the middle of the program|inside the torch.compile"):
        torch.compile(lambda x: op(x, Named("made inside")), fullgraph=True, backend="eager")(torch.ones(1))
