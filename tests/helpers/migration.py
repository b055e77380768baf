"""One op, registered by a helper of `examples/migrate` and by hand on `torch.library`, held against each other."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.library import Library
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves, tree_map_only

ROOT = Path(__file__).parents[2]
Fn = Callable[..., Any]


def load(path: Path) -> ModuleType:
    """A file as a module, which is in `sys.modules` by its stem."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def forget(module: ModuleType) -> None:
    """What `load` brought is gone, and the libraries that it made."""
    del sys.modules[module.__name__]
    for value in vars(module).values():
        if isinstance(value, Library):
            value._destroy()


def fresh(args: Any) -> Any:
    return tree_map_only(Tensor, Tensor.clone, args)


@dataclass(frozen=True)
class Twins:
    """The two ops, called in the same way, and the function that is the kernel of both."""

    ours: Fn
    theirs: Fn
    kernel: Fn
    #: Of a size: the positional arguments of a call.
    arguments: Callable[[int], tuple[Any, ...]]

    def check(self) -> None:
        """Values, what is written, fakes with numbers and with symbols for sizes, compiled code of two sizes."""
        self.check_eager()
        for env in (lambda: None, ShapeEnv):
            ours, theirs = (on_fakes(op, self.arguments(3), env()) for op in (self.ours, self.theirs))
            assert ours == theirs
        self.check_compiled()

    def check_eager(self) -> None:
        assert signature(self.ours) == signature(self.theirs)
        for size in (3, 5):
            args = self.arguments(size)
            for op in (self.ours, self.theirs):
                assert_close(outcome(op, args), outcome(self.kernel, args))

    def check_compiled(self) -> None:
        def program(args: Any, same_args: Any) -> tuple[Any, Any]:
            return self.ours(*args), self.theirs(*same_args)

        compiled = torch.compile(program, fullgraph=True, dynamic=True, backend="aot_eager")
        for size in (3, 5):
            args = self.arguments(size)
            both = fresh(args), fresh(args)
            results = compiled(*both)
            for result, written in zip(results, both, strict=True):
                assert_close((result, tensors_in(written)), outcome(self.kernel, args))


def signature(op: Any) -> str:
    """The schema without the namespace."""
    return str(overload(op)._schema).partition("::")[2]


def overload(op: Any) -> Any:
    """The `OpOverload` of an op's object, of a packet, or of a function that has an op."""
    op = getattr(op, "_op_of", op)
    return getattr(op, "_opoverload", None) or op.default


def outcome(fn: Fn, args: tuple[Any, ...]) -> tuple[Any, Any]:
    """What a call returns, and what it makes of its arguments."""
    args = fresh(args)
    return fn(*args), tensors_in(args)


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def on_fakes(op: Fn, args: tuple[Any, ...], shape_env: ShapeEnv | None) -> list[str]:
    """What a call returns where tensors have no data."""
    with FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=False) as mode:
        result = op(*tree_map_only(Tensor, mode.from_tensor, args))
    return [f"{tuple(x.shape)} {x.stride()} {x.dtype} {x.device}" for x in tensors_in(result)]


def message(call: Callable[[], Any]) -> str:
    """Of the error that a call raises."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 (whichever)
        call()
    return str(caught.value)
