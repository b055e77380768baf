"""Operators as libraries and tutorials define them, the second half."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, List, Optional, Tuple

import numpy as np
import torch
from torch import Tensor

from helpers.drop_in.program import Args, Program, program, rand


@program
def select_row(library: Any, ns: str) -> Program:
    """A view, which only a schema written by hand can say."""
    op = library.custom_op(
        f"{ns}::select_row", lambda x, row: x[row], mutates_args=(), schema="(Tensor(a) x, int row) -> Tensor(a)"
    )
    op.register_fake(lambda x, row: x[row])

    def setup_context(ctx: Any, inputs: Args, output: Tensor) -> None:
        x, ctx.row = inputs
        ctx.sizes = x.shape
        ctx._is_pure_view = True

    def backward(ctx: Any, grad: Tensor) -> Args:
        full = grad.new_zeros(ctx.sizes)
        full[ctx.row] = grad
        return full, None

    op.register_autograd(backward, setup_context=setup_context)

    def write_through() -> Tensor:
        x = rand(3, 4)
        op(x, 1).zero_()
        return x

    return Program(op, lambda: (rand(3, 4, grad=True), 1), more={"write through": write_through}, compiles=False)


@program
def clamp_(library: Any, ns: str) -> Program:
    """Tag.inplace: what is written to is what comes back."""

    @library.custom_op(f"{ns}::clamp_", mutates_args={"x"}, tags=torch.Tag.inplace)
    def clamp_(x: Tensor, low: float, high: float = 1.0) -> Tensor:
        return x.clamp_(low, high)

    def run(x: Tensor, low: float) -> Tensor:
        y = x * 2
        return clamp_(y, low) + y

    def same() -> bool:
        x = rand(3)
        return clamp_(x, 0.5) is x

    return Program(
        clamp_,
        lambda: (rand(3, 4), 0.9),
        run=run,
        more={"same": same, "a leaf": lambda: clamp_(rand(3, grad=True), 0.5).sum().backward()},
    )


@program
def mul_out(library: Any, ns: str) -> Program:
    """Tag.out: a functional op and its out variant, as overloads."""

    @library.custom_op(f"{ns}::mul.out", mutates_args={"out"}, tags=(torch.Tag.out,))
    def mul_out(x: Tensor, y: Tensor, *, out: Tensor) -> Tensor:
        return torch.mul(x, y, out=out)

    def same() -> bool:
        out = rand(3)
        return mul_out(rand(3), rand(3), out=out) is out

    def run(x: Tensor, y: Tensor, *, out: Tensor) -> Tensor:
        return mul_out(x, y, out=out) + 1

    return Program(
        mul_out,
        lambda: (rand(3, 4), rand(3, 4)),
        lambda: {"out": torch.zeros(3, 4)},
        run=run,
        more={
            "same": same,
            "a gradient": lambda: mul_out(rand(3, grad=True), rand(3), out=rand(3)),
        },
    )


@program
def foreach_scale(library: Any, ns: str) -> Program:
    """A list in, a list out, differentiable."""

    @library.custom_op(f"{ns}::foreach_scale", mutates_args=())
    def foreach_scale(xs: List[Tensor], scalars: Sequence[float]) -> List[Tensor]:
        return [x * s for x, s in zip(xs, scalars, strict=True)]

    foreach_scale.register_fake(lambda xs, scalars: [torch.empty_like(x) for x in xs])

    def setup_context(ctx: Any, inputs: Args, output: Any) -> None:
        ctx.scalars = inputs[1]

    def backward(ctx: Any, grads: list[Tensor]) -> Args:
        return [grad * s for grad, s in zip(grads, ctx.scalars, strict=True)], None

    foreach_scale.register_autograd(backward, setup_context=setup_context)
    return Program(
        foreach_scale,
        lambda: ([rand(3, grad=True), rand(4, grad=True), rand(2, 2, grad=True)], [1.0, 2.0, 3.0]),
        more={
            "no tensors": lambda: foreach_scale([], []),
            "None in a list": lambda: foreach_scale([rand(3), None], [1.0, 2.0]),
        },
    )


@program
def gelu_tanh(library: Any, ns: str) -> Program:
    """Keyword-only numbers, which setup_context is given apart."""

    @library.custom_op(f"{ns}::gelu_tanh", mutates_args=())
    def gelu_tanh(x: Tensor, *, alpha: float = 1.5, approximate: str = "tanh") -> Tensor:
        return x * torch.sigmoid(alpha * x)

    @gelu_tanh.register_fake
    def _(x: Tensor, *, alpha: float = 1.5, approximate: str = "tanh") -> Tensor:
        return torch.empty_like(x)

    def setup_context(ctx: Any, inputs: Args, keyword_only_inputs: dict[str, Any], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.alpha = keyword_only_inputs["alpha"]
        assert keyword_only_inputs["approximate"] == "tanh"  # a default, filled in

    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(ctx.alpha * x)
        return grad * gate * (1 + x * ctx.alpha * (1 - gate))

    gelu_tanh.register_autograd(backward, setup_context=setup_context)
    return Program(
        gelu_tanh,
        lambda: (rand(3, 4, grad=True),),
        lambda: {"alpha": 0.7},
        more={"by position": lambda: gelu_tanh(rand(3), 0.7)},
    )


@program
def convert(library: Any, ns: str) -> Program:
    """dtypes and devices as arguments and as defaults; any number as a Scalar."""

    @library.custom_op(f"{ns}::convert", mutates_args=())
    def convert(
        x: Tensor,
        dtype: torch.dtype,
        by: torch.types.Number,
        device: Optional[torch.device] = None,
        other: torch.dtype = torch.bfloat16,
    ) -> Tensor:
        assert isinstance(dtype, torch.dtype)
        assert other is torch.bfloat16
        assert device is None or isinstance(device, torch.device)
        return x.to(device, dtype, copy=True) * by

    @convert.register_fake
    def _(x, dtype, by, device=None, other=torch.bfloat16):  # type: ignore[no-untyped-def]
        return torch.empty_like(x, dtype=torch.result_type(x.to(dtype), by), device=device or x.device)

    return Program(
        convert,
        lambda: (rand(3, 4), torch.float16, 2),
        more={
            "device": lambda: convert(rand(3, 4), torch.float16, 2, torch.device("cpu")),
            "defaults": lambda: convert(rand(3), torch.float64, 2.5),
            "bool": lambda: convert(rand(3), torch.float64, True),
            "str for a device": lambda: convert(rand(3), torch.float64, 1, "cpu"),
            "str for a dtype": lambda: convert(rand(3), "float64", 1),
            "Python type for a dtype": lambda: convert(rand(3), float, 1),
        },
    )


@program
def scale(library: Any, ns: str) -> Program:
    """Overloads of one name."""

    @library.custom_op(f"{ns}::scale", mutates_args=())
    def scale(x: Tensor) -> Tensor:
        return x * 2

    @library.custom_op(f"{ns}::scale.Tensor", mutates_args=())
    def scale_tensor(x: Tensor, by: Tensor) -> Tensor:
        return x * by

    @library.custom_op(f"{ns}::scale.int", mutates_args=())
    def scale_int(x: Tensor, by: int) -> Tensor:
        return x * (by + 1)

    for op in (scale, scale_tensor, scale_int):
        op.register_fake(lambda x, *by: torch.empty_like(x))
    packet = getattr(torch.ops, ns).scale

    def run(x: Tensor, by: Tensor) -> Tensor:
        return packet(x) + packet(x, by) + packet(x, 3)

    return Program(
        scale_tensor,
        lambda: (rand(3, 4), rand(4)),
        run=run,
        more={"overloads": lambda: sorted(packet.overloads()), "no overload fits": lambda: packet(rand(3), "text")},
    )


@program
def fill_all(library: Any, ns: str) -> Program:
    """Everything may be written to, also what is in lists; nothing comes back."""

    @library.custom_op(f"{ns}::fill_all", mutates_args="unknown")
    def fill_all(x: Tensor, others: Sequence[Optional[Tensor]], value: float, last: Optional[Tensor] = None) -> None:
        x.fill_(value)
        for tensor in (*others, last):
            if tensor is not None:
                tensor.fill_(value)

    @fill_all.register_fake
    def _(x: Tensor, others: Sequence[Optional[Tensor]], value: float, last: Optional[Tensor] = None) -> None: ...

    def versions() -> list[bool]:
        tensors = [rand(3) for _ in range(3)]
        fill_all(tensors[0], [None, tensors[1]], 3.0, last=tensors[2])
        return [tensor._version > 0 for tensor in tensors]

    def compiled_with_none() -> None:
        # torch cannot functionalize a write to a list in which there is a None: neither can we.
        torch.compile(fill_all, backend="aot_eager", fullgraph=True)(rand(3), [rand(4), None], 0.5)

    return Program(
        fill_all,
        lambda: (rand(3), [rand(4), rand(2, 2)], 0.5, rand(3, 4)),
        more={"versions": versions, "compiled with a None": compiled_with_none},
    )


@program
def numpy_cube(library: Any, ns: str) -> Program:
    """From torch's tutorial: the backward is made of custom ops, and there is a vmap rule."""

    @library.custom_op(f"{ns}::numpy_mul", mutates_args=())
    def numpy_mul(x: Tensor, y: Tensor) -> Tensor:
        return torch.from_numpy(np.asarray(x.numpy() * y.numpy()))

    @library.custom_op(f"{ns}::numpy_cube", mutates_args=())
    def numpy_cube(x: Tensor) -> Tuple[Tensor, Tensor]:
        array = x.numpy()
        return torch.from_numpy(np.asarray(array**3)), torch.from_numpy(np.asarray(3 * array**2))

    numpy_mul.register_fake(lambda x, y: x.new_empty(torch.broadcast_shapes(x.shape, y.shape)))
    numpy_cube.register_fake(lambda x: (torch.empty_like(x), torch.empty_like(x)))
    numpy_mul.register_autograd(
        lambda ctx, grad: (grad * ctx.saved_tensors[1], grad * ctx.saved_tensors[0]),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    numpy_cube.register_autograd(
        lambda ctx, grad, grad_dx: numpy_mul(grad, ctx.saved_tensors[1]) + 6 * numpy_mul(grad_dx, ctx.saved_tensors[0]),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0], output[1]),
    )

    @numpy_cube.register_vmap
    def _(info: Any, in_dims: Any, x: Tensor) -> Any:
        return numpy_cube(x), (in_dims[0], in_dims[0])

    return Program(
        numpy_cube,
        lambda: (rand(3, 4, grad=True),),
        more={
            "vmap": lambda: torch.vmap(numpy_cube)(rand(3, 4)),
            "vmap along 1": lambda: torch.vmap(numpy_cube, in_dims=1, out_dims=(1, 0))(rand(3, 4)),
            "vmap in vmap": lambda: torch.vmap(torch.vmap(numpy_cube))(rand(2, 3, 4)),
            "vmap without a rule": lambda: torch.vmap(lambda x: numpy_cube(x)[0])(rand(2, 3)),
        },
    )


@program
def fused_linear(library: Any, ns: str) -> Program:
    """Autocast, on an op with an optional bias and a gradient."""

    @library.custom_op(f"{ns}::fused_linear", mutates_args=())
    def fused_linear(x: Tensor, weight: Tensor, bias: Optional[Tensor] = None) -> Tensor:
        return torch.nn.functional.linear(x, weight, bias)

    @fused_linear.register_fake
    def _(x: Tensor, weight: Tensor, bias: Optional[Tensor] = None) -> Tensor:
        return x.new_empty(*x.shape[:-1], weight.shape[0])

    def setup_context(ctx: Any, inputs: Args, output: Tensor) -> None:
        x, weight, _ = inputs
        ctx.save_for_backward(x, weight)

    def backward(ctx: Any, grad: Tensor) -> Args:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.mT @ x, grad.sum(0) if ctx.needs_input_grad[2] else None

    fused_linear.register_autograd(backward, setup_context=setup_context)
    library.register_autocast(fused_linear, "cpu", torch.bfloat16)

    def run(x: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return fused_linear(x, weight, bias)

    return Program(
        fused_linear,
        lambda: (rand(3, 4, grad=True), rand(5, 4, grad=True), rand(5, grad=True)),
        run=run,
        more={"no autocast": lambda: fused_linear(rand(3, 4), rand(5, 4), rand(5)).dtype},
    )


@program
def int8_linear(library: Any, ns: str) -> Program:
    """bitsandbytes': schemas first, then a kernel for "default" and one for a device; an out variant as an overload."""
    define, register_fake, register_kernel = library.define, library.register_fake, library.register_kernel
    define(f"{ns}::int8_linear", "(Tensor A, Tensor B, float scale=1.0) -> (Tensor, Tensor?)")
    define(f"{ns}::int8_linear.out", "(Tensor A, Tensor B, Tensor! out) -> ()")

    @register_fake(f"{ns}::int8_linear")
    def _(A: Tensor, B: Tensor, scale: float = 1.0) -> tuple[Tensor, Optional[Tensor]]:
        return torch.empty((*A.shape[:-1], B.shape[0]), device=A.device), None

    @register_fake(f"{ns}::int8_linear.out")
    def _(A: Tensor, B: Tensor, out: Tensor) -> None:
        torch._check(out.shape == (*A.shape[:-1], B.shape[0]), lambda: f"not {out.shape}")

    @register_kernel(f"{ns}::int8_linear", "default")
    def _(A: Tensor, B: Tensor, scale: float = 1.0) -> tuple[Tensor, Optional[Tensor]]:
        return A.float() @ B.float().T * scale, None

    @register_kernel(f"{ns}::int8_linear.out", "default")
    def _(A: Tensor, B: Tensor, out: Tensor) -> None:
        out.copy_(A.float() @ B.float().T)

    @register_kernel(f"{ns}::int8_linear", "cuda")
    def _(A: Tensor, B: Tensor, scale: float = 1.0) -> tuple[Tensor, Optional[Tensor]]:
        raise NotImplementedError

    packet = getattr(torch.ops, ns).int8_linear

    def run(A: Tensor, B: Tensor) -> Tensor:
        out = torch.empty(A.shape[0], B.shape[0])
        packet.out(A, B, out)
        return packet.default(A, B, scale=0.5)[0] + out

    return Program(
        packet.default,
        lambda: (torch.arange(6, dtype=torch.int8).view(2, 3), torch.arange(12, dtype=torch.int8).view(4, 3)),
        run=run,
    )
