"""What generated functions of an op have in common, and the functions at dispatch keys: a device's, and those above.

`Emitter` has parameters, pass-through and defaults; then come the checks of results, the call of a kernel with them,
the function around it, and the functions at the keys above, which call the kernel where that is all there is to do.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from customops import _torch
from customops._codegen.function import Source, as_dict, as_tuple, compile_on_first_call, emit_parameters, fill, joined
from customops._dispatch.callbacks import Fn
from customops._dispatch.current_kernel import CurrentKernel
from customops._dispatch.operator import OperatorHandle, OpSpec
from customops._dispatch.options import CheckPolicy
from customops._dispatch.results import alias_error, result_error, structure_check
from customops._places import cut
from customops._schema.defaults import in_python_form, is_altered, without_defaults
from customops._schema.model import Schema
from customops._torch.schema import Tag
from customops._torch.trees import tensors_in
from customops.errors import CustomOpsError

#: What templates refer to, in any function that calls a kernel.
_OBJECTS: dict[str, Any] = {
    "CustomOpsError": CustomOpsError,
    "Tensor": Tensor,
    "ad_inplace_or_view": _torch.dispatcher.DispatchKey.ADInplaceOrView,
    "any_alias": _torch.memory.any_alias,
    "autocast_is_on": _torch.dispatcher.autocast_is_on,
    "conjugate": _torch.dispatcher.DispatchKey.Conjugate,
    "cut": cut,
    "errors": (AttributeError, TypeError, RuntimeError),
    "forward_ad": _torch.autograd.forward_ad,
    "increment_version": _torch.autograd.increment_version,
    "is_dynamo_compiling": is_dynamo_compiling,
    "is_excluded": _torch.dispatcher.is_excluded,
    "is_grad_enabled": torch.is_grad_enabled,
    "is_nested": attrgetter("is_nested"),
    "is_own": torch.UntypedStorage.resizable,
    "is_torch_function_mode_enabled": _torch.dispatcher.is_torch_function_mode_enabled,
    "lists": frozenset({list, tuple, torch.Size}),
    "mode_count": _torch.dispatcher.mode_count,
    "profiler": _torch.dispatcher.profiler,
    "sequences": (list, tuple),
    "set_grad_enabled": _torch.dispatcher.set_grad_enabled,
    "share_memory": _torch.memory.outputs_share_memory,
    "sign": math.copysign,
    "storage": Tensor.untyped_storage,
    "tensor_types": {Tensor, torch.nn.Parameter},
    "tensors_in": tensors_in,
    "transform": _torch.dispatcher.innermost_transform,
    "transforms_active": _torch.dispatcher.transforms_active,
    "types_in_lists": {Tensor, torch.nn.Parameter, type(None)},
    "uses": _torch.memory.storage_uses,
    "without_defaults": without_defaults,
}

# Parameters, defaults, and passing on what was given ------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """What of an op its generated functions depend on: ops of one shape share them."""

    key: tuple[Any, ...]
    schema: Schema = field(compare=False)
    tags: tuple[torch.Tag, ...]
    when: CheckPolicy  # results are checked
    switches_off: Literal["all", "gradients", "nothing"]  # around a kernel; all: autocast, too, and what modes left

    @classmethod
    def of(cls, spec: OpSpec, when: CheckPolicy) -> Shape:
        switches_off: Literal["all", "gradients", "nothing"] = "all"
        if not spec.kernel_calls_torch:
            # A copy of a tensor that requires grad, but gets no gradient from the op, would be recorded.
            has_others = len(spec.differentiable.differentiable_args(spec.schema)) < len(spec.schema.tensors)
            switches_off = "gradients" if has_others else "nothing"
        return cls(spec.schema.exact_key, spec.schema, spec.tags, when, switches_off)


class Emitter(Source):
    """The source of a function that is called as the op is."""

    def __init__(self, name: str, shape: Shape) -> None:
        super().__init__(name, shape.schema)
        self.shape = shape
        self.holes, objects, objects_of_op = _common(shape)
        self.objects |= _OBJECTS | objects
        self.objects_of_op |= objects_of_op

    def fill(self, template: str, /, **holes: str | Sequence[str]) -> None:
        super().fill(template, **self.holes, **holes)


@functools.lru_cache(maxsize=512)
def _common(shape: Shape) -> tuple[dict[str, str | list[str]], dict[str, Any], dict[str, Callable[[str], Any]]]:
    """What is the same in all functions of an op: code, by the holes of templates that it is for, and objects.

    `parameters` has the defaults that a call may leave out; `arguments` all of them as they are; `defaults` the lines
    that give arguments the form that callbacks are to see; `passed`, `args` and `kwargs` the arguments but those that
    were left out, with `leave_out` before. `checks` are the lines that raise unless a result has the types of the
    schema, and aliases only what the schema says; `check_types` those that look at types alone.
    """
    call, count = shape.schema.call, len(shape.schema.positional)
    objects: dict[str, Any] = {}
    parameters: dict[str, str] = {}  # the defaults of those that a call may leave out
    named, defaults, leave_out = list[str](), list[str](), list[str]()
    cuts = call.always < count
    for i, argument in enumerate(call.arguments):
        name = argument.variable
        if argument.has_default:
            objects[f"default_{i}"] = None if argument.default_is_none_in_text else argument.default
            if call.may_be_left_out[i]:
                parameters[argument.name] = f"$default_{i}"
            if is_altered(argument):
                objects[f"in_python_form_{i}"] = functools.partial(in_python_form, argument)
                defaults.append(f"{name} = $in_python_form_{i}({name})")
            elif isinstance(argument.default, tuple):  # a default that is a list is another list in each call
                defaults += [f"if {name} is $default_{i}:", f"    {name} = $list({name})"]
        if argument.kwarg_only and argument.has_default and cuts:
            # Passing a keyword costs more than finding that it is at its default.
            leave_out += [f"if {name} is not $default_{i}:", f"    $named[{argument.name!r}] = {name}"]
        elif argument.kwarg_only:
            named.append(f"{name}={name}")
    positional = list(call.positional)
    if cuts:
        rest = as_tuple([f"$default_{i}" for i in range(call.always, count)])
        positional[call.always :] = [f"*$without_defaults({as_tuple(positional[call.always :])}, {rest})"]
    if leave_out:
        leave_out.insert(0, "$named = {}")
        named.append("**$named")
    checks, check_types, objects_of_op = _emit_checks(shape)
    holes: dict[str, str | list[str]] = {
        "parameters": emit_parameters(shape.schema.positional, shape.schema.keyword_only, parameters),
        "arguments": [*call.positional, *call.named],
        "defaults": defaults,
        "leave_out": leave_out,
        "passed": [*positional, *named],
        "args": as_tuple(positional),
        "kwargs": f"$dict({', '.join(named)})" if named else "{}",
        "checks": checks,
        "check_types": check_types,
    }
    return holes, objects, objects_of_op


# The lines that check what a kernel returns ---------------------------------------------------------------------------

FIRST_CALL_ONLY = """\
if $current.unchecked:
    {checks}
    $current.unchecked = False
"""

CHECK_IDENTITY = """\
if {is_another}:
    raise $result_error($result, $fn)
"""

CHECK_ALIASES = """\
try:
    $alias = (
        {may_alias}
    )
except $RuntimeError:
    $alias = True  # perhaps: a layout without a storage of its own
if $alias and $share_memory({tensors}, {results}):
    raise $alias_error($result, $fn, {positional}, {keyword_only})
"""


#: Is False, at little cost, for results in memory of their own.
#:
#: Memory that others made, as that of a NumPy array, cannot be resized; it may be that of an argument, under another
#: storage. Memory of torch is new if the tensor is the only one of its storage; the second use is the Python object.
MAY_ALIAS = """\
not (
    {each_is_own}
)
{any_is_another}
"""

#: The same where lists of tensors are returned.
LISTS_MAY_ALIAS = """\
not $all($map($is_own, $map($storage, {flat})))
or $any_alias({tensors}, {}, {results})
"""


def _emit_checks(shape: Shape) -> tuple[str, str, dict[str, Callable[[str], Any]]]:
    """The lines that check what a kernel returns, those of its types alone, and the objects that are the op's own."""
    schema, returns = shape.schema, shape.schema.returns
    of_op: dict[str, Callable[[str], Any]] = {"structure": functools.partial(structure_check, schema, role="kernel")}
    results = ["$result"] if len(returns) == 1 else [f"$result[{i}]" for i in range(len(returns))]
    if {ret.type for ret in returns} <= {"Tensor", "Tensor[]"}:
        matches = [f"$type($result) is $tuple and $len($result) == {len(returns)}"] if len(returns) > 1 else []
        for value, ret in zip(results, returns, strict=True):  # what is True for the usual values of a return
            is_list = f"($type({value}) is $list and $set($map($type, {value})) <= $tensor_types)"
            matches.append(f"$isinstance({value}, $Tensor)" if ret.is_tensor else is_list)
        mismatch = f"not {joined('and', matches)}" if returns else "$result is not None"
        types = f"if {mismatch}:\n    $result = $structure($result, $fn)\n"
    else:
        types = "$result = $structure($result, $fn)\n"
    if shape.when == "never":
        return "", types, of_op
    if Tag.inplace in shape.tags or Tag.out in shape.tags:
        of_op["result_error"] = functools.partial(functools.partial, result_error, schema)
    if Tag.inplace in shape.tags:
        lines = fill(CHECK_IDENTITY, is_another=f"$result is not {schema.positional[0].variable}")
    elif Tag.out in shape.tags:
        outs = [argument.variable for argument in schema.mutated]
        is_another = [f"{result} is not {out}" for result, out in zip(results, outs, strict=True)]
        if len(outs) > 1:
            is_another.insert(0, f"not $isinstance($result, $sequences) or $len($result) != {len(outs)}")
        lines = fill(CHECK_IDENTITY, is_another=" or ".join(is_another))
    else:
        of_op["alias_error"] = functools.partial(functools.partial, alias_error, schema)
        lines = types
        found = {value: ret.type for value, ret in zip(results, returns, strict=True) if "Tensor" in ret.type}
        has_one_tensor = not schema.tensors and list(found.values()) == ["Tensor"]
        if found and not (schema.is_view or has_one_tensor):
            tensors = schema.call.tensors
            if set(found.values()) == {"Tensor"}:
                is_own = [_torch.memory.OWNS_STORAGE.format(each) for each in found]
                in_list = "or $id({}) in $map($id, {} or ())"
                lists = {each.variable: in_list for each in schema.tensors if not each.is_tensor}
                pairs = [*itertools.product(found, tensors), *itertools.combinations(found, 2)]
                any_is_another = [lists.get(other, "or {} is {}").format(one, other) for one, other in pairs]
                may_alias = fill(MAY_ALIAS, each_is_own="\nand ".join(is_own), any_is_another=any_is_another)
            else:
                flat = [value if type_ == "Tensor" else f"*({value} or ())" for value, type_ in found.items()]
                may_alias = fill(
                    LISTS_MAY_ALIAS, flat=as_tuple(flat), tensors=as_tuple(tensors), results=as_tuple(found)
                )
            lines += fill(
                CHECK_ALIASES,
                may_alias=may_alias,
                tensors=as_tuple(tensors),
                results=as_tuple(found),
                positional=as_tuple(schema.call.positional),
                keyword_only=as_dict({argument.name: argument.variable for argument in schema.keyword_only}),
            )
    return fill(FIRST_CALL_ONLY, checks=lines) if shape.when == "first" else lines, types, of_op


# The function at a device's dispatch key: it calls the user's kernel and checks the result ----------------------------

KERNEL = """\
def kernel({parameters}):
    {defaults}
    {kernel_call}
"""

KERNEL_CALL = """\
{version_bump}
$fn = {fn}
{call}
{checks}
{conversion}
return $result
"""

CALL = """\
if {records}:
    $set_grad_enabled(False)
    try:
        $result = $fn({arguments})
    finally:
        $set_grad_enabled(True)
else:
    $result = $fn({arguments})
"""

CALL_IN_ANY_STATE = """\
if {state_differs}:
    $result = $call_plainly($fn, {arguments})
el"""

TO_TUPLE = """\
if $type($result) is not $tuple and $isinstance($result, $sequences):
    $result = $tuple($result)
"""


def kernel(operator: OperatorHandle, current: CurrentKernel, *, bump: bool = False) -> Callable[..., Any]:
    """The function at a device's dispatch key: fill defaults in, call the current kernel, check what it returns.

    With `bump` it also bumps the versions of mutated arguments, which is else done at a key above.
    """
    if operator.schema.keyword_only:
        _ = operator.schema.call  # raises now what it would raise in the first call

    def generate(*, when: CheckPolicy = operator.options.check) -> Any:
        shape = Shape.of(operator.spec, when)
        return _source(shape, bump=bump).build(operator.qualname, current=current)

    return compile_on_first_call("kernel", generate)


@functools.lru_cache(maxsize=512)
def _source(shape: Shape, *, bump: bool) -> Source:
    source = Emitter("kernel", shape)
    source.fill(KERNEL, kernel_call=emit_kernel_call(source, bump=bump, direct=False))
    return source


def emit_kernel_call(
    source: Emitter,
    *,
    bump: bool,
    direct: bool,
    alone: bool = False,
    last: bool = False,
    fn: str = "fn",
    records: str = "$is_grad_enabled()",
) -> str:
    """The lines from the call of the ``$current`` kernel to the return.

    `fn`: the attribute of `CurrentKernel` that is called. `records`: is gradient mode on?

    A kernel runs in one state, whoever called the op: autocast is off, nothing is recorded (but what it records itself,
    under ``torch.enable_grad()``), and no dispatch key is excluded for its own operations. Keys are excluded below a
    mode and in the first call of compiled code, never in a `direct` call. A call that is `alone` has no dispatcher
    around it, which would convert what is returned, and was looked at: autocast is off. Where it is the `last`, no
    dispatcher looks at what is returned: its types are checked here, whatever the policy. Both were looked at: no
    profiler records. Where the shape says so, a
    kernel is called in the caller's state, as it calls no torch operation.
    """
    schema, when = source.schema, source.shape.when
    checks = source.holes["checks"]
    if last and when != "always":
        checks = f"{source.holes['check_types']}{checks}"
    # For views, torch's own kernel, above, excludes keys that have to be.
    keeps_keys = direct or schema.is_view
    state_differs = "$autocast_is_on()" if keeps_keys else "$autocast_is_on() or $is_excluded($conjugate)"
    plainly = _torch.dispatcher.call_plainly_writing if schema.mutated else _torch.dispatcher.call_plainly
    source.objects["call_plainly"] = _torch.dispatcher.call_view_plainly if schema.is_view else plainly
    call = CALL if alone or source.shape.switches_off == "gradients" else CALL_IN_ANY_STATE + CALL
    if source.shape.switches_off == "nothing":
        call = "$result = $fn({arguments})\n"
    conversion = ""  # what the dispatcher would do to a result
    if len(schema.returns) > 1:
        conversion = TO_TUPLE if when != "always" else ""  # the checks do, too
    elif alone and schema.returns and schema.returns[0].type.endswith("]"):
        conversion = "$result = $list($result)\n"
    return fill(
        KERNEL_CALL,
        fn=f"$current.{fn}" + ("" if alone or last else f" if {_torch.dispatcher.NO_PROFILER} else $current.named()"),
        version_bump=emit_version_bump(source) if bump else "",
        call=fill(call, state_differs=state_differs, records=records, arguments=source.holes["arguments"]),
        checks=checks,
        conversion=conversion,
    )


# Versions -------------------------------------------------------------------------------------------------------


def emit_version_bump(source: Source) -> str:
    """The lines that count a write to each mutated argument."""
    arguments = source.schema.mutated
    mutated = as_tuple([argument.variable for argument in arguments])
    if [argument.type for argument in arguments] == ["Tensor[]"]:
        return f"$increment_version({arguments[0].variable})\n"
    if not all([argument.is_tensor for argument in arguments]):
        return f"$increment_version($tensors_in({mutated}))\n"
    optional = [a.variable for a in arguments if a.name in source.schema.call.may_be_none]
    if not optional:
        return f"$increment_version({mutated})\n"
    all_given = " and ".join([f"{name} is not None" for name in optional])
    bump = f"if {all_given}:\n    $increment_version({mutated})\n"
    return bump if len(arguments) == 1 else f"{bump}else:\n    $increment_version($tensors_in({mutated}))\n"


# The functions at the keys above a device: a fast path to the kernel, or the autograd node, or redispatch -------------
#
# The key set that a function gets holds whatever else is to come: modes, functorch, subclasses, views that are
# conjugate, ... `FastPath.by_keyset` has the current kernel for the key sets that hold nothing but a device, so where
# it has one and nothing is to be differentiated, what the dispatcher would do is to call that kernel.

FAST_PATH = """\
def {name}($keyset, /, {parameters}):
    $current = $fast_path.get($keyset.raw_repr())
    if $current is not None and {no_forward_ad}:
        {fast_path}
    {leave_out}
    return $general({given}, {args}, {kwargs})
"""

CALL_KERNEL = """\
{defaults}
{kernel_call}
"""

CALL_OR_DIFFERENTIATE = """\
$records = $is_grad_enabled()
if not {requires_grad}:
    {defaults}
    {kernel_call}
{node_call}
"""

NODE_CALL = """\
$apply = $node.apply
if $apply is not None:
    {leave_out}
    try:
        return $apply($current.direct, {passed})
    except $errors as $error:
        $node.explain($error)
        raise
"""


def function_at(
    key: Literal["Autograd", "ADInplaceOrView"], operator: OperatorHandle, make: Callable[[], tuple[Fn, Any]]
) -> Fn:
    """The function at a key above the device's: do what its kernel does, where that is all there is to do.

    Where something is to be differentiated, ``node.apply(kernel, *args)`` does it, if the op has a node that takes its
    arguments as they are. All else is done by `general`. A call gets to ADInplaceOrView first, at ops that write, where
    autograd is left out: in inference mode, with tensors from outside of it.

    Args:
        make: returns ``general(keyset, current, args, kwargs)``, at ADInplaceOrView ``general(keyset, args, kwargs)``;
            and the holder of a node or None.
    """
    is_autograd = key == "Autograd"

    def generate(*, when: CheckPolicy = operator.options.check) -> Any:
        general, node = make()
        differentiable = operator.differentiable.differentiable_args(operator.schema) if is_autograd else ()
        names = tuple([argument.name for argument in differentiable]) if is_autograd else None
        source = _source_above(Shape.of(operator.spec, when), names, has_node=node is not None)
        fast_path = operator.fast_path.by_keyset
        return source.build(operator.qualname, fast_path=fast_path, general=general, node=node)

    return compile_on_first_call("autograd" if is_autograd else "ad_inplace_or_view", generate)


@functools.lru_cache(maxsize=512)
def _source_above(shape: Shape, differentiable_args: tuple[str, ...] | None, *, has_node: bool) -> Source:
    """The source of either function; `differentiable_args` is None for the one at ADInplaceOrView."""
    is_autograd, schema = differentiable_args is not None, shape.schema
    source = Emitter("autograd" if is_autograd else "ad_inplace_or_view", shape)
    records = "$records" if is_autograd else "$is_grad_enabled()"
    holes: dict[str, Any] = {
        "defaults": source.holes["defaults"],
        "kernel_call": emit_kernel_call(source, bump=bool(schema.mutated), direct=True, records=records),
    }
    if differentiable_args is not None:
        wanted = [argument for argument in schema.arguments if argument.name in differentiable_args]
        names = [argument.variable for argument in wanted]
        requires_grad = "False"  # an expression for: is anything to be differentiated?
        if 0 < len(wanted) <= 3 and all([argument.is_tensor for argument in wanted]):
            tests = list[str]()
            for argument in wanted:
                test = f"{argument.variable}.requires_grad"
                may_be_none = argument.name in schema.call.may_be_none
                tests.append(f"({argument.variable} is not None and {test})" if may_be_none else test)
            requires_grad = f"($records and {joined('or', tests)})"
        elif wanted:
            source.objects["any_requires_grad"] = any_requires_grad(schema)
            requires_grad = f"($records and $any_requires_grad({', '.join(names)}))"
        holes["requires_grad"] = requires_grad
        holes["node_call"] = fill(NODE_CALL, **source.holes) if has_node else ""
    source.fill(
        FAST_PATH,
        name=source.name,
        no_forward_ad=_torch.autograd.NO_FORWARD_AD,
        fast_path=fill(CALL_OR_DIFFERENTIATE if is_autograd else CALL_KERNEL, **holes),
        given="$keyset, $current" if is_autograd else "$keyset",
    )
    return source


def any_requires_grad(schema: Schema) -> Callable[..., bool]:
    """``f(*args, **kwargs)``: does a tensor, or one in a list, require grad?"""
    has_gaps = True in [argument.type.startswith("Tensor?[") for argument in schema.tensors]
    return _look_for_grad if has_gaps else _torch.autograd.any_requires_grad


def _look_for_grad(*args: Any, **kwargs: Any) -> bool:
    """torch's own function passes lists over that hold a None."""
    return any(tensor.requires_grad for tensor in tensors_in((*args, *kwargs.values())))
