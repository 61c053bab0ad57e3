"""What of a set of files the kernel's page cache holds, and how to drop it: no read speed means anything without."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

_libc = ctypes.CDLL(None, use_errno=True)


def cached_share(paths: Iterable[Path]) -> float:
    """Share of the files' bytes that are in the page cache, 0 to 1. Raises OSError.

    The kernel tells only owners, and whoever may write: to others all pages seem to be cached.
    """
    cached = total = 0
    for path in paths:
        size = path.stat().st_size
        if size == 0:
            continue
        resident = np.empty(-(-size // mmap.PAGESIZE), np.uint8)
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
            view = np.frombuffer(pages, np.uint8)
            where, length = ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(size)
            failed = _libc.mincore(where, length, ctypes.c_void_p(resident.ctypes.data))
            del view  # or the map cannot be closed
        if failed:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
        cached += int((resident & 1).sum())
        total += len(resident)
    return cached / max(total, 1)


def drop(paths: Iterable[Path]) -> None:
    """Writes back what is dirty in these files and drops them from the page cache, unless they are mapped. Raises
    OSError.
    """
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
