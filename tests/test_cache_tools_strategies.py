"""Named strategies: each is what its name says, and a plan of it can be trained and resumed."""

from __future__ import annotations

import json
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from length_laws import BUDGET, EXTREMES, lognormal
from numpy.typing import NDArray

from cache_tools.errors import ConfigError
from cache_tools.packs import PackCursor, PackPlan
from cache_tools.strategies import (
    PUBLISHED_BOUNDS,
    STRATEGIES,
    EpochPacks,
    bucket_bounds,
    plan_for,
    sorted_chunks,
    strategy_named,
)

Ints = NDArray[np.int64]
PADDED = {"sorted-static", "sorted-chunks", "bucketed", "bucketed-published", "random-padded"}


def check_epoch(packs: EpochPacks, lengths: Ints, token_budget: int, padded: bool) -> None:
    assert np.array_equal(np.sort(packs.samples), np.arange(len(lengths)))
    assert packs.offsets[0] == 0 and packs.offsets[-1] == len(lengths) and (packs.counts >= 1).all()
    for i in range(packs.num_packs):
        inside = lengths[packs.pack(i)]
        assert packs.slots[i] == (len(inside) * inside.max() if padded else inside.sum())
        assert packs.slots[i] <= token_budget


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(sorted(STRATEGIES)),
    st.lists(st.integers(1, 50), min_size=1, max_size=200),
    st.integers(0, 2**62),
    st.integers(0, 5),
)
def test_an_epoch_has_every_sample_once_and_counts_its_slots(
    name: str, items: list[int], seed: int, epoch: int
) -> None:
    lengths = np.array(items)
    check_epoch(STRATEGIES[name](lengths, 60, seed, epoch), lengths, 60, name in PADDED)


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("extreme", EXTREMES)
def test_extreme_lengths_are_packed(name: str, extreme: str) -> None:
    lengths = EXTREMES[extreme]
    check_epoch(STRATEGIES[name](lengths, BUDGET, 0, 1), lengths, BUDGET, name in PADDED)


@pytest.mark.parametrize("name", STRATEGIES)
def test_epochs_and_seeds_differ_and_repeat(name: str) -> None:
    lengths = lognormal(3000, 0.75)
    make = STRATEGIES[name]
    first = make(lengths, BUDGET, 1, 0)
    assert np.array_equal(first.samples, make(lengths, BUDGET, 1, 0).samples)
    assert not np.array_equal(first.samples, make(lengths, BUDGET, 1, 1).samples)
    assert not np.array_equal(first.samples, make(lengths, BUDGET, 2, 0).samples)


def batches(packs: EpochPacks) -> set[frozenset[int]]:
    return {frozenset(packs.pack(i).tolist()) for i in range(packs.num_packs)}


def test_sorted_static_has_the_same_batches_in_every_epoch() -> None:
    lengths = lognormal(3000, 0.75)
    first, second = (STRATEGIES["sorted-static"](lengths, BUDGET, 0, epoch) for epoch in range(2))
    assert batches(first) == batches(second)
    spans = sorted((int(lengths[list(batch)].min()), int(lengths[list(batch)].max())) for batch in batches(first))
    assert all(a[1] <= b[0] for a, b in pairwise(spans))


def test_sorted_chunks_are_sorted_inside_megabatches_of_other_samples_each_epoch() -> None:
    lengths = lognormal(3000, 0.75)
    chunk = 2 * BUDGET * 3000 // int(lengths.sum())
    packs = sorted_chunks(lengths, BUDGET, 0, 0, megabatch_packs=2)
    for start in range(0, 3000, chunk):
        assert (np.diff(lengths[packs.samples[start : start + chunk]]) <= 0).all()
    assert set(range(0, 3000, chunk)) <= set(packs.offsets.tolist())
    assert not batches(packs) & batches(sorted_chunks(lengths, BUDGET, 0, 1, megabatch_packs=2))


def test_batches_of_buckets_stay_between_their_bounds() -> None:
    lengths = lognormal(3000, 0.75)
    packs = strategy_named("bucketed:0,500,2000")(lengths, BUDGET, 0, 0)
    kinds = {tuple(np.unique(np.searchsorted([500, 2000], lengths[packs.pack(i)]))) for i in range(packs.num_packs)}
    assert kinds == {(0,), (1,), (2,)}
    published = STRATEGIES["bucketed-published"](lengths, BUDGET, 0, 0)
    for i in range(published.num_packs):
        assert len(np.unique(np.searchsorted(PUBLISHED_BOUNDS, lengths[published.pack(i)]))) == 1


def padded_slots(lengths: list[int], bounds: list[int]) -> int:
    return sum(min(bound for bound in bounds if bound >= length) for length in lengths)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(1, 4))
def test_optimised_bounds_waste_as_little_as_any(lengths: list[int], num_buckets: int) -> None:
    bounds = bucket_bounds(np.array(lengths), num_buckets)
    assert bounds == sorted(set(bounds)) and len(bounds) <= num_buckets and bounds[-1] == max(lengths)
    others = sorted(set(lengths) - {max(lengths)})
    size = min(num_buckets - 1, len(others))
    best = min(padded_slots(lengths, [*chosen, max(lengths)]) for chosen in combinations(others, size))
    assert padded_slots(lengths, bounds) == best


def test_optimised_bounds_beat_published_ones_on_many_distinct_lengths() -> None:
    lengths = lognormal(30_000, 0.75)
    bounds = bucket_bounds(lengths, 6)
    assert len(bounds) == 6 and bounds[-1] == lengths.max()
    items = lengths.tolist()
    assert padded_slots(items, bounds) < padded_slots(items, list(PUBLISHED_BOUNDS[1:]))


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_plan_covers_epochs_and_resumes_anywhere(name: str) -> None:
    lengths = lognormal(400, 0.75)

    def fresh() -> PackPlan:
        numbers = np.arange(1000, 1400)
        return plan_for(name, lengths, seed=1, token_budget=BUDGET, packs_per_step=3, samples=numbers)

    plan, cursor, seen = fresh(), PackCursor(), np.zeros(1400, dtype=np.int64)
    num_steps = plan.num_steps(2)
    for _ in range(num_steps):
        assert plan.epochs_done(cursor) < 2
        packs, following = plan.step(cursor)
        again = fresh()
        resumed, _ = again.step(again.resume(json.loads(json.dumps(plan.state(cursor)))))
        assert [pack.tolist() for pack in resumed] == [pack.tolist() for pack in packs]
        np.add.at(seen, np.concatenate(packs), 1)
        cursor = following
    assert plan.epochs_done(cursor) >= 2
    assert (seen[1000:] >= 2).all() and not seen[:1000].any()


def test_a_plan_of_a_strategy_has_that_strategys_packs() -> None:
    lengths = lognormal(400, 0.75)
    plan = plan_for("sorted-chunks", lengths, seed=1, token_budget=BUDGET, packs_per_step=1)
    packs = STRATEGIES["sorted-chunks"](lengths, BUDGET, 1, 0)
    cursor = PackCursor()
    for i in range(packs.num_packs):
        (pack,), cursor = plan.step(cursor)
        assert np.array_equal(pack, packs.pack(i))


def test_sorted_chunks_by_name_have_the_size_in_the_name() -> None:
    lengths = lognormal(3000, 0.75)
    named = strategy_named("sorted-chunks:2")(lengths, BUDGET, 0, 0)
    assert np.array_equal(named.samples, sorted_chunks(lengths, BUDGET, 0, 0, megabatch_packs=2).samples)


def test_global_is_the_plan_of_training() -> None:
    lengths = lognormal(400, 0.75)
    plan = plan_for("global", lengths, seed=1, token_budget=BUDGET, packs_per_step=4, supervised=lengths // 3)
    same = PackPlan(lengths, seed=1, token_budget=BUDGET, packs_per_step=4, supervised=lengths // 3)
    assert type(plan) is PackPlan and plan.fingerprint == same.fingerprint


def test_resuming_with_another_strategy_is_refused() -> None:
    lengths = lognormal(50, 0.75)
    plans = [
        plan_for(name, lengths, seed=1, token_budget=BUDGET, packs_per_step=1)
        for name in ("global", "bucketed", "bucketed:0,900")
    ]
    for plan in plans:
        for other in plans:
            if other is not plan:
                with pytest.raises(ConfigError, match=": strategy differ"):
                    plan.resume(other.state(PackCursor()))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("globl", "did you mean global"),
        ("bucketed:", "not ascending"),
        ("bucketed:5,4", "not ascending"),
        ("bucketed:a,b", "not ascending"),
        ("sorted-chunks:0", "no such strategy"),
        ("sorted-chunks:1,2", "no such strategy"),
        ("sorted-chunks:many", "not ascending"),
    ],
)
def test_unknown_strategies_are_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_for(name, np.array([1]), seed=0, token_budget=1, packs_per_step=1)
