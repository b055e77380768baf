"""Every way to differentiate, and every op of gradient_ops. Run this to print the table of docs/gradients.md."""

from __future__ import annotations

import functools
import importlib
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from string import ascii_letters
from typing import Any, NamedTuple

import torch
import torch.autograd.forward_ad as forward_ad
from helpers.modes import DispatchLog
from products import gradient_ops
from products.gradient_ops import Maker, Program, TorchMaker
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

from customops import Registry

Fn = Callable[..., Any]
#: Fresh inputs; with a batch size, batched.
Inputs = Callable[..., tuple[Tensor, ...]]

RIGHT, WRONG, ZERO, RAISES, REFUSED = ".x0!-"
LEGEND = {
    RIGHT: "right",
    WRONG: "another value than that of the same function in plain torch",
    ZERO: "zeros, or None, where that is not zero, silently",
    RAISES: "an error",
    REFUSED: "an error already when the op or its formula is registered",
}


# The functions to differentiate ---------------------------------------------------------------------------------


class Vector:
    """All results of a function as one vector."""

    def __init__(self, fn: Fn) -> None:
        self.fn = fn

    def __call__(self, *xs: Tensor) -> Tensor:
        result = self.fn(*xs)
        return torch.cat([each.reshape(-1) for each in (result if isinstance(result, tuple) else (result,))])


class Loss(Vector):
    """A number, of which no derivative is trivial."""

    def __call__(self, *xs: Tensor) -> Tensor:
        vector = super().__call__(*xs)
        return (vector.square() * torch.arange(1, 1 + len(vector), dtype=vector.dtype)).sum()


class Net(torch.nn.Module):
    """A module of which the inputs of a function are the parameters."""

    def __init__(self, fn: Fn, values: Iterable[Tensor]) -> None:
        super().__init__()
        self.fn = fn
        self.values = torch.nn.ParameterList(x.detach().clone() for x in values)

    def forward(self) -> Any:
        return self.fn(*self.values)


class OfInputs(torch.nn.Module):
    """A function as a module."""

    def __init__(self, fn: Fn) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, *xs: Tensor) -> Any:
        return self.fn(*xs)


def all_of(xs: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(range(len(xs)))


def leaves(inputs: Inputs) -> list[Tensor]:
    return [x.requires_grad_() for x in inputs()]


def tangents(xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(x.detach().cos() + i for i, x in enumerate(xs))


def of_all(transform: Fn, f: Fn, inputs: Inputs) -> Any:
    """A transform that takes argnums, with respect to all inputs."""
    xs = inputs()
    return transform(f, argnums=all_of(xs))(*xs)


# The ways to differentiate --------------------------------------------------------------------------------------


def backward(f: Fn, inputs: Inputs, call: Fn | None = None) -> Any:
    xs = leaves(inputs)
    (call or Loss(f))(*xs).backward()
    return [x.grad for x in xs]


def create_graph(f: Fn, inputs: Inputs) -> Any:
    xs = leaves(inputs)
    first = torch.autograd.grad(Loss(f)(*xs), xs, create_graph=True)
    return torch.autograd.grad(sum(each.square().sum() for each in first), xs)


def batched(f: Fn, inputs: Inputs) -> Any:
    xs = leaves(inputs)
    y = Vector(f)(*xs)
    return torch.autograd.grad(y, xs, torch.eye(len(y), dtype=y.dtype), is_grads_batched=True)


def retain_graph(f: Fn, inputs: Inputs) -> Any:
    xs = leaves(inputs)
    loss = Loss(f)(*xs)
    loss.backward(retain_graph=True)
    loss.backward()
    return [x.grad for x in xs]


def hooks(f: Fn, inputs: Inputs) -> Any:
    """On tensors, on nodes, and where gradients are accumulated, as data-parallel training has them."""
    xs = leaves(inputs)
    seen: list[Tensor] = []
    for x in xs:
        x.register_hook(lambda g: 2 * g)
        x.register_post_accumulate_grad_hook(lambda x: seen.append(x.grad.clone()))
    y = Vector(f)(*xs)
    y.register_hook(torch.sin)
    y.grad_fn.register_hook(lambda given, got: seen.append(got[0]))
    y.sum().backward()
    return sorted(seen, key=lambda g: (g.shape, g.sum().item()))


def saved_hooks(f: Fn, inputs: Inputs) -> Any:
    with saved_tensors_hooks(lambda x: [x.detach().clone()], lambda packed: packed[0]):
        return backward(f, inputs)


def checkpointed(f: Fn, inputs: Inputs, *, use_reentrant: bool) -> Any:
    return backward(f, inputs, functools.partial(checkpoint, Loss(f), use_reentrant=use_reentrant))


def threads(f: Fn, inputs: Inputs) -> Any:
    with ThreadPoolExecutor(4) as workers:
        return list(workers.map(lambda _: backward(f, inputs), range(12)))


def dispatch_mode(f: Fn, inputs: Inputs) -> Any:
    with DispatchLog():
        return backward(f, inputs)


class Wrapped(Tensor):
    """A tensor subclass that holds a tensor, and works on that."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor, requires_grad: bool = False) -> Any:
        made = Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, requires_grad=requires_grad)
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wrappers = {id(x.held): x for x in tree_leaves((args, kwargs)) if isinstance(x, cls)}
        args, kwargs = tree_map(lambda x: x.held if isinstance(x, cls) else x, (args, kwargs or {}))
        result = func(*args, **kwargs)
        return tree_map(lambda x: cls._wrap(x, wrappers) if isinstance(x, Tensor) else x, result)

    @classmethod
    def _wrap(cls, held: Tensor, wrappers: dict[int, Any]) -> Any:
        """The wrapper that was written, or a new one. Lazy conjugation is not for subclasses."""
        return wrappers[id(held)] if id(held) in wrappers else cls(held.resolve_conj().resolve_neg())


def subclass(f: Fn, inputs: Inputs) -> Any:
    gradients = backward(f, lambda: tuple(Wrapped(x) for x in inputs()))
    return [None if each is None else each.held for each in gradients]


def fake(f: Fn, inputs: Inputs) -> Any:
    """There are no values to be compared, but shapes and dtypes."""
    with FakeTensorMode() as mode:
        gradients = backward(f, lambda: tuple(mode.from_tensor(x) for x in inputs()))
    return [None if g is None else (g.shape, g.dtype, g.device) for g in gradients]


def func_vjp(f: Fn, inputs: Inputs) -> Any:
    y, pull_back = vjp(Vector(f), *inputs())
    return pull_back(y.cos())


def grad_of_grad(f: Fn, inputs: Inputs) -> Any:
    xs = inputs()
    first = grad(Loss(f), argnums=all_of(xs))
    return grad(lambda *xs: sum(each.square().sum() for each in first(*xs)), argnums=all_of(xs))(*xs)


def jacfwd_of_jacrev(f: Fn, inputs: Inputs) -> Any:
    xs = inputs()
    return jacfwd(jacrev(Vector(f), argnums=all_of(xs)), argnums=all_of(xs))(*xs)


def jacrev_of_jacfwd(f: Fn, inputs: Inputs) -> Any:
    xs = inputs()
    return jacrev(jacfwd(Vector(f), argnums=all_of(xs)), argnums=all_of(xs))(*xs)


def call_functional(f: Fn, inputs: Inputs) -> Any:
    net = Net(Loss(f), inputs())
    return grad(lambda parameters: functional_call(net, parameters, ()))(dict(net.named_parameters()))


def func_jvp(f: Fn, inputs: Inputs) -> Any:
    xs = inputs()
    return jvp(Vector(f), xs, tangents(xs))


def each_jacfwd(f: Fn, inputs: Inputs) -> Any:
    """With respect to one input, so that the others have no tangents."""
    xs = inputs()
    return [jacfwd(Vector(f), argnums=i)(*xs) for i in all_of(xs)]


def linearized(f: Fn, inputs: Inputs) -> Any:
    xs = inputs()
    return linearize(Vector(f), *xs)[1](*tangents(xs))


def dual(f: Fn, inputs: Inputs) -> Any:
    xs = inputs()
    with forward_ad.dual_level():
        duals = map(forward_ad.make_dual, xs, tangents(xs))
        return forward_ad.unpack_dual(Vector(f)(*duals)).tangent


def dual_of_backward(f: Fn, inputs: Inputs) -> Any:
    xs = leaves(inputs)
    with forward_ad.dual_level():
        duals = list(map(forward_ad.make_dual, xs, tangents(xs)))
        gradients = torch.autograd.grad(Loss(f)(*duals), duals, create_graph=True)
        return [forward_ad.unpack_dual(each).tangent for each in gradients]


def vmapped(f: Fn, inputs: Inputs) -> Any:
    return vmap(Vector(f))(*inputs((2,)))


def per_sample(f: Fn, inputs: Inputs) -> Any:
    xs = inputs((2,))
    return vmap(grad(Loss(f), argnums=all_of(xs)))(*xs)


def grad_of_vmap(f: Fn, inputs: Inputs) -> Any:
    xs = inputs((2,))
    batched = vmap(Vector(f))
    return grad(lambda *xs: batched(*xs).square().sum(), argnums=all_of(xs))(*xs)


def vmap_of_jvp(f: Fn, inputs: Inputs) -> Any:
    xs = inputs((2,))
    return vmap(lambda *both: jvp(Vector(f), both[: len(xs)], both[len(xs) :])[1])(*xs, *tangents(xs))


def traced_grad(f: Fn, inputs: Inputs) -> Any:
    xs = inputs()
    return make_fx(grad(Loss(f), argnums=all_of(xs)))(*xs)(*(x + 0.1 for x in xs))


def traced_grad_plain(f: Fn, inputs: Inputs) -> Any:
    return of_all(grad, Loss(f), lambda: tuple(x + 0.1 for x in inputs()))


def exported(f: Fn, inputs: Inputs) -> Any:
    """The forward; what is exported is then differentiated."""
    return backward(f, inputs, torch.export.export(OfInputs(Loss(f)), inputs()).module())


def exported_step(f: Fn, inputs: Inputs) -> Any:
    """Forward and backward in one graph."""
    net = Net(Loss(f), inputs())
    experimental = importlib.import_module("torch.export.experimental")  # takes seconds
    step = experimental._export_forward_backward(torch.export.export(net, ()))
    _, *gradients = step.graph_module(*net.values)
    return gradients


def compiled(f: Fn, inputs: Inputs, backend: str) -> Any:
    """What was compiled with other formulas lies in torch's cache on disk, which takes no notice of formulas."""
    with torch._inductor.utils.fresh_cache():
        return backward(f, inputs, torch.compile(Loss(f), fullgraph=True, backend=backend))


def compiled_transform(transform: Fn, kind: type[Vector], f: Fn, inputs: Inputs) -> Any:
    xs = inputs()
    return torch.compile(transform(kind(f), argnums=all_of(xs)), fullgraph=True, backend="aot_eager")(*xs)


def compiled_per_sample(f: Fn, inputs: Inputs) -> Any:
    xs = inputs((2,))
    per_sample = vmap(grad(Loss(f), argnums=all_of(xs)))
    return torch.compile(per_sample, fullgraph=True, backend="aot_eager")(*xs)


class Transform(NamedTuple):
    """What to do with an op, and with the same function in plain torch, if that is another thing."""

    run: Callable[[Fn, Inputs], Any]
    plain: Callable[[Fn, Inputs], Any] | None = None


def _over_all(transform: Fn, kind: type[Vector]) -> Callable[[Fn, Inputs], Any]:
    return lambda f, inputs: of_all(transform, kind(f), inputs)


def _compiled_over_all(transform: Fn, kind: type[Vector]) -> Transform:
    return Transform(functools.partial(compiled_transform, transform, kind), _over_all(transform, kind))


#: Reverse mode, then torch.func, then forward mode, batches, and what traces.
TRANSFORMS: dict[str, Transform] = {
    "backward": Transform(backward),
    "backward, twice": Transform(retain_graph),
    "create_graph": Transform(create_graph),
    "is_grads_batched": Transform(batched),
    "hooks": Transform(hooks),
    "saved_tensors_hooks": Transform(saved_hooks, backward),
    "checkpoint": Transform(functools.partial(checkpointed, use_reentrant=False), backward),
    "checkpoint, reentrant": Transform(functools.partial(checkpointed, use_reentrant=True), backward),
    "threads": Transform(threads, lambda f, inputs: [backward(f, inputs)] * 12),
    "TorchDispatchMode": Transform(dispatch_mode, backward),
    "tensor subclass": Transform(subclass, backward),
    "grad": Transform(_over_all(grad, Loss)),
    "vjp": Transform(func_vjp),
    "jacrev": Transform(_over_all(jacrev, Vector)),
    "grad(grad)": Transform(grad_of_grad),
    "functional_call": Transform(call_functional),
    "jvp": Transform(func_jvp),
    "jacfwd": Transform(_over_all(jacfwd, Vector)),
    "jacfwd, one input": Transform(each_jacfwd),
    "linearize": Transform(linearized),
    "dual numbers": Transform(dual),
    "dual numbers, grad": Transform(dual_of_backward),
    "hessian": Transform(_over_all(hessian, Loss)),
    "jacfwd(jacrev)": Transform(jacfwd_of_jacrev),
    "jacrev(jacfwd)": Transform(jacrev_of_jacfwd),
    "vmap": Transform(vmapped),
    "vmap(grad)": Transform(per_sample),
    "grad(vmap)": Transform(grad_of_vmap),
    "vmap(jvp)": Transform(vmap_of_jvp),
    "FakeTensorMode": Transform(fake, lambda f, inputs: [(x.shape, x.dtype, x.device) for x in inputs()]),
    "make_fx(grad)": Transform(traced_grad, traced_grad_plain),
    "export": Transform(exported, backward),
    "export, training step": Transform(exported_step, backward),
    "compile, aot_eager": Transform(functools.partial(compiled, backend="aot_eager"), backward),
    "compile, inductor": Transform(functools.partial(compiled, backend="inductor"), backward),
    "compile(grad)": _compiled_over_all(grad, Loss),
    "compile(jacfwd)": _compiled_over_all(jacfwd, Vector),
    "compile(vmap(grad))": Transform(compiled_per_sample, per_sample),
}
SHAPES = {shape.__name__: shape for shape in gradient_ops.SHAPES}


# Cells ----------------------------------------------------------------------------------------------------------


def measure(transform: Transform, program: Program) -> str:
    """The cell of a transform and an op."""
    expected = (transform.plain or transform.run)(program.reference, program.inputs)
    try:
        actual = transform.run(program.op, program.inputs)
    except Exception:
        return RAISES
    return compare(actual, expected)


def compare(actual: Any, expected: Any) -> str:
    (got, spec), (wanted, wanted_spec) = _flatten(actual), _flatten(expected)
    if spec != wanted_spec:
        return WRONG
    cells = {_compare(*pair) for pair in zip(got, wanted, strict=True)}
    return ZERO if ZERO in cells else WRONG if WRONG in cells else RIGHT


def _flatten(value: Any) -> tuple[list[Any], Any]:
    return tree_flatten(value, is_leaf=lambda x: x is None)


def _compare(actual: Any, expected: Any) -> str:
    if not isinstance(expected, Tensor):
        if expected is None and isinstance(actual, Tensor):
            return WRONG if actual.any() else RIGHT
        return RIGHT if actual == expected else WRONG
    if actual is None:
        return ZERO if expected.any() else RIGHT
    if actual.shape == expected.shape and torch.allclose(actual, expected, rtol=1e-8, atol=1e-10):
        return RIGHT
    return WRONG if actual.any() else ZERO


def column(shape: Callable[[Maker], Program], maker: Maker) -> dict[str, str]:
    """The cells of an op, by transform."""
    try:
        program = shape(maker)
    except Exception:
        return dict.fromkeys(TRANSFORMS, REFUSED)
    cells = {}
    for name, transform in TRANSFORMS.items():
        torch._dynamo.reset()
        cells[name] = measure(transform, program)
        unwind()
    return cells


def unwind() -> None:
    """Leave the levels that an error left open."""
    while torch._C._functorch.peek_interpreter_stack() is not None:
        torch._C._functorch.pop_dynamic_layer_stack()
    while forward_ad._current_level >= 0:
        forward_ad.exit_dual_level()
    torch._C._autograd._saved_tensors_hooks_enable()
    try:
        torch._C._enter_dual_level()
    except RuntimeError:  # there is at most one, so one is open
        pass
    torch._C._exit_dual_level(level=0)


# The table ------------------------------------------------------------------------------------------------------


def letters() -> str:
    """One for each op."""
    return ascii_letters[: len(SHAPES)]


def table(ours: dict[str, dict[str, str]], theirs: dict[str, dict[str, str]]) -> str:
    """Two tables side by side: a line for each transform, a letter for each op. The arguments have columns."""
    width, top = max(map(len, TRANSFORMS)), letters()
    lines = [f"{'':{width}}  {'customops':{len(top)}}  torch.library", f"{'':{width}}  {top}  {top}"]
    for name in TRANSFORMS:
        halves = ("".join(cells[shape][name] for shape in SHAPES) for cells in (ours, theirs))
        lines.append("  ".join([f"{name:{width}}", *halves]))
    lines.append("")
    for symbol, meaning in LEGEND.items():
        counts = [Counter(cell for column in cells.values() for cell in column.values()) for cells in (ours, theirs)]
        lines.append(f"{symbol}  {counts[0][symbol]:4}  {counts[1][symbol]:4}  {meaning}")
    lines.append("")
    lines += [f"{letter}  {shape.__doc__}" for letter, shape in zip(top, SHAPES.values(), strict=True)]
    return "\n".join(lines)


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable()
    torch.set_num_threads(1)
    ours, theirs = Maker(Registry(), "table_ours"), TorchMaker("table_theirs")
    print(table(*({name: column(shape, maker) for name, shape in SHAPES.items()} for maker in (ours, theirs))))


if __name__ == "__main__":
    main()
