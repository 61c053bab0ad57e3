"""Files of shards that are open for reading: index, large reads, and a memory map of what the page cache holds."""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cache_tools.arrays import ArraySpec
from cache_tools.codecs import CRC_BYTES, ChunkError, checked_content
from cache_tools.files import reading
from cache_tools.page_cache import resident

MISSING = np.uint64(2**64 - 1)
INDEX_ENTRY_BYTES = 16
MOST_OPEN = 128
"""Shard files that a store keeps open: two descriptors each (one is the map's), and 16 bytes per chunk."""

_MOST_BUFFERS = 1024  # of one preadv
_HINT_BYTES = 512 * 1024  # of a larger hint, kernels take no more than their device's largest request


class OpenShard:
    """One shard's file and index. Closed when nobody refers to it any more. Safe in threads and after a fork.

    Mapped pages show up as memory of the process; they are the page cache's, and the kernel takes them when it must.
    """

    def __init__(self, path: Path, array: ArraySpec) -> None:
        """Raises ChunkError when the file is missing or its index damaged, StoreError when it cannot be read."""
        self.descriptor = _open(path)
        with reading(path):
            self.index = read_index(self.descriptor, array)
        self.verified = np.zeros(array.num_chunks, np.bool_)
        """[num_chunks] chunks whose checksum was found right since the file was opened."""
        self._map: NDArray[np.uint8] | None = None
        self._can_map = True

    def __del__(self) -> None:
        if (descriptor := getattr(self, "descriptor", None)) is not None:
            os.close(descriptor)

    def cached(self, offset: int, num_bytes: int) -> NDArray[np.uint8] | None:
        """The bytes in the page cache itself, if all of them are there; valid while this object is.

        What is not there had better be read with `preadv`: faults fetch little at a time, and when the disk fails
        they end the process where `preadv` raises OSError. So had what is read once only: mapping it costs more.
        """
        if not self._can_map or (self._map is None and not self._make_map()):
            return None
        assert self._map is not None
        if offset + num_bytes > len(self._map) or not resident(self._map[offset : offset + num_bytes]).all():
            return None
        return self._map[offset : offset + num_bytes]

    def read_ahead(self, offset: int, num_bytes: int) -> None:
        """Asks the kernel to bring these bytes into the page cache, without waiting for them."""
        for begin in range(offset, offset + num_bytes, _HINT_BYTES):
            length = min(_HINT_BYTES, offset + num_bytes - begin)
            os.posix_fadvise(self.descriptor, begin, length, os.POSIX_FADV_WILLNEED)

    def _make_map(self) -> bool:
        """False where there can be none, or where the kernel does not say which pages are there."""
        try:
            if os.fstat(self.descriptor).st_uid == os.geteuid():
                self._map = np.frombuffer(mmap.mmap(self.descriptor, 0, prot=mmap.PROT_READ), np.uint8)
        except (OSError, ValueError):  # no maps on this file system, no address space, or the file is empty now
            pass
        self._can_map = self._map is not None
        return self._can_map


class ShardFiles:
    """The open shards of a store, at most MOST_OPEN of them: whatever came first goes first.

    Samples are read in random order, so an older file is as likely to be wanted as a newer one. Works without a
    lock, which a fork could catch in the wrong moment: two threads may open the same file, and one is closed again.
    """

    def __init__(self) -> None:
        self._open: dict[Path, OpenShard] = {}

    def get(self, path: Path, array: ArraySpec) -> OpenShard:
        """Raises ChunkError, StoreError."""
        shard = self._open.get(path)
        if shard is None:
            shard = self._open[path] = OpenShard(path, array)
            while len(self._open) > MOST_OPEN:
                with suppress(RuntimeError, StopIteration):  # another thread was faster
                    self._open.pop(next(iter(self._open)), None)
        return shard

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
        count = os.preadv(descriptor, [buffer[done:].data], offset + done)
        if count == 0:
            raise ChunkError(f"the file is truncated: it ends at byte {offset + done}")
        done += count


def read_scattered(descriptor: int, offset: int, contents: NDArray[np.uint8], sums: NDArray[np.uint8]) -> None:
    """Reads chunks that lie end to end, contents into `contents` [n, bytes] and checksums into `sums` [n, 4].

    Both have contiguous rows. Raises ChunkError when the file ends before.
    """
    chunk_bytes = contents.shape[1] + sums.shape[1]
    step = _MOST_BUFFERS // 2
    for first in range(0, len(contents), step):
        rows = slice(first, min(first + step, len(contents)))
        buffers = [row.data for pair in zip(contents[rows], sums[rows], strict=True) for row in pair]
        begin = offset + first * chunk_bytes
        count = os.preadv(descriptor, buffers, begin)
        if count != (rows.stop - first) * chunk_bytes:  # rare: a signal, or the end of the file
            for i in range(first, rows.stop):
                at = offset + i * chunk_bytes
                read_exactly(descriptor, at, contents[i])
                read_exactly(descriptor, at + contents.shape[1], sums[i])


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY)
    except FileNotFoundError as error:
        raise ChunkError("the file is missing") from error
    except OSError:
        with reading(path):
            raise
        raise AssertionError from None
