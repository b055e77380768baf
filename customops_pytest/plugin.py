"""The options, markers and the fixture. pytest imports this in each run: it loads neither torch nor `customops`."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator
from typing import Any

import pytest

#: What is loaded for an option.
_MODULES = {
    "customops": "customops_pytest.collecting",
    "customops_mode": "customops_pytest.watching",
    "customops_update": "customops_pytest.session",
}


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    # pytest rewrites the asserts of all that is installed with a plugin, at 0.3 s an import: here that is all of
    # customops, where they are not for tests.
    getattr(pluginmanager.rewrite_hook, "_must_rewrite", set()).discard("customops")
    add = parser.getgroup("customops", "checks of custom operators (customops)").addoption
    repeated: dict[str, Any] = {"action": "append", "default": []}
    add(
        "--customops",
        **repeated,
        metavar="TARGET",
        help="collect the checks of the ops of a module, file or folder, over their samples; may be repeated. Without "
        "other arguments nothing else is collected.",
    )
    add(
        "--customops-effort",
        choices=("quick", "normal", "thorough"),
        default="normal",
        help='how much --customops tries, as effort= of customops.check; by default "normal"',
    )
    add(
        "--customops-checks",
        **repeated,
        metavar="NAMES",
        help="only these checks, e.g. test_faketensor,test_gradients; may be repeated",
    )
    add(
        "--customops-ops", **repeated, metavar="PATTERN", help='only ops of this name, e.g. "mylib::*"; may be repeated'
    )
    add(
        "--customops-mode",
        nargs="?",
        const="sample",
        type=_mode,
        metavar="sample|all",
        help="check the ops that tests call: each kind of input once (sample), or once in each test (all)",
    )
    add(
        "--customops-expected",
        metavar="FILE",
        help="which checks are expected to fail, a TOML file, or a failures dict of torch in JSON; by default "
        "customops_expected.toml in the root directory",
    )
    add(
        "--customops-update",
        action="store_true",
        help="write what fails and what does not to the file of --customops-expected, instead of failing",
    )
    parser.addini("customops_expected", "the file of --customops-expected, relative to the root directory")


def _mode(text: str) -> str:
    if text in ("sample", "all"):
        return text
    # An option with an optional value takes the word after it, whatever that is.
    raise argparse.ArgumentTypeError(f"it takes sample or all: write --customops-mode=sample {text}")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "customops_xfail(op, *checks, reason): these checks of an op, or all, are expected to fail in this test; "
        "strict. It acts on --customops-mode and on the fixture opcheck.",
    )
    config.addinivalue_line("markers", "customops: a check of an op, collected by --customops")
    # Is --customops all that was asked for? Not if it is always on, as part of the configuration.
    given = [str(arg).partition("=")[0] for arg in config.invocation_params.args]
    if "--customops" in given and config.args_source is not config.ArgsSource.ARGS:
        config.args = []
    for option, module in _MODULES.items():
        if getattr(config.option, option):
            config.pluginmanager.register(importlib.import_module(module), module)


@pytest.fixture
def opcheck(request: pytest.FixtureRequest) -> Iterator[Any]:
    """`customops.opcheck`, for which checks that are expected to fail may do so: ``opcheck(op, args, kwargs)``.

    Without arguments, ``opcheck(op)``, it checks the samples of the op. See `customops_pytest.fixture.OpCheck`.
    """
    from customops_pytest.fixture import OpCheck

    check = OpCheck(request.node)
    yield check
    check.finish()


@pytest.fixture
def customops_check(request: pytest.FixtureRequest) -> Iterator[Any]:
    """`customops.check`, for which checks that are expected to fail may do so: ``customops_check(op, samples)``.

    Without samples it derives inputs from those of the op. See `customops_pytest.fixture.DerivedCheck`.
    """
    from customops_pytest.fixture import DerivedCheck

    check = DerivedCheck(request.node)
    yield check
    check.finish()
