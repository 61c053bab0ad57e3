"""What the steps trained on, in a form that two runs can compare and a report can count."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cache_tools.order import mix64, mix64_array
from cache_tools.reader import Store

_SAMPLE_KEY = 0x6C6564676572  # separates these hashes from every other use of sample numbers


def extend_hash(chain: int, samples: NDArray[np.int64]) -> int:
    """The hash of all steps so far, 64 bits: `chain` covers those before, `samples` are this step's, in any order.

    It does not see how samples are spread over packs and ranks. Begin with 0.
    """
    as_a_set = mix64_array(_SAMPLE_KEY, samples).sum(dtype=np.uint64)  # addition modulo 2**64 knows no order
    return mix64(chain, int(as_a_set), len(samples))


def tokens_by_source(store: Store, samples: NDArray[np.int64]) -> dict[str, int]:
    """Tokens of `samples` by the name of the data source they come from; sources of equal names count together."""
    table = store.samples
    counts = np.zeros(len(store.manifest.data.sources), dtype=np.int64)
    np.add.at(counts, table.source[samples], table.length[samples])
    totals: dict[str, int] = {}
    for source, count in zip(store.manifest.data.sources, counts.tolist(), strict=True):
        totals[source.name] = totals.get(source.name, 0) + count
    return totals
