"""vLLM's `direct_register_custom_op`: one dispatch key, one library, kernels that cost next to nothing to reach.

vLLM infers the schema, then defines and implements the op by hand, because `torch.library.custom_op` costs too much a
call. Here the op is an ordinary `custom_op` that lives as long as the library. Of an argument it returns a copy.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from customops import adopt, custom_op, define, helper, impl, infer_schema

#: Where ops go that name no library.
LIBRARY = Library("examples_vllm", "FRAGMENT")


@helper
def direct_register_custom_op(
    op_name: str,
    op_func: Callable[..., Any],
    mutates_args: list[str] | None = None,
    fake_impl: Callable[..., Any] | None = None,
    target_lib: Library | None = None,
    dispatch_key: str | None = None,
    tags: Sequence[torch.Tag] = (),
) -> None:
    """Define an op with a kernel at one dispatch key. It is called as ``torch.ops.<library>.<op_name>``.

    Without `dispatch_key` it is the kernel of the accelerator, or of the CPU where there is none. At
    CompositeImplicitAutograd, autograd and compilers trace it.
    """
    library = target_lib or LIBRARY
    name = f"{library.ns}::{op_name}"
    if dispatch_key == "CompositeImplicitAutograd":
        define(name, infer_schema(op_func, mutates_args=mutates_args or ()), lib=library, tags=tags)
        impl(name, dispatch_key, op_func, lib=library)
    else:
        custom_op(
            name,
            own_results(op_func),
            mutates_args=mutates_args or (),
            device_types=dispatch_key or device_of_platform(),
            tags=tags,
            lib=library,
            on_conflict="error",
        )
    if fake_impl is not None:
        adopt(name).register_fake(fake_impl)


def own_results(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which returns a copy where it would return an argument.

    A schema without aliases says that results are new memory, and inductor writes into it: by hand, compiled code then
    changes the argument.
    """
    if inspect.signature(fn).return_annotation in (None, "None"):
        return fn

    @functools.wraps(fn)
    def kernel(*args: Any, **kwargs: Any) -> Any:
        result = fn(*args, **kwargs)
        given = (*args, *kwargs.values())
        if isinstance(result, (list, tuple)):
            return type(result)(own(x, given) for x in result)
        return own(result, given)

    return kernel


def own(result: Any, given: tuple[Any, ...]) -> Any:
    for value in given:
        if value is result and isinstance(value, Tensor):
            return value.clone()
    return result


def device_of_platform() -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


# Ops of vLLM, by their signatures: what the first returns orders the second after it ----------------------------------


CACHES = {"layers.0": torch.zeros(4, 2), "layers.1": torch.zeros(4, 2)}


def unified_kv_cache_update(key: Tensor, value: Tensor, layer_name: str) -> Tensor:
    CACHES[layer_name][: len(key)] = key + value
    return key.new_empty(0)


def unified_kv_cache_update_fake(key: Tensor, value: Tensor, layer_name: str) -> Tensor:
    return key.new_empty(0)


def unified_attention_with_output(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    layer_name: str,
    output_scale: Tensor | None = None,
    output_block_scale: Tensor | None = None,
    kv_cache_dummy_dep: Tensor | None = None,
) -> None:
    output.copy_(query * CACHES[layer_name][: len(query)] / (1 if output_scale is None else output_scale))
    if output_block_scale is not None:
        output_block_scale.copy_(output.abs().amax(-1))


direct_register_custom_op(
    op_name="unified_kv_cache_update",
    op_func=unified_kv_cache_update,
    mutates_args=[],
    fake_impl=unified_kv_cache_update_fake,
    dispatch_key="CPU",
)
direct_register_custom_op(
    op_name="unified_attention_with_output",
    op_func=unified_attention_with_output,
    mutates_args=["output", "output_block_scale"],
    dispatch_key="CPU",
)


def attention(query: Tensor, key: Tensor, value: Tensor, layer_name: str) -> Tensor:
    """What a layer of a model calls."""
    output = torch.empty_like(query)
    updated = torch.ops.examples_vllm.unified_kv_cache_update(key, value, layer_name)
    torch.ops.examples_vllm.unified_attention_with_output(
        query, key, value, output, layer_name, kv_cache_dummy_dep=updated
    )
    return output


@adopt("examples_vllm::unified_attention_with_output").register_samples
def _() -> Iterator[tuple[Any, ...]]:
    for rows, layer in (3, "layers.0"), (2, "layers.1"):
        x = torch.randn(rows, 2)
        yield x, x, x, torch.zeros(rows, 2), layer, torch.tensor(2.0), torch.zeros(rows)


def main() -> None:
    ones = torch.ones(3, 2)
    print("a layer:", attention(ones, ones, ones, "layers.1").tolist())


if __name__ == "__main__":
    main()
