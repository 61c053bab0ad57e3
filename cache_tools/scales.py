"""The static channel scales of a quantised store, written and read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cache_tools.arrays import scale_arrays
from cache_tools.errors import CorruptError, StoreError
from cache_tools.files import RUN_VERIFY, object_checksum, reading, write_file, writing
from cache_tools.manifest import Manifest
from cache_tools.seals import (
    SCALES_SEAL,
    read_checked,
    read_manifest,
    scales_checksum,
    seal_content,
    seal_objects,
    shard_number,
)
from cache_tools.shards import ObjectRecord, ShardedArray, write_array


def read_scales(root: Path, manifest: Manifest) -> dict[int, NDArray[np.float32]]:
    """Static channel scales [hidden_size] by layer id; empty for lossless codecs.

    Raises StoreError when they were not calibrated yet, CorruptError when they are not those that were sealed: no
    checksum of a chunk tells when layers are mixed up, and every state of a layer would be wrong.
    """
    arrays = scale_arrays(manifest)
    if arrays and not (root / SCALES_SEAL).exists():
        raise StoreError(
            "the store's channel scales were not calibrated yet",
            where=root,
            fix="run the `dflash-precompute run` command that made the store again",
        )
    scales = {layer_id: ShardedArray(root, array).read_all() for layer_id, array in arrays.items()}
    sealed = seal_objects(read_checked(root / SCALES_SEAL), root / SCALES_SEAL) if arrays else {}
    for name in (array.object_path(0) for array in arrays.values()):
        with reading(root / name):
            content = (root / name).read_bytes()
        if sealed.get(name) != ObjectRecord(len(content), f"{object_checksum(content):08x}"):
            raise CorruptError("these are not the channel scales that were sealed", where=root / name, fix=RUN_VERIFY)
    return scales


def write_scales(path: Path, scales: Mapping[int, NDArray[np.float32]]) -> None:
    """Stores and seals the channel scales, float32 [hidden_size] by layer id, of a quantised store; a second time
    changes nothing, nor does it for lossless codecs. One process at a time, before the first shard. Raises StoreError,
    also when some shard was quantised with other scales (then theirs got lost, and these cannot replace them).
    """
    manifest = read_manifest(path)
    arrays = scale_arrays(manifest)
    assert set(scales) == set(arrays), f"layers {sorted(scales)}"
    if not arrays or (path / SCALES_SEAL).exists():
        return
    used = _scales_of_shards(path)
    if used - {scales_checksum(scales)}:
        raise StoreError(
            "the channel scales come out other than those that the store's shards were quantised with",
            where=path,
            got=f"checksum {scales_checksum(scales)}",
            expected=", ".join(sorted(used)),
            fix="calibrate with the device and packages that made the store, or make a new one",
        )
    with writing(path):
        objects: dict[str, ObjectRecord] = {}
        for layer_id, array in arrays.items():
            objects |= write_array(path, array, scales[layer_id])
        write_file(path / SCALES_SEAL, seal_content(manifest, objects))


def _scales_of_shards(path: Path) -> set[str]:
    """Checksums of the channel scales that the intact seals of shards name."""
    used = set()
    for name in os.listdir(path / "sealed"):
        if shard_number(name) is not None:
            with suppress(StoreError):  # a damaged seal, which `verify` reports
                used.add(str(read_checked(path / "sealed" / name).get("scales")))
    return used
