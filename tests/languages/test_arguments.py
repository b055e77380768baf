"""What wrapped functions do with arguments: found out in the first call with values of these types, and remembered."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor

from customops import errors
from customops.languages import from_cupy
from customops.languages._arguments import Arguments, Language


class Array:
    """What tensors are in a language of the tests."""

    def __init__(self, name: str, tensor: Tensor) -> None:
        self.name, self.tensor = name, tensor


def show(value: Any) -> Any:
    if isinstance(value, Array):
        return value.name, value.tensor.tolist()
    return [show(item) for item in value] if isinstance(value, list) else value


def wrapped(fn: Any, names: tuple[str, ...] | None = None, **options: Any) -> Any:
    arguments = Arguments(fn, Language("Esperanto", devices=("cpu",)), names)
    return arguments.adapter(
        lambda name, tensor: Array(name, arguments.plain(name, tensor)),
        lambda value, hint: value.tensor if isinstance(value, Array) else value,
        **options,
    )


def seen(x: Any = 0, y: Any = 0, *, z: Any = 0) -> dict[str, Any]:
    return {"x": show(x), "y": show(y), "z": show(z)}


def test_each_call_gets_what_its_types_need() -> None:
    fn, t = wrapped(seen), torch.ones(1)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((t, 2), {}),
        ((2, t), {}),
        ((t, None), {}),
        ((t, t), {}),
        ((t,), {}),
        ((), {}),
        (([t, 3, [t]], (1, 2)), {}),
        (((1, t), []), {}),
        ((t,), {"z": t, "y": 1}),
        ((t,), {"y": t, "z": 1}),
        ((), {"z": t, "x": [t]}),
    ]
    for _ in range(2):  # they are new, and known
        for args, named in calls:
            given = dict(zip("xy", args, strict=False)) | named
            assert fn(*args, **named) == {name: expected(name, given.get(name, 0)) for name in "xyz"}


def expected(name: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        return name, value.tolist()
    has_tensors = isinstance(value, (list, tuple)) and any(isinstance(item, Tensor) for item in value)
    return [expected(name, item) for item in value] if has_tensors else value


def test_kinds_of_tensors() -> None:
    class Subclass(Tensor):
        pass

    same: Any = wrapped(lambda x: x)
    for x in (torch.ones(2), torch.nn.Parameter(torch.ones(2)), torch.ones(2).as_subclass(Subclass)):
        for needs_grad in (False, True):
            result = same(x.requires_grad_(needs_grad))
            assert not result.requires_grad
            assert result.data_ptr() == x.data_ptr()


def test_lists_come_back_as_what_they_were() -> None:
    x = torch.ones(2)
    for kind in (tuple, list):
        results = wrapped(lambda x, kind=kind: kind([x, 3]))(x)
        assert type(results) is kind
        assert results[0] is x
    assert wrapped(lambda x: None)(x) is None


WRONG = {
    "to_dense": lambda: torch.eye(2).to_sparse(),
    "resolve_conj": lambda: torch.ones(2, dtype=torch.complex64).conj(),
    "resolve_neg": lambda: torch._neg_view(torch.ones(2)),
    "a tensor on cpu": lambda: torch.ones(2, device="meta"),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_tensor_among_types_that_are_known(message: str) -> None:
    fn, right, wrong = wrapped(seen), torch.ones(1), WRONG[message]()
    for _ in range(2):
        for args, named, name in (((right, wrong), {}, "y"), (([right, wrong],), {}, "x"), ((), {"z": wrong}, "z")):
            with pytest.raises(errors.UnsupportedError, match=message) as caught:
                fn(*args, **named)
            assert caught.value.argument == name
        fn(right, right), fn([right]), fn(z=right)


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_tensor_for_a_language_that_takes_tensors(message: str) -> None:
    def takes(x: Tensor) -> None:
        x.untyped_storage().data_ptr()  # raises for those without memory
        if x.is_meta:
            raise TypeError

    fn = wrapped(takes, ("x",), as_is=True)
    for _ in range(2):
        with pytest.raises(errors.UnsupportedError, match=message):
            fn(WRONG[message]())
        fn(torch.ones(2))


def test_an_argument_called_self() -> None:
    fn = wrapped(lambda **named: show(named["self"]))
    assert fn(self=torch.ones(1)) == ("self", [1.0])


def test_what_the_function_raises() -> None:
    fn = wrapped(lambda x, y: 1 / y)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError) as caught:
            fn(torch.ones(2), 0)
        assert caught.value.__context__ is None
        assert fn(torch.ones(2), 1) == 1
    with pytest.raises(TypeError, match="missing 1 required"):
        fn(torch.ones(2))


def test_cupy_refuses_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy itself needs a GPU; a tensor elsewhere is refused before it is asked."""
    monkeypatch.setitem(sys.modules, "cupy", types.ModuleType("cupy"))
    fn = from_cupy(seen)
    for args, named, name in (((0, torch.ones(1)), {}, "y"), ((0,), {"z": torch.ones(1)}, "z")):
        with pytest.raises(errors.UnsupportedError, match="a tensor on cuda") as caught:
            fn(*args, **named)
        assert caught.value.argument == name


def test_arguments_by_position_only() -> None:
    fn = wrapped(seen, ("x", "y"))
    for _ in range(2):
        with pytest.raises(errors.ArgumentError, match=r"(?s)Esperanto takes arguments by position only.*got: +y"):
            fn(torch.ones(1), y=1)
        fn(torch.ones(1), 1)
