"""What planning wrote, made again from the same data: manifest, tokens, samples, metadata, the target's files."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

from cache_tools.arrays import METADATA
from cache_tools.errors import CorruptError, StoreError
from cache_tools.files import (
    Json,
    claimed_folder,
    make_folders,
    reading,
    sync_folder,
    temporary_path,
    write_file,
    writing,
)
from cache_tools.integrity import verify_plan
from cache_tools.manifest import Manifest
from cache_tools.progress import progress_bar
from cache_tools.seals import PLAN_SEAL, bound_checksum, read_checked, read_manifest, root_metadata, seal_objects
from cache_tools.writer import remove_abandoned
from precompute.config import PrecomputeConfig
from precompute.planning import Plan, manifest_now, plan
from precompute.run import bound_manifest, create_planned, require_same_plan

_FIX = "restore the data, the target's folder and the settings as they were, or make a new store"


def restore_plan(config: PrecomputeConfig, path: Path) -> list[str]:
    """Makes again those files of planning that are damaged, byte for byte; returns their names.

    All of them are planned once more beside the store, compared with what is known of the old ones, and moved over.
    Raises StoreError when they cannot be the same, and what planning raises.
    """
    with progress_bar(total=None, unit="B", desc="verify plan") as bar:
        if not verify_plan(path, bar):
            return []
    stored = _stored_manifest(path)
    if stored is not None:  # the cheap comparison first: it names each field that differs
        require_same_plan(path, stored, manifest_now(config, stored))
    with writing(path):
        remove_abandoned(path)
    holder = temporary_path(path)
    with claimed_folder(holder):
        try:
            planned = _named(plan(_as_stored(config, stored)), stored)
            create_planned(planned, holder / "plan")
            _require_same_files(path, stored, planned.manifest, holder / "plan")
            return _move_over(holder / "plan", path, _root(config, path, stored, planned.manifest))
        finally:
            shutil.rmtree(holder, ignore_errors=True)


def _stored_manifest(path: Path) -> Manifest | None:
    try:
        return read_manifest(path)
    except CorruptError:
        return None


def _as_stored(config: PrecomputeConfig, stored: Manifest | None) -> PrecomputeConfig:
    """The settings with the rows per chunk of the store, whatever its lengths would make the default."""
    return config if stored is None else dataclasses.replace(config, chunk_rows=stored.layout.chunk_rows)


def _named(planned: Plan, stored: Manifest | None) -> Plan:
    """The plan with the target's name of the store: the folder may have been renamed since."""
    if stored is None:
        return planned
    target = dataclasses.replace(planned.manifest.target, name=stored.target.name)
    return dataclasses.replace(planned, manifest=dataclasses.replace(planned.manifest, target=target))


def _require_same_files(path: Path, stored: Manifest | None, planned: Manifest, remade: Path) -> None:
    """Raises StoreError unless something undamaged says that the store's files were the same."""
    old = _intact_seal(path / PLAN_SEAL)
    if old is not None and "bound" not in old:  # else it is the seal of something computed, in the wrong place
        new = read_checked(remade / PLAN_SEAL)
        if old != new:
            before, now = seal_objects(old, path / PLAN_SEAL), seal_objects(new, remade / PLAN_SEAL)
            names = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
            got = f"{len(names)} files would be different, first {names[0]}" if names else "another plan"
            raise StoreError("the data no longer gives what was planned", where=path, got=got, fix=_FIX)
    elif stored is not None:
        require_same_plan(path, stored, planned)
    else:
        plans = {seal["plan"] for seal in _computed_seals(path)}
        if planned.plan_checksum() not in plans:
            got = "no intact seal" if not plans else "seals of another plan"
            raise StoreError("nothing shows that the store was planned like this", where=path, got=got, fix=_FIX)


def _root(config: PrecomputeConfig, path: Path, stored: Manifest | None, planned: Manifest) -> bytes | None:
    """The root's metadata, if it must be written again: bound to what the intact shards were computed with."""
    if stored is not None and stored.plan() == planned:
        return None
    bound_by = {seal["bound"] for seal in _computed_seals(path) if "bound" in seal}
    if not bound_by:
        return root_metadata(planned)
    bound = bound_manifest(config, planned)
    if bound_checksum(bound) not in bound_by:
        raise StoreError(
            "the store's manifest is damaged, and its shards were computed from other weights or by another engine",
            where=path / METADATA,
            got=bound.engine,
            fix="repair with the weights, device, settings and versions of packages that computed the store",
        )
    return root_metadata(bound)


def _computed_seals(path: Path) -> list[dict[str, Json]]:
    """Intact seals of everything but the plan."""
    with reading(path):
        names = sorted(os.listdir(path / "sealed")) if (path / "sealed").is_dir() else []
    seals = (_intact_seal(path / "sealed" / name) for name in names if name != Path(PLAN_SEAL).name)
    return [seal for seal in seals if seal is not None and "plan" in seal]


def _intact_seal(path: Path) -> dict[str, Json] | None:
    try:
        return read_checked(path)
    except StoreError:
        return None


def _move_over(remade: Path, path: Path, root: bytes | None) -> list[str]:
    """Replaces what differs, the seal last of all."""
    moved: list[str] = []
    with writing(path):
        for name in [*sorted(seal_objects(read_checked(remade / PLAN_SEAL), remade)), PLAN_SEAL]:
            if name == PLAN_SEAL and root is not None:
                write_file(path / METADATA, root)
                moved.append(METADATA)
            if not (path / name).is_file() or (path / name).read_bytes() != (remade / name).read_bytes():
                make_folders((path / name).parent)
                os.rename(remade / name, path / name)
                sync_folder((path / name).parent)
                moved.append(name)
    return moved
