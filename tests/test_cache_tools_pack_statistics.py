"""Statistics of packs: against brute force, known values, and sequences whose answer is known by construction."""

from __future__ import annotations

import json
from itertools import combinations, pairwise
from math import erfc, exp, isfinite, sqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from length_laws import BUDGET, EXTREMES, lognormal, normal, truncated_lognormal
from numpy.typing import NDArray

from cache_tools.pack_statistics import (
    LengthRanks,
    autocorrelation,
    chi_square_tail,
    co_occurrence,
    dispersion,
    fisher_line,
    ks_distances,
    ljung_box_p,
    measure,
    pack_z,
    position_p,
)
from cache_tools.strategies import STRATEGIES, EpochPacks

Ints = NDArray[np.int64]


@st.composite
def small_epochs(draw: st.DrawFn) -> tuple[Ints, EpochPacks]:
    counts = draw(st.lists(st.integers(1, 6), min_size=1, max_size=8))
    n = sum(counts)
    lengths = np.array(draw(st.lists(st.integers(1, 9), min_size=n, max_size=n)), dtype=np.int64)
    samples = np.array(draw(st.permutations(range(n))), dtype=np.int64)
    return lengths, EpochPacks(samples, np.append(0, np.cumsum(counts)), np.array(counts))


def share(values: list[int], bound: float, strictly: bool = False) -> float:
    return sum(value < bound if strictly else value <= bound for value in values) / len(values)


@settings(max_examples=100, deadline=None)
@given(small_epochs())
def test_statistics_of_packs_equal_their_definitions(case: tuple[Ints, EpochPacks]) -> None:
    lengths, epoch = case
    everything = lengths.tolist()
    ranks = LengthRanks(lengths)
    z, ks = pack_z(epoch, ranks.middle), ks_distances(epoch, ranks)
    for i in range(epoch.num_packs):
        inside = lengths[epoch.pack(i)].tolist()
        n = len(inside)
        middle = [(share(everything, x, True) + share(everything, x)) / 2 for x in inside]
        assert z[i] == pytest.approx((sum(middle) / n - 0.5) * sqrt(12 * n))
        gap = max(abs(share(inside, x) - share(everything, x)) for x in range(10))
        assert ks[i] == pytest.approx(gap * sqrt(n))


@settings(max_examples=100, deadline=None)
@given(small_epochs(), st.data())
def test_co_occurrence_counts_pairs(case: tuple[Ints, EpochPacks], data: st.DataObject) -> None:
    _, a = case
    order = np.array(data.draw(st.permutations(range(len(a.samples)))), dtype=np.int64)
    b = EpochPacks(order[a.samples], a.offsets, a.slots)
    pairs_a, pairs_b = (
        {frozenset(pair) for i in range(e.num_packs) for pair in combinations(e.pack(i).tolist(), 2)} for e in (a, b)
    )
    found = co_occurrence(a, b)
    if not pairs_a:
        assert found is None
        return
    n = len(order)
    assert found == pytest.approx(len(pairs_a & pairs_b) / len(pairs_a) / (len(pairs_b) / (n * (n - 1) / 2)))


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 10, 20, 21, 100, 441, 4000])
@pytest.mark.parametrize("ratio", [0.01, 0.3, 0.9, 1.0, 1.1, 1.5, 3.0])
def test_chi_square_tail_has_its_closed_form(freedom: int, ratio: float) -> None:
    """Even degrees: a Poisson sum. Odd ones: the complementary error function and a sum."""
    x = freedom * ratio / 2
    if freedom % 2 == 0:
        term = total = exp(-x)
        for i in range(1, freedom // 2):
            term *= x / i
            total += term
        if exp(-x) == 0:
            return
    else:
        total = erfc(sqrt(x))
        term = exp(-x) * sqrt(x) / 0.886226925452758
        for i in range(1, (freedom + 1) // 2):
            total += term
            term *= x / (i + 0.5)
    assert chi_square_tail(2 * x, freedom) == pytest.approx(min(total, 1), rel=1e-9, abs=1e-15)


@pytest.mark.parametrize(
    ("statistic", "freedom", "expected"),
    [
        (3.841458820694124, 1, 0.05),
        (6.634896601021213, 1, 0.01),
        (31.410432844230918, 20, 0.05),
        (37.56623478662507, 20, 0.01),
        (124.34211340400407, 100, 0.05),
        (0.0, 5, 1.0),
    ],
)
def test_chi_square_tail_at_tabulated_points(statistic: float, freedom: int, expected: float) -> None:
    assert chi_square_tail(statistic, freedom) == pytest.approx(expected, rel=1e-9)


def test_chi_square_tail_is_tiny_far_out_and_never_leaves_0_to_1() -> None:
    assert 0 < chi_square_tail(300, 20) < 1e-40
    assert chi_square_tail(1e6, 20) == 0
    assert chi_square_tail(1e-9, 20) == 1
    values = [chi_square_tail(x, 20) for x in np.linspace(0, 80, 200)]
    assert all(a >= b for a, b in pairwise(values))


def white_noise(num_series: int, size: int) -> list[NDArray[np.float64]]:
    return [normal(size, 100 + 2 * i) for i in range(num_series)]


def test_p_values_of_white_noise_are_uniform() -> None:
    series = white_noise(400, 500)
    for p_values in ([ljung_box_p([z]) for z in series], [fisher_line(z)[1] for z in series]):
        ordered = np.sort(np.array(p_values, dtype=np.float64))
        assert np.abs(ordered - np.arange(400) / 400).max() < 0.1  # a KS distance of 0.1 has p = 0.0006


def test_correlated_series_are_rejected() -> None:
    z = white_noise(1, 2000)[0]
    smooth = np.convolve(z, [1, 0.3], "valid")
    together = ljung_box_p([smooth, smooth[::-1]])
    assert together is not None and together < 1e-9
    assert autocorrelation(smooth, 1)[0] == pytest.approx(0.3 / 1.09, abs=0.06)
    assert ljung_box_p([z[:20]]) is None


@pytest.mark.parametrize("period", [2.5, 9.7, 64.0])
def test_a_period_is_found(period: float) -> None:
    z = white_noise(1, 2000)[0] + np.sin(2 * np.pi * np.arange(2000) / period)
    found, p = fisher_line(z)
    assert found == pytest.approx(period, rel=0.02)
    assert p < 1e-9


def test_a_constant_series_has_no_correlation_and_no_period() -> None:
    assert not autocorrelation(np.ones(50), 3).any()
    assert fisher_line(np.ones(50))[1] == 1
    assert ljung_box_p([np.ones(50)]) == 1


def test_dispersion_of_binomial_counts_is_one() -> None:
    chosen = lognormal(50_000, 1.0) > 5000
    random = EpochPacks(np.arange(50_000), np.arange(0, 50_001, 25), np.ones(2000, dtype=np.int64))
    assert dispersion(random, chosen) == pytest.approx(1, abs=0.13)
    clustered = EpochPacks(np.argsort(chosen, kind="stable"), random.offsets, random.slots)
    assert dispersion(clustered, chosen) == pytest.approx(25, rel=0.02)
    assert dispersion(random, np.zeros(50_000, dtype=bool)) == 0


def test_position_sees_long_samples_at_the_end() -> None:
    lengths = lognormal(20_000, 0.75)
    ranks = LengthRanks(lengths)
    order = np.arange(20_000)
    late = np.concatenate([order[ranks.middle[order] < 0.97], order[ranks.middle[order] >= 0.97]])
    offsets, slots = np.array([0, 20_000]), np.array([1])
    random, sorted_at_end = EpochPacks(order, offsets, slots), EpochPacks(late, offsets, slots)
    p = position_p([random], ranks.middle)
    assert p is not None and p > 1e-3
    assert position_p([sorted_at_end], ranks.middle) == pytest.approx(0, abs=1e-9)
    assert position_p([random], np.full(20_000, 0.5)) is None


def test_next_fit_has_the_values_of_random_order() -> None:
    lengths = truncated_lognormal(60_000)
    epochs = [STRATEGIES["next-fit"](lengths, BUDGET, 0, epoch) for epoch in range(4)]
    found = measure(epochs, lengths, token_budget=BUDGET, packs_per_step=8)
    assert found.z_var == pytest.approx(1.003, abs=0.05)
    assert found.ks == pytest.approx(0.837, abs=0.02)
    assert found.long_dispersion == pytest.approx(1.09, abs=0.05)
    assert found.step_z_var == pytest.approx(1, abs=0.15)
    assert found.co_occurrence == pytest.approx(1, abs=0.15)
    assert found.lag1 == pytest.approx(0, abs=0.03)
    assert found.padding_efficiency == 1
    for p in (found.ljung_box_p, found.fisher_p, found.position_p):
        assert p is not None and p > 1e-3
    assert found.balance_tokens == pytest.approx(0.974, abs=0.003)
    assert found.balance_l2 == pytest.approx(0.785, abs=0.015)


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("extreme", EXTREMES)
def test_extreme_lengths_have_finite_statistics_or_none(name: str, extreme: str) -> None:
    lengths = EXTREMES[extreme]
    epochs = [STRATEGIES[name](lengths, BUDGET, 0, epoch) for epoch in range(2)]
    found = measure(epochs, lengths, token_budget=BUDGET, packs_per_step=8, balanced=name == "global").to_dict()
    assert all(value is None or isfinite(value) for value in found.values())
    json.dumps(found, allow_nan=False)


def history(lengths: Ints, num_epochs: int) -> None:
    """What the ways to batch are known to achieve on lognormal lengths of mean 2,000 up to 8,192."""

    def found(name: str) -> dict[str, float | None]:
        balanced = name == "global"
        count = num_epochs if name in ("global", "next-fit") else 2
        epochs = [STRATEGIES[name](lengths, BUDGET, 0, epoch) for epoch in range(count)]
        return measure(epochs, lengths, token_budget=BUDGET, packs_per_step=8, balanced=balanced).to_dict()

    def value(name: str, key: str) -> float:
        number = statistics[name][key]
        assert number is not None
        return number

    statistics = {name: found(name) for name in STRATEGIES}
    for name, expected in (
        ("sorted-static", 0.97),
        ("bucketed-published", 0.76),
        ("bucketed", 0.79),
        ("random-padded", 0.40),
    ):
        assert value(name, "token_efficiency") == pytest.approx(expected, abs=0.01)
    assert value("global", "token_efficiency") >= 0.999
    assert abs(value("global", "z_var") - value("next-fit", "z_var")) < 0.02
    assert value("global", "balance_l2") > 0.99
    assert value("global", "balance_tokens") > 0.999
    assert min(value("sorted-static", "z_var"), value("sorted-chunks", "z_var"), value("bucketed", "z_var")) > 10
    assert value("sorted-chunks", "fisher_period") == pytest.approx(9.9, abs=0.5)
    assert value("sorted-chunks", "fisher_p") < 1e-9
    assert value("sorted-static", "co_occurrence") > 100
    for name in ("next-fit", "global"):
        for key in ("ljung_box_p", "fisher_p", "position_p"):
            assert value(name, key) > 1e-3
        assert 0.8 < value(name, "co_occurrence") < 1.2


def test_the_known_history_is_reproduced() -> None:
    history(truncated_lognormal(60_000), 6)


@pytest.mark.slow
def test_the_known_history_is_reproduced_on_902_000_samples() -> None:
    history(truncated_lognormal(902_000), 2)
