"""Placement of samples on the row axis, against the rules in words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_tools.errors import DflashError
from cache_tools.layout import (
    TOKEN_CHUNK_ROWS,
    Layout,
    default_chunk_rows,
    default_shard_rows,
    padded_rows,
    plan_layout,
    round_up,
    token_chunk_rows,
)

CHUNK = st.sampled_from([1, 3, 4, 8])
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=80)


def plan(lengths: list[int], chunk: int, extra_chunks: int, window: int) -> Layout:
    shard_rows = round_up(max(lengths), chunk) + extra_chunks * chunk
    return plan_layout(np.array(lengths), chunk_rows=chunk, shard_rows=shard_rows, window=window)


@given(LENGTHS, CHUNK, st.integers(0, 9), st.integers(1, 20))
def test_no_sample_crosses_a_shard_overlaps_or_starts_inside_a_chunk(
    lengths: list[int], chunk: int, extra: int, window: int
) -> None:
    layout = plan(lengths, chunk, extra, window)
    ends = layout.start + layout.length
    assert (layout.start % chunk == 0).all()
    assert (layout.start // layout.shard_rows == (ends - 1) // layout.shard_rows).all()
    assert (layout.start[1:] >= ends[:-1]).all()
    assert layout.start[0] == 0
    assert layout.num_rows % chunk == 0
    assert layout.num_rows >= ends[-1] > layout.num_rows - chunk


@given(LENGTHS, CHUNK, st.integers(0, 9), st.integers(1, 20))
def test_rows_are_minimal_each_sample_lies_at_the_first_place_allowed_behind_the_one_before(
    lengths: list[int], chunk: int, extra: int, window: int
) -> None:
    layout = plan(lengths, chunk, extra, window)
    row = 0
    for start, length in zip(layout.start.tolist(), layout.length.tolist(), strict=True):
        while row % chunk or row // layout.shard_rows != (row + length - 1) // layout.shard_rows:
            row += 1
        assert start == row
        row += length


@given(LENGTHS, CHUNK, st.integers(0, 9), st.integers(1, 20))
def test_order_is_a_permutation_sorted_by_length_and_index_inside_windows_of_the_data(
    lengths: list[int], chunk: int, extra: int, window: int
) -> None:
    layout = plan(lengths, chunk, extra, window)
    expected = []
    for first in range(0, len(lengths), window):
        indexes = range(first, min(first + window, len(lengths)))
        expected += sorted(indexes, key=lambda index: (lengths[index], index))
    assert layout.order.tolist() == expected
    assert layout.length.tolist() == [lengths[index] for index in expected]
    assert layout.num_tokens == sum(lengths)


@given(LENGTHS, CHUNK, st.integers(0, 9))
def test_every_sample_is_in_exactly_the_shard_that_names_it(lengths: list[int], chunk: int, extra: int) -> None:
    layout = plan(lengths, chunk, extra, 7)
    seen = [sample for shard in range(layout.num_shards) for sample in layout.shard_samples(shard)]
    assert seen == list(range(len(lengths)))
    for shard in range(layout.num_shards):
        assert len(layout.shard_samples(shard)) > 0
        assert all(layout.shard_of(sample) == shard for sample in layout.shard_samples(shard))


def test_equal_lengths_give_an_equal_layout_which_is_pinned() -> None:
    lengths = np.array([9, 3, 8, 20, 1, 7])
    first, second = (plan_layout(lengths, chunk_rows=4, shard_rows=20, window=3) for _ in range(2))
    assert first.start.tolist() == second.start.tolist() == [0, 4, 20, 32, 40, 60]
    assert first.order.tolist() == [1, 2, 0, 4, 5, 3]
    assert first.num_rows == 80
    assert first.num_shards == 4


@given(st.integers(1, 8192), st.integers(1, 100_000), st.sampled_from([16, 48, 64, 128]))
def test_default_shard_fits_the_longest_sample_and_at_most_its_bytes_otherwise(
    hidden_size: int, longest: int, chunk: int
) -> None:
    rows = default_shard_rows(hidden_size, longest, chunk, shard_bytes=2**26)
    assert rows % chunk == 0
    assert rows >= longest
    assert rows == round_up(longest, chunk) or rows * hidden_size * 2 <= 2**26


@given(st.integers(1, 300), st.sampled_from([1, 16, 48, 64, 8192]))
def test_token_chunks_are_whole_chunks_and_divide_the_shard(num_chunks: int, chunk: int) -> None:
    rows = token_chunk_rows(chunk, num_chunks * chunk)
    assert rows % chunk == 0
    assert (num_chunks * chunk) % rows == 0
    assert rows <= max(TOKEN_CHUNK_ROWS, chunk)


@pytest.mark.parametrize(
    ("lengths", "chunk", "shard", "words"),
    [([5], 4, 10, "multiple"), ([9, 3], 4, 8, "9 tokens"), ([3, 0], 4, 8, "sample 1 of the data")],
)
def test_impossible_layouts_are_refused_in_words(lengths: list[int], chunk: int, shard: int, words: str) -> None:
    with pytest.raises(DflashError, match=words):
        plan_layout(np.array(lengths), chunk_rows=chunk, shard_rows=shard)


@given(st.lists(st.one_of(st.integers(1, 40), st.integers(500, 9000)), min_size=1, max_size=40), st.randoms())
def test_chunks_are_the_largest_that_pad_by_three_percent_at_most_or_the_smallest(
    lengths: list[int], random: Any
) -> None:
    def padding(rows: int) -> float:
        return sum(-length % rows for length in lengths) / sum(lengths)

    found = default_chunk_rows(np.array(lengths), compressed=False)
    assert found == next((rows for rows in (64, 32) if padding(rows) <= 0.03), 16)
    assert padded_rows(np.array(lengths, np.int32), found) == sum(lengths) + sum(-length % found for length in lengths)
    random.shuffle(lengths)
    assert default_chunk_rows(np.array(lengths), compressed=False) == found
    assert default_chunk_rows(np.array(lengths), compressed=True) == 64
