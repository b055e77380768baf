"""What the tests of type hints share."""

import inspect
from collections.abc import Callable
from typing import Any, Optional

import pytest
from torch import Tensor

from customops import infer_schema
from customops.errors import SchemaError


def annotated(*, ret: Any = Tensor, **hints: Any) -> Callable[..., Any]:
    """A function with one parameter for each of `hints`."""
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in hints]

    def fn(*args: Any) -> Any:
        raise AssertionError("only its signature is of interest")

    fn.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [p.replace(annotation=hints[p.name]) for p in parameters], return_annotation=ret
    )
    return fn


def complaint(fn: Callable[..., Any], match: Optional[str] = None, *, mutates_args: Any = (), **options: Any) -> str:
    """The message for a function that has no schema: short, and it names the function and its line."""
    with pytest.raises(SchemaError, match=match) as caught:
        infer_schema(fn, mutates_args=mutates_args, **options)
    message = str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert len(message.splitlines()) < 8
    assert max(map(len, message.splitlines())) < 300
    code = inspect.unwrap(fn).__code__
    place = f"{fn.__name__} ({code.co_filename}:{code.co_firstlineno})"
    assert place in message
    assert message.startswith(f"{fn.__name__}: ")
    return message.replace(place, "FUNCTION (FILE:LINE)")


def hints(**types: Any) -> Callable[..., Any]:
    """A function of these annotations; those after `_` are keyword-only, `ret` is the return."""
    names = [name for name in types if name not in ("ret", "_")]
    keyword = names[list(types).index("_") :] if "_" in types else []
    fn = annotated(ret=types["ret"], **{name: types[name] for name in names})
    signature = fn.__signature__  # type: ignore[attr-defined]
    parameters = [
        p.replace(kind=p.KEYWORD_ONLY if p.name in keyword else p.kind) for p in signature.parameters.values()
    ]
    fn.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return fn
