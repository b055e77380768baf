"""`customops.check`: try an operator on inputs derived from its samples, and report what is wrong with it."""

from customops.checking._check import check
from customops.checking._data import Result
from customops.checking.report import Failure, Report

__all__ = ["Failure", "Report", "Result", "check"]
