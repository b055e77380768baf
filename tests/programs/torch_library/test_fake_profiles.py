"""torch's fake profiles, on ops of ours: temporary fake impls that are made from recorded calls."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.functions import add_fn
from torch import Tensor
from torch._library import fake_profile
from torch._library.fake_profile import OpProfile, TensorMetadata
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from customops import Registry
from customops.errors import MissingFakeError


def tensor(rank: int) -> TensorMetadata:
    return TensorMetadata(rank, torch.float32, torch.device("cpu"), torch.strided)


#: A call with two matrices that returned a matrix.
MATRICES = OpProfile((tensor(2), tensor(2)), tensor(2))


def fake_call(op: Any) -> Tensor:
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        result: Tensor = op(*(mode.from_tensor(torch.ones(3, 4)) for _ in range(2)))
        return result


def name_of(op: Any) -> str:
    """Return the name of an op in profiles."""
    return f"{op._qualname.replace('::', '.')}.default"


@pytest.fixture
def add(registry: Registry, ns: str) -> Any:
    return registry.custom_op(f"{ns}::add", add_fn, mutates_args=())


@pytest.mark.parity(95)
def test_a_profile_is_the_fake_impl(add: Any) -> None:
    with pytest.raises(MissingFakeError):
        fake_call(add)
    with fake_profile.unsafe_generate_fake_kernels({name_of(add): {MATRICES}}):
        result = fake_call(add)
    assert (result.dim(), result.dtype, result.layout) == (2, torch.float32, torch.strided)
    assert all(isinstance(size, torch.SymInt) for size in result.shape)


@pytest.mark.parity(96)
def test_a_profile_overrides_a_fake_impl_which_is_back_afterwards(add: Any) -> None:
    add.register_fake(lambda x, y: x.new_empty(7))
    with fake_profile.unsafe_generate_fake_kernels({name_of(add): {MATRICES}}):
        assert fake_call(add).dim() == 2
    assert fake_call(add).shape == (7,)


@pytest.mark.parity(97)
@pytest.mark.skipif(importlib.util.find_spec("yaml") is None, reason="torch needs PyYAML to save profiles")
def test_saved_profiles_can_be_used(add: Any, tmp_path: Path) -> None:
    profiles = {name_of(add): {MATRICES}}
    fake_profile.save_op_profiles(profiles, tmp_path / "profiles.yaml")
    loaded = fake_profile.load_op_profiles(tmp_path / "profiles.yaml")
    with fake_profile.unsafe_generate_fake_kernels(loaded):
        assert fake_call(add).dim() == 2
