"""test_grad_modes: results and gradients do not depend on how they are asked for.

The same call is made with nothing recorded, under checkpointing, selective or not, with saved tensors packed, by
`torch.func`, with backward run twice, or batched, with other calls before backward, and with only some of the inputs
requiring grad. Each time the results and the gradients have to be those of the ordinary call, or an error has to be
raised. And what is written between forward and backward must not change a gradient without an error.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence

import torch
import torch.utils.checkpoint
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from customops.checks import _gradient_relations
from customops.checks._derivatives import (
    Function,
    Gradients,
    Recorded,
    Tensors,
    are_finite,
    backward_may_fail,
    differentiable_inputs,
    generator,
    only,
    random_like,
    recording,
    refuses_gradients,
)
from customops.checks._outcome import in_short
from customops.checks._runs import difference
from customops.checks._trial import Trial

_FINE, _COARSE = 1e-7, 1e-3
_BATCH = 2
_STATE = "save what backward needs with ctx.save_for_backward, or as an attribute of ctx; keep nothing outside of it"
_SAVE = "save inputs and outputs with ctx.save_for_backward, as they are: autograd then sees that they were written"
_BUFFER = "return new tensors from the formula, and keep none of them: a buffer is overwritten while it is in use"
_GRAD = "return the gradients; leave .grad to autograd, which adds them to it where that is asked for"
_FORMULA = "have the formula use nothing but what ctx has saved and the gradient it is given"


def check(trial: Trial) -> None:
    with recording():
        function = Function.of(trial)
        wanted = differentiable_inputs(function)
        _Modes(function, wanted).run()
        if len(wanted) > 2:
            _gradient_relations.compare_choices(function, wanted)


class _Modes:
    def __init__(self, function: Function, wanted: Sequence[int]) -> None:
        self.function = function
        self.wanted = wanted
        self.recorded = Recorded(function, function.values, wanted)
        self.tracked = self.recorded.tracked
        outputs = self.recorded.outputs
        self.cotangents = only(random_like(outputs, generator()), self.tracked, outputs)
        self.rtol = _FINE if function.epsilon < _FINE else _COARSE

    def run(self) -> None:
        self._compare_values()
        with backward_may_fail(self.function, "backward fails"):
            ordinary = self.recorded.gradients(self.cotangents)
        self.expected = [None if gradient is None else gradient.clone() for gradient in ordinary]
        if not are_finite(self.expected):
            return  # NaN hides differences
        self._compare("once backward has run again: it returns memory that it uses again", self._kept, _BUFFER)
        self._compare("while another call was made in between", self._after_another_call, _STATE)
        self._compare("together with those of another call", self._with_another_call, _BUFFER)
        self._compare("under torch.utils.checkpoint, use_reentrant=False", self._checkpointed, _FORMULA)
        self._compare("under torch.utils.checkpoint, use_reentrant=True", self._checkpointed_reentrant, _FORMULA)
        self._compare_selective()
        if torch.Tag.nondeterministic_seeded not in self.function.trial.op.tags:  # rrelu saves its noise, then draws it
            self._compare(
                "with saved tensors packed by torch.autograd.graph.saved_tensors_hooks", self._packed, _FORMULA
            )
        self._compare("in half, of two backward runs added up in .grad", self._accumulated, _STATE)
        self._compare("by torch.autograd.grad, where inputs have a .grad already", self._beside_grads, _GRAD)
        self._compare("in one of a batch, by is_grads_batched=True", self._batched, _FORMULA, may_raise=True)
        if not self.function.writes:  # torch.func does not know of writes that torch.library makes
            self._compare("by torch.func.vjp", self._by_func, _FORMULA, may_raise=True)
            self._compare_after_writes()

    def _compare_values(self) -> None:
        ordinary = [output.detach() for output in self.recorded.outputs]
        for name, mode in (("torch.no_grad()", torch.no_grad), ("torch.inference_mode()", torch.inference_mode)):
            with mode():
                outputs = self.function(self.function.values)
                recorded = any(output.requires_grad for output in outputs)
                differs = difference([output.detach() for output in outputs], ordinary, rtol=self.rtol)
            if differs:
                raise self.function.fault(
                    f"the result under {name} is not that where gradients are recorded", "the same", differs, _FORMULA
                )
            if recorded:
                fix = "do not switch recording on in the kernel"
                raise self.function.fault(f"the result requires grad under {name}", "requires_grad=False", "True", fix)

    def _compare(
        self, how: str, gradients_of: Callable[[], Gradients | None], fix: str, *, may_raise: bool = False
    ) -> None:
        problem = f"the gradients are other ones {how}"
        try:
            found = gradients_of()
        except Exception as error:
            if may_raise or refuses_gradients(error):
                return
            raise self.function.fault(problem, "the same gradients", in_short(error, 300), fix) from error
        for i in self.wanted if found is not None else ():
            leaf = self.recorded.leaves[i]
            pair = found[i], self.expected[i]  # type: ignore[index]
            one, other = (torch.zeros_like(leaf) if g is None else g.detach() for g in pair)
            differs = difference(one, other, rtol=self.rtol)
            if differs:
                label = self.function.inputs[i].label
                raise self.function.fault(problem, f"the gradient of {label} as ordinarily", differs, fix)

    def _leaves(self) -> Tensors:
        values = enumerate(self.function.values)
        return [x.detach().clone().requires_grad_(i in self.wanted) for i, x in values]

    def _gradients(self, outputs: Sequence[torch.Tensor], leaves: Tensors) -> Gradients:
        asked = [leaves[i] for i in self.wanted]
        of = [outputs[k] for k in self.tracked]
        found = torch.autograd.grad(of, asked, self._given(), allow_unused=True)
        return self._by_number(found)

    def _given(self) -> list[torch.Tensor]:
        return [v.clone() for v in self.cotangents if v is not None]

    def _by_number(self, found: Sequence[torch.Tensor | None]) -> Gradients:
        by_number = dict(zip(self.wanted, found, strict=True))
        return [by_number.get(i) for i in range(len(self.function.inputs))]

    def _kept(self) -> Gradients:
        found = self.recorded.gradients(self.cotangents)
        self.recorded.gradients([None if v is None else v * 2 for v in self.cotangents])
        return found

    def _with_another_call(self) -> Gradients | None:
        leaves, others = self._leaves(), self._others()
        outputs = self.function(leaves)
        try:
            outputs_of_others = self.function(others)
        except Exception:  # other inputs may be refused
            return None
        pairs = [(outputs[k], outputs_of_others[k]) for k in self.tracked]
        if any(one.shape != other.shape or not other.requires_grad for one, other in pairs):
            return None
        of = [one for one, _ in pairs] + [other for _, other in pairs]
        asked = [values[i] for values in (leaves, others) for i in self.wanted]
        given = [*self._given(), *(2 * v for v in self._given())]
        found = torch.autograd.grad(of, asked, given, allow_unused=True)
        return self._by_number(found[: len(self.wanted)])

    def _after_another_call(self) -> Gradients:
        leaves = self._leaves()
        outputs = self.function(leaves)
        for another in (self.function, self.function.call_with_other_numbers):
            with contextlib.suppress(Exception):  # other inputs may be refused
                another(self._others())
        return self._gradients(outputs, leaves)

    def _others(self) -> Tensors:
        return [(x.detach() * 1.25 + 0.1).requires_grad_(i in self.wanted) for i, x in enumerate(self.function.values)]

    def _checkpointed(self) -> Gradients:
        leaves = self._leaves()
        # Stopping early would leave out what an operator writes after it has saved it.
        with torch.utils.checkpoint.set_checkpoint_early_stop(False):
            outputs = torch.utils.checkpoint.checkpoint(self._call, *leaves, use_reentrant=False)
        return self._gradients(outputs, leaves)

    def _checkpointed_reentrant(self) -> Gradients | None:
        leaves = self._leaves()
        outputs = torch.utils.checkpoint.checkpoint(self._call, *leaves, use_reentrant=True)
        if not all(outputs[k].requires_grad for k in self.tracked):
            return None
        torch.autograd.backward([outputs[k] for k in self.tracked], self._given())
        return [leaf.grad for leaf in leaves]

    def _call(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(self.function(values))

    def _compare_selective(self) -> None:
        if self.function.writes:
            return  # torch refuses to have written what it has saved
        for policy in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE):
            how = f"under selective checkpointing, CheckpointPolicy.{policy.name}"
            self._compare(how, functools.partial(self._checkpointed_selectively, policy), _FORMULA)

    def _checkpointed_selectively(self, policy: CheckpointPolicy) -> Gradients:
        leaves = self._leaves()
        contexts = functools.partial(create_selective_checkpoint_contexts, lambda *_, **__: policy)
        outputs = torch.utils.checkpoint.checkpoint(self._call, *leaves, use_reentrant=False, context_fn=contexts)
        return self._gradients(outputs, leaves)

    def _packed(self) -> Gradients:
        leaves = self._leaves()
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach().clone(), lambda x: x.clone()):
            outputs = self.function(leaves)
        return self._gradients(outputs, leaves)

    def _by_func(self) -> Gradients:
        values = self.function.values
        _, vjp = torch.func.vjp(self._by_wanted, *(values[i] for i in self.wanted))  # type: ignore[misc]
        pairs = zip(self.cotangents, self.recorded.outputs, strict=True)
        return self._by_number(vjp(tuple(torch.zeros_like(x) if v is None else v for v, x in pairs)))

    def _by_wanted(self, *wanted: torch.Tensor) -> tuple[torch.Tensor, ...]:
        by_number = dict(zip(self.wanted, wanted, strict=True))
        return self._call(*(by_number.get(i, x) for i, x in enumerate(self.function.values)))

    def _accumulated(self) -> Gradients:
        leaves = self._leaves()
        outputs = self.function(leaves)
        of = [outputs[k] for k in self.tracked]
        for output in of:
            output.retain_grad()
        for _ in range(2):  # each with its own: .grad may be a view of the gradient that was given
            torch.autograd.backward(of, self._given(), retain_graph=True)
        return [None if leaf.grad is None else leaf.grad / 2 for leaf in leaves]

    def _beside_grads(self) -> Gradients:
        leaves = self._leaves()
        for i in self.wanted:
            leaves[i].grad = torch.ones_like(leaves[i])
        return self._gradients(self.function(leaves), leaves)

    def _batched(self) -> Gradients:
        batch = [v if v is None else torch.stack([v * n for n in range(_BATCH)]) for v in self.cotangents]
        recorded = self.recorded
        found = torch.autograd.grad(
            [recorded.outputs[k] for k in self.tracked],
            [recorded.leaves[i] for i in self.wanted],
            [batch[k] for k in self.tracked],
            retain_graph=True,
            allow_unused=True,
            is_grads_batched=True,
        )
        return self._by_number([None if gradient is None else gradient[1] for gradient in found])

    def _compare_after_writes(self) -> None:
        for i, item in enumerate(self.function.inputs):
            self._compare_after_write(item.label, functools.partial(self._after_write, of_input=i))
        for k in self.tracked:
            self._compare_after_write(f"output {k}", functools.partial(self._after_write, of_output=k))

    def _compare_after_write(self, what: str, gradients_of: Callable[[], Gradients]) -> None:
        how = f"where {what} is written between forward and backward, and nothing says so"
        self._compare(how, gradients_of, _SAVE, may_raise=True)

    def _after_write(self, of_input: int | None = None, of_output: int = 0) -> Gradients:
        leaves = self._leaves()
        outputs = self.function(leaves)
        with torch.no_grad():
            (outputs[of_output] if of_input is None else leaves[of_input]).mul_(-1.5).add_(0.7)
        return self._gradients(outputs, leaves)
