"""Private torch names for what is traced and compiled: Dynamo's guards, keys of compile caches, inductor, AOTAutograd.

Importing this loads none of them: what is to be changed in a module of theirs waits until that is imported.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import torch
import torch.fx.traceback
import torch.utils.checkpoint
from torch._ops import OpOverload, OpOverloadPacket

_PACKAGE = Path(__file__).parent


class _Waiting(MetaPathFinder):
    """Calls functions with modules that are imported later."""

    def __init__(self) -> None:
        self.actions: dict[str, Callable[[Any], object]] = {}

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name not in self.actions:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            loader.exec_module = followed(loader.exec_module, self._loaded)
        return spec

    def _loaded(self, module: Any) -> None:
        action = self.actions.pop(module.__name__, None)
        if action is not None:
            action(module)


_waiting = _Waiting()
sys.meta_path.insert(0, _waiting)


def when_imported(name: str, action: Callable[[Any], object]) -> None:
    """Call ``action(module)`` once the module of this name is there."""
    if name in sys.modules:
        action(sys.modules[name])
    else:
        _waiting.actions[name] = action


def followed(function: Any, then: Callable[..., object]) -> Any:
    """A function that calls `function`, then `then` with the same arguments."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        then(*args, **kwargs)
        return result

    return wrapper


# Dynamo ---------------------------------------------------------------------------------------------------------


#: Name of an op that was traced -> a number that changes with everything that compiled code was traced from.
generations: dict[str, int] = {}

_numbers = itertools.count()


def recompile(qualname: str) -> None:
    """Let code that was compiled with an op be compiled anew when it is next called."""
    if qualname in generations:  # else none was
        generations[qualname] = next(_numbers)


def traced(overload: OpOverload, qualname: str) -> None:
    """To be called where the fake of an op runs. If a compiler runs it, its guards learn of the op's generation."""
    if torch._guards.TracingContext.try_get() is None:
        return
    if torch.Tag.nondeterministic_seeded in overload.tags:
        _keep_calls_apart(overload)
    guards = importlib.import_module("torch._dynamo.guards")
    sources = importlib.import_module("torch._dynamo.source")
    module = sources.AttrSource(sources.ImportSource("customops"), "_compat_tracing")
    source = sources.DictGetItemSource(sources.AttrSource(module, "generations"), qualname)
    generations.setdefault(qualname, next(_numbers))
    guards.install_guard(source.make_guard(guards.GuardBuilder.EQUALS_MATCH))


#: Files of which no line is the user's: those of this package, and of the `__call__` that is generated for an op.
hidden_files = {str(path) for path in _PACKAGE.rglob("*.py")}


def _hide_frames(module: Any) -> None:
    """The line that a graph, a guard or an error names is the user's, not the one in this package that it called."""
    module.uninteresting_files = functools.partial(_with_hidden_files, module.uninteresting_files)


def _with_hidden_files(original: Callable[[], set[str]]) -> set[str]:
    return original() | hidden_files


for _name in ("torch._dynamo.guards", "torch._dynamo.output_graph"):  # the latter has a name of its own for it
    when_imported(_name, _hide_frames)


# Caches on disk -------------------------------------------------------------------------------------------------


#: What compiled code depends on of the ops of these names, or None where none of them is ours.
FingerprintOf = Callable[[set[str]], str | None]

_fingerprint_of: FingerprintOf = lambda names: None  # noqa: E731


def fingerprint_with(function: FingerprintOf) -> None:
    """Let the keys of the compile caches hold what `function` says of a graph's ops."""
    global _fingerprint_of
    _fingerprint_of = function


def _add_fingerprints(codecache: Any) -> None:
    """Put fingerprints in the keys of the caches of AOTAutograd and inductor: torch's hold the names of ops alone.

    Both pickle the attributes of this class. The keys of graphs without our ops stay as they are.
    """
    details = codecache.FxGraphHashDetails
    details.__init__ = followed(details.__init__, _add_fingerprint)


def _add_fingerprint(details: Any, gm: Any, *_args: Any, **_kwargs: Any) -> None:
    fingerprint = _fingerprint_of(set(_names_in(gm))) if gm is not None else None
    if fingerprint is not None:
        details.customops_fingerprint = fingerprint


when_imported("torch._inductor.codecache", _add_fingerprints)


def _names_in(graph_module: Any) -> Iterator[str]:
    """The names of the ops in a graph and its subgraphs, those that a higher-order op is given too."""
    for module in graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                for value in (node.target, *node.args, *node.kwargs.values()):
                    yield from _names_of(value)


def _names_of(value: Any) -> Iterable[str]:
    if isinstance(value, OpOverload):
        return (value._name,)
    if isinstance(value, OpOverloadPacket):  # in a graph of Dynamo, where the op was called so
        name = value._qualified_op_name
        return (name, *(f"{name}.{overload}" for overload in value.overloads()))
    return ()


# Inductor and AOTAutograd ---------------------------------------------------------------------------------------


def _add_lowering(lowering: Any) -> None:
    """Give inductor a rule for offsets into a storage that are symbols.

    Without one it takes the offset of every view for 0, and the writes of an op to several slices of a tensor all land
    in the first. As its rule for sizes, this one takes what tracing found.
    """
    target = torch.ops.aten.sym_storage_offset
    if target.default not in lowering.lowerings:
        lowering.register_lowering(target, type_promotion_kind=None)(_storage_offset)


def _storage_offset(_: Any) -> Any:
    value = torch._inductor.virtualized.V.graph.current_node.meta["val"]
    return value.node.expr if isinstance(value, torch.SymInt) else int(value)


when_imported("torch._inductor.lowering", _add_lowering)


def _keep_calls_apart(overload: OpOverload) -> None:
    """Two calls of a random op on equal arguments are two: before torch 2.15 only the ops of this list are spared."""
    random_ops = importlib.import_module("torch._functorch.compile_utils").rand_ops
    if overload.overloadpacket not in random_ops:
        random_ops.append(overload.overloadpacket)


# Functionalization ----------------------------------------------------------------------------------------------


def functionalize(mode: Any, overload: OpOverload, types: Any, args: Any, kwargs: Any, *, writes_nothing: bool) -> Any:
    """Call an op that writes under FunctionalTensorMode, as torch does; a call that writes nothing by the older form.

    The older form takes no op that returns anything but new tensors.
    """
    functional = importlib.import_module("torch._higher_order_ops.auto_functionalize")
    if writes_nothing and functional.can_auto_functionalize(overload):
        return functional.do_auto_functionalize(mode, overload, args, kwargs)
    return mode.__torch_dispatch__(overload, types, args, kwargs)


# Checkpointing --------------------------------------------------------------------------------------------------


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
