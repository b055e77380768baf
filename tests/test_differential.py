"""Ops of ours against the same ops of `torch.library`: what a call does may not differ, whatever shortcut it takes.

A case is an op, its arguments and a context that the call is made in. Both ops are called with arguments of the same
kind, and all that can be seen of the two calls is compared. Where torch is wrong, `DIFFERENCES` says so.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, List, Optional, Sequence, Tuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from customops import Registry
from customops.errors import UnsupportedError

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{text}")
    for text in (
        "torch.quantize_per_tensor",  # deprecated on 2.15
        "The PyTorch API of nested tensors is in prototype stage",
        "Sparse CSR tensor support is in beta state",
        "There is a performance drop",
        "Casting complex values to real",
        "Warning only once for all operators",  # tests override kernels
    )
]

CASES = settings(
    deadline=None,
    max_examples=50,
    print_blob=True,
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

# What kernels and formulas see --------------------------------------------------------------------------------------

SEEN: list[Any] = []
PARAMETER = torch.nn.Parameter(torch.ones(1))


def see(where: str, *values: Any) -> None:
    """Note what can be seen from inside a kernel or formula: the modes, and what it was given."""
    records = torch.is_grad_enabled(), (PARAMETER * 2).grad_fn is not None
    if where == "kernel":  # never here; in torch a kernel below autograd, or for inference tensors, finds it on
        records = (False, False)
    modes = *records, torch.is_inference_mode_enabled()
    SEEN.append((where, *modes, forward_ad._current_level, [shape_of(value) for value in values]))


def shape_of(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: shape_of(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [shape_of(item) for item in value]
    if isinstance(value, Tensor):
        kind = type(value).__name__, value.dtype, str(value.layout), value.is_conj(), value.is_neg()
        # not is_leaf: inside a dispatch mode torch deadlocks over it for a view whose history has to be made anew
        return *kind, value.requires_grad, getattr(value, "mark", None)
    return value


def times(x: Tensor, by: Any) -> Tensor:
    return x.clone() if x.is_quantized else x * by


# Ops ----------------------------------------------------------------------------------------------------------------


def scale(x: Tensor, by: float = 2.0) -> Tensor:
    see("kernel", x, by)
    return times(x, by)


def product(x: Tensor, y: Tensor) -> Tensor:
    see("kernel", x, y)
    return x * y


def both(x: Tensor, y: Tensor) -> Tuple[Tensor, Tensor]:
    see("kernel", x, y)
    return times(x, 2), times(y, 3)


def total(xs: List[Tensor], weights: Optional[Sequence[float]] = None) -> Tensor:
    see("kernel", xs, weights)
    return functools.reduce(torch.add, (times(x, by) for x, by in zip(xs, weights or [1.0] * len(xs), strict=False)))


def each(xs: List[Tensor]) -> List[Tensor]:
    see("kernel", xs)
    return [times(x, 2) for x in xs]


def gaps(xs: Sequence[Optional[Tensor]], n: int) -> Tensor:
    see("kernel", xs, n)
    return sum(times(x, n) for x in xs if x is not None)


def maybe(x: Tensor, bias: Optional[Tensor] = None, sizes: Optional[Sequence[int]] = None) -> Tensor:
    see("kernel", x, bias, sizes)
    return times(x, 2 + len(sizes or [])) if bias is None else x + bias


def options(x: Tensor, n: int, name: str = "a", dtype: Optional[torch.dtype] = None, *, by: float = 1.0) -> Tensor:
    see("kernel", x, n, name, dtype, by)
    return times(x, n * len(name) * by).to(dtype or x.dtype, copy=True)


def mean(x: Tensor) -> Tuple[float, int]:
    see("kernel", x)
    return float(x.abs().sum()), x.numel()


def fill(x: Tensor, by: float = 2.0) -> None:
    see("kernel", x, by)
    x.mul_(by)


def fill_all(xs: List[Tensor], y: Tensor) -> None:
    see("kernel", xs, y)
    for x in xs:
        x.mul_(2)


def accumulate(x: Tensor, into: Tensor) -> Tensor:
    see("kernel", x, into)
    into.add_(1)
    return times(x, 2)


def scale_(x: Tensor, y: Tensor) -> Tensor:
    see("kernel", x, y)
    return x.mul_(2)


def scale_out(x: Tensor, *, out: Tensor) -> Tensor:
    see("kernel", x, out)
    return out.copy_(x)


def ramp(size: List[int], device: torch.device) -> Tensor:
    see("kernel", size, device)
    return torch.arange(size[0], device=device)


def row(x: Tensor, i: int) -> Tensor:
    see("kernel", x, i)
    return x[i]


def same(x: Tensor) -> Tensor:
    see("kernel", x)
    return x


def fails(x: Tensor, y: Tensor) -> Tensor:
    see("kernel", x, y)
    raise KeyError("a kernel's own error")


@dataclass(frozen=True)
class Op:
    """An op to be defined on both sides, and calls of it: ``call(op, *tensors)`` for a number of tensors."""

    fn: Callable[..., Any]
    calls: tuple[Callable[..., Any], ...]
    tensors: int = 1
    name: str = ""
    keywords: dict[str, Any] = field(default_factory=dict)
    fake: Callable[..., Any] | None = None
    factors: tuple[Any, ...] = ()  # gradient of each input
    registered: tuple[str, ...] = ()

    def define(self, custom_op: Callable[..., Any], qualname: str) -> Any:
        op = custom_op(qualname, self.fn, **{"mutates_args": ()} | self.keywords)
        if self.fake is not None:
            op.register_fake(self.fake)
        if self.factors:
            op.register_autograd(self._backward, setup_context=self._with_keywords if self.has_keywords else self._save)
        if "autocast" in self.registered:
            op.register_autocast("cpu", torch.bfloat16)
        if "vmap" in self.registered:
            op.register_vmap(lambda info, dims, x, by=2.0: (see("vmap", dims[0], x, by), (op(x, by), dims[0]))[1])
        return op

    @property
    def has_keywords(self) -> bool:
        return self.fn is options

    def _save(self, ctx: Any, inputs: Any, output: Any) -> None:
        see("setup", inputs, output)
        ctx.save_for_backward(*(value for value in tree_leaves(inputs) if isinstance(value, Tensor)))
        ctx.lengths = [len(value) if isinstance(value, list) else None for value in inputs]

    def _with_keywords(self, ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
        see("keywords", *keyword_only_inputs.items())
        self._save(ctx, inputs, output)

    def _backward(self, ctx: Any, *grads: Any) -> Any:
        see("backward", grads, ctx.needs_input_grad, ctx.saved_tensors)
        first = next(grad for grad in tree_leaves(grads) if grad is not None)
        result = []
        for by, length in zip(self.factors, ctx.lengths[: len(ctx.needs_input_grad)], strict=False):
            one = None if by is None else first * by
            result.append(one if length is None else [one] * length)
        return tuple(result)


def like(x: Any, *_: Any, **__: Any) -> Any:
    return torch.zeros_like(x)  # zeros, as it is also what a mix of dense and meta tensors comes to


OPS = {
    op.name or op.fn.__name__: op
    for op in (
        Op(scale, (lambda op, x: op(x), lambda op, x: op(x, 3.0), lambda op, x: op(by=2.0, x=x)), 1, fake=like,
           factors=(2.0, None), registered=("autocast",)),
        Op(scale, (lambda op, x: op(x), lambda op, x: op(x, 3.0)), 1, "no_formula", fake=like, registered=("vmap",)),
        Op(scale, (lambda op, x: op(x),), 1, "for_cpu", {"device_types": "cpu"}, like, (2.0, None)),
        Op(product, (lambda op, x, y: op(x, y),), 2, fake=like, factors=(2.0, 3.0)),
        Op(both, (lambda op, x, y: op(x, y), lambda op, x, y: op(x, y=y)), 2,
           fake=lambda x, y: (like(x), like(y)), factors=(2.0, 3.0), registered=("autocast",)),
        Op(total, (lambda op, x, y: op([x, y]), lambda op, x, y: op([x, y], [2.0, 3.0]), lambda op, x, y: op((x,))), 2,
           fake=lambda xs, weights=None: like(xs[0]), factors=(2.0, None), registered=("autocast",)),
        Op(each, (lambda op, x, y: op([x, y]), lambda op, x, y: op([x])), 2, fake=lambda xs: list(map(like, xs)),
           factors=(2.0,)),
        Op(gaps, (lambda op, x: op([None, x], 2), lambda op, x: op([x, x], 1)), 1, fake=lambda xs, n: like(xs[-1])),
        Op(maybe, (lambda op, x, y: op(x), lambda op, x, y: op(x, y), lambda op, x, y: op(x, None, [1, 2]),
                   lambda op, x, y: op(x, sizes=[3])), 2, fake=like, factors=(2.0, 3.0, None)),
        Op(options, (lambda op, x: op(x, 2), lambda op, x: op(x, 1, "bc", torch.float64), lambda op, x: op(x, 1, by=3),
                     lambda op, x: op(x, n=2, dtype=torch.float16, by=1.0)), 1,
           fake=lambda x, n, name="a", dtype=None, *, by=1.0: x.new_zeros(x.shape, dtype=dtype),
           factors=(2.0, None, None, None)),
        Op(mean, (lambda op, x: op(x),)),
        Op(fill, (lambda op, x: op(x), lambda op, x: op(x, by=3.0)), 1, "fill", {"mutates_args": {"x"}}),
        Op(fill_all, (lambda op, x, y: op([x, y], y), lambda op, x, y: op([x], y)), 2, "", {"mutates_args": {"xs"}}),
        Op(accumulate, (lambda op, x, y: op(x, y),), 2, "", {"mutates_args": {"into"}}, like),
        Op(scale_, (lambda op, x, y: op(x, y),), 2, "", {"mutates_args": {"x"}, "tags": torch.Tag.inplace}),
        Op(scale_out, (lambda op, x, y: op(x, out=y),), 2, "", {"mutates_args": {"out"}, "tags": torch.Tag.out}),
        Op(ramp, (lambda op: op([3], torch.device("cpu")), lambda op: op([2], torch.device("meta"))), 0, "",
           {"device_types": "cpu"}, lambda size, device: torch.zeros(size, dtype=torch.int64, device=device)),
        Op(row, (lambda op, x: op(x, 0), lambda op, x: op(x, 1)), 1, "row",
           {"schema": "(Tensor(a) x, int i) -> Tensor(a)"}, row),
        Op(same, (lambda op, x: op(x),), 1, fake=like),
        Op(fails, (lambda op, x, y: op(x, y),), 2, fake=like, factors=(2.0, 3.0)),
    )
}  # fmt: skip

# Arguments ----------------------------------------------------------------------------------------------------------


class Plain(Tensor):
    """A subclass that changes nothing."""


def grad(x: Tensor) -> Tensor:
    return x.requires_grad_()


def under(root: Tensor, x: Tensor) -> Tensor:
    """`x`, and where its gradient goes."""
    x.root = root  # type: ignore[attr-defined]
    return x


def inference(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x.clone()


def imaginary(x: Tensor) -> Tensor:
    return torch.complex(x, x)


#: Kind of argument -> made from a tensor of two rows of three numbers.
KINDS: dict[str, Callable[[Tensor], Any]] = {
    "dense": lambda x: x,
    "leaf": grad,
    "transposed": lambda x: x.view(3, 2).t(),
    "slice": lambda x: x.repeat(1, 2)[:, ::2],
    "expanded": lambda x: x[:1].expand(2, 3),
    "empty": lambda x: x[:0],
    "scalar": lambda x: x[0, 0].clone(),
    "double": lambda x: x.double(),
    "integers": lambda x: x.long(),
    "complex": imaginary,
    "complex leaf": lambda x: grad(imaginary(x)),
    "conjugate": lambda x: imaginary(x).conj(),
    "conjugate of a leaf": lambda x: (lambda root: under(root, root.conj()))(grad(imaginary(x))),
    "negative": lambda x: imaginary(x).conj().imag,
    "sparse": lambda x: x.to_sparse(),
    "sparse leaf": lambda x: grad(x.to_sparse()),
    "compressed": lambda x: x.to_sparse_csr(),
    "mkldnn": lambda x: x.to_mkldnn(),
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.5, 0, torch.qint8),
    "nested": lambda x: torch.nested.nested_tensor([x[0], x[1, :2]]),
    "nested leaf": lambda x: torch.nested.nested_tensor([x[0], x[1, :2]], requires_grad=True),
    "jagged leaf": lambda x: torch.nested.nested_tensor([x[0], x[1, :2]], layout=torch.jagged, requires_grad=True),
    "jagged": lambda x: torch.nested.nested_tensor([x[0], x[1, :2]], layout=torch.jagged),
    "meta": lambda x: x.to("meta"),
    "meta leaf": lambda x: grad(x.to("meta")),
    "inference": inference,
    "not a leaf": lambda x: under(grad(x), x * 1),
    "view of a leaf": lambda x: under(grad(x), x[:]),
    "view of no leaf": lambda x: (lambda root: under(root, (root * 1)[:]))(grad(x)),
    "view": lambda x: x[:],
    "parameter": torch.nn.Parameter,
    "subclass": lambda x: x.as_subclass(Plain),
    "subclass leaf": lambda x: grad(x.as_subclass(Plain)),
    "wrapper": lambda x: TwoTensor(x, x + 1),
    "wrapper leaf": lambda x: grad(TwoTensor(x, x + 1)),
    "zero": lambda x: torch._efficientzerotensor((2, 3)),
    "number": lambda x: 2.0,
}


def make(kind: str, mark: int) -> Any:
    value = KINDS[kind](torch.arange(6.0).reshape(2, 3).clone() + mark)
    if isinstance(value, Tensor):
        value.mark = mark  # type: ignore[attr-defined]
    return value


# What is compared ---------------------------------------------------------------------------------------------------


class Raised:
    """An error; of ours it is enough to be of a class derived from the other's."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Raised):
            return NotImplemented
        mine, others = type(self.error), type(other.error)
        return issubclass(mine, others) or issubclass(others, mine)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self.error).__name__}: {str(self.error)[:300]}"


def attempt(fn: Callable[..., Any], *args: Any) -> Any:
    try:
        return fn(*args)
    except Exception as error:
        return Raised(error)


def numbers(x: Tensor) -> str | None:
    if isinstance(x, TwoTensor):
        return f"{numbers(x.a)} {numbers(x.b)}"
    if x.is_meta or isinstance(x, FakeTensor):
        return None
    if x.is_nested:
        return " ".join(str(numbers(part)) for part in x.detach().unbind())
    dense = x.detach().int_repr() if x.is_quantized else x.detach()
    return str((dense.to_dense() if dense.layout != torch.strided else dense).tolist())


def is_strided_nested(x: Tensor) -> bool:
    return x.is_nested and x.layout == torch.strided


def plain_sizes(sizes: Any) -> list[int | None]:
    """Sizes, without the names that each nested tensor gives its own."""
    return [size if type(size) is int else None for size in sizes]


FACTS: dict[str, Callable[[Tensor], Any]] = {
    "type": lambda x: type(x).__name__,
    "dtype": lambda x: (x.dtype, x.device, x.layout),
    "shape": lambda x: str(x._nested_tensor_size() if is_strided_nested(x) else plain_sizes(x.shape)),
    "stride": lambda x: (plain_sizes(x.stride()), x.storage_offset()),
    "graph": lambda x: (x.requires_grad, x.is_leaf, x.grad_fn is not None),
    "view": lambda x: (x._is_view(), x.is_conj(), x.is_neg(), x.is_inference()),
    "version": lambda x: None if x.is_inference() else x._version,
    "numbers": numbers,
}


def describe(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [describe(item) for item in value]
    if not isinstance(value, Tensor):
        return value if isinstance(value, Raised) else repr(value)
    return {fact: attempt(look, value) for fact, look in FACTS.items()}


def storage(x: Tensor) -> Any:
    return attempt(lambda: x.untyped_storage()._cdata)


def relation(result: Tensor, argument: Any) -> str:
    if result is argument:
        return "is"
    known = isinstance(argument, Tensor) and isinstance(storage(argument), int)
    return "shares" if known and storage(result) == storage(argument) else "apart"


def gradients(results: list[Tensor], tensors: tuple[Any, ...]) -> Any:
    outputs = [result for result in results if result.requires_grad]
    roots = [getattr(x, "root", x) for x in tensors if isinstance(x, Tensor)]
    inputs = list({id(root): root for root in roots if root.requires_grad}.values())
    if not outputs or not inputs:
        return None
    ones = [torch.ones_like(output) for output in outputs]
    return torch.autograd.grad(outputs, inputs, ones, allow_unused=True)


# Contexts -----------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """One call: ``invoke(*tensors)`` makes it. `log` takes what a context sees of it."""

    invoke: Callable[..., Any]
    tensors: tuple[Any, ...]
    is_ours: bool
    log: list[Any] = field(default_factory=list)

    def __call__(self) -> Any:
        return self.invoke(*self.tensors)

    def sum(self, *tensors: Any) -> Tensor:
        results = [x for x in tree_leaves(self.invoke(*tensors)) if isinstance(x, Tensor)]
        return functools.reduce(torch.add, (x.sum() for x in results))


class Operations(TorchDispatchMode):
    def __init__(self, log: list[Any]) -> None:
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.log.append((func.name().split("::")[1], [t.__name__ for t in types], shape_of(args), shape_of(kwargs)))
        return func(*args, **kwargs or {})


class Functions(TorchFunctionMode):
    def __init__(self, log: list[Any]) -> None:
        super().__init__()
        self.log = log

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.log.append((func.__name__, shape_of(args), shape_of(kwargs)))
        return func(*args, **kwargs or {})


def inside(*managers: Callable[[], Any]) -> Callable[[Run], Any]:
    """A context that is nothing but the inside of some context managers."""

    def run(call: Run) -> Any:
        with contextlib.ExitStack() as stack:
            for manager in managers:
                stack.enter_context(manager())
            return call()

    return run


def in_mode(mode: Any) -> Callable[[Run], Any]:
    def run(call: Run) -> Any:
        with mode(call.log):
            return call()

    return run


def in_thread(call: Run) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(attempt(call)))
    thread.start()
    thread.join()
    return results[0]


def profiled(call: Run) -> Any:
    with torch.autograd.profiler.profile(use_kineto=False) as profile:
        result = attempt(call)
    events = [event.name for event in profile.function_events]
    call.log += [event.split("::")[1] for event in events if event.startswith("t_") and "::" in event]
    return result


def with_saved_tensors_hooks(call: Run) -> Any:
    def unpack(x: Any) -> Any:
        call.log.append(("unpack", shape_of(x)))
        return x

    def pack(x: Any) -> Any:
        call.log.append(("pack", shape_of(x)))
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return call()


def fake(call: Run) -> Any:
    with FakeTensorMode() as mode:
        return call.invoke(*(mode.from_tensor(x) if isinstance(x, Tensor) else x for x in call.tensors))


def traced(tracing_mode: str) -> Callable[[Run], Any]:
    def run(call: Run) -> Any:
        graph = make_fx(call.invoke, tracing_mode=tracing_mode)(*call.tensors)
        return [(node.op, str(node.target).split(".")[1:], len(node.args)) for node in graph.graph.nodes]

    return run


def scripted(call: Run) -> Any:
    return [node.kind().split("::")[1] for node in torch.jit.trace(call.invoke, call.tensors).inlined_graph.nodes()]


def dual(call: Run) -> Any:
    def with_tangent(x: Any) -> Any:
        return forward_ad.make_dual(x, torch.ones_like(x)) if isinstance(x, Tensor) else x

    with forward_ad.dual_level():
        result = call.invoke(*map(with_tangent, call.tensors))
        return tree_map_only(Tensor, lambda x: tuple(forward_ad.unpack_dual(x)), result)


def level_without_tangents(call: Run) -> Any:
    with forward_ad.dual_level():
        return call()


def func_grad(call: Run) -> Any:
    if call.is_ours:
        return torch.func.grad(call.sum, tuple(range(len(call.tensors))))(*call.tensors)
    # torch's ops raise there; what func.grad should come to is what the plain way gives
    tensors = [torch.as_tensor(x).detach().requires_grad_() for x in call.tensors]
    found = torch.autograd.grad(call.sum(*tensors), tensors, allow_unused=True)
    return tuple(torch.zeros_like(x) if grad is None else grad for x, grad in zip(tensors, found, strict=True))


def jvp(call: Run) -> Any:
    return torch.func.jvp(call.invoke, call.tensors, tuple(map(torch.ones_like, call.tensors)))


CONTEXTS: dict[str, Callable[[Run], Any]] = {
    "plain": inside(),
    "no_grad": inside(torch.no_grad),
    "inference_mode": inside(torch.inference_mode),
    "grad in no_grad": inside(torch.no_grad, torch.enable_grad),
    "no inference in inference": inside(torch.inference_mode, lambda: torch.inference_mode(False)),
    "autocast": inside(lambda: torch.autocast("cpu", torch.bfloat16)),
    "autocast off": inside(lambda: torch.autocast("cpu"), lambda: torch.autocast("cpu", enabled=False)),
    "fake": fake,
    "dispatch mode": in_mode(Operations),
    "function mode": in_mode(Functions),
    "python dispatcher": inside(enable_python_dispatcher),
    "below autograd": inside(torch._C._AutoDispatchBelowAutograd),
    "thread": in_thread,
    "profiler": profiled,
    "saved_tensors_hooks": with_saved_tensors_hooks,
    "anomaly": inside(lambda: torch.autograd.set_detect_anomaly(True)),
    "functionalize": lambda call: torch.func.functionalize(call.invoke)(*call.tensors),
    "vmap": lambda call: torch.vmap(call.invoke)(*call.tensors),
    "func.grad": func_grad,
    "func.jvp": jvp,
    "dual": dual,
    "dual_level": level_without_tangents,
    "make_fx": traced("real"),
    "make_fx fake": traced("fake"),
    "jit.trace": scripted,
}

# Calls --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One call."""

    op: str
    call: int
    kinds: tuple[str, ...]
    twice: bool  # is one tensor passed for all?
    context: str

    def run(self, op: Any, is_ours: bool) -> dict[str, Any]:
        """All that can be seen of the call."""
        SEEN.clear()
        tensors = tuple(make(kind, mark) for mark, kind in enumerate(self.kinds))
        tensors = tensors[:1] * len(tensors) if self.twice else tensors
        run = Run(functools.partial(OPS[self.op].calls[self.call], op), tensors, is_ours)
        result = attempt(CONTEXTS[self.context], run)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        return {
            "result": describe(result),
            "arguments": describe(tensors),
            "aliases": [[relation(output, x) for x in tensors] for output in outputs],
            "gradients": describe(attempt(gradients, outputs, tensors)),
            "seen": SEEN[:],
            "log": run.log,
        }

    @property
    def writes(self) -> bool:
        return bool(OPS[self.op].keywords.get("mutates_args"))

    def has(self, *words: str) -> bool:
        """Is an argument of a kind with one of these words in its name?"""
        return any(word in kind for word in words for kind in self.kinds)


def differs_on_purpose(case: Case, ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Where torch is wrong, or cannot serve as the reference."""
    if case.op == "gaps" and case.has("leaf", "parameter"):
        return True  # torch does not see that a list with a None in it requires grad, and makes no graph
    if case.op == "ramp" and case.call == 1:
        return not is_raised(
            ours["result"], Exception
        )  # a meta device: torch asks for a kernel, here there is the fake
    if case.context == "profiler" and keys(ours, theirs) == ["log"]:
        # 2.15 calls simple ops of its own past the profiler
        return set(ours["log"]) == {"op"} >= set(theirs["log"]) and len(ours["log"]) > len(theirs["log"])
    if case.context == "vmap" and is_raised(theirs["result"], RuntimeError):
        return True  # torch has no fallback for lists
    if case.context == "vmap":  # the strategy stacks results, torch's fallback takes views of one buffer
        same = [numbers_of(ours[key]) == numbers_of(theirs[key]) for key in ("result", "arguments", "gradients")]
        if all(same):
            return True
    if keys(ours, theirs) == ["result"] and without_version(ours["result"]) == without_version(theirs["result"]):
        return True  # a new tensor that was written may count that
    if case.context == "dual_level" and case.has("nested"):
        return is_raised(theirs["result"], Exception)  # here it is looked for tangents first, which raises as well
    if is_raised(theirs["gradients"], RuntimeError) and "isFloatingType(grad" in str(theirs["gradients"].error):
        return True  # torch does not take the real part of a gradient
    if case.context in ("func.jvp", "dual"):
        # No formula for forward mode: zeros in torch, an error here. Writes then are part of a history, see below.
        return case.writes or is_raised(ours["result"], UnsupportedError) or keys(ours, theirs) == ["seen"]
    if case.context == "func.grad":
        # torch's op raises. The reference went another way: values are all there is to compare, and where functorch
        # itself raises (CSR has no strides, inference tensors are not tracked), none.
        same = numbers_of(ours["result"]) == numbers_of(theirs["result"])
        return case.writes or same or any(is_raised(found["result"], Exception) for found in (ours, theirs))
    # A write to what has a history is part of it here (or refused by autograd, for some views); torch's backward goes
    # past it. Under vmap the op is called on views of its arguments.
    history = case.has("not a leaf", "of a leaf", "of no leaf") or (
        case.context == "vmap" and case.has("leaf", "parameter")
    )
    # Without a formula what is written becomes part of the graph, so that a backward raises; in torch it stays apart.
    return case.writes and (history or case.has("leaf", "parameter"))


def is_raised(value: Any, kind: type[Exception]) -> bool:
    return isinstance(value, Raised) and isinstance(value.error, kind)


def keys(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    return [key for key in ours if ours[key] != theirs[key]]


def without_version(description: Any) -> Any:
    return tree_map_only(dict, lambda facts: {**facts, "version": None}, description, is_leaf=is_facts)


def is_facts(value: Any) -> bool:
    return isinstance(value, dict)


def numbers_of(description: Any) -> Any:
    return tree_map_only(dict, lambda facts: facts["numbers"], description, is_leaf=is_facts)


def check(case: Case, our_op: Any, their_op: Any) -> None:
    theirs, ours = case.run(their_op, False), case.run(our_op, True)
    differing = keys(ours, theirs)
    if differing and not differs_on_purpose(case, ours, theirs):
        assert {key: ours[key] for key in differing} == {key: theirs[key] for key in differing}, case


def cases(name: str, contexts: Sequence[str]) -> st.SearchStrategy[Case]:
    # Reading what these two make of a tensor of zeros, torch reads a null pointer.
    kinds = [kind for kind in KINDS if kind != "zero" or name not in ("gaps", "row")]
    tensors = st.tuples(*[st.sampled_from(kinds)] * OPS[name].tensors)
    calls = st.integers(0, len(OPS[name].calls) - 1)
    return st.builds(Case, st.just(name), calls, tensors, st.booleans(), st.sampled_from(contexts))


#: The ops that may be defined with ``bypass=True``.
BYPASSING = [
    name for name in OPS if name in "scale no_formula for_cpu product both options fill accumulate scale_ fails".split()
]


def define_both(registry: Registry, ns: str, name: str, **options: Any) -> tuple[Any, Any]:
    ours = OPS[name].define(functools.partial(registry.custom_op, **options), f"{ns}_ours::op")
    return ours, OPS[name].define(torch.library.custom_op, f"{ns}_theirs::op")


@pytest.mark.parametrize(("name", "bypass"), [*((name, False) for name in OPS), *((name, True) for name in BYPASSING)])
def test_a_call_is_what_it_is_in_torch(registry: Registry, ns: str, name: str, bypass: bool) -> None:
    our_op, their_op = define_both(registry, ns, name, **{"bypass": True} if bypass else {})
    contexts = [context for context in CONTEXTS if context != "profiler" or not bypass]  # given up with it

    @CASES
    @given(case=cases(name, contexts))
    def all_cases(case: Case) -> None:
        check(case, our_op, their_op)

    all_cases()


@pytest.mark.parametrize(
    "name", ["scale", "no_formula", "for_cpu", "product", "both", "total", "each", "options", "row"]
)
def test_what_differs_on_purpose_does(registry: Registry, ns: str, name: str) -> None:
    op, _ = define_both(registry, ns, name)
    dense = ("dense",) * OPS[name].tensors
    for context in ("func.jvp", "dual"):
        assert is_raised(Case(name, 0, dense, False, context).run(op, True)["result"], UnsupportedError)
    if OPS[name].factors:
        assert not is_raised(Case(name, 0, dense, False, "func.grad").run(op, True)["result"], Exception)


@pytest.mark.parametrize("name", ["scale", "both", "fill", "total"])
def test_compiled_calls_are_what_they_are_in_torch(
    registry: Registry, ns: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiled(call: Run) -> Any:
        return torch.compile(call.invoke, backend="aot_eager", fullgraph=True)(*call.tensors)

    monkeypatch.setitem(CONTEXTS, "compiled", compiled)
    our_op, their_op = define_both(registry, ns, name)
    for kind in ("dense", "transposed", "leaf"):
        check(Case(name, 0, (kind,) * OPS[name].tensors, False, "compiled"), our_op, their_op)


def grows(x: Tensor, sizes: List[int]) -> Tensor:
    sizes.append(3)
    return x * 2


def empties(xs: List[Tensor]) -> Tensor:
    return xs.pop() * 2


def tuple_for_list(x: Tensor) -> List[Tensor]:
    return (x * 2, x * 3)  # type: ignore[return-value]


def integer_for_float(x: Tensor) -> Tuple[Tensor, float]:
    return x * 2, 1


@pytest.mark.parametrize(
    ("kernel", "call"),
    [
        (grows, lambda op, x: op(x, [1])),
        (empties, lambda op, x: op([x, x])),
        (tuple_for_list, lambda op, x: op(x)),
        (integer_for_float, lambda op, x: op(x)),
    ],
)
def test_setup_context_sees_the_same_with_and_without_the_shortcut(
    registry: Registry, ns: str, kernel: Callable[..., Any], call: Callable[..., Any]
) -> None:
    op = registry.custom_op(f"{ns}::op", kernel, mutates_args=())
    op.register_autograd(
        lambda ctx, *grads: None, setup_context=lambda ctx, inputs, output: see("setup", inputs, repr(output))
    )
    x = torch.ones(2, requires_grad=True)
    SEEN.clear()
    call(op, x)
    with Operations([]):  # with a mode about, the op is redispatched
        call(op, x)
    directly, redispatched = SEEN
    assert directly == redispatched


def test_kernels_of_inference_tensors(registry: Registry, ns: str) -> None:
    def f(x: Tensor) -> Tensor:
        return x + (PARAMETER * 2).exp()

    op = registry.custom_op(f"{ns}::f", f, mutates_args=(), bypass=True)
    x = inference(torch.ones(2))
    op(x)
    assert op(x).requires_grad == op._opoverload(x).requires_grad


# Registering again --------------------------------------------------------------------------------------------------


class Twin:
    """An op, and what was registered for it by hand, to be taken back."""

    def __init__(self, op: Any, qualname: str) -> None:
        self.op, self.qualname = op, qualname
        self.libraries: list[Any] = []
        self.switches: list[Any] = []

    def change(self, action: str, by: int) -> None:
        """Register or take back something; `by` tells it from all others."""
        name = self.qualname.split("::")
        if action in ("CPU", "CompositeExplicitAutograd", "ADInplaceOrView"):
            self.libraries.append(torch.library.Library(name[0], "FRAGMENT"))
            self.libraries[-1].impl(name[1], functools.partial(apply, by), action, allow_override=True)
        elif action == "destroy" and self.libraries:
            self.libraries.pop()._destroy()
        elif action == "switch":
            if self.switches:
                self.switches.pop().__exit__(None, None, None)
            else:
                self.switches.append(self.op.set_kernel_enabled("cpu", False))
                self.switches[-1].__enter__()
        elif action == "kernel":
            self.op.register_kernel("cpu")(functools.partial(apply, by))
        elif action == "kernel by name":
            torch.library.register_kernel(self.qualname, "cpu", functools.partial(apply, by))
        elif action == "fake":
            self.op.register_fake(lambda x: x.new_zeros(by))
        elif action == "backward":
            self.op.register_autograd(lambda ctx, grad: grad * by)

    def probe(self) -> list[Any]:
        """Calls of all kinds that may go another way each."""
        leaf = torch.ones(2, requires_grad=True)
        result = attempt(self.op, leaf)
        of_sparse: list[Any] = []
        found = [result, attempt(gradients, [result] if isinstance(result, Tensor) else [], (leaf,)), leaf]
        for manager in (contextlib.nullcontext, torch.no_grad, torch.inference_mode, lambda: Operations([])):
            dense, sparse = torch.ones(2), torch.ones(2).to_sparse()
            with manager():
                found += [attempt(self.op, dense), dense]
                of_sparse.append(numbers_of(describe(attempt(self.op, sparse))))  # its version may differ
        with FakeTensorMode():
            found.append(attempt(self.op, torch.ones(2)))
        return [*(describe(value) for value in found), *of_sparse]


def apply(by: int, x: Tensor) -> Tensor:
    return x * by


ACTIONS = ["kernel", "kernel by name", "CPU", "CompositeExplicitAutograd", "ADInplaceOrView", "destroy", "switch",
           "fake", "backward"]  # fmt: skip


@settings(CASES, max_examples=40)
@given(actions=st.lists(st.sampled_from(ACTIONS), max_size=8))
def test_what_is_registered_counts_at_once_as_in_torch(actions: list[str]) -> None:
    def define(custom_op: Any, qualname: str) -> Twin:
        def f(x: Tensor) -> Tensor:
            return x * 1

        return Twin(custom_op(qualname, f, mutates_args=()), qualname)

    registry, n = Registry(), next(COUNTER)
    with registry.scope():
        ours = define(registry.custom_op, f"t_differential::ours_{n}")
        theirs = define(torch.library.custom_op, f"t_differential::theirs_{n}")
        assert ours.probe() == theirs.probe()
        for by, action in enumerate(actions, 2):
            for twin in (ours, theirs):
                twin.change(action, by)
            assert ours.probe() == theirs.probe(), actions[: by - 1]
        for twin in (ours, theirs):
            for switch in twin.switches:
                switch.__exit__(None, None, None)
            for library in twin.libraries:
                library._destroy()


COUNTER = itertools.count()


@pytest.mark.parametrize(
    "how", ["kernel", "kernel by name", "CPU", "ADInplaceOrView", "autocast", "backward", "switch"]
)
def test_threads_see_at_once_what_is_registered(registry: Registry, ns: str, how: str) -> None:
    def f(x: Tensor) -> Tensor:
        return x * 1

    twin = Twin(registry.custom_op(f"{ns}::f", f, mutates_args=()), f"{ns}::f")
    done, wrong = threading.Event(), list[Any]()
    steady: list[Any] = [None]  # an object for each state that lasts, with what calls give in it

    def observe() -> Any:
        if how == "autocast":
            with torch.autocast("cpu"):
                return twin.op(torch.ones(())).dtype
        leaf = torch.ones((), requires_grad=how == "backward")
        result = twin.op(leaf)
        return torch.autograd.grad(result, leaf)[0].item() if how == "backward" else result.item()

    def call_on() -> None:
        while not done.is_set():
            before = steady[0]
            got = observe()
            if before is not None and before is steady[0] and got != before[0]:
                wrong.append((got, before))

    if how in ("backward", "switch"):
        twin.change("kernel" if how == "switch" else how, 2)
    threads = [threading.Thread(target=call_on) for _ in range(2)]
    for thread in threads:
        thread.start()
    for by in range(2, 22):
        steady[0] = None
        if how == "autocast":
            expected: Any = torch.bfloat16 if by % 2 else torch.float16
            twin.op.register_autocast("cpu", expected)
        else:
            twin.change(how, by)
            expected = (1 if by % 2 == 0 else 2) if how == "switch" else by
        steady[0] = [expected]
        assert observe() == expected
        time.sleep(0.002)
    done.set()
    for thread in threads:
        thread.join(60)
    for each in reversed(twin.libraries):
        each._destroy()
    assert not wrong
