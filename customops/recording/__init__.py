"""Record calls of ops, log them, write their arguments to files, and replay calls from these files.

`_calls` has the record of a call, what makes it, and what shows it; `_saved` has the files.
While it is not in use, it adds no overhead to calls: see `customops._dispatch.current_kernel`.

With ``CUSTOMOPS_LOG=calls`` (or ``kernels``, or ``times``) in the environment, each call is logged to stderr.
"""

from customops.recording._calls import Call as Call
from customops.recording._calls import Recording as Recording
from customops.recording._calls import TensorInfo as TensorInfo
from customops.recording._calls import log as log
from customops.recording._calls import record as record
from customops.recording._saved import SavedCall as SavedCall
from customops.recording._saved import dump as dump
from customops.recording._saved import load as load
from customops.recording._saved import replay as replay

__all__ = ["Call", "Recording", "SavedCall", "TensorInfo", "dump", "load", "log", "record", "replay"]
