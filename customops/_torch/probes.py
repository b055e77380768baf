"""The private names of torch that this package uses, and what a user loses where one is missing.

``python -m customops doctor`` tries each. A test compares the table with the names in the other modules here.
"""

from __future__ import annotations

import importlib
import importlib.util
import types
from typing import Any, NamedTuple

import torch

from customops import _versions
from customops.errors import UnsupportedError


class Probe(NamedTuple):
    """Names that are used together, dotted, and what they are for."""

    subsystem: str  #: the module beside this one
    without: str  #: what does not work without them
    names: tuple[str, ...]
    since: tuple[int, int] | None = None  #: the first torch that has them, if that is not the oldest supported one


def _probe(subsystem: str, without: str, names: str, since: tuple[int, int] | None = None) -> Probe:
    return Probe(subsystem, without, tuple(names.split()), since)


PROBES = (
    _probe(
        "schemas",
        "no op can be defined from a schema",
        """torch._C.parse_schema torch._C._dispatch_dump torch._ops.OpOverload torch._ops._OpNamespace
        torch.utils._python_dispatch._disable_current_modes""",
    ),
    _probe(
        "namespaces",
        "lazy ops, callbacks of when_defined and entry points are not found",
        """torch._library.custom_ops torch._ops._OpNamespace
        torch.utils._python_dispatch._disable_current_modes""",
    ),
    _probe(
        "schemas",
        "classes of register_opaque_type are no parameter types",
        "torch._library.opaque_object torch._library.opaque_object.get_opaque_obj_info",
    ),
    _probe(
        "tags",
        "in-place and out ops have their tags in customops alone, as `customops.Tag.inplace` and `.out`",
        "torch.Tag.inplace torch.Tag.out",
        since=(2, 13),
    ),
    _probe(
        "dispatch",
        "no kernel can be registered or called",
        """torch._C.DispatchKey torch._C.DispatchKeySet torch._C._AutoDispatchBelowAutograd
        torch._C._ExcludeDispatchKeyGuard torch._C._after_ADInplaceOrView_keyset torch._C._after_autograd_keyset
        torch._C._dispatch_get_computed_kernel_for_dispatch_key torch._C._dispatch_has_kernel_for_dispatch_key
        torch._C._dispatch_has_kernel torch._C._dispatch_dump torch._C._dispatch_key_for_device
        torch._C._parse_dispatch_key torch._C._get_privateuse1_backend_name""",
    ),
    _probe(
        "dispatch",
        "modes and transforms around a call are not seen",
        """torch._C._are_functorch_transforms_active torch._C._dispatch_keys
        torch._C._dispatch_tls_is_dispatch_key_excluded torch._C._dispatch_tls_local_include_set
        torch._C._TorchDispatchModeKey.FUNCTIONAL torch._C._get_dispatch_mode
        torch._C._is_torch_function_mode_enabled torch._C._len_torch_dispatch_stack
        torch._C._functorch.peek_interpreter_stack torch._C._autograd._profiler_enabled
        torch._C.DisableTorchFunction torch._C._DisableTorchDispatch""",
    ),
    _probe(
        "dispatch",
        "calls of a test are not watched",
        """torch.overrides._get_current_function_mode_stack
        torch.utils._python_dispatch._get_current_dispatch_mode_stack""",
    ),
    _probe(
        "dispatch",
        "calls of ops with bypass=True are missing in profiles",
        "torch.autograd.profiler._is_profiler_enabled",
    ),
    _probe(
        "profiling",
        "kernels have no names in profiles",
        """torch.autograd.profiler._run_on_profiler_start torch.autograd.profiler._run_on_profiler_stop
        torch._C._profiler._RecordFunctionFast""",
    ),
    _probe(
        "tables",
        "op.describe() and op.explain() do not work",
        """torch._C._dispatch_dump torch._C._dispatch_dump_table torch._C._dispatch_keys
        torch._C._dispatch_tls_local_exclude_set torch._C._dispatch_tls_local_include_set
        torch._C._functorch.peek_interpreter_stack torch._C._get_dispatch_mode torch._C._get_dispatch_stack_at
        torch._C._len_torch_dispatch_stack torch._C._TorchDispatchModeKey""",
    ),
    _probe(
        "tables",
        "op.describe() does not know the rules of DTensor",
        "torch.distributed.tensor.DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs",
    ),
    _probe("guards", "no op can be called without the dispatcher", "torch._C._dynamo.guards.TensorGuards"),
    _probe(
        "kernel_state",
        "a kernel computes other numbers below a mode, or under autocast",
        """torch._C.DispatchKey.Functionalize torch._C._ForceDispatchKeyGuard torch._C._dispatch_tls_local_exclude_set
        torch._C._dispatch_tls_local_include_set torch._C._is_any_autocast_enabled torch._C._set_grad_enabled
        torch.autograd.forward_ad._set_fwd_grad_enabled""",
    ),
    _probe(
        "kernel_state",
        "the checker does not see memory that was never written",
        "torch._C._set_deterministic_algorithms",
    ),
    _probe(
        "autograd",
        "ops have no gradients",
        """torch.autograd.function._SingleLevelFunction torch.autograd.Function._compiled_autograd_key
        torch._functorch.utils.enable_single_level_autograd_function torch._C._any_requires_grad
        torch._C._autograd._get_creation_meta torch._C._autograd.CreationMeta.DEFAULT torch._C._increment_version
        torch.autograd._unsafe_preserve_version_counter""",
    ),
    _probe(
        "autograd",
        "forward mode, or gradients under torch.func, are wrong",
        """torch.autograd.forward_ad._current_level torch._C._DisableTorchDispatch
        torch._C._functorch._unwrap_for_grad torch._C._functorch._wrap_for_grad torch._functorch.pyfunctorch
        torch._functorch.pyfunctorch.retrieve_current_functorch_interpreter torch._guards.TracingContext.try_get""",
    ),
    _probe(
        "autograd",
        "backward under saved-tensor hooks reads tensors twice, or keeps too much",
        """torch._C._autograd._get_current_graph_task_keep_graph
        torch._C._autograd._top_saved_tensors_default_hooks""",
    ),
    _probe(
        "autograd",
        "opcheck cannot tell an op without a gradient",
        """torch._C._get_autograd_fallback_mode torch._C._set_autograd_fallback_mode
        torch._C._ForceDispatchKeyGuard torch._C._dispatch_tls_local_exclude_set
        torch._C._dispatch_tls_local_include_set""",
    ),
    _probe(
        "functorch",
        "torch.vmap over ops does not work",
        """torch._functorch.autograd_function torch._functorch.pyfunctorch
        torch._functorch.autograd_function.custom_function_call_vmap_helper
        torch._functorch.pyfunctorch.retrieve_current_functorch_interpreter torch._C._dispatch_keyset_full_after
        torch._C._functorch._add_batch_dim torch._C._functorch.maybe_get_level""",
    ),
    _probe(
        "tracing",
        "make_fx of an op wants all arguments",
        "torch.fx.experimental.proxy_tensor._MakefxTracer._trace_inner",
    ),
    _probe(
        "functorch",
        "torch.func.linearize over an op that writes is wrong",
        "torch.fx.experimental.const_fold.split_const_subgraphs torch.fx.graph.CodeGen",
    ),
    _probe(
        "functorch",
        "writes to captured tensors inside torch.func go unnoticed",
        """torch._C._functorch.TransformType torch._C._functorch.get_interpreter_stack
        torch._C._functorch.get_unwrapped torch._C._functorch.is_functorch_wrapped_tensor""",
    ),
    _probe(
        "memory",
        "results that alias an argument are not found",
        """torch._C._any_output_is_alias_to_input_or_output torch._C._data_address torch._C._has_storage
        torch._C._storage_Use_Count torch._C._functorch.is_functorch_wrapped_tensor
        torch.utils._python_dispatch.is_traceable_wrapper_subclass""",
    ),
    _probe(
        "libraries",
        "ops cannot be looked up, replaced or removed",
        """torch._C._jit_get_schemas_for_operator torch._ops.OpOverload torch._ops.OpOverloadPacket
        torch._ops._refresh_packet torch.library._defs torch.library._impls torch.ops._dir""",
    ),
    _probe(
        "libraries",
        "calls of a packet with several overloads are not watched",
        "torch._C._jit_resolve_packet",
    ),
    _probe(
        "registries",
        "torch's register_* functions, given a name, do not reach ops of customops; fakes are not found",
        """torch._library.custom_ops.CustomOpDef torch._library.custom_ops.OPDEFS
        torch._library.custom_ops.OPDEF_TO_LIB torch._library.simple_registry.singleton
        torch.library.Library._register_effectful_op torch.library.Library._register_torch_dispatch_rule""",
    ),
    _probe(
        "dynamo",
        "compiled code is not compiled anew when an op changes",
        """torch._guards.TracingContext.try_get torch._guards.TracingContext.extract_stack torch._C._dynamo
        torch._C._dynamo.eval_frame torch._dynamo.config.suppress_errors torch._dynamo.exc torch._dynamo.guards
        torch._dynamo.source torch._dynamo.utils.run_node torch._ops.OpOverload""",
    ),
    _probe(
        "inductor",
        "compile caches return what an earlier definition of an op was compiled to",
        """torch._functorch.compile_utils torch._inductor.codecache.FxGraphHashDetails
        torch._inductor.lowering.register_lowering torch._inductor.virtualized torch._ops.OpOverload
        torch._ops.OpOverloadPacket""",
    ),
    _probe(
        "graph_calls",
        "calls in compiled graphs go through the dispatcher",
        """torch._inductor.ir.FallbackKernel.codegen torch._ops.OpOverload torch.utils._pytree.tree_leaves""",
    ),
    _probe(
        "inductor_rules",
        "decompositions and lowerings are not followed",
        """torch._inductor.codegen.subgraph.inline_subgraph_to_ir_nodes torch._inductor.decomposition.decompositions
        torch._inductor.decomposition.fast_random_decomps torch._inductor.lowering._maybe_layout_constraints
        torch._inductor.lowering.fallbacks torch._inductor.lowering.lowerings
        torch._inductor.lowering.needs_realized_inputs torch.export.decomp_utils.CustomDecompTable
        torch._ops.OpOverload torch.utils._pytree.tree_flatten torch.utils._pytree.tree_unflatten""",
    ),
    _probe(
        "reinplace",
        "in compiled graphs, an op may read what it has already written",
        """torch._higher_order_ops.auto_functionalize.get_mutable_args
        torch._higher_order_ops.auto_functionalize.read_view_information_from_args
        torch._inductor.fx_passes.reinplace.reinplace_inplaceable_ops_core""",
    ),
    _probe(
        "replacement",
        "plain code is not replaced by ops in compiled graphs",
        """torch._inductor.fx_passes.joint_graph.pass_patterns torch._inductor.pattern_matcher.PatternMatcherPass
        torch._inductor.pattern_matcher.fwd_only torch._inductor.pattern_matcher.init_once_fakemode
        torch._inductor.pattern_matcher.joint_fwd_bwd torch._inductor.pattern_matcher.register_replacement
        torch.utils._python_dispatch._disable_current_modes""",
    ),
    _probe(
        "out_variants",
        "inductor does not call out variants, or calls them with other arguments",
        """torch._inductor.ir.AllocatingMultiOutput torch._inductor.ir.ExternKernelMultiOut
        torch._inductor.virtualized torch._library._out_variant.to_out_variant""",
        since=(2, 12),
    ),
    _probe(
        "functionalization",
        "ops that mutate arguments cannot be compiled, or checkpointed selectively",
        """torch._higher_order_ops.auto_functionalize torch._higher_order_ops.auto_functionalize.can_auto_functionalize
        torch._higher_order_ops.auto_functionalize.try_use_slice torch._ops.OpOverload
        torch._subclasses.functional_tensor.FunctionalTensorMode
        torch.utils.checkpoint._CachedTorchDispatchMode torch.utils.checkpoint._CachingTorchDispatchMode""",
    ),
    _probe(
        "substitution",
        "decompositions and lowerings are not looked at, and inductor refuses them",
        """torch._C.DispatchKey.Functionalize torch._C._SetExcludeDispatchKeyGuard torch._subclasses.FakeTensor
        torch.fx.experimental.proxy_tensor.disable_proxy_modes_tracing""",
    ),
    _probe(
        "triton",
        "compilers do not see the Triton kernels of an op",
        """torch._higher_order_ops.triton_kernel_wrap
        torch._higher_order_ops.triton_kernel_wrap.TraceableTritonKernelWrapper torch._functorch.config
        torch._C._TorchDispatchModeKey torch._C._get_dispatch_mode torch._C._len_torch_dispatch_stack
        torch._C._dispatch_keys torch._subclasses.fake_tensor.FakeTensor""",
    ),
    _probe(
        "tracing",
        "opcheck does not work",
        """torch._functorch.aot_autograd torch._functorch.config torch._functorch.partitioners
        torch._subclasses.FakeTensorMode torch._subclasses.fake_tensor
        torch.utils._python_dispatch.TorchDispatchMode torch.utils._pytree.tree_flatten
        torch.utils._pytree.tree_leaves torch.utils._pytree.tree_unflatten""",
    ),
)


def is_too_new_for(probe: Probe, release: tuple[int, int] | None) -> bool:
    """Does that torch lack the names of a probe because they came later?"""
    return None not in (probe.since, release) and release < probe.since  # type: ignore[operator]


def missing(probe: Probe) -> list[str]:
    """The names of a probe that this torch does not have. Loads what it looks at, Dynamo too."""
    return [name for name in probe.names if not _exists(name)]


def _exists(name: str) -> bool:
    found: Any = importlib.import_module("torch")
    parts = name.split(".")
    for i, part in enumerate(parts[1:], 2):
        if not hasattr(found, part):
            try:
                importlib.import_module(".".join(parts[:i]))
            except ImportError:
                return False
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True


# ----------------------------------------------------------------------------------------------------------------------
# Names that a torch newer than those tested may have lost: the package loads without them, and what uses one raises
# While the other modules here load, each missing name of `probes` is a class that cannot be called. Then torch is as
# it
# was; the modules keep what they took.

__tracebackhide__ = True  # pytest leaves the frames out

_put_in: list[tuple[Any, str]] = []


class _Missing(type):
    """The class of a stand-in: its attributes are stand-ins, too, and a call raises."""

    _name: str
    _without: str

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _stand_in(f"{cls._name}.{name}", cls._without)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(
            f"torch {torch.__version__} has no {cls._name}, so {cls._without}",
            expected=f"torch {_versions.spelled(_versions.OLDEST)} to {_versions.spelled(_versions.NEWEST)}",
            fix="customops doctor lists what is missing; a newer customops may know this torch",
        )


def _stand_in(name: str, without: str) -> Any:
    return _Missing(name.rpartition(".")[2], (), {"_name": name, "_without": without})


def put_in() -> None:
    """Let names be there that this torch does not have, if it is newer than those tested."""
    release = _versions.release(torch.__version__)
    if release is not None and release <= _versions.NEWEST:
        return
    for probe in PROBES:
        for name in probe.names:
            parent, missing = _first_missing(name)
            if missing:
                setattr(parent, missing, _stand_in(name, probe.without))
                _put_in.append((parent, missing))


def take_out() -> None:
    """Leave torch as it was."""
    while _put_in:
        delattr(*_put_in.pop())


def _first_missing(name: str) -> tuple[Any, str]:
    """What lacks the first part of a dotted name that is not there, and that part. A module to be loaded is there."""
    found: Any = torch
    for part in name.split(".")[1:]:
        if not hasattr(found, part):
            is_package = isinstance(found, types.ModuleType) and hasattr(found, "__path__")
            if is_package and importlib.util.find_spec(f"{found.__name__}.{part}") is not None:
                break
            return found, part
        found = getattr(found, part)
    return found, ""
