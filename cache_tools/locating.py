"""Which array, shard and samples a file of a store belongs to."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path

import numpy as np

from cache_tools.arrays import METADATA, ArraySpec, parent_groups, plan_arrays, scale_arrays, shard_arrays
from cache_tools.codecs import ChunkError
from cache_tools.errors import StoreError
from cache_tools.files import parse_json, reading
from cache_tools.manifest import Manifest
from cache_tools.reader import target_spec
from cache_tools.sample_table import SampleTable
from cache_tools.seals import rejected_list, shard_number
from cache_tools.shards import damaged_chunks

SampleRun = tuple[int, int]
"""First and last sample of a run, both included."""

_OBJECT = re.compile(r"(?P<array>.+)/c/(?P<shard>\d+)(/0)?")
_TARGET_WEIGHT = re.compile(
    rf"target/({METADATA}|(embed_tokens|lm_head|final_norm)/({METADATA}|(bits|values)/({METADATA}|c/\d+(/0)?)))"
)
_TARGET_FILE = re.compile(r"target/files/[^/]+")


class Locator:
    """Knows the names that files of a store may have, from its manifest and sample table."""

    def __init__(self, root: Path, manifest: Manifest) -> None:
        self._root = root
        self._manifest = manifest
        self._arrays = {array.path: array for array in plan_arrays(manifest)}
        self._scales = {array.path for array in scale_arrays(manifest).values()}
        table = SampleTable(root, manifest)
        try:
            self._start, self._end = table.start, table.start + table.length
        except StoreError:  # found when the table's own files are checked; then no sample can be named
            self._start = self._end = np.empty(0, dtype=np.int64)

    def array_of(self, name: str) -> tuple[ArraySpec, int] | None:
        """The array and its shard that a file holds; None for files that hold something else."""
        match = _OBJECT.fullmatch(name)
        array = (self._arrays | self._target_arrays).get(match["array"]) if match else None
        if match is None or array is None:
            return None
        shard = int(match["shard"])
        return (array, shard) if shard < array.num_shards and name == array.object_path(shard) else None

    def shard_of(self, name: str) -> int | None:
        """The shard of samples that a file belongs to."""
        held = self.array_of(name)
        if held is not None and held[0].path in self._scales:
            return None
        if held is not None and not held[0].path.startswith(("samples/", "target/")):
            return held[1]
        shard = shard_number(name.removeprefix("rejected/"))
        return shard if shard is not None and shard < self._manifest.layout.num_shards else None

    @cached_property
    def _target_arrays(self) -> dict[str, ArraySpec]:
        """The target's weights as far as their metadata can be read."""
        arrays = {}
        for path in self._root.glob(f"target/*/*/{METADATA}"):
            with suppress(StoreError), reading(path):
                array = target_spec(path.parts[-3], parse_json(path.read_bytes(), path), path)
                arrays[array.path] = array
        return arrays

    @cached_property
    def plan_names(self) -> frozenset[str]:
        """All files that the plan must have, except the target's."""
        arrays = list(self._arrays.values())
        names = {f"{path}/{METADATA}" for path in [*parent_groups(arrays), *self._arrays]}
        later = {array.path for array in (*shard_arrays(self._manifest), *scale_arrays(self._manifest).values())}
        planned = [array for array in arrays if array.path not in later]
        return frozenset(names).union(a.object_path(shard) for a in planned for shard in range(a.num_shards))

    @cached_property
    def scale_names(self) -> frozenset[str]:
        """The files that hold channel scales; none for lossless codecs."""
        return frozenset(array.object_path(0) for array in scale_arrays(self._manifest).values())

    def shard_names(self, shard: int, *, has_rejected: bool) -> set[str]:
        """All files that a sealed shard must have."""
        names = {array.object_path(shard) for array in shard_arrays(self._manifest)}
        return names | ({rejected_list(shard)} if has_rejected else set())

    def may_exist(self, name: str) -> bool:
        """A store of this manifest may have a file of this name."""
        return (
            self.shard_of(name) is not None
            or name in self.plan_names
            or name in self.scale_names
            or bool(_TARGET_WEIGHT.fullmatch(name) or _TARGET_FILE.fullmatch(name))
        )

    def samples_of_shard(self, shard: int) -> SampleRun | None:
        """The samples of a shard."""
        rows = self._manifest.layout.shard_rows
        return self._samples_of_rows(shard * rows, (shard + 1) * rows)

    def samples_of_object(self, name: str) -> SampleRun | None:
        """The samples that need a file."""
        held = self.array_of(name)
        if held is None:
            shard = self.shard_of(name)
            return None if shard is None else self.samples_of_shard(shard)
        array, shard = held
        return self._samples_of_array(array, shard * array.shard_rows, (shard + 1) * array.shard_rows)

    def damaged_samples(self, name: str) -> list[SampleRun | None]:
        """Runs of samples whose chunks in a file are damaged; where chunks cannot be told apart, all of them."""
        held = self.array_of(name)
        if held is None:
            return [self.samples_of_object(name)]
        array, _ = held
        path = self._root / name
        try:
            with reading(path), open(path, "rb") as file:
                chunks, _ = damaged_chunks(file.fileno(), array)
        except ChunkError:
            return [self.samples_of_object(name)]
        # Without a damaged chunk it is the wrong file, not a wrong byte.
        return self.samples_of_chunks(name, chunks) if chunks else [self.samples_of_object(name)]

    def samples_of_chunks(self, name: str, chunks: Sequence[int]) -> list[SampleRun | None]:
        """Runs of samples that need some of these chunks, ascending numbers, of a file that holds an array."""
        held = self.array_of(name)
        assert held is not None, name
        array, shard = held
        runs: list[SampleRun | None] = []
        for chunk in chunks:
            row = shard * array.shard_rows + chunk * array.chunk_rows
            run = self._samples_of_array(array, row, row + array.chunk_rows)
            previous = runs[-1] if runs else None
            if run is not None and previous is not None and run[0] <= previous[1] + 1:
                runs[-1] = (previous[0], run[1])
            else:
                runs.append(run)
        return runs

    def _samples_of_array(self, array: ArraySpec, first: int, end: int) -> SampleRun | None:
        if array.path.startswith("target/") or array.path in self._scales:
            return None
        if array.path.startswith("samples/"):
            return first, min(end, self._manifest.layout.num_samples) - 1
        if array.path.endswith("/first"):  # one row per sample
            of_shard = self.samples_of_shard(first // array.shard_rows)
            return of_shard and (of_shard[0] + first % array.shard_rows, of_shard[0] + (end - 1) % array.shard_rows)
        return self._samples_of_rows(first, end)

    def _samples_of_rows(self, first: int, end: int) -> SampleRun | None:
        """Samples with a token in rows [first, end)."""
        begin = int(np.searchsorted(self._end, first, side="right"))
        stop = int(np.searchsorted(self._start, end, side="left"))
        return (begin, stop - 1) if begin < stop else None
