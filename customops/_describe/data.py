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
    """One thing that is known of an op: a kernel, the fake impl, the backward, ...

    Attributes:
        kind: "kernel", "out", "fake", "backward", "jvp", "vmap", "autocast", "torch_dispatch", "decomposition",
            "lowering", "replacement", "impl", "effect", "samples", "sharding".
        target: what it is for: a device type, a class, a compiler, a dispatch key; "" if there is one for everything.
        name: of the function, or the value.
        where: ``file:line`` of the function, "" if it has none.
        registered: ``file:line`` of the call that registered it, "" if nobody did or it is not known.
        origin: how it came to be there.
        note: what else is to be said.
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
    """Does a feature work with the op? Else what is missing, and the call that adds it.

    Attributes:
        feature: "torch.compile", "torch.export", "training", "forward mode", "vmap".
        state: "yes", "slow", "no", "unknown" or "not applicable".
        why: in a few words.
        fix: the call to make, or "".
    """

    feature: str
    state: State
    why: str = ""
    fix: str = ""


@dataclass(frozen=True)
class Step:
    """What one dispatch key does with a call.

    Attributes:
        key: the dispatch key; "call" for what comes before the dispatcher.
        action: "handles", "redispatches", "falls through" or "raises".
        what: what is there, and what it does.
        where: ``file:line`` of it, "" if it is not known.
    """

    key: str
    action: Literal["handles", "redispatches", "falls through", "raises"]
    what: str
    where: str = ""
