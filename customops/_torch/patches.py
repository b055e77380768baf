"""The places of torch that customops changes, and when. `import customops` changes none.

Each change affects only calls, graphs and tables with ops of customops. A change is made in the situation that needs it
and in no other: see `Stage`. With ``CUSTOMOPS_PATCH_TORCH=0`` in the environment, none is made.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch

from customops import _versions
from customops._torch import autograd, dynamo, functionalization, hooks, inductor, library
from customops.errors import UnsupportedError

Stage = Literal["defined", "traced", "writes", "writes and returns", "export"]
#: The situation that needs a change.
STAGES: dict[Stage, str] = {
    "defined": "the first op is defined or adopted",
    "traced": "an op is traced",
    "writes": "an op that writes is traced",
    "writes and returns": "an op that writes, and returns lists or numbers, is traced",
    "export": "a decomposition for export is registered",
}


class Patch(NamedTuple):
    """A place of torch that is changed."""

    stage: Stage
    place: str  #: the module and the name, ``torch.library:Library.impl``
    change: Callable[[Any], object]  #: called with the module, once it is loaded
    without: str  #: what torch does without the change
    issue: str = ""  #: where torch tracks it


PATCHES = (
    Patch(
        "defined",
        "torch.library:Library.impl",
        library.watch_registrations,
        "customops does not see kernels that others register, so calls always take the dispatcher",
    ),
    Patch(
        "defined",
        "torch._ops:_Ops.load_library",
        library.watch_loading,
        "customops does not see kernels of shared libraries, so calls always take the dispatcher",
    ),
    Patch(
        "traced",
        "torch._inductor.codecache:FxGraphHashDetails.__init__",
        inductor.add_fingerprints,
        "compile caches on disk return the code of an earlier definition of an op",
        "pytorch/pytorch#144344",
    ),
    Patch(
        "writes",
        "torch._higher_order_ops.auto_functionalize:try_use_slice",
        functionalization.correct_slices,
        "in compiled code, writes to a view of an input that is a view itself are lost",
    ),
    Patch(
        "writes",
        "torch._inductor.lowering:lowerings[aten.sym_storage_offset.default]",
        inductor.add_storage_offset,
        "in code compiled for dynamic shapes, writes to several slices land in the first slice",
        "pytorch/pytorch#198068",
    ),
    Patch(
        "writes",
        "torch.fx.experimental.const_fold:split_const_subgraphs",
        autograd.fold_nothing_beside_writes,
        "torch.func.linearize computes with the values of a buffer before an op writes to it",
    ),
    Patch(
        "writes and returns",
        "torch._higher_order_ops.auto_functionalize:can_auto_functionalize",
        functionalization.allow_returns,
        "ops that write, and return lists or numbers, cannot be compiled",
    ),
    Patch(
        "export",
        "torch.export.decomp_utils:CustomDecompTable.__init__",
        inductor.enter_in_export,
        "decompositions for export are not followed",
    ),
)

#: Tables of torch in which our ops and files are entered once an op is traced. Entries of others stay as they are.
TABLES: tuple[tuple[str, Callable[[Any], object]], ...] = (
    ("torch._dynamo.guards", dynamo.hide_frames),
    ("torch._inductor.decomposition", inductor.enter_decompositions),
    ("torch._inductor.lowering", inductor.enter_lowerings),
)

enabled = os.environ.get("CUSTOMOPS_PATCH_TORCH", "1") != "0"
_lock = threading.RLock()
#: The changes that were not made yet, by their stage.
pending: dict[str, list[Patch]] = {}
_pending_tables = list(TABLES)
for _patch in PATCHES if enabled else ():
    pending.setdefault(_patch.stage, []).append(_patch)


def apply(stage: Stage) -> None:
    """Make the changes of a stage in the modules that are loaded. Other modules wait for the next call.

    Raises:
        UnsupportedError: this torch has no such place.
    """
    if stage not in pending:
        return
    with _lock:
        for patch in pending.get(stage, ())[:]:
            module = sys.modules.get(patch.place.partition(":")[0])
            if module is None:
                continue
            try:
                patch.change(module)
            except AttributeError as error:
                raise UnsupportedError(
                    f"customops cannot change {patch.place.replace(':', '.')} of torch {torch.__version__}: {error}",
                    expected=f"torch {_versions.spelled(_versions.OLDEST)} to {_versions.spelled(_versions.NEWEST)}",
                    fix=f"set CUSTOMOPS_PATCH_TORCH=0 in the environment; then {patch.without}",
                ) from error
            pending[stage].remove(patch)
        if not pending.get(stage, True):
            del pending[stage]


def trace(qualname: str, records: bool) -> None:
    """Prepare compilers for an op of ours that is being traced; `records`: the trace makes a graph."""
    apply("traced")
    if records and _pending_tables:
        inductor.load_decompositions()
        with _lock:
            for table in _pending_tables[:]:
                module = sys.modules.get(table[0])
                if module is not None:
                    table[1](module)
                    _pending_tables.remove(table)
    inductor.trace(qualname)


hooks.op_traced = trace
