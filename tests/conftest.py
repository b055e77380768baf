"""Fixtures that keep tests apart: a registry, a namespace, fixed seeds, no stale graphs."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import sys
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import pytest
import torch
from helpers import warm
from helpers.functions import double_fn
from helpers.isolated import isolated
from torch.library import Library

import customops

_counter = itertools.count()


def pytest_configure(config: pytest.Config) -> None:
    # Tests fork, which a process does not survive that has used CUDA: those that need it have a run of their own.
    if "gpu" not in config.option.markexpr:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Inductor compiles a program to ask which vector instructions there are, in each directory of caches.
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
    # Dynamo collects garbage after each compilation.
    os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")
    # Else pytest's handlers have torch write its structured log, at a tenth of the time of each compilation.
    trace, add = logging.getLogger("torch.__trace"), logging.Logger.addHandler
    trace.addHandler = lambda given: None if type(given).__module__.startswith("_pytest.") else add(trace, given)
    # Workers share the cores, and sums split over threads need not repeat to the last bit.
    torch.set_num_threads(1)
    warm.begin()


def pytest_collection_finish(session: pytest.Session) -> None:
    isolated.chosen = {function for item in session.items for function in functions_of(item)}
    # Torch and the tests are there to stay: collections need not go through millions of objects each time, and seldom
    # find anything.
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


def functions_of(item: pytest.Item) -> list[object]:
    """Return the function of a test, and the functions among its parameters, for a test that calls another."""
    if not isinstance(item, pytest.Function):
        return []
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return [item.function, *(value for value in parameters if isinstance(value, FunctionType))]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--parity", type=int, metavar="ROW", help="run the tests of one row of docs/parity.md")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and make test-gpu"))
    if row := config.getoption("parity"):
        others = [item for item in items if not any(row in mark.args for mark in item.iter_markers("parity"))]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.default_generator.manual_seed(0)  # `torch.manual_seed` formats a stack, for each kind of device


@pytest.fixture(autouse=True)
def _no_device() -> Iterator[None]:
    """A device of one's own is registered in a process of its own (`isolated`): it would stay for all other tests."""
    yield
    assert torch._C._get_privateuse1_backend_name() == "privateuseone"


@pytest.fixture(autouse=True)
def _reset_dynamo() -> Iterator[None]:
    """Drop compiled code after a test, if anything has loaded dynamo; do not load it for that."""
    yield
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()
        # Else each compilation empties the caches of the processor, to measure how long its guards take.
        dynamo.guards.profile_guard_manager = lambda *_: 0.0


@pytest.fixture(autouse=True)
def _inductor_without_vectors(request: pytest.FixtureRequest) -> None:
    """The C++ compiler needs half the time for inductor's code without vector instructions, which are not ours."""
    if request.node.get_closest_marker("compile") or "torch._inductor.config" in sys.modules:
        torch._inductor.config.cpp.simdlen = 1


@pytest.fixture
def registry() -> Iterator[customops.Registry]:
    """A fresh registry, whose ops are removed after the test."""
    fresh = customops.Registry()
    yield fresh
    fresh.clear()


@pytest.fixture(autouse=True)
def few_namespaces() -> Iterator[None]:
    """What `dir(torch.ops)` lists does not grow from test to test: torch.export looks into each, for milliseconds."""
    listed: list[str] = torch.ops._dir
    before = len(listed)
    yield
    listed[before:] = [name for name in listed[before:] if not name.startswith("t_")]


@pytest.fixture
def ns() -> str:
    """A namespace no other test uses, in this process or a parallel one."""
    return f"t_{next(_counter)}_{os.getpid()}"


@pytest.fixture
def double(registry: customops.Registry, ns: str) -> Any:
    """An op without any rule."""
    return registry.custom_op(f"{ns}::double", double_fn, mutates_args=())


@pytest.fixture
def lib(ns: str) -> Iterator[Library]:
    """A library of the user's own."""
    library = Library(ns, "FRAGMENT")
    yield library
    library._destroy()


@pytest.fixture
def foreign(lib: Library, ns: str) -> Iterator[Any]:
    """An op of `lib` with a CPU kernel alone, as the object to register on; registrations on it go after the test."""
    lib.define("foreign(Tensor x) -> Tensor")
    lib.impl("foreign", double_fn, "CPU")
    yield customops.adopt(f"{ns}::foreign")
    customops.default_registry.clear()
