"""`Named`: an object that a kernel needs and a graph cannot hold, as an argument of an op."""

from __future__ import annotations

import functools
import threading
import weakref
from typing import Any, Generic, NamedTuple, TypeVar, cast

from customops import _compat
from customops.errors import DefinitionError, UnboundNameError, UnsupportedError, brief, user_source

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


class Named(_compat.schemas.OpaqueBase, Generic[T]):  # type: ignore[misc]
    """The name of an object, as an argument of an op: kernels look the object up with `get`.

    Compiled code takes a `Named` as an input of which it knows nothing, so it is the same code for all names. The
    layers of a model share one graph, where a ``str`` in its place would compile each layer anew. Make it outside of
    compiled code, keep it (as an attribute of the layer, say), and pass it. It is pickled, copied and exported as the
    name; each process says for itself what the name stands for.

    The object is held weakly. When nothing else holds it, its name is free again.

    Args:
        name: any text that is not empty.
        target: what the name stands for from now on, in this process. Without it, nothing changes.
        replace: may `target` take the place of another object that has the name?

    Raises:
        DefinitionError: the name is no text or stands for another object, or `target` cannot be held weakly.

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
        if target is not None:
            _bind(name, target, replace)

    @property
    def name(self) -> str:
        return self._name

    def get(self) -> T:
        """The object of this name: in kernels, and wherever nothing is traced.

        Code that is traced, a fake impl for one, gets torch's error instead: what it reads would be part of the code
        for all names.

        Raises:
            UnboundNameError: no object that is alive has the name in this process.
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


def _bind(name: str, target: Any, replace: bool) -> None:
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


def _release(name: str, target: weakref.ref[Any]) -> None:
    with _lock:
        bound = _bound.get(name)
        if bound is not None and bound.target is target:
            del _bound[name]


_compat.schemas.register_opaque(Named)
