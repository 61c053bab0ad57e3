"""How far the packs of a strategy are from samples drawn at random, and how well they fill the hardware.

Ranks of lengths stand for lengths, u in 0..1, so that any length law gives the same reference values. The z of a pack
of n samples is (mean u - 1/2) * sqrt(12 n): its variance over packs is 1 for random samples, more when packs are
clustered by length, less when they are stratified.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import exp, expm1, inf, lgamma, log, log1p
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cache_tools.balance import balance_step
from cache_tools.strategies import EpochPacks

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

NUM_LAGS: Final = 20
LONG_SHARE: Final = 0.05
_EPOCH_PARTS, _LENGTH_PARTS = 50, 10
_MIN_EXPECTED: Final = 5  # samples in a cell, for the chi-square test of position against length
_MAX_BALANCED_STEPS: Final = 400  # balancing takes milliseconds a step; so many give three digits


@dataclass(frozen=True, kw_only=True)
class PackStatistics:
    """Averages over epochs; None where there is too little data for a value.

    Of p-values, small means: unlikely if the order were random. Several epochs are tested together.
    """

    token_efficiency: float
    """Useful tokens / (packs * token budget)."""
    padding_efficiency: float
    """Useful tokens / tokens computed."""
    packs: float
    """Packs per epoch."""
    z_var: float
    """Variance of z; 1 for random samples, ten or more in a pack. Of fewer, or of few different lengths, a pack that
    is full has few mixtures to choose from, and next-fit is the reference: 0.9 to 1.04 for four."""
    ks: float
    """Mean of sqrt(n) * Kolmogorov-Smirnov distance of a pack's lengths from all lengths; 0.84 for random samples."""
    lag1: float | None
    """Autocorrelation of z between neighbours in the sequence of packs."""
    ljung_box_p: float | None
    """p-value of the autocorrelations of z at lags 1 to 20 together."""
    fisher_period: float | None
    """Period of the strongest line in the spectrum of z, in packs."""
    fisher_p: float | None
    """p-value of that line."""
    long_dispersion: float
    """Variance of the number of the 5 % longest samples per pack, relative to a binomial one; about 1.1 for random."""
    position_p: float | None
    """p-value of a dependence of length on the place in the epoch."""
    co_occurrence: float | None
    """How many times likelier than chance two samples of a pack share one in the next epoch too."""
    step_z_var: float | None
    """Variance of the z of a whole step."""
    balance_tokens: float | None
    """Mean / max over the packs of a step of the tokens, averaged over steps."""
    balance_l2: float | None
    """The same of the sum of squared lengths, which attention costs."""

    def to_dict(self) -> dict[str, float | None]:
        """Plain JSON values."""
        return asdict(self)


class LengthRanks:
    """The rank of each sample's length: `low` counts shorter samples, `high` also equal ones, as shares of all."""

    def __init__(self, lengths: Ints) -> None:
        ordered = np.sort(lengths)
        self.low: Floats = np.searchsorted(ordered, lengths, "left") / len(lengths)
        self.high: Floats = np.searchsorted(ordered, lengths, "right") / len(lengths)
        self.middle: Floats = (self.low + self.high) / 2


def measure(
    epochs: Sequence[EpochPacks], lengths: Ints, *, token_budget: int, packs_per_step: int, balanced: bool = False
) -> PackStatistics:
    """Statistics of consecutive epochs, at least one, of a strategy.

    lengths: tokens of each sample, [n]. balanced: measure balance after the exchange of samples within steps.
    """
    ranks = LengthRanks(lengths)
    series = [pack_z(epoch, ranks.middle) for epoch in epochs]
    steps = [pack_z(epoch, ranks.middle, packs_per_step) for epoch in epochs]
    lag1 = [autocorrelation(z, 1)[0] for z in series if len(z) > NUM_LAGS]
    fisher = [fisher_line(z) for z in series if len(z) > NUM_LAGS]
    best = min(fisher, key=lambda line: line[1]) if fisher else None
    together = [co_occurrence(a, b) for a, b in pairwise(epochs)]
    balance = [balance_of_steps(e, lengths, token_budget, packs_per_step, balanced) for e in epochs]
    slots = np.array([epoch.slots.sum() for epoch in epochs])
    num_packs = np.array([epoch.num_packs for epoch in epochs])
    return PackStatistics(
        token_efficiency=float((lengths.sum() / (num_packs * token_budget)).mean()),
        padding_efficiency=float((lengths.sum() / slots).mean()),
        packs=float(num_packs.mean()),
        z_var=float(np.mean([z.var() for z in series])),
        ks=float(np.mean([ks_distances(epoch, ranks).mean() for epoch in epochs])),
        lag1=_mean(lag1),
        ljung_box_p=ljung_box_p(series),
        fisher_period=best[0] if best else None,
        fisher_p=-expm1(len(fisher) * log1p(-min(best[1], 1 - 1e-16))) if best else None,
        long_dispersion=float(np.mean([dispersion(e, ranks.middle > 1 - LONG_SHARE) for e in epochs])),
        position_p=position_p(epochs, ranks.middle),
        co_occurrence=_mean(together),
        step_z_var=_mean([float(z.var()) if len(z) > 1 else None for z in steps]),
        balance_tokens=_mean([pair[0] if pair else None for pair in balance]),
        balance_l2=_mean([pair[1] if pair else None for pair in balance]),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def _sums(epoch: EpochPacks, values: NDArray[np.generic]) -> Floats:
    """Sum of `values` [n] over each pack, [num_packs]."""
    sums: Floats = np.add.reduceat(values[epoch.samples].astype(np.float64), epoch.offsets[:-1])
    return sums


def pack_z(epoch: EpochPacks, rank: Floats, packs_together: int = 1) -> Floats:
    """z of each pack, or of each run of so many; an incomplete last run is left out."""
    kept = epoch.num_packs // packs_together * packs_together
    counts = epoch.counts[:kept].reshape(-1, packs_together).sum(axis=1)
    sums = _sums(epoch, rank)[:kept].reshape(-1, packs_together).sum(axis=1)
    z: Floats = (sums / counts - 0.5) * np.sqrt(12 * counts)
    return z


def ks_distances(epoch: EpochPacks, ranks: LengthRanks) -> Floats:
    """sqrt(n) times the largest gap between the distributions of a pack's lengths and of all lengths, [num_packs]."""
    counts = epoch.counts
    pack_of = np.repeat(np.arange(epoch.num_packs), counts)
    samples = epoch.samples[np.lexsort((ranks.low[epoch.samples], pack_of))]
    place = np.arange(len(samples)) - np.repeat(epoch.offsets[:-1], counts)
    size = np.repeat(counts, counts)
    gap = np.maximum((place + 1) / size - ranks.high[samples], ranks.low[samples] - place / size)
    distances: Floats = np.maximum.reduceat(gap, epoch.offsets[:-1]) * np.sqrt(counts)
    return distances


def autocorrelation(z: Floats, num_lags: int) -> Floats:
    """At lags 1 to `num_lags`; zero for a constant series."""
    centred = z - z.mean()
    total = float((centred**2).sum())
    if total == 0:
        return np.zeros(num_lags)
    return np.array([float((centred[lag:] * centred[:-lag]).sum()) / total for lag in range(1, num_lags + 1)])


def ljung_box_p(series: Sequence[Floats]) -> float | None:
    """p-value of lags 1 to 20 of independent series together; None if all are too short."""
    statistics = []
    for z in series:
        n = len(z)
        if n > NUM_LAGS:
            rho = autocorrelation(z, NUM_LAGS)
            statistics.append(n * (n + 2) * float((rho**2 / (n - np.arange(1, NUM_LAGS + 1))).sum()))
    return chi_square_tail(sum(statistics), NUM_LAGS * len(statistics)) if statistics else None


def fisher_line(z: Floats) -> tuple[float, float]:
    """(period, p-value) of the largest periodogram line of a series of at least 4: Fisher's g test."""
    lines = np.abs(np.fft.rfft(z - z.mean())[1 : (len(z) + 1) // 2]) ** 2
    largest, total = int(lines.argmax()), float(lines.sum())
    if total < 1e-18 * len(z) ** 2:
        return float(len(z)), 1.0
    share = float(lines[largest]) / total
    one_line = exp((len(lines) - 1) * log1p(-share)) if share < 1 else 0.0
    return len(z) / (largest + 1), -expm1(len(lines) * log1p(-min(one_line, 1 - 1e-16)))


def dispersion(epoch: EpochPacks, chosen: NDArray[np.bool_]) -> float:
    """Pearson dispersion over packs of the number of chosen samples; 1 for binomial numbers, 0 if none is chosen."""
    share = float(chosen.mean())
    if share in (0.0, 1.0):
        return 0.0
    expected = epoch.counts * share
    return float(((_sums(epoch, chosen) - expected) ** 2 / (expected * (1 - share))).mean())


def position_p(epochs: Sequence[EpochPacks], rank: Floats) -> float | None:
    """p-value of fiftieths of the epoch against tenths of the lengths; None for few samples or equal lengths."""
    n = len(rank)
    statistic, freedom = 0.0, 0
    for epoch in epochs:
        length_part = np.minimum(rank[epoch.samples] * _LENGTH_PARTS, _LENGTH_PARTS - 1).astype(np.int64)
        cells = np.arange(n) * _EPOCH_PARTS // n * _LENGTH_PARTS + length_part
        table = np.bincount(cells, minlength=_EPOCH_PARTS * _LENGTH_PARTS).reshape(_EPOCH_PARTS, _LENGTH_PARTS)
        table = table[:, table.sum(axis=0) > 0]
        expected = table.sum(axis=1, keepdims=True) * table.sum(axis=0) / n
        if table.shape[1] < 2 or expected.min() < _MIN_EXPECTED:
            return None
        statistic += float(((table - expected) ** 2 / expected).sum())
        freedom += (table.shape[0] - 1) * (table.shape[1] - 1)
    return chi_square_tail(statistic, freedom)


def co_occurrence(a: EpochPacks, b: EpochPacks) -> float | None:
    """How much likelier than chance two samples of a pack of `a` share one in `b`; None if no pack has two."""
    n = len(a.samples)
    pack_in_b = np.empty(n, dtype=np.int64)
    pack_in_b[b.samples] = np.repeat(np.arange(b.num_packs), b.counts)
    pairs_in_a = int((a.counts * (a.counts - 1)).sum())
    pairs_in_b = int((b.counts * (b.counts - 1)).sum())
    if not pairs_in_a or not pairs_in_b:
        return None
    pack_in_a = np.repeat(np.arange(a.num_packs), a.counts)
    shared = np.unique(pack_in_a * b.num_packs + pack_in_b[a.samples], return_counts=True)[1]
    return float((shared * (shared - 1)).sum()) / pairs_in_a / (pairs_in_b / (n * (n - 1)))


def balance_of_steps(
    epoch: EpochPacks, lengths: Ints, token_budget: int, packs_per_step: int, balanced: bool
) -> tuple[float, float] | None:
    """Mean / max over the packs of a step of tokens and of sum(L^2), averaged over at most 400 evenly spread steps.

    None if the epoch has no whole step.
    """
    num_steps = epoch.num_packs // packs_per_step
    if not num_steps:
        return None
    found = []
    for step in range(0, num_steps, -(-num_steps // _MAX_BALANCED_STEPS)):
        packs = [epoch.pack(step * packs_per_step + i) for i in range(packs_per_step)]
        if balanced:
            packs = balance_step(packs, lengths, token_budget)
        costs = np.array([[lengths[pack].sum(), (lengths[pack] ** 2).sum()] for pack in packs], dtype=np.float64)
        found.append(costs.mean(axis=0) / costs.max(axis=0))
    tokens, squares = np.mean(found, axis=0)
    return float(tokens), float(squares)


def chi_square_tail(statistic: float, freedom: int) -> float:
    """Probability that a chi-square variable of `freedom` degrees exceeds `statistic`; relative error below 1e-10.

    The regularised upper incomplete gamma function Q(freedom / 2, statistic / 2).
    """
    assert freedom >= 1 and statistic >= 0
    a, x = freedom / 2, statistic / 2
    if x == 0:
        return 1.0
    if x == inf:
        return 0.0
    front = a * log(x) - x - lgamma(a)
    if x < a + 1:
        return max(0.0, 1 - exp(front) * _lower_series(a, x))
    return exp(front) * _upper_fraction(a, x)


def _lower_series(a: float, x: float) -> float:
    """gamma(a, x) * e^x * x^-a by its power series, which converges fast for x < a + 1."""
    term = total = 1 / a
    n = a
    while term > total * 1e-17:
        n += 1
        term *= x / n
        total += term
    return total


def _upper_fraction(a: float, x: float) -> float:
    """Gamma(a, x) * e^x * x^-a by its continued fraction, evaluated forwards, which converges fast for x > a + 1."""
    b = x + 1 - a
    c, d = inf, 1 / b
    result = d
    for i in range(1, 100_000):
        factor = -i * (i - a)
        b += 2
        d = 1 / (factor * d + b)
        c = b + factor / c
        result *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return result
