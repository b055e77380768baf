"""Dynamo: guards that recompile code when an op changes, and frames that it must not trace or name."""

from __future__ import annotations

import functools
import importlib
import itertools
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

from customops._places import is_users
from customops._torch import hooks
from customops._torch.inductor import keep_calls_apart

_C: Any = torch._C

__tracebackhide__ = True  # pytest leaves the frames out


#: Without: compiled code is not compiled anew when an op changes
_F = TypeVar("_F", bound=Callable[..., Any])
#: The code objects that are marked, by their ids. `torch.compiler.reset` leaves the marks.
_marked: weakref.WeakValueDictionary[int, types.CodeType] = weakref.WeakValueDictionary()


def outside_dynamo(fn: _F) -> _F:
    """Keep Dynamo from tracing the frames of `fn`, which C++ calls, and all frames below them.

    Marks the code object, so one call serves every closure made from the same ``def``, and calls cost nothing. Where
    torch cannot, the function is wrapped as `torch.compiler.disable` wraps it.
    """
    code = fn.__code__
    if _marked.get(id(code)) is code:  # equal ones are others
        return fn
    frames: Any = getattr(_C._dynamo, "eval_frame", None)
    if not hasattr(frames, "set_code_exec_strategy"):
        return cast(_F, torch.compiler.disable(fn))
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip))
    _marked[id(code)] = code
    return fn


def while_tracing(fn: _F) -> _F:
    """Let Dynamo call `fn` where it traces a call of it, with the arguments themselves, and go on with what it returns.

    As `torch.compiler.assume_constant_result` does, which would load Dynamo.
    """
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn


@while_tracing
def stop_tracing(
    cls: Any, problem: str, op: str, fix: str, argument: str | None = None, expected: str | None = None
) -> None:
    """Have Dynamo, which traces the caller, not compile the call; where it must, this is its error."""
    error = cls(problem, op=op, argument=argument, expected=expected, where=traced_call(), fix=fix)
    said = _breaking(cls)(str(error))
    said.__dict__.update(vars(error), plain=error)
    raise said


@functools.cache
def _breaking(cls: Any) -> Any:
    """Return the class `cls`, made an error at which Dynamo breaks the graph."""
    unsupported: Any = importlib.import_module("torch._dynamo.exc").Unsupported
    members: dict[str, Any] = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__init__": vars(unsupported)["__init__"],
        "__str__": lambda self: str(self.plain),  # Dynamo adds to the arguments
        "__reduce__": lambda self: self.plain.__reduce__(),
    }
    return type(cls.__name__, (cls, unsupported), members)


def is_tracing() -> bool:
    """Return whether Dynamo, or a compiler below it, traces now."""
    return torch._guards.TracingContext.try_get() is not None


def traced_call() -> str | None:
    """Return the line of the user's code that Dynamo traces, or None."""
    stack = torch._guards.TracingContext.extract_stack()
    return next(
        (f"{each.name} ({each.filename}:{each.lineno})" for each in reversed(stack) if is_users(each.filename)), None
    )


#: Name of an op that was traced -> a number that changes with everything that compiled code was traced from.
generations: dict[str, int] = {}
_numbers = itertools.count()


def recompile(qualname: str) -> None:
    """Let code that was compiled with an op be compiled anew when it is next called."""
    if qualname in generations:  # else none was
        generations[qualname] = next(_numbers)


def traced(overload: OpOverload, qualname: str) -> bool:
    """To be called where the fake of an op runs. If a compiler runs it, its guards learn of the op's generation."""
    if torch._guards.TracingContext.try_get() is None:
        return False
    hooks.op_traced(qualname, True)
    if torch.Tag.nondeterministic_seeded in overload.tags:
        keep_calls_apart(overload)
    guards = importlib.import_module("torch._dynamo.guards")
    sources = importlib.import_module("torch._dynamo.source")
    module = sources.AttrSource(sources.AttrSource(sources.ImportSource("customops"), "_torch"), "dynamo")
    source = sources.DictGetItemSource(sources.AttrSource(module, "generations"), qualname)
    generations.setdefault(qualname, next(_numbers))
    guards.install_guard(source.make_guard(guards.GuardBuilder.EQUALS_MATCH))
    return True


class _Preferences:
    """What is preferred here for an op, as text, by a name that stands for the op: guards read such attributes."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self.ops: dict[str, str] = {}

    def name_for(self, qualname: str) -> str:
        name = self.names.setdefault(qualname, f"of_{len(self.names)}")
        self.ops[name] = qualname
        return name

    def __getattr__(self, name: str) -> str:
        if name not in self.ops:
            raise AttributeError(name)
        return preferred(self.ops[name])


#: Returns what is preferred for an op, as text. Entered by `_rules.choice`.
preferred: Callable[[str], str] = lambda op: ""  # noqa: E731
preferences = _Preferences()


def guard_preference(qualname: str) -> None:
    """Let what is compiled be compiled anew where another kernel of an op is preferred."""
    sources = importlib.import_module("torch._dynamo.source")
    guards = importlib.import_module("torch._dynamo.guards")
    module = sources.AttrSource(sources.AttrSource(sources.ImportSource("customops"), "_torch"), "dynamo")
    source = sources.AttrSource(sources.AttrSource(module, "preferences"), preferences.name_for(qualname))
    guards.install_guard(source.make_guard(guards.GuardBuilder.EQUALS_MATCH))


def of_trace(current: Callable[[], Any]) -> Any:
    """``current()`` as it was when the trace began that is under way: graphs may be compiled later, elsewhere."""
    context: Any = torch._guards.TracingContext.try_get()
    if context is None:
        return current()
    if not hasattr(context, "customops_preferences"):
        context.customops_preferences = current()
    return context.customops_preferences


def note(key: str, value: str) -> None:
    """Note something on the node for the call that Dynamo traces, where graphs that are made of it keep it."""
    code = getattr(getattr(sys.modules.get("torch._dynamo.utils"), "run_node", None), "__code__", None)
    frame: types.FrameType | None = sys._getframe(1)
    while code is not None and frame is not None and frame.f_code is not code:
        frame = frame.f_back
    node = frame.f_locals.get("node") if code is not None and frame is not None else None
    if isinstance(node, torch.fx.Node):
        node.meta.setdefault("custom", {})[key] = value


#: Files of this package, and of the functions that are generated for calls of op objects.
_hidden_files = {str(path) for path in Path(__file__).parents[1].rglob("*.py")}


#: The sets of torch with the files whose lines are not named, once `hide_frames` has filled them.
_sets_of_torch: list[set[str]] = []


def hide_frames(guards: Any) -> None:
    """Let graphs, guards and errors name the line of the user that called an op, instead of a line of this package."""
    for module in (guards, importlib.import_module("torch.fx.experimental.symbolic_shapes")):
        files = module.uninteresting_files()
        files.update(_hidden_files)
        _sets_of_torch.append(files)


def hide_file(name: str) -> None:
    """Hide the frames of a generated function."""
    for files in (_hidden_files, *_sets_of_torch):
        files.add(name)


# ----------------------------------------------------------------------------------------------------------------------
# Triton kernels, and how torch's compilers see a launch. Nothing here loads Triton; who has a kernel has loaded it

#: Without: compilers do not see the Triton kernels of an op
_MODES: Any = _C._TorchDispatchModeKey


def is_traced(tensors: Sequence[torch.Tensor]) -> bool:
    """Does a compiler record what runs now? Then a launch has to go into its graph."""
    keys = (_MODES.PROXY, _MODES.FUNCTIONAL)
    if _C._len_torch_dispatch_stack() and any(_C._get_dispatch_mode(key) is not None for key in keys):
        return True
    return any(_C._dispatch_keys(tensor).has("Python") and not isinstance(tensor, FakeTensor) for tensor in tensors)


def is_fake(tensors: Sequence[torch.Tensor]) -> bool:
    """Is there no memory to run on?"""
    if _C._len_torch_dispatch_stack() and _C._get_dispatch_mode(_MODES.FAKE) is not None:
        return True
    return any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in tensors)


def capture(kernel: Any, grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Put a launch into the graph that is being traced: a call of torch's higher-order op for Triton kernels.

    That knows no heuristics outside of an autotuner. Here they choose their values while tracing.
    """
    heuristics = sys.modules["triton.runtime.autotuner"].Heuristics
    while isinstance(kernel, heuristics):
        for name, choose in kernel.values.items():
            kwargs = {**kwargs, name: choose({**dict(zip(kernel.arg_names, args, strict=False)), **kwargs})}
        kernel = kernel.fn
    wrapper = importlib.import_module("torch._higher_order_ops.triton_kernel_wrap").TraceableTritonKernelWrapper
    wrapper(kernel, None, None)[grid](*args, **kwargs)


def keeps_ops() -> bool:
    """Is this an export, which keeps such ops whole?"""
    config = importlib.import_module("torch._functorch.config")
    return not getattr(config, "decompose_custom_triton_ops", True)


def is_kernel(value: Any) -> bool:
    """Was `value` made by ``triton.jit``, ``triton.autotune`` or ``triton.heuristics``?"""
    jit = sys.modules.get("triton.runtime.jit")
    return jit is not None and isinstance(value, jit.KernelInterface)


def is_interpreted(kernel: Any) -> bool:
    """Does Triton's interpreter run the kernel?"""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    while interpreter is not None and is_kernel(kernel):
        if isinstance(kernel, interpreter.InterpretedFunction):
            return True
        kernel = getattr(kernel, "fn", None)  # of an autotuner, or of heuristics
    return False


def interprets() -> bool:
    """Does Triton's interpreter run what is decorated now? (``TRITON_INTERPRET=1``)"""
    triton = sys.modules.get("triton")
    return triton is not None and bool(triton.knobs.runtime.interpret)


def runs_on_cpu() -> bool:
    """Does Triton compile for the CPU here?"""
    try:
        return bool(sys.modules["triton"].runtime.driver.active.get_current_target().backend == "cpu")
    except RuntimeError:  # there is no driver
        return False


def parts_of(value: Any) -> Iterable[Any] | None:
    """What a kernel does, for a digest of it, or None for what is no kernel."""
    if not is_kernel(value):
        return None
    if isinstance(value, sys.modules["triton.runtime.jit"].JITFunction):
        return (value.cache_key, value.params and [(p.name, p.is_constexpr, str(p.annotation)) for p in value.params])
    names = ("fn", "arg_names", "keys", "values", "configs", "kwargs")  # of an autotuner, heuristics, the interpreter
    parts = [getattr(value, name) for name in names if hasattr(value, name)]
    for i, part in enumerate(parts):
        if isinstance(part, list) and all(hasattr(each, "all_kwargs") for each in part):  # Triton's Configs
            parts[i] = [(each.all_kwargs(), each.pre_hook) for each in part]
    return parts


def on_device(device: torch.device) -> Any:
    """A context in which `device` is the current one, or None if it is already."""
    module = torch.get_device_module(device.type)
    current, guard = getattr(module, "current_device", None), getattr(module, "device", None)
    if device.index is None or current is None or guard is None or current() == device.index:
        return None
    return guard(device)
