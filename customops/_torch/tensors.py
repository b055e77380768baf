"""Fake tensors, pytrees, and storages: which tensors share memory, and which hold any."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, cast

import torch
import torch.fx.traceback
import torch.utils.checkpoint
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch._subclasses.functional_tensor import FunctionalTensorMode as FunctionalTensorMode

# Fake tensors and pytrees -------------------------------------------------------------------------------------

__tracebackhide__ = True  # pytest leaves the frames out

#: Without: opcheck does not work
_fake_tensor: Any = torch._subclasses.fake_tensor
#: What FakeTensorMode raises: for a tensor without a fake, an operator without a fake impl, one that must see data.
NoFakeTensor: Any = _fake_tensor.UnsupportedFakeTensorException
NoFakeImpl: Any = _fake_tensor.UnsupportedOperatorException
TorchDispatchMode = torch.utils._python_dispatch.TorchDispatchMode
tree_flatten = torch.utils._pytree.tree_flatten
tree_unflatten = torch.utils._pytree.tree_unflatten


_LEAVES = {int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}


def tree_leaves(tree: Any) -> list[Any]:
    """As torch's, without its specs for what arguments are made of: lists, tuples and dicts."""
    kind = type(tree)
    if kind is tuple or kind is list:
        return [leaf for item in tree for leaf in tree_leaves(item)]
    if kind is dict:
        return [leaf for item in tree.values() for leaf in tree_leaves(item)]
    return [tree] if kind in _LEAVES or isinstance(tree, torch.Tensor) else torch.utils._pytree.tree_leaves(tree)


def tree_map(fn: Callable[[Any], Any], tree: Any) -> Any:
    """As torch's, without its specs, too."""
    kind = type(tree)
    if kind is tuple:
        return tuple([tree_map(fn, item) for item in tree])
    if kind is list:
        return [tree_map(fn, item) for item in tree]
    if kind is dict:
        return {key: tree_map(fn, item) for key, item in tree.items()}
    is_leaf = kind in _LEAVES or isinstance(tree, torch.Tensor)
    return fn(tree) if is_leaf else torch.utils._pytree.tree_map(fn, tree)


#: The operation that autocast casts with.
cast_operation: Any = torch.ops.aten._to_copy.default


def needs_data(error: BaseException) -> bool:
    """Was something asked of a fake tensor that only data can tell?"""
    return reads_data(error) or isinstance(error, _fake_tensor.DynamicOutputShapeException)


def reads_data(error: BaseException) -> bool:
    """The same, and it is no size of a result: for one, Dynamo may be set to make it up."""
    symbolic_shapes = importlib.import_module("torch.fx.experimental.symbolic_shapes")
    kinds = (_fake_tensor.DataDependentOutputException, symbolic_shapes.GuardOnDataDependentSymNode)
    return isinstance(error, kinds)


def asks_for_data(error: BaseException) -> bool:
    """Is this what a fake tensor raises where it is asked for data, or for the place of its memory?"""
    refused = ("data pointer", ".numpy() is not supported", "data dependent")
    return reads_data(error) or (isinstance(error, RuntimeError) and any(text in str(error) for text in refused))


def fake_mode() -> Any:
    """A FakeTensorMode in which sizes that depend on data may be made up."""
    symbolic_shapes = importlib.import_module("torch.fx.experimental.symbolic_shapes")
    return torch._subclasses.FakeTensorMode(shape_env=symbolic_shapes.ShapeEnv())


def call_on_fakes(op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``op(*args, **kwargs)`` on fakes of the tensors: nothing is computed. Sizes that depend on data raise."""
    mode = torch._subclasses.FakeTensorMode()
    # Of a tensor with a graph torch would look at `grad`, which warns.
    fake = lambda x: mode.from_tensor(x if x.is_leaf else x.detach()) if isinstance(x, torch.Tensor) else x  # noqa: E731
    args, kwargs = tree_map(fake, (args, kwargs))
    with torch.no_grad(), mode:
        return op(*args, **kwargs)


def known_to_differ(size: Any, other: Any) -> bool:
    """Are two sizes known to differ? Sizes that depend on data are not known."""
    sizes = [each.node.hint if isinstance(each, torch.SymInt) else each for each in (size, other)]
    return None not in sizes and sizes[0] != sizes[1]


def known(condition: Any) -> bool:
    """Is it known to be true, without a guard on sizes that are symbols?"""
    return bool(importlib.import_module("torch.fx.experimental.symbolic_shapes").statically_known_true(condition))


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """What is imported, defined or tried in the middle of a program sees none of the modes that are active there."""
    disable = importlib.import_module("torch.utils._python_dispatch")._disable_current_modes
    with disable(), torch.inference_mode(False), torch.enable_grad():
        yield


@contextlib.contextmanager
def stand_ins(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The arguments of a call with new fakes in the place of tensors; a symbolic size is that of an example.

    As a context manager: inside no mode is active but that of the fakes, and nothing is recorded.
    """
    mode, made = torch._subclasses.FakeTensorMode(), {}

    def number(size: Any) -> int:
        return size if isinstance(size, int) else int(size.node.hint) if size.node.has_hint() else 2

    def stand_in(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return number(x) if isinstance(x, torch.SymInt) else x
        if id(x) not in made:
            sizes, is_strided = [number(size) for size in x.shape], x.layout is torch.strided and not x.is_nested
            if is_strided and has_storage(x):
                made[id(x)] = torch.empty_strided(sizes, [*map(number, x.stride())], dtype=x.dtype, device=x.device)
            else:
                made[id(x)] = torch.empty(sizes, dtype=x.dtype, device=x.device, layout=x.layout)
        return made[id(x)]

    with without_modes(), torch.no_grad(), mode:
        yield _without_address(tree_map(stand_in, (args, kwargs)))


def like_in_trace(values: Any) -> Any:
    """The values with new fakes in the place of fakes, inside their mode: with sizes that are the same symbols."""

    def like(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or x.layout is not torch.strided or x.is_nested:
            return x
        return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=x.device)

    return _without_address(tree_map(like, values))


def without_fresh_symbols(values: Any) -> Any:
    """A context in which sizes that depend on data, of results for these fakes, belong to no result of the op."""
    fakes = [x for x in tree_leaves(values) if isinstance(x, torch._subclasses.FakeTensor)]
    env = fakes[0].fake_mode.shape_env if fakes else None
    return contextlib.nullcontext() if env is None else env.ignore_fresh_unbacked_symbols()


def _without_address(values: Any) -> Any:
    """Let fakes raise where they are asked for the address of their memory, and not return 0."""
    refuse: Any = getattr(torch._C, "_set_throw_on_mutable_data_ptr", lambda x: None)
    for x in torch.utils._pytree.tree_leaves(values):
        if isinstance(x, torch.Tensor) and x.layout is torch.strided:
            refuse(x)
    return values


class Wrapper(torch.Tensor):
    """A tensor that wraps another, and passes what is done with it on to that."""

    inner: Any

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=inner.device,
        )
        made.inner = inner
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        leaves, spec = tree_flatten((args, kwargs or {}))
        args, kwargs = tree_unflatten([leaf.inner if isinstance(leaf, Wrapper) else leaf for leaf in leaves], spec)
        results, spec = tree_flatten(func(*args, **kwargs))
        return tree_unflatten([Wrapper(r) if isinstance(r, torch.Tensor) else r for r in results], spec)


@contextlib.contextmanager
def quiet_fakes() -> Iterator[None]:
    """torch does not log what fake impls raise."""
    log = _fake_tensor.log
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def leave_arguments_out(module: Any) -> None:
    """`make_fx` wants a value for each parameter of the function that an op wraps, those with a default included."""
    tracer = module._MakefxTracer
    trace = tracer._trace_inner

    def trace_inner(self: Any, f: Any, *args: Any) -> Any:
        return trace(self, functools.partial(f) if hasattr(f, "_opoverload") else f, *args)  # which wraps nothing

    tracer._trace_inner = trace_inner


# Storages: which tensors share memory, and which hold any -------------------------------------------------------------

_C: Any = torch._C


#: Without: results that alias an argument are not found
#: ``any_alias(args, kwargs, outputs)``: does an output share memory with an input or with another output?
any_alias: Callable[..., bool] = _C._any_output_is_alias_to_input_or_output
#: How many tensors and Python objects hold the storage at an address.
storage_uses: Callable[[int], int] = _C._storage_Use_Count


def outputs_share_memory(inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> bool:
    """Is an output an input or another output, or does it share a storage or the address where it starts with one?"""
    seen = {id(tensor) for tensor in tensors_in(inputs)}
    for tensor in tensors_in(outputs):
        if id(tensor) in seen:
            return True
        seen.add(id(tensor))
    given, made = _parts(inputs), _parts(outputs)
    if any_alias(tuple(given), {}, tuple(made)):
        return True
    addresses = {*map(_address, given)}
    for address in map(_address, made):
        if address is not None and address in addresses:
            return True
        addresses.add(address)
    return False


def _address(tensor: torch.Tensor) -> int | None:
    """Where the elements of a tensor start, if it has elements and a storage."""
    start = _C._data_address(tensor) if has_storage(tensor) and tensor.numel() else 0
    return start + int(tensor.storage_offset()) * tensor.element_size() if start else None


def memory_id(tensor: torch.Tensor) -> int:
    """Which memory a tensor lies in: the same number for its views."""
    return storage_id(tensor) if tensor.layout is torch.strided and not tensor.is_nested else id(tensor)


def memory_or_id(tensor: torch.Tensor) -> int:
    """The same of a tensor that may have no storage, as those of functorch: then which tensor it is."""
    return memory_id(tensor) if has_storage(tensor) else id(tensor)


def flat_items(values: Iterable[Any]) -> list[Any]:
    """The values, and in the place of a list what it holds."""
    return [item for value in values for item in (value if isinstance(value, (list, tuple)) else (value,))]


def tensors_in(values: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors among `values`, and those in lists among them."""
    return [item for item in flat_items(values) if isinstance(item, torch.Tensor)]


def _parts(values: Iterable[Any]) -> list[torch.Tensor]:
    """The strided tensors that hold the values of tensors. Sparse ones share their indices in torch's own ops, too."""
    parts = [part for tensor in tensors_in(values) for part in sparse_parts(tensor)[-1:] or [tensor]]
    return [part for part in parts if part.layout is torch.strided and not part.is_nested]


def sparse_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that a sparse one is made of, its values last."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]  # the public names refuse uncoalesced tensors
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []


def storage_id(tensor: torch.Tensor) -> int:
    return cast(int, tensor.untyped_storage()._cdata)


#: Source for generated functions: has a tensor memory of its own, which no other tensor shares?
OWNS_STORAGE = "($s := {}.untyped_storage()).resizable() and $uses($s._cdata) == 2"
#: Is a tensor a negative view, or zeros without memory?
IS_LAZY = "({0}.is_neg() or {0}._is_zerotensor())"


def is_lazy(tensor: torch.Tensor | None) -> bool:
    """The same, of a tensor that may be None."""
    return tensor is not None and (tensor.is_neg() or tensor._is_zerotensor())


def is_abstract(tensor: torch.Tensor) -> bool:
    """Does the tensor hold no data of its own: meta, fake, or wrapped by a functorch transform?"""
    return tensor.is_meta or _fake_tensor.is_fake(tensor) or _C._functorch.is_functorch_wrapped_tensor(tensor)


#: Does a tensor have memory of its own?
has_storage: Callable[[torch.Tensor], bool] = _C._has_storage


# Which elements have bytes in common ----------------------------------------------------------------------------


class _Extent(NamedTuple):
    """Where the bytes of a tensor lie: the first one, and size and step of each dimension, wide ones first."""

    first: int
    dims: tuple[tuple[int, int], ...]

    @property
    def last(self) -> int:
        return self.first + sum((size - 1) * step for size, step in self.dims)


def overlap(one: torch.Tensor, other: torch.Tensor, first: int, first_of_other: int) -> bool:
    """May two strided tensors, whose first bytes are at these addresses, have a byte in common?"""
    if not one.numel() or not other.numel():
        return False
    return not _are_disjoint(_extent(one, first), _extent(other, first_of_other))


def may_overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """May two tensors, fakes too, have an element in common?"""
    if memory_or_id(one) != memory_or_id(other):
        return False
    numbers = [n for x in (one, other) for n in (x.storage_offset(), *x.shape, *x.stride())]
    if not all(type(number) is int for number in numbers):
        return True  # symbols
    first, first_of_other = (int(x.storage_offset()) * x.element_size() for x in (one, other))
    return overlap(one, other, first, first_of_other)


def _extent(tensor: torch.Tensor, first: int) -> _Extent:
    width = tensor.element_size()
    dims = [(size, step * width) for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    return _Extent(first, (*sorted(dims, key=lambda dim: -dim[1]), (width, 1)))


def _are_disjoint(one: _Extent, other: _Extent) -> bool:
    """Are these certainly apart? Else within rows of one width, as the parts of a fused projection are."""
    if one.last < other.first or other.last < one.first:
        return True
    if not one.dims or not other.dims or one.dims[0][1] != other.dims[0][1] or one.dims[0][1] == 0:
        return False
    width, base = one.dims[0][1], min(one.first, other.first)
    inner = [_Extent((each.first - base) % width, each.dims[1:]) for each in (one, other)]
    return all(each.last < width for each in inner) and _are_disjoint(*inner)


# Functionalization, and the dispatch modes of checkpointing -----------------------------------------------------------


#: Without: ops that mutate arguments cannot be compiled, or checkpointed selectively
def is_of_torch(cls: type) -> bool:
    """Is this a class of the tensors that tracing itself makes?"""
    return cls is torch.Tensor or issubclass(cls, (FakeTensor, FunctionalTensor))


#: Is a call of one of our ops being functionalized in this context?
_functionalizing: ContextVar[bool] = ContextVar("customops.functionalizing", default=False)


def functionalize(mode: Any, overload: OpOverload, types: Any, args: Any, kwargs: Any, mutated: Sequence[Any]) -> Any:
    """Call an op that mutates some of its arguments, `mutated`, under FunctionalTensorMode, as torch does.

    torch's second form passes the bases of views, and how to make the views of them. Two calls go by its first form,
    which passes the arguments as they are: one that mutates nothing, which has no base to start from, and one that
    mutates a view of another dtype than its base, which the second form takes for one of the same. The first form takes
    no op that returns anything but new tensors.
    """
    functional = importlib.import_module("torch._higher_order_ops.auto_functionalize")
    bases = [functional.get_base(tensor) for tensor in mutated]
    is_cast = any(base is not None and base.dtype != x.dtype for x, base in zip(mutated, bases, strict=True))
    if (is_cast or not mutated) and functional.can_auto_functionalize(overload):
        return functional.do_auto_functionalize(mode, overload, args, kwargs)
    token = _functionalizing.set(True)
    try:
        return mode.__torch_dispatch__(overload, types, args, kwargs)
    finally:
        _functionalizing.reset(token)


#: The ops that may be functionalized though they return lists or numbers. torch's form for ops that write can do that,
#: but is kept from it by a check.
_allowed: weakref.WeakSet[OpOverload] = weakref.WeakSet()
#: Let an op that writes, and returns new tensors, lists of them or numbers, be functionalized.
allow_any_returns: Callable[[OpOverload], None] = _allowed.add


def correct_functionalization(functional: Any) -> None:
    """Let torch's form for ops that write take `_allowed` ops, and views of inputs that have an offset.

    torch takes the offset of a view into the storage for the offset into the base, which may have one, too: as
    ``kv[1]``, passed to a compiled function. The write then lands elsewhere, or nowhere. Its own answer stays for
    others' ops, whose graphs are to be what they are without this package.
    """
    may, slice_of = functional.can_auto_functionalize, functional.try_use_slice

    def can_auto_functionalize(op: Any) -> bool:
        return may(op) or (isinstance(op, OpOverload) and op in _allowed)

    def try_use_slice(base: Any, tensor: Any) -> Any:
        """``(dim, start, end)`` of a view that is a slice of its base, or None."""
        found = slice_of(base, tensor)
        if found is None or not _functionalizing.get():
            return found
        dim, offset = found[0], tensor.storage_offset() - base.storage_offset()
        step, size = tensor.stride()[dim], tensor.size()[dim]
        if not known(offset % step == 0):
            return None
        start = offset // step
        inside = known(start >= 0) and known(start + size <= base.size()[dim])
        return (dim, start, start + size) if inside else None

    functional.try_use_slice, functional.can_auto_functionalize = try_use_slice, can_auto_functionalize
    for form in (functional.auto_functionalized, functional.auto_functionalized_v2):
        tables = (getattr(form, each, {}) for each in ("py_kernels", "python_key_table", "functorch_table"))
        handlers = [handler for table in tables for handler in table.values() if inspect.isfunction(handler)]
        inner = [cell.cell_contents for each in handlers for cell in each.__closure__ or ()]
        for handler in (type(form).__call__, *handlers, *filter(inspect.isfunction, inner)):
            _take_by_position(handler)


_OWN_PARAMETERS = ("self", "mode", "interpreter", "ctx", "_mutable_op")


def _take_by_position(handler: Any) -> None:
    """Keep the first parameters of a function apart from arguments of an op that are called the same, as ``mode``."""
    code = handler.__code__
    own = itertools.takewhile(_OWN_PARAMETERS.__contains__, code.co_varnames[: code.co_argcount])
    handler.__code__ = code.replace(co_posonlyargcount=len([*own]))


#: The modes of selective checkpointing, and of a checkpoint that is compiled: in the forward, and when it is repeated.
checkpoint_modes: tuple[type, ...] = (
    torch.utils.checkpoint._CachingTorchDispatchMode,
    torch.utils.checkpoint._CachedTorchDispatchMode,
)


@contextlib.contextmanager
def saved_for_backward(mode: Any) -> Iterator[None]:
    """Under a checkpoint that is compiled, what is traced inside is saved, and not computed again in the backward."""
    meta = torch.fx.traceback.current_meta
    before = dict(meta)
    meta["ac_graph_id"] = getattr(mode, "ac_graph_id", None)
    meta["recompute"] = torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE
    try:
        yield
    finally:
        for key in ("ac_graph_id", "recompute"):
            meta.pop(key, None)
            meta.update({key: before[key]} if key in before else {})
