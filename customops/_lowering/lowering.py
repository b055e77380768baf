"""`Lowering`: the callbacks of an op with rich types, as the dispatcher's side of the op calls them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from customops._dispatch.callbacks import Fn, bind, bind_kernel
from customops._lowering import source
from customops._lowering.batching import BatchingRule
from customops._lowering.gradients import Backward, Function, Jvp, SetupContext
from customops._lowering.plan import Plan
from customops._schema.arguments import is_part
from customops._schema.differentiability import names_in


class Lowering(Plan):
    """Wraps callbacks that take and return what the signature says into such as the schema says."""

    def kernel(self, fn: Fn, role: str = "kernel", *, warn: bool = True) -> Fn:
        """A kernel or fake impl of the schema, around one of the signature.

        Raises:
            CallbackError: `fn` does not take the parameters of the signature.
        """
        bound = bind_kernel(fn, self.parameters, self.op, role, warn=warn)
        return _standing_for(fn, source.callback(self.signature, self.schema, self.op, bound, role))

    def setup_context(self, fn: Fn | None) -> Fn | None:
        if fn is None:
            return SetupContext(self, None) if self.counted or self.maybe_tensors else None
        names = ["ctx", "inputs", "keyword_only_inputs", "output"]
        if not self.has_keywords:
            names.remove("keyword_only_inputs")
        bind(fn, self.op, "setup_context", **{name: name for name in names})
        return _standing_for(fn, SetupContext(self, fn))

    def backward(self, fn: Fn, options: Any) -> Fn:
        """A backward; by its options, it also gets the gradients of some mutated arguments."""
        followed = options.get("grads_of")
        if followed is None:
            written = {argument.name for argument in self.schema.mutated} - set(options.get("nondiff_args", ()))
            followed = () if self.schema.returns else written
        bind(fn, self.op, "backward", "ctx", *(f"grad{i}" for i in range(len(self.results) + len(followed))))
        return _standing_for(fn, Backward(self, fn))

    def jvp(self, fn: Fn) -> Fn:
        bind(fn, self.op, "jvp", "ctx", *(f"{each.name}_tangent" for each in self.operands))
        return _standing_for(fn, Jvp(self, fn))

    def function(self, fn: Fn, *, with_written: bool) -> Fn:
        """The function that `register_autograd_from` differentiates; does it return more than the result?"""
        bound = bind_kernel(fn, self.parameters, self.op, "function to differentiate")
        return _standing_for(fn, Function(self, bound, with_written=with_written))

    def vmap(self, fn: Fn) -> Fn:
        bound = bind_kernel(fn, self.parameters, self.op, "vmap rule", "info", "in_dims", warn=True)
        return _standing_for(fn, BatchingRule(self, bound))

    # Names ------------------------------------------------------------------------------------------------------

    def names(self, given: Any, option: str) -> Any:
        """The tensors of the schema that names of parameters, or paths of parts of them, stand for."""
        if given is None:
            return None
        names: list[str] = []
        for name in names_in(given, option, self.op):
            parts = [leaf.name for leaf in self._tensors() if is_part(leaf.path, name)]
            names += parts or [name]  # which then is refused
        return tuple(names)

    def options(self, options: Any) -> Any:
        """The options of a formula, with names of the schema."""
        names = {
            key: self.names(options[key], key) for key in ("nondiff_args", "grads_of", "originals") if key in options
        }
        return options | names

    def _tensors(self) -> Iterable[Any]:
        return (leaf for each in self.signature.parameters for leaf in each.node.leaves if leaf.holds_tensors)


def _standing_for(fn: Fn, made: Callable[..., Any]) -> Fn:
    """`made`, with the name of the user's function and a way to it."""
    functools.update_wrapper(made, fn, updated=())
    return made
