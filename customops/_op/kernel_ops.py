"""Each kernel of an op as an op of its own: what inductor's autotuning measures, and puts in the place of the op."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from typing import Any

from customops._dispatch.callbacks import Fn
from customops._dispatch.names import Name
from customops._dispatch.operator import Options, remove
from customops._dispatch.preference import prefer
from customops._op.op import CustomOpDef
from customops._rules.choice import REFERENCE
from customops._torch.library import find_overload
from customops.errors import UnregisteredError


def kernel_functions(op: CustomOpDef[Any, Any]) -> list[Fn]:
    """A function for each kernel of an op that has a name, which calls it where it may run, else the next one.

    Compilers see in it one call, of an op ``ns::op__name``, which goes with `op`; and in the reference its code.
    """
    return [_function(op, name) for name in op._rules.kernel.names()]


def _function(op: CustomOpDef[Any, Any], kernel: str) -> Fn:
    operator, reference = op._definition, op._rules.reference
    if kernel == REFERENCE and reference is not None and operator.schema.is_functional:
        return functools.update_wrapper(functools.partial(reference.fn), reference.fn, updated=())
    # torch has no attribute for an op with "-" or "." in its name: the code of the character stands for it.
    word = re.sub(r"\W", lambda found: f"_{ord(found[0]):x}_", kernel, flags=re.ASCII)
    name = Name(operator.name.namespace, f"{operator.name.name}__{word}", operator.name.overload)
    if find_overload(name.packet, name.overload) is None:

        def run(*args: Any, **kwargs: Any) -> Any:
            with prefer({op._qualname: kernel}):
                return op._opoverload(*args, **kwargs)

        spec = replace(
            operator.spec,
            name=name,
            text=None,
            fn=run,
            signature=None,
            lowered_fn=None,
            computed_args=(),
            device_types=None,
            traceable=False,
            options=Options("never"),
        )
        of_kernel = op._owner._define_op(spec)
        of_kernel.register_fake(op._opoverload)
        operator.on_removal.append(lambda: remove(of_kernel._definition, operator.removed or UnregisteredError("gone")))
    overload: Any = find_overload(name.packet, name.overload)

    def call(*args: Any, **kwargs: Any) -> Any:
        return overload(*args, **kwargs)

    call.__name__ = kernel
    return call
