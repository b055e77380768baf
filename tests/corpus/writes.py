"""Writes that are undeclared, lost or too wide, shared memory, and memory that is never written."""

import threading
from typing import Any

import numpy as np
import torch
from corpus.entries import fault
from corpus.parts import (
    FLOATS,
    NUMBERS,
    accumulator,
    contiguous,
    dense,
    float_only,
    floats,
    memory,
    numpy_only,
    one_floating_dtype,
    packed,
    rank,
    require,
    require_dtype,
    rnd,
    unshared,
    writable,
)
from torch import Tensor

from customops import custom_op


@fault(
    kind="a write goes to a contiguous copy",
    note="If `q` is not contiguous, the kernel rotates a copy, and the argument stays unchanged.",
    found_by="test_layouts",
    sample=lambda: (rnd(3, 8), rnd(3, 4, seed=1), rnd(3, 4, seed=2)),
)
def apply_rotary_(name: str, broken: bool):
    def kernel(q: Tensor, cos: Tensor, sin: Tensor) -> None:
        packed = q.contiguous()
        half = packed.shape[-1] // 2
        a, b = packed[..., :half].clone(), packed[..., half:].clone()
        packed[..., :half] = a * cos - b * sin
        packed[..., half:] = b * cos + a * sin
        if not broken and packed is not q:
            q.copy_(packed)

    op = custom_op(name, kernel, mutates_args={"q"})
    return op


@fault(
    kind="an op gives its argument new memory",
    note="The kernel makes the argument contiguous by `x.data = ...`. The base of a view stays unchanged.",
    found_by="test_writes",
    sample=lambda: (torch.randn(3, 4), 2.0),
)
def scale_dense(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args={"x"})
    def op(x: Tensor, by: float) -> None:
        floats(x)
        writable(x)
        if broken and not x.is_contiguous():
            x.data = x.contiguous()
        x.mul_(by)

    @op.register_fake
    def _(x, by):
        floats(x)
        writable(x)

    return op


def behind(x: Tensor) -> int:
    """Return the number of elements of the storage behind a contiguous tensor."""
    return x.untyped_storage().nbytes() // x.element_size() - x.storage_offset() - x.numel()


@fault(
    kind="a write goes past the end of the argument",
    note="The kernel writes the last block of four in full, and scales elements behind a slice.",
    found_by="test_writes",
    sample=lambda: (torch.randn(8), 2.0),
)
def scale_blocks(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args={"x"})
    def op(x: Tensor, by: float) -> None:
        floats(x)
        writable(x)
        if broken and x.is_contiguous():
            whole = x.numel() + min(-x.numel() % 4, behind(x))
            torch.as_strided(x, (whole,), (1,)).mul_(by)
        else:
            x.mul_(by)

    @op.register_fake
    def _(x, by):
        floats(x)
        writable(x)

    return op


@fault(
    kind="memory behind an argument is read",
    note="The kernel takes the maximum of whole blocks of four, and reads elements behind a slice.",
    found_by="test_writes",
    sample=lambda: (torch.randn(8),),
)
def block_max(name: str, broken: bool) -> Any:
    def valid(x):
        floats(x, dims=1)
        require(x.shape[0] > 0, "an element is needed")

    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        valid(x)
        flat = x.contiguous()
        return dense(memory(flat, (len(x) + 3) // 4 * 4).amax() if broken else flat.amax())

    @op.register_fake
    def _(x):
        valid(x)
        return x.new_empty(())

    return op


@fault(
    kind="an undeclared argument is written",
    note="The conversion to float64 makes no copy of a float64 input, which the kernel then overwrites.",
    found_by="test_schema",
    sample=lambda: (torch.randn(4),),
)
def deviation(name: str, broken: bool):
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        one_floating_dtype(x)
        work = x.to(torch.float64, copy=not broken)
        work.sub_(work.mean())
        return work.norm()

    @op.register_fake
    def _(x):
        one_floating_dtype(x)
        return x.new_empty((), dtype=torch.float64)

    return op


@fault(
    kind="an input is written where a conversion makes no copy",
    note="For a float32 input, `x.float()` is `x` itself, and the kernel overwrites it.",
    found_by="test_schema",
    sample=lambda: (rnd(3, 5, dtype=torch.float16),),
)
def log_softmax_half(name: str, broken: bool):
    @float_only
    def kernel(x: Tensor) -> Tensor:
        h = x.to(accumulator(x.dtype), copy=not broken)
        h -= h.amax(-1, keepdim=True)
        return (h - h.exp().sum(-1, keepdim=True).log()).to(x.dtype).clone(memory_format=torch.contiguous_format)

    op = custom_op(name, kernel, mutates_args=())
    op.register_fake(float_only(lambda x: x.new_empty(x.shape)))
    return op


@fault(
    kind="an index argument is normalized in place",
    note="The kernel changes negative indices in the tensor of the caller.",
    found_by="test_schema",
    sample=lambda: (rnd(5, 3), torch.tensor([0, 4, 2])),
)
def take_rows(name: str, broken: bool):
    def kernel(x: Tensor, index: Tensor) -> Tensor:
        require(x.dim() > 0 and index.dim() == 1, "unsupported shapes or dtypes")
        rows = index if broken else index.clone()
        rows[rows < 0] += x.shape[0]
        return x[rows]

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    def _(x, index):
        require(x.dim() > 0 and index.dim() == 1, "unsupported shapes or dtypes")
        return x.new_empty(index.shape[0], *x.shape[1:])

    return op


@fault(
    kind="the kernel changes the shape of an argument",
    note="The kernel turns a vector into a matrix with `unsqueeze_`, and the argument of the caller stays a matrix.",
    found_by="test_schema",
    sample=lambda: (torch.randn(3, 4),),
)
def softmax_rows(name: str, broken: bool) -> Any:
    def valid(x):
        floats(x)
        require(x.dim() in (1, 2), "one or two dimensions are needed")

    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        valid(x)
        shape = x.shape
        if x.dim() == 1:
            x = x.unsqueeze_(0) if broken else x.unsqueeze(0)
        return dense(x.softmax(1).view(shape))

    @op.register_fake
    def _(x):
        valid(x)
        return x.new_empty(x.shape)

    return op


@fault(
    kind="two results share memory",
    note="Both results are slices of one buffer, so that a write to one result changes the other.",
    found_by="test_schema",
    sample=lambda: (rnd(8), 0),
)
def overlapping_halves(name: str, broken: bool):
    @numpy_only
    def kernel(x: Tensor, overlap: int) -> tuple[Tensor, Tensor]:
        require(x.dim() == 1, "unsupported shapes or dtypes")
        buffer = np.ascontiguousarray(np.tanh(x.numpy()))
        middle = x.shape[0] // 2
        require(0 <= overlap <= middle, "overlap is too large")
        first, second = buffer[: middle + overlap], buffer[middle - overlap :]
        if not broken:
            second = second.copy()
        return contiguous(torch.from_numpy(first)), contiguous(torch.from_numpy(second))

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    @numpy_only
    def _(x, overlap):
        require(x.dim() == 1, "unsupported shapes or dtypes")
        middle = x.shape[0] // 2
        require(0 <= overlap <= middle, "overlap is too large")
        return x.new_empty(middle + overlap), x.new_empty(x.shape[0] - middle + overlap)

    return op


@fault(
    kind="two results are one tensor for some inputs",
    note="For a single row, the lowest and the highest entries are one tensor.",
    found_by="test_schema",
    sample=lambda: (torch.randn(3, 4),),
)
def column_bounds(name: str, broken: bool) -> Any:
    def check(x: Tensor) -> None:
        require_dtype(x, NUMBERS[:9])
        if x.dim() == 0 or x.shape[0] == 0:
            raise ValueError("expected one row at least")

    @custom_op(name, mutates_args=(), check="never", bypass=True)
    def op(x: Tensor) -> tuple[Tensor, Tensor]:
        check(x)
        low = packed(x.amin(0))
        if len(x) == 1 and broken:
            return low, low
        return low, packed(x.amax(0))

    @op.register_fake
    def _(x):
        check(x)
        return x.new_empty(x.shape[1:]), x.new_empty(x.shape[1:])

    return op


@fault(
    kind="the result is an argument for some inputs",
    note="A gain of 1 returns the input itself.",
    found_by="inputs",
    sample=lambda: (torch.randn(4), 2.0),
)
def gain_or_itself(name: str, broken: bool):
    @custom_op(name, mutates_args=())
    def op(x: Tensor, gain: float) -> Tensor:
        one_floating_dtype(x)
        return x if broken and gain == 1.0 else dense(x * gain)

    @op.register_fake
    def _(x, gain):
        one_floating_dtype(x)
        return x.new_empty(x.shape)

    return op


@fault(
    kind="the result is an argument for a list of one",
    note="The mean of a list of one tensor is the tensor itself.",
    found_by="inputs",
    sample=lambda: ([torch.randn(3), torch.randn(3)],),
)
def averaged_members(name: str, broken: bool):
    def check(xs: list[Tensor]) -> None:
        if not xs:
            raise ValueError("expected at least one tensor")
        one_floating_dtype(*xs)
        if any(x.shape != xs[0].shape for x in xs):
            raise ValueError("expected tensors of one shape")

    @custom_op(name, mutates_args=())
    def op(xs: list[Tensor]) -> Tensor:
        check(xs)
        if broken and len(xs) == 1:
            return xs[0]
        return torch.stack([dense(x) for x in xs]).mean(0)

    @op.register_fake
    def _(xs):
        check(xs)
        return xs[0].new_empty(xs[0].shape)

    return op


@fault(
    kind="a declared write is left out in a second call",
    note="The kernel skips a table at an address that it filled before. A second call on the address shows the fault.",
    found_by="test_uninitialized_memory",
    sample=lambda: (torch.zeros(4), 0.5),
)
def fill_ramp(name: str, broken: bool):
    filled: set[int] = set()

    def check(table: Tensor) -> None:
        one_floating_dtype(table)
        rank(table, 1, 1)
        unshared(table)

    @custom_op(name, mutates_args={"table"})
    def op(table: Tensor, step: float) -> None:
        check(table)
        if broken and table.data_ptr() in filled:
            return
        filled.add(table.data_ptr())
        table.copy_(torch.arange(len(table), dtype=torch.float64) * step)

    op.register_fake(lambda table, step: check(table))
    return op


@fault(
    kind="a call that raises leaves the op unusable",
    note="A flag marks the workspace as busy. A call that raises leaves it set, and all later calls are refused.",
    found_by="test_schema",
    sample=lambda: (torch.randn(4, 3), torch.tensor([1, 0, 3])),
)
def busy_rows(name: str, broken: bool) -> Any:
    lock = threading.Lock()

    def valid(x, index):
        floats(x, dims=2)
        require(index.dtype == torch.int64 and index.dim() == 1, "a vector of int64 is needed")

    def rows(x, index):
        require(bool(((index >= 0) & (index < len(x))).all()), "an index is out of range")
        return dense(x[index])

    @custom_op(name, mutates_args=())
    def op(x: Tensor, index: Tensor) -> Tensor:
        valid(x, index)
        if not broken:
            with lock:
                return rows(x, index)
        if not lock.acquire(timeout=0.05):
            raise RuntimeError("the workspace is in use")
        result = rows(x, index)
        lock.release()
        return result

    @op.register_fake
    def _(x, index):
        valid(x, index)
        return x.new_empty(index.shape[0], x.shape[1])

    return op


@fault(
    kind="masked elements stay uninitialized",
    note="Where the mask is False, the rows of the result are never written.",
    found_by="test_uninitialized_memory",
    sample=lambda: (rnd(4, 3), torch.ones(4, dtype=torch.bool), 2.0),
)
def expert_forward(name: str, broken: bool):
    @float_only
    def kernel(x: Tensor, active: Tensor, scale: float) -> Tensor:
        require(active.dtype == torch.bool and active.shape == x.shape[:1], "unsupported shapes or dtypes")
        out = torch.empty(x.shape, dtype=x.dtype) if broken else torch.zeros(x.shape, dtype=x.dtype)
        out[active] = torch.tanh(x[active]) * scale
        return out

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    @float_only
    def _(x, active, scale):
        require(active.dtype == torch.bool and active.shape == x.shape[:1], "unsupported shapes or dtypes")
        return x.new_empty(x.shape)

    return op


@fault(
    kind="empty inputs return uninitialized memory",
    note="The kernel writes the state only inside the loop over steps.",
    found_by="test_uninitialized_memory",
    sample=lambda: (torch.randn(4, 3), 0.5),
)
def last_state(name: str, broken: bool) -> Any:
    def check(steps: Tensor) -> None:
        require_dtype(steps, FLOATS)
        if steps.dim() == 0:
            raise ValueError("expected one dimension at least")

    @custom_op(name, mutates_args=())
    def op(steps: Tensor, decay: float = 0.9) -> Tensor:
        check(steps)
        state = torch.empty(steps.shape[1:], dtype=steps.dtype, device=steps.device)
        if not broken:
            state.zero_()
        for at, step in enumerate(steps):
            state.copy_(step if at == 0 else state * decay + step)
        return state

    @op.register_fake
    def _(steps, decay):
        check(steps)
        return steps.new_empty(steps.shape[1:])

    return op
