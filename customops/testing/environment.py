"""What generated tests read from the environment, and what they set in it.

The variables have the names that torch's generated tests read, so that a suite that was moved is run as before; each
has a second name, with CUSTOMOPS in the place of PYTORCH.
"""

from __future__ import annotations

import os
import threading

_ACCEPT = "OPCHECK_ACCEPT"
_BETTER_REPRO = "OPCHECK_PRINT_BETTER_REPRO"
_DISABLE = "TORCHDYNAMO_DISABLE"


def accepts_changes() -> bool:
    """Are failures files to be updated to what happens, instead of tests to fail?"""
    return _is_on(_ACCEPT)


def saves_inputs() -> bool:
    """Are the inputs of a failing operator to be saved for the script that reproduces it?"""
    return _is_on(_BETTER_REPRO)


def _is_on(switch: str) -> bool:
    return any(os.environ.get(f"{prefix}_{switch}") == "1" for prefix in ("PYTORCH", "CUSTOMOPS"))


class _DynamoSwitch:
    """Turns `torch.compile` off from the first `off` to the last `restore`, of whatever thread.

    A function that is compiled calls its operators where no mode sees them. The environment is one for all threads,
    so it is restored when the last of them is done.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before: str | None = None

    def off(self) -> None:
        with self._lock:
            if self._users == 0:
                self._before = os.environ.get(_DISABLE)
                os.environ[_DISABLE] = "1"
            self._users += 1

    def restore(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users:
                return
            if self._before is None:
                os.environ.pop(_DISABLE, None)
            else:
                os.environ[_DISABLE] = self._before


dynamo = _DynamoSwitch()
