"""The class of an op's object; of one op alone, if its ``__call__`` is generated for it."""

from __future__ import annotations

import functools
from typing import Any

from customops import _compat
from customops._calls import computed
from customops._codegen import bypass
from customops._dispatch.spec import OpSpec, Options
from customops._lowering.lowering import Lowering
from customops._op import CustomOpDef
from customops._schema.help import has_signature


def class_of(spec: OpSpec, options: Options) -> type[CustomOpDef[Any, Any]]:
    """The class for an op that is called as `options` say."""
    cls: type[CustomOpDef[Any, Any]] = CustomOpDef
    if spec.fn is None:
        return cls
    if options.skip_dispatcher and bypass.obstacle(spec.schema, eager=options.eager) is None:
        call = bypass.call(spec.schema, spec.tags, spec.qualname, options.check, eager=options.eager)
        cls = _calling(cls, _compat.dynamo.outside_dynamo(call))
    parameters = spec.schema
    if spec.signature is not None:
        lowering = Lowering(spec.signature, spec.schema, spec.qualname)
        parameters = lowering.parameters
        cls = _calling(cls, lowering.call(cls.__call__ if cls is not CustomOpDef else None), _lowering=lowering)
    if spec.computed_args:
        call = computed.call(parameters, spec.computed_args, spec.qualname, cls.__call__)
        complete = functools.partial(computed.arguments(parameters, spec.computed_args, spec.qualname), None)
        cls = _calling(cls, _compat.dynamo.outside_dynamo(call), _complete=staticmethod(complete))
        if has_signature(spec.fn):
            cls.__signature__ = computed.signature(spec.fn, spec.computed_args)  # type: ignore[assignment]
    return cls


def _calling(cls: type[CustomOpDef[Any, Any]], call: Any, **attributes: Any) -> type[CustomOpDef[Any, Any]]:
    _compat.dynamo.hidden_files.add(call.__code__.co_filename)
    return type(CustomOpDef.__name__, (cls,), {"__call__": call, **attributes})
