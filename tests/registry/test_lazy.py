"""Lazy ops: any use defines them, with what was registered until then."""

from __future__ import annotations

import inspect
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import pytest
import torch
from helpers.functions import add_one
from torch import Tensor
from torch._subclasses import FakeTensorMode

import customops
from customops import CustomOpDef, Keys, Registry, like, opcheck
from customops.errors import (
    CallbackError,
    DefinitionError,
    MissingFakeError,
    RegistrationError,
    SchemaError,
    UnregisteredError,
)


def scale(x: Tensor, by: float = 2.0) -> Tensor:
    """Scale a tensor."""
    return x * by


def lazy(registry: Registry, name: str, fn: Callable[..., Any] = scale, **options: Any) -> Any:
    return registry.custom_op(name, fn, **{"mutates_args": (), "lazy": True, **options})


def pick(xs: Annotated[dict[str, Tensor], Keys("a")], name: str) -> Tensor:
    return xs[name] * 2


def with_rules(op: Any) -> Any:
    """The op with a fake, a gradient and a batching rule."""
    op.register_fake(lambda x, by: torch.empty_like(x))
    op.register_autograd(lambda ctx, grad: (grad * ctx.by, None), setup_context=keep_by)
    op.register_vmap(lambda info, in_dims, x, by: (op(x, by), in_dims[0]))
    return op


def keep_by(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.by = inputs[1]


def is_defined(name: str) -> bool:
    return bool(torch._C._jit_get_schemas_for_operator(name))


def packet(ns: str, name: str = "f") -> Any:
    return getattr(getattr(torch.ops, ns), name)


# What defines an op ---------------------------------------------------------------------------------------------------


USES: dict[str, Callable[[Any, str], Any]] = {
    "call": lambda op, ns: op(torch.ones(2)),
    "keyword call": lambda op, ns: op(x=torch.ones(2), by=2.0),
    "torch.ops": lambda op, ns: packet(ns)(torch.ones(2)),
    "overload": lambda op, ns: packet(ns).default(torch.ones(2)),
    "pickle": lambda op, ns: pickle.loads(pickle.dumps(op))(torch.ones(2)),
    "schema": lambda op, ns: op.schema.arguments and op(torch.ones(2)),
    "adopt": lambda op, ns: customops.adopt(f"{ns}::f")(torch.ones(2)),
    "fake": lambda op, ns: op(torch.ones(2, device="meta")).new_full((2,), 2.0, device="cpu"),
    "vmap": lambda op, ns: torch.vmap(op)(torch.ones(2, 1)).flatten(),
    "grad": lambda op, ns: torch.func.grad(lambda x: op(x).sum())(torch.ones(2)),
    "inference": lambda op, ns: torch.inference_mode()(op)(torch.ones(2)),
    "below a mode": lambda op, ns: below_a_mode(op),
    "bound": lambda op, ns: Holder(op).op(torch.ones(2)),
}


class Holder:
    def __init__(self, op: Any) -> None:
        self.op = op


def below_a_mode(op: Any) -> Tensor:
    with FakeTensorMode() as mode:
        assert op(mode.from_tensor(torch.ones(3))).shape == (3,)
    return op(torch.ones(2))


@pytest.mark.parametrize("use", USES)
def test_a_use_defines_the_op(registry: Registry, ns: str, use: str) -> None:
    op = with_rules(lazy(registry, f"{ns}::f"))
    assert not is_defined(f"{ns}::f")
    assert USES[use](op, ns).tolist() == [2.0, 2.0]
    assert is_defined(f"{ns}::f")
    assert type(op) is CustomOpDef
    assert customops.adopt(packet(ns)) is op
    x = torch.ones(2, requires_grad=True)
    op(x, 3.0).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3.0, 3.0]


def test_what_is_known_without_a_definition(registry: Registry, ns: str) -> None:
    op = lazy(registry, f"{ns}::f")
    line = inspect.currentframe().f_lineno - 1  # type: ignore[union-attr]
    assert isinstance(op, CustomOpDef)
    assert (op.__name__, op.__doc__, op.__wrapped__) == ("scale", "Scale a tensor.", scale)
    assert inspect.signature(op) == inspect.signature(scale)
    assert repr(op) == f"<CustomOpDef({ns}::f) not defined yet>"
    before = op.source
    assert list(registry) == [op]
    assert registry[f"{ns}::f"] is op
    assert pickle.dumps(op)
    assert not is_defined(f"{ns}::f")
    op(torch.ones(1))
    assert op.source == before
    assert f":{line}" not in before  # the helper's line
    assert list(registry) == [op]


def test_asking_for_methods_of_notebooks_defines_nothing(registry: Registry, ns: str) -> None:
    op = lazy(registry, f"{ns}::f")
    asked = ("_ipython_display_", "_repr_mimebundle_", "_ipython_canary_method_should_not_exist_", "__array__")
    assert not any(hasattr(op, name) for name in asked)
    assert not is_defined(op._qualname)


def test_a_pickled_op_is_the_same_op(ns: str, registry: Registry) -> None:
    op = lazy(registry, f"{ns}::f")
    data = pickle.dumps(op)
    assert not is_defined(f"{ns}::f")
    assert pickle.loads(data) is op


def test_a_registry_may_be_lazy(ns: str) -> None:
    registry = Registry(lazy=True)
    first = registry.custom_op(f"{ns}::f", scale, mutates_args=())
    second = registry.custom_op(f"{ns}::g", scale, mutates_args=(), lazy=False)
    assert (is_defined(f"{ns}::f"), is_defined(f"{ns}::g")) == (False, True)
    assert first(torch.ones(1)) == second(torch.ones(1))
    registry.clear()
    assert not is_defined(f"{ns}::f")


def test_other_ops_stay_lazy(registry: Registry, ns: str) -> None:
    lazy(registry, f"{ns}::f.other")
    lazy(registry, f"{ns}::g")
    assert packet(ns).other(torch.ones(1)) == 2
    assert not is_defined(f"{ns}::g")
    assert not hasattr(getattr(torch.ops, ns), "h")


def test_rich_signatures_and_bypass(registry: Registry, ns: str) -> None:
    op = lazy(registry, f"{ns}::pick", pick)
    assert op({"a": torch.ones(2)}, "a").tolist() == [2, 2]
    direct = lazy(registry, f"{ns}::direct", bypass=True)
    assert direct(torch.ones(2)).tolist() == [2, 2]
    assert "without the dispatcher" in direct.explain_call() or direct.explain_call()


def test_what_asks_for_the_signature_first(registry: Registry, ns: str) -> None:
    op = lazy(registry, f"{ns}::pick", pick)
    (first, *_), _ = op.lower({"a": torch.ones(2)}, "a")
    assert isinstance(first, Tensor)
    op = lazy(registry, f"{ns}::other", pick)
    op.register_kernel("cpu", lambda xs, name: xs["a"] + 1)
    op.register_fake(lambda xs, name: torch.empty_like(xs["a"]))
    assert op({"a": torch.ones(2)}, "a").tolist() == [2, 2]
    assert op({"a": torch.ones(2, device="meta")}, "a").is_meta
    plain = lazy(registry, f"{ns}::f")
    assert not hasattr(plain, "out")
    assert type(plain) is CustomOpDef
    assert not hasattr(lazy(registry, f"{ns}::g"), "no_such_attribute")


def test_out_variants_and_samples_are_remembered(registry: Registry, ns: str) -> None:
    op = lazy(registry, f"{ns}::f")
    op.register_samples(lambda: [(torch.ones(1),)])
    op.register_out(lambda x, by, *, out: out.copy_(x * by * 10))
    assert op.out(torch.ones(1), out=torch.empty(1)) == 20
    assert [sample.args for sample in op.samples()] == [(torch.ones(1),)]


def test_opcheck_takes_a_lazy_op(registry: Registry, ns: str) -> None:
    op = with_rules(lazy(registry, f"{ns}::f"))
    results = opcheck(op, (torch.ones(2),), test_utils=("test_schema", "test_faketensor"))
    assert set(results.values()) == {"SUCCESS"}


# Compilers ------------------------------------------------------------------------------------------------------------


@pytest.mark.compile
@pytest.mark.parametrize("bypass", [False, True])
def test_the_first_thing_in_compiled_code(registry: Registry, ns: str, bypass: bool) -> None:
    op = with_rules(lazy(registry, f"{ns}::f", bypass=bypass))
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(lambda x: op(x, 3.0) + 1, fullgraph=True, backend=backend)
    for _ in range(2):
        assert compiled(torch.ones(2)).tolist() == [4.0, 4.0]
    assert len(graphs) == 1
    assert packet(ns).default in {node.target for node in graphs[0].graph.nodes}


@pytest.mark.compile
def test_compiled_by_name_with_a_gradient(registry: Registry, ns: str) -> None:
    with_rules(lazy(registry, f"{ns}::f"))

    def call(x: Tensor) -> Tensor:
        return packet(ns)(x, 3.0).sum()

    x = torch.ones(2, requires_grad=True)
    torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)(x).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3.0, 3.0]


@pytest.mark.compile
def test_compiled_with_a_rich_signature(registry: Registry, ns: str) -> None:
    op = lazy(registry, f"{ns}::pick", pick)
    op.register_fake(lambda xs, name: torch.empty_like(xs[name]))
    compiled = torch.compile(lambda x: op({"a": x}, "a"), fullgraph=True, backend="aot_eager")
    assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]


class Model(torch.nn.Module):
    def __init__(self, op: Any) -> None:
        super().__init__()
        self.op = op

    def forward(self, x: Tensor) -> Tensor:
        return self.op(x) + 1


@pytest.mark.compile
@pytest.mark.parametrize("strict", [False, True])
def test_export_and_load(registry: Registry, ns: str, strict: bool, tmp_path: Any) -> None:
    op = with_rules(lazy(registry, f"{ns}::f"))
    program = torch.export.export(Model(op), (torch.ones(2),), strict=strict)
    torch.export.save(program, tmp_path / "program.pt2")
    op.unregister()
    again = with_rules(lazy(registry, f"{ns}::f"))
    assert not is_defined(f"{ns}::f")
    loaded = torch.export.load(tmp_path / "program.pt2")
    assert loaded.module()(torch.ones(2)).tolist() == [3.0, 3.0]
    assert type(again) is CustomOpDef


@pytest.mark.compile
def test_a_definition_that_fails_while_tracing(registry: Registry, ns: str) -> None:
    op = lazy(registry, f"{ns}::f", lambda x: x)
    for _ in range(2):
        with pytest.raises(Exception, match="parameter x must have a type annotation"):
            torch.compile(lambda x: op(x), fullgraph=True, backend="eager")(torch.ones(1))


# Registrations before the definition ----------------------------------------------------------------------------------


def test_registrations_return_what_they_return_otherwise(registry: Registry, ns: str) -> None:
    op = lazy(registry, f"{ns}::f")
    assert op.register_kernel("cpu", add_kernel) is add_kernel
    assert op.register_kernel("cpu")(add_kernel) is add_kernel
    assert op.register_fake(allow_override=True)(add_kernel) is add_kernel
    assert op.register_vmap("sequential") == "sequential"
    assert op.register_vmap(func=vmap_rule) is vmap_rule
    assert op.register_autocast("cpu", torch.bfloat16) is None
    declared = like("x")
    assert op.register_fake(declared) is declared
    assert not is_defined(f"{ns}::f")
    assert op(torch.ones(1)) == 3
    assert op(torch.ones(4, device="meta")).shape == (4,)


def add_kernel(x: Tensor, by: float) -> Tensor:
    return x + by


def vmap_rule(info: Any, in_dims: Any, x: Tensor, by: float) -> Any:
    return x * by, in_dims[0]


def test_the_function_forms_and_torchs_remember_too(registry: Registry, ns: str) -> None:
    op = lazy(registry, f"{ns}::f")
    customops.register_kernel(op, "cpu", add_kernel)
    torch.library.register_fake(f"{ns}::f", lambda x, by: x.new_empty(7))
    assert not is_defined(f"{ns}::f")
    assert op(torch.ones(1)) == 3
    assert op(torch.ones(1, device="meta")).shape == (7,)


def test_the_newest_registration_counts(registry: Registry, ns: str) -> None:
    op = lazy(registry, f"{ns}::f")
    op.register_kernel("cpu", add_kernel)
    op.register_kernel("cpu", lambda x, by: x - by)
    assert op(torch.ones(1)) == -1
    op.register_kernel("cpu", add_kernel)
    assert op(torch.ones(1)) == 3


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        (lambda op: op.register_kernel("cpux", scale), RegistrationError),
        (lambda op: op.register_kernel([], scale), DefinitionError),
        (lambda op: op.register_fake(3), RegistrationError),
        (lambda op: op.register_autocast("cpu"), TypeError),
    ],
)
def test_what_can_be_seen_at_once_is_said_at_once(
    registry: Registry, ns: str, wrong: Callable[[Any], Any], kind: type[Exception]
) -> None:
    op = lazy(registry, f"{ns}::f")
    with pytest.raises(kind):
        wrong(op)
    assert op(torch.ones(1)) == 2


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        (lambda op: op.register_fake(lambda a, b, c: a), CallbackError),
        (lambda op: op.register_fake(like("q")), RegistrationError),
        (lambda op: op.register_autocast("cpu", "float"), DefinitionError),
    ],
)
def test_the_rest_raises_each_time_with_the_line_and_leaves_nothing(
    registry: Registry, ns: str, wrong: Callable[[Any], Any], kind: type[Exception]
) -> None:
    op = lazy(registry, f"{ns}::f")
    wrong(op)
    for _ in range(2):
        with pytest.raises(kind, match=r"test_lazy\.py:\d+"):
            op(torch.ones(1))
        with pytest.raises(kind, match=r"test_lazy\.py:\d+"):
            packet(ns)
    assert not is_defined(f"{ns}::f")
    assert f"{ns}::f" not in torch._library.simple_registry.singleton._data
    assert list(registry) == [op]
    op.unregister()
    assert lazy(registry, f"{ns}::f")(torch.ones(1)) == 2


def test_profilers_leave_an_op_alone_whose_definition_failed(registry: Registry, ns: str) -> None:
    op = lazy(registry, f"{ns}::f")
    op.register_fake(lambda a, b, c: a)
    with pytest.raises(CallbackError):
        op(torch.ones(1))
    with torch.profiler.profile() as profile:
        torch.ones(2).cos()
    assert "aten::cos" in {event.key for event in profile.key_averages()}


def test_a_bad_schema_raises_each_time(registry: Registry, ns: str) -> None:
    def untyped(x):  # type: ignore[no-untyped-def]
        return x

    op = lazy(registry, f"{ns}::f", untyped)
    for _ in range(2):
        with pytest.raises(SchemaError, match="untyped"):
            op(torch.ones(1))
        with pytest.raises(SchemaError):
            _ = op.schema
    assert not is_defined(f"{ns}::f")


def test_a_missing_fake_is_missing_as_ever(registry: Registry, ns: str) -> None:
    op = lazy(registry, f"{ns}::f")
    with pytest.raises(MissingFakeError):
        op(torch.ones(1, device="meta"))
    assert op(torch.ones(1)) == 2


# Names and lifetimes --------------------------------------------------------------------------------------------------


def test_conflicts(registry: Registry, ns: str) -> None:
    first = lazy(registry, f"{ns}::f")
    assert lazy(registry, f"{ns}::f", add_one, on_conflict="skip") is first
    with pytest.raises(DefinitionError, match=r"an op of this name exists, defined at .*test_lazy\.py"):
        lazy(registry, f"{ns}::f", on_conflict="error")
    assert lazy(registry, f"{ns}::f", on_conflict="reuse") is first  # which needs its schema
    assert is_defined(f"{ns}::f")

    old = lazy(registry, f"{ns}::g")
    new = lazy(registry, f"{ns}::g", add_one)
    with pytest.raises(UnregisteredError, match="was replaced by the definition at"):
        old(torch.ones(1))
    with pytest.raises(UnregisteredError):
        old.register_fake(add_one)
    assert new(torch.ones(1)) == 2
    third = registry.custom_op(f"{ns}::g", scale, mutates_args=())
    with pytest.raises(UnregisteredError):
        new(torch.ones(1))
    assert third(torch.ones(2)).tolist() == [2, 2]


def test_a_definition_that_is_no_more_lazy_replaces(registry: Registry, ns: str) -> None:
    old = lazy(registry, f"{ns}::f")
    with pytest.raises(SchemaError):
        registry.custom_op(f"{ns}::f", lambda x: x, mutates_args=())
    new = registry.custom_op(f"{ns}::f", add_one, mutates_args=())
    assert new(torch.ones(1)) == 2
    with pytest.raises(UnregisteredError):
        old(torch.ones(1))


def test_a_name_that_others_take_in_between(registry: Registry, ns: str) -> None:
    op = lazy(registry, f"{ns}::f")
    torchs = torch.library.custom_op(f"{ns}::f", add_one, mutates_args=())
    with pytest.raises(UnregisteredError, match=r"torch\.library\.custom_op"):
        op(torch.ones(1))
    assert torchs(torch.ones(1)) == 2

    lazy(registry, f"{ns}::g")
    library = torch.library.Library(ns, "FRAGMENT")
    with pytest.raises(RuntimeError, match="multiple times"):
        library.define("g(Tensor x) -> Tensor")
    assert packet(ns, "g")(torch.ones(1)) == 2


def test_define_and_impl_meet_a_lazy_op(registry: Registry, ns: str) -> None:
    lazy(registry, f"{ns}::f")
    with pytest.raises(DefinitionError, match="multiple times"):
        registry.define(f"{ns}::f", "(Tensor x) -> Tensor")
    op = lazy(registry, f"{ns}::g")
    registry.impl(f"{ns}::g", "CPU", lambda x, by: x - by)
    assert op(torch.ones(1), 3.0) == -2


def test_unregister_before_and_after(registry: Registry, ns: str) -> None:
    for use in (False, True):
        op = lazy(registry, f"{ns}::f")
        if use:
            op(torch.ones(1))
        op.unregister()
        assert not hasattr(getattr(torch.ops, ns), "f")
        with pytest.raises(UnregisteredError):
            op(torch.ones(1))
    assert list(registry) == []


def test_scopes(registry: Registry, ns: str) -> None:
    outer = lazy(registry, f"{ns}::outer")
    outer.register_kernel("cpu", add_kernel)
    with registry.scope():
        inner = lazy(registry, f"{ns}::inner")
        replaced = lazy(registry, f"{ns}::outer")
        assert replaced(torch.ones(1)) == 2
    with pytest.raises(UnregisteredError):
        inner(torch.ones(1))
    with registry.scope():
        assert outer(torch.ones(1)) == 3  # defined in a scope, declared outside
        outer.register_kernel("cpu", lambda x, by: x * 0)
        assert outer(torch.ones(1)) == 0
    assert outer(torch.ones(1)) == 3


def test_a_rule_in_a_scope_or_a_library_ends_there(registry: Registry, ns: str) -> None:
    op = lazy(registry, f"{ns}::f")
    with registry.scope():
        op.register_kernel("cpu", add_kernel)
        assert op(torch.ones(1)) == 3
    assert op(torch.ones(1)) == 2
    other = lazy(registry, f"{ns}::g")
    library = torch.library.Library(ns, "FRAGMENT")
    other.register_kernel("cpu", add_kernel, lib=library)
    assert other(torch.ones(1)) == 3
    library._destroy()
    assert other(torch.ones(1)) == 2


def test_first_calls_of_many_threads(registry: Registry, ns: str) -> None:
    ops = [with_rules(lazy(registry, f"{ns}::f{i}")) for i in range(20)]
    barrier = threading.Barrier(4)

    def call(thread: int) -> list[float]:
        barrier.wait()
        calls = [op if thread % 2 else packet(ns, f"f{i}") for i, op in enumerate(ops)]
        return [float(each(torch.ones(()))) for each in calls]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(call, range(4))) == [[2.0] * 20] * 4
    assert {type(op) for op in ops} == {CustomOpDef}
