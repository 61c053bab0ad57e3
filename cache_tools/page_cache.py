"""What of a set of files the kernel's page cache holds, and how to drop it: no read speed means anything without."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_libc = ctypes.CDLL(None, use_errno=True)


def resident(mapped: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Which of the pages that these mapped bytes touch are in the page cache.

    The kernel says so only to the owner of the file (`can_tell`); to others all seem to be there. Raises OSError.
    """
    address = int(mapped.__array_interface__["data"][0])
    begin = address - address % mmap.PAGESIZE
    pages = np.zeros(-(-(address + len(mapped) - begin) // mmap.PAGESIZE), np.uint8)
    where, length = ctypes.c_void_p(begin), ctypes.c_size_t(address + len(mapped) - begin)
    if _libc.mincore(where, length, ctypes.c_void_p(pages.ctypes.data)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return (pages & 1).astype(np.bool_)


def can_tell(path: Path) -> bool:
    """Whether `resident` tells the truth about this file. Raises OSError."""
    return path.stat().st_uid == os.geteuid()


def cached_share(paths: Iterable[Path]) -> float:
    """Share of the files' bytes that are in the page cache, 0 to 1; for files of one's own. Raises OSError."""
    cached = total = 0
    for path in paths:
        if path.stat().st_size == 0:
            continue
        with open(path, "rb") as file:
            pages = resident(np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), np.uint8))
        cached += int(pages.sum())
        total += len(pages)
    return cached / max(total, 1)


def drop(paths: Iterable[Path]) -> None:
    """Writes back what is dirty in these files and drops them from the page cache, unless they are mapped.

    Not all systems have a call for that (Linux has). Raises OSError.
    """
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
