"""Registration on `torch.library`, as the helpers of some libraries do it: the oracle for `examples/migrate`.

Each function makes the same calls of `torch.library` as the helper of one library, and no others.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.library import Library, infer_schema

Fn = Callable[..., Any]


def vllm(
    library: Library,
    name: str,
    fn: Fn,
    mutates_args: Sequence[str] = (),
    fake: Fn | None = None,
    key: str = "CPU",
    tags: Sequence[torch.Tag] = (),
) -> Any:
    """Define an op with a schema from hints, one kernel and an optional fake impl."""
    library.define(name + infer_schema(fn, mutates_args=mutates_args), tags=tuple(tags))
    library.impl(name, fn, key)
    if fake is not None:
        library._register_fake(name, fake)
    return getattr(getattr(torch.ops, library.ns), name)


def sglang(
    library: Library, name: str, fn: Fn, mutates_args: Sequence[str] = (), out_shape: str | None = None, **options: Any
) -> Any:
    """Define an op as `vllm` does, unless the op exists; its fake impl returns a tensor like an argument."""
    packet = getattr(getattr(torch.ops, library.ns), name, None)
    if packet is not None:
        return packet
    signature = inspect.signature(fn)

    def fake(*args: Any, **kwargs: Any) -> Any:
        if out_shape is None:
            return None
        like = signature.bind(*args, **kwargs).arguments[out_shape]
        dtype = options.get("out_dtype")
        return torch.empty_like(like) if dtype is None else torch.empty(like.shape, dtype=dtype, device=like.device)

    return vllm(library, name, fn, mutates_args, options.get("fake_impl", fake), options.get("key", "CPU"))


def flashinfer(name: str, fn: Fn, fake: Fn | None = None, **options: Any) -> Any:
    """Define an op by `torch.library.custom_op`, as FlashInfer does when its ops are enabled."""
    op = torch.library.custom_op(name, fn, **options)
    if fake is not None:
        torch.library.register_fake(name, fake)
    return op


#: The helper of flash-attention calls the same two functions of torch.
flash_attention = flashinfer


def quack(name: str, fn: Fn, mutates_args: str | Iterable[str], **options: Any) -> Any:
    """Return a function that calls an op while a compiler traces, and `fn` otherwise."""
    op = torch.library.custom_op(name, fn, mutates_args=mutates_args, **options)
    op.register_fake(lambda *args, **kwargs: None)
    overload = op._opoverload

    def call(*args: Any, **kwargs: Any) -> Any:
        return (overload if torch.compiler.is_compiling() else fn)(*args, **kwargs)

    return call


def fbgemm(library: Library, name: str, schema: str, kernels: dict[str, Fn], gradient: Sequence[Fn] = ()) -> Any:
    """Define an op, its kernels by dispatch key and its gradient (backward, setup_context), unless they exist."""
    qualname = f"{library.ns}::{name}"
    if not torch._C._dispatch_has_kernel(qualname):
        library.define(name + schema)
    for key, fn in kernels.items():
        if torch._C._dispatch_has_kernel_for_dispatch_key(qualname, key):
            continue
        if key == "Meta":
            library._register_fake(name, fn)
        else:
            library.impl(name, fn, key)
    if gradient and f"{library.ns}/{name}/Autograd" not in torch.library._impls:
        torch.library.register_autograd(qualname, gradient[0], setup_context=gradient[1], lib=library)
    return getattr(getattr(torch.ops, library.ns), name)


def torchao(library: Library, name: str, fn: Fn, decomposed: bool = True) -> Any:
    """Define an op whose kernel is traced by autograd and, if `decomposed`, by inductor."""
    # Before the op is defined: when inductor is loaded, it registers decompositions for the composite ops that exist.
    from torch._inductor.decomposition import register_decomposition  # noqa: PLC0415 (it takes seconds)

    library.define(name + infer_schema(fn, mutates_args=()))
    library.impl(name, fn, "CompositeImplicitAutograd" if decomposed else "CompositeExplicitAutograd")
    packet = getattr(getattr(torch.ops, library.ns), name)
    if decomposed:
        register_decomposition([packet])(fn)
    return packet
