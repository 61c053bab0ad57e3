"""Reading rows of one array: the page cache and the disk give the same, whatever the codec, rows and buffer."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cache_tools import page_cache, shard_files, shards
from cache_tools.arrays import ArraySpec
from cache_tools.errors import CorruptError, StoreError
from cache_tools.shards import ShardAppender, ShardedArray

CHUNK_ROWS, CHUNKS = 4, 8
SHARD_ROWS = CHUNK_ROWS * CHUNKS
SHAPES: list[tuple[str, tuple[int, ...]]] = [("uint16", (6,)), ("int8", (5,)), ("float32", ())]


def spec(dtype: str, row_shape: tuple[int, ...], *, compressed: bool) -> ArraySpec:
    return ArraySpec("a", dtype, (3 * SHARD_ROWS, *row_shape), CHUNK_ROWS, SHARD_ROWS, compressed=compressed)


def written(root: Path, array: ArraySpec, seed: int = 0) -> NDArray[Any]:
    """Fills three shards, but for rows 8-17 of each, of which one chunk is left out; returns what they hold."""
    values = np.random.default_rng(seed).integers(0, 100, array.shape).astype(array.dtype)
    for shard in range(3):
        first = shard * SHARD_ROWS
        values[first + 8 : first + 18] = 0
        appender = ShardAppender(root, array, shard)
        for rows in (range(first, first + 8), range(first + 18, first + SHARD_ROWS)):
            appender.write(rows.start, values[rows.start : rows.stop])
        appender.finish()
    return values


def large(root: Path, *, compressed: bool) -> tuple[ArraySpec, NDArray[np.uint16]]:
    """A shard of 4 MB, and what it holds."""
    array = ArraySpec("a", "uint16", (512, 4096), 64, 512, compressed=compressed)
    values = np.random.default_rng(0).integers(0, 2**16, array.shape).astype(np.uint16)
    appender = ShardAppender(root, array, 0)
    appender.write(0, values)
    appender.finish()
    return array, values


@pytest.fixture(params=["page cache", "disk", "disk, directly"])
def files(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> shard_files.ShardFiles:
    """Where the bytes come from."""
    if request.param == "disk":
        monkeypatch.setattr(shard_files.OpenShard, "cached", lambda *_: False)
    monkeypatch.setattr(shard_files, "_LEAST_DIRECT_BYTES", 0)
    return shard_files.ShardFiles(direct=request.param == "disk, directly")


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize(("dtype", "row_shape"), SHAPES)
def test_any_rows_into_any_buffer_are_those_that_were_written(
    tmp_path: Path,
    files: shard_files.ShardFiles,
    dtype: str,
    row_shape: tuple[int, ...],
    compressed: bool,
    monkeypatch: Any,
) -> None:
    array = spec(dtype, row_shape, compressed=compressed)
    values = written(tmp_path, array)
    reader = ShardedArray(tmp_path, array, files)
    piece = 2 * CHUNK_ROWS * values[:1].nbytes
    monkeypatch.setattr(shards, "_PIECE_BYTES", np.uint64(piece))

    @settings(max_examples=60, deadline=None)
    @given(st.integers(0, len(values)), st.integers(0, len(values)), st.booleans())
    def check(first: int, end: int, strided: bool) -> None:
        first, end = sorted((first, end))
        wide = np.full((end - first, 3, *row_shape), 77, dtype)
        out = wide[:, 1] if strided else np.full((end - first, *row_shape), 77, dtype)
        reader.read_rows(first, out)
        np.testing.assert_array_equal(out, values[first:end])
        assert (wide[:, ::2] == 77).all()

    check()


@pytest.mark.parametrize("compressed", [True, False])
def test_every_flipped_byte_of_a_chunk_is_noticed(
    tmp_path: Path, files: shard_files.ShardFiles, compressed: bool
) -> None:
    array = spec("uint16", (6,), compressed=compressed)
    values = written(tmp_path, array)
    path = tmp_path / array.object_path(1)
    content = path.read_bytes()
    rows = slice(SHARD_ROWS + 20, SHARD_ROWS + 30)  # two whole chunks and a part of one
    touched = undisturbed = 0
    for position in range(len(content)):
        path.write_bytes(content[:position] + bytes([content[position] ^ 4]) + content[position + 1 :])
        files.forget(path)
        out = np.empty_like(values[rows])
        message = ""
        try:
            ShardedArray(tmp_path, array, files).read_rows(rows.start, out, "sample 7")
        except CorruptError as error:
            message = str(error)
        if message:
            assert "sample 7" in message and "shard 1" in message
            touched += 1
        else:
            np.testing.assert_array_equal(out, values[rows])
            undisturbed += 1
    assert touched >= 3 * 4 + CHUNKS * 16 and undisturbed > 0


def test_a_reader_takes_what_the_page_cache_has_from_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = spec("uint16", (6,), compressed=False)
    values = written(tmp_path, array)
    reader = ShardedArray(tmp_path, array)
    out = np.empty_like(values[:8])
    reader.read_rows(0, out)
    monkeypatch.setattr(shard_files.OpenShard, "read", lambda *_: pytest.fail("read from the disk"))
    reader.read_rows(0, out)
    np.testing.assert_array_equal(out, values[:8])


@pytest.mark.parametrize("compressed", [True, False])
def test_what_was_found_right_is_checked_again_only_when_it_comes_from_the_disk_again(
    tmp_path: Path, compressed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = spec("uint16", (6,), compressed=compressed)
    values = written(tmp_path, array)
    reader = ShardedArray(tmp_path, array)
    out = np.empty_like(values[:7])
    reader.read_rows(0, out)
    with monkeypatch.context() as patch:
        patch.setattr(google_crc32c, "value", lambda _: pytest.fail("computed a checksum"))
        reader.read_rows(0, out)
    np.testing.assert_array_equal(out, values[:7])
    path = tmp_path / array.object_path(0)
    content = bytearray(path.read_bytes())
    content[5] ^= 1
    path.write_bytes(content)
    monkeypatch.setattr(shard_files.OpenShard, "cached", lambda *_: False)
    with pytest.raises(CorruptError, match="checksum"):
        reader.read_rows(0, out)


@pytest.mark.parametrize("num_rows", [CHUNK_ROWS, CHUNK_ROWS - 1])
@pytest.mark.parametrize("row_shape", [(5,), (1,), ()])
def test_rows_of_another_shape_are_not_written(tmp_path: Path, row_shape: tuple[int, ...], num_rows: int) -> None:
    appender = ShardAppender(tmp_path, spec("uint16", (6,), compressed=False), 0)
    with pytest.raises(AssertionError):
        appender.write(0, np.ones((num_rows, *row_shape), np.uint16))
    appender.abort()


def test_what_the_page_cache_lacks_comes_from_the_disk(tmp_path: Path) -> None:
    array = spec("uint16", (6,), compressed=False)
    values = written(tmp_path, array)
    path = tmp_path / array.object_path(0)
    page_cache.drop([path])
    if page_cache.cached_share([path]) > 0:
        pytest.skip("this file system keeps everything in memory")
    shard = shard_files.OpenShard(path, array)
    page_cache.drop([path])
    room = np.empty(100, np.uint8)
    assert not shard.cached(0, [room.data])
    out = np.empty_like(values[:SHARD_ROWS])
    ShardedArray(tmp_path, array).read_rows(0, out)
    np.testing.assert_array_equal(out, values[:SHARD_ROWS])
    assert shard.cached(0, [room.data]) and room.tobytes() == path.read_bytes()[:100]


@pytest.mark.parametrize("compressed", [True, False])
def test_a_file_cut_short_under_an_open_reader_is_an_error_and_not_the_end_of_the_process(
    tmp_path: Path, files: shard_files.ShardFiles, compressed: bool
) -> None:
    array, values = large(tmp_path, compressed=compressed)
    reader = ShardedArray(tmp_path, array, files)
    out = np.empty_like(values)
    reader.read_rows(0, out)
    os.truncate(tmp_path / array.object_path(0), 5000)
    with pytest.raises(CorruptError, match="truncated"):
        reader.read_rows(0, out)


def test_a_repaired_file_is_opened_anew_after_an_error(tmp_path: Path, files: shard_files.ShardFiles) -> None:
    array = spec("uint16", (6,), compressed=False)
    values = written(tmp_path, array)
    path = tmp_path / array.object_path(0)
    sound = path.read_bytes()
    path.write_bytes(bytes([sound[0] ^ 1]) + sound[1:])
    reader = ShardedArray(tmp_path, array, files)
    out = np.empty_like(values[:4])
    with pytest.raises(CorruptError):
        reader.read_rows(0, out)
    (tmp_path / "new").write_bytes(sound)
    os.rename(tmp_path / "new", path)
    reader.read_rows(0, out)
    np.testing.assert_array_equal(out, values[:4])


def test_a_failing_disk_is_an_error_that_can_be_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = spec("uint16", (6,), compressed=True)
    values = written(tmp_path, array)
    reader = ShardedArray(tmp_path, array)
    out = np.empty_like(values[:4])
    monkeypatch.setattr(shard_files.OpenShard, "cached", lambda *_: False)
    with monkeypatch.context() as patch:

        def fail(*_: Any) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        patch.setattr(os, "preadv", fail)
        with pytest.raises(StoreError, match="Input/output error"):
            reader.read_rows(0, out)
    reader.read_rows(0, out)
    np.testing.assert_array_equal(out, values[:4])


def test_only_large_reads_go_past_the_page_cache_and_not_where_the_file_system_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    array, values = large(tmp_path, compressed=False)
    path = tmp_path / array.object_path(0)
    page_cache.drop([path])
    if page_cache.cached_share([path]) > 0:
        pytest.skip("this file system keeps everything in memory")
    out = np.empty_like(values)
    ShardedArray(tmp_path, array, shard_files.ShardFiles(direct=True)).read_rows(0, out)
    np.testing.assert_array_equal(out, values)
    assert page_cache.cached_share([path]) < 0.5, "of 4 MB, only the index belongs there"
    original, refused = os.preadv, []

    def refusing(descriptor: int, buffers: Any, offset: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(offset)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return original(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", refusing)
    out[:] = 0
    ShardedArray(tmp_path, array, shard_files.ShardFiles(direct=True)).read_rows(0, out)
    np.testing.assert_array_equal(out, values)
    assert refused
    monkeypatch.setattr(shard_files, "_LEAST_DIRECT_BYTES", 2**30)
    refused.clear()
    ShardedArray(tmp_path, array, shard_files.ShardFiles(direct=True)).read_rows(0, out)
    assert not refused


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP, errno.EAGAIN, errno.ENOMEM, errno.EPERM, errno.EIO])
@pytest.mark.parametrize("compressed", [True, False])
def test_where_the_faster_ways_fail_the_ordinary_one_reads(
    tmp_path: Path, files: shard_files.ShardFiles, compressed: bool, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = spec("uint16", (6,), compressed=compressed)
    values = written(tmp_path, array)
    original = os.preadv

    def failing(descriptor: int, buffers: Any, offset: int, flags: int = 0) -> int:
        if flags or fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(code, os.strerror(code))
        return original(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    reader = ShardedArray(tmp_path, array, files)
    for _ in range(3):
        out = np.zeros_like(values)
        reader.read_rows(0, out)
        np.testing.assert_array_equal(out, values)


@pytest.mark.parametrize("compressed", [True, False])
def test_systems_without_the_calls_of_linux_read_too(
    tmp_path: Path, files: shard_files.ShardFiles, compressed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("O_DIRECT", "RWF_NOWAIT", "posix_fadvise"):
        monkeypatch.delattr(os, name, raising=False)
    array = spec("uint16", (6,), compressed=compressed)
    values = written(tmp_path, array)
    page_cache.drop([tmp_path / array.object_path(0)])
    reader = ShardedArray(tmp_path, array, files)
    for _ in range(2):
        out = np.zeros_like(values)
        reader.read_rows(0, out)
        np.testing.assert_array_equal(out, values)


@pytest.mark.parametrize("buffer", [np.zeros((3, 6), np.int64), np.zeros((3, 1, 6), np.uint16)])
def test_rows_are_not_read_into_a_buffer_of_another_kind(tmp_path: Path, buffer: NDArray[Any]) -> None:
    array = spec("uint16", (6,), compressed=False)
    written(tmp_path, array)
    with pytest.raises(AssertionError):
        ShardedArray(tmp_path, array).read_rows(0, buffer)


@pytest.mark.parametrize("most", [0, 512, 4096])
def test_a_short_direct_read_is_completed(tmp_path: Path, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    array = spec("uint16", (6,), compressed=False)
    values = written(tmp_path, array)
    monkeypatch.setattr(shard_files, "_LEAST_DIRECT_BYTES", 0)
    original, shortened = os.preadv, []

    def short(descriptor: int, buffers: Any, offset: int) -> int:
        if not fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            return original(descriptor, buffers, offset)
        shortened.append(offset)
        return min(most, original(descriptor, buffers, offset))

    monkeypatch.setattr(os, "preadv", short)
    reader = ShardedArray(tmp_path, array, shard_files.ShardFiles(direct=True))
    for first in range(0, len(values), 7):
        out = np.empty_like(values[first:])
        reader.read_rows(first, out)
        np.testing.assert_array_equal(out, values[first:])
    if not shortened:
        pytest.skip("this file system has no direct reads")


def test_a_short_read_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = spec("uint16", (6,), compressed=False)
    values = written(tmp_path, array)
    monkeypatch.setattr(shard_files.OpenShard, "cached", lambda *_: False)
    original = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: original(fd, [buffers[0][:7]], offset))
    out = np.empty_like(values)
    ShardedArray(tmp_path, array).read_rows(0, out)
    np.testing.assert_array_equal(out, values)


def test_a_bounded_number_of_files_stays_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = spec("uint16", (6,), compressed=False)
    values = written(tmp_path, array)
    monkeypatch.setattr(shard_files, "MOST_OPEN", 2)
    before = len(os.listdir("/proc/self/fd"))
    files = shard_files.ShardFiles()
    reader = ShardedArray(tmp_path, array, files)
    out = np.empty_like(values)
    for _ in range(3):
        reader.read_rows(0, out)
        np.testing.assert_array_equal(out, values)
    assert len(os.listdir("/proc/self/fd")) == before + 2
    del reader, files
    assert len(os.listdir("/proc/self/fd")) == before
