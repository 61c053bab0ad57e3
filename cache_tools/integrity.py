"""Finding damage: in a whole store, down to the samples it touches, and in hidden states before they are stored."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cache_tools.arrays import METADATA, ArraySpec
from cache_tools.codecs import BF16_INFINITY, BF16_MAGNITUDE, ChunkError
from cache_tools.errors import CorruptError, StoreError
from cache_tools.files import TEMPORARY_NAME, Json, file_size, object_checksum, reading
from cache_tools.locating import Locator, SampleRun
from cache_tools.manifest import Manifest
from cache_tools.order import mix64_array
from cache_tools.progress import Progress
from cache_tools.scales import read_scales
from cache_tools.seals import (
    PLAN_SEAL,
    SCALES_SEAL,
    TARGET_SEAL,
    bound_checksum,
    read_checked,
    read_manifest,
    scales_checksum,
    seal_objects,
    shard_number,
    shard_seal,
)
from cache_tools.shards import ObjectRecord, damaged_chunks

CONSTANT = "constant"
Kind = Literal["missing", "truncated", "corrupt", "wrong seal", "unsealed", "temporary", "foreign"]

_READ_BYTES = 4 * 2**20
_CHOICE_KEY = 0x73706F74  # separates the choice of chunks from every other use of the same seed
_CHECKED_ROWS = 64  # copies of more rows would leave the processor's cache


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with a store."""

    kind: Kind
    object: str
    """Path of the file, relative to the store."""
    detail: str
    shard: int | None = None
    samples: SampleRun | None = None
    """First and last sample that the damage touches, both included. None: none, or all, or it cannot be told."""

    def to_dict(self) -> dict[str, Json]:
        """Plain JSON values."""
        return {
            "kind": self.kind,
            "object": self.object,
            "detail": self.detail,
            "shard": self.shard,
            "samples": None if self.samples is None else list(self.samples),
        }

    def __str__(self) -> str:
        shard = "" if self.shard is None else f", shard {self.shard}"
        samples = ""
        if self.samples is not None:
            first, last = self.samples
            samples = f", sample {first}" if first == last else f", samples {first} to {last}"
        return f"{self.kind}: {self.object}{shard}{samples}: {self.detail}"


def find_bad_layer(hidden: NDArray[np.uint16]) -> str | None:
    """Why one layer's bfloat16 bit patterns [length, hidden_size] are unusable; None if they are fine.

    CONSTANT, all tokens alike, is a fault only where the tokens themselves are not.
    """
    largest = np.uint16(0)
    for first in range(0, len(hidden), _CHECKED_ROWS):
        magnitude = hidden[first : first + _CHECKED_ROWS] & BF16_MAGNITUDE
        largest = max(largest, magnitude.max())
        if largest >= BF16_INFINITY:
            return f"NaN or Inf at token {first + int((magnitude >= BF16_INFINITY).any(axis=1).argmax())}"
    if largest == 0:
        return "all zero"
    if len(hidden) > 1 and (hidden[1] == hidden[0]).all() and (hidden == hidden[0]).all():
        return CONSTANT
    return None


@dataclass(frozen=True)
class SpotCheck:
    """What was found without reading everything."""

    findings: list[Finding]
    bytes_read: int
    bytes_total: int

    @property
    def share(self) -> float:
        """Bytes read over all bytes."""
        return self.bytes_read / max(self.bytes_total, 1)


def verify(store_path: Path, progress: Progress | None = None) -> list[Finding]:
    """Checks every file of a store against its seal; an empty list means that nothing is wrong.

    A shard without a seal is not yet written, which is no damage; but files of such a shard are findings, because
    their writer died or is still at work. `progress` counts bytes.

    Raises StoreError when `store_path` is no store at all, or one of an unknown format version.
    """
    return list(_Verification(Path(store_path).absolute(), progress).run())


def verify_plan(store_path: Path, progress: Progress | None = None) -> list[Finding]:
    """Like `verify`, for the manifest and what planning wrote: tokens, samples, metadata, the target's files."""
    verification = _Verification(Path(store_path).absolute(), progress)
    return [*verification.check_manifest(), *verification.check_seal(PLAN_SEAL)]


def spot_check(store_path: Path, rate: float, *, seed: int = 0, progress: Progress | None = None) -> SpotCheck:
    """Like `verify`, but reads only a share `rate` of the chunks, 0 < rate <= 1, chosen by `seed`.

    Everything else is checked all the same: that each file is there and has its size, all seals, all indexes of
    shards, the sample table, the channel scales, and every file that has no chunks. Equal seeds choose equal chunks of
    equal stores. Only `verify` notices that a whole file was exchanged for a sound one of the same size.
    """
    total = num_bytes_to_verify(store_path)
    verification = _Verification(Path(store_path).absolute(), progress, _Choice(rate, seed))
    findings = list(verification.run())
    return SpotCheck(findings, verification.bytes_read, total)


def num_bytes_to_verify(store_path: Path) -> int:
    """What the progress of `verify` or `spot_check` will count to. Raises StoreError like these, at once."""
    with suppress(CorruptError):  # a finding
        read_manifest(Path(store_path))
    return sum(file_size(path) for path, _ in _walk(Path(store_path)))


@dataclass(frozen=True)
class _Choice:
    """A keyed choice of chunks."""

    rate: float
    seed: int

    def chunks(self, name: str, num_chunks: int) -> NDArray[np.bool_]:
        """[num_chunks] the chosen ones of a file."""
        key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
        hashes = mix64_array(_CHOICE_KEY, self.seed, key, np.arange(num_chunks))
        return (hashes >> np.uint64(11)) * 2.0**-53 < self.rate


class _Verification:
    """One pass over a store. Remembers what the seals name: everything else is foreign."""

    def __init__(self, root: Path, progress: Progress | None, choice: _Choice | None = None) -> None:
        self.bytes_read = 0
        self._root = root
        self._progress = progress
        self._choice = choice
        self._named = {METADATA}
        self._manifest: Manifest | None = None
        self._locator: Locator | None = None
        self._scales: str | None = None  # checksum of the channel scales; None where there are none, or damaged ones

    def run(self) -> Iterator[Finding]:
        """All findings, file by file."""
        yield from self.check_manifest()
        for seal in self._seals():
            yield from self.check_seal(seal)
        yield from self._check_unnamed()

    def check_manifest(self) -> Iterator[Finding]:
        """The manifest, without which nothing else can be located."""
        try:
            self._manifest = read_manifest(self._root)
            self._locator = Locator(self._root, self._manifest)
            if self._locator.scale_names:
                with suppress(StoreError):
                    self._scales = scales_checksum(read_scales(self._root, self._manifest))
        except CorruptError as error:
            yield self._unreadable(METADATA, error)
        self._count_whole(METADATA)

    def _seals(self) -> list[str]:
        names = os.listdir(self._root / "sealed") if (self._root / "sealed").is_dir() else []
        shards = sorted(number for name in names if (number := shard_number(name)) is not None)
        has_scales = self._locator is not None and bool(self._locator.scale_names)
        once = [TARGET_SEAL] if "target.json" in names else []
        once += [SCALES_SEAL] if "scales.json" in names or (has_scales and shards) else []
        return [PLAN_SEAL, *once, *map(shard_seal, shards)]

    def check_seal(self, path: str) -> Iterator[Finding]:
        """The seal itself, then the objects it names."""
        self._named.add(path)
        self._count_whole(path)
        shard = shard_number(path.removeprefix("sealed/"))
        samples = None if shard is None or self._locator is None else self._locator.samples_of_shard(shard)
        try:
            seal = read_checked(self._root / path)
            objects = seal_objects(seal, self._root / path)
        except StoreError as error:
            yield self._unreadable(path, error, shard, samples)
            return
        problem = self._wrong(path, shard, seal, objects)
        if problem is not None:
            yield Finding("wrong seal", path, problem, shard, samples)
        self._named.update(objects)
        for name, record in sorted(objects.items()):
            yield from self._check_object(name, record, shard)

    def _wrong(
        self, path: str, shard: int | None, seal: Mapping[str, Json], objects: Mapping[str, ObjectRecord]
    ) -> str | None:
        """What an undamaged seal says that cannot be right."""
        if self._manifest is None or self._locator is None:
            return None
        if seal.get("plan") != self._manifest.plan_checksum():
            return "it belongs to another store, or to another plan"
        if path != PLAN_SEAL and seal.get("bound") != bound_checksum(self._manifest):
            return "it was computed from other weights, or by another engine"
        if shard is None:
            expected = {PLAN_SEAL: self._locator.plan_names, SCALES_SEAL: self._locator.scale_names}
            absent = sorted(expected.get(path, frozenset()) - set(objects))
            return f"it does not name {absent[0]}" if absent else None
        if shard >= self._manifest.layout.num_shards or seal.get("shard") != shard:
            return f"it is the seal of shard {seal.get('shard')}, of {self._manifest.layout.num_shards}"
        if self._scales is not None and seal.get("scales") != self._scales:
            return "its hidden states were quantised with other channel scales"
        differing = self._locator.shard_names(shard, has_rejected=bool(seal.get("rejected"))) ^ set(objects)
        return f"it should name another set of files: {min(differing)}" if differing else None

    def _check_object(self, name: str, record: ObjectRecord, shard: int | None) -> Iterator[Finding]:
        if shard is None and self._locator is not None:
            shard = self._locator.shard_of(name)
        runs: list[SampleRun | None] = [None]
        path = self._root / name
        if not path.is_file():
            samples = None if self._locator is None else self._locator.samples_of_object(name)
            yield Finding("missing", name, "the file is missing", shard, samples)
            return
        array = self._sampled_array(name)
        if array is not None and path.stat().st_size == record.num_bytes:
            yield from self._check_some_chunks(name, array, shard)
            return
        num_bytes, crc = self._read(path)
        if (num_bytes, crc) == (record.num_bytes, record.crc32):
            return
        kind: Kind = "truncated" if num_bytes < record.num_bytes else "corrupt"
        detail = f"{num_bytes} bytes with checksum {crc}, sealed as {record.num_bytes} with {record.crc32}"
        if self._locator is not None:
            runs = self._locator.damaged_samples(name)
        for samples in runs:
            yield Finding(kind, name, detail, shard, samples)

    def _sampled_array(self, name: str) -> ArraySpec | None:
        """The array in a file of which a choice of chunks is enough: not of the sample table, nor of the scales.

        These are small, and no sample can be read when they are damaged.
        """
        if self._locator is None or self._choice is None:
            return None
        held = self._locator.array_of(name)
        is_vital = name.startswith("samples/") or name in self._locator.scale_names
        return None if held is None or is_vital else held[0]

    def _check_some_chunks(self, name: str, array: ArraySpec, shard: int | None) -> Iterator[Finding]:
        """Looks at the chosen chunks of a file whose size is right."""
        assert self._choice is not None and self._locator is not None
        path = self._root / name
        try:
            with reading(path), open(path, "rb") as file:
                chosen = self._choice.chunks(name, array.num_chunks)
                damaged, num_read = damaged_chunks(file.fileno(), array, chosen)
            self._count(num_read, path.stat().st_size)
            if damaged:
                detail = f"{len(damaged)} of {int(chosen.sum())} chunks that were read do not match their checksums"
                for samples in self._locator.samples_of_chunks(name, damaged):
                    yield Finding("corrupt", name, detail, shard, samples)
        except ChunkError as error:
            yield Finding("corrupt", name, str(error), shard, self._locator.samples_of_object(name))

    def _read(self, path: Path) -> tuple[int, str]:
        """Size and checksum of a file."""
        crc = num_bytes = 0
        with reading(path), open(path, "rb") as file:
            while block := file.read(_READ_BYTES):
                crc = object_checksum(block, crc)
                num_bytes += len(block)
                self._count(len(block), len(block))
        return num_bytes, f"{crc:08x}"

    def _count_whole(self, name: str) -> None:
        num_bytes = file_size(self._root / name)
        self._count(num_bytes, num_bytes)

    def _count(self, num_read: int, num_checked: int) -> None:
        self.bytes_read += num_read
        if self._progress is not None:
            self._progress.update(num_checked)

    def _check_unnamed(self) -> Iterator[Finding]:
        """Files that no seal names."""
        unnamed = ((path, name) for path, name in _walk(self._root) if name not in self._named)
        for path, name in sorted(unnamed):
            shard = None if self._locator is None else self._locator.shard_of(name)
            if TEMPORARY_NAME.fullmatch(path.name):
                yield Finding("temporary", name, "half-written: its writer died, or is still at work")
            elif self._locator is None:
                yield Finding("unsealed", name, "no intact seal names it")
            elif self._locator.may_exist(name):
                samples = self._locator.samples_of_object(name)
                detail = "no intact seal names it: its writer died before sealing, or is still at work"
                yield Finding("unsealed", name, detail, shard, samples)
            else:
                yield Finding("foreign", name, "it does not belong to the store")

    def _unreadable(
        self, path: str, error: StoreError, shard: int | None = None, samples: SampleRun | None = None
    ) -> Finding:
        """A finding about a file that could not be used."""
        exists = (self._root / path).exists()
        detail = error.what + ("" if error.got is None else f" ({error.got})") if exists else "the file is missing"
        return Finding("corrupt" if exists else "missing", path, detail, shard, samples)


def _walk(root: Path) -> Iterator[tuple[Path, str]]:
    """All files of a store, with their paths relative to it."""
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder, name)
            yield path, path.relative_to(root).as_posix()
