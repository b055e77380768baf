"""The overload that a user means."""

from __future__ import annotations

from typing import Any

import torch

from customops import _compat
from customops._compat.libraries import OpOverload, OpOverloadPacket
from customops._dispatch import first_use
from customops._dispatch.name import Name
from customops.errors import DefinitionError, RegistrationError, brief, did_you_mean


def find_op(op: Any) -> OpOverload:
    """The overload that a user means by an OpOverload, a packet, a name, or torch's own CustomOpDef."""
    overload = getattr(op, "_opoverload", op)
    if isinstance(overload, OpOverload):
        return overload
    if isinstance(op, OpOverloadPacket):
        return only_overload(op)
    if not isinstance(op, str):
        raise DefinitionError(
            "expected an operator", expected='a CustomOpDef, an OpOverload or "ns::name"', got=brief(op)
        )
    name = Name.parse(op.removesuffix(".default"))
    found = _compat.libraries.find_overload(name.packet, name.overload)
    if found is None:
        first_use.look_up(name.packet)
        found = _compat.libraries.find_overload(name.packet, name.overload)
    if found is None:
        raise RegistrationError(
            "there is no such operator",
            op=op,
            fix=did_you_mean(op, (f"{name.namespace}::{each}" for each in vars(torch.ops).get(name.namespace, ())))
            or "define it first, or import the library that does; overloads are named ns::name.overload",
        )
    return found


def only_overload(packet: OpOverloadPacket) -> OpOverload:
    names = packet.overloads()
    if len(names) != 1:
        raise RegistrationError(
            f"{packet} has several overloads", got=", ".join(names), fix=f"e.g. {packet}.{names[0]}"
        )
    overload: OpOverload = getattr(packet, names[0])
    return overload
