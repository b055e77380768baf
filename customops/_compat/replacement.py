"""Patterns of inductor: plain code in a graph that is replaced by a call of an op."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from customops._compat.late import when_imported


class Pattern(NamedTuple):
    """Code to look for, and what takes its place; both are functions of tensors and floats."""

    op: str
    search: Callable[..., Any]
    replace: Callable[..., Any]
    #: Arguments that the code is traced with. Tensors stand for those of their dtype and number of dimensions.
    examples: Callable[[], Iterable[tuple[Any, ...]]]
    floats: dict[str, float]  #: arguments that are numbers in the code, with a value that nothing else has
    has_gradient: Callable[[], bool]


_patterns: list[Pattern] = []


def add_pattern(pattern: Pattern) -> Callable[[], None]:
    """Let inductor look for a pattern in graphs; the result ends that."""
    _patterns.append(pattern)
    _forget_traced()
    return lambda: _remove(pattern)


def ops_of_patterns() -> set[str]:
    """The names of the ops that may come into any graph."""
    return {pattern.op for pattern in _patterns}


def _remove(pattern: Pattern) -> None:
    _patterns[:] = [each for each in _patterns if each is not pattern]
    _forget_traced()


class _Pass:
    """The pass of inductor that replaces the patterns. They are traced when the first graph comes."""

    def __init__(self) -> None:
        self.traced: Any = None

    def apply(self, graph: Any) -> int:
        if not _patterns:
            return 0
        if self.traced is None:
            matcher = importlib.import_module("torch._inductor.pattern_matcher")
            with torch.utils._python_dispatch._disable_current_modes(), torch.random.fork_rng(devices=()):
                examples = [(pattern, list(pattern.examples())) for pattern in _patterns]
            matcher.init_once_fakemode(functools.partial(self._trace_all, matcher, examples))()
        count: int = self.traced.apply(graph)
        return count

    def _trace_all(self, matcher: Any, examples: list[tuple[Pattern, list[tuple[Any, ...]]]]) -> None:
        traced = matcher.PatternMatcherPass()
        for pattern, each in examples:
            for example in each:
                _trace(matcher, traced, pattern, example)
        self.traced = traced


_pass = _Pass()


def _forget_traced() -> None:
    _pass.traced = None


def _add_pass(joint: Any) -> None:
    joint.pass_patterns.insert(0, _pass)  # before torch's own, which may take parts of the code


when_imported("torch._inductor.fx_passes.joint_graph", _add_pass)


def _trace(matcher: Any, traced: Any, pattern: Pattern, example: tuple[Any, ...]) -> None:
    """Add a pattern as it is in graphs with gradients and in those without."""
    for trace in (matcher.joint_fwd_bwd, matcher.fwd_only) if pattern.has_gradient() else (matcher.fwd_only,):
        matcher.register_replacement(
            pattern.search,
            pattern.replace,
            [_stand_in(each, trace is not matcher.fwd_only) for each in example],
            trace,
            traced,
            scalar_workaround=pattern.floats,
            skip_duplicates=True,
        )


def _stand_in(value: Any, requires_grad: bool) -> Any:
    """A tensor of the same kind without data, made under the fake mode that is active."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(
        value.size(),
        value.stride(),
        dtype=value.dtype,
        device=value.device,
        requires_grad=requires_grad and value.is_floating_point(),
    )
