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

from customops._torch import autograd, distributed, dynamo, inductor, library, probes, tensors

#: Modules of torch, and what changes them: called with the module when it is loaded.
PATCHES: tuple[tuple[str, Callable[[Any], object]], ...] = (
    # What torch gets wrong for custom operators:
    # torch.func.linearize computes a buffer in advance, before an op writes to it.
    ("torch.fx.experimental.const_fold", autograd.fold_nothing_beside_writes),
    # make_fx wants a value for each parameter of the function that an op wraps, those with a default included.
    ("torch.fx.experimental.proxy_tensor", tensors.leave_arguments_out),
    # torch takes the offset of a view in its storage for one in the input, and functionalizes only ops that return
    # tensors.
    ("torch._higher_order_ops.auto_functionalize", tensors.correct_functionalization),
    # Before 2.12 Dynamo traces a __get__ for what an instance holds, where Python calls none, and fails.
    ("torch._dynamo.variables.user_defined", dynamo.leave_out_gets),
    # inductor takes the symbolic offset of a view for 0 (pytorch/pytorch#198068).
    ("torch._inductor.lowering", inductor.add_storage_offset),
    # Before 2.13 inductor counts the offset of as_strided from the start of an input (pytorch/pytorch#175325).
    ("torch._inductor.lowering", inductor.correct_as_strided),
    # inductor lets an op write over memory that it reads (pytorch/pytorch#198031).
    ("torch._inductor.fx_passes.reinplace", inductor.separate_reads),
    # inductor calls out variants, which it has since 2.12, with arguments in another order, or fails.
    ("torch._inductor.ir", inductor.correct_out_variants),
    # The counter takes the operations of a custom operator for none, without a word (pytorch/pytorch#131041).
    ("torch.utils.flop_counter", library.count_flops),
    # The keys of compile caches hold the names of ops, and not what they do (pytorch/pytorch#144344).
    ("torch._inductor.codecache", inductor.add_fingerprints),
    # Where torch has no hook:
    # The lines that guards name are those of this package. `output_graph` has a name of its own for the same function.
    ("torch._dynamo.guards", dynamo.hide_frames),
    ("torch._dynamo.output_graph", dynamo.hide_frames),
    # Decompositions, lowerings and patterns are given before inductor loads.
    ("torch._inductor.decomposition", inductor.enter_decompositions),
    ("torch._inductor.lowering", inductor.enter_lowerings),
    ("torch._inductor.fx_passes.joint_graph", inductor.add_pass),
    # export makes a table of its own each time.
    ("torch.export.decomp_utils", inductor.enter_in_export),
    # Sharding rules are given before DTensor loads, and for an op without one DTensor's error says nothing of ours.
    ("torch.distributed.tensor", distributed.enter_handlers),
    ("torch.distributed.tensor._dispatch", distributed.explain_missing),
    # Autotuning takes ops of torch.library alone, and no kernels of theirs.
    ("torch._inductor.kernel.custom_op", inductor.take_ops_of_ours),
    # Calls in graphs go through the dispatcher.
    ("torch._inductor.ir", inductor.call_directly),
)


def install(
    *,
    before_use: Callable[[str, bool], object],
    looks_up: Callable[[str, bool], object],
    definition_begins: Callable[[str], object],
    definition_ends: Callable[[str], object],
    kernel_registered: Callable[[str], object],
    library_loaded: Callable[[], object],
    profiling_changed: Callable[[bool], object],
    fingerprint: inductor.FingerprintOf,
    may_be_direct: inductor.MayBeDirect,
    direct_call: Callable[..., Callable[..., Any]],
    kernel_for: Callable[[str, tuple[Any, ...], dict[str, Any]], str | None],
    kernel_functions: Callable[[Any], list[Callable[..., Any]]],
    explain_sharding: Callable[[str], Exception | None],
) -> None:
    """Change torch, once in a process. The arguments are what the rooms above do where torch has no hook for them."""
    if _waiting in sys.meta_path:  # `importlib.reload`
        return
    with probes.stand_ins():
        library.follow(before_use, looks_up)  # torch.ops: `__getattr__`
        library.watch_definitions(definition_begins, definition_ends)  # torch.library.custom_op: `CustomOpDef.__init__`
        library.watch_registrations(kernel_registered)  # torch.library.Library: `impl`
        library.watch_loading(library_loaded)  # torch.ops: `load_library`
        library.watch_profiling(profiling_changed)  # torch.autograd.profiler: `_run_on_profiler_start` and `_stop`
        distributed.explain = explain_sharding
        inductor.fingerprint_of, inductor.may_be_direct, inductor.direct_call = fingerprint, may_be_direct, direct_call
        inductor.kernel_for, inductor.kernel_functions = kernel_for, kernel_functions
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
