"""Exchange of samples between the packs of one step, so that every pack costs the same.

Attention costs sum(L^2) of a pack's sample lengths, which varies a lot between packs of equally many tokens. One long
sample goes to another pack for two shorter ones of the same total: tokens stay, sum(L^2) moves. Before that the tokens
themselves are evened out, afterwards supervised tokens, the same way and without giving up what was reached. The set of
samples of the step does not change, so neither does what the optimizer sees. Integers only, nothing depends on the
number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

_MAX_SLOTS: Final = 24  # samples of a pack that are looked at; 24 x 300 exchanges for each pair of packs
_MAX_ROUNDS: Final = 32
_MAX_PARTNERS: Final = 4
_MAX_STALLED_ROUNDS: Final = 4
# mean / max in 1/10,000 at which a quantity counts as balanced, and what the stages after its own must leave of that.
_GOOD_TOKENS, _KEPT_TOKENS = 9998, 9994
_GOOD_SQUARES, _KEPT_SQUARES = 9980, 9940
_GOOD_SUPERVISED: Final = 9980


@dataclass(frozen=True)
class _Exchange:
    """Samples that change places: `gives[i]` of pack `from_[i]` against `takes[i]` of pack `to[i]`; -1 = none."""

    from_: Ints  # [chosen]
    to: Ints  # [chosen]
    gives: Ints  # [chosen] index of a sample
    takes: Ints  # [chosen, 2] indices of samples


class _Step:
    """The samples of one step and the pack each of them is in."""

    def __init__(self, packs: Sequence[Ints], lengths: Ints, token_budget: int) -> None:
        """`packs`: arrays of indices into the plan; `lengths`: tokens of each sample, pack after pack."""
        self.num_packs, self.token_limit = len(packs), token_budget
        self.lengths, self.squares = lengths, lengths * lengths
        self.pack_of = np.repeat(np.arange(self.num_packs), [len(pack) for pack in packs])

    def totals(self, values: Ints) -> Ints:
        """Sum of `values` [samples] over each pack, [num_packs]."""
        totals = np.zeros(self.num_packs, dtype=np.int64)
        np.add.at(totals, self.pack_of, values)
        return totals

    def table(self) -> Ints:
        """[num_packs, slots + 1] samples of each pack, longest first, -1 = empty; the last slot is always empty.

        Of a pack with very many samples, evenly spread ones.
        """
        by_pack = np.lexsort((-self.lengths, self.pack_of))
        counts = np.bincount(self.pack_of, minlength=self.num_packs)
        used = np.minimum(counts, _MAX_SLOTS)[:, None]
        slot = np.arange(int(used.max()) + 1)
        place = (np.cumsum(counts) - counts)[:, None] + slot * counts[:, None] // used
        return np.where(slot < used, by_pack[np.minimum(place, len(by_pack) - 1)], -1)

    def apply(self, exchange: _Exchange) -> None:
        self.pack_of[exchange.gives] = exchange.to
        for i in range(2):
            real = exchange.takes[:, i] >= 0
            self.pack_of[exchange.takes[real, i]] = exchange.from_[real]


def balance_step(packs: Sequence[Ints], lengths: Ints, token_budget: int, supervised: Ints | None = None) -> list[Ints]:
    """The same samples in packs of nearly equal sum(L^2), then of nearly equal supervised tokens.

    Args:
        packs: indices into `lengths`, one non-empty array per pack; none over the budget.
        lengths: tokens of every sample of the plan.
        token_budget: most tokens in a pack, before and after.
        supervised: supervised tokens of every sample of the plan.

    Returns as many packs; within each, samples stand in the order of the concatenated input.
    """
    if len(packs) < 2:
        return list(packs)
    flat = np.concatenate(packs)
    step = _Step(packs, lengths[flat], token_budget)
    _balance(step, step.lengths, _GOOD_TOKENS)
    step.token_limit = min(token_budget, _limit(step.totals(step.lengths), _KEPT_TOKENS))
    _balance(step, step.squares, _GOOD_SQUARES)
    if supervised is not None:
        _balance(step, supervised[flat].astype(np.int64), _GOOD_SUPERVISED, kept=step.squares)
    by_pack = np.argsort(step.pack_of, kind="stable")
    ends = np.cumsum(np.bincount(step.pack_of, minlength=step.num_packs))
    return np.split(flat[by_pack], ends[:-1])


def _balance(step: _Step, values: Ints, good: int, kept: Ints | None = None) -> None:
    """Even out the packs' sums of `values` [samples] by rounds of exchanges.

    In each round all packs above what is good, heaviest first, meet disjoint partners, lightest first, and do the one
    exchange that leaves the lowest maximum. Ends at a mean / max of `good` / 10,000. With `kept`, the squares, no
    pack's sum of those rises over what counts as balanced, or over the largest so far.
    """
    num_stalled = 0
    limit = _limit(step.totals(kept), _KEPT_SQUARES) if kept is not None else 0
    for turn in range(_MAX_ROUNDS):
        totals = step.totals(values)
        num_heavy = int(np.count_nonzero(totals > int(totals.sum()) * 10_000 // (good * step.num_packs)))
        num_heavy = min(num_heavy, step.num_packs - num_heavy)
        if num_heavy == 0 or num_stalled == _MAX_STALLED_ROUNDS:
            return
        by_total = np.argsort(-totals, kind="stable")
        light_first = np.roll(by_total[num_heavy:][::-1], -num_stalled)
        num_partners = min(_MAX_PARTNERS, len(light_first) // num_heavy)
        heavy, light = np.tile(by_total[:num_heavy], num_partners), light_first[: num_partners * num_heavy]
        # One long sample has a larger square than two short ones, but may have fewer of other values.
        given_by_heavy = 2 if values is not step.squares and turn % 2 else 1
        exchange = _best_exchanges(step, heavy, light, given_by_heavy, values, totals, kept, limit)
        num_stalled = 0 if len(exchange.gives) else num_stalled + 1
        step.apply(exchange)


def _limit(totals: Ints, mean_per_max: int) -> int:
    """What no pack's total may exceed, so that mean / max stays at that many 1/10,000, or gets no worse."""
    return max(int(totals.max()), int(totals.sum()) * 10_000 // (mean_per_max * len(totals)))


def _best_exchanges(
    step: _Step,
    heavy: Ints,
    light: Ints,
    given_by_heavy: int,
    values: Ints,
    totals: Ints,
    kept: Ints | None,
    limit: int,
) -> _Exchange:
    """For each heavy pack the exchange, with one of its partners, of one sample for one or two that evens values most.

    heavy, light: pack numbers, [pairs]; a heavy pack may be in several pairs, a light one in one. The heavy pack gives
    one sample, or up to two. Heavy packs for which nothing helps are left out.
    """
    one, two = (heavy, light) if given_by_heavy == 1 else (light, heavy)
    table, loads = step.table(), step.totals(step.lengths)
    first, second = np.triu_indices(table.shape[1], 1)  # the second may be the empty slot, the first never
    single, double = table[one, :-1], table[two]
    lengths, values = np.append(step.lengths, 0), np.append(values, 0)  # sample -1, the empty slot, counts nothing
    moved = lengths[single][:, :, None] - (lengths[double[:, first]] + lengths[double[:, second]])[:, None, :]
    fits = (moved <= (step.token_limit - loads[two])[:, None, None]) & (
        moved >= (loads[one] - step.token_limit)[:, None, None]
    )
    fits &= (single >= 0)[:, :, None] & (double[:, first] >= 0)[:, None, :]
    pair, i, j = np.nonzero(fits)
    gives, takes = single[pair, i], np.stack([double[pair, first[j]], double[pair, second[j]]], axis=1)
    change = values[gives] - values[takes].sum(axis=1)
    gap = (totals[heavy] - totals[light])[pair]
    unevenness = np.abs(2 * (change if given_by_heavy == 1 else -change) - gap)
    useful = unevenness < gap
    if kept is not None:
        kept_totals, kept = step.totals(kept), np.append(kept, 0)
        kept_change = kept[gives] - kept[takes].sum(axis=1)
        useful &= kept_totals[two][pair] + kept_change <= limit
        useful &= kept_totals[one][pair] - kept_change <= limit
    chosen = np.flatnonzero(useful)
    score = totals[light][pair] + unevenness  # twice the larger total afterwards, less the heavy pack's now
    chosen = chosen[np.lexsort((score[chosen], heavy[pair[chosen]]))]
    best = chosen[np.unique(heavy[pair[chosen]], return_index=True)[1]]
    return _Exchange(one[pair[best]], two[pair[best]], gives[best], takes[best])
