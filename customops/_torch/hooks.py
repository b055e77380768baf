"""Functions of the rooms above that the changed functions of torch call. The module of a function sets its hook."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: ``kernel_registered(qualname)``: a kernel was registered outside customops; without a name, for any op.
kernel_registered: Callable[..., object]
#: ``op_traced(qualname, records)``: a mode that traces sees an op of ours, and records a graph or not.
op_traced: Callable[[str, bool], object]
#: ``fingerprint(names)``: a digest of everything that compiled code traced from these ops, or None for ops of others.
fingerprint: Callable[[set[str]], str | None]
#: ``may_be_direct(qualname, device, args, kwargs)``: whether a graph may call an op without the dispatcher, on a device
#: that is given by its dispatch key. `inductor.TENSOR` stands for each tensor in the arguments.
may_be_direct: Callable[[str, str, tuple[Any, ...], dict[str, Any]], bool]
#: ``direct_call(qualname, device, allocated=False, kernel=None)``: the function that graphs call in the place of the
#: dispatcher. Compiled code finds it by its module and name.
direct_call: Callable[..., Callable[..., Any]]
#: ``kernel_for(qualname, args, kwargs)``: the name of the kernel that was chosen for fakes, or None.
kernel_for: Callable[[str, tuple[Any, ...], dict[str, Any]], str | None]
