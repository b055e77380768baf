"""Fakes made from recorded calls: where they come from, when they go, and their files."""

from __future__ import annotations

import importlib.util
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, List, Literal, Optional, Tuple

import pytest
import torch
from helpers.compiling import draft_export
from helpers.damaged import damaged
from helpers.functions import add_fn
from helpers.versions import skip_before
from torch import Tensor
from torch._library import fake_profile as torchs
from torch._subclasses.fake_tensor import FakeTensorMode, UnsupportedOperatorException
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.library import Library

import customops
from customops import Registry, fake_profile
from customops.errors import CustomOpsError, KernelError, RegistrationError
from customops.fake_profile import (
    MissingOpProfile,
    OpProfile,
    ProfileError,
    TensorMetadata,
    generate_yaml_from_profiles,
    load_op_profiles,
    read_profiles_from_yaml,
    save_op_profiles,
    unsafe_generate_fake_kernels,
)

CPU = torch.device("cpu")
needs_yaml = pytest.mark.skipif(importlib.util.find_spec("yaml") is None, reason="needs PyYAML")


def tensor(rank: int, dtype: torch.dtype = torch.float32) -> TensorMetadata:
    return TensorMetadata(rank, dtype, CPU, torch.strided)


#: A call with two matrices that gave a matrix.
MATRICES = OpProfile((tensor(2), tensor(2)), tensor(2))


def fake_call(op: Any, *args: Any, **kwargs: Any) -> Any:
    """The result of `op` on FakeTensors made of `args`."""
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        args = tuple(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args)
        return op(*args, **kwargs)


@pytest.fixture
def lib(ns: str) -> Iterator[Library]:
    """A library with an op `foo` that has a CPU kernel alone."""
    library = Library(ns, "FRAGMENT")
    library.define("foo(Tensor x, Tensor y) -> Tensor")
    library.impl("foo", lambda x, y: x + y, "CPU")
    yield library
    library._destroy()


@pytest.fixture
def add(registry: Registry, ns: str) -> Any:
    return registry.custom_op(f"{ns}::add", add_fn, mutates_args=())


# -- lending a fake ----------------------------------------------------------------------------


@pytest.mark.parity(95)
def test_an_op_without_a_fake_has_one_inside(lib: Library, ns: str) -> None:
    foo, x = getattr(torch.ops, ns).foo, torch.ones(3, 4)
    for _ in range(2):
        with pytest.raises(UnsupportedOperatorException, match=f"{ns}.foo.default"):
            fake_call(foo, x, x)
        with unsafe_generate_fake_kernels({f"{ns}.foo.default": {MATRICES}}):
            result = fake_call(foo, x, x)
            assert (result.dim(), result.dtype, result.device, result.layout) == (2, torch.float32, CPU, torch.strided)
    with pytest.raises(UnsupportedOperatorException, match=f"{ns}.foo.default"):
        fake_call(foo, x, x)


@pytest.mark.parity(95)
def test_sizes_are_unknown_and_strides_contiguous(lib: Library, ns: str) -> None:
    profile = OpProfile((tensor(2), tensor(2)), tensor(3, torch.float64))
    with unsafe_generate_fake_kernels({f"{ns}.foo.default": {profile}}):
        result = fake_call(getattr(torch.ops, ns).foo, torch.ones(3, 4), torch.ones(3, 4))
    assert result.dtype == torch.float64
    assert result.is_contiguous()  # torch makes the first dimension the dense one
    assert all(isinstance(size, torch.SymInt) for size in result.shape)
    assert len({str(size) for size in result.shape}) == 3


@pytest.mark.parity(95)
@pytest.mark.parametrize(
    ("x", "y"),
    [
        (torch.ones(3), torch.ones(3)),
        (torch.ones(3, 4), torch.ones(4)),
        (torch.ones(3, 4, dtype=torch.float64), torch.ones(3, 4)),
        (torch.ones(3, 4), torch.ones(3, 4, device="meta")),
        (torch.ones(3, 4), torch.ones(3, 4).to_sparse()),
    ],
    ids=["rank", "one rank", "dtype", "device", "layout"],
)
def test_inputs_without_a_profile(lib: Library, ns: str, x: Tensor, y: Tensor) -> None:
    with unsafe_generate_fake_kernels({f"{ns}.foo.default": {MATRICES}}):
        with pytest.raises(MissingOpProfile, match=f"{ns}::foo: no profile has these inputs") as caught:
            fake_call(getattr(torch.ops, ns).foo, x, y)
    assert isinstance(caught.value, RuntimeError)
    assert isinstance(caught.value, CustomOpsError)
    assert isinstance(caught.value, torchs.MissingOpProfile)  # what torch's export catches
    assert caught.value.expected == "(torch.float32 of rank 2 on cpu, torch.float32 of rank 2 on cpu)"


@pytest.mark.parity(95)
def test_profiles_of_one_op_are_alternatives(lib: Library, ns: str) -> None:
    vectors = OpProfile((tensor(1), tensor(1)), tensor(0))
    with unsafe_generate_fake_kernels({f"{ns}.foo.default": {MATRICES, vectors}}):
        foo = getattr(torch.ops, ns).foo
        assert fake_call(foo, torch.ones(3), torch.ones(3)).dim() == 0
        assert fake_call(foo, torch.ones(3, 4), torch.ones(3, 4)).dim() == 2


def test_contradicting_profiles_are_not_chosen_from(lib: Library, ns: str) -> None:
    # Torch takes any
    flat = OpProfile(MATRICES.args_profile, tensor(1))
    with unsafe_generate_fake_kernels({f"{ns}.foo.default": {MATRICES, flat}}):
        with pytest.raises(MissingOpProfile, match="contradict each other"):
            fake_call(getattr(torch.ops, ns).foo, torch.ones(3, 4), torch.ones(3, 4))


@pytest.mark.parity(95)
def test_no_profile(lib: Library, ns: str) -> None:
    with unsafe_generate_fake_kernels({f"{ns}.foo.default": set()}):
        with pytest.raises(MissingOpProfile, match="there is no profile"):
            fake_call(getattr(torch.ops, ns).foo, torch.ones(3, 4), torch.ones(3, 4))


@pytest.mark.parity(95)
def test_arguments_that_are_no_tensors(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::f", mutates_args=())
    def f(a: float, x: Tensor, n: int = 3, mask: Optional[Tensor] = None, *, flag: bool = False) -> Tensor:
        return x.clone()

    short = OpProfile((None, tensor(1)), tensor(1))  # recorded without the defaults
    long = OpProfile((None, tensor(1), None, tensor(2), None), tensor(2))  # and with everything
    with unsafe_generate_fake_kernels({f"{ns}.f.default": {short, long}}):
        x, mask = torch.ones(3), torch.ones(1, 1)
        assert fake_call(f, 0.5, x).dim() == 1
        assert fake_call(f, 0.5, x, 4, None, flag=True).dim() == 1
        assert fake_call(f, 0.5, x, 4, mask).dim() == 2
        with pytest.raises(MissingOpProfile, match="float32 of rank 2 on cpu, no tensor, torch"):
            fake_call(f, 0.5, mask, 4, mask)


@pytest.mark.parity(95)
def test_several_outputs(registry: Registry, ns: str) -> None:
    def pair(x: Tensor) -> Tuple[Tensor, Tensor]:
        return x.sum(), x + 1

    def parts(x: Tensor) -> List[Tensor]:
        return [x.sum(), x + 1]

    def one(x: Tensor) -> Tensor:
        return x.sum()

    def none(x: Tensor) -> None:
        x.zero_()

    two = {OpProfile((tensor(1),), (tensor(0), tensor(1)))}
    for fn, profiles, expected in (
        (pair, two, (tuple, [0, 1])),
        (parts, two, (list, [0, 1])),
        (one, {OpProfile((tensor(1),), (tensor(0),))}, (Tensor, [0])),
        (none, {OpProfile((tensor(1),), ())}, (type(None), [])),
    ):
        registry.custom_op(f"{ns}::f", fn, mutates_args={"x"} if fn is none else ())
        with unsafe_generate_fake_kernels({f"{ns}.f.default": profiles}):
            result = fake_call(getattr(torch.ops, ns).f, torch.ones(3))
        tensors = [] if result is None else [result] if isinstance(result, Tensor) else result
        assert isinstance(result, expected[0])
        assert [item.dim() for item in tensors] == expected[1]


def test_types_that_are_lowered(registry: Registry, ns: str) -> None:
    """A profile is of what the schema says."""

    def fn(x: Tensor, mode: Literal["one", "two"]) -> Optional[Tensor]:
        return x + 1 if mode == "one" else None

    op = registry.custom_op(f"{ns}::f", fn)
    with unsafe_generate_fake_kernels({f"{ns}.f.default": {OpProfile((tensor(1),), (tensor(2),))}}):
        assert fake_call(op, torch.ones(3), "one").dim() == 2


@pytest.mark.parity(95)
def test_outputs_that_do_not_fit_the_op(registry: Registry, add: Any, ns: str) -> None:
    x = torch.ones(3, 4)
    with unsafe_generate_fake_kernels(
        {f"{ns}.add.default": {OpProfile(MATRICES.args_profile, (tensor(1), tensor(2)))}}
    ):
        with pytest.raises(KernelError, match="the fake impl returned something that does not fit the schema"):
            fake_call(add, x, x)

    @registry.custom_op(f"{ns}::counted", mutates_args=())
    def counted(x: Tensor) -> Tuple[Tensor, int]:
        return x + 1, 3

    profile = OpProfile((tensor(2),), (tensor(2), None))
    with pytest.raises(ProfileError, match="an output that is no tensor"):
        with unsafe_generate_fake_kernels({f"{ns}.counted.default": {profile}}):
            raise AssertionError("not reached")


def test_overloads_and_names(registry: Registry, ns: str) -> None:
    # Torch knows default overloads alone
    registry.custom_op(f"{ns}::f", add_fn, mutates_args=())
    registry.custom_op(f"{ns}::f.other", torch.clone, schema="(Tensor x) -> Tensor", mutates_args=())
    both = {
        f"{ns}.f.default": {OpProfile((tensor(1), tensor(1)), tensor(1))},
        f"{ns}.f.other": {OpProfile((tensor(1),), tensor(2))},
    }
    with unsafe_generate_fake_kernels(both):
        packet = getattr(torch.ops, ns).f
        assert fake_call(packet, torch.ones(3), torch.ones(3)).dim() == 1
        assert fake_call(packet, torch.ones(3)).dim() == 2
    with unsafe_generate_fake_kernels({f"{ns}::f": {OpProfile((tensor(1),) * 2, tensor(3))}}):
        assert fake_call(packet, torch.ones(3), torch.ones(3)).dim() == 3


def test_unknown_op_takes_back_the_others(lib: Library, ns: str) -> None:
    profiles = {f"{ns}.foo.default": {MATRICES}, f"{ns}.bar.default": {MATRICES}}
    with pytest.raises(RegistrationError, match="there is no such operator"):
        with unsafe_generate_fake_kernels(profiles):
            raise AssertionError("not reached")
    with pytest.raises(UnsupportedOperatorException):
        fake_call(getattr(torch.ops, ns).foo, torch.ones(3, 4), torch.ones(3, 4))


def test_gone_after_an_error(lib: Library, ns: str) -> None:
    with pytest.raises(ZeroDivisionError), unsafe_generate_fake_kernels({f"{ns}.foo.default": {MATRICES}}):
        raise ZeroDivisionError
    with pytest.raises(UnsupportedOperatorException):
        fake_call(getattr(torch.ops, ns).foo, torch.ones(3, 4), torch.ones(3, 4))


# -- over an existing fake ---------------------------------------------------------------------


def half(x: Tensor, y: Tensor) -> Tensor:
    return torch.empty_like(x, dtype=torch.bfloat16)


@pytest.mark.parity(96)
@pytest.mark.parametrize("origin", ["define", "custom_op", "torch.library.custom_op"])
def test_overrides_a_fake_and_gives_it_back(lib: Library, registry: Registry, ns: str, origin: str) -> None:
    if origin == "define":
        customops.register_fake(f"{ns}::foo", half, lib=lib)
    elif origin == "custom_op":
        registry.custom_op(f"{ns}::foo2", add_fn, mutates_args=()).register_fake(half)
    else:
        torch.library.custom_op(f"{ns}::foo2", add_fn, mutates_args=()).register_fake(half)
    name = "foo" if origin == "define" else "foo2"
    op, x = getattr(getattr(torch.ops, ns), name), torch.ones(3, 4)
    assert fake_call(op, x, x).dtype == torch.bfloat16
    with unsafe_generate_fake_kernels({f"{ns}.{name}.default": {MATRICES}}):
        assert fake_call(op, x, x).dtype == torch.float32
        with pytest.raises(MissingOpProfile):
            fake_call(op, x[0], x)
    assert fake_call(op, x, x).dtype == torch.bfloat16


@pytest.mark.parity(96)
def test_nested(add: Any, ns: str) -> None:
    x, name = torch.ones(3, 4), f"{ns}.add.default"
    wide = OpProfile(MATRICES.args_profile, tensor(2, torch.float64))
    with unsafe_generate_fake_kernels({name: {MATRICES}}):
        with unsafe_generate_fake_kernels({name: {wide}}):
            assert fake_call(add, x, x).dtype == torch.float64
        assert fake_call(add, x, x).dtype == torch.float32
    with pytest.raises(RuntimeError, match="no fake impl"):
        fake_call(add, x, x)


@pytest.mark.parity(96)
def test_inside_a_scope(registry: Registry, add: Any, ns: str) -> None:
    x = torch.ones(3, 4)
    add.register_fake(half)
    with registry.scope():
        with unsafe_generate_fake_kernels({f"{ns}.add.default": {MATRICES}}):
            assert fake_call(add, x, x).dtype == torch.float32
        assert fake_call(add, x, x).dtype == torch.bfloat16
    assert fake_call(add, x, x).dtype == torch.bfloat16


@pytest.mark.compile
def test_export(add: Any, ns: str) -> None:
    # What draft_export records is enough for a strict one
    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Any:
            return add(x, x)

    x = torch.ones(3, 4)
    drafted = draft_export(Model(), (x,))
    recorded = drafted._report.op_profiles
    assert set(recorded) == {f"{ns}.add.default"}  # of torch's classes
    with unsafe_generate_fake_kernels(recorded):
        exported = torch.export.export(Model(), (x,))
    (node,) = exported.graph.find_nodes(op="call_function", target=add._opoverload)
    assert node.meta["val"].dim() == 2
    assert torch.equal(exported.module()(x), x + x)
    assert read_profiles_from_yaml(generate_yaml_from_profiles(recorded)) == {f"{ns}.add.default": {MATRICES}}


@pytest.mark.compile
@pytest.mark.parity(95)
def test_draft_export_goes_on_without_a_profile(add: Any, ns: str) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Any:
            return add(x, x)

    with unsafe_generate_fake_kernels({f"{ns}.add.default": {MATRICES}}):
        drafted = draft_export(Model(), (torch.ones(3),))
    (node,) = drafted.graph.find_nodes(op="call_function", target=add._opoverload)
    assert node.meta["val"].dim() == 1


def test_metadata_of_a_tensor() -> None:
    assert TensorMetadata.maybe_from_tensor(torch.ones(2, 3)) == tensor(2)
    assert TensorMetadata.maybe_from_tensor(torch.ones(2).to_sparse()) == TensorMetadata(
        1, torch.float32, CPU, torch.sparse_coo
    )
    assert TensorMetadata.maybe_from_tensor(3) is None


# -- files -------------------------------------------------------------------------------------

PROFILES = {
    "lib.foo.default": {MATRICES, OpProfile((tensor(1), None, tensor(0, torch.int64)), (tensor(1), tensor(2)))},
    "lib.bar.other": {OpProfile((), TensorMetadata(3, torch.bfloat16, torch.device("cuda:1"), torch.sparse_csr))},
    "lib.baz.default": set(),
}


@pytest.mark.parity(97)
def test_text_round_trip() -> None:
    text = generate_yaml_from_profiles(PROFILES)
    assert read_profiles_from_yaml(text) == PROFILES
    assert generate_yaml_from_profiles(read_profiles_from_yaml(text)) == text  # the order of a set does not show


@pytest.mark.parity(97)
@needs_yaml
def test_text_is_yaml() -> None:
    yaml = importlib.import_module("yaml")
    text = generate_yaml_from_profiles(PROFILES)
    assert yaml.safe_load(text) == json.loads(text)


DTYPES = [*fake_profile._DTYPES.split(), *fake_profile._NEWER_DTYPES.split()]


@pytest.mark.parity(97)
@pytest.mark.parametrize("name", [*DTYPES, *fake_profile._LAYOUTS.split()])
def test_numbers_are_torchs(name: str) -> None:
    serialize = importlib.import_module("torch._export.serde.serialize")
    value = getattr(torch, name)
    if value in (torch.uint32, torch.uint64, torch.float8_e8m0fnu):
        skip_before(2, 12, because="had no numbers for these dtypes")
    if isinstance(value, torch.dtype):
        assert fake_profile._DTYPE_NUMBERS.write(value) == serialize._TORCH_TO_SERIALIZE_DTYPE[value]
        assert fake_profile._DTYPE_NUMBERS.read(fake_profile._DTYPE_NUMBERS.write(value)) is value
    else:
        assert fake_profile._LAYOUT_NUMBERS.write(value) == serialize._TORCH_TO_SERIALIZE_LAYOUT[value]
        assert fake_profile._LAYOUT_NUMBERS.read(fake_profile._LAYOUT_NUMBERS.write(value)) is value


@pytest.mark.parity(97)
@needs_yaml
def test_torch_and_we_read_each_other() -> None:
    ours = {"lib.foo.default": {MATRICES}}
    theirs = torchs.read_profiles_from_yaml(generate_yaml_from_profiles(ours))
    assert str(theirs) == str(ours)
    assert read_profiles_from_yaml(torchs.generate_yaml_from_profiles(theirs)) == ours


@pytest.mark.parity(97)
@pytest.mark.parametrize("kind", ["buffer", "str", "path"])
def test_files(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "profiles.yaml"
    file: Any = {"buffer": io.BytesIO(), "str": str(path), "path": path}[kind]
    save_op_profiles(PROFILES, file)
    if kind == "buffer":
        file.seek(0)
    assert load_op_profiles(file) == PROFILES
    for function in (lambda: save_op_profiles(PROFILES, 3), lambda: load_op_profiles(3)):  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="there is no file"):
            function()


@pytest.mark.parity(97)
def test_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_profile, "get_torch_version", lambda: "2.1")
    text = generate_yaml_from_profiles(PROFILES)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="Unable to load outdated profile") as caught:
        read_profiles_from_yaml(text)
    assert isinstance(caught.value, ProfileError)
    assert caught.value.got == "2.1"


@pytest.mark.parametrize("text", ["[]", "{}", '{"torch_version": "VERSION", "operators": {"lib.f": [{}]}}'])
def test_text_without_profiles(text: str) -> None:
    with pytest.raises(ProfileError, match="the text holds no profiles"):
        read_profiles_from_yaml(text.replace("VERSION", fake_profile.get_torch_version()))


@needs_yaml
def test_text_that_is_not_yaml() -> None:
    with pytest.raises(ProfileError, match="not YAML"):
        read_profiles_from_yaml("{")


def test_unknown_dtype() -> None:
    with pytest.raises(ProfileError, match="this dtype cannot be written"):
        generate_yaml_from_profiles({"lib.f.default": {OpProfile((tensor(1, torch.quint8),), tensor(1))}})
    text = generate_yaml_from_profiles({"lib.f.default": {OpProfile((), tensor(1))}}).replace(
        '"dtype": 7', '"dtype": 99'
    )
    with pytest.raises(ProfileError, match="unknown dtype"):
        read_profiles_from_yaml(text)


@pytest.mark.parity(97)
def test_without_pyyaml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert read_profiles_from_yaml(generate_yaml_from_profiles(PROFILES)) == PROFILES
    with pytest.raises(CustomOpsError, match="pip install pyyaml"):
        read_profiles_from_yaml("torch_version: '2.13'")


@needs_yaml
def test_damaged_files(tmp_path: Path) -> None:
    refused, file = 0, tmp_path / "profiles"
    for data in damaged(generate_yaml_from_profiles({"lib.foo.default": {MATRICES}})):
        file.write_bytes(data)
        try:
            read = load_op_profiles(file)
        except ProfileError:
            refused += 1
        else:  # other profiles, but profiles
            for each in (each for profiles in read.values() for each in profiles):
                outputs = each.out_profile if isinstance(each.out_profile, tuple) else (each.out_profile,)
                assert all(one is None or type(one.rank) is int for one in (*each.args_profile, *outputs))
    assert refused > 500


@needs_yaml
@pytest.mark.parametrize("text", ["!!bool x", "a: 2001-99-99", "!!int ''", "!!timestamp 'x'", "&a [*a]", "9" * 5000])
def test_yaml_that_python_refuses(text: str) -> None:
    with pytest.raises(ProfileError):
        read_profiles_from_yaml(text)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('"cpu"', '"nowhere"', "unknown device\n  got:      'nowhere'"),
        ('"cpu"', "0", "unknown device\n  got:      0"),
        ('"rank": 2', '"rank": "x"', "impossible rank\n  got:      'x'"),
        ('"dtype": 7', '"dtype": true', "unknown dtype\n  got:      True"),
    ],
)
def test_what_no_tensor_has(old: str, new: str, problem: str) -> None:
    text = generate_yaml_from_profiles({"lib.foo.default": {MATRICES}})
    with pytest.raises(ProfileError, match=problem):
        read_profiles_from_yaml(text.replace(old, new))


def test_text_files_are_no_binary_buffers() -> None:
    with pytest.raises(ProfileError, match="a binary buffer"):
        load_op_profiles(io.StringIO("{}"))  # type: ignore[arg-type]


def test_a_profile_that_holds_no_metadata() -> None:
    """It was written as a number, and could not be read."""
    with pytest.raises(AttributeError):
        generate_yaml_from_profiles({"lib.foo.default": {OpProfile((3,), tensor(1))}})  # type: ignore[arg-type]
