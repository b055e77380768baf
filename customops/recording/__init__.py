"""Record calls of ops, log them, write their arguments to files, and replay calls from these files.

`_calls` has the record of a call, what makes it, and what shows it; `_saved` has the files.
While it is not in use, it adds no overhead to calls: see `customops._dispatch.current_kernel`.

With ``CUSTOMOPS_LOG=calls`` (or ``kernels``, or ``times``) in the environment, each call is logged to stderr.
"""

from customops.recording._calls import Call, Recording, TensorInfo, log, record
from customops.recording._saved import SavedCall, dump, load, replay

__all__ = ["Call", "Recording", "SavedCall", "TensorInfo", "dump", "load", "log", "record", "replay"]
