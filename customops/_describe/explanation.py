"""`Explanation`: which kernel runs for the arguments of a call, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from customops import _torch
from customops._codegen import bypass
from customops._describe import render
from customops._describe.render import entry, filled, outlined, shorter_place
from customops._describe.rules import Rule, Step, autograd_of_others, of_function, rules_of
from customops._dispatch.call_errors import no_kernel
from customops._dispatch.current_kernel import CurrentKernel
from customops._dispatch.preference import here, names_for
from customops._places import location_of, where
from customops._rules.choice import chooser_of
from customops._schema.defaults import completer
from customops._torch.dispatcher import Entry
from customops._torch.trees import tensors_in
from customops.errors import ArgumentError

#: Keys at which torch itself resolves something of a tensor, and goes on.
_RESOLVED = {
    "Conjugate": "makes conjugate views plain tensors",
    "Negative": "makes negative views plain tensors",
    "ZeroTensor": "makes zeros without memory plain tensors",
    "FuncTorchDynamicLayerBackMode": "goes on with the tensors inside, in the next transform if there is one",
    "Functionalize": "functionalization: the op is called on the tensors inside",
    "PythonTLSSnapshot": "keeps the state of the thread for the mode or subclass below",
    "PythonDispatcher": "a dispatcher in Python that a compiler has put there",
}


class Route:
    """The way of one call of an op, a `CustomOpDef`, with lowered arguments."""

    def __init__(self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.op, self.operator, self.call = op, op._definition, (args, dict(kwargs))
        self.arguments = named(op, args, kwargs)
        types = {argument.name: argument.type for argument in self.operator.schema.arguments}
        #: Those that the dispatcher looks at: not those of optional lists.
        self.tensors = tensors_in([v for name, v in self.arguments.items() if not types[name].endswith("]?")])
        self.entries = _torch.dispatcher.runs_at(op._qualname)
        self.kernels = self.operator.newest_kernels()
        self.rules = [rule for rule in rules_of(op) if rule.origin != "missing"]
        self.kernel: Rule | None = None  #: what runs in the end; None if that cannot be told, or nothing would
        self.steps = list(self._steps())

    def _steps(self) -> Iterator[Step]:
        if torch.overrides.has_torch_function(tuple(self.tensors)):
            yield Step("call", "handles", "the __torch_function__ of a tensor subclass or mode is asked first")
        options = self.operator.options
        if options.skip_dispatcher and bypass.obstacle(self.operator.schema, eager=options.eager) is None:
            option = "eager=True" if options.eager else "bypass=True"
            current = self.operator.find_past_dispatcher(self.tensors)
            if current is not None:
                why = self._run(current, current.device_type or "")
                action: Literal["handles", "raises"] = "handles" if self.kernel is not None else "raises"
                place = self.kernel.where if self.kernel is not None else ""
                yield Step("call", action, f"{option}: runs the kernel without the dispatcher{why}", place)
                return
            yield Step("call", "redispatches", f"{option}, but this call is not plain: the dispatcher is asked")
        keys = list(_torch.dispatcher.in_order(_torch.dispatcher.keys_of_call(self.tensors)))
        while keys:
            step = self._step(keys.pop(0), keys)
            yield step
            if step.action in ("handles", "raises"):
                return
        yield self._backend("Undefined")

    def _step(self, key: str, rest: list[str]) -> Step:
        """What is done at a key; `rest` are the keys after it, which may be changed."""
        entry, schema = self.entries.get(key), self.operator.schema
        if entry is None:
            return self._no_kernel(key)
        if entry.falls_through:
            return Step(key, "falls through", "nothing is there")
        if entry.kind == "math kernel":
            return self._backend(key)
        if key in _RESOLVED:
            return Step(key, "redispatches", _RESOLVED[key])
        if key.startswith("FuncTorch"):
            return self._transform(key)
        if key.startswith("Autograd"):
            return self._autograd(key, entry, rest)
        if key.startswith("Autocast"):
            rule = self._rule("autocast", _torch.dispatcher.device_of_key(key.removeprefix("Autocast")) or "")
            if rule is not None:
                return Step(key, "redispatches", f"casts floating tensors to {rule.name}", rule.registered)
            return self._of_others(key, entry)
        if key == "ADInplaceOrView":
            if schema.mutated:
                return Step(key, "redispatches", f"counts the write to {', '.join(a.name for a in schema.mutated)}")
            if schema.is_view:
                return Step(key, "redispatches", "makes the result a view of its argument")
            return self._of_others(key, entry)
        if key == "Python":
            return self._python(key)
        if key == "BackendSelect":
            value = self.arguments.get(schema.device_argument.name) if schema.device_argument is not None else None
            if self.tensors or value is None:
                return Step(key, "falls through", "tensors say the device")
            rest[:] = [_torch.dispatcher.device_key(torch.device(value).type)]
            return Step(key, "redispatches", f"no tensor says the device, so the argument does: {value}")
        return self._backend(key)

    def _rule(self, kind: str, target: str | None = None) -> Rule | None:
        return next((rule for rule in self.rules if rule.kind == kind and target in (None, rule.target)), None)

    # Above the devices ------------------------------------------------------------------------------------------

    def _transform(self, key: str) -> Step:
        transform = _torch.dispatcher.transform()
        if key == "FuncTorchDynamicLayerFrontMode":
            return Step(key, "redispatches", f"torch.func: {str(transform).lower()} is the innermost transform")
        if key == "FuncTorchBatched" and transform == "Vmap":
            rule = self._rule("vmap")
            what = f"the vmap rule: {rule.name}" if rule is not None and rule.name else "torch's fallback for vmap"
            return Step(key, "handles", f"{what}; it calls the op again, with less", rule.where if rule else "")
        if key == "FuncTorchVmapMode" and self.kernels.get(key) is not None:
            return Step(key, "redispatches", "looks whether a random op may be called here")
        return Step(key, "falls through", "left out of this transform")

    def _autograd(self, key: str, entry: Entry, rest: list[str]) -> Step:
        own = self.kernels.get("Autograd") or self.kernels.get(key)
        if own is None or autograd_of_others(self.operator):
            if entry.kind == "backend fallback":
                return Step(key, "redispatches", "torch's fallback: no gradient is recorded", entry.place)
            return self._of_others(key, entry)
        if own.raw:
            return Step(key, "handles", f"{where(own.fn)}, put there with impl", location_of(own.fn))
        requiring = [
            argument.name
            for argument in self.operator.differentiable.differentiable_args(self.operator.schema)
            if any(tensor.requires_grad for tensor in tensors_in([self.arguments.get(argument.name)]))
        ]
        rule, place = self._rule("backward"), ""
        if not requiring:
            what = "nothing requires grad"
        elif not torch.is_grad_enabled():
            what = f"{requiring[0]} requires grad, but gradient mode is off"
        elif rule is None:
            what = f"{requiring[0]} requires grad: records a node whose backward raises: there is none"
        else:
            what, place = f"{requiring[0]} requires grad: records a node, with the backward {rule.name}", rule.where
        # Does the function of autograd call the kernel without the keys between?
        keyset = _torch.dispatcher.key_set(key)
        for other in (key, *rest):
            if other in self.entries and not self.entries[other].falls_through:
                keyset = keyset | _torch.dispatcher.key_set(other)
        if not _torch.autograd.forward_ad_active() and self.operator.find_fast_path(keyset) is not None:
            rest[:] = rest[-1:]
            what += "; calls the kernel of the device directly"
        return Step(key, "redispatches", what, place)

    def _python(self, key: str) -> Step:
        mode = _torch.dispatcher.active_mode()
        subclass = next((type(t).__name__ for t in self.tensors if type(t) not in (Tensor, torch.nn.Parameter)), None)
        who = str(mode or subclass)
        rule = self._rule("torch_dispatch", who)
        if rule is not None:
            return Step(key, "handles", f"the rule for {who}: {rule.name}", rule.where)
        if mode == "FakeTensorMode" or (mode is None and who == "FakeTensor"):
            return self._fake(key, f"{who}: ")
        what = f"the __torch_dispatch__ of {who}"
        return Step(key, "redispatches", f"{what}; if it calls the op again, the call goes on below")

    def _fake(self, key: str, who: str = "") -> Step:
        self.kernel = rule = self._rule("fake")
        if rule is None:
            return Step(key, "raises", f"{who}there is no fake impl to call; fix: op.register_fake(fn)")
        return Step(key, "handles", f"{who}the fake impl, {rule.name or 'registered outside customops'}", rule.where)

    def _of_others(self, key: str, entry: Entry) -> Step:
        what = "a kernel registered outside customops, which mostly goes on below"
        return Step(key, "redispatches", what, entry.place)

    # Devices ----------------------------------------------------------------------------------------------------

    def _backend(self, key: str) -> Step:
        entry = self.entries.get(key)
        if entry is None:
            return self._no_kernel(key)
        if key == "Meta":
            # Is the function there that of customops or torch alone, which calls the fake impl or raises?
            name = self.op._qualname
            has_one = self.operator.has_own_rules or _torch.library.made_by_torch(name) is not None
            is_alone = "Meta" not in self.kernels and len(_torch.dispatcher.registered_at(name).get("Meta", ())) == 1
            if self._rule("fake") is not None or (has_one and is_alone):
                return self._fake(key)
        device = _torch.dispatcher.device_of_key(key) or key
        at = key if entry.kind == "kernel" else "CompositeExplicitAutograd"
        kernel = self.kernels.get(at)
        if kernel is None or (kernel.current_kernel is None and not kernel.raw):
            self.kernel = Rule("kernel", device, where=entry.place, origin="others")
            return Step(key, "handles", "a kernel registered outside customops", entry.place)
        why = f"the kernel for {device}" if at == key else f"no kernel for {device} alone: that for other devices"
        if kernel.raw:
            self.kernel, chosen = of_function("kernel", kernel.fn, "", target=device), ""
        else:
            chosen = self._run(kernel.current_kernel, device)
        if self.kernel is None:
            return Step(key, "raises", f"no kernel takes these arguments{chosen}")
        return Step(key, "handles", f"{why}, {self.kernel.name}{chosen}", self.kernel.where)

    def _run(self, current: CurrentKernel, device: str) -> str:
        """Set the kernel that runs; of several the one that is chosen, and return why it is that one."""
        chooser, fn = chooser_of(current), current.registered
        if chooser is None:
            self.kernel = of_function("kernel", fn, "", target=device)
            return ""
        call = completer(self.operator.schema)(*self.call)
        chosen, refused = chooser.asked(here(), *call)
        reasons = "".join(f"; not {name}: {reason}" for name, reason in refused.items())
        if (kept := chooser.kept(*call)) not in (None, chosen):
            chosen, reasons = kept, "; chosen by an earlier call with the same key, and kept"
        if chosen is None:
            return reasons
        self.kernel = replace(of_function("kernel", chosen.fn, "", target=device), note=f"named {chosen.name}")
        stored, why = None if chooser.stored is None else chooser.stored(chooser.buckets, *call), ""
        if chosen.name in names_for(self.operator.qualname, here()):
            why = ", preferred"
        elif stored is not None and stored[0] == chosen.name:
            why = f", tuned ({stored[1]})"
        elif stored is None and chooser.stored is not None:
            hardware, bucket = chooser.stored.at(chooser.buckets, *call)
            others = sorted({each for each, _ in chooser.stored.choices})
            why = f", not tuned for {bucket if hardware in others else f'{hardware}, but for ' + ', '.join(others)}"
        return f", named {chosen.name}, one of {len(chooser.kernels)}{why}{reasons}"

    def _no_kernel(self, key: str) -> Step:
        return Step(key, "raises", f"no kernel here; fix: {no_kernel(self.operator.qualname, key).fix}")


def named(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The lowered arguments of a call by their names. Raises ArgumentError if they are not those of the op."""
    schema = op._definition.schema
    given: dict[str, Any] = schema.by_name(args, kwargs)
    most = len(schema.positional)
    if len(args) > most:
        problem: str | None = f"{len(args)} arguments by position, of {most}"
    elif unknown := [name for name in kwargs if name not in {argument.name for argument in schema.arguments}]:
        problem = f"there is no argument {unknown[0]!r}"
    elif lacking := [a.name for a in schema.arguments if not a.has_default and a.name not in given]:
        problem = f"{lacking[0]!r} is missing"
    else:
        problem = _torch.library.why_refused(op._definition.name.packet, args, kwargs)
    if problem is not None:
        raise ArgumentError("the arguments are not those of the op", op=op._qualname, expected=str(schema), got=problem)
    return given


@dataclass(frozen=True, repr=False)
class Explanation(render.Shown):
    """Which kernel runs for a call, and why. ``print(explanation)`` shows it as text.

    Attributes:
        op: qualified name.
        arguments: a short text for each value, by argument name.
        steps: what each dispatch key of the call does, in the order of the dispatcher.
        kernel: the kernel or fake impl that runs last. None if the call raises, or if other code decides what runs,
            such as a vmap rule or a tensor subclass; the last step names it.
    """

    op: str
    arguments: dict[str, str]
    steps: tuple[Step, ...]
    kernel: Rule | None

    @classmethod
    def of(cls, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Explanation:
        """Explain a call of a `CustomOpDef`. No code of the op runs, but the predicates of several kernels."""
        if op._definition.removed is not None:
            raise op._definition.removed
        route = Route(op, *op.lower(*args, **kwargs))
        arguments = {name: outlined(value) for name, value in route.arguments.items()}
        return cls(op._qualname, arguments, tuple(route.steps), route.kernel)

    @property
    def raises(self) -> bool:
        """True if the call would raise because a kernel or a fake impl is missing."""
        return bool(self.steps) and self.steps[-1].action == "raises"

    def _lines(self, width: int) -> Iterator[str]:
        arguments = ", ".join(f"{name}: {value}" for name, value in self.arguments.items())
        yield filled(f"{self.op}({arguments})", width, rest="    ")
        column = max(len(step.key) for step in self.steps) + 2
        for step in self.steps:
            place = f" ({shorter_place(step.where, width - 30)})" if step.where else ""
            yield entry(step.key, f"{step.action}: {step.what}{place}", width, column=column)
        yield entry("=>", self._result(), width, column=column)

    def _result(self) -> str:
        if self.raises:
            return "the call raises"
        if self.kernel is None:
            return f"decided at {self.steps[-1].key}"
        name = self.kernel.name or f"the {self.kernel.kind} registered outside customops"
        return f"{name} ({shorter_place(self.kernel.where)})" if self.kernel.where else name
