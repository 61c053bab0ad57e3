"""Where each sample lies on the store's row axis: a pure function of the samples' lengths."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cache_tools.errors import ConfigError, StoreError

DEFAULT_CHUNK_ROWS = 64
DEFAULT_SHARD_BYTES = 256 * 2**20
TOKEN_CHUNK_ROWS = 4096
_BYTES_PER_VALUE = 2
_UNCOMPRESSED_CHUNK_ROWS = (64, 32, 16)
_MOST_PADDING_PERCENT = 3


@dataclass(frozen=True)
class Layout:
    """Samples in the order in which they lie in the store; row numbers count tokens plus padding.

    No sample crosses a shard, each starts on a chunk boundary, and starts ascend.
    """

    order: NDArray[np.int64]
    """[num_samples] sample i of the store is number order[i] of the data."""
    start: NDArray[np.int64]
    """[num_samples] first row of each sample."""
    length: NDArray[np.int64]
    """[num_samples] tokens of each sample."""
    chunk_rows: int
    shard_rows: int

    @property
    def num_samples(self) -> int:
        return len(self.start)

    @property
    def num_tokens(self) -> int:
        return int(self.length.sum())

    @property
    def num_rows(self) -> int:
        """Rows up to the end of the last sample's last chunk."""
        if not self.num_samples:
            return 0
        return round_up(int(self.start[-1] + self.length[-1]), self.chunk_rows)

    @property
    def num_shards(self) -> int:
        return -(-self.num_rows // self.shard_rows)

    @property
    def samples_per_shard(self) -> int:
        """Most samples in any shard."""
        return int(np.bincount(self.start // self.shard_rows).max(initial=0))

    def shard_of(self, sample: int) -> int:
        """The shard that holds a sample."""
        return int(self.start[sample]) // self.shard_rows

    def shard_samples(self, shard: int) -> range:
        """The samples of a shard."""
        return samples_between(self.start, shard * self.shard_rows, (shard + 1) * self.shard_rows)


def plan_layout(lengths: NDArray[np.int64], *, chunk_rows: int, shard_rows: int, window: int = 4096) -> Layout:
    """Places samples of the given lengths, [num_samples] in data order, on the row axis.

    The data is cut into windows; inside one, samples lie sorted by (length, index). Neighbours then have
    similar lengths, which makes padded batches of the target cheap, while any set of windows is representative.

    Raises ConfigError when `shard_rows` does not fit, StoreError when a sample has no tokens.
    """
    _check_rows(chunk_rows, shard_rows)
    lengths = np.asarray(lengths, dtype=np.int64)
    if len(lengths) and lengths.min() < 1:
        raise StoreError("a sample has no tokens", where=f"sample {int(lengths.argmin())} of the data")
    if len(lengths) and lengths.max() > shard_rows:
        raise ConfigError(
            "a sample does not fit into a shard",
            got=f"{int(lengths.max())} tokens, {shard_rows} rows per shard",
            fix="make shards larger, or limit the length of samples",
        )
    index = np.arange(len(lengths))
    order = np.lexsort((index, lengths, index // window)).astype(np.int64)
    placed = lengths[order]
    return Layout(order, _starts(placed, chunk_rows, shard_rows), placed, chunk_rows, shard_rows)


def default_chunk_rows(lengths: NDArray[np.integer], *, compressed: bool) -> int:
    """Rows per chunk for samples of these lengths, where nobody asks for another number.

    Every sample is padded to whole chunks. Compression makes that free, so there it is always 64. Elsewhere it is the
    largest of 64, 32 and 16 that adds at most 3 % to the tokens, or 16: a chunk more costs 20 bytes, a row thousands.
    """
    if compressed:
        return DEFAULT_CHUNK_ROWS
    num_tokens = int(lengths.sum(dtype=np.int64))
    for rows in _UNCOMPRESSED_CHUNK_ROWS:
        if 100 * (padded_rows(lengths, rows) - num_tokens) <= _MOST_PADDING_PERCENT * num_tokens:
            return rows
    return _UNCOMPRESSED_CHUNK_ROWS[-1]


def padded_rows(lengths: NDArray[np.integer], chunk_rows: int) -> int:
    """Rows of samples of these lengths, each padded to whole chunks."""
    return int((-(-lengths.astype(np.int64) // chunk_rows)).sum()) * chunk_rows


def default_shard_rows(hidden_size: int, longest: int, chunk_rows: int, shard_bytes: int = DEFAULT_SHARD_BYTES) -> int:
    """Rows per shard so that one layer's uncompressed shard takes about `shard_bytes`.

    A multiple of `chunk_rows`, where possible also of TOKEN_CHUNK_ROWS, and at least `longest` tokens.
    """
    rows = shard_bytes // (hidden_size * _BYTES_PER_VALUE)
    step = int(np.lcm(chunk_rows, TOKEN_CHUNK_ROWS))
    if rows < max(step, longest):
        step = chunk_rows
    return max(rows // step * step, round_up(longest, chunk_rows), chunk_rows)


def token_chunk_rows(chunk_rows: int, shard_rows: int) -> int:
    """Rows per chunk of the token arrays: whole chunks of hidden states, at most about TOKEN_CHUNK_ROWS."""
    per_shard = shard_rows // chunk_rows
    most = max(TOKEN_CHUNK_ROWS // chunk_rows, 1)
    return chunk_rows * max(count for count in range(1, most + 1) if per_shard % count == 0)


def samples_between(start: NDArray[np.int64], first_row: int, end_row: int) -> range:
    """The samples whose first row lies in [first_row, end_row)."""
    first, end = np.searchsorted(start, [first_row, end_row])
    return range(int(first), int(end))


def round_up(value: int, step: int) -> int:
    """The smallest multiple of `step` that is at least `value`."""
    return -(-value // step) * step


def _starts(lengths: NDArray[np.int64], chunk_rows: int, shard_rows: int) -> NDArray[np.int64]:
    """First rows: each sample directly behind the one before, or in the next shard when it would cross."""
    ends = np.cumsum(-(-lengths // chunk_rows) * chunk_rows)
    starts = ends - -(-lengths // chunk_rows) * chunk_rows
    result = np.empty_like(starts)
    first = shard = 0
    while first < len(lengths):
        end = int(np.searchsorted(ends, starts[first] + shard_rows, side="right"))
        result[first:end] = starts[first:end] - starts[first] + shard * shard_rows
        first, shard = end, shard + 1
    return result


def _check_rows(chunk_rows: int, shard_rows: int) -> None:
    if chunk_rows < 1 or shard_rows < 1 or shard_rows % chunk_rows:
        raise ConfigError(
            "rows per shard must be a multiple of rows per chunk",
            got=f"{shard_rows} and {chunk_rows}",
            fix="choose another number of rows per chunk, or another shard size",
        )
