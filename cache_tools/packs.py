"""Packs: whole samples laid end to end under a token budget, in an order that is a true global shuffle.

An epoch is a keyed permutation of the samples, cut into windows of 32,768 positions. Every window is cut
into packs of nearly equal token counts, then single samples are exchanged between packs until each obeys the
budget. Few samples move, none by its length alone, so a pack is what sampling at random would give; sorting by
length, or the usual bin packing which does the same in disguise, is 20 times further from that. The packs of a
window come in random order. With 25 samples in a pack no test tells the packs from random ones; with 4 to 6 their
mean lengths vary up to 8 % less than those of next-fit do.

Everything is integer arithmetic on (lengths, seed, epoch, token budget): the same on every machine, on every
rank, and whatever the number of ranks. NumPy over all packs of a window at once, not compiled code: an epoch
of 900,000 samples takes 0.15 s, without a compiler to install or to wait for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from hashlib import blake2b
from math import ceil
from typing import ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from cache_tools.balance import balance_step
from cache_tools.errors import ConfigError
from cache_tools.order import Permutation, mix64

Ints = NDArray[np.int64]

PACKER_VERSION: Final = 3
WINDOW: Final = 32_768
_PACK_ORDER_KEY: Final = 0x7061636B73  # separates the order of packs from the order of samples
_SLACK_PER_10000: Final = 4  # unused share of the budget that the cut aims for: the room in which repair works
_MAX_TOKEN_BUDGET: Final = 1 << 28
_MAX_MOVABLE: Final = 64
_MAX_PARTNERS: Final = 8  # with one, packs of four samples stay at 97 % of the budget instead of 99.8 %
_MAX_ROUNDS: Final = 400
_MAX_STALLED_ROUNDS: Final = 24
_MAX_CUTS: Final = 4
_EXCHANGES_AT_ONCE: Final = 1 << 18  # bounds the working set of repair; 1 MB stays in the cache


@dataclass(frozen=True)
class WindowPacks:
    """The packs of one window: pack i is `samples[offsets[i]:offsets[i + 1]]`, each in stream order."""

    samples: Ints  # [samples of the window] indices into the plan's lengths
    offsets: Ints  # [num_packs + 1]

    @property
    def num_packs(self) -> int:
        return len(self.offsets) - 1

    def pack(self, index: int) -> Ints:
        """Indices of one pack."""
        return self.samples[self.offsets[index] : self.offsets[index + 1]]


@dataclass(frozen=True, kw_only=True)
class PackCursor:
    """Where the endless sequence of packs continues: `step` begins with pack `pack` of that window and epoch."""

    step: int = 0
    epoch: int = 0
    window: int = 0
    pack: int = 0


class PackPlan:
    """The endless sequence of packs, epoch after epoch, and its cut into steps of `packs_per_step` packs.

    Holds the lengths and the two windows used last; the order itself takes no memory.
    """

    strategy: str = "global"
    balanced: ClassVar[bool] = True  # whether samples are exchanged between the packs of a step

    def __init__(
        self,
        lengths: NDArray[np.integer],
        *,
        seed: int,
        token_budget: int,
        packs_per_step: int,
        samples: NDArray[np.integer] | None = None,
        supervised: NDArray[np.integer] | None = None,
        identity: bytes = b"",
    ) -> None:
        """
        Args:
            lengths: tokens of each sample, [n], all >= 1.
            token_budget: most tokens in a pack.
            packs_per_step: packs of one optimizer step, over all ranks.
            samples: number of each sample where they are not 0..n-1, [n]; a number may come several times.
            supervised: supervised tokens of each sample, to balance the packs of a step, [n].
            identity: what else the fingerprint shall cover, such as the samples' content ids.

        Raises:
            ConfigError: no samples, a sample longer than the budget (named), or a number out of range.
        """
        self.lengths: Ints = np.ascontiguousarray(lengths, dtype=np.int64)
        self._samples = None if samples is None else np.ascontiguousarray(samples, dtype=np.int64)
        assert self._samples is None or self._samples.shape == self.lengths.shape
        self._supervised = None if supervised is None else np.ascontiguousarray(supervised, dtype=np.int64)
        assert self._supervised is None or self._supervised.shape == self.lengths.shape
        self.seed, self.token_budget, self.packs_per_step = seed, token_budget, packs_per_step
        self._check()
        digest = blake2b(self.lengths.astype("<i8").tobytes(), digest_size=16)
        for name, column in (("samples", self._samples), ("supervised", self._supervised)):
            if column is not None:
                digest.update(name.encode() + column.astype("<i8").tobytes())
        digest.update(identity)
        self.fingerprint = digest.hexdigest()
        self.window_packs = lru_cache(maxsize=2)(self._window_packs)

    def _check(self) -> None:
        if not 1 <= self.token_budget < _MAX_TOKEN_BUDGET:
            raise ConfigError(
                "The token budget of a pack is out of range.",
                got=self.token_budget,
                expected=f"1 to {_MAX_TOKEN_BUDGET - 1} tokens",
            )
        if self.packs_per_step < 1:
            raise ConfigError("A step needs at least one pack.", got=self.packs_per_step, expected=">= 1")
        if not len(self.lengths):
            raise ConfigError("There are no samples to train on.", got=0, expected="at least one sample")
        assert self.lengths.min() >= 1
        longest = int(self.lengths.argmax())
        if self.lengths[longest] > self.token_budget:
            raise ConfigError(
                f"Sample {self._numbers(np.array([longest]))[0]} does not fit into a pack.",
                got=f"{self.lengths[longest]} tokens",
                expected=f"at most the token budget of {self.token_budget}",
                fix="raise the token budget, or plan the store with a smaller maximum length",
            )

    def _numbers(self, indices: Ints) -> Ints:
        """Sample numbers of indices into `lengths`."""
        return indices if self._samples is None else self._samples[indices]

    @property
    def num_windows(self) -> int:
        """Windows of an epoch; the last one also holds the samples that fill no window of their own."""
        return max(1, len(self.lengths) // WINDOW)

    def window_range(self, window: int) -> range:
        """Stream positions of a window, [first, last exclusive)."""
        last = len(self.lengths) if window == self.num_windows - 1 else (window + 1) * WINDOW
        return range(window * WINDOW, last)

    def _window_packs(self, epoch: int, window: int) -> WindowPacks:
        """The packs of one window, computed from nothing but its own samples. Cached as `window_packs`."""
        positions = self.window_range(window)
        order = Permutation(len(self.lengths), seed=self.seed, epoch=epoch)
        stream = order(np.arange(positions.start, positions.stop))
        pack_of = assign_packs(self.lengths[stream], self.token_budget)
        # Neighbours share what the cut between them split: of packs of four samples they are a little alike (0.04).
        num_packs = int(pack_of.max()) + 1
        place = Permutation(num_packs, seed=mix64(_PACK_ORDER_KEY, self.seed, window), epoch=epoch)(
            np.arange(num_packs)
        )
        pack_of = place[pack_of]
        offsets = np.concatenate([[0], np.cumsum(np.bincount(pack_of))]).astype(np.int64)
        return WindowPacks(stream[np.argsort(pack_of, kind="stable")], offsets)

    def step(self, cursor: PackCursor) -> tuple[list[Ints], PackCursor]:
        """The sample numbers of the `packs_per_step` packs of the cursor's step, and the cursor of the next step.

        A step may reach into the next epochs, so that no pack is ever dropped or repeated.
        """
        packs: list[Ints] = []
        epoch, window, index = cursor.epoch, cursor.window, cursor.pack
        while True:
            here = self.window_packs(epoch, window)
            taken = min(here.num_packs - index, self.packs_per_step - len(packs))
            packs += [here.pack(i) for i in range(index, index + taken)]
            index += taken
            if index == here.num_packs:
                window, index = window + 1, 0
                if window == self.num_windows:
                    epoch, window = epoch + 1, 0
            if len(packs) == self.packs_per_step:
                if self.balanced:
                    packs = balance_step(packs, self.lengths, self.token_budget, self._supervised)
                following = PackCursor(step=cursor.step + 1, epoch=epoch, window=window, pack=index)
                return [self._numbers(pack) for pack in packs], following

    def epochs_done(self, cursor: PackCursor) -> float:
        """Epochs consumed before the cursor, fractional, for display."""
        positions = self.window_range(cursor.window)
        share = cursor.pack / self.window_packs(cursor.epoch, cursor.window).num_packs
        return cursor.epoch + (positions.start + share * len(positions)) / len(self.lengths)

    def num_steps(self, epochs: float) -> int:
        """Steps that cover so many epochs; a last step that reaches beyond them counts.

        Counts the packs of every epoch, which differ by a few: about 0.15 s an epoch of a million samples.
        """
        num_packs = 0.0
        for epoch in range(ceil(epochs)):
            in_epoch = sum(self.window_packs(epoch, window).num_packs for window in range(self.num_windows))
            num_packs += in_epoch * min(1.0, epochs - epoch)
        return ceil(num_packs / self.packs_per_step)

    def state(self, cursor: PackCursor) -> dict[str, int | str]:
        """The cursor and what it is valid for, ready for JSON; under 1 kB."""
        return asdict(cursor) | self._identity()

    def _identity(self) -> dict[str, int | str]:
        return {
            "packer_version": PACKER_VERSION,
            "strategy": self.strategy,
            "seed": self.seed,
            "token_budget": self.token_budget,
            "packs_per_step": self.packs_per_step,
            "fingerprint": self.fingerprint,
        }

    def resume(self, state: Mapping[str, int | str]) -> PackCursor:
        """The cursor in `state`, a value of `state()`.

        Raises:
            ConfigError: the state belongs to other samples or settings; names each field that differs.
        """
        differing = [name for name, now in self._identity().items() if state.get(name) != now]
        if differing:
            now = self._identity()
            raise ConfigError(
                f"The saved data position belongs to another data order: {', '.join(differing)} differ.",
                got=", ".join(f"{name}={now[name]}" for name in differing),
                expected=", ".join(f"{name}={state.get(name)}" for name in differing),
                fix="resume with the samples and settings that the run began with, or start a new run",
            )
        return PackCursor(**{name: int(state[name]) for name in asdict(PackCursor())})


def assign_packs(lengths: Ints, token_budget: int) -> Ints:
    """Pack number of each sample of a window, numbered from 0 without gaps; no pack exceeds the budget.

    `lengths`: tokens in stream order, [n], n >= 1, each in 1..token_budget. Starts from the smallest number of
    packs that leaves the slack; lengths that do not fit into so few get more. Where there are only a few distinct
    lengths, being full dictates the mixture: with 500 and 6,000 packs vary as random ones that happen to be full do.
    """
    aim = max(1, token_budget * (10_000 - _SLACK_PER_10000) // 10_000)
    num_packs = -(-int(lengths.sum()) // aim) if lengths.sum() > token_budget else 1
    for _ in range(_MAX_CUTS):
        pack_of = _cut(lengths, num_packs)
        if _repair(lengths, pack_of, num_packs, token_budget):
            break
        # Evict what is too much into packs of its own; then spread the room they bring over the whole window.
        num_packs += _evict(lengths, pack_of, num_packs, token_budget)
    return np.unique(pack_of, return_inverse=True)[1].astype(np.int64)


def _cut(lengths: Ints, num_packs: int) -> Ints:
    """Cut the stream into equal token counts; a sample goes where its middle falls."""
    total = int(lengths.sum())
    doubled_middle = 2 * np.cumsum(lengths) - lengths
    return doubled_middle * num_packs // (2 * total)


def _repair(lengths: Ints, pack_of: Ints, num_packs: int, token_budget: int) -> bool:
    """Exchange single samples between packs until none is over the budget; changes `pack_of`. False if stuck.

    In each round all packs over the budget, heaviest first, meet disjoint partners, lightest first. Each does the
    one exchange of two samples, or move of one, that leaves the lowest maximum, if that lowers the tokens over
    the budget; so the rounds end. A round without success shifts the partners by one.
    """
    members = _movable(pack_of, num_packs)  # [num_packs, slots] index into lengths, -1 = empty slot
    sizes = np.where(members >= 0, lengths[members], 0).astype(np.int32)
    loads = _loads(lengths, pack_of, num_packs)
    num_stalled = 0
    for _ in range(_MAX_ROUNDS):
        by_load = np.argsort(-loads, kind="stable")
        num_over = int(np.count_nonzero(loads > token_budget))
        if num_over == 0:
            return True
        num_pairs = min(num_over, num_packs - num_over)
        if num_pairs == 0 or num_stalled == _MAX_STALLED_ROUNDS:
            return False
        light_first = np.roll(by_load[num_over:][::-1], -num_stalled)
        num_partners = min(_MAX_PARTNERS, len(light_first) // num_pairs)
        heavy = by_load[:num_pairs]
        partners = light_first[: num_partners * num_pairs].reshape(num_partners, num_pairs).T
        partner, heavy_slot, light_slot = _best_exchange(sizes[heavy], sizes[partners], loads[heavy], loads[partners])
        light = partners[np.arange(num_pairs), partner]
        moved = (sizes[heavy, heavy_slot] - sizes[light, light_slot]).astype(np.int64)
        over_now = np.maximum(loads[heavy] - moved, token_budget) + np.maximum(loads[light] + moved, token_budget)
        chosen = np.flatnonzero(over_now < loads[heavy] + token_budget)
        num_stalled = 0 if chosen.size else num_stalled + 1
        heavy, light, heavy_slot, light_slot = (x[chosen] for x in (heavy, light, heavy_slot, light_slot))
        for table in (sizes, members):
            swapped = table[heavy, heavy_slot]
            table[heavy, heavy_slot] = table[light, light_slot]
            table[light, light_slot] = swapped
        loads[heavy] -= moved[chosen]
        loads[light] += moved[chosen]
        for packs, slots in ((heavy, heavy_slot), (light, light_slot)):
            index = members[packs, slots]
            pack_of[index[index >= 0]] = packs[index >= 0]
    return False


def _loads(lengths: Ints, pack_of: Ints, num_packs: int) -> Ints:
    """Tokens in each pack, [num_packs]."""
    loads = np.zeros(num_packs, dtype=np.int64)
    np.add.at(loads, pack_of, lengths)
    return loads


def _movable(pack_of: Ints, num_packs: int) -> Ints:
    """Table [num_packs, slots] of the samples that may be exchanged, -1 where empty; `pack_of` ascending.

    Of a pack with very many samples only the first and the last count: they include the two that straddle its
    borders, and what is over the budget is never more than half of each.
    """
    counts = np.bincount(pack_of, minlength=num_packs)
    rank = np.arange(len(pack_of)) - (np.cumsum(counts) - counts)[pack_of]
    from_end = counts[pack_of] - rank
    in_second_half = (counts[pack_of] > _MAX_MOVABLE) & (rank >= _MAX_MOVABLE // 2)
    slot = np.where(in_second_half, _MAX_MOVABLE - from_end, rank)
    movable = np.flatnonzero(~in_second_half | (slot >= _MAX_MOVABLE // 2))
    table = np.full((num_packs, min(int(counts.max()), _MAX_MOVABLE) + 1), -1, dtype=np.int64)
    table[pack_of[movable], slot[movable]] = movable
    return table


def _best_exchange(
    heavy: NDArray[np.int32], light: NDArray[np.int32], heavy_load: Ints, light_load: Ints
) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]]:
    """For each heavy pack the partner, its own slot and the partner's whose exchange leaves the lowest maximum.

    heavy: sample sizes [packs, slots], 0 = nothing. light: [packs, partners, slots]. Loads: [packs] and
    [packs, partners]. Returns three arrays of indices, [packs] each.
    """
    num_packs, num_partners, num_slots = light.shape
    best = np.empty(num_packs, dtype=np.intp)
    rows = max(1, _EXCHANGES_AT_ONCE // (num_partners * num_slots**2))
    for i in range(0, num_packs, rows):
        part = slice(i, i + rows)
        gap = (heavy_load[part, None] - light_load[part]).astype(np.int32)
        # Twice the larger load afterwards, less the heavy pack's load now, is the partner's load + |2 * moved - gap|.
        larger = 2 * heavy[part, None, :, None] - (2 * light[part] + gap[:, :, None])[:, :, None, :]
        np.abs(larger, out=larger)
        if num_partners > 1:
            larger += light_load[part, :, None, None].astype(np.int32)
        best[part] = larger.reshape(len(larger), -1).argmin(axis=1)
    partner, heavy_slot, light_slot = np.unravel_index(best, (num_partners, num_slots, num_slots))
    return partner, heavy_slot, light_slot


def _evict(lengths: Ints, pack_of: Ints, num_packs: int, token_budget: int) -> int:
    """Move as little as obeys the budget from each overfull pack to new packs; returns how many are new."""
    loads = _loads(lengths, pack_of, num_packs)
    by_pack = np.argsort(pack_of, kind="stable")
    ends = np.cumsum(np.bincount(pack_of, minlength=num_packs))
    evicted: list[int] = []
    for pack in np.flatnonzero(loads > token_budget):
        members = by_pack[ends[pack - 1] if pack else 0 : ends[pack]]
        excess = int(loads[pack]) - token_budget
        while excess > 0:
            sizes = lengths[members]
            enough = sizes >= excess
            choice = int(np.where(enough, sizes, sizes.max() + 1).argmin() if enough.any() else sizes.argmax())
            evicted.append(int(members[choice]))
            excess -= int(sizes[choice])
            members = np.delete(members, choice)
    num_new, load = 0, token_budget
    for index in evicted:
        size = int(lengths[index])
        if load + size > token_budget:
            num_new, load = num_new + 1, 0
        pack_of[index] = num_packs + num_new - 1
        load += size
    return num_new
