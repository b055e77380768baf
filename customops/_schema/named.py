"""`Named`: an object that a kernel needs and a graph cannot hold, as an argument of an op."""

from __future__ import annotations

import functools
import threading
import weakref
from typing import Any, Generic, NamedTuple, TypeVar, cast

from customops import _torch
from customops._places import user_source
from customops.errors import DefinitionError, UnboundNameError, UnsupportedError, brief

T = TypeVar("T")


class _NotPackedError(UnsupportedError, AttributeError):
    pass


class _Bound(NamedTuple):
    """What a name stands for."""

    target: weakref.ref[Any]
    where: str


_bound: dict[str, _Bound] = {}

#: Reentrant: the garbage collector may take a target away while it is held.
_lock = threading.RLock()


class Named(_torch.schema.OpaqueBase, Generic[T]):  # type: ignore[misc]
    """The name of an object, as an argument of an op: kernels look the object up with `get`.

    Compiled code takes a `Named` as an opaque input, so the same code serves all names: the layers of a model share one
    graph. With a ``str`` instead, each layer would be compiled separately. Create the `Named` outside compiled code,
    keep it (for example as an attribute of the layer), and pass it. It is pickled, copied and exported as the name;
    each process binds the name to an object of its own.

    The object is held by a weak reference. When nothing else refers to it, the name can be used again.

    Args:
        name: a non-empty str.
        target: the object to which the name is bound in this process. Without it, no binding changes.
        replace: if True, `target` may replace another object that has the name.

    Raises:
        DefinitionError: `name` is empty or no str, or names another object; `target` supports no weak references.

    Example:
        >>> @custom_op("mylib::attend", mutates_args=("out",))
        ... def attend(q: Tensor, out: Tensor, layer: Named[Attention]) -> None:
        ...     cache = layer.get().cache
        ...
        >>> layer = Attention()
        >>> layer.named = Named("layers.0", layer)
        >>> attend(q, out, layer.named)
    """

    __module__ = "customops"  # its name in schemas, and in files of exported programs

    def __init__(self, name: str, target: T | None = None, *, replace: bool = False) -> None:
        if not isinstance(name, str) or not name:
            raise DefinitionError("Named takes a text that is not empty", got=brief(name))
        self._name = name
        if target is None:
            return
        try:
            held = weakref.ref(target, functools.partial(_release, name))
        except TypeError:
            raise DefinitionError(
                f"a {type(target).__name__} cannot be the target of a name: it is held weakly",
                argument=name,
                fix="make it an attribute of an object of a class of yours, and name that",
            ) from None
        with _lock:
            before = _bound.get(name)
            other = None if before is None else before.target()
            if before is not None and other is not None and other is not target and not replace:
                raise DefinitionError(
                    f"the name {name!r} stands for another object",
                    expected="a name that is free",
                    got=f"a {type(other).__name__}, named at {before.where}",
                    fix="take another name, or pass replace=True",
                )
            _bound[name] = _Bound(held, user_source())

    @property
    def name(self) -> str:
        return self._name

    def get(self) -> T:
        """The object of this name. Call it in kernels, and in other code that is not traced.

        In traced code, such as a fake impl, torch raises an error, because what the code reads from the object would
        become part of the graph for all names.

        Raises:
            UnboundNameError: no live object has the name in this process.
        """
        bound = _bound.get(self._name)
        target = None if bound is None else bound.target()
        if target is None:
            raise UnboundNameError(
                f"no object in this process has the name {self._name!r}",
                expected=f"one of {brief(sorted(_bound))}" if _bound else None,
                fix=f"Named({self._name!r}, target), and keep the target: it is held weakly",
            )
        return cast(T, target)

    @property
    def real_obj(self) -> Any:
        """What inductor asks for when it packs an object into a file; an error of torch's kind, for ``hasattr``."""
        raise _NotPackedError(
            f"AOTInductor cannot pack {self!r}: its files hold values and tensors",
            fix="export and save the program as it is, or pass a str in place of the Named",
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Named) and self._name == other._name

    def __hash__(self) -> int:
        return hash((Named, self._name))

    def __repr__(self) -> str:
        return f"Named({self._name!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._name,)


def _release(name: str, target: weakref.ref[Any]) -> None:
    with _lock:
        bound = _bound.get(name)
        if bound is not None and bound.target is target:
            del _bound[name]


_torch.schema.register_opaque(Named)
