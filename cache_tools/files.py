"""Files that are complete when they exist: temporary name, flush, rename, flush the folder. And plain JSON."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import re
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TypeAlias

import google_crc32c

from cache_tools.errors import CorruptError, StoreError

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

TEMPORARY_NAME = re.compile(r"\.tmp-\d+-.+")
_REMEDIES = {
    errno.ENOSPC: "the disk is full: free space, then run the same command again",
    errno.EDQUOT: "the disk quota is used up: free space, then run the same command again",
    errno.EACCES: "no permission to write here: change the owner or mode of the folder, or use another place",
    errno.EPERM: "no permission to write here: change the owner or mode of the folder, or use another place",
    errno.EROFS: "the file system is mounted read-only: mount it writable, or use another place",
    errno.EMFILE: "too many open files: raise the limit (`ulimit -n`), then run the same command again",
    errno.EFBIG: "the file is larger than allowed here: raise the limit (`ulimit -f`), or make smaller shards",
    errno.EISDIR: "a folder lies where a file belongs: move it away, then run the same command again",
    errno.EIO: "the disk reports an input/output error: check it, then run the same command again",
}


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an OSError inside the block into a StoreError that names `path` and a remedy."""
    try:
        yield
    except OSError as error:
        fix = _REMEDIES.get(error.errno or 0, "check the disk, then run the same command again")
        raise StoreError("cannot write to the store", where=path, got=error, fix=fix) from error


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns an OSError inside the block into a StoreError that names `path`."""
    try:
        yield
    except OSError as error:
        fix = "check that the path exists and that you may read it"
        raise StoreError("cannot read from the store", where=path, got=error, fix=fix) from error


def file_size(path: str | Path) -> int:
    """Bytes of a file; 0 when it has just gone away, or is a link to nothing."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def temporary_path(path: Path) -> Path:
    """Where this process prepares `path`: beside it, so that a rename is atomic."""
    return path.with_name(f".tmp-{os.getpid()}-{path.name}")


def remove_temporaries(path: Path) -> None:
    """Deletes what writers of `path` that died have left beside it. Nobody else may be writing `path` now."""
    pattern = re.compile(rf"\.tmp-\d+-{re.escape(path.name)}")
    with suppress(FileNotFoundError), os.scandir(path.parent) as entries:
        for entry in entries:
            if pattern.fullmatch(entry.name):
                os.unlink(entry.path)


def make_folders(path: Path) -> None:
    """Creates `path` and its parents so that they survive a power failure."""
    if path.is_dir():
        return
    make_folders(path.parent)
    with suppress(FileExistsError):
        path.mkdir()
    sync_folder(path.parent)


@contextmanager
def claimed_folder(path: Path) -> Iterator[None]:
    """Creates `path`; until the block ends, or this process does, `remove_unless_claimed` leaves it alone."""
    path.mkdir()
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # a file system that cannot lock folders
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.stat(path)  # fails if it was removed before it was locked
        yield
    finally:
        os.close(descriptor)


def remove_unless_claimed(path: Path) -> bool:
    """Deletes a folder that its maker left behind; False if the maker is still at work."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:  # gone, or no folder
        return True
    try:
        with suppress(OSError):  # a file system that cannot lock folders
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        shutil.rmtree(path, ignore_errors=True)
        return True
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Flushes a folder's list of names to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, content: bytes) -> None:
    """Replaces or creates `path` in one step. Raises OSError, leaving whatever `path` held before."""
    make_folders(path.parent)
    remove_temporaries(path)
    temporary = temporary_path(path)
    try:
        with open(temporary, "xb") as file:
            file.write(content)
            publish(file, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def start_writing_back(descriptor: int, first: int, num_bytes: int) -> None:
    """Sets the kernel (Linux) to work on a part of a file, so that a later fsync has little left to do. Never waits."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, first, num_bytes, os.POSIX_FADV_DONTNEED)


def publish(file: BinaryIO, path: Path) -> None:
    """Gives a finished temporary file its name `path`, after its content is on disk."""
    file.flush()
    os.fsync(file.fileno())
    os.rename(file.name, path)
    sync_folder(path.parent)


def checksum(content: bytes) -> str:
    """CRC32C as eight hexadecimal digits."""
    return f"{google_crc32c.value(content):08x}"


def object_checksum(content: bytes | memoryview, before: int = 0) -> int:
    """CRC-32 (the polynomial of zip and gzip) of a file's content; `before`: that of what precedes it.

    Not CRC-32C: chunks end with their own CRC-32C, and over data followed by its own checksum a checksum is the same
    whatever the data are. A file would pass for any other of its size.
    """
    return zlib.crc32(content, before)


def to_json(value: Json) -> bytes:
    """The one way a JSON value is written here: equal values give equal bytes."""
    return (json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n").encode()


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"not a finite number: {text}")
    return value


def parse_json(content: bytes, where: object) -> dict[str, Json]:
    """The JSON object in `content`. Raises CorruptError when there is none."""
    try:
        value = json.loads(content.decode(), parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError) as error:
        raise CorruptError("damaged JSON", where=where, got=error, fix=RUN_VERIFY) from error
    if not isinstance(value, dict):
        raise CorruptError("damaged JSON", where=where, got=type(value).__name__, expected="an object", fix=RUN_VERIFY)
    return value


RUN_VERIFY = "run `dflash-cache verify` on the store to see all that is damaged"
