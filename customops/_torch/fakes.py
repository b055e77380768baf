"""Fake tensors: calls on tensors without data, and the errors where data would be needed."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from customops._torch.memory import has_storage
from customops._torch.trees import tree_leaves, tree_map

__tracebackhide__ = True  # pytest leaves the frames out

#: Without: opcheck does not work
_fake_tensor: Any = torch._subclasses.fake_tensor
#: The errors of FakeTensorMode for a tensor without a fake, and for an operator without a fake impl.
NoFakeTensor: Any = _fake_tensor.UnsupportedFakeTensorException
NoFakeImpl: Any = _fake_tensor.UnsupportedOperatorException


def needs_data(error: BaseException) -> bool:
    """Return whether an error says that an operation on fake tensors needs data."""
    return reads_data(error) or isinstance(error, _fake_tensor.DynamicOutputShapeException)


def reads_data(error: BaseException) -> bool:
    """Return `needs_data`, except for sizes of results, for which Dynamo can make up symbols."""
    symbolic_shapes = importlib.import_module("torch.fx.experimental.symbolic_shapes")
    kinds = (_fake_tensor.DataDependentOutputException, symbolic_shapes.GuardOnDataDependentSymNode)
    return isinstance(error, kinds)


def asks_for_data(error: BaseException) -> bool:
    """Return whether an error says that a fake tensor was asked for data, or for the address of its memory."""
    refused = ("data pointer", ".numpy() is not supported", "data dependent")
    return reads_data(error) or (isinstance(error, RuntimeError) and any(text in str(error) for text in refused))


def fake_mode() -> Any:
    """Return a FakeTensorMode that makes up symbols for sizes that depend on data."""
    symbolic_shapes = importlib.import_module("torch.fx.experimental.symbolic_shapes")
    return torch._subclasses.FakeTensorMode(shape_env=symbolic_shapes.ShapeEnv())


def call_on_fakes(op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return ``op(*args, **kwargs)`` on fakes of the tensors. Sizes that depend on data raise."""
    mode = torch._subclasses.FakeTensorMode()
    # torch would read `grad` of a tensor with a graph, which warns.
    fake = lambda x: mode.from_tensor(x if x.is_leaf else x.detach()) if isinstance(x, torch.Tensor) else x  # noqa: E731
    args, kwargs = tree_map(fake, (args, kwargs))
    with torch.no_grad(), mode:
        return op(*args, **kwargs)


def known_to_differ(size: Any, other: Any) -> bool:
    """Return whether two sizes are known to differ. Sizes that depend on data are unknown."""
    sizes = [each.node.hint if isinstance(each, torch.SymInt) else each for each in (size, other)]
    return None not in sizes and sizes[0] != sizes[1]


def known(condition: Any) -> bool:
    """Return whether a condition is known to be true, without a guard on symbolic sizes."""
    return bool(importlib.import_module("torch.fx.experimental.symbolic_shapes").statically_known_true(condition))


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Context manager without the active modes, to import, define or try something in the middle of a program."""
    disable = importlib.import_module("torch.utils._python_dispatch")._disable_current_modes
    with disable(), torch.inference_mode(False), torch.enable_grad():
        yield


@contextlib.contextmanager
def stand_ins(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Context manager that returns the arguments of a call with new fakes for tensors, and hints for symbolic sizes.

    Inside, only the mode of the fakes is active, and nothing is recorded.
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
    """Return the values with new fakes of the same symbolic sizes for the fakes, inside their mode."""

    def like(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or x.layout is not torch.strided or x.is_nested:
            return x
        return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=x.device)

    return _without_address(tree_map(like, values))


def without_fresh_symbols(values: Any) -> Any:
    """Context manager: symbols that are made up for results of these fakes belong to no result of the op."""
    fakes = [x for x in tree_leaves(values) if isinstance(x, torch._subclasses.FakeTensor)]
    env = fakes[0].fake_mode.shape_env if fakes else None
    return contextlib.nullcontext() if env is None else env.ignore_fresh_unbacked_symbols()


def _without_address(values: Any) -> Any:
    """Let fakes raise if they are asked for the address of their memory, which would be 0."""
    refuse: Any = getattr(torch._C, "_set_throw_on_mutable_data_ptr", lambda x: None)
    for x in torch.utils._pytree.tree_leaves(values):
        if isinstance(x, torch.Tensor) and x.layout is torch.strided:
            refuse(x)
    return values


@contextlib.contextmanager
def quiet_fakes() -> Iterator[None]:
    """Context manager in which torch does not log errors of fake impls."""
    log = _fake_tensor.log
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def is_abstract(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has no data: it is meta, fake, or wrapped by a functorch transform."""
    return tensor.is_meta or _fake_tensor.is_fake(tensor) or torch._C._functorch.is_functorch_wrapped_tensor(tensor)
