"""Autograd: nodes, version counters, tangents, and what a gradient is compared with."""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
import torch._functorch.autograd_function as _functorch_function
import torch._functorch.pyfunctorch as _functorch
import torch.autograd.forward_ad
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd.function import _SingleLevelFunction

from customops._torch.dispatcher import (
    DispatchKey,
    exclude_keys,
    excluded_in_plain_state,
    key_set,
    mode_count,
    transforms_active,
    without_torch_dispatch,
)
from customops._torch.fakes import known
from customops._torch.library import torch_op_of
from customops._torch.trees import tensors_in, tree_flatten, tree_leaves, tree_unflatten

_C: Any = torch._C

__tracebackhide__ = True  # pytest leaves the frames out


#: Without: ops have no gradients
forward_ad: Any = torch.autograd.forward_ad
_ONCE = torch.autograd.function.once_differentiable(lambda ctx: None).__code__


def once_differentiable_of(fn: Any) -> Callable[..., Any] | None:
    """What torch's decorator `once_differentiable` was given; None if `fn` is something else.

    What the decorator makes gives ``torch.autograd.grad(..., allow_unused=True)`` None for a second derivative.
    """
    found: Callable[..., Any] | None = fn.__wrapped__ if getattr(fn, "__code__", None) is _ONCE else None
    return found


#: ``increment_version(tensors)``: autograd then knows that they were written.
increment_version: Callable[[Iterable[torch.Tensor]], None] = _C._increment_version
#: ``any_requires_grad(*args, **kwargs)``: looks into lists one level deep.
any_requires_grad: Callable[..., bool] = _C._any_requires_grad


class SingleLevelFunction(_SingleLevelFunction):
    """The autograd.Function that functorch itself applies at one level; see `apply_function`."""

    # Compiled autograd asks for it; torch defines it on the public autograd.Function alone.
    _compiled_autograd_key = staticmethod(torch.autograd.Function._compiled_autograd_key)


#: Is a tensor a view, as autograd sees it, and of which one? None if it is none.
is_view: Callable[[torch.Tensor], bool] = operator.methodcaller("_is_view")
base_of: Callable[[torch.Tensor], torch.Tensor | None] = operator.attrgetter("_base")


def forward_ad_active() -> bool:  # ``forward_ad.dual_level`` or ``torch.func.jvp``
    return bool(forward_ad._current_level >= 0)


#: The opposite, as source for generated functions: ``$forward_ad`` is the module of torch.
NO_FORWARD_AD = "$forward_ad._current_level < 0"


def tangents_may_hide() -> bool:
    """May a level of forward mode be open although `forward_ad_active` does not know?

    A graph of Dynamo opens it in C++: when it runs, and when AOTAutograd traces it. Else, looking for tangents is not
    wanted while a mode is active, which would see that.
    """
    if transforms_active() or not mode_count():
        return True
    return torch._guards.TracingContext.try_get() is not None


def call_jvp(jvp: Callable[..., Any], *args: Any) -> Any:
    """Call a jvp with forward mode on if it may be nested: torch has it off, and an outer level would get zeros."""
    if not transforms_active():
        return jvp(*args)
    with forward_ad._set_fwd_grad_enabled(True):
        return jvp(*args)


def tangents_of(call: Callable[[], tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
    """The tangents that the results of ``call()`` have, from what it uses."""
    with forward_ad._set_fwd_grad_enabled(True):
        duals = [forward_ad.unpack_dual(result, level=0) for result in call()]
        return [torch.zeros_like(dual.primal) if dual.tangent is None else dual.tangent for dual in duals]


def without_tangent(value: Any) -> Any:
    """A tangent, without the one of its own that it got in `call_jvp`."""
    if isinstance(value, torch.Tensor) and transforms_active():
        return forward_ad.unpack_dual(value, level=0).primal
    return value


def apply_function(function: Any, /, *args: Any, **kwargs: Any) -> Any:
    """``function.apply(*args, **kwargs)`` of a `SingleLevelFunction`, also inside functorch transforms."""
    if not transforms_active():
        return function.apply(*args, **kwargs)
    with enable_single_level_autograd_function():
        return function.apply(*args, **kwargs)


#: The class of the ``ctx`` of an autograd.Function.
context_class: Callable[[Any], Any] = operator.attrgetter("_backward_cls")
#: In a backward: will there be another one, through the same graph?
keeps_graph: Callable[[], bool] = _C._autograd._get_current_graph_task_keep_graph
#: ``saved_tensors_hooks(True)``: the hooks that act on what is saved for backward, or None.
saved_tensors_hooks: Callable[[bool], Any] = _C._autograd._top_saved_tensors_default_hooks


def metadata(tensor: torch.Tensor) -> tuple[Any, torch.dtype, torch.device]:
    """Shape, dtype and device of a tensor, to be compared with those of another; put the expected one on the left."""
    if tensor.is_nested:
        return None, tensor.dtype, tensor.device  # has no shape, or one that is hard to compare
    shape: Any = tensor.shape
    if type(tensor) not in _PLAIN or cast(Any, tensor)._has_symbolic_sizes_strides:
        shape = _SymbolicShape(shape)
    return shape, tensor.dtype, tensor.device


_PLAIN = {torch.Tensor, torch.nn.Parameter}


class _SymbolicShape(tuple[Any, ...]):
    """A shape that equals others unless they are known to differ, so that a comparison adds no guard to a trace."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        if other is None:
            return True
        sizes = tuple(cast(Any, other))
        return len(self) == len(sizes) and not any(map(_differ, self, sizes))

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = tuple.__hash__


def _differ(size: Any, other: Any) -> bool:
    if type(size) is int and type(other) is int:
        return size != other
    return known(size != other)


def sums_to(shape: Sequence[Any], wanted: Any) -> bool:
    """May ``sum_to_size`` make `wanted`, a shape that `metadata` gave, of `shape`?"""
    if len(shape) < len(wanted):
        return False
    sizes = zip(reversed(shape), reversed(wanted), strict=False)
    return all((type(of) is int and of == 1) or not _differ(size, of) for size, of in sizes)


def without_history(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same memory that has no history at the present level of functorch; it is not a view."""
    if not transforms_active():
        return tensor.detach()
    level = _functorch.retrieve_current_functorch_interpreter().level()
    return cast(torch.Tensor, _C._functorch._wrap_for_grad(_C._functorch._unwrap_for_grad(tensor, level), level))


#: Context manager: a write to these tensors is not counted.
uncounted: Any = cast(Any, torch.autograd)._unsafe_preserve_version_counter


def is_fresh_view(tensor: torch.Tensor) -> bool:
    """May autograd follow a write to this view? Not if it was made without grad, by unbind, or in inference mode."""
    return bool(_C._autograd._get_creation_meta(tensor) == _C._autograd.CreationMeta.DEFAULT)


def any_tangent(values: tuple[Any, ...]) -> bool:
    """Does a tensor among `values` (lists opened one level) carry a tangent? torch has one level of them, 0."""
    with without_torch_dispatch():  # looking is an op, which a tracer would record
        # Tensors of other layouts cannot carry one, and torch fails to look.
        tensors = [x for x in tensors_in(values) if x.layout is torch.strided and not x.is_nested]
        return any(forward_ad.unpack_dual(x, level=0).tangent is not None for x in tensors)


def version_of(tensor: torch.Tensor) -> int | None:
    """How often autograd saw the tensor written, or None where it does not count."""
    return None if tensor.is_inference() else tensor._version


def count_versions() -> Any:
    """Context manager for `__torch_dispatch__`: kernels run with version counting on, as they do without a mode."""
    include, exclude = _C._dispatch_tls_local_include_set(), _C._dispatch_tls_local_exclude_set()
    return _C._ForceDispatchKeyGuard(include, exclude.remove(DispatchKey.ADInplaceOrView))


def set_autograd_fallback(mode: str) -> str:
    """What torch does for operators without an autograd kernel: "nothing", "warn" or "error"; returns what it did."""
    before: str = _C._get_autograd_fallback_mode()
    _C._set_autograd_fallback_mode(mode)
    return before


# torch.func: its levels, wrapped tensors and vmap ---------------------------------------------------------------------


#: Without: torch.vmap over ops does not work
def is_captured(tensor: torch.Tensor) -> bool:
    """Does a tensor come from outside of the innermost transform that differentiates? A write to it would be lost."""
    kinds = _C._functorch.TransformType
    levels = [i.level() for i in _C._functorch.get_interpreter_stack() or () if i.key() in (kinds.Grad, kinds.Jvp)]
    of_tensor = set()
    while _C._functorch.is_functorch_wrapped_tensor(tensor):
        of_tensor.add(_C._functorch.maybe_get_level(tensor))
        tensor = _C._functorch.get_unwrapped(tensor)
    return bool(levels) and max(levels) not in of_tensor


def is_batching() -> bool:
    """Is a vmap running?"""
    levels = _C._functorch.get_interpreter_stack() or ()
    return any(level.key() == _C._functorch.TransformType.Vmap for level in levels)


def is_tracked_further_out(tensor: torch.Tensor) -> bool:
    """Does a transform around the present one differentiate with respect to a tensor?"""
    while _C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _C._functorch.get_unwrapped(tensor)
        if tensor.requires_grad or any_tangent((tensor,)):
            return True
    return False


def call_vmap_rule(rule: Any, op: Any, args: tuple[Any, ...]) -> Any:
    """Unwrap batched tensors, call ``rule(info, in_dims, *args)``, wrap what it returns; ``op(*args)`` if none is."""
    interpreter: Any = _functorch.retrieve_current_functorch_interpreter()
    return _functorch_function.custom_function_call_vmap_helper(interpreter, rule, op, *args)


def vmap_anew(fn: Callable[..., Any], in_dims: tuple[Any, ...], randomness: str, args: tuple[Any, ...]) -> Any:
    """`torch.vmap` inside a batching rule, in which the keys of the level that called the rule are excluded."""
    interpreter: Any = _functorch.retrieve_current_functorch_interpreter()
    with interpreter.lower():
        included = _C._dispatch_tls_local_include_set() - key_set("FuncTorchVmapMode")
        with _C._ForceDispatchKeyGuard(included, excluded_in_plain_state()):
            return torch.vmap(fn, in_dims, randomness=randomness)(*args)


@functools.cache  # not at import: without the name only vmap is lost
def below_vmap_mode() -> Any:
    """``keyset & below_vmap_mode()``: below the key that sees each call inside vmap."""
    return _C._dispatch_keyset_full_after(DispatchKey.FuncTorchVmapMode)


without_vmap_mode: Any = functools.partial(exclude_keys, key_set("FuncTorchVmapMode"))


class Batch:
    """The innermost level of vmap. Is anything in `values` batched there?"""

    def __init__(self, values: Any) -> None:
        interpreter: Any = _functorch.retrieve_current_functorch_interpreter()
        self.size, self.randomness, self.level = interpreter.batch_size(), interpreter.randomness(), interpreter.level()
        get_level = _C._functorch.maybe_get_level
        self.is_batched = any(isinstance(x, torch.Tensor) and get_level(x) == self.level for x in tree_leaves(values))

    def wrap(self, result: Any) -> Any:
        """A result with the batch in front -> one of an element, as seen inside vmap."""
        leaves, structure = tree_flatten(result)
        leaves = [_C._functorch._add_batch_dim(x, 0, self.level) if isinstance(x, torch.Tensor) else x for x in leaves]
        return tree_unflatten(leaves, structure)


def fold_nothing_beside_writes(const_fold: Any) -> None:
    """Let `torch.func.linearize` compute nothing in advance in a graph with an op of ours that writes.

    torch computes in advance all that depends on no tangent: a buffer, before an op writes to it. The function of torch
    stays the same object, which Dynamo knows by its identity. Only the default of its parameter `skip_folding_node_fn`
    changes.
    """
    split: Any = const_fold.split_const_subgraphs
    names = split.__code__.co_varnames[: split.__code__.co_argcount]
    defaults = dict(zip(names[-len(split.__defaults__) :], split.__defaults__, strict=True))
    defaults["skip_folding_node_fn"] = _is_beside_writes
    split.__defaults__ = tuple(defaults.values())


def _is_beside_writes(node: torch.fx.Node) -> bool:
    """Return whether a node is in a graph with an op of ours that writes."""
    size, found = _writes_of_ours.get(node.graph, (-1, False))
    if size != len(node.graph.nodes):
        ops = [each.target for each in node.graph.nodes if isinstance(each.target, torch._ops.OpOverload)]
        found = any(op._schema.is_mutable and hasattr(torch_op_of(op._name), "_definition") for op in ops)
        _writes_of_ours[node.graph] = len(node.graph.nodes), found
    if found:
        node.graph.set_codegen(torch.fx.graph.CodeGen())  # what is folded takes and returns leaves, too
    return found


#: For a graph, its number of nodes, and whether an op of ours writes in it.
_writes_of_ours: weakref.WeakKeyDictionary[torch.fx.Graph, tuple[int, bool]] = weakref.WeakKeyDictionary()
