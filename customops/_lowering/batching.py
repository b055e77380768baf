"""vmap rules of ops with rich types: dimensions come, and are returned, in the form of the signature."""

from __future__ import annotations

from typing import Any

from customops._dispatch.callbacks import Fn
from customops._lowering.gradients import misfit_of, of_tensors
from customops._lowering.plan import Plan
from customops._schema.nodes import Leaf, Node
from customops.errors import CallbackError, where

__tracebackhide__ = True  # pytest leaves the frames out


class BatchingRule:
    """``rule(info, in_dims, *args, **kwargs) -> (result, out_dims)``"""

    def __init__(self, plan: Plan, fn: Fn) -> None:
        self.plan, self.fn = plan, fn
        self.lower_result = plan.lower_result(fn, "vmap rule")

    def __call__(self, info: Any, in_dims: tuple[Any, ...], /, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        plan, result_node = self.plan, self.plan.signature.result
        dims = dict(zip((argument.name for argument in plan.schema.operands), in_dims, strict=True))
        values = dict(zip((a.name for a in plan.schema.positional), args, strict=True)) | kwargs
        dims |= {name: values[name] for name in plan.counted}
        restored, named = plan.restored_call(*args, **kwargs)
        result, out_dims = self.fn(info, tuple(of_tensors(x.node, dims) for x in plan.operands), *restored, **named)
        if plan.signature.returns_plainly or result_node is None:
            return result, out_dims
        return self._lowered(result_node, self.lower_result(result), out_dims)

    def _lowered(self, node: Node, result: Any, out_dims: Any) -> tuple[Any, Any]:
        """The result, and a dimension for each tensor of it: one for all of them is allowed."""
        leaves = node.leaves
        dims = dict.fromkeys([leaf.name for leaf in leaves], out_dims)
        if not (out_dims is None or isinstance(out_dims, int)):
            if (wrong := misfit_of(node, out_dims)) is not None:
                raise CallbackError(
                    "the vmap rule returned out_dims whose structure is not that of the result",
                    op=self.plan.op,
                    argument=f"return{wrong[0]}",
                    expected=f"a dimension for all, or {wrong[1]}",
                    got=repr(out_dims),
                    where=where(self.fn),
                )
            dims = node.take_apart(out_dims)
        results = [list(x) if isinstance(x, tuple) else x for x in (result if len(leaves) > 1 else (result,))]
        flat = [_dims_of(leaf, value, dims[leaf.name]) for leaf, value in zip(leaves, results, strict=True)]
        return (tuple(results), tuple(flat)) if len(leaves) > 1 else (results[0], flat[0])


def _dims_of(leaf: Leaf, value: Any, dims: Any) -> Any:
    """As functorch wants it: a dimension for a tensor, a list for a list, None for what is no tensor."""
    if not leaf.holds_tensors:
        return [None] * len(value) if isinstance(value, list) else None
    if isinstance(value, (list, tuple)):
        return list(dims) if isinstance(dims, (list, tuple)) else [dims] * len(value)
    return dims
