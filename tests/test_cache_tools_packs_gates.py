"""Packs look like samples drawn at random: the acceptance gates of the data order, on synthetic lengths.

z of a pack = (mean rank of its lengths - 1/2) * sqrt(12 n), the rank scaled to 0..1: its variance over packs is 1 for
samples drawn at random, more when packs are clustered by length, less when they are stratified. The reference is
next-fit on an independent permutation. Everything is seeded, so the tests are deterministic; thresholds are about four
standard deviations unless the gate is wider.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import erf, exp, lgamma, log, sqrt

import numpy as np
import pytest
from length_laws import BUDGET, LAWS, lognormal, uniform
from numpy.typing import NDArray

from cache_tools.order import Permutation
from cache_tools.packs import PackPlan

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
STEP = 8
ALL_LAWS = LAWS | {"one giant": lambda n: np.append(lognormal(n - 1, 0.75), BUDGET)}
NUM_EPOCHS = 20


@dataclass(frozen=True)
class Epoch:
    """Packs in order: `samples[offsets[i]:offsets[i + 1]]`."""

    samples: Ints
    offsets: Ints

    def sums(self, values: NDArray[np.float64] | Ints) -> Floats:
        sums: Floats = np.add.reduceat(values[self.samples].astype(np.float64), self.offsets[:-1])
        return sums

    @property
    def counts(self) -> Ints:
        return np.diff(self.offsets)


@dataclass(frozen=True)
class Study:
    """Epochs of ours and of next-fit, and the rank of each sample's length."""

    lengths: Ints
    rank: Floats
    ours: list[Epoch]
    next_fit: list[Epoch]

    def z(self, epoch: Epoch, packs_together: int = 1) -> Floats:
        kept = len(epoch.counts) // packs_together * packs_together
        counts = epoch.counts[:kept].reshape(-1, packs_together).sum(axis=1)
        sums = epoch.sums(self.rank)[:kept].reshape(-1, packs_together).sum(axis=1)
        z: Floats = (sums / counts - 0.5) * np.sqrt(12 * counts)
        return z

    def z_var(self, epochs: list[Epoch], packs_together: int = 1) -> float:
        return float(np.mean([self.z(epoch, packs_together).var() for epoch in epochs]))

    def dispersion(self, epochs: list[Epoch], chosen: NDArray[np.bool_]) -> float:
        """Pearson dispersion of the number of chosen samples per pack; 1 for binomial counts."""
        share = chosen.mean()
        terms = [
            (epoch.sums(chosen.astype(np.int64)) - epoch.counts * share) ** 2 / (epoch.counts * share * (1 - share))
            for epoch in epochs
        ]
        return float(np.concatenate(terms).mean())


def our_epoch(plan: PackPlan, epoch: int) -> Epoch:
    windows = [plan.window_packs(epoch, window) for window in range(plan.num_windows)]
    counts = np.concatenate([np.diff(window.offsets) for window in windows])
    return Epoch(np.concatenate([window.samples for window in windows]), np.append(0, np.cumsum(counts)))


def next_fit_epoch(lengths: Ints, seed: int, token_budget: int = BUDGET) -> Epoch:
    """The packs of random order without any cleverness; the underfull last one is left out."""
    samples = Permutation(len(lengths), seed=seed, epoch=0)(np.arange(len(lengths)))
    ends = np.append(0, np.cumsum(lengths[samples]))
    offsets = [0]
    while offsets[-1] < len(lengths):
        offsets.append(int(np.searchsorted(ends, ends[offsets[-1]] + token_budget, side="right")) - 1)
    return Epoch(samples[: offsets[-2]], np.array(offsets[:-1]))


@cache
def study(law: str, n: int = 100_000, num_epochs: int = NUM_EPOCHS, token_budget: int = BUDGET) -> Study:
    lengths = ALL_LAWS[law](n)
    plan = PackPlan(lengths, seed=11, token_budget=token_budget, packs_per_step=STEP)
    ours = [our_epoch(plan, epoch) for epoch in range(num_epochs)]
    next_fit = [next_fit_epoch(lengths, 1000 + i, token_budget) for i in range(num_epochs)]
    return Study(lengths, ranks(lengths), ours, next_fit)


def ranks(lengths: Ints) -> Floats:
    """Rank of each length, 0..1; equal lengths share the middle of theirs."""
    ordered = np.sort(lengths)
    both = np.searchsorted(ordered, lengths, "left") + np.searchsorted(ordered, lengths, "right")
    middle: Floats = both / (2 * len(lengths))
    return middle


def autocorrelation(z: Floats, num_lags: int) -> Floats:
    centred = z - z.mean()
    total = float((centred**2).sum())
    return np.array([float((centred[lag:] * centred[:-lag]).sum()) / total for lag in range(1, num_lags + 1)])


def fisher_p(z: Floats) -> float:
    """Probability that white noise has a periodogram line as large, relative to their sum, as this series."""
    lines = np.abs(np.fft.rfft(z - z.mean())[1:-1]) ** 2
    return 1 - (1 - exp(-len(lines) * lines.max() / lines.sum())) ** len(lines)


def chi_square_p(statistic: float, freedom: int) -> float:
    """Upper tail, by the cube-root approximation of Wilson and Hilferty."""
    deviate = ((statistic / freedom) ** (1 / 3) - 1 + 2 / (9 * freedom)) / sqrt(2 / (9 * freedom))
    return (1 - erf(deviate / sqrt(2))) / 2


def check_all_gates(data: Study) -> None:
    for epoch in data.ours:
        assert data.lengths.sum() / (len(epoch.counts) * BUDGET) >= 0.995
    assert abs(data.z_var(data.ours) - data.z_var(data.next_fit)) < 0.02
    assert abs(data.z_var(data.ours, STEP) - data.z_var(data.next_fit, STEP)) < 0.08
    for share in (0.05, 0.95):
        chosen = data.rank > share if share > 0.5 else data.rank < share
        assert abs(data.dispersion(data.ours, chosen) - data.dispersion(data.next_fit, chosen)) < 0.03
    check_sequence_is_white(data)


def check_sequence_is_white(data: Study) -> None:
    num_rejected = 0
    for epoch in data.ours:
        z = data.z(epoch)
        rho = autocorrelation(z, 20)
        assert np.abs(rho).max() * sqrt(len(z)) < 4
        ljung_box = len(z) * (len(z) + 2) * (rho**2 / (len(z) - np.arange(1, 21))).sum()
        num_rejected += chi_square_p(float(ljung_box), 20) < 0.05
        assert fisher_p(z) > 1e-3 / len(data.ours)
        assert fisher_p(data.z(epoch, STEP)) > 1e-3 / len(data.ours)
        assert position_p(data, epoch) > 1e-3 / len(data.ours)
    assert num_rejected <= 3


def position_p(data: Study, epoch: Epoch) -> float:
    """Are all lengths equally likely in every fiftieth of the epoch?"""
    n = len(epoch.samples)
    cells = np.arange(n) * 50 // n * 10 + np.minimum(data.rank[epoch.samples] * 10, 9).astype(np.int64)
    table = np.bincount(cells, minlength=500).reshape(50, 10)
    expected = table.sum(axis=1, keepdims=True) * table.sum(axis=0) / n
    return chi_square_p(float(((table - expected) ** 2 / expected).sum()), 49 * 9)


def co_occurrence(a: Epoch, b: Epoch) -> float:
    """How much likelier than chance two samples packed together in `a` are together again in `b`."""
    n = len(a.samples)
    pack_in_b = np.empty(n, dtype=np.int64)
    pack_in_b[b.samples] = np.repeat(np.arange(len(b.counts)), b.counts)
    pairs_in_a = (a.counts * (a.counts - 1)).sum() / 2
    chance = (b.counts * (b.counts - 1)).sum() / (n * (n - 1))
    # Sort each pack of `a` by where its samples are in `b`; runs of length r hold r (r - 1) / 2 common pairs.
    pack_in_a = np.repeat(np.arange(len(a.counts)), a.counts)
    keys = np.unique(pack_in_a * len(b.counts) + pack_in_b[a.samples], return_counts=True)[1]
    return float((keys * (keys - 1)).sum() / 2 / pairs_in_a / chance)


@pytest.mark.parametrize("law", ALL_LAWS)
def test_packs_pass_every_gate(law: str) -> None:
    check_all_gates(study(law))


@pytest.mark.slow
@pytest.mark.parametrize("law", ALL_LAWS)
def test_packs_of_902_000_samples_pass_every_gate(law: str) -> None:
    check_all_gates(study(law, 902_000, 12))


@pytest.mark.parametrize("law", ["lognormal 0.75", "bimodal"])
def test_samples_packed_together_are_not_together_again_more_than_by_chance(law: str) -> None:
    ours = study(law).ours
    together = np.mean([co_occurrence(a, b) for a, b in pairwise(ours)])
    assert 0.8 < together < 1.2


@pytest.mark.parametrize("law", ["lognormal 0.75", "bimodal"])
@pytest.mark.parametrize("token_budget", [8192, 12_288])
def test_packs_of_four_to_six_samples_vary_nearly_as_next_fit(law: str, token_budget: int) -> None:
    """The variance of z is not 1 for so few samples, whoever packs them: 0.92 to 1.04 for next-fit."""
    data = study(law, 40_000, 6, token_budget)
    assert 3 < data.ours[0].counts.mean() < 7
    assert abs(data.z_var(data.ours) - data.z_var(data.next_fit)) < 0.1
    for epoch in data.ours:
        z = data.z(epoch)
        assert np.abs(autocorrelation(z, 20)).max() * sqrt(len(z)) < 4
        assert fisher_p(z) > 1e-3 / len(data.ours)


def test_equal_lengths_leave_nothing_but_the_count_of_samples() -> None:
    lengths = np.full(100_000, 1000)
    plan = PackPlan(lengths, seed=11, token_budget=BUDGET, packs_per_step=STEP)
    for number in range(3):
        epoch = our_epoch(plan, number)
        assert lengths.sum() / (len(epoch.counts) * BUDGET) >= 0.995
        assert set(epoch.counts.tolist()) <= {48, 49}
        assert np.array_equal(np.sort(epoch.samples), np.arange(100_000))


@pytest.mark.parametrize(
    ("lengths", "fewest"), [([17], 1), ([BUDGET], 1), ([40_000, 30_000, 20_000], 3), ([BUDGET] * 5, 5), ([100] * 7, 1)]
)
def test_fewer_samples_than_packs_of_a_step_fill_as_few_packs_as_they_can(lengths: list[int], fewest: int) -> None:
    plan = PackPlan(np.array(lengths), seed=11, token_budget=BUDGET, packs_per_step=STEP)
    for number in range(3):
        epoch = our_epoch(plan, number)
        assert sorted(epoch.samples.tolist()) == list(range(len(lengths)))
        assert len(epoch.counts) == fewest


SHORT, LONG = 500, 6000


def variance_of_random_full_packs(token_budget: int, share: float) -> float:
    """Variance of z over random sequences of two lengths that happen to fill a pack, given that all samples are used.

    A full pack has `a` long samples and as many short ones as fit beside them. Random order gives it the probability
    C(n, a) p^a (1-p)^(n-a); p is what makes the packs hold `share` of long samples together, which an epoch must.
    """
    a = np.arange(token_budget // LONG + 1)
    n = a + (token_budget // SHORT * SHORT - a * LONG) // SHORT
    log_orders = np.array([lgamma(m + 1) - lgamma(k + 1) - lgamma(m - k + 1) for k, m in zip(a, n, strict=True)])
    low, high = 1e-9, 1 - 1e-9
    for _ in range(100):
        p = (low + high) / 2
        logs = log_orders + a * log(p) + (n - a) * log(1 - p)
        weight = np.exp(logs - logs.max())
        too_few = float((weight * a).sum()) < share * float((weight * n).sum())
        low, high = (p, high) if too_few else (low, p)
    rank = (a * (1 - share / 2) + (n - a) * (1 - share) / 2) / n
    z = (rank - 0.5) * np.sqrt(12 * n)
    mean = float(np.average(z, weights=weight))
    return float(np.average((z - mean) ** 2, weights=weight))


@pytest.mark.parametrize(("token_budget", "tolerance"), [(12_288, 0.01), (24_576, 0.02), (49_152, 0.25)])
def test_packs_of_two_lengths_vary_as_random_full_packs_do(token_budget: int, tolerance: float) -> None:
    """Only a few mixtures of 500 and 6,000 tokens fill a pack. Next-fit, which leaves packs unfilled, has 0.7 to 1."""
    lengths = np.where(uniform(30_000, 5) < 0.6, SHORT, LONG)
    data = Study(lengths, ranks(lengths), [], [])
    plan = PackPlan(lengths, seed=11, token_budget=token_budget, packs_per_step=STEP)
    epochs = [our_epoch(plan, number) for number in range(3)]
    for epoch in epochs:
        assert lengths.sum() / (len(epoch.counts) * (token_budget // SHORT * SHORT)) >= 0.995
    expected = variance_of_random_full_packs(token_budget, float((lengths == LONG).mean()))
    assert data.z_var(epochs) == pytest.approx(expected, rel=tolerance)


def test_the_gates_see_packs_sorted_by_length() -> None:
    data = study("lognormal 0.75")
    by_length = np.argsort(data.lengths, kind="stable")
    counts = data.ours[0].counts
    packs = np.split(by_length, np.cumsum(counts)[:-1])
    order = Permutation(len(packs), seed=0, epoch=0)(np.arange(len(packs)))
    samples = np.concatenate([packs[i] for i in order])
    shuffled = Epoch(samples, np.append(0, np.cumsum([len(packs[i]) for i in order])))
    assert data.z_var([shuffled]) > 15


def test_the_gates_see_a_period() -> None:
    data = study("lognormal 0.75")
    z = data.z(data.ours[0])
    assert fisher_p(z + 0.5 * np.sin(2 * np.pi * np.arange(len(z)) / 8)) < 1e-6
