"""Batches cover every sample once, in order, within the token budget."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from precompute.batching import plan_batches

LENGTHS = st.lists(st.integers(1, 100), max_size=60)


@given(LENGTHS, st.integers(1, 300))
def test_batches_partition_the_samples_in_order(lengths: list[int], batch_tokens: int) -> None:
    batches = plan_batches(lengths, batch_tokens)
    assert [index for batch in batches for index in batch] == list(range(len(lengths)))


@given(LENGTHS, st.integers(1, 300))
def test_padded_tokens_stay_within_the_budget_unless_one_sample_is_longer(
    lengths: list[int], batch_tokens: int
) -> None:
    for batch in plan_batches(lengths, batch_tokens):
        part = lengths[batch.start : batch.stop]
        padded = len(part) * max(part)
        assert padded <= batch_tokens or len(part) == 1
        assert 2 * sum(part) >= padded


@given(LENGTHS, st.integers(1, 300))
def test_sorted_neighbours_share_a_batch_whenever_they_fit(lengths: list[int], batch_tokens: int) -> None:
    lengths = sorted(max(length, 50) for length in lengths)  # nothing is half as long as another
    batches = plan_batches(lengths, batch_tokens)
    for left, right in pairwise(batches):
        assert (len(left) + 1) * lengths[right.start] > batch_tokens


def test_a_new_window_of_short_samples_is_not_padded_to_the_long_ones_before() -> None:
    assert plan_batches([90, 100, 10, 12, 14], 1000) == [range(2), range(2, 5)]
