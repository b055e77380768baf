"""How the ops are made: by customops, by functions of it, or as plain torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from customops import Registry

Fn = Callable[..., Any]


class Program(NamedTuple):
    """Two functions of the same tensors, which return a tensor or a tuple of them."""

    op: Fn
    reference: Fn
    #: The shapes of the tensors.
    shapes: tuple[tuple[int, ...], ...] = ((3,), (3,))

    def inputs(self, batch: tuple[int, ...] = ()) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(1)
        return tuple(0.5 + torch.rand(*batch, *shape, dtype=torch.double, generator=generator) for shape in self.shapes)


class Maker:
    """Defines ops with customops. Rules that say the same to both libraries go by the names they have there."""

    def __init__(self, registry: Registry, namespace: str) -> None:
        self.registry, self.namespace = registry, namespace

    def __call__(
        self,
        kernel: Fn,
        *,
        backward: Fn | None = None,
        jvp: Fn | None = None,
        setup_context: Fn | None = None,
        again: Fn | None = None,
        fake: Fn | None = None,
        vmap: str | Fn | None = None,
        options: dict[str, Any] | None = None,
        **definition: Any,
    ) -> Any:
        """Define an op.

        Args:
            kernel: named as the op is.
            again: a function to be derived, for ops whose kernel is none.
            options: of register_autograd and register_jvp.
            **definition: options of custom_op.
        """
        op = self.define(kernel, {"mutates_args": (), **definition})
        if fake is not None:
            op.register_fake(fake)
        if backward is not None:
            self.differentiate(op, backward, jvp, setup_context, again or kernel, options or {})
        if vmap is not None:
            self.batch(op, vmap)
        return op

    def define(self, kernel: Fn, definition: dict[str, Any]) -> Any:
        return self.registry.custom_op(f"{self.namespace}::{kernel.__name__}", kernel, **definition)

    def differentiate(
        self, op: Any, backward: Fn, jvp: Fn | None, setup_context: Fn | None, again: Fn, options: dict[str, Any]
    ) -> None:
        op.register_autograd(backward, setup_context=setup_context, **options)
        if jvp is not None:
            op.register_jvp(jvp, setup_context=setup_context, **options)

    def batch(self, op: Any, vmap: str | Fn) -> None:
        op.register_vmap(vmap if isinstance(vmap, str) else functools.partial(vmap, op))


class MakerFromFunctions(Maker):
    """Defines ops with customops whose formulas are those of a plain function."""

    def differentiate(
        self, op: Any, backward: Fn, jvp: Fn | None, setup_context: Fn | None, again: Fn, options: dict[str, Any]
    ) -> None:
        op.register_reference(again, gives="gradients")


class TorchMaker(Maker):
    """Defines ops with torch.library, which has no rule for forward mode, and none of the options.

    That a result has no gradient can be said in setup_context there.
    """

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace

    def define(self, kernel: Fn, definition: dict[str, Any]) -> Any:
        known = {key: value for key, value in definition.items() if key not in ("differentiable", "nondiff_args")}
        op = torch.library.custom_op(f"{self.namespace}::{kernel.__name__}", kernel, **known)
        self.flags = definition.get("differentiable", True)
        if self.flags is False:
            self.differentiate(op, lambda ctx, grad: None, None, None, kernel, {})
        return op

    def differentiate(
        self, op: Any, backward: Fn, jvp: Fn | None, setup_context: Fn | None, again: Fn, options: dict[str, Any]
    ) -> None:
        if self.flags is not True:
            setup_context = functools.partial(set_up_flags, self.flags, setup_context)
        op.register_autograd(backward, setup_context=setup_context)

    def batch(self, op: Any, vmap: str | Fn) -> None:
        """Without a rule torch calls the op once for each element, as "sequential" does."""
        if vmap != "sequential":
            op.register_vmap(functools.partial(in_front if isinstance(vmap, str) else vmap, op))


def set_up_flags(flags: Any, setup_context: Fn | None, ctx: Any, inputs: Any, output: Any) -> None:
    outputs = output if isinstance(output, tuple) else (output,)
    flags = (flags,) * len(outputs) if isinstance(flags, bool) else flags
    ctx.mark_non_differentiable(*(each for each, flag in zip(outputs, flags, strict=True) if not flag))
    if setup_context is not None:
        setup_context(ctx, inputs, output)


def in_front(op: Any, info: Any, in_dims: tuple[Any, ...], *args: Any, **kwargs: Any) -> Any:
    """The batching rule of an op for any leading dimensions."""

    def move(value: Any, dim: Any) -> Any:
        if isinstance(value, list):
            return [move(*pair) for pair in zip(value, dim, strict=True)]
        if dim is not None:
            return value.movedim(dim, 0)
        return value.expand(info.batch_size, *value.shape) if isinstance(value, Tensor) else value

    result = op(*map(move, args, in_dims), **kwargs)
    return result, tree_map(lambda x: 0 if isinstance(x, Tensor) else None, result)


def save(ctx: Any, *tensors: Tensor | None) -> None:
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)


def save_all(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    save(ctx, *inputs)


def like_first(*args: Any, **kwargs: Any) -> Tensor:
    """The fake of most of them."""
    first = args[0]
    return torch.empty_like(first[0] if isinstance(first, list) else first)


def total(values: Sequence[Tensor]) -> Tensor:
    return functools.reduce(torch.add, values)
