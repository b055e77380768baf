"""The function at the ADInplaceOrView key of an op that writes: a fast path to the kernel, or redispatch.

A call gets there first where autograd is left out: in inference mode, with tensors from outside of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tag

from customops import _compat
from customops._codegen.autograd import as_dict
from customops._codegen.function import Shape, Source, as_tuple, compile_on_first_call, fill
from customops._codegen.kernel import emit_defaults, emit_kernel_call, emit_parameters, emit_passing
from customops._dispatch.callbacks import Fn
from customops._dispatch.current_kernel import CurrentKernel
from customops._dispatch.results import CheckPolicy
from customops._schema.model import Schema

AD_INPLACE_OR_VIEW = """\
def ad_inplace_or_view($keyset, /, {arguments}):
    $current = $fast_path.get($keyset.raw_repr())
    if $current is not None and $forward_ad._current_level < 0:
        {defaults}
        {kernel_call}
    {leave_out}
    return $general($keyset, {args}, {kwargs})
"""


def ad_inplace_or_view(
    schema: Schema,
    tags: tuple[Tag, ...],
    op: str,
    when: CheckPolicy,
    fast_path: dict[int, CurrentKernel | None],
    general: Fn,
) -> Callable[..., Any]:
    """The function at the ADInplaceOrView key: see `autograd` for `fast_path`; all else is done by `general`."""
    generate = functools.partial(_generate, schema, tags, op, fast_path, general, when=when)
    return compile_on_first_call("ad_inplace_or_view", generate)


def _generate(
    schema: Schema,
    tags: tuple[Tag, ...],
    op: str,
    fast_path: dict[int, CurrentKernel | None],
    general: Fn,
    *,
    when: CheckPolicy,
) -> Any:
    return _source(Shape.of(schema, tags, when)).build(op, fast_path=fast_path, general=general)


@functools.lru_cache(maxsize=512)
def _source(shape: Shape) -> Source:
    source = Source("ad_inplace_or_view", shape.schema, shape.tags, shape.when)
    source.objects["forward_ad"] = _compat.autograd.forward_ad
    leave_out, positional, named = emit_passing(source)
    source.template = fill(
        AD_INPLACE_OR_VIEW,
        arguments=emit_parameters(source),
        defaults=emit_defaults(source),
        kernel_call=emit_kernel_call(source, bump=True, direct=True),
        leave_out=leave_out,
        args=as_tuple(positional),
        kwargs=as_dict(named),
    )
    return source
