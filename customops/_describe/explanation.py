"""`Explanation`: which kernel runs for the arguments of a call, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from customops import _torch
from customops._codegen import bypass
from customops._describe import render
from customops._describe.render import entry, filled, outlined, shorter_place
from customops._describe.rules import Rule, Step, autograd_of_others, of_function, rules_of
from customops._dispatch.results import tensors_in
from customops._torch.dispatcher import Entry
from customops.errors import ArgumentError, location_of, where

#: Keys at which torch itself resolves something of a tensor, and goes on.
_RESOLVED = {
    "Conjugate": "makes conjugate views plain tensors",
    "Negative": "makes negative views plain tensors",
    "ZeroTensor": "makes zeros without memory plain tensors",
    "Functionalize": "functionalization: the op is called on the tensors inside",
    "PythonTLSSnapshot": "keeps the state of the thread for the mode or subclass below",
    "PythonDispatcher": "a dispatcher in Python that a compiler has put there",
}


class Route:
    """The way of one call of an op, a `CustomOpDef`, with lowered arguments.

    Attributes:
        arguments: by name.
        steps: in the order of the call.
        kernel: what runs in the end; None if that cannot be told, or nothing would.
    """

    def __init__(self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.op, self.operator = op, op._definition
        self.arguments = named(op, args, kwargs)
        types = {argument.name: argument.type for argument in self.operator.schema.arguments}
        #: Those that the dispatcher looks at: not those of optional lists.
        self.tensors = tensors_in([v for name, v in self.arguments.items() if not types[name].endswith("]?")])
        self.entries = _torch.dispatcher.runs_at(op._qualname)
        self.rules = rules_of(op)
        self.kernel: Rule | None = None
        self.steps = list(self._steps())

    def _steps(self) -> Iterator[Step]:
        if torch.overrides.has_torch_function(tuple(self.tensors)):
            yield Step("call", "handles", "the __torch_function__ of a tensor subclass or mode is asked first")
        options = self.operator.options
        if options.skip_dispatcher and bypass.obstacle(self.operator.schema, eager=options.eager) is None:
            said = "eager=True" if options.eager else "bypass=True"
            current = self.operator.find_past_dispatcher(self.tensors)
            if current is not None:
                self.kernel = of_function("kernel", current.registered, "", target=current.device_type or "")
                yield Step("call", "handles", f"{said}: runs the kernel without the dispatcher", self.kernel.where)
                return
            yield Step("call", "redispatches", f"{said}, but this call is not plain: the dispatcher is asked")
        names = list(_torch.dispatcher.in_order(_torch.dispatcher.keys_of_call(self.tensors)))
        while names:
            for step in self._step(names.pop(0), names):
                yield step
                if step.action in ("handles", "raises"):
                    return
        yield self._backend("Undefined")

    def _step(self, key: str, rest: list[str]) -> Iterator[Step]:
        """What is done at a key; `rest` are the keys after it, which may be changed."""
        entry = self.entries.get(key)
        if entry is None:
            yield self._no_kernel(key)
        elif entry.falls_through:
            yield Step(key, "falls through", "nothing is there")
        elif entry.kind == "math kernel":
            yield self._backend(key)
        elif key.startswith("FuncTorch"):
            yield from self._transform(key, rest)
        elif key in _RESOLVED:
            yield Step(key, "redispatches", _RESOLVED[key])
        elif key.startswith("Autocast"):
            yield self._autocast(key, entry)
        elif key.startswith("Autograd"):
            yield self._autograd(key, entry, rest)
        elif key == "ADInplaceOrView":
            yield self._inplace_or_view(key, entry)
        elif key == "Python":
            yield self._python(key)
        elif key == "BackendSelect":
            yield self._select(key, rest)
        else:
            yield self._backend(key)

    def _rule(self, kind: str, target: str | None = None) -> Rule | None:
        found = (rule for rule in self.rules if rule.kind == kind and target in (None, rule.target))
        return next((rule for rule in found if rule.origin != "missing"), None)

    # Above the devices ------------------------------------------------------------------------------------------

    def _transform(self, key: str, rest: list[str]) -> Iterator[Step]:
        transform = _torch.dispatcher.transform()
        if key == "FuncTorchDynamicLayerFrontMode":
            yield Step(key, "redispatches", f"torch.func: {str(transform).lower()} is the innermost transform")
        elif key == "FuncTorchDynamicLayerBackMode":
            yield Step(key, "redispatches", "goes on with the tensors inside, in the next transform if there is one")
        elif key == "FuncTorchBatched" and transform == "Vmap":
            rule = self._rule("vmap")
            what = f"the vmap rule: {rule.name}" if rule is not None and rule.name else "torch's fallback for vmap"
            yield Step(key, "handles", f"{what}; it calls the op again, with less", rule.where if rule else "")
        elif key == "FuncTorchVmapMode" and self.operator.newest_kernels().get(key) is not None:
            yield Step(key, "redispatches", "looks whether a random op may be called here")
        else:
            yield Step(key, "falls through", "left out of this transform")

    def _autocast(self, key: str, entry: Entry) -> Step:
        device = _torch.dispatcher.device_of_key(key.removeprefix("Autocast")) or ""
        rule = self._rule("autocast", device)
        if rule is None:
            return self._of_others(key, entry)
        return Step(key, "redispatches", f"casts floating tensors to {rule.name}", rule.registered)

    def _autograd(self, key: str, entry: Entry, rest: list[str]) -> Step:
        own = self.operator.newest_kernels().get("Autograd") or self.operator.newest_kernels().get(key)
        if own is None or autograd_of_others(self.operator):
            if entry.kind == "backend fallback":
                return Step(key, "redispatches", "torch's fallback: no gradient is recorded", entry.place)
            return self._of_others(key, entry)
        if own.raw:
            return Step(key, "handles", f"{where(own.fn)}, put there with impl", location_of(own.fn))
        differentiable = self.operator.differentiable.differentiable_args(self.operator.schema)
        requiring = [
            argument.name
            for argument in differentiable
            if any(tensor.requires_grad for tensor in tensors_in([self.arguments.get(argument.name)]))
        ]
        needs_grad, rule = bool(requiring) and torch.is_grad_enabled(), self._rule("backward")
        if needs_grad and rule is not None:
            what, place = f"{requiring[0]} requires grad: records a node, with the backward {rule.name}", rule.where
        elif needs_grad:
            what, place = f"{requiring[0]} requires grad: records a node whose backward raises: there is none", ""
        else:
            what = f"{requiring[0]} requires grad, but gradient mode is off" if requiring else "nothing requires grad"
            place = ""
        if self._goes_to_kernel([key, *rest]):
            rest[:] = rest[-1:]
            return Step(key, "redispatches", f"{what}; calls the kernel of the device directly", place)
        return Step(key, "redispatches", what, place)

    def _goes_to_kernel(self, keys: list[str]) -> bool:
        """Does the function at the first of these keys, one of autograd, call the kernel without the keys between?"""
        entries, keyset = self.entries, _torch.dispatcher.key_set(keys[0])
        for key in keys:
            if key in entries and not entries[key].falls_through:
                keyset = keyset | _torch.dispatcher.key_set(key)
        forward = _torch.autograd.forward_ad_active()
        return not forward and self.operator.find_fast_path(keyset) is not None

    def _inplace_or_view(self, key: str, entry: Entry) -> Step:
        schema = self.operator.schema
        if schema.mutated:
            return Step(key, "redispatches", f"counts the write to {', '.join(a.name for a in schema.mutated)}")
        if schema.is_view:
            return Step(key, "redispatches", "makes the result a view of its argument")
        return self._of_others(key, entry)

    def _python(self, key: str) -> Step:
        mode = _torch.dispatcher.infra_mode() or _torch.dispatcher.innermost_mode()
        subclass = next((type(t).__name__ for t in self.tensors if type(t) not in (Tensor, torch.nn.Parameter)), None)
        who = str(mode or subclass)
        rule = self._rule("torch_dispatch", who)
        if rule is not None:
            return Step(key, "handles", f"the rule for {who}: {rule.name}", rule.where)
        if mode == "FakeTensorMode" or (mode is None and who == "FakeTensor"):
            return self._fake(key, who)
        what = f"the __torch_dispatch__ of {who}"
        return Step(key, "redispatches", f"{what}; if it calls the op again, the call goes on below")

    def _fake(self, key: str, who: str = "") -> Step:
        rule, prefix = self._rule("fake"), f"{who}: " * bool(who)
        if rule is None:
            return Step(key, "raises", f"{prefix}there is no fake impl to call; fix: op.register_fake(fn)")
        self.kernel = rule
        return Step(key, "handles", f"{prefix}the fake impl, {rule.name or 'registered outside customops'}", rule.where)

    def _select(self, key: str, rest: list[str]) -> Step:
        device = self.operator.schema.device_argument
        value = self.arguments.get(device.name) if device is not None else None
        if self.tensors or value is None:
            return Step(key, "falls through", "tensors say the device")
        rest[:] = [_torch.dispatcher.device_key(torch.device(value).type)]
        return Step(key, "redispatches", f"no tensor says the device, so the argument does: {value}")

    def _of_others(self, key: str, entry: Entry) -> Step:
        return Step(
            key, "redispatches", "a kernel registered outside customops, which mostly goes on below", entry.place
        )

    # Devices ----------------------------------------------------------------------------------------------------

    def _backend(self, key: str) -> Step:
        entry = self.entries.get(key)
        if entry is None:
            return self._no_kernel(key)
        device = _torch.dispatcher.device_of_key(key) or key
        table = self.operator.newest_kernels()
        if key == "Meta":
            # Is the function there that of customops or torch alone, which calls the fake impl or raises?
            name = self.op._qualname
            has_one = self.operator.has_own_rules or _torch.library.made_by_torch(name) is not None
            is_alone = "Meta" not in table and len(_torch.dispatcher.registered_at(name).get("Meta", ())) == 1
            if self._rule("fake") is not None or (has_one and is_alone):
                return self._fake(key)
        at = key if entry.kind == "kernel" else "CompositeExplicitAutograd"
        kernel = table.get(at)
        if kernel is None or (kernel.current_kernel is None and not kernel.raw):
            self.kernel = Rule("kernel", device, where=entry.place, origin="others")
            return Step(key, "handles", "a kernel registered outside customops", entry.place)
        fn = kernel.fn if kernel.raw else kernel.current_kernel.registered
        self.kernel = of_function("kernel", fn, "", target=device)
        why = f"the kernel for {device}" if at == key else f"no kernel for {device} alone: that for other devices"
        return Step(key, "handles", f"{why}, {self.kernel.name}", self.kernel.where)

    def _no_kernel(self, key: str) -> Step:
        error = self.operator._no_kernel(key)
        return Step(key, "raises", f"no kernel here; fix: {error.fix}")


def named(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The lowered arguments of a call by their names.

    Raises:
        ArgumentError: they are not those of the op.
    """
    schema = op._definition.schema
    names = [argument.name for argument in schema.positional]
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    known = {argument.name for argument in schema.arguments}
    required = [argument.name for argument in schema.arguments if not argument.has_default]
    problem = None
    if len(args) > len(names):
        problem = f"{len(args)} arguments by position, of {len(names)}"
    elif unknown := [name for name in kwargs if name not in known]:
        problem = f"there is no argument {unknown[0]!r}"
    elif lacking := [name for name in required if name not in given]:
        problem = f"{lacking[0]!r} is missing"
    problem = problem or _torch.library.why_refused(op._definition.name.packet, args, kwargs)
    if problem is not None:
        raise ArgumentError("the arguments are not those of the op", op=op._qualname, expected=str(schema), got=problem)
    return given


@dataclass(frozen=True, repr=False)
class Explanation(render.Shown):
    """Which kernel runs for a call, and why. ``print(explanation)`` shows it; notebooks show a table.

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
        """Explain a call of a `CustomOpDef`. No code of the op runs."""
        if op._definition.removed is not None:
            raise op._definition.removed
        route = Route(op, *op.lower(*args, **kwargs))
        arguments = {name: outlined(value) for name, value in route.arguments.items()}
        return cls(op._qualname, arguments, tuple(route.steps), route.kernel)

    @property
    def raises(self) -> bool:
        """True if the call would raise because a kernel or a fake impl is missing."""
        return bool(self.steps) and self.steps[-1].action == "raises"

    @property
    def _call(self) -> str:
        return f"{self.op}({', '.join(f'{name}: {value}' for name, value in self.arguments.items())})"

    def _lines(self, width: int) -> Iterator[str]:
        yield filled(self._call, width, rest="    ")
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

    def _repr_html_(self) -> str:
        rows = [(step.key, step.action, step.what, shorter_place(step.where)) for step in self.steps]
        table = render.html_table(("dispatch key", "does", "what", "where"), rows)
        return render.page(self._call, table, render.paragraph(f"=> {self._result()}"))
