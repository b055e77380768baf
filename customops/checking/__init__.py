"""`customops.check`: run the checks on inputs derived from an operator's samples, and report each fault once."""

from customops.checking._check import check
from customops.checking.report import Failure, Report, Result

__all__ = ["Failure", "Report", "Result", "check"]
