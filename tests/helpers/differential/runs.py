"""Arguments, contexts to call in, and what is compared of two calls."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from helpers.differential.ops import (
    shape_of,
)


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
    events = [event.name for event in profile.function_events if "[" not in event.name]  # but kernels, which ours names
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
