"""`Schema`: arguments, returns and alias sets of an op. See `parse` for its text, `infer` for type hints."""

from __future__ import annotations

import keyword
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, NamedTuple

from torch import Tensor

from customops._schema.types import default_text
from customops._versions import cached_property
from customops.errors import DefinitionError, UnsupportedError, brief


class _Required(Enum):
    REQUIRED = "required"

    def __repr__(self) -> str:
        return "REQUIRED"


#: The default of an argument that has none.
REQUIRED: Final = _Required.REQUIRED


@dataclass(frozen=True)
class Alias:
    """The alias annotation of an argument or return: ``Tensor(a|b!)`` has the sets {a, b} and is mutated."""

    sets: frozenset[str]
    write: bool = False

    def __str__(self) -> str:
        return "|".join(sorted(self.sets)) + ("!" if self.write else "")


@dataclass(frozen=True)
class Typed:
    """A type without its alias annotation (``Tensor?[]``), and that annotation: what arguments and returns share."""

    type: str
    alias: Alias | None = None
    type_text: str = field(init=False, repr=False, compare=False)
    #: What the text of a schema says of it.
    text: str = field(init=False, repr=False, compare=False)
    is_optional: bool = field(init=False, repr=False, compare=False)
    is_list: bool = field(init=False, repr=False, compare=False)
    is_tensor: bool = field(init=False, repr=False, compare=False)
    is_tensor_list: bool = field(init=False, repr=False, compare=False)
    holds_tensors: bool = field(init=False, repr=False, compare=False)
    is_mutated: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        type_, alias = self.type, self.alias
        is_tensor, is_list = type_ in ("Tensor", "Tensor?"), type_.endswith(("]", "]?"))
        is_tensor_list = is_list and type_.startswith(("Tensor[", "Tensor?["))
        type_text = type_ if alias is None else type_.replace("Tensor", f"Tensor({alias})", 1)
        vars(self).update(  # the instance is frozen
            type_text=type_text,
            text=type_text,
            is_optional=type_.endswith("?"),
            is_list=is_list,
            is_tensor=is_tensor,
            is_tensor_list=is_tensor_list,
            holds_tensors=is_tensor or is_tensor_list,
            is_mutated=alias is not None and alias.write,
        )

    def __str__(self) -> str:
        return self.text

    def may_alias(self, other: Typed) -> bool:
        """Do the annotations of both have an alias set in common?"""
        return self.alias is not None and other.alias is not None and not self.alias.sets.isdisjoint(other.alias.sets)


@dataclass(frozen=True)
class Argument(Typed):
    """An argument. `default` is the Python value that a kernel receives when the caller omits the argument."""

    name: str = ""
    default: Any = REQUIRED
    kwarg_only: bool = False
    #: Schema text cannot hold the default (inf, nan, a list with one of them), so it says ``None``, and `default` is
    #: filled in when the op is called.
    default_is_none_in_text: bool = False
    #: What it is in the signature, ``config.block``; "" where that is the name.
    path: str = field(default="", compare=False, repr=False)
    has_default: bool = field(init=False, repr=False, compare=False)
    #: The default as schema text; None where the schema language has no word for it.
    written_default: str | None = field(init=False, repr=False, compare=False)
    #: The name that the author of the op knows.
    shown: str = field(init=False, repr=False, compare=False)
    #: The variable that holds it in generated functions, where ``$`` starts a name that no argument has.
    variable: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        text, written, has_default = f"{self.type_text} {self.name}", None, self.default is not REQUIRED
        if has_default:
            written = default_text(self.type, self.default)
            text += f"={None if self.default_is_none_in_text else written}"
        is_keyword = keyword.iskeyword(self.name) or self.name == "__debug__"
        variable = f"${self.name}" if is_keyword else self.name
        shown = self.path or self.name
        vars(self).update(text=text, has_default=has_default, written_default=written, variable=variable, shown=shown)


@dataclass(frozen=True)
class Return(Typed):
    """A return. One of type ``(Tensor)`` is a tuple of length one."""


class CallShape(NamedTuple):
    """How an op is called: what generated functions need to know of its arguments. It is built once: `Schema.call`."""

    #: In the order of parameters: positional ones come before keyword-only ones.
    arguments: tuple[Argument, ...]
    #: The variables of positional arguments, and what passes keyword-only ones: ``name=name``.
    positional: tuple[str, ...]
    named: tuple[str, ...]
    #: The variables of the arguments that hold tensors.
    tensors: tuple[str, ...]
    #: How many positional arguments a call always has: trailing ones that equal their default are not passed.
    always: int
    #: For each of `arguments`: may a call leave it out?
    may_be_left_out: tuple[bool, ...]
    #: The arguments that hold None at times. Torch takes None for a Tensor, too; but a call with no tensor at all does
    #: not get to a kernel of a device.
    may_be_none: frozenset[str]


@dataclass(frozen=True)
class Schema:
    """The arguments and returns of an op, without its name."""

    arguments: tuple[Argument, ...]
    returns: tuple[Return, ...]
    text: str = field(init=False, repr=False, compare=False)
    positional: tuple[Argument, ...] = field(init=False, repr=False, compare=False)
    keyword_only: tuple[Argument, ...] = field(init=False, repr=False, compare=False)
    mutated: tuple[Argument, ...] = field(init=False, repr=False, compare=False)
    #: The arguments that are tensors, or lists of them.
    tensors: tuple[Argument, ...] = field(init=False, repr=False, compare=False)
    keyword_only_tensors: tuple[Argument, ...] = field(init=False, repr=False, compare=False)
    #: The arguments that rules have an entry for (a gradient, a batch dimension): positional ones, then keyword-only
    #: tensors.
    operands: tuple[Argument, ...] = field(init=False, repr=False, compare=False)
    #: Does a return share memory with an argument that the op does not mutate?
    is_view: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        positional, keyword_only, parts, named = list[Argument](), list[Argument](), list[str](), ["*"]
        mutated, tensors, keyword_only_tensors = list[Argument](), list[Argument](), list[Argument]()
        for argument in self.arguments:
            (keyword_only if argument.kwarg_only else positional).append(argument)
            (named if argument.kwarg_only else parts).append(argument.text)
            mutated += [argument] * argument.is_mutated
            tensors += [argument] * argument.holds_tensors
            keyword_only_tensors += [argument] * (argument.holds_tensors and argument.kwarg_only)
        returns, is_view = list[str](), False
        for ret in self.returns:
            returns.append(ret.text)
            is_view = is_view or (ret.alias is not None and not ret.alias.write)
        is_alone = len(returns) == 1 and not returns[0].startswith("(")
        result = returns[0] if is_alone else f"({', '.join(returns)})"
        vars(self).update(  # the instance is frozen
            text=f"({', '.join([*parts, *named] if keyword_only else parts)}) -> {result}",
            positional=tuple(positional),
            keyword_only=tuple(keyword_only),
            mutated=tuple(mutated),
            tensors=tuple(tensors),
            keyword_only_tensors=tuple(keyword_only_tensors),
            operands=(*positional, *keyword_only_tensors),
            is_view=is_view,
        )

    def __str__(self) -> str:
        return self.text

    def by_name(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values that a call passes, by the names of the arguments."""
        return dict(zip((argument.name for argument in self.positional), args, strict=False)) | dict(kwargs)

    @cached_property
    def exact_key(self) -> tuple[Any, ...]:
        """Equal for schemas that are the same to the last default: ``==`` does not tell 1 from 1.0 and True."""
        return self.text, *[(type(a.default), repr(a.default)) for a in self.arguments if a.has_default]

    @cached_property
    def call(self) -> CallShape:
        always, named, may_be_left_out = 0, list[str](), list[bool]()
        for i, argument in enumerate(self.positional, 1):
            always = always if argument.has_default else i
        may_be_left_out += [False] * always + [True] * (len(self.positional) - always)
        for argument in self.keyword_only:
            named.append(f"{argument.name}={argument.name}")
            may_be_left_out.append(argument.has_default)
            if argument.variable != argument.name:
                raise UnsupportedError(
                    f"a keyword-only argument cannot be named {argument.name!r}: that is a Python keyword",
                    argument=argument.name,
                    fix="rename it, or make it positional",
                )
        return CallShape(
            arguments=(*self.positional, *self.keyword_only),
            positional=tuple([argument.variable for argument in self.positional]),
            named=tuple(named),
            tensors=tuple([argument.variable for argument in self.tensors]),
            always=always,
            may_be_left_out=tuple(may_be_left_out),
            may_be_none=frozenset([a.name for a in self.arguments if a.type != "Tensor" or len(self.tensors) > 1]),
        )

    @cached_property
    def is_functional(self) -> bool:
        """Does it mutate nothing, and return something, in memory of its own?"""
        return bool(self.returns) and not self.mutated and not self.is_view

    @property
    def is_of_tensors(self) -> bool:
        """Are all arguments tensors, passed by position, and all returns new tensors or written arguments?"""
        types = {each.type for each in (*self.positional, *self.returns)}
        return types <= {"Tensor"} and not (self.keyword_only or self.is_view)

    @cached_property
    def is_differentiable(self) -> bool:
        """Can it have a formula? Of ops that return a view only those that view a single tensor can."""
        if not self.is_view:
            return bool(self.returns or self.mutated)
        tensors_in = sum(a.is_tensor for a in self.arguments)
        return not self.mutated and tensors_in == 1 and sum(r.is_tensor for r in self.returns) == 1

    @cached_property
    def device_argument(self) -> Argument | None:
        """The argument ``Device device``, which decides for a factory function where it runs."""
        return next((a for a in self.arguments if a.name == "device" and a.type == "Device"), None)


# Differentiability: which arguments and returns of an op can have gradients -------------------------------------------

#: One argument, or several.
Names = str | Iterable[str]


class Differentiable(NamedTuple):
    """Which parts of an op are differentiable, whatever its formula."""

    #: A flag for each return; empty if every one is differentiable.
    returns: tuple[bool, ...] = ()
    #: The tensor arguments that have no gradient.
    nondiff_args: frozenset[str] = frozenset()
    #: Is any return differentiable?
    op: bool = True

    @classmethod
    def of(cls, given: bool | Sequence[bool], nondiff_args: Names, schema: Schema, op: str) -> Differentiable:
        """The record of what ``differentiable=`` and ``nondiff_args=`` of an op say."""
        if given is True and not nondiff_args:
            return ALL
        flags: Any = (given,) * len(schema.returns) if isinstance(given, bool) else given
        if not isinstance(flags, (tuple, list)) or [type(flag) for flag in flags] != [bool] * len(schema.returns):
            raise DefinitionError(
                "differentiable= must be True, False, or one flag for each return",
                op=op,
                expected=f"{len(schema.returns)} flags, for {schema}",
                got=brief(given),
            )
        nondiff = tensor_names(nondiff_args, "nondiff_args", schema, op)
        return cls(tuple(flags), nondiff, given is True or True in flags)

    def differentiable_args(self, schema: Schema) -> tuple[Argument, ...]:
        """The arguments that make a call one to be differentiated, if they require grad. A mutated one always does."""
        return tuple([a for a in schema.tensors if a.is_mutated or (self.op and a.name not in self.nondiff_args)])


#: Of an op that says nothing of it: everything is differentiable.
ALL = Differentiable()


def names_in(given: Names, what: str, op: str) -> tuple[str, ...]:
    """The names that an option holds, as a tuple: it may be an iterator, to be read once."""
    names: tuple[Any, ...] = (given,) if isinstance(given, str) or not isinstance(given, Iterable) else tuple(given)
    for name in names:
        if not isinstance(name, str):
            problem = f"{what}= must be the name of an argument, or a tuple of names"
            raise DefinitionError(problem, op=op, got=brief(given), fix=f'e.g. {what}="x" or {what}=("x", "y")')
    return names


def tensor_names(given: Names, what: str, schema: Schema, op: str) -> frozenset[str]:
    """The names of tensor arguments that an option holds."""
    if given == ():
        return frozenset()
    names = frozenset(names_in(given, what, op))
    tensors = [argument.name for argument in schema.tensors]
    for name in names:
        if name not in tensors:
            raise DefinitionError(
                f"{what}= names something that is not a tensor argument of the op",
                op=op,
                expected=f"some of {', '.join(tensors)}",
                got=brief(name),
            )
    return names


def is_differentiable(value: Any) -> bool:
    """Is it a tensor of a dtype that has gradients?"""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
