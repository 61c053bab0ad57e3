"""What the steps of reading cost, one at a time on one core: the profile behind the ratios of `store_read`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import google_crc32c
import numpy as np
from numcodecs import blosc
from numpy.typing import NDArray

from cache_tools.arrays import hidden_arrays
from cache_tools.codecs import CRC_BYTES
from cache_tools.reader import Store
from cache_tools.shard_files import MISSING, OpenShard

_MOST_CHUNKS = 64
_REPEATS = 10


def read_costs(path: Path) -> dict[str, float]:
    """CPU seconds per GB of decoded bfloat16 of each step, for the first shard of a lossless store in the page cache.

    The smallest of several tries: what other programs on the machine add is left out as far as it can be.
    """
    store = Store.open(path)
    (array,) = hidden_arrays(store.manifest, store.layer_ids[0]).values()
    shard = OpenShard(path / array.object_path(0), array)
    entries = [(at, size) for at, size in shard.index[:_MOST_CHUNKS].tolist() if at != int(MISSING)]
    encoded = [_read(shard, at, size) for at, size in entries]  # in memory, with its pages present
    size = sum(size for _, size in entries)
    mapped = np.memmap(path / array.object_path(0), np.uint8, "r")[entries[0][0] :][:size]
    chunk = np.ones(array.chunk_shape, array.dtype)
    room = np.ones(size, np.uint8)
    contents = [one[:-CRC_BYTES] for one in encoded]
    steps: dict[str, Callable[[], object]] = {
        "copy from the memory map": lambda: np.copyto(room, mapped),
        "preadv from the page cache": lambda: os.preadv(shard.descriptor, [room.data], entries[0][0]),
        "checksum in the processor's cache": lambda: [google_crc32c.value(contents[0]) for _ in contents],
    }
    if array.compressed:
        steps["decompress"] = lambda: [blosc.decompress(content, chunk) for content in contents]
    decoded_gb = len(entries) * chunk.nbytes / 1e9
    return {name: _smallest_cpu_seconds(step) / decoded_gb for name, step in steps.items()}


def cost_line(codec: str, costs: dict[str, float]) -> str:
    steps = ", ".join(f"{name} {cost:.3f}" for name, cost in costs.items())
    return f"one core, {codec}, CPU s/GB of bfloat16: {steps}"


def _read(shard: OpenShard, offset: int, num_bytes: int) -> NDArray[np.uint8]:
    return np.frombuffer(os.pread(shard.descriptor, num_bytes, offset), np.uint8).copy()


def _smallest_cpu_seconds(step: Callable[[], object]) -> float:
    seconds = []
    for _ in range(_REPEATS):
        begin = time.thread_time()
        step()
        seconds.append(time.thread_time() - begin)
    return min(seconds)
