"""What an op's author says about its inputs decides which are made."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from customops import Registry
from customops.checks import Trial
from customops.checks._trial import Case
from customops.checks.inputs import derive, probe, variation_of
from customops.checks.inputs.parts import arguments_of


class Mode(enum.Enum):
    UP = 1
    DOWN = 2


@dataclass(frozen=True)
class Config:
    block: int = 4
    mode: Mode = Mode.UP


def scale_of(registry: Registry, **options: Any) -> Any:
    @registry.custom_op("variation_tests::scale", mutates_args=())
    def scale(x: Tensor, by: int, config: Config | None = None, mode: Mode = Mode.UP) -> Tensor:
        return x * by

    @scale.register_fake
    def _(x: Tensor, by: int, config: Config | None = None, mode: Mode = Mode.UP) -> Tensor:
        return torch.empty_like(x)

    @scale.register_samples(**options)
    def _() -> Iterator[tuple[Any, ...]]:
        yield torch.randn(3, 4), 2, Config(8), Mode.UP

    return scale


def cases(op: Any, effort: Any = "normal") -> list[Case]:
    (sample,) = op.samples()
    args, kwargs = op.lower(*sample.args, **sample.kwargs)
    return list(derive(Trial(op._opoverload, args, kwargs), variation_of(op), effort))


def restored(case: Case) -> tuple[Any, ...]:
    return tuple(arguments_of(case.trial).values())


def test_without_options_everything_is_varied(registry: Registry) -> None:
    scale = scale_of(registry)
    calls = [restored(case) for case in cases(scale)]
    assert {call[3] for call in calls} == set(Mode)
    assert {call[2].mode for call in calls if call[2] is not None} == set(Mode)
    assert {call[2] is None for call in calls} == {True, False}
    assert {0, 1, -1, 2, 3} <= {call[1] for call in calls}
    assert len(probe(cases(scale)).rejected) == 0


def test_given_values_take_the_place_of_guesses(registry: Registry) -> None:
    scale = scale_of(
        registry, vary={"by": lambda by: (by + 5, by + 7), "config": [Config(1), None], "mode": [Mode.DOWN]}
    )
    calls = [restored(case) for case in cases(scale)]
    assert {call[1] for call in calls} == {2, 7, 9}
    assert [call[2] for call in calls if call[2] != Config(8)] == [Config(1), None]
    assert {call[3] for call in calls} == set(Mode)


def test_given_dtypes_and_shapes(registry: Registry) -> None:
    scale = scale_of(registry, vary={"x.dtype": [torch.int64], "x.shape": [(2, 2), (7,)]})
    tensors = [case.trial.args[0] for case in cases(scale)]
    assert {x.dtype for x in tensors} == {torch.float32, torch.int64}
    assert {tuple(x.shape) for x in tensors} == {(3, 4), (2, 2), (7,)}


def test_what_is_fixed_stays(registry: Registry) -> None:
    scale = scale_of(registry, fixed=("layout", "x.dtype", "by", "config"))
    found = cases(scale, "thorough")
    assert not [case for case in found if case.kind == "layout"]
    assert {case.trial.args[0].dtype for case in found} == {torch.float32}
    assert {(call[1], call[2] == Config(8)) for call in (restored(case) for case in found)} == {(2, True)}
    assert {case.kind for case in found} >= {"size", "value", "choice"}


def test_constraints_hold(registry: Registry) -> None:
    def is_even(x: Tensor) -> bool:
        return len(x) % 2 == 1  # of a 0-dimensional tensor it raises: that is not tried

    scale = scale_of(registry, constraints=(is_even, lambda by, config: by > 0 and config is not None))
    found = cases(scale)
    assert len(found) > 10
    for case in found:
        x, by, config, _ = restored(case)
        assert len(x) % 2 == 1
        assert by > 0
        assert config is not None


def test_constraints_of_plain_ops_see_defaults(registry: Registry) -> None:
    @registry.custom_op("variation_tests::plain", mutates_args=())
    def plain(x: Tensor, by: int = 3) -> Tensor:
        return x * by

    plain.register_samples(lambda: [(torch.randn(2),)], constraints=lambda by: by == 3)
    assert len(cases(plain)) > 10
