"""`Lowering`: the callbacks of an op with rich types, as the dispatcher's side of the op calls them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from customops._dispatch.callbacks import Fn, bind, bind_kernel
from customops._lowering import gradients, source
from customops._lowering.batching import BatchingRule
from customops._schema.arguments import is_part
from customops._schema.codecs import MaybeTensor
from customops._schema.cached import cached_property
from customops._schema.differentiability import names_in
from customops._schema.model import Argument, Schema
from customops._schema.nodes import Node, Parameter, Signature

_BY_KEYWORD = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)


class Lowering:
    """What stands between the signature of an op and its schema."""

    def __init__(self, signature: Signature, schema: Schema, op: str) -> None:
        self.signature, self.schema, self.op = signature, schema, op
        #: The parameters, as `bind_kernel` asks for them.
        self.parameters = Schema(tuple(map(_as_argument, signature.parameters)), ())

    def __repr__(self) -> str:
        return f"<Lowering of {self.op}{self.schema}>"

    @property
    def _digest_key(self) -> Any:
        return self.op, self.schema.exact_key

    @cached_property
    def operands(self) -> tuple[Parameter, ...]:
        """The parameters that formulas and vmap rules have an entry for, in their order."""
        positional = [each for each in self.signature.parameters if each.kind not in _BY_KEYWORD]
        by_keyword = [each for each in self.signature.parameters if each.kind in _BY_KEYWORD]
        return (*positional, *(each for each in by_keyword if each.node.holds_tensors))

    @cached_property
    def has_keywords(self) -> bool:
        """Are there keyword-only parameters?"""
        return any(each.kind in _BY_KEYWORD for each in self.signature.parameters)

    @cached_property
    def results(self) -> tuple[Node, ...]:
        """What backward has a gradient for: the fields of a tuple, or what is returned."""
        return gradients.results_of(self.signature)

    @cached_property
    def counted(self) -> tuple[str, ...]:
        """The arguments that say how long lists of lists are."""
        leaves = (leaf for each in self.signature.parameters for leaf in each.node.leaves)
        return tuple(leaf.name for leaf in leaves if leaf.counts_tensors)

    @cached_property
    def maybe_tensors(self) -> tuple[int, ...]:
        """The places of returns that are a tensor or None."""
        leaves = self.signature.result.leaves if self.signature.result is not None else ()
        return tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf.codec, MaybeTensor))

    def restored_call(self, /, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with which a function of the signature is called, of lowered ones."""
        values, named = self.restore(*args, **kwargs)
        kinds = [each.kind for each in self.signature.parameters if each.kind not in _BY_KEYWORD]
        positional: list[Any] = []
        for kind, value in zip(kinds, values, strict=True):
            positional += value if kind is inspect.Parameter.VAR_POSITIONAL else (value,)
        for each in self.signature.parameters:
            if each.kind is inspect.Parameter.VAR_KEYWORD:
                named |= named.pop(each.name)
        return tuple(positional), named

    # Generated functions ----------------------------------------------------------------------------------------

    def call(self, flat_call: Fn) -> Fn:
        """The ``__call__`` of the op's object, around that of an op of the schema."""
        made: Fn = source.call(self.signature, self.schema, self.op, flat_call)
        return made

    @cached_property
    def lower(self) -> Fn:
        """``lower(*args, **kwargs) -> (args, kwargs)``, of a call's arguments those of the schema."""
        made: Fn = source.lower(self.signature, self.schema, self.op)
        return made

    @cached_property
    def restore(self) -> Fn:
        """The way back."""
        made: Fn = source.restore(self.signature, self.schema, self.op)
        return made

    @cached_property
    def restore_result(self) -> Fn:
        made: Fn = source.restore_result(self.signature, self.schema, self.op)
        return made

    def lower_result(self, fn: Fn, role: str) -> Fn:
        made: Fn = source.lower_result(self.signature, self.schema, self.op, fn, role)
        return made

    # Callbacks --------------------------------------------------------------------------------------------------

    def kernel(self, fn: Fn, role: str = "kernel", *, warn: bool = True) -> Fn:
        """A kernel or fake impl of the schema, around one of the signature.

        Raises:
            CallbackError: `fn` does not take the parameters of the signature.
        """
        bound = bind_kernel(fn, self.parameters, self.op, role, warn=warn)
        return _standing_for(fn, source.callback(self.signature, self.schema, self.op, bound, role))

    def setup_context(self, fn: Fn | None) -> Fn | None:
        if fn is None:
            return gradients.SetupContext(self, None) if self.counted or self.maybe_tensors else None
        names = ["ctx", "inputs", "keyword_only_inputs", "output"]
        if not self.has_keywords:
            names.remove("keyword_only_inputs")
        bind(fn, self.op, "setup_context", **{name: name for name in names})
        return _standing_for(fn, gradients.SetupContext(self, fn))

    def backward(self, fn: Fn) -> Fn:
        return _standing_for(fn, gradients.Backward(self, fn))

    def jvp(self, fn: Fn) -> Fn:
        bind(fn, self.op, "jvp", "ctx", *(f"{each.name}_tangent" for each in self.operands))
        return _standing_for(fn, gradients.Jvp(self, fn))

    def function(self, fn: Fn, *, with_written: bool) -> Fn:
        """The function that `register_autograd_from` differentiates; does it return more than the result?"""
        bound = bind_kernel(fn, self.parameters, self.op, "function to differentiate")
        return _standing_for(fn, gradients.Function(self, bound, with_written=with_written))

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
        names = {key: self.names(options[key], key) for key in ("nondiff_args", "grads_of", "originals") if key in options}
        return options | names

    def _tensors(self) -> Iterable[Any]:
        return (leaf for each in self.signature.parameters for leaf in each.node.leaves if leaf.holds_tensors)


def _as_argument(parameter: Parameter) -> Argument:
    by_keyword = parameter.kind in _BY_KEYWORD
    return Argument("", name=parameter.name, default=parameter.default, kwarg_only=by_keyword)


def _standing_for(fn: Fn, made: Callable[..., Any]) -> Fn:
    """`made`, with the name of the user's function and a way to it."""
    functools.update_wrapper(made, fn, updated=())
    return made
