"""Train and validation samples: disjoint, complete, decided by content alone."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_tools.errors import ConfigError
from cache_tools.split import split_samples

contents = st.lists(st.binary(min_size=16, max_size=16), max_size=60)
shares = st.fractions(0, Fraction(99, 100))


def ids(items: list[bytes]) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    return np.frombuffer(b"".join(items), dtype=np.uint8).reshape(len(items), 16)


def hashed(n: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    return np.random.default_rng(0).integers(0, 256, (n, 16), dtype=np.uint8)


@settings(max_examples=100, deadline=None)
@given(contents, shares, st.integers(0, 2**63))
def test_split_is_disjoint_complete_and_independent_of_row_order(
    items: list[bytes], share: Fraction, seed: int
) -> None:
    items = items + items[: len(items) // 3]
    train, validation = split_samples(ids(items), validation_share=share, seed=seed)
    assert sorted([*train.tolist(), *validation.tolist()]) == list(range(len(items)))
    on_validation = {items[i] for i in validation}
    assert not on_validation & {items[i] for i in train}  # duplicates are on one side
    order = np.random.default_rng(len(items)).permutation(len(items))
    shuffled = [items[i] for i in order]
    _, again = split_samples(ids(shuffled), validation_share=share, seed=seed)
    assert {shuffled[i] for i in again} == on_validation


@settings(max_examples=50, deadline=None)
@given(shares, shares)
def test_a_larger_share_only_adds_to_validation(a: Fraction, b: Fraction) -> None:
    smaller, larger = (split_samples(hashed(200), validation_share=x, seed=1)[1] for x in sorted((a, b)))
    assert set(smaller.tolist()) <= set(larger.tolist())


def test_share_is_met_and_seeds_differ() -> None:
    halves = [set(split_samples(hashed(4000), validation_share=0.1, seed=seed)[1].tolist()) for seed in range(2)]
    for chosen in halves:
        assert abs(len(chosen) - 400) < 80
    assert len(halves[0] & halves[1]) < 80


def test_split_is_frozen() -> None:
    content = ids([bytes([i] * 16) for i in range(40)])
    validation = split_samples(content, validation_share=0.25, seed=7)[1]
    assert validation.tolist() == [
        3,
        4,
        12,
        22,
        23,
        24,
        27,
        28,
        31,
        33,
        38,
    ]


def test_no_share_means_no_validation() -> None:
    train, validation = split_samples(hashed(50), validation_share=0, seed=0)
    assert len(train) == 50 and not len(validation)


@pytest.mark.parametrize("share", [-0.1, 1, 1.5, float("nan")])
def test_a_share_out_of_range_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match="share of validation"):
        split_samples(hashed(3), validation_share=share, seed=0)
