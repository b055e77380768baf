"""Kernels that read memory as a compiled one does: by pointer, row pitch and size."""

import numpy as np
import torch
from broken_ops.corpus import fault
from broken_ops.needs_more import dense, floating, rank, same_shape, single, unshared
from torch import Tensor

from customops import custom_op

FLAT = "the kernel reads the storage flat and ignores strides"
ZERO = "the kernel ignores a stride of zero or writes through an expanded buffer"
CONJ = "the kernel ignores conjugate or negative bits"
SQUEEZE = "the op squeezes too much: a dimension of size 1 vanishes, or a 0-dim input becomes 1-dim"


def from_pointer(x: Tensor) -> Tensor:
    """As many elements as x has, one after the other from its first."""
    return torch.as_strided(x, (x.numel(),), (1,), x.storage_offset())


@fault(
    kind=FLAT,
    note="The elements are read one after the other; a transposed input shows it.",
    sample=lambda: (torch.randn(3, 4),),
)
def flat_negation(name: str, broken: bool):
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floating(x)
        elements = from_pointer(x if broken else x.contiguous())
        return dense(-elements).view(x.shape)

    @op.register_fake
    def _(x):
        floating(x)
        return x.new_empty(x.shape)

    return op


@fault(
    kind=FLAT,
    note="Rows are taken to follow each other at once; a slice of columns shows it.",
    sample=lambda: (torch.randn(3, 4),),
)
def pitched_row_maxima(name: str, broken: bool):
    def check(x: Tensor) -> None:
        floating(x)
        rank(x, 2, 2)
        if x.shape[1] == 0:
            raise ValueError("there is no maximum of an empty row")

    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        check(x)
        pitch = x.shape[1] if broken else x.stride(0)
        return dense(torch.as_strided(x, x.shape, (pitch, x.stride(1))).amax(1))

    @op.register_fake
    def _(x):
        check(x)
        return x.new_empty(x.shape[0])

    return op


@fault(
    kind=FLAT,
    note="NumPy gets the memory in the order in which it lies; a transposed input shows it.",
    sample=lambda: (torch.randn(2, 3), torch.randn(2, 3)),
)
def flat_dot(name: str, broken: bool):
    @custom_op(name, mutates_args=())
    def op(x: Tensor, y: Tensor) -> Tensor:
        single(x, y)
        same_shape(x, y)
        a, b = (t.detach().numpy().ravel(order="K" if broken else "C") for t in (x, y))
        with np.errstate(all="ignore"):
            return torch.tensor(float(np.dot(a, b)), dtype=x.dtype)

    @op.register_fake
    def _(x, y):
        single(x, y)
        same_shape(x, y)
        return x.new_empty(())

    return op


@fault(
    kind=ZERO,
    note="A pitch of zero is taken for a missing one; rows that are expanded show it.",
    sample=lambda: (torch.randn(3, 4),),
)
def row_sums_by_pitch(name: str, broken: bool):
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floating(x)
        rank(x, 2, 2)
        pitch = x.stride(0)
        if broken:
            pitch = pitch or x.shape[1]
        return dense(torch.as_strided(x, x.shape, (pitch, x.stride(1))).sum(1))

    @op.register_fake
    def _(x):
        floating(x)
        rank(x, 2, 2)
        return x.new_empty(x.shape[0])

    return op


@fault(
    kind=ZERO,
    note="Rows are added one by one to a buffer; one that is expanded gets all of them in the same place.",
    sample=lambda: (torch.zeros(3, 2), torch.randn(3, 2)),
)
def add_rows(name: str, broken: bool):
    def check(total: Tensor, rows: Tensor) -> None:
        floating(total, rows)
        same_shape(total, rows)
        rank(rows, 1)
        if not broken:
            unshared(total)

    @torch.library.custom_op(name, mutates_args={"total"})
    def op(total: Tensor, rows: Tensor) -> None:
        check(total, rows)
        for place, row in zip(total.unbind(), rows.clone().unbind(), strict=True):
            place.add_(row)

    @op.register_fake
    def _(total, rows):
        check(total, rows)

    return op


@fault(
    kind=CONJ,
    note="backward reads pairs of numbers out of a gradient that may be lazily conjugated, as that of y.conj() is.",
    sample=lambda: (torch.randn(3, dtype=torch.complex64, requires_grad=True), 2.0),
)
def complex_scale(name: str, broken: bool):
    def check(x: Tensor) -> None:
        if x.dtype not in (torch.complex64, torch.complex128):
            raise ValueError(f"expected complex numbers, got {x.dtype}")

    @custom_op(name, mutates_args=())
    def op(x: Tensor, by: float) -> Tensor:
        check(x)
        return dense(x * by)

    @op.register_fake
    def _(x, by):
        check(x)
        return x.new_empty(x.shape)

    def setup_context(ctx, inputs, output):
        ctx.by = inputs[1]

    def backward(ctx, grad):
        pairs = torch.view_as_real(grad if broken else grad.resolve_conj())
        return torch.view_as_complex((pairs * ctx.by).contiguous()), None

    op.register_autograd(backward, setup_context=setup_context)
    return op


@fault(
    kind=CONJ,
    note="With conjugate=True the memory is that of a lazy conjugate, which is not conjugated yet.",
    sample=lambda: (torch.randn(3, dtype=torch.complex64), torch.randn(3, dtype=torch.complex64)),
)
def product_with_conjugate(name: str, broken: bool):
    def check(x: Tensor, y: Tensor) -> None:
        if x.dtype not in (torch.complex64, torch.complex128) or x.dtype != y.dtype:
            raise ValueError(f"expected complex numbers, got {x.dtype} and {y.dtype}")
        same_shape(x, y)

    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor, y: Tensor, conjugate: bool = False) -> Tensor:
        check(x, y)
        if conjugate:
            y = y.conj() if broken else y.conj().resolve_conj()
        memory = torch.empty(0, dtype=y.dtype).set_(y.untyped_storage(), y.storage_offset(), y.shape, y.stride())
        return dense(x * memory)

    @op.register_fake
    def _(x, y, conjugate=False):
        check(x, y)
        return x.new_empty(x.shape)

    return op


@fault(
    kind=SQUEEZE,
    note="All dimensions of size 1 go, not the last alone; one row, or one column of rows, shows it.",
    sample=lambda: (torch.randn(3, 4),),
)
def squeezed_row_means(name: str, broken: bool):
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floating(x)
        rank(x, 1)
        means = x.mean(-1, keepdim=True)
        return dense(means.squeeze() if broken else means.squeeze(-1))

    @op.register_fake
    def _(x):
        floating(x)
        rank(x, 1)
        return x.new_empty(x.shape[:-1])

    return op


@fault(
    kind=SQUEEZE,
    note="NumPy makes a contiguous array of at least one dimension; a 0-dim input shows it.",
    sample=lambda: (torch.rand(3),),
)
def numpy_root(name: str, broken: bool):
    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        single(x)
        values = x.detach().numpy()
        values = np.ascontiguousarray(values) if broken else values
        result = np.empty(values.shape, values.dtype)
        with np.errstate(all="ignore"):
            np.sqrt(values, out=result)
        return dense(torch.from_numpy(result))

    @op.register_fake
    def _(x):
        single(x)
        return x.new_empty(x.shape)

    return op
