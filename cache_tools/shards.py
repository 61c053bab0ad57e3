"""One shard of one array = one file: encoded chunks, then their index (Zarr v3 sharding codec)."""

from __future__ import annotations

import itertools
import math
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
from cache_tools.errors import CorruptError, StoreError
from cache_tools.files import (
    RUN_VERIFY,
    make_folders,
    object_checksum,
    publish,
    reading,
    remove_temporaries,
    start_writing_back,
    temporary_path,
    write_file,
)
from cache_tools.shard_files import (
    INDEX_ENTRY_BYTES,
    MISSING,
    OpenShard,
    ShardFiles,
    read_exactly,
    read_index,
)

_PIECE_BYTES = np.uint64(16 * 2**20)
_WRITE_BACK_BYTES = 8 * 2**20


@dataclass(frozen=True)
class ObjectRecord:
    """What a seal remembers of a file."""

    num_bytes: int
    crc32: str
    """Eight hexadecimal digits, see `files.object_checksum`."""


class ShardAppender:
    """Writes one shard of an array, row by row upwards, holding one chunk in memory.

    Rows that nobody writes are zero; chunks of which no row was written are left out. The file gets its name
    in `finish`; until then, and after `abort`, there is none. Methods raise OSError.
    """

    def __init__(self, root: Path, array: ArraySpec, shard: int) -> None:
        self._array = array
        self._codec = array.codec
        self._first_row = shard * array.shard_rows
        self._index = np.full((array.num_chunks, 2), MISSING, dtype="<u8")
        self._chunk = -1  # the chunk being filled, -1 when there is none; those before it are written
        self._next_row = 0
        self._buffer = np.zeros(array.chunk_shape, dtype=array.dtype)
        self._num_bytes = self._crc = 0
        self._num_started = 0  # bytes that are on their way to the disk
        self._path = root / array.object_path(shard)
        make_folders(self._path.parent)
        remove_temporaries(self._path)
        self._file = open(temporary_path(self._path), "xb")  # noqa: SIM115 - closed by finish or abort

    def write(self, row: int, values: NDArray[Any]) -> None:
        """Writes `values` [n, ...] at row `row` of the array; rows ascend from call to call."""
        at = row - self._first_row
        assert self._next_row <= at and at + len(values) <= self._array.shard_rows, "rows must ascend in a shard"
        assert values.shape[1:] == self._array.shape[1:], f"{self._array.path}: rows {values.shape[1:]}"
        self._next_row = at + len(values)
        while len(values):
            chunk, offset = divmod(at, self._array.chunk_rows)
            taken = min(len(values), self._array.chunk_rows - offset)
            if chunk != self._chunk:
                self._flush()
            if taken == self._array.chunk_rows:
                self._write_chunk(chunk, np.ascontiguousarray(values[:taken], dtype=self._array.dtype))
            else:
                self._chunk = chunk
                self._buffer[offset : offset + taken] = values[:taken]
            at, values = at + taken, values[taken:]

    def finish(self) -> ObjectRecord:
        """Writes the index and gives the file its name."""
        self._flush()
        index = self._index.tobytes()
        self._append(index)
        self._append(int(google_crc32c.value(index)).to_bytes(CRC_BYTES, "little"))
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
        if self._chunk >= 0:
            self._write_chunk(self._chunk, self._buffer)
            self._buffer[:] = 0
            self._chunk = -1

    def _write_chunk(self, chunk: int, values: NDArray[Any]) -> None:
        content, checksum = self._codec.encode_parts(values)
        self._index[chunk] = self._num_bytes, len(content) + CRC_BYTES
        self._append(content)
        self._append(checksum)

    def _append(self, content: bytes | memoryview) -> None:
        self._file.write(content)
        self._num_bytes += len(content)
        self._crc = object_checksum(content, self._crc)
        if self._num_bytes - self._num_started >= _WRITE_BACK_BYTES:
            self._file.flush()
            start_writing_back(self._file.fileno(), self._num_started, self._num_bytes - self._num_started)
            self._num_started = self._num_bytes


def write_array(root: Path, array: ArraySpec, values: NDArray[Any]) -> dict[str, ObjectRecord]:
    """Writes a whole array, shard by shard."""
    assert values.shape == array.shape, f"{array.path}: {values.shape}, not {array.shape}"
    objects: dict[str, ObjectRecord] = {}
    for shard in range(array.num_shards):
        appender = ShardAppender(root, array, shard)
        try:
            first = shard * array.shard_rows
            appender.write(first, values[first : first + array.shard_rows])
            objects[array.object_path(shard)] = appender.finish()
        finally:
            appender.abort()
    return objects


def write_object(root: Path, path: str, content: bytes) -> dict[str, ObjectRecord]:
    """Writes a small file and returns its record by path."""
    write_file(root / path, content)
    return {path: ObjectRecord(len(content), f"{object_checksum(content):08x}")}


class ShardedArray:
    """Reads rows of one array directly from its files, in few large pieces, straight into the caller's buffer.

    Chunks are read from the file and their checksums compared. What was found right before and is in the page cache
    is decoded from there, without another look at its checksum. Nothing but the arrays of one chunk and of one piece
    (16 MB) is allocated, once per thread. Safe to use from many threads and after a fork.
    """

    def __init__(self, root: Path, array: ArraySpec, files: ShardFiles | None = None) -> None:
        """`files`: the open files of the store, shared by its arrays."""
        self.array = array
        self._root = root
        self._codec = array.codec
        self._content_bytes = math.prod(array.chunk_shape) * np.dtype(array.dtype).itemsize  # of a decoded chunk
        self._files = ShardFiles() if files is None else files
        self._buffers = threading.local()
        self._paths: dict[int, Path] = {}  # making them takes as long as reading 100 KB

    def read_all(self) -> NDArray[Any]:
        """The whole array. Raises CorruptError."""
        out = np.empty(self.array.shape, dtype=self.array.dtype)
        self.read_rows(0, out)
        return out

    def read_rows(self, first: int, out: NDArray[Any], reader: str = "") -> None:
        """Fills `out` [n, ...] with rows `first` and following.

        `reader` says for whom, in errors. Raises CorruptError when bytes are missing or damaged, StoreError when
        they cannot be read.
        """
        assert out.dtype == self.array.dtype and out.shape[1:] == self.array.shape[1:], f"{out.dtype} {out.shape}"
        done = 0
        while done < len(out):
            shard, row = divmod(first + done, self.array.shard_rows)
            count = min(len(out) - done, self.array.shard_rows - row)
            path = self._paths.get(shard)
            if path is None:
                path = self._paths[shard] = self._root / self.array.object_path(shard)
            try:
                self._read_shard(path, row, out[done : done + count])
            except ChunkError as error:
                self._files.forget(path)
                raise CorruptError(
                    f"damaged store{f': {reader} cannot be read' if reader else ''}",
                    where=f"{self._root}: {self.array.object_path(shard)} (shard {shard})",
                    got=error,
                    fix=RUN_VERIFY,
                ) from error
            except StoreError:
                self._files.forget(path)
                raise
            done += count

    def _read_shard(self, path: Path, row: int, out: NDArray[Any]) -> None:
        """Fills `out` from row `row` of a shard on. Raises ChunkError, StoreError."""
        shard = self._files.get(path, self.array)
        first, skipped = divmod(row, self.array.chunk_rows)
        chunks = slice(first, -(-(row + len(out)) // self.array.chunk_rows))
        entries, verified = shard.index[chunks], shard.verified[chunks]
        trusted = bool(verified.all())
        with reading(path):
            for start, end in _pieces(entries):
                rows = min((end - start) * self.array.chunk_rows - skipped, len(out))
                target, out = out[:rows], out[rows:]
                offset, sizes = int(entries[start, 0]), entries[start:end, 1]
                plain = self._is_plain(sizes) and target.flags.c_contiguous and not skipped
                if offset == int(MISSING):
                    target[...] = 0
                elif not (plain and trusted and shard.cached(offset, self._places(target))):
                    self._decode(shard, offset, sizes, trusted and not plain, skipped, target)
                verified[start:end] = True
                skipped = 0

    def _is_plain(self, sizes: NDArray[np.uint64]) -> bool:
        """True when the bytes of these chunks are their values and a checksum."""
        return not self._codec.compressed and bool((sizes == self._content_bytes + CRC_BYTES).all())

    def _places(self, out: NDArray[Any]) -> list[memoryview]:
        """Where bytes of uncompressed chunks that lie end to end belong, up to the last row of `out`: contents into it,
        checksums nowhere.
        """
        content, nowhere = out.reshape(-1).view(np.uint8), np.empty(CRC_BYTES, np.uint8).data
        places = []
        for first in range(0, len(content), self._content_bytes):
            places += [content[first : first + self._content_bytes].data, nowhere]
        return places[:-1]

    def _decode(
        self,
        shard: OpenShard,
        offset: int,
        sizes: NDArray[np.uint64],
        trusted: bool,
        skipped: int,
        out: NDArray[Any],
    ) -> None:
        """Decodes chunks of the given sizes that lie end to end, leaving out the first `skipped` rows."""
        encoded, check = self._files.read(shard, offset, int(sizes.sum()), trusted=trusted)
        begin = done = 0
        for size in sizes.tolist():
            rows = min(self.array.chunk_rows - skipped, len(out) - done)
            self._decode_chunk(encoded[begin : begin + size], skipped, out[done : done + rows], check=check)
            begin, done, skipped = begin + size, done + rows, 0

    def _decode_chunk(self, encoded: NDArray[np.uint8], skipped: int, out: NDArray[Any], *, check: bool) -> None:
        """Decodes one chunk and keeps the rows that `out` has room for."""
        if len(out) == self.array.chunk_rows and out.flags.c_contiguous:
            self._codec.decode(encoded, out, check=check)
            return
        if self._codec.compressed:
            chunk = getattr(self._buffers, "chunk", None)
            if chunk is None:
                chunk = self._buffers.chunk = np.empty(self.array.chunk_shape, dtype=self.array.dtype)
            self._codec.decode(encoded, chunk, check=check)
        else:
            chunk = self._codec.view(encoded, self.array.chunk_shape, self.array.dtype, check=check)
        out[...] = chunk[skipped : skipped + len(out)]

    def __getstate__(self) -> tuple[Path, ArraySpec]:
        return self._root, self.array

    def __setstate__(self, state: tuple[Path, ArraySpec]) -> None:
        self.__init__(*state)  # type: ignore[misc]


def _pieces(entries: NDArray[np.uint64]) -> list[tuple[int, int]]:
    """Cuts chunks, [n, 2] (offset, bytes), where the next does not lie behind the one before, or at _PIECE_BYTES.

    Missing chunks are pieces of their own.
    """
    if len(entries) == 0:
        return []
    ends = np.cumsum(entries[:, 1])
    cuts = (entries[1:, 0] != entries[:-1].sum(axis=1)) | (ends[1:] // _PIECE_BYTES != ends[:-1] // _PIECE_BYTES)
    bounds = [0, *(np.flatnonzero(cuts) + 1).tolist(), len(entries)]
    return list(itertools.pairwise(bounds))


def damaged_chunks(descriptor: int, array: ArraySpec, chosen: NDArray[np.bool_] | None = None) -> tuple[list[int], int]:
    """Numbers of the chunks of an open shard that do not match their checksum, and the bytes read to find out.

    `chosen` [num_chunks]: those to look at; all by default. Raises ChunkError when the index is damaged, so that
    nothing can be said of any chunk.
    """
    damaged = []
    num_read = array.num_chunks * INDEX_ENTRY_BYTES + CRC_BYTES
    for chunk, (offset, num_bytes) in enumerate(read_index(descriptor, array).tolist()):
        if offset == int(MISSING) or (chosen is not None and not chosen[chunk]):
            continue
        num_read += num_bytes
        encoded = np.empty(num_bytes, dtype=np.uint8)
        read_exactly(descriptor, offset, encoded)
        try:
            checked_content(encoded)
        except ChunkError:
            damaged.append(chunk)
    return damaged, num_read
