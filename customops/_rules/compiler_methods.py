"""The methods of an op that register what compilers may do with it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, overload

from customops._compat.libraries import Library
from customops._dispatch.callbacks import Fn
from customops._rules.decomposition import When
from customops._rules.fits import F, P, R, YieldsArguments
from customops._rules.gradient_methods import RegisterGradients
from customops._samples import Sample, Samples, samples_of
from customops.errors import RegistrationError, UnsupportedError, entries

__tracebackhide__ = True  # pytest leaves the frames out


@entries
class RegisterForCompilers(RegisterGradients[P, R]):
    """The ``register_*`` methods of `CustomOpDef` for inductor and export."""

    _samples: Samples | None

    def samples(self) -> Iterator[Sample]:
        """The op's sample inputs. Each call creates new ones."""
        raise NotImplementedError

    @overload
    def register_decomposition(
        self, fn: None = None, /, *, when: When = "inductor", lib: Library | None = None
    ) -> Any: ...
    @overload
    def register_decomposition(self, fn: F, /, *, when: When = "inductor", lib: Library | None = None) -> F: ...
    def register_decomposition(
        self, fn: Fn | None = None, /, *, when: When = "inductor", lib: Library | None = None
    ) -> Any:
        """Register plain torch code that replaces the op in compiled or exported graphs.

        Args:
            fn: takes the arguments of the op, and computes its results with torch's own ops. It is called with tensors
                without data. If it returns NotImplemented, the op is kept.
            when: where the op is replaced. "inductor": in code compiled by inductor. "export": by
                ``program.run_decompositions()`` of an exported program. A predicate on the op's arguments: in both, for
                calls for which it returns True.
            lib: the registration ends when this library is destroyed.

        Raises:
            UnsupportedError: the op mutates an argument, or does not return only new tensors.
            RegistrationError: `when` has another value.
            CallbackError: `fn` or the predicate cannot be called with the op's arguments.

        Example:
            >>> @double.register_decomposition
            ... def _(x):
            ...     return x + x
            >>> double.register_decomposition(lambda x: x + x, when=lambda x: x.numel() < 1000)
        """
        if fn is None:
            return functools.partial(self.register_decomposition, when=when, lib=lib)
        decomposition = fn
        if self._lowering is not None:
            decomposition = self._lowering.kernel(fn, "decomposition")
            if callable(when):
                raise UnsupportedError(
                    "a predicate is supported only for ops whose parameters are one schema argument each",
                    op=self._qualname,
                    fix='when="inductor" or when="export"',
                )
        self._register(lib, self._rules.decomposition.register, decomposition, when)
        return fn

    @overload
    def register_lowering(self, fn: None = None, /, *, lib: Library | None = None) -> Any: ...
    @overload
    def register_lowering(self, fn: F, /, *, lib: Library | None = None) -> F: ...
    def register_lowering(self, fn: Fn | None = None, /, *, lib: Library | None = None) -> Any:
        """Register plain torch code from which inductor generates code instead of calling the op.

        Inductor fuses that code with the code around it. Before that step the op is one node of the graph, so its
        gradient formula, the tensors saved for backward, and pattern matching do not change.

        Args:
            fn: takes the arguments of the op, and computes its results with torch's own ops. It is called with tensors
                without data that have the sizes, strides, dtypes and devices of those in the graph. If it returns
                NotImplemented, the generated code calls the kernel.
            lib: the registration ends when this library is destroyed.

        Raises:
            UnsupportedError: the op mutates an argument, or does not return only new tensors.
            CallbackError: `fn` cannot be called with the op's arguments.

        Example:
            >>> @double.register_lowering
            ... def _(x):
            ...     return x + x if x.device.type == "cuda" else NotImplemented
        """
        if fn is None:
            return functools.partial(self.register_lowering, lib=lib)
        lowering = fn if self._lowering is None else self._lowering.kernel(fn, "lowering")
        self._register(lib, self._rules.inductor_lowering.register, lowering)
        return fn

    @overload
    def register_replacement(
        self, pattern: None = None, /, *, samples: YieldsArguments | None = None, lib: Library | None = None
    ) -> Any: ...
    @overload
    def register_replacement(
        self, pattern: F, /, *, samples: YieldsArguments | None = None, lib: Library | None = None
    ) -> F: ...
    def register_replacement(
        self, pattern: Fn | None = None, /, *, samples: YieldsArguments | None = None, lib: Library | None = None
    ) -> Any:
        """Register plain torch code, the pattern, that inductor replaces by a call of the op wherever it occurs.

        Inductor replaces the pattern in graphs without gradients. It also does so in graphs with gradients if the op
        has a gradient formula and nothing else uses the intermediate results. Code compiled earlier does not change.
        `customops.check` compares the pattern with the op.

        Args:
            pattern: takes the arguments of the op, and computes its results. Tensors and floats match any value; other
                arguments must have their defaults.
            samples: a function that yields arguments, as for `register_samples`. Their dtypes and numbers of dimensions
                are those that the pattern matches. None: the samples of the op.
            lib: the registration ends when this library is destroyed.

        Raises:
            UnsupportedError: the op mutates an argument, or has an argument without a default that is neither a tensor
                nor a float.
            RegistrationError: there are no samples.
            CallbackError: `pattern` cannot be called with the op's arguments.

        Example:
            >>> @rms_norm.register_replacement
            ... def _(x, weight, eps):
            ...     return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
        """
        if pattern is None:
            return functools.partial(self.register_replacement, samples=samples, lib=lib)
        if self._lowering is not None:
            raise UnsupportedError(
                "register_replacement needs an op whose parameters are one schema argument each", op=self._qualname
            )
        if samples is None and self._samples is None:
            raise RegistrationError(
                "register_replacement needs samples: they say which tensors the pattern is traced with",
                op=self._qualname,
                fix="op.register_samples(fn) before, or samples=fn here",
            )
        found = self.samples if samples is None else functools.partial(samples_of, samples, self._qualname)
        self._register(lib, self._rules.replacement.register, pattern, self, found, self._has_backward)
        return pattern

    def _has_backward(self) -> bool:
        return "backward" in self._rules.autograd.formulas
