"""Conflicts, failures that leave everything as it was, names, threads."""

from __future__ import annotations

import copy
import logging
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.functions import add_one
from helpers.registries import add_two, define, state
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import customops
from customops import Registry, Tag
from customops._places import location_of
from customops.errors import (
    CallbackError,
    DefinitionError,
    MissingFakeError,
    RegistrationError,
    SchemaError,
    UnregisteredError,
)

# Conflicts ------------------------------------------------------------------------------------------------------


def test_replace_is_the_default_and_takes_effect_at_once(registry: Registry, ns: str) -> None:
    old = define(registry, f"{ns}::f")
    old.register_fake(torch.empty_like)
    new = define(registry, f"{ns}::f", add_two)
    assert new is not old
    assert new(torch.ones(1)).item() == 3
    assert getattr(torch.ops, ns).f(torch.ones(1)).item() == 3
    assert list(registry) == [new]
    with pytest.raises(RuntimeError, match="no fake impl"):
        new(torch.ones(1, device="meta"))


@pytest.mark.parity(15)
def test_the_replaced_object_raises_and_names_its_successor(registry: Registry, ns: str) -> None:
    old = define(registry, f"{ns}::f")
    define(registry, f"{ns}::f", add_two)
    with pytest.raises(UnregisteredError, match=r"was replaced by the definition at .*helpers/registries\.py:\d+"):
        old(torch.ones(1))


def test_error_names_the_existing_definition_and_changes_nothing(registry: Registry, ns: str) -> None:
    op = define(registry, f"{ns}::f")
    with pytest.raises(DefinitionError, match=r"an op of this name exists.*on_conflict='error'"):
        define(registry, f"{ns}::f", add_two, on_conflict="error")
    assert op(torch.ones(1)).item() == 2
    assert define(registry, f"{ns}::g", on_conflict="error")(torch.ones(1)).item() == 2


def test_reuse_returns_the_existing_op_of_the_same_schema(registry: Registry, ns: str) -> None:
    op = define(registry, f"{ns}::f")
    assert define(registry, f"{ns}::f", add_two, on_conflict="reuse") is op
    assert op(torch.ones(1)).item() == 2


@pytest.mark.parametrize("other", [{"tags": torch.Tag.pointwise}, {"schema": "(Tensor y) -> Tensor"}])
def test_reuse_of_another_schema_or_tags_raises(registry: Registry, ns: str, other: dict[str, Any]) -> None:
    op = define(registry, f"{ns}::f")
    with pytest.raises(DefinitionError, match="needs the same schema and tags"):
        define(registry, f"{ns}::f", add_two, on_conflict="reuse", **other)
    assert op(torch.ones(1)).item() == 2


def test_an_unknown_conflict_policy_is_refused(registry: Registry, ns: str) -> None:
    with pytest.raises(DefinitionError, match="on_conflict has an invalid value"):
        define(registry, f"{ns}::f", on_conflict="ignore")
    assert state(ns)["dispatcher"] == []


def test_an_op_of_a_plain_library_is_not_replaced(registry: Registry, ns: str) -> None:
    lib = torch.library.Library(ns, "FRAGMENT")
    lib.define("f(Tensor x) -> Tensor")
    lib.impl("f", add_two, "CompositeExplicitAutograd")
    for policy in ("replace", "error", "reuse"):
        with pytest.raises(DefinitionError, match=rf"{ns}::f: an op of this name exists, defined at .*test_conflicts"):
            define(registry, f"{ns}::f", on_conflict=policy)
    assert getattr(torch.ops, ns).f(torch.ones(1)).item() == 3
    lib._destroy()


def test_ops_of_another_registry_are_replaced_in_it(ns: str) -> None:
    one, other = Registry(), Registry()
    old = define(one, f"{ns}::f")
    new = define(other, f"{ns}::f", add_two)
    assert (list(one), list(other)) == ([], [new])
    with pytest.raises(UnregisteredError):
        old(torch.ones(1))
    other.clear()


# Failures leave everything as it was ------------------------------------------------------------------------------


def bad_hints(x: Any) -> Tensor:
    return x


@pytest.mark.parametrize(
    ("fn", "options", "error"),
    [
        (bad_hints, {}, SchemaError),
        (add_one, {"schema": "(Tensor x -> Tensor"}, SchemaError),
        (add_one, {"schema": "(Tensor(a!) x) -> Tensor"}, SchemaError),
        (add_one, {"schema": "(Tensor x, Tensor y) -> Tensor"}, CallbackError),
        (add_one, {"device_types": "toaster"}, RegistrationError),
        (add_one, {"device_types": []}, DefinitionError),
        (add_one, {"tags": "pointwise"}, DefinitionError),
        (add_one, {"tags": Tag.inplace}, SchemaError),
        (add_one, {"differentiable": (True, False)}, DefinitionError),
        (add_one, {"nondiff_args": "z"}, DefinitionError),
    ],
)
@pytest.mark.parametrize("exists", [False, True])
def test_a_failed_definition_changes_nothing(
    registry: Registry, ns: str, fn: Callable[..., Any], options: dict[str, Any], error: type, exists: bool
) -> None:
    old = define(registry, f"{ns}::f") if exists else None
    overload = old._opoverload if old is not None else None
    before = state(ns)
    with pytest.raises(error):
        define(registry, f"{ns}::f", fn, **options)
    assert state(ns) == before
    assert list(registry) == ([old] if exists else [])
    if old is not None:
        assert old._opoverload is overload
        assert old(torch.ones(1)).item() == 2


def test_torch_refusing_a_definition_leaves_nothing(
    registry: Registry, ns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no")

    before = state(ns)
    with monkeypatch.context() as patch:
        patch.setattr(torch.library.Library, "define", refuse)
        with pytest.raises(DefinitionError, match="torch refuses the definition: no"):
            define(registry, f"{ns}::f")
    assert state(ns) == before
    assert define(registry, f"{ns}::f")(torch.ones(1)).item() == 2


def test_a_failed_replacement_brings_the_old_op_back(
    registry: Registry, ns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = define(registry, f"{ns}::f")
    old.register_fake(torch.empty_like)
    old.register_kernel("cpu", add_two)

    calls = []

    def fail_once(self: Any, *args: Any) -> None:
        calls.append(self)
        if len(calls) == 1:
            raise RuntimeError("halfway")
        install(self, *args)

    install = customops.CustomOpDef._bind
    monkeypatch.setattr(customops.CustomOpDef, "_bind", fail_once)
    with pytest.raises(RuntimeError, match="halfway"):
        define(registry, f"{ns}::f", add_one)
    assert list(registry) == [old]
    assert old(torch.ones(1)).item() == 3
    assert old(torch.ones(1, device="meta")).is_meta


@pytest.mark.parametrize(
    "register",
    [
        lambda op: op.register_kernel("toaster", add_two),
        lambda op: op.register_kernel("cpu", lambda: None),
        lambda op: op.register_kernel("cpu", 3),
        lambda op: op.register_fake(lambda x, y: x),
        lambda op: op.register_autograd(lambda ctx: None),
        lambda op: op.register_autograd(lambda ctx, g: g, setup_context=lambda ctx, input, output: None),
        lambda op: op.register_autocast("cpu", "float16"),
        lambda op: op.register_autocast("toaster", torch.float16),
        lambda op: op.register_samples(lambda x: x),
    ],
)
def test_a_failed_registration_changes_nothing(registry: Registry, ns: str, register: Callable[[Any], Any]) -> None:
    op = define(registry, f"{ns}::f")
    dump = torch._C._dispatch_dump(f"{ns}::f")
    with pytest.raises((ValueError, RuntimeError)):
        register(op)
    assert torch._C._dispatch_dump(f"{ns}::f") == dump
    assert op(torch.ones(1)).item() == 2
    assert op._abstract_fn is None


# Names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("f", "needs a namespace"),
        ("", "needs a namespace"),
        ("::f", "'' is not a valid part"),
        ("ns::", "'' is not a valid part"),
        ("ns::f.", "'' is not a valid part"),
        ("ns::f.a.b", "'a.b' is not a valid part"),
        ("ns::f::g", "'f::g' is not a valid part"),
        ("my ns::f", "'my ns' is not a valid part"),
        ("ns::1f", "'1f' is not a valid part"),
        ("ns::f-g", "'f-g' is not a valid part"),
        ("ns::f\n", "is not a valid part"),
        ("ns::é", "is not a valid part"),
        ("ns::f.default", 'overload name "default" is taken'),
        ("aten::f", "'aten' is a reserved namespace"),
        ("prim::f", "'prim' is a reserved namespace"),
        ("torch::f", "'torch' is a reserved namespace"),
        (3, "the name of an op must be a string"),
        (add_one, "the name of an op must be a string"),
    ],
)
def test_bad_names(registry: Registry, name: Any, match: str) -> None:
    before = sorted(vars(torch.ops))
    with pytest.raises(DefinitionError, match=match):
        define(registry, name)
    assert sorted(vars(torch.ops)) == before


def test_a_decorator_that_cannot_work_fails_at_its_own_line(registry: Registry, ns: str) -> None:
    with pytest.raises(DefinitionError, match="must be a string"):
        registry.custom_op(add_one, mutates_args=())  # type: ignore[call-overload]
    with pytest.raises(SchemaError, match="mutates_args must be an iterable of names"):
        registry.custom_op(f"{ns}::f", mutates_args=3)  # type: ignore[call-overload]
    op = define(registry, f"{ns}::f")
    with pytest.raises(DefinitionError, match="a device type must be a string"):
        op.register_kernel(add_one)


def test_custom_op_decorates_functions_only(registry: Registry, ns: str) -> None:
    with pytest.raises(DefinitionError, match="decorates a function"):
        registry.custom_op(f"{ns}::f", mutates_args=())(3)  # type: ignore[arg-type]


# Threads --------------------------------------------------------------------------------------------------------


def run_threads(*targets: Callable[[], None]) -> None:
    """Run all at once; the first error is raised here."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(len(targets))

    def run(target: Callable[[], None]) -> None:
        try:
            barrier.wait()
            target()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(target,)) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_ops_can_be_defined_from_several_threads(registry: Registry, ns: str) -> None:
    def work(k: int) -> None:
        for i in range(20):
            op = define(registry, f"{ns}::f{k}_{i}")
            op.register_fake(torch.empty_like)
            assert op(torch.ones(1)).item() == 2

    run_threads(*(lambda k=k: work(k) for k in range(4)))
    assert len(registry) == 80


def test_one_name_defined_from_several_threads_ends_as_one_op(registry: Registry, ns: str) -> None:
    run_threads(*(lambda: define(registry, f"{ns}::f") for _ in range(8)))
    (op,) = registry
    assert op(torch.ones(1)).item() == 2
    assert state(ns)["dispatcher"] == [f"{ns}::f"]


def test_reuse_from_several_threads_gives_one_object(registry: Registry, ns: str) -> None:
    found: list[Any] = []
    run_threads(*(lambda: found.append(define(registry, f"{ns}::f", on_conflict="reuse")) for _ in range(8)))
    assert len({id(op) for op in found}) == 1


def test_registering_while_calling(registry: Registry, ns: str) -> None:
    op = define(registry, f"{ns}::f")
    seen: set[float] = set()

    def call() -> None:
        for _ in range(500):
            seen.add(op(torch.ones(1)).item())

    def register() -> None:
        for i in range(100):
            op.register_kernel("cpu", add_two if i % 2 else add_one)

    run_threads(call, call, register)
    assert seen <= {2.0, 3.0}
    assert op(torch.ones(1)).item() == 3


def test_copies_of_an_op_are_the_op(registry: Registry, ns: str) -> None:
    op = define(registry, f"{ns}::f")
    assert copy.copy(op) is op
    assert copy.deepcopy({"op": op})["op"] is op


@pytest.fixture
def twice(registry: Registry, ns: str, caplog: pytest.LogCaptureFixture) -> tuple[Any, Any]:
    """An op with rules, and the op that replaced it."""
    old = define(registry, f"{ns}::f")
    old.register_fake(torch.empty_like)
    old.register_kernel("cuda", add_two)
    old.register_autograd(lambda ctx, grad: grad)
    with caplog.at_level(logging.WARNING):
        return old, registry.custom_op(f"{ns}::f", add_two, mutates_args=(), schema="(Tensor x) -> Tensor")


def test_a_name_that_another_function_takes(ns: str, caplog: pytest.LogCaptureFixture) -> None:
    registry = Registry()  # no scope is open, at the end of which the op would come back
    define(registry, f"{ns}::taken")
    with caplog.at_level(logging.WARNING):
        define(registry, f"{ns}::taken")
        assert not caplog.records
        registry.custom_op(f"{ns}::taken", add_two, mutates_args=())
    registry.clear()
    (record,) = caplog.records
    assert re.search(r"::taken: add_two \(.*\) takes the place of add_one \(.*\); two ops", record.getMessage())


def test_a_redefinition_says_what_it_drops(twice: Any, registry: Registry, caplog: pytest.LogCaptureFixture) -> None:
    (record,) = caplog.get_records("setup")
    kinds = ("kernel", "fake", "backward")
    assert all(re.search(rf"{kind} \(\S*test_conflicts\.py:\d+\)", record.getMessage()) for kind in kinds)
    caplog.clear()
    with registry.scope():  # the old one comes back
        define(registry, twice[1]._qualname)
    for _ in range(2):  # the same code, as of a module that is loaded again
        registry.custom_op(f"{twice[1]._qualname}_again", add_two, schema="(Tensor x) -> Tensor").register_fake(add_two)
    assert not caplog.records


def test_the_old_object_says_what_replaced_it(twice: Any) -> None:
    old, new = twice
    said = f"the op was replaced by the definition at {location_of(add_two)} (add_two)"
    assert said in " ".join(old.describe().text(1000).split())
    assert old.describe().why == said
    assert (new.describe().why, new.describe().removed) == ("", False)
    x = torch.ones(1)
    for call in (
        lambda: customops.check(old, [(x,)]),
        lambda: customops.opcheck(old, (x,)),
        lambda: old(x),
        lambda: old.explain(x),
    ):
        with pytest.raises(UnregisteredError, match=re.escape(said)):
            call()


def test_no_fake_says_that_there_was_one(twice: Any, registry: Registry, ns: str) -> None:
    _, new = twice
    until = rf"There was one: .*test_conflicts\.py:\d+ is of the op that was replaced by .*{new.source}"
    again = registry.custom_op(f"{ns}::f", lambda x: x + 3, schema="(Tensor x) -> Tensor")  # it had none
    with FakeTensorMode(), pytest.raises(MissingFakeError, match=until):
        again(torch.ones(1))
    with pytest.raises(Exception, match=until):
        torch.compile(lambda x: again(x), backend="aot_eager", fullgraph=True)(torch.ones(1))
    assert "is of the op that was replaced" in again.describe().rule("fake").note
    again.register_fake(torch.empty_like)
    assert torch.compile(lambda x: again(x), backend="aot_eager", fullgraph=True)(torch.ones(1)).item() == 4
    first = define(registry, f"{ns}::g")
    with FakeTensorMode(), pytest.raises(MissingFakeError) as caught:
        first(torch.ones(1))
    assert "There was one" not in str(caught.value)
