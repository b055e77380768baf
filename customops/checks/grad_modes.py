"""test_grad_modes: results and gradients do not depend on how they are asked for.

The same call is made with nothing recorded, under checkpointing, selective or not, with saved tensors packed, by
`torch.func`, with backward run twice, or batched, with other calls before backward, and with only some of the inputs
requiring grad. Each time the results and the gradients have to be those of the ordinary call, or an error has to be
raised. And what is written between forward and backward must not change a gradient without an error.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import checkpoint

from customops.checks._derivatives import Gradients, Ordinary, Tensors, differentiable, gradients_of, refuses_gradients
from customops.checks._outcome import in_short
from customops.checks._runs import difference
from customops.checks._trial import Trial

_FEW = 4  #: inputs, of which each choice is tried
_STATE = "save what backward needs with ctx.save_for_backward, or as an attribute of ctx; keep nothing outside of it"
_SAVE = "save inputs and outputs with ctx.save_for_backward, as they are: autograd then sees that they were written"
_BUFFER = "return new tensors from the formula, and keep none of them: a buffer is overwritten while it is in use"
_GRAD = "return the gradients; leave .grad to autograd, which adds them to it where that is asked for"
_FORMULA = "have the formula use nothing but what ctx has saved and the gradient it is given"


def check(trial: Trial) -> None:
    with differentiable(trial) as (function, wanted):
        _Modes(function, wanted).run()


class _Modes(Ordinary):
    def run(self) -> None:
        ordinary = [output.detach() for output in self.recorded.outputs]
        for name, mode in (("torch.no_grad()", torch.no_grad), ("torch.inference_mode()", torch.inference_mode)):
            with mode():
                outputs = self.function(self.function.values)
                recorded = any(output.requires_grad for output in outputs)
                differs = difference([output.detach() for output in outputs], ordinary, rtol=self.rtol)
            if differs:
                problem = f"the result under {name} is not that where gradients are recorded"
                raise self.function.fault(problem, "the same", differs, _FORMULA)
            if recorded:
                fix = "do not switch recording on in the kernel"
                raise self.function.fault(f"the result requires grad under {name}", "requires_grad=False", "True", fix)
        if not self.settle():
            return
        self._compare("once backward has run again: it returns memory that it uses again", self._kept, _BUFFER)
        self._compare("while another call was made in between", self._before_others, _STATE)
        self._compare("together with those of another call", self._with_another_call, _BUFFER)
        # Stopping early would leave out what an operator writes after it has saved it.
        with checkpoint.set_checkpoint_early_stop(False):
            self._compare("under torch.utils.checkpoint, use_reentrant=False", self._checkpointed, _FORMULA)
        self._compare("under torch.utils.checkpoint, use_reentrant=True", self._checkpointed_reentrant, _FORMULA)
        for policy in (checkpoint.CheckpointPolicy.MUST_SAVE, checkpoint.CheckpointPolicy.PREFER_RECOMPUTE):
            if not self.function.writes:  # torch refuses to have written what it has saved
                how = f"under selective checkpointing, CheckpointPolicy.{policy.name}"
                always = functools.partial(lambda policy, /, *_, **__: policy, policy)
                contexts = functools.partial(checkpoint.create_selective_checkpoint_contexts, always)
                self._compare(how, functools.partial(self._checkpointed, context_fn=contexts), _FORMULA)
        if torch.Tag.nondeterministic_seeded not in self.function.trial.op.tags:  # rrelu saves its noise, then draws it
            how = "with saved tensors packed by torch.autograd.graph.saved_tensors_hooks"
            self._compare(how, self._packed, _FORMULA)
        self._compare("in half, of two backward runs added up in .grad", self._accumulated, _STATE)
        self._compare("by torch.autograd.grad, where inputs have a .grad already", self._beside_grads, _GRAD)
        self._compare("in one of a batch, by is_grads_batched=True", self._batched, _FORMULA, may_raise=True)
        if not self.function.writes:  # torch.func does not know of writes that torch.library makes
            self._compare("by torch.func.vjp", self._by_func, _FORMULA, may_raise=True)
            inputs = [(item.label, i, None) for i, item in enumerate(self.function.inputs)]
            for label, i, k in [*inputs, *((f"output {k}", None, k) for k in self.recorded.tracked)]:
                how = f"where {label} is written between forward and backward, and nothing says so"
                self._compare(how, functools.partial(self._written, i, k), _SAVE, may_raise=True)
        for size in range(2, len(self.wanted)) if len(self.wanted) <= _FEW else ():
            for chosen in itertools.combinations(self.wanted, size):
                labels = " and ".join(self.function.inputs[i].label for i in chosen)
                self.compare_choice(chosen, f"gradients are other ones where {labels} alone")

    def _compare(
        self, how: str, gradients_of: Callable[[Tensors], Gradients | None], fix: str, *, may_raise: bool = False
    ) -> None:
        """Compare gradients that are found in another way, by leaves of their own."""
        problem = f"the gradients are other ones {how}"
        try:
            values = enumerate(self.function.values)
            found = gradients_of([x.detach().clone().requires_grad_(i in self.wanted) for i, x in values])
        except Exception as error:
            if may_raise or refuses_gradients(error):
                return
            raise self.function.fault(problem, "the same gradients", in_short(error, 300), fix) from error
        if found is not None:
            self.judge(found, self.expected, problem, fix)

    def _others(self) -> Tensors:
        return [(x.detach() * 1.25 + 0.1).requires_grad_(i in self.wanted) for i, x in enumerate(self.function.values)]

    def _given(self) -> list[torch.Tensor]:
        return [v.clone() for v in self.cotangents if v is not None]

    def _tracked(self, outputs: Sequence[torch.Tensor]) -> Tensors:
        return [outputs[k] for k in self.recorded.tracked]

    def _gradients(self, outputs: Sequence[torch.Tensor], leaves: Tensors) -> Gradients:
        return gradients_of(self._tracked(outputs), leaves, self._given())

    def _kept(self, _leaves: Tensors) -> Gradients:
        found = self.recorded.gradients(self.cotangents)
        self.recorded.gradients([None if v is None else v * 2 for v in self.cotangents])
        return found

    def _before_others(self, leaves: Tensors) -> Gradients:
        outputs = self.function(leaves)
        for another in (self.function, self.function.call_with_other_numbers):
            with contextlib.suppress(Exception):  # other inputs may be refused
                another(self._others())
        return self._gradients(outputs, leaves)

    def _with_another_call(self, leaves: Tensors) -> Gradients | None:
        of, others = self._tracked(self.function(leaves)), self._others()
        try:
            of_others = self._tracked(self.function(others))
        except Exception:  # other inputs may be refused
            return None
        if any(x.shape != y.shape or not y.requires_grad for x, y in zip(of, of_others, strict=True)):
            return None
        given = [*self._given(), *(2 * v for v in self._given())]
        return gradients_of(of + of_others, leaves + others, given)[: len(leaves)]

    def _call(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(self.function(values))

    def _checkpointed(self, leaves: Tensors, **options: Any) -> Gradients:
        outputs = checkpoint.checkpoint(self._call, *leaves, use_reentrant=False, **options)
        return self._gradients(outputs, leaves)

    def _checkpointed_reentrant(self, leaves: Tensors) -> Gradients | None:
        of = self._tracked(checkpoint.checkpoint(self._call, *leaves, use_reentrant=True))
        if not all(output.requires_grad for output in of):
            return None
        torch.autograd.backward(of, self._given())
        return [leaf.grad for leaf in leaves]

    def _packed(self, leaves: Tensors) -> Gradients:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach().clone(), lambda x: x.clone()):
            outputs = self.function(leaves)
        return self._gradients(outputs, leaves)

    def _accumulated(self, leaves: Tensors) -> Gradients:
        of = self._tracked(self.function(leaves))
        for output in of:
            output.retain_grad()
        for _ in range(2):  # each with its own: .grad may be a view of the gradient that was given
            torch.autograd.backward(of, self._given(), retain_graph=True)
        return [None if leaf.grad is None else leaf.grad / 2 for leaf in leaves]

    def _beside_grads(self, leaves: Tensors) -> Gradients:
        for i in self.wanted:
            leaves[i].grad = torch.ones_like(leaves[i])
        return self._gradients(self.function(leaves), leaves)

    def _batched(self, _leaves: Tensors) -> Gradients:
        batch = [torch.stack([v * 0, v]) for v in self.cotangents if v is not None]
        outputs, leaves = self._tracked(self.recorded.outputs), self.recorded.leaves
        found = gradients_of(outputs, leaves, batch, retain_graph=True, is_grads_batched=True)
        return [None if gradient is None else gradient[1] for gradient in found]

    def _by_func(self, _leaves: Tensors) -> Gradients:
        values, call = self.function.values, self.function.of_some(self.wanted)
        _, vjp = torch.func.vjp(call, *(values[i] for i in self.wanted))  # type: ignore[misc]
        pairs = zip(self.cotangents, self.recorded.outputs, strict=True)
        found = vjp(tuple(torch.zeros_like(x) if v is None else v for v, x in pairs))
        by_number = dict(zip(self.wanted, found, strict=True))
        return [by_number.get(i) for i in range(len(values))]

    def _written(self, i: int | None, k: int | None, leaves: Tensors) -> Gradients:
        """The call, after which input `i` or output `k` is written."""
        outputs = self.function(leaves)
        with torch.no_grad():
            (outputs[k] if k is not None else leaves[i or 0]).mul_(-1.5).add_(0.7)
        return self._gradients(outputs, leaves)
