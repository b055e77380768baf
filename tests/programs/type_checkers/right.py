"""Right code: type checkers have nothing to say about it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from defined import (
    Config,
    Moments,
    Parts,
    add_,
    configured,
    counted,
    make,
    maybe,
    moments,
    named,
    out,
    pair,
    parts,
    several,
    size,
    text,
    three,
    write,
    zeros,
)
from torch import Tensor
from typing_extensions import assert_type

import customops
from customops import CustomOpDef, Named, Registry, Sample, custom_op, triton_op
from customops.languages import from_jax, from_numpy

one = torch.ones(2)

# What an op takes and returns is what its function does: `Mut` and `SameAs` are around a Tensor.
assert_type(three(one, y=one, by=3.0), Tensor)
assert_type(named(one, 2, times=3), Tensor)
assert_type(out(one, out=one), None)
assert_type(add_(one, one), Tensor)
assert_type(write(one, value=2.0), None)
assert_type(maybe(one, True), Tensor | None)
assert_type(moments(one).mean, Tensor)
assert_type(parts(one)["a"], Tensor)
assert_type(configured(one, Config(one)).eps, float)
assert_type(make(n=3), Tensor)


# Options, or none, and the direct form.
def twice(x: Tensor) -> Tensor:
    return x * 2


assert_type(custom_op("typing::twice", twice)(one), Tensor)
assert_type(custom_op("typing::twice", twice, mutates_args=())(one), Tensor)
assert_type(Registry().custom_op("typing::twice", twice)(one), Tensor)
as_op: CustomOpDef[[Tensor], Tensor] = custom_op("typing::as_op", twice)
assert_type(triton_op("typing::twice", twice, mutates_args=())(one), Tensor)
assert_type(triton_op("typing::twice", registry=Registry())(twice)(one), Tensor)
assert_type(from_numpy(twice)(one), Tensor)
assert_type(from_jax(copy=True)(twice)(one), Tensor)
custom_op("typing::on_cuda", mutates_args="unknown", device_types="cuda")(twice)
custom_op("typing::by_schema", schema="(Tensor x) -> Tensor", nondiff_args="x")(twice)


class Model:
    twice = as_op


assert_type(Model().twice(one), Tensor)


# Kernels and fakes: other names, defaults left out, keyword-only parameters without the default that the op has.
@three.register_fake
def three_fake(a: Tensor, b: Tensor, factor: float) -> Tensor:
    return torch.empty_like(a)


@three.register_fake()
def three_short(x: Tensor, y: Tensor) -> Tensor:
    return torch.empty_like(x)


@three.register_kernel(["cuda", "xpu"])
def three_kernel(*args: Any, **kwargs: Any) -> Tensor:
    return one


@three.register_kernel("cuda")
@functools.lru_cache
def three_cached(x: Tensor, y: Tensor, by: float) -> Tensor:
    return x


@named.register_fake
def named_fake(y: Tensor, m: int, *, times: int) -> Tensor:
    return torch.empty_like(y)


@three.register_kernel("cuda", name="v2", when=lambda x: x.dim() == 2 or "takes 2 dimensions", priority=1, key=None)
def three_v2(x: Tensor, y: Tensor, by: float) -> Tensor:
    return x


with three.prefer("v2", "default"), customops.prefer({"typing::*": ["v2"], "typing::three": "v2"}):
    pass


@named.register_kernel("cuda")
def named_short(x: Tensor) -> Tensor:
    return x


@out.register_fake
def out_fake(x: Tensor, *, out: Tensor, eps: float) -> None:
    return None


@out.register_kernel("cuda")
def out_short(y: Tensor, *, out: Tensor) -> None:
    out.copy_(y)


@make.register_fake
def make_fake(*, n: int, device: torch.device) -> Tensor:
    return torch.empty(n, device=device)


@make.register_kernel("cuda")
def make_short(*, n: int) -> Tensor:
    return torch.empty(n)


@zeros.register_fake
def zeros_short() -> Tensor:
    return torch.empty(3)


@zeros.register_kernel(None)
def zeros_kernel(count: int) -> Tensor:
    return torch.empty(count)


# They are what they were.
assert_type(three_fake(a=one, b=one, factor=1.0), Tensor)
three_cached.cache_clear()
assert_type(named_fake(one, m=1, times=1), Tensor)


# A result may be a list for a tuple, a subclass, a size that is not known yet, one side of a union.
@pair.register_fake
def pair_fake(x: Tensor, y: Tensor) -> list[Tensor]:
    return [x, y]


@several.register_fake
def several_fake(x: Tensor) -> tuple[Tensor, ...]:
    return (x,)


@several.register_kernel("cuda")
def several_kernel(x: Tensor) -> list[Tensor]:
    return [x]


@size.register_fake
def size_fake(x: Tensor) -> torch.SymInt:
    found: torch.SymInt = customops.get_ctx().new_dynamic_size()
    return found


@add_.register_fake
def add_fake(x: Tensor, y: Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(x)


@maybe.register_fake
def maybe_fake(x: Tensor, wanted: bool) -> Tensor:
    return x


@maybe.register_kernel("cuda")
def maybe_none(x: Tensor, wanted: bool) -> None:
    return None


@moments.register_fake
def moments_fake(x: Tensor) -> Moments:
    return Moments(x, x)


@parts.register_fake
def parts_fake(x: Tensor) -> Parts:
    return {"a": x, "b": x}


@configured.register_kernel("cuda")
def configured_kernel(x: Tensor, given: Config) -> Config:
    return given


# Callables that are no functions, and lambdas.
class Scaled:
    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, x: Tensor, y: Tensor, by: float) -> Tensor:
        return x * self.by


three.register_kernel("cuda", Scaled(2.0))
three.register_kernel("cuda", three)
three.register_kernel("cuda", torch.compile(three_fake))
three.register_fake(functools.partial(three_fake, factor=2.0))
add_.register_kernel("cuda", torch.add)
add_.register_kernel("cuda", torch.ops.aten.add_.Tensor)
three.register_fake(lambda x, y, by: torch.empty_like(x))
three.register_fake(lambda *args: args[0].new_empty(2))
named.register_fake(lambda x, n, times: x.new_empty(2))
write.register_fake(lambda x, value: None)
pair.register_fake(lambda x, y: (x.new_empty(2), torch.empty_like(y)))
several.register_fake()(lambda x: [torch.empty_like(x)])
size.register_fake(lambda x: x.numel())
maybe.register_fake(lambda x, wanted: x.new_empty(2) if wanted else None)
text.register_fake(lambda x: str(x.dtype))
text.register_kernel("cuda")(lambda x: str(x.dtype))
configured.register_fake(lambda x, config: Config(torch.empty_like(x), config.eps))
make.register_fake(lambda n, device: torch.empty(n))
zeros.register_fake(lambda: torch.empty(3))


# Gradients.
@three.register_autograd
def three_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    return grad, grad, None


def three_setup(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def named_setup(ctx: Any, inputs: Any, keyword_only_inputs: dict[str, Any], output: Tensor) -> None: ...


def pair_setup(output: tuple[Tensor, Tensor], **others: Any) -> None: ...


@three.register_autograd(setup_context=three_setup, once_differentiable=True)
def by_names(context: Any, *grads: Tensor) -> dict[str, Tensor]:
    return {"x": grads[0]}


assert_type(by_names(None, one), dict[str, Tensor])
three.register_autograd(lambda ctx, grad: (grad, None, None), setup_context=three_setup)
three.register_autograd(lambda ctx, grad: grad, setup_context=lambda ctx, inputs, output: None)
named.register_autograd(lambda ctx, *grads: grads, setup_context=named_setup)
three.register_autograd(lambda ctx, grad: {"x": grad}, nondiff_args="y")
named.register_autograd(lambda ctx, grad: {}, setup_context=lambda ctx, inputs, keyword_only_inputs, output: None)
pair.register_autograd(lambda ctx, first, second: (first, second), setup_context=pair_setup)
configured.register_autograd(lambda ctx, grads: (grads.scale, grads))


@three.register_jvp(setup_context=three_setup)
def three_jvp(ctx: Any, x: Tensor, y: Tensor, by: None) -> Tensor:
    return x


three.register_jvp(lambda ctx, *tangents: tangents[0])


@three.register_reference(gives=("gradients", "inductor", "export"), recompute=False)
def three_plain(a: Tensor, b: Tensor, c: float) -> Tensor:
    return a * b * c


three.register_reference(three_plain)
counted.register_reference(lambda x, state: (x * (state + 1), state + 1), gives="gradients", grads_of="state")
three.register_flops(lambda x, y, by: 2 * x.numel())


# vmap, samples, modes.
@three.register_vmap
def three_vmap(info: Any, dims: tuple[int | None, ...], x: Tensor, y: Tensor, by: float) -> tuple[Tensor, int | None]:
    return three(x, y, by), dims[0]


three.register_vmap("broadcast_all")
three.register_vmap()(lambda info, in_dims, *args: (three(*args), 0))
pair.register_vmap(lambda info, in_dims, x, y: (pair(x, y), in_dims))


@three.register_samples
def three_samples() -> Iterator[tuple[Any, ...]]:
    yield one, one
    yield (one, one), {"by": 3.0}
    yield Sample((one, one), {})


three.register_samples(lambda: [(one, one)])


@three.register_torch_dispatch(Tensor)
def three_mode(mode: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


# An op without a function: nothing is known of it.
adopted = customops.adopt("aten::sin")
adopted.register_fake(lambda x: torch.empty_like(x))
adopted.register_kernel("cuda")(lambda *args: args)
adopted.register_kernel("cuda", twice)(one).sin()
assert_type(customops.register_fake("aten::sin", twice)(one), Tensor)
assert_type(customops.register_kernel("aten::sin", "cuda")(twice)(one), Tensor)
customops.register_autograd("aten::sin", lambda ctx, grad: grad, setup_context=three_setup)
customops.register_vmap("aten::sin", "sequential")


# What a name stands for.
layer = torch.nn.Linear(1, 1)
Named("a layer", layer)
assert_type(Named[torch.nn.Linear]("a layer").get(), torch.nn.Linear)
