"""Ops of ours against the same ops of `torch.library`: what a call does may not differ, whatever shortcut it takes.

A case is an op, its arguments and a context that the call is made in. Both ops are called with arguments of the same
kind, and all that can be seen of the two calls is compared. Where torch is wrong, `DIFFERENCES` says so.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, List, Sequence, Tuple

import pytest
import torch
from helpers.differential.ops import (
    CASES,
    OPS,
    PARAMETER,
    SEEN,
    see,
)
from helpers.differential.runs import (
    CONTEXTS,
    KINDS,
    Operations,
    Raised,
    Run,
    attempt,
    describe,
    gradients,
    inference,
    make,
    relation,
)
from helpers.versions import is_before
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from customops import Registry
from customops.errors import AliasError, AutogradError, UnsupportedError

pytestmark = [
    pytest.mark.slow,
    *(
        pytest.mark.filterwarnings(f"ignore:{text}")
        for text in (
            "torch.quantize_per_tensor",  # deprecated on 2.15
            "The PyTorch API of nested tensors is in prototype stage",
            "Sparse CSR tensor support is in beta state",
            "There is a performance drop",
            "Casting complex values to real",
            "Warning only once for all operators",  # tests override kernels
        )
    ),
]


# Calls --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One call."""

    op: str
    call: int
    kinds: tuple[str, ...]
    twice: bool  # is one tensor passed for all?
    context: str

    def run(self, op: Any, is_ours: bool) -> dict[str, Any]:
        """All that can be seen of the call."""
        SEEN.clear()
        tensors = tuple(make(kind, mark) for mark, kind in enumerate(self.kinds))
        tensors = tensors[:1] * len(tensors) if self.twice else tensors
        run = Run(functools.partial(OPS[self.op].calls[self.call], op), tensors, is_ours)
        result = attempt(CONTEXTS[self.context], run)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        return {
            "result": describe(result),
            "arguments": describe(tensors),
            "aliases": [[relation(output, x) for x in tensors] for output in outputs],
            "gradients": describe(attempt(gradients, outputs, tensors)),
            "seen": SEEN[:],
            "log": run.log,
        }

    @property
    def writes(self) -> bool:
        return bool(OPS[self.op].keywords.get("mutates_args"))

    def has(self, *words: str) -> bool:
        """Is an argument of a kind with one of these words in its name?"""
        return any(word in kind for word in words for kind in self.kinds)


def differs_on_purpose(case: Case, ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Where torch is wrong, or cannot serve as the reference."""
    if case.op == "gaps" and case.has("leaf", "parameter"):
        return True  # torch does not see that a list with a None in it requires grad, and makes no graph
    if case.op == "gaps" and case.has("conjugate", "negative") and case.context == "dispatch mode":
        return True  # torch resolves no tensors in a list with a None in it, and below a mode ignores their bits
    if case.has("sparse", "sparse leaf", "compressed", "mkldnn") and is_raised(ours["result"], AliasError):
        return case.op == "same"  # torch does not look for aliases of tensors without a storage
    if case.has("inference") and case.context == "dispatch mode" and "nference tensor" in str(ours["result"]):
        # An error as in a plain call. Below a mode, the kernel of torch's op writes to it all the same.
        return is_raised(ours["result"], RuntimeError)
    if case.has("subclass") and case.context == "dispatch mode" and keys(ours, theirs) == ["result"]:
        # The kernel runs as in a plain call, where ``as_subclass``, by which torch makes its results, makes views.
        return {**ours["result"], "view": None} == {**theirs["result"], "view": None}
    if case.op == "ramp" and case.call == 1:
        return not is_raised(
            ours["result"], Exception
        )  # a meta device: torch asks for a kernel, here there is the fake
    if case.context == "profiler" and set(ours["log"]) == {"op"} and len(ours["log"]) > len(theirs["log"]):
        ours = {**ours, "log": theirs["log"]}  # 2.15 calls simple ops of its own past the profiler
        if not keys(ours, theirs):
            return True
    if case.writes and case.has("conjugate", "negative") and is_raised(theirs["result"], RuntimeError):
        # Its kernel for these takes it that an op that writes returns what it writes, and takes no lists.
        texts = ("Expected Tensor but got", "MathBitsFallback", "support mutable TensorLists")
        runs = ours["seen"] or not is_raised(ours["result"], Exception)  # the kernel, which may raise, or the fake impl
        if runs and any(text in str(theirs["result"].error) for text in texts):
            return True
        if case.has("nested", "jagged") and keys(ours, theirs) == ["log"]:
            return True  # both raise, at different points
    if case.context == "vmap" and is_raised(theirs["result"], RuntimeError):
        return True  # torch has no fallback for lists
    if case.context == "vmap" and is_raised(theirs["result"], SystemError):
        return is_before(2, 15)  # in its fallback, torch 2.14 loses the error of the kernel
    if case.context == "vmap":  # the strategy stacks results, torch's fallback takes views of one buffer
        same = [numbers_of(ours[key]) == numbers_of(theirs[key]) for key in ("result", "arguments", "gradients")]
        if all(same):
            return True
    if keys(ours, theirs) == ["result"] and without_version(ours["result"]) == without_version(theirs["result"]):
        return True  # a new tensor that was written may count that
    if case.context == "dual_level" and case.has("nested") and is_raised(theirs["result"], Exception):
        return True  # here it is looked for tangents first, which raises as well
    is_wrapped = any("wrapper" in kind for kind in case.kinds)
    if case.has("meta") and is_wrapped and is_raised(ours["gradients"], AutogradError):
        return True  # the gradient of the wrapper is on meta, too, which torch lets pass
    if is_raised(theirs["gradients"], RuntimeError) and "isFloatingType(grad" in str(theirs["gradients"].error):
        return True  # torch does not take the real part of a gradient
    if case.context in ("func.jvp", "dual"):
        # No formula for forward mode: zeros in torch, an error here. Writes then are part of a history, see below.
        return case.writes or is_raised(ours["result"], UnsupportedError) or keys(ours, theirs) == ["seen"]
    if case.context == "func.grad":
        # torch's op raises. The reference went another way: values are all there is to compare, and where functorch
        # itself raises (CSR has no strides, inference tensors are not tracked), none.
        same = numbers_of(ours["result"]) == numbers_of(theirs["result"])
        return case.writes or same or any(is_raised(found["result"], Exception) for found in (ours, theirs))
    # A write to what has a history is part of it here (or refused by autograd, for some views); torch's backward goes
    # past it. Under vmap the op is called on views of its arguments.
    history = case.has("not a leaf", "of a leaf", "of no leaf") or (
        case.context == "vmap" and case.has("leaf", "parameter")
    )
    # Without a formula what is written becomes part of the graph, so that a backward raises; in torch it stays apart.
    return case.writes and (history or case.has("leaf", "parameter"))


def is_raised(value: Any, kind: type[Exception]) -> bool:
    return isinstance(value, Raised) and isinstance(value.error, kind)


def keys(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    return [key for key in ours if ours[key] != theirs[key]]


def without_version(description: Any) -> Any:
    return tree_map_only(dict, lambda facts: {**facts, "version": None}, description, is_leaf=is_facts)


def is_facts(value: Any) -> bool:
    return isinstance(value, dict)


def numbers_of(description: Any) -> Any:
    return tree_map_only(dict, lambda facts: facts["numbers"], description, is_leaf=is_facts)


def check(case: Case, our_op: Any, their_op: Any) -> None:
    theirs, ours = case.run(their_op, False), case.run(our_op, True)
    differing = keys(ours, theirs)
    if differing and not differs_on_purpose(case, ours, theirs):
        assert {key: ours[key] for key in differing} == {key: theirs[key] for key in differing}, case


def cases(name: str, contexts: Sequence[str]) -> st.SearchStrategy[Case]:
    # Reading what these two make of a tensor of zeros, torch reads a null pointer.
    kinds = [kind for kind in KINDS if kind != "zero" or name not in ("gaps", "row")]
    tensors = st.tuples(*[st.sampled_from(kinds)] * OPS[name].tensors)
    calls = st.integers(0, len(OPS[name].calls) - 1)
    return st.builds(Case, st.just(name), calls, tensors, st.booleans(), st.sampled_from(contexts))


def define_both(registry: Registry, ns: str, name: str, **options: Any) -> tuple[Any, Any]:
    ours = OPS[name].define(functools.partial(registry.custom_op, **options), f"{ns}_ours::op")
    return ours, OPS[name].define(torch.library.custom_op, f"{ns}_theirs::op")


@pytest.mark.parametrize("bypass", [False, True])
@pytest.mark.parametrize("name", OPS)
def test_a_call_is_what_it_is_in_torch(registry: Registry, ns: str, name: str, bypass: bool) -> None:
    our_op, their_op = define_both(registry, ns, name, **{"bypass": True} if bypass else {})
    # With bypass, a function mode sees by position what was passed by keyword.
    contexts = [context for context in CONTEXTS if context != "function mode" or not bypass]

    @CASES
    @given(case=cases(name, contexts))
    def all_cases(case: Case) -> None:
        check(case, our_op, their_op)

    all_cases()


@pytest.mark.parametrize(
    "name", ["scale", "no_formula", "for_cpu", "product", "both", "total", "each", "options", "row"]
)
def test_what_differs_on_purpose_does(registry: Registry, ns: str, name: str) -> None:
    op, _ = define_both(registry, ns, name)
    dense = ("dense",) * OPS[name].tensors
    for context in ("func.jvp", "dual"):
        assert is_raised(Case(name, 0, dense, False, context).run(op, True)["result"], UnsupportedError)
    if OPS[name].factors:
        assert not is_raised(Case(name, 0, dense, False, "func.grad").run(op, True)["result"], Exception)


@pytest.mark.parametrize("name", ["scale", "both", "fill", "total"])
def test_compiled_calls_are_what_they_are_in_torch(
    registry: Registry, ns: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiled(call: Run) -> Any:
        return torch.compile(call.invoke, backend="aot_eager", fullgraph=True)(*call.tensors)

    monkeypatch.setitem(CONTEXTS, "compiled", compiled)
    our_op, their_op = define_both(registry, ns, name)
    for kind in ("dense", "transposed", "leaf"):
        check(Case(name, 0, (kind,) * OPS[name].tensors, False, "compiled"), our_op, their_op)


def grows(x: Tensor, sizes: List[int]) -> Tensor:
    sizes.append(3)
    return x * 2


def empties(xs: List[Tensor]) -> Tensor:
    return xs.pop() * 2


def tuple_for_list(x: Tensor) -> List[Tensor]:
    return (x * 2, x * 3)  # type: ignore[return-value]


def integer_for_float(x: Tensor) -> Tuple[Tensor, float]:
    return x * 2, 1


@pytest.mark.parametrize(
    ("kernel", "call"),
    [
        (grows, lambda op, x: op(x, [1])),
        (empties, lambda op, x: op([x, x])),
        (tuple_for_list, lambda op, x: op(x)),
        (integer_for_float, lambda op, x: op(x)),
    ],
)
def test_setup_context_sees_the_same_with_and_without_the_shortcut(
    registry: Registry, ns: str, kernel: Callable[..., Any], call: Callable[..., Any]
) -> None:
    op = registry.custom_op(f"{ns}::op", kernel, mutates_args=())
    op.register_autograd(
        lambda ctx, *grads: None, setup_context=lambda ctx, inputs, output: see("setup", inputs, repr(output))
    )
    x = torch.ones(2, requires_grad=True)
    SEEN.clear()
    call(op, x)
    with Operations([]):  # with a mode about, the op is redispatched
        call(op, x)
    directly, redispatched = SEEN
    assert directly == redispatched


def test_kernels_of_inference_tensors(registry: Registry, ns: str) -> None:
    def f(x: Tensor) -> Tensor:
        return x + (PARAMETER * 2).exp()

    op = registry.custom_op(f"{ns}::f", f, mutates_args=(), bypass=True)
    x = inference(torch.ones(2))
    op(x)
    assert op(x).requires_grad == op._opoverload(x).requires_grad


# Registering again --------------------------------------------------------------------------------------------------


class Twin:
    """An op, and what was registered for it by hand, to be taken back."""

    def __init__(self, op: Any, qualname: str) -> None:
        self.op, self.qualname = op, qualname
        self.libraries: list[Any] = []
        self.switches: list[Any] = []

    def change(self, action: str, by: int) -> None:
        """Register or take back something; `by` tells it from all others."""
        name = self.qualname.split("::")
        if action in ("CPU", "CompositeExplicitAutograd", "ADInplaceOrView"):
            self.libraries.append(torch.library.Library(name[0], "FRAGMENT"))
            self.libraries[-1].impl(name[1], functools.partial(apply, by), action, allow_override=True)
        elif action == "destroy" and self.libraries:
            self.libraries.pop()._destroy()
        elif action == "switch":
            if self.switches:
                self.switches.pop().__exit__(None, None, None)
            else:
                self.switches.append(self.op.set_kernel_enabled("cpu", False))
                self.switches[-1].__enter__()
        elif action == "kernel":
            self.op.register_kernel("cpu")(functools.partial(apply, by))
        elif action == "kernel by name":
            torch.library.register_kernel(self.qualname, "cpu", functools.partial(apply, by))
        elif action == "fake":
            self.op.register_fake(lambda x: x.new_zeros(by))
        elif action == "backward":
            self.op.register_autograd(lambda ctx, grad: grad * by)

    def probe(self) -> list[Any]:
        """Calls of all kinds that may go another way each."""
        leaf = torch.ones(2, requires_grad=True)
        result = attempt(self.op, leaf)
        of_sparse: list[Any] = []
        found = [result, attempt(gradients, [result] if isinstance(result, Tensor) else [], (leaf,)), leaf]
        for manager in (contextlib.nullcontext, torch.no_grad, torch.inference_mode, lambda: Operations([])):
            dense, sparse = torch.ones(2), torch.ones(2).to_sparse()
            with manager():
                found += [attempt(self.op, dense), dense]
                of_sparse.append(numbers_of(describe(attempt(self.op, sparse))))  # its version may differ
        with FakeTensorMode():
            found.append(attempt(self.op, torch.ones(2)))
        return [*(describe(value) for value in found), *of_sparse]


def apply(by: int, x: Tensor) -> Tensor:
    return x * by


ACTIONS = ["kernel", "kernel by name", "CPU", "CompositeExplicitAutograd", "ADInplaceOrView", "destroy", "switch",
           "fake", "backward"]  # fmt: skip


@pytest.mark.skipif(
    not inspect.signature(torch.library.Library.impl).parameters["allow_override"].default,
    reason="this torch refuses to register a kernel twice",
)
@settings(CASES, max_examples=40)
@given(actions=st.lists(st.sampled_from(ACTIONS), max_size=8))
def test_what_is_registered_counts_at_once_as_in_torch(actions: list[str]) -> None:
    def define(custom_op: Any, qualname: str) -> Twin:
        def f(x: Tensor) -> Tensor:
            return x * 1

        return Twin(custom_op(qualname, f, mutates_args=()), qualname)

    registry, n = Registry(), next(COUNTER)
    with registry.scope():
        ours = define(registry.custom_op, f"t_differential::ours_{n}")
        theirs = define(torch.library.custom_op, f"t_differential::theirs_{n}")
        assert ours.probe() == theirs.probe()
        for by, action in enumerate(actions, 2):
            for twin in (ours, theirs):
                twin.change(action, by)
            assert ours.probe() == theirs.probe(), actions[: by - 1]
        for twin in (ours, theirs):
            for switch in twin.switches:
                switch.__exit__(None, None, None)
            for library in twin.libraries:
                library._destroy()


COUNTER = itertools.count()


@pytest.mark.parametrize(
    "how", ["kernel", "kernel by name", "CPU", "ADInplaceOrView", "autocast", "backward", "switch"]
)
def test_threads_see_at_once_what_is_registered(registry: Registry, ns: str, how: str) -> None:
    def f(x: Tensor) -> Tensor:
        return x * 1

    twin = Twin(registry.custom_op(f"{ns}::f", f, mutates_args=()), f"{ns}::f")
    done, wrong = threading.Event(), list[Any]()
    steady: list[Any] = [None]  # an object for each state that lasts, with what calls give in it

    def observe() -> Any:
        if how == "autocast":
            with torch.autocast("cpu"):
                return twin.op(torch.ones(())).dtype
        leaf = torch.ones((), requires_grad=how == "backward")
        result = twin.op(leaf)
        return torch.autograd.grad(result, leaf)[0].item() if how == "backward" else result.item()

    def call_on() -> None:
        while not done.is_set():
            before = steady[0]
            got = observe()
            if before is not None and before is steady[0] and got != before[0]:
                wrong.append((got, before))

    if how in ("backward", "switch"):
        twin.change("kernel" if how == "switch" else how, 2)
    threads = [threading.Thread(target=call_on) for _ in range(2)]
    for thread in threads:
        thread.start()
    for by in range(2, 22):
        steady[0] = None
        if how == "autocast":
            expected: Any = torch.bfloat16 if by % 2 else torch.float16
            twin.op.register_autocast("cpu", expected)
        else:
            twin.change(how, by)
            expected = (1 if by % 2 == 0 else 2) if how == "switch" else by
        steady[0] = [expected]
        assert observe() == expected
        time.sleep(0.002)
    done.set()
    for thread in threads:
        thread.join(60)
    for each in reversed(twin.libraries):
        each._destroy()
    assert not wrong
