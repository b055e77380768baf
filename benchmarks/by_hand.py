"""Ops on `torch.library` alone, as the helpers of some libraries register them. `examples/migrate` is held against it.

Each function does what the helper of one library does to the dispatcher, no more.
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
    """A schema from hints, one kernel, perhaps a fake."""
    library.define(name + infer_schema(fn, mutates_args=mutates_args), tags=tuple(tags))
    library.impl(name, fn, key)
    if fake is not None:
        library._register_fake(name, fake)
    return getattr(getattr(torch.ops, library.ns), name)


def sglang(
    library: Library, name: str, fn: Fn, mutates_args: Sequence[str] = (), out_shape: str | None = None, **options: Any
) -> Any:
    """The same, unless it is there; the fake makes a tensor like an argument."""
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
    """torch's `custom_op`, where the ops are switched on."""
    op = torch.library.custom_op(name, fn, **options)
    if fake is not None:
        torch.library.register_fake(name, fake)
    return op


#: It has names of its own for the same two functions of torch.
flash_attention = flashinfer


def quack(name: str, fn: Fn, mutates_args: str | Iterable[str], **options: Any) -> Any:
    """torch's `custom_op` while something compiles, else the function."""
    op = torch.library.custom_op(name, fn, mutates_args=mutates_args, **options)
    op.register_fake(lambda *args, **kwargs: None)
    overload = op._opoverload

    def call(*args: Any, **kwargs: Any) -> Any:
        return (overload if torch.compiler.is_compiling() else fn)(*args, **kwargs)

    return call


def fbgemm(library: Library, name: str, schema: str, kernels: dict[str, Fn], gradient: Sequence[Fn] = ()) -> Any:
    """An op and its kernels by dispatch key, each unless it is there; perhaps a backward and its setup_context."""
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
    """An op whose kernel autograd traces through, and inductor, too."""
    # Before the op is there: inductor takes over, when it is loaded, what is made of torch's ops.
    from torch._inductor.decomposition import register_decomposition  # noqa: PLC0415 (it takes seconds)

    library.define(name + infer_schema(fn, mutates_args=()))
    library.impl(name, fn, "CompositeImplicitAutograd" if decomposed else "CompositeExplicitAutograd")
    packet = getattr(getattr(torch.ops, library.ns), name)
    if decomposed:
        register_decomposition([packet])(fn)
    return packet
