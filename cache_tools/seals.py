"""What makes a store a store: the manifest in the root's metadata, and the seals. Both carry their own checksum."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cache_tools.arrays import METADATA, group_metadata
from cache_tools.errors import CorruptError, StoreError
from cache_tools.files import RUN_VERIFY, Json, checksum, parse_json, reading, to_json
from cache_tools.manifest import Manifest, check_version
from cache_tools.shards import ObjectRecord

PLAN_SEAL = "sealed/plan.json"
TARGET_SEAL = "sealed/target.json"
SCALES_SEAL = "sealed/scales.json"
_CHECKSUM = "crc32c"
_ROOT_CHECKSUM = "dflash_crc32c"


def shard_seal(shard: int) -> str:
    """Path of a shard's seal, relative to the store: the shard is complete when it exists."""
    return f"sealed/{shard}.json"


def rejected_list(shard: int) -> str:
    """Path of a shard's list of rejected samples, relative to the store; only there if it has any."""
    return f"rejected/{shard}.json"


def shard_number(name: str) -> int | None:
    """The shard that a file `<shard>.json` belongs to; None for other names."""
    return int(name[:-5]) if re.fullmatch(r"(0|[1-9]\d{0,17})\.json", name) else None


@dataclass(frozen=True)
class Rejection:
    """A sample whose hidden states were unusable, and are zeros in every layer."""

    sample: int
    layer: int
    reason: str

    def to_dict(self) -> dict[str, Json]:
        """Plain JSON values."""
        return {"sample": self.sample, "layer": self.layer, "reason": self.reason}


def root_metadata(manifest: Manifest) -> bytes:
    """The root's zarr.json."""
    plain = manifest.to_dict()
    return group_metadata({"dflash": plain, _ROOT_CHECKSUM: checksum(to_json(plain))})


def read_manifest(root: Path) -> Manifest:
    """The manifest of the store at `root`.

    Raises StoreError when there is no store or one of an unknown format version, CorruptError when it is damaged.
    """
    path = root / METADATA
    if not root.is_dir():
        fix = "check the path, or make the store with `dflash-precompute plan`"
        raise StoreError("there is no store", where=root, fix=fix)
    with reading(path):
        is_store = (root / "sealed").is_dir()
        content = path.read_bytes() if path.exists() else None
    if content is None:
        if is_store:
            raise CorruptError("the store's manifest is missing", where=path, fix=RUN_VERIFY)
        raise _not_a_store(root, f"no {METADATA}")
    if not is_store and b'"dflash"' not in content:
        raise _not_a_store(root, "a Zarr node that another program wrote")
    return _parse_root(content, path)


def seal_content(manifest: Manifest, objects: Mapping[str, ObjectRecord], **more: Json) -> bytes:
    """The bytes of a seal: the plan it belongs to, its objects, whatever else, and its own checksum.

    Once the store is bound to weights and an engine, a seal also says which.
    """
    if manifest.engine is not None:
        more["bound"] = bound_checksum(manifest)
    records: dict[str, Json] = {
        path: {"bytes": record.num_bytes, "crc32": record.crc32} for path, record in objects.items()
    }
    return with_checksum({"plan": manifest.plan_checksum(), "objects": records, **more})


def bound_checksum(manifest: Manifest) -> str:
    """Ties seals of computed things to the weights and the engine they come from."""
    return checksum(to_json(manifest.to_dict()))


def scales_checksum(scales: Mapping[int, NDArray[np.float32]]) -> str:
    """Ties seals of quantised shards to the channel scales, float32 [hidden_size] by layer id, they were made with."""
    return checksum(b"".join(np.ascontiguousarray(scales[i], dtype="<f4").tobytes() for i in sorted(scales)))


def seal_objects(seal: Mapping[str, Json], where: object) -> dict[str, ObjectRecord]:
    """The objects that a seal names. Raises CorruptError."""
    try:
        return {
            path: ObjectRecord(int(record["bytes"]), str(record["crc32"]))  # type: ignore[index, call-overload, arg-type]
            for path, record in seal["objects"].items()  # type: ignore[union-attr]
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptError("a seal without a list of objects", where=where, fix=RUN_VERIFY) from error


def with_checksum(value: dict[str, Json]) -> bytes:
    """JSON that carries the checksum of everything else in it."""
    return to_json({**value, _CHECKSUM: checksum(to_json(value))})


def read_checked(path: Path) -> dict[str, Json]:
    """What `with_checksum` wrote to `path`, without the checksum. Raises CorruptError for any changed byte."""
    with reading(path):
        content = path.read_bytes()
    value = parse_json(content, path)
    value.pop(_CHECKSUM, None)
    if content != with_checksum(value):
        raise CorruptError("damaged file: its checksum does not match", where=path, fix=RUN_VERIFY)
    return value


def read_rejected(path: Path) -> list[Rejection]:
    """The rejected samples of a shard, from its list of them or from its seal. Raises CorruptError."""
    value = read_checked(path)
    try:
        return [Rejection(**item) for item in value["rejected"]]  # type: ignore[union-attr, arg-type]
    except (KeyError, TypeError) as error:
        raise CorruptError("damaged list of rejected samples", where=path, fix=RUN_VERIFY) from error


def sealed_shards(root: Path, num_shards: int) -> list[int]:
    """The shards that have a seal, in any order. Raises StoreError."""
    with reading(root / "sealed"):
        numbers = [shard_number(name) for name in os.listdir(root / "sealed")]
    return [number for number in numbers if number is not None and number < num_shards]


def read_rejections(root: Path, sealed: frozenset[int]) -> list[Rejection]:
    """Rejected samples of sealed shards; lists of other shards belong to a writer that is still at work.

    Raises StoreError, CorruptError.
    """
    if not (root / "rejected").is_dir():
        return []
    with reading(root / "rejected"):
        numbers = [shard_number(name) for name in os.listdir(root / "rejected")]
    shards = sorted(number for number in numbers if number in sealed)
    return [item for shard in shards for item in read_rejected(root / rejected_list(shard))]


def rejected_by_seal(root: Path, shard: int) -> frozenset[int]:
    """The samples that the seal of a shard rejects: should their list be lost, their zeros must not pass for states.

    Raises StoreError, CorruptError.
    """
    return frozenset(item.sample for item in read_rejected(root / shard_seal(shard)))


def require_listed(root: Path, shard: int, listed: frozenset[int]) -> None:
    """Raises CorruptError when a shard's seal rejects a sample that is not among those `listed`; StoreError."""
    lost = rejected_by_seal(root, shard) - listed
    if lost:
        raise unlisted_rejection(root, shard, min(lost))


def unlisted_rejection(root: Path, shard: int, sample: int) -> CorruptError:
    """The error for a sample that its shard's seal rejects and no list names."""
    return CorruptError(
        f"sample {sample} was rejected when hidden states were computed, but no list says so",
        where=root / rejected_list(shard),
        fix=RUN_VERIFY,
    )


def _parse_root(content: bytes, path: Path) -> Manifest:
    attributes = parse_json(content, path).get("attributes")
    plain = attributes.get("dflash") if isinstance(attributes, dict) else None
    if not isinstance(attributes, dict) or not isinstance(plain, dict):
        raise CorruptError("the store's manifest is damaged", where=path, fix=RUN_VERIFY)
    # A version that this code does not know may check itself in another way, so the version comes first there;
    # where the checksum shows that the version was not written like this, damage is the better explanation.
    if attributes.get(_ROOT_CHECKSUM) in (None, checksum(to_json(plain))):
        check_version(plain, path)
    if content != group_metadata({"dflash": plain, _ROOT_CHECKSUM: checksum(to_json(plain))}):
        raise CorruptError("the store's manifest is damaged: its checksum does not match", where=path)
    return Manifest.from_dict(plain, path)


def _not_a_store(root: Path, got: str) -> StoreError:
    return StoreError(
        "this is not a dflash store",
        where=root,
        got=got,
        expected=f"a folder with {METADATA} and {PLAN_SEAL}, made by `dflash-precompute plan`",
        fix="check the path",
    )
