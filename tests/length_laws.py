"""Synthetic lengths for tests of the data order, from keyed hashes: no library can change them."""

from __future__ import annotations

from collections.abc import Callable
from math import log

import numpy as np
from numpy.typing import NDArray

from cache_tools.order import mix64_array

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
BUDGET = 49_152


def uniform(n: int, key: int) -> Floats:
    return (mix64_array(key, np.arange(n)) >> np.uint64(11)).astype(np.float64) / 2.0**53


def normal(n: int, key: int) -> Floats:
    """Box-Muller, so that no library stream is involved."""
    normals: Floats = np.sqrt(-2 * np.log(1 - uniform(n, key))) * np.cos(2 * np.pi * uniform(n, key + 1))
    return normals


def lognormal(n: int, sigma: float, *, mean: float = 2000) -> Ints:
    """Lengths of conversations: lognormal, clipped to 100..8192 tokens."""
    return np.exp(log(mean) - sigma**2 / 2 + sigma * normal(n, 1)).clip(100, 8192).astype(np.int64)


def truncated_lognormal(n: int) -> Ints:
    """Lognormal of sigma 0.75, only what falls into 100..8192 tokens; mean 2,000."""
    drawn = np.exp(7.384 + 0.75 * normal(n + n // 20 + 50, 1)).astype(np.int64)
    lengths: Ints = drawn[(drawn >= 100) & (drawn <= 8192)][:n]
    assert len(lengths) == n
    return lengths


def bimodal(n: int) -> Ints:
    """Short chats and long reasoning."""
    short, long = np.exp(6 + 0.4 * normal(n, 1)), np.exp(8.3 + 0.3 * normal(n, 3))
    return np.where(uniform(n, 5) < 0.6, short, long).clip(100, 8192).astype(np.int64)


def half_supervised(lengths: Ints) -> Ints:
    """Supervised tokens of each sample: a share around one half that varies much between samples."""
    n = len(lengths)
    return (lengths * (uniform(n, 7) + uniform(n, 8)) / 2).astype(np.int64)


LAWS: dict[str, Callable[[int], Ints]] = {
    "lognormal 0.75": lambda n: lognormal(n, 0.75),
    "lognormal 1.0": lambda n: lognormal(n, 1.0),
    "multiples of 64": lambda n: (lognormal(n, 0.75) + 63) // 64 * 64,
    "bimodal": bimodal,
}

EXTREMES: dict[str, Ints] = {
    "all equal": np.full(300, 1000),
    "one giant": np.append(lognormal(300, 0.75), BUDGET),
    "fewer samples than packs of a step": np.array([40_000, 30_000, 20_000]),
    "one sample": np.array([17]),
    "two samples, one pack": np.array([17, 18]),
    "very many tiny": np.full(60_000, 3),
}
