"""``bypass=True``: nobody may tell."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import math
import sys
import weakref
from collections.abc import Callable
from typing import Any, Optional

import pytest
import torch
from helpers.modes import DispatchLog, FunctionLog
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import Library
from torch.utils._python_dispatch import TorchDispatchMode

import customops
from customops import Registry, Tag
from customops.errors import AliasError, UnsupportedError


class Frames:
    """Counts the calls of other written functions than the kernel: there is one where the dispatcher takes part."""

    def __init__(self, f: Callable[..., Any]) -> None:
        self.f = f

    def __call__(self, *args: Any, **kwargs: Any) -> int:

        names: list[str] = []

        def profile(frame: Any, event: str, _: Any) -> None:
            if event == "call" and frame.f_code.co_filename.startswith("<customops"):
                names.append(frame.f_code.co_name)

        sys.setprofile(profile)
        try:
            self.f(*args, **kwargs)
        finally:
            sys.setprofile(None)
        assert names[0] == "__call__"
        return len(names) - names.count("__call__") - names.count("kernel")


def scale_fn(x: Tensor, y: Tensor, by: float = 2.0, n: int = 1, bias: Optional[Tensor] = None) -> Tensor:
    return (x + y) * by * n + (0 if bias is None else bias)


def make(registry: Registry, name: str, **options: Any) -> Any:
    op = registry.custom_op(name, scale_fn, mutates_args=(), **options)
    op.register_fake(lambda x, y, by, n, bias: torch.empty_like(x))

    def backward(ctx: Any, grad: Tensor) -> Any:
        g = grad * ctx.factor
        return g, g, None, None, grad if ctx.has_bias else None

    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.factor, ctx.has_bias = inputs[2] * inputs[3], inputs[4] is not None

    op.register_autograd(backward, setup_context=setup_context)
    op.register_vmap("broadcast_all")
    return op


@pytest.fixture
def scale(registry: Registry, ns: str) -> Any:
    op = make(registry, f"{ns}::scale", bypass=True)
    op(torch.ones(2), torch.ones(2))  # the kernel for plain tensors is known from here on
    op(torch.ones(2), torch.ones(2), bias=torch.ones(2))
    return op


@pytest.fixture
def plain(registry: Registry, ns: str) -> Any:
    return make(registry, f"{ns}::plain")


ONE, TWO = torch.ones(2), torch.full((2,), 2.0)


@pytest.mark.parametrize(
    "args",
    [
        (ONE, ONE, 3.0, 2, None),
        (ONE, ONE, 3.0, 2, ONE),
        (torch.nn.Parameter(ONE, requires_grad=False), ONE.double().float(), 0.5, -1, None),
        (torch.ones(2, 2).t(), torch.ones(2, 2), 1.0, 1, None),
    ],
)
def test_what_goes_past_the_dispatcher(scale: Any, plain: Any, args: Any) -> None:
    assert Frames(scale)(*args) == 0
    assert torch.equal(scale(*args), plain(*args))
    with torch.no_grad():
        assert Frames(scale)(*args) == 0
    with torch.inference_mode():
        assert Frames(scale)(*args) == 0
        inference = torch.ones(2)
        scale(inference, inference, 1.0, 1, None)
        assert Frames(scale)(inference, inference, 1.0, 1, None) == 0
        assert torch.equal(scale(inference, inference, 1.0, 1, None), plain(inference, inference, 1.0))


class Plain(Tensor):
    pass


def in_thread(call: Callable[[], Any]) -> Any:
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(call).result()


def leaf() -> Tensor:
    return torch.ones(2, requires_grad=True)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((ONE, TWO), {}),  # nothing special, to compare with
        ((ONE,), {"y": TWO, "bias": ONE, "n": 3}),
        ((leaf(), ONE, 2.0, 1, None), {}),
        ((ONE, ONE, 2.0, 1, leaf()), {}),
        ((leaf() * 2, ONE, 2.0, 1, None), {}),
        ((ONE, ONE, True, 1, None), {}),
        ((ONE, ONE.as_subclass(Plain), 2.0, 1, None), {}),
        ((torch.ones(2, dtype=torch.complex64).conj(), ONE, 2.0, 1, None), {}),
        ((torch.ones(2, dtype=torch.complex64).conj().imag, ONE, 2.0, 1, None), {}),
        ((ONE, torch._efficientzerotensor(2), 2.0, 1, None), {}),
        ((ONE.to("meta"), ONE.to("meta"), 2.0, 1, None), {}),
    ],
)
def test_what_takes_the_dispatcher(scale: Any, plain: Any, args: Any, kwargs: Any) -> None:
    ours, theirs = scale(*args, **kwargs), plain(*args, **kwargs)
    assert type(ours) is type(theirs)
    assert (ours.dtype, ours.device, ours.requires_grad, ours.layout) == (
        theirs.dtype,
        theirs.device,
        theirs.requires_grad,
        theirs.layout,
    )
    if not ours.is_meta:
        assert torch.equal(ours.to_dense(), theirs.to_dense())
    if ours.requires_grad:
        inputs = [arg for arg in args if isinstance(arg, Tensor) and arg.requires_grad]
        for a, b in zip(
            torch.autograd.grad(ours.sum(), inputs), torch.autograd.grad(theirs.sum(), inputs), strict=True
        ):
            assert torch.equal(a, b)


@pytest.mark.parametrize(
    "args",
    [
        ("x", ONE, 2.0, 1, None),
        (ONE, None, 2.0, 1, None),
        (ONE, ONE, "2", 1, None),
        (ONE, ONE, 2.0, 2**63, None),
    ],
)
def test_wrong_calls(scale: Any, plain: Any, args: Any) -> None:
    with pytest.raises((RuntimeError, TypeError)) as theirs:
        plain(*args)
    with pytest.raises(theirs.type):
        scale(*args)


def test_arguments_that_there_are_not(scale: Any, ns: str) -> None:
    with pytest.raises(TypeError, match=rf"{ns}::scale\(\) missing 1 required positional argument: 'y'"):
        scale(ONE)
    with pytest.raises(TypeError, match="unexpected keyword argument 'z'"):
        scale(ONE, ONE, z=1)


def test_modes_see_it(scale: Any, plain: Any) -> None:
    for mode_type in (DispatchLog, FunctionLog):
        logs = []
        for op in (scale, plain):
            with mode_type() as mode:
                op(ONE, ONE, 2.0, 1, None)
            logs.append([str(each).replace("plain", "scale") for each in mode.seen])
        assert logs[0] == logs[1]
        assert any("scale" in each for each in logs[0])


def test_fake_tensors(scale: Any) -> None:
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.ones(2))
        result = scale(fake, fake, 2.0, 1, None)
    assert type(result) is type(fake)
    assert result.shape == (2,)


def test_transforms(scale: Any) -> None:
    x = torch.rand(3)
    assert torch.equal(torch.func.grad(lambda x: scale(x, x, 2.0, 1, None).sum())(x), torch.full((3,), 4.0))
    assert torch.equal(torch.vmap(lambda x: scale(x, x, 2.0, 1, None))(x), 4 * x)
    assert torch.equal(torch.func.functionalize(lambda x: scale(x, x, 2.0, 1, None))(x), 4 * x)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        with pytest.raises(UnsupportedError, match="forward-mode"):
            scale(dual, dual, 2.0, 1, None)


@pytest.mark.compile
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled(scale: Any, backend: str) -> None:
    f = torch.compile(lambda x, y: scale(x, y, 2.0, 1, None).sin(), fullgraph=True, backend=backend)
    assert torch.allclose(f(ONE, ONE), torch.full((2,), 4.0).sin())
    x = leaf()
    (grad,) = torch.autograd.grad(f(x, ONE).sum(), x)
    assert torch.allclose(grad, 2 * torch.full((2,), 4.0).cos())


@pytest.mark.compile
def test_compiled_with_other_sizes_and_modes(registry: Registry, ns: str) -> None:
    def add(x: Tensor, ys: list[Tensor], by: float = 2.0, *, times: int = 1) -> None:
        for y in ys:
            x.add_(y, alpha=by * times)

    op = registry.custom_op(f"{ns}::add", add, mutates_args={"x"}, bypass=True)

    def program(x: Tensor, y: Tensor) -> Tensor:
        x = x.clone()
        op(x, [y, y], times=2)
        op(ys=[y], x=x)
        return x * 2

    compiled = torch.compile(program, fullgraph=True, backend="aot_eager", dynamic=True)
    for context in (contextlib.nullcontext, torch.no_grad, torch.inference_mode):
        for size in (2, 3, 5):
            x, y = torch.rand(size), torch.rand(size)
            with context():
                torch.testing.assert_close(compiled(x, y), (x + 10 * y) * 2)
                torch.testing.assert_close(program(x, y), (x + 10 * y) * 2)


def test_autocast(scale: Any) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert scale(ONE, ONE, 2.0, 1, None).dtype == torch.float32
    scale.register_autocast("cpu", torch.bfloat16)
    assert scale(ONE, ONE, 2.0, 1, None).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert scale(ONE, ONE, 2.0, 1, None).dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_registrations_count_at_once(registry: Registry, scale: Any, ns: str) -> None:
    call = (ONE, ONE, 2.0, 1, None)
    scale.register_kernel("cpu", lambda x, y, by, n, bias: x + 10)
    assert scale(*call).tolist() == [11, 11]
    with scale.set_kernel_enabled("cpu", False):
        assert scale(*call).tolist() == [4, 4]
    for key in ("CPU", "AutogradCPU", "BackendSelect"):
        other = Library(ns, "FRAGMENT")
        other.impl("scale", lambda *args: args[0] + 20, key, allow_override=True)
        assert scale(*call).tolist() == [21, 21], key
        other._destroy()
        assert scale(*call).tolist() == [11, 11]
    for key in ("CPU", "ADInplaceOrView", "AutogradCPU", "Autograd", "BackendSelect"):
        with registry.scope():
            registry.impl(f"{ns}::scale", key, lambda *args: args[0] + 20)
            for _ in range(2):
                assert scale(*call).tolist() == [21, 21], key
        assert scale(*call).tolist() == [11, 11]
    assert Frames(scale)(*call) == 0
    scale.unregister()
    with pytest.raises(customops.errors.UnregisteredError):
        scale(*call)


@pytest.mark.parametrize("use_kineto", [False, True])
def test_profilers_see_it(scale: Any, ns: str, use_kineto: bool) -> None:
    for _ in range(2):
        with torch.autograd.profiler.profile(use_kineto=use_kineto) as profile:
            scale(ONE, TWO)
        names = [event.name for event in profile.function_events if event.name.startswith(ns)]
        op, kernel = names
        assert op == f"{ns}::scale"
        assert kernel.startswith(f"{ns}::scale[default: ")
        assert Frames(scale)(ONE, TWO) == 0


def test_profilers_of_other_threads_see_it(scale: Any) -> None:
    with torch.profiler.profile():
        assert in_thread(lambda: Frames(scale)(ONE, TWO)) > 0
    assert in_thread(lambda: Frames(scale)(ONE, TWO)) == 0


def test_results_are_checked(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::f", lambda x: x, mutates_args=(), schema="(Tensor x) -> Tensor", bypass=True)
    for _ in range(2):
        with pytest.raises(AliasError):
            op(ONE)


@pytest.mark.parametrize("check", ["always", "first", "never"])
@pytest.mark.parametrize("kernel", [lambda x: torch.max(x, 0), lambda x: [x + 1, x + 2]])
def test_several_returns_are_a_tuple(registry: Registry, ns: str, kernel: Any, check: Any) -> None:
    schema = "(Tensor x) -> (Tensor, Tensor)"
    op = registry.custom_op(f"{ns}::f", kernel, mutates_args=(), schema=schema, check=check, bypass=True)
    assert [type(op(ONE)) for _ in range(3)] == [tuple] * 3


def test_writes_are_counted(registry: Registry, ns: str) -> None:
    def add(x: Tensor, y: Tensor) -> None:
        x.numpy()[:] += y.numpy()

    op = registry.custom_op(f"{ns}::add", add, mutates_args={"x"}, bypass=True)
    x = torch.zeros(2)
    for i in range(1, 4):
        op(x, ONE)
        assert (x._version, x.tolist()) == (i, [i, i])
    for context in (torch.inference_mode(), contextlib.nullcontext()):
        with torch.inference_mode():
            y = torch.zeros(2)
        with context:
            op(y, ONE)
            op(y, ONE)
        assert y.tolist() == [2, 2]


def test_writes_are_not_counted_inside_a_mode(registry: Registry, ns: str) -> None:
    def add(x: Tensor, y: Tensor) -> None:
        x.numpy()[:] += y.numpy()

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            for op in ops:
                op(x, ONE)
                versions.append(x._version)
            return func(*args, **(kwargs or {}))

    ops = [registry.custom_op(f"{ns}::add{i}", add, mutates_args={"x"}, bypass=bool(i)) for i in range(2)]
    x, versions = torch.zeros(2), list[int]()
    for op in ops * 2:
        op(x, ONE)
    with Mode():
        ONE.neg()
    assert versions == [4, 4]
    assert x.tolist() == [6, 6]


def test_inplace(registry: Registry, ns: str) -> None:
    def add_(x: Tensor, y: Tensor) -> Tensor:
        return x.add_(y)

    op = registry.custom_op(f"{ns}::add_", add_, mutates_args={"x"}, tags=Tag.inplace, bypass=True)
    x = torch.zeros(2)
    assert op(x, ONE) is x
    assert op(x, ONE) is x
    assert x.tolist() == [2, 2]
    with pytest.raises(RuntimeError, match="no autograd formula"):
        op(leaf() * 1, ONE).sum().backward()


@pytest.mark.parametrize(
    ("schema", "kernel", "args", "problem"),
    [
        ("(int n) -> Tensor", torch.ones, (2,), "no argument is a tensor"),
        ("(Tensor x) -> int", len, (ONE,), "it returns a int, which the dispatcher converts"),
        ("(Tensor x) -> (Tensor, int)", lambda x: (x + 1, 2), (ONE,), "it returns a int"),
        ("(Tensor(a) x) -> Tensor(a)", lambda x: x[:1], (ONE,), "it returns a view"),
        ("(Tensor x, ScalarType[] n) -> Tensor", lambda x, n: x * len(n), (ONE, [torch.half]), "'n' is a ScalarType"),
        ("(Tensor x, Generator g) -> Tensor", lambda x, g: x * 2, (ONE, torch.default_generator), "'g' is a Generator"),
        (
            "(Tensor x, int from) -> Tensor",
            lambda x, start: x[start:] * 1,
            (ONE, 1),
            "'from' has the name of a keyword",
        ),
    ],
)
def test_ops_of_which_no_call_can(
    registry: Registry, ns: str, schema: str, kernel: Any, args: Any, problem: str
) -> None:
    op = registry.custom_op(f"{ns}::f", kernel, mutates_args=(), schema=schema, bypass=True)
    plain = registry.custom_op(f"{ns}::g", kernel, mutates_args=(), schema=schema)
    assert problem in op.explain_call()
    assert "# bypass=True\n# Calls take the dispatcher: " in op.explain_call()
    assert "bypass=True" not in plain.explain_call()
    for _ in range(2):
        torch.testing.assert_close(op(*args), plain(*args))


SEEN: list[Any] = []


def see(*values: Any, **named: Any) -> None:
    SEEN.append((values, named))
    for value in (*values, *named.values()):
        if type(value) is list:
            value.append(0)  # it is the kernel's own


#: Types of arguments, with values that go past the dispatcher, and others that do not.
VALUES: dict[str, tuple[list[Any], list[Any]]] = {
    "int n": ([1, -(2**63), 2**63 - 1, True], [2**63, 1.5, "1", None]),
    "SymInt n": ([1, True, 2**63 - 1], [2**63, 1.5]),
    "float n": ([1.5, 2, 2**53, math.inf, -0.0], [True, 2**53 + 1, "1", None]),
    "float n=0.0": ([1.5, 0.0, 0, 2], [-0.0]),
    "float n=-0.0": ([1.5, -0.0], [0.0, 0]),
    "float? n=None": ([1.5, None, 3], [True]),
    "Scalar n": ([1, 1.5, True, 2j, 2**63 - 1], [2**63, "1"]),
    "bool n": ([True, False], [1, 0.0]),
    "complex n": ([1j, 1.5], [2, True]),
    "str n": (["a", ""], ["ä", None]),
    "int[] n": ([[], [1, 2], (3,), torch.Size([4, 5])], [[True], [2**63], [-(2**63) - 1], 7, [1.5]]),
    "int[2] n": ([[1, 2], [1]], [5]),
    "SymInt[] n": ([[], (1, 2)], [[True]]),
    "float[] n": ([[1.5], ()], [[1], 1.5]),
    "bool[]? n": ([[True], None], [[1]]),
    "int[] n=[1, 2]": ([[1, 2], [3]], []),
    "Generator? n=None": ([None], []),
    "ScalarType n": ([torch.half], [6]),
    "Device n": ([torch.device("cpu")], ["cpu"]),
}


@pytest.mark.parametrize("argument", VALUES)
@pytest.mark.parametrize("by_keyword", [False, True])
def test_values_are_as_through_the_dispatcher(registry: Registry, ns: str, argument: str, by_keyword: bool) -> None:
    options = {"mutates_args": (), "schema": f"(Tensor x, {'*, ' * by_keyword}{argument}) -> ()"}
    kernel: Any = (lambda x, *, n: see(x, n=n)) if by_keyword else (lambda x, n: see(x, n))
    op = registry.custom_op(f"{ns}::f", kernel, **options, bypass=True)
    plain = registry.custom_op(f"{ns}::g", kernel, **options)
    with torch.no_grad():
        op._definition.find_past_dispatcher((ONE,))
    past, others = VALUES[argument]
    calls: list[tuple[dict[str, Any], bool]] = [({"n": value}, True) for value in past]
    calls += [({"n": value}, False) for value in others]
    calls += [({}, True)] if "=" in argument else []
    for given, is_past in calls:
        args, kwargs = ((), given) if by_keyword else (tuple(given.values()), {})
        copies = repr(given)
        ours, theirs = (attempt(each, args, kwargs) for each in (op, plain))
        assert ours == theirs, given
        assert repr(given) == copies
        assert (attempt(Frames(op), args, kwargs) == repr(0)) == is_past, given
        assert attempt(op, (), given) == theirs  # by keyword


def attempt(call: Callable[..., Any], args: Any, kwargs: Any) -> str:
    """What the kernel was given, or the error."""
    SEEN.clear()
    try:
        result = call(ONE, *args, **kwargs)
    except Exception as error:
        return type(error).__name__
    return repr(SEEN) if result is None else repr(result)


def test_several_and_lists(registry: Registry, ns: str) -> None:
    def f(xs: list[Tensor], y: Optional[Tensor], n: list[int]) -> tuple[Tensor, Tensor]:
        return torch.stack(xs).sum(0), torch.zeros(n) if y is None else y * 2

    def each(xs: list[Tensor], ys: Optional[list[Tensor]] = None) -> list[Tensor]:
        return [x * 2 for x in (*xs, *(ys or ()))]

    def fill(xs: list[Tensor], y: Tensor) -> None:
        for x in xs:
            x.numpy()[:] += y.numpy()

    f_op = registry.custom_op(f"{ns}::f", f, mutates_args=(), bypass=True)
    each_op = registry.custom_op(f"{ns}::each", each, mutates_args=(), bypass=True)
    fill_op = registry.custom_op(f"{ns}::fill", fill, mutates_args={"xs"}, bypass=True)
    a, b, c = torch.ones(2), torch.full((2,), 2.0), torch.full((2,), 3.0)
    for xs in ([a], [a, b], (a, b, c), [a, a]):
        for y in (None, c, a):
            given = dict(xs=xs, y=y, n=(3,))
            results = [f_op(**given), f_op(**given), torch.ops.__getattr__(ns).f(**given)]
            assert Frames(f_op)(**given) == 0
            for result in results:
                assert type(result) is tuple
                assert torch.equal(result[0], sum(xs))  # type: ignore[arg-type]
                assert torch.equal(result[1], torch.zeros(3) if y is None else y * 2)
    for args in (([a, b],), ([], [a]), ([a], [b, c]), ([a], None)):
        for _ in range(2):
            result = each_op(*args)
            assert type(result) is list
            assert [each.tolist() for each in result] == [(x * 2).tolist() for xs in args for x in xs or ()]
        assert Frames(each_op)(*args) == 0
    assert each_op([]) == []
    for i in range(1, 4):
        fill_op([a, b], c)
        assert (a._version, b._version, a.tolist(), b.tolist()) == (i, i, [1 + 3 * i] * 2, [2 + 3 * i] * 2)
    assert Frames(fill_op)([a, b], c) == 0


NESTED = "ignore:The PyTorch API of nested tensors is in prototype stage"


@pytest.mark.filterwarnings(NESTED)
def test_nested_tensors_take_the_dispatcher(registry: Registry, ns: str) -> None:
    """A look at their strides would end the process."""

    def f(x: Tensor, ys: list[Tensor], z: Optional[Tensor] = None) -> Tensor:
        return x * 2

    op = registry.custom_op(f"{ns}::f", f, mutates_args=(), bypass=True)
    nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
    op(ONE, [TWO], TWO)
    for args in ((nested, [TWO]), (ONE, [nested]), (ONE, [TWO], nested)):
        for _ in range(2):
            with pytest.raises(RuntimeError, match="NestedTensor"):
                op(*args)
    op.register_vmap("broadcast_all")
    with contextlib.suppress(RuntimeError):
        torch.vmap(lambda x: op(x, [TWO]))(nested)


def test_kinds_of_calls(registry: Registry, ns: str) -> None:
    """Each kind of call is looked up once, in whatever order they come; with very many, some take the dispatcher."""
    op = registry.custom_op(f"{ns}::f", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor", bypass=True)
    dtypes = (torch.float32, torch.float64, torch.int32, torch.int64, torch.half, torch.bfloat16)
    kinds = [torch.ones([1] * dims, dtype=dtype) for dims in range(7) for dtype in dtypes]
    for x in kinds * 2:
        assert torch.equal(op(x), x * 2)
    past = [Frames(op)(x) == 0 for x in kinds]
    assert past == [True] * 32 + [False] * 10
    assert torch.equal(op(torch.ones(0, 3, dtype=torch.half)), torch.ones(0, 3, dtype=torch.half))
    x = torch.ones(2)
    freed = weakref.ref(x)
    op(x)
    del x
    gc.collect()
    assert freed() is None


def test_inference_tensors_beside_others(registry: Registry, ns: str) -> None:
    def add(x: Tensor, y: Tensor) -> None:
        x.numpy()[:] += y.numpy()

    op = registry.custom_op(f"{ns}::add", add, mutates_args={"x"}, bypass=True)
    outside = torch.zeros(2)
    weight = torch.nn.Parameter(torch.ones(2))
    with torch.inference_mode():
        inside = torch.zeros(2)
        for i in range(1, 4):
            op(outside, torch.ones(2)), op(inside, ONE), op(inside, weight.detach())
            assert (outside._version, outside.tolist(), inside.tolist()) == (i, [i, i], [2 * i, 2 * i])
        for x, y in ((outside, inside), (inside, outside), (inside, TWO), (outside, weight)):
            op(x, y)
            assert Frames(op)(x, y) == 0
    x = leaf() * 2
    y = x * x
    with torch.inference_mode():
        op(x, ONE)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_autocast_for_another_device_is_off_in_the_kernel(registry: Registry, ns: str) -> None:
    op = registry.custom_op(
        f"{ns}::f",
        lambda x: x.new_tensor(float(torch.is_autocast_enabled("cpu"))),
        mutates_args=(),
        schema="(Tensor x) -> Tensor",
        bypass=True,
    )
    op(ONE)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            assert Frames(op)(ONE) > 0
            assert op(ONE) == 0


def test_weights_with_gradient_mode_off_and_on(scale: Any) -> None:
    x, weight = torch.ones(2), torch.nn.Parameter(torch.ones(2))
    for _ in range(2):
        for off in (torch.no_grad, torch.inference_mode):
            with off():
                scale(x, weight)
                assert Frames(scale)(x, weight) == 0
                assert not scale(x, weight).requires_grad
                with torch.enable_grad():
                    assert scale(x, weight).requires_grad == (off is torch.no_grad)
        result = scale(x, weight)
        assert result.requires_grad
        assert torch.autograd.grad(result.sum(), weight)[0].tolist() == [2, 2]


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
def test_jit_traces_it(scale: Any, ns: str) -> None:
    scale(ONE, TWO)
    graph = torch.jit.trace(lambda x, y: scale(x, y) * 3, (ONE, TWO), check_trace=False).graph
    assert f"{ns}::scale" in str(graph)


def test_a_removed_op_does_not_run_its_successor(registry: Registry, ns: str, scale: Any) -> None:
    call = (ONE, ONE, 2.0, 1, None)
    with registry.scope():
        successor = make(registry, f"{ns}::scale", bypass=True)
        successor(*call)
        for _ in range(2):
            with pytest.raises(customops.errors.UnregisteredError):
                scale(*call)
            assert Frames(successor)(*call) == 0
    scale(*call)
    for _ in range(2):
        with pytest.raises(customops.errors.UnregisteredError):
            successor(*call)
        assert Frames(scale)(*call) == 0


def test_a_value_there_is_not(registry: Registry, ns: str) -> None:
    with pytest.raises(customops.errors.DefinitionError, match="bypass must be True or False"):
        make(registry, f"{ns}::scale", bypass="no")


def test_it_comes_back_from_a_scope(registry: Registry, ns: str, scale: Any) -> None:
    with registry.scope():
        make(registry, f"{ns}::scale")
    assert scale(ONE, ONE, 2.0, 1, None).tolist() == [4, 4]
    assert Frames(scale)(ONE, ONE, 2.0, 1, None) == 0
    assert repr(scale) == f"<CustomOpDef({ns}::scale) {scale.schema}>"
    assert "fast_path.recent" in scale.explain_call()
