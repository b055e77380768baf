"""Several kernels for one device: which of them runs."""

from __future__ import annotations

import functools
import math
import threading
from typing import Annotated, Any

import numpy
import pytest
import torch
from helpers.several import Several, scale, up_to
from torch import Tensor, ones
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import customops
from customops import Keys, Registry
from customops._rules.choice import chooser_of
from customops.errors import (
    AliasError,
    CallbackError,
    KernelError,
    NoKernelError,
    RegistrationError,
    UnsupportedError,
)


def chooser(op: Any) -> Any:
    return chooser_of(op._rules.kernel._current_kernels["cpu"])


# The order ------------------------------------------------------------------------------------------------------------


def test_the_first_whose_predicate_says_yes(several: Several) -> None:
    several.add("wide")
    several.add("small", up_to(4), priority=2)
    several.add("medium", up_to(8), priority=1)
    for _ in range(4):  # of which the first finds out, the second makes a guard, and others use it
        assert [several.runs(ones(2, n)) for n in (3, 6, 9)] == ["small", "medium", "wide"]


def test_of_equal_priority_the_newest_comes_first(several: Several) -> None:
    several.add("one")
    assert several.runs(ones(2)) == "one"
    several.add("two")
    assert several.runs(ones(2)) == "two"
    several.add("least", priority=-1)
    assert several.runs(ones(2)) == "two"


def test_those_of_the_device_come_before_those_of_all(several: Several) -> None:
    several.add("own", up_to(4))
    several.add("all", device=None)
    assert [several.runs(ones(n)) for n in (3, 6)] == ["own", "all"]
    several.add("first", up_to(3), device=None, priority=1)
    assert [several.runs(ones(n)) for n in (3, 4, 6)] == ["first", "own", "all"]


def test_the_reference_is_the_last(registry: Registry, ns: str) -> None:
    several = Several(registry, f"{ns}::f", device_types="cuda")
    several.add("small", up_to(4))
    assert [several.runs(ones(n)) for n in (3, 6)] == ["small", ""]


def test_the_reference_is_no_kernel_of_a_device_without_any(registry: Registry, ns: str) -> None:
    several = Several(registry, f"{ns}::f", device_types="cuda")
    with pytest.raises(NotImplementedError, match="Could not run"):
        several.op(ones(2))


def test_a_kernel_that_hides_others_warns(several: Several) -> None:
    """Also of another device type or name than theirs; a low priority of one's own is no oversight."""
    several.add("small", up_to(4), priority=1)
    several.add("least", up_to(4), priority=-1)
    with pytest.warns(UserWarning, match="all takes all arguments and is asked before small, .* with priority=0"):
        several.add("all", device=None, priority=2)
    notes = {rule.note for rule in several.op.describe().rules if "runs only if preferred" in rule.note}
    assert {note.partition(",")[0] for note in notes} == {"named small", "named least"}
    assert all(note.endswith("since all is asked first") for note in notes)
    assert several.runs(ones(2)) == "all"


def test_one_kernel_without_a_predicate_is_called_as_it_is(several: Several) -> None:
    several.add("only")
    current = several.op._rules.kernel._current_kernels["cpu"]
    several.op(ones(2))
    assert chooser_of(current) is None
    assert current.fn.__qualname__.endswith("kernel.<locals>.run")


# Registrations --------------------------------------------------------------------------------------------------------


def test_a_name_registered_again_replaces_its_kernel(registry: Registry, several: Several) -> None:
    several.add("a", up_to(4))
    with registry.scope():
        several.op.register_kernel("cpu", several.kernel("b"), name="a", when=up_to(8))
        assert [several.runs(ones(n)) for n in (3, 6, 9)] == ["b", "b", "default"]
    assert [several.runs(ones(n)) for n in (3, 6, 9)] == ["a", "default", "default"]


def test_each_registration_ends_by_itself(several: Several) -> None:
    rule = several.op._rules.kernel
    made = {name: rule.register("cpu", several.kernel(name), name=name) for name in ("a", "b", "c")}
    assert several.runs(ones(2)) == "c"
    made["b"].unregister()
    made["c"].unregister()
    assert several.runs(ones(2)) == "a"
    made["a"].unregister()
    assert several.runs(ones(2)) == "default"
    assert not rule._current_kernels.keys() & {"cpu"}


def test_a_library_takes_its_kernel_along(several: Several, ns: str) -> None:
    lib = torch.library.Library(ns, "FRAGMENT")
    several.op.register_kernel("cpu", several.kernel("lent"), name="lent", lib=lib)
    assert several.runs(ones(2)) == "lent"
    lib._destroy()
    assert several.runs(ones(2)) == "default"


def test_an_op_of_others(ns: str) -> None:
    lib = torch.library.Library(ns, "DEF")
    lib.define("g(Tensor x) -> Tensor")
    lib.impl("g", lambda x: x + 1, "CPU")
    ran = []

    @customops.register_kernel(f"{ns}::g", "cpu", name="small", when=up_to(4))
    def small(x: Tensor) -> Tensor:
        ran.append("small")
        return x + 1

    def large(x: Tensor) -> Tensor:
        ran.append("large")
        return x + 1

    with pytest.warns(UserWarning, match="takes all arguments") as warned:
        customops.register_kernel(f"{ns}::g", "cpu", large, name="large")
    assert [str(each.message) for each in warned] == [
        f"{ns}::g: the kernel large takes all arguments and is asked before small, so that small will run only if "
        "preferred or tuned. Register it with when=, or with priority=-1."
    ]
    assert warned[0].filename == __file__
    notes = [rule.note for rule in customops.adopt(f"{ns}::g").describe().rules if rule.name == "small"]
    assert notes[0].endswith("runs only if preferred or tuned, since large is asked first")

    g: Any = getattr(torch.ops, ns).g
    assert_close(g(ones(3)), ones(3) + 1)
    customops.register_kernel(f"{ns}::g", "cpu", small, name="small", when=up_to(4), priority=1)
    assert_close(g(ones(3)), ones(3) + 1)
    assert_close(g(ones(6)), ones(6) + 1)
    assert ran == ["large", "small", "large"]
    lib._destroy()


def test_an_op_comes_back_with_its_kernels(registry: Registry, several: Several, ns: str) -> None:
    several.add("small", up_to(4))
    with registry.scope():
        registry.custom_op(f"{ns}::f", scale, mutates_args=())
    assert [several.runs(ones(n)) for n in (3, 6)] == ["small", "default"]


def test_a_device_that_is_switched_off(several: Several) -> None:
    several.add("a", up_to(4))
    with several.op.set_kernel_enabled("cpu", False):
        assert several.runs(ones(2)) == "default"
    assert several.runs(ones(2)) == "a"


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"name": "reference"}, "name"),
        ({"name": "a*"}, "name"),
        ({"name": 3}, "name"),
        ({"priority": "high"}, "priority"),
        ({"priority": float("nan")}, "priority"),
        ({"when": True}, "when"),
        ({"key": "shapes"}, "key"),
    ],
)
def test_options_that_are_refused(several: Several, options: dict[str, Any], argument: str) -> None:
    with pytest.raises(RegistrationError, match=rf"register_kernel\(\): {argument} has an invalid value") as caught:
        several.op.register_kernel("cpu", several.kernel("x"), **options)
    assert caught.value.argument == argument
    assert several.runs(ones(2)) == "default"


def test_a_predicate_of_other_arguments(several: Several) -> None:
    with pytest.raises(CallbackError, match="predicate"):
        several.add("x", lambda x, y, z: True)
    assert several.runs(ones(2)) == "default"


# Predicates and keys --------------------------------------------------------------------------------------------------


def test_a_predicate_takes_all_arguments_or_some_by_name(several: Several) -> None:
    several.add("all", lambda first, second: second == 3.0)
    assert several.runs(ones(2), 3.0) == "all"
    several.add("some", lambda by: by == 4.0)
    assert [several.runs(ones(2), by) for by in (4.0, 3.0, 2.0)] == ["some", "all", "default"]


def test_a_predicate_takes_names_in_any_order_and_has_parameters_of_its_own(several: Several) -> None:
    several.add("turned", lambda by, x: by == 4.0 and x.dim() == 1)
    several.add("bounded", lambda x, most=2: x.shape[0] <= most)
    assert [several.runs(ones(n), by) for n, by in ((2, 9.0), (3, 4.0), (3, 9.0))] == ["bounded", "turned", "default"]


@pytest.mark.parametrize("option", ["when", "key"])
def test_a_predicate_names_an_argument_that_the_op_has_not(several: Several, option: str) -> None:
    options: dict[str, Any] = {"when": lambda x: True, option: lambda bby: True}
    with pytest.raises(CallbackError, match="takes an argument that the op has not") as info:
        several.add("typo", **options)
    assert (info.value.expected, info.value.got, info.value.fix) == ("some of x, by", "bby", "did you mean by?")
    assert several.runs(ones(2)) == "default"


def test_an_argument_with_a_default_given_by_name(several: Several) -> None:
    """Also in what explains a call, tunes and checks."""
    several.add("few", lambda x, by: x.numel() <= 3 and by == 4.0)
    assert [several.runs(ones(2), by=by) for by in (4.0, 3.0)] == ["few", "default"]
    assert "named few, one of 3" in several.op.explain(ones(2), by=4.0).steps[-1].what
    (found,) = customops.tuning.autotune(several.op, [((ones(2),), {"by": 4.0})])
    assert set(found.seconds) == {"few", "default", "reference"}
    several.op.register_kernel("cpu", lambda x, by: x + by, name="few", when=lambda x: x.numel() <= 3)
    report = customops.check(several.op, [((ones(2),), {"by": 4.0})], only="test_kernels")
    assert any("the kernel default has other results" in each.problem for each in report.failures), str(report)


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize(
    ("reads", "yes", "no"),
    [
        (lambda x, by: x.shape[0] == 4, (ones(4),), (ones(5),)),
        (lambda x, by: x.is_contiguous(), (ones(4, 4),), (ones(4, 4).t(),)),
        (lambda x, by: x.stride(0) == 1, (ones(4),), (ones(8)[::2],)),
        (lambda x, by: x.dtype is torch.float32, (ones(4),), (ones(4, dtype=torch.float64),)),
        (lambda x, by: x.dim() == 1, (ones(4),), (ones(4, 1),)),
        (lambda x, by: str(by) == "0.0", (ones(4), 0.0), (ones(4), -0.0)),
        (lambda x, by: by == 1, (ones(4), 1.0), (ones(4), 1.5)),
        (lambda x, by: x.storage_offset() == 0, (ones(4),), None),
    ],
)
def test_what_a_predicate_may_read_is_in_the_key(several: Several, reads: Any, yes: Any, no: Any, times: int) -> None:
    several.add("a", reads)
    for _ in range(3):
        for _ in range(times):
            assert several.runs(*yes) == "a"
        for _ in range(times if no else 0):
            assert several.runs(*no) == "default"


def test_a_predicate_sees_no_offset(several: Several) -> None:
    """It would be in eager code what it is not in compiled code."""
    several.add("a", lambda x: x.storage_offset() == 0)
    assert several.runs(ones(8)[4:]) == "a"


@pytest.mark.parametrize("reads", [lambda x: x.sum() > 0, lambda x: x.data_ptr() % 16 == 0, lambda x: x.tolist()])
def test_a_predicate_that_reads_data(several: Several, reads: Any) -> None:
    several.add("a", lambda x: bool(reads(x)))
    with pytest.raises(KernelError, match="reads data") as caught:
        several.op(ones(2))
    assert "key=None" in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 4
    several.add("a", lambda x: bool(reads(x)), key=None)
    assert several.runs(ones(2)) == "a"


def test_values_that_equal_nothing_are_kept(registry: Registry, ns: str) -> None:
    asked = []

    @registry.custom_op(f"{ns}::f", mutates_args=())
    def op(xs: list[Tensor], y: Tensor, by: float) -> Tensor:
        return y * 2

    op.register_kernel("cpu", lambda xs, y, by: y + y, name="a", when=lambda y: asked.append(1) or True)
    for xs in ([], [ones(1)]):
        for by in (math.nan, 0.0, 1.0):
            asked.clear()
            for _ in range(5):
                assert op(xs, ones(2), by).tolist() == [2, 2]
            assert len(asked) == 1


def test_an_empty_list_beside_a_key_of_the_author(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::f", mutates_args=())
    def op(xs: list[Tensor], y: Tensor) -> Tensor:
        return y * 2

    op.register_kernel("cpu", lambda xs, y: y + y, name="a", when=lambda y: y.shape[0] < 4)
    op.register_kernel("cpu", lambda xs, y: y + y, name="b", when=lambda y: y.shape[0] < 8, key=lambda y: y.shape[0])
    for xs in ([ones(2)], []):
        for n in (3, 5, 9):
            assert op(xs, ones(n)).tolist() == [2] * n


def test_states_of_one_look_have_guards_of_their_own(several: Several) -> None:
    """What the first call makes a guard of may not leave later ones without: of gradients, and of inference mode."""
    several.add("a", up_to(4))
    with torch.inference_mode():
        made = ones(4)
    parameter = ones(4, requires_grad=True)
    for _ in range(3):
        several.op(ones(4))
        with torch.no_grad():
            several.op(parameter)
        with torch.inference_mode():
            several.op(made)
    assert sorted(map(len, chooser(several.op).guarded.values())) == [3]


def test_without_a_key_the_predicate_is_asked_each_time(several: Several) -> None:
    several.add("positive", lambda x: bool((x > 0).all()), key=None)
    for x in (ones(2), -ones(2), ones(2)):
        assert several.runs(x) == ("positive" if x[0] > 0 else "default")


def test_a_key_of_the_author(several: Several) -> None:
    asked = []

    def small(x: Tensor) -> bool:
        asked.append(x.shape[0])
        return x.shape[0] <= 8

    several.add("small", small, key=lambda x: x.shape[0].bit_length())
    assert [several.runs(ones(n)) for n in (4, 5, 6, 7, 5, 16, 17, 4)] == ["small"] * 5 + ["default"] * 2 + ["small"]
    assert asked == [4, 16]


def test_a_key_of_the_author_beside_the_one_of_arguments(several: Several) -> None:
    flag = ["yes"]
    several.add("a", lambda x: flag[0] == "yes", key=lambda x: flag[0], priority=1)
    several.add("b", up_to(4))
    for flag[0], n, wanted in [("yes", 3, "a"), ("no", 3, "b"), ("no", 9, "default"), ("yes", 9, "a"), ("no", 3, "b")]:
        for _ in range(3):
            assert several.runs(ones(n)) == wanted


@pytest.mark.compile
def test_a_predicate_that_raises_an_error(several: Several) -> None:
    several.add("a", lambda x: x.shape[5] > 2)
    problem = "the predicate of the kernel 'a' raised an error"
    for call in (several.op, several.op.explain):
        with pytest.raises(KernelError, match=problem) as caught:
            call(ones(2))
        assert caught.value.got == "IndexError: tuple index out of range"
        assert "test_choice.py" in str(caught.value.where)
    compiled = torch.compile(several.op, backend="aot_eager", fullgraph=True)
    got = r"(.|\n)*IndexError: tuple index out of range(.|\n)*test_choice\.py:\d+"
    with pytest.raises(Exception, match=problem + got):  # Dynamo's, with the text of ours
        compiled(ones(2))
    several.add("a", lambda x: None)
    with pytest.raises(CallbackError, match="neither True, False nor a string"):
        several.op(ones(2))
    with pytest.raises(Exception, match="neither True, False nor a string"):
        compiled(ones(2))


def test_a_key_that_cannot_be_hashed_beside_the_one_of_arguments(several: Several) -> None:
    several.add("a", up_to(3), key=lambda x: [x.shape])
    several.add("b", up_to(3))
    with pytest.raises(KernelError, match="not hashable"):
        several.op(ones(2))


def test_a_key_that_cannot_be_hashed(several: Several) -> None:
    several.add("a", up_to(3), key=lambda x: [x.shape])
    with pytest.raises(KernelError, match="not hashable"):
        several.op(ones(2))


@pytest.mark.parametrize("answer", [None, 1, "tensor"])
def test_answers_that_are_none(several: Several, answer: Any) -> None:
    several.add("a", (lambda x: x > 0) if answer == "tensor" else lambda x: answer)
    with pytest.raises(CallbackError, match="neither True, False nor a string"):
        several.op(ones(2))


def test_a_truth_of_numpy(several: Several) -> None:
    several.add("a", lambda x: numpy.bool_(x.shape[0] == 2))
    assert [several.runs(ones(n)) for n in (2, 3)] == ["a", "default"]


def test_what_is_kept_is_bounded(several: Several) -> None:
    several.add("small", up_to(300))
    for n in range(1, 600):
        assert several.runs(ones(n)) == ("small" if n <= 300 else "default")
        several.op(ones(n))
    found = chooser(several.op)
    assert len(found.known) <= 256
    assert len(found.guarded) <= 256
    assert len(found.recent) <= 3


def test_shapes_that_take_turns_are_asked_for_once(several: Several) -> None:
    asked = []
    several.add("small", lambda x: asked.append(x.shape) or x.shape[0] <= 4)
    for _ in range(4):
        for n in range(1, 9):
            assert several.runs(ones(n)) == ("small" if n <= 4 else "default")
    assert len(asked) == 8
    assert len(chooser(several.op).guarded) == 8


def test_many_looks_of_one_shape(registry: Registry, ns: str) -> None:
    """So many have guards; the others are looked up."""

    @registry.custom_op(f"{ns}::f", mutates_args=())
    def op(x: Tensor, y: Tensor) -> Tensor:
        return x + y.sum()

    op.register_kernel("cpu", lambda x, y: x - y.sum(), name="minus", when=lambda y: y.shape[0] % 2 == 0)
    for _ in range(4):
        for n in range(1, 30):
            assert_close(op(ones(3), ones(n)), torch.full((3,), 1.0 + (n if n % 2 else -n)))
    (guards,) = chooser(op).guarded.values()
    assert len(guards) == 8


# Errors ---------------------------------------------------------------------------------------------------------------


def test_where_none_fits(registry: Registry, ns: str) -> None:
    several = Several(registry, f"{ns}::f", device_types="cuda", reference=None)
    several.add("small", up_to(4))
    several.add("even", lambda x: x.shape[-1] % 2 == 0)
    with pytest.raises(NoKernelError) as caught:
        several.op(ones(2, 7))
    assert isinstance(caught.value, UnsupportedError)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{ns}::f: no kernel takes these arguments"
    assert lines[1].startswith("  even:     <lambda> (")
    assert lines[1].endswith("says no")
    assert lines[2:] == [
        "  small:    rows of 4 elements at most",
        "  got:      x=float32[2, 7], by=2.0",
        "  fix:      register a kernel that takes them, or the op's reference",
    ]
    assert caught.value.refused["small"] == "rows of 4 elements at most"


@pytest.mark.parametrize("check", ["always", "first"])
def test_the_results_of_each_are_checked(registry: Registry, ns: str, check: str) -> None:
    several = Several(registry, f"{ns}::f", check=check)
    several.add("good")
    several.op.register_kernel("cpu", lambda x, by: x, name="alias", when=up_to(4), priority=1)
    several.op.register_kernel("cpu", lambda x, by: None, name="none", when=up_to(2), priority=2)
    several.op(ones(6))
    with pytest.raises(AliasError, match="one of the kernels none, alias, good"):
        several.op(ones(3))
    with pytest.raises(KernelError, match="does not fit the schema"):
        several.op(ones(2))


def test_each_kernel_is_inspected_on_its_first_call(registry: Registry, ns: str) -> None:
    several = Several(registry, f"{ns}::f")
    several.add("good")

    def writes(x: Tensor, by: float) -> Tensor:
        x.add_(1)
        return x * by

    several.op.register_kernel("cpu", writes, name="writes", when=up_to(4), priority=1)
    several.op(ones(6))
    with pytest.raises(KernelError, match="writes to an argument"):
        several.op(ones(3))


# All ways to a kernel choose ------------------------------------------------------------------------------------------

KINDS: list[dict[str, Any]] = [
    {},
    {"bypass": True},
    {"eager": True},
    {"check": "never"},
    {"check": "never", "bypass": True},
    {"kernel_calls_torch": True, "check": "first", "bypass": True},
]


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_options_of_calls(registry: Registry, ns: str, options: dict[str, Any]) -> None:
    several = Several(registry, f"{ns}::f", **options)
    several.add("small", up_to(4))
    for _ in range(4):
        assert [several.runs(ones(n)) for n in (3, 6)] == ["small", "default"]
        packet: Any = getattr(torch.ops, ns).f
        assert [several.runs(ones(n), call=packet) for n in (3, 6)] == ["small", "default"]
        with several.op.prefer("default"):
            assert several.runs(ones(3)) == "default"


def test_states_of_a_call(several: Several) -> None:
    several.add("small", up_to(4))

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    class Sub(Tensor):
        pass

    states: list[Any] = [torch.no_grad, torch.inference_mode, torch.enable_grad, Mode]
    states.append(lambda: torch.autocast("cpu", torch.bfloat16))
    for state in states:
        with state():
            assert [several.runs(ones(n)) for n in (3, 6)] == ["small", "default"]
    assert [several.runs(ones(n).as_subclass(Sub)) for n in (3, 6)] == ["small", "default"]
    assert [several.runs(torch.nn.Parameter(ones(n))) for n in (3, 6)] == ["small", "default"]
    assert [several.runs(ones(1, dtype=torch.complex64).expand(n).conj()) for n in (3, 6)] == ["small", "default"]
    several.ran.clear()
    with torch._subclasses.FakeTensorMode():
        assert several.op(ones(3)).shape == (3,)
    assert several.op(ones(3, device="meta")).shape == (3,)
    assert not several.ran


def test_sparse_tensors(several: Several) -> None:
    several.add("small", up_to(4), device=None)
    for _ in range(2):
        assert [several.runs(torch.eye(n).to_sparse()) for n in (3, 6)] == ["small", "default"]


def test_gradients_and_transforms(several: Several) -> None:
    several.add("small", up_to(4))
    for n, name in ((3, "small"), (6, "default")):
        x = ones(n, requires_grad=True)
        several.ran.clear()
        several.op(x, 3.0).sum().backward()
        assert several.ran[0] == name
        assert_close(x.grad, torch.full((n,), 3.0))
        several.ran.clear()
        assert_close(torch.func.grad(lambda x: several.op(x, 3.0).sum())(ones(n)), torch.full((n,), 3.0))
        assert several.ran[0] == name
    several.ran.clear()
    several.op.register_vmap("sequential")
    assert_close(torch.func.vmap(several.op)(ones(5, 3)), torch.full((5, 3), 2.0))
    assert several.ran == ["small"] * 5


@pytest.mark.parametrize("bypass", [False, True])
def test_an_op_that_writes(registry: Registry, ns: str, bypass: bool) -> None:
    ran = []

    def kernel(name: str) -> Any:
        def write(x: Tensor, by: float) -> None:
            ran.append(name)
            x.mul_(by)

        return write

    @registry.custom_op(f"{ns}::f_", mutates_args=("x",), bypass=bypass)
    def op(x: Tensor, by: float = 2.0) -> None:
        ran.append("default")
        x.mul_(by)

    op.register_kernel("cpu", kernel("small"), name="small", when=up_to(4))
    for n, name in ((3, "small"), (6, "default"), (3, "small")):
        x = ones(n)
        before = x._version
        op(x)
        assert ran.pop() == name
        assert x._version > before
        assert_close(x, torch.full((n,), 2.0))


def test_out_variants(several: Several, ns: str) -> None:
    ran = []

    def fill(name: str) -> Any:
        def run(x: Tensor, by: float, *, out: Tensor) -> Tensor:
            ran.append(name)
            return torch.mul(x, by, out=out)

        return run

    several.op.register_out(fill("default"))
    out_op = customops.adopt(f"{ns}::f.out")
    out_op.register_kernel("cpu", fill("small"), name="small", when=up_to(4))
    for _ in range(3):
        for n, name in ((3, "small"), (6, "default")):
            out = torch.empty(n)
            getattr(torch.ops, ns).f.out(ones(n), 3.0, out=out)
            assert ran.pop() == name
            assert_close(out, torch.full((n,), 3.0))


def test_factories(registry: Registry, ns: str) -> None:
    ran = []

    def kernel(name: str) -> Any:
        def make(n: int, device: Any) -> Tensor:
            ran.append(name)
            return torch.zeros(n, device=device)

        return make

    schema = "(int n, Device device) -> Tensor"
    op = registry.custom_op(f"{ns}::make", kernel("default"), schema=schema, mutates_args=())
    op.register_kernel("cpu", kernel("small"), name="small", when=lambda n: n < 4)
    for n, name in ((3, "small"), (6, "default"), (3, "small")):
        assert op(n, torch.device("cpu")).shape == (n,)
        assert ran.pop() == name


def test_lists_and_optional_tensors(registry: Registry, ns: str) -> None:
    ran = []

    def kernel(name: str) -> Any:
        def add(xs: list[Tensor], y: Tensor | None = None, sizes: list[int] = [1]) -> Tensor:  # noqa: B006
            ran.append(name)
            return torch.stack([*xs]).sum(0) + (0 if y is None else y)

        return add

    op = registry.custom_op(f"{ns}::f", kernel("default"), mutates_args=())
    op.register_kernel("cpu", kernel("pair"), name="pair", when=lambda xs: len(xs) == 2, priority=1)
    op.register_kernel("cpu", kernel("without"), name="without", when=lambda y, sizes: y is None and sizes == [2])
    calls: list[tuple[Any, str]] = [
        (([ones(2), ones(2)],), "pair"),
        (([ones(2)],), "default"),
        (([ones(2)], None, [2]), "without"),
        (([ones(2)], ones(2), [2]), "default"),
        (([ones(2), ones(2)], ones(2)), "pair"),
    ]
    for _ in range(4):
        for args, name in calls:
            op(*args)
            assert ran.pop() == name


def test_one_tensor_given_twice(registry: Registry, ns: str) -> None:
    ran = []

    @registry.custom_op(f"{ns}::f", mutates_args=())
    def op(x: Tensor, y: Tensor) -> Tensor:
        ran.append("default")
        return x + y

    @op.register_kernel("cpu", name="small", when=up_to(4))
    def small(x: Tensor, y: Tensor) -> Tensor:
        ran.append("small")
        return x + y

    for _ in range(3):
        for n, name in ((3, "small"), (6, "default")):
            x = ones(n)
            assert_close(op(x, x), 2 * x)
            assert_close(op(x, ones(n)), 2 * x)
            assert (ran.pop(), ran.pop()) == (name, name)


def test_parameters_that_are_lowered(registry: Registry, ns: str) -> None:
    ran = []

    @registry.custom_op(f"{ns}::f", mutates_args=())
    def op(xs: Annotated[dict[str, Tensor], Keys("x")], by: float = 2.0) -> Tensor:
        ran.append("default")
        return xs["x"] * by

    @op.register_kernel("cpu", name="small", when=lambda xs: xs["x"].shape[-1] <= 4)
    def small(xs: Annotated[dict[str, Tensor], Keys("x")], by: float) -> Tensor:
        ran.append("small")
        return xs["x"] * by

    for _ in range(3):
        for n, name in ((3, "small"), (6, "default")):
            assert_close(op({"x": ones(n)}), torch.full((n,), 2.0))
            assert ran.pop() == name


def test_threads(several: Several) -> None:
    several.add("small", up_to(4))
    wrong: list[Any] = []
    local = threading.local()
    for name, when in (("small", up_to(4)), ("large", None)):
        run = functools.partial(lambda name, x, by: local.ran.append(name) or x * by, name)
        several.op.register_kernel("cpu", run, name=name, when=when, priority=1 + (when is not None))

    def work(seed: int) -> None:
        local.ran = []
        for i in range(400):
            n = (seed * 7 + i * 3) % 9 + 1
            several.op(ones(n))
            if i % 50 == 0:
                several.add(f"other{seed}", up_to(0))
            if local.ran.pop() != ("small" if n <= 4 else "large"):
                wrong.append((seed, n))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
