"""Files of shards that are open for reading: the index, what the page cache has, and large reads from the disk.

Direct reads (O_DIRECT) take no memory for pages and no second copy: a fraction of the processor time, and faster than
the same disk through the page cache, which would only keep what nobody asks for again.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cache_tools.arrays import ArraySpec
from cache_tools.codecs import CRC_BYTES, ChunkError, checked_content
from cache_tools.files import reading

MISSING = np.uint64(2**64 - 1)
INDEX_ENTRY_BYTES = 16
MOST_OPEN = 128
"""Shard files that a store keeps open: one descriptor each, two with direct reads, and 16 bytes per chunk."""

_ALIGNMENT = 4096  # of places, sizes and memory of direct reads
_MOST_BUFFERS = 1024  # of one preadv
# The kernel reads ahead of small requests in windows that grow, and into larger pages as they do. One large request
# gets small pages only, which take longer to fill and to copy.
_STEP_BYTES = 256 * 1024
_LEAST_DIRECT_BYTES = 128 * 1024  # less is a matter of the disk's latency: neighbours had better be in the page cache


class OpenShard:
    """One shard's file and index. Closed when nobody refers to it any more. Safe in threads and after a fork."""

    def __init__(self, path: Path, array: ArraySpec, *, direct: bool = False) -> None:
        """Raises ChunkError when the file is missing or its index damaged, StoreError when it cannot be read."""
        self.descriptor = _open(path)
        with reading(path):
            self.index = read_index(self.descriptor, array)
        self.verified = np.zeros(array.num_chunks, np.bool_)
        """[num_chunks] chunks whose checksum was found right since the file was opened."""
        self._direct = _open_direct(path) if direct else None
        self._has_cache = not direct and hasattr(os, "RWF_NOWAIT")  # Linux only

    def __del__(self) -> None:
        for name in ("descriptor", "_direct"):
            if (descriptor := getattr(self, name, None)) is not None:
                os.close(descriptor)

    def cached(self, offset: int, buffers: Sequence[memoryview]) -> bool:
        """Fills the buffers if the page cache has all of it; False, with anything in them, if not.

        What goes wrong here, an ordinary read will say, if it goes wrong there too.
        """
        if not self._has_cache:
            return False
        try:
            for first in range(0, len(buffers), _MOST_BUFFERS):
                some = buffers[first : first + _MOST_BUFFERS]
                num_bytes = sum(buffer.nbytes for buffer in some)
                if os.preadv(self.descriptor, some, offset, os.RWF_NOWAIT) < num_bytes:
                    return False
                offset += num_bytes
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):  # not on this file system
                self._has_cache = False
            return False
        return True

    def read(self, offset: int, num_bytes: int, buffer: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Bytes of the file, somewhere in `buffer`, which has `room_for` them. Raises ChunkError, OSError."""
        lead = offset % _ALIGNMENT
        begin = -int(buffer.__array_interface__["data"][0]) % _ALIGNMENT
        view = buffer[begin + lead : begin + lead + num_bytes]
        done = 0
        if self._direct is not None and num_bytes >= _LEAST_DIRECT_BYTES:
            size = -(-(lead + num_bytes) // _ALIGNMENT) * _ALIGNMENT
            # Some file systems open a file for direct reads and then refuse them, each in its way, and memory for
            # them may be short. What is wrong with the file itself, the ordinary read finds too.
            with suppress(OSError):
                count = os.preadv(self._direct, [buffer[begin : begin + size].data], offset - lead)
                done = min(max(count - lead, 0), num_bytes)
        read_exactly(self.descriptor, offset + done, view[done:])
        return view


class ShardFiles:
    """The open shards of a store, at most MOST_OPEN of them: whatever came first goes first.

    Samples are read in random order, so an older file is as likely to be wanted as a newer one. Works without a
    lock, which a fork could catch in the wrong moment: two threads may open the same file, and one is closed again.
    """

    def __init__(self, *, direct: bool = False) -> None:
        """`direct`: large reads go past the page cache where the file system can do that."""
        self._direct = direct
        self._buffers = threading.local()
        self._open: dict[Path, OpenShard] = {}

    def get(self, path: Path, array: ArraySpec) -> OpenShard:
        """Raises ChunkError, StoreError."""
        shard = self._open.get(path)
        if shard is None:
            shard = self._open[path] = OpenShard(path, array, direct=self._direct)
            while len(self._open) > MOST_OPEN:
                with suppress(RuntimeError, StopIteration):  # another thread was faster
                    self._open.pop(next(iter(self._open)), None)
        return shard

    def read(self, shard: OpenShard, offset: int, num_bytes: int, *, trusted: bool) -> tuple[NDArray[np.uint8], bool]:
        """Bytes of a shard, in a buffer that the next call of this thread reuses, and whether to check them.

        They need no check if they are `trusted` and the page cache had them. Raises ChunkError, OSError.
        """
        buffer = getattr(self._buffers, "buffer", None)
        if buffer is None or len(buffer) < room_for(num_bytes):
            # Fresh memory costs five times the read itself (page faults): keep it, grow in large steps.
            buffer = self._buffers.buffer = np.empty(room_for(num_bytes + num_bytes // 2), dtype=np.uint8)
        if trusted and shard.cached(offset, [buffer[:num_bytes].data]):
            return buffer[:num_bytes], False
        return shard.read(offset, num_bytes, buffer), True

    def forget(self, path: Path) -> None:
        """Opens the file anew next time: it may be repaired then, or back on a disk that was away."""
        self._open.pop(path, None)


def read_index(descriptor: int, array: ArraySpec) -> NDArray[np.uint64]:
    """The index of an open shard, [num_chunks, 2] (offset, bytes). Raises ChunkError when it is damaged."""
    size = os.fstat(descriptor).st_size
    index_bytes = array.num_chunks * INDEX_ENTRY_BYTES + CRC_BYTES
    if size < index_bytes:
        raise ChunkError(f"the file is truncated: {size} bytes, the index alone takes {index_bytes}")
    encoded = np.empty(index_bytes, dtype=np.uint8)
    read_exactly(descriptor, size - index_bytes, encoded)
    try:
        index = checked_content(encoded).view("<u8").reshape(-1, 2).astype(np.uint64)
    except ChunkError as error:
        raise ChunkError(f"the shard's index is damaged, or the file is truncated: {error}") from error
    present = index[:, 0] != MISSING
    limit = np.uint64(size - index_bytes)
    if (index[present] > limit).any() or (index[present].sum(axis=1) > limit).any():
        raise ChunkError("the shard's index points outside the file")
    return index


def read_exactly(descriptor: int, offset: int, buffer: NDArray[np.uint8]) -> None:
    """Fills `buffer` from `offset` of an open file. Raises ChunkError when the file ends before."""
    done = 0
    while done < len(buffer):
        count = os.preadv(descriptor, [buffer[done : done + _STEP_BYTES].data], offset + done)
        if count == 0:
            raise ChunkError(f"the file is truncated: it ends at byte {offset + done}")
        done += count


def room_for(num_bytes: int) -> int:
    """The size of a buffer for `OpenShard.read`."""
    return num_bytes + 3 * _ALIGNMENT


def _open_direct(path: Path) -> int | None:
    """None where the file system, or the operating system, has no direct reads."""
    with suppress(OSError, AttributeError):
        return os.open(path, os.O_RDONLY | os.O_DIRECT)
    return None


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY)
    except FileNotFoundError as error:
        raise ChunkError("the file is missing") from error
    except OSError:
        with reading(path):
            raise
        raise AssertionError from None
