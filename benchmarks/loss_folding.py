"""Is there a period in a loss? Its period is known: the chunks that the data order sorts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cache_tools.pack_statistics import chi_square_tail
from cache_tools.packs import PackPlan
from cache_tools.strategies import megabatch_samples

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

TREND_DEGREE = 3


@dataclass(frozen=True)
class Fold:
    """A series by place in its chunk."""

    mean: Floats  # [places]
    error: Floats  # [places] standard error of the mean
    count: Ints  # [places]


def rest_of_trend(losses: Floats) -> Floats:
    """A series [n] without the polynomial that fits it best; a cubic cannot follow periods of a few steps."""
    steps = np.linspace(-1, 1, len(losses))
    trend = np.polynomial.Polynomial.fit(steps, losses, TREND_DEGREE)
    rest: Floats = losses - trend(steps)
    return rest


def chunk_clock(plan: PackPlan, num_steps: int) -> Ints:
    """Place in its chunk, from 0, and packs of the chunk, of every step, [num_steps, 2].

    `plan`: one of `sorted-chunks` with one pack in a step. Chunks are cut from the samples in order, so a pack's chunk
    is known from the samples before it.
    """
    assert plan.strategy == "sorted-chunks" and plan.packs_per_step == 1
    size = megabatch_samples(plan.lengths, plan.token_budget)
    clocks: list[Ints] = []
    while sum(map(len, clocks)) < num_steps:
        chunk = plan.window_packs(len(clocks), 0).offsets[:-1] // size
        _, first, packs = np.unique(chunk, return_index=True, return_counts=True)
        clocks.append(np.stack([np.arange(len(chunk)) - first[chunk], packs[chunk]], axis=1))
    return np.concatenate(clocks)[:num_steps]


def in_whole_chunks(clock: Ints) -> NDArray[np.bool_]:
    """Which steps, [n], are not of the few packs that an epoch's last, incomplete chunk has."""
    whole: NDArray[np.bool_] = 2 * clock[:, 1] >= np.median(clock[:, 1])
    return whole


def fold(series: Floats, clock: Ints) -> Fold:
    """A series [n] by place in the chunk, clock [n, 2]; places that fewer than half of the chunks have are left out."""
    place = clock[:, 0]
    counts = np.bincount(place)
    used = int(np.flatnonzero(counts >= counts[0] / 2)[-1]) + 1
    groups = [series[place == i] for i in range(used)]
    return Fold(
        mean=np.array([group.mean() for group in groups]),
        error=np.array([group.std(ddof=1) / np.sqrt(len(group)) for group in groups]),
        count=counts[:used],
    )


def power_at_clock(examined: Sequence[tuple[Floats, Ints]]) -> tuple[float, float]:
    """Power of series [n] with clocks [n, 2] at one turn per chunk, and the probability that noise has as much.

    The mean over the series; noise has 1. The phase is that of each step in its own chunk, so chunks may differ in
    length. One frequency, chosen beforehand: the power of white noise is exponential, the sum over series chi-square.
    """
    powers = []
    for values, clock in examined:
        turns = (clock[:, 0] + 0.5) / clock[:, 1]
        line = np.abs((values * np.exp(2j * np.pi * turns)).sum()) ** 2
        powers.append(float(line / (len(values) * values.var())))
    return float(np.mean(powers)), chi_square_tail(2 * sum(powers), 2 * len(powers))
