"""Generated tests for operators: run the tests of a project, and check each operator call as `opcheck` does.

`generate_opcheck_tests` adds the tests to a test class. A `FailuresDict` lists those that are known to fail. The checks
can also be called one by one.
"""

from __future__ import annotations

from customops.checks import aot_autograd_check, autograd_registration_check, fake_check
from customops.errors import OpCheckError
from customops.testing._isolation_outcome import Isolated, IsolationError
from customops.testing.assertions import assert_raises_regex
from customops.testing.failures import FailuresDict, FailuresDictError, validate_failures_dict_structure
from customops.testing.generate import (
    DEFAULT_TEST_UTILS,
    DEPRECATED_DEFAULT_TEST_UTILS,
    GenerationError,
    dontGenerateOpCheckTests,
    generate_opcheck_tests,
)
from customops.testing.isolation import run_each_isolated, run_isolated
from customops.testing.mode import OpCheckMode, is_inside_opcheck_mode
from customops.testing.repro import generate_repro
from customops.testing.tracing import make_fx_check

__all__ = [
    "DEFAULT_TEST_UTILS",
    "DEPRECATED_DEFAULT_TEST_UTILS",
    "FailuresDict",
    "FailuresDictError",
    "GenerationError",
    "Isolated",
    "IsolationError",
    "OpCheckError",
    "OpCheckMode",
    "aot_autograd_check",
    "assert_raises_regex",
    "autograd_registration_check",
    "dontGenerateOpCheckTests",
    "fake_check",
    "generate_opcheck_tests",
    "generate_repro",
    "is_inside_opcheck_mode",
    "make_fx_check",
    "run_each_isolated",
    "run_isolated",
    "validate_failures_dict_structure",
]
