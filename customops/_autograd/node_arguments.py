"""How an op's arguments become those of its node, which autograd looks at one by one: lists are flattened.

The generated functions refer to the arguments by variables. `NodeArguments` says which there are, and where among the
node's flat arguments each one is.
"""

from __future__ import annotations

from customops._autograd.layout import Layout
from customops._codegen.function import always_passed, as_tuple, variable_name
from customops._schema.model import Schema


class NodeArguments:
    """The arguments of the functions that are generated for a node.

    A node `is_plain` if it takes and returns what the op does: arguments are positional, none is mutated, and there are
    no lists of tensors. Arguments that a call leaves out are left out there, too. Other nodes get all their inputs in
    each call, None for those left out, and ``$passed`` says how many positional ones the op got.
    """

    def __init__(self, schema: Schema, layout: Layout) -> None:
        self.schema, self.layout, self.inputs = schema, layout, layout.inputs
        self.always = always_passed(schema)
        self.has_rest = self.always < layout.positional
        self.has_lists = any(argument.is_tensor_list for argument in self.inputs)
        returns_plainly = bool(schema.returns) and not any(layout.list_outputs)
        self.is_plain = returns_plainly and not (self.has_lists or schema.keyword_only or schema.mutated)
        self.returns_tuple = len(schema.returns) > 1 or any(ret.type.startswith("(") for ret in schema.returns)
        self.is_padded = self.has_rest and not self.is_plain
        self.has_named = len(schema.arguments) > len(self.inputs)
        #: Does the node say more about its outputs than autograd passes on? See `inplace.Outcome`.
        self.has_outcome = bool(schema.mutated) or (self.returns_tuple and any(layout.list_outputs))
        #: The inputs, in the order in which the node has them. In a plain node, those after them may be left out.
        self.order = range(self.always) if self.is_plain else self._order()
        #: The inputs that are lists of which the node is told the length. The last one has what is left.
        self.measured = self._measured()
        self._places = self._find_places()

    def _order(self) -> range | list[int]:
        order = range(len(self.inputs))
        return sorted(order, key=lambda i: (i != self.layout.first, self.inputs[i].is_tensor_list))

    def _measured(self) -> list[int]:
        lists = [i for i in self.order if self.inputs[i].is_tensor_list]
        return [i for i in lists if i != self.order[-1] or self.may_be_none(i)]

    def may_be_left_out(self, i: int) -> bool:
        """May a call leave an input out that the node gets?"""
        argument = self.inputs[i]
        return not self.is_plain and argument.has_default and (argument.kwarg_only or i >= self.always)

    def may_be_none(self, i: int) -> bool:
        """May a list be None? It is one flat argument then."""
        return self.inputs[i].type.endswith("?") or self.may_be_left_out(i)

    # Variables --------------------------------------------------------------------------------------------------

    @property
    def head(self) -> list[str]:
        """What the node gets before the inputs of the op."""
        more = {"$outcome": self.has_outcome, "$named": self.has_named, "$passed": self.is_padded}
        return ["$kernel", *(name for name, is_there in more.items() if is_there), *map(self.length, self.measured)]

    @property
    def flat(self) -> str:
        """All inputs of the node, as a tuple. After a mutation the variables may have other values."""
        return "$flat" if self.has_lists or self.schema.mutated else as_tuple(self._variables())

    @property
    def flat_parameters(self) -> list[str]:
        return ["*$flat"] if self.has_lists else self._variables()

    def _variables(self) -> list[str]:
        return [*map(self.variable, self.order), *(["*$rest"] if self.is_plain and self.has_rest else [])]

    def variable(self, i: int) -> str:
        """The variable that has an input. A list of tensors has its items there as a tuple, in `forward`."""
        return variable_name(self.inputs[i])

    def length(self, i: int) -> str:
        return f"$length_{self.inputs[i].name}"

    def place(self, i: int) -> str:
        """Where an input is among the flat ones: an index, or for a list a slice."""
        return self._places[i]

    def _find_places(self) -> dict[int, str]:
        places, start, count = {}, "", 0
        for i in self.order:
            here = f"{start} + {count}" if start and count else start or str(count)
            if not self.inputs[i].is_tensor_list:
                places[i] = here
                count += 1
            elif i in self.measured:
                places[i] = f"{here}:$end_{self.inputs[i].name}"
                start, count = f"$end_{self.inputs[i].name}", 0
            else:
                places[i] = f"{here}:"
        return places

    # What the op is called with ---------------------------------------------------------------------------------

    def positional(self, values: dict[int, str]) -> str:
        """The positional arguments as a tuple, of the expressions for inputs."""
        if self.is_plain:
            return self.flat
        items = as_tuple(values[i] for i in range(self.layout.positional))
        return f"{items}[:$passed]" if self.is_padded else items

    def keyword_only(self, values: dict[int, str]) -> str:
        """The keyword-only arguments as a dict."""
        tensors = [f"{self.inputs[i].name!r}: {values[i]}" for i in range(self.layout.positional, len(self.inputs))]
        return f"{{{', '.join([*(['**$named'] if self.has_named else []), *tensors])}}}"

    def call(self, values: dict[int, str]) -> str:
        """The arguments in a call of the kernel."""
        positional = [values[i] for i in range(self.layout.positional)]
        if self.is_padded:
            positional = [f"*{as_tuple(positional)}[:$passed]"]
        named = [f"{self.inputs[i].name}={values[i]}" for i in range(self.layout.positional, len(self.inputs))]
        return ", ".join([*positional, *named, *(["**$named"] if self.has_named else [])])

    def given(self, i: int) -> str:
        """An expression for what the op or a callback is given: lists are new ones, as the dispatcher makes them."""
        argument, variable = self.inputs[i], self.variable(i)
        if "[" not in argument.type:
            return variable
        is_optional = argument.type.endswith("?") or self.may_be_left_out(i)
        return f"(None if {variable} is None else $list({variable}))" if is_optional else f"$list({variable})"

    def indices(self, count: int) -> list[int]:
        """Which inputs the node has, if it has this many."""
        return [*self.order, *range(len(self.order), count)]
