"""One shard of one array = one file: encoded chunks, then their index (Zarr v3 sharding codec)."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from cache_tools.arrays import ArraySpec
from cache_tools.codecs import CRC_BYTES, ChunkError, checked_content
from cache_tools.errors import CorruptError
from cache_tools.files import RUN_VERIFY, make_folders, publish, reading, remove_temporaries, temporary_path

_MISSING = np.uint64(2**64 - 1)
_INDEX_ENTRY_BYTES = 16


@dataclass(frozen=True)
class ObjectRecord:
    """What a seal remembers of a file."""

    num_bytes: int
    crc32c: str


class ShardAppender:
    """Writes one shard of an array, row by row upwards, holding one chunk in memory.

    Rows that nobody writes are zero; chunks of which no row was written are left out. The file gets its name
    in `finish`; until then, and after `abort`, there is none. Methods raise OSError.
    """

    def __init__(self, root: Path, array: ArraySpec, shard: int) -> None:
        self._array = array
        self._codec = array.codec
        self._first_row = shard * array.shard_rows
        self._index = np.full((array.num_chunks, 2), _MISSING, dtype="<u8")
        self._chunk = -1  # the chunk being filled; those before it are written
        self._next_row = 0
        self._buffer = np.zeros(array.chunk_shape, dtype=array.dtype)
        self._num_bytes = self._crc = 0
        self._path = root / array.object_path(shard)
        make_folders(self._path.parent)
        remove_temporaries(self._path)
        self._file = open(temporary_path(self._path), "xb")  # noqa: SIM115 - closed by finish or abort

    def write(self, row: int, values: NDArray[Any]) -> None:
        """Writes `values` [n, ...] at row `row` of the array; rows ascend from call to call."""
        at = row - self._first_row
        assert self._next_row <= at and at + len(values) <= self._array.shard_rows, "rows must ascend in a shard"
        self._next_row = at + len(values)
        while len(values):
            chunk, offset = divmod(at, self._array.chunk_rows)
            if chunk != self._chunk:
                self._flush()
                self._chunk = chunk
            taken = min(len(values), self._array.chunk_rows - offset)
            self._buffer[offset : offset + taken] = values[:taken]
            at, values = at + taken, values[taken:]

    def finish(self) -> ObjectRecord:
        """Writes the index and gives the file its name."""
        self._flush()
        index = self._index.tobytes()
        self._append(index + int(google_crc32c.value(index)).to_bytes(CRC_BYTES, "little"))
        publish(self._file, self._path)
        self._file.close()
        return ObjectRecord(self._num_bytes, f"{self._crc:08x}")

    def abort(self) -> None:
        """Removes the unfinished file, if there still is one."""
        with suppress(OSError):
            self._file.close()  # may fail again after a failed write
        with suppress(OSError):
            os.unlink(self._file.name)

    def _flush(self) -> None:
        if self._chunk < 0:
            return
        encoded = self._codec.encode(self._buffer)
        self._index[self._chunk] = self._num_bytes, len(encoded)
        self._append(encoded)
        self._buffer[:] = 0

    def _append(self, content: bytes) -> None:
        self._file.write(content)
        self._num_bytes += len(content)
        self._crc = int(google_crc32c.extend(self._crc, content))


class ShardedArray:
    """Reads rows of one array directly from its files: each shard's index once, then a run of chunks at once.

    Safe to use from many threads and after a fork: files are opened per read, buffers belong to a thread.
    """

    def __init__(self, root: Path, array: ArraySpec) -> None:
        self.array = array
        self._root = root
        self._codec = array.codec
        self._indexes: dict[int, NDArray[np.uint64]] = {}
        self._buffers = threading.local()

    def read_all(self) -> NDArray[Any]:
        """The whole array. Raises CorruptError."""
        out = np.empty(self.array.shape, dtype=self.array.dtype)
        self.read_rows(0, out)
        return out

    def read_rows(self, first: int, out: NDArray[Any], reader: str = "") -> None:
        """Fills `out` [n, ...] with rows `first` and following.

        `reader` says for whom, in errors. Raises CorruptError when bytes are missing or damaged.
        """
        done = 0
        while done < len(out):
            shard, row = divmod(first + done, self.array.shard_rows)
            count = min(len(out) - done, self.array.shard_rows - row)
            try:
                self._read_shard(shard, row, out[done : done + count])
            except ChunkError as error:
                raise CorruptError(
                    f"damaged store{f': {reader} cannot be read' if reader else ''}",
                    where=f"{self._root}: {self.array.object_path(shard)} (shard {shard})",
                    got=error,
                    fix=RUN_VERIFY,
                ) from error
            done += count

    def _read_shard(self, shard: int, row: int, out: NDArray[Any]) -> None:
        """Fills `out` from row `row` of a shard on. Raises ChunkError."""
        size = self.array.chunk_rows
        chunks = range(row // size, -(-(row + len(out)) // size))
        path = self._root / self.array.object_path(shard)
        descriptor = _open(path)
        try:
            index = self._indexes.get(shard)
            if index is None:
                index = self._indexes[shard] = read_index(descriptor, self.array)
            entries = index[chunks.start : chunks.stop]
            with reading(path):
                self._decode_run(descriptor, entries, row - chunks.start * size, out)
        finally:
            os.close(descriptor)

    def _decode_run(self, descriptor: int, entries: NDArray[np.uint64], skipped: int, out: NDArray[Any]) -> None:
        """Decodes neighbouring chunks, [n, 2] (offset, bytes), leaving out the first `skipped` rows."""
        present = entries[entries[:, 0] != _MISSING]
        base = int(present[:, 0].min(initial=_MISSING))
        span = int(present.sum(axis=1).max(initial=0)) - base if len(present) else 0
        in_one_piece = span == int(present[:, 1].sum())  # false only for files that another program wrote
        encoded = self._read(descriptor, base, span) if in_one_piece else None
        done = 0
        for offset, num_bytes in entries.tolist():
            rows = min(self.array.chunk_rows - skipped, len(out) - done)
            target = out[done : done + rows]
            if offset == int(_MISSING):
                target[...] = 0
            elif encoded is not None:
                self._decode(encoded[offset - base : offset - base + num_bytes], skipped, target)
            else:
                self._decode(self._read(descriptor, offset, num_bytes), skipped, target)
            done, skipped = done + rows, 0

    def _decode(self, encoded: NDArray[np.uint8], skipped: int, out: NDArray[Any]) -> None:
        """Decodes one chunk and keeps the rows that `out` has room for."""
        if len(out) == self.array.chunk_rows and out.flags.c_contiguous:
            self._codec.decode(encoded, out)
            return
        chunk = getattr(self._buffers, "chunk", None)
        if chunk is None:
            chunk = self._buffers.chunk = np.empty(self.array.chunk_shape, dtype=self.array.dtype)
        self._codec.decode(encoded, chunk)
        out[...] = chunk[skipped : skipped + len(out)]

    def _read(self, descriptor: int, offset: int, num_bytes: int) -> NDArray[np.uint8]:
        """Bytes of the open file, in a buffer that the next call of this thread reuses."""
        buffer = getattr(self._buffers, "encoded", None)
        if buffer is None or len(buffer) < num_bytes:
            # Fresh memory costs five times the read itself (page faults): keep it, grow in large steps.
            buffer = self._buffers.encoded = np.empty(num_bytes + num_bytes // 2, dtype=np.uint8)
        view: NDArray[np.uint8] = buffer[:num_bytes]
        read_exactly(descriptor, offset, view)
        return view

    def __getstate__(self) -> tuple[Path, ArraySpec]:
        return self._root, self.array

    def __setstate__(self, state: tuple[Path, ArraySpec]) -> None:
        self.__init__(*state)  # type: ignore[misc]


def read_index(descriptor: int, array: ArraySpec) -> NDArray[np.uint64]:
    """The index of an open shard, [num_chunks, 2] (offset, bytes). Raises ChunkError when it is damaged."""
    size = os.fstat(descriptor).st_size
    index_bytes = array.num_chunks * _INDEX_ENTRY_BYTES + CRC_BYTES
    if size < index_bytes:
        raise ChunkError(f"the file is truncated: {size} bytes, the index alone takes {index_bytes}")
    encoded = np.empty(index_bytes, dtype=np.uint8)
    read_exactly(descriptor, size - index_bytes, encoded)
    try:
        index = checked_content(encoded).view("<u8").reshape(-1, 2).astype(np.uint64)
    except ChunkError as error:
        raise ChunkError(f"the shard's index is damaged, or the file is truncated: {error}") from error
    present = index[:, 0] != _MISSING
    limit = np.uint64(size - index_bytes)
    if (index[present] > limit).any() or (index[present].sum(axis=1) > limit).any():
        raise ChunkError("the shard's index points outside the file")
    return index


def damaged_chunks(descriptor: int, array: ArraySpec, chosen: NDArray[np.bool_] | None = None) -> tuple[list[int], int]:
    """Numbers of the chunks of an open shard that do not match their checksum, and the bytes read to find out.

    `chosen` [num_chunks]: those to look at; all by default. Raises ChunkError when the index is damaged, so that
    nothing can be said of any chunk.
    """
    damaged = []
    num_read = array.num_chunks * _INDEX_ENTRY_BYTES + CRC_BYTES
    for chunk, (offset, num_bytes) in enumerate(read_index(descriptor, array).tolist()):
        if offset == int(_MISSING) or (chosen is not None and not chosen[chunk]):
            continue
        num_read += num_bytes
        encoded = np.empty(num_bytes, dtype=np.uint8)
        read_exactly(descriptor, offset, encoded)
        try:
            checked_content(encoded)
        except ChunkError:
            damaged.append(chunk)
    return damaged, num_read


def read_exactly(descriptor: int, offset: int, buffer: NDArray[np.uint8]) -> None:
    """Fills `buffer` from `offset` of an open file. Raises ChunkError when the file ends before."""
    done = 0
    while done < len(buffer):
        count = os.preadv(descriptor, [buffer[done:].data], offset + done)
        if count == 0:
            raise ChunkError(f"the file is truncated: it ends at byte {offset + done}")
        done += count


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY)
    except FileNotFoundError as error:
        raise ChunkError("the file is missing") from error
    except OSError:
        with reading(path):
            raise
        raise AssertionError from None
