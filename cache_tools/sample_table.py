"""The table of a store's samples: one entry per sample, columns read when asked for."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache_tools.arrays import sample_arrays
from cache_tools.manifest import Manifest
from cache_tools.shards import ShardedArray


class SampleTable:
    """One entry per sample, in row order. A column is read when it is first asked for, and kept."""

    def __init__(self, root: Path, manifest: Manifest) -> None:
        self._root = root
        self._arrays = sample_arrays(manifest)

    @cached_property
    def start(self) -> NDArray[np.int64]:
        """[num_samples] first row."""
        return self._column("start")

    @cached_property
    def length(self) -> NDArray[np.int32]:
        """[num_samples] tokens."""
        return self._column("length")

    @cached_property
    def supervised(self) -> NDArray[np.int32]:
        """[num_samples] tokens whose loss mask is 1."""
        return self._column("supervised")

    @cached_property
    def source(self) -> NDArray[np.int32]:
        """[num_samples] index into the manifest's data.sources."""
        return self._column("source")

    @cached_property
    def row(self) -> NDArray[np.int64]:
        """[num_samples] 0-based row number in the source."""
        return self._column("row")

    @cached_property
    def content_id(self) -> NDArray[np.uint8]:
        """[num_samples, 16] hash of token ids and loss mask."""
        return self._column("content_id")

    def _column(self, name: str) -> NDArray[Any]:
        return ShardedArray(self._root, self._arrays[name]).read_all()
