"""One writer at a time, by a lock that the kernel releases when its last holder ends, however it ends."""

from __future__ import annotations

import fcntl
import time

from cache_tools.errors import DflashError

# A process that was killed, and its workers with it, hold a lock until the kernel has cleaned up behind them.
_PATIENCE_SECONDS = 3.0


def acquire_lock(descriptor: int, busy: DflashError) -> None:
    """Locks an open file for this process and those that inherit it. Raises `busy` when somebody else keeps it."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise busy from None
            time.sleep(0.1)
