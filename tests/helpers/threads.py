"""Work that several threads do at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable


def in_threads(work: Callable[[], object], count: int) -> None:
    """Do the work in so many threads, and raise what the first of them that failed raised."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
