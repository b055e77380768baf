"""What the environment says of how ops are called: it is for who runs a program, so it counts most."""

from __future__ import annotations

import os
from typing import Any

from customops.errors import DefinitionError, brief

_SWITCH = {"0": False, "1": True}

#: For each option, the values that its variable may have.
VALUES: dict[str, dict[str, Any]] = {
    "check": {each: each for each in ("always", "first", "never")},
    "bypass": _SWITCH,
    "eager": _SWITCH,
    "direct_in_graphs": _SWITCH,
}


def variable_of(option: str) -> str:
    return f"CUSTOMOPS_{option.upper()}"


def of_environment(option: str, op: str) -> Any:
    """What the environment says of an option for an op, or None.

    The variable has a value for all ops, values for the ops of namespaces, or both: ``"never,mylib=always"``. That of
    the namespace counts more.

    Raises:
        DefinitionError: there is no such value.
    """
    text = os.environ.get(variable_of(option))
    if not text:
        return None
    values = VALUES[option]
    found: dict[str, Any] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        namespace, equals, value = (each.strip() for each in part.rpartition("="))
        if value not in values or (equals and not namespace):
            raise DefinitionError(
                f"the environment variable {variable_of(option)} has an invalid value",
                op=op,
                expected=f"{expected(option)}; for one namespace: {op.partition('::')[0]}={next(iter(values))}",
                got=brief(part),
            )
        found[namespace] = values[value]
    return found.get(op.partition("::")[0], found.get(""))


def expected(option: str) -> str:
    """The values of a variable, for messages."""
    *others, last = (f'"{each}"' for each in VALUES[option])
    return f"{', '.join(others)} or {last}"
