"""Repair: what is damaged is taken out of a store, and made again from the data and the target.

Nothing is mended in place. A damaged shard loses its seal first, so that readers refuse it, and is then computed as
if it had never been there. So a repair that is killed leaves a store that the same command, or `run`, goes on with.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from cache_tools.arrays import scale_arrays
from cache_tools.errors import StoreError
from cache_tools.files import sync_folder, writing
from cache_tools.integrity import Finding, num_bytes_to_verify, verify
from cache_tools.locking import acquire_lock
from cache_tools.manifest import Manifest
from cache_tools.progress import progress_bar
from cache_tools.seals import (
    PLAN_SEAL,
    SCALES_SEAL,
    TARGET_SEAL,
    read_checked,
    read_manifest,
    seal_objects,
    shard_seal,
)
from cache_tools.shards import ObjectRecord
from precompute.config import PrecomputeConfig
from precompute.locking import store_lock
from precompute.planning import manifest_now
from precompute.restoring import restore_plan
from precompute.run import RunSummary, bind, fill, require_same_plan, store_path, workers_and_devices


@dataclass(frozen=True, kw_only=True)
class RepairSummary:
    """What was damaged and what became of it. Files are named relative to the store."""

    damaged: list[str]
    """Files that were missing, damaged, half-written or without a seal."""
    restored: list[str]
    """Those among them that planning had written, made again from the data, byte for byte."""
    shards: list[int]
    """Shards whose hidden states were computed again."""
    target: bool
    """Whether the target's weights were stored again."""
    differing: list[int]
    """Shards whose files now have other checksums than their old seals said: sound, but not the same bits."""
    foreign: list[str]
    """Files that do not belong to the store; they are left alone."""
    run: RunSummary
    """The computing, in which whatever else was not sealed was computed too."""


def repair(config: PrecomputeConfig) -> RepairSummary:
    """Makes everything again that is damaged, then computes whatever is not sealed.

    Raises StoreError when there is no store, when it was made from other data or by another target or engine, or when
    nothing is left that says what it was; otherwise what `run` raises.
    """
    path = store_path(config)
    workers_and_devices(config)  # says so if there are none, before anything is changed
    if not path.is_dir():
        raise StoreError("there is no store to repair", where=path, fix="make it with `dflash-precompute run`")
    with _repair_lock(path):
        with ExitStack() as locked:
            if (path / PLAN_SEAL).is_file():  # the file that is locked may itself be what is missing
                locked.enter_context(store_lock(path))
            restored = restore_plan(config, path)
        with store_lock(path) as lock:
            stored = read_manifest(path)
            manifest = manifest_now(config, stored)
            require_same_plan(path, stored, manifest)
            bind(config, path, manifest)
            with progress_bar(total=num_bytes_to_verify(path), unit="B", desc="verify") as bar:
                findings = verify(path, bar)
            foreign = [item.object for item in findings if item.kind == "foreign"]
            findings = [item for item in findings if item.kind != "foreign"]
            shards = sorted({item.shard for item in findings if item.shard is not None})
            before = {shard: _records(path, shard) for shard in shards}
            target = _take_out(path, manifest, findings)
            done = fill(config, path, lock)
    return RepairSummary(
        damaged=sorted({item.object for item in findings}.union(restored)),
        restored=restored,
        shards=shards,
        target=target,
        differing=[shard for shard in shards if before[shard] not in (None, _records(path, shard))],
        foreign=foreign,
        run=done,
    )


@contextmanager
def _repair_lock(path: Path) -> Iterator[None]:
    """One repair at a time, also while the file that `store_lock` locks is missing or replaced."""
    with writing(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        acquire_lock(descriptor, StoreError("another command repairs this store", where=path, fix="wait until it ends"))
        yield
    finally:
        os.close(descriptor)


def _records(path: Path, shard: int) -> dict[str, ObjectRecord] | None:
    """What the seal of a shard says of its files; None when there is no intact one."""
    seal = path / shard_seal(shard)
    try:
        return seal_objects(read_checked(seal), seal)
    except StoreError:
        return None


def _take_out(path: Path, manifest: Manifest, findings: list[Finding]) -> bool:
    """Removes the seals of all that is damaged, and half-written files; True if the target's weights are damaged."""
    seals = {item.object for item in findings if item.object.startswith("sealed/") and item.kind != "temporary"}
    seals |= {shard_seal(item.shard) for item in findings if item.shard is not None}
    target = TARGET_SEAL in seals or any(item.object.startswith("target/") for item in findings)
    if target:
        seals.add(TARGET_SEAL)
    scales = {array.object_path(0) for array in scale_arrays(manifest).values()}
    if any(item.object in scales for item in findings):
        seals.add(SCALES_SEAL)
    with writing(path):
        for name in sorted(seals):
            (path / name).unlink(missing_ok=True)
        sync_folder(path / "sealed")
        for item in findings:
            if item.kind == "temporary":
                (path / item.object).unlink(missing_ok=True)
    return target
