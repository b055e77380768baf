"""DTensor: its specs, redistribution, and ranks that are simulated in one process.

``torch.distributed.tensor`` is loaded by the program that uses it; nothing here loads it for a program that does not.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import itertools
import logging
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

_C: Any = torch._C

__tracebackhide__ = True  # pytest leaves the frames out

#: Without: ops have no sharding rules
#: The class of DTensor, for a rule of an op.
DTENSOR = "torch.distributed.tensor.DTensor"


def is_loaded() -> bool:
    return "torch.distributed.tensor" in sys.modules


@functools.cache
def public() -> Any:
    """``torch.distributed.tensor``"""
    return importlib.import_module("torch.distributed.tensor")


def is_dtensor(value: Any) -> bool:
    return isinstance(value, public().DTensor)


def is_placement(value: Any) -> bool:
    return isinstance(value, public().Placement)


def shard_dim(placement: Any) -> int | None:
    """The dimension that is split."""
    dim: int | None = placement.dim if isinstance(placement, public().Shard) else None
    return dim


def shards(tensor: torch.Tensor, placement: Any, size: int) -> list[torch.Tensor] | None:
    """The parts of a tensor along one dimension of a mesh, if the placement splits it."""
    strided = getattr(importlib.import_module("torch.distributed.tensor.placement_types"), "_StridedShard", ())
    if isinstance(placement, strided):  # what reshape makes of a dimension that is split and comes to lie further in
        pieces, dim = _chunks(tensor, placement.dim, int(placement.split_factor)), placement.dim
        return [torch.cat(parts, dim) for parts in zip(*(_chunks(each, dim, size) for each in pieces), strict=True)]
    return _chunks(tensor, placement.dim, size) if isinstance(placement, public().Shard) else None


def joined(parts: Sequence[torch.Tensor], placement: Any) -> torch.Tensor | None:
    """The tensor of which these are the `shards`, if the placement splits it."""
    dim = getattr(placement, "dim", None)
    if dim is None:
        return None
    whole = torch.cat([*parts], dim)
    places = torch.arange(whole.shape[dim]).reshape([-1 if d == dim else 1 for d in range(whole.dim())])
    order = torch.cat(shards(places, placement, len(parts)) or [places], dim)
    return whole.index_select(dim, order.flatten().argsort().to(whole.device))


def _chunks(tensor: torch.Tensor, dim: int, count: int) -> list[torch.Tensor]:
    """As `torch.chunk`, with parts that are empty, if there are too few elements."""
    length = tensor.shape[dim]
    step = -(-length // count)
    starts = [min(i * step, length) for i in range(count)]
    return [tensor.narrow(dim, start, min(step, length - start)) for start in starts]


def _dispatcher() -> Any:
    module: Any = importlib.import_module("torch.distributed.tensor")
    return module.DTensor._op_dispatcher


def sharding_of(overload: OpOverload) -> Callable[..., Any] | None:
    """The rule that DTensor has for an operator: the function given to its `register_sharding`, or torch's own."""
    if not is_loaded():
        return None
    found: Callable[..., Any] | None = _dispatcher().sharding_propagator.op_strategy_funcs.get(overload)
    return found.args[0] if isinstance(found, functools.partial) and found.args else found


def spec_of(tensor: Any) -> Any:
    """What a DTensor is of: mesh, placements, and the shape, strides and dtype of the whole."""
    return tensor._spec


def local_of(tensor: Any) -> Any:
    """What this process has of a tensor."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor


def spec_like(spec: Any, placements: Sequence[Any]) -> Any:
    """The spec of the same tensor, placed otherwise."""
    module = importlib.import_module("torch.distributed.tensor._dtensor_spec")
    return module.DTensorSpec(spec.mesh, tuple(placements), tensor_meta=spec.tensor_meta)


def spec_for(mesh: Any, placements: Sequence[Any], tensor: Any) -> Any:
    """The spec of a tensor of the shape, strides and dtype of `tensor`: a tensor, or the record of these."""
    module = importlib.import_module("torch.distributed.tensor._dtensor_spec")
    stride = tensor.stride() if isinstance(tensor, torch.Tensor) else tensor.stride
    return module.DTensorSpec(mesh, tuple(placements), module.TensorMeta(tensor.shape, stride, tensor.dtype))


def placed(mesh: Any, local: Any, whole: Any, placements: Sequence[Any]) -> Any:
    """A DTensor of a local part; `whole` has the shape and dtype of the whole."""
    return as_dtensor(local, spec_for(mesh, placements, whole))


def as_dtensor(local: Any, spec: Any) -> Any:
    return public().DTensor(local, spec, requires_grad=local.requires_grad)


def replicates_implicitly() -> bool:
    """Are plain tensors taken for replicated ones, as in ``implicit_replication()``?"""
    return bool(_dispatcher()._allow_implicit_replication)


def with_plain_tensors(tensors: Sequence[torch.Tensor]) -> contextlib.AbstractContextManager[Any]:
    """Among DTensors, take tensors that a function makes of nothing for replicated ones."""
    if not is_loaded() or not any(map(is_dtensor, tensors)):
        return contextlib.nullcontext()
    experimental: Any = importlib.import_module("torch.distributed.tensor.experimental")
    context: contextlib.AbstractContextManager[Any] = experimental.implicit_replication()
    return context


def takes_part(mesh: Any) -> bool:
    """Is this process one of the mesh?"""
    return bool(mesh._is_current_rank_part_of_mesh())


def cost(current: Any, target: Any) -> Any:
    """What it costs to place a tensor otherwise; infinite where that cannot be."""
    module = importlib.import_module("torch.distributed.tensor._collective_utils")
    return module.redistribute_cost(current, target)


def redistributed(op: OpOverload, local: Any, current: Any, target: Any) -> Any:
    """The local part of a tensor that is placed otherwise. Collective: all processes of the mesh call it."""
    observer = getattr(
        importlib.import_module("torch.distributed.tensor._utils"), "ExplicitRedistributionContext", None
    )
    if observer is not None:
        observer.observe_redistribution(current, target, f"{op}: implicit redistribution from {current} to {target}")
    module = importlib.import_module("torch.distributed.tensor._redistribute")
    return module.redistribute_local_tensor(local, current, target)


def call_on_fakes(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a call returns for whole tensors without data, of their specs. A compiler that traces does not see it."""
    guards, proxies = map(importlib.import_module, ("torch._guards", "torch.fx.experimental.proxy_tensor"))
    kind: Any = importlib.import_module("torch.distributed.tensor._dtensor_spec").DTensorSpec

    def fake(value: Any) -> Any:
        if not isinstance(value, kind):
            return value
        meta, device = value.tensor_meta, value.mesh.device_type
        return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=device)

    mode = guards.detect_fake_mode() or torch._subclasses.FakeTensorMode()
    with _one_rank(), mode, proxies.disable_proxy_modes_tracing(), torch.no_grad():
        args, kwargs = torch.utils._pytree.tree_map(fake, (args, kwargs), is_leaf=lambda value: isinstance(value, kind))
        return op(*args, **kwargs)


def _one_rank() -> contextlib.AbstractContextManager[Any]:
    """What is done once, also where `LocalTensorMode` does all for each of several ranks."""
    module = sys.modules.get("torch.distributed._local_tensor")
    return module.maybe_disable_local_tensor_mode() if module is not None else contextlib.nullcontext()


def aliasing(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    """The result of a view op, made to share the storage of the argument."""
    module = importlib.import_module("torch.utils._python_dispatch")
    return module.return_and_correct_aliasing(op, args, kwargs, result)


# Ranks that are simulated ---------------------------------------------------------------------------------------------

#: The first rank of simulated meshes: DTensor keeps what it decided by mesh, and these must be equal to no other.
_FIRST = 1_000_000


@functools.cache
def simulated_mesh(device_type: str, shape: tuple[int, ...]) -> Any:
    """Return a mesh without processes, seen from its first process; no other mesh is equal to it."""
    ranks = torch.arange(_FIRST, _FIRST + math.prod(shape)).view(shape)
    names = tuple(f"customops_{i}" for i in range(len(shape)))
    module = importlib.import_module("torch.distributed.device_mesh")
    return module.DeviceMesh(device_type, ranks, mesh_dim_names=names, _init_backend=False, _rank=_FIRST)


#: Without: opcheck does not check gradients of DTensors
_meshes = itertools.count()


def ranks_can_be_simulated() -> bool:
    """Can a default process group be made here, and its ranks run in this process?"""
    is_free = torch.distributed.is_available() and not torch.distributed.is_initialized()
    return is_free and importlib.util.find_spec("torch.distributed._local_tensor") is not None


@contextlib.contextmanager
def simulated_ranks(device_type: str, shape: tuple[int, ...]) -> Iterator[Any]:
    """A mesh whose processes are all here: what is done with DTensors of `rank_tensor` is done for each of them."""
    local: Any = importlib.import_module("torch.distributed._local_tensor")
    fake: Any = importlib.import_module("torch.testing._internal.distributed.fake_pg")
    names, size = tuple(f"customops_{next(_meshes)}" for _ in shape), math.prod(shape)
    log = logging.getLogger("torch.distributed.tensor._redistribute")
    log.disabled, before = True, log.disabled  # it advises on what a check does
    hook = sys.excepthook  # which torch replaces, and leaves so
    torch.distributed.init_process_group("fake", store=fake.FakeStore(), rank=0, world_size=size)
    try:
        with local.LocalTensorMode(size):
            yield torch.distributed.device_mesh.init_device_mesh(device_type, shape, mesh_dim_names=names)
    finally:
        torch.distributed.destroy_process_group()
        log.disabled, sys.excepthook = before, hook


def rank_tensor(parts: Sequence[torch.Tensor]) -> Any:
    """One tensor that each simulated rank has another part of."""
    local: Any = importlib.import_module("torch.distributed._local_tensor")
    return local.LocalTensor(dict(enumerate(parts)))


def full(tensor: Any) -> Any:
    """The whole tensor in each process."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def whole_of(tensor: Any) -> torch.Tensor:
    """What a DTensor of simulated ranks is of; raises where ranks have different values of it."""
    value = full(tensor)
    whole: torch.Tensor = value.reconcile() if hasattr(value, "reconcile") else value
    return whole
