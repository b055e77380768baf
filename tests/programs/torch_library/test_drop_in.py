"""Code written for `torch.library` moves by an import: operators as libraries write them, run through both.

Each function below is such code. It is given `library`, which is `torch.library` or `customops`, and a namespace, and
defines an operator as the libraries and tutorials it is taken after do. Everything a user can see of the two operators
is then compared: schema, results, writes, gradients, compiled and exported programs, metadata, and which errors are
raised. An error of ours may be a subclass of torch's, so that code that catches torch's goes on to do so.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from helpers.covers import every
from helpers.drop_in.libraries import (
    jagged_to_padded_dense,
    rms_norm,
    roi_align,
    topk_softmax,
)
from helpers.drop_in.program import PROGRAMS, Args, Build, Program, rand
from helpers.drop_in.tutorials import (
    foreach_scale,
    gelu_tanh,
    mul_out,
    numpy_cube,
)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_map

import customops

# -- both --------------------------------------------------------------------------------------


class Both(NamedTuple):
    theirs: Program
    ours: Program


every_program = pytest.mark.parametrize("build", PROGRAMS, ids=[build.__name__ for build in PROGRAMS])


@pytest.fixture
def both(build: Build, ns: str) -> Iterator[Both]:
    with customops.default_registry.scope():
        yield Both(build(torch.library, f"{ns}_theirs"), build(customops, f"{ns}_ours"))


def overload(op: Any) -> Any:
    return getattr(op, "_opoverload", None) or getattr(op, "default", op)


def anonymous(text: str, ns: str) -> str:
    """Without what has to differ."""
    return text.replace(f"{ns}_theirs", "NS").replace(f"{ns}_ours", "NS")


def plain(value: Any) -> Any:
    """A tensor, as what can be compared with `==`, nan included."""
    if not isinstance(value, Tensor):
        return value
    meta = tuple(value.shape), value.stride(), value.dtype, value.device
    return meta if value.is_meta or isinstance(value, torch._subclasses.FakeTensor) else (meta, str(value.tolist()))


def outcome(call: Callable[[], Any]) -> tuple[Any, type[Exception] | None]:
    """What a call returns (with the types of containers), or the type of what it raises."""
    try:
        values, shape = tree_flatten(call())
    except Exception as error:
        print(repr(error)[:600])
        return None, type(error)
    return ([plain(value) for value in values], shape), None


def same(theirs: Callable[[], Any], ours: Callable[[], Any]) -> bool:
    """Returns whether there was a result rather than an error."""
    (their_value, their_error), (our_value, our_error) = outcome(theirs), outcome(ours)
    if their_error is None:
        assert our_error is None, our_error
        assert our_value == their_value
    else:
        assert our_error is not None, f"torch raises {their_error}"
        assert issubclass(our_error, their_error)
    return our_error is None


def called(program: Program, run: Callable[..., Any]) -> Callable[[], Any]:
    """A call of `run` with fresh arguments, to compare with what it leaves in them."""

    def call() -> Any:
        args, kwargs = program.args(), program.kwargs()
        result = run(*args, **kwargs)
        return result, tree_map(detached, (args, kwargs))

    return call


# -- the comparisons ---------------------------------------------------------------------------


@every_program
def test_schema(both: Both, ns: str) -> None:
    theirs, ours = (overload(program.op) for program in both)
    assert anonymous(str(ours._schema), ns) == anonymous(str(theirs._schema), ns)
    assert set(ours.tags) == set(theirs.tags)
    assert anonymous(str(ours), ns) == anonymous(str(theirs), ns)


@every_program
def test_eager(both: Both) -> None:
    assert same(*(called(program, program.op) for program in both))
    assert same(*(called(program, program.run) for program in both))


@every_program
def test_more_calls(both: Both) -> None:
    for name, theirs in both.theirs.more.items():
        print(name)
        same(theirs, both.ours.more[name])


@every_program
def test_wrong_calls(both: Both) -> None:
    for name, wrong in WRONG.items():
        print(name)
        assert not same(*(functools.partial(call_wrongly, wrong, program) for program in both))


def call_wrongly(wrong: Callable[..., Any], program: Program) -> Any:
    return wrong(program.op, program.args(), program.kwargs())


def replaced(args: Args, old: Callable[[Any], bool], new: Any) -> Args:
    index = next((i for i, arg in enumerate(args) if old(arg)), 0)
    return (*args[:index], new, *args[index + 1 :])


WRONG: dict[str, Callable[..., Any]] = {
    "no arguments": lambda op, args, kwargs: op(),
    "too many": lambda op, args, kwargs: op(*args, *[torch.ones(1)] * 20, **kwargs),
    "unknown keyword": lambda op, args, kwargs: op(*args, **kwargs, nonsense=1),
    "twice": lambda op, args, kwargs: op(*args, **kwargs, **{overload(op)._schema.arguments[0].name: args[0]}),
    "text for a tensor": lambda op, args, kwargs: op(*replaced(args, torch.is_tensor, "text"), **kwargs),
    "None for a tensor": lambda op, args, kwargs: op(*replaced(args, torch.is_tensor, None), **kwargs),
}


def gradients(program: Program) -> Any:
    """Of all outputs, with respect to all inputs."""
    args, kwargs = program.args(), program.kwargs()
    inputs = [x for x in tree_flatten(args)[0] if isinstance(x, Tensor)]
    inputs = [x for x in inputs if x.requires_grad] or [x.requires_grad_() for x in inputs if x.is_floating_point()]
    assert program.run is not None
    outputs = [x for x in tree_flatten(program.run(*args, **kwargs))[0] if isinstance(x, Tensor) and x.requires_grad]
    weights = [rand(*x.shape, dtype=x.dtype) + 1 for x in outputs]
    return torch.autograd.grad(outputs, inputs, weights, allow_unused=True)


#: Programs without a formula that write to what `gradients` lets require grad.
WRITES_LEAVES = {"silu_and_mul", "rotary_embedding", "reshape_and_cache", "fill_all"}


@every_program
def test_gradients(both: Both) -> None:  # also what is raised by ops without a formula
    if both.ours.op.__name__ in WRITES_LEAVES:  # torch goes past the write: the gradient is None
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
            gradients(both.ours)
        return
    same(*(lambda program=program: gradients(program) for program in both))


@pytest.mark.compile
@every_program
def test_compiled(both: Both) -> None:
    calls = []
    for program in both:
        compiled = torch.compile(program.run, backend="aot_eager", fullgraph=True, dynamic=True)
        calls.append(called(program, compiled))
    assert same(*calls) == both.ours.compiles
    if both.ours.compiles:
        same(called(both.ours, both.ours.run), calls[1])


class Model(torch.nn.Module):
    """`run`, given tensors; other arguments are part of the model."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program, self.args, self.kwargs = program, program.args(), program.kwargs()

    def tensors(self) -> Args:
        values = (*self.args, *self.kwargs.values())
        return tuple(tree_map(detached, value) for value in values if holds_tensors(value))

    def forward(self, *tensors: Any) -> Any:
        given = iter(tensors)
        args = [next(given) if holds_tensors(value) else value for value in self.args]
        kwargs = {name: next(given) if holds_tensors(value) else value for name, value in self.kwargs.items()}
        return self.program.run(*args, **kwargs)  # type: ignore[misc]


def detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def holds_tensors(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, list) and isinstance(value[0], Tensor))


def exported(program: Program, ns: str) -> list[str]:
    model = Model(program)
    found = torch.export.export(model, model.tensors(), strict=True)
    lower = found.run_decompositions({})  # functionalized; the table of all decompositions takes seconds to make
    items = [found.graph, found.graph_signature]
    overload = getattr(program.op, "_opoverload", None) or getattr(program.op, "default", program.op)
    if not {customops.Tag.inplace, customops.Tag.out} & set(overload.tags):
        items += [lower.graph, lower.graph_module.code]  # below, ours are ops that only write
    return [anonymous(str(item), ns) for item in items]


@pytest.mark.compile
@pytest.mark.parametrize("build", every(2, PROGRAMS))
@pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec:FutureWarning")  # torch's own
def test_exported(both: Both, ns: str) -> None:
    assert same(*(functools.partial(exported, program, ns) for program in both)) == both.ours.compiles


@every_program
def test_without_data(both: Both) -> None:
    def on_meta(program: Program) -> Any:
        args, kwargs = tree_map(lambda x: x.detach().to("meta") if isinstance(x, Tensor) else x, called_with(program))
        return program.op(*args, **kwargs)

    def on_fakes(program: Program) -> Any:
        with FakeTensorMode() as mode:
            fakes = tree_map(lambda x: mode.from_tensor(x) if isinstance(x, Tensor) else x, called_with(program))
            return program.op(*fakes[0], **fakes[1])

    for run in (on_meta, on_fakes):
        same(*(lambda program=program, run=run: run(program) for program in both))


def called_with(program: Program) -> tuple[Args, dict[str, Any]]:
    return program.args(), program.kwargs()


# -- where ours is meant to differ: what torch does is said, and ours asserted -------------------


@pytest.mark.parametrize(
    "build", [rms_norm, roi_align, jagged_to_padded_dense, topk_softmax, foreach_scale, gelu_tanh, numpy_cube]
)
def test_func_grad(build: Build, ns: str) -> None:  # torch raises: its custom ops have no rule for functorch
    with customops.default_registry.scope():
        ours = build(customops, ns)
        args, kwargs = tree_map(detached, (ours.args(), ours.kwargs()))
        is_list = isinstance(args[0], list)

        def loss(first: Any) -> Tensor:
            outputs = ours.op(first, *args[1:], **kwargs)
            return sum(out.sum() for out in tree_flatten(outputs)[0] if out.is_floating_point())  # type: ignore[return-value]

        found = torch.func.grad(loss)(args[0])
        inputs = tree_map(lambda x: x.clone().requires_grad_(), args[0])
        expected = torch.autograd.grad(loss(inputs), inputs)
        torch.testing.assert_close(found if is_list else [found], list(expected))


@pytest.mark.parity(23)
def test_factory_with_a_keyword_only_device(ns: str) -> None:  # torch: IndexError where a default is left out
    with customops.default_registry.scope():

        @customops.custom_op(f"{ns}::table", mutates_args=(), device_types="cpu")
        def table(n: int, m: int = 2, *, device: torch.device) -> Tensor:
            return torch.zeros(n, m, device=device)

        assert table(3, device=torch.device("cpu")).shape == (3, 2)


def test_fakes_see_defaults(ns: str) -> None:  # torch calls a fake as the op was called: a TypeError here
    with customops.default_registry.scope():

        @customops.custom_op(f"{ns}::tile", mutates_args=())
        def tile(x: Tensor, n: int = 3) -> Tensor:
            return x.repeat(n)

        tile.register_fake(lambda x, n: x.new_empty(len(x) * n))
        assert tile(rand(2).to("meta")).shape == (6,)


def test_lists_as_defaults(ns: str) -> None:  # torch: ValueError from infer_schema
    with customops.default_registry.scope():

        @customops.custom_op(f"{ns}::tile", mutates_args=())
        def tile(x: Tensor, sizes: Sequence[int] = (2, 1)) -> Tensor:
            return x.repeat(*sizes)

        assert tile(rand(2)).shape == (2, 2)


def test_out_by_position(ns: str) -> None:  # RuntimeError from the dispatcher, as torch 2.13; TypeError in torch 2.15
    with customops.default_registry.scope():
        with pytest.raises(RuntimeError, match="takes 2 positional argument"):
            mul_out(customops, ns).op(rand(3), rand(3), rand(3))


@every_program
def test_opcheck(build: Build, ns: str) -> None:  # ours alone: torch 2.15's warns, an error here, if inputs need grad
    with customops.default_registry.scope():
        program = build(customops, ns)
        results = customops.opcheck(overload(program.op), *called_with(program), raise_exception=False)
        assert program.compiles == all(result == "SUCCESS" for result in results.values())


# -- torch's own collection of custom ops, by an import -----------------------------------------


@pytest.fixture(scope="module")
def custom_op_db() -> Iterator[list[tuple[Any, Any]]]:
    """Each entry of it with the same entry made by our `custom_op`, from the same text."""
    theirs = importlib.import_module("torch.testing._internal.custom_op_db")
    text, _, _ = inspect.getsource(theirs).partition("lib = torch.library.Library(")
    text = text.replace("torch.library.custom_op(", "customops.custom_op(").replace("_torch_testing", "drop_in_db")
    module = ModuleType("custom_op_db_of_ours")
    vars(module)["customops"] = customops
    sys.modules[module.__name__] = module  # where the hints of its functions are looked up
    with customops.default_registry.scope():
        exec(text, vars(module))
        yield list(zip(theirs.custom_op_db, module.custom_op_db, strict=True))
    del sys.modules[module.__name__]


@pytest.mark.parity(82)
@pytest.mark.parametrize("index", range(11))
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.filterwarnings("ignore:`create_unbacked_symint` is deprecated:FutureWarning")  # in the text
def test_custom_op_db(custom_op_db: list[tuple[Any, Any]], index: int, requires_grad: bool) -> None:
    assert len(custom_op_db) == 11
    theirs, ours = custom_op_db[index]
    assert theirs.name == ours.name
    samples = list(ours.sample_inputs("cpu", torch.float32, requires_grad=requires_grad))
    assert samples
    for sample in samples:
        args = (sample.input, *sample.args)
        assert same(
            lambda a=args, k=sample.kwargs: theirs.op(*a, **k), lambda a=args, k=sample.kwargs: ours.op(*a, **k)
        )
        results = customops.opcheck(ours.op, args, sample.kwargs)
        assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parity(82)
@pytest.mark.parametrize("index", range(11))
def test_custom_op_db_batched(custom_op_db: list[tuple[Any, Any]], index: int) -> None:
    # Which vmap rules raise is torch's matter, too: those of sizes that depend on data do, and that of cat is broken.
    theirs, ours = custom_op_db[index]
    sample = next(iter(ours.sample_inputs("cpu", torch.float32)))
    args = tree_map(lambda x: torch.stack([x, x.flip(0)]) if torch.is_tensor(x) else x, (sample.input, *sample.args))
    dims = tree_map(lambda x: 0 if torch.is_tensor(x) else None, args)

    def batched(op: Any) -> Any:
        def tensors(*args: Any) -> Any:
            return [x for x in tree_flatten(op(*args, **sample.kwargs))[0] if torch.is_tensor(x)]

        return torch.vmap(tensors, in_dims=dims)(*args)

    worked = same(lambda: batched(theirs.op), lambda: batched(ours.op))
    assert worked == (not re.search("Nonzero|NMS|Cat", ours.name))
