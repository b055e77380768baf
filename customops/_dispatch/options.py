"""The options of an op's calls, and what environment variables set in their place."""

from __future__ import annotations

import os
from typing import Any, Literal, NamedTuple, cast, get_args

from customops.errors import DefinitionError, brief

#: When the result of a kernel is checked: in each call, in the first call of each kernel, or never.
CheckPolicy = Literal["always", "first", "never"]
_POLICIES = get_args(CheckPolicy)


class Options(NamedTuple):
    """The options of the calls of an op."""

    check: CheckPolicy = "always"
    bypass: bool = False
    eager: bool = False
    #: Whether compiled graphs may call the kernel without the dispatcher.
    direct_in_graphs: bool = True
    #: Whether compilers choose among several kernels when they trace. Otherwise each call chooses.
    choose_when_traced: bool = True

    @property
    def skip_dispatcher(self) -> bool:
        """Return whether calls of the object may run the kernel without the dispatcher."""
        return self.bypass or self.eager


DEFAULTS = Options()

# Environment variables: who runs a program sets them, so they take precedence over definitions ------------------------

_SWITCH = {"0": False, "1": True}

#: For each option, the values that its variable may have.
VALUES: dict[str, dict[str, Any]] = {
    **{option: {each: each for each in ("always", "first", "never")} for option in ("check", "backend_check")},
    "bypass": _SWITCH,
    "eager": _SWITCH,
    "direct_in_graphs": _SWITCH,
    "choose_when_traced": _SWITCH,
}


def of_environment(option: str, op: str) -> Any:
    """Return the value of an option that an environment variable sets for an op, or None.

    The variable has a value for all ops, values for namespaces, which take precedence, or both: "never,mylib=always".

    Raises:
        DefinitionError: the variable has an invalid value.
    """
    variable = f"CUSTOMOPS_{option.upper()}"
    text = os.environ.get(variable)
    if not text:
        return None
    values = VALUES[option]
    found: dict[str, Any] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        namespace, equals, value = (each.strip() for each in part.rpartition("="))
        if value not in values or (equals and not namespace):
            raise DefinitionError(
                f"the environment variable {variable} has an invalid value",
                op=op,
                expected=f"{expected(option)}; for one namespace: {op.partition('::')[0]}={next(iter(values))}",
                got=brief(part),
            )
        found[namespace] = values[value]
    return found.get(op.partition("::")[0], found.get(""))


def expected(option: str) -> str:
    """Return the values that a variable can have, for messages."""
    *others, last = (f'"{each}"' for each in VALUES[option])
    return f"{', '.join(others)} or {last}"


def check_policy(given: Any, op: str, option: str = "check") -> CheckPolicy:
    """Return the check policy: of the environment, else the one that the definition gives."""
    if given is not None and given not in _POLICIES:
        raise DefinitionError("check= has an invalid value", op=op, expected=expected("check"), got=brief(given))
    return cast(CheckPolicy, of_environment(option, op) or given or "always")
