"""What ``import customops`` changes of torch: modules, which `PATCHES` lists, and `torch.ops`, `Library`, the profiler.

`install` makes these changes. No other module changes torch on import.

A module of torch that is not loaded yet is changed when it is. Each change asks whether torch needs it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

from customops._torch import autograd, dynamo, fakes, functionalization, hooks, inductor, library
from customops._torch.stand_ins import stand_ins

#: Modules of torch, and what changes them: called with the module when it is loaded.
PATCHES: tuple[tuple[str, Callable[[Any], object]], ...] = (
    # What torch gets wrong for custom operators:
    # torch.func.linearize computes a buffer in advance, before an op writes to it.
    ("torch.fx.experimental.const_fold", autograd.fold_nothing_beside_writes),
    # make_fx wants a value for each parameter of the function that an op wraps, those with a default included.
    ("torch.fx.experimental.proxy_tensor", fakes.leave_arguments_out),
    # torch mistakes the offset of a view in its storage for one in the input; it functionalizes only ops of tensors.
    ("torch._higher_order_ops.auto_functionalize", functionalization.correct_functionalization),
    # inductor takes the symbolic offset of a view for 0 (pytorch/pytorch#198068).
    ("torch._inductor.lowering", inductor.add_storage_offset),
    # inductor lets an op write over memory that it reads (pytorch/pytorch#198031).
    ("torch._inductor.fx_passes.reinplace", inductor.separate_reads),
    # inductor calls out variants with arguments in another order, or fails.
    ("torch._inductor.ir", inductor.correct_out_variants),
    # The keys of compile caches hold the names of ops, and not what they do (pytorch/pytorch#144344).
    ("torch._inductor.codecache", inductor.add_fingerprints),
    # Where torch has no hook:
    # The lines that guards name are those of this package. `output_graph` has a name of its own for the same function.
    ("torch._dynamo.guards", dynamo.hide_frames),
    ("torch._dynamo.output_graph", dynamo.hide_frames),
    # Decompositions and lowerings are given before inductor loads.
    ("torch._inductor.decomposition", inductor.enter_decompositions),
    ("torch._inductor.lowering", inductor.enter_lowerings),
    # export makes a table of its own each time.
    ("torch.export.decomp_utils", inductor.enter_in_export),
    # Calls in graphs go through the dispatcher.
    ("torch._inductor.ir", inductor.call_directly),
)


def install() -> None:
    """Change torch, once in a process. The changed functions call those of `hooks`."""
    if _waiting in sys.meta_path:  # `importlib.reload`
        return
    with stand_ins():
        library.watch_registrations(hooks.kernel_registered)  # torch.library.Library: `impl`
        library.watch_loading(hooks.kernel_registered)  # torch.ops: `load_library`
        library.watch_profiling(hooks.profiling_changed)  # torch.autograd.profiler: its start and stop
        sys.meta_path.insert(0, _waiting)
        for module, change in PATCHES:
            when_loaded(module, change)


def when_loaded(module: str, change: Callable[[Any], object]) -> None:
    """Call ``change(module)`` now, or when it is imported."""
    if module in sys.modules:
        change(sys.modules[module])
    else:
        _waiting.changes.setdefault(module, []).append(change)


class _Waiting(MetaPathFinder):
    """Calls functions with modules that are imported later."""

    def __init__(self) -> None:
        self.changes: dict[str, list[Callable[[Any], object]]] = {}

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name not in self.changes:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            loader.exec_module = library.followed(loader.exec_module, self._loaded)
        return spec

    def _loaded(self, module: Any) -> None:
        for change in self.changes.pop(module.__name__, ()):
            change(module)


_waiting = _Waiting()
