"""Reading a store: what it holds, and whole samples straight from their chunks."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache_tools.arrays import (
    METADATA,
    ArraySpec,
    hidden_arrays,
    scale_arrays,
    shard_arrays,
    target_array,
    teacher_arrays,
    token_arrays,
)
from cache_tools.codecs import float32_to_bf16_bits
from cache_tools.errors import CorruptError, StoreError
from cache_tools.files import RUN_VERIFY, TEMPORARY_NAME, Json, file_size, parse_json, reading, to_json
from cache_tools.layout import samples_between
from cache_tools.manifest import Manifest, TargetAttributes
from cache_tools.quantise import QUANTISED, decode
from cache_tools.sample_table import SampleTable
from cache_tools.scales import read_scales
from cache_tools.seals import (
    PLAN_SEAL,
    SCALES_SEAL,
    TARGET_SEAL,
    read_manifest,
    read_rejections,
    rejected_by_seal,
    sealed_shards,
    unlisted_rejection,
)
from cache_tools.shard_files import ShardFiles
from cache_tools.shards import ShardedArray


class Store:
    """An open store. Knows what was sealed when it was opened; later writers do not disturb it.

    Safe to use from many threads, after a fork, and to pickle (which opens it again).
    """

    def __init__(self, path: Path, manifest: Manifest, *, direct: bool) -> None:
        """Use `Store.open`."""
        self.path = path
        self.manifest = manifest
        self.direct = direct
        """Large reads go past the page cache: it would never see the same bytes twice."""
        self.sealed = frozenset(sealed_shards(path, manifest.layout.num_shards))
        self.has_target = (path / TARGET_SEAL).exists()
        self.has_scales = not scale_arrays(manifest) or (path / SCALES_SEAL).exists()
        self.rejections = {item.sample: item for item in read_rejections(path, self.sealed)}
        self._rejected_by_seal: dict[int, frozenset[int]] = {}  # samples by shard, for shards read from so far
        self.samples = SampleTable(path, manifest)
        files = ShardFiles(direct=direct)
        self._ids, self._mask = (ShardedArray(path, array, files) for array in token_arrays(manifest))
        self._hidden = {
            i: {name: ShardedArray(path, array, files) for name, array in hidden_arrays(manifest, i).items()}
            for i in manifest.layer_ids
        }
        self._teacher = {name: ShardedArray(path, array, files) for name, array in teacher_arrays(manifest).items()}

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, direct: bool | None = None) -> Store:
        """Opens a store without reading any chunk.

        `direct`: large reads go past the page cache; by default when the store may exceed half of the memory.
        Raises StoreError when there is none or one of an unknown format, CorruptError when it is damaged.
        """
        root = Path(path).absolute()
        manifest = read_manifest(root)
        if not (root / PLAN_SEAL).exists():
            raise CorruptError("the seal of the store's plan is missing", where=root / PLAN_SEAL, fix=RUN_VERIFY)
        if direct is None:
            direct = _largest_bytes(manifest) > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
        return cls(root, manifest, direct=direct)

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """The stored target layers: outputs of 0-based decoder layers."""
        return self.manifest.layer_ids

    @property
    def hidden_size(self) -> int:
        return self.manifest.target.hidden_size

    @property
    def num_samples(self) -> int:
        return self.manifest.layout.num_samples

    @property
    def num_tokens(self) -> int:
        return self.manifest.layout.num_tokens

    @property
    def num_shards(self) -> int:
        return self.manifest.layout.num_shards

    @property
    def rejected(self) -> frozenset[int]:
        """Samples of sealed shards that have no hidden states."""
        return frozenset(self.rejections)

    def without_rejected(self, samples: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
        """Those of `samples`, all of the store by default, that were not rejected; in the same order."""
        wanted = np.arange(self.num_samples) if samples is None else samples
        return wanted[~np.isin(wanted, np.fromiter(self.rejected, np.int64))]

    @property
    def complete(self) -> bool:
        """Every shard, the target's weights and the scales of quantised states are there."""
        return len(self.sealed) == self.num_shards and self.has_target and self.has_scales

    def require_complete(self) -> None:
        """Raises StoreError when something was not computed yet."""
        if not self.complete:
            raise StoreError(
                "the store is not complete",
                where=self.path,
                got=f"{len(self.sealed)} of {self.num_shards} shards, target's weights "
                + ("written" if self.has_target else "missing")
                + ("" if self.has_scales else ", channel scales missing"),
                fix="run the `dflash-precompute run` command that made it again; it computes what is missing",
            )

    def shard_of(self, sample: int) -> int:
        """The shard that holds a sample."""
        return int(self.samples.start[self._checked(sample)]) // self.manifest.layout.shard_rows

    def shard_samples(self, shard: int) -> range:
        """The samples of a shard."""
        rows = self.manifest.layout.shard_rows
        return samples_between(self.samples.start, shard * rows, (shard + 1) * rows)

    def read_tokens(self, sample: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Token ids [length] and loss mask [length] of a sample. Raises StoreError, CorruptError."""
        length = int(self.samples.length[self._checked(sample)])
        start = int(self.samples.start[sample])
        ids, mask = np.empty(length, dtype=np.int32), np.empty(length, dtype=np.uint8)
        self._ids.read_rows(start, ids, f"sample {sample}")
        self._mask.read_rows(start, mask, f"sample {sample}")
        return ids, mask.astype(np.bool_)

    def read_shard_tokens(self, shard: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Token ids and loss mask of all rows of a shard in one piece, [rows] each; rows without a sample hold 0.

        Its first row is `shard * shard_rows`. Raises CorruptError.
        """
        layout = self.manifest.layout
        first = shard * layout.shard_rows
        num_rows = min(layout.shard_rows, layout.num_rows - first)
        ids, mask = np.empty(num_rows, dtype=np.int32), np.empty(num_rows, dtype=np.uint8)
        self._ids.read_rows(first, ids, f"shard {shard}")
        self._mask.read_rows(first, mask, f"shard {shard}")
        return ids, mask.astype(np.bool_)

    def read_hidden(
        self, sample: int, layer_ids: Sequence[int] | None = None, out: NDArray[np.uint16] | None = None
    ) -> NDArray[np.uint16]:
        """bfloat16 bit patterns [length, num_layers, hidden_size] of a sample; all stored layers by default.

        `out` receives them if given (it may be strided). Raises StoreError for a sample without hidden states
        or a layer that is not stored, CorruptError when bytes are damaged.
        """
        length = int(self.samples.length[self._checked(sample)])
        self._require_hidden(sample)
        shape = (length, len(self.layer_ids if layer_ids is None else layer_ids), self.hidden_size)
        if out is None:
            out = np.empty(shape, dtype=np.uint16)
        assert out.shape == shape, f"out has shape {out.shape}, the sample {shape}"
        assert out.dtype == np.uint16, f"out is {out.dtype}, not uint16"
        for i, layer_id in enumerate(self.layer_ids if layer_ids is None else layer_ids):
            if self.manifest.codec in QUANTISED:
                out[:, i] = self._decoded(sample, layer_id)
            else:
                self._layer(layer_id)["bits"].read_rows(int(self.samples.start[sample]), out[:, i], f"sample {sample}")
        return out

    def read_parts(
        self, sample: int, layer_id: int, out: Mapping[str, NDArray[Any]] | None = None
    ) -> Mapping[str, NDArray[Any]]:
        """The arrays of one layer of a sample as they are stored, [length, ...] by name; `first` is [1, hidden_size].

        Row 0 of all but `first` is zero. `out` receives them if given. Raises StoreError, CorruptError.
        """
        self._require_hidden(self._checked(sample))
        out = self._part_buffers(sample, layer_id) if out is None else out
        assert set(out) == set(self._layer(layer_id)), f"parts {sorted(out)}"
        for name, array in self._layer(layer_id).items():
            first = self._first_row(sample) if name == "first" else int(self.samples.start[sample])
            array.read_rows(first, out[name], f"sample {sample}")
        return out

    def _part_buffers(self, sample: int, layer_id: int) -> dict[str, NDArray[Any]]:
        length = int(self.samples.length[sample])
        return {
            name: np.empty((1 if name == "first" else length, *array.array.shape[1:]), array.array.dtype)
            for name, array in self._layer(layer_id).items()
        }

    def read_teacher(self, sample: int) -> dict[str, NDArray[Any]]:
        """What is stored of the target's prediction for a sample, [length, ...] by the names of `teacher_arrays`.

        Rows that were not kept are zeros. Raises StoreError, CorruptError.
        """
        length = int(self.samples.length[self._checked(sample)])
        self._require_hidden(sample)
        read: dict[str, NDArray[Any]] = {}
        for name, array in self._teacher.items():
            read[name] = np.empty((length, *array.array.shape[1:]), dtype=array.array.dtype)
            array.read_rows(int(self.samples.start[sample]), read[name], f"sample {sample}")
        return read

    @cached_property
    def channel_scales(self) -> dict[int, NDArray[np.float32]]:
        """Static scales [hidden_size] of a quantised store by layer id. Raises StoreError, CorruptError."""
        return read_scales(self.path, self.manifest)

    def _decoded(self, sample: int, layer_id: int) -> NDArray[np.uint16]:
        """bfloat16 bit patterns [length, hidden_size] of a quantised layer, the first row exact."""
        encoded = dict(self.read_parts(sample, layer_id))
        first = encoded.pop("first")
        bits = float32_to_bf16_bits(decode(self.manifest.codec, encoded, self.channel_scales[layer_id]))
        bits[:1] = first
        return bits

    def _first_row(self, sample: int) -> int:
        """The sample's row in the arrays of first tokens."""
        shard = self.shard_of(sample)
        return shard * self.manifest.layout.samples_per_shard + sample - self.shard_samples(shard).start

    @cached_property
    def target_attributes(self) -> TargetAttributes:
        """How to use the target's weights. Raises StoreError when they were not written yet."""
        path = self.path / "target" / METADATA
        return TargetAttributes.from_dict(self._target_json(path).get("attributes"), path)

    def target_array(self, name: str) -> NDArray[Any]:
        """`embed_tokens`, `lm_head` or `final_norm`: uint16 bfloat16 bit patterns, or float32 values.

        Raises StoreError when it is not stored (`lm_head` of a tied target, or all of them before the first run).
        """
        for kind in ("bits", "values"):
            path = self.path / "target" / name / kind / METADATA
            if path.exists():
                metadata = self._target_json(path)
                return ShardedArray(self.path, target_spec(name, metadata, path)).read_all()
        self._target_json(self.path / "target" / METADATA)
        raise StoreError(
            f"the store holds no weight {name!r} of the target",
            where=self.path / "target",
            expected="embed_tokens, final_norm, and lm_head unless the target ties it to embed_tokens",
        )

    def target_file(self, name: str) -> Path:
        """A file of the target, for example tokenizer.json. Raises StoreError when it is not stored."""
        path = self.path / "target" / "files" / name
        if not path.is_file():
            raise StoreError(
                f"the store holds no file {name!r} of the target",
                where=path.parent,
                expected=", ".join(self.target_files()) or "none was stored",
            )
        return path

    def target_files(self) -> list[str]:
        """Names of the target's files."""
        folder = self.path / "target" / "files"
        return sorted(item.name for item in folder.iterdir()) if folder.is_dir() else []

    def bytes_on_disk(self) -> int:
        """Sizes of all files of the store, without half-written ones."""
        return sum(
            file_size(os.path.join(folder, name))
            for folder, _, names in os.walk(self.path)
            for name in names
            if not TEMPORARY_NAME.fullmatch(name)
        )

    def __reduce__(self) -> tuple[Callable[[Path], Store], tuple[Path]]:
        return partial(Store.open, direct=self.direct), (self.path,)

    def _checked(self, sample: int) -> int:
        if not 0 <= sample < self.num_samples:
            raise StoreError(
                "no such sample",
                where=self.path,
                got=f"sample {sample}",
                expected=f"0 to {self.num_samples - 1}",
            )
        return sample

    def _require_hidden(self, sample: int) -> None:
        shard = self.shard_of(sample)
        if shard not in self.sealed:
            raise StoreError(
                f"the hidden states of sample {sample} are not there yet",
                where=self.path,
                got=f"shard {shard} is not sealed",
                fix="run the `dflash-precompute run` command that made the store again",
            )
        rejection = self.rejections.get(sample)
        if rejection is not None:
            raise StoreError(
                f"sample {sample} has no hidden states: it was rejected when they were computed",
                where=self.path,
                got=f"layer {rejection.layer}: {rejection.reason}",
                fix="leave it out",
            )
        if shard not in self._rejected_by_seal:  # only now: opening must not take longer the more shards there are
            self._rejected_by_seal[shard] = rejected_by_seal(self.path, shard)
        if sample in self._rejected_by_seal[shard]:
            raise unlisted_rejection(self.path, shard, sample)

    def _layer(self, layer_id: int) -> dict[str, ShardedArray]:
        if layer_id not in self._hidden:
            raise StoreError(
                "the store does not hold this layer",
                where=self.path,
                got=f"layer {layer_id}",
                expected=f"one of {', '.join(map(str, self.layer_ids))}",
            )
        return self._hidden[layer_id]

    def _target_json(self, path: Path) -> dict[str, Json]:
        if not self.has_target:
            raise StoreError(
                "the target's weights were not written yet",
                where=self.path,
                fix="run the `dflash-precompute run` command that made the store again",
            )
        if not path.exists():
            raise CorruptError("the metadata of the target is missing", where=path, fix=RUN_VERIFY)
        with reading(path):
            return parse_json(path.read_bytes(), path)


def _largest_bytes(manifest: Manifest) -> int:
    """Bytes of all that the shards hold if nothing could be compressed."""
    return sum(math.prod(array.shape) * np.dtype(array.dtype).itemsize for array in shard_arrays(manifest))


def target_spec(name: str, metadata: dict[str, Json], path: Path) -> ArraySpec:
    """The array that the metadata at `path` describes, which must be what `target_array` would write."""
    shape, dtype = metadata.get("shape"), metadata.get("data_type")
    sizes = [size for size in shape if isinstance(size, int) and size > 0] if isinstance(shape, list) else []
    if sizes and sizes == shape and dtype in ("uint16", "float32"):
        array = target_array(name, dtype, tuple(sizes))
        if to_json(metadata) == array.metadata():
            return array
    raise CorruptError("damaged metadata of a target array", where=path, fix=RUN_VERIFY)
