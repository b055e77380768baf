"""`Description`: what an op is, has and lacks."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from customops import _torch
from customops._describe import render
from customops._describe.render import entry, shorter_place
from customops._describe.rules import ONE_BY_ONE, Rule, Support, rules_of, supports_of
from customops._places import location_of

#: What the names of lines are on the screen.
_TITLES = {"torch_dispatch": "dispatch rule", "impl": "at key", "out": "out kernel"}


@dataclass(frozen=True, repr=False)
class Description(render.Shown):
    """What is known of an op. ``print(description)`` shows it as text.

    Attributes:
        op: qualified name.
        schema: the schema in the dispatcher, without the name.
        signature: the Python signature of the function; "" if the op was defined without one.
        doc: the first line of the function's docstring.
        source: ``file:line`` of the definition.
        tags: the names of the tags.
        options: the options that are not at their default, such as ``bypass=True``.
        rules: one entry for each kernel and rule, and for each of fake impl, backward, jvp and samples that is missing.
        supports: one entry for each feature of torch: whether it works, and if not, which call adds it.
        removed: True if the op was unregistered.
        why: what removed it, such as the definition that replaced it; "" if it is there.
    """

    op: str
    schema: str
    signature: str
    doc: str
    source: str
    tags: tuple[str, ...]
    options: tuple[str, ...]
    rules: tuple[Rule, ...]
    supports: tuple[Support, ...]
    removed: bool = False
    why: str = ""

    @classmethod
    def of(cls, op: Any) -> Description:
        """Describe a `CustomOpDef`."""
        spec, removed = op._definition.spec, op._definition.removed is not None
        rules = [] if removed else rules_of(op)
        return cls(
            op._qualname,
            str(op.schema),
            _signature(spec.fn) if spec.signature is not None else "",
            doc_of(spec.fn).partition("\n")[0],
            spec.place if op._definition.library is not None else place_of_others(op._qualname),
            tuple(str(tag).rpartition(".")[2] for tag in op._definition.tags),
            _options(op),
            tuple(rules),
            () if removed else tuple(supports_of(op, rules)),
            removed,
            op._definition.removed.problem if removed else "",
        )

    def rule(self, kind: str, target: str | None = None) -> Rule | None:
        """The first rule of this kind, and for this target if one is given; None if there is none."""
        return next((r for r in self.rules if r.kind == kind and target in (None, r.target)), None)

    @property
    def missing(self) -> tuple[Support, ...]:
        """The features of torch that do not work with the op."""
        return tuple(support for support in self.supports if support.state == "no")

    def _lines(self, width: int) -> Iterator[str]:
        yield entry(self.op, self.schema, width, column=4, indent="")
        if self.removed:
            yield entry("unregistered", f"{self.why}; calls of it raise UnregisteredError", width)
        head = {"doc": self.doc, "signature": self.signature, "defined": shorter_place(self.source)}
        head |= {"tags": ", ".join(self.tags), "options": ", ".join(self.options)}
        for label, text in head.items():
            if text or label == "defined":
                yield entry(label, text, width)
        if self.rules:
            yield ""
        for rule in self.rules:
            yield entry(f"{_TITLES.get(rule.kind, rule.kind)} {rule.target}".strip(), in_words(rule, width), width)
        if self.supports:
            yield ""
        for support in self.supports:
            why = f"{support.state}: {support.why}" if support.why else support.state
            yield entry(support.feature, f"{why}; {support.fix}" if support.fix else why, width)

    def _registrations(self) -> str:
        """The rules that were registered on the op, and where."""
        rules = [rule for rule in self.rules if rule.origin == "registered"]
        return ", ".join(f"{rule.kind} ({shorter_place(rule.registered or rule.where)})" for rule in rules)


def _signature(fn: Any) -> str:
    """The signature of a function, in fewer words than Python's."""
    text = re.sub(r"typing\.Annotated\[([^][]*), <class '[\w.]*\.Mutates'>\]", r"Mut[\1]", str(inspect.signature(fn)))
    text = re.sub(r"<(\w+)\.(\w+): [^>]*>", "\\1\0\\2", text)  # a member of an enum; its dot is put back below
    return re.sub(r"\b(?:[A-Za-z_]\w*\.)+", "", text.replace("'", "")).replace("\0", ".")


def place_of_others(qualname: str) -> str:
    """Where an op was defined outside customops."""
    known = _torch.library.made_by_torch(qualname)
    return location_of(known.fn) if known is not None else _torch.schema.defined_at(qualname)


def doc_of(fn: Any) -> str:
    """The docstring of a function; not that of the class of another callable."""
    doc = getattr(fn, "__doc__", None)
    return inspect.cleandoc(doc) if isinstance(doc, str) and doc != type(fn).__doc__ else ""


def _options(op: Any) -> tuple[str, ...]:
    """Return the options that are not at their default."""
    spec, current = op._definition.spec, op._definition.options
    texts = {
        "bypass=True": current.bypass,
        "eager=True": current.eager,
        f'check="{current.check}"': current.check != "always",
        "direct_in_graphs=False": not current.direct_in_graphs,
        "choose_when_traced=False": not current.choose_when_traced,
        "traceable=True": spec.traceable,
        "kernel_calls_torch=False": not spec.kernel_calls_torch,
        "differentiable=False": not spec.differentiable.op,
        f"nondiff_args={tuple(sorted(spec.differentiable.nondiff_args))}": spec.differentiable.nondiff_args,
    }
    return tuple(text for text, holds in texts.items() if holds)


def in_words(rule: Rule, width: int = 100) -> str:
    """``scale_cpu (ops.py:12), derived``: a rule without its kind and target."""
    if rule.origin == "missing":
        return f"none: {rule.note}" if rule.note else "none"
    place = shorter_place(rule.where, max(20, width - 30))
    if rule.origin == "others":
        return f"registered outside customops ({place})"
    text = f"{rule.name} ({place})" if place else rule.name
    extra = [rule.origin] * (rule.origin == "derived") + [each for each in (rule.note, _registered(rule)) if each]
    return ", ".join([text, *extra])


def _registered(rule: Rule) -> str:
    """Where it was registered, if that is not where it was written."""
    file, _, line = rule.where.rpartition(":")
    registered_file, _, registered_line = rule.registered.rpartition(":")
    if not rule.registered or (file == registered_file and abs(int(line) - int(registered_line)) <= 2):
        return ""
    return f"registered at {shorter_place(rule.registered)}"


def outline(op: Any) -> tuple[str, ...]:
    """An op in a row of a table: name, schema, kernels, what it has of the rest, samples, place."""
    found = Description.of(op)
    kernels = ", ".join(dict.fromkeys(r.target for r in found.rules if r.kind in ("kernel", "impl"))) or "none"
    has = {r.kind for r in found.rules if r.origin != "missing" and r.name != ONE_BY_ONE}
    shown = ", ".join(kind for kind in ("fake", "backward", "jvp", "vmap", "autocast") if kind in has) or "none"
    return found.op, found.schema, kernels, shown, "yes" if "samples" in has else "no", shorter_place(found.source)


#: The titles of `outline`.
OUTLINE = ("op", "schema", "kernels", "has", "samples", "defined")
