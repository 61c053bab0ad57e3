"""One writing command per store at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cache_tools.errors import StoreError
from cache_tools.files import writing
from cache_tools.locking import acquire_lock
from cache_tools.seals import PLAN_SEAL


@contextmanager
def store_lock(store: Path) -> Iterator[int]:
    """Holds the store's lock; yields its file descriptor, which workers keep open so that the lock outlives us.

    It is a lock on the plan's seal, the one file that is never written again, so it leaves nothing in the store.
    The kernel releases it when the last process that has it ends, however it ends. Raises StoreError when another
    command holds it.
    """
    path = store / PLAN_SEAL
    with writing(path):
        # Writable, although nothing is written: exclusive locks on network file systems need that.
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        busy = StoreError("another command is writing to this store", where=path, fix="wait until it ends, or stop it")
        acquire_lock(descriptor, busy)
        yield descriptor
    finally:
        os.close(descriptor)
