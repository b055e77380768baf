"""Kernels at the keys of a device: those of users, with a check of their results; shortcuts, autocast, attention."""

from __future__ import annotations

import collections
import contextlib
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from customops import _torch
from customops._dispatch.options import CheckPolicy
from customops._dispatch.results import fits_type
from customops._places import user_source, where
from customops._rules.autocast import casting
from customops._schema.parse import from_dispatcher
from customops._torch.trees import tensors_in
from customops.backend import _compat, fallbacks
from customops.backend.device_module import DeviceModule
from customops.backend.errors import BackendError, KernelResultError, KernelTypeError, UnknownOpError
from customops.backend.fallbacks import Fallback, FallbackPlan, on_meta
from customops.backend.memory import Memory
from customops.errors import UnsupportedError

# Autocast for the device: which ops run in the lower dtype, which in float32, and a kernel that casts for them --------

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
    schema = from_dispatcher(_torch.schema.schema_of(op))
    return casting(op, schema, name, "AutocastPrivateUse1", lambda: dtype or torch.get_autocast_dtype(name))


# User kernels of the device: installed and removed, with a check of their results in each call ------------------------

Fn = Callable[..., Any]
#: The dispatch key above kernels of the device, where a kernel of a composite has a part.
_ABOVE = "AutogradPrivateUse1"

# `torch.nn.functional.scaled_dot_product_attention` asks a C++ function of the device which kernel to use, and takes
# the slow one (math) where there is no such function. Python cannot give it one. So with the first kernel for the fused
# op the choice is made here, above autograd, where torch has derivatives for the fused op.
FUSED = "aten::_scaled_dot_product_fused_attention_overrideable"
MATH = "aten::_scaled_dot_product_attention_math"
CHOICE = "scaled_dot_product_attention"


def no_fallback(*_: Any, **__: Any) -> Any:
    """What runs where a kernel of the fused op, or of its backward, returns NotImplemented."""
    fix = "say before what the kernel takes, backend.kernel(op, dtypes=...), or raise in it"
    raise UnsupportedError("the CPU has no such op to fall back to", op=FUSED, fix=fix)


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
    """The kernels by op and dispatch key, and the shortcuts around torch's composites where there are none.

    ``add`` of a device without a kernel for it is ``empty_strided``, then ``add.out``: two calls of Python instead of
    one; ``native_layer_norm`` is a dozen, and rounds differently. So the fallback is also put where torch takes an op
    apart for the device although the CPU has a kernel for the whole. Once a user writes a kernel for any overload of a
    name, torch's composites of that name are what calls it, and the shortcuts go: a kernel for ``add.out`` serves
    ``add`` and ``add_``. That goes for kernels from `torch.library` as well.
    """

    def __init__(self, fallback: Fallback, check: CheckPolicy) -> None:
        self.fallback = fallback
        self.check = check
        self.own: dict[str, Fn] = {}  #: the kernels that the device comes with, by op
        self.installed: dict[tuple[str, str], tuple[str, Any]] = {}  # op, dispatch key -> where it was, library
        self.counts: collections.Counter[str] = collections.Counter()  #: how many there are now, by family
        self._families: dict[str, list[Any]] = collections.defaultdict(list)  # all overloads of a name, in place or not
        self._shortcuts: dict[str, Any] = {}  # family -> library
        self._attention: Any = None  # a library
        self._attention_dtypes: frozenset[torch.dtype] | None = None  # what the fused kernel takes: None for every one
        for name in _compat.composites_of_the_cpu():
            op = _compat.find_op(name)
            if op is not None:
                self._families[_family(name)].append(op)

    def install_shortcuts(self, undo: contextlib.ExitStack) -> None:
        """Install all of them, until `undo` is closed."""
        undo.callback(self._remove_shortcuts)
        for family, ops in self._families.items():
            if any(_torch.dispatcher.has_kernel(_torch.library.name_of_overload(op), "PrivateUse1") for op in ops):
                self.counts[family] += 1  # somebody's, from before there was a device
            else:
                self._install_shortcut(family)
        # Kernels that somebody registers by `torch.library` count for good: their end goes unseen.
        _compat.watch_kernels(undo, self._added)

    def _install_shortcut(self, family: str) -> None:
        library = self._shortcuts[family] = _compat.Library("aten", "IMPL")
        for op in self._families[family]:
            local = _torch.library.name_of_overload(op).partition("::")[2]
            _torch.library.impl(library, local, functools.partial(self.fallback, op), "PrivateUse1")

    def _remove_shortcuts(self) -> None:
        while self._shortcuts:
            _torch.library.destroy_library(self._shortcuts.popitem()[1])

    def _added(self, name: str) -> None:
        self.counts[_family(name)] += 1
        library = self._shortcuts.pop(_family(name), None)
        if library is not None:
            _torch.library.destroy_library(library)

    def is_called(self, name: str) -> bool:
        """Does compiled code call the op? Code that is written for one runs on memory of the host alone."""
        return type(self.fallback.memory) is not Memory or self.counts[_family(name)] > 0

    def key_of_code(self) -> str:
        """What `is_called` depends on."""
        families = sorted(family for family, count in self.counts.items() if count)
        return f"{type(self.fallback.memory).__name__}: {' '.join(families)}"

    def find(self, op: object) -> Any:
        """The OpOverload of ``aten::add.out``, ``ns::op``, or of the overload itself."""
        if isinstance(op, _torch.library.OpOverload):
            return op
        if not isinstance(op, str):
            raise BackendError("a kernel is for an op", expected="its name or an OpOverload", got=repr(op))
        found = _compat.find_op(op) if "::" in op else None
        if found is None:
            namespace, _, rest = op.rpartition("::")
            overloads = _compat.overload_names(f"{namespace or 'aten'}::{rest.partition('.')[0]}")
            expected = "namespace::name.overload, as in aten::add.out" if "::" not in op else None
            fix = f"one of {', '.join(overloads[:6])}" if overloads else None
            raise UnknownOpError("there is no such op", op=op, expected=expected, fix=fix)
        return found

    def register(self, op: Any, fn: Fn, dtypes: Iterable[torch.dtype] | None) -> KernelHandle:
        """Make `fn`, its result checked, the kernel of an op for these dtypes; for others, what ran before runs."""
        if not callable(fn):
            raise BackendError("a kernel is a function", op=_torch.library.name_of_overload(op), got=repr(fn))
        only = frozenset(dtypes) if dtypes is not None else None
        plan, fallback, before = self.fallback.plan(op), self.fallback, self._before(op)
        open_journals = fallbacks.open_journals
        is_tensor = plan.returns == (None,) and plan.schema.returns[0].type == "Tensor"
        is_one = is_tensor and fallback.memory.device_count == 1
        nothing = NotImplemented if plan.returns else None  #: a result that needs no check
        outs, takes_several, run = plan.outs, plan.takes_several, fallback.memory.scoped(fn, plan.name)
        compute = run if self.check == "never" else _compared(fallback, plan, fn, run, once=self.check == "first")
        compute = compute if fallback.memory.device_count == 1 else _on_device(fallback.module, compute)

        def kernel(*args: Any, **kwargs: Any) -> Any:
            if only is not None and any(tensor.dtype not in only for tensor in tensors_in((*args, *kwargs.values()))):
                return before(*args, **kwargs)
            for value in (*args, *kwargs.values()) if takes_several else ():
                # Lists are looked at in full: few ops take one.
                if type(value) is list or (isinstance(value, Tensor) and value.is_cpu and value.ndim):
                    fallbacks.check_on_device(plan, fallback.name, args, kwargs)
            if outs and any(kwargs[name].numel() == 0 for name in outs):
                _resize_outs(plan, args, kwargs)
            measured = fallbacks.Measured(plan.name) if open_journals else None
            try:
                result = compute(*args, **kwargs)
                fits = is_one and type(result) is Tensor and result.get_device() == 0  # most do
                if not (fits or result is nothing or result is NotImplemented):
                    result = check_result(fallback, plan, fn, args, kwargs, result)
            except Exception as error:
                if measured is not None:
                    measured.fail(error)
                if isinstance(error, TypeError):  # which an operator takes for "not implemented"
                    problem = f"the kernel raised {type(error).__name__}: {error}"
                    raise KernelTypeError(problem, op=plan.name, where=where(fn)) from error
                raise
            if measured is not None:
                measured.end(measured.journal.native, args, kwargs, result)
            return result if result is not NotImplemented else before(*args, **kwargs)

        handle = self.install(op, "PrivateUse1", run, _torch.dynamo.outside_dynamo(kernel))
        if handle.op == FUSED:
            self._attention_dtypes = only
            if self._attention is None:
                self._attention = _compat.Library("aten", "IMPL")
                _torch.library.impl(self._attention, CHOICE, self._choose_attention, _ABOVE)
        return handle

    def install(self, op: Any, key: str, fn: Fn, kernel: Fn) -> KernelHandle:
        """Put `kernel`, which calls the user's `fn`, at a dispatch key."""
        name = _torch.library.name_of_overload(op)
        if (name, key) in self.installed:
            fix = "call .remove() on what registering it returned"
            raise BackendError("there is a kernel already", op=name, where=self.installed[name, key][0], fix=fix)
        namespace, _, local = name.partition("::")
        is_of_device = key == "PrivateUse1"
        above = [_ABOVE] if is_of_device and _is_composite(name) else []
        if is_of_device:
            self._added(name)
        library = _compat.Library(namespace, "IMPL")
        _torch.library.impl(library, local, kernel, key)
        for each in above:
            _torch.library.impl(library, local, _kernel_above(op), each)
        place = where(fn) if fn is not kernel else user_source()
        self.installed[name, key] = place, library  # a library that nobody keeps takes its kernels along

        def remove() -> None:
            del self.installed[name, key]
            _torch.library.destroy_library(library)
            for gone in (key, *above):
                _torch.library.remember_kernel(namespace, local, gone, (self._instead(op, gone), False))
            if is_of_device:
                self.counts[_family(name)] -= 1
                if not self.counts[_family(name)] and _family(name) in self._families:
                    self._install_shortcut(_family(name))

        return KernelHandle(name, fn, remove)

    def _instead(self, op: Any, key: str) -> Fn:
        """What torch is to call, under a dispatch mode, in the place of a kernel that was taken back."""

        def instead(*args: Any, **kwargs: Any) -> Any:
            if key in ("PrivateUse1", _ABOVE):
                return self._before(op)(*args, **kwargs)
            with _torch.dispatcher.exclude_keys(_torch.dispatcher.key_set(key)):
                return op(*args, **kwargs)

        return _torch.dynamo.outside_dynamo(instead)

    def _before(self, op: Any) -> Fn:
        name = _torch.library.name_of_overload(op)
        if _is_composite(name):
            return op.decompose  # type: ignore[no-any-return]
        is_of_all = _torch.dispatcher.has_kernel(name, "CompositeExplicitAutograd")
        if is_of_all and not _torch.dispatcher.has_kernel(name, "CPU") and name not in self.own:
            return _torch.dispatcher.without_device_kernel(op)  # torch's for all devices, as `_foreach_add_`
        return self.own.get(name) or functools.partial(self.fallback, op)

    @_torch.dynamo.outside_dynamo
    def _choose_attention(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any = None, *rest: Any, **options: Any
    ) -> Tensor:
        enable_gqa = options.pop("enable_gqa", False)
        is_taken = self._attention_dtypes is None or query.dtype in self._attention_dtypes
        if not (is_taken and _torch.dispatcher.has_kernel(FUSED, "PrivateUse1")) or enable_gqa or query.dim() != 4:
            slow: Any = _compat.find_op(MATH)
            return slow(query, key, value, mask, *rest, enable_gqa=enable_gqa, **options)[0]  # type: ignore[no-any-return]
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), -math.inf)
        fused: Any = _compat.find_op(FUSED)
        return fused(query, key, value, mask, *rest, **options)[0]  # type: ignore[no-any-return]


def _family(name: str) -> str:
    return name.partition(".")[0].removesuffix("_")


def _is_composite(name: str) -> bool:
    """Does torch make the op out of others, for autograd as well?"""
    return _torch.dispatcher.has_kernel(name, "CompositeImplicitAutograd")


def _kernel_above(op: Any) -> Fn:
    """The kernel at the autograd key of an op which torch composes of others.

    Where a derivative is wanted, the op is taken apart as without the kernel. Most of these have none of their own, and
    would be constants to autograd; that of some (``linear``) is an op that no device but torch's own has.
    """

    def above(*args: Any, **kwargs: Any) -> Any:
        values = (*args, *kwargs.values())
        in_reverse = torch.is_grad_enabled() and _torch.autograd.any_requires_grad(*args, **kwargs)
        if in_reverse or (_torch.autograd.forward_ad_active() and _torch.autograd.any_tangent(values)):
            return op.decompose(*args, **kwargs)
        with _torch.dispatcher.below_autograd():
            return op(*args, **kwargs)

    return _torch.dynamo.outside_dynamo(above)


def _resize_outs(plan: FallbackPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Give outs without elements, as ``out=torch.empty(0)``, the sizes that the op computes, where torch knows them."""
    try:
        _, metas = on_meta(plan, args, kwargs)
    except NotImplementedError:
        return
    for name in plan.outs:
        out, like = kwargs[name], metas[name]
        if out.shape != like.shape:
            out.resize_(like.shape).as_strided_(like.shape, like.stride())


def _compared(fallback: Fallback, plan: FallbackPlan, fn: Fn, run: Fn, *, once: bool) -> Fn:
    """The kernel, with the sizes and dtypes of its results compared with those that torch computes without memory."""
    is_over = False

    def compared(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_over
        try:
            expected, _ = on_meta(plan, args, kwargs) if not is_over else (None, None)
        except Exception:  # torch cannot tell: nonzero, or a custom op without a fake impl, or whose fake impl raises
            expected = None
        result = run(*args, **kwargs)
        if expected is None or result is NotImplemented:
            return result
        result = check_result(fallback, plan, fn, args, kwargs, result)
        got, wanted = _described(result), _described(expected)
        if len(got) != len(wanted) or any(each not in (other, None) for each, other in zip(got, wanted, strict=True)):
            problem, shown = "the kernel returned tensors of other sizes or dtypes than the op", "; ".join
            texts = {"expected": shown(map(str, wanted)), "got": shown(map(str, got)), "where": where(fn)}
            raise KernelResultError(problem, op=plan.name, **texts)
        is_over = once
        return result

    return compared


def _on_device(module: DeviceModule, run: Fn) -> Fn:
    """Return the kernel, run with the device of its first tensor, or of the tensor to make, as the current one."""

    def on_device(*args: Any, **kwargs: Any) -> Any:
        device = next((t.device for t in tensors_in((*args, *kwargs.values())) if not t.is_cpu), kwargs.get("device"))
        is_here = device is not None and device.type == module._device_name
        with module.device(device if is_here else None):
            return run(*args, **kwargs)

    return on_device


def _described(result: Any) -> list[str | None]:
    leaves = _torch.trees.tree_leaves(result)
    return [f"{list(each.shape)} {each.dtype}" if isinstance(each, Tensor) else None for each in leaves]


def check_result(
    fallback: Fallback, plan: FallbackPlan, fn: Fn, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any
) -> Any:
    """What the op returns: what the kernel returned, if it fits the schema and the device, and what it has written."""

    def error(expected: str, value: Any, fix: str | None = None) -> KernelResultError:
        got = f"a tensor on {value.device}" if isinstance(value, Tensor) else type(value).__name__
        got, problem = "None" if value is None else got, "the kernel returned something else than the op returns"
        return KernelResultError(problem, op=plan.name, expected=expected, got=got, where=where(fn), fix=fix)

    returns = plan.schema.returns
    if not returns:
        raise error("nothing", value, fix="drop the return")
    if len(returns) == 1:
        value = [value]
    elif value is None and None not in plan.returns:
        value = [None] * len(returns)
    elif not isinstance(value, (tuple, list)) or len(value) != len(returns):
        raise error(f"a tuple of {len(returns)}", value)
    here = [t.device for t in tensors_in((*args, *kwargs.values())) if t.device.type == fallback.name]
    device = here[0] if here else kwargs.get("device")
    if device is None or device.index is None:
        device = torch.device(fallback.name, 0)
    # None for a gradient that nobody asked for: the schemas of torch's backwards do not say that they return it.
    has_undefined = "backward" in plan.name and len(returns) > 1
    checked = []
    for key, ret, each in zip(plan.returns, returns, value, strict=True):
        checked.append(each)
        if key is not None:
            checked[-1] = kwargs[key] if isinstance(key, str) else args[key]
            if each is not None and each is not checked[-1]:
                raise error("the tensor that it writes to, or None", each)
            continue
        if each is None and (has_undefined or ret.type.endswith("?")):
            continue
        if not ret.holds_tensors:
            if not fits_type(each, ret.type) and type(each).__module__ != "numpy":
                raise error(f"a value of type {ret.type}", each)
            continue
        if not ret.is_tensor and not isinstance(each, (list, tuple)):
            raise error("a list of tensors", each)
        for tensor in [each] if ret.is_tensor else each:
            if tensor is None and ret.type.startswith("Tensor?"):
                continue
            if not isinstance(tensor, Tensor):
                fix = "backend.wrap(array)" if type(tensor).__module__ == "numpy" else None
                raise error(f"a tensor on {device}", tensor, fix)
            if tensor.device != device:
                is_here = tensor.device.type == fallback.name
                fix = "backend.wrap(value, x.device)" if is_here else "backend.wrap(tensor)"
                raise error(f"a tensor on {device}", tensor, fix)
    return checked[0] if len(returns) == 1 else tuple(checked)
