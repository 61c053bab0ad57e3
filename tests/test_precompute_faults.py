"""Disks that are full, small, read-only or failing: a clear message, a valid store, and the same bytes later."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from precompute_cases import (
    SMALL_SHARD_BYTES,
    directory_bytes,
    make_precompute_config,
)

from cache_tools.errors import StoreError
from cache_tools.integrity import verify
from cache_tools.reader import Store
from precompute.config import PrecomputeConfig
from precompute.run import run

REPOSITORY = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.usefixtures("small_shards")


@pytest.fixture(scope="module")
def whole(target: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The bytes of a store that nothing disturbed."""
    store = tmp_path_factory.mktemp("whole") / "store"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("precompute.planning._MB", SMALL_SHARD_BYTES)
        run(make_precompute_config(target, data, store))
    return directory_bytes(store)


def fails_then_valid(config: PrecomputeConfig, message: str) -> None:
    """A run that must fail with a StoreError, and leave either no store or a sound one without half-written files."""
    assert config.store is not None
    with pytest.raises(StoreError, match=message) as caught:
        run(config)
    assert str(config.store) in str(caught.value)
    if config.store.exists():
        assert verify(config.store) == [] or {item.kind for item in verify(config.store)} == {"unsealed"}
        for shard in Store.open(config.store).sealed:
            for sample in Store.open(config.store).shard_samples(shard):
                Store.open(config.store).read_hidden(sample)


class Failing:
    """Lets `count` calls of a function of `os` pass, then fails for ever."""

    def __init__(self, name: str, count: int, error: int) -> None:
        self._real, self._left, self._error = getattr(os, name), count, error

    def __call__(self, *arguments: Any, **more: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise OSError(self._error, os.strerror(self._error))
        return self._real(*arguments, **more)


FAULTS = [
    ("fsync", 3, errno.ENOSPC, "disk is full"),
    ("rename", 75, errno.ENOSPC, "disk is full"),
    ("rename", 90, errno.ENOSPC, "disk is full"),
    ("fsync", 130, errno.ENOSPC, "disk is full"),
    ("fsync", 130, errno.EDQUOT, "quota"),
    ("fsync", 130, errno.EIO, "input/output error"),
    ("fsync", 130, errno.EROFS, "read-only"),
    ("fsync", 130, errno.EACCES, "no permission"),
]


@pytest.mark.parametrize(("call", "count", "error", "message"), FAULTS)
def test_any_failing_flush_or_rename_is_named_and_the_same_command_finishes_later(
    call: str, count: int, error: int, message: str, target: Path, data: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    config = make_precompute_config(target, data, tmp_path / "store")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, call, Failing(call, count, error))
        fails_then_valid(config, message)
    run(config)
    assert directory_bytes(tmp_path / "store") == whole


@pytest.mark.parametrize("limit", [500, 4000])
def test_a_limit_on_the_size_of_files_is_named_and_the_same_command_finishes_later(
    limit: int, target: Path, data: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    """A real failure of write(2); the limit is for this process and is taken back."""
    config = make_precompute_config(target, data, tmp_path / "store")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        fails_then_valid(config, "larger than allowed")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    run(config)
    assert directory_bytes(tmp_path / "store") == whole


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 400 kB, where the tests may mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(disk)]
    try:
        mounted = subprocess.run(mount, capture_output=True).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("no permission to mount a small file system")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)  # open stores keep files open


def filled(disk: Path, free: int) -> Path:
    """Takes all but `free` bytes of a disk."""
    ballast = disk / "ballast"
    available = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    ballast.write_bytes(bytes(max(available - free, 0)))
    return ballast


@pytest.mark.parametrize("free", [16_384, 140_000, 250_000])
def test_a_disk_that_fills_up_is_named_and_the_run_goes_on_when_there_is_space(
    free: int,
    target: Path,
    data: Path,
    whole: dict[str, bytes],
    small_disk: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("precompute.run.require_space", lambda *_: None)  # others may fill the disk after it was asked
    config = make_precompute_config(target, data, small_disk / "store", limit=8)
    ballast = filled(small_disk, free)
    fails_then_valid(config, "disk is full")
    ballast.unlink()
    run(config)
    run(make_precompute_config(target, data, tmp_path / "undisturbed", limit=8))
    assert directory_bytes(small_disk / "store") == directory_bytes(tmp_path / "undisturbed")


def test_a_disk_that_is_too_small_or_read_only_is_refused_by_the_command_with_exit_1(
    target: Path, data: Path, small_disk: Path
) -> None:
    config = {"target": target, "data": data, "store": small_disk / "store", "layer-ids": "0,2", "device": "cpu"}
    arguments = [text for name, value in config.items() for text in (f"--{name}", str(value))]
    script = "import sys; sys.path.insert(0, sys.argv.pop(1)); from precompute.cli import main; main()"
    command = [sys.executable, "-c", script, str(REPOSITORY), "run", *arguments, "--threads", "1"]
    full = subprocess.run(command, capture_output=True, text=True)
    assert (full.returncode, full.stdout) == (1, "")
    assert "too small" in full.stderr or "disk is full" in full.stderr
    assert "Traceback" not in full.stderr
    subprocess.run(["mount", "-o", "remount,ro,size=100m", str(small_disk)], check=True)
    read_only = subprocess.run(command, capture_output=True, text=True)
    assert (read_only.returncode, read_only.stdout) == (1, "")
    assert "read-only" in read_only.stderr
    assert "Traceback" not in read_only.stderr
    assert not (small_disk / "store").exists() or verify(small_disk / "store") == []  # at most planned
