"""Small files of a training run: replaced in one step. A full disk or a second process in the folder is a message."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from cache_tools.errors import CheckpointError
from cache_tools.locking import acquire_lock


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns a fault of the disk inside the block into a CheckpointError that names `path`."""
    try:
        yield
    except (OSError, SafetensorError) as error:  # safetensors reports even a full disk in its own way
        raise CheckpointError(
            "this could not be written",
            where=path,
            got=error,
            fix="free space or repair permissions, then run the same command again; it resumes",
        ) from error


@contextmanager
def run_lock(run: Path) -> Iterator[None]:
    """Holds the lock of a run's folder, which the kernel releases when the process ends, however it ends. Makes the
    folder if there is none.

    Raises CheckpointError when another process trains there.
    """
    path = run / ".lock"
    with writing(run):
        run.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        busy = CheckpointError(
            "another process is training in this folder",
            where=run,
            fix="wait until it ends, or stop it; or give another --out",
        )
        acquire_lock(descriptor, busy)
        yield
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Replaces or creates `path`, and its folder. Raises CheckpointError, leaving what `path` held before."""
    temporary = path.with_name(f".tmp-{os.getpid()}-{path.name}")
    with writing(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, path)
        except OSError:
            _remove(temporary)
            raise


def _remove(path: Path) -> None:
    try:
        path.unlink()
    except OSError:
        return  # the folder may be what is missing
