"""Stores that must not exceed a number of bytes: how large a plan can become at worst, and which samples fit.

The bound is exact where nothing is compressed; where something is, it counts every chunk as incompressible. So a
store that was planned within a budget stays within it, whatever the target computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from cache_tools.arrays import (
    ArraySpec,
    group_metadata,
    parent_groups,
    plan_arrays,
    scale_arrays,
    shard_arrays,
    target_array,
)
from cache_tools.codecs import CRC_BYTES
from cache_tools.errors import ConfigError
from cache_tools.layout import padded_rows
from cache_tools.manifest import Manifest
from cache_tools.order import Permutation
from cache_tools.seals import root_metadata, seal_content
from cache_tools.shard_files import INDEX_ENTRY_BYTES
from cache_tools.shards import ObjectRecord

_BLOSC_BYTES = 16  # what Blosc adds to a chunk that it cannot compress
_ENGINE_BYTES = 4096  # the engine in the manifest, versions of packages included
_SMALL_FILE_BYTES = 2048  # a zarr.json below target/
_STATISTICS_BYTES = 160  # of one layer in the seal of a shard
_LONGEST_RECORD = ObjectRecord(10**15, "0" * 8)


def largest_size(manifest: Manifest, lengths: NDArray[np.int64], files: Mapping[str, bytes]) -> int:
    """Bytes that all files of the store together have at most, for samples of these lengths."""
    layout = manifest.layout
    chunks_of_samples = padded_rows(lengths, layout.chunk_rows) // layout.chunk_rows
    sizes = [len(root_metadata(manifest)) + _ENGINE_BYTES, *map(len, files.values())]
    arrays = plan_arrays(manifest)
    sizes += [len(group_metadata({})) for _ in parent_groups(arrays)]
    sizes += [len(array.metadata()) for array in arrays]
    for array in arrays:
        # One row per chunk: first tokens, or, if the settings say so, every array.
        most = {1: layout.num_samples, layout.chunk_rows: chunks_of_samples}.get(array.chunk_rows)
        sizes.append(_array_size(array, most if array in shard_arrays(manifest) else None))
    sizes += _target_sizes(manifest)
    sizes += _seal_sizes(manifest, arrays, files)
    return sum(sizes)


def samples_within(
    num_samples: int, size_of: Callable[[NDArray[np.int64]], int], max_bytes: int
) -> NDArray[np.int64] | None:
    """The largest keyed choice of samples, ascending, whose store has at most `max_bytes`; None if all do.

    The choice is the same for everybody, in equal shares from all over the data, and a larger budget only adds to it.
    `size_of`: bytes at most of a store of these samples. Raises ConfigError when not even one fits.
    """
    everything = np.arange(num_samples)
    if size_of(everything) <= max_bytes:
        return None
    shuffled = Permutation(num_samples, seed=0, epoch=0)(everything)
    fitting, too_many = 0, num_samples
    while too_many - fitting > 1:
        middle = (fitting + too_many) // 2
        if size_of(np.sort(shuffled[:middle])) <= max_bytes:
            fitting = middle
        else:
            too_many = middle
    if not fitting:
        raise ConfigError(
            "not a single sample fits into the bytes allowed",
            got=f"--max-bytes {max_bytes:,}",
            expected=f"at least {size_of(shuffled[:1]):,}, most of it the target's embedding and output head",
        )
    return np.sort(shuffled[:fitting])


def _array_size(array: ArraySpec, most_chunks: int | None) -> int:
    """All files of an array, whose rows are written all, or so that they touch `most_chunks`."""
    num_chunks = -(-array.shape[0] // array.chunk_rows)
    chunk_bytes = np.dtype(array.dtype).itemsize * int(np.prod(array.chunk_shape))
    chunk_bytes += CRC_BYTES + (_BLOSC_BYTES if array.compressed else 0)
    index_bytes = array.num_chunks * INDEX_ENTRY_BYTES + CRC_BYTES
    return min(num_chunks, most_chunks or num_chunks) * chunk_bytes + array.num_shards * index_bytes


def _target_sizes(manifest: Manifest) -> list[int]:
    """The target's weights, as if its output head were not tied to its embedding."""
    target = manifest.target
    dtype = "uint16" if target.dtype == "bfloat16" else "float32"
    table = target_array("embed_tokens", dtype, (target.vocab_size, target.hidden_size))
    norm = target_array("final_norm", "float32", (target.hidden_size,))
    num_small_files = 8  # three arrays, three groups, theirs, and the seal
    return [2 * _array_size(table, None), _array_size(norm, None), num_small_files * _SMALL_FILE_BYTES]


def _seal_sizes(manifest: Manifest, arrays: list[ArraySpec], files: Mapping[str, bytes]) -> list[int]:
    def size(names: list[str]) -> int:
        content = seal_content(manifest, dict.fromkeys(names, _LONGEST_RECORD), scales="0" * 8, bound="0" * 8)
        return len(content)

    of_shard = {array.path for array in shard_arrays(manifest)}
    planned = [array.object_path(i) for array in arrays if array.path not in of_shard for i in range(array.num_shards)]
    planned += [f"{path}/zarr.json" for path in [*parent_groups(arrays), *(array.path for array in arrays)]]
    shard = size([array.object_path(manifest.layout.num_shards) for array in shard_arrays(manifest)])
    shard += len(manifest.layer_ids) * _STATISTICS_BYTES + _STATISTICS_BYTES
    scales = size([array.object_path(0) for array in scale_arrays(manifest).values()])
    return [size([*planned, *(f"target/files/{name}" for name in files)]), scales, shard * manifest.layout.num_shards]
