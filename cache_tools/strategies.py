"""Ways to batch by name: the global shuffle that training uses, and what others do, to compare it with.

A strategy turns (lengths, token budget, seed, epoch) into the packs of that epoch, in training order, and into the
token slots each of them costs. Padded strategies compute the longest sample's length for every sample of a batch, and a
batch is full when one more sample would take that over the budget; the others compute tokens only.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cache_tools.errors import ConfigError
from cache_tools.order import Permutation, mix64
from cache_tools.packs import PackPlan, WindowPacks

Ints = NDArray[np.int64]

MEGABATCH_PACKS: Final = 8
NUM_BUCKETS: Final = 6
PUBLISHED_BOUNDS: Final = (0, 770, 1216, 1728, 2432, 3296, 8192)
_BATCH_ORDER_KEY: Final = 0x6261746368  # separates the order of batches from the order of samples
_MAX_CANDIDATES: Final = 1024  # bounds considered for buckets; 6 buckets among so many take 20 ms


@dataclass(frozen=True)
class EpochPacks:
    """The packs of an epoch in training order: pack i is `samples[offsets[i]:offsets[i + 1]]`."""

    samples: Ints  # [n] indices into the lengths, each once
    offsets: Ints  # [num_packs + 1]
    slots: Ints  # [num_packs] tokens computed for each pack, padding included

    @property
    def num_packs(self) -> int:
        return len(self.offsets) - 1

    @property
    def counts(self) -> Ints:
        """Samples of each pack, [num_packs]."""
        return np.diff(self.offsets)

    def pack(self, index: int) -> Ints:
        """Indices of one pack."""
        return self.samples[self.offsets[index] : self.offsets[index + 1]]


Strategy = Callable[[Ints, int, int, int], EpochPacks]
"""(lengths [n], token budget, seed, epoch) -> packs. Every length must be in 1..token budget."""


def _random_order(n: int, seed: int, epoch: int) -> Ints:
    return Permutation(n, seed=seed, epoch=epoch)(np.arange(n))


def _padded_offsets(ordered: Ints, token_budget: int) -> Ints:
    """Cut lengths in order, [n], into batches whose count times longest obeys the budget. Returns offsets."""
    offsets, count, longest = [0], 0, 0
    for i, length in enumerate(ordered.tolist()):
        longest, count = max(longest, length), count + 1
        if count * longest > token_budget:
            offsets.append(i)
            longest, count = length, 1
    return np.array([*offsets, len(ordered)], dtype=np.int64)


def _next_fit_offsets(ordered: Ints, token_budget: int) -> Ints:
    """Cut lengths in order, [n], into packs that hold as much as obeys the budget. Returns offsets."""
    ends = np.append(0, np.cumsum(ordered))
    offsets = [0]
    while offsets[-1] < len(ordered):
        offsets.append(int(np.searchsorted(ends, ends[offsets[-1]] + token_budget, side="right")) - 1)
    return np.array(offsets, dtype=np.int64)


def _padded(lengths: Ints, samples: Ints, offsets: Ints) -> EpochPacks:
    """Packs that compute the longest length for each of their samples."""
    longest = np.maximum.reduceat(lengths[samples], offsets[:-1])
    return EpochPacks(samples, offsets, longest * np.diff(offsets))


def _unpadded(lengths: Ints, samples: Ints, offsets: Ints) -> EpochPacks:
    """Packs that compute the tokens they hold."""
    return EpochPacks(samples, offsets, np.add.reduceat(lengths[samples], offsets[:-1]))


def _shuffled(packs: EpochPacks, seed: int, epoch: int) -> EpochPacks:
    """The same packs in random order."""
    order = _random_order(packs.num_packs, mix64(_BATCH_ORDER_KEY, seed), epoch)
    counts = packs.counts[order]
    ends = np.cumsum(counts)
    shift = np.repeat(packs.offsets[order] - (ends - counts), counts)
    return EpochPacks(packs.samples[np.arange(len(packs.samples)) + shift], np.append(0, ends), packs.slots[order])


def sorted_static(lengths: Ints, token_budget: int, seed: int, epoch: int) -> EpochPacks:
    """Sort everything by length, cut into batches once and for all, shuffle the batches every epoch."""
    samples = np.argsort(lengths, kind="stable")
    packs = _padded(lengths, samples, _padded_offsets(lengths[samples], token_budget))
    return _shuffled(packs, seed, epoch)


def megabatch_samples(lengths: Ints, token_budget: int, megabatch_packs: int = MEGABATCH_PACKS) -> int:
    """How many samples of these lengths, [n], a megabatch of `sorted_chunks` holds: so many packs without padding."""
    return max(1, megabatch_packs * token_budget * len(lengths) // int(lengths.sum()))


def sorted_chunks(
    lengths: Ints, token_budget: int, seed: int, epoch: int, *, megabatch_packs: int = MEGABATCH_PACKS
) -> EpochPacks:
    """Shuffle, cut into megabatches worth some packs, sort each, longest first, and cut it into batches."""
    n, chunk = len(lengths), megabatch_samples(lengths, token_budget, megabatch_packs)
    samples = _random_order(n, seed, epoch)
    samples = samples[np.lexsort((-lengths[samples], np.arange(n) // chunk))]
    starts = range(0, n, chunk)
    cuts = [_padded_offsets(lengths[samples[start : start + chunk]], token_budget)[:-1] + start for start in starts]
    return _padded(lengths, samples, np.concatenate([*cuts, [n]]))


def random_padded(lengths: Ints, token_budget: int, seed: int, epoch: int) -> EpochPacks:
    """Samples in random order, padded to the longest of their batch."""
    samples = _random_order(len(lengths), seed, epoch)
    return _padded(lengths, samples, _padded_offsets(lengths[samples], token_budget))


def bucketed(
    lengths: Ints, token_budget: int, seed: int, epoch: int, *, bounds: Sequence[int] | None = None
) -> EpochPacks:
    """Samples in random order within buckets of similar lengths, padded batches of one bucket each, batches shuffled.

    A bucket holds the lengths over one of the ascending `bounds` up to the next; longer ones than the last have a
    bucket of their own. Without bounds, those that waste least on these lengths.
    """
    upper = np.asarray(bucket_bounds(lengths, NUM_BUCKETS) if bounds is None else bounds, dtype=np.int64)
    samples = _random_order(len(lengths), seed, epoch)
    bucket = np.searchsorted(upper, lengths[samples], side="left")
    samples = samples[np.argsort(bucket, kind="stable")]
    ends = np.cumsum(np.bincount(bucket))
    cuts = [
        _padded_offsets(lengths[samples[start:end]], token_budget)[:-1] + start
        for start, end in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True)
        if start < end
    ]
    return _shuffled(_padded(lengths, samples, np.concatenate([*cuts, [len(lengths)]])), seed, epoch)


def bucket_bounds(lengths: Ints, num_buckets: int) -> list[int]:
    """Ascending upper bounds of at most `num_buckets` buckets for which padding to the bound wastes least.

    Dynamic programming over the histogram of lengths: exact for up to 1024 distinct ones, on a grid of as many steps
    for more. The last bound is the longest length.
    """
    longest = int(lengths.max())
    step = 1 if len(np.unique(lengths)) <= _MAX_CANDIDATES else -(-longest // _MAX_CANDIDATES)
    candidates, counts = np.unique(np.minimum(-(-lengths // step) * step, longest), return_counts=True)
    below = np.append(0, np.cumsum(counts))  # samples in the first i candidates
    cost = np.where(np.arange(len(candidates) + 1) > 0, np.iinfo(np.int64).max // 4, 0)  # of the first i, padded
    # slots[i, j]: candidates i..j-1 in one bucket, which pads them to the longest of them.
    slots = (below[None, :] - below[:, None]) * np.append(0, candidates)[None, :]
    slots[np.tril_indices(len(below))] = np.iinfo(np.int64).max // 4
    came_from = []
    for _ in range(min(num_buckets, len(candidates))):
        total = cost[:, None] + slots
        came_from.append(total.argmin(axis=0))
        cost = total.min(axis=0)
    end, bounds = len(candidates), []
    for previous in reversed(came_from):
        bounds.append(int(candidates[end - 1]))
        end = int(previous[end])
    return bounds[::-1]


def next_fit(lengths: Ints, token_budget: int, seed: int, epoch: int) -> EpochPacks:
    """Samples in random order, laid end to end; a pack ends where the next sample would exceed the budget."""
    samples = _random_order(len(lengths), seed, epoch)
    return _unpadded(lengths, samples, _next_fit_offsets(lengths[samples], token_budget))


def global_shuffle(lengths: Ints, token_budget: int, seed: int, epoch: int) -> EpochPacks:
    """The packs of `PackPlan`, before samples are exchanged within a step."""
    plan = PackPlan(lengths, seed=seed, token_budget=token_budget, packs_per_step=1)
    windows = [plan.window_packs(epoch, window) for window in range(plan.num_windows)]
    counts = np.concatenate([np.diff(window.offsets) for window in windows])
    samples = np.concatenate([window.samples for window in windows])
    return _unpadded(lengths, samples, np.append(0, np.cumsum(counts)))


STRATEGIES: Final[dict[str, Strategy]] = {
    "sorted-static": sorted_static,
    "sorted-chunks": sorted_chunks,
    "bucketed": bucketed,
    "bucketed-published": partial(bucketed, bounds=PUBLISHED_BOUNDS),
    "random-padded": random_padded,
    "next-fit": next_fit,
    "global": global_shuffle,
}


def strategy_named(name: str) -> Strategy:
    """A strategy of the registry, or one with numbers: `bucketed:0,770,1216` (bounds), `sorted-chunks:50` (packs).

    Raises ConfigError for an unknown name, and numbers that make no sense.
    """
    if name in STRATEGIES:
        return STRATEGIES[name]
    base, colon, text = name.partition(":")
    if base == "bucketed" and colon:
        return partial(bucketed, bounds=_numbers(name, text))
    if base == "sorted-chunks" and colon:
        numbers = _numbers(name, text)
        if len(numbers) == 1 and numbers[0] >= 1:
            return partial(sorted_chunks, megabatch_packs=numbers[0])
    close = difflib.get_close_matches(name, STRATEGIES, n=1)
    raise ConfigError(
        "There is no such strategy.",
        got=name,
        expected=f"{', '.join(STRATEGIES)}, bucketed:BOUND,BOUND,... or sorted-chunks:PACKS",
        fix=f"did you mean {close[0]}?" if close else None,
    )


def _numbers(name: str, text: str) -> list[int]:
    """Ascending whole numbers between commas. Raises ConfigError for anything else."""
    pieces = text.split(",")
    numbers = [int(piece) for piece in pieces if piece.isdecimal() and len(piece) <= 18]
    if len(numbers) < len(pieces) or numbers != sorted(set(numbers)):
        raise ConfigError(
            "The numbers of a strategy are not ascending whole numbers.",
            got=name,
            expected="for example bucketed:0,512,2048 or sorted-chunks:8",
        )
    return numbers


class StrategyPlan(PackPlan):
    """A `PackPlan` whose packs another strategy makes, for comparisons. Holds the packs of two epochs.

    No samples are exchanged within a step: that would hide what the strategy does.
    """

    balanced = False

    def __init__(
        self,
        strategy: str,
        lengths: NDArray[np.integer],
        *,
        seed: int,
        token_budget: int,
        packs_per_step: int,
        samples: NDArray[np.integer] | None = None,
        identity: bytes = b"",
    ) -> None:
        """Arguments and errors as for `PackPlan`; ConfigError for an unknown strategy."""
        self.strategy = strategy
        self._epoch_packs = strategy_named(strategy)
        super().__init__(
            lengths,
            seed=seed,
            token_budget=token_budget,
            packs_per_step=packs_per_step,
            samples=samples,
            identity=identity,
        )

    @property
    def num_windows(self) -> int:
        """One: the whole epoch."""
        return 1

    def window_range(self, window: int) -> range:
        """All positions."""
        return range(len(self.lengths))

    def _window_packs(self, epoch: int, window: int) -> WindowPacks:
        packs = self._epoch_packs(self.lengths, self.token_budget, self.seed, epoch)
        return WindowPacks(packs.samples, packs.offsets)


def plan_for(
    strategy: str,
    lengths: NDArray[np.integer],
    *,
    seed: int,
    token_budget: int,
    packs_per_step: int,
    samples: NDArray[np.integer] | None = None,
    supervised: NDArray[np.integer] | None = None,
    identity: bytes = b"",
) -> PackPlan:
    """The plan of a named strategy; only "global" balances the packs of a step, and looks at `supervised`.

    Raises ConfigError as `PackPlan` does, and for an unknown strategy.
    """
    if strategy == PackPlan.strategy:
        return PackPlan(
            lengths,
            seed=seed,
            token_budget=token_budget,
            packs_per_step=packs_per_step,
            samples=samples,
            supervised=supervised,
            identity=identity,
        )
    return StrategyPlan(
        strategy,
        lengths,
        seed=seed,
        token_budget=token_budget,
        packs_per_step=packs_per_step,
        samples=samples,
        identity=identity,
    )
