"""SGLang's `register_custom_op` and `register_custom_op_from_extern`: fakes by the name of an argument, ops on demand.

SGLang defines ops as vLLM does, derives the fake of most of them from one argument, leaves alone an op that is there,
and, with ``eager=False``, defines an op on its first call, which must then not be under `torch.compile`. Here every op
is defined at once, so that compilers find it. With ``SGLANG_KERNEL_API_LOGLEVEL`` calls are logged.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from customops import CustomOpDef, adopt, custom_op, helper
from customops.recording import dump, log

NAMESPACE = "examples_sglang"
Fn = Callable[..., Any]

#: The logs that are open, for as long as the process runs.
LOGS = ExitStack()


@helper
def direct_register_custom_op(
    op_name: str, op_func: Fn, mutates_args: list[str], fake_impl: Fn | None = None, target_lib: Library | None = None
) -> None:
    """Define an op with a kernel for the device of the platform, unless it is there."""
    _register(op_func, op_name, mutates_args, None, fake_impl, library=target_lib)


@helper
def register_custom_op(
    fn: Fn | None = None,
    *,
    op_name: str | None = None,
    mutates_args: list[str] | None = None,
    out_shape: int | str | None = None,
    fake_impl: Fn | None = None,
    eager: bool = True,
) -> Any:
    """Define the op ``torch.ops.<NAMESPACE>.<op_name>`` and return its object.

    Its fake impl returns a tensor like the argument `out_shape`, a position or a name, or is `fake_impl`. The op is
    defined at once also with ``eager=False``.
    """
    options = {"mutates_args": mutates_args, "out_shape": out_shape, "fake_impl": fake_impl}
    if fn is None:
        return functools.partial(register_custom_op, op_name=op_name, eager=eager, **options)
    return logged(_register(fn, op_name or fn.__name__, **options))


@helper
def register_custom_op_from_extern(
    fn: Fn,
    *,
    op_name: str | None = None,
    mutates_args: list[str] | None = None,
    out_shape: int | str | None = None,
    out_dtype: torch.dtype | None = None,
    fake_impl: Fn | None = None,
    computed_args: Mapping[str, Fn] | None = None,
) -> Any:
    """Define an op that calls another library's function.

    The op does not have the arguments `computed_args`: its kernel computes each one from the other arguments, which are
    passed by name.
    """
    if computed_args:
        fn = without(fn, computed_args)
    return logged(_register(fn, op_name or fn.__name__, mutates_args, out_shape, fake_impl, out_dtype=out_dtype))


def debug_torch_op(op_func: Fn, op_name: str, *, namespace: str = NAMESPACE) -> CustomOpDef[..., Any]:
    """The object of an op, whose calls are logged if the environment says so: no wrapper is needed for that."""
    return logged(adopt(f"{namespace}::{op_name}"))


def logged(op: CustomOpDef[..., Any]) -> CustomOpDef[..., Any]:
    level = int(os.environ.get("SGLANG_KERNEL_API_LOGLEVEL", "0"))
    if level > 0:
        LOGS.enter_context(log("calls" if level < 5 else "times", op))
    if level >= 10:
        LOGS.enter_context(dump(os.environ.get("SGLANG_KERNEL_API_DUMP_DIR", "kernel_api_dumps"), ops=op, when="all"))
    return op


@helper
def _register(
    fn: Fn,
    name: str,
    mutates_args: list[str] | None,
    out_shape: int | str | None,
    fake_impl: Fn | None,
    *,
    out_dtype: torch.dtype | None = None,
    library: Library | None = None,
) -> CustomOpDef[..., Any]:
    if out_shape is not None and fake_impl is not None:
        raise TypeError(f"{name}: out_shape and fake_impl both say what the result is; give one of them")
    if out_shape is not None:
        fake_impl = empty_like_argument(fn, out_shape, out_dtype)
    kernel = own_results(fn)
    op = custom_op(
        f"{NAMESPACE if library is None else library.ns}::{name}",
        kernel,
        mutates_args=mutates_args or (),
        device_types=device_of_platform(),
        bypass=True,
        on_conflict="skip",
        lib=library,
    )
    if getattr(op, "__wrapped__", None) is not kernel:
        return op  # one that was there
    if fake_impl is not None:
        op.register_fake(fake_impl)
    return op


def empty_like_argument(fn: Fn, argument: int | str, dtype: torch.dtype | None) -> Fn:
    """Return a fake impl whose result is like an argument; with a dtype, the result has the shape and is contiguous."""
    signature = inspect.signature(fn)
    names = [*signature.parameters]
    name = argument if isinstance(argument, str) else names[argument]
    if name not in names:
        raise TypeError(f"{fn.__name__}: out_shape={name!r} is not a parameter; expected one of {', '.join(names)}")

    def fake(*args: Any, **kwargs: Any) -> Tensor:
        x = signature.bind(*args, **kwargs).arguments[name]
        return torch.empty_like(x) if dtype is None else x.new_empty(x.shape, dtype=dtype)

    return fake


def device_of_platform() -> str:
    """Return the device type of the kernel; SGLang lists the keys PrivateUse1, XPU and CUDA by hand."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


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


def without(fn: Fn, computed_args: Mapping[str, Fn]) -> Fn:
    """Return the function without some parameters, whose values are computed from the other arguments."""
    whole = inspect.signature(fn, eval_str=True)
    rest = whole.replace(parameters=[each for each in whole.parameters.values() if each.name not in computed_args])

    def complete(*args: Any, **kwargs: Any) -> Any:
        given = rest.bind(*args, **kwargs)
        given.apply_defaults()
        computed = {name: compute(**given.arguments) for name, compute in computed_args.items()}
        return fn(**given.arguments, **computed)

    complete.__name__, complete.__doc__, complete.__module__ = fn.__name__, fn.__doc__, fn.__module__
    complete.__signature__ = rest  # type: ignore[attr-defined]
    return complete


# Ops of the kinds that SGLang has -------------------------------------------------------------------------------------


@register_custom_op(mutates_args=["out"], eager=False)
def silu_and_mul(x: Tensor, out: Tensor) -> None:
    gate, up = x.chunk(2, dim=-1)
    out.copy_(torch.nn.functional.silu(gate) * up)


@silu_and_mul.register_samples
def _() -> Iterator[tuple[Tensor, Tensor]]:
    yield torch.randn(3, 8), torch.zeros(3, 4)
    yield torch.randn(2, 5, 4), torch.zeros(2, 5, 2)


def extern_moe(x: Tensor, weight: Tensor, tune_max_num_tokens: int) -> Tensor:
    """As a library has it that tunes itself by a number of tokens, a power of two."""
    torch._check(x.dim() == 2 and weight.shape == (x.shape[1], x.shape[1]), lambda: "a matrix, and a square one")
    assert tune_max_num_tokens & (tune_max_num_tokens - 1) == 0
    return (x @ weight).bfloat16()


moe = register_custom_op_from_extern(
    extern_moe,
    out_shape="x",
    out_dtype=torch.bfloat16,
    computed_args={"tune_max_num_tokens": lambda x, **others: 1 << (len(x) - 1).bit_length()},
)


@moe.register_samples
def _() -> Iterator[tuple[Tensor, Tensor]]:
    yield torch.randn(3, 4), torch.randn(4, 4)
    yield torch.randn(5, 2), torch.randn(2, 2)


def main() -> None:
    x, out = torch.ones(1, 4), torch.zeros(1, 2)
    silu_and_mul(x, out)
    print("silu_and_mul:", out)
    print("extern_moe:", torch.compile(moe, fullgraph=True, backend="aot_eager")(torch.ones(3, 2), torch.ones(2, 2)))


if __name__ == "__main__":
    main()
