"""Calls as programs that serve models make them: kernels that do nothing, beside a bare op.

The name of a case gives the mode of the call, its form, and the options of `custom_op`: `bypass` is `bypass=True`,
`raw` is `kernel_calls_torch=False`. In "inference, its own" the tensors are created in inference mode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from cases import Case, Fn, each, inference_tensors, tensors
from cases_calls import PLUS, WRITE, Kernel, with_library
from torch import Tensor


def write_defaults(x: Tensor, y: Tensor, eps: float = 1e-5, n: int = 2, flag: bool = False) -> None: ...


def write_lists(xs: list[Tensor], y: Tensor, sizes: list[int], scale: float) -> None: ...


def return_several(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x.detach(), y.detach()


def return_list(xs: list[Tensor], y: Tensor) -> list[Tensor]:
    return [x.detach() for x in xs]


WRITE_DEFAULTS = Kernel(
    write_defaults, "(Tensor(a!) x, Tensor y, float eps=1e-05, SymInt n=2, bool flag=False) -> ()", ("x",)
)
WRITE_LISTS = Kernel(write_lists, "(Tensor(a!)[] xs, Tensor y, SymInt[] sizes, float scale) -> ()", ("xs",))
# The results share memory with the arguments, which the check of results would reject.
RETURN_SEVERAL = Kernel(return_several, "(Tensor x, Tensor y) -> (Tensor, Tensor)", check="never")
RETURN_LIST = Kernel(return_list, "(Tensor[] xs, Tensor y) -> Tensor[]", check="never")

#: Form of a call -> its code, and the kernel.
FORMS: dict[str, tuple[str, Kernel]] = {
    "": ("f(x, y)", WRITE),
    ", by keyword": ("f(x=x, y=y)", WRITE),
    ", defaults": ("f(x, y)", WRITE_DEFAULTS),
    ", some by keyword": ("f(x, y, n=3, flag=True)", WRITE_DEFAULTS),
}
#: Mode of a call -> its context, and the function that creates the tensors.
MODES: dict[str, tuple[Fn, Fn]] = {
    "grad mode": (torch.enable_grad, tensors),
    "no_grad": (torch.no_grad, tensors),
    "inference": (torch.inference_mode, tensors),
    "inference, its own": (torch.inference_mode, inference_tensors),
}
OTHER_FORMS: dict[str, tuple[str, Kernel]] = {
    "one number": ("f(x, y, 2.0)", PLUS),
    "lists, numbers": ("f([x, y], out, [2, 3], 2)", WRITE_LISTS),
    "several returns": ("f(x, y)", RETURN_SEVERAL),
    "returns a list": ("f([x, y], out)", RETURN_LIST),
}


def ops(kernel: Kernel, **options: Any) -> Callable[[], dict[str, Fn]]:
    return lambda: with_library(kernel, **options)


def cases() -> list[Case]:
    serving = [
        Case(
            f"{mode}{form}{', raw' * raw}{', bypass' * bypass}",
            "serving",
            each(code, ops(kernel, bypass=bypass, kernel_calls_torch=not raw)),
            context,
            inputs,
        )
        for bypass in (False, True)
        for raw in (False, True)
        for mode, (context, inputs) in MODES.items()
        for form, (code, kernel) in FORMS.items()
        if not (raw and form)
    ]
    others = [
        Case(f"{name}, bypass", "serving", each(code, ops(kernel, bypass=True)), torch.no_grad)
        for name, (code, kernel) in OTHER_FORMS.items()
    ]
    return serving + others
