"""Writing a store: the plan first, then the target's weights and, in any order and any number of processes, shards.

Everything is prepared under a temporary name and renamed when it is on disk; a seal is written last of all.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from cache_tools.arrays import (
    METADATA,
    group_metadata,
    hidden_arrays,
    parent_groups,
    plan_arrays,
    sample_arrays,
    shard_arrays,
    target_array,
    teacher_arrays,
    token_arrays,
)
from cache_tools.codecs import content_id
from cache_tools.errors import DataError, StoreError
from cache_tools.files import (
    Json,
    claimed_folder,
    make_folders,
    remove_unless_claimed,
    sync_folder,
    temporary_path,
    write_file,
    writing,
)
from cache_tools.layer_statistics import STATISTICS_STRIDE, LayerSize, measure
from cache_tools.layout import Layout, samples_between
from cache_tools.manifest import Manifest, TargetAttributes
from cache_tools.progress import Progress
from cache_tools.quantise import QUANTISED, encode
from cache_tools.sample_table import SampleTable
from cache_tools.scales import read_scales
from cache_tools.seals import (
    PLAN_SEAL,
    TARGET_SEAL,
    Rejection,
    read_manifest,
    rejected_list,
    root_metadata,
    scales_checksum,
    seal_content,
    shard_seal,
    with_checksum,
)
from cache_tools.shards import ObjectRecord, ShardAppender, write_array, write_object

_ENCODED_ROWS = 64  # float32 copies of more rows would leave the processor's cache
_T = TypeVar("_T")

Tokens = tuple[NDArray[np.int32], NDArray[np.uint8]]
"""Token ids [length] and loss mask [length] (0 or 1) of a sample."""


@dataclass(frozen=True)
class SampleColumns:
    """Where the samples come from; both columns [num_samples], in the order of the store (not of the data)."""

    source: NDArray[np.int32]
    """Index into the manifest's data.sources."""
    row: NDArray[np.int64]
    """0-based row number in that source."""


def create_store(
    path: Path,
    manifest: Manifest,
    layout: Layout,
    samples: SampleColumns,
    tokens: Iterable[Tokens],
    files: Mapping[str, bytes],
    progress: Progress | None = None,
) -> None:
    """Writes a planned store: manifest, tokens, samples and the target's files, but no hidden states.

    `tokens` come in the order of the store and are used one by one; `progress` counts them. `path` appears when
    everything is on disk. Raises StoreError when it exists already or cannot be written, DataError when `tokens`
    raise OSError.
    """
    assert manifest.layout.num_samples == layout.num_samples == len(samples.source) == len(samples.row) > 0
    assert (manifest.layout.num_rows, manifest.layout.num_tokens) == (layout.num_rows, layout.num_tokens)
    path = Path(path).absolute()
    if path.exists():
        fix = "use it with `dflash-precompute run`, remove it, or choose another path"
        raise StoreError("there is something at the path of the new store", where=path, fix=fix)
    with writing(path):
        make_folders(path.parent)
        remove_abandoned(path)
        building = temporary_path(path)
        with claimed_folder(building):
            try:
                objects = _write_metadata(building, manifest)
                columns = _write_tokens(building, manifest, layout, tokens, objects, progress)
                columns |= {"source": samples.source, "row": samples.row}
                for name, array in sample_arrays(manifest).items():
                    objects |= write_array(building, array, columns[name])
                for name, content in files.items():
                    objects |= write_object(building, f"target/files/{name}", content)
                write_file(building / METADATA, root_metadata(manifest))
                write_file(building / PLAN_SEAL, seal_content(manifest, objects))
                building.rename(path)
            except BaseException:
                shutil.rmtree(building, ignore_errors=True)
                raise
        sync_folder(path.parent)


def bind_engine(path: Path, manifest: Manifest) -> None:
    """Records in a planned store which weights and which engine its hidden states come from; once.

    Only one process may do so at a time. Does nothing when the same was recorded before. Raises StoreError naming
    each field that differs from what the store was planned for or is bound to.
    """
    assert manifest.engine is not None, "nothing to bind"
    stored = read_manifest(path)
    bound = stored.engine is not None
    differences = (stored if bound else stored.plan()).differences(manifest if bound else manifest.plan())
    if differences:
        raise StoreError(
            "the store was made for something else",
            where=path,
            got="; ".join(map(str, differences)),
            fix="go on with what the store was made for, or make a new store",
        )
    if not bound:
        with writing(path):
            write_file(path / METADATA, root_metadata(manifest))


def write_target(path: Path, arrays: Mapping[str, NDArray[Any]], attributes: TargetAttributes) -> None:
    """Stores the target's weights and seals them; a second time changes nothing. One process at a time.

    `arrays`: embed_tokens [vocab, hidden], lm_head [vocab, hidden] unless tied, final_norm [hidden]; each uint16
    bfloat16 bit patterns or float32. Raises StoreError.
    """
    expected = {"embed_tokens", "final_norm"} | (set() if attributes.tied else {"lm_head"})
    assert set(arrays) == expected, f"{sorted(arrays)} instead of {sorted(expected)}"
    manifest = read_manifest(path)
    if (path / TARGET_SEAL).exists():
        return
    with writing(path / "target"):
        objects: dict[str, ObjectRecord] = {}
        specs = {name: target_array(name, str(arrays[name].dtype), arrays[name].shape) for name in arrays}
        for group in parent_groups(specs.values()):
            content = group_metadata(attributes.to_dict() if group == "target" else {})
            objects |= write_object(path, f"{group}/{METADATA}", content)
        for name, array in specs.items():
            objects |= write_object(path, f"{array.path}/{METADATA}", array.metadata())
            objects |= write_array(path, array, arrays[name])
        write_file(path / TARGET_SEAL, seal_content(manifest, objects))


class ShardWriter(AbstractContextManager["ShardWriter"]):
    """Writes the hidden states of one shard. Other processes may write other shards at the same time.

    Samples come in order, each by `append` or `reject`; `seal` makes the shard exist. Leaving the block without it
    leaves nothing behind. Memory: one chunk per array.
    """

    def __init__(
        self,
        store_path: Path,
        manifest: Manifest,
        shard: int,
        samples: SampleTable | None = None,
        pool: ThreadPoolExecutor | None = None,
    ) -> None:
        """`samples`: the store's table if it is open anyway; otherwise it is read.

        `pool`: threads that encode and write the layers of a sample at once; the bytes do not depend on it.

        Raises StoreError when the shard is sealed already or cannot be written, or when channel scales are missing.
        """
        self._path = Path(store_path).absolute()
        self._manifest = manifest
        self._shard = shard
        if (self._path / shard_seal(shard)).exists():
            raise StoreError(
                f"shard {shard} is complete already",
                where=self._path,
                fix="make sure that only one command writes to the store at a time",
            )
        table = samples if samples is not None else SampleTable(self._path, manifest)
        rows = manifest.layout.shard_rows
        self._samples = samples_between(table.start, shard * rows, (shard + 1) * rows)
        self._start, self._length = table.start, table.length
        self._next = self._samples.start
        self._num_tokens = 0
        self._rejections: list[Rejection] = []
        self._sizes = dict.fromkeys(manifest.layer_ids, LayerSize())
        self._hidden_arrays = {layer_id: hidden_arrays(manifest, layer_id) for layer_id in manifest.layer_ids}
        self._pool = pool
        self._scales = read_scales(self._path, manifest)
        self._teacher_arrays = teacher_arrays(manifest)
        self._appenders: dict[str, ShardAppender] = {}
        with ExitStack() as undo, writing(self._path):
            for array in shard_arrays(manifest):
                self._appenders[array.path] = ShardAppender(self._path, array, shard)
                undo.callback(self._appenders[array.path].abort)
            (self._path / rejected_list(shard)).unlink(missing_ok=True)  # of a writer that died before sealing
            undo.pop_all()

    @property
    def samples(self) -> range:
        """The samples that belong into this shard."""
        return self._samples

    def append(
        self,
        sample: int,
        hidden: Mapping[int, NDArray[np.uint16]],
        teacher: Mapping[str, NDArray[Any]] | None = None,
        encoded: Mapping[int, Mapping[str, NDArray[Any]]] | None = None,
    ) -> None:
        """Adds a sample: bfloat16 bit patterns [length, hidden_size] by layer id, and the arrays of its teacher.

        `teacher`: [length, ...] by the names of `teacher_arrays`. `encoded`: what `quantise.encode` gives for all rows
        of each layer, if somebody has computed it already. Raises StoreError.
        """
        self._advance(sample)
        length = int(self._length[sample])
        shape = (length, self._manifest.target.hidden_size)
        teacher = teacher or {}
        assert set(hidden) == set(self._manifest.layer_ids), f"layers {sorted(hidden)}"
        assert set(teacher) == set(self._teacher_arrays), f"teacher {sorted(teacher)}"
        self._num_tokens += length
        for layer_id, bits in hidden.items():
            assert bits.shape == shape, f"sample {sample}, layer {layer_id}: {bits.shape}, not {shape}"
            assert bits.dtype == np.uint16, f"sample {sample}, layer {layer_id}: {bits.dtype}, not uint16"
        for name, array in self._teacher_arrays.items():
            assert teacher[name].dtype == array.dtype, f"sample {sample}, {name}: {teacher[name].dtype}"
        encoded = encoded or {}
        calls = [
            partial(self._append_layer, sample, layer_id, bits, encoded.get(layer_id))
            for layer_id, bits in hidden.items()
        ]
        calls += [
            partial(self._appenders[array.path].write, int(self._start[sample]), teacher[name])
            for name, array in self._teacher_arrays.items()
        ]
        with writing(self._path):
            self._at_once(calls)

    def _append_layer(
        self, sample: int, layer_id: int, bits: NDArray[np.uint16], encoded: Mapping[str, NDArray[Any]] | None
    ) -> None:
        arrays = self._hidden_arrays[layer_id]
        start = int(self._start[sample])
        # Without the first token, whose norm is 40 to 160 times larger. All rows would take as long as writing them.
        self._sizes[layer_id] += measure(bits[1::STATISTICS_STRIDE])
        if self._manifest.codec not in QUANTISED:
            self._appenders[arrays["bits"].path].write(start, bits)
            return
        first_row = self._shard * arrays["first"].shard_rows + sample - self._samples.start
        self._appenders[arrays["first"].path].write(first_row, bits[:1])
        if encoded is not None:
            for name, values in encoded.items():
                assert len(values) == len(bits), f"sample {sample}, layer {layer_id}, {name}: {len(values)} rows"
                self._appenders[arrays[name].path].write(start + 1, values[1:])
            return
        for row in range(1, len(bits), _ENCODED_ROWS):
            block = bits[row : row + _ENCODED_ROWS]
            for name, values in encode(self._manifest.codec, block, self._scales[layer_id]).items():
                self._appenders[arrays[name].path].write(start + row, values)

    def _at_once(self, calls: Sequence[Callable[[], _T]]) -> list[_T]:
        """What the calls return; when this returns or raises, none of them runs any more."""
        if self._pool is None:
            return [call() for call in calls]
        futures = [self._pool.submit(call) for call in calls]
        wait(futures)
        return [future.result() for future in futures]

    def reject(self, sample: int, layer: int, reason: str) -> None:
        """Leaves a sample's rows zero in every layer, and records why. `layer`: the first unusable one."""
        self._advance(sample)
        self._rejections.append(Rejection(sample, layer, reason))

    def seal(self) -> None:
        """Makes the shard complete: nothing can be added, and readers see it. Raises StoreError."""
        assert self._next == self._samples.stop, f"sample {self._next} is missing"
        with writing(self._path):
            arrays = shard_arrays(self._manifest)
            records = self._at_once([self._appenders[array.path].finish for array in arrays])
            objects = {array.object_path(self._shard): item for array, item in zip(arrays, records, strict=True)}
            rejected: list[Json] = [item.to_dict() for item in self._rejections]
            if rejected:
                content = with_checksum({"rejected": rejected})
                objects |= write_object(self._path, rejected_list(self._shard), content)
            more: dict[str, Json] = {"scales": scales_checksum(self._scales)} if self._scales else {}
            seal = seal_content(
                self._manifest,
                objects,
                **more,
                shard=self._shard,
                samples=[self._samples.start, self._samples.stop],
                tokens=self._num_tokens,
                layers={str(i): size.to_dict() for i, size in self._sizes.items()},
                rejected=rejected,
            )
            write_file(self._path / shard_seal(self._shard), seal)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for appender in self._appenders.values():
            appender.abort()

    def _advance(self, sample: int) -> None:
        assert sample == self._next, f"sample {sample} comes where {self._next} belongs"
        assert sample in self._samples, f"sample {sample} is not of shard {self._shard}"
        self._next += 1


def remove_abandoned(path: Path) -> None:
    """Deletes what planners of the same store that died have left beside it. Raises StoreError if one is alive."""
    pattern = re.compile(rf"\.tmp-\d+-{re.escape(path.name)}")
    for entry in path.parent.iterdir():
        if pattern.fullmatch(entry.name) and not remove_unless_claimed(entry):
            raise StoreError("another command is planning this store", where=path, fix="wait until it ends")


def _write_metadata(root: Path, manifest: Manifest) -> dict[str, ObjectRecord]:
    """All zarr.json files but the root's and the target's."""
    arrays = plan_arrays(manifest)
    objects: dict[str, ObjectRecord] = {}
    for group in parent_groups(arrays):
        objects |= write_object(root, f"{group}/{METADATA}", group_metadata({}))
    for array in arrays:
        objects |= write_object(root, f"{array.path}/{METADATA}", array.metadata())
    return objects


def _write_tokens(
    root: Path,
    manifest: Manifest,
    layout: Layout,
    tokens: Iterable[Tokens],
    objects: dict[str, ObjectRecord],
    progress: Progress | None,
) -> dict[str, NDArray[Any]]:
    """Writes the token arrays shard by shard, adds them to `objects`, and returns columns of the sample table."""
    supervised = np.zeros(layout.num_samples, dtype=np.int32)
    content_ids = np.zeros((layout.num_samples, 16), dtype=np.uint8)
    stream = _reading_data(tokens)
    for shard in range(layout.num_shards):
        with ExitStack() as undo:
            appenders = [ShardAppender(root, array, shard) for array in token_arrays(manifest)]
            for appender in appenders:
                undo.callback(appender.abort)
            for sample in layout.shard_samples(shard):
                ids, mask = next(stream)
                assert len(ids) == len(mask) == layout.length[sample], f"sample {sample}: {len(ids)} tokens"
                appenders[0].write(int(layout.start[sample]), ids)
                appenders[1].write(int(layout.start[sample]), mask)
                supervised[sample] = np.count_nonzero(mask)
                content_ids[sample] = np.frombuffer(content_id(ids, mask), dtype=np.uint8)
                if progress is not None:
                    progress.update(len(ids))
            for array, appender in zip(token_arrays(manifest), appenders, strict=True):
                objects[array.object_path(shard)] = appender.finish()
    assert next(stream, None) is None, "more token rows than samples"
    return {
        "start": layout.start,
        "length": layout.length,
        "supervised": supervised,
        "content_id": content_ids,
    }


def _reading_data(tokens: Iterable[Tokens]) -> Iterator[Tokens]:
    """`tokens`, with trouble in reading them told from trouble in writing the store."""
    try:
        yield from tokens
    except OSError as error:
        raise DataError("the input data cannot be read", got=error, fix="check the input files") from error
