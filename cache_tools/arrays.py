"""The arrays of a store: names, types, chunking, and their Zarr v3 metadata."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

import numpy as np

from cache_tools.codecs import ChunkCodec
from cache_tools.files import Json, to_json
from cache_tools.layout import token_chunk_rows
from cache_tools.manifest import LayoutSpec, Manifest
from cache_tools.quantise import QUANTISED, Part, parts
from cache_tools.teacher import Teacher

METADATA = "zarr.json"
_SAMPLE_CHUNK_ROWS = 65536
_SAMPLE_CHUNKS_PER_SHARD = 16
_SCALAR_CHUNKS = 16
_TARGET_CHUNK_BYTES = 2**20
_TARGET_CHUNKS_PER_SHARD = 256
_SAMPLE_COLUMNS = {
    "start": ("int64", "first row of the sample"),
    "length": ("int32", "tokens of the sample"),
    "supervised": ("int32", "tokens whose loss mask is 1"),
    "source": ("int32", "index into data.sources of the manifest"),
    "row": ("int64", "0-based row number in that source"),
}


@dataclass(frozen=True)
class ArraySpec:
    """One array of rows. A shard is one file (object); a chunk is the part of it that is read alone."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    chunk_rows: int
    shard_rows: int
    compressed: bool = True
    attributes: Mapping[str, Json] = field(default_factory=dict)

    @property
    def num_shards(self) -> int:
        return -(-self.shape[0] // self.shard_rows)

    @property
    def num_chunks(self) -> int:
        """Chunks per shard."""
        return self.shard_rows // self.chunk_rows

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        return (self.chunk_rows, *self.shape[1:])

    @property
    def codec(self) -> ChunkCodec:
        return ChunkCodec(np.dtype(self.dtype).itemsize, self.compressed)

    def object_path(self, shard: int) -> str:
        """The shard's file, relative to the store."""
        return "/".join([self.path, "c", str(shard)] + ["0"] * (len(self.shape) - 1))

    def metadata(self) -> bytes:
        """The array's zarr.json."""
        index_codecs: list[Json] = [
            {"name": "bytes", "configuration": {"endian": "little"}},
            {"name": "crc32c"},
        ]
        sharding: dict[str, Json] = {
            "chunk_shape": list(self.chunk_shape),
            "codecs": self.codec.metadata(),
            "index_codecs": index_codecs,
            "index_location": "end",
        }
        grid: dict[str, Json] = {"chunk_shape": [self.shard_rows, *self.shape[1:]]}
        return to_json(
            {
                "zarr_format": 3,
                "node_type": "array",
                "shape": list(self.shape),
                "data_type": self.dtype,
                "chunk_grid": {"name": "regular", "configuration": grid},
                "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
                "fill_value": 0.0 if self.dtype.startswith("float") else 0,
                "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
                "attributes": dict(self.attributes),
            }
        )


def group_metadata(attributes: Mapping[str, Json]) -> bytes:
    """The zarr.json of a group."""
    return to_json({"zarr_format": 3, "node_type": "group", "attributes": dict(attributes)})


def hidden_arrays(manifest: Manifest, layer_id: int) -> dict[str, ArraySpec]:
    """The arrays that hold one target layer's hidden states, shard by shard, by name.

    Lossless codecs: `bits`, uint16 [num_rows, hidden_size], bfloat16 bit patterns. Quantised codecs: the parts of
    `quantise.parts` [num_rows, ...], and `first`, uint16 [num_shards * samples_per_shard, hidden_size]: the bit
    patterns of each sample's first token, an attention sink that no scale fits.
    """
    layout, hidden_size = manifest.layout, manifest.target.hidden_size
    attributes: dict[str, Json] = {
        "layer_id": layer_id,
        "layer_id_convention": manifest.layer_id_convention,
        "arithmetic": manifest.arithmetic,
    }
    bits: dict[str, Json] = {"dtype": "bfloat16 bit patterns", **attributes}
    if manifest.codec not in QUANTISED:
        compressed = manifest.codec == "bf16"
        rows = (layout.chunk_rows, layout.shard_rows)
        shape = (layout.num_rows, hidden_size)
        return {"bits": ArraySpec(f"hidden/{layer_id}/bits", "uint16", shape, *rows, compressed, bits)}
    arrays = {
        name: ArraySpec(
            path=f"hidden/{layer_id}/{name}",
            dtype=part.dtype,
            shape=(layout.num_rows, *part.row_shape),
            chunk_rows=_part_chunk_rows(layout, part),
            shard_rows=layout.shard_rows,
            compressed=False,
            attributes=attributes,
        )
        for name, part in parts(manifest.codec, hidden_size).items()
    }
    most = layout.samples_per_shard
    shape = (layout.num_shards * most, hidden_size)
    arrays["first"] = ArraySpec(f"hidden/{layer_id}/first", "uint16", shape, 1, most, compressed=False, attributes=bits)
    return arrays


def teacher_arrays(manifest: Manifest) -> dict[str, ArraySpec]:
    """The arrays of the target's prediction, [num_rows, ...], by name; none if the store has no teacher.

    `bits`: input of the final norm, bfloat16 bit patterns. `topk_ids`, `topk_logprobs`: most likely first.
    """
    layout, teacher = manifest.layout, Teacher.parse(manifest.teacher)
    rows = (layout.chunk_rows, layout.shard_rows)
    if teacher.kind == "none":
        return {}
    if teacher.kind == "hidden":
        attributes: dict[str, Json] = {"dtype": "bfloat16 bit patterns", "meaning": "input of the target's final norm"}
        shape = (layout.num_rows, manifest.target.hidden_size)
        return {"bits": ArraySpec("last/bits", "uint16", shape, *rows, attributes=attributes)}
    shape = (layout.num_rows, teacher.k)
    ids: dict[str, Json] = {"meaning": "likeliest next tokens, most likely first"}
    values: dict[str, Json] = {
        "meaning": "their natural log-probabilities; what is missing from 1 lies on other tokens"
    }
    return {
        "topk_ids": ArraySpec("last/topk_ids", "int32", shape, *rows, attributes=ids),
        "topk_logprobs": ArraySpec("last/topk_logprobs", "float32", shape, *rows, attributes=values),
    }


def shard_arrays(manifest: Manifest) -> list[ArraySpec]:
    """All arrays that are written shard by shard, and that a shard's seal names."""
    hidden = [array for layer_id in manifest.layer_ids for array in hidden_arrays(manifest, layer_id).values()]
    return [*hidden, *teacher_arrays(manifest).values()]


def scale_arrays(manifest: Manifest) -> dict[int, ArraySpec]:
    """The static channel scales of a quantised store, float32 [hidden_size], by layer id; none for lossless codecs."""
    if manifest.codec not in QUANTISED:
        return {}
    size = manifest.target.hidden_size
    attributes: dict[str, Json] = {"meaning": "static scale of each channel"}
    return {
        i: ArraySpec(f"hidden/{i}/channel_scale", "float32", (size,), size, size, False, attributes)
        for i in manifest.layer_ids
    }


def _part_chunk_rows(layout: LayoutSpec, part: Part) -> int:
    """A few bytes per row would make tiny chunks: those arrays get more rows per chunk."""
    if part.row_shape:
        return layout.chunk_rows
    per_shard = layout.shard_rows // layout.chunk_rows
    return layout.chunk_rows * max(n for n in range(1, _SCALAR_CHUNKS + 1) if per_shard % n == 0)


def token_arrays(manifest: Manifest) -> tuple[ArraySpec, ArraySpec]:
    """Token ids, int32 [num_rows], and loss mask, uint8 [num_rows]."""
    layout = manifest.layout
    rows = (token_chunk_rows(layout.chunk_rows, layout.shard_rows), layout.shard_rows)
    return (
        ArraySpec("tokens/input_ids", "int32", (layout.num_rows,), *rows),
        ArraySpec("tokens/loss_mask", "uint8", (layout.num_rows,), *rows, attributes={"meaning": "1 = supervised"}),
    )


def sample_arrays(manifest: Manifest) -> dict[str, ArraySpec]:
    """One entry per sample, in row order; by column name."""
    count = manifest.layout.num_samples
    chunk_rows = min(_SAMPLE_CHUNK_ROWS, count)
    rows = (chunk_rows, chunk_rows * _SAMPLE_CHUNKS_PER_SHARD)
    columns = {
        name: ArraySpec(f"samples/{name}", dtype, (count,), *rows, attributes={"meaning": meaning})
        for name, (dtype, meaning) in _SAMPLE_COLUMNS.items()
    }
    meaning: dict[str, Json] = {"meaning": "BLAKE2b-128 of token ids (int32, little-endian) and loss mask"}
    columns["content_id"] = ArraySpec("samples/content_id", "uint8", (count, 16), *rows, attributes=meaning)
    return columns


def target_array(name: str, dtype: str, shape: tuple[int, ...]) -> ArraySpec:
    """A weight of the target: `bits` (bfloat16 bit patterns) for uint16, `values` for float32."""
    assert dtype in ("uint16", "float32"), f"{name}: {dtype}"
    is_bits = dtype == "uint16"
    row_bytes = np.dtype(dtype).itemsize * math.prod(shape[1:])
    chunk_rows = max(min(_TARGET_CHUNK_BYTES // row_bytes, shape[0]), 1)
    return ArraySpec(
        path=f"target/{name}/{'bits' if is_bits else 'values'}",
        dtype=dtype,
        shape=shape,
        chunk_rows=chunk_rows,
        shard_rows=chunk_rows * _TARGET_CHUNKS_PER_SHARD,
        attributes={"dtype": "bfloat16 bit patterns" if is_bits else "float32"},
    )


def plan_arrays(manifest: Manifest) -> list[ArraySpec]:
    """The arrays whose metadata is written by planning: all but the target's weights."""
    scales = scale_arrays(manifest).values()
    return [*token_arrays(manifest), *sample_arrays(manifest).values(), *scales, *shard_arrays(manifest)]


def parent_groups(arrays: Iterable[ArraySpec]) -> list[str]:
    """Paths of the groups that hold these arrays, without the root."""
    parents = {str(parent) for array in arrays for parent in PurePosixPath(array.path).parents}
    return sorted(parents - {"."})
