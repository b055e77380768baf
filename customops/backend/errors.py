"""What can go wrong with a device, as exceptions."""

from __future__ import annotations

from customops.errors import CustomOpsError


class BackendError(CustomOpsError, RuntimeError):
    """A device cannot be registered, or something is asked of it that it cannot do."""


class BackendNameError(BackendError, ValueError):
    """A name that a device cannot have, or an option that makes no sense."""


class WrongDeviceError(BackendError, ValueError):
    """A tensor is not where it has to be."""


class KernelResultError(BackendError, TypeError):
    """A kernel returned something else than the op's schema says, or on another device."""


class NoKernelError(BackendError, NotImplementedError):
    """The device has no kernel for an op, and may not fall back to the CPU for it."""
