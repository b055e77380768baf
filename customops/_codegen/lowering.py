"""`Lowering`: an op with rich types is called, and its callbacks are called, by way of the types of its schema.

First what generates functions for that: rich arguments to lowered ones and back, and the same for results. Then
`Lowering` with the callbacks; in formulas and vmap rules the nodes convert the values themselves.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from types import NoneType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from customops import _torch
from customops._codegen.function import ENTER, Source, as_dict, as_tuple, emit_parameters, fill
from customops._dispatch.callbacks import Fn, bind, bind_kernel
from customops._places import cut, where
from customops._schema.annotations import code
from customops._schema.infer import is_part
from customops._schema.model import REQUIRED, Argument, Schema, names_in
from customops._schema.structure import (
    MAYBE_TENSOR,
    Either,
    Group,
    Leaf,
    Nested,
    Node,
    SequenceCodec,
    Signature,
    TupleForm,
    Values,
    split,
)
from customops._schema.types import hint_of
from customops._versions import cached_property
from customops.errors import ArgumentError, AutogradError, CallbackError, CustomOpsError, KernelError, brief, describe

# What generated functions call: tensors or numbers, and the errors for values that do not fit -------------------------

__tracebackhide__ = True  # pytest leaves the frames out


def tensor_of(value: Any) -> Any:
    """A tensor, or None for a number."""
    return value if isinstance(value, Tensor) else None


def number_of(value: Any) -> Any:
    """A number, or None for a tensor."""
    return None if isinstance(value, Tensor) else value


def bad_argument(op: str, value: Any, path: str, expected: str) -> ArgumentError:
    """The error for an argument with a value that its type does not allow."""
    problem, fix, cls = "an argument has a value that the signature does not allow", f"pass {expected}", type(value)
    if is_dynamo_compiling():  # which cannot trace the making of the error
        _torch.dynamo.stop_tracing(ArgumentError, problem, op, fix, path, expected)
    if cls.__module__ != "builtins" and re.match(rf"(one of )?{re.escape(cls.__name__)}\b", expected):
        fix = f"define the op again: {cls.__module__}.{cls.__qualname__} was defined again after it"
    return ArgumentError(problem, op=op, argument=path, expected=expected, got=brief(value), fix=fix)


def absent(op: str, path: str, expected: str) -> Any:
    """Raise the error for None in the place of a value, in the lowered form."""
    raise bad_argument(op, None, path, expected)


def lists(op: str, path: str, items: list[Any], lengths: list[int] | None) -> list[list[Any]]:
    """A list of lists. The dispatcher does not look at their lengths."""
    if lengths is None or any(length < 0 for length in lengths) or sum(lengths) != len(items):
        raise ArgumentError(
            "the lengths of the lists do not add up to the number of items",
            op=op,
            argument=path,
            expected=f"lengths that add up to {len(items)}",
            got=brief(lengths),
        )
    return list(split(items, lengths))


def misfit(op: str, role: str, fn: Fn, value: Any, path: str, expected: str) -> KernelError:
    """The error for a result, or part of one, that is not what the signature says."""
    return KernelError(
        f"the {role} returned something that does not fit the signature",
        op=op,
        argument=f"return{path}" if path else None,
        expected=expected,
        got=describe(value),
        where=where(fn),
    )


# `Writer`: the lines and expressions of which generated functions are made --------------------------------------------

FUNCTION = """\
def {name}({parameters}):
    {lines}
    return {result}
"""

MAY_BE_NONE = """\
if {value} is None:
    {none}
else:
    {some}
"""

#: A call of the op's object, as `CustomOpDef.__call__`.
DISPATCH = """\
if $is_dynamo_compiling():
    $result = $self._opoverload({arguments})
else:
    {named}
    {enter}
"""


class Writer:
    """Writes a function of one op. It has what codecs ask for: see `structure.Objects`.

    `bad` makes the error for a value that does not fit; a function that only restores lowers none.
    """

    def __init__(self, name: str, lowering: Lowering, bad: Fn | None = None) -> None:
        self.signature, self.schema, self.op = lowering.signature, lowering.schema, lowering.op
        self.source = Source(name, Schema((*lowering.schema.arguments, *lowering.parameters.arguments), ()))
        self.source.objects |= {
            "Tensor": Tensor,
            "bad": bad,
            "number_of": number_of,
            "absent": functools.partial(absent, lowering.op),
            "tensor_of": tensor_of,
        }

    def ref(self, name: str, value: Any) -> str:
        # A user's class may be called as something of Python, or as a variable here: these have no capitals.
        known, name = self.source.objects, re.sub(r"\W", "_", name)
        name = f"Of_{name}" if name == name.lower() else name
        while hasattr(builtins, name) or known.get(name, value) is not value:
            name += "_"
        known[name] = value
        return f"${name}"

    def build(self, parameters: Sequence[str], lines: Sequence[str], result: str, /, **objects: Any) -> Fn:
        self.source.objects |= objects
        self.source.template = fill(FUNCTION, name=self.source.name, parameters=parameters, lines=lines, result=result)
        return self.source.build(self.op)

    def lower_parameters(self) -> tuple[list[str], list[str], list[str], dict[str, str]]:
        """Parameters with their defaults, lines that check their values, and the arguments that these become."""
        texts: list[str] = []
        lines: list[str] = []
        values: dict[str, str] = {}
        before = None
        for i, parameter in enumerate(self.signature.parameters):
            kind = parameter.kind
            if before is inspect.Parameter.POSITIONAL_ONLY is not kind:
                texts.append("/")
            if kind is inspect.Parameter.KEYWORD_ONLY and before not in (kind, inspect.Parameter.VAR_POSITIONAL):
                texts.append("*")
            default = "" if parameter.default is REQUIRED else f"={self.ref(f'Default_{i}', parameter.default)}"
            texts.append(f"{parameter.stars}{parameter.name}{default}")
            before = kind
        if before is inspect.Parameter.POSITIONAL_ONLY:
            texts.append("/")
        for parameter in self.signature.parameters:
            values |= self.lower(parameter.node, parameter.name, lines)
        named = {argument.name: values[argument.name] for argument in self.schema.keyword_only}
        return texts, lines, [values[argument.name] for argument in self.schema.positional], named

    def lower(self, node: Node, value: str, lines: list[str], *, in_optional: bool = False) -> dict[str, str]:
        """Expressions for the leaves of a value; checks and what has to be done before are added to `lines`.

        The dispatcher knows of no None that an argument may not be, where the argument is part of an optional object.
        """
        if isinstance(node, Leaf):
            test, lowered, expected = node.codec.test(value, self), node.codec.lower(value, self), node.codec.expected
            if node.is_plain and in_optional and not node.is_optional:
                test, expected = f"{value} is not None", code(hint_of(node.type))
            elif test and node.is_optional:
                test, expected = f"{value} is None or {test}", f"{expected}, or None"
            if test:
                self._check(test, value, node.path, expected, lines)
            may_be_none = node.is_optional and lowered != value
            return {node.name: f"(None if {value} is None else {lowered})" if may_be_none else lowered}
        if isinstance(node, Either):
            if not node.may_be_none:
                self._check(f"{value} is not None", value, node.path, "a Tensor or a number", lines)
            return {node.tensor.name: f"$tensor_of({value})", node.number.name: f"$number_of({value})"}
        if isinstance(node, Nested):
            none = f"None if {value} is None else " if node.tensors.is_optional else ""
            test = f"$isinstance({value}, $list) and $all([$isinstance($items, ($list, $tuple)) for $items in {value}])"
            test = f"{value} is None or {test}" if none else test
            self._check(test, value, node.path, f"a list of lists of tensors{', or None' * bool(none)}", lines)
            return {
                node.tensors.name: f"{none}[$x for $items in {value} for $x in $items]",
                node.lengths.name: f"{none}[$len($items) for $items in {value}]",
            }
        inside = lines if node.given is None else []
        or_none = "" if node.given is None else ", or None"
        self._check(node.form.test(value, self), value, node.path, node.form.name + or_none, inside)
        values = {} if node.given is None else {node.given.name: "True"}
        in_optional = in_optional or node.given is not None
        for key, each in node.fields.items():
            values |= self.lower(each, node.form.item(value, key), inside, in_optional=in_optional)
        if node.given is None:
            return values
        names = {name: f"$lowered_{name}" for name in values}
        left_out = [f"{name} = None" for name in names.values()]
        left_out[0] = f"{names[node.given.name]} = False"
        present = [*inside, *(f"{names[key]} = {code}" for key, code in values.items())]
        lines += fill(MAY_BE_NONE.replace("{value}", value), none=left_out, some=present).splitlines()
        return names

    def _check(self, test: str, value: str, path: str, expected: str, lines: list[str]) -> None:
        lines += [f"if not ({test}):", f"    raise $bad({value}, {path!r}, {expected!r})"]

    def restored(self) -> tuple[list[str], dict[str, str]]:
        """The parameters of the function, which are arguments of the schema, and of these the parameters of the op."""
        texts = emit_parameters(self.schema.positional, self.schema.keyword_only, {})
        values = {argument.name: argument.variable for argument in self.schema.arguments}
        return texts, {each.name: self.restore(each.node, values) for each in self.signature.parameters}

    def restore(self, node: Node, values: Mapping[str, str], *, in_optional: bool = False) -> str:
        if isinstance(node, Leaf):
            value = values[node.name]
            if in_optional and node.is_plain and not node.is_optional:
                return self._present(value, node.path, code(hint_of(node.type)))
            restored = node.codec.restore(value, node.path, self)
            return f"(None if {value} is None else {restored})" if node.is_optional and restored != value else restored
        if isinstance(node, Either):
            tensor, number = values[node.tensor.name], values[node.number.name]
            if not node.may_be_none:
                number = self._present(number, node.path, "a Tensor or a number")
            return f"({number} if {tensor} is None else {tensor})"
        if isinstance(node, Nested):
            tensors, lengths = values[node.tensors.name], values[node.lengths.name]
            none = f"None if {tensors} is None else " if node.tensors.is_optional else ""
            return f"({none}{self.ref('Lists', functools.partial(lists, self.op, node.path))}({tensors}, {lengths}))"
        in_optional = in_optional or node.given is not None
        fields = {key: self.restore(each, values, in_optional=in_optional) for key, each in node.fields.items()}
        built = node.form.build(self, fields)
        return built if node.given is None else f"({built} if {values[node.given.name]} else None)"

    def _present(self, value: str, path: str, expected: str) -> str:
        """An expression for a value that a call through ``torch.ops`` may have left out."""
        return f"({value} if {value} is not None else $absent({path!r}, {expected!r}))"

    def restore_result(self) -> str:
        node = self.signature.result
        if self.signature.returns_plainly or node is None:
            return "$result"
        leaves = node.leaves
        values = {leaf.name: f"$result[{i}]" for i, leaf in enumerate(leaves)}
        return self.restore(node, {leaves[0].name: "$result"} if len(leaves) == 1 else values)

    def lower_result(self) -> tuple[list[str], str]:
        """Lines, and after them what is returned to the dispatcher."""
        node = self.signature.result
        if self.signature.returns_plainly or node is None:
            return [], "$result"
        lines: list[str] = []
        values = self.lower(node, "$result", lines, in_optional=True)  # in which the dispatcher looks for no None
        return lines, as_tuple(values.values()) if len(values) > 1 else next(iter(values.values()))


_CONSTANTS = (int, float, complex, str, NoneType, Enum, torch.dtype, torch.device, torch.layout, torch.memory_format)


def _never_changes(default: Any) -> bool:
    """Is a default still the value that it was when the op was defined, if it is the same object?"""
    if isinstance(default, tuple):
        return all(map(_never_changes, default))
    return isinstance(default, _CONSTANTS)


# ----------------------------------------------------------------------------------------------------------------------
# Formulas and vmap rules of ops with rich types: what they are given and return is in the form of the signature
# Only tensors have gradients: an object of gradients or tangents holds None in every field that is not a tensor's.


def of_tensors(node: Node, values: Mapping[str, Any]) -> Any:
    """An object like a value of the node, of something that is known for each of its tensors."""
    parts: Values = {}
    for leaf in node.leaves:
        value = values.get(leaf.name)
        if not leaf.holds_tensors and not leaf.counts_tensors:
            value = None
        elif leaf.codec is MAYBE_TENSOR:
            value = value[0] if value else None
        elif isinstance(leaf.codec, SequenceCodec) and isinstance(value, (list, tuple)) and leaf.holds_tensors:
            value = leaf.codec.container(value)
        parts[leaf.name] = value
    return node.assemble(parts)


def misfit_of(node: Node, value: Any) -> tuple[str, str] | None:
    """The path and the form of the first group that a value does not have the form of; None is of any form."""
    if not isinstance(node, Group) or value is None:
        return None
    if not node.form.holds(value):
        return node.path, node.form.name
    found = (misfit_of(each, node.form.get(value, key)) for key, each in node.fields.items())
    return next((wrong for wrong in found if wrong is not None), None)


# ----------------------------------------------------------------------------------------------------------------------
# `Lowering`: how an op's signature and its schema relate, the functions generated from that, and its callbacks


class Lowering:
    """Wraps callbacks that take and return what the signature of an op says into such as its schema says."""

    def __init__(self, signature: Signature, schema: Schema, op: str) -> None:
        self.signature, self.schema, self.op = signature, schema, op
        parameters, result = signature.parameters, signature.result
        arguments = [
            Argument("", name=each.name, default=each.default, kwarg_only=each.by_keyword) for each in parameters
        ]
        #: The parameters, as `bind_kernel` asks for them.
        self.parameters = Schema(tuple(arguments), ())
        by_keyword = [each for each in parameters if each.by_keyword and each.node.holds_tensors]
        #: The parameters that formulas and vmap rules have an entry for, in their order.
        self.operands = (*(each for each in parameters if not each.by_keyword), *by_keyword)
        #: What backward has a gradient for: the fields of a tuple, or what is returned.
        self.results: tuple[Node, ...] = () if result is None else (result,)
        if isinstance(result, Group) and isinstance(result.form, TupleForm):
            self.results = tuple(result.fields.values())
        #: The arguments that say how long lists of lists are.
        self.counted = [leaf.name for each in parameters for leaf in each.node.leaves if leaf.counts_tensors]
        #: The places of returns that are a tensor or None.
        leaves = () if result is None else result.leaves
        self.maybe_tensors = [i for i, leaf in enumerate(leaves) if leaf.codec is MAYBE_TENSOR]

    def __repr__(self) -> str:
        return f"<Lowering of {self.op}{self.schema}>"

    @property
    def _digest_key(self) -> Any:
        return self.op, self.schema.exact_key

    def restored_call(self, /, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with which a function of the signature is called, of lowered ones."""
        values, named = self.restore(*args, **kwargs)
        stars = [each.stars for each in self.signature.parameters if not each.by_keyword]
        positional: list[Any] = []
        for star, value in zip(stars, values, strict=True):
            positional += value if star else (value,)
        for each in self.signature.parameters:
            if each.stars == "**":
                named |= named.pop(each.name)
        return tuple(positional), named

    # Generated functions ----------------------------------------------------------------------------------------

    def call(self, bypass: Fn | None = None) -> Fn:
        """The ``__call__`` of the op's object; `bypass` is that of an op of the schema that bypasses the dispatcher.

        It has the name of the op, which Python's errors for arguments that are missing or too many show.
        """
        name = self.op.partition("::")[2].partition(".")[0]
        writer = Writer(name, self, functools.partial(bad_argument, self.op))
        parameters, lines, positional, named = writer.lower_parameters()
        arguments = [*positional, *(f"{key}={value}" for key, value in named.items())]
        if bypass is not None:
            lines.append(f"$result = $bypass($self, {', '.join(arguments)})")
        else:
            left_out: list[str] = []
            groups = [(each.node, each.name, each.default) for each in self.signature.parameters]
            for node, group, whole in groups:  # `whole`: the default of the group, if it has one
                if not isinstance(node, Group) or node.given is not None:
                    continue
                for key, each in node.fields.items():
                    default = each.default if whole is REQUIRED else node.form.get(whole, key)
                    value = node.form.item(group, key)
                    if isinstance(each, Leaf) and each.default is not REQUIRED and _never_changes(default):
                        # Passing a keyword costs more than finding that it is at its default.
                        test = f"if {value} is not {writer.ref('Default', default)}:"
                        left_out += [test, f"    $named[{each.name!r}] = {named.pop(each.name)}"]
                    groups.append((each, value, default))
            passed = [*positional, *(f"{key}={value}" for key, value in named.items())]
            if left_out:
                left_out.insert(0, "$named = {}")
                passed.append("**$named")
            enter = fill(ENTER, take="$result =", passed=passed)
            lines += fill(DISPATCH, arguments=arguments, named=left_out, enter=enter).splitlines()
        return writer.build(
            [*(["$self"] if "/" in parameters else ["$self", "/"]), *parameters],
            lines,
            writer.restore_result(),
            bypass=bypass,
            is_dynamo_compiling=is_dynamo_compiling,
            CustomOpsError=CustomOpsError,
            cut=cut,
        )

    @cached_property
    def lower(self) -> Fn:
        """``lower(*args, **kwargs) -> (args, kwargs)``, of a call's arguments those of the schema."""
        writer = Writer("lower", self, functools.partial(bad_argument, self.op))
        parameters, lines, positional, named = writer.lower_parameters()
        return writer.build(parameters, lines, f"{as_tuple(positional)}, {as_dict(named)}")

    @cached_property
    def restore(self) -> Fn:
        """``restore(*args, **kwargs) -> (args, kwargs)``, of lowered arguments those of the signature."""
        writer = Writer("restore", self)
        parameters, restored = writer.restored()
        named = {each.name: restored.pop(each.name) for each in self.signature.parameters if each.by_keyword}
        return writer.build(parameters, [], f"{as_tuple(restored.values())}, {as_dict(named)}")

    @cached_property
    def restore_result(self) -> Fn:
        """``restore_result(result) -> result``, of what the dispatcher returns what the signature says."""
        writer = Writer("restore_result", self)
        return writer.build(["$result"], [], writer.restore_result())

    def lower_result(self, fn: Fn, role: str) -> Fn:
        """``lower_result(result) -> result``, of what a callback returned what the dispatcher is to get."""
        writer = Writer("lower_result", self, functools.partial(misfit, self.op, role, fn))
        return writer.build(["$result"], *writer.lower_result())

    # Callbacks --------------------------------------------------------------------------------------------------

    def kernel(self, fn: Fn, role: str = "kernel", *, warn: bool = True, lower_result: bool = True) -> Fn:
        """A kernel or fake impl of the schema, around one of the signature; its result may be left as it is."""
        bound = bind_kernel(fn, self.parameters, self.op, role, warn=warn)
        writer = Writer("callback", self, functools.partial(misfit, self.op, role, bound))
        lines, result = writer.lower_result() if lower_result else ([], "$result")
        parameters, restored = writer.restored()
        arguments = [
            f"{each.name}={restored[each.name]}"
            if each.kind is inspect.Parameter.KEYWORD_ONLY
            else f"{each.stars}{restored[each.name]}"
            for each in self.signature.parameters
        ]
        lines.insert(0, f"$result = $fn({', '.join(arguments)})")
        return functools.update_wrapper(writer.build(parameters, lines, result, fn=bound), fn, updated=())

    @contextmanager
    def _flags(self, ctx: Any) -> Iterator[None]:
        """``ctx.needs_input_grad`` has an entry for each parameter while a callback runs.

        It is the flag of a tensor, or a list of them; of an object, whether any of its tensors needs a gradient.
        """
        needs = getattr(ctx, "needs_input_grad", None)
        if needs is None:
            yield
            return
        flags = dict(zip((argument.name for argument in self.schema.operands), needs, strict=False))
        entries = []
        for parameter in self.operands:
            found = [flags.get(leaf.name, False) for leaf in parameter.node.leaves]
            is_one = isinstance(parameter.node, Leaf)
            entries.append(found[0] if is_one else any(any(f) if isinstance(f, list) else f for f in found))
        ctx.needs_input_grad = tuple(entries)
        try:
            yield
        finally:
            ctx.needs_input_grad = needs

    def _refuse(self, fn: Fn, problem: str, expected: str, got: str, argument: str | None = None) -> NoReturn:
        """Raise for something that a formula returned."""
        raise AutogradError(problem, op=self.op, argument=argument, expected=expected, got=got, where=where(fn))

    def setup_context(self, fn: Fn | None) -> Fn | None:
        """``setup_context(ctx, inputs, output)``; it also keeps how long lists are whose tangents may all be None."""
        keeps_lengths = bool(self.counted or self.maybe_tensors)
        if fn is None and not keeps_lengths:
            return None
        if fn is not None:
            by_keyword = ["keyword_only_inputs"] if self.parameters.keyword_only else []
            bind(fn, self.op, "setup_context", **{name: name for name in ["ctx", "inputs", *by_keyword, "output"]})

        def lowered_setup_context(ctx: Any, inputs: Any, output: Any, keyword_only_inputs: Any = None) -> None:
            by_keyword = keyword_only_inputs or {}
            if keeps_lengths:
                values = self.schema.by_name(inputs, by_keyword)
                outputs = output if len(self.schema.returns) > 1 else (output,)
                ctx._customops_lengths = {name: values[name] for name in self.counted}
                ctx._customops_present = [len(outputs[i]) for i in self.maybe_tensors]
            if fn is not None:
                args, kwargs = self.restore(*inputs, **by_keyword)
                named = {"keyword_only_inputs": kwargs} if self.parameters.keyword_only else {}
                with self._flags(ctx):
                    fn(ctx=ctx, inputs=args, **named, output=self.restore_result(output))

        return lowered_setup_context if fn is None else functools.wraps(fn, updated=())(lowered_setup_context)

    def backward(self, fn: Fn, options: Any) -> Fn:
        """``backward(ctx, *grads)``, around one that gets a gradient for each field of a returned tuple.

        By its options, it also gets the gradients of some mutated arguments.
        """
        followed = options.get("grads_of")
        if followed is None:
            written = {argument.name for argument in self.schema.mutated} - set(options.get("nondiff_args", ()))
            followed = () if self.schema.returns else written
        bind(fn, self.op, "backward", "ctx", *(f"grad{i}" for i in range(len(self.results) + len(followed))))

        @functools.wraps(fn, updated=())
        def lowered_backward(ctx: Any, *grads: Any) -> Any:
            leaves = self.signature.result.leaves if self.signature.result is not None else ()
            values, operands = dict(zip([leaf.name for leaf in leaves], grads, strict=False)), self.operands
            with self._flags(ctx):
                found = fn(ctx, *(of_tensors(node, values) for node in self.results), *grads[len(leaves) :])
            if not isinstance(found, dict):
                is_one = len(operands) == 1 and type(found) is not tuple  # perhaps the gradient of a NamedTuple
                given = found if isinstance(found, tuple) and not is_one else (found,)
                if len(given) != len(operands):
                    expected = f"{len(operands)}, for {', '.join(each.name for each in operands)}"
                    self._refuse(fn, "backward returned the wrong number of gradients", expected, str(len(given)))
                found = {each.name: grad for each, grad in zip(operands, given, strict=True)}
            nodes = {each.name: each.node for each in operands}
            gradients: Values = {}
            for name, grad in found.items():
                gradients |= self._gradients(fn, nodes[name], grad) if name in nodes else {name: grad}
            known = {argument.name for argument in self.schema.operands}
            return {name: grad for name, grad in gradients.items() if grad is not None or name in known}

        return lowered_backward

    def _gradients(self, fn: Fn, node: Node, grad: Any) -> Values:
        """The gradients of the leaves: of an object, or of a dict of fields some of which may be left out."""
        if not isinstance(node, Group) or grad is None:
            parts = node.take_apart(grad)
            return parts | {leaf.name: None for leaf in node.leaves if leaf.counts_tensors}
        if isinstance(grad, dict):
            if unknown := ", ".join(map(repr, sorted(grad.keys() - node.fields.keys()))):
                problem = f"backward returned a gradient for a field that {node.path} does not have"
                self._refuse(fn, problem, ", ".join(node.fields), unknown, node.path)
        elif not node.form.holds(grad):
            problem = f"backward returned something other than the gradient of {node.path}"
            expected = f"{node.form.name}, or a dict of gradients by field, or None"
            self._refuse(fn, problem, expected, describe(grad), node.path)
        gradients: Values = {}
        for key, each in node.fields.items():
            gradients |= self._gradients(
                fn, each, grad.get(key) if isinstance(grad, dict) else node.form.get(grad, key)
            )
        return gradients

    def jvp(self, fn: Fn) -> Fn:
        """``jvp(ctx, *tangents)``"""
        bind(fn, self.op, "jvp", "ctx", *(f"{each.name}_tangent" for each in self.operands))

        @functools.wraps(fn, updated=())
        def lowered_jvp(ctx: Any, *tangents: Any) -> Any:
            result = self.signature.result
            values = dict(zip((argument.name for argument in self.schema.operands), tangents, strict=False))
            values |= ctx._customops_lengths if self.counted else {}
            with self._flags(ctx):
                found = fn(ctx, *(of_tensors(each.node, values) for each in self.operands))
            if self.signature.returns_plainly or result is None:
                return found
            if (wrong := misfit_of(result, found)) is not None:
                problem = "jvp returned tangents whose structure is not that of the result"
                self._refuse(fn, problem, wrong[1], describe(found), f"return{wrong[0]}")
            values = result.take_apart(found)
            flat = [list(x) if isinstance(x, tuple) else x for x in (values[leaf.name] for leaf in result.leaves)]
            for place, i in enumerate(self.maybe_tensors):
                flat[i] = [flat[i]] * ctx._customops_present[place]
            return tuple(flat) if len(flat) > 1 else flat[0]

        return lowered_jvp

    def plain(self, fn: Fn, role: str) -> Fn:
        """A function of the signature's parameters, called with those of the schema; the result stays."""
        bound = bind_kernel(fn, self.parameters, self.op, role)

        def lowered_plain(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = self.restored_call(*args, **kwargs)
            return bound(*args, **kwargs)

        return functools.update_wrapper(lowered_plain, fn, updated=())

    def function(self, fn: Fn, *, with_written: bool, role: str = "function to differentiate") -> Fn:
        """A function that is differentiated, or a reference; does it return more than the result?"""
        bound = bind_kernel(fn, self.parameters, self.op, role)
        lower_result = self.lower_result(bound, role)

        @functools.wraps(fn, updated=())
        def lowered_function(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = self.restored_call(*args, **kwargs)
            result = bound(*args, **kwargs)
            if self.signature.returns_plainly:
                return result
            result, written = (result[0], result[1:]) if with_written else (result, ())
            lowered, returns = lower_result(result), self.schema.returns
            values = lowered if len(returns) > 1 else (lowered,)
            return *values, *written

        return lowered_function

    def vmap(self, fn: Fn) -> Fn:
        """``rule(info, in_dims, *args, **kwargs) -> (result, out_dims)``: also dimensions are as in the signature."""
        bound = bind_kernel(fn, self.parameters, self.op, "vmap rule", "info", "in_dims", warn=True)
        lower_result = self.lower_result(bound, "vmap rule")

        @functools.wraps(fn, updated=())
        def lowered_rule(info: Any, in_dims: tuple[Any, ...], /, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            node = self.signature.result
            dims = dict(zip((argument.name for argument in self.schema.operands), in_dims, strict=True))
            values = self.schema.by_name(args, kwargs)
            dims |= {name: values[name] for name in self.counted}
            restored, named = self.restored_call(*args, **kwargs)
            result, out_dims = bound(info, tuple(of_tensors(x.node, dims) for x in self.operands), *restored, **named)
            if self.signature.returns_plainly or node is None:
                return result, out_dims
            result, leaves = lower_result(result), node.leaves
            dims = dict.fromkeys([leaf.name for leaf in leaves], out_dims)  # one for all tensors is allowed
            if not (out_dims is None or isinstance(out_dims, int)):
                if (wrong := misfit_of(node, out_dims)) is not None:
                    raise CallbackError(
                        "the vmap rule returned out_dims whose structure is not that of the result",
                        op=self.op,
                        argument=f"return{wrong[0]}",
                        expected=f"a dimension for all, or {wrong[1]}",
                        got=repr(out_dims),
                        where=where(bound),
                    )
                dims = node.take_apart(out_dims)
            results = [list(x) if isinstance(x, tuple) else x for x in (result if len(leaves) > 1 else (result,))]
            flat: list[Any] = []  # as functorch wants it: a list for a list, None for what is no tensor
            for leaf, value in zip(leaves, results, strict=True):
                dim = dims[leaf.name] if leaf.holds_tensors else None
                if isinstance(value, list):
                    dim = list(dim) if isinstance(dim, (list, tuple)) else [dim] * len(value)
                flat.append(dim)
            return (tuple(results), tuple(flat)) if len(leaves) > 1 else (results[0], flat[0])

        return lowered_rule

    def names(self, given: Any, option: str) -> Any:
        """The tensors of the schema that names of parameters, or paths of parts of them, stand for."""
        if given is None:
            return None
        tensors = [leaf for each in self.signature.parameters for leaf in each.node.leaves if leaf.holds_tensors]
        names: list[str] = []
        for name in names_in(given, option, self.op):
            parts = [leaf.name for leaf in tensors if is_part(leaf.path, name)]
            names += parts or [name]  # which then is refused
        return tuple(names)

    def options(self, options: Any) -> Any:
        """The options of a formula, with names of the schema."""
        known = [key for key in ("nondiff_args", "grads_of", "originals") if key in options]
        return options | {key: self.names(options[key], key) for key in known}
