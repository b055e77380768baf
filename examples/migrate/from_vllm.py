"""vLLM's `direct_register_custom_op`: one dispatch key, one library, kernels that cost next to nothing to reach.

vLLM infers the schema, then defines and implements the op by hand, because `torch.library.custom_op` costs too much a
call. Here the op is an ordinary `custom_op` that lives as long as the library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from customops import adopt, custom_op, helper

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

    Without `dispatch_key` it is the kernel of the accelerator, or of the CPU where there is none.
    """
    library = target_lib or LIBRARY
    op = custom_op(
        f"{library.ns}::{op_name}",
        op_func,
        mutates_args=mutates_args or (),
        device_types=dispatch_key or device_of_platform(),
        tags=tags,
        lib=library,
        on_conflict="error",
    )
    if fake_impl is not None:
        op.register_fake(fake_impl)


def device_of_platform() -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


# An op of the kind that vLLM has: attention that writes into a buffer, and finds its cache by the name of a layer ----


CACHES = {"layers.0": torch.tensor([0.5, 2.0]), "layers.1": torch.tensor([3.0, 1.0])}


def unified_attention_with_output(query: Tensor, output: Tensor, layer_name: str, scale: float | None = None) -> None:
    output.copy_(query * CACHES[layer_name] * (1.0 if scale is None else scale))


direct_register_custom_op(
    "unified_attention_with_output", unified_attention_with_output, mutates_args=["output"], dispatch_key="CPU"
)


@adopt("examples_vllm::unified_attention_with_output").register_samples
def _() -> Iterator[tuple[Tensor, Tensor, str]]:
    yield torch.randn(3, 2), torch.zeros(3, 2), "layers.0"
    yield torch.randn(2, 2), torch.zeros(2, 2), "layers.1"


def main() -> None:
    query, output = torch.ones(1, 2), torch.zeros(1, 2)
    torch.ops.examples_vllm.unified_attention_with_output(query, output, "layers.1", scale=2.0)
    print("torch.ops.examples_vllm.unified_attention_with_output:", output.tolist())


if __name__ == "__main__":
    main()
