"""Patterns of inductor: plain code in a graph that is replaced by a call of an op."""

from __future__ import annotations

import functools
import importlib
import inspect
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

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
        traced = self.traced  # another thread may forget it meanwhile
        if traced is None:
            matcher = importlib.import_module("torch._inductor.pattern_matcher")
            with torch.utils._python_dispatch._disable_current_modes(), torch.random.fork_rng(devices=()):
                examples = [(pattern, list(pattern.examples())) for pattern in _patterns]
            # torch 2.11 passes the device of the graph
            traced = matcher.init_once_fakemode(lambda *_: self._trace_all(matcher, examples))()
        count: int = traced.apply(graph)
        return count

    def _trace_all(self, matcher: Any, examples: list[tuple[Pattern, list[tuple[Any, ...]]]]) -> Any:
        traced = matcher.PatternMatcherPass()
        for pattern, each in examples:
            for example in each:
                try:
                    _trace(matcher, traced, pattern, example, each)
                except Exception as error:  # other programs, that may not even have the op, are to be compiled
                    warnings.warn(
                        f"{pattern.op}: a pattern of register_replacement cannot be traced, and is left out: {error!r}",
                        stacklevel=2,
                    )
        self.traced = traced
        return traced


_pass = _Pass()


def _forget_traced() -> None:
    _pass.traced = None


def _add_pass(joint: Any) -> None:
    joint.pass_patterns.insert(0, _pass)  # before torch's own, which may take parts of the code


when_imported("torch._inductor.fx_passes.joint_graph", _add_pass)


def _trace(
    matcher: Any, traced: Any, pattern: Pattern, example: tuple[Any, ...], examples: list[tuple[Any, ...]]
) -> None:
    """Add a pattern as it is in graphs with gradients and in those without. For several samples it may be the same."""
    for trace in (matcher.joint_fwd_bwd, matcher.fwd_only) if pattern.has_gradient() else (matcher.fwd_only,):
        matcher.register_replacement(
            pattern.search,
            pattern.replace,
            [_stand_in(each, trace is not matcher.fwd_only) for each in example],
            trace,
            traced,
            extra_check=functools.partial(_fits, pattern, examples),
            scalar_workaround=pattern.floats,
            skip_duplicates=True,
        )


def _fits(pattern: Pattern, examples: list[tuple[Any, ...]], match: Any) -> bool:
    """Is the code that was found one for tensors like those of a sample, and would the op return the same kind?

    torch looks at the operations alone: they may be of other dtypes, broadcast, or have a number where a tensor was.
    """
    names = inspect.signature(pattern.search).parameters
    # torch 2.11 matches numbers as constants, which are not in kwargs; any number gives the same shapes
    given = [_value_of(match.kwargs.get(name, pattern.floats.get(name))) for name in names]
    if not any(all(map(_is_like, given, example)) and _sizes_are_like(given, example) for example in examples):
        return False
    results = [each for each in tree_leaves(pattern.replace(*given)) if isinstance(each, torch.Tensor)]
    found = [_value_of(node) for node in match.output_nodes()]
    return len(results) <= len(found) and all(map(_looks_same, results, found))


def _value_of(value: Any) -> Any:
    return value.meta.get("val") if isinstance(value, torch.fx.Node) else value


def _is_like(value: Any, example: Any) -> bool:
    if not isinstance(example, torch.Tensor):
        return type(value) is float
    return isinstance(value, torch.Tensor) and (value.dtype, value.dim(), value.device) == (
        example.dtype,
        example.dim(),
        example.device,
    )


def _sizes_are_like(values: list[Any], examples: tuple[Any, ...]) -> bool:
    """Are those sizes equal that are equal in the sample?"""
    known: dict[int, Any] = {}
    pairs = ((v, e) for v, e in zip(values, examples, strict=True) if isinstance(e, torch.Tensor))
    sizes = (
        (size, wanted) for value, example in pairs for size, wanted in zip(value.shape, example.shape, strict=True)
    )
    return all(_is_true(known.setdefault(wanted, size) == size) for size, wanted in sizes)


def _looks_same(one: torch.Tensor, other: Any) -> bool:
    if not isinstance(other, torch.Tensor) or (one.dtype, one.dim()) != (other.dtype, other.dim()):
        return False
    lengths = zip((*one.shape, *one.stride()), (*other.shape, *other.stride()), strict=True)
    return all(_is_true(a == b) for a, b in lengths)


def _is_true(condition: Any) -> bool:
    """Is it known, without a guard on sizes that are symbols?"""
    symbols = importlib.import_module("torch.fx.experimental.symbolic_shapes")
    return bool(symbols.statically_known_true(condition))


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
