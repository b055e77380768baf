"""Tests made from tests: each test of a class, once for each check of the operators that it calls."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import unittest
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from customops import _torch
from customops.checks import CHECKS, DEFAULT_CHECKS, Trial
from customops.errors import CheckError, CustomOpsError
from customops.testing.failures import FailuresDict, accepts_changes, validate_failures_dict_structure
from customops.testing.watch import OpCheckMode

_F = TypeVar("_F", bound=Callable[..., Any])
_Test = Callable[..., Any]
DEFAULT_TEST_UTILS = list(DEFAULT_CHECKS)
#: `DEFAULT_TEST_UTILS` and test_aot_dispatch_static, for older test suites.
DEPRECATED_DEFAULT_TEST_UTILS = [*DEFAULT_TEST_UTILS, "test_aot_dispatch_static"]
_STATIC = "test_aot_dispatch_static"
_NOT_GENERATED = "_customops_no_opcheck_tests"
_GENERATED = "_customops_opcheck_test"


class GenerationError(CustomOpsError, RuntimeError):
    """Tests cannot be generated."""


def dontGenerateOpCheckTests(reason: str) -> Callable[[_F], _F]:
    """Decorator that excludes a test from `generate_opcheck_tests`. The reason is documentation only."""
    if not isinstance(reason, str):
        raise GenerationError("a reason is missing", fix='write @dontGenerateOpCheckTests("why")')

    def mark(test: _F) -> _F:
        setattr(test, _NOT_GENERATED, reason)
        return test

    return mark


def generate_opcheck_tests(
    testcase: type,
    namespaces: Sequence[str],
    failures_dict_path: str | os.PathLike[str] | None = None,
    additional_decorators: Mapping[str, Iterable[Callable[[Any], Any]]] | None = None,
    test_utils: Sequence[str] = DEFAULT_TEST_UTILS,
) -> None:
    """Add a test ``{check}__{test}`` to a test class for each of its tests and each check.

    A generated test runs the original test, and the check on each call of an operator of `namespaces`; see
    `OpCheckMode`. For each operator in the failures file there is also a test ``test_pt2_compliant_tag_{ns_name}``. It
    asserts that an operator with the tag pt2_compliant_tag has no known failures, except of test_aot_dispatch_static.

    Args:
        testcase: a `unittest.TestCase`, or a class that pytest collects.
        namespaces: the namespaces of the operators to check.
        failures_dict_path: the failures file. By default failures_dict.json in the directory of the caller's file; if
            it does not exist, no failures are known.
        additional_decorators: decorators for generated tests, by name of the test.
        test_utils: names of checks, keys of `customops.checks.CHECKS`.

    Raises:
        GenerationError: there is no such check.
        FailuresDictError: the failures file is invalid, or does not match the tests.
    """
    caller = sys._getframe(1).f_code.co_filename
    if failures_dict_path is not None:
        failures = FailuresDict.load(failures_dict_path, create_file=accepts_changes())
    else:
        default = os.path.join(os.path.dirname(os.path.abspath(caller)), "failures_dict.json")
        failures = FailuresDict.load(default) if os.path.exists(default) else FailuresDict(default, {})
    checks = (test_utils,) if isinstance(test_utils, str) else tuple(test_utils)
    unknown = [name for name in checks if name not in CHECKS]
    if unknown:
        raise GenerationError("there are no such checks", expected=", ".join(CHECKS), got=", ".join(unknown))
    validate_failures_dict_structure(failures, checks, testcase)
    originals = [name for name in dir(testcase) if name.startswith("test_") and callable(getattr(testcase, name))]
    tests = {
        f"{check}__{name}": _checked_test(testcase, name, check, namespaces, failures)
        for name in originals
        if not any(hasattr(getattr(testcase, name), mark) for mark in (_NOT_GENERATED, _GENERATED))
        for check in checks
    }
    for qualname, entries in failures.data.items():
        name = "test_pt2_compliant_tag_" + qualname.replace("::", "_").replace(".", "_")
        if name in tests:
            raise GenerationError(f"two operators of the failures file would have a test {name}", op=qualname)
        known = [test for test, entry in entries.items() if entry["status"] == "xfail"]
        tests[name] = _tag_test(qualname, [test for test in known if not test.partition(".")[2].startswith(_STATIC)])
    for name, test in tests.items():
        inherited = getattr(testcase, name, None)
        if inherited is not None and (name in vars(testcase) or not hasattr(inherited, _GENERATED)):
            fix = "generate tests once for a class, after the class; rename a test of this name"
            raise GenerationError(f"the class {testcase.__name__} already has a {name}", fix=fix)
        test.__name__ = name
        test.__qualname__ = f"{testcase.__qualname__}.{name}"
        for decorator in (additional_decorators or {}).get(name, ()):
            test = decorator(test)
        setattr(test, _GENERATED, True)
        setattr(testcase, name, test)


def _checked_test(testcase: type, name: str, check: str, namespaces: Sequence[str], failures: FailuresDict) -> _Test:
    original, test_name = getattr(testcase, name), f"{testcase.__name__}.{check}__{name}"

    def util(op: _torch.library.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        CHECKS[check](Trial(op, args, kwargs))

    mode = functools.partial(OpCheckMode, namespaces, check, util, failures, test_name, failures.path)

    @functools.wraps(original)
    def test(*args: Any, **kwargs: Any) -> Any:
        with mode():
            return original(*args, **kwargs)

    @functools.wraps(original)
    async def async_test(*args: Any, **kwargs: Any) -> Any:
        with mode():
            return await original(*args, **kwargs)

    checked: _Test = async_test if inspect.iscoroutinefunction(original) else test
    marks = getattr(checked, "pytestmark", ())
    if any(mark.name == "opcheck_only_one" for mark in marks):
        checked.pytestmark = [_first_case(mark) for mark in marks]  # type: ignore[attr-defined]
    return checked


def _first_case(mark: Any) -> Any:
    """For a test marked opcheck_only_one: a parametrization (other than of devices) reduced to its first case."""
    if mark.name != "parametrize" or mark.args[0] == "device":
        return mark
    names, values = mark.args
    options = {key: value[:1] if key == "ids" and not callable(value) else value for key, value in mark.kwargs.items()}
    pytest: Any = sys.modules["pytest"]  # whose marks these are
    return pytest.mark.parametrize(names, list(values)[:1], **options)


def _tag_test(qualname: str, failing: list[str]) -> _Test:
    def compliant(_self: Any) -> None:
        name, _, overload = qualname.partition(".")
        known = "::" in name
        op = _torch.library.find_overload(name, "" if overload == "default" else overload) if known else None
        if op is None:
            raise unittest.SkipTest(f"Can't import operator {qualname}")
        if failing and torch.Tag.pt2_compliant_tag in op.tags:
            problem = "the operator is tagged as pt2_compliant_tag, and is known to fail generated tests"
            fix = "correct the operator, or leave out the tag"
            raise CheckError(problem, op=qualname, got=", ".join(failing), fix=fix)

    return compliant
