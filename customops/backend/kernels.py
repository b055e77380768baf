"""User kernels of the device: installed and removed, with a check of their results in each call."""

from __future__ import annotations

import collections
import contextlib
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from customops._dispatch.results import fits_type, tensors_in
from customops._rules.autocast import casting
from customops._schema.model import Return
from customops._schema.parse import from_dispatcher
from customops.backend import _compat, fallbacks
from customops.backend.errors import BackendError, KernelResultError, KernelTypeError, UnknownOpError
from customops.backend.fallbacks import Fallback, FallbackPlan
from customops.errors import UnsupportedError, user_source, where

# Attention with a kernel of the device's own --------------------------------------------------------------------------
# `torch.nn.functional.scaled_dot_product_attention` asks a C++ function of the device which kernel to use, and takes
# the slow one (math) where there is no such function. Python cannot give it one. So with the first kernel for the fused
# op the choice is made here, above autograd, where torch has derivatives for the fused op.

FUSED = "aten::_scaled_dot_product_fused_attention_overrideable"
MATH = "aten::_scaled_dot_product_attention_math"
CHOICE = "scaled_dot_product_attention"


def after_kernel(op: Any, dtypes: Iterable[torch.dtype] | None) -> None:
    """Have attention call the fused op, once that has a kernel, and for the dtypes that it takes."""
    if _compat.full_name(op) != FUSED:
        return
    _taken.dtypes = frozenset(dtypes) if dtypes is not None else None
    if not _installed:
        library = _compat.Library("aten", "IMPL")
        _compat.impl(library, CHOICE, _compat.outside_dynamo(attention), "AutogradPrivateUse1")
        _installed.append(library)


class _Taken:
    """What the kernel of the fused op takes: None for every dtype."""

    dtypes: frozenset[torch.dtype] | None = None


_taken = _Taken()
_installed: list[Any] = []


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    fused: Any = _compat.find_op(FUSED)
    is_taken = _taken.dtypes is None or query.dtype in _taken.dtypes
    if not (is_taken and _compat.has_kernel(FUSED, "PrivateUse1")) or enable_gqa or query.dim() != 4:
        slow: Any = _compat.find_op(MATH)
        result = slow(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        return result[0]  # type: ignore[no-any-return]
    bias = attn_mask
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        bias = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), -math.inf)
    result = fused(query, key, value, bias, dropout_p, is_causal, scale=scale)
    return result[0]  # type: ignore[no-any-return]


def no_fallback(*_: Any, **__: Any) -> Any:
    """What runs where a kernel of the fused op, or of its backward, returns NotImplemented."""
    raise UnsupportedError(
        "the CPU has no such op to fall back to",
        op=FUSED,
        fix="say before what the kernel takes, backend.kernel(op, dtypes=...), or raise in it",
    )


# ----------------------------------------------------------------------------------------------------------------------
# Autocast for the device: which ops run in the lower dtype, which in float32, and a kernel that casts for them

#: The ops that autocast runs in its dtype: products, which the lower precision is for.
LOWER_PRECISION = (
    "mm bmm addmm addbmm baddbmm addmv addr mv matmul linear bilinear einsum chain_matmul "
    "conv1d conv2d conv3d conv_transpose1d conv_transpose2d.input conv_transpose3d.input "
    "scaled_dot_product_attention lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell"
).split()

#: The ops that it runs in float32: sums of many terms, and functions that amplify errors.
FLOAT32 = (
    "softmax.int log_softmax.int layer_norm native_layer_norm group_norm "
    "nll_loss nll_loss_nd cross_entropy_loss mse_loss l1_loss smooth_l1_loss huber_loss kl_div "
    "binary_cross_entropy_with_logits cosine_similarity cosine_embedding_loss poisson_nll_loss "
    "exp expm1 log log2 log10 log1p pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar reciprocal rsqrt "
    "sum sum.dim_IntList prod prod.dim_int cumsum cumprod norm.Scalar norm.ScalarOpt_dim "
    "dist cdist acos asin cosh sinh tan"
).split()


def casting_kernel(op: Any, name: str, dtype: torch.dtype | None) -> Callable[..., Any]:
    """A kernel for `op` at the device's autocast key; `dtype` None is that of the autocast context."""
    schema = from_dispatcher(_compat.schema_of(op))
    return casting(op, schema, name, "AutocastPrivateUse1", lambda: dtype or torch.get_autocast_dtype(name))


# Ops that torch would take apart for the device although the CPU has a kernel for the whole ---------------------------
# ``add`` of a device without a kernel for it is ``empty_strided``, then ``add.out``: two calls of Python instead of
# one; ``native_layer_norm`` is a dozen, and rounds differently. So the fallback is also put where torch has such a
# composite. Once a user writes a kernel for any overload of a name, torch's composites of that name are what calls it,
# and the shortcuts go: a kernel for ``add.out`` serves ``add`` and ``add_``. That goes for kernels from `torch.library`
# as well.


class Shortcuts:
    """The ops by family: all overloads of a name, in place or not."""

    def __init__(self, fallback: Fallback, user_kernels: collections.Counter[str]) -> None:
        self.fallback = fallback
        self._kernels = user_kernels
        self.families: dict[str, list[Any]] = collections.defaultdict(list)
        for name in _compat.composites_of_the_cpu():
            op = _compat.find_op(name)
            if op is not None:
                self.families[_family(name)].append(op)
        self._libraries: dict[str, Any] = {}

    def install(self, undo: contextlib.ExitStack) -> None:
        """Install all of them, until `undo` is closed."""
        undo.callback(self._remove_all)
        for family, ops in self.families.items():
            if any(_compat.has_kernel(_compat.full_name(op), "PrivateUse1") for op in ops):
                self._kernels[family] += 1  # somebody's, from before there was a device
            else:
                self._install(family)
        _compat.watch_kernels(undo, self._kernel_of_others)

    def _remove_all(self) -> None:
        while self._libraries:
            _compat.destroy_library(self._libraries.popitem()[1])

    def _kernel_of_others(self, name: str) -> None:
        """Somebody registered a kernel of the device by `torch.library`. It counts for good: its end goes unseen."""
        if name.startswith("aten::"):
            self.kernel_added(name)

    def kernel_added(self, name: str) -> None:
        family = _family(name)
        self._kernels[family] += 1
        library = self._libraries.pop(family, None)
        if library is not None:
            _compat.destroy_library(library)

    def kernel_removed(self, name: str) -> None:
        family = _family(name)
        self._kernels[family] -= 1
        if not self._kernels[family] and family in self.families:
            self._install(family)

    def _install(self, family: str) -> None:
        library = self._libraries[family] = _compat.Library("aten", "IMPL")
        for op in self.families[family]:
            local = _compat.full_name(op).partition("::")[2]
            _compat.impl(library, local, boxed(self.fallback, op), "PrivateUse1")


def boxed(fallback: Fallback, op: Any) -> Any:
    """The fallback as the kernel of one op."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return fallback(op, args, kwargs)

    return _compat.outside_dynamo(kernel)


def _family(name: str) -> str:
    return name.partition(".")[0].removesuffix("_")


# User kernels of the device: installed and removed, with a check of their results in each call ------------------------

Fn = Callable[..., Any]

#: The dispatch key above kernels of the device, where a kernel of a composite has a part.
_ABOVE = "AutogradPrivateUse1"


class KernelHandle:
    """A registered kernel. Calling it calls the function itself; `remove` unregisters it."""

    def __init__(self, op: str, fn: Fn, undo: Callable[[], None]) -> None:
        self.op = op
        self.fn = fn
        self.__wrapped__ = fn
        self._undo: Callable[[], None] | None = undo

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<kernel {self.op}: {where(self.fn)}>"

    def remove(self) -> None:
        """Unregister the kernel, so that the op falls back again. A second call does nothing."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()


class UserKernels:
    """The kernels by op and dispatch key. `own` are those that the device comes with, by op."""

    def __init__(self, fallback: Fallback, shortcuts: Shortcuts, own: dict[str, Fn]) -> None:
        self.fallback = fallback
        self.shortcuts = shortcuts
        self.own = own
        self.installed: dict[tuple[str, str], tuple[str, Any]] = {}  # op, dispatch key -> where it was, library

    def find(self, op: object) -> Any:
        """The OpOverload of ``aten::add.out``, ``ns::op``, or of the overload itself."""
        if isinstance(op, _compat.OpOverload):
            return op
        if not isinstance(op, str):
            raise BackendError("a kernel is for an op", expected="its name or an OpOverload", got=repr(op))
        found = _compat.find_op(op) if "::" in op else None
        if found is None:
            raise UnknownOpError(
                "there is no such op",
                op=op,
                expected="namespace::name.overload, as in aten::add.out" if "::" not in op else None,
                fix=_similar(op),
            )
        return found

    def install(self, op: Any, key: str, fn: Fn, kernel: Fn) -> KernelHandle:
        """Put `kernel`, which calls the user's `fn`, at a dispatch key."""
        name = _compat.full_name(op)
        if not callable(fn):
            raise BackendError("a kernel is a function", op=name, got=repr(fn))
        if (name, key) in self.installed:
            raise BackendError(
                "there is a kernel already",
                op=name,
                where=self.installed[name, key][0],
                fix="call .remove() on what registering it returned",
            )
        namespace, _, local = name.partition("::")
        if key == "PrivateUse1":
            self.shortcuts.kernel_added(name)
        library = _compat.Library(namespace, "IMPL")
        _compat.impl(library, local, kernel, key)
        if key == "PrivateUse1" and _is_composite(name):
            _compat.impl(library, local, self._composite(op), _ABOVE)
        place = where(fn) if fn is not kernel else user_source()
        self.installed[name, key] = place, library  # a library that nobody keeps takes its kernels along
        return KernelHandle(name, fn, functools.partial(self._remove, op, key, library))

    def _remove(self, op: Any, key: str, library: Any) -> None:
        name = _compat.full_name(op)
        namespace, _, local = name.partition("::")
        del self.installed[name, key]
        _compat.destroy_library(library)
        for gone in (key, _ABOVE) if key == "PrivateUse1" and _is_composite(name) else (key,):
            _compat.remember_kernel(namespace, local, gone, (self._instead(op, gone), False))
        if key == "PrivateUse1":
            self.shortcuts.kernel_removed(name)

    def _instead(self, op: Any, key: str) -> Fn:
        """What torch is to call, under a dispatch mode, in the place of a kernel that was taken back."""

        def instead(*args: Any, **kwargs: Any) -> Any:
            if key in ("PrivateUse1", _ABOVE):
                return self._before(op)(*args, **kwargs)
            with _compat.exclude_keys(_compat.key_set(key)):
                return op(*args, **kwargs)

        return _compat.outside_dynamo(instead)

    def _before(self, op: Any) -> Fn:
        """What ran before there was a kernel."""
        if _is_composite(_compat.full_name(op)):
            return op.decompose  # type: ignore[no-any-return]
        return self.own.get(_compat.full_name(op)) or boxed(self.fallback, op)

    @staticmethod
    def _composite(op: Any) -> Fn:
        """The kernel at the autograd key of an op which torch composes of others.

        Where a derivative is wanted, the op is taken apart as without the kernel. Most of these have none of their own,
        and would be constants to autograd; that of some (``linear``) is an op that no device but torch's own has.
        """

        def above(*args: Any, **kwargs: Any) -> Any:
            if _compat.is_differentiated((*args, *kwargs.values())):
                return op.decompose(*args, **kwargs)
            guard = _compat.below_autograd()
            try:
                return op(*args, **kwargs)
            finally:
                del guard

        return _compat.outside_dynamo(above)

    def checked(self, op: Any, fn: Fn, dtypes: Iterable[torch.dtype] | None) -> Fn:
        """`fn` as a kernel, its result checked. For other dtypes, and where that is NotImplemented, what ran before."""
        plan, fallback, before = self.fallback.plan(op), self.fallback, self._before(op)
        only = frozenset(dtypes) if dtypes is not None else None
        open_journals = fallbacks.open_journals
        is_tensor = plan.returns == (None,) and plan.schema.returns[0].type == "Tensor"
        is_one = is_tensor and fallback.memory.device_count == 1
        nothing = NotImplemented if plan.returns else None  #: a result that needs no check
        outs = plan.outs

        def kernel(*args: Any, **kwargs: Any) -> Any:
            if only is not None and any(tensor.dtype not in only for tensor in tensors_in((*args, *kwargs.values()))):
                return before(*args, **kwargs)
            if outs and any(kwargs[name].numel() == 0 for name in outs):
                _resize_outs(plan, args, kwargs)
            try:
                result = fn(*args, **kwargs)
                fits = is_one and type(result) is Tensor and result.get_device() == 0  # most do
                if not (fits or result is nothing or result is NotImplemented):
                    result = KernelCheck(fallback, plan, fn, args, kwargs).result(result)
            except Exception as error:
                if open_journals:
                    open_journals[0].fail(plan.name, error)
                if isinstance(error, TypeError):  # which an operator takes for "not implemented"
                    problem = f"the kernel raised {type(error).__name__}: {error}"
                    raise KernelTypeError(problem, op=plan.name, where=where(fn)) from error
                raise
            if result is NotImplemented:
                return before(*args, **kwargs)
            if open_journals:
                open_journals[0].native[plan.name] += 1
            return result

        return _compat.outside_dynamo(kernel)


def _resize_outs(plan: FallbackPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Give outs without elements the sizes that the op computes: ``out=torch.empty(0)`` stands for any.

    Where torch does not know the sizes before the op runs, the kernel does.
    """
    sizes = {name: kwargs[name].to("meta") for name in plan.outs}
    rest = {name: _as_meta(value) for name, value in kwargs.items() if name not in sizes}
    try:
        plan.op(*map(_as_meta, args), **rest, **sizes)
    except NotImplementedError:
        return
    for name, like in sizes.items():
        if kwargs[name].shape != like.shape:
            kwargs[name].resize_(like.shape).as_strided_(like.shape, like.stride())


def _as_meta(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_as_meta(item) for item in value]
    return value.to("meta") if isinstance(value, Tensor) else value


def _is_composite(name: str) -> bool:
    """Does torch make the op out of others, for autograd as well?"""
    return _compat.has_kernel(name, "CompositeImplicitAutograd")


def _similar(op: str) -> str | None:
    """Overloads of the same name: an op's name alone is its overload without one, if there is that."""
    namespace, _, rest = op.rpartition("::")
    names = _compat.overload_names(f"{namespace or 'aten'}::{rest.partition('.')[0]}")
    return f"one of {', '.join(names[:6])}" if names else None


class KernelCheck:
    """Checks what a kernel returned against the schema and the device of the inputs."""

    def __init__(
        self, fallback: Fallback, plan: FallbackPlan, fn: Fn, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.name = fallback.name
        self.plan = plan
        #: None for a gradient that nobody asked for: the schemas of torch's backwards do not say that they return it.
        self.undefined = "backward" in plan.name
        self.fn = fn
        self.args = args
        self.kwargs = kwargs

    def result(self, value: Any) -> Any:
        """What the op returns; for what the kernel has written to, it need not say that it returns it."""
        keys, returns = self.plan.returns, self.plan.schema.returns
        if not keys:
            if value is not None:
                raise self._error("nothing", value, fix="drop the return")
            return None
        if len(keys) == 1:
            return self._one(keys[0], returns[0], value)
        if value is None and None not in keys:
            return tuple(self._given(key) for key in keys if key is not None)
        if not isinstance(value, (tuple, list)) or len(value) != len(keys):
            raise self._error(f"a tuple of {len(keys)}", value)
        return tuple(
            None if each is None and self.undefined else self._one(key, ret, each)
            for key, ret, each in zip(keys, returns, value, strict=True)
        )

    def _given(self, key: int | str) -> Any:
        return self.kwargs[key] if isinstance(key, str) else self.args[key]

    def _one(self, key: int | str | None, ret: Return, value: Any) -> Any:
        if key is not None:
            given = self._given(key)
            if value is not None and value is not given:
                raise self._error("the tensor that it writes to, or None", value)
            return given
        if value is None and ret.type.endswith("?"):
            return None
        if not ret.holds_tensors:
            if not fits_type(value, ret.type) and type(value).__module__ != "numpy":
                raise self._error(f"a value of type {ret.type}", value)
        elif ret.is_tensor:
            self._check_tensor(value)
        elif not isinstance(value, (list, tuple)):
            raise self._error("a list of tensors", value)
        else:
            for item in value:
                if item is not None or not ret.type.startswith("Tensor?"):
                    self._check_tensor(item)
        return value

    def _check_tensor(self, value: Any) -> None:
        expected = "a tensor on " + str(self._device())
        if not fits_type(value, "Tensor"):
            is_array = type(value).__module__ == "numpy"
            raise self._error(expected, value, fix="backend.wrap(array)" if is_array else None)
        if value.device.type != self.name:
            raise self._error(expected, value, fix="backend.wrap(tensor)")
        if value.device != self._device():
            raise self._error(expected, value, fix="backend.wrap(value, x.device)")

    def _device(self) -> torch.device:
        values = [*self.args, *self.kwargs.values()]
        for value in [item for v in values for item in (v if isinstance(v, (list, tuple)) else [v])]:
            if isinstance(value, Tensor) and value.device.type == self.name:
                return value.device
        given = self.kwargs.get("device")
        return given if given is not None and given.index is not None else torch.device(self.name, 0)

    def _error(self, expected: str, value: Any, fix: str | None = None) -> KernelResultError:
        got = f"a tensor on {value.device}" if isinstance(value, Tensor) else type(value).__name__
        return KernelResultError(
            "the kernel returned something else than the op returns",
            op=self.plan.name,
            expected=expected,
            got=got if value is not None else "None",
            where=where(self.fn),
            fix=fix,
        )
