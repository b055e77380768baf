"""Dynamo: guards that recompile code when an op changes, and frames that it must not trace or name."""

from __future__ import annotations

import functools
import importlib
import itertools
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch._ops import OpOverload

from customops._compat.inductor import keep_calls_apart
from customops._compat.late import when_imported

_C: Any = torch._C

__tracebackhide__ = True  # pytest leaves the frames out


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


#: Functions of `get_of_itself`.
_gets_of_themselves: list[Any] = []


def get_of_itself(get: Callable[..., Any]) -> None:
    """Tell Dynamo that a ``__get__`` returns its object itself, so that there is nothing to trace in it.

    torch 2.11 would trace it for what an instance holds, too, where Python calls none, and fail.
    """
    _gets_of_themselves.append(get)


def _leave_out_gets(module: Any) -> None:
    if hasattr(module.UserDefinedClassVariable, "resolve_cls_plain_attr"):  # 2.12 does as Python does
        return
    is_of_c = module.is_wrapper_or_member_descriptor
    module.is_wrapper_or_member_descriptor = lambda value: (
        any(value is get for get in _gets_of_themselves) or is_of_c(value)
    )


when_imported("torch._dynamo.variables.user_defined", _leave_out_gets)


def stop_tracing(why: str) -> None:
    """Have Dynamo, which traces the caller, not compile the call; where it must, its error says why."""
    torch._dynamo.graph_break(msg=why)


_PACKAGE = Path(__file__).parents[1]

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
    if torch.Tag.nondeterministic_seeded in overload.tags:
        keep_calls_apart(overload)
    guards = importlib.import_module("torch._dynamo.guards")
    sources = importlib.import_module("torch._dynamo.source")
    module = sources.AttrSource(sources.AttrSource(sources.ImportSource("customops"), "_compat"), "dynamo")
    source = sources.DictGetItemSource(sources.AttrSource(module, "generations"), qualname)
    generations.setdefault(qualname, next(_numbers))
    guards.install_guard(source.make_guard(guards.GuardBuilder.EQUALS_MATCH))
    return True


#: Files of which no line is the user's: those of this package, and of the `__call__` that is generated for an op.
hidden_files = {str(path) for path in _PACKAGE.rglob("*.py")}


def _hide_frames(module: Any) -> None:
    """The line that a graph, a guard or an error names is the user's, not the one in this package that it called."""
    module.uninteresting_files = functools.partial(_with_hidden_files, module.uninteresting_files)


def _with_hidden_files(original: Callable[[], set[str]]) -> set[str]:
    return original() | hidden_files


for _name in ("torch._dynamo.guards", "torch._dynamo.output_graph"):  # the latter has a name of its own for it
    when_imported(_name, _hide_frames)
