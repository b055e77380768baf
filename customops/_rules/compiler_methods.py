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
from customops.errors import RegistrationError, UnsupportedError

__tracebackhide__ = True  # pytest leaves the frames out


class RegisterForCompilers(RegisterGradients[P, R]):
    """The ``register_*`` methods of `CustomOpDef` for inductor and export."""

    _samples: Samples | None

    def samples(self) -> Iterator[Sample]:
        """The op's sample inputs, made anew."""
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
        """Register plain torch code that takes the place of the op in compiled or exported graphs.

        Args:
            fn: takes what the op takes, and returns what it returns, from torch's own ops. It is called with tensors
                without data. NotImplemented: the op stays.
            when: "inductor": code compiled by inductor. "export": ``program.run_decompositions()`` of an exported
                program. A predicate, called with the op's arguments: both, where it returns True.
            lib: the registration ends when this library is destroyed.

        Raises:
            UnsupportedError: the op writes, or returns something else than new tensors.
            RegistrationError: `when` has no such value.
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
                    "a predicate is for ops of which each parameter is one argument of the schema",
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
        """Register plain torch code that inductor makes kernels of in the place of a call of the op.

        It is fused with what is around it. Up to there the op is one node of the graph: its formula, what is saved for
        backward, and patterns are as without it.

        Args:
            fn: takes what the op takes, and returns what it returns, from torch's own ops. It is called with tensors
                without data, of the sizes, strides, dtypes and devices in the graph. NotImplemented: inductor calls the
                op's kernel.
            lib: the registration ends when this library is destroyed.

        Raises:
            UnsupportedError: the op writes, or returns something else than new tensors.
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
        """Register plain torch code in the place of which inductor calls the op, where it finds it in a graph.

        It is found in graphs without gradients; in those with gradients if the op has a formula, and nothing else uses
        what is computed on the way. Code that was compiled before stays as it is. `customops.check` compares the code
        with the op.

        Args:
            pattern: takes what the op takes, and returns what it returns. Tensors and floats may be any; other
                arguments have their defaults.
            samples: yields arguments, as for `register_samples`: the dtypes and numbers of dimensions to look for.
                None: the samples of the op.
            lib: the registration ends when this library is destroyed.

        Raises:
            UnsupportedError: the op writes, or has an argument that is neither a tensor nor a float and has no default.
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
                "a replacement is for ops of which each parameter is one argument of the schema", op=self._qualname
            )
        if samples is None and self._samples is None:
            raise RegistrationError(
                "a replacement needs samples: they say for which tensors it is looked for",
                op=self._qualname,
                fix="op.register_samples(fn) before, or samples=fn here",
            )
        found = self.samples if samples is None else functools.partial(samples_of, samples, self._qualname)
        self._register(lib, self._rules.replacement.register, pattern, self, found, self._has_backward)
        return pattern

    def _has_backward(self) -> bool:
        return "backward" in self._rules.autograd.formulas
