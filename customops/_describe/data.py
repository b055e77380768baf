"""What a description and an explanation hold, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: How something came to be there: registered by the user, defined with the op, derived by customops from what else is
#: there, or put into the dispatcher by others.
Origin = Literal["registered", "with the op", "derived", "others", "missing"]

#: Does a feature of torch work with the op?
State = Literal["yes", "slow", "no", "unknown", "not applicable"]


@dataclass(frozen=True)
class Rule:
    """One kernel or rule of an op, or one that is missing.

    Attributes:
        kind: "kernel", "out", "fake", "backward", "jvp", "vmap", "autocast", "torch_dispatch", "decomposition",
            "lowering", "replacement", "impl", "effect", "samples", "sharding".
        target: what it applies to: a device type, a class, a compiler or a dispatch key; "" if to everything.
        name: the name of the function, or the value.
        where: ``file:line`` of the function; "" if unknown.
        registered: ``file:line`` of the call that registered it; "" if there is none or it is unknown.
        origin: "registered" by the user, defined "with the op", "derived" by customops, registered by "others", or
            "missing".
        note: further information.
    """

    kind: str
    target: str = ""
    name: str = ""
    where: str = ""
    registered: str = ""
    origin: Origin = "registered"
    note: str = ""


@dataclass(frozen=True)
class Support:
    """Whether a feature of torch works with the op; if not, what is missing and which call adds it.

    Attributes:
        feature: "torch.compile", "torch.export", "training", "forward mode", "vmap".
        state: "yes", "slow", "no", "unknown" or "not applicable".
        why: the reason, in a few words.
        fix: the call that adds the feature, or "".
    """

    feature: str
    state: State
    why: str = ""
    fix: str = ""


@dataclass(frozen=True)
class Step:
    """What one dispatch key does with a call.

    Attributes:
        key: the dispatch key; "call" for a step before the dispatcher.
        action: "handles", "redispatches", "falls through" or "raises".
        what: the code at this key, and what it does.
        where: ``file:line`` of that code; "" if unknown.
    """

    key: str
    action: Literal["handles", "redispatches", "falls through", "raises"]
    what: str
    where: str = ""
