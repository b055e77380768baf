"""What can go wrong with a device, as exceptions."""

from __future__ import annotations

from customops.errors import CustomOpsError


class BackendError(CustomOpsError, RuntimeError):
    """A device cannot be registered, or does not support an operation."""


class BackendNameError(BackendError, ValueError):
    """A name that a device cannot have, or an option that makes no sense."""


class WrongDeviceError(BackendError, ValueError):
    """A tensor is not where it has to be."""


class DtypeError(BackendError, TypeError):
    """A dtype that NumPy does not have."""


class UnknownOpError(BackendError, KeyError):
    """No op has this name."""

    __str__ = BackendError.__str__  # KeyError would print the repr


class KernelResultError(BackendError):
    """A kernel returned something else than the op's schema says, or on another device.

    No TypeError: an operator (``x + y``) takes one for "not implemented", and ``x == y`` is then False.
    """


class KernelTypeError(BackendError):
    """A kernel raised a TypeError, which is the cause of this error. See `KernelResultError` for why it is not one."""


class WorkError(BackendError):
    """Work on a stream raised an error, which is the cause of this one. ``where`` called the op that submitted it."""


class NoKernelError(BackendError, NotImplementedError):
    """The device has no kernel for an op, and may not fall back to the CPU for it."""
