"""What waits for the first use of an op: callbacks of `when_defined`, and entry points."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.functions import add_one, double_fn
from torch import Tensor

import customops
from customops import Registry
from customops._dispatch import names
from customops._op.registry import _report
from customops._torch import library
from customops.errors import DefinitionError, RegistrationError
from customops.testing import run_isolated

# when_defined ---------------------------------------------------------------------------------------------------------


def define_with_customops(registry: Registry, ns: str) -> Any:
    return registry.custom_op(f"{ns}::f", double_fn, mutates_args=())


def define_with_torch(registry: Registry, ns: str) -> Any:
    return torch.library.custom_op(f"{ns}::f", double_fn, mutates_args=())


def define_lazily(registry: Registry, ns: str) -> Any:
    return registry.custom_op(f"{ns}::f", double_fn, mutates_args=(), lazy=True)


def define_with_library(registry: Registry, ns: str) -> Any:
    library = torch.library.Library(ns, "FRAGMENT")
    library.define("f(Tensor x) -> Tensor")
    library.impl("f", double_fn, "CompositeExplicitAutograd")
    return SimpleNamespace(library=library)


def define_with_text(registry: Registry, ns: str) -> Any:
    registry.define(f"{ns}::f", "(Tensor x) -> Tensor")
    registry.impl(f"{ns}::f", "default", double_fn)
    return registry


WAYS = [define_with_customops, define_with_torch, define_lazily, define_with_library, define_with_text]


@pytest.mark.parametrize("define", WAYS)
@pytest.mark.parametrize("before", [False, True])
def test_a_callback_is_called_once(registry: Registry, ns: str, define: Callable[..., Any], before: bool) -> None:
    called = []

    def register(op: Any) -> None:
        called.append(op)
        op.register_kernel("cpu", lambda x: x * 10)

    kept = None if before else define(registry, ns)  # a library ends with its object
    assert registry.when_defined(f"{ns}::f", register) is register
    kept = kept or define(registry, ns)
    assert getattr(torch.ops, ns).f(torch.ones(1)) == 10
    assert len(called) == 1
    assert called[0]._qualname == f"{ns}::f"
    if callable(kept):
        assert kept(torch.ones(1)) == 10


def test_the_object_of_torchs_custom_op_needs_no_look_up(registry: Registry, ns: str) -> None:
    registry.when_defined(f"{ns}::f", lambda op: op.register_kernel("cpu", add_one))
    assert define_with_torch(registry, ns)(torch.ones(2)).tolist() == [2, 2]


def test_a_decorator_with_an_overload(registry: Registry, ns: str) -> None:
    called = []

    @registry.when_defined(f"{ns}::f.other", if_never="skip")
    def _(op: Any) -> None:
        called.append(op)

    library = torch.library.Library(ns, "FRAGMENT")
    library.define("f(Tensor x) -> Tensor")
    _ = getattr(torch.ops, ns).f
    assert called == []
    library.define("f.other(Tensor x, int n) -> Tensor")
    library._destroy()
    library = torch.library.Library(ns, "FRAGMENT")
    library.define("f.other(Tensor x, int n) -> Tensor")
    _ = getattr(torch.ops, ns).f
    assert len(called) == 1
    library._destroy()


def test_a_shared_library_is_seen(registry: Registry, ns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []
    registry.when_defined(f"{ns}::f", called.append)
    kept = []

    def load(path: str) -> None:
        kept.append(define_with_library(registry, ns))

    monkeypatch.setattr("ctypes.CDLL", load)
    torch.ops.load_library(__file__)
    torch.ops.loaded_libraries.discard(__file__)
    assert len(called) == 1


def test_a_callback_that_raises(registry: Registry, ns: str) -> None:
    def fail(op: Any) -> None:
        raise ValueError("no such device\nand more")

    registry.when_defined(f"{ns}::f", fail)
    with pytest.raises(
        RegistrationError, match=r"the callback of when_defined raised ValueError: no such device"
    ) as caught:
        define_with_customops(registry, ns)
    assert "test_first_use.py" in str(caught.value.where)
    assert isinstance(caught.value.__cause__, ValueError)
    assert list(registry) == []
    assert not hasattr(getattr(torch.ops, ns), "f")
    assert define_with_customops(registry, ns)(torch.ones(1)) == 2


def test_callbacks_end_with_their_registry_or_scope(registry: Registry, ns: str) -> None:
    called: list[Any] = []
    other = Registry()
    other.when_defined(f"{ns}::f", called.append)
    other.clear()
    with registry.scope():
        registry.when_defined(f"{ns}::f", called.append)
    define_with_customops(registry, ns)
    assert called == []


def test_what_is_registered_later_does_not_end_with_the_scope_of_that_moment(registry: Registry, ns: str) -> None:
    registry.when_defined(f"{ns}::f", lambda op: op.register_kernel("cpu", add_one))
    library = define_with_library(registry, ns)
    with registry.scope():
        assert getattr(torch.ops, ns).f(torch.ones(2)).tolist() == [2, 2]
    assert getattr(torch.ops, ns).f(torch.ones(2)).tolist() == [2, 2]
    del library


def test_what_was_never_called_is_reported(registry: Registry, ns: str, caplog: pytest.LogCaptureFixture) -> None:
    registry.when_defined(f"{ns}::f", add_one, if_never="report")
    registry.when_defined(f"{ns}::g", add_one)
    with caplog.at_level(logging.WARNING, logger="customops"):
        _report()
    assert f"{ns}::f was never defined: what when_defined was given at {__file__}" in caplog.text
    assert f"{ns}::g" not in caplog.text


def test_wrong_arguments(registry: Registry, ns: str) -> None:
    with pytest.raises(DefinitionError, match="needs a namespace"):
        registry.when_defined("f", add_one)
    with pytest.raises(RegistrationError, match="takes a function"):
        registry.when_defined(f"{ns}::f", 3)  # type: ignore[call-overload]
    with pytest.raises(RegistrationError, match="if_never has an invalid value"):
        registry.when_defined(f"{ns}::f", add_one, if_never="raise")  # type: ignore[call-overload]


@pytest.mark.compile
def test_a_callback_in_compiled_code(registry: Registry, ns: str) -> None:
    registry.when_defined(f"{ns}::f", lambda op: op.register_fake(torch.empty_like))
    library = define_with_library(registry, ns)
    compiled = torch.compile(lambda x: getattr(torch.ops, ns).f(x) + 1, fullgraph=True, backend="aot_eager")
    assert compiled(torch.ones(2)).tolist() == [3, 3]
    del library


# Entry points ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ns: str) -> Iterator[Callable[[str, str], None]]:
    """``install(value, source)``: a package with an entry point for the namespace, and its module."""

    def install(value: str, source: str) -> None:
        metadata = tmp_path / f"{ns}_kernels-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {ns}-kernels\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[customops.ops]\n{ns} = {value}\n")
        (tmp_path / f"{ns}_kernels.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(names, "_entry_points", None)

    yield install
    sys.modules.pop(f"{ns}_kernels", None)
    library._held.pop(ns, None)


DEFINES = """
import torch
from customops import custom_op
assert not torch.is_inference_mode_enabled()

def f(x: torch.Tensor) -> torch.Tensor:
    return x * 3

f = custom_op("{ns}::f", f, mutates_args=())
f.register_fake(torch.empty_like)
assert torch.ops.{ns}.f.default is f._opoverload
"""

REGISTERS = """
from customops import register_kernel
calls = []
def register():
    calls.append(1)
    register_kernel("{ns}::f", "cpu", lambda x: x * 5)
"""


def test_an_entry_point_defines_ops(install: Callable[[str, str], None], ns: str) -> None:
    install(f"{ns}_kernels", DEFINES.format(ns=ns))
    assert f"{ns}_kernels" not in sys.modules
    with torch.inference_mode():
        assert getattr(torch.ops, ns).f(torch.ones(1)) == 3
    assert getattr(torch.ops, ns) is getattr(torch.ops, ns)
    assert ns in torch.ops._dir
    customops.default_registry[f"{ns}::f"].unregister()


def test_an_op_is_found_by_name(install: Callable[[str, str], None], ns: str) -> None:
    install(f"{ns}_kernels", DEFINES.format(ns=ns))
    op = customops.adopt(f"{ns}::f")
    assert op(torch.ones(1)) == 3
    op.unregister()


def by_name(op: Any, ns: str) -> Any:
    return getattr(torch.ops, ns).f(torch.ones(1))


def by_object(op: Any, ns: str) -> Any:
    return op(torch.ones(1))


@pytest.mark.parametrize("call", [by_name, by_object])
@pytest.mark.parametrize("define", [define_with_customops, define_with_torch, define_lazily])
def test_an_entry_point_adds_kernels(
    install: Callable[[str, str], None],
    registry: Registry,
    ns: str,
    define: Callable[..., Any],
    call: Callable[..., Any],
) -> None:
    if define is define_with_torch and call is by_object:
        pytest.skip("a call of torch's object asks nobody")
    install(f"{ns}_kernels:register", REGISTERS.format(ns=ns))
    op = define(registry, ns)
    assert f"{ns}_kernels" not in sys.modules
    for _ in range(2):
        assert call(op, ns) == 5
    assert sys.modules[f"{ns}_kernels"].calls == [1]


def test_a_bypassing_op_uses_its_namespace_too(
    install: Callable[[str, str], None], registry: Registry, ns: str
) -> None:
    install(f"{ns}_kernels:register", REGISTERS.format(ns=ns))
    op = registry.custom_op(f"{ns}::f", double_fn, mutates_args=(), bypass=True)
    assert op(torch.ones(1)) == 5
    assert op(torch.ones(1)) == 5


@pytest.mark.compile
@pytest.mark.parametrize("call", [by_name, by_object])
def test_an_entry_point_in_compiled_code(
    install: Callable[[str, str], None], registry: Registry, ns: str, call: Callable[..., Any]
) -> None:
    install(f"{ns}_kernels:register", REGISTERS.format(ns=ns))
    op = define_with_customops(registry, ns)
    op.register_fake(torch.empty_like)

    def run(x: Tensor) -> Any:
        return (getattr(torch.ops, ns).f if call is by_name else op)(x)

    assert torch.compile(run, fullgraph=True, backend="aot_eager")(torch.ones(2)).tolist() == [5, 5]


@pytest.mark.parametrize(
    ("value", "source", "reason"),
    [
        (
            "{ns}_kernels",
            "import does_not_exist_either",
            "ModuleNotFoundError: No module named .does_not",
        ),
        ("{ns}_kernels:gone", "", "AttributeError"),
        ("{ns}_kernels:fail", "def fail(): raise ValueError('no GPU')", "ValueError: no GPU"),
    ],
)
def test_an_entry_point_that_fails_says_so_each_time(
    install: Callable[[str, str], None], registry: Registry, ns: str, value: str, source: str, reason: str
) -> None:
    install(value.format(ns=ns), source)
    op = define_with_customops(registry, ns)
    for use in (by_name, by_object, by_name):
        with pytest.raises(RegistrationError, match=f"{ns}-kernels for the ops of {ns} raised {reason}") as caught:
            use(op, ns)
        assert f"customops.ops: {ns} = {value.format(ns=ns)}" in str(caught.value)


def test_entry_points_for_torchs_namespaces_are_ignored(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = [SimpleNamespace(name="aten", value="evil:fn")]
    monkeypatch.setattr(names, "_entry_points", None)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: found)
    assert not names.waits("aten")
    assert "evil:fn" in caplog.text


@pytest.mark.process
def test_importing_customops_imports_no_entry_point(
    install: Callable[[str, str], None], ns: str, tmp_path: Path
) -> None:
    install(f"{ns}_kernels", DEFINES.format(ns=ns))
    script = (
        "import sys, torch, customops\n"
        f"print('{ns}_kernels' in sys.modules, customops._dispatch.names._entry_points)\n"
        f"print(torch.ops.{ns}.f(torch.ones(())).item(), '{ns}_kernels' in sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{script}"],
        check=True,
        capture_output=True,
        text=True,
        cwd=Path(customops.__file__).parents[1],
    )
    assert run.stdout.split() == ["False", "None", "3.0", "True"]


@pytest.mark.process
def test_reloading_the_package_changes_torch_once() -> None:
    program = """
import importlib, sys, torch, customops
before = [*sys.meta_path], torch.library.Library.impl
importlib.reload(customops)
result = before == ([*sys.meta_path], torch.library.Library.impl)
"""
    assert run_isolated(program).value is True
